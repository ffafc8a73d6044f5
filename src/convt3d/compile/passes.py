"""The graph pass that folds the tails of convt3d's convolutions into their epilogues.

It runs on the forward and on the backward graph, in ``post_grad_custom_pre_pass``: after autograd
and Inductor's decompositions, and before Inductor's own patterns, so that no concatenation or chain
of element-wise operators has been rewritten yet.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from convt3d import backends
from convt3d.compile import kernels
from convt3d.compile.base import FUSED, TRANSPOSED, Pass
from convt3d.compile.concatenation import Concatenation, concatenation
from convt3d.compile.expressions import name_of
from convt3d.compile.operands import Operand, Steps, Writer, same
from convt3d.compile.sites import Site, record
from convt3d.compile.tails import Tail, tail_of
from convt3d.geometry import Geometry
from convt3d.operands import geometry_of


class FuseTails(Pass):
    """Fold the element-wise tails of convt3d's convolutions into them, and request the kernels."""

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in FUSED:
                record(_fuse(graph, node))
        kernels.request(graph)


def _fuse(graph: Graph, node: Node) -> Site:
    """Fold the tail of one convolution, if it has one."""
    output: Tensor = node.meta["val"]
    transposed = node.target is TRANSPOSED
    geometry = _geometry(node)
    operation = "forward" if transposed else "grad_input"
    layer = f"{str(node.target).split('.')[1]} {geometry.label}"

    # Samples, and the extents of the input of the transposed layer.
    result = [_example(extent) for extent in output.shape]
    source = [_example(extent) for extent in _argument(node, "input").meta["val"].shape]
    sizes = (result[0], (source if transposed else result)[2:])
    channels_last = bool(_argument(node, "channels_last"))
    call = (operation, geometry, output, *sizes, channels_last)

    def fits(value: Tensor) -> str:
        if not (same(value.stride(), output.stride()) or _one_channel(value, output)):
            return "a result of another memory format"
        if value.dtype != output.dtype:
            return "a result of another type, which the next kernel converts for nothing"
        return ""

    def reads_tensors() -> bool:
        return backends.fuses_tensors(*call)

    stopped = backends.fusion_refusal(*call)
    if stopped is not None:
        return Site(_label(node), layer, (), stopped)
    tail = tail_of(node, fits, reads_tensors)
    joined, why = concatenation(tail.end, channels_last)
    if joined is None and tail.end is node:
        return Site(_label(node), layer, (), tail.stopped)
    written = _written_before(node, tail.end if joined is None else joined.node)
    if written:
        return Site(_label(node), layer, (), f"{written} writes a tensor before its end")
    done = _write(graph, node, tail, joined)
    return Site(_label(node), layer, done, "" if joined else why or tail.stopped)


def _written_before(node: Node, end: Node) -> str:
    """The first node between two that writes to a tensor; the fused operator runs at the end.

    Graphs are functional here, but for what frees and fills the storage of sharded parameters.
    """
    while (node := node.next) is not end:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return node.name
    return ""


def _write(graph: Graph, node: Node, tail: Tail, joined: Concatenation | None) -> tuple[str, ...]:
    """Put the fused operator in the place of the tail's end; says what it does."""
    output: Tensor = node.meta["val"]
    last = tail.end if joined is None else joined.node
    steps, done = list(tail.steps), []
    arguments: list[Any] = list(node.args)
    bias = _as_bias(node, steps, joined is not None)
    writer = Writer(graph, output)
    with graph.inserting_before(last):
        if bias is not None:
            steps.pop(0)
            arguments[2] = writer.by_channel(bias)
            done.append("bias")
        operands = [
            operand if step.operand == "tensor" else writer.by_channel(operand)
            for step, operand in steps
            if operand is not None
        ]
        arguments += [
            [step.kind for step, _ in steps],
            operands,
            [value for step, _ in steps for value in step.scalars],
            None,  # of the dtype of the operands
            [] if joined is None else joined.before,
            [] if joined is None else joined.after,
        ]
        new = writer.call(FUSED[node.target], *arguments)
        # The operator asks for the strides that its arguments had when it was traced.
        values = torch.fx.node.map_arg(new.args, lambda argument: argument.meta["val"])
        new.meta = {**last.meta, "val": new.meta["val"], "eager_input_vals": (values, {})}
        if joined is None and not same(new.meta["val"].stride(), last.meta["val"].stride()):
            new = _other_format(writer, new)
    last.replace_all_uses_with(new)
    _erase(graph, last)
    done += [step.kind for step, _ in steps]
    return (*done, *(["cat"] if joined else []))


def _one_channel(value: Tensor, output: Tensor) -> bool:
    """Whether a value is the contiguous twin of an output in channels_last of one channel.

    Both have one order in memory, and element-wise operators give the former for the latter.
    """
    twin = output.squeeze(1).unsqueeze(1) if same(output.shape[1:2], [1]) else output
    return same(value.stride(), twin.stride())


def _other_format(writer: Writer, node: Node) -> Node:
    """A view of a result of one channel that is contiguous."""
    squeezed = writer.call(torch.ops.aten.squeeze.dim, node, 1)
    return writer.call(torch.ops.aten.unsqueeze.default, squeezed, 1)


def _as_bias(node: Node, steps: Steps, more: bool) -> Operand:
    """The operand of a first step that the layer, which has no bias, can take as one.

    Only where something is left to fuse: a bias alone costs some kernels a pass of their own.
    """
    if node.args[2] is not None or not steps or not (more or len(steps) > 1):
        return None
    step, operand = steps[0]
    if step.kind != "shift" or not isinstance(operand, Node):
        return None
    return operand if operand.meta["val"].dtype == node.meta["val"].dtype else None


def _erase(graph: Graph, node: Node) -> None:
    """Erase a node without users, and what it alone has used."""
    unused = {node: None}
    while unused:
        node, _ = unused.popitem()
        sources = node.all_input_nodes
        graph.erase_node(node)
        for source in sources:
            ours = source.op == "call_function" and source.target in FUSED
            if not source.users and (ours or name_of(source)):
                unused[source] = None


def _argument(node: Node, name: str) -> Any:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return node.args[names.index(name)]


def _geometry(node: Node) -> Geometry:
    """The geometry of the transposed layer whose operation a node is, by example where symbolic."""
    parameters: list[Any] = [
        [_example(value) for value in _argument(node, name)]
        for name in ("stride", "padding", "output_padding", "dilation")
    ]
    parameters.append(_example(_argument(node, "group_channels")))
    weight: Tensor = _argument(node, "weight").meta["val"]
    return geometry_of([_example(extent) for extent in weight.shape], parameters)


def _example(value: Any) -> int:
    """An int, or the value that a symbol has in the call that is compiled (0 if unknown)."""
    if isinstance(value, Node):
        value = value.meta["val"]
    if isinstance(value, torch.SymInt):
        expression = value.node
        return int(expression.hint) if expression.has_hint() else 0
    return int(value)


def _label(node: Node) -> str:
    """The module that a node came from, or its name."""
    stack = node.meta.get("nn_module_stack")
    if stack:
        path = re.sub(r"^L\['\w+'\]\.?", "", str(next(reversed(stack.values()))[0]))
        return path or node.name
    return str(node.name)
