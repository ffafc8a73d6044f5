"""Checks kernels on a GPU against float64; plan_times.py times them.

    python tools/kernel_check.py                      random geometries against float64
    python tools/kernel_check.py --cases              every kernel at the emulator's test cases
    python tools/kernel_check.py --cases --fused      the same with steps and slices
    python tools/kernel_check.py --tiles              every tile of plan/wgrad_ndhwc/

Kernels are compiled in parallel beforehand.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import pathlib
import pickle
import random
import re
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
from convt3d.cuda import compiler, plan, tuning
from convt3d.cuda.epilogue import attach, epilogue_of, settle, starts_aligned
from convt3d.cuda.operation import Operation
from convt3d.cuda.schedule import OPERATIONS, Gpu, Problem
from convt3d.export.pinned import pin
from convt3d.fusion import fusion_of
from convt3d.geometry import Geometry
from convt3d.precision import Arithmetic

DTYPES = {
    Arithmetic.TF32: torch.float32,
    Arithmetic.IEEE: torch.float32,
    Arithmetic.F16: torch.float16,
    Arithmetic.BF16: torch.bfloat16,
}
TOLERANCES = {
    Arithmetic.TF32: 6e-4,
    Arithmetic.IEEE: 1.5e-6,
    Arithmetic.F16: 1e-3,
    Arithmetic.BF16: 6e-3,
}


def matches(one, pattern):
    name = f"{type(one).__name__}: {one.describe().get('pipeline', '')}"
    return re.search(pattern, name) is not None


def processes():
    spawn = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(os.cpu_count(), spawn)


def compile_one(job):
    spec, target = job
    begin = time.perf_counter()
    try:
        compiler.compile_cubin(spec, target)
        return (spec, time.perf_counter() - begin, None)
    except Exception as error:
        return (spec, 0.0, str(error)[-2000:])


def compile_all(plans_and_sizes, gpu):
    target = compiler.architecture(gpu.capability)
    specs = {
        launch.kernel
        for one, batch, size in plans_and_sizes
        for launch in one.schedule(batch, size).launches
    }
    slowest, failed = 0.0, set()
    with processes() as pool:
        for spec, seconds, error in pool.map(compile_one, [(s, target) for s in specs]):
            slowest = max(slowest, seconds)
            if error:
                failed.add(spec)
                print("COMPILE FAILED", spec, error, flush=True)
    print(f"{len(specs)} kernels compiled, slowest {slowest:.2f} s", flush=True)
    return failed


def make(problem, batch, input_size, device="cpu"):
    """Random operands; made on the host a sanitizer sees copies, and no kernel but ours."""
    g, dtype = problem.geometry, DTYPES[problem.arithmetic]

    def normal(*size):
        return torch.randn(size, dtype=dtype, device=device)

    return (
        normal(batch, g.in_channels, *input_size),
        normal(*g.weight_size),
        normal(g.out_channels) if problem.bias else None,
        normal(batch, g.out_channels, *g.output_size(input_size)),
    )


def on_device(t, last=False):
    """A copy in the layout of a problem, which the host has arranged."""
    if last:
        t = t.contiguous(memory_format=torch.channels_last_3d)
    return t.to("cuda")


def tensors_of(problem, x, w, b, gy):
    """Operands on the device by name, and the one to be written, which holds no number yet."""
    source_last, target_last = problem.source_channels_last, problem.target_channels_last
    if problem.operation == "grad_weight":
        out = on_device(torch.full_like(w, float("nan")), source_last and target_last)
        t = {
            "source": on_device(x, source_last),
            "target": on_device(gy, target_last),
            "weight": out,
        }
        if b is not None:
            t["bias"] = on_device(torch.full_like(b, float("nan")))
        return t, out
    source, target = (x, gy) if problem.operation == "forward" else (gy, x)
    out = on_device(torch.full_like(target, float("nan")), target_last)
    t = {
        "source": on_device(source, source_last),
        "weight": on_device(w, source_last and target_last),
        "target": out,
    }
    if b is not None:
        t["bias"] = on_device(b)
    return t, out


def expected(problem, x, w, b, gy):
    """What float64 says of the result, on the device."""
    g = problem.geometry
    x64, w64 = (on_device(t).double().requires_grad_() for t in (x, w))
    y = F.conv_transpose3d(
        x64, w64, None if b is None else on_device(b).double(),
        g.stride, g.padding, g.output_padding, g.groups, g.dilation,
    )  # fmt: skip
    if problem.operation == "forward":
        return y.detach()
    wanted = x64 if problem.operation == "grad_input" else w64
    return torch.autograd.grad(y, wanted, on_device(gy).double())[0]


def random_geometry(r):
    groups = r.choice([1, 1, 1, 2, 3, 4, 8])
    wide = [48, 64, 128] if groups == 1 else []
    per_in = r.choice([1, 2, 3, 5, 8, 16, 17, 24, *wide])
    per_out = r.choice([1, 2, 3, 5, 8, 16, 19, 32, *wide])
    kernel = tuple(r.choice([1, 2, 3, 3, 4, 5]) for _ in range(3))
    stride = tuple(r.choice([1, 1, 2, 2, 3]) for _ in range(3))
    if r.random() < 0.2:
        stride = kernel
    dilation = tuple(r.choice([1, 1, 1, 2, 3]) for _ in range(3))
    padding = tuple(r.randint(0, max(0, k - 1)) for k in kernel)
    if stride == kernel and r.random() < 0.7:
        padding = (0, 0, 0)
    extra = tuple(r.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
    return Geometry(
        groups * per_in, groups * per_out, kernel, stride, padding, extra, dilation, groups
    )


def random_size(r, small):
    """Input extents; some are plates or rods, which share a plan with large volumes."""
    if r.random() < 0.4:
        size = [r.choice([1, 1, 2, 3]), r.choice([1, 2, 24 if small else 66])]
        size.append(r.choice([8, 16, 40] if small else [8, 16, 40, 64, 72, 130]))
        if r.random() < 0.3:
            r.shuffle(size)
        return tuple(size)
    extents = [1, 2, 3, 5, 7, 9] if small else [1, 2, 3, 5, 7, 11, 16, 20, 37]
    return tuple(r.choice(extents) for _ in range(3))


def way(one, batch, size):
    """What tells apart plans that fill, multiply or store differently: all but their numbers."""
    words = {re.sub(r"[\d.]+", "", t) for name, t in one.describe().items() if name != "axes"}
    fills = {
        macro
        for launch in one.schedule(batch, size).launches
        for macro in launch.kernel.macros
        if macro[0].endswith(("_MAP", "_FILL", "_CLEAR", "_VECTOR", "WHOLE_COLUMNS", "SUM_BIAS"))
    }
    p = one.problem
    bits = "16 bits" if DTYPES[p.arithmetic].itemsize == 2 else p.arithmetic
    return type(one), p.operation, bits, frozenset(words | fills)


def distinct(jobs):
    """Jobs that are kept for several reasons, once."""
    return list({id(job): job for job in jobs}.values())


def best_of_each_way(job):
    """By way, the best plan for a problem."""
    problem, batch, size, gpu = job
    found = {}
    for one in plan.ranked_plans(problem, batch, size, gpu):
        if problem.bias and not (problem.forward or one.schedule(batch, size).sums_bias):
            continue
        found.setdefault(way(one, batch, size), (one, batch, size))
    return found


def case_jobs(gpu):
    """Every case of the emulator's tests: the best plan of each kernel that can run it.

    And the best plan of every way in which a kernel can run; gradients by weight alone, and with
    that by bias where a kernel brings it along.
    """
    from test_emulator_col2im import CASES as SCATTERED
    from test_emulator_kernels import BATCH, CASES, LAYERS
    from test_emulator_rows import CASES as RINGS

    every = [*(case for case, _ in (*RINGS, *SCATTERED)), *reversed(CASES)]
    cases = {case.problem: LAYERS[case.layer][1] for case in every}
    cases |= {
        dataclasses.replace(problem, bias=True): size
        for problem, size in cases.items()
        if problem.operation == "grad_weight"
    }
    jobs = [(problem, BATCH, size, gpu) for problem, size in cases.items()]
    with processes() as pool:
        found = list(pool.map(best_of_each_way, jobs, chunksize=8))
    kept = {}
    for ways in found:
        for one_way, job in ways.items():
            p = job[0].problem
            kept.setdefault((p, job[0].describe()["kernel"]), job)
            kept.setdefault(one_way, job)
    for job in weight_jobs():
        kept.setdefault(way(*job), job)
    jobs = distinct([*kept.values(), *tile_jobs(gpu), *column_jobs(), *few_to_many_jobs()])
    return [*jobs, *cut_jobs(jobs)]


def cut_jobs(jobs):
    """Sweeps whose CTAs have whole columns, launched on all multiprocessors: CTAs cut columns."""
    for one, batch, size in jobs:
        if isinstance(one, plan.sweep.WgmmaSweepPlan):
            cut = dataclasses.replace(pin(one, batch, size), ctas_there=one.multiprocessors)
            if cut.schedule(batch, size) != one.schedule(batch, size):
                yield cut, batch, size


def tile_jobs(gpu):
    """Every tile and test case of the gradient by weight of channels_last tensors."""
    from test_emulator_wgrad_ndhwc import CASES, every_tile, plan_of

    for geometry, size, batch, arithmetic, tile in CASES:
        yield plan_of(geometry, arithmetic, tile, gpu), batch, size
    for one, batch, size in every_tile(gpu):
        yield one, batch, size
        yield one, 3, (9, 20, 33)


def column_jobs():
    """Test cases of the gradient by weight of few channels, whose taps are columns."""
    from test_emulator_ampere_wgrad import BATCH, CASES, plans_for

    for geometry, size, arithmetic, layouts in CASES:
        for one in plans_for(Problem("grad_weight", geometry, arithmetic, *layouts), size):
            yield one, BATCH, size


def few_to_many_jobs():
    """Test cases of few channels to many on CUDA cores."""
    from test_emulator_direct import CASES, choose
    from test_emulator_kernels import BATCH, LAYERS

    for case, _, _ in CASES:
        size = LAYERS[case.layer][1]
        yield choose(case.problem, BATCH, size, Gpu()), BATCH, size


def weight_jobs():
    """Every way in which the gradient by weight fills its slabs, few of which planners choose."""
    from test_emulator_wgrad import BATCH, CASES, plan_for

    for geometry, size, arithmetic, stages, fill, wanted in CASES:
        problem = Problem("grad_weight", geometry, arithmetic)
        one = plan_for(problem, size, stages, fill, wanted)
        yield one, BATCH, size
        summing = dataclasses.replace(one, problem=dataclasses.replace(problem, bias=True))
        if summing.schedule(BATCH, size).sums_bias:
            yield summing, BATCH, size


def one_of_each(jobs):
    """One job of each kernel, operation, arithmetic, pair of layouts, epilogue, and of each way."""
    kept = {}
    for job in jobs:
        p = job[0].problem
        layouts = (p.source_channels_last, p.target_channels_last)
        kept.setdefault((type(job[0]), p.operation, p.arithmetic, layouts, p.bias), job)
        kept.setdefault(way(*job), job)
    return distinct(kept.values())


def random_jobs(arguments, gpu):
    """Random geometries; half of them with the best plan, half with any."""
    r = random.Random(arguments.seed)
    jobs = []
    while len(jobs) < arguments.count:
        geometry = random_geometry(r)
        size = random_size(r, arguments.small)
        if min(geometry.output_size(size)) < 1:
            continue
        last = arguments.channels_last
        problem = Problem(
            r.choice(arguments.operations.split(",")), geometry,
            r.choice([Arithmetic(name) for name in arguments.arithmetic.split(",")]),
            last or r.random() < 0.4, last or r.random() < 0.4, False,
        )  # fmt: skip
        if problem.forward and r.random() < 0.5:
            problem = Problem("forward", geometry, problem.arithmetic, problem.source_channels_last,
                              problem.target_channels_last, True)  # fmt: skip
        batch = r.choice([1, 2, 3])
        found = plan.ranked_plans(problem, batch, size, gpu)
        found = [one for one in found if matches(one, arguments.kernels)]
        if not found:
            continue
        jobs.append((found[0] if r.random() < 0.5 else r.choice(found), batch, size))
    return jobs


CHAINS = (
    (("scale", "add", "shift", "leaky_relu"), (0.1,)),
    (("silu",), ()),
    (("mul", "clamp", "add_scalar"), (-0.5, 2.0, 1.0)),
    (("gelu", "scale"), ()),
    (("relu",), ()),
    (("hardswish", "add"), ()),
    (("mul_scalar", "gelu_tanh"), (0.5,)),
    (("tanh", "shift", "sigmoid"), ()),
)
"""Steps that ``--fused`` attaches in turn, with their scalars."""
BESIDE = 8  # channels of the larger tensor on either side of a slice


@dataclasses.dataclass(frozen=True)
class Fused:
    """A plan with an epilogue, which its launches have."""

    plan: object
    fusion: object
    epilogue: object

    @property
    def problem(self):
        return self.plan.problem

    def schedule(self, batch, input_size):
        schedule = self.plan.schedule(batch, input_size)
        return attach(schedule, self.problem, self.epilogue)

    def describe(self):
        return self.plan.describe()

    def tensors(self, t):
        """Operands of the steps; ``t`` gets a bias where it is a step, and a slice to write to."""
        out, epilogue = t["target"], self.epilogue
        operands, left = [], list(epilogue.wide)
        for kind in self.fusion.operands:
            dtype = torch.float32 if left.pop(0) else out.dtype
            size = out.shape if kind == "tensor" else out.shape[1:2]
            of = torch.randn(size).to(dtype)
            operands.append(on_device(of, kind == "tensor" and self.problem.target_channels_last))
        if epilogue.bias:
            t["bias"] = on_device(torch.randn(out.shape[1]).to(out.dtype))
        if epilogue.channels:
            last = self.problem.target_channels_last
            whole = torch.zeros(out.shape[0], epilogue.channels, *out.shape[2:], dtype=out.dtype)
            t["target"] = on_device(whole, last)[:, BESIDE : BESIDE + out.shape[1]]
            t["target"].fill_(float("nan"))
        return operands

    def expected(self, want, t, operands):
        if self.epilogue.bias:
            want = want + t["bias"].double().view(-1, 1, 1, 1)
        return self.fusion.apply(want, [operand.double() for operand in operands])


def fuse(jobs):
    """Forward passes and gradients by input of these jobs, with steps; a third writes slices."""
    found = []
    for one, batch, size in jobs:
        p = one.problem
        if p.operation == "grad_weight":
            continue
        number = len(found)
        fusion = fusion_of(*CHAINS[number % len(CHAINS)])
        dtype = DTYPES[p.arithmetic]
        channels = p.geometry.groups * p.target_channels
        spatial = p.geometry.output_size(size) if p.forward else size
        wide = [torch.empty(0, dtype=torch.float32 if number % 2 else dtype)] * 4
        operands = wide[: len(fusion.operands)]
        operands = [
            o if kind == "channel" else o.to(dtype)
            for o, kind in zip(operands, fusion.operands, strict=True)
        ]
        all_channels = channels + 2 * BESIDE
        layout = torch.channels_last_3d if p.target_channels_last else torch.contiguous_format
        into = torch.empty(1, channels, *spatial, dtype=dtype).to(memory_format=layout)
        sliced = number % 3 == 0 and starts_aligned(into, all_channels, p.target_channels_last)
        epilogue = epilogue_of(fusion, operands, dtype, all_channels if sliced else 0)
        epilogue = dataclasses.replace(epilogue, bias=not p.forward and number % 2 == 0)
        epilogue, reason = settle(one.schedule(batch, size), p, epilogue)
        if epilogue.empty:
            print("NOT FUSED", one, reason, flush=True)
            continue
        found.append((Fused(one, fusion, epilogue), batch, size))
    return found


def check(arguments):
    torch.manual_seed(arguments.seed)
    gpu = Gpu.of(0)
    kept = pathlib.Path(arguments.plans) if arguments.plans else None
    if kept and kept.exists():
        jobs = pickle.loads(kept.read_bytes())
    else:
        if arguments.tiles:
            jobs = list(tile_jobs(gpu))
        else:
            jobs = case_jobs(gpu) if arguments.cases else random_jobs(arguments, gpu)
        if kept:
            kept.write_bytes(pickle.dumps(jobs))
    jobs = [job for job in jobs if matches(job[0], arguments.kernels)]
    if arguments.each:
        jobs = one_of_each(jobs)
    if arguments.fused:
        jobs = fuse(jobs)
    # Under a sanitizer the kernels come from the cache that an earlier run filled.
    failed = set() if arguments.no_reference else compile_all(jobs, gpu)
    bad = 0
    worst = {}
    files = {launch.kernel.file for job in jobs for launch in job[0].schedule(*job[1:]).launches}
    print(f"{len(jobs)} problems through {', '.join(sorted(files))}", flush=True)
    for one, batch, size in jobs:
        problem = one.problem
        if any(launch.kernel in failed for launch in one.schedule(batch, size).launches):
            bad += 1
            continue
        if arguments.verbose:
            print(problem, size, one, flush=True)
        x, w, b, gy = make(problem, batch, size)
        t, out = tensors_of(problem, x, w, b, gy)
        operands = one.tensors(t) if arguments.fused else ()
        out = t["target"] if arguments.fused else out
        try:
            operation = Operation.of(problem, batch, size, t["weight"])
            run = functools.partial(tuning.runner(one, operation, t), operands)
            run()
            torch.cuda.synchronize()
        except Exception as error:
            bad += 1
            print("ERROR", problem, size, one, error, flush=True)
            continue
        if arguments.no_reference:
            outs = [out, t["bias"]] if one.schedule(batch, size).sums_bias else [out]
            bad += int(any(torch.isnan(one_out.cpu()).any() for one_out in outs))
            continue
        want = expected(problem, x, w, b, gy)
        if arguments.fused:
            want = one.expected(want, t, operands)
        error = ((out.double() - want).norm() / want.norm().clamp_min(1e-30)).item()
        first = out.clone()
        if one.schedule(batch, size).sums_bias:
            sums = gy.double().sum((0, 2, 3, 4))
            by_bias = t["bias"].cpu()
            error = max(error, ((by_bias.double() - sums).norm() / sums.norm()).item())
        run()
        same = torch.equal(first, out)
        if one.schedule(batch, size).sums_bias:
            same = same and torch.equal(by_bias, t["bias"].cpu())
        worst[problem.arithmetic] = max(
            worst.get(problem.arithmetic, 0), error if error == error else 9
        )
        tolerance = TOLERANCES[problem.arithmetic] * (2 if arguments.fused else 1)
        if not error < tolerance or not same:
            bad += 1
            print("WRONG", f"{error:.2e}", "same bits" if same else "BITS DIFFER", problem, batch,
                  size, one, flush=True)  # fmt: skip
    print(f"{len(jobs)} checked, {bad} bad", {k.value: f"{v:.1e}" for k, v in worst.items()})
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", default="", help="a pattern, such as WgmmaSweep, for plans")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="extents below 10")
    parser.add_argument("--cases", action="store_true", help="the emulator's test cases")
    parser.add_argument("--tiles", action="store_true", help="every tile of WgradNdhwc plans")
    parser.add_argument("--fused", action="store_true", help="with steps in the epilogue")
    every = ",".join(one.value for one in DTYPES)
    parser.add_argument("--operations", default=",".join(OPERATIONS), help="of random problems")
    parser.add_argument("--arithmetic", default=every, help="of random problems")
    parser.add_argument("--channels-last", action="store_true", help="of random problems")
    parser.add_argument("--plans", help="a file that keeps the problems for the next run")
    parser.add_argument("--each", action="store_true", help="one of each kernel and dtype alone")
    parser.add_argument("--no-reference", action="store_true", help="only run (for sanitizers)")
    parser.add_argument("--verbose", action="store_true", help="name each problem before it runs")
    sys.exit(1 if check(parser.parse_args()) else 0)
