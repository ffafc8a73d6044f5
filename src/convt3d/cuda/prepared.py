"""Operations at one shape with all decided: what is left is to allocate the result and launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from convt3d import native
from convt3d.cuda.launch import Call, allocate, bind_plan
from convt3d.cuda.operation import Operation
from convt3d.cuda.schedule import Plan
from convt3d.geometry import Geometry
from convt3d.layout import laid_out


class Prepared:
    """One operation at one shape, all decided: it allocates the result and launches.

    ``epilogue`` is what its kernels run beside a bias of their own.
    """

    __slots__ = ("_call", "_dtype", "_size", "_stride", "epilogue")

    def __init__(
        self, call: Call, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> None:
        self._call, self._size, self._stride, self._dtype = call, size, stride, dtype
        self.epilogue = call.epilogue

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """As ``backend.forward``, on a dense x and b; their device is the current one."""
        y = allocate(self._size, self._stride, self._dtype)
        self._call.run(x, w, y, b)
        return y

    def grad_input(self, gy: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """As ``backend.grad_input``, on a dense gy and b; their device is the current one."""
        return self.fused(gy, w, b, (), None)

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

    @property
    def adds_bias(self) -> bool:
        """Whether its kernels add the bias of a result."""
        return self._call.problem.bias or self.epilogue.bias

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
    """The same where PyTorch's operator is faster: the members of :class:`Prepared`."""

    __slots__ = ("_channels_last", "_geometry", "_input_size")

    def __init__(self, geometry: Geometry, input_size: Sequence[int], channels_last: bool) -> None:
        self._geometry, self._input_size = geometry, input_size
        self._channels_last = channels_last

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        y = native.forward(x, w, b, self._geometry, self._channels_last)
        return laid_out(y, self._channels_last)

    def grad_input(self, gy: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        last = self._channels_last
        gx = native.grad_input(gy, w, self._geometry, self._input_size, last, b)
        return laid_out(gx, last)

    def grad_weight(self, x: Tensor, gy: Tensor) -> Tensor:
        g, last = self._geometry, self._channels_last
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
        RuntimeError: a kernel could not be compiled or loaded; names the geometry.
    """
    size, stride = operation.result_size, operation.result_strides
    return Prepared(bind_plan(plan, operation), size, stride, operation.dtype)
