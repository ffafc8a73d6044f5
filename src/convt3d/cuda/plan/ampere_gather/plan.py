"""Plans of ``ampere/gather``: forward and gradient by input on ``mma.sync``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.ampere_gather import cost
from convt3d.cuda.plan.ampere_gather.layout import GatherLayout
from convt3d.cuda.schedule import Launch, Schedule, div_up, macros
from convt3d.geometry import Triple


@dataclass(frozen=True)
class GatherPlan(GatherLayout):
    """A gather kernel for one problem; the shape of its tile follows the extents of each call."""

    def unit_box(self, batch: int, target: Sequence[int]) -> Triple:
        """The cheapest tile shape for destination extents, in units along the kernel's axes."""
        work = cost.work_of(self, batch, target)
        a, b, c = (int(n) for n in work.shapes[int(np.argmin(cost.call_cycles(self, work)))])
        return (a, b, c)

    @functools.cached_property
    def macros(self) -> tuple[tuple[str, str], ...]:
        p, t, axes = self.problem, self.tile, self.axes
        values: dict[str, object] = {
            "forward": p.forward,
            "bias": p.bias,
            "source_channels_last": p.source_channels_last,
            "target_channels_last": p.target_channels_last,
            "groups": p.geometry.groups,
            "source_channels": p.source_channels,
            "target_channels": p.target_channels,
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
            "separate": t.separate,
        }
        for i, axis in enumerate(axes):
            values[f"kernel{i}"] = axis.kernel
            values[f"stride{i}"] = axis.stride
            values[f"padding{i}"] = axis.padding
            values[f"dilation{i}"] = axis.dilation
        return p.type_macros + macros("CONVT3D_", **values)

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        output_size = self.problem.geometry.output_size(input_size)
        source, target = tuple(input_size), output_size
        if not self.problem.forward:
            source, target = target, source
        units = self.unit_box(batch, target)
        tiles = [
            div_up(div_up(target[a], axis.unit_target), n)
            for a, axis, n in zip(self.order, self.axes, units, strict=True)
        ]
        phases = self.axes[0].phases * self.axes[1].phases
        groups = self.problem.geometry.groups
        grid = phases * self.column_tiles * groups * tiles[0] * tiles[1] * tiles[2] * batch
        numbers = (
            *(source[a] for a in self.order),
            *_strides(source, self.order),
            *(target[a] for a in self.order),
            *_strides(target, self.order),
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
        weight_strides = ["weight_stride_in", "weight_stride_out"]
        weight_strides += [f"weight_stride_{'dhw'[a]}" for a in self.order]
        pack = Launch(
            KernelSpec("ampere/gather/pack.cu", "convt3d_ampere_gather_pack", self.macros),
            min(div_up(lanes, 256), 4096),
            256,
            0,
            ("weight", "packed", *weight_strides),
        )
        return Schedule((pack, product), {"packed": 4 * self.packed_words})

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
            + f", {t.resident} CTAs a multiprocessor"
            + ("" if t.separate else ", rows in place"),
            "shared memory": f"{self.shared_bytes} bytes",
        }


def _strides(extent: Sequence[int], order: Triple) -> tuple[int, int]:
    strides = (extent[1] * extent[2], extent[2], 1)
    return (strides[order[0]], strides[order[1]])
