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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from convt3d import backends, ops
from convt3d.arguments import check, normalise
from convt3d.dispatch import dispatcher_needed, plain
from convt3d.fusion import Fusion, check_operands, fusion_of
from convt3d.geometry import Geometry
from convt3d.layout import Part, empty
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


_Run = Callable[..., Tensor]
"""An operation with its tail: of source, weight, bias, operands and where to write (or None)."""


@dataclass(frozen=True)
class _Result:
    """The tensor that a call makes: the output, or that between others along the channels."""

    size: tuple[int, ...]  # of the output
    dtype: torch.dtype
    channels_last: bool

    def part(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> Part | None:
        """The output's place in it; None where it is the output."""
        if not (before or after):
            return None
        first = sum(t.shape[1] for t in before)
        return Part(first, first + self.size[1] + sum(t.shape[1] for t in after))

    def empty(self, source: Tensor, part: Part | None) -> Tensor:
        """It, uninitialised."""
        channels = self.size[1] if part is None else part.channels
        like = source.new_empty(0, dtype=self.dtype)
        return empty((self.size[0], channels, *self.size[2:]), like, self.channels_last)

    def made(
        self,
        run: _Run,
        layer: tuple[Tensor, Tensor, Tensor | None],
        operands: Sequence[Tensor],
        before: Sequence[Tensor],
        after: Sequence[Tensor],
    ) -> Tensor:
        """It, with the output written by ``run`` on a layer's source, weight and bias."""
        part = self.part(before, after)
        if part is None:
            return run(*layer, operands, None)
        whole = self.empty(layer[0], part)
        output = whole.narrow(1, part.first, self.size[1])
        first = 0
        for tensor in (*before, output, *after):
            if tensor is not output:
                whole.narrow(1, first, tensor.shape[1]).copy_(tensor)
            first += tensor.shape[1]
        run(*layer, operands, output)
        return whole


class Call:
    """The arguments of a call, checked: by sizes alone, so that SymInts pass.

    Raises:
        RuntimeError: arguments of the layer or of the tail that do not fit.
    """

    def __init__(self, checker: Checker, transposed: bool, arguments: tuple[Any, ...]) -> None:
        layer, tail = _split(arguments)
        kinds, self.operands, scalars, dtype, self.before, self.after = tail
        self.source, self.weight, self.bias, *rest = layer
        self.operation = "forward" if transposed else "grad_input"
        size: Sequence[int]
        if transposed:
            channels_last, *parameters = rest
            self.geometry: Geometry = transposed_geometry(
                checker, self.source, self.weight, self.bias, tuple(parameters)
            )
            self.input_size = self.source.shape[2:]
            channels, size = self.geometry.out_channels, self.geometry.output_size(self.input_size)
        else:
            self.input_size, channels_last, *parameters = rest
            self.geometry = convolution_geometry(
                checker, self.source, self.weight, self.bias, self.input_size, tuple(parameters)
            )
            channels, size = self.geometry.in_channels, self.input_size
        size = (self.source.shape[0], channels, *size)
        self.result = _Result(size, dtype or self.source.dtype, channels_last)
        self.fusion = self._fusion(kinds, scalars)
        check_operands(self.fusion, self.operands, self.source, size)
        self._check_concatenated()
        self.part = self.result.part(self.before, self.after)

    def _fusion(self, kinds: Sequence[str], scalars: Sequence[float]) -> Fusion | None:
        try:
            return fusion_of(kinds, scalars) if kinds or scalars else None
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    def _check_concatenated(self) -> None:
        size, dtype = self.result.size, self.result.dtype
        for other in (*self.before, *self.after):
            fits = other.dim() == 5 and all(
                other.shape[axis] == size[axis] for axis in (0, 2, 3, 4)
            )
            if not fits or other.dtype != dtype:
                raise RuntimeError(
                    f"expected tensors of {dtype} that differ from size {list(size)} in "
                    f"the channels alone, but got size {list(other.shape)} and {other.dtype}"
                )

    def empty(self) -> Tensor:
        """The result, uninitialised."""
        return self.result.empty(self.source, self.part)

    def run(self) -> Tensor:
        """The result, by the backend that suits; no autograd."""
        layer = (self.source, self.weight, self.bias)
        operands = [o.contiguous() if o.dim() == 1 else o for o in self.operands]
        run = partial(self._by, backends.fused)
        return self.result.made(run, layer, operands, self.before, self.after)

    def prepared(self) -> Callable[..., Tensor] | None:
        """What :meth:`run` comes to for tensors of these kinds, all decided; None if it has more
        to do. A function of (source, weight, bias), operands, and what lies before and after.
        """
        layer = (self.source, self.weight, self.bias)
        run: _Run | None = self._by(backends.prepare_fused, *layer, self.operands, self.part)
        return None if run is None else partial(self.result.made, run)

    def _by(
        self,
        fused: Callable[..., Any],
        source: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operands: Sequence[Tensor],
        place: Tensor | Part | None,
    ) -> Any:
        layer = (source, weight, bias, self.geometry, self.input_size, self.result.channels_last)
        return fused(self.operation, *layer, self.fusion, operands, place, self.result.dtype)

    def composed(self, unfused: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Tensor:
        """The result from the plain operator and PyTorch's, differentiable."""
        result = unfused(*_split(arguments)[0])
        if self.fusion is not None:
            result = self.fusion.apply(result, self.operands)
        result = result.to(self.result.dtype)
        if self.before or self.after:
            last = self.result.channels_last
            memory_format = torch.channels_last_3d if last else torch.contiguous_format
            result = torch.cat([*self.before, result, *self.after], 1)
            result = result.contiguous(memory_format=memory_format)
        return result


def _split(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of the layer, and of the tail."""
    return arguments[:-_TAIL_ARGUMENTS], arguments[-_TAIL_ARGUMENTS:]


def _tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    return [
        tensor
        for argument in arguments
        for tensor in (argument if isinstance(argument, (list, tuple)) else (argument,))
        if isinstance(tensor, Tensor)
    ]


def _register(name: str, transposed: bool) -> None:
    unfused = getattr(torch.ops.convt3d, name).default
    fused = FUSED[name]

    def kernel(*arguments: Any) -> Tensor:
        (source, weight, bias, *rest), tail = _split(arguments)
        kinds, operands, scalars, dtype, before, after = tail
        tensors = _tensors(arguments)
        ops.refuse_tangents(*tensors)
        own = (bias is None, len(operands), len(before), kinds, scalars, dtype)
        key = ops.call_key(fused, source, weight, *own, *rest)
        run = ops.decided.find(key, tensors)
        if run is None:
            call = Call(normalise, transposed, arguments)
            run = call.prepared()
            if run is None:
                return call.run()
            ops.decided.remember(key, run, tensors)
        return run((source, weight, bias), operands, before, after)

    def fake(*arguments: Any) -> Tensor:
        return Call(check, transposed, arguments).empty()

    def autograd(*arguments: Any) -> Tensor:
        tensors = _tensors(arguments)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return Call(check, transposed, arguments).composed(unfused, arguments)
        if plain(*tensors) and not dispatcher_needed():
            return kernel(*arguments)
        return ops.below_autograd(getattr(torch.ops.convt3d, fused).default, *arguments)

    ops._library.impl(fused, kernel, "CompositeExplicitAutograd")
    ops._library.impl(fused, autograd, "Autograd")
    torch.library.register_fake(f"convt3d::{fused}", fake, lib=ops._library)
    formula = ops._transposed_flops if transposed else ops._convolution_flops
    register_flop_formula(getattr(torch.ops.convt3d, fused), get_raw=True)(formula)


_register("conv_transpose3d", True)
_register("conv3d", False)
