"""The CUDA backend: the operations of ``backends.py`` on tensors of a GPU.

The first call of a shape plans, compiles and records what to launch; later ones look that record
up, allocate, and launch on PyTorch's current stream.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from convt3d import native, precision
from convt3d.cuda import ahead, compiler, cudnn, tuning, winners
from convt3d.cuda.epilogue import (
    NO_EPILOGUE,
    Epilogue,
    check_slice,
    epilogue_of,
    finished,
    starts_aligned,
)
from convt3d.cuda.launch import gpu_of
from convt3d.cuda.operation import Operation
from convt3d.cuda.plan import gains_by_tensors, plan_problem
from convt3d.cuda.plan import refusal as plan_refusal
from convt3d.cuda.prepared import Left, Prepared, prepared_by
from convt3d.cuda.schedule import Problem
from convt3d.fusion import Fusion, check_operands
from convt3d.geometry import Geometry
from convt3d.layer import Layer
from convt3d.layout import beyond_32_bits, empty, laid_out, reads_channels_last, strides
from convt3d.log import log_once


@functools.lru_cache(maxsize=1024)
def refusal(
    operation: str, geometry: Geometry, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why our kernels decline an operation on a device, in one sentence; None if they run it."""
    missing = compiler.missing_library()
    if missing is not None:
        return missing
    return plan_refusal(operation, geometry, dtype, torch.cuda.get_device_capability(device))


def left_to_pytorch(
    operation: str,
    geometry: Geometry,
    dtype: torch.dtype,
    batch: int,
    input_size: Sequence[int],
    channels_last: bool,
    device: torch.device,
) -> str | None:
    """Why an operation on activations of one layout is PyTorch's at this size, in one sentence."""
    index = torch.cuda.current_device() if device.index is None else device.index
    problem = _problem_of(operation, geometry, dtype, channels_last)
    return _reason_to_leave(problem, batch, tuple(input_size), index)


def fuses_tensors(
    operation: str,
    geometry: Geometry,
    dtype: torch.dtype,
    batch: int,
    input_size: Sequence[int],
    channels_last: bool,
    device: torch.device,
) -> bool:
    """Whether a step that reads a tensor of the output's shape is faster than a pass of its own."""
    index = torch.cuda.current_device() if device.index is None else device.index
    problem = _problem_of(operation, geometry, dtype, channels_last)
    return gains_by_tensors(plan_problem(problem, batch, tuple(input_size), gpu_of(index)))


def _problem_of(
    operation: str, geometry: Geometry, dtype: torch.dtype, channels_last: bool
) -> Problem:
    """An operation on activations of one layout."""
    arithmetic = precision.arithmetic_for(dtype, geometry.groups)
    return Problem(operation, geometry, arithmetic, channels_last, channels_last)


def _reason_to_leave(
    problem: Problem, batch: int, input_size: tuple[int, ...], index: int
) -> str | None:
    """Why a problem is PyTorch's on the GPU of this index, in one sentence; None if it is ours."""
    benchmark = torch.backends.cudnn.benchmark
    return cudnn.left_to_pytorch(problem, batch, input_size, gpu_of(index), benchmark)


_prepared: dict[tuple[Any, ...], Prepared | Left] = {}
_MAX_PREPARED = 4096


def _prepare(
    operation: str,
    geometry: Geometry,
    source: Tensor,
    input_size: tuple[int, ...],
    layouts: tuple[bool, bool],
    weight_strides: tuple[int, ...],
    bias: bool = False,
    epilogue: Epilogue | None = None,
) -> Prepared | Left:
    """What runs an operation.

    Args:
        operation: its name.
        geometry: the layer.
        source: of the shape, dtype and device that the prepared operation will see.
        input_size: spatial size (D, H, W) of the layer's input.
        layouts: whether source and target are channels_last.
        weight_strides: of the weight, or of the gradient by it.
        bias: whether there is one.
        epilogue: what its kernels are to run beside the bias, as far as they do.

    Raises:
        RuntimeError: a kernel could not be compiled or loaded; names the geometry.
    """
    batch, dtype, device = source.shape[0], source.dtype, source.device.index
    arithmetic = precision.arithmetic_for(dtype, geometry.groups)
    benchmark = torch.backends.cudnn.benchmark
    key = (
        operation, geometry, batch, input_size, arithmetic, layouts, weight_strides, bias, device,
        benchmark, epilogue,
    )  # fmt: skip
    found = _prepared.get(key)
    if found is None:
        problem = Problem(operation, geometry, arithmetic, *layouts, bias)
        if benchmark:
            _tune_once(problem, batch, input_size, source.device)
        reason = _reason_to_leave(problem, batch, input_size, device)
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        if reason is None:
            asked = Operation(
                *(operation, geometry, batch, input_size, dtype, arithmetic, layouts),
                *(weight_strides, bias, device, epilogue or NO_EPILOGUE),
            )
            found = prepared_by(asked.plan(gpu_of(device)), asked)
        else:
            log_once(f"PyTorch runs {operation} of {geometry.label}: {reason}")
            last = layouts[1] if operation != "grad_weight" else _is_last(weight_strides)
            found = Left(geometry, input_size, last)
        _prepared[key] = found
    return found


def _is_last(weight_strides: Sequence[int]) -> bool:
    """Whether strides as :func:`convt3d.layout.strides` gives them are channels_last."""
    return weight_strides[1] == 1 and weight_strides[1] < weight_strides[4]


def _tune_once(
    problem: Problem, batch: int, input_size: tuple[int, ...], device: torch.device
) -> None:
    """What ``torch.backends.cudnn.benchmark`` asks for, unless it was done before."""
    if torch.cuda.is_current_stream_capturing():
        return
    gpu = gpu_of(device.index)
    canonical, size = problem.canonical(input_size)
    try:
        if winners.recall(canonical, batch, size, gpu) is None:
            tuning.tune_here(canonical, batch, size, device, tuning.QUICK)
        if cudnn.timed(problem, batch, input_size, gpu) is None:
            times = tuning.beside_pytorch(problem, batch, input_size, device)
            cudnn.remember(problem, batch, input_size, gpu, times)
    except RuntimeError as error:  # out of memory, too: the heuristic's plan may fit
        log_once(f"{problem.operation} of {problem.geometry.label} is not tuned: {error}")


def _on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes a tensor's device the current one."""
    index = tensor.device.index
    return _NOTHING if index == torch.cuda.current_device() else torch.cuda.device(index)


_NOTHING = contextlib.nullcontext()


def forward(
    x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, channels_last: bool
) -> Tensor:
    """Output (N, C_out, D_out, H_out, W_out).

    Args:
        x: (N, C_in, D, H, W) on a CUDA device, float32, float16 or bfloat16.
        w: (C_in, C_out / groups, kD, kH, kW), any strides.
        b: (C_out,) or None.
        geometry: the checked layer.
        channels_last: layout of the output.

    Raises:
        RuntimeError: a kernel could not be compiled or loaded; names the geometry.
    """
    input_size = tuple(x.shape[2:])
    output_size = geometry.output_size(input_size)
    if beyond_32_bits(input_size, output_size):
        return Left(geometry, input_size, channels_last).forward(x, w, b)
    if x.numel() == 0:
        y = empty((x.shape[0], geometry.out_channels, *output_size), x, channels_last).zero_()
        return y if b is None else y.add_(b.view(-1, 1, 1, 1))
    source_last = reads_channels_last(x)
    x, b = laid_out(x, source_last), None if b is None else b.contiguous()
    layouts = (source_last, channels_last)
    with _on_device(x):
        prepared = _prepare("forward", geometry, x, input_size, layouts, w.stride(), b is not None)
        return prepared.forward(x, w, b)


def grad_input(
    gy: Tensor,
    w: Tensor,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Gradient by the input, (N, C_in, D, H, W), from the output gradient and the weight.

    ``bias`` (C_in,) is added to it, as a Conv3d does.
    """
    size = tuple(int(n) for n in input_size)
    if beyond_32_bits(size, gy.shape[2:]):
        return Left(geometry, size, channels_last).grad_input(gy, w, bias)
    if gy.numel() == 0:
        gx = empty((gy.shape[0], geometry.in_channels, *size), gy, channels_last).zero_()
        return gx if bias is None else gx.add_(bias.view(-1, 1, 1, 1))
    source_last = reads_channels_last(gy)
    gy, bias = laid_out(gy, source_last), None if bias is None else bias.contiguous()
    with _on_device(gy):
        layouts = (source_last, channels_last)
        with_bias = bias is not None
        prepared = _prepare("grad_input", geometry, gy, size, layouts, w.stride(), with_bias)
        return prepared.grad_input(gy, w, bias)


def grad_weight(x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool) -> Tensor:
    """Gradient by the weight, (C_in, C_out / groups, kD, kH, kW); the same bits on every run."""
    size = tuple(x.shape[2:])
    if beyond_32_bits(size, gy.shape[2:]):
        return Left(geometry, size, channels_last).grad_weight(x, gy)
    if x.numel() == 0 or gy.numel() == 0:
        return empty(geometry.weight_size, x, channels_last).zero_()
    layouts = (reads_channels_last(x), reads_channels_last(gy))
    x, gy = laid_out(x, layouts[0]), laid_out(gy, layouts[1])
    stride = strides(geometry.weight_size, channels_last)
    with _on_device(x):
        return _prepare("grad_weight", geometry, x, size, layouts, stride).grad_weight(x, gy)


def grad_weight_bias(
    x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool
) -> tuple[Tensor, Tensor]:
    """Gradients by the weight and by the bias, (C_out,), in one pass where that is cheaper."""
    prepared = prepare_grad_weight_bias(x, gy, geometry, channels_last)
    if prepared is None:
        return grad_weight(x, gy, geometry, channels_last), native.grad_bias(gy)
    return prepared(x, gy)


def fused(
    operation: str,
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    fusion: Fusion | None,
    operands: Sequence[Tensor] = (),
    into: Tensor | None = None,
) -> Tensor:
    """Forward, or the gradient by input, then the steps of a fusion, in one pass where that can be.

    Args:
        operation: ``"forward"`` or ``"grad_input"``.
        source: x, or the output gradient, on a CUDA device.
        weight, bias, geometry, channels_last: as :func:`forward` and :func:`grad_input` have them.
        input_size: spatial size (D, H, W) of the layer's input.
        fusion: the steps, or None.
        operands: one for each of ``fusion.operands``: by channel (C,), float32 or of the output's
            dtype; tensors of the output's shape and dtype, any strides.
        into: channels (N, C, D, H, W) of a dense tensor in the output's layout, to be written.

    Returns:
        ``into``, if given, else a new tensor.

    Raises:
        RuntimeError: operands or ``into`` do not fit, or a kernel could not be compiled or loaded.
    """
    size = tuple(int(n) for n in input_size)
    tensor_channels = _check_tail(
        operation, source, geometry, size, channels_last, fusion, operands, into
    )

    def plain() -> Tensor:
        if operation == "forward":
            return forward(source, weight, bias, geometry, channels_last)
        return grad_input(source, weight, geometry, size, channels_last, bias)

    if source.numel() == 0 or beyond_32_bits(size, geometry.output_size(size)):
        return finished(plain(), fusion, operands, into)
    direct = into
    if into is not None and not starts_aligned(into, tensor_channels, channels_last):
        log_once(f"{operation} of {geometry.label} is copied: the slice it goes to is not aligned")
        direct, tensor_channels = None, 0
    wanted = epilogue_of(fusion, operands, source.dtype, tensor_channels)
    source_last = reads_channels_last(source)
    layouts, with_bias = (source_last, channels_last), bias is not None
    with _on_device(source):
        strides_of_weight = weight.stride()
        prepared = _prepare(
            operation, geometry, source, size, layouts, strides_of_weight, with_bias, wanted
        )
        if isinstance(prepared, Left) or (prepared.epilogue.empty and not wanted.empty):
            return finished(plain(), fusion, operands, into)
        given = [t.contiguous() if t.dim() == 1 else laid_out(t, channels_last) for t in operands]
        if prepared.epilogue.channels != wanted.channels:
            direct = None
        y = prepared.fused(
            laid_out(source, source_last),
            weight,
            bias if bias is None else bias.contiguous(),
            given if prepared.epilogue.kinds else (),
            direct,
        )
        return finished(y, None if prepared.epilogue.kinds else fusion, operands, into)


def _check_tail(
    operation: str,
    source: Tensor,
    geometry: Geometry,
    input_size: tuple[int, ...],
    channels_last: bool,
    fusion: Fusion | None,
    operands: Sequence[Tensor],
    into: Tensor | None,
) -> int:
    """Channels of the tensor that ``into`` is a slice of; 0 where the output is dense.

    Raises:
        RuntimeError: operands or ``into`` do not fit.
    """
    channels, size = geometry.in_channels, input_size
    if operation == "forward":
        channels, size = geometry.out_channels, geometry.output_size(input_size)
    shape = (source.shape[0], channels, *size)
    check_operands(fusion, operands, source, shape)
    return check_slice(into, source, shape, channels_last)


# What the steady state keeps: the functions above for tensors of one kind, with all decided. None
# where they have more to do than to allocate and launch.


def prepare_forward(
    x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, channels_last: bool
) -> Callable[..., Tensor] | None:
    """:func:`forward` for tensors of these shapes, strides, dtypes and device, or None."""
    size, source_last = tuple(x.shape[2:]), reads_channels_last(x)
    if (
        not _at_once((x, source_last))
        or beyond_32_bits(size, geometry.output_size(size))
        or (b is not None and not b.is_contiguous())
    ):
        return None
    layouts = (source_last, channels_last)
    return _prepare("forward", geometry, x, size, layouts, w.stride(), b is not None).forward


def prepare_grad_input(
    gy: Tensor,
    w: Tensor,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    bias: Tensor | None = None,
) -> Callable[..., Tensor] | None:
    """:func:`grad_input` for tensors of these shapes, strides, dtypes and device, or None."""
    size, source_last = tuple(input_size), reads_channels_last(gy)
    if (
        not _at_once((gy, source_last))
        or beyond_32_bits(size, gy.shape[2:])
        or (bias is not None and not bias.is_contiguous())
    ):
        return None
    layouts, with_bias = (source_last, channels_last), bias is not None
    return _prepare("grad_input", geometry, gy, size, layouts, w.stride(), with_bias).grad_input


def prepare_grad_weight(
    x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """:func:`grad_weight` for tensors of these shapes, strides, dtypes and device, or None."""
    prepared = _prepare_grad_weight(x, gy, geometry, channels_last, bias=False)
    return None if prepared is None else prepared.grad_weight


def prepare_grad_weight_bias(
    x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """:func:`grad_weight_bias` for tensors of these shapes, strides, dtypes and device, or None."""
    prepared = _prepare_grad_weight(x, gy, geometry, channels_last, bias=True)
    return None if prepared is None else prepared.grad_weight_bias


def _prepare_grad_weight(
    x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool, bias: bool
) -> Prepared | Left | None:
    size, layouts = tuple(x.shape[2:]), (reads_channels_last(x), reads_channels_last(gy))
    if not _at_once((x, layouts[0]), (gy, layouts[1])) or beyond_32_bits(size, gy.shape[2:]):
        return None
    stride = strides(geometry.weight_size, channels_last)
    return _prepare("grad_weight", geometry, x, size, layouts, stride, bias)


def prepare_fused(
    operation: str,
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    fusion: Fusion | None,
    operands: Sequence[Tensor] = (),
    into: Tensor | None = None,
) -> Callable[..., Tensor] | None:
    """:func:`fused` for tensors of these shapes, strides, dtypes, device and alignment, or None.

    A function of source, weight, bias, operands and ``into``; kernels run the whole tail.
    """
    size, source_last = tuple(int(n) for n in input_size), reads_channels_last(source)
    tensor_channels = _check_tail(
        operation, source, geometry, size, channels_last, fusion, operands, into
    )
    if (
        not _at_once((source, source_last), *((t, channels_last) for t in operands))
        or beyond_32_bits(size, geometry.output_size(size))
        or (bias is not None and not bias.is_contiguous())
        or (into is not None and not starts_aligned(into, tensor_channels, channels_last))
    ):
        return None
    wanted = epilogue_of(fusion, operands, source.dtype, tensor_channels)
    layouts, with_bias = (source_last, channels_last), bias is not None
    prepared = _prepare(
        operation, geometry, source, size, layouts, weight.stride(), with_bias, wanted
    )
    if isinstance(prepared, Left):
        return None
    taken = prepared.epilogue
    whole = (taken.kinds, taken.channels) == (wanted.kinds, wanted.channels)
    return prepared.fused if whole else None


def expect_gradients(layer: Layer, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Plan and compile the gradients of this call in the background, once for its kind."""
    ahead.expect_gradients(layer, input, weight, bias, gpu_of)


def _at_once(*operands: tuple[Tensor, bool]) -> bool:
    """Whether tensors are dense in a layout, not empty, and on the current device."""
    return all(
        t.numel() > 0
        and t.device.index == torch.cuda.current_device()
        and t.is_contiguous(
            memory_format=torch.channels_last_3d
            if last and t.dim() == 5
            else torch.contiguous_format
        )
        for t, last in operands
    )
