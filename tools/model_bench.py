"""Time of whole networks and of their up layers, before and after convt3d.convert.

    python tools/model_bench.py --out docs/results/models-h200.json
    python tools/model_bench.py --small --precisions fp32 --out /tmp/models.json      (on CPU)

For each network, precision and setting of torch.backends.cudnn.benchmark (False is PyTorch's
default; nnU-Net sets True), medians in ms of the network as built and of a converted copy, in turn:
  inference   forward in eval mode without gradients
  training    forward and backward
and for each of its ConvTranspose3d layers alone, on the input that it gets inside the network. The
share of the up layers is the sum over them divided by the network's own time.

Under torch.backends.cudnn.benchmark our layers are tuned as well, seconds for each at its first
call (the winners stay in the kernel cache); --no-tuning leaves that out.

PyTorch keeps one cuDNN plan per shape and process, so each setting has a process of its own.
Networks of libraries that are not installed are left out. Rows are merged into an existing file.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import convt3d  # noqa: E402
from convt3d.bench.timing import measure  # noqa: E402
from convt3d.cuda import launch  # noqa: E402
from convt3d.environment import environment  # noqa: E402
from support.networks import NETWORKS  # noqa: E402

KINDS = ("inference", "training")
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("tf32", "fp32", *AUTOCAST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="JSON record")
    parser.add_argument("--networks", help="names or parts of names, comma-separated; default all")
    parser.add_argument("--precisions", default="tf32,bf16", help=f"of {', '.join(PRECISIONS)}")
    parser.add_argument("--cudnn-benchmark", default="False,True", help="settings to measure")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds per measurement")
    parser.add_argument("--no-tuning", action="store_true", help="our plans as the models choose")
    parser.add_argument("--small", action="store_true", help="tiny networks, to try the tool")
    parser.add_argument("--commit", help="recorded where the source is not a git checkout")
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.no_tuning:
        leave_untuned()
    if arguments.worker:
        rows = []
        for row in _rows(arguments):
            rows.append(row)
            if arguments.out:  # at once: a run that is cut off keeps what it has
                _merge(arguments.out, [row], arguments.commit)
        arguments.worker.write_text(json.dumps(rows))
        return
    rows = []
    for setting in arguments.cudnn_benchmark.split(","):
        with tempfile.TemporaryDirectory() as folder:
            result = pathlib.Path(folder) / "rows.json"
            command = [sys.executable, __file__, *_without_setting(sys.argv[1:])]
            command += ["--cudnn-benchmark", setting, "--worker", str(result)]
            subprocess.run(command, check=True)
            rows += json.loads(result.read_text())
    report(rows)


def _without_setting(command: list[str]) -> list[str]:
    """The arguments without --cudnn-benchmark and its value."""
    kept, skip = [], False
    for word in command:
        if not skip and not word.startswith("--cudnn-benchmark"):
            kept.append(word)
        skip = word == "--cudnn-benchmark"
    return kept


def _merge(path: pathlib.Path, rows: list[dict[str, Any]], commit: str | None) -> None:
    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["network"], row["precision"], row["cudnn_benchmark"]

    old = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {key(row) for row in rows}
    kept = [row for row in old if key(row) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"environment": environment(commit), "rows": kept + rows}
    path.write_text(json.dumps(record, indent=1) + "\n")


def _rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = [part.strip().lower() for part in (arguments.networks or "").split(",")]
    setting = arguments.cudnn_benchmark == "True"
    torch.backends.cudnn.benchmark = setting
    for name, network in NETWORKS.items():
        if not any(part in name.lower() for part in wanted):
            continue
        if network.missing:
            print(f"{name}: {network.missing}", file=sys.stderr)
            continue
        for precision in arguments.precisions.split(","):
            begin = time.perf_counter()
            torch.manual_seed(0)
            try:
                before = network.build(arguments.small).to(device)
                x = network.input(arguments.small, device)
                with arithmetic(precision, device):
                    found = compare(before, x, precision, arguments.budget)
            except ImportError as error:  # of what a library itself needs
                print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            print(f"{name}, {precision}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
            yield {
                "network": name,
                "precision": precision,
                "cudnn_benchmark": setting,
                "tuned": setting and not arguments.no_tuning,
                "input": list(x.shape),
                **found,
            }


def leave_untuned() -> None:
    """Keep torch.backends.cudnn.benchmark from tuning our layers, in this process."""
    launch._tune_once = lambda *arguments: None


@contextlib.contextmanager
def arithmetic(precision: str, device: torch.device) -> Iterator[None]:
    """The switches of a precision; autocast is entered by each call, as its casts are cached."""
    if precision not in PRECISIONS:
        raise SystemExit(f"unknown precision {precision}; known are {', '.join(PRECISIONS)}")
    allowed = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = allowed
    with torch.backends.cudnn.flags(
        enabled=True, benchmark=torch.backends.cudnn.benchmark, allow_tf32=allowed
    ):
        yield


def autocast(precision: str, device: torch.device) -> Any:
    dtype = AUTOCAST.get(precision)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def compare(before: nn.Module, x: Tensor, precision: str, budget: float) -> dict[str, Any]:
    """Times of a network before and after conversion, of its up layers, and how far they differ."""
    after = convt3d.convert(copy.deepcopy(before))
    models = {"before": before, "after": after}
    row: dict[str, Any] = {}
    with torch.no_grad(), autocast(precision, x.device):
        ours, theirs = (m.eval()(x).float() for m in (after, before))
    row["difference"] = float((ours - theirs).norm() / theirs.norm())
    row["inference"] = _times(
        {key: _inference(m, x, precision) for key, m in models.items()}, x.device, budget
    )
    for model in models.values():
        model.train()
    calls = {key: _training(m, x, precision) for key, m in models.items()}
    row["training"] = _times(calls, x.device, budget)
    if x.is_cuda:
        row["training_peak_bytes"] = {key: _peak(call) for key, call in calls.items()}
    for model in models.values():
        model.zero_grad(set_to_none=True)
    row["up_layers"] = up_layers(before, after, x, precision, budget)
    for kind in KINDS:
        total = {k: sum(layer[kind][k] for layer in row["up_layers"]) for k in models}
        row[kind]["up_before"], row[kind]["up_after"] = total["before"], total["after"]
        row[kind]["up_share_before"] = total["before"] / row[kind]["before"]
    return row


def up_layers(
    before: nn.Module, after: nn.Module, x: Tensor, precision: str, budget: float
) -> list[dict[str, Any]]:
    """Times of each ConvTranspose3d alone, on the input that it gets in a forward pass of ``x``."""
    inputs: dict[str, Tensor] = {}
    hooks = []
    for name, module in before.named_modules():
        if isinstance(module, nn.ConvTranspose3d):

            def keep(_module: nn.Module, arguments: tuple[Any, ...], name: str = name) -> None:
                inputs[name] = arguments[0].detach().clone()

            hooks.append(module.register_forward_pre_hook(keep))
    with torch.no_grad(), autocast(precision, x.device):
        before(x)
    for hook in hooks:
        hook.remove()
    rows = []
    for name, given in inputs.items():
        layers = {"before": before.get_submodule(name), "after": after.get_submodule(name)}
        given.requires_grad_()
        row: dict[str, Any] = {"name": name, "layer": repr(layers["before"])}
        row["input"] = list(given.shape)
        for kind, make in zip(KINDS, (_inference, _gradients), strict=True):
            row[kind] = _times(
                {k: make(layer, given, precision) for k, layer in layers.items()},
                x.device,
                budget / 8,
            )
        rows.append(row)
    return rows


def _inference(model: nn.Module, x: Tensor, precision: str) -> Callable[[], Any]:
    def call() -> None:
        with torch.no_grad(), autocast(precision, x.device):
            model(x)

    return call


def _training(model: nn.Module, x: Tensor, precision: str) -> Callable[[], Any]:
    def call() -> None:
        model.zero_grad(set_to_none=True)
        with autocast(precision, x.device):
            y = model(x)
        (y[0] if isinstance(y, (list, tuple)) else y).float().square().mean().backward()

    return call


def _gradients(layer: nn.Module, x: Tensor, precision: str) -> Callable[[], Any]:
    """Forward and all gradients of one layer; ``x`` requires grad."""
    inputs = [x, *layer.parameters()]
    with autocast(precision, x.device):
        gy = torch.randn_like(layer(x))

    def call() -> None:
        with autocast(precision, x.device):
            y = layer(x)
        torch.autograd.grad(y, inputs, gy)

    return call


def _times(calls: dict[str, Callable[[], Any]], device: torch.device, budget: float) -> Any:
    found = measure(calls, device, budget)
    return {
        **{key: timing.ms for key, timing in found.items()},
        "spread": {key: [timing.low, timing.high, timing.runs] for key, timing in found.items()},
    }


def _peak(call: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def report(rows: list[dict[str, Any]]) -> None:
    """A table: ms before and after, the gain, and the same for the up layers with their share."""
    for row in rows:
        bench = "cudnn.benchmark" if row["cudnn_benchmark"] else "default"
        print(f"{row['network']}, {row['precision']}, {bench}; differs by {row['difference']:.1e}")
        for kind in KINDS:
            t = row[kind]
            up, share = t["up_before"] / t["up_after"], t["up_share_before"]
            print(
                f"  {kind:9} {t['before']:9.2f} -> {t['after']:9.2f} ms "
                f"({t['before'] / t['after']:.2f}x)   up layers {t['up_before']:8.3f} -> "
                f"{t['up_after']:8.3f} ms ({up:.2f}x), share {share:.0%}"
            )


if __name__ == "__main__":
    main()
