"""Launches as formulas of the extents.

A plan's ``schedule`` gives numbers for one batch and one input size. An exported file must work for
all of them, so its launcher evaluates formulas. A formula is text that C++ and Python read alike:
integers, names, ``+``, ``-``, ``*``, ``div_up(a, b)``, ``min(a, b)``, ``max(a, b)``. The names are
the extents (``batch, in_d, in_h, in_w, out_d, out_h, out_w``) and the numbers defined before.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.schedule import WEIGHT_STRIDES, Launch, Plan, Schedule, TensorMap, div_up
from convt3d.geometry import Geometry

EXTENTS = ("batch", "in_d", "in_h", "in_w", "out_d", "out_h", "out_w")
TENSORS = ("source", "weight", "bias", "target")

_FORMULA = re.compile(r"(?:[a-z_0-9]+|[-+*(), ])+")


@dataclass(frozen=True)
class HostLaunch:
    """One launch: grid and shared memory are formulas, arguments formulas or names of pointers.

    Tensor maps occur in sized calls alone. ``dependent`` is that of a schedule's launch.
    """

    kernel: KernelSpec
    grid: str
    block: int
    shared_bytes: str
    arguments: tuple[str | TensorMap, ...]
    dependent: bool


@dataclass(frozen=True)
class HostCall:
    """Formulas of all launches of one operation.

    ``numbers`` are defined in order; ``workspaces`` are sizes in bytes by name. ``only`` is set in
    sized calls: (batch, in_d, in_h, in_w), and the tensors in ``aligned`` must then start at a
    multiple of 16 bytes.
    """

    plan: Plan
    numbers: tuple[tuple[str, str], ...]
    workspaces: tuple[tuple[str, str], ...]
    launches: tuple[HostLaunch, ...]
    only: tuple[int, ...] = ()
    aligned: tuple[str, ...] = ()

    def evaluate(self, batch: int, input_size: Sequence[int]) -> Schedule:
        """The schedule that the formulas give; arguments that are numbers become plain ints.

        Raises:
            ValueError: extents that a sized call does not serve.
        """
        if self.only and self.only != (batch, *input_size):
            raise ValueError(f"a call for {self.only} does not serve {(batch, *input_size)}")
        output_size = self.plan.problem.geometry.output_size(input_size)
        extents = (batch, *input_size, *output_size)
        values = dict(zip(EXTENTS, extents, strict=True))
        for name, formula in self.numbers:
            values[name] = evaluate(formula, values)
        pointers = {*TENSORS, *WEIGHT_STRIDES, *(name for name, _ in self.workspaces)}

        def value(argument: str | TensorMap) -> Any:
            if isinstance(argument, TensorMap) or argument in pointers:
                return argument
            return evaluate(argument, values)

        return Schedule(
            tuple(
                Launch(
                    launch.kernel,
                    evaluate(launch.grid, values),
                    launch.block,
                    evaluate(launch.shared_bytes, values),
                    tuple(map(value, launch.arguments)),
                    launch.dependent,
                )
                for launch in self.launches
            ),
            {name: evaluate(formula, values) for name, formula in self.workspaces},
            tuple(name for name in self.aligned if name in TENSORS),
        )


def evaluate(formula: str, values: Mapping[str, int]) -> int:
    """The value of a formula."""
    functions: dict[str, Any] = {"__builtins__": {}, "div_up": div_up, "min": min, "max": max}
    return int(eval(_compiled(formula), functions, dict(values)))


@functools.lru_cache(maxsize=4096)
def _compiled(formula: str) -> CodeType:
    if not _FORMULA.fullmatch(formula):
        raise ValueError(f"{formula!r} is no formula")
    return compile(formula.strip(), "formula", "eval")


def literal(number: float) -> str:
    """A float32 in C++."""
    if math.isnan(number):
        return "NAN"
    if math.isinf(number):
        return "INFINITY" if number > 0 else "-INFINITY"
    return f"{np.float32(number)!s}f"


def samples(geometry: Geometry, count: int) -> list[tuple[int, tuple[int, ...]]]:
    """Batches and input sizes from 1 up, repeatable, whose outputs are not empty."""
    generator = random.Random(count)
    found: list[tuple[int, tuple[int, ...]]] = []
    while len(found) < count:
        limit = generator.choice((3, 12, 70, 200))
        size = tuple(generator.randint(1, limit) for _ in range(3))
        if min(geometry.output_size(size)) >= 1:
            found.append((generator.choice((1, 2, 3, 8, 17)), size))
    return found
