"""One model of a folder of problems under several settings, in this process, for level2_bench.py.

Run as a module it reads one job as a line of JSON, and writes one line of JSON per setting.
"""

from __future__ import annotations

import copy
import gc
import json
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx  # before there is a job: the next process imports meanwhile
import torch._inductor.config
from torch import Tensor, nn

import convt3d
from convt3d.bench import numerics
from convt3d.bench.cases import MODES, Mode
from convt3d.bench.network_worker import leave_untuned
from convt3d.bench.record import digits
from convt3d.bench.timing import measure
from convt3d.compile import report

SETTINGS: dict[str, tuple[bool, str | None]] = {
    "eager": (False, None),
    "compile": (False, "inductor"),
    "convert": (True, None),
    "convert+compile": (True, "inductor"),
    "backend": (True, "convt3d"),
}
"""Whether the model is converted, and the backend of torch.compile."""

SMALL = {"batch_size": 2, "depth": 8, "height": 8, "D": 8, "H": 8}
"""What ``--small`` gives to a problem's sizes; widths stay, for some norms are over them."""


@dataclass(frozen=True)
class Job:
    """What one process measures: one problem in one mode.

    Args:
        path: the problem's file.
        ahead: only fill the caches of compiled kernels, and tell what was fused.
        evaluation: put the model into evaluation mode; else it stays in training mode, where batch
            norm takes the statistics of the batch.
        tuned: whether ``cudnn_benchmark`` tunes our layers too.
        budget_s: seconds of the measurement of all settings.
    """

    path: str
    mode: str
    settings: tuple[str, ...]
    ahead: bool = False
    evaluation: bool = False
    tuned: bool = False
    small: bool = False
    device: str = "cpu"
    budget_s: float = 0.5

    @property
    def problem(self) -> str:
        return Path(self.path).stem

    @property
    def title(self) -> str:
        return f"{self.problem} {self.mode}"

    @property
    def base(self) -> dict[str, Any]:
        """What rows have in common."""
        names = ("mode", "evaluation", "tuned", "small", "device")
        return {"problem": self.problem, **{name: getattr(self, name) for name in names}}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        values = json.loads(text)
        return cls(**{**values, "settings": tuple(values["settings"])})


class Problem:
    """A file with ``Model``, ``get_inputs`` and ``get_init_inputs``, and its inputs."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job, self.device = job, device
        self.dtype = MODES[job.mode].dtype
        self.names = runpy.run_path(job.path)
        if job.small:
            # Its functions look the sizes up in the module's own names.
            own = self.names["get_inputs"].__globals__
            own.update((name, size) for name, size in SMALL.items() if name in own)
        torch.manual_seed(1)
        with device:
            self.inputs = [self._cast(value) for value in self.names["get_inputs"]()]

    def _cast(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self.device, self.dtype if value.is_floating_point() else None)
        return value

    def build(self) -> nn.Module:
        """PyTorch's model, with the same parameters each time."""
        torch.manual_seed(0)
        with self.device:
            model: nn.Module = self.names["Model"](*self.names["get_init_inputs"]())
        return model.to(self.device, self.dtype).train(not self.job.evaluation)

    def callable(self, setting: str) -> Callable[[], Tensor]:
        """The model under a setting, without gradients; compiled when it is first called."""
        converted, backend = SETTINGS[setting]
        model = self.build()
        if converted:
            convt3d.convert(model)
        run: Any = model
        if backend is not None:
            run = torch.compile(model, backend=backend, dynamic=False)

        def call() -> Tensor:
            with torch.no_grad():
                return run(*self.inputs)

        return call


def rows(job: Job) -> Iterator[dict[str, Any]]:
    """Measure a job. What fails gives a row with ``failed`` instead of a time."""
    device = torch.device(job.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    _time_plans(device, True)
    if not job.tuned:
        leave_untuned()
    _tell_inductor()
    mode = MODES[job.mode]
    with mode.applied(device):
        try:
            problem = Problem(job, device)
            found, calls = _first_calls(problem)
            if not job.ahead:
                _compare(problem, calls, found)
                for setting, time_of in measure(calls, device, job.budget_s).items():
                    found[setting] |= {
                        "ms": digits(time_of.ms),
                        "ms_low": digits(time_of.low),
                        "ms_high": digits(time_of.high),
                        "runs": time_of.runs,
                    }
        except Exception as error:  # of problems, libraries and drivers: any type
            found = {setting: _failure(error) for setting in job.settings}
    for setting, row in found.items():
        yield {**job.base, "setting": setting, **row}


def _tell_inductor() -> None:
    """Choices of kernels by time are made anew by each process: no cache keeps them."""
    torch._inductor.config.autotune_local_cache = False


def _failure(error: Exception) -> dict[str, Any]:
    text = str(error).strip().splitlines()[0][:200] if str(error).strip() else ""
    return {"failed": f"{type(error).__name__}: {text}"}


def _first_calls(
    problem: Problem,
) -> tuple[dict[str, dict[str, Any]], dict[str, Callable[[], Tensor]]]:
    """Call every setting once; the seconds of it and what was fused, and the calls that work."""
    found: dict[str, dict[str, Any]] = {}
    calls = {}
    for setting in problem.job.settings:
        if problem.job.ahead:
            # What runs in our kernels depends on it. Of PyTorch's layers nothing is kept, so that
            # timing their plans would only take time.
            _time_plans(problem.device, SETTINGS[setting][0])
        report(clear=True)
        begin = time.perf_counter()
        try:
            call = problem.callable(setting)
            call()
            _wait(problem.device)
        except Exception as error:  # of compilers, libraries and drivers: any type
            found[setting] = _failure(error)
            continue
        finally:
            if problem.job.ahead:
                _free()  # for the others that compile now
        calls[setting] = call
        found[setting] = {"first_s": digits(time.perf_counter() - begin)}
        # Nothing is listed where Inductor found the graph in its cache.
        sites = [asdict(site) for site in report(clear=True)]
        if sites:
            found[setting]["sites"] = sites
    return found, calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _compare(
    problem: Problem, calls: dict[str, Callable[[], Tensor]], found: dict[str, dict[str, Any]]
) -> None:
    """Note the error of each setting against PyTorch's eager model in higher precision."""
    samples, wanted, reference = _reference(problem)
    for setting, call in calls.items():
        relative, largest = numerics.error(call()[samples], wanted)
        found[setting] |= {
            "error": digits(relative),
            "largest_error": digits(largest),
            "reference": reference,
        }
    del wanted
    _free()


def _reference(problem: Problem) -> tuple[Any, Tensor, str]:
    """Which samples are compared, what their outputs should be, and how that was computed.

    The first and the last one in float64, or all where the model mixes samples; in IEEE float32
    where PyTorch finds no memory or no operator for that.
    """
    model = problem.build()
    samples: Any = slice(None) if _mixes_samples(model) else [0, -1]
    said = ""
    for name, dtype in (("fp64", torch.float64), ("fp32", torch.float32)):
        try:
            return samples, _exactly(model, problem, samples, dtype), name
        except RuntimeError as error:
            said = str(error)
            _free()
    raise RuntimeError(f"no reference: {said}")


def _mixes_samples(model: nn.Module) -> bool:
    """Whether samples of a batch depend on each other."""
    norms = (nn.modules.batchnorm._BatchNorm,)
    return any(isinstance(module, norms) and module.training for module in model.modules())


def _exactly(model: nn.Module, problem: Problem, samples: Any, dtype: torch.dtype) -> Tensor:
    """The eager model's output in a dtype, in IEEE arithmetic and without timing any plans."""
    exact = copy.deepcopy(model).to(dtype)
    inputs = [
        value[samples].to(dtype) if isinstance(value, Tensor) else value for value in problem.inputs
    ]
    before = torch.backends.cudnn.benchmark
    _time_plans(problem.device, False)
    try:
        with torch.no_grad(), Mode("ieee", dtype, False).applied(problem.device):
            result: Tensor = exact(*inputs)
            return result.double()
    finally:
        _time_plans(problem.device, before)


def _time_plans(device: torch.device, wanted: bool) -> None:
    """Whether cuDNN times its plans, in this process; for other devices the switch stays."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = wanted


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    for row in rows(Job.from_json(sys.stdin.readline())):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
