"""Times plans of layers on a GPU: how far the plan that runs is from the fastest of all that can.

    python tools/plan_times.py plan --plans FILE --shapes kb61,kb70 --operations forward
    python tools/plan_times.py plan --plans FILE --draw 40 --seed 7      random layers
    python tools/plan_times.py plan --plans FILE --draw 40 --before OLD  those that choose anew
    python tools/plan_times.py plan --plans FILE --table                 winners of the table
    python tools/plan_times.py time --plans FILE --out rows.jsonl        on a GPU
    python tools/plan_times.py report rows.jsonl

`plan` needs no GPU. It keeps, for every operation of the layers, the plan that runs, the best few
by the cost models and the best of each family; with --chosen the first alone, and with --before,
which names a file that another commit wrote so, the plans of both commits where they differ; with
--table, the winners of the table of plans, each beside what the cost models choose where that is
another: a line that loses is to be timed anew (`convt3d tune --table`). `time` compiles them in
parallel, times each alone with a cold L2, and then in turn those near the fastest. `report` prints
the time of the plan that runs over that of the fastest, and what would be lost without each family.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import pickle
import random
import statistics
import sys
from math import prod

import torch
from kernel_check import compile_all, make, matches, processes, tensors_of

from convt3d.bench import shapes as named_shapes
from convt3d.bench.shapes import Shape
from convt3d.cuda import timing, tuning
from convt3d.cuda.operation import Operation
from convt3d.cuda.plan import plan_problem, problem_for, ranked_plans, table
from convt3d.cuda.schedule import OPERATIONS, Gpu
from convt3d.geometry import Geometry
from convt3d.precision import Arithmetic

# tf32: what float32 runs in where PyTorch's switch allows TF32, as it does from the start.
DTYPES = {
    "tf32": (torch.float32, None),
    "ieee": (torch.float32, Arithmetic.IEEE),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
}
LAYOUTS = {"ncdhw": False, "ndhwc": True}
CHOSEN, WINNERS = 0, -1  # in place of how many plans beside those of each family
NEAR = 1.15  # times the fastest: plans that are timed again, in turn
_ROUNDS, _MOST_AGAIN = 5, 6
_MOST_OPERATIONS, _LEAST_OPERATIONS, _MOST_ELEMENTS = 8e11, 5e8, 1.5e8
_AGREE = 2e-2  # plans of one problem, relative norm


@dataclasses.dataclass(frozen=True)
class Job:
    """A problem, and the plans to time; the first is the one that runs."""

    name: str
    problem: object
    batch: int
    size: tuple[int, ...]
    plans: tuple[object, ...]
    decided: str  # "table" or "models"


# ------------------------------------------------------------------------------------ which layers


def drawn(count, seed):
    """Random layers as networks have them, transposed ones and Conv3d in turn."""
    r = random.Random(seed)
    found = []
    while len(found) < count:
        transposed = len(found) % 2 == 0
        channels = [3, 8, 16, 24, 32, 48, 64, 96, 128, 160, 256, 320, 512]
        many, few = (r.choice(channels) for _ in range(2))
        groups = r.choice([1] * 9 + [2, 4, 0])  # 0: depthwise
        if groups != 1:
            many = few = max(16, many // 16 * 16)
            groups = groups or many
        k = r.choice([1, 2, 3, 3, 3, 3, 4, 5, 7])
        s = r.choice([1, 1, 2]) if k > 1 else 1
        kernel, stride = [k] * 3, [s] * 3
        if r.random() < 0.2:  # anisotropic
            kernel[0], stride[0] = r.choice([(1, 1), (3, 1)])
        if k == 2:
            stride = list(kernel)
        padding = [
            0 if kk == ss else (kk - ss + 1) // 2 for kk, ss in zip(kernel, stride, strict=True)
        ]
        size = [r.choice([4, 7, 8, 12, 16, 20, 24, 32, 48, 64, 80, 96])] * 3
        if r.random() < 0.4:
            size = [
                max(2, size[0] // r.choice([1, 2, 4])),
                size[1],
                r.choice([size[2], 2 * size[2]]),
            ]
        batch = r.choice([1, 2, 2, 4, 8])
        geometry = Geometry(
            many, few, tuple(kernel), tuple(stride), tuple(padding), (0, 0, 0), (1, 1, 1), groups,
            transposed=transposed,
        )  # fmt: skip
        extents = "x".join(map(str, size))
        name = f"{geometry.label} n{batch} {extents}"
        try:
            shape = Shape(name, batch, tuple(size), False, geometry)
            elements = max(prod(shape.x_size), prod(shape.y_size))
        except ValueError:
            continue
        if min(shape.y_size) < 1 or elements > _MOST_ELEMENTS:
            continue
        if _LEAST_OPERATIONS <= shape.operations <= _MOST_OPERATIONS:
            found.append(shape)
    return found


def asked(arguments):
    """(name, problem, batch, size) of every operation, type and layout, each canonical one once."""
    if arguments.draw:
        layers = drawn(arguments.draw, arguments.seed)
    elif arguments.table:
        layers = named_shapes.select(
            sorted({row["layer"].rsplit(" ", 1)[0] for row in table.rows()})
        )
    else:
        separator = ";" if "=" in arguments.shapes else ","
        layers = named_shapes.select(
            arguments.shapes.split(separator) if arguments.shapes else named_shapes.named()
        )
    found = {}
    choices = (arguments.operations, arguments.arithmetic, arguments.layout)
    for layer, *given in itertools.product(layers, *(words.split(",") for words in choices)):
        operation, (dtype, arithmetic), last = given[0], DTYPES[given[1]], LAYOUTS[given[2]]
        shape, one = layer.as_transposed(operation)
        bias = shape.bias and operation == "forward"
        problem = problem_for(one, shape.geometry, dtype, last, bias=bias, arithmetic=arithmetic)
        problem, size = problem.canonical(shape.input_size)
        key = table.key_of(problem, shape.batch, size)
        found.setdefault(key, (f"{layer.name} {operation}", problem, shape.batch, tuple(size)))
    return list(found.values())


def job_of(count, kernels, gpu, item):
    name, problem, batch, size = item
    winner = table.recall(problem, batch, size, gpu)
    decided = "table" if winner else "models"
    if count == WINNERS:
        first = ranked_plans(problem, batch, size, gpu, first_only=True)[0] if winner else None
        plans = [winner.plan, first] if winner and winner.plan != first else []
    elif count == CHOSEN:
        plans = [plan_problem(problem, batch, size, gpu)]
    elif kernels:
        every = ranked_plans(problem, batch, size, gpu)
        plans = [one for one in every if matches(one, kernels)][:count]
    else:
        plans = tuning.candidates(problem, batch, size, gpu, count)
    return Job(name, problem, batch, size, tuple(plans), decided)


def changed(before, jobs):
    """Jobs whose first plan is another than in a file, with the plan of the file behind it."""
    with open(before, "rb") as file:
        old = {(job.problem, job.batch, job.size): job.plans for job in pickle.load(file)}
    for job in jobs:
        plans = old.get((job.problem, job.batch, job.size), ())
        others = [one for one in plans if one != job.plans[0]]
        if others:
            yield dataclasses.replace(job, plans=(job.plans[0], *others))


def plan_layers(arguments):
    major, minor = arguments.capability.split(".")
    gpu = Gpu((int(major), int(minor)))
    count = CHOSEN if arguments.chosen or arguments.before else arguments.count
    count = WINNERS if arguments.table else count
    with processes() as pool:
        one = functools.partial(job_of, count, arguments.kernels, gpu)
        jobs = list(pool.map(one, asked(arguments), chunksize=4))
    jobs = [job for job in jobs if job.plans]
    if arguments.before:
        jobs = list(changed(arguments.before, jobs))
    with open(arguments.plans, "wb") as file:
        pickle.dump(jobs, file)
    print(f"{len(jobs)} problems, {sum(len(job.plans) for job in jobs)} plans")


# -------------------------------------------------------------------------------------- on a GPU


def time_plans(arguments):
    gpu = Gpu.of(0)
    with open(arguments.plans, "rb") as file:
        jobs = pickle.load(file)
    every = [(one, job.batch, job.size) for job in jobs for one in job.plans]
    failed = compile_all(every, gpu)
    if arguments.compile_only:
        return
    flush = timing.flush_buffer("cuda")
    with open(arguments.out, "a") as file:
        for job in jobs:
            row = timed(job, failed, flush, arguments.repeats)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if not arguments.quiet:
                print(line_of(row), flush=True)


def timed(job, failed, flush, repeats):
    """Times in ms of a job's plans, with what each is."""
    x, w, b, gy = make(job.problem, job.batch, job.size, "cuda")
    t, out = tensors_of(job.problem, x, w, b, gy)
    want, rows, runs = None, [], []
    for one in job.plans:
        facts = {"type": type(one).__name__, **one.describe()}
        rows.append(facts)
        runs.append(None)
        if any(launch.kernel in failed for launch in one.schedule(job.batch, job.size).launches):
            facts["failed"] = "did not compile"
            continue
        try:
            operation = Operation.of(job.problem, job.batch, job.size, t["weight"])
            run = tuning.runner(one, operation, t)
            out.fill_(float("nan"))
            run()
            torch.cuda.synchronize()
        except RuntimeError as error:
            facts["failed"] = str(error)[:200]
            continue
        want = out.clone() if want is None else want
        agree = ((out.double() - want.double()).norm() / want.double().norm()).item()
        if not agree < _AGREE:
            facts["failed"] = f"differs from the first by {agree:.1e}"
            continue
        runs[-1] = run
        facts["ms"] = tuning.milliseconds(run, repeats, flush)
    least = min((facts["ms"] for facts in rows if "ms" in facts), default=0.0)
    near = sorted(
        (n for n, facts in enumerate(rows) if facts.get("ms", least * 9) <= NEAR * least),
        key=lambda n: rows[n]["ms"],
    )[:_MOST_AGAIN]
    if "ms" in rows[0] and 0 not in near:
        near.append(0)
    again = {n: [] for n in near}
    for _ in range(_ROUNDS if len(near) > 1 else 0):
        for n in near:
            again[n].append(tuning.milliseconds(runs[n], repeats, flush))
    for n, times in again.items():
        rows[n]["ms"] = statistics.median(times) if times else rows[n]["ms"]
    p = job.problem
    return {
        "layer": job.name,
        "operation": p.operation,
        "arithmetic": p.arithmetic.value,
        "layout": "ndhwc" if p.source_channels_last or p.target_channels_last else "ncdhw",
        "decided": job.decided,
        "plans": rows,
    }


# ---------------------------------------------------------------------------------------- results


def line_of(row):
    times = sorted(
        (plan["ms"], n, plan["type"]) for n, plan in enumerate(row["plans"]) if "ms" in plan
    )
    first = row["plans"][0]
    bad = "".join(f" FAILED {p['type']}: {p['failed']}" for p in row["plans"] if "failed" in p)
    what = f"{row['layer']} {row['operation']} {row['arithmetic']} {row['layout']}"
    if not times or "ms" not in first:
        return f"{what}{bad}"
    ratio = first["ms"] / times[0][0]
    return f"{what} {ratio:.3f} {first['ms']:.4f} {first['type']} | {times[0]}{bad}"


def mean(values):
    return statistics.geometric_mean(values) if values else float("nan")


def report(arguments):
    rows = []
    for path in arguments.rows:
        with open(path) as file:
            rows += [json.loads(line) for line in file]
    rows = [row for row in rows if "ms" in row["plans"][0]]
    ratios, without = collections.defaultdict(list), collections.defaultdict(list)
    for row in rows:
        times = [(plan["ms"], plan["type"]) for plan in row["plans"] if "ms" in plan]
        best = min(times)[0]
        kind = (row["decided"], row["operation"], row["arithmetic"], row["layout"])
        ratios[kind].append((times[0][0] / best, row["layer"]))
        for family in {name for _, name in times}:
            rest = [ms for ms, name in times if name != family]
            if rest:
                without[family].append((min(rest) / best, row))
    print("the plan that runs / the fastest: mean, worst")
    for kind, found in sorted(ratios.items()):
        worst = max(found)
        print(*kind, f"{len(found)} {mean([r for r, _ in found]):.3f} {worst[0]:.2f} {worst[1]}")
    print("without a family: mean over problems that it takes, worst ones")
    for family, found in sorted(without.items()):
        worst = sorted(found, key=lambda item: -item[0])[:3]
        names = "; ".join(
            f"{r:.2f} {row['layer']} {row['arithmetic']} {row['layout']}" for r, row in worst
        )
        print(f"{family} {len(found)} {mean([r for r, _ in found]):.3f} {names}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    planning = commands.add_parser("plan")
    planning.add_argument("--plans", required=True, help="the file to write")
    planning.add_argument(
        "--shapes", default="", help="names joined by commas, or in=64,out=1,... by semicolons"
    )
    planning.add_argument("--draw", type=int, default=0, help="random layers in place of shapes")
    planning.add_argument("--seed", type=int, default=0)
    planning.add_argument("--operations", default=",".join(OPERATIONS))
    planning.add_argument("--arithmetic", default="tf32,bf16", help="of tf32, ieee, bf16, fp16")
    planning.add_argument("--layout", default="ncdhw,ndhwc")
    planning.add_argument("--count", type=int, default=8, help="plans beside those of each family")
    planning.add_argument("--chosen", action="store_true", help="keep the plan that runs alone")
    planning.add_argument("--before", help="a file of --chosen: keep both plans where they differ")
    planning.add_argument("--table", action="store_true", help="winners of the table that differ")
    planning.add_argument("--kernels", default="", help="of this pattern alone, such as WgmmaSweep")
    planning.add_argument("--capability", default="9.0", help="8.0: what older GPUs run")
    planning.set_defaults(function=plan_layers)
    timing = commands.add_parser("time")
    timing.add_argument("--plans", required=True, help="what `plan` wrote")
    timing.add_argument("--repeats", type=int, default=6)
    timing.add_argument("--quiet", action="store_true")
    timing.add_argument("--compile-only", action="store_true", help="fill the cache, time later")
    timing.add_argument("--out", default="plan-times.jsonl")
    timing.set_defaults(function=time_plans)
    reporting = commands.add_parser("report")
    reporting.add_argument("rows", nargs="+")
    reporting.set_defaults(function=report)
    arguments = parser.parse_args()
    sys.exit(1 if arguments.function(arguments) else 0)


if __name__ == "__main__":
    main()
