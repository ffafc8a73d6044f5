"""The C++ and CUDA of exported files, without a GPU.

The launcher is compiled by g++ and its launches are recorded and compared with the package's; the
kernels run in the emulator with those launches; the whole compiles with nvcc, and the binding with
PyTorch's own headers.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from convt3d import export
from convt3d.bench import shapes
from convt3d.cuda.compiler import flatten
from convt3d.cuda.schedule import OPERATIONS, WEIGHT_STRIDES, Gpu, Schedule, TensorMap
from convt3d.export import host, variants
from convt3d.export.formulas import samples
from convt3d.export.operations import operation_of
from convt3d.export.pinned import pin
from convt3d.export.tidy import oracle
from emulator import build, harness
from emulator.packing import Inside
from support.exported import (
    REPOSITORY,
    Binding,
    Launcher,
    Recorded,
    check_binding,
    load,
    nvcc,
    problem_names,
)

BOTH = ("sm_90a", "sm_80")
DEPTHWISE = "in=6,out=6,size=5x6x7,k=3,s=2,p=1,op=1,g=6,bias=1"
STRIDED = "n=2,in=9,out=10,size=3x4x5,k=3,s=2,p=1,op=1"
FLAT = "in=5,out=3,size=3x4x5,k=2x2x2,s=2,bias=1"
WGMMA_FLAT = "n=2,in=64,out=32,size=16x32x32,k=2,s=2"
CONV = "in=5,out=9,size=5x6x7,k=3x2x3,p=1x0x1,conv=1,bias=1"
STRIDED_CONV = "n=2,in=6,out=10,size=7x8x9,k=3,s=2,p=1,conv=1"
STATIC = "in=4,out=12,size=4x5x6,k=3x2x3,d=1x2x1"


def layer_of(name: str) -> export.Layer:
    if "=" in name:
        return export.from_shape(shapes.parse(name))
    return export.from_problem(REPOSITORY / "kernelbench" / "problems" / f"{name}.py")


# ---------------------------------------------------------------- launcher


def as_recorded(variant: str, schedule: Schedule) -> Recorded:
    """A schedule of the package in the words of the recorded launcher."""
    scratch = {name: f"scratch {size}" for name, size in schedule.workspaces.items()}

    def argument(a: Any) -> Any:
        if isinstance(a, TensorMap):
            lists = [list(n) for n in (a.extents, a.strides, a.box, a.steps)]
            extents, strides, box, steps = lists
            tensor = scratch.get(a.tensor, a.tensor)
            return TensorMap(tensor, a.element, extents, strides, box, a.swizzle, steps)
        return scratch.get(a, a) if isinstance(a, str) else int(a)

    return Recorded(
        [
            (
                f"{variant}_{launch.kernel.entry.removeprefix('convt3d_')}",
                launch.grid,
                launch.block,
                launch.shared_bytes,
                [argument(a) for a in launch.arguments],
                launch.dependent,
            )
            for launch in schedule.launches
        ],
        list(schedule.workspaces.values()),
    )


# One of each kind of problem each time; nvcc takes 3 s each.
_EACH_TIME = {"kb58", "kb73_g4", "kb77", DEPTHWISE, FLAT, CONV}


@pytest.mark.sample
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in _EACH_TIME else [pytest.mark.more])
        for name in (*problem_names(), DEPTHWISE, STRIDED, FLAT, STATIC, CONV, STRIDED_CONV)
    ],
)
def test_compiled_launcher_queues_what_the_package_would(name: str, tmp_path: Path) -> None:
    """For GPUs of all kinds, and where a file has kernels for Hopper alone, for that."""
    layer = layer_of(name)
    names = load(export.export(layer, "follow", architectures=BOTH).text)
    for hopper in (False, True):
        chosen = set(names["chosen"](hopper))
        own = {kernel for kernel in chosen if kernel.endswith(("_hopper", "_sized"))}
        assert hopper or not own
        if bool(own) is hopper:
            (tmp_path / str(hopper)).mkdir()
            check_launcher(layer, Launcher(names, tmp_path / str(hopper), hopper), own)


@pytest.mark.sample
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in _EACH_TIME else [pytest.mark.more])
        for name in (*problem_names(), DEPTHWISE, STRIDED, FLAT, STATIC, CONV, STRIDED_CONV)
    ],
)
def test_launcher_for_one_size_queues_what_the_package_would(name: str, tmp_path: Path) -> None:
    """The launcher of a file for Hopper alone, at the problem's extents; at others nothing."""
    layer = layer_of(name)
    launcher = Launcher(load(export.export(layer).text), tmp_path)
    (arithmetic,) = variants.arithmetics(layer, "problem")
    for operation in OPERATIONS:
        asked = operation_of(layer, operation, arithmetic)
        size = (*asked.input_size, *asked.problem.geometry.output_size(asked.input_size))
        got = launcher.schedule(operation, True, (layer.batch, *size))
        wanted = asked.plan(Gpu()).schedule(layer.batch, asked.input_size)
        assert got == as_recorded(f"{operation}_{arithmetic.value}", wanted)
        others = launcher.schedule(operation, True, (layer.batch + 1, *size))
        assert others == Recorded([], [])


def check_launcher(layer: export.Layer, launcher: Launcher, own: set[str]) -> None:
    """Compare all it queues with schedules; ``own`` are the variants for Hopper alone."""
    for operation in OPERATIONS:
        for arithmetic in variants.arithmetics(layer, "follow"):
            function = f"{operation}_{arithmetic.value}"
            asked = operation_of(layer, operation, arithmetic)
            plans = [asked.plan(gpu) for gpu in (host.portable(Gpu()), Gpu())]
            problem, geometry = (layer.batch, asked.input_size), asked.problem.geometry
            hopper = f"{function}_hopper" in own
            variant, plan = f"{function}_hopper" if hopper else function, plans[hopper]
            # The package's own plan at the problem's extents, its tile shape at all others.
            pinned = pin(plan, *problem)
            compared = [(pinned, sample, variant) for sample in samples(geometry, 40)]
            compared.append((plan, problem, variant))
            if f"{function}_sized" in own:
                compared[-1] = (plans[1], problem, f"{function}_sized")
            for wanted, (batch, size), name in compared:
                extents = (batch, *size, *geometry.output_size(size))
                got = launcher.schedule(operation, arithmetic.value == "tf32", extents)
                assert got == as_recorded(name, wanted.schedule(batch, size))


# ---------------------------------------------------------------- kernels, in the emulator


class EmulatedKernels:
    """Stands in for the compiled extension: the file's own binding, launches and kernels, on CPU
    tensors."""

    def __init__(self, names: dict[str, Any], layer: export.Layer, folder: Path) -> None:
        self.names, self.layer = names, layer
        self.launcher = Launcher(names, folder)
        self.binding = Binding(names, layer.function, folder, self.run)
        intrinsics = flatten("device/ptx.cuh")
        assert intrinsics in names["COMMON"]
        emulated = build.flatten(build.HERE / "device/ptx.cuh", ())
        self.common = names["COMMON"].replace(intrinsics, emulated)
        self.ran: list[str] = []
        self.given: list[torch.Tensor] = []
        for operation in OPERATIONS:
            call = functools.partial(self.call, operation)
            setattr(self, f"{layer.function}_{operation}", call)

    def call(self, operation: str, *arguments: Any) -> torch.Tensor:
        if operation == "forward":
            assert (arguments[2] is not None) == self.layer.bias
        dense = [a.contiguous() if isinstance(a, torch.Tensor) else a for a in arguments]
        self.given = [a for a in dense if isinstance(a, torch.Tensor)]
        return self.binding(operation, *dense)

    def run(
        self, operation: str, tf32: bool, values: dict[str, int], extents: Sequence[int]
    ) -> None:
        """What the launcher queues for what the binding has handed to it."""
        recorded = self.launcher.schedule(operation, tf32, extents)
        assert recorded.launches
        known = self._tensors(operation, values, extents)
        known |= {
            f"scratch {size}": torch.full((size,), 255, dtype=torch.uint8)
            for size in recorded.workspaces
        }
        for kernel, grid, block, shared_bytes, arguments, _ in recorded.launches:
            variant = f"{operation}_{'tf32' if tf32 else 'ieee'}"
            text, _, numbers = self.names["KERNELS"][variant]
            numbers = dict(numbers)
            if operation == "forward":
                numbers["BIAS"] = int(self.layer.bias)
            harness.launch(
                "convt3d_" + kernel.removeprefix(variant + "_"),
                self.common + text,
                {f"CONVT3D_{k}": v for k, v in numbers.items()},
                grid,
                block,
                shared_bytes,
                [known[a] if isinstance(a, str) else np.int32(a) for a in arguments],
            )
            self.ran.append(kernel)

    def _tensors(
        self, operation: str, values: dict[str, int], extents: Sequence[int]
    ) -> dict[str, Any]:
        """The memory behind the addresses, of results NaN, and the strides of the weight."""
        g = self.layer.geometry
        known: dict[str, Any] = {k: np.int64(values[k]) for k in WEIGHT_STRIDES}
        at = {tensor.data_ptr(): tensor.detach() for tensor in self.given}
        batch, *sizes = extents
        counts = {math.prod(sizes[:3]), math.prod(sizes[3:])}
        for name in ("source", "target", "bias"):
            found = at.get(values[name], 0)
            if values[name] and values[name] not in at:
                channels = g.out_channels if operation == "forward" else g.in_channels
                size = self.given[0].shape[2:]
                of_input = math.prod(size)
                if operation == "forward":
                    volume = math.prod(g.output_size(size))
                    assert counts == {of_input, volume}
                else:
                    (volume,) = counts - {of_input} or {of_input}
                found = _memory(values[name], batch * channels * volume)
            known[name] = found
        # A weight that is read in reverse is pointed to at its last tap.
        strides = [values[name] for name in WEIGHT_STRIDES[2:]]
        back = sum((k - 1) * min(0, s) for k, s in zip(g.kernel_size, strides, strict=True))
        first = values["weight"] + 4 * back
        array = at[first] if first in at else _memory(first, math.prod(g.weight_size))
        known["weight"] = Inside(array, -4 * back)
        return known


def _memory(address: int, count: int) -> np.ndarray:
    """Elements at an address, which are NaN until something is written."""
    array = np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
    array[:] = np.nan
    return array


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "precision", "size", "kernels"),
    [
        # The last extents are not those that the file was tiled for.
        pytest.param(
            STRIDED,
            "tf32",
            (1, 3, 2, 4),
            {
                *("ampere_strided_pack", "ampere_strided", "ampere_strided_dgrad"),
                *("ampere_wgrad", "reduce"),
            },
            marks=pytest.mark.more,
        ),
        pytest.param(
            DEPTHWISE,
            "follow",
            (2, 2, 3, 4),
            {"depthwise", "depthwise_wgrad", "direct_reduce"},
            marks=pytest.mark.more,
        ),
        pytest.param(
            CONV,
            "tf32",
            (1, 4, 6, 5),
            {"ampere_gather_pack", "ampere_gather", "ampere_wgrad", "reduce"},
            marks=pytest.mark.more,
        ),
        pytest.param(
            STRIDED_CONV,
            "tf32",
            (1, 5, 4, 7),
            {
                *("ampere_gather_pack", "ampere_gather", "ampere_wgrad", "reduce"),
                *("ampere_strided_pack", "ampere_strided_dgrad"),
            },
            marks=pytest.mark.more,
        ),
    ],
)
def test_autograd_of_a_file_on_emulated_kernels(
    text: str, precision: str, size: tuple[int, ...], kernels: set[str], tmp_path: Path
) -> None:
    layer = layer_of(text)
    g = layer.geometry
    names = load(export.export(layer, precision, architectures=("sm_80",)).text)
    emulated = EmulatedKernels(names, layer, tmp_path)
    names["extension"] = lambda bias: emulated
    parameters = getattr(names["ModelNew"](), layer.path)
    function = names[f"{layer.kind}Function"]
    x = torch.rand(size[0], g.in_channels, *size[1:], requires_grad=True)
    leaves = [x, parameters.weight, *([parameters.bias] if layer.bias else [])]
    y = function.apply(x, parameters.weight, parameters.bias)
    gy = torch.rand(y.shape)
    got = torch.autograd.grad(y, leaves, gy)

    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    bias = doubles[2] if layer.bias else None
    others = (g.output_padding, g.groups, g.dilation) if g.transposed else (g.dilation, g.groups)
    operator = getattr(F, layer.function)
    want_y = operator(doubles[0], doubles[1], bias, g.stride, g.padding, *others)
    want = torch.autograd.grad(want_y, doubles, gy.double())
    tolerance = 1e-3 if precision == "tf32" else 1e-6
    for ours, theirs in zip((y, *got), (want_y, *want), strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()
    assert {re.sub(r"^.*?_(tf32|ieee)_", "", name) for name in emulated.ran} == kernels
    with pytest.raises(RuntimeError, match="once_differentiable"):
        again = function.apply(x, parameters.weight, parameters.bias)
        (first,) = torch.autograd.grad(again.square().sum(), x, create_graph=True)
        first.sum().backward()


# ---------------------------------------------------------------- PTX


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "kb70" else [pytest.mark.more]) for n in problem_names()],
)  # fmt: skip
def test_shipped_kernels_are_the_packages(name: str, bias: bool) -> None:
    """The tidied text of a shipped file and the package's kernels are the same PTX.

    An operation at a time, as the package compiles them: what else stands in a program decides on
    the order of the compiler's work, and with it on the form of a comparison here and there.
    """
    pytest.importorskip("cuda.bindings")
    layer = layer_of(name)
    names = load((REPOSITORY / "kernelbench" / f"{name}.py").read_text())
    got: dict[str, str] = {}
    for variant in names["KERNELS"]:
        source = names["kernel_source"]([variant], bias)
        if bias and not variant.startswith("forward"):
            assert source == names["kernel_source"]([variant], False)  # compiled without a bias
        else:
            got |= oracle.entries(oracle.compile_ptx(source, "sm_90a")[0])
    wanted = {}
    (arithmetic,) = variants.arithmetics(layer, "problem")
    for operation in ("forward",) if bias else OPERATIONS:
        asked = operation_of(layer, operation, arithmetic)
        for launch in asked.plan(Gpu()).schedule(layer.batch, asked.input_size).launches:
            spec = launch.kernel
            macros = dict(spec.macros)
            if operation == "forward":
                macros["CONVT3D_BIAS"] = str(int(bias))
            ptx, _ = oracle.compile_ptx(flatten(spec.file), "sm_90a", tuple(macros.items()))
            short = spec.entry.removeprefix("convt3d_")
            wanted[f"{operation}_{arithmetic.value}_{short}"] = oracle.entries(ptx)[spec.entry]
    assert set(got) == set(wanted)
    different = [entry for entry in wanted if got[entry] != wanted[entry]]
    assert different == [], "run: python tools/kernelbench_generate.py"


# ---------------------------------------------------------------- compilers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision", "bias", "target"),
    [
        pytest.param("kb73_g4", "follow", False, "sm_90a", marks=pytest.mark.more),
        pytest.param("kb73_g4", "follow", True, "sm_80", marks=pytest.mark.more),
        pytest.param("kb70", "tf32", False, "sm_90a", marks=pytest.mark.more),
        pytest.param("kb70", "tf32", False, "sm_80", marks=pytest.mark.more),
        pytest.param(DEPTHWISE, "follow", True, "sm_90a", marks=pytest.mark.more),
        pytest.param(DEPTHWISE, "follow", False, "sm_80", marks=pytest.mark.more),
        pytest.param(FLAT, "follow", True, "sm_90a", marks=pytest.mark.more),
        pytest.param(WGMMA_FLAT, "tf32", True, "sm_90a", marks=pytest.mark.more),
        pytest.param("kb73", "tf32", False, "sm_90a", marks=pytest.mark.more),
    ],
)
def test_cuda_source_compiles(
    name: str, precision: str, bias: bool, target: str, tmp_path: Path
) -> None:
    compiler = nvcc()
    names = load(export.export(layer_of(name), precision, architectures=BOTH).text)
    source = tmp_path / "cuda.cu"
    hopper = target == "sm_90a"
    source.write_text(names["cuda_source"](bias, hopper))
    name = target.removeprefix("sm_")
    architecture = f"-gencode=arch=compute_{name},code=sm_{name}"
    command = [compiler, architecture, "-std=c++17", "-O1", "-c", str(source)]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "cuda.o")], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    cubin = (tmp_path / "cuda.o").read_bytes()
    for variant in names["chosen"](hopper):
        for entry in names["KERNELS"][variant][1]:
            assert f"{variant}_{entry}".encode() in cubin


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "kb61" else [pytest.mark.more]) for n in problem_names()],
)
def test_shipped_file_compiles(name: str, tmp_path: Path) -> None:
    names = load((REPOSITORY / "kernelbench" / f"{name}.py").read_text())
    source = tmp_path / "cuda.cu"
    source.write_text(names["cuda_source"](bias=False))
    command = [nvcc(), *names["architecture_flags"](), "-std=c++17", "-O1", "-c", str(source)]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "cuda.o")], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    cubin = (tmp_path / "cuda.o").read_bytes()
    for variant, (_, entries, _) in names["KERNELS"].items():
        for entry in entries:
            assert f"{variant}_{entry}".encode() in cubin


@pytest.mark.more
def test_binding_compiles_against_pytorchs_headers(tmp_path: Path) -> None:
    check_binding(load(export.export(layer_of("kb72")).text), tmp_path)
