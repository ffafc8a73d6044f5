"""From the traced graph of a Model to values: one convolution, what comes before and after it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from convt3d.compile.expressions import Opaque, expression, match, name_of
from convt3d.compile.operands import Steps
from convt3d.compile.tails import steps_of, tail_of
from convt3d.export.formulas import literal
from convt3d.export.layer import ExportError
from convt3d.export.network.values import (
    AXES,
    POSITIONS,
    Reduction,
    Size,
    Stored,
    Value,
    Window,
    drawn_inside,
    pointwise,
    with_extents,
)

CONVOLVED = "convolved"
"""The convolution's output, after the steps in its epilogue."""

_SAME = frozenset({"clone", "detach", "alias", "lift_fresh_copy"})
_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "squeeze", "unsqueeze"})
_FUNCTIONS = {
    "abs": "fabsf({0})",
    "exp": "expf({0})",
    "sqrt": "sqrtf({0})",
    "tanh": "tanhf({0})",
}
_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_REDUCTIONS = {"amax": "max", "amin": "min"} | {
    kind: kind for kind in ("sum", "mean", "max", "min", "logsumexp")
}


@dataclass(frozen=True)
class Operand:
    """A parameter or buffer that stands beside values: contiguous, of any shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class View:
    """A value as a tensor of the graph: for each dimension, the axes that it runs over."""

    value: Value
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Running:
    """Buffers with statistics of a batch norm, which a call updates.

    Attributes:
        mean, deviation: the reductions of the values.
        buffers: names of those of mean, variance and the number of calls.
        count: values that each statistic is of.
    """

    mean: Reduction
    deviation: Reduction
    buffers: tuple[str, str, str]
    momentum: float
    count: int


@dataclass
class Reading:
    """What a graph computes.

    Attributes:
        convolution: its node, whose epilogue runs ``steps``.
        source: what it reads.
        result: what the Model returns, as a tensor of this ``shape``.
        running: statistics to update.
    """

    convolution: Node
    steps: Steps
    source: Value
    result: Value
    shape: tuple[int, ...]
    running: list[Running] = field(default_factory=list)


def read(
    graph: Graph,
    names: Mapping[Node, str],
    inputs: Collection[Node],
    joins: Callable[[Node, Steps], bool],
) -> Reading:
    """What a graph of ATen's operators computes. Nodes that do nothing but copy are removed.

    Args:
        graph: with fake tensors.
        names: of its placeholders.
        inputs: those that are no parameters or buffers.
        joins: whether the epilogue of the convolution can run these steps.

    Raises:
        ExportError: names the operator that no kernel computes.
    """
    for node in list(graph.nodes):
        if name_of(node).startswith(("bernoulli", "rand", "native_dropout")):
            raise ExportError(f"the Model draws random numbers: {node.target}")
        if name_of(node) == "leaky_relu" and len(node.args) == 1:
            node.args = (*node.args, 0.01)  # the operator's default
        elif name_of(node) in _SAME:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    found = [node for node in graph.nodes if name_of(node) == "convolution"]
    if len(found) != 1:
        raise ExportError(f"the Model runs {len(found)} convolutions, not one")
    (convolution,) = found
    tail = tail_of(convolution, lambda value: "", lambda: True)
    whole = [user.op for user in tail.end.users] == ["output"]
    steps = tail.steps if whole and joins(convolution, tail.steps) else []
    end = tail.end if steps else convolution
    inside = _descendants(convolution) if steps else {convolution}
    reader = _Reader(names, inputs)
    for node in graph.nodes:
        if node is end:
            reader.values[node] = View(Stored(CONVOLVED, _size_of(node)), tuple(AXES))
        elif node.op == "call_function" and name_of(node) == "add_" and not node.users:
            reader.counter = _counter(reader, node)
        elif node.op == "call_function" and node.users and node not in inside:
            reader.values[node] = reader.call(node)
    (output,) = graph.find_nodes(op="output")
    (returned,) = output.all_input_nodes
    return Reading(
        convolution,
        steps,
        reader.view(_arguments(convolution)[0]).value,
        reader.view(returned).value,
        tuple(returned.meta["val"].shape),
        reader.running,
    )


def _descendants(node: Node) -> set[Node]:
    """A node and all that is computed from it."""
    found: set[Node] = set()
    left = [node]
    while left:
        at = left.pop()
        left += [user for user in at.users if user not in found]
        found.add(at)
    return found


def _counter(reader: _Reader, node: Node) -> str:
    counter = reader.values.get(_arguments(node)[0])
    if not isinstance(counter, Operand) or node.args[1] != 1:
        raise ExportError(f"no kernel computes {node.target}")
    return counter.name


def _arguments(node: Node, *defaults: Any) -> list[Any]:
    """A node's arguments, those that are left out by default."""
    return [*node.args, *defaults[max(0, len(node.args) - 1) :]]


def _size_of(node: Node) -> Size:
    n, c, d, h, w = node.meta["val"].shape
    return (n, c, d, h, w)


def _three(numbers: Any) -> tuple[int, int, int]:
    d, h, w = (*numbers,) if len(numbers) == 3 else (*numbers,) * 3
    return (int(d), int(h), int(w))


class _Reader:
    """What the nodes of a graph are: a view of a value, an operand, or a list of results."""

    def __init__(self, names: Mapping[Node, str], inputs: Collection[Node]) -> None:
        self.values: dict[Node, Any] = {}
        self.running: list[Running] = []
        self.counter = ""  # of the batch norm that comes next
        self._normed: set[Value] = set()
        self._operands: dict[tuple[str, Size], Stored] = {}
        for node, name in names.items():
            shape = tuple(node.meta["val"].shape)
            if node in inputs and len(shape) == 5:
                self.values[node] = View(Stored(name, _size_of(node)), tuple(AXES))
            else:
                self.values[node] = Operand(name, shape)

    def view(self, node: Any) -> View:
        found = self.values.get(node) if isinstance(node, Node) else None
        if not isinstance(found, View):
            raise ExportError(f"{node}: the Model computes this from its parameters alone")
        return found

    def call(self, node: Node) -> Any:
        """The result of one operator."""
        name = name_of(node)
        if node.target is operator.getitem:
            source, number = _arguments(node)
            results = self.values[source]
            if number >= len(results):
                raise ExportError(f"{source.target}: no kernel computes result {number}")
            return results[number]
        if name in _VIEWS:
            return self._reshaped(node)
        if name in _REDUCTIONS:
            return self._reduction(node, _REDUCTIONS[name])
        special = {
            "_softmax": self._softmax,
            "avg_pool3d": self._average_pool,
            "max_pool3d_with_indices": self._largest_pool,
            "native_batch_norm": self._batch_norm,
            "native_group_norm": self._group_norm,
            "native_layer_norm": self._layer_norm,
        }.get(name)
        return special(node) if special else self._pointwise(node, name)

    # --- Element by element ----------------------------------------------------------------------

    def _pointwise(self, node: Node, name: str) -> View:
        arguments = [a for a in node.args if isinstance(a, Node)]
        if len(arguments) == 1:
            return self._of_one(node, arguments[0], name)
        if len(arguments) != 2 or len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
            raise ExportError(f"no kernel computes {node.target}")
        if name in _OPERATORS:
            text = f"({{0}} {_OPERATORS[name]} {{1}})"
        elif name in ("maximum", "minimum"):
            text = f"{name}({{0}}, {{1}})"
        else:
            raise ExportError(f"no kernel computes {node.target}")
        linear = name in ("add", "sub", "mul")
        return self._combined(node.name, text, [self.values[a] for a in arguments], linear)

    def _of_one(self, node: Node, argument: Node, name: str) -> View:
        view = self.view(argument)
        if name in _FUNCTIONS:
            return View(pointwise(node.name, _FUNCTIONS[name], view.value), view.axes)
        try:
            matched = match(expression(node, argument))
        except Opaque:
            matched = None
        if matched is None:
            raise ExportError(f"no kernel computes {node.target}")
        value = view.value
        for number, step in enumerate(steps_of(matched)):
            scalars = [literal(scalar) for scalar in step.scalars]
            sign = {"add_scalar": "+", "mul_scalar": "*"}.get(step.kind)
            text = f"convt3d::{step.kind}({', '.join(['{0}', *scalars])})"
            text = f"({{0}} {sign} {scalars[0]})" if sign else text
            suffix = f"_{number}" if number else ""
            value = pointwise(f"{node.name}{suffix}", text, value, linear=bool(sign))
        return View(value, view.axes)

    def _combined(
        self, name: str, text: str, arguments: Sequence[View | Operand], linear: bool
    ) -> View:
        """Views and operands that broadcast as tensors do: their last dimensions are aligned."""
        views = [a for a in arguments if isinstance(a, View)]
        if not views:
            raise ExportError(f"{name}: the Model computes this from its parameters alone")
        rank = max(len(view.axes) for view in views)
        aligned = [("",) * (rank - len(view.axes)) + view.axes for view in views]
        axes = tuple(max(dimension, key=len) for dimension in zip(*aligned, strict=True))
        if any(d not in ("", axes[i]) for dimensions in aligned for i, d in enumerate(dimensions)):
            raise ExportError(f"{name} mixes axes that differ")
        like = pointwise(name, text, *(view.value for view in views)).size
        values = [
            a.value if isinstance(a, View) else self._aligned(name, a, axes, like)
            for a in arguments
        ]
        return View(pointwise(name, text, *values, linear=linear), axes)

    def _aligned(self, name: str, operand: Operand, axes: Sequence[str], like: Size) -> Value:
        """An operand as a value, its last dimensions aligned with these."""
        whole = Stored(operand.name, like)
        found = ""
        for extent, axis in zip(reversed(operand.shape), reversed(axes), strict=False):
            if extent != 1 and extent != whole.extent(axis):
                raise ExportError(f"{name}: {operand.name} of {operand.shape} does not broadcast")
            found += axis if extent != 1 else ""
        if math.prod(operand.shape) != whole.extent(found):
            raise ExportError(f"{name}: {operand.name} of {operand.shape} does not broadcast")
        size = with_extents(like, "".join(set(AXES) - set(found)))
        return self._operands.setdefault((operand.name, size), Stored(operand.name, size))

    # --- Shapes ----------------------------------------------------------------------------------

    def _reshaped(self, node: Node) -> View | Operand:
        shape = tuple(node.meta["val"].shape)
        source = _arguments(node)[0]
        found = self.values[source]
        if isinstance(found, Operand):
            return Operand(found.name, shape)
        view = self.view(source)
        left = [axis for axis in "".join(view.axes) if view.value.extent(axis) > 1]
        axes = []
        for extent in shape:
            axis = ""
            while view.value.extent(axis) < extent and left:
                axis += left.pop(0)
            if view.value.extent(axis) != extent:
                raise ExportError(f"{node.target} to {shape} splits an axis")
            axes.append(axis)
        return View(view.value, tuple(axes))

    # --- Reductions ------------------------------------------------------------------------------

    def _reduction(self, node: Node, kind: str) -> Any:
        source, *options = _arguments(node)
        view = self.view(source)
        if not options or set(node.kwargs) - {"keepdim"}:
            raise ExportError(f"no kernel computes {node.target} of a whole tensor")
        keep = node.kwargs.get("keepdim", options[1] if len(options) > 1 else False)
        rank = len(view.axes)
        one = isinstance(options[0], int)
        dimensions = {d % rank for d in ([options[0]] if one else options[0])}
        over = "".join(view.axes[d] for d in dimensions)
        value = self._reduced(node.name, kind, view.value, over)
        axes = tuple("" if d in dimensions else a for d, a in enumerate(view.axes))
        if not keep:
            axes = tuple(a for d, a in enumerate(view.axes) if d not in dimensions)
        return [View(value, axes)] if one and kind in ("max", "min") else View(value, axes)

    def _reduced(self, name: str, kind: str, value: Value, over: str) -> Value:
        """A reduction over these axes: first over positions, then over channels."""
        if "n" in over:
            raise ExportError(f"{name}: no kernel reduces over samples")
        positions = "".join(a for a in POSITIONS if a in over and value.extent(a) > 1)
        if positions:

            def make(of: Value, made: str) -> Value:
                if positions in ("w", POSITIONS):
                    return Reduction(made, with_extents(of.size, positions), kind, of, positions)
                if kind == "logsumexp":
                    raise ExportError(f"{name}: no kernel reduces over {positions} alone")
                d, h, w = (of.extent(a) if a in positions else 1 for a in POSITIONS)
                size = with_extents(of.size, positions)
                return Window(made, size, kind, of, (d, h, w), (d, h, w))

            linear = kind == "mean" and positions == POSITIONS
            value = drawn_inside(name, value, make, self._normed) if linear else make(value, name)
        if "c" in over and value.extent("c") > 1:
            value = Reduction(f"{name}_c", with_extents(value.size, "c"), kind, value, "c")
        return value

    def _softmax(self, node: Node) -> View:
        source, dimension, _ = _arguments(node)
        view = self.view(source)
        over = view.axes[dimension % len(view.axes)]
        sums = self._reduced(f"{node.name}_sum", "logsumexp", view.value, over)
        text = "expf({0} - {1})"
        return View(pointwise(node.name, text, view.value, sums), view.axes)

    # --- Windows ---------------------------------------------------------------------------------

    def _average_pool(self, node: Node) -> View:
        source, window, stride, padding, ceiling, _, divisor = _arguments(
            node, None, [], [0], False, True, None
        )
        self._check_pool(node, padding, [1], ceiling or divisor is not None)
        view = self.view(source)

        def make(value: Value, name: str) -> Value:
            return self._window(name, "mean", value, window, stride)

        return View(drawn_inside(node.name, view.value, make, ()), view.axes)

    def _largest_pool(self, node: Node) -> list[View]:
        source, window, stride, padding, dilation, ceiling = _arguments(
            node, None, [], [0], [1], False
        )
        self._check_pool(node, padding, dilation, ceiling)
        view = self.view(source)
        return [View(self._window(node.name, "max", view.value, window, stride), view.axes)]

    def _check_pool(self, node: Node, padding: Any, dilation: Any, other: Any) -> None:
        if any(padding) or any(d != 1 for d in dilation) or other:
            raise ExportError(
                f"{node.target}: no kernel pools with padding, dilation, ceil_mode or a divisor"
            )

    def _window(self, name: str, kind: str, value: Value, window: Any, stride: Any) -> Value:
        windows = _three(window)
        steps = _three(stride) if stride else windows
        n, c, *extents = value.size
        d, h, w = (
            (extent - size) // step + 1 if extent > 1 else 1
            for extent, size, step in zip(extents, windows, steps, strict=True)
        )
        return Window(name, (n, c, d, h, w), kind, value, windows, steps)

    # --- Norms -----------------------------------------------------------------------------------

    def _batch_norm(self, node: Node) -> list[View]:
        source, weight, bias, mean, variance, training, momentum, eps = _arguments(node)
        view = self.view(source)
        if not training:
            raise ExportError(f"{node.target}: running statistics are not what training mode reads")
        axes = "".join(a for a in AXES if a not in view.axes[1])
        normed, average, deviation = self._normed_view(node, view, axes, 1, eps)
        if mean is not None:
            buffers = (self.values[mean].name, self.values[variance].name, self.counter)
            count = view.value.extent(axes)
            self.running.append(Running(average, deviation, buffers, float(momentum), count))
        return [self._affine(node, normed, weight, bias, (1, 1, 1))]

    def _group_norm(self, node: Node) -> list[View]:
        source, weight, bias, _, _, _, groups, eps = _arguments(node)
        normed, *_ = self._normed_view(node, self.view(source), "cdhw", groups, eps)
        return [self._affine(node, normed, weight, bias, (1, 1, 1))]

    def _layer_norm(self, node: Node) -> list[View]:
        source, shape, weight, bias, eps = _arguments(node)
        view = self.view(source)
        axes = "".join(view.axes[len(view.axes) - len(shape) :])
        if axes not in ("w", "dhw", "cdhw"):
            raise ExportError(f"{node.target}: no kernel norms over {axes or 'one value'}")
        normed, *_ = self._normed_view(node, view, axes, 1, eps)
        return [self._affine(node, normed, weight, bias, ())]

    def _normed_view(
        self, node: Node, view: View, axes: str, groups: Any, eps: Any
    ) -> tuple[View, Reduction, Reduction]:
        """A view less its mean, divided by its deviation; and these."""
        value = view.value
        size = with_extents(value.size, axes)
        if "c" in axes and "n" not in axes:
            size = (size[0], groups, *size[2:])
        mean = Reduction(f"{node.name}_mean", size, "mean", value, axes)
        deviation = Reduction(f"{node.name}_rstd", size, "rstd", value, axes, eps)
        self._normed.add(value)
        apart = pointwise(f"{node.name}_apart", "({0} - {1})", value, mean, linear=True)
        normed = pointwise(node.name, "({0} * {1})", apart, deviation, linear=True)
        return View(normed, view.axes), mean, deviation

    def _affine(
        self, node: Node, view: View, weight: Any, bias: Any, behind: tuple[int, ...]
    ) -> View:
        """Factors and summands of a norm; ``behind``: extents behind those of their shape."""
        for number, (operand, text) in enumerate(
            ((weight, "({0} * {1})"), (bias, "({0} + {1})")), start=1
        ):
            if operand is not None:
                found = self.values[operand]
                found = Operand(found.name, (*found.shape, *behind))
                view = self._combined(f"{node.name}_{number}", text, [view, found], True)
        return view
