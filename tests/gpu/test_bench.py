"""The benchmark on a GPU: Conv3d layers against float64, and a whole network in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from convt3d.bench import cases, network_worker, numerics, shapes
from convt3d.bench.cases import MODES
from convt3d.bench.network_worker import Job
from convt3d.operations import OPERATIONS

LAYERS = (
    "n=2,in=16,out=32,size=18x20x24,k=3,p=1,bias=1,conv=1",
    "n=3,in=32,out=64,size=16x18x20,k=3,s=2,p=1,bias=1,conv=1",
    "n=2,in=1,out=48,size=16,k=2,s=2,conv=1",
    "n=2,in=16,out=16,size=12,k=5,p=2,g=16,conv=1",
)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("mode", ["tf32", "fp32", "bf16"])
@pytest.mark.parametrize("text", LAYERS)
def test_conv3d_layers_are_as_exact_as_pytorch(text: str, mode: str, layout: str) -> None:
    device = torch.device("cuda", 0)
    with MODES[mode].applied(device):
        t = cases.make(shapes.parse(text), MODES[mode], layout == "ndhwc", device)
        for operation in OPERATIONS:
            found = numerics.compare(operation, t, MODES[mode])
            assert found["acceptable"] and found["deterministic"], (operation, found)


@pytest.fixture
def switches() -> Iterator[None]:
    """PyTorch's switches may be set, whatever its test utilities have locked, and are restored."""
    with torch.backends.cudnn.flags(enabled=True), torch.backends.__allow_nonbracketed_mutation():
        yield


@pytest.mark.parametrize("side", network_worker.SIDES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_a_network_is_measured(layout: str, side: str, switches: None) -> None:
    job = Job("unet", "bf16", layout, False, False, side, 0, device="cuda", budget_s=0.05)
    job = replace(job, small=True, tuned=True)  # tuned: what a process sets for good stays as it is
    for row in network_worker.rows(job):
        assert "failed" not in row, row
        assert row["peak_mbytes"] > 0
        assert 0 < row["conv_share"] <= 1
        assert row.get("difference", 0) < 0.1
