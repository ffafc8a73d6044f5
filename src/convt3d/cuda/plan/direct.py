"""Plans of the CUDA-core kernels: ``direct/conv.cu`` and ``direct/wgrad.cu``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.rates import MEMORY_BYTES
from convt3d.cuda.plan.split_k import in_two_passes, most_splits
from convt3d.cuda.schedule import (
    WEIGHT_STRIDES,
    Gpu,
    Launch,
    Plan,
    Problem,
    Schedule,
    div_up,
    geometry_macros,
    macros,
    problem_macros,
)
from convt3d.geometry import Triple
from convt3d.precision import MANY_CHANNELS, Arithmetic

# Groups of so few channel pairs leave a matrix fragment mostly empty.
_MAX_PAIRS = 4
_MAX_SLOTS = 32
_MAX_SHIFTS = 96
_MAX_SHARED_WEIGHTS = 32 * 1024
_MAX_TAPS = 64
# Of so few source channels a thread computes as many target channels as registers hold: of one tap,
# and of more.
_ONE_TAP_SOURCE, _FEW_SOURCE = 4, 3
_PRODUCTS = 67.0  # of a multiprocessor in a cycle, in such layers
_IEEE = 1.4  # times as long as counted, float32-grade layers on an H200, beside matrix units


def suits(problem: Problem) -> bool:
    """Whether the layer has so few channels per group that CUDA cores beat matrix units."""
    return problem.source_channels * problem.target_channels <= _MAX_PAIRS


def few_to_many(problem: Problem) -> bool:
    """Whether CUDA cores may beat matrix units: float32, few channels in, many out.

    Float32-grade, or strided gradients by input in TF32 to channels_last tensors.
    """
    g = problem.geometry
    one_tap, strided = max(g.kernel_size) == 1, max(g.stride) > 1
    gradient = problem.operation == "grad_input"
    tf32 = problem.arithmetic is Arithmetic.TF32 and problem.target_channels_last
    return (
        (problem.arithmetic is Arithmetic.IEEE or (tf32 and gradient and strided and not one_tap))
        and g.groups == 1
        and problem.source_channels <= (_ONE_TAP_SOURCE if one_tap else _FEW_SOURCE)
        and problem.target_channels >= MANY_CHANNELS
        and (gradient or (problem.forward and not strided))
    )


def _lanes(channels_last: bool, blocks: int) -> int:
    """Neighbouring threads on neighbouring channels: a power of two, 1 for contiguous tensors."""
    lanes = 1
    while channels_last and lanes < 32 and lanes < blocks:
        lanes *= 2
    return lanes


@dataclass(frozen=True)
class DirectPlan:
    """Forward or gradient by input, one thread to a unit."""

    problem: Problem
    blocks: Triple  # phase periods of a unit along each axis; 0: walked phase by phase
    block_channels: int

    threads = 128

    @property
    def lanes(self) -> int:
        return _lanes(self.problem.target_channels_last, self.channel_blocks)

    @property
    def channel_blocks(self) -> int:
        per_group = div_up(self.problem.target_channels, self.block_channels)
        return self.problem.geometry.groups * per_group

    @property
    def weight_bytes(self) -> int:
        kd, kh, kw = self.problem.geometry.kernel_size
        per_lane = self.problem.source_channels * kd * kh * kw * self.block_channels
        return 4 * per_lane * self.lanes

    @property
    def weights_shared(self) -> bool:
        return self.weight_bytes <= _MAX_SHARED_WEIGHTS

    @once
    def macros(self) -> tuple[tuple[str, str], ...]:
        p = self.problem
        own = macros(
            "CONVT3D_",
            block_channels=self.block_channels,
            packed=1,
            lanes=self.lanes,
            weights_shared=self.weights_shared,
            **{f"block{i}": n for i, n in enumerate(self.blocks)},
        )
        return p.type_macros + geometry_macros(p.geometry) + problem_macros(p) + own

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        g = self.problem.geometry
        source, target = self.problem.extents(input_size)
        units, phases = [], 1
        for n, stride, block in zip(target, g.stride, self.blocks, strict=True):
            step = stride if self.problem.forward else 1
            units.append(div_up(n, step * max(1, block)))
            phases *= 1 if block else step
        count = units[0] * units[1] * units[2]
        grid = phases * div_up(self.channel_blocks, self.lanes) * batch
        grid *= div_up(count, self.threads // self.lanes)
        launch = Launch(
            KernelSpec("direct/conv.cu", "convt3d_direct", self.macros),
            grid,
            self.threads,
            self.weight_bytes if self.weights_shared else 0,
            (
                "source",
                "weight",
                "bias",
                "target",
                *map(np.int32, (*source, *target, *units)),
                *WEIGHT_STRIDES,
            ),
        )
        return Schedule((launch,))

    def describe(self) -> dict[str, str]:
        return {
            "kernel": "direct, CUDA cores",
            "unit": " x ".join(str(b) if b else "one phase" for b in self.blocks)
            + f" periods, {self.block_channels} channels a thread",
            "weights": "shared memory" if self.weights_shared else "L1",
            "threads": f"{self.threads}, {self.lanes} neighbouring channel blocks",
            "shared memory": f"{self.weight_bytes if self.weights_shared else 0} bytes",
        }


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, Plan]]:
    """The CUDA-core plan of any problem; its cost is infinite but for few channels to many."""
    if problem.operation == "grad_weight":
        return [(math.inf, choose_grad_weight(problem, gpu))]
    plan = choose_gather(problem)
    known = few_to_many(problem) and plan.weights_shared
    return [(_cost(plan, batch, input_size, gpu) if known else math.inf, plan)]


def _cost(plan: DirectPlan, batch: int, input_size: Sequence[int], gpu: Gpu) -> float:
    """Cycles of products and of memory traffic, one after the other, of the busiest multiprocessor.

    On an H100 it was 0.7 to 1.1 of the time of 17 layers of 1 to 4 channels with contiguous
    targets, least where memory bounds them.
    """
    problem = plan.problem
    source, target = problem.extents(input_size)
    outputs = batch * math.prod(target) * problem.target_channels
    inputs = batch * math.prod(source) * problem.source_channels
    products = outputs * problem.source_channels * math.prod(problem.geometry.kernel_size)
    traffic = problem.element_bytes * (outputs + inputs)
    (launch,) = plan.schedule(batch, input_size).launches
    busiest = div_up(launch.grid, gpu.multiprocessors) / launch.grid  # its share of the CTAs
    ieee = _IEEE if problem.arithmetic is Arithmetic.IEEE else 1.0
    return ieee * (products / _PRODUCTS + traffic / MEMORY_BYTES) * busiest


def choose_gather(problem: Problem) -> DirectPlan:
    """Forward or gradient by input: as many axes in registers as slots and taps allow."""
    g = problem.geometry
    if few_to_many(problem) and (wide := _few_to_many_plan(problem)) is not None:
        return wide
    block_channels = min(problem.target_channels, 4)
    blocks = [0, 0, 0]
    slots = block_channels
    shifts = 1
    for axis in (2, 1, 0):
        kernel, stride, dilation = g.kernel_size[axis], g.stride[axis], g.dilation[axis]
        if problem.forward:
            reach = div_up((kernel - 1) * dilation + 1, stride) + 1
            period = stride
        else:
            reach = (kernel - 1) * dilation + 1
            period = 1
        # Neighbouring destinations of one thread share source values. Not where neighbouring lanes
        # are stride positions apart already: that spreads a warp's addresses too far.
        block = 1
        while (
            axis == 2
            and (problem.target_channels_last or problem.forward)
            and period * block * 2 <= 4
            and slots * period * block < 16
        ):
            block *= 2
        reach += (block - 1) * (1 if problem.forward else stride)
        if slots * period * block > _MAX_SLOTS or shifts * reach > _MAX_SHIFTS:
            break
        blocks[axis] = block
        slots *= period * block
        shifts *= reach
    return DirectPlan(problem, (blocks[0], blocks[1], blocks[2]), block_channels)


def _few_to_many_plan(problem: Problem) -> DirectPlan | None:
    """A unit in which every value serves many channels; None if its taps are too many to unroll.

    Taps of D are a loop. In channels_last a layer of one tap does better with fewer channels a
    thread, whose neighbours then store side by side.
    """
    g, last = problem.geometry, problem.target_channels_last
    if last and math.prod(g.kernel_size) == 1:
        return None
    rows, channels = (2, 8) if last else (1, 16)
    shifts = 1
    for axis, block in ((1, rows), (2, 2)):
        reach = (g.kernel_size[axis] - 1) * g.dilation[axis] + 1
        shifts *= reach + (block - 1) * g.stride[axis]
    if shifts > _MAX_SHIFTS:
        return None
    return DirectPlan(problem, (0, rows, 2), min(problem.target_channels, channels))


@dataclass(frozen=True)
class DirectWgradPlan:
    """Gradient by weight of pairs of channels, one pair to a lane."""

    problem: Problem
    taps: Triple
    splits: int

    threads = 256

    @property
    def pairs(self) -> int:
        p = self.problem
        return p.geometry.groups * p.source_channels * p.target_channels

    @property
    def lanes(self) -> int:
        both = self.problem.source_channels_last and self.problem.target_channels_last
        return _lanes(both, self.pairs)

    @property
    def variants(self) -> int:
        tiles = [div_up(k, t) for k, t in zip(self._kernel, self.taps, strict=True)]
        return tiles[0] * tiles[1] * tiles[2] * div_up(self.pairs, self.lanes)

    @property
    def _kernel(self) -> Triple:
        return self.problem.geometry.kernel_size

    @property
    def variant_elements(self) -> int:
        return self.lanes * self.taps[0] * self.taps[1] * self.taps[2]

    @once
    def macros(self) -> tuple[tuple[str, str], ...]:
        p = self.problem
        own = macros(
            "CONVT3D_",
            lanes=self.lanes,
            threads=self.threads,
            **{f"taps{i}": n for i, n in enumerate(self.taps)},
        )
        return p.type_macros + geometry_macros(p.geometry) + problem_macros(p) + own

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        output_size = self.problem.geometry.output_size(input_size)
        rows = self.threads // self.lanes
        volume = input_size[0] * input_size[1] * input_size[2]
        splits = min(self.splits, div_up(volume, rows))
        file = "direct/wgrad.cu"
        product = Launch(
            KernelSpec(file, "convt3d_direct_wgrad", self.macros),
            self.variants * splits,
            self.threads,
            4 * self.threads // 32 * self.variant_elements,
            (
                "source",
                "target",
                "partial",
                *map(np.int32, (*input_size, *output_size, batch, splits)),
            ),
        )
        elements = self.variants * self.variant_elements
        reduce = KernelSpec(file, "convt3d_direct_reduce", self.macros)
        return in_two_passes(product, reduce, elements, splits, dependent=False)

    def describe(self) -> dict[str, str]:
        return {
            "kernel": "direct gradient by weight, CUDA cores",
            "tile": "x".join(map(str, self.taps)) + " taps a thread",
            "threads": f"{self.threads}, {self.lanes} neighbouring channel pairs",
            "splits": f"up to {self.splits}, {self.variants} pairs of tap box and channels",
        }


def split_taps(kernel: Triple, limit: int) -> Triple:
    """A box of at most `limit` taps: near-equal parts of D, then of H, then of W."""
    taps = list(kernel)
    for axis in (0, 1, 2):
        parts = 1
        while taps[0] * taps[1] * taps[2] > limit and parts < kernel[axis]:
            parts += 1
            taps[axis] = div_up(kernel[axis], parts)
    return (taps[0], taps[1], taps[2])


def choose_grad_weight(problem: Problem, gpu: Gpu) -> DirectWgradPlan:
    """Splits fill the GPU several times over, within the workspace limit."""
    taps = split_taps(problem.geometry.kernel_size, _MAX_TAPS)
    base = DirectWgradPlan(problem, taps, 1)
    splits = max(1, 8 * gpu.multiprocessors // base.variants)
    splits = min(splits, most_splits(base.variants * base.variant_elements), 1024)
    return DirectWgradPlan(problem, taps, splits)
