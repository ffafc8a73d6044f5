"""Times layers with our kernels and with PyTorch as it comes, for the table of cudnn.py.

    python tools/cudnn_table.py --shape all          rows of another GPU than an H200 name it
    python tools/cudnn_table.py --shape kb61 --shape n=2,in=64,out=32,size=64,k=3,p=1
    python tools/cudnn_table.py --shape all --operation grad_weight --layout ndhwc
    python tools/cudnn_table.py --again 0.85         rows of at least so much, ours to PyTorch

Every operation, in TF32 and bfloat16, NCDHW and channels_last_3d. Rows of the same layer,
operation, element and layout are replaced, all others stay. What is
IEEE-grade in float32 (layers in groups, some of few channels) is timed in bfloat16 alone: the table
does not judge it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

from convt3d.bench import shapes  # noqa: E402
from convt3d.bench.shapes import Shape  # noqa: E402
from convt3d.cuda import compiler, cudnn, tuning  # noqa: E402
from convt3d.cuda.plan import plan_problem, problem_for  # noqa: E402
from convt3d.cuda.schedule import Gpu, Problem  # noqa: E402
from convt3d.operations import OPERATIONS  # noqa: E402
from convt3d.precision import Arithmetic  # noqa: E402

TABLE = ROOT / "src" / "convt3d" / "cuda" / "cudnn_table.jsonl"
Job = tuple[str, Problem, int, tuple[int, ...]]


def jobs(wanted: list[Shape]) -> Iterator[Job]:
    """Name, problem, batch and input size of everything that is timed."""
    for shape in wanted:
        geometry, size = shape.geometry, tuple(shape.input_size)
        if not geometry.transposed:
            geometry, size = geometry.adjoint(size), geometry.output_size(size)
        kinds = itertools.product((torch.float32, torch.bfloat16), (False, True), OPERATIONS)
        for dtype, last, operation in kinds:
            problem = problem_for(operation, geometry, dtype, last)
            if problem.arithmetic is not Arithmetic.IEEE:
                yield shape.name, problem, shape.batch, size


def compile_one(job: Job) -> None:
    """Put the kernels of a job into the cache on disk; a failure shows when it is timed."""
    _, problem, batch, size = job
    try:
        plan = plan_problem(problem, batch, size, Gpu())
        _, its_size = problem.canonical(size)
        for launch in plan.schedule(batch, its_size).launches:
            compiler.compile_cubin(launch.kernel, "sm_90a")
    except Exception as error:
        print(f"{job[0]}: {error}", file=sys.stderr)


def measure(todo: list[Job]) -> Iterator[dict[str, Any]]:
    torch.backends.cudnn.benchmark = False
    device = torch.device("cuda", 0)
    for name, problem, batch, size in todo:
        try:
            times = tuning.beside_pytorch(problem, batch, size, device)
        except RuntimeError as error:
            print(f"{name}: {problem.operation}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        ours, pytorch = (float(f"{ms:.4g}") for ms in (times.ours, times.pytorch))
        rounded = cudnn.Times(ours, pytorch, torch.cuda.get_device_name(device))
        yield cudnn.row(problem, batch, size, rounded, name)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["name"], row["operation"], row["element"], row["channels_last"]


def main() -> None:
    torch.backends.cudnn.allow_tf32 = True  # tells jobs what is IEEE-grade
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", help="as of convt3d bench")
    parser.add_argument("--again", type=float, help="rows of at least this ours / PyTorch's alone")
    parser.add_argument("--out", type=pathlib.Path, default=TABLE, help="table to update")
    parser.add_argument("--operation", default=",".join(OPERATIONS), help="of these alone")
    parser.add_argument("--layout", default="ncdhw,ndhwc", help="of these alone")
    arguments = parser.parse_args()
    if not arguments.shape and arguments.again is None:
        parser.error("--shape or --again")
    old = [json.loads(line) for line in TABLE.read_text().splitlines()]
    near = {key(row) for row in old if row["ours_ms"] / row["pytorch_ms"] >= (arguments.again or 0)}
    names = arguments.shape or dict.fromkeys(name for name, *_ in near)
    operations, layouts = arguments.operation.split(","), arguments.layout.split(",")
    todo = [
        job
        for job in jobs(shapes.select(names))
        if job[1].operation in operations
        and ("ndhwc" if job[1].channels_last else "ncdhw") in layouts
        and (arguments.again is None or key(cudnn.row(*job[1:], cudnn.Times(0, 0), job[0])) in near)
    ]
    with multiprocessing.get_context("fork").Pool() as pool:  # before CUDA is initialised
        pool.map(compile_one, todo, chunksize=1)
    found = list(measure(todo))
    new = {key(row) for row in found}
    kept = [row for row in old if key(row) not in new]
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in [*kept, *found]))
    print(f"{len(found)} rows measured, {len(kept)} kept")


if __name__ == "__main__":
    main()
