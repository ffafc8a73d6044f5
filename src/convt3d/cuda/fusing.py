"""The tensors of a fused operation: checks before a launch, and what is left to do after it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from convt3d.cuda.epilogue import Epilogue, slice_channels
from convt3d.cuda.schedule import MAP_ALIGNMENT
from convt3d.fusion import Fusion


def check_slice(
    into: Tensor | None, source: Tensor, shape: Sequence[int], channels_last: bool
) -> int:
    """Channels of the tensor that ``into`` is a slice of; 0 where the output is dense.

    Raises:
        RuntimeError: it is none that an output of this shape, in this layout, can be written to.
    """
    if into is None:
        return 0
    if tuple(into.shape) != tuple(shape) or into.dtype != source.dtype:
        raise RuntimeError(
            f"expected a {source.dtype} tensor of size {list(shape)} to write to, but got "
            f"{into.dtype} of {list(into.shape)}"
        )
    if into.device != source.device:
        raise RuntimeError(
            f"expected a tensor to write to on {source.device}, but it is on {into.device}"
        )
    channels = slice_channels(into.shape, into.stride(), channels_last)
    if channels is None:
        layout = "channels_last_3d" if channels_last else "contiguous"
        raise RuntimeError(
            f"expected channels of a dense {layout} tensor to write to, but got strides "
            f"{into.stride()} of size {list(into.shape)}"
        )
    return 0 if channels == shape[1] else channels


def starts_aligned(into: Tensor, channels: int, channels_last: bool) -> bool:
    """Whether a slice lies in memory as kernels need their output.

    Vector stores and tensor maps need every sample, of channels_last slices every position, to
    begin at a multiple of 16 bytes where the first one does.
    """
    step = channels * into.element_size()
    if not channels_last:
        step *= math.prod(into.shape[2:])
    return into.data_ptr() % MAP_ALIGNMENT == 0 and step % MAP_ALIGNMENT == 0


def epilogue_of(
    fusion: Fusion | None, operands: Sequence[Tensor], dtype: torch.dtype, channels: int
) -> Epilogue:
    """What kernels are to run: a fusion, and stores into a tensor of so many channels (0: none)."""
    if fusion is None:
        return Epilogue(channels=channels)
    wide = tuple(t.dtype == torch.float32 != dtype for t in operands)
    return Epilogue(fusion.kinds, fusion.scalars, wide, channels=channels)


def finished(
    output: Tensor, fusion: Fusion | None, operands: Sequence[Tensor], into: Tensor | None
) -> Tensor:
    """An output after the steps of a fusion, in ``into`` if that is given, by PyTorch."""
    if fusion is not None:
        output = fusion.apply(output, operands)
    return output if into is None or into is output else into.copy_(output)
