"""``conv3d`` and ``conv_transpose3d``: the signatures and semantics of torch.nn.functional's."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from convt3d import backends, ops
from convt3d.arguments import (
    Ints,
    Parameters,
    check,
    check_types,
    group_count,
    normalise,
    triple,
)
from convt3d.dispatch import (
    DTYPES,
    dispatcher_needed,
    in_function_mode,
    plain,
    pytorch_needed,
    records_gradients,
)
from convt3d.distributed import prepare
from convt3d.eager import Checked, apply
from convt3d.geometry import Geometry
from convt3d.layer import Layer
from convt3d.layout import result_channels_last
from convt3d.recipes import recall, record
from convt3d.steps import Steps

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

    float16, bfloat16, float32 and float64 are handled here. Complex and integer tensors, tensors
    without elements, and calls under torch.func transforms, forward-mode AD, torch.jit.trace or
    torch.onnx.export run PyTorch's own operator.
    """
    if output_padding is None:  # below, None stands for conv3d
        return torch.conv_transpose3d(input, weight, output_padding=output_padding)  # TypeError
    return _call(input, weight, bias, stride, padding, output_padding, groups, dilation)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """3-D convolution; a drop-in for :func:`torch.nn.functional.conv3d`.

    Args:
        input: (N, C_in, D, H, W), or unbatched (C_in, D, H, W).
        weight: (C_out, C_in / groups, kD, kH, kW), of the dtype and device of the input.
        bias: (C_out,) or None.
        stride: voxels of input per voxel of output; here and below an int, or one for each of D, H
            and W.
        padding: zeros added at both ends of the input; or ``"valid"`` for none, or ``"same"`` for
            as many as make the output as large as the input (stride 1 only).
        dilation: distance of neighbouring taps in voxels of the input.
        groups: number of groups; divides C_in and C_out.

    Returns:
        (N, C_out, D_out, H_out, W_out), or without N for unbatched input, where on each axis
        ``out = (in + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1``. dtype, device and
        memory format are those that PyTorch gives. Autocast and the TF32 switches act as on
        PyTorch's operator.

    Raises:
        TypeError: an argument is of a type that PyTorch does not take.
        RuntimeError: sizes, dtypes, devices or parameters that do not fit; before any launch.

    float16, bfloat16 and float32 on CUDA are handled here. Everything else, and what
    :func:`conv_transpose3d` leaves to PyTorch, runs PyTorch's own operator.
    """
    return _call(input, weight, bias, stride, padding, None, groups, dilation)


def _call(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints | str,
    output_padding: Ints | None,
    groups: int,
    dilation: Ints,
) -> Tensor:
    """Either layer; here and in ``Parameters`` ``output_padding`` is None for conv3d."""
    owner = weight
    if not _is_compiling() and not in_function_mode():
        if _autocast_anywhere():
            input, weight, bias = cast_as_autocast(input, weight, bias)
        recipe = recall(
            input, weight, bias, stride, padding, output_padding, groups, dilation, owner
        )
        if recipe is not None:
            if recipe.differentiable and records_gradients():
                if recipe.left:
                    return _pytorch(input, weight, bias, recipe.parameters)
                return apply(input, weight, bias, recipe)
            return recipe.forward(input, weight, bias)
    transposed = output_padding is not None
    parameters = (stride, padding, output_padding, groups, dilation)
    if has_torch_function_variadic(input, weight, bias):
        ours = conv_transpose3d if transposed else conv3d
        given: tuple[Any, ...] = (input, weight, bias, *_in_order(parameters))
        return handle_torch_function(ours, given[:3], *given)
    if backends.DISABLED or pytorch_needed() or not (transposed or backends.runs_conv3d(input)):
        return _pytorch(input, weight, bias, parameters)
    if not transposed and isinstance(padding, str):
        return _conv3d_of_words(input, weight, bias, stride, padding, dilation, groups)
    # In this order: Dynamo follows is_compiling() and nothing after it.
    if _is_compiling() or not plain(input, weight, bias) or dispatcher_needed():
        return _dispatched(input, weight, bias, parameters)
    return _eager(input, weight, bias, parameters, owner)


def _in_order(parameters: Parameters) -> tuple[Any, ...]:
    """Parameters in the order of the signature of their layer."""
    stride, padding, output_padding, groups, dilation = parameters
    return (stride, padding, dilation, groups) if output_padding is None else parameters


def _pytorch(input: Tensor, weight: Tensor, bias: Tensor | None, parameters: Parameters) -> Tensor:
    """PyTorch's operator."""
    operator: Any = torch.conv3d if parameters[2] is None else torch.conv_transpose3d
    result: Tensor = operator(input, weight, bias, *_in_order(parameters))
    return result


def _conv3d_of_words(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: str,
    dilation: Ints,
    groups: int,
) -> Tensor:
    """:func:`conv3d` with padding "same" or "valid"; what these do not fit, PyTorch refuses."""
    if padding == "valid":
        return conv3d(input, weight, bias, stride, 0, dilation, groups)
    if (
        padding != "same"
        or not _is_unit(stride)
        or input.dim() not in (4, 5)
        or weight.dim() != 5
        or not isinstance(dilation, (int, tuple, list))
    ):
        return torch.conv3d(input, weight, bias, stride, padding, dilation, groups)
    steps = triple("dilation", dilation)
    total = [d * (k - 1) for d, k in zip(steps, weight.shape[2:], strict=True)]
    before = (total[0] // 2, total[1] // 2, total[2] // 2)
    after = [n % 2 for n in total]  # the extra voxel of an even kernel goes to the far end
    if any(after):
        _warn_of_copy()
        d, h, w = after
        input = torch.nn.functional.pad(input, (0, w, 0, h, 0, d))
    return conv3d(input, weight, bias, stride, before, dilation, groups)


def _is_unit(stride: Any) -> bool:
    """Whether a stride is 1 along all axes."""
    return stride == 1 or (isinstance(stride, (tuple, list)) and all(s == 1 for s in stride))


_warned: list[bool] = []


def _warn_of_copy() -> None:
    """PyTorch's warning, once a process as there."""
    if not _warned and not _is_compiling():
        _warned.append(True)
        warnings.warn(
            "Using padding='same' with even kernel lengths and odd dilation may require a "
            "zero-padded copy of the input be created",
            stacklevel=5,
        )


def _eager(
    input: Tensor, weight: Tensor, bias: Tensor | None, parameters: Parameters, owner: Tensor
) -> Tensor:
    """A call on plain tensors seen for the first time; ``owner``: see ``recipes.recall``."""
    checked = checked_geometry(input, weight, bias, parameters)
    if checked is None:  # PyTorch's error, or its result for a tensor without elements
        return _pytorch(input, weight, bias, parameters)
    geometry, batched = checked
    if not batched:
        input = input.unsqueeze(0)
    layer = layer_of(input, weight, geometry)
    differentiable = records_gradients() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    if differentiable:
        backends.expect_gradients(layer, input, weight, bias)
    steps: Steps | None = None
    if batched:
        steps = record(input, weight, bias, parameters, layer, owner)
    if steps is None:
        steps = Checked(layer)
    if differentiable:
        output = apply(input, weight, bias, steps)
    else:
        output = steps.forward(input, weight, bias)
    return output if batched else output.squeeze(0)


def checked_geometry(
    input: Tensor, weight: Tensor, bias: Tensor | None, parameters: Parameters
) -> tuple[Geometry, bool] | None:
    """The geometry of a call on plain tensors, and whether its input is batched.

    None where PyTorch's operator is to say what is wrong with the arguments.
    """
    stride, padding, output_padding, groups, dilation = parameters
    try:
        check_types(input, weight, bias)
        return normalise(
            input.shape,
            weight.shape,
            None if bias is None else bias.shape,
            stride,
            padding,
            0 if output_padding is None else output_padding,
            groups,
            dilation,
            output_padding is not None,
        )
    except (RuntimeError, TypeError):
        return None


def layer_of(input: Tensor, weight: Tensor, geometry: Geometry) -> Layer:
    """The layer of a checked call on a 5-D input."""
    channels_last = result_channels_last(input, weight, geometry)
    return Layer.of(geometry, input.shape[2:], channels_last)


def _dispatched(
    input: Tensor, weight: Tensor, bias: Tensor | None, parameters: Parameters
) -> Tensor:
    """The same through the registered operators; no caches, so that sizes may be symbolic."""
    supported = _supported(input) and _supported(weight) and (bias is None or _supported(bias))
    # ONNX knows PyTorch's operator only, and so has a node for it. PyTorch takes any weight with an
    # input on meta.
    apart = supported and input.is_meta and not weight.is_meta
    if not supported or apart or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export():
        return _pytorch(input, weight, bias, parameters)
    input, weight, bias = cast_as_autocast(input, weight, bias)
    stride, padding, output_padding, groups, dilation = parameters
    try:
        geometry, batched = check(
            input.shape,
            weight.shape,
            None if bias is None else bias.shape,
            triple("stride", stride),
            triple("padding", padding),
            triple("output_padding", 0 if output_padding is None else output_padding),
            group_count(groups),
            triple("dilation", dilation),
            output_padding is not None,
        )
    except RuntimeError:
        if _is_compiling():
            raise
        return _pytorch(input, weight, bias, parameters)  # its error, or an output without elements
    check_types(input, weight, bias)
    prepare(input, weight)
    if not batched:
        input = input.unsqueeze(0)
    layer = layer_of(input, weight, geometry)
    later = bias is not None and _is_compiling() and layer.bias_is_a_step
    output: Tensor = layer.output(ops.OPERATORS, input, weight, None if later else bias)
    if later and bias is not None:
        output = output + bias.view(-1, 1, 1, 1)
    return output if batched else output.squeeze(0)


def _known_to_torchscript() -> None:
    """Let ``torch.jit.script`` compile calls of these functions to PyTorch's operators."""
    register = getattr(torch.jit._builtins, "_register_builtin", None)
    if register is not None:
        register(conv3d, "aten::conv3d")
        register(conv_transpose3d, "aten::conv_transpose3d")


_known_to_torchscript()


def _supported(tensor: Any) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.dtype in DTYPES
        and tensor.layout == torch.strided
        and not tensor.is_nested
    )


def cast_as_autocast(
    input: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What PyTorch's autocast does for a lower-precision operator: float64 stays as it is."""
    if not isinstance(input, Tensor) or not isinstance(weight, Tensor):
        return input, weight, bias
    kind = input.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # no autocast knows of meta
        return input, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return (
        _cast(input, kind, dtype),
        _cast(weight, kind, dtype),
        _cast(bias, kind, dtype) if isinstance(bias, Tensor) else bias,
    )


def _cast(tensor: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    if (
        tensor.dtype is dtype
        or tensor.dtype == torch.float64
        or tensor.device.type != kind
        or not tensor.is_floating_point()
    ):
        return tensor
    return tensor.to(dtype)
