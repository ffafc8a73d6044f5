"""Plans of the table on a GPU: right, the same bits twice, and chosen by a call of the layer."""

from __future__ import annotations

import math

import pytest
import torch

from convt3d import reference
from convt3d.cuda import tuning
from convt3d.cuda.operation import Operation
from convt3d.cuda.plan import table
from convt3d.cuda.schedule import Gpu
from convt3d.precision import Arithmetic
from test_plan_table import ROWS, problem_of

TOLERANCE = {
    Arithmetic.TF32: 6e-4,
    Arithmetic.IEEE: 1.5e-6,
    Arithmetic.F16: 1e-3,
    Arithmetic.BF16: 6e-3,
}
MOST = 6e9  # multiplications of a layer whose float64 result is quickly had


def multiplications(key: str) -> int:
    problem, batch, size = problem_of(key)
    g = problem.geometry
    return batch * math.prod(size) * g.in_channels * math.prod(g.weight_size[1:])


SMALL = [row["key"] for row in ROWS if multiplications(row["key"]) <= MOST]


@pytest.mark.parametrize("key", SMALL[::4])
def test_winners_are_right(key: str) -> None:
    problem, batch, size = problem_of(key)
    gpu = Gpu.of(0)
    winner = table.recall(problem, batch, size, gpu)
    if winner is None:
        pytest.skip("the table is of another GPU")
    tensors = tuning.operands(problem, batch, size, torch.device("cuda", 0))
    weight, target = tensors["weight"], tensors["target"]
    out = weight if problem.operation == "grad_weight" else target
    double = {name: tensor.double() for name, tensor in tensors.items()}
    g = problem.geometry
    if problem.operation == "forward":
        want = reference.forward(double["source"], double["weight"], double.get("bias"), g)
    elif problem.operation == "grad_input":
        want = reference.grad_input(double["source"], double["weight"], g, size)
    else:
        want = reference.grad_weight(double["source"], double["target"], g)
    out.fill_(torch.nan)
    operation = Operation.of(problem, batch, size, weight)
    run = tuning.runner(winner.plan, operation, tensors)
    run()
    first = out.clone()
    run()
    assert torch.equal(first, out), "the bits differ from run to run"
    error = (first.double() - want).norm() / want.norm()
    assert error < TOLERANCE[problem.arithmetic], winner.plan
