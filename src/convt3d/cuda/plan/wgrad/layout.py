"""Tiles of positions, and how the slabs of a step lie in shared memory."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.wgrad.call import Call, Fill
from convt3d.cuda.plan.wgrad.kernel import Kernel
from convt3d.cuda.schedule import MAP_BOX, div_up, round_up
from convt3d.geometry import Triple

_MOST_DEPTHS = 16  # of a tile along W
_VOLUME_PIECES = 8 * 128  # that producers remember


@dataclass(frozen=True)
class Plane:
    """A plane of the gradient in shared memory: pitches in positions, and its size."""

    row_pitch: int
    channel_pitch: int
    bytes: int


@dataclass(frozen=True)
class Tile:
    """What a step covers: slices, rows and positions along W; and planes of the gradient's ring."""

    positions: Triple
    planes: int
    plane: Plane
    shared_bytes: int


@dataclass(frozen=True, eq=False)
class Layout:
    """Shared memory of a call whose gradient comes in one way."""

    call: Call
    fill: Fill

    @once
    def kernel(self) -> Kernel:
        return self.call.kernel

    # ------------------------------------------------------------ tiles

    @once
    def shapes(self) -> list[Triple]:
        """Tiles of positions, of which those that the fill of x can bring."""
        k, size = self.kernel, self.call.size
        mapped = self.call.source_map
        covered = (size[0], self.call.rows[1], size[2])
        paired = mapped and self.call.paired
        shapes = _shapes(k.line, k.fragments, covered, k.whole_samples, paired)
        if mapped:
            shapes = [s for s in shapes if s[2] % k.chunk == 0 or s[2] == size[2]]
        if k.phases:
            # Whole rows, in pairs.
            shapes = [s for s in shapes if s[1] % 2 == 0 and s[2] >= size[2]]
        return shapes

    def tiles(self, *, few: bool = False) -> Iterator[Tile]:
        """Those that fit into shared memory; ``few``: small ones alone."""
        tiles = map(self.tile, _smallest(self.shapes) if few else self.shapes)
        return (tile for tile in tiles if tile is not None)

    def tile(self, positions: Triple) -> Tile | None:
        """A tile of these positions; None where it does not fit."""
        k = self.kernel
        room = k.gpu.shared_per_block
        # Of many tiles x alone has no room: their planes need not be laid out.
        if k.stages * self._source_bytes(positions) > room:
            return None
        plane = self._plane(positions)
        if plane is None:
            return None
        planes, shared = self._sizes(positions, plane, k.stages)
        return Tile(positions, planes, plane, shared) if shared <= room else None

    def holds(self, tile: Tile, stages: int) -> bool:
        """Whether a tile fits with another number of stages."""
        _, shared = self._sizes(tile.positions, tile.plane, stages)
        return shared <= self.kernel.gpu.shared_per_block

    def _sizes(self, positions: Triple, plane: Plane, stages: int) -> tuple[int, int]:
        """Planes of the gradient's ring, and shared memory."""
        span, fresh = self.kernel.planes_of(positions[0])
        # Planes of a new column follow those of the one before; of joined rows producers wait.
        columns = 1 + div_up(stages - 1, div_up(self.call.size[0], positions[0]))
        if self.fill is Fill.JOINED:
            columns = 1
        planes = stages * fresh + columns * (span - fresh)
        if self.fill is Fill.VOLUME:
            planes = stages * span
        shared = stages * self._source_bytes(positions) + planes * plane.bytes
        shared += 8 * (3 * stages + 1)  # barriers
        shared += (0 if self.call.source_map else 128) + (1024 if self.fill.swizzled else 0)
        return planes, shared

    def _source_bytes(self, positions: Triple) -> int:
        """Of a step's x."""
        k, (t0, t1, t2) = self.kernel, positions
        rows = t1 + k.taps_across - 1
        if not self.call.source_map:
            parts = 2 if k.ieee else 1
            return parts * t0 * (t2 // k.line) * (rows * k.channel_tile_n * 16 + 16)
        flat = self.call.flat(positions)
        if flat and t1 == self.call.size[1]:
            chunks = div_up(t0 * t1 * t2, k.chunk)
        else:
            chunks = t0 * div_up(t1 * t2 if flat else t2, k.chunk)
        return chunks * (1 if flat else rows) * k.channel_tile_n * 128

    # ------------------------------------------------------------ planes of the gradient

    def _plane(self, positions: Triple) -> Plane | None:
        """A step's plane; None where the gradient cannot come so."""
        if self.fill.mapped:
            return self._plane_of_boxes(positions)
        if self.fill is Fill.VOLUME:
            return self._plane_of_a_volume(positions)
        if self.fill is Fill.JOINED:
            return self._plane_of_joined_rows(positions)
        return self._plane_of_rows(positions)

    def _plane_of_boxes(self, positions: Triple) -> Plane | None:
        k, call = self.kernel, self.call
        _, t1, t2 = positions
        rows, width, channels = k.rows_of(t1), k.width_of(t2), k.channel_tile_m
        if self.fill is Fill.LINES:
            box, extent = k.chunk, t1 * t2 // k.depth
            plane = Plane(call.output[2], box, extent * channels * 128)
            fits = t2 == call.size[2]
        elif self.fill is Fill.SWIZZLED:
            box, extent, along = k.chunk, rows, t2 * k.units[2]
            bytes_ = along // box * rows * channels * 128
            plane = Plane(channels * box, box, round_up(bytes_, 1024))
            fits = along % box == 0 and rows * channels % 8 == 0
        elif self.fill is Fill.ROWS:
            box, extent = self._channel_pitch(width + self._lead, self._residue()), rows
            plane = Plane(channels * box, box, self._bytes(rows * channels * box, 128))
            fits = True
        else:
            run = (rows - 1) * call.row_stride + width + self._most_lead(positions)
            box, extent = self._channel_pitch(run, self._residue()), 1
            plane = Plane(call.row_stride, box, self._bytes(channels * box, 128))
            # Where borders are zeros, one row's border must not be the next one's middle.
            fits = not call.padded or width <= call.row_stride
        return plane if fits and max(box, extent) <= MAP_BOX else None

    def _plane_of_joined_rows(self, positions: Triple) -> Plane | None:
        k, call = self.kernel, self.call
        _, t1, t2 = positions
        any_end = k.warp_products or k.phases
        if not (t2 >= call.size[2] if any_end else t2 == call.size[2]) or t2 == k.line:
            return None
        pitch = call.row_stride
        longest = max(k.width_of(t2), k.padding[2] + call.output[2])
        run = round_up((k.rows_of(t1) - 1) * pitch + longest + k.line - 1, k.line)
        # The last channel needs no more than its rows.
        return self._by_channel(pitch, run, self._residue(pitch, t2), last=run)

    def _plane_of_a_volume(self, positions: Triple) -> Plane | None:
        k, call = self.kernel, self.call
        _, t1, t2 = positions
        covered = (call.size[0], call.rows[1], call.size[2])
        whole = all(t >= n for t, n in zip(positions, covered, strict=True))
        out = call.output[2]
        if not whole or out % k.line or self.volume_pieces > _VOLUME_PIECES:
            return None
        rows, width = k.rows_of(t1), k.width_of(t2)
        # What reaches beyond a row finds the zeros before the next.
        border = k.padding[2]
        least = max(round_up(border, k.line) + out, width - border)
        pitch = round_up(min(width + self._lead, least), k.line)
        run = max(rows * pitch, (rows - 1) * pitch + self._lead + width)
        return self._by_channel(pitch, run, self._residue(pitch, t2))

    def _plane_of_rows(self, positions: Triple) -> Plane:
        k = self.kernel
        _, t1, t2 = positions
        width, more = k.width_of(t2), 0
        if self.fill.row_runs:
            # Rows begin at the tensor's address modulo 16 bytes.
            shortest, more = width + 2 * (k.line - 1), k.line
            pitch = shortest + (self.call.row_stride - shortest) % k.line
        elif k.steps[2] == 1 and self.call.output[2] % k.line == 0:
            pitch = round_up(width + self._lead, k.line)
        elif k.half:
            pitch = round_up(width + k.padding[2] % 2, 2)
        else:
            # Odd pitches let neighbouring taps of different rows share an octet.
            pitch = width | 1 if k.octet_taps > 1 else width
        run = k.rows_of(t1) * pitch + more
        return self._by_channel(pitch, run, self._residue(pitch, t2))

    def _by_channel(self, row_pitch: int, run: int, residue: int, last: int = 0) -> Plane:
        """A run of positions for each channel, the last of which may be shorter."""
        channel = self._channel_pitch(run, residue)
        elements = (self.kernel.channel_tile_m - 1) * channel + (last or channel)
        return Plane(row_pitch, channel, self._bytes(elements))

    def _bytes(self, elements: int, alignment: int = 16) -> int:
        return round_up(elements * self.kernel.problem.element_bytes, alignment)

    @property
    def _lead(self) -> int:
        """Positions of the first 16 bytes before those that taps reach."""
        return -self.kernel.padding[2] % self.kernel.line

    def _most_lead(self, positions: Triple) -> int:
        """Most positions that a box of whole lines begins early, which rounds down to 16 bytes."""
        k = self.kernel
        (p0, p1, p2), (_, s1, s2) = k.padding, k.stride
        _, rows, row = self.call.output
        plane = rows * row
        first = (self.call.rows[0] * s1 - p1) * row - p0 * plane - p2
        step = math.gcd(k.line, plane, positions[1] * s1 * row, positions[2] * s2)
        return first % step + k.line - step

    # ------------------------------------------------------------ channels, and their banks

    def _residue(self, row_pitch: int | None = None, width: int = 0) -> int:
        """Words from one channel to the next: lanes of a fragment find theirs in different banks.

        Args:
            row_pitch: given where rows of so many positions may share a fragment.
            width: positions of the tile along W.
        """
        k = self.kernel
        residue = 4 * k.units[2] % 32 or 4
        if k.phases:
            # A lane's eight words, or halves, lie together, of runs that begin apart.
            residue = 16 if k.half else 4
        if row_pitch is not None and 2 * width == k.line:
            banks = k.units[1] * row_pitch * k.problem.element_bytes // 4 % 32
            residue //= 2 if banks == 16 else 1  # lanes are of two rows, half of the banks apart
        return residue

    def _channel_pitch(self, positions: int, residue: int) -> int:
        """Positions from one channel to the next, of so many at least."""
        bytes_ = self.kernel.problem.element_bytes
        step = residue & -residue  # any odd multiple of it does
        words = div_up(positions * bytes_, 4)
        words += (step - words) % (2 * step)
        return words * 4 // bytes_

    @property
    def channel_step(self) -> int:
        """From one channel of a tile to the next: where runs begin hangs on the channel."""
        channels = self.kernel.problem.target_channels
        tiles = div_up(channels, self.kernel.channel_tile_m)
        return tiles if self.fill.as_it_lies and channels % tiles == 0 else 1

    @property
    def octet_step(self) -> int:
        """From one channel of an octet to the next, of which runs should begin alike."""
        octets = self.kernel.channel_octets
        if self.fill.swizzled:
            return 2 if octets % 2 == 0 and self.kernel.units[2] == 2 else 1
        return octets if self.fill.as_it_lies else 1

    @property
    def volume_pieces(self) -> int:
        """Pieces of 16 bytes of a sample's channel tile."""
        return math.prod(self.call.output) * self.kernel.channel_tile_m // self.kernel.line

    # ------------------------------------------------------------ what else consumers find

    @property
    def clears(self) -> bool:
        """Whether producers write the border's zeros into boxes of whole lines."""
        return self.call.padded and self.fill is Fill.FLAT

    @once
    def sums_bias(self) -> bool:
        """Whether the gradient by bias comes with that by weight, where it is wanted.

        Consumers add up their fragments: those of `stride` neighbouring taps of each axis hold
        every position of the gradient once.
        """
        k = self.kernel
        axes = zip(
            *(k.padding, k.stride, k.kernel_size, k.dilation, self.call.output, self.call.size),
            strict=True,
        )
        shared_out = all(
            p + s <= taps and d == 1 and out <= s * n for p, s, taps, d, out, n in axes
        )
        # Of boxes of whole lines and joined rows, what lies beyond a row is the next.
        exact = self.fill in (Fill.ROWS, Fill.COPIES) or self.fill.swizzled
        plain = exact and not k.column_taps and not k.warp_products
        return k.problem.bias and shared_out and plain


def best_layout(call: Call) -> Layout | None:
    """The best way for the gradient to come that has a tile, if there is one."""
    layouts = (Layout(call, fill) for fill in call.fills())
    return next((one for one in layouts if any(one.tiles())), None)


@functools.lru_cache(maxsize=4096)
def _shapes(line: int, fragments: int, size: Triple, whole: bool, paired: bool) -> list[Triple]:
    """Tiles of positions whose slices (or `whole` columns) are a multiple of the fragments."""
    depth = 2 * line
    widths = {
        depth * n for n in (1, 2, 3, 4, 6, 8, 12, _MOST_DEPTHS) if depth * n < size[2] + 4 * depth
    }
    if size[2] <= line:
        widths = {line // 2 if paired else line}
    if size[2] % depth == 0 and size[2] <= _MOST_DEPTHS * depth:
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
    # Few short rows fill no fragment: tiles then reach beyond them.
    return sorted(near or found)


def _smallest(shapes: list[Triple]) -> list[Triple]:
    """Small tiles of every width."""
    narrow = [shape for shape in shapes if shape[0] == 1] or shapes
    rows: dict[int, int] = {}
    for _, t1, t2 in shapes:
        rows[t2] = min(t1, rows.get(t2, t1))
    return [shape for shape in narrow if shape[1] == rows[shape[2]]]
