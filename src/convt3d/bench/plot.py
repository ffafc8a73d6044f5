"""Draws a record: speed-up bars for each pass, and a roofline. Needs the extra ``plot``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from math import log10
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from convt3d.bench import roofline
from convt3d.bench.cases import PASSES
from convt3d.bench.record import Record
from convt3d.bench.report import Line, headline, lines

FASTER, SLOWER, PEER, BAND = "#4c72b0", "#c44e52", "#dd8452", "#f0f0f0"
SUFFIXES = (".png", ".svg", ".pdf")
# Text stays text, and the same record gives the same file: a change of a figure is a change in it.
_SETTINGS: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "convt3d", "font.size": 9}
_SMALL = 7  # points: ticks, legends, values beside bars

# Inches.
_MARGIN = 0.2
_HEAD = 0.55  # headline and titles
_FOOT = 0.85  # ticks, name of the axis and legend
_BARS, _BARS_ALONE, _GAP = 2.4, 3.4, 0.2
_ROW, _WIDE_ROW, _PLEASANT = 0.2, 0.3, 4.4  # height of a row; of few rows; what few rows fill
_ROOF_WIDTH, _ROOF_HEIGHT, _ROOF_LABELS, _ROOF_GAP = 5.0, 4.4, 0.65, 0.3


@dataclass(frozen=True)
class _Layout:
    """Where everything lies, in inches from the lower left corner: left, bottom, width, height."""

    size: tuple[float, float]
    bars: list[tuple[float, float, float, float]]
    roof: tuple[float, float, float, float] | None


def draw(record: Record, path: Path) -> None:
    """Write speed-up bars and the roofline of a record into one .png, .svg or .pdf file.

    A bar is the time of PyTorch as it comes over ours, on a logarithmic scale from 1; a diamond is
    the same for the fastest peer. In the roofline (Williams, Waterman and Patterson, 2009) a dot is
    what we reach, a ring what PyTorch reaches, and the line the measured ceilings.

    Raises:
        ValueError: no row has a speed-up or a limit.
    """
    with plt.rc_context(_SETTINGS):
        figure = made(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=130, metadata=metadata)
        plt.close(figure)


def made(record: Record) -> Any:
    """The figure that :func:`draw` writes, which the caller closes.

    Raises:
        ValueError: no row has a speed-up or a limit.
    """
    found = lines(record)
    passes = [name for name in PASSES if any(_shown(line, name) for line in found)]
    limited = [line for line in found if line.limit is not None and line.ours]
    if not passes and not limited:
        raise ValueError("the record has neither speed-ups nor limits to draw")
    layers = list(dict.fromkeys(_layer(line, found) for line in found))
    figure = plt.figure()
    title = headline(record)
    names = max(_text_width(figure, name, _name_size(layers)) for name in layers)
    layout = _layout(len(passes), len(layers), bool(limited), names, _text_width(figure, title, 8))
    figure.set_size_inches(*layout.size)
    for index, (name, place) in enumerate(zip(passes, layout.bars, strict=True)):
        axes = figure.add_axes(_fractions(place, layout.size))
        _bars([line for line in found if _shown(line, name)], layers, found, axes, place[2])
        axes.set_title(name, fontsize=10)
        if index:
            axes.set_yticklabels([])
    if passes:
        left, bottom, *_ = layout.bars[0]
        below = (left / layout.size[0], (bottom - 0.5) / layout.size[1])
        _legend(figure, below, any((line.speedup or 1) < 1 for line in found))
    if layout.roof is not None:
        roofline.draw(limited, figure.add_axes(_fractions(layout.roof, layout.size)), scale)
    figure.text(0.5, 1 - 0.08 / layout.size[1], title, size=8, ha="center", va="top")
    return figure


def _layout(passes: int, layers: int, limits: bool, names: float, title: float) -> _Layout:
    """Bars of all passes side by side; the roofline right of one pass, and below several."""
    bars_width = _BARS_ALONE if passes == 1 else _BARS
    bars_height = max(_ROW * layers, min(_WIDE_ROW * layers, _PLEASANT))
    left = _MARGIN + names + 0.12
    right = left + passes * (bars_width + _GAP) if passes else _MARGIN
    width, height = right, _HEAD + bars_height + _FOOT
    beside = limits and passes <= 1
    if beside:
        width += _ROOF_LABELS + _ROOF_WIDTH + _MARGIN
        height = max(height, _HEAD + _ROOF_HEIGHT + _FOOT)
    width = max(width, title + 2 * _MARGIN)
    roof = None
    if beside:
        corner = width - _MARGIN - _ROOF_WIDTH, height - _HEAD - _ROOF_HEIGHT
        roof = (*corner, _ROOF_WIDTH, _ROOF_HEIGHT)
    else:  # a long headline makes room for longer bars
        bars_width += (width - right) / passes
    if limits and not beside:
        height += _ROOF_GAP + _ROOF_HEIGHT + _FOOT
        left_end = _MARGIN + _ROOF_LABELS
        roof = (left_end, _FOOT, width - left_end - _MARGIN, _ROOF_HEIGHT)
    bottom = height - _HEAD - bars_height
    bars = [
        (left + i * (bars_width + _GAP), bottom, bars_width, bars_height) for i in range(passes)
    ]
    return _Layout((width, height), bars, roof)


def _fractions(
    place: tuple[float, float, float, float], size: tuple[float, float]
) -> tuple[float, float, float, float]:
    left, bottom, width, height = place
    return left / size[0], bottom / size[1], width / size[0], height / size[1]


def _text_width(figure: Any, text: str, points: float) -> float:
    """Inches that a text takes."""
    return roofline.text_size(figure, text, points)[0] / 72


def _name_size(layers: list[str]) -> int:
    """Points of the names of layers."""
    return 9 if max(map(len, layers)) <= 32 else _SMALL


def _shown(line: Line, operation: str) -> bool:
    return line.operation == operation and line.speedup is not None


def _layer(line: Line, found: list[Line]) -> str:
    """Name of a line among all: with dtype and layout where they tell lines apart."""
    parts = [line.shape]
    if len({other.mode for other in found}) > 1:
        parts.append(line.mode)
    if len({other.layout for other in found}) > 1:
        parts.append(line.layout)
    return " ".join(parts)


def _bars(
    shown: list[Line], layers: list[str], found: list[Line], axes: Any, inches: float
) -> None:
    """Bars of one pass; ``inches`` is the width of its axes."""
    places = [layers.index(_layer(line, found)) for line in shown]
    values = [line.speedup or 1.0 for line in shown]
    _bands(layers, found, axes)
    axes.barh(
        places,
        [value - 1 for value in values],
        left=1,
        color=[FASTER if value >= 1 else SLOWER for value in values],
    )
    peers = [line.speedup_best for line in shown]
    known = [(value, place) for value, place in zip(peers, places, strict=True) if value]
    axes.plot(
        [value for value, _ in known], [place for _, place in known], "D", color=PEER, markersize=4
    )
    ends = [max(value, best or value, 1.0) for value, best in zip(values, peers, strict=True)]
    low = log10(min([1.0, *values, *(value for value, _ in known)]) / 1.2)
    high = log10(max(ends) * 1.2)
    for place, value, end in zip(places, values, ends, strict=True):
        text = f"{value:.1f}x"
        axes.annotate(
            text, (end, place), (5, 0), textcoords="offset points", va="center", size=_SMALL
        )
        # Bar, distance and text must fit: (end - low) / (high - low) * inches + text <= inches.
        room = inches - _text_width(axes.figure, text, _SMALL) - 0.15
        high = max(high, low + (log10(end) - low) * inches / room)
    axes.set_xlim(10**low, 10**high)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(layers)), layers, size=_name_size(layers))
    axes.set_ylim(len(layers) - 0.4, -0.6)
    scale(axes, "x", inches)
    axes.set_xlabel("speed-up", size=8)


def _bands(layers: list[str], found: list[Line], axes: Any) -> None:
    """Shade every other layer, where layers have several rows one after the other."""
    shape_of = {_layer(line, found): line.shape for line in found}
    rows_of = [list(rows) for _, rows in groupby(range(len(layers)), lambda i: shape_of[layers[i]])]
    if len(rows_of) == len(layers):
        return
    for rows in rows_of[1::2]:
        axes.axhspan(rows[0] - 0.5, rows[-1] + 0.5, color=BAND, linewidth=0, zorder=0)


def scale(axes: Any, axis: str, inches: float) -> None:
    """Make an axis logarithmic, with plain numbers as ticks that do not touch each other."""
    getattr(axes, f"set_{axis}scale")("log")
    low, high = getattr(axes, f"get_{axis}lim")()
    decades = abs(log10(high) - log10(low))
    # The closest of 1, 2, 5, 10 are 0.3 of a decade apart, and a number takes up to 0.3 inches.
    dense = 0.3 * inches / decades >= (0.34 if axis == "x" else 0.2)
    ticks = getattr(axes, f"{axis}axis")
    ticks.set_major_locator(LogLocator(subs=(1, 2, 5) if dense else (1,)))
    ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if dense:
        ticks.set_minor_locator(NullLocator())
    ticks.set_minor_formatter(NullFormatter())
    axes.tick_params(axis=axis, which="both", labelsize=_SMALL)


def _legend(figure: Any, corner: tuple[float, float], slower: bool) -> None:
    handles: list[Any] = [Patch(color=FASTER, label="over PyTorch as it comes")]
    if slower:
        handles.append(Patch(color=SLOWER, label="the same, below 1"))
    handles.append(Line2D([], [], color=PEER, marker="D", linestyle="", markersize=4))
    handles[-1].set_label("over the best peer")
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=corner,
        borderaxespad=0,
        ncols=len(handles) if len(handles) < 3 else 2,
        fontsize=_SMALL,
    )
