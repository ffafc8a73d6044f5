"""Tensors to launches: the steady-state path of every CUDA call.

The first call of a shape plans, compiles and records what to launch; later ones look that record
up, allocate, and launch on PyTorch's current stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from convt3d import native, precision
from convt3d.cuda.plan import plan_problem
from convt3d.cuda.plan import refusal as plan_refusal
from convt3d.cuda.schedule import (
    MAP_ALIGNMENT,
    WEIGHT_STRIDES,
    Gpu,
    Launch,
    Plan,
    Problem,
    Schedule,
    TensorMap,
    round_up,
)
from convt3d.geometry import Geometry
from convt3d.layout import empty, laid_out, result_channels_last

if TYPE_CHECKING:
    from convt3d.cuda.driver import Block


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

        _, nvrtc, _ = cuda.bindings.nvrtc.nvrtcVersion()
    except Exception as error:
        return (
            f"NVRTC or its Python bindings are missing ({error}); PyTorch's operator runs instead: "
            "pip install convt3d[cu12] or convt3d[cu13] adds them"
        )
    if torch.cuda.is_available():  # else this asks what a GPU would do
        _, driver = cuda.bindings.driver.cuDriverGetVersion()
        if driver // 1000 < nvrtc:
            return (
                f"NVRTC is of CUDA {nvrtc}, and the driver of CUDA {driver // 1000} cannot load "
                "what it compiles: update the driver, or install the NVRTC of that CUDA"
            )
    return None


_calls: dict[tuple[Any, ...], Call] = {}
_MAX_CALLS = 4096
_MAX_GRID = 2**31 - 1
_WORKSPACE_ALIGNMENT = 256

TENSORS = ("source", "weight", "target", "bias")
"""The tensors of a call, in the order of their addresses."""


class Call:
    """Everything about one call that does not depend on addresses.

    ``aligned`` says whether the addresses of source, weight and target must be multiples of 16.
    """

    __slots__ = ("_blocks", "_label", "_launches", "_slots", "aligned", "device", "workspaces")

    def __init__(
        self,
        launches: Sequence[tuple[Launch, Any]],
        workspaces: Mapping[str, int],
        aligned: Collection[str],
        device: int,
        label: str,
    ) -> None:
        self._launches, self.device, self._label = tuple(launches), device, label
        self._slots = {name: i for i, name in enumerate((*TENSORS, *workspaces))}
        self.workspaces = tuple(workspaces.values())
        self.aligned = tuple(name in aligned for name in TENSORS[:3])
        # Blocks that no thread uses now, by stream. Lists are popped and appended to atomically.
        self._blocks: dict[int, list[Block]] = {}

    def run(self, source: int, weight: int, target: int, bias: int) -> None:
        """Launch on PyTorch's current stream of the device, which is current; takes addresses.

        Raises:
            RuntimeError: a launch failed; names the geometry.
            torch.cuda.OutOfMemoryError: no room for the workspaces.
        """
        stream = _current_stream(self.device)
        blocks = self._blocks.get(stream)
        if blocks is None:
            blocks = self._blocks.setdefault(stream, [])
        block = blocks.pop() if blocks else self._block(stream)
        addresses = block.addresses
        addresses[0], addresses[1], addresses[2], addresses[3] = source, weight, target, bias
        memory = self.place_workspaces(addresses) if self.workspaces else None
        block.launch()
        blocks.append(block)
        del memory  # to the allocator, which hands it out again in the order of the stream

    def place_workspaces(self, addresses: memoryview) -> Any:
        """Write the workspaces' addresses behind the tensors'; returns what keeps them alive."""
        size = sum(round_up(n, _WORKSPACE_ALIGNMENT) for n in self.workspaces)
        memory = _allocate((size,), (1,), torch.uint8)
        at = memory.data_ptr()
        for position, n in enumerate(self.workspaces, len(TENSORS)):
            addresses[position] = at
            at += round_up(n, _WORKSPACE_ALIGNMENT)
        return memory

    def _block(self, stream: int) -> Block:
        from convt3d.cuda.driver import Block

        return Block(self._launches, self._slots, self.device, stream, self._label)


_current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda _: torch.cuda.current_stream().cuda_stream
)
"""Handle of PyTorch's current stream on a device (absent in CPU builds of PyTorch)."""


def _allocator() -> Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]:
    """Uninitialised tensors (size, stride, dtype) on the current CUDA device, as fast as can be."""
    # What Inductor's generated code calls: a third of the time of torch.empty.
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    fast = getattr(guards, "_empty_strided_cuda", None)
    if fast is not None:
        return fast
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda")


_allocate = _allocator()


@functools.cache
def _gpu(device: int) -> Gpu:
    return Gpu.of(device)


def _prepare(
    problem: Problem,
    batch: int,
    input_size: tuple[int, ...],
    weight_strides: Sequence[int],
    device: int,
) -> Call:
    plan = plan_problem(problem, batch, input_size, _gpu(device))
    return bind_plan(plan, batch, input_size, weight_strides, device)


def bind_plan(
    plan: Plan,
    batch: int,
    input_size: Sequence[int],
    weight_strides: Sequence[int],
    device: int,
) -> Call:
    """A plan's launches for one shape, compiled and loaded.

    Raises:
        RuntimeError: a kernel could not be compiled or loaded; names the geometry.
    """
    import numpy as np

    from convt3d.cuda import driver

    named = dict(zip(WEIGHT_STRIDES, map(np.int64, weight_strides), strict=True))
    label = f"{plan.problem.operation} of {plan.problem.geometry.label}"
    label += f" for input size {tuple(input_size)}"
    try:
        driver.bind_context(device)
        schedule = plan.schedule(batch, input_size)
        launches = []
        for launch in schedule.launches:
            if launch.grid > _MAX_GRID:
                raise RuntimeError(f"{launch.grid} thread blocks exceed what one launch can hold")
            arguments = [named.get(a, a) if isinstance(a, str) else a for a in launch.arguments]
            launch = replace(launch, arguments=tuple(arguments))
            launches.append((launch, driver.load(launch, device)))
    except Exception as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        raise RuntimeError(f"convt3d could not prepare {label}: {error}") from error
    aligned = {*schedule.aligned, *(m.tensor for m in _maps(schedule))}
    return Call(launches, schedule.workspaces, aligned, device, label)


def _maps(schedule: Schedule) -> list[TensorMap]:
    arguments = [a for launch in schedule.launches for a in launch.arguments]
    return [a for a in arguments if isinstance(a, TensorMap)]


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
) -> Call:
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


def run_call(call: Call, tensors: Mapping[str, Tensor]) -> None:
    """Launch on tensors by name, on PyTorch's current stream; bias may be absent."""
    # A tensor map, or copies of 16 bytes, need an aligned start. Results are new, so never copied.
    source, weight, target = (
        t.clone() if aligned and t.data_ptr() % MAP_ALIGNMENT else t
        for aligned, t in zip(call.aligned, map(tensors.__getitem__, TENSORS[:3]), strict=True)
    )
    bias = tensors.get("bias")
    call.run(
        source.data_ptr(),
        weight.data_ptr(),
        target.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )


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
    run_call(call, tensors)


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
