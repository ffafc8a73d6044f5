"""Which plans of sweep/kernel.cu there are for a problem and its extents."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from convt3d.cuda.plan.axes import axis_of
from convt3d.cuda.plan.search import cheapest, with_tile
from convt3d.cuda.plan.sweep import cost
from convt3d.cuda.plan.sweep.plan import WgmmaSweepPlan
from convt3d.cuda.plan.sweep.products import (
    MAX_ACCUMULATORS,
    SPARE_REGISTERS,
    SweepTile,
)
from convt3d.cuda.plan.warpgroups import ONLY_HOPPER, compiles
from convt3d.cuda.schedule import Gpu, Problem, div_up, round_up
from convt3d.precision import Arithmetic

_MAX_STACKED = 256  # columns of one product
_MAX_SLOTS2 = 4
_MAX_TAPS2 = 16
_MAX_TAPS0 = 16
_MIN_GROUP = 32  # channels of a group
_MIN_GROUP_IEEE = 16
# Source boxes and weight stages, the deepest first; deeper ones let consumers be farther apart.
# Large tiles, of more than two blocks or several planes, only got slower by the deepest.
_LARGE_PIPELINES = ((3, 4), (2, 4), (3, 3), (2, 3), (2, 2))
_PIPELINES = ((4, 8), (4, 6), (4, 5), (4, 4), *_LARGE_PIPELINES)
_KEPT_BOXES = (4, 3, 2)  # beside kept weights
# Boxes beside kept weights have a multiple of so many positions, and one, where that costs no box:
# near extents share a kernel.
_BOX_STEP = 64
_MAX_POSITIONS = 16368  # that descriptors' 14 bits of 16 bytes reach
_MAX_SETS = 256  # of split products, unrolled, were no taps chained


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why sweep/kernel.cu cannot take a problem, or None."""
    g = problem.geometry
    if gpu.capability[0] != 9:
        return ONLY_HOPPER
    least = _MIN_GROUP_IEEE if problem.arithmetic is Arithmetic.IEEE else _MIN_GROUP
    if g.groups > 1 and min(problem.source_channels, problem.target_channels) < least:
        return f"groups of fewer than {least} channels leave warpgroup products half empty"
    if problem.forward and g.kernel_size == g.stride:
        return "kernel == stride has one tap for each output, which the patch kernels compute"
    if problem.forward and g.stride[2] > _MAX_SLOTS2:
        return f"stride {g.stride[2]} along W exceeds {_MAX_SLOTS2} slots of a unit"
    if g.kernel_size[2] > _MAX_TAPS2:
        return f"kernel {g.kernel_size[2]} along W exceeds {_MAX_TAPS2} taps"
    if not _orders(problem):
        return "neither D nor H has up to 16 taps, undilated or of stride 1"
    return None


def _orders(problem: Problem) -> list[bool]:
    """Which axis may be swept along: D (False) or H (True)."""
    g = problem.geometry
    return [
        bool(a)
        for a in (0, 1)
        if g.kernel_size[a] <= _MAX_TAPS0
        and (g.dilation[a] == 1 or g.kernel_size[a] == 1 or g.stride[a] == 1)
    ]


def _bases(
    problem: Problem, gpu: Gpu, bound: Callable[[WgmmaSweepPlan], float], below: float | None
) -> Iterator[tuple[float, WgmmaSweepPlan]]:
    """Every sensible kernel but for its pipeline, with its bound, if that is not above ``below``.

    ``bound``: does not hang on the warps that fill.
    """
    channels = problem.target_channels
    column_tiles = {round_up(div_up(channels, parts), 8) for parts in range(1, 33)}
    for swapped, column_tile, planes in itertools.product(
        _orders(problem), sorted(column_tiles), (1, 2, 3, 4, 6)
    ):
        if problem.geometry.kernel_size[int(swapped)] * column_tile > _MAX_STACKED:
            continue
        for blocks in (1, 2, 3, 4):
            tiles = (SweepTile(planes, blocks, column_tile, fill_warps=n) for n in (3, 7))
            plans = [WgmmaSweepPlan(problem, t, swapped, gpu.multiprocessors) for t in tiles]
            if plans[0].live > MAX_ACCUMULATORS:
                break  # more blocks have more
            least = bound(plans[0])
            if below is not None and least > below:
                continue
            for plan in plans:
                if plan.registers[0] < plan.live + SPARE_REGISTERS:
                    continue
                if not compiles(plan.product_columns, plan.tile.threads):
                    continue
                sets = plan.slots2 * blocks * plan.sweep.source_step * plan.plane[1].kernel
                if plan.parts > 1 and sets > _MAX_SETS:
                    continue
                yield least, plan


def _with_pipelines(plan: WgmmaSweepPlan, wanted: int, gpu: Gpu) -> Iterator[WgmmaSweepPlan]:
    """The deepest pipeline whose boxes have the wanted positions, else the largest boxes."""
    room = gpu.shared_for()
    smallest = plan.box_positions(1)
    most = min(_MAX_POSITIONS, room // (_KEPT_BOXES[-1] * plan.position_bytes))
    items = 1
    while not plan.covers(items, wanted) and plan.positions_of(items + 1) <= most:
        items += 1
    pipelines = _LARGE_PIPELINES if plan.large else _PIPELINES
    while items and plan.covers(items, smallest):
        positions = plan.positions_of(items)
        for boxes, weights in pipelines if positions <= _MAX_POSITIONS else ():
            if plan.bytes_with(boxes * positions, weights * plan.stage_bytes) <= room:
                yield with_tile(
                    plan,
                    fill_pairs=items,
                    positions=positions,
                    source_stages=boxes,
                    weight_stages=weights,
                )
                return
        items -= 1


def _with_kept_weights(plan: WgmmaSweepPlan, wanted: int, gpu: Gpu) -> Iterator[WgmmaSweepPlan]:
    """The most boxes of the wanted positions that fit beside all weights of a column tile.

    One that does not take ping-pong and, but for split products, one that does.
    """
    room = gpu.shared_for()
    if plan.set_bytes > room:
        return
    items = 1
    while not plan.covers(items, wanted):
        items += 1
    positions = plan.positions_of(items)
    sizes = [positions]
    if plan.plane[1].unit_source == 1:
        sizes = [min(positions, n | 1) for n in (round_up(wanted, _BOX_STEP), wanted)]
    found = [p for n in sizes for p in _most_boxes(plan, items, n, room)]
    if found:
        chosen = max(found, key=lambda p: (p.leaves_l1, p.tile.source_stages))  # the first
        yield chosen
        if plan.parts == 1:
            yield with_tile(chosen, ping_pong=True)


def _most_boxes(
    plan: WgmmaSweepPlan, items: int, positions: int, room: int
) -> Iterator[WgmmaSweepPlan]:
    """The most boxes of so many positions beside all weights that leave L1, else the most."""
    if positions > _MAX_POSITIONS:
        return
    bytes_ = {n: plan.bytes_with(n * positions, plan.set_bytes) for n in _KEPT_BOXES}
    fitting = [n for n in _KEPT_BOXES if bytes_[n] <= room]
    for boxes in [n for n in fitting if plan.leaves_l1_beside(bytes_[n])][:1] or fitting[:1]:
        yield with_tile(
            plan,
            weight_stages=1,
            fill_pairs=items,
            positions=positions,
            keep_weights=True,
            source_stages=boxes,
        )


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, WgmmaSweepPlan]]:
    """Candidates for these input extents with their costs, cheapest first.

    ``below``: see :func:`~convt3d.cuda.plan.search.cheapest`.
    """
    if refusal(problem, gpu) is not None:
        return []
    source, target = problem.extents(input_size)
    whole = axis_of(problem, 2, 1).units(target[2])
    lines = {
        # They depend on the axes only.
        swapped: WgmmaSweepPlan(problem, SweepTile(1, 1, 8), swapped, gpu.multiprocessors).lines(
            batch, source, target
        )
        for swapped in _orders(problem)
    }

    def bound(plan: WgmmaSweepPlan) -> float:
        return cost.least_cycles(plan, lines[plan.swapped], source, target)

    def price(base: WgmmaSweepPlan) -> Iterator[tuple[float, WgmmaSweepPlan]]:
        wanted = base.box_positions(whole)
        for with_buffers in (_with_pipelines, _with_kept_weights):
            for plan in with_buffers(base, wanted, gpu):
                yield cost.call_cycles(plan, lines[plan.swapped], source, target), plan

    return cheapest(_bases(problem, gpu, bound, below), price, below)
