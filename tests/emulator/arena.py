"""Memory for the tensors of one launch, each with unmapped space on both sides."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

#: Address space between tensors, in bytes: an access this far outside still hits nothing.
_GUARD = 1 << 24
#: Larger spans, of which little is meant to be touched, stay where they are, without such space.
SPARSE = 1 << 30
#: What cudaMalloc aligns to, and so what a tensor at offset 0 of its storage has, in bytes.
ALIGNMENT = 256


@dataclass(frozen=True)
class Span:
    """The bytes between a tensor's first and last element, wherever they lie in its storage."""

    address: int
    bytes: int
    storage: int  # address of the storage's first byte

    @property
    def end(self) -> int:
        return self.address + self.bytes


def _span(tensor: torch.Tensor | np.ndarray) -> Span:
    if isinstance(tensor, np.ndarray):
        tensor = torch.from_numpy(tensor)  # the same memory
    if tensor.device.type != "cpu":
        raise TypeError("the emulator takes CPU tensors")
    reach = [(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    size = (sum(reach) + 1) * tensor.element_size() if tensor.numel() else 0
    return Span(tensor.data_ptr(), size, tensor.untyped_storage().data_ptr())


def spans_of(tensors: Sequence[torch.Tensor | np.ndarray]) -> list[Span]:
    """The spans of all tensors, those that overlap joined, in the order of first appearance."""
    joined: list[Span] = []
    for tensor in tensors:
        span = _span(tensor)
        for other in list(joined):
            if span.address < other.end and other.address < span.end:
                joined.remove(other)
                low = min(span.address, other.address)
                span = Span(low, max(span.end, other.end) - low, span.storage)
        joined.append(span)
    return joined


def locate(tensor: torch.Tensor | np.ndarray, spans: Sequence[Span]) -> tuple[int, int]:
    """Which span a tensor starts in, and at what offset in bytes."""
    address = _span(tensor).address
    for index, span in enumerate(spans):
        if span.address <= address < max(span.end, span.address + 1):
            return index, address - span.address
    raise AssertionError("every tensor has a span")


class Arena:
    """Copies spans into guarded memory; ``copy_back`` copies the results to the tensors.

    Spans of more than ``SPARSE`` bytes are used in place.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = list(spans)
        self._copied = [span.bytes <= SPARSE for span in self.spans]
        self.addresses: list[int] = []
        offsets = []
        end = _GUARD
        for span in self.spans:
            end = -(-end // ALIGNMENT) * ALIGNMENT
            # The same distance from the storage's start, so the same alignment as on a GPU.
            end += (span.address - span.storage) % ALIGNMENT
            offsets.append(end)
            end += (span.bytes if span.bytes <= SPARSE else 0) + _GUARD
        self._map = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.addresses = [
            self._base + offset if copied else span.address
            for offset, span, copied in zip(offsets, self.spans, self._copied, strict=True)
        ]

    def __enter__(self) -> Arena:
        for span, address in self._copies():
            ctypes.memmove(address, span.address, span.bytes)
        return self

    def _copies(self) -> Iterator[tuple[Span, int]]:
        for span, address, copied in zip(self.spans, self.addresses, self._copied, strict=True):
            if copied:
                yield span, address

    def copy_back(self) -> None:
        for span, address in self._copies():
            ctypes.memmove(span.address, address, span.bytes)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Pages go back at once; the map itself when the last reference to its buffer is dropped.
        self._map.madvise(mmap.MADV_DONTNEED)
