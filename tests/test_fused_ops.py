"""The registered operators with a tail: results, layouts, errors, gradients, opcheck."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from convt3d.fusion import fusion_of
from support import epilogues as backend
from support.checks import assert_layout, op_samples
from support.geometries import CASES

OPERATORS = ("conv_transpose3d", "conv3d")


def arguments_of(
    operation: str,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
    name: str = "stride 2, output padding",
    requires_grad: bool = False,
) -> tuple[tuple[Any, ...], Tensor]:
    """Arguments of the plain operator, and its output."""
    arguments = op_samples(CASES[name], dtype, layout=layout, requires_grad=requires_grad)
    output = getattr(torch.ops.convt3d, operation)(*arguments[operation])
    return arguments[operation], output.detach()


def tails_of(output: Tensor) -> dict[str, tuple[Any, ...]]:
    """Arguments of several tails of an output."""
    c = output.shape[1]
    operands = [torch.randn(c), torch.randn_like(output), torch.randn(c, dtype=output.dtype)]
    low = torch.bfloat16
    parts = [torch.randn_like(output)[:, :2], torch.randn_like(output)]
    return {
        "chain": (["scale", "add", "leaky_relu", "shift"], operands, [0.1], None, [], []),
        "converted": (["silu"], [], [], low, [], []),
        "in the middle": (["clamp"], [], [-0.5, 0.5], None, parts[:1], parts[1:]),
        "first": ([], [], [], None, [], parts),
        "last, converted": (["relu"], [], [], low, [part.to(low) for part in parts], []),
    }


def expected(output: Tensor, tail: tuple[Any, ...]) -> Tensor:
    """The tail by PyTorch's operators, in float64."""
    kinds, operands, scalars, dtype, before, after = tail
    value = output.double()
    if kinds:
        value = fusion_of(kinds, scalars).apply(value, operands)
    return torch.cat([*before, value.to(dtype or output.dtype), *after], 1)


@pytest.mark.parametrize("fuses", [False, True], ids=["plain", "epilogue"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operation", OPERATORS)
def test_results_are_those_of_the_steps(
    operation: str, dtype: torch.dtype, layout: str, fuses: bool, request: pytest.FixtureRequest
) -> None:
    if fuses:
        request.getfixturevalue("epilogues")
    arguments, output = arguments_of(operation, dtype, layout)
    # Without an epilogue the steps follow PyTorch's operator, which some processors run with sums
    # in bfloat16.
    reference = output
    if fuses:
        wide = tuple(a.double() if isinstance(a, Tensor) else a for a in arguments)
        reference = getattr(torch.ops.convt3d, operation)(*wide)
    fused = getattr(torch.ops.convt3d, f"{operation}_fused")
    for name, tail in tails_of(output).items():
        got = fused(*arguments, *tail)
        low = torch.bfloat16 in (dtype, tail[3])
        tolerance = 2e-2 if low else 1e-4
        want = expected(reference, (*tail[:3], tail[3] or dtype, *tail[4:]))
        assert got.dtype == want.dtype, name
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        assert_layout(got, layout == "channels_last")
    if fuses:
        same = dtype == torch.bfloat16  # what kernels cannot convert they do not write in place
        assert [written for *_, written in backend.calls] == [False, False, True, True, same]


def fused_once(operation: str, arguments: tuple[Any, ...], tail: tuple[Any, ...]) -> int:
    """Checks a call in graphs of torch.compile, where nothing needs gradients.

    Returns:
        How often it was decided what runs.
    """
    before = len(backend.prepared)
    with torch.no_grad():
        got = getattr(torch.ops.convt3d, f"{operation}_fused").default(*arguments, *tail)
        output = getattr(torch.ops.convt3d, operation)(*arguments)
    want = expected(output, tail).to(got.dtype)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    return len(backend.prepared) - before


def twin(argument: Any) -> Any:
    """Another tensor of the same kind and values; anything else as it is."""
    if not isinstance(argument, Tensor):
        return argument
    like = torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype)
    return like.copy_(argument)


@pytest.mark.usefixtures("epilogues")
@pytest.mark.parametrize("operation", OPERATORS)
def test_a_repeated_call_is_decided_once(operation: str) -> None:
    arguments, output = arguments_of(operation)
    other, _ = arguments_of(operation, layout="channels_last")
    for name, tail in tails_of(output).items():
        same = tail[3] in (None, output.dtype)  # what kernels cannot convert is not prepared
        assert fused_once(operation, arguments, tail) == same, name
        fresh = tuple(twin(a) for a in arguments)
        again = tuple([twin(t) for t in part] if isinstance(part, list) else part for part in tail)
        assert fused_once(operation, fresh, again) == 0, name
        assert fused_once(operation, other, again) == same, name


@pytest.mark.usefixtures("epilogues")
@pytest.mark.parametrize("operation", OPERATORS)
def test_what_changes_in_a_tail_is_noticed(operation: str) -> None:
    arguments, output = arguments_of(operation)
    operand, part = torch.randn_like(output), torch.randn_like(output)
    first = (["add", "leaky_relu"], [operand], [0.1], None, [part], [])
    changed: list[tuple[Any, ...]] = [
        (["mul", "leaky_relu"], *first[1:]),
        (first[0], [operand.contiguous(memory_format=torch.channels_last_3d)], *first[2:]),
        (*first[:2], [0.2], *first[3:]),
        (*first[:4], [], [part]),
        (*first[:4], [part[:, :2]], []),
        (*first[:4], [part, part.clone()], []),
        (["leaky_relu"], [], *first[2:]),
    ]
    assert fused_once(operation, arguments, first) == 1
    for tail in changed:
        assert fused_once(operation, arguments, tail) == 1
        assert fused_once(operation, arguments, first) == 0
    # One tensor twice: not remembered, and right.
    twice = (["add", "mul"], [operand, operand], [], None, [part], [])
    assert [fused_once(operation, arguments, twice) for _ in range(2)] == [1, 1]


@pytest.mark.sample
@pytest.mark.parametrize("operation", OPERATORS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(operation: str, requires_grad: bool) -> None:
    arguments, output = arguments_of(operation, requires_grad=requires_grad)
    fused = getattr(torch.ops.convt3d, f"{operation}_fused").default
    for tail in tails_of(output).values():
        torch.library.opcheck(fused, (*arguments, *tail))


@pytest.mark.parametrize("operation", OPERATORS)
def test_gradients_are_those_of_the_steps(operation: str) -> None:
    arguments, output = arguments_of(operation, torch.float64, requires_grad=True)
    operand = torch.randn_like(output).requires_grad_()
    other = torch.randn_like(output).requires_grad_()
    tail = (["add", "silu"], [operand], [], None, [other], [])
    fused = getattr(torch.ops.convt3d, f"{operation}_fused")(*arguments, *tail)
    plain = getattr(torch.ops.convt3d, operation)(*arguments)
    want = torch.cat([other, torch.nn.functional.silu(plain + operand)], 1)
    torch.testing.assert_close(fused, want)
    inputs = [a for a in (*arguments, operand, other) if isinstance(a, Tensor)]
    gy = torch.randn_like(want)
    for got, wanted in zip(
        torch.autograd.grad(fused, inputs, gy), torch.autograd.grad(want, inputs, gy), strict=True
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("operation", OPERATORS)
def test_what_does_not_fit_is_refused(operation: str) -> None:
    arguments, output = arguments_of(operation)
    fused = getattr(torch.ops.convt3d, f"{operation}_fused")
    wrong = {
        "none of": (["softmax"], [], [], None, [], []),
        "scalars too many": (["relu"], [], [1.0], None, [], []),
        "expected 1 operands": (["add"], [], [], None, [], []),
        "expected an operand of size": (["add"], [output[:, :1]], [], None, [], []),
        "or torch.float32|torch.float32": (
            ["scale"],
            [torch.ones(output.shape[1]).half()],
            [],
            None,
            [],
            [],
        ),
        "differ from size": ([], [], [], None, [output[:, :, 1:]], []),
    }
    for message, tail in wrong.items():
        with pytest.raises(RuntimeError, match=message):
            fused(*arguments, *tail)


def test_an_empty_batch_needs_no_kernel(epilogues: list[Any]) -> None:
    arguments, output = arguments_of("conv_transpose3d")
    x, *rest = arguments
    tail = (["add"], [output[:0]], [], None, [output[:0]], [])
    result = torch.ops.convt3d.conv_transpose3d_fused(x[:0], *rest, *tail)
    assert result.shape == (0, 2 * output.shape[1], *output.shape[2:])
    assert not epilogues


@pytest.mark.parametrize("operation", OPERATORS)
def test_flops_are_those_of_the_convolution(operation: str) -> None:
    arguments, output = arguments_of(operation)
    counts = []
    for name, tail in ((operation, ()), (f"{operation}_fused", tails_of(output)["chain"])):
        with FlopCounterMode(display=False) as counter:
            getattr(torch.ops.convt3d, name)(*arguments, *tail)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
