"""Tables of a record of networks: on the terminal with rich, in documents as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from convt3d.bench.network_run import Line, lines
from convt3d.bench.report import conditions

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


def cells(line: Line, bold: bool = False) -> list[str]:
    """The cells of a line under ``HEAD``; empty where nothing was measured."""
    speedup = "" if line.speedup is None else f"{line.speedup:.2f}x"
    stepped = line.optimiser and line.kind == "training"
    how = "compiled" if line.compiled else "eager"
    return [
        line.network,
        "training with optimiser" if stepped else line.kind,
        line.mode if line.layout == "ncdhw" else f"{line.mode} {line.layout}",
        how if line.cudnn_benchmark else f"{how}, cuDNN's default plans",
        _ms(line.pytorch),
        _ms(line.after),
        f"**{speedup}**" if bold and speedup else speedup,
        *("" if share is None else f"{100 * share:.0f}%" for share in line.conv_share),
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
        result.add_row(*cells(line), _ms(line.fused), differs, drift)
    return result


def markdown(rows: Sequence[Mapping[str, Any]], columns: int = len(HEAD)) -> str:
    """The lines that did not fail as a Markdown table of the first ``columns`` of ``HEAD``.

    Lines of a network stand together.
    """
    rule = ["---"] * LEFT + ["--:"] * (columns - LEFT)
    found = [line for line in lines(rows) if not line.failed]
    order = list(dict.fromkeys(line.network for line in found))
    found.sort(key=lambda line: order.index(line.network))
    body = [cells(line, bold=True)[:columns] for line in found]
    text = [f"| {' | '.join(HEAD[:columns])} |", f"|{'|'.join(rule)}|"]
    return "\n".join([*text, *(f"| {' | '.join(row)} |" for row in body)])


def _ms(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} ms"
