"""The operations of named layers, to be compiled ahead: no measurement waits for a compiler."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from convt3d.bench import tune
from convt3d.bench.cases import MODES
from convt3d.bench.shapes import Shape
from convt3d.cuda import tuning
from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.operation import Operation
from convt3d.cuda.schedule import Gpu, Plan, Problem
from convt3d.geometry import Triple
from convt3d.layout import strides
from convt3d.operations import OPERATIONS


def operations(
    shapes: Sequence[Shape],
    modes: Sequence[str],
    layouts: Sequence[str],
    passes: Sequence[str],
    capability: tuple[int, int],
) -> list[Operation]:
    """What a GPU of this compute capability will run, with weights of both memory formats.

    ``passes`` may name ``train``, which is all of them.
    """
    names = OPERATIONS if "train" in passes else [p for p in passes if p in OPERATIONS]
    found = []
    for job in tune.jobs(shapes, modes, layouts, names, capability):
        shape, problem = job.shape, job.problem
        # The gradients by weight and by bias are one operation where a layer has a bias.
        biases = {problem.bias, shape.bias} if job.operation == "grad_weight" else {problem.bias}
        for weight_last, bias in itertools.product((False, True), sorted(biases)):
            found.append(
                Operation(
                    job.operation,
                    shape.geometry,
                    shape.batch,
                    shape.input_size,
                    MODES[job.mode].dtype,
                    problem.arithmetic,
                    (problem.source_channels_last, problem.target_channels_last),
                    strides(shape.geometry.weight_size, weight_last),
                    bias,
                )
            )
    return found


def candidates(operations: Sequence[Operation], gpu: Gpu) -> set[KernelSpec]:
    """The kernels that these operations time under torch.backends.cudnn.benchmark."""

    @functools.cache  # operations whose weights lie otherwise have the same
    def plans(problem: Problem, batch: int, size: Triple) -> list[Plan]:
        return tuning.candidates(problem, batch, size, gpu, tuning.QUICK)

    found: set[KernelSpec] = set()
    for operation in operations:
        problem, size = operation.problem.canonical(operation.input_size)
        for plan in plans(problem, operation.batch, size):
            found.update(one.kernel for one in operation.launched_by(plan).schedule.launches)
    return found
