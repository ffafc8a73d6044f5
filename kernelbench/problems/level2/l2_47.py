"""KernelBench level 2, problem 47: mish, tanh.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0):
        super().__init__()
        self.conv = nn.Conv3d(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding
        )

    def forward(self, x):
        return torch.tanh(nn.functional.mish(self.conv(x)))


def get_inputs():
    return [torch.rand(16, 32, 32, 64, 64)]


def get_init_inputs():
    return [32, 64, 3]
