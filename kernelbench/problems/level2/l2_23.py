"""KernelBench level 2, problem 23: group norm, mean of each sample.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, num_groups):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(num_groups, out_channels)

    def forward(self, x):
        return self.group_norm(self.conv(x)).mean(dim=[1, 2, 3, 4])


def get_inputs():
    return [torch.rand(128, 3, 24, 32, 32)]


def get_init_inputs():
    return [3, 24, 3, 8]
