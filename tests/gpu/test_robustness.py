"""On a GPU: no memory, forks, foreign and damaged cubins, graphs of torch.compile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convt3d
from convt3d.cuda import compiler, launch, prepared
from support.checks import error
from support.networks import NETWORKS, parameters_gradients
from support.packages import check_package
from support.process import run_python


def layer(channels: int = 8) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, channels, 6, 7, 8, device="cuda")
    return x, torch.randn(channels, 6, 3, 3, 3, device="cuda")


def near(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


# --- Memory --------------------------------------------------------------------------------------


def test_no_memory_for_the_output() -> None:
    x = torch.randn(2, 8, 64, 64, 64, device="cuda")
    w = torch.randn(8, 32, 2, 2, 2, device="cuda")
    want = F.conv_transpose3d(x[:, :, :4], w, None, 2)
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (128 << 20)) / total)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            convt3d.conv_transpose3d(x, w, None, 2)
        got = convt3d.conv_transpose3d(x[:, :, :4], w, None, 2)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    near(got, want)  # comparing needs more memory than the layer
    near(convt3d.conv_transpose3d(x, w, None, 2), F.conv_transpose3d(x, w, None, 2))


def test_no_memory_at_any_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever allocation of a training step fails, the error is PyTorch's, and the next runs."""
    x, w = (t.requires_grad_() for t in layer())

    def step() -> tuple[Tensor, ...]:
        y = convt3d.conv_transpose3d(x, w, None, 2, 1, 1)
        return y, *torch.autograd.grad(y.square().sum(), (x, w))

    want = step()
    count = 0

    def failing(allocate: Callable[..., Any], at: int) -> Callable[..., Any]:
        def function(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                raise torch.cuda.OutOfMemoryError("no memory, for a test")
            return allocate(*arguments)

        return function

    at, failed = 1, True
    while failed:
        count, failed = 0, False
        with monkeypatch.context() as patch:
            for module, name in ((prepared, "allocate"), (launch, "_acquire")):
                patch.setattr(module, name, failing(getattr(module, name), at))
            try:
                step()
            except torch.cuda.OutOfMemoryError:
                failed = True
        for a, b in zip(step(), want, strict=True):
            assert torch.equal(a, b)
        at += 1
    assert at > 4  # at least those of the result and its gradients were ours


# --- Processes and cubins ------------------------------------------------------------------------


def test_fork_after_use() -> None:
    """CUDA does not survive a fork: the child gets an error, and the parent goes on."""
    code = """
import os, signal, torch, convt3d
x = torch.randn(1, 4, 3, 3, 3, device="cuda"); w = torch.randn(4, 4, 2, 2, 2, device="cuda")
want = convt3d.conv_transpose3d(x, w, None, 2); torch.cuda.synchronize()
child = os.fork()
if child == 0:
    signal.alarm(30)  # a hang ends the child too, by a signal
    try:
        convt3d.conv_transpose3d(x, w, None, 2).cpu()
    except RuntimeError:
        os._exit(7)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert torch.equal(convt3d.conv_transpose3d(x, w, None, 2), want)
print("same")
"""
    assert run_python(code).split()[-1] == "same"


def test_a_cubin_of_another_gpu_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As an entry of a cache that was carried here, or of a driver that is no more."""
    monkeypatch.setenv("CONVT3D_CACHE_DIR", str(tmp_path))
    foreign = "sm_80" if torch.cuda.get_device_capability() != (8, 0) else "sm_90a"
    served = []

    def cached(cache: Any, key: bytes, spec: compiler.KernelSpec) -> bytes:
        served.append(spec)
        return compiler._compile(
            spec, foreign, compiler.flatten(spec.file), compiler._options(spec, foreign)
        )

    monkeypatch.setattr(compiler, "_cached", cached)
    try:
        x, w = layer(11)  # channels that no other test has
        near(convt3d.conv_transpose3d(x, w), F.conv_transpose3d(x, w))
    except RuntimeError as failure:
        # Kernels with instructions of one architecture do not compile for another at all.
        assert "compiling" in str(failure)
        pytest.skip("this kernel is for one architecture only")
    assert served


def test_damaged_cache(tmp_path: Path) -> None:
    code = """
import torch, convt3d
torch.manual_seed(0)
x = torch.randn(1, 4, 5, 6, 7, device="cuda"); w = torch.randn(4, 6, 3, 3, 3, device="cuda")
want = torch.conv_transpose3d(x, w)
print(torch.allclose(convt3d.conv_transpose3d(x, w), want, atol=2e-2, rtol=2e-2))
"""
    settings = {"CONVT3D_CACHE_DIR": str(tmp_path)}
    assert run_python(code, **settings).split()[-1] == "True"
    entries = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert entries
    for path, data in entries.items():
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :])
    assert run_python(code, **settings).split()[-1] == "True"
    for path, data in entries.items():
        assert len(path.read_bytes()) == len(data)


# --- Models --------------------------------------------------------------------------------------


def test_reduce_overhead() -> None:
    """CUDA graphs by torch.compile, training included, none skipped."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(
        # Smooth, so that rounding moves no gradient by more than itself.
        nn.ConvTranspose3d(8, 8, 2, 2),
        nn.SiLU(),
        nn.ConvTranspose3d(8, 4, 3, 1, 1),
    ).cuda()
    exact = copy.deepcopy(model).double()
    convt3d.convert(model)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):  # warm-up, recording, replays
        x = torch.randn(2, 8, 5, 6, 7, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        y = compiled(x)
        y.square().mean().backward()
        want = exact(x.double())
        want.square().mean().backward()
        assert error(y, want) < 2e-3
        for a, b in zip(model.parameters(), exact.parameters(), strict=True):
            assert error(a.grad, b.grad) < 2e-3
        model.zero_grad()
        exact.zero_grad()
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    torch._dynamo.reset()


@pytest.mark.full
def test_aot_inductor_package_in_a_fresh_process(tmp_path: Path) -> None:
    model = convt3d.convert(nn.Sequential(nn.ConvTranspose3d(2, 3, 2, 2), nn.ReLU())).cuda()
    samples = [torch.randn(size, device="cuda") for size in ((2, 2, 4, 6, 4), (3, 2, 6, 4, 8))]
    check_package(model, samples, tmp_path, 2e-3)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, precision: str) -> None:
    """Output and gradients as near to float64 as those of PyTorch's layers, by a factor of two.

    For layers as small as these cuDNN does not use TF32 though it may, hence the floor.
    """
    network = NETWORKS[name]
    if network.missing:
        pytest.skip(network.missing)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    torch.manual_seed(2)
    theirs = network.build(True).cuda()
    x = network.input(True, "cuda")
    exact = parameters_gradients(copy.deepcopy(theirs).double(), x.double())
    ours = convt3d.convert(copy.deepcopy(theirs))
    found = []
    with (
        torch.backends.cudnn.flags(enabled=True, allow_tf32=precision != "ieee"),
        torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None),
    ):
        for model in (ours, theirs):
            y, gradients = parameters_gradients(model, x)
            found.append((error(y, exact[0]), error(_flat(gradients), _flat(exact[1]))))
    for mine, other in zip(*found, strict=True):
        assert mine <= 2 * other + (5e-6 if precision == "ieee" else 2e-3), found


def _flat(gradients: dict[str, Tensor | None]) -> Tensor:
    return torch.cat([g.double().flatten() for g in gradients.values() if g is not None])
