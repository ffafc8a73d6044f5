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
    stores_per_warp = False
    store_warps = 0
    round_columns = 0
    # Boxes by TMA.
    tap_boxes = False
    lane_pairs = False
    ping_pong = 0
    # Boxes that are transposed in shared memory.
    transposed = False
    vector = 4
    # Gradients by input.
    runs = False
    sweep = False

    @property
    def by_map(self) -> bool:
        """Whether TMA brings the source."""
        return True


@dataclass(frozen=True)
class PhasesTile(AnyPhasesTile):
    """The compile-time choices of a forward pass whose boxes come by TMA."""

    resident_weights: bool
    stores_per_warp: bool = False  # every warp stages and stores its own outputs
    store_warps: int = 0  # that send what others stage, by bulk copies, buffers in turn
    round_columns: int = 0  # columns that are staged at a time, with store warps
    lane_pairs: bool = False  # a lane's two rows of a block are neighbours along W
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
    """How outputs lie in shared memory before they are stored.

    ``row``, ``slice``, ``sample`` and ``column`` are elements from one to the next; a column has at
    most ``runs`` runs, which are slices or rows.
    """

    row: int
    slice: int
    sample: int
    column: int
    whole_slices: bool
    runs: int


@functools.lru_cache(maxsize=65536)
def staging_of(
    units: Four,
    slices: bool,
    own: int,
    parts: int,
    slots: tuple[int, int],
    strides: tuple[int, int],
    target: Triple,
    channels: int,
    vector: int,
) -> Staging:
    """Outputs of ``parts`` times ``own`` units; the strides of D, and of H where it is phased."""
    (slots1, slots2), (stride0, step1) = slots, strides
    used, line = math.prod(units), units[3]
    row = target[2] if slices else min(line, own) * slots2 if line % own == 0 else line * slots2
    row += (target[2] * step1 - row) % vector
    slice_ = units[2] * slots1 * row
    slice_ += (stride0 * target[1] * target[2] - slice_) % vector
    sample = units[1] * slice_
    sample += (channels * math.prod(target) - sample) % vector

    def place(index: int) -> int:
        rest, w = divmod(index, line)
        rest, h = divmod(rest, units[2])
        n, d = divmod(rest, units[1])
        return n * sample + d * slice_ + h * slots1 * row + w * slots2

    firsts = range(0, min(used, own * parts), own)
    reach = max(place(min(f + own, used) - 1) - place(f) for f in firsts)
    column = round_up(reach + (slots1 - 1) * row + slots2 + vector - 1, vector)
    # Neighbouring pairs of columns in different banks.
    column += vector if column // vector % 2 == 0 else 0
    a_run = line * units[2] if slices else line
    lines = max((min(f + own, used) - 1) // a_run - f // a_run + 1 for f in firsts)
    return Staging(row, slice_, sample, column, slices, lines if slices else lines * slots1)
