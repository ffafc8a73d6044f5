"""Does to kernelbench/*.py what KernelBench does to a submission, and a little more. Needs a GPU.

    python tools/kernelbench_check.py --out docs/results/kernelbench-level1.json

For each file, after all have been built in parallel, in a process of its own:
  correctness  KernelBench's: both models under seed 42, five trials with inputs of their own seeds,
               torch.allclose at atol = rtol = 1e-4, PyTorch's default switches
  time         KernelBench's: CUDA events around one call, L2 overwritten before, mean of 100 runs;
               ModelNew, Model and the package's own module take turns in blocks of 20; the module
               computes in the file's arithmetic
  more         output and gradients against the Model in float64: at the problem's own extents, and
               at others, odd addresses and strides, which the file may leave to PyTorch's operator;
               an empty batch; a training step's time

With --level2, the same for kernelbench/level2/*.py, which are forward passes of whole networks:

    python tools/kernelbench_check.py --level2 --out docs/results/kernelbench-level2.json

  more         the Model's buffers, strided inputs, odd addresses, the same bits on every run, and
               what a file must refuse; with --profile, the time of each kernel

Works from a checkout; the package's own module needs cuda-core (else it is left out).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import copy
import datetime
import functools
import inspect
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

SEED = 42
TOLERANCE = 1e-4
BLOCK = 20
# Relative errors (Frobenius norms) against float64 that the arithmetic allows. Half as much again
# as the Model's is allowed, too: its operator runs at most extents, and long sums of positive
# values lose more than others by any kernel.
ERRORS = {True: 1e-3, False: 4e-6}
ROOM = 1.5
WITH_BIAS = ("kb54", "kb66", "kb73_g4", "kb77")  # built a second time with bias=True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="JSON record")
    parser.add_argument(
        "--files", help="names, comma-separated, whose rows of --out are written; default all"
    )
    parser.add_argument("--level2", action="store_true", help="the files of level 2")
    parser.add_argument("--profile", action="store_true", help="level 2: the time of each kernel")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--runs", type=int, default=100, help="timed runs, in blocks of 20")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel builds")
    parser.add_argument("--commit", help="recorded where the source is not a git checkout")
    parser.add_argument("--extensions", help="folder that keeps what was built; default none does")
    parser.add_argument("--build", help=argparse.SUPPRESS)
    parser.add_argument("--evaluate", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.build:
        load(arguments.build, with_bias=arguments.build in WITH_BIAS)
    elif arguments.evaluate and is_level2(arguments.evaluate):
        options = (arguments.trials, arguments.runs, arguments.profile)
        print(json.dumps(evaluate_level2(arguments.evaluate, *options)))
    elif arguments.evaluate:
        print(json.dumps(evaluate(arguments.evaluate, arguments.trials, arguments.runs)))
    else:
        sys.exit(run_all(arguments))


# ---------------------------------------------------------------- parent process


def run_all(arguments: argparse.Namespace) -> int:
    from convt3d.bench.record import digits, record_text
    from convt3d.environment import environment

    folder = ROOT / "kernelbench" / ("level2" if arguments.level2 else "")
    names = sorted((path.stem for path in folder.glob("*.py")), key=_by_number)
    if arguments.files:
        names = arguments.files.split(",")
    here = environment(arguments.commit)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    record: dict[str, Any] = {"environment": here, "date": now, "files": {}}
    if arguments.files and arguments.out and arguments.out.exists():
        record = json.loads(arguments.out.read_text())
    with tempfile.TemporaryDirectory() as scratch:
        built_in = arguments.extensions or scratch
        child = os.environ | {"TORCH_EXTENSIONS_DIR": built_in, "MAX_JOBS": "2"}
        begin = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            builds = pool.map(lambda name: _child(child, "--build", name), names)
            built = dict(zip(names, builds, strict=True))
        print(f"built in {time.perf_counter() - begin:.0f} s", flush=True)
        for name in names:
            row: dict[str, Any] = {"error": _said(built[name])}
            if built[name].returncode == 0:
                options = ["--trials", str(arguments.trials), "--runs", str(arguments.runs)]
                options += ["--profile"] if arguments.profile else []
                done = _child(child, "--evaluate", name, *options)
                row = {"error": _said(done)}
                if done.returncode == 0:
                    last = done.stdout.splitlines()[-1]
                    row = json.loads(last, parse_float=lambda text: digits(float(text)))
            kept = record["environment"]  # that of the rows kept
            row |= {fact: here[fact] for fact in ("commit", "gpu") if here[fact] != kept[fact]}
            record["files"][name] = row
            print(f"{name:8} {_summary(row)}", flush=True)
            if arguments.out:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(record_text(record))
    if arguments.level2:
        print(geometric_mean(record["files"]))
    return 0 if all(row.get("passed") for row in record["files"].values()) else 1


def _by_number(name: str) -> tuple[int, str]:
    return int(re.sub(r"\D", "", name.split("_")[1 if is_level2(name) else 0])), name


def geometric_mean(rows: dict[str, dict[str, Any]]) -> str:
    """How many times as fast as the Model files are, of those that ran."""
    found = [row["model_ms"] / row["model_new_ms"] for row in rows.values() if "error" not in row]
    mean = math.exp(sum(map(math.log, found)) / len(found)) if found else math.nan
    passed = sum(bool(row.get("passed")) for row in rows.values())
    return f"{passed} of {len(rows)} pass, {mean:.2f} times as fast as eager in the geometric mean"


def _child(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "faulthandler", __file__, *options]
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(command, 1, "", f"no end after {error.timeout} s")


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return f"exit code {done.returncode}\n{done.stderr[-4000:]}"


def _summary(row: dict[str, Any]) -> str:
    if "error" in row:
        return "ERROR " + row["error"].strip()[-600:]
    times = [("ModelNew", "model_new_ms"), ("Model", "model_ms"), ("module", "module_ms")]
    parts = [f"{label} {row[key]:.3f} ms" for label, key in times if row.get(key)]
    parts.append(f"{row['model_ms'] / row['model_new_ms']:.1f}x")
    parts.append(f"allclose {row['trials_passed']}/{row['trials']}")
    parts.append(f"largest difference {row['largest_difference']:.1e}")
    failed = [check for check, value in row["checks"].items() if not value["passed"]]
    parts.append("checks pass" if not failed else f"FAILED: {', '.join(failed)}")
    return ", ".join(parts)


# ---------------------------------------------------------------- one file


def load(name: str, with_bias: bool) -> dict[str, Any]:
    """Execute problem and file among the same names, as KernelBench does; compiles the kernels."""
    context: dict[str, Any] = {}
    level = "level2" if is_level2(name) else ""
    exec((ROOT / "kernelbench" / "problems" / level / f"{name}.py").read_text(), context)
    exec((ROOT / "kernelbench" / level / f"{name}.py").read_text(), context)
    if with_bias:
        context["extension"](True)
    return context


def is_level2(name: str) -> bool:
    return name.startswith("l2_")


def set_seed(seed: int) -> None:
    torch.manual_seed(seed)
    torch.cuda.manual_seed(seed)


def evaluate(name: str, trials: int, runs: int) -> dict[str, Any]:
    context = load(name, with_bias=False)
    set_seed(SEED)
    init_inputs = context["get_init_inputs"]()
    models = {}
    for key in ("Model", "ModelNew"):
        set_seed(SEED)
        models[key] = context[key](*init_inputs).to("cuda", torch.float32)
    model, new = models["Model"], models["ModelNew"]
    row: dict[str, Any] = {"digest": digest(name), "trials": trials, "timed_runs": runs}
    row |= compare(model, new, context["get_inputs"], trials)
    row["checks"] = more_checks(model, new, context["get_inputs"])
    if name in WITH_BIAS:
        arguments = inspect.signature(context["Model"]).bind(*init_inputs).arguments
        biased = [context[key](**arguments, bias=True).cuda() for key in ("Model", "ModelNew")]
        biased[1].load_state_dict(biased[0].state_dict())
        checks = more_checks(*biased, context["get_inputs"])
        row["checks"] |= {f"{check}, bias": value for check, value in checks.items()}
    row |= times(model, new, context["get_inputs"], runs)
    if "module_ms" in row:
        kept_up = row["model_new_ms"] <= 1.05 * row["module_ms"]
        row["checks"]["as fast as the package's module, less 5%"] = {"passed": kept_up}
    row["passed"] = row["trials_passed"] == trials and all(
        value["passed"] for value in row["checks"].values()
    )
    return row


def digest(name: str) -> str:
    """The digest of a file's kernels, from its head."""
    folder = ROOT / "kernelbench" / ("level2" if is_level2(name) else "")
    found = re.search(r"kernels (\w{12})", (folder / f"{name}.py").read_text())
    assert found is not None
    return found.group(1)


def evaluate_level2(name: str, trials: int, runs: int, profile: bool) -> dict[str, Any]:
    context = load(name, with_bias=False)
    set_seed(SEED)
    init_inputs = context["get_init_inputs"]()
    models = []
    for key in ("Model", "ModelNew"):
        set_seed(SEED)
        models.append(context[key](*init_inputs).to("cuda", torch.float32))
    row: dict[str, Any] = {"digest": digest(name), "trials": trials, "timed_runs": runs}
    row |= compare(*models, context["get_inputs"], trials)
    row["checks"] = checks_of_level2(*models, context["get_inputs"])
    set_seed(SEED)
    inputs = [x.cuda() for x in context["get_inputs"]()]
    with torch.no_grad():
        row |= mean_times({"model_new": models[1], "model": models[0]}, inputs, runs)
        if profile:
            row["kernels_ms"] = kernel_times(functools.partial(models[1], *inputs))
    row["passed"] = row["trials_passed"] == trials and all(
        value["passed"] for value in row["checks"].values()
    )
    return row


def checks_of_level2(
    model: torch.nn.Module, new: torch.nn.Module, get_inputs: Callable[[], list[Any]]
) -> dict[str, dict[str, Any]]:
    """After the trials, which have called both models as often."""
    checks: dict[str, dict[str, Any]] = {}
    theirs = model.state_dict()
    checks["the Model's state"] = {
        "passed": list(theirs) == list(new.state_dict())
        and all(
            torch.allclose(tensor, theirs[key], atol=TOLERANCE, rtol=TOLERANCE)
            for key, tensor in new.state_dict().items()
        )
    }
    set_seed(SEED)
    inputs = [x.cuda() for x in get_inputs()]
    first, *others = inputs
    with torch.no_grad():
        want = new(*inputs)
        odd = torch.empty(first.numel() + 1, device="cuda")[1:].view(first.shape).copy_(first)
        last = first.to(memory_format=torch.channels_last_3d)
        for label, x in (("odd address", odd), ("channels_last", last), ("another call", first)):
            checks[f"the same bits: {label}"] = {"passed": torch.equal(new(x, *others), want)}
    refused = []
    for wrong in (first.half(), first.cpu(), first[:, 1:], first[:, :, 1:], first[1:]):
        try:
            new(wrong, *others)
        except (TypeError, RuntimeError) as error:
            refused.append(str(error).splitlines()[0])
    with tf32_allowed(False):
        try:
            new(*inputs)
        except RuntimeError as error:
            refused.append(str(error).splitlines()[0])
    checks["other calls are refused"] = {"passed": len(refused) == 6, "messages": refused}
    return checks


def kernel_times(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of each kernel of a call, by name, in the order of their first launch."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiled:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in sorted(profiled.events(), key=lambda event: event.time_range.start):
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name] = found.get(event.name, 0.0) + event.time_range.elapsed_us() / 5e3
    return found


def compare(
    model: torch.nn.Module, new: torch.nn.Module, get_inputs: Callable[[], list[Any]], trials: int
) -> dict[str, Any]:
    """KernelBench's correctness: every trial within atol = rtol = 1e-4."""
    torch.manual_seed(SEED)
    seeds = [int(torch.randint(0, 2**32 - 1, (1,)).item()) for _ in range(trials)]
    passed, largest = 0, 0.0
    with torch.no_grad():
        for seed in seeds:
            set_seed(seed)
            inputs = [x.cuda() for x in get_inputs()]
            want, got = model(*inputs), new(*inputs)
            torch.cuda.synchronize()
            largest = max(largest, float((want - got).abs().max()))
            same = want.shape == got.shape
            passed += int(same and torch.allclose(want, got, atol=TOLERANCE, rtol=TOLERANCE))
            del want, got, inputs
    return {"trials_passed": passed, "largest_difference": largest}


def more_checks(
    model: torch.nn.Module, new: torch.nn.Module, get_inputs: Callable[[], list[Any]]
) -> dict[str, dict[str, Any]]:
    """Output and gradients against the Model in float64, as relative errors."""
    own = ("its own extents", get_inputs()[0].cuda())
    exact = copy.deepcopy(model).double()
    layer = layer_of(model)
    channels, grouped = layer.in_channels, layer.groups > 1
    least = least_size(layer)
    checks: dict[str, dict[str, Any]] = {}
    for allowed in (True, False):
        kind = "TF32 allowed" if allowed else "IEEE"
        limit = ERRORS[allowed and not grouped]
        for label, x in (own, *inputs_of_many_kinds(channels, least)):
            errors, pytorch = (errors_of(exact, m, x, allowed) for m in (new, model))
            checks[f"{kind}, {label}"] = {
                "passed": all(
                    error <= max(limit, ROOM * pytorch[name]) for name, error in errors.items()
                ),
                "limit": limit,
                "errors": errors,
                "pytorch_errors": pytorch,
            }
    size = [max(n, m) for n, m in zip((5, 6, 7), least, strict=True)]
    empty = new(torch.rand(0, channels, *size, device="cuda", requires_grad=True))
    empty.sum().backward()
    zero = all(p.grad is not None and not p.grad.any() for p in new.parameters())
    checks["empty batch"] = {"passed": zero and empty.shape[0] == 0}
    x = torch.rand(2, channels, *size, device="cuda")
    same = all(torch.equal(new(x), new(x)) for _ in range(3))
    checks["the same bits on every run"] = {"passed": same}
    checks["unbatched"] = {"passed": torch.equal(new(x[0]), new(x)[0])}
    refused = []
    for wrong in (x.half(), x.cpu(), x[:, 1:]):
        try:
            new(wrong)
        except (TypeError, RuntimeError) as error:
            refused.append(str(error).splitlines()[0])
    checks["other tensors are refused"] = {"passed": len(refused) == 3, "messages": refused}
    return checks


def layer_of(model: torch.nn.Module) -> torch.nn.Conv3d | torch.nn.ConvTranspose3d:
    """The convolution of a Model."""
    kinds = (torch.nn.Conv3d, torch.nn.ConvTranspose3d)
    return next(m for m in model.modules() if isinstance(m, kinds))


def least_size(layer: torch.nn.Conv3d | torch.nn.ConvTranspose3d) -> tuple[int, int, int]:
    """The smallest extents of an input."""
    from convt3d.bench.shapes import Shape
    from convt3d.export.layer import geometry_of

    return Shape("", 1, (1, 1, 1), False, geometry_of(layer)).least_size


def inputs_of_many_kinds(
    channels: int, least: tuple[int, int, int]
) -> list[tuple[str, torch.Tensor]]:
    """Inputs of these channels, whose extents are at least ``least``."""

    def rand(batch: int, *size: int) -> torch.Tensor:
        enough = (max(n, m) for n, m in zip(size, least, strict=True))
        return torch.rand(batch, channels, *enough, device="cuda")

    odd, even = rand(2, 6, 7, 9), rand(2, 6, 7, 8)
    shifted = torch.empty(even.numel() + 1, device="cuda")[1:].view(even.shape).copy_(even)
    small = rand(1, 1, 4, 4)
    return [
        (" x ".join(map(str, (1, *small.shape[2:]))) + " voxels", small),
        ("odd extents", odd),
        ("wide rows", rand(1, 3, 5, 132)),
        ("tall", rand(3, 33, 34, 8)),
        ("odd address", shifted),
        ("channels_last", odd.to(memory_format=torch.channels_last_3d)),
        ("strided view", rand(2, 6, 7, 2 * max(9, least[2]))[..., ::2]),
    ]


def errors_of(
    exact: torch.nn.Module, new: torch.nn.Module, x: torch.Tensor, tf32: bool
) -> dict[str, float]:
    """Relative errors of the output and of every gradient; ``exact`` computes without TF32."""
    mine = x.detach().requires_grad_()
    theirs = x.detach().to(next(exact.parameters()).dtype, copy=True).requires_grad_()
    with tf32_allowed(tf32):
        y = new(mine)
        gy = torch.rand_like(y)
        got = torch.autograd.grad(y, [mine, *new.parameters()], gy)
    with tf32_allowed(False):
        want = exact(theirs)
        expected = torch.autograd.grad(want, [theirs, *exact.parameters()], gy.to(want.dtype))
    names = ["output", "input", *(n.rsplit(".", 1)[-1] for n, _ in new.named_parameters())]
    return {
        name: float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())
        for name, a, b in zip(names, (y, *got), (want, *expected), strict=True)
    }


# ---------------------------------------------------------------- time


def times(
    model: torch.nn.Module, new: torch.nn.Module, get_inputs: Callable[[], list[Any]], runs: int
) -> dict[str, Any]:
    """Mean milliseconds of a call, and of a call with its backward pass."""
    set_seed(SEED)
    inputs = [x.cuda() for x in get_inputs()]
    calls: dict[str, Callable[..., Any]] = {"model_new": new, "model": model}
    x = inputs[0].clone().requires_grad_()
    gradient = torch.rand_like(model(x))
    steps = {name: training_step(module, x, gradient) for name, module in calls.items()}
    row: dict[str, Any] = {}
    module, reason = package_module(model)
    if module is None:
        row["module_left_out"] = reason
    else:
        alike = functools.partial(in_files_arithmetic, layer_of(model))
        calls["module"] = alike(module)
        steps["module"] = alike(training_step(module, x, gradient))
    row |= mean_times(calls, inputs, runs)
    for name, step in steps.items():
        step()
        found = timed(step, 10)
        row[f"{name}_train_ms"] = sum(found) / len(found)
    return row


def mean_times(
    calls: dict[str, Callable[..., Any]], inputs: list[torch.Tensor], runs: int
) -> dict[str, float]:
    """Mean and median milliseconds of each of some calls, which take turns."""
    row: dict[str, float] = {}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call(*inputs)
            torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for block in range(max(1, runs // BLOCK)):
        # Back and forth: who always follows a slow neighbour meets another clock.
        for name in list(calls) if block % 2 == 0 else reversed(calls):
            samples[name] += timed(functools.partial(calls[name], *inputs), min(runs, BLOCK))
    for name, found in samples.items():
        row[f"{name}_ms"] = sum(found) / len(found)
        row[f"{name}_ms_median"] = sorted(found)[len(found) // 2]
    return row


def training_step(
    call: torch.nn.Module, x: torch.Tensor, gradient: torch.Tensor
) -> Callable[[], Any]:
    leaves = [x, *call.parameters()]
    return lambda: torch.autograd.grad(call(x), leaves, gradient)


def timed(call: Callable[[], Any], runs: int) -> list[float]:
    """Milliseconds of each run with a cold L2; one more run comes first and is not counted."""
    found = []
    for run in range(runs + 1):
        torch.cuda.synchronize()
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.empty((32, 1024, 1024), dtype=torch.int64, device="cuda").fill_(42)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if run > 0:
            found.append(begin.elapsed_time(end))
    return found


def package_module(model: torch.nn.Module) -> tuple[torch.nn.Module | None, str | None]:
    """The Model with the package's own layer in place of PyTorch's; else why not."""
    import convt3d
    from convt3d.cuda import backend
    from convt3d.export.layer import geometry_of

    geometry = geometry_of(layer_of(model))
    device = torch.device("cuda", torch.cuda.current_device())
    reason = backend.refusal("forward", geometry, torch.float32, device)
    if reason is not None:
        return None, reason
    return convt3d.convert(copy.deepcopy(model)), None


def in_files_arithmetic(layer: torch.nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of the package's module, without TF32 where the exported file avoids it."""
    from convt3d.export.layer import geometry_of
    from convt3d.export.variants import of_few_channels

    if not of_few_channels(geometry_of(layer)):
        return call

    def without_tf32(*inputs: torch.Tensor) -> Any:
        with tf32_allowed(False):
            return call(*inputs)

    return without_tf32


@contextlib.contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Inside, PyTorch's switch for convolutions in TF32 stands so."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


if __name__ == "__main__":
    main()
