"""The CUDA backend against the float64 reference: every case, dtype, layout and direction."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from support.checks import check_forward, check_gradients
from support.geometries import CASES, DTYPES, LAYOUTS, Case, cases


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_forward(name: str, dtype: torch.dtype, layout: str) -> None:
    check_forward(CASES[name], dtype, "cuda", layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, dtype: torch.dtype, layout: str) -> None:
    check_gradients(CASES[name], dtype, "cuda", layout)


@pytest.mark.parametrize("name", CASES)
def test_float32_without_tf32(name: str, ieee: None) -> None:
    check_forward(CASES[name], torch.float32, "cuda")
    check_gradients(CASES[name], torch.float32, "cuda")


@pytest.mark.parametrize("name", list(CASES)[:6])
def test_gradient_in_another_layout(name: str) -> None:
    check_gradients(CASES[name], torch.bfloat16, "cuda", "contiguous", "channels_last")
    check_gradients(CASES[name], torch.float32, "cuda", "channels_last", "contiguous")


@given(cases())
@settings(max_examples=40)
def test_any_layer_forward(drawn: Case) -> None:
    check_forward(drawn, torch.float32, "cuda")


@given(cases(max_channels=20))
@settings(max_examples=20)
def test_any_layer_gradients(drawn: Case) -> None:
    check_gradients(drawn, torch.float16, "cuda")
