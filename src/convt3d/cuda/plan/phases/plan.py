"""Plans of ``phases/kernel.cu``: warpgroup products on Hopper, M rows in registers.

The kernel serves strided layers, and small volumes of stride 1, where ``sweep/kernel.cu`` has too
few columns of work for all CTAs. A row of M is a unit: one period of phases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.launches import packed_first, with_strides
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.phases import cost
from convt3d.cuda.plan.phases.layout import PhasesLayout
from convt3d.cuda.plan.phases.tile import PhasesShape, PhasesTile
from convt3d.cuda.plan.warpgroups import source_map
from convt3d.cuda.schedule import (
    Launch,
    Schedule,
    TensorMap,
    geometry_macros,
    macros,
    not_taken,
)

_PACKED_TAPS = 64  # at a time, of eight columns and words
_FEW_PACKED = 512  # tasks, below which each is two
_MANY_TILES = 2.0  # of the fewest: more are not looked at


@dataclass(frozen=True)
class PhasesLaunches(PhasesLayout):
    """A kernel for one problem; the shape of its tile follows the extents of each call."""

    # ------------------------------------------------------------ launches

    @once
    def macros(self) -> tuple[tuple[str, str], ...]:
        p, t = self.problem, self.tile
        values: dict[str, object] = {
            "forward": p.forward,
            "runs": t.runs,
            "sweep": t.sweep,
            "by_map": t.by_map,
            "bias": p.bias,
            "groups": p.geometry.groups,
            "source_channels": p.source_channels,
            "target_channels": p.target_channels,
            "phased": t.phased,
            "consumers": t.consumers,
            "blocks": t.blocks,
            "fragments": t.fragments,
            "column_tile": t.column_tile,
            "source_stages": t.source_stages,
            "weight_stages": t.weight_stages,
            "resident_weights": t.resident_weights,
            "store_warps": t.store_warps,
            "producer_registers": self.producer_registers,
            "tap_boxes": t.tap_boxes,
            "lane_pairs": t.lane_pairs,
            "transposed": t.transposed,
            "producers": t.producers,
            "transposed_vector": t.vector,
            "wide_outputs": self.wide_outputs,
            "ping_pong": t.ping_pong,
            "staged_columns": self.staged_columns,
            "consumer_registers": self.consumer_registers,
            "split_rows": self.split_rows,
            "split_chains": self.split_chains,
        }
        return p.type_macros + geometry_macros(p.geometry) + macros("CONVT3D_", **values)

    def segment(self, shape: PhasesShape, target: Sequence[int]) -> int:
        """Units along D of a work tile."""
        return shape.units[1]

    def fits(self, batch: int, source: Sequence[int], target: Sequence[int]) -> bool:
        """Whether the kernel can take these extents."""
        return source[2] % self.vector == 0

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        source, target = self.problem.extents(input_size)
        if not self.fits(batch, source, target):
            raise not_taken(self, input_size)
        shape = self.shape(batch, target)
        staging = self.staging(shape, target)
        numbers = (
            *with_strides(target),
            batch,
            *shape.units,
            *shape.tiles,
            *self.pitches(shape),
            shape.channel_dimension,
            self.box_bytes(shape),
            self.warpgroup_units(shape),
            staging.row,
            staging.slice,
            staging.sample,
            staging.column,
            int(staging.whole_slices),
            staging.runs,
            self.staging_offset(shape),
            self.rotation(shape),
            int(self.wide(shape, target)),
            *source[:2],
            self.segment(shape, target),
            self.buffers(shape, target),
        )
        brought: tuple[Any, ...] = ("source", *map(np.int32, source))
        if self.tile.by_map:
            brought = (self._source_map(batch, source, shape),)
        product = Launch(
            KernelSpec("phases/kernel.cu", "convt3d_phases", self.macros),
            self.grid(shape),
            self.tile.threads,
            self.shared_bytes(shape, target),
            ("packed", "bias", "target", *brought, *map(np.int32, numbers)),
            dependent=True,
        )
        together = min(math.prod(self.problem.geometry.kernel_size), _PACKED_TAPS)
        tasks = self.n_tiles * self.chunks * self.tile.column_tile // 8
        return packed_first(
            product,
            min(tasks * (2 if tasks < _FEW_PACKED else 1), 65535),
            self.packed_bytes,
            shared_bytes=4 * 64 * (together | 1),
            aligned=() if self.tile.by_map else ("source",),
        )

    def _source_map(self, batch: int, size: Sequence[int], shape: PhasesShape) -> TensorMap:
        channels = self.problem.source_channels * self.problem.geometry.groups
        samples, slices, lines, width = shape.box
        counts = (width, lines, slices, self.chunk_channels, samples)
        steps = (1, *self.box_steps[::-1], 1, 1)
        order = [0, 1, 2, 4]
        order.insert(shape.channel_dimension, 3)
        extents = (*size[::-1], channels, batch)
        return source_map(self.problem, extents, counts, steps, order=order)

    def describe(self) -> dict[str, str]:
        t = self.tile
        copies = ", each warp stores its own" if t.stores_per_warp else ""
        copies += (
            f", the first warpgroup {t.ping_pong} chunks ahead (ping-pong)" if t.ping_pong else ""
        )
        boxes = " and a tap" if t.tap_boxes else ""
        if t.store_warps:
            copies = f", {t.round_columns} columns staged at a time"
            copies += f", {t.store_warps} store warps by bulk copies"
        units = f"{t.fragments} fragments in flight"
        if self.split:
            units = f"{self.split_rows} rows of shifts split at once, {self.split_chains} chains"
        return {
            "kernel": "phases, M rows in registers, wgmma",
            **super().describe(),
            "pipeline": f"{t.source_stages} A stages of {self.chunk_channels} channels{boxes}, "
            f"{self.kept}, {units}{copies}",
        }

    # ------------------------------------------------------------ the cheapest shape

    def cheapest(self, batch: int, target: Sequence[int]) -> tuple[float, PhasesShape] | None:
        tilings = list(self.tilings(batch, target))
        # Work tiles take about as long in every tile: where there are many more, only if nothing
        # else fits.
        few = _MANY_TILES * min((least.count for least, _ in tilings), default=0)
        best: tuple[float, PhasesShape] | None = None
        for many in (False, True):
            priced = [
                (self.shape_cost(least, batch, target), layouts)
                for least, layouts in tilings
                if (least.count > few) is many
            ]
            # Layouts take most of the time: only of tiles that could be the cheapest.
            for least_cost, layouts in sorted(priced, key=lambda item: item[0]):
                if best is not None and least_cost >= best[0]:
                    break
                for shape in layouts:
                    found = self.shape_cost(shape, batch, target)
                    if best is None or found < best[0]:
                        best = (found, shape)
            if best is not None:
                break
        return best

    def least_cost(self, batch: int, target: Sequence[int]) -> float:
        """Of the smallest box, without bank conflicts, whether a tile fits or not."""
        every = [least for least, _ in self.tilings(batch, target)]
        few = _MANY_TILES * min((least.count for least in every), default=0)
        every = [least for least in every if least.count <= few]
        return min((self.shape_cost(least, batch, target) for least in every), default=math.inf)

    def shape_cost(self, shape: PhasesShape, batch: int, target: Sequence[int]) -> float:
        """Estimated cycles of one call with a tile."""
        return cost.call_cycles(self, shape, batch, target)


@dataclass(frozen=True)
class WgmmaPhasesPlan(PhasesLaunches):
    """A forward pass by TMA, which cannot bring rows of W that are no multiple of 16 bytes."""

    tile: PhasesTile
