"""What plans of layers whose kernel is their stride share: one product of cells and columns.

A cell is a position of the layer's input, with the outputs that no other position has a part in.
Columns are produced channels, forward those of all slots of a cell; K is what a column adds up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convt3d.cuda.compiler import KernelSpec, name_of
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.split_k import WORKSPACE_BYTES
from convt3d.cuda.schedule import Gpu, Launch, Problem, Schedule, div_up, macros, problem_macros

REDUCE_ELEMENTS, REDUCE_GRID = 1024, 4096  # of a CTA that adds partial sums; CTAs at most
_SPLITS = (2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class CellProduct:
    """A kernel == stride product of one problem."""

    problem: Problem
    tile: Any  # has cells, columns, CTAs that share a multiprocessor, and splits
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)  # over which tiles are spread

    @once
    def slots(self) -> int:
        """Outputs of a cell and channel."""
        return math.prod(self.problem.geometry.stride)

    @property
    def columns(self) -> int:
        return self.problem.target_channels * (self.slots if self.problem.forward else 1)

    @property
    def depth(self) -> int:
        """Of K."""
        return self.problem.source_channels * (1 if self.problem.forward else self.slots)

    @property
    def chunks(self) -> int:
        """Pieces of K that pass through shared memory."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Neighbouring elements of the source that belong to one cell."""
        p = self.problem
        return 1 if p.forward or p.source_channels_last else p.geometry.stride[2]

    @property
    def channel_lines(self) -> bool:
        """Whether a line of a contiguous source is a channel, whose cells follow one another."""
        p = self.problem
        return p.forward or (not p.source_channels_last and self.slots == 1)

    @property
    def interleave(self) -> int:
        return interleave(self.problem)

    @property
    def column_tiles(self) -> int:
        return div_up(self.columns, self.tile.columns)

    @property
    def blocks(self) -> int:
        """CTAs that share a tile of cells."""
        return self.column_tiles * self.problem.geometry.groups * self.tile.splits

    @property
    def product_macros(self) -> tuple[tuple[str, str], ...]:
        """Types, operation, channels and stride."""
        stride = {f"stride{i}": n for i, n in enumerate(self.problem.geometry.stride)}
        return (
            self.problem.type_macros + problem_macros(self.problem) + macros("CONVT3D_", **stride)
        )

    # ------------------------------------------------------------ CTAs

    @property
    def most_workers(self) -> int:
        """CTAs that walk over the tiles of one block of columns, at most."""
        return max(1, self.gpu.multiprocessors * self.tile.resident // self.blocks)

    def spread(self, tiles: int) -> tuple[int, int]:
        """Tiles that a CTA's place on a multiprocessor sees, and CTAs that share one of these."""
        workers = min(tiles, self.most_workers)
        ctas, mp = workers * self.blocks, self.gpu.multiprocessors
        waves = div_up(ctas, mp * self.tile.resident)
        return div_up(tiles, workers) * waves, min(self.tile.resident, div_up(ctas, mp))

    # ------------------------------------------------------------ split K

    def partial_elements(self, batch: int, size: Sequence[int]) -> int:
        """Sums of a gradient by input that each split leaves."""
        return batch * self.problem.geometry.in_channels * math.prod(size)

    def splits(self, batch: int, size: Sequence[int], resident: int) -> list[int]:
        """CTAs that may share a tile's chunks: more than one only where the GPU is not full.

        ``resident``: CTAs that then share a multiprocessor.
        """
        if self.problem.forward:
            return [1]
        tiles = div_up(math.prod(size), self.tile.cells) * batch * self.blocks
        partial = 4 * self.partial_elements(batch, size)
        return [1] + [
            n
            for n in _SPLITS
            if n * tiles <= self.gpu.multiprocessors * resident
            and n * partial <= WORKSPACE_BYTES
            and (n - 1) * div_up(self.chunks, n) < self.chunks
        ]

    def summed(self, product: Launch, batch: int, size: Sequence[int]) -> Schedule:
        """A product that leaves partial sums, and the pass that adds them."""
        elements = self.partial_elements(batch, size)
        file = product.kernel.file
        reduce = Launch(
            KernelSpec(file, f"convt3d_{name_of(file)}_reduce", product.kernel.macros),
            min(div_up(elements, REDUCE_ELEMENTS), REDUCE_GRID),
            256,
            0,
            ("partial", "target", np.int64(elements), np.int64(math.prod(size))),
            dependent=True,
        )
        return Schedule((product, reduce), {"partial": 4 * elements * self.tile.splits})


def interleave(problem: Problem) -> int:
    """Fragments whose columns interleave, so that a lane holds whole runs of neighbours."""
    if not problem.forward:
        return 1
    if problem.target_channels_last:
        widest = 8 // problem.element_bytes
        while problem.target_channels % (2 * widest):
            widest //= 2
            if widest == 1:
                break
        return widest
    width = problem.geometry.stride[2]
    return width // 2 if width % 2 == 0 else width
