"""Memory format of every result: one rule, shared by all backends and by the fake kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from convt3d.geometry import Geometry
from convt3d.guards import untracked_views


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


def reads_channels_last(tensor: torch.Tensor) -> bool:
    """Whether to read a 5-D operand as channels_last; both, or neither, is read as NCDHW."""
    return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last_3d)


def result_channels_last(input: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> bool:
    """PyTorch's rule for the memory format of the output and of both gradients (5-D tensors).

    channels_last_3d when either tensor suggests it and what PyTorch would run writes it: cuDNN
    does for every dtype but float64 (``cudnn_conv_suggest_memory_format`` in
    ``ATen/native/ConvUtils.h``), a CPU where oneDNN runs, and tensors without memory never.
    """
    if not (suggests_channels_last_3d(input) or suggests_channels_last_3d(weight)):
        return False
    kind = input.device.type
    if input.dtype == torch.float64 or kind == "meta":
        return False
    return kind != "cpu" or _onednn_runs(input, geometry)


def _onednn_runs(input: torch.Tensor, g: Geometry) -> bool:
    """``ConvParams::use_mkldnn`` of ``aten/src/ATen/native/Convolution.cpp`` for a CPU tensor."""
    if not onednn_enabled():
        return False
    if any(extra >= s for extra, s in zip(g.output_padding, g.stride, strict=True)):
        return False
    if input.dtype == torch.bfloat16:
        return _onednn_has_bfloat16()
    if input.dtype == torch.float16:
        return _onednn_has_float16()
    batch, channels, depth, height, _ = input.shape
    if skips_onednn(batch, channels, depth, height, g.kernel_size[1:], g.groups):
        return False
    plain = g.stride == g.dilation == (1, 1, 1) and g.kernel_size[1:] == (1, 1)
    return not plain or batch >= 16 or torch.get_num_threads() > 1


def onednn_enabled() -> bool:
    """Whether PyTorch may use oneDNN now."""
    # A fifth of the time of the public property ``enabled``.
    return torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()


def _onednn_has_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _onednn_has_float16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


for _constant in (onednn_enabled, _onednn_has_bfloat16, _onednn_has_float16):
    # As torch.compiler.assume_constant_result, which would import Dynamo.
    _constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def skips_onednn(
    batch: int, channels: int, depth: int, height: int, kernel: Sequence[int], groups: int
) -> bool:
    """Whether PyTorch would not take oneDNN for a float32 convolution of this size on CPU.

    The heuristic looks at the batch, at three of the four other extents of the input and at the
    kernel along H and W.
    """
    return (
        batch == 1
        and groups == 1
        and not (kernel[0] > 3 and kernel[1] > 3)
        and channels * depth * height <= 20480
    )


class Part(NamedTuple):
    """Where a tensor lies in a new one of :func:`empty`: its channels are those from ``first`` on,
    of ``channels``.
    """

    first: int
    channels: int


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
            with untracked_views():
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


def beyond_32_bits(*sizes: Sequence[int]) -> bool:
    """Whether one channel passes 2^31 elements: kernels count positions in 32 bits."""
    return any(d * h * w >= 2**31 for d, h, w in sizes)
