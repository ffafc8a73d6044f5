"""Compiles the kernels of a benchmark ahead, on all cores, so that no measurement waits for one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from convt3d.bench.cases import MODES
from convt3d.bench.shapes import Shape


def compile_kernels(
    shapes: Sequence[Shape],
    modes: Sequence[str],
    layouts: Sequence[str],
    passes: Sequence[str],
    device: torch.device,
) -> int:
    """Put every kernel that a job will launch into the cache on disk; the number of kernels.

    A kernel that does not compile is left to the case that needs it, which reports the error.
    """
    from convt3d.cuda import compiler, launch
    from convt3d.cuda.plan import plan_for
    from convt3d.cuda.schedule import OPERATIONS, Gpu

    gpu = Gpu.of(device.index or 0)
    operations = OPERATIONS if "train" in passes else [p for p in passes if p in OPERATIONS]
    kernels = set()
    for mode in (MODES[name] for name in modes):
        for shape, operation, layout in itertools.product(shapes, operations, layouts):
            if launch.refusal(operation, shape.geometry, mode.dtype, device) is not None:
                continue
            with mode.applied(device):
                plan = plan_for(
                    operation,
                    shape.geometry,
                    shape.input_size,
                    shape.batch,
                    mode.dtype,
                    layout == "ndhwc",
                    bias=shape.bias,
                    gpu=gpu,
                )
                schedule = plan.schedule(shape.batch, shape.input_size)
                kernels |= {item.kernel for item in schedule.launches}
    target = compiler.architecture(gpu.capability)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for future in [pool.submit(compiler.compile_cubin, k, target) for k in kernels]:
            future.exception()
    return len(kernels)
