"""Plans of ``ampere/gather``: tile, fragments and pipeline for forward and gradient by input.

The numbers mirror ``ampere/gather/config.cuh``; the cost model ranks candidates by the cycles of
one multiprocessor, counting matrix steps, shared-memory traffic, fills, barriers and stores, and
the rows lost at tile borders.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.axes import Axis, axis_of
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
from convt3d.precision import Arithmetic

# A static axis enumerates its taps in registers; beyond these the code grows without gain.
_MAX_SLOTS2 = 16
_MAX_TAPS2 = 32
_MAX_BASES = 32
# Accumulators of a lane, and of IEEE-grade arithmetic, whose operands take twice the registers.
_MAX_ACCUMULATORS = 144
_MAX_ACCUMULATORS_IEEE = 96
# What few resident CTAs lose to barriers and to the ends of a tile, fitted to measurements.
_ALONE = {1: 1.4, 2: 1.2, 3: 1.1}
# Cycles of a multiprocessor for one m16n8 step of a warp, read on an H200.
_STEP_CYCLES = 1.41


@functools.lru_cache(maxsize=1024)
def _axes(problem: Problem, block0: int, swapped: bool) -> tuple[Axis, Axis, Axis]:
    """The kernel's axes 0, 1, 2."""
    order, blocks = (1, 0, 2) if swapped else (0, 1, 2), (block0, 0, 1)
    first, second, third = (axis_of(problem, a, n) for a, n in zip(order, blocks, strict=True))
    return (first, second, third)


@dataclass(frozen=True)
class Tile:
    """The compile-time choices of a gather kernel."""

    block0: int
    warps_m: int
    warps_n: int
    fragments_m: int
    fragments_n: int
    stages: int = 2
    split: bool = False
    depth: int = 1
    resident: int = 1  # CTAs that share a multiprocessor
    positions: int = 0  # of the largest source box
    separate: bool = True  # positions of a unit are stored apart by residue

    @property
    def rows(self) -> int:
        """Units that one CTA holds at most."""
        return 16 * self.warps_m * self.fragments_m


@dataclass(frozen=True)
class GatherPlan:
    """A gather kernel for one problem; the shape of its tile follows the extents of each call."""

    problem: Problem
    tile: Tile
    swapped: bool  # the kernel's axes 0 and 1 are H and D
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)  # for which tiles are shaped

    # ------------------------------------------------------------ derived sizes

    @property
    def order(self) -> Triple:
        return (1, 0, 2) if self.swapped else (0, 1, 2)

    @functools.cached_property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        return _axes(self.problem, self.tile.block0, self.swapped)

    @property
    def threads(self) -> int:
        return 32 * self.tile.warps_m * self.tile.warps_n

    @property
    def column_tile(self) -> int:
        return 8 * self.tile.warps_n * self.tile.fragments_n

    @functools.cached_property
    def column_tiles(self) -> int:
        return div_up(self.problem.target_channels, self.column_tile)

    @property
    def chunk_channels(self) -> int:
        return self.tile.depth * 8 * 4 // self.problem.element_bytes

    @functools.cached_property
    def chunks(self) -> int:
        return div_up(self.problem.source_channels, self.chunk_channels)

    @property
    def _residues(self) -> int:
        return self.axes[2].unit_source if self.tile.separate else 1

    @functools.cached_property
    def octets(self) -> bool:
        """Whether contiguous 16-bit sources lie in shared memory by octets (load/octet_box.cuh)."""
        p = self.problem
        return p.element_bytes == 2 and not p.source_channels_last and self._residues == 1

    @functools.cached_property
    def vector(self) -> int:
        """Elements that one copy of the fill moves, where addresses allow."""
        bytes_ = self.problem.element_bytes
        if self.problem.source_channels_last:
            for vector in (16 // bytes_, 8 // bytes_, 4 // bytes_):
                if self.problem.source_channels % vector == 0:
                    return vector
            return 1
        if bytes_ == 4:
            return 4 if self._residues == 1 else 1
        return 8 if self.octets else 4

    @functools.cached_property
    def fragment_words(self) -> int:
        return 128 if self.problem.arithmetic is Arithmetic.IEEE else 64

    @functools.cached_property
    def row_words(self) -> int:
        taps2 = self.axes[2].kernel
        return taps2 * self.tile.warps_n * self.tile.fragments_n * self.fragment_words

    @property
    def stage_weight_words(self) -> int:
        taps1 = 1 if self.tile.split else self.axes[1].max_taps
        return self.tile.depth * taps1 * self.axes[0].max_taps * self.row_words

    @property
    def _box_buffers(self) -> int:
        return 2 if self.tile.split else self.tile.stages

    def box_words(self, positions: int) -> int:
        """Words of shared memory that one source box takes."""
        words = 8 * self.tile.depth
        if self.problem.source_channels_last:
            return positions * (words if self.tile.depth % 2 else words + 8)
        if self.octets:
            return round_up(positions, 32) * words
        return (round_up(positions - 8, 32) + 8) * words

    @functools.cached_property
    def smallest_box(self) -> int:
        """Positions of the source box of a single unit."""
        a, b, c = self._box(np.ones((1, 3), dtype=np.int64))
        return int(a[0] * b[0] * c[0])

    @functools.cached_property
    def shared_bytes(self) -> int:
        pipeline = self._box_buffers * self.box_words(self.tile.positions)
        pipeline += self.tile.stages * self.stage_weight_words
        return 4 * max(pipeline, self._staging_words)

    def room_for_positions(self, shared_bytes: int) -> int:
        """Positions of the largest source box that this much shared memory can hold; may be < 1."""
        words = shared_bytes // 4 - self.tile.stages * self.stage_weight_words
        words //= self._box_buffers * 8 * self.tile.depth
        if self.problem.source_channels_last:
            return words * self.tile.depth // (self.tile.depth + (self.tile.depth + 1) % 2)
        return words // 32 * 32 if self.octets else (words - 8) // 32 * 32 + 8

    @functools.cached_property
    def _staging_words(self) -> int:
        if self.problem.target_channels_last:
            return 0
        warps = self.tile.warps_m * self.tile.warps_n
        return warps * 8 * (16 * self.tile.fragments_m * self.axes[2].slots + 4)

    @property
    def packed_words(self) -> int:
        taps = self.axes[0].kernel * self.axes[1].kernel
        steps = self.chunks * self.tile.depth
        return self.problem.geometry.groups * self.column_tiles * steps * taps * self.row_words

    # ------------------------------------------------------------ launches

    @functools.cached_property
    def macros(self) -> tuple[tuple[str, str], ...]:
        p, t, axes = self.problem, self.tile, self.axes
        values: dict[str, object] = {
            "forward": p.forward,
            "bias": p.bias,
            "source_channels_last": p.source_channels_last,
            "target_channels_last": p.target_channels_last,
            "groups": p.geometry.groups,
            "source_channels": p.source_channels,
            "target_channels": p.target_channels,
            "block0": t.block0,
            "warps_m": t.warps_m,
            "warps_n": t.warps_n,
            "fragments_m": t.fragments_m,
            "fragments_n": t.fragments_n,
            "stages": t.stages,
            "split": t.split,
            "depth": t.depth,
            "resident": t.resident,
            "positions": t.positions,
            "vector": self.vector,
            "separate": t.separate,
        }
        for i, axis in enumerate(axes):
            values[f"kernel{i}"] = axis.kernel
            values[f"stride{i}"] = axis.stride
            values[f"padding{i}"] = axis.padding
            values[f"dilation{i}"] = axis.dilation
        return p.type_macros + macros("CONVT3D_", **values)

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        output_size = self.problem.geometry.output_size(input_size)
        source, target = tuple(input_size), output_size
        if not self.problem.forward:
            source, target = target, source
        units = self.unit_box(batch, target)
        tiles = [
            div_up(div_up(target[a], axis.unit_target), n)
            for a, axis, n in zip(self.order, self.axes, units, strict=True)
        ]
        phases = self.axes[0].phases * self.axes[1].phases
        groups = self.problem.geometry.groups
        grid = phases * self.column_tiles * groups * tiles[0] * tiles[1] * tiles[2] * batch
        numbers = (
            *(source[a] for a in self.order),
            *_strides(source, self.order),
            *(target[a] for a in self.order),
            *_strides(target, self.order),
            *units,
            *tiles,
        )
        product = Launch(
            KernelSpec("ampere/gather/kernel.cu", "convt3d_ampere_gather", self.macros),
            grid,
            self.threads,
            self.shared_bytes,
            ("source", "packed", "bias", "target", *map(np.int32, numbers)),
            dependent=True,
        )
        lanes = self.packed_words // (self.fragment_words // 32)
        weight_strides = ["weight_stride_in", "weight_stride_out"]
        weight_strides += [f"weight_stride_{'dhw'[a]}" for a in self.order]
        pack = Launch(
            KernelSpec("ampere/gather/pack.cu", "convt3d_ampere_gather_pack", self.macros),
            min(div_up(lanes, 256), 4096),
            256,
            0,
            ("weight", "packed", *weight_strides),
        )
        return Schedule((pack, product), {"packed": 4 * self.packed_words})

    def describe(self) -> dict[str, str]:
        t = self.tile
        kind = "static" if t.block0 else "phased"
        return {
            "kernel": f"gather ({kind}), mma.sync",
            "axes": "H, D, W" if self.swapped else "D, H, W",
            "tile": f"{t.rows} M rows x {self.column_tile} columns",
            "unit": "x".join(str(a.unit_target) for a in self.axes) + " outputs",
            "warps": f"{t.warps_m} x {t.warps_n}, fragments {t.fragments_m} x {t.fragments_n}",
            "pipeline": f"{t.stages} stages of "
            + ("a tap row" if t.split else f"{self.chunk_channels} channels")
            + f", {t.resident} CTAs a multiprocessor"
            + ("" if t.separate else ", rows in place"),
            "shared memory": f"{self.shared_bytes} bytes",
        }

    # ------------------------------------------------------------ tile shape and cost

    def needed(self, target: Sequence[int]) -> Triple:
        """Units along each axis that cover the destination."""
        a, b, c = (
            div_up(target[i], axis.unit_target)
            for i, axis in zip(self.order, self.axes, strict=True)
        )
        return (a, b, c)

    def unit_box(self, batch: int, target: Sequence[int]) -> Triple:
        """The cheapest tile shape for destination extents, in units along the kernel's axes."""
        work = self.work(batch, target)
        a, b, c = (int(n) for n in work.shapes[int(np.argmin(self._costs(work)))])
        return (a, b, c)

    def accumulators(self) -> int:
        """Live accumulator registers of a lane; slots without a tap cost none."""
        live0 = self.axes[0].slots if self.tile.block0 else 1
        axis = self.axes[2]
        live2 = sum(n > 0 for n in axis.phase_taps) if self.problem.forward else axis.slots
        return live0 * max(1, live2) * self.tile.fragments_m * self.tile.fragments_n * 4

    def registers(self) -> int:
        """Estimated registers of a thread: accumulators, fragments in flight, addresses."""
        t = self.tile
        wide = self.problem.words_per_value
        cached = self.axes[0].shifts if t.block0 else 1
        operands = wide * (4 * cached * t.fragments_m + 2 * t.fragments_n)
        return min(255, self.accumulators() + operands + 44)

    def waste(self) -> float:
        """Cycles of the products of one useful output: what ranks fragments and warps."""
        slots = self.axes[0].slots * self.axes[2].slots * self.axes[0].phases * self.axes[1].phases
        useful = self.tile.rows * self.problem.target_channels / self.column_tiles * slots
        # Products of all phases, since phased axes differ in their taps.
        return self._step_cycles[0] * self.axes[0].phases * self.axes[1].phases / useful

    def _box(
        self, shapes: NDArray[np.int64], needed2: int | None = None
    ) -> tuple[NDArray[np.int64], ...]:
        """Extents of the source boxes of tile shapes; `needed2` units make up a row."""
        sizes = [
            (shapes[:, i] - 1) * axis.unit_source + axis.shifts for i, axis in enumerate(self.axes)
        ]
        residues = self._residues
        if self.octets:
            # Rows begin at a multiple of four; how far before a tile is known where tiles do too.
            step = shapes[:, 2] * self.axes[2].unit_source
            alike = (step % 4 == 0) | (needed2 is not None and shapes[:, 2] == needed2)
            lead = np.where(alike, self.axes[2].reach[0] % 4, 3)
            sizes[2] = (lead + sizes[2] + 7) // 8 * 8
        elif not self.problem.source_channels_last and self.vector > 1 and residues == 1:
            sizes[2] = (sizes[2] + 2 * (self.vector - 1)) // self.vector * self.vector
        sizes[2] = (sizes[2] + residues - 1) // residues * residues
        return tuple(sizes)

    @functools.cached_property
    def _step_cycles(self) -> tuple[float, float]:
        """Cycles of one matrix step's products in all taps: busiest unit, and both added."""
        t, axes = self.tile, self.axes
        ieee = self.problem.arithmetic is Arithmetic.IEEE
        warps = t.warps_m * t.warps_n
        taps1 = sum(axes[1].phase_taps) / axes[1].phases
        taps2 = axes[2].kernel
        taps0: float = axes[0].kernel
        products0, loads0 = taps0 * max(1, t.block0), float(axes[0].shifts)
        if not t.block0:
            products0 = loads0 = taps0 = sum(axes[0].phase_taps) / axes[0].phases
        shifts2 = min(axes[2].shifts, axes[2].kernel * axes[2].slots)
        products = warps * taps1 * products0 * taps2 * t.fragments_m * t.fragments_n
        matrix = products * _STEP_CYCLES * (3.5 if ieee else 1.0)
        # Rows that are not neighbours collide in the banks.
        collisions = min(4, 1 if t.separate else axes[2].unit_source)
        loads = loads0 * shifts2 * t.fragments_m * 4 * collisions
        if self.octets:
            loads *= 1.5  # eight neighbouring units lie in two rows at times
        loads += taps0 * taps2 * t.fragments_n * (4 if ieee else 2)
        shared = warps * taps1 * loads
        weights = taps1 * taps0 * self.row_words / 128 * 2
        return max(matrix, shared) + 0.3 * min(matrix, shared), weights

    def work(self, batch: int, target: Sequence[int]) -> Work:
        """What tiles of every shape cost, which is the same for any pipeline."""
        t, axes = self.tile, self.axes
        needed = self.needed(target)
        shapes = _shapes(t.rows, needed)
        bytes_ = self.problem.element_bytes
        step, weights = self._step_cycles
        box0, box1, box2 = self._box(shapes, needed[2])
        rows = box0 * box1
        positions = rows * box2
        wide = self.vector if bytes_ == 4 or self.problem.source_channels_last else 1
        # Short rows waste parts of 32-byte sectors and of warps.
        fill = positions * 8 / (32 * wide) * 3.0 + rows * 8 * (box2 * 4 / 32 + 1) / 2 + weights

        run = shapes[:, 2] * axes[2].slots * bytes_
        if self.problem.target_channels_last:
            run = np.full_like(run, self.column_tile * bytes_)
        outputs = t.rows * self.column_tile * axes[0].slots * axes[2].slots
        # About 18 bytes a cycle are a multiprocessor's share of memory bandwidth.
        instructions: NDArray[np.float64] | float = 0.8
        if bytes_ == 2 and not self.problem.target_channels_last and axes[2].slots % 2:
            # Pairs of neighbours leave as one store where all of them are aligned.
            instructions = np.where(shapes[:, 2] * axes[2].slots % 2, 8.0, 2.5)
        store = outputs * bytes_ / 18 * (run + 32) / run + outputs / 32 * instructions

        ctas = batch * self.problem.geometry.groups * self.column_tiles
        ctas *= axes[0].phases * axes[1].phases
        count = ctas * (-(-np.array(needed) // shapes)).prod(axis=1)
        return Work(shapes, positions, step + fill, store, count)

    def bound(self, work: Work, resident: int) -> float:
        """Cycles that no pipeline of at most so many resident CTAs undercuts."""
        steps = div_up(self.problem.source_channels * self.problem.element_bytes, 32)
        tile = steps * work.step + work.store
        cycles = np.maximum(1.1 * work.count * tile / self.gpu.multiprocessors, 2000 + tile)
        return float(cycles.min()) * self._alone(resident)

    def _alone(self, resident: int) -> float:
        if not self.octets:
            return _ALONE.get(resident, 1.0)
        factor = {1: 1.33, 2: 1.2}.get(resident, 1.1)
        if resident * self.threads <= 128:
            factor = 1.6
        axis = self.axes[0]
        if not self.tile.block0 and axis.phases == 1 and axis.kernel > 1 and self.threads <= 128:
            factor *= 1.2
        return factor

    def _costs(self, work: Work) -> NDArray[np.float64]:
        """Estimated cycles of one call on a whole GPU for each tile shape; inf where one cannot be.

        Resident CTAs share the throughput of the tensor cores, of shared memory and of DRAM; each
        of them alone cannot be faster than its chain of latencies.
        """
        t = self.tile
        axis = self.axes[1]
        taps1 = sum(axis.phase_taps) / axis.phases
        chunk = t.depth * work.step + 50.0 * (taps1 if t.split else 1)
        throughput = self.chunks * chunk + work.store
        chain = 2000 + self.chunks * np.maximum(chunk, 1000.0 / (t.stages - 1)) + work.store
        waves = work.count / (self.gpu.multiprocessors * t.resident)
        waves = np.where(waves > 3, waves + 0.5, np.ceil(waves))
        costs = waves * np.maximum(1.1 * throughput * t.resident, chain) * self._alone(t.resident)
        return np.where(work.positions <= t.positions, costs, np.inf)


@dataclass(frozen=True, eq=False)
class Work:
    """Tile shapes and, for each, what a kernel has to do, whatever its pipeline."""

    shapes: NDArray[np.int64]
    positions: NDArray[np.int64]  # of the source box
    step: NDArray[np.float64]  # cycles of a matrix step with its share of the fill
    store: NDArray[np.float64]  # cycles of the epilogue
    count: NDArray[np.int64]  # CTAs


@functools.lru_cache(maxsize=4096)
def _shapes(rows: int, needed: Triple) -> NDArray[np.int64]:
    """Tile shapes of at most `rows` units, no larger than needed; the last is a single unit."""
    found = set()
    for t2 in {min(div_up(needed[2], parts), rows) for parts in range(1, 17)} | {8, 16, 32}:
        t2 = min(t2, needed[2], rows)
        for t0 in (1, 2, 3, 4, 6, 8):
            t0 = min(t0, needed[0], rows // t2)
            most = min(rows // (t2 * t0), needed[1]) if t0 else 0
            for t1 in {most, div_up(needed[1], div_up(needed[1], most))} if most else ():
                found.add((t0, t1, t2))
    return np.array([*sorted(found, reverse=True), (1, 1, 1)], dtype=np.int64)


def _strides(extent: Sequence[int], order: Triple) -> tuple[int, int]:
    strides = (extent[1] * extent[2], extent[2], 1)
    return (strides[order[0]], strides[order[1]])


def refusal(problem: Problem) -> str | None:
    """Why ampere/gather/kernel.cu cannot take a problem, or None."""
    g = problem.geometry
    slots2 = g.stride[2] if problem.forward else 1
    if slots2 > _MAX_SLOTS2:
        return f"stride {g.stride[2]} along W exceeds the {_MAX_SLOTS2} slots of a unit"
    if g.kernel_size[2] > _MAX_TAPS2:
        return f"kernel {g.kernel_size[2]} along W exceeds {_MAX_TAPS2} taps"
    return None


_WARPS = ((4, 1), (2, 2), (1, 4), (8, 1), (4, 2))


def _residents(plan: GatherPlan) -> list[int]:
    """As many resident CTAs as registers allow, and half as many."""
    most = max(1, min(6, 65536 // (plan.threads * plan.registers())))
    return sorted({most, max(1, most // 2)}, reverse=True)


def _with_pipelines(plan: GatherPlan, gpu: Gpu) -> Iterator[GatherPlan]:
    """Pipelines of a kernel, each with the largest boxes that it has room for."""
    for resident in _residents(plan):
        room = min(gpu.shared_per_block, gpu.shared_per_multiprocessor // resident - 1024)
        for depth in (1, 2, 4):
            if depth > 1 and plan.problem.source_channels * 32 < depth * 64 * 24 // 2:
                continue
            options = [(4, False), (3, False), (2, False)]
            if depth == 1 and plan.axes[1].max_taps > 1:
                # Stages in flight are of the next chunk at most.
                most = 1 + max(1, min(plan.axes[1].phase_taps))
                options += [(stages, True) for stages in (2, 3, 4) if stages <= most]
            for stages, split in options:
                tile = replace(
                    plan.tile, stages=stages, split=split, depth=depth, resident=resident
                )
                chosen = replace(plan, tile=tile)
                positions = min(chosen.room_for_positions(room), 16384)
                if positions < plan.smallest_box:
                    continue
                chosen = replace(chosen, tile=replace(tile, positions=positions))
                if chosen.shared_bytes <= room:
                    yield chosen


def _bases(problem: Problem, gpu: Gpu) -> list[GatherPlan]:
    """Every sensible kernel but for its pipeline, those with the fewest products first."""
    g = problem.geometry
    ieee = problem.arithmetic is Arithmetic.IEEE
    limit = _MAX_ACCUMULATORS_IEEE if ieee else _MAX_ACCUMULATORS
    blocks = [(False, 0)]
    for swapped, axis in ((False, 0), (True, 1)):
        if g.stride[axis] == 1 and g.dilation[axis] == 1 and 1 < g.kernel_size[axis] <= 7:
            blocks += [(swapped, block) for block in (2, 3, 4)]
            break
    found: list[tuple[float, GatherPlan]] = []
    for (swapped, block0), (warps_m, warps_n), fragments_m, fragments_n in itertools.product(
        blocks, _WARPS, (1, 2, 4), (1, 2, 3, 4, 6, 8)
    ):
        spare = -problem.target_channels % (8 * warps_n * fragments_n)
        if spare >= 8 and spare * 4 > problem.target_channels:
            continue
        tile = Tile(block0, warps_m, warps_n, fragments_m, fragments_n)
        base = GatherPlan(problem, tile, swapped, gpu)
        accumulators = base.accumulators()
        # Cached A fragments of a static axis must fit beside the accumulators.
        cached = (base.axes[0].shifts if block0 else 1) * fragments_m * (8 if ieee else 4)
        if accumulators > limit or accumulators + cached > (170 if ieee else 190):
            continue
        found.append((base.waste(), base))
    # Planning is part of a first call: drop what cannot win before looking at pipelines.
    found.sort(key=lambda item: item[0])
    return [base for waste, base in found[:_MAX_BASES] if waste <= 2 * found[0][0]]


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, GatherPlan]]:
    """Candidates for these input extents with their costs, cheapest first.

    ``below``: see :func:`~convt3d.cuda.plan.search.cheapest`.
    """
    _, size = problem.extents(input_size)
    bases = []
    for base in _bases(problem, gpu):
        for separate in (True, False) if base.axes[2].unit_source > 1 else (True,):
            plan = replace(base, tile=replace(base.tile, separate=separate))
            work = plan.work(batch, size)
            bases.append((plan.bound(work, _residents(plan)[0]), (plan, work)))

    def price(base: tuple[GatherPlan, Work]) -> Iterator[tuple[float, GatherPlan]]:
        for plan in _with_pipelines(base[0], gpu):
            yield float(plan._costs(base[1]).min()), plan

    return cheapest(bases, price, below)
