"""Memory format of every result: one rule, shared by all backends and by the fake kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch


def suggests_channels_last_3d(tensor: torch.Tensor) -> bool:
    """Whether PyTorch would suggest channels_last_3d for a 5-D tensor.

    ``Tensor.suggest_memory_format()`` exists in C++ only; the rule is that of
    ``c10/core/MemoryFormat.h``, ``is_channels_last_strides_3d_s5``, ambiguous cases included.
    """
    stride = tensor.stride()
    if stride[4] < stride[1] or stride[1] == 0:  # the usual NCDHW tensor leaves here
        return False
    size, least = tensor.shape, 0
    for axis in (1, 4, 3, 2, 0):
        if size[axis] == 0 or stride[axis] < least:
            return False
        if axis == 0 and least == stride[1]:
            return False
        least = stride[axis] * size[axis]
    return True


def result_channels_last(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """PyTorch's rule for the memory format of the output and of both gradients (5-D tensors).

    channels_last_3d when either tensor suggests it and the dtype is not float64, as
    ``cudnn_conv_suggest_memory_format`` in ``ATen/native/ConvUtils.h``; else contiguous.
    """
    return input.dtype != torch.float64 and (
        suggests_channels_last_3d(input) or suggests_channels_last_3d(weight)
    )


def empty(size: Sequence[int], like: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """Uninitialised 5-D tensor with the dtype and device of ``like``; every result is made here."""
    memory_format = torch.channels_last_3d if channels_last else torch.contiguous_format
    return torch.empty(size, dtype=like.dtype, device=like.device, memory_format=memory_format)


def laid_out(tensor: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """``tensor`` itself where its strides are those of :func:`empty`, else a tensor that has them.

    An axis of extent 1 has no say in ``contiguous``, but the strides of a result are visible to
    whoever asks for its memory format next, and torch.compile relies on them.
    """
    memory_format = torch.channels_last_3d if channels_last else torch.contiguous_format
    result = tensor.contiguous(memory_format=memory_format)
    if 1 in result.shape:
        stride = strides(result.shape, channels_last)
        if result.stride() != stride:
            result = result.as_strided(result.shape, stride)
    return result


@lru_cache(maxsize=4096)
def strides(size: Sequence[int], channels_last: bool) -> tuple[int, int, int, int, int]:
    """Strides of :func:`empty`, in elements; ``size`` is hashable."""
    _, channels, depth, height, width = size
    batch = channels * depth * height * width
    if channels_last:
        return (batch, 1, height * width * channels, width * channels, channels)
    return (batch, depth * height * width, height * width, width, 1)
