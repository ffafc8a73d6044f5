"""Measures one whole network under one setting, in this process.

Run as ``python -m convt3d.bench.network_worker`` it reads one job as a line of JSON, and writes one
line of JSON per row. PyTorch keeps one cuDNN plan per shape and process, and Inductor what it
compiled, so every setting has a process of its own; so do the network as built and as converted.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import convt3d
from convt3d.bench.cases import MODES
from convt3d.bench.network_profile import convolution_share
from convt3d.bench.networks import Network
from convt3d.bench.record import NetworkRecord, digits
from convt3d.bench.timing import measure

KINDS = ("training", "inference")  # in this order: a first training step finds nothing compiled
SIDES = ("pytorch", "convt3d")
FUSED = "convt3d fused"  # compiled with the backend that fuses epilogues
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
NETWORK_MODES = ("tf32", "fp32", *AUTOCAST)
OWN = "convt3d.bench.networks"


@dataclass(frozen=True)
class Job:
    """What one process measures: one network, as built ("pytorch") or converted (the other sides).

    Args:
        registry: module whose ``NETWORKS`` has the network by its name.
        layout: of weights and input, "ncdhw" or "ndhwc".
        compiled: whether the network runs under torch.compile.
        graphs: whether compiled steps are CUDA graphs (``mode="reduce-overhead"``).
        tuned: whether ``cudnn_benchmark`` tunes our layers too.
        optimiser: whether a training step ends with that of SGD with Nesterov momentum.
        part: 0, 1, 2 for the processes of a setting in the order of their measurement.
        budget_s: seconds of one measurement.
    """

    network: str
    mode: str
    layout: str
    compiled: bool
    cudnn_benchmark: bool
    side: str
    part: int
    kinds: tuple[str, ...] = KINDS
    optimiser: bool = False
    graphs: bool = False
    tuned: bool = False
    small: bool = False
    device: str = "cpu"
    budget_s: float = 1.0
    registry: str = OWN

    @property
    def ours(self) -> bool:
        """Whether the network is converted."""
        return self.side != SIDES[0]

    @property
    def title(self) -> str:
        how = manner(self.compiled, self.graphs)
        return f"{self.network} {self.mode} {self.layout} {how} {self.side}"

    @property
    def base(self) -> dict[str, Any]:
        """What rows have in common."""
        values = asdict(self)
        for name in ("kinds", "registry", "budget_s"):
            del values[name]
        return values

    def keys(self) -> list[str]:
        """Those of the rows of this job."""
        return [NetworkRecord.key({**self.base, "kind": kind}) for kind in self.kinds]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        values = json.loads(text)
        return cls(**{**values, "kinds": tuple(values["kinds"])})


def manner(compiled: bool, graphs: bool) -> str:
    """How a network runs, in words."""
    return ("compiled, CUDA graphs" if graphs else "compiled") if compiled else "eager"


def rows(job: Job) -> Iterator[dict[str, Any]]:
    """Measure a job. What fails gives a row with ``failed`` instead of a time."""
    device = torch.device(job.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = job.cudnn_benchmark
    if not job.tuned:
        leave_untuned()
    network: Network = importlib.import_module(job.registry).NETWORKS[job.network]
    left = list(job.kinds)
    with MODES[job.mode].applied(device):
        try:
            for row in _measured(job, network, device):
                left.remove(row["kind"])
                yield row
        except Exception as error:  # of compilers, libraries and drivers: any type
            text = str(error).splitlines()[0][:200] if str(error) else ""
            for kind in left:
                yield {**job.base, "kind": kind, "failed": f"{type(error).__name__}: {text}"}


def leave_untuned() -> None:
    """Keep torch.backends.cudnn.benchmark from tuning our layers, in this process."""
    from convt3d.cuda import backend

    backend._tune_once = lambda *arguments: None


def autocast(mode: str, device: torch.device) -> Any:
    """The autocast context of a mode; entered by each call, because its casts are cached."""
    dtype = AUTOCAST.get(mode)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def _measured(job: Job, network: Network, device: torch.device) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    model = network.build(job.small).to(device)
    x = network.input(job.small, device)
    if job.layout == "ndhwc":
        model.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        if x.dim() == 5:
            x = x.contiguous(memory_format=torch.channels_last_3d)
    if job.ours:
        convt3d.convert(model)
    backend = "inductor"
    if job.side == FUSED:
        # Registers the backend where the package is a source tree without an entry point.
        from convt3d import compile  # noqa: F401

        backend = "convt3d"
    called: Any = model
    if job.compiled:
        how: dict[str, Any] = {"mode": "reduce-overhead"} if job.graphs else {}
        called = torch.compile(model, dynamic=False, backend=backend, **how)
    for kind in job.kinds:
        training = kind == "training"
        model.train(training)
        row: dict[str, Any] = {**job.base, "kind": kind, "input": list(x.shape)}
        row["warm_s"] = _warm(model, x, job, training) if job.ours else None
        if training:
            call = training_step(called, x, job.mode, job.optimiser)
        else:
            call = inference(called, x, job.mode)
        if job.graphs:
            # A replay allocates nothing, and its kernels belong to no operator.
            row |= _timed(_as_a_step(call), device, job.budget_s)
            row |= dict.fromkeys(("peak_mbytes", "conv_ms", "conv_share"))
        else:
            row |= _timed(call, device, job.budget_s)
            row |= convolution_share(call, device, job.ours)
        if kind == job.kinds[-1] and job.ours:
            # Compiled code for inference, where there is some: none is made for this alone.
            run = called if kind == "inference" else model
            row["difference"] = _difference(model, run, x, job.mode)
        del call
        model.zero_grad(set_to_none=True)
        yield row


def _as_a_step(call: Callable[[], None]) -> Callable[[], None]:
    """A call that first tells CUDA graphs that tensors of the call before are dead."""

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        call()

    return step


def _warm(model: nn.Module, x: Tensor, job: Job, training: bool) -> float | None:
    """Seconds in which all kernels of ours were compiled; None where that cannot be done ahead."""
    warm = getattr(convt3d, "warm", None)
    if warm is None:
        return None
    begin = time.perf_counter()
    try:
        with torch.set_grad_enabled(training), autocast(job.mode, x.device):
            warm(model, x, training=training, progress=False)
    except RuntimeError as error:  # a model that does not run on fake tensors: its calls compile
        print(f"{job.title}: not warmed: {error}", file=sys.stderr)
        return None
    return digits(time.perf_counter() - begin)


def _timed(call: Callable[[], Any], device: torch.device, budget_s: float) -> dict[str, Any]:
    """First call, medians (on CPU: least times) and peak memory of a call."""
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    first_s = time.perf_counter() - begin
    t = measure({"call": call}, device, budget_s)["call"]
    peak = None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        peak = digits(torch.cuda.max_memory_allocated(device) / 1e6)
    return {
        "first_s": digits(first_s),
        "ms": digits(t.ms),
        "ms_low": digits(t.low),
        "ms_high": digits(t.high),
        "runs": t.runs,
        "peak_mbytes": peak,
    }


def inference(model: Callable[..., Any], x: Tensor, mode: str) -> Callable[[], None]:
    """A forward pass without gradients."""

    def call() -> None:
        with torch.no_grad(), autocast(mode, x.device):
            model(x)

    return call


def training_step(model: Any, x: Tensor, mode: str, optimiser: bool = False) -> Callable[[], None]:
    """Forward and backward pass of the mean square of the output, and SGD's step if wanted."""
    sgd = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.99, nesterov=True)
    scaler = torch.amp.GradScaler(x.device.type, init_scale=256.0, enabled=mode == "fp16")

    def call() -> None:
        model.zero_grad(set_to_none=True)
        with autocast(mode, x.device):
            y = model(x)
        loss = (y[0] if isinstance(y, (list, tuple)) else y).float().square().mean()
        scaler.scale(loss).backward()
        if optimiser:
            scaler.step(sgd)
            scaler.update()

    return call


def _difference(model: nn.Module, called: Any, x: Tensor, mode: str) -> float:
    """Relative distance of the converted network's output from that of PyTorch's layers.

    PyTorch times no plans for it: the network as built has a process of its own for that.
    """
    model.eval()
    torch.backends.cudnn.benchmark = False
    with torch.no_grad(), autocast(mode, x.device):
        mine = _first(called(x)).float()
        theirs = _first(convt3d.revert(model)(x)).float()
    convt3d.convert(model)
    return digits(float((mine - theirs).norm() / theirs.norm()))


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, (list, tuple)) else output


def main() -> None:
    for row in rows(Job.from_json(sys.stdin.readline())):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
