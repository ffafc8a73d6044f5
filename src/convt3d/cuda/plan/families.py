"""The kernel families, and in which order they are asked for plans of a problem.

A family is a module of this folder with ``ranked(problem, batch, input_size, gpu, below)``: its
plans for these extents with their costs, cheapest first; none where it declines. Costs are about
cycles of the whole call, so those of families that :func:`order` leaves to them can be compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from convt3d.cuda import codec
from convt3d.cuda.plan import (
    ampere_gather,
    ampere_patch,
    ampere_strided,
    ampere_strided_rows,
    ampere_strided_slices,
    ampere_wgrad,
    col2im,
    depthwise,
    direct,
    ndhwc,
    patch,
    phases,
    rows,
    strided_dgrad,
    sweep,
    transposed,
    wgrad,
    wgrad_ndhwc,
)
from convt3d.cuda.plan.cells import CellProduct
from convt3d.cuda.plan.search import by_cost
from convt3d.cuda.schedule import Gpu, Plan, Problem

PLANS: tuple[type[Plan], ...] = (
    direct.DirectPlan,
    direct.DirectWgradPlan,
    ampere_patch.PatchPlan,
    ampere_gather.GatherPlan,
    ampere_wgrad.WgradPlan,
    depthwise.DepthwisePlan,
    depthwise.DepthwiseWgradPlan,
    col2im.Col2imPlan,
    ampere_strided.StridedPlan,
    ampere_strided_rows.StridedRowsPlan,
    ampere_strided_slices.StridedSlicesPlan,
    patch.WgmmaPatchPlan,
    wgrad.WgmmaWgradPlan,
    wgrad_ndhwc.WgmmaWgradNdhwcPlan,
    ndhwc.WgmmaNdhwcPlan,
    phases.WgmmaPhasesPlan,
    transposed.WgmmaTransposedPlan,
    sweep.WgmmaSweepPlan,
    rows.WgmmaRowsPlan,
    strided_dgrad.WgmmaStridedDgradPlan,
)
"""The classes of all plans."""

_TILES: tuple[type, ...] = (
    ampere_patch.Tile,
    ampere_gather.Tile,
    col2im.Col2imTile,
    ampere_strided.Tile,
    ampere_strided_rows.RowsTile,
    ampere_strided_slices.SlicesTile,
    patch.Tile,
    ndhwc.NdhwcTile,
    phases.PhasesTile,
    transposed.TransposedTile,
    sweep.SweepTile,
    rows.RowsTile,
    strided_dgrad.DgradTile,
    wgrad_ndhwc.Tile,
)
codec.know(PLANS, _TILES)

Ranked = Callable[[Problem, int, Sequence[int], Gpu, float | None], Sequence[tuple[float, Plan]]]
Groups = tuple[tuple[Ranked, ...], ...]


@dataclass(frozen=True)
class Order:
    """Groups of families that are asked one after the other, then all that are compared.

    The plans of a group are compared by their costs. A group is passed over where its first family
    has none.
    """

    first: Groups
    compared: tuple[Ranked, ...]


_CONVOLUTIONS: tuple[Ranked, ...] = (
    col2im.ranked,
    sweep.ranked,
    ampere_strided.ranked,
    ampere_strided_rows.ranked,
    ampere_strided_slices.ranked,
    rows.ranked,
    phases.ranked,
    transposed.ranked,
    strided_dgrad.ranked,
    ndhwc.ranked,
    ampere_gather.ranked,
)
_LONG: tuple[Ranked, ...] = (sweep.ranked, ndhwc.ranked, ampere_gather.ranked)
_BY_WEIGHT: tuple[Ranked, ...] = (wgrad.ranked, wgrad_ndhwc.ranked, ampere_wgrad.ranked)
_LATE = (sweep.ranked, phases.ranked, ampere_gather.ranked, ampere_wgrad.ranked)
"""Families that take long to ask, and less where others already cost less than they could."""
_FEW_CHANNELS = 32
_HALF_A_TILE = 8  # columns, of the narrowest tile of ndhwc
_FEW_TAPS, _LONG_KERNEL = 3, 5
_MANY_COLUMNS, _FEW_CELL_TAPS = 128, 8  # produced channels, and taps of a kernel == stride layer
# Along W: warps then copy the weights. mma.sync took 0.44 to 0.85 times as long (two layers on an
# H200, TF32 and IEEE); of 3 to 6 slots, whose weights are copied too, 1.09 in the mean of 15.
_MANY_SLOTS = 16


def order(problem: Problem) -> Order:
    """In which order families are asked.

    Where some come first, that choice took 0.6 to 0.98 times as long on an H200, in the mean over
    such problems, as that of the least cost. docs/performance.md says how far choices are from the
    best of all on layers drawn at random.
    """
    first: Groups = ()
    compared = _CONVOLUTIONS
    if problem.operation == "grad_weight":
        compared = _BY_WEIGHT
    elif ampere_patch.refusal(problem) is None:
        first = _kernel_equals_stride(problem)
    elif problem.element_bytes == 2 and problem.geometry.groups == 1:
        first, compared = _dense_16_bit(problem)
    if direct.suits(problem):
        first = ((depthwise.ranked,), (direct.ranked,), *first)
    elif direct.few_to_many(problem):
        # Memory bounds a layer of one tap. Matrix units are better at kernel == stride of more.
        if max(problem.geometry.kernel_size) == 1:
            first = ((direct.ranked,), *first)
        elif not first:
            compared = (direct.ranked, *compared)
    return Order(first, compared)


def _kernel_equals_stride(problem: Problem) -> Groups:
    """Of kernel == stride layers."""
    # One or two columns leave most of a warpgroup's product empty, 16 channels half of a stage.
    few = problem.target_channels <= 2 or problem.source_channels <= 16
    wide = problem.geometry.stride[2] >= _MANY_SLOTS and not problem.target_channels_last
    one_tap = max(problem.geometry.kernel_size) == 1
    if problem.element_bytes == 2:
        mma_sync = few and CellProduct(problem, None).channel_lines
    else:
        mma_sync = wide and problem.forward
    if mma_sync:
        return (ampere_patch.ranked,), (patch.ranked,)
    # For what patch declines: lines that start at any address, and groups.
    declined = (ampere_patch.ranked, ndhwc.ranked)
    dense_last = problem.channels_last and problem.geometry.groups == 1
    # Few channels, but many columns: five layers took 0.42 to 0.91 times as long; of 64 taps 1.6.
    taps = math.prod(problem.geometry.kernel_size)
    columns = problem.target_channels > _MANY_COLUMNS and taps <= _FEW_CELL_TAPS
    many = one_tap or problem.source_channels > _FEW_CHANNELS or columns
    if dense_last and not problem.forward and many:
        return (patch.ranked,), (ndhwc.ranked,), declined
    return (patch.ranked,), declined


def _dense_16_bit(problem: Problem) -> tuple[Groups, tuple[Ranked, ...]]:
    """Of dense layers in 16 bits: what is asked first, and what is compared."""
    g = problem.geometry
    if max(g.stride) == 1:
        return (), _CONVOLUTIONS
    if not (problem.source_channels_last and problem.target_channels_last):
        # It took 0.62 of the time of what costs least, in 16 layers.
        return () if problem.forward else ((strided_dgrad.ranked, ndhwc.ranked),), _CONVOLUTIONS
    if problem.forward:
        # Phases of one or two taps, half of whose columns are empty: 7 layers took 0.6 times as
        # long; those of more taps 1.2 times.
        few = problem.target_channels <= _HALF_A_TILE and max(g.kernel_size) <= _FEW_TAPS
        return ((ampere_strided.ranked, col2im.ranked),) if few else (), _CONVOLUTIONS
    # Many taps of a phase share what the sweep loads.
    return (), _LONG if max(g.kernel_size) >= _LONG_KERNEL else _CONVOLUTIONS


def ranked_plans(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    *,
    first_only: bool = False,
) -> list[Plan]:
    """All plans that could run, in the order of :func:`order`.

    Args:
        problem, batch, input_size: what to run; ``input_size`` is (D, H, W) of the layer's input.
        gpu: the GPU to plan for.
        first_only: whether all but the first may be missing.
    """
    families = order(problem)
    found: list[Plan] = []
    asked: set[Ranked] = set()

    def ask(group: Sequence[Ranked], *, leading: bool) -> list[Plan]:
        """Plans of a group's families that were not asked before, cheapest first."""
        below = math.inf if first_only else None
        every: dict[Ranked, Sequence[tuple[float, Plan]]]
        every = {ranked: () for ranked in group if ranked not in asked}
        for ranked in [*every] if leading else sorted(every, key=_LATE.__contains__):
            asked.add(ranked)
            every[ranked] = costs = ranked(problem, batch, input_size, gpu, below)
            if leading and not every[group[0]]:
                return []
            if below is not None:
                below = min([below, *(cost for cost, _ in costs)])
        return [plan for _, plan in by_cost(itertools.chain(*every.values()))]

    for group in families.first:
        found += ask(group, leading=True)
        if first_only and found:
            return found
    found += ask(families.compared, leading=False)
    return found or ask((direct.ranked,), leading=True)


def gains_by_tensors(plan: Plan) -> bool:
    """Whether an epilogue that reads a tensor of the output's shape saves time.

    An addition and ReLU in the epilogue, beside a pass of their own, of 11 layers on an H200: the
    strided gradient by input 1.07 and 1.21 times as fast, the sweep over channels_last float32 1.03
    to 1.14 (one layer 0.88). All others 0.07 to 1.12, most of them slower: they read each element
    where its sum happens to lie, and wait for it.
    """
    if isinstance(plan, sweep.WgmmaSweepPlan):
        return plan.problem.target_channels_last and plan.problem.element_bytes == 4
    last = plan.problem.source_channels_last
    return isinstance(plan, strided_dgrad.WgmmaStridedDgradPlan) and not last
