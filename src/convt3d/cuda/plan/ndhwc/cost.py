"""Estimated cycles of a call of an ndhwc kernel.

Fitted to 40 plans of strided layers, timed on an H200. What runs at once and what stride 1 costs
are read from 1,346 plans of 379 problems there; what a cluster costs besides is an estimate.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

from convt3d.cuda.plan.axes import source_extents
from convt3d.cuda.plan.launches import copy_cycles
from convt3d.cuda.plan.ndhwc.layout import MOST_ROUNDS, NdhwcLayout
from convt3d.cuda.plan.rates import MEMORY_BYTES
from convt3d.cuda.plan.split_k import clusters_at_once
from convt3d.cuda.plan.unit_tiles import UnitShape
from convt3d.cuda.schedule import div_up

# Cycles of one work tile: of a product, for all warpgroups; of a stage, and more where few weights
# are in flight; of a byte of outputs, also of units that do not exist; of a row of a box, and of
# TMA for one.
_PRODUCT, _STAGE, _WEIGHT_WAIT, _OUTPUT_BYTE, _WORK_TILE = 0.82, 138.0, 219.0, 0.034, 1100.0
_SINGLE_STORE = 0.25  # of a byte of a contiguous target that is not stored as 16 bytes
_BOX_ROW, _TMA_ROW = 0.11, 3.9
_LINES_ROW, _COPIED_BYTE = 5.5, 0.01  # rows and weights where samples are inside of lines
_PIECE = 16.0  # bytes that a piece of outputs costs besides
_ORDER = 0.02
_LAUNCHES, _PACKING = 11200.0, 3300.0
_RESIDENT_BYTE = 1 / 60
_TWO_STAGES = 1.2  # what two source stages, or two weight stages, cost more than counted
# Of a cluster, to meet twice; of a byte of sums that a CTA reads.
_CLUSTER, _SUM_BYTE = 2000.0, 1 / 24
_UNSTRIDED = 1.2  # what layers of stride 1 cost more than counted, beside sweeps that can run them
# What plans on copies take of what is counted, beside kernels of contiguous tensors: gradients, and
# forward passes of strided layers, over 1,002 problems. Others take what is counted.
_GRADIENTS_ON_COPIES, _STRIDED_ON_COPIES = 1.2, 1.3
# Fetching the instructions of an unrolled product: once a call, of products beyond the first so
# many; and at each pass, where there are more than the instruction cache holds. From 107 plans of
# strided forward passes.
_FETCH, _FETCHED_FREE = 250.0, 54
_REFETCH, _CACHED = 130.0, 180
# Where no axis is phased, unrolled products keep an address in registers for every position they
# read. With 108 of them, 8 of 10 plans took 1.4 to 3 times as long as counted: those that were
# compiled spill 980 bytes a thread or more.
_SPILLED = 2.0
_MOST_SORTED = 1024  # work tiles that are scheduled longest first, at most


def _product_cycles(columns: int) -> float:
    """Of the tensor cores, or of shared memory, which both operands come from."""
    return max(columns / 2, 16 + columns / 4)


def call_cycles(
    plan: NdhwcLayout, batch: int, target: Sequence[int]
) -> Callable[[UnitShape], float]:
    """Estimated cycles of one call, by the shape of the tile."""
    p, t, g = plan.problem, plan.tile, plan.problem.geometry
    # A CTA whose weights stay keeps its phase: those with most taps end last.
    stages = plan.chunks * (plan.most_stages if t.resident_weights else plan.stages / plan.phases)
    share = div_up(plan.shares, t.cluster) / plan.shares  # of the products, of the busiest CTA
    stages *= share
    # Blocks beyond the tile's units are multiplied too.
    used = t.blocks * t.consumers
    products = stages * plan.taps * plan.steps * used * _product_cycles(t.column_tile)
    if plan.by_warps:
        products = 0.0  # of warps, hidden under what they wait for
    outputs = 64.0 * used * math.prod(plan.slots) * plan.stored_columns * p.element_bytes
    alone = not p.target_channels_last and not _stored_whole(plan, target)
    single_stores = outputs * _SINGLE_STORE if alone else 0.0
    # Pieces that do not follow one another are merged in L2, at a price.
    piece = t.column_tile * p.element_bytes
    joined = t.column_tile >= g.out_channels and plan.slots[2] == g.stride[2]
    multiplied = products * _PRODUCT + stages * _STAGE
    unrolled = 0 if plan.by_warps else plan.unrolled
    if unrolled > _CACHED:
        multiplied += stages * plan.taps * plan.steps * _REFETCH
    waited = 0.0 if t.resident_weights else stages / max(1, t.weight_stages - 1) * _WEIGHT_WAIT
    position_rows = share * plan.chunks * plan.boxes
    work_tiles, filled = plan.n_tile_phases, 0.0
    if t.fills:
        # What is left are work tiles with taps, which are as long as the longest on average.
        work_tiles = plan.phases - plan.empty_phases
        filled = multiplied * (plan.phases / work_tiles - 1)
    clusters, met = 0, 0.0
    if t.cluster > 1:
        clusters = clusters_at_once(t.cluster, plan.gpu.multiprocessors)
        met = _CLUSTER + plan.sum_bytes * _SUM_BYTE
    # Outputs are as large as the source of the gradient.
    moved = batch * math.prod(target) * g.out_channels * p.element_bytes
    moved *= 1 if p.forward else math.prod(g.stride)
    floor = 1.1 * moved / MEMORY_BYTES / plan.gpu.multiprocessors
    once = _LAUNCHES + (0 if t.direct else _PACKING)
    once += _FETCH * max(0, unrolled - _FETCHED_FREE)
    if t.resident_weights:
        once += t.weight_stages * plan.stage_bytes * _RESIDENT_BYTE
    pipeline = _TWO_STAGES if t.source_stages == 2 else 1.0
    if t.weight_stages == 2 and not t.resident_weights:
        pipeline *= _TWO_STAGES
    if t.phased == 0 and unrolled > _FETCHED_FREE:
        pipeline *= _SPILLED
    unstrided = _UNSTRIDED if max(g.stride) == 1 else 1.0
    copies, copied = 1.0, 0.0
    if not p.source_channels_last:
        source = source_extents(g, target) if p.forward else g.output_size(target)
        bytes_ = batch * math.prod(source) * plan.source_channels * p.element_bytes
        if max(g.kernel_size) == 1:
            unstrided = 1.0  # what runs else, on odd volumes, is no sweep
        else:
            strided = _STRIDED_ON_COPIES if max(g.stride) > 1 else 1.0
            copies = strided if p.forward else _GRADIENTS_ON_COPIES
        copied = copy_cycles(bytes_, plan.gpu)

    def of_shape(shape: UnitShape) -> float:
        together = piece * (plan.slots[2] * shape.units[3] if joined else 1)
        always = outputs * (1 + _PIECE / together) * _OUTPUT_BYTE + _WORK_TILE + single_stores
        rows = position_rows * math.prod(shape.box)
        item = max(multiplied + rows * _BOX_ROW + always + waited, rows * _TMA_ROW) + filled
        at_once = clusters or plan.grid(shape)  # work tiles that the GPU has at hand at a time
        whole = div_up(shape.count * work_tiles, at_once) * item + met
        if t.samples_inside:
            whole = _longest_first(plan, shape, target, products, always)
        whole = whole * pipeline * unstrided
        # Of several at memory's rate, the one with least to do besides.
        return copies * (max(whole, floor + _ORDER * whole) + once + copied)

    return of_shape


def least_cycles(plan: NdhwcLayout, batch: int, target: Sequence[int]) -> float:
    """Cycles that no tile, and no pipeline that is less deep, undercuts."""
    rows = plan.tile.rows
    tiles = div_up(batch * math.prod(plan.units(target)), rows)
    # As few tiles as can be, whose boxes bring nothing, with all outputs in one line.
    return call_cycles(plan, batch, target)(
        UnitShape((1, 1, 1, rows), (tiles, 1, 1, 1), (0, 0, 0, 0))
    )


def _stored_whole(plan: NdhwcLayout, target: Sequence[int]) -> bool:
    """Whether outputs of a contiguous target leave as 16 bytes: lines are aligned and whole."""
    stride = plan.problem.geometry.stride[2] if plan.problem.forward else 1
    return target[2] % plan.vector == 0 and plan.slots[2] == stride


def _longest_first(
    plan: NdhwcLayout, shape: UnitShape, target: Sequence[int], products: float, always: float
) -> float:
    """Cycles of the CTA that takes longest, of work tiles that leave out taps of padding.

    ``products``: tensor-core cycles of a work tile with all taps of its phase, on average;
    ``always``: of a work tile, whatever its taps.
    """
    t, source = plan.tile, source_extents(plan.problem.geometry, target)
    wait = _WEIGHT_WAIT / max(1, t.weight_stages - 1)
    along = [_shares(plan, shape, a, source[a]) for a in range(3)]
    alike = shape.tiles[0] * plan.groups * plan.column_tiles
    box = math.prod(shape.box) * _LINES_ROW
    counted = []
    for axes in itertools.product(*(axis.items() for axis in along)):
        share = math.prod(kind[0] for kind, _ in axes)
        stages = plan.chunks * math.prod(kind[1] for kind, _ in axes)
        busy = products * _PRODUCT * share + stages * (_STAGE + wait)
        # Boxes and weights come one after another.
        brought = plan.chunks * math.prod(kind[2] for kind, _ in axes) * box
        brought += stages * (plan.stage_bytes * _COPIED_BYTE + wait)
        counted.append((max(busy, brought) + always, alike * math.prod(n for _, n in axes)))
    grid = plan.grid(shape)
    if shape.count * plan.n_tile_phases > min(_MOST_SORTED, MOST_ROUNDS * grid):
        return sum(length * count for length, count in counted) / grid * 1.05
    lengths = sorted((length for length, count in counted for _ in range(count)), reverse=True)
    totals = [0.0] * grid
    for begin in range(0, len(lengths), grid):
        # Rounds go up and down in turn.
        places = range(grid) if begin // grid % 2 == 0 else range(grid - 1, -1, -1)
        for place, length in zip(places, lengths[begin : begin + grid], strict=False):
            totals[place] += length
    return max(totals)


def _shares(
    plan: NdhwcLayout, shape: UnitShape, a: int, source: int
) -> Counter[tuple[float, int, int]]:
    """Of each tile and phase along an axis: products as a share of the mean, taps, and boxes."""
    axis, units, tiles = plan.axes[a], shape.units[1 + a], shape.tiles[1 + a]
    apart = a >= 3 - plan.tile.split
    if a >= plan.tile.phased:
        return Counter({(1.0, axis.kernel, len(axis.live_shifts) if apart else 1): tiles})
    found: Counter[tuple[float, int, int]] = Counter()
    for first, shifts in itertools.product(range(0, tiles * units, units), axis.slot_shifts):
        met = [sum(0 <= first + u + shift < source for u in range(units)) for shift in shifts]
        walked = sum(n > 0 for n in met)
        # Blocks share a line, not a position along W.
        share = sum(met) / units if a < 2 else float(walked)
        found[share / axis.mean_taps, walked, walked if apart else 1] += 1
    return found
