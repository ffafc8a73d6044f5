"""KernelBench level 2, problem 78: two max pools, sum of channels.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding
        )
        self.max_pool1 = nn.MaxPool3d(kernel_size=2)
        self.max_pool2 = nn.MaxPool3d(kernel_size=3)

    def forward(self, x):
        x = self.max_pool2(self.max_pool1(self.conv_transpose(x)))
        return torch.sum(x, dim=1, keepdim=True)


def get_inputs():
    return [torch.rand(16, 32, 32, 32, 32)]


def get_init_inputs():
    return [32, 64, 5, 2, 2]
