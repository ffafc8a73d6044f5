"""convt3d: drop-in, faster 3-D convolutions for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from convt3d import fused_ops as fused_ops  # registers operators that compiled graphs call
from convt3d._version import __version__
from convt3d.aten import decompositions
from convt3d.conversion import convert, revert
from convt3d.functional import conv3d, conv_transpose3d
from convt3d.inference.fuse import fuse
from convt3d.modules import Conv3d, ConvTranspose3d, LazyConv3d, LazyConvTranspose3d

if TYPE_CHECKING:
    from convt3d.compile import compile_options
    from convt3d.explanation import explain
    from convt3d.warming import warm

__all__ = [
    "Conv3d",
    "ConvTranspose3d",
    "LazyConv3d",
    "LazyConvTranspose3d",
    "__version__",
    "compile_options",
    "conv3d",
    "conv_transpose3d",
    "convert",
    "decompositions",
    "explain",
    "fuse",
    "revert",
    "warm",
]


def __getattr__(name: str) -> Any:
    if name == "explain":  # at first use: it looks at the CUDA plans
        from convt3d.explanation import explain

        globals()[name] = explain
        return explain
    if name == "compile_options":  # likewise: it imports Inductor
        from convt3d.compile import compile_options

        globals()[name] = compile_options
        return compile_options
    if name == "warm":  # likewise
        from convt3d.warming import warm

        globals()[name] = warm
        return warm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
