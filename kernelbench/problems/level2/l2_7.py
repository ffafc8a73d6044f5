"""KernelBench level 2, problem 7: four activations and a bias.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, bias_shape):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x):
        x = torch.relu(self.conv(x))
        x = nn.functional.leaky_relu(x, negative_slope=0.01)
        return torch.sigmoid(nn.functional.gelu(x)) + self.bias


def get_inputs():
    return [torch.rand(64, 8, 32, 64, 64)]


def get_init_inputs():
    return [8, 32, 3, (32, 1, 1, 1)]
