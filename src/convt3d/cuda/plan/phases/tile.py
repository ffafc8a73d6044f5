"""The tile of a phases kernel, its shape for given extents, and how outputs are staged."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from convt3d.cuda.plan.banks import Four
from convt3d.cuda.plan.unit_tiles import UnitShape, UnitTile
from convt3d.cuda.schedule import round_up
from convt3d.geometry import Triple


@dataclass(frozen=True)
class AnyPhasesTile(UnitTile):
    """The compile-time choices that kernels of every kind have, and what the others are in those
    kinds that have no choice.
    """

    fragments: int  # of units in flight

    # Outputs: warps that store.
    store_warps = 0
    round_columns = 0
    # Boxes by TMA.
    tap_boxes = False
    ping_pong = 0
    # Boxes that are transposed in shared memory.
    transposed = False
    vector = 4
    # Gradients by input.
    lane_pairs = False
    runs = False
    sweep = False

    @property
    def by_map(self) -> bool:
        """Whether TMA brings the source."""
        return True

    @property
    def stores_per_warp(self) -> bool:
        """Whether every warp stages and stores its own outputs."""
        return not self.store_warps


@dataclass(frozen=True)
class PhasesTile(AnyPhasesTile):
    """The compile-time choices of a forward pass whose boxes come by TMA."""

    resident_weights: bool
    store_warps: int = 0  # that send what others stage by bulk copies; 0: warps store their own
    round_columns: int = 0  # columns that are staged at a time, with store warps
    ping_pong: int = 0  # chunks that the first warpgroup is ahead of the others
    tap_boxes: bool = False  # a box has the slices of one walked tap of D


@dataclass(frozen=True)
class PhasesShape(UnitShape):
    """A tile's units, its box and how the box lies in shared memory."""

    channel_dimension: int
    conflicts: float  # cycles of shared memory for a load of a warp
    line: int = 0  # positions from a line to the next where boxes are transposed
    segment: int = 0  # units along D of a work tile, if it is a sweep


Tiling: TypeAlias = tuple[PhasesShape, Iterator[PhasesShape]]
"""A tile in the smallest box, without bank conflicts, and its layouts."""


@dataclass(frozen=True)
class Staging:
    """How a tile's outputs lie in shared memory before store warps send them.

    ``row``, ``slice``, ``sample`` and ``column`` are elements from one to the next; a column has
    ``runs`` runs, which are slices or rows.
    """

    row: int = 0
    slice: int = 0
    sample: int = 0
    column: int = 0
    whole_slices: bool = False
    runs: int = 0


@functools.lru_cache(maxsize=65536)
def staging_of(
    units: Four,
    slices: bool,
    slots: tuple[int, int],
    strides: tuple[int, int],
    target: Triple,
    channels: int,
    vector: int,
) -> Staging:
    """Of a tile of units; the strides of D, and of H where it is phased."""
    (slots1, slots2), (stride0, step1) = slots, strides
    samples, t0, t1, t2 = units
    row = target[2] if slices else t2 * slots2
    row += (target[2] * step1 - row) % vector
    slice_ = t1 * slots1 * row
    slice_ += (stride0 * target[1] * target[2] - slice_) % vector
    sample = t0 * slice_
    sample += (channels * math.prod(target) - sample) % vector
    last = (samples - 1) * sample + (t0 - 1) * slice_ + (t1 - 1) * slots1 * row + (t2 - 1) * slots2
    column = round_up(last + (slots1 - 1) * row + slots2 + vector - 1, vector)
    # Neighbouring pairs of columns in different banks.
    column += vector if column // vector % 2 == 0 else 0
    lines = samples * t0
    return Staging(row, slice_, sample, column, slices, lines if slices else lines * t1 * slots1)
