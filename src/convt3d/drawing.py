"""Small pictures for ``convt3d explain``: phases with their taps, and tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convt3d.cuda.plan.sketch import Sketch

_MOST_PHASES = 4  # that are drawn
_MOST_TAPS = 16  # of an axis that are drawn
_AXES = "DHW"
_WIDEST = 16  # characters of a tile
_COLUMNS = 16  # of a tile that are a character
_FLAT = 128  # rows of a tile that is drawn one line high
LEFT = 8  # characters for the rows of a tile


def phases(
    taps: Sequence[Sequence[Sequence[int]]], kernel: Sequence[int], stride: Sequence[int]
) -> list[str]:
    """A table: a line for each phase, a column for each axis, the indices of the taps that it has.

    Args:
        taps: kernel indices by axis (D, H, W) and phase, of the first phases at least.
        kernel: size of each axis.
        stride: how many phases each axis has.
    """
    same = [i for i in range(3) if _like(i, taps, kernel, stride) == i]
    columns = []
    for axis in same:
        names = [_AXES[i] for i in range(3) if _like(i, taps, kernel, stride) == axis]
        column = [", ".join(names)]
        shown = min(stride[axis], _MOST_PHASES)
        column += [_phase(taps[axis][phase], kernel[axis]) for phase in range(shown)]
        if stride[axis] > shown:
            column.append(f"... {stride[axis] - shown} more")
        columns.append(column)
    height = max(map(len, columns))
    numbers = [str(n) for n in range(min(max(stride), _MOST_PHASES))]
    lines = ["phase", *numbers, *[""] * (height - 1 - len(numbers))]
    rows = [
        [first.rjust(LEFT - 2), *(column[i] if i < len(column) else "" for column in columns)]
        for i, first in enumerate(lines)
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns) + 1)]
    return [
        "    ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _like(
    axis: int,
    taps: Sequence[Sequence[Sequence[int]]],
    kernel: Sequence[int],
    stride: Sequence[int],
) -> int:
    """The first axis whose phases are those of this one."""
    facts = [(kernel[i], stride[i], tuple(map(tuple, taps[i]))) for i in range(3)]
    return facts.index(facts[axis])


def _phase(taps: Sequence[int], kernel: int) -> str:
    """The taps of one phase among those of the kernel, as ``0 . 2``."""
    if kernel > _MOST_TAPS:
        return f"{len(taps)} of {kernel} taps"
    width = len(str(kernel - 1))
    return " ".join((str(i) if i in taps else ".").rjust(width) for i in range(kernel))


def tile(sketch: Sketch, texts: Sequence[str]) -> list[str]:
    """The M x N tile of a product with texts on its right, or the texts alone where it has none.

    The box is as wide as its columns are many, and higher where its rows are.
    """
    right = LEFT + 2 + _WIDEST + 3
    if not sketch.n:
        return [texts[0], *(f"  {text}" for text in texts[1:])]
    name = f" N {sketch.n} "
    width = max(min(round(sketch.n / _COLUMNS), _WIDEST), len(name) + 2)
    inner = 1 if sketch.m <= _FLAT else 2
    box = [f"+{name.center(width, '-')}+", *[f"|{' ' * width}|"] * inner, f"+{'-' * width}+"]
    rows = [""] * len(box)
    rows[1] = f"M {sketch.m}"
    lines = [f"{row:>{LEFT - 1}} {edge}" for row, edge in zip(rows, box, strict=True)]
    lines += [""] * (len(texts) - len(lines))
    found = [*texts, *[""] * (len(lines) - len(texts))]
    return [f"{line:<{right}}{text}".rstrip() for line, text in zip(lines, found, strict=True)]
