"""Plans with one tile shape for all extents.

The package picks a tile shape for the extents of each call by a cost model. An exported file has
one shape, the best for its problem's extents: right for all others, though not always the fastest
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from convt3d.cuda.plan.ampere_gather import GatherPlan
from convt3d.cuda.plan.ampere_strided import Shape, StridedPlan
from convt3d.cuda.plan.ampere_wgrad import WgradPlan
from convt3d.cuda.plan.sweep import WgmmaSweepPlan
from convt3d.cuda.plan.sweep.products import Line
from convt3d.cuda.schedule import Plan
from convt3d.geometry import Triple


@dataclass(frozen=True)
class PinnedGatherPlan(GatherPlan):
    """A gather kernel with one tile shape for all extents."""

    units: Triple = (1, 1, 1)

    def unit_box(self, batch: int, target: Sequence[int]) -> Triple:
        return self.units


@dataclass(frozen=True)
class PinnedSweepPlan(WgmmaSweepPlan):
    """A sweep kernel with one length of lines for all extents, and CTAs for those of its file."""

    units2: int = 1
    extents: tuple[int, ...] = ()  # batch and input that the file is made for
    ctas_there: int = 0  # at these extents; at others one on every multiprocessor

    def line(self, batch: int, source: Sequence[int], target: Sequence[int]) -> Line:
        return self.line_of(self.units2, batch, source, target)

    def ctas(self, line: Line, batch: int, source: Sequence[int], target: Sequence[int]) -> int:
        there = (batch, *(source if self.problem.forward else target)) == self.extents
        return self.ctas_there if there else self.multiprocessors


@dataclass(frozen=True)
class PinnedWgradPlan(WgradPlan):
    """A gradient-by-weight kernel with one tile of positions for all extents."""

    shape: Triple = (1, 1, 1)

    def tile_shape(self, batch: int, input_size: Sequence[int]) -> Triple:
        return self.shape


@dataclass(frozen=True)
class PinnedStridedPlan(StridedPlan):
    """A strided kernel with one tile shape for all extents."""

    pinned: Shape | None = None

    def shape(self, batch: int, target: Sequence[int]) -> Shape:
        assert self.pinned is not None
        return self.pinned


def pin(plan: Plan, batch: int, input_size: Sequence[int]) -> Plan:
    """The plan with the tile shape that it picks for these extents."""
    pinned = (PinnedGatherPlan, PinnedSweepPlan, PinnedStridedPlan, PinnedWgradPlan)
    if isinstance(plan, pinned):
        return plan
    values: dict[str, Any] = {f.name: getattr(plan, f.name) for f in fields(plan)}  # type: ignore[arg-type]
    if isinstance(plan, (GatherPlan, WgmmaSweepPlan)):
        source: Sequence[int] = input_size
        target: Sequence[int] = plan.problem.geometry.output_size(input_size)
        if not plan.problem.forward:
            source, target = target, source
        if isinstance(plan, WgmmaSweepPlan):
            line = plan.line(batch, source, target)
            values |= {"units2": line.units, "extents": (batch, *input_size)}
            return PinnedSweepPlan(**values, ctas_there=plan.ctas(line, batch, source, target))
        return PinnedGatherPlan(**values, units=plan.unit_box(batch, target))
    if isinstance(plan, StridedPlan):
        target = plan.problem.geometry.output_size(input_size)
        if not plan.problem.forward:
            target = tuple(input_size)
        return PinnedStridedPlan(**values, pinned=plan.shape(batch, target))
    if isinstance(plan, WgradPlan):
        return PinnedWgradPlan(**values, shape=plan.tile_shape(batch, input_size))
    return plan
