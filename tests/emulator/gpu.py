"""The package's CUDA backend on an emulated GPU.

Inside ``EmulatedGpu``, ``convt3d.cuda.backend`` takes CPU tensors: it plans, binds arguments and
allocates as on a GPU, and its launches run in the emulator. Every tensor that is allocated
uninitialised meanwhile is poisoned, so outputs and workspaces that a kernel should have written and
did not are NaN.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any
from unittest import mock

import numpy as np
import torch
from cuda.bindings.driver import CUresult
from torch.utils._python_dispatch import TorchDispatchMode

from convt3d import precision
from convt3d.cuda import backend, cudnn, driver, launch, operation, prepared
from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.schedule import Gpu, Launch
from convt3d.cuda.schedule import TensorMap as Described
from convt3d.precision import Arithmetic

from . import harness
from .arena import SPARSE
from .packing import Inside
from .tensor_map import TensorMap

_UNINITIALISED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}


class _Allocations(TorchDispatchMode):
    """Keeps every tensor that operators return, and poisons those they leave uninitialised.

    Those of more than ``SPARSE`` bytes are not: their memory is there once it is touched.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = list(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            if func in _UNINITIALISED and result.nbytes <= SPARSE:
                harness.poison(result)
            self.tensors.append(result)
        return result

    def at(self, address: int) -> torch.Tensor:
        """The tensor that starts at an address; the latest, where memory was used again."""
        pointer = self.around(address)
        if isinstance(pointer, Inside):
            raise harness.EmulatorError(f"no tensor starts at {address:#x}")
        return pointer

    def around(self, address: int) -> torch.Tensor | Inside:
        """The tensor that starts at an address, else one that has it inside."""
        for tensor in reversed(self.tensors):
            if tensor.data_ptr() == address:
                return tensor
        for tensor in reversed(self.tensors):
            offset = address - tensor.data_ptr()
            reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            if 0 < offset <= reach * tensor.element_size():
                return Inside(tensor, offset)
        raise harness.EmulatorError(f"a pointer argument ({address:#x}) is not a tensor's address")


@dataclass
class EmulatedGpu:
    """Context manager; ``launches`` lists the kernels that ran, in order.

    Args:
        tensors: the inputs of the calls made inside.
        plan: picks the plan of a problem, in place of the package's cost models.
        arithmetic: in place of what PyTorch's switches ask for.
        edit: (file, flattened text) to another text, before it is compiled (mutation tests).
        options: for ``harness.launch``.
    """

    tensors: Sequence[torch.Tensor]
    plan: Callable[..., Any] | None = None
    arithmetic: Arithmetic | None = None
    edit: Callable[[str, str], str] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    launches: list[KernelSpec] = field(default_factory=list)
    _touched: harness.Touched = field(default_factory=dict, init=False)

    def __enter__(self) -> EmulatedGpu:
        self._stack = contextlib.ExitStack()

        def replace(owner: Any, name: str, value: Any) -> None:
            self._stack.enter_context(mock.patch.object(owner, name, value))

        # The driver's side. A function is its launch. A CPU tensor's device has no index: None is
        # the emulated GPU's number.
        replace(driver, "load", lambda launches, _: launches)
        replace(driver, "bind_context", lambda _: None)
        replace(driver, "encode", self._encode)
        replace(driver, "launch_kernel", self._launch)
        replace(torch.cuda, "current_device", lambda: None)
        # The package's.
        replace(launch, "_current_stream", lambda _: 0)
        replace(launch.Call, "place_workspaces", _workspaces_apart)
        replace(launch, "_release", lambda _: None)
        replace(Gpu, "of", lambda _: Gpu())
        replace(backend, "_prepared", {})
        replace(prepared, "allocate", _allocate)
        replace(cudnn, "left_to_pytorch", lambda *_: None)
        if self.plan is not None:
            replace(operation, "plan_problem", self.plan)
        if self.arithmetic is not None:
            replace(precision, "arithmetic_for", lambda *_: self.arithmetic)
        self._memory = self._stack.enter_context(_Allocations(self.tensors))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _encode(self, described: Described, address: int) -> bytes:
        """As the driver encodes tensor maps; the address lies where the emulator looks for it."""
        encoded = self._map(described, address).encode()
        at = TensorMap.POINTER_AT
        return encoded[:at] + address.to_bytes(8, "little") + encoded[at + 8 :]

    def _map(self, described: Described, address: int) -> TensorMap:
        values = {f.name: getattr(described, f.name) for f in fields(Described)}
        return TensorMap(**values | {"tensor": self._memory.at(address)})

    def _launch(self, configuration: Any, launch: Launch, parameters: int, _: Any) -> Any:
        spec = launch.kernel
        text = harness.kernel_text(spec.file)
        if self.edit is not None:
            text = self.edit(spec.file, text)
        pointers = (ctypes.c_uint64 * len(launch.arguments)).from_address(parameters)
        args = [self._argument(a, p) for a, p in zip(launch.arguments, pointers, strict=True)]
        with torch.utils._python_dispatch._disable_current_modes():
            earlier = self._touched if launch.dependent else None
            touched = harness.launch(
                spec.entry, text, spec.macros, configuration.gridDimX, configuration.blockDimX,
                configuration.sharedMemBytes, args, earlier=earlier, **self.options,
            )  # fmt: skip
        # Of dependent launches, each may still run when the next but one starts.
        before = earlier or {}
        self._touched = {
            at: before.get(at, 0) | touched.get(at, 0) for at in before.keys() | touched.keys()
        }
        self.launches.append(spec)
        return (CUresult.CUDA_SUCCESS,)

    def _argument(self, described: Any, pointer: int) -> Any:
        """An argument as it lies in the parameter block, where the driver would read it."""
        if isinstance(described, Described):
            data = ctypes.string_at(pointer, 128)
            address = int.from_bytes(data[TensorMap.POINTER_AT :][:8], "little")
            if data != self._encode(described, address):
                raise harness.EmulatorError(f"{described}: other bytes in the parameter block")
            return self._map(described, address)
        if isinstance(described, np.generic):
            data = ctypes.string_at(pointer, described.itemsize)
            return np.frombuffer(data, described.dtype)[0]
        address = ctypes.c_uint64.from_address(pointer).value
        return self._memory.around(address) if address else 0


def _allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _workspaces_apart(call: launch.Call, addresses: memoryview, stream: int) -> Any:
    """Each workspace is an allocation of its own, so that accesses beyond its ends are seen."""
    memory = [torch.empty(size, dtype=torch.uint8) for size in call.workspaces]
    for position, workspace in enumerate(memory, len(launch.TENSORS)):
        addresses[position] = workspace.data_ptr()
    return memory
