"""Sample layers: a table of named ones, and a hypothesis strategy over all parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import convt3d
from convt3d.arguments import triple
from convt3d.geometry import Geometry, Triple

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "channels_last", "sliced")


@dataclass(frozen=True)
class Case:
    """A layer with the size of one input."""

    geometry: Geometry
    input_size: Triple
    batch: int = 2
    bias: bool = True

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.batch, self.geometry.in_channels, *self.input_size)

    @property
    def output_shape(self) -> tuple[int, ...]:
        geometry = self.geometry
        return (self.batch, geometry.out_channels, *geometry.output_size(self.input_size))

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What comes after the tensors: in the order of conv3d or of conv_transpose3d."""
        g = self.geometry
        if not g.transposed:
            return (g.stride, g.padding, g.dilation, g.groups)
        return (g.stride, g.padding, g.output_padding, g.groups, g.dilation)

    @property
    def operator(self) -> Callable[..., Tensor]:
        """Our function."""
        return convt3d.conv_transpose3d if self.geometry.transposed else convt3d.conv3d

    def pytorch(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """The output of PyTorch's function."""
        function = torch.conv_transpose3d if self.geometry.transposed else torch.conv3d
        return function(x, w, b, *self.arguments)

    @property
    def parameters(self) -> tuple[Any, ...]:
        """stride, padding, output_padding, dilation, channels of a group: as the registered ops."""
        g = self.geometry
        group_channels = g.in_channels // g.groups if g.groups > 1 else 0
        axes = (g.stride, g.padding, g.output_padding, g.dilation)
        return (*map(list, axes), group_channels)

    def __str__(self) -> str:
        size = "x".join(map(str, self.input_size))
        return f"{self.geometry.label} on {self.batch}x{size}".replace(" ", "_")


def case(
    channels: tuple[int, int],
    kernel: Any,
    input_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    batch: int = 2,
    bias: bool = True,
    transposed: bool = True,
) -> Case:
    geometry = Geometry(
        *channels,
        triple("kernel_size", kernel),
        triple("stride", stride),
        triple("padding", padding),
        triple("output_padding", output_padding),
        triple("dilation", dilation),
        groups,
        transposed,
    )
    return Case(geometry, triple("input_size", input_size), batch, bias)


CASES: dict[str, Case] = {
    "stride 1": case((8, 16), 3, (4, 5, 6)),
    "stride 1, mixed kernel": case((4, 8), (3, 5, 7), (3, 4, 5)),
    "stride 1, padded": case((8, 8), 3, 5, padding=1),
    "stride 2": case((8, 8), 3, (3, 4, 5), 2, 1),
    "stride 2, output padding": case((16, 8), 3, (3, 4, 5), 2, 1, 1),
    "stride 2, kernel 4": case((8, 4), 4, (3, 4, 5), 2, 1, bias=False),
    "kernel equals stride": case((16, 8), 2, (3, 4, 5), 2),
    "kernel equals stride on two axes": case((8, 8), (1, 2, 2), (3, 4, 5), (1, 2, 2)),
    "kernel equals stride, anisotropic": case((8, 5), (2, 4, 4), (2, 3, 4), (2, 4, 4)),
    "mixed kernel, stride 2, groups": case(
        (8, 8), (3, 5, 7), (3, 4, 5), 2, (1, 2, 3), 1, groups=2, bias=False
    ),
    "groups of 8": case((32, 32), 3, (3, 4, 5), 2, 1, groups=4),
    "phases without a tap": case((8, 16), 3, (3, 4, 5), 2, 1, dilation=2),
    "stride above kernel": case((4, 6), 2, (3, 3, 4), 3),
    "kernel 1, stride 2": case((8, 4), 1, (3, 4, 5), 2),
    "dilation 3": case((4, 4), (2, 3, 2), (4, 5, 6), 1, 2, 0, 3),
    "all parameters differ by axis": case(
        (6, 4), (4, 5, 6), (3, 4, 5), (3, 2, 1), (1, 2, 3), (2, 3, 1), 4, groups=2
    ),
    "output padding at the stride": case((4, 4), 2, (3, 4, 3), 2, 1, 2, 3),
    "padding above kernel": case((4, 6), 2, (7, 8, 9), 2, 3),
    "padding of all but one line": case((1, 5), (1, 2, 1), (1, 8, 1), 1, (0, 4, 0)),
    "depthwise": case((8, 8), 3, (3, 4, 5), 2, 1, groups=8),
    "depthwise, kernel 4": case((5, 5), 4, (3, 4, 5), 2, 1, groups=5, bias=False),
    "depthwise with multiplier": case((3, 9), 3, (3, 4, 5), 1, 1, groups=3),
    "1 to 1": case((1, 1), 3, (3, 4, 5), 2, 1),
    "3 to 1": case((3, 1), 2, (3, 4, 5), 2),
    "17 to 3": case((17, 3), 3, (3, 4, 5), 1, 1),
    "13 to 19": case((13, 19), 3, (2, 3, 5), 2, 1, 1),
    "one voxel": case((4, 8), 3, 1, 2, 0),
    "axes of one": case((4, 8), (3, 1, 3), (1, 7, 1), (2, 1, 2), (0, 0, 1)),
    "kernel 1": case((8, 8), 1, (3, 4, 5)),
    "primes": case((7, 11), (3, 2, 5), (7, 11, 13), (2, 3, 2), (1, 0, 2), (1, 2, 0), batch=3),
    "batch of one": case((8, 8), 3, (5, 6, 7), 2, 1, 1, batch=1),
}
"""Small layers, one for every way in which a plan can differ."""


@st.composite
def cases(draw: st.DrawFn, max_channels: int = 5) -> Case:
    """Any valid layer on an input small enough for the float64 reference."""
    groups = draw(st.integers(1, 3))
    per_group = st.integers(1, max_channels)
    axes = []
    for _ in range(3):
        kernel, stride = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        dilation, padding = draw(st.integers(1, 3)), draw(st.integers(0, 6))
        extra = draw(st.integers(0, max(stride, dilation) - 1))
        # The least extent whose output has a voxel.
        reach = dilation * (kernel - 1) + extra - 2 * padding
        least = 1 if reach >= 0 else 1 + -(reach // stride)
        extent = least + draw(st.sampled_from((0, 1, 2, 4, 6)))
        axes.append((kernel, stride, padding, extra, dilation, extent))
    kernel, stride, padding, extra, dilation, extent = zip(*axes, strict=True)
    return case(
        (groups * draw(per_group), groups * draw(per_group)),
        kernel,
        extent,
        stride,
        padding,
        extra,
        dilation,
        groups,
        batch=draw(st.integers(1, 3)),
        bias=draw(st.booleans()),
    )


def operands(
    case: Case,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    layout: str = "contiguous",
    requires_grad: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random input, weight and bias (None if the case has none).

    ``layout`` is one of LAYOUTS, and applies to input and weight; "sliced" is every second column
    of a wider tensor.
    """
    generator = torch.Generator().manual_seed(seed)

    def make(shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
        return arranged(values, layout).requires_grad_(requires_grad)

    bias = None
    x, w = make(case.input_shape), make(case.geometry.weight_size)
    if case.bias:
        bias = torch.randn(case.geometry.out_channels, generator=generator, dtype=torch.float64)
        bias = bias.to(device, dtype).requires_grad_(requires_grad)
    return x, w, bias


def gradient(case: Case, like: Tensor, layout: str = "contiguous", seed: int = 1) -> Tensor:
    """A random gradient of the output, with the dtype and device of ``like``."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(case.output_shape, generator=generator, dtype=torch.float64)
    return arranged(values.to(like.device, like.dtype), layout)


def arranged(values: Tensor, layout: str) -> Tensor:
    """The same values in memory as ``layout`` says."""
    if layout == "contiguous":
        return values.contiguous()
    if layout == "channels_last":
        return values.contiguous(memory_format=torch.channels_last_3d)
    if layout == "sliced":
        wide = values.new_full((*values.shape[:-1], 2 * values.shape[-1] + 1), torch.nan)
        wide[..., 1::2] = values
        return wide[..., 1::2]
    raise ValueError(layout)
