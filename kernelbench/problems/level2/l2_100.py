"""KernelBench level 2, problem 100: clamp, division.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, min_value, divisor):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding
        )
        self.min_value = min_value
        self.divisor = divisor

    def forward(self, x):
        return torch.clamp(self.conv_transpose(x), min=self.min_value) / self.divisor


def get_inputs():
    return [torch.rand(16, 64, 24, 48, 48)]


def get_init_inputs():
    return [64, 128, 3, 2, 1, -1.0, 2.0]
