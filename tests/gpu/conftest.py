"""Everything here needs a CUDA device; elsewhere it is skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture
def ieee() -> Iterator[None]:
    """Convolutions may not use TF32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
