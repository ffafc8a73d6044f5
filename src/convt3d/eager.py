"""The eager short cut: which calls may skip PyTorch's dispatcher, and their autograd.Function.

Measured on tiny tensors: 7 us of CPU with a gradient against 44 us through a registered operator.
Whatever is not a plain tensor in plain eager mode takes the registered operators or PyTorch's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from convt3d import backends, native, ops
from convt3d.layer import Layer
from convt3d.operations import Operators
from convt3d.steps import Steps

DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Dtypes handled here; complex, integer and float8 tensors go to PyTorch's operator."""

_tracing = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack


def pytorch_needed() -> bool:
    """Whether only PyTorch's operator does the right thing now; torch.compile can follow this.

    Registered operators have no forward-mode derivative and no functorch rules.
    """
    return _transforming() or getattr(forward_ad, "_current_level", -1) >= 0


def _transforming() -> bool:
    return torch._C._are_functorch_transforms_active()


# As torch.compiler.assume_constant_result, which would import Dynamo. Older Dynamos cannot trace
# the function; that its answer holds for a whole graph they guard by themselves.
_transforming._dynamo_marked_constant = True  # type: ignore[attr-defined]


def dispatcher_needed() -> bool:
    """Whether a mode (fake tensors, tracing, profiling, default device) must see the operator."""
    return _dispatch_modes() != 0 or _function_modes() != 0 or _tracing()


def plain(input: Any, weight: Any, bias: Any = None) -> bool:
    """Whether a kernel may read the memory of these tensors as it stands.

    Not so for subclasses (fake, distributed, functional tensors), other layouts and devices,
    batched tensors of a vmap, lazily negated views (the imaginary part of a conjugate) and tensors
    without memory. All of these differ in their dispatch keys; the union of the keys of all
    operands is compared at once.
    """
    if type(input) not in _TYPES or type(weight) not in _TYPES or input.dtype not in DTYPES:
        return False
    keys = _dispatch_keys(input) | _dispatch_keys(weight)
    if bias is not None:
        if type(bias) not in _TYPES:
            return False
        keys |= _dispatch_keys(bias)
    identity = _identity(keys)
    known = _plain_keys.get(identity)
    if known is None:
        names = set(re.findall(r"\w+", str(keys))) - {"DispatchKeySet"}
        known = _plain_keys[identity] = any(names <= allowed for allowed in _ALLOWED)
    return known


_TYPES = frozenset({Tensor, Parameter})
_dispatch_keys = torch._C._dispatch_keys
_identity: Callable[[Any], Any] = getattr(torch._C.DispatchKeySet, "raw_repr", repr)
_plain_keys: dict[Any, bool] = {}
_ALLOWED = [
    {device, f"Autograd{device}", f"Autocast{device}", "ADInplaceOrView"}
    for device in ("CPU", "CUDA")
]


class Checked:
    """The :class:`~convt3d.steps.Steps` of a checked call on plain 5-D tensors."""

    __slots__ = ("layer",)

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = self.layer.output(backends.OPERATORS, input, weight, bias)
        return result

    def gradients(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients by input, weight and bias, each only where asked; in plain eager mode."""
        by = backends.OPERATORS if plain(grad_output, grad_output) else ops.OPERATORS
        input, weight = ctx.saved_tensors
        return self.layer.gradients(by, input, weight, grad_output, ctx.needs_input_grad[:3])


_NATIVE = Operators(native.forward, native.grad_input, native.grad_weight)


class ConvolutionFunction(torch.autograd.Function):
    """A call in ``steps``. The old ctx style costs a quarter of the new."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, steps: Steps
    ) -> Tensor:
        ctx.steps = steps
        ops.save_operands(ctx, input, weight)
        return steps.forward(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        by: Operators
        if pytorch_needed():  # batched or dual gradients of a forward pass made outside
            by = _NATIVE
        elif torch.is_grad_enabled() or dispatcher_needed():
            by = ops.OPERATORS
        else:
            return (*ctx.steps.gradients(ctx, grad_output), None)
        input, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        return (*ctx.steps.layer.gradients(by, input, weight, grad_output, wanted), None)


# Function.apply of the parent class, which first looks for dead functorch wrappers (3 us); plain
# tensors are none.
apply = super(torch.autograd.Function, ConvolutionFunction).apply
