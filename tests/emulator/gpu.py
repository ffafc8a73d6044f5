"""The package's CUDA backend on an emulated GPU.

Inside ``EmulatedGpu``, ``convt3d.cuda.launch`` takes CPU tensors: it plans, binds arguments and
allocates as on a GPU, and its launches run in the emulator. Every tensor that is allocated
uninitialised meanwhile is poisoned, so outputs and workspaces that a kernel should have written and
did not are NaN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from convt3d.cuda import compiler, launch
from convt3d.cuda.compiler import KernelSpec, LoadedKernel
from convt3d.cuda.schedule import Gpu
from convt3d.precision import Arithmetic

from . import harness

_UNINITIALISED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}

#: A stream handle that no CUDA stream has, whatever the package remembers by handle.
_NO_STREAM = -1


class _Allocations(TorchDispatchMode):
    """Keeps every tensor that operators return, and poisons those they leave uninitialised."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = list(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            if func in _UNINITIALISED:
                harness.poison(result)
            self.tensors.append(result)
        return result

    def at(self, address: int) -> torch.Tensor:
        """The tensor that starts at an address; the latest, where memory was used again."""
        for tensor in reversed(self.tensors):
            if tensor.data_ptr() == address:
                return tensor
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

    def __enter__(self) -> EmulatedGpu:
        import cuda.core

        self._stack = contextlib.ExitStack()

        def replace(owner: Any, name: str, value: Any, create: bool = False) -> None:
            self._stack.enter_context(mock.patch.object(owner, name, value, create=create))

        # The driver's side. A CPU tensor's device has no index: None is the emulated GPU's number.
        replace(cuda.core, "launch", self._launch)
        replace(cuda.core, "Device", mock.MagicMock())
        replace(cuda.core, "Stream", mock.MagicMock())
        replace(torch.cuda, "current_device", lambda: None)
        replace(torch._C, "_cuda_getCurrentRawStream", lambda _: _NO_STREAM, create=True)
        # The package's.
        replace(compiler, "load", lambda spec, *_: LoadedKernel(spec, None))
        replace(Gpu, "of", lambda _: Gpu())
        replace(launch, "_calls", {})
        if self.plan is not None:
            replace(launch, "plan_problem", self.plan)
        if self.arithmetic is not None:
            replace(launch.precision, "arithmetic_for", lambda *_: self.arithmetic)
        self._memory = self._stack.enter_context(_Allocations(self.tensors))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _launch(self, stream: Any, config: Any, spec: KernelSpec, *arguments: Any) -> None:
        text = harness.kernel_text(spec.file)
        if self.edit is not None:
            text = self.edit(spec.file, text)
        # As cuda.core sees them: addresses are Python integers, every other number is a numpy one.
        args = [self._memory.at(a) if isinstance(a, int) and a else a for a in arguments]
        with torch.utils._python_dispatch._disable_current_modes():
            harness.launch(
                spec.entry, text, spec.macros, config.grid, config.block, config.shmem_size, args,
                **self.options,
            )  # fmt: skip
        self.launches.append(spec)
