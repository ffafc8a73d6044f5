"""Plans of ``sweep/kernel.cu``: Hopper's warpgroup products for math-bound layers.

The numbers mirror ``sweep/config.cuh``. The cost model counts, for the steps of one CTA, the cycles
of the products, of the shared-memory and L2 traffic beside them, of barriers and of the epilogue.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.search import cheapest
from convt3d.cuda.schedule import (
    Gpu,
    Launch,
    Problem,
    Schedule,
    div_up,
    macros,
    round_up,
)
from convt3d.geometry import Triple
from convt3d.polyphase import axis_phases
from convt3d.precision import Arithmetic

_MAX_STACKED = 256  # columns of one product
_MAX_ACCUMULATORS = 192
_MAX_SLOTS2 = 4
# Registers of a consumer beside its accumulators.
_SPARE_REGISTERS = 32
# Phases of D and H re-read the source and write every other row: by parts of a value and element
# size. Kernels of four and more at stride two multiply more for what they read; contiguous sources
# are read more often where a tile has few columns.
_INTERLEAVING_LOSS = {(2, 4): 1.25, (1, 4): 1.0, (1, 2): 1.2}
_LONG_INTERLEAVING_LOSS, _WIDE_INTERLEAVING_LOSS, _NARROW_INTERLEAVING_LOSS = 0.93, 0.85, 1.0
_WIDE = 32  # columns
_ONE_CHUNK = 1.5  # of source channels, of which most are zeros: two layers of three channels
_MAX_TAPS2 = 16
_MAX_TAPS0 = 16
_MIN_GROUP = 32  # channels of a group
_MIN_GROUP_IEEE = 16
_BARRIER_BYTES = 256
# Source boxes and weight stages, the deepest first; deeper ones let consumers be farther apart.
# Large tiles, of more than two blocks or several planes, only got slower by the deepest.
_LARGE_PIPELINES = ((3, 4), (2, 4), (3, 3), (2, 3), (2, 2))
_LEAST_BOXES = 2
_PIPELINES = ((4, 8), (4, 6), (4, 5), (4, 4), *_LARGE_PIPELINES)
# Shared memory beyond which 28 KB of L1 are left, not 60, and lines of the source that several
# loads of a large tile share are gone between these; what that costs beside kept weights.
_MOST_SHARED = 196 * 1024
_LITTLE_L1 = 1.08
# Descriptors hold 14 bits of 16 bytes.
_MAX_POSITIONS = 16368
# Bytes a cycle that one multiprocessor gets from L2 while all of them read, and may store.
_L2_BYTES = 24.0
_STORE_BYTES = 16.0
# What the others' models count for a cycle that is measured.
_SCALE = 1.12
# What boxes of several residues cost more than counted.
_STRIDED_SOURCE = 1.4
# Cycles until what a filling thread loads has arrived and is stored.
_LATENCY = 2400.0
# Cycles of a filling warp for one pair of positions of each lane.
_FILL_CYCLES = 100.0
# Of split products: cycles until a set's accumulators can be read after its last product.
_SET_LATENCY = 100.0
# What two weight stages cost split products more than counted.
_TWO_STAGES = 1.1
# Of contiguous sources, what the ends of a piece of a line cost, and pieces of odd length of lines
# that are even; by element size.
_CUT = {4: (2.0, 1.2), 2: (4.0, 1.5)}
# What pieces cost that end within a sector of 32 bytes, where the next one begins: by the square of
# a step's time to store by that to multiply; at most.
_SHARED_SECTORS, _MOST_SHARED_SECTORS = 6.0, 2.0
# What products that fall apart where windows of planes overlap cost more than counted.
_PIECES = 1.08
# What sweeping along H costs more than along D, all else being equal.
_SWAPPED = 1.015
# What each of a consumer's blocks of rows beyond two costs more than counted.
_LARGE_TILE = 1.06
_MAX_BOXES = 4  # beside kept weights
# Boxes beside kept weights have a multiple of so many positions, and one, where that costs no box:
# near extents share a kernel.
_BOX_STEP = 64
# What kept weights cost more than counted, by parts of a value.
_KEPT_WEIGHTS = {1: 1.02, 2: 1.045}
# Part of the cost when consumers of two blocks take turns, and others; without kept weights turns
# gained nothing.
_PING_PONG, _OTHER_PING_PONG = 0.99, 1.01
# So few produced channels cost more than counted: fill and epilogue, in 16 bits as in TF32.
_FEW_COLUMNS = 4
_FEW_LOSS, _FEW_LOSS_16BIT = 1.3, 2.25
_MAX_STAGED = 64  # 16-bit columns that the epilogue stages at once
_MAX_SETS = 256  # of split products, unrolled, were no taps chained
_LONGEST_CHAIN = 8  # taps of a set of split products


@dataclass(frozen=True)
class PlaneAxis:
    """Axis 1 or 2: a gather in units (see geometry/axis.cuh)."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    forward: bool

    @functools.cached_property
    def phase_taps(self) -> tuple[int, ...]:
        """Taps of each phase of the destination."""
        if not self.forward:
            return (self.kernel,)
        phases = axis_phases(self.kernel, self.stride, self.padding, self.dilation)
        return tuple(len(taps) for taps in phases)

    @property
    def phases(self) -> int:
        return len(self.phase_taps)

    @property
    def unit_source(self) -> int:
        return 1 if self.forward else self.stride

    @property
    def unit_target(self) -> int:
        return self.stride if self.forward else 1

    @functools.cached_property
    def reach(self) -> tuple[int, int]:
        """Smallest and largest shift over all phases."""
        if self.forward:
            found = [
                (r + self.padding - k * self.dilation) // self.stride
                for r in range(self.stride)
                for k in range(self.kernel)
                if (r + self.padding - k * self.dilation) % self.stride == 0
            ]
        else:
            found = [k * self.dilation - self.padding for k in range(self.kernel)]
        return (min(found), max(found))

    @functools.cached_property
    def reach_units(self) -> int:
        """The farthest that taps reach past a unit, in units."""
        return (self.reach[1] - self.reach[0]) // self.unit_source

    def units(self, target: int) -> int:
        return div_up(target, self.unit_target)

    def shared_pitch(self, source: int, target: int) -> int:
        """Units from one line (or sample) to the next when neighbours share their zeros."""
        units = self.units(target)
        zeros = max(0, -self.reach[0]) // self.unit_source
        shared = max(
            units,
            units + self.reach_units - zeros,
            div_up(source - self.reach[0], self.unit_source),
        )
        return min(shared, units + self.reach_units)


@dataclass(frozen=True)
class StackedAxis:
    """Axis 0: all its taps are columns of one product (see geometry/stacked_axis.cuh)."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    forward: bool
    planes: int

    @property
    def interleaved(self) -> int:
        """Volumes of planes that do not meet."""
        return self.dilation if self.kernel > 1 else 1

    @property
    def source_step(self) -> int:
        return self.planes * (1 if self.forward else self.stride)

    @property
    def target_step(self) -> int:
        return self.planes * (self.stride if self.forward else 1)

    @property
    def _back(self) -> int:
        return 0 if self.forward else (self.kernel - 1) // self.stride

    @property
    def target_origin(self) -> int:
        return -self.padding if self.forward else -self._back * self.interleaved

    @property
    def source_origin(self) -> int:
        return 0 if self.forward else -self.padding

    @functools.cached_property
    def window(self) -> int:
        reached = (
            (self.planes - 1) * self.stride + self.kernel
            if self.forward
            else self._back + self.planes
        )
        return max(reached, self.target_step)

    @property
    def warm_steps(self) -> int:
        return div_up(self.window, self.target_step) - 1

    def steps(self, target: int) -> int:
        """Of the sweep through one volume."""
        return div_up(target - self.target_origin, self.target_step * self.interleaved)

    def busy_steps(self, source: int, target: int) -> int:
        """Steps that meet any source plane."""
        planes = self.source_step * self.interleaved
        return min(self.steps(target), div_up(source - self.source_origin, planes))

    @functools.cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(first window plane, taps) of each source plane of a step."""
        if self.forward:
            return tuple((plane * self.stride, self.kernel) for plane in range(self.planes))
        found = []
        for plane in range(self.source_step):
            residue = plane % self.stride
            count = div_up(self.kernel - residue, self.stride) if residue < self.kernel else 0
            found.append((plane // self.stride - (count - 1) + self._back, count))
        return tuple(found)

    @functools.cached_property
    def blocks(self) -> tuple[int, ...]:
        """Window planes of each product of a step, all source planes one after the other."""
        cuts = {at for first, count in self.runs if count for at in (first, first + count)}
        found = []
        for first, count in self.runs:
            inside = sorted(at for at in cuts if first <= at <= first + count)
            found += [b - a for a, b in itertools.pairwise(inside)] if count else []
        return tuple(found)


@functools.lru_cache(maxsize=1024)
def _sweep(problem: Problem, swapped: bool, planes: int) -> StackedAxis:
    g, a = problem.geometry, int(swapped)
    return StackedAxis(
        g.kernel_size[a], g.stride[a], g.padding[a], g.dilation[a], problem.forward, planes
    )


@functools.lru_cache(maxsize=1024)
def _plane(problem: Problem, swapped: bool) -> tuple[PlaneAxis, PlaneAxis]:
    g = problem.geometry
    first, second = (
        PlaneAxis(g.kernel_size[a], g.stride[a], g.padding[a], g.dilation[a], problem.forward)
        for a in (int(not swapped), 2)
    )
    return (first, second)


@dataclass(frozen=True)
class SweepTile:
    """The compile-time choices of a kernel."""

    planes: int  # source planes of a step (times the stride, backward)
    blocks: int  # of 64 rows to a consumer warpgroup
    column_tile: int
    consumers: int = 2
    fill_warps: int = 3
    resident: int = 1
    source_stages: int = 2
    weight_stages: int = 2
    fill_pairs: int = 1  # pairs of positions that a filling thread has of a plane
    positions: int = 0  # of the largest source box, a plane of a residue
    keep_weights: bool = False  # all of a column tile stay in shared memory
    ping_pong: bool = False  # one consumer begins a step in the middle of the other one's

    @property
    def rows(self) -> int:
        return 64 * self.blocks * self.consumers

    @property
    def threads(self) -> int:
        return 128 * self.consumers + 32 * (self.fill_warps + 1)


@dataclass(frozen=True)
class WgmmaSweepPlan:
    """A kernel for one problem on one kind of GPU."""

    problem: Problem
    tile: SweepTile
    swapped: bool  # the kernel's axes 0 and 1 are H and D
    multiprocessors: int

    # ------------------------------------------------------------ derived sizes

    @property
    def order(self) -> Triple:
        return (1, 0, 2) if self.swapped else (0, 1, 2)

    @functools.cached_property
    def sweep(self) -> StackedAxis:
        return _sweep(self.problem, self.swapped, self.tile.planes)

    @functools.cached_property
    def plane(self) -> tuple[PlaneAxis, PlaneAxis]:
        """Axes 1 and 2."""
        return _plane(self.problem, self.swapped)

    @functools.cached_property
    def slots2(self) -> int:
        return self.plane[1].unit_target

    @property
    def residues(self) -> int:
        return self.plane[0].unit_source * self.plane[1].unit_source

    @property
    def paired(self) -> bool:
        """Whether lines of rows have even length, so that sources may move in pairs."""
        return not self.problem.source_channels_last and self.plane[1].unit_source % 2 == 1

    @functools.cached_property
    def column_tiles(self) -> int:
        return div_up(self.problem.target_channels, self.tile.column_tile)

    @functools.cached_property
    def stacked(self) -> int:
        return self.sweep.kernel * self.tile.column_tile

    @functools.cached_property
    def accumulators(self) -> int:
        return self.slots2 * self.tile.blocks * self.sweep.window * self.tile.column_tile // 2

    @functools.cached_property
    def parts(self) -> int:
        """Words of a value of an operand: two TF32 parts of a split float32."""
        return self.problem.words_per_value

    @functools.cached_property
    def set_columns(self) -> tuple[int, ...]:
        """Columns of the sets of split products of one chain of taps and one block of rows."""
        return tuple(count * self.tile.column_tile for _, count in self.sweep.runs if count)

    @functools.cached_property
    def chain_taps(self) -> int:
        """Neighbouring taps of axis 2 whose split products are a set.

        Adding sets errs by the root of how many there are, chaining products by how many a chain
        has: the error is least where the cube of these is a quarter of all, and flat around it.
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

    @functools.cached_property
    def chains(self) -> int:
        """Sets of split products of a slot, source plane and block of rows."""
        return div_up(self.plane[1].kernel, self.chain_taps)

    @functools.cached_property
    def product_sets(self) -> int:
        """Sets of split products that have accumulators of their own."""
        if self.parts == 1:
            return 0
        beside = self.accumulators + 2 * max(self.set_columns) // 2
        return 2 if beside <= _MAX_ACCUMULATORS else 1

    @functools.cached_property
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

    @functools.cached_property
    def chunks(self) -> int:
        return div_up(self.problem.source_channels, self.chunk_channels)

    @functools.cached_property
    def stage_bytes(self) -> int:
        """Weights of one (chunk, tap of axis 1)."""
        return self.plane[1].kernel * self.stacked * 32 * self.parts

    @functools.cached_property
    def set_bytes(self) -> int:
        """Weights of a column tile."""
        return self.chunks * self.plane[0].kernel * self.stage_bytes

    @property
    def packed_bytes(self) -> int:
        return self.problem.geometry.groups * self.column_tiles * self.set_bytes

    @functools.cached_property
    def position_bytes(self) -> int:
        """Of all planes and residues of a box."""
        return self.sweep.source_step * self.residues * 32 * self.parts

    @functools.cached_property
    def staged(self) -> tuple[int, int]:
        """Columns that the epilogue stages at a time, and buffers of them."""
        t = self.tile
        if self.problem.element_bytes == 4:
            return 8, 2
        if self.sweep.target_step == 1 and t.column_tile <= _MAX_STAGED:
            return t.column_tile, 1
        return min(t.column_tile, _MAX_STAGED // 2), 2

    @property
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
        boxes = t.source_stages * t.positions * self.position_bytes
        weights = self.set_bytes if t.keep_weights else t.weight_stages * self.stage_bytes
        return _BARRIER_BYTES + boxes + weights + self._store_bytes

    @property
    def large(self) -> bool:
        """Whether boxes are filled from many lines."""
        return self.tile.blocks > 2 or self.tile.planes > 1

    @property
    def leaves_l1(self) -> bool:
        """Whether L1 has room for the lines that boxes are filled from."""
        return not self.large or self.parts > 1 or self.shared_bytes <= _MOST_SHARED

    @functools.cached_property
    def registers(self) -> tuple[int, int]:
        """Registers of a consuming and of a producing thread."""
        t = self.tile
        launched = min(248, 65536 // (t.resident * t.threads) // 8 * 8)
        total = launched * t.threads
        producers = t.threads - 128 * t.consumers
        for producer in (104, 88, 72, 56, 40):
            consumer = min(240, (total - producer * producers) // (128 * t.consumers) // 8 * 8)
            if consumer >= self.live + _SPARE_REGISTERS:
                return consumer, producer
        return consumer, producer

    @functools.cached_property
    def fill_loads(self) -> int:
        """Pairs of positions that a filling thread loads for a box."""
        return self.tile.fill_pairs * self.plane[0].unit_source * self.sweep.source_step

    @functools.cached_property
    def fill_batch(self) -> int:
        """Pairs whose words a filling thread has in flight, as its registers allow."""
        places = 2 * self.tile.fill_pairs * self.plane[0].unit_source
        spare = self.registers[1] - 32 - places - (12 if self.parts > 1 else 0)
        most = max(1, spare // 9)
        rounds = div_up(self.fill_loads, most)
        return div_up(self.fill_loads, rounds)

    @property
    def fill_cycles(self) -> float:
        """From the first load of a box to its last store."""
        rounds = div_up(self.fill_loads, self.fill_batch)
        return rounds * _LATENCY + self.fill_loads * _FILL_CYCLES * self.parts

    def covers(self, items: int, positions: int) -> bool:
        """Whether threads with so many pairs each reach all of a box; pairs may begin one early."""
        return 32 * self.tile.fill_warps * items > positions * self.plane[1].unit_source

    def positions_of(self, items: int) -> int:
        """Positions of a box that threads with so many pairs each fill, and padding."""
        residues2 = self.plane[1].unit_source
        # The odd ones keep the two quads of a chunk in different banks.
        return div_up(32 * self.tile.fill_warps * items, residues2) + (1 if residues2 == 1 else 4)

    # ------------------------------------------------------------ launches

    @functools.cached_property
    def macros(self) -> tuple[tuple[str, str], ...]:
        p, t, g = self.problem, self.tile, self.problem.geometry
        consumer_registers, producer_registers = self.registers
        values: dict[str, object] = {
            "forward": p.forward,
            "bias": p.bias,
            "source_channels_last": p.source_channels_last,
            "target_channels_last": p.target_channels_last,
            "groups": g.groups,
            "source_channels": p.source_channels,
            "target_channels": p.target_channels,
            "planes": t.planes,
            "blocks": t.blocks,
            "consumers": t.consumers,
            "fill_warps": t.fill_warps,
            "fill_pairs": t.fill_pairs,
            "fill_batch": self.fill_batch,
            "resident": t.resident,
            "product_sets": self.product_sets,
            "chain_taps": self.chain_taps,
            "column_tile": t.column_tile,
            "staged_columns": self.staged[0],
            "staged_buffers": self.staged[1],
            "source_stages": t.source_stages,
            "keep_weights": t.keep_weights,
            "ping_pong": t.ping_pong,
            "weight_stages": t.weight_stages,
            "positions": t.positions,
            "consumer_registers": consumer_registers,
            "producer_registers": producer_registers,
        }
        for i, a in enumerate(self.order):
            values[f"kernel{i}"] = g.kernel_size[a]
            values[f"stride{i}"] = g.stride[a]
            values[f"padding{i}"] = g.padding[a]
            values[f"dilation{i}"] = g.dilation[a]
        return p.type_macros + macros("CONVT3D_", **values)

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        source, target = tuple(input_size), self.problem.geometry.output_size(input_size)
        if not self.problem.forward:
            source, target = target, source
        numbers = (
            *(source[a] for a in self.order),
            *_strides(source, self.order),
            *(target[a] for a in self.order),
            *_strides(target, self.order),
            batch,
            self.piece(batch, source, target),
        )
        product = Launch(
            KernelSpec("sweep/kernel.cu", "convt3d_sweep", self.macros),
            self.multiprocessors * self.tile.resident,
            self.tile.threads,
            self.shared_bytes,
            ("source", "packed", "bias", "target", *map(np.int32, numbers)),
            dependent=True,
        )
        weight_strides = ["weight_stride_in", "weight_stride_out"]
        weight_strides += [f"weight_stride_{'dhw'[a]}" for a in self.order]
        pack = Launch(
            KernelSpec("sweep/pack.cu", "convt3d_sweep_pack", self.macros),
            min(div_up(self.packed_bytes // 16, 256), 4096),
            256,
            0,
            ("weight", "packed", *weight_strides),
        )
        return Schedule((pack, product), {"packed": self.packed_bytes})

    def describe(self) -> dict[str, str]:
        t = self.tile
        runs = sorted(
            set(self.set_columns)
            if self.parts > 1
            else {n * t.column_tile for n in self.sweep.blocks}
        )
        return {
            "kernel": "sweep along an axis, its taps stacked on N, wgmma",
            "axes": "H, D, W" if self.swapped else "D, H, W",
            "tile": f"{t.rows} M rows x {t.column_tile} columns",
            "unit": f"{self.sweep.target_step} planes a step, {self.slots2} along W",
            "products": f"m64 x {runs} columns, {self.live} accumulators a thread",
            "warps": f"{t.consumers} warpgroups multiply{' in ping-pong' if t.ping_pong else ''}, "
            f"{t.fill_warps} warps fill",
            "pipeline": f"{t.source_stages} A stages of {self.chunk_channels} channels, "
            f"{'all weights' if t.keep_weights else f'{t.weight_stages} weight stages'}, "
            f"{t.resident} CTAs a multiprocessor",
            "shared memory": f"{self.shared_bytes} bytes",
        }

    # ------------------------------------------------------------ tile shape and cost

    def lines(self, batch: int, source: Sequence[int], target: Sequence[int]) -> list[Line]:
        """Ways to cut axis 2 into lines of rows: all of it, or pieces."""
        axis1, axis2 = self.plane
        one, two = self.order[1:]
        whole = axis2.units(target[two])
        across = batch * axis1.shared_pitch(source[one], target[one])
        found = []
        for units in sorted({div_up(whole, parts) for parts in range(1, 9)} | {1}, reverse=True):
            pitch2 = self.pitch2(source, target, units)
            rows = across * div_up(whole, units) * pitch2
            # What follows the last unit of the last sample.
            beyond = axis1.shared_pitch(source[one], target[one]) - axis1.units(target[one])
            rows -= beyond * pitch2 + pitch2 - units
            found.append(Line(units, rows, self._beyond(units)))
        return found

    def pitch2(self, source: Sequence[int], target: Sequence[int], units: int) -> int:
        """Positions from a line of so many units to the next."""
        axis2, two = self.plane[1], self.order[2]
        pitch = units + axis2.reach_units
        if units >= axis2.units(target[two]):
            pitch = axis2.shared_pitch(source[two], target[two])
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

    def piece(self, batch: int, source: Sequence[int], target: Sequence[int]) -> int:
        """Units of axis 2 that a line of rows holds: all of them, or of a piece of it."""
        return min(
            self.lines(batch, source, target),
            key=lambda line: self._cost(line, source, target) * self._cutting(line.units, target),
        ).units

    @functools.cached_property
    def _products(self) -> float:
        """Cycles of the products of one (chunk, tap of axis 1) of a step, all rows."""
        t, taps2 = self.tile, float(self.plane[1].kernel)
        blocks = t.blocks * t.consumers
        if self.parts == 1:
            columns = [n * t.column_tile for n in self.sweep.blocks]
            whole = len(columns) == len(self.set_columns)
            loss = 1.0 if whole else _PIECES
            if self.tap_pairs:
                taps2 -= taps2 // 2 / self.chunks
            return loss * blocks * taps2 * sum(product_cycles(n) for n in columns)
        # While the tensor core works for one warpgroup, another adds what its own one left.
        sets = self.slots2 * self.chains  # of a source plane and a block
        matrix = [3 * taps2 / sets * product_cycles(n) for n in self.set_columns]
        added = [n / 2 for n in self.set_columns]
        if self.product_sets > 1:
            chain = [max(pair) for pair in zip(matrix, added, strict=True)]
            alone = t.blocks * sets * sum(chain) + added[-1] + _SET_LATENCY
        else:
            alone = t.blocks * sets * (sum(matrix) + sum(added) + len(added) * _SET_LATENCY)
        return max(blocks * sets * sum(matrix), blocks * sets * sum(added), alone)

    @functools.cached_property
    def _taps1(self) -> float:
        """Taps of axis 1, in the mean over its phases."""
        axis1 = self.plane[0]
        return sum(axis1.phase_taps) / axis1.phases

    @functools.cached_property
    def _fill(self) -> float:
        """Cycles of a filling thread for one (chunk, tap of axis 1) of a step."""
        return self.fill_cycles / self._taps1

    @functools.cached_property
    def _store(self) -> float:
        """Cycles of storing what a step finishes."""
        finished = self.sweep.target_step * self.slots2 * self.tile.rows * self.tile.column_tile
        return finished * self.problem.element_bytes / _STORE_BYTES

    @functools.cached_property
    def _loss(self) -> float:
        g = self.problem.geometry
        if not self.problem.forward or max(g.stride) == 1:
            return 1.0
        long = all(k >= 2 * s for k, s in zip(g.kernel_size, g.stride, strict=True))
        if not long:
            loss = _INTERLEAVING_LOSS[self.parts, self.problem.element_bytes]
            return loss * _ONE_CHUNK if self.parts == 1 and self.chunks == 1 else loss
        if self.parts > 1 or self.problem.source_channels_last:
            return _LONG_INTERLEAVING_LOSS
        wide = self.tile.column_tile >= _WIDE
        return _WIDE_INTERLEAVING_LOSS if wide else _NARROW_INTERLEAVING_LOSS

    def _step(self, stage: float) -> float:
        """Cycles of a step whose (chunk, tap of axis 1) each take so many."""
        step = self.chunks * self._taps1 * stage
        # While one warpgroup stores, the others multiply; all of them wait for memory.
        return max(step, self._store) + 0.25 * min(step, self._store)

    def _steps(
        self, rows: int, source: Sequence[int], target: Sequence[int]
    ) -> tuple[float, float]:
        """Steps of a CTA that have anything to multiply, and what these take to begin."""
        sweep, t = self.sweep, self.tile
        source0, target0 = source[self.order[0]], target[self.order[0]]
        steps = sweep.steps(target0)
        columns = div_up(rows, t.rows) * self.column_tiles * self.problem.geometry.groups
        columns *= self.plane[0].phases * sweep.interleaved
        mean = columns * steps / (self.multiprocessors * t.resident)
        busy = sweep.busy_steps(source0, target0) / steps
        most = math.ceil(mean)
        return most * busy, sweep.warm_steps if most % steps else 0

    def _scaled(self, steps: float, step: float) -> float:
        strided = _STRIDED_SOURCE if self.residues > 1 else 1.0
        loss = self._loss * _LARGE_TILE ** max(0, self.tile.blocks - 2)
        if self.parts > 1 and self.tile.weight_stages == 2:
            loss *= _TWO_STAGES
        if self.tile.keep_weights:
            loss *= _KEPT_WEIGHTS[self.parts] * (1.0 if self.leaves_l1 else _LITTLE_L1)
        if self.tile.ping_pong:
            loss *= _PING_PONG if self.tile.blocks == 2 else _OTHER_PING_PONG
        if self.swapped:
            loss *= _SWAPPED
        if self.problem.forward and self.problem.target_channels <= _FEW_COLUMNS:
            loss *= _FEW_LOSS_16BIT if self.problem.element_bytes == 2 else _FEW_LOSS
        return loss * (_SCALE * self.tile.resident * steps * step * strided + 8000.0)

    def _cost(self, line: Line, source: Sequence[int], target: Sequence[int]) -> float:
        positions = self.tile.rows + line.beyond
        if positions > self.tile.positions or not self.covers(self.tile.fill_pairs, positions):
            return float("inf")
        traffic = positions * self.position_bytes / self.parts / self._taps1
        if not self.tile.keep_weights:
            traffic += self.stage_bytes
        loads = traffic / _L2_BYTES
        stage = max(self._products, loads, self._fill) + 0.1 * (self._fill + loads) + 40.0
        steps = sum(self._steps(line.rows, source, target))
        return self._scaled(steps, self._step(stage))

    def _cutting(self, units: int, target: Sequence[int]) -> float:
        """How much longer pieces of lines take than whole ones: runs begin anywhere, and are short.

        Where channels are last, nothing is lost.
        """
        whole = self.plane[1].units(target[self.order[2]])
        if units >= whole or self.problem.source_channels_last:
            return 1.0
        ends, odd = _CUT[self.problem.element_bytes]
        loss = 1.0 + ends * (0.04 + 1 / units)
        if units * self.slots2 * self.problem.element_bytes % 32:
            share = self._store / (self.chunks * self._taps1 * self._products)
            loss *= min(1.0 + _SHARED_SECTORS * share**2, _MOST_SHARED_SECTORS)
        return loss * odd if units % 2 > whole % 2 else loss

    def bound(
        self,
        lines: Sequence[Line],
        source: Sequence[int],
        target: Sequence[int],
    ) -> float:
        """Cycles that no pipeline undercuts: those of the products."""
        rows = min(line.rows for line in lines)
        ping_pong = _PING_PONG if self.parts == 1 else 1.0
        step = self._step(self._products + 40.0)
        return ping_pong * self._scaled(self._steps(rows, source, target)[0], step)

    def cost(
        self,
        lines: Sequence[Line],
        source: Sequence[int],
        target: Sequence[int],
    ) -> float:
        """Estimated cycles of one call with the best of these lines; see :meth:`_steps`."""
        # The other plans were timed and priced without.
        cut = self.parts == 1 and self.problem.forward
        return min(
            self._cost(line, source, target) * (self._cutting(line.units, target) if cut else 1.0)
            for line in lines
        )


@dataclass(frozen=True)
class Line:
    """A cut of axis 2."""

    units: int
    rows: int  # of all planes across axis 0, with what lies between lines and samples
    beyond: int  # positions of a box besides those of its rows


def product_cycles(columns: int) -> float:
    """Cycles of one m64 product of eight words, both operands in shared memory."""
    return max(columns / 2, 16 + columns / 4, 20.0) + 1.0


def _strides(extent: Sequence[int], order: Triple) -> tuple[int, int]:
    """Elements from one position to the next along the kernel's axes 0 and 1."""
    strides = (extent[1] * extent[2], extent[2], 1)
    return (strides[order[0]], strides[order[1]])


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why sweep/kernel.cu cannot take a problem, or None."""
    g = problem.geometry
    if gpu.capability[0] != 9:
        return "warpgroup products exist on compute capability 9.0 only"
    least = _MIN_GROUP_IEEE if problem.arithmetic is Arithmetic.IEEE else _MIN_GROUP
    if g.groups > 1 and min(problem.source_channels, problem.target_channels) < least:
        return f"groups of fewer than {least} channels leave warpgroup products half empty"
    if problem.forward and g.kernel_size == g.stride:
        return "kernel == stride has one tap for each output, which the patch kernels compute"
    if problem.forward and g.stride[2] > _MAX_SLOTS2:
        return f"stride {g.stride[2]} along W exceeds {_MAX_SLOTS2} slots of a unit"
    if g.kernel_size[2] > _MAX_TAPS2:
        return f"kernel {g.kernel_size[2]} along W exceeds {_MAX_TAPS2} taps"
    if not _orders(problem):
        return "neither D nor H has up to 16 taps, undilated or of stride 1"
    return None


def _orders(problem: Problem) -> list[bool]:
    """Which axis may be swept along: D (False) or H (True)."""
    g = problem.geometry
    return [
        bool(a)
        for a in (0, 1)
        if g.kernel_size[a] <= _MAX_TAPS0
        and (g.dilation[a] == 1 or g.kernel_size[a] == 1 or g.stride[a] == 1)
    ]


def _with_pipelines(plan: WgmmaSweepPlan, wanted: int, gpu: Gpu) -> Iterator[WgmmaSweepPlan]:
    """The deepest pipeline whose boxes have the wanted positions, else the largest boxes."""
    room = min(gpu.shared_per_block, gpu.shared_per_multiprocessor // plan.tile.resident - 1024)
    smallest = plan.box_positions(1)
    most = min(_MAX_POSITIONS, room // (_LEAST_BOXES * plan.position_bytes))
    items = 1
    while not plan.covers(items, wanted) and plan.positions_of(items + 1) <= most:
        items += 1
    while items and plan.covers(items, smallest):
        tile = replace(plan.tile, fill_pairs=items, positions=plan.positions_of(items))
        depths = (
            replace(plan, tile=replace(tile, source_stages=boxes, weight_stages=weights))
            for boxes, weights in (_LARGE_PIPELINES if plan.large else _PIPELINES)
        )
        if chosen := next(_fitting(depths, room), None):
            yield chosen
            return
        items -= 1


def _with_kept_weights(plan: WgmmaSweepPlan, wanted: int, gpu: Gpu) -> Iterator[WgmmaSweepPlan]:
    """The most boxes of the wanted positions that fit beside all weights of a column tile.

    Without turns and, but for split products, with them.
    """
    room = min(gpu.shared_per_block, gpu.shared_per_multiprocessor // plan.tile.resident - 1024)
    if plan.set_bytes > room:
        return
    items = 1
    while not plan.covers(items, wanted):
        items += 1
    positions = plan.positions_of(items)
    sizes = [positions]
    if plan.plane[1].unit_source == 1:
        sizes = [min(positions, n | 1) for n in (round_up(wanted, _BOX_STEP), wanted)]
    found = [p for n in sizes for p in _most_boxes(plan, items, n, room)]
    if found:
        chosen = max(found, key=lambda p: (p.leaves_l1, p.tile.source_stages))  # the first
        yield chosen
        if plan.parts == 1:
            yield replace(chosen, tile=replace(chosen.tile, ping_pong=True))


def _most_boxes(
    plan: WgmmaSweepPlan, items: int, positions: int, room: int
) -> Iterator[WgmmaSweepPlan]:
    """The most boxes of so many positions beside all weights that leave L1, else the most."""
    tile = replace(
        plan.tile, weight_stages=1, fill_pairs=items, positions=positions, keep_weights=True
    )
    depths = (
        replace(plan, tile=replace(tile, source_stages=boxes))
        for boxes in range(_MAX_BOXES, _LEAST_BOXES - 1, -1)
    )
    fitting = [*_fitting(depths, room)]
    yield from [plan for plan in fitting if plan.leaves_l1][:1] or fitting[:1]


def _fitting(depths: Iterable[WgmmaSweepPlan], room: int) -> Iterator[WgmmaSweepPlan]:
    """Those of these pipelines that shared memory holds and descriptors reach."""
    return (
        plan
        for plan in depths
        if plan.shared_bytes <= room and plan.tile.positions <= _MAX_POSITIONS
    )


def _bases(problem: Problem, gpu: Gpu) -> Iterator[WgmmaSweepPlan]:
    """Every sensible kernel but for its pipeline."""
    channels = problem.target_channels
    column_tiles = {round_up(div_up(channels, parts), 8) for parts in range(1, 33)}
    for swapped, column_tile in itertools.product(_orders(problem), sorted(column_tiles)):
        if problem.geometry.kernel_size[int(swapped)] * column_tile > _MAX_STACKED:
            continue
        for planes, blocks, fill_warps in itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 4), (3, 7)):
            tile = SweepTile(planes, blocks, column_tile, fill_warps=fill_warps)
            plan = WgmmaSweepPlan(problem, tile, swapped, gpu.multiprocessors)
            if plan.live > _MAX_ACCUMULATORS:
                continue
            if plan.registers[0] < plan.live + _SPARE_REGISTERS:
                continue
            sets = plan.slots2 * blocks * plan.sweep.source_step * plan.plane[1].kernel
            if plan.parts > 1 and sets > _MAX_SETS:
                continue
            yield plan


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, WgmmaSweepPlan]]:
    """Candidates for these input extents with their costs, cheapest first.

    ``below``: see :func:`~convt3d.cuda.plan.search.cheapest`.
    """
    if refusal(problem, gpu) is not None:
        return []
    source, target = problem.extents(input_size)
    whole = _plane(problem, False)[1].units(target[2])
    bases = [*_bases(problem, gpu)]
    # Lines depend on the axes only.
    one_of_order = {plan.swapped: plan for plan in bases}
    lines = {key: plan.lines(batch, source, target) for key, plan in one_of_order.items()}

    def price(base: WgmmaSweepPlan) -> Iterator[tuple[float, WgmmaSweepPlan]]:
        wanted = base.box_positions(whole)
        for with_buffers in (_with_pipelines, _with_kept_weights):
            for plan in with_buffers(base, wanted, gpu):
                yield plan.cost(lines[plan.swapped], source, target), plan

    bounded = ((plan.bound(lines[plan.swapped], source, target), plan) for plan in bases)
    return cheapest(bounded, price, below)
