"""``torch.compile`` with the backend "convt3d": whole models through Inductor on CPU."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

import convt3d
import convt3d.compile
from convt3d import precision
from convt3d.compile import backend, report
from convt3d.compile.masks import MasksOfResults
from convt3d.compile.passes import FuseTails

Kinds = tuple[str, ...]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """No graph of another test, and none from the disk, for a cached one runs no pass."""
    torch._dynamo.reset()
    report(clear=True)
    with config.patch(force_disable_caches=True):
        yield


class Block(nn.Module):
    """A stage of a U-Net down and up: convolutions, activations, concatenation, residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = convt3d.Conv3d(2, 4, 3, padding=1)
        self.down = convt3d.Conv3d(4, 6, 3, stride=2, padding=1)
        self.up = convt3d.ConvTranspose3d(6, 4, 2, 2)
        self.merge = convt3d.Conv3d(8, 4, 3, padding=1)
        self.norm = nn.BatchNorm3d(4)
        self.last = convt3d.Conv3d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.leaky_relu(self.first(x), 0.1)
        y = nn.functional.relu6(self.down(x))
        y = torch.cat([self.up(y), x], 1)
        y = torch.relu(self.norm(self.merge(y)))
        return nn.functional.silu(self.last(y) + y)


def generator() -> nn.Sequential:
    """A stage of a GAN's generator."""
    return nn.Sequential(
        convt3d.ConvTranspose3d(3, 4, 4, 2, 1, bias=False),
        nn.BatchNorm3d(4),
        nn.ReLU(),
        convt3d.ConvTranspose3d(4, 1, 4, 2, 1),
        nn.Tanh(),
    )


def example(channels: int = 2, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, channels, 8, 6, 4).to(dtype)


def kinds(calls: list[tuple[str, Kinds, bool]]) -> list[tuple[str, ...]]:
    return [(*steps, "cat") if written else steps for _, steps, written in calls]


INFERENCE = [("leaky_relu",), ("clamp",), ("cat",), ("scale", "shift", "relu"), ("add", "silu")]
TRAINING = [
    *INFERENCE[:3],
    ("scale", "shift", "relu"),
    ("add",),  # of the gradients of the residual sum
    ("add",),  # and of those of the tensor that is concatenated
]
"""What is fused of ``Block``; the last activation's input is kept for its gradient."""


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inference(dtype: torch.dtype, epilogues: list[Any]) -> None:
    model = Block().to(dtype).eval()
    compiled = torch.compile(model, backend="convt3d", fullgraph=True)
    x = example(dtype=dtype)
    with torch.no_grad():
        expected = model(x)
        assert not epilogues
        got = compiled(x)
    assert kinds(epilogues) == INFERENCE
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert got.stride() == expected.stride()


@pytest.mark.sample
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training(dtype: torch.dtype, epilogues: list[Any]) -> None:
    model = Block().to(dtype)
    model.norm.eval().requires_grad_(False)
    compiled = torch.compile(model, backend="convt3d", fullgraph=True)
    x = example(dtype=dtype).requires_grad_()
    inputs = [x, *(p for p in model.parameters() if p.requires_grad)]
    expected = model(x)
    gy = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, gy)
    epilogues.clear()
    got = compiled(x)
    gradients = torch.autograd.grad(got, inputs, gy)
    assert kinds(epilogues) == TRAINING
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for a, b in zip((got, *gradients), (expected, *wanted), strict=True):
        scale = b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.more
@pytest.mark.slow
def test_sizes_that_change(epilogues: list[Any]) -> None:
    """The second size makes extents symbols, and what was fused stays fused."""
    model = Block().eval()
    compiled = torch.compile(model, backend="convt3d", fullgraph=True)
    with torch.no_grad():
        for batch in (2, 3, 5):
            x = example(batch=batch)
            epilogues.clear()
            got = compiled(x)
            assert kinds(epilogues) == INFERENCE
            torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-5)
    assert len(report()) == 2 * len(INFERENCE)


@pytest.mark.slow
def test_a_generator_with_inductors_options(epilogues: list[Any]) -> None:
    """The same passes by ``options=``; a channels_last input, and a mode of Inductor."""
    model = generator().eval()
    x = example(3).contiguous(memory_format=torch.channels_last_3d)
    compiled = torch.compile(model, options=convt3d.compile_options({"max_autotune": False}))
    with torch.no_grad():
        got = compiled(x)
        assert kinds(epilogues) == [("scale", "shift", "relu"), ("tanh",)]
        torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-5)
        assert got.stride() == model(x).stride()


@pytest.mark.slow
def test_nothing_changes_without_the_backend(epilogues: list[Any]) -> None:
    model = generator().eval()
    with torch.no_grad():
        x = example(3)
        torch.testing.assert_close(torch.compile(model)(x), model(x), rtol=1e-5, atol=1e-5)
    assert not epilogues and not report()
    assert config.post_grad_custom_pre_pass is None and config.joint_custom_pre_pass is None


@pytest.mark.more
@pytest.mark.slow
def test_caches_tell_the_backends_apart(epilogues: list[Any], tmp_path: Path) -> None:
    model = generator().eval()
    x = example(3)
    with (
        pytest.MonkeyPatch.context() as patch,
        config.patch(force_disable_caches=False, fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        seen = []
        for name in ("inductor", "convt3d", "convt3d", "inductor"):
            torch._dynamo.reset()
            counters.clear()
            epilogues.clear()
            with torch.no_grad():
                torch.compile(model, backend=name)(x)
            found = counters["inductor"]
            seen.append((found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], len(epilogues)))
    assert seen == [(0, 1, 0), (0, 1, 2), (1, 0, 2), (1, 0, 0)]


def test_caches_know_which_layers_are_left_to_cudnn(
    switches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two switches decide, which Inductor's own keys do not have."""
    found = [FuseTails().uuid()]
    monkeypatch.setattr(precision, "conv_switch", lambda: "another")
    found.append(FuseTails().uuid())
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark)
    found.append(FuseTails().uuid())
    assert len(set(found)) == 3
    assert FuseTails().uuid() == found[-1]


# --- Registration and options --------------------------------------------------------------------


def test_the_backend_is_found_by_its_name() -> None:
    assert "convt3d" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("convt3d") is backend.convt3d


def test_importing_the_package_imports_no_compiler() -> None:
    script = """
        import sys
        import convt3d
        assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
        convt3d.compile_options
        import torch
        torch.compile(lambda x: x + 1, backend="convt3d")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


@pytest.mark.parametrize("arguments", [{"mode": "no such mode"}, {"options": {"no_such": 1}}])
def test_what_inductor_does_not_know_is_refused(arguments: dict[str, Any]) -> None:
    compiled = torch.compile(torch.nn.ReLU(), backend="convt3d", **arguments)
    with pytest.raises(Exception, match=r"no such mode|no_such"):
        compiled(torch.ones(1))


class Theirs(CustomGraphPass):
    """A pass of somebody else, which counts its calls."""

    called = 0

    def __call__(self, graph: Graph) -> None:
        self.called += 1

    def uuid(self) -> str:
        return "theirs"


def test_passes_that_are_there_are_kept() -> None:
    slot = "post_grad_custom_pre_pass"
    theirs = Theirs()
    assert backend.compile_options()[slot] == FuseTails()
    options = backend.compile_options({slot: theirs, "max-autotune": True})
    both = backend._joined(theirs, FuseTails())
    assert options[slot] == both and options["max_autotune"] is True
    assert list(getattr(both, "passes", both)) == [theirs, FuseTails()]
    assert backend.compile_options(options) == options
    assert options["joint_custom_pre_pass"] == MasksOfResults()
    with config.patch({slot: theirs}):
        assert backend.compile_options()[slot] == both
        compiled = torch.compile(torch.nn.Softmax(0), backend="convt3d")
        compiled(torch.ones(3))
    assert theirs.called == 1


def test_passes_are_chained_where_a_slot_holds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_TAKES_LISTS", False)
    slot = "post_grad_custom_pre_pass"
    theirs = Theirs()
    options = backend.compile_options({slot: theirs})
    chain = options[slot]
    assert backend.compile_options(options)[slot] == chain
    graph = torch.fx.symbolic_trace(torch.nn.ReLU()).graph
    chain(graph)
    assert theirs.called == 1
    assert chain.uuid() == ("theirs", FuseTails().uuid())
    assert backend.Chain([lambda graph: None, FuseTails()]).uuid() is None

    if not hasattr(torch._inductor.custom_graph_pass, "CustomInferenceAwareGraphPass"):
        return

    class Aware(torch._inductor.custom_graph_pass.CustomInferenceAwareGraphPass):
        inference: bool | None = None

        def __call__(self, graph: Graph, is_inference: bool) -> None:
            self.inference = is_inference

        def uuid(self) -> str:
            return "aware"

    aware = Aware()
    chain = backend.compile_options({slot: aware})[slot]
    assert isinstance(chain, torch._inductor.custom_graph_pass.CustomInferenceAwareGraphPass)
    chain(graph, is_inference=True)
    assert aware.inference is True
