"""The three operations of a transposed layer: their names, and what every way to run them offers.

They are all that a backend computes. Those of a Conv3d are the same three: see ``layer.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

OPERATIONS = ("forward", "grad_input", "grad_weight")
"""The output, and its gradients by input and by weight."""


class Operators(NamedTuple):
    """The operations of a transposed layer, by one of several ways to run them.

    ``forward(x, w, b, geometry, channels_last)``, ``grad_input(gy, w, geometry, input_size,
    channels_last, bias)`` and ``grad_weight(x, gy, geometry, channels_last)``; where there is one,
    ``grad_weight_bias`` as ``grad_weight``, of which the gradient by bias is the second result.
    """

    forward: Callable[..., Any]
    grad_input: Callable[..., Any]
    grad_weight: Callable[..., Any]
    grad_weight_bias: Callable[..., Any] | None = None
