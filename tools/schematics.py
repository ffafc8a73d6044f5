"""The explanatory drawings of docs/how-it-works.md, as SVG text; written by ``make figures``.

What they show of phases and taps comes from ``convt3d.polyphase``, so they cannot tell a lie.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from convt3d.polyphase import axis_phases

INK, SOFT, EMPTY, INPUT = "#24292f", "#6e7781", "#eef1f4", "#d8dee6"
PHASES = ("#7aa6d8", "#e5a15f", "#86bf85", "#b995cf")
TAPS = ("#1f5fa8", "#c2410c", "#2f7d32", "#7b3fa0", "#a11d4b")

# Kernel, stride, padding, dilation of the axis that the drawings show, with output_padding 1.
AXIS = (3, 2, 1, 1)


class Drawing:
    """SVG elements on a white ground."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title, self.elements = (width, height), title, list[str]()

    def box(self, x: float, y: float, w: float, h: float, fill: str, text: str = "") -> None:
        """A rectangle, with a text in its middle."""
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" '
            f'stroke="{INK}" stroke-width="0.8"/>'
        )
        if text:
            self.text(x + w / 2, y + h / 2 + 4, text, anchor="middle")

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", size: int = 12, fill: str = INK
    ) -> None:
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{fill}">{text}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], color: str, arrow: bool = True) -> None:
        """A line through points, with an arrow at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = ' marker-end="url(#tip)"' if arrow else ""
        self.elements.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.4"{end}/>'
        )

    def svg(self) -> str:
        width, height = self.size
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
            'markerHeight="6" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="context-stroke"/>'
            "</marker></defs>"
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                f'width="{width}" height="{height}" role="img" '
                'font-family="Helvetica, Arial, sans-serif">',
                f"<title>{self.title}</title>",
                tip,
                f'<rect width="{width}" height="{height}" fill="white"/>',
                *self.elements,
                "</svg>\n",
            ]
        )


def drawings(folder: Path) -> dict[Path, str]:
    """Every drawing by the path where it belongs."""
    return {
        folder / "polyphase.svg": polyphase(),
        folder / "phases.svg": phases(),
        folder / "tile.svg": tile(),
    }


def polyphase(inputs: int = 5) -> str:
    """One axis: zero insertion, and the same outputs by phase."""
    kernel, stride, padding, _ = AXIS
    table = axis_phases(*AXIS)
    outputs = inputs * stride
    cell, left, height = 52, 150, 26
    d = Drawing(left + outputs * cell + 30, 436, "Polyphase form of one axis")

    def label(y: float, *lines: str) -> None:
        for i, text in enumerate(lines):
            d.text(12, y + 15 * i, text, fill=SOFT if i else INK)

    d.text(12, 22, "Zero insertion: a convolution over the input spread out by the stride", size=14)
    y = 38
    label(y + 12, "input with zeros", f"between (stride {stride})")
    for o in range(outputs):
        inserted = o % stride
        d.box(
            left + o * cell,
            y,
            cell,
            height,
            EMPTY if inserted else INPUT,
            "0" if inserted else f"x{o // stride}",
        )
    y += 52
    label(y + 12, "its products", "for y2 and y3")
    for row, o in enumerate((2, 3)):
        # In the spread-out input, output o reads positions o + padding - k.
        for k in range(kernel):
            at = o + padding - k
            used = at % stride == 0
            d.box(
                left + at * cell,
                y + 30 * row,
                cell,
                height,
                "white" if used else EMPTY,
                f"w{k} x{at // stride}" if used else f"w{k} · 0",
            )

    y = 186
    d.text(12, y, "Polyphase: outputs with the same o mod stride share their taps", size=14)
    y += 16
    label(y + 17, "input x")
    for i in range(inputs):
        d.box(left + stride * i * cell, y, cell, height, INPUT, f"x{i}")
    top, y = y + height, y + 102
    label(y + 17, "output y")
    for o in range(outputs):
        d.box(left + o * cell, y, cell, height, PHASES[o % stride], f"y{o}")
        for tap in table[o % stride]:
            i = o // stride + tap.shift
            if 0 <= i < inputs:
                start = left + (stride * i + 0.5) * cell
                end = left + (o + 0.5) * cell
                d.line([(start, top), (end, y - 1)], TAPS[tap.kernel_index])
    for k in range(kernel):
        d.line([(left + 70 * k, y + 48), (left + 70 * k + 22, y + 48)], TAPS[k])
        d.text(left + 70 * k + 28, y + 52, f"tap w{k}")
    y += 82
    for r, taps in enumerate(table):
        d.box(12, y - 14, 18, 18, PHASES[r])
        terms = " + ".join(
            f"w{tap.kernel_index} x[q{f' + {tap.shift}' if tap.shift else ''}]" for tap in taps
        )
        d.text(40, y, f"phase {r}:  y[{stride}q{f' + {r}' if r else ''}] = {terms or 'bias only'}")
        y += 24
    return d.svg()


def phases(inputs: int = 4) -> str:
    """Two axes: the sub-kernel of every phase, and how phases interleave in the output."""
    kernel, stride, *_ = AXIS
    table = axis_phases(*AXIS)
    cell = 30
    d = Drawing(710, 356, "Phases of two axes interleave in the output")

    def color(row: int, column: int) -> str:
        return PHASES[row * stride + column]

    d.text(20, 24, "kernel, by phase", size=14)
    kernels = {}
    for r, c in product(range(stride), range(stride)):
        for a, b in product(table[r], table[c]):
            kernels[a.kernel_index, b.kernel_index] = color(r, c)
    for (a, b), fill in sorted(kernels.items()):
        d.box(20 + b * cell, 44 + a * cell, cell, cell, fill, f"{a}{b}")

    d.text(165, 24, "each phase: stride-1 correlation", size=14)
    for index, (r, c) in enumerate(product(range(stride), range(stride))):
        y = 44 + index * 70
        rows, columns = table[r][::-1], table[c][::-1]
        for i, a in enumerate(rows):
            for j, b in enumerate(columns):
                name = f"{a.kernel_index}{b.kernel_index}"
                d.box(165 + j * 26, y + i * 26, 26, 26, color(r, c), name)
        d.text(228, y + 22, "*", size=16)
        for i, j in product(range(inputs), range(inputs)):
            d.box(246 + j * 14, y - 2 + i * 14, 14, 14, INPUT)
        d.text(310, y + 22, "=", size=16)
        for i, j in product(range(inputs), range(inputs)):
            d.box(330 + j * 14, y - 2 + i * 14, 14, 14, color(r, c))
        d.line([(392, y + 26), (440, 60 + 8 * cell / 2)], color(r, c))

    d.text(450, 24, f"output: phases interleave, {stride} by {stride}", size=14)
    for i, j in product(range(stride * inputs), range(stride * inputs)):
        d.box(450 + j * cell, 44 + i * cell, cell, cell, color(i % stride, j % stride))
    counts = [len(taps) for taps in table]
    d.text(
        20,
        342,
        f"{kernel} x {kernel} taps in all: "
        + " + ".join(str(a * b) for a, b in product(counts, counts))
        + f" = {sum(counts) ** 2}; no product with an inserted zero",
        fill=SOFT,
    )
    return d.svg()


def tile() -> str:
    """What one CTA does: source box, taps, phases, staged epilogue."""
    _, stride, *_ = AXIS
    table = axis_phases(*AXIS)
    cell, units = 22, 4
    shifts = [tap.shift for taps in table for tap in taps]
    reach = units + max(shifts) - min(shifts)
    d = Drawing(900, 372, "One CTA: source box, taps, phases, staged epilogue")
    columns = (20, 220, 440, 660)
    heads = ("1  source box", "2  taps", "3  phases", "4  staged epilogue")
    for x, head in zip(columns, heads, strict=True):
        d.text(x, 24, head, size=15)

    def notes(x: float, *lines: str) -> None:
        for i, text in enumerate(lines):
            d.text(x, 300 + 16 * i, text, fill=SOFT)

    x, y = columns[0], 60
    for i, j in product(range(7), range(7)):
        d.box(x + j * 20, y + i * 20, 20, 20, EMPTY)
    for i, j in product(range(reach), range(reach)):
        halo = i >= units or j >= units
        d.box(x + (1 + j) * 20, y + (1 + i) * 20, 20, 20, "#f3d9a4" if halo else INPUT)
    notes(
        x,
        "units of the tile and the",
        "reach of the taps, a few",
        "channels at a time; zeros",
        "outside of the input",
    )

    x = columns[1]
    d.text(x, 50, "shared memory", fill=SOFT)
    for layer in (2, 1, 0):
        for i, j in product(range(reach), range(reach)):
            d.box(x + j * cell + 7 * layer, y + i * cell + 7 * (2 - layer), cell, cell, INPUT)
    for index, tap in enumerate(tap for taps in table for tap in taps):
        low = 3 + 5 * index
        d.elements.append(
            f'<rect x="{x + tap.shift * cell + low:g}" y="{y + 14 + tap.shift * cell + low:g}" '
            f'width="{units * cell - 2 * low:g}" height="{units * cell - 2 * low:g}" '
            f'fill="none" stroke="{TAPS[tap.kernel_index]}" stroke-width="2"/>'
        )
    d.box(x, 222, 150, 24, "white", "packed weights")
    notes(
        x,
        "every tap reads the same box",
        "at a constant shift: each value",
        "is fetched once and used by all",
        "taps of all phases",
    )

    x = columns[2]
    d.text(x, 50, "registers, tensor cores", fill=SOFT)
    for r, c in product(range(stride), range(stride)):
        px, py = x + c * 84, y + r * 84
        for i, j in product(range(units), range(units)):
            d.box(px + j * 19, py + i * 19, 19, 19, PHASES[r * stride + c])
    notes(
        x,
        "an accumulator for each phase:",
        "units x output channels; only",
        "the taps that the phase has",
        "are multiplied",
    )

    x = columns[3]
    d.text(x, 50, "shared memory, then rows", fill=SOFT)
    for i, j in product(range(stride * units), range(stride * units)):
        d.box(x + j * 22, y + i * 20, 22, 20, PHASES[(i % stride) * stride + j % stride])
    for i in range(0, stride * units, 2):
        d.line([(x + 178, y + 10 + 20 * i), (x + 222, y + 10 + 20 * i)], SOFT)
    notes(
        x,
        "phases meet in shared memory,",
        "so that stores are whole rows",
        "of 128 bytes, bias added; no",
        "atomics, the same bits each run",
    )

    for start, end in ((164, 214), (378, 430), (612, 652)):
        d.line([(start, 140), (end, 140)], INK)
    d.line([(374, 234), (430, 190)], INK)
    return d.svg()
