"""What a kernel of ``wgrad/kernel.cu`` multiplies, whatever the extents of a call."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.split_k import WORKSPACE_BYTES
from convt3d.cuda.schedule import Gpu, Problem, div_up
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic

WARP_COLUMNS = 24  # at most, that warps multiply by themselves in IEEE arithmetic


@dataclass(frozen=True)
class Kernel:
    """Rows and columns of a CTA's product, and its pipeline.

    Rows are a tap and a channel of the gradient, columns a tap along axis 1 and a channel of x.

    Args:
        problem: a gradient by weight of contiguous tensors.
        order: the kernel's axes 0, 1, 2 as D, H, W; steps go along axis 0.
        column_taps: taps along axis 1 of one phase are columns.
        channel_tile_n: channels of x.
        channel_tile_m: channels of the gradient.
        blocks: m64 blocks of rows of a consumer.
        stages: steps in shared memory.
        whole_rows: the gradient comes by tensor map or bulk copies.
        fragments: row fragments in flight; IEEE arithmetic adds up their products outside.
        whole_samples: a step is a sample of few slices.
        runs: whole rows come as runs of a channel, not as boxes of rows or in pieces.
        consumers: warpgroups that multiply.
        phases: a fragment's rows are both phases of W, for all taps that it meets.
        cluster: CTAs that share the steps of the same sums, and add them up.
        gpu: for which tiles of positions are shaped.
    """

    problem: Problem
    order: Triple
    column_taps: bool
    channel_tile_n: int
    channel_tile_m: int
    blocks: int
    stages: int
    whole_rows: bool = False
    fragments: int = 2
    whole_samples: bool = False
    runs: bool = False
    consumers: int = 2
    phases: bool = False
    cluster: int = 1
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)

    # ------------------------------------------------------------ arithmetic

    @property
    def half(self) -> bool:
        return self.problem.element_bytes == 2

    @property
    def ieee(self) -> bool:
        return self.problem.arithmetic is Arithmetic.IEEE

    @property
    def line(self) -> int:
        """Positions of 16 bytes."""
        return 16 // self.problem.element_bytes

    @property
    def depth(self) -> int:
        """Positions of a product."""
        return 2 * self.line

    @property
    def chunk(self) -> int:
        """Positions of 128 bytes."""
        return 8 * self.line

    @property
    def warp_products(self) -> bool:
        """Whether warps multiply by themselves, since columns would leave wgmma mostly unused."""
        return self.ieee and self.columns <= WARP_COLUMNS

    # ------------------------------------------------------------ the layer along the kernel's axes

    def in_order(self, values: Triple) -> Triple:
        """Values of D, H, W as those of the kernel's axes."""
        a, b, c = self.order
        return (values[a], values[b], values[c])

    @once
    def kernel_size(self) -> Triple:
        return self.in_order(self.problem.geometry.kernel_size)

    @once
    def stride(self) -> Triple:
        return self.in_order(self.problem.geometry.stride)

    @once
    def padding(self) -> Triple:
        return self.in_order(self.problem.geometry.padding)

    @once
    def dilation(self) -> Triple:
        return self.in_order(self.problem.geometry.dilation)

    @property
    def _column_step(self) -> int:
        """From a tap along axis 1 to the next that x meets one row on."""
        return self.stride[1] // self.dilation[1]

    @once
    def taps(self) -> Triple:
        """Taps that are rows of the product."""
        a, b, c = self.kernel_size
        return (a, min(self._column_step, b) if self.column_taps else b, c)

    @once
    def taps_across(self) -> int:
        """Taps that are columns of the product."""
        return div_up(self.kernel_size[1], self._column_step) if self.column_taps else 1

    @once
    def columns(self) -> int:
        return self.channel_tile_n * self.taps_across

    # ------------------------------------------------------------ positions of the gradient

    @once
    def steps(self) -> Triple:
        """Of the gradient only every step-th position is of use."""
        a, b, c = (
            math.gcd(s, d) if t > 1 else s
            for t, s, d in zip(self.taps, self.stride, self.dilation, strict=True)
        )
        return (a, b, 1 if self.whole_rows else c)

    @once
    def units(self) -> Triple:
        """Useful positions of the gradient from one position of x to the next."""
        a, b, c = (s // t for s, t in zip(self.stride, self.steps, strict=True))
        return (a, b, c)

    @once
    def reaches(self) -> Triple:
        """Useful positions from one tap to the next."""
        a, b, c = (
            d // t if n > 1 else 1
            for d, t, n in zip(self.dilation, self.steps, self.taps, strict=True)
        )
        return (a, b, c)

    def _met(self, axis: int, positions: int, taps: int) -> int:
        """Useful positions that so many positions of x meet in so many taps."""
        return (positions - 1) * self.units[axis] + (taps - 1) * self.reaches[axis] + 1

    def planes_of(self, slices: int) -> tuple[int, int]:
        """Planes of the gradient that a step of so many slices reads, and those that are new."""
        span = self._met(0, slices, self.tap_span)
        return span, min(slices * self.units[0], span)

    def rows_of(self, rows: int) -> int:
        """Rows of such a plane."""
        return self._met(1, rows, self.taps[1])

    def width_of(self, positions: int) -> int:
        """Positions of such a row."""
        return self._met(2, positions, self.taps[2])

    @once
    def shifts(self) -> int:
        """Of x along W, that both phases of the gradient's positions meet."""
        padding, taps = self.padding[2], self.taps[2]
        return (1 + padding) // 2 + (taps - 1 - padding) // 2 + 1

    # ------------------------------------------------------------ rows of the product

    @once
    def octet_taps(self) -> int:
        """Taps of eight neighbouring rows."""
        return math.gcd(self.units[2], 4)

    @once
    def channel_octets(self) -> int:
        """Of the same taps."""
        return self.channel_tile_m * self.octet_taps // 8

    @once
    def octets(self) -> int:
        return div_up(math.prod(self.taps), self.octet_taps) * self.channel_octets

    @once
    def row_blocks(self) -> int:
        return div_up(self.octets, 8)

    @property
    def cta_blocks(self) -> int:
        return self.consumers * self.blocks

    @once
    def row_tiles(self) -> int:
        return div_up(self.row_blocks, self.cta_blocks)

    @once
    def last_blocks(self) -> int:
        """Of the last row tile."""
        return self.row_blocks - (self.row_tiles - 1) * self.cta_blocks

    @once
    def tap_span(self) -> int:
        """Most taps along axis 0 that a CTA's rows touch."""
        per_slice = self.taps[1] * self.taps[2]
        # Where tiles begin within a slice comes again after so many; later ones touch no more.
        octets = self.channel_octets * per_slice // math.gcd(self.octet_taps, per_slice)
        period = octets // math.gcd(self.cta_blocks * 8, octets)
        most = 1
        for tile in range(min(self.row_tiles, period)):
            first = tile * self.cta_blocks * 8
            last = min(first + self.cta_blocks * 8, self.octets) - 1
            first_tap = first // self.channel_octets * self.octet_taps
            last_tap = (last // self.channel_octets + 1) * self.octet_taps - 1
            last_tap = min(last_tap, self.taps[0] * per_slice - 1)
            most = max(most, last_tap // per_slice - first_tap // per_slice + 1)
        return most

    # ------------------------------------------------------------ sums

    @once
    def tiles(self) -> int:
        """Of channels of both tensors."""
        p = self.problem
        return (
            div_up(p.source_channels, self.channel_tile_n)
            * div_up(p.target_channels, self.channel_tile_m)
            * p.geometry.groups
        )

    @property
    def cta_elements(self) -> int:
        return self.cta_blocks * 64 * self.columns

    @property
    def sum_bytes(self) -> int:
        """Shared memory of a CTA's sums, as `Config::sum_pitch` has them, and a barrier."""
        return 4 * self.columns * (64 * self.cta_blocks + 4) + 8 + 1024 + 128

    @once
    def most_splits(self) -> int:
        """CTAs of a channel tile that fill the GPU once, within the workspace."""
        weight_bytes = 4 * math.prod(self.problem.geometry.weight_size)
        most = max(WORKSPACE_BYTES, 2 * weight_bytes) // (4 * self.cta_elements * self.tiles)
        return min(max(self.gpu.multiprocessors // self.tiles, 1), max(most, 1))
