"""KernelBench level 2, problem 24: least value along an axis, softmax over channels.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, dim):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.dim = dim

    def forward(self, x):
        return torch.softmax(torch.min(self.conv(x), dim=self.dim)[0], dim=1)


def get_inputs():
    return [torch.rand(128, 3, 24, 32, 32)]


def get_init_inputs():
    return [3, 24, 3, 2]
