"""How many blocks to launch and what to hand to a kernel, as formulas of the extents, checked.

Plans are *pinned* to one tile shape first (``pinned.py``), and their family tells the formulas
(``families.py``). Every export evaluates these for many extents and compares them with the pinned
plan's own numbers, so a formula that has fallen behind its plan cannot reach a file.

A family without formulas (those whose tensor maps and staging follow the extents) can still serve
the problem's own extents: its *sized* call holds the schedule's numbers as they are, and stands
before a call that serves all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convt3d.cuda.epilogue import Epilogue, attach
from convt3d.cuda.schedule import Gpu, Plan, Schedule, TensorMap
from convt3d.export.families import FAMILIES
from convt3d.export.formulas import TENSORS, HostCall, HostLaunch, literal, samples
from convt3d.export.pinned import pin


def portable(gpu: Gpu) -> Gpu:
    """A GPU of this size with sm_80's features: its kernels run on all that are supported."""
    return replace(gpu, capability=(8, 0))


def has_formulas(plan: Plan) -> bool:
    """Whether a plan's family has formulas, so that a file can serve all extents with it."""
    return isinstance(plan, tuple(FAMILIES))


def host_call(plan: Plan, batch: int, input_size: Sequence[int]) -> HostCall:
    """The formulas of a plan with the tile that it picks for these extents, checked.

    Raises:
        NotImplementedError: a plan of another family, or one whose numbers are not these.
    """
    family = next((f for f in FAMILIES if isinstance(plan, f)), None)
    if family is None:
        raise NotImplementedError(f"{type(plan).__name__} has no formulas in export/families.py")
    pinned = pin(plan, batch, input_size)
    call = FAMILIES[family](pinned)
    _same(call, batch, input_size, plan)
    for some_batch, some_size in samples(plan.problem.geometry, 64):
        _same(call, some_batch, some_size, pinned)
    return call


def sized_call(plan: Plan, batch: int, input_size: Sequence[int]) -> HostCall:
    """The launches of any plan at these extents alone, checked."""
    schedule = plain(plan.schedule(batch, input_size))
    maps = {a for n in schedule.launches for a in n.arguments if isinstance(a, TensorMap)}
    mapped = {m.tensor for m in maps}
    call = HostCall(
        plan,
        (),
        tuple((name, str(size)) for name, size in schedule.workspaces.items()),
        tuple(
            HostLaunch(
                launch.kernel,
                str(launch.grid),
                launch.block,
                str(launch.shared_bytes),
                tuple(str(a) if isinstance(a, int) else a for a in launch.arguments),
                launch.dependent,
            )
            for launch in schedule.launches
        ),
        (batch, *input_size),
        tuple(name for name in TENSORS if name in mapped or name in schedule.aligned),
    )
    _same(call, batch, input_size, plan)
    return call


def fused_call(
    call: HostCall, batch: int, input_size: Sequence[int], epilogue: Epilogue
) -> HostCall:
    """A sized call with an epilogue that :func:`~convt3d.cuda.epilogue.settle` gave."""
    plan = call.plan
    schedule = attach(plan.schedule(batch, input_size), plan.problem, epilogue)
    launches = []
    for host, launch in zip(call.launches, schedule.launches, strict=True):
        added = launch.arguments[len(host.arguments) :]
        texts = tuple(a if isinstance(a, str) else _scalars(a) for a in added)
        # Kernels of one file share their macros.
        kernel = replace(host.kernel, macros=host.kernel.macros + epilogue.macros(plan.problem))
        launches.append(replace(host, kernel=kernel, arguments=(*host.arguments, *texts)))
    return replace(call, launches=tuple(launches))


def _scalars(packed: np.void) -> str:
    """Scalars of steps, which a kernel takes as one structure."""
    values = np.frombuffer(packed.tobytes(), np.float32)
    return f"Scalars{{{{{', '.join(map(literal, values))}}}}}"


def _same(call: HostCall, batch: int, input_size: Sequence[int], plan: Plan) -> None:
    """Compare the formulas with a plan's schedule.

    Raises:
        NotImplementedError: they differ; names the plan, the extents and both schedules.
    """
    got, want = call.evaluate(batch, input_size), plain(plan.schedule(batch, input_size))
    if (got.launches, got.workspaces) != (want.launches, want.workspaces):
        raise NotImplementedError(
            f"the formulas of {type(plan).__name__} in export/families.py have fallen behind its "
            f"schedule: for batch {batch} and input size {tuple(input_size)} they give {got}, "
            f"the plan gives {want}"
        )


def plain(schedule: Schedule) -> Schedule:
    """The schedule with numpy scalars as ints; only kinds that the launcher can hand over."""

    def number(argument: Any) -> Any:
        if isinstance(argument, (str, TensorMap)):
            return argument
        if not isinstance(argument, (np.int32, np.int64)):
            raise NotImplementedError(f"a kernel argument of type {type(argument).__name__}")
        return int(argument)

    launches = tuple(
        replace(launch, arguments=tuple(map(number, launch.arguments)))
        for launch in schedule.launches
    )
    return Schedule(launches, dict(schedule.workspaces), schedule.aligned)
