"""Which cases run each time, and which with a mark, in ``make test-kernels``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

more = pytest.mark.more


def some(cases: Sequence[Any], every: int, mark: pytest.MarkDecorator = more) -> list[Any]:
    """All cases; the first of every so many runs each time, the others have a mark."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[mark] if i % every else []
        )
        for i, case in enumerate(cases)
    ]
