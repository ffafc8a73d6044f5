"""KernelBench level 2, problem 8: division, max pool, mean of all positions, bias, sum of channels.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(
        self, in_channels, out_channels, kernel_size, divisor, pool_size, bias_shape, sum_dim
    ):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.divisor = divisor
        self.max_pool = nn.MaxPool3d(pool_size)
        self.global_avg_pool = nn.AdaptiveAvgPool3d((1, 1, 1))
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.sum_dim = sum_dim

    def forward(self, x):
        x = self.max_pool(self.conv(x) / self.divisor)
        return torch.sum(self.global_avg_pool(x) + self.bias, dim=self.sum_dim)


def get_inputs():
    return [torch.rand(128, 8, 16, 64, 64)]


def get_init_inputs():
    return [8, 16, (3, 3, 3), 2.0, (2, 2, 2), (16, 1, 1, 1), 1]
