"""Strided layers whose products have the weights first, on the emulated GPU."""

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

EVEN = ("k(3,5,7) s2 in groups", layer((16, 16), (3, 5, 7), 2, (1, 2, 3), 1, groups=2), (3, 4, 12))
STEPS = ("k(1,3,9) s(1,2,2)", layer((12, 20), (1, 3, 9), (1, 2, 2), (0, 1, 4)), (2, 4, 9))


def weights_first(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
    # Two multiprocessors: CTAs go on from tile to tile.
    ranked = ampere_strided.ranked(problem, batch, size, replace(gpu, multiprocessors=2))
    return next(plan for _, plan in ranked if plan.tile.weights_first)


@pytest.mark.parametrize(
    "name, geometry, size",
    [
        EVEN,  # stores from registers; shifts of one slot
        ("k3 s2, rows of 69", *LAYERS["k3 s2, rows of 69"]),  # staged; channels beyond the last
        pytest.param(*STEPS, marks=pytest.mark.full),  # chains, steps, no stride along D
    ],
)
def test_weights_first(name: str, geometry: Any, size: Triple, monkeypatch: Any) -> None:
    monkeypatch.setitem(LAYERS, name, (geometry, size))
    check(Case(name, "forward", Arithmetic.IEEE), weights_first)


def linear_lines(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
    ranked = ampere_strided.ranked(problem, batch, size, replace(gpu, multiprocessors=2))
    plan = next(plan for _, plan in ranked if plan.tile.linear_lines)
    assert plan.shape(batch, size).units[2] >= size[2]
    return plan


def test_linear_lines(monkeypatch: Any) -> None:
    # Rows of 23, of planes that are no multiple of 16 bytes either; several tiles along H.
    monkeypatch.setitem(LAYERS, "flat", (layer((16, 16), 3, 2, 1, groups=2), (2, 17, 12)))
    check(Case("flat", "grad_input", Arithmetic.IEEE), linear_lines)
