"""Plans of ``ampere/wgrad/kernel.cu``: taps and channels of a CTA, position tiles, splits."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan import ampere_wgrad_cycles as cycles
from convt3d.cuda.plan.launches import with_strides
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.search import cheapest
from convt3d.cuda.plan.split_k import WORKSPACE_BYTES, in_two_passes, most_splits
from convt3d.cuda.schedule import (
    Gpu,
    Launch,
    Problem,
    Schedule,
    div_up,
    geometry_macros,
    macros,
    not_taken,
    problem_macros,
    round_up,
    widest_vector,
)
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic

_FEW_CHANNELS = 5  # of the gradient, up to which columns are its channels at all taps
_PAIRED_VECTOR = 8  # positions of a copy of 16 bytes
_MAX_ACCUMULATORS = 128
_MAX_ACCUMULATORS_IEEE = 80
_MOST_TAPS, _MOST_COLUMNS = 28, 512  # of a CTA
_WARPS = (
    (1, 1, 4), (1, 2, 2), (2, 1, 2), (1, 4, 1), (2, 2, 1), (4, 1, 1),
    (1, 3, 1), (1, 6, 1), (1, 8, 1), (2, 4, 1), (1, 1, 8), (1, 2, 4),
)  # fmt: skip


@dataclass(frozen=True)
class WgradPlan:
    """A gradient-by-weight kernel; tile shape and splits follow the extents of each call."""

    problem: Problem
    taps: Triple
    warps: Triple  # over x channels, gradient channels, positions
    fragments: tuple[int, int]
    resident: int  # CTAs that share a multiprocessor
    positions: tuple[int, int]  # of the largest boxes of x and of the gradient
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)  # for which tiles are shaped
    pairs: bool = False  # copies 16-bit rows of W as they lie, where no tap shifts them

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

    @once
    def channel_tiles(self) -> tuple[int, int]:
        warps_m, warps_n, _ = self.warps
        fm, fn = self.fragments
        return cycles.channel_tiles(self.problem, self.taps_in_columns, warps_m * fm, warps_n * fn)

    @property
    def taps_in_columns(self) -> bool:
        return _taps_in_columns(self.problem)

    @property
    def taps_apart(self) -> int:
        """Taps with products of their own: all, unless they are columns of one."""
        return 1 if self.taps_in_columns else math.prod(self.taps)

    @once
    def variants(self) -> int:
        return int(cycles.variants(self.problem, self.taps, *self.channel_tiles))

    @once
    def registers(self) -> int:
        """Accumulators of a thread."""
        return self.taps_apart * self.fragments[0] * self.fragments[1] * 4

    @property
    def variant_elements(self) -> int:
        return self.registers * 32 * self.warps[0] * self.warps[1]

    def _channels_last(self, gradient: bool) -> bool:
        """Whether a tensor is copied as channels_last; one channel lies alike in both layouts."""
        p = self.problem
        if gradient:
            return p.target_channels_last and p.geometry.out_channels > 1
        return p.source_channels_last and p.geometry.in_channels > 1

    def paired(self, gradient: bool) -> bool:
        """Whether rows of a tensor are copied as they lie: words are pairs of positions."""
        g = self.problem.geometry
        if not (self.pairs and self.half) or self._channels_last(gradient):
            return False
        unshifted = math.prod(g.kernel_size) == 1 and g.stride[2] == 1 and g.padding[2] == 0
        return not gradient or (unshifted and not self.taps_in_columns)

    def _unit(self, axis: int, gradient: bool) -> int:
        """Box positions from one position of x to the next."""
        return self.problem.geometry.stride[axis] if gradient and self.taps[axis] > 1 else 1

    def vector(self, gradient: bool) -> int:
        """Elements that one copy of the fill moves, where addresses allow."""
        p, bytes_ = self.problem, self.problem.element_bytes
        channels = p.target_channels if gradient else p.source_channels
        if self._channels_last(gradient):
            return widest_vector(channels, bytes_)
        if self.paired(gradient):
            return _PAIRED_VECTOR
        stride = p.geometry.stride[2] if gradient else 1
        if stride > 1 and (bytes_ == 4 or self.taps[2] == 1):
            return 1
        return 4

    def position_words(self, gradient: bool) -> float:
        """Words of shared memory for one position of a box."""
        if self.paired(gradient):
            return self.channel_tiles[gradient] / 2
        words = div_up(self.channel_tiles[gradient], 2 if self.half else 1)
        if not (self._channels_last(gradient) or self.half):
            return words
        if gradient and self.taps_in_columns:
            return words
        if self.half:
            return words if words // 4 % 2 else words + 4
        return round_up(words - 8, 32) + 8

    def box_words(self, gradient: bool) -> int:
        positions = self.positions[gradient]
        if self.paired(gradient):
            return (round_up(positions // 2 - 4, 32) + 4) * self.channel_tiles[gradient]
        words = int(self.position_words(gradient))
        if self._channels_last(gradient) or self.half:
            return positions * words
        return (round_up(positions - 4, 32) + 4) * words

    @once
    def shared_bytes(self) -> int:
        stage = self.box_words(False) + self.box_words(True)
        staged = self.variant_elements if self.warps[2] > 1 else 0
        return 4 * max(2 * stage, staged)

    # ------------------------------------------------------------ launches

    @once
    def macros(self) -> tuple[tuple[str, str], ...]:
        p = self.problem
        own: dict[str, object] = {
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
        own |= {f"taps{i}": n for i, n in enumerate(self.taps)}
        shared = p.type_macros + geometry_macros(p.geometry) + problem_macros(p)
        return shared + macros("CONVT3D_", **own)

    @property
    def _most_splits(self) -> int:
        """CTAs that may share the positions: as many as fill the GPU once, within the workspace."""
        wanted = max(1, self.resident * self.gpu.multiprocessors // self.variants)
        return min(wanted, most_splits(self.variants * self.variant_elements))

    def splits(self, tiles: int) -> int:
        """CTAs that share the positions, all with as many tiles as any other."""
        rounds = div_up(tiles, min(self._most_splits, tiles))
        return div_up(tiles, rounds)

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        gradient_size = self.problem.geometry.output_size(input_size)
        if not self._takes(input_size[2]):
            raise not_taken(self, input_size)
        tile = self.tile_shape(batch, input_size)
        tiles = [div_up(n, t) for n, t in zip(input_size, tile, strict=True)]
        splits = self.splits(tiles[0] * tiles[1] * tiles[2] * batch)
        numbers = (
            *with_strides(input_size),
            *with_strides(gradient_size),
            *tile,
            *tiles,
            batch,
            splits,
        )
        file = "ampere/wgrad/kernel.cu"
        product = Launch(
            KernelSpec(file, "convt3d_ampere_wgrad", self.macros),
            self.variants * splits,
            self.threads,
            self.shared_bytes,
            ("source", "target", "partial", *map(np.int32, numbers)),
        )
        elements = self.variants * self.variant_elements
        reduce = KernelSpec(file, "convt3d_reduce", self.macros)
        names = ("source", "target")
        aligned = tuple(name for i, name in enumerate(names) if self.paired(bool(i)))
        return in_two_passes(product, reduce, elements, splits, aligned=aligned)

    def _takes(self, width: int) -> bool:
        """Whether rows of so many positions can be copied so."""
        return not self.pairs or width % _PAIRED_VECTOR == 0

    def describe(self) -> dict[str, str]:
        m, n = self.channel_tiles
        columns = " (taps in columns)" if self.taps_in_columns else ""
        return {
            "kernel": "gradient by weight, mma.sync, split and reduced in order",
            "tile": "x".join(map(str, self.taps)) + f" taps x {m} x {n} channels{columns}",
            "warps": f"{self.warps[0]} x {self.warps[1]} x {self.warps[2]} (positions), "
            f"fragments {self.fragments[0]} x {self.fragments[1]}",
            "pipeline": f"2 stages, {self.resident} CTAs a multiprocessor",
            "variants": f"{self.variants}",
            "shared memory": f"{self.shared_bytes} bytes",
        }

    # ------------------------------------------------------------ tile shape and cost

    def tile_shape(self, batch: int, input_size: Sequence[int]) -> Triple:
        """The cheapest tile of positions for these extents."""
        shapes = _shapes(self.depth, (input_size[0], input_size[1], input_size[2]))
        boxes = self.boxes(shapes)
        costs = self._costs(batch, input_size, shapes, boxes)
        costs = np.where(self._fitting(boxes), costs, np.inf)
        a, b, c = (int(n) for n in shapes[int(np.argmin(costs))])
        return (a, b, c)

    def boxes(self, shapes: NDArray[np.int64]) -> Boxes:
        """The boxes of tile shapes; they depend on problem and taps only."""
        (x0, x1, x2), (g0, g1, g2) = self._box(shapes, False), self._box(shapes, True)
        return Boxes((x0 * x1, g0 * g1), (x2, g2))

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

    def _fitting(self, boxes: Boxes) -> NDArray[np.bool_]:
        """Which tile shapes have boxes that are not too large."""
        x, gradient = boxes.positions
        return (x <= self.positions[0]) & (gradient <= self.positions[1])

    @once
    def _step_cycles(self) -> float:
        """Cycles of one matrix step of all warps in all taps."""
        warps = self.warps[0] * self.warps[1]
        taps, columns = self.taps_apart, self.taps_in_columns
        resident = self.resident * self.threads // 32
        found = cycles.step_cycles(self.problem, taps, columns, warps, *self.fragments, resident)
        return float(found)

    def fill(self, gradient: bool, channels: cycles.Numbers, width: int) -> cycles.Fill:
        """How boxes of so many channels are filled from a tensor of this extent along W."""
        bytes_, vector = self.problem.element_bytes, self.vector(gradient)
        words = div_up(channels, 4 // bytes_)
        if self._channels_last(gradient):
            kind = cycles.SINGLES if vector * bytes_ < 4 else cycles.VECTORS
            pieces = div_up(channels, max(vector, 4 // bytes_))
            return cycles.Fill(kind, 1, pieces, 1, words, 1)
        if self.paired(gradient):
            return cycles.Fill(cycles.WORDS, vector, 1, channels, words, 1)
        vector = vector if width % vector == 0 else 1
        kind = cycles.VALUES if self.half else cycles.WORDS
        return cycles.Fill(kind, vector, 1, words, words, words)

    @property
    def density(self) -> float:
        """Positions of the gradient's box, relative to those of x."""
        reaches = (
            (t - 1) * d for t, d in zip(self.taps, self.problem.geometry.dilation, strict=True)
        )
        return math.prod(min(self._unit(a, True), reach + 1) for a, reach in enumerate(reaches))

    def _costs(
        self,
        batch: int,
        input_size: Sequence[int],
        shapes: NDArray[np.int64],
        boxes: Boxes,
    ) -> NDArray[np.float64]:
        """Estimated cycles of one call for each tile shape; inf where one cannot be."""
        steps = shapes.prod(axis=1) // self.depth
        every = busiest = 0.0
        for gradient, extents in enumerate(self.problem.extents(input_size)):
            fill = self.fill(bool(gradient), self.channel_tiles[gradient], extents[2])
            # Vectors of 16-bit rows begin before a box and end behind it.
            before = fill.vector - 1 if fill.kind is cycles.VALUES else 0
            widths = boxes.widths[gradient] + before
            of_all, of_one = fill.cycles(boxes.rows[gradient], widths, self.threads)
            every, busiest = every + of_all, busiest + of_one
        tile = cycles.round_cycles(steps * self._step_cycles, every, busiest, self.resident)
        tiles = batch * np.prod(-(-np.array(input_size) // shapes), axis=1)
        rounds = -(-tiles // np.minimum(self._most_splits, tiles))
        splits = -(-tiles // rounds)
        waves = np.ceil(self.variants * splits / (self.gpu.multiprocessors * self.resident))
        costs = waves * (rounds * tile + cycles.fixed_cycles(self.registers))
        costs = costs + cycles.call_cycles(self.problem, self.gpu.multiprocessors)
        costs = costs + self.variants * self.variant_elements * splits * 4 / (132 * 16)
        return np.where(steps % self.warps[2] == 0, costs, np.inf)


@dataclass(frozen=True, eq=False)
class Boxes:
    """Boxes of tile shapes, of x and of the gradient: their rows, and positions of a row."""

    rows: tuple[NDArray[np.int64], NDArray[np.int64]]
    widths: tuple[NDArray[np.int64], NDArray[np.int64]]

    @once
    def positions(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        (rows_x, rows_g), (width_x, width_g) = self.rows, self.widths
        return (rows_x * width_x, rows_g * width_g)


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


def _taps_in_columns(problem: Problem) -> bool:
    """Whether columns are the gradient's channels at all taps of a CTA, not those of one tap."""
    return problem.target_channels <= _FEW_CHANNELS


def _tap_boxes(problem: Problem) -> list[Triple]:
    """Boxes of taps that one CTA may own."""
    kd, kh, kw = problem.geometry.kernel_size
    most = _MOST_COLUMNS // problem.target_channels if _taps_in_columns(problem) else _MOST_TAPS
    boxes = {
        (t0, t1, t2)
        for t0 in {1, kd}
        for t1 in {1, div_up(kh, 2), kh}
        for t2 in {1, div_up(kw, 2), kw}
        if t0 * t1 * t2 <= most
    }
    return sorted(boxes)


def _bases(problem: Problem, gpu: Gpu, pairs: bool, few_sums: bool = False) -> Iterator[WgradPlan]:
    """Every sensible kernel but for the size of its boxes, also of ``few_sums`` where asked."""
    ieee = problem.arithmetic is Arithmetic.IEEE
    limit = _MAX_ACCUMULATORS_IEEE if ieee else _MAX_ACCUMULATORS
    in_columns, kernel = _taps_in_columns(problem), problem.geometry.kernel_size
    for taps, (fm, fn), warps in itertools.product(
        _tap_boxes(problem), itertools.product((1, 2, 3, 4), (1, 2, 4, 8)), _WARPS
    ):
        apart, columns = math.prod(taps), problem.target_channels
        if in_columns:
            apart, columns = 1, apart * columns
            if fn > 1:  # one choice is left
                continue
            fn = div_up(columns, 8 * warps[1])
        accumulators = apart * fm * fn * 4
        m, n = 16 * warps[0] * fm, 8 * warps[1] * fn
        # Few sums seldom pay, unless they are all that there are.
        whole = 16 * fm >= problem.source_channels and 8 * fn >= columns and taps == kernel
        enough = accumulators >= 12 or in_columns or whole or few_sums
        if accumulators > limit or not enough:
            continue
        if m >= problem.source_channels + 16 or n >= columns + 8:
            continue
        operands = (2 if ieee else 1) * (4 * fm + 2 * fn)
        registers = min(255, accumulators + operands + 44)
        threads = 32 * warps[0] * warps[1] * warps[2]
        most = max(1, min(4, 65536 // (threads * registers)))
        for resident in sorted({most, max(1, most // 2)}):
            yield WgradPlan(problem, taps, warps, (fm, fn), resident, (1, 1), gpu, pairs)


def _pairs(problem: Problem, width: int) -> bool:
    """Whether rows are copied as they lie: where problem and width let them.

    Of 101 plans for ten layers on an H100, 100 were faster so (docs/performance.md).
    """
    any_plan = WgradPlan(problem, (1, 1, 1), _WARPS[0], (1, 1), 1, (1, 1), pairs=True)
    return (any_plan.paired(False) or any_plan.paired(True)) and any_plan._takes(width)


_SAMPLES = (64, 128, 256, 512)  # positions of x


def _box_sizes(plan: WgradPlan) -> list[tuple[int, int]]:
    """Sizes of the boxes of x and of the gradient, for tiles of ever more positions."""
    x, gradient = plan.boxes(
        np.array([[1, n // 32, 32] for n in _SAMPLES], dtype=np.int64)
    ).positions
    # Other shapes of as many positions may need a little more.
    slack = 1.25 if max(plan.problem.geometry.kernel_size) > 1 else 1.0

    def rounded(positions: np.int64) -> int:
        return round_up(int(max(int(positions), plan.depth) * slack) - 4, 32) + 4

    return [(rounded(a), rounded(b)) for a, b in zip(x, gradient, strict=True)]


def _bounds(plans: Sequence[WgradPlan], batch: int, input_size: Sequence[int]) -> list[float]:
    """Cycles that no tile shape undercuts: matrix steps and fills of whole tiles.

    ``plans``: of the same taps, which differ in warps, fragments and resident CTAs.
    """
    one, p = plans[0], plans[0].problem
    chosen = [(*plan.warps, *plan.fragments, plan.resident) for plan in plans]
    warps_m, warps_n, warps_k, fm, fn, resident = np.array(chosen).T
    m, n = cycles.channel_tiles(p, one.taps_in_columns, warps_m * fm, warps_n * fn)
    steps = batch * input_size[0] * input_size[1] * div_up(input_size[2], one.depth)
    warps, apart, columns = warps_m * warps_n, one.taps_apart, one.taps_in_columns
    step = cycles.step_cycles(p, apart, columns, warps, fm, fn, warps * warps_k * resident)
    widths = [extents[2] for extents in p.extents(input_size)]
    fills = one.fill(False, m, widths[0]).least_of_a_position()
    fills = fills + one.density * one.fill(True, n, widths[1]).least_of_a_position()
    registers, ctas = one.taps_apart * fm * fn * 4, cycles.variants(p, one.taps, m, n)
    sums = ctas * registers * 32 * warps_m * warps_n
    multiprocessors = one.gpu.multiprocessors
    splits = np.maximum(1, resident * multiprocessors // ctas)
    splits = np.minimum(splits, np.maximum(1, WORKSPACE_BYTES // (4 * sums)))
    tiles = steps * (step + one.depth * fills) * resident
    waves = div_up(ctas, multiprocessors * resident)
    found = waves * (tiles / splits + cycles.fixed_cycles(registers))
    found = found + cycles.call_cycles(p, multiprocessors)
    return [float(bound) for bound in found]


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, WgradPlan]]:
    """Candidates for these input extents with their costs, cheapest first.

    ``below``: see :func:`~convt3d.cuda.plan.search.cheapest`.
    """
    size, _ = problem.extents(input_size)
    pairs = _pairs(problem, size[2])
    plans = [*_bases(problem, gpu, pairs)] or [*_bases(problem, gpu, pairs, few_sums=True)]
    if not plans:
        return []
    shapes = _shapes(plans[0].depth, size)
    # Boxes depend on the taps only.
    one_of_taps = {plan.taps: plan for plan in plans}
    of_taps = {taps: (plan.boxes(shapes), _box_sizes(plan)) for taps, plan in one_of_taps.items()}
    bases: list[tuple[float, WgradPlan]] = []
    for _, same_taps in itertools.groupby(plans, key=lambda plan: plan.taps):
        alike = [*same_taps]
        bases += zip(_bounds(alike, batch, size), alike, strict=True)

    def price(base: WgradPlan) -> Iterator[tuple[float, WgradPlan]]:
        boxes, sizes = of_taps[base.taps]
        costs = base._costs(batch, size, shapes, boxes)
        room = gpu.shared_for(base.resident)
        for positions in sizes:
            plan = replace(base, positions=positions)
            if plan.shared_bytes <= room:
                yield float(costs[plan._fitting(boxes)].min(initial=np.inf)), plan

    return cheapest(bases, price, below)
