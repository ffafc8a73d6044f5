"""Choice of a backend, and the three operations on plain 5-D tensors that have been checked.

A backend is a module with the functions ``forward(x, w, b, geometry, channels_last)``,
``grad_input(gy, w, geometry, input_size, channels_last, bias)`` and ``grad_weight(x, gy, geometry,
channels_last)`` of a transposed layer, whose results have the strides of ``layout.empty``
(``native`` has those of PyTorch, and is corrected here). What they are of a Conv3d, ``layer.py``
tells. None of this knows of autograd.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from convt3d import native, portable
from convt3d.fusion import Fusion
from convt3d.geometry import Geometry
from convt3d.layer import Layer
from convt3d.layout import Part, empty, laid_out
from convt3d.log import log_once
from convt3d.operations import Operators
from convt3d.precision import KERNEL_DTYPES

DISABLED = os.environ.get("CONVT3D_DISABLE", "").lower() not in ("", "0", "false", "no", "off")
"""CONVT3D_DISABLE=1: every call goes to PyTorch's operator. Read once, at import."""


def choose(operation: str, geometry: Geometry, tensor: Tensor) -> ModuleType:
    """The module that runs ``operation`` ("forward", "grad_input" or "grad_weight").

    ``tensor`` is any of the operands: it tells dtype and device.
    """
    if DISABLED:
        return native
    if not tensor.is_cuda:
        return portable
    return _choose_on_cuda(operation, geometry, tensor.dtype, tensor.device)


def runs_conv3d(tensor: Tensor) -> bool:
    """Whether a Conv3d of these dtype and device may be anyone's but PyTorch's."""
    return (
        isinstance(tensor, Tensor)
        and tensor.device.type == "cuda"
        and tensor.dtype in KERNEL_DTYPES
    )


@lru_cache(maxsize=4096)
def _choose_on_cuda(
    operation: str, geometry: Geometry, dtype: torch.dtype, device: torch.device
) -> ModuleType:
    from convt3d.cuda import backend  # here, so that importing convt3d does not touch CUDA

    reason = backend.refusal(operation, geometry, dtype, device)
    if reason is None:
        return backend
    log_once(f"PyTorch runs {operation} of {geometry.label}: {reason}")
    return native


def _optional(module: ModuleType, name: str, *arguments: Any) -> Any:
    """What a function returns that a backend may have; None where it has none."""
    function = getattr(module, name, None)
    return None if function is None else function(*arguments)


def forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, channels_last: bool
) -> Tensor:
    """Output, (N, C_out, D_out, H_out, W_out).

    Here and below ``channels_last`` is the memory format of the result.
    """
    if input.shape[0] == 0:
        size = (0, geometry.out_channels, *geometry.output_size(input.shape[2:]))
        return empty(size, input, channels_last)
    module = choose("forward", geometry, input)
    output = module.forward(input, weight, bias, geometry, channels_last)
    return laid_out(output, channels_last) if module is native else output


def grad_input(
    grad_output: Tensor,
    weight: Tensor,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Gradient by the input, (N, C_in, *input_size), and a bias (C_in,) on top if there is one."""
    if grad_output.shape[0] == 0:
        return empty((0, geometry.in_channels, *input_size), grad_output, channels_last)
    module = choose("grad_input", geometry, grad_output)
    result = module.grad_input(grad_output, weight, geometry, input_size, channels_last, bias)
    return laid_out(result, channels_last) if module is native else result


def grad_weight(
    input: Tensor, grad_output: Tensor, geometry: Geometry, channels_last: bool
) -> Tensor:
    """Gradient by the weight, (C_in, C_out / groups, kD, kH, kW)."""
    if input.shape[0] == 0:
        return empty(geometry.weight_size, input, channels_last).zero_()
    module = choose("grad_weight", geometry, input)
    result = module.grad_weight(input, grad_output, geometry, channels_last)
    return laid_out(result, channels_last) if module is native else result


def grad_weight_bias(
    input: Tensor, grad_output: Tensor, geometry: Geometry, channels_last: bool
) -> tuple[Tensor, Tensor]:
    """Gradients by the weight and by the bias, (C_out,), of the same tensors."""
    module = choose("grad_weight", geometry, input)
    both = getattr(module, "grad_weight_bias", None)
    if both is None or input.shape[0] == 0:
        by_weight = grad_weight(input, grad_output, geometry, channels_last)
        return by_weight, native.grad_bias(grad_output)
    by_weight, by_bias = both(input, grad_output, geometry, channels_last)
    return by_weight, by_bias


def fusion_refusal(
    operation: str,
    geometry: Geometry,
    tensor: Tensor,
    batch: int,
    input_size: Sequence[int],
    channels_last: bool,
) -> str | None:
    """Why no kernel runs a tail in its epilogue, in a sentence; None where one may.

    Args:
        operation: "forward" or "grad_input".
        geometry: of the transposed layer, without SymInts.
        tensor: any of the operands: it tells dtype and device. Fake tensors pass.
        batch, input_size: samples, and (D, H, W) of that layer's input.
        channels_last: whether both activations are channels_last_3d.
    """
    module = choose(operation, geometry, tensor)
    if module is native:
        return "PyTorch's operator runs it"
    if not hasattr(module, "fused"):
        return f"no kernel has an epilogue on {tensor.device.type}"
    call = (operation, geometry, tensor.dtype, batch, input_size, channels_last, tensor.device)
    reason: str | None = _optional(module, "left_to_pytorch", *call)
    return reason


def fuses_tensors(
    operation: str,
    geometry: Geometry,
    tensor: torch.Tensor,
    batch: int,
    input_size: Sequence[int],
    channels_last: bool,
) -> bool:
    """Whether a step that reads a tensor of the output's shape is faster than a pass of its own.

    The arguments are those of :func:`fusion_refusal`.
    """
    module = choose(operation, geometry, tensor)
    call = (operation, geometry, tensor.dtype, batch, input_size, channels_last, tensor.device)
    answer: bool | None = _optional(module, "fuses_tensors", *call)
    return answer is None or answer


def fused(
    operation: str,
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    fusion: Fusion | None,
    operands: Sequence[Tensor],
    into: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`forward` or :func:`grad_input`, then an element-wise tail.

    A backend may have a function of this name and these parameters, ``dtype`` excepted, whose
    kernels run the tail in their epilogue. Elsewhere PyTorch's operators follow.

    Args:
        operation: "forward" or "grad_input" of a transposed layer.
        source: what is convolved: input or output gradient of that layer.
        weight: (C_in, C_out / groups, kD, kH, kW).
        bias: of the result's channels, or None.
        geometry: of that layer.
        input_size: its (D, H, W).
        channels_last: memory format of the result.
        fusion: the steps, or None.
        operands: as :meth:`~convt3d.fusion.Fusion.apply` takes them.
        into: channels of a larger dense tensor of that memory format, which are written and
            returned, of dtype ``dtype``.
        dtype: of the result, the operands' if absent.

    Returns:
        (N, C_out, D_out, H_out, W_out), or (N, C_in, D, H, W) for "grad_input".
    """
    module = choose(operation, geometry, source)
    run = getattr(module, "fused", None)
    dtype = source.dtype if dtype is None else dtype
    if run is not None and source.shape[0] > 0:
        arguments = (operation, source, weight, bias, geometry, input_size, channels_last)
        if dtype == source.dtype:
            return run(*arguments, fusion, operands, into)
        result = run(*arguments, fusion, operands)
    else:
        if operation == "forward":
            result = forward(source, weight, bias, geometry, channels_last)
        else:
            result = grad_input(source, weight, geometry, input_size, channels_last, bias)
        if fusion is not None:
            result = laid_out(fusion.apply(result, operands), channels_last)
    return result.to(dtype) if into is None else into.copy_(result)


def expect_gradients(layer: Layer, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Say that gradients of a call will be wanted, before it: what they need is made meanwhile.

    They are those by the operands that require them.
    """
    if input.is_cuda:
        operation = "forward" if layer.transposed else "grad_input"
        module = choose(operation, layer.geometry, input)
        _optional(module, "expect_gradients", layer, input, weight, bias)


def prepare_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    channels_last: bool,
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """:func:`forward` for tensors of these shapes, strides, dtypes and device, all decided.

    None where the backend has nothing to decide, or more to do than to launch.
    """
    module = choose("forward", geometry, input)
    return _optional(module, "prepare_forward", input, weight, bias, geometry, channels_last)


def prepare_grad_input(
    grad_output: Tensor,
    weight: Tensor,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    bias: Tensor | None = None,
) -> Callable[..., Tensor] | None:
    """:func:`grad_input` likewise."""
    module = choose("grad_input", geometry, grad_output)
    arguments = (grad_output, weight, geometry, input_size, channels_last, bias)
    return _optional(module, "prepare_grad_input", *arguments)


def prepare_grad_weight(
    input: Tensor, grad_output: Tensor, geometry: Geometry, channels_last: bool
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """:func:`grad_weight` likewise."""
    module = choose("grad_weight", geometry, input)
    return _optional(module, "prepare_grad_weight", input, grad_output, geometry, channels_last)


def prepare_grad_weight_bias(
    input: Tensor, grad_output: Tensor, geometry: Geometry, channels_last: bool
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """:func:`grad_weight_bias` likewise."""
    module = choose("grad_weight", geometry, input)
    arguments = (input, grad_output, geometry, channels_last)
    return _optional(module, "prepare_grad_weight_bias", *arguments)


def prepare_fused(
    operation: str,
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    fusion: Fusion | None,
    operands: Sequence[Tensor],
    part: Part | None = None,
    dtype: torch.dtype | None = None,
) -> Callable[[Tensor, Tensor, Tensor | None, Sequence[Tensor], Tensor | None], Tensor] | None:
    """:func:`fused` likewise: a function of source, weight, bias, operands and ``into``.

    ``part`` says where in a new tensor ``into`` will lie; None: there will be none.
    """
    if source.shape[0] == 0 or dtype not in (None, source.dtype):
        return None
    arguments = (operation, source, weight, bias, geometry, input_size, channels_last)
    module = choose(operation, geometry, source)
    return _optional(module, "prepare_fused", *arguments, fusion, operands, part)


def by_pytorch(run: Callable[..., Any]) -> bool:
    """Whether a prepared function is PyTorch's operator, which the backend expects to be faster.

    It is a method of an object that says so: its ``PYTORCH`` is True.
    """
    return getattr(getattr(run, "__self__", None), "PYTORCH", False) is True


OPERATORS = Operators(forward, grad_input, grad_weight, grad_weight_bias)
"""The operations by the backend that suits, without autograd."""

PREPARE = Operators(
    prepare_forward, prepare_grad_input, prepare_grad_weight, prepare_grad_weight_bias
)
"""The same for tensors of one kind: functions of the tensors, or None."""
