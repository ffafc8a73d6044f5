"""Time of KernelBench's problems with 3-D convolutions, under torch.compile and with convt3d.

    python tools/level2_bench.py PROBLEMS --out docs/results/level2-h200.json
    python tools/level2_bench.py PROBLEMS --small --only 26,34                       (on CPU)

PROBLEMS is a folder of files with ``Model``, ``get_inputs`` and ``get_init_inputs``; those that
build a Conv3d or a ConvTranspose3d are measured, without gradients and in training mode, as
KernelBench does, and with torch.backends.cudnn.benchmark:

  eager            PyTorch's model
  compile          torch.compile of it
  convert          the model after convt3d.convert
  convert+compile  torch.compile of that
  backend          torch.compile(backend="convt3d") of that

On a GPU every problem is first compiled, many at a time, in processes that fill the caches on disk.
Then a process of its own measures each problem in each dtype, its settings in turn, alone on the
GPU: cuDNN's and Inductor's choices by time are made there. Errors are those of the first and the
last sample against PyTorch's eager model in float64, of the whole batch where batch norm mixes it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

from level2_worker import SETTINGS, Job  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from convt3d.bench import run  # noqa: E402
from convt3d.bench.record import Record  # noqa: E402
from convt3d.bench.report import conditions, geometric_mean  # noqa: E402

DEFAULT = ("eager", "compile", "convert+compile", "backend")
RATIOS = (("eager", "backend"), ("compile", "backend"), ("convert+compile", "backend"))
"""Speed-ups of the second setting over the first that the table shows."""

LAYERS = {"transposed": "ConvTranspose3d", "conv": "Conv3d"}
_WIDTH = 230  # of tables that go into a file


class Level2Record(Record):
    """Rows of problems."""

    NAME = "a record of problems"
    KEY = ("problem", "mode", "setting", "evaluation", "tuned", "small", "device")
    FACTS = ()


class Sites:
    """Keeps what the processes that compile ahead say was fused, by the keys of rows."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}

    def add(self, row: dict[str, Any]) -> None:
        kept: dict[str, Any] = {name: row[name] for name in ("sites", "failed") if name in row}
        kept["ahead_s"] = row.get("first_s")
        self.found[Level2Record.key(row)] = kept


def main() -> None:
    arguments = _arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = [layer for name, layer in LAYERS.items() if arguments.layer in (None, name)]
    paths = problems(arguments.problems, layers, arguments.only)
    if not paths:
        raise SystemExit(f"no such problems in {arguments.problems}")
    jobs = [
        Job(
            str(path.resolve()),
            mode,
            tuple(arguments.settings.split(",")),
            evaluation=arguments.evaluation,
            tuned=arguments.tune,
            small=arguments.small,
            device=device,
            budget_s=arguments.budget,
        )
        for mode in arguments.dtype.split(",")
        for path in paths
    ]
    record = Level2Record.create(arguments.out, sys.argv[1:], arguments.commit)
    record.save()
    deaths = measure(jobs, record, arguments.jobs if device == "cuda" else 0)
    rows = list(record.rows.values())
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    for mode in arguments.dtype.split(","):
        console.print(table([r for r in rows if r["mode"] == mode], mode, record.environment))
    if deaths or any("failed" in row for row in rows):
        raise SystemExit("\n".join([*deaths, "some settings failed"]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", type=pathlib.Path, help="folder of problem files")
    parser.add_argument("--out", type=pathlib.Path, help="JSON record")
    parser.add_argument("--dtype", default="tf32", help="of tf32, fp32, bf16, fp16")
    parser.add_argument("--only", default="", help="numbers that names begin with; default all")
    kind = parser.add_mutually_exclusive_group()
    for name, layer in LAYERS.items():
        help_ = f"only problems with {layer}"
        kind.add_argument(f"--{name}", dest="layer", action="store_const", const=name, help=help_)
    parser.add_argument("--settings", default=",".join(DEFAULT), help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per problem and dtype")
    parser.add_argument("--jobs", type=int, default=6, help="processes that compile ahead; 0: none")
    parser.add_argument("--evaluation", action="store_true", help="models in evaluation mode")
    parser.add_argument("--tune", action="store_true", help="our plans by timing candidates")
    parser.add_argument("--small", action="store_true", help="tiny inputs, to try the tool")
    parser.add_argument("--commit", help="recorded where the source is not a git checkout")
    return parser.parse_args()


def problems(folder: pathlib.Path, layers: Sequence[str], only: str = "") -> list[pathlib.Path]:
    """Files of a folder that build one of these layers, in the order of their numbers."""
    wanted = {number.strip() for number in only.split(",") if number.strip()}
    built = re.compile(rf"\bnn\.({'|'.join(layers)})\(")
    found = [
        path
        for path in folder.glob("*.py")
        if (not wanted or path.stem.split("_")[0] in wanted) and built.search(path.read_text())
    ]
    return sorted(found, key=lambda path: (_number(path), path.stem))


def _number(path: pathlib.Path) -> int:
    head = re.match(r"\d+", path.stem)
    return int(head.group()) if head else sys.maxsize


def measure(jobs: Sequence[Job], record: Level2Record, ahead: int) -> list[str]:
    """Compile ``ahead`` jobs at a time, then measure one after the other; what processes died of.

    Inductor's cache is a new one, so that all that is fused is seen once.
    """
    with tempfile.TemporaryDirectory() as cache:
        variables = {
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(ROOT / "tools"), os.environ.get("PYTHONPATH")))
            ),
        }
        sites = Sites()
        if ahead:
            begin = time.perf_counter()
            _compile(jobs, sites, ahead, variables)
            print(f"compiled in {time.perf_counter() - begin:.0f} s", file=sys.stderr)

        def done(row: dict[str, Any]) -> None:
            kept = sites.found.get(record.key(row), {})
            record.add({**{k: v for k, v in kept.items() if k != "failed"}, **row})
            print(_said(row), file=sys.stderr)

        try:
            run.run_isolated(jobs, _Ignored(), done, "level2_worker", variables)
        except RuntimeError as error:
            return [str(error)]
    return []


class _Ignored:
    """Takes rows that ``progress`` keeps."""

    def add(self, row: dict[str, Any]) -> None:
        pass


def _compile(
    jobs: Sequence[Job], sites: Sites, processes: int, variables: Mapping[str, str]
) -> None:
    """Fill the caches on disk; what fails here fails again where it is measured."""

    def one(job: Job) -> None:
        settings = tuple(setting for setting in job.settings if setting != "eager")
        ahead = replace(job, ahead=True, settings=settings)
        try:
            run.run_isolated([ahead], sites, _tell_failure, "level2_worker", variables)
        except RuntimeError as error:
            print(error, file=sys.stderr)

    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        list(pool.map(one, jobs))


def _tell_failure(row: dict[str, Any]) -> None:
    if "failed" in row:
        print(f"ahead: {_said(row)}", file=sys.stderr)


def _said(row: Mapping[str, Any]) -> str:
    result = row.get("failed") or f"{row['ms']} ms, error {_error(row)}"
    return f"{row['problem']} {row['mode']} {row['setting']}: {result}"


def table(rows: Sequence[Mapping[str, Any]], mode: str, environment: Mapping[str, Any]) -> Table:
    """The rows of a mode, a line per problem, with geometric means; what failed is red."""
    by_problem: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        by_problem.setdefault(row["problem"], {})[row["setting"]] = row
    settings = [name for name in SETTINGS if any(name in line for line in by_problem.values())]
    ratios = [pair for pair in RATIOS if set(pair) <= set(settings)]
    result = Table(title=mode, caption=conditions(environment))
    result.add_column("problem")
    for name in (*settings, *(f"{b} over {a}" for a, b in ratios), "errors"):
        result.add_column(name, justify="right")
    result.add_column("fused")
    for problem, line in by_problem.items():
        failed = any("failed" in row for row in line.values())
        cells = [
            *(_ms(line.get(name)) for name in settings),
            *(_times(speedup(line, *pair)) for pair in ratios),
            " ".join(_error(line.get(name)) for name in settings),
            fused(line.get("backend", {})),
        ]
        result.add_row(problem, *cells, style="red" if failed else "")
    means = [
        geometric_mean(speedup(line, *pair) for line in by_problem.values()) for pair in ratios
    ]
    result.add_section()
    result.add_row("geometric mean", *("" for _ in settings), *map(_times, means))
    return result


def speedup(line: Mapping[str, Mapping[str, Any]], before: str, after: str) -> float | None:
    """How many times faster one setting of a problem is than another; None if either failed."""
    a, b = (line.get(name, {}).get("ms") for name in (before, after))
    return a / b if a and b else None


def fused(row: Mapping[str, Any]) -> str:
    """What joined the convolutions of a row, and what ended their tails."""
    parts = []
    for site in row.get("sites", ()):
        what = ", ".join(site["fused"]) or "nothing"
        parts.append(f"{what} | {site['stopped']}" if site["stopped"] else what)
    return "; ".join(parts)


def _ms(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    return "failed" if "failed" in row else f"{row['ms']:.3f}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _error(row: Mapping[str, Any] | None) -> str:
    """The relative error, or the absolute one of a result that is zero but for rounding."""
    if row is None or "error" not in row:
        return "-"
    zero = row["error"] > 1 and row["largest_error"] < 1e-5
    return f"{row['largest_error']:.0e} (absolute)" if zero else f"{row['error']:.0e}"


if __name__ == "__main__":
    main()
