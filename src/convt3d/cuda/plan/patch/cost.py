"""Estimated cycles of a call of a patch kernel.

The model counts, for one multiprocessor, matrix steps, bytes from L2 and from memory, and
instructions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from convt3d.cuda.plan.patch.layout import PatchLayout
from convt3d.cuda.plan.warpgroups import overlapped
from convt3d.cuda.schedule import div_up


@dataclass(frozen=True)
class _Rates:
    """What one multiprocessor of an H200 takes: cycles, and bytes a cycle."""

    call: float  # any call
    product: float  # 64 rows by two columns
    fragment: float
    chunk: float  # a piece of k
    stores: float
    memory: float
    l2: float
    power: int  # of the sum that stands for the longest of these


# Fitted to 70 timed forward plans of five layers (8% off in the mean) and 87 gradients (9%).
_FORWARD = _Rates(12000.0, 0.95, 5.6, 35.0, 23.5, 18.5, 45.0, 4)
_GRADIENT = _Rates(15000.0, 0.45, 8.0, 177.0, 26.0, 17.5, 60.0, 5)
# Of stores of 4 bytes, two cells of one slot in 16 bits. Over 28 layers of one tap the plan of the
# least cost took 1.049 times as long as the fastest without it, now 1.017.
_SHORT_PIECES = 1.5
_TRANSPOSE_BYTES = 9.9  # a cycle, that a warp turns
_COPIED = 900.0  # cycles that a warp waits for the weights that it copies at a time
_STREAMED = 0.15  # what turning weights for every tile costs more than counted
_DEEP = 9  # blocks of 64 cells on their way to a multiprocessor that hide latencies
# Of many rounds: each source stage less costs as much as one of _DEEP.
_FEW_ROUNDS, _STEADY_STAGES = 4, 6
_ADD_BYTES = 8.0  # a cycle, of partial sums that are written and added


def call_cycles(plan: PatchLayout, batch: int, input_size: Sequence[int]) -> float:
    """Estimated cycles of one call."""
    t, p, g, gpu = plan.tile, plan.problem, plan.problem.geometry, plan.gpu
    eb, cells = p.element_bytes, math.prod(input_size)
    rounds, sharing = plan.spread(div_up(cells, t.cells) * batch)
    rounds *= sharing
    rates = _FORWARD if plan.channel_lines else _GRADIENT
    chunks = plan.split_chunks
    products = 4 * chunks * t.blocks * t.consumers
    matrix = products * t.columns / 2 * rates.product * (3 if plan.parts > 1 else 1)
    issue = products * 4 * rates.fragment + chunks * rates.chunk
    stores = t.cells * t.columns * eb / rates.stores
    if p.forward and p.target_channels_last and not t.staged:
        # Lanes store what neighbouring channels they have, 16 bytes at best.
        lane = 2 * plan.interleave
        few = lane if p.target_channels % lane == 0 else 2 - p.target_channels % 2
        stores *= 16 / (few * eb)
    if plan.slots == 1 and not p.target_channels_last and plan.run * eb == 4:
        stores *= _SHORT_PIECES
    weights = chunks * plan.weight_part_bytes * (sharing if t.keep_weights else rounds)
    traffic = (rounds * t.cells * chunks * 128 + weights) / rates.l2
    prepared = 0.0  # weights, by the warps that bring them
    bringers = 4 * t.fillers - t.consumers
    if plan.transposed:
        if not t.keep_weights:
            bringers = min(bringers, plan.weight_part_bytes // (32 * plan.weight_box_row))
        prepared = weights / (_TRANSPOSE_BYTES * bringers)
    elif not plan.map_weights:
        waits = 2 * chunks * t.columns // 8 * (sharing if t.keep_weights else rounds)
        prepared = waits * _COPIED / bringers
    # Other blocks of columns find most of the source in L2.
    source = p.source_channels * (1.0 if p.forward else math.prod(g.stride))
    source *= 1 + 0.1 * (plan.column_tiles - 1)
    volumes = g.groups * (source + plan.columns) * cells * batch
    memory = volumes * eb / (rates.memory * gpu.multiprocessors)
    multiplied = rounds * (matrix + issue + stores)
    longest = overlapped(multiplied, traffic, prepared, memory, power=rates.power)
    # Few blocks of cells on their way.
    shallow = max(0, _DEEP - t.consumers * t.blocks * t.source_stages * t.resident)
    if plan.channel_lines and plan.parts == 1 and rounds > _FEW_ROUNDS:
        shallow = max(shallow, _STEADY_STAGES - t.source_stages)
    longest *= 1 + 0.015 * shallow
    if plan.transposed and plan.parts == 1 and not t.keep_weights:
        longest *= 1 + _STREAMED
    adding = 0.0
    if t.splits > 1:
        partial = 4.0 * t.splits * plan.partial_elements(batch, input_size)
        adding = partial / (_ADD_BYTES * gpu.multiprocessors)
    return rates.call + longest + adding
