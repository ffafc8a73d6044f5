"""What a stage of a phases kernel multiplies, and the registers that this takes.

The numbers mirror ``phases/config.cuh``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from convt3d.cuda.plan.axes import Axis
from convt3d.cuda.plan.once import once
from convt3d.cuda.plan.phases.tile import AnyPhasesTile, PhasesShape
from convt3d.cuda.plan.unit_tiles import UnitTileKernel
from convt3d.cuda.plan.warpgroups import consumer_registers
from convt3d.cuda.schedule import div_up
from convt3d.geometry import Triple

_PRODUCER_REGISTERS = 24
_STORE_WARP_REGISTERS = {2: 80, 3: 56}  # of the producer's warpgroup where its other warps store
# Registers of a consumer beside sums, fragments and addresses of units.
_SPARE_REGISTERS = 40
# The same where operands are split, by consumers: with fewer, tiles spilled.
_SPLIT_SPARE_REGISTERS = {1: 24, 2: 24, 3: 44}
MOST_CHAIN = 4  # taps of W whose products the tensor core adds up


@dataclass(frozen=True)
class PhasesProducts(UnitTileKernel[PhasesShape]):
    """The products of a kernel."""

    tile: AnyPhasesTile

    # ------------------------------------------------------------ phases, taps and channels

    @once
    def unrolled(self) -> tuple[Axis, ...]:
        """Axes whose phases are slots of a unit."""
        return tuple(axis for axis in self.axes if axis.block)

    @once
    def apart(self) -> tuple[Axis, ...]:
        """Axes whose phases are work tiles of their own, and whose taps are walked."""
        return tuple(axis for axis in self.axes if not axis.block)

    @once
    def phase_spans(self) -> Triple:
        """Positions of the box beside the first that the taps of a work tile reach."""
        first, second, third = (axis.span for axis in self.axes)
        return (0 if self.tile.tap_boxes else first, second, third)

    @once
    def product_work_tiles(self) -> int:
        """Work tiles of a tile that CTAs multiply: a store warp stores what has no taps."""
        if not self.tile.store_warps:
            return self.n_tile_phases
        live = math.prod(axis.live_phases for axis in self.apart)
        return self.n_tile_phases // self.phases * live

    @property
    def chunk_channels(self) -> int:
        return 2 * self.vector

    @once
    def chunks(self) -> int:
        return div_up(self.problem.source_channels, self.chunk_channels)

    @once
    def taps(self) -> int:
        """Taps that a stage unrolls."""
        return math.prod(axis.kernel for axis in self.unrolled)

    @once
    def walked(self) -> int:
        """Stages of a chunk over all phases: taps of the phased axes."""
        return math.prod(axis.kernel for axis in self.apart)

    @once
    def most_walked(self) -> int:
        """Stages of a chunk in the phase with most taps."""
        return math.prod(axis.max_taps for axis in self.apart)

    @once
    def steps(self) -> int:
        """Fragments of units that a stage loads: shifts with any tap."""
        return math.prod(len(axis.live_shifts) for axis in self.unrolled)

    @once
    def slots(self) -> int:
        """Outputs of a unit and column of a work tile."""
        return math.prod(axis.slots for axis in self.axes)

    @once
    def stage_bytes(self) -> int:
        return self.taps * self.tile.column_tile * 32 * self.problem.words_per_value

    @once
    def packed_bytes(self) -> int:
        return self.n_tiles * self.chunks * self.walked * self.stage_bytes

    # ------------------------------------------------------------ IEEE-grade sums

    @once
    def split(self) -> bool:
        """Whether operands are split in two parts and chains of products added up outside."""
        return self.problem.words_per_value > 1

    @property
    def split_rows(self) -> int:
        """Rows of shifts of W that a block's fragments are loaded of at once."""
        return self._split_way[0]

    @property
    def split_chains(self) -> int:
        """Chains with accumulators: two, one of which is added up under the other, or one."""
        return self._split_way[1]

    @once
    def _split_way(self) -> tuple[int, int]:
        """As many rows, then chains, as registers have room for: long chains are few.

        But not so long that they err more than the sum of all of them, whose error grows with the
        root of their number.
        """
        if not self.split:
            return (1, 1)
        inner = math.prod(max(axis.phase_taps) for axis in self.unrolled[:-1])
        most = max(self.axes[2].phase_taps)
        products = math.prod(max(axis.phase_taps) for axis in self.axes)
        longest = max(MOST_CHAIN, int((8 * self.chunks * products) ** (1 / 3)))
        ways = itertools.product(range(self._shift_rows, 0, -1), (2, 1))
        fitting = (
            (count, chains)
            for count, chains in ways
            if (count == 1 or most * min(count, inner) <= longest)
            and self._registers(count, chains) <= self.consumer_registers
        )
        return next(fitting, (1, 1))

    @once
    def split_sets(self) -> int:
        """Chains of a stage and block: of each slot with a tap in rows that are loaded together."""
        if self.split_rows == 1:
            inner = math.prod(axis.kernel for axis in self.unrolled[:-1])
            return inner * self.axes[2].live_slots
        return self._row_groups * math.prod(axis.live_slots for axis in self.unrolled)

    @property
    def additions(self) -> int:
        """Chains that an output is the sum of."""
        return self.chunks * self.most_walked * self._row_groups

    @property
    def _shift_rows(self) -> int:
        """Rows of shifts of W of a stage."""
        return self.steps // len(self.axes[2].live_shifts)

    @property
    def _row_groups(self) -> int:
        """Of them, those that are loaded together."""
        return div_up(self._shift_rows, self.split_rows)

    # ------------------------------------------------------------ registers

    @property
    def producer_registers(self) -> int:
        if self.tile.store_warps:
            return _STORE_WARP_REGISTERS[self.tile.consumers]
        return _PRODUCER_REGISTERS

    @property
    def consumer_registers(self) -> int:
        t = self.tile
        return consumer_registers(t.threads, t.consumers, self.producer_registers)

    @property
    def fits_registers(self) -> bool:
        return self._registers(1, 1) <= self.consumer_registers

    def _registers(self, rows: int, chains: int) -> int:
        """Of a consumer's thread; see :attr:`split_rows` and :attr:`split_chains`."""
        t = self.tile
        if self.split:
            units = 8 * rows * len(self.axes[2].live_shifts)
            chains = min(chains, math.prod(axis.live_slots for axis in self.unrolled))
            spare = _SPLIT_SPARE_REGISTERS[t.consumers]
            return self.accumulators + 4 * t.blocks + spare + units + chains * t.column_tile // 2
        return self.accumulators + 4 * t.blocks * (t.fragments + 1) + _SPARE_REGISTERS
