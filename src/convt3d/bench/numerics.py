"""Errors against float64, of ours and of PyTorch's operator at the same switches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from convt3d import backends, native
from convt3d.bench.cases import Mode, Tensors
from convt3d.layer import Layer
from convt3d.polyphase import tapped_phases
from convt3d.precision import Arithmetic, arithmetic_for


def run(backend: Any, operation: str, t: Tensors) -> Tensor:
    """One operation of a backend module on the tensors of a case; no autograd."""
    layer = Layer.of(t.shape.geometry, t.shape.input_size, t.channels_last)
    if operation == "forward":
        return layer.output(backend, t.x, t.w, t.b)
    if operation == "grad_input":
        return layer.by_input(backend, t.gy, t.w)
    return layer.by_weight(backend, t.x, t.gy)


def ours(operation: str, t: Tensors) -> Tensor:
    """The operation by what convt3d picks: a backend's, or PyTorch's for a Conv3d off CUDA."""
    if t.shape.geometry.transposed or backends.runs_conv3d(t.x):
        return run(backends, operation, t)
    return pytorch(operation, t)


def pytorch(operation: str, t: Tensors) -> Tensor:
    """The operation by the operator that PyTorch itself runs for it; no autograd."""
    g = t.shape.geometry
    if g.transposed:
        return run(native, operation, t)
    if operation == "forward":
        return torch.conv3d(t.x, t.w, t.b, g.stride, g.padding, g.dilation, g.groups)
    by_input = operation == "grad_input"
    wanted = (by_input, not by_input)
    gradients = native.gradients(t.gy, t.x, t.w, g, transposed=False, wanted=wanted)
    return gradients[0] if by_input else gradients[1]


def error(result: Tensor, reference: Tensor) -> tuple[float, float]:
    """Relative Frobenius error and largest absolute error; NaN if the result has one."""
    difference = result.double() - reference
    norm = float(reference.norm())
    return float(difference.norm()) / (norm or 1.0), float(difference.abs().max())


def reference(operation: str, t: Tensors) -> Tensor:
    """PyTorch's operator in float64 on the same data."""
    return pytorch(
        operation,
        replace(
            t,
            x=t.x.double(),
            w=t.w.double(),
            b=None if t.b is None else t.b.double(),
            gy=t.gy.double(),
        ),
    )


def compare(operation: str, t: Tensors, mode: Mode) -> dict[str, Any]:
    """Errors of ours and of PyTorch's operator, whether ours is acceptable, and determinism.

    Ours runs on the whole batch, as it is timed. On CUDA, where a float64 convolution of the whole
    would take longer than everything else, only the first and the last sample are compared; for
    the gradient by weight, the gradients of all other samples are zero.
    """
    compared = t
    if _compares_ends(t):
        ends = [0, t.shape.batch - 1]
        compared = _samples(t, ends)
        if operation == "grad_weight":
            gy = torch.zeros_like(t.gy)
            gy[ends] = t.gy[ends]
            t = replace(t, gy=gy)
    wanted = reference(operation, compared)
    first = ours(operation, t)
    part = operation != "grad_weight" and compared.shape.batch < t.shape.batch
    result = first[[0, -1]] if part else first
    mine, largest = error(result, wanted)
    theirs, their_largest = error(pytorch(operation, compared), wanted)
    exact, least = _exact(operation, t, mode), floor(operation, t, mode)
    return {
        "relative": mine,
        "largest": largest,
        "pytorch_relative": theirs,
        "pytorch_largest": their_largest,
        "acceptable": acceptable(mine, theirs, exact, least),
        "deterministic": _repeats(lambda: ours(operation, t), first),
    }


def _compares_ends(t: Tensors) -> bool:
    return t.x.device.type == "cuda" and t.shape.batch > 2


def _samples(t: Tensors, indices: list[int]) -> Tensors:
    """Some samples of a batch, in the same memory format."""
    memory_format = torch.channels_last_3d if t.channels_last else torch.contiguous_format
    return replace(
        t,
        shape=replace(t.shape, batch=len(indices)),
        x=t.x[indices].contiguous(memory_format=memory_format),
        gy=t.gy[indices].contiguous(memory_format=memory_format),
    )


def _exact(operation: str, t: Tensors, mode: Mode) -> bool:
    """Whether the arithmetic is that of its type, as that of grouped layers and of layers of few
    channels is under TF32, too.
    """
    shape, one = t.shape.as_transposed(operation)
    kind = (mode.dtype, shape.geometry, one, t.channels_last)
    exact = (Arithmetic.IEEE, Arithmetic.F64)
    return arithmetic_for(*kind, tf32=mode.tf32) in exact


def acceptable(mine: float, theirs: float, exact: bool, floor: float) -> bool:
    """Whether an error is as good as PyTorch's: 2x in IEEE float32 and float64, else 1.1x.

    Errors below ``floor`` are not told apart.
    """
    return mine <= max((2.0 if exact else 1.1) * theirs, floor)


def floor(operation: str, t: Tensors, mode: Mode) -> float:
    """The relative error below which results count as equally exact.

    On CUDA, rounding the result once, or under TF32 rounding the operands: cuDNN's default may be a
    plan without TF32 even where it is allowed. On CPU, what adding its products one by one gives by
    the usual random-walk estimate: PyTorch itself takes one of several implementations by batch
    size, whose errors differ by up to 4x, and any of them may be what ours is compared with.
    """
    unit = torch.finfo(mode.dtype).eps / 2
    if t.x.device.type == "cuda":
        rounded = mode.tf32 and not _exact(operation, t, mode)
        return 1.1 * tf32_error(operation, t) if rounded else unit
    shape, operation = t.shape.as_transposed(operation)
    g = shape.geometry
    if operation == "forward":
        taps = [
            max(map(len, tapped_phases(*axis).values()))
            for axis in zip(g.kernel_size, g.stride, g.padding, g.dilation, strict=True)
        ]
        products = g.in_channels_per_group * prod(taps)
    elif operation == "grad_input":
        products = g.out_channels_per_group * prod(g.kernel_size)
    else:
        products = shape.batch * prod(shape.input_size)
    return unit * products**0.5


def tf32_error(operation: str, t: Tensors) -> float:
    """The relative error that rounding both operands to TF32 gives a result of many products."""
    operands = {"forward": (t.x, t.w), "grad_input": (t.gy, t.w), "grad_weight": (t.x, t.gy)}
    return sum(_tf32_rounding(v) ** 2 for v in operands[operation]) ** 0.5


def _tf32_rounding(values: Tensor) -> float:
    """Relative error of float32 values after rounding them to nearest in TF32."""
    bits = values.contiguous().view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return float((rounded - values).norm() / values.norm())


def _repeats(call: Callable[[], Tensor], first: Tensor) -> bool:
    """Whether three more calls give the same bits."""
    return all(torch.equal(call(), first) for _ in range(3))
