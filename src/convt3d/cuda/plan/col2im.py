"""Plans of ``col2im``: layers that produce so few channels that all taps fit beside another.

The numbers mirror ``col2im/config.cuh``. The cost model counts, for a step of one CTA, the cycles
of its loads, of its products with their weights, and of finished planes that pass through shared
memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.axes import Axis, StackedAxis
from convt3d.cuda.plan.depthwise import SweptAxis
from convt3d.cuda.plan.launches import packed_first
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.search import by_cost, with_tile
from convt3d.cuda.schedule import (
    Gpu,
    Launch,
    Problem,
    Schedule,
    div_up,
    geometry_macros,
    macros,
    problem_macros,
    round_up,
)
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic

_MAX_SUMS = 128
# Registers of a thread beside its sums and the words it loads.
_SPARE_REGISTERS = 52
_MAX_WEIGHTS = 96 * 1024
# Bytes a cycle that one multiprocessor gets from memory or L2 while all of them read.
_L2_BYTES = 22.0
# Cycles until what a thread loads has arrived.
_LATENCY = 1100.0
# Cycles of one product of a multiprocessor's tensor cores.
_PRODUCT = 1.6
# Cycles of a step beside its work: a barrier for each plane, and what waits there.
_STEP = 500.0
_START = 9000.0
# What the others' models count for a cycle of this one: timed on k3 and k4 s2 to one channel.
_SCALE = 1.35
# What split products, rows of no whole vectors, and gradients take of what is counted.
_IEEE, _ODD_ROWS, _GRADIENT = 0.85, 1.4, 1.4
_CONTIGUOUS = {1: 1.3, 2: 1.05}  # of NCDHW sources, by words of a value, over 14 layers
_NO_PLANE = 1.5  # without taps of H and W: 1.2 in float32 and 1.7 in 16 bits of 128 to 16 k3x1x1


@dataclass(frozen=True)
class Col2imTile:
    """The compile-time choices of a kernel."""

    warps: int
    vector: int  # neighbouring positions of a lane
    resident: int = 1
    batch: int = 1  # loads of a lane in flight
    keep_planes: bool = False  # sources of a unit's planes stay in registers, not its sums

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def positions(self) -> int:
        return 8 * self.vector * self.warps


@dataclass(frozen=True)
class Shape:
    """A tile: units of the plane, and source columns of its lines."""

    tile1: int
    tile2: int
    width: int


@dataclass(frozen=True)
class Col2imPlan:
    """A kernel for one problem on one kind of GPU."""

    problem: Problem
    tile: Col2imTile
    multiprocessors: int

    # ------------------------------------------------------------ derived sizes

    @once
    def padding(self) -> Triple:
        return _padding(self.problem)

    @once
    def sweep(self) -> StackedAxis:
        g = self.problem.geometry
        return StackedAxis(
            g.kernel_size[0], g.stride[0], self.padding[0], g.dilation[0], True, planes=1
        )

    @once
    def depth(self) -> SweptAxis:
        """Axis 0, as one of units."""
        g = self.problem.geometry
        return SweptAxis(
            g.kernel_size[0], g.stride[0], self.padding[0], g.dilation[0], forward=True, block=1
        )

    @once
    def plane(self) -> tuple[Axis, Axis]:
        """Axes 1 and 2."""
        g = self.problem.geometry
        one, two = (
            Axis(g.kernel_size[a], g.stride[a], self.padding[a], g.dilation[a], True, 1)
            for a in (1, 2)
        )
        return (one, two)

    @once
    def parts(self) -> int:
        return self.problem.words_per_value

    @once
    def columns(self) -> int:
        """Of a plane: its taps, each with all produced channels."""
        _, kh, kw = self.problem.geometry.kernel_size
        return kh * kw * self.problem.target_channels

    @property
    def fragments(self) -> int:
        return div_up(self.columns, 8)

    @property
    def sums(self) -> int:
        """Accumulators of a thread."""
        planes = 1 if self.tile.keep_planes else self.sweep.window
        return planes * self.fragments * self.tile.vector * 2

    @property
    def kept(self) -> int:
        """Registers of operands that stay."""
        if not self.tile.keep_planes:
            return 0
        return self.depth.shifts * self.steps * 2 * self.tile.vector * self.parts

    @property
    def load_steps(self) -> int:
        return 2 if self.problem.source_channels_last else 1

    @property
    def load_words(self) -> int:
        """That one load of a lane brings."""
        return 2 * self.tile.vector * self.load_steps

    @once
    def loads(self) -> int:
        """Of a lane for all channels, at least."""
        channels = self.load_steps * 32 // self.problem.element_bytes
        return div_up(self.problem.source_channels, channels)

    @property
    def rounds(self) -> int:
        return div_up(self.loads, self.tile.batch)

    @property
    def steps(self) -> int:
        return self.rounds * self.tile.batch * self.load_steps

    @property
    def weight_bytes(self) -> int:
        """Of a group."""
        taps0 = self.problem.geometry.kernel_size[0]
        return self.steps * taps0 * self.fragments * 256 * self.parts

    @property
    def packed_bytes(self) -> int:
        return self.problem.geometry.groups * self.weight_bytes

    @property
    def shared_bytes(self) -> int:
        return self.weight_bytes + 2 * 4 * self.columns * (self.tile.positions + 4)

    @property
    def registers(self) -> int:
        """That a thread may have."""
        return min(255, 65536 // (self.tile.threads * self.tile.resident) // 8 * 8)

    # ------------------------------------------------------------ launches

    def macros(self, whole_rows: bool) -> tuple[tuple[str, str], ...]:
        p, t, g = self.problem, self.tile, self.problem.geometry
        own: dict[str, object] = {
            "warps": t.warps,
            "vector": t.vector,
            "resident": t.resident,
            "batch": t.batch,
            "rounds": self.rounds,
            "keep_planes": t.keep_planes,
            "whole_rows": whole_rows,
        }
        return (
            p.type_macros
            + problem_macros(p)
            + macros("CONVT3D_", **own)
            + geometry_macros(replace(g, padding=self.padding))
        )

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        source, target = self.problem.extents(input_size)
        shape = self.shape(batch, source, target)
        whole_rows = source[2] % self.tile.vector == 0
        own_macros = self.macros(whole_rows)
        vectors = whole_rows or self.problem.source_channels_last
        numbers = (*source, *target, batch, shape.tile1, shape.tile2, shape.width)
        product = Launch(
            KernelSpec("col2im/kernel.cu", "convt3d_col2im", own_macros),
            self.multiprocessors * self.tile.resident,
            self.tile.threads,
            self.shared_bytes,
            ("source", "packed", "bias", "target", *map(np.int32, numbers)),
            dependent=True,
        )
        blocks = min(div_up(self.packed_bytes // (8 * self.parts), 256), 4096)
        aligned = ("source",) if vectors else ()
        return packed_first(product, blocks, self.packed_bytes, aligned=aligned)

    def describe(self) -> dict[str, str]:
        t = self.tile
        return {
            "kernel": "col2im, all taps at once, mma.sync",
            "tile": f"{t.positions} positions x {self.columns} columns",
            "unit": f"{self.sweep.target_step} planes a step, "
            + (
                f"{self.depth.shifts} of sources"
                if t.keep_planes
                else f"{self.sweep.window} of sums"
            )
            + " in registers",
            "warps": f"{t.warps}, {t.vector} neighbours a lane",
            "pipeline": f"{t.batch} loads in flight, {self.rounds} rounds, "
            f"{t.resident} CTAs a multiprocessor",
            "shared memory": f"{self.shared_bytes} bytes",
        }

    # ------------------------------------------------------------ tile shape and cost

    def _width(self, units: int, tile2: int, extent: int) -> int:
        """Source columns of a line of the widest tile: from an aligned one to an aligned one."""
        low, high = self.plane[1].reach
        vector = self.tile.vector
        found = vector
        # Behind the tiles that the low end cuts off, every `vector`-th begins alike; what the high
        # end cuts off is never wider.
        count = min(div_up(units, tile2), vector + div_up(max(0, -low), tile2))
        for first in range(0, count * tile2, tile2):
            begin = max(0, first + low) // vector * vector
            end = min(round_up(extent, vector), round_up(first + tile2 + high, vector))
            found = max(found, end - begin)
        return found

    def shapes(self, source: Sequence[int], target: Sequence[int]) -> list[Shape]:
        """Tiles that the positions of a CTA suffice for."""
        one, two = self.plane
        units1, units2 = one.units(target[1]), two.units(target[2])
        found = []
        for tile2 in sorted({div_up(units2, parts) for parts in range(1, 17)} | {1}):
            width = self._width(units2, tile2, source[2])
            most = self.tile.positions // width - one.reach_units
            if most >= 1:
                tile1 = div_up(units1, div_up(units1, most))
                found.append(Shape(tile1, tile2, width))
        return found

    def _cost(
        self, shape: Shape, batch: int, source: Sequence[int], target: Sequence[int]
    ) -> float:
        t, sweep, p = self.tile, self.sweep, self.problem
        one, two = self.plane
        tiles = div_up(one.units(target[1]), shape.tile1) * div_up(
            two.units(target[2]), shape.tile2
        )
        sweeps = tiles * batch * p.geometry.groups
        if t.keep_planes:
            steps, warm = div_up(target[0], self.depth.slots), 1
        else:
            steps, warm = sweep.steps(target[0]), sweep.warm_steps
            sweeps *= sweep.interleaved
        ctas = self.multiprocessors * t.resident
        most = div_up(sweeps * steps, ctas)
        begun = most // steps + 1 if most % steps else most // steps
        most += begun * warm

        lines = shape.tile1 + one.reach_units
        in_flight = 4 * self.load_words * t.batch * t.threads * t.resident
        moved = lines * shape.width * p.source_channels * p.element_bytes
        loads = moved / min(_L2_BYTES, in_flight / _LATENCY)
        outputs = shape.tile1 * shape.tile2 * p.target_channels * sweep.target_step
        outputs *= one.unit_target * two.unit_target
        loads += outputs * p.element_bytes / _L2_BYTES

        fragments = t.warps * self.steps * p.geometry.kernel_size[0] * self.fragments
        products = fragments * t.vector / 2 * _PRODUCT * (4 if self.parts > 1 else 1)
        products += fragments * 2 * self.parts
        staged = t.warps * self.fragments * 2 * t.vector
        added = 1.5 * div_up(shape.tile1 * shape.tile2 * p.target_channels, 32)
        added *= div_up(self.columns, p.target_channels)
        work = products + sweep.target_step * (staged + added)
        step = max(loads, work) + 0.4 * min(loads, work)
        scale = _SCALE * (_IEEE if self.parts > 1 else 1.0)
        scale *= _ODD_ROWS if source[2] % t.vector else 1.0
        scale *= 1.0 if p.forward else _GRADIENT
        scale *= 1.0 if p.source_channels_last else _CONTIGUOUS[self.parts]
        scale *= _NO_PLANE if max(p.geometry.kernel_size[1:]) == 1 else 1.0
        return scale * (_START + most * (step * t.resident + _STEP))

    def shape(self, batch: int, source: Sequence[int], target: Sequence[int]) -> Shape:
        """The cheapest tile for these extents."""
        shapes = self.shapes(source, target)
        return min(shapes, key=lambda shape: self._cost(shape, batch, source, target))

    def cost(self, batch: int, source: Sequence[int], target: Sequence[int]) -> float:
        """Estimated cycles of one call."""
        return min(
            self._cost(shape, batch, source, target) for shape in self.shapes(source, target)
        )


def _padding(problem: Problem) -> Triple:
    """Of the forward pass that the kernel runs: gradients are one with taps in reverse order."""
    g = problem.geometry
    if problem.forward:
        return g.padding
    a, b, c = (
        d * (k - 1) - p for k, p, d in zip(g.kernel_size, g.padding, g.dilation, strict=True)
    )
    return (a, b, c)


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why col2im/kernel.cu cannot take a problem, or None."""
    g = problem.geometry
    if gpu.capability[0] < 9:
        return "taps are put together on compute capability 9.0 and later"
    if not problem.forward and max(g.stride) > 1:
        return "a strided gradient meets a part of the taps at each position"
    if min(_padding(problem)) < 0:
        return "padding beyond the kernel leaves planes that no tap reaches"
    row = problem.source_channels * problem.element_bytes
    if problem.source_channels_last and row % 16:
        return f"{problem.source_channels} channels are no vectors of 16 bytes"
    return None


def _plans(problem: Problem, gpu: Gpu) -> Iterator[Col2imPlan]:
    """Every sensible kernel."""
    g = problem.geometry
    dilated = g.kernel_size[0] > 1 and g.dilation[0] > 1
    for (warps, resident), vector, keep in itertools.product(
        ((12, 1), (8, 1), (16, 1), (8, 2), (4, 2), (4, 4)), (4, 2), (False, True)
    ):
        if dilated and (keep or g.stride[0] > 1):
            continue
        if keep and (vector < 4 or problem.arithmetic is Arithmetic.IEEE):
            continue
        tile = Col2imTile(warps, vector, resident, keep_planes=keep)
        plan = Col2imPlan(problem, tile, gpu.multiprocessors)
        if keep and with_tile(plan, keep_planes=False).sums <= _MAX_SUMS:
            continue  # as sums fit, they are what stays
        if keep:
            plan = with_tile(plan, batch=plan.loads)
        operands = 4 + (0 if keep else 2 * tile.vector * plan.parts)
        spare = plan.registers - plan.sums - plan.kept - operands - _SPARE_REGISTERS
        most = min(spare // plan.load_words, plan.loads if keep else 8)
        if keep and most < plan.loads:
            continue
        one, two = plan.plane
        smallest = (1 + one.reach_units) * round_up(two.reach_units + 2 * vector, vector)
        if plan.sums > _MAX_SUMS or most < 1 or smallest > tile.positions:
            continue
        batch = div_up(plan.loads, div_up(plan.loads, most))
        plan = with_tile(plan, batch=batch)
        room = gpu.shared_for(resident)
        if plan.weight_bytes <= _MAX_WEIGHTS and plan.shared_bytes <= room:
            yield plan


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, Col2imPlan]]:
    """Candidates with their costs for these input extents, cheapest first."""
    if refusal(problem, gpu) is not None:
        return []
    source, target = problem.extents(input_size)
    return by_cost((plan.cost(batch, source, target), plan) for plan in _plans(problem, gpu))
