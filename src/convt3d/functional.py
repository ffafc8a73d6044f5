"""``conv_transpose3d``: the signature and semantics of torch.nn.functional.conv_transpose3d."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from convt3d import backends, ops
from convt3d.distributed import prepare
from convt3d.eager import DTYPES, Steps, apply, dispatcher_needed, plain, pytorch_needed
from convt3d.geometry import check, check_types, group_count, normalise, triple
from convt3d.layout import result_channels_last
from convt3d.recipes import Recipe, recall, record

_autocast_anywhere = torch._C._is_any_autocast_enabled
_is_compiling = torch.compiler.is_compiling


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """3-D transposed convolution; a drop-in for :func:`torch.nn.functional.conv_transpose3d`.

    Args:
        input: (N, C_in, D, H, W), or unbatched (C_in, D, H, W).
        weight: (C_in, C_out / groups, kD, kH, kW), of the dtype and device of the input.
        bias: (C_out,) or None.
        stride: voxels of output per voxel of input; here and below an int, or one for each of D, H
            and W.
        padding: voxels cut off at both ends of the output.
        output_padding: voxels added at the far end; less than stride or dilation.
        groups: number of groups; divides C_in.
        dilation: distance of neighbouring taps in voxels of the output.

    Returns:
        (N, C_out, D_out, H_out, W_out), or without N for unbatched input, where on each axis
        ``out = (in - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1``.
        dtype, device and memory format are those that PyTorch gives: channels_last_3d when input or
        weight is (float64 excepted). Autocast and the TF32 switches act as on PyTorch's operator.

    Raises:
        TypeError: an argument is of a type that PyTorch does not take.
        RuntimeError: sizes, dtypes, devices or parameters that do not fit; before any launch.

    float16, bfloat16, float32 and float64 are handled here. Complex and integer tensors, and calls
    under torch.func transforms, forward-mode AD, torch.jit.trace or torch.onnx.export run PyTorch's
    own operator.
    """
    if not _is_compiling():
        recipe = recall(input, weight, bias, stride, padding, output_padding, groups, dilation)
        if recipe is not None:
            if recipe.differentiable and torch.is_grad_enabled():
                return apply(input, weight, bias, recipe)
            return recipe.forward(input, weight, bias)
    if backends.DISABLED or pytorch_needed():
        return torch.conv_transpose3d(
            input, weight, bias, stride, padding, output_padding, groups, dilation
        )
    # In this order: Dynamo follows is_compiling() and nothing after it.
    if _is_compiling() or not plain(input, weight, bias) or dispatcher_needed():
        return _dispatched(input, weight, bias, stride, padding, output_padding, groups, dilation)
    autocast = _autocast_anywhere()
    if autocast:
        input, weight, bias = _autocast(input, weight, bias)
    geometry, batched = normalise(
        input.shape,
        weight.shape,
        None if bias is None else bias.shape,
        stride,
        padding,
        output_padding,
        groups,
        dilation,
    )
    check_types(input, weight, bias)
    steps: Steps | Recipe | None = None
    if not batched:
        input = input.unsqueeze(0)
    elif not autocast:
        steps = record(
            input, weight, bias, stride, padding, output_padding, groups, dilation, geometry
        )
    if steps is None:
        steps = Steps((geometry, input.shape[2:], result_channels_last(input, weight)))
    if torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        output = apply(input, weight, bias, steps)
    else:
        output = steps.forward(input, weight, bias)
    return output if batched else output.squeeze(0)


def _dispatched(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    output_padding: int | Sequence[int],
    groups: int,
    dilation: int | Sequence[int],
) -> Tensor:
    """The same through the registered operator; no caches, so that sizes may be symbolic."""
    supported = _supported(input) and _supported(weight) and (bias is None or _supported(bias))
    # ONNX knows PyTorch's operator only, and so has a node for it.
    if not supported or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export():
        return torch.conv_transpose3d(
            input, weight, bias, stride, padding, output_padding, groups, dilation
        )
    input, weight, bias = _autocast(input, weight, bias)
    geometry, batched = check(
        input.shape,
        weight.shape,
        None if bias is None else bias.shape,
        triple("stride", stride),
        triple("padding", padding),
        triple("output_padding", output_padding),
        group_count(groups),
        triple("dilation", dilation),
    )
    check_types(input, weight, bias)
    prepare(input, weight)
    if batched:
        return ops.call_forward(input, weight, bias, geometry)
    return ops.call_forward(input.unsqueeze(0), weight, bias, geometry).squeeze(0)


def _supported(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype in DTYPES and tensor.layout == torch.strided


def _autocast(
    input: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What PyTorch's autocast does for a lower-precision operator: float64 stays as it is."""
    kind = input.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # no autocast knows of meta
        return input, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return (
        _cast(input, kind, dtype),
        _cast(weight, kind, dtype),
        None if bias is None else _cast(bias, kind, dtype),
    )


def _cast(tensor: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    if tensor.dtype == torch.float64 or tensor.device.type != kind:
        return tensor
    return tensor.to(dtype)
