"""A backend for CPU tensors whose functions have epilogues: what the CUDA backend is on a GPU.

The fused function counts its calls, and ``prepared`` those that decide them. It writes results
over poison, with strides of its own making.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from convt3d import portable
from convt3d.fusion import Fusion
from convt3d.geometry import Geometry
from convt3d.layout import Part, empty
from convt3d.portable import forward, grad_input, grad_weight

__all__ = ["calls", "forward", "fused", "grad_input", "grad_weight", "prepare_fused", "prepared"]

calls: list[tuple[str, tuple[str, ...], bool]] = []
"""Operation, kinds and whether the result was written into a larger tensor, of each call."""

prepared: list[str] = []
"""Operation of each call of ``prepare_fused``."""


def fused(
    operation: str,
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    fusion: Fusion | None,
    operands: Sequence[Tensor],
    into: Tensor | None = None,
) -> Tensor:
    """As ``convt3d.cuda.backend.fused``: bias and steps in float32, one rounding."""
    calls.append((operation, () if fusion is None else fusion.kinds, into is not None))
    wide = torch.float64 if source.dtype == torch.float64 else torch.float32
    x, w = source.to(wide), weight.to(wide)
    b = None if bias is None else bias.to(wide)
    result: Any
    if operation == "forward":
        result = portable.forward(x, w, b, geometry, channels_last)
    else:
        result = portable.grad_input(x, w, geometry, input_size, channels_last, b)
    if fusion is not None:
        result = fusion.apply(result, [operand.to(wide) for operand in operands])
    if into is None:
        into = empty(result.shape, source, channels_last)
    return into.fill_(torch.nan).copy_(result)


def prepare_fused(
    operation: str,
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    fusion: Fusion | None,
    operands: Sequence[Tensor],
    part: Part | None = None,
) -> Callable[..., Tensor]:
    """As ``convt3d.cuda.backend.prepare_fused``."""
    prepared.append(operation)
    decided = (geometry, input_size, channels_last, fusion)
    return lambda x, w, b, operands, into: fused(operation, x, w, b, *decided, operands, into)
