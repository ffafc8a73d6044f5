"""PyTorch's own operator behind the interface of a backend: where everything declined goes.

All functions take 5-D tensors that have been checked against a ``Geometry``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from convt3d.geometry import Geometry
from convt3d.guards import untracked_views, without_autocast
from convt3d.layout import empty, laid_out


def forward(
    x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, channels_last: bool
) -> Tensor:
    """Output (N, C_out, D_out, H_out, W_out), in the memory format that PyTorch gives it."""
    g = geometry
    with without_autocast():
        return torch.convolution(
            x, w, b, g.stride, g.padding, g.dilation, True, g.output_padding, g.groups
        )


def grad_input(
    gy: Tensor,
    w: Tensor,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Gradient by the input, (N, C_in, D, H, W); ``input_size`` is (D, H, W).

    By definition a convolution of the output gradient: with a ``bias``, PyTorch's own Conv3d.
    """
    g = geometry
    if gy.is_cpu:  # in the layer's format, as PyTorch's: oneDNN's bfloat16 errs in some others
        gy = laid_out(gy, channels_last)
    with without_autocast():
        result = torch.convolution(
            gy, w, bias, g.stride, g.padding, g.dilation, False, (0, 0, 0), g.groups
        )
    return cropped(result, input_size)


def cropped(result: Tensor, input_size: Sequence[int]) -> Tensor:
    """A gradient by input without the one position too many of an axis.

    There is one where output_padding reaches the stride.
    """
    depth, height, width = input_size
    if result.shape[2:] == (depth, height, width):
        return result
    with untracked_views():
        return result[:, :, :depth, :height, :width]


def grad_weight(x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool) -> Tensor:
    """Gradient by the weight, (C_in, C_out / groups, kD, kH, kW)."""
    w = empty(geometry.weight_size, gy, channels_last)  # its values are never read
    return gradients(gy, x, w, geometry, transposed=True, wanted=(False, True))[1]


def convolution_grad_weight(
    x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool
) -> Tensor:
    """:func:`grad_weight` as a Conv3d's: ``gy`` is its input, ``x`` as large as its output.

    ``output_padding`` is below the stride. PyTorch works in the memory format of the input: where
    that has one channel, which is dense in both formats, the two functions may differ in it.
    """
    w = empty(geometry.weight_size, gy, channels_last)  # its values are never read
    return gradients(x, gy, w, geometry, transposed=False, wanted=(False, True))[1]


def gradients(
    gy: Tensor,
    x: Tensor,
    w: Tensor,
    geometry: Geometry,
    *,
    transposed: bool,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor]:
    """PyTorch's gradients by input and by weight, of which those not ``wanted`` are undefined.

    They are those of a transposed layer, or of a Conv3d with the parameters of ``geometry``.
    """
    g = geometry
    output_padding = g.output_padding if transposed else (0, 0, 0)
    by_input, by_weight, _ = torch.ops.aten.convolution_backward.default(
        gy, x, w, None, g.stride, g.padding, g.dilation, transposed, output_padding, g.groups,
        (*wanted, False),
    )  # fmt: skip
    return by_input, by_weight


def grad_bias(gy: Tensor) -> Tensor:
    """Gradient by the bias, (C_out,)."""
    return gy.sum((0, 2, 3, 4))
