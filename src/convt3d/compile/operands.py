"""What the steps of a tail read: tensors by channel and of the output's shape, in an FX graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from convt3d.compile.expressions import converts
from convt3d.fusion import Step

aten = torch.ops.aten


@dataclass(frozen=True)
class Computed:
    """A tensor by channel that the graph computes: "neg", "add" or "mul" of such tensors."""

    name: str
    arguments: tuple[Channel, ...]


Channel = Node | Computed
"""A node of one value, or of one for each channel in any shape that broadcasts so."""

Operand = Node | Computed | None
Steps = list[tuple[Step, Operand]]


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two sizes, or strides, are equal for all values of their symbols."""
    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )


def kind_of(node: Node, output: Tensor) -> str:
    """ "channel", "tensor" or "": how a step may read a node beside an output of 5 axes."""
    value = node.meta["val"]
    if value.device != output.device or not value.dtype.is_floating_point or value.dim() > 5:
        return ""
    size = [1] * (5 - value.dim()) + list(value.shape)
    channels = output.shape[1]
    one = same(size, [1] * 5) and isinstance(channels, int)  # expanded to so many
    if one or same(size, [1, channels, 1, 1, 1]):
        # float64 is not rounded to the float32 of an epilogue.
        exact = value.dtype != torch.float64 or output.dtype == torch.float64
        return "channel" if exact else ""
    if same(size, output.shape) and value.dim() == 5:
        return "tensor" if unconverted(node, output.dtype) is not None else ""
    return ""


def unconverted(node: Node, dtype: torch.dtype) -> Node | None:
    """The node of this dtype that ``node`` is, or was converted from without rounding."""
    if node.meta["val"].dtype == dtype:
        return node
    if converts(node) and node.meta["val"].dtype == torch.float32:
        source = node.args[0]
        assert isinstance(source, Node)
        return source if source.meta["val"].dtype == dtype else None
    return None


_MERGED_FROM = 3


def merged(steps: Steps) -> Steps:
    """The same with runs of three or more steps by channel as one scale and one shift.

    So a batch norm in evaluation mode, decomposed into four steps, is two, as in PyTorch's kernel.
    The channels' sums and products are rounded to float32.
    """
    result: Steps = []
    run: Steps = []
    for step in steps:
        if step[0].operand == "channel":
            run.append(step)
            continue
        result += [*_one(run), step]
        run = []
    return result + _one(run)


def _one(run: Steps) -> Steps:
    if len(run) < _MERGED_FROM:
        return run
    scale: Operand = None
    shift: Operand = None
    for step, operand in run:
        assert operand is not None
        if step.kind == "scale":
            scale = operand if scale is None else Computed("mul", (scale, operand))
            shift = shift and Computed("mul", (shift, operand))
        else:
            shift = operand if shift is None else Computed("add", (shift, operand))
    return [(Step(k), o) for k, o in (("scale", scale), ("shift", shift)) if o is not None]


class Writer:
    """Writes nodes at the place where a graph inserts, with the values of fake tensors."""

    def __init__(self, graph: Graph, output: Tensor) -> None:
        self.graph, self.output = graph, output

    def call(self, target: Any, *arguments: Any) -> Node:
        """A node that calls an operator."""
        node = self.graph.call_function(target, arguments)
        values = torch.fx.node.map_arg(arguments, lambda argument: argument.meta["val"])
        with self.output.fake_mode:  # type: ignore[attr-defined]
            node.meta["val"] = target(*values)
        return node

    def by_channel(self, operand: Channel) -> Node:
        """A node of shape (C,), in float32 or the dtype of the output."""
        if isinstance(operand, Computed) or operand.meta["val"].dtype != self.output.dtype:
            return self._wide(operand)
        return self._vector(operand)

    def _wide(self, operand: Channel) -> Node:
        wide = torch.float64 if self.output.dtype == torch.float64 else torch.float32
        if isinstance(operand, Computed):
            arguments = [self._wide(argument) for argument in operand.arguments]
            targets = {"neg": aten.neg.default, "add": aten.add.Tensor, "mul": aten.mul.Tensor}
            return self.call(targets[operand.name], *arguments)
        vector = self._vector(operand)
        if vector.meta["val"].dtype == wide:
            return vector
        return self.call(torch.ops.prims.convert_element_type.default, vector, wide)

    def _vector(self, node: Node) -> Node:
        channels = self.output.shape[1]
        if node.meta["val"].dim() != 1:
            node = self.call(aten.view.default, node, [-1])
        if same(node.meta["val"].shape, [channels]):
            return node
        expanded = self.call(aten.expand.default, node, [channels])
        return self.call(aten.clone.default, expanded)
