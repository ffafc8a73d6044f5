"""The registered operators as PyTorch's own, for graphs that have to do without convt3d."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from convt3d import native
from convt3d.operands import geometry_of, weight_size


def decompositions() -> dict[OpOverload, Callable[..., Tensor]]:
    """Decompositions of the ``convt3d::`` operators of an exported graph into PyTorch's.

    For :meth:`torch.export.ExportedProgram.run_decompositions`: what reads the program afterwards
    (``torch.onnx.export``, another runtime, a process without convt3d) finds a converted layer as
    ``aten::convolution``, as in the graph of the original model::

        program = program.run_decompositions(convt3d.decompositions())
    """
    registered = torch.ops.convt3d
    return {
        registered.conv_transpose3d.default: _conv_transpose3d,
        registered.conv3d.default: _conv3d,
        registered.grad_weight.default: _grad_weight,
    }


def _conv_transpose3d(
    input: Tensor, weight: Tensor, bias: Tensor | None, channels_last: bool, *parameters: Any
) -> Tensor:
    geometry = geometry_of(weight.shape, parameters)
    return native.forward(input, weight, bias, geometry, channels_last)


def _conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output_size: Sequence[int],
    channels_last: bool,
    *parameters: Any,
) -> Tensor:
    geometry = geometry_of(weight.shape, parameters)
    return native.grad_input(input, weight, geometry, output_size, channels_last, bias)


def _grad_weight(
    input: Tensor,
    grad_output: Tensor,
    kernel_size: Sequence[int],
    channels_last: bool,
    *parameters: Any,
) -> Tensor:
    size = weight_size(input.shape, grad_output.shape, kernel_size, parameters)
    return native.grad_weight(input, grad_output, geometry_of(size, parameters), channels_last)
