"""A CPU backend that autograd cannot look into, as it cannot look into a CUDA kernel.

The portable backend is made of differentiable torch operators, so on CPU a call that skipped the
autograd.Function, or lost a tangent, would still give the right derivative. Here it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from convt3d import native
from convt3d.geometry import Geometry
from convt3d.layout import laid_out


def _memory(tensor: Tensor) -> Tensor:
    """The numbers in memory without any history; refuses batched and lazily negated tensors."""
    known = tensor.detach()
    if known.dtype == torch.bfloat16:  # which numpy lacks
        return torch.from_numpy(known.view(torch.int16).numpy()).view(torch.bfloat16)
    return torch.from_numpy(known.numpy())


def _bias(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _memory(tensor)


def forward(
    x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, channels_last: bool
) -> Tensor:
    y = native.forward(_memory(x), _memory(w), _bias(b), geometry, channels_last)
    return laid_out(y, channels_last)


def grad_input(
    gy: Tensor,
    w: Tensor,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    bias: Tensor | None = None,
) -> Tensor:
    b = _bias(bias)
    gx = native.grad_input(_memory(gy), _memory(w), geometry, input_size, channels_last, b)
    return laid_out(gx, channels_last)


def grad_weight(x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool) -> Tensor:
    gw = native.grad_weight(_memory(x), _memory(gy), geometry, channels_last)
    return laid_out(gw, channels_last)


def prepare_forward(
    x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, channels_last: bool
) -> Callable[..., Tensor]:
    return lambda x, w, b=None: forward(x, w, b, geometry, channels_last)


def prepare_grad_input(
    gy: Tensor,
    w: Tensor,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    bias: Tensor | None = None,
) -> Callable[..., Tensor]:
    return lambda gy, w, b=None: grad_input(gy, w, geometry, input_size, channels_last, b)


def prepare_grad_weight(
    x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, gy: grad_weight(x, gy, geometry, channels_last)
