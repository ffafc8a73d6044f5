"""What an ndhwc kernel multiplies, where it keeps that in shared memory, and which tiles fit.

The numbers mirror ``ndhwc/config.cuh``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from convt3d.cuda.plan.ndhwc.boxing import ROW_BYTES, Boxing
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.unit_tiles import UnitShape, UnitTile, UnitTileKernel
from convt3d.cuda.plan.warpgroups import MAX_PRODUCTS, MAX_STAGE_BYTES, consumer_registers
from convt3d.cuda.schedule import div_up, round_up
from convt3d.geometry import Triple

BARRIER_BYTES = 128
MOST_ROUNDS = 32  # of work tiles that are scheduled longest first
_SPARE_REGISTERS = 56  # of a consumer beside sums
# The same of products by warps, beside operands and addresses. Over 77 plans, what is beyond the
# registers of a thread is within 34 of what the compiler spills, 4 in the mean.
_SPARE_BY_WARPS = 40
_STAGED_BYTES = 3072  # of columns of a contiguous target, that a warp stages at a time
_FILL_BYTES = 2048  # of outputs without taps that leave in one copy


@dataclass(frozen=True)
class NdhwcTile(UnitTile):
    """The compile-time choices of a kernel."""

    split: int  # trailing axes whose taps have boxes of their own; 0: products by warps
    resident_weights: bool
    groups_per_tile: int = 1  # groups that one box and one product's columns stand for
    samples_inside: bool = False  # units in the order D, H, W, samples, not samples first
    direct: bool = False  # weights as they are, where they are channels_last, too
    fills: bool = False  # outputs of phases without taps leave by bulk copies, beside the products
    cluster: int = 1  # split-K: CTAs that share the chunks and taps of W of a work tile


@dataclass(frozen=True)
class NdhwcLayout(UnitTileKernel[UnitShape]):
    """A kernel's products, shared memory and tiles."""

    tile: NdhwcTile

    # ------------------------------------------------------------ phases, taps and channels

    @once
    def spans(self) -> Triple:
        """Positions of the box beside the first that the taps of a work tile reach."""
        whole = 3 - self.tile.split
        first, second, third = (axis.span if a < whole else 0 for a, axis in enumerate(self.axes))
        return (first, second, third)

    @property
    def by_warps(self) -> bool:
        return self.tile.split == 0

    @once
    def empty_phases(self) -> int:
        """Phases without taps whose outputs bulk copies may write, whole lines of a tile."""
        whole = self.n_tiles == 1 and self.problem.forward and self.problem.target_channels_last
        if not whole or not 1 <= self.tile.phased <= 2 or self.tile.samples_inside:
            return 0
        return math.prod(a.phases for a in self.axes[:2]) - math.prod(
            a.live_phases for a in self.axes[:2]
        )

    @once
    def chunks(self) -> int:
        fewest = div_up(self.source_channels, 8 * self.vector)
        if self.groups == 1 or self.by_warps:
            return fewest
        # Products of a last chunk of fewer channels would read the next group's: times weights of
        # zero, but infinite ones make NaN of these.
        products = self.source_channels // (2 * self.vector)
        return next(n for n in range(fewest, products + 1) if products % n == 0)

    @once
    def steps(self) -> int:
        """Products along the channels of a chunk."""
        return div_up(self.source_channels, self.chunks * 2 * self.vector)

    @property
    def chunk_channels(self) -> int:
        return self.steps * 2 * self.vector

    @once
    def taps(self) -> int:
        """Taps of D and H that a stage unrolls."""
        return math.prod(axis.kernel if axis.block else 1 for axis in self.axes[:2])

    @once
    def stages(self) -> int:
        """Stages of a chunk over all phases."""
        if self.by_warps:
            return 1
        walked = (1 if axis.block else axis.kernel for axis in self.axes[:2])
        return self.axes[2].kernel * math.prod(walked)

    @once
    def shares(self) -> int:
        """Chunks and taps of W of a work tile, which the CTAs of a cluster can share."""
        return self.chunks * min(n for n in self.axes[2].phase_taps if n)

    @once
    def most_stages(self) -> int:
        """Stages of a chunk in the phase with most taps."""
        if self.by_warps:
            return 1
        most = (1 if axis.block else axis.max_taps for axis in self.axes[:2])
        last = self.axes[2]
        return (last.kernel if last.block else last.max_taps) * math.prod(most)

    @once
    def boxes(self) -> float:
        """Boxes of a chunk, of the mean work tile."""
        return math.prod(
            len(axis.live_shifts) if axis.block else axis.kernel / axis.phases
            for axis in self.axes[3 - self.tile.split :]
        )

    @once
    def slots(self) -> Triple:
        """Slots of a unit that a work tile has along each axis."""
        first, second, third = (axis.slots for axis in self.axes)
        return (first, second, third)

    @once
    def paired_products(self) -> int:
        """Products of a warp's 16 units and 8 columns, of two shifts of W each."""
        axis = self.axes[2]
        reads = {
            (slot, (shift - axis.reach[0]) // 2)
            for slot, shifts in enumerate(axis.slot_shifts)
            for shift in shifts
        }
        return self.taps * len(reads)

    @property
    def fragments(self) -> int:
        """Blocks of 8 columns that a warp multiplies."""
        return self.target_channels // 8

    @property
    def may_be_n_major(self) -> bool:
        """Whether products take weights whose columns are neighbours in memory."""
        p = self.problem
        return p.forward and p.element_bytes == 2 and p.geometry.groups == 1

    @property
    def may_be_k_major(self) -> bool:
        """The same of source channels, of which a row of 128 bytes holds a chunk."""
        few = 2 * self.steps * 2 * self.vector * self.problem.element_bytes <= ROW_BYTES
        return self.problem.geometry.groups == 1 and not self.by_warps and not few

    @property
    def k_major(self) -> bool:
        """Whether weights are as they are, and source channels neighbours."""
        return self.tile.direct and not self.may_be_n_major

    @property
    def flipped(self) -> bool:
        """Whether taps of such weights are in reverse, as those of a Conv3d's forward pass are."""
        return self.k_major and self.problem.forward

    @property
    def stage_bytes(self) -> int:
        if self.by_warps:
            return div_up(self.paired_products, 2) * self.fragments * 512
        if self.k_major:
            return self.taps * self.tile.column_tile * ROW_BYTES
        if self.tile.direct:
            boxes = div_up(self.tile.column_tile, ROW_BYTES // self.problem.element_bytes)
            return self.taps * boxes * self.chunk_channels * ROW_BYTES
        return self.taps * self.steps * self.tile.column_tile * 32

    @property
    def packed_bytes(self) -> int:
        return self.n_tiles * self.chunks * self.stages * self.stage_bytes

    @property
    def consumer_registers(self) -> int:
        # The producer of a cluster spills with fewer.
        producers = 40 if self.tile.fills else 56 if self.tile.cluster > 1 else 24
        return consumer_registers(self.tile.threads, self.tile.consumers, producers)

    @once
    def unrolled(self) -> int:
        """Products of a block that follow one another in the code, without a loop."""
        if self.by_warps:
            return self.paired_products * self.fragments
        inner = self.axes[2].kernel if self.axes[2].block else 1
        return self.taps * inner * self.steps

    @property
    def suits(self) -> bool:
        """Whether registers and code hold all products of a chunk."""
        t = self.tile
        if not self.problem.target_channels_last and self.vector % self.slots[2]:
            return False  # 16 bytes of the target are the slots of whole units
        beside = 2 * t.blocks + _SPARE_REGISTERS
        if self.by_warps:
            # The compiler keeps an address for each position that taps read.
            addresses = 2 * t.blocks * math.prod(span + 1 for span in self.spans)
            operands = 4 * t.blocks * t.groups_per_tile + 4 * self.fragments
            beside = addresses + operands + _SPARE_BY_WARPS
        return (
            self.accumulators + beside <= self.consumer_registers
            and self.unrolled * t.blocks <= MAX_PRODUCTS
            and (self.by_warps or self.stage_bytes <= MAX_STAGE_BYTES)
        )

    # ------------------------------------------------------------ shared memory

    @property
    def sum_bytes(self) -> int:
        """Of the sums that a CTA leaves for its cluster."""
        return 128 * self.tile.consumers * self.accumulators * 4

    @property
    def stored_columns(self) -> int:
        """Columns of a work tile that a CTA stores: all, or its part of a cluster's."""
        return 16 * div_up(self.tile.column_tile // 16, self.tile.cluster)

    @property
    def staged_columns(self) -> int:
        """Columns that the epilogue stages at a time: less where boxes need the room."""
        columns = self.stored_columns
        if not self.problem.target_channels_last:
            parts = (n for n in range(columns, 0, -16) if columns % n == 0)
            return next((n for n in parts if n * self._column_pitch <= _STAGED_BYTES), 16)
        if not self.tile.samples_inside:
            return columns
        fewer = 128 // self.problem.element_bytes
        return fewer if columns % fewer == 0 else columns

    @property
    def pieces(self) -> int:
        """Staged pieces of 16 bytes of a unit's outputs of one slot of D and H."""
        return self.slots[2] * self.staged_columns // self.vector

    @property
    def _column_pitch(self) -> int:
        """Bytes from a staged column of a contiguous target to the next: of the rows of a warp."""
        return 16 * self.slots[2] * self.problem.element_bytes + 16

    @property
    def _staging_bytes(self) -> int:
        """Of a warp's outputs of one slot of D and H."""
        if self.problem.target_channels_last:
            return 16 * (16 * self.pieces + 16)
        return self.staged_columns * self._column_pitch

    @property
    def _weight_offset(self) -> int:
        order = 4 * MOST_ROUNDS if self.tile.samples_inside else 0
        return round_up(BARRIER_BYTES + order, 1024 if self.tile.direct else 128)

    @once
    def boxing(self) -> Boxing:
        """How boxes of the source lie in shared memory."""
        t = self.tile
        steps = (1, 1, 1) if self.problem.forward else self.problem.geometry.stride
        return Boxing(t.rows, self.spans, steps, t.split, t.samples_inside, t.phased < 3)

    def box_bytes(self, shape: UnitShape) -> int:
        """From a box to the next."""
        return self.boxing.bytes_of(shape)

    def pitches(self, shape: UnitShape) -> Triple:
        """Rows of a box from a sample, slice and line to the next."""
        return self.boxing.pitches(shape)

    def shared_bytes(self, shape: UnitShape, target: Sequence[int] = ()) -> int:
        """Of a CTA, whatever the extents."""
        return self._bytes_beside_boxes + self.tile.source_stages * self.box_bytes(shape)

    @once
    def _bytes_beside_boxes(self) -> int:
        weights = self._weight_offset + self.tile.weight_stages * self.stage_bytes
        stores = 4 * self.tile.consumers * (256 + self._staging_bytes)
        return 1024 + round_up(weights, 1024) + stores + self._fill_bytes

    @property
    def _fill_bytes(self) -> int:
        position = self.target_channels * self.problem.element_bytes
        return position * max(1, _FILL_BYTES // position) if self.tile.fills else 0

    # ------------------------------------------------------------ tiles

    def units(self, target: Sequence[int]) -> Triple:
        """Units along each axis."""
        a, b, c = (
            # The last unit of an axis may be slots without taps alone, which the one before stores.
            max(1, div_up(n - beyond, axis.stride if self.problem.forward else 1))
            for n, axis, beyond in zip(target, self.axes, self.beyond, strict=True)
        )
        return (a, b, c)

    @once
    def beyond(self) -> Triple:
        """Slots before the first one with a tap, along each axis that has all of them.

        Where outputs of phases without taps are filled, phases before the first one with a tap.
        """
        first, second, third = (
            next(i for i, n in enumerate(axis.phase_taps) if n)
            if axis.block or self.tile.fills
            else 0
            for axis in self.axes
        )
        return (first, second, third)

    def shapes(self, batch: int, target: Sequence[int]) -> Iterator[UnitShape]:
        """Tiles whose units the kernel's products can read, and that fit shared memory."""
        t = self.tile
        most = (self.gpu.shared_per_block - self._bytes_beside_boxes) // t.source_stages
        least = 0
        if t.cluster > 1:  # the rings hold the sums that a cluster adds up
            least = div_up(self.sum_bytes - t.weight_stages * self.stage_bytes, t.source_stages)
        for alike in self.boxing.shapes(batch, self.units(target)):
            fitting = (shape for shape, bytes_ in alike if least <= bytes_ <= most)
            if (shape := next(fitting, None)) is not None:
                yield shape
