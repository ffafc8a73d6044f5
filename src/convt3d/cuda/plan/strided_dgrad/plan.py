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
from dataclasses import dataclass, replace

from convt3d.cuda.plan import banks
from convt3d.cuda.plan.axes import SlicedAxis, sliced_axis
from convt3d.cuda.plan.banks import Four
from convt3d.cuda.plan.extents import near_cuts
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.phases.cost import product_cycles
from convt3d.cuda.plan.phases.layout import box_lead
from convt3d.cuda.plan.phases.plan import PhasesLaunches
from convt3d.cuda.plan.phases.tile import AnyPhasesTile, PhasesShape, Tiling
from convt3d.cuda.schedule import div_up, macros, round_up

_SPARE_REGISTERS, _SWEEP_REGISTERS = 36, 16
# Cycles, fitted to 62 plans timed on an H200, pairs of lanes; what stages 47 before them.
_BYTE, _RUN_BYTE, _WEIGHT_BYTE = 0.040, 0.0382, 0.0129  # of boxes, of runs of lines, of weights
_BOX_WAIT, _COPY_WAIT = 322.0, 900.0  # for a box by TMA or bulk copies if one is on its way
# Loads of lines by words a fragment's and blocks: registers.
_PRESSED = {1: {1: 1.0, 2: 1.0, 3: 3.6, 4: 2.8}, 2: {1: 1.0, 2: 1.0, 3: 2.4, 4: 2.8}}
_LOAD, _LOAD_16 = 0.39, 0.84  # a cycle of shared memory for fragments, of 32 and 16 bits
_STAGE, _SHALLOW = 203.0, 340.0  # a stage, and more where only two of weights are under way
_LANE_OUTPUT, _OUTPUT = 9.8, 24.7  # an output of a thread that it stores itself, or stages
_WORK_TILE, _CALL = 640.0, 8000.0
_ROW_BYTE, _MOST_ROW = 0.11, 12.0  # of TMA, for short rows and long ones


@dataclass(frozen=True)
class DgradTile(AnyPhasesTile):
    """The compile-time choices of a kernel."""

    resident_weights: bool
    lane_pairs: bool = False  # a lane's two rows of a block are neighbours along W
    whole_boxes: bool = False  # with what all taps of D read, else one tap
    runs: bool = False  # of whole lines, by bulk copies: rows of W may have any length
    volumes: bool = False  # whole ones, by bulk copies
    aligned_runs: bool = False  # runs of lines that are multiples of 16 bytes, for pairs
    sweep: bool = False  # along D, each slice brought once for all units that it meets
    lane_stores: bool = False  # lanes store their sums as they lie, else warps stage their own

    @property
    def by_map(self) -> bool:
        return not (self.runs or self.aligned_runs or self.volumes)

    @property
    def stores_per_warp(self) -> bool:
        return not self.lane_stores


@dataclass(frozen=True)
class WgmmaStridedDgradPlan(PhasesLaunches):
    """A kernel for one problem; the shape of its tile follows the extents of each call."""

    tile: DgradTile

    # ------------------------------------------------------------ derived sizes

    @property
    def producer_registers(self) -> int:
        # Threads that work out bulk copies spill with fewer.
        return super().producer_registers if self.tile.by_map else 40

    @once
    def swept(self) -> SlicedAxis:
        axis = self.axes[0]
        return sliced_axis(axis.kernel, axis.stride, axis.padding, axis.dilation)

    @property
    def accumulators(self) -> int:
        window = self.swept.window if self.tile.sweep else 1
        return window * self.tile.blocks * self.tile.column_tile // 2

    @property
    def slot_bytes(self) -> int:
        most = self.swept.most if self.tile.sweep and not self.tile.resident_weights else 1
        return most * self.stage_bytes

    @once
    def met(self) -> tuple[int, int]:
        """Source slices and lines from one that taps meet to the next."""
        first, second = (
            axis.stride if axis.kernel == 1 else math.gcd(axis.stride, axis.dilation)
            for axis in self.axes[:2]
        )
        if self.tile.volumes:
            return (1, 1)
        if self.tile.runs or self.tile.aligned_runs:
            return (first, 1)
        return (first, second)

    @property
    def box_steps(self) -> tuple[int, int]:
        return (self.met[0] if self.tile.whole_boxes else self.axes[0].stride, self.met[1])

    @property
    def pair(self) -> int:
        """Neighbours along W that are loaded at once."""
        return 2 if self.axes[2].stride % 2 == 0 else 1

    @once
    def steps(self) -> int:
        """Fragments of units that a stage loads: places along W that taps meet."""
        axis = self.axes[2]
        if self.tile.runs or self.tile.lane_pairs:
            return 1
        return len({(k * axis.dilation - axis.padding) // self.pair for k in range(axis.kernel)})

    @property
    def fits_registers(self) -> bool:
        t = self.tile
        units = 4 * t.blocks * (t.fragments * self.pair + 1)
        if self.tile.runs:
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

    def fits(self, batch: int, source: Sequence[int], target: Sequence[int]) -> bool:
        if self.tile.by_map:
            return super().fits(batch, source, target)
        return self.serves(batch, target)

    def shared_bytes(self, shape: PhasesShape, target: Sequence[int]) -> int:
        if self.tile.lane_stores:
            return self.staging_offset(shape)
        return super().shared_bytes(shape, target)

    def wide(self, shape: PhasesShape, target: Sequence[int]) -> bool:
        if not self.tile.lane_stores:
            return super().wide(shape, target)
        return all(n % 2 == 0 for n in (target[2], shape.units[3], self.warpgroup_units(shape)))

    def segment(self, shape: PhasesShape, target: Sequence[int]) -> int:
        return shape.segment or super().segment(shape, target)

    def tilings(self, batch: int, target: Sequence[int]) -> Iterator[Tiling]:
        if self.tile.volumes:
            yield from self._volumes(batch, target)
            return
        if not self.tile.sweep:
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
        t = self.tile
        found = super().tilings(batch, target)
        if t.runs or t.aligned_runs:
            found = self._line_runs(batch, target)
        for least, layouts in found:
            # The units of a pair have a line in common.
            if not (self.tile.lane_pairs and least.units[3] % 2):
                yield least, layouts

    def _volumes(self, batch: int, target: Sequence[int]) -> Iterator[Tiling]:
        """The tile of whole volumes."""
        _, height, width = source = self.problem.geometry.output_size(target)
        volume = math.prod(source)
        samples = min(batch, self.tile.rows // math.prod(target))
        aligned = 4 if self.tile.lane_pairs else self.pair
        if self.tile.lane_pairs and target[2] % 2:
            return
        if samples < 1 or width % aligned or volume % self.vector:
            return
        units = (samples, target[0], target[1], target[2])
        tiles = (div_up(batch, samples), 1, 1, 1)
        box = (samples, height * width, width, volume)
        yield from self._spread(PhasesShape(units, tiles, box, 1, 1.0), target)

    def _spread(self, least: PhasesShape, target: Sequence[int]) -> Iterator[Tiling]:
        """A tile with channels as far apart as suits the banks, if it fits."""
        samples, lines, line, pitch = least.box
        found = []
        for wider in range(pitch, pitch + 64, self.vector):
            shape = replace(least, box=(samples, lines, line, wider))
            found.append(replace(shape, conflicts=self._conflicts(shape)))
        shape = min(found, key=lambda shape: shape.conflicts)
        if self.shared_bytes(shape, target) <= self.gpu.shared_per_block:
            yield shape, iter((shape,))

    def _line_runs(self, batch: int, target: Sequence[int]) -> Iterator[Tiling]:
        """Tiles of lines whose source is a run of each channel."""
        width = self.problem.geometry.output_size(target)[2]
        most = min(target[1], self.tile.rows // target[2])
        if most < 1 or (self.tile.aligned_runs and width % self.vector):
            return
        for lines in sorted({most, *near_cuts(target[1], most)}, reverse=True):
            reach = ((lines - 1) * self.axes[1].stride + self.axes[1].shifts) * width
            units = (1, 1, lines, target[2])
            tiles = (batch, target[0], div_up(target[1], lines), 1)
            if self.tile.aligned_runs:
                least = PhasesShape(units, tiles, (1, 1, width, reach), 1, 1.0)
                yield from self._spread(least, target)
                continue
            words = self.vector == 4
            conflicts = 1.0 if words or self.tile.lane_pairs else 1.6
            shape = PhasesShape(units, tiles, (1, 1, 1, self._run_pitch(reach)), 1, conflicts)
            if self.shared_bytes(shape, target) <= self.gpu.shared_per_block:
                yield shape, iter((shape,))

    def _run_pitch(self, reach: int) -> int:
        """Elements from a channel's run of any length to the next one's."""
        # Before a channel's run, before its first line, behind its last one.
        pitch = round_up(reach + 4 * self.vector, self.vector)
        # Channels of a load in different banks, as far as their alignment lets them.
        if self.vector == 4:
            return pitch + (4 - pitch) % 8
        # Where channels of a second half begin later.
        pitch += 32 if self.tile.lane_pairs else 16
        return pitch + (32 - pitch) % 64

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

    def _box(self, units: Four, tiles: Four) -> Four:
        samples, t0, t1, t2 = units
        d, h, w = self.axes
        lead = box_lead(t2 * w.stride, tiles[3], -w.padding, self.vector)
        width = round_up(lead + (t2 - 1) * w.stride + w.shifts, self.vector)
        slices = ((t0 - 1) * d.stride + d.shifts - 1) // self.met[0] + 1
        lines = ((t1 - 1) * h.stride + h.shifts - 1) // self.met[1] + 1
        return (samples, slices if self.tile.whole_boxes else t0, lines, width)

    def _conflicts(self, shape: PhasesShape) -> float:
        sample, slice_, line, channel = self.pitches(shape)
        d, h, w = self.axes
        slices = d.stride // self.met[0] if self.tile.whole_boxes else 1
        steps = (sample, slice_ * slices, line * (h.stride // self.met[1]), w.stride)
        rows, own = 64 * self.tile.blocks, self.warpgroup_units(shape)
        per_word = self.chunk_channels // 8
        if self.tile.lane_pairs:
            groups = self._pair_groups
            return banks.pair_cycles(rows, own, shape.units, steps, channel, per_word, groups)
        wide = self.pair if per_word == 1 else 1
        return banks.load_cycles(rows, own, shape.units, steps, channel, per_word, wide)

    @once
    def _pair_positions(self) -> list[int]:
        """Positions that a pair of units reads, counted from the first one's."""
        axis = self.axes[2]
        shifts = [k * axis.dilation - axis.padding for k in range(axis.kernel)]
        return sorted({unit * axis.stride + shift for unit in (0, 1) for shift in shifts})

    @once
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

    @once
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
        lanes = ", lanes have pairs" if t.lane_pairs else ""
        lanes += " of runs" if t.aligned_runs else ""
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
        """Of a cycle of shared memory: lines under many sums spill."""
        words, blocks = 4 // self.problem.element_bytes, self.tile.blocks
        cost = _LOAD if words == 1 else _LOAD_16
        if self.tile.runs:
            return cost * _PRESSED[words][blocks]
        return cost

    def shape_cost(self, shape: PhasesShape, batch: int, target: Sequence[int]) -> float:
        if not self.tile.sweep:
            rounds = div_up(shape.count * self.n_tile_phases, self.grid(shape))
            return rounds * self._work_tile_cost(shape, target, 1) + _CALL
        length = shape.segment
        columns = shape.count // shape.tiles[1] * self.n_tile_phases
        rest = target[0] % length
        long = target[0] // length * columns
        item = self._work_tile_cost(shape, target, length)
        left = self._work_tile_cost(shape, target, rest) if rest else 0.0
        scheduled = _scheduled(long, columns if rest else 0, self.grid(shape))
        return max(n * item + m * left for n, m in scheduled) + _CALL

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
        if self.tile.runs:
            # Of each tap, or aligned ones that cover them.
            loads = words * (self.taps if words == 1 else (self.axes[2].shifts + 2) // 2)
        shared = stages * loads * t.blocks * t.consumers * 16 * shape.conflicts
        if t.lane_pairs:
            # Of a pair of units: positions alone or aligned words that cover them, or groups.
            many = len(self._pair_positions)
            if words == 2:
                many = (self._pair_positions[-1] - self._pair_positions[0] + 3) // 2
            shared = stages * words * t.blocks * t.consumers * 8 * shape.conflicts
            shared *= many if self.tile.runs else 1
        wait = _BOX_WAIT if self.tile.by_map else _COPY_WAIT
        byte = _RUN_BYTE if self.tile.runs or t.aligned_runs else _BYTE
        item = boxes * self.chunks * self.box_bytes(shape) * byte
        item += boxes * self.chunks * wait / (t.source_stages - 1) ** 2.5
        item += shared * self._load_cost
        item += stages * (_STAGE + (_SHALLOW if t.weight_stages == 2 else 0.0)) + _WORK_TILE
        output = _LANE_OUTPUT if t.lane_stores else _OUTPUT
        item += t.blocks * t.column_tile / 2 * output * length
        if not t.resident_weights:
            item += self.chunks * taps0 * self.axes[1].kernel * self.stage_bytes * _WEIGHT_BYTE
        item = max(item, 1.05 * products * self.taps * t.blocks * t.consumers)
        if self.tile.by_map:
            rows = boxes * self.chunks * math.prod(shape.box[:3]) * self.chunk_channels
            item = max(item, rows * min(shape.box[3] * p.element_bytes * _ROW_BYTE, _MOST_ROW))
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
