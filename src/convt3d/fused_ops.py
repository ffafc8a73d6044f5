"""The two layers with an element-wise tail, as torch.library knows them.

``convt3d::conv_transpose3d_fused`` and ``convt3d::conv3d_fused`` take the arguments of the plain
operators (``ops.py``) and a tail: ``kinds`` and ``scalars`` are those of a
:class:`~convt3d.fusion.Fusion` (no kinds: none), ``operands`` its tensors, ``dtype`` is that of the
result where a conversion ends the tail. With ``before`` or ``after`` the result is the
concatenation of these and the output along the channels.

They are what the graph pass of ``convt3d.compile`` writes, where autograd has been traced. Called
with tensors that require gradients they run as the plain operator and PyTorch's element-wise ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from convt3d import backends, ops
from convt3d.arguments import check, normalise
from convt3d.fusion import Fusion, check_operands, fusion_of
from convt3d.geometry import Geometry
from convt3d.layout import empty
from convt3d.operands import Checker, convolution_geometry, transposed_geometry

_TAIL = (
    "str[] kinds, Tensor[] operands, float[] scalars, ScalarType? dtype, "
    "Tensor[] before, Tensor[] after) -> Tensor"
)
_TAIL_ARGUMENTS = 6
FUSED = {name: f"{name}_fused" for name in ("conv_transpose3d", "conv3d")}
"""Name of the fused operator for each plain one."""

for _name, _fused in FUSED.items():
    # The plain operator's schema up to its last parenthesis, and the tail.
    _schema = str(getattr(torch.ops.convt3d, _name).default._schema)
    _arguments = _schema.partition("(")[2].rpartition(") ->")[0]
    ops._library.define(f"{_fused}({_arguments}, {_TAIL}", tags=ops._TAGS)


class _Call:
    """The arguments of a call, checked: by sizes alone, so that SymInts pass.

    Raises:
        RuntimeError: arguments of the layer or of the tail that do not fit.
    """

    def __init__(self, checker: Checker, transposed: bool, arguments: tuple[Any, ...]) -> None:
        layer, tail = arguments[:-_TAIL_ARGUMENTS], arguments[-_TAIL_ARGUMENTS:]
        kinds, self.operands, scalars, self.dtype, self.before, self.after = tail
        self.source, self.weight, self.bias, *rest = layer
        self.operation = "forward" if transposed else "grad_input"
        self.size: Sequence[int]
        if transposed:
            self.channels_last, *parameters = rest
            self.geometry: Geometry = transposed_geometry(
                checker, self.source, self.weight, self.bias, tuple(parameters)
            )
            self.input_size = self.source.shape[2:]
            size = self.geometry.output_size(self.input_size)
            self.size = (self.source.shape[0], self.geometry.out_channels, *size)
        else:
            self.input_size, self.channels_last, *parameters = rest
            self.geometry = convolution_geometry(
                checker, self.source, self.weight, self.bias, self.input_size, tuple(parameters)
            )
            self.size = (self.source.shape[0], self.geometry.in_channels, *self.input_size)
        self.dtype = self.dtype or self.source.dtype
        self.fusion = self._fusion(kinds, scalars)
        check_operands(self.fusion, self.operands, self.source, self.size)
        self._check_concatenated()

    def _fusion(self, kinds: Sequence[str], scalars: Sequence[float]) -> Fusion | None:
        try:
            return fusion_of(kinds, scalars) if kinds or scalars else None
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    def _check_concatenated(self) -> None:
        for other in (*self.before, *self.after):
            fits = other.dim() == 5 and all(
                other.shape[axis] == self.size[axis] for axis in (0, 2, 3, 4)
            )
            if not fits or other.dtype != self.dtype:
                raise RuntimeError(
                    f"expected tensors of {self.dtype} that differ from size {list(self.size)} in "
                    f"the channels alone, but got size {list(other.shape)} and {other.dtype}"
                )

    @property
    def concatenated(self) -> bool:
        return bool(self.before or self.after)

    def empty(self) -> Tensor:
        """The result, uninitialised."""
        channels = self.size[1] + sum(t.shape[1] for t in (*self.before, *self.after))
        like = self.source.new_empty(0, dtype=self.dtype)
        return empty((self.size[0], channels, *self.size[2:]), like, self.channels_last)

    def run(self) -> Tensor:
        """The result, by the backend that suits; no autograd."""
        if not self.concatenated:
            return self._fused(None)
        whole, first = self.empty(), 0
        for other in self.before:
            whole.narrow(1, first, other.shape[1]).copy_(other)
            first += other.shape[1]
        self._fused(whole.narrow(1, first, self.size[1]))
        first += self.size[1]
        for other in self.after:
            whole.narrow(1, first, other.shape[1]).copy_(other)
            first += other.shape[1]
        return whole

    def _fused(self, into: Tensor | None) -> Tensor:
        return backends.fused(
            self.operation,
            self.source,
            self.weight,
            self.bias,
            self.geometry,
            self.input_size,
            self.channels_last,
            self.fusion,
            [operand.contiguous() if operand.dim() == 1 else operand for operand in self.operands],
            into,
            self.dtype,
        )

    def composed(self, plain: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Tensor:
        """The result from the plain operator and PyTorch's, differentiable."""
        result = plain(*arguments[:-_TAIL_ARGUMENTS])
        if self.fusion is not None:
            result = self.fusion.apply(result, self.operands)
        result = result.to(self.dtype)
        if self.concatenated:
            last = torch.channels_last_3d if self.channels_last else torch.contiguous_format
            result = torch.cat([*self.before, result, *self.after], 1)
            result = result.contiguous(memory_format=last)
        return result


def _tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    return [
        tensor
        for argument in arguments
        for tensor in (argument if isinstance(argument, (list, tuple)) else (argument,))
        if isinstance(tensor, Tensor)
    ]


def _register(name: str, transposed: bool) -> None:
    plain = getattr(torch.ops.convt3d, name).default
    fused = FUSED[name]

    def kernel(*arguments: Any) -> Tensor:
        ops._refuse_tangents(*_tensors(arguments))
        return _Call(normalise, transposed, arguments).run()

    def fake(*arguments: Any) -> Tensor:
        return _Call(check, transposed, arguments).empty()

    def autograd(*arguments: Any) -> Tensor:
        if torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(arguments)):
            return _Call(check, transposed, arguments).composed(plain, arguments)
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = getattr(torch.ops.convt3d, fused).default(*arguments)
        return result

    ops._library.impl(fused, kernel, "CompositeExplicitAutograd")
    ops._library.impl(fused, autograd, "Autograd")
    torch.library.register_fake(f"convt3d::{fused}", fake, lib=ops._library)
    formula = ops._transposed_flops if transposed else ops._convolution_flops
    register_flop_formula(getattr(torch.ops.convt3d, fused), get_raw=True)(formula)


_register("conv_transpose3d", True)
_register("conv3d", False)
