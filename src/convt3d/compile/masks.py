"""The graph pass that takes the masks of activations from their results.

It runs on the joint graph, in ``joint_custom_pre_pass``, where nothing has been chosen to be saved
for the backward pass yet.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from convt3d.compile.base import FUSED, Pass
from convt3d.compile.expressions import Match, converts, name_of
from convt3d.compile.operands import Writer
from convt3d.compile.tails import regions

_COMPARISONS = frozenset({"gt", "ge", "le", "lt"})
_MOST_STEPS_BACK = 12


class MasksOfResults(Pass):
    """Let the backward pass compare an activation's result where it compares what went in.

    LeakyReLU's and hardtanh's gradients need to know on which side of a bound the input was. Their
    results tell that, too, and are saved anyway for whatever comes next. The input is then of no
    use to anybody but the activation, which can join the convolution before it.
    """

    def __call__(self, graph: Graph) -> None:
        order = {node: index for index, node in enumerate(graph.nodes)}
        for node in order:
            if name_of(node) not in _COMPARISONS or len(node.args) != 2:
                continue
            root, bound = node.args
            while isinstance(root, Node) and converts(root):
                root = root.args[0]
            if isinstance(root, Node) and isinstance(bound, (int, float)) and _follows(root):
                result = _result(node, root, bound, order)
                if result is not None:
                    _compare(graph, node, result)


def _follows(node: Node) -> bool:
    """Whether a node is an element-wise tail of one of the convolutions."""
    for _ in range(_MOST_STEPS_BACK):
        if node.op == "call_function" and node.target in FUSED:
            return True
        sources = node.all_input_nodes
        if not name_of(node) or not sources:
            return False
        node = sources[0]
    return False


def _result(node: Node, root: Node, bound: float, order: dict[Node, int]) -> Node | None:
    """The result of an activation of ``root`` for which a comparison has the same outcome."""
    dtype = root.meta["val"].dtype
    largest, size = None, 0
    # In the activation's own graph the root may be a wider copy of the value that is compared.
    for start in (root, *(user for user in root.users if converts(user))):
        for end, matched, inside in regions(start):
            if len(inside) <= size or node in inside:
                continue
            if not _same_outcome(matched, name_of(node), bound, dtype):
                continue
            rounded = [user for user in end.users if converts(user)]
            result = next((user for user in rounded if user.meta["val"].dtype == dtype), end)
            if order[result] < order[node]:
                largest, size = result, len(inside)
    return largest


def _same_outcome(matched: Match, comparison: str, bound: float, dtype: torch.dtype) -> bool:
    """Whether comparing the result tells what comparing the input would, rounding included."""
    (kind, *_), scalars = matched.kinds, matched.scalars
    if torch.tensor(bound, dtype=dtype).item() != bound:
        return False
    if kind == "leaky_relu":
        return comparison == "gt" and bound == 0 and scalars[0] >= 0
    if kind == "relu":
        return comparison in ("gt", "le") and bound == 0
    if kind != "clamp" or not scalars[0] < scalars[1]:
        return False
    return (comparison, bound) in (("le", scalars[0]), ("ge", scalars[1]))


def _compare(graph: Graph, node: Node, result: Node) -> None:
    compared = node.args[0]
    assert isinstance(compared, Node)
    dtype = compared.meta["val"].dtype
    if result.meta["val"].dtype != dtype:
        with graph.inserting_before(node):
            result = Writer(graph, result.meta["val"]).call(
                torch.ops.prims.convert_element_type.default, result, dtype
            )
    node.replace_input_with(compared, result)
