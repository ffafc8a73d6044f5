"""Plans of ``wgrad/kernel.cu``: rows and columns of a CTA, position tiles, splits."""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.direct import WEIGHT_STRIDES
from convt3d.cuda.schedule import (
    Gpu,
    Launch,
    Problem,
    Schedule,
    TensorMap,
    div_up,
    macros,
    round_up,
)
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic

_WORKSPACE_BYTES = 64 * 2**20
_MAX_REGISTERS = {2: 176, 3: 112}  # accumulators and row fragments of one of so many consumers
_IN_FLIGHT = {2: 190, 3: 126}  # and addresses, and words of the next fragment
_MAX_BOX = 256  # of each extent of a tensor map's box
_TOO_MUCH = 2**30
_MAX_WIDTH = 16  # of a tile along W, in depths of a product
_STAGES = (2, 3, 4)
_MAX_BASES, _OTHER_BASES = 10, 2
_LONGEST_SUM = 2048  # products that are summed in registers, but for IEEE arithmetic
_MAX_PHASE_SUMS = 96  # registers, of plans by phases
_WARP_COLUMNS = 24  # at most, that warps multiply by themselves in IEEE arithmetic
_FEW_SLICES = 4  # that may be one step
_MORE_STAGES_COST = 1.2  # of joined rows, than two
# Cycles: of a tensor core for 64 rows by 2 columns; of shared memory for a row fragment; of a
# step's barriers; of a copy instruction of one of four warps, or through registers, and of rounding
# what it brought; of one whose place is known; of a bulk copy, times four; of a row of a box.
_PRODUCT_CYCLES = 1.06
_FRAGMENT_CYCLES = 16.0
_WARP_PRODUCT_CYCLES = 3 * 4 * 1.41  # of 64 rows by 8 columns in three parts by mma.sync
_PAIR_PRODUCT_CYCLES = 3 * 1.46  # of 16 columns by 8 rows in three parts
_STEP_CYCLES = 300.0
_SLICE_CYCLES = 600.0
# Of products, before a step's slabs are released; of warps that take turns.
_DRAIN_CYCLES, _SPLIT_K_CYCLES = 1100.0, 2000.0
_COPY_CYCLES, _WIDE_COPY_CYCLES = 105.0, 180.0
_PIECES_CYCLES = 300.0
_PAIR_CYCLES = 400.0
_ROUND_CYCLES = 60.0
_PIECE_CYCLES = 40.0
_RUN_CYCLES, _JOINED_CYCLES = 320.0, 80.0
_BULK_BYTES_PER_CYCLE = 19.0  # of runs of several KB
_BOX_ROW_CYCLES, _SWIZZLED_ROW_CYCLES = 3.0, 3.0
_BOX_BYTES_PER_CYCLE = 18.0  # of boxes without swizzle
_LATENCY_CYCLES = 2000.0
_CLUSTER_CYCLES, _CLUSTER_BYTES_PER_CYCLE = 7800.0, 16.0  # of adding up sums of other CTAs
_CLUSTERS = (2,)
_ISSUE_CYCLES, _ISSUE_CYCLES_HALF = 30.0, 24.0
_BYTES_PER_CYCLE = 17.0  # a multiprocessor's share of DRAM bandwidth
_L2_BYTES_PER_CYCLE = 24.0
_L2_BYTES = 50 * 2**20


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
    SPREAD = 9  # as VOLUME, through registers, which lay the taps along W apart


_SWIZZLED = (Fill.SWIZZLED, Fill.LINES)
_MAPS = (Fill.ROWS, Fill.FLAT, *_SWIZZLED)
_ROW_RUNS = (Fill.RUNS, Fill.PIECES)
_VOLUMES = (Fill.VOLUME, Fill.SPREAD)
_VOLUME_PIECES = {Fill.VOLUME: 8 * 128, Fill.SPREAD: 4 * 128}  # that producers remember
_AS_THEY_LIE = (*_ROW_RUNS, Fill.JOINED)


@dataclass(frozen=True)
class Tile:
    """What a step covers, and the layout of its slabs; follows the extents of a call."""

    positions: Triple  # slices, rows, positions along W
    stages: int
    planes: int
    row_pitch: int
    channel_pitch: int
    shared_bytes: int


@dataclass(frozen=True)
class WgmmaWgradPlan:
    """A gradient-by-weight kernel; tile shape and splits follow the extents of each call."""

    problem: Problem
    order: Triple  # the kernel's axes 0, 1, 2 as D, H, W
    column_taps: bool  # taps along axis 1 of one phase are columns
    channel_tile_n: int  # x channels
    channel_tile_m: int  # gradient channels
    blocks: int  # m64 blocks of a consumer warpgroup
    stages: int
    whole_rows: bool = False  # the gradient comes by tensor map or bulk copies
    fragments: int = 2  # row fragments in flight; IEEE arithmetic adds up their products outside
    whole_columns: bool = False  # a step is all slices of a column
    runs: bool = False  # whole rows come as runs of a channel, not as boxes of rows or in pieces
    consumers: int = 2  # warpgroups that multiply
    together: bool = False  # taps along W are a warp's blocks, which share the words that they read
    phases: bool = False  # a fragment's rows are both phases of W, for all taps that it meets
    cluster: int = 1  # CTAs that share the steps of the same sums, and add them up
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)  # for which tiles are shaped

    # ------------------------------------------------------------ derived sizes

    @property
    def half(self) -> bool:
        return self.problem.element_bytes == 2

    @property
    def ieee(self) -> bool:
        return self.problem.arithmetic is Arithmetic.IEEE

    @property
    def warp_products(self) -> bool:
        """Whether warps multiply by themselves, since columns would leave wgmma mostly unused."""
        return self.ieee and self.columns <= _WARP_COLUMNS

    @functools.cached_property
    def warp_split_k(self) -> bool:
        """Whether those warps take positions in turn, each with all rows of its warpgroup."""
        if not self.warp_products or self.phases:
            return False
        # Sums, those of a few products, and addresses, in registers.
        octets = 8 * self.blocks
        if self.row_tiles == 1:
            last = self.octets - (self.row_blocks - 1) * 8
            octets -= (8 - last) if self.row_blocks % self.consumers == 1 else 0
        return octets * (8 * div_up(self.columns, 16) + 5) <= 160

    @property
    def line(self) -> int:
        """Positions of 16 bytes."""
        return 16 // self.problem.element_bytes

    def _axis(self, values: Triple) -> Triple:
        a, b, c = self.order
        return (values[a], values[b], values[c])

    @functools.cached_property
    def kernel(self) -> Triple:
        return self._axis(self.problem.geometry.kernel_size)

    @functools.cached_property
    def taps(self) -> Triple:
        """Taps that are rows of the product."""
        a, b, c = self.kernel
        return (a, min(self._phases, b) if self.column_taps else b, c)

    @property
    def _phases(self) -> int:
        """From a tap along axis 1 to the next that x meets one row on."""
        g = self.problem.geometry
        return self._axis(g.stride)[1] // self._axis(g.dilation)[1]

    @functools.cached_property
    def taps_across(self) -> int:
        """Taps that are columns of the product."""
        return div_up(self.kernel[1], self._phases) if self.column_taps else 1

    @functools.cached_property
    def columns(self) -> int:
        return self.channel_tile_n * self.taps_across

    @functools.cached_property
    def steps(self) -> Triple:
        """Of the gradient only every step-th position is of use."""
        g = self.problem.geometry
        strides, dilations = self._axis(g.stride), self._axis(g.dilation)
        a, b, c = (
            math.gcd(s, d) if t > 1 else s
            for t, s, d in zip(self.taps, strides, dilations, strict=True)
        )
        return (a, b, 1 if self.whole_rows else c)

    @functools.cached_property
    def units(self) -> Triple:
        """Useful positions of the gradient from one position of x to the next."""
        strides = self._axis(self.problem.geometry.stride)
        a, b, c = (s // t for s, t in zip(strides, self.steps, strict=True))
        return (a, b, c)

    @functools.cached_property
    def reaches(self) -> Triple:
        """Useful positions from one tap to the next."""
        dilations = self._axis(self.problem.geometry.dilation)
        a, b, c = (
            d // t if n > 1 else 1 for d, t, n in zip(dilations, self.steps, self.taps, strict=True)
        )
        return (a, b, c)

    @functools.cached_property
    def octet_taps(self) -> int:
        if self.together:
            return 1
        return 4 if self.units[2] % 4 == 0 else 2 if self.units[2] % 2 == 0 else 1

    @functools.cached_property
    def octets(self) -> int:
        if self.together:
            return self.taps[2] * self.consumers * 8
        taps = self.taps[0] * self.taps[1] * self.taps[2]
        return div_up(taps, self.octet_taps) * (self.channel_tile_m * self.octet_taps // 8)

    @functools.cached_property
    def row_blocks(self) -> int:
        return div_up(self.octets, 8)

    @functools.cached_property
    def row_tiles(self) -> int:
        return div_up(self.row_blocks, self.cta_blocks)

    @property
    def cta_blocks(self) -> int:
        return self.consumers * self.blocks

    @functools.cached_property
    def last_blocks(self) -> int:
        return self.row_blocks - (self.row_tiles - 1) * self.cta_blocks

    @functools.cached_property
    def tiles(self) -> int:
        p = self.problem
        return (
            div_up(p.source_channels, self.channel_tile_n)
            * div_up(p.target_channels, self.channel_tile_m)
            * p.geometry.groups
        )

    @property
    def cta_elements(self) -> int:
        return self.cta_blocks * 64 * self.columns

    @functools.cached_property
    def shifts(self) -> int:
        """Of x along W, that both phases of the gradient's positions meet."""
        padding, taps = self._axis(self.problem.geometry.padding)[2], self.taps[2]
        return (1 + padding) // 2 + (taps - 1 - padding) // 2 + 1

    @functools.cached_property
    def tap_span(self) -> int:
        """Most taps along axis 0 that a CTA's rows touch."""
        per_slice = self.taps[1] * self.taps[2]
        groups = self.channel_tile_m * self.octet_taps // 8
        most = 1
        for tile in range(self.row_tiles):
            first = tile * self.cta_blocks * 8
            last = min(first + self.cta_blocks * 8, self.octets) - 1
            first_tap = first // groups * self.octet_taps
            last_tap = (last // groups + 1) * self.octet_taps - 1
            last_tap = min(last_tap, self.taps[0] * per_slice - 1)
            most = max(most, last_tap // per_slice - first_tap // per_slice + 1)
        return most

    # ------------------------------------------------------------ launches

    def mapped(self, size: Triple) -> bool:
        """Whether x comes by TMA: rows of W in whole pieces of 16 bytes."""
        known = self._mapped.get(size)
        if known is None:
            known = self._mapped[size] = self._can_be_mapped(size)
        return known

    @functools.cached_property
    def _mapped(self) -> dict[Triple, bool]:
        return {}

    def _can_be_mapped(self, size: Triple) -> bool:
        p = self.problem
        # wgmma takes both parts of IEEE-grade operands from shared memory; warps split what came.
        if self.ieee and not (self.warp_products and (self.runs or self.phases)):
            return False
        if self.paired(size):
            return not self.column_taps
        if size[2] % self.line:
            return False
        # Rows that columns shift cannot share a chunk of 128 bytes, so it should be well used.
        return not self.column_taps or 2 * size[2] * p.element_bytes >= 128

    def paired(self, size: Triple) -> bool:
        """Whether 16 bytes of x are two rows of W, and planes are whole pieces of 16 bytes."""
        return size[2] * 2 == self.line and size[1] % 2 == 0

    def fill(self, size: Triple) -> Fill:
        """How the gradient comes: the best way that has a tile."""
        if size not in self._fills:
            ways = self._ways(size)
            self._fills[size] = next((w for w in ways if self._fits(size, w)), Fill.COPIES)
        return self._fills[size]

    @functools.cached_property
    def _fills(self) -> dict[Triple, Fill]:
        return {}

    def _ways(self, size: Triple) -> Iterator[Fill]:
        """Ways for the gradient to come, best first; tensor maps need multiples of 16 bytes."""
        if self.whole_columns and self.steps[2] == 1 and not self.whole_rows:
            # A pair of 16-bit positions of x is then one word of the gradient, not two.
            output = self._output(size)
            # Fragments are then loaded as they are, which takes three in flight or more.
            rows = self.half and self.mapped(size) and self.paired(size)
            if rows and output[2] == self.line and self.fragments > 2:
                yield Fill.SPREAD
            yield Fill.VOLUME
        if not self.whole_rows:
            return
        output = self._output(size)
        boxes = self.channel_tile_m <= _MAX_BOX
        if boxes and output[2] % self.line == 0 and self.steps[1] == 1 and not self.runs:
            if self._swizzles:
                if self._lines(size, output):
                    yield Fill.LINES
                yield Fill.SWIZZLED
            yield Fill.ROWS
        # Pairs of 16-bit positions need rows that are an even number of positions apart; planes of
        # whole columns begin alike.
        odd = self._row_stride(size) * self.units[1] % 2
        if self.whole_columns or (self.half and odd and not self.phases):
            return
        planes = self.order == (0, 1, 2)
        # Words of 16-bit rows are shared with the next, and its positions with the border's zeros.
        shared = self._padded and self.half
        if boxes and planes and math.prod(output) % self.line == 0 and not shared:
            yield Fill.FLAT
        ends = self.warp_products or self.phases or self._ends(size)
        if self.runs and planes and self.mapped(size) and ends:
            yield Fill.JOINED
        # Of pieces, only the last row's may reach beyond the tensor.
        yield Fill.RUNS if self.runs or output[2] < 2 * self.line else Fill.PIECES

    def _ends(self, size: Triple) -> bool:
        """Whether only a row's first and last 16 bytes of x meet what lies beyond its ends."""
        g = self.problem.geometry
        unit, most = self.units[2], self._axis(self._output(size))[2] - 1
        first = -g.padding[2]
        reach = first + (self.taps[2] - 1) * self.reaches[2]
        inner = reach + (size[2] - self.line - 1) * unit
        return first + self.line * unit >= 0 and inner <= most and size[2] % (2 * self.line) == 0

    def _fits(self, size: Triple, fill: Fill) -> bool:
        shapes = self._shapes((size[0], self.rows(size)[1], size[2]), size)
        most = self.gpu.shared_per_block
        return any(self._layout(shape, size, fill).shared_bytes <= most for shape in shapes)

    @property
    def _swizzles(self) -> bool:
        """Whether a product's words of the gradient share lines of 128 bytes with no other's."""
        own = self.units[2] in (2, 4) and self.taps[2] == self.units[2] and self.reaches[2] == 1
        aligned = self.units[1] * self.channel_tile_m % 8 == 0
        padding = self._axis(self.problem.geometry.padding)
        return own and aligned and padding[2] == 0 and not self.whole_columns

    def _lines(self, size: Triple, output: Triple) -> bool:
        """Whether the gradient's rows that a product reads are 128 bytes that lie together."""
        depth = 2 * self.line
        whole = self.units[1] * self.units[2] == 4 and size[2] in (self.line, depth)
        own = self.taps[1] == self.units[1] and self.reaches[1] == 1
        exact = output[1] == self.units[1] * size[1] and output[2] == self.units[2] * size[2]
        unpadded = self._axis(self.problem.geometry.padding)[1:] == (0, 0)
        tiled = self.channel_tile_m % 8 == 0 and size[1] * size[2] % depth == 0
        natural = self.order == (0, 1, 2) and not self.column_taps and self.mapped(size)
        return whole and own and exact and unpadded and tiled and natural

    @property
    def _padded(self) -> bool:
        """Whether a box of whole lines has other rows where the border's zeros should be."""
        return self._axis(self.problem.geometry.padding)[1:] != (0, 0)

    def sums_bias(self, input_size: Sequence[int]) -> bool:
        """Whether the gradient by bias comes with that by weight, where it is wanted.

        Consumers add up their fragments: those of `stride` neighbouring taps of each axis hold
        every position of the gradient once.
        """
        g = self.problem.geometry
        a, b, c = input_size
        size = self._axis((a, b, c))
        axes = zip(
            g.padding, g.stride, g.kernel_size, g.dilation, g.output_size((a, b, c)), strict=True
        )
        shared_out = all(
            p + s <= k and d == 1 and out <= s * n
            for (p, s, k, d, out), n in zip(axes, (a, b, c), strict=True)
        )
        # Of boxes of whole lines and joined rows, what lies beyond a row is the next.
        ways = (Fill.ROWS, *_SWIZZLED, Fill.COPIES)
        plain = not self.column_taps and not self.warp_products and self.fill(size) in ways
        return self.problem.bias and shared_out and plain

    def clears(self, size: Triple) -> bool:
        """Whether producers write the border's zeros into boxes of whole lines."""
        return self._padded and self.fill(size) is Fill.FLAT

    def _row_stride(self, size: Triple) -> int:
        """Elements of the gradient from one useful row to the next."""
        output = self._output(size)
        return _strides(output, self.order)[1] * self.steps[1]

    def channel_step(self, fill: Fill) -> int:
        """From one channel of a tile to the next: where runs begin hangs on the channel."""
        channels = self.problem.target_channels
        tiles = div_up(channels, self.channel_tile_m)
        return tiles if fill in _AS_THEY_LIE and channels % tiles == 0 else 1

    def octet_step(self, fill: Fill) -> int:
        """From one channel of an octet to the next, of which runs should begin alike."""
        octets = self.channel_tile_m * self.octet_taps // 8
        if fill in _SWIZZLED:
            return 2 if octets % 2 == 0 and self.units[2] == 2 else 1
        return octets if fill in _AS_THEY_LIE else 1

    def flat(self, positions: Triple, size: Triple) -> bool:
        """Whether 128-byte rows of x run over the rows of a slice."""
        return not self.column_taps and positions[2] == size[2]

    def macros(
        self, size: Triple, direct: bool = False, skips: bool = False
    ) -> tuple[tuple[str, str], ...]:
        p, g = self.problem, self.problem.geometry
        values: dict[str, object] = {
            "groups": g.groups,
            "source_channels": p.source_channels,
            "target_channels": p.target_channels,
            "column_taps": self.taps_across,
            "channel_tile_n": self.channel_tile_n,
            "channel_tile_m": self.channel_tile_m,
            "blocks": self.blocks,
            "consumers": self.consumers,
            "cluster": self.cluster,
            "stages": self.stages,
            "ieee": self.ieee,
            "warp_products": self.warp_products,
            "warp_split_k": self.warp_split_k,
            "phase_rows": self.phases,
            "taps_together": self.together,
            "source_map": self.mapped(size),
            "target_fill": int(self.fill(size)),
            "target_clear": self.clears(size),
            "whole_rows": self.whole_rows,
            "fragments": self.fragments,
            "whole_columns": self.whole_columns,
            "direct_store": direct,
            "slices": size[0] if skips else 0,
            "slice_products": size[1] * size[2] // (2 * self.line) if skips else 1,
            "outputs0": self._axis(self._output(size))[0] if skips else 0,
            "sum_bias": self.sums_bias(self._unordered(size)),
            "octet_step": self.octet_step(self.fill(size)),
            "channel_step": self.channel_step(self.fill(size)),
        }
        for i, axis in enumerate(self.order):
            values[f"kernel{i}"] = g.kernel_size[axis]
            values[f"stride{i}"] = g.stride[axis]
            values[f"padding{i}"] = g.padding[axis]
            values[f"dilation{i}"] = g.dilation[axis]
        return p.type_macros + macros("CONVT3D_", **values)

    def rows(self, size: Triple) -> tuple[int, int]:
        """First row and number of rows along axis 1; gradient rows where taps are columns."""
        if not self.column_taps:
            return 0, size[1]
        g = self.problem.geometry
        stride, padding = self._axis(g.stride)[1], self._axis(g.padding)[1]
        n_out = self._axis(self._output(size))[1]
        # Row j is gradient row j * stride - padding and those of other phases, of 0 ... n_out - 1.
        reach = (self.taps[1] - 1) * self._axis(g.dilation)[1]
        first = max(0, div_up(padding - reach, stride))
        last = min((n_out - 1 + padding) // stride, size[1] - 1 + self.taps_across - 1)
        return first, max(1, last - first + 1)

    def _output(self, size: Triple) -> Triple:
        """The extents (D, H, W) of the gradient, from those of x along the kernel's axes."""
        known = self._outputs.get(size)
        if known is None:
            known = self.problem.geometry.output_size(self._unordered(size))
            self._outputs[size] = known
        return known

    @functools.cached_property
    def _outputs(self) -> dict[Triple, Triple]:
        return {}

    def _unordered(self, size: Triple) -> Triple:
        natural = [0, 0, 0]
        for i, axis in enumerate(self.order):
            natural[axis] = size[i]
        return (natural[0], natural[1], natural[2])

    def tile(self, positions: Triple, size: Triple) -> Tile:
        """The layout of a tile of these positions."""
        return self._layout(positions, size, self.fill(size))

    def _layout(self, positions: Triple, size: Triple, fill: Fill) -> Tile:
        g, bytes_ = self.problem.geometry, self.problem.element_bytes
        t0, t1, t2 = positions
        rows_x = t1 + self.taps_across - 1
        rows_g = self._gradient_rows(positions)
        width = (t2 - 1) * self.units[2] + (self.taps[2] - 1) * self.reaches[2] + 1
        out_w = self._output(size)[2]
        lead = (-g.padding[2]) % self.line
        # Words; lanes of a fragment find theirs in different banks.
        residue = 4 * self.units[2] % 32 or 4
        if self.phases:
            # A lane's eight words, or halves, lie together, of runs that begin apart.
            residue = 16 if self.half else 4
        chunk_g = 128 // bytes_
        if fill is Fill.SWIZZLED:
            channel_pitch, pitch = chunk_g, self.channel_tile_m * chunk_g
            whole = t2 * self.units[2] % chunk_g == 0 and rows_g * self.channel_tile_m % 8 == 0
            box = rows_g if whole else _TOO_MUCH
        elif fill is Fill.LINES:
            channel_pitch, pitch = chunk_g, out_w
            box = t1 * t2 // (2 * self.line) if t2 == size[2] else _TOO_MUCH
        elif fill is Fill.ROWS:
            channel_pitch = self._pitch(width + lead, residue)
            pitch = self.channel_tile_m * channel_pitch
            box = max(channel_pitch, rows_g)
        else:
            if fill in (*_ROW_RUNS, Fill.FLAT, Fill.JOINED):
                pitch = self._row_stride(size)
                if fill in _ROW_RUNS:
                    # Rows begin at the tensor's address modulo 16 bytes.
                    shortest = width + 2 * (self.line - 1)
                    pitch = shortest + (pitch - shortest) % self.line
            elif self.steps[2] == 1 and out_w % self.line == 0:
                pitch = round_up(width + lead, self.line)
                if fill is Fill.VOLUME:
                    # What reaches beyond a row finds the zeros before the next.
                    border = g.padding[2]
                    least = max(round_up(border, self.line) + out_w, width - border)
                    pitch = min(pitch, round_up(least, self.line))
            elif self.half:
                pitch = round_up(width + g.padding[2] % 2, 2)
            else:
                # Odd pitches let neighbouring taps of different rows share an octet.
                pitch = width | 1 if self.octet_taps > 1 else width
            if fill is Fill.FLAT:
                run = (rows_g - 1) * pitch + width + self._most_lead(positions, size)
                channel_pitch = box = self._pitch(run, residue)
                if self._padded and width > pitch:
                    box = _TOO_MUCH  # one row's border is the next one's middle
            else:
                if fill is Fill.SPREAD:
                    pitch, residue = self.taps[2] * t2, 4
                run = rows_g * pitch + (self.line if fill in _ROW_RUNS else 0)
                if fill is Fill.JOINED:
                    run = (rows_g - 1) * pitch + max(width, g.padding[2] + out_w) + self.line - 1
                    run = round_up(run, self.line)
                if fill is Fill.VOLUME:
                    run = max(run, (rows_g - 1) * pitch + lead + width)
                banks = self.units[1] * pitch * bytes_ // 4 % 32
                if 2 * t2 == self.line and banks == 16 and fill is not Fill.SPREAD:
                    residue //= 2  # lanes are of two rows, half of the banks apart
                channel_pitch = self._pitch(run, residue)
                # Whole rows, which a narrow tile does not walk along.
                box = 1
                ends = t2 >= size[2] if self.warp_products or self.phases else t2 == size[2]
                if fill is Fill.JOINED and (not ends or t2 == self.line):
                    box = _TOO_MUCH
                whole = t0 >= size[0] and t1 >= self.rows(size)[1] and t2 >= size[2]
                if fill in _VOLUMES:
                    few = self._volume_pieces(size) <= _VOLUME_PIECES[fill]
                    box = 1 if whole and few and out_w % self.line == 0 else _TOO_MUCH
        x_line = rows_x * self.channel_tile_n * 16 + 16
        if self.mapped(size):
            chunk = 128 // bytes_
            flat = self.flat(positions, size)
            if flat and t1 == size[1]:
                chunks = div_up(t0 * t1 * t2, chunk)
            else:
                chunks = t0 * div_up(t1 * t2 if flat else t2, chunk)
            x_slab = chunks * (1 if flat else rows_x) * self.channel_tile_n * 128
        else:
            x_slab = (2 if self.ieee else 1) * t0 * (t2 // self.line) * x_line
        span = (t0 - 1) * self.units[0] + (self.tap_span - 1) * self.reaches[0] + 1
        fresh = min(t0 * self.units[0], span)
        columns = 1 + div_up(self.stages - 1, div_up(size[0], t0))
        if fill is Fill.JOINED:
            columns = 1  # whose producers wait where one begins
        planes = self.stages * fresh + columns * (span - fresh)
        if self.whole_columns:
            planes = self.stages * span
            box = _TOO_MUCH if t0 < size[0] else box
        plane = rows_g * pitch if fill is Fill.ROWS else self.channel_tile_m * channel_pitch
        if fill is Fill.JOINED:
            plane += run - channel_pitch
        plane = round_up(plane * bytes_, 128 if fill in _MAPS else 16)
        if fill is Fill.SWIZZLED:
            plane = round_up(t2 * self.units[2] // chunk_g * rows_g * pitch * bytes_, 1024)
        if fill is Fill.LINES:
            plane = box * self.channel_tile_m * 128
        shared = self.stages * x_slab + planes * plane + 8 * (3 * self.stages + 1)
        shared += 0 if self.mapped(size) else 128
        shared += 1024 if fill in _SWIZZLED else 0
        if box > _MAX_BOX:
            shared = _TOO_MUCH
        if self.phases and fill is not Fill.JOINED:
            shared = _TOO_MUCH
        return Tile(positions, self.stages, planes, pitch, channel_pitch, shared)

    def _volume_pieces(self, size: Triple) -> int:
        """Pieces of 16 bytes of a sample's channel tile."""
        volume = math.prod(self._output(size))
        return volume * self.channel_tile_m // self.line

    def _pitch(self, positions: int, residue: int) -> int:
        """From one channel to the next, so that lanes of a fragment find different banks."""
        step = residue & -residue  # any odd multiple of it does
        words = div_up(positions * self.problem.element_bytes, 4)
        words += (step - words) % (2 * step)
        return words * 4 // self.problem.element_bytes

    def _most_lead(self, positions: Triple, size: Triple) -> int:
        """Most positions that a box of whole lines begins early, which rounds down to 16 bytes."""
        g = self.problem.geometry
        (p0, p1, p2), (_, s1, s2) = self._axis(g.padding), self._axis(g.stride)
        output = self._output(size)
        plane, row = output[1] * output[2], output[2]
        first = (self.rows(size)[0] * s1 - p1) * row - p0 * plane - p2
        step = math.gcd(self.line, plane, positions[1] * s1 * row, positions[2] * s2)
        return first % step + self.line - step

    @property
    def _interleaves(self) -> bool:
        """Whether neighbours read common rows of the gradient, or mostly x alone."""
        return self.column_taps and not self.runs

    def splits(self, columns: int, down: int, last_step: float, gpu: Gpu) -> tuple[int, int]:
        """CTAs that share the columns of ``down`` steps, for full row tiles and for the last one.

        A step of the last row tile takes ``last_step`` of the time of the others'. Where all CTAs
        can have equally many columns at little loss, those of neighbours read common rows together,
        of which columns of taps have many.
        """
        steps = columns * down
        if self.cluster > 1:
            return 1, self.cluster
        wanted = max(gpu.multiprocessors // self.tiles, 1)
        most = max(
            _WORKSPACE_BYTES,
            2 * 4 * math.prod(self.problem.geometry.weight_size),
        ) // (4 * self.cta_elements * self.tiles)
        wanted = min(wanted, max(most, 1))
        if self.row_tiles == 1:
            wanted = max(1, min(wanted, steps))
            even = (
                _interleaved(columns, wanted, 1.06 * columns / wanted) if self._interleaves else 0
            )
            return 1, even or wanted
        last = np.arange(1, max(2, wanted - self.row_tiles + 2))
        full = np.minimum(np.maximum(1, (wanted - last) // (self.row_tiles - 1)), steps)
        last = np.minimum(last, steps)
        time = np.maximum(-(-steps // full), -(-steps // last) * last_step)
        chosen = int(np.argmin(time))
        limit = 1.06 * float(time[chosen]) / down / max(1.0, last_step)
        even = _interleaved(columns, wanted // self.row_tiles, limit) if self._interleaves else 0
        return (even, even) if even else (int(full[chosen]), int(last[chosen]))

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        g, gpu = self.problem.geometry, self.gpu
        a, b, c = input_size
        natural = (a, b, c)
        size = self._axis(natural)
        if self.phases and not self._fits(size, self.fill(size)):
            return replace(self, phases=False).schedule(batch, input_size)
        if self.together and self.fill(size) is not Fill.JOINED:
            return replace(self, together=False).schedule(batch, input_size)
        tile = self.best_tile(batch, size, gpu)
        t0, t1, t2 = tile.positions
        first, rows = self.rows(size)
        across = (div_up(rows, t1), div_up(size[2], t2))
        down = div_up(size[0], t0)
        columns = batch * across[0] * across[1]
        if self.cluster > 1 and not self._fits_clusters(columns * down, tile):
            return replace(self, cluster=1).schedule(batch, input_size)
        split = self.splits(columns, down, self._last_step(size, tile), gpu)
        output = g.output_size(natural)
        numbers = (
            *size,
            *_strides(natural, self.order),
            *self._axis(output),
            *_strides(output, self.order),
            t0,
            t1,
            t2,
            *across,
            down,
            first,
            tile.planes,
            tile.row_pitch,
            tile.channel_pitch,
            batch,
            *split,
        )
        bias = self.sums_bias(natural)
        direct = self._direct(columns * down, tile, split)
        fill = self.fill(size)
        maps = (self._source_map(batch, natural, tile.positions),) if self.mapped(size) else ()
        if fill in _MAPS:
            maps = (*maps, self._target_map(batch, natural, tile))
        file = "wgrad/kernel.cu"
        ctas = self.tiles * ((self.row_tiles - 1) * split[0] + split[1])
        sums = direct or self.warp_split_k or self.phases
        strides = WEIGHT_STRIDES[:2] + tuple(WEIGHT_STRIDES[2 + axis] for axis in self.order)
        tensors: tuple[str, ...] = ("source", "target", "weight" if direct else "partial", "weight")
        tensors = (*tensors, "sums") if bias else tensors
        product = Launch(
            KernelSpec(
                file,
                "convt3d_wgrad",
                self.macros(size, direct, self._skips(size, tile)),
            ),
            ctas,
            128 * (1 + self.consumers),
            max(tile.shared_bytes, self._sum_bytes if sums else 0),
            (*tensors, *maps, *map(np.int32, numbers), *strides),
        )
        wide = (*_ROW_RUNS, Fill.JOINED, *_VOLUMES)
        aligned = ("target",) if fill in wide else ()
        if direct and not bias:
            return Schedule((product,), {}, aligned)
        bits = _share_bits(max(split))
        taps = min(math.prod(self.taps), 8)  # of an item of the second pass
        items = self.channel_tile_m * div_up(math.prod(self.taps), taps) * (self.columns // 4)
        reduce = Launch(
            KernelSpec(file, "convt3d_reduce", self.macros(size, direct)),
            (0 if direct else self.tiles * div_up(items, 256 >> bits))
            + (div_up(g.out_channels, 8) if bias else 0),
            256,
            4 * 256 * 4 * (taps | 1),
            (
                *(tensors[2:4]),
                *(("sums", "bias") if bias else ()),
                *map(np.int32, (bits, *split)),
                *strides,
            ),
            dependent=True,
        )
        workspaces = {} if direct else {"partial": 4 * ctas * self.cta_elements}
        if bias:
            workspaces["sums"] = 4 * ctas * self.cta_blocks * 64
        return Schedule((product, reduce), workspaces, aligned, bias)

    @property
    def _sum_bytes(self) -> int:
        """Shared memory of a CTA's sums, as `Config::sum_pitch` has them, and a barrier."""
        return 4 * self.columns * (64 * self.cta_blocks + 4) + 8 + 1024 + 128

    def _fits_clusters(self, steps: int, tile: Tile) -> bool:
        """Whether CTAs of a cluster can put down their sums, once, for each other."""
        products = math.prod(tile.positions) // (2 * self.line) * div_up(steps, self.cluster)
        fits = self._sum_bytes <= self.gpu.shared_per_block and self.columns % self.cluster == 0
        return fits and (self.ieee or products <= _LONGEST_SUM)

    def _skips(self, size: Triple, tile: Tile) -> bool:
        """Whether blocks leave out slices of a sample where their tap along axis 0 meets zeros."""
        blocks = self.row_tiles == 1 and self.last_blocks == self.cta_blocks and self.consumers == 2
        own = self.taps[1] * self.taps[2] * self.channel_tile_m % 64 == 0
        whole = self.whole_columns and self.fill(size) in _VOLUMES and tile.positions == size
        padded = self._axis(self.problem.geometry.padding)[0] > 0
        return blocks and own and whole and padded and not self.ieee

    def _direct(self, steps: int, tile: Tile, split: tuple[int, int]) -> bool:
        """Whether CTAs store the weight themselves: sums are whole and fit into shared memory."""
        if self.cluster > 1:
            return True
        if split[1] > 1 or (self.row_tiles > 1 and split[0] > 1) or self.warp_products:
            return False
        if self.phases:
            return False
        long = steps * math.prod(tile.positions) // (2 * self.line) > _LONGEST_SUM
        return self._sum_bytes <= self.gpu.shared_per_block and (self.ieee or not long)

    def _target_map(self, batch: int, natural: Triple, tile: Tile) -> TensorMap:
        """The gradient as boxes of rows, channels and W, or of its volume and channels."""
        p, bytes_ = self.problem, self.problem.element_bytes
        channels, output = p.geometry.out_channels, p.geometry.output_size(natural)
        volume = math.prod(output)
        size = self._axis(output)
        stride0, stride1 = _strides(output, self.order)
        box: tuple[int, ...]
        if self.fill(self._axis(natural)) is Fill.FLAT:
            extents: tuple[int, ...] = (volume, channels, batch)
            strides: tuple[int, ...] = (volume, channels * volume)
            box = (tile.channel_pitch, self.channel_tile_m, 1)
        elif self.fill(self._axis(natural)) is Fill.LINES:
            chunk = tile.channel_pitch
            extents = (chunk, channels, stride0 // chunk, size[0], batch)
            strides = (volume, chunk, stride0, channels * volume)
            lines = tile.positions[1] * tile.positions[2] // (2 * self.line)
            box = (chunk, self.channel_tile_m, lines, 1, 1)
        else:
            extents = (size[2], channels, size[1], size[0], batch)
            strides = (volume, stride1, stride0, channels * volume)
            rows = self._gradient_rows(tile.positions)
            box = (tile.channel_pitch, self.channel_tile_m, rows, 1, 1)
        strides = tuple(n * bytes_ for n in strides)
        swizzle = 128 if self.fill(self._axis(natural)) in _SWIZZLED else 0
        # Sums take the gradient as it is; fragments round it.
        exact = self._element == "tfloat32" and self.sums_bias(natural)
        element = "float32" if exact else self._element
        return TensorMap("target", element, extents, strides, box, swizzle)

    @property
    def _element(self) -> str:
        return {
            Arithmetic.TF32: "tfloat32",
            Arithmetic.IEEE: "float32",
            Arithmetic.F16: "float16",
            Arithmetic.BF16: "bfloat16",
        }[self.problem.arithmetic]

    def _gradient_rows(self, positions: Triple) -> int:
        return (positions[1] - 1) * self.units[1] + (self.taps[1] - 1) * self.reaches[1] + 1

    def _source_map(self, batch: int, natural: Triple, positions: Triple) -> TensorMap:
        """x as boxes of 128 bytes of W (or of a slice), channels and rows."""
        p, bytes_ = self.problem, self.problem.element_bytes
        channels = p.geometry.in_channels
        size = self._axis(natural)
        volume = math.prod(natural)
        stride0, stride1 = _strides(natural, self.order)
        chunk = 128 // bytes_
        if self.flat(positions, size) and positions[1] == size[1]:
            extents: tuple[int, ...] = (volume, channels, batch)
            strides: tuple[int, ...] = (volume, channels * volume)
            box: tuple[int, ...] = (chunk, self.channel_tile_n, 1)
        elif self.flat(positions, size):
            extents = (size[1] * size[2], channels, size[0], batch)
            strides = (volume, stride0, channels * volume)
            box = (chunk, self.channel_tile_n, 1, 1)
        else:
            rows = positions[1] + self.taps_across - 1
            extents = (size[2], channels, size[1], size[0], batch)
            strides = (volume, stride1, stride0, channels * volume)
            box = (chunk, self.channel_tile_n, rows, 1, 1)
        return TensorMap(
            "source", self._element, extents, tuple(n * bytes_ for n in strides), box, 128
        )

    def describe(self) -> dict[str, str]:
        rows = self.channel_tile_m
        return {
            "kernel": "gradient by weight, wgmma, split and reduced in order",
            "axes": ", ".join("DHW"[i] for i in self.order),
            "tile": f"{self.cta_blocks * 64} rows of {self.octets * 8} (taps x {rows} channels) x "
            f"{self.columns} columns",
            "variants": f"{self.tiles} channel tiles, {self.row_tiles} row tiles",
            "pipeline": f"{self.consumers} consumers, {self.stages} stages, "
            f"{self.fragments} fragments, 1 CTA a multiprocessor, gradient by {self._way}"
            + (", phases of W" if self.phases else "")
            + (", taps together" if self.together else "")
            + (f", clusters of {self.cluster}" if self.cluster > 1 else ""),
        }

    @property
    def _way(self) -> str:
        if self.whole_columns:
            return "columns"
        return "runs" if self.runs else "rows" if self.whole_rows else "copies"

    # ------------------------------------------------------------ tile shape and cost

    def best_tile(self, batch: int, size: Triple, gpu: Gpu) -> Tile:
        """The cheapest tile for extents along the kernel's axes."""
        return min(self._tiles(batch, size, gpu), key=lambda item: item[0])[1]

    def cost(
        self, batch: int, input_size: Sequence[int], gpu: Gpu, *, rough: bool = False
    ) -> float:
        """Estimated cycles of one call with its best tile; inf where no tile fits.

        A ``rough`` estimate looks at few tiles.
        """
        a, b, c = input_size
        found = self._tiles(batch, self._axis((a, b, c)), gpu, rough)
        if self.together and self.fill(self._axis((a, b, c))) is not Fill.JOINED:
            return float("inf")
        # Extents that stand for large ones have short rows, of which three stages hold more: of
        # longer rows two were faster for every layer that was timed.
        joined = self.stages > 2 and self.fill(self._axis((a, b, c))) is Fill.JOINED
        factor = _MORE_STAGES_COST if joined else 1
        return min((factor * cost for cost, _ in found), default=float("inf"))

    def _shapes(self, covered: Triple, size: Triple) -> list[Triple]:
        """Tiles of positions, of which those that TMA can bring."""
        paired = self.mapped(size) and self.paired(size)
        shapes = _shapes(self.line, self.fragments, covered, self.whole_columns, paired)
        if self.mapped(size):
            # Chunks of W, or whole rows.
            chunk = 128 // self.problem.element_bytes
            shapes = [s for s in shapes if s[2] % chunk == 0 or s[2] == size[2]]
        if self.phases:
            # Whole rows, in pairs.
            shapes = [s for s in shapes if s[1] % 2 == 0 and s[2] >= size[2]]
        return shapes

    def _tiles(
        self, batch: int, size: Triple, gpu: Gpu, rough: bool = False
    ) -> list[tuple[float, Tile]]:
        found = []
        _, rows = self.rows(size)
        shapes = self._shapes((size[0], rows, size[2]), size)
        for positions in _few(shapes) if rough else shapes:
            tile = self.tile(positions, size)
            if tile.shared_bytes <= gpu.shared_per_block:
                found.append((self._cost(batch, size, rows, tile, gpu), tile))
        return found

    @functools.cached_property
    def _last_work(self) -> float:
        """Blocks that a step of the last row tile costs; of an odd number one consumer has more."""
        even = round_up(self.last_blocks, self.consumers)
        return (max(self.last_blocks, self.consumers) + even) / 2

    def _last_step(self, size: Triple, tile: Tile) -> float:
        """The time of a step of the last row tile, over that of the others'."""
        full, last = (self._step(size, tile, n) for n in (self.cta_blocks, self._last_work))
        return last / full

    def _step(self, size: Triple, tile: Tile, blocks: float) -> float:
        """Cycles of a step that multiplies this many blocks."""
        bytes_ = self.problem.element_bytes
        t0, t1, t2 = tile.positions
        products = t0 * t1 * t2 // (2 * self.line)
        matrix = products * blocks * max(self.columns, 16) / 2 * _PRODUCT_CYCLES
        if self.ieee and not self.warp_products:
            matrix = 3.3 * matrix + products * 80
        two = self.half and self.fill(size) is not Fill.SPREAD and not self.together
        fragments = (2 if two else 1) * _FRAGMENT_CYCLES
        conflicts = (
            1.33 if self.octet_taps > 1 and self.taps[2] % 2 and tile.row_pitch % 2 == 0 else 1
        )
        # Instructions that prepare a fragment; a scheduler has a warp of each consumer.
        issue = products * blocks * (_ISSUE_CYCLES_HALF if self.half else _ISSUE_CYCLES)
        if self.ieee:
            issue *= 1.5
        shared = products * blocks * (fragments * conflicts + self.columns / 4)
        if self.warp_products:
            tiles = self.columns // 8
            matrix = products * blocks * tiles * _WARP_PRODUCT_CYCLES
            columns = 11 if self.mapped(size) else 5
            issue = products * (blocks * (14 + 9 * tiles) + 2 * (10 + columns * tiles)) * 1.3
            shared = products * (blocks * fragments * conflicts + 8 * 4 * tiles)
        if self.warp_split_k:
            # x is split once for all rows of a warpgroup, of which no octet is empty.
            octets = min(8 * blocks, self.octets) * div_up(self.columns, 16)
            matrix = products * octets * _PAIR_PRODUCT_CYCLES
            issue = products * (octets * 14 + self.consumers * 50) / 4 * 1.3
            shared = products * (octets * 2 * conflicts + self.consumers * 4)
        if self.phases:
            # Of sixteen positions of two rows: fragments of both tensors, products, sums.
            items = t0 * t1 / 2 * div_up(t2, 16)
            sums = self.taps[0] * self.kernel[1] * self.shifts
            gradient_words = self.taps[0] * self.taps[1] * 2 * (12 if self.half else 36)
            x_words = (self.taps_across + 1) * (12 if self.half else 26)
            parts = 2 if self.half else 12
            matrix = items * sums * parts * 1.46
            issue = items * (gradient_words + x_words + sums * (parts + 4) + 60) / 4 * 1.3
            shared = items * self.taps[0] * self.taps[1] * 2 * (5 if self.half else 8)
        rows_x = t1 + self.taps_across - 1
        rows_g = self._gradient_rows(tile.positions)
        x = t0 * rows_x * t2 * self.channel_tile_n
        span = (t0 - 1) * self.units[0] + (self.tap_span - 1) * self.reaches[0] + 1
        fresh = min(t0 * self.units[0], span)
        down = div_up(size[0], t0)
        fresh_mean = fresh + (span - fresh) / down
        fill = self.fill(size)
        output = self._axis(self._output(size))
        if fill is Fill.FLAT:
            gradient = fresh_mean * tile.channel_pitch * self.channel_tile_m
        elif fill in _SWIZZLED:
            gradient = fresh_mean * rows_g * t2 * self.units[2] * self.channel_tile_m
        elif fill is Fill.ROWS:
            # Boxes fetch nothing beyond the tensor.
            inside = min(rows_g, output[1]) * min(tile.channel_pitch, output[2])
            gradient = fresh_mean * inside * self.channel_tile_m
        else:
            gradient = fresh_mean * rows_g * tile.row_pitch * self.channel_tile_m
        wide_x = 16 if size[2] % self.line == 0 else 4
        wide_g = 16 if output[2] % self.line == 0 and self.steps[2] == 1 else 4
        if self.half:
            wide_g = wide_g if output[2] % 2 == 0 else 2
        # Runs of contiguous positions begin and end within sectors.
        runs = t0 * rows_x
        if t2 >= size[2]:
            runs = 1 if rows_x >= size[1] else t0
        moved = (x + gradient * self.steps[2]) * bytes_ + 32 * runs * self.channel_tile_n
        runs_g = 1 if t2 >= size[2] else rows_g
        moved += 48 * fresh_mean * runs_g * self.channel_tile_m
        # Lanes take pieces of a slab's rows, then walk the channels; four warps share those.
        copies = 0.0
        if not self.mapped(size):
            copies = _warps(t0 * rows_x * t2 * bytes_ / wide_x) * self.channel_tile_n
            copies *= _COPY_CYCLES + (0 if self.half else _ROUND_CYCLES)
        if fill is Fill.RUNS:
            copies += fresh_mean * rows_g * self.channel_tile_m * _RUN_CYCLES
        elif fill is Fill.PIECES:
            pieces = rows_g * ((tile.row_pitch - 1) // self.line)
            copies += fresh_mean * _warps(pieces) * self.channel_tile_m * _PIECES_CYCLES
        elif fill in _VOLUMES:
            copies += _warps(self._volume_pieces(size)) * _PIECE_CYCLES
        elif fill is Fill.COPIES:
            pieces = rows_g * div_up(tile.row_pitch * bytes_, wide_g)
            each = {2: _PAIR_CYCLES, 4: _COPY_CYCLES, 16: _WIDE_COPY_CYCLES}[wide_g]
            copies += fresh_mean * _warps(pieces) * self.channel_tile_m * each
        boxes = 0.0
        if self.mapped(size):
            boxes += x * bytes_ / 128 * _SWIZZLED_ROW_CYCLES
        if fill in _SWIZZLED:
            boxes += gradient * bytes_ / 128 * _SWIZZLED_ROW_CYCLES
        elif fill in _MAPS:
            boxes += gradient * bytes_ / _BOX_BYTES_PER_CYCLE
            rows_box = rows_g if fill is Fill.ROWS else 1
            boxes += fresh_mean * rows_box * self.channel_tile_m * _BOX_ROW_CYCLES
        if fill is Fill.JOINED:
            rows = rows_g * t2 * self.units[2] * self.steps[1]
            lines = fresh_mean * self.channel_tile_m * rows * bytes_
            boxes += max(
                lines / _BULK_BYTES_PER_CYCLE, fresh_mean * self.channel_tile_m * _JOINED_CYCLES
            )
        # With two stages the producers wait for the copies that they just issued.
        moving = max(moved / _L2_BYTES_PER_CYCLE, boxes)
        late = self.stages == 2 and fill is not Fill.JOINED
        producing = max(copies / 4, moving) + (_LATENCY_CYCLES if late else 0)
        step = max(matrix, shared, issue, producing)
        # Products in flight cover what a step and a slice begin with. Two suffice where fragments
        # are prepared from words that were fetched before.
        begun = _STEP_CYCLES + (1 if self.whole_columns else t0) * _SLICE_CYCLES
        if fill not in _MAPS:
            begun *= 0.57 if self.fragments > 2 else 0.55
        else:
            begun *= 0.5 if self.fragments > 2 else 0.7 if self.half else 1
        if fill is Fill.JOINED:
            # Steps begin anew, while the producer asks for the next.
            consuming = max(matrix, shared, issue) + 0.15 * min(matrix, shared) + begun
            waiting = (consuming + producing + _LATENCY_CYCLES) / 2 if self.stages == 2 else 0
            drain = (
                _SPLIT_K_CYCLES
                if self.warp_split_k or self.phases
                else _DRAIN_CYCLES - 30 * self.fragments
            )
            return max(consuming, producing, waiting) + drain
        step += 0.15 * min(matrix, shared) + begun
        step += 0.25 * copies / 4  # what producers issue, consumers cannot
        return step

    def _cost(self, batch: int, size: Triple, rows: int, tile: Tile, gpu: Gpu) -> float:
        g, bytes_ = self.problem.geometry, self.problem.element_bytes
        t0, t1, t2 = tile.positions
        last_step = self._step(size, tile, self._last_work)
        step = self._step(size, tile, self.cta_blocks) if self.row_tiles > 1 else last_step
        columns, down = batch * div_up(rows, t1) * div_up(size[2], t2), div_up(size[0], t0)
        steps = columns * down
        full, last = self.splits(columns, down, last_step / step, gpu)
        if self.cluster > 1 and not self._fits_clusters(steps, tile):
            return float("inf")
        ctas = self.tiles * ((self.row_tiles - 1) * full + last)
        waves = div_up(ctas, gpu.multiprocessors)
        longest = div_up(steps, last) * last_step
        if self.row_tiles > 1:
            longest = max(longest, div_up(steps, full) * step)
        direct = self._direct(steps, tile, (full, last))
        put_down = 0 if direct else self.cta_elements * 4 / _BYTES_PER_CYCLE
        total = waves * (longest + 3000 + 3000 + put_down)
        # Every tensor comes from DRAM once.
        volume_x = batch * g.in_channels * math.prod(size) * bytes_
        output = self._output(size)
        volume_g = batch * g.out_channels * math.prod(output) * bytes_
        total = max(total, (volume_x + volume_g) / gpu.multiprocessors / _BYTES_PER_CYCLE)
        if self.cluster > 1:
            sums = self.cta_elements * 4 * (self.cluster - 1) / self.cluster
            total += _CLUSTER_CYCLES + sums / _CLUSTER_BYTES_PER_CYCLE
        if direct:
            return total
        reduced = ctas * self.cta_elements * 4 / gpu.multiprocessors / _BYTES_PER_CYCLE
        return total + reduced + 4000


def _interleaved(columns: int, ctas: int, most: float) -> int:
    """Most CTAs that get equally many columns, and no more than ``most``; else 0."""
    first = max(1, math.ceil(columns / most))
    return next((n for n in range(min(ctas, columns), first - 1, -1) if columns % n == 0), 0)


def _share_bits(splits: int) -> int:
    """The logarithm of how many threads add up the splits of the same elements, two each or so."""
    return next(n for n in range(6) if splits <= 2 << n or n == 5)


def _warps(lanes: float) -> int:
    return math.ceil(lanes / 32)


def _strides(extent: Sequence[int], order: Triple) -> tuple[int, int]:
    strides = (extent[1] * extent[2], extent[2], 1)
    return (strides[order[0]], strides[order[1]])


@functools.lru_cache(maxsize=4096)
def _shapes(
    line: int, fragments: int, size: Triple, whole: bool = False, paired: bool = False
) -> list[Triple]:
    """Tiles of positions whose slices (or `whole` columns) are a multiple of the fragments."""
    depth = 2 * line
    widths = {
        depth * n for n in (1, 2, 3, 4, 6, 8, 12, _MAX_WIDTH) if depth * n < size[2] + 4 * depth
    }
    if size[2] <= line:
        widths = {line // 2 if paired else line}
    if size[2] % depth == 0 and size[2] <= _MAX_WIDTH * depth:
        widths.add(size[2])
    found, near = set(), set()
    for t2, t1, t0 in itertools.product(widths, (1, 2, 3, 4, 6, 8, 16), (1, 2, 4)):
        slice_ = t1 * t2
        # A product never reaches over two slices, even where steps do.
        if slice_ % depth or slice_ * (t0 if whole else 1) % (fragments * depth):
            continue
        found.add((t0, t1, t2))
        if t0 < 2 * size[0] and t1 < 2 * max(size[1], 4):
            near.add((t0, t1, t2))
    # Few short rows may fill no fragment: a class has such sizes beside longer ones.
    return sorted(near or found)


def _few(shapes: list[Triple]) -> list[Triple]:
    """Small tiles of every width."""
    narrow = [shape for shape in shapes if shape[0] == 1]
    return [
        shape
        for shape in narrow or shapes
        if shape[1] == min(s[1] for s in shapes if s[2] == shape[2])
    ]


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why wgrad/kernel.cu cannot take a problem, or None."""
    if gpu.capability[0] != 9:
        return "wgmma needs compute capability 9.0"
    if problem.source_channels_last or problem.target_channels_last:
        return "both activations are contiguous"
    if problem.source_channels < 8 or problem.target_channels < 4:
        return "too few channels fill a product of wgmma"
    return None


def candidates(problem: Problem, gpu: Gpu) -> Iterator[WgmmaWgradPlan]:
    """Every sensible kernel, in no order."""
    g = problem.geometry
    ieee = problem.arithmetic is Arithmetic.IEEE
    channels = round_up(problem.source_channels, 8)
    for order, column_taps, whole_rows in itertools.product(
        ((0, 1, 2), (1, 0, 2)), (False, True), (False, True)
    ):
        # Whole rows bring positions along W that no tap uses, which 16-bit copies would only avoid
        # one by one.
        sparse = g.kernel_size[2] == 1 or math.gcd(g.stride[2], g.dilation[2]) > 1
        sparse = sparse and g.stride[2] > 1 and problem.element_bytes > 2
        if whole_rows and sparse and order[0] == 1:
            continue
        kernel = g.kernel_size[order[1]]
        stride, dilation = g.stride[order[1]], g.dilation[order[1]]
        across = div_up(kernel, stride // dilation) if stride % dilation == 0 else 1
        if column_taps and across == 1:
            continue
        # Marching along D or H only matters for which taps are columns.
        if order[0] == 1 and (not column_taps or kernel == g.kernel_size[1]):
            continue
        taps = across if column_taps else 1
        for tile_n in _channel_tiles(channels, 256 // taps):
            columns = tile_n * taps
            if columns > 256 or (columns < 32 and channels * taps > columns):
                continue
            for tile_m in _row_tiles(problem):
                tiles = 10**9
                for blocks in range(1, 8):
                    # Accumulators, two fragments in flight, row addresses.
                    each = columns + 38 if ieee else columns // 2 + 14
                    if ieee and columns <= _WARP_COLUMNS:
                        each = columns + 16
                    if blocks * each > _MAX_REGISTERS[2]:
                        break
                    plan = WgmmaWgradPlan(
                        problem,
                        order,
                        column_taps,
                        tile_n,
                        tile_m,
                        blocks,
                        _STAGES[0],
                        whole_rows,
                        4 if ieee else 2,
                        gpu=gpu,
                    )
                    # More blocks than rows need are no use.
                    if plan.row_tiles < tiles:
                        tiles = plan.row_tiles
                        if not (whole_rows and sparse):
                            yield plan
                        if whole_rows and order == (0, 1, 2):
                            yield replace(plan, runs=True)
                            if _together(plan):
                                yield replace(plan, together=True, runs=True)
                            if _by_phases(plan):
                                yield replace(plan, phases=True, runs=True)
                    # Three blocks of many columns: the gradient is read by fewer CTAs.
                    three = blocks == 1 and plan.row_blocks == 3 and not ieee
                    if three and whole_rows and each <= _MAX_REGISTERS[3]:
                        yield replace(plan, consumers=3)


def _by_phases(plan: WgmmaWgradPlan) -> bool:
    """Whether fragments of both phases of W serve all taps: few channels, and sums in registers."""
    g = plan.problem.geometry
    two = g.stride[2] == 2 and g.dilation[2] == 1 and g.padding[2] < g.kernel_size[2]
    few = plan.channel_tile_n == 8 and plan.channel_tile_m == 8 and plan.row_tiles == 1
    arithmetic = plan.half or plan.warp_products
    sums = 4 * plan.taps[0] * plan.kernel[1] * plan.shifts
    near = g.padding[2] <= 8 and g.kernel_size[2] - 1 - g.padding[2] <= 9
    return two and few and arithmetic and plan.column_taps and near and sums <= _MAX_PHASE_SUMS


def _together(plan: WgmmaWgradPlan) -> bool:
    """Whether the taps along W can be the blocks of a warp: pairs of 16-bit positions."""
    g = plan.problem.geometry
    two = g.stride[2] == 2 and g.dilation[2] == 1 and plan.taps[2] % 2 == 1
    octets = plan.taps[0] * plan.taps[1] * plan.channel_tile_m // 8
    fit = plan.channel_tile_m % 8 == 0 and octets <= plan.consumers * 8
    return plan.half and two and fit and plan.blocks == plan.taps[2]


def _channel_tiles(channels: int, most: int) -> list[int]:
    """Equal shares of the x channels, in multiples of 8."""
    shares = {round_up(div_up(channels, n), 8) for n in range(1, 9)}
    return sorted(n for n in shares if n <= most)


def _row_tiles(problem: Problem) -> list[int]:
    """Equal shares of the gradient's channels, in multiples of what an octet of rows has."""
    channels, g = problem.target_channels, problem.geometry
    unit = g.stride[2] // math.gcd(g.stride[2], g.dilation[2])
    octet = 8 // math.gcd(unit, 4) if g.kernel_size[2] > 1 else 8
    shares = {round_up(div_up(channels, n), octet) for n in (1, 2, 4, 8, 16, 32, 64)}
    shares |= {channels // n for n in (5, 10, 20) if channels % (8 * n) == 0}
    # A block of rows should be well used.
    return sorted(n for n in shares if n * math.prod(g.kernel_size) >= 128 or n >= 8)


def _fragments(plan: WgmmaWgradPlan) -> tuple[int, ...]:
    """Numbers of fragments in flight that leave enough registers."""
    # Accumulators, fragments, addresses, words of the next fragment.
    each = plan.columns // 2 + 4 * 4 + 6 + (8 if plan.half else 0 if plan.whole_rows else 4)
    return (
        (4,) if plan.ieee else (2, 4) if plan.blocks * each <= _IN_FLIGHT[plan.consumers] else (2,)
    )


def _depth(plan: WgmmaWgradPlan, size: Triple) -> int:
    """Which ring to take of those that cost the same, where one thread produces.

    The deepest of tensors that L2 holds; of others, more in flight was slower (pangu_384_5 0.272 ms
    with three stages and 0.319 with four).
    """
    axes = plan._axis(size)
    g = plan.problem.geometry
    positions = g.in_channels * math.prod(size) + g.out_channels * math.prod(g.output_size(size))
    small = 2 * positions * plan.problem.element_bytes < _L2_BYTES
    return -plan.stages if plan.fill(axes) in _SWIZZLED and small else plan.stages


def _few_sums(
    rough: list[tuple[float, WgmmaWgradPlan]], batch: int, size: Triple, gpu: Gpu
) -> list[tuple[float, WgmmaWgradPlan]]:
    """Plans of whole sums, of a CTA or of a cluster: the few cheapest of each."""
    found = []
    own = [item for item in rough if item[1].row_tiles == 1 and not item[1].runs]
    for cluster in (1, *_CLUSTERS):
        # CTAs for whole sums alone.
        of_kind = [
            item
            for item in own
            if gpu.multiprocessors < 2 * cluster * item[1].tiles <= 2 * gpu.multiprocessors
        ]
        if cluster > 1:
            plans = [
                replace(plan, cluster=cluster)
                for _, plan in of_kind
                if plan.whole_rows and not (plan.column_taps or plan.warp_products)
            ]
            of_kind = [(plan.cost(batch, size, gpu, rough=True), plan) for plan in plans]
        of_kind = [item for item in of_kind if item[0] < float("inf")]
        found += sorted(of_kind, key=lambda item: item[0])[:_OTHER_BASES]
    return found


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, WgmmaWgradPlan]]:
    """Candidates for these input extents with their costs, cheapest first."""
    if refusal(problem, gpu) is not None:
        return []
    size, _ = problem.extents(input_size)
    # Planning is part of a first call: drop what cannot win before looking at every tile.
    rough = []
    known: dict[WgmmaWgradPlan, WgmmaWgradPlan] = {}  # with the ways of their gradients
    for plan in candidates(problem, gpu):
        # Rows of whole pieces come by boxes (monai_64_32_k3 0.134 ms, one copy a channel 0.190).
        axes = plan._axis(size)
        known[plan] = plan
        if plan.runs:
            rows = replace(plan, runs=False)
            boxes = known.setdefault(rows, rows).fill(axes) in _MAPS
            if boxes and plan.fill(axes) is Fill.JOINED:
                continue
        cost = plan.cost(batch, size, gpu, rough=True)
        if plan._axis(size)[0] <= _FEW_SLICES and not plan.whole_rows:
            cost = min(cost, replace(plan, whole_columns=True).cost(batch, size, gpu, rough=True))
        rough.append((cost, plan))
    rough.sort(key=lambda item: item[0])
    by_phases = [item for item in rough if item[1].phases]
    rough = [item for item in rough if not item[1].phases]
    few_sums = _few_sums(rough, batch, size, gpu)
    # Tensor maps bring the same bytes with a hundredth of the instructions.
    mapped = [item for item in rough if item[1].fill(item[1]._axis(size)) in _MAPS]
    if mapped:
        others = [item for item in rough if item[1].fill(item[1]._axis(size)) not in _MAPS]
        mapped = mapped[:_MAX_BASES] + others[:_OTHER_BASES]
    mapped += [*few_sums, *by_phases] if mapped else []
    for bases in (mapped, [*rough[:_MAX_BASES], *by_phases]):
        found: list[tuple[float, WgmmaWgradPlan]] = []
        for _, plan in bases:
            wholes = (False, True) if plan._axis(size)[0] <= _FEW_SLICES else (False,)
            for stages, fragments, whole in itertools.product(_STAGES, _fragments(plan), wholes):
                chosen = replace(plan, stages=stages, fragments=fragments, whole_columns=whole)
                found.append((chosen.cost(batch, size, gpu), chosen))
        found.sort(key=lambda item: (item[0], _depth(item[1], size)))
        found = [item for item in found if item[0] < float("inf")]
        if found:
            break
    return found
