"""What the autograd function of an eager call needs of it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from convt3d.layer import Layer


class Steps(Protocol):
    """How to run a checked call on plain 5-D tensors, and its gradients.

    ``eager.Checked`` has these members for every call, ``recipes.Recipe`` for those seen before.
    """

    @property
    def layer(self) -> Layer:
        """What is called."""
        ...

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None, /) -> Tensor:
        """The output, without autograd."""
        ...

    def gradients(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients by input, weight and bias, each only where asked; in plain eager mode."""
        ...
