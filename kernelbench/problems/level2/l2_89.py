"""KernelBench level 2, problem 89: max pool, softmax over channels, swish, largest channel.

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
        pool_stride,
        pool_padding,
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
        self.max_pool = nn.MaxPool3d(pool_kernel_size, pool_stride, pool_padding)
        self.subtract = nn.Parameter(torch.randn(out_channels))

    def forward(self, x):
        x = torch.softmax(self.max_pool(self.conv_transpose(x)), dim=1)
        x = x - self.subtract.view(1, -1, 1, 1, 1)
        return torch.max(torch.sigmoid(x) * x, dim=1)[0]


def get_inputs():
    return [torch.rand(128, 3, 16, 32, 32)]


def get_init_inputs():
    return [3, 16, 3, 2, 1, 1, 2, 2, 0]
