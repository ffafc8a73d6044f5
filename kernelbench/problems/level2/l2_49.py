"""KernelBench level 2, problem 49: softmax over channels, sigmoid.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(
        self, in_channels, out_channels, kernel_size, stride, padding, output_padding, bias=True
    ):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            bias=bias,
        )

    def forward(self, x):
        return torch.sigmoid(torch.softmax(self.conv_transpose(x), dim=1))


def get_inputs():
    return [torch.rand(16, 32, 16, 32, 32)]


def get_init_inputs():
    return [32, 64, 3, 2, 1, 1]
