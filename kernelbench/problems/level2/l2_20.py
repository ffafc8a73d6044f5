"""KernelBench level 2, problem 20: bias, sums and a product with the layer's own output.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(
        self, in_channels, out_channels, kernel_size, stride, padding, output_padding, bias_shape
    ):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
        )
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x):
        x = self.conv_transpose(x)
        before = x.clone().detach()
        return ((x + self.bias) + before) * before + before


def get_inputs():
    return [torch.rand(16, 32, 16, 32, 32)]


def get_init_inputs():
    return [32, 64, 3, 2, 1, 1, (64, 1, 1, 1)]
