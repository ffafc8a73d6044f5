"""Where the units of a warpgroup's rows lie in shared memory, and what bank conflicts cost."""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

Four = tuple[int, int, int, int]
"""Samples, D, H and W: extents, or steps from one to the next."""


@functools.lru_cache(maxsize=4096)
def _unit_places(rows: int, own: int, units: Four) -> tuple[npt.NDArray[np.int64], ...]:
    """Sample, slice, line and position in the tile of the units of a warpgroup's rows."""
    row = np.arange(rows)
    row[min(own, math.prod(units)) :] = 0
    lines, position = np.divmod(row, units[3])
    slices, line = np.divmod(lines, units[2])
    return (*np.divmod(slices, units[1]), line, position)


def _unit_positions(rows: int, own: int, units: Four, steps: Four) -> npt.NDArray[np.int64]:
    """Where these units lie, with steps from one to the next of each axis."""
    places = zip(_unit_places(rows, own, units), steps, strict=True)
    return sum((place * step for place, step in places), np.zeros(rows, np.int64))


def _cycles(word: npt.NDArray[np.int64]) -> float:
    """Mean cycles of accesses to these words of shared memory, a row of the array each."""
    word = np.sort(word, axis=1)
    first = np.ones(word.shape, bool)
    np.not_equal(word[:, 1:], word[:, :-1], out=first[:, 1:])
    bank = word % 32 + 32 * np.arange(len(word))[:, None]
    counts = np.bincount(bank[first], minlength=32 * len(word))
    return float(counts.reshape(-1, 32).max(axis=1).mean())


@functools.lru_cache(maxsize=65536)
def load_cycles(
    rows: int, own: int, units: Four, steps: Four, channel: int, per_word: int, wide: int = 1
) -> float:
    """Mean cycles of a warp's load of eight units of four channels.

    Args:
        rows, own: of a warpgroup, and how many of them are units.
        units: of the tile.
        steps: elements from a sample, slice, line and position to the next.
        channel: elements from a channel to the next.
        per_word: values of a word: one, or two neighbours whose channels come in pairs.
        wide: words that a lane loads at once, one or two.
    """
    position = _unit_positions(rows, own, units, steps)
    channels = per_word * channel * np.arange(4)
    if wide == 2:  # half a warp at a time
        word = (position.reshape(-1, 4, 1) + channels).reshape(-1, 16, 1) + np.arange(2)
        return 2 * _cycles(word.reshape(len(word), 32))
    word = position.reshape(-1, 8, 1) + channels
    return _cycles(word.reshape(len(word), 32) // per_word)


@functools.lru_cache(maxsize=65536)
def pair_cycles(
    rows: int,
    own: int,
    units: Four,
    steps: Four,
    channel: int,
    per_word: int,
    groups: tuple[tuple[int, int], ...] = ((0, 1),),
) -> float:
    """Cycles of a warp's loads of eight pairs of neighbouring units of four channels.

    ``groups``: the first word that a pair reads and how many, for each load; else as of
    :func:`load_cycles`.
    """
    position = _unit_positions(rows, own, units, steps)[::2]
    channels = per_word * channel * np.arange(4)
    first = (position.reshape(-1, 1) + channels) // per_word
    cycles = 0.0
    for begin, many in groups:
        # As many lanes at a time as fill the banks.
        word = (first.reshape(-1, 32 // many, 1) + begin + np.arange(many)).reshape(-1, 32)
        cycles += many * _cycles(word)
    return cycles


@functools.lru_cache(maxsize=65536)
def row_cycles(rows: int, own: int, units: Four, steps: Four) -> float:
    """Mean cycles of eight rows of 16 bytes for ldmatrix; steps are rows."""
    bank = _unit_positions(rows, own, units, steps).reshape(-1, 8) % 8
    return float(np.mean([np.bincount(eight).max() for eight in bank]))
