"""Which plans of phases/kernel.cu there are for a problem and its extents."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from convt3d.cuda.plan.axes import phased_axes
from convt3d.cuda.plan.phases.plan import PhasesLaunches, WgmmaPhasesPlan
from convt3d.cuda.plan.phases.products import MOST_CHAIN
from convt3d.cuda.plan.phases.tile import PhasesTile
from convt3d.cuda.plan.search import by_cost, with_tile
from convt3d.cuda.plan.unit_tiles import Pipelines, deepest
from convt3d.cuda.plan.warpgroups import (
    MAX_PRODUCTS,
    MAX_STAGE_BYTES,
    ONLY_HOPPER,
    column_tiles,
)
from convt3d.cuda.schedule import Gpu, Problem, div_up
from convt3d.precision import Arithmetic

_SMALL = 16  # extents: larger volumes of stride 1 are swept
_FEW_ROWS = 64  # units of a volume for each multiprocessor
# Weight stages and source boxes, deepest first.
_PIPELINES = ((4, 3), (3, 3), (2, 3), (4, 2), (3, 2), (2, 2))
# Before these: weights that stay leave room for more boxes.
_DEEPEST = {True: (4, 4), False: (5, 3)}
# Before these, of IEEE-grade products: their weights take longer to come.
_SPLIT_PIPELINES = ((7, 3), (6, 3), (5, 3))
# With store warps: stages of weights (none: they stay), boxes, columns that are staged at a time.
_STORE_WARP_PIPELINES = {
    True: ((0, 4, 8), (0, 3, 16), (0, 3, 8), (0, 2, 8)),
    False: ((3, 4, 8), (3, 3, 16), (2, 3, 16), (3, 3, 8), (2, 2, 8)),
}
# The same where a box has one tap of D and weights pass.
_TAP_PIPELINES = ((3, 4, 8), (3, 4, 16), (2, 4, 8), (2, 3, 8))
# Also, where nothing is filled, of TF32 and where weights take twice the room.
_MORE_TAP_PIPELINES = {False: (4, 4, 16), True: (2, 3, 16)}
_MOST_PIPELINES = 2  # of warps that send, for each arrangement of their warpgroups
_FAR = 1.4  # times the least cost: plans that are not looked at closely
_IN_STEP = 4  # plans that are tried out of step too
_PING_PONG_WEIGHTS = (14, 12, 10, 8, 6, 5)  # stages; four too of split operands
_PING_PONG_CHUNKS = 6  # of work tiles whose phases are apart
_FEW_ROUNDS = 2
_ON_TRIAL = 4.0  # not chosen before they are timed
_MOST_ADDITIONS = 256  # of an output: longer sums would have to be made of parts
_FEWEST_SPLIT_COLUMNS = 24
MAX_PLANS = 24

AnyPhases = TypeVar("AnyPhases", bound=PhasesLaunches)


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why phases/kernel.cu cannot take a problem, or None."""
    g = problem.geometry
    if gpu.capability[0] != 9:
        return ONLY_HOPPER
    if not problem.forward:
        return "gradients are gathers of another kind"
    if problem.source_channels_last or problem.target_channels_last:
        return "its boxes and outputs are contiguous"
    if g.kernel_size == g.stride:
        return "kernel == stride has one tap for each output, which the patch kernels compute"
    if g.groups > 1 and problem.source_channels % (32 // problem.element_bytes):
        return "chunks of channels would run into the next group"
    return _split_refusal(problem)


def _split_refusal(problem: Problem) -> str | None:
    """What IEEE-grade products ask for beside."""
    if problem.arithmetic is not Arithmetic.IEEE:
        return None
    if problem.target_channels < _FEWEST_SPLIT_COLUMNS:
        return "a product of few columns takes as long as one of 24"
    d, _, w = phased_axes(problem, 2)
    if max(w.phase_taps) > MOST_CHAIN:
        return "longer chains of products err more"
    if div_up(problem.source_channels, 8) * d.max_taps > _MOST_ADDITIONS:
        return "sums are not made of parts"
    return None


def gathered(problem: Problem, input_size: Sequence[int]) -> bool:
    """Whether a volume of stride 1 is so large that sweeps of sweep/kernel.cu fill a GPU."""
    return max(problem.geometry.stride) == 1 and max(input_size) > _SMALL


def _few_units(problem: Problem, batch: int, target: Sequence[int], gpu: Gpu) -> bool:
    """Whether a CTA has one work tile or two."""
    strides = problem.geometry.stride
    units = math.prod(div_up(n, s) for n, s in zip(target, strides, strict=True))
    return batch * units <= _FEW_ROWS * gpu.multiprocessors


# --- Tiles ---------------------------------------------------------------------------------------


def candidates(
    problem: Problem,
    batch: int,
    target: Sequence[int],
    gpu: Gpu,
    far: float = math.inf,
) -> Iterator[WgmmaPhasesPlan]:
    """Sensible kernels, in no order, with the deepest pipelines for these extents.

    ``far``: how many times the least cost the others may have, before pipelines are looked at.
    """
    columns = column_tiles(problem.target_channels, (1, 2, 3, 4, 8), 32)
    small = _few_units(problem, batch, target, gpu)  # then any number of rows may fit best
    found: list[tuple[float, WgmmaPhasesPlan]] = []
    for phased, column_tile, consumers, store_warps in itertools.product(
        (0, 1, 2), columns, (1, 2, 3) if small else (2, 3), (0, 2)
    ):
        if consumers == 1 and store_warps:
            continue  # not timed
        fitting = []
        for blocks in (1, 2, 3, 4):
            tile = PhasesTile(
                *(phased, blocks, column_tile, consumers, 2, 2, 2, False),
                store_warps=store_warps,
                round_columns=8 if store_warps else 0,
            )
            plan = WgmmaPhasesPlan(problem, tile, gpu)
            fit = with_fragments(plan, _rings(plan, small))
            if fit is not None and not (fit.split and fit.additions > _MOST_ADDITIONS):
                fitting.append(fit)
        # As many blocks as there are registers, or two fewer.
        every_one = small or problem.arithmetic is Arithmetic.IEEE
        for plan in fitting if every_one else fitting[-1:] + fitting[:-2]:
            usual = with_tile(plan, weight_stages=4, source_stages=3)
            found.append((usual.least_cost(batch, target), plan))
    least = min((cost for cost, _ in found), default=0.0)
    for cost, plan in found:
        if cost <= far * least:
            for resident in (False, True):
                if plan.n_tile_phases <= gpu.multiprocessors or not resident:
                    yield from _deepest(plan, resident, batch, target)


def _rings(plan: WgmmaPhasesPlan, small: bool) -> list[int]:
    """Fragments in flight: without a break in their ring from stage to stage, if possible."""
    t, shifts = plan.tile, len(plan.axes[2].live_shifts)
    if plan.split:  # a row of shifts at a time
        return [max(shifts, 2)]
    rings = [n for n in (3, 4, 2) if plan.steps % n == 0] or [3, 2]
    if t.consumers == 1 and plan.steps < 10:  # no other warpgroup hides what it waits for
        rings = [max(plan.steps, 2), *rings]
    if t.store_warps:  # a ring of four, without a break, took 2% longer
        return [min(n, 3) for n in rings]
    if plan.steps == 8:  # and so did one of four where five have room
        rings = [5, *rings]
    elif plan.steps == 9 and not small:  # or of three where a stage's have
        rings = [9, *rings]
    return rings


def first_fitting(plan: AnyPhases, rings: Sequence[int]) -> AnyPhases | None:
    """The plan with the first of these numbers of fragments that registers have room for."""
    plans = (with_tile(plan, fragments=n) for n in rings)
    return next((p for p in plans if p.fits_registers), None)


def with_fragments(plan: AnyPhases, rings: Sequence[int]) -> AnyPhases | None:
    """The same if its stages can be."""
    fit = first_fitting(plan, rings)
    products = plan.taps * plan.tile.blocks * (3 if plan.split else 1)
    return fit if products <= MAX_PRODUCTS and plan.stage_bytes <= MAX_STAGE_BYTES else None


# --- Pipelines -----------------------------------------------------------------------------------


def _deepest(
    plan: WgmmaPhasesPlan, resident: bool, batch: int, target: Sequence[int]
) -> Iterator[WgmmaPhasesPlan]:
    """The deepest pipelines for who stores."""
    if plan.tile.store_warps:
        yield from _with_store_warps(plan, resident, batch, target)
        return
    pipelines: Pipelines = (_DEEPEST[resident], *_PIPELINES)
    if plan.split and not resident:
        pipelines = (*_SPLIT_PIPELINES, *pipelines)
    kept = plan.chunks * plan.most_walked if resident else 0
    yield from deepest(plan, pipelines, batch, target, kept)


def _with_store_warps(
    plan: WgmmaPhasesPlan, resident: bool, batch: int, target: Sequence[int]
) -> Iterator[WgmmaPhasesPlan]:
    """The cheapest pipelines of warps that send."""
    p, everything = plan.problem, plan.chunks * plan.most_walked
    # One more warp stores phases or slots of D without taps. Then 16 columns leave few buffers at
    # some extents: kb77 took 1.6 times as long.
    filled = any(not all(axis.phase_taps) for axis in plan.axes[: max(1, plan.tile.phased)])
    more = (_MORE_TAP_PIPELINES[plan.split],) if not filled and p.element_bytes == 4 else ()

    def with_pipeline(tap_boxes: bool, weights: int, sources: int, columns: int) -> WgmmaPhasesPlan:
        return with_tile(
            plan,
            tap_boxes=tap_boxes,
            weight_stages=weights or everything,
            source_stages=sources,
            round_columns=columns,
            resident_weights=resident,
        )

    for tap_boxes in (False,) if plan.axes[0].block or resident else (False, True):
        pipelines = (*_TAP_PIPELINES, *more) if tap_boxes else _STORE_WARP_PIPELINES[resident]
        every = [with_pipeline(tap_boxes, *pipeline) for pipeline in pipelines]
        every = [p for p in every if plan.tile.column_tile % p.tile.round_columns == 0]
        # One tile distinguishes them: only the first few are priced with tiles of their own.
        least = next((p for p in reversed(every) if p.serves(batch, target)), None)
        if least is None:
            continue
        shape = least.shape(batch, target)
        every.sort(key=lambda p: p.shape_cost(shape, batch, target))
        yield from itertools.islice((p for p in every if p.serves(batch, target)), _MOST_PIPELINES)


# --- Warpgroups out of step ----------------------------------------------------------------------


def with_ping_pong(
    plans: Sequence[WgmmaPhasesPlan], batch: int, target: Sequence[int]
) -> Iterator[tuple[float, WgmmaPhasesPlan]]:
    """The same plans with more boxes and weights, so that one warpgroup can be ahead."""
    for plan in plans:
        if plan.tile.store_warps or plan.tile.consumers == 1:
            continue
        shape, cost = plan.shape(batch, target), plan.cost(batch, target)
        resident = plan.tile.resident_weights
        stages = (*_PING_PONG_WEIGHTS, *((4,) if plan.split else ()))
        found = []
        for boxes, weights in itertools.product(
            (7, 6, 5, 4, 3), (plan.tile.weight_stages,) if resident else stages
        ):
            chunks = min(boxes - 2, plan.chunks // 2)  # one more box is on its way
            if not resident:
                chunks = min(chunks, (weights - 2) // plan.most_walked)
            if chunks <= 0 or (resident and boxes > chunks + 2):
                continue
            other = with_tile(plan, source_stages=boxes, weight_stages=weights, ping_pong=chunks)
            fits = other.shared_bytes(shape, target) <= plan.gpu.shared_per_block
            # Tiles of other lines may have smaller boxes, as many units and so the same cost.
            retiled = not (fits or plan.split) and boxes <= chunks + 3
            retiled = retiled and other.serves(batch, target)
            if fits or (retiled and other.cost(batch, target) <= 1.01 * cost):
                found.append((chunks, fits, boxes, weights, other))
        if found:
            best = max(found, key=lambda item: item[:4])[4]
            yield best.cost(batch, target) * _trial(best, batch, target), best


def _trial(plan: WgmmaPhasesPlan, batch: int, target: Sequence[int]) -> float:
    """Time with warpgroups out of step by that with all in step, as it was timed."""
    p, t = plan.problem, plan.tile
    if t.phased == 0 and p.element_bytes == 4:
        return 0.9
    shape = plan.shape(batch, target)
    if shape.count * plan.product_work_tiles <= _FEW_ROUNDS * plan.grid(shape):
        return _ON_TRIAL  # they begin and end together
    if t.phased == 0:
        return 0.96
    if plan.split:
        return 0.97 if t.consumers == 2 else _ON_TRIAL
    alone = t.phased == 1 and plan.chunks >= _PING_PONG_CHUNKS
    return 0.99 if p.element_bytes == 4 and alone else _ON_TRIAL


# --- Ranked --------------------------------------------------------------------------------------


def _first(found: list[tuple[float, WgmmaPhasesPlan]]) -> list[tuple[float, WgmmaPhasesPlan]]:
    """The cheapest plans, and of store warps some more."""
    rest = [item for item in found[MAX_PLANS // 2 :] if item[1].tile.store_warps]
    return found[: MAX_PLANS // 2] + rest[: MAX_PLANS // 4]


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, WgmmaPhasesPlan]]:
    """The best candidates for these input extents with their costs, cheapest first."""
    if refusal(problem, gpu) is not None or gathered(problem, input_size):
        return []
    if input_size[2] * problem.element_bytes % 16:
        return []  # rows that TMA cannot bring
    source, target = problem.extents(input_size)
    found = by_cost(
        (plan.cost(batch, target), plan)
        for plan in candidates(problem, batch, target, gpu, _FAR)
        if plan.fits(batch, source, target)
    )
    found = _first(found)
    found += with_ping_pong([plan for _, plan in found[:_IN_STEP]], batch, target)
    return by_cost(found)
