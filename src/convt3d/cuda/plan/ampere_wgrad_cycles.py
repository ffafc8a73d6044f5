"""Cycles of plans of ``ampere/wgrad/kernel.cu``: of one, or of many at once that differ little.

``Numbers`` are those of one plan, or arrays of those of several.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from convt3d.cuda.plan.rates import STEP_CYCLES
from convt3d.cuda.schedule import Problem, div_up
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic

# Cycles of a copy instruction of a warp, and of a 32-byte sector: fitted to measurements.
_COPY_CYCLES = 6.0
_SECTOR_CYCLES = 0.5
_VALUE_COPIES = 4.0  # copies of a word whose 16-bit values are copied one by one
# Of a tile: latencies of a CTA on its own, and what each CTA of a multiprocessor adds.
_LATENCY, _TILE_CYCLES = 700.0, 150.0
# Warps of a multiprocessor that hide the latencies of copies; of copies of single values.
_HIDING, _HIDING_VALUES = 7.0, 14.0

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
    copies = words / 32 / wide * (_VALUE_COPIES if _by_value(problem, wide) else 1.0)
    return copies * _COPY_CYCLES + words * 4 / 32 * _SECTOR_CYCLES, words * _SECTOR_CYCLES


def round_cycles(tile: Numbers, resident: Numbers) -> Numbers:
    """Cycles of a multiprocessor for one tile of each of its CTAs."""
    return np.maximum(tile * resident * 1.1, tile + _LATENCY) + _TILE_CYCLES * resident


def waiting(problem: Problem, warps: int, wide: int) -> float:
    """What so many warps of a multiprocessor lose to latencies, as a factor.

    ``wide``: the fewest words that a copy moves.
    """
    return max(1.0, (_HIDING_VALUES if _by_value(problem, wide) else _HIDING) / warps)


def _by_value(problem: Problem, wide: int) -> bool:
    """Whether a copy is one of 16-bit values, each of which passes through registers."""
    return problem.element_bytes == 2 and wide == 1


def fixed_cycles(registers: Numbers) -> Numbers:
    """Cycles of a CTA besides its tiles."""
    return registers * 8.0 + 3000
