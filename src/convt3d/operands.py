"""What the registered operators are called with: the geometry that it stands for, and checks.

Parameters are stride, padding, output_padding and dilation, and in place of ``groups``
``group_channels``: the first dimension of the weight of one group, or 0 for a layer that is not
grouped. So a part of a layer that has some of its groups, or some of the channels of its only one,
takes the same parameters as the whole (``distributed.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from convt3d.arguments import check_types, triple
from convt3d.geometry import Geometry

Checker = Callable[..., tuple[Geometry, bool]]
"""``arguments.check`` or ``arguments.normalise``."""

Parameters = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], int]


def transposed_geometry(
    checker: Checker, input: Tensor, weight: Tensor, bias: Tensor | None, parameters: Parameters
) -> Geometry:
    """The geometry of arguments of ``conv_transpose3d``; RuntimeError where they do not fit."""
    _require_5d("input", input)
    bias_size = None if bias is None else bias.shape
    geometry, _ = _run(checker, input.shape, weight.shape, bias_size, parameters)
    check_types(input, weight, bias)
    return geometry


def convolution_geometry(
    checker: Checker,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output_size: Sequence[int],
    parameters: Parameters,
) -> Geometry:
    """The same of ``conv3d``; the geometry is that of the transposed layer."""
    _require_5d("input", input)
    size = (input.shape[0], weight.shape[0], *output_size)
    geometry, _ = _run(checker, size, weight.shape, None, parameters)
    _require_size("input", input, geometry, output_size)
    if bias is not None and tuple(bias.shape) != (geometry.in_channels,):
        raise RuntimeError(
            f"expected bias to be 1-dimensional with {geometry.in_channels} elements, "
            f"but got bias of size {list(bias.shape)} instead"
        )
    check_types(input, weight, bias)
    return geometry


def grad_weight_geometry(
    checker: Checker,
    input: Tensor,
    grad_output: Tensor,
    kernel_size: Sequence[int],
    parameters: Parameters,
) -> Geometry:
    """The same of ``grad_weight``."""
    _require_5d("input", input)
    _require_5d("grad_output", grad_output)
    size = weight_size(input.shape, grad_output.shape, kernel_size, parameters)
    geometry, _ = _run(checker, input.shape, size, None, parameters)
    _require_size("grad_output", grad_output, geometry, input.shape[2:])
    if input.shape[0] != grad_output.shape[0]:
        raise RuntimeError(
            f"expected input and grad_output of one batch size, but got {input.shape[0]} and "
            f"{grad_output.shape[0]}"
        )
    check_types(input, grad_output, None)
    return geometry


def _run(
    checker: Checker,
    input_size: Sequence[int],
    weight_size: Sequence[int],
    bias_size: Sequence[int] | None,
    parameters: Parameters,
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


def _require_size(name: str, tensor: Tensor, geometry: Geometry, input_size: Sequence[int]) -> None:
    """Raise a RuntimeError unless a tensor is as large as the output of the transposed layer."""
    expected = (geometry.out_channels, *geometry.output_size(input_size))
    if tuple(tensor.shape[1:]) != expected:
        raise RuntimeError(
            f"expected {name} to have size {list(expected)} after the batch, "
            f"but got {list(tensor.shape[1:])}"
        )


def parameters_of(geometry: Geometry) -> Parameters:
    """The parameters of a geometry."""
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
