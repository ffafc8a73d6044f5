"""Boxes of an ndhwc kernel's source, and the tiles of units whose products can read them.

They follow from few of a plan's choices: plans that differ in columns, pipelines or clusters have
the same, which are listed once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from convt3d.cuda.plan.banks import Four
from convt3d.cuda.plan.extents import even_cuts, tile_counts
from convt3d.cuda.plan.unit_tiles import UnitShape
from convt3d.cuda.plan.warpgroups import fits_map
from convt3d.cuda.schedule import MAP_BOX, div_up, round_up
from convt3d.geometry import Triple

ROW_BYTES = 128  # of a box: channels of a source position

Placed = tuple[UnitShape, int]
"""A tile, and the bytes from its box to the next."""


@dataclass(frozen=True)
class Boxing:
    """How boxes lie in shared memory.

    Args:
        rows: units of a tile, at most.
        spans: positions of a box beside the first that taps reach.
        steps: source positions from one of a box to the next.
        split: see NdhwcTile.
        samples_inside: see NdhwcTile.
        whole_lines: whether tiles with samples inside have all units of a line.
    """

    rows: int
    spans: Triple
    steps: Triple
    split: int
    samples_inside: bool
    whole_lines: bool

    def bytes_of(self, shape: UnitShape) -> int:
        """From a box to the next: products read whole blocks, also past its last unit."""
        if self.split == 0:
            return round_up(math.prod(shape.box) * ROW_BYTES, 1024)
        samples, slice_, line = self.pitches(shape)
        n, d, h, w = self._unit(shape, (min(self.rows, math.prod(shape.units)) - 1) // 64 * 64)
        position = shape.units[0] if self.samples_inside else 1
        start = n * samples + d * slice_ + h * line + w * position  # of the last block
        reach = start + 64 + self.spans[0] * slice_ + self.spans[1] * line
        return round_up(max(reach, math.prod(shape.box)) * ROW_BYTES, 1024)

    def pitches(self, shape: UnitShape) -> Triple:
        """Rows of a box from a sample, slice and line to the next."""
        samples, slices, lines, width = shape.box
        if self.samples_inside:
            return 1, lines * samples * width, samples * width
        return slices * lines * width, lines * width, width

    def _unit(self, shape: UnitShape, index: int) -> Four:
        """A tile's unit by its row of the products: sample, slice, line, position."""
        samples, slices, lines, width = shape.units
        if self.samples_inside:
            rest, n = divmod(index, samples)
            rest, w = divmod(rest, width)
            d, h = divmod(rest, lines)
        else:
            rest, w = divmod(index, width)
            rest, h = divmod(rest, lines)
            n, d = divmod(rest, slices)
        return n, d, h, w

    # ------------------------------------------------------------ tiles

    def shapes(self, batch: int, units: Triple) -> list[list[Placed]]:
        """Tiles whose units the kernel's products can read; of those in a list, the first to fit.

        Args:
            batch: samples.
            units: along D, H and W.
        """
        return _shapes(self, batch, units)

    def lines_of_units(self, batch: int, units: Triple) -> Iterator[list[Placed]]:
        """Tiles of lines of W."""
        wide = {8, 16, 32, 64, round_up(units[2], 8)} if self.split == 1 else {4, 8, 16, 32}
        if self.split != 1:
            wide |= {div_up(units[2], n) for n in (1, 2, 3, 4)}
        for t2 in sorted(wide):
            lines = min(self.rows // t2, MAP_BOX)
            for t1, t0 in _planes(units, lines):
                whole = t0 >= units[0] and t1 >= units[1] and t2 >= units[2]
                most = lines // (t1 * t0)
                for samples in {1, min(batch, most)} if whole else {1}:
                    yield self._placed((samples, t0, t1, t2), batch, units)

    def lines_of_samples(self, batch: int, units: Triple) -> Iterator[list[Placed]]:
        """Tiles of few positions of many samples; one of eight samples always fits."""
        wide = {units[2]} if self.whole_lines else {1, 2, 4, units[2]}
        for t2, t1, t0 in itertools.product(sorted(wide), (1, 2, 4), (1, 2, 4)):
            if t0 > units[0] or t1 > units[1]:
                continue
            alike: list[Placed] = []
            for samples in (128, 64, 32, 16, 8):
                if samples * t2 * t1 * t0 <= self.rows and samples < 2 * max(8, batch):
                    alike += self._placed((samples, t0, t1, t2), batch, units)
            yield alike

    def _placed(self, tile: Four, batch: int, units: Triple) -> list[Placed]:
        """A tile, if each block of 64 units is one run of a box, and shifts are multiples of 8."""
        samples, t0, t1, t2 = tile
        span0, span1, span2 = self.spans
        box = (samples, t0 + span0, t1 + span1, t2 + span2)
        if self.samples_inside:
            # Blocks are parts of one line of samples, or lines that follow one another.
            line = samples * t2
            run = line * (1 if span1 else t1 * (1 if span0 else t0))
            if line % 8 or (run % 64 and run != math.prod(tile)):
                return []
        elif self.split:
            run = t1 * t2
            if not span1:
                run *= t0 if span0 else t0 * samples
            if run % 64 and run != math.prod(tile):
                return []
            if (span1 and t2 % 8) or (span0 and (t1 + span1) * t2 % 8):
                return []
            # Blocks begin at multiples of 8 rows.
            if math.prod(tile) > 64 and ((box[1] * box[2] * t2) % 8 and samples > 1):
                return []
        if not fits_map(box, (1, *self.steps)):
            return []
        shape = UnitShape(tile, tile_counts(batch, units, tile), box)
        return [(shape, self.bytes_of(shape))]


@functools.lru_cache(maxsize=64)
def _shapes(boxing: Boxing, batch: int, units: Triple) -> list[list[Placed]]:
    tiles = boxing.lines_of_samples if boxing.samples_inside else boxing.lines_of_units
    return [alike for alike in tiles(batch, units) if alike]


def _planes(units: Triple, lines: int) -> list[tuple[int, int]]:
    """Extents of tiles along H and D of at most so many lines."""
    high = {n for n in (1, 2, 4, 8, 16, 32, 64) if n < 2 * units[1]} | {units[1]}
    found = []
    for t1 in sorted(n for n in high if n <= lines):
        found += [(t1, t0) for t0 in even_cuts(units[0], lines // t1)]
    return found
