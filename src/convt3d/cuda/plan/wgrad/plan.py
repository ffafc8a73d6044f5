"""The plan of ``wgrad/kernel.cu``: a kernel whose tiles of positions follow the extents."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from convt3d.cuda.plan.wgrad import launches
from convt3d.cuda.plan.wgrad.call import Call, Fill
from convt3d.cuda.plan.wgrad.kernel import Kernel
from convt3d.cuda.plan.wgrad.layout import Layout, best_layout
from convt3d.cuda.plan.wgrad.sums import Work
from convt3d.cuda.schedule import Schedule, not_taken
from convt3d.geometry import Triple

_MORE_STAGES_COST = 1.2  # of joined rows, than two


@dataclass(frozen=True)
class WgmmaWgradPlan(Kernel):
    """A gradient-by-weight kernel; tile shape and splits follow the extents of each call."""

    def layout(self, input_size: Sequence[int]) -> Layout:
        """The shared memory of a call: the gradient comes in the best way that has a tile."""
        d, h, w = input_size
        if (d, h, w) not in self._layouts:
            self._layouts[d, h, w] = best_layout(Call(self, (d, h, w)))
        return self._layouts[d, h, w]

    @functools.cached_property
    def _layouts(self) -> dict[Triple, Layout]:
        return {}

    def fill(self, input_size: Sequence[int]) -> Fill:
        """How the gradient comes."""
        return self.layout(input_size).fill

    def _works(
        self, batch: int, input_size: Sequence[int], *, rough: bool = False
    ) -> Iterator[Work]:
        """The call with each tile that fits; a ``rough`` look is at few of them."""
        layout = self.layout(input_size)
        return (Work(layout, batch, tile) for tile in layout.tiles(few=rough))

    def cost(self, batch: int, input_size: Sequence[int], *, rough: bool = False) -> float:
        """Estimated cycles of one call with its best tile; inf where no tile fits."""
        joined = self.fill(input_size) is Fill.JOINED
        if self.together and not joined:
            return math.inf
        # Extents that stand for large ones have short rows, of which three stages hold more: of
        # longer rows two were faster for every layer that was timed.
        factor = _MORE_STAGES_COST if joined and self.stages > 2 else 1
        works = self._works(batch, input_size, rough=rough)
        return min((factor * work.cycles for work in works), default=math.inf)

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        layout = self.layout(input_size)
        if self.phases and not any(layout.tiles()):
            return replace(self, phases=False).schedule(batch, input_size)
        if self.together and layout.fill is not Fill.JOINED:
            return replace(self, together=False).schedule(batch, input_size)
        works = self._works(batch, input_size)
        work = min(works, key=lambda work: work.cycles, default=None)
        if work is None:
            raise not_taken(self, input_size)
        if self.cluster > 1 and not work.fits_cluster:
            return replace(self, cluster=1).schedule(batch, input_size)
        return launches.schedule(work)

    def describe(self) -> dict[str, str]:
        way = "runs" if self.runs else "rows" if self.whole_rows else "copies"
        pipeline = (
            f"{self.consumers} consumers",
            f"{self.stages} stages",
            f"{self.fragments} fragments",
            "1 CTA a multiprocessor",
            f"gradient by {'columns' if self.whole_columns else way}",
            *(("phases of W",) if self.phases else ()),
            *(("taps together",) if self.together else ()),
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
