"""What a strided kernel multiplies, its shared memory, and which tile shapes fit.

The numbers mirror ``ampere/strided/config.cuh``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convt3d.cuda.plan.axes import Axis
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.search import with_tile
from convt3d.cuda.schedule import Gpu, Problem, div_up, round_up
from convt3d.geometry import Triple


@functools.lru_cache(maxsize=1024)
def axes_of(problem: Problem) -> tuple[Axis, Axis, Axis]:
    g = problem.geometry
    axes = []
    for a in range(3):
        kernel, stride, padding, dilation = (
            values[a] for values in (g.kernel_size, g.stride, g.padding, g.dilation)
        )
        if not problem.forward:
            common = math.gcd(stride, dilation)
            stride, padding, dilation = stride // common, 0, dilation // common
        axes.append(Axis(kernel, stride, padding, dilation, problem.forward, 1))
    first, second, third = axes
    return (first, second, third)


@functools.lru_cache(maxsize=1024)
def live_slots(problem: Problem) -> tuple[tuple[bool, ...], ...]:
    """Which slots of each axis have a tap."""
    if not problem.forward:
        return ((True,),) * 3
    return tuple(tuple(map(bool, axis.phase_taps)) for axis in axes_of(problem))


@dataclass(frozen=True)
class Tile:
    """The compile-time choices of a strided kernel."""

    warps: int
    fragments_m: int
    fragments_n: int
    stages: int
    depth: int
    resident_weights: bool
    resident: int  # CTAs that share a multiprocessor
    vector: int
    positions: int = 0

    @property
    def fragments(self) -> int:
        return self.warps * self.fragments_m


@dataclass(frozen=True)
class Shape:
    """A tile's extents in units, chosen for the extents of a call."""

    units: Triple
    line_rows: int
    line_fragments: int


Units = Sequence[Any]
"""A tile's extents, or arrays of those of several tiles."""


def units_of(shapes: Sequence[Shape]) -> Units:
    return [*np.array([shape.units for shape in shapes], dtype=np.int64).T]


@dataclass(frozen=True)
class StridedLayout:
    """The products, registers, shared memory and tile shapes of a strided kernel."""

    problem: Problem
    tile: Tile
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)  # for which tiles are shaped

    # ------------------------------------------------------------ products

    @once
    def axes(self) -> tuple[Axis, Axis, Axis]:
        return axes_of(self.problem)

    @once
    def live(self) -> tuple[tuple[bool, ...], ...]:
        """Which slots of each axis have a tap."""
        return live_slots(self.problem)

    @property
    def threads(self) -> int:
        return 32 * self.tile.warps

    @once
    def taps(self) -> int:
        k = self.problem.geometry.kernel_size
        return k[0] * k[1] * k[2]

    @property
    def column_tile(self) -> int:
        return 8 * self.tile.fragments_n

    @once
    def column_tiles(self) -> int:
        return div_up(self.problem.target_channels, self.column_tile)

    @once
    def step_words(self) -> int:
        """Depth of a product: eight channels of 16 bits are products of half the depth."""
        p = self.problem
        few = p.element_bytes == 2 and p.source_channels <= 8 and not p.source_channels_last
        return 4 if few else 8

    @once
    def chunk_channels(self) -> int:
        return self.tile.depth * self.step_words * 4 // self.problem.element_bytes

    @once
    def chunks(self) -> int:
        return div_up(self.problem.source_channels, self.chunk_channels)

    @once
    def n_tiles(self) -> int:
        """CTAs that work on the same tiles, each on its own group and channels."""
        return self.problem.geometry.groups * self.column_tiles

    @property
    def fragment_words(self) -> int:
        return 8 * self.step_words * self.problem.words_per_value

    @once
    def chunk_weight_words(self) -> int:
        return self.tile.depth * self.taps * self.tile.fragments_n * self.fragment_words

    @once
    def slices(self) -> tuple[int, ...]:
        """Gradient by input: taps of axis 0 that a source slice meets, by its residue."""
        axis = self.axes[0]
        counts = [0] * axis.unit_source
        for k in range(axis.kernel):
            counts[k * axis.dilation % axis.unit_source] += 1
        return tuple(counts)

    @once
    def lags(self) -> int:
        """Gradient by input: slices of the result whose sums wait in registers."""
        axis = self.axes[0]
        if self.problem.forward:
            return 1
        return (axis.kernel - 1) * axis.dilation // axis.unit_source + 1

    @once
    def windows(self) -> int:
        """Shifts along D and H that have a tap: windows that a step loads of each fragment."""
        if not self.problem.forward:
            return self.axes[1].kernel * sum(map(bool, self.slices))
        return len(self.axes[0].live_shifts) * len(self.axes[1].live_shifts)

    @once
    def stage_weight_words(self) -> int:
        """Weights that a stage brings where they are not resident."""
        if self.problem.forward:
            return self.chunk_weight_words
        return self.chunk_weight_words // self.axes[0].kernel * max(self.slices)

    @property
    def packed_words(self) -> int:
        return self.n_tiles * self.chunks * self.chunk_weight_words

    # ------------------------------------------------------------ registers

    @once
    def live_slots(self) -> int:
        return sum(self.live[0]) * sum(self.live[1]) * sum(self.live[2])

    def accumulators(self) -> int:
        """Live accumulator registers of a lane; slots without a tap cost none."""
        return self.lags * self.live_slots * self.tile.fragments_m * self.tile.fragments_n * 4

    def registers(self) -> int:
        """Estimated registers of a thread: accumulators, window, operands, addresses."""
        t = self.tile
        wide = self.problem.words_per_value
        operands = t.fragments_m * (2 * self.window + 4 * wide) + 2 * wide * t.fragments_n
        return self.accumulators() + operands + 44

    def most_resident(self, registers: int) -> int:
        """CTAs of so many registers a thread that a multiprocessor holds, six at most."""
        return max(1, min(6, 65536 // (self.threads * min(255, registers))))

    # ------------------------------------------------------------ shared memory

    @once
    def pipeline_bytes(self) -> int:
        """Shared memory of the stages and of resident weights."""
        return int(self._pipeline_bytes(self.tile.positions))

    def _pipeline_bytes(self, positions: Any) -> Any:
        """The same with boxes of so many positions."""
        words = self.step_words * self.tile.depth
        if self.problem.source_channels_last:
            box = positions * (words + 4)
        else:
            box = (round_up(positions - 8, 32) + 8) * words
        if self.tile.resident_weights:
            words = self.tile.stages * box + self.chunks * self.chunk_weight_words
        else:
            words = self.tile.stages * (box + self.stage_weight_words)
        return 4 * words

    @once
    def room(self) -> int:
        """Shared memory that one CTA may use."""
        return self.gpu.shared_for(self.tile.resident)

    @once
    def pair_source(self) -> int:
        return 2 * self.axes[2].unit_source

    @once
    def lead(self) -> int:
        if self.problem.source_channels_last or self.tile.vector == 1:
            return 0
        origin = (
            self.axes[2].reach[0] if self.problem.forward else -self.problem.geometry.padding[2]
        )
        return origin % self.tile.vector

    @once
    def window(self) -> int:
        """Positions that a lane holds of a row."""
        vector = self.window_vector
        needed = self.lead % vector + self.axes[2].unit_source + self.axes[2].shifts
        return round_up(needed, vector)

    @once
    def window_vector(self) -> int:
        if self.problem.source_channels_last:
            return 1
        return 4 if self.pair_source % 4 == 0 else 2

    @once
    def first_live(self) -> Triple:
        """The first slot of each axis that tiles must cover."""
        if self.problem.target_channels_last:
            return (0, 0, 0)
        a, b, c = (live.index(True) for live in self.live)
        return (a, b, c)

    def needed(self, target: Sequence[int]) -> Triple:
        """Units along each axis that tiles must cover: all that hold a slot with a tap.

        Where the target is contiguous, the last tile of an axis fills what lies beyond.
        """
        a, b, c = (
            max(1, div_up(extent - first, axis.unit_target))
            for extent, first, axis in zip(target, self.first_live, self.axes, strict=True)
        )
        return (a, b, c)

    def pitch(self, width_units: Any) -> Any:
        """Positions from a box row to the next (BoxShape of ampere/strided/tile.cuh)."""
        width = self.lead + (width_units - 1) * self.axes[2].unit_source + self.axes[2].shifts
        if self.problem.source_channels_last:
            return width
        width = round_up(width, self.pair_source)
        if self.tile.vector > 1:
            vector = self.tile.vector
            width = (width + 2 * (vector - 1)) // vector * vector
        return width

    def box_positions(self, units: Units) -> Any:
        """Room that a tile's source box needs, with what windows read past its end."""
        size0, size1 = self.box(units)
        return size0 * size1 * self.pitch(units[2]) + self.pair_source + self.window

    def box(self, units: Units) -> tuple[Any, Any]:
        """Extents of a tile's source box along D and H; of the gradient by input one slice."""
        size0, size1 = (
            (n - 1) * axis.unit_source + axis.shifts
            for n, axis in zip(units[:2], self.axes[:2], strict=True)
        )
        return (size0 if self.problem.forward else 1, size1)

    @once
    def direct_vector(self) -> int:
        """Lanes store from registers where rows are a multiple of this; 0: nowhere."""
        if self.problem.target_channels_last:
            return 1
        run = 2 * self.axes[2].unit_target
        vector = 16 // self.problem.element_bytes
        wide = vector if run % vector == 0 else (4 if run % 4 == 0 else 2)
        return wide if all(map(all, self.live)) else 0

    def direct(self, target: Sequence[int]) -> bool:
        """Whether outputs are stored without staging (see ampere/strided/store.cuh)."""
        return self.direct_vector > 0 and target[2] % self.direct_vector == 0

    def staging_bytes(self, units: Units) -> Any:
        """Shared memory that eight channels of a tile's outputs take, where they are staged."""
        bytes_ = self.problem.element_bytes
        vector = 16 // bytes_
        # Rows as wide as the tile's, or a little wider to keep the alignment of the target's.
        pitch = (units[2] + 1) * self.axes[2].unit_target + vector
        rows = (units[1] + 1) * self.axes[1].unit_target - 1
        slices = units[0] if self.problem.forward else 1
        return 8 * slices * (round_up(rows * pitch, vector) + vector) * bytes_

    def staging_buffers(self, units: Units) -> Any:
        """Two where a tile is staged in several rounds and has room for both, else one."""
        rounds = self.tile.fragments_n * (sum(self.live[0]) if self.problem.forward else 1)
        both = self.pipeline_bytes + 2 * self.staging_bytes(units)
        return 1 + (both <= self.room) * (rounds > 1)

    def shared_bytes(self, units: Units, target: Sequence[int]) -> Any:
        """Shared memory of a launch."""
        if self.direct(target):
            return self.pipeline_bytes
        return self.pipeline_bytes + self.staging_buffers(units) * self.staging_bytes(units)

    def fits(self, units: Units, target: Sequence[int], positions: Any = None) -> Any:
        """Whether a tile has room, as here and, at worst alone, with any other target.

        ``positions`` of the largest source box are the tile's own if absent.
        """
        positions = self.tile.positions if positions is None else positions
        pipeline = self._pipeline_bytes(positions)
        staging = 0 if self.direct_vector == 1 else self.staging_bytes(units)
        here = 0 if self.direct(target) else staging
        return (
            (self.box_positions(units) <= positions)
            & (pipeline + here <= self.room)
            & (pipeline + staging <= self.gpu.shared_per_block)
        )

    # ------------------------------------------------------------ tile shapes

    def shapes(self, target: Sequence[int]) -> list[Shape]:
        """Tile shapes that fit this kernel's fragments and shared memory."""
        every = [*self.all_shapes(target)]
        found = [
            s for s, fits in zip(every, self.fits(units_of(every), target), strict=True) if fits
        ]
        if not found:
            # Outputs of this target need staging that the kernel was not chosen with: fewer CTAs
            # share a multiprocessor then.
            alone = with_tile(self, resident=1)
            found = [s for s in every if alone.fits(s.units, target)]
        return found

    def all_shapes(self, target: Sequence[int]) -> Iterator[Shape]:
        """Tile shapes that fit this kernel's fragments."""
        needed = self.needed(target)
        # Multiples of four keep vector copies and stores of every tile aligned.
        whole = round_up(needed[2], 4)
        widths = {whole} | {16 * n for n in (1, 2, 4, 8) if 16 * n < whole}
        widths |= {round_up(div_up(whole, parts), 4) for parts in (2, 3)}
        # One that always fits (_SMALLEST).
        yield Shape((self._depths(needed[0])[0], 1, min(16, whole)), 1, 1)
        for t2, t0, linear in itertools.product(
            sorted(widths), self._depths(needed[0]), (False, True)
        ):
            fragments = self.tile.fragments // (t0 if self.problem.forward else 1)
            if linear:
                pitch = self.line_pitch(t2)
                rows = (16 * fragments - t2) // pitch + 1 if pitch else 0
                rows = rows if 16 * fragments >= t2 else 0
            else:
                rows = fragments // div_up(t2, 16)
            rows = min(rows, needed[1])
            if rows < 1 + linear:
                continue
            # As many rows as fit, in equal parts; or fewer, for the sake of shared memory.
            equal = div_up(needed[1], div_up(needed[1], rows))
            for t1 in {equal, div_up(equal, 2), div_up(equal, 4)}:
                if linear:
                    yield Shape((t0, t1, t2), t1, div_up((t1 - 1) * pitch + t2, 16))
                else:
                    yield Shape((t0, t1, t2), 1, div_up(t2, 16))

    def _depths(self, needed: int) -> list[int]:
        """Extents of a tile along D; of the gradient by input those that a CTA sweeps along."""
        if self.problem.forward:
            return [n for n in (1, 2, 4) if n <= needed]
        return sorted({div_up(needed, parts) for parts in (1, 2, 3, 4, 6, 8)})

    def line_pitch(self, width_units: int) -> int:
        """Units from a row to the next where a line runs through rows; 0 if it cannot."""
        positions = self.pitch(width_units) * self.axes[1].unit_source
        pitch, rest = divmod(positions, self.axes[2].unit_source)
        return 0 if rest or pitch % 2 or pitch < width_units else pitch

    # ------------------------------------------------------------ CTAs

    @once
    def most_workers(self) -> int:
        return max(1, self.tile.resident * self.gpu.multiprocessors // self.n_tiles)

    def workers(self, count: int) -> int:
        """CTAs of an N tile: all of them resident, each with as many tiles as any other."""
        return div_up(count, div_up(count, self.most_workers))

    def busy(self, count: int) -> float:
        """The share of multiprocessors that an N tile's tiles keep busy, one CTA on each."""
        turns = div_up(count, self.workers(count))
        return count * self.n_tiles / (turns * self.gpu.multiprocessors)
