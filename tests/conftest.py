"""Settings of the whole suite: one thread per worker, repeatable random numbers."""

from __future__ import annotations

import gc
import os

# Before torch is imported. By AMX, oneDNN 3.12 (torch 2.13) computes strided bfloat16 convolutions
# with one output along W from memory that it never wrote: PyTorch's own results are wrong there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from convt3d import backends, ops, recipes
from convt3d.compile import tails
from convt3d.decisions import DecisionsByCall
from support import epilogues, opaque

# A first example compiles, imports or tunes something, so its time says nothing.
settings.register_profile(
    "default",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked ``sample``, ``make test`` runs the first of every so many cases."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is None or any(item.get_closest_marker(name) for name in ("more", "full")):
            continue
        test = item.nodeid.partition("[")[0]
        if seen[test] % mark.kwargs.get("every", len(items)):
            item.add_marker("more")
        seen[test] += 1


def pytest_collection_finish() -> None:
    """What is alive by now stays alive: the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's switches can be set; its own test helpers freeze them for a whole process."""
    names = torch.backends.ContextProp.__set__.__globals__
    monkeypatch.setitem(names, "flags_frozen", lambda: False)


@pytest.fixture
def conv3d_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``conv3d`` of CPU tensors goes the way of CUDA tensors, on the portable backend."""
    monkeypatch.setattr(backends, "runs_conv3d", lambda tensor: True)


def _replace_portable(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Another backend of CPU tensors, and nothing remembered that was decided with the other."""
    monkeypatch.setattr(backends, "portable", module)
    monkeypatch.setattr(recipes, "_recipes", {})
    monkeypatch.setattr(recipes, "_hints", {})
    monkeypatch.setattr(ops, "decided", DecisionsByCall())


@pytest.fixture(name="opaque")
def _opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors run on a backend that autograd cannot look into; its recipes are kept."""
    _replace_portable(monkeypatch, opaque)


@pytest.fixture(name="epilogues")
def _epilogues(monkeypatch: pytest.MonkeyPatch, conv3d_on_cpu: None) -> list[Any]:
    """Kernels with epilogues on CPU, for both layers; the list of their calls."""
    _replace_portable(monkeypatch, epilogues)
    epilogues.calls.clear()
    epilogues.prepared.clear()
    return epilogues.calls


@pytest.fixture(name="saved_passes")
def _saved_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tail is folded as if that saved a pass: more of what steps compute is tried."""
    monkeypatch.setattr(tails, "_read_by_loops", lambda node: False)
