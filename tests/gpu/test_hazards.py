"""Layers whose products read the registers that the next words are loaded to.

Each result is right, and the same on every run, with the first plans of every family.
"""

from __future__ import annotations

import pytest
import torch

from convt3d import reference
from convt3d.cuda import launch
from convt3d.cuda.operation import Operation
from convt3d.cuda.plan import ranked_plans
from convt3d.cuda.schedule import Gpu, Plan, Problem
from convt3d.geometry import Geometry, Triple
from convt3d.precision import Arithmetic

ARITHMETICS = {torch.float32: Arithmetic.TF32, torch.bfloat16: Arithmetic.BF16}
#: Errors relative to the sum of absolute products: of operands, and of results of 16 bits.
LOSS = {torch.float32: 1.2e-3, torch.bfloat16: 2e-2}
BATCH, RUNS, PLANS = 2, 3, 3


def first_plans(problem: Problem, size: Triple) -> list[Plan]:
    """Of each family of warpgroup products; the planner's choice without them."""
    families: dict[str, list[Plan]] = {}
    plans = ranked_plans(problem, BATCH, size, Gpu.of(0))
    for plan in plans:
        families.setdefault(type(plan).__name__, []).append(plan)
    found = [p for name, of in families.items() if name.startswith("Wgmma") for p in of[:PLANS]]
    return found or plans[:1]


def check(
    plan: Plan,
    size: Triple,
    source: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    expected: torch.Tensor,
    most: torch.Tensor,
) -> None:
    """Run a plan, whose result is the target or, of a gradient by weight, the weight."""
    call = launch.bind_plan(plan, Operation.of(plan.problem, BATCH, size, weight))
    result = weight if plan.problem.operation == "grad_weight" else target
    first = None
    for _ in range(RUNS):
        result.fill_(torch.nan)
        call.run(source, weight, target, None)
        error = (result.double() - expected).abs()
        assert bool((error <= most).all()), f"{plan}: {float((error / most).max()):.3g} times"
        first = result.clone() if first is None else first
        assert torch.equal(result, first), f"{plan}: another result on another run"


@pytest.mark.parametrize("dtype", LOSS, ids=str)
@pytest.mark.parametrize("height", [1, 5, 7])
def test_gradient_by_input(height: int, dtype: torch.dtype) -> None:
    geometry = Geometry(64, 3, (3, height, 7), (1, 2, 2), (1, height // 2, 3), (0, 1, 1))
    size = (16, 56, 56)
    generator = torch.Generator("cuda").manual_seed(height)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    gy = values(BATCH, geometry.out_channels, *geometry.output_size(size))
    w = values(*geometry.weight_size)
    expected = reference.grad_input(gy.double(), w.double(), geometry, size)
    magnitude = reference.grad_input(gy.abs().double(), w.abs().double(), geometry, size)
    gx = torch.empty(expected.shape, dtype=dtype, device="cuda")
    problem = Problem("grad_input", geometry, ARITHMETICS[dtype])
    for plan in first_plans(problem, size):
        check(plan, size, gy, w, gx, expected, LOSS[dtype] * magnitude)


def test_gradient_by_weight() -> None:
    geometry = Geometry(32, 16, (3, 5, 7))
    size, dtype = (12, 16, 32), torch.float32
    generator = torch.Generator("cuda").manual_seed(8)
    x = torch.randn((BATCH, 32, *size), generator=generator, device="cuda")
    gy_size = (BATCH, 16, *geometry.output_size(size))
    gy = torch.randn(gy_size, generator=generator, device="cuda")
    expected = reference.grad_weight(x.double(), gy.double(), geometry)
    magnitude = reference.grad_weight(x.abs().double(), gy.abs().double(), geometry)
    w = torch.empty(geometry.weight_size, device="cuda")
    problem = Problem("grad_weight", geometry, ARITHMETICS[dtype])
    for plan in first_plans(problem, size):
        check(plan, size, x, w, gy, expected, LOSS[dtype] * magnitude)
