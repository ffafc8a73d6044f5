"""Cycles of plans of ``ampere/wgrad/kernel.cu``: of one, or of many at once that differ little.

``Numbers`` are those of one plan, or arrays of those of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from convt3d.cuda.plan.rates import STEP_CYCLES
from convt3d.cuda.plan.split_k import WORKSPACE_BYTES
from convt3d.cuda.schedule import Problem, div_up
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic

if TYPE_CHECKING:
    from convt3d.cuda.plan.ampere_wgrad import WgradPlan

# Cycles of a copy instruction of a warp, and of a 32-byte sector: fitted to measurements.
_COPY_CYCLES = 6.0
_SECTOR_CYCLES = 0.5
_ALONE = {1: 1.25, 2: 1.08}  # what few resident CTAs lose

Numbers = Any


def channel_tiles(
    problem: Problem, taps_in_columns: bool, fragments_m: Numbers, fragments_n: Numbers
) -> tuple[Numbers, Numbers]:
    """Channels of x and of the gradient of a CTA, whose warps have so many fragments."""
    columns = 8 * fragments_n
    return 16 * fragments_m, problem.target_channels if taps_in_columns else columns


def variants(problem: Problem, taps: Triple, m: Numbers, n: Numbers) -> Numbers:
    """CTAs of a split whose products have so many channels of x and of the gradient."""
    (k0, k1, k2), (t0, t1, t2) = problem.geometry.kernel_size, taps
    boxes = div_up(k0, t0) * div_up(k1, t1) * div_up(k2, t2)
    tiles = div_up(problem.source_channels, m) * div_up(problem.target_channels, n)
    return boxes * tiles * problem.geometry.groups


def step_cycles(
    problem: Problem, taps: int, taps_in_columns: bool, warps: Numbers, fm: Numbers, fn: Numbers
) -> Numbers:
    """Cycles of one matrix step of all warps in all taps."""
    ieee = problem.arithmetic is Arithmetic.IEEE
    loads = 4 if problem.element_bytes == 2 and taps_in_columns else 2
    matrix = warps * taps * fm * fn * STEP_CYCLES * (3.5 if ieee else 1.0)
    shared = warps * (4 * fm + loads * taps * fn)
    return np.maximum(matrix, shared) + 0.3 * np.minimum(matrix, shared)


def fill_cycles(problem: Problem, channels: Numbers, wide: int) -> tuple[Numbers, Numbers]:
    """Cycles that a position of a box takes to fill, and those that a row adds.

    ``wide``: words that a copy moves.
    """
    words = div_up(channels, 4 // problem.element_bytes)
    each = words / 32 / wide * _COPY_CYCLES + words * 4 / 32 * _SECTOR_CYCLES
    return each, words * _SECTOR_CYCLES


def alone(resident: int) -> float:
    """What CTAs lose that are few on a multiprocessor."""
    return _ALONE.get(resident, 1.0)


def fixed_cycles(registers: Numbers) -> Numbers:
    """Cycles of a CTA besides its tiles."""
    return registers * 8.0 + 3000


def bounds(plans: Sequence[WgradPlan], batch: int, input_size: Sequence[int]) -> list[float]:
    """Cycles that no tile shape undercuts: matrix steps and fills of whole tiles.

    ``plans``: of the same taps, which differ in warps, fragments and resident CTAs.
    """
    one, p = plans[0], plans[0].problem
    chosen = [(*plan.warps, *plan.fragments, plan.resident) for plan in plans]
    warps_m, warps_n, _, fm, fn, resident = np.array(chosen).T
    m, n = channel_tiles(p, one.taps_in_columns, warps_m * fm, warps_n * fn)
    steps = batch * input_size[0] * input_size[1] * div_up(input_size[2], one.depth)
    step = step_cycles(p, one.taps_apart, one.taps_in_columns, warps_m * warps_n, fm, fn)
    fills = fill_cycles(p, m, one.wide(False))[0]
    fills = fills + one.density * fill_cycles(p, n, one.wide(True))[0]
    registers, ctas = one.taps_apart * fm * fn * 4, variants(p, one.taps, m, n)
    sums = ctas * registers * 32 * warps_m * warps_n
    multiprocessors = one.gpu.multiprocessors
    splits = np.maximum(1, resident * multiprocessors // ctas)
    splits = np.minimum(splits, np.maximum(1, WORKSPACE_BYTES // (4 * sums)))
    tiles = steps * (step + one.depth * fills) * np.maximum(1.0, resident * 1.1)
    waves = div_up(ctas, multiprocessors * resident)
    lost = np.array([alone(plan.resident) for plan in plans])
    found = waves * lost * (tiles / splits * one.measured + fixed_cycles(registers))
    return [float(cycles) for cycles in found]
