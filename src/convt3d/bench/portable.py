"""Measures every form of the portable backend: what its rule of choice rests on.

``python -m convt3d.bench.portable --out docs/results/cpu-forms.json`` times all forms of each
operation in turn, in one thread, by CPU time: on a shared machine the wall clock says little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from convt3d import portable
from convt3d.bench import shapes
from convt3d.bench.record import record_text
from convt3d.bench.shapes import Shape
from convt3d.environment import environment
from convt3d.layout import empty

# Reduced named layers, and geometries around the thresholds of the rule.
CASES = (
    "n=1,in=48,out=48,size=16,k=3",
    "n=2,in=48,out=48,size=16,k=3",
    "n=1,in=16,out=16,size=32,k=3",
    "n=1,in=8,out=8,size=16,k=3,s=2,p=1,op=1",
    "n=1,in=32,out=32,size=8,k=3,s=2,p=1,op=1",
    "n=1,in=32,out=32,size=16,k=3,s=2,p=1",
    "n=2,in=32,out=32,size=16,k=3,s=2,p=1",
    "n=2,in=32,out=32,size=32,k=3,s=2,p=1",
    "n=1,in=32,out=32,size=16x32x64,k=3,s=2,p=1",
    "n=2,in=32,out=32,size=16x32x64,k=3,s=2,p=1",
    "n=1,in=16,out=16,size=48,k=3,s=2,p=1,op=1",
    "n=1,in=64,out=64,size=32,k=3,s=2,p=1,op=1",
    "n=1,in=64,out=32,size=24,k=3,s=2,p=1,op=1",
    "n=1,in=32,out=2,size=48,k=3,s=2,p=1,op=1",
    "n=1,in=32,out=8,size=48,k=3,s=2,p=1,op=1",
    "n=1,in=32,out=32,size=32,k=4,s=2,p=1",
    "n=2,in=128,out=64,size=16,k=4,s=2,p=1",
    "n=2,in=64,out=64,size=16,k=3,s=2,p=1,g=2",
    "n=2,in=64,out=64,size=16,k=3,s=2,p=1,g=4",
    "n=2,in=64,out=64,size=16,k=3,s=2,p=1,g=8",
    "n=2,in=64,out=64,size=16,k=3,s=2,p=1,g=16",
    "n=2,in=64,out=64,size=16,k=3,s=2,p=1,g=32",
    "n=2,in=64,out=64,size=32,k=3,s=2,p=1,g=32",
    "n=2,in=64,out=64,size=16,k=3,s=2,p=1,g=64",
    "n=2,in=64,out=64,size=32,k=3,s=2,p=1,g=64",
    "n=2,in=64,out=64,size=16,k=3,p=1,g=32",
    "n=1,in=64,out=64,size=32,k=4,s=2,p=1,g=64",
    "n=2,in=64,out=64,size=16,k=3,p=1,g=4",
    "n=2,in=64,out=64,size=16,k=3,p=1,g=64",
    "n=2,in=32,out=32,size=12x24x24,k=3x5x7,s=2,p=1x2x3,op=1,g=4",
    "n=2,in=32,out=32,size=8,k=3,s=2,p=1,g=4",
    "n=2,in=32,out=64,size=16,k=3,s=2,p=1,d=2",
    "n=2,in=32,out=64,size=8,k=3,s=2,p=1,d=2",
    "n=2,in=32,out=32,size=16,k=3,s=2,p=1,d=3",
    "n=2,in=32,out=32,size=16,k=3,s=3,p=1,d=2",
    "n=2,in=32,out=32,size=16,k=3,s=1,p=2,d=2",
    "n=1,in=64,out=32,size=32,k=1,s=2",
    "n=1,in=64,out=32,size=8,k=1,s=2",
    "n=2,in=320,out=320,size=8,k=2,s=2,bias=1",
    "n=1,in=320,out=256,size=8,k=2,s=2,bias=1",
    "n=2,in=256,out=128,size=16,k=2,s=2,bias=1",
    "n=1,in=128,out=64,size=16,k=2,s=2,bias=1",
    "n=1,in=128,out=64,size=32,k=2,s=2,bias=1",
    "n=1,in=64,out=32,size=32,k=2,s=2,bias=1",
    "n=1,in=32,out=32,size=64,k=2,s=2,bias=1",
    "n=1,in=64,out=32,size=20x32x32,k=1x2x2,s=1x2x2,bias=1",
    "n=1,in=384,out=5,size=4x32x48,k=2x4x4,s=2x4x4,bias=1",
    "n=1,in=32,out=16,size=8,k=2,s=2,bias=1",
    "n=1,in=32,out=16,size=16,k=2,s=2,bias=1",
    "n=1,in=16,out=1,size=24,k=4,s=4,bias=1",
)


def measure(shape: Shape, dtype: torch.dtype, channels_last: bool, budget_s: float) -> list[Any]:
    """One row per operation: milliseconds of CPU time of every form, and which one is chosen."""
    g = shape.geometry
    like = torch.empty(0, dtype=dtype)
    x = empty(shape.x_size, like, channels_last).normal_()
    w = empty(g.weight_size, like, channels_last).normal_()
    b = torch.randn(g.out_channels, dtype=dtype) if shape.bias else None
    gy = empty(shape.y_size, like, channels_last).normal_()
    arguments: dict[str, tuple[Any, ...]] = {
        "forward": (x, w, b, g, channels_last),
        "grad_input": (gy, w, g, shape.input_size, channels_last),
        "grad_weight": (x, gy, g, channels_last),
    }
    rows = []
    for operation, values in arguments.items():
        calls = {
            name: _call(portable.FORMS[operation][name], values, channels_last)
            for name in portable.applicable(operation, g)
        }
        chosen = portable.choose(
            operation, g, shape.batch, shape.input_size, dtype, "cpu", channels_last
        )
        times = _interleaved(calls, budget_s)
        rows.append(
            {
                "shape": shape.name,
                "dtype": str(dtype).removeprefix("torch."),
                "channels_last": channels_last,
                "operation": operation,
                "ms": {name: round(1e3 * seconds, 4) for name, seconds in times.items()},
                "chosen": chosen,
                "speedup": round(times[portable.PYTORCH] / times[chosen], 3),
            }
        )
    return rows


def _call(
    form: Callable[..., torch.Tensor], values: tuple[Any, ...], channels_last: bool
) -> Callable[[], torch.Tensor]:
    return lambda: portable.laid_out(form(*values), channels_last)


def _interleaved(calls: dict[str, Callable[[], Any]], budget_s: float) -> dict[str, float]:
    """Least CPU time of each call over rounds that run all of them in turn."""
    best = dict.fromkeys(calls, float("inf"))
    start = time.perf_counter()
    rounds = 0
    while rounds < 3 or (time.perf_counter() - start < budget_s and rounds < 200):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - begin)
        rounds += 1
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layout", choices=("ncdhw", "ndhwc", "both"), default="both")
    parser.add_argument("--budget", type=float, default=0.6, help="seconds per operation")
    parser.add_argument("--shape", action="append", help="instead of the built-in list")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Any] = []
    layouts = {"ncdhw": (False,), "ndhwc": (True,), "both": (False, True)}[arguments.layout]
    for channels_last in layouts:
        for shape in shapes.select(arguments.shape or CASES):
            dtype = getattr(torch, arguments.dtype)
            for row in measure(shape, dtype, channels_last, arguments.budget):
                rows.append(row)
                others = "  ".join(
                    f"{name} {row['ms'][portable.PYTORCH] / ms:.2f}x"
                    for name, ms in row["ms"].items()
                    if name != portable.PYTORCH
                )
                print(
                    f"{row['shape']:55} {'cl' if channels_last else '  '} {row['operation']:11} "
                    f"{row['ms'][portable.PYTORCH]:9.2f} ms  {others}  -> {row['speedup']:.2f}x",
                    flush=True,
                )
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"environment": environment(), "threads": 1, "rows": rows}
        arguments.out.write_text(record_text(record))


if __name__ == "__main__":
    main()
