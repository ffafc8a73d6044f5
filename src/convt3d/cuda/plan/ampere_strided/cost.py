"""Estimated cycles of a call of a strided kernel.

The model adds up what one multiprocessor spends on matrix steps, shared memory, instructions and
memory traffic, and how far these overlap.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from convt3d.cuda.plan.ampere_strided.layout import StridedLayout, Units
from convt3d.cuda.plan.axes import odd_lines
from convt3d.cuda.plan.rates import L2_BYTES, MEMORY_BYTES, STEP_CYCLES
from convt3d.cuda.schedule import div_up
from convt3d.precision import Arithmetic

# The same of weights that stages bring: a copy of few bytes a thread, waited for at once.
_WEIGHT_BYTES = 10.0
# Instructions that one run of the staged epilogue takes besides its data; the gradient's as fitted
# before four runs left a warp at once.
_RUN_INSTRUCTIONS = {"forward": 40.0, "grad_input": 120.0}
# Cycles that a tile waits for each stage of 16 bits, whose copies go through registers; other CTAs
# of a multiprocessor hide them. Of gradients those of few channels, to which they were fitted.
_PAIRED_CYCLES = {"forward": 1000.0, "grad_input": 2000.0}
# Measured over modelled times, relative to those of ampere/gather/kernel.cu: what families are
# compared by.
_MISSED = {
    ("forward", Arithmetic.TF32): 1.15,
    ("forward", Arithmetic.IEEE): 1.0,
    ("forward", Arithmetic.F16): 1.2,
    ("forward", Arithmetic.BF16): 1.2,
    ("grad_input", Arithmetic.TF32): 1.25,
    ("grad_input", Arithmetic.IEEE): 1.5,
}
# The same of contiguous gradients of 16 bits and many channels beside, over 13 layers.
_PAIRED_GRADIENTS = 1.6
# The same of channels_last sources of 16 bits beside.
_CHANNELS_LAST = 1.7
# The same of gradients whose channels_last source is copied value by value: of three channels.
_SINGLE_VALUES = {
    Arithmetic.TF32: 1.3,
    Arithmetic.IEEE: 1.6,
    Arithmetic.F16: 3.5,
    Arithmetic.BF16: 3.5,
}
# Gradients of 16 bits whose source can only be loaded value by value: of many, of few channels.
_ODD_LINES = (1.8, 1.3)


def _issued(forward: bool, warps: int) -> float:
    """Instructions that a multiprocessor issues in a cycle; read with ncu on an H200."""
    if forward:
        return 3.3 * warps / (warps + 12)
    return 1.2 + 0.7 * min(warps, 16) / 12


@functools.lru_cache(maxsize=4096)
def step_cycles(plan: StridedLayout) -> tuple[float, float, float]:
    """Of one step of one CTA: cycles of the tensor cores, of shared memory; instructions."""
    t = plan.tile
    ieee = plan.problem.arithmetic is Arithmetic.IEEE
    products = t.warps * plan.taps * t.fragments_m * t.fragments_n
    windows = t.warps * plan.windows * t.fragments_m
    weights = t.warps * plan.taps * t.fragments_n
    matrix = products * STEP_CYCLES * (3.0 if ieee else 1.0)
    halves = plan.step_words / 4
    shared = halves * (windows * plan.window + weights * (2 if ieee else 1))
    # Of every value of every tap's fragment: splitting it, rounding it, or moving it to where a
    # fragment's registers lie side by side.
    prepared = 2.0 * halves * plan.axes[2].shifts
    if ieee:
        prepared *= 3
    elif not plan.problem.forward:
        # As it was fitted to measured times, though rounding is now one instruction.
        rounded = plan.problem.arithmetic is Arithmetic.TF32
        prepared = 8.0 * (plan.axes[2].unit_source + plan.axes[2].shifts) if rounded else 0.0
    # IEEE: three products of a chain, and a share of its sum's way out of it.
    instructions = products * (5.0 if ieee else 1.0) + weights
    instructions += windows * (halves * plan.window / plan.window_vector + prepared)
    return (matrix, shared, 1.15 * instructions)


def call_cycles(
    plan: StridedLayout, units: Units, batch: int, target: Sequence[int]
) -> NDArray[np.float64]:
    """Estimated cycles of one call in tiles of each of these shapes."""
    t, axes = plan.tile, plan.axes
    bytes_ = plan.problem.element_bytes
    steps = plan.chunks * t.depth
    matrix, shared, instructions = (steps * x for x in step_cycles(plan))
    needed = plan.needed(target)
    size0, size1 = plan.box(units)
    streamed = 0 if t.resident_weights else plan.chunks * plan.chunk_weight_words
    stages, slices = plan.chunks, size0
    if not plan.problem.forward:
        # Slices of the sweep, the few at its end included.
        swept = units[0] + (plan.lags - 1) / 2
        matrix, shared, instructions = (x * swept for x in (matrix, shared, instructions))
        live = sum(map(bool, plan.slices)) / axes[0].unit_source
        slices = live * ((units[0] - 1) * axes[0].unit_source + axes[0].shifts)
        stages = plan.chunks * slices
        streamed = streamed * swept
    words = slices * size1 * plan.pitch(units[2]) * plan.step_words * steps
    wide = t.vector if bytes_ == 4 or plan.problem.source_channels_last else 1
    if not plan.problem.forward and not plan.problem.source_channels_last:
        # Strided layers often have odd output rows, which only move element by element.
        width = plan.problem.geometry.output_size(target)[2]
        wide = wide if width % t.vector == 0 else 1
    fill = words / 32 / wide * 4 + stages * t.warps * 60
    fill = fill + streamed / 128 * 4
    volume = units[0] * units[1] * units[2]
    unit_targets = axes[0].unit_target * axes[1].unit_target * axes[2].unit_target
    outputs = volume * unit_targets * plan.column_tile
    if plan.direct(target):
        store = outputs / 32
    else:
        shared = shared + outputs / 32 * 2
        # Each run of a channel by one warp.
        run = np.where(
            units[2] < needed[2],
            units[2] * axes[2].unit_target,
            unit_targets * volume / (axes[0].unit_target * units[0]),
        )
        store = outputs / 32 * 2.0 + outputs / run * _RUN_INSTRUCTIONS[plan.problem.operation]
    instructions = instructions + fill + store
    # Outputs go to memory, sources and weights come out of L2.
    traffic = outputs * bytes_ / MEMORY_BYTES
    traffic = traffic + words * 4 / (L2_BYTES if plan.problem.forward else MEMORY_BYTES)
    traffic = traffic + streamed * 4 / _WEIGHT_BYTES
    issue = instructions / _issued(plan.problem.forward, t.resident * t.warps)
    if plan.problem.arithmetic is Arithmetic.IEEE:
        issue = issue / 1.15  # splitting operands is parallel work
    longest = np.maximum(np.maximum(matrix, shared), np.maximum(issue, traffic))
    tile = longest + 0.15 * (matrix + shared + issue + traffic - longest)
    # A tile alone is a chain of latencies.
    chain = 1000.0 * stages / (t.stages - 1) + 1500.0
    count = batch
    for n, extent in zip(needed, units, strict=True):
        count = count * div_up(n, extent)
    turns = div_up(count, plan.most_workers)
    workers = np.minimum(count, plan.most_workers) * plan.n_tiles
    sharing = np.clip(workers / plan.gpu.multiprocessors, 1.0, t.resident)
    way = (plan.problem.operation, plan.problem.arithmetic)
    missed, last = _MISSED.get(way, 1.3), plan.problem.source_channels_last
    if last and t.vector == 1 and not plan.problem.forward:
        missed *= _SINGLE_VALUES[plan.problem.arithmetic]
    if last and bytes_ == 2:
        missed *= _CHANNELS_LAST
    elif bytes_ == 2 and odd_lines(plan.problem):
        missed *= _ODD_LINES[plan.step_words == 4]
    if bytes_ == 2 and not last and not plan.problem.forward and plan.step_words != 4:
        missed *= _PAIRED_GRADIENTS
    paired = bytes_ == 2 and not last
    paired = paired and (plan.problem.forward or plan.step_words == 4)
    waits = _PAIRED_CYCLES[plan.problem.operation] * stages if paired else 0.0
    tile = tile * _measured_factor(plan, target)
    alone = np.maximum(tile + waits, chain)
    turn = np.maximum(tile * sharing + waits / sharing, alone)
    costs: NDArray[np.float64] = missed * turns * turn + 4000.0
    return costs


def _measured_factor(plan: StridedLayout, target: Sequence[int]) -> float:
    """What is measured besides, as a factor of a tile's time; causes are known in part."""
    p, t = plan.problem, plan.tile
    ieee = p.arithmetic is Arithmetic.IEEE
    if p.source_channels_last:
        return 1.0
    if not p.forward:
        # Pairs of 16-bit channels pass through registers: more warps hide it.
        if plan.step_words == 4:
            return 1.5 if t.fragments_m == 2 else 1.0
        # Each fragment loads its weights.
        return 1.2 if ieee and t.fragments_m == 1 else 1.0
    if p.element_bytes == 2:
        # Each fragment loads the weights of all taps, step after step.
        alone = t.fragments_m == 1 and t.fragments_n <= 2 and plan.chunks * t.depth > 1
        return 1.22 if alone else 1.0
    if t.vector == 1:
        return 1.2 if ieee or t.fragments_m == 1 else 1.0
    # A tile of one short stage has little else to do.
    short = t.fragments_m == 2 and plan.chunks == 1 and not plan.direct(target)
    return (1.12 if ieee else 1.07) if short else 1.0
