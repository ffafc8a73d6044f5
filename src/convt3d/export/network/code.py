"""C++ statements that compute values at one place of a loop."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from convt3d.export.formulas import literal
from convt3d.export.network.values import (
    POSITIONS,
    Pointwise,
    Stored,
    Value,
    Window,
)

STATES = {"sum": "Sum", "mean": "Sum", "max": "Max", "min": "Min", "logsumexp": "LogSumExp"}
"""States of ``loops.cuh`` by kinds of reductions."""


@dataclass(frozen=True)
class Place:
    """Indices at hand: text by axis, ``p`` for all of ``positions`` together, "" if there is none.

    ``channels``: that the index of channels runs over.
    """

    index: Mapping[str, str]
    positions: tuple[int, int, int]
    channels: int
    p: str = "p"


@dataclass
class Code:
    """Statements, and the names of what they have computed.

    Attributes:
        stored: values that are in memory.
        outer: statements before these, in whose loop they are.
        above: the axis of this loop; what is the same along it is computed before the loop.
        depth: of windows around these.
    """

    place: Place
    stored: Mapping[Value, Stored]
    outer: Code | None = None
    above: str = ""
    depth: int = 0
    lines: list[str] = field(default_factory=list)
    known: dict[Value, str] = field(default_factory=dict)
    tensors: dict[str, None] = field(default_factory=dict)

    def use(self, value: Value) -> str:
        """An expression for a value; statements before it are added."""
        at: Code | None = self
        while at is not None:
            if value in at.known:
                return at.known[value]
            at = at.outer
        if self.outer is not None and self.above and value.extent(self.above) == 1:
            return self.outer.use(value)
        name = value.name
        if isinstance(value, Stored) or value in self.stored:
            stored = self.stored.get(value, value)
            text, name = self._load(stored), f"{stored.name}_value"
            if stored.extent(POSITIONS) == 1:
                return text
        elif isinstance(value, Pointwise):
            text = value.text.format(*(self.use(a) for a in value.arguments))
        elif isinstance(value, Window):
            text = self._window(value)
        else:
            raise AssertionError(f"{name} is neither stored nor held")
        self.lines += f"const float {name} = {text};".split("\n")
        self.known[value] = name
        return name

    def inside(self, place: Place, above: str = "") -> Code:
        """Statements of an inner loop, which know what these have computed."""
        return Code(place, self.stored, self, above, self.depth, tensors=self.tensors)

    def _load(self, value: Value) -> str:
        self.tensors[value.name] = None
        place, (n, c, *positions) = self.place, value.size
        offset = place.index["n"] if n > 1 else ""
        if c > 1:
            each = place.channels // c
            channel = place.index["c"] + (f" / {each}" if each > 1 else "")
            offset = f"({offset} * {c} + {channel})" if offset else channel
        if place.p and tuple(positions) == place.positions:
            found = [(place.p, math.prod(positions))]
        else:
            found = list(zip((place.index[axis] for axis in POSITIONS), positions, strict=True))
        for index, extent in found:
            if extent > 1:
                offset = f"({offset} * {extent} + {index})" if offset else index
        if offset.startswith("("):
            offset = offset[1:-1]
        return f"{value.name}[{offset or '0'}]"

    def _window(self, value: Window) -> str:
        level = self.depth + 1
        offsets = [f"{letter}{level}" for letter in "ijk"]
        names = {axis: f"{axis}{level}" for axis in POSITIONS}
        place = replace(self.place, index={**self.place.index, **names}, p="")
        inner = Code(place, self.stored, depth=level, tensors=self.tensors)
        result = inner.use(value.argument)
        inner.lines.append(f"return {result};")
        starts = {
            names[axis]: f"{self.place.index[axis]} * {step} + {offset}" if size > 1 else offset
            for axis, step, offset, size in zip(
                POSITIONS, value.stride, offsets, value.size[2:], strict=True
            )
        }
        body = indented([*declared(starts, inner.lines), *inner.lines])
        extents = ", ".join(map(str, value.window))
        arguments = ", ".join(f"int {offset}" for offset in offsets)
        text = f"window<{STATES[value.kind]}, {extents}>([&]({arguments}) {{\n{body}}})"
        return text + (f" * {literal(1 / math.prod(value.window))}" if value.kind == "mean" else "")


def words(lines: Iterable[str]) -> set[str]:
    """All names in some lines."""
    return set(re.findall(r"\w+", "\n".join(lines)))


def declared(definitions: Mapping[str, str], lines: Iterable[str]) -> list[str]:
    """Definitions of those integers, in order, that the lines or later definitions name."""
    kept: list[str] = []
    for name, text in reversed(list(definitions.items())):
        if name in words([*lines, *kept]):
            kept.insert(0, f"const int {name} = {text};")
    return kept


def indented(lines: Iterable[str]) -> str:
    return "".join(f"  {line}\n" for line in lines)
