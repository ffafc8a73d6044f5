"""Exported ModelNew files: what they say, what they accept, and that every number is the plan's.

Kernels of a file run in ``test_export_kernels.py``; on a GPU ``tools/kernelbench_check.py`` runs
the files as KernelBench does.
"""

from __future__ import annotations

import ast
import inspect
import random
import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from convt3d import export
from convt3d.bench import shapes
from convt3d.cuda import plan as plans
from convt3d.cuda.plan import sweep
from convt3d.cuda.schedule import OPERATIONS, Gpu, Problem
from convt3d.export import formulas, header, host, pinned
from convt3d.export.variants import arithmetics
from convt3d.geometry import Geometry
from convt3d.precision import Arithmetic
from support import records
from support.exported import (
    FORBIDDEN,
    REPOSITORY,
    check_static_rules,
    load,
    problem_names,
    strip_comments,
)

BOTH = ("sm_90a", "sm_80")
PROBLEMS = REPOSITORY / "kernelbench" / "problems"
NAMES = problem_names()
CONV3D = {
    "kb54": "n=16,in=3,out=64,size=64,k=3,conv=1",
    "kb59": "n=16,in=3,out=64,size=256x256x10,k=3x3x1,conv=1",
    "kb60": "n=16,in=3,out=64,size=64,k=3x5x7,conv=1",
    "kb66": "n=8,in=3,out=64,size=16x128x128,k=3x5x7,conv=1",
}
"""Problems whose Model is a Conv3d; the others are named layers of the benchmark."""


def text_of(name: str) -> str:
    return (REPOSITORY / "kernelbench" / f"{name}.py").read_text()


def problem_of(name: str) -> dict[str, Any]:
    context: dict[str, Any] = {}
    exec((PROBLEMS / f"{name}.py").read_text(), context)
    return context


def write_problem(path: Path, body: str, inputs: str = "torch.rand(1, 4, 5, 6, 7)") -> Path:
    path.write_text(
        "import torch\nfrom torch import nn\n"
        + textwrap.dedent(body)
        + f"\ndef get_inputs():\n    return [{inputs}]\n"
    )
    return path


# ---------------------------------------------------------------- shipped files


def test_every_problem_has_a_file() -> None:
    others = ["kb58", "kb61", "kb68", "kb70", "kb72", "kb73", "kb73_g4", "kb77"]
    assert sorted([*CONV3D, *others]) == NAMES


def without_kernels(text: str) -> str:
    """A file without its kernels' text, and without what is named by it."""
    head, rest = text.split("\nCOMMON = r'''", 1)
    rest = rest[rest.index("--- launcher: ") :]
    return re.sub(r"(?<=kernels )\w{12}|(?<=_)[0-9a-f]{12}(?=\")", "DIGEST", head + rest)


@records.needed
@pytest.mark.parametrize("name", NAMES)
def test_shipped_file_is_what_the_exporter_writes(name: str) -> None:
    """All but the kernels' text, which test_export_kernels.py compares by what is compiled."""
    layer = export.from_problem(PROBLEMS / f"{name}.py")
    quoted = re.search(r"kernels (\w{12})", text_of(name))
    assert quoted is not None
    figures = header.shipped_figures(REPOSITORY)
    if figures is not None and figures["files"].get(name, {}).get("digest") != quoted.group(1):
        figures = None
    made = export.export(layer)
    if figures is not None:
        row = figures["files"][name] | {"digest": made.digest}
        made = export.export(layer, figures=figures | {"files": {name: row}})
    wanted = without_kernels(made.text)
    assert without_kernels(text_of(name)) == wanted, "run: python tools/kernelbench_generate.py"


@records.needed
def test_figures_of_a_record_can_be_quoted_anew() -> None:
    text, figures = text_of("kb70"), header.shipped_figures(REPOSITORY)
    assert figures is not None and "# measured   " in text
    assert header.quoting(text, "kb70", figures) == text
    without = header.quoting(text, "kb70", figures | {"files": {}})
    assert "# measured" not in without and text.count("\n") == without.count("\n") + 3
    assert header.quoting(without, "kb70", figures) == text
    row = figures["files"]["kb70"] | {"gpu": "another GPU"}
    assert "another GPU, torch" in header.quoting(text, "kb70", figures | {"files": {"kb70": row}})


LINES = {
    "kb54": 2650,
    "kb59": 2650,
    "kb60": 2600,
    "kb66": 2600,
    "kb58": 2950,
    "kb61": 2950,
    "kb68": 2950,
    "kb70": 3000,
    "kb72": 3950,
    "kb73": 4850,
    "kb73_g4": 4100,
    "kb77": 5000,
}
"""The most lines that shipped files may have. Problems of stride 1 have fewest: where their forward
pass and their gradient by input run one kernel, they share a text. Problems 73 and 77 have most:
the two run in the kernel of strided layers, which loads, multiplies and stores in several ways, and
need different ones."""


@pytest.mark.parametrize("name", NAMES)
def test_shipped_files_are_short(name: str) -> None:
    assert text_of(name).count("\n") <= LINES[name]


@pytest.mark.parametrize("name", NAMES)
def test_problem_is_the_named_shape(name: str) -> None:
    layer = export.from_problem(PROBLEMS / f"{name}.py")
    shape = shapes.parse(CONV3D[name]) if name in CONV3D else shapes.named()[name]
    assert layer.geometry == shape.geometry
    assert (layer.batch, layer.input_size, layer.bias) == (
        shape.batch,
        shape.input_size,
        shape.bias,
    )


@pytest.mark.parametrize("name", NAMES)
def test_constructor_and_forward_have_the_signature_of_the_model(name: str) -> None:
    model, new = problem_of(name)["Model"], load(text_of(name))["ModelNew"]
    for function in ("__init__", "forward"):
        ours = inspect.signature(getattr(new, function)).parameters.values()
        theirs = inspect.signature(getattr(model, function)).parameters.values()
        assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_the_models_own(name: str, bias: bool) -> None:
    """Executed as KernelBench does it: after the problem, among its names, under one seed."""
    context = problem_of(name)
    given = context["get_init_inputs"]()
    torch.manual_seed(42)
    model = context["Model"](*given, bias=bias)
    context = load("import os\nos.environ['A_VARIABLE'] = '1'\n" + text_of(name), context)
    torch.manual_seed(42)
    new = context["ModelNew"](*given, bias=bias)
    after = torch.rand(1)
    torch.manual_seed(42)
    context["Model"](*given, bias=bias)
    assert torch.equal(after, torch.rand(1)), "the constructor draws other random numbers"
    ours, theirs = new.state_dict(), model.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert [n for n, _ in new.named_parameters()] == [n for n, _ in model.named_parameters()]
    model.load_state_dict(ours)


def test_problem_73_is_not_grouped_whatever_its_arguments_say() -> None:
    layer = export.from_problem(PROBLEMS / "kb73.py")
    assert layer.geometry.groups == 1
    assert layer.geometry.output_padding == (0, 0, 0)
    ignored = [a.name for a in layer.arguments if not a.used]
    assert ignored == ["output_padding"]
    new = load(text_of("kb73"))["ModelNew"]
    for output_padding in (0, 1, 4):
        assert new(32, 32, 3, 2, 1, output_padding).conv_transpose3d.weight.shape == (
            *(32, 32),
            *(3, 3, 3),
        )
    assert export.from_problem(PROBLEMS / "kb73_g4.py").geometry.groups == 4


def test_constructor_refuses_another_geometry() -> None:
    new = load(text_of("kb72"))["ModelNew"]
    right = (32, 32, (3, 5, 7), (2, 2, 2), (1, 2, 3), (1, 1, 1), 4)
    new(*right)
    new(32, 32, [3, 5, 7], 2, (1, 2, 3), 1, groups=4, bias=True)  # the same, written otherwise
    for position, value in ((0, 64), (2, (3, 5, 5)), (3, (1, 1, 1)), (5, (0, 0, 0)), (6, 1)):
        wrong = list(right)
        wrong[position] = value
        with pytest.raises(ValueError, match="generated for"):
            new(*wrong)


def test_other_tensors_raise_a_clear_error() -> None:
    module = load(text_of("kb73"))["ModelNew"](32, 32, 3, 2, 1)
    with pytest.raises(TypeError, match=r"float32 CUDA tensors, but got torch.float32 on cpu"):
        module(torch.rand(1, 32, 2, 2, 2))
    with pytest.raises(TypeError, match=r"torch.float16"):
        module(torch.rand(1, 32, 2, 2, 2, dtype=torch.float16))


# ---------------------------------------------------------------- KernelBench's static rules


@pytest.mark.parametrize("name", NAMES)
def test_static_rules(name: str) -> None:
    check_static_rules(text_of(name))


def test_the_rules_find_what_they_forbid() -> None:
    for line in (
        "try:", "except RuntimeError:", "a_pass = 'a pass'", "torch.nn.ConvTranspose3d(1, 1, 1)",
        "nn.Linear(1, 1)", "F.conv3d(x)", "torch.matmul(a, b)", "import threading",
        "torch.cuda.Stream()", "class A(torch.Tensor)", "x.half()",
    ):  # fmt: skip
        assert any(re.search(pattern, strip_comments(line)) for pattern in FORBIDDEN.values()), line


@pytest.mark.parametrize("name", NAMES)
def test_imports_pytorch_alone_and_parses_as_old_python(name: str) -> None:
    tree = ast.parse(text_of(name), feature_version=(3, 8))
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add((node.module or "").split(".")[0])
    assert roots == {"math", "torch"}


def test_header_tells_geometry_phases_kernel_and_precision() -> None:
    head = text_of("kb77").split("\nimport", 1)[0]
    assert "32->64 k3 s2 p1 d2 g1" in head
    assert "D phase 0: no tap: bias or zero" in head
    assert "D phase 1: k0 at +1, k1 at +0, k2 at -1" in head
    assert "TF32: operands rounded to nearest" in head
    assert "source box" in head  # the kernel's picture
    assert all(line.startswith("#") for line in head.splitlines() if line)
    assert max(map(len, head.splitlines())) <= 100


def test_header_tells_what_runs_other_calls() -> None:
    layer = export.from_problem(PROBLEMS / "kb77.py")
    for options, sentence in (
        ({}, "PyTorch's operator runs all others, and GPUs but Hopper's"),
        ({"architectures": ("sm_80",)}, "serves any batch and size"),
        ({"architectures": BOTH, "precision": "follow"}, "follows PyTorch's switch"),
    ):
        assert sentence in export.export(layer, **options).text.split("\nimport", 1)[0]


def test_measured_figures_are_quoted_for_the_kernels_they_measured() -> None:
    layer = export.from_problem(PROBLEMS / "kb73_g4.py")
    plain = export.export(layer)
    row = {"digest": plain.digest, "model_new_ms": 0.5, "model_ms": 8.0, "timed_runs": 100}
    facts = {"gpu": "NVIDIA H200", "torch": "2.11.0"}
    figures = {"environment": facts, "files": {"kb73_g4": row}}
    quoted = export.export(layer, figures=figures)
    assert quoted.digest == plain.digest
    assert "0.5 ms, Model 8 ms (16.0 times)" in quoted.text
    row["digest"] = "of other kernels"
    assert export.export(layer, figures=figures).text == plain.text


# ---------------------------------------------------------------- precision


def variants_in(text: str) -> list[str]:
    """The variants that run on all GPUs."""
    return load(text)["chosen"](False)


def test_precision_decides_which_kernels_a_file_holds() -> None:
    layer = export.from_shape(shapes.parse("in=8,out=8,size=6,k=3,s=2,p=1"))
    follow = variants_in(export.export(layer, "follow", architectures=BOTH).text)
    assert follow == [f"{o}_{a}" for o in OPERATIONS for a in ("tf32", "ieee")]
    for precision in ("tf32", "ieee"):
        text = export.export(layer, precision, architectures=BOTH).text
        assert variants_in(text) == [f"{o}_{precision}" for o in OPERATIONS]
        assert load(text)["use_tf32"]() is (precision == "tf32")
    with pytest.raises(ValueError, match="problem, follow, tf32, ieee"):
        export.export(layer, "fp16")


def test_one_architecture_and_precision_by_default() -> None:
    layer = export.from_shape(shapes.parse("in=8,out=8,size=6,k=3,s=2,p=1"))
    for architectures in (("sm_90a",), ("sm_80",)):
        names = load(export.export(layer, architectures=architectures).text)
        assert list(names["KERNELS"]) == [f"{o}_tf32" for o in OPERATIONS]
        target = architectures[0].removeprefix("sm_")
        flags = [f"-gencode=arch=compute_{target},code={architectures[0]}"]
        assert names["architecture_flags"]() == flags
        assert "CONVT3D_HOPPER" not in names["LAUNCH"] + names["HOST"]
    assert export.export(layer).text == export.export(layer, architectures=("sm_90a",)).text
    for wrong in ((), ("sm_70",), ("sm_90a", "sm_70")):
        with pytest.raises(ValueError, match="among sm_90a, sm_80"):
            export.export(layer, architectures=wrong)


SERVED = {
    ("problem", ("sm_90a",)): (True, True, True),
    ("problem", ("sm_80",)): (False, False, True),
    ("tf32", ("sm_90a",)): (True, True, False),
    ("tf32", ("sm_80",)): (False, False, False),
    ("follow", BOTH): (False, False, False),
}
"""Whether a file leaves other extents, other GPUs and the other precision to PyTorch's operator."""


@pytest.mark.sample
@pytest.mark.parametrize(("precision", "architectures"), SERVED)
def test_other_calls_go_to_pytorchs_operator(
    precision: str, architectures: tuple[str, ...]
) -> None:
    layer = export.from_shape(shapes.parse("n=2,in=8,out=8,size=6,k=3,s=2,p=1"))
    names = load(export.export(layer, precision, architectures=architectures).text)
    right = (2, 8, 6, 6, 6)
    for size, capability, tf32, left in (
        (right, (9, 0), True, False),
        ((2, 8, 6, 6, 7), (9, 0), True, SERVED[precision, architectures][0]),
        (right, (8, 0), True, SERVED[precision, architectures][1]),
        (right, (9, 0), False, SERVED[precision, architectures][2]),
    ):
        kernels, function = mock.Mock(), mock.Mock()
        names["extension"] = lambda bias, kernels=kernels: kernels
        names["ConvTranspose3dFunction"] = function
        tensor = mock.Mock(shape=torch.Size(size), is_cuda=True, dtype=torch.float32)
        tensor.dim = lambda size=size: len(size)
        with (
            mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
            torch.backends.cudnn.flags(allow_tf32=tf32),
        ):
            names["ModelNew"]().conv_transpose3d.forward(tensor)
        ran = kernels.conv_transpose3d_elsewhere.called, function.apply.called
        assert ran == (left, not left), (size, capability, tf32)


def test_a_file_holds_what_the_package_runs_on_hopper() -> None:
    """The strided kernels of kb73 store in bulk there: another kernel than on other GPUs."""
    layer = export.from_problem(PROBLEMS / "kb73.py")
    names = load(export.export(layer, "follow", architectures=BOTH).text)
    for hopper, stores in ((False, "0"), (True, "1")):
        name = "grad_input_ieee_hopper" if hopper else "grad_input_ieee"
        assert name in names["chosen"](hopper)
        assert str(names["KERNELS"][name][2]["BULK_STORES"]) == stores
    # Maps of TMA are made for the problem's extents alone.
    assert "forward_ieee_sized" in names["chosen"](True)
    layer = export.from_problem(PROBLEMS / "kb73_g4.py")
    names = load(export.export(layer, architectures=BOTH).text)
    assert "forward_ieee_sized" in names["chosen"](True)


@pytest.mark.sample
@pytest.mark.parametrize("precision", export.PRECISIONS)
def test_grouped_layers_are_ieee_grade_in_each_case(precision: str) -> None:
    layer = export.from_shape(shapes.parse("in=8,out=8,size=6,k=3,s=2,p=1,g=2"))
    text = export.export(layer, precision, architectures=BOTH).text
    assert variants_in(text) == [f"{o}_ieee" for o in OPERATIONS]
    assert load(text)["use_tf32"]() is False


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("conv", [True, False])
def test_layers_of_few_channels_are_ieee_grade_as_pytorchs(
    channels: int, stride: int, conv: bool
) -> None:
    text = f"in={channels},out=8,size=8,k=3,s={stride},p=1,conv={int(conv)}"
    layer = export.from_shape(shapes.parse(text))
    few = conv and (channels < 4 if stride == 1 else channels == 1)
    for precision, wanted in {
        "problem": [Arithmetic.IEEE if few else Arithmetic.TF32],
        "follow": [Arithmetic.IEEE] if few else [Arithmetic.TF32, Arithmetic.IEEE],
        "tf32": [Arithmetic.TF32],
        "ieee": [Arithmetic.IEEE],
    }.items():
        assert list(arithmetics(layer, precision)) == wanted


def test_a_file_of_few_channels_asks_no_switch() -> None:
    layer = export.from_shape(shapes.parse("in=3,out=8,size=8,k=3,conv=1"))
    text = export.export(layer, architectures=BOTH).text
    assert variants_in(text) == [f"{o}_ieee" for o in OPERATIONS]
    assert "as PyTorch computes layers of so few" in " ".join(text.replace("#", "").split())
    names = load(text)
    for allowed in (True, False):
        with torch.backends.cudnn.flags(allow_tf32=allowed):
            assert names["use_tf32"]() is False
    served = "and use_tf32()"  # what files of TF32 kernels ask
    assert served not in export.export(layer).text
    assert served in text_of("kb73")


def test_follow_reads_pytorchs_switch_at_every_call() -> None:
    use_tf32 = load(text_of("kb73"))["use_tf32"]
    for allowed in (True, False, True):
        with torch.backends.cudnn.flags(allow_tf32=allowed):
            assert use_tf32() is allowed
    with mock.patch.object(torch.backends, "cudnn", mock.Mock(spec=["allow_tf32"])) as old:
        old.allow_tf32 = False  # PyTorch before 2.9 has no other switch
        assert use_tf32() is False


# ---------------------------------------------------------------- problems


LAYER = """
class Model(nn.Module):
    def __init__(self, channels, kernel=3):
        super().__init__()
        self.up = nn.ConvTranspose3d(channels, 6, kernel, stride=2)
    def forward(self, image):
        return self.up(image)
def get_init_inputs():
    return [4]
"""


def test_names_and_defaults_are_the_problems(tmp_path: Path) -> None:
    layer = export.from_problem(write_problem(tmp_path / "mine.py", LAYER))
    assert layer.geometry == Geometry(4, 6, (3, 3, 3), (2, 2, 2))
    assert (layer.name, layer.path, layer.input_name, layer.bias) == ("mine", "up", "image", True)
    assert not any(a.bias for a in layer.arguments)
    names = load(export.export(layer).text)
    torch.manual_seed(0)
    new = names["ModelNew"](4)
    torch.manual_seed(0)
    want = nn.ConvTranspose3d(4, 6, 3, stride=2).state_dict()
    assert {k: v.tolist() for k, v in new.state_dict().items()} == {
        f"up.{k}": v.tolist() for k, v in want.items()
    }
    with pytest.raises(ValueError, match="kernel=3"):
        names["ModelNew"](4, kernel=5)


def test_a_nested_layer_keeps_its_path(tmp_path: Path) -> None:
    body = LAYER.replace(
        "self.up = nn.ConvTranspose3d(channels, 6, kernel, stride=2)",
        "self.up = nn.Sequential(nn.ConvTranspose3d(channels, 6, kernel, stride=2))",
    )
    layer = export.from_problem(write_problem(tmp_path / "nested.py", body))
    new = load(export.export(layer).text)["ModelNew"](4)
    assert list(new.state_dict()) == ["up.0.weight", "up.0.bias"]
    with pytest.raises(TypeError, match="float32 CUDA"):
        new(torch.rand(1, 4, 2, 2, 2))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return self.up(image)", "return torch.relu(self.up(image))", "does more"),
        ("return self.up(image)", "return self.up(image * 2)", "does more"),
        ("__init__()", "__init__(); self.n = nn.BatchNorm3d(6)", "other parameters"),
        ("__init__()", "__init__(); self.n = nn.ConvTranspose3d(1, 1, 1)", "2 3-D convolutions"),
        ("nn.ConvTranspose3d(channels, 6, kernel, stride=2)", "nn.Linear(7, 6)", "0 3-D conv"),
        ("nn.ConvTranspose3d(channels, 6, kernel, stride=2)",
         "nn.Conv3d(4, 6, 3, padding='same')", "cannot be exported"),
        ("nn.ConvTranspose3d(channels, 6, kernel, stride=2)",
         "nn.Conv3d(4, 6, 3, padding=1, padding_mode='reflect')", "cannot be exported"),
        ("nn.ConvTranspose3d(channels, 6, kernel, stride=2)",
         "nn.Sequential(nn.Conv3d(4, 6, 3), nn.MaxPool3d(4))", "does more"),
        ("class Model", "class Other", "no Model"),
        ("def get_init_inputs", "def other", "no get_init_inputs"),
        ("def forward(self, image)", "def forward(self, image, output_size=None)", "one tensor"),
        ("def __init__(self, channels,", "def __init__(self, channels, *more,", "neither"),
        ("__init__(self, channels,", "__init__(self, channels, act=torch.relu,", "literal"),
    ],
)  # fmt: skip
def test_what_is_not_one_layer_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in LAYER
    path = write_problem(tmp_path / "problem.py", LAYER.replace(old, new))
    with pytest.raises(export.ExportError, match=message):
        export.from_problem(path)


def test_inputs_must_be_one_tensor_of_the_layers_channels(tmp_path: Path) -> None:
    for inputs, message in (
        ("torch.rand(1, 5, 4, 4, 4)", "5 channels"),
        ("torch.rand(4, 4, 4, 4)", "one tensor"),
        ("torch.rand(1, 4, 4, 4, 4), 3", "one tensor"),
    ):
        with pytest.raises(export.ExportError, match=message):
            export.from_problem(write_problem(tmp_path / "problem.py", LAYER, inputs))


# ---------------------------------------------------------------- Conv3d


CONV_LAYER = """
class Model(nn.Module):
    def __init__(self, channels, stride=1, bias=False):
        super().__init__()
        self.down = nn.Conv3d(channels, 6, 3, stride=stride, padding=1, bias=bias)
    def forward(self, image):
        return self.down(image)
def get_init_inputs():
    return [4]
"""


def test_a_conv3d_is_exported_forward_and_backward(tmp_path: Path) -> None:
    layer = export.from_problem(write_problem(tmp_path / "mine.py", CONV_LAYER))
    assert layer.geometry == Geometry(4, 6, (3, 3, 3), padding=(1, 1, 1), transposed=False)
    assert [a.name for a in layer.arguments if a.bias] == ["bias"]
    text = export.export(layer).text
    check_static_rules(text)
    names = load(text)
    assert list(names["KERNELS"]) == [f"{o}_tf32" for o in OPERATIONS]
    for bias in (False, True):
        torch.manual_seed(0)
        new = names["ModelNew"](4, bias=bias)
        torch.manual_seed(0)
        want = nn.Conv3d(4, 6, 3, padding=1, bias=bias).state_dict()
        assert {k: v.tolist() for k, v in new.state_dict().items()} == {
            f"down.{k}": v.tolist() for k, v in want.items()
        }
    with pytest.raises(ValueError, match="stride=1"):
        names["ModelNew"](4, 2)


def test_header_of_a_conv3d_tells_taps_and_whose_kernels_run() -> None:
    strided, plain = (
        re.sub(r"[\s#]+", " ", exported(shape).split("\nimport", 1)[0])
        for shape in ("in=8,out=6,size=9,k=3,s=2,p=1,d=2,conv=1", "in=8,out=6,size=9,k=3,conv=1")
    )
    assert "a 3D convolution on CUDA kernels of its own" in strided
    assert "D: k0 at -1, k1 at +1, k2 at +3" in strided
    assert "is the output of 6->8 k3 s2 p1 d2 g1" in strided
    assert "the output here is its gradient by input" in strided
    assert "that of 8->6 k3 s1 p2 d1 g1, whose weight is this one flipped" in plain


def exported(shape: str) -> str:
    return export.export(export.from_shape(shapes.parse(shape))).text


@pytest.mark.sample
@pytest.mark.parametrize("extra", ["s=2,p=1", "g=2", "k=1", "p=3"])
def test_a_gradient_by_input_has_no_bias_in_a_file(extra: str) -> None:
    """An output that runs as one is exported without a bias alone."""
    shape = f"in=4,out=6,size=8,{extra if 'k=' in extra else f'k=3,{extra}'},conv=1"
    with pytest.raises(export.ExportError, match=r"cannot be exported with a bias"):
        export.export(export.from_shape(shapes.parse(shape + ",bias=1")))
    names = load(exported(shape))
    assert "flipped" not in names["BINDING"]
    names["ModelNew"](bias=False)
    with pytest.raises(ValueError, match="generated for bias=False, not True"):
        names["ModelNew"](bias=True)
    assert "flipped(" in load(exported("in=4,out=6,size=8,k=3,bias=1,conv=1"))["BINDING"]


def test_arguments_of_an_exported_shape_are_those_of_the_module() -> None:
    for shape, module in (("conv=1", nn.Conv3d), ("conv=0", nn.ConvTranspose3d)):
        layer = export.from_shape(shapes.parse(f"in=8,out=8,size=6,k=3,s=1,p=1,{shape}"))
        theirs = list(inspect.signature(module).parameters)
        assert [a.name for a in layer.arguments] == theirs[: len(layer.arguments)]


def test_a_strided_conv3d_leaves_sizes_of_another_remainder_to_pytorch() -> None:
    """Their output is another transposed layer's gradient by input."""
    shape = shapes.parse("in=8,out=8,size=7x8x9,k=3,s=2x3x1,p=1,conv=1")
    names = load(export.export(export.from_shape(shape), "tf32", architectures=("sm_80",)).text)
    adjoint = shape.geometry.adjoint(shape.input_size)
    for size in ((7, 8, 9), (9, 8, 9), (8, 8, 9), (7, 11, 20), (7, 10, 9), (5, 5, 5)):
        served = names["served"](mock.Mock(shape=torch.Size((3, 8, *size))))
        assert served == (shape.geometry.adjoint(size) == adjoint), size
    stride_1 = export.from_shape(shapes.parse("in=8,out=8,size=7,k=3,conv=1"))
    assert "served" not in load(export.export(stride_1, "tf32", architectures=("sm_80",)).text)


# ---------------------------------------------------------------- numbers


def random_geometry(generator: random.Random) -> Geometry:
    def three(low: int, high: int) -> tuple[int, int, int]:
        return tuple(generator.randint(low, high) for _ in range(3))  # type: ignore[return-value]

    groups = generator.choice((1, 1, 2, 4))
    kernel, stride, dilation = three(1, 5), three(1, 3), three(1, 2)
    if generator.random() < 0.2:
        kernel, dilation = stride, (1, 1, 1)
    return Geometry(
        groups * generator.choice((1, 2, 8, 12)),
        groups * generator.choice((1, 3, 8, 16)),
        kernel,
        stride,
        (0, 0, 0) if kernel == stride else three(0, 2),
        tuple(generator.randint(0, s - 1) for s in stride),  # type: ignore[arg-type]
        dilation,
        groups,
    )


@pytest.mark.sample
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n < 6 else [pytest.mark.more]) for n in range(12)]
)
def test_formulas_give_the_plans_numbers(seed: int) -> None:
    """At the problem's extents the plan's own; elsewhere those of its tile shape."""
    generator = random.Random(seed)
    geometry = random_geometry(generator)
    for operation in OPERATIONS:
        batch, size = generator.choice(formulas.samples(geometry, 100))
        plan = plans.plan_for(
            operation,
            geometry,
            size,
            batch,
            torch.float32,
            arithmetic=generator.choice((Arithmetic.TF32, Arithmetic.IEEE)),
            gpu=host.portable(Gpu()),
            canonical=False,
        )
        call = host.host_call(plan, batch, size)
        assert call.evaluate(batch, size) == host.plain(plan.schedule(batch, size))
        one_shape = pinned.pin(plan, batch, size)
        for other_batch, other_size in formulas.samples(geometry, 200):
            assert call.evaluate(other_batch, other_size) == host.plain(
                one_shape.schedule(other_batch, other_size)
            )


def test_a_sweep_has_its_ctas_at_the_extents_of_its_file_alone() -> None:
    """120 of 132 where each has a whole column; elsewhere one on every multiprocessor."""
    problem = Problem("forward", Geometry(128, 160, (5, 5, 5), padding=(2, 2, 2)), Arithmetic.TF32)
    plan: Any = sweep.ranked(problem, 8, (3, 12, 24), Gpu())[0][1]
    call = host.host_call(plan, 8, (3, 12, 24))
    assert call.evaluate(8, (3, 12, 24)).launches[-1].grid == 120
    for batch, size in ((7, (3, 12, 24)), (8, (4, 12, 24)), (8, (3, 13, 24)), (8, (3, 12, 23))):
        assert call.evaluate(batch, size).launches[-1].grid == 132


def test_a_plan_that_moved_on_is_refused() -> None:
    shape = shapes.parse("in=8,out=8,size=12,k=3,s=2,p=1")
    plan = plans.plan_for(
        "forward",
        shape.geometry,
        shape.input_size,
        1,
        torch.float32,
        gpu=host.portable(Gpu()),
    )
    schedule = type(plan).schedule

    def with_more_blocks(self: Any, batch: int, size: Any) -> Any:
        made = schedule(self, batch, size)
        first, *rest = made.launches
        more = [replace(launch, grid=launch.grid + (batch > 2)) for launch in rest]
        return replace(made, launches=(first, *more))

    with (
        mock.patch.object(type(plan), "schedule", with_more_blocks),
        pytest.raises(NotImplementedError, match="fallen behind"),
    ):
        host.host_call(plan, 1, shape.input_size)


def test_formulas_are_nothing_but_arithmetic() -> None:
    assert formulas.evaluate("div_up(a, 4) * min(7, a + 1)", {"a": 5}) == 12
    for text in ("__import__('os')", "a.b", "a; b", "[a]", "a = 1"):
        with pytest.raises(ValueError, match="no formula"):
            formulas.evaluate(text, {"a": 1})


# ---------------------------------------------------------------- compiling


def test_one_extension_for_each_bias_named_by_its_kernels() -> None:
    names = load(text_of("kb73_g4"))
    made: list[dict[str, Any]] = []
    names["load_inline"] = lambda **arguments: made.append(arguments) or arguments["name"]
    digest = re.search(r"kernels (\w{12})", text_of("kb73_g4"))
    assert digest is not None
    for bias, name in ((False, ""), (True, "_bias"), (False, "")):
        assert names["extension"](bias) == f"convt3d_kb73_g4_{digest.group(1)}{name}"
    assert len(made) == 2
    for arguments, bias in zip(made, (0, 1), strict=True):
        (cuda,) = arguments["cuda_sources"]
        forward = cuda.split("namespace convt3d::forward_ieee", 1)[1]
        assert re.search(rf"#define CONVT3D_BIAS {bias}\n", forward)
        assert cuda.count("__global__") >= 5
        (binding,) = arguments["cpp_sources"]
        assert all(f"Tensor {function}(" in binding for function in arguments["functions"])


@pytest.mark.parametrize(
    ("capabilities", "cuda", "targets"),
    [
        ([(9, 0), (8, 0)], "13.0", ["80", "90"]),
        ([(9, 0), (9, 0)], "12.1", ["90a"]),
        ([(9, 0)], "11.8", ["90"]),
    ],
)
def test_compiles_for_the_gpus_at_hand(
    capabilities: list[tuple[int, int]], cuda: str, targets: list[str]
) -> None:
    layer = export.from_problem(PROBLEMS / "kb73_g4.py")
    names = load(export.export(layer, architectures=BOTH).text)
    with (
        mock.patch.object(torch.version, "cuda", cuda),
        mock.patch.object(torch.cuda, "device_count", return_value=len(capabilities)),
        mock.patch.object(torch.cuda, "get_device_capability", capabilities.__getitem__),
    ):
        assert names["architecture_flags"]() == [
            f"-gencode=arch=compute_{target},code=sm_{target}" for target in targets
        ]
        assert names["on_hopper"]() is (targets == ["90a"])


def test_import_compiles_only_where_there_is_a_gpu() -> None:
    names: dict[str, Any] = {}
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch("torch.utils.cpp_extension.load_inline") as load_inline,
    ):
        exec(text_of("kb77"), names)
    assert load_inline.call_count == 1
    assert not load_inline.call_args.kwargs["name"].endswith("_bias")


# ---------------------------------------------------------------- command line


def test_command_line_writes_the_file(tmp_path: Path) -> None:
    testing = pytest.importorskip("typer.testing")
    from convt3d.cli import app

    run = testing.CliRunner().invoke
    out = tmp_path / "out.py"
    problem = PROBLEMS / "kb73_g4.py"
    assert run(app, ["export", str(problem), "-o", str(out)]).exit_code == 0
    assert out.read_text() == export.export(export.from_problem(problem)).text
    both = ["export", str(problem), "-o", str(out), "--arch", "sm_90a,sm_80"]
    assert run(app, [*both, "--precision", "follow"]).exit_code == 0
    layer = export.from_problem(problem)
    assert out.read_text() == export.export(layer, "follow", architectures=BOTH).text
    given = ["export", "--shape", "in=4,out=2,size=5,k=2,s=2,bias=1", "--precision", "ieee"]
    printed = run(app, given)
    assert printed.exit_code == 0
    names = load(printed.stdout)
    assert list(names["KERNELS"]) == [f"{operation}_ieee" for operation in OPERATIONS]
    assert names["ModelNew"]().conv_transpose3d.bias.shape == (2,)
    for wrong in (
        ["export"],
        ["export", str(tmp_path / "none.py")],
        [*given, "-o", str(tmp_path / "no" / "x.py")],
        [*given, "--arch", "sm_70"],
    ):
        assert run(app, wrong).exit_code == 1
