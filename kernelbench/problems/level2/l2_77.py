"""KernelBench level 2, problem 77: scale, batch norm, mean of each slice.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(
        self, in_channels, out_channels, kernel_size, scale_factor, eps=1e-5, momentum=0.1
    ):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, kernel_size)
        self.scale_factor = scale_factor
        self.batch_norm = nn.BatchNorm3d(out_channels, eps=eps, momentum=momentum)
        self.global_avg_pool = nn.AdaptiveAvgPool3d((1, 1, 1))

    def forward(self, x):
        x = self.batch_norm(self.conv_transpose(x) * self.scale_factor)
        return self.global_avg_pool(x)


def get_inputs():
    return [torch.rand(16, 64, 16, 32, 32)]


def get_init_inputs():
    return [64, 128, 5, 2.0]
