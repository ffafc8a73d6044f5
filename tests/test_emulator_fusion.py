"""Fused epilogues of every kernel on the emulated GPU: steps, bias of a gradient by input, slices.

Outputs start as NaN. They are held to the float64 reference of convolution and steps, by what the
arithmetic of the sums can lose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from convt3d import reference
from convt3d.cuda.plan.direct import choose_gather
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.fusion import KINDS, Fusion, fusion_of
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic
from emulator import build
from emulator.gpu import EmulatedGpu, backend
from test_emulator_kernels import DTYPES, LAYERS, LOSS, plan_at

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

Pick = Callable[[Problem, int, Triple, Gpu], Any]


@dataclass(frozen=True)
class Case:
    """One call of ``backend.fused``.

    Args:
        layer: of ``LAYERS``.
        kinds: steps.
        pick: chooses the plan.
        kernel: entry that must have run.
        slice: channels of the larger tensor before those that are written, and behind them.
        fused: whether the kernel is expected to run the steps.
        sliced: whether it is expected to write the slice.
    """

    layer: str
    operation: str
    arithmetic: Arithmetic
    kinds: tuple[str, ...] = ()
    pick: Pick | None = None
    last: bool = False
    source_last: bool | None = None
    bias: bool = True
    kernel: str = ""
    slice: tuple[int, int] | None = None
    fused: bool = True
    sliced: bool = True
    batch: int = 2


SCALARS = {"add_scalar": (0.3,), "mul_scalar": (-1.7,), "leaky_relu": (0.1,), "clamp": (-0.4, 0.9)}


def fusion(kinds: Sequence[str]) -> Fusion | None:
    if not kinds:
        return None
    return fusion_of(kinds, [v for kind in kinds for v in SCALARS.get(kind, ())])


def laid(tensor: torch.Tensor, last: bool) -> torch.Tensor:
    memory_format = torch.channels_last_3d if last else torch.contiguous_format
    return tensor.contiguous(memory_format=memory_format)


def check(case: Case, gpu_options: dict[str, Any] | None = None) -> EmulatedGpu:
    """Run a case and compare it with the reference."""
    geometry, size = LAYERS[case.layer]
    dtype, forward = DTYPES[case.arithmetic], case.operation == "forward"
    generator = torch.Generator().manual_seed(30)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    output_size = geometry.output_size(size)
    source_last = case.last if case.source_last is None else case.source_last
    channels, extents = (
        (geometry.out_channels, output_size) if forward else (geometry.in_channels, size)
    )
    shape = (case.batch, channels, *extents)
    source = (
        values(case.batch, geometry.in_channels, *size)
        if forward
        else values(case.batch, geometry.out_channels, *output_size)
    )
    source, weight = laid(source, source_last), values(*geometry.weight_size)
    bias = values(channels) if case.bias else None
    steps = fusion(case.kinds)
    operands = []
    for number, kind in enumerate(() if steps is None else steps.operands):
        if kind == "tensor":
            operands.append(laid(values(*shape), case.last))
        else:  # in turn of both dtypes
            operands.append(values(channels).to(torch.float32 if number % 2 else dtype))
    tensors = [source, weight, *operands, *([] if bias is None else [bias])]
    whole = into = None
    if case.slice is not None:
        before, behind = case.slice
        whole = laid(values(case.batch, before + channels + behind, *extents), case.last)
        into = whole[:, before : before + channels]
        kept = whole.clone()
        into.fill_(float("nan"))
        tensors += [whole]
    with EmulatedGpu(tensors, case.pick, case.arithmetic, options=gpu_options or {}) as gpu:
        got = backend.fused(
            case.operation, source, weight, bias, geometry, size, case.last, steps, operands, into
        )

    def define(source: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        if forward:
            return reference.forward(source, w, b, geometry)
        y = reference.grad_input(source, w, geometry, size)
        return y if b is None else y + b.double().view(-1, 1, 1, 1)

    wanted = define(source, weight, bias)
    room = define(source.abs(), weight.abs(), None if bias is None else bias.abs())
    room = LOSS[case.arithmetic] * room
    if steps is not None:
        wide = [t.double() for t in operands]
        exact = steps.apply(wanted, wide)
        # What an error of the sum, or of the result, becomes.
        low, high = steps.apply(wanted - room, wide), steps.apply(wanted + room, wide)
        room = torch.maximum((low - exact).abs(), (high - exact).abs())
        room = 1.5 * room + 2 * LOSS[case.arithmetic] * exact.abs() + 1e-6
        wanted = exact
    assert got.shape == wanted.shape and got.dtype == dtype
    assert not torch.isnan(got).any(), "not everything was written"
    worst = float(((got.double() - wanted).abs() / room.clamp_min(1e-30)).max())
    assert worst <= 1, f"an element is {worst:.3g} times further off than rounding explains"
    if whole is not None and into is not None:
        assert got.data_ptr() == into.data_ptr()
        outside = torch.ones(whole.shape[1], dtype=torch.bool)
        outside[case.slice[0] : case.slice[0] + channels] = False
        assert torch.equal(whole[:, outside], kept[:, outside])
    macros = dict(gpu.launches[-1].macros)
    steps_of_bias = int(case.bias and macros["CONVT3D_FORWARD"] == "0")
    count = len(case.kinds) + steps_of_bias if case.fused else 0
    run = re.sub("<[^>]*>", "", macros.get("CONVT3D_FUSION", ""))
    assert len(run.split(",") if run else ()) == count
    sliced = case.slice is not None and case.fused and case.sliced
    assert ("CONVT3D_TENSOR_CHANNELS" in macros) == sliced
    if case.kernel:
        assert case.kernel in [launch.entry for launch in gpu.launches]
    return gpu


def name(case: Case) -> str:
    layout = "ndhwc" if case.last else "ncdhw"
    parts = [case.layer, case.operation, case.arithmetic.value, layout, "+".join(case.kinds)]
    return "-".join([*parts, *(["bias"] if case.bias else []), *(["slice"] if case.slice else [])])


CHAIN = ("scale", "add", "shift", "leaky_relu")
OTHER = ("mul", "silu", "clamp", "add_scalar")
THIRD = ("gelu", "mul_scalar")


# ---------------------------------------------------------------- direct


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind(kind: str) -> None:
    number = list(KINDS).index(kind)
    arithmetic = (Arithmetic.IEEE, Arithmetic.BF16, Arithmetic.F16)[number % 3]
    last = number % 2 == 1
    check(
        Case(
            *("one channel", "forward", arithmetic, (kind,), plan_at(0, "direct/conv.cu")),
            last=last,
            bias=number % 4 > 0,
        )
    )


DIRECT = [
    Case("everything odd", "grad_input", Arithmetic.TF32, CHAIN),
    Case("one channel", "grad_input", Arithmetic.F16, OTHER, last=True),
    Case("one channel", "grad_input", Arithmetic.IEEE, (), last=True),  # the bias alone
    Case("one channel", "forward", Arithmetic.IEEE, THIRD, slice=(4, 6), last=True),
    Case("one channel", "forward", Arithmetic.BF16, THIRD, slice=(4, 2)),
    Case("one channel", "forward", Arithmetic.BF16, THIRD, slice=(4, 3), sliced=False),  # alignment
    Case("one channel", "forward", Arithmetic.IEEE, ("add",), slice=(4, 6), sliced=False),
]


@pytest.mark.parametrize("case", DIRECT, ids=name)
def test_direct(case: Case) -> None:
    check(replace(case, pick=direct_plan, kernel="convt3d_direct"))


def direct_plan(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
    canonical, _ = problem.canonical(size)
    return choose_gather(canonical)
