"""KernelBench level 2, problem 38: average pool before; clamp, softmax over positions, scale.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride,
        padding,
        output_padding,
        pool_kernel_size,
        clamp_min,
        clamp_max,
    ):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
        )
        self.avg_pool = nn.AvgPool3d(pool_kernel_size)
        self.clamp_min = clamp_min
        self.clamp_max = clamp_max
        self.scale = nn.Parameter(torch.ones(1, out_channels, 1, 1, 1))

    def forward(self, x):
        x = self.conv_transpose(self.avg_pool(x))
        x = torch.clamp(x, self.clamp_min, self.clamp_max)
        return torch.softmax(x.flatten(2), dim=2).view(x.shape) * self.scale


def get_inputs():
    return [torch.rand(32, 32, 32, 64, 64)]


def get_init_inputs():
    return [32, 64, 3, 2, 1, 1, 2, 0.0, 1.0]
