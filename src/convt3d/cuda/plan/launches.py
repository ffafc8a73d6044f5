"""Launches that several families put together in the same way, and their arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convt3d.cuda.compiler import KernelSpec, name_of
from convt3d.cuda.schedule import WEIGHT_STRIDES, Gpu, Launch, Problem, Schedule, TensorMap, div_up
from convt3d.geometry import Triple
from convt3d.layout import strides as dense_strides


def packed_first(
    product: Launch,
    blocks: int,
    packed_bytes: int,
    *,
    shared_bytes: int = 0,
    order: Triple = (0, 1, 2),
    aligned: tuple[str, ...] = (),
) -> Schedule:
    """A product whose weights ``pack.cu`` of its folder packs before, with the same macros.

    Args:
        product: the launch of the product; the packed weight is its argument "packed".
        blocks: CTAs that pack, of 256 threads.
        packed_bytes: of the packed weight.
        shared_bytes: of a CTA that packs.
        order: which axis of the weight the kernels number 0, 1 and 2.
        aligned: see Schedule.
    """
    file = f"{product.kernel.file.rpartition('/')[0]}/pack.cu"
    pack = Launch(
        KernelSpec(file, f"convt3d_{name_of(file)}", product.kernel.macros),
        blocks,
        256,
        shared_bytes,
        ("weight", "packed", *weight_strides(order)),
    )
    return Schedule((pack, product), {"packed": packed_bytes}, aligned)


def weight_strides(order: Triple) -> tuple[str, ...]:
    """The weight's strides, those of its axes in the order of a kernel's axes 0, 1 and 2."""
    return (*WEIGHT_STRIDES[:2], *(WEIGHT_STRIDES[2 + axis] for axis in order))


def with_strides(size: Sequence[int], order: Triple = (0, 1, 2)) -> tuple[int, ...]:
    """Extents along a kernel's axes, then elements from a position to the next along 0 and 1.

    Args:
        size: extents along D, H and W.
        order: which of these the kernel numbers 0, 1 and 2.
    """
    strides = (size[1] * size[2], size[2], 1)
    return (*(size[axis] for axis in order), strides[order[0]], strides[order[1]])


# A launch, and bytes a cycle of one multiprocessor.
_COPY_CYCLES, _COPIED_BYTES = 2500.0, 14.0
_LEAST_COPIED = 16  # channels
MOST_COPIED = 8
"""Plans on copies that a family ranks, so that tuning times other families, too."""
_LINE_BYTES, _TILE_WORDS = 128, 32  # of a tile of layout/channels_last.cu: channels, and positions


def copy_refusal(problem: Problem) -> str | None:
    """Why plans do not run on copies of a problem's contiguous tensors, or None."""
    if problem.channels_last:
        return None
    if min(problem.source_channels, problem.target_channels) < _LEAST_COPIED:
        return f"layers of less than {_LEAST_COPIED} channels are not copied to channels_last"
    return None


def copied_first(
    schedule: Schedule,
    problem: Problem,
    tensor: str,
    channels: int,
    batch: int,
    size: Sequence[int],
) -> Schedule:
    """A schedule that reads a contiguous tensor by a map, after its copy to channels_last.

    Args:
        schedule: launches of which the product has a map of the tensor as channels_last, before
            which it calls ``grid_dependency_wait()``.
        problem: whose element type the tensor has.
        tensor: "source", "target" or "weight".
        channels: of the tensor, a multiple of 16 bytes.
        batch: samples.
        size: its other extents.
    """
    copy = f"{tensor}_channels_last"
    launches = [_reads_copy(one, tensor, copy) for one in schedule.launches]
    at = next(i for i, one in enumerate(launches) if one != schedule.launches[i])
    positions = math.prod(size)
    launch = _transposing(problem, tensor, copy, channels, batch, positions)
    launches.insert(at, replace(launch, dependent=at > 0))
    bytes_ = batch * positions * channels * problem.element_bytes
    return replace(
        schedule, launches=tuple(launches), workspaces={**schedule.workspaces, copy: bytes_}
    )


def weight_is_copied(problem: Problem) -> bool:
    """Whether a contiguous gradient by weight may be a copy of one in channels_last."""
    size = problem.geometry.weight_size
    positions, taps = size[1], math.prod(size[2:])
    vector = 16 // problem.element_bytes
    if taps % vector == 0:
        return True
    return positions % vector == 0 and taps <= _LINE_BYTES // problem.element_bytes


def weight_copied_last(schedule: Schedule, problem: Problem) -> Schedule:
    """A schedule that writes a contiguous weight by a copy of one in channels_last.

    Args:
        schedule: launches that write the weight, by its strides.
        problem: a gradient by weight, for which ``weight_is_copied``.
    """
    size = problem.geometry.weight_size
    samples, positions, taps = size[0], size[1], math.prod(size[2:])
    copy = "weight_channels_last"
    strides = map(np.int64, dense_strides(size, True))
    other: dict[Any, Any] = {"weight": copy, **dict(zip(WEIGHT_STRIDES, strides, strict=True))}
    launches = [
        replace(
            one,
            arguments=tuple(other.get(a, a) if isinstance(a, str) else a for a in one.arguments),
        )
        for one in schedule.launches
    ]
    launches.append(_transposing(problem, copy, "weight", taps, samples, positions))
    workspaces = {**schedule.workspaces, copy: math.prod(size) * problem.element_bytes}
    return replace(schedule, launches=tuple(launches), workspaces=workspaces)


def _transposing(
    problem: Problem, tensor: str, copy: str, channels: int, batch: int, positions: int
) -> Launch:
    """Copies [sample][channel][position] to [sample][position][channel]."""
    tiles = div_up(channels * problem.element_bytes, _LINE_BYTES)
    tiles *= div_up(positions, _TILE_WORDS * 4 // problem.element_bytes)
    file = "layout/channels_last.cu"
    return Launch(
        KernelSpec(file, f"convt3d_{name_of(file)}", problem.type_macros[:1]),
        batch * tiles,
        256,
        0,
        (tensor, copy, np.int32(channels), np.int32(positions)),
    )


def copy_cycles(bytes_: int, gpu: Gpu) -> float:
    """Estimated cycles of a copy of so many bytes to channels_last, which are read and written."""
    return _COPY_CYCLES + 2 * bytes_ / _COPIED_BYTES / gpu.multiprocessors


def _reads_copy(launch: Launch, tensor: str, copy: str) -> Launch:
    """A launch whose maps of a tensor are of its copy, and which waits for that if it has any."""
    arguments = tuple(
        replace(one, tensor=copy) if isinstance(one, TensorMap) and one.tensor == tensor else one
        for one in launch.arguments
    )
    dependent = launch.dependent or arguments != launch.arguments
    return replace(launch, arguments=arguments, dependent=dependent)
