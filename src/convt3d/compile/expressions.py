"""What a small region of an ATen graph computes, as an expression, and which step that is.

Inductor decomposes most activations before its graph passes see them, each version in its own way.
So the patterns are not written down: they are traced, at first use, from PyTorch's functions with
the decompositions of the PyTorch that runs, and compared as expressions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

Expression = Any
"""``X``, a float, or a tuple of the name of an operator and the expressions of its arguments."""

X = "x"
MOST_NODES = 16
"""Nodes of a region; the longest pattern, the tanh form of GELU, has 10."""

_COMMUTATIVE = frozenset({"add", "mul"})
_CONVERSIONS = frozenset({"convert_element_type", "_to_copy"})


class Opaque(Exception):
    """A node that is no element-wise function of the root and of numbers."""


def name_of(node: Node) -> str:
    """The name of the ATen or prims operator that a node calls, without overload; or ""."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return ""
    namespace, _, name = node.target._schema.name.partition("::")
    return name if namespace in ("aten", "prims") else ""


def converts(node: Node) -> bool:
    """Whether a node does nothing but to convert a floating-point tensor to another such type.

    To and from float64 does not count: an epilogue computes in float32.
    """
    if name_of(node) not in _CONVERSIONS or set(node.kwargs) - {"dtype"}:
        return False
    value, source = node.meta.get("val"), node.args[0]
    before = source.meta.get("val") if isinstance(source, Node) else None
    return (
        isinstance(value, Tensor)
        and isinstance(before, Tensor)
        and value.dtype.is_floating_point
        and before.dtype.is_floating_point
        and (value.dtype == torch.float64) == (before.dtype == torch.float64)
    )


def expression(node: Any, root: Node, inside: dict[Node, Expression] | None = None) -> Expression:
    """The expression of ``node`` in terms of ``root``; conversions and their rounding left out.

    Args:
        node: a node or a number.
        root: the node that is ``X``.
        inside: receives the nodes between, ``node`` included, with their expressions.

    Raises:
        Opaque: it depends on anything else, or is too long.
    """
    inside = {} if inside is None else inside
    if node is root:
        return X
    if isinstance(node, (int, float)) and not isinstance(node, bool):
        return float(node)
    if not isinstance(node, Node):
        raise Opaque
    if node not in inside:
        if len(inside) >= MOST_NODES:
            raise Opaque
        inside[node] = None  # counts towards the limit before its arguments do
        inside[node] = _call(node, root, inside)
    return inside[node]


def _call(node: Node, root: Node, inside: dict[Node, Expression]) -> Expression:
    name = name_of(node)
    if name in ("full", "scalar_tensor"):
        return _constant(node, name)
    if converts(node):
        return expression(node.args[0], root, inside)
    keywords = {key: value for key, value in node.kwargs.items() if value is not None}
    if not name or (keywords and name != "gelu"):
        raise Opaque
    if name in ("clamp", "hardtanh"):
        low, high = (*node.args[1:], None, None)[:2]
        if name == "hardtanh":
            low, high = -1.0 if low is None else low, 1.0 if high is None else high
        result = expression(node.args[0], root, inside)
        if low is not None:
            result = ("clamp_min", result, expression(low, root, inside))
        if high is not None:
            result = ("clamp_max", result, expression(high, root, inside))
        return result
    if name == "gelu":
        form = keywords.get("approximate", "none")
        return (f"gelu {form}", expression(node.args[0], root, inside))
    arguments = [expression(argument, root, inside) for argument in node.args]
    return _normal(name, arguments)


def _constant(node: Node, name: str) -> float:
    size, value = node.args if name == "full" else ([], *node.args)
    if size or not isinstance(value, (int, float)) or isinstance(value, bool):
        raise Opaque
    return float(value)


def _normal(name: str, arguments: list[Expression]) -> Expression:
    """One form for what has several; exact, but for the rounding of a reciprocal.

    PyTorch's CUDA kernel divides by a number by multiplying with its reciprocal, too.
    """
    first, *rest = arguments
    if name == "neg":
        return ("mul", first, -1.0)
    if name == "relu":
        return ("clamp_min", first, 0.0)
    if name == "sub" and isinstance(rest[0], float):
        return ("add", first, -rest[0])
    if name == "div" and isinstance(rest[0], float) and rest[0] != 0:
        return ("mul", first, 1 / rest[0])
    return (name, *arguments)


# --- Patterns ------------------------------------------------------------------------------------

_HOLES = (0.2718281828, 0.5772156649)
"""Numbers that stand for the scalars of a step while its pattern is traced."""

_ROOT_HALF = 1 / math.sqrt(2)
_ROOT_2_OVER_PI = math.sqrt(2 / math.pi)


def _spelled_gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(_ROOT_2_OVER_PI * (x + 0.044715 * torch.pow(x, 3))))


_SPELLINGS: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "relu": [F.relu],
    "leaky_relu": [lambda x: F.leaky_relu(x, _HOLES[0])],
    "silu": [F.silu, lambda x: x * torch.sigmoid(x)],
    "gelu": [F.gelu, lambda x: 0.5 * x * (1 + torch.erf(x * _ROOT_HALF))],
    "gelu_tanh": [lambda x: F.gelu(x, approximate="tanh"), _spelled_gelu_tanh],
    "hardswish": [F.hardswish, lambda x: x * (F.relu6(x + 3) / 6)],
    "sigmoid": [torch.sigmoid, lambda x: 1 / (1 + torch.exp(-x))],
    "tanh": [torch.tanh],
    "mish": [F.mish, lambda x: x * torch.tanh(F.softplus(x))],
    "clamp": [lambda x: torch.clamp(x, *_HOLES)],
    "clamp below": [lambda x: torch.clamp(x, min=_HOLES[0])],
    "clamp above": [lambda x: torch.clamp(x, max=_HOLES[0])],
    "add_scalar": [lambda x: x + _HOLES[0]],
    "mul_scalar": [lambda x: x * _HOLES[0]],
    "subtracted": [lambda x: _HOLES[0] - x],
}
"""Each kind of step that reads no tensor, in the ways that models spell it."""


@dataclass(frozen=True)
class Match:
    """What an expression computes: kinds and scalars of one or two steps."""

    kinds: tuple[str, ...]
    scalars: tuple[float, ...]


@functools.cache
def _patterns() -> list[tuple[str, Expression]]:
    """Kinds and expressions, as Inductor's decompositions leave them and as written."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    found: list[tuple[str, Expression]] = []
    # A pass runs inside of a compilation, whose fake tensors and guards are not for this.
    with torch._guards.tracing(None), unset_fake_temporarily(), disable_proxy_modes_tracing():
        for table in (None, select_decomp_table()):
            for kind, spellings in _SPELLINGS.items():
                for spelling in spellings:
                    pattern = _traced(spelling, table)
                    if (kind, pattern) not in found:
                        found.append((kind, pattern))
    return found


def _traced(function: Callable[[Tensor], Tensor], table: Any) -> Expression:
    from torch.fx.experimental.proxy_tensor import make_fx

    def traced(x: Tensor) -> Tensor:
        return function(x)

    graph = make_fx(traced, decomposition_table=table)(torch.ones(2)).graph
    root, *_, output = graph.nodes
    return expression(output.args[0], root)


def match(found: Expression) -> Match | None:
    """The step that an expression is, if any."""
    for kind, pattern in _patterns():
        holes: dict[float, float] = {}
        if _unify(pattern, found, holes):
            return _steps(kind, tuple(holes[hole] for hole in _HOLES if hole in holes))
    return None


def _steps(kind: str, scalars: tuple[float, ...]) -> Match:
    if kind == "clamp below":
        return Match(("clamp",), (*scalars, math.inf))
    if kind == "clamp above":
        return Match(("clamp",), (-math.inf, *scalars))
    if kind == "subtracted":
        return Match(("mul_scalar", "add_scalar"), (-1.0, *scalars))
    return Match((kind,), scalars)


def _unify(pattern: Expression, found: Expression, holes: dict[float, float]) -> bool:
    """Whether ``found`` is ``pattern`` with numbers in place of the holes, which are filled in."""
    if isinstance(pattern, float):
        if not isinstance(found, float):
            return False
        if pattern in _HOLES:
            return holes.setdefault(pattern, found) == found
        return math.isclose(pattern, found, rel_tol=1e-12)
    if not isinstance(pattern, tuple):
        return bool(pattern == found)
    if not isinstance(found, tuple) or len(found) != len(pattern) or found[0] != pattern[0]:
        return False
    orders = [found[1:]]
    if pattern[0] in _COMMUTATIVE:
        orders.append(found[:0:-1])
    for order in orders:
        tried = dict(holes)
        if all(_unify(p, f, tried) for p, f in zip(pattern[1:], order, strict=True)):
            holes.update(tried)
            return True
    return False
