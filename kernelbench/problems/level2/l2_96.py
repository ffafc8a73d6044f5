"""KernelBench level 2, problem 96: scale, max pool, mean of each slice, clamp.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(
        self, in_channels, out_channels, kernel_size, stride, padding, scale, maxpool_kernel_size
    ):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding
        )
        self.scale = scale
        self.maxpool = nn.MaxPool3d(kernel_size=maxpool_kernel_size)
        self.global_avg_pool = nn.AdaptiveAvgPool3d((1, 1, 1))

    def forward(self, x):
        x = self.maxpool(self.conv_transpose(x) * self.scale)
        return torch.clamp(self.global_avg_pool(x), min=0, max=1)


def get_inputs():
    return [torch.rand(128, 3, 16, 32, 32)]


def get_init_inputs():
    return [3, 16, 3, 2, 1, 0.5, 2]
