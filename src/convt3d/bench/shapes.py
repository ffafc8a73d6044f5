"""The layers that are measured: named ones from real models, and the user's own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from math import prod
from typing import Any

from convt3d.geometry import Geometry, Triple
from convt3d.layer import Layer

QUICK = ("kb68", "kb70", "kb72", "kb73", "kb73_g4", "kb77")
KINDS = ("transposed", "conv")
"""Kinds of layers; each is also a name that stands for all named layers of its kind."""
ALL = "all"  # stands for all named layers of both kinds


@dataclass(frozen=True)
class Shape:
    """One layer with the size of its input: what a row of a benchmark is about."""

    name: str
    batch: int
    input_size: Triple
    bias: bool
    geometry: Geometry
    origin: str = ""

    @property
    def x_size(self) -> tuple[int, ...]:
        """Size of the input, (N, C_in, D, H, W)."""
        return (self.batch, self.geometry.in_channels, *self.input_size)

    @property
    def y_size(self) -> tuple[int, ...]:
        """Size of the output, (N, C_out, D, H, W)."""
        return (
            self.batch,
            self.geometry.out_channels,
            *self.geometry.output_size(self.input_size),
        )

    @property
    def kind(self) -> str:
        """The kind of layer, one of ``KINDS``."""
        return KINDS[0] if self.geometry.transposed else KINDS[1]

    def as_transposed(self, operation: str) -> tuple[Shape, str]:
        """The transposed layer whose operation this operation of this layer is, and that operation.

        A transposed layer is its own. A Conv3d is the adjoint of one with the same weight, whose
        input has the size of this layer's output (see ``layer.py``); there ``bias`` tells whether
        the operation adds one.
        """
        if self.geometry.transposed:
            return self, operation
        layer = Layer.of(self.geometry, self.input_size, False)
        d, h, w = layer.size
        bias = self.bias and operation == "forward"
        shape = Shape(self.name, self.batch, (d, h, w), bias, layer.geometry, self.origin)
        exchanged = {"forward": "grad_input", "grad_input": "forward"}
        return shape, exchanged.get(operation, operation)

    @property
    def operations(self) -> int:
        """Floating-point operations of one pass: 2 for every product that reaches the output.

        Products that padding cuts off are not counted, nor is the bias. The forward and both
        gradient passes have the same count.
        """
        g = self.geometry
        # Every product has one index on the side that strides apart: a transposed layer's input.
        coarse, fine = self.input_size, g.output_size(self.input_size)
        if not g.transposed:
            coarse, fine = fine, coarse
        pairs = 1
        for axis in range(3):
            pairs *= _pairs(
                coarse[axis],
                fine[axis],
                g.kernel_size[axis],
                g.stride[axis],
                g.padding[axis],
                g.dilation[axis],
            )
        return 2 * self.batch * g.in_channels * g.out_channels_per_group * pairs

    def traffic(self, element_size: int) -> int:
        """Bytes of the input and the output, each touched once; the weight stays in caches.

        Every pass touches the two once: gradients have the sizes of what they are gradients by.
        """
        return element_size * (prod(self.x_size) + prod(self.y_size))

    def reduced(self, max_operations: float) -> Shape:
        """The same layer on a smaller input: batch, then the longest extent, halved until it fits.

        No extent goes below 8 (or what it was), so that borders do not become the whole problem,
        nor below what a kernel reaches.
        """
        least = tuple(max(8, n) for n in self.least_size)
        shape = self
        while shape.operations > max_operations:
            if shape.batch > 1:
                shape = replace(shape, batch=shape.batch // 2)
                continue
            size = list(shape.input_size)
            axes = [a for a in range(3) if size[a] // 2 >= least[a]]
            if not axes:
                break
            axis = max(axes, key=lambda a: size[a])
            size[axis] //= 2
            shape = replace(shape, input_size=(size[0], size[1], size[2]))
        return shape

    @property
    def least_size(self) -> Triple:
        """The smallest extents (D, H, W) of an input that a kernel fits into, padding counted."""
        g = self.geometry
        if g.transposed:
            return (1, 1, 1)
        d, h, w = (
            max(1, e * (k - 1) + 1 - 2 * p)
            for k, p, e in zip(g.kernel_size, g.padding, g.dilation, strict=True)
        )
        return (d, h, w)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "origin": self.origin,
            "batch": self.batch,
            "input_size": list(self.input_size),
            "bias": self.bias,
            "geometry": self.geometry.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Shape:
        d, h, w = values["input_size"]
        return cls(
            name=values["name"],
            origin=values.get("origin", ""),
            batch=values["batch"],
            input_size=(d, h, w),
            bias=values["bias"],
            geometry=Geometry.from_dict(values["geometry"]),
        )


def _pairs(n: int, n_out: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Pairs (index i below n, tap k) of one axis for which i * s - p + k * d is below n_out."""
    count = 0
    for k in range(kernel):
        offset = k * dilation - padding
        first = max(0, -(offset // stride))  # smallest i with i * s + offset >= 0
        last = min(n - 1, (n_out - 1 - offset) // stride)
        count += max(0, last - first + 1)
    return count


@lru_cache(maxsize=1)
def _all() -> dict[str, Shape]:
    text = resources.files("convt3d.bench").joinpath("shapes.json").read_text()
    return {entry["name"]: Shape.from_dict(entry) for entry in json.loads(text)}


def named(kind: str = "transposed") -> dict[str, Shape]:
    """Named shapes of a kind (one of ``KINDS``, or "all"), in the order of the tables."""
    return {name: shape for name, shape in _all().items() if kind in (ALL, shape.kind)}


def select(wanted: Iterable[str]) -> list[Shape]:
    """Shapes by name, of a kind ("conv", "transposed", "all"), or parsed by :func:`parse`.

    Raises:
        ValueError: an unknown name or an unreadable description.
    """
    known = named(ALL)
    shapes: dict[str, Shape] = {}  # by name, so that each comes once
    for entry in wanted:
        if "=" in entry:
            shapes[entry] = parse(entry)
        elif entry in (*KINDS, ALL):
            shapes |= named(entry)
        elif entry in known:
            shapes[entry] = known[entry]
        else:
            listed = ", ".join((*known, *KINDS, ALL))
            raise ValueError(f"unknown shape {entry!r}; known are {listed}")
    return list(shapes.values())


def one(wanted: str) -> Shape:
    """The shape that a name or a description means; ValueError as :func:`select`, or several."""
    found = select([wanted])
    if len(found) != 1:
        raise ValueError(f"{wanted!r} stands for {len(found)} layers; name one of them")
    return found[0]


_KEYS = {
    "in": "in_channels",
    "out": "out_channels",
    "k": "kernel_size",
    "s": "stride",
    "p": "padding",
    "op": "output_padding",
    "d": "dilation",
    "g": "groups",
}


def parse(text: str) -> Shape:
    """A shape from ``in=64,out=32,size=64x64x64,k=2,s=2`` and the like.

    Keys: ``n`` (batch, default 1), ``in``, ``out``, ``size``, ``k``, ``s``, ``p``, ``op``, ``d``,
    ``g``, ``bias`` (0 or 1), ``conv`` (1: a Conv3d; 0 or absent: a ConvTranspose3d). ``size``,
    ``k``, ``s``, ``p``, ``op`` and ``d`` take one number for all axes or three joined by ``x``.

    Raises:
        ValueError: an unknown, missing or repeated key, or a value that is no such number.
    """
    values: dict[str, str] = {}
    for item in text.split(","):
        key, separator, value = item.strip().partition("=")
        if not separator or key not in {*_KEYS, "n", "size", "bias", "conv"}:
            raise ValueError(f"cannot read {item!r} in shape {text!r}")
        if not re.fullmatch(r"\d+(x\d+x\d+)?", value):
            raise ValueError(f"{item!r} in shape {text!r} needs one number, or three as 2x4x4")
        if key in values:
            raise ValueError(f"shape {text!r} has {key} twice")
        if key in ("bias", "conv") and value not in ("0", "1"):
            raise ValueError(f"{item!r} in shape {text!r} needs 0 or 1")
        values[key] = value
    missing = [key for key in ("in", "out", "size", "k") if key not in values]
    if missing:
        raise ValueError(f"shape {text!r} lacks {', '.join(missing)}")
    geometry: dict[str, Any] = {"transposed": values.get("conv", "0") == "0"}
    for key, name in _KEYS.items():
        if key in values:
            scalar = key in ("in", "out", "g")
            geometry[name] = int(values[key]) if scalar else _triple(values[key])
    shape = Shape(
        name=text,
        batch=int(values.get("n", "1")),
        input_size=_triple(values["size"]),
        bias=values.get("bias", "0") != "0",
        geometry=Geometry(**geometry),
    )
    _check(shape)
    return shape


def _check(shape: Shape) -> None:
    """Let the operator's own argument check judge a user's shape."""
    from convt3d import arguments

    g = shape.geometry
    if g.groups < 1 or g.in_channels % g.groups or g.out_channels % g.groups:
        raise ValueError(f"shape {shape.name!r}: groups must divide both channel counts")
    if not g.transposed and any(g.output_padding):
        raise ValueError(f"shape {shape.name!r}: a Conv3d has no output padding")
    try:
        arguments.check(
            shape.x_size,
            g.weight_size,
            None,
            g.stride,
            g.padding,
            g.output_padding,
            g.groups,
            g.dilation,
            g.transposed,
        )
    except RuntimeError as error:
        raise ValueError(f"shape {shape.name!r}: {error}") from None


def _triple(text: str) -> Triple:
    numbers: Sequence[int] = [int(part) for part in text.split("x")]
    if len(numbers) == 1:
        numbers = [numbers[0]] * 3
    return (numbers[0], numbers[1], numbers[2])
