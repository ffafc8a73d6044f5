"""Plans of ``phases/kernel.cu`` whose boxes are transposed on their way to shared memory.

Warps of the producer's warpgroup load the source and store it as rows of 16 bytes, a quad of
channels each (``phases/transposed.cuh``), which fragments or products are read from without
work on single elements. Contiguous activations, forward.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from convt3d.cuda.plan import phases
from convt3d.cuda.plan.phases import (
    MAX_PLANS,
    MAX_PRODUCTS,
    PhasesShape,
    PhasesTile,
    Tiling,
    WgmmaPhasesPlan,
    consumer_registers,
    deepest,
    product_cycles,
    trial,
    unit_positions,
    with_ping_pong,
)
from convt3d.cuda.schedule import Gpu, Problem, div_up, round_up

_VECTOR = 4  # positions that a lane turns at a time, at most
_CONSUMERS = 2  # warpgroups that multiply
_REGISTERS = {1: 104, 2: 72}  # of warpgroups that bring weights and turn boxes, by their number
_ENTRY_BYTES = 8
_SPARE_REGISTERS = {False: 34, True: 44}
_MAX_STAGE_BYTES = 48 << 10
_PIPELINES = (
    (8, 4, 2),
    (5, 4, 2),
    (4, 4, 2),
    (4, 3, 2),
    (3, 3, 2),
    (4, 2, 2),
    (3, 2, 2),
    (2, 2, 2),
)
# Cycles, fitted to 1037 plans and tiles of 59 layers timed on an H200 (within 12%): a round of
# transposing vectors of so many positions, a line of a box, an output of a thread, a work tile.
_ROUND, _LINE = {4: 646.0, 2: 477.0, 1: 521.0}, 5.6
_OUTPUT, _WORK_TILE = 31.0, 1050.0
_CONFLICT = 0.01  # of banks: hardly anything
# How much longer outputs take that leave alone or as pairs, by element size; half of 16 bytes; rows
# that tiles cut.
_ALONE, _HALVES, _CUT = {4: 2.6, 2: 1.74}, 1.44, 1.46
_TRANSPOSED_ROW = 0.3  # of a box, in shared memory
# Beside boxes by TMA: layers of stride 1; float32, which fragments of single loads read as well.
_STRIDE_1, _WORDS = 0.9, 1.23
_EMPTY = 2.0  # of layers some of whose phases have no taps; not timed


@dataclass(frozen=True)
class TransposedTile(PhasesTile):
    """The compile-time choices of a kernel."""

    both_shared: bool = False  # products read units in shared memory
    producers: int = 2  # warpgroups that bring weights and turn boxes
    vector: int = _VECTOR  # positions that a lane turns at a time; rows are multiples of them
    outputs: int = 0  # that a lane stores at a time; 0: as many as it can

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + self.producers)

    @property
    def transposers(self) -> int:
        """Threads that turn boxes."""
        return 128 * self.producers - 32


@dataclass(frozen=True)
class WgmmaTransposedPlan(WgmmaPhasesPlan):
    """A kernel for one problem; the shape of its tile follows the extents of each call.

    Calls whose rows of W are no multiples of the tile's vector run the best plan of another family.
    """

    tile: TransposedTile
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)

    @property
    def transposed(self) -> bool:
        return True

    @property
    def both_shared(self) -> bool:
        return self.tile.both_shared

    @property
    def wide_outputs(self) -> int:
        return self.tile.outputs or super().wide_outputs

    @property
    def transposed_vector(self) -> int:
        return self.tile.vector

    @property
    def by_map(self) -> bool:
        return False

    @property
    def producer_registers(self) -> int:
        return _REGISTERS[self.tile.producers]

    @property
    def producers(self) -> int:
        return self.tile.producers

    @property
    def consumer_registers(self) -> int:
        t = self.tile
        return consumer_registers(t.threads, t.consumers, t.producers * self.producer_registers)

    @property
    def fits_registers(self) -> bool:
        t = self.tile
        needed = self.accumulators + _SPARE_REGISTERS[t.both_shared]
        needed += t.blocks * (2 if t.both_shared else 4 * t.fragments + 2)
        return needed <= self.consumer_registers

    # ------------------------------------------------------------ tile shape

    def pitches(self, shape: PhasesShape) -> tuple[int, int, int, int]:
        """Rows of 16 bytes from a sample, slice, line and quad of channels to the next."""
        samples, slices, lines, _ = shape.box
        line = shape.line
        sample = slices * lines * line
        return (sample, lines * line, line, samples * sample)

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

    def warpgroup_units(self, shape: PhasesShape) -> int:
        if self.tile.both_shared:
            return 64 * self.tile.blocks
        return super().warpgroup_units(shape)

    def tilings(self, batch: int, target: Sequence[int]) -> Iterator[Tiling]:
        """Tiles that fit the kernel's rows."""
        units = self.units(target)
        seen = set()
        for t2, t1, t0 in self._extents(units):
            most = self.tile.rows // (t2 * t1 * t0)
            samples_ = {1, min(batch, most)} if t2 >= units[2] else {1}
            for samples in samples_:
                tile = (samples, t0, t1, t2)
                if tile in seen:
                    continue
                seen.add(tile)
                tiles = (
                    div_up(batch, samples),
                    div_up(units[0], t0),
                    div_up(units[1], t1),
                    div_up(units[2], t2),
                )
                span0, span1, span2 = self.phase_spans
                box = (samples, t0 + span0, t1 + span1, t2 + span2)
                least = PhasesShape(tile, tiles, box, 1, 1.0, box[3])
                yield least, self._pitched(least, target)

    def _extents(self, units: tuple[int, int, int]) -> Iterator[tuple[int, int, int]]:
        """Units of a tile along W, H and D."""
        rows = self.tile.rows
        if self.tile.both_shared:
            # Eight lines of eight units are a block.
            for t1 in sorted({8, 16, 32, 64, round_up(units[1], 8)}):
                most = rows // (8 * t1)
                for t0 in {1, min(units[0], most), 2} if most else ():
                    if t0 <= most:
                        yield 8, t1, t0
            return
        parts = div_up(units[2], min(rows, 192))
        wide = {div_up(units[2], n) for n in range(parts, parts + 4)}
        for t2 in (min(units[2], 16), *sorted(wide)):
            for t1 in _parts(units[1], rows // t2):
                for t0 in _parts(units[0], rows // t2 // t1):
                    yield t2, t1, t0

    def _pitched(self, least: PhasesShape, target: Sequence[int]) -> Iterator[PhasesShape]:
        """A tile with lines as far apart as the banks require."""
        best = float("inf")
        for extra in range(8):
            shape = replace(least, line=least.line + extra)
            if self.shared_bytes(shape, target) > self.gpu.shared_per_block:
                return
            conflicts = 1.0
            if not self.tile.both_shared:
                sample, slice_, line, _ = self.pitches(shape)
                conflicts = _row_conflicts(
                    64 * self.tile.blocks,
                    self.warpgroup_units(shape),
                    shape.units,
                    (sample, slice_, line, 1),
                )
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
        units = "M rows in shared memory" if self.tile.both_shared else "M rows in registers"
        found["kernel"] = "phases, boxes transposed in shared memory, wgmma"
        found["pipeline"] += f", {units}"
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
        walked = float(self.most_walked)
        if not t.resident_weights:
            walked = self._stages_of_chunk(shape, target)
        blocks = t.blocks * t.consumers
        loads = self.taps * 16.0 if t.both_shared else self.steps * 16.0
        shared = blocks * (loads + self.taps * t.column_tile / 4) + self.stage_bytes / 128
        shared += math.prod(shape.box) * 2 * _TRANSPOSED_ROW / walked
        products = self.taps * blocks * product_cycles(t.column_tile)
        both = walked * max(products, shared) * (1 + _CONFLICT * (shape.conflicts - 1))
        vectors = self.vectors(shape, self.source(target)[2])
        transposed = div_up(vectors, t.transposers) * _ROUND[t.vector]
        transposed += math.prod(shape.box[:3]) * _LINE
        outputs = math.prod(axis.unit_target if axis.block else 1 for axis in self.axes)
        always = outputs * t.blocks * t.column_tile / 2 * _OUTPUT * self._storing(shape, target)
        whole = rounds * (self.chunks * math.hypot(both, transposed) + always + _WORK_TILE)
        moved = batch * math.prod(target) * p.geometry.out_channels * p.element_bytes
        floor = moved / phases.STORE_BYTES / self.gpu.multiprocessors
        return max(whole, floor) + self.packed_bytes * 0.0015 + 5000.0

    def _storing(self, shape: PhasesShape, target: Sequence[int]) -> float:
        """How much longer outputs take than by stores of 16 bytes."""
        most = super().wide_outputs
        longer = _CUT if shape.tiles[3] > 1 else 1.0
        if not self.wide(shape, target) or 2 * self.wide_outputs < most or self.wide_outputs == 2:
            return longer * _ALONE[self.problem.element_bytes]
        return longer if self.wide_outputs == most else longer * _HALVES


def _parts(extent: int, most: int) -> list[int]:
    """Extents of a tile along an axis: as much as fits, in equal parts, and one."""
    most = max(1, min(extent, most))
    return sorted({1, div_up(extent, div_up(extent, most)), most})


@functools.lru_cache(maxsize=65536)
def _row_conflicts(
    rows: int, own: int, units: tuple[int, int, int, int], steps: tuple[int, int, int, int]
) -> float:
    """Mean cycles of eight rows of 16 bytes for ldmatrix."""
    bank = unit_positions(rows, own, units, steps).reshape(-1, 8) % 8
    return float(np.mean([np.bincount(eight).max() for eight in bank]))


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why boxes cannot be transposed, or None."""
    if problem.target_channels_last:
        return "outputs are stored as rows along W"
    if problem.arithmetic not in phases.ARITHMETICS:
        return f"{problem.arithmetic.value} is not among its arithmetics"
    if problem.source_channels % (32 // problem.element_bytes):
        return "chunks of channels are transposed as a whole"
    return phases.refusal(problem, gpu)


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
    channels = problem.target_channels
    columns = {min(256, round_up(div_up(channels, n), 8)) for n in (1, 2, 3, 4, 8)}
    columns = {n for n in columns if 32 <= n <= 128} or {max(columns)}
    every = itertools.product(
        (0, 1, 2), sorted(columns), (False, True), _outputs(problem, target[2], vector)
    )
    for phased, column_tile, both, outputs in every:
        fitting = []
        for blocks in (1, 2, 3, 4):
            base = TransposedTile(
                *(phased, blocks, column_tile, _CONSUMERS, 2, 2, 2, False),
                stores_per_warp=True,
                both_shared=both,
                producers=1 if vector == _VECTOR else 2,
                vector=vector,
                outputs=outputs,
            )
            plan = WgmmaTransposedPlan(problem, base, gpu)
            # As many fragments as a stage has, or without a break from stage to stage.
            rings = [n for n in (plan.steps, 3, 4, 2) if 1 < n < 10 and plan.steps % n == 0]
            rings = rings or [3, 2]
            plans = (
                replace(plan, tile=replace(base, fragments=n)) for n in rings[: 1 if both else 3]
            )
            fit = next((p for p in plans if p.fits_registers), None)
            if fit is None or plan.taps * blocks > MAX_PRODUCTS:
                continue
            if plan.stage_bytes <= _MAX_STAGE_BYTES:
                fitting.append(fit)
        for plan in fitting[-2:]:
            for resident in (False, True):
                if resident and plan.n_tile_phases > gpu.multiprocessors:
                    continue
                if resident and plan.chunks * plan.most_walked * plan.stage_bytes > 160 << 10:
                    continue
                yield from deepest(plan, resident, batch, target, _PIPELINES)  # type: ignore[misc]


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, WgmmaTransposedPlan]]:
    """The best candidates for these input extents with their costs, cheapest first."""
    if refusal(problem, gpu) is not None or phases.gathered(problem, input_size):
        return []
    vector = math.gcd(input_size[2], _VECTOR)
    source, target = problem.extents(input_size)
    found = [
        (plan.cost(batch, target), plan)
        for plan in candidates(problem, batch, target, gpu, vector)
        if plan.fits(batch, source, target)
    ]
    found.sort(key=lambda item: item[0])
    found = found[:MAX_PLANS]
    first = [plan for _, plan in found[:3]]
    found += [
        (trial(plan, batch, target) * cost, plan)
        for cost, plan in with_ping_pong(first, batch, target)
        if isinstance(plan, WgmmaTransposedPlan)
    ]
    for plan in first:  # seven warps that turn, with fewer registers
        if plan.tile.producers == 2:
            continue
        other = replace(plan, tile=replace(plan.tile, producers=2))
        if other.fits_registers:
            found.append((other.cost(batch, target), other))
    scale = _EMPTY if phases.live_share(problem) < 1 else 1.0
    if max(problem.geometry.stride) == 1:
        scale *= _STRIDE_1
    if problem.element_bytes == 4 and vector > 1:
        scale *= _WORDS
    return sorted(((scale * cost, plan) for cost, plan in found), key=lambda item: item[0])
