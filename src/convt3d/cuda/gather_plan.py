"""Plans of ``gather.cu``: tile, fragments and pipeline for forward and gradient by input.

The numbers mirror ``gather_config.cuh``; the cost model ranks candidates by the cycles of one
multiprocessor, counting matrix steps, shared-memory traffic, fills, barriers and stores, and the
rows lost at tile borders.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.schedule import Gpu, Launch, Problem, Schedule, div_up, macros, round_up
from convt3d.geometry import Triple
from convt3d.polyphase import axis_phases
from convt3d.precision import Arithmetic

# A static axis enumerates its taps in registers; beyond these the code grows without gain.
_MAX_SLOTS2 = 16
_MAX_TAPS2 = 32
# Accumulators of a lane, and of IEEE-grade arithmetic, whose operands take twice the registers.
_MAX_ACCUMULATORS = 144
_MAX_ACCUMULATORS_IEEE = 96
# Cycles of a multiprocessor for one m16n8 step of a warp, read on an H200.
_STEP_CYCLES = 1.41


@dataclass(frozen=True)
class Axis:
    """One axis as the kernel sees it (see axis.cuh)."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    forward: bool
    block: int  # 0: phased
    flat: bool = False

    @property
    def phases(self) -> int:
        return self.stride if self.forward and not self.block and not self.flat else 1

    @property
    def unit_source(self) -> int:
        if self.flat:
            return 1
        return max(1, self.block) * (1 if self.forward else self.stride)

    @property
    def unit_target(self) -> int:
        if self.flat:
            return self.stride
        return max(1, self.block) * (self.stride if self.forward else 1)

    @property
    def slots(self) -> int:
        return self.unit_target if self.block else 1

    @functools.cached_property
    def reach(self) -> tuple[int, int]:
        """Smallest and largest shift over all slots or phases."""
        if self.flat:
            return (0, 0)
        if self.forward:
            count = max(1, self.block) * self.stride
            found = [
                (r + self.padding - k * self.dilation) // self.stride
                for r in range(count)
                for k in range(self.kernel)
                if (r + self.padding - k * self.dilation) % self.stride == 0
            ]
        else:
            found = [
                r * self.stride - self.padding + k * self.dilation
                for r in range(max(1, self.block))
                for k in range(self.kernel)
            ]
        return (min(found), max(found)) if found else (0, 0)

    @property
    def shifts(self) -> int:
        return self.reach[1] - self.reach[0] + 1

    @functools.cached_property
    def phase_taps(self) -> tuple[int, ...]:
        """Taps of each phase (of each slot modulo the stride)."""
        if self.flat:
            return (1,)
        if not self.forward:
            return (self.kernel,)
        return tuple(
            len(taps) for taps in axis_phases(self.kernel, self.stride, self.padding, self.dilation)
        )

    @property
    def max_taps(self) -> int:
        if self.flat:
            return 1
        return self.kernel if self.block else max(self.phase_taps)


@dataclass(frozen=True)
class Tile:
    """The free choices of a gather kernel."""

    block0: int
    units: Triple
    warps_m: int
    warps_n: int
    fragments_m: int
    fragments_n: int
    stages: int
    split: bool


@dataclass(frozen=True)
class GatherPlan:
    """A gather kernel for one problem and extents class."""

    problem: Problem
    tile: Tile
    swapped: bool  # the kernel's axes 0 and 1 are H and D
    flat: bool

    # ------------------------------------------------------------ derived sizes

    @property
    def order(self) -> Triple:
        return (1, 0, 2) if self.swapped else (0, 1, 2)

    @functools.cached_property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        g = self.problem.geometry
        blocks = (self.tile.block0, 0, 0 if self.flat else 1)
        first, second, third = (
            Axis(
                1 if self.flat else g.kernel_size[a],
                g.stride[a],
                g.padding[a],
                1 if self.flat else g.dilation[a],
                self.problem.forward,
                block,
                self.flat,
            )
            for a, block in zip(self.order, blocks, strict=True)
        )
        return (first, second, third)

    @property
    def threads(self) -> int:
        return 32 * self.tile.warps_m * self.tile.warps_n

    @property
    def columns(self) -> int:
        g = self.problem.geometry
        slots = g.stride[0] * g.stride[1] * g.stride[2] if self.flat else 1
        return self.problem.target_channels * slots

    @property
    def column_tile(self) -> int:
        return 8 * self.tile.warps_n * self.tile.fragments_n

    @property
    def column_tiles(self) -> int:
        return div_up(self.columns, self.column_tile)

    @property
    def chunk_channels(self) -> int:
        return 8 * 4 // self.problem.element_bytes

    @property
    def chunks(self) -> int:
        return div_up(self.problem.source_channels, self.chunk_channels)

    @property
    def vector(self) -> int:
        """Elements that one copy of the fill moves, where addresses allow."""
        bytes_ = self.problem.element_bytes
        if self.problem.source_channels_last:
            for vector in (16 // bytes_, 8 // bytes_, 4 // bytes_):
                if self.problem.source_channels % vector == 0:
                    return vector
            return 1
        if bytes_ == 4:
            return 4 if self.axes[2].unit_source == 1 else 1
        return 4

    @property
    def box(self) -> Triple:
        sizes = [
            (units - 1) * axis.unit_source + axis.shifts
            for units, axis in zip(self.tile.units, self.axes, strict=True)
        ]
        residues = self.axes[2].unit_source
        if not self.problem.source_channels_last and self.vector > 1 and residues == 1:
            sizes[2] = round_up(sizes[2] + self.vector - 1, self.vector)
        return (sizes[0], sizes[1], round_up(sizes[2], residues))

    @property
    def tile_words(self) -> int:
        positions = self.box[0] * self.box[1] * self.box[2]
        if self.problem.source_channels_last:
            return positions * 8
        return (round_up(positions - 8, 32) + 8) * 8

    @property
    def fragment_words(self) -> int:
        return 128 if self.problem.arithmetic is Arithmetic.IEEE else 64

    @property
    def row_words(self) -> int:
        taps2 = self.axes[2].kernel
        return taps2 * self.tile.warps_n * self.tile.fragments_n * self.fragment_words

    @property
    def stage_weight_words(self) -> int:
        taps1 = 1 if self.tile.split else self.axes[1].max_taps
        return taps1 * self.axes[0].max_taps * self.row_words

    @property
    def shared_bytes(self) -> int:
        buffers = 2 if self.tile.split else self.tile.stages
        pipeline = buffers * self.tile_words + self.tile.stages * self.stage_weight_words
        return 4 * max(pipeline, self._staging_words)

    @property
    def _staging_words(self) -> int:
        if self.problem.target_channels_last:
            return 0
        stride2 = self.axes[2].stride
        if self.flat:
            run = stride2 if 8 % stride2 == 0 else 1
            rows = 8 // run
        else:
            run, rows = self.axes[2].slots, 8
        warps = self.tile.warps_m * self.tile.warps_n
        return warps * rows * (16 * self.tile.fragments_m * run + 4)

    @property
    def packed_words(self) -> int:
        taps = self.axes[0].kernel * self.axes[1].kernel
        return (
            self.problem.geometry.groups * self.column_tiles * self.chunks * taps * self.row_words
        )

    # ------------------------------------------------------------ launches

    @functools.cached_property
    def macros(self) -> tuple[tuple[str, str], ...]:
        p, t, axes = self.problem, self.tile, self.axes
        values: dict[str, object] = {
            "forward": p.forward,
            "flat": self.flat,
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
            "vector": self.vector,
        }
        for i, axis in enumerate(axes):
            values[f"tile{i}"] = t.units[i]
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
        tiles = [
            div_up(div_up(target[a], axis.unit_target), units)
            for a, axis, units in zip(self.order, self.axes, self.tile.units, strict=True)
        ]
        phases = self.axes[0].phases * self.axes[1].phases
        groups = self.problem.geometry.groups
        grid = phases * self.column_tiles * groups * tiles[0] * tiles[1] * tiles[2] * batch
        numbers = (
            *(source[a] for a in self.order),
            *_strides(source, self.order),
            *(target[a] for a in self.order),
            *_strides(target, self.order),
            *tiles,
        )
        product = Launch(
            KernelSpec("gather.cu", "convt3d_gather", self.macros),
            grid,
            self.threads,
            self.shared_bytes,
            ("source", "packed", "bias", "target", *map(np.int32, numbers)),
        )
        lanes = self.packed_words // (self.fragment_words // 32)
        weight_strides = ["weight_stride_in", "weight_stride_out"]
        weight_strides += [f"weight_stride_{'dhw'[a]}" for a in self.order]
        pack = Launch(
            KernelSpec("pack.cu", "convt3d_pack", self.macros),
            min(div_up(lanes, 256), 4096),
            256,
            0,
            ("weight", "packed", *weight_strides),
        )
        return Schedule((pack, product), {"packed": 4 * self.packed_words})

    def describe(self) -> dict[str, str]:
        t = self.tile
        kind = "kernel == stride" if self.flat else ("static" if t.block0 else "phased")
        return {
            "kernel": f"gather ({kind}), mma.sync",
            "axes": "H, D, W" if self.swapped else "D, H, W",
            "tile": "x".join(map(str, t.units)) + f" units x {self.column_tile} columns",
            "unit": "x".join(str(a.unit_target) for a in self.axes) + " outputs",
            "warps": f"{t.warps_m} x {t.warps_n}, fragments {t.fragments_m} x {t.fragments_n}",
            "pipeline": f"{t.stages} stages of " + ("a tap row" if t.split else "a channel chunk"),
            "shared memory": f"{self.shared_bytes} bytes",
        }

    # ------------------------------------------------------------ cost

    def accumulators(self) -> int:
        """Live accumulator registers of a lane; slots without a tap cost none."""
        live0 = self.axes[0].slots if self.tile.block0 else 1
        live2 = 1
        if not self.flat:
            axis = self.axes[2]
            live2 = sum(n > 0 for n in axis.phase_taps) if self.problem.forward else axis.slots
        return live0 * max(1, live2) * self.tile.fragments_m * self.tile.fragments_n * 4

    def cost(self, batch: int, target: Triple, gpu: Gpu) -> float:
        """Estimated multiprocessor cycles of one call on a whole GPU."""
        t, axes = self.tile, self.axes
        ieee = self.problem.arithmetic is Arithmetic.IEEE
        warps = t.warps_m * t.warps_n
        taps1 = sum(axes[1].phase_taps) / axes[1].phases
        taps2 = axes[2].kernel if not self.flat else 1
        if t.block0:
            steps0 = axes[0].kernel * t.block0
            loads0, weights0 = axes[0].shifts, axes[0].kernel
        else:
            steps0 = loads0 = weights0 = sum(axes[0].phase_taps) / axes[0].phases  # type: ignore[assignment]
        shifts2 = min(axes[2].shifts, axes[2].kernel * axes[2].slots)
        fragments = t.fragments_m * t.fragments_n
        steps = warps * taps1 * steps0 * taps2 * fragments
        matrix = steps * _STEP_CYCLES * (3.5 if ieee else 1.0)
        shared = (
            warps
            * taps1
            * (
                loads0 * shifts2 * t.fragments_m * 4
                + weights0 * taps2 * t.fragments_n * (4 if ieee else 2)
            )
        )
        bytes_ = self.problem.element_bytes
        rows = self.box[0] * self.box[1]
        wide = self.vector if bytes_ == 4 or self.problem.source_channels_last else 1
        copies = rows * self.box[2] * 8 / (32 * wide)
        # Short rows waste parts of 32-byte sectors and of warps.
        sectors = rows * 8 * (self.box[2] * 4 / 32 + 1)
        fill = copies * 2.5 + sectors / 2
        fill += self.stage_weight_words * (taps1 if t.split else 1) / 128 * 2
        barriers = 60.0 * (taps1 if t.split else 1)
        chunk = max(matrix, shared) + 0.35 * min(matrix, shared) + fill + barriers
        outputs = t.units[0] * t.units[1] * t.units[2] * self.column_tile
        outputs *= axes[0].slots * axes[2].slots
        run = t.units[2] * axes[2].slots * bytes_
        if self.flat:
            run = t.units[2] * axes[2].stride * bytes_
        if self.problem.target_channels_last:
            run = self.column_tile * bytes_
        # About 18 bytes a cycle are a multiprocessor's share of memory bandwidth.
        store = outputs * bytes_ / 18 * (run + 32) / run + 300
        resident = min(
            gpu.shared_per_multiprocessor // (self.shared_bytes + 1024), 512 // self.threads
        )
        if resident < 1:
            return float("inf")
        overlap = 1.0 if resident > 1 else 1.25
        latency = 900 / resident
        cta = (self.chunks * chunk + store) * overlap + latency * (1 + self.chunks / t.stages / 4)
        ctas = batch * self.problem.geometry.groups * self.column_tiles
        ctas *= axes[0].phases * axes[1].phases
        for a, axis, units in zip(self.order, axes, t.units, strict=True):
            ctas *= div_up(div_up(target[a], axis.unit_target), units)
        waves = ctas / gpu.multiprocessors
        return cta * max(waves, 1.0) if waves > 4 else cta * div_up(ctas, gpu.multiprocessors)


def _strides(extent: Sequence[int], order: Triple) -> tuple[int, int]:
    strides = (extent[1] * extent[2], extent[2], 1)
    return (strides[order[0]], strides[order[1]])


def refusal(problem: Problem) -> str | None:
    """Why gather.cu cannot take a problem, or None."""
    g = problem.geometry
    if _is_flat(problem):
        return None
    slots2 = g.stride[2] if problem.forward else 1
    if slots2 > _MAX_SLOTS2:
        return f"stride {g.stride[2]} along W exceeds the {_MAX_SLOTS2} slots of a unit"
    if g.kernel_size[2] > _MAX_TAPS2:
        return f"kernel {g.kernel_size[2]} along W exceeds {_MAX_TAPS2} taps"
    return None


def _is_flat(problem: Problem) -> bool:
    g = problem.geometry
    return (
        problem.forward
        and g.kernel_size == g.stride
        and g.padding == (0, 0, 0)
        and all(d == 1 or k == 1 for d, k in zip(g.dilation, g.kernel_size, strict=True))
    )


_UNITS2 = (8, 11, 16, 22, 32, 64)
_WARPS = ((4, 1), (2, 2), (1, 4), (8, 1), (4, 2))


def _tiles(rows: int, target: Sequence[int], axes: Sequence[Axis]) -> Iterator[Triple]:
    """Unit boxes that fill `rows` matrix rows well, no larger than the destination needs."""
    needed = [div_up(n, axis.unit_target) for n, axis in zip(target, axes, strict=True)]
    seen = set()
    for u2 in _UNITS2:
        u2 = min(u2, needed[2], rows)
        for u0 in (1, 2, 4) if not axes[0].block else (1, 2):
            u0 = min(u0, needed[0], rows // u2)
            u1 = min(rows // (u2 * max(1, u0)), needed[1])
            units = (u0, u1, u2)
            if u0 < 1 or u1 < 1 or units in seen:
                continue
            if u0 * u1 * u2 * 10 >= rows * 7 or list(units) == needed:
                seen.add(units)
                yield units


def _with_pipeline(plan: GatherPlan, gpu: Gpu) -> GatherPlan | None:
    """The deepest pipeline that leaves room for a second CTA, else the one that fits at all."""
    room = gpu.shared_per_multiprocessor // (256 // plan.threads or 1) - 1024
    options = [(4, False), (3, False), (2, False)]
    if plan.axes[1].max_taps > 1:
        options.append((2, True))
    for limit in (room, gpu.shared_per_block):
        for stages, split in options:
            chosen = replace(plan, tile=replace(plan.tile, stages=stages, split=split))
            if chosen.shared_bytes <= limit:
                return chosen
    return None


def candidates(problem: Problem, target: Triple, gpu: Gpu) -> Iterator[GatherPlan]:
    """Every sensible plan for destinations of this size, in no order."""
    g = problem.geometry
    flat = _is_flat(problem)
    ieee = problem.arithmetic is Arithmetic.IEEE
    limit = _MAX_ACCUMULATORS_IEEE if ieee else _MAX_ACCUMULATORS
    blocks = [(False, 0)]
    if not flat:
        for swapped, axis in ((False, 0), (True, 1)):
            if g.stride[axis] == 1 and g.dilation[axis] == 1 and 1 < g.kernel_size[axis] <= 7:
                blocks += [(swapped, block) for block in (2, 3, 4)]
                break
    for swapped, block0 in blocks:
        for (warps_m, warps_n), fragments_m, fragments_n in itertools.product(
            _WARPS, (1, 2, 4), (1, 2, 3, 4, 6, 8)
        ):
            tile = Tile(block0, (1, 1, 1), warps_m, warps_n, fragments_m, fragments_n, 2, False)
            base = GatherPlan(problem, tile, swapped, flat)
            accumulators = base.accumulators()
            # Cached A fragments of a static axis must fit beside the accumulators.
            cached = (base.axes[0].shifts if block0 else 1) * fragments_m * (8 if ieee else 4)
            if accumulators > limit or accumulators + cached > (170 if ieee else 190):
                continue
            spare = base.column_tiles * base.column_tile - base.columns
            if spare >= 8 and spare * 4 > base.columns:
                continue
            ordered = [target[a] for a in base.order]
            for units in _tiles(16 * warps_m * fragments_m, ordered, base.axes):
                plan = _with_pipeline(replace(base, tile=replace(tile, units=units)), gpu)
                if plan is not None:
                    yield plan


def ranked(problem: Problem, batch: int, target: Sequence[int], gpu: Gpu) -> list[GatherPlan]:
    """Candidates for destination extents of a class, cheapest first by the cost model."""
    # 66 rather than 64: large volumes are rarely multiples of a tile.
    a, b, c = (66 if n == 64 else n for n in target)
    found = [
        (plan.cost(batch, (a, b, c), gpu), plan) for plan in candidates(problem, (a, b, c), gpu)
    ]
    found.sort(key=lambda item: item[0])
    return [plan for cost, plan in found if cost < float("inf")]
