"""Plans of ``phases/kernel.cu``: warpgroup products on Hopper, M rows in registers.

The kernel serves strided layers, and small volumes of stride 1, where ``sweep/kernel.cu`` has too
few columns of work for all CTAs. A row of M is a unit: one period of phases.

The numbers mirror ``phases/config.cuh``. The cost model adds up the cycles of a warpgroup for the
stages, loads, outputs and copies of one work tile, which mostly follow one another.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.ampere_gather import Axis, phased_axes
from convt3d.cuda.schedule import (
    WEIGHT_STRIDES,
    Gpu,
    Launch,
    Problem,
    Schedule,
    TensorMap,
    div_up,
    geometry_macros,
    macros,
    not_taken,
    round_up,
)
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic

ARITHMETICS = {
    Arithmetic.TF32: "tfloat32",
    Arithmetic.F16: "float16",
    Arithmetic.BF16: "bfloat16",
}
_SPLIT = "float32"  # elements of source maps of IEEE-grade arithmetic: registers have both parts
_BARRIER_BYTES = 128
_PRODUCER_REGISTERS = 24
_SMALL = 16  # extents of classes whose planes may be rows of boxes
_FEW_ROWS = 64  # units of a volume for each multiprocessor
_STORE_WARP_REGISTERS = {2: 80, 3: 56}  # of the producer's warpgroup where its other warps store
# Registers of a consumer beside sums, fragments and addresses of units.
_SPARE_REGISTERS = 40
# The same where operands are split, by consumers: with fewer, tiles spilled.
_SPLIT_SPARE_REGISTERS = {1: 24, 2: 24, 3: 44}
MAX_PRODUCTS = 512
_MAX_STAGE_BYTES = 48 << 10
# Weight stages, source boxes and staging buffers, deepest first.
PIPELINES = ((4, 3, 3), (4, 3, 2), (3, 3, 2), (2, 3, 2), (4, 2, 2), (3, 2, 2), (2, 2, 2))
# The same where each warp stores its own outputs: weights that stay leave room for more boxes.
_WARP_PIPELINES = {
    True: ((4, 4, 2), *PIPELINES[1:]),
    False: ((5, 3, 2), *PIPELINES[1:]),
}
# Before these, of IEEE-grade products: their weights take longer to come.
_SPLIT_PIPELINES = ((7, 3, 2), (6, 3, 2), (5, 3, 2))
# With store warps: stages of weights (none: they stay), boxes, columns that are staged at a time.
_STORE_WARP_PIPELINES = {
    True: ((0, 4, 8), (0, 3, 16), (0, 3, 8), (0, 2, 8)),
    False: ((3, 4, 8), (3, 3, 16), (2, 3, 16), (3, 3, 8), (2, 2, 8)),
}
# The same where a box has one tap of D and weights pass.
_TAP_PIPELINES = ((3, 4, 8), (3, 4, 16), (2, 4, 8), (2, 3, 8))
_DEEP_TAP_PIPELINES = ((4, 4, 16),)  # also, where nothing is filled: TF32
_SPLIT_TAP_PIPELINES = ((2, 3, 16),)  # and where weights take twice the room
_MOST_PIPELINES = 2  # of warps that send, for each arrangement of their warpgroups
_MOST_BUFFERS = 8  # of columns that are staged
MAX_BOX = 256  # extent of a box along one dimension
STORE_BYTES = 18.0  # a cycle of a multiprocessor, its share of memory
# Cycles of a warpgroup for one work tile, fitted to 97 plans timed on an H200, then to their order.
_STAGE = 63.0
_WEIGHT_WAIT = 480.0  # for the weights of a stage, all the less the more are in flight
_LOAD = {False: 11.7, True: 4.8}  # a warp's, for every cycle of shared memory; a step ahead or not
_PRODUCT = 0.58  # of what the products of all warpgroups keep the tensor cores busy
_OUTPUT = 31.5  # an output of a thread: conversion, staging
_COPY = 140.0  # a bulk copy out of the staging buffer, by each of the warps
_RUN = 270.0  # the same by stores, four runs at a time
_VECTORS = 200.0  # 512 bytes of each
_RUN_END = 17.5  # of runs that end within sectors, by all warpgroups
# An output of a thread where each warp stores its own outputs, by 16 bytes or alone.
_WARP_OUTPUT = {True: 10.0, False: 12.0}
_SENT = 1.16  # of work tiles whose outputs store warps store
_SENT_BLOCK = 1.4  # of those of 16 bits whose warpgroups have one block
_SENT_OUTPUT = 8.0  # an output of a thread that others send
_BOX_WAIT = 675.0  # for a box, all the less the more are on their way
_STAGED_ROUND = 250.0  # of a warpgroup, beside its outputs
_SENT_TAP = 1.04  # of work tiles of 16 bits whose boxes have one tap of D
# Cycles of one of the warps that send: a round, each run of it, its bytes; a run without taps,
# its bytes.
_ROUND, _SENT_RUN, _SENT_BYTE, _FILLED_RUN, _FILLED_BYTE = 600.0, 95.0, 0.05, 80.0, 0.055
# Cycles of a multiprocessor for 32 outputs of a line that leave alone, by element size.
_LONE_STORE = {4: 10.0, 2: 10.0}
_PLANE_LOAD = 13.0  # more for a load whose lanes may be outside
_PLANES = 0.76  # of such a plan, as timed beside transposed boxes
_HALF_LOAD = 3.0  # more for a load of 16 bits
_PIECE = 6.0  # a row of a tile, slot and column that ends within sectors, by all warpgroups
_CONSTANT_OUTPUT = {True: 2.5, False: 6.0}  # the same without taps
_WORK_TILE = 480.0
_KEPT_PHASE = 1.3  # of work tiles whose CTA keeps weights and phase
_KEPT_WORDS = 1.45  # of those whose CTA keeps weights of float32 and whose warps store
_WEIGHT_BYTE = 0.02
_FEW_COLUMNS = {4: 1.1, 2: 1.4}  # of products of fewer than 32, by element size: one layer
_SHORT_STAGES = 1.07  # stages of float32 with taps of W alone, where warps store
# The same of one round or two, fitted to 55 plans of few units (within 8%): nothing of another work
# tile hides what one waits for, warpgroups load fragments in turn, and wide products hide weights.
_FEW_ROUNDS = 2
_FEW_FRAGMENT, _FEW_PLANE = 22.0, 14.5  # words of a fragment, of all warpgroups; from planes, more
_FEW_ALONE = 2.85  # more where no other warpgroup multiplies meanwhile
_FEW_PAIRS = 0.97  # of loads of lanes that have pairs: one layer
_FEW_STAGE, _FEW_WEIGHT_WAIT, _FEW_WEIGHT_BYTE = 110.0, 306.0, 0.0045
_FEW_LEAVING, _FEW_PRODUCT, _FEW_BOX_ROW = 0.5, 0.9, 4.1
_FEW_WORK_TILE, _FEW_PACKED_BYTE = 880.0, 0.0021
ON_TRIAL = 4.0  # not chosen before they are timed
_PING_PONG_CHUNKS = 6  # of work tiles whose phases are apart
_PING_PONG_WEIGHTS = {False: (14, 12, 10, 8, 6, 5), True: (14, 12, 10, 8, 6, 5, 4)}  # stages
# IEEE-grade products, cycles of a warpgroup: of a stage, of rows of shifts that are loaded at once,
# a load, a set of products (and where it is added at once), a product's own time, a work tile, what
# leaves, waits for weights and boxes. Fitted to 300 plans of four layers timed on an H200, then to
# their order.
_SPLIT_STAGE, _SPLIT_ROW, _SPLIT_LOAD, _SPLIT_SET, _SPLIT_DRAIN = 307.0, 17.0, 8.2, 65.0, 18.0
_SPLIT_PRODUCT, _SPLIT_WORK_TILE, _SPLIT_WEIGHT_WAIT, _SPLIT_BOX_WAIT = 0.91, 1030.0, 125.0, 270.0
_SPLIT_LEAVING = {"warps": 2.05, "staged": 0.89, "bulk": 0.83}
_SPLIT_THREE = {False: 1.2, True: 1.55}  # warpgroups share four schedulers
_SPLIT_PACKED_BYTE = 0.0007
_SPLIT_PLANE_LOAD, _SPLIT_BOX_ROW, _SPLIT_SHORT_STAGES = 19.0, 8.1, 1.3
_MOST_ADDITIONS = 256  # of an output: longer sums would have to be made of parts
_MOST_CHAIN = 4  # taps of W whose products the tensor core adds up
_FEWEST_SPLIT_COLUMNS = 24
_EMPTY = (
    0.6  # more for outputs without taps: ampere/strided/forward.cu was faster where they are most
)
_BOX_ROW = 5.5  # of TMA, whatever the row's length
_PACKED_BYTE = 0.0015
# Of a call. Few rounds took 15400 more: so do other families', which do not count it either.
_CALL = 5000.0
_PACKED_TAPS = 64  # at a time, of eight columns and words
_FEW_PACKED = 512  # tasks, below which each is two
MAX_PLANS = 24
_FAR = 1.4  # times the least cost: plans that are not looked at closely
_MANY_TILES = 2.0  # of the fewest: more are not looked at
_IN_STEP = 4  # plans that are tried out of step too


def product_cycles(columns: int) -> float:
    """Cycles of the tensor cores for one m64 product of eight words, units in registers."""
    return max(columns / 2 + 1.5, 20.0)


def consumer_registers(
    threads: int, consumers: int, producer_registers: int = _PRODUCER_REGISTERS
) -> int:
    """Registers of a consumer's thread once the producer has given its own away."""
    total = min(248, 65536 // threads // 8 * 8) * threads
    spare = (total - 128 * producer_registers) // (128 * consumers) // 8 * 8
    return min(240, spare)


@dataclass(frozen=True)
class PhasesTile:
    """The compile-time choices of a kernel."""

    phased: int  # axes whose phases are work tiles of their own: none, D, or D and H
    blocks: int  # of 64 units to a consumer warpgroup
    column_tile: int
    consumers: int
    fragments: int  # of units in flight
    source_stages: int
    weight_stages: int
    resident_weights: bool
    staging_buffers: int = 2
    bulk_copies: bool = False  # out of shared memory, or stores of 16 bytes
    stores_per_warp: bool = False  # every warp stages and stores its own outputs
    store_warps: int = 0  # warps of their own that send what others stage, buffers in turn
    round_columns: int = 0  # columns that are staged at a time, with store warps
    planes: bool = False  # rows of a box are of planes of the source, not of lines
    plane_parts: bool = False  # then: of the lines that a tile reaches, not all of them
    lane_pairs: bool = False  # a lane's two rows of a block are neighbours along W
    ping_pong: int = 0  # chunks that the first warpgroup is ahead of the others
    tap_boxes: bool = False  # a box has the slices of one walked tap of D

    @property
    def rows(self) -> int:
        return 64 * self.blocks * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)


@dataclass(frozen=True)
class PhasesShape:
    """A tile's units (samples, D, H, W), its box and how the box lies in shared memory."""

    units: tuple[int, int, int, int]
    tiles: tuple[int, int, int, int]
    box: tuple[int, int, int, int]  # samples, slices, lines, positions
    channel_dimension: int
    conflicts: float  # cycles of shared memory for a load of a warp
    line: int = 0  # positions from a line to the next where boxes have planes
    segment: int = 0  # units along D of a work tile, if it is a sweep

    @property
    def count(self) -> int:
        return math.prod(self.tiles)


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


@dataclass(frozen=True)
class WgmmaPhasesPlan:
    """A kernel for one problem; the shape of its tile follows the extents of each call.

    TMA cannot bring rows of W that are no multiple of 16 bytes.
    """

    problem: Problem
    tile: PhasesTile
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)

    # ------------------------------------------------------------ derived sizes

    @functools.cached_property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        return phased_axes(self.problem, self.tile.phased)

    @functools.cached_property
    def phase_spans(self) -> Triple:
        """Positions of the box beside the first that the taps of a work tile reach."""
        first, second, third = (axis.span for axis in self.axes)
        return (0 if self.tile.tap_boxes else first, second, third)

    @functools.cached_property
    def phases(self) -> int:
        return self.axes[0].phases * self.axes[1].phases

    @functools.cached_property
    def column_tiles(self) -> int:
        return div_up(self.problem.target_channels, self.tile.column_tile)

    @functools.cached_property
    def n_tile_phases(self) -> int:
        """Work tiles of a tile."""
        return self.problem.geometry.groups * self.column_tiles * self.phases

    @functools.cached_property
    def chunk_channels(self) -> int:
        return 32 // self.problem.element_bytes

    @functools.cached_property
    def chunks(self) -> int:
        return div_up(self.problem.source_channels, self.chunk_channels)

    @functools.cached_property
    def taps(self) -> int:
        """Taps that a stage unrolls."""
        return math.prod(axis.kernel if axis.block else 1 for axis in self.axes)

    @functools.cached_property
    def walked(self) -> int:
        """Stages of a chunk over all phases: taps of the phased axes."""
        return math.prod(1 if axis.block else axis.kernel for axis in self.axes)

    @functools.cached_property
    def most_walked(self) -> int:
        """Stages of a chunk in the phase with most taps."""
        return math.prod(1 if axis.block else axis.max_taps for axis in self.axes)

    @functools.cached_property
    def steps(self) -> int:
        """Fragments of units that a stage loads: shifts with any tap."""
        return math.prod(len(axis.live_shifts) for axis in self.axes if axis.block)

    @functools.cached_property
    def live_slots(self) -> int:
        """Slots of a unit that have taps and so need sums."""
        return math.prod(axis.live_slots for axis in self.axes)

    @functools.cached_property
    def split(self) -> bool:
        """Whether operands are split in two parts and chains of products added up outside."""
        return self.problem.words_per_value > 1

    @functools.cached_property
    def split_rows(self) -> int:
        """Rows of shifts of W that a block's fragments are loaded of at once."""
        return self._split_way[0]

    @functools.cached_property
    def split_chains(self) -> int:
        """Chains with accumulators: two, one of which is added up under the other, or one."""
        return self._split_way[1]

    @functools.cached_property
    def _split_way(self) -> tuple[int, int]:
        """As many rows, then chains, as registers have room for: long chains are few.

        But not so long that they err more than the sum of all of them, whose error grows with the
        root of their number.
        """
        if not self.split:
            return (1, 1)
        inner = math.prod(max(axis.phase_taps) for axis in self.axes[:2] if axis.block)
        most = max(self.axes[2].phase_taps)
        longest = max(_MOST_CHAIN, int((8 * self.chunks * self._products) ** (1 / 3)))
        ways = itertools.product(range(self._shift_rows, 0, -1), (2, 1))
        fitting = (
            (count, chains)
            for count, chains in ways
            if (count == 1 or most * min(count, inner) <= longest)
            and self._registers(count, chains) <= self.consumer_registers
        )
        return next(fitting, (1, 1))

    @functools.cached_property
    def _products(self) -> int:
        """Taps of the slot that has most."""
        return math.prod(max(axis.phase_taps) for axis in self.axes)

    @functools.cached_property
    def split_sets(self) -> int:
        """Chains of a stage and block: of each slot with a tap in rows that are loaded together."""
        inner = [axis for axis in self.axes[:2] if axis.block]
        if self.split_rows == 1:
            return math.prod(axis.kernel for axis in inner) * self.axes[2].live_slots
        return self._row_groups * math.prod(axis.live_slots for axis in (*inner, self.axes[2]))

    @property
    def additions(self) -> int:
        """Chains that an output is the sum of."""
        return self.chunks * self.most_walked * self._row_groups

    @property
    def _shift_rows(self) -> int:
        """Rows of shifts of W of a stage."""
        return self.steps // len(self.axes[2].live_shifts)

    @property
    def _row_groups(self) -> int:
        """Of them, those that are loaded together."""
        return div_up(self._shift_rows, self.split_rows)

    def _split_registers(self, rows: int, chains: int) -> int:
        """Of both parts of a block's units, and chains."""
        chains = min(chains, math.prod(axis.live_slots for axis in self.axes if axis.block))
        units = 8 * rows * len(self.axes[2].live_shifts)
        return units + chains * self.tile.column_tile // 2

    @property
    def accumulators(self) -> int:
        return self.live_slots * self.tile.blocks * self.tile.column_tile // 2

    @functools.cached_property
    def stage_bytes(self) -> int:
        return self.taps * self.tile.column_tile * 32 * (2 if self.split else 1)

    @functools.cached_property
    def packed_bytes(self) -> int:
        n_tiles = self.problem.geometry.groups * self.column_tiles
        return n_tiles * self.chunks * self.walked * self.stage_bytes

    @property
    def producer_registers(self) -> int:
        return (
            _STORE_WARP_REGISTERS[self.tile.consumers]
            if self.tile.store_warps
            else _PRODUCER_REGISTERS
        )

    @property
    def consumer_registers(self) -> int:
        t = self.tile
        return consumer_registers(t.threads, t.consumers, self.producer_registers)

    @property
    def fits_registers(self) -> bool:
        return self._registers(1, 1) <= self.consumer_registers

    def _registers(self, rows: int, chains: int) -> int:
        """Of a consumer's thread; see :attr:`split_rows` and :attr:`split_chains`."""
        t = self.tile
        if self.split:
            spare = _SPLIT_SPARE_REGISTERS[t.consumers]
            return self.accumulators + 4 * t.blocks + spare + self._split_registers(rows, chains)
        needed = self.accumulators + 4 * t.blocks * (t.fragments + 1) + _SPARE_REGISTERS
        if self.lane_pairs:
            needed += t.blocks * (4 * self._pair_words - 2)
        return needed

    @functools.cached_property
    def barrier_bytes(self) -> int:
        t = self.tile
        pairs = t.source_stages + (1 if t.resident_weights else t.weight_stages)
        pairs += _MOST_BUFFERS if t.store_warps else 0
        return round_up(16 * pairs + (8 if t.ping_pong else 0), _BARRIER_BYTES)

    @functools.cached_property
    def box_offset(self) -> int:
        zeros = 0 if self.by_map and not self.tile.planes else 128
        return round_up(self.barrier_bytes + zeros + self.tile.weight_stages * self.slot_bytes, 128)

    @property
    def slot_bytes(self) -> int:
        """Shared memory of a stage of weights."""
        return self.stage_bytes

    @property
    def staged_columns(self) -> int:
        """Columns that the epilogue stages at a time."""
        if self.tile.store_warps:
            return self.tile.round_columns
        return 16 if self.tile.column_tile % 16 == 0 else 8

    def staging_offset(self, shape: PhasesShape) -> int:
        return self.box_offset + self.tile.source_stages * self.box_bytes(shape)

    def shared_bytes(self, shape: PhasesShape, target: Sequence[int]) -> int:
        bytes_ = self.staging_offset(shape)
        if self.tile.stores_per_warp:
            pitch = 16 * self._slots2 + 4
            bytes_ += 4 * self.tile.consumers * self.staged_columns * pitch * 4
        elif self.tile.store_warps:
            bytes_ += self.buffers(shape, target) * self._buffer_bytes(shape, target)
        elif not self.problem.target_channels_last:
            staging = self.staging(shape, target)
            columns = self.tile.staging_buffers * self.staged_columns
            buffers = columns * staging.column * self.problem.element_bytes
            bytes_ += self.tile.consumers * (buffers + 32 * staging.runs)
        return bytes_

    def _buffer_bytes(self, shape: PhasesShape, target: Sequence[int]) -> int:
        """Shared memory of the columns of a tile that are staged at a time, with store warps."""
        column = self.staging(shape, target).column * self.problem.element_bytes
        return self.staged_columns * column

    def buffers(self, shape: PhasesShape, target: Sequence[int]) -> int:
        """How many of them there are: as many as a work tile has and as fit, two at least."""
        if not self.tile.store_warps:
            return 0
        room = self.gpu.shared_per_block - self.staging_offset(shape)
        fit = room // self._buffer_bytes(shape, target)
        return max(2, min(fit, max(3, self._rounds), _MOST_BUFFERS))

    @functools.cached_property
    def filler(self) -> bool:
        """Whether phases or slots of D have no taps, which one more warp stores."""
        axes = self.axes[: max(1, self.tile.phased)]
        return any(n == 0 for axis in axes for n in axis.phase_taps)

    @functools.cached_property
    def _rounds(self) -> int:
        """How often a work tile with taps stages columns for the store warps."""
        slots = self.axes[0].live_slots if self.axes[0].block else 1
        return slots * self.tile.column_tile // self.staged_columns

    @functools.cached_property
    def _slots2(self) -> int:
        axis = self.axes[2]
        return axis.unit_target if axis.block else 1

    @property
    def wide_outputs(self) -> int:
        """Outputs that a lane stores at a time, where rows and tiles are multiples of them."""
        return math.gcd(4 * self._slots2, 16 // self.problem.element_bytes)

    def wide(self, shape: PhasesShape, target: Sequence[int]) -> bool:
        """Whether lanes store several outputs at a time, each with all others of its own."""
        own = (shape.units[3] * self._slots2, self.warpgroup_units(shape) * self._slots2)
        return all(n % self.wide_outputs == 0 for n in (target[2], *own))

    def box_bytes(self, shape: PhasesShape) -> int:
        return math.prod(shape.box) * 32

    # ------------------------------------------------------------ tile shape

    @functools.cached_property
    def unit_target(self) -> Triple:
        """Target positions of a unit along each axis, over all phases."""
        return self.problem.geometry.stride if self.problem.forward else (1, 1, 1)

    def units(self, target: Sequence[int]) -> Triple:
        """Units along each axis."""
        a, b, c = (div_up(n, s) for n, s in zip(target, self.unit_target, strict=True))
        return (a, b, c)

    def shape(self, batch: int, target: Sequence[int]) -> PhasesShape:
        """The cheapest tile for these extents."""
        return _best(self, batch, tuple(target))[1]

    def shapes(self, batch: int, target: Sequence[int]) -> Iterator[PhasesShape]:
        """Tiles that fit the kernel's rows and shared memory."""
        for _, layouts in self.tilings(batch, target):
            yield from layouts

    def tilings(self, batch: int, target: Sequence[int]) -> Iterator[Tiling]:
        """Tiles that fit the kernel's rows."""
        units = self.units(target)
        if self.tile.planes:
            yield from self._planes(batch, units, target)
            return
        line = 16 // self.problem.element_bytes
        widest = min(self.tile.rows, 192 // self.axes[2].unit_source)
        for tile, tiles in _lined(self.tile.rows, widest, batch, units, 4 * line, self.lane_pairs):
            box = self._box(tile, tiles)
            yield PhasesShape(tile, tiles, box, 1, 1.0), self._laid(tile, tiles, box, target)

    def _box(self, units: Four, tiles: Four) -> Four:
        """The smallest box of a tile: samples, slices, lines, positions."""
        samples, t0, t1, t2 = units
        span0, span1, span2 = self.phase_spans
        line = 16 // self.problem.element_bytes
        lead = box_lead(t2, tiles[3], self.axes[2].reach[0], line)
        # A pair's last word may go on beyond its last position.
        width = round_up(lead + t2 + span2 + self.lane_pairs, line)
        return (samples, t0 + span0, t1 + span1, width)

    def _planes(self, batch: int, units: Triple, target: Sequence[int]) -> Iterator[Tiling]:
        """Tiles of whole planes: slices of a sample, or samples."""
        source = self.source(target)
        volume, plane = math.prod(units), units[1] * units[2]
        if self.tile.plane_parts:
            yield from self._plane_parts(batch, units, target)
            return
        if self.tile.rows < plane:
            return
        samples = min(batch, max(1, self.tile.rows // volume))
        most = _parts(units[0], self.tile.rows // plane)[-1]
        found = {(samples if most == units[0] else 1, most), (1, 1)}
        if self.tile.stores_per_warp:
            # One slice of many samples: at the ends of D taps of all its units are padding.
            found.add((min(batch, self.tile.rows // plane), 1))
        for n, t0 in sorted(found):
            tile = (n, t0, *units[1:])
            tiles = (div_up(batch, n), div_up(units[0], t0), 1, 1)
            box = (n, t0 + self.phase_spans[0], 1, source[1] * source[2])
            layouts = self._laid(tile, tiles, box, target, source[2])
            yield PhasesShape(tile, tiles, box, 1, 1.0, source[2]), layouts

    def _plane_parts(self, batch: int, units: Triple, target: Sequence[int]) -> Iterator[Tiling]:
        """Tiles of whole lines, whose boxes have parts of planes."""
        line, vector = self.source(target)[2], 16 // self.problem.element_bytes
        lead = vector - math.gcd(line, vector)  # of the first position, at most
        span0, span1, _ = self.phase_spans
        if self.tile.rows < units[2]:
            return
        found = _lined(self.tile.rows, units[2], batch, units, units[2], False)
        for tile, tiles in found:
            if tile[3] < units[2]:
                continue
            width = round_up(lead + (tile[2] + span1) * line, vector)
            box = (tile[0], tile[1] + span0, 1, width)
            layouts = self._laid(tile, tiles, box, target, line)
            yield PhasesShape(tile, tiles, box, 1, 1.0, line), layouts

    def source(self, target: Sequence[int]) -> Triple:
        """Input extents (forward) that give these output extents."""
        g = self.problem.geometry
        d, h, w = (
            (
                n
                - g.output_padding[a]
                + 2 * g.padding[a]
                - g.dilation[a] * (g.kernel_size[a] - 1)
                - 1
            )
            // g.stride[a]
            + 1
            for a, n in enumerate(target)
        )
        return (d, h, w)

    def _laid(
        self,
        units: tuple[int, int, int, int],
        tiles: tuple[int, int, int, int],
        box: tuple[int, int, int, int],
        target: Sequence[int],
        plane_line: int = 0,
    ) -> Iterator[PhasesShape]:
        """The layouts of a box with the fewest bank conflicts, the smallest first."""
        line = 16 // self.problem.element_bytes
        best = float("inf")
        steps = (1, *self.box_steps)
        if any((n - 1) * step >= MAX_BOX for n, step in zip(box[:3], steps, strict=True)):
            return
        for extra in range(0, min(32, MAX_BOX + 1 - box[3]), line):
            wider = (*box[:3], box[3] + extra)
            for dimension in (1,) if plane_line else (1, 2):
                shape = PhasesShape(units, tiles, wider, dimension, 1.0, plane_line)
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
        return _conflicts(
            64 * self.tile.blocks,
            self.warpgroup_units(shape),
            shape.units,
            self.pitches(shape),
            self.chunk_channels,
            self.lane_pairs,
        )

    def pitches(self, shape: PhasesShape) -> tuple[int, int, int, int]:
        """Elements from a sample, slice, line and channel of a box to the next."""
        _, slices, lines, width = shape.box
        line, channel = self.chunk_channels * width, width
        if shape.channel_dimension == 2:
            line, channel = width, lines * width
        slice_ = self.chunk_channels * lines * width
        return (slices * slice_, slice_, shape.line or line, channel)

    def warpgroup_units(self, shape: PhasesShape) -> int:
        """Units of a tile that a warpgroup has: whole lines, if that leaves none over."""
        rows, line = 64 * self.tile.blocks, shape.units[3]
        lines = math.prod(shape.units[:3])
        whole = min(rows // line, div_up(lines, self.tile.consumers)) * line
        return whole if whole * self.tile.consumers >= line * lines else rows

    def staging(self, shape: PhasesShape, target: Sequence[int]) -> Staging:
        """How outputs lie in shared memory before they are stored."""
        parts, slots, strides, whole, channels, vector = self._staged
        own = math.prod(shape.units) if self.tile.store_warps else self.warpgroup_units(shape)
        slices = whole and shape.tiles[3] == 1 and own % shape.units[3] == 0
        size = (target[0], target[1], target[2])
        return _staging(shape.units, slices, own, parts, slots, strides, size, channels, vector)

    @functools.cached_property
    def _staged(self) -> tuple[int, tuple[int, int], tuple[int, int], bool, int, int]:
        """What all tiles have in common: see _staging, and whether units have whole slices."""
        slots1, slots2 = (axis.unit_target if axis.block else 1 for axis in self.axes[1:])
        stride0, stride1, _ = self.unit_target
        return (
            1 if self.tile.store_warps else self.tile.consumers,
            (slots1, slots2),
            (stride0, 1 if self.axes[1].block else stride1),
            slots1 == stride1,
            self.problem.geometry.out_channels,
            16 // self.problem.element_bytes,
        )

    # ------------------------------------------------------------ launches

    @functools.cached_property
    def macros(self) -> tuple[tuple[str, str], ...]:
        p, t = self.problem, self.tile
        values: dict[str, object] = {
            "forward": p.forward,
            "runs": self.runs,
            "sweep": self.sweep,
            "by_map": self.by_map,
            "bias": p.bias,
            "target_channels_last": p.target_channels_last,
            "groups": p.geometry.groups,
            "source_channels": p.source_channels,
            "target_channels": p.target_channels,
            "phased": t.phased,
            "consumers": t.consumers,
            "blocks": t.blocks,
            "fragments": t.fragments,
            "column_tile": t.column_tile,
            "source_stages": t.source_stages,
            "weight_stages": t.weight_stages,
            "resident_weights": t.resident_weights,
            "staging_buffers": _MOST_BUFFERS if t.store_warps else t.staging_buffers,
            "bulk_copies": t.bulk_copies,
            "stores_per_warp": t.stores_per_warp,
            "store_warps": t.store_warps,
            "producer_registers": self.producer_registers,
            "planes": t.planes,
            "plane_parts": t.plane_parts,
            "tap_boxes": t.tap_boxes,
            "lane_pairs": self.lane_pairs,
            "transposed": self.transposed,
            "producers": self.producers,
            "transposed_vector": self.transposed_vector,
            "wide_outputs": self.wide_outputs,
            "both_shared": self.both_shared,
            "ping_pong": t.ping_pong,
            "staged_columns": self.staged_columns,
            "consumer_registers": self.consumer_registers,
            "split_rows": self.split_rows,
            "split_chains": self.split_chains,
        }
        return p.type_macros + geometry_macros(p.geometry) + macros("CONVT3D_", **values)

    @property
    def runs(self) -> bool:
        """Whether bulk copies of lines bring the source, not TMA."""
        return False

    @property
    def by_map(self) -> bool:
        """Whether TMA brings the source."""
        return not self.runs

    @property
    def transposed(self) -> bool:
        """Whether boxes are transposed on their way to shared memory."""
        return False

    @property
    def producers(self) -> int:
        """Warpgroups beside those that multiply."""
        return 1

    @property
    def transposed_vector(self) -> int:
        """Neighbouring positions that are transposed at once."""
        return 4

    @property
    def both_shared(self) -> bool:
        """Whether products read units in shared memory."""
        return False

    @property
    def sweep(self) -> bool:
        """Whether a work tile is a segment of D whose slices come one by one."""
        return False

    @property
    def lane_pairs(self) -> bool:
        """Whether a lane's two rows of a block are neighbours along W."""
        return self.tile.lane_pairs

    @functools.cached_property
    def _pair_words(self) -> int:
        """Words of two positions that a lane's pair reads, for all shifts of W."""
        shifts = self.axes[2].live_shifts
        return (max(shifts) + 1) // 2 - min(shifts) // 2 + 1

    def segment(self, shape: PhasesShape, target: Sequence[int]) -> int:
        """Units along D of a work tile."""
        return shape.units[1]

    def fits(self, batch: int, source: Sequence[int], target: Sequence[int]) -> bool:
        """Whether the kernel can take these extents."""
        row = source[1] * source[2] if self.tile.planes else source[2]
        if self.tile.planes and not self.serves(batch, target):
            return False
        return row * self.problem.element_bytes % 16 == 0

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        source, target = self.problem.extents(input_size)
        if not self.fits(batch, source, target):
            raise not_taken(self, input_size)
        shape = self.shape(batch, target)
        staging = self.staging(shape, target)
        numbers = (
            *target,
            target[1] * target[2],
            target[2],
            batch,
            *shape.units,
            *shape.tiles,
            *self.pitches(shape),
            shape.channel_dimension,
            self.box_bytes(shape),
            self.warpgroup_units(shape),
            staging.row,
            staging.slice,
            staging.sample,
            staging.column,
            int(staging.whole_slices),
            staging.runs,
            self.staging_offset(shape),
            self._rotation(shape),
            int(self.wide(shape, target)),
            *source[:2],
            self.segment(shape, target),
            self.buffers(shape, target),
        )
        brought: tuple[Any, ...] = ("source", *map(np.int32, source))
        if self.by_map:
            brought = (self._source_map(batch, source, shape),)
        product = Launch(
            KernelSpec("phases/kernel.cu", "convt3d_phases", self.macros),
            self.grid(shape),
            self.tile.threads,
            self.shared_bytes(shape, target),
            ("packed", "bias", "target", *brought, *map(np.int32, numbers)),
            dependent=True,
        )
        n_tiles = self.problem.geometry.groups * self.column_tiles
        together = min(math.prod(self.problem.geometry.kernel_size), _PACKED_TAPS)
        tasks = n_tiles * self.chunks * self.tile.column_tile // 8
        pack = Launch(
            KernelSpec("phases/pack.cu", "convt3d_phases_pack", self.macros),
            min(tasks * (2 if tasks < _FEW_PACKED else 1), 65535),
            256,
            4 * 64 * (together | 1),
            ("weight", "packed", *WEIGHT_STRIDES),
        )
        aligned = () if self.by_map else ("source",)
        return Schedule((pack, product), {"packed": self.packed_bytes}, aligned)

    @functools.cached_property
    def product_work_tiles(self) -> int:
        """Work tiles of a tile that CTAs multiply: a store warp stores what has no taps."""
        if not self.tile.store_warps:
            return self.n_tile_phases
        live = math.prod(sum(n > 0 for n in a.phase_taps) for a in self.axes if not a.block)
        return self.n_tile_phases // self.phases * live

    def grid(self, shape: PhasesShape) -> int:
        items = shape.count * self.product_work_tiles
        if not self.tile.resident_weights:
            return min(self.gpu.multiprocessors, items)
        # Every variant has the same number of CTAs, each with weights of its own.
        return min(
            max(1, self.gpu.multiprocessors // self.product_work_tiles) * self.product_work_tiles,
            items,
        )

    @property
    def box_steps(self) -> tuple[int, int]:
        """Source slices and lines from one of a box to the next."""
        return (1, 1)

    def _rotation(self, shape: PhasesShape) -> int:
        """Pairs of N tile and phase by which a CTA moves on between rounds, to get all of them."""
        if self.tile.resident_weights:
            return 0
        step = self.grid(shape) % self.product_work_tiles
        return next(
            n
            for n in range(self.product_work_tiles)
            if math.gcd(step + n, self.product_work_tiles) == 1
        )

    def _source_map(self, batch: int, size: Sequence[int], shape: PhasesShape) -> TensorMap:
        bytes_ = self.problem.element_bytes
        channels = self.problem.source_channels * self.problem.geometry.groups
        volume = math.prod(size)
        if self.tile.planes:
            size = (size[0], 1, size[1] * size[2])
        samples, slices, lines, width = shape.box
        extents = [size[2], size[1], size[0], batch]
        strides = [size[2], size[1] * size[2], channels * volume]
        steps = [1, *self.box_steps[::-1], 1]
        box = [width, lines, slices, samples]
        at = shape.channel_dimension
        extents.insert(at, channels)
        strides.insert(at - 1, volume)
        box.insert(at, self.chunk_channels)
        steps.insert(at, 1)
        # A step beside a single element moves nothing more.
        steps = [step if n > 1 else 1 for n, step in zip(box, steps, strict=True)]
        box = [(n - 1) * step + 1 for n, step in zip(box, steps, strict=True)]
        element = ARITHMETICS.get(self.problem.arithmetic, _SPLIT)
        return TensorMap(
            "source",
            element,
            tuple(extents),
            tuple(n * bytes_ for n in strides),
            tuple(box),
            element_strides=tuple(steps),
        )

    def describe(self) -> dict[str, str]:
        t = self.tile
        axes = ("none", "D", "D and H")[t.phased]
        copies = f", {t.staging_buffers} buffers of outputs" if t.bulk_copies else ""
        copies = ", each warp stores its own" if t.stores_per_warp else copies
        copies += ", lanes have pairs" if t.lane_pairs else ""
        copies += (
            f", the first warpgroup {t.ping_pong} chunks ahead (ping-pong)" if t.ping_pong else ""
        )
        boxes = " and a tap" if t.tap_boxes else ""
        if t.store_warps:
            copies = f", {t.round_columns} columns staged at a time, {t.store_warps} store warps"
            copies += " by bulk copies" if t.bulk_copies else ""
        kept = "weights stay" if t.resident_weights else f"{t.weight_stages} weight stages"
        units = f"{t.fragments} fragments in flight"
        if self.split:
            units = f"{self.split_rows} rows of shifts split at once, {self.split_chains} chains"
        return {
            "kernel": "phases, M rows in registers, wgmma",
            "tile": f"{t.rows} M rows x {t.column_tile} columns",
            "unit": f"{self.live_slots} unrolled phases with taps; phases apart: {axes}",
            "products": f"m64 x {t.column_tile} columns, {self.accumulators} accumulators a thread",
            "warps": f"{t.consumers} warpgroups multiply, {t.blocks} blocks of 64 M rows each",
            "pipeline": f"{t.source_stages} A stages of {self.chunk_channels} channels{boxes}, "
            f"{kept}, {units}{copies}",
        }

    # ------------------------------------------------------------ cost

    def shape_cost(self, shape: PhasesShape, batch: int, target: Sequence[int]) -> float:
        """Estimated cycles of one call with a tile."""
        p, t = self.problem, self.tile
        # A CTA whose weights stay keeps its phase: those with most taps end last.
        items, grid = shape.count * self.product_work_tiles, self.grid(shape)
        rounds = div_up(items, grid)
        walked = float(self.most_walked)
        if not t.resident_weights:
            walked = self._stages_of_chunk(shape, target)
        few = rounds <= _FEW_ROUNDS and not t.store_warps and not self.split
        one = (
            self._split_work_tile if self.split else self._few_work_tile if few else self._work_tile
        )
        item = one(shape, target, walked)
        moved = batch * math.prod(target) * p.geometry.out_channels * p.element_bytes
        floor = moved / STORE_BYTES / self.gpu.multiprocessors
        whole = rounds * item
        # Loads and stores of one round follow each other, those of many do not.
        whole = (whole**3 + floor**3) ** (1 / 3) if few else max(whole, floor)
        if t.stores_per_warp and not self.wide(shape, target):
            # Pieces of 16 units, and what lies in another line, share sectors of L2.
            pieces = moved / p.element_bytes / 32 * (1 + 16 / shape.units[3])
            alone = pieces * _LONE_STORE[p.element_bytes] / self.gpu.multiprocessors
            # Slices of other phases share sectors too, and leave at another time.
            alone *= 1.1 if t.phased else 1.0
            whole = (whole**3 + alone**3) ** (1 / 3)
        if self.split:
            whole *= _SPLIT_SHORT_STAGES if t.stores_per_warp and t.phased == 2 else 1.0
        elif (
            t.stores_per_warp
            and p.element_bytes == 4
            and t.phased == 2
            and not t.planes
            and not few
        ):
            whole *= _SHORT_STAGES
        if t.column_tile < 32:
            whole *= _FEW_COLUMNS[p.element_bytes]
        if few:
            return whole + self.packed_bytes * _FEW_PACKED_BYTE + _CALL
        packed = _SPLIT_PACKED_BYTE if self.split else _PACKED_BYTE
        whole += self.packed_bytes * packed + _CALL
        return whole * (_PLANES if t.planes and not t.plane_parts and not self.split else 1.0)

    def _work_tile(self, shape: PhasesShape, target: Sequence[int], walked: float) -> float:
        """Estimated cycles of a work tile of many, with so many stages of a chunk."""
        p, t = self.problem, self.tile
        stages = self.chunks * walked
        loads = stages * self.steps * t.blocks * 4 * (4 // p.element_bytes)
        if self.lane_pairs:
            loads *= self._pair_words / (2 * len(self.axes[2].live_shifts))
        load = shape.conflicts * _LOAD[t.fragments > 2]
        load += _HALF_LOAD * (p.element_bytes == 2 and t.stores_per_warp and not t.lane_pairs)
        products = stages * self.taps * t.blocks * t.consumers
        item = (
            stages * _STAGE
            + loads * load
            + products * max(product_cycles(t.column_tile), 26.0) * _PRODUCT
            + self._leaving(shape, target)
            + _WORK_TILE
        )
        if not t.resident_weights:
            item += stages * self.stage_bytes * _WEIGHT_BYTE
            item += stages / (t.weight_stages - 1) ** 1.5 * _WEIGHT_WAIT
        # Loads of lanes that may be outside take as long beside weights that stay.
        item = item * self._kept + loads * _PLANE_LOAD * t.planes
        # Three warpgroups share four schedulers.
        item *= 1 + 0.13 * (t.consumers - 2)
        boxes = self.chunks * (walked / self.walked * self.axes[0].kernel if t.tap_boxes else 1)
        if t.store_warps:
            item += boxes / (t.source_stages - 1) ** 1.5 * _BOX_WAIT
            item += t.column_tile / t.round_columns * _STAGED_ROUND
            item = self._with_sent(item, shape, target)
            if p.element_bytes == 2:
                item *= (_SENT_BLOCK if t.blocks == 1 else 1) * (_SENT_TAP if t.tap_boxes else 1)
        brought = boxes * math.prod(shape.box[:3]) * self.chunk_channels * _BOX_ROW
        return float((item**3 + brought**3) ** (1 / 3))

    def _few_work_tile(self, shape: PhasesShape, target: Sequence[int], walked: float) -> float:
        """The same of a work tile whose CTA has no more than one other."""
        t = self.tile
        stages = self.chunks * walked
        load = shape.conflicts * (_FEW_FRAGMENT + _FEW_ALONE * (t.consumers == 1))
        load += _FEW_PLANE * t.planes
        load *= _FEW_PAIRS if self.lane_pairs else 1.0
        words = self.steps * t.blocks * t.consumers * (4 // self.problem.element_bytes)
        item = stages * (_FEW_STAGE + words * load) + self._leaving(shape, target) * _FEW_LEAVING
        if not t.resident_weights:
            wait = _FEW_WEIGHT_WAIT / (t.weight_stages - 1) ** 1.5
            item += stages * (self.stage_bytes * _FEW_WEIGHT_BYTE + wait)
        item *= self._kept
        products = stages * self.taps * t.blocks * t.consumers * product_cycles(t.column_tile)
        brought = self.chunks * math.prod(shape.box[:3]) * self.chunk_channels * _FEW_BOX_ROW
        item = (item**3 + (products * _FEW_PRODUCT) ** 3 + brought**3) ** (1 / 3)
        return float(item + _FEW_WORK_TILE)

    def _split_work_tile(self, shape: PhasesShape, target: Sequence[int], walked: float) -> float:
        """The same of IEEE-grade products: what a warpgroup does, one thing after the other."""
        t = self.tile
        stages = self.chunks * walked
        loads = 4 * self.steps * (shape.conflicts * _SPLIT_LOAD + t.planes * _SPLIT_PLANE_LOAD)
        sets = self.split_sets * (_SPLIT_SET + (self.split_chains == 1) * _SPLIT_DRAIN)
        products = 3 * self.taps * (t.column_tile / 2 + 4) * _SPLIT_PRODUCT
        block = loads + sets + products + self._row_groups * _SPLIT_ROW
        item = stages * (_SPLIT_STAGE + t.blocks * block) + _SPLIT_WORK_TILE
        if not t.store_warps:
            kind = "warps" if t.stores_per_warp else "bulk" if t.bulk_copies else "staged"
            item += self._leaving(shape, target) * _SPLIT_LEAVING[kind]
        if not t.resident_weights:
            item += stages / (t.weight_stages - 1) ** 1.5 * _SPLIT_WEIGHT_WAIT
        boxes = self.chunks * (walked / self.walked * self.axes[0].kernel if t.tap_boxes else 1)
        item += boxes / (t.source_stages - 1) ** 1.5 * _SPLIT_BOX_WAIT
        if t.store_warps:
            item += t.column_tile / t.round_columns * _STAGED_ROUND
        if t.consumers == 3:
            item *= _SPLIT_THREE[t.store_warps > 0]
        brought = boxes * math.prod(shape.box[:3]) * self.chunk_channels * _SPLIT_BOX_ROW
        item = (item**4 + brought**4) ** 0.25
        return float(self._with_sent(item, shape, target) if t.store_warps else item)

    @property
    def _kept(self) -> float:
        """How much longer a work tile takes whose CTA keeps weights."""
        if not self.tile.resident_weights:
            return 1.0
        if self.phases > 1:
            return _KEPT_PHASE
        words = self.tile.stores_per_warp and self.problem.element_bytes == 4
        return _KEPT_WORDS if words else 1.0

    def _stages_of_chunk(self, shape: PhasesShape, target: Sequence[int]) -> float:
        """Of a work tile of the CTA that has most of them, where weights pass."""
        met, items = self._met_share(shape, target), shape.count * self.product_work_tiles
        grid = self.grid(shape)
        rounds = div_up(items, grid)
        if rounds > 2:
            return self.walked * met * self.n_tile_phases / self.phases / self.product_work_tiles
        # In few rounds a CTA has work tiles without padded taps alone, and mostly of long phases.
        walked = [range(1) if axis.block else axis.phase_taps for axis in self.axes[:2]]
        every = np.array(
            [
                math.prod(n for axis, n in zip(self.axes, taps, strict=False) if not axis.block)
                for taps in itertools.product(*walked)
            ]
        )
        if self.tile.store_warps:
            every = every[every > 0]
        number = np.arange(items)
        transposed = (
            number
            // self.product_work_tiles
            * self.product_work_tiles
            // grid
            * self._rotation(shape)
        )
        length = every[(number + transposed) % self.product_work_tiles % len(every)]
        most = np.bincount(number % grid, length).max()
        return float(most / rounds * (1 + met) / 2)

    def _met_share(self, shape: PhasesShape, target: Sequence[int]) -> float:
        """The share of walked taps, over all tiles and phases, that meet not only padding."""
        if not self.tile.phased:
            return 1.0
        source = self.source(target) if self.problem.forward else target
        share = 1.0
        for a in range(self.tile.phased):
            share *= _met(self.axes[a], shape.units[1 + a], shape.tiles[1 + a], source[a])
        return share

    @functools.cached_property
    def _staged_share(self) -> float:
        """Of work tiles: those of phases without taps store the bias, which needs no staging."""
        if self.tile.bulk_copies or self.tile.store_warps:
            return 1.0
        shares = (
            1.0 if axis.block else sum(n > 0 for n in axis.phase_taps) / axis.phases
            for axis in self.axes
        )
        return math.prod(shares)

    @functools.cached_property
    def _live_lines(self) -> float:
        """The share of a work tile's slots of D and H that have taps, of all work tiles."""
        first, second = (
            sum(n > 0 for n in axis.phase_taps) / axis.stride for axis in self.axes[:2]
        )
        return first * second

    def _leaving(self, shape: PhasesShape, target: Sequence[int]) -> float:
        """Cycles of a warp to bring its sums of a work tile to the target."""
        t = self.tile
        slots = math.prod(axis.unit_target if axis.block else 1 for axis in self.axes)
        outputs = t.blocks * t.column_tile * slots / 2  # of a thread
        if t.store_warps:
            return outputs * _SENT_OUTPUT
        if not t.stores_per_warp:
            return outputs * self._staged_share * _OUTPUT + self._sending(shape, target)
        wide = self.wide(shape, target)
        live = self._live_lines
        cycles = outputs * (live * _WARP_OUTPUT[wide] + (1 - live) * _CONSTANT_OUTPUT[wide])
        # Rows leave as pieces of 16 units, whose ends meet in L2 if they leave at the same time.
        width = shape.units[3] * self._slots2
        if any(n * self.problem.element_bytes % 32 for n in (target[2], width)):
            lines = math.prod(shape.units[:3]) * slots // self._slots2
            cycles += lines * t.column_tile * _PIECE
        return cycles

    def _with_sent(self, item: float, shape: PhasesShape, target: Sequence[int]) -> float:
        """Cycles of a work tile, on average, whose outputs leave by store warps."""
        t = self.tile
        staging = self.staging(shape, target)
        staged, slots = 1.0, self.n_tile_phases / self.product_work_tiles
        if self.axes[0].block:
            staged = float(sum(n > 0 for n in self.axes[0].phase_taps))
            slots = float(self.axes[0].unit_target)
        length = staging.column * self.problem.element_bytes / staging.runs
        runs = t.round_columns * staging.runs
        one = _ROUND + runs * (_SENT_RUN + length * _SENT_BYTE)
        buffers = self.buffers(shape, target)
        store_warps = min(t.store_warps, buffers)
        sent = staged * t.column_tile / t.round_columns * one / store_warps
        # All of a work tile is staged at once: rounds for which there is no buffer wait for others.
        item += 1.5 * sent * max(0.0, 1 - buffers / self._rounds)
        filled = t.column_tile * staging.runs * (_FILLED_RUN + length * _FILLED_BYTE)
        filled *= slots - staged
        return float((item**3 + sent**3 + filled**3) ** (1 / 3)) * _SENT

    def _sending(self, shape: PhasesShape, target: Sequence[int]) -> float:
        """Cycles of a store warp to store its outputs of a work tile: eight lanes to a run."""
        p, t = self.problem, self.tile
        slots = [axis.unit_target if axis.block else 1 for axis in self.axes]
        runs = self.staging(shape, target).runs
        copies = slots[0] * t.column_tile * runs / 4
        ends = copies * t.consumers * _RUN_END if target[2] * p.element_bytes % 32 else 0.0
        if t.bulk_copies:
            return copies * _COPY + ends
        run = self.warpgroup_units(shape) * slots[1] * slots[2] * p.element_bytes / runs
        return copies / 4 * (_RUN + math.ceil(run / 512) * _VECTORS) + ends

    def cost(self, batch: int, target: Sequence[int]) -> float:
        """Estimated cycles of one call with its best tile."""
        return _best(self, batch, tuple(target))[0]

    def serves(self, batch: int, target: Sequence[int]) -> bool:
        """Whether a tile fits."""
        return next(self.shapes(batch, target), None) is not None


@functools.lru_cache(maxsize=4096)
def _best(plan: WgmmaPhasesPlan, batch: int, target: tuple[int, ...]) -> tuple[float, PhasesShape]:
    tilings = list(plan.tilings(batch, target))
    # Work tiles take about as long in every tile: where there are many more, only if nothing else
    # fits.
    few = _MANY_TILES * min((least.count for least, _ in tilings), default=0)
    best: tuple[float, PhasesShape] | None = None
    for many in (False, True):
        priced = [
            (plan.shape_cost(least, batch, target), layouts)
            for least, layouts in tilings
            if (least.count > few) is many
        ]
        # Layouts take most of the time: only of tiles that could be the cheapest.
        for least_cost, layouts in sorted(priced, key=lambda item: item[0]):
            if best is not None and least_cost >= best[0]:
                break
            for shape in layouts:
                cost = plan.shape_cost(shape, batch, target)
                if best is None or cost < best[0]:
                    best = (cost, shape)
        if best is not None:
            return best
    raise ValueError(f"no tile of {plan.tile} fits {target}")


Four: TypeAlias = tuple[int, int, int, int]


@functools.lru_cache(maxsize=4096)
def _lined(
    rows: int, widest: int, batch: int, units: Triple, narrow: int, pairs: bool
) -> list[tuple[Four, Four]]:
    """Tiles of lines, and how many there are of each."""
    parts = div_up(units[2], widest)
    wide = {div_up(units[2], n) for n in range(parts, parts + 4)}
    found: dict[Four, Four] = {}
    # One that always fits, then whole rows or few parts of them.
    for t2 in (min(units[2], narrow), *sorted(wide)):
        t2 += t2 % 2 if pairs else 0
        lines = rows // t2
        for t1 in _parts(units[1], lines):
            for t0 in {1, _parts(units[0], lines // t1)[-1]}:
                samples = min(batch, lines // (t1 * t0)) if (t1, t0) == units[1::-1] else 1
                found[samples, t0, t1, t2] = (
                    div_up(batch, samples),
                    div_up(units[0], t0),
                    div_up(units[1], t1),
                    div_up(units[2], t2),
                )
    return list(found.items())


@functools.lru_cache(maxsize=65536)
def box_lead(units: int, tiles: int, reach: int, line: int) -> int:
    """How far before its first position a tile's box begins, at most: where 16 bytes do."""
    return max((i * units + reach) % line for i in range(min(tiles, line)))


@functools.lru_cache(maxsize=65536)
def _met(axis: Axis, units: int, tiles: int, extent: int) -> float:
    """The share of taps of a phased axis that meet not only padding, over its tiles and phases."""
    shifts = [(axis.padding - k * axis.dilation) // axis.stride for k in range(axis.kernel)]
    # Of a tap's phase: (phase + padding - k * dilation) / stride, a whole number.
    shifts = [
        s + ((axis.padding - k * axis.dilation) % axis.stride > 0) for k, s in enumerate(shifts)
    ]
    firsts = [i * units + s for i in range(tiles) for s in shifts]
    return sum(-units < first < extent for first in firsts) / len(firsts)


@functools.lru_cache(maxsize=65536)
def _staging(
    units: tuple[int, int, int, int],
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


def _parts(extent: int, most: int) -> list[int]:
    """Extents of a tile along an axis: as much as fits in equal parts, fewer, and one."""
    most = max(1, min(extent, most))
    equal = div_up(extent, div_up(extent, most))
    return sorted({1, div_up(equal, 2), equal, most})


@functools.lru_cache(maxsize=65536)
def _conflicts(
    rows: int,
    own: int,
    units: tuple[int, int, int, int],
    pitches: tuple[int, int, int, int],
    channels: int,
    pairs: bool,
) -> float:
    """Mean cycles of a load of eight units of four channels, over a warpgroup's first rows."""
    sample, slice_, line, channel = pitches
    position = unit_positions(rows, own, units, (sample, slice_, line, 1))
    if pairs:
        position = position[::2]
    # A word holds one float32 value, or two positions of 16 bits whose channels come in pairs.
    per_word = channels // 8
    word = position.reshape(-1, 8, 1) + per_word * channel * np.arange(4)
    return bank_cycles(word.reshape(len(word), 32) // per_word)


def unit_positions(
    rows: int, own: int, units: tuple[int, int, int, int], steps: tuple[int, int, int, int]
) -> npt.NDArray[np.int64]:
    """Where the units of a warpgroup's rows lie, with steps from one to the next of each axis."""
    sample, slice_, line, position = _unit_places(rows, own, units)
    return sample * steps[0] + slice_ * steps[1] + line * steps[2] + position * steps[3]


@functools.lru_cache(maxsize=4096)
def _unit_places(
    rows: int, own: int, units: tuple[int, int, int, int]
) -> tuple[npt.NDArray[np.int64], ...]:
    """Sample, slice, line and position in the tile of the units of a warpgroup's rows."""
    row = np.arange(rows)
    row[min(own, math.prod(units)) :] = 0
    lines, position = np.divmod(row, units[3])
    slices, line = np.divmod(lines, units[2])
    return (*np.divmod(slices, units[1]), line, position)


def bank_cycles(word: npt.NDArray[np.int64]) -> float:
    """Mean cycles of accesses to these words of shared memory, a row of the array each."""
    word = np.sort(word, axis=1)
    first = np.ones(word.shape, bool)
    np.not_equal(word[:, 1:], word[:, :-1], out=first[:, 1:])
    bank = word % 32 + 32 * np.arange(len(word))[:, None]
    counts = np.bincount(bank[first], minlength=32 * len(word))
    return float(counts.reshape(-1, 32).max(axis=1).mean())


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why phases/kernel.cu cannot take a problem, or None."""
    g = problem.geometry
    if gpu.capability[0] != 9:
        return "warpgroup products exist on compute capability 9.0 only"
    if not problem.forward:
        return "gradients are gathers of another kind"
    if problem.source_channels_last:
        return "its source boxes are contiguous"
    if g.kernel_size == g.stride:
        return "kernel == stride has one tap for each output, which the patch kernels compute"
    if g.groups > 1 and problem.source_channels % (32 // problem.element_bytes):
        return "chunks of channels would run into the next group"
    return _split_refusal(problem)


def _split_refusal(problem: Problem) -> str | None:
    """What IEEE-grade products ask for beside."""
    if problem.arithmetic is not Arithmetic.IEEE:
        return None
    if problem.target_channels < _FEWEST_SPLIT_COLUMNS:
        return "a product of few columns takes as long as one of 24"
    d, _, w = phased_axes(problem, 2)
    if max(w.phase_taps) > _MOST_CHAIN:
        return "longer chains of products err more"
    if div_up(problem.source_channels, 8) * d.max_taps > _MOST_ADDITIONS:
        return "sums are not made of parts"
    return None


def candidates(
    problem: Problem,
    batch: int,
    target: Sequence[int],
    gpu: Gpu,
    planes: bool = False,
    far: float = float("inf"),
    plane_parts: bool = False,
) -> Iterator[WgmmaPhasesPlan]:
    """Sensible kernels, in no order, with the deepest pipelines for these extents.

    ``far``: how many times the least cost the others may have, before pipelines are looked at.
    """
    channels = problem.target_channels
    columns = {min(256, round_up(div_up(channels, n), 8)) for n in (1, 2, 3, 4, 8)}
    columns = {n for n in columns if n >= 32} or {max(columns)}
    ways = [(False, 0, False)]
    if not problem.target_channels_last:
        ways += [(True, 0, False), (False, 2, False)]
        if problem.element_bytes == 2 and not planes:
            ways.append((True, 0, True))
    small = few_units(problem, batch, target, gpu)  # then any number of rows may fit best
    every = itertools.product((0, 1, 2), sorted(columns), (1, 2, 3) if small else (2, 3), ways)
    found: list[tuple[float, WgmmaPhasesPlan]] = []
    for phased, column_tile, consumers, (stores_per_warp, store_warps, pairs) in every:
        # As many blocks as there are registers, or two fewer.
        fitting = []
        for blocks in (1, 2, 3, 4):
            base = PhasesTile(
                *(phased, blocks, column_tile, consumers, 2, 2, 2, False),
                stores_per_warp=stores_per_warp,
                store_warps=store_warps,
                round_columns=8 if store_warps else 0,
                bulk_copies=store_warps > 0,
                planes=planes,
                plane_parts=plane_parts,
                lane_pairs=pairs,
            )
            if consumers == 1 and (store_warps or (plane_parts and problem.element_bytes == 4)):
                continue  # not timed
            plan = WgmmaPhasesPlan(problem, base, gpu)
            # Without a break in the ring of fragments from stage to stage, if possible.
            rings = [n for n in (3, 4, 2) if plan.steps % n == 0] or [3, 2]
            if consumers == 1 and plan.steps < 10:  # no other warpgroup hides what it waits for
                rings = [max(plan.steps, 2), *rings]
            if store_warps:  # a ring of four, without a break, took 2% longer
                rings = [min(n, 3) for n in rings]
            elif plan.steps == 8:  # and so did one of four where five have room
                rings = [5, *rings]
            elif plan.steps == 9 and not small:  # or of three where a stage's have
                rings = [9, *rings]
            if plan.split:  # a row of shifts at a time
                rings = [max(len(plan.axes[2].live_shifts), 2)]
            if pairs:  # a fragment for each shift of W; few of them hide no loads
                rings = [n for n in (len(plan.axes[2].live_shifts),) if n > 2]
            plans = (replace(plan, tile=replace(base, fragments=n)) for n in rings)
            fit = next((p for p in plans if p.fits_registers), None)
            products = plan.taps * blocks * (3 if plan.split else 1)
            if fit is None or products > MAX_PRODUCTS:
                continue
            if plan.split and plan.additions > _MOST_ADDITIONS:
                continue
            # Larger stages leave no room to fetch ahead, and overflow the instruction cache.
            if plan.stage_bytes <= _MAX_STAGE_BYTES:
                fitting.append(fit)
        every_one = small or problem.arithmetic is Arithmetic.IEEE
        for plan in fitting if every_one else fitting[-1:] + fitting[:-2]:
            found.append((_least_cost(plan, batch, target), plan))
    least = min((cost for cost, _ in found), default=0.0)
    for cost, plan in found:
        if cost > far * least:
            continue
        for resident in (False, True):
            if resident and plan.n_tile_phases > gpu.multiprocessors:
                continue
            yield from deepest(plan, resident, batch, target)


def _least_cost(plan: WgmmaPhasesPlan, batch: int, target: Sequence[int]) -> float:
    """Estimated cycles with a usual pipeline, without bank conflicts."""
    tile = replace(plan.tile, weight_stages=4, source_stages=3)
    plan = replace(plan, tile=tile)
    every = [least for least, _ in plan.tilings(batch, target)]
    few = _MANY_TILES * min((least.count for least in every), default=0)
    every = [least for least in every if least.count <= few]
    return min((plan.shape_cost(least, batch, target) for least in every), default=float("inf"))


def deepest(
    plan: WgmmaPhasesPlan,
    resident: bool,
    batch: int,
    target: Sequence[int],
    pipelines: Sequence[tuple[int, int, int]] | None = None,
) -> Iterator[WgmmaPhasesPlan]:
    """The deepest pipeline that leaves room for the best tile."""
    everything = plan.chunks * plan.most_walked
    if plan.tile.store_warps:
        yield from _with_store_warps(plan, resident, batch, target, everything)
        return
    if pipelines is None:
        pipelines = _WARP_PIPELINES[resident] if plan.tile.stores_per_warp else PIPELINES
        if plan.split and not resident:
            pipelines = (*_SPLIT_PIPELINES, *pipelines)

    def with_pipeline(weights: int, sources: int, buffers: int) -> WgmmaPhasesPlan:
        tile = replace(
            plan.tile,
            weight_stages=everything if resident else weights,
            source_stages=sources,
            staging_buffers=buffers,
            resident_weights=resident,
        )
        return replace(plan, tile=tile)

    shallow = with_pipeline(*pipelines[-1])
    if not shallow.serves(batch, target):
        return
    shape = shallow.shape(batch, target)
    for pipeline in pipelines:
        chosen = with_pipeline(*pipeline)
        if chosen.shared_bytes(shape, target) <= plan.gpu.shared_per_block:
            yield chosen
            return


def _with_store_warps(
    plan: WgmmaPhasesPlan, resident: bool, batch: int, target: Sequence[int], everything: int
) -> Iterator[WgmmaPhasesPlan]:
    """The deepest pipelines of warps that send, by the same rule."""

    def with_pipeline(weights: int, sources: int, columns: int, tap_boxes: bool) -> WgmmaPhasesPlan:
        tile = replace(
            plan.tile,
            tap_boxes=tap_boxes,
            weight_stages=weights or everything,
            source_stages=sources,
            round_columns=columns,
            resident_weights=resident,
        )
        return replace(plan, tile=tile)

    for tap_boxes in (False, True):
        if tap_boxes and (plan.axes[0].block or resident):
            return
        pipelines = _TAP_PIPELINES if tap_boxes else _STORE_WARP_PIPELINES[resident]
        # Where outputs without taps are filled, 16 columns leave few buffers at some extents: kb77
        # took 1.6 times as long.
        if tap_boxes and not plan.filler and plan.problem.element_bytes == 4:
            pipelines += _SPLIT_TAP_PIPELINES if plan.split else _DEEP_TAP_PIPELINES
        every = [with_pipeline(*pipeline, tap_boxes) for pipeline in pipelines]
        every = [p for p in every if plan.tile.column_tile % p.tile.round_columns == 0]
        # One tile distinguishes them: only the first few are priced with tiles of their own.
        least = next((p for p in reversed(every) if p.serves(batch, target)), None)
        if least is None:
            continue
        shape = least.shape(batch, target)
        every.sort(key=lambda p: p.shape_cost(shape, batch, target))
        yield from itertools.islice((p for p in every if p.serves(batch, target)), _MOST_PIPELINES)


def live_share(problem: Problem) -> float:
    """The share of outputs that have taps."""
    axes = WgmmaPhasesPlan(problem, PhasesTile(0, 1, 8, 2, 2, 2, 2, False)).axes
    return math.prod(sum(n > 0 for n in axis.phase_taps) / len(axis.phase_taps) for axis in axes)


def _first(
    found: Sequence[tuple[float, WgmmaPhasesPlan]],
) -> list[tuple[float, WgmmaPhasesPlan]]:
    """The cheapest plans, some of them with warps that send."""
    first = list(found[: MAX_PLANS // 2])
    rest = [item for item in found[MAX_PLANS // 2 :] if item[1].tile.store_warps]
    return first + rest[: MAX_PLANS // 4]


def _with_bulk_copies(
    found: Sequence[tuple[float, WgmmaPhasesPlan]], batch: int, target: Sequence[int]
) -> Iterator[tuple[float, WgmmaPhasesPlan]]:
    """The same, and the first ones with bulk copies."""
    yield from found
    staged = [plan for _, plan in found if not plan.tile.stores_per_warp]
    for plan in [plan for plan in staged if not plan.tile.store_warps][:6]:
        other = replace(plan, tile=replace(plan.tile, bulk_copies=True))
        yield other.cost(batch, target), other
    # Stores of 16 bytes by warps that send took 3 to 30% more than bulk copies.
    for plan in [plan for plan in staged if plan.tile.store_warps][:2]:
        other = replace(plan, tile=replace(plan.tile, bulk_copies=False))
        yield 1.15 * other.cost(batch, target), other


def with_ping_pong(
    plans: Sequence[WgmmaPhasesPlan], batch: int, target: Sequence[int]
) -> Iterator[tuple[float, WgmmaPhasesPlan]]:
    """The same plans with more boxes and weights, so that one warpgroup can be ahead."""
    for plan in plans:
        if not plan.tile.stores_per_warp or plan.tile.planes or plan.tile.consumers == 1:
            continue
        shape, cost = plan.shape(batch, target), plan.cost(batch, target)
        resident = plan.tile.resident_weights
        stages = (plan.tile.weight_stages,) if resident else _PING_PONG_WEIGHTS[plan.split]
        found = []
        for boxes, weights in itertools.product((7, 6, 5, 4, 3), stages):
            chunks = min(boxes - 2, plan.chunks // 2)  # one more box is on its way
            if not resident:
                chunks = min(chunks, (weights - 2) // plan.most_walked)
            if chunks <= 0 or (resident and boxes > chunks + 2):
                continue
            tile = replace(plan.tile, source_stages=boxes, weight_stages=weights, ping_pong=chunks)
            other = replace(plan, tile=tile)
            fits = other.shared_bytes(shape, target) <= plan.gpu.shared_per_block
            # Tiles of other lines may have smaller boxes, as many units and so the same cost.
            retiled = not (fits or plan.split) and boxes <= chunks + 3
            retiled = retiled and other.serves(batch, target)
            if fits or (retiled and other.cost(batch, target) <= 1.01 * cost):
                found.append((chunks, fits, boxes, weights, other))
        if found:
            best = max(found, key=lambda item: item[:4])[4]
            yield best.cost(batch, target), best


def trial(plan: WgmmaPhasesPlan, batch: int, target: Sequence[int]) -> float:
    """Time with warpgroups out of step by that with all in step, as it was timed."""
    p, t = plan.problem, plan.tile
    if not t.ping_pong:
        return 1.0
    if t.phased == 0 and p.element_bytes == 4:
        return 0.9
    shape = plan.shape(batch, target)
    if shape.count * plan.product_work_tiles <= _FEW_ROUNDS * plan.grid(shape):
        return ON_TRIAL  # they begin and end together
    if t.phased == 0:
        return 0.96
    if plan.split:
        return 0.97 if t.consumers == 2 else ON_TRIAL
    alone = t.phased == 1 and plan.chunks >= _PING_PONG_CHUNKS
    return 0.99 if p.element_bytes == 4 and alone else ON_TRIAL


def _plane_bits(problem: Problem) -> bool:
    """Whether a word has a bit for each shift of H and each one of W."""
    first = PhasesTile(0, 1, 8, 2, 2, 2, 2, False)
    _, h, w = WgmmaPhasesPlan(problem, first).axes
    return h.shifts * w.shifts <= 32


def few_units(problem: Problem, batch: int, target: Sequence[int], gpu: Gpu) -> bool:
    """Whether a CTA has one work tile or two."""
    strides = problem.geometry.stride
    units = math.prod(div_up(n, s) for n, s in zip(target, strides, strict=True))
    return batch * units <= _FEW_ROWS * gpu.multiprocessors


def gathered(problem: Problem, input_size: Sequence[int]) -> bool:
    """Whether a volume of stride 1 is so large that sweeps of sweep/kernel.cu fill a GPU."""
    return max(problem.geometry.stride) == 1 and max(input_size) > _SMALL


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, WgmmaPhasesPlan]]:
    """The best candidates for these input extents with their costs, cheapest first."""
    if refusal(problem, gpu) is not None or gathered(problem, input_size):
        return []
    source, target = problem.extents(input_size)
    # Rows of boxes: lines, or planes that are small.
    line, plane = (n * problem.element_bytes for n in (input_size[2], math.prod(input_size[1:])))
    ways = [(False, False), (True, False), (True, True)]
    ways = [way for way in ways if (plane if way[0] else line) % 16 == 0]
    if not _plane_bits(problem):
        ways = [way for way in ways if not way[0]]
    # Parts of planes took a tenth longer than lines, where there are these.
    if line % 16 == 0:
        ways = [way for way in ways if not way[1]]
    if max(input_size[1:]) > _SMALL:
        ways = [way for way in ways if way[0] == way[1]]
    found = [
        (plan.cost(batch, target), plan)
        for planes, parts in ways
        for plan in candidates(problem, batch, target, gpu, planes, _FAR, parts)
        if plan.fits(batch, source, target)
    ]
    found.sort(key=lambda item: item[0])
    pairs = [item for item in found if item[1].lane_pairs][: MAX_PLANS // 2]
    found = [item for item in found if not item[1].lane_pairs]
    empty = 1 + _EMPTY * (1 - live_share(problem))
    priced: list[tuple[float, WgmmaPhasesPlan]] = []
    for cost, plan in _with_bulk_copies(_first(found), batch, target):
        priced.append((cost * (1 if plan.tile.store_warps else empty), plan))
    in_step = [plan for _, plan in priced[:_IN_STEP]]
    for cost, plan in (*pairs, *with_ping_pong(in_step, batch, target)):
        priced.append((cost * trial(plan, batch, target) * empty, plan))
    return sorted(priced, key=lambda item: item[0])
