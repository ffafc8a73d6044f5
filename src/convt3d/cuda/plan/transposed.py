"""Plans of ``phases/kernel.cu`` whose boxes are transposed on their way to shared memory.

Warps of the producer's warpgroup load the source and store it as rows of 16 bytes, a quad of
channels each (``phases/transposed.cuh``), which fragments are loaded from without work on single
elements. Contiguous activations, forward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from convt3d.cuda.plan import banks
from convt3d.cuda.plan.axes import phased_axes
from convt3d.cuda.plan.banks import Four
from convt3d.cuda.plan.extents import even_cuts, near_cuts, tile_counts
from convt3d.cuda.plan.phases.candidates import MAX_PLANS, gathered, with_fragments
from convt3d.cuda.plan.phases.candidates import refusal as phases_refusal
from convt3d.cuda.plan.phases.cost import product_cycles, stages_of_chunk
from convt3d.cuda.plan.phases.plan import PhasesLaunches
from convt3d.cuda.plan.phases.tile import AnyPhasesTile, PhasesShape, Tiling
from convt3d.cuda.plan.rates import MEMORY_BYTES
from convt3d.cuda.plan.search import by_cost, with_tile
from convt3d.cuda.plan.unit_tiles import deepest
from convt3d.cuda.plan.warpgroups import (
    ROUNDED,
    column_tiles,
)
from convt3d.cuda.schedule import Gpu, Problem, div_up, round_up
from convt3d.geometry import Triple

_VECTOR = 4  # positions that a lane turns at a time, at most
_CONSUMERS = 2  # warpgroups that multiply
_REGISTERS = {1: 104, 2: 72}  # of warpgroups that bring weights and turn boxes, by their number
_ENTRY_BYTES = 8
_SPARE_REGISTERS = 34
# Weight stages and source boxes, deepest first.
_PIPELINES = ((8, 4), (5, 4), (4, 4), (4, 3), (3, 3), (4, 2), (3, 2), (2, 2))
# Cycles, fitted to 1037 plans and tiles of 59 layers timed on an H200 (within 12%): a round of
# transposing vectors, a line of a box, an output of a thread, a work tile; a packed byte. A call's
# are what its choices beside other families' plans ask for, over seven draws of layers.
_ROUND, _LINE, _OUTPUT, _WORK_TILE, _CALL, _PACKED_BYTE = 548.0, 5.6, 31.0, 1050.0, 13000.0, 0.0015
_CONFLICT = 0.01  # of banks: hardly anything
_CUT = 1.46  # of outputs in rows that tiles cut
_SHORT_STAGES = 1.05  # what stages with taps of W alone cost more than counted, over 37 layers
_TRANSPOSED_ROW = 0.3  # of a box, in shared memory
_WORDS = 1.23  # of float32, which fragments of single loads read as well, beside boxes by TMA


@dataclass(frozen=True)
class TransposedTile(AnyPhasesTile):
    """The compile-time choices of a kernel."""

    producers: int = 2  # warpgroups that bring weights and turn boxes
    vector: int = _VECTOR  # positions that a lane turns at a time; rows are multiples of them
    outputs: int = 0  # that a lane stores at a time; 0: as many as it can

    transposed = True

    @property
    def by_map(self) -> bool:
        return False

    @property
    def transposers(self) -> int:
        """Threads that turn boxes."""
        return 128 * self.producers - 32


@dataclass(frozen=True)
class WgmmaTransposedPlan(PhasesLaunches):
    """A kernel for one problem; the shape of its tile follows the extents of each call.

    Calls whose rows of W are no multiples of the tile's vector run the best plan of another family.
    """

    tile: TransposedTile

    @property
    def wide_outputs(self) -> int:
        return self.tile.outputs or super().wide_outputs

    @property
    def producer_registers(self) -> int:
        return _REGISTERS[self.tile.producers]

    @property
    def fits_registers(self) -> bool:
        t = self.tile
        needed = self.accumulators + _SPARE_REGISTERS + t.blocks * (4 * t.fragments + 2)
        return needed <= self.consumer_registers

    # ------------------------------------------------------------ tile shape

    def pitches(self, shape: PhasesShape) -> Four:
        """Rows of 16 bytes from a sample, slice, line and quad of channels to the next."""
        samples, slices, lines, _ = shape.box
        sample = slices * lines * shape.line
        return (sample, lines * shape.line, shape.line, samples * sample)

    def box_bytes(self, shape: PhasesShape) -> int:
        return round_up(2 * 16 * self.pitches(shape)[3], 128)

    def vectors(self, shape: PhasesShape, width: int) -> int:
        """Of positions that are transposed for a box."""
        samples, slices, lines, positions = shape.box
        vector = self.tile.vector
        along = width // vector if shape.tiles[3] == 1 else div_up(positions + vector - 1, vector)
        return 2 * samples * slices * lines * along

    def shared_bytes(self, shape: PhasesShape, target: Sequence[int]) -> int:
        entries = _ENTRY_BYTES * self.vectors(shape, self.source(target)[2])
        return super().shared_bytes(shape, target) + entries

    def tilings(self, batch: int, target: Sequence[int]) -> Iterator[Tiling]:
        """Tiles that fit the kernel's rows."""
        units = self.units(target)
        span0, span1, span2 = self.phase_spans
        tiles: dict[Four, None] = {}
        for t2, t1, t0 in self._extents(units):
            most = self.tile.rows // (t2 * t1 * t0)
            for samples in {1, min(batch, most)} if t2 >= units[2] else {1}:
                tiles[samples, t0, t1, t2] = None
        for tile in tiles:
            samples, t0, t1, t2 = tile
            box = (samples, t0 + span0, t1 + span1, t2 + span2)
            least = PhasesShape(tile, tile_counts(batch, units, tile), box, 1, 1.0, box[3])
            yield least, self._pitched(least, target)

    def _extents(self, units: Triple) -> Iterator[Triple]:
        """Units of a tile along W, H and D."""
        rows = self.tile.rows
        for t2 in (min(units[2], 16), *sorted(near_cuts(units[2], min(rows, 192)))):
            for t1 in even_cuts(units[1], rows // t2):
                for t0 in even_cuts(units[0], rows // t2 // t1):
                    yield t2, t1, t0

    def _pitched(self, least: PhasesShape, target: Sequence[int]) -> Iterator[PhasesShape]:
        """A tile with lines as far apart as the banks require."""
        best = math.inf
        for extra in range(8):
            shape = replace(least, line=least.line + extra)
            if self.shared_bytes(shape, target) > self.gpu.shared_per_block:
                return
            sample, slice_, line, _ = self.pitches(shape)
            own = self.warpgroup_units(shape)
            steps = (sample, slice_, line, 1)
            conflicts = banks.row_cycles(64 * self.tile.blocks, own, shape.units, steps)
            if conflicts < best:
                best = conflicts
                yield replace(shape, conflicts=conflicts)
            if best == 1.0:
                return

    def fits(self, batch: int, source: Sequence[int], target: Sequence[int]) -> bool:
        if math.prod(source) * self.chunk_channels >= 1 << 30:
            return False  # numbers of 32 bits
        return source[2] % self.tile.vector == 0

    def describe(self) -> dict[str, str]:
        found = super().describe()
        found["kernel"] = "phases, boxes transposed in shared memory, wgmma"
        if self.tile.vector < _VECTOR:
            found["pipeline"] += f", {self.tile.vector} positions a load"
        if self.tile.outputs:
            found["pipeline"] += f", {self.tile.outputs} outputs a store"
        found["pipeline"] += f", {self.tile.transposers // 32} warps transpose"
        return found

    # ------------------------------------------------------------ cost

    def shape_cost(self, shape: PhasesShape, batch: int, target: Sequence[int]) -> float:
        """Estimated cycles of one call with a tile."""
        p, t = self.problem, self.tile
        rounds = div_up(shape.count * self.n_tile_phases, self.grid(shape))
        walked = stages_of_chunk(self, shape, target)
        blocks = t.blocks * t.consumers
        shared = blocks * (self.steps * 16 + self.taps * t.column_tile / 4)
        shared = walked * (shared + self.stage_bytes / 128)
        shared += math.prod(shape.box) * 2 * _TRANSPOSED_ROW
        products = walked * self.taps * blocks * product_cycles(t.column_tile)
        both = max(products, shared) * (1 + _CONFLICT * (shape.conflicts - 1))
        vectors = self.vectors(shape, self.source(target)[2])
        transposed = div_up(vectors, t.transposers) * _ROUND
        transposed += math.prod(shape.box[:3]) * _LINE
        always = self.slots * t.blocks * t.column_tile / 2 * _OUTPUT
        always *= _CUT if shape.tiles[3] > 1 else 1.0
        whole = rounds * (self.chunks * math.hypot(both, transposed) + always + _WORK_TILE)
        moved = batch * math.prod(target) * p.geometry.out_channels * p.element_bytes
        floor = moved / MEMORY_BYTES / self.gpu.multiprocessors
        if t.phased == 2:
            whole *= _SHORT_STAGES
        return max(whole, floor) + self.packed_bytes * _PACKED_BYTE + _CALL


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why boxes cannot be transposed, or None."""
    if problem.arithmetic not in ROUNDED:
        return f"{problem.arithmetic.value} is not among its arithmetics"
    if problem.source_channels % (32 // problem.element_bytes):
        return "chunks of channels are transposed as a whole"
    if not all(taps for axis in phased_axes(problem, 3) for taps in axis.phase_taps):
        return "warps of their own store outputs without taps faster"
    return phases_refusal(problem, gpu)


def _outputs(problem: Problem, row: int, vector: int) -> list[int]:
    """How many outputs a lane may store at a time: pairs where tiles cut rows into even parts."""
    most = math.gcd(4 * problem.geometry.stride[2], 16 // problem.element_bytes)
    even = math.gcd(row, most)
    if even == 1 or (even == most and vector == _VECTOR):
        return [0]
    return [0 if n == most else n for n in sorted({even, 2})]


def candidates(
    problem: Problem, batch: int, target: Sequence[int], gpu: Gpu, vector: int = _VECTOR
) -> Iterator[WgmmaTransposedPlan]:
    """Every sensible kernel, in no order, with the deepest pipeline for these extents."""
    columns = column_tiles(problem.target_channels, (1, 2, 3, 4, 8), 32, 128)
    every = itertools.product((0, 1, 2), columns, _outputs(problem, target[2], vector))
    for phased, column_tile, outputs in every:
        fitting = []
        for blocks in (1, 2, 3, 4):
            base = TransposedTile(
                *(phased, blocks, column_tile, _CONSUMERS, 2, 2, 2),
                producers=1 if vector == _VECTOR else 2,
                vector=vector,
                outputs=outputs,
            )
            plan = WgmmaTransposedPlan(problem, base, gpu)
            # As many fragments as a stage has, or without a break from stage to stage.
            rings = [n for n in (plan.steps, 3, 4, 2) if 1 < n < 10 and plan.steps % n == 0]
            rings = rings or [3, 2]
            fit = with_fragments(plan, rings[:3])
            fitting += [fit] if fit is not None else []
        for plan in fitting[-2:]:
            yield from deepest(plan, _PIPELINES, batch, target)


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, WgmmaTransposedPlan]]:
    """The best candidates for these input extents with their costs, cheapest first."""
    if refusal(problem, gpu) is not None or gathered(problem, input_size):
        return []
    vector = math.gcd(input_size[2], _VECTOR)
    source, target = problem.extents(input_size)
    found = by_cost(
        (plan.cost(batch, target), plan)
        for plan in candidates(problem, batch, target, gpu, vector)
        if plan.fits(batch, source, target)
    )[:MAX_PLANS]
    for _, plan in found[:3]:  # seven warps that turn, with fewer registers
        other = with_tile(plan, producers=2)
        if plan.tile.producers == 1 and other.fits_registers:
            found.append((other.cost(batch, target), other))
    scale = _WORDS if problem.element_bytes == 4 and vector > 1 else 1.0
    return by_cost((scale * cost, plan) for cost, plan in found)
