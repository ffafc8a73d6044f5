"""Plans of ``patch/kernel.cu``: kernel == stride without padding on warpgroup products.

The numbers mirror ``patch/config.cuh``. The cost model counts, for one multiprocessor, matrix
steps, bytes from L2 and from memory, and instructions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan import ampere_patch
from convt3d.cuda.plan.direct import WEIGHT_STRIDES
from convt3d.cuda.schedule import (
    Gpu,
    Launch,
    Problem,
    Schedule,
    TensorMap,
    div_up,
    macros,
    not_taken,
    round_up,
)
from convt3d.precision import Arithmetic

# Of a thread; of split products, which have as many again: of more the layers that were timed took
# a tenth to a fifth longer.
_MAX_ACCUMULATORS = {1: 160, 2: 64}
_MAX_COLUMN_TILES = 64
# Of each thread that fills, by warpgroups of them.
_PRODUCER_REGISTERS = {1: 104, 2: 56}
_FEW_PRODUCER_REGISTERS = 72
_MIN_DEPTH, _MIN_COLUMNS = 16, 8
# Bytes a cycle that a warp turns, by bytes of an element.
_TRANSPOSE_BYTES = {4: 8.3, 2: 11.5}
_SPLIT_TRANSPOSES = 0.6  # of them, where weights are split too
_ADDED = 0.5  # of split products' additions that other consumers' products do not hide
_SPLIT_STAGED = 1.06  # of calls of split products whose outputs are staged
_SPLITS = (2, 3, 4, 6, 8, 12, 16)
_CLUSTERS = (2,)  # of four they leave multiprocessors out, of eight too
_WORKSPACE_BYTES = 64 * 2**20
# Tiles of a CTA where turning weights, and stores, are not hidden.
_FEW_ROUNDS = 4
_MOST_OUTSIDE = 1.25  # rows of boxes for each row along H
# Chunks of a tile where consumers out of step gain; whole ones where they are fewer, and those of
# all tiles of a CTA.
_MIN_PING_PONG, _MIN_PING_PONG_WHOLE, _MIN_PING_PONG_IN_ALL = 4, 2, 15
_MOST_PING_PONG = 5  # chunks of a tile for each tile of a CTA: half of the first one is waited for
_PING_PONG = 0.15  # of stores that consumers out of step hide
_STREAMED = 0.15  # what turning weights for every tile costs more than counted
_STEADY_STAGES = 6  # of many rounds: each one less costs as much as one of _DEEP
_STAGED_MEMORY = 1.06  # of what memory takes from lanes' stores
_MAPPED = {
    Arithmetic.TF32: "tfloat32",
    Arithmetic.IEEE: "float32",
    Arithmetic.F16: "float16",
    Arithmetic.BF16: "bfloat16",
}


@dataclass(frozen=True)
class _Rates:
    """What one multiprocessor of an H200 takes: cycles, and bytes a cycle."""

    call: float  # any call
    product: float  # 64 rows by two columns
    fragment: float
    chunk: float  # a piece of k of a pass
    stores: float
    memory: float
    l2: float
    power: int  # of the sum that stands for the longest of these


# Fitted to 70 timed forward plans of five layers (8% off in the mean) and 87 gradients (9%).
_FORWARD = _Rates(12000.0, 0.95, 5.6, 35.0, 23.5, 18.5, 45.0, 4)
_GRADIENT = _Rates(15000.0, 0.45, 8.0, 177.0, 26.0, 17.5, 60.0, 5)
_DEEP = 9  # blocks of 64 cells on their way to a multiprocessor that hide latencies
_ADD_BYTES = 8.0  # a cycle, of partial sums that are written and added
_CLUSTER_BYTES = 10.0  # the same within a cluster, of each multiprocessor


@dataclass(frozen=True)
class Tile:
    """The compile-time choices of a product."""

    consumers: int  # warpgroups
    blocks: int  # of 64 cells of a consumer
    product_columns: int
    passes: int  # products' columns of a CTA
    source_stages: int  # of each consumer
    weight_stages: int
    keep_weights: bool  # all weights of a CTA's columns stay in shared memory
    resident: int = 1  # CTAs that share a multiprocessor
    splits: int = 1  # CTAs that share the chunks of a tile
    fold: int = 0  # cells of a row, where several rows of the output gradient make 128 bytes
    fillers: int = 1  # warpgroups that bring cells and weights
    staged: int = 0  # columns that leave as one box at a time; 0: from the accumulators
    buffers: int = 2  # of staged outputs, of each consumer
    n_major: bool = False  # products take weights as memory has them
    ping_pong: bool = False  # consumers begin one after another
    cluster: int = 1  # of these CTAs: all splits, whose sums meet in shared memory, or none

    @property
    def cells(self) -> int:
        """Input positions of one tile."""
        return 64 * self.blocks * self.consumers

    @property
    def columns(self) -> int:
        return self.product_columns * self.passes

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + self.fillers)


@dataclass(frozen=True)
class WgmmaPatchPlan:
    """A kernel == stride product of one problem.

    Cells come by TMA: where the volume of a channel is no multiple of 16 bytes (in the gradient, a
    row of the output gradient no multiple of 128 bytes; folded, of another length than planned),
    ``ampere/patch/kernel.cu`` runs.
    """

    problem: Problem
    tile: Tile
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)  # over which tiles are spread

    # ------------------------------------------------------------ derived sizes

    @property
    def columns(self) -> int:
        return _columns(self.problem)

    @property
    def width(self) -> int:
        """Neighbouring elements of the source that belong to one cell."""
        p = self.problem
        return 1 if p.forward or p.source_channels_last else p.geometry.stride[2]

    @property
    def folded(self) -> int:
        """Rows along H of the output gradient that make one row of a box."""
        return self.problem.geometry.stride[1] if self.tile.fold else 1

    @property
    def chunk_lines(self) -> int:
        return 128 // (self.problem.element_bytes * self.width * self.folded)

    @property
    def chunks(self) -> int:
        return _chunks(self.problem)

    @property
    def split_chunks(self) -> int:
        return div_up(self.chunks, self.tile.splits)

    @property
    def run(self) -> int:
        """Neighbouring cells that a lane holds, so that their outputs make one 16-byte piece."""
        eb = self.problem.element_bytes
        if self.problem.source_channels_last:
            return 1
        if not self.problem.forward:
            words = self.width * self.folded * eb // 4
            return {1: 2 * self.tile.blocks, 2: 2, 4: 1}[words]
        width = self.problem.geometry.stride[2]
        run = 4 if width % 2 else max(1, 16 // (eb * width))
        return min(max(run, 4 // eb), 4, 2 * self.tile.blocks)

    @property
    def column_tiles(self) -> int:
        return div_up(self.columns, self.tile.columns)

    @property
    def map_weights(self) -> bool:
        """Whether TMA can bring the weight where it is in its usual order."""
        p = self.problem
        if not p.forward:
            return True
        whole = 128 // p.element_bytes % (8 * ampere_patch.interleave(p)) == 0
        return whole and self.columns * p.element_bytes % 16 == 0

    @property
    def transposed(self) -> bool:
        return self.problem.forward and self.map_weights and not self.tile.n_major

    @property
    def parts(self) -> int:
        """TF32 numbers that stand for one of an operand."""
        return self.problem.words_per_value

    @property
    def weight_part_bytes(self) -> int:
        """Of shared memory, for one part: forward, whole boxes of 128 bytes of columns."""
        columns = self.tile.columns
        if self.problem.forward and self.map_weights:
            columns = round_up(columns, self.weight_box_row // self.problem.element_bytes)
        return columns * 128

    @property
    def weight_stage_bytes(self) -> int:
        return self.parts * self.weight_part_bytes

    @property
    def weight_box_row(self) -> int:
        """Bytes of columns of a box of the forward weights: 64 where that leaves none over."""
        eb, columns = self.problem.element_bytes, self.tile.columns
        # 16 bits: what it leaves room for, a source stage more, made pangu_384_5 no faster.
        narrow = self.transposed and columns * eb % 128 == 64
        narrow = narrow and (eb == 4 or self.problem.target_channels_last)
        return 64 if narrow and 64 // eb % (8 * ampere_patch.interleave(self.problem)) == 0 else 128

    @property
    def consumer_registers(self) -> int:
        """Of each thread; with one consumer all threads keep what they are launched with."""
        t = self.tile
        launched = min(255, 65536 // (t.resident * t.threads)) // 8 * 8  # of every thread
        if t.consumers == 1:
            return launched
        budget = launched * (t.consumers + t.fillers)
        budget -= self.producer_registers * t.fillers
        return min(240, budget // t.consumers // 8 * 8)

    @property
    def producer_registers(self) -> int:
        """Of each thread that fills. Wide products of two parts leave them few."""
        if self.parts > 1 and self.tile.fillers == 1 and self.tile.product_columns >= 128:
            return _FEW_PRODUCER_REGISTERS
        return _PRODUCER_REGISTERS[self.tile.fillers]

    @property
    def registers(self) -> int:
        """Of a thread that multiplies: accumulators, fragments of two buffers, addresses."""
        t = self.tile
        return t.blocks * (self.parts * t.product_columns // 2 + 16) + 36

    @property
    def hold_bias(self) -> bool:
        """Whether the bias of a CTA's columns stays in registers; of split products alone."""
        t = self.tile
        held = t.product_columns // 4
        room = self.registers + held <= self.consumer_registers
        return self.parts > 1 and t.passes == 1 and room

    @property
    def shared_bytes(self) -> int:
        t = self.tile
        source = t.consumers * t.source_stages * t.blocks * 8192
        weights = t.weight_stages * self.weight_stage_bytes
        staging = t.consumers * t.buffers * t.staged * 64 * t.blocks * self.problem.element_bytes
        bias = round_up(4 * t.columns, 16) if self.problem.forward else 0
        transposed = 8 * t.weight_stages if self.transposed else 0
        barriers = 16 * (t.consumers * t.source_stages + t.weight_stages) + transposed
        barriers += 8 * (t.consumers - 1) if t.ping_pong else 0
        return 1024 + source + weights + staging + bias + barriers

    # ------------------------------------------------------------ launch

    @functools.cached_property
    def macros(self) -> tuple[tuple[str, str], ...]:
        p, t, g = self.problem, self.tile, self.problem.geometry
        return p.type_macros + macros(
            "CONVT3D_",
            forward=p.forward,
            bias=p.bias,
            source_channels_last=p.source_channels_last,
            target_channels_last=p.target_channels_last,
            groups=g.groups,
            source_channels=p.source_channels,
            target_channels=p.target_channels,
            stride0=g.stride[0],
            stride1=g.stride[1],
            stride2=g.stride[2],
            consumers=t.consumers,
            blocks=t.blocks,
            product_columns=t.product_columns,
            passes=t.passes,
            run=self.run,
            interleave=ampere_patch.interleave(p),
            source_stages=t.source_stages,
            weight_stages=t.weight_stages,
            keep_weights=t.keep_weights,
            map_weights=self.map_weights,
            splits=t.splits,
            cluster=t.cluster,
            ping_pong=t.ping_pong,
            fold=t.fold,
            fillers=t.fillers,
            staged_columns=t.staged,
            staging_buffers=t.buffers,
            n_major=t.n_major,
            weight_box_row=self.weight_box_row,
            resident=t.resident,
            set_registers=t.consumers > 1,
            consumer_registers=self.consumer_registers,
            producer_registers=self.producer_registers,
            hold_bias=self.hold_bias,
            shared_bytes=self.shared_bytes,
        )

    @property
    def blocks(self) -> int:
        """CTAs that share a tile of cells."""
        return self.column_tiles * self.problem.geometry.groups * self.tile.splits

    def mapped(self, input_size: Sequence[int]) -> bool:
        """Whether TMA can bring the source of these extents."""
        eb = self.problem.element_bytes
        if self.problem.source_channels_last:
            return True
        if self.problem.forward:
            return math.prod(input_size) * eb % 16 == 0
        if self.tile.fold:
            plane = input_size[1] * input_size[2] * self.width * self.folded * eb
            return input_size[2] == self.tile.fold and plane % 128 == 0
        return input_size[2] * self.width * eb % 128 == 0

    @property
    def row_elements(self) -> int:
        """Neighbouring elements of a cell in a row of the output."""
        p = self.problem
        if not p.forward:
            return self.tile.staged
        return p.geometry.stride[2] * (p.target_channels if p.target_channels_last else 1)

    def box_width(self, input_size: Sequence[int]) -> int:
        """Cells along W of a consumer's box, where outputs are staged: a power of two."""
        w, elements = input_size[2], self.row_elements
        if elements * self.problem.element_bytes % 16:  # several cells make a row of a box
            most = 256 // elements
            return min(w & -w, 64 * self.tile.blocks, 1 << most.bit_length() - 1 if most else 1)
        return min(w & -w, 64 * self.tile.blocks)

    def boxed(self, input_size: Sequence[int]) -> bool:
        """Whether the outputs of a consumer's cells may be a box, few of them outside."""
        p, width = self.problem, self.box_width(input_size)
        elements, eb = self.row_elements, p.element_bytes
        rows = 64 * self.tile.blocks // width
        fits = elements <= 256 and rows * p.geometry.stride[1] <= 256
        fits = fits and round_up(input_size[1], rows) <= _MOST_OUTSIDE * input_size[1]
        if p.source_channels_last:
            apart = elements * eb % 16 == 0
            return fits and (apart or width * elements * eb % 16 == 0)
        # Swizzled rows of a box have 128 bytes.
        fits = fits and width * elements <= 256 and width * eb % 128 == 0
        return fits and input_size[2] * eb % 16 == 0

    def takes(self, input_size: Sequence[int]) -> bool:
        """Whether the kernel can run these extents."""
        return self.mapped(input_size) and (not self.tile.staged or self.boxed(input_size))

    def tiles_per_sample(self, input_size: Sequence[int]) -> int:
        """Tiles of cells that cover one sample."""
        if not self.tile.staged:
            return div_up(math.prod(input_size), self.tile.cells)
        width = self.box_width(input_size)
        down = div_up(input_size[1], 64 * self.tile.blocks // width)
        return div_up(input_size[0] * down * (input_size[2] // width), self.tile.consumers)

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        if not self.takes(input_size):
            raise not_taken(self, input_size)
        staged = self.tile.staged > 0
        per_sample = self.tiles_per_sample(input_size)
        tiles = per_sample * batch
        workers = min(tiles, ampere_patch.most_workers(self.blocks, self.tile.resident, self.gpu))
        whole = self.tile.splits == self.tile.cluster
        if self.tile.cluster > 1:
            workers = tiles
        launch = Launch(
            KernelSpec("patch/kernel.cu", "convt3d_patch", self.macros),
            workers * self.blocks,
            self.tile.threads,
            self.shared_bytes,
            (
                *("weight", "bias", "target" if whole else "partial"),
                self._source_map(batch, input_size),
                *((self._weight_map(),) if self.map_weights else ()),
                *((self._target_map(batch, input_size),) if staged else ()),
                *((np.int32(self.box_width(input_size)),) if staged else ()),
                *map(np.int32, (*input_size, per_sample, tiles, workers)),
                *WEIGHT_STRIDES,
            ),
        )
        if whole:
            return Schedule((launch,))
        volume = math.prod(input_size)
        elements = batch * self.problem.geometry.in_channels * volume
        reduce = Launch(
            KernelSpec("patch/kernel.cu", "convt3d_patch_reduce", self.macros),
            min(div_up(elements, ampere_patch.REDUCE_ELEMENTS), ampere_patch.REDUCE_GRID),
            256,
            0,
            ("partial", "target", np.int64(elements), np.int64(volume)),
            dependent=True,
        )
        return Schedule((launch, reduce), {"partial": 4 * elements * self.tile.splits})

    def _weight_map(self) -> TensorMap:
        """Boxes of 128 bytes of k by the columns of a product, of the weight in its usual order.

        Forward, k is the other dimension: 128 bytes of columns by a chunk of channels. The kernel
        leaves the map alone where the weight's strides are others.
        """
        p, eb = self.problem, self.problem.element_bytes
        if p.forward:
            row = self.columns * eb
            return TensorMap(
                "weight",
                _MAPPED[p.arithmetic],
                (self.columns, p.source_channels, p.geometry.groups),
                (row, row * p.source_channels),
                (self.weight_box_row // eb, self.chunk_lines, 1),
                self.weight_box_row,
            )
        depth = p.source_channels * math.prod(p.geometry.stride)
        return TensorMap(
            "weight",
            _MAPPED[p.arithmetic],
            (depth, p.geometry.in_channels),
            (depth * eb,),
            (128 // eb, self.tile.product_columns),
            128,
        )

    def _source_map(self, batch: int, input_size: Sequence[int]) -> TensorMap:
        """Boxes of 128 bytes of cells, of (cells, channels of a group, groups, samples).

        Of channels_last sources boxes of 64 cells by 128 bytes of channels; of the output gradient
        parts of its rows.
        """
        p, eb = self.problem, self.problem.element_bytes
        if not p.forward and p.source_channels_last:
            # Rows of H at the distance of a stride, of cells that are their slots and channels.
            stride = p.geometry.stride
            d, h, _ = p.geometry.output_size(input_size)
            across, row = self.box_width(input_size), stride[2] * p.source_channels
            extents = (row, input_size[2], h, d, batch)
            rows = 64 * self.tile.blocks // across
            return TensorMap(
                "source",
                _MAPPED[p.arithmetic],
                extents,
                tuple(eb * math.prod(extents[:i]) for i in range(1, 5)),
                (128 // eb, across, rows * stride[1], 1, 1),
                128,
                (1, 1, stride[1], 1, 1),
            )
        if not p.forward:
            d, h, w = p.geometry.output_size(input_size)
            if self.tile.fold:
                h, w = 1, h * w
            channels = p.geometry.out_channels
            box = _box(p, self.tile.fold > 0)
            assert box is not None
            return TensorMap(
                "source",
                _MAPPED[p.arithmetic],
                (w, h, d, channels, batch),
                tuple(n * eb for n in (w, w * h, w * h * d, w * h * d * channels)),
                (128 // eb, *box, 1),
                128,
            )
        volume = math.prod(input_size)
        channels, groups = p.source_channels, p.geometry.groups
        if self.tile.staged:
            d, h, w = input_size
            if p.source_channels_last:
                across = self.box_width(input_size)
                row = channels * groups * eb
                return TensorMap(
                    "source",
                    _MAPPED[p.arithmetic],
                    (channels * groups, w, h, d, batch),
                    (row, row * w, row * w * h, row * volume),
                    (self.chunk_lines, across, 64 * self.tile.blocks // across, 1, 1),
                    128,
                )
            across = min(self.box_width(input_size), 128 // eb)
            return TensorMap(
                "source",
                _MAPPED[p.arithmetic],
                (w, h, d, channels * groups, batch),
                tuple(n * eb for n in (w, w * h, volume, volume * channels * groups)),
                (across, 128 // eb // across, 1, self.chunk_lines, 1),
                128,
            )
        if p.source_channels_last:
            return TensorMap(
                "source",
                _MAPPED[p.arithmetic],
                (channels, groups, volume, batch),
                tuple(channels * eb * n for n in (1, groups, groups * volume)),
                (self.chunk_lines, 1, 64 * self.tile.blocks, 1),
                128,
            )
        return TensorMap(
            "source",
            _MAPPED[p.arithmetic],
            (volume, channels, groups, batch),
            tuple(volume * eb * n for n in (1, channels, channels * groups)),
            (128 // eb, self.chunk_lines, 1, 1),
            128,
        )

    def _target_map(self, batch: int, input_size: Sequence[int]) -> TensorMap:
        """Boxes of the outputs of a consumer's cells, of some channels."""
        p, eb = self.problem, self.problem.element_bytes
        stride0, stride1, stride2 = p.geometry.stride
        d, h, w = p.geometry.output_size(input_size) if p.forward else input_size
        width, channels = self.box_width(input_size), p.geometry.out_channels
        if not p.forward:
            extents: tuple[int, ...] = (p.geometry.in_channels, w, h, d, batch)
            return TensorMap(
                "target",
                "float32" if eb == 4 else _MAPPED[p.arithmetic],
                extents,
                tuple(eb * math.prod(extents[:i]) for i in range(1, 5)),
                (self.tile.staged, width, 64 * self.tile.blocks // width, 1, 1),
                128,
            )
        rows = 64 * self.tile.blocks // width * stride1
        element = "float32" if eb == 4 else _MAPPED[p.arithmetic]
        if not p.target_channels_last:
            extents = (w, h, d, channels, batch)
            boxes = self.tile.staged // math.prod(p.geometry.stride)
            box: tuple[int, ...] = (width * stride2, rows, stride0, boxes, 1)
        else:
            elements = self.row_elements
            slots = self.tile.staged // (stride1 * elements)  # of D
            if elements * eb % 16 == 0:
                extents = (elements, input_size[2], h, d, batch)
                box = (elements, width, rows, slots, 1)
            else:
                extents = (elements * input_size[2], h, d, batch, 1)
                box = (elements * width, rows, slots, 1, 1)
        strides = tuple(eb * math.prod(extents[:i]) for i in range(1, 5))
        return TensorMap("target", element, extents, strides, box)

    # ------------------------------------------------------------ cost

    def cost(self, batch: int, input_size: Sequence[int], gpu: Gpu) -> float:
        """Estimated cycles of one call."""
        t, p, g = self.tile, self.problem, self.problem.geometry
        eb, cells = p.element_bytes, math.prod(input_size)
        rounds, sharing = ampere_patch.spread(
            div_up(cells, t.cells) * batch, self.blocks, t.resident, gpu
        )
        rounds *= sharing
        rates = _FORWARD if p.forward else _GRADIENT
        chunks = self.split_chunks
        products = 4 * chunks * t.blocks * t.consumers * t.passes
        matrix = products * t.product_columns / 2 * rates.product
        issue = products * 4 * rates.fragment + chunks * t.passes * rates.chunk
        if self.parts > 1:
            issue += products / 2 * t.product_columns / 2 * _ADDED
            matrix *= 3
        stores = t.cells * t.columns * eb / rates.stores
        if t.ping_pong:
            stores *= 1 - _PING_PONG
        if p.forward and p.target_channels_last and not t.staged:
            # Lanes store what neighbouring channels they have, 16 bytes at best.
            lane = 2 * ampere_patch.interleave(p)
            few = lane if p.target_channels % lane == 0 else 2 - p.target_channels % 2
            stores *= 16 / (few * eb)
        weights = chunks * self.weight_part_bytes * (sharing if t.keep_weights else rounds)
        traffic = (rounds * t.cells * chunks * 128 + weights) / rates.l2
        transposed = 0.0
        if self.transposed:
            transposers, rate = 4 * t.fillers - t.consumers, _TRANSPOSE_BYTES[eb]
            if not t.keep_weights:
                transposers = min(transposers, self.weight_part_bytes // (32 * self.weight_box_row))
            if self.parts > 1:
                rate *= _SPLIT_TRANSPOSES
            transposed = weights / (rate * transposers)
        # Other blocks of columns find most of the source in L2.
        source = p.source_channels * (1.0 if p.forward else math.prod(g.stride))
        source *= 1 + 0.1 * (self.column_tiles - 1)
        volumes = g.groups * (source + self.columns) * cells * batch
        memory = volumes * eb / (rates.memory * gpu.multiprocessors)
        memory /= _STAGED_MEMORY if p.forward and t.staged else 1.0
        every = (rounds * (matrix + issue + stores), traffic, transposed, memory)
        longest = math.fsum(n**rates.power for n in every) ** (1 / rates.power)
        # Few blocks of cells on their way.
        blocks = t.consumers * t.blocks * t.source_stages * t.resident
        shallow = max(0, _DEEP - blocks)
        if p.forward and self.parts == 1 and rounds > _FEW_ROUNDS:
            shallow = max(shallow, _STEADY_STAGES - t.source_stages)
        longest *= 1 + 0.015 * shallow
        if self.transposed and self.parts == 1 and not t.keep_weights:
            longest *= 1 + _STREAMED
        adding = 0.0
        if t.splits > t.cluster:
            partial = 4.0 * t.splits * batch * g.in_channels * cells
            adding = partial / (_ADD_BYTES * gpu.multiprocessors)
        elif t.cluster > 1:
            adding = 4.0 * t.cells * t.columns / _CLUSTER_BYTES
        if self.parts > 1 and t.staged:
            longest *= _SPLIT_STAGED
        return rates.call + longest + adding

    def _ways(self) -> list[str]:
        t = self.tile
        return [
            *([f"{t.fillers} warpgroups fill"] if t.fillers > 1 else []),
            *(["stored by TMA"] if t.staged else []),
            *(["weights as they are"] if t.n_major else []),
            *(["ping_pong"] if t.ping_pong else []),
        ]

    def describe(self) -> dict[str, str]:
        t = self.tile
        return {
            "kernel": "patch (kernel == stride), wgmma",
            "tile": f"{t.cells} cells x {t.columns} columns",
            "unit": f"{self.run} cells, {ampere_patch.interleave(self.problem)} fragments a lane"
            + (f", {t.buffers} boxes of {t.staged} columns" if t.staged else ""),
            "warps": f"{t.consumers} consumers of {t.blocks} blocks, {t.passes} passes",
            "pipeline": f"{t.source_stages} stages of {128 // self.problem.element_bytes} of k, "
            + ("weights stay" if t.keep_weights else f"{t.weight_stages} stages of weights")
            + f", {t.resident} CTAs a multiprocessor"
            + (f", {t.splits} splits" if t.splits > 1 else "")
            + (" of a cluster" if t.cluster > 1 else "")
            + (", " + " ".join(self._ways()) if self._ways() else ""),
            "shared memory": f"{self.shared_bytes} bytes",
        }


def _columns(problem: Problem) -> int:
    slots = math.prod(problem.geometry.stride) if problem.forward else 1
    return problem.target_channels * slots


def _chunks(problem: Problem) -> int:
    """Pieces of 128 bytes of k."""
    slots = 1 if problem.forward else math.prod(problem.geometry.stride)
    return div_up(problem.source_channels * slots * problem.element_bytes, 128)


def _box(problem: Problem, fold: bool) -> tuple[int, int, int] | None:
    """Slots of H, slots of D and channels in 128 bytes of the weight, where these are a box."""
    stride0, stride1, stride2 = problem.geometry.stride
    words = stride2 * problem.element_bytes * (stride1 if fold else 1)
    if words not in (4, 8, 16) or stride2 * problem.element_bytes % 4:
        return None
    lines, slots1 = 128 // words, 1 if fold else stride1
    box1 = min(lines, slots1)
    box0 = min(lines // box1, stride0)
    channels = lines // (box0 * box1)
    whole = box0 * box1 * channels == lines and slots1 % box1 == 0 and stride0 % box0 == 0
    if not whole or (channels > 1 and box0 * box1 != stride0 * slots1):
        return None
    return None if box0 > 1 and box1 != slots1 else (box1, box0, channels)


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why patch/kernel.cu cannot take a problem, or None."""
    if gpu.capability[0] != 9:
        return "wgmma needs compute capability 9.0"
    if problem.operation == "grad_weight":
        return "patch/kernel.cu has no gradient by weight"
    cell_bytes = problem.geometry.stride[2] * problem.element_bytes
    last = problem.source_channels_last
    if not problem.forward and not last and cell_bytes not in (4, 8, 16):
        return f"{cell_bytes} bytes of slots along W are no word, pair or quad of words"
    if problem.arithmetic is Arithmetic.IEEE and (last or not problem.forward):
        return "patch/kernel.cu has IEEE-grade products of contiguous forward passes only"
    if last != problem.target_channels_last:
        return "patch/kernel.cu needs activations of one layout"
    if last and problem.source_channels * problem.element_bytes % 16:
        return "channels of a group are no multiple of 16 bytes"
    depth = problem.source_channels * (1 if problem.forward else math.prod(problem.geometry.stride))
    if depth < _MIN_DEPTH or _columns(problem) < _MIN_COLUMNS:
        return "too few channels fill a product of wgmma"
    if reason := ampere_patch.refusal(problem):
        return reason
    if not problem.forward and last:
        if problem.geometry.groups > 1:
            return "channels_last gradients have no groups"
        row = problem.geometry.stride[2] * problem.source_channels * problem.element_bytes
        if row % 128 or problem.target_channels * problem.element_bytes % 16:
            return "slots along W of a row are no multiple of 128 bytes"
        if problem.geometry.stride[1] > 8:
            return "TMA steps over 8 rows at most"
    elif not problem.forward:
        if _box(problem, False) is None:
            return "the slots of 128 bytes of the weight's k are no box"
        depth_bytes = depth * problem.element_bytes
        if problem.geometry.groups > 1 and depth_bytes % 128:
            return "groups of the output gradient must be whole chunks of k"
        if depth_bytes % 16:
            return "rows of the weight are no multiple of 16 bytes"
    return None


def _candidates(
    problem: Problem, batch: int, size: Sequence[int], gpu: Gpu
) -> Iterator[WgmmaPatchPlan]:
    group, columns = 8 * ampere_patch.interleave(problem), _columns(problem)
    rows = problem.source_channels_last and not problem.forward
    staged = 128 // problem.element_bytes if rows else 0
    widths = sorted({round_up(div_up(columns, n), staged or group) for n in range(1, 65)})
    _, stride1, stride2 = problem.geometry.stride
    row = size[2] * stride2 * problem.element_bytes
    last = problem.source_channels_last
    short = not problem.forward and not last and row < 128 and stride1 > 1 and size[2] % 4 == 0
    folds = short and 128 % (row * stride1) == 0 and _box(problem, True) is not None
    fold = size[2] if folds else 0
    most_accumulators = _MAX_ACCUMULATORS[problem.words_per_value]
    for width, blocks, consumers in itertools.product(widths, (1, 2), (1, 2, 3)):
        if width > 256 or blocks * width // 2 > most_accumulators:
            continue
        if last and blocks > 1:
            continue
        most = div_up(columns, width)
        for passes in sorted({1, 2, 4, most}):
            if passes > most or div_up(most, passes) > _MAX_COLUMN_TILES:
                continue
            # Alone, one consumer would leave the tensor core idle while it stores.
            resident = 2 if consumers == 1 else 1
            tile = Tile(
                consumers, blocks, width, passes, 2, 2, False, resident, fold=fold, staged=staged
            )
            base = WgmmaPatchPlan(problem, tile, gpu)
            if _natural(base):
                base = replace(base, tile=(tile := replace(tile, n_major=True)))
            if staged and not base.boxed(size):
                continue
            tiles = div_up(math.prod(size), tile.cells) * batch
            rounds = tiles * base.blocks / (gpu.multiprocessors * resident)
            for splits in _splits(base, batch, size, gpu):
                yield from _with_rings(replace(base, tile=replace(tile, splits=splits)), rounds)
                if splits in _CLUSTERS and not last:
                    clustered = replace(tile, splits=splits, cluster=splits)
                    yield from _with_rings(replace(base, tile=clustered), rounds)
            for other in _other_ways(base, size, rounds):
                yield from _with_rings(replace(base, tile=other), rounds)


def _other_ways(base: WgmmaPatchPlan, size: Sequence[int], rounds: float) -> Iterator[Tile]:
    """The same products with more warps that turn weights, or stored as boxes.

    `rounds`: tiles that a CTA walks over, in the mean.
    """
    p, t = base.problem, base.tile
    if not p.forward:
        return
    box = _staged(base) if base.boxed(size) else 0
    if p.source_channels_last:
        # Lanes have 16 bytes of most outputs.
        if box and (p.target_channels % 8 or ampere_patch.interleave(p) == 1):
            yield replace(t, staged=box)
        return
    if p.element_bytes == 2:
        return
    # 512 threads are launched with 128 registers: ptxas refuses products of more columns.
    # Of split products many rounds were not tried.
    transposers = rounds <= _FEW_ROUNDS or base.parts == 1
    transposers = transposers and t.consumers == 2 and t.product_columns <= 192
    if transposers and base.map_weights:
        yield replace(t, fillers=2)
    if box:
        yield replace(t, staged=box)


def _natural(base: WgmmaPatchPlan) -> bool:
    """Whether products take the forward weights as memory has them."""
    p, t = base.problem, base.tile
    return (
        p.forward
        and p.element_bytes == 2
        and base.map_weights
        and ampere_patch.interleave(p) == (4 if p.source_channels_last else 1)
        and (t.passes == 1 or t.product_columns % 64 == 0)
    )


def _staged(base: WgmmaPatchPlan) -> int:
    """Columns that a box of outputs may have: whole channels of a product; 0: none."""
    p, t = base.problem, base.tile
    slots = math.prod(p.geometry.stride)
    if p.target_channels_last:
        box = base.columns // p.geometry.stride[0]
        if p.geometry.groups > 1 or base.row_elements * p.element_bytes % 4:
            return 0
    else:
        box = slots
        if p.geometry.groups > 1 and (
            base.columns % t.columns or p.source_channels % base.chunk_lines
        ):
            return 0
    whole = math.lcm(box, 8 * ampere_patch.interleave(p))
    most = (20480 if p.target_channels_last else 16384) // (64 * t.blocks * p.element_bytes)
    fitting = [
        n
        for n in range(whole, min(t.product_columns, most) + 1, whole)
        if t.product_columns % n == 0
    ]
    # channels_last boxes are rows of the target, however few slots of D they have.
    return (min if p.target_channels_last else max)(fitting, default=0)


def _splits(base: WgmmaPatchPlan, batch: int, size: Sequence[int], gpu: Gpu) -> list[int]:
    """CTAs that may share a tile's chunks: more than one only where the GPU is not full."""
    if base.problem.forward or base.tile.passes > 1 or base.tile.staged:
        return [1]
    cells = math.prod(size)
    tiles = div_up(cells, base.tile.cells) * batch * base.blocks
    partial = 4 * batch * cells * base.problem.geometry.in_channels
    return [1] + [
        n
        for n in _SPLITS
        if n * tiles <= gpu.multiprocessors * base.tile.resident
        and n * partial <= _WORKSPACE_BYTES
        and (n - 1) * div_up(base.chunks, n) < base.chunks
    ]


def _with_rings(base: WgmmaPatchPlan, rounds: float) -> Iterator[WgmmaPatchPlan]:
    """Weights that stay, and those that are streamed, each with the deepest source rings.

    `rounds`: tiles that a CTA walks over, in the mean.
    """
    t, gpu, chunks = base.tile, base.gpu, base.split_chunks
    # Gradients became slower by it, several passes too; the only tile of a CTA has nothing to stay
    # apart for.
    ping_pongs = t.consumers == 2 and t.passes == 1 and base.parts == 1
    ping_pongs = ping_pongs and base.problem.forward and not base.problem.source_channels_last
    whole = base.problem.source_channels / base.chunk_lines
    long = whole >= _MIN_PING_PONG_WHOLE and whole * rounds >= _MIN_PING_PONG_IN_ALL
    ping_pongs = ping_pongs and rounds > 1 and (chunks >= _MIN_PING_PONG or long)
    ping_pongs = ping_pongs and chunks <= _MOST_PING_PONG * rounds
    room = min(gpu.shared_per_block, gpu.shared_per_multiprocessor // t.resident - 1024)
    streams = (4, 3) if base.problem.forward else (6, 4)
    rings = [(chunks, True)] if t.splits == 1 else []
    rings += [(n, False) for n in streams if n < base.chunks and t.passes == 1]
    deepest = 0  # source ring of streamed weights; fewer weight stages only make room for more
    for weight_stages, keep in rings:
        for stages in (6, 5, 4, 3, 2) if keep else (6, 4, 3, 2):
            tile = replace(
                t,
                source_stages=stages,
                weight_stages=weight_stages,
                keep_weights=keep,
                ping_pong=keep and ping_pongs,
            )
            plan = replace(base, tile=tile)
            if (t.passes > 1 and stages < chunks) or (not keep and stages <= deepest):
                break
            if t.cluster > 1 and t.product_columns > 32 * stages:
                continue  # sums take the place of source stages
            if plan.shared_bytes <= room and plan.registers <= plan.consumer_registers:
                deepest = deepest if keep else stages
                yield plan
                break


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, WgmmaPatchPlan]]:
    """Candidates for these input extents with their costs, cheapest first."""
    if refusal(problem, gpu) is not None:
        return []
    found = [
        (plan.cost(batch, input_size, gpu), plan)
        for plan in _candidates(problem, batch, input_size, gpu)
        if plan.takes(input_size)
    ]
    return sorted(found, key=lambda item: item[0])
