"""Plans of ``grad_weight.cu``: taps and channels of a CTA, position tiles, splits."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.direct_plan import WEIGHT_STRIDES
from convt3d.cuda.schedule import Gpu, Launch, Problem, Schedule, div_up, macros, round_up
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic

_WORKSPACE_BYTES = 64 * 2**20
_MAX_ACCUMULATORS = 112
_MAX_ACCUMULATORS_IEEE = 80
_STEP_CYCLES = 1.41


@dataclass(frozen=True)
class GradWeightPlan:
    """A gradient-by-weight kernel and how many CTAs share its positions."""

    problem: Problem
    taps: Triple
    warps: Triple  # over x channels, gradient channels, positions
    fragments: tuple[int, int]
    tile: Triple
    splits: int

    @property
    def half(self) -> bool:
        return self.problem.element_bytes == 2

    @property
    def threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1] * self.warps[2]

    @property
    def depth(self) -> int:
        return 16 if self.half else 8

    @property
    def channel_tiles(self) -> tuple[int, int]:
        return (16 * self.warps[0] * self.fragments[0], 8 * self.warps[1] * self.fragments[1])

    @property
    def tap_tiles(self) -> int:
        kernel = self.problem.geometry.kernel_size
        a, b, c = (div_up(k, t) for k, t in zip(kernel, self.taps, strict=True))
        return a * b * c

    @property
    def variants(self) -> int:
        p, (m, n) = self.problem, self.channel_tiles
        tiles = div_up(p.source_channels, m) * div_up(p.target_channels, n)
        return self.tap_tiles * tiles * p.geometry.groups

    @property
    def registers(self) -> int:
        taps = self.taps[0] * self.taps[1] * self.taps[2]
        return taps * self.fragments[0] * self.fragments[1] * 4

    @property
    def variant_elements(self) -> int:
        return self.registers * 32 * self.warps[0] * self.warps[1]

    def _vector(self, gradient: bool) -> int:
        p, bytes_ = self.problem, self.problem.element_bytes
        last = p.target_channels_last if gradient else p.source_channels_last
        channels = p.target_channels if gradient else p.source_channels
        if last:
            for vector in (16 // bytes_, 8 // bytes_, 4 // bytes_):
                if channels % vector == 0:
                    return vector
            return 1
        if bytes_ == 4:
            return 1 if gradient and p.geometry.stride[2] > 1 else 4
        return 4

    def _box(self, gradient: bool) -> tuple[int, int]:
        """Positions of a box, and its size in words of shared memory."""
        p, g = self.problem, self.problem.geometry
        sizes = list(self.tile)
        residues = 1
        if gradient:
            residues = g.stride[2]
            sizes = [
                (u - 1) * s + (t - 1) * d + 1
                for u, s, t, d in zip(self.tile, g.stride, self.taps, g.dilation, strict=True)
            ]
        last = p.target_channels_last if gradient else p.source_channels_last
        position_major = last or self.half
        vector = self._vector(gradient)
        if not last and not position_major and vector > 1 and residues == 1:
            sizes[2] = round_up(sizes[2] + vector - 1, vector)
        sizes[2] = round_up(sizes[2], residues)
        positions = sizes[0] * sizes[1] * sizes[2]
        words = self.channel_tiles[1 if gradient else 0] // (2 if self.half else 1)
        if not position_major:
            return positions, (round_up(positions - 4, 32) + 4) * words
        if self.half:
            pitch = words if words // 4 % 2 else words + 4
        else:
            pitch = round_up(words - 8, 32) + 8
        return positions, positions * pitch

    @property
    def shared_bytes(self) -> int:
        stage = self._box(False)[1] + self._box(True)[1]
        staged = self.variant_elements if self.warps[2] > 1 else 0
        return 4 * max(2 * stage, staged)

    @functools.cached_property
    def macros(self) -> tuple[tuple[str, str], ...]:
        p, g = self.problem, self.problem.geometry
        values: dict[str, object] = {
            "source_channels_last": p.source_channels_last,
            "target_channels_last": p.target_channels_last,
            "groups": g.groups,
            "source_channels": p.source_channels,
            "target_channels": p.target_channels,
            "warps_m": self.warps[0],
            "warps_n": self.warps[1],
            "warps_k": self.warps[2],
            "fragments_m": self.fragments[0],
            "fragments_n": self.fragments[1],
            "source_vector": self._vector(False),
            "target_vector": self._vector(True),
        }
        for i in range(3):
            values[f"kernel{i}"] = g.kernel_size[i]
            values[f"stride{i}"] = g.stride[i]
            values[f"padding{i}"] = g.padding[i]
            values[f"dilation{i}"] = g.dilation[i]
            values[f"taps{i}"] = self.taps[i]
            values[f"tile{i}"] = self.tile[i]
        return p.type_macros + macros("CONVT3D_", **values)

    def _tiles(self, input_size: Sequence[int]) -> list[int]:
        return [div_up(n, t) for n, t in zip(input_size, self.tile, strict=True)]

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        gradient_size = self.problem.geometry.output_size(input_size)
        tiles = self._tiles(input_size)
        splits = min(self.splits, tiles[0] * tiles[1] * tiles[2] * batch)
        numbers = (
            *input_size,
            input_size[1] * input_size[2],
            input_size[2],
            *gradient_size,
            gradient_size[1] * gradient_size[2],
            gradient_size[2],
            *tiles,
            batch,
            splits,
        )
        file = "grad_weight.cu"
        product = Launch(
            KernelSpec(file, "convt3d_grad_weight", self.macros),
            self.variants * splits,
            self.threads,
            self.shared_bytes,
            ("source", "target", "partial", *map(np.int32, numbers)),
        )
        elements = self.variants * self.variant_elements
        reduce = Launch(
            KernelSpec(file, "convt3d_reduce", self.macros),
            div_up(elements, 256),
            256,
            0,
            ("partial", "weight", np.int32(splits), *WEIGHT_STRIDES),
        )
        return Schedule((product, reduce), {"partial": 4 * elements * splits})

    def describe(self) -> dict[str, str]:
        m, n = self.channel_tiles
        return {
            "kernel": "gradient by weight, mma.sync, split and reduced in order",
            "tile": "x".join(map(str, self.taps)) + f" taps x {m} x {n} channels",
            "positions": "x".join(map(str, self.tile)),
            "warps": f"{self.warps[0]} x {self.warps[1]} x {self.warps[2]} (positions), "
            f"fragments {self.fragments[0]} x {self.fragments[1]}",
            "splits": f"up to {self.splits}, {self.variants} variants",
            "shared memory": f"{self.shared_bytes} bytes",
        }

    def resident(self, gpu: Gpu) -> int:
        """CTAs that one multiprocessor holds, by shared memory and registers."""
        by_shared = gpu.shared_per_multiprocessor // (self.shared_bytes + 1024)
        return max(1, min(by_shared, 384 // self.threads))

    def cost(self, batch: int, input_size: Sequence[int], gpu: Gpu) -> float:
        """Estimated multiprocessor cycles of one call on a whole GPU."""
        ieee = self.problem.arithmetic is Arithmetic.IEEE
        taps = self.taps[0] * self.taps[1] * self.taps[2]
        fm, fn = self.fragments
        warps = self.warps[0] * self.warps[1]
        steps = self.tile[0] * self.tile[1] * self.tile[2] // self.depth
        products = warps * steps * taps * fm * fn
        matrix = products * _STEP_CYCLES * (3.5 if ieee else 1.0)
        shared = warps * steps * (4 * fm + 2 * taps * fn) * (1.2 if ieee else 1.0)
        fill = 0.0
        for gradient in (False, True):
            words = self._box(gradient)[0] * self.channel_tiles[gradient]
            words //= 2 if self.half else 1
            last = (
                self.problem.target_channels_last if gradient else self.problem.source_channels_last
            )
            wide = self._vector(gradient) if not self.half or last else 1
            fill += words / 32 / wide * 3.0
        tile = max(matrix, shared) + 0.35 * min(matrix, shared) + fill + 80
        resident = self.resident(gpu)
        if resident == 1:
            tile *= 1.3
        count = batch
        for tiles in self._tiles(input_size):
            count *= tiles
        fixed = self.registers * 8.0 + 2000
        per_cta = div_up(count, min(self.splits, count)) * tile + fixed
        ctas = self.variants * min(self.splits, count)
        slots = gpu.multiprocessors * resident
        reduction = (
            self.variants * self.variant_elements * self.splits * 4 / (gpu.multiprocessors * 16)
        )
        return div_up(ctas, slots) * per_cta * resident + reduction


_WARPS = (
    (1, 1, 4), (1, 2, 2), (2, 1, 2), (1, 4, 1), (2, 2, 1), (4, 1, 1),
    (1, 3, 1), (1, 6, 1), (1, 8, 1), (2, 4, 1), (1, 1, 8), (1, 2, 4),
)  # fmt: skip


def _enumerate(problem: Problem, input_size: Sequence[int]) -> Iterator[GradWeightPlan]:
    g = problem.geometry
    limit = _MAX_ACCUMULATORS_IEEE if problem.arithmetic is Arithmetic.IEEE else _MAX_ACCUMULATORS
    depth = 16 if problem.element_bytes == 2 else 8
    kd, kh, kw = g.kernel_size
    taps2 = [min(kw, 7)] if kw <= 7 else [4]
    tap_boxes = {
        (t0, t1, t2)
        for t0 in {1, kd if kd <= 4 else 1}
        for t1 in {1, div_up(kh, 2), kh if kh <= 7 else 1}
        for t2 in taps2
        if t0 * t1 * t2 <= 28
    } or {(1, 1, taps2[0])}
    for taps in sorted(tap_boxes):
        for fm, fn in itertools.product((1, 2, 3, 4), (1, 2, 3, 4)):
            if taps[0] * taps[1] * taps[2] * fm * fn * 4 > limit:
                continue
            for warps in _WARPS:
                m, n = 16 * warps[0] * fm, 8 * warps[1] * fn
                if m >= problem.source_channels + 16 or n >= problem.target_channels + 8:
                    continue
                for tile2 in {depth, min(32, round_up(min(input_size[2], 32), depth)), 64}:
                    if tile2 > round_up(input_size[2], depth) or tile2 % depth:
                        continue
                    for tile1 in (1, 2, 4, 8):
                        if tile1 > 1 and tile1 >= 2 * input_size[1]:
                            continue
                        for tile0 in (1, 2):
                            steps = tile0 * tile1 * tile2 // depth
                            if steps % warps[2] or tile0 > input_size[0]:
                                continue
                            yield GradWeightPlan(
                                problem, taps, warps, (fm, fn), (tile0, tile1, tile2), 1
                            )


def ranked(
    problem: Problem, batch: int, input_size: Sequence[int], gpu: Gpu
) -> list[GradWeightPlan]:
    """Candidates, cheapest first by the cost model; splits fill the GPU within the workspace."""
    found: list[tuple[float, GradWeightPlan]] = []
    for plan in _enumerate(problem, input_size):
        if plan.shared_bytes > gpu.shared_per_block:
            continue
        bytes_per_split = 4 * plan.variants * plan.variant_elements
        wanted = max(1, plan.resident(gpu) * gpu.multiprocessors // plan.variants)
        splits = max(1, min(wanted, _WORKSPACE_BYTES // bytes_per_split))
        plan = replace(plan, splits=splits)
        found.append((plan.cost(batch, input_size, gpu), plan))
    found.sort(key=lambda item: item[0])
    return [plan for _, plan in found]
