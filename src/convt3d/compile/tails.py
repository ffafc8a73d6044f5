"""The element-wise tail of a node: which of its users an epilogue can run, and where that ends.

A tail grows by links. Each link takes the only use of the value so far: an operator with a number,
a tensor by channel or one of the output's shape, a conversion, or a region of several operators
that is an activation. A value that anything else reads, be it autograd's saved tensors, ends the
tail: that value must be in memory anyway. (To write both would save one reading of it, too; no
kernel has two outputs.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tag, Tensor
from torch._ops import OpOverload
from torch.fx import Node

from convt3d.compile.expressions import (
    MOST_NODES,
    Expression,
    Match,
    Opaque,
    converts,
    expression,
    match,
    name_of,
)
from convt3d.compile.operands import Computed, Operand, Steps, kind_of, merged, same, unconverted
from convt3d.fusion import KINDS, MAX_STEPS, Step


@dataclass(frozen=True)
class Link:
    """The node that a link ends at, and its steps, each with what it reads beside the value."""

    end: Node
    steps: tuple[tuple[Step, Operand], ...] = ()


@dataclass
class Tail:
    """What follows a node and can run in its epilogue.

    Args:
        end: the last node of the tail; the node itself where there is none.
        steps: with what they read.
        stopped: what ends it, in a few words.
    """

    end: Node
    steps: Steps = field(default_factory=list)
    stopped: str = ""


class Stop(Exception):
    """Why a tail ends, in a few words."""


def tail_of(node: Node, fits: Callable[[Tensor], str], reads_tensors: Callable[[], bool]) -> Tail:
    """The longest tail of a node.

    Args:
        node: one of the convolutions, with a value.
        fits: says why the result may not be the value of a node, or "".
        reads_tensors: whether steps may read tensors of the output's shape.
    """
    found: list[Link] = []
    stopped = ""
    try:
        for link in links(node):
            if _reads_tensors(link.steps) and not reads_tensors():
                raise Stop("a pass of its own is the faster one for a step that reads a tensor")
            found.append(link)
            if len(found) == _MOST_LINKS:
                break
    except Stop as stop:
        stopped = str(stop)
    for count in range(len(found), 0, -1):
        end = found[count - 1].end
        steps = merged([step for link in found[:count] for step in link.steps])
        misfit = fits(end.meta["val"])
        if len(steps) > MAX_STEPS:
            stopped = f"an epilogue has {MAX_STEPS} steps at most"
        elif misfit:
            stopped = misfit
        elif not _reads_tensors(steps) and _read_by_loops(end):
            return Tail(node, [], "what follows passes over the value anyway")
        else:
            return Tail(end, steps, stopped)
    return Tail(node, [], stopped)


def _reads_tensors(steps: Iterable[tuple[Step, Operand]]) -> bool:
    return any(KINDS[step.kind].operand == "tensor" for step, _ in steps)


_REDUCTIONS = frozenset({"sum", "mean", "var", "var_mean", "amax", "amin", "max", "min", "prod"})
_VIEWS = frozenset({"reshape", "view", "_unsafe_view", "permute", "squeeze", "unsqueeze", "expand"})


def _read_by_loops(node: Node) -> bool:
    """Whether loops of Inductor's, element-wise or reductions, are all that reads a value.

    They compute the steps before them at no cost that counts: what bounds them is memory. An
    epilogue with the same steps would save no pass.
    """
    for user in node.users:
        name = name_of(user)
        if name in _VIEWS:
            if not _read_by_loops(user):
                return False
        elif not (converts(user) or name in _REDUCTIONS or _element_wise(user)):
            return False
    return bool(node.users)


def _element_wise(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and Tag.pointwise in node.target.tags


_MOST_LINKS = 4 * MAX_STEPS


def links(node: Node) -> Iterator[Link]:
    """The links of the tail of a node, in order; raises Stop after the last."""
    output, at, moved = node.meta["val"], node, False
    while True:
        link = _region(at) or _with_itself(at, output, moved) or _with_tensor(at, output)
        if not same(link.end.meta["val"].shape, output.shape):
            raise Stop(f"{link.end.name} has another shape")
        yield link
        at, moved = link.end, moved or bool(link.steps)


def _only_user(node: Node) -> Node:
    users = list(node.users)
    if len(users) == 1 and users[0].op == "output":
        raise Stop("nothing follows")
    if len(users) == 1:
        return users[0]
    if any(user.op == "output" for user in users):
        raise Stop("the value before the next step is kept")
    raise Stop(f"{len(users)} nodes read the value" if users else "nothing follows")


def candidates(node: Node) -> list[Node]:
    """Descendants of a node by ATen's operators, a few edges away."""
    found: dict[Node, None] = {}
    edge = [node]
    while edge and len(found) < 2 * MOST_NODES:
        edge = [user for at in edge for user in at.users if name_of(user) and user not in found]
        found.update(dict.fromkeys(edge))
    return list(found)


def regions(root: Node) -> Iterator[tuple[Node, Match, frozenset[Node]]]:
    """Regions from ``root`` on that are a step without a tensor: end, step, nodes inside.

    Those nodes are the end and what it is computed from; constants, which may be shared, are none.
    """
    for end in candidates(root):
        inside: dict[Node, Expression] = {}
        if converts(end):
            continue
        try:
            matched = match(expression(end, root, inside))
        except Opaque:
            continue
        if matched is not None:
            values = (node for node, found in inside.items() if not isinstance(found, float))
            yield end, matched, frozenset(values)


def _region(root: Node) -> Link | None:
    """The largest region from ``root`` on whose nodes nothing else reads; or a conversion."""
    if len(root.users) == 1:
        (user,) = root.users
        if converts(user):
            return Link(user)
    largest, size = None, 0
    for end, matched, inside in regions(root):
        if len(inside) > size and _closed(root, end, inside):
            steps = tuple((step, None) for step in steps_of(matched))
            largest, size = Link(end, steps), len(inside)
    return largest


def _closed(root: Node, end: Node, inside: frozenset[Node]) -> bool:
    """Whether nothing but the nodes inside, of a region or a chain, reads values before the end."""
    return all(user in inside for node in (root, *inside) if node is not end for user in node.users)


def steps_of(matched: Match) -> list[Step]:
    """The steps of a match."""
    scalars = iter(matched.scalars)
    return [
        Step(kind, tuple(next(scalars) for _ in range(KINDS[kind].scalars)))
        for kind in matched.kinds
    ]


_BINARY = frozenset({"add", "sub", "mul"})


def _with_itself(root: Node, output: Tensor, moved: bool) -> Link | None:
    """The link of a chain that reads ``root`` more than once: in sums and products, held meanwhile.

    ``moved``: whether ``root`` is another value than the one that is held at first.
    """
    if sum(user.args.count(root) for user in root.users) < 2:
        return None
    below: set[Node] = set()
    edge = [root]
    while edge:
        edge = [user for at in edge for user in at.users if user not in below]
        below.update(edge)
    hold = [(Step("hold"), None)] if moved else []

    def extended(at: Node, steps: Steps, inside: frozenset[Node]) -> Link | None:
        if at is not root and _closed(root, at, inside):
            return Link(at, (*hold, *steps))
        if len(hold) + len(steps) >= MAX_STEPS:
            return None
        for end, more, nodes in _ways(root, at, output, below):
            found = extended(end, [*steps, *more], inside | nodes)
            if found is not None:
                return found
        return None

    return extended(root, [], frozenset())


def _ways(
    root: Node, at: Node, output: Tensor, below: set[Node]
) -> Iterator[tuple[Node, Steps, frozenset[Node]]]:
    """What can follow ``at`` in a chain from ``root`` on: its end, its steps, its nodes."""
    for user in at.users:
        name = name_of(user)
        if converts(user):
            yield user, [], frozenset({user})
        plain = len(user.args) == 2 and user.kwargs.get("alpha", 1) == 1
        if not plain or name not in _BINARY:
            continue
        other = user.args[1] if user.args[0] is at else user.args[0]
        conversions = _conversions(other, root)
        if conversions is not None:
            if name in ("add", "mul"):
                yield user, [(Step(f"{name}_held"), None)], conversions | {user}
        elif not any(arg in below or arg is root for arg in user.args if arg is not at):
            with contextlib.suppress(Stop):
                yield user, list(_joined(at, user, output).steps), frozenset({user})
    for end, matched, inside in regions(at):
        yield end, [(step, None) for step in steps_of(matched)], inside


def _conversions(node: Any, root: Node) -> frozenset[Node] | None:
    """The nodes by which ``node`` is a conversion of ``root``; None where it is another value."""
    found = set()
    while isinstance(node, Node) and node is not root and converts(node):
        found.add(node)
        node = node.args[0]
    return frozenset(found) if node is root else None


def _with_tensor(root: Node, output: Tensor) -> Link:
    """The link of an addition, subtraction or product with another tensor."""
    return _joined(root, _only_user(root), output)


def _joined(root: Node, user: Node, output: Tensor) -> Link:
    """The same, of a user of the value."""
    name = name_of(user)
    if name not in _BINARY or user.kwargs.get("alpha", 1) != 1:
        raise Stop(f"no step computes {name}" if name else user.name)
    arguments = user.args
    if len(arguments) != 2 or arguments[0] is arguments[1]:
        raise Stop(f"{user.name} reads the value twice")
    first = arguments[0] is root
    other = arguments[1] if first else arguments[0]
    if not isinstance(other, Node) or not isinstance(other.meta.get("val"), Tensor):
        raise Stop(f"{user.name} reads no tensor and no number")
    by = kind_of(other, output)
    if not by:
        raise Stop(f"{user.name} reads a tensor of a shape or dtype that no step takes")
    operand: Operand = unconverted(other, output.dtype) if by == "tensor" else other
    assert operand is not None
    if name == "mul":
        return Link(user, ((Step("scale" if by == "channel" else "mul"), operand),))
    added = Step("shift" if by == "channel" else "add")
    if name == "add":
        return Link(user, ((added, operand),))
    minus = Step("mul_scalar", (-1.0,))
    if not first:
        return Link(user, ((minus, None), (added, operand)))
    if by == "tensor":
        return Link(user, ((minus, None), (added, operand), (minus, None)))
    return Link(user, ((added, Computed("neg", (operand,))),))
