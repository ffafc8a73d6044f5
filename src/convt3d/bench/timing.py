"""Times of calls, interleaved: on CUDA the median with a cold L2 cache, on CPU the least."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from convt3d.cuda.timing import events_around, flush_buffer

Call = Callable[[], Any]

RUNS = 30  # of a measurement that can afford them
MAX_RUNS = 100
CONFIRMED = 1.01  # on CPU, how far the second least time may lie above the least


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call over ``runs`` runs: the time that counts, and its spread.

    What counts is the median on CUDA and the least on CPU, where other processes only add. The
    spread reaches from the 20th percentile, or from the least where that counts, to the 80th.
    """

    ms: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, times: list[float], least: bool) -> Timing:
        ordered = sorted(times)
        n = len(ordered)
        high = ordered[int(0.8 * (n - 1))]
        if least:
            return cls(ordered[0], ordered[0], high, n)
        return cls(statistics.median(ordered), ordered[int(0.2 * (n - 1))], high, n)


def measure(
    calls: Mapping[str, Call], device: torch.device, budget_s: float = 0.3
) -> dict[str, Timing]:
    """Time calls in turn, so that clocks and temperature are the same for all.

    Every call runs ``RUNS`` times where all of them together then take at most four times the
    budget, up to ``MAX_RUNS`` times within the budget, and never less than three times. On CPU all
    run on, for up to three times the budget, until the least time of each has been seen twice.
    """
    on_cuda = device.type == "cuda"
    state = _CudaRounds(calls, device) if on_cuda else _Rounds(calls, device)
    state.run(1)  # compile, plan, fill caches
    state.times.clear()
    start = time.perf_counter()
    state.run(2)
    round_s = (time.perf_counter() - start) / 2
    state.times.clear()
    state.run(runs(round_s, budget_s))
    while not on_cuda and not state.confirmed and time.perf_counter() - start < 3 * budget_s:
        state.run(1)
    return {name: Timing.of(times, least=not on_cuda) for name, times in state.times.items()}


def runs(round_s: float, budget_s: float) -> int:
    """Number of runs for a round of ``round_s`` seconds under a budget."""
    affordable = int(budget_s / max(round_s, 1e-9))
    if affordable < RUNS and RUNS * round_s <= 4 * budget_s:
        return RUNS
    return min(MAX_RUNS, max(3, affordable))


class _Rounds:
    """Runs all calls in turn and collects their times in ms."""

    def __init__(self, calls: Mapping[str, Call], device: torch.device) -> None:
        self.calls = calls
        self.device = device
        self.times: dict[str, list[float]] = {}
        self.random = random.Random(0)

    @property
    def confirmed(self) -> bool:
        """Whether no call's least time is a single piece of luck."""
        least = (sorted(times)[:2] for times in self.times.values())
        return all(second <= CONFIRMED * first for first, second in least)

    def round(self) -> list[tuple[str, Call]]:
        """All calls in a new order: none always inherits the caches of the same predecessor."""
        calls = list(self.calls.items())
        self.random.shuffle(calls)
        return calls

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            for name, call in self.round():
                start = time.perf_counter()
                call()
                self.times.setdefault(name, []).append(1e3 * (time.perf_counter() - start))


class _CudaRounds(_Rounds):
    def __init__(self, calls: Mapping[str, Call], device: torch.device) -> None:
        super().__init__(calls, device)
        self.flush = flush_buffer(device)

    def run(self, rounds: int) -> None:
        events: list[tuple[str, Any, Any]] = []
        for _ in range(rounds):
            for name, call in self.round():
                events.append((name, *events_around(call, self.flush)))
        torch.cuda.synchronize(self.device)
        for name, start, end in events:
            self.times.setdefault(name, []).append(start.elapsed_time(end))


def overhead_us(call: Call, device: torch.device, repeats: int) -> float:
    """CPU microseconds of one call, best of three batches; on CUDA without waiting for the GPU.

    There ``repeats`` calls must fit into the launch queue, which holds about a thousand kernels.
    """
    call()
    best = float("inf")
    for _ in range(3):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter() - start) / repeats)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e6 * best


def extra_bytes(call: Call, device: torch.device) -> int | None:
    """Most memory that a call holds beyond its operands and its result; None off CUDA."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    extra = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    del result
    return max(0, extra)
