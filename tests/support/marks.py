"""Which cases run each time, and which with the mark ``more``, in ``make test-kernels``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

more = pytest.mark.more


def some(cases: Sequence[Any], every: int) -> list[Any]:
    """All cases; the first of every so many runs each time, the others have the mark ``more``."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[more] if i % every else []
        )
        for i, case in enumerate(cases)
    ]
