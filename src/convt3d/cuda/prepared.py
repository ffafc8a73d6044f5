"""Operations at one shape with all decided: what is left is to allocate the result and launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from convt3d import native
from convt3d.cuda.launch import Call, allocate, bind_plan
from convt3d.cuda.operation import Operation
from convt3d.cuda.schedule import Plan
from convt3d.layout import laid_out


class Prepared:
    """One operation at one shape, all decided: it allocates the result and launches.

    ``epilogue`` is what its kernels run beside a bias of their own; ``adds_bias``: whether they add
    that of a result.
    """

    __slots__ = ("_call", "_dtype", "_size", "_stride", "adds_bias", "epilogue")

    def __init__(
        self, call: Call, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> None:
        self._call, self._size, self._stride, self._dtype = call, size, stride, dtype
        self.epilogue = call.epilogue
        self.adds_bias = call.problem.bias or call.epilogue.bias

    def output(self, source: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """``backend.forward`` or ``grad_input``, on a dense source and b of the current device."""
        target = allocate(self._size, self._stride, self._dtype)
        self._call.run(source, w, target, b)
        if b is not None and not self.adds_bias:
            target.add_(b.view(-1, 1, 1, 1))
        return target

    def fused(
        self,
        source: Tensor,
        w: Tensor,
        b: Tensor | None,
        operands: Sequence[Tensor],
        into: Tensor | None,
    ) -> Tensor:
        """Forward, or the gradient by input, with the epilogue, whose steps read ``operands``.

        ``into`` is written and returned, if given; else a tensor is allocated.
        """
        target = allocate(self._size, self._stride, self._dtype) if into is None else into
        self._call.run(source, w, target, b, operands)
        if b is not None and not self.adds_bias:
            target.add_(b.view(-1, 1, 1, 1))
        return target

    def grad_weight(self, x: Tensor, gy: Tensor) -> Tensor:
        """As ``backend.grad_weight``, on dense tensors; their device is the current one."""
        gw = allocate(self._size, self._stride, self._dtype)
        self._call.run(x, gw, gy, None)
        return gw

    def grad_weight_bias(self, x: Tensor, gy: Tensor) -> tuple[Tensor, Tensor]:
        """As ``backend.grad_weight_bias``, on dense tensors; their device is the current one."""
        if not self._call.sums_bias:
            return self.grad_weight(x, gy), native.grad_bias(gy)
        gw = allocate(self._size, self._stride, self._dtype)
        gb = allocate((gy.shape[1],), (1,), self._dtype)
        self._call.run(x, gw, gy, gb)
        return gw, gb


class Left:
    """The same where PyTorch's operator runs: it is faster, or NVRTC refused a kernel."""

    PYTORCH = True  # see backends.by_pytorch
    __slots__ = ("_operation",)

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def output(self, source: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        o = self._operation
        g, last = o.geometry, o.result_channels_last
        if o.name == "forward":
            return laid_out(native.forward(source, w, b, g, last), last)
        return laid_out(native.grad_input(source, w, g, o.input_size, last, b), last)

    def grad_weight(self, x: Tensor, gy: Tensor) -> Tensor:
        g, last = self._operation.geometry, self._operation.result_channels_last
        # Most layers that come here are Conv3d: theirs is what PyTorch would run of those. Of a
        # transposed layer cuDNN does the same unless it has one output channel.
        as_convolution = all(e < s for e, s in zip(g.output_padding, g.stride, strict=True))
        run = native.convolution_grad_weight if as_convolution else native.grad_weight
        return laid_out(run(x, gy, g, last), last)

    def grad_weight_bias(self, x: Tensor, gy: Tensor) -> tuple[Tensor, Tensor]:
        return self.grad_weight(x, gy), native.grad_bias(gy)


def prepared_by(plan: Plan, operation: Operation) -> Prepared:
    """What runs an operation by a plan that is its own or that of its canonical form.

    Its epilogue is what its kernels take of the operation's; what they do not is logged.

    Raises:
        CompilationError: a kernel could not be compiled; names the geometry.
        RuntimeError: it could not be loaded; names the geometry.
    """
    size, stride = operation.result_size, operation.result_strides
    return Prepared(bind_plan(plan, operation), size, stride, operation.dtype)
