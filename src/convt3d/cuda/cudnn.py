"""When an operation is left to PyTorch because cuDNN is faster at it.

Two sources say so. Under ``torch.backends.cudnn.benchmark = True`` both run once and the faster one
is remembered, for these very extents and on disk. Otherwise a table of measured times decides:
``cudnn_table.jsonl`` has the layers of known networks on an H200, or where a row says so on another
GPU of its generation, ours beside PyTorch as it comes, and other layers are judged by the nearest
ones in it. Only GPUs of that generation are judged so.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Sequence
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
_EXPECTED = 1.15  # the same of an expected ratio
_NEIGHBOURS = 3
_FARTHEST = 2.0  # distance, in octaves, from which nothing is expected of a neighbour

_FOLDER = "cudnn"


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


Entry = tuple[tuple[float, ...], Times]
"""Features of a layer and its times."""


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
    """Why PyTorch's operator is expected to be faster, in one sentence, or None.

    ``problem`` is an operation of a transposed layer, whose input has ``input_size`` (D, H, W).
    """
    kind = _kind(problem)
    if gpu.capability != _CAPABILITY or kind is None:
        return None
    features = _features(_sizes(problem, batch, input_size))
    entries = _table().get(kind, ())
    for known, times in entries:
        if known == features:
            if times.ratio <= _FASTER:
                return None
            return (
                f"cuDNN was {times.ratio:.2f} times as fast when both were timed on an "
                f"{times.gpu.removeprefix('NVIDIA ')} "
                f"({times.pytorch:.3g} against {times.ours:.3g} ms)"
            )
    ratio = expected_ratio(features, entries)
    if ratio is None or ratio <= _EXPECTED:
        return None
    return f"cuDNN is expected to be {ratio:.2f} times as fast, as it is for similar layers"


def expected_ratio(features: Sequence[float], entries: Iterable[Entry]) -> float | None:
    """Time of ours over cuDNN's by the nearest layers; None where none is near."""
    near = sorted((math.dist(features, known), math.log(times.ratio)) for known, times in entries)
    near = [item for item in near[:_NEIGHBOURS] if item[0] < _FARTHEST]
    if not near:
        return None
    weights = [1 / (0.25 + distance) ** 2 for distance, _ in near]
    total = sum(w * log for w, (_, log) in zip(weights, near, strict=True))
    return math.exp(total / sum(weights))


def _kind(problem: Problem) -> tuple[str, str, bool] | None:
    """Operation, element type and layout, which neighbours share; None for what is not judged.

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


def _features(sizes: Sequence[int]) -> tuple[float, ...]:
    """Sizes in octaves: neighbours in the table have similar ones."""
    *others, groups = sizes
    # Groups change more than a factor of two in anything else does.
    return (*(math.log2(n) for n in others), 4 * math.log2(groups))


@functools.cache
def _table() -> dict[tuple[str, str, bool], list[Entry]]:
    """Entries of the table by :func:`_kind`."""
    found: dict[tuple[str, str, bool], list[Entry]] = {}
    text = resources.files("convt3d.cuda").joinpath("cudnn_table.jsonl").read_text()
    for line in text.splitlines():
        row = json.loads(line)
        kind = (row["operation"], row["element"], row["channels_last"])
        times = Times(row["ours_ms"], row["pytorch_ms"], row.get("gpu", GPU))
        found.setdefault(kind, []).append((_features(row["sizes"]), times))
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
