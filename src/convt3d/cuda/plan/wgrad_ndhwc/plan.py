"""Plans of ``wgrad_ndhwc/kernel.cu``: their launches. Contiguous tensors are copied before."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.launches import copied_first, copy_cycles, weight_copied_last
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.position_box import Box
from convt3d.cuda.plan.search import with_tile
from convt3d.cuda.plan.wgrad_ndhwc.cost import by_splits, call_cycles
from convt3d.cuda.plan.wgrad_ndhwc.layout import BARRIER_BYTES, WgradNdhwcLayout
from convt3d.cuda.schedule import (
    WEIGHT_STRIDES,
    Launch,
    Schedule,
    TensorMap,
    WeightLayout,
    div_up,
    geometry_macros,
    macros,
)
from convt3d.geometry import Triple

_FILE = "wgrad_ndhwc/kernel.cu"
_MOST_STAGES = 8
# Of the second pass: blocks of 8 x 8 channels of a CTA, four a warp; CTAs of a multiprocessor.
_MOST_RUN, _CTAS = 32, 4
# K of a step. Few where stages are large, many for less waiting; 128 suit volumes of a hundred
# positions.
POSITIONS = {2: (32, 64, 128), 4: (16, 32, 64)}


@dataclass(frozen=True)
class WgmmaWgradNdhwcPlan(WgradNdhwcLayout):
    """A gradient-by-weight kernel; boxes and splits follow the extents of each call."""

    @once
    def macros(self) -> tuple[tuple[str, str], ...]:
        p, t = self.problem, self.tile
        return (
            p.type_macros[:1]
            + geometry_macros(p.geometry)
            + macros(
                "CONVT3D_",
                groups=p.geometry.groups,
                source_channels=p.source_channels,
                target_channels=p.target_channels,
                source_atom=self.source_atom,
                target_atom=self.target_atom,
                taps_on_m=t.taps_on_m,
                consumers_m=t.consumers[0],
                consumers_n=t.consumers[1],
                blocks=t.blocks,
                columns=t.columns,
                positions=t.positions,
                stages=t.stages,
                shares=t.lines > 0,
                target_rows=self.target_rows,
                along_taps=self.along_taps,
                cluster=t.cluster,
            )
        )

    @once
    def apart(self) -> WgmmaWgradNdhwcPlan:
        """The same with a box for each tap, for extents without a box that taps share."""
        fitting = (n for n in POSITIONS[self.problem.element_bytes] if n <= self.tile.positions)
        plans = (deepest(with_tile(self, positions=n, lines=0)) for n in fitting)
        return max(
            (plan for plan in plans if plan.tile.stages >= 2), key=lambda plan: plan.tile.positions
        )

    def splits(self, extents: Box, box: Box) -> int:
        """CTAs that share the steps of a work tile."""
        return min(by_splits(self, extents, box))[1]

    def cost(self, batch: int, input_size: Sequence[int]) -> float:
        """Estimated cycles of one call."""
        box = self.box(batch, input_size)
        if box is None:
            return self.apart.cost(batch, input_size)
        bytes_ = self.problem.element_bytes
        copies = [
            copy_cycles(batch * math.prod(size) * channels * bytes_, self.gpu)
            for _, channels, size in self._contiguous(input_size)
        ]
        d, h, w = input_size
        return call_cycles(self, (batch, d, h, w), box, copies)

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        p, t = self.problem, self.tile
        box = self.box(batch, input_size)
        if box is None:
            return self.apart.schedule(batch, input_size)
        d, h, w = input_size
        extents = (batch, d, h, w)
        splits = self.splits(extents, box)
        numbers = tuple(np.int32(n) for n in (*extents, *box, splits))
        threads = 128 * (self.consumers + 1)
        stride = p.geometry.stride
        read = (box[0], box[1], box[2] + self.halo, box[3])
        maps = (
            self._map("source", p.geometry.in_channels, extents, box, (1, 1, 1), self.source_atom),
            self._map(
                "target",
                p.geometry.out_channels,
                (batch, *p.geometry.output_size(input_size)),
                read,
                stride,
                self.target_atom,
            ),
        )
        # Whole sums go to the weight, where they have neighbours; no second pass follows.
        whole = t.cluster > 1 or (splits == 1 and not self.along_taps)
        sums = "weight" if whole else "partial"
        product = Launch(
            KernelSpec(_FILE, "convt3d_wgrad_ndhwc", self.macros),
            self.tiles * splits,
            threads,
            self.shared_bytes,
            (*maps, sums, "weight", *numbers, *WEIGHT_STRIDES),
        )
        schedule = Schedule((product,))
        if not whole:
            workspaces = {"partial": 4 * self.elements * splits}
            schedule = Schedule((product, self._reduce(splits)), workspaces)
        for name, channels, size in self._contiguous(input_size):
            schedule = copied_first(schedule, p, name, channels, batch, size)
        if self.copies_sums and splits == 1:
            # The second pass, which writes runs of taps, would read these sums as float32.
            one = _AlongChannels(p, t, self.gpu).schedule(batch, input_size)
            copied = {WeightLayout(channels_last=False): weight_copied_last(one, p)}
            schedule = replace(schedule, on_weights=copied)
        return schedule

    def _reduce(self, splits: int) -> Launch:
        """The second pass; a CTA has a run of blocks of 8 x 8 channels."""
        p, g = self.problem, self.problem.geometry
        octets = (div_up(p.source_channels, 8), div_up(p.target_channels, 8))
        length = self.taps if self.along_taps else octets[1]
        others = math.prod(octets) * self.taps * g.groups // length
        runs = max(div_up(length, _MOST_RUN), div_up(_CTAS * self.gpu.multiprocessors, others))
        run = div_up(length, min(length, runs))
        return Launch(
            KernelSpec(_FILE, "convt3d_reduce", self.macros),
            others * div_up(length, run),
            256,
            4 * 64 * (run | 1),
            ("partial", "weight", np.int32(splits), np.int32(run), *WEIGHT_STRIDES),
            dependent=True,
        )

    def _contiguous(self, input_size: Sequence[int]) -> Iterator[tuple[str, int, Sequence[int]]]:
        """Tensors that are copied to channels_last: names, channels and extents."""
        p, g = self.problem, self.problem.geometry
        if not p.source_channels_last:
            yield "source", g.in_channels, input_size
        if not p.target_channels_last:
            yield "target", g.out_channels, g.output_size(input_size)

    def _map(
        self,
        tensor: str,
        channels: int,
        extents: Sequence[int],
        box: Box,
        steps: Triple,
        atom: int,
    ) -> TensorMap:
        """A box of one atom's channels, of every so many positions along D, H, W."""
        n, d, h, w = extents
        a, b, c = ((m - 1) * s + 1 for m, s in zip(box[1:], steps, strict=True))
        return TensorMap.dense(
            tensor,
            self.problem.map_element,
            (channels, w, h, d, n),
            (atom, c, b, a, box[0]),
            swizzle=atom * self.problem.element_bytes,
            element_strides=(1, *reversed(steps), 1),
        )

    def describe(self) -> dict[str, str]:
        t, (m, n) = self.tile, self.extents
        rows, columns = "gradient's taps and channels", "channels of x"
        if not t.taps_on_m:
            rows, columns = columns, rows
        warpgroups = f"{t.consumers[0]} x {t.consumers[1]} warpgroups"
        return {
            "kernel": "gradient by weight, wgmma, channels_last operands by TMA"
            + (", x transposed" if self.transposes else " as they lie"),
            "tile": f"{m} ({rows}) x {n} ({columns})",
            "unit": f"{t.positions} positions"
            + (f", {self.strip} taps along H a box, {t.lines} lines" if t.lines else ""),
            "warps": f"{warpgroups} of {t.blocks} x 64 x {t.columns}",
            "pipeline": f"{t.stages} stages of {self.stage_bytes} bytes"
            + (f", clusters of {t.cluster} share the steps" if t.cluster > 1 else "")
            + ("" if self.problem.source_channels_last else ", x copied to channels_last")
            + (
                ""
                if self.problem.target_channels_last
                else ", the gradient copied to channels_last"
            ),
            "tiles": f"{self.tiles}",
            "shared memory": f"{self.shared_bytes} bytes",
        }


def deepest(plan: WgmmaWgradNdhwcPlan) -> WgmmaWgradNdhwcPlan:
    """The plan with as many stages as fit."""
    stages = plan.gpu.shared_per_block // (plan.stage_bytes + BARRIER_BYTES)
    return with_tile(plan, stages=min(stages, _MOST_STAGES))


class _AlongChannels(WgmmaWgradNdhwcPlan):
    """The same tile for a weight whose neighbours are channels of the gradient."""

    along_taps = False
