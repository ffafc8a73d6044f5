"""Decisions remembered for tensors of one kind, found again in a microsecond.

PyTorch's own guards (those of torch.compile) tell in one step whether tensors are of the recorded
kind: exact Python type, dispatch keys with everything that modes, transforms, autocast and
inference mode change about them, dtype, device, requires_grad, sizes and strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from convt3d.layout import onednn_enabled
from convt3d.precision import conv_switch

MAX_KINDS = 8
"""How many kinds of tensors are remembered at one place."""

MAX_CALLS = 4096
"""How many kinds of calls are remembered."""

_benchmark = torch._C._get_cudnn_benchmark
_threads = torch.get_num_threads
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_Guards = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


def guard(*tensors: Tensor) -> Callable[..., bool] | None:
    """A function that tells whether as many tensors are of the same kind; None if there is none."""
    if _Guards is None:
        return None
    try:
        return _Guards(
            *tensors,
            dynamic_dims_sizes=[list(t.shape) for t in tensors],
            dynamic_dims_strides=[list(t.stride()) for t in tensors],
        ).check
    except Exception:  # another version of PyTorch: the long way is as right
        return None


class Settings:
    """The switches and the device that a decision was made under; None where they do not matter."""

    __slots__ = ("benchmark", "device", "onednn", "precision", "threads")

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device.index if tensor.is_cuda else None
        self.onednn = None if tensor.is_cuda else onednn_enabled()
        self.threads = None if tensor.is_cuda else _threads()  # PyTorch's layout depends on them
        self.precision = conv_switch() if tensor.dtype == torch.float32 else None
        self.benchmark = _benchmark()

    def hold(self) -> bool:
        return (
            (
                (self.onednn is onednn_enabled() and self.threads == _threads())
                if self.device is None
                else self.device == _current_device()
            )
            and self.benchmark is _benchmark()
            and (self.precision is None or self.precision == conv_switch())
        )


_Decision = TypeVar("_Decision")


class Decisions(Generic[_Decision]):
    """What was decided for a few kinds of tensors, each under the settings of then."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: tuple[tuple[Callable[..., bool], Settings, _Decision], ...] = ()

    @property
    def made(self) -> list[_Decision]:
        """All that is remembered."""
        return [decision for _, _, decision in self._known]

    def find(self, *tensors: Tensor) -> _Decision | None:
        """The decision for tensors of this kind, if nothing has changed since."""
        for check, settings, decision in self._known:
            if check(*tensors) and settings.hold():
                return decision
        return None

    def add(self, decision: _Decision, *tensors: Tensor) -> bool:
        """Remember a decision for tensors of this kind; False where their kind cannot be told.

        So it is where one tensor is given twice, which guards refuse.
        """
        check = guard(*tensors)
        if check is None or not check(*tensors):
            return False
        self._known = (*self._known[1 - MAX_KINDS :], (check, Settings(tensors[0]), decision))
        return True


class DecisionsByCall(Generic[_Decision]):
    """What was decided for calls: by what tells them apart beside the kind of their tensors."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[Any, Decisions[_Decision]] = {}

    def find(self, call: Any, tensors: Sequence[Tensor]) -> _Decision | None:
        """The decision for this call on tensors of this kind, if nothing has changed since."""
        known = self._known.get(call)
        return None if known is None else known.find(*tensors)

    def remember(self, call: Any, decision: _Decision, tensors: Sequence[Tensor]) -> None:
        """Keep a decision, if it can be found again."""
        known = self._known.get(call)
        if known is None:
            if len(self._known) >= MAX_CALLS:
                self._known.clear()
            known = self._known[call] = Decisions()
        known.add(decision, *tensors)
