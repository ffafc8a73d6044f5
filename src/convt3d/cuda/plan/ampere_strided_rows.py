"""Plans of ``ampere/strided/rows.cu``: rows by TMA, warps that share no barrier.

A plan of ``ampere/strided/forward.cu`` runs other extents: source rows that are too long, or no
multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan import ampere_strided
from convt3d.cuda.plan.ampere_strided import StridedPlan, Tile
from convt3d.cuda.plan.launches import with_strides
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.search import by_cost, with_tile
from convt3d.cuda.plan.warpgroups import multiplying_registers
from convt3d.cuda.schedule import (
    Gpu,
    Launch,
    Problem,
    Schedule,
    TensorMap,
    div_up,
    not_taken,
    round_up,
)
from convt3d.precision import Arithmetic

_MOST_WARP_TEAMS = 8
_MOST_STEPS = 4  # of eight channels: a stage has all of them
_STORE_WARPS = 3  # with the warp that fills the ring a warpgroup
_OTHER_REGISTERS = 56  # of a thread that does not multiply
_WARPS = ((16, 1), (8, 2), (12, 2))  # that multiply, with fragments of units; fastest first
# Times over those of ampere/strided/forward.cu's best plan, read on an H200: outputs staged, and
# stored by lanes.
_STAGED, _DIRECT = 0.83, 1.05
_VECTOR = 4
_LINE = 32  # elements of a line of memory
_ORDER = 0.04  # from one of _WARPS to the next
_DEEPEST = 12  # rows of a ring


@dataclass(frozen=True)
class RowsTile:
    """The compile-time choices of a kernel."""

    warps: int  # that multiply
    fragments_m: int
    fragments_n: int
    ring: int  # stages
    width: int  # positions of a source row in a stage
    slices: int  # rows of a stage, along D


@dataclass(frozen=True)
class WarpTeams:
    """How a call's extents are distributed over warps."""

    rows: int  # of units along H, a step
    line_fragments: int
    warps: int  # of a team
    count: int
    sweep: int  # steps of a column
    steps: int  # along H


@dataclass(frozen=True)
class StridedRowsPlan:
    """A kernel for one problem, of the extents that suit it."""

    problem: Problem
    tile: RowsTile
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)

    @once
    def products(self) -> StridedPlan:
        """A plan of ampere/strided/forward.cu with the same products."""
        t = self.tile
        depth = div_up(self.problem.source_channels, 8)
        tile = Tile(t.warps, t.fragments_m, t.fragments_n, 2, depth, True, 1, _VECTOR, 64)
        return StridedPlan(self.problem, tile, self.gpu)

    @property
    def threads(self) -> int:
        return 32 * (self.tile.warps + _STORE_WARPS + 1)

    @property
    def registers(self) -> int:
        """Of a thread that multiplies (RowsRegisters)."""
        return multiplying_registers(self.threads, 32 * self.tile.warps, _OTHER_REGISTERS)

    @property
    def stage_bytes(self) -> int:
        return 4 * 8 * self.products.tile.depth * self.tile.width * self.tile.slices

    @property
    def _pipeline_bytes(self) -> int:
        barriers = 8 * (2 * self.tile.ring + 1 + 4 * _MOST_WARP_TEAMS)
        pipeline = self.tile.ring * self.stage_bytes + 4 * self.products.chunk_weight_words
        return round_up(pipeline + barriers, 128)

    def shared_bytes(self, warp_teams: WarpTeams, target: Sequence[int]) -> int:
        if self.products.direct(target):
            return self._pipeline_bytes
        # Eight channels of the outputs of a step along H and W, in two buffers a team.
        outputs = warp_teams.rows * self.products.axes[1].unit_target * target[2]
        run = round_up(outputs, _LINE) + _LINE
        return self._pipeline_bytes + warp_teams.count * 2 * 8 * run * 4

    # ------------------------------------------------------------ extents

    def _warp_teams(self, batch: int, target: Sequence[int]) -> Iterator[WarpTeams]:
        t, needed = self.tile, self.products.needed(target)
        line = div_up(needed[2], 16)
        for rows in range(1, needed[1] + 1):
            warps = div_up(rows * line, t.fragments_m)
            if warps > t.warps:
                return
            steps = div_up(needed[1], rows)
            most = self.products.most_workers
            columns = batch * needed[0]
            # Columns whole, or in as few equal parts as deal them evenly.
            parts = [n for n in range(1, min(steps, 8) + 1) if steps % n == 0]
            best = min(parts, key=lambda n: (div_up(columns * n, most) / n, n))
            for count in range(min(t.warps // warps, _MOST_WARP_TEAMS), 0, -1):
                # The ring holds what all teams work on, and a row more.
                if count * rows + self.products.axes[1].shifts <= t.ring:
                    yield WarpTeams(rows, line, warps, count, steps // best, steps)
                    break

    def warp_teams(
        self, batch: int, source: Sequence[int], target: Sequence[int]
    ) -> WarpTeams | None:
        """How extents are distributed over warps; None: this kernel does not take them."""
        p, t = self.products, self.tile
        last = round_up(p.needed(target)[2], 2) - 2
        first = p.lead // p.window_vector * p.window_vector
        if source[2] % _VECTOR or first + last + p.window > t.width:
            return None
        found = [
            warp_teams
            for warp_teams in self._warp_teams(batch, target)
            if self.shared_bytes(warp_teams, target) <= self.gpu.shared_per_block
        ]
        if not found:
            return None
        # Fragments that work, of rows that exist; of as many, short steps.
        return max(found, key=lambda c: (c.count * c.line_fragments / c.steps, -c.rows))

    def work_tiles(self, warp_teams: WarpTeams, batch: int, target: Sequence[int]) -> int:
        """Columns of a call, or parts of them."""
        needed = self.products.needed(target)
        return batch * needed[0] * (warp_teams.steps // warp_teams.sweep)

    # ------------------------------------------------------------ launches

    @once
    def macros(self) -> tuple[tuple[str, str], ...]:
        t = self.tile
        return self.products.ring_macros(t.ring, t.width, t.slices)

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        target = self.problem.geometry.output_size(input_size)
        warp_teams = self.warp_teams(batch, input_size, target)
        if warp_teams is None:
            raise not_taken(self, input_size)
        p, t = self.products, self.tile
        needed = p.needed(target)
        count = self.work_tiles(warp_teams, batch, target)
        numbers = (
            *with_strides(target),
            1, warp_teams.rows, needed[2], needed[0], warp_teams.steps, warp_teams.line_fragments,
            count, warp_teams.sweep, warp_teams.count, warp_teams.warps,
        )  # fmt: skip
        channels = self.problem.source_channels * self.problem.geometry.groups
        d, h, w = input_size
        source = TensorMap.dense(
            "source",
            "float32",
            (w, h, d, channels, batch),
            (t.width, 1, t.slices, 8 * p.tile.depth, 1),
        )
        product = Launch(
            KernelSpec("ampere/strided/rows.cu", "convt3d_ampere_strided_rows", self.macros),
            p.workers(count) * p.n_tiles,
            self.threads,
            self.shared_bytes(warp_teams, target),
            ("packed", "bias", "target", source, *map(np.int32, numbers)),
            dependent=True,
        )
        return p.packed_first(product)

    def describe(self) -> dict[str, str]:
        t = self.tile
        return {
            "kernel": "strided (all phases of a row in one CTA), mma.sync, rows by TMA",
            "tile": f"rows of {t.width} positions x {self.products.column_tile} columns",
            "unit": "x".join(str(a.unit_target) for a in self.products.axes) + " outputs",
            "warps": f"{t.warps} in teams, fragments {t.fragments_m} x {t.fragments_n}",
            "pipeline": f"{t.ring} rows, weights resident",
            "shared memory": f"{self._pipeline_bytes} bytes and staging",
        }


def refusal(problem: Problem) -> str | None:
    """Why ampere/strided/rows.cu cannot take a problem, or None."""
    if not problem.forward or problem.element_bytes != 4:
        return "the kernel computes outputs in float32"
    if problem.source_channels_last or problem.target_channels_last:
        return "the kernel takes contiguous tensors"
    if not all(map(all, ampere_strided.live_slots(problem))):
        return "some outputs have no tap"
    channels = problem.source_channels
    if channels > 8 * _MOST_STEPS or (problem.geometry.groups > 1 and channels % 8):
        return f"{channels} channels of a group are no stage"
    return ampere_strided.refusal(problem)


def _tiles(problem: Problem, odd: bool) -> Iterator[tuple[float, RowsTile]]:
    """Tiles, with times over those of ampere/strided/forward.cu's best plan."""
    columns = div_up(problem.target_channels, 8)
    # Measured of one step of float32-grade products.
    known = odd and problem.arithmetic is Arithmetic.IEEE and problem.source_channels <= 8
    for place, (warps, m) in enumerate(_WARPS):
        ratio = (_STAGED if known else _DIRECT) * (1 + _ORDER * place)
        for n in (1, 2):
            if n <= columns:
                yield ratio, RowsTile(warps, m, n, 0, 0, 0)


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, StridedRowsPlan]]:
    """Candidates for these input extents with their costs, cheapest first."""
    if refusal(problem) is not None or gpu.capability[0] != 9:
        return []
    # The kernel is described by its share of what ampere/strided/forward.cu takes.
    strided = ampere_strided.least_cost(problem, batch, tuple(input_size), gpu)
    if strided is None:
        return []
    source, target = problem.extents(input_size)
    odd = target[2] % 2 == 1
    found: list[tuple[float, StridedRowsPlan]] = []
    for ratio, base in _tiles(problem, odd):
        for plan, warp_teams in _with_ring(
            StridedRowsPlan(problem, base, gpu), batch, source, target
        ):
            busy = plan.products.busy(plan.work_tiles(warp_teams, batch, target))
            found.append((strided * ratio / busy, plan))
    return by_cost(found)


def _with_ring(
    plan: StridedRowsPlan,
    batch: int,
    source: Sequence[int],
    target: Sequence[int],
) -> Iterator[tuple[StridedRowsPlan, WarpTeams]]:
    """The plan with the width that a target needs, and the deepest ring of use that fits."""
    p = plan.products
    if p.accumulators() > ampere_strided.MAX_ACCUMULATORS or p.registers() - 24 > plan.registers:
        return
    last = round_up(p.needed(target)[2], 2) - 2
    first = p.lead // p.window_vector * p.window_vector
    slices = p.axes[0].shifts
    width = round_up(first + last + p.window, _VECTOR)
    while width * slices % 16 != 8:
        if slices % 4 == 0:
            slices += 1
        else:
            width += _VECTOR
    if width > 256:
        return
    for ring in range(_DEEPEST, p.axes[1].shifts, -1):
        deep = with_tile(plan, ring=ring, width=width, slices=slices)
        warp_teams = deep.warp_teams(batch, source, target)
        if warp_teams is not None:
            yield deep, warp_teams
            return
