"""The graph pass that compares results in place of inputs: where, and with the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import convt3d
from convt3d.compile import report
from convt3d.compile.masks import MasksOfResults
from convt3d.compile.passes import FuseTails

Function = Callable[[Tensor], Tensor]

SPECIAL = [0.0, -0.0, 1e-30, -1e-30, 6.0, 5.999, -1.0, 1.0, 0.5, -0.5, float("inf"), float("nan")]


def joint(function: Function, x: Tensor) -> GraphModule:
    """Forward and backward pass of a convolution that changes nothing, and a function behind it."""
    w = torch.ones(1, 1, 1, 1, 1, dtype=x.dtype)

    def both(x: Tensor, w: Tensor, gy: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        y = function(convt3d.conv_transpose3d(x, w))
        return y.detach(), torch.autograd.grad(y, x, gy)[0]

    inputs = (x, w, torch.ones_like(x))
    return make_fx(both, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)


def outputs(graph: GraphModule, x: Tensor) -> list[Tensor]:
    return list(graph(x, torch.ones(1, 1, 1, 1, 1, dtype=x.dtype), torch.ones_like(x)))


def freed(graph: GraphModule) -> None:
    """Run the pass; what nothing reads any more Inductor drops, too."""
    MasksOfResults()(graph.graph)
    graph.graph.lint()
    graph.graph.eliminate_dead_code()
    graph.recompile()


CASES: dict[str, tuple[Function, tuple[str, ...]]] = {
    "relu": (F.relu, ("relu",)),
    "leaky_relu": (lambda y: F.leaky_relu(y, 0.25), ("leaky_relu",)),
    "leaky_relu, slope 0": (lambda y: F.leaky_relu(y, 0.0), ("leaky_relu",)),
    "leaky_relu behind a factor": (
        lambda y: F.leaky_relu(y * 2, 0.25),
        ("mul_scalar", "leaky_relu"),
    ),
    "relu6": (F.relu6, ("clamp",)),
    "hardtanh": (lambda y: F.hardtanh(y, -1.0, 0.5), ("clamp",)),
    "sigmoid": (torch.sigmoid, ("sigmoid",)),
    "tanh": (torch.tanh, ("tanh",)),
    # What the result does not tell:
    "leaky_relu, negative slope": (lambda y: F.leaky_relu(y, -0.25), ()),
    "clamp": (lambda y: y.clamp(-1.0, 0.5), ()),
    "clamp below": (lambda y: y.clamp_min(0.0), ()),
    "silu": (F.silu, ()),
    "hardswish": (F.hardswish, ()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("epilogues")
def test_gradients_stay_and_inputs_are_free(name: str, dtype: torch.dtype) -> None:
    function, steps = CASES[name]
    x = torch.cat([torch.tensor(SPECIAL), 3 * torch.randn(500)]).to(dtype).view(1, 1, 8, 8, 8)
    graph = joint(function, x)
    before = outputs(graph, x)
    freed(graph)
    for got, wanted in zip(outputs(graph, x), before, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    report(clear=True)
    FuseTails()(graph.graph)
    graph.recompile()
    assert report()[0].fused == steps
    for got, wanted in zip(outputs(graph, x), before, strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.parametrize("bound, steps", [(0.5, ("clamp",)), (0.7, ())])
@pytest.mark.usefixtures("epilogues")
def test_bounds_that_the_dtype_rounds_are_compared_with_the_input(bound: float, steps: Any) -> None:
    x = torch.randn(1, 1, 8, 8, 8, dtype=torch.bfloat16)
    graph = joint(lambda y: F.hardtanh(y, -bound, bound), x)
    freed(graph)
    report(clear=True)
    FuseTails()(graph.graph)
    assert report()[0].fused == steps


def test_other_activations_are_left_alone() -> None:
    x = torch.randn(4, 4)

    def both(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(F.leaky_relu(x.exp(), 0.1).sum(), x)[0]

    graph = make_fx(both, decomposition_table=select_decomp_table(), tracing_mode="fake")(x)
    before = graph.code
    MasksOfResults()(graph.graph)
    graph.recompile()
    assert graph.code == before
