"""Compiles the kernels of a benchmark ahead, on all cores, so that no measurement waits for one."""

from __future__ import annotations

from collections.abc import Sequence

from convt3d.backends import OPERATIONS
from convt3d.bench.shapes import Shape
from convt3d.cuda.schedule import Gpu


def compile_kernels(
    shapes: Sequence[Shape],
    modes: Sequence[str],
    layouts: Sequence[str],
    passes: Sequence[str],
    gpu: Gpu,
) -> int:
    """Put every kernel that a GPU will launch into the cache on disk; the number of kernels.

    ``passes`` may name ``train``, which is all of them. A kernel that does not compile is left to
    the case that needs it, which reports the error.
    """
    from convt3d.bench import tune
    from convt3d.cuda.plan import plan_problem
    from convt3d.cuda.tuning import compile_kernels

    operations = OPERATIONS if "train" in passes else [p for p in passes if p in OPERATIONS]
    kernels = set()
    for job in tune.jobs(shapes, modes, layouts, operations, gpu.capability):
        shape = job.shape
        plan = plan_problem(job.problem, shape.batch, shape.input_size, gpu)
        schedule = plan.schedule(shape.batch, shape.input_size)
        for one in filter(None, (schedule, schedule.weight_last)):
            kernels |= {item.kernel for item in one.launches}
    return compile_kernels(kernels, gpu)
