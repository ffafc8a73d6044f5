"""What the passes share: the operators that they look for, and how Inductor's caches know them."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from convt3d import backends, fused_ops, fusion, precision
from convt3d._version import __version__

TRANSPOSED = torch.ops.convt3d.conv_transpose3d.default
FUSED: dict[Any, Any] = {
    getattr(torch.ops.convt3d, plain).default: getattr(torch.ops.convt3d, name).default
    for plain, name in fused_ops.FUSED.items()
}
"""The fused operator for each plain one."""


@cache
def _source() -> str:
    """Digest of what decides the passes' results: their code, the operators' and the versions."""
    digest = hashlib.sha256(f"{torch.__version__} {__version__} {backends.DISABLED}".encode())
    own = sorted(Path(__file__).parent.glob("*.py"))
    for path in (*own, *(Path(str(module.__file__)) for module in (fused_ops, fusion, backends))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Pass(CustomGraphPass):
    """A graph pass without options: all of a class are equal."""

    def uuid(self) -> str:
        """What Inductor's caches know the pass by: two switches say which layers run in kernels."""
        switches = f"{precision.conv_switch()} {torch.backends.cudnn.benchmark}"
        return f"{type(self).__name__} {_source()} {switches}"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))
