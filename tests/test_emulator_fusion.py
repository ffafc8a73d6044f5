"""Fused epilogues of every kernel on the emulated GPU: steps, bias of a gradient by input, slices.

Outputs start as NaN. They are held to the float64 reference of convolution and steps, by what the
arithmetic of the sums can lose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from convt3d import reference
from convt3d.cuda import epilogue
from convt3d.cuda.plan.direct import choose_gather
from convt3d.cuda.plan.patch import Tile, WgmmaPatchPlan
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.fusion import KINDS, Fusion, fusion_of
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic
from emulator import build
from emulator.gpu import EmulatedGpu, backend
from emulator.harness import Flavour
from test_emulator_col2im import CASES as COL2IM
from test_emulator_kernels import (
    CASES,
    DILATED,
    DTYPES,
    FLAT_TILES,
    KEPT,
    LAYERS,
    LOSS,
    STRIDED,
    WGMMA,
    flat_cases,
    flat_tile,
    layer,
    plan_at,
    sampled,
    strided,
    wgmma_at,
)
from test_emulator_kernels import Case as KernelCase
from test_emulator_ndhwc import LAST, ndhwc_with
from test_emulator_patch import CASES as PATCH_CASES
from test_emulator_patch import FEW
from test_emulator_patch import GRADIENTS as PATCH_GRADIENTS
from test_emulator_patch import IEEE as PATCH_IEEE
from test_emulator_phases import PHASES, TRANSPOSED, phases_with, transposed_with
from test_emulator_rows import CASES as ROWS
from test_emulator_strided_dgrad import GRADIENTS, gradient_with

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
    weight_last: bool = False


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
    if case.weight_last:
        weight = laid(weight, True)
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
    # A gradient by input has no bias of its own, nor has the forward pass that may stand for it.
    flipped = case.operation == "grad_input" and macros.get("CONVT3D_BIAS") == "0"
    has_none = macros.get("CONVT3D_FORWARD", "1") == "0" or flipped
    steps_of_bias = int(case.bias and has_none)
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


def direct_plan(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
    canonical, _ = problem.canonical(size)
    return choose_gather(canonical)


# ---------------------------------------------------------------- direct


@pytest.mark.sample(every=4)
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


# ---------------------------------------------------------------- the branches of all stores

CHAINS = (CHAIN, OTHER, ("relu",), ("hardswish", "add"), ("gelu_tanh", "shift"), ("tanh", "scale"))


def branches(cases: Sequence[tuple[Any, Pick]], every: int, first: int = 0) -> list[Any]:
    """Cases of the tests of a family, each with steps; some of them write a slice.

    Every so many run each time, the others with the mark `more`.
    """
    found = []
    for number, (of, pick) in enumerate(cases, first):
        kinds = CHAINS[number % len(CHAINS)]
        # A tensor beside a slice is left to PyTorch.
        whole = number % 3 or any(KINDS[kind].operand == "tensor" for kind in kinds)
        found.append(
            Case(
                *(of.layer, of.operation, of.arithmetic, kinds, without_bias(pick)),
                last=of.target_last,
                source_last=of.source_last,
                bias=number % 4 != 1,
                slice=None if whole else (16, 16),
                batch=of.batch,
                weight_last=of.weight_last,
            )
        )
    return sampled(found, every)


def without_bias(pick: Pick) -> Pick:
    """Gradients by input have plans without a bias, which is a step of their epilogue."""

    def picked(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        return pick(replace(problem, bias=problem.bias and problem.forward), batch, size, gpu)

    return picked


def usual(layers: Callable[[str], bool], file: str, every: int) -> list[tuple[KernelCase, Pick]]:
    """Every so many of the emulator's usual cases, of some layers, on a kernel file."""
    found = [case for case in CASES if case.operation != "grad_weight" and layers(case.layer)]
    return [(case, plan_at(0.0, file)) for case in found[::every]]


SPARSE = ("depthwise k4 s2", "depthwise k3, rows of 8", "one channel")


def patches() -> list[tuple[KernelCase, Pick]]:
    """Tiles of patch/kernel.cu: contiguous, channels_last, gradients by input, splits."""
    contiguous = [(*case, "forward", False) for case in PATCH_CASES]
    contiguous += [(g, size, Arithmetic.IEEE, t, "forward", False) for g, size, t in PATCH_IEEE]
    contiguous += [(*case, "grad_input", False) for case in PATCH_GRADIENTS]
    found = []
    for geometry, size, arithmetic, tile, operation, last in [*contiguous, *PATCHES_LAST]:
        label = f"patch {geometry.label} {size}"
        LAYERS[label] = (geometry, size)
        plan = partial(patch_plan, tile)
        found.append((KernelCase(label, operation, arithmetic, last, last, weight_last=last), plan))
    return found


def patch_plan(tile: Tile, problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
    return WgmmaPatchPlan(problem, tile, FEW)


PATCHES_LAST = [
    (
        *(layer((160, 12), (1, 2, 2), (1, 2, 2)), (3, 4, 7), Arithmetic.BF16),
        *(Tile(2, 1, 48, 2, 2, False), "forward", True),
    ),
    (
        *(layer((72, 5), (2, 2, 4), (2, 2, 4)), (3, 8, 8), Arithmetic.BF16),
        *(Tile(2, 1, 80, 2, 2, True, staged=40), "forward", True),
    ),
    (
        *(layer((80, 16), (1, 2, 2), (1, 2, 2)), (3, 4, 7), Arithmetic.BF16),
        *(Tile(2, 1, 96, 2, 2, False, n_major=True), "forward", True),
    ),
    (
        *(layer((72, 32), 2, 2), (3, 4, 16), Arithmetic.BF16),
        *(Tile(2, 1, 64, 3, 3, False, staged=64), "grad_input", True),
    ),
    (
        *(layer((40, 16), 2, 2), (3, 8, 8), Arithmetic.TF32),
        *(Tile(2, 1, 32, 4, 4, True, staged=32), "grad_input", True),
    ),
]


FAMILIES: dict[str, list[Any]] = {
    "direct": branches(
        [(case, direct_plan) for case, _ in DILATED]
        + [
            (KernelCase("depthwise k4 s2", operation, Arithmetic.F16, True, True), direct_plan)
            for operation in ("forward", "grad_input")
        ],
        2,
    ),
    "phases": branches([(case, phases_with(**wanted)) for case, wanted in PHASES], 5),
    "transposed": branches(
        [(case, transposed_with(**wanted)) for case, wanted in TRANSPOSED], 5, 1
    ),
    "strided dgrad": branches([(case, gradient_with(**wanted)) for case, wanted in GRADIENTS], 5),
    "ndhwc": branches(
        [
            (replace(case, weight_last=wanted.get("direct", False)), ndhwc_with(**wanted))
            for case, wanted in LAST
        ],
        5,
    ),
    "sweep": branches(
        [(case, wgmma_at(where)) for case, where in (*WGMMA, *DILATED)]
        + [(case, wgmma_at(where, kept=True, ping_pong=pong)) for case, where, pong in KEPT],
        5,
        1,
    ),
    "depthwise": branches(usual(SPARSE.__contains__, "depthwise/conv.cu", 1), 5),
    "col2im": branches(COL2IM, 4, 2),
    "rows": branches(ROWS, 3),
    "gather": branches(
        usual(lambda name: "channel k13" not in name, "ampere/gather/kernel.cu", 7), 4
    ),
    "ampere patch": branches(
        [(case, flat_tile(FLAT_TILES[tile])) for case, tile in flat_cases()], 5
    ),
    "patch": branches(patches(), 6),
    "strided": branches([(case, strided(where)) for case, where in STRIDED], 4, 1),
}
"""Cases of every family, over the branches of its store."""


@pytest.mark.sample(every=6)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(*one.values, marks=one.marks, id=f"{family}-{name(one.values[0])}")
        for family, cases in FAMILIES.items()
        for one in cases
    ],
)
def test_store(case: Case) -> None:
    check(case)


def untapped() -> list[Case]:
    """Outputs that no tap reaches, by every store: each its own value, and in slices."""
    dilated = "k3 s2 d2, rows of 17"
    columns = "k3 s2 d2, 40 columns"
    sent = {"phased": 1, "store_warps": 2, "consumers": 3, "tap_boxes": True}
    picks: list[tuple[str, Arithmetic, bool, Pick]] = [
        (dilated, Arithmetic.TF32, False, phases_with(phased=2)),
        (dilated, Arithmetic.BF16, False, phases_with(phased=1)),
        (dilated, Arithmetic.TF32, False, phases_with(**sent)),
        (columns, Arithmetic.BF16, True, ndhwc_with(phased=2, split=2, fills=True)),
        (columns, Arithmetic.TF32, True, ndhwc_with(phased=1, fills=True)),
        ("phases without taps", Arithmetic.TF32, False, strided(0.0)),
        ("phases without taps", Arithmetic.F16, False, strided(0.5)),
    ]
    found = []
    for number, (layer_, arithmetic, last, pick) in enumerate(picks):
        at = (layer_, "forward", arithmetic)
        kinds = ("hardswish", "add") if number % 2 else ("mul", "tanh")
        found.append(Case(*at, kinds, pick, last, bias=number % 3 > 0))
        beside = (16, -LAYERS[layer_][0].out_channels % 16)
        found.append(Case(*at, ("sigmoid",), pick, last, bias=number % 3 == 0, slice=beside))
    return found


@pytest.mark.sample
@pytest.mark.parametrize("case", sampled(untapped(), 3), ids=name)
def test_outputs_without_taps(case: Case) -> None:
    check(case)


SPLITS = [
    Case(
        *("patch k222", "grad_input", Arithmetic.TF32, ("relu",)),
        without_bias(partial(patch_plan, Tile(2, 1, 64, 2, 2, False, splits=2, fold=8))),
        slice=(8, 8),
    ),
    Case(
        *("k222", "grad_input", Arithmetic.BF16, ("silu",)),
        without_bias(flat_tile(FLAT_TILES[0])),
        last=True,
        slice=(8, 4),
    ),
    Case(
        *("k222", "grad_input", Arithmetic.TF32, ("gelu", "scale")),
        without_bias(flat_tile(FLAT_TILES[0])),
        slice=(4, 8),
    ),
]
LAYERS["patch k222"] = (layer((64, 8), 2, 2), (3, 2, 8))


@pytest.mark.parametrize("case", SPLITS, ids=name)
def test_reductions_of_splits_write_slices(case: Case) -> None:
    gpu = check(case)
    assert gpu.launches[-1].entry.endswith("_reduce")


# ---------------------------------------------------------------- beside the stores


def test_the_bias_of_a_gradient_by_input_is_a_step() -> None:
    """As a Conv3d calls it, without steps of its own."""
    geometry, size = LAYERS["k3 s2 in groups"]
    generator = torch.Generator().manual_seed(31)
    gy = torch.randn(2, 16, *geometry.output_size(size), generator=generator)
    w, b = torch.randn(geometry.weight_size, generator=generator), torch.randn(16)
    with EmulatedGpu([gy, w, b]) as gpu, mock.patch.object(torch.Tensor, "add_") as add:
        got = backend.grad_input(gy, w, geometry, size, False, b)
    assert not add.called
    macros = dict(gpu.launches[-1].macros)
    assert macros["CONVT3D_FUSION"] == "Bias<0,Float32>" and macros["CONVT3D_BIAS"] == "0"
    wanted = reference.grad_input(gy, w, geometry, size) + b.double().view(-1, 1, 1, 1)
    assert float((got.double() - wanted).norm() / wanted.norm()) < 1e-3


def test_what_is_held_at_first_has_the_bias() -> None:
    check(Case("k3 s2 in groups", "grad_input", Arithmetic.IEEE, ("add_scalar", "mul_held")))


def test_what_a_kernel_does_not_run_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epilogue, "FUSING", frozenset())
    case = Case("k3 s2 in groups", "grad_input", Arithmetic.IEEE, CHAIN, slice=(4, 4), fused=False)
    check(case)
    check(replace(case, operation="forward", kinds=(), last=True))


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("options", [{"order": 77}, {"flavour": Flavour.SANITIZED}], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case("k3 s2 in groups", "forward", Arithmetic.F16, CHAIN, last=True),
        Case("phases without taps", "forward", Arithmetic.TF32, OTHER),
        Case("everything odd", "grad_input", Arithmetic.BF16, CHAIN),
        Case("depthwise k4 s2", "forward", Arithmetic.TF32, OTHER),
    ],
    ids=name,
)
def test_any_order_and_sanitized(case: Case, options: dict[str, Any]) -> None:
    check(case, options)
