"""KernelBench level 2, problem 3: sum, layer norm of rows, average pool, GELU.

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
        output_padding,
        sum_weight,
        norm_shape,
        pool_kernel_size,
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
        self.sum_weight = nn.Parameter(torch.tensor(sum_weight))
        self.norm = nn.LayerNorm(norm_shape)
        self.avg_pool = nn.AvgPool3d(pool_kernel_size)

    def forward(self, x):
        x = self.norm(self.conv_transpose(x) + self.sum_weight)
        return nn.functional.gelu(self.avg_pool(x))


def get_inputs():
    return [torch.rand(32, 32, 16, 32, 32)]


def get_init_inputs():
    return [32, 64, (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), 1.0, (64,), (2, 2, 2)]
