"""Plans of ``ampere/patch``: kernel == stride without padding, forward and gradient by input.

The numbers mirror ``ampere/patch/config.cuh``. The cost model counts, for one multiprocessor, bytes
from memory and from L2, matrix steps, shared-memory traffic and instructions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.cells import CellProduct, interleave
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.rates import L2_BYTES, MEMORY_BYTES, STEP_CYCLES
from convt3d.cuda.plan.search import by_cost, with_tile
from convt3d.cuda.schedule import (
    WEIGHT_STRIDES,
    Gpu,
    Launch,
    Problem,
    Schedule,
    div_up,
    macros,
)
from convt3d.precision import Arithmetic

# Fragments interleave their columns at most so far.
_MAX_INTERLEAVE = 8
_MAX_ACCUMULATORS = 160
_SPLIT_RESIDENT = 2  # CTAs of a multiprocessor that splits may fill
# What few resident warps lose to latencies, and CTAs on their own to barriers and tiles' ends.
_FEW_WARPS = {4: 1.5, 8: 1.15}
_ALONE = 1.1
# Of any call; then of lines that start anywhere, over 174 plans of 30 layers of one tap whose
# volume is no multiple of 16 bytes: of eight copies of 2 bytes that a thread waits for, of a copy
# of 4 bytes, and of an output that is stored alone. Of a copy whose place takes divisions, for
# eight warps: over 35 plans of a layer of 8 taps.
_CALL = 7200.0
_AWAITED, _AWAITED_COPIES, _NARROW_COPY, _SINGLE_STORE = 870.0, 8, 5.0, 140.0
_DIVIDED_COPY = 250.0
# Cycles of a warp's store to a channels_last output, where four lanes write half a sector.
_HALF_SECTORS = 28.0


@dataclass(frozen=True)
class Tile:
    """The compile-time choices of a kernel == stride product."""

    warps_m: int
    warps_n: int
    fragments_m: int
    fragments_n: int
    chunk_lines: int
    stages: int
    keep_weights: bool  # all weights of a CTA's columns stay in shared memory
    resident: int  # CTAs that share a multiprocessor
    splits: int = 1  # CTAs that share the chunks of a tile

    @property
    def cells(self) -> int:
        """Input positions of one tile."""
        return 16 * self.warps_m * self.fragments_m

    @property
    def columns(self) -> int:
        return 8 * self.warps_n * self.fragments_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n


@dataclass(frozen=True)
class PatchPlan(CellProduct):
    """A kernel == stride product of one problem."""

    tile: Tile

    # ------------------------------------------------------------ the product
    # (ampere/patch/config.cuh)

    @property
    def per_word(self) -> int:
        return 4 // self.problem.element_bytes

    @property
    def target_width(self) -> int:
        p = self.problem
        return p.geometry.stride[2] if p.forward and not p.target_channels_last else 1

    @property
    def _unpaired(self) -> bool:
        last = self.problem.source_channels_last
        return not last and self.per_word == 2 and self.width % 2 == 1

    @property
    def width_words(self) -> int:
        last = self.problem.source_channels_last
        return 1 if self._unpaired or last else self.width // self.per_word

    @property
    def block_lines(self) -> int:
        if self.problem.source_channels_last or self._unpaired:
            return 8 * self.per_word
        return 4 if self.width_words % 2 == 0 else 8

    @once
    def run(self) -> int:
        """Neighbouring cells that a lane holds, so that their outputs make one 16-byte piece."""
        if self.problem.target_channels_last:
            return 2 if self._unpaired and self.width == 1 else 1
        width = self.target_width
        run = 4 if width % 2 else max(1, 16 // (self.problem.element_bytes * width))
        if self.width_words == 2 and self.problem.element_bytes == 4:
            run = 2  # four cells of two words would collide in the banks
        if self._unpaired and self.width == 1:
            run = max(run, 2)
        return min(run, 4, 2 * self.tile.fragments_m)

    @property
    def chunks(self) -> int:
        return div_up(self.depth // self.width, self.tile.chunk_lines)

    @property
    def sum_in_parts(self) -> bool:
        """Whether a sum is made of parts, which take as many registers."""
        ieee = self.problem.arithmetic is Arithmetic.IEEE
        return ieee and self.problem.forward and self.depth > 64

    @once
    def source_words(self) -> int:
        """Words of shared memory of one source chunk."""
        t = self.tile
        if self.problem.source_channels_last:
            return (t.chunk_lines // self.per_word + 4) * t.cells
        row = t.cells * self.width // self.per_word
        rest = 4 if self._unpaired or self.run * self.width_words == 16 else 8
        pitch = _pitch(row, rest, 16 if self._unpaired else 32)
        return pitch * t.chunk_lines

    @once
    def weight_words(self) -> int:
        """Words of shared memory of one weight chunk."""
        depth = self.tile.chunk_lines * self.width
        rows, row = (
            (depth, self.tile.columns) if self.problem.forward else (self.tile.columns, depth)
        )
        row //= self.per_word
        if self.problem.forward:
            rest, modulus = (8, 32) if self.per_word == 1 else (4, 16)
        else:
            rest, modulus = (8, 32) if self.width_words % 2 == 0 else (4, 8)
        return rows * _pitch(row, rest, modulus)

    @property
    def shared_bytes(self) -> int:
        split_chunks = div_up(self.chunks, self.tile.splits)
        buffers = split_chunks if self.tile.keep_weights else self.tile.stages
        return 4 * (self.tile.stages * self.source_words + buffers * self.weight_words)

    # ------------------------------------------------------------ launch

    @once
    def macros(self) -> tuple[tuple[str, str], ...]:
        t = self.tile
        return self.product_macros + macros(
            "CONVT3D_",
            warps_m=t.warps_m,
            warps_n=t.warps_n,
            fragments_m=t.fragments_m,
            fragments_n=t.fragments_n,
            run=self.run,
            interleave=self.interleave,
            chunk_lines=t.chunk_lines,
            stages=t.stages,
            keep_weights=t.keep_weights,
            resident=t.resident,
            splits=t.splits,
            shared_bytes=self.shared_bytes,
        )

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        per_sample = div_up(math.prod(input_size), self.tile.cells)
        tiles = per_sample * batch
        walkers = min(tiles, self.most_workers)
        launch = Launch(
            KernelSpec("ampere/patch/kernel.cu", "convt3d_ampere_patch", self.macros),
            walkers * self.blocks,
            self.tile.threads,
            self.shared_bytes,
            (
                *("source", "weight", "bias", "target" if self.tile.splits == 1 else "partial"),
                *map(np.int32, (*input_size, per_sample, tiles, walkers)),
                *WEIGHT_STRIDES,
            ),
        )
        if self.tile.splits == 1:
            return Schedule((launch,))
        return self.summed(launch, batch, input_size)

    # ------------------------------------------------------------ cost

    @once
    def _tile_cycles(self) -> tuple[float, float]:
        """Cycles of a multiprocessor for one tile: products, and the traffic of L2."""
        t, eb = self.tile, self.problem.element_bytes
        ieee = self.problem.arithmetic is Arithmetic.IEEE
        warps = t.warps_m * t.warps_n
        words = div_up(self.chunks, t.splits) * t.chunk_lines * self.width // self.per_word
        steps = words / 8 * warps
        matrix = steps * t.fragments_m * t.fragments_n * STEP_CYCLES * (3.5 if ieee else 1.0)
        fill = t.cells + (0 if t.keep_weights else t.columns)
        shared = steps * (4 * t.fragments_m + 2 * t.fragments_n) + fill * words / 32
        rounding = 0 if eb == 2 else 6 if ieee else 1
        issue = steps * (
            t.fragments_m * t.fragments_n * (7 if ieee else 1)
            + t.fragments_m * (4 / self.run + 4 * rounding)
            + t.fragments_n * (2 / self.interleave + 2 * rounding)
        )
        issue += fill * words / 128 * 8 + t.cells * t.columns * eb / 16 / 32 * 24 + 100 * warps
        return max(matrix, shared, issue / 4), fill * words * 4 / L2_BYTES

    @once
    def _store_cycles(self) -> float:
        """Cycles of a tile's stores, where these leave sectors of 32 bytes to be written twice."""
        p, t = self.problem, self.tile
        channels = 2 * self.interleave  # of a lane
        if not p.target_channels_last or 4 * channels * p.element_bytes >= 32:
            return 0.0
        return _HALF_SECTORS * t.cells * t.columns / (32 * channels)

    def _narrow_cycles(self, size: Sequence[int], sharing: int) -> float:
        """What a tile takes longer where each line of the source starts anywhere.

        ``sharing``: CTAs of a multiprocessor at a time.
        """
        t, eb = self.tile, self.problem.element_bytes
        line = math.prod(size) if self.channel_lines else size[2] * self.width
        if self.problem.source_channels_last or line * eb % 16 == 0:
            return 0.0
        elements = 2 if eb == 2 and line % 2 == 0 else 1
        copies = t.chunk_lines * t.cells * self.width / elements / t.threads  # of a chunk
        if elements * eb < 4:
            each = _AWAITED * math.ceil(copies / _AWAITED_COPIES)
        elif self.channel_lines:
            each = _NARROW_COPY * copies * sharing
        else:
            each = _DIVIDED_COPY * copies * sharing * t.threads / 256
        stores = _SINGLE_STORE * t.cells * t.columns / t.threads * sharing
        return div_up(self.chunks, t.splits) * each + stores

    def cost(self, batch: int, input_size: Sequence[int]) -> float:
        """Estimated cycles of one call."""
        t, p, g = self.tile, self.problem, self.problem.geometry
        cells = math.prod(input_size)
        rounds, sharing = self.spread(div_up(cells, t.cells) * batch)
        products, traffic = self._tile_cycles
        words = self.depth / self.per_word
        chunks = div_up(self.chunks, t.splits)
        latency = (900.0 / (t.stages - 1) + 60) * chunks
        each = max(products, traffic, self._store_cycles) + 0.25 * min(products, traffic)
        each = sharing * (each + 200 * chunks)
        each *= _FEW_WARPS.get(sharing * t.threads // 32, 1.0) * (_ALONE if sharing == 1 else 1.0)
        each = max(each, latency + 400)
        prologue = 1500.0 + (t.columns * words * 4 / L2_BYTES * sharing if t.keep_weights else 0)
        eb = p.element_bytes
        volumes = g.groups * (self.depth + self.columns) * cells * batch
        memory = volumes * eb / (MEMORY_BYTES * self.gpu.multiprocessors)
        # Deeper pipelines ride out more of what the model does not see.
        each *= 1 + 0.01 * max(0, 4 - t.stages)
        compute = rounds * (each + self._narrow_cycles(input_size, sharing))
        total = _CALL + prologue + max(compute, memory) + 0.3 * min(compute, memory)
        if t.splits > 1:
            partial = 4.0 * t.splits * self.partial_elements(batch, input_size)
            total += 4000 + 2 * partial / (L2_BYTES * self.gpu.multiprocessors)
        return total

    def describe(self) -> dict[str, str]:
        t = self.tile
        return {
            "kernel": "patch (kernel == stride), mma.sync",
            "tile": f"{t.cells} cells x {t.columns} columns",
            "unit": f"{self.run} cells, {self.interleave} fragments a lane",
            "warps": f"{t.warps_m} x {t.warps_n}, fragments {t.fragments_m} x {t.fragments_n}",
            "pipeline": f"{t.stages} stages of {t.chunk_lines * self.width} of k"
            + (", weights stay" if t.keep_weights else "")
            + f", {t.resident} CTAs a multiprocessor"
            + (f", {t.splits} splits" if t.splits > 1 else ""),
            "shared memory": f"{self.shared_bytes} bytes",
        }


def _pitch(row_words: int, rest: int, modulus: int) -> int:
    return row_words + (rest - row_words) % modulus


def refusal(problem: Problem) -> str | None:
    """Why ampere/patch/kernel.cu cannot take a problem, or None."""
    g = problem.geometry
    if problem.operation == "grad_weight":
        return "ampere/patch/kernel.cu has no gradient by weight"
    if g.kernel_size != g.stride or any(g.padding) or any(g.output_padding):
        return "ampere/patch/kernel.cu needs kernel == stride, no padding and no output padding"
    if any(d != 1 and k != 1 for d, k in zip(g.dilation, g.kernel_size, strict=True)):
        return "ampere/patch/kernel.cu needs dilation 1"
    if interleave(problem) > _MAX_INTERLEAVE:
        return f"stride {g.stride[2]} along W exceeds the columns that a lane holds"
    return None


_WARPS = ((4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4))
_MAX_BASES = 20
_MAX_PARTS = 20  # fragments whose sums are made of parts


def _bases(problem: Problem, gpu: Gpu) -> Iterator[PatchPlan]:
    """Warps and fragments, with a pipeline that always fits."""
    limit = _MAX_ACCUMULATORS // problem.words_per_value
    group = interleave(problem)
    for (warps_m, warps_n), fragments_m, groups in itertools.product(
        _WARPS, (1, 2, 4), (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
    ):
        if 4 * fragments_m * groups * group > limit and (groups, fragments_m) != (1, 1):
            continue
        tile = Tile(warps_m, warps_n, fragments_m, groups * group, 8, 2, False, 1)
        base = PatchPlan(problem, tile, gpu)
        if base.sum_in_parts and fragments_m * groups * group > _MAX_PARTS:
            continue
        if groups * warps_n > 1 and base.column_tiles * tile.columns * 4 > base.columns * 5:
            continue
        yield with_tile(base, chunk_lines=chunk_lines(base, 32))


def chunk_lines(plan: PatchPlan, words: int) -> int:
    """Lines of a chunk of about this many words of k: whole blocks, whole vectors of weights."""
    lines = max(1, round(words * plan.per_word / (plan.block_lines * plan.width)))
    lines *= plan.block_lines
    while lines * plan.width % 8:
        lines += plan.block_lines
    return lines


def _with_pipelines(
    base: PatchPlan, batch: int, size: Sequence[int], gpu: Gpu
) -> Iterator[PatchPlan]:
    """Pipelines of a base: chunks, stages, resident CTAs, and splits where the GPU is not full."""
    tile, problem = base.tile, base.problem
    ieee = problem.arithmetic is Arithmetic.IEEE
    registers = 4 * tile.fragments_m * tile.fragments_n + 44
    if base.sum_in_parts:
        registers += 4 * tile.fragments_m * tile.fragments_n + 8
    registers += (2 if ieee else 1) * (4 * tile.fragments_m + 2 * base.interleave)
    most = max(1, min(4, 65536 // (tile.threads * min(255, registers))))
    options = itertools.product(
        (16, 32, 64), (2, 3, 4, 6), (False, True), base.splits(batch, size, _SPLIT_RESIDENT)
    )
    for words, stages, keep, split in options:
        if words > 32 and base.sum_in_parts:
            continue  # their addresses would take the registers of parts
        lines = chunk_lines(base, words)
        chunks = div_up(base.depth // base.width, lines)
        if (split - 1) * div_up(chunks, split) >= chunks or (split > 1 and keep):
            continue
        for resident in range(1, most + 1):
            chosen = with_tile(
                base,
                chunk_lines=lines,
                stages=stages,
                keep_weights=keep,
                resident=resident,
                splits=split,
            )
            room = gpu.shared_for(resident)
            if chosen.shared_bytes <= room:
                yield chosen


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, PatchPlan]]:
    """Candidates for these input extents with their costs, cheapest first."""
    if refusal(problem) is not None:
        return []
    bases = sorted(
        _bases(problem, gpu),
        key=lambda base: min(
            with_tile(base, splits=n).cost(batch, input_size)
            for n in base.splits(batch, input_size, _SPLIT_RESIDENT)
        ),
    )
    return by_cost(
        (plan.cost(batch, input_size), plan)
        for base in bases[:_MAX_BASES]
        for plan in _with_pipelines(base, batch, input_size, gpu)
    )
