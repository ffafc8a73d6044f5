"""Plans of ``wgrad_ndhwc/kernel.cu``: tiles of channels and taps, boxes of positions, splits.

Contiguous tensors are copied to channels_last before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.launches import MOST_COPIED, copied_first, copy_cycles, copy_refusal
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.position_box import Box, lines_box, smallest_box, steps_of
from convt3d.cuda.plan.search import by_cost, with_tile
from convt3d.cuda.plan.split_k import LONGEST_SUM, MAX_REGISTERS, most_splits
from convt3d.cuda.schedule import (
    WEIGHT_STRIDES,
    Gpu,
    Launch,
    Problem,
    Schedule,
    TensorMap,
    div_up,
    geometry_macros,
    macros,
    round_up,
)
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic

_FILE = "wgrad_ndhwc/kernel.cu"
_MOST_STRIDE = 8  # of TMA's element strides
_MAX_BOXES = 32  # of a step, one for each lane
_BARRIER_BYTES = 24  # of a stage
_MOST_STAGES = 8
# Bytes a cycle of one multiprocessor that L2 brings, shared memory moves and DRAM takes; these, and
# a step's barriers and TMA's latency in cycles, are fitted to 510 timings of 66 layers on an H200.
_L2_BYTES, _SHARED_BYTES, _DRAM_BYTES = 44.0, 175.0, 16.0
_STEP_CYCLES, _LATENCY_CYCLES = 118.0, 1125.0
# Cycles of a CTA besides its steps, and of the second launch.
_CTA_CYCLES, _REDUCE_CYCLES = 4000.0, 4000.0
# Factors, by element bytes, that make these cycles comparable with those of ampere_wgrad.py: the
# mean ratio over those layers.
_MEASURED = {2: 1.37, 4: 1.87}
# What plans on copies take of what is counted, beside those of wgrad/, over 157 problems.
_ON_COPIES = 0.9
_MOST_RUN = 32  # blocks of 8 x 8 channels of a CTA of the second pass: four a warp


@dataclass(frozen=True)
class Tile:
    """What a CTA multiplies.

    Args:
        taps_on_m: the gradient's channels and taps are rows, channels of x are columns.
        consumers: warpgroups side by side along M and N.
        blocks: m64 blocks of each.
        columns: N of a product.
        positions: K of a step.
        stages: steps in shared memory.
        lines: taps along H share a box, of a step of so many lines at least; 0: each has its own.
    """

    taps_on_m: bool
    consumers: tuple[int, int]
    blocks: int
    columns: int
    positions: int
    stages: int
    lines: int = 0


# taps_on_m, consumers, blocks, and the most columns of a product. Bytes of a step go with M + N,
# its products with M * N, and shared memory that products read with 64 + N for 64 * N.
_SHAPES: tuple[tuple[bool, tuple[int, int], int, int], ...] = (
    (False, (2, 1), 1, 256),  # 128 x 256, the square tile of GEMMs: x of 128 channels and more
    (False, (1, 2), 1, 256),  # 64 x 512: x of 64 channels, of which M has no more
    (False, (1, 3), 1, 192),  # 64 x 576: nine taps of 64 channels, a third of a 3x3x3 kernel
    (False, (3, 1), 1, 192),  # 192 x 192: x of 192 or 320 channels
    (True, (2, 1), 1, 256),  # 128 x N: N as x has channels, of which atoms of 64 would waste some
    (True, (2, 1), 2, 160),  # 256 x N: the same, up to 160 channels, which 320 are twice
    (True, (2, 1), 3, 96),  # 384 x N: three taps, which may share boxes
    (True, (3, 1), 1, 160),  # 192 x N: the same, of more channels
    (True, (3, 1), 5, 32),  # 960 x N: the same, all 27 taps of 32 channels
    (True, (3, 1), 3, 48),  # 576 x N: the same in TF32, whose fragments take registers
    (True, (2, 1), 4, 64),  # 512 x N: x of 32 or 48 channels
    (True, (2, 1), 7, 32),  # 896 x N: all 27 taps of 32 channels in one CTA
)
# Few where stages are large, many for less waiting; 128 suit volumes of a hundred positions.
_POSITIONS = {2: (32, 64, 128), 4: (16, 32, 64)}
# Of 4 lines 3 taps read 6, of 8 they read 10; lines are of eight positions at least.
_LINES = {16: (0,), 32: (0, 4), 64: (0, 4, 8), 128: (0, 8)}


@dataclass(frozen=True)
class WgmmaWgradNdhwcPlan:
    """A gradient-by-weight kernel; boxes and splits follow the extents of each call."""

    problem: Problem
    tile: Tile
    gpu: Gpu = field(default=Gpu(), compare=False, repr=False)  # whose multiprocessors are filled

    # ------------------------------------------------------------ derived sizes

    @once
    def taps(self) -> int:
        return math.prod(self.problem.geometry.kernel_size)

    @property
    def transposes(self) -> bool:
        """Whether x is transposed in shared memory: of 32-bit types."""
        return self.problem.element_bytes == 4

    @property
    def source_atom(self) -> int:
        """Channels of x of a box."""
        return 32 if self.transposes or self.problem.source_channels <= 32 else 64

    @once
    def target_atom(self) -> int:
        """Channels of the gradient of a box: 64, unless these are a fifth more than there are."""
        n = self.problem.target_channels
        return 32 if self.transposes or 5 * round_up(n, 64) >= 6 * round_up(n, 32) else 64

    @property
    def consumers(self) -> int:
        return self.tile.consumers[0] * self.tile.consumers[1]

    @once
    def extents(self) -> tuple[int, int]:
        """Rows and columns of a CTA."""
        t = self.tile
        return 64 * t.blocks * t.consumers[0], t.columns * t.consumers[1]

    @once
    def sides(self) -> tuple[int, int]:
        """Channels of x, and of the gradient's taps, of a CTA."""
        m, n = self.extents
        return (n, m) if self.tile.taps_on_m else (m, n)

    @property
    def along_taps(self) -> bool:
        """Whether neighbours in the weight are taps, not channels of the gradient.

        So it is in a contiguous weight; its layout is taken to be that of x.
        """
        return self.taps > 1 and not self.problem.source_channels_last

    @once
    def elements(self) -> int:
        """Sums of all work tiles."""
        m, n = self.extents
        return self.tiles * m * n

    @property
    def strip(self) -> int:
        """Taps of a box of the gradient."""
        return self.problem.geometry.kernel_size[1] if self.tile.lines else 1

    @property
    def halo(self) -> int:
        """Lines that such a box has beside those of a step."""
        return (self.strip - 1) * self.problem.geometry.dilation[1]

    @property
    def target_rows(self) -> int:
        """Positions of a box of the gradient, at most; boxes are multiples of 1024 bytes."""
        t = self.tile
        if not t.lines:
            return t.positions
        rows = t.positions + self.halo * t.positions // t.lines
        return round_up(rows, 1024 // (self.target_atom * self.problem.element_bytes))

    @once
    def boxes(self) -> tuple[int, int]:
        source, target = self.sides
        return div_up(source, self.source_atom), target // self.target_atom // self.strip

    @once
    def atoms(self) -> int:
        """Of the gradient, in a group."""
        return self.taps * div_up(self.problem.target_channels, self.target_atom)

    @once
    def tiles(self) -> int:
        p = self.problem
        across = div_up(p.source_channels, self.sides[0])
        across *= div_up(self.atoms, self.sides[1] // self.target_atom)
        return across * p.geometry.groups

    @once
    def stage_bytes(self) -> int:
        source, target = self.boxes
        channels = source * self.source_atom + (self.tile.columns if self.transposes else 0)
        elements = self.tile.positions * channels + self.target_rows * target * self.target_atom
        return elements * self.problem.element_bytes

    @property
    def shared_bytes(self) -> int:
        return self.tile.stages * (self.stage_bytes + _BARRIER_BYTES)

    @property
    def _products(self) -> int:
        """Products of a step, 32 bytes of K each."""
        return self.tile.positions * self.problem.element_bytes // 32

    # ------------------------------------------------------------ launches

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
            )
        )

    def box(self, batch: int, input_size: Sequence[int]) -> Box | None:
        """The box of a K step that takes fewest of them; None where taps can share none."""
        d, h, w = input_size
        extents = (batch, d, h, w)
        if self.tile.lines:
            return lines_box(extents, self.tile.positions, self.tile.lines)
        return smallest_box(extents, self.tile.positions, self.problem.geometry.stride)

    @once
    def apart(self) -> WgmmaWgradNdhwcPlan:
        """The same with a box for each tap, for extents without a box that taps share."""
        fitting = (n for n in _POSITIONS[self.problem.element_bytes] if n <= self.tile.positions)
        plans = (_deepest(with_tile(self, positions=n, lines=0)) for n in fitting)
        return max(
            (plan for plan in plans if plan.tile.stages >= 2), key=lambda plan: plan.tile.positions
        )

    def splits(self, extents: Box, box: Box) -> int:
        """CTAs that share the steps of a work tile: whole rounds of all multiprocessors."""
        return min(self._ways(extents, box))[1]

    def _ways(self, extents: Box, box: Box) -> Iterator[tuple[float, int]]:
        """Cycles of a call by numbers of splits."""
        steps, step_cycles = steps_of(extents, box), self._step_cycles(box)
        most = min(steps, most_splits(self.elements))
        least = min(most, div_up(steps * self._products, LONGEST_SUM))
        mp = self.gpu.multiprocessors
        rounds = range(1, div_up(self.tiles * least, mp) + 4)
        for splits in {min(most, max(least, r * mp // self.tiles)) for r in rounds}:
            alone = div_up(steps, splits) * step_cycles + _CTA_CYCLES
            cycles = div_up(self.tiles * splits, mp) * alone
            if splits > 1 or self.along_taps:
                cycles += _REDUCE_CYCLES + splits * self.elements * 8 / _DRAM_BYTES / mp
            yield cycles, splits

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        p = self.problem
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
        whole = splits == 1 and not self.along_taps
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
        return schedule

    def _reduce(self, splits: int) -> Launch:
        """The second pass; a CTA has a run of blocks of 8 x 8 channels."""
        p, g = self.problem, self.problem.geometry
        octets = (div_up(p.source_channels, 8), div_up(p.target_channels, 8))
        length = self.taps if self.along_taps else octets[1]
        others = math.prod(octets) * self.taps * g.groups // length
        runs = max(div_up(length, _MOST_RUN), div_up(self.gpu.multiprocessors, others))
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
            + ("" if self.problem.source_channels_last else ", x copied to channels_last")
            + (
                ""
                if self.problem.target_channels_last
                else ", the gradient copied to channels_last"
            ),
            "tiles": f"{self.tiles}",
            "shared memory": f"{self.shared_bytes} bytes",
        }

    # ------------------------------------------------------------ cost

    def _step_cycles(self, box: Box) -> float:
        """Cycles of a K step of a CTA: of tensor cores, shared memory, L2 or waiting for it."""
        t, m64 = self.tile, self.consumers * self.tile.blocks
        bytes_ = self.problem.element_bytes
        tensor = m64 * self._products * t.columns / 2
        source, target = self.boxes[0] * self.source_atom, self.boxes[1] * self.target_atom
        loaded = (t.positions * (source + target) + self.halo * box[3] * target) * bytes_
        # Products read rows of 32 bytes of both operands; x may be read and written once more.
        shared = m64 * self._products * 32 * (64 + t.columns) + loaded
        if self.transposes:
            shared += 2 * t.positions * t.columns * bytes_
        brought = loaded / _L2_BYTES
        waited = (brought + _LATENCY_CYCLES) / (t.stages - 1)  # one stage is being read
        return max(tensor, shared / _SHARED_BYTES, brought, waited) + _STEP_CYCLES

    def cost(self, batch: int, input_size: Sequence[int]) -> float:
        """Estimated cycles of one call."""
        box = self.box(batch, input_size)
        if box is None:
            return self.apart.cost(batch, input_size)
        d, h, w = input_size
        bytes_ = self.problem.element_bytes
        cycles = _MEASURED[bytes_] * min(self._ways((batch, d, h, w), box))[0]
        copies = [
            copy_cycles(batch * math.prod(size) * channels * bytes_, self.gpu)
            for _, channels, size in self._contiguous(input_size)
        ]
        return _ON_COPIES * (cycles + sum(copies)) if copies else cycles


def refusal(problem: Problem, gpu: Gpu) -> str | None:
    """Why wgrad_ndhwc/kernel.cu cannot take a problem, or None."""
    if gpu.capability[0] != 9:
        return "warpgroup products exist on compute capability 9.0 only"
    if problem.operation != "grad_weight":
        return "the gradient by weight alone"
    if problem.arithmetic is Arithmetic.IEEE:
        return "IEEE-grade is not among its arithmetics: operands are multiplied as they come"
    vector = 16 // problem.element_bytes
    if problem.source_channels % vector or problem.target_channels % vector:
        return "channels of a group are moved as 16 bytes"
    if max(problem.geometry.stride) > _MOST_STRIDE:
        return f"TMA takes every eighth position at most, not a stride beyond {_MOST_STRIDE}"
    return copy_refusal(problem)


def candidates(problem: Problem, gpu: Gpu) -> Iterator[WgmmaWgradNdhwcPlan]:
    """Every kernel of the list that fits, with the deepest pipeline."""
    g, channels, transposes = problem.geometry, problem.source_channels, problem.element_bytes == 4
    shares = g.kernel_size[1] > 1 and g.stride[1] == 1
    steps = [
        (positions, lines)
        for positions in _POSITIONS[problem.element_bytes]
        for lines in _LINES[positions][: None if shares else 1]
    ]
    for (taps_on_m, consumers, blocks, most), (positions, lines) in itertools.product(
        _SHAPES, steps
    ):
        if transposes and not taps_on_m:
            continue  # x, which all taps share, is what is transposed
        tile = Tile(taps_on_m, consumers, blocks, most, positions, 2, lines)
        plan = WgmmaWgradNdhwcPlan(problem, tile, gpu)
        columns = most
        if taps_on_m:
            columns = round_up(div_up(channels, div_up(channels, most)), 16)
        elif lines:
            columns = plan.strip * plan.target_atom
        plan = with_tile(plan, columns=columns)
        wide = consumers[0] == 1 or taps_on_m or channels > 64
        registers = blocks * (columns // 2 + (8 if transposes else 0))
        atoms = plan.sides[1] // plan.target_atom
        if (
            wide
            and atoms % plan.strip == 0
            and columns <= most
            and registers <= MAX_REGISTERS[plan.consumers]
            and plan.boxes[0] + atoms <= _MAX_BOXES
        ):
            plan = _deepest(plan)
            if plan.tile.stages >= 2:
                yield plan


def _deepest(plan: WgmmaWgradNdhwcPlan) -> WgmmaWgradNdhwcPlan:
    """The plan with as many stages as fit."""
    stages = plan.gpu.shared_per_block // (plan.stage_bytes + _BARRIER_BYTES)
    return with_tile(plan, stages=min(stages, _MOST_STAGES))


def ranked(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    below: float | None = None,
) -> list[tuple[float, WgmmaWgradNdhwcPlan]]:
    """Candidates for these input extents with their costs, cheapest first."""
    if refusal(problem, gpu) is not None:
        return []
    size, _ = problem.extents(input_size)
    found = by_cost((plan.cost(batch, size), plan) for plan in candidates(problem, gpu))
    return found if problem.channels_last else found[:MOST_COPIED]
