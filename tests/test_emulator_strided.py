"""Strided gradients whose lines are copied as they lie in memory, on the emulated GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from convt3d.cuda.plan import ampere_strided
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic
from emulator import build
from test_emulator_kernels import LAYERS, Case, check, layer

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


def linear_lines(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
    ranked = ampere_strided.ranked(problem, batch, size, replace(gpu, multiprocessors=2))
    plan = next(plan for _, plan in ranked if plan.tile.linear_lines)
    assert plan.shape(batch, size).units[2] >= size[2]
    return plan


def test_linear_lines(monkeypatch: Any) -> None:
    # Rows of 23, of planes that are no multiple of 16 bytes either; several tiles along H.
    monkeypatch.setitem(LAYERS, "flat", (layer((16, 16), 3, 2, 1, groups=2), (2, 17, 12)))
    check(Case("flat", "grad_input", Arithmetic.IEEE), linear_lines)
