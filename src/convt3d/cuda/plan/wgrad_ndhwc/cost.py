"""Cycles of plans of ``wgrad_ndhwc/kernel.cu``, by how many CTAs share the steps of a work tile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from convt3d.cuda.plan.launches import copy_cycles
from convt3d.cuda.plan.position_box import Box, steps_of
from convt3d.cuda.plan.split_k import CLUSTERS, LONGEST_SUM, clusters_at_once, most_splits
from convt3d.cuda.plan.wgrad_ndhwc.layout import WgradNdhwcLayout
from convt3d.cuda.schedule import div_up

# Bytes a cycle of one multiprocessor that L2 brings, shared memory moves and DRAM takes, and TMA's
# latency in cycles, fitted to 510 timings of 66 layers on an H200; cycles of a step's barriers, and
# of a position of a box, however few bytes it has, to 56 further problems; what a position beyond
# the tensor takes more, to 24 plans whose lines of a box reach beyond W.
_L2_BYTES, _SHARED_BYTES, _DRAM_BYTES = 44.0, 175.0, 16.0
_STEP_CYCLES, _LATENCY_CYCLES, _POSITION_CYCLES, _BEYOND_CYCLES = 210.0, 1125.0, 2.5, 8.0
# Cycles of a CTA besides its steps, of the second launch, and of a cluster, to meet twice; of a
# byte of sums that a CTA of one reads.
_CTA_CYCLES, _REDUCE_CYCLES, _CLUSTER_CYCLES, _SUM_BYTE = 4000.0, 4000.0, 6000.0, 1 / 12
# By element bytes, what a call takes of the cycles that are counted: of tensors as they are, the
# mean over 21 and 17 layers; of a kernel on copies, where wgrad/ is the alternative, 166 drawn
# problems. The copies take what is counted.
_MEASURED = {2: 1.1, 4: 1.3}
_MEASURED_ON_COPIES = {2: 0.74, 4: 1.12}


def call_cycles(plan: WgradNdhwcLayout, extents: Box, box: Box, copies: Sequence[float]) -> float:
    """Estimated cycles of one call, which begins with ``copies`` of contiguous tensors."""
    measured = _MEASURED_ON_COPIES if copies else _MEASURED
    cycles, _ = min(by_splits(plan, extents, box))
    return measured[plan.problem.element_bytes] * cycles + sum(copies)


def by_splits(plan: WgradNdhwcLayout, extents: Box, box: Box) -> Iterator[tuple[float, int]]:
    """Cycles of a call by numbers of splits: those of a cluster, or of whole rounds of all
    multiprocessors."""
    steps, step_cycles = steps_of(extents, box), _step_cycles(plan, extents, box)
    mp, cluster = plan.gpu.multiprocessors, plan.tile.cluster
    if cluster > 1:
        yield _of_clusters(plan, cluster, steps, step_cycles), cluster
        return
    most = min(steps, most_splits(plan.elements))
    least = min(most, fewest_splits(plan, steps))
    rounds = range(1, div_up(plan.tiles * least, mp) + 4)
    for splits in {min(most, max(least, r * mp // plan.tiles)) for r in rounds}:
        alone = div_up(steps, splits) * step_cycles + _CTA_CYCLES
        cycles = div_up(plan.tiles * splits, mp) * alone
        if splits == 1 and plan.copies_sums:
            cycles += copy_cycles(plan.weight_bytes, plan.gpu)
        elif splits > 1 or plan.along_taps:
            cycles += _REDUCE_CYCLES + splits * plan.elements * 8 / _DRAM_BYTES / mp
        yield cycles, splits


def best_cluster(plan: WgradNdhwcLayout, extents: Box, box: Box) -> int | None:
    """Of how many CTAs clusters take fewest cycles; None where steps are too few, or too many."""
    steps, step_cycles = steps_of(extents, box), _step_cycles(plan, extents, box)
    clusters = [c for c in CLUSTERS if fewest_splits(plan, steps) <= c <= steps]
    return min(clusters, key=lambda c: _of_clusters(plan, c, steps, step_cycles), default=None)


def fewest_splits(plan: WgradNdhwcLayout, steps: int) -> int:
    """Splits whose sums are no longer than accumulators add up well."""
    return div_up(steps * plan.products, LONGEST_SUM)


def _of_clusters(plan: WgradNdhwcLayout, cluster: int, steps: int, step_cycles: float) -> float:
    """Cycles of a call whose work tiles are shared by clusters of so many CTAs."""
    alone = div_up(steps, cluster) * step_cycles + _CTA_CYCLES
    alone += _CLUSTER_CYCLES + plan.sum_bytes * _SUM_BYTE
    return div_up(plan.tiles, clusters_at_once(cluster, plan.gpu.multiprocessors)) * alone


def _step_cycles(plan: WgradNdhwcLayout, extents: Box, box: Box) -> float:
    """Cycles of a K step of a CTA: of tensor cores, shared memory, L2 or waiting for it."""
    t, m64 = plan.tile, plan.consumers * plan.tile.blocks
    bytes_ = plan.problem.element_bytes
    tensor = m64 * plan.products * t.columns / 2
    read = t.positions + plan.halo * box[3]  # positions of a box of the gradient
    source, target = t.positions * plan.boxes[0], read * plan.boxes[1]
    loaded = (source * plan.source_atom + target * plan.target_atom) * bytes_
    # Products read rows of 32 bytes of both operands; x may be read and written once more.
    shared = m64 * plan.products * 32 * (64 + t.columns) + loaded
    if plan.transposes:
        shared += 2 * t.positions * t.columns * bytes_
    beyond = 1 - math.prod(extents) / (steps_of(extents, box) * math.prod(box))
    position = _POSITION_CYCLES + _BEYOND_CYCLES * beyond
    brought = max(loaded / _L2_BYTES, (source + target) * position)
    waited = (brought + _LATENCY_CYCLES) / (t.stages - 1)  # one stage is being read
    return max(tensor, shared / _SHARED_BYTES, brought, waited) + _STEP_CYCLES
