"""Plans of ``grad_weight.cu``: taps and channels of a CTA, position tiles, splits."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.schedule import (
    WEIGHT_STRIDES,
    Gpu,
    Launch,
    Problem,
    Schedule,
    div_up,
    geometry_macros,
    macros,
    round_up,
    source_representatives,
)
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic

_WORKSPACE_BYTES = 64 * 2**20
_MAX_ACCUMULATORS = 128
_MAX_ACCUMULATORS_IEEE = 80
_STEP_CYCLES = 1.41
# Cycles of a copy instruction of a warp, of a 32-byte sector, and of a tile's latencies; what few
# resident CTAs lose: fitted to measurements.
_COPY_CYCLES = 6.0
_SECTOR_CYCLES = 0.5
_TILE_CYCLES = 460.0
# What the model misses of the time of all tiles, in the median of measurements.
_MEASURED = 1.8
_ALONE = {1: 1.25, 2: 1.08}
_WARPS = (
    (1, 1, 4), (1, 2, 2), (2, 1, 2), (1, 4, 1), (2, 2, 1), (4, 1, 1),
    (1, 3, 1), (1, 6, 1), (1, 8, 1), (2, 4, 1), (1, 1, 8), (1, 2, 4),
)  # fmt: skip


@dataclass(frozen=True)
class GradWeightPlan:
    """A gradient-by-weight kernel; tile shape and splits follow the extents of each call."""

    problem: Problem
    taps: Triple
    warps: Triple  # over x channels, gradient channels, positions
    fragments: tuple[int, int]
    resident: int  # CTAs that share a multiprocessor
    positions: tuple[int, int]  # of the largest boxes of x and of the gradient
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)  # for which tiles are shaped

    # ------------------------------------------------------------ derived sizes

    @property
    def half(self) -> bool:
        return self.problem.element_bytes == 2

    @property
    def threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1] * self.warps[2]

    @property
    def depth(self) -> int:
        """Positions of one matrix step."""
        return 16 if self.half else 8

    @property
    def channel_tiles(self) -> tuple[int, int]:
        return (16 * self.warps[0] * self.fragments[0], 8 * self.warps[1] * self.fragments[1])

    @functools.cached_property
    def variants(self) -> int:
        p, (m, n) = self.problem, self.channel_tiles
        kernel = p.geometry.kernel_size
        a, b, c = (div_up(k, t) for k, t in zip(kernel, self.taps, strict=True))
        tiles = div_up(p.source_channels, m) * div_up(p.target_channels, n)
        return a * b * c * tiles * p.geometry.groups

    @functools.cached_property
    def registers(self) -> int:
        """Accumulators of a thread."""
        taps = self.taps[0] * self.taps[1] * self.taps[2]
        return taps * self.fragments[0] * self.fragments[1] * 4

    @property
    def variant_elements(self) -> int:
        return self.registers * 32 * self.warps[0] * self.warps[1]

    def _channels_last(self, gradient: bool) -> bool:
        p = self.problem
        return p.target_channels_last if gradient else p.source_channels_last

    def _unit(self, axis: int, gradient: bool) -> int:
        """Box positions from one position of x to the next."""
        return self.problem.geometry.stride[axis] if gradient and self.taps[axis] > 1 else 1

    def vector(self, gradient: bool) -> int:
        """Elements that one copy of the fill moves, where addresses allow."""
        p, bytes_ = self.problem, self.problem.element_bytes
        channels = p.target_channels if gradient else p.source_channels
        if self._channels_last(gradient):
            for vector in (16 // bytes_, 8 // bytes_, 4 // bytes_):
                if channels % vector == 0:
                    return vector
            return 1
        stride = p.geometry.stride[2] if gradient else 1
        if stride > 1 and (bytes_ == 4 or self.taps[2] == 1):
            return 1
        return 4

    def position_words(self, gradient: bool) -> float:
        """Words of shared memory for one position of a box."""
        words = self.channel_tiles[gradient] // (2 if self.half else 1)
        if not (self._channels_last(gradient) or self.half):
            return words
        if self.half:
            return words if words // 4 % 2 else words + 4
        return round_up(words - 8, 32) + 8

    def box_words(self, gradient: bool) -> int:
        positions = self.positions[gradient]
        words = int(self.position_words(gradient))
        if self._channels_last(gradient) or self.half:
            return positions * words
        return (round_up(positions - 4, 32) + 4) * words

    @functools.cached_property
    def shared_bytes(self) -> int:
        stage = self.box_words(False) + self.box_words(True)
        staged = self.variant_elements if self.warps[2] > 1 else 0
        return 4 * max(2 * stage, staged)

    # ------------------------------------------------------------ launches

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
            "resident": self.resident,
            "source_vector": self.vector(False),
            "target_vector": self.vector(True),
            "source_positions": self.positions[0],
            "target_positions": self.positions[1],
        }
        for i in range(3):
            values[f"taps{i}"] = self.taps[i]
        return p.type_macros + geometry_macros(g) + macros("CONVT3D_", **values)

    def splits(self, tiles: int, gpu: Gpu) -> int:
        """CTAs that share the positions: as many as fill the GPU once, within the workspace."""
        wanted = max(1, self.resident * gpu.multiprocessors // self.variants)
        most = max(1, _WORKSPACE_BYTES // (4 * self.variants * self.variant_elements))
        rounds = div_up(tiles, min(wanted, most, tiles))
        return div_up(tiles, rounds)

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        gradient_size = self.problem.geometry.output_size(input_size)
        gpu = self.gpu
        tile = self.tile_shape(batch, input_size, gpu)
        tiles = [div_up(n, t) for n, t in zip(input_size, tile, strict=True)]
        splits = self.splits(tiles[0] * tiles[1] * tiles[2] * batch, gpu)
        numbers = (
            *input_size,
            input_size[1] * input_size[2],
            input_size[2],
            *gradient_size,
            gradient_size[1] * gradient_size[2],
            gradient_size[2],
            *tile,
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
            dependent=True,
        )
        return Schedule((product, reduce), {"partial": 4 * elements * splits})

    def describe(self) -> dict[str, str]:
        m, n = self.channel_tiles
        return {
            "kernel": "gradient by weight, mma.sync, split and reduced in order",
            "tile": "x".join(map(str, self.taps)) + f" taps x {m} x {n} channels",
            "warps": f"{self.warps[0]} x {self.warps[1]} x {self.warps[2]} (positions), "
            f"fragments {self.fragments[0]} x {self.fragments[1]}",
            "pipeline": f"2 stages, {self.resident} CTAs a multiprocessor",
            "variants": f"{self.variants}",
            "shared memory": f"{self.shared_bytes} bytes",
        }

    # ------------------------------------------------------------ tile shape and cost

    def tile_shape(self, batch: int, input_size: Sequence[int], gpu: Gpu) -> Triple:
        """The cheapest tile of positions for these extents."""
        shapes = _shapes(self.depth, (input_size[0], input_size[1], input_size[2]))
        costs = self._costs(batch, input_size, shapes, gpu)
        a, b, c = (int(n) for n in shapes[int(np.argmin(costs))])
        return (a, b, c)

    def cost(self, batch: int, input_size: Sequence[int], gpu: Gpu) -> float:
        """Estimated cycles of one call with its best tile."""
        shapes = _shapes(self.depth, (input_size[0], input_size[1], input_size[2]))
        return float(self._costs(batch, input_size, shapes, gpu).min())

    def _box(self, shapes: NDArray[np.int64], gradient: bool) -> list[NDArray[np.int64]]:
        g = self.problem.geometry
        sizes = []
        for axis in range(3):
            reach = (self.taps[axis] - 1) * g.dilation[axis] if gradient else 0
            sizes.append((shapes[:, axis] - 1) * self._unit(axis, gradient) + reach + 1)
        residues = self._unit(2, gradient)
        vector = self.vector(gradient)
        if not self._channels_last(gradient) and not self.half and vector > 1 and residues == 1:
            sizes[2] = (sizes[2] + 2 * (vector - 1)) // vector * vector
        sizes[2] = (sizes[2] + residues - 1) // residues * residues
        return sizes

    def _costs(
        self, batch: int, input_size: Sequence[int], shapes: NDArray[np.int64], gpu: Gpu
    ) -> NDArray[np.float64]:
        """Estimated cycles of one call for each tile shape; inf where one cannot be."""
        ieee = self.problem.arithmetic is Arithmetic.IEEE
        taps = self.taps[0] * self.taps[1] * self.taps[2]
        fm, fn = self.fragments
        warps = self.warps[0] * self.warps[1]
        steps = shapes.prod(axis=1) // self.depth
        products = warps * steps * taps * fm * fn
        matrix = products * _STEP_CYCLES * (3.5 if ieee else 1.0)
        shared = warps * steps * (4 * fm + 2 * taps * fn)
        tile = np.maximum(matrix, shared) + 0.3 * np.minimum(matrix, shared)
        fits = steps % self.warps[2] == 0
        for gradient in (False, True):
            a, b, c = self._box(shapes, gradient)
            positions = a * b * c
            fits &= positions <= self.positions[gradient]
            words = self.channel_tiles[gradient] / (2 if self.half else 1)
            last = self._channels_last(gradient)
            wide = self.vector(gradient) if not self.half or last else 1
            tile = tile + positions * words / 32 / wide * _COPY_CYCLES
            tile = tile + a * b * words * (c * 4 / 32 + 1) * _SECTOR_CYCLES
        tile = np.maximum(tile * self.resident * 1.1, tile + _TILE_CYCLES)
        tiles = np.full(len(shapes), batch)
        for axis in range(3):
            tiles = tiles * -(-input_size[axis] // shapes[:, axis])
        splits = np.array([self.splits(int(n), gpu) for n in tiles])
        waves = np.ceil(self.variants * splits / (gpu.multiprocessors * self.resident))
        fixed = self.registers * 8.0 + 3000
        costs = waves * (-(-tiles // splits) * tile * _MEASURED + fixed)
        costs = costs * _ALONE.get(self.resident, 1.0)
        costs = costs + self.variants * self.variant_elements * splits * 4 / (132 * 16) + 3000
        return np.where(fits, costs, np.inf)


@functools.lru_cache(maxsize=4096)
def _shapes(depth: int, size: Triple) -> NDArray[np.int64]:
    """Tiles of positions: a multiple of a matrix step along W."""
    found = set()
    width = round_up(size[2], depth)
    for t2 in {depth, 2 * depth, 32, 64, width, round_up(div_up(size[2], 2), depth)}:
        if t2 > width or t2 > 128 or t2 % depth:
            continue
        for t1 in (1, 2, 4, 8, 16):
            for t0 in (1, 2, 4):
                found.add((min(t0, size[0]), min(t1, size[1]), t2))
    return np.array(sorted(found), dtype=np.int64)


def _tap_boxes(problem: Problem) -> list[Triple]:
    """Boxes of taps that one CTA may own."""
    kd, kh, kw = problem.geometry.kernel_size
    boxes = {
        (t0, t1, t2)
        for t0 in {1, kd}
        for t1 in {1, div_up(kh, 2), kh}
        for t2 in {1, div_up(kw, 2), kw}
        if t0 * t1 * t2 <= 28
    }
    return sorted(boxes)


def candidates(problem: Problem, gpu: Gpu) -> Iterator[GradWeightPlan]:
    """Every sensible kernel, in no order."""
    ieee = problem.arithmetic is Arithmetic.IEEE
    limit = _MAX_ACCUMULATORS_IEEE if ieee else _MAX_ACCUMULATORS
    for taps, (fm, fn), warps in itertools.product(
        _tap_boxes(problem), itertools.product((1, 2, 3, 4), (1, 2, 4, 8)), _WARPS
    ):
        accumulators = taps[0] * taps[1] * taps[2] * fm * fn * 4
        m, n = 16 * warps[0] * fm, 8 * warps[1] * fn
        if accumulators > limit or accumulators < 12:
            continue
        if m >= problem.source_channels + 16 or n >= problem.target_channels + 8:
            continue
        base = GradWeightPlan(problem, taps, warps, (fm, fn), 1, (1, 1), gpu)
        operands = (2 if ieee else 1) * (4 * fm + 2 * fn)
        registers = min(255, accumulators + operands + 44)
        most = max(1, min(4, 65536 // (base.threads * registers)))
        for resident in sorted({most, max(1, most // 2)}):
            room = min(gpu.shared_per_block, gpu.shared_per_multiprocessor // resident - 1024)
            yield from _with_positions(replace(base, resident=resident), room)


def _with_positions(plan: GradWeightPlan, room: int) -> Iterator[GradWeightPlan]:
    """Boxes that share the room in proportion to what one position of x needs of both."""
    g = plan.problem.geometry
    for target in (64, 128, 256, 512):
        shape = np.array([[1, target // 32, 32]], dtype=np.int64)
        sizes = []
        for gradient in (False, True):
            a, b, c = (int(n[0]) for n in plan._box(shape, gradient))
            sizes.append(max(a * b * c, plan.depth))
        # Other shapes of as many positions may need a little more.
        slack = 1.25 if max(g.kernel_size) > 1 else 1.0
        sizes = [round_up(int(n * slack) - 4, 32) + 4 for n in sizes]
        chosen = replace(plan, positions=(sizes[0], sizes[1]))
        if chosen.shared_bytes <= room:
            yield chosen


def ranked(
    problem: Problem, batch: int, input_size: Sequence[int], gpu: Gpu
) -> list[GradWeightPlan]:
    """Candidates for extents of a class, cheapest first by the cost model."""
    size = source_representatives(input_size)
    found = [(plan.cost(batch, size, gpu), plan) for plan in candidates(problem, gpu)]
    found = [item for item in found if item[0] < float("inf")]
    found.sort(key=lambda item: item[0])
    return [plan for _, plan in found]
