"""Which plans of strided gradients by input there are for a problem and its extents."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from convt3d.cuda.plan.axes import odd_lines, sliced_axis
from convt3d.cuda.plan.phases.candidates import MAX_PLANS, first_fitting
from convt3d.cuda.plan.search import by_cost
from convt3d.cuda.plan.strided_dgrad.plan import DgradTile, WgmmaStridedDgradPlan
from convt3d.cuda.plan.unit_tiles import deepest
from convt3d.cuda.plan.warpgroups import ONLY_HOPPER, ROUNDED, column_tiles
from convt3d.cuda.schedule import Gpu, Problem

_MAX_STEP = 8  # between elements that TMA moves
_MOST_EDGES = 2
_MOST_WINDOW = 4
_MOST_VOLUME = 512  # of units
# Weight stages and source boxes, deepest first.
_SWEEP_PIPELINES = ((4, 4), (4, 3), (6, 2), (4, 2), (3, 2), (2, 2))
_PIPELINES = ((4, 3), (6, 2), (5, 2), (4, 2), (3, 2), (2, 2))


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why strided_dgrad/mainloop.cuh cannot take a problem, or None."""
    g = problem.geometry
    if gpu.capability[0] != 9:
        return ONLY_HOPPER
    if problem.operation != "grad_input":
        return "it is the gradient by input"
    if problem.arithmetic not in ROUNDED:
        return f"{problem.arithmetic.value} is not among its arithmetics"
    if problem.source_channels_last or problem.target_channels_last:
        return "its boxes and outputs are contiguous"
    if max(g.stride) == 1:
        return "stride 1 shares more of its source in other kernels"
    if max(g.stride) > _MAX_STEP:
        return f"TMA's steps end at {_MAX_STEP}"
    if g.kernel_size == g.stride:
        return "kernel == stride has one tap for each position, which the patch kernels compute"
    if g.groups > 1 and problem.source_channels % (32 // problem.element_bytes):
        return "chunks of channels would run into the next group"
    return None


def _runs_serve(problem: Problem) -> bool:
    """Whether the kernel can read runs of lines."""
    g = problem.geometry
    span = (g.kernel_size[2] - 1) * g.dilation[2] + 1
    chunk = 32 // problem.element_bytes
    return (
        g.padding[2] <= _MOST_EDGES
        and (span + 1) * problem.element_bytes <= 128
        and problem.source_channels % chunk == 0
    )


def _pairs_serve(problem: Problem, runs: bool) -> bool:
    """Whether pairs of units along W can be loaded together."""
    g = problem.geometry
    span = (g.kernel_size[2] - 1) * g.dilation[2] + 1
    return not runs or (span + 3) * problem.element_bytes <= 128


def _sweeps(problem: Problem) -> bool:
    """Whether slices meet several units, as neighbours."""
    g = problem.geometry
    axis = sliced_axis(g.kernel_size[0], g.stride[0], g.padding[0], g.dilation[0])
    return axis.dense and axis.most > 1 and axis.window <= _MOST_WINDOW


def candidates(
    problem: Problem, batch: int, target: Sequence[int], gpu: Gpu
) -> Iterator[WgmmaStridedDgradPlan]:
    """Every sensible kernel, in no order, with the deepest pipeline for these extents."""
    columns = column_tiles(problem.target_channels, (1, 2, 3, 4, 8), 64)
    runs = odd_lines(problem)
    if runs and not _runs_serve(problem):
        return
    # Whole boxes, volumes, sweep, runs of aligned lines.
    kinds = [(False, False, False, False)]
    if _sweeps(problem):
        kinds.append((False, False, True, False))
    if not runs:
        kinds.append((True, False, False, False))
        if problem.source_channels % (32 // problem.element_bytes) == 0:
            kinds += [(*kind[:3], True) for kind in kinds if not kind[0]]
    if (
        math.prod(target) <= _MOST_VOLUME
        and problem.source_channels % (32 // problem.element_bytes) == 0
    ):
        kinds.append((True, True, False, False))
    # Pairs of lanes, stores of lanes: sectors of 32 bytes, or staging.
    pairs = problem.geometry.stride[2] == 2 and target[2] % 2 == 0 and _pairs_serve(problem, runs)
    alone = pairs or problem.element_bytes == 4
    for column_tile, consumers, (whole, volumes, sweep, aligned) in itertools.product(
        columns, (2, 3), kinds
    ):
        if aligned and not pairs:
            continue
        for blocks in (1, 2, 3, 4):
            base = DgradTile(
                2, blocks, column_tile, consumers, 2, 2, 2, False,
                whole_boxes=whole, runs=runs and not volumes, sweep=sweep, volumes=volumes,
                lane_pairs=pairs, lane_stores=alone, aligned_runs=aligned,
            )  # fmt: skip
            plan = WgmmaStridedDgradPlan(problem, base, gpu)
            if sweep and plan.swept.most * column_tile > 256:
                continue
            # Marches of several blocks have too few registers then.
            if consumers > 2 and (whole or (sweep and blocks > 1)):
                continue
            # Without a break in the ring of fragments from stage to stage, if possible.
            steps = plan.steps
            if base.runs or pairs:
                steps = max(2, blocks)  # a single block's taps are two steps
            rings = (3, 2) if steps % 3 == 0 else (2,)
            fit = first_fitting(plan, rings)
            if fit is None:
                continue
            plan = fit
            pipelines = _SWEEP_PIPELINES if sweep else _PIPELINES
            yield from deepest(plan, pipelines, batch, target)
            if plan.n_tile_phases <= gpu.multiprocessors:
                yield from deepest(plan, pipelines, batch, target, plan.chunks * plan.most_walked)


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, WgmmaStridedDgradPlan]]:
    """The best candidates for these input extents with their costs, cheapest first."""
    if refusal(problem, gpu) is not None:
        return []
    source, target = problem.extents(input_size)
    found = by_cost(
        (plan.cost(batch, target), plan)
        for plan in dict.fromkeys(candidates(problem, batch, target, gpu))
        if plan.fits(batch, source, target)
    )
    return found[:MAX_PLANS]
