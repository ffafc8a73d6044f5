"""The plan of ``wgrad/kernel.cu``: a kernel whose tiles of positions follow the extents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.wgrad import launches
from convt3d.cuda.plan.wgrad.call import Call, Fill
from convt3d.cuda.plan.wgrad.kernel import Kernel
from convt3d.cuda.plan.wgrad.layout import Layout, best_layout
from convt3d.cuda.plan.wgrad.sums import Work
from convt3d.cuda.schedule import Schedule, not_taken
from convt3d.geometry import Triple

# Measured over modelled times, beside the other families: 1 where a product has so many blocks of
# 64 rows, and how the ratio grows with them, as an exponent.
_BLOCKS, _GROWTH = 24, 0.055


@dataclass(frozen=True)
class WgmmaWgradPlan(Kernel):
    """A gradient-by-weight kernel; tile shape and splits follow the extents of each call."""

    def layout(self, input_size: Sequence[int]) -> Layout | None:
        """The shared memory of a call, None where no tile fits: see best_layout."""
        d, h, w = input_size
        if (d, h, w) not in self._layouts:
            self._layouts[d, h, w] = best_layout(Call(self, (d, h, w)))
        return self._layouts[d, h, w]

    @once
    def _layouts(self) -> dict[Triple, Layout | None]:
        return {}

    def fill(self, input_size: Sequence[int]) -> Fill | None:
        """How the gradient comes; None where no tile fits."""
        layout = self.layout(input_size)
        return None if layout is None else layout.fill

    def _works(
        self, batch: int, input_size: Sequence[int], *, rough: bool = False
    ) -> Iterator[Work]:
        """The call with each tile that fits; a ``rough`` look is at few of them."""
        layout = self.layout(input_size)
        if layout is not None:
            yield from (Work(layout, batch, tile) for tile in layout.tiles(few=rough))

    def _best(self, batch: int, input_size: Sequence[int], *, rough: bool = False) -> Work | None:
        works = self._works(batch, input_size, rough=rough)
        return min(works, key=lambda work: work.cycles, default=None)

    def _cost(self, best: Work | None) -> float:
        if best is None:
            return math.inf
        return (self.row_blocks / _BLOCKS) ** _GROWTH * best.cycles

    def cost(self, batch: int, input_size: Sequence[int], *, rough: bool = False) -> float:
        """Estimated cycles of one call with its best tile; inf where no tile fits."""
        return self._cost(self._best(batch, input_size, rough=rough))

    def deeper(
        self, batch: int, input_size: Sequence[int], stages: Sequence[int]
    ) -> Iterator[tuple[float, WgmmaWgradPlan]]:
        """The plan with ever more stages, with costs as of :meth:`cost`."""
        last: Work | None = None
        for n in stages:
            plan = replace(self, stages=n)
            # Beyond two, steps take as long: the best tile that still fits is the best again.
            if n <= 3 or last is None or not last.layout.holds(last.tile, n):
                last = plan._best(batch, input_size)
            yield plan._cost(last), plan

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        work = self._best(batch, input_size)
        if work is None or not work.fits_cluster:
            raise not_taken(self, input_size)
        return launches.schedule(work)

    def describe(self) -> dict[str, str]:
        way = "runs" if self.runs else "rows" if self.whole_rows else "copies"
        pipeline = (
            f"{self.consumers} consumers",
            f"{self.stages} stages",
            f"{self.fragments} fragments",
            "1 CTA a multiprocessor",
            f"gradient by {'samples' if self.whole_samples else way}",
            *(("phases of W",) if self.phases else ()),
            *((f"clusters of {self.cluster}",) if self.cluster > 1 else ()),
        )
        return {
            "kernel": "gradient by weight, wgmma, split and reduced in order",
            "axes": ", ".join("DHW"[i] for i in self.order),
            "tile": f"{self.cta_blocks * 64} rows of {self.octets * 8} "
            f"(taps x {self.channel_tile_m} channels) x {self.columns} columns",
            "variants": f"{self.tiles} channel tiles, {self.row_tiles} row tiles",
            "pipeline": ", ".join(pipeline),
        }
