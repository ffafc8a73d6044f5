"""Measures one job: some contenders over some cases, in this process.

Run as ``python -m convt3d.bench.worker`` it reads one job as a line of JSON, and writes one line
of JSON per row as soon as it is measured, so that a parent loses nothing when time is up.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from convt3d.bench import cases, limits, numerics, timing, warm
from convt3d.bench.cases import MODES, Mode, Tensors
from convt3d.bench.contenders import CONTENDERS, OURS, Contender
from convt3d.bench.record import Record, digits
from convt3d.bench.shapes import Shape
from convt3d.cuda import tuning
from convt3d.cuda.ahead import compile_operations
from convt3d.cuda.schedule import Gpu
from convt3d.environment import nvidia_smi


@dataclass(frozen=True)
class Job:
    """What one process measures."""

    contenders: tuple[str, ...]
    shapes: tuple[Shape, ...]
    modes: tuple[str, ...]
    layouts: tuple[str, ...]
    passes: tuple[str, ...]
    device: str
    budget_s: float
    check: bool = True
    skip: tuple[str, ...] = ()  # keys of rows that exist already
    tuned: bool = False  # torch.backends.cudnn.benchmark for our layers, too

    @property
    def title(self) -> str:
        return ", ".join(self.contenders)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "shapes": [s.to_dict() for s in self.shapes]})

    @classmethod
    def from_json(cls, text: str) -> Job:
        values: dict[str, Any] = json.loads(text)
        values["shapes"] = [Shape.from_dict(entry) for entry in values["shapes"]]
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
        return cls(**values)


def rows(job: Job) -> Iterator[dict[str, Any]]:
    """Measure a job. A case that fails gives a row with ``failed`` instead of a time."""
    device = torch.device(job.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        if OURS in job.contenders:
            _compile(job, Gpu.of(device.index or 0))
    for mode in (MODES[name] for name in job.modes):
        with mode.applied(device):
            # Beside every contender on CUDA: matrix products heat the GPU and lower its clock.
            wanted = OURS in job.contenders or device.type == "cuda"
            ceilings = limits.Ceilings(mode, device) if wanted else None
            clock = _loaded_clock(ceilings, device)
            for shape in job.shapes:
                for layout in job.layouts:
                    for row in _case(job, shape, mode, layout, device, ceilings):
                        yield {**row, "clock_sm": clock} if clock else row


def _compile(job: Job, gpu: Gpu) -> None:
    """Compile, on all cores, the kernels that the job's calls of our layers will ask for."""
    operations = warm.operations(job.shapes, job.modes, job.layouts, job.passes, gpu.capability)
    compile_operations(operations, gpu)
    if job.tuned:
        tuning.compile_kernels(warm.candidates(operations, gpu), gpu)


def _loaded_clock(ceilings: limits.Ceilings | None, device: torch.device) -> str | None:
    """SM clock in MHz while matrix products run; None off CUDA or without nvidia-smi."""
    if ceilings is None or device.type != "cuda":
        return None
    for _ in range(100):
        ceilings.calls[limits.MATRIX]()
    clock = nvidia_smi(device.index).get("clock_sm")
    torch.cuda.synchronize(device)
    return clock


def _case(
    job: Job,
    shape: Shape,
    mode: Mode,
    layout: str,
    device: torch.device,
    ceilings: limits.Ceilings | None,
) -> Iterator[dict[str, Any]]:
    tensors: Tensors | None = None
    for operation in job.passes:
        contenders = [
            CONTENDERS[name]
            for name in job.contenders
            if CONTENDERS[name].runs(shape, layout, operation)
        ]
        base = {
            "shape": shape.name,
            "batch": shape.batch,
            "input_size": list(shape.input_size),
            "bias": shape.bias,
            "geometry": shape.geometry.to_dict(),
            "mode": mode.name,
            "layout": layout,
            "pass": operation,
            "device": str(device),
        }
        keys = {c.name: Record.key({**base, "contender": c.name}) for c in contenders}
        contenders = [c for c in contenders if keys[c.name] not in job.skip]
        if not contenders:
            continue
        if device.type == "cuda":
            tuned = job.tuned and contenders[0].name == OURS
            torch.backends.cudnn.benchmark = tuned or contenders[0].cudnn_benchmark
        try:
            if tensors is None:
                tensors = cases.make(shape, mode, layout == "ndhwc", device)
            measured = _measure(job, contenders, operation, tensors, mode, device, ceilings)
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            measured = {c.name: {"failed": text} for c in contenders}
        for name, values in measured.items():
            yield {**base, "contender": name, **values}
    del tensors
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _measure(
    job: Job,
    contenders: list[Contender],
    operation: str,
    tensors: Tensors,
    mode: Mode,
    device: torch.device,
    ceilings: limits.Ceilings | None,
) -> dict[str, dict[str, Any]]:
    shape = tensors.shape
    calls = {c.name: c.prepare(operation, tensors) for c in contenders}
    result: dict[str, dict[str, Any]] = {}
    with torch.set_grad_enabled(operation == "train"):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            first_s = time.perf_counter() - start
            extra = timing.extra_bytes(call, device)
            result[name] = {
                "first_call_s": digits(first_s),
                "extra_mbytes": None if extra is None else digits(extra / 1e6),
            }
        together = ceilings is not None and (OURS in calls or device.type == "cuda")
        beside = ceilings.calls if ceilings is not None and together else {}
        times = timing.measure({**calls, **beside}, device, job.budget_s)
        for name in calls:
            t = times[name]
            result[name] |= {
                "ms": digits(t.ms),
                "ms_low": digits(t.low),
                "ms_high": digits(t.high),
                "runs": t.runs,
            }
        for c in contenders:
            us = _overhead_us(c, calls[c.name], operation, tensors, mode, times[c.name].ms)
            result[c.name]["cpu_us"] = digits(us)
    if ceilings is not None and OURS in calls and operation != "train":
        limit = ceilings.limit(shape, mode, times)
        result[OURS]["limit"] = {
            k: v if isinstance(v, str) else digits(v) for k, v in limit.to_dict().items()
        }
        result[OURS]["share"] = digits(limit.ms / times[OURS].ms)
        if job.check:
            result[OURS]["error"] = numerics.compare(operation, tensors, mode)
        result[OURS]["runs_as"] = runs_as(operation, tensors)
    return result


def _overhead_us(
    contender: Contender,
    call: timing.Call,
    operation: str,
    tensors: Tensors,
    mode: Mode,
    ms: float,
) -> float:
    """CPU time of a call: on CUDA of this one, else of the same layer on a tiny input."""
    device = tensors.x.device
    if device.type == "cuda":
        return timing.overhead_us(call, device, repeats=max(2, min(20, int(100 / ms))))
    extents = zip(tensors.shape.input_size, tensors.shape.least_size, strict=True)
    d, h, w = (min(n, max(4, least)) for n, least in extents)
    tiny = replace(tensors.shape, batch=1, input_size=(d, h, w))
    call = contender.prepare(operation, cases.make(tiny, mode, tensors.channels_last, device))
    return timing.overhead_us(call, device, repeats=20)


def runs_as(operation: str, tensors: Tensors) -> str:
    """In words, what ran an operation of ours."""
    from convt3d.explanation import chosen

    return chosen(
        operation,
        tensors.shape.geometry,
        tensors.shape.batch,
        tensors.shape.input_size,
        tensors.x.dtype,
        tensors.x.device,
        tensors.channels_last,
        tensors.shape.bias and operation == "forward",
    )


def main() -> None:
    job = Job.from_json(sys.stdin.readline())
    for row in rows(job):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
