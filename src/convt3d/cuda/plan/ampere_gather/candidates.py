"""Which plans of ampere/gather there are for a problem and its extents."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from convt3d.cuda.plan.ampere_gather.cost import Work, bound, call_cycles, waste, work_of
from convt3d.cuda.plan.ampere_gather.layout import Tile
from convt3d.cuda.plan.ampere_gather.plan import GatherPlan
from convt3d.cuda.plan.search import by_cost, cheapest, with_tile
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.precision import Arithmetic

# A static axis enumerates its taps in registers; beyond these the code grows without gain.
_MAX_SLOTS2 = 16
_MAX_TAPS2 = 32
_MAX_BASES = 32
# Accumulators of a lane, and of IEEE-grade arithmetic, whose operands take twice the registers.
_MAX_ACCUMULATORS = 144
_MAX_ACCUMULATORS_IEEE = 96
_WARPS = ((4, 1), (2, 2), (1, 4), (8, 1), (4, 2))


def refusal(problem: Problem) -> str | None:
    """Why ampere/gather/kernel.cu cannot take a problem, or None."""
    g = problem.geometry
    slots2 = g.stride[2] if problem.forward else 1
    if slots2 > _MAX_SLOTS2:
        return f"stride {g.stride[2]} along W exceeds the {_MAX_SLOTS2} slots of a unit"
    if g.kernel_size[2] > _MAX_TAPS2:
        return f"kernel {g.kernel_size[2]} along W exceeds {_MAX_TAPS2} taps"
    return None


def _residents(plan: GatherPlan) -> list[int]:
    """As many resident CTAs as registers allow, and half as many."""
    most = max(1, min(6, 65536 // (plan.threads * plan.registers())))
    return sorted({most, max(1, most // 2)}, reverse=True)


def _with_pipelines(plan: GatherPlan, gpu: Gpu) -> Iterator[GatherPlan]:
    """Pipelines of a kernel, each with the largest boxes that it has room for."""
    for resident in _residents(plan):
        room = gpu.shared_for(resident)
        for depth in (1, 2, 4):
            if depth > 1 and plan.problem.source_channels * 32 < depth * 64 * 24 // 2:
                continue
            options = [(4, False), (3, False), (2, False)]
            if depth == 1 and plan.axes[1].max_taps > 1:
                # Stages in flight are of the next chunk at most.
                most = 1 + max(1, min(plan.axes[1].phase_taps))
                options += [(stages, True) for stages in (2, 3, 4) if stages <= most]
            for stages, split in options:
                chosen = with_tile(plan, stages=stages, split=split, depth=depth, resident=resident)
                positions = min(chosen.room_for_positions(room), 16384)
                if positions < plan.smallest_box:
                    continue
                chosen = with_tile(chosen, positions=positions)
                if chosen.shared_bytes <= room:
                    yield chosen


def _bases(problem: Problem, gpu: Gpu) -> list[GatherPlan]:
    """Every sensible kernel but for its pipeline, those with the fewest products first."""
    g = problem.geometry
    ieee = problem.arithmetic is Arithmetic.IEEE
    limit = _MAX_ACCUMULATORS_IEEE if ieee else _MAX_ACCUMULATORS
    blocks = [(False, 0)]
    for swapped, axis in ((False, 0), (True, 1)):
        if g.stride[axis] == 1 and g.dilation[axis] == 1 and 1 < g.kernel_size[axis] <= 7:
            blocks += [(swapped, block) for block in (2, 3, 4)]
            break
    found: list[tuple[float, GatherPlan]] = []
    for (swapped, block0), (warps_m, warps_n), fragments_m, fragments_n in itertools.product(
        blocks, _WARPS, (1, 2, 4), (1, 2, 3, 4, 6, 8)
    ):
        spare = -problem.target_channels % (8 * warps_n * fragments_n)
        if spare >= 8 and spare * 4 > problem.target_channels:
            continue
        tile = Tile(block0, warps_m, warps_n, fragments_m, fragments_n)
        base = GatherPlan(problem, tile, swapped, gpu)
        accumulators = base.accumulators()
        # Cached A fragments of a static axis must fit beside the accumulators.
        cached = (base.axes[0].shifts if block0 else 1) * fragments_m * (8 if ieee else 4)
        if accumulators > limit or accumulators + cached > (170 if ieee else 190):
            continue
        found.append((waste(base), base))
    # Planning is part of a first call: drop what cannot win before looking at pipelines.
    found = by_cost(found)
    return [base for lost, base in found[:_MAX_BASES] if lost <= 2 * found[0][0]]


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, GatherPlan]]:
    """Candidates for these input extents with their costs, cheapest first.

    ``below``: see :func:`~convt3d.cuda.plan.search.cheapest`.
    """
    _, size = problem.extents(input_size)
    bases = []
    for base in _bases(problem, gpu):
        work = work_of(base, batch, size)
        bases.append((bound(base, work, _residents(base)[0]), (base, work)))

    def price(base: tuple[GatherPlan, Work]) -> Iterator[tuple[float, GatherPlan]]:
        for plan in _with_pipelines(base[0], gpu):
            yield float(call_cycles(plan, base[1]).min()), plan

    return cheapest(bases, price, below)
