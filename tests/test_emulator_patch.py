"""Kernel == stride on warpgroup products, on the emulated GPU: every way of filling and storing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from convt3d import reference
from convt3d.cuda import backend
from convt3d.cuda.plan import ranked_plans
from convt3d.cuda.plan.ampere_patch import PatchPlan
from convt3d.cuda.plan.patch import Tile, WgmmaPatchPlan, ranked, refusal
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.geometry import Geometry, Triple
from convt3d.precision import Arithmetic
from emulator import build, harness
from emulator.gpu import EmulatedGpu
from test_emulator_kernels import DTYPES, layer, sampled

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

BATCH = 2
FEW = replace(Gpu(), multiprocessors=3)
TOLERANCE = {
    Arithmetic.IEEE: 4e-7,
    Arithmetic.TF32: 5e-4,
    Arithmetic.F16: 5e-4,
    Arithmetic.BF16: 3e-3,
}

K2 = layer((64, 8), 2, 2)
K122 = layer((16, 40), (1, 2, 2), (1, 2, 2))
K244 = layer((32, 5), (2, 4, 4), (2, 4, 4))

#: Layer, input size, arithmetic, tile.
CASES: list[tuple[Geometry, Triple, Arithmetic, Tile]] = [
    (K2, (4, 4, 8), Arithmetic.TF32, Tile(2, 1, 64, 3, 2, True, fillers=2, ping_pong=True)),
    (layer((72, 8), 2, 2), (3, 4, 12), Arithmetic.TF32, Tile(1, 2, 32, 4, 3, True, 2)),
    (layer((160, 8), 2, 2), (4, 5, 8), Arithmetic.TF32, Tile(2, 1, 40, 2, 3, False)),
    (K244, (3, 5, 12), Arithmetic.TF32, Tile(3, 1, 160, 3, 1, True, ping_pong=True)),
    (layer((80, 8), 2, 2, groups=2), (4, 4, 8), Arithmetic.BF16, Tile(2, 2, 32, 3, 1, True)),
    (K2, (3, 5, 96), Arithmetic.TF32, Tile(2, 1, 64, 2, 2, True, staged=32)),
    (
        layer((144, 12), 2, 2),
        (3, 5, 16),
        Arithmetic.F16,
        Tile(2, 1, 96, 2, 2, False, n_major=True),
    ),
    (K2, (3, 3, 64), Arithmetic.TF32, Tile(2, 1, 64, 2, 2, True, staged=64)),
    (K2, (3, 4, 64), Arithmetic.BF16, Tile(2, 2, 32, 2, 1, True, staged=16)),
    (K244, (2, 2, 64), Arithmetic.BF16, Tile(2, 1, 160, 3, 1, True, staged=32)),
    (layer((16, 6), 3, 3), (3, 4, 8), Arithmetic.F16, Tile(2, 1, 168, 2, 1, True)),
    # More warps could turn weights than a chunk has boxes.
    (
        layer((288, 6), (1, 2, 2), (1, 2, 2)),
        (3, 5, 8),
        Arithmetic.TF32,
        Tile(2, 1, 16, 6, 4, False, fillers=2),
    ),
]
#: Split operands.
IEEE: list[tuple[Geometry, Triple, Tile]] = [
    (K2, (3, 5, 12), Tile(2, 1, 64, 2, 2, True, fillers=2)),
    (layer((72, 8), 2, 2), (3, 4, 12), Tile(1, 2, 32, 4, 3, True, 2)),
    (layer((320, 5), 2, 2), (3, 5, 8), Tile(2, 1, 40, 2, 3, False)),
    (K244, (3, 5, 12), Tile(2, 1, 80, 3, 1, True)),
    (K2, (3, 3, 64), Tile(2, 1, 64, 2, 2, True, staged=64)),
    (layer((288, 6), (1, 2, 2), (1, 2, 2)), (3, 5, 8), Tile(2, 1, 16, 6, 4, False, fillers=2)),
    (layer((80, 16), 2, 2, groups=2), (3, 4, 5), Tile(3, 1, 32, 2, 2, True)),
]
#: The same of gradients; slots of a cell that a line has are 4, 8 or 16 bytes.
GRADIENTS: list[tuple[Geometry, Triple, Arithmetic, Tile]] = [
    (layer((16, 20), 2, 2), (2, 3, 16), Arithmetic.TF32, Tile(2, 2, 16, 2, 3, False)),
    (layer((32, 32), 2, 2, groups=2), (2, 2, 16), Arithmetic.TF32, Tile(2, 1, 8, 4, 4, True)),
    (K244, (2, 3, 8), Arithmetic.TF32, Tile(2, 1, 32, 3, 5, True)),
    (K122, (2, 3, 32), Arithmetic.BF16, Tile(2, 2, 16, 2, 3, True)),
    (K122, (2, 3, 32), Arithmetic.BF16, Tile(1, 1, 8, 3, 3, True, 2)),
    (K2, (3, 2, 8), Arithmetic.TF32, Tile(2, 1, 64, 2, 2, False, splits=2, fold=8)),
    (layer((16, 20), 2, 2), (2, 2, 16), Arithmetic.BF16, Tile(2, 2, 16, 2, 3, True, fold=16)),
    (layer((16, 32), 2, 2), (3, 2, 8), Arithmetic.BF16, Tile(1, 1, 16, 2, 2, False, 2, 2, 8)),
    (layer((48, 16), 2, 2), (2, 3, 16), Arithmetic.TF32, Tile(2, 1, 24, 2, 2, False, splits=4)),
    (
        layer((64, 32), 2, 2),
        (3, 2, 8),
        Arithmetic.BF16,
        Tile(1, 1, 64, 2, 2, False, 2, splits=2, fold=8),
    ),
    # One tap: lines are channels, of which a chunk has 64, or 32.
    (layer((24, 40), 1), (3, 5, 4), Arithmetic.TF32, Tile(2, 1, 24, 2, 2, True)),
    (layer((40, 72), 1), (4, 7, 5), Arithmetic.TF32, Tile(2, 2, 16, 3, 2, False)),
    (layer((64, 136), 1), (2, 7, 14), Arithmetic.TF32, Tile(1, 2, 64, 2, 2, False, 2, splits=3)),
    (layer((24, 72), 1), (3, 5, 8), Arithmetic.BF16, Tile(2, 1, 16, 2, 2, True)),
    (layer((136, 200), 1), (5, 7, 8), Arithmetic.BF16, Tile(1, 2, 72, 3, 3, False, 2)),
    (layer((64, 320), 1), (2, 4, 9), Arithmetic.F16, Tile(2, 2, 64, 2, 2, False, splits=2)),
    (layer((32, 264), 1), (3, 4, 6), Arithmetic.BF16, Tile(3, 1, 32, 2, 2, False, splits=3)),
    (layer((48, 80), 1, groups=2), (3, 4, 6), Arithmetic.BF16, Tile(2, 1, 24, 4, 1, True)),
]


def check(
    geometry: Geometry,
    size: Triple,
    arithmetic: Arithmetic,
    tile: Tile,
    operation: str = "forward",
    in_order: bool = True,
    last: bool = False,
) -> None:
    """Every element against the reference, by this kernel or, where TMA cannot, by ampere/patch."""
    problem = Problem(operation, geometry, arithmetic, last, last, operation == "forward")
    assert refusal(problem, FEW) is None
    plan = WgmmaPatchPlan(problem, tile, FEW)
    generator = torch.Generator().manual_seed(3)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DTYPES[arithmetic])

    w, b = values(*geometry.weight_size), values(geometry.out_channels)
    if not in_order:
        w = w.transpose(0, 1).contiguous().transpose(0, 1)
    memory_format = torch.channels_last_3d if last else torch.contiguous_format
    if operation == "forward":
        x = values(BATCH, geometry.in_channels, *size).contiguous(memory_format=memory_format)
        w = w.contiguous(memory_format=memory_format) if last and in_order else w
        with EmulatedGpu([x, w, b], lambda *_: plan, arithmetic) as gpu:
            got = backend.forward(x, w, b, geometry, last)
        want = reference.forward(x, w, b, geometry)
    else:
        gy = values(BATCH, geometry.out_channels, *geometry.output_size(size))
        gy = gy.contiguous(memory_format=memory_format)
        w = w.contiguous(memory_format=memory_format) if last and in_order else w
        with EmulatedGpu([gy, w], lambda *_: plan, arithmetic) as gpu:
            got = backend.grad_input(gy, w, geometry, size, last)
        want = reference.grad_input(gy, w, geometry, size)
    assert (got.double() - want).norm() / want.norm() <= TOLERANCE[arithmetic]
    file = "patch/kernel.cu" if plan.mapped(size) else "ampere/patch/kernel.cu"
    assert {spec.file for spec in gpu.launches} == {file}


@pytest.mark.parametrize(
    "case", sampled([(case,) for case in CASES], 5), ids=lambda c: f"{c[0].label} {c[2].value}"
)
def test_forward(case: tuple[Geometry, Triple, Arithmetic, Tile]) -> None:
    check(*case)


@pytest.mark.sample
@pytest.mark.parametrize("case", IEEE, ids=lambda c: c[0].label)
def test_split_operands(case: tuple[Geometry, Triple, Tile]) -> None:
    geometry, size, tile = case
    check(geometry, size, Arithmetic.IEEE, tile)


def test_split_operands_of_weights_in_another_order() -> None:
    geometry, size, tile = IEEE[0]
    check(geometry, size, Arithmetic.IEEE, tile, in_order=False)


@pytest.mark.sample
@pytest.mark.parametrize("in_order", [True, False], ids=["weights too", "weights in another order"])
def test_channels_last(in_order: bool) -> None:
    if in_order:
        bf16 = (layer((160, 12), (1, 2, 2), (1, 2, 2)), (3, 4, 7), Arithmetic.BF16)
        check(*bf16, Tile(2, 1, 48, 2, 2, False), last=True)
        few = (layer((72, 5), (2, 2, 4), (2, 2, 4)), (3, 5, 8), Arithmetic.BF16)
        check(*few, Tile(2, 1, 80, 2, 2, True), last=True)
        boxes = (few[0], (3, 8, 8), few[2])
        check(*boxes, Tile(2, 1, 80, 2, 2, True, staged=40), last=True)
        rows = (layer((80, 16), (1, 2, 2), (1, 2, 2)), (3, 4, 7), Arithmetic.BF16)
        check(*rows, Tile(2, 1, 96, 2, 2, False, n_major=True), last=True)
    else:
        geometry = layer((48, 8), 2, 2, groups=2)
        tile = Tile(2, 1, 16, 3, 1, True)
        check(geometry, (3, 4, 5), Arithmetic.TF32, tile, in_order=False, last=True)


@pytest.mark.parametrize(
    "case",
    sampled([(case,) for case in GRADIENTS], 5),
    ids=lambda c: f"{c[0].label} {c[2].value}",
)
def test_gradient_by_input(case: tuple[Geometry, Triple, Arithmetic, Tile]) -> None:
    check(*case, "grad_input")


def test_gradient_of_channels_last() -> None:
    case = (layer((72, 32), 2, 2), (3, 4, 16), Arithmetic.BF16)
    check(*case, Tile(2, 1, 64, 3, 3, False, staged=64), "grad_input", last=True)


@pytest.mark.more
def test_gradient_of_channels_last_in_float32() -> None:
    case = (layer((40, 16), 2, 2), (3, 8, 8), Arithmetic.TF32)
    check(*case, Tile(2, 1, 32, 4, 4, True, staged=32), "grad_input", last=True)


@pytest.mark.more
@pytest.mark.parametrize(
    ("case", "operation"),
    [(CASES[0], "forward"), (GRADIENTS[3], "grad_input"), (GRADIENTS[-4], "grad_input")],
)
def test_weights_in_another_order(
    case: tuple[Geometry, Triple, Arithmetic, Tile], operation: str
) -> None:
    check(*case, operation, in_order=False)


def test_a_sliced_weight_is_copied_with_its_strides() -> None:
    """It does not start at a multiple of 16 bytes, and between its columns are no numbers."""
    geometry, size, arithmetic, tile = CASES[0]
    problem = Problem("forward", geometry, arithmetic)
    shape = geometry.weight_size
    w = torch.full((*shape[:-1], 2 * shape[-1] + 1), torch.nan)[..., 1::2].copy_(torch.randn(shape))
    x = torch.randn(BATCH, geometry.in_channels, *size)
    with EmulatedGpu([x, w], lambda *_: WgmmaPatchPlan(problem, tile, FEW), arithmetic):
        got = backend.forward(x, w, None, geometry, False)
    want = reference.forward(x, w, None, geometry)
    assert (got.double() - want).norm() / want.norm() <= TOLERANCE[arithmetic]


def test_rows_that_are_no_whole_runs_and_volumes_that_tma_cannot_take() -> None:
    geometry, _, arithmetic, tile = CASES[0]
    check(geometry, (4, 4, 7), arithmetic, tile)
    plan = WgmmaPatchPlan(Problem("forward", geometry, arithmetic), tile)
    assert plan.takes((4, 4, 7)) and not plan.takes((3, 3, 3))
    with pytest.raises(ValueError, match=r"does not take \(3, 3, 3\)"):
        plan.schedule(BATCH, (3, 3, 3))


def test_which_family_comes_first() -> None:
    def kind(problem: Problem, size: Triple) -> type:
        key = (problem, BATCH, size, Gpu())
        every = {type(plan) for plan in ranked_plans(*key)}
        assert {PatchPlan, WgmmaPatchPlan} <= every
        return type(ranked_plans(*key, first_only=True)[0])

    wide = Problem("forward", layer((256, 128), 2, 2), Arithmetic.TF32)
    assert kind(wide, (16, 16, 16)) is WgmmaPatchPlan
    few = Problem("forward", layer((16, 32), 2, 2), Arithmetic.BF16)
    assert kind(few, (64, 64, 64)) is PatchPlan
    last = replace(wide, source_channels_last=True, target_channels_last=True)
    assert kind(last, (16, 16, 16)) is WgmmaPatchPlan
    assert kind(replace(wide, arithmetic=Arithmetic.IEEE), (16, 16, 16)) is WgmmaPatchPlan
    # Rows of the output gradient: 64 bytes twice are a box's row, 16 bytes are too short.
    short = Problem("grad_input", layer((256, 128), 2, 2), Arithmetic.TF32)
    assert ranked(short, BATCH, (8, 8, 8), Gpu())[0][1].tile.fold == 8
    assert ranked(short, BATCH, (8, 8, 2), Gpu()) == []


IN_ORDER_KERNEL = """
#include "patch/config.cuh"
#include "patch/work.cuh"
extern "C" __global__ void kernel(convt3d::int64_t in, convt3d::int64_t out, convt3d::int64_t d,
                                  convt3d::int64_t h, convt3d::int64_t w, int* result) {
  convt3d::PatchArguments<convt3d::PatchConfig> arguments{};
  arguments.stride_in = in;
  arguments.stride_out = out;
  arguments.stride_d = d;
  arguments.stride_h = h;
  arguments.stride_w = w;
  result[0] = arguments.weights_in_order();
}
"""


@pytest.mark.parametrize("last", [False, True])
def test_strides_of_axes_with_one_tap_say_nothing_of_a_weight(tmp_path: Path, last: bool) -> None:
    def in_order(geometry: Geometry, *strides: int) -> bool:
        problem = Problem("forward", geometry, Arithmetic.BF16, last, last)
        plan = ranked(problem, 1, (16, 16, 16), Gpu())[0][1]
        entry = tmp_path / "in_order.cu"
        entry.write_text(IN_ORDER_KERNEL)
        text, result = build.flatten(entry, build.REPLACED), torch.zeros(1, dtype=torch.int32)
        harness.launch("kernel", text, plan.macros, 1, 1, 0, [*strides, result])
        return bool(result)

    # What PyTorch gives a 1x1x1 weight: contiguous(), and to(memory_format=channels_last_3d).
    one = Geometry(64, 32, (1, 1, 1))
    assert in_order(one, 32, 1, 1, 1, 1)
    assert in_order(one, 32, 1, 32, 32, 32)
    assert not in_order(one, 1, 64, 1, 1, 1)
    assert not in_order(one, 64, 1, 1, 1, 1)
    planes = Geometry(64, 32, (1, 2, 2), (1, 2, 2))
    assert in_order(planes, 128, 4, 7, 2, 1) is not last
    assert in_order(planes, 128, 1, 7, 64, 32) is last
    assert not in_order(planes, 128, 4, 7, 1, 2)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Problem("grad_weight", K2, Arithmetic.TF32), "gradient by weight"),
        (Problem("grad_input", layer((16, 16), 3, 3), Arithmetic.TF32), "12 bytes of slots"),
        (Problem("grad_input", layer((16, 12), 2, 2, groups=2), Arithmetic.TF32), "whole chunks"),
        (Problem("grad_input", K2, Arithmetic.IEEE), "IEEE"),
        (Problem("forward", K2, Arithmetic.IEEE, True, True), "IEEE"),
        (Problem("forward", K2, Arithmetic.TF32, True, False), "one layout"),
        (Problem("grad_input", K2, Arithmetic.TF32, True, True), "128 bytes"),
        (Problem("forward", layer((18, 8), 2, 2), Arithmetic.TF32, True, True), "16 bytes"),
        (Problem("forward", layer((8, 8), 2, 2), Arithmetic.TF32), "few channels"),
        (Problem("grad_input", layer((4, 8), 2, 2), Arithmetic.TF32), "few channels"),
        (Problem("forward", layer((64, 8), 3, 2), Arithmetic.TF32), "kernel == stride"),
    ],
)
def test_refusals(problem: Problem, reason: str) -> None:
    assert reason in str(refusal(problem, Gpu()))
    assert not ranked(problem, 1, (8, 8, 8), Gpu())
    ampere = replace(Gpu(), capability=(8, 6))
    assert "9.0" in str(refusal(Problem("forward", K2, Arithmetic.TF32), ampere))
