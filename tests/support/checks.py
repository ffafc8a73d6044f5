"""Checks of the operator against the float64 reference and against PyTorch, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import convt3d
from convt3d import reference
from convt3d.geometry import Geometry
from convt3d.precision import Arithmetic, arithmetic_for
from support.geometries import Case, gradient, operands

Operator = Callable[..., Tensor]

# Errors relative to the sum of the absolute products, which cancellation leaves alone: rounding of
# the operands (TF32: 2 ** -11 each), of the sums, of the result. The sums of the sample layers are
# short; PyTorch's CPU operator forms some 16-bit sums in 16 bits.
_TOLERANCE = {
    Arithmetic.F64: 1e-14,
    Arithmetic.IEEE: 2e-6,
    Arithmetic.TF32: 1.2e-3,
    Arithmetic.F16: 3e-3,
    Arithmetic.BF16: 2e-2,
}
# Of results beside PyTorch's on PyTorch's own samples; 1e-7 for other dtypes.
SAMPLE_TOLERANCE = {
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
    torch.float32: 1e-4,
    torch.complex32: 9e-2,
    torch.complex64: 1e-4,
}


def tolerance(geometry: Geometry, dtype: torch.dtype, device: str | torch.device) -> float:
    """What :func:`assert_near` allows this layer under the present switches."""
    # The least exact operation: a gradient by weight is TF32 where outputs of few channels are not.
    arithmetic = arithmetic_for(dtype, geometry, "grad_weight")
    if torch.device(device).type == "cpu" and arithmetic is Arithmetic.TF32:
        arithmetic = Arithmetic.IEEE
    return _TOLERANCE[arithmetic]


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; infinite where there is a NaN, absolute where expected is 0."""
    actual, expected = actual.detach().double(), expected.detach().double()
    difference, scale = (actual - expected).norm(), expected.norm()
    value = float(difference / scale if scale > 0 else difference)
    return value if value == value else float("inf")


def assert_near(
    actual: Tensor, expected: Tensor, scale: Tensor, tolerated: float, what: str
) -> None:
    """Every element within ``tolerated * scale``, or its dtype's resolution, of the expected one.

    ``scale`` is the reference on absolute values; where it is 0 the result must be exactly 0.
    """
    assert actual.shape == expected.shape, f"{what}: {actual.shape} != {expected.shape}"
    difference = (actual.detach().double().cpu() - expected).abs()
    limits = torch.finfo(actual.dtype)
    smallest = limits.tiny * limits.eps * (scale > 0)
    bad = ~(difference <= tolerated * scale + smallest)  # also true where there is a NaN
    if bad.any():
        worst = (difference / scale).nan_to_num(torch.inf).argmax()
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.numel()} elements wrong; at "
            f"{[int(i) for i in torch.unravel_index(worst, bad.shape)]} "
            f"{float(actual.flatten()[worst]):.6g}, not {float(expected.flatten()[worst]):.6g}"
            f" (relative error {error(actual.cpu(), expected):.3g}, tolerated {tolerated:.3g})"
        )


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, torch.empty gives NaN, so that a voxel nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def check_forward(
    case: Case,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    layout: str = "contiguous",
    operator: Operator | None = None,
) -> None:
    """Output against the reference; dtype, device and strides by PyTorch's rule."""
    x, w, b = operands(case, dtype, device, layout)
    with poisoned():
        y = (operator or case.operator)(x, w, b, *case.arguments)
    assert y.dtype == dtype
    assert y.device == x.device
    assert_layout(y, results_channels_last(case, x, w))
    host = [None if t is None else t.cpu().double() for t in (x, w, b)]
    expected = reference.forward(*host, case.geometry)
    scale = reference.forward(*map(_absolute, host), case.geometry)
    assert_near(y, expected, scale, tolerance(case.geometry, dtype, device), "output")


def _absolute(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().abs()


def check_gradients(
    case: Case,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    layout: str = "contiguous",
    grad_layout: str | None = None,
    operator: Operator | None = None,
) -> None:
    """All three gradients against the reference; strides by PyTorch's rule."""
    x, w, b = operands(case, dtype, device, layout, requires_grad=True)
    gy = gradient(case, x, grad_layout or layout)
    inputs = [t for t in (x, w, b) if t is not None]
    with poisoned():
        y = (operator or case.operator)(x, w, b, *case.arguments)
        gx, gw, *gb = torch.autograd.grad(y, inputs, gy)
    tolerated = tolerance(case.geometry, dtype, device)
    geometry, size = case.geometry, case.input_size

    def by_input(gy: Tensor, w: Tensor) -> Tensor:
        return reference.grad_input(gy, w, geometry, size)

    def by_weight(x: Tensor, gy: Tensor) -> Tensor:
        return reference.grad_weight(x, gy, geometry)

    checks: list[tuple[str, Tensor, Callable[..., Tensor], tuple[Tensor, ...]]] = [
        ("gradient by input", gx, by_input, (gy, w)),
        ("gradient by weight", gw, by_weight, (x, gy)),
    ]
    if gb:
        checks.append(("gradient by bias", gb[0], reference.grad_bias, (gy,)))
    for what, result, definition, arguments in checks:
        host = [t.detach().cpu().double() for t in arguments]
        expected, scale = definition(*host), definition(*(t.abs() for t in host))
        assert_near(result, expected, scale, tolerated, what)
    for result in (gx, gw):
        assert result.dtype == dtype
        assert_layout(result, results_channels_last(case, x, w))


def suggested(tensor: Tensor) -> torch.memory_format:
    """``Tensor.suggest_memory_format()`` of C++, seen through an operator that obeys it."""
    probe = torch.nn.functional.interpolate(tensor.detach().cpu().float(), size=(2, 2, 2))
    return torch.channels_last_3d if probe.stride(1) == 1 else torch.contiguous_format


def assert_layout(result: Tensor, last: bool) -> None:
    """The strides of a tensor that is channels_last_3d, or contiguous."""
    wanted = torch.channels_last_3d if last else torch.contiguous_format
    expected = torch.empty(result.shape, memory_format=wanted, device="meta").stride()
    assert result.stride() == expected, f"strides {result.stride()}, not {expected}"


def results_channels_last(case: Case, input: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch makes the output, and so the gradients, of a layer channels_last_3d.

    On CPU its own result says so. On other devices every dtype but float64 is if input or weight
    suggests it.
    """
    if input.device.type == "cpu":
        stride = case.pytorch(input.detach(), weight.detach(), None).stride()
        last, first = (
            torch.empty(case.output_shape, memory_format=f, device="meta").stride()
            for f in (torch.channels_last_3d, torch.contiguous_format)
        )
        if last != first:
            return stride == last
    formats = {_stride_format(input), _stride_format(weight)}
    return input.dtype != torch.float64 and torch.channels_last_3d in formats


def _stride_format(tensor: Tensor) -> torch.memory_format:
    host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.float32).zero_()
    return suggested(host)


def check_like_pytorch(
    arguments: Sequence[Any],
    keywords: dict[str, Any] | None = None,
    operator: Operator = convt3d.conv_transpose3d,
    atol: float = 1e-7,
    rtol: float = 1e-7,
    strides: bool = True,
    theirs: Operator = torch.nn.functional.conv_transpose3d,
) -> None:
    """Value, dtype, strides and gradients equal to those of PyTorch's function."""
    keywords = keywords or {}
    got = operator(*arguments, **keywords)
    want = theirs(*arguments, **keywords)
    assert got.dtype == want.dtype
    if strides:
        assert got.stride() == want.stride()
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol)
    wanted = [
        t for t in (*arguments, *keywords.values()) if isinstance(t, Tensor) and t.requires_grad
    ]
    assert got.requires_grad == want.requires_grad
    if wanted and want.requires_grad:
        gy = torch.randn_like(want)
        for a, b in zip(
            torch.autograd.grad(got, wanted, gy),
            torch.autograd.grad(want, wanted, gy),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=4 * atol, rtol=4 * rtol)


def op_samples(
    case: Case,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    layout: str = "contiguous",
    requires_grad: bool = False,
) -> dict[str, tuple[Any, ...]]:
    """Arguments of the three registered operators for one layer."""
    x, w, b = operands(case, dtype, device, layout, requires_grad)
    gy = gradient(case, x, layout).requires_grad_(requires_grad)
    c = None if b is None else w.new_ones(w.shape[0]).requires_grad_(requires_grad)
    last = layout == "channels_last"
    kernel_size = list(case.geometry.kernel_size)
    return {
        "conv_transpose3d": (x, w, b, last, *case.parameters),
        "conv3d": (gy, w, c, list(case.input_size), last, *case.parameters),
        "grad_weight": (x, gy, kernel_size, last, *case.parameters),
    }


def check_opcheck(
    case: Case,
    operation: str,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    layout: str = "contiguous",
) -> None:
    """torch.library.opcheck of one registered operator, with and without gradients."""
    operator = getattr(torch.ops.convt3d, operation).default
    for requires_grad in (False, True):
        arguments = op_samples(case, dtype, device, layout, requires_grad)[operation]
        torch.library.opcheck(operator, arguments)


def check_same_error(
    call: Callable[[Operator], Any], operator: Operator = convt3d.conv_transpose3d
) -> tuple[str, str]:
    """``call`` must raise the same type of exception with ours as with PyTorch's operator.

    Returns both messages, ours first.
    """
    raised: list[BaseException] = []
    for function in (operator, torch.nn.functional.conv_transpose3d):
        try:
            call(function)
        except Exception as exception:
            raised.append(exception)
        else:
            raise AssertionError(f"{function} accepted what the other one may refuse")
    ours, theirs = raised
    assert type(ours) is type(theirs), f"{ours!r} is not {theirs!r}"
    return str(ours), str(theirs)
