"""A plan's launches on tensors, on PyTorch's current stream.

:func:`bind_plan` compiles, loads and records what an operation launches for one shape, and the
:class:`Call` that it gives launches it on tensors at any addresses.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from convt3d.cuda.compiler import CompilationError
from convt3d.cuda.epilogue import NO_EPILOGUE, OPERANDS, Epilogue
from convt3d.cuda.operation import Operation
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
from convt3d.log import log_once

if TYPE_CHECKING:
    from convt3d.cuda.driver import Block

_MAX_GRID = 2**31 - 1
_WORKSPACE_ALIGNMENT = 256

TENSORS = ("source", "weight", "target", "bias", *OPERANDS)
"""The tensors of a call, in the order of their addresses."""


class Call:
    """Launches on tensors at any addresses.

    ``aligned`` says whether source, weight and target must start at multiples of 16 bytes.
    ``weight_offset`` is that of the kernels' first weight from the tensor's, in bytes; ``epilogue``
    is what the kernels run beside a bias of their own.
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
        "epilogue",
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
        epilogue: Epilogue = NO_EPILOGUE,
    ) -> None:
        self.epilogue = epilogue
        self._launches, self.device, self._label = tuple(launches), device, label
        self.problem, self.sums_bias, self._weight_offset = problem, sums_bias, weight_offset
        self._slots = {name: i for i, name in enumerate((*TENSORS, *workspaces))}
        self.workspaces = tuple(round_up(n, _WORKSPACE_ALIGNMENT) for n in workspaces.values())
        self._scratch = sum(self.workspaces)
        self.aligned = tuple(name in aligned for name in TENSORS[:3])
        # Blocks that no thread uses now, by stream. Lists are popped and appended to atomically.
        self._blocks: dict[int, list[Block]] = collections.defaultdict(list)

    def run(
        self,
        source: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        operands: Sequence[Tensor] = (),
    ) -> None:
        """Launch on PyTorch's current stream of the device, which is the current one.

        ``operands`` are those of the epilogue's steps. A target that is written starts aligned.

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
            return self.run(source, weight, target, bias, operands)
        stream = _current_stream(self.device)
        blocks = self._blocks[stream]
        block = blocks.pop() if blocks else self._block(stream)
        addresses = block.addresses
        addresses[0] = at0
        addresses[1] = at1 + self._weight_offset
        addresses[2] = at2
        addresses[3] = 0 if bias is None else bias.data_ptr()
        for i, operand in enumerate(operands, 4):
            addresses[i] = operand.data_ptr()
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


allocate = _allocator()

# Workspaces come from PyTorch's caching allocator without a tensor around them. Released at once:
# the allocator hands memory out again in the order of the stream.
_acquire: Callable[[int, int], int] = getattr(
    torch._C, "_cuda_cudaCachingAllocator_raw_alloc", torch.cuda.caching_allocator_alloc
)
_release: Callable[[int], None] = getattr(
    torch._C, "_cuda_cudaCachingAllocator_raw_delete", torch.cuda.caching_allocator_delete
)


@functools.cache
def gpu_of(device: int) -> Gpu:
    """Properties of a CUDA device by its index."""
    return Gpu.of(device)


def bind_plan(plan: Plan, operation: Operation) -> Call:
    """What an operation launches by a plan, compiled and loaded; what of its epilogue is left is
    logged.

    Raises:
        CompilationError: a kernel could not be compiled; names the geometry.
        RuntimeError: it could not be loaded; names the geometry.
    """
    import numpy as np

    from convt3d.cuda import driver

    label, device = operation.label, cast(int, operation.device)
    try:
        driver.bind_context(device)
        found = operation.launched_by(plan)
        schedule = found.schedule
        named = dict(zip(WEIGHT_STRIDES, map(np.int64, found.weight_strides), strict=True))
        gpu = gpu_of(device)
        launches = []
        for launch in schedule.launches:
            if launch.grid > _MAX_GRID:
                raise RuntimeError(f"{launch.grid} thread blocks exceed what one launch can hold")
            arguments = [named.get(a, a) if isinstance(a, str) else a for a in launch.arguments]
            launches.append(replace(launch.on(gpu), arguments=tuple(arguments)))
        functions = driver.load(launches, device)
    except Exception as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        kind = CompilationError if isinstance(error, CompilationError) else RuntimeError
        raise kind(f"convt3d could not prepare {label}: {error}") from error
    if found.left:
        name = f"{operation.name} of {operation.geometry.label}"
        log_once(f"{name} is followed by passes of PyTorch: {found.left}")
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
        found.weight_offset * plan.problem.element_bytes,
        found.epilogue,
    )


def _maps(schedule: Schedule) -> list[TensorMap]:
    arguments = [a for launch in schedule.launches for a in launch.arguments]
    return [a for a in arguments if isinstance(a, TensorMap)]


def aligned_copy(tensor: Tensor) -> Tensor:
    """A copy that starts where tensor maps may, with the strides that its launches have bound."""
    size, stride = tensor.size(), tensor.stride()
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
