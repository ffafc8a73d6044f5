"""When an operation is left to cuDNN: the table, and what was timed."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import convt3d
from convt3d.cuda import cudnn, prepared
from convt3d.cuda.cudnn import Times
from convt3d.cuda.operation import Operation
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.geometry import Geometry
from convt3d.layout import empty
from convt3d.precision import Arithmetic


def rows() -> list[dict[str, object]]:
    text = resources.files("convt3d.cuda").joinpath("cudnn_table.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def adjoint(channels: tuple[int, int], size: int, stride: int = 1) -> tuple[Geometry, tuple]:
    conv = Geometry(*channels, (3, 3, 3), (stride,) * 3, (1, 1, 1), transposed=False)
    extents = (size,) * 3
    return conv.adjoint(extents), conv.output_size(extents)


def reason(channels: tuple[int, int], size: int, operation: str = "grad_input", **changes: object):
    geometry, extents = adjoint(channels, size)
    last = bool(changes.get("last", False))
    arithmetic = changes.get("arithmetic", Arithmetic.BF16)
    problem = Problem(operation, geometry, arithmetic, last, bool(changes.get("other", last)))
    return cudnn.reason(problem, 2, extents, changes.get("gpu", Gpu()))


def test_layers_of_the_table() -> None:
    """nnU-Net's contiguous volumes are ours; the sentence on one that is not has both times."""
    assert reason((32, 32), 128) is None
    assert reason((64, 32), 128, "grad_weight") is None
    assert reason((640, 320), 8, arithmetic=Arithmetic.TF32) is None
    assert reason((320, 320), 8, last=True) is None
    assert reason((640, 320), 8, "grad_weight", last=True) is None
    text = reason((256, 256), 16, "grad_weight", last=True)
    assert text is not None and "were timed on an H200" in text


def test_other_layers_are_ours() -> None:
    """The table judges the very layers that were timed."""
    assert reason((640, 320), 9) is None
    assert reason((640, 328), 8) is None
    assert reason((320, 640), 8, "grad_weight") is None


def test_what_is_not_judged() -> None:
    for changes in (
        {"arithmetic": Arithmetic.IEEE},
        {"last": False, "other": True},
        {"gpu": Gpu((8, 0))},
        {"gpu": Gpu((10, 0))},
    ):
        assert reason((640, 320), 8, **changes) is None
    geometry, extents = adjoint((8192, 8192), 1024)
    problem = Problem("grad_input", geometry, Arithmetic.BF16)
    assert cudnn.reason(problem, 64, extents, Gpu()) is None  # nothing is near


@pytest.mark.parametrize("operation", ["forward", "grad_input", "grad_weight"])
def test_a_tensor_of_one_channel_is_in_either_layout(operation: str) -> None:
    """A channels_last tensor of one channel is read as a contiguous one."""
    head = Geometry(32, 1, (1,) * 3, transposed=False).adjoint((128,) * 3)
    one_is_source = operation != "grad_input"

    def judged(source: bool, target: bool, geometry: Geometry = head) -> str | None:
        problem = Problem(operation, geometry, Arithmetic.BF16, source, target)
        return cudnn.reason(problem, 2, (128,) * 3, Gpu())

    mixed = (False, True) if one_is_source else (True, False)
    assert judged(*mixed) == judged(True, True)
    assert judged(*mixed[::-1]) == judged(False, False)
    assert (judged(*mixed) is not None) == (operation == "grad_weight")
    several = Geometry(32, 3, (1,) * 3, transposed=False)
    assert judged(*mixed, several.adjoint((128,) * 3)) is None


def test_every_kind_has_rows() -> None:
    """Three operations, TF32 and 16 bits, both layouts."""
    kinds = {(row["operation"], row["element"], row["channels_last"]) for row in rows()}
    assert len(kinds) == 12


def test_times_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVT3D_CACHE_DIR", str(tmp_path))
    cudnn.forget()
    geometry, extents = adjoint((16, 16), 12)
    problem, gpu = Problem("grad_input", geometry, Arithmetic.BF16), Gpu(name="a GPU")
    assert cudnn.timed(problem, 2, extents, gpu) is None
    cudnn.remember(problem, 2, extents, gpu, Times(3.0, 2.0))
    cudnn.forget()
    assert cudnn.timed(problem, 2, extents, gpu) == Times(3.0, 2.0)
    assert cudnn.timed(problem, 3, extents, gpu) is None
    text = cudnn.left_to_pytorch(problem, 2, extents, gpu, True)
    assert text is not None and "timed here" in text
    assert cudnn.left_to_pytorch(problem, 2, extents, gpu, False) is None
    cudnn.remember(problem, 2, extents, gpu, Times(2.0, 3.0))
    assert cudnn.left_to_pytorch(problem, 2, extents, gpu, True) is None
    cudnn.forget()


def test_explain_and_warm_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry, extents = adjoint((640, 320), 8)
    problem = Problem("grad_input", geometry, Arithmetic.TF32)
    timed = {(cudnn._kind(problem), cudnn._sizes(problem, 2, extents)): Times(0.2, 0.1)}
    monkeypatch.setattr(cudnn, "_table", lambda: timed)
    explained = convt3d.explain(
        geometry, (2, geometry.in_channels, *extents), torch.float32, device="cuda"
    )
    choices = {choice.operation: choice for choice in explained.choices}
    assert "timed on an H200" in choices["grad_input"].reason
    operation = Operation(
        "grad_input",
        geometry,
        2,
        extents,
        torch.float32,
        Arithmetic.TF32,
        (False, False),
        (1, 1, 1, 1, 1),
    )
    assert "timed on an H200" in str(operation.refusal(Gpu()))


def left_of(operation: str, geometry: Geometry, x: torch.Tensor, last: bool) -> prepared.Left:
    """PyTorch's operator on inputs of a transposed layer like ``x``."""
    problem = Problem(operation, geometry, Arithmetic.IEEE, last, last)
    return prepared.Left(
        Operation.of(problem, x.shape[0], x.shape[2:], empty(geometry.weight_size, x, last))
    )


@pytest.mark.parametrize("operation", ["forward", "grad_input", "grad_weight"])
def test_what_is_left_is_pytorchs(operation: str) -> None:
    layer = nn.ConvTranspose3d(4, 6, 3, 2, 1, 1)
    x = torch.randn(2, 4, 3, 4, 5, requires_grad=True)
    y = layer(x)
    gy = torch.randn_like(y)
    gx, gw, gb = torch.autograd.grad(y, (x, layer.weight, layer.bias), gy)
    geometry = Geometry(4, 6, (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1))
    for last in (False, True):
        left = left_of(operation, geometry, x, last)
        if operation == "forward":
            results = [(left.output(x, layer.weight, layer.bias), y)]
        elif operation == "grad_input":
            results = [(left.output(gy, layer.weight), gx)]
        else:
            results = [(left.grad_weight(x, gy), gw)]
            results += zip(left.grad_weight_bias(x, gy), (gw, gb), strict=True)
        for got, want in results:
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
            if got.dim() == 5:
                memory_format = torch.channels_last_3d if last else torch.contiguous_format
                assert got.is_contiguous(memory_format=memory_format)


class _Backwards(TorchDispatchMode):
    """What PyTorch's convolution_backward is told of the layers, in order: transposed or not."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.transposed.append(args[7])
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("last", [False, True], ids=["ncdhw", "ndhwc"])
def test_a_gradient_by_weight_that_is_left_is_that_of_a_conv3d(last: bool) -> None:
    x, gy = torch.randn(2, 1, 8, 8, 8), torch.randn(2, 6, 2, 2, 2)
    want = torch.nn.grad.conv3d_weight(x, (6, 1, 4, 4, 4), gy, stride=4)
    left = left_of("grad_weight", Geometry(6, 1, (4, 4, 4), (4, 4, 4)), gy, last)
    with _Backwards() as seen:
        got = left.grad_weight(gy, x)
    assert seen.transposed == [False]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_output_padding_may_reach_the_stride() -> None:
    layer = nn.ConvTranspose3d(4, 6, 3, 2, 2, output_padding=2, dilation=3)
    x = torch.randn(2, 4, 3, 4, 5)
    y = layer(x)
    gy = torch.randn_like(y)
    (want,) = torch.autograd.grad(y, layer.weight, gy)
    threes, twos = (3, 3, 3), (2, 2, 2)
    left = left_of("grad_weight", Geometry(4, 6, threes, twos, twos, twos, threes), x, False)
    with _Backwards() as seen:
        got = left.grad_weight(x, gy)
    assert seen.transposed == [True]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
