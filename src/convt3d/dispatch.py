"""When a kernel may run at once, and when PyTorch's dispatcher or operator must see a call.

Plain tensors in plain eager mode are all that kernels know. Modes, transforms, tensor subclasses
and unusual tensors take the registered operators or PyTorch's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

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


def in_function_mode() -> bool:
    """Whether a TorchFunctionMode is to see the call before anything is done with its tensors."""
    return _function_modes() != 0


def records_gradients() -> bool:
    """Whether autograd records operations now; inference mode wins over ``enable_grad``."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def dispatcher_needed() -> bool:
    """Whether a mode (fake tensors, tracing, profiling, default device) must see the operator."""
    return _dispatch_modes() != 0 or in_function_mode() or _tracing()


def plain(input: Any, weight: Any, *others: Any) -> bool:
    """Whether a kernel may read the memory of these tensors as it stands.

    Not so for subclasses (fake, distributed, functional tensors), other layouts and devices,
    batched tensors of a vmap, lazily negated views (the imaginary part of a conjugate) and tensors
    without memory. All of these differ in their dispatch keys; the union of the keys of all
    operands is compared at once.
    """
    if type(input) not in _TYPES or type(weight) not in _TYPES or input.dtype not in DTYPES:
        return False
    keys = _dispatch_keys(input) | _dispatch_keys(weight)
    for other in others:
        if other is not None:
            if type(other) not in _TYPES:
                return False
            keys |= _dispatch_keys(other)
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
