"""KernelBench level 2, problem 48: factors by channel, tanh, sigmoid.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, scaling_factor, bias_shape):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.scaling_factor = nn.Parameter(torch.randn(bias_shape))
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x):
        x = torch.tanh(self.conv(x) * self.scaling_factor)
        return torch.sigmoid(x * self.bias)


def get_inputs():
    return [torch.rand(128, 3, 16, 64, 64)]


def get_init_inputs():
    return [3, 16, 3, 2, (16, 1, 1, 1)]
