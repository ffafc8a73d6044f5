"""Tensors to launches: the steady-state path of every CUDA call.

The first call of a shape plans, compiles and records what to launch; later ones look that record
up, allocate, and launch on PyTorch's current stream.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from convt3d import native, precision
from convt3d.cuda import ahead, cudnn, winners
from convt3d.cuda.plan import classes, plan_problem
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
    flipped,
    round_up,
)
from convt3d.geometry import Geometry
from convt3d.layer import Layer
from convt3d.layout import beyond_32_bits as beyond_32_bits
from convt3d.layout import empty, laid_out, strides
from convt3d.layout import reads_channels_last as _reads_channels_last
from convt3d.log import log_once

if TYPE_CHECKING:
    from convt3d.cuda.driver import Block


@functools.lru_cache(maxsize=1024)
def refusal(
    operation: str, geometry: Geometry, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why our kernels decline an operation on a device, in one sentence; None if they run it."""
    missing = missing_library()
    if missing is not None:
        return missing
    return plan_refusal(operation, geometry, dtype, torch.cuda.get_device_capability(device))


@functools.cache
def missing_library() -> str | None:
    """What keeps this machine from compiling or loading our kernels, in one sentence, or None."""
    if torch.version.hip is not None:  # its devices are called cuda, too
        return "this PyTorch is built for ROCm, and the kernels are for CUDA"
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


_MAX_GRID = 2**31 - 1
_WORKSPACE_ALIGNMENT = 256

TENSORS = ("source", "weight", "target", "bias")
"""The tensors of a call, in the order of their addresses."""


class Call:
    """Launches on tensors at any addresses.

    ``aligned`` says whether source, weight and target must start at multiples of 16 bytes.
    ``weight_offset`` is that of the kernels' first weight from the tensor's, in bytes.
    """

    __slots__ = (
        "_blocks",
        "_label",
        "_launches",
        "_scratch",
        "_slots",
        "_weight_offset",
        "aligned",
        "device",
        "problem",
        "sums_bias",
        "workspaces",
    )

    def __init__(
        self,
        launches: Sequence[tuple[Launch, Any]],
        workspaces: Mapping[str, int],
        aligned: Collection[str],
        device: int,
        label: str,
        problem: Problem,
        sums_bias: bool = False,
        weight_offset: int = 0,
    ) -> None:
        self._launches, self.device, self._label = tuple(launches), device, label
        self.problem, self.sums_bias, self._weight_offset = problem, sums_bias, weight_offset
        self._slots = {name: i for i, name in enumerate((*TENSORS, *workspaces))}
        self.workspaces = tuple(round_up(n, _WORKSPACE_ALIGNMENT) for n in workspaces.values())
        self._scratch = sum(self.workspaces)
        self.aligned = tuple(name in aligned for name in TENSORS[:3])
        # Blocks that no thread uses now, by stream. Lists are popped and appended to atomically.
        self._blocks: dict[int, list[Block]] = collections.defaultdict(list)

    def run(self, source: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
        """Launch on PyTorch's current stream of the device, which is the current one.

        Raises:
            RuntimeError: a launch failed; names the geometry.
            torch.cuda.OutOfMemoryError: no room for the workspaces.
        """
        at0, at1, at2 = source.data_ptr(), weight.data_ptr(), target.data_ptr()
        if (at0 | at1 | at2) % MAP_ALIGNMENT and self._misaligned(at0, at1, at2):
            source, weight, target = (
                aligned_copy(t) if aligned and t.data_ptr() % MAP_ALIGNMENT else t
                for aligned, t in zip(self.aligned, (source, weight, target), strict=True)
            )
            return self.run(source, weight, target, bias)
        stream = _current_stream(self.device)
        blocks = self._blocks[stream]
        block = blocks.pop() if blocks else self._block(stream)
        addresses = block.addresses
        addresses[0] = at0
        addresses[1] = at1 + self._weight_offset
        addresses[2] = at2
        addresses[3] = 0 if bias is None else bias.data_ptr()
        if self.workspaces:
            memory = self.place_workspaces(addresses, stream)
            try:
                block.launch()
            finally:
                _release(memory)
        else:
            block.launch()
        blocks.append(block)

    def _misaligned(self, *addresses: int) -> bool:
        pairs = zip(self.aligned, addresses, strict=True)
        return any(aligned and address % MAP_ALIGNMENT for aligned, address in pairs)

    def place_workspaces(self, addresses: memoryview, stream: int) -> Any:
        """Write the workspaces' addresses behind the tensors'; returns what is to be released."""
        memory = at = _acquire(self._scratch, stream)
        position = len(TENSORS)
        for size in self.workspaces:
            addresses[position] = at
            at += size
            position += 1
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

# Workspaces come from PyTorch's caching allocator without a tensor around them. Released at once:
# the allocator hands memory out again in the order of the stream.
_acquire: Callable[[int, int], int] = getattr(
    torch._C, "_cuda_cudaCachingAllocator_raw_alloc", torch.cuda.caching_allocator_alloc
)
_release: Callable[[int], None] = getattr(
    torch._C, "_cuda_cudaCachingAllocator_raw_delete", torch.cuda.caching_allocator_delete
)


@functools.cache
def _gpu(device: int) -> Gpu:
    return Gpu.of(device)


def bind_plan(
    plan: Plan,
    batch: int,
    input_size: Sequence[int],
    weight_strides: Sequence[int],
    device: int,
    weight_offset: int = 0,
) -> Call:
    """A plan's launches for one shape, compiled and loaded.

    ``weight_strides`` and ``weight_offset``, both in elements, describe the weight as the plan's
    problem sees it.

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
        schedule = schedule.suited_to(plan.problem.geometry.weight_size, weight_strides)
        launches = []
        for launch in schedule.launches:
            if launch.grid > _MAX_GRID:
                raise RuntimeError(f"{launch.grid} thread blocks exceed what one launch can hold")
            arguments = [named.get(a, a) if isinstance(a, str) else a for a in launch.arguments]
            dependent = launch.dependent and _gpu(device).capability >= (9, 0)
            launches.append(replace(launch, arguments=tuple(arguments), dependent=dependent))
        functions = driver.load(launches, device)
    except Exception as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        raise RuntimeError(f"convt3d could not prepare {label}: {error}") from error
    aligned = {*schedule.aligned, *(m.tensor for m in _maps(schedule))}
    # Copies of 16 bytes along the channels; kernels check the rows of W by themselves.
    aligned |= {"source"} if plan.problem.source_channels_last else set()
    aligned |= {"target"} if plan.problem.target_channels_last else set()
    bound = list(zip(launches, functions, strict=True))
    return Call(
        bound,
        schedule.workspaces,
        aligned,
        device,
        label,
        plan.problem,
        schedule.sums_bias,
        weight_offset * plan.problem.element_bytes,
    )


def _maps(schedule: Schedule) -> list[TensorMap]:
    arguments = [a for launch in schedule.launches for a in launch.arguments]
    return [a for a in arguments if isinstance(a, TensorMap)]


def aligned_copy(tensor: Tensor) -> Tensor:
    """A copy that starts where tensor maps may, with the strides that its launches have bound."""
    size, stride = tensor.size(), tensor.stride()
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class Prepared:
    """One operation at one shape, all decided: it allocates the result and launches."""

    __slots__ = ("_call", "_dtype", "_size", "_stride")

    def __init__(
        self,
        call: Call,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self._call, self._size, self._stride, self._dtype = call, size, stride, dtype

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """As :func:`forward`, on a dense x and b; their device is the current one."""
        y = _allocate(self._size, self._stride, self._dtype)
        self._call.run(x, w, y, b)
        return y

    def grad_input(self, gy: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """As :func:`grad_input`, on a dense gy and b; their device is the current one."""
        gx = _allocate(self._size, self._stride, self._dtype)
        self._call.run(gy, w, gx, b)
        if b is not None and not self._call.problem.bias:
            gx.add_(b.view(-1, 1, 1, 1))
        return gx

    def grad_weight(self, x: Tensor, gy: Tensor) -> Tensor:
        """As :func:`grad_weight`, on dense tensors; their device is the current one."""
        gw = _allocate(self._size, self._stride, self._dtype)
        self._call.run(x, gw, gy, None)
        return gw

    def grad_weight_bias(self, x: Tensor, gy: Tensor) -> tuple[Tensor, Tensor]:
        """As :func:`grad_weight_bias`, on dense tensors; their device is the current one."""
        if not self._call.sums_bias:
            return self.grad_weight(x, gy), native.grad_bias(gy)
        gw = _allocate(self._size, self._stride, self._dtype)
        gb = _allocate((gy.shape[1],), (1,), self._dtype)
        self._call.run(x, gw, gy, gb)
        return gw, gb


class Left:
    """The same where PyTorch's operator is faster: the members of :class:`Prepared`."""

    __slots__ = ("_channels_last", "_geometry", "_input_size")

    def __init__(self, geometry: Geometry, input_size: Sequence[int], channels_last: bool) -> None:
        self._geometry, self._input_size = geometry, input_size
        self._channels_last = channels_last

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        y = native.forward(x, w, b, self._geometry, self._channels_last)
        return laid_out(y, self._channels_last)

    def grad_input(self, gy: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        last = self._channels_last
        gx = native.grad_input(gy, w, self._geometry, self._input_size, last, b)
        return laid_out(gx, last)

    def grad_weight(self, x: Tensor, gy: Tensor) -> Tensor:
        gw = native.grad_weight(x, gy, self._geometry, self._channels_last)
        return laid_out(gw, self._channels_last)

    def grad_weight_bias(self, x: Tensor, gy: Tensor) -> tuple[Tensor, Tensor]:
        return self.grad_weight(x, gy), native.grad_bias(gy)


_prepared: dict[tuple[Any, ...], Prepared | Left] = {}
_MAX_PREPARED = 4096


def _prepare(
    operation: str,
    geometry: Geometry,
    source: Tensor,
    input_size: tuple[int, ...],
    layouts: tuple[bool, bool],
    weight_strides: tuple[int, ...],
    bias: bool = False,
) -> Prepared | Left:
    """What runs an operation.

    Args:
        operation: its name.
        geometry: the layer.
        source: of the shape, dtype and device that the prepared operation will see.
        input_size: spatial size (D, H, W) of the layer's input.
        layouts: whether source and target are channels_last.
        weight_strides: of the weight, or of the gradient by it.
        bias: whether there is one.

    Raises:
        RuntimeError: a kernel could not be compiled or loaded; names the geometry.
    """
    batch, dtype, device = source.shape[0], source.dtype, source.device.index
    arithmetic = precision.arithmetic_for(dtype, geometry.groups)
    benchmark = torch.backends.cudnn.benchmark
    key = (
        operation, geometry, batch, input_size, arithmetic, layouts, weight_strides, bias, device,
        benchmark,
    )  # fmt: skip
    found = _prepared.get(key)
    if found is None:
        problem = Problem(operation, geometry, arithmetic, *layouts, bias)
        if benchmark:
            _tune_once(problem, batch, input_size, source.device)
        reason = left_to_pytorch(problem, batch, input_size, _gpu(device), benchmark)
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        if reason is None:
            plan = plan_problem(problem, batch, input_size, _gpu(device))
            found = prepared_by(plan, problem, batch, input_size, weight_strides, dtype, device)
        else:
            log_once(f"PyTorch runs {operation} of {geometry.label}: {reason}")
            last = layouts[1] if operation != "grad_weight" else _is_last(weight_strides)
            found = Left(geometry, input_size, last)
        _prepared[key] = found
    return found


def prepared_by(
    plan: Plan,
    problem: Problem,
    batch: int,
    input_size: tuple[int, ...],
    weight_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: int,
) -> Prepared:
    """What runs a problem by a plan that is its own or that of its canonical form.

    Raises:
        RuntimeError: a kernel could not be compiled or loaded; names the geometry.
    """
    g = problem.geometry
    if plan.problem.operation == problem.operation:
        call = bind_plan(plan, batch, input_size, weight_strides, device)
    else:
        _, its_size = problem.canonical(input_size)
        its_strides, offset = flipped(g.weight_size, weight_strides)
        call = bind_plan(plan, batch, its_size, its_strides, device, offset)
    size: tuple[int, ...] = g.weight_size
    stride = weight_strides
    if problem.operation != "grad_weight":
        channels = g.in_channels
        if problem.operation == "forward":
            channels, input_size = g.out_channels, g.output_size(input_size)
        size = (batch, channels, *input_size)
        stride = strides(size, problem.target_channels_last)
    return Prepared(call, size, stride, dtype)


def left_to_pytorch(
    problem: Problem, batch: int, input_size: Sequence[int], gpu: Gpu, benchmark: bool
) -> str | None:
    """Why PyTorch's operator runs a problem that ours could run, in one sentence, or None.

    ``benchmark`` is PyTorch's switch of that name: then what was timed here decides.
    """
    if benchmark:
        times = cudnn.timed(problem, batch, input_size, gpu)
        if times is not None:
            return cudnn.reason_of(times)
    return cudnn.reason(problem, batch, input_size, gpu)


def _is_last(weight_strides: Sequence[int]) -> bool:
    """Whether strides as :func:`convt3d.layout.strides` gives them are channels_last."""
    return weight_strides[1] == 1 and weight_strides[1] < weight_strides[4]


def _tune_once(
    problem: Problem, batch: int, input_size: tuple[int, ...], device: torch.device
) -> None:
    """What ``torch.backends.cudnn.benchmark`` asks for, unless it was done before."""
    from convt3d.cuda import tuning

    if torch.cuda.is_current_stream_capturing():
        return
    gpu = _gpu(device.index)
    canonical, size = problem.canonical(input_size)
    try:
        if winners.recall(canonical, *classes(canonical, batch, size), gpu) is None:
            tuning.tune_here(canonical, batch, size, device, tuning.QUICK)
        if cudnn.timed(problem, batch, input_size, gpu) is None:
            times = tuning.beside_pytorch(problem, batch, input_size, device)
            cudnn.remember(problem, batch, input_size, gpu, times)
    except RuntimeError as error:  # out of memory, too: the heuristic's plan may fit
        log_once(f"{problem.operation} of {problem.geometry.label} is not tuned: {error}")


def _on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes a tensor's device the current one."""
    index = tensor.device.index
    return _NOTHING if index == torch.cuda.current_device() else torch.cuda.device(index)


_NOTHING = contextlib.nullcontext()


def forward(
    x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, channels_last: bool
) -> Tensor:
    """Output (N, C_out, D_out, H_out, W_out).

    Args:
        x: (N, C_in, D, H, W) on a CUDA device, float32, float16 or bfloat16.
        w: (C_in, C_out / groups, kD, kH, kW), any strides.
        b: (C_out,) or None.
        geometry: the checked layer.
        channels_last: layout of the output.

    Raises:
        RuntimeError: a kernel could not be compiled or loaded; names the geometry.
    """
    input_size = tuple(x.shape[2:])
    output_size = geometry.output_size(input_size)
    if beyond_32_bits(input_size, output_size):
        return Left(geometry, input_size, channels_last).forward(x, w, b)
    if x.numel() == 0:
        y = empty((x.shape[0], geometry.out_channels, *output_size), x, channels_last).zero_()
        return y if b is None else y.add_(b.view(-1, 1, 1, 1))
    source_last = _reads_channels_last(x)
    x, b = laid_out(x, source_last), None if b is None else b.contiguous()
    layouts = (source_last, channels_last)
    with _on_device(x):
        prepared = _prepare("forward", geometry, x, input_size, layouts, w.stride(), b is not None)
        return prepared.forward(x, w, b)


def grad_input(
    gy: Tensor,
    w: Tensor,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Gradient by the input, (N, C_in, D, H, W), from the output gradient and the weight.

    ``bias`` (C_in,) is added to it, as a Conv3d does.
    """
    size = tuple(int(n) for n in input_size)
    if beyond_32_bits(size, gy.shape[2:]):
        return Left(geometry, size, channels_last).grad_input(gy, w, bias)
    if gy.numel() == 0:
        gx = empty((gy.shape[0], geometry.in_channels, *size), gy, channels_last).zero_()
        return gx if bias is None else gx.add_(bias.view(-1, 1, 1, 1))
    source_last = _reads_channels_last(gy)
    gy, bias = laid_out(gy, source_last), None if bias is None else bias.contiguous()
    with _on_device(gy):
        layouts = (source_last, channels_last)
        with_bias = bias is not None
        prepared = _prepare("grad_input", geometry, gy, size, layouts, w.stride(), with_bias)
        return prepared.grad_input(gy, w, bias)


def grad_weight(x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool) -> Tensor:
    """Gradient by the weight, (C_in, C_out / groups, kD, kH, kW); the same bits on every run."""
    size = tuple(x.shape[2:])
    if beyond_32_bits(size, gy.shape[2:]):
        return Left(geometry, size, channels_last).grad_weight(x, gy)
    if x.numel() == 0 or gy.numel() == 0:
        return empty(geometry.weight_size, x, channels_last).zero_()
    layouts = (_reads_channels_last(x), _reads_channels_last(gy))
    x, gy = laid_out(x, layouts[0]), laid_out(gy, layouts[1])
    stride = strides(geometry.weight_size, channels_last)
    with _on_device(x):
        return _prepare("grad_weight", geometry, x, size, layouts, stride).grad_weight(x, gy)


def grad_weight_bias(
    x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool
) -> tuple[Tensor, Tensor]:
    """Gradients by the weight and by the bias, (C_out,), in one pass where that is cheaper."""
    prepared = prepare_grad_weight_bias(x, gy, geometry, channels_last)
    if prepared is None:
        return grad_weight(x, gy, geometry, channels_last), native.grad_bias(gy)
    return prepared(x, gy)


# What the steady state keeps: the functions above for tensors of one kind, with all decided. None
# where they have more to do than to allocate and launch.


def prepare_forward(
    x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, channels_last: bool
) -> Callable[..., Tensor] | None:
    """:func:`forward` for tensors of these shapes, strides, dtypes and device, or None."""
    size, source_last = tuple(x.shape[2:]), _reads_channels_last(x)
    if (
        not _at_once((x, source_last))
        or beyond_32_bits(size, geometry.output_size(size))
        or (b is not None and not b.is_contiguous())
    ):
        return None
    layouts = (source_last, channels_last)
    return _prepare("forward", geometry, x, size, layouts, w.stride(), b is not None).forward


def prepare_grad_input(
    gy: Tensor,
    w: Tensor,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    bias: Tensor | None = None,
) -> Callable[..., Tensor] | None:
    """:func:`grad_input` for tensors of these shapes, strides, dtypes and device, or None."""
    size, source_last = tuple(input_size), _reads_channels_last(gy)
    if (
        not _at_once((gy, source_last))
        or beyond_32_bits(size, gy.shape[2:])
        or (bias is not None and not bias.is_contiguous())
    ):
        return None
    layouts, with_bias = (source_last, channels_last), bias is not None
    return _prepare("grad_input", geometry, gy, size, layouts, w.stride(), with_bias).grad_input


def prepare_grad_weight(
    x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """:func:`grad_weight` for tensors of these shapes, strides, dtypes and device, or None."""
    size, layouts = tuple(x.shape[2:]), (_reads_channels_last(x), _reads_channels_last(gy))
    if not _at_once((x, layouts[0]), (gy, layouts[1])) or beyond_32_bits(size, gy.shape[2:]):
        return None
    stride = strides(geometry.weight_size, channels_last)
    return _prepare("grad_weight", geometry, x, size, layouts, stride).grad_weight


def prepare_grad_weight_bias(
    x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """:func:`grad_weight_bias` for tensors of these shapes, strides, dtypes and device, or None."""
    size, layouts = tuple(x.shape[2:]), (_reads_channels_last(x), _reads_channels_last(gy))
    if not _at_once((x, layouts[0]), (gy, layouts[1])) or beyond_32_bits(size, gy.shape[2:]):
        return None
    stride = strides(geometry.weight_size, channels_last)
    prepared = _prepare("grad_weight", geometry, x, size, layouts, stride, bias=True)
    return prepared.grad_weight_bias


def expect_gradients(layer: Layer, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Plan and compile the gradients of this call in the background, once for its kind."""
    ahead.expect_gradients(layer, input, weight, bias, _gpu)


def _at_once(*operands: tuple[Tensor, bool]) -> bool:
    """Whether tensors are dense in a layout, not empty, and on the current device."""
    return all(
        t.numel() > 0
        and t.device.index == torch.cuda.current_device()
        and t.is_contiguous(
            memory_format=torch.channels_last_3d if last else torch.contiguous_format
        )
        for t, last in operands
    )
