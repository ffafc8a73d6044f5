"""Files of whole networks: a convolution among other operators, on kernels of the file's own."""

from __future__ import annotations

import functools
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from convt3d.cuda.schedule import Gpu
from convt3d.export import (
    ExportError,
    Layer,
    Network,
    export_network,
    layer_or_network,
    network_of,
)
from convt3d.export.network import loops
from convt3d.export.network.reading import CONVOLVED
from convt3d.export.network.writer import NetworkText
from convt3d.export.tidy import oracle
from convt3d.fusion import Fusion
from emulator import build, harness
from support.exported import check_binding, check_static_rules, load, nvcc

PROBLEMS = Path(__file__).parent.parent / "kernelbench" / "problems" / "level2"

# Inputs that are small, with what the problems have in them: channels, and rows that norms need.
SIZES = {
    3: ["2, 32, 2, 2, 32"],
    6: ["2, 3, 7, 8, 10"],
    7: ["2, 8, 4, 5, 6"],
    8: ["2, 8, 7, 8, 10"],
    13: ["2, 16, 4, 5, 6"],
    15: ["3, 16, 4, 5, 6"],
    20: ["2, 32, 2, 3, 4"],
    23: ["3, 3, 8, 9, 10"],
    24: ["2, 3, 8, 9, 10"],
    26: ["2, 32, 2, 3, 4", "2, 64, 4, 6, 8"],
    27: ["3, 3, 8, 9, 10"],
    34: ["2, 32, 2, 3, 32"],
    38: ["2, 32, 4, 6, 8"],
    43: ["2, 32, 4, 5, 6"],
    47: ["2, 32, 4, 5, 6"],
    48: ["2, 3, 4, 5, 6"],
    49: ["2, 32, 2, 3, 5"],
    50: ["2, 3, 4, 5, 6"],
    58: ["2, 3, 4, 5, 6"],
    60: ["2, 3, 4, 5, 6"],
    61: ["2, 64, 3, 4, 5"],
    72: ["2, 3, 4, 5, 6"],
    74: ["2, 16, 3, 4, 5"],
    77: ["2, 64, 3, 4, 5"],
    78: ["2, 32, 7, 8, 10"],
    79: ["2, 3, 8, 9, 10"],
    89: ["2, 3, 4, 5, 6"],
    90: ["2, 8, 4, 5, 6"],
    96: ["2, 3, 4, 5, 6"],
    100: ["2, 64, 2, 3, 4"],
}
JOINED = {20, 47, 48, 90, 100}
"""Problems all of whose operators run in the epilogue of their convolution."""
OFTEN = {13, 15, 34, 38, 49, 72}

# What kernels use of CUDA's library beyond the emulator's vocabulary.
_LIBRARY = """
#define INFINITY __builtin_huge_valf()
inline float logf(float x) { return __builtin_logf(x); }
inline float sqrtf(float x) { return __builtin_sqrtf(x); }
inline float rsqrtf(float x) { return 1.f / __builtin_sqrtf(x); }
"""


def small(number: int, folder: Path) -> Path:
    """A problem's file with small inputs."""
    text = (PROBLEMS / f"l2_{number}.py").read_text()
    inputs = ", ".join(f"torch.rand({size})" for size in SIZES[number])
    path = folder / f"l2_{number}.py"
    path.write_text(f"{text}\n\ndef get_inputs():\n    return [{inputs}]\n")
    return path


def emulated(made: NetworkText, tensors: dict[str, Tensor], convolve: Any) -> dict[str, Tensor]:
    """Run the kernels around the convolution, and ``convolve`` in its place."""
    tensors = dict(tensors)
    for name, count in made.program.tensors.items():
        tensors[name] = torch.full((count,), torch.nan)
    text = _LIBRARY + made.kernels()
    kernels = made.program.kernels
    for kernel in kernels[: made.kernels_before]:
        launch(kernel, text, tensors)
    convolved = convolve(tensors[made.before])
    result = convolved if made.after == CONVOLVED else tensors[made.after]
    tensors |= {CONVOLVED: convolved.contiguous(), "result": result}
    for kernel in kernels[made.kernels_before :]:
        launch(kernel, text, tensors)
    return tensors


def launch(kernel: loops.Kernel, text: str, tensors: dict[str, Tensor]) -> None:
    arguments = [tensors[tensor] for tensor in kernel.tensors]
    harness.launch(
        f"convt3d_{kernel.name}", text, {}, kernel.grid, loops.THREADS, 0, arguments, order=7
    )


@pytest.mark.sample
@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[] if n in OFTEN else [pytest.mark.more]) for n in SIZES]
)
def test_numbers(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's kernels compute what the Model does, and update the buffers that it updates."""
    monkeypatch.setattr(loops, "_PER_CHUNK", 2 * loops.THREADS)  # several chunks of a slice
    path = small(number, tmp_path)
    names = runpy.run_path(str(path))
    made = NetworkText(network_of(path), Gpu(), tidy=False)
    torch.manual_seed(number)
    model, inputs = names["Model"](*names["get_init_inputs"]()), names["get_inputs"]()
    state = {name: t.detach().clone() for name, t in model.state_dict().items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # other factors than one, other summands than zero
                parameter += torch.rand_like(parameter)
                state[name] = parameter.clone()
        want = model(*inputs)
    tensors = {name.replace(".", "_"): tensor for name, tensor in state.items()}
    tensors |= {name: x for (name, _), x in zip(made.network.inputs, inputs, strict=True)}
    layer = next(m for m in model.children() if "Conv" in type(m).__name__)

    def convolve(source: Tensor) -> Tensor:
        size = made.reading.convolution.args[0].meta["val"].shape  # type: ignore[union-attr]
        with torch.no_grad():
            output = layer(source.view(size))
        operands = [tensors[made.named[o]] for _, o in made.reading.steps if o is not None]
        steps = (
            Fusion(tuple(step for step, _ in made.reading.steps)) if made.reading.steps else None
        )
        flat = [o.flatten() if o.numel() == output.shape[1] else o for o in operands]
        return output if steps is None else steps.apply(output, flat)

    after = emulated(made, tensors, convolve)
    got = after["result"].view(want.shape)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-5)
    assert bool(made.program.kernels) != (number in JOINED)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(after[name.replace(".", "_")].view(buffer.shape), buffer)


# ---------------------------------------------------------------- what is refused

PROBLEM = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.ConvTranspose3d(channels, 8, 3, stride=2)
        self.norm = nn.BatchNorm3d(8)
        self.factor = nn.Parameter(torch.randn(8, 1, 1, 1))

    def forward(self, x):
        return self.conv(x) * self.factor

def get_inputs():
    return [torch.rand(2, 4, 5, 6, 7)]

def get_init_inputs():
    return [4]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("* self.factor", ".cumsum(2)", "no kernel computes aten.cumsum"),
        ("* self.factor", ".sum((0, 1))", "no kernel reduces over samples"),
        ("return self.conv(x)", "return nn.functional.dropout(self.conv(x))", "random numbers"),
        ("* self.factor", "+ self.conv(x)", "runs 2 convolutions, not one"),
        ("* self.factor", "@ x", "does not run: RuntimeError"),
        ("return self.conv(x)", "return 1, self.conv(x)", "must return one tensor"),
        ("self.conv(x) *", "nn.functional.max_pool3d(self.conv(x), 3, padding=1) *", "padding"),
        ("self.conv(x) * self.factor", "self.conv(x).max(1)[1]", "no kernel computes result 1"),
        ("self.conv(x)", "self.norm.eval()(self.conv(x))", "running statistics"),
        ("torch.randn(8, 1, 1, 1)", "torch.arange(8.0).view(8, 1, 1, 1)", "initial values"),
        ("torch.randn(8, 1, 1, 1)", "torch.poisson(torch.ones(8))", "draws by poisson"),
        ("nn.ConvTranspose3d(channels, 8, 3, stride=2)", "nn.Conv3d(channels, 8, 3, stride=2)",
         "a strided or grouped Conv3d"),
    ],
)  # fmt: skip
def test_what_no_kernel_computes_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in PROBLEM
    path = tmp_path / "problem.py"
    path.write_text(PROBLEM.replace(old, new))
    with pytest.raises(ExportError, match=re.escape(message)):
        export_network(network_of(path))


def test_one_layer_alone_is_a_layer(tmp_path: Path) -> None:
    path = tmp_path / "problem.py"
    path.write_text(PROBLEM)
    assert isinstance(layer_or_network(path), Network)
    alone = re.sub(r" +self\.(norm|factor) = .*\n", "", PROBLEM).replace(" * self.factor", "")
    path.write_text(alone)
    assert isinstance(layer_or_network(path), Layer)


@pytest.mark.parametrize("bias, kind", [(True, Network), (False, Layer)])
def test_a_layer_whose_kernels_add_no_bias_is_a_network(
    bias: bool, kind: type, tmp_path: Path
) -> None:
    path = tmp_path / "problem.py"
    alone = re.sub(r" +self\.(norm|factor) = .*\n", "", PROBLEM).replace(" * self.factor", "")
    made = f"nn.Conv3d(channels, 8, 3, stride=2, bias={bias})"
    path.write_text(re.sub(r"nn\.ConvTranspose3d\(.*?\)", made, alone))
    assert isinstance(layer_or_network(path), kind)


# ---------------------------------------------------------------- files


@functools.cache
def exported(number: int) -> str:
    return export_network(network_of(PROBLEMS / f"l2_{number}.py")).text


def names_of(number: int) -> dict[str, Any]:
    """What is defined where problem and file are executed among the same names."""
    names: dict[str, Any] = {}
    exec((PROBLEMS / f"l2_{number}.py").read_text(), names)
    return load(exported(number), names)


@pytest.mark.parametrize("number", sorted(OFTEN))
def test_constructor_is_the_models(number: int) -> None:
    names = names_of(number)
    arguments = names["get_init_inputs"]()
    states, behind = [], []
    for name in ("Model", "ModelNew"):
        torch.manual_seed(42)
        model = names[name](*arguments)
        behind.append(torch.rand(1))
        states.append(model.state_dict())
        states[-1]["parameters"] = [key for key, _ in model.named_parameters()]
    assert list(states[0]) == list(states[1])
    assert states[0].pop("parameters") == states[1].pop("parameters")
    for key, tensor in states[0].items():
        assert tensor.dtype == states[1][key].dtype
        assert torch.equal(tensor, states[1][key])
    assert torch.equal(*behind)  # as many random numbers were drawn
    with pytest.raises(ValueError, match="were generated for in_channels="):
        names["ModelNew"](arguments[0] + 1, *arguments[1:])
    with pytest.raises(TypeError, match="runs float32 CUDA tensors"):
        names["ModelNew"](*arguments)(torch.rand(1, arguments[0], 4, 4, 4))


@pytest.mark.parametrize("number", sorted(OFTEN))
def test_static_rules(number: int) -> None:
    check_static_rules(exported(number))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[] if n == 38 else [pytest.mark.more]) for n in sorted(SIZES)],
)
def test_kernels_around_compile(number: int, tmp_path: Path) -> None:
    names = names_of(number)
    kernels = {key: v for key, v in names["KERNELS"].items() if key == "around"}
    if number in JOINED:
        assert not kernels
        return
    source = "namespace convt3d {}\n" + names["specialise"]("around", *kernels["around"])
    assert compiled(source, tmp_path, names["architecture_flags"]()) == ""


@pytest.mark.more
@pytest.mark.parametrize("number", [15, 38, 47, 100])
def test_cuda_source_compiles(number: int, tmp_path: Path) -> None:
    names = names_of(number)
    assert compiled(names["cuda_source"](), tmp_path, names["architecture_flags"]()) == ""


def compiled(source: str, folder: Path, flags: list[str]) -> str:
    """What nvcc says, which must not be an error."""
    file = folder / "cuda.cu"
    file.write_text(source)
    command = [nvcc(), *flags, "-std=c++17", "-O1", "-c", str(file), "-o", str(folder / "cuda.o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stderr


# ---------------------------------------------------------------- shipped files

FILES = PROBLEMS.parents[1] / "level2"
SHIPPED = sorted(int(path.stem[3:]) for path in FILES.glob("l2_*.py"))


def shipped(number: int) -> str:
    return (FILES / f"l2_{number}.py").read_text()


def without_convolution(text: str) -> str:
    """A file without its convolution's text, without figures, and without what names kernels."""
    head, rest = text.split("\nCOMMON = r'''", 1)
    head = re.sub(r"# measured .*\n#  .*\n#\n", "", head)
    rest = rest[rest.index("\nAROUND = ") if "\nAROUND = " in rest else 0 :]
    around, rest = rest.split("\nKERNELS = ", 1)
    around = around if around.startswith("\nAROUND") else ""
    rest = around + rest[rest.index("\nDECLARATIONS = ") :]
    return re.sub(r"(?<=kernels )\w{12}|(?<=_)[0-9a-f]{12}(?=\")", "DIGEST", head + rest)


@pytest.mark.sample(every=6)
@pytest.mark.parametrize("number", SHIPPED)
def test_shipped_file_is_what_the_exporter_writes(number: int) -> None:
    """All but the convolution's text, which the next test compares by what is compiled."""
    text = shipped(number)
    check_static_rules(text)
    assert len(set(re.findall(r"(?<=kernels )\w{12}|(?<=_)[0-9a-f]{12}(?=\")", text))) == 1
    message = f"run: python tools/kernelbench_generate.py --level2 l2_{number}"
    assert without_convolution(text) == without_convolution(exported(number)), message
    assert text.count("\n") < 2600


@pytest.mark.more
@pytest.mark.parametrize("number", SHIPPED)
def test_shipped_convolution_is_the_packages(number: int) -> None:
    """The tidied text and the package's kernels are the same PTX."""
    pytest.importorskip("cuda.bindings")
    message = f"run: python tools/kernelbench_generate.py --level2 l2_{number}"
    assert convolution(shipped(number)) == convolution(exported(number)), message


def convolution(text: str) -> dict[str, str]:
    """The PTX of a file's convolution, by entry point."""
    names = load(text)
    ((variant, parts),) = ((k, v) for k, v in names["KERNELS"].items() if k != "around")
    source = names["COMMON"] + names["specialise"](variant, *parts)
    return oracle.entries(oracle.compile_ptx(source, "sm_90a")[0])


@pytest.mark.more
def test_binding_compiles_against_pytorchs_headers(tmp_path: Path) -> None:
    check_binding(names_of(15), tmp_path)
