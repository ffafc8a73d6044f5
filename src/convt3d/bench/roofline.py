"""The roofline of a record, with names beside its dots that do not cover each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import cos, hypot, pi, sin
from typing import Any, NamedTuple

from matplotlib.collections import LineCollection
from matplotlib.font_manager import FontProperties

from convt3d.bench.cases import PASSES
from convt3d.bench.report import Line

PASS_COLORS = dict(zip(PASSES, ("#4c72b0", "#55a868", "#8172b3", "#937860"), strict=True))
MOST_LABELS = 26  # more names find no room
_LABEL = 6  # points
_LEADER = 9  # points from a dot to its name above which a line joins them
_TITLE, _SMALL = 10, 7


class Box(NamedTuple):
    """A rectangle, in points."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: Box) -> float:
        """Area in common, in square points."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(width, 0.0) * max(height, 0.0)

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.top - self.bottom)


Point = tuple[float, float]


def draw(limited: Sequence[Line], axes: Any, scale: Callable[[Any, str, float], None]) -> None:
    """Draw the lines, each of which has a time of ours and a limit, and name their layers."""
    roofs: list[list[Point]] = []
    rates: list[Point] = []
    falls: list[tuple[Point, Point]] = []  # from ours to PyTorch's
    for mode in dict.fromkeys(line.mode for line in limited):
        mine = [line for line in limited if line.mode == mode]
        roof, label = _roof(mine)
        roofs.append(roof)
        axes.plot(*zip(*roof, strict=True), "k-", linewidth=1, label=label)
    for operation in (name for name in PASSES if any(line.operation == name for line in limited)):
        mine = [line for line in limited if line.operation == operation]
        color = PASS_COLORS[operation]
        ours = [_point(line, line.ours) for line in mine]
        both = [(point, _point(line, line.default)) for point, line in zip(ours, mine, strict=True)]
        pairs = [pair for pair in both if pair[1] is not None]
        axes.add_collection(LineCollection(pairs, colors=color, linewidths=0.6, alpha=0.5))
        if pairs:
            axes.plot(
                *zip(*(theirs for _, theirs in pairs), strict=True),
                "o",
                color=color,
                markersize=4,
                fillstyle="none",
            )
        axes.plot(*zip(*ours, strict=True), "o", color=color, markersize=4, label=operation)
        falls += pairs
        rates += [point for pair in both for point in pair if point is not None]
    axes.plot([], [], "o", color="gray", markersize=4, fillstyle="none", label="PyTorch")
    _frame(axes, roofs, rates, scale)
    best: dict[str, Line] = {}
    for line in limited:  # a layer is named once, at its highest dot
        if line.shape not in best or _rate(line, line.ours) > _rate(best[line.shape], None):
            best[line.shape] = line
    if len(best) <= MOST_LABELS:
        _name(
            {name: _point(line, line.ours) for name, line in best.items()},
            rates,
            [*roofs, *falls],
            axes,
        )


def _rate(line: Line, ms: float | None) -> float:
    """TFLOP/s of a line at a time, ours unless it is given."""
    return float((line.limit or {})["gflop"] / (ms or line.ours or 1.0))


def _point(line: Line, ms: float | None) -> Any:
    """Operations per byte, each tensor touched once, and TFLOP/s; None without a time."""
    limit = line.limit or {}
    return None if not ms else (float(limit["gflop"] / limit["mbytes"] * 1e3), _rate(line, ms))


def _roof(mine: Sequence[Line]) -> tuple[list[Point], str]:
    """The ceilings of one dtype and what they are called."""
    limits = [line.limit for line in mine if line.limit is not None]
    peak = max(limit["matrix_tflops"] for limit in limits)
    copy = max(limit["copy_tbytes"] for limit in limits)
    intensity = [_point(line, line.ours)[0] for line in mine]
    ridge = peak / copy
    reach = [min(*intensity, ridge) / 2, ridge, max(*intensity, ridge) * 2]
    label = f"{mine[0].mode}: {peak:.3g} TFLOP/s, {copy:.3g} TB/s, measured"
    return [(x, min(peak, copy * x)) for x in reach], label


def _frame(
    axes: Any,
    roofs: Sequence[Sequence[Point]],
    rates: Sequence[Point],
    scale: Callable[[Any, str, float], None],
) -> None:
    """Limits, ticks, title and legend."""
    points = [*rates, *(point for roof in roofs for point in roof)]
    axes.set_xlim(min(x for x, _ in points) / 1.2, max(x for x, _ in points) * 1.2)
    axes.set_ylim(min(y for _, y in points) / 1.4, max(y for _, y in points) * 2.4)
    box = axes.get_position()
    width, height = axes.figure.get_size_inches()
    scale(axes, "x", box.width * width)
    scale(axes, "y", box.height * height)
    axes.set_xlabel("operations per byte", size=8)
    axes.set_ylabel("TFLOP/s", size=8)
    axes.set_title("roofline", fontsize=_TITLE)
    count = len(axes.get_legend_handles_labels()[0])
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(0, -0.5 / (box.height * height)),
        borderaxespad=0,
        ncols=count if box.width * width > 6 else 3,
        fontsize=_SMALL,
    )


def _name(
    dots: dict[str, Point], rates: Sequence[Point], drawn: Sequence[Sequence[Point]], axes: Any
) -> None:
    """Write each name where it covers no other name, and as few dots and lines as can be."""
    dpi = axes.figure.dpi
    corners = axes.transAxes.transform([(0, 0), (1, 1)]) * 72 / dpi
    inside = Box(*(float(v) for v in (*(corners[0] + 3), *(corners[1] - 3))))

    def to_points(places: Sequence[Point]) -> list[Point]:
        return [(float(x), float(y)) for x, y in axes.transData.transform(places) * 72 / dpi]

    covered = [Box(x - 2.5, y - 2.5, x + 2.5, y + 2.5) for x, y in to_points(rates)]
    for line in drawn:
        covered += [Box(x - 0.5, y - 1, x + 0.5, y + 1) for x, y in _along(to_points(line))]
    places = to_points(list(dots.values()))
    order = sorted(zip(dots, places, strict=True), key=lambda item: (-item[1][1], item[1][0]))
    sizes = [text_size(axes.figure, name, _LABEL) for name, _ in order]
    boxes = place([point for _, point in order], sizes, covered, inside)
    for (name, (x, y)), box in zip(order, boxes, strict=True):
        if box is None:
            continue
        # The nearest point of the name, and the line to it where the name is not beside its dot.
        near = (min(max(x, box.left), box.right), min(max(y, box.bottom), box.top))
        far = hypot(near[0] - x, near[1] - y) > _LEADER
        arrow = {"arrowstyle": "-", "linewidth": 0.4, "color": "gray", "shrinkA": 0, "shrinkB": 2}
        if far:
            offset = near[0] - x, near[1] - y
            axes.annotate(
                "", dots[name], offset, textcoords="offset points", arrowprops=arrow, zorder=1
            )
        axes.annotate(
            name,
            dots[name],
            (box.left + 2 - x, (box.bottom + box.top) / 2 - y),
            textcoords="offset points",
            va="center_baseline",
            size=_LABEL,
        )


def place(
    dots: Sequence[Point], sizes: Sequence[Point], covered: Sequence[Box], inside: Box
) -> list[Box | None]:
    """Where names of these sizes go: within ``inside``, clear of each other; all in points.

    A name comes as near to its dot as can be without covering what is in ``covered``; it is None
    if no place near the dot is free of other names.
    """
    placed: list[Box] = []
    result: list[Box | None] = []
    for (x, y), (width, height) in zip(dots, sizes, strict=True):
        best, least = None, float("inf")
        for dx, dy in _directions():
            distance = hypot(dx, dy)
            if distance >= least:
                continue  # it costs no less
            # The box touches the tip of the vector with the side that faces the dot.
            left = x + dx - width * (1 - _unit(dx)) / 2
            bottom = y + dy - height * (1 - _unit(dy)) / 2
            box = Box(left, bottom, left + width, bottom + height)
            if any(box.overlap(other) > 0 for other in placed):
                continue
            if box.overlap(inside) < box.area - 1e-6:
                continue
            cost = distance + 4 * sum(box.overlap(other) for other in covered)
            if cost < least:
                best, least = box, cost
        result.append(best)
        if best is not None:
            placed.append(best)
    return result


def _directions() -> Iterator[Point]:
    """Vectors from a dot to a name, in points, in sixteen directions."""
    for distance in (4, 6, 9, 13, 18, 24, 31, 39, 48, 58, 70, 84):
        for i in range(16):
            yield distance * cos(pi * i / 8), distance * sin(pi * i / 8)


def _unit(value: float) -> int:
    return 0 if abs(value) < 1e-3 else 1 if value > 0 else -1


def _along(corners: Sequence[Point]) -> Iterator[Point]:
    """Points every two points (1/36 inch) along a line through corners."""
    for (x0, y0), (x1, y1) in pairwise(corners):
        steps = max(int(hypot(x1 - x0, y1 - y0) / 2), 1)
        for i in range(steps + 1):
            yield x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps


def text_size(figure: Any, text: str, points: float) -> tuple[float, float]:
    """Width and height that a text takes with a little room around it, in points."""
    renderer = figure.canvas.get_renderer()
    width, height, _ = renderer.get_text_width_height_descent(
        text, FontProperties(size=points), False
    )
    return 1.03 * width * 72 / figure.dpi + 4, height * 72 / figure.dpi + 1
