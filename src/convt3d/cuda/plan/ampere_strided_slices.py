"""Plans of ``ampere/strided/slices.cu``: lines by bulk copies, warps that share no barrier.

A plan of ``ampere/strided/dgrad.cu`` runs other extents: lines that are too long,
and lines of the input gradient that are no multiple of a lane's outputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan import ampere_strided
from convt3d.cuda.plan.ampere_strided import StridedPlan, Tile
from convt3d.cuda.plan.axes import odd_lines
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.search import by_cost, with_tile
from convt3d.cuda.plan.warpgroups import multiplying_registers
from convt3d.cuda.schedule import (
    Gpu,
    Launch,
    Problem,
    Schedule,
    div_up,
    not_taken,
    round_up,
)
from convt3d.precision import Arithmetic

_MOST_STEPS = 4  # of eight channels: a stage has all of them, each brought by one lane
_MOST_EDGES = 4
# Warps that multiply, with fragments of elements, fastest first: odd lines and others.
_ODD_WARPS = ((8, 2), (16, 2), (12, 2), (24, 1))
_EVEN_WARPS = ((24, 1), (12, 2), (16, 1), (8, 2))
# Times over those of ampere/strided/dgrad.cu's best plan, read on an H200: of odd lines, which are
# read value by value, and of others; and of what was not timed.
_ODD, _EVEN, _OTHER = 0.77, 0.83, 1.05
_ORDER = 0.04  # from one number of warps to the next
_SPARE_WARPS = 4  # a warpgroup of those that do not


@dataclass(frozen=True)
class SlicesTile:
    """The compile-time choices of a kernel."""

    warps: int  # that multiply
    fragments_m: int
    fragments_n: int
    ring: int  # stages
    vector: int  # lines of the source are multiples of it
    plane: int  # words of a channel in a stage


@dataclass(frozen=True)
class SlicesShape:
    """A tile for the extents of a call."""

    lines: int
    line_fragments: int
    sweep: int

    def tiles(self, target: Sequence[int]) -> tuple[int, int]:
        """Tiles along D and H."""
        return div_up(target[0], self.sweep), div_up(target[1], self.lines)


@dataclass(frozen=True)
class StridedSlicesPlan:
    """A kernel for one problem, of the extents that suit it."""

    problem: Problem
    tile: SlicesTile
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)

    @once
    def products(self) -> StridedPlan:
        """A plan of ampere/strided/dgrad.cu with the same products."""
        t = self.tile
        depth = div_up(self.problem.source_channels, 8)
        tile = Tile(t.warps, t.fragments_m, t.fragments_n, 2, depth, True, 1, t.vector, 64)
        return StridedPlan(self.problem, tile, self.gpu)

    @property
    def threads(self) -> int:
        return 32 * (self.tile.warps + _SPARE_WARPS)

    @property
    def registers(self) -> int:
        """Of a thread that multiplies (SlicesRegisters)."""
        others = 24 if self.tile.warps > 20 else 40
        return multiplying_registers(self.threads, 32 * self.tile.warps, others)

    @property
    def shared_bytes(self) -> int:
        stage = 8 * self.products.tile.depth * self.tile.plane
        words = self.tile.ring * stage + self.products.chunk_weight_words
        return 4 * words + 8 * (2 * self.tile.ring + 1)

    # ------------------------------------------------------------ extents

    def plane_words(self, lines: int, width: int) -> int:
        """Room for a channel's lines, their alignment, and what a copy's end is rounded up by."""
        p = self.products
        reach = (lines - 1) * p.axes[1].unit_source + p.axes[1].shifts
        # Channels in different banks.
        return round_up(round_up(p.window, 4) + 6 + reach * width - 8, 32) + 8

    def shape(self, batch: int, target: Sequence[int]) -> SlicesShape | None:
        """The tile for destination extents; None: this kernel does not take them."""
        t, p = self.tile, self.products
        line = div_up(target[2], 16)
        most = t.warps * t.fragments_m // line
        width = self.problem.geometry.output_size(target)[2]
        while most > 0 and self.plane_words(most, width) > t.plane:
            most -= 1
        if most == 0 or not p.direct(target) or width % t.vector:
            return None
        lines = div_up(target[1], div_up(target[1], most))
        columns = batch * div_up(target[1], lines)
        return SlicesShape(lines, line, self._sweep(columns, target[0]))

    def _sweep(self, columns: int, extent: int) -> int:
        """Slices of a tile: as many as deal the work evenly."""
        workers = self.products.most_workers
        sweeps = [div_up(extent, parts) for parts in range(1, min(extent, 16) + 1)]
        # What a tile costs besides: the slices that it shares with its neighbours, its beginning.
        more = (self.products.lags - 1) / 2 + 0.25
        return min(
            sweeps,
            key=lambda n: div_up(columns * div_up(extent, n), workers) * (n + more),
        )

    # ------------------------------------------------------------ launches

    @once
    def macros(self) -> tuple[tuple[str, str], ...]:
        t = self.tile
        return self.products.ring_macros(t.ring, t.plane, 1)

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        source = self.problem.geometry.output_size(input_size)
        shape = self.shape(batch, input_size)
        if shape is None:
            raise not_taken(self, input_size)
        p = self.products
        tiles = shape.tiles(input_size)
        count = batch * tiles[0] * tiles[1]
        numbers = (
            *source, *input_size, shape.lines, input_size[2], *tiles,
            shape.line_fragments, count, shape.sweep,
        )  # fmt: skip
        product = Launch(
            KernelSpec("ampere/strided/slices.cu", "convt3d_ampere_strided_slices", self.macros),
            p.workers(count) * p.n_tiles,
            self.threads,
            self.shared_bytes,
            ("source", "packed", "target", *map(np.int32, numbers)),
            dependent=True,
        )
        return p.packed_first(product, aligned=("source",))

    def describe(self) -> dict[str, str]:
        t = self.tile
        return {
            "kernel": "strided gradient (a sweep along D), mma.sync, lines by bulk copies",
            "tile": f"{16 * t.warps * t.fragments_m} M rows x {self.products.column_tile} columns",
            "unit": "1x1x1 outputs",
            "warps": f"{t.warps}, fragments {t.fragments_m} x {t.fragments_n}",
            "pipeline": f"{t.ring} slices of {t.plane} words a channel, weights resident",
            "shared memory": f"{self.shared_bytes} bytes",
        }


def refusal(problem: Problem) -> str | None:
    """Why ampere/strided/slices.cu cannot take a problem, or None."""
    if problem.operation != "grad_input" or problem.element_bytes != 4:
        return "the kernel computes gradients by input in float32"
    if problem.source_channels_last or problem.target_channels_last:
        return "the kernel takes contiguous tensors"
    channels = problem.source_channels
    if channels % 8 or channels > 8 * _MOST_STEPS:
        return f"{channels} channels of a group are no stage"
    reason = ampere_strided.refusal(problem)
    g = problem.geometry
    if reason is None and any(math.gcd(g.stride[a], g.dilation[a]) > 1 for a in (1, 2)):
        reason = "stride and dilation have a common factor"
    if reason is None and g.padding[2] > _MOST_EDGES:
        reason = f"a padding of {g.padding[2]} along W"
    return reason


def _tiles(problem: Problem) -> Iterator[SlicesTile]:
    columns = div_up(problem.target_channels, 8)
    odd = odd_lines(problem)
    vector = 1 if odd else 4
    for (warps, m), n in itertools.product(_ODD_WARPS if odd else _EVEN_WARPS, (1, 2)):
        if n <= columns:
            yield SlicesTile(warps, m, n, 0, vector, 0)


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, StridedSlicesPlan]]:
    """Candidates for these input extents with their costs, cheapest first."""
    if refusal(problem) is not None or gpu.capability[0] != 9:
        return []
    # The kernel is described by its share of what ampere/strided/dgrad.cu takes.
    strided = ampere_strided.least_cost(problem, batch, tuple(input_size), gpu)
    if strided is None:
        return []
    _, size = problem.extents(input_size)
    measured = _ODD if odd_lines(problem) else _EVEN
    if problem.arithmetic is not Arithmetic.IEEE or problem.source_channels > 8:
        measured = _OTHER
    found: list[tuple[float, StridedSlicesPlan]] = []
    for place, base in enumerate(_tiles(problem)):
        for plan in _with_ring(StridedSlicesPlan(problem, base, gpu), size):
            shape = plan.shape(batch, size)
            if shape is not None:
                busy = plan.products.busy(batch * math.prod(shape.tiles(size)))
                ratio = measured * (1 + _ORDER * place)
                found.append((strided * ratio / busy, plan))
    return by_cost(found)


def _with_ring(plan: StridedSlicesPlan, target: Sequence[int]) -> Iterator[StridedSlicesPlan]:
    """The plan with as many whole lines as its fragments take, and the deepest ring that fits."""
    t, p = plan.tile, plan.products
    if p.accumulators() > ampere_strided.MAX_ACCUMULATORS or p.registers() - 32 > plan.registers:
        return
    width = round_up(plan.problem.geometry.output_size(target)[2], t.vector)
    for lines in range(t.warps * t.fragments_m // div_up(target[2], 16), 0, -1):
        for ring in (6, 5, 4, 3, 2):
            deep = with_tile(plan, ring=ring, plane=plan.plane_words(lines, width))
            if deep.shared_bytes <= plan.gpu.shared_per_block:
                yield deep
                return
