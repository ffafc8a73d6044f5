"""Times candidate plans on the GPU."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from convt3d.cuda import launch
from convt3d.cuda.schedule import Plan


def runner(
    plan: Plan, batch: int, input_size: Sequence[int], tensors: Mapping[str, Tensor]
) -> Callable[[], None]:
    """A function that launches a plan on given tensors (source, target, weight, bias by name)."""
    device = tensors["source"].device.index
    call = launch.bind_plan(plan, batch, input_size, tensors["weight"].stride(), device)
    operands = (tensors["source"], tensors["weight"], tensors["target"], tensors.get("bias"))
    return functools.partial(call.run, *operands)


def milliseconds(run: Callable[[], None], repeats: int = 20, flush: Tensor | None = None) -> float:
    """Median device time of one call; ``flush`` is overwritten before each to empty the cache."""
    run()
    times = []
    for _ in range(repeats):
        if flush is not None:
            flush.zero_()
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times)
