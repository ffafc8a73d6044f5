"""Choice of a backend: by device, by what CUDA refuses, by CONVT3D_DISABLE."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import convt3d.cuda
from convt3d import backends, log, native, portable
from convt3d.geometry import Geometry
from convt3d.operations import OPERATIONS
from support.geometries import CASES, operands

GEOMETRY = CASES["stride 2"].geometry


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    backends._choose_on_cuda.cache_clear()
    yield
    backends._choose_on_cuda.cache_clear()


def on_cuda(dtype: torch.dtype = torch.float32) -> Any:
    """What the choice looks at in a CUDA tensor, on a machine that may have no GPU."""
    return SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda", 0))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_cpu_and_others_are_portable(operation: str) -> None:
    for device in ("cpu", "meta"):
        tensor = torch.empty(1, device=device)
        assert backends.choose(operation, GEOMETRY, tensor) is portable


def test_cuda_runs_what_it_does_not_refuse(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def refusal(operation: str, geometry: Geometry, dtype: torch.dtype, device: Any) -> str | None:
        asked.append((operation, geometry, dtype, device))
        return "no double precision" if dtype == torch.float64 else None

    backend = SimpleNamespace(refusal=refusal)
    monkeypatch.setattr(convt3d.cuda, "backend", backend, raising=False)
    monkeypatch.setattr(log, "_said", set())
    with caplog.at_level(logging.INFO, logger="convt3d"):
        for _ in range(3):
            assert backends.choose("forward", GEOMETRY, on_cuda()) is backend
            assert backends.choose("forward", GEOMETRY, on_cuda(torch.float64)) is native
    assert asked == [
        ("forward", GEOMETRY, torch.float32, torch.device("cuda", 0)),
        ("forward", GEOMETRY, torch.float64, torch.device("cuda", 0)),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        f"PyTorch runs forward of {GEOMETRY.label}: no double precision"
    ]


def test_disabled_is_pytorch_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "DISABLED", True)
    for tensor in (torch.empty(1), on_cuda()):
        for operation in OPERATIONS:
            assert backends.choose(operation, GEOMETRY, tensor) is native


def test_pytorchs_results_get_our_memory_format(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_way_round(*arguments: Any) -> torch.Tensor:
        return torch.zeros(case.output_shape).to(memory_format=torch.channels_last_3d)

    monkeypatch.setattr(backends, "DISABLED", True)
    monkeypatch.setattr(native, "forward", other_way_round)
    case = CASES["stride 2"]
    x, w, b = operands(case)
    assert backends.forward(x, w, b, case.geometry, False).is_contiguous()


def test_empty_batches_reach_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "choose", None)
    case = CASES["stride 2"]
    x, w, b = operands(case)
    x, gy = x[:0], torch.empty((0, *case.output_shape[1:]), dtype=x.dtype)
    assert backends.forward(x, w, b, case.geometry, True).shape == gy.shape
    assert backends.grad_input(gy, w, case.geometry, case.input_size, True).shape == x.shape
    assert not backends.grad_weight(x, gy, case.geometry, True).any()
