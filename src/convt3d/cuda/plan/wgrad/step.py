"""Cycles of a step of ``wgrad/kernel.cu``: what consumers, producers and memory take for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from convt3d.cuda.plan.wgrad.call import Fill
from convt3d.cuda.plan.wgrad.layout import Layout, Tile
from convt3d.cuda.schedule import div_up

# Of a tensor core for 64 rows by 2 columns; by mma.sync for 64 rows by 8 columns in three parts,
# and for 16 by 8 in one.
_PRODUCT, _WARP_PRODUCT, _PHASES_PRODUCT = 1.06, 3 * 4 * 1.41, 1.46
_FRAGMENT = 16.0  # of shared memory, for a row fragment
_ISSUE, _ISSUE_HALF = 30.0, 24.0  # of instructions that prepare one
_BARRIERS, _SLICE = 300.0, 600.0  # of a step, and of each slice that begins anew
_DRAIN, _PHASES_DRAIN = 1100.0, 2000.0  # of products, before a step's slabs are released
# Of one of four warps: of a copy instruction by the bytes of a lane, of rounding what one brought,
# of a piece of a row, of one whose place is known, and of a bulk copy.
_COPY = {2: 400.0, 4: 105.0, 16: 180.0}
_COPY_OF_X, _ROUND, _PIECES, _PIECE, _RUN = 105.0, 60.0, 300.0, 40.0, 320.0
# Of a bulk copy of several KB, and its bytes a cycle; of 128 bytes or a row of a box, and the bytes
# a cycle of boxes without swizzle.
_JOINED, _BULK_BYTES = 80.0, 19.0
_BOX_ROW, _BOX_BYTES = 3.0, 18.0
_L2_BYTES = 24.0  # a cycle
_LATENCY = 2000.0


@dataclass(frozen=True)
class Consuming:
    """Cycles of tensor cores, shared memory and the issue of instructions, for a step."""

    matrix: float
    shared: float
    issue: float

    @property
    def longest(self) -> float:
        return max(self.matrix, self.shared, self.issue)

    @property
    def extra(self) -> float:
        """What products and shared memory lose to each other."""
        return 0.15 * min(self.matrix, self.shared)


def step_cycles(layout: Layout, tile: Tile) -> Callable[[float], float]:
    """Cycles of a step that multiplies so many blocks of rows."""
    k, fill = layout.kernel, layout.fill
    planes = _planes(layout, tile)
    copies, moving = _copies(layout, tile, planes), _moving(layout, tile, planes)
    late = k.stages == 2 and fill is not Fill.JOINED
    # With two stages the producers wait for the copies that they just issued.
    producing = max(copies / 4, moving) + (_LATENCY if late else 0)
    begun = _BARRIERS + (1 if fill is Fill.VOLUME else tile.positions[0]) * _SLICE
    # Products in flight cover what a step and a slice begin with. Two suffice where fragments are
    # prepared from words that were fetched before.
    if not fill.mapped:
        begun *= 0.57 if k.fragments > 2 else 0.55
    else:
        begun *= 0.5 if k.fragments > 2 else 0.7 if k.half else 1

    def of_blocks(blocks: float) -> float:
        consuming = _phases(layout, tile) if k.phases else _products(layout, tile, blocks)
        if fill is Fill.JOINED:
            # Steps begin anew, while the producer asks for the next.
            alone = consuming.longest + consuming.extra + begun
            waiting = (alone + producing + _LATENCY) / 2 if k.stages == 2 else 0
            drain = _PHASES_DRAIN if k.phases else _DRAIN - 30 * k.fragments
            return max(alone, producing, waiting) + drain
        step = max(consuming.longest, producing) + (consuming.extra + begun)
        return step + 0.25 * copies / 4  # what producers issue, consumers cannot

    return of_blocks


def _products(layout: Layout, tile: Tile, blocks: float) -> Consuming:
    k = layout.kernel
    products = math.prod(tile.positions) // k.depth
    odd = k.octet_taps > 1 and k.taps[2] % 2 and tile.plane.row_pitch % 2 == 0
    conflicts = 1.33 if odd else 1
    fragments = (2 if k.half else 1) * _FRAGMENT
    if k.warp_products:
        tiles = k.columns // 8
        columns = 11 if layout.call.source_map else 5
        return Consuming(
            products * blocks * tiles * _WARP_PRODUCT,
            products * (blocks * fragments * conflicts + 8 * 4 * tiles),
            products * (blocks * (14 + 9 * tiles) + 2 * (10 + columns * tiles)) * 1.3,
        )
    matrix = products * blocks * max(k.columns, 16) / 2 * _PRODUCT
    return Consuming(
        3.3 * matrix + products * 80 if k.ieee else matrix,
        products * blocks * (fragments * conflicts + k.columns / 4),
        # A scheduler has a warp of each consumer.
        products * blocks * (_ISSUE_HALF if k.half else _ISSUE) * (1.5 if k.ieee else 1),
    )


def _phases(layout: Layout, tile: Tile) -> Consuming:
    """Of sixteen positions of two rows: fragments of both tensors, products, sums."""
    k, (t0, t1, t2) = layout.kernel, tile.positions
    items = t0 * t1 / 2 * div_up(t2, 16)
    sums = k.taps[0] * k.kernel_size[1] * k.shifts
    rows = k.taps[0] * k.taps[1] * 2
    gradient_words = rows * (12 if k.half else 36)
    x_words = (k.taps_across + 1) * (12 if k.half else 26)
    parts = 2 if k.half else 12
    return Consuming(
        items * sums * parts * _PHASES_PRODUCT,
        items * k.taps[0] * k.taps[1] * 2 * (5 if k.half else 8),
        items * (gradient_words + x_words + sums * (parts + 4) + 60) / 4 * 1.3,
    )


def _source(layout: Layout, tile: Tile) -> int:
    """Elements of x that a step brings."""
    t0, t1, t2 = tile.positions
    return t0 * (t1 + layout.kernel.taps_across - 1) * t2 * layout.kernel.channel_tile_n


def _planes(layout: Layout, tile: Tile) -> float:
    """Planes of the gradient that a step brings, in the mean over a column of steps."""
    span, fresh = layout.kernel.planes_of(tile.positions[0])
    return fresh + (span - fresh) / div_up(layout.call.size[0], tile.positions[0])


def _gradient(layout: Layout, tile: Tile, planes: float) -> float:
    """Elements of the gradient that a step brings."""
    k, fill, plane = layout.kernel, layout.fill, tile.plane
    rows = k.rows_of(tile.positions[1])
    if fill is Fill.FLAT:
        return planes * plane.channel_pitch * k.channel_tile_m
    if fill.swizzled:
        return planes * rows * tile.positions[2] * k.units[2] * k.channel_tile_m
    if fill is Fill.ROWS:
        # Boxes fetch nothing beyond the tensor.
        _, most, width = layout.call.output
        return planes * (min(rows, most) * min(plane.channel_pitch, width)) * k.channel_tile_m
    return planes * rows * plane.row_pitch * k.channel_tile_m


def _copies(layout: Layout, tile: Tile, planes: float) -> float:
    """Cycles of producers that copy: lanes take pieces of a slab's rows, then walk the channels."""
    k, fill, call = layout.kernel, layout.fill, layout.call
    bytes_ = k.problem.element_bytes
    rows = k.rows_of(tile.positions[1])
    copies = 0.0
    if not call.source_map:
        wide = 16 if call.size[2] % k.line == 0 else 4
        positions = _source(layout, tile) // k.channel_tile_n
        copies = _warps(positions * bytes_ / wide) * k.channel_tile_n
        copies *= _COPY_OF_X + (0 if k.half else _ROUND)
    if fill is Fill.RUNS:
        copies += planes * rows * k.channel_tile_m * _RUN
    elif fill is Fill.PIECES:
        pieces = rows * ((tile.plane.row_pitch - 1) // k.line)
        copies += planes * _warps(pieces) * k.channel_tile_m * _PIECES
    elif fill is Fill.VOLUME:
        copies += _warps(layout.volume_pieces) * _PIECE
    elif fill is Fill.COPIES:
        wide = 16 if call.output[2] % k.line == 0 and k.steps[2] == 1 else 4
        if k.half and call.output[2] % 2:
            wide = 2
        pieces = rows * div_up(tile.plane.row_pitch * bytes_, wide)
        copies += planes * _warps(pieces) * k.channel_tile_m * _COPY[wide]
    return copies


def _warps(lanes: float) -> int:
    return math.ceil(lanes / 32)


def _moving(layout: Layout, tile: Tile, planes: float) -> float:
    """Cycles that L2, or TMA, takes to bring a step."""
    k, fill, call = layout.kernel, layout.fill, layout.call
    bytes_, (t0, t1, t2) = k.problem.element_bytes, tile.positions
    x, gradient, rows = _source(layout, tile), _gradient(layout, tile, planes), k.rows_of(t1)
    # Runs of contiguous positions begin and end within sectors.
    rows_x = t1 + k.taps_across - 1
    whole = t2 >= call.size[2]
    runs = t0 * (1 if whole else rows_x)
    if whole and rows_x >= call.size[1]:
        runs = 1
    moved = (x + gradient * k.steps[2]) * bytes_ + 32 * runs * k.channel_tile_n
    moved += 48 * planes * (1 if whole else rows) * k.channel_tile_m
    boxes = 0.0
    if call.source_map:
        boxes += x * bytes_ / 128 * _BOX_ROW
    if fill.swizzled:
        boxes += gradient * bytes_ / 128 * _BOX_ROW
    elif fill.mapped:
        boxes += gradient * bytes_ / _BOX_BYTES
        boxes += planes * (rows if fill is Fill.ROWS else 1) * k.channel_tile_m * _BOX_ROW
    elif fill is Fill.JOINED:
        lines = planes * k.channel_tile_m * (rows * t2 * k.units[2] * k.steps[1]) * bytes_
        boxes += max(lines / _BULK_BYTES, planes * k.channel_tile_m * _JOINED)
    return max(moved / _L2_BYTES, boxes)
