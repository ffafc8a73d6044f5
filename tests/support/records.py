"""The records of docs/results, which the repository has and the sdist has not."""

from __future__ import annotations

from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"

PRESENT = RESULTS.is_dir()

needed = pytest.mark.skipif(not PRESENT, reason="the sdist has no docs/results")
"""Marks a test that reads a record."""
