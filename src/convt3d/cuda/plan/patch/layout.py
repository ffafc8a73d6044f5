"""What a patch kernel multiplies, and where it keeps that. Mirrors ``patch/config.cuh``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from convt3d.cuda.plan.cells import CellProduct
from convt3d.cuda.plan.warpgroups import consumer_registers
from convt3d.cuda.schedule import Problem, div_up, round_up

# Of each thread that fills, by warpgroups of them.
_PRODUCER_REGISTERS = {1: 104, 2: 56}
_FEW_PRODUCER_REGISTERS = 72
_BUFFERS = 2  # of staged outputs, of each consumer
_MOST_OUTSIDE = 1.25  # rows of boxes for each row along H


@dataclass(frozen=True)
class Tile:
    """The compile-time choices of a product."""

    consumers: int  # warpgroups
    blocks: int  # of 64 cells of a consumer
    columns: int  # of a product
    source_stages: int  # of each consumer
    weight_stages: int
    keep_weights: bool  # all weights of a CTA's columns stay in shared memory
    resident: int = 1  # CTAs that share a multiprocessor
    splits: int = 1  # CTAs that share the chunks of a tile
    fold: int = 0  # cells of a row, where several rows of the output gradient make 128 bytes
    fillers: int = 1  # warpgroups that bring cells and weights
    staged: int = 0  # columns that leave as one box at a time; 0: from the accumulators
    n_major: bool = False  # products take weights as memory has them
    ping_pong: bool = False  # consumers begin one after another

    @property
    def cells(self) -> int:
        """Input positions of one tile."""
        return 64 * self.blocks * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + self.fillers)


@dataclass(frozen=True)
class PatchLayout(CellProduct):
    """A kernel == stride product of one problem, its registers, shared memory and boxes."""

    tile: Tile

    @property
    def folded(self) -> int:
        """Rows along H of the output gradient that make one row of a box."""
        return self.problem.geometry.stride[1] if self.tile.fold else 1

    @property
    def chunk_lines(self) -> int:
        return 128 // (self.problem.element_bytes * self.width * self.folded)

    @property
    def chunks(self) -> int:
        """Pieces of 128 bytes of k."""
        return div_up(self.depth * self.problem.element_bytes, 128)

    @property
    def split_chunks(self) -> int:
        return div_up(self.chunks, self.tile.splits)

    @property
    def run(self) -> int:
        """Neighbouring cells that a lane holds, so that their outputs make one 16-byte piece."""
        eb = self.problem.element_bytes
        if self.problem.source_channels_last:
            return 1
        if not self.channel_lines:
            words = self.width * self.folded * eb // 4
            return {1: 2 * self.tile.blocks, 2: 2, 4: 1}[words]
        width = self.problem.geometry.stride[2]
        run = 4 if width % 2 else max(1, 16 // (eb * width))
        return min(max(run, 4 // eb), 4, 2 * self.tile.blocks)

    @property
    def map_weights(self) -> bool:
        """Whether TMA can bring the weight where it is in its usual order."""
        p = self.problem
        if not p.forward:
            return True
        whole = 128 // p.element_bytes % (8 * self.interleave) == 0
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
        return 64 if narrow and 64 // eb % (8 * self.interleave) == 0 else 128

    @property
    def consumer_registers(self) -> int:
        """Of each thread; with one consumer all threads keep what they are launched with."""
        t = self.tile
        if t.consumers == 1:
            return min(255, 65536 // (t.resident * t.threads)) // 8 * 8
        return consumer_registers(t.threads, t.consumers, self.producer_registers, t.resident)

    @property
    def producer_registers(self) -> int:
        """Of each thread that fills. Wide products of two parts leave them few."""
        if self.parts > 1 and self.tile.fillers == 1 and self.tile.columns >= 128:
            return _FEW_PRODUCER_REGISTERS
        return _PRODUCER_REGISTERS[self.tile.fillers]

    @property
    def registers(self) -> int:
        """Of a thread that multiplies: accumulators, fragments of two buffers, addresses."""
        t = self.tile
        return t.blocks * (self.parts * t.columns // 2 + 16) + 36

    @property
    def hold_bias(self) -> bool:
        """Whether the bias of a CTA's columns stays in registers; of split products alone."""
        t = self.tile
        held = t.columns // 4
        return self.parts > 1 and self.registers + held <= self.consumer_registers

    @property
    def shared_bytes(self) -> int:
        t = self.tile
        source = t.consumers * t.source_stages * t.blocks * 8192
        weights = t.weight_stages * self.weight_stage_bytes
        staging = t.consumers * _BUFFERS * t.staged * 64 * t.blocks * self.problem.element_bytes
        bias = round_up(4 * t.columns, 16) if self.problem.forward else 0
        transposed = 8 * t.weight_stages if self.transposed else 0
        barriers = 16 * (t.consumers * t.source_stages + t.weight_stages) + transposed
        barriers += 8 * (t.consumers - 1) if t.ping_pong else 0
        return 1024 + source + weights + staging + bias + barriers

    # ------------------------------------------------------------ boxes of cells

    def mapped(self, input_size: Sequence[int]) -> bool:
        """Whether TMA can bring the source of these extents."""
        eb = self.problem.element_bytes
        if self.problem.source_channels_last:
            return True
        if self.channel_lines:
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

    @property
    def block_cells(self) -> int:
        """Cells of a consumer's tile."""
        return 64 * self.tile.blocks

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


def weight_box(problem: Problem, fold: bool) -> tuple[int, int, int] | None:
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
