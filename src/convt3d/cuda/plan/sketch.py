"""What a plan computes at a time: its M x N tile, its K loop, its work tiles; for ``explain``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

from convt3d.cuda.plan import (
    ampere_gather,
    ampere_patch,
    ampere_strided,
    ampere_strided_rows,
    ampere_strided_slices,
    ampere_wgrad,
    col2im,
    ndhwc,
    patch,
    phases,
    rows,
    sweep,
    wgrad,
    wgrad_ndhwc,
)
from convt3d.cuda.schedule import Launch, Plan, Problem, div_up
from convt3d.geometry import Triple


@dataclass(frozen=True)
class Sketch:
    """The tile of a matrix product and the number of such tiles.

    Args:
        m: rows of a tile; positions, or for a gradient by weight taps x channels.
        n: columns of a tile, channels mostly; 0 where ``m`` and ``n`` are not those of a product.
        k: what a tile adds up, in words.
        work_tiles: tiles of the call; None where the kernel divides its work otherwise.
        ctas: CTAs of the launch that multiplies.
        steps: planes or pairs of planes that a work tile is swept along, one after the other.
        split: whether several CTAs add up parts of a work tile.
    """

    m: int
    n: int
    k: str
    work_tiles: int | None
    ctas: int
    steps: int = 1
    split: bool = False

    @property
    def work(self) -> str:
        """Work tiles and CTAs, in words."""
        ctas = f"{self.ctas:,} CTA{'s' * (self.ctas > 1)}"
        if self.work_tiles is None:
            return ctas
        tiles = f"{self.work_tiles:,} work tile{'s' * (self.work_tiles > 1)}"
        if self.split:
            return f"{tiles}, split along K over {ctas}"
        if self.steps > 1:
            return f"{tiles} of {self.steps:,} steps, cut evenly over {ctas}"
        return f"{tiles} on {ctas}"


def sketch(plan: Plan, batch: int, input_size: Sequence[int]) -> Sketch:
    """The sketch of a plan for a batch and the spatial size (D, H, W) of the layer's input."""
    source, target = plan.problem.extents(input_size)
    ctas = _product(plan.schedule(batch, input_size).launches).grid
    m, n, k, work_tiles = _tile(plan, _Extents(batch, source, target))
    steps = 1
    if isinstance(plan, sweep.WgmmaSweepPlan):
        steps = plan.sweep.steps(target[plan.order[0]])
    split = isinstance(plan, ndhwc.WgmmaNdhwcPlan) and plan.tile.cluster > 1
    if plan.problem.operation == "grad_weight":
        split, k = True, f"{batch * math.prod(input_size):,} positions"
    return Sketch(m, n, k, work_tiles, ctas, steps, split)


def _product(launches: Sequence[Launch]) -> Launch:
    """The launch that multiplies: neither weights are packed there nor sums reduced."""
    others = ("pack", "reduce")
    return next(x for x in launches if not any(word in x.kernel.entry for word in others))


@dataclass(frozen=True)
class _Extents:
    """Of a call."""

    batch: int
    source: Triple
    target: Triple


_Tile = tuple[int, int, str, int | None]


@singledispatch
def _tile(plan: Plan, at: _Extents) -> _Tile:
    """M, N, the K loop and the number of work tiles; CUDA cores form no product."""
    return 0, 0, "", None


def _channels(problem: Problem, chunk: int) -> str:
    """The K loop over channels of a group and taps."""
    channels = problem.source_channels
    text = f"{channels} channel{'s' * (channels > 1)}"
    if chunk < channels:
        text += f", {chunk} at a time,"
    taps = math.prod(problem.geometry.kernel_size)
    if problem.forward and max(problem.geometry.stride) > 1:
        return f"{text} for each tap of a phase"
    return f"{text} for each of {taps} taps"


@_tile.register
def _(plan: phases.PhasesLaunches, at: _Extents) -> _Tile:
    count = None
    if plan.fits(at.batch, at.source, at.target):
        count = plan.shape(at.batch, at.target).count
        count *= plan.product_work_tiles
    k = _channels(plan.problem, plan.chunk_channels)
    return plan.tile.rows, plan.tile.column_tile, k, count


@_tile.register
def _(plan: ndhwc.WgmmaNdhwcPlan, at: _Extents) -> _Tile:
    count = plan.shape(at.batch, at.target).count * plan.n_tile_phases
    k = _channels(plan.problem, plan.chunk_channels)
    return plan.tile.rows, plan.tile.column_tile, k, count


@_tile.register
def _(plan: sweep.WgmmaSweepPlan, at: _Extents) -> _Tile:
    line = plan.line(at.batch, at.source, at.target)
    k = _channels(plan.problem, plan.chunk_channels)
    count = div_up(line.rows, plan.tile.rows) * plan.tile_columns
    return plan.tile.rows, plan.tile.column_tile, k, count


@_tile.register
def _(plan: patch.WgmmaPatchPlan, at: _Extents) -> _Tile:
    cells = at.source if plan.problem.forward else at.target
    count = None
    if plan.mapped(cells) and (not plan.tile.staged or plan.boxed(cells)):
        count = plan.tiles_per_sample(cells) * at.batch * plan.blocks
    chunk = 128 // plan.problem.element_bytes
    return plan.tile.cells, plan.tile.columns, _patch(plan.problem, chunk), count


@_tile.register
def _(plan: ampere_patch.PatchPlan, at: _Extents) -> _Tile:
    cells = math.prod(at.source if plan.problem.forward else at.target)
    count = div_up(cells, plan.tile.cells) * at.batch * plan.blocks
    chunk = plan.tile.chunk_lines * plan.width
    return plan.tile.cells, plan.tile.columns, _patch(plan.problem, chunk), count


def _patch(problem: Problem, chunk: int) -> str:
    """The K loop where kernel == stride: forward, the taps are columns."""
    channels, taps = problem.source_channels, math.prod(problem.geometry.kernel_size)
    depth = channels if problem.forward else channels * taps
    text = f"{channels} channels" + ("" if problem.forward else f" x {taps} taps")
    return f"{text}, {chunk} at a time" if chunk < depth else text


@_tile.register
def _(plan: ampere_gather.GatherPlan, at: _Extents) -> _Tile:
    units = plan.unit_box(at.batch, at.target)
    tiles = [
        div_up(div_up(at.target[a], axis.unit_target), n)
        for a, axis, n in zip(plan.order, plan.axes, units, strict=True)
    ]
    count = math.prod(tiles) * at.batch * plan.axes[0].phases * plan.axes[1].phases
    count *= plan.column_tiles * plan.problem.geometry.groups
    return plan.tile.rows, plan.column_tile, _channels(plan.problem, plan.chunk_channels), count


@_tile.register
def _(plan: ampere_strided.StridedPlan, at: _Extents) -> _Tile:
    shape = plan.shape(at.batch, at.target)
    tiles = [div_up(n, t) for n, t in zip(plan.needed(at.target), shape.units, strict=True)]
    k = _channels(plan.problem, plan.chunk_channels)
    return 16 * plan.tile.fragments, plan.column_tile, k, math.prod(tiles) * at.batch * plan.n_tiles


@_tile.register
def _(plan: ampere_strided_rows.StridedRowsPlan, at: _Extents) -> _Tile:
    k = _channels(plan.problem, plan.problem.source_channels)
    return plan.tile.width, plan.products.column_tile, k, None


@_tile.register
def _(plan: ampere_strided_slices.StridedSlicesPlan, at: _Extents) -> _Tile:
    t = plan.tile
    k = _channels(plan.problem, plan.problem.source_channels)
    return 16 * t.warps * t.fragments_m, plan.products.column_tile, k, None


@_tile.register
def _(plan: rows.WgmmaRowsPlan, at: _Extents) -> _Tile:
    count = (
        plan.rows_of(at.batch, at.target)[2] * plan.n_tiles
        if plan.takes(at.source, at.target)
        else None
    )
    k = _channels(plan.problem, plan.problem.source_channels)
    return plan.units, max(plan.columns), k, count


@_tile.register
def _(plan: col2im.Col2imPlan, at: _Extents) -> _Tile:
    return plan.tile.positions, plan.columns, f"{plan.problem.source_channels} channels", None


@_tile.register
def _(plan: wgrad.WgmmaWgradPlan, at: _Extents) -> _Tile:
    return plan.cta_blocks * 64, plan.columns, "", plan.tiles * plan.row_tiles


@_tile.register
def _(plan: wgrad_ndhwc.WgmmaWgradNdhwcPlan, at: _Extents) -> _Tile:
    return *plan.extents, "", plan.tiles


@_tile.register
def _(plan: ampere_wgrad.WgradPlan, at: _Extents) -> _Tile:
    m, n = plan.channel_tiles
    return math.prod(plan.taps) * m, n, "", plan.variants
