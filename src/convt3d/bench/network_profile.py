"""The share of convolutions in a step of a network, by PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_OPERATORS = ("aten::convolution", "aten::convolution_backward")
_KERNELS = "convt3d_"  # what the names of all our kernels begin with


def convolution_share(call: Callable[[], Any], device: torch.device, ours: bool) -> dict[str, Any]:
    """Milliseconds in convolutions of one call, and their share of all its work.

    On CUDA, those of kernels: all that PyTorch's operators for convolutions launch, copies between
    formats included, and all of ours. On CPU, those in PyTorch's operators; of a network with our
    layers (``ours``) None, because forms that are no convolutions run some of them.
    """
    on_cuda = device.type == "cuda"
    nothing = {"conv_ms": None, "conv_share": None}
    if ours and not on_cuda:
        return nothing
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
    with profile(activities=activities) as profiler:
        call()
        if on_cuda:
            torch.cuda.synchronize(device)
    averages = {average.key: average for average in profiler.key_averages()}
    found = [averages[name] for name in _OPERATORS if name in averages]
    if on_cuda:
        kernels = [
            event
            for event in profiler.events() or ()
            if event.device_type == DeviceType.CUDA and not _annotates(event)
        ]
        total = sum(event.time_range.elapsed_us() for event in kernels)
        mine = (e.time_range.elapsed_us() for e in kernels if _KERNELS in e.name)
        part = sum(average.device_time_total for average in found) + sum(mine)
    else:
        total = sum(average.self_cpu_time_total for average in averages.values())
        part = sum(average.cpu_time_total for average in found)
    if not total:
        return nothing
    return {"conv_ms": float(f"{part / 1e3:.5g}"), "conv_share": float(f"{part / total:.3g}")}


def _annotates(event: Any) -> bool:
    """Whether an event names a range of others rather than a kernel."""
    names = ("Optimizer.", "ProfilerStep", "Torch-Compiled", "## Call")
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith(names)
