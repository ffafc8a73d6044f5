"""Plans of ``strided_rows.cu``: strided.cu's products by warps that never meet, rows by TMA.

Extents that do not suit the kernel run on a plan of ``strided.cu``: source rows that are too long,
or no multiple of 16 bytes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from convt3d.cuda import strided_plan
from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.schedule import (
    Gpu,
    Launch,
    Problem,
    Schedule,
    TensorMap,
    div_up,
    round_up,
)
from convt3d.cuda.strided_plan import StridedPlan, Tile
from convt3d.precision import Arithmetic

_ELEMENTS = {Arithmetic.F16: "float16", Arithmetic.BF16: "bfloat16"}
_MOST_CREWS = 8
_MOST_STEPS = 4  # of eight channels: a stage has all of them
_STORERS = 3  # with the warp that fills the ring a warpgroup
_OTHER_REGISTERS = 56  # of a thread that does not multiply
_WARPS = ((16, 1), (8, 2), (12, 2))  # that multiply, with fragments of units; fastest first
# Times over those of strided.cu's best plan, read on an H200: outputs staged, and stored by lanes.
_STAGED, _DIRECT = 0.83, 1.05
_ON_TRIAL = 3.0  # prepared sources, not timed
_ORDER = 0.04  # from one of _WARPS to the next
# Rows of a ring; of prepared ones more are on their way.
_DEEPEST, _DEEPEST_PREPARED = 12, 24
_MOST_PAIRS = 768  # positions of a stage of 16 bits
# Of prepared sources: warps that multiply, with fragments; preparers beside storers, and alone.
_PREPARED_WARPS = ((12, 2), (8, 3), (8, 2), (16, 1))
_PREPARERS = (4, 3)


@dataclass(frozen=True)
class RowsTile:
    """The compile-time choices of a kernel."""

    warps: int  # that multiply
    fragments_m: int
    fragments_n: int
    weights_first: bool
    prepared: bool  # sources are split in halves, or made pairs of channels, by warps of their own
    ring: int  # stages
    width: int  # positions of a source row in a stage
    slices: int  # rows of a stage, along D
    storers: int = _STORERS  # none where outputs leave from registers
    preparers: int = 0


@dataclass(frozen=True)
class Crews:
    """How a call's extents are dealt to warps."""

    rows: int  # of units along H, a step
    line_fragments: int
    warps: int  # of a crew
    count: int
    march: int  # steps of a column
    steps: int  # along H


@dataclass(frozen=True)
class StridedRowsPlan:
    """A kernel for one problem; ``plain`` runs the extents that do not suit it."""

    problem: Problem
    tile: RowsTile
    plain_tile: Tile
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)

    @functools.cached_property
    def plain(self) -> StridedPlan:
        return StridedPlan(self.problem, self.plain_tile, self.gpu)

    @functools.cached_property
    def products(self) -> StridedPlan:
        """A plan of strided.cu with the same products."""
        t = self.tile
        depth = div_up(self.problem.source_channels, 8)
        tile = Tile(
            t.warps, t.fragments_m, t.fragments_n, 2, depth, True, 1, self.vector, 64,
            weights_first=t.weights_first, prepared=t.prepared,
        )  # fmt: skip
        return StridedPlan(self.problem, tile, self.gpu)

    @property
    def vector(self) -> int:
        """Elements of 16 bytes, of which rows are multiples."""
        return 16 // self.problem.element_bytes

    @property
    def threads(self) -> int:
        return 32 * (self.tile.warps + self.tile.storers + self.tile.preparers + 1)

    @property
    def registers(self) -> int:
        """Of a thread that multiplies (RowsRegisters)."""
        launched = 65536 // self.threads // 8 * 8 * self.threads
        others = _OTHER_REGISTERS * (self.threads - 32 * self.tile.warps)
        return (launched - others) // (32 * self.tile.warps) // 8 * 8

    @property
    def stage_bytes(self) -> int:
        bytes_ = self.problem.element_bytes
        return bytes_ * 8 * self.products.tile.depth * self.tile.width * self.tile.slices

    @property
    def _pipeline_bytes(self) -> int:
        stages = 4 if self.tile.preparers > 0 else 2
        barriers = 8 * (stages * self.tile.ring + 1 + 4 * _MOST_CREWS)
        pipeline = self.tile.ring * self.stage_bytes + 4 * self.products.chunk_weight_words
        return round_up(pipeline + barriers, 128)

    def shared_bytes(self, crews: Crews, target: Sequence[int]) -> int:
        if self.products.direct(target):
            return self._pipeline_bytes
        # Eight channels of the outputs of a step along H and W, in two buffers a crew.
        outputs = crews.rows * self.products.axes[1].unit_target * target[2]
        bytes_ = self.problem.element_bytes
        run = round_up(outputs * bytes_, 128) + 128
        return self._pipeline_bytes + crews.count * 2 * 8 * run

    # ------------------------------------------------------------ extents

    def _crews(self, batch: int, target: Sequence[int]) -> Iterator[Crews]:
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
            for count in range(min(t.warps // warps, _MOST_CREWS), 0, -1):
                # The ring holds what all crews work on, and a row more.
                if count * rows + self.products.axes[1].shifts <= t.ring:
                    yield Crews(rows, line, warps, count, steps // best, steps)
                    break

    def crews(self, batch: int, source: Sequence[int], target: Sequence[int]) -> Crews | None:
        """How extents are dealt to warps; None: this kernel does not take them."""
        p, t = self.products, self.tile
        last = round_up(p.needed(target)[2], 2) - 2
        first = p.lead // p.window_vector * p.window_vector
        if source[2] % self.vector or first + last + p.window > t.width:
            return None
        if t.storers == 0 and not p.direct(target):
            return None
        found = [
            crews
            for crews in self._crews(batch, target)
            if self.shared_bytes(crews, target) <= self.gpu.shared_per_block
        ]
        if not found:
            return None
        # Fragments that work, of rows that exist; of as many, short steps.
        return max(found, key=lambda c: (c.count * c.line_fragments / c.steps, -c.rows))

    def busy(self, batch: int, target: Sequence[int]) -> float:
        """The share of multiprocessors that has something to do."""
        crews = self.crews(batch, [round_up(n, self.vector) for n in target], target)
        if crews is None:
            return 1e-9
        needed = self.products.needed(target)
        count = batch * needed[0] * (crews.steps // crews.march)
        return self.products.busy(count)

    # ------------------------------------------------------------ launches

    @functools.cached_property
    def macros(self) -> tuple[tuple[str, str], ...]:
        t = self.tile
        return self.products.ring_macros(t.ring, t.width, t.slices, t.storers, t.preparers)

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        target = self.problem.geometry.output_size(input_size)
        crews = self.crews(batch, input_size, target)
        if crews is None:
            return self.plain.schedule(batch, input_size)
        p, t = self.products, self.tile
        needed = p.needed(target)
        count = batch * needed[0] * (crews.steps // crews.march)
        numbers = (
            *target, target[1] * target[2], target[2],
            1, crews.rows, needed[2], needed[0], crews.steps, crews.line_fragments,
            count, crews.march, crews.count, crews.warps,
        )  # fmt: skip
        channels = self.problem.source_channels * self.problem.geometry.groups
        bytes_ = self.problem.element_bytes
        d, h, w = input_size
        source = TensorMap(
            "source",
            _ELEMENTS.get(self.problem.arithmetic, "float32"),
            (w, h, d, channels, batch),
            (bytes_ * w, bytes_ * w * h, bytes_ * w * h * d, bytes_ * w * h * d * channels),
            (t.width, 1, t.slices, 8 * p.tile.depth, 1),
        )
        product = Launch(
            KernelSpec("strided_rows.cu", "convt3d_strided_rows", self.macros),
            p.workers(count) * p.teams,
            self.threads,
            self.shared_bytes(crews, target),
            ("packed", "bias", "target", source, *map(np.int32, numbers)),
            dependent=True,
        )
        return Schedule((p.pack(self.macros), product), {"packed": 4 * p.packed_words})

    def describe(self) -> dict[str, str]:
        t = self.tile
        return {
            "kernel": "strided (all phases of a row in one CTA), mma.sync, rows by TMA",
            "tile": f"rows of {t.width} positions x {self.products.column_tile} columns",
            "unit": "x".join(str(a.unit_target) for a in self.products.axes) + " outputs",
            "warps": f"{t.warps} in crews, fragments {t.fragments_m} x {t.fragments_n}"
            + (", weights first" if t.weights_first else ""),
            "pipeline": f"{t.ring} rows, weights resident"
            + (f", prepared by {t.preparers} warps" if t.prepared else ""),
            "shared memory": f"{self._pipeline_bytes} bytes and staging",
        }


def refusal(problem: Problem) -> str | None:
    """Why strided_rows.cu cannot take a problem, or None."""
    if not problem.forward:
        return "the kernel computes outputs"
    if problem.source_channels_last or problem.target_channels_last:
        return "the kernel takes contiguous tensors"
    if not all(map(all, strided_plan.live_slots(problem))):
        return "some outputs have no tap"
    channels = problem.source_channels
    if problem.element_bytes == 2 and not _sources_may_be_prepared(problem):
        return "16 bits are multiplied in pairs of shifts along W, of two slots"
    if channels > 8 * _MOST_STEPS or (problem.geometry.groups > 1 and channels % 8):
        return f"{channels} channels of a group are no stage"
    return strided_plan.refusal(problem)


def _sources_may_be_prepared(problem: Problem) -> bool:
    g = problem.geometry
    return (
        problem.arithmetic is not Arithmetic.TF32
        and g.stride[2] % 2 == 0
        and strided_plan.axes_of(problem)[2].shifts <= 4
    )


def _tiles(problem: Problem) -> Iterator[RowsTile]:
    columns = div_up(problem.target_channels, 8)
    if problem.element_bytes == 4:
        firsts = (False, True) if strided_plan.weights_may_come_first(problem) else (False,)
        if strided_plan.axes_of(problem)[2].shifts > strided_plan.CHAIN:
            firsts = firsts[::-1]
        for first, (warps, m) in itertools.product(firsts, _WARPS):
            for n in (1, 2):
                if n <= columns:
                    yield RowsTile(warps, m, n, first, False, 0, 0, 0)
    if _sources_may_be_prepared(problem):
        for warps, m in _PREPARED_WARPS:
            yield RowsTile(warps, m, 1, True, True, 0, 0, 0)


def ranked(
    problem: Problem,
    batch: int,
    target: Sequence[int],
    gpu: Gpu,
    plains: Sequence[tuple[float, StridedPlan]],
) -> list[tuple[float, StridedRowsPlan]]:
    """Candidates for destination extents of a class with their costs, cheapest first.

    ``plains``: those of strided.cu.
    """
    if refusal(problem) is not None or gpu.capability[0] != 9 or not plains:
        return []
    size = strided_plan.typical(problem, target)
    # Of strides of two, lines of odd lengths are odd whatever the input's.
    g = problem.geometry
    odd = g.stride[2] % 2 == 0 and g.output_size(g.kernel_size)[2] % 2 == 1
    if not odd:
        size = (size[0], size[1], round_up(size[2], 8))
    found: list[tuple[float, StridedRowsPlan]] = []
    for place, base in enumerate(_tiles(problem)):
        plan = _with_ring(StridedRowsPlan(problem, base, plains[0][1].tile, gpu), batch, size, odd)
        if plan is not None:
            # Measured of one step of float32-grade products.
            known = odd and problem.arithmetic is Arithmetic.IEEE and plan.products.tile.depth == 1
            ratio = (_STAGED if known else _DIRECT) * (1 + _ORDER * place)
            if base.prepared:
                ratio = _ON_TRIAL * (1 + _ORDER * place)
            found.append((plains[0][0] * ratio / plan.busy(batch, size), plan))
    return sorted(found, key=lambda item: item[0])


def _with_ring(
    plan: StridedRowsPlan, batch: int, target: Sequence[int], odd: bool
) -> StridedRowsPlan | None:
    """The plan with the width that a target needs, and the deepest ring of use that fits."""
    if plan.tile.prepared:
        storers, preparers = (_STORERS, _PREPARERS[0]) if odd else (0, _PREPARERS[1])
        plan = replace(plan, tile=replace(plan.tile, storers=storers, preparers=preparers))
    t, p = plan.tile, plan.products
    if (
        p.accumulators() > strided_plan.MAX_ACCUMULATORS
        or p.registers() - (50 if t.prepared else 24) > plan.registers
    ):
        return None
    last = round_up(p.needed(target)[2], 2) - 2
    first = p.lead // p.window_vector * p.window_vector
    vector = plan.vector
    # Channels, or pairs of them, in different banks.
    slices = p.axes[0].shifts
    width = round_up(first + last + p.window, vector)
    while width * slices % 16 != 8:
        if slices * vector % 16 == 0:
            slices += 1
        else:
            width += vector
    if width > 256 or (vector == 8 and width * slices > _MOST_PAIRS):
        return None
    source = [round_up(n, vector) for n in target]
    deepest = _DEEPEST_PREPARED if t.prepared else _DEEPEST
    for ring in range(deepest, p.axes[1].shifts, -1):
        deep = replace(plan, tile=replace(plan.tile, ring=ring, width=width, slices=slices))
        if deep.crews(batch, source, target) is not None:
            return deep
    return None
