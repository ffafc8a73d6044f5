"""Random element-wise tails of a convolution, traced to ATen as Inductor traces them.

A tail is up to six operators on the output of a convolution: what an epilogue can run, and what
looks like it and must be left alone (other shapes, values used twice, reductions in between).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import convt3d

Operands = list[Tensor]
Function = Callable[[Tensor, Callable[[Tensor], Tensor]], Any]
"""An operator of a tail: the value, and what puts a new operand into the place of an example."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "leaky_relu": lambda y: F.leaky_relu(y, 0.2),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "clamp": lambda y: torch.clamp(y, -0.75, 0.5),
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "clamp below": lambda y: torch.clamp(y, min=-0.25),
    "clamp above": lambda y: y.clamp_max(0.5),
    "spelled silu": lambda y: y * torch.sigmoid(y),
    "spelled gelu": lambda y: (
        0.5 * y * (1 + torch.tanh(0.7978845608028654 * (y + 0.044715 * y**3)))
    ),
    "mish": F.mish,
    # Several steps:
    "square": lambda y: y * y,
    "hardswish of product": lambda y: y * F.hardswish(y),
    "almost silu": lambda y: y * torch.sigmoid(2 * y),
    # Not steps:
    "elu": F.elu,
    "softplus": F.softplus,
    "almost leaky": lambda y: torch.where(y > 0.1, y, 0.2 * y),
    "almost leaky, mirrored": lambda y: torch.where(y > 0, 0.2 * y, y),
}
SCALARS: dict[str, Callable[[Tensor], Tensor]] = {
    "y + a": lambda y: y + 0.7,
    "y - a": lambda y: y - 0.7,
    "a - y": lambda y: 0.7 - y,
    "y * a": lambda y: y * 1.7,
    "y / a": lambda y: y / 1.7,
    "-y": lambda y: -y,
    "y + int": lambda y: y + 1,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "y + t": lambda y, t: y + t,
    "t + y": lambda y, t: t + y,
    "y - t": lambda y, t: y - t,
    "t - y": lambda y, t: t - y,
    "y * t": lambda y, t: y * t,
    "y / t": lambda y, t: y / (1 + t * t),
    "max": torch.maximum,
}
FORMS = {
    "(C,1,1,1)": lambda n, c, d, h, w: (c, 1, 1, 1),
    "(1,C,1,1,1)": lambda n, c, d, h, w: (1, c, 1, 1, 1),
    "()": lambda n, c, d, h, w: (),
    "(1,)": lambda n, c, d, h, w: (1,),
    "same": lambda n, c, d, h, w: (n, c, d, h, w),
    "(W,)": lambda n, c, d, h, w: (w,),
    "(N,C,1,1,1)": lambda n, c, d, h, w: (n, c, 1, 1, 1),
    "(D,H,W)": lambda n, c, d, h, w: (d, h, w),
}


@dataclass
class Case:
    """A function of tensors, and tensors for it; ``label`` says what it is."""

    label: str
    function: Callable[..., Any]
    inputs: list[Tensor]
    operators: int
    dtype: torch.dtype
    channels: int = 0

    def wide(self) -> list[Tensor]:
        """The inputs in float64."""
        return [tensor.double() for tensor in self.inputs]


class Maker:
    """Makes random cases from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def case(self, larger: int = 0) -> Case:
        """The case of the seed; ``larger`` is added to all extents of the volume but 1."""
        pick = self.random.choice
        dtype = pick([torch.float32, torch.float32, torch.bfloat16, torch.float64])
        transposed, last, biased = pick([True, False]), pick([True, False]), pick([True, False])
        n, c_in, c = pick([1, 2]), pick([2, 3]), pick([1, 3, 4])
        # No extent equals another, or a number of channels: those would share a symbol.
        size = [pick([6, 7]), pick([8, 9]), pick([1, 10, 11])]
        size = [n + larger if n > 1 else n for n in size]
        stride, groups = pick([1, 2]), 1
        if pick([True, False]) and c == 4:
            c_in, groups = 2, 2
        first, second = (c_in, c) if transposed else (c, c_in)
        x = self._tensor((n, c_in, *size), dtype)
        w = self._tensor((first, second // groups, 3, 1, 3), dtype) / 2
        if last:
            x = x.contiguous(memory_format=torch.channels_last_3d)
        inputs = [x, w] + ([self._tensor((c,), dtype)] if biased else [])
        layer = convt3d.conv_transpose3d if transposed else convt3d.conv3d
        padding = (1, 0, 1)

        def convolve(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
            return layer(x, w, b, stride=stride, padding=padding, groups=groups)

        output = convolve(*inputs)
        names, functions = [], []
        count = self.random.randint(1, 6)
        for _ in range(count):
            name, function = self._operator(output, inputs)
            names.append(name)
            functions.append(function)
        tap = pick([False] * 5 + [True])
        if tap:
            names.append("tap")
        at = self.random.randrange(count)

        def tail(*tensors: Tensor) -> list[Tensor]:
            y = convolve(*tensors[: 2 + biased])
            kept = []
            for index, function in enumerate(functions):
                if tap and index == at:
                    kept.append(y)
                y = function(y, tensors)
            return [y, *kept]

        kind = "conv_transpose3d" if transposed else "conv3d"
        label = f"{kind} {dtype} {tuple(x.shape)} c={c} last={last}: {'; '.join(names)}"
        return Case(label, tail, inputs, count, dtype, c)

    def _tensor(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(size, generator=self.generator).to(dtype)

    def _operator(self, output: Tensor, inputs: Operands) -> tuple[str, Any]:
        group = self.random.choices(
            ["activation", "scalar", "tensor", "norm", "dtype", "sum", "cat"],
            [8, 4, 7, 1.5, 1, 0.5, 1.5],
        )[0]
        if group in ("activation", "scalar"):
            table = ACTIVATIONS if group == "activation" else SCALARS
            name = self.random.choice(list(table))
            return name, lambda y, tensors: table[name](y)
        if group == "tensor":
            return self._with_tensor(output, inputs)
        if group == "norm":
            at, c = len(inputs), output.shape[1]
            inputs += [self._tensor((c,), output.dtype) for _ in range(4)]

            def norm(y: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
                if y.shape[1] != c:
                    return y
                mean, var, w, b = (t.to(y.dtype) for t in tensors[at : at + 4])
                return F.batch_norm(y, mean, var.abs() + 0.5, w, b, False)

            return "batch norm", norm
        if group == "dtype":
            low = self.random.choice([torch.bfloat16, torch.float32])
            # In the reference, which is in float64, nothing is rounded.
            return f"to {low}", lambda y, _: y if y.dtype == torch.float64 else y.to(low)
        if group == "sum":
            return "minus its mean", lambda y, _: y - y.mean((2, 3, 4), keepdim=True)
        return self._cat(output, inputs)

    def _with_tensor(self, output: Tensor, inputs: Operands) -> tuple[str, Any]:
        name = self.random.choice(list(BINARY))
        form = self.random.choices(list(FORMS), [3, 3, 1, 1, 6, 1, 1, 1])[0]
        size = FORMS[form](*output.shape)
        dtype = self.random.choice([output.dtype, output.dtype, torch.float32])
        if output.dtype == torch.float64:
            dtype = torch.float64
        operand = self._tensor(size, dtype)
        if len(size) == 5 and self.random.random() < 0.3:
            operand = operand.contiguous(memory_format=torch.channels_last_3d)
        inputs.append(operand)
        at = len(inputs) - 1

        def binary(y: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
            t = tensors[at]
            if t.dim() > 1 and t.shape[-4:-3] not in ((1,), y.shape[1:2]) and t.dim() != 3:
                t = t.mean()  # behind a concatenation there are more channels
            return BINARY[name](y, t)

        return f"{name} {form} {dtype}", binary

    def _cat(self, output: Tensor, inputs: Operands) -> tuple[str, Any]:
        n, _, d, h, w = output.shape
        other = self._tensor((n, self.random.choice([1, 2, 5]), d, h, w), output.dtype)
        if output.is_contiguous(memory_format=torch.channels_last_3d):
            other = other.contiguous(memory_format=torch.channels_last_3d)
        inputs.append(other)
        at, first = len(inputs) - 1, self.random.random() < 0.5
        computed = self.random.random() < 0.3

        def cat(y: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
            t = tensors[at].to(y.dtype)
            t = t.relu() if computed else t
            return torch.cat([t, y] if first else [y, t], 1)

        return f"cat of {other.shape[1]} {'before' if first else 'after'}", cat


def traced(case: Case, symbolic: bool = False) -> GraphModule:
    """The ATen graph of a case, decomposed as Inductor does, with fake tensors for values."""
    with torch.no_grad():
        mode = "symbolic" if symbolic else "fake"
        graph = make_fx(
            case.function,
            decomposition_table=select_decomp_table(),
            tracing_mode=mode,
        )(*case.inputs)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph
