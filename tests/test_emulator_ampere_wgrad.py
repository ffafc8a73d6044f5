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
    geometry, size, arithmetic, (source_last, target_last) = case
    problem = Problem("grad_weight", geometry, arithmetic, source_last, target_last)
    generator = torch.Generator().manual_seed(3)

    def values(channels: int, extents: Triple, last: bool) -> torch.Tensor:
        drawn = torch.randn(BATCH, channels, *extents, generator=generator).to(DTYPES[arithmetic])
        memory_format = torch.channels_last_3d if last else torch.contiguous_format
        return drawn.contiguous(memory_format=memory_format)

    x = values(geometry.in_channels, size, source_last)
    gy = values(geometry.out_channels, geometry.output_size(size), target_last)
    want = reference.grad_weight(x, gy, geometry)
    plans = plans_for(problem, size)
    assert any(plan.splits(8) > 1 for plan in plans)
    assert len(plans) > 1
    for plan in plans:
        assert "taps in columns" in plan.describe()["tile"]
        with EmulatedGpu([x, gy], lambda *_, plan=plan: plan, arithmetic) as gpu:
            got = backend.grad_weight(x, gy, geometry, target_last)
        assert {spec.file for spec in gpu.launches} == {"ampere/wgrad/kernel.cu"}
        error = (got.double() - want).norm() / want.norm()
        assert error <= TOLERANCE[arithmetic], plan


def test_five_channels_are_few() -> None:
    size = (4, 4, 16)
    for channels, columns in ((5, True), (6, False)):
        problem = Problem("grad_weight", layer((16, channels), 3, 1, 1), TF32)
        tiles = [plan.describe()["tile"] for _, plan in ranked(problem, BATCH, size, Gpu())]
        assert all(("taps in columns" in tile) == columns for tile in tiles)
