"""Estimated cycles of a call of a phases kernel.

The model adds up the cycles of a warpgroup for the stages, loads, outputs and copies of one work
tile, which mostly follow one another. Its constants are cycles, fitted to 97 plans timed on an
H200, then to their order; those of IEEE-grade products to 300 plans of four layers.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from convt3d.cuda.plan.axes import met_share
from convt3d.cuda.plan.phases.layout import PhasesLayout
from convt3d.cuda.plan.phases.tile import PhasesShape, Staging
from convt3d.cuda.plan.rates import MEMORY_BYTES
from convt3d.cuda.plan.warpgroups import overlapped
from convt3d.cuda.schedule import div_up

_CALL, _PACKED_BYTE = 5000.0, {1: 0.0015, 2: 0.0007}  # of a call, by words of a value
_FEW_ROUNDS = 2  # of a CTA: it has work tiles of some phases only
# Of a work tile of products that are single words.
_STAGE = 63.0
_WEIGHT_WAIT = 480.0  # for the weights of a stage, all the less the more are in flight
_LOAD = {False: 11.7, True: 4.8}  # a warp's, for every cycle of shared memory; a step ahead or not
_PRODUCT = 0.58  # of what the products of all warpgroups keep the tensor cores busy
_WORK_TILE = 480.0
_WEIGHT_BYTE = 0.02
_KEPT_PHASE = 1.3  # of work tiles whose CTA keeps weights and phase
_KEPT_WORDS = 1.45  # of those whose CTA keeps weights of float32 and whose warps store
_SHORT_STAGES = 1.07  # stages of float32 with taps of W alone, where warps store
_BOX_WAIT = 675.0  # for a box, all the less the more are on their way
_BOX_ROW = 5.5  # of TMA, whatever the row's length
# The same of IEEE-grade products: a load, a set of products (and where it is added at once).
_SPLIT_STAGE, _SPLIT_LOAD, _SPLIT_SET = 307.0, 8.2, 65.0
_SPLIT_PRODUCT, _SPLIT_WORK_TILE, _SPLIT_WEIGHT_WAIT, _SPLIT_BOX_WAIT = 0.91, 1030.0, 125.0, 270.0
_SPLIT_LEAVING = 2.05  # where each warp stores its own
# Three warpgroups share four schedulers; one has them, and the tensor cores, to itself.
_SPLIT_THREE, _SPLIT_ALONE = {False: 1.2, True: 1.55}, 0.73
_SPLIT_BOX_ROW = 8.1
# What leaves: an output of a thread where each warp stores its own, by 16 bytes or alone; one
# without taps; a row of a tile, slot and column that ends within sectors, by all warpgroups.
_WARP_OUTPUT, _CONSTANT_OUTPUT = {True: 10.0, False: 12.0}, {True: 2.5, False: 6.0}
_PIECE = 6.0
_LONE_STORE = 10.0  # of a multiprocessor for 32 outputs of a line that leave alone
# An output of a thread that store warps send, a round of theirs for a warpgroup; and of one of
# these warps: a round, each run of it, its bytes; a run without taps, its bytes.
_SENT_OUTPUT, _STAGED_ROUND = 8.0, 250.0
_ROUND, _SENT_RUN, _SENT_BYTE, _FILLED_RUN, _FILLED_BYTE = 600.0, 95.0, 0.05, 80.0, 0.055
# Work tiles whose outputs store warps send, and of 16 bits with one block, with boxes of one tap.
_SENT, _SENT_BLOCK, _SENT_TAP = 1.16, 1.4, 1.04


def product_cycles(columns: int) -> float:
    """Cycles of the tensor cores for one m64 product of eight words, units in registers."""
    return max(columns / 2 + 1.5, 20.0)


def call_cycles(plan: PhasesLayout, shape: PhasesShape, batch: int, target: Sequence[int]) -> float:
    """Estimated cycles of one call with a tile of this shape."""
    p, t = plan.problem, plan.tile
    # A CTA whose weights stay keeps its phase: those with most taps end last.
    walked = float(plan.most_walked)
    if not t.resident_weights:
        walked = stages_of_chunk(plan, shape, target)
    work_tile = _split_work_tile if plan.split else _work_tile
    rounds = div_up(shape.count * plan.product_work_tiles, plan.grid(shape))
    moved = batch * math.prod(target) * p.geometry.out_channels * p.element_bytes
    floor = moved / MEMORY_BYTES / plan.gpu.multiprocessors
    whole = max(rounds * work_tile(plan, shape, target, walked), floor)
    if t.store_warps:
        # No products run beside the store warps when these send a CTA's last work tile.
        whole += _sending(plan, shape, target)
    if t.stores_per_warp and not plan.wide(shape, target):
        # Pieces of 16 units, and what lies in another line, share sectors of L2.
        pieces = moved / p.element_bytes / 32 * (1 + 16 / shape.units[3])
        alone = pieces * _LONE_STORE / plan.gpu.multiprocessors
        # Slices of other phases share sectors too, and leave at another time.
        alone *= 1.1 if t.phased else 1.0
        whole = overlapped(whole, alone)
    short = t.stores_per_warp and t.phased == 2
    if short and p.element_bytes == 4 and not plan.split:
        whole *= _SHORT_STAGES
    return whole + plan.packed_bytes * _PACKED_BYTE[p.words_per_value] + _CALL


def _work_tile(
    plan: PhasesLayout, shape: PhasesShape, target: Sequence[int], walked: float
) -> float:
    """Estimated cycles of a work tile with so many stages of a chunk."""
    p, t = plan.problem, plan.tile
    stages = plan.chunks * walked
    loads = stages * plan.steps * t.blocks * 4 * (4 // p.element_bytes)
    products = stages * plan.taps * t.blocks * t.consumers
    item = (
        stages * _STAGE
        + loads * shape.conflicts * _LOAD[t.fragments > 2]
        + products * max(product_cycles(t.column_tile), 26.0) * _PRODUCT
        + _leaving(plan, shape, target)
        + _WORK_TILE
    )
    if not t.resident_weights:
        item += stages * plan.stage_bytes * _WEIGHT_BYTE
        item += stages / (t.weight_stages - 1) ** 1.5 * _WEIGHT_WAIT
    elif plan.phases > 1:
        item *= _KEPT_PHASE
    elif t.stores_per_warp and p.element_bytes == 4:
        item *= _KEPT_WORDS
    # Three warpgroups share four schedulers.
    item *= 1 + 0.13 * (t.consumers - 2)
    boxes = _boxes(plan, walked)
    if t.store_warps:
        item += boxes / (t.source_stages - 1) ** 1.5 * _BOX_WAIT
        item += t.column_tile / t.round_columns * _STAGED_ROUND
        item = _with_sent(plan, item, shape, target)
        if p.element_bytes == 2:
            item *= (_SENT_BLOCK if t.blocks == 1 else 1) * (_SENT_TAP if t.tap_boxes else 1)
    brought = boxes * math.prod(shape.box[:3]) * plan.chunk_channels * _BOX_ROW
    return overlapped(item, brought)


def _split_work_tile(
    plan: PhasesLayout, shape: PhasesShape, target: Sequence[int], walked: float
) -> float:
    """The same of IEEE-grade products: what a warpgroup does, one thing after the other."""
    t = plan.tile
    stages = plan.chunks * walked
    loads = 4 * plan.steps * shape.conflicts * _SPLIT_LOAD
    products = 3 * plan.taps * (t.column_tile / 2 + 4) * _SPLIT_PRODUCT
    block = loads + plan.split_sets * _SPLIT_SET + products
    item = stages * (_SPLIT_STAGE + t.blocks * block) + _SPLIT_WORK_TILE
    if not t.store_warps:
        item += _leaving(plan, shape, target) * _SPLIT_LEAVING
    if not t.resident_weights:
        item += stages / (t.weight_stages - 1) ** 1.5 * _SPLIT_WEIGHT_WAIT
    boxes = _boxes(plan, walked)
    item += boxes / (t.source_stages - 1) ** 1.5 * _SPLIT_BOX_WAIT
    if t.store_warps:
        item += t.column_tile / t.round_columns * _STAGED_ROUND
    if t.consumers == 3:
        item *= _SPLIT_THREE[t.store_warps > 0]
    elif t.consumers == 1:
        item *= _SPLIT_ALONE
    brought = boxes * math.prod(shape.box[:3]) * plan.chunk_channels * _SPLIT_BOX_ROW
    item = overlapped(item, brought, power=4)
    return _with_sent(plan, item, shape, target) if t.store_warps else item


def _boxes(plan: PhasesLayout, walked: float) -> float:
    """Boxes of a work tile with so many stages of a chunk."""
    taps = walked / plan.walked * plan.axes[0].kernel if plan.tile.tap_boxes else 1
    return plan.chunks * taps


def stages_of_chunk(plan: PhasesLayout, shape: PhasesShape, target: Sequence[int]) -> float:
    """Of a work tile of the CTA that has most of them, where weights pass."""
    source = plan.source(target) if plan.problem.forward else target
    # The share of walked taps, over all tiles and phases, that meet not only padding.
    met = math.prod(
        met_share(plan.axes[a], shape.units[1 + a], shape.tiles[1 + a], source[a])
        for a in range(plan.tile.phased)
    )
    variants, grid = plan.product_work_tiles, plan.grid(shape)
    items = shape.count * variants
    rounds = div_up(items, grid)
    if rounds > _FEW_ROUNDS:
        return plan.walked * met * plan.n_tile_phases / plan.phases / variants
    # A CTA has work tiles without padded taps alone, and mostly of long phases.
    taps = tuple(axis.phase_taps if not axis.block else (1,) for axis in plan.axes[:2])
    phases = _Phases(taps, bool(plan.tile.store_warps), variants, plan.rotation(shape))
    return _most_taps(phases, items, grid) / rounds * (1 + met) / 2


class _Phases(NamedTuple):
    """In which order CTAs take phases: see _most_taps."""

    taps: tuple[tuple[int, ...], ...]  # of each phase of D and of H
    filled: bool  # those without taps are no work tiles
    variants: int  # work tiles of a tile of units
    rotation: int


@functools.lru_cache(maxsize=1024)
def _most_taps(phases: _Phases, items: int, grid: int) -> float:
    """Taps of D and H of the CTA that has most of them in its few work tiles."""
    every = np.array([math.prod(one) for one in itertools.product(*phases.taps)])
    if phases.filled:
        every = every[every > 0]
    number = np.arange(items)
    rotated = number // phases.variants * phases.variants // grid * phases.rotation
    length = every[(number + rotated) % phases.variants % len(every)]
    return float(np.bincount(number % grid, length).max())


# --- What leaves ---------------------------------------------------------------------------------


def _leaving(plan: PhasesLayout, shape: PhasesShape, target: Sequence[int]) -> float:
    """Cycles of a warp to bring its sums of a work tile to the target."""
    t = plan.tile
    outputs = t.blocks * t.column_tile * plan.slots / 2  # of a thread
    if t.store_warps:
        return outputs * _SENT_OUTPUT
    wide = plan.wide(shape, target)
    # Of a work tile's slots of D and H, of all work tiles.
    live = math.prod(axis.live_phases / axis.stride for axis in plan.axes[:2])
    cycles = outputs * (live * _WARP_OUTPUT[wide] + (1 - live) * _CONSTANT_OUTPUT[wide])
    # Rows leave as pieces of 16 units, whose ends meet in L2 if they leave at the same time.
    slots = plan.axes[2].slots
    width = shape.units[3] * slots
    if any(n * plan.problem.element_bytes % 32 for n in (target[2], width)):
        lines = math.prod(shape.units[:3]) * plan.slots // slots
        cycles += lines * t.column_tile * _PIECE
    return cycles


def _with_sent(plan: PhasesLayout, item: float, shape: PhasesShape, target: Sequence[int]) -> float:
    """Cycles of a work tile, on average, whose outputs leave by store warps."""
    t = plan.tile
    staging, sent = plan.staging(shape, target), _sending(plan, shape, target)
    # All of a work tile is staged at once: rounds for which there is no buffer wait for others.
    item += 1.5 * sent * max(0.0, 1 - plan.buffers(shape, target) / plan.staging_rounds)
    filled = t.column_tile * staging.runs * (_FILLED_RUN + _run_bytes(plan, staging) * _FILLED_BYTE)
    live, slots = _slots(plan)
    filled *= slots - live
    return overlapped(item, sent, filled) * _SENT


def _sending(plan: PhasesLayout, shape: PhasesShape, target: Sequence[int]) -> float:
    """Cycles of store warps for a work tile."""
    t = plan.tile
    staging = plan.staging(shape, target)
    runs = t.round_columns * staging.runs
    one = _ROUND + runs * (_SENT_RUN + _run_bytes(plan, staging) * _SENT_BYTE)
    live, _ = _slots(plan)
    rounds = live * t.column_tile / t.round_columns
    return rounds * one / min(t.store_warps, plan.buffers(shape, target))


def _slots(plan: PhasesLayout) -> tuple[float, float]:
    """Slots of D of a work tile that are staged, and all of them."""
    axis = plan.axes[0]
    if axis.block:
        return float(axis.live_phases), float(axis.slots)
    return 1.0, plan.n_tile_phases / plan.product_work_tiles


def _run_bytes(plan: PhasesLayout, staging: Staging) -> float:
    return staging.column * plan.problem.element_bytes / staging.runs
