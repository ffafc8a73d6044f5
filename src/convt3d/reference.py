"""The definition, in float64: slow, obvious, and sharing no code with any backend.

One axis of a transposed layer: output o = i * stride - padding + k * dilation gets input[i] *
weight[k]. Each function loops over the taps k and adds one strided slice per tap. A Conv3d is
defined by its adjoint: output i gets the sum over k of input[o] * weight[k].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from convt3d.geometry import Geometry

_Index = tuple[Any, ...]

# n batch; g group; i, o channels of one group; x, y, z input positions.
_FORWARD = "ngixyz,gio->ngoxyz"
_GRAD_INPUT = "ngoxyz,gio->ngixyz"
_GRAD_WEIGHT = "ngixyz,ngoxyz->gio"


def forward(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Output (N, C_out, D_out, H_out, W_out), float64, contiguous.

    Args:
        input: (N, C_in, D, H, W), any real dtype.
        weight: of ``geometry.weight_size``.
        bias: (C_out,) or None.
    """
    if not geometry.transposed:
        size = input.shape[2:]
        output = grad_input(input, weight, geometry.adjoint(size), geometry.output_size(size))
        return output if bias is None else output + bias.double().view(1, -1, 1, 1, 1)
    x, w = _split_input(input, geometry), _split_weight(weight, geometry)
    canvas = _canvas(geometry, input.shape, x)
    for tap, window in _taps(geometry, input.shape):
        canvas[window] += torch.einsum(_FORWARD, x, w[tap])
    output = canvas[_crop(geometry, input.shape)].flatten(1, 2).contiguous()
    if bias is not None:
        output += bias.double().view(1, -1, 1, 1, 1)
    return output


def grad_input(
    grad_output: Tensor, weight: Tensor, geometry: Geometry, input_size: Sequence[int]
) -> Tensor:
    """Gradient by the input, (N, C_in, D, H, W), float64; ``input_size`` is (D, H, W)."""
    if not geometry.transposed:
        return forward(grad_output, weight, None, geometry.adjoint(input_size))
    size = (grad_output.shape[0], geometry.in_channels, *input_size)
    canvas = _gradient_canvas(grad_output, geometry, size)
    w = _split_weight(weight, geometry)
    result = grad_output.new_zeros(size, dtype=torch.float64)
    for tap, window in _taps(geometry, size):
        result += torch.einsum(_GRAD_INPUT, canvas[window], w[tap]).flatten(1, 2)
    return result


def grad_weight(input: Tensor, grad_output: Tensor, geometry: Geometry) -> Tensor:
    """Gradient by the weight, of ``geometry.weight_size``, float64."""
    if not geometry.transposed:
        return grad_weight(grad_output, input, geometry.adjoint(input.shape[2:]))
    x = _split_input(input, geometry)
    canvas = _gradient_canvas(grad_output, geometry, input.shape)
    result = input.new_zeros(geometry.weight_size, dtype=torch.float64)
    for tap, window in _taps(geometry, input.shape):
        result[tap] = torch.einsum(_GRAD_WEIGHT, x, canvas[window]).flatten(0, 1)
    return result


def grad_bias(grad_output: Tensor) -> Tensor:
    """Gradient by the bias, (C_out,), float64."""
    return grad_output.double().sum((0, 2, 3, 4))


def _split_input(input: Tensor, geometry: Geometry) -> Tensor:
    return input.detach().double().unflatten(1, (geometry.groups, geometry.in_channels_per_group))


def _split_weight(weight: Tensor, geometry: Geometry) -> Tensor:
    return weight.detach().double().unflatten(0, (geometry.groups, geometry.in_channels_per_group))


def _canvas(geometry: Geometry, size: Sequence[int], like: Tensor) -> Tensor:
    """Zeros for every position i * stride + k * dilation: the output before padding crops it."""
    spatial = [
        max((n - 1) * s + d * (k - 1) + 1, p + out)
        for n, s, d, k, p, out in zip(
            size[2:],
            geometry.stride,
            geometry.dilation,
            geometry.kernel_size,
            geometry.padding,
            geometry.output_size(size[2:]),
            strict=True,
        )
    ]
    return like.new_zeros(size[0], geometry.groups, geometry.out_channels_per_group, *spatial)


def _gradient_canvas(grad_output: Tensor, geometry: Geometry, size: Sequence[int]) -> Tensor:
    """The output's gradient placed in its canvas; what the padding cropped stays zero."""
    gy = grad_output.detach().double()
    canvas = _canvas(geometry, size, gy)
    canvas[_crop(geometry, size)] = gy.unflatten(
        1, (geometry.groups, geometry.out_channels_per_group)
    )
    return canvas


def _crop(geometry: Geometry, size: Sequence[int]) -> tuple[slice, ...]:
    output = geometry.output_size(size[2:])
    return (slice(None),) * 3 + tuple(
        slice(p, p + n) for p, n in zip(geometry.padding, output, strict=True)
    )


def _taps(geometry: Geometry, size: Sequence[int]) -> Iterator[tuple[_Index, _Index]]:
    """Every tap as an index of the weight, with the canvas positions the input reaches by it."""
    for tap in itertools.product(*map(range, geometry.kernel_size)):
        window = (
            slice(k * d, k * d + (n - 1) * s + 1, s)
            for k, d, n, s in zip(tap, geometry.dilation, size[2:], geometry.stride, strict=True)
        )
        yield (..., *tap), (..., *window)
