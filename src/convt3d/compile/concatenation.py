"""Concatenations along the channels that a convolution can write its part of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from convt3d.compile.expressions import name_of
from convt3d.compile.operands import same
from convt3d.layout import empty

_COMPUTED_ELSEWHERE = frozenset({"convolution", "mm", "addmm", "bmm", "baddbmm"})
"""ATen's operators that are calls of a library: their results are in memory anyway."""


@dataclass(frozen=True)
class Concatenation:
    """The node of a concatenation, and the tensors before and after the one in question."""

    node: Node
    before: list[Node]
    after: list[Node]


def concatenation(end: Node, channels_last: bool) -> tuple[Concatenation | None, str]:
    """The concatenation that the end of a tail goes into, and nothing else does, if it may.

    The operator copies the other tensors into the result, as Inductor's kernel would. That kernel
    also computes them on the way where they are element-wise and nothing else reads them, and ours
    has to read them from memory. So it is fused where the channels that are saved from being
    written and read again are at least as many as those that come to be.

    Returns:
        The concatenation, or None and why not, in a few words ("" if there is none).
    """
    users = list(end.users)
    if len(users) != 1 or name_of(users[0]) != "cat":
        return None, ""
    node = users[0]
    parts = node.args[0]
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if axis not in (1, -4) or not isinstance(parts, (list, tuple)):
        return None, "cat along another axis"
    if parts.count(end) != 1:
        return None, "cat reads the value twice"
    result, value = node.meta["val"], end.meta["val"]
    before, after = (
        [part for part in some if isinstance(part, Node) and _joins(part, value)]
        for some in (parts[: parts.index(end)], parts[parts.index(end) + 1 :])
    )
    if len(before) + len(after) + 1 != len(parts):
        return None, "cat of tensors of other dtypes or ranks"
    if not same(result.stride(), _strides(result, channels_last)):
        return None, "cat gives another memory format"
    computed = sum(part.meta["val"].shape[1] for part in (*before, *after) if not _in_memory(part))
    if not _at_most(computed, value.shape[1]):
        return None, "cat computes more than it would save"
    return Concatenation(node, before, after), ""


def _joins(part: Node, value: Tensor) -> bool:
    other = part.meta.get("val")
    return (
        isinstance(other, Tensor)
        and other.dim() == 5
        and other.dtype == value.dtype
        and other.device == value.device
    )


def _at_most(count: object, limit: object) -> bool:
    return isinstance(count, int) and isinstance(limit, int) and count <= limit


def _strides(result: Tensor, channels_last: bool) -> tuple[int, ...]:
    """The strides that the operator gives a result of this size."""
    with result.fake_mode:  # type: ignore[attr-defined]
        return tuple(empty(result.shape, result, channels_last).stride())


def _in_memory(node: Node) -> bool:
    """Whether a tensor is written to memory anyway."""
    if node.op != "call_function" or len(node.users) > 1:
        return True
    return name_of(node) in ("", *_COMPUTED_ELSEWHERE) and isinstance(
        node.target, torch._ops.OpOverload
    )
