"""On CUDA beside PyTorch's own operator: its samples, its errors, its accuracy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import convt3d
from convt3d.operations import OPERATIONS
from convt3d.precision import Arithmetic, arithmetic_for
from support.checks import check_like_pytorch, check_opcheck, error
from support.geometries import CASES, Case, case, gradient, operands
from test_opinfo import OPINFO, samples


@pytest.mark.parametrize("dtype", sorted(OPINFO.supported_dtypes("cuda"), key=str), ids=str)
def test_samples(dtype: torch.dtype, ieee: None) -> None:
    if dtype is torch.complex32:
        pytest.skip("PyTorch's own complex32 convolution fails on these samples")
    if dtype in (torch.float16, torch.bfloat16):
        pytest.skip("PyTorch's own 16-bit results are compared through float64, below")
    tolerated = 1e-4 if dtype in (torch.float32, torch.complex64) else 1e-7
    for sample in samples("cuda", dtype, True):
        check_like_pytorch(
            (sample.input, *sample.args), sample.kwargs, atol=tolerated, rtol=tolerated
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_samples(dtype: torch.dtype) -> None:
    """Output and gradients of PyTorch's samples, as near to float64 as PyTorch's own."""
    for sample in samples("cuda", dtype, True):
        arguments = [a for a in (sample.input, *sample.args) if a is not None]
        exact = [a.detach().double().requires_grad_() for a in arguments]
        want = F.conv_transpose3d(*exact, **sample.kwargs)
        gy = torch.randn_like(want)
        wanted = [want, *torch.autograd.grad(want, exact, gy)]
        found = []
        for operator in (convt3d.conv_transpose3d, F.conv_transpose3d):
            got = operator(*arguments, **sample.kwargs)
            gotten = [got, *torch.autograd.grad(got, arguments, gy.to(dtype))]
            found.append([error(a, b) for a, b in zip(gotten, wanted, strict=True)])
        for mine, other in zip(*found, strict=True):
            assert mine <= 1.1 * max(other, 2.0**-9 if dtype is torch.bfloat16 else 2.0**-12)


@pytest.mark.parametrize("operation", ["conv_transpose3d", "conv3d", "grad_weight"])
@pytest.mark.parametrize("name", ["stride 2, output padding", "depthwise"])
def test_opcheck(name: str, operation: str) -> None:
    check_opcheck(CASES[name], operation, torch.float32, "cuda")


ACCURACY: dict[str, Case] = {
    "dense": case((48, 48), 3, 20),
    "dense, mixed kernel": case((32, 16), (3, 5, 7), (8, 12, 20)),
    "stride 2": case((64, 32), 3, 16, 2, 1, 1),
    "kernel == stride": case((96, 40), 2, 16, 2),
    "groups": case((32, 32), 3, 16, 2, 1, groups=4),
    "depthwise": case((32, 32), 4, 16, 2, 1, groups=32),
    "long sums": case((256, 24), 4, 8, 2, 1),
}


def rounded_to_tf32(tensor: Tensor) -> Tensor:
    """Ten bits of mantissa, to nearest."""
    bits = tensor.detach().float().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).double()


def unavoidable(one: Case, seed: int) -> list[float]:
    """Errors of exact arithmetic on operands rounded to TF32."""

    def exact(operator_input: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x, w, b = operands(one, torch.float64, "cuda", "contiguous", seed=seed)
        gy = gradient(one, x, seed=seed + 1).float()
        assert b is not None
        x, w = (operator_input(t.float()).requires_grad_() for t in (x, w))
        y = F.conv_transpose3d(x, w, b.float().double(), *one.arguments)
        return [y.detach(), *torch.autograd.grad(y, (x, w), operator_input(gy))]

    return [error(a, b) for a, b in zip(exact(rounded_to_tf32), exact(Tensor.double), strict=True)]


def errors(
    operator: Callable[..., Tensor], one: Case, seed: int, dtype: torch.dtype
) -> list[float]:
    """Relative Frobenius errors of output and gradients against float64."""
    x, w, b = operands(one, torch.float64, "cuda", "contiguous", requires_grad=True, seed=seed)
    gy = gradient(one, x, seed=seed + 1)
    assert b is not None
    inputs = [t.detach().to(dtype).requires_grad_() for t in (x, w, b)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = F.conv_transpose3d(*exact, *one.arguments)
    got = operator(*inputs, *one.arguments)
    gy = gy.to(dtype)
    wanted = [want, *torch.autograd.grad(want, exact[:2], gy.double())]
    gotten = [got, *torch.autograd.grad(got, inputs[:2], gy)]
    return [error(a, b) for a, b in zip(gotten, wanted, strict=True)]


@pytest.mark.parametrize("name", ACCURACY)
@pytest.mark.parametrize("tf32", [True, False], ids=["tf32", "ieee"])
def test_float32_accuracy(name: str, tf32: bool) -> None:
    """Never above 1.1x PyTorch's error under TF32, 2x without, for the same switch and data.

    For some small layers cuDNN does not use TF32 though it may; then the error of operands rounded
    to nearest is what ours is held to.
    """
    one = ACCURACY[name]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        ours = errors(convt3d.conv_transpose3d, one, 5, torch.float32)
        theirs = errors(F.conv_transpose3d, one, 5, torch.float32)
    floors = unavoidable(one, 5)
    for what, mine, other, floor in zip(OPERATIONS, ours, theirs, floors, strict=True):
        arithmetic = arithmetic_for(torch.float32, one.geometry, what, tf32=tf32)
        allowed = 1.1
        if arithmetic is Arithmetic.IEEE:
            allowed, floor = 2.0, 1.5e-7
        assert mine <= allowed * max(other, floor), (what, mine, other, floor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_accuracy(dtype: torch.dtype) -> None:
    for one in ACCURACY.values():
        ours = errors(convt3d.conv_transpose3d, one, 9, dtype)
        theirs = errors(F.conv_transpose3d, one, 9, dtype)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine <= 1.1 * other, (one, ours, theirs)


def test_mixed_devices_are_refused() -> None:
    x, w = torch.randn(1, 2, 3, 3, 3, device="cuda"), torch.randn(2, 2, 3, 3, 3)
    for operator in (F.conv_transpose3d, convt3d.conv_transpose3d):
        with pytest.raises(RuntimeError):
            operator(x, w)


def test_autocast_and_scaler_train() -> None:
    torch.manual_seed(0)
    layer = convt3d.ConvTranspose3d(8, 8, 2, 2).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    x = torch.randn(2, 8, 6, 6, 6, device="cuda")
    losses = []
    for _ in range(20):
        with torch.autocast("cuda", torch.float16):
            y = layer(x)
            assert y.dtype == torch.float16
            loss = (y.float() - 1).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]


def test_double_backward(ieee: None) -> None:
    one = CASES["stride 2, output padding"]
    tensors = operands(one, torch.float32, "cuda", "contiguous", requires_grad=True)
    results = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        x, w, b = (t.detach().to(device, dtype).requires_grad_() for t in tensors if t is not None)
        operator = convt3d.conv_transpose3d if device == "cuda" else F.conv_transpose3d
        y = operator(x, w, b, *one.arguments)
        gx, gw = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True)
        penalty = gx.square().sum() + gw.square().sum()
        results.append(torch.autograd.grad(penalty, (x, w, b)))
    for ours, exact in zip(*results, strict=True):
        assert error(ours.cpu(), exact) < 1e-5


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool, ieee: None) -> None:
    torch._dynamo.reset()
    layer = convt3d.ConvTranspose3d(4, 6, 3, 2, 1).cuda()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    for size in (5, 6, 7) if dynamic else (5,):
        x = torch.randn(2, 4, size, size, size, device="cuda", requires_grad=True)
        got, want = compiled(x), F.conv_transpose3d(x, layer.weight, layer.bias, 2, 1)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        gy = torch.randn_like(want)
        for a, b in zip(
            torch.autograd.grad(got, (x, layer.weight), gy),
            torch.autograd.grad(want, (x, layer.weight), gy),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
