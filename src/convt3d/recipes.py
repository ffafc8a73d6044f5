"""Calls seen before: what was decided for tensors of one kind, found again in a microsecond.

A recipe holds what the checks, the choice of a backend and its plan came to, for tensors of one
kind (``decisions.py``). Everything else takes the long way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import is_
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from convt3d import backends, native, ops
from convt3d.arguments import Parameters
from convt3d.decisions import MAX_KINDS, Decisions, Settings, guard
from convt3d.dispatch import plain
from convt3d.layer import Layer

_MAX_SHAPES = 4096

_TYPES = frozenset({Tensor, Parameter})
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack

_Result = TypeVar("_Result")


class _Gradient(Generic[_Result]):
    """The gradient by input or weight, or by weight and bias, as a function of two tensors."""

    __slots__ = ("_decisions", "_dispatched", "_long_way", "_prepare")

    def __init__(
        self,
        prepare: Callable[[Tensor, Tensor], Callable[[Tensor, Tensor], _Result] | None],
        long_way: Callable[[Tensor, Tensor], _Result],
        dispatched: Callable[[Tensor, Tensor], _Result],
    ) -> None:
        self._prepare, self._long_way, self._dispatched = prepare, long_way, dispatched
        self._decisions: Decisions[Callable[[Tensor, Tensor], _Result]] = Decisions()

    @property
    def left(self) -> bool:
        """Whether PyTorch's operator is all that was decided on."""
        made = self._decisions.made
        return bool(made) and all(map(backends.by_pytorch, made))

    def __call__(self, a: Tensor, b: Tensor) -> _Result:
        known = self._decisions.find(a, b)
        if known is not None:
            return known(a, b)
        if not plain(a, b):
            return self._dispatched(a, b)
        prepared = self._prepare(a, b)
        if prepared is None or not self._decisions.add(prepared, a, b):
            return self._long_way(a, b)
        return prepared(a, b)


class Recipe:
    """A call of ``conv_transpose3d`` or ``conv3d`` on batched plain tensors of one kind.

    ``forward`` runs it without autograd, ``gradients`` its derivatives: see ``steps.py``. ``left``
    tells of a Conv3d whether PyTorch's operator runs it and all gradients that it wants: then
    PyTorch's own call costs the host less. It is known from the first backward pass on.
    """

    __slots__ = (
        "_by_input",
        "_by_weight",
        "_by_weight_and_bias",
        "_wanted",
        "check",
        "differentiable",
        "dilation",
        "forward",
        "groups",
        "layer",
        "left",
        "output_padding",
        "padding",
        "settings",
        "stride",
        "with_bias",
    )

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        check: Callable[..., bool],
        operands: tuple[Tensor, Tensor, Tensor | None],
        parameters: Parameters,
        layer: Layer,
    ) -> None:
        input, weight, bias = operands
        self.stride, self.padding, self.output_padding, self.groups, self.dilation = parameters
        self.forward, self.check, self.with_bias = forward, check, bias is not None
        self.settings = Settings(input)
        self.differentiable = any(t is not None and t.requires_grad for t in operands)
        self.layer = layer
        self.left = False
        geometry, last = layer.geometry, layer.channels_last
        self._by_input = _Gradient(
            lambda gy, w: layer.by_input(backends.PREPARE, gy, w),
            lambda gy, w: layer.by_input(backends.OPERATORS, gy, w),
            lambda gy, w: layer.by_input(ops.OPERATORS, gy, w),
        )
        self._by_weight = _Gradient(
            lambda x, gy: backends.prepare_grad_weight(x, gy, geometry, last),
            lambda x, gy: backends.grad_weight(x, gy, geometry, last),
            lambda x, gy: ops.call_grad_weight(x, gy, geometry, last),
        )
        self._by_weight_and_bias = _Gradient(
            lambda x, gy: backends.prepare_grad_weight_bias(x, gy, geometry, last),
            lambda x, gy: backends.grad_weight_bias(x, gy, geometry, last),
            lambda x, gy: (
                ops.call_grad_weight(x, gy, geometry, last),
                native.grad_bias(gy),
            ),
        )

        wanted = [(input, self._by_input), (weight, self._by_weight)]
        gradients = [gradient for t, gradient in wanted if t.requires_grad]
        may_leave = not layer.transposed and backends.by_pytorch(forward)
        self._wanted: list[_Gradient[Tensor]] = gradients if may_leave else []

    @property
    def parameters(self) -> Parameters:
        return (self.stride, self.padding, self.output_padding, self.groups, self.dilation)

    def called_with(self, parameters: Parameters) -> Recipe:
        """The same for a layer whose parameters are equal, but objects of its own."""
        other = copy.copy(self)
        other.stride, other.padding, other.output_padding, other.groups, other.dilation = parameters
        return other

    def holds(self, input: Any, weight: Any, bias: Any) -> bool:
        """Whether the operands are of the recorded kind and nothing else has changed."""
        return (
            self.with_bias is (bias is not None)
            and (self.check(input, weight) if bias is None else self.check(input, weight, bias))
            and self.settings.hold()
            and not _dispatch_modes()
            and not _function_modes()
            and getattr(forward_ad, "_current_level", -1) < 0
        )

    def gradients(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients by input, weight and bias, each only where asked; in plain eager mode."""
        input, weight = ctx.saved_tensors
        want_input, want_weight, want_bias, _ = ctx.needs_input_grad
        if want_input and want_weight:
            grad_output = self.layer.dense(grad_output)
        by_input = self._by_input(grad_output, weight) if want_input else None
        if want_weight and want_bias and self.layer.transposed:
            return (by_input, *self._by_weight_and_bias(input, grad_output))
        operands = self.layer.weight_operands(input, grad_output)
        by_weight = self._by_weight(*operands) if want_weight else None
        if self._wanted:
            self.left = all(gradient.left for gradient in self._wanted)
        return by_input, by_weight, native.grad_bias(grad_output) if want_bias else None


_recipes: dict[Any, tuple[Recipe, ...]] = {}  # by the shapes of input and weight
_hints: dict[int, tuple[Recipe, ...]] = {}  # by the id of a layer's weight, latest first


def recall(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: Any,
    dilation: Any,
    owner: Any,
) -> Recipe | None:
    """The recipe of a call, if it was seen before and nothing has changed.

    The parameters are those of ``arguments.Parameters``. ``owner`` is the layer's weight, of which
    autocast has made ``weight`` for this call alone.
    """
    for recipe in _hints.get(id(owner), ()):
        # A layer gives the same objects at every call: identity tells, and fast.
        if (
            recipe.stride is stride
            and recipe.padding is padding
            and recipe.output_padding is output_padding
            and recipe.groups is groups
            and recipe.dilation is dilation
            and recipe.holds(input, weight, bias)
        ):
            return recipe
    if type(input) not in _TYPES or type(weight) not in _TYPES:
        return None
    if input.is_nested or weight.is_nested:  # they have no shape
        return None
    parameters = (stride, padding, output_padding, groups, dilation)
    for recipe in _recipes.get((input.shape, weight.shape), ()):
        if all(map(_same, recipe.parameters, parameters)) and recipe.holds(input, weight, bias):
            if all(map(is_, recipe.parameters, parameters)):
                _hint(owner, recipe)
            elif type(owner) is Parameter:  # kept for long
                recipe = recipe.called_with(parameters)
                _hint(owner, recipe)
            return recipe
    return None


def _same(known: Any, given: Any) -> bool:
    """Whether a parameter equals a fixed one, types included: True equals 1, yet is an error."""
    return known is given or (_fixed(given) and type(known) is type(given) and known == given)


def _hint(owner: Tensor, recipe: Recipe) -> None:
    """Let the next call with this weight find its recipe first."""
    if id(owner) not in _hints and len(_hints) >= _MAX_SHAPES:
        _hints.clear()
    _hints[id(owner)] = (recipe, *_hints.get(id(owner), ())[: MAX_KINDS - 1])


def record(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parameters: Parameters,
    layer: Layer,
    owner: Tensor,
) -> Recipe | None:
    """A recipe for a checked call on plain batched tensors, if its backend has one to offer.

    The tensors are as autocast makes them; ``owner`` is the weight before.
    """
    if not all(map(_fixed, parameters)):
        return None
    layer = layer.interned()
    forward = layer.output(backends.PREPARE, input, weight, bias)
    operands = [t for t in (input, weight, bias) if t is not None]
    check = None if forward is None else guard(*operands)
    if forward is None or check is None:
        return None
    recipe = Recipe(forward, check, (input, weight, bias), parameters, layer)
    key = (input.shape, weight.shape)
    if key not in _recipes and len(_recipes) >= _MAX_SHAPES:
        _recipes.clear()
    _recipes[key] = (*_recipes.get(key, ())[1 - MAX_KINDS :], recipe)
    _hint(owner, recipe)
    return recipe


def _fixed(parameter: Any) -> bool:
    """Whether a parameter can never change while it is the same object."""
    if type(parameter) is tuple:
        return all(type(n) is int for n in parameter)
    return parameter is None or type(parameter) in (int, str)
