"""What plans of ``phases/`` and ``ndhwc/`` share: work tiles of units, columns and phases.

A work tile is a tile of units along the samples, D, H and W, a tile of columns, and a phase of each
axis whose phases are apart. Boxes of the source and stages of weights pass through shared memory.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from convt3d.cuda.plan.axes import Axis, phased_axes
from convt3d.cuda.plan.banks import Four
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.search import with_tile
from convt3d.cuda.schedule import Gpu, Problem, div_up


@dataclass(frozen=True)
class UnitTile:
    """The compile-time choices that kernels of every kind have, and what the others are in those
    kinds that have no choice.
    """

    phased: int  # leading axes whose phases are work tiles of their own
    blocks: int  # of 64 units to a consumer warpgroup
    column_tile: int
    consumers: int
    source_stages: int
    weight_stages: int

    resident_weights = False
    groups_per_tile = 1
    cluster = 1  # split-K: CTAs that share the products of a work tile
    producers = 1  # warpgroups beside the consumers

    @property
    def rows(self) -> int:
        return 64 * self.blocks * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + self.producers)


@dataclass(frozen=True)
class UnitShape:
    """A tile's units (samples, D, H, W), how many tiles there are, and the box that brings one."""

    units: Four
    tiles: Four
    box: Four  # samples, slices, lines, positions

    @once
    def count(self) -> int:
        return math.prod(self.tiles)


AnyShape = TypeVar("AnyShape", bound=UnitShape)


@dataclass(frozen=True)
class UnitTileKernel(Generic[AnyShape]):
    """A kernel for one problem; the shape of its tile follows the extents of each call."""

    problem: Problem
    tile: Any
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)

    # ------------------------------------------------------------ phases and channels

    @once
    def axes(self) -> tuple[Axis, Axis, Axis]:
        return phased_axes(self.problem, self.tile.phased)

    @once
    def phases(self) -> int:
        return math.prod(axis.phases for axis in self.axes)

    @property
    def groups(self) -> int:
        """Groups of channels that tiles have each to itself: several, where one has several."""
        return self.problem.geometry.groups // self.tile.groups_per_tile

    @property
    def source_channels(self) -> int:
        """Of the groups of a tile."""
        return self.problem.source_channels * self.tile.groups_per_tile

    @property
    def target_channels(self) -> int:
        """Of the groups of a tile."""
        return self.problem.target_channels * self.tile.groups_per_tile

    @once
    def column_tiles(self) -> int:
        return div_up(self.target_channels, self.tile.column_tile)

    @once
    def n_tiles(self) -> int:
        return self.groups * self.column_tiles

    @once
    def n_tile_phases(self) -> int:
        """Work tiles of a tile."""
        return self.n_tiles * self.phases

    @property
    def product_work_tiles(self) -> int:
        """Work tiles of a tile that CTAs multiply."""
        return self.n_tile_phases

    @once
    def vector(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.problem.element_bytes

    @once
    def live_slots(self) -> int:
        """Slots of a unit that have taps and so need sums."""
        return math.prod(axis.live_slots for axis in self.axes)

    @property
    def accumulators(self) -> int:
        return self.live_slots * self.tile.blocks * self.tile.column_tile // 2

    @property
    def stage_bytes(self) -> int:
        """Of a stage of weights."""
        raise NotImplementedError

    # ------------------------------------------------------------ shapes of the tile

    def shapes(self, batch: int, target: Sequence[int]) -> Iterator[AnyShape]:
        """Tiles that fit the kernel's rows and shared memory."""
        raise NotImplementedError

    def shared_bytes(self, shape: AnyShape, target: Sequence[int]) -> int:
        """Shared memory of a CTA."""
        raise NotImplementedError

    def cheapest(self, batch: int, target: Sequence[int]) -> tuple[float, AnyShape] | None:
        """Estimated cycles of one call with its best tile, and that tile, if any fits."""
        raise NotImplementedError

    def serves(self, batch: int, target: Sequence[int]) -> bool:
        """Whether a tile fits."""
        return _cheapest(self, batch, tuple(target)) is not None

    def _best(self, batch: int, target: Sequence[int]) -> tuple[float, AnyShape]:
        best: tuple[float, AnyShape] | None = _cheapest(self, batch, tuple(target))
        if best is None:
            raise ValueError(f"no tile of {self.tile} fits {tuple(target)}")
        return best

    def shape(self, batch: int, target: Sequence[int]) -> AnyShape:
        """The cheapest tile for these extents."""
        return self._best(batch, target)[1]

    def cost(self, batch: int, target: Sequence[int]) -> float:
        """Estimated cycles of one call with its best tile."""
        return self._best(batch, target)[0]

    # ------------------------------------------------------------ CTAs

    def grid(self, shape: AnyShape) -> int:
        """CTAs of a call, each with several work tiles.

        Where weights stay, every pair of N tile and phase has the same number of CTAs; each cluster
        has one work tile.
        """
        pairs, mp = self.product_work_tiles, self.gpu.multiprocessors
        if self.tile.cluster > 1:
            return shape.count * pairs * int(self.tile.cluster)
        most = max(1, mp // pairs) * pairs if self.tile.resident_weights else mp
        return min(most, shape.count * pairs)

    def rotation(self, shape: AnyShape) -> int:
        """Pairs of N tile and phase by which a CTA moves on between rounds, to get all of them."""
        if self.tile.resident_weights or self.tile.cluster > 1:
            return 0
        pairs = self.product_work_tiles
        step = self.grid(shape) % pairs
        return next(n for n in range(pairs) if math.gcd(step + n, pairs) == 1)

    # ------------------------------------------------------------ in words

    @property
    def kept(self) -> str:
        """How weights pass through shared memory."""
        stages = self.tile.weight_stages
        return "weights stay" if self.tile.resident_weights else f"{stages} weight stages"

    def describe(self) -> dict[str, str]:
        """What all kernels have: tile, phases, products and warps."""
        t = self.tile
        axes = ("none", "D", "D and H", "D, H and W")[t.phased]
        return {
            "tile": f"{t.rows} M rows x {t.column_tile} columns",
            "unit": f"{self.live_slots} unrolled phases with taps; phases apart: {axes}",
            "products": f"m64 x {t.column_tile} columns, {self.accumulators} accumulators a thread",
            "warps": f"{t.consumers} warpgroups multiply, {t.blocks} blocks of 64 M rows each",
        }


@functools.lru_cache(maxsize=8192)
def _cheapest(
    plan: UnitTileKernel[Any], batch: int, target: tuple[int, ...]
) -> tuple[float, Any] | None:
    return plan.cheapest(batch, target)


# --- Pipelines -----------------------------------------------------------------------------------

Pipelines = Sequence[tuple[int, int]]
"""Weight stages and source boxes, deepest first."""

AnyKernel = TypeVar("AnyKernel", bound=UnitTileKernel[Any])


def deepest(
    plan: AnyKernel, pipelines: Pipelines, batch: int, target: Sequence[int], kept: int = 0
) -> Iterator[AnyKernel]:
    """The plan with the first pipeline that leaves room for the best tile of the last one.

    ``kept``: stages of weights, where all of them stay in shared memory.
    """
    room = plan.gpu.shared_per_block
    if kept * plan.stage_bytes > room:
        return
    own = {"resident_weights": True} if kept else {}

    def with_pipeline(weights: int, sources: int) -> AnyKernel:
        return with_tile(plan, weight_stages=kept or weights, source_stages=sources, **own)

    last = with_pipeline(*pipelines[-1])
    if last.serves(batch, target):
        shape = last.shape(batch, target)
        every = itertools.chain(itertools.starmap(with_pipeline, pipelines[:-1]), (last,))
        yield next(p for p in every if p.shared_bytes(shape, target) <= room)
