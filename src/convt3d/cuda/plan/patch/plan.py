"""Plans of ``patch/kernel.cu``: kernel == stride without padding on warpgroup products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.patch import cost, maps
from convt3d.cuda.plan.patch.layout import PatchLayout
from convt3d.cuda.schedule import (
    WEIGHT_STRIDES,
    Launch,
    Schedule,
    macros,
    not_taken,
)


@dataclass(frozen=True)
class WgmmaPatchPlan(PatchLayout):
    """A kernel == stride product of one problem.

    Cells come by TMA: where the volume of a channel is no multiple of 16 bytes (in the gradient of
    several slots, a row of the output gradient no multiple of 128 bytes; folded, of another length
    than planned), ``ampere/patch/kernel.cu`` runs.
    """

    @once
    def macros(self) -> tuple[tuple[str, str], ...]:
        t = self.tile
        return self.product_macros + macros(
            "CONVT3D_",
            consumers=t.consumers,
            blocks=t.blocks,
            column_tile=t.columns,
            run=self.run,
            interleave=self.interleave,
            source_stages=t.source_stages,
            weight_stages=t.weight_stages,
            keep_weights=t.keep_weights,
            map_weights=self.map_weights,
            splits=t.splits,
            ping_pong=t.ping_pong,
            fold=t.fold,
            fillers=t.fillers,
            staged_columns=t.staged,
            n_major=t.n_major,
            weight_box_row=self.weight_box_row,
            resident=t.resident,
            set_registers=t.consumers > 1,
            consumer_registers=self.consumer_registers,
            producer_registers=self.producer_registers,
            hold_bias=self.hold_bias,
            shared_bytes=self.shared_bytes,
        )

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        if not self.takes(input_size):
            raise not_taken(self, input_size)
        staged = self.tile.staged > 0
        per_sample = self.tiles_per_sample(input_size)
        tiles = per_sample * batch
        workers = min(tiles, self.most_workers)
        launch = Launch(
            KernelSpec("patch/kernel.cu", "convt3d_patch", self.macros),
            workers * self.blocks,
            self.tile.threads,
            self.shared_bytes,
            (
                *("weight", "bias", "target" if self.tile.splits == 1 else "partial"),
                maps.source_map(self, batch, input_size),
                *((maps.weight_map(self),) if self.map_weights else ()),
                *((maps.target_map(self, batch, input_size),) if staged else ()),
                *((np.int32(self.box_width(input_size)),) if staged else ()),
                *map(np.int32, (*input_size, per_sample, tiles, workers)),
                *WEIGHT_STRIDES,
            ),
        )
        if self.tile.splits == 1:
            return Schedule((launch,))
        return self.summed(launch, batch, input_size)

    def cost(self, batch: int, input_size: Sequence[int]) -> float:
        """Estimated cycles of one call."""
        return cost.call_cycles(self, batch, input_size)

    def _ways(self) -> list[str]:
        t = self.tile
        return [
            *([f"{t.fillers} warpgroups fill"] if t.fillers > 1 else []),
            *(["stored by TMA"] if t.staged else []),
            *(["weights as they are"] if t.n_major else []),
            *(["ping_pong"] if t.ping_pong else []),
        ]

    def describe(self) -> dict[str, str]:
        t = self.tile
        return {
            "kernel": "patch (kernel == stride), wgmma",
            "tile": f"{t.cells} cells x {t.columns} columns",
            "unit": f"{self.run} cells, {self.interleave} fragments a lane"
            + (f", boxes of {t.staged} columns" if t.staged else ""),
            "warps": f"{t.consumers} consumers of {t.blocks} blocks",
            "pipeline": f"{t.source_stages} stages of {128 // self.problem.element_bytes} of k, "
            + ("weights stay" if t.keep_weights else f"{t.weight_stages} stages of weights")
            + f", {t.resident} CTAs a multiprocessor"
            + (f", {t.splits} splits" if t.splits > 1 else "")
            + (", " + " ".join(self._ways()) if self._ways() else ""),
            "shared memory": f"{self.shared_bytes} bytes",
        }
