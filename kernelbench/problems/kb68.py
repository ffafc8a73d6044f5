"""KernelBench level 1, problem 68: cubic input, asymmetric kernel.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple,
        stride: tuple = (1, 1, 1),
        padding: tuple = (0, 0, 0),
        output_padding: tuple = (0, 0, 0),
        groups: int = 1,
        bias: bool = False,
    ):
        super().__init__()
        self.conv_transpose3d = nn.ConvTranspose3d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            bias=bias,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_transpose3d(x)


def get_inputs():
    return [torch.rand(16, 32, 64, 64, 64)]


def get_init_inputs():
    return [32, 64, (3, 5, 5)]
