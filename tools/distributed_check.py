"""Several GPUs: correctness of sharded layers, and weak scaling of a training step.

    python tools/distributed_check.py --out docs/results/distributed-h200.json      (NCCL, all GPUs)
    python tools/distributed_check.py --small --steps 3                             (gloo, CPU)

correctness  DTensor splits (batch, output channel, input channel), DDP and FSDP2, against one
             process in float64 (the checks of tests/support/distributed_checks.py) and, on GPUs,
             the splits again in float32 on our kernels
scaling      a step of a 3D U-Net of nnU-Net's shape (bfloat16 autocast, two volumes a GPU) under
             DDP and FSDP2, on one GPU and on all, with and without convt3d: medians in ms;
             efficiency = time on one / time on all
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import convt3d  # noqa: E402
from convt3d.bench.network_worker import leave_untuned  # noqa: E402
from convt3d.bench.networks import UNet3d  # noqa: E402
from convt3d.bench.record import record_text  # noqa: E402
from convt3d.environment import environment  # noqa: E402
from support import distributed_checks  # noqa: E402

CUDA = torch.cuda.is_available()
WRAPPERS = ("ddp", "fsdp2")
RUNS = ("pytorch", "convt3d")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="JSON record")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if CUDA else 2)
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each kind")
    parser.add_argument("--patch", type=int, default=128, help="edge of the volumes")
    parser.add_argument("--wrappers", default=",".join(WRAPPERS))
    parser.add_argument("--no-tuning", action="store_true", help="our plans as the models choose")
    parser.add_argument("--small", action="store_true", help="tiny networks, to try the tool")
    parser.add_argument("--commit", help="recorded where the source is not a git checkout")
    arguments = parser.parse_args()
    if arguments.ranks < 2:
        raise SystemExit("needs two GPUs (or none: then two processes on the CPU)")
    names, spawn = list(distributed_checks.CHECKS), torch.multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(mp_context=spawn) as pool:
        correct = dict(zip(names, pool.map(_checked, names), strict=True))
    print("correct:", correct, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if CUDA:
            error = _start(_shards_on_gpus, arguments.ranks, folder, arguments)
            correct["shardings on GPUs"] = max(error.values()) < 2e-5
            print("float32 splits on GPUs, relative errors:", error, flush=True)
        times = {
            ranks: _start(_scaling, ranks, folder, arguments) for ranks in (1, arguments.ranks)
        }
    rows = []
    for wrapper in arguments.wrappers.split(","):
        for run in RUNS:
            one, many = (times[ranks][f"{wrapper} {run}"] for ranks in (1, arguments.ranks))
            rows.append(
                {
                    "wrapper": wrapper,
                    "run": run,
                    "ms_on_one": one,
                    "ms_on_all": many,
                    "efficiency": one / many,
                }
            )
            print(
                f"{wrapper:6} {run:8} {one:9.2f} ms on one, {many:9.2f} ms on {arguments.ranks}: "
                f"weak scaling {one / many:.1%}"
            )
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "environment": environment(arguments.commit),
            "ranks": arguments.ranks,
            "patch": arguments.patch,
            "correct": correct,
            "rows": rows,
        }
        arguments.out.write_text(record_text(record))
    if not all(correct.values()):
        raise SystemExit("a sharded layer differs")


def _checked(name: str) -> bool:
    """A check of the tests; it starts two processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            distributed_checks.run(
                [name], str(pathlib.Path(folder) / "store"), "cuda" if CUDA else "cpu"
            )
        except Exception as error:
            print(f"{name}: {error}", file=sys.stderr)
            return False
    return True


def _start(function: Any, ranks: int, folder: str, arguments: argparse.Namespace) -> Any:
    """Run ``function`` in every rank; what rank 0 returned."""
    result = pathlib.Path(folder) / f"{function.__name__}{ranks}"
    torch.multiprocessing.start_processes(
        _rank, (function, ranks, str(result), arguments), nprocs=ranks, start_method="spawn"
    )
    return json.loads(result.with_suffix(".json").read_text())


def _rank(rank: int, function: Any, ranks: int, result: str, arguments: Any) -> None:
    if CUDA:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if CUDA else "gloo", init_method=f"file://{result}", rank=rank, world_size=ranks
    )
    try:
        found = function(rank, arguments)
        if rank == 0:
            pathlib.Path(result).with_suffix(".json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


# --- Correctness on GPUs -------------------------------------------------------------------------


def _shards_on_gpus(rank: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Largest relative error of output and gradients of each split, float32 without TF32."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    whole = Replicate()
    splits = {
        "batch": (Shard(0), whole, whole),
        "output channels": (whole, Shard(1), Shard(0)),
        "input channels": (Shard(1), Shard(0), whole),
    }
    errors = {}
    for (name, placements), (kernel, stride) in zip(
        [*splits.items()] * 2, [(2, 2)] * 3 + [(3, 1)] * 3, strict=True
    ):
        torch.manual_seed(0)
        sizes = ((8, 64, 9, 10, 11), (64, 32, kernel, kernel, kernel), (32,))
        plain = [torch.randn(size, device="cuda") for size in sizes]
        exact = [t.double().requires_grad_() for t in plain]
        shared = [
            distribute_tensor(t, mesh, [p]).requires_grad_()
            for t, p in zip(plain, placements, strict=True)
        ]
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            y = convt3d.conv_transpose3d(*shared, stride)
            gradients = torch.autograd.grad(y.square().mean(), shared)
        want = F.conv_transpose3d(*exact, stride)
        wanted = torch.autograd.grad(want.square().mean(), exact)
        errors[f"{name}, kernel {kernel}, stride {stride}"] = max(
            float((a.full_tensor().double() - b).norm() / b.norm())
            for a, b in zip((y, *gradients), (want, *wanted), strict=True)
        )
    return errors


# --- Weak scaling --------------------------------------------------------------------------------


def _scaling(rank: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Median ms of a training step by wrapper and run, the slowest rank's."""
    device = torch.device("cuda", rank) if CUDA else torch.device("cpu")
    torch.backends.cudnn.benchmark = True
    if arguments.no_tuning:
        leave_untuned()
    times = {}
    for wrapper in arguments.wrappers.split(","):
        for run in RUNS:
            torch.manual_seed(0)
            model = (UNet3d((4, 8, 8)) if arguments.small else UNet3d()).to(device)
            if run == "convt3d":
                convt3d.convert(model)
            model = _wrapped(wrapper, model, device)
            ms = _step_ms(model, rank, device, arguments)
            slowest = torch.tensor(ms, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[f"{wrapper} {run}"] = float(slowest)
            del model
            if CUDA:
                torch.cuda.empty_cache()
    return times


def _wrapped(wrapper: str, model: Any, device: torch.device) -> nn.Module:
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index] if CUDA else None
        )
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in (*model.encoder, *model.decoder, *model.up):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _step_ms(
    model: nn.Module, rank: int, device: torch.device, arguments: argparse.Namespace
) -> float:
    edge = 8 if arguments.small else arguments.patch
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.99, nesterov=True)
    torch.manual_seed(rank)
    x = torch.randn(2, 1, edge, edge, edge, device=device)
    labels = torch.randint(0, 3, (2, edge, edge, edge), device=device)
    times = []
    for _ in range(5 + arguments.steps):  # five to warm up
        dist.barrier()
        if CUDA:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            y = model(x)
        F.cross_entropy(y.float(), labels).backward()
        optimizer.step()
        if CUDA:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[5:])


if __name__ == "__main__":
    main()
