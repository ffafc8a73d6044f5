"""The operator from torch operators alone: CPU, and any device without own kernels.

All functions take 5-D tensors that have already been checked against a ``Geometry``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from convt3d.geometry import Geometry


def forward(x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry) -> Tensor:
    """Transposed convolution, ``(N, C_in, D, H, W) -> (N, C_out, D', H', W')``."""
    return torch.ops.aten.convolution(
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
    """Gradient by the input: an ordinary strided convolution of ``gy``.

    ``input_size`` holds the three spatial extents of the input.
    """
    result = torch.ops.aten.convolution(
        gy,
        w,
        None,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        False,
        (0, 0, 0),
        geometry.groups,
    )
    # The convolution may give one position more than the input had when padding cut it off.
    depth, height, width = input_size
    result = result[:, :, :depth, :height, :width]
    return result.contiguous(memory_format=_format(channels_last))


def grad_weight(x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool) -> Tensor:
    """Gradient by the weight, ``(C_in, C_out / groups, kD, kH, kW)``."""
    shape = (geometry.in_channels, geometry.out_channels_per_group, *geometry.kernel_size)
    weight = x.new_empty(shape)
    result = torch.ops.aten.convolution_backward(
        gy,
        x,
        weight,
        None,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        True,
        geometry.output_padding,
        geometry.groups,
        (False, True, False),
    )[1]
    return result.contiguous(memory_format=_format(channels_last))


def _format(channels_last: bool) -> torch.memory_format:
    return torch.channels_last_3d if channels_last else torch.contiguous_format
