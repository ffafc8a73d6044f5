"""The three operators as torch.library knows them, and their derivatives.

``convt3d::forward``, ``convt3d::grad_input`` and ``convt3d::grad_weight`` take 5-D tensors. They
are what torch.compile, torch.export, dispatch modes and tensor subclasses see. Each is linear in
each of its tensors and the derivative of one is another of the three, so gradients of any order
need nothing more. Plain eager calls skip the dispatcher (``eager.py``).

In place of ``groups`` they take ``group_channels``, the input channels of a group, or 0 for a layer
that is not grouped: a part of a layer that has some of its groups, or some of the channels of its
only one, takes the same arguments as the whole (``distributed.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from convt3d import backends, native
from convt3d.geometry import Geometry, check, check_types, normalise, triple
from convt3d.layout import empty, result_channels_last, suggests_channels_last_3d

# --- Registration --------------------------------------------------------------------------------

_PARAMETERS = (
    "SymInt[3] stride, SymInt[3] padding, SymInt[3] output_padding, SymInt[3] dilation, "
    "SymInt group_channels) -> Tensor"
)
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    # Inductor must hand over the strides that the fake kernels saw: the results' depend on them.
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)
_library = torch.library.Library("convt3d", "DEF")
_library.define(f"forward(Tensor input, Tensor weight, Tensor? bias, {_PARAMETERS}", tags=_TAGS)
_library.define(
    "grad_input(Tensor grad_output, Tensor weight, SymInt[3] input_size, bool channels_last, "
    + _PARAMETERS,
    tags=_TAGS,
)
_library.define(
    "grad_weight(Tensor input, Tensor grad_output, SymInt[3] kernel_size, bool channels_last, "
    + _PARAMETERS,
    tags=_TAGS,
)

_Checker = Callable[..., tuple[Geometry, bool]]
_Parameters = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], int]


def _forward_geometry(
    checker: _Checker, input: Tensor, weight: Tensor, bias: Tensor | None, parameters: _Parameters
) -> Geometry:
    """Check the arguments of ``convt3d::forward``; ``checker`` is ``check`` or ``normalise``."""
    _require_5d("input", input)
    bias_size = None if bias is None else bias.shape
    geometry, _ = _run(checker, input.shape, weight.shape, bias_size, parameters)
    check_types(input, weight, bias)
    return geometry


def _grad_input_geometry(
    checker: _Checker,
    grad_output: Tensor,
    weight: Tensor,
    input_size: Sequence[int],
    parameters: _Parameters,
) -> Geometry:
    _require_5d("grad_output", grad_output)
    size = (grad_output.shape[0], weight.shape[0], *input_size)
    geometry, _ = _run(checker, size, weight.shape, None, parameters)
    _require_output(grad_output, geometry, input_size)
    check_types(grad_output, weight, None)
    return geometry


def _grad_weight_geometry(
    checker: _Checker,
    input: Tensor,
    grad_output: Tensor,
    kernel_size: Sequence[int],
    parameters: _Parameters,
) -> Geometry:
    _require_5d("input", input)
    _require_5d("grad_output", grad_output)
    size = weight_size(input.shape, grad_output.shape, kernel_size, parameters)
    geometry, _ = _run(checker, input.shape, size, None, parameters)
    _require_output(grad_output, geometry, input.shape[2:])
    if input.shape[0] != grad_output.shape[0]:
        raise RuntimeError(
            f"expected input and grad_output of one batch size, but got {input.shape[0]} and "
            f"{grad_output.shape[0]}"
        )
    check_types(input, grad_output, None)
    return geometry


def _run(
    checker: _Checker,
    input_size: Sequence[int],
    weight_size: Sequence[int],
    bias_size: Sequence[int] | None,
    parameters: _Parameters,
) -> tuple[Geometry, bool]:
    stride, padding, output_padding, dilation, group_channels = parameters
    return checker(
        input_size,
        weight_size,
        bias_size,
        tuple(stride),
        tuple(padding),
        tuple(output_padding),
        _groups(weight_size[0], group_channels),
        tuple(dilation),
    )


def _groups(in_channels: int, group_channels: int) -> int:
    """Number of groups of as many input channels; RuntimeError if they are not whole groups."""
    if group_channels == 0:
        return 1
    if group_channels < 0 or in_channels == 0 or in_channels % group_channels != 0:
        raise RuntimeError(
            f"expected group_channels to divide the {in_channels} input channels, "
            f"but got {group_channels}"
        )
    return in_channels // group_channels


def weight_size(
    input_size: Sequence[int],
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    parameters: Sequence[Any],
) -> tuple[int, ...]:
    """Size of the weight between tensors of these sizes, both with batch and channels."""
    in_channels, out_channels = input_size[1], output_size[1]
    return (in_channels, out_channels // _groups(in_channels, parameters[-1]), *kernel_size)


def _require_5d(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 5:
        raise RuntimeError(f"expected a 5D {name}, but got size {list(tensor.shape)}")


def _require_output(grad_output: Tensor, geometry: Geometry, input_size: Sequence[int]) -> None:
    expected = (geometry.out_channels, *geometry.output_size(input_size))
    if tuple(grad_output.shape[1:]) != expected:
        raise RuntimeError(
            f"expected grad_output to have size {list(expected)} after the batch, "
            f"but got {list(grad_output.shape[1:])}"
        )


def _refuse_tangents(*tensors: Tensor | None) -> None:
    """Registered operators would drop forward-mode tangents without a word: raise instead."""
    if getattr(forward_ad, "_current_level", -1) < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                "the registered convt3d operators have no forward-mode derivative; "
                "call convt3d.conv_transpose3d, which has"
            )


def _forward_kernel(input: Tensor, weight: Tensor, bias: Tensor | None, *parameters: Any) -> Tensor:
    _refuse_tangents(input, weight, bias)
    geometry = _forward_geometry(normalise, input, weight, bias, parameters)
    return backends.forward(input, weight, bias, geometry, result_channels_last(input, weight))


def _grad_input_kernel(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Sequence[int],
    channels_last: bool,
    *parameters: Any,
) -> Tensor:
    _refuse_tangents(grad_output, weight)
    geometry = _grad_input_geometry(normalise, grad_output, weight, input_size, parameters)
    return backends.grad_input(grad_output, weight, geometry, input_size, channels_last)


def _grad_weight_kernel(
    input: Tensor,
    grad_output: Tensor,
    kernel_size: Sequence[int],
    channels_last: bool,
    *parameters: Any,
) -> Tensor:
    _refuse_tangents(input, grad_output)
    geometry = _grad_weight_geometry(normalise, input, grad_output, kernel_size, parameters)
    return backends.grad_weight(input, grad_output, geometry, channels_last)


def _forward_fake(input: Tensor, weight: Tensor, bias: Tensor | None, *parameters: Any) -> Tensor:
    geometry = _forward_geometry(check, input, weight, bias, parameters)
    size = (input.shape[0], geometry.out_channels, *geometry.output_size(input.shape[2:]))
    return empty(size, input, result_channels_last(input, weight))


def _grad_input_fake(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Sequence[int],
    channels_last: bool,
    *parameters: Any,
) -> Tensor:
    geometry = _grad_input_geometry(check, grad_output, weight, input_size, parameters)
    size = (grad_output.shape[0], geometry.in_channels, *input_size)
    return empty(size, grad_output, channels_last)


def _grad_weight_fake(
    input: Tensor,
    grad_output: Tensor,
    kernel_size: Sequence[int],
    channels_last: bool,
    *parameters: Any,
) -> Tensor:
    geometry = _grad_weight_geometry(check, input, grad_output, kernel_size, parameters)
    return empty(geometry.weight_size, input, channels_last)


for _name, _kernel, _fake in (
    ("forward", _forward_kernel, _forward_fake),
    ("grad_input", _grad_input_kernel, _grad_input_fake),
    ("grad_weight", _grad_weight_kernel, _grad_weight_fake),
):
    # One kernel for all devices: it picks the backend by the tensor, as the eager path does.
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"convt3d::{_name}", _fake, lib=_library)


def _flops(
    input_shape: Sequence[int], weight_shape: Sequence[int], *rest: Any, **kwargs: Any
) -> int:
    """Multiplications and additions: one pair per input voxel and element of the weight."""
    return 2 * input_shape[0] * math.prod(input_shape[2:]) * math.prod(weight_shape)


@register_flop_formula(torch.ops.convt3d.grad_input)
def _grad_input_flops(
    grad_output_shape: Sequence[int],
    weight_shape: Sequence[int],
    input_size: Sequence[int],
    *rest: Any,
    **kwargs: Any,
) -> int:
    return _flops((grad_output_shape[0], 0, *input_size), weight_shape)


@register_flop_formula(torch.ops.convt3d.grad_weight)
def _grad_weight_flops(
    input_shape: Sequence[int],
    grad_output_shape: Sequence[int],
    *rest: Any,
    out_shape: Any,
    **kwargs: Any,
) -> int:
    return _flops(input_shape, out_shape)


register_flop_formula(torch.ops.convt3d.forward)(_flops)


# --- Derivatives ---------------------------------------------------------------------------------


def call_forward(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """:func:`convt3d.backends.forward` through the dispatcher, differentiable."""
    return torch.ops.convt3d.forward.default(input, weight, bias, *_parameters(geometry))


def call_grad_input(
    grad_output: Tensor,
    weight: Tensor,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
) -> Tensor:
    """:func:`convt3d.backends.grad_input` through the dispatcher, differentiable."""
    return torch.ops.convt3d.grad_input.default(
        grad_output, weight, input_size, channels_last, *_parameters(geometry)
    )


def call_grad_weight(
    input: Tensor, grad_output: Tensor, geometry: Geometry, channels_last: bool
) -> Tensor:
    """:func:`convt3d.backends.grad_weight` through the dispatcher, differentiable."""
    return torch.ops.convt3d.grad_weight.default(
        input, grad_output, geometry.kernel_size, channels_last, *_parameters(geometry)
    )


def _parameters(geometry: Geometry) -> _Parameters:
    # int: a number of channels is no symbol in a graph, for every other one is another kernel.
    group_channels = 0 if geometry.groups == 1 else int(geometry.in_channels) // geometry.groups
    return (
        geometry.stride,
        geometry.padding,
        geometry.output_padding,
        geometry.dilation,
        group_channels,
    )


def geometry_of(weight_size: Sequence[int], parameters: Sequence[Any]) -> Geometry:
    """Geometry of arguments that the operator itself has already checked; SymInts pass."""
    stride, padding, output_padding, dilation, group_channels = parameters
    in_channels, per_group, *kernel_size = weight_size
    groups = _groups(in_channels, group_channels)
    return Geometry(
        in_channels,
        per_group * groups,
        triple("kernel_size", kernel_size),
        triple("stride", stride),
        triple("padding", padding),
        triple("output_padding", output_padding),
        triple("dilation", dilation),
        groups,
    )


def _setup_forward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, _bias, *parameters = inputs
    geometry = geometry_of(weight.shape, parameters)
    save_operands(ctx, input, weight)
    ctx.layer = (geometry, input.shape[2:], result_channels_last(input, weight))


def save_operands(ctx: Any, input: Tensor, weight: Tensor) -> None:
    """Keep the tensors that :func:`gradients` needs, and no other."""
    needs = ctx.needs_input_grad
    ctx.save_for_backward(input if needs[1] else None, weight if needs[0] else None)


Layer = tuple[Geometry, Sequence[int], bool]
"""Geometry, spatial size (D, H, W) of the input, and whether results are channels_last."""


def gradients(
    ctx: Any,
    layer: Layer,
    grad_output: Tensor,
    by_input: Callable[..., Tensor],
    by_weight: Callable[..., Tensor],
    by_weight_and_bias: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients by input, weight and bias, each only where asked, by the given functions."""
    input, weight = ctx.saved_tensors
    want_input, want_weight, want_bias = ctx.needs_input_grad[:3]
    geometry, input_size, channels_last = layer
    first = (
        by_input(grad_output, weight, geometry, input_size, channels_last) if want_input else None
    )
    if want_weight and want_bias and by_weight_and_bias is not None:
        return first, *by_weight_and_bias(input, grad_output, geometry, channels_last)
    return (
        first,
        by_weight(input, grad_output, geometry, channels_last) if want_weight else None,
        native.grad_bias(grad_output) if want_bias else None,
    )


def _backward_forward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    by_tensor = gradients(ctx, ctx.layer, grad_output, call_grad_input, call_grad_weight)
    return (*by_tensor, *(None,) * 5)


def _setup_grad_input(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad_output, weight, _input_size, _channels_last, *parameters = inputs
    want_grad_output, want_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(
        grad_output if want_weight else None, weight if want_grad_output else None
    )
    ctx.geometry = geometry_of(weight.shape, parameters)
    ctx.weight_channels_last = suggests_channels_last_3d(weight)


def _backward_grad_input(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
    grad_output, weight = ctx.saved_tensors
    by_grad_output = by_weight = None
    if weight is not None:
        by_grad_output = call_forward(cotangent, weight, None, ctx.geometry)
    if grad_output is not None:
        by_weight = call_grad_weight(cotangent, grad_output, ctx.geometry, ctx.weight_channels_last)
    return (by_grad_output, by_weight, *(None,) * 7)


def _setup_grad_weight(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, grad_output, _kernel_size, _channels_last, *parameters = inputs
    want_input, want_grad_output = ctx.needs_input_grad[:2]
    ctx.save_for_backward(input if want_grad_output else None, grad_output if want_input else None)
    ctx.geometry = geometry_of(output.shape, parameters)
    ctx.input_size = input.shape[2:]
    ctx.input_channels_last = suggests_channels_last_3d(input)


def _backward_grad_weight(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
    input, grad_output = ctx.saved_tensors
    by_input = by_grad_output = None
    if grad_output is not None:
        by_input = call_grad_input(
            grad_output, cotangent, ctx.geometry, ctx.input_size, ctx.input_channels_last
        )
    if input is not None:
        by_grad_output = call_forward(input, cotangent, None, ctx.geometry)
    return (by_input, by_grad_output, *(None,) * 7)


for _name, _setup, _backward in (
    ("forward", _setup_forward, _backward_forward),
    ("grad_input", _setup_grad_input, _backward_grad_input),
    ("grad_weight", _setup_grad_weight, _backward_grad_weight),
):
    torch.library.register_autograd(
        f"convt3d::{_name}", _backward, setup_context=_setup, lib=_library
    )
