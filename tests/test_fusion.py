"""Chains of element-wise steps: what they compute, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from convt3d.fusion import KINDS, MAX_STEPS, Fusion, Step, check_operands, fusion_of

EXPECTED = {
    "scale": lambda x, v: x * v[None, :, None, None, None],
    "shift": lambda x, v: x + v[None, :, None, None, None],
    "add": lambda x, v: x + v,
    "mul": lambda x, v: x * v,
    "add_scalar": lambda x: x + 0.3,
    "mul_scalar": lambda x: x * 0.3,
    "relu": F.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.3),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "clamp": lambda x: x.clamp(0.3, 0.7),
    "mish": F.mish,
    "hold": lambda x: x,
    "add_held": lambda x: x + x,
    "mul_held": lambda x: x * x,
}


def _operands(fusion: Fusion, output: torch.Tensor) -> list[torch.Tensor]:
    return [
        torch.randn(output.shape[1] if kind == "channel" else output.shape, dtype=output.dtype)
        for kind in fusion.operands
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_pytorchs_function(kind: str) -> None:
    output = 3 * torch.randn(2, 3, 4, 5, 6, dtype=torch.float64)
    fusion = fusion_of([kind], (0.3, 0.7)[: KINDS[kind].scalars])
    operands = _operands(fusion, output)
    torch.testing.assert_close(fusion.apply(output, operands), EXPECTED[kind](output, *operands))


def test_a_chain_runs_in_order_and_rounds_once() -> None:
    output = torch.randn(2, 3, 4, 5, 6, dtype=torch.bfloat16)
    fusion = fusion_of(["scale", "add", "leaky_relu", "mul_scalar"], [0.01, 3.0])
    scale, add = _operands(fusion, output)
    expected = scale.float().view(-1, 1, 1, 1) * output.float() + add.float()
    expected = 3 * F.leaky_relu(expected, 0.01)
    got = fusion.apply(output, [scale, add])
    assert torch.equal(got, expected.bfloat16())
    assert fusion.operands == ("channel", "tensor") and fusion.scalars == (0.01, 3.0)


def test_a_chain_reads_what_it_holds() -> None:
    output = torch.randn(2, 3, 4, 5, 6, dtype=torch.float64)
    shift = torch.randn(3, dtype=torch.float64)
    fusion = fusion_of(["shift", "add_held", "mul_held", "add_held"], [])
    y = output + shift.view(-1, 1, 1, 1)
    torch.testing.assert_close(fusion.apply(output, [shift]), (y + output) * output + output)
    fusion = fusion_of(["shift", "hold", "hardswish", "mul_held"], [])
    torch.testing.assert_close(fusion.apply(output, [shift]), y * F.hardswish(y))


def test_what_is_no_chain_is_refused() -> None:
    with pytest.raises(ValueError, match="none of"):
        Step("softmax")
    with pytest.raises(ValueError, match="takes 1 scalars, not 0"):
        fusion_of(["leaky_relu"], [])
    with pytest.raises(ValueError, match="1 scalars too many"):
        fusion_of(["relu"], [0.1])
    with pytest.raises(ValueError, match="steps, not 0"):
        Fusion(())
    with pytest.raises(ValueError, match=f"steps, not {MAX_STEPS + 1}"):
        fusion_of(["relu"] * (MAX_STEPS + 1), [])


def test_operands_are_checked() -> None:
    fusion = fusion_of(["scale", "add"], [])
    source, size = torch.empty(2, 4, 3, 4, 5, dtype=torch.bfloat16), (2, 6, 6, 8, 10)
    scale, add = torch.empty(6), torch.empty(size, dtype=torch.bfloat16)
    check_operands(fusion, [scale, add], source, size)
    check_operands(fusion, [scale.bfloat16(), add], source, size)
    for operands, message in (
        ([scale], "expected 2 operands of a fusion, but got 1"),
        ([scale[:5], add], r"operand 0 .* size \[6\], but got \[5\]"),
        ([scale, add[:, :1]], "operand 1"),
        ([scale.half(), add], "operand 0 .*bfloat16, but got torch.float16"),
        ([scale, add.float()], "operand 1 .*bfloat16, but got torch.float32"),
        ([scale, add.to("meta")], "operand 1 .* on cpu, but it is on meta"),
    ):
        with pytest.raises(RuntimeError, match=message):
            check_operands(fusion, operands, source, size)
    with pytest.raises(RuntimeError, match="expected 0 operands"):
        check_operands(None, [scale], source, size)
