"""Tensor maps for TMA over a tensor at hand."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, ClassVar

from convt3d.cuda import schedule

_ELEMENTS = ("float32", "tfloat32", "float16", "bfloat16")
_MAGIC = 0x70616D74


@dataclass(frozen=True)
class TensorMap(schedule.TensorMap):
    """The package's description, whose ``tensor`` is the tensor itself.

    Raises:
        ValueError: what cuTensorMapEncodeTiled refuses.
    """

    tensor: Any

    POINTER_AT: ClassVar[int] = 8
    BYTES: ClassVar[int] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor.data_ptr() % schedule.MAP_ALIGNMENT:
            raise ValueError("the tensor's address is no multiple of 16 bytes")

    def encode(self) -> bytes:
        """The emulator's 128 bytes (mbarrier.cpp reads them); the pointer is filled in later."""
        rank = len(self.extents)
        fill = [0] * (5 - rank)
        loaded = [-(-n // step) for n, step in zip(self.box, self.steps, strict=True)]
        return struct.pack(
            "<IBBBBQ5Q5Q5I5B",
            _MAGIC,
            rank,
            _ELEMENTS.index(self.element),
            self.swizzle,
            0,
            0,
            *self.extents,
            *fill,
            self.element_bytes,
            *self.strides,
            *fill,
            *loaded,
            *fill,
            *self.steps,
            *fill,
        ).ljust(self.BYTES, b"\0")
