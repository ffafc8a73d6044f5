"""Tensors to launches: the steady-state path of every CUDA call.

The first call of a shape plans, compiles and records what to launch; later ones look that record
up, allocate, and launch on PyTorch's current stream.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from convt3d import native, precision
from convt3d.cuda import compiler
from convt3d.cuda.plan import plan_problem
from convt3d.cuda.plan import refusal as plan_refusal
from convt3d.cuda.schedule import Gpu, Plan, Problem, Schedule
from convt3d.geometry import Geometry
from convt3d.layout import empty, laid_out, result_channels_last

_MAX_GRID = 2**31 - 1


@functools.lru_cache(maxsize=1024)
def refusal(
    operation: str, geometry: Geometry, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why our kernels decline an operation on a device, in one sentence; None if they run it."""
    missing = _missing_library()
    if missing is not None:
        return missing
    return plan_refusal(operation, geometry, dtype, torch.cuda.get_device_capability(device))


@functools.cache
def _missing_library() -> str | None:
    try:
        import cuda.bindings.driver
        import cuda.bindings.nvrtc
        import cuda.core

        cuda.bindings.nvrtc.nvrtcVersion()
    except Exception as error:
        return (
            f"NVRTC or its Python bindings are missing ({error}); PyTorch's operator runs instead: "
            "pip install convt3d[cu12] or convt3d[cu13] adds them"
        )
    return None


@dataclass
class _Launch:
    kernel: Any
    config: Any
    names: tuple[str, ...]
    numbers: tuple[Any, ...]


@dataclass
class _Call:
    """Everything about one call that does not depend on addresses."""

    launches: tuple[_Launch, ...]
    workspaces: tuple[tuple[str, int], ...]


_calls: dict[tuple[Any, ...], _Call] = {}
_MAX_CALLS = 4096


@functools.cache
def _gpu(device: int) -> Gpu:
    return Gpu.of(device)


class _Bound(threading.local):
    """The devices whose context the driver has seen in this thread; autograd has its own."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_bound = _Bound()


def _bind_context(device: int) -> None:
    """Make PyTorch's context current for the driver, once a thread and device."""
    from cuda.core import Device

    Device(device).set_current()
    _bound.devices.add(device)


@functools.cache
def _stream(handle: int) -> Any:
    from cuda.core import Stream

    return Stream.from_handle(handle)


def _prepare(
    problem: Problem,
    batch: int,
    input_size: tuple[int, ...],
    weight_strides: Sequence[int],
    device: int,
) -> _Call:
    _bind_context(device)
    plan = plan_problem(problem, batch, input_size, _gpu(device))
    return bind_plan(plan, batch, input_size, weight_strides, device)


def bind_plan(
    plan: Plan,
    batch: int,
    input_size: Sequence[int],
    weight_strides: Sequence[int],
    device: int,
) -> _Call:
    """A plan's launches for one shape, compiled and loaded.

    Raises:
        RuntimeError: a kernel could not be compiled or loaded; names the geometry.
    """
    import numpy as np

    schedule: Schedule = plan.schedule(batch, input_size)
    named = dict(
        zip(
            (f"weight_stride_{axis}" for axis in ("in", "out", "d", "h", "w")),
            map(np.int64, weight_strides),
            strict=False,
        )
    )
    launches = []
    try:
        for launch in schedule.launches:
            if launch.grid > _MAX_GRID:
                raise RuntimeError(f"{launch.grid} thread blocks exceed what one launch can hold")
            launches.append(_bind(launch, named, device))
    except Exception as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        raise RuntimeError(
            f"convt3d could not prepare {plan.problem.operation} of "
            f"{plan.problem.geometry.label} for input size {tuple(input_size)}: {error}"
        ) from error
    return _Call(tuple(launches), tuple(schedule.workspaces.items()))


def _bind(launch: Any, named: dict[str, Any], device: int) -> _Launch:
    from cuda.core import LaunchConfig

    loaded = compiler.load(launch.kernel, device, launch.shared_bytes)
    config = LaunchConfig(grid=launch.grid, block=launch.block, shmem_size=launch.shared_bytes)
    arguments = [named.get(a, a) if isinstance(a, str) else a for a in launch.arguments]
    names = tuple(a for a in arguments if isinstance(a, str))
    if arguments[: len(names)] != list(names):
        raise AssertionError("kernels take their pointers first")
    return _Launch(loaded.kernel, config, names, tuple(arguments[len(names) :]))


def _call_for(
    operation: str,
    geometry: Geometry,
    batch: int,
    input_size: tuple[int, ...],
    dtype: torch.dtype,
    layouts: tuple[bool, bool],
    bias: bool,
    weight_strides: tuple[int, ...],
    device: int,
) -> _Call:
    arithmetic = precision.arithmetic_for(dtype, geometry.groups)
    key = (
        operation, geometry, batch, input_size, arithmetic, layouts, bias, weight_strides, device
    )  # fmt: skip
    call = _calls.get(key)
    if call is None:
        problem = Problem(operation, geometry, arithmetic, *layouts, bias)
        call = _prepare(problem, batch, input_size, weight_strides, device)
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        _calls[key] = call
    return call


def run_call(call: _Call, tensors: dict[str, int], device: int, like: Tensor) -> None:
    """Launch on PyTorch's current stream; ``tensors`` are addresses by name."""
    from cuda.core import launch

    if device not in _bound.devices:
        _bind_context(device)
    scratch = []
    for name, size in call.workspaces:
        workspace = torch.empty(size, dtype=torch.uint8, device=like.device)
        tensors[name] = workspace.data_ptr()
        scratch.append(workspace)
    stream = _stream(torch._C._cuda_getCurrentRawStream(device))
    for item in call.launches:
        launch(stream, item.config, item.kernel, *[tensors[n] for n in item.names], *item.numbers)


def _dense(t: Tensor, channels_last: bool) -> Tensor:
    """The tensor itself if it is dense in this layout and aligned, else a copy that is."""
    t = laid_out(t, channels_last)
    # Copies of 16 bytes along the channels need an aligned start; rows of W are checked on the GPU.
    return t.clone() if channels_last and t.data_ptr() % 16 else t


def _reads_channels_last(t: Tensor) -> bool:
    """Whether to read an operand as channels_last; what is both, or neither, is read as NCDHW."""
    return not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last_3d)


def beyond_32_bits(*sizes: Sequence[int]) -> bool:
    """Whether one channel passes 2^31 elements: kernels count positions in 32 bits."""
    return any(d * h * w >= 2**31 for d, h, w in sizes)


def _execute(
    operation: str,
    geometry: Geometry,
    input_size: tuple[int, ...],
    layouts: tuple[bool, bool],
    tensors: dict[str, Tensor],
) -> None:
    """Run an operation on dense tensors, named as kernels name them, on their own device.

    ``layouts`` says whether source and target are channels_last.
    """
    source, weight = tensors["source"], tensors["weight"]
    device = source.device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _execute(operation, geometry, input_size, layouts, tensors)
    call = _call_for(
        operation, geometry, source.shape[0], input_size, source.dtype, layouts,
        "bias" in tensors, weight.stride(), device,
    )  # fmt: skip
    addresses = {name: t.data_ptr() for name, t in tensors.items()}
    addresses.setdefault("bias", 0)
    run_call(call, addresses, device, source)


def forward(x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry) -> Tensor:
    """Output (N, C_out, D_out, H_out, W_out) in the layout that PyTorch would give it.

    Args:
        x: (N, C_in, D, H, W) on a CUDA device, float32, float16 or bfloat16.
        w: (C_in, C_out / groups, kD, kH, kW), any strides.
        b: (C_out,) or None.
        geometry: the checked layer.

    Raises:
        RuntimeError: a kernel could not be compiled or loaded; names the geometry.
    """
    channels_last = result_channels_last(x, w)
    input_size = tuple(x.shape[2:])
    output_size = geometry.output_size(input_size)
    if beyond_32_bits(input_size, output_size):
        return native.forward(x, w, b, geometry)
    y = empty((x.shape[0], geometry.out_channels, *output_size), x, channels_last)
    if y.numel() == 0:
        return y
    if x.numel() == 0:
        y.zero_()
        return y if b is None else y.add_(b.view(-1, 1, 1, 1))
    source_last = _reads_channels_last(x)
    tensors = {"source": _dense(x, source_last), "weight": w, "target": y}
    if b is not None:
        tensors["bias"] = b.contiguous()
    _execute("forward", geometry, input_size, (source_last, channels_last), tensors)
    return y


def grad_input(
    gy: Tensor, w: Tensor, geometry: Geometry, input_size: Sequence[int], channels_last: bool
) -> Tensor:
    """Gradient by the input, (N, C_in, D, H, W), from the output gradient and the weight."""
    size = tuple(int(n) for n in input_size)
    if beyond_32_bits(size, gy.shape[2:]):
        return native.grad_input(gy, w, geometry, size, channels_last)
    gx = empty((gy.shape[0], geometry.in_channels, *size), gy, channels_last)
    if gx.numel() == 0:
        return gx
    if gy.numel() == 0:
        return gx.zero_()
    source_last = _reads_channels_last(gy)
    tensors = {"source": _dense(gy, source_last), "weight": w, "target": gx}
    _execute("grad_input", geometry, size, (source_last, channels_last), tensors)
    return gx


def grad_weight(x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool) -> Tensor:
    """Gradient by the weight, (C_in, C_out / groups, kD, kH, kW); the same bits on every run."""
    if beyond_32_bits(x.shape[2:], gy.shape[2:]):
        return native.grad_weight(x, gy, geometry, channels_last)
    gw = empty(geometry.weight_size, x, channels_last)
    if gw.numel() == 0:
        return gw
    if x.numel() == 0 or gy.numel() == 0:
        return gw.zero_()
    layouts = (_reads_channels_last(x), _reads_channels_last(gy))
    tensors = {"source": _dense(x, layouts[0]), "weight": gw, "target": _dense(gy, layouts[1])}
    _execute("grad_weight", geometry, tuple(x.shape[2:]), layouts, tensors)
    return gw
