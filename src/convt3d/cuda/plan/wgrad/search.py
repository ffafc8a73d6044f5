"""Which kernels of ``wgrad/kernel.cu`` there are for a problem, and the best of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from convt3d.cuda.plan.search import by_cost
from convt3d.cuda.plan.split_k import MAX_REGISTERS
from convt3d.cuda.plan.wgrad.call import Fill
from convt3d.cuda.plan.wgrad.kernel import WARP_COLUMNS
from convt3d.cuda.plan.wgrad.plan import WgmmaWgradPlan
from convt3d.cuda.schedule import Gpu, Problem, div_up, round_up
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic

_ORDERS = ((0, 1, 2), (1, 0, 2))
_STAGES = (2, 3, 4)
_MOST_BLOCKS = 7
_IN_FLIGHT = {2: 190, 3: 126}  # registers, with addresses and words of the next fragment
_MAX_PHASE_SUMS = 96  # registers, of plans by phases
_FEW_SLICES = 4  # that may be one step
_MAX_BASES, _OTHER_BASES = 10, 2
_CLUSTER = 2
_L2_BYTES = 50 * 2**20

Costs = list[tuple[float, WgmmaWgradPlan]]


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why wgrad/kernel.cu cannot take a problem, or None."""
    if gpu.capability[0] != 9:
        return "wgmma needs compute capability 9.0"
    if problem.source_channels_last or problem.target_channels_last:
        return "both activations are contiguous"
    if problem.source_channels < 8 or problem.target_channels < 4:
        return "too few channels fill a product of wgmma"
    return None


# ---------------------------------------------------------------- all kernels


def candidates(problem: Problem, gpu: Gpu) -> Iterator[WgmmaWgradPlan]:
    """Every sensible kernel, in no order, but for stages, fragments and whole samples."""
    g = problem.geometry
    fragments = 4 if problem.arithmetic is Arithmetic.IEEE else 2
    # Whole rows bring positions along W that no tap uses, which 16-bit copies would only avoid one
    # by one.
    unused = g.kernel_size[2] == 1 or math.gcd(g.stride[2], g.dilation[2]) > 1
    sparse = unused and g.stride[2] > 1 and problem.element_bytes > 2
    for (order, taps), whole_rows in itertools.product(_columns(problem), (False, True)):
        natural = order == _ORDERS[0]
        if whole_rows and sparse and not natural:
            continue
        for tile_n, tile_m in _channel_tiles(problem, taps):
            tiles = (taps > 1, tile_n, tile_m, 1, _STAGES[0], whole_rows, fragments)
            for plan in _blocks(WgmmaWgradPlan(problem, order, *tiles, gpu=gpu)):
                if not (whole_rows and sparse):
                    yield plan
                if whole_rows and natural:
                    yield replace(plan, runs=True)
                    if _by_phases(plan):
                        yield replace(plan, phases=True, runs=True)
                if whole_rows and _three(plan):
                    yield replace(plan, consumers=3)


def _columns(problem: Problem) -> Iterator[tuple[Triple, int]]:
    """Orders of the axes, and how many taps along axis 1 are columns."""
    g = problem.geometry
    for order in _ORDERS:
        kernel, stride, dilation = (v[order[1]] for v in (g.kernel_size, g.stride, g.dilation))
        across = div_up(kernel, stride // dilation) if stride % dilation == 0 else 1
        if order == _ORDERS[0]:
            yield order, 1
        elif kernel == g.kernel_size[1]:
            continue  # going along D or H only matters for which taps are columns
        if across > 1:
            yield order, across


def _channel_tiles(problem: Problem, taps: int) -> Iterator[tuple[int, int]]:
    """Equal shares of both tensors' channels, where so many taps are columns.

    Those of x are multiples of 8, those of the gradient of what an octet of rows has.
    """
    g, channels = problem.geometry, round_up(problem.source_channels, 8)
    columns = {round_up(div_up(channels, n), 8) for n in range(1, 9)}
    unit = g.stride[2] // math.gcd(g.stride[2], g.dilation[2])
    octet = 8 // math.gcd(unit, 4) if g.kernel_size[2] > 1 else 8
    rows = {round_up(div_up(problem.target_channels, n), octet) for n in (1, 2, 4, 8, 16, 32, 64)}
    rows |= {
        problem.target_channels // n for n in (5, 10, 20) if problem.target_channels % (8 * n) == 0
    }
    for tile_n, tile_m in itertools.product(sorted(columns), sorted(rows)):
        few = tile_n * taps < 32 and tile_n < channels
        used = tile_m * math.prod(g.kernel_size) >= 128 or tile_m >= 8  # of a block of rows
        if tile_n * taps <= 256 and not few and used:
            yield tile_n, tile_m


def _block_registers(plan: WgmmaWgradPlan) -> int:
    """Of a block: accumulators, two fragments in flight, row addresses."""
    if not plan.ieee:
        return plan.columns // 2 + 14
    return plan.columns + (16 if plan.columns <= WARP_COLUMNS else 38)


def _blocks(plan: WgmmaWgradPlan) -> Iterator[WgmmaWgradPlan]:
    """The plan with ever more blocks, of which rows make use."""
    row_tiles = math.inf
    most = min(_MOST_BLOCKS, MAX_REGISTERS[2] // _block_registers(plan))
    for blocks in range(1, most + 1):
        more = replace(plan, blocks=blocks)
        if more.row_tiles < row_tiles:
            row_tiles = more.row_tiles
            yield more


def _three(plan: WgmmaWgradPlan) -> bool:
    """Whether three consumers have a block of many columns each: fewer CTAs read the gradient."""
    three = plan.blocks == 1 and plan.row_blocks == 3 and not plan.ieee
    return three and _block_registers(plan) <= MAX_REGISTERS[3]


def _by_phases(plan: WgmmaWgradPlan) -> bool:
    """Whether fragments of both phases of W serve all taps: few channels, and sums in registers."""
    two = plan.stride[2] == 2 and plan.dilation[2] == 1 and plan.padding[2] < plan.taps[2]
    few = plan.channel_tile_n == 8 and plan.channel_tile_m == 8 and plan.row_tiles == 1
    arithmetic = plan.half or plan.warp_products
    sums = 4 * plan.taps[0] * plan.kernel_size[1] * plan.shifts
    near = plan.padding[2] <= 8 and plan.taps[2] - 1 - plan.padding[2] <= 9
    return two and few and arithmetic and plan.column_taps and near and sums <= _MAX_PHASE_SUMS


# ---------------------------------------------------------------- the best of them


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> Costs:
    """Candidates for these input extents with their costs, cheapest first.

    Planning is part of a first call: a rough look at all kernels comes before every tile, stage and
    fragment of some.
    """
    if refusal(problem, gpu) is not None:
        return []
    rough = by_cost(_rough(problem, batch, input_size, gpu))
    by_phases = [item for item in rough if item[1].phases]
    rough = [item for item in rough if not item[1].phases]
    # Tensor maps bring the same bytes with a hundredth of the instructions.
    mapped = [item for item in rough if _mapped(item[1], input_size)]
    if mapped:
        others = [item for item in rough if not _mapped(item[1], input_size)]
        bases = mapped[:_MAX_BASES] + others[:_OTHER_BASES]
        bases += _of_whole_sums(rough, batch, input_size, gpu) + by_phases
        found = _priced(bases, batch, input_size)
        if found:
            return found
    return _priced(rough[:_MAX_BASES] + by_phases, batch, input_size)


def _mapped(plan: WgmmaWgradPlan, input_size: Sequence[int]) -> bool:
    fill = plan.fill(input_size)
    return fill is not None and fill.mapped


def _rough(
    problem: Problem, batch: int, input_size: Sequence[int], gpu: Gpu
) -> Iterator[tuple[float, WgmmaWgradPlan]]:
    for plan in candidates(problem, gpu):
        # Rows of whole pieces come by boxes (monai_64_32_k3 0.134 ms, one copy a channel 0.190).
        joined = plan.fill(input_size) is Fill.JOINED
        if joined and _mapped(replace(plan, runs=False), input_size):
            continue
        cost = plan.cost(batch, input_size, rough=True)
        if _may_take_samples(plan, input_size):
            samples = replace(plan, whole_samples=True)
            cost = min(cost, samples.cost(batch, input_size, rough=True))
        yield cost, plan


def _may_take_samples(plan: WgmmaWgradPlan, input_size: Sequence[int]) -> bool:
    return not plan.whole_rows and input_size[plan.order[0]] <= _FEW_SLICES


def _of_whole_sums(rough: Costs, batch: int, input_size: Sequence[int], gpu: Gpu) -> Costs:
    """Plans of whole sums, of a CTA or of a cluster: the few cheapest of each."""
    own = [item for item in rough if item[1].row_tiles == 1 and not item[1].runs]

    def filling(cluster: int) -> Costs:
        """Those whose sums fill the GPU once."""
        mp = gpu.multiprocessors
        return [item for item in own if mp < 2 * cluster * item[1].tiles <= 2 * mp]

    clusters = [
        replace(plan, cluster=_CLUSTER)
        for _, plan in filling(_CLUSTER)
        if plan.whole_rows and not (plan.column_taps or plan.warp_products)
    ]
    of_clusters = [(plan.cost(batch, input_size, rough=True), plan) for plan in clusters]
    found: Costs = []
    for items in (filling(1), of_clusters):
        possible = [item for item in items if item[0] < math.inf]
        found += by_cost(possible)[:_OTHER_BASES]
    return found


def _priced(bases: Costs, batch: int, input_size: Sequence[int]) -> Costs:
    """All stages, fragments and steps of these kernels that can be, cheapest first."""
    found: Costs = []
    for _, plan in bases:
        wholes = (False, True) if _may_take_samples(plan, input_size) else (False,)
        of_stages = [
            replace(plan, fragments=fragments, whole_samples=whole).deeper(
                batch, input_size, _STAGES
            )
            for fragments, whole in itertools.product(_fragments(plan), wholes)
        ]
        found += itertools.chain(*zip(*of_stages, strict=True))  # of equal costs, by stages
    possible = [item for item in found if item[0] < math.inf]
    return sorted(possible, key=lambda item: (item[0], _depth(item[1], input_size)))


def _fragments(plan: WgmmaWgradPlan) -> tuple[int, ...]:
    """Numbers of fragments in flight that leave enough registers."""
    if plan.ieee:
        return (4,)
    # Accumulators, fragments, addresses, words of the next fragment.
    each = plan.columns // 2 + 4 * 4 + 6 + (8 if plan.half else 0 if plan.whole_rows else 4)
    return (2, 4) if plan.blocks * each <= _IN_FLIGHT[plan.consumers] else (2,)


def _depth(plan: WgmmaWgradPlan, input_size: Sequence[int]) -> int:
    """Which ring to take of those that cost the same, where one thread produces.

    The deepest of tensors that L2 holds; of others, more in flight was slower (pangu_384_5 0.272 ms
    with three stages and 0.319 with four).
    """
    g, fill = plan.problem.geometry, plan.fill(input_size)
    elements = g.in_channels * math.prod(input_size)
    elements += g.out_channels * math.prod(g.output_size(input_size))
    small = 2 * elements * plan.problem.element_bytes < _L2_BYTES
    return -plan.stages if fill is not None and fill.swizzled and small else plan.stages
