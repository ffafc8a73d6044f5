"""Few channels to many on CUDA cores, on the emulated GPU: units that serve whole vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from convt3d.cuda.plan import direct, ranked_plans
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.geometry import Geometry, Triple
from convt3d.precision import Arithmetic
from emulator import build
from test_emulator_kernels import LAYERS, Case, check, layer

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

IEEE, BF16, F16 = Arithmetic.IEEE, Arithmetic.BF16, Arithmetic.F16

# Odd extents end units of two positions; 19 and 12 channels end blocks of 16 and of 8.
LAYERS["1 to 16 k3"] = (layer((1, 16), 3, 1, 1), (3, 5, 13))
LAYERS["2 to 19 k3 d2"] = (layer((2, 19), 3, 1, 2, 0, 2), (4, 5, 9))
LAYERS["24 to 3 k(2,3,4) s(1,2,3)"] = (layer((24, 3), (2, 3, 4), (1, 2, 3), (0, 1, 1)), (3, 4, 5))
LAYERS["12 to 1 k5 s2"] = (layer((12, 1), 5, 2, 2, 1), (3, 4, 6))
LAYERS["3 to 32 k1"] = (layer((3, 32), 1), (3, 5, 11))
LAYERS["4 to 8 k13"] = (layer((4, 8), 13, 1, 6), (2, 5, 7))

#: Case, its unit along D, H and W (0: a loop over taps), and the channels of a thread.
CASES: list[tuple[Case, Triple, int]] = [
    (Case("1 to 16 k3", "forward", IEEE), (0, 1, 2), 16),
    (Case("1 to 16 k3", "forward", IEEE, target_last=True), (0, 2, 2), 8),
    (Case("2 to 19 k3 d2", "forward", IEEE), (0, 1, 2), 16),
    (Case("2 to 19 k3 d2", "forward", IEEE, True, True), (0, 2, 2), 8),
    (Case("24 to 3 k(2,3,4) s(1,2,3)", "grad_input", IEEE, True), (0, 1, 2), 16),
    (Case("24 to 3 k(2,3,4) s(1,2,3)", "grad_input", IEEE, True, True), (0, 2, 2), 8),
    (Case("24 to 3 k(2,3,4) s(1,2,3)", "grad_input", Arithmetic.TF32, True, True), (0, 2, 2), 8),
    (Case("12 to 1 k5 s2", "grad_input", IEEE), (0, 1, 2), 12),
    (Case("12 to 1 k5 s2", "grad_input", IEEE, target_last=True), (0, 2, 2), 8),
    (Case("3 to 32 k1", "forward", IEEE), (0, 1, 2), 16),
    (Case("3 to 32 k1", "forward", IEEE, True, True), (1, 1, 4), 4),
    (Case("4 to 8 k13", "forward", IEEE), (0, 0, 4), 4),  # too many taps to unroll
    # Vectors of 16 bits, of blocks that are not wide.
    (Case("3 to 32 k1", "forward", BF16, True, True), (1, 1, 4), 4),
    (Case("1 to 16 k3", "forward", F16, target_last=True), (0, 1, 4), 4),
]


def choose(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
    return direct.choose_gather(problem)


@pytest.mark.sample
@pytest.mark.parametrize("case, unit, channels", CASES, ids=lambda value: str(value))
def test_units_of_many_channels(case: Case, unit: Triple, channels: int) -> None:
    plan = direct.choose_gather(case.problem)
    assert (plan.blocks, plan.block_channels) == (unit, channels)
    gpu = check(case, choose)
    assert {spec.file for spec in gpu.launches} == {"direct/conv.cu"}


def test_they_come_first_where_they_are_the_fastest() -> None:
    """As timed on an H100: one channel, or one tap, float32-grade; not more of both."""
    of_one = LAYERS["1 to 16 k3"][0]
    for last in (False, True):
        for geometry, first in (
            (of_one, True),
            (replace(of_one, in_channels=3), False),
            (replace(of_one, in_channels=3, kernel_size=(1, 1, 1), padding=(0, 0, 0)), True),
            (replace(of_one, in_channels=5, kernel_size=(1, 1, 1), padding=(0, 0, 0)), False),
            # Weights that shared memory does not keep.
            (replace(of_one, in_channels=2, kernel_size=(11, 7, 7), padding=(5, 3, 3)), False),
        ):
            for arithmetic in (IEEE, Arithmetic.TF32):
                problem = Problem("forward", geometry, arithmetic, False, last)
                (best, *_) = ranked_plans(problem, 2, (96, 96, 96), Gpu(), first_only=True)
                assert isinstance(best, direct.DirectPlan) is (first and arithmetic is IEEE)


@pytest.mark.parametrize("last", [False, True])
def test_stems_of_stride_2_in_tf32(last: bool) -> None:
    """As timed on an H200: 3 to 32 k3 s2 where outputs have channels last."""
    stem = Geometry(32, 3, (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1))
    problem = Problem("grad_input", stem, Arithmetic.TF32, last, last)
    (best, *_) = ranked_plans(problem, 2, (32, 32, 32), Gpu(), first_only=True)
    assert isinstance(best, direct.DirectPlan) is last
