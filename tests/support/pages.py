"""Pages with tables of records: the tools that write them, their cells, records to try."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FACTS: dict[str, Any] = {
    "cpu": "x",
    "cpu_threads": 1,
    "gpu": "NVIDIA H200",
    "torch": "2.11",
    "cudnn": 91900,
    "driver": "580",
    "commit": "a" * 40,
}
TYPES = {"TF32": "tf32", "bfloat16": "bf16", "float16": "fp16", "IEEE float32": "fp32"}


@cache
def tools() -> SimpleNamespace:
    """The modules of tools/ that write tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        return SimpleNamespace(
            tables=import_module("tables"),
            networks=import_module("network_tables"),
            tuned_rows=import_module("tuned_rows"),
        )


def stored(tools: SimpleNamespace, folder: Path, **kept: Any) -> Any:
    """Records of a folder, each given by its rows or by what differs from the usual."""
    for name, values in kept.items():
        values = values if isinstance(values, dict) else {"rows": values}
        values = {"environment": FACTS, "command": [], "started": "", **values}
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(values))
    return tools.tables.Results(folder, "results")


def tables_of(text: str) -> list[list[list[str]]]:
    """Cells of each table in a text, without its rule."""
    found = []
    for lines in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        rows = [line[2:-2].split(" | ") for line in lines.splitlines() if line.startswith("| ")]
        assert len({len(row) for row in rows}) == 1
        found.append(rows)
    return found


def rows_of(text: str) -> list[list[str]]:
    """Cells of the only table in a text."""
    (rows,) = tables_of(text)
    return rows


def page(heading: str) -> str:
    """A section of the page of figures."""
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    return re.split(r"\n##+ ", text.split(f"# {heading}\n", 1)[1])[0]


def in_digits(value: float) -> str:
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}"


def gain(value: float) -> str:
    text = f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}x"
    return f"**{text}**" if round(value, 2) < 1 else text
