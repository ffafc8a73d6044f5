"""KernelBench level 2, problem 74: leaky ReLU, factors by channel, leaky ReLU, max pool.

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
        multiplier_shape,
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
        self.multiplier = nn.Parameter(torch.randn(multiplier_shape))
        self.leaky_relu = nn.LeakyReLU(negative_slope=0.2)
        self.max_pool = nn.MaxPool3d(kernel_size=2)

    def forward(self, x):
        x = self.leaky_relu(self.conv_transpose(x)) * self.multiplier
        return self.max_pool(self.leaky_relu(x))


def get_inputs():
    return [torch.rand(16, 16, 16, 32, 32)]


def get_init_inputs():
    return [16, 32, 3, 2, 1, 1, (32, 1, 1, 1)]
