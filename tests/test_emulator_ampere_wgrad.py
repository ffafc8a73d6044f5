"""The gradient by weight on mma.sync, on the emulated GPU: few channels, whose taps are columns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from convt3d import reference
from convt3d.cuda import backend
from convt3d.cuda.plan.ampere_wgrad import WgradPlan, ranked
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.geometry import Geometry, Triple
from convt3d.precision import Arithmetic
from emulator import build
from emulator.gpu import EmulatedGpu
from test_emulator_kernels import DTYPES, layer, sampled
from test_emulator_wgrad import TOLERANCE

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

BATCH = 2
#: Few multiprocessors, whose CTAs take several tiles.
FEW = replace(Gpu(), multiprocessors=8)
TF32, IEEE, F16, BF16 = Arithmetic.TF32, Arithmetic.IEEE, Arithmetic.F16, Arithmetic.BF16

#: Layer, input size, arithmetic, and whether x and the gradient are channels_last.
CASES: list[tuple[Geometry, Triple, Arithmetic, tuple[bool, bool]]] = [
    (layer((20, 1), 3, 1, 1), (5, 6, 19), TF32, (False, False)),
    (layer((33, 1), 3, 1, 1), (4, 6, 16), BF16, (False, False)),
    (layer((16, 1), 3, 1, 1), (4, 5, 24), F16, (True, False)),
    (layer((8, 2), 3, 1, 1), (3, 6, 17), BF16, (True, True)),
    (layer((18, 3), 3, 2, 1, 1), (3, 4, 18), F16, (True, True)),
    (layer((18, 3), 3, 2, 1, 1), (3, 4, 18), TF32, (True, True)),
    (layer((9, 3), (3, 5, 5), (1, 2, 2), (1, 2, 2)), (3, 5, 11), BF16, (False, False)),
    (layer((9, 3), (3, 5, 5), (1, 2, 2), (1, 2, 2)), (3, 5, 11), IEEE, (False, False)),
    (layer((12, 4), (1, 3, 3), 1, 0, 0, 2), (3, 6, 20), TF32, (False, True)),
    (layer((12, 5), (2, 4, 4), (2, 4, 4)), (3, 5, 9), F16, (False, False)),
    (layer((12, 5), (2, 4, 4), (2, 4, 4)), (3, 5, 9), TF32, (True, True)),
    (layer((24, 3), 6, 6), (2, 3, 8), IEEE, (True, True)),
    (layer((8, 4), 3, 1, 1, 0, 1, 2), (3, 5, 18), BF16, (True, True)),
    (layer((6, 6), 3, 1, 1, 0, 1, 6), (3, 5, 18), TF32, (False, False)),
]


def plans_for(problem: Problem, size: Triple) -> list[WgradPlan]:
    """The cheapest plan, and others: with several warps along columns, along positions, and more
    CTAs for the taps."""
    every = [plan for _, plan in ranked(problem, BATCH, size, FEW)]
    found = [every[0]]
    for fits in (
        lambda plan: plan.warps[1] > 1,
        lambda plan: plan.warps[2] > 1,
        lambda plan: plan.taps != problem.geometry.kernel_size,
    ):
        found += [plan for plan in every if fits(plan) and plan not in found][:1]
    return found


@pytest.mark.sample
@pytest.mark.parametrize(
    "case", sampled([(case,) for case in CASES], 3), ids=lambda c: f"{c[0].label} {c[2].value}"
)
def test_taps_are_columns(
    case: tuple[Geometry, Triple, Arithmetic, tuple[bool, bool]],
) -> None:
    problem = Problem("grad_weight", case[0], case[2], *case[3])
    plans = plans_for(problem, case[1])
    assert any(plan.splits(8) > 1 for plan in plans)
    assert all("taps in columns" in plan.describe()["tile"] for plan in plans)
    check(case, plans)


@pytest.mark.parametrize("channels", [(8, 19), (1, 19)])
def test_few_sums_where_no_more_fit(channels: tuple[int, int]) -> None:
    geometry, size = layer(channels, 1), (4, 5, 24)
    every = [plan for _, plan in ranked(Problem("grad_weight", geometry, BF16), BATCH, size, FEW)]
    check((geometry, size, BF16, (False, False)), [every[0], every[-1]])


def check(
    case: tuple[Geometry, Triple, Arithmetic, tuple[bool, bool]], plans: list[WgradPlan]
) -> None:
    """Run plans of a case on random numbers, beside float64."""
    geometry, size, arithmetic, (source_last, target_last) = case
    generator = torch.Generator().manual_seed(3)

    def values(channels: int, extents: Triple, last: bool) -> torch.Tensor:
        drawn = torch.randn(BATCH, channels, *extents, generator=generator).to(DTYPES[arithmetic])
        memory_format = torch.channels_last_3d if last else torch.contiguous_format
        return drawn.contiguous(memory_format=memory_format)

    x = values(geometry.in_channels, size, source_last)
    gy = values(geometry.out_channels, geometry.output_size(size), target_last)
    want = reference.grad_weight(x, gy, geometry)
    assert len(plans) > 1
    for plan in plans:
        with EmulatedGpu([x, gy], lambda *_, plan=plan: plan, arithmetic) as gpu:
            got = backend.grad_weight(x, gy, geometry, target_last)
        assert {spec.file for spec in gpu.launches} == {"ampere/wgrad/kernel.cu"}
        error = (got.double() - want).norm() / want.norm()
        assert error <= TOLERANCE[arithmetic], plan


#: The same, and whether x and the gradient are copied as pairs of positions.
PAIRED: list[tuple[Geometry, Triple, Arithmetic, tuple[bool, bool], tuple[bool, bool]]] = [
    (layer((33, 1), 3, 1, 1), (4, 6, 16), BF16, (False, False), (True, False)),
    (layer((20, 12), 3, 1, 1), (3, 5, 24), F16, (False, False), (True, False)),
    (layer((24, 3), 3, 2, 1, 1), (3, 4, 40), BF16, (False, True), (True, False)),
    (layer((18, 9), 3, (1, 2, 2), 1, 0, 1), (3, 4, 8), BF16, (False, False), (True, False)),
    (layer((20, 36), 1), (3, 5, 40), BF16, (False, False), (True, True)),
    (layer((9, 64), 1), (3, 5, 8), F16, (True, False), (False, True)),
    (layer((32, 2), 1), (3, 5, 24), BF16, (False, False), (True, False)),
    (layer((64, 96), 1, (2, 1, 1), 0, 0, 1, 2), (3, 5, 48), F16, (False, False), (True, True)),
    (layer((24, 16), 3, 1, 2, 0, 2, 2), (3, 6, 32), BF16, (False, False), (True, False)),
]


@pytest.mark.sample
@pytest.mark.parametrize(
    "case", sampled([(case,) for case in PAIRED], 3), ids=lambda c: f"{c[0].label} {c[2].value}"
)
def test_rows_as_they_lie(
    case: tuple[Geometry, Triple, Arithmetic, tuple[bool, bool], tuple[bool, bool]],
) -> None:
    paired = case[-1]
    problem = Problem("grad_weight", case[0], case[2], *case[3])
    plans = [
        pairs
        for plan in plans_for(problem, case[1])
        if (pairs := replace(plan, pairs=True)).shared_bytes <= FEW.shared_per_block
    ]
    for plan in plans:
        assert (plan.paired(False), plan.paired(True)) == paired
        names = {name for i, name in enumerate(("source", "target")) if paired[i]}
        assert set(plan.schedule(BATCH, case[1]).aligned) == names
    check((case[0], case[1], case[2], case[3]), plans)


def test_rows_are_copied_as_they_lie_where_they_can_be() -> None:
    for arithmetic, last, width, can in (
        (BF16, False, 16, True),
        (BF16, False, 20, False),
        (BF16, True, 16, False),
        (TF32, False, 16, False),
    ):
        problem = Problem("grad_weight", layer((16, 8), 3, 1, 1), arithmetic, last, last)
        plans = [plan for _, plan in ranked(problem, BATCH, (4, 4, width), FEW)]
        assert {plan.pairs for plan in plans} == {can}
        assert all(plan.schedule(BATCH, (4, 4, width)) for plan in plans)


def test_rows_of_other_widths_are_not_taken() -> None:
    problem = Problem("grad_weight", layer((16, 8), 3, 1, 1), BF16)
    plan = replace(ranked(problem, BATCH, (4, 4, 16), FEW)[0][1], pairs=True)
    plan.schedule(BATCH, (4, 4, 16))
    with pytest.raises(ValueError, match="does not take"):
        plan.schedule(BATCH, (4, 4, 20))


def test_splits_fill_the_gpu_once_and_share_tiles_evenly() -> None:
    problem = Problem("grad_weight", layer((16, 8), 3, 1, 1), TF32)
    for _, plan in ranked(problem, BATCH, (4, 4, 16), FEW)[:20]:
        once = max(1, plan.resident * FEW.multiprocessors // plan.variants)
        for tiles in (1, 2, 7, 8, 9, 100, 1001):
            splits = plan.splits(tiles)
            rounds = -(-tiles // splits)
            assert splits <= min(once, tiles)
            assert rounds == -(-tiles // min(once, tiles)), "no more rounds than all CTAs need"
            assert (splits - 1) * rounds < tiles, "and none without a tile"


def test_five_channels_are_few() -> None:
    size = (4, 4, 16)
    for channels, columns in ((5, True), (6, False)):
        problem = Problem("grad_weight", layer((16, channels), 3, 1, 1), TF32)
        tiles = [plan.describe()["tile"] for _, plan in ranked(problem, BATCH, size, Gpu())]
        assert all(("taps in columns" in tile) == columns for tile in tiles)
