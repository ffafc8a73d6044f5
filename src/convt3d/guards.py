"""Dispatch keys that our code leaves out while it calls PyTorch's operators."""

from __future__ import annotations

import functools
import operator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

_key: Any = torch._C.DispatchKey
_exclude: Any = torch._C._ExcludeDispatchKeyGuard


def _keys(*names: str) -> Any:
    """A set of those of these keys that this PyTorch has."""
    known = [torch._C.DispatchKeySet(getattr(_key, name)) for name in names if hasattr(_key, name)]
    return functools.reduce(operator.or_, known)


untracked_views: partial[AbstractContextManager[Any]] = partial(_exclude, _keys("ADInplaceOrView"))
"""In this context views are tensors of their own for autograd. The result of an autograd function
may not be a view: PyTorch forbids to change it in place, as an in-place activation does."""

without_autocast: partial[AbstractContextManager[Any]] = partial(
    _exclude, _keys("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS")
)
"""In this context operators compute in the types of their operands. Autocast has had its say when
an operation of ours runs; a gradient has the types of its forward pass, whatever is on by then."""
