"""How the registered operators may be sharded under DTensor: by batch, or not at all."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_Strategies = list[tuple[list[Any], list[Any]]]


def prepare(tensor: Any) -> None:
    """Make DTensor know the operators, if ``tensor`` is one (at first use: the import is slow)."""
    if type(tensor).__name__ == "DTensor":
        _register()


@cache
def _register() -> None:
    try:
        from torch.distributed.tensor import Partial, Replicate, Shard
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # torch < 2.5: DTensor itself says that it cannot shard the operator
        return
    whole, batch = Replicate(), Shard(0)

    @register_sharding(torch.ops.convt3d.forward.default)
    def _forward(input: Any, weight: Any, bias: Any, *parameters: Any) -> _Strategies:
        rest = [None if bias is None else whole, *(None for _ in parameters)]
        return [([whole], [whole, whole, *rest]), ([batch], [batch, whole, *rest])]

    @register_sharding(torch.ops.convt3d.grad_input.default)
    def _grad_input(grad_output: Any, weight: Any, *parameters: Any) -> _Strategies:
        rest = [None for _ in parameters]
        return [([whole], [whole, whole, *rest]), ([batch], [batch, whole, *rest])]

    @register_sharding(torch.ops.convt3d.grad_weight.default)
    def _grad_weight(input: Any, grad_output: Any, *parameters: Any) -> _Strategies:
        rest = [None for _ in parameters]
        # Each rank sums over its part of the batch.
        return [([whole], [whole, whole, *rest]), ([Partial()], [batch, batch, *rest])]
