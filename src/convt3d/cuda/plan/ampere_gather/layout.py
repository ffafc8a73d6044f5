"""What a gather kernel multiplies, and its shared memory. Mirrors ``ampere/gather/config.cuh``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from convt3d.cuda.plan.axes import Axis, axis_of
from convt3d.cuda.plan.once import once
from convt3d.cuda.schedule import Gpu, Problem, div_up, round_up, widest_vector
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic


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

    @property
    def rows(self) -> int:
        """Units that one CTA holds at most."""
        return 16 * self.warps_m * self.fragments_m


@dataclass(frozen=True)
class GatherLayout:
    """The products, registers, shared memory and source boxes of a gather kernel."""

    problem: Problem
    tile: Tile
    swapped: bool  # the kernel's axes 0 and 1 are H and D
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)  # for which tiles are shaped

    @property
    def order(self) -> Triple:
        return (1, 0, 2) if self.swapped else (0, 1, 2)

    @once
    def axes(self) -> tuple[Axis, Axis, Axis]:
        return _axes(self.problem, self.tile.block0, self.swapped)

    @property
    def threads(self) -> int:
        return 32 * self.tile.warps_m * self.tile.warps_n

    @property
    def column_tile(self) -> int:
        return 8 * self.tile.warps_n * self.tile.fragments_n

    @once
    def column_tiles(self) -> int:
        return div_up(self.problem.target_channels, self.column_tile)

    @property
    def chunk_channels(self) -> int:
        return self.tile.depth * 8 * 4 // self.problem.element_bytes

    @once
    def chunks(self) -> int:
        return div_up(self.problem.source_channels, self.chunk_channels)

    @once
    def octets(self) -> bool:
        """Whether contiguous 16-bit sources lie in shared memory by octets (load/octet_box.cuh)."""
        p = self.problem
        contiguous = p.element_bytes == 2 and not p.source_channels_last
        return contiguous and self.axes[2].unit_source == 1

    @once
    def vector(self) -> int:
        """Elements that one copy of the fill moves, where addresses allow."""
        bytes_ = self.problem.element_bytes
        if self.problem.source_channels_last:
            return widest_vector(self.problem.source_channels, bytes_)
        if bytes_ == 4:
            return 4 if self.axes[2].unit_source == 1 else 1
        return 8 if self.octets else 4

    @once
    def fragment_words(self) -> int:
        return 128 if self.problem.arithmetic is Arithmetic.IEEE else 64

    @once
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

    @once
    def smallest_box(self) -> int:
        """Positions of the source box of a single unit."""
        a, b, c = self.box(np.ones((1, 3), dtype=np.int64))
        return int(a[0] * b[0] * c[0])

    @once
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

    @once
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

    def needed(self, target: Sequence[int]) -> Triple:
        """Units along each axis that cover the destination."""
        a, b, c = (
            div_up(target[i], axis.unit_target)
            for i, axis in zip(self.order, self.axes, strict=True)
        )
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

    def box(
        self, shapes: NDArray[np.int64], needed2: int | None = None
    ) -> tuple[NDArray[np.int64], ...]:
        """Extents of the source boxes of tile shapes; `needed2` units make up a row."""
        sizes = [
            (shapes[:, i] - 1) * axis.unit_source + axis.shifts for i, axis in enumerate(self.axes)
        ]
        residues = self.axes[2].unit_source
        if self.octets:
            # Rows begin at a multiple of four; how far before a tile is known where tiles do too.
            alike = (shapes[:, 2] % 4 == 0) | (needed2 is not None and shapes[:, 2] == needed2)
            lead = np.where(alike, self.axes[2].reach[0] % 4, 3)
            sizes[2] = (lead + sizes[2] + 7) // 8 * 8
        elif not self.problem.source_channels_last and self.vector > 1 and residues == 1:
            sizes[2] = (sizes[2] + 2 * (self.vector - 1)) // self.vector * self.vector
        sizes[2] = (sizes[2] + residues - 1) // residues * residues
        return tuple(sizes)
