"""Plans of ``rows/kernel.cu``: strided layers with few channels a group, on warpgroup products.

A plan of ``ampere/strided/forward.cu`` runs other extents: outputs of widths that are no multiple
of what is stored at once, or that are too wide for a tile where they are stored as streams.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan import ampere_strided
from convt3d.cuda.plan.launches import packed_first
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.rates import MEMORY_BYTES
from convt3d.cuda.plan.warpgroups import consumer_registers
from convt3d.cuda.schedule import (
    Gpu,
    Launch,
    Problem,
    Schedule,
    div_up,
    geometry_macros,
    macros,
    not_taken,
    round_up,
)
from convt3d.precision import Arithmetic

_BLOCK = 64  # units of a product, along W
_LINE = 128  # bytes
_SKEW = 32  # bytes between streams, for the sake of banks
_CONSUMERS = 2  # warpgroups
_COLUMN_TILE = 8
_SLOTS = 2  # along W
_MOST_OCTETS = 4
_MOST_COLUMNS = 256
_MOST_ELEMENTS = 2**31  # of a channel of the source
_SPARE_REGISTERS = 36
_PRODUCER_REGISTERS = {1: 80, 2: 112}  # by blocks
_PRODUCERS = (4, 2)  # warps of a warpgroup; fewer leave more registers to it
_BLOCKS = (1, 2)  # of a tile, by whether rows are odd
_RINGS = (8, 6, 5, 4, 3, 2)
# Cycles of shared memory: a product 16 deep, by its columns and by its rows; a byte that leaves. A
# row besides; a warp that brings one of forty loads a lane; a call.
_COLUMN, _ROWS, _BYTE = 0.25, 16.0, 1 / 40
_STREAM_BYTE = 1 / 15
_ROW, _BRING, _CALL = 320.0, 3100.0, 6000.0
_LOADS = 5  # of eight channels each, that a lane of them has on their way
_ORDER = 0.02
_UNTIMED = 2.0  # of more than eight channels


@dataclass(frozen=True)
class RowsTile:
    """The compile-time choices of a kernel."""

    producers: int  # warps of a warpgroup
    ring: int  # stages of a warpgroup
    blocks: int = 1  # of 64 units along W that a warpgroup computes
    streams: bool = False  # rows of the target are odd, and leave as streams


@dataclass(frozen=True)
class WgmmaRowsPlan:
    """A kernel for one problem, of the extents that suit it."""

    problem: Problem
    tile: RowsTile
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)

    @property
    def f16x3(self) -> bool:
        return self.problem.arithmetic is Arithmetic.IEEE

    @once
    def octets(self) -> int:
        return div_up(self.problem.source_channels, 8)

    @once
    def n_tiles(self) -> int:
        return self.problem.geometry.groups * div_up(self.problem.target_channels, _COLUMN_TILE)

    @once
    def shifts(self) -> tuple[int, int]:
        """Along D and along W."""
        axes = ampere_strided.axes_of(self.problem)
        return axes[0].shifts, axes[2].shifts

    @once
    def columns(self) -> tuple[int, ...]:
        """Of the products of each slice along D."""
        g = self.problem.geometry
        axis = ampere_strided.axes_of(self.problem)[0]
        counts = [0] * axis.shifts
        for slot, k in itertools.product(range(g.stride[0]), range(g.kernel_size[0])):
            shift, rest = divmod(slot + g.padding[0] - k * g.dilation[0], g.stride[0])
            counts[shift - axis.reach[0]] += rest == 0
        return tuple(n * g.kernel_size[1] * _SLOTS * _COLUMN_TILE for n in counts)

    @once
    def steps(self) -> int:
        """Products 16 deep of a slice."""
        shifts = self.shifts[1]
        return self.octets * (div_up(shifts, 2) + (shifts if self.f16x3 else 0))

    @property
    def n_tile_bytes(self) -> int:
        return sum(self.columns) * self.steps * 32 + (32 if self.f16x3 else 0)

    @property
    def units(self) -> int:
        """Of a tile, along W."""
        return _BLOCK * self.tile.blocks

    @property
    def stage_bytes(self) -> int:
        parts = 2 if self.f16x3 else 1
        return self.shifts[0] * self.octets * parts * 16 * (self.units + self.shifts[1] - 1)

    @property
    def pipeline_bytes(self) -> int:
        weights = round_up(_CONSUMERS * self.tile.ring * self.stage_bytes + self.n_tile_bytes, 16)
        return weights + (16 + 8) * self.tile.ring * _CONSUMERS + 8

    def pitch(self, target: Sequence[int]) -> int:
        """Bytes of a stream's buffer: a step's rows, and the line that they begin in."""
        rows = self.problem.geometry.stride[1] * target[2] * self.problem.element_bytes
        return round_up(rows + _LINE - 1, _LINE) + _SKEW

    def shared_bytes(self, target: Sequence[int]) -> int:
        if not self.tile.streams:
            return self.pipeline_bytes
        streams = self.problem.geometry.stride[0] * _COLUMN_TILE
        staging = _CONSUMERS * 2 * streams * self.pitch(target)
        return round_up(self.pipeline_bytes, _LINE) + staging

    @property
    def threads(self) -> int:
        return 32 * _CONSUMERS * (4 + self.tile.producers)

    @property
    def registers(self) -> int:
        """Of a thread that multiplies."""
        return consumer_registers(self.threads, _CONSUMERS, _PRODUCER_REGISTERS[self.tile.blocks])

    @once
    def reach(self) -> int:
        """Rows of the target that a source row reaches."""
        g = self.problem.geometry
        return (g.kernel_size[1] - 1) * g.dilation[1] + 1

    def accumulators(self) -> int:
        """Of a lane: sums of a row's products, and those that wait."""
        g = self.problem.geometry
        kept = self.tile.blocks * max(0, self.reach - g.stride[1])
        return g.stride[0] * (g.kernel_size[1] + kept) * _SLOTS * _COLUMN_TILE // 2

    def blocks(self, target: Sequence[int]) -> tuple[int, int]:
        """The first source row that completes rows of the target, and how many do."""
        stride, padding = self.problem.geometry.stride[1], self.problem.geometry.padding[1]
        first = max(0, div_up(padding - stride + 1, stride))
        return first, (target[1] - 1 + padding) // stride - first + 1

    def takes(self, source: Sequence[int], target: Sequence[int]) -> bool:
        if math.prod(source) >= _MOST_ELEMENTS:
            return False
        if not self.tile.streams:
            return target[2] % _SLOTS == 0
        return (
            target[2] <= _SLOTS * self.units
            and target[2] * self.problem.element_bytes >= _LINE
            and self.shared_bytes(target) <= self.gpu.shared_per_block
        )

    def rows_of(self, batch: int, target: Sequence[int]) -> tuple[int, int, int]:
        """Units along D, tiles along W, and rows of units of an N tile."""
        units0 = div_up(target[0], self.problem.geometry.stride[0])
        tiles2 = div_up(div_up(target[2], _SLOTS), self.units)
        return units0, tiles2, batch * units0 * tiles2 * self.blocks(target)[1]

    def workers(self, count: int) -> int:
        """CTAs of an N tile."""
        most = max(1, self.gpu.multiprocessors // self.n_tiles)
        return min(most, div_up(count, _CONSUMERS))

    def cost(self, batch: int, target: Sequence[int]) -> float:
        """Estimated cycles of one call."""
        g, t = self.problem.geometry, self.tile
        count = self.rows_of(batch, target)[2]
        back = (self.reach - 1) // g.stride[1]
        columns = self.blocks(target)[1]
        share = div_up(count, self.workers(count) * _CONSUMERS)
        rows = share + back * (div_up(share, columns) if share % columns else 0)
        width = g.kernel_size[1] * _SLOTS * _COLUMN_TILE  # of a product
        products = t.blocks * self.steps * sum(self.columns) // width
        outputs = g.stride[0] * g.stride[1] * _SLOTS * self.units * _COLUMN_TILE
        byte = _STREAM_BYTE if t.streams else _BYTE
        shared = products * (_ROWS + _COLUMN * width) + outputs * self.problem.element_bytes * byte
        # Both warpgroups' rows, by one multiprocessor; what a warpgroup's own warps bring.
        loads = div_up(self.shifts[0] * (self.units + self.shifts[1] - 1), 32) * self.octets
        twice = self.f16x3 and loads > _LOADS
        bring = _BRING * loads * (2 if twice else 1) / _LOADS / t.producers
        traffic = outputs * self.problem.element_bytes / MEMORY_BYTES
        busy = self.workers(count) * self.n_tiles / self.gpu.multiprocessors
        missed = 1.0 if self.octets == 1 else _UNTIMED
        return missed * rows * max(_CONSUMERS * max(shared + _ROW, traffic * busy), bring) + _CALL

    # ------------------------------------------------------------ launches

    @once
    def macros(self) -> tuple[tuple[str, str], ...]:
        p = self.problem
        types = dict(p.type_macros)
        if self.f16x3:
            types["CONVT3D_MATH"] = "MathF16x3"
        return (
            tuple(types.items())
            + macros(
                "CONVT3D_",
                bias=p.bias,
                groups=p.geometry.groups,
                source_channels=p.source_channels,
                target_channels=p.target_channels,
                consumers=_CONSUMERS,
                producers=self.tile.producers,
                ring=self.tile.ring,
                blocks=self.tile.blocks,
                streams=self.tile.streams,
            )
            + geometry_macros(p.geometry)
        )

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        target = self.problem.geometry.output_size(input_size)
        if not self.takes(input_size, target):
            raise not_taken(self, input_size)
        units0, tiles2, count = self.rows_of(batch, target)
        pitch = self.pitch(target) if self.tile.streams else 0
        numbers = (*input_size, *target, units0, tiles2, *self.blocks(target), count, pitch)
        product = Launch(
            KernelSpec("rows/kernel.cu", "convt3d_rows", self.macros),
            self.workers(count) * self.n_tiles,
            self.threads,
            self.shared_bytes(target),
            ("source", "packed", "bias", "target", *map(np.int32, numbers)),
            dependent=True,
        )
        blocks = div_up(self.n_tile_bytes // 16, 256) * self.n_tiles
        return packed_first(product, blocks, self.n_tiles * self.n_tile_bytes)

    def describe(self) -> dict[str, str]:
        t = self.tile
        return {
            "kernel": "strided rows (a sweep along H, its taps stacked on N), wgmma"
            + (", F16x3" if self.f16x3 else ""),
            "tile": f"{self.units} M rows x {max(self.columns)} columns",
            "unit": "all unrolled phases along D, rows of H one by one, 2 outputs of W",
            "warps": f"{_CONSUMERS} warpgroups, {t.producers} warps bring and split rows for each",
            "pipeline": f"{t.ring} rows a warpgroup, weights resident"
            + (", outputs leave as streams" if t.streams else ""),
            "shared memory": f"{self.pipeline_bytes} bytes" + (" and staging" if t.streams else ""),
        }


def refusal(problem: Problem) -> str | None:
    """Why rows/kernel.cu cannot take a problem, or None."""
    if not problem.forward or problem.arithmetic is Arithmetic.TF32:
        return "the kernel computes outputs, of 16-bit or float32-grade products"
    if problem.source_channels_last or problem.target_channels_last:
        return "the kernel takes contiguous tensors"
    g = problem.geometry
    if g.stride[2] != _SLOTS:
        return f"a stride of {g.stride[2]} along W, not {_SLOTS}"
    if problem.source_channels > 8 * _MOST_OCTETS:
        return f"{problem.source_channels} channels of a group are no stage"
    if not all(map(all, ampere_strided.live_slots(problem))):
        return "some outputs have no tap"
    if ampere_strided.axes_of(problem)[2].shifts < 2:
        return "one shift along W"
    plan = WgmmaRowsPlan(problem, RowsTile(_PRODUCERS[0], _RINGS[-1]))
    if g.kernel_size[1] * _SLOTS * _COLUMN_TILE > _MOST_COLUMNS:
        return "the taps along H are too many columns of a product"
    if plan.pipeline_bytes > plan.gpu.shared_per_block:
        return f"{plan.n_tile_bytes} bytes of weights do not fit in shared memory"
    return ampere_strided.refusal(problem)


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, WgmmaRowsPlan]]:
    """The candidate for these input extents with its cost, or none."""
    if gpu.capability[0] != 9 or refusal(problem) is not None:
        return []
    source, target = problem.extents(input_size)
    odd = target[2] % _SLOTS == 1
    if odd and problem.element_bytes == 4:
        return []  # timed slower than ampere/strided/rows.cu
    for producers, ring in itertools.product(_PRODUCERS, _RINGS):
        tile = RowsTile(producers, ring, _BLOCKS[odd], odd)
        plan = WgmmaRowsPlan(problem, tile, gpu)
        room = (*target[:2], min(target[2], _SLOTS * plan.units))
        if (
            plan.accumulators() + _SPARE_REGISTERS <= plan.registers
            and plan.shared_bytes(room) <= gpu.shared_per_block
            and plan.takes(source, target)
        ):
            return [(plan.cost(batch, target), plan)]
    return []
