"""One operation on tensors of one kind: what a call is prepared for, and what it launches.

No memory and no driver: calls name it for their tensors, ``ahead.py`` for those to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from convt3d import precision
from convt3d.cuda import cudnn
from convt3d.cuda.epilogue import NO_EPILOGUE, Epilogue, attach, settle, with_bias
from convt3d.cuda.plan import plan_problem, refusal
from convt3d.cuda.schedule import Gpu, Launch, Plan, Problem, Schedule, flipped
from convt3d.geometry import Geometry
from convt3d.layout import beyond_32_bits, reads_channels_last, strides


@dataclass(frozen=True)
class Launches:
    """What a call launches.

    ``weight_strides`` and ``weight_offset``, both in elements, describe the weight as the kernels
    see it. They run ``epilogue`` of what was wanted; ``left`` says why not all of it.
    """

    schedule: Schedule
    weight_strides: tuple[int, ...]
    weight_offset: int
    epilogue: Epilogue
    left: str


class Operation(NamedTuple):
    """One operation on tensors of one kind; a tuple, since calls look it up.

    Args:
        name: ``"forward"``, ``"grad_input"`` or ``"grad_weight"``.
        geometry: the layer.
        batch: number of samples.
        input_size: spatial size (D, H, W) of the layer's input.
        dtype: of all tensors.
        arithmetic: of the products.
        layouts: whether source and target (see ``schedule.Problem``) are read as channels_last.
        weight_strides: of the weight, or of the gradient by it, in elements.
        bias: whether the result has one added, or the gradient by weight comes with that by bias.
        device: index of the CUDA device; None on others.
        epilogue: what is to follow the sums, as far as kernels do it.
    """

    name: str
    geometry: Geometry
    batch: int
    input_size: tuple[int, ...]
    dtype: torch.dtype
    arithmetic: precision.Arithmetic
    layouts: tuple[bool, bool]
    weight_strides: tuple[int, ...]
    bias: bool = False
    device: int | None = None
    epilogue: Epilogue = NO_EPILOGUE

    @classmethod
    def forward(
        cls, x: Tensor, w: Tensor, bias: bool, geometry: Geometry, channels_last: bool
    ) -> Operation:
        """What ``backends.forward`` is for these tensors; they may be fake."""
        return cls.output("forward", x, w, bias, geometry, x.shape[2:], channels_last)

    @classmethod
    def output(
        cls,
        name: str,
        source: Tensor,
        w: Tensor,
        bias: bool,
        geometry: Geometry,
        input_size: Sequence[int],
        channels_last: bool,
    ) -> Operation:
        """What ``backends.forward`` or ``grad_input``, by its name, is for these tensors."""
        layouts = (reads_channels_last(source), channels_last)
        return cls._on(name, geometry, source, input_size, layouts, w.stride(), bias)

    @classmethod
    def grad_weight(
        cls, x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool, bias: bool
    ) -> Operation:
        """What ``backends.grad_weight`` is for these tensors, or ``grad_weight_bias``."""
        layouts = (reads_channels_last(x), reads_channels_last(gy))
        stride = strides(geometry.weight_size, channels_last)
        return cls._on("grad_weight", geometry, x, x.shape[2:], layouts, stride, bias)

    @classmethod
    def _on(
        cls,
        name: str,
        geometry: Geometry,
        source: Tensor,
        input_size: Sequence[int],
        layouts: tuple[bool, bool],
        weight_strides: Sequence[int],
        bias: bool,
    ) -> Operation:
        device = source.device
        return cls(
            name,
            geometry,
            source.shape[0],
            tuple(input_size),
            source.dtype,
            precision.arithmetic_for(source.dtype, geometry, name, layouts[1]),
            layouts,
            tuple(weight_strides),
            bias,
            device.index if device.type == "cuda" else None,
        )

    @classmethod
    def of(
        cls, problem: Problem, batch: int, input_size: Sequence[int], weight: Tensor
    ) -> Operation:
        """A problem at these extents, with a weight, or a gradient by it, like this one."""
        return cls(
            problem.operation,
            problem.geometry,
            batch,
            tuple(input_size),
            weight.dtype,
            problem.arithmetic,
            (problem.source_channels_last, problem.target_channels_last),
            weight.stride(),
            problem.bias,
            weight.device.index,
        )

    @property
    def problem(self) -> Problem:
        """What plans are made for."""
        return Problem(self.name, self.geometry, self.arithmetic, *self.layouts, self.bias)

    @property
    def label(self) -> str:
        """The operation in words, for messages."""
        return f"{self.name} of {self.geometry.label} for input size {self.input_size}"

    @property
    def result_size(self) -> tuple[int, ...]:
        """Of the output, or of the gradient."""
        g = self.geometry
        if self.name == "grad_weight":
            return g.weight_size
        if self.name == "grad_input":
            return (self.batch, g.in_channels, *self.input_size)
        return (self.batch, g.out_channels, *g.output_size(self.input_size))

    @property
    def result_strides(self) -> tuple[int, ...]:
        """In elements, of the result as a tensor of its own."""
        if self.name == "grad_weight":
            return self.weight_strides
        return strides(self.result_size, self.layouts[1])

    @property
    def result_channels_last(self) -> bool:
        """Whether the result is channels_last_3d."""
        if self.name == "grad_weight":
            return self.weight_strides == strides(self.result_size, True)
        return self.layouts[1]

    @property
    def beyond_32_bits(self) -> bool:
        """Whether a channel has more elements than kernels count."""
        return beyond_32_bits(self.input_size, self.geometry.output_size(self.input_size))

    def refusal(self, gpu: Gpu) -> str | None:
        """Why PyTorch's operator runs on this GPU, in one sentence; None if our kernels do."""
        if self.beyond_32_bits:
            return "a channel has 2^31 elements or more, and is left to PyTorch"
        reason = refusal(self.name, self.geometry, self.dtype, gpu.capability)
        return reason or cudnn.reason(self.problem, self.batch, self.input_size, gpu)

    def plan(self, gpu: Gpu) -> Plan:
        """What runs it: its own plan, or that of the canonical form of its problem."""
        return plan_problem(self.problem, self.batch, self.input_size, gpu)

    def launched_by(self, plan: Plan) -> Launches:
        """What a call launches by such a plan. Raises as ``Plan.schedule``."""
        problem, input_size = self.problem, self.input_size
        weight_strides, offset = self.weight_strides, 0
        if plan.problem.operation != self.name:
            _, input_size = problem.canonical(input_size)
            weight_strides, offset = flipped(self.geometry.weight_size, weight_strides)
        planned = plan.schedule(self.batch, input_size)
        layout = planned.layout_of(plan.problem.geometry.weight_size, weight_strides)
        schedule = planned if layout is None else planned.on_weights[layout]
        if layout is not None and layout.flipped:
            offset = 0  # it reads the weight as it lies in memory
        epilogue, left = with_bias(self.epilogue, problem, plan.problem), ""
        if not epilogue.empty:
            epilogue, left = settle(schedule, plan.problem, epilogue)
        schedule = attach(schedule, plan.problem, epilogue)
        return Launches(schedule, weight_strides, offset, epilogue, left)

    def launches(self, gpu: Gpu) -> tuple[Launch, ...]:
        """What a call launches on a GPU: plans it, and remembers the plan."""
        return tuple(one.on(gpu) for one in self.launched_by(self.plan(gpu)).schedule.launches)
