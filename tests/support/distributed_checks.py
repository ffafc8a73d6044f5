"""What two processes check, over gloo on CPU or NCCL on two GPUs; each function runs in both."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import convt3d
from convt3d import backends

SIZE = 2


def run(checks: Sequence[str], store: str, kind: str = "cpu") -> None:
    """Start the processes, on "cpu" or "cuda"; raises what one of them raised."""
    torch.multiprocessing.start_processes(
        _main,
        (tuple(checks), store, kind),
        nprocs=SIZE,
        start_method="fork" if kind == "cpu" else "spawn",
    )


def _main(rank: int, checks: Sequence[str], store: str, kind: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "gloo" if kind == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=SIZE)
    try:
        for check in checks:
            torch.manual_seed(0)
            CHECKS[check](rank, device)
    finally:
        dist.destroy_process_group()


# --- DTensor -------------------------------------------------------------------------------------


def shardings(rank: int, device: torch.device) -> None:
    """Output and gradients of every split equal those of whole tensors, without communication."""
    from torch.distributed.tensor import Partial, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh(device.type, (SIZE,))
    whole, open_sum = Replicate(), Partial()
    splits = {
        "none": ((whole, whole, whole), whole, (whole, whole, whole)),
        "batch": ((Shard(0), whole, whole), Shard(0), (Shard(0), open_sum, open_sum)),
        "output channels": ((whole, Shard(1), Shard(0)), Shard(1), (open_sum, Shard(1), Shard(0))),
        "input channels": ((Shard(1), Shard(0), whole), open_sum, (Shard(1), Shard(0), whole)),
    }
    for name, (operands, output, gradients) in splits.items():
        for bias in (True, False):
            y, found = _same_when_distributed(mesh, operands, 1, bias)
            assert y.placements == (output,), (name, y.placements)
            for one, expected in zip(found, gradients, strict=False):
                assert one.placements == (expected,), (name, one.placements)
    # Whole groups with both of their channels; other placements are gathered first.
    groups = ((Shard(1), Shard(0), Shard(0)), Shard(1), (Shard(1), Shard(0), Shard(0)))
    for channels, count in (((4, 6), 2), ((4, 8), 4)):
        for bias in (True, False):
            y, found = _same_when_distributed(mesh, groups[0], count, bias, channels)
            assert y.placements == (groups[1],)
            for one, expected in zip(found, groups[2], strict=False):
                assert one.placements == (expected,)
    for operands, _output, _gradients in splits.values():
        _same_when_distributed(mesh, operands, 2, True, moved=True)
    # So are odd numbers of channels and of groups.
    _same_when_distributed(mesh, groups[0], 3, True, channels=(6, 6), moved=True)
    y, _ = _same_when_distributed(mesh, (whole, whole, whole), 1, True, channels=(3, 5))
    assert y.placements == (whole,)
    _compiled(mesh, device)


def convolution_shardings(rank: int, device: torch.device) -> None:
    """The same of a Conv3d, whose weight has output channels first."""
    from torch.distributed.tensor import Partial, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh(device.type, (SIZE,))
    whole, open_sum = Replicate(), Partial()
    splits = {
        "none": ((whole, whole, whole), whole, (whole, whole, whole)),
        "batch": ((Shard(0), whole, whole), Shard(0), (Shard(0), open_sum, open_sum)),
        "output channels": ((whole, Shard(0), Shard(0)), Shard(1), (open_sum, Shard(0), Shard(0))),
        "input channels": ((Shard(1), Shard(1), whole), open_sum, (Shard(1), Shard(1), whole)),
    }
    with mock.patch.object(backends, "runs_conv3d", lambda tensor: True):
        for name, (operands, output, gradients) in splits.items():
            for bias in (True, False):
                y, found = _same_when_distributed(mesh, operands, 1, bias, transposed=False)
                assert y.placements == (output,), (name, y.placements)
                for one, expected in zip(found, gradients, strict=False):
                    assert one.placements == (expected,), (name, one.placements)
            _same_when_distributed(mesh, operands, 2, True, moved=True, transposed=False)
        groups = (Shard(1), Shard(0), Shard(0))
        y, _ = _same_when_distributed(mesh, groups, 2, True, (4, 6), transposed=False)
        assert y.placements == (Shard(1),)


def _same_when_distributed(
    mesh: Any,
    placements: Any,
    groups: int,
    bias: bool,
    channels: tuple[int, int] = (4, 6),
    moved: bool = False,
    transposed: bool = True,
) -> tuple[Any, tuple[Any, ...]]:
    """Output and gradients; ``moved`` where operands may be redistributed before the operator."""
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    a, b = channels
    weight = (a, b // groups) if transposed else (b, a // groups)
    sizes = ((4, a, 3, 4, 5), (*weight, 3, 3, 3), (b,))[: 2 + bias]
    plain = [torch.randn(size, dtype=torch.float64, device=mesh.device_type) for size in sizes]
    shared = [
        distribute_tensor(t, mesh, [p]).requires_grad_()
        for t, p in zip(plain, placements, strict=False)
    ]
    exact = [t.requires_grad_() for t in plain]

    def operator(function: Callable[..., Tensor], operands: list[Tensor]) -> Tensor:
        x, w, *rest = operands
        # Output padding, and for conv3d dilation, is 1.
        return function(x, w, rest[0] if rest else None, 2, 1, 1, groups)

    ours, pytorch = convt3d.conv_transpose3d, F.conv_transpose3d
    if not transposed:
        ours, pytorch = convt3d.conv3d, F.conv3d
    with CommDebugMode() as communication:
        y = operator(ours, shared)
    if not moved:
        assert communication.get_total_counts() == 0
    gradients = torch.autograd.grad(y.square().sum(), shared)
    want = operator(pytorch, exact)
    torch.testing.assert_close(y.full_tensor(), want)
    for got, expected in zip(
        gradients, torch.autograd.grad(want.square().sum(), exact), strict=True
    ):
        torch.testing.assert_close(got.full_tensor(), expected)
    return y, gradients


def _compiled(mesh: Any, device: torch.device) -> None:
    """torch.compile follows DTensor operands into the same operators."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x, w = (
        torch.randn(size, dtype=torch.float64, device=device)
        for size in ((2, 4, 2, 3, 2), (4, 6, 2, 2, 2))
    )
    compiled = torch.compile(
        lambda x, w: convt3d.conv_transpose3d(x, w, None, 2), fullgraph=True, backend="aot_eager"
    )
    y = compiled(distribute_tensor(x, mesh, [Replicate()]), distribute_tensor(w, mesh, [Shard(1)]))
    assert y.placements == (Shard(1),)
    torch.testing.assert_close(y.full_tensor(), F.conv_transpose3d(x, w, None, 2))


def tensor_parallel(rank: int, device: torch.device) -> None:
    """Layers split by output channel, by group and by input channel in turn: one all-reduce."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh(device.type, (SIZE,))
    model = _model(device)
    model.insert(2, nn.ConvTranspose3d(4, 4, 3, padding=1, groups=4).to(device, torch.float64))
    exact = copy.deepcopy(model)
    x = torch.randn(2, 3, 3, 4, 5, dtype=torch.float64, device=device)
    want = exact(x)
    want.square().sum().backward()

    def shard(module: nn.Module, weight: Any, bias: Any) -> None:
        for name, placement in (("weight", weight), ("bias", bias)):
            one = distribute_tensor(getattr(module, name).detach(), mesh, [placement])
            setattr(module, name, nn.Parameter(one))

    convt3d.convert(model)
    shard(model[0], Shard(1), Shard(0))
    shard(model[2], Shard(0), Shard(0))
    shard(model[3], Shard(0), Replicate())
    whole = distribute_tensor(x, mesh, [Replicate()])
    with CommDebugMode() as communication:
        y = model(whole)
        assert communication.get_total_counts() == 0
        y = y.redistribute(mesh, [Replicate()])
    assert communication.get_total_counts() == 1
    torch.testing.assert_close(y.to_local(), want)
    y.square().sum().backward()
    for got, expected in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), expected.grad)


# --- Data parallel -------------------------------------------------------------------------------


def _model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.ConvTranspose3d(3, 4, 2, 2), nn.ReLU(), nn.ConvTranspose3d(4, 2, 3, padding=1)
    )
    return model.to(device, torch.float64)


def _steps(model: nn.Module, part: slice) -> Tensor:
    """Three steps of training on a part of each batch; the last output."""
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(4)
    for _ in range(3):
        x = torch.randn(2 * SIZE, 3, 2, 3, 2, dtype=torch.float64).to(device)
        optimizer.zero_grad()
        y = model(x[part])
        y.square().mean().backward()
        optimizer.step()
    return y.detach()


def data_parallel(rank: int, device: torch.device) -> None:
    """DDP, and FSDP2 where this PyTorch has it, train as PyTorch's layers do on the whole batch."""
    part = slice(2 * rank, 2 * rank + 2)
    exact = _model(device)
    want = _steps(exact, slice(None))[part]

    def same(trained: nn.Module, y: Tensor) -> None:
        torch.testing.assert_close(y, want)
        for got, expected in zip(trained.parameters(), exact.parameters(), strict=True):
            got = got.full_tensor() if hasattr(got, "full_tensor") else got
            torch.testing.assert_close(got, expected)

    model = nn.parallel.DistributedDataParallel(convt3d.convert(_model(device)))
    same(model, _steps(model, part))
    # Conversion after wrapping: the parameters, and so the hooks of the wrapper, stay the same.
    model = nn.parallel.DistributedDataParallel(_model(device))
    convt3d.convert(model)
    same(model, _steps(model, part))
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # torch < 2.6
        print("no FSDP2")
        return
    for convert_first in (True, False):
        model = _model(device)
        if convert_first:
            convt3d.convert(model)
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        if not convert_first:
            convt3d.convert(model)
        assert isinstance(model[0], convt3d.ConvTranspose3d)
        same(model, _steps(model, part))


CHECKS: dict[str, Callable[[int, torch.device], None]] = {
    "shardings": shardings,
    "convolution_shardings": convolution_shardings,
    "tensor_parallel": tensor_parallel,
    "data_parallel": data_parallel,
}
