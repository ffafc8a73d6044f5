"""KernelBench level 2, problem 90: leaky ReLU, sum by channel, clamp, GELU.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, sum_tensor_shape):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.sum_tensor = nn.Parameter(torch.randn(sum_tensor_shape))

    def forward(self, x):
        x = nn.functional.leaky_relu(self.conv(x), negative_slope=0.2) + self.sum_tensor
        return nn.functional.gelu(torch.clamp(x, min=-1.0, max=1.0))


def get_inputs():
    return [torch.rand(128, 8, 16, 64, 64)]


def get_init_inputs():
    return [8, 64, 3, (64, 1, 1, 1)]
