"""Plans of ``sweep/kernel.cu``: Hopper's warpgroup products for math-bound layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.launches import packed_first, with_strides
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.sweep import cost
from convt3d.cuda.plan.sweep.products import Line, SweepProducts
from convt3d.cuda.schedule import (
    Launch,
    Schedule,
    div_up,
    geometry_macros,
    macros,
    problem_macros,
)


@dataclass(frozen=True)
class WgmmaSweepPlan(SweepProducts):
    """The launches of a sweep kernel for one problem on one kind of GPU."""

    @once
    def macros(self) -> tuple[tuple[str, str], ...]:
        p, t = self.problem, self.tile
        consumer_registers, producer_registers = self.registers
        own: dict[str, object] = {
            "planes": t.planes,
            "blocks": t.blocks,
            "fill_warps": t.fill_warps,
            "fill_pairs": t.fill_pairs,
            "fill_batch": self.fill_batch,
            "product_sets": self.product_sets,
            "chain_taps": self.chain_taps,
            "column_tile": t.column_tile,
            "staged_columns": self.staged[0],
            "staged_buffers": self.staged[1],
            "source_stages": t.source_stages,
            "keep_weights": t.keep_weights,
            "ping_pong": t.ping_pong,
            "weight_stages": t.weight_stages,
            "positions": t.positions,
            "consumer_registers": consumer_registers,
            "producer_registers": producer_registers,
        }
        return (
            p.type_macros
            + problem_macros(p)
            + macros("CONVT3D_", **own)
            + geometry_macros(p.geometry, self.order)
        )

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        source, target = self.problem.extents(input_size)
        line = self.line(batch, source, target)
        numbers = (
            *with_strides(source, self.order),
            *with_strides(target, self.order),
            batch,
            line.units,
        )
        product = Launch(
            KernelSpec("sweep/kernel.cu", "convt3d_sweep", self.macros),
            self.ctas(line, batch, source, target),
            self.tile.threads,
            self.shared_bytes,
            ("source", "packed", "bias", "target", *map(np.int32, numbers)),
            dependent=True,
        )
        blocks = min(div_up(self.packed_bytes // 16, 256), 4096)
        return packed_first(product, blocks, self.packed_bytes, order=self.order)

    def describe(self) -> dict[str, str]:
        t = self.tile
        runs = sorted(
            set(self.set_columns)
            if self.parts > 1
            else {n * t.column_tile for n in self.sweep.blocks}
        )
        return {
            "kernel": "sweep along an axis, its taps stacked on N, wgmma",
            "axes": "H, D, W" if self.swapped else "D, H, W",
            "tile": f"{t.rows} M rows x {t.column_tile} columns",
            "unit": f"{self.sweep.target_step} planes a step, {self.slots2} along W",
            "products": f"m64 x {runs} columns, {self.live} accumulators a thread",
            "warps": f"{t.consumers} warpgroups multiply{' in ping-pong' if t.ping_pong else ''}, "
            f"{t.fill_warps} warps fill",
            "pipeline": f"{t.source_stages} A stages of {self.chunk_channels} channels, "
            f"{'all weights' if t.keep_weights else f'{t.weight_stages} weight stages'}",
            "shared memory": f"{self.shared_bytes} bytes",
        }

    def line(self, batch: int, source: Sequence[int], target: Sequence[int]) -> Line:
        """All of axis 2, or the piece of it, that lines of rows hold."""
        cycles = cost.line_cycles(self, source, target)
        return min(
            self.lines(batch, source, target),
            key=lambda line: cycles(line) * cost.cutting(self, line.units, target),
        )

    def ctas(self, line: Line, batch: int, source: Sequence[int], target: Sequence[int]) -> int:
        """CTAs that divide the steps of all rows."""
        return self.shares(source, target)(line.rows)[0]
