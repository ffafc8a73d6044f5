"""KernelBench level 2, problem 72: batch norm, two average pools.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, bias_shape):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding
        )
        self.batch_norm = nn.BatchNorm3d(out_channels)
        self.avg_pool1 = nn.AvgPool3d(kernel_size=2)
        self.avg_pool2 = nn.AvgPool3d(kernel_size=2)

    def forward(self, x):
        x = self.batch_norm(self.conv_transpose(x))
        return self.avg_pool2(self.avg_pool1(x))


def get_inputs():
    return [torch.rand(64, 3, 32, 32, 32)]


def get_init_inputs():
    return [3, 16, 3, 2, 1, (16, 1, 1, 1)]
