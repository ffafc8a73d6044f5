"""The CUDA backend: the operations of ``backends.py`` on tensors of a GPU.

The first call of a shape plans, compiles and records what to launch; later ones look that record
up, allocate, and launch on PyTorch's current stream.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from convt3d import native
from convt3d.cuda import ahead, compiler, cudnn, tuning, winners
from convt3d.cuda.epilogue import (
    check_slice,
    epilogue_of,
    finished,
    part_channels,
    starts_aligned,
)
from convt3d.cuda.launch import gpu_of
from convt3d.cuda.operation import Operation
from convt3d.cuda.plan import gains_by_tensors, plan_problem, problem_for
from convt3d.cuda.plan import refusal as plan_refusal
from convt3d.cuda.prepared import Left, Prepared, prepared_by
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.fusion import Fusion, check_operands
from convt3d.geometry import Geometry
from convt3d.layer import Layer
from convt3d.layout import Part, empty, laid_out
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
    problem = problem_for(operation, geometry, dtype, channels_last)
    return _reason_to_leave(problem, batch, tuple(input_size), _gpu(device))


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
    problem = problem_for(operation, geometry, dtype, channels_last)
    return gains_by_tensors(plan_problem(problem, batch, tuple(input_size), _gpu(device)))


def _gpu(device: torch.device) -> Gpu:
    return gpu_of(torch.cuda.current_device() if device.index is None else device.index)


def _reason_to_leave(
    problem: Problem, batch: int, input_size: tuple[int, ...], gpu: Gpu
) -> str | None:
    """Why a problem is PyTorch's on a GPU, in one sentence; None if it is ours."""
    benchmark = torch.backends.cudnn.benchmark
    return cudnn.left_to_pytorch(problem, batch, input_size, gpu, benchmark)


_prepared: dict[tuple[Operation, bool], Prepared | Left] = {}
_MAX_PREPARED = 4096


def _prepare(operation: Operation) -> Prepared | Left:
    """What runs an operation, with its epilogue as far as kernels do it.

    PyTorch's operator does, with a warning, where NVRTC refuses a kernel.

    Raises:
        RuntimeError: a kernel could not be loaded; names the geometry.
    """
    benchmark = torch.backends.cudnn.benchmark
    found = _prepared.get((operation, benchmark))
    if found is None:
        gpu = gpu_of(cast(int, operation.device))
        if benchmark:
            _tune_once(operation, gpu)
        reason = _reason_to_leave(operation.problem, operation.batch, operation.input_size, gpu)
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        found = Left(operation)
        if reason is not None:
            log_once(f"PyTorch runs {operation.name} of {operation.geometry.label}: {reason}")
        else:
            try:
                found = prepared_by(operation.plan(gpu), operation)
            except compiler.CompilationError as error:
                warnings.warn(f"PyTorch's operator runs instead: {error}", RuntimeWarning, 2)
        _prepared[operation, benchmark] = found
    return found


def _tune_once(operation: Operation, gpu: Gpu) -> None:
    """What ``torch.backends.cudnn.benchmark`` asks for, unless it was done before."""
    if torch.cuda.is_current_stream_capturing():
        return
    problem, batch, input_size = operation.problem, operation.batch, operation.input_size
    device = torch.device("cuda", cast(int, operation.device))
    canonical, size = problem.canonical(input_size)
    try:
        if winners.recall(canonical, batch, size, gpu) is None:
            tuning.tune_here(problem, batch, input_size, device, tuning.QUICK)
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
        RuntimeError: a kernel could not be loaded; names the geometry.
    """
    operation = Operation.forward(x, w, b is not None, geometry, channels_last)
    return _output(operation, x, w, b)


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
    kind = (geometry, input_size, channels_last)
    operation = Operation.output("grad_input", gy, w, bias is not None, *kind)
    return _output(operation, gy, w, bias)


def _output(operation: Operation, source: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """:func:`forward` or :func:`grad_input`, as the operation says; it has no epilogue."""
    source_last, last = operation.layouts
    if operation.beyond_32_bits:
        return Left(operation).output(source, w, bias)
    if source.numel() == 0:
        result = empty(operation.result_size, source, last).zero_()
        return result if bias is None else result.add_(bias.view(-1, 1, 1, 1))
    source, bias = laid_out(source, source_last), None if bias is None else bias.contiguous()
    with _on_device(source):
        return _prepare(operation).output(source, w, bias)


def grad_weight(x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool) -> Tensor:
    """Gradient by the weight, (C_in, C_out / groups, kD, kH, kW); the same bits on every run."""
    operation = Operation.grad_weight(x, gy, geometry, channels_last, False)
    if operation.beyond_32_bits:
        return Left(operation).grad_weight(x, gy)
    if x.numel() == 0 or gy.numel() == 0:
        return empty(geometry.weight_size, x, channels_last).zero_()
    x_last, gy_last = operation.layouts
    x, gy = laid_out(x, x_last), laid_out(gy, gy_last)
    with _on_device(x):
        return _prepare(operation).grad_weight(x, gy)


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
        RuntimeError: operands or ``into`` do not fit, or a kernel could not be loaded.
    """
    kind = (geometry, input_size, channels_last)
    plain = Operation.output(operation, source, weight, bias is not None, *kind)
    check_operands(fusion, operands, source, plain.result_size)
    tensor_channels = check_slice(into, source, plain.result_size, channels_last)
    if source.numel() == 0 or plain.beyond_32_bits:
        return finished(_output(plain, source, weight, bias), fusion, operands, into)
    direct = into
    if into is not None and not starts_aligned(into, tensor_channels, channels_last):
        log_once(f"{operation} of {geometry.label} is copied: the slice it goes to is not aligned")
        direct, tensor_channels = None, 0
    wanted = epilogue_of(fusion, operands, source.dtype, tensor_channels)
    with _on_device(source):
        prepared = _prepare(plain._replace(epilogue=wanted))
        if isinstance(prepared, Left) or (prepared.epilogue.empty and not wanted.empty):
            return finished(_output(plain, source, weight, bias), fusion, operands, into)
        given = [t.contiguous() if t.dim() == 1 else laid_out(t, channels_last) for t in operands]
        if prepared.epilogue.channels != wanted.channels:
            direct = None
        y = prepared.fused(
            laid_out(source, plain.layouts[0]),
            weight,
            bias if bias is None else bias.contiguous(),
            given if prepared.epilogue.kinds else (),
            direct,
        )
        return finished(y, None if prepared.epilogue.kinds else fusion, operands, into)


# What the steady state keeps: the functions above for tensors of one kind, with all decided. None
# where they have more to do than to allocate and launch.


def prepare_forward(
    x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, channels_last: bool
) -> Callable[..., Tensor] | None:
    """:func:`forward` for tensors of these shapes, strides, dtypes and device, or None."""
    operation = Operation.forward(x, w, b is not None, geometry, channels_last)
    return _prepare_output(operation, x, b)


def prepare_grad_input(
    gy: Tensor,
    w: Tensor,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    bias: Tensor | None = None,
) -> Callable[..., Tensor] | None:
    """:func:`grad_input` for tensors of these shapes, strides, dtypes and device, or None."""
    kind = (geometry, input_size, channels_last)
    operation = Operation.output("grad_input", gy, w, bias is not None, *kind)
    return _prepare_output(operation, gy, bias)


def _prepare_output(
    operation: Operation, source: Tensor, bias: Tensor | None
) -> Callable[..., Tensor] | None:
    prepared = _prepare_at_once(operation, source, bias)
    return None if prepared is None else prepared.output


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
    operation = Operation.grad_weight(x, gy, geometry, channels_last, bias)
    return _prepare_at_once(operation, x, None, (gy, operation.layouts[1]))


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
    part: Part | None = None,
) -> Callable[..., Tensor] | None:
    """:func:`fused` for tensors of these shapes, strides, dtypes and device, or None.

    A function of source, weight, bias, operands and ``into``, which lies as ``part`` says; kernels
    run the whole tail.
    """
    kind = (geometry, input_size, channels_last)
    plain = Operation.output(operation, source, weight, bias is not None, *kind)
    check_operands(fusion, operands, source, plain.result_size)
    tensor_channels = part_channels(part, plain.result_size, source.dtype, channels_last)
    if tensor_channels is None:
        return None
    wanted = epilogue_of(fusion, operands, source.dtype, tensor_channels)
    tensors = ((t, channels_last) for t in operands)
    prepared = _prepare_at_once(plain._replace(epilogue=wanted), source, bias, *tensors)
    if prepared is None or isinstance(prepared, Left):
        return None
    taken = prepared.epilogue
    whole = (taken.kinds, taken.channels) == (wanted.kinds, wanted.channels)
    return prepared.fused if whole else None


def expect_gradients(layer: Layer, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Plan and compile the gradients of this call in the background, once for its kind."""
    ahead.expect_gradients(layer, input, weight, bias, gpu_of)


def _prepare_at_once(
    operation: Operation, source: Tensor, bias: Tensor | None, *others: tuple[Tensor, bool]
) -> Prepared | Left | None:
    """What runs an operation on tensors as they lie; None where some are to be made ready first.

    ``others`` are further operands, with the layouts that they are read in.
    """
    if (
        not _at_once((source, operation.layouts[0]), *others)
        or operation.beyond_32_bits
        or (bias is not None and not bias.is_contiguous())
    ):
        return None
    return _prepare(operation)


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
