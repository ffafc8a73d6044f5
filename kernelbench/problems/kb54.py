"""KernelBench level 1, problem 54: a standard convolution, cubic input, cubic kernel.

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
        groups: int = 1,
        bias: bool = False,
    ):
        super().__init__()
        self.conv3d = nn.Conv3d(
            in_channels,
            out_channels,
            (kernel_size, kernel_size, kernel_size),
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=bias,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv3d(x)


def get_inputs():
    return [torch.rand(16, 3, 64, 64, 64)]


def get_init_inputs():
    return [3, 64, 3]
