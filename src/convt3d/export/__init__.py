"""Self-contained KernelBench ``ModelNew`` files: kernels, launcher and module in one file."""

from __future__ import annotations

from convt3d.export.layer import ExportError, Layer, from_problem, from_shape
from convt3d.export.variants import ARCHITECTURES, PRECISIONS
from convt3d.export.writer import Exported, export

__all__ = [
    "ARCHITECTURES",
    "PRECISIONS",
    "ExportError",
    "Exported",
    "Layer",
    "export",
    "from_problem",
    "from_shape",
]
