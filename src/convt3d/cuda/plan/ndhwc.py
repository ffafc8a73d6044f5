"""Plans of ``ndhwc/kernel.cu``: strided channels_last layers on Hopper's warpgroup products.

The numbers mirror ``ndhwc/config.cuh``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.axes import Axis, phased_axes
from convt3d.cuda.plan.warpgroups import (
    MAP_ELEMENTS,
    MAX_BOX,
    MAX_PRODUCTS,
    ROUNDED,
    STORE_BYTES,
    consumer_registers,
)
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
    round_up,
)

_BARRIER_BYTES = 128
_ROW_BYTES = 128  # of a box: channels of a source position
# Registers of a consumer beside sums.
_SPARE_REGISTERS = 56
_MAX_STAGE_BYTES = 48 << 10
# Weight stages and source boxes, deepest first.
_PIPELINES = ((6, 4), (4, 4), (4, 3), (3, 3), (4, 2), (3, 2), (2, 2))
# Cycles of one work tile, fitted to 40 plans timed on an H200: of a product, for all warpgroups; of
# a stage, and more where few weights are in flight; of a byte of outputs, also of units that do not
# exist; of a row of a box, and of TMA for one; of an instruction of a warp's own products.
_PRODUCT = 0.82
_STAGE = 138.0
_WEIGHT_WAIT = 219.0
_OUTPUT_BYTE = 0.034
_WEIGHT_BYTE = 0.0019
_BOX_ROW = 0.11
_TMA_ROW, _STEPPED_ROW = 3.0, 3.9  # of neighbours, of every stride-th position
_LINES_ROW = 5.5  # the same where samples are inside of lines
_COPIED_BYTE = 0.01
_ORDER = 0.02
_ISSUE = 3.5
_WORK_TILE = 1100.0
_LAUNCHES = 11200.0
_PACKING, _PACKED_BYTE = 3300.0, 0.0019
_COLUMN_BOX = 80.0  # of weights as they are, but for two of a stage, where they pass through a ring
_FEW_BOXES = 0.03  # of a work tile, for each box less than four, where weights stay
_RESIDENT_BYTE = 1 / 60
_APART = 1.3  # outputs whose neighbours along W are another work tile's; not measured
_PIECE = 16.0
_ALL_SLOTS_STREAMED = 1.7  # of 16-bit work tiles that have all slots, beside streamed weights
_FILL_BYTES = 2048  # of outputs without taps that leave in one copy
# What shallow pipelines and three consumers cost more than counted, over 81 layers and types.
_TWO_A_STAGES, _THREE_WEIGHT_STAGES, _THREE_CONSUMERS = 1.2, 1.04, 1.06
_MAX_PLANS = 24
_MOST_DIRECT = 6  # of the cheapest that are compared on weights as they are, too
# Batches and extents of units whose tiles may have few positions of many samples.
_MANY_SAMPLES = 16
_FEW_POSITIONS = 9
# Work tiles that are scheduled longest first, at most, and rounds of them.
_MOST_SORTED = 1024
_MOST_ROUNDS = 32


def _product_cycles(columns: int) -> float:
    """Of the tensor cores, or of shared memory, which both operands come from."""
    return max(columns / 2, 16 + columns / 4)


@dataclass(frozen=True)
class NdhwcTile:
    """The compile-time choices of a kernel."""

    phased: int  # leading axes whose phases are work tiles of their own
    split: int  # trailing axes whose taps have boxes of their own; 0: products by warps
    blocks: int  # of 64 units to a consumer warpgroup
    column_tile: int
    consumers: int
    source_stages: int
    weight_stages: int
    resident_weights: bool
    groups_per_tile: int = 1  # groups that one box and one product's columns stand for
    samples_inside: bool = False  # units in the order D, H, W, samples, not samples first
    direct: bool = False  # weights as they are, where they are channels_last, too
    fills: bool = False  # outputs of phases without taps leave by bulk copies, beside the products

    @property
    def rows(self) -> int:
        return 64 * self.blocks * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)


@dataclass(frozen=True)
class NdhwcShape:
    """A tile's units (samples, D, H, W) and the box that brings them."""

    units: tuple[int, int, int, int]
    tiles: tuple[int, int, int, int]
    box: tuple[int, int, int, int]  # samples, slices, lines, positions

    @property
    def count(self) -> int:
        return math.prod(self.tiles)


@dataclass(frozen=True)
class WgmmaNdhwcPlan:
    """A kernel for one problem; the shape of its tile follows the extents of each call."""

    problem: Problem
    tile: NdhwcTile
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)

    # ------------------------------------------------------------ derived sizes

    @functools.cached_property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        return phased_axes(self.problem, self.tile.phased)

    @functools.cached_property
    def spans(self) -> tuple[int, int, int]:
        """Positions of the box beside the first that the taps of a work tile reach."""
        whole = 3 - self.tile.split
        first, second, third = (axis.span if a < whole else 0 for a, axis in enumerate(self.axes))
        return (first, second, third)

    @property
    def phases(self) -> int:
        return math.prod(axis.phases for axis in self.axes)

    @property
    def column_tiles(self) -> int:
        return div_up(self.target_channels, self.tile.column_tile)

    @property
    def groups(self) -> int:
        """Teams of groups."""
        return self.problem.geometry.groups // self.tile.groups_per_tile

    @property
    def source_channels(self) -> int:
        """Of the groups of a tile."""
        return self.problem.source_channels * self.tile.groups_per_tile

    @property
    def target_channels(self) -> int:
        """Of the groups of a tile."""
        return self.problem.target_channels * self.tile.groups_per_tile

    @property
    def by_warps(self) -> bool:
        return self.tile.split == 0

    @functools.cached_property
    def empty_phases(self) -> int:
        """Phases without taps whose outputs bulk copies may write, whole lines of a tile."""
        whole = self.groups == 1 and self.column_tiles == 1 and self.problem.forward
        if not whole or not 1 <= self.tile.phased <= 2 or self.tile.samples_inside:
            return 0
        live = math.prod(sum(n > 0 for n in axis.phase_taps) for axis in self.axes[:2])
        return self.phases // math.prod(a.phases for a in self.axes[2:]) - live

    @property
    def n_tile_phases(self) -> int:
        """Work tiles of a tile."""
        return self.groups * self.column_tiles * self.phases

    @property
    def vector(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.problem.element_bytes

    @functools.cached_property
    def chunks(self) -> int:
        return div_up(self.source_channels, 8 * self.vector)

    @functools.cached_property
    def steps(self) -> int:
        """Products along the channels of a chunk."""
        return div_up(self.source_channels, self.chunks * 2 * self.vector)

    @property
    def chunk_channels(self) -> int:
        return self.steps * 2 * self.vector

    @functools.cached_property
    def taps(self) -> int:
        """Taps of D and H that a stage unrolls."""
        return math.prod(axis.kernel if axis.block else 1 for axis in self.axes[:2])

    @functools.cached_property
    def stages(self) -> int:
        """Stages of a chunk over all phases."""
        if self.by_warps:
            return 1
        walked = (1 if axis.block else axis.kernel for axis in self.axes[:2])
        return self.axes[2].kernel * math.prod(walked)

    @functools.cached_property
    def most_stages(self) -> int:
        """Stages of a chunk in the phase with most taps."""
        if self.by_warps:
            return 1
        most = (1 if axis.block else axis.max_taps for axis in self.axes[:2])
        last = self.axes[2]
        return (last.kernel if last.block else last.max_taps) * math.prod(most)

    @functools.cached_property
    def boxes(self) -> float:
        """Boxes of a chunk, of the mean work tile."""
        return math.prod(
            len(axis.live_shifts) if axis.block else axis.kernel / axis.phases
            for axis in self.axes[3 - self.tile.split :]
        )

    @functools.cached_property
    def slots(self) -> tuple[int, int, int]:
        """Slots of a unit that a work tile has along each axis."""
        first, second, third = (axis.slots if axis.block else 1 for axis in self.axes)
        return (first, second, third)

    @functools.cached_property
    def live_slots(self) -> int:
        """Slots of a unit that have taps and so need sums."""
        return math.prod(axis.live_slots for axis in self.axes)

    @property
    def accumulators(self) -> int:
        return self.live_slots * self.tile.blocks * self.tile.column_tile // 2

    @functools.cached_property
    def paired_products(self) -> int:
        """Products of a warp's 16 units and 8 columns, of two shifts of W each."""
        axis = self.axes[2]
        reads = {
            (r, (shift - axis.reach[0]) // 2)
            for r, k in itertools.product(range(axis.stride), range(axis.kernel))
            for shift, rest in [divmod(r + axis.padding - k * axis.dilation, axis.stride)]
            if not rest
        }
        return self.taps * len(reads)

    @property
    def fragments(self) -> int:
        """Blocks of 8 columns that a warp multiplies."""
        return self.target_channels // 8

    @property
    def stage_bytes(self) -> int:
        if self.by_warps:
            return div_up(self.paired_products, 2) * self.fragments * 512
        if self.tile.direct:
            boxes = div_up(self.tile.column_tile, _ROW_BYTES // self.problem.element_bytes)
            return self.taps * boxes * self.chunk_channels * _ROW_BYTES
        return self.taps * self.steps * self.tile.column_tile * 32

    @property
    def packed_bytes(self) -> int:
        n_tiles = self.groups * self.column_tiles
        return n_tiles * self.chunks * self.stages * self.stage_bytes

    @property
    def consumer_registers(self) -> int:
        producers = 40 if self.tile.fills else 24
        return consumer_registers(self.tile.threads, self.tile.consumers, producers)

    @property
    def suits(self) -> bool:
        """Whether registers and code hold all products of a chunk."""
        t = self.tile
        inner2 = self.axes[2].kernel if self.axes[2].block else 1
        operands, products = 2 * t.blocks, self.taps * inner2 * self.steps
        if self.by_warps:
            operands = 4 * t.blocks * t.groups_per_tile + 4 * self.fragments
            products = self.paired_products * self.fragments
        return (
            self.accumulators + operands + _SPARE_REGISTERS <= self.consumer_registers
            and products * t.blocks <= MAX_PRODUCTS
            and (self.by_warps or self.stage_bytes <= _MAX_STAGE_BYTES)
        )

    @property
    def staged_columns(self) -> int:
        """Columns that the epilogue stages at a time: less where boxes need the room."""
        columns = self.tile.column_tile
        if not self.tile.samples_inside:
            return columns
        fewer = 128 // self.problem.element_bytes
        return fewer if columns % fewer == 0 else columns

    @property
    def pieces(self) -> int:
        """Staged pieces of 16 bytes of a unit's outputs of one slot of D and H."""
        return self.slots[2] * self.staged_columns // self.vector

    @property
    def _weight_offset(self) -> int:
        order = 4 * _MOST_ROUNDS if self.tile.samples_inside else 0
        return round_up(_BARRIER_BYTES + order, 1024 if self.tile.direct else 128)

    def box_bytes(self, shape: NdhwcShape) -> int:
        """From a box to the next: products read whole blocks, also past its last unit."""
        if self.by_warps:
            return round_up(math.prod(shape.box) * _ROW_BYTES, 1024)
        samples, slice_, line = self.pitches(shape)
        starts = [0]
        for index in range(0, min(self.tile.rows, math.prod(shape.units)), 64):
            n, d, h, w = self._unit(shape, index)
            position = shape.units[0] if self.tile.samples_inside else 1
            starts.append(n * samples + d * slice_ + h * line + w * position)
        reach = max(starts) + 64 + self.spans[0] * slice_ + self.spans[1] * line
        return round_up(max(reach, math.prod(shape.box)) * _ROW_BYTES, 1024)

    def pitches(self, shape: NdhwcShape) -> tuple[int, int, int]:
        """Rows of a box from a sample, slice and line to the next."""
        samples, slices, lines, width = shape.box
        if self.tile.samples_inside:
            return 1, lines * samples * width, samples * width
        return slices * lines * width, lines * width, width

    def _unit(self, shape: NdhwcShape, index: int) -> tuple[int, int, int, int]:
        """A tile's unit by its row of the products: sample, slice, line, position."""
        samples, slices, lines, width = shape.units
        if self.tile.samples_inside:
            rest, n = divmod(index, samples)
            rest, w = divmod(rest, width)
            d, h = divmod(rest, lines)
        else:
            rest, w = divmod(index, width)
            rest, h = divmod(rest, lines)
            n, d = divmod(rest, slices)
        return n, d, h, w

    def shared_bytes(self, shape: NdhwcShape) -> int:
        weights = self._weight_offset + self.tile.weight_stages * self.stage_bytes
        boxes = self.tile.source_stages * self.box_bytes(shape)
        warps = 4 * self.tile.consumers
        stores = warps * (256 + 16 * (16 * self.pieces + 16))
        return 1024 + round_up(weights, 1024) + boxes + stores + self._fill_bytes

    @property
    def _fill_bytes(self) -> int:
        position = self.target_channels * self.problem.element_bytes
        return position * max(1, _FILL_BYTES // position) if self.tile.fills else 0

    # ------------------------------------------------------------ tile shape

    def units(self, target: Sequence[int]) -> tuple[int, int, int]:
        """Units along each axis."""
        a, b, c = (
            # The last unit of an axis may be slots without taps alone, which the one before stores.
            max(1, div_up(n - beyond, axis.stride if self.problem.forward else 1))
            for n, axis, beyond in zip(target, self.axes, self.beyond, strict=True)
        )
        return (a, b, c)

    @functools.cached_property
    def beyond(self) -> tuple[int, int, int]:
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

    def shape(self, batch: int, target: Sequence[int]) -> NdhwcShape:
        """The cheapest tile for these extents."""
        return _best(self, batch, tuple(target))[1]

    def shapes(self, batch: int, target: Sequence[int]) -> Iterator[NdhwcShape]:
        """Tiles whose units the kernel's products can read, and that fit shared memory."""
        units = self.units(target)
        if self.tile.samples_inside:
            yield from self._batches(batch, units)
            return
        wide = {8, 16, 32, 64, round_up(units[2], 8)} if self.tile.split == 1 else {4, 8, 16, 32}
        if self.tile.split != 1:
            wide |= {div_up(units[2], n) for n in (1, 2, 3, 4)}
        for t2 in sorted(wide):
            lines = min(self.tile.rows // t2, MAX_BOX)
            for t1, t0 in _planes(units, lines):
                whole = t0 >= units[0] and t1 >= units[1] and t2 >= units[2]
                most = lines // (t1 * t0)
                for samples in {1, min(batch, most)} if whole else {1}:
                    shape = self._shape((samples, t0, t1, t2), batch, units)
                    if shape and self.shared_bytes(shape) <= self.gpu.shared_per_block:
                        yield shape

    def _batches(self, batch: int, units: tuple[int, int, int]) -> Iterator[NdhwcShape]:
        """Tiles of few positions of many samples; one of eight samples always fits."""
        wide = {units[2]} if self.tile.phased < 3 else {1, 2, 4, units[2]}
        for t2, t1, t0 in itertools.product(sorted(wide), (1, 2, 4), (1, 2, 4)):
            if t0 > units[0] or t1 > units[1]:
                continue
            for samples in (128, 64, 32, 16, 8):
                if samples * t2 * t1 * t0 > self.tile.rows or samples >= 2 * max(8, batch):
                    continue
                shape = self._shape((samples, t0, t1, t2), batch, units)
                if shape and self.shared_bytes(shape) <= self.gpu.shared_per_block:
                    yield shape
                    break

    def _shape(
        self, tile: tuple[int, int, int, int], batch: int, units: tuple[int, int, int]
    ) -> NdhwcShape | None:
        """A tile, if each block of 64 units is one run of a box, and shifts are multiples of 8."""
        samples, t0, t1, t2 = tile
        span0, span1, span2 = self.spans
        box = (samples, t0 + span0, t1 + span1, t2 + span2)
        steps = (1, 1, 1) if self.problem.forward else self.problem.geometry.stride
        if any((n - 1) * step >= MAX_BOX for n, step in zip(box, (1, *steps), strict=True)):
            return None
        if self.tile.samples_inside:
            # Blocks are parts of one line of samples, or lines that follow one another.
            line = samples * t2
            run = line * (1 if span1 else t1 * (1 if span0 else t0))
            if line % 8 or (run % 64 and run != math.prod(tile)):
                return None
        elif not self.by_warps:
            run = t1 * t2
            if not span1:
                run *= t0 if span0 else t0 * samples
            if run % 64 and run != math.prod(tile):
                return None
            if (span1 and t2 % 8) or (span0 and (t1 + span1) * t2 % 8):
                return None
            # Blocks begin at multiples of 8 rows.
            if math.prod(tile) > 64 and ((box[1] * box[2] * t2) % 8 and samples > 1):
                return None
        tiles = (
            div_up(batch, samples),
            div_up(units[0], t0),
            div_up(units[1], t1),
            div_up(units[2], t2),
        )
        return NdhwcShape(tile, tiles, box)

    # ------------------------------------------------------------ launches

    @functools.cached_property
    def macros(self) -> tuple[tuple[str, str], ...]:
        p, t = self.problem, self.tile
        values: dict[str, object] = {
            "forward": p.forward,
            "bias": p.bias,
            "groups": p.geometry.groups,
            "source_channels": p.source_channels,
            "target_channels": p.target_channels,
            "phased": t.phased,
            "split": t.split,
            "groups_per_tile": t.groups_per_tile,
            "samples_inside": t.samples_inside,
            "direct": t.direct,
            "fills": t.fills,
            "staged_columns": self.staged_columns,
            "consumers": t.consumers,
            "blocks": t.blocks,
            "steps": self.steps,
            "column_tile": t.column_tile,
            "source_stages": t.source_stages,
            "weight_stages": t.weight_stages,
            "resident_weights": t.resident_weights,
            "consumer_registers": self.consumer_registers,
        }
        return p.type_macros + geometry_macros(p.geometry) + macros("CONVT3D_", **values)

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        if self.tile.direct:
            # Packed, the same tile's weights are fewer bytes, or as many.
            packed = replace(self, tile=replace(self.tile, direct=False))
            schedule = packed.schedule(batch, input_size)
            return replace(schedule, weight_last=self._schedule(batch, input_size))
        return self._schedule(batch, input_size)

    def _schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        target = self.problem.geometry.output_size(input_size)
        source: Sequence[int] = input_size
        if not self.problem.forward:
            source, target = target, (input_size[0], input_size[1], input_size[2])
        shape = self.shape(batch, target)
        numbers = (
            *target,
            target[1] * target[2],
            target[2],
            batch,
            *shape.units,
            *shape.tiles,
            *self.pitches(shape),
            math.prod(shape.box) * _ROW_BYTES,
            self.box_bytes(shape),
            self._rotation(shape),
            *source,
        )
        product = Launch(
            KernelSpec("ndhwc/kernel.cu", "convt3d_ndhwc", self.macros),
            self.grid(shape),
            self.tile.threads,
            self.shared_bytes(shape),
            (
                "weight" if self.tile.direct else "packed",
                "bias",
                "target",
                self._source_map(batch, source, shape),
                *((self._weight_map(),) if self.tile.direct else ()),
                *map(np.int32, numbers),
            ),
            dependent=not self.tile.direct,
        )
        if self.tile.direct:
            return Schedule((product,))
        blocks = min(div_up(self.packed_bytes // 16 // self.axes[2].kernel, 256), 4096)
        pack = Launch(
            KernelSpec("ndhwc/pack.cu", "convt3d_ndhwc_pack", self.macros),
            div_up(self.paired_products, 2) if self.by_warps else blocks,
            256,
            0,
            ("weight", "packed", *WEIGHT_STRIDES),
        )
        return Schedule((pack, product), {"packed": self.packed_bytes})

    def grid(self, shape: NdhwcShape) -> int:
        items = shape.count * self.n_tile_phases
        if not self.tile.resident_weights:
            return min(self.gpu.multiprocessors, items)
        # Every variant has the same number of CTAs, each with weights of its own.
        return min(
            max(1, self.gpu.multiprocessors // self.n_tile_phases) * self.n_tile_phases, items
        )

    def _rotation(self, shape: NdhwcShape) -> int:
        """Pairs of N tile and phase by which a CTA moves on between rounds, to get all of them."""
        if self.tile.resident_weights:
            return 0
        step = self.grid(shape) % self.n_tile_phases
        return next(
            n for n in range(self.n_tile_phases) if math.gcd(step + n, self.n_tile_phases) == 1
        )

    def _source_map(self, batch: int, size: Sequence[int], shape: NdhwcShape) -> TensorMap:
        bytes_ = self.problem.element_bytes
        channels = self.problem.source_channels * self.problem.geometry.groups
        position = channels * bytes_
        steps = (1, 1, 1) if self.problem.forward else self.problem.geometry.stride[::-1]
        # A step beside a single element moves nothing more.
        steps_ = [n if extent > 1 else 1 for n, extent in zip(steps, shape.box[:0:-1], strict=True)]
        box = [(extent - 1) * n + 1 for n, extent in zip(steps_, shape.box[:0:-1], strict=True)]
        extents = [channels, size[2], size[1], size[0], batch]
        strides = [position]
        for n in size[:0:-1]:
            strides.append(strides[-1] * n)
        strides.append(math.prod(size) * position)
        boxes = [8 * self.vector, *box, shape.box[0]]
        if self.tile.samples_inside:
            # C, samples, W, H, D.
            for sequence in (extents, boxes):
                sequence.insert(1, sequence.pop())
            strides.insert(0, strides.pop())
        return TensorMap(
            "source",
            MAP_ELEMENTS[self.problem.arithmetic],
            tuple(extents),
            tuple(strides),
            tuple(boxes),
            swizzle=128,
            element_strides=(1, *steps_, 1),
        )

    def _weight_map(self) -> TensorMap:
        """A tap's columns, of a chunk of source channels, in a weight that is channels_last."""
        p = self.problem
        columns, taps = p.target_channels, math.prod(p.geometry.kernel_size)
        tap = columns * p.element_bytes
        return TensorMap(
            "weight",
            MAP_ELEMENTS[p.arithmetic],
            (columns, taps, p.source_channels),
            (tap, taps * tap),
            (_ROW_BYTES // p.element_bytes, 1, self.chunk_channels),
            swizzle=128,
        )

    def describe(self) -> dict[str, str]:
        t = self.tile
        axes = ("none", "D", "D and H", "D, H and W")[t.phased]
        kept = "weights stay" if t.resident_weights else f"{t.weight_stages} weight stages"
        own = ("a tile", "a tap of W", "a tap of H and W", "a tap")[t.split]
        gradient = "" if self.problem.forward else "gradient of a "
        return {
            "kernel": f"{gradient}strided channels_last layer (ndhwc), wgmma from shared memory",
            "tile": f"{t.rows} M rows x {t.column_tile} columns",
            "unit": f"{self.live_slots} unrolled phases with taps; phases apart: {axes}",
            "products": f"m16 x 8 by mma.sync, {t.groups_per_tile} groups of 8 channels a tile"
            if self.by_warps
            else f"m64 x {t.column_tile} columns, {self.accumulators} accumulators a thread",
            "warps": f"{t.consumers} warpgroups multiply, {t.blocks} blocks of 64 M rows each",
            "pipeline": f"{t.source_stages} A stages, one {own}, of {8 * self.vector} "
            f"channels, {kept}"
            + (", samples inside of lines" if t.samples_inside else "")
            + (", weights as they are" if t.direct else "")
            + (", empty phases filled" if t.fills else ""),
        }

    # ------------------------------------------------------------ cost

    def shape_cost(self, shape: NdhwcShape, batch: int, target: Sequence[int]) -> float:
        """Estimated cycles of one call with a tile."""
        p, t = self.problem, self.tile
        # A CTA whose weights stay keeps its phase: those with most taps end last.
        stages = self.chunks * (
            self.most_stages if t.resident_weights else self.stages / self.phases
        )
        # Blocks beyond the tile's units are multiplied too.
        used = t.blocks * t.consumers
        products = stages * self.taps * self.steps * used * _product_cycles(t.column_tile)
        if self.by_warps:
            taps = self.taps * self.axes[2].kernel
            loads = math.prod(axis.shifts for axis in self.axes) * t.groups_per_tile
            # Of a warpgroup, whose warps are one a scheduler.
            products = (5 * loads + 1.3 * taps * self.fragments) * used * _ISSUE
        outputs = 64.0 * used * math.prod(self.slots) * t.column_tile * p.element_bytes
        if p.forward and self.slots[2] < p.geometry.stride[2]:
            outputs *= _APART
        # Pieces that do not follow one another are merged in L2, at a price.
        together = t.column_tile * p.element_bytes
        if t.column_tile >= p.geometry.out_channels and self.slots[2] == p.geometry.stride[2]:
            together *= self.slots[2] * shape.units[3]
        outputs *= 1 + _PIECE / together
        rows = self.chunks * self.boxes * math.prod(shape.box)
        item = products * _PRODUCT + stages * _STAGE + rows * _BOX_ROW
        if t.direct and not t.resident_weights:
            item += stages * max(0, self.taps * div_up(t.column_tile, 64) - 2) * _COLUMN_BOX
        if t.resident_weights:
            item *= 1 + _FEW_BOXES * max(0, 4 - t.source_stages)
        item += outputs * _OUTPUT_BYTE + _WORK_TILE
        if not t.resident_weights:
            item += stages / max(1, t.weight_stages - 1) * _WEIGHT_WAIT
            item += stages * self.stage_bytes * _WEIGHT_BYTE
            all_slots = p.forward and p.element_bytes == 2 and t.phased == 0
            item *= _ALL_SLOTS_STREAMED if all_slots else 1.0
        item = max(item, rows * (_TMA_ROW if p.forward else _STEPPED_ROW))
        rounds = div_up(shape.count * self.n_tile_phases, self.grid(shape))
        if t.fills:
            # What is left are work tiles with taps, which are as long as the longest on average.
            live = self.phases - self.empty_phases
            rounds = div_up(shape.count * live, self.grid(shape))
            missing = (products * _PRODUCT + stages * _STAGE) * (self.phases / live - 1)
            item += missing
        whole = rounds * item
        if t.samples_inside:
            always = outputs * _OUTPUT_BYTE + _WORK_TILE
            whole = self._longest_first(shape, target, products, always)
        # Outputs are as large as the source of the gradient.
        moved = batch * math.prod(target) * p.geometry.out_channels * p.element_bytes
        moved *= 1 if p.forward else math.prod(p.geometry.stride)
        floor = 1.1 * moved / STORE_BYTES / self.gpu.multiprocessors
        once = _LAUNCHES + (0 if t.direct else _PACKING + self.packed_bytes * _PACKED_BYTE)
        if t.resident_weights:
            once += t.weight_stages * self.stage_bytes * _RESIDENT_BYTE
        whole *= _TWO_A_STAGES if t.source_stages == 2 else 1.0
        whole *= _THREE_WEIGHT_STAGES if t.weight_stages <= 3 and not t.resident_weights else 1.0
        whole *= _THREE_CONSUMERS if t.consumers == 3 else 1.0
        # Of several at memory's rate, the one with least to do besides.
        return max(whole, floor + _ORDER * whole) + once

    def _longest_first(
        self,
        shape: NdhwcShape,
        target: Sequence[int],
        products: float,
        always: float,
    ) -> float:
        """Cycles of the CTA that takes longest, of work tiles that leave out taps of padding.

        ``products``: tensor-core cycles of a work tile with all taps of its phase, on average;
        ``always``: of a work tile, whatever its taps.
        """
        # Along each axis, of each tile and phase: products as a share of all, taps, and boxes.
        along: list[Counter[tuple[float, int, int]]] = []
        source = self._source(target)
        for a, axis in enumerate(self.axes):
            apart = a >= 3 - self.tile.split
            if a >= self.tile.phased:
                boxes = len(axis.live_shifts) if apart else 1
                along.append(Counter({(1.0, axis.kernel, boxes): shape.tiles[1 + a]}))
                continue
            mean = axis.kernel / axis.phases
            found: Counter[tuple[float, int, int]] = Counter()
            for first, phase in itertools.product(
                range(0, shape.tiles[1 + a] * shape.units[1 + a], shape.units[1 + a]),
                range(axis.phases),
            ):
                shifts = [
                    (phase + axis.padding - k * axis.dilation) // axis.stride
                    for k in range(axis.kernel)
                    if (phase + axis.padding - k * axis.dilation) % axis.stride == 0
                ]
                met = [
                    sum(0 <= first + u + shift < source[a] for u in range(shape.units[1 + a]))
                    for shift in shifts
                ]
                walked = sum(n > 0 for n in met)
                # Blocks share a line, not a position along W.
                share = sum(met) / shape.units[1 + a] if a < 2 else float(walked)
                found[share / mean, walked, walked if apart else 1] += 1
            along.append(found)
        wait = _WEIGHT_WAIT / max(1, self.tile.weight_stages - 1)
        alike = shape.tiles[0] * self.groups * self.column_tiles
        box = math.prod(shape.box) * _LINES_ROW
        counted = []
        for axes in itertools.product(*(axis.items() for axis in along)):
            share = math.prod(kind[0] for kind, _ in axes)
            stages = self.chunks * math.prod(kind[1] for kind, _ in axes)
            busy = products * _PRODUCT * share + stages * (_STAGE + wait)
            # Boxes and weights come one after another.
            brought = self.chunks * math.prod(kind[2] for kind, _ in axes) * box
            brought += stages * (self.stage_bytes * _COPIED_BYTE + wait)
            count = alike * math.prod(n for _, n in axes)
            counted.append((max(busy, brought) + always, count))
        counted.sort(reverse=True)
        grid = self.grid(shape)
        if shape.count * self.n_tile_phases > min(_MOST_SORTED, _MOST_ROUNDS * grid):
            return sum(length * count for length, count in counted) / grid * 1.05
        lengths = [length for length, count in counted for _ in range(count)]
        totals = [0.0] * grid
        for begin in range(0, len(lengths), grid):
            part = lengths[begin : begin + grid]
            places = range(grid) if begin // grid % 2 == 0 else range(grid - 1, -1, -1)
            for place, length in zip(places, part, strict=False):
                totals[place] += length
        return max(totals)

    def _source(self, target: Sequence[int]) -> list[int]:
        """Input extents of the forward pass that give these output extents."""
        g = self.problem.geometry
        return [
            (n - g.output_padding[a] + 2 * g.padding[a] - g.dilation[a] * (k - 1) - 1)
            // g.stride[a]
            + 1
            for a, (n, k) in enumerate(zip(target, g.kernel_size, strict=True))
        ]

    def cost(self, batch: int, target: Sequence[int]) -> float:
        """Estimated cycles of one call with its best tile."""
        return _best(self, batch, tuple(target))[0]

    def serves(self, batch: int, target: Sequence[int]) -> bool:
        """Whether a tile fits."""
        return next(self.shapes(batch, target), None) is not None


@functools.lru_cache(maxsize=4096)
def _best(plan: WgmmaNdhwcPlan, batch: int, target: tuple[int, ...]) -> tuple[float, NdhwcShape]:
    found = [(plan.shape_cost(s, batch, target), s) for s in plan.shapes(batch, target)]
    if not found:
        raise ValueError(f"no tile of {plan.tile} fits {target}")
    return min(found, key=lambda item: item[0])


def _planes(units: tuple[int, int, int], lines: int) -> list[tuple[int, int]]:
    """Extents of tiles along H and D of at most so many lines."""
    high = {n for n in (1, 2, 4, 8, 16, 32, 64) if n < 2 * units[1]} | {units[1]}
    found = []
    for t1 in sorted(n for n in high if n <= lines):
        most = min(units[0], lines // t1)
        equal = div_up(units[0], div_up(units[0], most))
        found += [(t1, t0) for t0 in sorted({1, most, equal})]
    return found


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why ndhwc/kernel.cu cannot take a problem, or None."""
    g = problem.geometry
    vector = 16 // problem.element_bytes
    if gpu.capability[0] != 9:
        return "warpgroup products exist on compute capability 9.0 only"
    if problem.operation == "grad_weight":
        return "the gradient by weight is another product"
    if problem.arithmetic not in ROUNDED:
        return f"{problem.arithmetic.value} is not among its arithmetics"
    if not (problem.source_channels_last and problem.target_channels_last):
        return "both activations are channels_last"
    if max(g.stride) == 1:
        return "stride 1 has no phases"
    if problem.source_channels * g.groups % vector or problem.target_channels % vector:
        return "channels are moved as 16 bytes"
    if g.groups > 1 and problem.source_channels % (2 * vector) and not _by_warps(problem):
        return "products would run into the next group"
    return None


def _by_warps(problem: Problem) -> bool:
    """Whether groups are of eight channels, which products of a warp take."""
    return (
        problem.forward
        and problem.element_bytes == 2
        and problem.geometry.groups > 1
        and problem.source_channels == 8
        and problem.target_channels % 8 == 0
    )


def candidates(
    problem: Problem, batch: int, target: Sequence[int], gpu: Gpu
) -> Iterator[WgmmaNdhwcPlan]:
    """Every sensible kernel, in no order, with the deepest pipeline for these extents."""
    for plan in _packed(problem, batch, target, gpu):
        yield plan
        yield from _direct(plan, batch, target)


def _direct(plan: WgmmaNdhwcPlan, batch: int, target: Sequence[int]) -> Iterator[WgmmaNdhwcPlan]:
    """The same on weights as they are, if they can be."""
    p = plan.problem
    if p.forward and p.element_bytes == 2 and p.geometry.groups == 1:
        direct = replace(plan, tile=replace(plan.tile, direct=True))
        yield from _deepest(direct, plan.tile.resident_weights, batch, target)


def _packed(
    problem: Problem, batch: int, target: Sequence[int], gpu: Gpu
) -> Iterator[WgmmaNdhwcPlan]:
    """Those whose weights are packed."""
    if _by_warps(problem):
        for groups_per_tile, consumers, blocks in itertools.product((1, 2, 4, 8), (2, 3), (1, 2)):
            if (
                problem.geometry.groups % groups_per_tile
                or groups_per_tile * problem.target_channels % 16
            ):
                continue
            columns_ = groups_per_tile * problem.target_channels
            tile = NdhwcTile(0, 0, blocks, columns_, consumers, 2, 1, True, groups_per_tile)
            plan = WgmmaNdhwcPlan(problem, tile, gpu)
            if plan.suits and plan.n_tile_phases <= gpu.multiprocessors and columns_ <= 256:
                yield from _deepest(plan, True, batch, target)
        return
    channels = problem.target_channels
    columns = {min(256, round_up(div_up(channels, n), 16)) for n in (1, 2, 4)}
    columns = {n for n in columns if n >= 32} or {max(columns)}
    for phased, split, column_tile, consumers in itertools.product(
        range(4) if problem.forward else (3,), (1, 2, 3), sorted(columns), (2, 3)
    ):
        if (split == 2 and phased < 2) or (split == 3) == problem.forward:
            continue
        plans = (
            WgmmaNdhwcPlan(
                problem, NdhwcTile(phased, split, blocks, column_tile, consumers, 2, 2, False), gpu
            )
            for blocks in (1, 2, 3, 4)
        )
        fitting = [plan for plan in plans if plan.suits]
        if problem.forward and split <= 2 and phased >= 2 and batch >= _MANY_SAMPLES:
            units = fitting[-1].units(target) if fitting else ()
            for plan in fitting[:2] if max(units, default=99) <= _FEW_POSITIONS else ():
                inside = replace(plan, tile=replace(plan.tile, samples_inside=True))
                yield from _deepest(inside, False, batch, target)
        for plan in fitting[-2:]:
            yield from _deepest(plan, False, batch, target)
            if plan.empty_phases:
                filling = replace(plan, tile=replace(plan.tile, fills=True))
                yield from _deepest(filling, False, batch, target)
            if plan.n_tile_phases > gpu.multiprocessors:
                continue
            yield from _deepest(plan, True, batch, target)


def _deepest(
    plan: WgmmaNdhwcPlan, resident: bool, batch: int, target: Sequence[int]
) -> Iterator[WgmmaNdhwcPlan]:
    """The deepest pipeline that leaves room for the best tile."""
    everything = plan.chunks * plan.most_stages

    def with_pipeline(weights: int, sources: int) -> WgmmaNdhwcPlan:
        tile = replace(
            plan.tile,
            weight_stages=everything if resident else weights,
            source_stages=sources,
            resident_weights=resident,
        )
        return replace(plan, tile=tile)

    if everything * plan.stage_bytes > plan.gpu.shared_per_block and resident:
        return
    shallow = with_pipeline(*_PIPELINES[-1])
    if not shallow.serves(batch, target):
        return
    shape = shallow.shape(batch, target)
    for pipeline in _PIPELINES:
        chosen = with_pipeline(*pipeline)
        barriers = chosen.tile.source_stages + (1 if resident else chosen.tile.weight_stages)
        if (
            16 * barriers <= _BARRIER_BYTES
            and chosen.shared_bytes(shape) <= plan.gpu.shared_per_block
        ):
            yield chosen
            return


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, WgmmaNdhwcPlan]]:
    """The best candidates for these input extents with their costs, cheapest first."""
    if refusal(problem, gpu) is not None:
        return []
    _, target = problem.extents(input_size)

    def costs(plans: Iterable[WgmmaNdhwcPlan]) -> list[tuple[float, WgmmaNdhwcPlan]]:
        return sorted(
            ((plan.cost(batch, target), plan) for plan in plans), key=lambda item: item[0]
        )

    found = costs(_packed(problem, batch, target, gpu))
    for _, plan in found[:_MOST_DIRECT]:
        found += costs(_direct(plan, batch, target))
    found.sort(key=lambda item: item[0])
    return found[:_MAX_PLANS]
