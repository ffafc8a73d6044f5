"""Invalid calls: the exception types of PyTorch, and its facts in the message."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import convt3d
from support.checks import check_same_error
from support.modes import Dispatches

_X, _W = (2, 4, 3, 4, 5), (4, 6, 3, 3, 3)

# (facts that both messages must hold, input size, weight size, keywords)
_CALLS: dict[str, tuple[list[str], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "3-D input": (["[4, 3, 4]", "4D", "5D"], (4, 3, 4), _W, {}),
    "6-D input": (["[1, 2, 4, 3, 4, 5]"], (1, 2, 4, 3, 4, 5), _W, {}),
    "4-D weight": (["2 values", "[1, 1, 1]"], _X, (4, 6, 3, 3), {"stride": (1, 1, 1)}),
    "2-D weight": (["three dimensions"], _X, (4, 6), {}),
    "two strides": (["stride=[2, 2]", "3 values"], _X, _W, {"stride": (2, 2)}),
    "no stride": (["stride=[]"], _X, _W, {"stride": ()}),
    "four paddings": (["padding=[1, 1, 1, 1]"], _X, _W, {"padding": [1, 1, 1, 1]}),
    "two dilations": (["dilation=[1, 1]"], _X, _W, {"dilation": [1, 1]}),
    "two output paddings": (["output_padding=[1, 1]"], _X, _W, {"output_padding": [1, 1]}),
    "stride 0": (["non-positive stride"], _X, _W, {"stride": 0}),
    "stride -1": (["non-positive stride"], _X, _W, {"stride": (1, -1, 1)}),
    "padding -1": (["negative padding"], _X, _W, {"padding": (0, 0, -1)}),
    "output_padding None": (["NoneType"], _X, _W, {"output_padding": None}),
    "output_padding -1": (["negative output_padding"], _X, _W, {"output_padding": -1}),
    "dilation -1": (["dilation should be greater than zero"], _X, _W, {"dilation": -1}),
    "dilation 0": ([], _X, _W, {"dilation": 0}),
    "groups 0": (["non-positive groups"], _X, _W, {"groups": 0}),
    "groups -2": (["non-positive groups"], _X, _W, {"groups": -2}),
    "groups above channels": (["groups=8", "[4, 6, 3, 3, 3]"], _X, _W, {"groups": 8}),
    "groups that do not divide": (["groups=3", "[4, 6, 3, 3, 3]"], _X, _W, {"groups": 3}),
    "channels": (
        ["[4, 6, 3, 3, 3]", "[2, 5, 3, 4, 5]", "4 channels", "5 channels"],
        (2, 5, 3, 4, 5),
        _W,
        {},
    ),
    "channels, unbatched": (["4 channels", "5 channels"], (5, 3, 4, 5), _W, {}),
    "bias of 5": (["6 elements", "[5]"], _X, _W, {"bias": torch.zeros(5)}),
    "2-D bias": (["1-dimensional"], _X, _W, {"bias": torch.zeros(6, 1)}),
    "bias, groups": (["12 elements", "[6]"], _X, _W, {"bias": torch.zeros(6), "groups": 2}),
    "output_padding reaches stride and dilation": (
        ["smaller than either stride or dilation", "output_padding_depth: 2"],
        _X,
        _W,
        {"stride": 2, "output_padding": (2, 0, 0)},
    ),
    "negative output": ([], (1, 4, 1, 1, 1), (4, 6, 1, 1, 1), {"padding": 1}),
    "no voxels": (["[2, 4, 0, 4, 5]", "zero batch"], (2, 4, 0, 4, 5), _W, {}),
    "no output channels": ([], _X, (4, 0, 3, 3, 3), {}),
    "empty kernel": ([], _X, (4, 6, 0, 3, 3), {}),
    "no input channels": (["at least 1"], (2, 0, 3, 4, 5), (0, 6, 3, 3, 3), {}),
    "float stride": (["stride", "float"], _X, _W, {"stride": 2.0}),
    "float in a tuple": (["stride", "tuple of ints"], _X, _W, {"stride": (1, 2.0, 1)}),
    "bool stride": (["stride", "bool"], _X, _W, {"stride": True}),
    "string padding": (["padding", "str"], _X, _W, {"padding": "same"}),
    "None dilation": (["dilation", "NoneType"], _X, _W, {"dilation": None}),
    "tensor of strides": (["stride", "Tensor"], _X, _W, {"stride": torch.tensor([1, 1, 1])}),
    "float groups": (["groups", "int, not float"], _X, _W, {"groups": 1.0}),
    "tuple of groups": (["groups", "int, not tuple"], _X, _W, {"groups": (1,)}),
    "stride 2**62": ([], _X, _W, {"stride": 2**62}),
    "one stride of 2**62": ([], _X, _W, {"stride": (1, 2**62, 1)}),
    "stride 2**63 - 1": ([], _X, _W, {"stride": 2**63 - 1}),
    "stride 2**31": ([], _X, _W, {"stride": 2**31}),
    "padding 2**31": ([], _X, _W, {"padding": 2**31}),
    "padding 2**62": ([], _X, _W, {"padding": 2**62}),
    "output_padding 2**62": ([], _X, _W, {"output_padding": 2**62}),
    "dilation 2**31": ([], _X, _W, {"dilation": 2**31}),
    "dilation 2**62": ([], _X, _W, {"dilation": 2**62}),
    "one dilation of 2**62": ([], _X, _W, {"dilation": (1, 1, 2**62)}),
    "unknown keyword": (["strides"], _X, _W, {"strides": 2}),
}


@pytest.mark.parametrize("name", _CALLS)
@pytest.mark.parametrize("route", ["eager", "grad", "dispatched"])
def test_error_parity(name: str, route: str) -> None:
    facts, x_size, w_size, keywords = _CALLS[name]
    x, w = torch.zeros(x_size), torch.zeros(w_size).requires_grad_(route == "grad")
    if route == "dispatched":
        x = x.as_subclass(type("Subclass", (torch.Tensor,), {}))
    ours, theirs = check_same_error(lambda conv: conv(x, w, **keywords))
    for fact in facts:
        assert fact in theirs  # or the table is wrong
        assert fact in ours


@pytest.mark.parametrize("value", [2**63, (1, 1, 2**63), -(2**70), [2**70]])
@pytest.mark.parametrize("name", ["stride", "padding", "output_padding", "dilation"])
def test_what_64_bits_cannot_hold_is_refused_as_pytorch_does(name: str, value: Any) -> None:
    keywords: dict[str, Any] = {name: value}
    ours, _ = check_same_error(lambda conv: conv(_f(*_X), _f(*_W), **keywords))
    assert "Overflow" in ours


def test_groups_beyond_64_bits() -> None:
    check_same_error(lambda conv: conv(_f(*_X), _f(*_W), groups=2**63))


def _f(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype)


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (
            lambda conv: conv(_f(*_X), _f(*_W, dtype=torch.float64)),
            ["Input type (torch.FloatTensor) and weight type (torch.DoubleTensor)"],
        ),
        (
            lambda conv: conv(_f(*_X, dtype=torch.float64), _f(*_W)),
            [],  # the text differs between PyTorch's backends
        ),
        (
            lambda conv: conv(_f(*_X), _f(*_W), _f(6, dtype=torch.float64)),
            ["Input type (torch.FloatTensor) and bias type (torch.DoubleTensor)"],
        ),
        (lambda conv: conv(_f(*_X, dtype=torch.int32), _f(*_W, dtype=torch.int32)), ["'Int'"]),
        (lambda conv: conv(_f(*_X, dtype=torch.int64), _f(*_W)), ["Long", "Float"]),
        (lambda conv: conv([1.0], _f(*_W)), ["list"]),
        (lambda conv: conv(_f(*_X), None), ["weight", "NoneType"]),
        (lambda conv: conv(_f(*_X), _f(*_W), 1.0), ["bias", "float"]),
        (lambda conv: conv(_f(*_X)), ["weight"]),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else "",
)
def test_type_error_parity(call: Callable[[Any], Any], facts: list[str]) -> None:
    ours, theirs = check_same_error(call)
    for fact in facts:
        assert fact in theirs
        assert fact in ours


def test_devices_must_agree() -> None:
    with pytest.raises(RuntimeError, match="should be the same"):
        convt3d.conv_transpose3d(_f(*_X), _f(*_W).to("meta"))


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Dispatches])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("size", "weight", "padding"),
    [((2, 4, 2, 2, 2), (4, 2, 3, 3, 3), 2), ((2, 4, 2, 1, 1), (4, 6, 1, 1, 1), (1, 0, 0))],
)
def test_an_output_without_voxels_is_as_pytorchs(
    device: str,
    mode: Callable[[], contextlib.AbstractContextManager[Any]],
    size: tuple[int, ...],
    weight: tuple[int, ...],
    padding: Any,
) -> None:
    """PyTorch's own backends disagree: some return an empty tensor, others refuse."""
    x, w = torch.ones(size, device=device), torch.ones(weight, device=device)

    def result(function: Callable[..., torch.Tensor]) -> torch.Size | str:
        try:
            with mode():
                return function(x, w, padding=padding).shape
        except RuntimeError as error:
            return str(error)

    want = result(torch.conv_transpose3d)
    assert "Output size is too small" in want if isinstance(want, str) else 0 in want
    assert result(convt3d.conv_transpose3d) == want


def test_an_output_without_voxels_is_refused() -> None:
    x, w = _f(2, 4, 2, 1, 1), _f(4, 6, 1, 1, 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of several, PyTorch takes oneDNN for so small a layer
    try:
        with pytest.raises(RuntimeError, match=re.escape("(0 x 1 x 1). Output size is too small")):
            convt3d.conv_transpose3d(x, w, padding=(1, 0, 0))
    finally:
        torch.set_num_threads(threads)


# --- Modules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"groups": 0},
        {"groups": -1},
        {"groups": 3},
        {"out_channels": 5, "groups": 2},
        {"padding_mode": "circular"},
        {"padding_mode": "nonsense"},
        {"kernel_size": 1.5},
    ],
    ids=str,
)
def test_constructor_errors(arguments: dict[str, Any]) -> None:
    arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **arguments}
    raised = []
    for kind in (convt3d.ConvTranspose3d, nn.ConvTranspose3d):
        with pytest.raises((ValueError, TypeError)) as caught:
            kind(**arguments)
        raised.append((caught.type, str(caught.value)))
    assert raised[0] == raised[1]


@pytest.mark.parametrize(
    ("output_size", "facts"),
    [
        ([7, 9], ["3 or 5 elements", "got 2"]),
        ([2, 7, 9, 11], ["3 or 5 elements", "got 4"]),
        ([6, 10, 12], ["[6, 10, 12]", "[7, 9, 11]", "[8, 10, 12]"]),
        ([7, 9, 13], ["[7, 9, 13]"]),
        ([2, 6, 7, 9, 30], ["[7, 9, 30]"]),
    ],
)
def test_output_size_errors(output_size: list[int], facts: list[str]) -> None:
    x = torch.zeros(_X)
    messages = []
    for kind in (convt3d.ConvTranspose3d, nn.ConvTranspose3d):
        with pytest.raises(ValueError) as caught:
            kind(4, 6, 3, stride=2)(x, output_size)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert all(fact in messages[0] for fact in facts)


def test_padding_mode_is_checked_again_in_forward() -> None:
    for kind in (convt3d.ConvTranspose3d, nn.ConvTranspose3d):
        module = kind(4, 6, 3)
        module.padding_mode = "reflect"
        with pytest.raises(ValueError, match="Only `zeros` padding mode"):
            module(torch.zeros(_X))


@pytest.mark.parametrize("name", ["conv3d", "conv_transpose3d"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_raise_as_in_pytorch(name: str) -> None:
    x = torch.nested.nested_tensor([torch.randn(2, 3, 3, 3)])
    for module in (torch.nn.functional, convt3d):
        with pytest.raises(NotImplementedError, match="Could not run 'aten::convolution'"):
            getattr(module, name)(x, torch.randn(2, 2, 1, 1, 1))


def test_errors_of_the_registered_operators() -> None:
    x, w, gy = torch.zeros(_X), torch.zeros(_W), torch.zeros(2, 6, 5, 6, 7)
    rest = ([1] * 3, [0] * 3, [0] * 3, [1] * 3, 0)
    ops = torch.ops.convt3d
    size, kernel = [3, 4, 5], [3, 3, 3]
    assert ops.conv_transpose3d(x, w, None, False, *rest).shape == gy.shape
    assert ops.conv3d(gy, w, None, size, False, *rest).shape == x.shape
    assert ops.grad_weight(x, gy, kernel, False, *rest).shape == w.shape
    with pytest.raises(RuntimeError, match="5D input"):
        ops.conv_transpose3d(x[0], w, None, False, *rest)
    with pytest.raises(RuntimeError, match="to have 4 channels"):
        ops.conv_transpose3d(x[:, :3], w, None, False, *rest)
    with pytest.raises(RuntimeError, match=re.escape("[6, 5, 6, 7]")):
        ops.conv3d(gy[..., 1:], w, None, size, False, *rest)
    with pytest.raises(RuntimeError, match="expected input"):
        ops.conv3d(gy[:, :5], w, None, size, False, *rest)
    with pytest.raises(RuntimeError, match="bias to be 1-dimensional with 4 elements"):
        ops.conv3d(gy, w, torch.zeros(6), size, False, *rest)
    with pytest.raises(RuntimeError, match="batch"):
        ops.grad_weight(x[:1], gy, kernel, False, *rest)
    with pytest.raises(RuntimeError, match="grad_output"):
        ops.grad_weight(x, gy, [3, 3, 2], False, *rest)
    with pytest.raises(RuntimeError, match="type"):
        ops.grad_weight(x, gy.double(), kernel, False, *rest)
    for group_channels in (3, 8, -1):
        with pytest.raises(RuntimeError, match="group_channels to divide the 4 input channels"):
            ops.grad_weight(x, gy, kernel, False, *rest[:-1], group_channels)
