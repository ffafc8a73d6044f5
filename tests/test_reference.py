"""The float64 reference itself, against PyTorch's float64 operator and its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given

from convt3d import reference
from support.geometries import CASES, Case, cases, gradient, operands


def _compare(case: Case) -> None:
    x, w, b = operands(case, requires_grad=True)
    gy = gradient(case, x)
    y = F.conv_transpose3d(x, w, b, *case.arguments)
    torch.testing.assert_close(reference.forward(x, w, b, case.geometry), y)
    gx, gw, *gb = torch.autograd.grad(y, [t for t in (x, w, b) if t is not None], gy)
    geometry = case.geometry
    torch.testing.assert_close(reference.grad_input(gy, w, geometry, case.input_size), gx)
    torch.testing.assert_close(reference.grad_weight(x, gy, geometry), gw)
    if gb:
        torch.testing.assert_close(reference.grad_bias(gy), gb[0])


@pytest.mark.parametrize("name", CASES)
def test_named_layers(name: str) -> None:
    _compare(CASES[name])


@given(cases())
def test_any_layer(case: Case) -> None:
    _compare(case)


def test_one_voxel_by_hand() -> None:
    # Input 2, kernel (1, 10, 100) at stride 2 along W: the second input starts two places on.
    x = torch.tensor([2.0, 3.0]).view(1, 1, 1, 1, 2)
    w = torch.tensor([1.0, 10.0, 100.0]).view(1, 1, 1, 1, 3)
    geometry = CASES["1 to 1"].geometry.__class__(1, 1, (1, 1, 3), stride=(1, 1, 2))
    y = reference.forward(x, w, torch.tensor([0.5]), geometry)
    assert y.flatten().tolist() == [2.5, 20.5, 203.5, 30.5, 300.5]


def test_results_are_float64_whatever_comes_in() -> None:
    case = CASES["stride 2"]
    x, w, b = operands(case, torch.bfloat16)
    assert reference.forward(x, w, b, case.geometry).dtype == torch.float64
    gy = gradient(case, x)
    assert reference.grad_weight(x, gy, case.geometry).dtype == torch.float64
    assert reference.grad_bias(gy).dtype == torch.float64
