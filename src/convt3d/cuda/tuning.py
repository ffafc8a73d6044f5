"""Times candidate plans on the GPU, and remembers the winner."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

import torch
from torch import Tensor

from convt3d.cuda import compiler, launch, winners
from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.cudnn import Times
from convt3d.cuda.operation import Operation
from convt3d.cuda.plan import ranked_plans, table
from convt3d.cuda.prepared import Left, prepared_by
from convt3d.cuda.schedule import Gpu, Plan, Problem
from convt3d.cuda.timing import events_around, flush_buffer
from convt3d.layout import empty
from convt3d.log import log_once
from convt3d.precision import Arithmetic

CANDIDATES = 16
"""Plans that are timed, best first by the cost models, and the best of each family."""
QUICK = 2
"""The same where a call of the user waits: torch.backends.cudnn.benchmark asks for it."""
_ROUNDS = 2  # of ours beside PyTorch's: in turn, since the clock drifts
_GAIN = 0.98  # of the heuristic's time, above which a difference may be noise

_DTYPES = {Arithmetic.F16: torch.float16, Arithmetic.BF16: torch.bfloat16}

Measure = Callable[[Plan], float]


@dataclass(frozen=True)
class Outcome:
    """What tuning one problem found; times in milliseconds.

    ``plan`` is the winner, ``ms`` its time, ``heuristic_ms`` that of the cost models' choice,
    ``timed`` how many plans ran and ``kept`` whether the winner could be written to disk;
    ``next_ms`` is the time of the fastest other plan, None where no other one ran.
    """

    plan: Plan
    ms: float
    heuristic_ms: float
    timed: int
    kept: bool
    next_ms: float | None = None

    @property
    def share(self) -> float:
        """The winner's time as a share of the heuristic's: 1 where the heuristic chose it."""
        return self.ms / self.heuristic_ms


def candidates(
    problem: Problem, batch: int, input_size: Sequence[int], gpu: Gpu, count: int = CANDIDATES
) -> list[Plan]:
    """The plans worth timing; what runs untuned comes first.

    They are the ``count`` best by the cost models, behind the table's winner where there is one,
    and the best of each other family, of which a quick search takes two.
    """
    ranked = ranked_plans(problem, batch, tuple(input_size), gpu)
    known = table.recall(problem, batch, input_size, gpu)
    if known is not None:
        ranked = [known.plan, *(plan for plan in ranked if plan != known.plan)]
    chosen = ranked[:count]
    families = {type(plan) for plan in chosen}
    for plan in ranked[count:]:
        if count == QUICK and len(chosen) == QUICK + 2:
            break
        if type(plan) not in families:
            families.add(type(plan))
            chosen.append(plan)
    return chosen


def tune(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    measure: Measure,
    count: int = CANDIDATES,
) -> Outcome:
    """Time the best plans by the cost models; the winner is what :func:`plan_problem` then gives.

    Args:
        problem, batch, input_size: what to tune; the result serves these very extents.
        gpu: the GPU that ``measure`` runs on.
        measure: milliseconds of a plan; a RuntimeError (out of memory, too) drops the plan.
        count: how many plans to time.

    Raises:
        RuntimeError: none of the plans could run.
    """
    problem, input_size = problem.canonical(input_size)
    times: list[tuple[float, Plan]] = []
    failure: RuntimeError | None = None
    plans = candidates(problem, batch, input_size, gpu, count)
    for plan in plans:
        try:
            times.append((measure(plan), plan))
        except RuntimeError as error:
            log_once(f"a candidate could not be timed: {error}")
            failure = error
    if not times:
        raise RuntimeError(f"no plan of {problem.geometry.label} could be timed") from failure
    first, heuristic = times[0]
    ms, best = min(times, key=lambda item: item[0])
    if ms > _GAIN * first:
        ms, best = first, heuristic
    next_ms = min((time for time, plan in times if plan is not best), default=None)
    facts = {"ms": ms, "heuristic_ms": first, "timed": len(times), **best.describe()}
    kept = winners.remember(problem, batch, input_size, gpu, best, {"facts": facts})
    return Outcome(best, ms, first, len(times), kept, next_ms)


# ---------------------------------------------------------------- on a GPU


def tune_here(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    device: torch.device,
    count: int = CANDIDATES,
) -> Outcome:
    """:func:`tune` on a CUDA device, with random operands of its own.

    ``problem`` is not made canonical before: which launches run hangs on how its weight lies in
    memory, and that of a Conv3d is another than that of the forward pass which computes the same.
    """
    gpu = Gpu.of(device.index or 0)
    canonical, size = problem.canonical(input_size)
    with torch.cuda.device(device), torch.no_grad():
        tensors = operands(problem, batch, input_size, device)
        operation = Operation.of(problem, batch, input_size, tensors["weight"])
        schedules = [
            operation.launched_by(plan).schedule
            for plan in candidates(canonical, batch, size, gpu, count)
        ]
        compile_kernels({item.kernel for one in schedules for item in one.launches}, gpu)
        flush = flush_buffer(device)

        def measure(plan: Plan) -> float:
            return milliseconds(runner(plan, operation, tensors), flush=flush)

        return tune(canonical, batch, size, gpu, measure, count)


def beside_pytorch(
    problem: Problem, batch: int, input_size: tuple[int, ...], device: torch.device
) -> Times:
    """Times of a problem by the plan that runs it and by PyTorch's operator, in turn.

    Raises:
        RuntimeError: one of the two could not run.
    """
    gpu = Gpu.of(device.index or 0)
    with torch.cuda.device(device), torch.no_grad():
        tensors = operands(problem, batch, input_size, device)
        source, weight, target = (tensors[name] for name in ("source", "weight", "target"))
        bias = tensors.get("bias")
        operation = Operation.of(problem, batch, input_size, weight)
        ours = prepared_by(operation.plan(gpu), operation)
        runs: list[Callable[[], object]] = []
        for way in (ours, Left(operation)):
            if problem.operation != "grad_weight":
                runs.append(functools.partial(way.output, source, weight, bias))
            elif bias is not None:
                runs.append(functools.partial(way.grad_weight_bias, source, target))
            else:
                runs.append(functools.partial(way.grad_weight, source, target))
        flush = flush_buffer(device)
        rounds = [[milliseconds(run, 8, flush) for run in runs] for _ in range(_ROUNDS)]
    return Times(*(statistics.median(column) for column in zip(*rounds, strict=True)))


def compile_kernels(kernels: Collection[KernelSpec], gpu: Gpu) -> None:
    """Compile kernels on all cores, for the launches that will ask for them.

    One that does not compile is left to the launch that needs it, which reports the error.
    """
    target = compiler.architecture(gpu.capability)
    wait([compiler.request(kernel, target) for kernel in kernels])


def operands(
    problem: Problem, batch: int, input_size: Sequence[int], device: torch.device
) -> dict[str, Tensor]:
    """Random source, target, weight and bias of a problem, by the names that kernels use."""
    # PyTorch's own generator belongs to the user: tuning must not change what comes next.
    generator = torch.Generator(device).manual_seed(0)
    geometry = problem.geometry
    dtype = _DTYPES.get(problem.arithmetic, torch.float32)
    like = torch.empty(0, dtype=dtype, device=device)
    x = (batch, geometry.in_channels, *input_size)
    y = (batch, geometry.out_channels, *geometry.output_size(input_size))
    source, target = (y, x) if problem.operation == "grad_input" else (x, y)
    tensors = {
        "source": empty(source, like, problem.source_channels_last),
        "target": empty(target, like, problem.target_channels_last),
        "weight": empty(geometry.weight_size, like, bool(problem.channels_last)),
    }
    if problem.bias:
        channels = geometry.in_channels if problem.operation == "grad_input" else y[1]
        tensors["bias"] = torch.empty(channels, dtype=dtype, device=device)
    return {name: t.normal_(generator=generator) for name, t in tensors.items()}


def runner(plan: Plan, operation: Operation, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
    """A function that runs an operation by a plan, its own or that of its canonical form.

    ``tensors``: source, target, weight and bias by name.
    """
    call = launch.bind_plan(plan, operation)
    four = (tensors["source"], tensors["weight"], tensors["target"], tensors.get("bias"))
    return functools.partial(call.run, *four)


def milliseconds(
    run: Callable[[], object], repeats: int = 20, flush: Tensor | None = None
) -> float:
    """Median device time of one call; ``flush`` is overwritten before each to empty the cache."""
    run()
    times = [events_around(run, flush) for _ in range(repeats)]
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times)
