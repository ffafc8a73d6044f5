"""Chooses the kernel of a problem: one linear list of families, each of which may decline."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from convt3d.cuda import choices, codec, winners
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
    table,
    transposed,
    wgrad,
    wgrad_ndhwc,
)
from convt3d.cuda.schedule import (
    LARGEST,
    Gpu,
    Plan,
    Problem,
    as_large,
    batch_class,
    div_up,
    extent_class,
    is_large,
    line_class,
    representatives,
    row_class,
    typical_output,
)
from convt3d.cuda.workers import Turns
from convt3d.geometry import Geometry
from convt3d.precision import KERNEL_DTYPES, Arithmetic, arithmetic_for

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

ON_TRIAL: tuple[type[Plan], ...] = (wgrad_ndhwc.WgmmaWgradNdhwcPlan,)
"""Families that were right in the emulator but have not been timed on a GPU: no call runs them,
and tuning leaves them out; ``tools/kernel_lab.py`` checks and times them."""

_MINIMUM_CAPABILITY = (8, 0)
_SMALL_POSITIONS = 1 << 18  # of a layer's input, over all samples: a small volume has no more
_FEW_POSITIONS = 1 << 13  # 64 for each multiprocessor of an H100: a round or two of tiles
# Extents of small volumes that differ from larger ones; the same where all kernels are gathers.
_LARGEST_SMALL, _LARGEST_GATHERED = 32, 64
# Where families have an order (see _order): columns, a kernel's extent, channels of both sides.
_FEW_COLUMNS, _LONG_KERNEL, _FEW_CHANNELS = 3, 7, 32
# Planners and kernels list the phases of an axis, and count the reach of its taps in 32 bits.
_LARGEST_PARAMETERS = {"stride": 256, "padding": 1 << 16, "dilation": 1 << 16}


def refusal(
    operation: str, geometry: Geometry, dtype: torch.dtype, capability: tuple[int, int]
) -> str | None:
    """Why our kernels do not run an operation at all, or None; independent of extents."""
    if dtype not in KERNEL_DTYPES:
        return f"dtype {dtype} is left to PyTorch; kernels exist for float32, float16 and bfloat16"
    if capability < _MINIMUM_CAPABILITY:
        major, minor = capability
        return f"compute capability {major}.{minor} is below 8.0, the first one supported"
    for name, most in _LARGEST_PARAMETERS.items():
        largest = max(getattr(geometry, name))
        if largest > most:
            return f"a {name} of {largest} is left to PyTorch; kernels exist for at most {most}"
    return None


def problem_for(
    operation: str,
    geometry: Geometry,
    dtype: torch.dtype,
    channels_last: bool | tuple[bool, bool] = False,
    *,
    bias: bool = False,
    arithmetic: Arithmetic | None = None,
) -> Problem:
    """One operation on tensors of one layout; the arguments are those of :func:`plan_for`."""
    source, target = (
        channels_last if isinstance(channels_last, tuple) else (channels_last, channels_last)
    )
    return Problem(
        operation,
        geometry,
        arithmetic or arithmetic_for(dtype, geometry.groups),
        source,
        target,
        bias and operation != "grad_weight",
    )


def plan_for(
    operation: str,
    geometry: Geometry,
    input_size: Sequence[int],
    batch: int,
    dtype: torch.dtype,
    channels_last: bool | tuple[bool, bool] = False,
    *,
    bias: bool = False,
    arithmetic: Arithmetic | None = None,
    gpu: Gpu | None = None,
    canonical: bool = True,
) -> Plan:
    """The plan of one operation on tensors of one layout.

    Args:
        operation: ``"forward"``, ``"grad_input"`` or ``"grad_weight"``.
        geometry: the layer.
        input_size: spatial size (D, H, W) of the layer's input.
        batch: number of samples.
        dtype: float32, float16 or bfloat16.
        channels_last: layout of both activations, or of (source, target) as Problem defines them.
        bias: whether the result has one added.
        arithmetic: overrides what PyTorch's switches ask for.
        gpu: whose properties to plan for; an H200 if absent.
        canonical: False asks for a plan of this very operation (see :meth:`Problem.canonical`).
    """
    problem = problem_for(
        operation, geometry, dtype, channels_last, bias=bias, arithmetic=arithmetic
    )
    plan = plan_problem if canonical else plan_as_given
    return plan(problem, batch, tuple(input_size), gpu or Gpu())


def classes(problem: Problem, batch: int, input_size: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Classes of the batch, and of (D, H, W) of the layer's input, then of its output.

    Rows of W are distinguished by their alignment; where boxes may have parts of planes instead,
    which short rows of no whole 16 bytes need, so are planes.
    """
    output_size = problem.geometry.output_size(input_size)
    positions = batch * math.prod(input_size)
    small = problem.forward and positions <= _SMALL_POSITIONS
    few = problem.forward and positions <= _FEW_POSITIONS
    gathered = phases.gathered(problem, input_size)
    largest = _LARGEST_SMALL if small else LARGEST
    if small and gathered and ampere_patch.refusal(problem) is not None:
        largest = _LARGEST_GATHERED
    size = tuple(extent_class(n, largest, few) for n in input_size)
    if problem.forward:
        h, w = input_size[1:]
        vector = 16 // problem.element_bytes
        parts = small and w % vector > 0 and not (gathered or problem.source_channels_last)
        row = row_class(w, largest, few, parts and h * w % vector == 0)
        line = line_class(h, w, vector, largest, few) if parts and not is_large(row) else size[1]
        size = (size[0], line, row)
    return batch_class(batch), (*size, *(extent_class(n, largest, few) for n in output_size))


def plan_problem(problem: Problem, batch: int, input_size: tuple[int, ...], gpu: Gpu) -> Plan:
    """The plan of a problem's canonical form for these extents.

    It is what tuning found for them, else the winner among all that ran where they were timed, else
    the best by the cost models for the class of these extents. Where its ``problem`` is another
    operation than ``problem``, it runs on the weight that :func:`~convt3d.cuda.schedule.flipped`
    describes.
    """
    canonical, size = problem.canonical(input_size)
    return plan_as_given(canonical, batch, size, gpu)


def plan_as_given(problem: Problem, batch: int, input_size: tuple[int, ...], gpu: Gpu) -> Plan:
    """The same for a problem as it is."""
    return decide(problem, batch, input_size, gpu)[0]


def decide(problem: Problem, batch: int, input_size: tuple[int, ...], gpu: Gpu) -> tuple[Plan, str]:
    """:func:`plan_as_given`, and in a few words what decided."""
    tuned = winners.recall(problem, batch, input_size, gpu)
    if tuned is not None:
        return tuned, "the fastest when candidates were timed on this GPU"
    winner = table.recall(problem, batch, input_size, gpu)
    if winner is not None:
        return winner.plan, str(winner)
    key = (problem, *classes(problem, batch, input_size), gpu)
    with _turns.of(key):  # a thread that asks for what another one plans waits for it
        return _plan(*key), MODELS


MODELS = "the cost models"
"""What :func:`decide` names where nothing was timed."""
_turns = Turns()


@functools.lru_cache(maxsize=4096)
def _plan(problem: Problem, batch: int, extents: tuple[int, ...], gpu: Gpu) -> Plan:
    key = (problem, batch, extents, gpu)
    chosen = choices.recall(*key)
    if chosen is None:
        ranked = ranked_plans(*key, first_only=True)
        chosen = next(plan for plan in ranked if not isinstance(plan, ON_TRIAL))
        choices.remember(*key, chosen)
    return chosen


def ranked_plans(
    problem: Problem, batch: int, extents: tuple[int, ...], gpu: Gpu, *, first_only: bool = False
) -> list[Plan]:
    """All plans that could run, best first by the cost models.

    ``extents`` are the classes of (D, H, W) of the layer's input, then of its output.
    """
    input_size = extents[:3]
    found: list[Plan] = []
    if direct.suits(problem):
        found += depthwise.ranked(problem, gpu)
        found.append(direct.choose(problem, batch, input_size, gpu))
        if first_only:
            return found
    if ampere_patch.refusal(problem) is None:
        found += _patches(problem, batch, input_size, gpu, first_only)
        if first_only and found:
            return found
    if problem.operation == "grad_weight":
        found += _grad_weights(problem, batch, input_size, gpu, first_only)
    else:
        order = _order(problem)
        first_only = first_only and not order  # else costs of some families bound the others
        found += _cheapest_first(_gathers(problem, batch, extents, gpu, first_only), order)
    if not found:
        found.append(direct.choose(problem, batch, input_size, gpu))
    return found


def _grad_weights(
    problem: Problem, batch: int, input_size: Sequence[int], gpu: Gpu, first_only: bool
) -> list[Plan]:
    """Plans of all families of the gradient by weight."""
    if problem.source_channels_last and problem.target_channels_last:
        # wgrad/kernel.cu transposes such operands in shared memory: on 74 layers and types its
        # best plan took 1.2 to 32 times as long as the other family's, 4.7 times in the mean.
        plains = ampere_wgrad.ranked(problem, batch, input_size, gpu, None)
        found = _cheapest_first([*plains])
        if first_only and found:
            return found
        found += _cheapest_first([*wgrad.ranked(problem, batch, input_size, gpu)])
        return found + _cheapest_first([*wgrad_ndhwc.ranked(problem, batch, input_size, gpu)])
    costs: list[tuple[float, Plan]] = [
        *wgrad.ranked(problem, batch, input_size, gpu, first_only=first_only)
    ]
    below = _least(costs) if first_only else None
    costs += ampere_wgrad.ranked(problem, batch, input_size, gpu, below)
    return _cheapest_first(costs)


def _least(costs: list[tuple[float, Plan]]) -> float:
    return min((cost for cost, _ in costs), default=float("inf"))


def _cheapest_first(
    costs: list[tuple[float, Plan]], order: tuple[type[Plan], ...] = ()
) -> list[Plan]:
    """Plans of the families of ``order``, one family after the other, then all others."""
    rank = {family: index for index, family in enumerate(order)}
    ranked = sorted(costs, key=lambda item: (rank.get(type(item[1]), len(rank)), item[0]))
    return [plan for _, plan in ranked]


def _patches(
    problem: Problem, batch: int, input_size: tuple[int, ...], gpu: Gpu, first_only: bool
) -> list[Plan]:
    """Plans of all families of kernel == stride layers, in the order of :func:`_order`."""
    found: list[Plan] = []
    for family in _order(problem):
        module = patch if family is patch.WgmmaPatchPlan else ampere_patch
        found += module.ranked(problem, batch, input_size, gpu)
        if first_only and found:
            return found
    size = representatives(input_size)
    volume = math.prod(problem.geometry.output_size(size) if problem.forward else size)
    return found + [plan for _, plan in ndhwc.ranked(problem, batch, input_size, gpu, volume)]


def _order(problem: Problem) -> tuple[type[Plan], ...]:
    """Families that come first, the best one first; those that are left out follow by their costs.

    From one run on an H200 of 8095 plans for 705 problems: where this is not empty, its choice took
    0.87 to 0.98 times as long, in the mean over such problems, as that of the least cost.
    """
    g = problem.geometry
    last = problem.source_channels_last and problem.target_channels_last
    half = problem.element_bytes == 2
    if ampere_patch.refusal(problem) is None:
        # One or two columns leave most of a warpgroup's product empty, 16 channels half of a stage.
        few = problem.target_channels <= 2 or problem.source_channels <= 16
        if problem.forward and half and few:
            return (ampere_patch.PatchPlan, patch.WgmmaPatchPlan)
        return (patch.WgmmaPatchPlan, ampere_patch.PatchPlan)
    if not half or g.groups > 1:
        return ()
    if not last:
        strided = not problem.forward and max(g.stride) > 1
        return (strided_dgrad.WgmmaStridedDgradPlan,) if strided else ()
    if problem.forward and problem.target_channels <= _FEW_COLUMNS and max(g.kernel_size) <= 4:
        return (col2im.Col2imPlan,)
    if max(g.stride) == 1:
        return (sweep.WgmmaSweepPlan,)
    if problem.forward:
        # Many taps of a phase share what the sweep loads.
        long = max(g.kernel_size) >= _LONG_KERNEL
        return (sweep.WgmmaSweepPlan,) if long else (ndhwc.WgmmaNdhwcPlan,)
    few = max(g.in_channels, g.out_channels) <= _FEW_CHANNELS
    return (ampere_strided.StridedPlan,) if few else (ndhwc.WgmmaNdhwcPlan,)


def _gathers(
    problem: Problem, batch: int, extents: tuple[int, ...], gpu: Gpu, first_only: bool
) -> list[tuple[float, Plan]]:
    """Gathers of every family with their costs.

    Marches of sweep/kernel.cu are priced best for large extents: where one of them is the best, it
    stays. Other gathers count rounds of tiles, of the given extents.
    """
    large = as_large(extents, _LARGEST_SMALL)
    gathered = problem.forward and phases.gathered(problem, extents[:3])
    if gathered and extents != large:
        costs = _gathers_at(problem, batch, large, gpu, first_only)
        _, best = min(costs, key=lambda item: item[0], default=(0.0, None))
        if isinstance(best, sweep.WgmmaSweepPlan):
            return costs
    return _gathers_at(problem, batch, extents, gpu, first_only)


def _gathers_at(
    problem: Problem, batch: int, extents: tuple[int, ...], gpu: Gpu, first_only: bool
) -> list[tuple[float, Plan]]:
    """Gathers of every family with their costs, all for the same extents of the class."""
    input_size, output_size = extents[:3], extents[3:]
    target = output_size if problem.forward else input_size
    g = problem.geometry
    if problem.forward and not any(map(is_large, input_size)):
        # Of few tiles it counts how many there are: the extents that families of units compare.
        common, _ = phases.compared_sizes(problem, batch, input_size, gpu)
        if phases.few_units(problem, batch, common, gpu):
            target = common
    strides = ampere_strided.refusal(problem) is None
    size = ampere_strided.typical(problem, target) if strides else representatives(target)
    source: Sequence[int] = typical_output(g, size)
    if problem.forward:
        source = [div_up(n, s) for n, s in zip(size, g.stride, strict=True)]
    costs: list[tuple[float, Plan]] = [*col2im.ranked(problem, batch, source, size, gpu)]
    below = _least(costs) if first_only else None
    costs += sweep.ranked(problem, batch, input_size, gpu, below, (source, size))
    if strides:
        sweepings = (ampere_strided_rows, ampere_strided_slices, rows)
        # What sweeps is described by the best of ampere/strided/forward.cu, even where that is a
        # slow one.
        alone = all(sweeping.refusal(problem) is not None for sweeping in sweepings)
        below = _least(costs) if first_only and alone else None
        plains = ampere_strided.ranked(problem, batch, target, gpu, below)
        costs += plains
        for sweeping in sweepings:
            costs += sweeping.ranked(problem, batch, target, gpu, plains)
    at = (problem, batch, input_size, gpu, math.prod(size))
    costs += phases.ranked(*at, first_only=first_only)
    costs += transposed.ranked(*at, first_only=first_only)
    costs += strided_dgrad.ranked(*at)
    if ampere_patch.refusal(problem) is not None:  # else _flats has them
        last = ndhwc.ranked(*at)
        if last and problem.forward:
            # Strided costs are fitted to contiguous layers: these took 1.3 to 7 times as long.
            costs = [
                (2 * cost if isinstance(plan, ampere_strided.StridedPlan) else cost, plan)
                for cost, plan in costs
            ]
        costs += last
    if ampere_gather.refusal(problem) is None:
        below = _least(costs) if first_only else None
        costs += ampere_gather.ranked(problem, batch, size, gpu, below)
    return costs
