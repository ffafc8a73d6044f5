"""One measured case: a layer, an arithmetic, a layout and a pass; and its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from convt3d.bench.shapes import Shape
from convt3d.layout import empty

PASSES = ("forward", "grad_input", "grad_weight", "train")
LAYOUTS = ("ncdhw", "ndhwc")


@dataclass(frozen=True)
class Mode:
    """A dtype together with PyTorch's TF32 switch, under the name that reports use."""

    name: str
    dtype: torch.dtype
    tf32: bool | None = None  # None: the switch does not matter

    def apply(self) -> None:
        """Set PyTorch's switches, for convolutions and for matrix products alike."""
        if self.tf32 is None:
            return
        if hasattr(torch.backends.cudnn, "conv"):  # torch 2.9 and later
            precision = "tf32" if self.tf32 else "ieee"
            torch.backends.cudnn.conv.fp32_precision = precision
            torch.backends.cuda.matmul.fp32_precision = precision
        else:
            torch.backends.cudnn.allow_tf32 = self.tf32
            torch.backends.cuda.matmul.allow_tf32 = self.tf32

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
    # PyTorch's fan-in of a transposed convolution, as nn.ConvTranspose3d.reset_parameters.
    scale = (3 * g.out_channels_per_group * prod(g.kernel_size)) ** -0.5
    return Tensors(
        shape=shape,
        x=empty(shape.x_size, like, channels_last).normal_(),
        w=empty(g.weight_size, like, channels_last).normal_(std=scale),
        b=torch.randn(g.out_channels, dtype=mode.dtype, device=device) if shape.bias else None,
        gy=empty(shape.y_size, like, channels_last).normal_(),
        channels_last=channels_last,
    )
