"""The table of a record of networks on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from convt3d.bench.network_run import Line, lines
from convt3d.bench.network_worker import manner
from convt3d.bench.report import conditions, milliseconds, percent, times

if TYPE_CHECKING:
    from rich.table import Table

HEAD = (
    "network",
    "mode",
    "type",
    "run as",
    "PyTorch",
    "convt3d",
    "speed-up",
    "convolutions before",
    "after",
    "peak memory before",
    "after",
    "first step before",
    "after",
)
LEFT = 4  # columns of words


def cells(line: Line) -> list[str]:
    """The cells of a line under ``HEAD``; empty where nothing was measured."""
    stepped = line.optimiser and line.kind == "training"
    how = manner(line.compiled, line.graphs)
    return [
        line.network,
        "training with optimiser" if stepped else line.kind,
        line.mode if line.layout == "ncdhw" else f"{line.mode} {line.layout}",
        how if line.cudnn_benchmark else f"{how}, cuDNN's default plans",
        milliseconds(line.pytorch),
        milliseconds(line.after),
        times(line.speedup),
        *(percent(share) for share in line.conv_share),
        *("" if size is None else f"{size / 1e3:.2f} GB" for size in line.peak_mbytes),
        *("" if s is None else f"{s:.1f} s" for s in line.first_s),
    ]


def table(rows: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]) -> Table:
    """The record as a rich table; what failed is red."""
    from rich.table import Table

    result = Table(caption=conditions(environment))
    for index, name in enumerate((*HEAD, "fused", "differs by", "drift")):
        result.add_column(name, justify="left" if index < LEFT else "right")
    for line in lines(rows):
        if line.failed:
            result.add_row(*cells(line)[:LEFT], f"failed: {line.failed}", style="red")
            continue
        differs = "" if line.difference is None else f"{line.difference:.1e}"
        drift = "" if line.drift is None else f"{100 * line.drift:.1f}%"
        result.add_row(*cells(line), milliseconds(line.fused), differs, drift)
    return result
