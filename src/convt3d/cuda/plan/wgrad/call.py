"""A kernel at some extents: how x comes into shared memory, and ways for the gradient to."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass

from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.wgrad.kernel import Kernel
from convt3d.cuda.schedule import MAP_BOX, div_up
from convt3d.geometry import Triple


class Fill(enum.IntEnum):
    """How the gradient comes into shared memory."""

    COPIES = 0  # by cp.async of 4 or 16 bytes, or through registers
    RUNS = 1  # by bulk copies, one a row of a channel
    ROWS = 2  # by tensor map, one box of (W, channels, rows) a plane
    FLAT = 3  # by tensor map, one box of (volume, channels) a plane: rows of any length
    JOINED = 4  # by bulk copies, one a channel of a plane: whole rows of any length
    VOLUME = 5  # by cp.async of 16 bytes, whose places are the same in every sample
    PIECES = 6  # as RUNS, by cp.async of 16 bytes
    SWIZZLED = 7  # by tensor map, boxes of (128 bytes of W, channels, rows)
    LINES = 8  # by tensor map, boxes of (128 bytes of rows, channels, 128 bytes)

    @property
    def swizzled(self) -> bool:
        return self in (Fill.SWIZZLED, Fill.LINES)

    @property
    def mapped(self) -> bool:
        """Whether a tensor map describes the gradient."""
        return self in (Fill.ROWS, Fill.FLAT) or self.swizzled

    @property
    def row_runs(self) -> bool:
        """Whether each row comes by itself, from its address rounded down to 16 bytes."""
        return self in (Fill.RUNS, Fill.PIECES)

    @property
    def as_it_lies(self) -> bool:
        """Whether the address of a channel decides where it begins in shared memory."""
        return self.row_runs or self is Fill.JOINED


@dataclass(frozen=True, eq=False)
class Call:
    """A kernel and the extents (D, H, W) of x. All others are along the kernel's axes."""

    kernel: Kernel
    input_size: Triple

    @once
    def size(self) -> Triple:
        return self.kernel.in_order(self.input_size)

    @once
    def output_size(self) -> Triple:
        """The extents (D, H, W) of the gradient."""
        return self.kernel.problem.geometry.output_size(self.input_size)

    @once
    def output(self) -> Triple:
        return self.kernel.in_order(self.output_size)

    def _strides(self, extents: Triple) -> tuple[int, int]:
        a, b, _ = self.kernel.in_order((extents[1] * extents[2], extents[2], 1))
        return (a, b)

    @once
    def source_strides(self) -> tuple[int, int]:
        """Elements of x from one position along axis 0 or 1 to the next."""
        return self._strides(self.input_size)

    @once
    def target_strides(self) -> tuple[int, int]:
        return self._strides(self.output_size)

    @property
    def row_stride(self) -> int:
        """Elements of the gradient from one useful row to the next."""
        return self.target_strides[1] * self.kernel.steps[1]

    @once
    def sample_bytes(self) -> int:
        """Of both tensors."""
        g = self.kernel.problem.geometry
        elements = g.in_channels * math.prod(self.size) + g.out_channels * math.prod(self.output)
        return elements * self.kernel.problem.element_bytes

    @once
    def rows(self) -> tuple[int, int]:
        """First row and number of rows along axis 1; gradient rows where taps are columns."""
        k = self.kernel
        if not k.column_taps:
            return 0, self.size[1]
        stride, padding = k.stride[1], k.padding[1]
        # Row j is gradient row j * stride - padding and those of other phases, of 0 ... n_out - 1.
        reach = (k.taps[1] - 1) * k.dilation[1]
        first = max(0, div_up(padding - reach, stride))
        last = min((self.output[1] - 1 + padding) // stride, self.size[1] + k.taps_across - 2)
        return first, max(1, last - first + 1)

    # ------------------------------------------------------------ x

    @once
    def paired(self) -> bool:
        """Whether 16 bytes of x are two rows of W, and planes are whole pieces of 16 bytes."""
        return self.size[2] * 2 == self.kernel.line and self.size[1] % 2 == 0

    @once
    def source_map(self) -> bool:
        """Whether x comes by tensor map: rows of W in whole pieces of 16 bytes."""
        k = self.kernel
        # wgmma takes both parts of IEEE-grade operands from shared memory; warps split what came.
        if k.ieee and not (k.warp_products and (k.runs or k.phases)):
            return False
        if self.paired:
            return not k.column_taps
        if self.size[2] % k.line:
            return False
        # Rows that columns shift cannot share a chunk of 128 bytes, so it should be well used.
        return not k.column_taps or 2 * self.size[2] >= k.chunk

    def flat(self, positions: Triple) -> bool:
        """Whether 128-byte rows of x run over the rows of a slice."""
        return not self.kernel.column_taps and positions[2] == self.size[2]

    # ------------------------------------------------------------ the gradient

    def fills(self) -> Iterator[Fill]:
        """Ways for the gradient to come, best first; tensor maps need multiples of 16 bytes."""
        k = self.kernel
        if k.whole_samples:
            yield from (Fill.VOLUME,) if k.steps[2] == 1 else ()
        elif k.phases:
            yield from (Fill.JOINED,) if self._joins else ()
        else:
            yield from self._fills_of_rows() if k.whole_rows else ()
            yield Fill.COPIES

    def _fills_of_rows(self) -> Iterator[Fill]:
        k, width = self.kernel, self.output[2]
        boxes = k.channel_tile_m <= MAP_BOX
        if boxes and width % k.line == 0 and k.steps[1] == 1 and not k.runs:
            if self._swizzles:
                if self._lines:
                    yield Fill.LINES
                yield Fill.SWIZZLED
            yield Fill.ROWS
        if self._odd:
            return
        planes = k.order == (0, 1, 2)
        # Words of 16-bit rows are shared with the next, and its positions with the border's zeros.
        shared = self.padded and k.half
        if boxes and planes and math.prod(self.output) % k.line == 0 and not shared:
            yield Fill.FLAT
        if self._joins:
            yield Fill.JOINED
        # Of pieces, only the last row's may reach beyond the tensor.
        yield Fill.RUNS if k.runs or width < k.depth else Fill.PIECES

    @property
    def _odd(self) -> bool:
        """Whether pairs of 16-bit positions miss rows an even number of positions apart."""
        return self.kernel.half and self.row_stride * self.kernel.units[1] % 2 == 1

    @property
    def _joins(self) -> bool:
        """Whether all rows of a channel can come at once."""
        k = self.kernel
        takes = k.runs and k.order == (0, 1, 2) and self.source_map
        ends = k.warp_products or k.phases or self._ends
        return takes and ends and (k.phases or not self._odd)

    @property
    def padded(self) -> bool:
        """Whether a box of whole lines has other rows where the border's zeros should be."""
        return self.kernel.padding[1:] != (0, 0)

    @property
    def _swizzles(self) -> bool:
        """Whether a product's words of the gradient share lines of 128 bytes with no other's."""
        k = self.kernel
        own = k.units[2] in (2, 4) and k.taps[2] == k.units[2] and k.reaches[2] == 1
        aligned = k.units[1] * k.channel_tile_m % 8 == 0
        return own and aligned and k.padding[2] == 0

    @property
    def _lines(self) -> bool:
        """Whether the gradient's rows that a product reads are 128 bytes that lie together."""
        k = self.kernel
        _, rows, width = self.size
        whole = k.units[1] * k.units[2] == 4 and width in (k.line, k.depth)
        own = k.taps[1] == k.units[1] and k.reaches[1] == 1
        exact = self.output[1:] == (k.units[1] * rows, k.units[2] * width)
        tiled = k.channel_tile_m % 8 == 0 and rows * width % k.depth == 0
        natural = k.order == (0, 1, 2) and not k.column_taps and self.source_map
        return whole and own and exact and not self.padded and tiled and natural

    @property
    def _ends(self) -> bool:
        """Whether only a row's first and last 16 bytes of x meet what lies beyond its ends."""
        k, width = self.kernel, self.size[2]
        unit, first = k.units[2], -k.padding[2]
        reach = first + (k.taps[2] - 1) * k.reaches[2]
        inner = reach + (width - k.line - 1) * unit
        met = first + k.line * unit >= 0 and inner <= self.output[2] - 1
        return met and width % k.depth == 0
