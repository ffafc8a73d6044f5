"""Draws a record: speed-up bars and a roofline. Needs the extra ``plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from convt3d.bench.contenders import OURS
from convt3d.bench.report import headline, lines
from convt3d.bench.run import Record


def draw(record: Record, path: Path) -> None:
    """Write speed-up bars and the roofline of a record into one .png, .svg or .pdf file."""
    figure, (bars, roofline) = plt.subplots(1, 2, figsize=(15, 6), layout="constrained")
    _speedups(record, bars)
    _roofline(record, roofline)
    figure.suptitle(headline(record), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _speedups(record: Record, axes: Any) -> None:
    found = [line for line in lines(record) if line.speedup]
    names = [f"{line.shape} {line.operation} {line.mode}" for line in found]
    places = range(len(found))
    axes.barh(
        places, [line.speedup for line in found], color="#4c72b0", label="PyTorch as it comes"
    )
    axes.plot(
        [line.speedup_best for line in found],
        places,
        "D",
        color="#dd8452",
        markersize=4,
        label="best peer",
    )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(places, names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("times faster than")
    axes.legend()


def _roofline(record: Record, axes: Any) -> None:
    rows = [r for r in record.rows.values() if r["contender"] == OURS and "limit" in r]
    if not rows:
        axes.set_axis_off()
        return
    for index, mode in enumerate(dict.fromkeys(row["mode"] for row in rows)):
        color = f"C{index}"
        mine = [row for row in rows if row["mode"] == mode]
        limits = [row["limit"] for row in mine]
        intensity = [limit["gflop"] / limit["mbytes"] * 1e3 for limit in limits]
        rate = [limit["gflop"] / row["ms"] for limit, row in zip(limits, mine, strict=True)]
        axes.plot(intensity, rate, "o", color=color, markersize=4, label=mode)
        peak = max(limit["matrix_tflops"] for limit in limits)
        copy = max(limit["copy_tbytes"] for limit in limits)
        reach = [min(intensity) / 2, peak / copy, max(*intensity, peak / copy) * 2]
        axes.plot(reach, [min(peak, copy * x) for x in reach], color=color, linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("TFLOP/s")
    axes.legend()
