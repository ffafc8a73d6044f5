"""KernelBench level 2, problem 79: factors, instance norm, clamp, factors, largest channel.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(
        self, in_channels, out_channels, kernel_size, multiplier_shape, clamp_min, clamp_max
    ):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.multiplier = nn.Parameter(torch.randn(multiplier_shape))
        self.instance_norm = nn.InstanceNorm3d(out_channels)
        self.clamp_min = clamp_min
        self.clamp_max = clamp_max

    def forward(self, x):
        x = self.instance_norm(self.conv(x) * self.multiplier)
        x = torch.clamp(x, self.clamp_min, self.clamp_max) * self.multiplier
        return torch.max(x, dim=1)[0]


def get_inputs():
    return [torch.rand(128, 3, 16, 32, 32)]


def get_init_inputs():
    return [3, 16, 3, (16, 1, 1, 1), -1.0, 1.0]
