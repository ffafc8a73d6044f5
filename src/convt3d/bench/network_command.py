"""A benchmark of whole networks from the command line: measures, keeps the record, prints it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from convt3d.bench import network_report, network_run
from convt3d.bench.record import NetworkRecord

_WIDTH = 230  # of tables that go into a file


def measure(
    request: network_run.Request,
    out: Path | None,
    *,
    resume: bool = False,
    commit: str | None = None,
    as_json: bool = False,
) -> str | None:
    """Measure a request and print its table, or the record; lines of progress go to stderr.

    Args:
        out: where the record is kept as rows come.
        resume: keep the rows that ``out`` has, and measure the others.
        commit: recorded where the source is not a git checkout.
        as_json: print the record instead of a table.

    Returns:
        What went wrong, in a sentence; None if nothing did.
    """
    record = NetworkRecord.create(out, sys.argv[1:], commit)
    failure = None
    try:
        if resume and out is not None and out.exists():
            record.resume(out)
        record.save()  # before measuring, which takes long
        network_run.measure(request, record, lambda row: print(_said(row), file=sys.stderr))
    except (RuntimeError, ValueError, OSError) as error:
        failure = str(error)
    if as_json:
        print(json.dumps(record.to_dict(), indent=1))
    elif record.rows:
        console = Console()
        console = console if console.is_terminal else Console(width=_WIDTH)
        console.print(network_report.table(list(record.rows.values()), record.environment))
    if failure is None and any("failed" in row for row in record.rows.values()):
        failure = "some networks failed"
    return failure


def _said(row: dict[str, Any]) -> str:
    names = ("network", "mode", "layout", "kind", "side")
    how = "compiled" if row["compiled"] else "eager"
    result = row.get("failed") or f"{row['ms']} ms"
    return f"{' '.join(str(row[name]) for name in names)} {how}: {result}"
