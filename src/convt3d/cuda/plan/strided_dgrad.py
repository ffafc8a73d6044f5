"""Plans of ``strided_dgrad/mainloop.cuh``: strided layers' gradient by input, warpgroup products.

The kernel is ``phases/kernel.cu`` with other roles: units are elements of the input gradient, taps
of D and H are walked, and boxes hold ``stride`` source positions a unit. The cost model adds up
what bytes, loads, stages and outputs of one work tile take a multiprocessor.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from convt3d.cuda.plan.ampere_strided import odd_lines
from convt3d.cuda.plan.phases import (
    ARITHMETICS,
    MAX_PLANS,
    Four,
    PhasesShape,
    PhasesTile,
    Tiling,
    WgmmaPhasesPlan,
    bank_cycles,
    box_lead,
    deepest,
    product_cycles,
    unit_positions,
)
from convt3d.cuda.schedule import (
    Gpu,
    Problem,
    div_up,
    macros,
    round_up,
)

_MAX_STEP = 8  # between elements that TMA moves
_SPARE_REGISTERS, _SWEEP_REGISTERS = 36, 16
_MOST_EDGES = 2
_MOST_WINDOW = 4
_MOST_VOLUME = 512  # of units
# Cycles, fitted to 62 plans timed on an H200, pairs of lanes; what stages 47 before them.
_BYTE, _RUN_BYTE, _WEIGHT_BYTE = 0.040, 0.0382, 0.0129  # of boxes, of runs of lines, of weights
_BOX_WAIT, _COPY_WAIT = 322.0, 900.0  # for a box by TMA or bulk copies if one is on its way
_CHANNEL_COPY = 8.0  # a bulk copy of aligned lines
# Loads of lines by words a fragment's and blocks: registers.
_PRESSED = {1: {1: 1.0, 2: 1.0, 3: 3.6, 4: 2.8}, 2: {1: 1.0, 2: 1.0, 3: 2.4, 4: 2.8}}
# The same of sweeps of several blocks, with more columns of all of them.
_MOST_SUMS, _WIDE_SWEEP = 64, 2.6
_ROUND = 350.0  # of the epilogue: its barrier
_DRAIN = 200.0  # of products, behind a slice of a sweep
_LOAD, _LOAD_16 = 0.39, 0.84  # a cycle of shared memory for fragments, of 32 and 16 bits
_STAGE, _SHALLOW = 203.0, 340.0  # a stage, and more where only two of weights are under way
_OUTPUT, _COPY = 24.7, 70.0  # an output of a thread, a run out of the staging buffer
_LANE_OUTPUT = 9.8  # an output of a thread that it stores itself
_WORK_TILE = 640.0
_ROW_BYTE, _MOST_ROW = 0.11, 12.0  # of TMA, for short rows and long ones
_PACKED_BYTE = 0.001
# Weight stages, source boxes and staging buffers, deepest first.
_SWEEP_PIPELINES = ((4, 4, 2), (4, 3, 2), (6, 2, 2), (4, 2, 2), (3, 2, 2), (2, 2, 2))
_PIPELINES = ((4, 3, 2), (6, 2, 2), (5, 2, 2), (4, 2, 2), (3, 2, 2), (2, 2, 2))


@dataclass(frozen=True)
class Sweep:
    """An axis as in geometry/swept_axis.cuh; ``taps``: units that a slice of each residue meets."""

    taps: tuple[range, ...]
    dense: bool  # neighbours from the window's lowest unit on

    @property
    def window(self) -> int:
        met = [taps for taps in self.taps if taps]
        return max(taps.stop for taps in met) - min(taps.start for taps in met)

    @property
    def most(self) -> int:
        return max(map(len, self.taps))

    def slices(self, length: int, extent: int) -> list[tuple[int, int, float]]:
        """Slices of a work tile of ``length`` units: taps, units met, and their mean number."""
        found = []
        for taps in map(len, self.taps):
            for units in range(1, taps):
                # At both ends, which may lie outside.
                found.append((taps, units, 2 - length / extent))
            if taps:
                found.append((taps, taps, max(0.0, length + 1 - taps)))
        return found


@functools.lru_cache(maxsize=4096)
def sweep_of(kernel: int, stride: int, padding: int, dilation: int) -> Sweep:
    """The sweep along an axis whose slices all meet a window's lowest unit, if one does."""

    def taps(residue: int) -> range:
        units = [
            (residue + padding - k * dilation) // stride
            for k in range(kernel)
            if (residue + padding - k * dilation) % stride == 0
        ]
        return range(min(units), max(units) + 1) if units else range(0)

    def astray(found: Sequence[range]) -> int:
        lowest = min(units.start for units in found if units)
        return sum(units.start != lowest for units in found if units)

    leads = [tuple(map(taps, range(n, n + stride))) for n in range(stride)]
    best = min(leads, key=astray)
    return Sweep(best, dilation == math.gcd(stride, dilation) and astray(best) == 0)


@dataclass(frozen=True)
class DgradTile(PhasesTile):
    """The compile-time choices of a kernel."""

    whole_boxes: bool = False  # with what all taps of D read, else one tap
    runs: bool = False  # of whole lines, by bulk copies: rows of W may have any length
    volumes: bool = False  # whole ones, by bulk copies
    aligned_runs: bool = False  # runs of lines that are multiples of 16 bytes, for pairs
    staged: int = 16  # columns at a time in the epilogue, at most
    sweep: bool = False  # along D, each slice brought once for all units that it meets
    lane_stores: bool = False  # lanes store their sums without staging


@dataclass(frozen=True)
class WgmmaStridedDgradPlan(WgmmaPhasesPlan):
    """A kernel for one problem; the shape of its tile follows the extents of each call."""

    tile: DgradTile
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)

    # ------------------------------------------------------------ derived sizes

    @property
    def sweep(self) -> bool:
        return self.tile.sweep

    @property
    def producer_registers(self) -> int:
        # Threads that work out bulk copies spill with fewer.
        return super().producer_registers if self.by_map else 40

    @functools.cached_property
    def swept(self) -> Sweep:
        axis = self.axes[0]
        return sweep_of(axis.kernel, axis.stride, axis.padding, axis.dilation)

    @property
    def accumulators(self) -> int:
        window = self.swept.window if self.sweep else 1
        return window * self.tile.blocks * self.tile.column_tile // 2

    @property
    def slot_bytes(self) -> int:
        most = self.swept.most if self.sweep and not self.tile.resident_weights else 1
        return most * self.stage_bytes

    @property
    def staged_columns(self) -> int:
        return 8 if self.sweep else min(self.tile.staged, super().staged_columns)

    @functools.cached_property
    def met(self) -> tuple[int, int]:
        """Source slices and lines from one that taps meet to the next."""
        first, second = (
            axis.stride if axis.kernel == 1 else math.gcd(axis.stride, axis.dilation)
            for axis in self.axes[:2]
        )
        if self.tile.volumes:
            return (1, 1)
        if self.runs or self.tile.aligned_runs:
            return (first, 1)
        return (first, second)

    @property
    def by_map(self) -> bool:
        t = self.tile
        return not (t.runs or t.aligned_runs or t.volumes)

    @property
    def box_steps(self) -> tuple[int, int]:
        return (self.met[0] if self.tile.whole_boxes else self.axes[0].stride, self.met[1])

    @property
    def pair(self) -> int:
        """Neighbours along W that are loaded at once."""
        return 2 if self.axes[2].stride % 2 == 0 else 1

    @functools.cached_property
    def steps(self) -> int:
        """Fragments of units that a stage loads: places along W that taps meet."""
        axis = self.axes[2]
        if self.runs or self.lane_pairs:
            return 1
        return len({(k * axis.dilation - axis.padding) // self.pair for k in range(axis.kernel)})

    @property
    def fits_registers(self) -> bool:
        t = self.tile
        units = 4 * t.blocks * (t.fragments * self.pair + 1)
        if self.runs:
            # Of a block: lines, their addresses, masks of neighbours beyond an end.
            windows = 1 if t.lane_pairs else 2
            units = 4 * t.fragments * self.taps
            units += windows * t.blocks * (2 + 2 * self.axes[2].padding)
        elif t.lane_pairs:
            units = 4 * t.fragments * self.taps + t.blocks * (3 if t.volumes else 2)
        elif t.volumes:
            units += 2 * t.blocks
        spare = _SPARE_REGISTERS + (_SWEEP_REGISTERS if t.sweep else 0)
        return self.accumulators + units + spare <= self.consumer_registers

    # ------------------------------------------------------------ tile shape

    @property
    def runs(self) -> bool:
        return self.tile.runs

    def fits(self, batch: int, source: Sequence[int], target: Sequence[int]) -> bool:
        if self.by_map:
            return super().fits(batch, source, target)
        return self.serves(batch, target)

    def shared_bytes(self, shape: PhasesShape, target: Sequence[int]) -> int:
        if self.tile.lane_stores:
            return self.staging_offset(shape)
        return super().shared_bytes(shape, target)

    def wide(self, shape: PhasesShape, target: Sequence[int]) -> bool:
        return all(n % 2 == 0 for n in (target[2], shape.units[3], self.warpgroup_units(shape)))

    def segment(self, shape: PhasesShape, target: Sequence[int]) -> int:
        return shape.segment or super().segment(shape, target)

    def tilings(self, batch: int, target: Sequence[int]) -> Iterator[Tiling]:
        if self.tile.volumes:
            yield from self._volumes(batch, target)
            return
        if not self.sweep:
            yield from self._across(batch, target)
            return
        across = self._across(1, (1, target[1], target[2]))
        for least, layouts in across:
            _, _, tiles1, tiles2 = least.tiles
            columns = batch * tiles1 * tiles2 * self.n_tile_phases
            counts = {self.gpu.multiprocessors * n // columns for n in (1, 2, 3)} | {1}
            lengths = {div_up(target[0], min(n, target[0])) for n in counts if n > 0}
            # What is left over of several columns can be the work of a CTA.
            even = div_up(target[0] * columns, self.gpu.multiprocessors)
            lengths |= {n for n in (even, even + 1) if n < target[0]}
            copies = itertools.tee(layouts, len(lengths))
            for length, copy in zip(sorted(lengths), copies, strict=True):
                tiles = (batch, div_up(target[0], length), tiles1, tiles2)
                yield (
                    replace(least, tiles=tiles, segment=length),
                    _with_tiles(copy, tiles, length),
                )

    def _across(self, batch: int, target: Sequence[int]) -> Iterator[Tiling]:
        """Tiles of runs of lines or boxes."""
        found: Iterator[Tiling]
        if self.runs:
            found = self._runs(batch, target)
        elif self.tile.aligned_runs:
            found = self._aligned_runs(batch, target)
        else:
            found = super().tilings(batch, target)
        for least, layouts in found:
            # The units of a pair have a line in common.
            if not (self.lane_pairs and least.units[3] % 2):
                yield least, layouts

    def _volumes(self, batch: int, target: Sequence[int]) -> Iterator[Tiling]:
        vector = 16 // self.problem.element_bytes
        _, height, width = source = self.problem.geometry.output_size(target)
        volume = math.prod(source)
        samples = min(batch, self.tile.rows // math.prod(target))
        aligned = 4 if self.lane_pairs else self.pair
        if self.lane_pairs and target[2] % 2:
            return
        if samples < 1 or width % aligned or volume % vector:
            return
        units = (samples, target[0], target[1], target[2])
        tiles = (div_up(batch, samples), 1, 1, 1)
        found = []
        for pitch in range(volume, volume + 64, vector):
            box = (samples, height * width, width, pitch)
            shape = PhasesShape(units, tiles, box, 1, 1.0)
            found.append(replace(shape, conflicts=self._conflicts(shape)))
        shape = min(found, key=lambda shape: shape.conflicts)
        if self.shared_bytes(shape, target) <= self.gpu.shared_per_block:
            yield shape, iter((shape,))

    def box_bytes(self, shape: PhasesShape) -> int:
        if self.tile.volumes:
            return shape.box[0] * shape.box[3] * 32
        if self.tile.aligned_runs:
            return shape.box[3] * 32
        return super().box_bytes(shape)

    def pitches(self, shape: PhasesShape) -> tuple[int, int, int, int]:
        if self.tile.aligned_runs:
            _, _, line, channel = shape.box
            return (0, 0, line, channel)
        if self.tile.volumes:
            _, slice_, line, channel = shape.box
            return (self.chunk_channels * channel, slice_, line, channel)
        return super().pitches(shape)

    def _runs(self, batch: int, target: Sequence[int]) -> Iterator[Tiling]:
        vector = 16 // self.problem.element_bytes
        width = self.problem.geometry.output_size(target)[2]
        axis = self.axes[1]
        for lines in _line_counts(target[1], self.tile.rows // target[2]):
            reach = (lines - 1) * axis.stride + axis.shifts
            # Before a channel's run, before its first line, behind its last one.
            pitch = round_up(reach * width + 4 * vector, vector)
            # Channels of a load in different banks, as far as their alignment lets them.
            step, rest = (8, 4) if vector == 4 else (64, 32)
            # Where channels of a second half begin later.
            late = 32 if self.lane_pairs else 16
            pitch += 0 if vector == 4 else late
            pitch += (rest - pitch) % step
            units = (1, 1, lines, target[2])
            tiles = (batch, target[0], div_up(target[1], lines), 1)
            conflicts = 1.0 if vector == 4 or self.lane_pairs else 1.6
            shape = PhasesShape(units, tiles, (1, 1, 1, pitch), 1, conflicts)
            if self.shared_bytes(shape, target) <= self.gpu.shared_per_block:
                yield shape, iter((shape,))

    def _aligned_runs(self, batch: int, target: Sequence[int]) -> Iterator[Tiling]:
        vector = 16 // self.problem.element_bytes
        width = self.problem.geometry.output_size(target)[2]
        axis = self.axes[1]
        if width % vector or self.tile.rows < target[2]:
            return
        for lines in _line_counts(target[1], self.tile.rows // target[2]):
            reach = ((lines - 1) * axis.stride + axis.shifts) * width
            units = (1, 1, lines, target[2])
            tiles = (batch, target[0], div_up(target[1], lines), 1)
            found = []
            for pitch in range(reach, reach + 64, vector):
                shape = PhasesShape(units, tiles, (1, 1, width, pitch), 1, 1.0)
                found.append(replace(shape, conflicts=self._conflicts(shape)))
            shape = min(found, key=lambda shape: shape.conflicts)
            if self.shared_bytes(shape, target) <= self.gpu.shared_per_block:
                yield shape, iter((shape,))

    def _box(self, units: Four, tiles: Four) -> Four:
        samples, t0, t1, t2 = units
        line = 16 // self.problem.element_bytes
        d, h, w = self.axes
        lead = box_lead(t2 * w.stride, tiles[3], -w.padding, line)
        width = round_up(lead + (t2 - 1) * w.stride + w.shifts, line)
        slices = ((t0 - 1) * d.stride + d.shifts - 1) // self.met[0] + 1
        lines = ((t1 - 1) * h.stride + h.shifts - 1) // self.met[1] + 1
        return (samples, slices if self.tile.whole_boxes else t0, lines, width)

    def _conflicts(self, shape: PhasesShape) -> float:
        sample, slice_, line, channel = self.pitches(shape)
        slices = self.axes[0].stride // self.met[0] if self.tile.whole_boxes else 1
        steps = (sample, slice_ * slices, line * (self.axes[1].stride // self.met[1]))
        if self.lane_pairs:
            return _pair_cycles(
                64 * self.tile.blocks,
                self.warpgroup_units(shape),
                shape.units,
                (*steps, self.axes[2].stride),
                channel,
                self.chunk_channels // 8,
                self._pair_groups,
            )
        return _load_cycles(
            64 * self.tile.blocks,
            self.warpgroup_units(shape),
            shape.units,
            (*steps, self.axes[2].stride),
            channel,
            self.chunk_channels // 8,
            self.pair,
        )

    @functools.cached_property
    def _pair_positions(self) -> list[int]:
        """Positions that a pair of units reads, counted from the first one's."""
        axis = self.axes[2]
        shifts = [k * axis.dilation - axis.padding for k in range(axis.kernel)]
        return sorted({unit * axis.stride + shift for unit in (0, 1) for shift in shifts})

    @functools.cached_property
    def _pair_groups(self) -> tuple[tuple[int, int], ...]:
        """Of each aligned four of them: the first word that is loaded, and how many."""
        found = []
        per_word = self.chunk_channels // 8
        for begin in sorted({n // 4 * 4 for n in self._pair_positions}):
            met = [n for n in self._pair_positions if begin <= n < begin + 4]
            if len(met) == 1 or (per_word == 2 and met[0] // 2 == met[-1] // 2):
                found.append((met[0] // per_word, 1))
            elif met[0] // 2 == met[-1] // 2:
                found.append((met[0] // 2 * 2, 2))
            else:
                found.append((begin // per_word, 4 // per_word))
        return tuple(found)

    # ------------------------------------------------------------ launches

    @functools.cached_property
    def macros(self) -> tuple[tuple[str, str], ...]:
        t = self.tile
        own = macros(
            "CONVT3D_",
            whole_boxes=t.whole_boxes,
            volumes=t.volumes,
            aligned_runs=t.aligned_runs,
            lane_stores=t.lane_stores,
        )
        return super().macros + own

    def describe(self) -> dict[str, str]:
        t = self.tile
        held = "all taps" if t.whole_boxes else "one tap"
        if t.sweep:
            held = f"one slice, for {self.swept.window} M rows"
        brought = "runs of lines" if t.runs or t.aligned_runs else "volumes" if t.volumes else "TMA"
        lanes = " of runs" if t.aligned_runs else ""
        if t.lane_stores:
            lanes += " and store" if t.lane_pairs else ", lanes store"
        base = super().describe()
        return base | {
            "pipeline": base["pipeline"] + lanes,
            "kernel": "gradient by input of a strided layer, M rows in registers, wgmma",
            "unit": f"{self.pair} positions along W at once; a box has {held} of D, by {brought}",
        }

    # ------------------------------------------------------------ cost

    @property
    def _load_cost(self) -> float:
        """Of a cycle of shared memory: operands under many sums spill, and few warps wait."""
        words, blocks = 4 // self.problem.element_bytes, self.tile.blocks
        cost = _LOAD if words == 1 else _LOAD_16
        if self.runs:
            return cost * _PRESSED[words][blocks]
        if self.sweep and blocks > 1 and blocks * self.tile.column_tile > _MOST_SUMS:
            cost *= _WIDE_SWEEP
        return cost

    def shape_cost(self, shape: PhasesShape, batch: int, target: Sequence[int]) -> float:
        fixed = self.packed_bytes * _PACKED_BYTE + 8000.0
        if not self.sweep:
            rounds = div_up(shape.count * self.n_tile_phases, self.grid(shape))
            return rounds * self._work_tile_cost(shape, target, 1) + fixed
        length = shape.segment
        columns = shape.count // shape.tiles[1] * self.n_tile_phases
        rest = target[0] % length
        long = target[0] // length * columns
        item = self._work_tile_cost(shape, target, length)
        left = self._work_tile_cost(shape, target, rest) if rest else 0.0
        scheduled = _scheduled(long, columns if rest else 0, self.grid(shape))
        return max(n * item + m * left for n, m in scheduled) + fixed

    def _work_tile_cost(self, shape: PhasesShape, target: Sequence[int], length: int) -> float:
        """Cycles of a work tile, of a sweep with ``length`` units along D."""
        p, t = self.problem, self.tile
        # Of a work tile: boxes of a chunk, stages of weights, taps of D, units along D.
        boxes: float = 1 if t.whole_boxes else self.axes[0].kernel
        stages: float = self.chunks * self.walked
        products = stages * product_cycles(t.column_tile)
        taps0 = float(self.axes[0].kernel)
        if t.sweep:
            slices = self.swept.slices(length, target[0])
            boxes = sum(many for _, _, many in slices)
            lines = self.chunks * self.axes[1].kernel
            stages = lines * boxes
            products = lines * sum(
                many * product_cycles(units * t.column_tile) for _, units, many in slices
            )
            taps0 = sum(taps * many for taps, _, many in slices)
        words = 4 // p.element_bytes  # loads of a fragment's word
        loads = words * self.steps
        if self.runs:
            # Of each tap, or aligned ones that cover them.
            loads = words * (self.taps if words == 1 else (self.axes[2].shifts + 2) // 2)
        shared = stages * loads * t.blocks * t.consumers * 16 * shape.conflicts
        if t.lane_pairs:
            # Of a pair of units: positions alone or aligned words that cover them, or groups.
            many = len(self._pair_positions)
            if words == 2:
                many = (self._pair_positions[-1] - self._pair_positions[0] + 3) // 2
            shared = stages * words * t.blocks * t.consumers * 8 * shape.conflicts
            shared *= many if self.runs else 1
        copies = t.column_tile * self.staging(shape, target).runs / 4 * t.consumers * length
        wait = _BOX_WAIT if self.by_map else _COPY_WAIT
        item = (
            boxes
            * self.chunks
            * self.box_bytes(shape)
            * (_RUN_BYTE if self.runs or t.aligned_runs else _BYTE)
            + shared * self._load_cost
            + (boxes * self.chunks * self.chunk_channels * _CHANNEL_COPY if t.aligned_runs else 0.0)
            + boxes * self.chunks * wait / (t.source_stages - 1) ** 2.5
            + stages * (_STAGE + (_SHALLOW if t.weight_stages == 2 else 0.0))
            + _WORK_TILE
        )
        if t.lane_stores:
            item += t.blocks * t.column_tile / 2 * _LANE_OUTPUT * length
        else:
            item += copies * _COPY
            item += t.blocks * t.column_tile / 2 * _OUTPUT * length
            item += t.column_tile / self.staged_columns * _ROUND * length
        if not t.resident_weights:
            item += self.chunks * taps0 * self.axes[1].kernel * self.stage_bytes * _WEIGHT_BYTE
        item = max(item, 1.05 * products * self.taps * t.blocks * t.consumers)
        if self.by_map:
            row = min(shape.box[3] * p.element_bytes * _ROW_BYTE, _MOST_ROW)
            item = max(
                item,
                boxes * self.chunks * self.box_bytes(shape) / shape.box[3] / p.element_bytes * row,
            )
        if t.sweep:
            item += boxes * _DRAIN
        return item


def _with_tiles(
    shapes: Iterable[PhasesShape], tiles: tuple[int, int, int, int], segment: int
) -> Iterator[PhasesShape]:
    return (replace(shape, tiles=tiles, segment=segment) for shape in shapes)


@functools.lru_cache(maxsize=4096)
def _scheduled(long: int, short: int, ctas: int) -> tuple[tuple[int, int], ...]:
    """Numbers of long and short work tiles of each CTA, scheduled longest first."""
    found = set()
    for cta in range(ctas):
        items = range((long + short + ctas - 1) // ctas)
        mine = [n * ctas + (ctas - 1 - cta if n % 2 else cta) for n in items]
        found.add((sum(n < long for n in mine), sum(long <= n < long + short for n in mine)))
    return tuple(sorted(found))


def _line_counts(extent: int, most: int) -> list[int]:
    """Lines of a tile: as many as fit, in equal parts, and fewer."""
    most = min(extent, most)
    if most < 1:
        return []
    parts = div_up(extent, most)
    return sorted({most, *(div_up(extent, n) for n in range(parts, parts + 4))}, reverse=True)


@functools.lru_cache(maxsize=65536)
def _load_cycles(
    rows: int,
    own: int,
    units: tuple[int, int, int, int],
    steps: tuple[int, int, int, int],
    channel: int,
    per_word: int,
    pair: int,
) -> float:
    """Mean cycles of a warp's load of eight units of four channels."""
    position = unit_positions(rows, own, units, steps)
    channels = per_word * channel * np.arange(4)
    if per_word == 1 and pair == 2:
        # Two words a lane: half a warp at a time.
        word = (position.reshape(-1, 4, 1) + channels).reshape(-1, 16, 1) + np.arange(2)
        return 2 * bank_cycles(word.reshape(len(word), 32))
    word = position.reshape(-1, 8, 1) + channels
    return bank_cycles(word.reshape(len(word), 32) // per_word)


@functools.lru_cache(maxsize=65536)
def _pair_cycles(
    rows: int,
    own: int,
    units: tuple[int, int, int, int],
    steps: tuple[int, int, int, int],
    channel: int,
    per_word: int,
    groups: tuple[tuple[int, int], ...],
) -> float:
    """Cycles of a warp's loads of eight pairs of units of four channels, a word each."""
    position = unit_positions(rows, own, units, steps)[::2]
    channels = per_word * channel * np.arange(4)
    first = (position.reshape(-1, 1) + channels) // per_word
    cycles = 0.0
    for begin, many in groups:
        # As many lanes at a time as fill the banks.
        word = (first.reshape(-1, 32 // many, 1) + begin + np.arange(many)).reshape(-1, 32)
        cycles += many * bank_cycles(word)
    return cycles


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why strided_dgrad/mainloop.cuh cannot take a problem, or None."""
    g = problem.geometry
    if gpu.capability[0] != 9:
        return "warpgroup products exist on compute capability 9.0 only"
    if problem.operation != "grad_input":
        return "it is the gradient by input"
    if problem.arithmetic not in ARITHMETICS:
        return f"{problem.arithmetic.value} is not among its arithmetics"
    if problem.source_channels_last:
        return "its source boxes are contiguous"
    if max(g.stride) == 1:
        return "stride 1 shares more of its source in other kernels"
    if max(g.stride) > _MAX_STEP:
        return f"TMA's steps end at {_MAX_STEP}"
    if g.kernel_size == g.stride:
        return "kernel == stride has one tap for each position, which the patch kernels compute"
    if g.groups > 1 and problem.source_channels % (32 // problem.element_bytes):
        return "chunks of channels would run into the next group"
    return None


def _runs_serve(problem: Problem) -> bool:
    """Whether the kernel can read runs of lines."""
    g = problem.geometry
    span = (g.kernel_size[2] - 1) * g.dilation[2] + 1
    chunk = 32 // problem.element_bytes
    return (
        g.padding[2] <= _MOST_EDGES
        and (span + 1) * problem.element_bytes <= 128
        and problem.source_channels % chunk == 0
    )


def _pairs_serve(problem: Problem, runs: bool) -> bool:
    """Whether pairs of units along W can be loaded together."""
    g = problem.geometry
    span = (g.kernel_size[2] - 1) * g.dilation[2] + 1
    return not runs or (span + 3) * problem.element_bytes <= 128


def _sweeps(problem: Problem) -> bool:
    """Whether slices meet several units, as neighbours."""
    g = problem.geometry
    axis = sweep_of(g.kernel_size[0], g.stride[0], g.padding[0], g.dilation[0])
    return axis.dense and axis.most > 1 and axis.window <= _MOST_WINDOW


def candidates(
    problem: Problem, batch: int, target: Sequence[int], gpu: Gpu
) -> Iterator[WgmmaPhasesPlan]:
    """Every sensible kernel, in no order, with the deepest pipeline for these extents."""
    channels = problem.target_channels
    columns = {min(256, round_up(div_up(channels, n), 8)) for n in (1, 2, 3, 4, 8)}
    columns = {n for n in columns if n >= 64} or {max(columns)}
    runs = odd_lines(problem)
    if runs and not _runs_serve(problem):
        return
    # Whole boxes, volumes, sweep, runs of aligned lines.
    kinds = [(False, False, False, False)]
    if _sweeps(problem):
        kinds.append((False, False, True, False))
    if not runs:
        kinds.append((True, False, False, False))
        if problem.source_channels % (32 // problem.element_bytes) == 0:
            kinds += [(*kind[:3], True) for kind in kinds if not kind[0]]
    if (
        math.prod(target) <= _MOST_VOLUME
        and problem.source_channels % (32 // problem.element_bytes) == 0
    ):
        kinds.append((True, True, False, False))
    # Pairs of lanes, stores of lanes: sectors of 32 bytes, or staging.
    pairs = problem.geometry.stride[2] == 2 and target[2] % 2 == 0 and _pairs_serve(problem, runs)
    alone = not problem.target_channels_last and (pairs or problem.element_bytes == 4)
    pairs = pairs and alone
    for column_tile, consumers, (whole, volumes, sweep, aligned) in itertools.product(
        sorted(columns), (2, 3), kinds
    ):
        if aligned and not pairs:
            continue
        for blocks in (1, 2, 3, 4):
            base = DgradTile(
                2, blocks, column_tile, consumers, 2, 2, 2, False,
                whole_boxes=whole, runs=runs and not volumes, sweep=sweep, volumes=volumes,
                lane_pairs=pairs, lane_stores=alone, aligned_runs=aligned,
            )  # fmt: skip
            plan = WgmmaStridedDgradPlan(problem, base, gpu)
            if sweep and plan.swept.most * column_tile > 256:
                continue
            # Marches of several blocks have too few registers then.
            if consumers > 2 and (whole or (sweep and blocks > 1)):
                continue
            # Without a break in the ring of fragments from stage to stage, if possible.
            steps = plan.steps
            if plan.runs or pairs:
                steps = max(2, blocks)  # a single block's taps are two steps
            for fragments in (3, 2) if steps % 3 == 0 else (2,):
                plan = replace(plan, tile=replace(base, fragments=fragments))
                if plan.fits_registers:
                    break
            else:
                continue
            kept = plan.chunks * plan.most_walked * plan.stage_bytes
            for resident in (False, True):
                if resident and (
                    plan.n_tile_phases > gpu.multiprocessors or kept > gpu.shared_per_block
                ):
                    continue
                pipelines = _SWEEP_PIPELINES if sweep else _PIPELINES
                found = list(deepest(plan, resident, batch, target, pipelines))
                yield from found
                # Fewer columns in the epilogue leave room for another box.
                narrow = replace(plan, tile=replace(plan.tile, staged=8))
                for other in (
                    () if sweep or alone else deepest(narrow, resident, batch, target, _PIPELINES)
                ):
                    if not found or other.tile.source_stages > found[0].tile.source_stages:
                        yield other


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, WgmmaPhasesPlan]]:
    """The best candidates for these input extents with their costs, cheapest first."""
    if refusal(problem, gpu) is not None:
        return []
    source, target = problem.extents(input_size)
    found = [
        (plan.cost(batch, target), plan)
        for plan in dict.fromkeys(candidates(problem, batch, target, gpu))
        if plan.fits(batch, source, target)
    ]
    found.sort(key=lambda item: item[0])
    return found[:MAX_PLANS]
