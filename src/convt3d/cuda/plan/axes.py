"""Axes as kernels see them: slots, phases, taps and shifts of a gather. Mirrors ``geometry/*.cuh``.

A unit is a period of phases of the target. Its slots are the target positions of that period; a tap
of a slot reads the source a shift away from the unit.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from convt3d.cuda.plan.once import once
from convt3d.cuda.schedule import Problem, div_up
from convt3d.geometry import Geometry, Triple


@dataclass(frozen=True)
class Axis:
    """One axis of a gather (see geometry/axis.cuh)."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    forward: bool
    block: int  # periods of a unit; 0: phases are work tiles of their own

    @once
    def slot_shifts(self) -> tuple[tuple[int, ...], ...]:
        """Ascending shifts of the taps of each slot, or of each phase."""
        p, s, d, taps = self.padding, self.stride, self.dilation, range(self.kernel)
        block = max(1, self.block)
        if not self.forward:
            return tuple(tuple(r * s - p + k * d for k in taps) for r in range(block))
        return tuple(
            tuple(sorted((r + p - k * d) // s for k in taps if (r + p - k * d) % s == 0))
            for r in range(block * s)
        )

    @once
    def phases(self) -> int:
        return self.stride if self.forward and not self.block else 1

    @once
    def unit_source(self) -> int:
        return max(1, self.block) * (1 if self.forward else self.stride)

    @once
    def unit_target(self) -> int:
        return max(1, self.block) * (self.stride if self.forward else 1)

    @once
    def slots(self) -> int:
        return self.unit_target if self.block else 1

    @once
    def live_phases(self) -> int:
        """Phases that have taps."""
        return sum(count > 0 for count in self.phase_taps)

    @once
    def live_slots(self) -> int:
        """Slots that have taps and so need sums."""
        return self.live_phases if self.block else 1

    @once
    def live_shifts(self) -> frozenset[int]:
        """Shifts of the source that any slot or phase has a tap at."""
        return frozenset(shift for shifts in self.slot_shifts for shift in shifts)

    @once
    def reach(self) -> tuple[int, int]:
        """Smallest and largest shift over all slots or phases."""
        return (min(self.live_shifts), max(self.live_shifts)) if self.live_shifts else (0, 0)

    @once
    def shifts(self) -> int:
        return self.reach[1] - self.reach[0] + 1

    @once
    def reach_units(self) -> int:
        """The farthest that taps reach past a unit, in units."""
        return (self.shifts - 1) // self.unit_source

    def units(self, target: int) -> int:
        """Units of a target extent."""
        return div_up(target, self.unit_target)

    @once
    def span(self) -> int:
        """Source positions beside the first that the taps of a unit, or of its phase, reach."""
        if self.block:
            return self.shifts - 1
        step = self.dilation // math.gcd(self.stride, self.dilation)
        return (max(self.phase_taps) - 1) * step

    @once
    def phase_taps(self) -> tuple[int, ...]:
        """Taps of each phase (of each slot modulo the stride)."""
        return tuple(map(len, self.slot_shifts[: self.stride if self.forward else 1]))

    @once
    def max_taps(self) -> int:
        return self.kernel if self.block else max(self.phase_taps)

    @once
    def mean_taps(self) -> float:
        """Taps of a work tile, in the mean over those of all phases."""
        return sum(self.phase_taps) / len(self.phase_taps)


def axis_of(problem: Problem, axis: int, block: int) -> Axis:
    """An axis (0 to 2) of a problem's layer."""
    g = problem.geometry
    values = (g.kernel_size[axis], g.stride[axis], g.padding[axis], g.dilation[axis])
    return Axis(*values, problem.forward, block)


@functools.lru_cache(maxsize=1024)
def phased_axes(problem: Problem, phased: int) -> tuple[Axis, Axis, Axis]:
    """D, H and W where phases of the first ``phased`` axes are work tiles of their own."""
    first, second, third = (axis_of(problem, a, int(a >= phased)) for a in range(3))
    return (first, second, third)


@functools.lru_cache(maxsize=65536)
def met_share(axis: Axis, units: int, tiles: int, extent: int) -> float:
    """The share of taps of a phased axis that meet not only padding, over its tiles and phases.

    ``tiles`` of ``units`` each, on a source of this extent.
    """
    shifts = [shift for shifts in axis.slot_shifts for shift in shifts]
    firsts = [i * units + shift for i in range(tiles) for shift in shifts]
    return sum(-units < first < extent for first in firsts) / len(firsts)


def source_extents(geometry: Geometry, output: Sequence[int]) -> Triple:
    """Input extents of a transposed layer that give these output extents."""
    g = geometry
    d, h, w = (
        (n - e + 2 * p - dilation * (k - 1) - 1) // s + 1
        for n, e, p, dilation, k, s in zip(
            output, g.output_padding, g.padding, g.dilation, g.kernel_size, g.stride, strict=True
        )
    )
    return (d, h, w)


def odd_lines(problem: Problem) -> bool:
    """Whether lines of a gradient's source have odd lengths whatever the input's."""
    g = problem.geometry
    length = g.output_size(g.kernel_size)[2]
    return not problem.forward and g.stride[2] % 2 == 0 and length % 2 == 1


# --- Axes that a sweep goes along ----------------------------------------------------------------


@dataclass(frozen=True)
class StackedAxis:
    """An axis all of whose taps are columns of one product (see geometry/stacked_axis.cuh)."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    forward: bool
    planes: int

    @property
    def interleaved(self) -> int:
        """Volumes of planes that do not meet."""
        return self.dilation if self.kernel > 1 else 1

    @property
    def source_step(self) -> int:
        return self.planes * (1 if self.forward else self.stride)

    @property
    def target_step(self) -> int:
        return self.planes * (self.stride if self.forward else 1)

    @property
    def _back(self) -> int:
        return 0 if self.forward else (self.kernel - 1) // self.stride

    @property
    def target_origin(self) -> int:
        return -self.padding if self.forward else -self._back * self.interleaved

    @property
    def source_origin(self) -> int:
        return 0 if self.forward else -self.padding

    @once
    def window(self) -> int:
        reached = (
            (self.planes - 1) * self.stride + self.kernel
            if self.forward
            else self._back + self.planes
        )
        return max(reached, self.target_step)

    @property
    def warm_steps(self) -> int:
        return div_up(self.window, self.target_step) - 1

    def steps(self, target: int) -> int:
        """Of the sweep through one volume."""
        return div_up(target - self.target_origin, self.target_step * self.interleaved)

    def busy_steps(self, source: int, target: int) -> int:
        """Steps that meet any source plane."""
        planes = self.source_step * self.interleaved
        return min(self.steps(target), div_up(source - self.source_origin, planes))

    @once
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(first window plane, taps) of each source plane of a step."""
        if self.forward:
            return tuple((plane * self.stride, self.kernel) for plane in range(self.planes))
        found = []
        for plane in range(self.source_step):
            residue = plane % self.stride
            count = div_up(self.kernel - residue, self.stride) if residue < self.kernel else 0
            found.append((plane // self.stride - (count - 1) + self._back, count))
        return tuple(found)

    @once
    def blocks(self) -> tuple[int, ...]:
        """Window planes of each product of a step, all source planes one after the other."""
        cuts = {at for first, count in self.runs if count for at in (first, first + count)}
        found = []
        for first, count in self.runs:
            inside = sorted(at for at in cuts if first <= at <= first + count)
            found += [b - a for a, b in itertools.pairwise(inside)] if count else []
        return tuple(found)


@dataclass(frozen=True)
class SlicedAxis:
    """An axis whose slices each meet several units of the gradient (geometry/swept_axis.cuh)."""

    taps: tuple[range, ...]  # units that a slice of each residue meets
    dense: bool  # neighbours from the window's lowest unit on

    @property
    def window(self) -> int:
        met = [taps for taps in self.taps if taps]
        return max(taps.stop for taps in met) - min(taps.start for taps in met)

    @property
    def most(self) -> int:
        return max(map(len, self.taps))

    def slices(self, length: int, extent: int) -> list[tuple[int, int, float]]:
        """Slices of a work tile of ``length`` units: taps, units met, and their mean number."""
        found = []
        for taps in map(len, self.taps):
            for units in range(1, taps):
                # At both ends, which may lie outside.
                found.append((taps, units, 2 - length / extent))
            if taps:
                found.append((taps, taps, max(0.0, length + 1 - taps)))
        return found


@functools.lru_cache(maxsize=4096)
def sliced_axis(kernel: int, stride: int, padding: int, dilation: int) -> SlicedAxis:
    """The axis whose slices all meet a window's lowest unit, if one does."""
    shifts = Axis(kernel, stride, padding, dilation, True, 1).slot_shifts

    def taps(residue: int) -> range:
        period, phase = divmod(residue, stride)
        units = shifts[phase]
        return range(units[0] + period, units[-1] + period + 1) if units else range(0)

    def astray(found: Sequence[range]) -> int:
        lowest = min(units.start for units in found if units)
        return sum(units.start != lowest for units in found if units)

    leads = [tuple(map(taps, range(n, n + stride))) for n in range(stride)]
    best = min(leads, key=astray)
    return SlicedAxis(best, dilation == math.gcd(stride, dilation) and astray(best) == 0)
