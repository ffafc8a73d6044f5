"""One measured case: a layer, an arithmetic, a layout and a pass; and its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from convt3d.bench.shapes import Shape
from convt3d.layout import empty
from convt3d.operations import OPERATIONS

PASSES = (*OPERATIONS, "train")
LAYOUTS = ("ncdhw", "ndhwc")


@dataclass(frozen=True)
class Mode:
    """A dtype together with PyTorch's TF32 switch, under the name that reports use."""

    name: str
    dtype: torch.dtype
    tf32: bool | None = None  # None: the switch does not matter

    @contextmanager
    def applied(self, device: torch.device) -> Iterator[None]:
        """Inside, PyTorch's switches are set, for convolutions and for matrix products alike.

        They govern CUDA alone; for other devices they stay as they are.
        """
        if self.tf32 is None or device.type != "cuda":
            yield
            return
        holders: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
        name: str = "allow_tf32"
        value: bool | str = self.tf32
        if hasattr(torch.backends.cudnn, "conv"):  # torch 2.9 and later
            holders = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)
            name, value = "fp32_precision", "tf32" if self.tf32 else "ieee"
        before = [getattr(holder, name) for holder in holders]
        for holder in holders:
            setattr(holder, name, value)
        try:
            yield
        finally:
            for holder, old in zip(holders, before, strict=True):
                setattr(holder, name, old)

    @property
    def element_size(self) -> int:
        return torch.empty(0, dtype=self.dtype).element_size()


MODES = {
    mode.name: mode
    for mode in (
        Mode("tf32", torch.float32, True),
        Mode("fp32", torch.float32, False),
        Mode("bf16", torch.bfloat16),
        Mode("fp16", torch.float16),
        Mode("fp64", torch.float64),
    )
}


@dataclass(frozen=True)
class Tensors:
    """Operands of one layer: input, weight, bias or None, gradient of the output."""

    shape: Shape
    x: Tensor
    w: Tensor
    b: Tensor | None
    gy: Tensor
    channels_last: bool


def make(shape: Shape, mode: Mode, channels_last: bool, device: torch.device) -> Tensors:
    """Fresh normal data; the weight has the scale of PyTorch's default initialisation."""
    g = shape.geometry
    like = torch.empty(0, dtype=mode.dtype, device=device)
    # PyTorch's fan-in: the second dimension of the weight, of both kinds of layers, and the taps.
    scale = (3 * prod(g.weight_size[1:])) ** -0.5
    return Tensors(
        shape=shape,
        x=empty(shape.x_size, like, channels_last).normal_(),
        w=empty(g.weight_size, like, channels_last).normal_(std=scale),
        b=torch.randn(g.out_channels, dtype=mode.dtype, device=device) if shape.bias else None,
        gy=empty(shape.y_size, like, channels_last).normal_(),
        channels_last=channels_last,
    )
