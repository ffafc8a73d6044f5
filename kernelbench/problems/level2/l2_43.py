"""KernelBench level 2, problem 43: max pool, logsumexp over channels, ReLU.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding):
        super().__init__()
        self.conv = nn.Conv3d(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding
        )
        self.max_pool = nn.MaxPool3d(kernel_size=2, stride=2)

    def forward(self, x):
        return torch.relu(torch.logsumexp(self.max_pool(self.conv(x)), dim=1, keepdim=True))


def get_inputs():
    return [torch.rand(4, 32, 32, 128, 128)]


def get_init_inputs():
    return [32, 64, 3, 1, 1]
