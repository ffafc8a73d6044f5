"""Cases of PyTorch's test/nn/test_convolution.py that concern transposed convolutions, in 3-D."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convt3d
from support.geometries import arranged

LAYOUTS = ("contiguous", "channels_last", "sliced")


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation"), [(2, 0, 1), (1, 1, 1), (2, 1, 1), (1, 0, 2)]
)
def test_strided_padded_dilated(stride: int, padding: int, dilation: int, with_bias: bool) -> None:
    x = torch.randn(1, 2, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 2, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, dtype=torch.float64, requires_grad=True) if with_bias else None
    settings = {"stride": stride, "padding": padding, "dilation": dilation}
    got = convt3d.conv_transpose3d(x, w, b, **settings)
    want = F.conv_transpose3d(x, w, b, **settings)
    torch.testing.assert_close(got, want)
    inputs = tuple(t for t in (x, w, b) if t is not None)
    assert torch.autograd.gradcheck(
        lambda *t: convt3d.conv_transpose3d(*t, **settings), inputs, fast_mode=True
    )


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_modules_refuse_inputs_of_another_rank(dtype: torch.dtype) -> None:
    module = convt3d.ConvTranspose3d(3, 8, 3).to(dtype)
    for rank in range(1, 10):
        x = torch.empty((3,) * rank, dtype=dtype)
        if rank in (4, 5):
            assert module(x).dim() == rank
        else:
            with pytest.raises(RuntimeError):
                module(x)


def test_output_size_of_one_voxel() -> None:
    module = convt3d.ConvTranspose3d(2, 2, 2)
    assert module(torch.rand(1, 2, 1, 1, 1), output_size=(1, 2, 2, 2, 2)).shape == (1, 2, 2, 2, 2)


def test_output_size_without_a_batch() -> None:
    module = convt3d.ConvTranspose3d(1, 1, kernel_size=16, stride=16, padding=7, bias=False)
    x = torch.randn(1, 15, 13, 13)
    size = (1, 240, 200, 200)
    got = module(x, output_size=list(size))
    assert got.shape == size
    torch.testing.assert_close(got, nn.ConvTranspose3d.forward(module, x, list(size)))


def test_reachable_output_sizes() -> None:
    module = convt3d.ConvTranspose3d(3, 4, 3, stride=3, padding=0, output_padding=2)
    x = torch.randn(2, 3, 2, 6, 6)
    for d, h, w in itertools.product((6, 8, 9), (17, 18, 20, 21), (17, 19, 20)):
        if 6 <= d <= 8 and 18 <= h <= 20 and 18 <= w <= 20:
            assert module(x, output_size=(d, h, w)).shape == (2, 4, d, h, w)
        else:
            with pytest.raises(ValueError):
                module(x, output_size=(d, h, w))


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1])
def test_down_and_up_again(stride: int, padding: int) -> None:
    for extent in range(5, 9):
        down = nn.Conv3d(3, 4, 3, stride=stride, padding=padding)
        up = convt3d.ConvTranspose3d(4, 3, 3, stride=stride, padding=padding)
        x = torch.randn(1, 3, extent, extent, extent)
        assert up(down(x), output_size=x.size()).shape == x.shape


@pytest.mark.parametrize("groups", [1, 3])
def test_expanded_weights(groups: int) -> None:
    # Every channel reads the same memory: stride 0.
    w = torch.randn(3, 3, 3).expand(3, 3 // groups, 3, 3, 3).detach().requires_grad_()
    x = torch.randn(1, 3, 5, 5, 5, requires_grad=True)
    got = convt3d.conv_transpose3d(x, w, groups=groups)
    want = F.conv_transpose3d(x, w, groups=groups)
    torch.testing.assert_close(got, want)
    gy = torch.randn_like(want)
    for a, e in zip(
        torch.autograd.grad(got, (x, w), gy), torch.autograd.grad(want, (x, w), gy), strict=True
    ):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


def test_kernel_of_one_voxel() -> None:
    x = torch.randn(2, 3, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    module = convt3d.ConvTranspose3d(3, 3, (1, 1, 1), bias=False, dtype=torch.float64)
    want = torch.einsum("ncdhw,co->nodhw", x, module.weight[:, :, 0, 0, 0])
    torch.testing.assert_close(module(x), want)
    gy = torch.randn_like(want)
    for a, e in zip(
        torch.autograd.grad(module(x), (x, module.weight), gy),
        torch.autograd.grad(want, (x, module.weight), gy),
        strict=True,
    ):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("memory_format", [torch.channels_last_3d, torch.contiguous_format])
def test_weight_format_decides_the_output_format(memory_format: torch.memory_format) -> None:
    x = torch.randint(1, 10, (2, 8, 4, 4, 4)).float()
    model = nn.Sequential(convt3d.ConvTranspose3d(8, 4, 3), nn.BatchNorm3d(4))
    convert = getattr(nn.utils, "convert_conv3d_weight_memory_format", None)
    model = convert(model, memory_format) if convert else model.to(memory_format=memory_format)
    assert model(x).is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("groups", [1, 4])
def test_empty_batch(groups: int) -> None:
    module = convt3d.ConvTranspose3d(4, 8, 3, stride=2, groups=groups)
    x = torch.randn(0, 4, 4, 4, 4, requires_grad=True)
    y = module(x)
    assert y.shape == (0, 8, 9, 9, 9)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, torch.zeros_like(module.weight))


def test_odd_stride_of_a_batch_of_one() -> None:
    # Contiguous in PyTorch's eyes, whatever the stride of the only batch entry says.
    x = torch.randn(1, 16, 5, 5, 5)
    stride = (7, *x.stride()[1:])
    odd = x.as_strided(x.shape, stride)
    assert odd.is_contiguous()
    w = torch.randn(16, 1, 1, 1, 1)
    got = convt3d.conv_transpose3d(odd, w)
    want = F.conv_transpose3d(x, w)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, repeat=3)), ids="-".join)
@pytest.mark.parametrize("groups", [1, 2])
def test_any_mixture_of_layouts(layouts: tuple[str, str, str], groups: int) -> None:
    values = [
        torch.randint(-3, 4, size).double()
        for size in ((2, 8, 4, 5, 6), (8, 4 // groups, 3, 3, 3), (2, 4, 6, 7, 8))
    ]
    results = []
    for dtype in (torch.float32, torch.float64):
        x, w, gy = (
            arranged(v.to(dtype), layout) for v, layout in zip(values, layouts, strict=True)
        )
        x.requires_grad_(), w.requires_grad_()
        operator: Any = convt3d.conv_transpose3d
        if dtype == torch.float64:
            operator, x, w = F.conv_transpose3d, *(t.detach().requires_grad_() for t in (x, w))
        y = operator(x, w, groups=groups)
        results.append([t.double() for t in (y, *torch.autograd.grad(y, (x, w), gy))])
    for a, e in zip(*results, strict=True):
        assert torch.equal(a, e)  # small integers: exact in float32


def test_gradient_of_a_non_contiguous_gradient() -> None:
    module = convt3d.ConvTranspose3d(3, 5, 3, padding=1, dtype=torch.float64)
    x = torch.randn(2, 3, 10, 4, 10, dtype=torch.float64, requires_grad=True)
    y = module(x)
    gy = torch.randn(2, 2, 5, 10, 4, 10, dtype=torch.float64)[:, 1]
    assert not gy.is_contiguous()
    got = torch.autograd.grad(y, (x, module.weight), gy, retain_graph=True)
    want = torch.autograd.grad(y, (x, module.weight), gy.contiguous())
    for a, e in zip(got, want, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS[:2], repeat=2)), ids="-".join)
def test_layouts_of_output_and_gradients(layouts: tuple[str, str]) -> None:
    x = arranged(torch.randint(-3, 4, (2, 8, 4, 4, 4)).float(), layouts[0]).requires_grad_()
    module = convt3d.ConvTranspose3d(8, 4, 3)
    module.weight = nn.Parameter(arranged(module.weight.detach(), layouts[1]))
    y = module(x)
    gradients = torch.autograd.grad(y, (x, module.weight), torch.randn_like(y))
    wanted = torch.contiguous_format
    if "channels_last" in layouts:
        wanted = torch.channels_last_3d
    for tensor in (y, *gradients):
        assert tensor.is_contiguous(memory_format=wanted)


@pytest.mark.parametrize("multiplier", [1, 3])
def test_groups_are_separate_layers(multiplier: int) -> None:
    whole = convt3d.ConvTranspose3d(2, 2 * multiplier, 3, groups=2, dtype=torch.float64)
    x = torch.randn(2, 2, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    y = whole(x)
    gy = torch.randn_like(y)
    (gx,) = torch.autograd.grad(y, x, gy, retain_graph=True)
    gw, gb = torch.autograd.grad(y, (whole.weight, whole.bias), gy)
    halves: list[list[Tensor]] = []
    for g in range(2):
        part = slice(g * multiplier, (g + 1) * multiplier)
        half = convt3d.ConvTranspose3d(1, multiplier, 3, dtype=torch.float64)
        half.weight.data = whole.weight.data[g : g + 1]
        half.bias.data = whole.bias.data[part]  # type: ignore[union-attr]
        xg = x[:, g : g + 1].detach().requires_grad_()
        yg = half(xg)
        halves.append([yg, *torch.autograd.grad(yg, (xg, half.weight, half.bias), gy[:, part])])
    pairs = zip(*halves, strict=True)
    for result, axis, parts in zip((y, gx, gw, gb), (1, 1, 0, 0), pairs, strict=True):
        torch.testing.assert_close(result, torch.cat(parts, axis))
