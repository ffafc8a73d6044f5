"""Who adds up what: splits of the steps, and sums that need no second pass; cycles of a call."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.split_k import LONGEST_SUM
from convt3d.cuda.plan.wgrad.call import Fill
from convt3d.cuda.plan.wgrad.kernel import Kernel
from convt3d.cuda.plan.wgrad.layout import Layout, Tile
from convt3d.cuda.plan.wgrad.step import step_cycles
from convt3d.cuda.schedule import div_up, round_up

_UNEVEN = 1.06  # cost at which CTAs may have equally many columns
_CTA_CYCLES, _REDUCE_CYCLES = 6000, 4000
_CLUSTER_CYCLES, _CLUSTER_BYTES = 7800.0, 16.0  # of adding up sums of other CTAs
_DRAM_BYTES = 17.0  # a cycle, of a multiprocessor's share


@dataclass(frozen=True)
class Work:
    """The steps of a call with a tile, and how CTAs share them.

    Args:
        layout: the call, and how the gradient comes.
        batch: samples.
        tile: what a step covers.
    """

    layout: Layout
    batch: int
    tile: Tile

    @property
    def kernel(self) -> Kernel:
        return self.layout.kernel

    @once
    def across(self) -> tuple[int, int]:
        """Tiles along axes 1 and 2."""
        _, t1, t2 = self.tile.positions
        return div_up(self.layout.call.rows[1], t1), div_up(self.layout.call.size[2], t2)

    @once
    def down(self) -> int:
        """Steps of a column."""
        return div_up(self.layout.call.size[0], self.tile.positions[0])

    @once
    def columns(self) -> int:
        return self.batch * math.prod(self.across)

    @once
    def steps(self) -> int:
        return self.columns * self.down

    def _products(self, steps: int) -> int:
        return math.prod(self.tile.positions) // self.kernel.depth * steps

    @once
    def fits_cluster(self) -> bool:
        """Whether CTAs of a cluster, if there is one, can put down their sums for each other."""
        k = self.kernel
        if k.cluster == 1:
            return True
        products = self._products(div_up(self.steps, k.cluster))
        fits = k.sum_bytes <= k.gpu.shared_per_block and k.columns % k.cluster == 0
        return fits and (k.ieee or products <= LONGEST_SUM)

    @once
    def direct(self) -> bool:
        """Whether CTAs store the weight themselves: sums are whole and fit into shared memory."""
        k = self.kernel
        if k.cluster > 1:
            return True
        full, last = self.splits
        if last > 1 or (k.row_tiles > 1 and full > 1) or k.warp_products or k.phases:
            return False
        long = self._products(self.steps) > LONGEST_SUM
        return k.sum_bytes <= k.gpu.shared_per_block and (k.ieee or not long)

    @property
    def skips(self) -> bool:
        """Whether blocks leave out slices of a sample where their tap along axis 0 meets zeros."""
        k, layout = self.kernel, self.layout
        blocks = k.row_tiles == 1 and k.last_blocks == k.cta_blocks and k.consumers == 2
        own = k.taps[1] * k.taps[2] * k.channel_tile_m % 64 == 0
        whole = layout.fill is Fill.VOLUME and self.tile.positions == layout.call.size
        return blocks and own and whole and k.padding[0] > 0 and not k.ieee

    # ------------------------------------------------------------ splits

    @once
    def splits(self) -> tuple[int, int]:
        """CTAs that share the steps, for full row tiles and for the last one.

        Where all CTAs can have equally many columns at little loss, those of neighbours read common
        rows together, of which columns of taps have many.
        """
        k, steps = self.kernel, self.steps
        if k.cluster > 1:
            return 1, k.cluster
        wanted = k.most_splits
        even = k.column_taps and not k.runs
        if k.row_tiles == 1:
            wanted = max(1, min(wanted, steps))
            most = _UNEVEN * self.columns / wanted
            return 1, (even and _interleaved(self.columns, wanted, most)) or wanted
        share, full_tiles = self.last_step / self.full_step, k.row_tiles - 1

        def full(last: int) -> int:
            return min(max(1, (wanted - last) // full_tiles), steps)

        def of_full(last: int) -> int:
            return div_up(steps, full(last))

        def of_last(last: int) -> float:
            return div_up(steps, min(last, steps)) * share

        # The more CTAs the last row tile has, the less each of them does, and those of others more:
        # the longest does least where these meet, or with the fewest that do as little before.
        every = range(1, max(2, wanted - k.row_tiles + 2))
        met = bisect.bisect_left(every, 0.0, key=lambda n: of_full(n) - of_last(n))
        before = of_last(every[met - 1]) if met else math.inf
        if met == len(every) or before <= of_full(every[met]):
            chosen = every[bisect.bisect_left(every, -before, key=lambda n: -of_last(n))]
        else:
            chosen = every[met]
        if even:
            time = max(of_full(chosen), of_last(chosen))
            most = _UNEVEN * time / self.down / max(1.0, share)
            splits = _interleaved(self.columns, wanted // k.row_tiles, most)
            if splits:
                return splits, splits
        return full(chosen), min(chosen, steps)

    @property
    def ctas(self) -> int:
        full, last = self.splits
        return self.kernel.tiles * ((self.kernel.row_tiles - 1) * full + last)

    # ------------------------------------------------------------ cycles

    @once
    def _step(self) -> Callable[[float], float]:
        return step_cycles(self.layout, self.tile)

    @once
    def full_step(self) -> float:
        """Cycles of a step of a full row tile."""
        return self._step(self.kernel.cta_blocks)

    @once
    def last_step(self) -> float:
        """Cycles of a step of the last row tile; of an odd number one consumer has more blocks."""
        k = self.kernel
        even = round_up(k.last_blocks, k.consumers)
        return self._step((max(k.last_blocks, k.consumers) + even) / 2)

    @once
    def cycles(self) -> float:
        """Of the call; inf where a cluster does not fit."""
        k, (full, last) = self.kernel, self.splits
        if not self.fits_cluster:
            return math.inf
        multiprocessors, cta_bytes = k.gpu.multiprocessors, k.cta_elements * 4
        longest = div_up(self.steps, last) * self.last_step
        if k.row_tiles > 1:
            longest = max(longest, div_up(self.steps, full) * self.full_step)
        put_down = 0 if self.direct else cta_bytes / _DRAM_BYTES
        total = div_up(self.ctas, multiprocessors) * (longest + _CTA_CYCLES + put_down)
        # Every tensor comes from DRAM once.
        total = max(
            total, self.batch * self.layout.call.sample_bytes / multiprocessors / _DRAM_BYTES
        )
        if k.cluster > 1:
            others = cta_bytes * (k.cluster - 1) / k.cluster
            total += _CLUSTER_CYCLES + others / _CLUSTER_BYTES
        if self.direct:
            return total
        reduced = self.ctas * cta_bytes / multiprocessors / _DRAM_BYTES
        return total + reduced + _REDUCE_CYCLES


def _interleaved(columns: int, ctas: int, most: float) -> int:
    """Most CTAs that get equally many columns, and no more than ``most``; else 0."""
    first = max(1, math.ceil(columns / most))
    return next((n for n in range(min(ctas, columns), first - 1, -1) if columns % n == 0), 0)
