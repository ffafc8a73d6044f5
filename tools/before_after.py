"""Two versions of the package on one GPU, in turn: what a change made faster or slower.

    git archive COMMIT | tar -x -C BEFORE
    python tools/before_after.py BEFORE --dtype tf32,bf16 --out /tmp/before-after.json
    python tools/before_after.py BEFORE --shape conv --layout ncdhw,ndhwc --passes forward
    python tools/before_after.py BEFORE --cases FILE      "shape mode layout pass" a line

Each version has a process of its own, which imports the package and its benchmark from its own
source. For each layer and operation the two are timed in turn, before, after, after, before, so
that clock and temperature are the same for both; what counts is the median of all runs of one
version. Kernels are compiled before anything is timed, into a cache of their own: what was tuned
before on this machine has no say.

The exit status is 1 if an operation of any layer is slower than ``--worst`` times before, or the
geometric mean of an operation, dtype and layout than ``--mean`` times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve()
ROOT = HERE.parent.parent
TURNS = ("before", "after", "after", "before")
SIDES = ("before", "after")
WARM_RUNS = 3  # of each turn
# As in convt3d.cuda.timing, which earlier versions do not have.
FLUSH_BYTES = 256 << 20
AHEAD_CYCLES = 600_000  # of a GPU that sleeps: 0.3 ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=pathlib.Path, help="a checkout of the earlier version")
    parser.add_argument("--out", type=pathlib.Path, help="JSON record")
    parser.add_argument("--shape", default="transposed", help="as of convt3d bench; several with ;")
    parser.add_argument("--dtype", default="tf32,bf16")
    parser.add_argument("--layout", default="ncdhw")
    parser.add_argument("--passes", default="forward,grad_input,grad_weight")
    parser.add_argument("--cases", type=pathlib.Path, help="instead of the four above")
    parser.add_argument("--runs", type=int, default=6, help="of each turn")
    parser.add_argument("--worst", type=float, default=0.97)
    parser.add_argument("--mean", type=float, default=1.0)
    parser.add_argument("--cache", help="folder of compiled kernels and tuned plans; default empty")
    parser.add_argument("--commit", help="recorded where the source is not a git checkout")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work()
        return
    with tempfile.TemporaryDirectory() as empty:
        os.environ["CONVT3D_CACHE_DIR"] = arguments.cache or empty
        rows = list(measured(arguments))
    if arguments.out:
        from convt3d.bench.record import record_text

        arguments.out.write_text(record_text(record(arguments, rows)))
    sys.exit(0 if report(rows, arguments.worst, arguments.mean) else 1)


# --- The process of one version ------------------------------------------------------------------


def work() -> None:
    """Read requests as lines of JSON; prepare a call, or time the prepared one."""
    import torch

    from convt3d.bench import cases, contenders, shapes

    device = torch.device("cuda", 0)
    call, flush = None, torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "shape" in request:
                del call
                mode = cases.MODES[request["mode"]]
                (layer,) = shapes.select([request["shape"]])
                with mode.applied(device), torch.no_grad():
                    tensors = cases.make(layer, mode, request["layout"] == "ndhwc", device)
                    call = contenders.CONTENDERS["convt3d"].prepare(request["pass"], tensors)
                    times(call, flush, 2)
                del tensors
                answer: dict[str, Any] = {}
            else:
                with cases.MODES[request["mode"]].applied(device), torch.no_grad():
                    answer = {"ms": times(call, flush, request["runs"])}
        except RuntimeError as error:
            call, answer = None, {"failed": str(error).splitlines()[0][:200]}
        print(json.dumps(answer), flush=True)


def times(call: Any, flush: Any, runs: int) -> list[float]:
    """Milliseconds of each run, with a cold L2 cache, behind a few that count for nothing.

    Those bring the GPU's clock up after the other version's turn. Before each run the GPU sleeps,
    so that the host gets ahead: what a launch takes is not counted.
    """
    import torch

    events = []
    for _ in range(WARM_RUNS):
        call()
    for _ in range(runs):
        torch.cuda._sleep(AHEAD_CYCLES)
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


# --- The comparison ------------------------------------------------------------------------------


class Version:
    """One version of the package in a process."""

    def __init__(self, root: pathlib.Path) -> None:
        self.environment = {**os.environ, "PYTHONPATH": str(root.resolve() / "src")}
        extra = os.environ.get("PYTHONPATH")
        if extra:
            self.environment["PYTHONPATH"] += os.pathsep + extra
        self.process: subprocess.Popen[str] | None = None

    def compile(self, cases: Sequence[dict[str, str]]) -> None:
        """Compile the kernels of these operations: a process for each of their kinds, at once."""
        layers: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for case in cases:
            layers[case["mode"], case["layout"], case["pass"]] += ["--shape", case["shape"]]
        commands = [
            [
                *(sys.executable, "-m", "convt3d", "cache", "warm", *of_kind),
                *("--dtype", mode, "--layout", layout, "--passes", operation),
            ]
            for (mode, layout, operation), of_kind in layers.items()
        ]
        quiet = {"env": self.environment, "stdout": subprocess.DEVNULL}
        running = [subprocess.Popen(command, **quiet) for command in commands]
        codes = [process.wait() for process in running]
        if any(codes):
            raise RuntimeError("a kernel of the layers did not compile")

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE), ".", "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process is not None and self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a process that measures has ended")
        return dict(json.loads(line))

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each layer, dtype, layout and operation: runs of both versions in ms."""
    sys.path.insert(0, str(ROOT / "src"))
    cases = list(asked(arguments))
    versions = {
        "before": Version(arguments.before),
        "after": Version(ROOT),
    }
    for version in versions.values():
        version.compile(cases)
    try:
        for version in versions.values():
            version.start()
        for case in cases:
            yield {**case, **timed(versions, case, arguments.runs)}
    finally:
        for version in versions.values():
            version.stop()


def asked(arguments: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Which operations to time."""
    from convt3d.bench import shapes

    if arguments.cases:
        for line in arguments.cases.read_text().splitlines():
            yield dict(zip(("shape", "mode", "layout", "pass"), line.split(), strict=True))
        return
    layers = [shape.name for shape in shapes.select(arguments.shape.split(";"))]
    options = (arguments.dtype, arguments.layout, arguments.passes)
    for mode, layout, operation, layer in itertools.product(
        *(option.split(",") for option in options), layers
    ):
        yield {"shape": layer, "mode": mode, "layout": layout, "pass": operation}


def timed(versions: dict[str, Version], case: dict[str, str], runs: int) -> dict[str, Any]:
    """Both versions of one case: medians, least times, and how much faster it is after."""
    for side in SIDES:
        answer = versions[side].ask(**case)
        if answer:
            return {"failed": f"{side}: {answer['failed']}"}
    ms: dict[str, list[float]] = defaultdict(list)
    for side in TURNS:
        answer = versions[side].ask(mode=case["mode"], runs=runs)
        if "failed" in answer:
            return {"failed": f"{side}: {answer['failed']}"}
        ms[side] += answer["ms"]
    before, after = (statistics.median(ms[side]) for side in SIDES)
    found = {}
    for side in SIDES:
        found[f"{side}_ms"] = round(statistics.median(ms[side]), 5)
        found[f"{side}_low"] = round(min(ms[side]), 5)
    return {**found, "speedup": round(before / after, 4)}


def record(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    from convt3d.environment import environment

    return {
        "environment": environment(arguments.commit),
        "before": arguments.before.name,
        "command": sys.argv[1:],
        "runs": arguments.runs * TURNS.count("after"),
        "rows": rows,
    }


def report(rows: list[dict[str, Any]], worst: float, mean: float) -> bool:
    """Print geometric means and the slower layers; whether all bounds hold."""
    good = True
    kinds = itertools.groupby(rows, lambda row: (row["pass"], row["mode"], row["layout"]))
    for kind, group in ((kind, list(of_kind)) for kind, of_kind in kinds):
        gains = [row["speedup"] for row in group if "speedup" in row]
        of_all = statistics.geometric_mean(gains) if gains else 0.0
        good = good and of_all >= mean
        line = f"{of_all:.3f} of {len(gains)} layers, least {min(gains, default=0.0):.3f}"
        print(f"{' '.join(kind)}: geometric mean {line}")
        for row in sorted(group, key=lambda row: row.get("speedup", 0.0)):
            if row.get("speedup", 0.0) < worst:
                good = False
                what = row.get("failed") or f"{row['speedup']:.3f}"
                print(f"  {row['shape']}: {what}")
    return good


if __name__ == "__main__":
    main()
