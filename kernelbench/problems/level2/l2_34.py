"""KernelBench level 2, problem 34: layer norm of rows, GELU, scale.

The interface and the sizes are KernelBench's; the words are ours.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride,
        padding,
        bias=True,
        eps=1e-5,
        scaling_factor=1.0,
    ):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding, bias=bias
        )
        self.layer_norm = nn.LayerNorm(out_channels, eps=eps)
        self.scaling_factor = scaling_factor

    def forward(self, x):
        x = self.layer_norm(self.conv_transpose(x))
        return nn.functional.gelu(x) * self.scaling_factor


def get_inputs():
    return [torch.rand(32, 32, 16, 32, 32)]


def get_init_inputs():
    return [32, 64, 4, 2, 1, True, 1e-5, 1.0]
