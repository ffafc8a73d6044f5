"""KernelBench level 1, problem 77: strided, padded and dilated.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        bias: bool = False,
    ):
        super().__init__()
        self.conv_transpose3d = nn.ConvTranspose3d(
            in_channels,
            out_channels,
            (kernel_size, kernel_size, kernel_size),
            stride=stride,
            padding=padding,
            dilation=dilation,
            bias=bias,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_transpose3d(x)


def get_inputs():
    return [torch.rand(16, 32, 16, 32, 32)]


def get_init_inputs():
    return [32, 64, 3, 2, 1, 2]
