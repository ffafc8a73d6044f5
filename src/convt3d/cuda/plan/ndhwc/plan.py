"""Plans of ``ndhwc/kernel.cu``: layers on Hopper's warpgroup products of channels_last operands.

A contiguous source is copied to channels_last before, and a contiguous target is written as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.launches import copied_first, packed_first, with_strides
from convt3d.cuda.plan.ndhwc import cost
from convt3d.cuda.plan.ndhwc.boxing import ROW_BYTES
from convt3d.cuda.plan.ndhwc.layout import NdhwcLayout
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.search import with_tile
from convt3d.cuda.plan.unit_tiles import UnitShape
from convt3d.cuda.plan.warpgroups import source_map
from convt3d.cuda.schedule import (
    MAP_ALIGNMENT,
    Launch,
    Schedule,
    TensorMap,
    WeightLayout,
    div_up,
    geometry_macros,
    macros,
    problem_macros,
)


@dataclass(frozen=True)
class WgmmaNdhwcPlan(NdhwcLayout):
    """A kernel for one problem; the shape of its tile follows the extents of each call."""

    # ------------------------------------------------------------ launches

    @once
    def macros(self) -> tuple[tuple[str, str], ...]:
        p, t = self.problem, self.tile
        values: dict[str, object] = {
            "phased": t.phased,
            "split": t.split,
            "groups_per_tile": t.groups_per_tile,
            "samples_inside": t.samples_inside,
            "direct": t.direct + self.k_major + self.flipped,
            "fills": t.fills,
            "cluster": t.cluster,
            "staged_columns": self.staged_columns,
            "consumers": t.consumers,
            "blocks": t.blocks,
            "steps": self.steps,
            "column_tile": t.column_tile,
            "source_stages": t.source_stages,
            "weight_stages": t.weight_stages,
            "resident_weights": t.resident_weights,
            "consumer_registers": self.consumer_registers,
        }
        layer = p.type_macros + geometry_macros(p.geometry) + problem_macros(p)
        return layer + macros("CONVT3D_", **values)

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        if not self.tile.direct:
            return self._schedule(batch, input_size)
        # Packed, the same tile's weights are fewer bytes, or as many.
        packed = with_tile(self, direct=False).schedule(batch, input_size)
        direct = self._schedule(batch, input_size)
        found = self._on_weights(direct, flipped=self.flipped)
        if self.may_be_n_major:
            k_major = self._on_k_major(batch, self.problem.extents(input_size)[1])
            if k_major:
                found |= self._on_weights(k_major._schedule(batch, input_size), flipped=True)
        elif self.flipped:
            # A contiguous weight is one sample of source channels; its transpose has them last.
            g = self.problem.geometry
            in_order = _Unflipped(self.problem, self.tile, self.gpu)._schedule(batch, input_size)
            others = (g.out_channels, *g.kernel_size)
            found |= self._on_copied(in_order, 1, g.in_channels, others, flipped=False)
        return replace(packed, on_weights=found)

    def _on_weights(self, direct: Schedule, *, flipped: bool) -> dict[WeightLayout, Schedule]:
        """What runs on weights that are read as they lie, in channels_last, or copied to that."""
        samples, channels, *kernel = self.problem.geometry.weight_size
        if flipped:
            samples, channels = channels, samples
        copied = self._on_copied(direct, samples, channels, kernel, flipped=flipped)
        return {WeightLayout(True, flipped): direct, **copied}

    def _on_copied(
        self, direct: Schedule, samples: int, channels: int, others: Sequence[int], *, flipped: bool
    ) -> dict[WeightLayout, Schedule]:
        """What runs on contiguous weights, if they may be copied.

        Packing, which reads them one column after the other, takes longer. They are copied beside
        contiguous activations alone: the product waits for what was copied only where it reads
        these from a copy, too.
        """
        if (
            self.problem.source_channels_last
            or channels * self.problem.element_bytes % MAP_ALIGNMENT
        ):
            return {}
        copied = copied_first(direct, self.problem, "weight", channels, samples, others)
        return {WeightLayout(False, flipped): copied}

    def _on_k_major(self, batch: int, target: Sequence[int]) -> WgmmaNdhwcPlan | None:
        """The same tile on weights whose source channels are neighbours, if these can be read.

        Their stages hold rows of 128 bytes, however few channels a chunk has. Where all stages of
        the tile have no room, there are fewer; where two have none, these weights are packed.
        """
        if not self.may_be_k_major:
            return None
        most = self.tile.weight_stages
        counts = (most,) if self.tile.resident_weights else range(most, 1, -1)
        plans = (
            _KMajor(self.problem, replace(self.tile, weight_stages=n), self.gpu) for n in counts
        )
        return next((plan for plan in plans if plan.serves(batch, target)), None)

    def _schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        source, target = self.problem.extents(input_size)
        shape = self.shape(batch, target)
        numbers = (
            *with_strides(target),
            batch,
            *shape.units,
            *shape.tiles,
            *self.pitches(shape),
            math.prod(shape.box) * ROW_BYTES,
            self.box_bytes(shape),
            self.rotation(shape),
            *source,
        )
        product = Launch(
            KernelSpec("ndhwc/kernel.cu", "convt3d_ndhwc", self.macros),
            self.grid(shape),
            self.tile.threads,
            self.shared_bytes(shape, target),
            (
                "weight" if self.tile.direct else "packed",
                "bias",
                "target",
                self._source_map(batch, source, shape),
                *((self._weight_map(),) if self.tile.direct else ()),
                *map(np.int32, numbers),
            ),
            dependent=not self.tile.direct,
        )
        if self.tile.direct:
            return self._on_copy(Schedule((product,)), batch, source)
        blocks = min(div_up(self.packed_bytes // 16 // self.axes[2].kernel, 256), 4096)
        if self.by_warps:
            blocks = div_up(self.paired_products, 2)
        return self._on_copy(packed_first(product, blocks, self.packed_bytes), batch, source)

    def _on_copy(self, schedule: Schedule, batch: int, source: Sequence[int]) -> Schedule:
        """Launches that read a copy of the source where that is contiguous."""
        if self.problem.source_channels_last:
            return schedule
        channels = self.source_channels * self.groups
        return copied_first(schedule, self.problem, "source", channels, batch, source)

    def _source_map(self, batch: int, size: Sequence[int], shape: UnitShape) -> TensorMap:
        channels = self.problem.source_channels * self.problem.geometry.groups
        steps = (1, 1, 1) if self.problem.forward else self.problem.geometry.stride[::-1]
        samples, *counts = shape.box
        return source_map(
            self.problem,
            (channels, *size[::-1], batch),
            (8 * self.vector, *counts[::-1], samples),
            (1, *steps, 1),
            swizzle=128,
            order=(0, 4, 1, 2, 3) if self.tile.samples_inside else (),
        )

    def _weight_map(self) -> TensorMap:
        """A tap's columns, of a chunk of source channels, in a weight that is channels_last."""
        p = self.problem
        channels = (p.target_channels, p.source_channels)
        rows = self.chunk_channels
        if self.k_major:
            channels, rows = channels[::-1], self.tile.column_tile
        return TensorMap.dense(
            "weight",
            p.map_element,
            (channels[0], math.prod(p.geometry.kernel_size), channels[1]),
            (ROW_BYTES // p.element_bytes, 1, rows),
            swizzle=128,
        )

    def describe(self) -> dict[str, str]:
        t = self.tile
        own = ("a tile", "a tap of W", "a tap of H and W", "a tap")[t.split]
        gradient = "" if self.problem.forward else "gradient of a "
        strided = "strided " if max(self.problem.geometry.stride) > 1 else ""
        shared = super().describe()
        if self.by_warps:
            shared["products"] = (
                f"m16 x 8 by mma.sync, {t.groups_per_tile} groups of 8 channels a tile"
            )
        return {
            "kernel": f"{gradient}{strided}channels_last layer (ndhwc), wgmma from shared memory",
            **shared,
            "pipeline": f"{t.source_stages} A stages, one {own}, of {8 * self.vector} "
            f"channels, {self.kept}"
            + (", samples inside of lines" if t.samples_inside else "")
            + (", weights as they are" if t.direct else "")
            + (", empty phases filled" if t.fills else "")
            + (f", clusters of {t.cluster} share the products" if t.cluster > 1 else "")
            + ("" if self.problem.source_channels_last else ", the source copied to channels_last"),
        }

    def cheapest(self, batch: int, target: Sequence[int]) -> tuple[float, UnitShape] | None:
        cycles = cost.call_cycles(self, batch, target)
        found = ((cycles(shape), shape) for shape in self.shapes(batch, target))
        return min(found, key=lambda item: item[0], default=None)


class _KMajor(WgmmaNdhwcPlan):
    """The same tile on weights whose source channels are neighbours."""

    k_major = True


class _Unflipped(WgmmaNdhwcPlan):
    """The same tile on the transpose of a contiguous weight, whose taps are in order."""

    flipped = False
