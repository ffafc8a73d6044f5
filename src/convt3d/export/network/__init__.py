"""Files of whole networks: one convolution among other operators, as in KernelBench's level 2."""

from __future__ import annotations

from convt3d.export.network.problem import Network, layer_or_network, network_of
from convt3d.export.network.writer import export_network

__all__ = ["Network", "export_network", "layer_or_network", "network_of"]
