"""Which plans of ampere/strided there are for a problem and its extents."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from convt3d.cuda.plan.ampere_strided.cost import call_cycles, step_cycles
from convt3d.cuda.plan.ampere_strided.layout import Shape, Tile, Units, units_of
from convt3d.cuda.plan.ampere_strided.plan import StridedPlan
from convt3d.cuda.plan.search import by_cost, cheapest, with_tile
from convt3d.cuda.schedule import Gpu, Problem, div_up, round_up, widest_vector
from convt3d.precision import Arithmetic

# All products of a step are written out in the kernel's text; beyond this it no longer fits the
# instruction cache and takes long to compile.
_MAX_PRODUCTS = 1300
# Registers beside those estimated that gradients of split operands take, at least: with fewer they
# spill within the products, which took up to 1.9 times as long.
_SPLITTING = 80
MAX_ACCUMULATORS = 144
# A fragment's window of positions along W is held in registers.
_MAX_WINDOW = 16
_MAX_BASES = 16
# A tile that every kernel must have room for, so that it serves all extents.
_SMALLEST = (1, 1, 16)
_MAX_SHAPES = 24


def refusal(problem: Problem) -> str | None:
    """Why ampere/strided/forward.cu cannot take a problem, or None."""
    g = problem.geometry
    if problem.operation not in ("forward", "grad_input"):
        return "the strided kernel computes outputs and gradients by input"
    if max(g.stride) == 1:
        return "the layer has no stride"
    if problem.forward and g.kernel_size == g.stride and g.padding == (0, 0, 0):
        return "every phase has one tap: the layer is one product, which ampere/gather computes"
    taps = g.kernel_size[0] * g.kernel_size[1] * g.kernel_size[2]
    if taps * (3 if problem.arithmetic is Arithmetic.IEEE else 1) > _MAX_PRODUCTS:
        return f"{taps} taps are too many to be written out"
    plan = StridedPlan(problem, Tile(4, 1, 1, 2, 1, False, 1, 1), Gpu())
    if plan.window > _MAX_WINDOW:
        return f"a window of {plan.window} positions along W does not fit in registers"
    if plan.accumulators() > MAX_ACCUMULATORS:
        return f"{plan.live_slots} phases do not fit in registers"
    return None


def _vectors(problem: Problem) -> tuple[int, ...]:
    bytes_ = problem.element_bytes
    if problem.source_channels_last:
        return (widest_vector(problem.source_channels, bytes_),)
    g = problem.geometry
    if not problem.forward and math.gcd(g.stride[2], g.dilation[2]) > 1:
        return (1,)
    return (4, 1) if bytes_ == 4 else (4,)


def _bases(problem: Problem, gpu: Gpu) -> list[StridedPlan]:
    """Warps and fragments, those first whose products need the least besides."""
    ieee = problem.arithmetic is Arithmetic.IEEE
    columns = div_up(problem.target_channels, 8)
    found = []
    many = (12, 16) if problem.forward else ()
    for warps, m, n in itertools.product((4, 6, 8, *many), (1, 2), (1, 2, 3, 4, 6, 8)):
        waste = round_up(columns, n) / columns
        if n > columns or waste > 1.25:
            continue
        for vector in _vectors(problem):
            tile = Tile(warps, m, n, 2, 1, True, 1, vector)
            plan = StridedPlan(problem, tile, gpu)
            available = 65536 // plan.threads + (16 if m == 1 else 0)
            if plan.accumulators() > MAX_ACCUMULATORS or plan.registers() > min(240, available):
                continue
            if plan.taps * m * n * (3 if ieee else 1) > _MAX_PRODUCTS:
                continue
            matrix, shared, instructions = step_cycles(plan)
            found.append((waste * (matrix + shared + instructions / 3) / (warps * m * n), plan))
    found = by_cost(found)
    return [plan for cost, plan in found[:_MAX_BASES] if cost < 3 * found[0][0]]


def _depths(problem: Problem) -> list[int]:
    """Matrix steps of a stage: no more than there are."""
    channels = 32 // problem.element_bytes
    return [n for n in (1, 2) if n * channels < problem.source_channels + channels]


def _pipelines(
    base: StridedPlan, shapes: Sequence[Shape], batch: int, target: Sequence[int]
) -> Iterator[tuple[float, StridedPlan]]:
    """Pipelines of a base with their costs."""
    units = units_of(shapes)
    order = np.argsort(call_cycles(base, units, batch, target), kind="stable")
    cheapest_units = [column[order[:_MAX_SHAPES]] for column in units]
    for stages, depth, weights in itertools.product((2, 3), _depths(base.problem), (True, False)):
        piped = with_tile(base, stages=stages, depth=depth, resident_weights=weights)
        plan = _with_positions(piped, cheapest_units, target)
        if plan is not None:
            fitting = [column[plan.fits(units, target)] for column in units]
            yield float(call_cycles(plan, fitting, batch, target).min()), plan


def _bound(base: StridedPlan, shapes: Sequence[Shape], batch: int, target: Sequence[int]) -> float:
    """Cycles that no pipeline of a base undercuts: those of the deepest, with room for all."""
    units = units_of(shapes)
    plans = [
        with_tile(base, stages=3, depth=depth, resident_weights=True)
        for depth in _depths(base.problem)
    ]
    return min(float(call_cycles(plan, units, batch, target).min()) for plan in plans)


def _with_positions(plan: StridedPlan, units: Units, target: Sequence[int]) -> StridedPlan | None:
    """The plan with as many positions as the first of these shapes that fits needs, or more, so
    that rows of other widths can stay whole."""

    def room_for(units: Units) -> Any:
        return round_up(plan.box_positions(units) - 8, 32) + 8

    positions = np.maximum(room_for(_SMALLEST), room_for(units))
    fitting = plan.fits(units, target, positions) & plan.fits(_SMALLEST, target, positions)
    if not fitting.any():
        return None
    first = int(np.argmax(fitting))
    shape, chosen = [int(n[first]) for n in units], int(positions[first])
    for width in (32, 64, 128):
        rows = 16 * plan.tile.fragments // width
        wider = room_for((1, rows, width))
        roomier = rows > 0 and wider > chosen
        if roomier and all(plan.fits(u, target, wider) for u in (shape, _SMALLEST)):
            chosen = wider
    return with_tile(plan, positions=int(chosen))


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, StridedPlan]]:
    """Candidates for these input extents with their costs, cheapest first.

    ``below``: see :func:`~convt3d.cuda.plan.search.cheapest`.
    """
    if refusal(problem) is not None:
        return []
    _, size = problem.extents(input_size)
    # Shapes depend on the number of fragments only.
    shapes: dict[int, list[Shape]] = {}
    bases = []
    for base in _bases(problem, gpu):
        beside = _SPLITTING if not problem.forward and problem.words_per_value > 1 else 8
        most = base.most_resident(base.registers() + beside)
        fragments = base.tile.fragments
        if fragments not in shapes:
            shapes[fragments] = [*dict.fromkeys(base.all_shapes(size))]
        residents = {most, max(1, most // 2)}
        if problem.forward and base.tile.fragments_m == 1:
            # With fewer registers than estimated, addresses are spilled, outside of the products.
            residents = {most, base.most_resident(base.registers() - 16)}
        for resident in sorted(residents):
            plan = with_tile(base, resident=resident)
            bases.append((_bound(plan, shapes[fragments], batch, size), plan))

    def price(base: StridedPlan) -> Iterator[tuple[float, StridedPlan]]:
        return _pipelines(base, shapes[base.tile.fragments], batch, size)

    found = cheapest(bases, price, below)
    scale = 1.0
    if problem.forward and problem.target_channels_last:
        # Costs are fitted to contiguous layers.
        scale = 1.5 if problem.element_bytes == 2 else 2.0
    # Bases that differ only in what pipelines replace give the same plan twice.
    return [(scale * cost, plan) for plan, cost in {plan: cost for cost, plan in found}.items()]


@functools.lru_cache(maxsize=64)
def least_cost(problem: Problem, batch: int, input_size: tuple[int, ...], gpu: Gpu) -> float | None:
    """The cost of the cheapest plan, None where there is none."""
    found = ranked(problem, batch, input_size, gpu, math.inf)
    return found[0][0] if found else None
