"""The kernels of a graph, planned and compiled while Inductor compiles everything else of it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from convt3d import backends
from convt3d.arguments import check
from convt3d.compile.base import FUSED, TRANSPOSED
from convt3d.cuda import ahead
from convt3d.cuda.epilogue import epilogue_of, part_channels
from convt3d.cuda.launch import gpu_of
from convt3d.cuda.operation import Operation
from convt3d.fused_ops import Call
from convt3d.operands import geometry_of

_GRAD_WEIGHT = torch.ops.convt3d.grad_weight.default
_NO_TAIL: tuple[Any, ...] = ([], [], [], None, [], [])
_WITH_TAIL = {
    **{plain: (plain is TRANSPOSED, _NO_TAIL) for plain in FUSED},
    **{fused: (plain is TRANSPOSED, ()) for plain, fused in FUSED.items()},
}
"""By operator: whether it is the transposed layer's output, and what its arguments lack of a tail.
"""


def request(graph: Graph) -> None:
    """Plan and compile the kernels of a graph's convolutions in the background.

    Not where ``torch.backends.cudnn.benchmark`` asks for candidates to be timed, nor where sizes
    are symbols.
    """
    if torch.backends.cudnn.benchmark or backends.DISABLED:
        return
    by_device: dict[int, list[Operation]] = defaultdict(list)
    for node in graph.nodes:
        operation = operation_of(node)
        if operation is not None and operation.device is not None and operation.batch > 0:
            by_device[operation.device].append(operation)
    for device, operations in by_device.items():
        ahead.expect(operations, gpu_of(device))


def operation_of(node: Node) -> Operation | None:
    """What a node will run, tail included; None if it is no operator of ours, or has symbols."""
    if node.target is not _GRAD_WEIGHT and node.target not in _WITH_TAIL:
        return None
    arguments: Any = torch.fx.node.map_arg(node.args, lambda argument: argument.meta["val"])
    if not all(map(_static, tree_leaves(arguments))):
        return None
    if node.target is _GRAD_WEIGHT:
        x, gy, _kernel_size, last, *parameters = arguments
        geometry = geometry_of(node.meta["val"].shape, parameters)
        return Operation.grad_weight(x, gy, geometry, last, False)
    transposed, missing = _WITH_TAIL[node.target]
    call = Call(check, transposed, (*arguments, *missing))
    last = call.result.channels_last
    operands = (call.source, call.weight, call.bias is not None)
    kind = (call.geometry, call.input_size, last)
    operation = Operation.output(call.operation, *operands, *kind)
    dtype = call.source.dtype
    part = call.part if call.result.dtype == dtype else None
    channels = part_channels(part, call.result.size, dtype, last) or 0
    epilogue = epilogue_of(call.fusion, call.operands, dtype, channels)
    return operation._replace(epilogue=epilogue)


def _static(value: Any) -> bool:
    if isinstance(value, Tensor):
        return all(type(extent) is int for extent in (*value.shape, *value.stride()))
    return not isinstance(value, (torch.SymInt, torch.SymFloat))
