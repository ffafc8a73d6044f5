"""How many blocks to launch and what to hand to a kernel, as formulas of the extents.

A plan's ``schedule`` gives these numbers for one batch and one input size. An exported file must
work for all of them, so its launcher evaluates formulas. A formula is text that C++ and Python read
alike: integers, names, ``+``, ``-``, ``*``, ``div_up(a, b)``, ``min(a, b)``, ``max(a, b)``. The
names are the extents
(``batch, in_d, in_h, in_w, out_d, out_h, out_w``) and the numbers defined before.

The package picks a tile shape for the extents of each call by a cost model. A file has one shape,
the best for its problem's extents: right for all others, though not always the fastest there. So
plans are *pinned* to that shape first.

Every export evaluates its formulas for many extents and compares them with the pinned plan's own
numbers, so a formula that has fallen behind its plan cannot reach a file.

A family without formulas (those whose tensor maps and staging follow the extents) can still serve
the problem's own extents: its *sized* call holds the schedule's numbers as they are, and stands
before a call that serves all.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.ampere_gather import GatherPlan
from convt3d.cuda.plan.ampere_patch import REDUCE_ELEMENTS, REDUCE_GRID, PatchPlan
from convt3d.cuda.plan.ampere_strided import Shape, StridedPlan
from convt3d.cuda.plan.ampere_wgrad import WgradPlan
from convt3d.cuda.plan.depthwise import DepthwisePlan, DepthwiseWgradPlan
from convt3d.cuda.plan.direct import DirectPlan, DirectWgradPlan
from convt3d.cuda.plan.sweep import WgmmaSweepPlan
from convt3d.cuda.schedule import (
    WEIGHT_STRIDES,
    Gpu,
    Launch,
    Plan,
    Schedule,
    TensorMap,
    div_up,
)
from convt3d.geometry import Geometry, Triple

EXTENTS = ("batch", "in_d", "in_h", "in_w", "out_d", "out_h", "out_w")
TENSORS = ("source", "weight", "bias", "target")

_FORMULA = re.compile(r"(?:[a-z_0-9]+|[-+*(), ])+")


def portable(gpu: Gpu) -> Gpu:
    """A GPU of this size with sm_80's features: its kernels run on all that are supported."""
    return replace(gpu, capability=(8, 0))


def has_formulas(plan: Plan) -> bool:
    """Whether a plan's family has formulas, so that a file can serve all extents with it."""
    return isinstance(plan, tuple(_FAMILIES))


@dataclass(frozen=True)
class HostLaunch:
    """One launch: grid and shared memory are formulas, arguments formulas or names of pointers.

    Tensor maps occur in sized calls alone. ``dependent`` is that of a schedule's launch.
    """

    kernel: KernelSpec
    grid: str
    block: int
    shared_bytes: str
    arguments: tuple[str | TensorMap, ...]
    dependent: bool


@dataclass(frozen=True)
class HostCall:
    """Formulas of all launches of one operation.

    ``numbers`` are defined in order; ``workspaces`` are sizes in bytes by name. ``only`` is set in
    sized calls: (batch, in_d, in_h, in_w), and the tensors in ``aligned`` must then start at a
    multiple of 16 bytes.
    """

    plan: Plan
    numbers: tuple[tuple[str, str], ...]
    workspaces: tuple[tuple[str, str], ...]
    launches: tuple[HostLaunch, ...]
    only: tuple[int, ...] = ()
    aligned: tuple[str, ...] = ()

    def evaluate(self, batch: int, input_size: Sequence[int]) -> Schedule:
        """The schedule that the formulas give; arguments that are numbers become plain ints.

        Raises:
            ValueError: extents that a sized call does not serve.
        """
        if self.only and self.only != (batch, *input_size):
            raise ValueError(f"a call for {self.only} does not serve {(batch, *input_size)}")
        output_size = self.plan.problem.geometry.output_size(input_size)
        extents = (batch, *input_size, *output_size)
        values = dict(zip(EXTENTS, extents, strict=True))
        for name, formula in self.numbers:
            values[name] = evaluate(formula, values)
        pointers = {*TENSORS, *WEIGHT_STRIDES, *(name for name, _ in self.workspaces)}

        def value(argument: str | TensorMap) -> Any:
            if isinstance(argument, TensorMap) or argument in pointers:
                return argument
            return evaluate(argument, values)

        return Schedule(
            tuple(
                Launch(
                    launch.kernel,
                    evaluate(launch.grid, values),
                    launch.block,
                    evaluate(launch.shared_bytes, values),
                    tuple(map(value, launch.arguments)),
                    launch.dependent,
                )
                for launch in self.launches
            ),
            {name: evaluate(formula, values) for name, formula in self.workspaces},
            tuple(name for name in self.aligned if name in TENSORS),
        )


def evaluate(formula: str, values: Mapping[str, int]) -> int:
    """The value of a formula."""
    if not _FORMULA.fullmatch(formula):
        raise ValueError(f"{formula!r} is no formula")
    functions: dict[str, Any] = {"__builtins__": {}, "div_up": div_up, "min": min, "max": max}
    return int(eval(formula, functions, dict(values)))


def host_call(plan: Plan, batch: int, input_size: Sequence[int]) -> HostCall:
    """The formulas of a plan with the tile that it picks for these extents, checked.

    Raises:
        NotImplementedError: a plan of another family, or one whose numbers are not these.
    """
    family = next((f for f in _FAMILIES if isinstance(plan, f)), None)
    if family is None:
        raise NotImplementedError(f"{type(plan).__name__} has no formulas in convt3d.export.host")
    pinned = pin(plan, batch, input_size)
    call = _FAMILIES[family](pinned)
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


def _same(call: HostCall, batch: int, input_size: Sequence[int], plan: Plan) -> None:
    """Compare the formulas with a plan's schedule.

    Raises:
        NotImplementedError: they differ; names the plan, the extents and both schedules.
    """
    got, want = call.evaluate(batch, input_size), plain(plan.schedule(batch, input_size))
    if (got.launches, got.workspaces) != (want.launches, want.workspaces):
        raise NotImplementedError(
            f"the formulas of {type(plan).__name__} in convt3d.export.host have fallen behind its "
            f"schedule: for batch {batch} and input size {tuple(input_size)} they give {got}, "
            f"the plan gives {want}"
        )


def samples(geometry: Geometry, count: int) -> list[tuple[int, tuple[int, ...]]]:
    """Batches and input sizes from 1 up, repeatable, whose outputs are not empty."""
    generator = random.Random(count)
    found: list[tuple[int, tuple[int, ...]]] = []
    while len(found) < count:
        limit = generator.choice((3, 12, 70, 200))
        size = tuple(generator.randint(1, limit) for _ in range(3))
        if min(geometry.output_size(size)) >= 1:
            found.append((generator.choice((1, 2, 3, 8, 17)), size))
    return found


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


# ---------------------------------------------------------------- pinned plans


@dataclass(frozen=True)
class PinnedGatherPlan(GatherPlan):
    """A gather kernel with one tile shape for all extents."""

    units: Triple = (1, 1, 1)

    def unit_box(self, batch: int, target: Sequence[int]) -> Triple:
        return self.units


@dataclass(frozen=True)
class PinnedSweepPlan(WgmmaSweepPlan):
    """A warpgroup kernel with one length of lines for all extents."""

    units2: int = 1

    def piece(self, batch: int, source: Sequence[int], target: Sequence[int]) -> int:
        return self.units2


@dataclass(frozen=True)
class PinnedWgradPlan(WgradPlan):
    """A gradient-by-weight kernel with one tile of positions for all extents."""

    shape: Triple = (1, 1, 1)

    def tile_shape(self, batch: int, input_size: Sequence[int], gpu: Gpu) -> Triple:
        return self.shape


@dataclass(frozen=True)
class PinnedStridedPlan(StridedPlan):
    """A strided kernel with one tile shape for all extents."""

    pinned: Shape | None = None

    def shape(self, batch: int, target: Sequence[int]) -> Shape:
        assert self.pinned is not None
        return self.pinned


def pin(plan: Plan, batch: int, input_size: Sequence[int]) -> Plan:
    """The plan with the tile shape that it picks for these extents."""
    pinned = (PinnedGatherPlan, PinnedSweepPlan, PinnedStridedPlan, PinnedWgradPlan)
    if isinstance(plan, pinned):
        return plan
    values: dict[str, Any] = {f.name: getattr(plan, f.name) for f in fields(plan)}  # type: ignore[arg-type]
    if isinstance(plan, (GatherPlan, WgmmaSweepPlan)):
        source: Sequence[int] = input_size
        target: Sequence[int] = plan.problem.geometry.output_size(input_size)
        if not plan.problem.forward:
            source, target = target, source
        if isinstance(plan, WgmmaSweepPlan):
            return PinnedSweepPlan(**values, units2=plan.piece(batch, source, target))
        return PinnedGatherPlan(**values, units=plan.unit_box(batch, target))
    if isinstance(plan, StridedPlan):
        target = plan.problem.geometry.output_size(input_size)
        if not plan.problem.forward:
            target = tuple(input_size)
        return PinnedStridedPlan(**values, pinned=plan.shape(batch, target))
    if isinstance(plan, WgradPlan):
        return PinnedWgradPlan(**values, shape=plan.tile_shape(batch, input_size, plan.gpu))
    return plan


# ---------------------------------------------------------------- families


def _axes(prefix: str) -> tuple[str, str, str]:
    return (f"{prefix}_d", f"{prefix}_h", f"{prefix}_w")


def _sides(plan: Plan) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
    """Extents of the gathered tensor and of the produced one."""
    sides = (_axes("in"), _axes("out"))
    return sides if plan.problem.operation == "forward" else (sides[1], sides[0])


def _fixed(plan: Plan) -> Schedule:
    """A schedule to take kernels and blocks from; these do not vary."""
    return plan.schedule(*samples(plan.problem.geometry, 1)[0])


def _gather(plan: PinnedGatherPlan) -> HostCall:
    source, target = _sides(plan)
    pack, product = _fixed(plan).launches
    tiles = tuple(
        (f"tiles_{i}", f"div_up({target[axis]}, {plan.axes[i].unit_target * plan.units[i]})")
        for i, axis in enumerate(plan.order)
    )
    blocks = plan.axes[0].phases * plan.axes[1].phases
    blocks *= plan.column_tiles * plan.problem.geometry.groups

    def extents(side: Sequence[str]) -> tuple[str, ...]:
        strides = (f"{side[1]} * {side[2]}", side[2])
        return (*(side[axis] for axis in plan.order), *(strides[a] for a in plan.order[:2]))

    names = tuple(name for name, _ in tiles)
    return HostCall(
        plan,
        tiles,
        (("packed", str(4 * plan.packed_words)),),
        (
            _launch(pack, str(pack.grid), pack.arguments),
            _launch(
                product,
                f"{blocks} * tiles_0 * tiles_1 * tiles_2 * batch",
                (
                    *("source", "packed", "bias", "target"),
                    *extents(source),
                    *extents(target),
                    *map(str, plan.units),
                    *names,
                ),
            ),
        ),
    )


def _patch(plan: PatchPlan) -> HostCall:
    product, *reduce = _fixed(plan).launches
    inputs = _axes("in")
    numbers = [
        ("per_sample", f"div_up(in_d * in_h * in_w, {plan.tile.cells})"),
        ("tiles", "per_sample * batch"),
        ("workers", f"min(tiles, {plan.most_workers})"),
    ]
    target = "partial" if reduce else "target"
    arguments = ("source", "weight", "bias", target, *inputs, "per_sample", "tiles", "workers")
    launches = [_launch(product, f"workers * {plan.blocks}", (*arguments, *WEIGHT_STRIDES))]
    workspaces = []
    if reduce:
        channels = plan.problem.geometry.in_channels
        numbers.append(("elements", f"batch * {channels} * in_d * in_h * in_w"))
        workspaces.append(("partial", f"{4 * plan.tile.splits} * elements"))
        grid = f"min(div_up(elements, {REDUCE_ELEMENTS}), {REDUCE_GRID})"
        launches.append(_launch(reduce[0], grid, ("partial", "target", "elements")))
    return HostCall(plan, tuple(numbers), tuple(workspaces), tuple(launches))


def _sweep(plan: PinnedSweepPlan) -> HostCall:
    source, target = _sides(plan)
    pack, product = _fixed(plan).launches

    def extents(side: Sequence[str]) -> tuple[str, ...]:
        strides = (f"{side[1]} * {side[2]}", side[2])
        return (*(side[axis] for axis in plan.order), *(strides[a] for a in plan.order[:2]))

    arguments = ("source", "packed", "bias", "target", *extents(source), *extents(target))
    return HostCall(
        plan,
        (),
        (("packed", str(plan.packed_bytes)),),
        (
            _launch(pack, str(pack.grid), pack.arguments),
            _launch(product, str(product.grid), (*arguments, "batch", str(plan.units2))),
        ),
    )


def _strided(plan: PinnedStridedPlan) -> HostCall:
    source, target = _sides(plan)
    pack, product = _fixed(plan).launches
    assert plan.pinned is not None
    units = plan.pinned.units
    numbers = []
    for i, (axis, first) in enumerate(zip(plan.axes, plan.first_live, strict=True)):
        needed = f"max(1, div_up({target[i]} - {first}, {axis.unit_target}))"
        numbers.append((f"tiles_{i}", f"div_up({needed}, {units[i]})"))
    numbers.append(("count", "tiles_0 * tiles_1 * tiles_2 * batch"))
    numbers.append(("rounds", f"div_up(count, {plan.most_workers})"))

    # Outputs are staged unless rows are a multiple of a lane's vector.
    shared = str(plan.pipeline_bytes)
    if plan.direct_vector != 1:
        width, vector = target[2], plan.direct_vector
        odd = f"min(1, div_up({width}, {vector}) * {vector} - {width})" if vector else "1"
        shared += f" + {odd} * {plan.staging_buffers(units) * plan.staging_bytes(units)}"

    def extents(side: Sequence[str]) -> tuple[str, ...]:
        return (*side, f"{side[1]} * {side[2]}", side[2])

    return HostCall(
        plan,
        tuple(numbers),
        (("packed", str(4 * plan.packed_words)),),
        (
            _launch(pack, str(pack.grid), pack.arguments),
            _launch(
                product,
                f"{plan.n_tiles} * div_up(count, rounds)",
                (
                    *("source", "packed", "bias", "target"),
                    *extents(source),
                    *extents(target),
                    *map(str, units),
                    *("tiles_0", "tiles_1", "tiles_2"),
                    str(plan.pinned.line_rows),
                    str(plan.pinned.line_fragments),
                    "count",
                    str(plan.staging_buffers(units)),
                ),
                shared,
            ),
        ),
    )


def _direct(plan: DirectPlan) -> HostCall:
    source, target = _sides(plan)
    (launch,) = _fixed(plan).launches
    numbers = []
    phases = 1
    for axis, (stride, block) in enumerate(
        zip(plan.problem.geometry.stride, plan.blocks, strict=True)
    ):
        step = stride if plan.problem.forward else 1
        numbers.append((f"units_{axis}", f"div_up({target[axis]}, {step * max(1, block)})"))
        phases *= 1 if block else step
    blocks = phases * div_up(plan.channel_blocks, plan.lanes)
    each = plan.threads // plan.lanes
    units = tuple(name for name, _ in numbers)
    return HostCall(
        plan,
        tuple(numbers),
        (),
        (
            _launch(
                launch,
                f"{blocks} * batch * div_up(units_0 * units_1 * units_2, {each})",
                (*TENSORS, *source, *target, *units, *WEIGHT_STRIDES),
            ),
        ),
    )


def _wgrad(plan: PinnedWgradPlan) -> HostCall:
    product, reduce = _fixed(plan).launches
    inputs, outputs = _axes("in"), _axes("out")
    tiles = tuple(
        (f"tiles_{i}", f"div_up({name}, {size})")
        for i, (name, size) in enumerate(zip(inputs, plan.shape, strict=True))
    )
    most = plan.splits(10**12, plan.gpu)  # what it tends to for ever larger extents
    splits = (
        ("tiles", "tiles_0 * tiles_1 * tiles_2 * batch"),
        ("rounds", f"div_up(tiles, min({most}, tiles))"),
        ("splits", "div_up(tiles, rounds)"),
    )
    arguments = (
        *("source", "target", "partial"),
        *inputs,
        "in_h * in_w",
        "in_w",
        *outputs,
        "out_h * out_w",
        "out_w",
        *map(str, plan.shape),
        *(name for name, _ in tiles),
        "batch",
        "splits",
    )
    return _split(plan, (*tiles, *splits), product, reduce, arguments)


def _direct_wgrad(plan: DirectWgradPlan) -> HostCall:
    product, reduce = _fixed(plan).launches
    rows = plan.threads // plan.lanes
    splits = ("splits", f"min({plan.splits}, div_up(in_d * in_h * in_w, {rows}))")
    arguments = ("source", "target", "partial", *_axes("in"), *_axes("out"), "batch", "splits")
    return _split(plan, (splits,), product, reduce, arguments)


def _depthwise(plan: DepthwisePlan) -> HostCall:
    source, target = _sides(plan)
    (launch,) = _fixed(plan).launches
    each = plan.threads // plan.lanes
    numbers = (
        *(
            (f"units_{i}", f"div_up({n}, {axis.slots})")
            for i, (n, axis) in enumerate(zip(target, plan.axes, strict=True))
        ),
        ("columns", f"{plan.lane_groups} * div_up(units_1 * units_2, {each}) * batch"),
        *_segments("units_0", f"div_up({plan.ctas}, columns)", plan.least_steps),
    )
    units = ("units_0", "units_1", "units_2", "steps")
    return HostCall(
        plan,
        numbers,
        (),
        (
            _launch(
                launch,
                "columns * div_up(units_0, steps)",
                (*TENSORS, *source, *target, *units, *WEIGHT_STRIDES),
            ),
        ),
    )


def _depthwise_wgrad(plan: DepthwiseWgradPlan) -> HostCall:
    product, reduce = _fixed(plan).launches
    each = plan.threads // plan.lanes
    numbers = (
        ("units_1", f"div_up(in_h, {plan.block1})"),
        ("units_2", f"div_up(in_w, {plan.block2})"),
        ("tiles", f"div_up(units_1 * units_2, {each}) * batch"),
        *_segments("in_d", f"div_up({plan.ctas}, {plan.variants} * tiles)", plan.least_steps),
        ("items", "tiles * div_up(in_d, steps)"),
        ("splits", f"div_up(items, div_up(items, {plan.most_splits}))"),
    )
    arguments = (
        *("source", "target", "partial", *_axes("in"), *_axes("out")),
        *("units_1", "units_2", "steps", "batch", "splits"),
    )
    return _split(plan, numbers, product, reduce, arguments)


def _segments(extent: str, wanted: str, least: int) -> tuple[tuple[str, str], ...]:
    """Segments of an axis, none shorter than `least` while the axis is longer."""
    return (
        ("segments", f"min({wanted}, div_up({extent}, {least}))"),
        ("steps", f"div_up({extent}, segments)"),
    )


def _split(
    plan: WgradPlan | DirectWgradPlan | DepthwiseWgradPlan,
    numbers: tuple[tuple[str, str], ...],
    product: Launch,
    reduce: Launch,
    arguments: tuple[str, ...],
) -> HostCall:
    """A product whose partial sums a second launch adds up."""
    elements = plan.variants * plan.variant_elements
    return HostCall(
        plan,
        numbers,
        (("partial", f"{4 * elements} * splits"),),
        (
            _launch(product, f"{plan.variants} * splits", arguments),
            _launch(reduce, str(reduce.grid), ("partial", "weight", "splits", *WEIGHT_STRIDES)),
        ),
    )


def _launch(
    fixed: Launch, grid: str, arguments: Sequence[Any], shared_bytes: str | None = None
) -> HostLaunch:
    """A launch whose shared memory, unless a formula is given, does not vary."""
    shared_bytes = shared_bytes or str(fixed.shared_bytes)
    return HostLaunch(
        fixed.kernel, grid, fixed.block, shared_bytes, tuple(arguments), fixed.dependent
    )


_FAMILIES: dict[type, Callable[[Any], HostCall]] = {
    PatchPlan: _patch,
    GatherPlan: _gather,
    WgmmaSweepPlan: _sweep,
    StridedPlan: _strided,
    DirectPlan: _direct,
    WgradPlan: _wgrad,
    DirectWgradPlan: _direct_wgrad,
    DepthwisePlan: _depthwise,
    DepthwiseWgradPlan: _depthwise_wgrad,
}
