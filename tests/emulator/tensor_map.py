"""Tensor maps for TMA, under the rules of cuTensorMapEncodeTiled."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

_ELEMENT_BYTES = {"float32": 4, "tfloat32": 4, "float16": 2, "bfloat16": 2}
_MAGIC = 0x70616D74


@dataclass(frozen=True)
class TensorMap:
    """A view of ``tensor`` for TMA; every sequence is innermost first.

    Args:
        tensor: whose memory it describes, from its first element on.
        element: "float32", "tfloat32" (rounded on load), "float16" or "bfloat16".
        extents: up to five.
        strides: in bytes, of all dimensions but the innermost, which is contiguous.
        box: extents of what one load moves.
        swizzle: 0, or 128 (bytes).

    Raises:
        ValueError: what cuTensorMapEncodeTiled refuses.
    """

    tensor: Any
    element: str
    extents: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    swizzle: int = 0

    POINTER_AT: ClassVar[int] = 8

    def __post_init__(self) -> None:
        rank, size = len(self.extents), _ELEMENT_BYTES[self.element]
        if not 1 <= rank <= 5 or len(self.strides) != rank - 1 or len(self.box) != rank:
            raise ValueError("1 to 5 extents, a stride fewer, and as many box extents")
        if self.tensor.data_ptr() % 16:
            raise ValueError("the tensor's address is no multiple of 16 bytes")
        if any(not 0 < n <= 2**32 for n in self.extents):
            raise ValueError(f"extents {tuple(self.extents)} are not from 1 to 2^32")
        if any(s % 16 or not 0 < s < 2**40 for s in self.strides):
            raise ValueError(f"strides {tuple(self.strides)} are not multiples of 16 below 2^40")
        if any(not 0 < n <= 256 for n in self.box):
            raise ValueError(f"box {tuple(self.box)} is not from 1 to 256")
        if self.box[0] * size % 16:
            raise ValueError(f"{self.box[0]} elements of a box's row are no multiple of 16 bytes")
        if self.swizzle not in (0, 128):
            raise ValueError(f"swizzle {self.swizzle} is not emulated")
        if self.swizzle and self.box[0] * size > self.swizzle:
            raise ValueError(f"a box's row exceeds the {self.swizzle} bytes of the swizzle")

    def encode(self) -> bytes:
        """The emulator's 128 bytes (mbarrier.cpp reads them); the pointer is filled in later."""
        rank, size = len(self.extents), _ELEMENT_BYTES[self.element]
        fill = [0] * (5 - rank)
        return struct.pack(
            "<IBBBBQ5Q5Q5I",
            _MAGIC,
            rank,
            list(_ELEMENT_BYTES).index(self.element),
            self.swizzle,
            0,
            0,
            *self.extents,
            *fill,
            size,
            *self.strides,
            *fill,
            *self.box,
            *fill,
        ).ljust(128, b"\0")
