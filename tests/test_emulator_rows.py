"""Strided layers by rows through a ring, on the emulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from convt3d.cuda import strided_plan, strided_rows_plan, strided_slices_plan
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic
from emulator import build
from test_emulator_kernels import LAYERS, Case, check, layer

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

# Staged runs of odd lengths, several crews, CTAs that go on from column to column.
LAYERS["k3 s2, rows of 20"] = (layer((16, 12), 3, 2, 1, groups=2), (2, 5, 20))
# Rows of 23, of planes that are no multiple of 16 bytes either; two tiles along H, two CTAs.
LAYERS["k3 s2, lines of 23"] = (layer((16, 16), 3, 2, 1, groups=2), (3, 18, 12))
# Stores from registers, two rows a step; lines of 24 by vectors, three shifts beyond an end.
LAYERS["k(3,5,7) s2, rows of 12"] = (
    layer((16, 16), (3, 5, 7), 2, (1, 2, 3), 1, groups=2),
    (2, 17, 12),
)


def rows(where: float, weights_first: bool = False, prepared: bool = False) -> Callable[..., Any]:
    """Picks a plan of rows through a ring: 0 is the preferred one, 1 the last."""

    def pick(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        target = problem.geometry.output_size(size)
        gpu = replace(gpu, multiprocessors=2)
        plains = strided_plan.ranked(problem, batch, target, gpu)
        ranked = strided_rows_plan.ranked(problem, batch, target, gpu, plains)
        kind = (weights_first or prepared, prepared)
        plans = [p for _, p in ranked if (p.tile.weights_first, p.tile.prepared) == kind]
        plan = plans[int(where * (len(plans) - 1))]
        crews = plan.crews(batch, size, target)
        assert crews is not None and crews.count > 1
        return plan

    return pick


def slices(where: float) -> Callable[..., Any]:
    """The same of slices through a ring."""

    def pick(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        gpu = replace(gpu, multiprocessors=4)
        plains = strided_plan.ranked(problem, batch, size, gpu)
        plans = strided_slices_plan.ranked(problem, batch, size, gpu, plains)
        plan = plans[int(where * (len(plans) - 1))][1]
        assert plan.shape(batch, size) is not None
        return plan

    return pick


# The same of 16 bits, whose rows are multiples of eight.
LAYERS["k3 s2, rows of 24"] = (layer((16, 12), 3, 2, 1, groups=2), (2, 5, 24))
LAYERS["k(3,5,7) s2, rows of 16"] = (
    layer((16, 16), (3, 5, 7), 2, (1, 2, 3), 1, groups=2),
    (2, 17, 16),
)

CASES = [
    (Case("k3 s2, rows of 20", "forward", Arithmetic.IEEE), rows(0.0)),
    (Case("k(3,5,7) s2, rows of 12", "forward", Arithmetic.IEEE), rows(0.0, True)),
    (Case("k3 s2, rows of 20", "forward", Arithmetic.IEEE), rows(0.0, prepared=True)),
    (Case("k(3,5,7) s2, rows of 12", "forward", Arithmetic.IEEE), rows(0.0, prepared=True)),
    (Case("k3 s2, rows of 24", "forward", Arithmetic.BF16), rows(0.0, prepared=True)),
    (Case("k(3,5,7) s2, rows of 16", "forward", Arithmetic.F16), rows(0.0, prepared=True)),
    (Case("k3 s2, lines of 23", "grad_input", Arithmetic.IEEE), slices(0.0)),
    (Case("k(3,5,7) s2, rows of 12", "grad_input", Arithmetic.IEEE), slices(0.0)),
]


@pytest.mark.parametrize(("case", "pick"), CASES)
def test_rings(case: Case, pick: Callable[..., Any]) -> None:
    check(case, pick)
