"""The ways in which users copy a module."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import torch
from torch import nn


def _save_and_load(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)  # type: ignore[no-any-return]


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "save": _save_and_load,
}
