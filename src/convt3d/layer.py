"""What autograd needs to know of a layer: its three operations in terms of a transposed layer's.

A backend has three operations of a transposed layer: ``forward``, ``grad_input`` and
``grad_weight``. Each is linear in each of its tensors, and the derivative of one is another of the
three. A Conv3d is the adjoint of a transposed layer with the same weight: its forward pass is that
one's gradient by input, its gradient by input that one's forward pass, its gradient by weight that
one's with the operands exchanged. This module is the only place that knows which is which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from convt3d import native
from convt3d.arguments import interned
from convt3d.geometry import Geometry
from convt3d.operations import Operators


@dataclass(frozen=True)
class Layer:
    """A layer on inputs of one size.

    Args:
        geometry: of the transposed layer whose operations run: this one, or a Conv3d's adjoint.
        size: spatial size (D, H, W) of that layer's input.
        channels_last: whether output and gradients are channels_last_3d.
        transposed: whether this is a ConvTranspose3d.
    """

    geometry: Geometry
    size: Sequence[int]
    channels_last: bool
    transposed: bool = True

    @classmethod
    def of(cls, geometry: Geometry, input_size: Sequence[int], channels_last: bool) -> Layer:
        """A checked layer of either kind; ``input_size`` is (D, H, W). SymInts pass."""
        if geometry.transposed:
            return cls(geometry, input_size, channels_last)
        size = geometry.output_size(input_size)
        return cls(geometry.adjoint(input_size), size, channels_last, False)

    def interned(self) -> Layer:
        """The same, its geometry the object that stands for all equal ones; no SymInts."""
        return Layer(interned(self.geometry), self.size, self.channels_last, self.transposed)

    @property
    def bias_is_a_step(self) -> bool:
        """Whether kernels add a bias in a step of the epilogue, not to their sums.

        Compiled code adds it apart: Inductor does so in what comes next, for nothing.
        """
        return not self.transposed and self.geometry.stride != (1, 1, 1)

    def output(self, by: Operators, x: Tensor, w: Tensor, b: Tensor | None) -> Any:
        """The layer's output."""
        if self.transposed:
            return by.forward(x, w, b, self.geometry, self.channels_last)
        return by.grad_input(x, w, self.geometry, self.size, self.channels_last, b)

    def by_input(self, by: Operators, gy: Tensor, w: Tensor) -> Any:
        """The gradient by input."""
        if self.transposed:
            return by.grad_input(gy, w, self.geometry, self.size, self.channels_last)
        return by.forward(gy, w, None, self.geometry, self.channels_last)

    def weight_operands(self, x: Tensor, gy: Tensor) -> tuple[Tensor, Tensor]:
        """Input and output gradient in the order in which ``grad_weight`` takes them."""
        return (x, gy) if self.transposed else (gy, x)

    def dense(self, gy: Tensor) -> Tensor:
        """The output's gradient in the layout of the layer, where it has gaps.

        Such as the half of a gradient that torch.cat hands to one of its inputs: kernels read whole
        tensors, and both gradients would make a copy of their own.
        """
        last = torch.channels_last_3d
        if gy.is_contiguous() or gy.is_contiguous(memory_format=last):
            return gy
        return gy.contiguous(memory_format=last if self.channels_last else torch.contiguous_format)

    def by_weight(self, by: Operators, x: Tensor, gy: Tensor) -> Any:
        """The gradient by weight."""
        return by.grad_weight(*self.weight_operands(x, gy), self.geometry, self.channels_last)

    def gradients(
        self,
        by: Operators,
        input: Tensor | None,
        weight: Tensor | None,
        grad_output: Tensor,
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients by input, weight and bias, each only where wanted."""
        by_input = by_weight = by_bias = None
        if wanted[0] and wanted[1]:
            grad_output = self.dense(grad_output)
        if wanted[0]:
            assert weight is not None
            by_input = self.by_input(by, grad_output, weight)
        if wanted[1]:
            assert input is not None
            if wanted[2] and self.transposed and by.grad_weight_bias is not None:
                both = by.grad_weight_bias(input, grad_output, self.geometry, self.channels_last)
                return (by_input, *both)
            by_weight = self.by_weight(by, input, grad_output)
        if wanted[2]:
            by_bias = native.grad_bias(grad_output)
        return by_input, by_weight, by_bias
