"""The operator written with PyTorch's other operators: polyphase convolutions, and one GEMM.

The portable backend runs these where they beat PyTorch's own transposed convolution, and the
benchmark runs them as peers: they are the best that a user could write without own kernels.
Tensors are 5-D and already checked against the geometry. Weights are packed apart from the
application, so that a benchmark can leave the packing out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from convt3d.geometry import Geometry, Triple
from convt3d.guards import untracked_views
from convt3d.layout import empty
from convt3d.polyphase import phase_extent, tapped_phases

Convolution = Callable[[Tensor, Tensor, Tensor | None, Triple, Triple, int], Tensor]
"""Stride-1 ``(x, w, b, padding, dilation, groups) -> y``, as :func:`conv3d`."""


def conv3d(
    x: Tensor, w: Tensor, b: Tensor | None, padding: Triple, dilation: Triple, groups: int
) -> Tensor:
    """PyTorch's convolution of stride 1."""
    return torch.conv3d(x, w, b, 1, padding, dilation, groups)


# --- Polyphase -----------------------------------------------------------------------------------


class _AxisPhase(NamedTuple):
    """One phase of one axis as a convolution of stride 1 over a part of the input."""

    outputs: slice  # of the output axis
    taps: slice  # of the flipped kernel axis
    dilation: int
    source: slice  # of the input axis: what lies beyond is not read by this phase
    padding: int  # on both sides of the source
    crop: slice  # of the convolution's result: the two sides may need different padding


def _axis(
    extent: int, output_extent: int, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[list[_AxisPhase], bool]:
    """Phases of an axis with outputs that read the input; whether others have outputs."""
    result: list[_AxisPhase] = []
    step = stride // gcd(stride, dilation)
    for phase, taps in tapped_phases(kernel, stride, padding, dilation).items():
        count = phase_extent(output_extent, stride, phase)
        if count == 0:
            continue
        low, high = taps[-1].shift, taps[0].shift + count - 1  # first and last input index read
        start, stop = max(low, 0), min(high, extent - 1) + 1
        if start >= stop:
            continue
        left, right = max(-low, 0), max(high - (extent - 1), 0)
        both = max(left, right)
        result.append(
            _AxisPhase(
                outputs=slice(phase, None, stride),
                taps=slice(kernel - 1 - taps[-1].kernel_index, kernel - taps[0].kernel_index, step),
                dilation=dilation // gcd(stride, dilation),
                source=slice(start, stop),
                padding=both,
                crop=slice(both - left, both - left + count),
            )
        )
    return result, len(result) < min(stride, output_extent)


class _Phases(NamedTuple):
    output_size: Triple
    full: list[tuple[_AxisPhase, _AxisPhase, _AxisPhase]]
    bias_only: bool  # some outputs are reached by no phase in ``full``


@lru_cache(maxsize=1024)
def _phases(geometry: Geometry, input_size: Triple) -> _Phases:
    output_size = geometry.output_size(input_size)
    axes = [
        _axis(*arguments)
        for arguments in zip(
            input_size,
            output_size,
            geometry.kernel_size,
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            strict=True,
        )
    ]
    d, h, w = (phases for phases, _ in axes)
    return _Phases(output_size, list(itertools.product(d, h, w)), any(others for _, others in axes))


def polyphase_pack(w: Tensor, geometry: Geometry, input_size: Triple) -> list[Tensor]:
    """Sub-kernels of the phases, each (C_out, C_in / groups, taps of D, of H, of W)."""
    g = geometry
    flipped = (
        w.unflatten(0, (g.groups, g.in_channels_per_group))
        .transpose(1, 2)
        .flatten(0, 1)
        .flip(2, 3, 4)
    )
    return [flipped[:, :, d.taps, h.taps, x.taps] for d, h, x in _phases(geometry, input_size).full]


def polyphase(
    x: Tensor,
    packed: list[Tensor],
    b: Tensor | None,
    geometry: Geometry,
    channels_last: bool,
    convolution: Convolution = conv3d,
) -> Tensor:
    """Forward: one stride-1 convolution per output phase, interleaved (see ``polyphase.py``)."""
    n, _, depth, height, width = x.shape
    output_size, full, bias_only = _phases(geometry, (depth, height, width))
    y: Tensor | None = None
    if geometry.stride != (1, 1, 1) or bias_only:
        y = empty((n, geometry.out_channels, *output_size), x, channels_last)
    if y is not None and bias_only:
        _fill(y, b)
    for axes, weight in zip(full, packed, strict=True):
        d, h, w = axes
        source = x[:, :, d.source, h.source, w.source]
        padding = (d.padding, h.padding, w.padding)
        dilation = (d.dilation, h.dilation, w.dilation)
        result = convolution(source, weight, b, padding, dilation, geometry.groups)
        with untracked_views():
            result = result[:, :, d.crop, h.crop, w.crop]
        if y is None:
            return result
        y[:, :, d.outputs, h.outputs, w.outputs] = result
    assert y is not None
    return y


def _fill(y: Tensor, b: Tensor | None) -> None:
    if b is None:
        y.zero_()
    else:
        y.copy_(b.view(1, -1, 1, 1, 1).expand_as(y))


# --- Kernel equal to stride ----------------------------------------------------------------------


def is_gemm(geometry: Geometry) -> bool:
    """Whether every output voxel gets exactly one tap: the layer is one matrix product."""
    return (
        geometry.kernel_size == geometry.stride
        and geometry.groups == 1
        and geometry.padding == (0, 0, 0)
        and geometry.output_padding == (0, 0, 0)
        and (geometry.dilation == (1, 1, 1) or geometry.kernel_size == (1, 1, 1))
    )


def gemm_forward(
    x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, channels_last: bool
) -> Tensor:
    """Forward where :func:`is_gemm`: a matrix product, then a shuffle of the output."""
    n, c, depth, height, width = x.shape
    kd, kh, kw = geometry.kernel_size
    out = geometry.out_channels
    size = (n, out, depth * kd, height * kh, width * kw)
    y = empty(size, x, channels_last)
    blocks = y.view(n, out, depth, kd, height, kh, width, kw)
    if channels_last:
        rows = x.permute(0, 2, 3, 4, 1).reshape(-1, c)
        columns = w.permute(0, 2, 3, 4, 1).reshape(c, -1)
        product = (rows @ columns).view(n, depth, height, width, kd, kh, kw, out)
        product = product.permute(0, 7, 1, 4, 2, 5, 3, 6)
    else:
        product = torch.matmul(w.reshape(c, -1).t(), x.reshape(n, c, -1))
        product = product.view(n, out, kd, kh, kw, depth, height, width)
        product = product.permute(0, 1, 5, 2, 6, 3, 7, 4)
    if b is None:
        blocks.copy_(product)
    else:
        torch.add(product, b.view(1, -1, 1, 1, 1, 1, 1, 1), out=blocks)
    return y


def gemm_grad_weight(x: Tensor, gy: Tensor, geometry: Geometry) -> Tensor:
    """Gradient by the weight where :func:`is_gemm`: the shuffle undone, then a matrix product."""
    n, c, depth, height, width = x.shape
    kd, kh, kw = geometry.kernel_size
    blocks = gy.reshape(n, geometry.out_channels, depth, kd, height, kh, width, kw)
    columns = blocks.permute(1, 3, 5, 7, 0, 2, 4, 6).reshape(
        geometry.out_channels * kd * kh * kw, -1
    )
    rows = x.transpose(0, 1).reshape(c, -1)
    return (rows @ columns.t()).view(geometry.weight_size)
