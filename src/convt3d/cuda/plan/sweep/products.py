"""What a sweep kernel multiplies, fills and keeps in shared memory, and its lines of rows.

The numbers mirror ``sweep/config.cuh``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from convt3d.cuda.plan.axes import Axis, StackedAxis, axis_of
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.warpgroups import consumer_registers
from convt3d.cuda.schedule import Problem, div_up, round_up
from convt3d.geometry import Triple

MAX_ACCUMULATORS = 192
SPARE_REGISTERS = 32  # of a consumer beside its accumulators
_BARRIER_BYTES = 256
_MAX_STAGED = 64  # 16-bit columns that the epilogue stages at once
_LONGEST_CHAIN = 8  # taps of a set of split products
# With more shared memory L1 keeps 28 KB instead of 60, and loses lines of the source before the
# last of a large tile's loads that share them.
_MOST_SHARED = 196 * 1024


@dataclass(frozen=True)
class SweepTile:
    """The compile-time choices of a kernel."""

    planes: int  # source planes of a step (times the stride, backward)
    blocks: int  # of 64 rows to a consumer warpgroup
    column_tile: int
    fill_warps: int = 3
    source_stages: int = 2
    weight_stages: int = 2
    fill_pairs: int = 1  # pairs of positions that a filling thread has of a plane
    positions: int = 0  # of the largest source box, a plane of a residue
    keep_weights: bool = False  # all of a column tile stay in shared memory
    ping_pong: bool = False  # one consumer begins a step in the middle of the other one's

    consumers = 2  # warpgroups that multiply

    @property
    def rows(self) -> int:
        return 64 * self.blocks * self.consumers

    @property
    def threads(self) -> int:
        return 128 * self.consumers + 32 * (self.fill_warps + 1)


@dataclass(frozen=True)
class Line:
    """A cut of axis 2."""

    units: int
    rows: int  # of all planes across axis 0, with what lies between lines and samples
    beyond: int  # positions of a box besides those of its rows


@functools.lru_cache(maxsize=1024)
def _axes(problem: Problem, swapped: bool, planes: int) -> tuple[StackedAxis, Axis, Axis]:
    """The axis that is swept, and those of a plane."""
    g, first = problem.geometry, int(swapped)
    stacked = StackedAxis(
        g.kernel_size[first],
        g.stride[first],
        g.padding[first],
        g.dilation[first],
        problem.forward,
        planes,
    )
    return stacked, axis_of(problem, 1 - first, 1), axis_of(problem, 2, 1)


def shared_pitch(axis: Axis, source: int, target: int) -> int:
    """Units from one line (or sample) to the next when neighbours share their zeros."""
    units, first = axis.units(target), axis.reach[0]
    zeros = max(0, -first) // axis.unit_source
    beyond = units + axis.reach_units - zeros
    shared = max(units, beyond, div_up(source - first, axis.unit_source))
    return min(shared, units + axis.reach_units)


@dataclass(frozen=True)
class SweepProducts:
    """What the plan of a sweep kernel follows from: problem, tile and the sizes of its parts."""

    problem: Problem
    tile: SweepTile
    swapped: bool  # the kernel's axes 0 and 1 are H and D
    multiprocessors: int

    @property
    def order(self) -> Triple:
        return (1, 0, 2) if self.swapped else (0, 1, 2)

    @once
    def sweep(self) -> StackedAxis:
        return _axes(self.problem, self.swapped, self.tile.planes)[0]

    @once
    def plane(self) -> tuple[Axis, Axis]:
        """Axes 1 and 2."""
        return _axes(self.problem, self.swapped, self.tile.planes)[1:]

    @once
    def phases(self) -> int:
        """Phases of axis 1, which are columns of work of their own."""
        return len(self.plane[0].phase_taps)

    @once
    def slots2(self) -> int:
        return self.plane[1].unit_target

    @property
    def residues(self) -> int:
        return self.plane[0].unit_source * self.plane[1].unit_source

    @property
    def paired(self) -> bool:
        """Whether lines of rows have even length, so that sources may move in pairs."""
        return not self.problem.source_channels_last and self.plane[1].unit_source % 2 == 1

    @once
    def column_tiles(self) -> int:
        return div_up(self.problem.target_channels, self.tile.column_tile)

    @once
    def stacked(self) -> int:
        return self.sweep.kernel * self.tile.column_tile

    @once
    def accumulators(self) -> int:
        return self.slots2 * self.tile.blocks * self.sweep.window * self.tile.column_tile // 2

    @once
    def parts(self) -> int:
        """Words of a value of an operand: two TF32 parts of a split float32."""
        return self.problem.words_per_value

    @once
    def set_columns(self) -> tuple[int, ...]:
        """Columns of the sets of split products of one chain of taps and one block of rows."""
        return tuple(count * self.tile.column_tile for _, count in self.sweep.runs if count)

    @property
    def product_columns(self) -> int:
        """Columns of the widest product."""
        whole = max(self.sweep.blocks) * self.tile.column_tile
        return whole if self.parts == 1 else max(self.set_columns)

    @once
    def chain_taps(self) -> int:
        """Neighbouring taps of axis 2 whose split products are a set.

        Adding sets errs by the root of how many there are, chaining products by how many a chain
        has: the error is least where the cube of these is a quarter of all, and flat around it. So
        up to twice all are allowed, since fewer sets are faster.
        """
        if self.parts == 1:
            return 1
        taps0 = div_up(self.sweep.kernel, self.sweep.stride)
        taps1, taps = (max(axis.phase_taps) for axis in self.plane)
        products = self.chunks * taps0 * taps1 * taps
        longest = _LONGEST_CHAIN
        # Gradients err less than PyTorch's, whose sums are one chain of all products.
        while self.problem.forward and longest > 1 and longest**3 > 2 * products:
            longest -= 1
        return div_up(self.plane[1].kernel, div_up(taps, longest))

    @once
    def chains(self) -> int:
        """Sets of split products of a slot, source plane and block of rows."""
        return div_up(self.plane[1].kernel, self.chain_taps)

    @once
    def product_sets(self) -> int:
        """Sets of split products that have accumulators of their own."""
        if self.parts == 1:
            return 0
        beside = self.accumulators + 2 * max(self.set_columns) // 2
        return 2 if beside <= MAX_ACCUMULATORS else 1

    @once
    def live(self) -> int:
        """Registers of all sums."""
        sets = self.product_sets
        return self.accumulators + (sets * max(self.set_columns) // 2 if sets else 0)

    @property
    def chunk_channels(self) -> int:
        return 32 // self.problem.element_bytes

    @property
    def tap_pairs(self) -> bool:
        """Whether products of the last chunk have two taps of axis 2 in their depth."""
        axis, half = self.plane[1], self.chunk_channels // 2
        last = (self.problem.source_channels - 1) % self.chunk_channels
        alone = self.slots2 == 1 and axis.unit_source == 1
        return self.parts == 1 and alone and axis.kernel > 1 and last < half

    @once
    def chunks(self) -> int:
        return div_up(self.problem.source_channels, self.chunk_channels)

    @once
    def stage_bytes(self) -> int:
        """Weights of one (chunk, tap of axis 1)."""
        return self.plane[1].kernel * self.stacked * 32 * self.parts

    @once
    def set_bytes(self) -> int:
        """Weights of a column tile."""
        return self.chunks * self.plane[0].kernel * self.stage_bytes

    @property
    def packed_bytes(self) -> int:
        return self.problem.geometry.groups * self.column_tiles * self.set_bytes

    @once
    def position_bytes(self) -> int:
        """Of all planes and residues of a box."""
        return self.sweep.source_step * self.residues * 32 * self.parts

    # ------------------------------------------------------------ shared memory and registers

    @once
    def staged(self) -> tuple[int, int]:
        """Columns that the epilogue stages at a time, and buffers of them."""
        t = self.tile
        if self.problem.element_bytes == 4:
            return 8, 2
        if self.sweep.target_step == 1 and t.column_tile <= _MAX_STAGED:
            return t.column_tile, 1
        return min(t.column_tile, _MAX_STAGED // 2), 2

    @once
    def _store_bytes(self) -> int:
        """Tables of rows, and staged columns."""
        elements, size = 64 * self.tile.blocks * self.slots2, self.problem.element_bytes
        staged = 0
        if not self.problem.target_channels_last:
            columns, buffers = self.staged
            together = 16 if size == 2 and self.slots2 == 1 else 8
            staged = buffers * round_up(columns, together) * (elements * size + 16)
        return self.tile.consumers * (8 * elements + staged)

    @property
    def shared_bytes(self) -> int:
        t = self.tile
        weights = self.set_bytes if t.keep_weights else t.weight_stages * self.stage_bytes
        return self.bytes_with(t.source_stages * t.positions, weights)

    def bytes_with(self, positions: int, weights: int) -> int:
        """Shared memory with so many positions of all boxes, and bytes of weights."""
        return _BARRIER_BYTES + positions * self.position_bytes + weights + self._store_bytes

    @property
    def large(self) -> bool:
        """Whether a box has so many rows or planes that its loads share lines of the source."""
        return self.tile.blocks > 2 or self.tile.planes > 1

    @property
    def leaves_l1(self) -> bool:
        """Whether L1 keeps the lines that a large tile's loads share; small ones need none."""
        return self.leaves_l1_beside(self.shared_bytes)

    def leaves_l1_beside(self, shared_bytes: int) -> bool:
        return not self.large or self.parts > 1 or shared_bytes <= _MOST_SHARED

    @once
    def registers(self) -> tuple[int, int]:
        """Registers of a consuming and of a producing thread."""
        t = self.tile
        for producer in (104, 88, 72, 56, 40):
            consumer = consumer_registers(t.threads, t.consumers, producer)
            if consumer >= self.live + SPARE_REGISTERS:
                return consumer, producer
        return consumer, producer

    @once
    def fill_loads(self) -> int:
        """Pairs of positions that a filling thread loads for a box."""
        return self.tile.fill_pairs * self.plane[0].unit_source * self.sweep.source_step

    @once
    def fill_batch(self) -> int:
        """Pairs whose words a filling thread has in flight, as its registers allow."""
        places = 2 * self.tile.fill_pairs * self.plane[0].unit_source
        spare = self.registers[1] - 32 - places - (12 if self.parts > 1 else 0)
        most = max(1, spare // 9)
        rounds = div_up(self.fill_loads, most)
        return div_up(self.fill_loads, rounds)

    def covers(self, items: int, positions: int) -> bool:
        """Whether threads with so many pairs each reach all of a box; pairs may begin one early."""
        return 32 * self.tile.fill_warps * items > positions * self.plane[1].unit_source

    def positions_of(self, items: int) -> int:
        """Positions of a box that threads with so many pairs each fill, and padding."""
        residues2 = self.plane[1].unit_source
        # The odd ones keep the two quads of a chunk in different banks.
        return div_up(32 * self.tile.fill_warps * items, residues2) + (1 if residues2 == 1 else 4)

    # ------------------------------------------------------------ lines of rows

    def lines(self, batch: int, source: Sequence[int], target: Sequence[int]) -> list[Line]:
        """Ways to cut axis 2 into lines of rows: all of it, or pieces."""
        whole = self.plane[1].units(target[self.order[2]])
        units = sorted({div_up(whole, parts) for parts in range(1, 9)} | {1}, reverse=True)
        return [self.line_of(n, batch, source, target) for n in units]

    def line_of(self, units: int, batch: int, source: Sequence[int], target: Sequence[int]) -> Line:
        """Lines of so many units."""
        axis1, axis2 = self.plane
        one, two = self.order[1:]
        across = shared_pitch(axis1, source[one], target[one])
        pitch2 = self.pitch2(source, target, units)
        rows = batch * across * div_up(axis2.units(target[two]), units) * pitch2
        # What follows the last unit of the last sample.
        rows -= (across - axis1.units(target[one])) * pitch2 + pitch2 - units
        return Line(units, rows, self._beyond(units))

    def pitch2(self, source: Sequence[int], target: Sequence[int], units: int) -> int:
        """Positions from a line of so many units to the next."""
        axis2, two = self.plane[1], self.order[2]
        pitch = units + axis2.reach_units
        if units >= axis2.units(target[two]):
            pitch = shared_pitch(axis2, source[two], target[two])
        return round_up(pitch, 2) if self.paired and source[two] % 2 == 0 else pitch

    def _beyond(self, units: int) -> int:
        """Positions that a box of lines of so many units has besides those of its rows."""
        axis1, axis2 = self.plane
        pitch = units + axis2.reach_units
        if self.paired:
            pitch = round_up(pitch, 2)
        return axis1.reach_units * pitch + axis2.reach_units

    def box_positions(self, units: int) -> int:
        """Positions that a box of lines of so many units may need, a plane of a residue."""
        return self.tile.rows + self._beyond(units)

    # ------------------------------------------------------------ CTAs

    @once
    def tile_columns(self) -> int:
        """Columns of steps of one tile of rows: a column tile of a group and phase has one each."""
        return (
            self.column_tiles * self.problem.geometry.groups * self.phases * self.sweep.interleaved
        )

    def shares(
        self, source: Sequence[int], target: Sequence[int]
    ) -> Callable[[int], tuple[int, float, int]]:
        """For so many rows: CTAs, and steps of one; those that multiply, and that fill its window.

        A column is the sweep of one tile through a volume. CTAs divide the steps of all columns
        evenly. One that begins within a column fills its window of sums again; where that costs
        more than some idle multiprocessors, each CTA has the same number of whole columns.
        """
        sweep, first = self.sweep, self.order[0]
        steps = sweep.steps(target[first])
        busy = sweep.busy_steps(source[first], target[first])
        most, warm = self.multiprocessors, min(sweep.warm_steps, busy)

        def of_rows(rows: int) -> tuple[int, float, int]:
            columns = div_up(rows, self.tile.rows) * self.tile_columns
            whole = div_up(columns, most)
            cut = math.ceil(columns * steps / most) * (busy / steps)
            if columns % most == 0 or (columns % whole == 0 and whole * busy < cut + warm):
                return columns // whole, whole * busy, 0
            return most, cut, warm

        return of_rows
