"""Strided layers by rows through a ring, on the emulated GPU."""

from __future__ import annotations

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

CASES = {
    # Staged runs of odd lengths, several crews, two CTAs that go on from column to column.
    "k3 s2": (layer((16, 12), 3, 2, 1, groups=2), (2, 5, 20), False),
    # Stores from registers, two rows a step.
    "k(3,5,7) s2": (layer((16, 16), (3, 5, 7), 2, (1, 2, 3), 1, groups=2), (2, 6, 12), True),
}


@pytest.mark.parametrize("name", CASES)
def test_rows(name: str, monkeypatch: Any) -> None:
    geometry, size, weights_first = CASES[name]
    monkeypatch.setitem(LAYERS, name, (geometry, size))

    def rows(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        target = problem.geometry.output_size(size)
        gpu = replace(gpu, multiprocessors=4)
        plains = strided_plan.ranked(problem, batch, target, gpu)
        ranked = strided_rows_plan.ranked(problem, batch, target, gpu, plains)
        plan = next(p for _, p in ranked if p.tile.weights_first == weights_first)
        crews = plan.crews(batch, size, target)
        assert crews is not None and crews.count > 1
        return plan

    check(Case(name, "forward", Arithmetic.IEEE), rows)


LINES = {
    # Rows of 23, of planes that are no multiple of 16 bytes either; two tiles along H, two CTAs.
    "k3 s2": (layer((16, 16), 3, 2, 1, groups=2), (3, 18, 12)),
    # Rows of 24, by vectors; three shifts beyond an end.
    "k(3,5,7) s2": (layer((16, 16), (3, 5, 7), 2, (1, 2, 3), 1, groups=2), (2, 17, 12)),
}


@pytest.mark.parametrize("name", LINES)
def test_slices(name: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(LAYERS, name, LINES[name])

    def slices(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        gpu = replace(gpu, multiprocessors=4)
        plains = strided_plan.ranked(problem, batch, size, gpu)
        ranked = strided_slices_plan.ranked(problem, batch, size, gpu, plains)
        plan = next(p for _, p in ranked)
        shape = plan.shape(batch, size)
        assert shape is not None and shape.lines < size[1]
        return plan

    check(Case(name, "grad_input", Arithmetic.IEEE), slices)
