"""Which plans of patch/kernel.cu there are for a problem and its extents."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from convt3d.cuda.plan import ampere_patch
from convt3d.cuda.plan.cells import CellProduct
from convt3d.cuda.plan.patch.layout import Tile, weight_box
from convt3d.cuda.plan.patch.plan import WgmmaPatchPlan
from convt3d.cuda.plan.search import by_cost, with_tile
from convt3d.cuda.plan.warpgroups import ONLY_HOPPER
from convt3d.cuda.schedule import Gpu, Problem, div_up, round_up
from convt3d.precision import Arithmetic

# Of a thread; of split products, which have as many again: of more the layers that were timed took
# a tenth to a fifth longer.
_MAX_ACCUMULATORS = {1: 160, 2: 64}
_MAX_COLUMN_TILES = 64
_MIN_DEPTH, _MIN_COLUMNS = 16, 8
_FEW_ROUNDS = 4  # tiles of a CTA where turning weights, and stores, are not hidden


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why patch/kernel.cu cannot take a problem, or None."""
    if gpu.capability[0] != 9:
        return ONLY_HOPPER
    if problem.operation == "grad_weight":
        return "patch/kernel.cu has no gradient by weight"
    cell_bytes = problem.geometry.stride[2] * problem.element_bytes
    last = problem.source_channels_last
    product = CellProduct(problem, None, gpu)
    lines = product.channel_lines
    if not lines and not last and cell_bytes not in (4, 8, 16):
        return f"{cell_bytes} bytes of slots along W are no word, pair or quad of words"
    if problem.arithmetic is Arithmetic.IEEE and (last or not problem.forward):
        return "patch/kernel.cu has IEEE-grade products of contiguous forward passes only"
    if last != problem.target_channels_last:
        return "patch/kernel.cu needs activations of one layout"
    if last and problem.source_channels * problem.element_bytes % 16:
        return "channels of a group are no multiple of 16 bytes"
    if product.depth < _MIN_DEPTH or product.columns < _MIN_COLUMNS:
        return "too few channels fill a product of wgmma"
    if reason := ampere_patch.refusal(problem):
        return reason
    if not problem.forward and last:
        if problem.geometry.groups > 1:
            return "channels_last gradients have no groups"
        row = problem.geometry.stride[2] * problem.source_channels * problem.element_bytes
        if row % 128 or problem.target_channels * problem.element_bytes % 16:
            return "slots along W of a row are no multiple of 128 bytes"
        if problem.geometry.stride[1] > 8:
            return "TMA steps over 8 rows at most"
    elif not problem.forward:
        if not lines and weight_box(problem, False) is None:
            return "the slots of 128 bytes of the weight's k are no box"
        depth_bytes = product.depth * problem.element_bytes
        if not lines and problem.geometry.groups > 1 and depth_bytes % 128:
            return "groups of the output gradient must be whole chunks of k"
        if depth_bytes % 16:
            return "rows of the weight are no multiple of 16 bytes"
    return None


def _candidates(
    problem: Problem, batch: int, size: Sequence[int], gpu: Gpu
) -> Iterator[WgmmaPatchPlan]:
    product = CellProduct(problem, None, gpu)
    group, columns = 8 * product.interleave, product.columns
    rows = problem.source_channels_last and not problem.forward
    staged = 128 // problem.element_bytes if rows else 0
    widths = sorted({round_up(div_up(columns, n), staged or group) for n in range(1, 65)})
    _, stride1, stride2 = problem.geometry.stride
    row = size[2] * stride2 * problem.element_bytes
    last = problem.source_channels_last
    short = not problem.forward and not last and row < 128 and stride1 > 1 and size[2] % 4 == 0
    folds = short and 128 % (row * stride1) == 0 and weight_box(problem, True) is not None
    fold = size[2] if folds else 0
    most_accumulators = _MAX_ACCUMULATORS[problem.words_per_value]
    for width, blocks, consumers in itertools.product(widths, (1, 2), (1, 2, 3)):
        if width > 256 or blocks * width // 2 > most_accumulators:
            continue
        if last and blocks > 1:
            continue
        if div_up(columns, width) > _MAX_COLUMN_TILES:
            continue
        # Alone, one consumer would leave the tensor core idle while it stores.
        resident = 2 if consumers == 1 else 1
        tile = Tile(consumers, blocks, width, 2, 2, False, resident, fold=fold, staged=staged)
        base = WgmmaPatchPlan(problem, tile, gpu)
        if _natural(base):
            base = with_tile(base, n_major=True)
        if staged and not base.boxed(size):
            continue
        tiles = div_up(math.prod(size), tile.cells) * batch
        rounds = tiles * base.blocks / (gpu.multiprocessors * resident)
        for splits in [1] if staged else base.splits(batch, size, resident):
            yield from _with_rings(with_tile(base, splits=splits), rounds)
        for other in _other_ways(base, size, rounds):
            yield from _with_rings(other, rounds)


def _other_ways(
    base: WgmmaPatchPlan, size: Sequence[int], rounds: float
) -> Iterator[WgmmaPatchPlan]:
    """The same products with more warps that turn weights, or stored as boxes.

    `rounds`: tiles that a CTA walks over, in the mean.
    """
    p, t = base.problem, base.tile
    if not p.forward:
        return
    box = _staged(base) if base.boxed(size) else 0
    if p.source_channels_last:
        # Lanes have 16 bytes of most outputs.
        if box and (p.target_channels % 8 or base.interleave == 1):
            yield with_tile(base, staged=box)
        return
    if p.element_bytes == 2:
        return
    # 512 threads are launched with 128 registers: ptxas refuses products of more columns.
    # Of split products many rounds were not tried.
    transposers = rounds <= _FEW_ROUNDS or base.parts == 1
    transposers = transposers and t.consumers == 2 and t.columns <= 192
    if transposers and base.map_weights:
        yield with_tile(base, fillers=2)
    if box:
        yield with_tile(base, staged=box)


def _natural(base: WgmmaPatchPlan) -> bool:
    """Whether products take the forward weights as memory has them."""
    p = base.problem
    return (
        p.forward
        and p.element_bytes == 2
        and base.map_weights
        and base.interleave == (4 if p.source_channels_last else 1)
    )


def _staged(base: WgmmaPatchPlan) -> int:
    """Columns that a box of outputs may have: whole channels of a product; 0: none."""
    p, t = base.problem, base.tile
    slots = math.prod(p.geometry.stride)
    if p.target_channels_last:
        box = base.columns // p.geometry.stride[0]
        if p.geometry.groups > 1 or base.row_elements * p.element_bytes % 4:
            return 0
    else:
        box = slots
        if p.geometry.groups > 1 and (
            base.columns % t.columns or p.source_channels % base.chunk_lines
        ):
            return 0
    whole = math.lcm(box, 8 * base.interleave)
    most = (20480 if p.target_channels_last else 16384) // (64 * t.blocks * p.element_bytes)
    fitting = [n for n in range(whole, min(t.columns, most) + 1, whole) if t.columns % n == 0]
    # channels_last boxes are rows of the target, however few slots of D they have.
    return (min if p.target_channels_last else max)(fitting, default=0)


def _with_rings(base: WgmmaPatchPlan, rounds: float) -> Iterator[WgmmaPatchPlan]:
    """Weights that stay, and those that are streamed, each with the deepest source rings.

    `rounds`: tiles that a CTA walks over, in the mean.
    """
    t, gpu, chunks = base.tile, base.gpu, base.split_chunks
    # Gradients became slower by it; the only tile of a CTA has nothing to stay apart for.
    ping_pongs = t.consumers == 2 and base.parts == 1 and rounds > 1
    ping_pongs = ping_pongs and base.channel_lines and not base.problem.source_channels_last
    room = gpu.shared_for(t.resident)
    streams = (4, 3) if base.problem.forward else (6, 4)
    rings = [(chunks, True)] if t.splits == 1 else []
    rings += [(n, False) for n in streams if n < base.chunks]
    deepest = 0  # source ring of streamed weights; fewer weight stages only make room for more
    for weight_stages, keep in rings:
        for stages in (6, 5, 4, 3, 2) if keep else (6, 4, 3, 2):
            plan = with_tile(
                base,
                source_stages=stages,
                weight_stages=weight_stages,
                keep_weights=keep,
                ping_pong=keep and ping_pongs,
            )
            if not keep and stages <= deepest:
                break
            if plan.shared_bytes <= room and plan.registers <= plan.consumer_registers:
                deepest = deepest if keep else stages
                yield plan
                break


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, WgmmaPatchPlan]]:
    """Candidates for these input extents with their costs, cheapest first."""
    if refusal(problem, gpu) is not None:
        return []
    return by_cost(
        (plan.cost(batch, input_size), plan)
        for plan in _candidates(problem, batch, input_size, gpu)
        if plan.takes(input_size)
    )
