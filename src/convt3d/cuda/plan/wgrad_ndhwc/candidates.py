"""The tiles of ``wgrad_ndhwc/kernel.cu`` that are candidates for a problem."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from convt3d.cuda.plan.launches import MOST_COPIED, copy_refusal
from convt3d.cuda.plan.search import by_cost, with_tile
from convt3d.cuda.plan.split_k import MAX_REGISTERS
from convt3d.cuda.plan.wgrad_ndhwc.cost import best_cluster
from convt3d.cuda.plan.wgrad_ndhwc.layout import Tile
from convt3d.cuda.plan.wgrad_ndhwc.plan import POSITIONS, WgmmaWgradNdhwcPlan, deepest
from convt3d.cuda.schedule import Gpu, Problem, div_up, round_up
from convt3d.precision import Arithmetic

_MOST_STRIDE = 8  # of TMA's element strides
_MAX_BOXES = 32  # of a step, one for each lane
# taps_on_m, consumers, blocks, and the most columns of a product. Bytes of a step go with M + N,
# its products with M * N, and shared memory that products read with 64 + N for 64 * N.
_SHAPES: tuple[tuple[bool, tuple[int, int], int, int], ...] = (
    (False, (2, 1), 1, 256),  # 128 x 256, the square tile of GEMMs: x of 128 channels and more
    (False, (1, 2), 1, 256),  # 64 x 512: x of 64 channels, of which M has no more
    (False, (1, 3), 1, 192),  # 64 x 576: nine taps of 64 channels, a third of a 3x3x3 kernel
    (False, (3, 1), 1, 192),  # 192 x 192: x of 192 or 320 channels
    (True, (2, 1), 1, 256),  # 128 x N: N as x has channels, of which atoms of 64 would waste some
    (True, (2, 1), 2, 160),  # 256 x N: the same, up to 160 channels, which 320 are twice
    (True, (2, 1), 3, 96),  # 384 x N: three taps, which may share boxes
    (True, (3, 1), 1, 160),  # 192 x N: the same, of more channels
    (True, (3, 1), 5, 32),  # 960 x N: the same, all 27 taps of 32 channels
    (True, (3, 1), 3, 48),  # 576 x N: the same in TF32, whose fragments take registers
    (True, (2, 1), 4, 64),  # 512 x N: x of 32 or 48 channels
    (True, (2, 1), 7, 32),  # 896 x N: all 27 taps of 32 channels in one CTA
)
# Of 4 lines 3 taps read 6, of 8 they read 10; lines are of eight positions at least.
_LINES = {16: (0,), 32: (0, 4), 64: (0, 4, 8), 128: (0, 8)}


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why wgrad_ndhwc/kernel.cu cannot take a problem, or None."""
    if gpu.capability[0] != 9:
        return "warpgroup products exist on compute capability 9.0 only"
    if problem.operation != "grad_weight":
        return "the gradient by weight alone"
    if problem.arithmetic is Arithmetic.IEEE:
        return "IEEE-grade is not among its arithmetics: operands are multiplied as they come"
    vector = 16 // problem.element_bytes
    if problem.source_channels % vector or problem.target_channels % vector:
        return "channels of a group are moved as 16 bytes"
    if max(problem.geometry.stride) > _MOST_STRIDE:
        return f"TMA takes every eighth position at most, not a stride beyond {_MOST_STRIDE}"
    return copy_refusal(problem)


def candidates(problem: Problem, gpu: Gpu) -> Iterator[WgmmaWgradNdhwcPlan]:
    """Every kernel of the list that fits, with the deepest pipeline."""
    g, channels, transposes = problem.geometry, problem.source_channels, problem.element_bytes == 4
    shares = g.kernel_size[1] > 1 and g.stride[1] == 1
    steps = [
        (positions, lines)
        for positions in POSITIONS[problem.element_bytes]
        for lines in _LINES[positions][: None if shares else 1]
    ]
    for (taps_on_m, consumers, blocks, most), (positions, lines) in itertools.product(
        _SHAPES, steps
    ):
        if transposes and not taps_on_m:
            continue  # x, which all taps share, is what is transposed
        tile = Tile(taps_on_m, consumers, blocks, most, positions, 2, lines)
        plan = WgmmaWgradNdhwcPlan(problem, tile, gpu)
        columns = most
        if taps_on_m:
            columns = round_up(div_up(channels, div_up(channels, most)), 16)
        elif lines:
            columns = plan.strip * plan.target_atom
        plan = with_tile(plan, columns=columns)
        wide = consumers[0] == 1 or taps_on_m or channels > 64
        registers = blocks * (columns // 2 + (8 if transposes else 0))
        atoms = plan.sides[1] // plan.target_atom
        if (
            wide
            and atoms % plan.strip == 0
            and columns <= most
            and registers <= MAX_REGISTERS[plan.consumers]
            and plan.boxes[0] + atoms <= _MAX_BOXES
        ):
            plan = deepest(plan)
            if plan.tile.stages >= 2:
                yield plan


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, WgmmaWgradNdhwcPlan]]:
    """Candidates for these input extents with their costs, cheapest first."""
    if refusal(problem, gpu) is not None:
        return []
    size, _ = problem.extents(input_size)
    plans = candidates(problem, gpu)
    found = by_cost(
        (one.cost(batch, size), one) for plan in plans for one in _shared(plan, batch, size)
    )
    return found if problem.channels_last else found[:MOST_COPIED]


def _shared(
    plan: WgmmaWgradNdhwcPlan, batch: int, input_size: Sequence[int]
) -> Iterator[WgmmaWgradNdhwcPlan]:
    """The kernel, and the one whose CTAs share steps as clusters, where weights have lines."""
    yield plan
    box = plan.box(batch, input_size)
    if box is not None and not plan.along_taps:
        d, h, w = input_size
        cluster = best_cluster(plan, (batch, d, h, w), box)
        if cluster is not None:
            yield with_tile(plan, cluster=cluster)
