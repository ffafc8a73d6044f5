"""What is measured: convt3d, and every way to get the same result from PyTorch.

On CUDA each contender runs in a process of its own: PyTorch caches one cuDNN plan per shape, so
``benchmark=True`` after ``benchmark=False`` would silently reuse the slow plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from convt3d import forms
from convt3d.bench import numerics
from convt3d.bench.cases import PASSES, Tensors
from convt3d.bench.shapes import Shape
from convt3d.bench.timing import Call
from convt3d.geometry import Geometry

OURS = "convt3d"
DEFAULT = "default"


@dataclass(frozen=True)
class Contender:
    """One way to run a pass.

    ``layout`` is the only one it is measured in ("" for whichever is asked); ``prepare`` gives
    the call to time, with everything that a careful user would do once done beforehand.
    """

    name: str
    description: str
    prepare: Callable[[str, Tensors], Call]
    passes: tuple[str, ...] = PASSES
    applies: Callable[[Shape], bool] = lambda shape: True
    layout: str = ""
    cudnn_benchmark: bool = True
    cuda_only: bool = False

    def runs(self, shape: Shape, layout: str, operation: str) -> bool:
        return operation in self.passes and self.applies(shape) and self.layout in ("", layout)


Function = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _function(package: Any, g: Geometry) -> Function:
    """The layer as a function of input, weight and bias, by a package that has PyTorch's names."""
    if g.transposed:
        by = package.conv_transpose3d
        return lambda x, w, b: by(
            x, w, b, g.stride, g.padding, g.output_padding, g.groups, g.dilation
        )
    by = package.conv3d
    return lambda x, w, b: by(x, w, b, g.stride, g.padding, g.dilation, g.groups)


def _train(function: Function, t: Tensors) -> Call:
    """One call of the layer and the gradients by input, weight and bias, by autograd."""
    x, w = (v.detach().requires_grad_() for v in (t.x, t.w))
    b = None if t.b is None else t.b.detach().requires_grad_()
    leaves = [v for v in (x, w, b) if v is not None]

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(x, w, b), leaves, t.gy)

    return call


def _convt3d(operation: str, t: Tensors) -> Call:
    import convt3d

    function = _function(convt3d, t.shape.geometry)
    if operation == "train":
        return _train(function, t)
    if operation == "forward":
        return lambda: function(t.x, t.w, t.b)
    return lambda: numerics.ours(operation, t)


def _pytorch(operation: str, t: Tensors) -> Call:
    function = _function(torch, t.shape.geometry)
    if operation == "train":
        return _train(function, t)
    if operation == "forward":
        return lambda: function(t.x, t.w, t.b)
    return lambda: numerics.pytorch(operation, t)


def _max_autotune(operation: str, t: Tensors) -> Call:
    """Inductor times its Triton template beside cuDNN, and compiles the winner."""
    # Each layer gets code for its own sizes: what an earlier one left would make them dynamic.
    torch.compiler.reset()
    function = _function(torch, t.shape.geometry)
    compiled = torch.compile(function, dynamic=False, options={"max_autotune": True})
    return lambda: compiled(t.x, t.w, t.b)


def _polyphase(operation: str, t: Tensors) -> Call:
    g = t.shape.geometry
    packed = [w.contiguous() for w in forms.polyphase_pack(t.w, g, t.shape.input_size)]
    if t.channels_last:
        packed = [w.contiguous(memory_format=torch.channels_last_3d) for w in packed]
    return lambda: forms.polyphase(t.x, packed, t.b, g, t.channels_last)


def _gemm(operation: str, t: Tensors) -> Call:
    g = t.shape.geometry
    return lambda: forms.gemm_forward(t.x, t.w, t.b, g, t.channels_last)


def _gemm_compiled(operation: str, t: Tensors) -> Call:
    kernel_size = t.shape.geometry.kernel_size

    def shuffle(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        n, c, depth, height, width = x.shape
        kd, kh, kw = kernel_size
        product = torch.matmul(w.reshape(c, -1).t(), x.reshape(n, c, -1))
        product = product.view(n, -1, kd, kh, kw, depth, height, width)
        y = product.permute(0, 1, 5, 2, 6, 3, 7, 4)
        y = y.reshape(n, -1, depth * kd, height * kh, width * kw)
        return y if b is None else y + b.view(1, -1, 1, 1, 1)

    # Each layer gets code for its own sizes: what an earlier one left would make them dynamic.
    torch.compiler.reset()
    compiled = torch.compile(shuffle, dynamic=False)
    return lambda: compiled(t.x, t.w, t.b)


def _stride_1(shape: Shape) -> bool:
    return shape.geometry.transposed and shape.geometry.stride == (1, 1, 1)


def _strided(shape: Shape) -> bool:
    return shape.geometry.transposed and not _stride_1(shape)


def _is_gemm(shape: Shape) -> bool:
    return shape.geometry.transposed and forms.is_gemm(shape.geometry)


def _has_template(shape: Shape) -> bool:
    """Whether Inductor's Triton template for 3-D convolutions takes a layer."""
    return not shape.geometry.transposed and shape.geometry.dilation == (1, 1, 1)


_FORWARD = ("forward",)

_ALL = (
    Contender(OURS, "this package", _convt3d, cudnn_benchmark=False),
    Contender(DEFAULT, "PyTorch as it comes", _pytorch, cudnn_benchmark=False),
    Contender(
        "cudnn_benchmark",
        "PyTorch with torch.backends.cudnn.benchmark = True",
        _pytorch,
        layout="ncdhw",
        cuda_only=True,
    ),
    Contender(
        "cudnn_channels_last",
        "the same with channels_last_3d tensors",
        _pytorch,
        layout="ndhwc",
        cuda_only=True,
    ),
    Contender(
        "flipconv",
        "conv3d with the flipped weight, stride 1",
        _polyphase,
        passes=_FORWARD,
        applies=_stride_1,
        layout="ncdhw",
    ),
    Contender(
        "flipconv_cl",
        "the same with channels_last_3d tensors",
        _polyphase,
        passes=_FORWARD,
        applies=_stride_1,
        layout="ndhwc",
    ),
    Contender(
        "polyphase",
        "conv3d per output phase, then interleaved",
        _polyphase,
        passes=_FORWARD,
        applies=_strided,
        layout="ncdhw",
    ),
    Contender(
        "gemm_shuffle",
        "matrix product and permute, kernel equal to stride",
        _gemm,
        passes=_FORWARD,
        applies=_is_gemm,
        layout="ncdhw",
    ),
    Contender(
        "gemm_shuffle_compiled",
        "the same under torch.compile",
        _gemm_compiled,
        passes=_FORWARD,
        applies=_is_gemm,
        layout="ncdhw",
        cuda_only=True,
    ),
    Contender(
        "max_autotune",
        "torch.compile with max_autotune: Inductor's Triton template or cuDNN",
        _max_autotune,
        passes=_FORWARD,
        applies=_has_template,
        cuda_only=True,
    ),
)
CONTENDERS = {contender.name: contender for contender in _ALL}


def peers(device_type: str) -> list[str]:
    """Names of all contenders but ours that run on a kind of device."""
    return [c.name for c in _ALL if c.name != OURS and not (c.cuda_only and device_type != "cuda")]
