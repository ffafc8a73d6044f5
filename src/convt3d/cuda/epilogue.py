"""What the epilogue of a plan's kernels runs beside the bias that they add: steps of a fusion, and
stores into a slice of a larger tensor.

A plan is chosen for its problem alone. :func:`attach` then gives its launches the macros and the
arguments of an :class:`Epilogue` (``kernels/epilogue/fusion.cuh``), as far as :func:`settle` finds
that they take it. What they do not take, PyTorch does after them (:func:`finished`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convt3d.cuda.schedule import MAP_ALIGNMENT, Launch, Problem, Schedule, TensorMap
from convt3d.fusion import KINDS, MAX_STEPS, Fusion
from convt3d.layout import Part, strides

OPERANDS = tuple(f"operand{i}" for i in range(MAX_STEPS))
"""Names of the operands of steps, as launches have them among their arguments."""

_STEPS = {
    "scale": "Scale",
    "shift": "Shift",
    "add": "Add",
    "mul": "Mul",
    "add_scalar": "AddScalar",
    "mul_scalar": "MulScalar",
    "relu": "Relu",
    "leaky_relu": "LeakyRelu",
    "silu": "Silu",
    "gelu": "Gelu",
    "gelu_tanh": "GeluTanh",
    "hardswish": "HardSwish",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "clamp": "Clamp",
    "mish": "Mish",
    "hold": "Hold",
    "add_held": "AddHeld",
    "mul_held": "MulHeld",
}
"""Functors of ``kernels/epilogue/steps.cuh`` by kind."""
_MOST_OPERANDS = MAX_STEPS + 1  # of steps, and a bias
_MOST_SCALARS = 2 * MAX_STEPS

FUSING = frozenset(
    {
        "ampere/gather/kernel.cu",
        "ampere/patch/kernel.cu",
        "ampere/strided/dgrad.cu",
        "ampere/strided/forward.cu",
        "ampere/strided/rows.cu",
        "ampere/strided/slices.cu",
        "col2im/kernel.cu",
        "depthwise/conv.cu",
        "direct/conv.cu",
        "ndhwc/kernel.cu",
        "patch/kernel.cu",
        "phases/kernel.cu",
        "rows/kernel.cu",
        "sweep/kernel.cu",
    }
)
"""Kernel files whose epilogue runs steps and stores into slices."""


@dataclass(frozen=True)
class Epilogue:
    """What follows the sums of a plan.

    Args:
        kinds: steps, by the names of :data:`convt3d.fusion.KINDS`.
        scalars: of all steps.
        wide: of each operand, whether it is float32 in any case; else it has the output's dtype.
        bias: whether the first step adds the bias, for a plan whose problem has none.
        channels: of the tensor that the output is a slice of; 0 where it is a tensor of its own.
    """

    kinds: tuple[str, ...] = ()
    scalars: tuple[float, ...] = ()
    wide: tuple[bool, ...] = ()
    bias: bool = False
    channels: int = 0

    @property
    def empty(self) -> bool:
        """Whether it leaves launches as they are."""
        return not (self.kinds or self.bias or self.channels)

    @property
    def reads_tensors(self) -> bool:
        """Whether a step reads a tensor of the output's shape."""
        return any(KINDS[kind].operand == "tensor" for kind in self.kinds)

    def macros(self, problem: Problem) -> tuple[tuple[str, str], ...]:
        """Macros of the kernel that writes the output."""
        found = []
        if self.kinds or self.bias:
            found.append(("CONVT3D_FUSION", ",".join(self._steps(problem))))
        if self.channels:
            found.append(("CONVT3D_TENSOR_CHANNELS", str(self.channels)))
        return tuple(found)

    def _steps(self, problem: Problem) -> list[str]:
        own = dict(problem.type_macros)["CONVT3D_TYPE"]
        steps, scalar, operand = [], 0, 0
        if self.bias:
            steps.append(f"Bias<0,{own}>")
        for name in self.kinds:
            kind, parameters = KINDS[name], []
            if kind.operand:
                kept = "Float32" if self.wide[operand] else own
                parameters = [str(operand + self.bias), kept]
                operand += 1
            elif kind.scalars:
                parameters = [str(scalar)]
            scalar += kind.scalars
            steps.append(_STEPS[name] + (f"<{','.join(parameters)}>" if parameters else ""))
        return steps

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of the kernel that writes the output, behind all others."""
        if not (self.kinds or self.bias):
            return ()
        names = [*(["bias"] if self.bias else []), *OPERANDS[: len(self.wide)]]
        # Those that no step reads are an operand that there is, or null.
        names += ["bias"] * (_MOST_OPERANDS - len(names))
        scalars = np.zeros(_MOST_SCALARS, np.float32)
        scalars[: len(self.scalars)] = self.scalars
        return (*names, np.void(scalars.tobytes()))


NO_EPILOGUE = Epilogue()
"""Nothing beside the bias that a plan's kernels add."""


def epilogue_of(
    fusion: Fusion | None, operands: Sequence[Tensor], dtype: torch.dtype, channels: int
) -> Epilogue:
    """What kernels are to run: a fusion, and stores into a tensor of so many channels (0: none)."""
    if fusion is None:
        return Epilogue(channels=channels)
    wide = tuple(t.dtype == torch.float32 != dtype for t in operands)
    return Epilogue(fusion.kinds, fusion.scalars, wide, channels=channels)


def settle(schedule: Schedule, problem: Problem, wanted: Epilogue) -> tuple[Epilogue, str]:
    """What the launches of a plan take of an epilogue, and why not all of it, in one sentence."""
    files = {launch.kernel.file for launch in schedule.launches if _writes(launch)}
    others = files - FUSING
    if others:
        return Epilogue(), f"the epilogue of {min(others)} runs no steps and writes no slices"
    if wanted.channels and wanted.reads_tensors:
        # Elements of such a tensor are counted as those of the target, which lie further apart.
        return replace(wanted, channels=0), "a step reads a tensor, and the output is a slice"
    last = problem.forward and problem.target_channels_last
    boxes = any(
        isinstance(a, TensorMap) and a.tensor == "target"
        for launch in schedule.launches
        for a in launch.arguments
    )
    if wanted.channels and last and boxes:
        return replace(wanted, channels=0), "the boxes of its output are whole positions"
    return wanted, ""


def with_bias(epilogue: Epilogue, problem: Problem, planned: Problem) -> Epilogue:
    """The epilogue of a plan: one for ``planned``, which is ``problem`` in its canonical form.

    A gradient by input has plans without a bias alone (see :meth:`Problem.canonical`).
    """
    return replace(epilogue, bias=problem.bias and not planned.bias)


def attach(schedule: Schedule, problem: Problem, epilogue: Epilogue) -> Schedule:
    """The launches of a plan for this problem, with an epilogue that :func:`settle` gave."""
    if epilogue.empty:
        return schedule
    macros = epilogue.macros(problem)
    files = {launch.kernel.file for launch in schedule.launches if _writes(launch)}
    launches = []
    for launch in schedule.launches:
        # A product and its reduction are one program.
        if launch.kernel.file in files:
            kernel = replace(launch.kernel, macros=launch.kernel.macros + macros)
            launch = replace(launch, kernel=kernel)
        if _writes(launch):
            arguments = [_sliced(a, problem, epilogue) for a in launch.arguments]
            launch = replace(launch, arguments=(*arguments, *epilogue.arguments))
        launches.append(launch)
    return replace(
        schedule,
        launches=tuple(launches),
        on_weights={
            layout: attach(one, problem, epilogue) for layout, one in schedule.on_weights.items()
        },
    )


def _writes(launch: Launch) -> bool:
    """Whether a launch writes the output."""
    return any(a == "target" for a in launch.arguments if isinstance(a, str))


def _sliced(argument: Any, problem: Problem, epilogue: Epilogue) -> Any:
    """An argument, of a tensor map of the output with the strides of the whole tensor."""
    if not (epilogue.channels and isinstance(argument, TensorMap) and argument.tensor == "target"):
        return argument
    own = problem.geometry.groups * problem.target_channels
    if problem.target_channels_last:
        # Positions are further apart.
        strides = tuple(s * epilogue.channels // own for s in argument.strides)
    else:
        *inner, sample = argument.strides
        strides = (*inner, sample * epilogue.channels // own)
    return replace(argument, strides=strides)


def slice_channels(size: Sequence[int], strides: Sequence[int], channels_last: bool) -> int | None:
    """Channels of the dense tensor of which a tensor of this size and these strides, in elements,
    is a slice by channels; None if it is none.
    """
    channels, axes = size[1], size[2:]
    # Positions from an element to the next along D, H and W, and along N.
    steps = [math.prod(axes[i:]) for i in (1, 2, 3)]
    batch = (0, math.prod(axes))
    along = [*enumerate(steps, 2), batch] if channels_last else [batch]
    fixed = [(1, 1)] if channels_last else [(1, math.prod(axes)), *enumerate(steps, 2)]
    if any(size[axis] > 1 and strides[axis] != step for axis, step in fixed):
        return None
    found = {strides[axis] / step for axis, step in along if size[axis] > 1} or {channels}
    whole = found.pop()
    return None if found or whole < channels or whole != int(whole) else int(whole)


def check_slice(
    into: Tensor | None, source: Tensor, shape: Sequence[int], channels_last: bool
) -> int:
    """Channels of the tensor that ``into`` is a slice of; 0 where the output is dense.

    Raises:
        RuntimeError: it is none that an output of this shape, in this layout, can be written to.
    """
    if into is None:
        return 0
    if tuple(into.shape) != tuple(shape) or into.dtype != source.dtype:
        raise RuntimeError(
            f"expected a {source.dtype} tensor of size {list(shape)} to write to, but got "
            f"{into.dtype} of {list(into.shape)}"
        )
    if into.device != source.device:
        raise RuntimeError(
            f"expected a tensor to write to on {source.device}, but it is on {into.device}"
        )
    channels = slice_channels(into.shape, into.stride(), channels_last)
    if channels is None:
        layout = "channels_last_3d" if channels_last else "contiguous"
        raise RuntimeError(
            f"expected channels of a dense {layout} tensor to write to, but got strides "
            f"{into.stride()} of size {list(into.shape)}"
        )
    return 0 if channels == shape[1] else channels


def part_channels(
    part: Part | None, size: Sequence[int], dtype: torch.dtype, channels_last: bool
) -> int | None:
    """What :func:`check_slice` says of a part of a new tensor; None where it is not aligned.

    ``size`` and ``dtype`` are those of the part. New tensors start aligned.
    """
    if part is None:
        return 0
    stride = strides((size[0], part.channels, *size[2:]), channels_last)
    channels = slice_channels(size, stride, channels_last)
    assert channels is not None
    channels = 0 if channels == size[1] else channels
    address = part.first * stride[1] * dtype.itemsize
    return channels if _aligned(address, size, dtype, channels, channels_last) else None


def starts_aligned(into: Tensor, channels: int, channels_last: bool) -> bool:
    """Whether a slice of so many channels' tensor lies in memory as kernels need their output."""
    return _aligned(into.data_ptr(), into.shape, into.dtype, channels, channels_last)


def _aligned(
    address: int, size: Sequence[int], dtype: torch.dtype, channels: int, channels_last: bool
) -> bool:
    """Whether a slice does that begins at an address.

    Vector stores and tensor maps need every sample, of channels_last slices every position, to
    begin at a multiple of 16 bytes where the first one does.
    """
    step = channels * dtype.itemsize
    if not channels_last:
        step *= math.prod(size[2:])
    return address % MAP_ALIGNMENT == 0 and step % MAP_ALIGNMENT == 0


def finished(
    output: Tensor, fusion: Fusion | None, operands: Sequence[Tensor], into: Tensor | None
) -> Tensor:
    """An output after the steps of a fusion, in ``into`` if that is given, by PyTorch."""
    if fusion is not None:
        output = fusion.apply(output, operands)
    return output if into is None or into is output else into.copy_(output)
