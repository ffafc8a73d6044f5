"""Modules: torch.nn's, with our functions in ``forward``."""

from __future__ import annotations

import torch
from torch import Tensor

from convt3d.functional import conv3d, conv_transpose3d


class Conv3d(torch.nn.Conv3d):
    """Drop-in for :class:`torch.nn.Conv3d`.

    Constructor, parameters, initialisation, padding modes and state_dict are PyTorch's own; only
    the convolution differs. The repr ends with ``backend=convt3d``.

    Raises:
        RuntimeError: see :func:`convt3d.conv3d`.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.padding_mode != "zeros":
            around = self._reversed_padding_repeated_twice
            padded = torch.nn.functional.pad(input, around, mode=self.padding_mode)
            return conv3d(
                padded,
                weight,
                bias,
                self.stride,
                (0, 0, 0),
                self.dilation,
                self.groups,
            )
        return conv3d(
            input,
            weight,
            bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backend=convt3d"


class LazyConv3d(torch.nn.LazyConv3d, Conv3d):  # type: ignore[misc]
    """Drop-in for :class:`torch.nn.LazyConv3d`; becomes :class:`Conv3d`."""

    cls_to_become = Conv3d


class ConvTranspose3d(torch.nn.ConvTranspose3d):
    """Drop-in for :class:`torch.nn.ConvTranspose3d`.

    Constructor, parameters, initialisation and state_dict are PyTorch's own; only ``forward``
    differs. The repr ends with ``backend=convt3d``.
    """

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Apply the layer.

        Args:
            input: (N, C_in, D, H, W) or (C_in, D, H, W).
            output_size: wanted (D_out, H_out, W_out), which overrides ``output_padding``; leading
                batch and channel entries are allowed and ignored.

        Raises:
            ValueError: an ``output_size`` of the wrong length or outside of the reachable range.
            RuntimeError: see :func:`convt3d.conv_transpose3d`.
        """
        output_padding = self._checked_output_padding(input, output_size)
        return conv_transpose3d(
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,  # type: ignore[arg-type]
            output_padding,
            self.groups,
            self.dilation,
        )

    def _checked_output_padding(self, input: Tensor, output_size: list[int] | None) -> list[int]:
        """The output padding of a call; ValueError where PyTorch's module raises it."""
        if self.padding_mode != "zeros":
            raise ValueError("Only `zeros` padding mode is supported for ConvTranspose3d")
        return self._output_padding(
            input,
            output_size,
            self.stride,  # type: ignore[arg-type]
            self.padding,  # type: ignore[arg-type]
            self.kernel_size,  # type: ignore[arg-type]
            3,
            self.dilation,  # type: ignore[arg-type]
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backend=convt3d"


class LazyConvTranspose3d(torch.nn.LazyConvTranspose3d, ConvTranspose3d):  # type: ignore[misc]
    """Drop-in for :class:`torch.nn.LazyConvTranspose3d`; becomes :class:`ConvTranspose3d`."""

    cls_to_become = ConvTranspose3d
