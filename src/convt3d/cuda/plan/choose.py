"""Chooses the plan of a problem: tuned, else timed before, else the first of ``families``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from convt3d.cuda import choices, winners
from convt3d.cuda.plan import table
from convt3d.cuda.plan.families import ranked_plans
from convt3d.cuda.plan.search import with_problem
from convt3d.cuda.schedule import Gpu, Plan, Problem
from convt3d.cuda.workers import Turns
from convt3d.geometry import Geometry
from convt3d.precision import KERNEL_DTYPES, Arithmetic, arithmetic_for

_MINIMUM_CAPABILITY = (8, 0)
# Planners and kernels list the phases of an axis, and count the reach of its taps in 32 bits.
_LARGEST_PARAMETERS = {"stride": 256, "padding": 1 << 16, "dilation": 1 << 16}


def refusal(
    operation: str, geometry: Geometry, dtype: torch.dtype, capability: tuple[int, int]
) -> str | None:
    """Why our kernels do not run an operation at all, or None; independent of extents."""
    if dtype not in KERNEL_DTYPES:
        return f"dtype {dtype} is left to PyTorch; kernels exist for float32, float16 and bfloat16"
    if capability < _MINIMUM_CAPABILITY:
        major, minor = capability
        return f"compute capability {major}.{minor} is below 8.0, the first one supported"
    for name, most in _LARGEST_PARAMETERS.items():
        largest = max(getattr(geometry, name))
        if largest > most:
            return f"a {name} of {largest} is left to PyTorch; kernels exist for at most {most}"
    return None


def problem_for(
    operation: str,
    geometry: Geometry,
    dtype: torch.dtype,
    channels_last: bool | tuple[bool, bool] = False,
    *,
    bias: bool = False,
    arithmetic: Arithmetic | None = None,
) -> Problem:
    """One operation on tensors of one layout; the arguments are those of :func:`plan_for`."""
    source, target = (
        channels_last if isinstance(channels_last, tuple) else (channels_last, channels_last)
    )
    arithmetic = arithmetic or arithmetic_for(dtype, geometry, operation, target)
    problem = Problem(operation, geometry, arithmetic, source, target, bias)
    if isinstance(channels_last, tuple):
        return problem
    # What is read and has one channel is dense in both layouts, and read as NCDHW.
    groups, read = geometry.groups, operation == "grad_weight"
    source = source and problem.source_channels * groups > 1
    target = target and (not read or problem.target_channels * groups > 1)
    return replace(problem, source_channels_last=source, target_channels_last=target)


def plan_for(
    operation: str,
    geometry: Geometry,
    input_size: Sequence[int],
    batch: int,
    dtype: torch.dtype,
    channels_last: bool | tuple[bool, bool] = False,
    *,
    bias: bool = False,
    arithmetic: Arithmetic | None = None,
    gpu: Gpu | None = None,
    canonical: bool = True,
) -> Plan:
    """The plan of one operation on tensors of one layout.

    Args:
        operation: ``"forward"``, ``"grad_input"`` or ``"grad_weight"``.
        geometry: the layer.
        input_size: spatial size (D, H, W) of the layer's input.
        batch: number of samples.
        dtype: float32, float16 or bfloat16.
        channels_last: layout of both activations, of which one that is read and has one channel
            counts as NCDHW; or of (source, target) as Problem defines them.
        bias: whether the result has one added, or a gradient by weight comes with that by bias.
        arithmetic: overrides what PyTorch's switches ask for.
        gpu: whose properties to plan for; an H200 if absent.
        canonical: False asks for a plan of this very operation (see :meth:`Problem.canonical`).
    """
    problem = problem_for(
        operation, geometry, dtype, channels_last, bias=bias, arithmetic=arithmetic
    )
    plan = plan_problem if canonical else plan_as_given
    return plan(problem, batch, tuple(input_size), gpu or Gpu())


def plan_problem(problem: Problem, batch: int, input_size: tuple[int, ...], gpu: Gpu) -> Plan:
    """The plan of a problem's canonical form for these extents.

    It is what tuning found for them, else the winner among all that ran where they were timed, else
    the best by the cost models. Where its ``problem`` is another
    operation than ``problem``, it runs on the weight that :func:`~convt3d.cuda.schedule.flipped`
    describes.
    """
    canonical, size = problem.canonical(input_size)
    return plan_as_given(canonical, batch, size, gpu)


def plan_as_given(problem: Problem, batch: int, input_size: tuple[int, ...], gpu: Gpu) -> Plan:
    """The same for a problem as it is."""
    return decide(problem, batch, input_size, gpu)[0]


def decide(problem: Problem, batch: int, input_size: tuple[int, ...], gpu: Gpu) -> tuple[Plan, str]:
    """:func:`plan_as_given`, and in a few words what decided."""
    tuned = winners.recall(problem, batch, input_size, gpu)
    if tuned is None:
        tuned = _tuned_alike(problem, batch, input_size, gpu)
    if tuned is not None:
        return tuned, "the fastest when candidates were timed on this GPU"
    winner = table.recall(problem, batch, input_size, gpu)
    if winner is not None:
        return winner.plan, str(winner)
    key = (problem, batch, tuple(input_size), gpu)
    with _turns.of(key):  # a thread that asks for what another one plans waits for it
        return _plan(*key), MODELS


def _tuned_alike(
    problem: Problem, batch: int, input_size: tuple[int, ...], gpu: Gpu
) -> Plan | None:
    """The winner of a problem that is :attr:`~Problem.alike`, if that plan takes this one."""
    for other in problem.alike:
        known = winners.recall(other, batch, input_size, gpu)
        if known is None:
            continue
        plan = with_problem(known, problem)
        try:
            plan.schedule(batch, input_size)
        except ValueError:
            continue
        return plan
    return None


MODELS = "the cost models"
"""What :func:`decide` names where nothing was timed."""
_turns = Turns()


@functools.lru_cache(maxsize=4096)
def _plan(problem: Problem, batch: int, input_size: tuple[int, ...], gpu: Gpu) -> Plan:
    key = (problem, batch, input_size, gpu)
    chosen = choices.recall(*key)
    if chosen is None:
        chosen = ranked_plans(*key, first_only=True)[0]
        choices.remember(*key, chosen)
    return chosen
