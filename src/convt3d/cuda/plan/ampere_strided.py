"""Plans of ``ampere/strided``: all phases of a tile in one CTA, for layers bound by memory.

The numbers mirror ``ampere/strided/config.cuh``. The cost model adds up what one multiprocessor
spends on matrix steps, shared memory, instructions and memory traffic, and how far these overlap.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.axes import Axis, odd_lines
from convt3d.cuda.plan.search import cheapest
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
)
from convt3d.geometry import Triple
from convt3d.polyphase import axis_phases
from convt3d.precision import Arithmetic

# All products of a step are written out in the kernel's text; beyond this it no longer fits the
# instruction cache and takes long to compile.
_MAX_PRODUCTS = 1300
MAX_ACCUMULATORS = 144
# A fragment's window of positions along W is held in registers.
_MAX_WINDOW = 16
# Products of a sum that are added up in the tensor core before they join it (MathIeee of
# device/arithmetic.cuh).
CHAIN = 3
# Cycles of a multiprocessor for one m16n8 step of a warp, read on an H200.
_STEP_CYCLES = 1.41
# Bytes a cycle that are a multiprocessor's share of memory bandwidth.
_MEMORY_BYTES = 18.0
_L2_BYTES = 28.0
# The same of weights that stages bring: a copy of few bytes a thread, waited for at once.
_WEIGHT_BYTES = 10.0
# Instructions that one run of the staged epilogue takes besides its data; the gradient's as fitted
# before four runs left a warp at once.
_RUN_INSTRUCTIONS = {"forward": 40.0, "grad_input": 120.0}
# Cycles from the bulk copies of a round to the next use of its staging buffer.
_STORE_CYCLES = 1250.0
# Cycles that a tile waits for each stage of 16 bits, whose copies go through registers; other CTAs
# of a multiprocessor hide them. Of gradients those of few channels, to which they were fitted.
_PAIRED_CYCLES = {"forward": 1000.0, "grad_input": 2000.0}
# Measured over modelled times, relative to those of ampere/gather/kernel.cu: what families are
# compared by.
_MISSED = {
    ("forward", Arithmetic.TF32): 1.15,
    ("forward", Arithmetic.IEEE): 1.0,
    ("forward", Arithmetic.F16): 1.2,
    ("forward", Arithmetic.BF16): 1.2,
    ("grad_input", Arithmetic.TF32): 1.25,
    ("grad_input", Arithmetic.IEEE): 0.8,
}
# Gradients of 16 bits whose source can only be loaded value by value: of many, of few channels.
_ODD_LINES = (1.8, 1.3)
_EMPTY_SLOTS = 0.8  # outputs without taps leave faster than counted
_MAX_BASES = 16


@functools.lru_cache(maxsize=1024)
def axes_of(problem: Problem) -> tuple[Axis, Axis, Axis]:
    g = problem.geometry
    axes = []
    for a in range(3):
        kernel, stride, padding, dilation = (
            values[a] for values in (g.kernel_size, g.stride, g.padding, g.dilation)
        )
        if not problem.forward:
            common = math.gcd(stride, dilation)
            stride, padding, dilation = stride // common, 0, dilation // common
        axes.append(Axis(kernel, stride, padding, dilation, problem.forward, 1))
    first, second, third = axes
    return (first, second, third)


@functools.lru_cache(maxsize=1024)
def live_slots(problem: Problem) -> tuple[tuple[bool, ...], ...]:
    """Which slots of each axis have a tap."""
    if not problem.forward:
        return ((True,),) * 3
    g = problem.geometry
    return tuple(
        tuple(
            bool(taps)
            for taps in axis_phases(g.kernel_size[a], g.stride[a], g.padding[a], g.dilation[a])
        )
        for a in range(3)
    )


def _issued(forward: bool, warps: int) -> float:
    """Instructions that a multiprocessor issues in a cycle; read with ncu on an H200."""
    if forward:
        return 3.3 * warps / (warps + 12)
    return 1.2 + 0.7 * min(warps, 16) / 12


@dataclass(frozen=True)
class Tile:
    """The compile-time choices of a strided kernel."""

    warps: int
    fragments_m: int
    fragments_n: int
    stages: int
    depth: int
    resident_weights: bool
    resident: int  # CTAs that share a multiprocessor
    vector: int
    positions: int = 0
    linear_lines: bool = False  # whole lines of a gradient's source as they lie in memory
    weights_first: bool = False  # the first operand of a product, with two slots' channels as rows
    f16x3: bool = (
        False  # both operands split in two float16 parts (F16x3) (ampere/strided/f16x3.cuh)
    )

    @property
    def fragments(self) -> int:
        return self.warps * self.fragments_m


@dataclass(frozen=True)
class Shape:
    """A tile's extents in units, chosen for the extents of a call."""

    units: Triple
    line_rows: int
    line_fragments: int


Units = Sequence[Any]
"""A tile's extents, or arrays of those of several tiles."""


def _units(shapes: Sequence[Shape]) -> Units:
    return [*np.array([shape.units for shape in shapes], dtype=np.int64).T]


@dataclass(frozen=True)
class StridedPlan:
    """A strided kernel for one problem; the shape of its tile follows the extents of each call."""

    problem: Problem
    tile: Tile
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)  # for which tiles are shaped

    # ------------------------------------------------------------ derived sizes

    @functools.cached_property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        return axes_of(self.problem)

    @functools.cached_property
    def live(self) -> tuple[tuple[bool, ...], ...]:
        """Which slots of each axis have a tap."""
        return live_slots(self.problem)

    @property
    def threads(self) -> int:
        return 32 * self.tile.warps

    @property
    def bulk_stores(self) -> bool:
        """Whether staged outputs leave by bulk copies."""
        return self.gpu.capability >= (9, 0)

    @functools.cached_property
    def taps(self) -> int:
        k = self.problem.geometry.kernel_size
        return k[0] * k[1] * k[2]

    @property
    def column_tile(self) -> int:
        return 8 * self.tile.fragments_n

    @functools.cached_property
    def column_tiles(self) -> int:
        return div_up(self.problem.target_channels, self.column_tile)

    @functools.cached_property
    def step_words(self) -> int:
        """Depth of a product: eight channels of 16 bits are products of half the depth."""
        p = self.problem
        few = p.element_bytes == 2 and p.source_channels <= 8 and not p.source_channels_last
        return 4 if few else 8

    @functools.cached_property
    def chunk_channels(self) -> int:
        return self.tile.depth * self.step_words * 4 // self.problem.element_bytes

    @functools.cached_property
    def chunks(self) -> int:
        return div_up(self.problem.source_channels, self.chunk_channels)

    @functools.cached_property
    def n_tiles(self) -> int:
        """CTAs that work on the same tiles, each on its own group and channels."""
        return self.problem.geometry.groups * self.column_tiles

    @property
    def fragment_words(self) -> int:
        if self.tile.f16x3:
            return 128
        if self.tile.weights_first:
            return 256
        return 8 * self.step_words * self.problem.words_per_value

    @functools.cached_property
    def blocks(self) -> int:
        """Blocks of 16 rows of weights of a step (StridedBlocks, HalfBlocks)."""
        if self.tile.f16x3:
            k, shifts = self.problem.geometry.kernel_size, self.axes[2].shifts
            pairs = div_up(self.axes[2].unit_target, 2)
            return k[0] * k[1] * pairs * (shifts + div_up(shifts, 2))
        return sum(self._block_counts)

    @functools.cached_property
    def _block_counts(self) -> tuple[int, int]:
        """Blocks of neighbouring slots along W, and of slots along H for a shift of one of them."""
        g = self.problem.geometry
        slots = [0] * self.axes[2].shifts
        first = self.axes[2].reach[0]
        for r in range(g.stride[2]):
            for k in range(g.kernel_size[2]):
                shift, rest = divmod(r + g.padding[2] - k * g.dilation[2], g.stride[2])
                slots[shift - first] += rest == 0
        splits = len(slots) > CHAIN and g.stride[1] == g.stride[2] == 2 and 2 in slots
        lone = splits * slots.count(1)
        pairs = div_up(g.stride[2], 2)
        full = g.kernel_size[0] * g.kernel_size[1] * pairs * (len(slots) - lone)
        return (full, g.kernel_size[0] * self.axes[1].shifts * lone)

    @functools.cached_property
    def chunk_weight_words(self) -> int:
        count = self.blocks if self.tile.weights_first else self.taps
        words = self.tile.depth * count * self.tile.fragments_n * self.fragment_words
        # What sums of each channel are multiplied by.
        return words + (self.column_tile if self.tile.f16x3 else 0)

    @functools.cached_property
    def slices(self) -> tuple[int, ...]:
        """Gradient by input: taps of axis 0 that a source slice meets, by its residue."""
        axis = self.axes[0]
        counts = [0] * axis.unit_source
        for k in range(axis.kernel):
            counts[k * axis.dilation % axis.unit_source] += 1
        return tuple(counts)

    @functools.cached_property
    def lags(self) -> int:
        """Gradient by input: slices of the result whose sums wait in registers."""
        axis = self.axes[0]
        if self.problem.forward:
            return 1
        return (axis.kernel - 1) * axis.dilation // axis.unit_source + 1

    @functools.cached_property
    def stage_weight_words(self) -> int:
        """Weights that a stage brings where they are not resident."""
        if self.problem.forward:
            return self.chunk_weight_words
        return self.chunk_weight_words // self.axes[0].kernel * max(self.slices)

    @property
    def packed_words(self) -> int:
        return self.n_tiles * self.chunks * self.chunk_weight_words

    @functools.cached_property
    def pipeline_bytes(self) -> int:
        """Shared memory of the stages and of resident weights."""
        return int(self._pipeline_bytes(self.tile.positions))

    def _pipeline_bytes(self, positions: Any) -> Any:
        """The same with boxes of so many positions."""
        words = self.step_words * self.tile.depth
        if self.problem.source_channels_last:
            box = positions * (words + 4)
        else:
            box = (round_up(positions - 8, 32) + 8) * words
        if self.tile.resident_weights:
            words = self.tile.stages * box + self.chunks * self.chunk_weight_words
        else:
            words = self.tile.stages * (box + self.stage_weight_words)
        return 4 * words

    @functools.cached_property
    def room(self) -> int:
        """Shared memory that one CTA may use."""
        shared = self.gpu.shared_per_multiprocessor // self.tile.resident - 1024
        return min(self.gpu.shared_per_block, shared)

    @functools.cached_property
    def pair_source(self) -> int:
        return 2 * self.axes[2].unit_source

    @functools.cached_property
    def lead(self) -> int:
        if self.problem.source_channels_last or self.tile.vector == 1:
            return 0
        origin = (
            self.axes[2].reach[0] if self.problem.forward else -self.problem.geometry.padding[2]
        )
        return origin % self.tile.vector

    @functools.cached_property
    def window(self) -> int:
        """Positions that a lane holds of a row."""
        vector = self.window_vector
        needed = self.lead % vector + self.axes[2].unit_source + self.axes[2].shifts
        return round_up(needed, vector)

    @functools.cached_property
    def window_vector(self) -> int:
        if self.problem.source_channels_last:
            return 1
        return 4 if self.pair_source % 4 == 0 else 2

    @functools.cached_property
    def first_live(self) -> Triple:
        """The first slot of each axis that tiles must cover."""
        if self.problem.target_channels_last:
            return (0, 0, 0)
        a, b, c = (live.index(True) for live in self.live)
        return (a, b, c)

    def needed(self, target: Sequence[int]) -> Triple:
        """Units along each axis that tiles must cover: all that hold a slot with a tap.

        Where the target is contiguous, the last tile of an axis fills what lies beyond.
        """
        a, b, c = (
            max(1, div_up(extent - first, axis.unit_target))
            for extent, first, axis in zip(target, self.first_live, self.axes, strict=True)
        )
        return (a, b, c)

    # ------------------------------------------------------------ tile shape

    def pitch(self, width_units: Any) -> Any:
        """Positions from a box row to the next (BoxShape of ampere/strided/tile.cuh)."""
        width = self.lead + (width_units - 1) * self.axes[2].unit_source + self.axes[2].shifts
        if self.problem.source_channels_last:
            return width
        width = round_up(width, self.pair_source)
        if self.tile.vector > 1:
            vector = self.tile.vector
            width = (width + 2 * (vector - 1)) // vector * vector
        return width

    def box_positions(self, units: Units, target: Sequence[int]) -> Any:
        """Room that a tile's source box needs, with what windows read past its end."""
        size0, size1 = self._box(units)
        slack = self.pair_source + self.window
        box = size0 * size1 * self.pitch(units[2]) + slack
        if not self.tile.linear_lines or target[2] % 2:
            return box
        width = self.problem.geometry.output_size(target)[2]
        margin = round_up(self.axes[2].unit_source + self.axes[2].shifts, 4)
        flat = size0 * size1 * width + margin + 3 + slack  # three of alignment
        return np.where(np.asarray(units[2]) >= self.needed(target)[2], flat, box)

    def _box(self, units: Units) -> tuple[Any, Any]:
        """Extents of a tile's source box along D and H; of the gradient by input one slice."""
        size0, size1 = (
            (n - 1) * axis.unit_source + axis.shifts
            for n, axis in zip(units[:2], self.axes[:2], strict=True)
        )
        return (size0 if self.problem.forward else 1, size1)

    @functools.cached_property
    def direct_vector(self) -> int:
        """Lanes store from registers where rows are a multiple of this; 0: nowhere."""
        if self.problem.target_channels_last:
            return 1
        run = 2 * self.axes[2].unit_target
        vector = 16 // self.problem.element_bytes
        wide = vector if run % vector == 0 else (4 if run % 4 == 0 else 2)
        return wide if all(map(all, self.live)) else 0

    def direct(self, target: Sequence[int]) -> bool:
        """Whether outputs are stored without staging (see ampere/strided/store.cuh)."""
        return self.direct_vector > 0 and target[2] % self.direct_vector == 0

    def staging_bytes(self, units: Units) -> Any:
        """Shared memory that eight channels of a tile's outputs take, where they are staged."""
        bytes_ = self.problem.element_bytes
        vector = 16 // bytes_
        # Rows as wide as the tile's, or a little wider to keep the alignment of the target's.
        pitch = (units[2] + 1) * self.axes[2].unit_target + vector
        rows = (units[1] + 1) * self.axes[1].unit_target - 1
        slices = units[0] if self.problem.forward else 1
        return 8 * slices * (round_up(rows * pitch, vector) + vector) * bytes_

    def staging_buffers(self, units: Units) -> Any:
        """Two where a tile is staged in several rounds and has room for both, else one."""
        rounds = self.tile.fragments_n * (sum(self.live[0]) if self.problem.forward else 1)
        both = self.pipeline_bytes + 2 * self.staging_bytes(units)
        return 1 + (both <= self.room) * (rounds > 1)

    def shared_bytes(self, units: Units, target: Sequence[int]) -> Any:
        """Shared memory of a launch."""
        if self.direct(target):
            return self.pipeline_bytes
        return self.pipeline_bytes + self.staging_buffers(units) * self.staging_bytes(units)

    def fits(self, units: Units, target: Sequence[int], positions: Any = None) -> Any:
        """Whether a tile has room, as here and, at worst alone, with any other target.

        ``positions`` of the largest source box are the tile's own if absent.
        """
        positions = self.tile.positions if positions is None else positions
        pipeline = self._pipeline_bytes(positions)
        staging = 0 if self.direct_vector == 1 else self.staging_bytes(units)
        here = 0 if self.direct(target) else staging
        return (
            (self.box_positions(units, target) <= positions)
            & (pipeline + here <= self.room)
            & (pipeline + staging <= self.gpu.shared_per_block)
        )

    def shapes(self, target: Sequence[int]) -> list[Shape]:
        """Tile shapes that fit this kernel's fragments and shared memory."""
        every = [*self._all_shapes(target)]
        found = [s for s, fits in zip(every, self.fits(_units(every), target), strict=True) if fits]
        if not found:
            # Outputs of this target need staging that the kernel was not chosen with: fewer CTAs
            # share a multiprocessor then.
            alone = replace(self, tile=replace(self.tile, resident=1))
            found = [s for s in every if alone.fits(s.units, target)]
        return found

    def _all_shapes(self, target: Sequence[int]) -> Iterator[Shape]:
        """Tile shapes that fit this kernel's fragments."""
        needed = self.needed(target)
        # Multiples of four keep vector copies and stores of every tile aligned.
        whole = round_up(needed[2], 4)
        widths = {whole} | {16 * n for n in (1, 2, 4, 8) if 16 * n < whole}
        widths |= {round_up(div_up(whole, parts), 4) for parts in (2, 3)}
        # One that always fits (_SMALLEST).
        yield Shape((self._depths(needed[0])[0], 1, min(16, whole)), 1, 1)
        for t2, t0, linear in itertools.product(
            sorted(widths), self._depths(needed[0]), (False, True)
        ):
            if linear and self.tile.linear_lines and t2 >= needed[2] and needed[2] % 2 == 0:
                continue
            fragments = self.tile.fragments // (t0 if self.problem.forward else 1)
            if linear:
                pitch = self.line_pitch(t2)
                rows = (16 * fragments - t2) // pitch + 1 if pitch else 0
                rows = rows if 16 * fragments >= t2 else 0
            else:
                rows = fragments // div_up(t2, 16)
            rows = min(rows, needed[1])
            if rows < 1 + linear:
                continue
            # As many rows as fit, in equal parts; or fewer, for the sake of shared memory.
            equal = div_up(needed[1], div_up(needed[1], rows))
            for t1 in {equal, div_up(equal, 2), div_up(equal, 4)}:
                if linear:
                    yield Shape((t0, t1, t2), t1, div_up((t1 - 1) * pitch + t2, 16))
                else:
                    yield Shape((t0, t1, t2), 1, div_up(t2, 16))

    def _depths(self, needed: int) -> list[int]:
        """Extents of a tile along D; of the gradient by input those that a CTA sweeps along."""
        if self.problem.forward:
            return [n for n in (1, 2, 4) if n <= needed]
        return sorted({div_up(needed, parts) for parts in (1, 2, 3, 4, 6, 8)})

    def line_pitch(self, width_units: int) -> int:
        """Units from a row to the next where a line runs through rows; 0 if it cannot."""
        positions = self.pitch(width_units) * self.axes[1].unit_source
        pitch, rest = divmod(positions, self.axes[2].unit_source)
        return 0 if rest or pitch % 2 or pitch < width_units else pitch

    def shape(self, batch: int, target: Sequence[int]) -> Shape:
        """The cheapest tile shape for destination extents."""
        found = self.shapes(target)
        return found[int(np.argmin(self._costs(_units(found), batch, target)))]

    # ------------------------------------------------------------ launches

    @functools.cached_property
    def macros(self) -> tuple[tuple[str, str], ...]:
        p, t = self.problem, self.tile
        types = dict(p.type_macros)
        if t.f16x3:
            types["CONVT3D_MATH"] = "MathF16x3"
        elif self.step_words == 4:
            types["CONVT3D_MATH"] = f"Math16K8<{types['CONVT3D_TYPE']}>"
        return (
            tuple(types.items())
            + macros(
                "CONVT3D_",
                forward=p.forward,
                bias=p.bias,
                source_channels_last=p.source_channels_last,
                target_channels_last=p.target_channels_last,
                groups=p.geometry.groups,
                source_channels=p.source_channels,
                target_channels=p.target_channels,
                warps=t.warps,
                fragments_m=t.fragments_m,
                fragments_n=t.fragments_n,
                stages=t.stages,
                depth=t.depth,
                resident_weights=t.resident_weights,
                resident=t.resident,
                vector=t.vector,
                weights_first=t.weights_first,
                linear_lines=t.linear_lines,
                positions=t.positions,
                bulk_stores=self.bulk_stores,
                ring=0,
                ring_width=0,
                ring_slices=0,
                store_warps=0,
                splitters=0,
            )
            + geometry_macros(p.geometry)
        )

    @property
    def kernel(self) -> KernelSpec:
        if self.problem.forward:
            return KernelSpec("ampere/strided/forward.cu", "convt3d_ampere_strided", self.macros)
        return KernelSpec("ampere/strided/dgrad.cu", "convt3d_ampere_strided_dgrad", self.macros)

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        output_size = self.problem.geometry.output_size(input_size)
        source, target = tuple(input_size), output_size
        if not self.problem.forward:
            source, target = target, source
        shape = self.shape(batch, target)
        tiles = [div_up(n, t) for n, t in zip(self.needed(target), shape.units, strict=True)]
        count = tiles[0] * tiles[1] * tiles[2] * batch
        numbers = (
            *source, source[1] * source[2], source[2],
            *target, target[1] * target[2], target[2],
            *shape.units, *tiles, shape.line_rows, shape.line_fragments, count,
            int(self.staging_buffers(shape.units)),
        )  # fmt: skip
        product = Launch(
            self.kernel,
            self.workers(count) * self.n_tiles,
            self.threads,
            self.shared_bytes(shape.units, target),
            ("source", "packed", "bias", "target", *map(np.int32, numbers)),
            dependent=True,
        )
        return Schedule((self.pack(self.macros), product), {"packed": 4 * self.packed_words})

    def pack(self, macros_: tuple[tuple[str, str], ...]) -> Launch:
        """The launch that packs the weights, for a product with these macros."""
        words = 4 if self.tile.weights_first else self.fragment_words // 32
        blocks = min(div_up(self.packed_words // words, 256), 4096)
        if self.tile.f16x3:
            # CTAs of eight channels each.
            blocks = round_up(blocks, self.n_tiles * self.tile.fragments_n)
        return Launch(
            KernelSpec("ampere/strided/pack.cu", "convt3d_ampere_strided_pack", macros_),
            blocks,
            256,
            0,
            ("weight", "packed", *WEIGHT_STRIDES),
        )

    def ring_macros(
        self, stages: int, width: int, slices: int, store_warps: int, splitters: int = 0
    ) -> tuple[tuple[str, str], ...]:
        """Macros of a kernel with the same products whose source passes through a ring."""
        own = {
            "CONVT3D_RING": stages,
            "CONVT3D_RING_WIDTH": width,
            "CONVT3D_RING_SLICES": slices,
            "CONVT3D_STORE_WARPS": store_warps,
            "CONVT3D_SPLITTERS": splitters,
        }
        return tuple((name, str(own.get(name, value))) for name, value in self.macros)

    @functools.cached_property
    def most_workers(self) -> int:
        return max(1, self.tile.resident * self.gpu.multiprocessors // self.n_tiles)

    def workers(self, count: int) -> int:
        """CTAs of an N tile: all of them resident, each with as many tiles as any other."""
        return div_up(count, div_up(count, self.most_workers))

    def busy(self, count: int) -> float:
        """The share of multiprocessors that an N tile's tiles keep busy, one CTA on each."""
        turns = div_up(count, self.workers(count))
        return count * self.n_tiles / (turns * self.gpu.multiprocessors)

    def describe(self) -> dict[str, str]:
        t = self.tile
        return {
            "kernel": (
                "strided (all phases of a tile in one CTA), mma.sync"
                if self.problem.forward
                else "strided gradient (a sweep along D), mma.sync"
            ),
            "tile": f"{16 * t.fragments} M rows x {self.column_tile} columns",
            "unit": "x".join(str(a.unit_target) for a in self.axes) + " outputs",
            "warps": f"{t.warps}, fragments {t.fragments_m} x {t.fragments_n}"
            + (", weights first" if t.weights_first else "")
            + (", lines as they lie in memory" if t.linear_lines else ""),
            "pipeline": f"{t.stages} stages of {self.chunk_channels} channels, weights "
            + ("resident" if t.resident_weights else "streamed")
            + f", {t.resident} CTAs a multiprocessor",
            "shared memory": f"{self.pipeline_bytes} bytes and staging",
        }

    # ------------------------------------------------------------ cost

    @functools.cached_property
    def live_slots(self) -> int:
        return sum(self.live[0]) * sum(self.live[1]) * sum(self.live[2])

    def accumulators(self) -> int:
        """Live accumulator registers of a lane; slots without a tap cost none."""
        return self.lags * self.live_slots * self.tile.fragments_m * self.tile.fragments_n * 4

    def registers(self) -> int:
        """Estimated registers of a thread: accumulators, window, operands, addresses."""
        t = self.tile
        wide = self.problem.words_per_value
        operands = t.fragments_m * (2 * self.window + 4 * wide) + 2 * wide * t.fragments_n
        if t.weights_first:
            # Split values of a window, a block of weights, sums of a chain.
            operands = t.fragments_m * 4 * (self.axes[2].shifts + 1 + 2 * t.fragments_n)
            operands += 8 * t.fragments_n
        if t.f16x3:
            # A window, high halves, sums of a chain; blocks of weights.
            pairs = round_up(self.axes[2].shifts + 2, 2)
            operands = t.fragments_m * (4 * pairs + 8 * t.fragments_n) + 16
        return self.accumulators() + operands + 44

    def most_resident(self, registers: int) -> int:
        """CTAs of so many registers a thread that a multiprocessor holds, six at most."""
        return max(1, min(6, 65536 // (self.threads * min(255, registers))))

    @functools.cached_property
    def _windows(self) -> int:
        """Shifts along D and H that have a tap: windows that a step loads of each fragment."""
        if not self.problem.forward:
            return self.axes[1].kernel * sum(map(bool, self.slices))
        counts = []
        for axis in self.axes[:2]:
            found = {
                (r + axis.padding - k * axis.dilation) // axis.stride
                for r in range(axis.stride)
                for k in range(axis.kernel)
                if (r + axis.padding - k * axis.dilation) % axis.stride == 0
            }
            counts.append(len(found))
        return counts[0] * counts[1]

    @functools.cached_property
    def _step(self) -> tuple[float, float, float]:
        """Of one step of one CTA: cycles of the tensor cores, of shared memory; instructions."""
        t = self.tile
        if t.weights_first:
            return self._weights_first_step
        ieee = self.problem.arithmetic is Arithmetic.IEEE
        products = t.warps * self.taps * t.fragments_m * t.fragments_n
        windows = t.warps * self._windows * t.fragments_m
        weights = t.warps * self.taps * t.fragments_n
        matrix = products * _STEP_CYCLES * (3.0 if ieee else 1.0)
        f16x3 = self.step_words / 4
        shared = f16x3 * (windows * self.window + weights * (2 if ieee else 1))
        # Of every value of every tap's fragment: splitting it, rounding it, or moving it to where a
        # fragment's registers lie side by side.
        prepared = 2.0 * f16x3 * self.axes[2].shifts
        if ieee:
            prepared *= 3
        elif not self.problem.forward:
            # As it was fitted to measured times, though rounding is now one instruction.
            rounded = self.problem.arithmetic is Arithmetic.TF32
            prepared = 8.0 * (self.axes[2].unit_source + self.axes[2].shifts) if rounded else 0.0
        # IEEE: three products of a chain, and a share of its sum's way out of it.
        instructions = products * (5.0 if ieee else 1.0) + weights
        instructions += windows * (f16x3 * self.window / self.window_vector + prepared)
        return (matrix, shared, 1.15 * instructions)

    @functools.cached_property
    def _weights_first_step(self) -> tuple[float, float, float]:
        """The same where weights come first."""
        t = self.tile
        fragments = t.warps * t.fragments_m
        blocks = t.warps * self.blocks * t.fragments_n
        windows = fragments * self._windows
        matrix = 2 * t.fragments_m * blocks * 3.0 * _STEP_CYCLES
        shared = 8.0 * blocks + 2.0 * windows * self.window
        values = 2.0 * (self.axes[2].shifts + 1)
        full, lone = self._block_counts
        shifts = self.axes[2].shifts - (lone > 0)
        chains = t.warps * t.fragments_n * (full / shifts * div_up(shifts, CHAIN) + lone)
        instructions = 2 * blocks + 2 * t.fragments_m * (3 * blocks + 4 * chains)
        instructions += windows * (3 * values + 2 * self.window / self.window_vector)
        return (matrix, shared, 1.15 * instructions)

    def _costs(self, units: Units, batch: int, target: Sequence[int]) -> NDArray[np.float64]:
        """Estimated cycles of one call in tiles of each of these shapes."""
        t, axes = self.tile, self.axes
        bytes_ = self.problem.element_bytes
        steps = self.chunks * t.depth
        matrix, shared, instructions = (steps * x for x in self._step)
        needed = self.needed(target)
        size0, size1 = self._box(units)
        streamed = 0 if t.resident_weights else self.chunks * self.chunk_weight_words
        stages, slices = self.chunks, size0
        if not self.problem.forward:
            # Slices of the sweep, the few at its end included.
            swept = units[0] + (self.lags - 1) / 2
            matrix, shared, instructions = (x * swept for x in (matrix, shared, instructions))
            live = sum(map(bool, self.slices)) / axes[0].unit_source
            slices = live * ((units[0] - 1) * axes[0].unit_source + axes[0].shifts)
            stages = self.chunks * slices
            streamed = streamed * swept
        words = slices * size1 * self.pitch(units[2]) * self.step_words * steps
        wide: Any = t.vector if bytes_ == 4 or self.problem.source_channels_last else 1
        if not self.problem.forward and not self.problem.source_channels_last:
            # Strided layers often have odd output rows, which only move element by element.
            width = self.problem.geometry.output_size(target)[2]
            wide = wide if width % t.vector == 0 else 1
        whole = (units[2] >= needed[2]) & (target[2] % 2 == 0)
        if t.linear_lines:
            wide = np.where(whole, 4.0, 1.0)
        fill = words / 32 / wide * 4 + stages * t.warps * 60
        fill = fill + streamed / 128 * 4
        volume = units[0] * units[1] * units[2]
        unit_targets = axes[0].unit_target * axes[1].unit_target * axes[2].unit_target
        outputs = volume * unit_targets * self.column_tile
        if self.direct(target):
            store = outputs / 32
        else:
            shared = shared + outputs / 32 * 2
            # Each run of a channel by one warp.
            run = np.where(
                units[2] < needed[2],
                units[2] * axes[2].unit_target,
                unit_targets * volume / (axes[0].unit_target * units[0]),
            )
            store = outputs / 32 * 2.0 + outputs / run * _RUN_INSTRUCTIONS[self.problem.operation]
        instructions = instructions + fill + store
        # Outputs go to memory, sources and weights come out of L2.
        traffic = outputs * bytes_ / _MEMORY_BYTES
        traffic = traffic + words * 4 / (_L2_BYTES if self.problem.forward else _MEMORY_BYTES)
        traffic = traffic + streamed * 4 / _WEIGHT_BYTES
        issue = instructions / _issued(self.problem.forward, t.resident * t.warps)
        if self.problem.arithmetic is Arithmetic.IEEE:
            issue = issue / 1.15  # splitting operands is parallel work
        longest = np.maximum(np.maximum(matrix, shared), np.maximum(issue, traffic))
        tile = longest + 0.15 * (matrix + shared + issue + traffic - longest)
        # A tile alone is a chain of latencies.
        chain = 1000.0 * stages / (t.stages - 1) + 1500.0
        exposed = 0.0
        if self.problem.forward and not self.direct(target):
            rounds = t.fragments_n * sum(self.live[0])
            exposed = _STORE_CYCLES * rounds * (self.staging_buffers(units) == 1)
        count = batch
        for n, extent in zip(needed, units, strict=True):
            count = count * div_up(n, extent)
        turns = div_up(count, self.most_workers)
        workers = np.minimum(count, self.most_workers) * self.n_tiles
        sharing = np.clip(workers / self.gpu.multiprocessors, 1.0, t.resident)
        missed = _MISSED.get((self.problem.operation, self.problem.arithmetic), 1.3)
        apart = not self.problem.source_channels_last
        if self.problem.element_bytes == 2 and apart and odd_lines(self.problem):
            missed *= _ODD_LINES[self.step_words == 4]
        slots = axes[0].unit_target * axes[1].unit_target * axes[2].unit_target
        if self.problem.forward and self.live_slots < slots:
            missed *= _EMPTY_SLOTS
        paired = bytes_ == 2 and not self.problem.source_channels_last
        paired = paired and (self.problem.forward or self.step_words == 4)
        waits = _PAIRED_CYCLES[self.problem.operation] * stages if paired else 0.0
        tile = tile * self._measured_factor(target)
        if t.linear_lines:
            # Cut lines, and those whose units have no neighbour, gain nothing.
            tile = tile * np.where(whole, 0.92, 1.2)
        alone = np.maximum(tile + exposed + waits, chain)
        turn = np.maximum(tile * sharing + waits / sharing, alone)
        costs: NDArray[np.float64] = missed * turns * turn + 4000.0
        return costs

    def _measured_factor(self, target: Sequence[int]) -> float:
        """What is measured besides, as a factor of a tile's time; causes are known in part."""
        p, t = self.problem, self.tile
        ieee = p.arithmetic is Arithmetic.IEEE
        if p.source_channels_last:
            return 1.0
        if not p.forward:
            # Pairs of 16-bit channels pass through registers: more warps hide it.
            if self.step_words == 4:
                return 1.5 if t.fragments_m == 2 else 1.0
            # Each fragment loads its weights.
            return 1.2 if ieee and t.fragments_m == 1 else 1.0
        if p.element_bytes == 2:
            # Each fragment loads the weights of all taps, step after step.
            alone = t.fragments_m == 1 and t.fragments_n <= 2 and self.chunks * t.depth > 1
            return 1.22 if alone else 1.0
        if t.vector == 1:
            return 1.2 if ieee or t.fragments_m == 1 else 1.0
        if t.weights_first:
            return 1.08 if t.fragments_m == 2 else 1.2
        # A tile of one short stage has little else to do.
        short = t.fragments_m == 2 and self.chunks == 1 and not self.direct(target)
        return (1.12 if ieee else 1.07) if short else 1.0


def refusal(problem: Problem) -> str | None:
    """Why ampere/strided/forward.cu cannot take a problem, or None."""
    g = problem.geometry
    if problem.operation not in ("forward", "grad_input"):
        return "the strided kernel computes outputs and gradients by input"
    if max(g.stride) == 1:
        return "the layer has no stride"
    if problem.forward and g.kernel_size == g.stride and g.padding == (0, 0, 0):
        return "every phase has one tap: the layer is one product, which ampere/gather computes"
    taps = g.kernel_size[0] * g.kernel_size[1] * g.kernel_size[2]
    if taps * (3 if problem.arithmetic is Arithmetic.IEEE else 1) > _MAX_PRODUCTS:
        return f"{taps} taps are too many to be written out"
    plan = StridedPlan(problem, Tile(4, 1, 1, 2, 1, False, 1, 1), Gpu())
    if plan.window > _MAX_WINDOW:
        return f"a window of {plan.window} positions along W does not fit in registers"
    if plan.accumulators() > MAX_ACCUMULATORS:
        return f"{plan.live_slots} phases do not fit in registers"
    return None


def _lines_may_be_linear(problem: Problem) -> bool:
    """Whether lines of a gradient's source can be copied as they lie (ampere/strided/lines.cuh)."""
    g = problem.geometry
    return (
        odd_lines(problem)
        and problem.element_bytes == 4
        and not problem.source_channels_last
        and g.padding[2] <= 4
        and problem.source_channels % 16 in (0, 8)
        and all(math.gcd(g.stride[a], g.dilation[a]) == 1 for a in (1, 2))
    )


def _vectors(problem: Problem) -> tuple[int, ...]:
    bytes_ = problem.element_bytes
    if problem.source_channels_last:
        for vector in (16 // bytes_, 8 // bytes_, 4 // bytes_):
            if problem.source_channels % vector == 0:
                return (vector,)
        return (1,)
    g = problem.geometry
    if not problem.forward and math.gcd(g.stride[2], g.dilation[2]) > 1:
        return (1,)
    return ((4, 1, 0) if _lines_may_be_linear(problem) else (4, 1)) if bytes_ == 4 else (4,)


def weights_may_come_first(problem: Problem) -> bool:
    """Whether weights can be the first operand (StridedConfig)."""
    return (
        problem.forward
        and problem.arithmetic is Arithmetic.IEEE
        and not problem.source_channels_last
        and not problem.target_channels_last
        and problem.geometry.stride[2] % 2 == 0
    )


def _bases(problem: Problem, gpu: Gpu) -> list[StridedPlan]:
    """Warps and fragments, those first whose products need the least besides."""
    ieee = problem.arithmetic is Arithmetic.IEEE
    columns = div_up(problem.target_channels, 8)
    found = []
    orders = [False, True] if weights_may_come_first(problem) else [False]
    many = (12, 16) if problem.forward else ()
    for first, warps, m, n in itertools.product(
        orders, (4, 6, 8, *many), (1, 2), (1, 2, 3, 4, 6, 8)
    ):
        waste = round_up(columns, n) / columns
        if n > columns or waste > 1.25:
            continue
        for vector in _vectors(problem):
            tile = Tile(warps, m, n, 2, 1, True, 1, vector, weights_first=first)
            if vector == 0:
                tile = replace(tile, vector=1, linear_lines=True)
            plan = StridedPlan(problem, tile, gpu)
            available = 65536 // plan.threads + (16 if m == 1 or first else 0)
            if plan.accumulators() > MAX_ACCUMULATORS or plan.registers() > min(240, available):
                continue
            if plan.taps * m * n * (3 if ieee else 1) > _MAX_PRODUCTS:
                continue
            matrix, shared, instructions = plan._step
            found.append((waste * (matrix + shared + instructions / 3) / (warps * m * n), plan))
    found.sort(key=lambda item: item[0])
    kept = []
    for first in orders:
        own = [(cost, plan) for cost, plan in found if plan.tile.weights_first == first]
        kept += [plan for cost, plan in own[:_MAX_BASES] if cost < 3 * own[0][0]]
    return kept


def _depths(problem: Problem) -> list[int]:
    """Matrix steps of a stage: no more than there are."""
    channels = 32 // problem.element_bytes
    return [n for n in (1, 2) if n * channels < problem.source_channels + channels]


def _pipelines(
    base: StridedPlan, shapes: Sequence[Shape], batch: int, target: Sequence[int]
) -> Iterator[tuple[float, StridedPlan]]:
    """Pipelines of a base with their costs."""
    units = _units(shapes)
    order = np.argsort(base._costs(units, batch, target), kind="stable")
    cheapest_units = [column[order[:_MAX_SHAPES]] for column in units]
    for stages, depth, weights in itertools.product((2, 3), _depths(base.problem), (True, False)):
        tile = replace(base.tile, stages=stages, depth=depth, resident_weights=weights)
        plan = _with_positions(replace(base, tile=tile), cheapest_units, target)
        if plan is not None:
            fitting = [column[plan.fits(units, target)] for column in units]
            yield float(plan._costs(fitting, batch, target).min()), plan


def _bound(base: StridedPlan, shapes: Sequence[Shape], batch: int, target: Sequence[int]) -> float:
    """Cycles that no pipeline of a base undercuts: those of the deepest, with room for all."""
    units = _units(shapes)
    plans = [
        replace(base, tile=replace(base.tile, stages=3, depth=depth, resident_weights=True))
        for depth in _depths(base.problem)
    ]
    return min(float(plan._costs(units, batch, target).min()) for plan in plans)


def _with_positions(plan: StridedPlan, units: Units, target: Sequence[int]) -> StridedPlan | None:
    """The plan with as many positions as the first of these shapes that fits needs, or more, so
    that rows of other widths can stay whole."""

    def room_for(units: Units) -> Any:
        return round_up(plan.box_positions(units, target) - 8, 32) + 8

    positions = np.maximum(room_for(_SMALLEST), room_for(units))
    fitting = plan.fits(units, target, positions) & plan.fits(_SMALLEST, target, positions)
    if not fitting.any():
        return None
    first = int(np.argmax(fitting))
    shape, chosen = [int(n[first]) for n in units], int(positions[first])
    for width in (32, 64, 128):
        rows = 16 * plan.tile.fragments // width
        wider = room_for((1, rows, width))
        roomier = rows > 0 and wider > chosen
        if roomier and all(plan.fits(u, target, wider) for u in (shape, _SMALLEST)):
            chosen = wider
    return replace(plan, tile=replace(plan.tile, positions=int(chosen)))


# A tile that every kernel must have room for, so that it serves all extents.
_SMALLEST = (1, 1, 16)
_MAX_SHAPES = 24


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, StridedPlan]]:
    """Candidates for these input extents with their costs, cheapest first.

    ``below``: see :func:`~convt3d.cuda.plan.search.cheapest`.
    """
    if refusal(problem) is not None:
        return []
    _, size = problem.extents(input_size)
    # Shapes depend on the number of fragments only.
    shapes: dict[int, list[Shape]] = {}
    bases = []
    for base in _bases(problem, gpu):
        most = base.most_resident(base.registers() + 8)
        fragments = base.tile.fragments
        if fragments not in shapes:
            shapes[fragments] = [*dict.fromkeys(base._all_shapes(size))]
        residents = {most, max(1, most // 2)}
        if problem.forward and (base.tile.fragments_m == 1 or base.tile.weights_first):
            # With fewer registers than estimated, addresses are spilled, outside of the products.
            residents = {most, base.most_resident(base.registers() - 16)}
        for resident in sorted(residents):
            plan = replace(base, tile=replace(base.tile, resident=resident))
            bases.append((_bound(plan, shapes[fragments], batch, size), plan))

    def price(base: StridedPlan) -> Iterator[tuple[float, StridedPlan]]:
        return _pipelines(base, shapes[base.tile.fragments], batch, size)

    found = cheapest(bases, price, below)
    # Costs are fitted to contiguous layers: channels_last ones took 1.3 to 7 times as long.
    scale = 2.0 if problem.forward and problem.target_channels_last else 1.0
    # Bases that differ only in what pipelines replace give the same plan twice.
    return [(scale * cost, plan) for plan, cost in {plan: cost for cost, plan in found}.items()]


@functools.lru_cache(maxsize=64)
def least_cost(problem: Problem, batch: int, input_size: tuple[int, ...], gpu: Gpu) -> float | None:
    """The cost of the cheapest plan, None where there is none."""
    found = ranked(problem, batch, input_size, gpu, math.inf)
    return found[0][0] if found else None
