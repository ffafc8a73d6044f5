"""Estimated cycles of a call of a sweep kernel.

The model counts, for the steps of one CTA, the cycles of the products, of the shared-memory and L2
traffic beside them, of barriers and of the epilogue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from convt3d.cuda.plan.sweep.products import Line, SweepProducts
from convt3d.cuda.schedule import div_up

# Bytes a cycle that one multiprocessor gets from L2 while all of them read, and may store.
_L2_BYTES, _STORE_BYTES = 24.0, 16.0
_SCALE, _CALL = 1.12, 8000.0  # what other families' models count for a cycle that is measured
# Cycles until what a filling thread loads has arrived and is stored; of a filling warp for one pair
# of positions of each lane. The gradient by input of a strided layer reads several positions of a
# line for each unit: their loads wait together, but each lane picks its own positions.
_LATENCY, _FILL = 2400.0, 100.0
_STRIDED_LATENCY, _STRIDED_FILL = 720.0, 500.0
_SPLIT_LINE = 1.5  # times the two of strided layers, for a contiguous source of split products
_BARRIERS = 40.0  # of a (chunk, tap of axis 1)
# Of contiguous sources, what the ends of a piece of a line cost, by element size, and pieces of odd
# length of lines that are even.
_CUT, _ODD_CUT = {4: 2.0, 2: 4.0}, {4: 1.2, 2: 1.5}
# What pieces cost that end within a sector of 32 bytes, where the next one begins: by the square of
# a step's time to store by that to multiply; at most.
_SHARED_SECTORS, _MOST_SHARED_SECTORS = 6.0, 2.0
# What products that fall apart where windows of planes overlap cost more than counted.
_PIECES = 1.08
# What costs more than counted: two weight stages of split products, kept weights (by parts of a
# value), sweeping along H instead of D.
_TWO_STAGES, _KEPT_WEIGHTS, _SWAPPED = 1.1, {1: 1.02, 2: 1.045}, 1.015
# Larger tiles take longer for each of their products: each block of a consumer's rows beyond two,
# and by exponents blocks and planes. Of split products planes count less, and fewer columns than 32
# cost more, over 1,303 plans of 239 layers.
_LARGE_TILE, _BLOCKS, _PLANES = 1.06, 0.11, 0.2
_SPLIT_PLANES, _SPLIT_COLUMNS = 0.06, 0.11
# Factors of ping-pong: of consumers of two blocks, and of others.
_PING_PONG, _OTHER_PING_PONG = 0.99, 1.01


def product_cycles(columns: int) -> float:
    """Cycles of one m64 product of eight words, both operands in shared memory."""
    return max(columns / 2, 16 + columns / 4, 20.0) + 1.0


def _products(plan: SweepProducts) -> float:
    """Cycles of the products of one (chunk, tap of axis 1) of a step, all rows."""
    t, taps2 = plan.tile, float(plan.plane[1].kernel)
    blocks = t.blocks * t.consumers
    if plan.parts == 1:
        columns = [n * t.column_tile for n in plan.sweep.blocks]
        loss = 1.0 if len(columns) == len(plan.set_columns) else _PIECES
        if plan.tap_pairs:
            taps2 -= taps2 // 2 / plan.chunks
        return loss * blocks * taps2 * sum(product_cycles(n) for n in columns)
    # While the tensor core works for one warpgroup, another adds what its own one left.
    sets = plan.slots2 * plan.chains  # of a source plane and a block
    matrix = [3 * taps2 / sets * product_cycles(n) for n in plan.set_columns]
    added = [n / 2 for n in plan.set_columns]
    if plan.product_sets > 1:
        chain = [max(pair) for pair in zip(matrix, added, strict=True)]
        alone = t.blocks * sets * sum(chain) + added[-1]
    else:
        alone = t.blocks * sets * (sum(matrix) + sum(added))
    return max(blocks * sets * sum(matrix), blocks * sets * sum(added), alone)


def _store(plan: SweepProducts) -> float:
    """Cycles of storing what a step finishes."""
    finished = plan.sweep.target_step * plan.slots2 * plan.tile.rows * plan.tile.column_tile
    return finished * plan.problem.element_bytes / _STORE_BYTES


def _call(plan: SweepProducts) -> Callable[[float, float], float]:
    """Cycles of a call of so many steps, whose (chunk, tap of axis 1) each take so many."""
    stages, store = plan.chunks * plan.plane[0].mean_taps, _store(plan)
    t = plan.tile
    loss = _LARGE_TILE ** max(0, t.blocks - 2)
    if plan.parts == 1:
        loss *= t.blocks**_BLOCKS * t.planes**_PLANES
    else:
        loss *= t.planes**_SPLIT_PLANES * (32 / t.column_tile) ** _SPLIT_COLUMNS
    loss *= _KEPT_WEIGHTS[plan.parts] if t.keep_weights else 1.0
    loss *= _SWAPPED if plan.swapped else 1.0
    if t.ping_pong:
        loss *= _PING_PONG if t.blocks == 2 else _OTHER_PING_PONG

    def of_steps(steps: float, stage: float) -> float:
        step = stages * stage
        # While one warpgroup stores, the others multiply; all of them wait for memory.
        step = max(step, store) + 0.25 * min(step, store)
        return loss * (_SCALE * steps * step + _CALL)

    return of_steps


def line_cycles(
    plan: SweepProducts, source: Sequence[int], target: Sequence[int]
) -> Callable[[Line], float]:
    """Estimated cycles of a call with a line; infinite if boxes cannot hold it."""
    t, parts, taps1 = plan.tile, plan.parts, plan.plane[0].mean_taps
    products, shares, call = _products(plan), plan.shares(source, target), _call(plan)
    weights = 0 if t.keep_weights else plan.stage_bytes
    # From the first load of a box to its last store.
    rounds = div_up(plan.fill_loads, plan.fill_batch)
    strided = plan.plane[1].unit_source > 1
    # The bound leaves this out, because other pipelines have more stages.
    two_stages = _TWO_STAGES if parts > 1 and t.weight_stages == 2 else 1.0
    wait, load = (_STRIDED_LATENCY, _STRIDED_FILL) if strided else (_LATENCY, _FILL * parts)
    if strided and parts > 1 and not plan.problem.source_channels_last:
        wait, load = _SPLIT_LINE * wait, _SPLIT_LINE * load
    fill = (rounds * wait + plan.fill_loads * load) / taps1

    def of_line(line: Line) -> float:
        positions = t.rows + line.beyond
        if positions > t.positions or not plan.covers(t.fill_pairs, positions):
            return math.inf
        loads = (positions * plan.position_bytes / parts / taps1 + weights) / _L2_BYTES
        stage = max(products, loads, fill) + 0.1 * (fill + loads) + _BARRIERS
        _, steps, warm = shares(line.rows)
        return two_stages * call(steps + warm, stage)

    return of_line


def cutting(plan: SweepProducts, units: int, target: Sequence[int]) -> float:
    """How much longer pieces of lines take than whole ones: runs begin anywhere, and are short.

    Where channels are last, nothing is lost.
    """
    whole = plan.plane[1].units(target[plan.order[2]])
    if units >= whole or plan.problem.source_channels_last:
        return 1.0
    bytes_ = plan.problem.element_bytes
    loss = 1.0 + _CUT[bytes_] * (0.04 + 1 / units)
    if units * plan.slots2 * bytes_ % 32:
        share = _store(plan) / (plan.chunks * plan.plane[0].mean_taps * _products(plan))
        loss *= min(1.0 + _SHARED_SECTORS * share**2, _MOST_SHARED_SECTORS)
    return loss * _ODD_CUT[bytes_] if units % 2 > whole % 2 else loss


def least_cycles(
    plan: SweepProducts, lines: Sequence[Line], source: Sequence[int], target: Sequence[int]
) -> float:
    """Cycles that no pipeline undercuts: those of the products."""
    _, steps, _ = plan.shares(source, target)(min(line.rows for line in lines))
    turns = _PING_PONG if plan.parts == 1 else 1.0
    return turns * _call(plan)(steps, _products(plan) + _BARRIERS)


def call_cycles(
    plan: SweepProducts, lines: Sequence[Line], source: Sequence[int], target: Sequence[int]
) -> float:
    """Estimated cycles of one call with the best of these lines."""
    cycles = line_cycles(plan, source, target)
    if plan.parts > 1 or not plan.problem.forward:
        # The costs of gradients and of split products are fitted without what cuts cost.
        return min(map(cycles, lines))
    return min(cycles(line) * cutting(plan, line.units, target) for line in lines)
