"""What follows a convolution, as values over samples, channels and positions.

A :class:`Value` has five extents (N, C, D, H, W); an extent of 1 is the same along the axis. How it
is computed is one of few ways: element by element, by a window of positions, or by a reduction over
whole axes. Softmax and norms are made of these: a softmax is ``exp(x - logsumexp(x))``, a norm
``(x - mean(x)) * rstd(x)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

from convt3d.export.layer import ExportError

Size = tuple[int, int, int, int, int]
AXES = "ncdhw"
POSITIONS = "dhw"


@dataclass(frozen=True, eq=False)
class Value:
    """A value by its name, which generated code has, too."""

    name: str
    size: Size

    @property
    def parts(self) -> tuple[Value, ...]:
        """What it is computed from."""
        return ()

    def extent(self, axes: str) -> int:
        return math.prod(self.size[AXES.index(axis)] for axis in axes)


@dataclass(frozen=True, eq=False)
class Stored(Value):
    """A tensor in memory, contiguous."""


@dataclass(frozen=True, eq=False)
class Pointwise(Value):
    """``text``, in which {0} and so on stand for its arguments' values at the same place."""

    text: str
    arguments: tuple[Value, ...]
    linear: bool = False  # in each argument, if the others do not change

    @property
    def parts(self) -> tuple[Value, ...]:
        return self.arguments


@dataclass(frozen=True, eq=False)
class Window(Value):
    """Sum, mean, largest or smallest value of a window of positions, which lies inside."""

    kind: str
    argument: Value
    window: tuple[int, int, int]
    stride: tuple[int, int, int]

    @property
    def parts(self) -> tuple[Value, ...]:
        return (self.argument,)


@dataclass(frozen=True, eq=False)
class Reduction(Value):
    """Over whole axes; where ``size`` keeps groups of channels, over the channels of each.

    ``kind``: sum, mean, max, min, logsumexp, or rstd (1 / sqrt(variance + eps)).
    """

    kind: str
    argument: Value
    axes: str
    eps: float = 0.0

    @property
    def parts(self) -> tuple[Value, ...]:
        return (self.argument,)


def walk(value: Value, stored: dict[Value, Stored] | None = None) -> Iterator[Value]:
    """A value and, behind it, what it is computed from, each once; not beyond what is stored."""
    seen: set[Value] = set()
    left = [value]
    while left:
        at = left.pop()
        if at not in seen:
            seen.add(at)
            yield at
            left += () if stored and at in stored else at.parts


def with_extents(size: Size, axes: str, extent: int = 1) -> Size:
    """A size with these axes of this extent."""
    n, c, d, h, w = (extent if axis in axes else s for axis, s in zip(AXES, size, strict=True))
    return (n, c, d, h, w)


def pointwise(name: str, text: str, *arguments: Value, linear: bool = False) -> Pointwise:
    """An element-wise value; groups of channels count as channels.

    Raises:
        ExportError: extents that do not broadcast.
    """
    sizes = [argument.size for argument in arguments]
    n, c, d, h, w = (max(extents) for extents in zip(*sizes, strict=True))
    for axis, (most, *extents) in enumerate(zip((n, c, d, h, w), *sizes, strict=True)):
        if any(n not in (1, most) and (axis != 1 or most % n) for n in extents):
            raise ExportError(f"{name}: extents {sizes} do not broadcast")
    return Pointwise(name, (n, c, d, h, w), text, arguments, linear)


def drawn_inside(
    name: str, value: Value, make: Callable[[Value, str], Value], keep: Container[Value]
) -> Value:
    """``make`` of a value, a mean over positions, or rather of what the value is linear in.

    A mean of a norm is the norm of a mean, which takes no second look at all values.

    Args:
        name: of the result.
        make: the mean of a value, by a name.
        keep: values of which other reductions are taken, in the same kernel.
    """
    around: list[Pointwise] = []
    while isinstance(value, Pointwise) and value.linear and value not in keep:
        varying = [a for a in value.arguments if a.extent(POSITIONS) > 1]
        if len(varying) != 1:
            break
        around.append(value)
        value = varying[0]
    names = [f"{name}_step{number}" for number in range(len(around))] + [name]
    made = make(value, names.pop(0))
    while around:
        outer = around.pop()
        arguments = [made if a is value else a for a in outer.arguments]
        value, made = outer, pointwise(names.pop(0), outer.text, *arguments, linear=True)
    return made
