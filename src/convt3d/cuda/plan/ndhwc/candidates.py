"""Which plans of ndhwc/kernel.cu there are for a problem and its extents."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from convt3d.cuda.plan.axes import phased_axes
from convt3d.cuda.plan.launches import MOST_COPIED, copy_refusal
from convt3d.cuda.plan.ndhwc.cost import least_cycles
from convt3d.cuda.plan.ndhwc.layout import NdhwcTile
from convt3d.cuda.plan.ndhwc.plan import WgmmaNdhwcPlan
from convt3d.cuda.plan.search import by_cost, cheapest, with_tile
from convt3d.cuda.plan.split_k import clusters_at_once
from convt3d.cuda.plan.unit_tiles import deepest
from convt3d.cuda.plan.warpgroups import ONLY_HOPPER, ROUNDED, column_tiles
from convt3d.cuda.schedule import Gpu, Problem, div_up

# Weight stages and source boxes, deepest first; there is room for barriers of eight.
_PIPELINES = ((4, 4), (4, 3), (3, 3), (4, 2), (3, 2), (2, 2))
_MAX_PLANS = 24
_MOST_CLUSTER = 8  # CTAs that any GPU of this generation runs together
_CLUSTERS = 3  # of the largest that are compared
_MOST_DIRECT = 6  # of the cheapest that are compared on weights as they are, too
# Batches and extents of units whose tiles may have few positions of many samples.
_MANY_SAMPLES = 16
_FEW_POSITIONS = 9

Base = tuple[WgmmaNdhwcPlan, bool]
"""A kernel but for its pipeline, and whether all of its weights stay in shared memory."""


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why ndhwc/kernel.cu cannot take a problem, or None."""
    g = problem.geometry
    vector = 16 // problem.element_bytes
    if gpu.capability[0] != 9:
        return ONLY_HOPPER
    if problem.operation == "grad_weight":
        return "the gradient by weight is another product"
    if problem.arithmetic not in ROUNDED:
        return f"{problem.arithmetic.value} is not among its arithmetics"
    if not (problem.source_channels_last and problem.target_channels_last):
        if g.groups > 1:
            return "groups of contiguous tensors have kernels of their own"
        if not all(n for axis in phased_axes(problem, 3) for n in axis.phase_taps):
            return "outputs without taps are stored where the target is channels_last"
    if max(g.stride) == 1:
        if g.groups > 1:
            return "stride 1 in groups is left to the sweep"
        if not problem.forward and max(g.kernel_size) > 1:
            return "gradients of several taps are forward passes at stride 1"
    if problem.source_channels * g.groups % vector or problem.target_channels % vector:
        return "channels are moved as 16 bytes"
    if g.groups > 1 and problem.source_channels % (2 * vector) and not _by_warps(problem):
        return "products would run into the next group"
    return copy_refusal(problem)


def _by_warps(problem: Problem) -> bool:
    """Whether groups are of eight channels, which products of a warp take."""
    return (
        problem.forward
        and problem.element_bytes == 2
        and problem.geometry.groups > 1
        and problem.source_channels == 8
        and problem.target_channels % 8 == 0
    )


def candidates(
    problem: Problem, batch: int, target: Sequence[int], gpu: Gpu
) -> Iterator[WgmmaNdhwcPlan]:
    """Every sensible kernel, in no order, with the deepest pipeline for these extents."""
    for base in _packed(problem, batch, target, gpu):
        for plan in _deepest(*base, batch, target):
            yield plan
            yield from _direct(plan, batch, target)


def _direct(plan: WgmmaNdhwcPlan, batch: int, target: Sequence[int]) -> Iterator[WgmmaNdhwcPlan]:
    """The same on weights as they are, if they can be."""
    if plan.may_be_n_major or plan.may_be_k_major:
        direct = with_tile(plan, direct=True)
        yield from _deepest(direct, plan.tile.resident_weights, batch, target)


def _packed(problem: Problem, batch: int, target: Sequence[int], gpu: Gpu) -> Iterator[Base]:
    """Those whose weights are packed, but for their pipelines."""
    if _by_warps(problem):
        for groups_per_tile, consumers, blocks in itertools.product((1, 2, 4, 8), (2, 3), (1, 2)):
            if (
                problem.geometry.groups % groups_per_tile
                or groups_per_tile * problem.target_channels % 16
            ):
                continue
            columns_ = groups_per_tile * problem.target_channels
            tile = NdhwcTile(0, blocks, columns_, consumers, 2, 1, 0, True, groups_per_tile)
            plan = WgmmaNdhwcPlan(problem, tile, gpu)
            if plan.suits and plan.n_tile_phases <= gpu.multiprocessors and columns_ <= 256:
                yield plan, True
        return
    parts = (1, 2, 4, 8) if _few_tiles(problem, batch, target, gpu) else (1, 2, 4)
    of_128 = div_up(problem.target_channels, 128)
    columns = column_tiles(problem.target_channels, (*parts, of_128), 32, multiple=16)
    for phased, split, column_tile, consumers in itertools.product(
        _phased(problem), (1, 2, 3), columns, (2, 3)
    ):
        if (split == 2 and phased < 2) or (split == 3) == problem.forward:
            continue
        plans = (
            WgmmaNdhwcPlan(
                problem, NdhwcTile(phased, blocks, column_tile, consumers, 2, 2, split, False), gpu
            )
            for blocks in (1, 2, 3, 4)
        )
        fitting = [plan for plan in plans if plan.suits]
        last = problem.target_channels_last
        if problem.forward and last and split <= 2 and phased >= 2 and batch >= _MANY_SAMPLES:
            units = fitting[-1].units(target) if fitting else ()
            for plan in fitting[:2] if max(units, default=99) <= _FEW_POSITIONS else ():
                inside = with_tile(plan, samples_inside=True)
                yield inside, False
        for plan in fitting[-2:]:
            yield plan, False
            yield from _clusters(plan, batch, target)
            if plan.empty_phases:
                filling = with_tile(plan, fills=True)
                yield filling, False
            if plan.n_tile_phases > gpu.multiprocessors:
                continue
            yield plan, True


def _few_tiles(problem: Problem, batch: int, target: Sequence[int], gpu: Gpu) -> bool:
    """Whether half of the multiprocessors get none of 128 x 128 tiles, shared by clusters."""
    per_unit = math.prod(problem.geometry.stride) if problem.forward else 1
    tiles = div_up(batch * math.prod(target), 128 * per_unit) * per_unit
    tiles *= problem.geometry.groups * div_up(problem.target_channels, 128)
    return tiles * _MOST_CLUSTER <= gpu.multiprocessors / 2


def _phased(problem: Problem) -> Sequence[int]:
    """How many leading axes may have phases that are work tiles of their own."""
    if not problem.forward:
        return (3,)
    # At stride 1 two are as fast as three, and none, with all taps unrolled, is slower.
    return range(4) if max(problem.geometry.stride) > 1 else (1, 3)


def _clusters(plan: WgmmaNdhwcPlan, batch: int, target: Sequence[int]) -> Iterator[Base]:
    """Split-K, where work tiles leave multiprocessors without any."""
    if plan.tile.phased < 3:
        return
    work_tiles = div_up(batch * math.prod(plan.units(target)), plan.tile.rows) * plan.n_tile_phases
    at_once = functools.partial(clusters_at_once, multiprocessors=plan.gpu.multiprocessors)
    sizes = [n for n in range(2, min(_MOST_CLUSTER, plan.shares) + 1) if work_tiles <= at_once(n)]
    # Those that leave the busiest CTA less than the next smaller one does.
    fewest = {div_up(plan.shares, div_up(plan.shares, n)) for n in sizes}
    for cluster in sorted(fewest)[-_CLUSTERS:]:
        sharing = with_tile(plan, cluster=cluster)
        if sharing.suits:
            yield sharing, False


def _deepest(
    plan: WgmmaNdhwcPlan, resident: bool, batch: int, target: Sequence[int]
) -> Iterator[WgmmaNdhwcPlan]:
    """The deepest pipeline of weights that pass, or of those that stay."""
    yield from deepest(plan, _PIPELINES, batch, target, _kept(plan, resident))


def _kept(plan: WgmmaNdhwcPlan, resident: bool) -> int:
    """Stages of weights that stay."""
    return plan.chunks * plan.most_stages if resident else 0


def _bound(base: Base, batch: int, target: Sequence[int]) -> float:
    """Cycles that no pipeline of a base undercuts."""
    plan, resident = base
    if plan.tile.samples_inside:
        return 0.0  # their tiles are priced in another way
    weights, boxes = _PIPELINES[0]
    pipeline = {"weight_stages": _kept(*base) or weights, "source_stages": boxes}
    return least_cycles(with_tile(plan, resident_weights=resident, **pipeline), batch, target)


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, WgmmaNdhwcPlan]]:
    """The best candidates for these input extents with their costs, cheapest first.

    ``below``: see :func:`~convt3d.cuda.plan.search.cheapest`.
    """
    if refusal(problem, gpu) is not None:
        return []
    _, target = problem.extents(input_size)
    bases = [*_packed(problem, batch, target, gpu)]
    bounds = [0.0 if below is None else _bound(base, batch, target) for base in bases]

    def price(base: Base) -> Iterator[tuple[float, WgmmaNdhwcPlan]]:
        return ((plan.cost(batch, target), plan) for plan in _deepest(*base, batch, target))

    most = _MOST_DIRECT if problem.geometry.groups == 1 else 1
    packed = cheapest(zip(bounds, bases, strict=True), price, below, most)
    direct = [p for _, plan in packed[:_MOST_DIRECT] for p in _direct(plan, batch, target)]
    most = _MAX_PLANS if problem.source_channels_last else MOST_COPIED
    return by_cost([*packed, *((p.cost(batch, target), p) for p in direct)])[:most]
