"""How the registered operators may be sharded under DTensor.

Each operator is linear in each tensor, so along one dimension of a device mesh it may be split by
batch, by output channel or by input channel; the sums that a split leaves open are ``Partial``
results, which DTensor reduces when someone asks for the whole. A grouped layer, depthwise ones
among them, is split by batch or by whole groups, which leaves no sum open but those of the batch.
Placements, one mesh dimension:

===================  ===========  ==============  =============  =========
split by             batch        output channel  input channel  group
===================  ===========  ==============  =============  =========
input                Shard(0)     Replicate       Shard(1)       Shard(1)
weight               Replicate    Shard(1)        Shard(0)       Shard(0)
bias                 Replicate    Shard(0)        Partial        Shard(0)
output               Shard(0)     Shard(1)        Partial        Shard(1)
gradient by input    Shard(0)     Partial         Shard(1)       Shard(1)
gradient by weight   Partial      Shard(1)        Shard(0)       Shard(0)
===================  ===========  ==============  =============  =========

A Conv3d has the same weight with input and output exchanged.

Channels and groups are split only where they divide evenly (a rank without channels has no layer to
run). A rank passes on the arguments of the whole layer: ``group_channels`` fits its part, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

_Strategies = list[tuple[list[Any], list[Any]]]


def prepare(*tensors: Any) -> None:
    """Make DTensor know the operators, if one is among them (at first use: the import is slow)."""
    for tensor in tensors:
        if type(tensor).__name__ == "DTensor":
            _register()


def _register() -> None:
    _register_once()


# As torch.compiler.assume_constant_result: Dynamo calls the function while it traces.
_register._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _register_once() -> None:
    try:
        from torch.distributed.tensor import Partial, Replicate, Shard
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # torch < 2.5: DTensor itself says that it cannot shard the operator
        return
    whole, partial, batch, first, second = Replicate(), Partial(), Shard(0), Shard(0), Shard(1)

    def strategies(
        rows: Sequence[list[Any]], channels: tuple[int, int], like: Any, parameters: tuple[Any, ...]
    ) -> _Strategies:
        """The splits that fit, of those by nothing, batch, output channel, input channel and group.

        Each row has the result's placement, then the operands'.
        """
        by_none, by_batch, by_out, by_in, by_group = rows
        in_channels, out_channels = channels
        ranks = math.prod(like.mesh.shape)
        found = [by_none, by_batch]
        group_channels = parameters[-1]
        if group_channels == 0:
            found += [by_out] if out_channels % ranks == 0 else []
            found += [by_in] if in_channels % ranks == 0 else []
        elif in_channels // group_channels % ranks == 0:
            found += [by_group]
        rest = [None for _ in parameters]
        return [(placements[:1], placements[1:] + rest) for placements in found]

    def of_layer(bias: Any, by_out: list[Any], by_in: list[Any], others: int) -> list[list[Any]]:
        """Rows of a layer, which have the bias last; so many other operands follow its tensors."""
        rows = (
            [whole, whole, whole, whole],
            [batch, batch, whole, whole],
            by_out,
            by_in,
            [second, second, first, first],
        )
        return [[*row[:3], None if bias is None else row[3], *[None] * others] for row in rows]

    @register_sharding(torch.ops.convt3d.conv_transpose3d.default)
    def _conv_transpose3d(
        input: Any, weight: Any, bias: Any, channels_last: Any, *parameters: Any
    ) -> _Strategies:
        by_out, by_in = [second, whole, second, first], [partial, second, first, partial]
        rows = of_layer(bias, by_out, by_in, others=1)
        return strategies(rows, weight.shape[:2], weight, parameters)

    @register_sharding(torch.ops.convt3d.conv3d.default)
    def _conv3d(
        input: Any, weight: Any, bias: Any, output_size: Any, channels_last: Any, *parameters: Any
    ) -> _Strategies:
        by_out, by_in = [partial, second, second, partial], [second, whole, first, first]
        rows = of_layer(bias, by_out, by_in, others=2)
        return strategies(rows, weight.shape[:2], weight, parameters)

    @register_sharding(torch.ops.convt3d.grad_weight.default)
    def _grad_weight(
        input: Any, grad_output: Any, kernel_size: Any, channels_last: Any, *parameters: Any
    ) -> _Strategies:
        rows: list[list[Any]] = [
            [whole, whole, whole, None, None],
            [partial, batch, batch, None, None],
            [second, whole, second, None, None],
            [first, second, whole, None, None],
            [first, second, second, None, None],
        ]
        return strategies(rows, (input.shape[1], grad_output.shape[1]), input, parameters)
