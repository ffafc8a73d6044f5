"""Device time of calls: with a cold L2 cache, and without what the host takes to launch them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FLUSH_BYTES = 256 << 20  # several times the L2 cache of any GPU
AHEAD_CYCLES = 600_000  # of a device that sleeps: 0.3 ms, in which the host launches most calls

Events = tuple[torch.cuda.Event, torch.cuda.Event]


def flush_buffer(device: torch.device | int) -> Tensor:
    """A tensor that fills a GPU's L2 cache when it is written."""
    return torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)


def events_around(call: Callable[[], object], flush: Tensor | None = None) -> Events:
    """Enqueues a call between two events: the time between them is the call's, once it has run.

    Before the call the device sleeps while the host gets ahead, and then ``flush`` is written, if
    given, so that nothing the call reads is in L2.
    """
    torch.cuda._sleep(AHEAD_CYCLES)
    if flush is not None:
        flush.zero_()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    return begin, end
