"""Runs a sanitized kernel in a process of its own, through files."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .arena import ALIGNMENT, Span
from .packing import Geometry, Packed, argument_of_spans

_ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:color=never",
    "UBSAN_OPTIONS": "print_stacktrace=0:color=never",
}
_TIMEOUT = 300  # seconds
_REPORT_LINES = 25


def _integers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def run(
    path: Path,
    geometry: Geometry,
    packed: Sequence[Packed],
    spans: Sequence[Span],
    order: int,
) -> str:
    """Run the executable ``path``; returns its error report, empty if it had none.

    The spans' memory is updated in place.
    """
    grid, block, shared_bytes = geometry
    first = argument_of_spans(packed)
    parts = [_integers(*grid, *block, shared_bytes, order, len(spans))]
    for index, span in enumerate(spans):
        lead = (span.address - span.storage) % ALIGNMENT
        parts.append(_integers(span.bytes, first.get(index, -1), lead))
        parts.append(ctypes.string_at(span.address, span.bytes))
    parts.append(_integers(len(packed)))
    for argument in packed:
        index = -1 if argument.span is None else argument.span
        parts.append(_integers(index, argument.offset, argument.pointer_at, len(argument.value)))
        parts.append(argument.value)
    with tempfile.TemporaryDirectory() as scratch:
        request, result = Path(scratch) / "request", Path(scratch) / "result"
        request.write_bytes(b"".join(parts))
        done = subprocess.run(
            [os.fspath(path), os.fspath(request), os.fspath(result)],
            capture_output=True,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
            timeout=_TIMEOUT,
        )
        if done.returncode != 0:
            lines = (done.stderr or f"exit status {done.returncode}").splitlines()
            return "\n".join(lines[:_REPORT_LINES])
        data = result.read_bytes()
    for span in spans:
        ctypes.memmove(span.address, data[: span.bytes], span.bytes)
        data = data[span.bytes :]
    return ""
