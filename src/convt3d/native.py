"""PyTorch's own operator behind the interface of a backend: where everything declined goes.

All functions take 5-D tensors that have been checked against a ``Geometry``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from convt3d.geometry import Geometry
from convt3d.layout import empty


def forward(x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry) -> Tensor:
    """Output (N, C_out, D_out, H_out, W_out), in the memory format that PyTorch gives it."""
    return torch.convolution(
        x,
        w,
        b,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        True,
        geometry.output_padding,
        geometry.groups,
    )


def grad_input(
    gy: Tensor, w: Tensor, geometry: Geometry, input_size: Sequence[int], channels_last: bool
) -> Tensor:
    """Gradient by the input, (N, C_in, D, H, W); ``input_size`` is (D, H, W)."""
    # PyTorch reads size and memory format of the input here, never its values.
    size = (gy.shape[0], geometry.in_channels, *input_size)
    x = empty(size, gy, channels_last)
    return _backward(gy, x, w, geometry, (True, False, False))[0]


def grad_weight(x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool) -> Tensor:
    """Gradient by the weight, (C_in, C_out / groups, kD, kH, kW)."""
    w = empty(geometry.weight_size, gy, channels_last)
    return _backward(gy, x, w, geometry, (False, True, False))[1]


def _backward(
    gy: Tensor, x: Tensor, w: Tensor, geometry: Geometry, mask: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten.convolution_backward.default(
        gy,
        x,
        w,
        None,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        True,
        geometry.output_padding,
        geometry.groups,
        mask,
    )


def grad_bias(gy: Tensor) -> Tensor:
    """Gradient by the bias, (C_out,)."""
    return gy.sum((0, 2, 3, 4))
