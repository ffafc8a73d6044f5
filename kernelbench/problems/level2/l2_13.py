"""KernelBench level 2, problem 13: mean over depth, bias, softmax over channels, tanh.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, scaling_factor):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding
        )
        self.bias = nn.Parameter(torch.randn(1, out_channels, 1, 1, 1))
        self.scaling_factor = scaling_factor

    def forward(self, x):
        x = self.conv_transpose(x).mean(dim=2, keepdim=True) + self.bias
        return torch.tanh(torch.softmax(x, dim=1)) * self.scaling_factor


def get_inputs():
    return [torch.rand(16, 16, 32, 128, 128)]


def get_init_inputs():
    return [16, 64, 3, 1, 1, 2.0]
