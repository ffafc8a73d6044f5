"""KernelBench level 2, problem 61: ReLU, group norm.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups, bias=False):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, bias=bias)
        self.group_norm = nn.GroupNorm(num_groups=groups, num_channels=out_channels)

    def forward(self, x):
        return self.group_norm(torch.relu(self.conv_transpose(x)))


def get_inputs():
    return [torch.rand(16, 64, 32, 32, 32)]


def get_init_inputs():
    return [64, 128, 3, 8, False]
