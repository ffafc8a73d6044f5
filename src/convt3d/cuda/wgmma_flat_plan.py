"""Plans of ``wgmma_flat.cu``: kernel == stride without padding on warpgroup products.

The numbers mirror ``wgmma_flat_config.cuh``. The cost model counts, for one multiprocessor, matrix
steps, bytes from L2 and from memory, and instructions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from convt3d.cuda import flat_plan
from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.direct_plan import WEIGHT_STRIDES
from convt3d.cuda.schedule import (
    Gpu,
    Launch,
    Problem,
    Schedule,
    TensorMap,
    div_up,
    macros,
    representatives,
    round_up,
)
from convt3d.precision import Arithmetic

_MAX_ACCUMULATORS = 160
_MAX_COLUMN_TILES = 64
_PRODUCER_REGISTERS = 104
_MIN_DEPTH, _MIN_COLUMNS = 16, 8
# Cycles of a call, fitted to 120 timed plans of five layers on an H200 (within 15%): what any call
# takes; shares of the tensor core, of the stores and of memory that nothing else hides; for a piece
# of k of a pass, and for a fragment. Bytes a cycle for one multiprocessor of stores and of memory.
_CALL_CYCLES = 15000.0
_MATRIX_SHARE = 0.29 * 0.53  # of a product for each of its columns
_STORE_SHARE, _STORE_BYTES = 0.5, 24.0
_MEMORY_SHARE, _MEMORY_BYTES = 0.63, 18.0
_CHUNK_CYCLES = 54.0
_FRAGMENT_CYCLES = 5.4
# Bytes of weights a cycle that a warp turns: forward by the bytes of an element, in the gradient.
_TURN_BYTES = {4: 1.7, 2: 2.8}
_COPY_BYTES = 0.18
_MAPPED = {
    Arithmetic.TF32: "tfloat32",
    Arithmetic.F16: "float16",
    Arithmetic.BF16: "bfloat16",
}


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

    @property
    def cells(self) -> int:
        """Input positions of one tile."""
        return 64 * self.blocks * self.consumers

    @property
    def columns(self) -> int:
        return self.product_columns * self.passes

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)


@dataclass(frozen=True)
class WgmmaFlatPlan:
    """A kernel == stride product of one problem.

    Cells come by TMA: where the volume of a channel is no multiple of 16 bytes (in the gradient, a
    row of the output gradient no multiple of 128 bytes), ``flat.cu`` runs.
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
        return 1 if self.problem.forward else self.problem.geometry.stride[2]

    @property
    def chunk_channels(self) -> int:
        return 128 // (self.problem.element_bytes * self.width)

    @property
    def chunks(self) -> int:
        return _chunks(self.problem)

    @property
    def run(self) -> int:
        """Neighbouring cells that a lane holds, so that their outputs make one 16-byte piece."""
        eb = self.problem.element_bytes
        if self.problem.source_channels_last:
            return 1
        width = self.problem.geometry.stride[2] if self.problem.forward else 1
        run = 4 if width % 2 else max(1, 16 // (eb * width))
        return min(max(run, 4 // eb), 4, 2 * self.tile.blocks)

    @property
    def column_tiles(self) -> int:
        return div_up(self.columns, self.tile.columns)

    @property
    def unit_window(self) -> int:
        """Units of weights that a warp has in flight; a lane holds 8, 16 or 32 words of each."""
        if not self.problem.forward:
            return 6
        return 3 if self.problem.element_bytes == 4 else 2

    @property
    def consumer_registers(self) -> int:
        """Of each thread; with one consumer all threads keep what they are launched with."""
        t = self.tile
        launched = min(255, 65536 // (t.resident * t.threads)) // 8 * 8  # of every thread
        if t.consumers == 1:
            return launched
        budget = launched * (t.consumers + 1) - _PRODUCER_REGISTERS
        return min(240, budget // t.consumers // 8 * 8)

    @property
    def shared_bytes(self) -> int:
        t = self.tile
        source = t.consumers * t.source_stages * t.blocks * 8192
        weights = t.weight_stages * t.columns * 128
        return 1024 + source + weights + 16 * (t.consumers * t.source_stages + t.weight_stages)

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
            interleave=flat_plan.interleave(p),
            source_stages=t.source_stages,
            weight_stages=t.weight_stages,
            keep_weights=t.keep_weights,
            unit_window=self.unit_window,
            resident=t.resident,
            set_registers=t.consumers > 1,
            consumer_registers=self.consumer_registers,
            producer_registers=_PRODUCER_REGISTERS,
            shared_bytes=self.shared_bytes,
        )

    @property
    def blocks(self) -> int:
        """CTAs that share a tile of cells."""
        return self.column_tiles * self.problem.geometry.groups

    @property
    def most_workers(self) -> int:
        """CTAs that walk over the tiles of one block of columns, at most."""
        return max(1, self.gpu.multiprocessors * self.tile.resident // self.blocks)

    def mapped(self, input_size: Sequence[int]) -> bool:
        """Whether TMA can bring the source of these extents."""
        eb = self.problem.element_bytes
        if self.problem.source_channels_last:
            return True
        if self.problem.forward:
            return math.prod(input_size) * eb % 16 == 0
        return input_size[2] * self.width * eb % 128 == 0

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        if not self.mapped(input_size):
            other = _otherwise(self.problem, batch, tuple(input_size), self.gpu)
            return other.schedule(batch, input_size)
        per_sample = div_up(math.prod(input_size), self.tile.cells)
        tiles = per_sample * batch
        workers = min(tiles, self.most_workers)
        launch = Launch(
            KernelSpec("wgmma_flat.cu", "convt3d_wgmma_flat", self.macros),
            workers * self.blocks,
            self.tile.threads,
            self.shared_bytes,
            (
                *("weight", "bias", "target", self._source_map(batch, input_size)),
                *map(np.int32, (*input_size, per_sample, tiles, workers)),
                *WEIGHT_STRIDES,
            ),
        )
        return Schedule((launch,))

    def _source_map(self, batch: int, input_size: Sequence[int]) -> TensorMap:
        """Boxes of 128 bytes of cells, of (cells, channels of a group, groups, samples).

        Of channels_last sources boxes of 64 cells by 128 bytes of channels; of the output gradient
        parts of its rows.
        """
        p, eb = self.problem, self.problem.element_bytes
        if not p.forward:
            d, h, w = p.geometry.output_size(input_size)
            channels = p.geometry.out_channels
            return TensorMap(
                "source",
                _MAPPED[p.arithmetic],
                (w, h, d, channels, batch),
                tuple(n * eb for n in (w, w * h, w * h * d, w * h * d * channels)),
                (128 // eb, 1, 1, self.chunk_channels, 1),
                128,
            )
        volume = math.prod(input_size)
        channels, groups = p.source_channels, p.geometry.groups
        if p.source_channels_last:
            return TensorMap(
                "source",
                _MAPPED[p.arithmetic],
                (channels, groups, volume, batch),
                tuple(channels * eb * n for n in (1, groups, groups * volume)),
                (self.chunk_channels, 1, 64 * self.tile.blocks, 1),
                128,
            )
        return TensorMap(
            "source",
            _MAPPED[p.arithmetic],
            (volume, channels, groups, batch),
            tuple(volume * eb * n for n in (1, channels, channels * groups)),
            (128 // eb, self.chunk_channels, 1, 1),
            128,
        )

    # ------------------------------------------------------------ cost

    def cost(self, batch: int, input_size: Sequence[int], gpu: Gpu) -> float:
        """Estimated cycles of one call."""
        t, p, g = self.tile, self.problem, self.problem.geometry
        eb, cells = p.element_bytes, math.prod(input_size)
        tiles = div_up(cells, t.cells) * batch
        workers = min(tiles, self.most_workers)
        ctas = workers * self.blocks
        waves = div_up(ctas, gpu.multiprocessors * t.resident)
        sharing = min(t.resident, div_up(ctas, gpu.multiprocessors))
        rounds = div_up(tiles, workers) * waves * sharing
        products = 4 * self.chunks * t.blocks * t.consumers * t.passes
        each = products * (t.product_columns * _MATRIX_SHARE + 4 * _FRAGMENT_CYCLES)
        each += self.chunks * t.passes * _CHUNK_CYCLES
        each += t.cells * t.columns * eb / _STORE_BYTES * _STORE_SHARE
        turners = 4 - t.consumers + (4 * t.consumers if t.keep_weights else 0)
        weights = t.columns * self.chunks * 128 / turners
        weights /= _TURN_BYTES[eb] if p.forward else _COPY_BYTES
        # Other blocks of columns find most of the source in L2.
        source = p.source_channels * (1.0 if p.forward else math.prod(g.stride))
        source *= 1 + 0.1 * (self.column_tiles - 1)
        volumes = g.groups * (source + self.columns) * cells * batch
        memory = volumes * eb / (_MEMORY_BYTES * gpu.multiprocessors) * _MEMORY_SHARE
        once = weights * sharing if t.keep_weights else max(0.0, weights - each) * rounds
        return _CALL_CYCLES + once + rounds * each + memory

    def describe(self) -> dict[str, str]:
        t = self.tile
        return {
            "kernel": "flat (kernel == stride), wgmma",
            "tile": f"{t.cells} cells x {t.columns} columns",
            "unit": f"{self.run} cells, {flat_plan.interleave(self.problem)} fragments a lane",
            "warps": f"{t.consumers} consumers of {t.blocks} blocks, {t.passes} passes",
            "pipeline": f"{t.source_stages} stages of {self.chunk_channels} of k, "
            + ("weights stay" if t.keep_weights else f"{t.weight_stages} stages of weights")
            + f", {t.resident} CTAs a multiprocessor",
            "shared memory": f"{self.shared_bytes} bytes",
        }


@functools.lru_cache(maxsize=256)
def _otherwise(
    problem: Problem, batch: int, input_size: tuple[int, ...], gpu: Gpu
) -> flat_plan.FlatPlan:
    return flat_plan.ranked(problem, batch, input_size, gpu)[0]


def _columns(problem: Problem) -> int:
    slots = math.prod(problem.geometry.stride) if problem.forward else 1
    return problem.target_channels * slots


def _chunks(problem: Problem) -> int:
    """Pieces of 128 bytes of k: channels, or the slots along W of some channels."""
    p, stride = problem, problem.geometry.stride
    if p.forward:
        return div_up(p.source_channels * p.element_bytes, 128)
    return div_up(p.source_channels * stride[2] * p.element_bytes, 128) * stride[0] * stride[1]


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why wgmma_flat.cu cannot take a problem, or None."""
    if gpu.capability[0] != 9:
        return "wgmma needs compute capability 9.0"
    if problem.operation == "grad_weight":
        return "wgmma_flat.cu has no gradient by weight"
    cell_bytes = problem.geometry.stride[2] * problem.element_bytes
    if not problem.forward and cell_bytes not in (4, 8, 16):
        return f"{cell_bytes} bytes of slots along W are no word, pair or quad of words"
    if problem.arithmetic not in _MAPPED:
        return "wgmma_flat.cu has no IEEE-grade products"
    last = problem.source_channels_last
    if last != problem.target_channels_last or (last and not problem.forward):
        return (
            "wgmma_flat.cu needs contiguous activations, or both channels_last in the forward pass"
        )
    if last and problem.source_channels * problem.element_bytes % 16:
        return "channels of a group are no multiple of 16 bytes"
    depth = problem.source_channels * (1 if problem.forward else math.prod(problem.geometry.stride))
    if depth < _MIN_DEPTH or _columns(problem) < _MIN_COLUMNS:
        return "too few channels fill a product of wgmma"
    whole = problem.source_channels * cell_bytes % 128 == 0
    if not problem.forward and problem.geometry.groups > 1 and not whole:
        return "groups of the output gradient must be whole chunks of channels"
    return flat_plan.refusal(problem)


def _candidates(problem: Problem, gpu: Gpu) -> Iterator[WgmmaFlatPlan]:
    group, columns = 8 * flat_plan.interleave(problem), _columns(problem)
    widths = sorted({round_up(div_up(columns, n), group) for n in range(1, 65)})
    for width, blocks, consumers in itertools.product(widths, (1, 2), (1, 2, 3)):
        if width > 256 or blocks * width // 2 > _MAX_ACCUMULATORS:
            continue
        if problem.source_channels_last and blocks > 1:
            continue
        most = div_up(columns, width)
        for passes in sorted({1, 2, 4, most}):
            if passes > most or div_up(most, passes) > _MAX_COLUMN_TILES:
                continue
            # Alone, one consumer would leave the tensor core idle while it stores.
            resident = 2 if consumers == 1 else 1
            yield from _with_rings(problem, gpu, width, blocks, consumers, passes, resident)


def _with_rings(
    problem: Problem,
    gpu: Gpu,
    width: int,
    blocks: int,
    consumers: int,
    passes: int,
    resident: int,
) -> Iterator[WgmmaFlatPlan]:
    """Weights that stay, and those that are streamed, each with the deepest source rings."""
    room = min(gpu.shared_per_block, gpu.shared_per_multiprocessor // resident - 1024)
    chunks = _chunks(problem)
    rings = [(chunks, True)] + [(n, False) for n in (3, 4) if n < chunks and passes == 1]
    for weight_stages, keep in rings:
        for stages in (6, 4, 3, 2):
            tile = Tile(consumers, blocks, width, passes, stages, weight_stages, keep, resident)
            plan = WgmmaFlatPlan(problem, tile, gpu)
            if passes > 1 and stages < chunks:
                break
            # Accumulators, fragments of two buffers, addresses.
            registers = blocks * (width // 2 + 16) + 36
            if plan.shared_bytes <= room and registers <= plan.consumer_registers:
                yield plan
                break


def ranked(
    problem: Problem, batch: int, input_size: Sequence[int], gpu: Gpu
) -> list[WgmmaFlatPlan]:
    """Candidates for input extents of a class, cheapest first by the cost model."""
    if refusal(problem, gpu) is not None:
        return []
    size = representatives(input_size)
    # Large extents are mostly multiples of 16.
    typical = tuple(round_up(n, 16) if n > 32 else n for n in size)
    found = [
        (plan.cost(batch, size, gpu), plan)
        for plan in _candidates(problem, gpu)
        if plan.mapped(typical)
    ]
    found.sort(key=lambda item: item[0])
    return [plan for _, plan in found]
