"""What a plan of ``wgrad_ndhwc/kernel.cu`` multiplies, and where that lies in shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from convt3d.cuda.plan.launches import weight_is_copied
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.position_box import Box, lines_box, smallest_box
from convt3d.cuda.schedule import Gpu, Problem, div_up, round_up

BARRIER_BYTES = 24  # of a stage


@dataclass(frozen=True)
class Tile:
    """What a CTA multiplies.

    Args:
        taps_on_m: the gradient's channels and taps are rows, channels of x are columns.
        consumers: warpgroups side by side along M and N.
        blocks: m64 blocks of each.
        columns: N of a product.
        positions: K of a step.
        stages: steps in shared memory.
        lines: taps along H share a box, of a step of so many lines at least; 0: each has its own.
        cluster: CTAs that share the steps of a work tile, and add up their sums.
    """

    taps_on_m: bool
    consumers: tuple[int, int]
    blocks: int
    columns: int
    positions: int
    stages: int
    lines: int = 0
    cluster: int = 1


@dataclass(frozen=True)
class WgradNdhwcLayout:
    """The tile of a kernel, its boxes and its stages."""

    problem: Problem
    tile: Tile
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)  # whose multiprocessors are filled

    @once
    def taps(self) -> int:
        return math.prod(self.problem.geometry.kernel_size)

    @property
    def transposes(self) -> bool:
        """Whether x is transposed in shared memory: of 32-bit types."""
        return self.problem.element_bytes == 4

    @property
    def source_atom(self) -> int:
        """Channels of x of a box."""
        return 32 if self.transposes or self.problem.source_channels <= 32 else 64

    @once
    def target_atom(self) -> int:
        """Channels of the gradient of a box: 64, unless these are a fifth more than there are."""
        n = self.problem.target_channels
        return 32 if self.transposes or 5 * round_up(n, 64) >= 6 * round_up(n, 32) else 64

    @property
    def consumers(self) -> int:
        return self.tile.consumers[0] * self.tile.consumers[1]

    @once
    def extents(self) -> tuple[int, int]:
        """Rows and columns of a CTA."""
        t = self.tile
        return 64 * t.blocks * t.consumers[0], t.columns * t.consumers[1]

    @once
    def sides(self) -> tuple[int, int]:
        """Channels of x, and of the gradient's taps, of a CTA."""
        m, n = self.extents
        return (n, m) if self.tile.taps_on_m else (m, n)

    @property
    def along_taps(self) -> bool:
        """Whether neighbours in the weight are taps, not channels of the gradient.

        So it is in a contiguous weight; its layout is taken to be that of x.
        """
        return self.taps > 1 and not self.problem.source_channels_last

    @once
    def elements(self) -> int:
        """Sums of all work tiles."""
        m, n = self.extents
        return self.tiles * m * n

    @once
    def weight_bytes(self) -> int:
        return math.prod(self.problem.geometry.weight_size) * self.problem.element_bytes

    @property
    def strip(self) -> int:
        """Taps of a box of the gradient."""
        return self.problem.geometry.kernel_size[1] if self.tile.lines else 1

    @property
    def halo(self) -> int:
        """Lines that such a box has beside those of a step."""
        return (self.strip - 1) * self.problem.geometry.dilation[1]

    @property
    def target_rows(self) -> int:
        """Positions of a box of the gradient, at most; boxes are multiples of 1024 bytes."""
        t = self.tile
        if not t.lines:
            return t.positions
        rows = t.positions + self.halo * t.positions // t.lines
        return round_up(rows, 1024 // (self.target_atom * self.problem.element_bytes))

    @once
    def boxes(self) -> tuple[int, int]:
        source, target = self.sides
        return div_up(source, self.source_atom), target // self.target_atom // self.strip

    @once
    def atoms(self) -> int:
        """Of the gradient, in a group."""
        return self.taps * div_up(self.problem.target_channels, self.target_atom)

    @once
    def tiles(self) -> int:
        p = self.problem
        across = div_up(p.source_channels, self.sides[0])
        across *= div_up(self.atoms, self.sides[1] // self.target_atom)
        return across * p.geometry.groups

    @once
    def stage_bytes(self) -> int:
        source, target = self.boxes
        channels = source * self.source_atom + (self.tile.columns if self.transposes else 0)
        elements = self.tile.positions * channels + self.target_rows * target * self.target_atom
        return elements * self.problem.element_bytes

    @property
    def sum_bytes(self) -> int:
        """Of whole sums, which take the stages' place; none where taps are neighbours."""
        return 0 if self.along_taps else self._whole_sum_bytes

    @property
    def shared_bytes(self) -> int:
        t = self.tile
        return max(t.stages * self.stage_bytes, self.sum_bytes) + t.stages * BARRIER_BYTES

    @once
    def copies_sums(self) -> bool:
        """Whether whole sums may be written in channels_last, and copied to a contiguous weight."""
        room = self.gpu.shared_per_block - self.tile.stages * BARRIER_BYTES
        fits = self._whole_sum_bytes <= room  # as the stages do, whose place they take
        return self.along_taps and fits and weight_is_copied(self.problem)

    @property
    def _whole_sum_bytes(self) -> int:
        source, target = self.sides
        return 4 * source * (target + (4 if self.tile.taps_on_m else 8))

    @property
    def products(self) -> int:
        """Products of a step, 32 bytes of K each."""
        return self.tile.positions * self.problem.element_bytes // 32

    def box(self, batch: int, input_size: Sequence[int]) -> Box | None:
        """The box of a K step that takes fewest of them; None where taps can share none."""
        d, h, w = input_size
        extents = (batch, d, h, w)
        if self.tile.lines:
            return lines_box(extents, self.tile.positions, self.tile.lines)
        return smallest_box(extents, self.tile.positions, self.problem.geometry.stride)
