"""Estimated cycles of a call of a gather kernel.

The model counts, for one multiprocessor, matrix steps, shared-memory traffic, fills, barriers and
stores, and the rows lost at tile borders.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from convt3d.cuda.plan.ampere_gather.layout import GatherLayout
from convt3d.cuda.plan.rates import MEMORY_BYTES, STEP_CYCLES
from convt3d.cuda.schedule import div_up
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic

# What few resident CTAs lose to barriers and to the ends of a tile, fitted to measurements.
_ALONE = {1: 1.4, 2: 1.2, 3: 1.1}
# Measured over modelled times of channels_last sources, by element size.
_CHANNELS_LAST = {2: 1.6, 4: 1.15}
# The exponent of a CTA's warps along M: more of them hide more latency.
_WARPS = 0.08


@dataclass(frozen=True, eq=False)
class Work:
    """Tile shapes and, for each, what a kernel has to do, whatever its pipeline."""

    shapes: NDArray[np.int64]
    positions: NDArray[np.int64]  # of the source box
    step: NDArray[np.float64]  # cycles of a matrix step with its share of the fill
    store: NDArray[np.float64]  # cycles of the epilogue
    count: NDArray[np.int64]  # CTAs


@functools.lru_cache(maxsize=4096)
def _shapes(rows: int, needed: Triple) -> NDArray[np.int64]:
    """Tile shapes of at most `rows` units, no larger than needed; the last is a single unit."""
    found = set()
    for t2 in {min(div_up(needed[2], parts), rows) for parts in range(1, 17)} | {8, 16, 32}:
        t2 = min(t2, needed[2], rows)
        for t0 in (1, 2, 3, 4, 6, 8):
            t0 = min(t0, needed[0], rows // t2)
            most = min(rows // (t2 * t0), needed[1]) if t0 else 0
            for t1 in {most, div_up(needed[1], div_up(needed[1], most))} if most else ():
                found.add((t0, t1, t2))
    return np.array([*sorted(found, reverse=True), (1, 1, 1)], dtype=np.int64)


def waste(plan: GatherLayout) -> float:
    """Cycles of the products of one useful output: what ranks fragments and warps."""
    slots = plan.axes[0].slots * plan.axes[2].slots * plan.axes[0].phases * plan.axes[1].phases
    useful = plan.tile.rows * plan.problem.target_channels / plan.column_tiles * slots
    # Products of all phases, since phased axes differ in their taps.
    return _step_cycles(plan)[0] * plan.axes[0].phases * plan.axes[1].phases / useful


@functools.lru_cache(maxsize=4096)
def _step_cycles(plan: GatherLayout) -> tuple[float, float]:
    """Cycles of one matrix step's products in all taps: busiest unit, and both added."""
    t, axes = plan.tile, plan.axes
    ieee = plan.problem.arithmetic is Arithmetic.IEEE
    warps = t.warps_m * t.warps_n
    taps1 = sum(axes[1].phase_taps) / axes[1].phases
    taps2 = axes[2].kernel
    taps0: float = axes[0].kernel
    products0, loads0 = taps0 * max(1, t.block0), float(axes[0].shifts)
    if not t.block0:
        products0 = loads0 = taps0 = sum(axes[0].phase_taps) / axes[0].phases
    shifts2 = min(axes[2].shifts, axes[2].kernel * axes[2].slots)
    products = warps * taps1 * products0 * taps2 * t.fragments_m * t.fragments_n
    matrix = products * STEP_CYCLES * (3.5 if ieee else 1.0)
    loads = loads0 * shifts2 * t.fragments_m * 4
    if plan.octets:
        loads *= 1.5  # eight neighbouring units lie in two rows at times
    loads += taps0 * taps2 * t.fragments_n * (4 if ieee else 2)
    shared = warps * taps1 * loads
    weights = taps1 * taps0 * plan.row_words / 128 * 2
    return max(matrix, shared) + 0.3 * min(matrix, shared), weights


def work_of(plan: GatherLayout, batch: int, target: Sequence[int]) -> Work:
    """What tiles of every shape cost, which is the same for any pipeline."""
    t, axes = plan.tile, plan.axes
    needed = plan.needed(target)
    shapes = _shapes(t.rows, needed)
    bytes_ = plan.problem.element_bytes
    step, weights = _step_cycles(plan)
    box0, box1, box2 = plan.box(shapes, needed[2])
    rows = box0 * box1
    positions = rows * box2
    wide = plan.vector if bytes_ == 4 or plan.problem.source_channels_last else 1
    # Short rows waste parts of 32-byte sectors and of warps.
    fill = positions * 8 / (32 * wide) * 3.0 + rows * 8 * (box2 * 4 / 32 + 1) / 2 + weights

    run = shapes[:, 2] * axes[2].slots * bytes_
    if plan.problem.target_channels_last:
        run = np.full_like(run, plan.column_tile * bytes_)
    outputs = t.rows * plan.column_tile * axes[0].slots * axes[2].slots
    instructions: NDArray[np.float64] | float = 0.8
    if bytes_ == 2 and not plan.problem.target_channels_last and axes[2].slots % 2:
        # Pairs of neighbours leave as one store where all of them are aligned.
        instructions = np.where(shapes[:, 2] * axes[2].slots % 2, 8.0, 2.5)
    store = outputs * bytes_ / MEMORY_BYTES * (run + 32) / run + outputs / 32 * instructions

    ctas = batch * plan.problem.geometry.groups * plan.column_tiles
    ctas *= axes[0].phases * axes[1].phases
    count = ctas * (-(-np.array(needed) // shapes)).prod(axis=1)
    return Work(shapes, positions, step + fill, store, count)


def bound(plan: GatherLayout, work: Work, resident: int) -> float:
    """Cycles that no pipeline of at most so many resident CTAs undercuts."""
    steps = div_up(plan.problem.source_channels * plan.problem.element_bytes, 32)
    tile = steps * work.step + work.store
    cycles = np.maximum(1.1 * work.count * tile / plan.gpu.multiprocessors, 2000 + tile)
    return float(cycles.min()) * _missed(plan, resident)


def _missed(plan: GatherLayout, resident: int) -> float:
    """Measured over modelled times of so many resident CTAs."""
    p = plan.problem
    missed = _CHANNELS_LAST[p.element_bytes] if p.source_channels_last else 1.0
    return missed * _alone(plan, resident) * (4 / plan.tile.warps_m) ** _WARPS


def _alone(plan: GatherLayout, resident: int) -> float:
    if not plan.octets:
        return _ALONE.get(resident, 1.0)
    factor = {1: 1.33, 2: 1.2}.get(resident, 1.1)
    if resident * plan.threads <= 128:
        factor = 1.6
    axis = plan.axes[0]
    if not plan.tile.block0 and axis.phases == 1 and axis.kernel > 1 and plan.threads <= 128:
        factor *= 1.2
    return factor


def call_cycles(plan: GatherLayout, work: Work) -> NDArray[np.float64]:
    """Estimated cycles of one call on a whole GPU for each tile shape; inf where one cannot be.

    Resident CTAs share the throughput of the tensor cores, of shared memory and of DRAM; each
    of them alone cannot be faster than its chain of latencies.
    """
    t = plan.tile
    axis = plan.axes[1]
    taps1 = sum(axis.phase_taps) / axis.phases
    chunk = t.depth * work.step + 50.0 * (taps1 if t.split else 1)
    throughput = plan.chunks * chunk + work.store
    chain = 2000 + plan.chunks * np.maximum(chunk, 1000.0 / (t.stages - 1)) + work.store
    waves = work.count / (plan.gpu.multiprocessors * t.resident)
    waves = np.where(waves > 3, waves + 0.5, np.ceil(waves))
    costs = waves * np.maximum(1.1 * throughput * t.resident, chain)
    # The last wave has CTAs of the phase with most taps.
    costs = costs + 1.1 * (_most_taps(plan) - 1) * plan.chunks * chunk * t.resident
    return np.where(work.positions <= t.positions, costs * _missed(plan, t.resident), np.inf)


def _most_taps(plan: GatherLayout) -> float:
    """Taps of the phase that has most, over the mean."""
    phased = plan.axes[1:2] if plan.tile.block0 else plan.axes[:2]
    return math.prod(max(a.phase_taps) * a.phases / sum(a.phase_taps) for a in phased)
