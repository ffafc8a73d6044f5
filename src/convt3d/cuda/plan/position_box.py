"""Boxes of positions: what a K step of a gradient by weight takes, by TMA."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

from convt3d.cuda.schedule import MAP_BOX, div_up
from convt3d.geometry import Triple

Box = tuple[int, int, int, int]
"""Positions of x: samples, D, H, W."""


def steps_of(extents: Sequence[int], box: Box) -> int:
    return math.prod(div_up(n, b) for n, b in zip(extents, box, strict=True))


@functools.lru_cache(maxsize=4096)
def smallest_box(extents: Box, positions: int, stride: Triple) -> Box:
    """The box of at most so many positions that takes fewest steps; of equals, one that fits.

    Then the one with the longest rows of W.
    """
    limits = (MAP_BOX, *((MAP_BOX - 1) // s + 1 for s in stride))
    # Along each axis, the boxes that cut it into equal parts.
    sides = [
        sorted({div_up(n, q) for q in range(div_up(n, min(positions, most)), n + 1)})
        for n, most in zip(extents, limits, strict=True)
    ]

    def price(box: Box) -> tuple[int, bool, int, int]:
        ragged = any(n % b for n, b in zip(extents, box, strict=True))
        return steps_of(extents, box), ragged, -box[3], -box[2]

    fitting: list[Box] = []
    for w, h in itertools.product(sides[3], sides[2]):
        if w * h > positions:
            continue
        for d in sides[1]:
            most = [n for n in sides[0] if n * d * h * w <= positions]
            fitting += [(n, d, h, w) for n in most]
    return min(fitting, key=price)


@functools.lru_cache(maxsize=4096)
def lines_box(extents: Box, positions: int, least: int) -> Box | None:
    """The box of so many positions, of ``least`` lines or more, that takes fewest steps.

    Its lines are all in x, and have a multiple of eight positions.
    """
    found = [
        (1, 1, lines, positions // lines)
        for lines in range(least, positions // 8 + 1)
        if extents[2] % lines == 0 and positions % (8 * lines) == 0
    ]
    return min(found, key=lambda box: (steps_of(extents, box), box[3]), default=None)
