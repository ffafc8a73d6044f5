"""What a record says: its cases side by side, means, and the table on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING, Any

from convt3d.bench.contenders import DEFAULT, OURS
from convt3d.bench.record import Record
from convt3d.geometry import Geometry

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Line:
    """One case of a record: ours beside PyTorch's default and the best of all peers.

    Times in ms; None where not measured.
    """

    shape: str
    problem: str
    operation: str
    mode: str
    layout: str
    device: str
    ours: float | None
    default: float | None
    best: float | None
    best_name: str
    error: dict[str, Any] | None
    share: float | None
    limit: dict[str, Any] | None
    runs_as: str
    failed: str
    extra_mbytes: float | None = None  # most that a call holds beyond operands and result
    default_extra_mbytes: float | None = None
    best_layout: str = ""

    @property
    def speedup(self) -> float | None:
        """How many times faster than PyTorch as it comes."""
        return self.default / self.ours if self.default and self.ours else None

    @property
    def speedup_best(self) -> float | None:
        """How many times faster than the best peer."""
        return self.best / self.ours if self.best and self.ours else None


def lines(record: Record, same_layout: bool = False) -> list[Line]:
    """The cases of a record in the order they were measured, one for each row of ours.

    Peers are compared across layouts, since a user could convert, or with ``same_layout`` in that
    of the row alone.
    """
    peers: dict[tuple[str, str, str], dict[tuple[str, str], float]] = {}
    extra: dict[tuple[tuple[str, str, str], str], float | None] = {}
    for row in record.rows.values():
        if row["contender"] != OURS and "ms" in row:
            case = (row["shape"], row["pass"], row["mode"])
            peers.setdefault(case, {})[row["contender"], row["layout"]] = row["ms"]
            if row["contender"] == DEFAULT:
                extra[case, row["layout"]] = row.get("extra_mbytes")
    result = []
    for row in record.rows.values():
        if row["contender"] != OURS:
            continue
        case = (row["shape"], row["pass"], row["mode"])
        others = {
            peer: ms
            for peer, ms in peers.get(case, {}).items()
            if not same_layout or peer[1] == row["layout"]
        }
        best = min(others, key=lambda name: others[name], default=None)
        default = others.get((DEFAULT, row["layout"]), others.get((DEFAULT, "ncdhw")))
        result.append(
            Line(
                shape=row["shape"],
                problem=_problem(row),
                operation=row["pass"],
                mode=row["mode"],
                layout=row["layout"],
                device=record.environment["gpu"] or "CPU",
                ours=row.get("ms"),
                default=default,
                best=others[best] if best else None,
                best_name=best[0] if best else "",
                best_layout=best[1] if best else "",
                error=row.get("error"),
                share=row.get("share"),
                limit=row.get("limit"),
                runs_as=row.get("runs_as", ""),
                failed=row.get("failed", ""),
                extra_mbytes=row.get("extra_mbytes"),
                default_extra_mbytes=extra.get((case, row["layout"])),
            )
        )
    return result


def _problem(row: dict[str, Any]) -> str:
    """Geometry and size of the input of a row, as ``48->24 k3 s1 p0 d1 g1, 8x96x96x96``."""
    size = "x".join(map(str, (row["batch"], *row["input_size"])))
    return f"{Geometry.from_dict(row['geometry']).label}, {size}"


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Geometric mean of the values that exist."""
    known = [value for value in values if value]
    return exp(sum(map(log, known)) / len(known)) if known else None


_HEAD = ("layer", "pass", "type", "device", "ours", "PyTorch", "speed-up")


def table(record: Record) -> Table:
    """The record as a rich table; a line that is not acceptable is marked."""
    from rich.table import Table

    found = lines(record)
    with_best = any(line.best_name not in ("", DEFAULT) for line in found)
    result = Table(caption=headline(record))
    for name in _HEAD:
        result.add_column(name, justify="right" if name in _HEAD[4:] else "left")
    if with_best:
        result.add_column("best peer", justify="right")
        result.add_column("speed-up", justify="right")
    result.add_column("error (PyTorch's)", justify="right")
    result.add_column("of limit", justify="right")
    with_extra = any(line.extra_mbytes is not None for line in found)
    if with_extra:
        result.add_column("extra MB (PyTorch's)", justify="right")
    for line in found:
        cells = [line.shape, line.operation, _kind(line), line.device]
        if line.failed:
            result.add_row(*cells, f"failed: {line.failed}", style="red")
            continue
        cells += [milliseconds(line.ours), milliseconds(line.default), times(line.speedup)]
        if with_best:
            cells += [f"{line.best_name} {milliseconds(line.best)}", times(line.speedup_best)]
        cells += [_error(line), percent(line.share)]
        if with_extra:
            cells.append(f"{_mbytes(line.extra_mbytes)} ({_mbytes(line.default_extra_mbytes)})")
        result.add_row(*cells, style="" if _good(line) else "red")
    return result


def headline(record: Record) -> str:
    """Device, versions, commit and the mean speed-up, in one line."""
    text = conditions(record.environment)
    mean = geometric_mean(line.speedup for line in lines(record))
    return text + (f"; geometric mean of the speed-ups {mean:.2f}x" if mean else "")


def conditions(facts: Mapping[str, Any]) -> str:
    """Device, versions and commit of an environment, in one line."""
    parts = [
        facts["gpu"] or f"{facts['cpu']}, {facts['cpu_threads']} threads",
        f"torch {facts['torch']}",
    ]
    if facts["gpu"]:
        parts.append(f"cuDNN {facts['cudnn']}")
        parts.append(f"driver {facts.get('driver')}")
    if facts["commit"]:
        parts.append(f"commit {facts['commit'][:12]}")
    return "; ".join(parts)


def acceptable(record: Record) -> bool:
    """Whether every case of ours ran, is as exact as PyTorch's, and gives the same bits again."""
    return all(_good(line) for line in lines(record))


def _good(line: Line) -> bool:
    if line.failed:
        return False
    return line.error is None or (line.error["acceptable"] and line.error["deterministic"])


def _kind(line: Line) -> str:
    return line.mode if line.layout == "ncdhw" else f"{line.mode} {line.layout}"


def milliseconds(value: float | None, unit: str = " ms") -> str:
    """A time with three significant digits, of a microsecond at least; empty for None."""
    if value is None:
        return ""
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}{unit}"


def times(value: float | None) -> str:
    """A speed-up with two decimals, of a large one three significant digits; empty for None."""
    if value is None:
        return ""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}x"


def _mbytes(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def percent(value: float | None) -> str:
    """A share; empty for None."""
    return "" if value is None else f"{100 * value:.0f}%"


def _error(line: Line) -> str:
    if line.error is None:
        return ""
    return f"{line.error['relative']:.1e} ({line.error['pytorch_relative']:.1e})"
