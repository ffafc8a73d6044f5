"""Launches kernels on the CPU, with the arguments a GPU launch would get.

``launch`` runs one kernel text; ``run_schedule`` the launches of one of the package's plans.
Tensors are copied into memory with unmapped space around them, the kernel runs, and the results are
copied back, so that every access outside a tensor is seen.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import job
from .arena import Arena, Span, spans_of
from .build import BuildError, Flavour, build, flatten, kernel_text

__all__ = [
    "BuildError",
    "EmulatorError",
    "Flavour",
    "flatten",
    "kernel_text",
    "launch",
    "poison",
    "run_schedule",
]

_MESSAGE_BYTES = 16384
_POISON = 0xFF  # NaN in every floating-point type, -1 in every integer
_lock = threading.Lock()


class EmulatorError(AssertionError):
    """A kernel did something that a GPU forbids or leaves undefined."""


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("argument", ctypes.c_int),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("order", ctypes.c_int),
        ("check_races", ctypes.c_int),
        ("tensor_count", ctypes.c_int),
        ("tensors", ctypes.POINTER(_Tensor)),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("message", ctypes.c_char_p),
        ("message_bytes", ctypes.c_int),
    ]


class _Parameter(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_char), ("bytes", ctypes.c_int)]


@dataclass(frozen=True)
class Packed:
    """One kernel argument: an offset into a span, or plain bytes."""

    value: bytes
    span: int | None = None
    offset: int = 0


def poison(tensor: torch.Tensor | np.ndarray) -> None:
    """Fill with 0xFF bytes: NaN in every floating-point type, -1 in every integer."""
    span = spans_of([tensor])[0]
    ctypes.memset(span.address, _POISON, span.bytes)


def _triple(value: int | Sequence[int]) -> tuple[int, int, int]:
    values = [int(value)] if isinstance(value, (int, np.integer)) else [int(v) for v in value]
    x, y, z = [*values, 1, 1][:3]
    return x, y, z


def _pack(args: Sequence[Any], spans: Sequence[Span]) -> list[Packed]:
    """Arguments as cuda.core packs them: its rules for Python and numpy scalars, no others."""
    packed = []
    for position, arg in enumerate(args):
        if isinstance(arg, (torch.Tensor, np.ndarray)):
            address = spans_of([arg])[0].address
            for index, span in enumerate(spans):
                if span.address <= address < span.address + max(span.bytes, 1):
                    packed.append(Packed(b"", index, address - span.address))
                    break
        elif isinstance(arg, (bool, np.bool_)):
            packed.append(Packed(bytes([bool(arg)])))
        elif isinstance(arg, int):
            packed.append(Packed(arg.to_bytes(8, "little", signed=arg < 0)))
        elif isinstance(arg, float):
            packed.append(Packed(np.float64(arg).tobytes()))
        elif isinstance(arg, np.generic):
            packed.append(Packed(arg.tobytes()))
        elif isinstance(arg, ctypes._SimpleCData):
            packed.append(Packed(bytes(arg)))
        elif isinstance(arg, job.Structure):
            packed.append(Packed(arg.pack(spans), None))
        else:
            raise TypeError(f"argument {position}: {type(arg).__name__} cannot be a kernel argument")
    return packed


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(os.fspath(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)


def _check_arguments(library: ctypes.CDLL, packed: Sequence[Packed]) -> None:
    """Every argument has the size and sort of its parameter; else EmulatorError."""
    parameters = (_Parameter * 64)()
    count = library.emulated_parameters(parameters, 64)
    if count != len(packed):
        raise EmulatorError(f"the kernel has {count} parameters, the launch {len(packed)} arguments")
    for position, (parameter, argument) in enumerate(zip(parameters, packed, strict=False)):
        kind, size = parameter.kind.decode(), parameter.bytes
        if (kind == "p") != (argument.span is not None) and argument.value != bytes(8):
            got = "a tensor" if argument.span is not None else f"{len(argument.value)} plain bytes"
            want = "a pointer" if kind == "p" else f"{size} bytes"
            raise EmulatorError(f"argument {position}: got {got}, the parameter is {want}")
        if argument.span is None and len(argument.value) != size:
            raise EmulatorError(
                f"argument {position}: got {len(argument.value)} bytes, the parameter has {size}"
            )


@functools.cache
def _addr2line() -> str | None:
    return shutil.which("addr2line")


def _locate(message: str, library: ctypes.CDLL, path: Path) -> str:
    """Replace code addresses in an error message by source lines."""
    tool = _addr2line()
    if tool is None:
        return message
    base = ctypes.cast(library.emulator_launch, ctypes.c_void_p).value
    symbols = subprocess.run(
        ["nm", "--defined-only", os.fspath(path)], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"^([0-9a-f]+) T emulator_launch$", symbols, re.MULTILINE)
    if base is None or found is None:
        return message
    offset = base - int(found.group(1), 16)

    def source(match: re.Match[str]) -> str:
        address = int(match.group(1), 16) - offset - 1
        lines = subprocess.run(
            [tool, "-i", "-f", "-C", "-e", os.fspath(path), hex(address)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        places = [
            f"{where.rsplit('/', 1)[-1].split(' ')[0]} in {function.split('(')[0]}"
            for function, where in zip(lines[::2], lines[1::2], strict=False)
            if "/device/" not in where
        ]
        return " < ".join(places) or match.group(0)

    return re.sub(r"pc (0x[0-9a-f]+)", source, message)


def launch(
    kernel: str,
    text: str,
    macros: Sequence[tuple[str, object]] | Mapping[str, object],
    grid: int | Sequence[int],
    block: int | Sequence[int],
    shared_bytes: int,
    args: Sequence[Any],
    *,
    flavour: Flavour = Flavour.CHECKED,
    order: int = 0,
    check_races: bool = True,
    architecture: int = 900,
) -> None:
    """Run one kernel; tensors among ``args`` (CPU torch tensors or numpy arrays) are updated.

    ``order`` is how blocks and threads take turns: 0 ascending, 1 descending, else the seed of a
    random order. Raises BuildError if the text does not compile, EmulatorError for whatever the
    emulator or the sanitizers find.
    """
    path = build(text, kernel, macros, flavour=flavour, architecture=architecture)
    spans = spans_of([arg for arg in args if isinstance(arg, (torch.Tensor, np.ndarray))])
    packed = _pack(args, spans)
    geometry = (_triple(grid), _triple(block), int(shared_bytes))
    if min(*geometry[0], *geometry[1]) < 1 or geometry[1][0] * geometry[1][1] * geometry[1][2] > 1024:
        raise EmulatorError(f"grid {geometry[0]} and block {geometry[1]} cannot be launched")
    if flavour is Flavour.SANITIZED:
        error = job.run(path, geometry, packed, spans, order)
        if error:
            raise EmulatorError(f"{kernel}: {error}")
        return
    with _lock, Arena(spans) as arena:
        library = _load(path)
        _check_arguments(library, packed)
        _launch_here(library, path, kernel, geometry, packed, arena, order, check_races)
        arena.copy_back()


def _launch_here(
    library: ctypes.CDLL,
    path: Path,
    kernel: str,
    geometry: tuple[tuple[int, int, int], tuple[int, int, int], int],
    packed: Sequence[Packed],
    arena: Arena,
    order: int,
    check_races: bool,
) -> None:
    values = []
    argument_of_span: dict[int, int] = {}
    for position, argument in enumerate(packed):
        raw = argument.value
        if argument.span is not None:
            argument_of_span.setdefault(argument.span, position)
            raw = (arena.addresses[argument.span] + argument.offset).to_bytes(8, "little")
        values.append(ctypes.create_string_buffer(raw, max(len(raw), 8)))
    pointers = (ctypes.c_void_p * max(len(values), 1))(*[ctypes.addressof(v) for v in values])
    tensors = (_Tensor * max(len(arena.spans), 1))(
        *[
            _Tensor(address, span.bytes, argument_of_span.get(index, -1))
            for index, (address, span) in enumerate(zip(arena.addresses, arena.spans, strict=True))
        ]
    )
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    request = _Launch(
        grid=geometry[0],
        block=geometry[1],
        shared_bytes=geometry[2],
        order=order,
        check_races=int(check_races),
        tensor_count=len(arena.spans),
        tensors=tensors,
        arguments=pointers,
        message=ctypes.cast(message, ctypes.c_char_p),
        message_bytes=_MESSAGE_BYTES,
    )
    if library.emulator_launch(ctypes.byref(request)) != 0:
        raise EmulatorError(f"{kernel}: {_locate(message.value.decode(), library, path)}")


def run_schedule(
    schedule: Any,
    tensors: Mapping[str, torch.Tensor | None],
    *,
    edit: Callable[[str], str] | None = None,
    **options: Any,
) -> None:
    """Run every launch of a Schedule of the package, in order, on CPU tensors.

    ``tensors`` are named as the launches name them ("source", "weight", "bias", "target"); None is
    a null pointer. Strides of the weight are taken from ``tensors["weight"]``; workspaces are
    allocated here, poisoned. ``edit`` changes each kernel's flattened text first (mutation tests).
    """
    memory: dict[str, Any] = {name: 0 if t is None else t for name, t in tensors.items()}
    for name, size in schedule.workspaces.items():
        memory[name] = torch.full((size,), _POISON, dtype=torch.uint8)
    weight = tensors.get("weight")
    if weight is not None:
        for axis, stride in zip(("in", "out", "d", "h", "w"), weight.stride(), strict=True):
            memory[f"weight_stride_{axis}"] = np.int64(stride)
    for item in schedule.launches:
        text = kernel_text(item.kernel.file)
        launch(
            item.kernel.entry,
            text if edit is None else edit(text),
            item.kernel.macros,
            item.grid,
            item.block,
            item.shared_bytes,
            [memory[a] if isinstance(a, str) else a for a in item.arguments],
            **options,
        )
