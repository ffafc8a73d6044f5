"""The three operators as torch.library knows them, and their derivatives.

``convt3d::conv_transpose3d``, ``convt3d::conv3d`` and ``convt3d::grad_weight`` take 5-D tensors.
They are what torch.compile, torch.export, dispatch modes and tensor subclasses see. With one weight
and one set of parameters, those of the transposed layer, the first is its output and the second its
gradient by input, which is the output of a Conv3d. Each is linear in each of its tensors and the
derivative of one is another of the three, so gradients of any order need nothing more. Plain eager
calls skip the dispatcher (``eager.py``).

Their parameters are those of ``operands.py``; ``channels_last`` is the memory format of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from convt3d import backends
from convt3d.arguments import check, normalise
from convt3d.decisions import DecisionsByCall
from convt3d.dispatch import dispatcher_needed, plain
from convt3d.geometry import Geometry
from convt3d.layer import Layer
from convt3d.layout import empty
from convt3d.operands import (
    Checker,
    convolution_geometry,
    geometry_of,
    grad_weight_geometry,
    parameters_of,
    transposed_geometry,
)
from convt3d.operations import Operators

# --- Registration --------------------------------------------------------------------------------

_PARAMETERS = (
    "SymInt[3] stride, SymInt[3] padding, SymInt[3] output_padding, SymInt[3] dilation, "
    "SymInt group_channels) -> Tensor"
)
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    # Inductor must hand over the strides that the fake kernels saw: the results' depend on them.
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)
_library = torch.library.Library("convt3d", "DEF")
_library.define(
    "conv_transpose3d(Tensor input, Tensor weight, Tensor? bias, bool channels_last, "
    + _PARAMETERS,
    tags=_TAGS,
)
_library.define(
    "conv3d(Tensor input, Tensor weight, Tensor? bias, SymInt[3] output_size, bool channels_last, "
    + _PARAMETERS,
    tags=_TAGS,
)
_library.define(
    "grad_weight(Tensor input, Tensor grad_output, SymInt[3] kernel_size, bool channels_last, "
    + _PARAMETERS,
    tags=_TAGS,
)


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Registered operators would drop forward-mode tangents without a word: raise instead."""
    if getattr(forward_ad, "_current_level", -1) < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                "the registered convt3d operators have no forward-mode derivative; "
                "call convt3d.conv_transpose3d or convt3d.conv3d, which have"
            )


decided: DecisionsByCall[Callable[..., Tensor]] = DecisionsByCall()
"""Operations on tensors of one kind, of ``backends.PREPARE``, by operator, sizes and parameters."""


def call_key(operator: str, a: Tensor, b: Tensor, *others: Any) -> Any:
    """What tells calls of an operator apart, the kind of their tensors aside.

    Args:
        operator: its name, or that of the operation that it runs.
        a, b: its tensors but the bias.
        others: its other arguments, sequences as lists.
    """
    return (operator, a.shape, b.shape, *[tuple(o) if isinstance(o, list) else o for o in others])


def _transposed(
    checker: Checker,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    channels_last: bool,
    *parameters: Any,
) -> tuple[Any, ...]:
    """Arguments of ``backends.forward`` for those of ``conv_transpose3d``, checked."""
    geometry = transposed_geometry(checker, input, weight, bias, parameters)
    return (input, weight, bias, geometry, channels_last)


def _convolution(
    checker: Checker,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output_size: Sequence[int],
    channels_last: bool,
    *parameters: Any,
) -> tuple[Any, ...]:
    """Arguments of ``backends.grad_input`` for those of ``conv3d``, checked."""
    geometry = convolution_geometry(checker, input, weight, bias, output_size, parameters)
    return (input, weight, geometry, tuple(output_size), channels_last, bias)


def _grad_weight(
    checker: Checker,
    input: Tensor,
    grad_output: Tensor,
    kernel_size: Sequence[int],
    channels_last: bool,
    *parameters: Any,
) -> tuple[Any, ...]:
    """Arguments of ``backends.grad_weight`` for those of ``grad_weight``, checked."""
    geometry = grad_weight_geometry(checker, input, grad_output, kernel_size, parameters)
    return (input, grad_output, geometry, channels_last)


def _kernel(
    operation: str, arguments_of: Callable[..., tuple[Any, ...]], tensors: int
) -> Callable[..., Tensor]:
    """The kernel of an operator, which decides once for tensors of one kind.

    Args:
        operation: what it runs, by its name in ``backends.py``.
        arguments_of: gives what the backend's function takes.
        tensors: how many come first among the operator's arguments; the third may be None.
    """
    prepare, run_now = getattr(backends.PREPARE, operation), getattr(backends.OPERATORS, operation)

    def kernel(*given: Any) -> Tensor:
        operands = given[: 2 if given[tensors - 1] is None else tensors]
        refuse_tangents(*operands)
        key = call_key(operation, given[0], given[1], len(operands), *given[tensors:])
        run = decided.find(key, operands)
        if run is None:
            arguments = arguments_of(normalise, *given)
            run = prepare(*arguments)
            if run is None:
                result: Tensor = run_now(*arguments)
                return result
            decided.remember(key, run, operands)
        return run(*given[:tensors])

    return kernel


def _transposed_fake(*given: Any) -> Tensor:
    input, _weight, _bias, geometry, channels_last = _transposed(check, *given)
    size = (input.shape[0], geometry.out_channels, *geometry.output_size(input.shape[2:]))
    return empty(size, input, channels_last)


def _convolution_fake(*given: Any) -> Tensor:
    input, _weight, geometry, size, channels_last, _bias = _convolution(check, *given)
    return empty((input.shape[0], geometry.in_channels, *size), input, channels_last)


def _grad_weight_fake(*given: Any) -> Tensor:
    input, _grad_output, geometry, channels_last = _grad_weight(check, *given)
    return empty(geometry.weight_size, input, channels_last)


_transposed_kernel = _kernel("forward", _transposed, 3)
_convolution_kernel = _kernel("grad_input", _convolution, 3)
_grad_weight_kernel = _kernel("grad_weight", _grad_weight, 2)

for _name, _run, _fake in (
    ("conv_transpose3d", _transposed_kernel, _transposed_fake),
    ("conv3d", _convolution_kernel, _convolution_fake),
    ("grad_weight", _grad_weight_kernel, _grad_weight_fake),
):
    # One kernel for all devices: it picks the backend by the tensor, as the eager path does.
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"convt3d::{_name}", _fake, lib=_library)


def _flops(batch: int, size: Sequence[int], weight_shape: Sequence[int]) -> int:
    """Multiplications and additions: one pair per voxel of the dense side and weight element."""
    return 2 * batch * math.prod(size) * math.prod(weight_shape)


@register_flop_formula(torch.ops.convt3d.conv_transpose3d)
def _transposed_flops(
    input_shape: Sequence[int], weight_shape: Sequence[int], *rest: Any, **kwargs: Any
) -> int:
    return _flops(input_shape[0], input_shape[2:], weight_shape)


@register_flop_formula(torch.ops.convt3d.conv3d)
def _convolution_flops(
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    bias_shape: Sequence[int] | None,
    output_size: Sequence[int],
    *rest: Any,
    **kwargs: Any,
) -> int:
    return _flops(input_shape[0], output_size, weight_shape)


@register_flop_formula(torch.ops.convt3d.grad_weight)
def _grad_weight_flops(
    input_shape: Sequence[int],
    grad_output_shape: Sequence[int],
    *rest: Any,
    out_shape: Any,
    **kwargs: Any,
) -> int:
    return _flops(input_shape[0], input_shape[2:], out_shape)


# --- Derivatives ---------------------------------------------------------------------------------


def call_forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, channels_last: bool
) -> Tensor:
    """:func:`convt3d.backends.forward` through the dispatcher, differentiable."""
    return torch.ops.convt3d.conv_transpose3d.default(
        input, weight, bias, channels_last, *parameters_of(geometry)
    )


def call_grad_input(
    grad_output: Tensor,
    weight: Tensor,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """:func:`convt3d.backends.grad_input` through the dispatcher, differentiable."""
    return torch.ops.convt3d.conv3d.default(
        grad_output, weight, bias, input_size, channels_last, *parameters_of(geometry)
    )


def call_grad_weight(
    input: Tensor, grad_output: Tensor, geometry: Geometry, channels_last: bool
) -> Tensor:
    """:func:`convt3d.backends.grad_weight` through the dispatcher, differentiable."""
    return torch.ops.convt3d.grad_weight.default(
        input, grad_output, geometry.kernel_size, channels_last, *parameters_of(geometry)
    )


OPERATORS = Operators(call_forward, call_grad_input, call_grad_weight)
"""The operations through the dispatcher."""


def save_operands(ctx: Any, input: Tensor, weight: Tensor) -> None:
    """Keep the tensors that the gradients need, and no other."""
    needs = ctx.needs_input_grad
    ctx.save_for_backward(input if needs[1] else None, weight if needs[0] else None)


def _backward_layer(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """Of both layers' outputs: gradients by input, weight and bias, none by the parameters."""
    layer: Layer = ctx.layer
    input, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:3]
    by_tensor = layer.gradients(OPERATORS, input, weight, grad_output, wanted)
    return (*by_tensor, *(None,) * ctx.parameters)


def _setup_transposed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, _bias, channels_last, *parameters = inputs
    save_operands(ctx, input, weight)
    ctx.layer = Layer(geometry_of(weight.shape, parameters), input.shape[2:], channels_last)
    ctx.parameters = len(inputs) - 3


def _setup_convolution(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, _bias, output_size, channels_last, *parameters = inputs
    save_operands(ctx, input, weight)
    geometry = geometry_of(weight.shape, parameters)
    ctx.layer = Layer(geometry, output_size, channels_last, transposed=False)
    ctx.parameters = len(inputs) - 3


def _setup_grad_weight(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, grad_output, _kernel_size, channels_last, *parameters = inputs
    want_input, want_grad_output = ctx.needs_input_grad[:2]
    ctx.save_for_backward(input if want_grad_output else None, grad_output if want_input else None)
    ctx.geometry = geometry_of(output.shape, parameters)
    ctx.input_size, ctx.channels_last = input.shape[2:], channels_last


def _backward_grad_weight(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
    input, grad_output = ctx.saved_tensors
    by_input = by_grad_output = None
    if grad_output is not None:
        by_input = call_grad_input(
            grad_output, cotangent, ctx.geometry, ctx.input_size, ctx.channels_last
        )
    if input is not None:
        by_grad_output = call_forward(input, cotangent, None, ctx.geometry, ctx.channels_last)
    return (by_input, by_grad_output, *(None,) * 7)


class _Derived(torch.autograd.Function):
    """A registered operator whose result needs a gradient; the last argument is its rule."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *inputs, ctx.rule = arguments
        ctx.set_materialize_grads(False)
        result: Tensor = below_autograd(ctx.rule.operator, *inputs)
        ctx.rule.setup(ctx, tuple(inputs), result)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_output is None:  # undefined, and so are those by the inputs
            return (None,) * len(ctx.needs_input_grad)
        return (*ctx.rule.backward(ctx, grad_output), None)


def below_autograd(operator: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """An operator's result by the dispatcher, which is not to think of autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


@dataclass(frozen=True)
class _Rule:
    """An operator, its kernel, and its derivative: as torch.library.register_autograd has them."""

    operator: Callable[..., Tensor]
    kernel: Callable[..., Tensor]
    tensors: int
    setup: Callable[[Any, tuple[Any, ...], Tensor], None]
    backward: Callable[[Any, Tensor], tuple[Tensor | None, ...]]

    def __call__(self, *arguments: Any) -> Tensor:
        """The operator under autograd. Without gradients, as in graphs of torch.compile, its
        kernel runs at once on plain tensors: a second way through the dispatcher costs as much.
        """
        tensors = arguments[: self.tensors]
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            result: Tensor = _Derived.apply(*arguments, self)
            return result
        if plain(*tensors) and not dispatcher_needed():
            return self.kernel(*arguments)
        return below_autograd(self.operator, *arguments)


for _name, _rule in (
    ("conv_transpose3d", (_transposed_kernel, 3, _setup_transposed, _backward_layer)),
    ("conv3d", (_convolution_kernel, 3, _setup_convolution, _backward_layer)),
    ("grad_weight", (_grad_weight_kernel, 2, _setup_grad_weight, _backward_grad_weight)),
):
    _operator = getattr(torch.ops.convt3d, _name).default
    _library.impl(_name, _Rule(_operator, *_rule), "Autograd")
