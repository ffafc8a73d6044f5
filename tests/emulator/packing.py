"""Kernel arguments as bytes: tensors, numpy scalars, tensor maps and Python numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .arena import Span, locate
from .tensor_map import TensorMap

Extent = tuple[int, int, int]
#: Grid, block, and bytes of dynamic shared memory.
Geometry = tuple[Extent, Extent, int]

_MAX_THREADS = 1024


@dataclass(frozen=True)
class Packed:
    """One kernel argument: bytes, of which eight may be a pointer into a span."""

    value: bytes
    span: int | None = None
    offset: int = 0
    pointer_at: int = 0

    def placed(self, addresses: Sequence[int]) -> bytes:
        """The bytes, given where the spans are."""
        if self.span is None:
            return self.value
        pointer = (addresses[self.span] + self.offset).to_bytes(8, "little")
        return self.value[: self.pointer_at] + pointer + self.value[self.pointer_at + 8 :]


@dataclass(frozen=True)
class Inside:
    """A pointer to somewhere in a tensor, all of which the kernel may use."""

    tensor: torch.Tensor
    offset: int  # in bytes


def tensors_of(args: Sequence[Any]) -> list[torch.Tensor | np.ndarray]:
    """The tensors that arguments refer to."""
    tensors = [arg.tensor if isinstance(arg, (TensorMap, Inside)) else arg for arg in args]
    return [tensor for tensor in tensors if is_tensor(tensor)]


def is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def launch_geometry(grid: Any, block: Any, shared_bytes: int) -> Geometry:
    """Grid and block as triples. Raises ValueError for what no GPU would launch."""

    def triple(value: Any) -> Extent:
        values = [value] if isinstance(value, (int, np.integer)) else list(value)
        x, y, z = (int(v) for v in [*values, 1, 1][:3])
        return x, y, z

    full_grid, full_block = triple(grid), triple(block)
    if min(*full_grid, *full_block) < 1 or np.prod(full_block) > _MAX_THREADS:
        raise ValueError(f"grid {full_grid} and block {full_block} cannot be launched")
    return full_grid, full_block, int(shared_bytes)


def pack(args: Sequence[Any], spans: Sequence[Span]) -> list[Packed]:
    """Arguments as bytes, tensors as positions in ``spans``.

    Raises:
        TypeError: an argument of another type.
    """
    packed = []
    for position, arg in enumerate(args):
        if is_tensor(arg):
            packed.append(Packed(bytes(8), *locate(arg, spans)))
        elif isinstance(arg, Inside):
            span, offset = locate(arg.tensor, spans)
            packed.append(Packed(bytes(8), span, offset + arg.offset))
        elif isinstance(arg, (bool, np.bool_)):
            packed.append(Packed(bytes([bool(arg)])))
        elif isinstance(arg, int):
            packed.append(Packed(arg.to_bytes(8, "little", signed=arg < 0)))
        elif isinstance(arg, float):
            packed.append(Packed(np.float64(arg).tobytes()))
        elif isinstance(arg, np.generic):
            packed.append(Packed(arg.tobytes()))
        elif isinstance(arg, TensorMap):
            packed.append(Packed(arg.encode(), *locate(arg.tensor, spans), arg.POINTER_AT))
        elif isinstance(arg, ctypes._SimpleCData):
            packed.append(Packed(bytes(arg)))
        else:
            raise TypeError(f"argument {position}: {type(arg).__name__} cannot be an argument")
    return packed


def argument_of_spans(packed: Sequence[Packed]) -> dict[int, int]:
    """Span index to the position of the first argument that points into it."""
    first: dict[int, int] = {}
    for position, argument in enumerate(packed):
        if argument.span is not None:
            first.setdefault(argument.span, position)
    return first


class _Parameter(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_char), ("bytes", ctypes.c_int)]


def mismatch(library: ctypes.CDLL, packed: Sequence[Packed]) -> str | None:
    """How the arguments fail to fit the kernel's parameters, or None."""
    parameters = (_Parameter * 64)()
    count = library.emulated_parameters(parameters, 64)
    if count != len(packed):
        return f"the kernel has {count} parameters, the launch {len(packed)} arguments"
    for position, (parameter, argument) in enumerate(zip(parameters, packed, strict=False)):
        kind, size = parameter.kind.decode(), parameter.bytes
        null = argument.span is None and argument.value == bytes(8)
        # A structure is a tensor map, which has a pointer, or of plain numbers.
        pointer = kind == "p" or (kind == "s" and size == TensorMap.BYTES)
        if pointer != (argument.span is not None) and not null:
            got = "a tensor" if argument.span is not None else f"{len(argument.value)} plain bytes"
            want = "a pointer" if kind == "p" else f"{size} bytes"
            return f"argument {position} is {got}, the parameter {want}"
        if len(argument.value) != size:
            return f"argument {position} has {len(argument.value)} bytes, the parameter {size}"
    return None
