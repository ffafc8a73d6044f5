"""Runs a sanitized kernel in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Structure:
    """A kernel argument passed by value, such as a tensor map."""

    def pack(self, spans: Sequence[Any]) -> bytes:
        raise NotImplementedError


def run(path: Path, geometry: Any, packed: Any, spans: Any, order: int) -> str:
    raise NotImplementedError
