"""Plans of ``ampere/gather``: forward and gradient by input on ``mma.sync``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.ampere_gather import cost
from convt3d.cuda.plan.ampere_gather.layout import GatherLayout
from convt3d.cuda.plan.launches import packed_first, with_strides
from convt3d.cuda.plan.once import once
from convt3d.cuda.schedule import (
    Launch,
    Schedule,
    div_up,
    geometry_macros,
    macros,
    problem_macros,
)
from convt3d.geometry import Triple


@dataclass(frozen=True)
class GatherPlan(GatherLayout):
    """A gather kernel for one problem; the shape of its tile follows the extents of each call."""

    def unit_box(self, batch: int, target: Sequence[int]) -> Triple:
        """The cheapest tile shape for destination extents, in units along the kernel's axes."""
        work = cost.work_of(self, batch, target)
        a, b, c = (int(n) for n in work.shapes[int(np.argmin(cost.call_cycles(self, work)))])
        return (a, b, c)

    @once
    def macros(self) -> tuple[tuple[str, str], ...]:
        p, t = self.problem, self.tile
        own: dict[str, object] = {
            "block0": t.block0,
            "warps_m": t.warps_m,
            "warps_n": t.warps_n,
            "fragments_m": t.fragments_m,
            "fragments_n": t.fragments_n,
            "stages": t.stages,
            "split": t.split,
            "depth": t.depth,
            "resident": t.resident,
            "positions": t.positions,
            "vector": self.vector,
        }
        return (
            p.type_macros
            + problem_macros(p)
            + macros("CONVT3D_", **own)
            + geometry_macros(p.geometry, self.order)
        )

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        source, target = self.problem.extents(input_size)
        units = self.unit_box(batch, target)
        tiles = [
            div_up(div_up(target[a], axis.unit_target), n)
            for a, axis, n in zip(self.order, self.axes, units, strict=True)
        ]
        phases = self.axes[0].phases * self.axes[1].phases
        groups = self.problem.geometry.groups
        grid = phases * self.column_tiles * groups * tiles[0] * tiles[1] * tiles[2] * batch
        numbers = (
            *with_strides(source, self.order),
            *with_strides(target, self.order),
            *units,
            *tiles,
        )
        product = Launch(
            KernelSpec("ampere/gather/kernel.cu", "convt3d_ampere_gather", self.macros),
            grid,
            self.threads,
            self.shared_bytes,
            ("source", "packed", "bias", "target", *map(np.int32, numbers)),
            dependent=True,
        )
        lanes = self.packed_words // (self.fragment_words // 32)
        blocks = min(div_up(lanes, 256), 4096)
        return packed_first(product, blocks, 4 * self.packed_words, order=self.order)

    def describe(self) -> dict[str, str]:
        t = self.tile
        kind = "static" if t.block0 else "phased"
        return {
            "kernel": f"gather ({kind}), mma.sync",
            "axes": "H, D, W" if self.swapped else "D, H, W",
            "tile": f"{t.rows} M rows x {self.column_tile} columns",
            "unit": "x".join(str(a.unit_target) for a in self.axes) + " outputs",
            "warps": f"{t.warps_m} x {t.warps_n}, fragments {t.fragments_m} x {t.fragments_n}",
            "pipeline": f"{t.stages} stages of "
            + ("a tap row" if t.split else f"{self.chunk_channels} channels")
            + f", {t.resident} CTAs a multiprocessor",
            "shared memory": f"{self.shared_bytes} bytes",
        }
