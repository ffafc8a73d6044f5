"""Launches kernels on the CPU, with the arguments a GPU launch would get.

Tensors are copied into memory with unmapped space around them, the kernel runs, and the results are
copied back, so that every access outside a tensor is seen.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import job
from .arena import Arena, spans_of
from .build import BuildError, Flavour, Macros, build, flatten, kernel_text
from .packing import (
    Geometry,
    Packed,
    argument_of_spans,
    launch_geometry,
    mismatch,
    pack,
    tensors_of,
)

__all__ = [
    "BuildError",
    "EmulatorError",
    "Flavour",
    "flatten",
    "kernel_text",
    "launch",
    "poison",
]

_MESSAGE_BYTES = 16384
_PARAMETER_ALIGNMENT = 64
_POISON = 0xFF  # NaN in every floating-point type, -1 in every integer
_lock = threading.Lock()

Touched = dict[int, int]
"""By the address of a tensor: 1 if it was read, 2 if written, 3 if both."""


class EmulatorError(AssertionError):
    """A kernel did something that a GPU forbids or leaves undefined."""


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("argument", ctypes.c_int),
        ("earlier", ctypes.c_int),
        ("touched", ctypes.c_int),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("order", ctypes.c_int),
        ("most_blocks", ctypes.c_uint64),
        ("check_races", ctypes.c_int),
        ("dependent", ctypes.c_int),
        ("tensor_count", ctypes.c_int),
        ("tensors", ctypes.POINTER(_Tensor)),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("message", ctypes.c_char_p),
        ("message_bytes", ctypes.c_int),
    ]


def poison(tensor: torch.Tensor | np.ndarray) -> None:
    """Fill with 0xFF bytes: NaN in every floating-point type, -1 in every integer."""
    (span,) = spans_of([tensor])
    ctypes.memset(span.address, _POISON, span.bytes)


def launch(
    kernel: str,
    text: str,
    macros: Macros,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    shared_bytes: int,
    args: Sequence[Any],
    *,
    flavour: Flavour = Flavour.CHECKED,
    order: int = 0,
    check_races: bool = True,
    most_blocks: int = 0,
    earlier: Touched | None = None,
) -> Touched:
    """Run one kernel; tensors among ``args`` (CPU torch tensors or numpy arrays) are updated.

    Args:
        kernel: the ``extern "C"`` entry point, at file scope or in namespace convt3d.
        text: flattened source, as ``kernel_text`` returns it.
        macros: names and values, as NVRTC would get them.
        grid, block: extents; shared_bytes: dynamic shared memory of a block.
        args: tensors, tensor maps, numpy scalars and Python numbers (64 bits wide).
        flavour: checked in this process, or under the sanitizers in another.
        order: how blocks and threads take turns: 0 ascending, 1 descending, else a random seed.
        check_races: look for conflicting accesses without a barrier between (checked flavour).
        most_blocks: only the last so many blocks run, or clusters; 0: all (checked flavour).
        earlier: what launches have touched that may still run until a thread has waited for them
            (programmatic dependent launch); None: all have ended (checked flavour).

    Returns:
        What this launch has touched; nothing in the sanitized flavour.

    Raises:
        BuildError: the text does not compile.
        EmulatorError: whatever the emulator or the sanitizers find.
    """
    path = build(text, kernel, macros, flavour=flavour)
    spans = spans_of(tensors_of(args))
    packed = pack(args, spans)
    geometry = launch_geometry(grid, block, shared_bytes)
    touched: Touched = {}
    if flavour is Flavour.SANITIZED:
        error = job.run(path, geometry, packed, spans, order)
    else:
        with _lock, Arena(spans) as arena, _loaded(path) as library:
            error = mismatch(library, packed) or _launch_here(
                library,
                path,
                geometry,
                packed,
                arena,
                (order, most_blocks, check_races),
                earlier,
                touched,
            )
            arena.copy_back()
    if error:
        raise EmulatorError(f"{kernel}: {error}")
    return touched


@contextlib.contextmanager
def _loaded(path: Path) -> Iterator[ctypes.CDLL]:
    """The library for one launch: each has its own block of shared memory, so none is kept."""
    library = ctypes.CDLL(os.fspath(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    try:
        yield library
    finally:
        _ctypes.dlclose(library._handle)


def _aligned(data: bytes) -> ctypes.Array[ctypes.c_char]:
    """A copy at an address that suits any kernel parameter."""
    buffer = ctypes.create_string_buffer(len(data) + 2 * _PARAMETER_ALIGNMENT)
    start = -ctypes.addressof(buffer) % _PARAMETER_ALIGNMENT
    view = (ctypes.c_char * (len(data) + 1)).from_buffer(buffer, start)
    view[: len(data)] = data
    return view


def _launch_here(
    library: ctypes.CDLL,
    path: Path,
    geometry: Geometry,
    packed: Sequence[Packed],
    arena: Arena,
    ways: tuple[int, int, bool],  # order, most_blocks, check_races
    earlier: Touched | None,
    touched: Touched,
) -> str | None:
    values = [_aligned(argument.placed(arena.addresses)) for argument in packed]
    first = argument_of_spans(packed)
    tensors = [
        _Tensor(address, span.bytes, first.get(index, -1), (earlier or {}).get(span.address, 0))
        for index, (address, span) in enumerate(zip(arena.addresses, arena.spans, strict=True))
    ]
    array = (_Tensor * len(tensors))(*tensors)
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    order, most_blocks, check_races = ways
    request = _Launch(
        grid=geometry[0],
        block=geometry[1],
        shared_bytes=geometry[2],
        order=order,
        most_blocks=most_blocks,
        check_races=int(check_races),
        dependent=int(earlier is not None),
        tensor_count=len(tensors),
        tensors=array,
        arguments=(ctypes.c_void_p * len(values))(*map(ctypes.addressof, values)),
        message=ctypes.cast(message, ctypes.c_char_p),
        message_bytes=_MESSAGE_BYTES,
    )
    status = library.emulator_launch(ctypes.byref(request))
    touched.update(
        (span.address, tensor.touched) for span, tensor in zip(arena.spans, array, strict=True)
    )
    if status == 0:
        return None
    return _locate(message.value.decode(), library, path)


def _locate(message: str, library: ctypes.CDLL, path: Path) -> str:
    """Replace code addresses in an error message by source lines, if binutils are there."""
    tool, names = shutil.which("addr2line"), shutil.which("nm")
    if tool is None or names is None:
        return message

    def output(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    symbol = re.search(
        r"^([0-9a-f]+) T emulator_launch$", output(names, os.fspath(path)), re.MULTILINE
    )
    loaded = ctypes.cast(library.emulator_launch, ctypes.c_void_p).value
    assert symbol is not None and loaded is not None
    base = loaded - int(symbol.group(1), 16)

    def source(match: re.Match[str]) -> str:
        address = hex(int(match.group(1), 16) - base - 1)  # of the call, not of what follows it
        lines = output(tool, "-ifC", "-e", os.fspath(path), address).splitlines()
        places = [
            f"{where.rsplit('/', 1)[-1].split(' ')[0]} in {function.split('(')[0]}"
            for function, where in zip(lines[::2], lines[1::2], strict=True)
            if not re.search(r"\b(cuda|intrinsics)\.cuh:", where)
        ]
        return " < ".join(places) or match.group(0)

    return re.sub(r"pc (0x[0-9a-f]+)", source, message)
