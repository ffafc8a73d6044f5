"""``conv3d`` and ``conv_transpose3d`` with activations behind them, for ``fuse.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from convt3d import backends
from convt3d.arguments import Ints, Parameters
from convt3d.dispatch import dispatcher_needed, plain, pytorch_needed, records_gradients
from convt3d.functional import (
    cast_as_autocast,
    checked_geometry,
    conv3d,
    conv_transpose3d,
    layer_of,
)
from convt3d.fusion import Fusion


def conv3d_with_tail(
    fusion: Fusion,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    groups: int,
) -> Tensor:
    """:func:`conv3d`, then steps without operands: in the kernel's epilogue where there is one."""
    result = None
    if not isinstance(padding, str) and backends.runs_conv3d(input):
        parameters = (stride, padding, None, groups, dilation)
        result = _epilogue(fusion, input, weight, bias, parameters)
    if result is None:
        plain = conv3d(input, weight, bias, stride, padding, dilation, groups)
        result = fusion.apply(plain, ())
    return result


def conv_transpose3d_with_tail(
    fusion: Fusion,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    output_padding: Ints,
    groups: int,
    dilation: Ints,
) -> Tensor:
    """:func:`conv_transpose3d` likewise."""
    parameters = (stride, padding, output_padding, groups, dilation)
    result = _epilogue(fusion, input, weight, bias, parameters)
    if result is None:
        result = fusion.apply(conv_transpose3d(input, weight, bias, *parameters), ())
    return result


def _epilogue(
    fusion: Fusion,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parameters: Parameters,
) -> Tensor | None:
    """A layer with a tail in one kernel, or None where no such kernel may run.

    Plain eager calls on 5-D tensors without gradients. A compiled graph has the layer and its tail
    in PyTorch's operators, which the graph pass of ``convt3d.compile`` finds.
    """
    if torch.compiler.is_compiling() or pytorch_needed():
        return None
    input, weight, bias = cast_as_autocast(input, weight, bias)
    tensors = [tensor for tensor in (input, weight, bias) if tensor is not None]
    if records_gradients() and any(tensor.requires_grad for tensor in tensors):
        return None
    if not plain(input, weight, bias) or dispatcher_needed() or input.dim() != 5:
        return None
    checked = checked_geometry(input, weight, bias, parameters)
    if checked is None:
        return None
    layer = layer_of(input, weight, checked[0])
    operation = "forward" if layer.transposed else "grad_input"
    refusal = backends.fusion_refusal(
        operation,
        layer.geometry,
        input,
        input.shape[0],
        layer.size,
        layer.channels_last,
    )
    if refusal is not None:
        return None
    arguments = (operation, input, weight, bias, layer.geometry, layer.size)
    return backends.fused(*arguments, layer.channels_last, fusion, ())
