"""Gradient by input of strided layers on warpgroup products, on the emulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from convt3d.cuda.plan import strided_dgrad
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic
from emulator import build
from test_emulator_kernels import LAYERS, Case, check, layer, sampled

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

# Output rows are multiples of 16 bytes, input rows are not.
LAYERS["gradient, k3 s2"] = (layer((20, 12), 3, 2, 1, 1), (3, 5, 20))
LAYERS["gradient, k4 s2"] = (layer((12, 16), 4, 2, 1), (4, 4, 4))
LAYERS["gradient, k4 s2, short lines"] = (layer((12, 16), 4, 2, 1), (4, 4, 3))
LAYERS["gradient, k3 s2 d2"] = (layer((8, 20), 3, 2, 1, (0, 1, 1), 2), (4, 5, 13))
LAYERS["gradient, k325 s213"] = (
    layer((9, 12), (3, 2, 5), (2, 1, 3), (1, 0, 1), (1, 0, 0), (1, 2, 1)),
    (3, 4, 8),
)
LAYERS["gradient, k335 s223"] = (layer((12, 16), (3, 3, 5), (2, 2, 3), 1), (2, 3, 16))
LAYERS["gradient, k2 s3 in groups"] = (
    layer((16, 32), (3, 3, 4), (3, 2, 2), 1, (0, 0, 0), groups=2),
    (3, 5, 8),
)
# Lines of odd lengths, with and without units beyond their ends.
LAYERS["gradient, k3 s2, odd lines"] = (layer((20, 32), 3, 2, 1), (3, 9, 18))
LAYERS["gradient, k435 s2 d112, odd lines"] = (
    layer((8, 16), (4, 3, 3), 2, (2, 1, 1), (1, 0, 0), (1, 1, 2)),
    (3, 5, 11),
)
# Tiles of two units along D, the last of which has one that exists.
LAYERS["gradient, k3 s2, tiles beyond D"] = (layer((8, 8), 3, 2, 1, 1), (5, 4, 16))
LAYERS["gradient, k733 s322"] = (
    layer((8, 8), (7, 3, 3), (3, 2, 2), (2, 1, 1), (1, 0, 0)),
    (4, 3, 8),
)
GRADIENTS: list[tuple[Case, dict[str, Any]]] = [
    (Case("gradient, k3 s2", "grad_input", Arithmetic.TF32), {"whole_boxes": False}),
    (
        Case("gradient, k3 s2", "grad_input", Arithmetic.BF16),
        {"whole_boxes": True, "resident_weights": True},
    ),
    (Case("gradient, k4 s2", "grad_input", Arithmetic.TF32), {"whole_boxes": False}),
    (Case("gradient, k3 s2 d2", "grad_input", Arithmetic.TF32), {"whole_boxes": True}),
    (Case("gradient, k325 s213", "grad_input", Arithmetic.TF32), {"resident_weights": False}),
    (
        Case("gradient, k2 s3 in groups", "grad_input", Arithmetic.F16),
        {"whole_boxes": False},
    ),
    # Warps that stage their own outputs, four of a lane.
    (
        Case("gradient, k335 s223", "grad_input", Arithmetic.BF16),
        {"lane_stores": False, "sweep": False},
    ),
    (
        Case("gradient, k335 s223", "grad_input", Arithmetic.F16),
        {"lane_stores": False, "sweep": True},
    ),
    (Case("gradient, k3 s2, odd lines", "grad_input", Arithmetic.TF32), {"blocks": 2}),
    (Case("gradient, k3 s2, odd lines", "grad_input", Arithmetic.BF16), {"consumers": 3}),
    (
        Case("gradient, k435 s2 d112, odd lines", "grad_input", Arithmetic.TF32),
        {"resident_weights": True},
    ),
    (
        Case("gradient, k435 s2 d112, odd lines", "grad_input", Arithmetic.F16),
        {"resident_weights": False, "lane_stores": False},
    ),
    # Marches: a window of three units, of two without and with weights that stay.
    (Case("gradient, k3 s2 d2", "grad_input", Arithmetic.TF32), {"sweep": True}),
    (
        Case("gradient, k435 s2 d112, odd lines", "grad_input", Arithmetic.BF16),
        {"sweep": True, "resident_weights": True},
    ),
    (
        Case("gradient, k3 s2, odd lines", "grad_input", Arithmetic.TF32),
        {"sweep": True, "resident_weights": False},
    ),
    (Case("gradient, k733 s322", "grad_input", Arithmetic.TF32), {"sweep": True}),
    (Case("gradient, k4 s2", "grad_input", Arithmetic.TF32), {"volumes": True}),
    (Case("gradient, k2 s3 in groups", "grad_input", Arithmetic.F16), {"volumes": True}),
    # Odd lines of units, which lanes do not have in pairs; runs of aligned lines.
    (
        Case("gradient, k3 s2, odd lines", "grad_input", Arithmetic.F16),
        {"consumers": 3, "sweep": True},
    ),
    (Case("gradient, k4 s2, short lines", "grad_input", Arithmetic.TF32), {"volumes": True}),
    (Case("gradient, k3 s2 d2", "grad_input", Arithmetic.TF32), {"lane_pairs": False}),
    (Case("gradient, k4 s2", "grad_input", Arithmetic.TF32), {"aligned_runs": True, "sweep": True}),
    (Case("gradient, k4 s2", "grad_input", Arithmetic.F16), {"aligned_runs": True, "sweep": False}),
]


def gradient_with(**wanted: Any) -> Callable[..., Any]:
    """The cheapest plan with these choices, for CTAs that walk on."""

    def pick(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        few = replace(Gpu(), multiprocessors=3)
        plans = [
            plan
            for plan in strided_dgrad.candidates(problem, batch, size, few)
            if all(getattr(plan.tile, name) == value for name, value in wanted.items())
        ]
        return min(plans, key=lambda plan: plan.cost(batch, size))

    return pick


@pytest.mark.sample
@pytest.mark.parametrize(
    "case, wanted", sampled(GRADIENTS, 5), ids=lambda v: getattr(v, "name", None) or str(v)
)
def test_units_in_registers(case: Case, wanted: dict[str, Any]) -> None:
    gpu = check(case, gradient_with(**wanted))
    assert [spec.file for spec in gpu.launches] == ["phases/pack.cu", "phases/kernel.cu"]


def test_lanes_store_nothing_beyond_the_last_slice() -> None:
    pick = gradient_with(lane_stores=True, sweep=False, volumes=False, whole_boxes=True)

    def cut(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        plan = pick(problem, batch, size, gpu)
        _, slices, lines, _ = plan.shape(batch, size).units
        assert size[0] % slices and size[1] % lines == 0
        return plan

    check(Case("gradient, k3 s2, tiles beyond D", "grad_input", Arithmetic.BF16), cut)
