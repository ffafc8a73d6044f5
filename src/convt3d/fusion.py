"""Element-wise operations that follow a convolution and run in the epilogue of its kernel.

A :class:`Fusion` is a chain of steps on the value of one output, bias already added, in float32
registers; the result is rounded to the dtype of the output once. Two kinds of step read a value by
channel, two read a tensor of the output's shape. Two read a value of the chain itself that is held:
the output as it comes, or what "hold" put in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_STEPS = 4
"""Steps of one fusion."""


@dataclass(frozen=True)
class Kind:
    """A kind of step.

    Args:
        run: the step on a float32 tensor, its operand (None where it has none) and its scalars.
        scalars: how many it takes.
        operand: "channel" for one of shape (C,), "tensor" for one of the output's shape, or "".
        held: "reads" if ``run`` takes the held value as its operand, "sets" if its result is held
            from then on, or "".
    """

    run: Callable[..., Tensor]
    scalars: int = 0
    operand: str = ""
    held: str = ""


def _by_channel(operand: Tensor) -> Tensor:
    return operand.view(-1, 1, 1, 1)


KINDS: dict[str, Kind] = {
    "scale": Kind(lambda x, v: x * _by_channel(v), operand="channel"),
    "shift": Kind(lambda x, v: x + _by_channel(v), operand="channel"),
    "add": Kind(lambda x, v: x + v, operand="tensor"),
    "mul": Kind(lambda x, v: x * v, operand="tensor"),
    "add_scalar": Kind(lambda x, _, a: x + a, scalars=1),
    "mul_scalar": Kind(lambda x, _, a: x * a, scalars=1),
    "relu": Kind(lambda x, _: F.relu(x)),
    "leaky_relu": Kind(lambda x, _, slope: F.leaky_relu(x, slope), scalars=1),
    "silu": Kind(lambda x, _: F.silu(x)),
    "gelu": Kind(lambda x, _: F.gelu(x)),
    "gelu_tanh": Kind(lambda x, _: F.gelu(x, approximate="tanh")),
    "hardswish": Kind(lambda x, _: F.hardswish(x)),
    "sigmoid": Kind(lambda x, _: torch.sigmoid(x)),
    "tanh": Kind(lambda x, _: torch.tanh(x)),
    "clamp": Kind(lambda x, _, low, high: torch.clamp(x, low, high), scalars=2),
    "mish": Kind(lambda x, _: F.mish(x)),
    "hold": Kind(lambda x, _: x, held="sets"),
    "add_held": Kind(lambda x, v: x + v, held="reads"),
    "mul_held": Kind(lambda x, v: x * v, held="reads"),
}
"""Every kind of step by its name. NaN passes through all of them, as it does in PyTorch."""


@dataclass(frozen=True)
class Step:
    """One step: its kind, by name, and its scalars.

    Raises:
        ValueError: no such kind, or another number of scalars than it takes.
    """

    kind: str
    scalars: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind} is none of {', '.join(KINDS)}")
        if len(self.scalars) != KINDS[self.kind].scalars:
            raise ValueError(
                f"{self.kind} takes {KINDS[self.kind].scalars} scalars, not {len(self.scalars)}"
            )

    @property
    def operand(self) -> str:
        """ "channel", "tensor" or "": what it reads beside the value."""
        return KINDS[self.kind].operand


@dataclass(frozen=True)
class Fusion:
    """A chain of up to :data:`MAX_STEPS` steps.

    Operands and scalars come in the order of the steps that take them.

    Raises:
        ValueError: no step, or too many.
    """

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.steps) <= MAX_STEPS:
            raise ValueError(f"1 to {MAX_STEPS} steps, not {len(self.steps)}")

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its steps: what a kernel is compiled for."""
        return tuple(step.kind for step in self.steps)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """ "channel" or "tensor" for each operand."""
        return tuple(step.operand for step in self.steps if step.operand)

    @functools.cached_property
    def scalars(self) -> tuple[float, ...]:
        """The scalars of all steps."""
        return tuple(value for step in self.steps for value in step.scalars)

    def apply(self, output: Tensor, operands: Sequence[Tensor]) -> Tensor:
        """The chain in PyTorch's operators, in float32 (float64 stays), rounded once.

        Args:
            output: (N, C, D, H, W), bias added.
            operands: (C,) or of the output's shape, one for each of :attr:`operands`.

        Returns:
            A tensor of the output's shape and dtype.
        """
        wide = torch.float64 if output.dtype == torch.float64 else torch.float32
        value, left = output.to(wide), list(operands)
        held = value
        for step in self.steps:
            kind = KINDS[step.kind]
            operand = held if kind.held == "reads" else None
            if kind.operand:
                operand = left.pop(0).to(wide)
            value = kind.run(value, operand, *step.scalars)
            held = value if kind.held == "sets" else held
        return value.to(output.dtype)


def fusion_of(kinds: Sequence[str], scalars: Sequence[float]) -> Fusion:
    """The fusion of these kinds, their scalars in one sequence.

    Raises:
        ValueError: a kind that there is not, or scalars too few or too many.
    """
    left = list(scalars)
    steps = []
    for kind in kinds:
        n = KINDS[kind].scalars if kind in KINDS else 0
        steps.append(Step(kind, tuple(left[:n])))
        del left[:n]
    if left:
        raise ValueError(f"{len(left)} scalars too many for {', '.join(kinds)}")
    return Fusion(tuple(steps))


def check_operands(
    fusion: Fusion | None, operands: Sequence[Tensor], source: Tensor, size: Sequence[int]
) -> None:
    """Check the operands of a fusion, of an output of this size (N, C, D, H, W).

    By sizes, dtypes and devices alone, so that fake tensors and SymInts pass.

    Args:
        source: what is convolved: the output has its dtype and device.

    Raises:
        RuntimeError: too many or too few, or one of another size, dtype or device.
    """
    kinds = () if fusion is None else fusion.operands
    if len(operands) != len(kinds):
        raise RuntimeError(f"expected {len(kinds)} operands of a fusion, but got {len(operands)}")
    for number, (operand, kind) in enumerate(zip(operands, kinds, strict=True)):
        misfit = f"operand {number} of a fusion does not fit: expected an operand"
        expected = list(size) if kind == "tensor" else [size[1]]
        if list(operand.shape) != expected:
            raise RuntimeError(f"{misfit} of size {expected}, but got {list(operand.shape)}")
        dtypes = {source.dtype} if kind == "tensor" else {torch.float32, source.dtype}
        if operand.dtype not in dtypes:
            wanted = " or ".join(map(str, sorted(dtypes, key=lambda d: d != torch.float32)))
            raise RuntimeError(f"{misfit} of dtype {wanted}, but got {operand.dtype}")
        if operand.device != source.device:
            raise RuntimeError(f"{misfit} on {source.device}, but it is on {operand.device}")
