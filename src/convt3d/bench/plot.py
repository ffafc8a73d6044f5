"""Draws a record: speed-up bars for each pass, and a roofline. Needs the extra ``plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from convt3d.bench.cases import PASSES
from convt3d.bench.record import Record
from convt3d.bench.report import Line, headline, lines

FASTER, SLOWER, PEER = "#4c72b0", "#c44e52", "#dd8452"
PASS_COLORS = dict(zip(PASSES, ("#4c72b0", "#55a868", "#8172b3", "#937860"), strict=True))
SUFFIXES = (".png", ".svg", ".pdf")
MOST_LABELS = 24  # more names in a roofline hide each other
# Text stays text, and the same record gives the same file: a change of a figure is a change in it.
_SETTINGS: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "convt3d", "font.size": 9}


def draw(record: Record, path: Path) -> None:
    """Write speed-up bars and the roofline of a record into one .png, .svg or .pdf file.

    A bar is the time of PyTorch as it comes over ours, on a logarithmic scale from 1; a diamond is
    the same for the fastest peer. In the roofline (Williams, Waterman and Patterson, 2009) a dot is
    what we reach, a ring what PyTorch reaches, and the line the measured ceilings.

    Raises:
        ValueError: no row has a speed-up or a limit.
    """
    found = lines(record)
    passes = [name for name in PASSES if any(_shown(line, name) for line in found)]
    limited = [line for line in found if line.limit is not None and line.ours]
    if not passes and not limited:
        raise ValueError("the record has neither speed-ups nor limits to draw")
    layers = list(dict.fromkeys(_layer(line, found) for line in found))
    widths = [3.4] * len(passes) + [5.6] * bool(limited)
    size = (sum(widths) + 1.6, max(4.2, 0.24 * len(layers) + 1.5))
    with plt.rc_context(_SETTINGS):
        figure, row = plt.subplots(
            1, len(widths), figsize=size, width_ratios=widths, layout="constrained", squeeze=False
        )
        for name, axes in zip(passes, row[0], strict=False):
            _speedups([line for line in found if _shown(line, name)], layers, found, axes)
            axes.set_title(name)
        if passes:
            handles, labels = row[0][0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower left", ncols=2, fontsize=7)
        for axes in row[0][1 : len(passes)]:
            axes.set_yticklabels([])
        if limited:
            _roofline(limited, row[0][-1])
        figure.suptitle(headline(record), fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=130, metadata=metadata)
        plt.close(figure)


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


def _speedups(shown: list[Line], layers: list[str], found: list[Line], axes: Any) -> None:
    places = [layers.index(_layer(line, found)) for line in shown]
    values = [line.speedup or 1.0 for line in shown]
    axes.barh(
        places,
        [value - 1 for value in values],
        left=1,
        color=[FASTER if value >= 1 else SLOWER for value in values],
        label="PyTorch as it comes",
    )
    peers = [(p, line.speedup_best) for p, line in zip(places, shown, strict=True)]
    known = [(place, value) for place, value in peers if value]
    axes.plot(
        [value for _, value in known],
        [place for place, _ in known],
        "D",
        color=PEER,
        markersize=4,
        label="the best peer",
    )
    ends = [max(value, best or value, 1.0) for value, (_, best) in zip(values, peers, strict=True)]
    for place, value, end in zip(places, values, ends, strict=True):
        axes.annotate(
            f"{value:.1f}x", (end, place), (5, 0), textcoords="offset points", va="center", size=7
        )
    least = min([1.0, *values, *(value for _, value in known)])
    axes.set_xlim(least / 1.3, max(ends) * (max(ends) / least) ** 0.25)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(layers)), layers)
    axes.set_ylim(len(layers) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("times faster than")


def _roofline(limited: list[Line], axes: Any) -> None:
    for mode in dict.fromkeys(line.mode for line in limited):
        mine = [line for line in limited if line.mode == mode]
        limits = [line.limit for line in mine if line.limit is not None]
        peak = max(limit["matrix_tflops"] for limit in limits)
        copy = max(limit["copy_tbytes"] for limit in limits)
        intensity = [_intensity(limit) for limit in limits]
        ridge = peak / copy
        reach = [min(*intensity, ridge) / 2, ridge, max(*intensity, ridge) * 2]
        label = f"{mode}: {peak:.3g} TFLOP/s, {copy:.3g} TB/s, measured"
        axes.plot(reach, [min(peak, copy * x) for x in reach], "k-", linewidth=1, label=label)
        best = {line.shape: line for line in sorted(mine, key=lambda line: -(line.ours or 0))}
        for x, limit, line in zip(intensity, limits, mine, strict=True):
            color = PASS_COLORS[line.operation]
            rate = limit["gflop"] / (line.ours or 1.0)
            if line.default:
                theirs = limit["gflop"] / line.default
                axes.plot([x, x], [theirs, rate], color=color, linewidth=0.6, alpha=0.5)
                axes.plot(x, theirs, "o", color=color, markersize=4, fillstyle="none")
            axes.plot(x, rate, "o", color=color, markersize=4)
            if line is best[line.shape] and len(best) <= MOST_LABELS:
                axes.annotate(line.shape, (x, rate), (3, 3), textcoords="offset points", size=5)
    for operation in (name for name in PASSES if any(line.operation == name for line in limited)):
        axes.plot([], [], "o", color=PASS_COLORS[operation], markersize=4, label=operation)
    axes.plot([], [], "o", color="gray", markersize=4, fillstyle="none", label="PyTorch")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("TFLOP/s")
    axes.set_title("roofline")
    axes.legend(loc="lower right", fontsize=7)


def _intensity(limit: dict[str, Any]) -> float:
    """Operations per byte, each tensor touched once."""
    return float(limit["gflop"] / limit["mbytes"] * 1e3)
