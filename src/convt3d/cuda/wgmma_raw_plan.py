"""Plans of ``wgmma_gather.cu`` whose source boxes come by TMA and are transposed in shared memory.

The numbers mirror ``wgmma_raw_fill.cuh``. The fill serves contiguous sources where no axis of the
plane is split into residues (forward layers of any stride, gradients of stride 1) and whose rows
are multiples of 16 bytes; or whose planes are, if no tap leaves them (gradients of layers without
padding). Other extents run the plan that fills through registers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convt3d.cuda import wgmma_plan
from convt3d.cuda.schedule import (
    Gpu,
    Problem,
    Schedule,
    TensorMap,
    div_up,
    representatives,
    round_up,
)
from convt3d.cuda.wgmma_plan import Line, WgmmaPlan
from convt3d.precision import Arithmetic

_BASES = 24  # plans through registers whose tiles are tried
_KEPT = 8
_MAX_LINES = 32  # of a box: one for each lane of a warp
_MAX_PITCH = 256  # elements of a TMA box
_FLAT_PITCH = 64  # elements of a line that is cut from a plane
_POSITION_BYTES = 32  # of a chunk of channels
# Cycles of a filling warp: for the quad of one position (of two, where words hold two channels),
# for a round of loads, and for the barriers of a plane.
_ITEM_CYCLES = (48.0, 120.0)
_ROUND_CYCLES = 60.0
_PLANE_CYCLES = 200.0
_STAGES = ((4, 3, 4), (4, 2, 4), (3, 2, 4), (3, 2, 3), (2, 2, 3), (2, 2, 2))
_ELEMENTS = {
    Arithmetic.TF32: "tfloat32",
    Arithmetic.IEEE: "float32",
    Arithmetic.F16: "float16",
    Arithmetic.BF16: "bfloat16",
}


@dataclass(frozen=True)
class RawWgmmaPlan(WgmmaPlan):
    """A kernel with a ring of raw source lines, and the plan for extents that it cannot take."""

    plain: WgmmaPlan
    flat: bool = False  # lines are cut from whole planes

    @property
    def box_warps(self) -> int:
        """Warps that transpose."""
        return self.tile.fill_warps - 1

    @property
    def width(self) -> int:
        """Positions of an item: two where a word holds two channels."""
        return 1 if self.problem.element_bytes == 4 else 2

    @functools.cached_property
    def fill_batch(self) -> int:
        words = 4 * self.width
        spare = self.registers[1] - 36 - self.tile.fill_items - (8 if self.parts > 1 else 0)
        most = min(8, max(1, spare // (words + 1)))
        return div_up(self.tile.fill_items, div_up(self.tile.fill_items, most))

    @property
    def fill_cycles(self) -> float:
        items = self.tile.fill_items
        rounds = div_up(items, self.fill_batch)
        plane = items * _ITEM_CYCLES[self.width - 1] * self.parts + rounds * _ROUND_CYCLES
        return self.march.source_step * (plane + _PLANE_CYCLES)

    def covers(self, items: int, positions: int) -> bool:
        return 16 * self.box_warps * items * self.width >= positions + self.width - 1

    def positions_of(self, items: int) -> int:
        return 16 * self.box_warps * items * self.width + 1

    def raw_lines(self, pitch: int, elements: int) -> int:
        """Lines that a box may touch."""
        return (pitch - 1 + elements - 1) // pitch + 1

    def raw_pitch(self, source: Sequence[int], target: Sequence[int], tile2: int) -> int:
        """Elements from one channel of a raw line to the next."""
        aligned = 16 // self.problem.element_bytes
        whole = tile2 >= self.plane[1].units(target[self.order[2]])
        lead = self.plane[1].reach[0] % aligned if whole else aligned - 1
        return round_up(self.pitch2(source, target, tile2) + lead + self.width - 1, aligned)

    def raw_size(self, source: Sequence[int], target: Sequence[int], tile2: int) -> int:
        """Bytes of a raw stage."""
        pitch = self.raw_pitch(source, target, tile2)
        lines = self.raw_lines(
            self.pitch2(source, target, tile2), self._elements(source, target, tile2)
        )
        return lines * pitch * _POSITION_BYTES

    def _elements(self, source: Sequence[int], target: Sequence[int], tile2: int) -> int:
        axis1, axis2 = self.plane
        pitch = self.pitch2(source, target, tile2)
        return self.tile.rows + axis1.reach_units * pitch + axis2.reach_units

    def fits(self, source: Sequence[int], target: Sequence[int], tile2: int) -> bool:
        """Whether stages and threads are enough for such boxes."""
        elements = self._elements(source, target, tile2)
        pitch = self.pitch2(source, target, tile2)
        return (
            self.raw_lines(pitch, elements) <= _MAX_LINES
            and self.raw_pitch(source, target, tile2) <= _MAX_PITCH
            and self._holds(elements)
            and self.raw_size(source, target, tile2) <= self.tile.raw_bytes
        )

    def _holds(self, elements: int) -> bool:
        return elements <= self.tile.positions and self.covers(self.tile.fill_items, elements)

    def aligned(self, source: Sequence[int], target: Sequence[int], tile2: int) -> bool:
        """Whether TMA can bring single lines of the source."""
        two = self.order[2]
        extent = source[two]
        if extent * self.problem.element_bytes % 16:
            return False
        if self.width == 1:
            return True
        # Pairs are aligned in every line; one that belongs to two lines must be zero in both.
        first = self.plane[1].reach[0]
        whole = tile2 >= self.plane[1].units(target[two])
        zeros = first < 0 and whole and self.pitch2(source, target, tile2) >= extent - first
        return (whole or tile2 % 2 == 0) and (first % 2 == 0 or zeros)

    def flat_suits(self, source: Sequence[int], target: Sequence[int]) -> bool:
        """Whether lines can be cut from planes: rows of products are the source's positions."""
        axis1, axis2 = self.plane
        one, two = self.order[1:]
        units2 = axis2.units(target[two])
        if self.swapped or axis1.reach[0] or axis2.reach[0]:
            return False
        if source[one] * source[two] * self.problem.element_bytes % 16:
            return False
        if axis1.shared_pitch(source[one], target[one]) != source[one]:
            return False
        if self.pitch2(source, target, units2) != source[two]:
            return False
        lines = self.flat_lines(source, target)
        size = lines * _FLAT_PITCH * _POSITION_BYTES
        elements = self._elements(source, target, units2)
        return lines <= _MAX_LINES and size <= self.tile.raw_bytes and self._holds(elements)

    def flat_lines(self, source: Sequence[int], target: Sequence[int]) -> int:
        """Lines of a box that are cut from planes, which end in the middle of one."""
        one, two = self.order[1:]
        elements = self._elements(source, target, self.plane[1].units(target[two]))
        planes = 1 + (elements - 1) // (source[one] * source[two])
        return self.raw_lines(_FLAT_PITCH, elements) + planes

    @property
    def raw_flat(self) -> bool:
        return self.flat

    def piece(self, batch: int, source: Sequence[int], target: Sequence[int]) -> int:
        if self.flat:
            return self.plane[1].units(target[self.order[2]])
        return super().piece(batch, source, target)

    def _cost(self, line: Line, source: Sequence[int], target: Sequence[int]) -> float:
        if not self.fits(source, target, line.units):
            return float("inf")
        return super()._cost(line, source, target)

    def variant(self, batch: int, source: Sequence[int], target: Sequence[int]) -> WgmmaPlan:
        """What runs these extents: single lines, lines of whole planes, or no raw lines."""
        tile2 = self.piece(batch, source, target)
        if self.aligned(source, target, tile2) and self.fits(source, target, tile2):
            return self
        return replace(self, flat=True) if self.flat_suits(source, target) else self.plain

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        source, target = tuple(input_size), self.problem.geometry.output_size(input_size)
        if not self.problem.forward:
            source, target = target, source
        if not self.flat:
            chosen = self.variant(batch, source, target)
            if chosen is not self:
                return chosen.schedule(batch, input_size)
        schedule = super().schedule(batch, input_size)
        pack, product = schedule.launches
        pitch = _FLAT_PITCH
        if not self.flat:
            pitch = self.raw_pitch(source, target, self.piece(batch, source, target))
        pointers, numbers = product.arguments[:4], product.arguments[4:]
        arguments = (*pointers, self._map(batch, source, pitch), np.int32(pitch), *numbers)
        return replace(schedule, launches=(pack, replace(product, arguments=arguments)))

    def _map(self, batch: int, source: Sequence[int], pitch: int) -> TensorMap:
        """The source as boxes of one line and one chunk of channels."""
        bytes_ = self.problem.element_bytes
        volume = math.prod(source)
        g = self.problem.geometry
        channels = g.in_channels if self.problem.forward else g.out_channels
        stride0, stride1 = wgmma_plan.strides(source, self.order)
        rows, lines = source[self.order[2]], source[self.order[1]]
        if self.flat:
            rows, lines, stride1 = rows * lines, 1, stride0
        return TensorMap(
            "source",
            _ELEMENTS[self.problem.arithmetic],
            (rows, lines, source[self.order[0]], channels, batch),
            tuple(n * bytes_ for n in (stride1, stride0, volume, channels * volume)),
            (pitch, 1, 1, self.chunk_channels, 1),
        )

    def describe(self) -> dict[str, str]:
        t = self.tile
        facts = super().describe()
        facts["warps"] = f"{t.consumers} warpgroups multiply, {self.box_warps} warps transpose"
        facts["pipeline"] += f", {t.raw_stages} stages of lines by TMA"
        return facts


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why TMA cannot bring the lines of a problem, or None."""
    if problem.operation == "grad_weight":
        return "the gradient by weight is no gather"
    declined = wgmma_plan.refusal(problem, gpu)
    if declined is not None:
        return declined
    if problem.source_channels_last:
        return "channels_last sources need no transposition"
    g = problem.geometry
    if not problem.forward and max(g.stride) > 1:
        return "residues of a strided source are not neighbours"
    if g.groups > 1 and problem.source_channels * problem.element_bytes % _POSITION_BYTES:
        return "a chunk of channels would reach into the next group"
    return None


def _with_raw_lines(
    plain: WgmmaPlan, source: Sequence[int], target: Sequence[int], gpu: Gpu
) -> Iterator[RawWgmmaPlan]:
    """The plan's tile with the deepest pipeline that fits, for few filling warps and for many."""
    room = min(gpu.shared_per_block, gpu.shared_per_multiprocessor // plain.tile.resident - 1024)
    tile2 = plain.plane[1].units(target[plain.order[2]])
    for fill_warps in (3, 7):
        tile = replace(plain.tile, fill_warps=fill_warps, raw_stages=1)
        plan = RawWgmmaPlan(plain.problem, tile, plain.swapped, plain.multiprocessors, plain)
        if plan.registers[0] < plan.live + wgmma_plan.SPARE_REGISTERS:
            continue
        items = 1
        while not plan.covers(items, plan.box_positions(tile2)):
            items += 1
        if items > plan.registers[1] - 56:
            continue
        # The leads of shorter lines, of which there are more.
        raw_bytes = round_up(plan.raw_size(source, target, tile2) + 4096, 128)
        if not plan.problem.forward:
            flat_bytes = plan.flat_lines(source, target) * _FLAT_PITCH * _POSITION_BYTES
            raw_bytes = max(raw_bytes, flat_bytes)
        for raw_stages, source_stages, weight_stages in _STAGES:
            tile = replace(
                tile,
                source_stages=source_stages,
                weight_stages=weight_stages,
                fill_items=items,
                positions=plan.positions_of(items),
                raw_stages=raw_stages,
                raw_bytes=raw_bytes,
            )
            chosen = replace(plan, tile=tile)
            if chosen.shared_bytes <= room:
                yield chosen
                break


def ranked(problem: Problem, batch: int, input_size: Sequence[int], gpu: Gpu) -> list[RawWgmmaPlan]:
    """Candidates for extents of a class, cheapest first; none where the fill declines."""
    if refusal(problem, gpu) is not None:
        return []
    source: Sequence[int] = representatives(input_size)
    target: Sequence[int] = problem.geometry.output_size(source)
    if not problem.forward:
        source, target = target, source
    found = [
        (plan.cost(plan.lines(batch, source, target), source, target), plan)
        for _, plain in wgmma_plan.ranked(problem, batch, input_size, gpu)[:_BASES]
        for plan in _with_raw_lines(plain, source, target, gpu)
    ]
    found = [item for item in found if item[0] < float("inf")]
    found.sort(key=lambda item: item[0])
    return [plan for _, plan in found[:_KEPT]]
