"""The formulas of each family of plans that has some: see ``formulas.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from convt3d.cuda.plan.ampere_gather import GatherPlan
from convt3d.cuda.plan.ampere_patch import PatchPlan
from convt3d.cuda.plan.ampere_strided import StridedPlan
from convt3d.cuda.plan.ampere_wgrad import WgradPlan
from convt3d.cuda.plan.cells import REDUCE_ELEMENTS, REDUCE_GRID
from convt3d.cuda.plan.depthwise import DepthwisePlan, DepthwiseWgradPlan
from convt3d.cuda.plan.direct import DirectPlan, DirectWgradPlan
from convt3d.cuda.plan.sweep import WgmmaSweepPlan
from convt3d.cuda.schedule import WEIGHT_STRIDES, Launch, Plan, Schedule, div_up
from convt3d.export.formulas import EXTENTS, TENSORS, HostCall, HostLaunch, samples
from convt3d.export.pinned import (
    PinnedGatherPlan,
    PinnedStridedPlan,
    PinnedSweepPlan,
    PinnedWgradPlan,
)

_D_H_W = (0, 1, 2)


def _axes(prefix: str) -> tuple[str, str, str]:
    return (f"{prefix}_d", f"{prefix}_h", f"{prefix}_w")


def _sides(plan: Plan) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
    """Extents of the gathered tensor and of the produced one."""
    sides = (_axes("in"), _axes("out"))
    return sides if plan.problem.operation == "forward" else (sides[1], sides[0])


def _extents(side: Sequence[str], order: Sequence[int] = _D_H_W) -> tuple[str, ...]:
    """Extents of a tensor with the axes in this order, and the strides of all but the last."""
    strides = (f"{side[1]} * {side[2]}", side[2])
    return (*(side[axis] for axis in order), *(strides[axis] for axis in order[:2]))


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
                    *_extents(source, plan.order),
                    *_extents(target, plan.order),
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
        numbers.append(("volume", "in_d * in_h * in_w"))
        numbers.append(("elements", f"batch * {channels} * volume"))
        workspaces.append(("partial", f"{4 * plan.tile.splits} * elements"))
        grid = f"min(div_up(elements, {REDUCE_ELEMENTS}), {REDUCE_GRID})"
        launches.append(_launch(reduce[0], grid, ("partial", "target", "elements", "volume")))
    return HostCall(plan, tuple(numbers), tuple(workspaces), tuple(launches))


def _sweep(plan: PinnedSweepPlan) -> HostCall:
    source, target = _sides(plan)
    pack, product = _fixed(plan).launches
    extents = (*_extents(source, plan.order), *_extents(target, plan.order))
    arguments = ("source", "packed", "bias", "target", *extents)
    grid, numbers = str(plan.multiprocessors), []
    if plan.ctas_there != plan.multiprocessors:
        pairs = zip(EXTENTS, plan.extents, strict=False)  # the output's follow
        numbers = [("differ", " + ".join(f"max({n}, {m}) - min({n}, {m})" for n, m in pairs))]
        grid += f" - {plan.multiprocessors - plan.ctas_there} * max(0, 1 - differ)"
    return HostCall(
        plan,
        tuple(numbers),
        (("packed", str(plan.packed_bytes)),),
        (
            _launch(pack, str(pack.grid), pack.arguments),
            _launch(product, grid, (*arguments, "batch", str(plan.units2))),
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
                    *_extents(source),
                    *_extents(target),
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
    most = plan.splits(10**12)  # what it tends to for ever larger extents
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


FAMILIES: dict[type, Callable[[Any], HostCall]] = {
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
"""The formulas of a pinned plan, by the class of the plan."""
