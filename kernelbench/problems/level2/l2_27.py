"""KernelBench level 2, problem 27: hard-swish, group norm, mean of each slice.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, num_groups=4, bias=True):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size, bias=bias)
        self.group_norm = nn.GroupNorm(num_groups, out_channels)

    def forward(self, x):
        x = self.group_norm(nn.functional.hardswish(self.conv(x)))
        return torch.mean(x, dim=[2, 3, 4])


def get_inputs():
    return [torch.rand(1024, 3, 16, 32, 32)]


def get_init_inputs():
    return [3, 16, 4]
