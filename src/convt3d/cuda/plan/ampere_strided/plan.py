"""Plans of ``ampere/strided``: all phases of a tile in one CTA, for layers bound by memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.ampere_strided import cost
from convt3d.cuda.plan.ampere_strided.layout import Shape, StridedLayout, units_of
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


@dataclass(frozen=True)
class StridedPlan(StridedLayout):
    """A strided kernel for one problem; the shape of its tile follows the extents of each call."""

    @property
    def bulk_stores(self) -> bool:
        """Whether staged outputs leave by bulk copies."""
        return self.gpu.capability >= (9, 0)

    def shape(self, batch: int, target: Sequence[int]) -> Shape:
        """The cheapest tile shape for destination extents."""
        found = self.shapes(target)
        return found[int(np.argmin(cost.call_cycles(self, units_of(found), batch, target)))]

    @once
    def macros(self) -> tuple[tuple[str, str], ...]:
        p, t = self.problem, self.tile
        types = dict(p.type_macros)
        if self.step_words == 4:
            types["CONVT3D_MATH"] = f"Math16K8<{types['CONVT3D_TYPE']}>"
        return (
            tuple(types.items())
            + problem_macros(p)
            + macros(
                "CONVT3D_",
                warps=t.warps,
                fragments_m=t.fragments_m,
                fragments_n=t.fragments_n,
                stages=t.stages,
                depth=t.depth,
                resident_weights=t.resident_weights,
                resident=t.resident,
                vector=t.vector,
                positions=t.positions,
                bulk_stores=self.bulk_stores,
                ring=0,
                ring_width=0,
                ring_slices=0,
            )
            + geometry_macros(p.geometry)
        )

    @property
    def kernel(self) -> KernelSpec:
        if self.problem.forward:
            return KernelSpec("ampere/strided/forward.cu", "convt3d_ampere_strided", self.macros)
        return KernelSpec("ampere/strided/dgrad.cu", "convt3d_ampere_strided_dgrad", self.macros)

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        source, target = self.problem.extents(input_size)
        shape = self.shape(batch, target)
        tiles = [div_up(n, t) for n, t in zip(self.needed(target), shape.units, strict=True)]
        count = tiles[0] * tiles[1] * tiles[2] * batch
        numbers = (
            *with_strides(source), *with_strides(target),
            *shape.units, *tiles, shape.line_rows, shape.line_fragments, count,
            int(self.staging_buffers(shape.units)),
        )  # fmt: skip
        product = Launch(
            self.kernel,
            self.workers(count) * self.n_tiles,
            self.threads,
            self.shared_bytes(shape.units, target),
            ("source", "packed", "bias", "target", *map(np.int32, numbers)),
            dependent=True,
        )
        return self.packed_first(product)

    def packed_first(self, product: Launch, aligned: tuple[str, ...] = ()) -> Schedule:
        """A launch of these products, after one that packs the weights for them."""
        lanes = self.packed_words // (self.fragment_words // 32)
        blocks = min(div_up(lanes, 256), 4096)
        return packed_first(product, blocks, 4 * self.packed_words, aligned=aligned)

    def ring_macros(self, stages: int, width: int, slices: int) -> tuple[tuple[str, str], ...]:
        """Macros of a kernel with the same products whose source passes through a ring."""
        own = {
            "CONVT3D_RING": stages,
            "CONVT3D_RING_WIDTH": width,
            "CONVT3D_RING_SLICES": slices,
        }
        return tuple((name, str(own.get(name, value))) for name, value in self.macros)

    def describe(self) -> dict[str, str]:
        t = self.tile
        return {
            "kernel": (
                "strided (all phases of a tile in one CTA), mma.sync"
                if self.problem.forward
                else "strided gradient (a sweep along D), mma.sync"
            ),
            "tile": f"{16 * t.fragments} M rows x {self.column_tile} columns",
            "unit": "x".join(str(a.unit_target) for a in self.axes) + " outputs",
            "warps": f"{t.warps}, fragments {t.fragments_m} x {t.fragments_n}",
            "pipeline": f"{t.stages} stages of {self.chunk_channels} channels, weights "
            + ("resident" if t.resident_weights else "streamed")
            + f", {t.resident} CTAs a multiprocessor",
            "shared memory": f"{self.pipeline_bytes} bytes and staging",
        }
