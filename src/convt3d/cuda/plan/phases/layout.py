"""Where a phases kernel keeps weights, boxes and outputs in shared memory, and which tiles fit.

The numbers mirror ``phases/config.cuh``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from convt3d.cuda.plan import banks
from convt3d.cuda.plan.axes import source_extents
from convt3d.cuda.plan.banks import Four
from convt3d.cuda.plan.extents import even_cuts, near_cuts, tile_counts
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.phases.products import PhasesProducts
from convt3d.cuda.plan.phases.tile import PhasesShape, Staging, Tiling, staging_of
from convt3d.cuda.plan.warpgroups import fits_map
from convt3d.cuda.schedule import MAP_BOX, round_up
from convt3d.geometry import Triple

_BARRIER_BYTES = 128
_WIDEST = 192  # positions along W of a box
_MOST_BUFFERS = 8  # of columns that are staged


class PhasesLayout(PhasesProducts):
    """Shared memory of a kernel, and the shapes that its tile can have."""

    # ------------------------------------------------------------ shared memory

    @once
    def barrier_bytes(self) -> int:
        t = self.tile
        pairs = t.source_stages + (1 if t.resident_weights else t.weight_stages)
        pairs += _MOST_BUFFERS if t.store_warps else 0
        return round_up(16 * pairs + (8 if t.ping_pong else 0), _BARRIER_BYTES)

    @once
    def box_offset(self) -> int:
        zeros = 0 if self.tile.by_map else 128
        return round_up(self.barrier_bytes + zeros + self.tile.weight_stages * self.slot_bytes, 128)

    @property
    def slot_bytes(self) -> int:
        """Shared memory of a stage of weights."""
        return self.stage_bytes

    def box_bytes(self, shape: PhasesShape) -> int:
        return math.prod(shape.box) * 32

    def staging_offset(self, shape: PhasesShape) -> int:
        return self.box_offset + self.tile.source_stages * self.box_bytes(shape)

    def shared_bytes(self, shape: PhasesShape, target: Sequence[int]) -> int:
        bytes_ = self.staging_offset(shape)
        if self.tile.store_warps:
            return bytes_ + self.buffers(shape, target) * self._buffer_bytes(shape, target)
        pitch = 16 * self.axes[2].slots + 4
        return bytes_ + 4 * self.tile.consumers * self.staged_columns * pitch * 4

    # ------------------------------------------------------------ outputs on their way

    @property
    def staged_columns(self) -> int:
        """Columns that the epilogue stages at a time."""
        if self.tile.store_warps:
            return self.tile.round_columns
        return 16 if self.tile.column_tile % 16 == 0 else 8

    def _buffer_bytes(self, shape: PhasesShape, target: Sequence[int]) -> int:
        """Shared memory of the columns that are staged at a time."""
        column = self.staging(shape, target).column * self.problem.element_bytes
        return self.staged_columns * column

    def buffers(self, shape: PhasesShape, target: Sequence[int]) -> int:
        """Buffers of store warps: as many as a work tile has and as fit, two at least."""
        if not self.tile.store_warps:
            return 0
        room = self.gpu.shared_per_block - self.staging_offset(shape)
        fit = room // self._buffer_bytes(shape, target)
        return max(2, min(fit, max(3, self.staging_rounds), _MOST_BUFFERS))

    @once
    def staging_rounds(self) -> int:
        """How often a work tile with taps stages columns for the store warps."""
        return self.axes[0].live_slots * self.tile.column_tile // self.staged_columns

    @property
    def wide_outputs(self) -> int:
        """Outputs that a lane stores at a time, where rows and tiles are multiples of them."""
        return math.gcd(4 * self.axes[2].slots, self.vector)

    def wide(self, shape: PhasesShape, target: Sequence[int]) -> bool:
        """Whether lanes store several outputs at a time, each with all others of its own."""
        slots = self.axes[2].slots
        own = (shape.units[3] * slots, self.warpgroup_units(shape) * slots)
        return all(n % self.wide_outputs == 0 for n in (target[2], *own))

    def staging(self, shape: PhasesShape, target: Sequence[int]) -> Staging:
        """How outputs lie in shared memory before store warps send them."""
        if not self.tile.store_warps:
            return Staging()
        _, h, w = self.axes
        stride0, stride1, _ = self.unit_target
        slices = h.slots == stride1 and shape.tiles[3] == 1
        return staging_of(
            shape.units,
            slices,
            (h.slots, w.slots),
            (stride0, 1 if h.block else stride1),
            (target[0], target[1], target[2]),
            self.problem.geometry.out_channels,
            self.vector,
        )

    # ------------------------------------------------------------ tiles

    @once
    def unit_target(self) -> Triple:
        """Target positions of a unit along each axis, over all phases."""
        return self.problem.geometry.stride if self.problem.forward else (1, 1, 1)

    def units(self, target: Sequence[int]) -> Triple:
        """Units along each axis."""
        a, b, c = (-(-n // s) for n, s in zip(target, self.unit_target, strict=True))
        return (a, b, c)

    def source(self, target: Sequence[int]) -> Triple:
        """Input extents (forward) that give these output extents."""
        return source_extents(self.problem.geometry, target)

    def warpgroup_units(self, shape: PhasesShape) -> int:
        """Units of a tile that a warpgroup has: whole lines, if that leaves none over."""
        rows, line = 64 * self.tile.blocks, shape.units[3]
        lines = math.prod(shape.units[:3])
        whole = min(rows // line, -(-lines // self.tile.consumers)) * line
        return whole if whole * self.tile.consumers >= line * lines else rows

    def tilings(self, batch: int, target: Sequence[int]) -> Iterator[Tiling]:
        """Tiles that fit the kernel's rows, each with its layouts."""
        t, units = self.tile, self.units(target)
        widest = min(t.rows, _WIDEST // self.axes[2].unit_source)
        for tile, tiles in _lined(t.rows, widest, batch, units, 4 * self.vector, t.lane_pairs):
            least = PhasesShape(tile, tiles, self._box(tile, tiles), 1, 1.0)
            yield least, self._laid(least, target)

    def shapes(self, batch: int, target: Sequence[int]) -> Iterator[PhasesShape]:
        for _, layouts in self.tilings(batch, target):
            yield from layouts

    def _box(self, units: Four, tiles: Four) -> Four:
        """The smallest box of a tile: samples, slices, lines, positions."""
        samples, t0, t1, t2 = units
        span0, span1, span2 = self.phase_spans
        lead = box_lead(t2, tiles[3], self.axes[2].reach[0], self.vector)
        width = round_up(lead + t2 + span2, self.vector)
        return (samples, t0 + span0, t1 + span1, width)

    # ------------------------------------------------------------ boxes

    @property
    def box_steps(self) -> tuple[int, int]:
        """Source slices and lines from one of a box to the next."""
        return (1, 1)

    def _laid(self, least: PhasesShape, target: Sequence[int]) -> Iterator[PhasesShape]:
        """The layouts of a box with the fewest bank conflicts, the smallest first."""
        best = float("inf")
        box = least.box
        if not fits_map(box[:3], (1, *self.box_steps)):
            return
        for extra in range(0, min(32, MAP_BOX + 1 - box[3]), self.vector):
            for dimension in (1, 2):
                wider = (*box[:3], box[3] + extra)
                shape = replace(least, box=wider, channel_dimension=dimension)
                if self.shared_bytes(shape, target) > self.gpu.shared_per_block:
                    return
                conflicts = self._conflicts(shape)
                if conflicts < best:
                    best = conflicts
                    yield replace(shape, conflicts=conflicts)
            if best == 1.0:
                return

    def _conflicts(self, shape: PhasesShape) -> float:
        """Cycles of shared memory for a load of a warp."""
        sample, slice_, line, channel = self.pitches(shape)
        return banks.load_cycles(
            64 * self.tile.blocks,
            self.warpgroup_units(shape),
            shape.units,
            (sample, slice_, line, 1),
            channel,
            self.chunk_channels // 8,
        )

    def pitches(self, shape: PhasesShape) -> Four:
        """Elements from a sample, slice, line and channel of a box to the next."""
        _, slices, lines, width = shape.box
        line, channel = self.chunk_channels * width, width
        if shape.channel_dimension == 2:
            line, channel = width, lines * width
        slice_ = self.chunk_channels * lines * width
        return (slices * slice_, slice_, line, channel)


@functools.lru_cache(maxsize=65536)
def box_lead(units: int, tiles: int, reach: int, line: int) -> int:
    """How far before its first position a tile's box begins, at most: where 16 bytes do."""
    return max((i * units + reach) % line for i in range(min(tiles, line)))


@functools.lru_cache(maxsize=4096)
def _lined(
    rows: int, widest: int, batch: int, units: Triple, narrow: int, pairs: bool
) -> list[tuple[Four, Four]]:
    """Tiles of lines, and how many there are of each."""
    found: dict[Four, Four] = {}
    # One that always fits, then whole rows or few parts of them.
    for t2 in (min(units[2], narrow), *sorted(near_cuts(units[2], widest))):
        t2 += t2 % 2 if pairs else 0
        lines = rows // t2
        for t1 in even_cuts(units[1], lines, halved=True):
            for t0 in {1, even_cuts(units[0], lines // t1)[-1]}:
                samples = min(batch, lines // (t1 * t0)) if (t1, t0) == units[1::-1] else 1
                tile = (samples, t0, t1, t2)
                found[tile] = tile_counts(batch, units, tile)
    return list(found.items())
