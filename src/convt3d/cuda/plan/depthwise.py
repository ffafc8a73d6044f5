"""Plans of ``depthwise``: groups of few channels, bounded by memory.

A thread sweeps along D and keeps in registers what units in progress need, so the choice is how
much of the (H, W) plane it owns: the more, the fewer loads an output, and the fewer threads fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.axes import Axis
from convt3d.cuda.plan.once import once
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

# Registers that 128 threads may take for so many CTAs on a multiprocessor.
_REGISTERS = {3: 168, 4: 128, 5: 96}
# Products of a step, or of the steps unrolled, beyond which code outgrows the instruction cache.
_MAX_STEP = 2048
_MAX_UNROLLED = 660
_MAX_SHARED = 40 * 1024
_MAX_TAPS = 64
_STAGED_TAPS = 16  # of the sums of all threads, added up at a time


@dataclass(frozen=True)
class SweptAxis(Axis):
    """One axis of a unit of ``block`` periods that threads sweep along or own."""

    @property
    def ages(self) -> int:
        """Units that a sweeping thread has in progress."""
        return div_up(self.shifts, self.unit_source)

    @property
    def in_progress(self) -> int:
        """Units of which a sweeping thread has the same slot in progress."""
        return max(self._spans)

    @property
    def held_slots(self) -> int:
        """Slots in progress at once, over the units of all ages."""
        return sum(self._spans)

    @once
    def _spans(self) -> tuple[int, ...]:
        low, step = self.reach[0], self.unit_source
        return tuple(
            (shifts[-1] - low) // step - (shifts[0] - low) // step + 1 if shifts else 0
            for shifts in self.slot_shifts
        )


def _axes(problem: Problem, blocks: Triple, kernel0: int | None = None) -> tuple[SweptAxis, ...]:
    g = problem.geometry
    kernels = (kernel0 or g.kernel_size[0], *g.kernel_size[1:])
    return tuple(
        SweptAxis(k, s, p, d, problem.forward, block)
        for k, s, p, d, block in zip(kernels, g.stride, g.padding, g.dilation, blocks, strict=True)
    )


def _lanes(channels_last: bool, blocks: int) -> int:
    """Neighbouring threads on neighbouring channels: at most a warp, the last group full."""
    return div_up(blocks, div_up(blocks, 32)) if channels_last else 1


@dataclass(frozen=True)
class DepthwisePlan:
    """Forward or gradient by input; a thread owns ``block1`` x ``block2`` periods of the plane."""

    problem: Problem
    block1: int
    block2: int
    block_channels: int
    min_blocks: int  # CTAs of a multiprocessor that registers must leave room for
    ctas: int  # that a launch is cut into, if D allows
    packed: int = 1  # groups of one channel in a block
    in_place: bool = False  # sums stay in place, in steps of unrolled code

    threads = 128

    @once
    def axes(self) -> tuple[SweptAxis, ...]:
        return _axes(self.problem, (1, self.block1, self.block2))

    @property
    def channel_blocks(self) -> int:
        per_group = div_up(self.problem.target_channels, self.block_channels)
        return self.problem.geometry.groups // self.packed * per_group

    @property
    def lanes(self) -> int:
        return _lanes(self.problem.target_channels_last, self.channel_blocks)

    @property
    def lane_groups(self) -> int:
        return div_up(self.channel_blocks, self.lanes)

    @property
    def least_steps(self) -> int:
        """Units of D in a segment, so that taking in what it shares with its neighbour pays."""
        return 4 * self.axes[0].ages

    @property
    def _whole_blocks(self) -> bool:
        """Whether the channels of a block leave as one vector."""
        whole = self.packed > 1 or self.problem.target_channels % self.block_channels == 0
        return whole and self.block_channels != 3

    @property
    def shared_bytes(self) -> int:
        g = self.problem.geometry
        row = 4 * div_up(g.kernel_size[2] * self.block_channels, 4)
        taps = g.kernel_size[0] * g.kernel_size[1]
        weights = self.problem.source_channels * taps * self.lanes * row
        staging = self.threads * self.axes[1].slots * self.axes[2].slots
        return 4 * (weights + (0 if self.problem.target_channels_last else staging))

    @property
    def step_products(self) -> int:
        kd, kh, kw = self.problem.geometry.kernel_size
        each = kd * kh * kw * self.block1 * self.block2
        return each * self.block_channels * self.problem.source_channels

    @property
    def registers(self) -> int:
        """Estimated registers of a thread: sums, one plane of values and one in flight."""
        a0, a1, a2 = self.axes
        sums = a0.held_slots * a1.slots * a2.slots * self.block_channels
        words = self.packed * a1.shifts * a2.shifts
        raw = div_up(words * self.problem.element_bytes, 4) if self.packed > 1 else words
        last = self.problem.source_channels_last or self.problem.target_channels_last
        addresses = (12 if self.packed == 1 else 8) if last else 0
        return sums + words + raw + addresses + 36

    @property
    def accesses(self) -> int:
        """Loads and stores of a thread in one step."""
        p, (a0, a1, a2) = self.problem, self.axes
        contiguous = not p.source_channels_last and not p.target_channels_last
        row = _row_accesses(a2, p.element_bytes, contiguous)
        whole = contiguous and a2.slots & (a2.slots - 1) == 0
        stores = a0.slots * a1.slots * (1 if whole else a2.slots)
        if not (p.target_channels_last and self._whole_blocks):
            stores *= self.block_channels
        return a0.unit_source * a1.shifts * row * p.source_channels + stores

    @once
    def macros(self) -> tuple[tuple[str, str], ...]:
        p = self.problem
        return (
            p.type_macros
            + geometry_macros(p.geometry)
            + problem_macros(p)
            + macros(
                "CONVT3D_",
                block_channels=self.block_channels,
                packed=self.packed,
                in_place=self.in_place,
                lanes=self.lanes,
                weights_shared=True,
                block0=1,
                block1=self.block1,
                block2=self.block2,
                min_blocks=self.min_blocks,
            )
        )

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        source, target = self.problem.extents(input_size)
        slots = [axis.slots for axis in self.axes]
        units = [div_up(n, count) for n, count in zip(target, slots, strict=True)]
        tiles = div_up(units[1] * units[2], self.threads // self.lanes)
        columns = self.lane_groups * tiles * batch
        segments = min(div_up(self.ctas, columns), div_up(units[0], self.least_steps))
        steps = div_up(units[0], segments)
        launch = Launch(
            KernelSpec("depthwise/conv.cu", "convt3d_depthwise", self.macros),
            columns * div_up(units[0], steps),
            self.threads,
            self.shared_bytes,
            (
                "source",
                "weight",
                "bias",
                "target",
                *map(np.int32, (*source, *target, *units, steps)),
                *WEIGHT_STRIDES,
            ),
        )
        return Schedule((launch,))

    def describe(self) -> dict[str, str]:
        return {
            "kernel": "depthwise, a sweep along D, CUDA cores",
            "unit": f"{self.block1}x{self.block2} periods of (H, W) x {self.block_channels} "
            "channels a thread",
            "threads": f"{self.threads}, {self.lanes} neighbouring channel blocks",
            "shared memory": f"{self.shared_bytes} bytes",
        }


@dataclass(frozen=True)
class DepthwiseWgradPlan:
    """Gradient by weight of pairs of channels; a thread owns a block of x positions."""

    problem: Problem
    taps0: int
    block1: int
    block2: int
    min_blocks: int
    ctas: int

    threads = 128

    @once
    def axes(self) -> tuple[SweptAxis, ...]:
        return _axes(self.problem, (1, self.block1, self.block2), self.taps0)

    @property
    def pairs(self) -> int:
        p = self.problem
        return p.geometry.groups * p.source_channels * p.target_channels

    @property
    def lanes(self) -> int:
        both = self.problem.source_channels_last and self.problem.target_channels_last
        return _lanes(both, self.pairs)

    @property
    def taps(self) -> int:
        _, kh, kw = self.problem.geometry.kernel_size
        return self.taps0 * kh * kw

    @property
    def variants(self) -> int:
        boxes = div_up(self.problem.geometry.kernel_size[0], self.taps0)
        return boxes * div_up(self.pairs, self.lanes)

    @property
    def variant_elements(self) -> int:
        return self.lanes * self.taps

    @property
    def most_splits(self) -> int:
        wanted = div_up(self.ctas, self.variants)
        return min(wanted, most_splits(self.variants * self.variant_elements))

    @property
    def least_steps(self) -> int:
        return 4 * self.axes[0].ages

    @property
    def shared_bytes(self) -> int:
        return 4 * _STAGED_TAPS * (self.threads + 1)

    @property
    def step_products(self) -> int:
        return self.taps * self.block1 * self.block2

    @property
    def registers(self) -> int:
        a0, a1, a2 = self.axes
        own = (a0.ages + 1) * self.block1 * self.block2
        return self.taps + own + 3 * a1.shifts * a2.shifts // 2 + 36

    @property
    def accesses(self) -> int:
        """Loads of a thread in one step."""
        p, (a0, a1, a2) = self.problem, self.axes
        contiguous = not p.source_channels_last and not p.target_channels_last
        row = _row_accesses(a2, p.element_bytes, contiguous)
        return a0.unit_source * a1.shifts * row + self.block1

    @once
    def macros(self) -> tuple[tuple[str, str], ...]:
        p, g = self.problem, self.problem.geometry
        return (
            p.type_macros
            + geometry_macros(g)
            + problem_macros(p)
            + macros(
                "CONVT3D_",
                lanes=self.lanes,
                threads=self.threads,
                taps0=self.taps0,
                taps1=g.kernel_size[1],
                taps2=g.kernel_size[2],
                block1=self.block1,
                block2=self.block2,
                min_blocks=self.min_blocks,
            )
        )

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        output_size = self.problem.geometry.output_size(input_size)
        units = [div_up(input_size[1], self.block1), div_up(input_size[2], self.block2)]
        tiles = div_up(units[0] * units[1], self.threads // self.lanes) * batch
        segments = min(
            div_up(self.ctas, self.variants * tiles), div_up(input_size[0], self.least_steps)
        )
        steps = div_up(input_size[0], segments)
        items = tiles * div_up(input_size[0], steps)
        splits = div_up(items, div_up(items, self.most_splits))
        file = "depthwise/wgrad.cu"
        product = Launch(
            KernelSpec(file, "convt3d_depthwise_wgrad", self.macros),
            self.variants * splits,
            self.threads,
            self.shared_bytes,
            (
                "source",
                "target",
                "partial",
                *map(np.int32, (*input_size, *output_size, *units, steps, batch, splits)),
            ),
        )
        elements = self.variants * self.variant_elements
        reduce = KernelSpec(file, "convt3d_direct_reduce", self.macros)
        return in_two_passes(product, reduce, elements, splits, dependent=False)

    def describe(self) -> dict[str, str]:
        return {
            "kernel": "depthwise gradient by weight, a sweep along D, CUDA cores",
            "tile": f"{self.block1}x{self.block2} positions of (H, W), {self.taps} taps a thread",
            "threads": f"{self.threads}, {self.lanes} neighbouring channel pairs",
            "splits": f"up to {self.most_splits}, {self.variants} pairs of tap box and channels",
        }


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, Plan]]:
    """Plans of a problem, best first, with their accesses; none where registers have no room."""
    plans: Iterable[DepthwisePlan | DepthwiseWgradPlan] = _gather_plans(problem, gpu)
    if problem.operation == "grad_weight":
        plans = _grad_weight_plans(problem, gpu)
    return [(_key(plan)[1], plan) for plan in sorted(plans, key=_key)]


def _key(plan: DepthwisePlan | DepthwiseWgradPlan) -> tuple[bool, float, int]:
    """Loads and stores for each product.

    Of equals, units along H are first: they share more addresses than units along W.
    """
    suited = plan.packed == _suited_pack(plan.problem) if isinstance(plan, DepthwisePlan) else True
    each = plan.accesses / plan.step_products
    return (not suited, each, -plan.block1)


def _suited_pack(problem: Problem) -> int:
    """Groups in a block: two where loads or stores are too small, if there can be two."""
    one_each = problem.source_channels == problem.target_channels == 1
    both_last = problem.source_channels_last and problem.target_channels_last
    if not one_each or not both_last or problem.geometry.groups % 2:
        return 1
    widens = problem.forward and max(problem.geometry.stride) > 1
    return 2 if problem.element_bytes == 2 or widens else 1


def _row_accesses(axis: SweptAxis, element_bytes: int, contiguous: bool) -> int:
    """Loads of one source row: aligned vectors, single positions alone (depthwise/plane.cuh)."""
    if not contiguous:
        return axis.shifts
    vector = math.gcd(axis.unit_source, 16 // element_bytes)
    low, high = axis.reach
    return high // vector - low // vector + 1


def _blocks_of_w(problem: Problem) -> Iterator[int]:
    """Periods along W whose row, or whose source, is 16 bytes, and halves of them."""
    stride = problem.geometry.stride[2]
    block = 1
    while 2 * block * stride * problem.element_bytes <= 16:
        block *= 2
    while block:
        yield block
        block //= 2


def _min_blocks(registers: int) -> int | None:
    fitting = [blocks for blocks, most in _REGISTERS.items() if registers <= most]
    return max(fitting, default=None)


def _gather_plans(problem: Problem, gpu: Gpu) -> Iterator[DepthwisePlan]:
    packs = {1, _suited_pack(problem)}
    last = problem.source_channels_last or problem.target_channels_last
    stride = problem.geometry.stride
    # Sums that stay in place save moves; elsewhere they cost registers that others need more.
    steps = problem.forward or stride[0] == 1
    ctas = 32 if problem.forward and problem.element_bytes == 4 and not last else 16
    ctas *= gpu.multiprocessors
    for packed, block2, block1 in itertools.product(packs, _blocks_of_w(problem), (4, 2, 1)):
        block_channels = max(packed, min(problem.target_channels, 4))
        plan = DepthwisePlan(problem, block1, block2, block_channels, 3, ctas, packed=packed)
        in_progress = plan.axes[0].in_progress
        unrolled = in_progress * plan.step_products // problem.source_channels
        most = _MAX_UNROLLED if problem.element_bytes == 4 else 2 * _MAX_UNROLLED
        alone = block_channels == 1 and not last
        in_place = steps and alone and in_progress > 1 and unrolled <= most
        saved = 8 if in_place and problem.element_bytes == 2 else 0
        blocks = _min_blocks(plan.registers - saved)
        scalars = not last and not problem.forward and stride[2] > 1 and stride[2] % 2 == 1
        if (
            blocks is None
            or plan.step_products > _MAX_STEP * problem.source_channels
            or plan.shared_bytes > _MAX_SHARED
            or (scalars and block1 * block2 > 1)
        ):
            continue
        if last and packed == 1 and not problem.forward and plan.registers > 110:
            blocks = 3
        yield replace(plan, min_blocks=blocks, in_place=in_place)


def _grad_weight_plans(problem: Problem, gpu: Gpu) -> Iterator[DepthwiseWgradPlan]:
    kd, kh, kw = problem.geometry.kernel_size
    if kh * kw > _MAX_TAPS:
        return
    boxes = div_up(kd * kh * kw, _MAX_TAPS)
    while kh * kw * div_up(kd, boxes) > _MAX_TAPS:
        boxes += 1
    taps0 = div_up(kd, boxes)
    for block2 in _blocks_of_w(problem):
        for block1 in (4, 2, 1):
            plan = DepthwiseWgradPlan(problem, taps0, block1, block2, 3, 16 * gpu.multiprocessors)
            blocks = _min_blocks(plan.registers)
            if blocks is None or plan.step_products > _MAX_STEP:
                continue
            yield replace(plan, min_blocks=blocks)
