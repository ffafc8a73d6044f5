"""``torch.compile(model, backend="convt3d")``: Inductor, and epilogues that run element-wise tails.

An installed package is found by PyTorch through its entry point; importing this package registers
the backend where that is not so. ``import convt3d`` alone imports neither Dynamo nor Inductor.
"""

from __future__ import annotations

import torch._dynamo

from convt3d.compile.backend import compile_options, convt3d
from convt3d.compile.sites import Site, report

__all__ = ["Site", "compile_options", "convt3d", "report"]


def _register() -> None:
    # PyTorch loads a backend with an entry point when it is asked for, and refuses a second one.
    if "convt3d" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(convt3d, name="convt3d")


_register()
