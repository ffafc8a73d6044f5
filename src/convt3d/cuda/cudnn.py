"""When an operation is left to PyTorch because cuDNN is faster at it.

Two sources say so. Under ``torch.backends.cudnn.benchmark = True`` both run once and the faster one
is remembered, for these very extents and on disk. Otherwise a table of measured times decides:
``cudnn_table.jsonl`` has the layers of known networks on an H200, or where a row says so on another
GPU of its generation, ours beside PyTorch as it comes. Only GPUs of that generation are judged so,
and only these very layers: what similar ones do told too little about others.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from convt3d.cuda import records
from convt3d.cuda.plan.table import GPU
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.precision import Arithmetic

_CAPABILITY = (9, 0)  # of the GPUs of the table
_FASTER = 1.02  # ours / cuDNN of a timed layer from which PyTorch runs: below, it may be noise

_FOLDER = "cudnn"

Kind = tuple[str, str, bool]
"""Operation, element type, and whether channels are last."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of one operation, ours and PyTorch's, and the GPU that timed both."""

    ours: float
    pytorch: float
    gpu: str = GPU

    @property
    def ratio(self) -> float:
        """Above 1 where PyTorch is faster."""
        return self.ours / self.pytorch


def left_to_pytorch(
    problem: Problem, batch: int, input_size: Sequence[int], gpu: Gpu, benchmark: bool
) -> str | None:
    """Why PyTorch's operator runs a problem that ours could run, in one sentence, or None.

    ``benchmark`` is PyTorch's switch of that name: then what was timed here decides.
    """
    if benchmark:
        times = timed(problem, batch, input_size, gpu)
        if times is not None:
            return reason_of(times)
    return reason(problem, batch, input_size, gpu)


def reason(problem: Problem, batch: int, input_size: Sequence[int], gpu: Gpu) -> str | None:
    """Why PyTorch's operator is faster at a layer of the table, in one sentence, or None.

    ``problem`` is an operation of a transposed layer, whose input has ``input_size`` (D, H, W).
    """
    kind = _kind(problem)
    if gpu.capability != _CAPABILITY or kind is None:
        return None
    times = _table().get((kind, _sizes(problem, batch, input_size)))
    if times is None or times.ratio <= _FASTER:
        return None
    return (
        f"cuDNN was {times.ratio:.2f} times as fast when both were timed on an "
        f"{times.gpu.removeprefix('NVIDIA ')} ({times.pytorch:.3g} against {times.ours:.3g} ms)"
    )


def _kind(problem: Problem) -> Kind | None:
    """Operation, element type and layout; None for what is not judged.

    Of float32-grade products cuDNN is mostly slower, and mixed layouts were not timed.
    """
    channels_last = problem.channels_last
    if problem.arithmetic is Arithmetic.IEEE or channels_last is None:
        return None
    element = "tf32" if problem.arithmetic is Arithmetic.TF32 else "16 bits"
    return problem.operation, element, channels_last


def _sizes(problem: Problem, batch: int, input_size: Sequence[int]) -> tuple[int, ...]:
    """What the times depend on.

    Channels of a group on both sides, positions of the layer's input, taps, phases, groups.
    """
    g = problem.geometry
    return (
        g.in_channels_per_group,
        g.out_channels_per_group,
        batch * math.prod(input_size),
        math.prod(g.kernel_size),
        math.prod(g.stride),
        g.groups,
    )


@functools.cache
def _table() -> dict[tuple[Kind, tuple[int, ...]], Times]:
    """Times of the table's layers by :func:`_kind` and :func:`_sizes`."""
    found: dict[tuple[Kind, tuple[int, ...]], Times] = {}
    text = resources.files("convt3d.cuda").joinpath("cudnn_table.jsonl").read_text()
    for line in text.splitlines():
        row = json.loads(line)
        kind = (row["operation"], row["element"], row["channels_last"])
        times = Times(row["ours_ms"], row["pytorch_ms"], row.get("gpu", GPU))
        found.setdefault((kind, tuple(row["sizes"])), times)
    return found


def row(
    problem: Problem, batch: int, input_size: Sequence[int], times: Times, name: str
) -> dict[str, Any]:
    """A line of the table; ``name`` is for people who read it."""
    kind = _kind(problem)
    assert kind is not None
    operation, element, channels_last = kind
    return {
        "name": name,
        "operation": operation,
        "element": element,
        "channels_last": channels_last,
        "sizes": list(_sizes(problem, batch, input_size)),
        "ours_ms": times.ours,
        "pytorch_ms": times.pytorch,
        **({} if times.gpu == GPU else {"gpu": times.gpu}),
    }


# ---------------------------------------------------------------- cudnn.benchmark


def timed(problem: Problem, batch: int, input_size: Sequence[int], gpu: Gpu) -> Times | None:
    """What :func:`remember` was told for these very extents, in this process or an earlier one."""
    key = _key(problem, batch, input_size, gpu)
    if key not in _remembered:
        _remembered[key] = records.read(_FOLDER, key, _times)
    return _remembered[key]


def remember(
    problem: Problem, batch: int, input_size: Sequence[int], gpu: Gpu, times: Times
) -> None:
    """Keep the times of both, for this process and on disk."""
    key = _key(problem, batch, input_size, gpu)
    _remembered[key] = times
    records.write(_FOLDER, key, {"ours_ms": times.ours, "pytorch_ms": times.pytorch})


def reason_of(times: Times) -> str | None:
    """Why PyTorch runs after both were timed here, in one sentence, or None."""
    if times.ratio <= 1:
        return None
    return (
        f"cuDNN was faster when both were timed here ({times.pytorch:.3g} against "
        f"{times.ours:.3g} ms), as torch.backends.cudnn.benchmark asks for"
    )


def forget() -> None:
    """Drop what this process has read."""
    _remembered.clear()


_remembered: dict[str, Times | None] = {}


def _key(problem: Problem, batch: int, input_size: Sequence[int], gpu: Gpu) -> str:
    key = records.key_of(problem, batch, tuple(input_size), gpu)
    return f"{key}; cuDNN {torch.backends.cudnn.version()}; torch {torch.__version__}"


def _times(record: dict[str, Any]) -> Times:
    return Times(float(record["ours_ms"]), float(record["pytorch_ms"]))
