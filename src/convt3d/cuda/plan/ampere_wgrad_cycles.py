"""Cycles of plans of ``ampere/wgrad/kernel.cu``: of one, or of many at once that differ little.

``Numbers`` are those of one plan, or arrays of those of several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from convt3d.cuda.plan.rates import STEP_CYCLES
from convt3d.cuda.schedule import Problem, div_up
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic

# Fitted to 822 timings of 355 problems on an H200, which all this meets within 8% in the mean.
# Of a tile: what a CTA waits for on its own, and what each CTA of a multiprocessor adds; of 32
# bytes that a fill moves, and of each row of a channel besides.
_LATENCY, _TILE_CYCLES, _SECTOR_CYCLES = 1300.0, 175.0, 0.5
# Of a CTA besides its tiles; of both launches.
_CTA_CYCLES, _LAUNCHES = 2300.0, 17000.0
# Of a weight, by a multiprocessor: its neighbours in memory are other taps, which come from other
# lines of the sums; in channels_last other channels, which do not.
_SCATTERED, _STORED = 3.1, 0.95

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
    problem: Problem,
    taps: int,
    taps_in_columns: bool,
    warps: Numbers,
    fm: Numbers,
    fn: Numbers,
    resident_warps: Numbers,
) -> Numbers:
    """Cycles of one matrix step of all warps in all taps.

    ``resident_warps``: of a multiprocessor, whose four parts share them.
    """
    ieee = problem.arithmetic is Arithmetic.IEEE
    loads = 4 if problem.element_bytes == 2 and taps_in_columns else 2
    busiest = 4 * div_up(resident_warps, 4) / resident_warps  # part, beside the mean
    matrix = warps * taps * fm * fn * 1.3 * STEP_CYCLES * (3.5 if ieee else 1.0) * busiest
    shared = warps * (5 * fm + 1.2 * loads * taps * fn)
    return np.maximum(matrix, shared) + 0.3 * np.minimum(matrix, shared)


@dataclass(frozen=True)
class Copies:
    """Cycles of one kind of copy: of a warp's among those of others, and of a thread's in turn."""

    each: float
    in_turn: float


WORDS = Copies(4.5, 21.0)
"""By cp.async, of contiguous rows: one after another for all channels of a thread's positions."""
VALUES = Copies(17.5, 290.0)
"""Of two channels of 16 bits, which a thread loads and joins."""
VECTORS = Copies(18.5, 130.0)
"""Of channels of a position, whose place is worked out for each."""
SINGLES = Copies(18.5, 770.0)
"""The same of 16-bit channels one by one, each of which passes through registers."""


@dataclass(frozen=True)
class Fill:
    """How a CTA fills the box of a tensor. ``Numbers`` as above.

    Threads share its items, of each of which one makes ``copies`` in turn.
    """

    kind: Copies
    vector: int  # positions along W of an item
    pieces: Numbers  # items of a position
    copies: Numbers
    words: Numbers  # of a position in shared memory
    row_sectors: Numbers  # that a row costs besides

    def cycles(self, rows: Numbers, widths: Numbers, threads: Numbers) -> tuple[Numbers, Numbers]:
        """Of the copies of all warps, and of those of the busiest thread."""
        items = rows * div_up(widths, self.vector) * self.pieces
        sectors = rows * (widths * self.words / 8 + self.row_sectors)
        every = div_up(items, 32) * self.copies * self.kind.each + sectors * _SECTOR_CYCLES
        return every, div_up(items, threads) * self.copies * self.kind.in_turn

    def least_of_a_position(self) -> Numbers:
        """What :meth:`cycles` of all warps is at least, by position."""
        copies = self.pieces / self.vector / 32 * self.copies
        return copies * self.kind.each + self.words / 8 * _SECTOR_CYCLES


def round_cycles(products: Numbers, every: Numbers, busiest: Numbers, resident: Numbers) -> Numbers:
    """Cycles of a multiprocessor for one tile of each of its CTAs.

    ``every``, ``busiest``: of its copies, as :meth:`Fill.cycles` has them.
    """
    alone = products + busiest + _LATENCY
    return np.maximum((products + every) * resident, alone) + _TILE_CYCLES * resident


def call_cycles(problem: Problem, multiprocessors: int) -> float:
    """Of a call besides tiles and sums: its launches, and the weights that the second stores."""
    taps = math.prod(problem.geometry.kernel_size)
    weights = problem.source_channels * problem.target_channels * problem.geometry.groups * taps
    each = _STORED if problem.channels_last else _SCATTERED
    return _LAUNCHES + (each * weights / multiprocessors if taps > 1 else 0.0)


def fixed_cycles(registers: Numbers) -> Numbers:
    """Cycles of a CTA besides its tiles."""
    return registers * 8.0 + _CTA_CYCLES
