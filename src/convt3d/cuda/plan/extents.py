"""Cuts of extents into tiles."""

from __future__ import annotations

from collections.abc import Sequence

from convt3d.cuda.plan.banks import Four
from convt3d.cuda.schedule import div_up


def tile_counts(batch: int, units: Sequence[int], tile: Four) -> Four:
    """How many tiles of these extents cover the samples, and the units along D, H and W."""
    a, b, c, d = (div_up(n, t) for n, t in zip((batch, *units), tile, strict=True))
    return (a, b, c, d)


def near_cuts(extent: int, most: int) -> set[int]:
    """Extents of tiles that cut it into as few equal parts as fit, and up to three more."""
    parts = div_up(extent, most)
    return {div_up(extent, n) for n in range(parts, parts + 4)}


def even_cuts(extent: int, most: int, *, halved: bool = False) -> list[int]:
    """Extents of tiles: as much as fits, the same in equal parts (and half of that), and one."""
    most = max(1, min(extent, most))
    equal = div_up(extent, div_up(extent, most))
    return sorted({1, equal, most, *((div_up(equal, 2),) if halved else ())})
