"""KernelBench level 2, problem 15: batch norm, less the mean of each slice.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, bias=True):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding, bias=bias
        )
        self.batch_norm = nn.BatchNorm3d(out_channels)

    def forward(self, x):
        x = self.batch_norm(self.conv_transpose(x))
        return x - torch.mean(x, dim=(2, 3, 4), keepdim=True)


def get_inputs():
    return [torch.rand(16, 16, 16, 32, 32)]


def get_init_inputs():
    return [16, 32, 3, 2, 1]
