"""Self-contained KernelBench ``ModelNew`` files: kernels, launcher and module in one file."""

from __future__ import annotations

from convt3d.export.layer import ExportError, Layer, from_problem, from_shape
from convt3d.export.network import Network, export_network, layer_or_network, network_of
from convt3d.export.variants import ARCHITECTURES, PRECISIONS
from convt3d.export.writer import Exported, export

__all__ = [
    "ARCHITECTURES",
    "PRECISIONS",
    "ExportError",
    "Exported",
    "Layer",
    "Network",
    "export",
    "export_network",
    "from_problem",
    "from_shape",
    "layer_or_network",
    "network_of",
]
