"""Plans: every problem gets one, its sizes agree with the kernels', and refusals say why."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import random
import re
import statistics
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from convt3d.bench import shapes
from convt3d.cuda import codec
from convt3d.cuda.operation import Operation
from convt3d.cuda.plan import (
    ampere_gather,
    ampere_patch,
    ampere_strided,
    ampere_wgrad,
    col2im,
    depthwise,
    families,
    ndhwc,
    patch,
    phases,
    plan_as_given,
    plan_for,
    plan_problem,
    ranked_plans,
    refusal,
    sweep,
    transposed,
    wgrad,
    wgrad_ndhwc,
)
from convt3d.cuda.plan import ampere_wgrad_cycles as cycles
from convt3d.cuda.plan.ampere_gather import cost as gather_cost
from convt3d.cuda.plan.axes import Axis
from convt3d.cuda.plan.extents import even_cuts
from convt3d.cuda.plan.sweep.products import SweepTile
from convt3d.cuda.plan.wgrad.search import candidates as wgrad_candidates
from convt3d.cuda.schedule import OPERATIONS, Gpu, Problem, WeightLayout, round_up
from convt3d.cuda.tuning import CANDIDATES
from convt3d.export.host import plain
from convt3d.geometry import Geometry, Triple
from convt3d.polyphase import axis_phases
from convt3d.precision import Arithmetic

AMPERE = Gpu((8, 6), 84, 101376, 102400)
GEOMETRIES = {
    "dense": Geometry(48, 40, (3, 3, 3)),
    "kernel == stride": Geometry(64, 32, (2, 2, 2), (2, 2, 2)),
    "strided": Geometry(24, 17, (4, 3, 5), (2, 1, 3), (1, 1, 2), (1, 0, 2), (1, 2, 1)),
    "groups": Geometry(32, 32, (3, 3, 3), (2, 2, 2), (1, 1, 1), groups=4),
    "depthwise": Geometry(64, 64, (4, 4, 4), (2, 2, 2), (1, 1, 1), groups=64),
    "one channel": Geometry(1, 1, (3, 3, 3)),
    "huge kernel": Geometry(3, 5, (16, 16, 16), (16, 16, 16), (7, 7, 7)),
    "long row": Geometry(4, 4, (1, 1, 40)),
}


@pytest.mark.parametrize("arithmetic", [Arithmetic.TF32, Arithmetic.BF16])
def test_gradient_by_weight_keeps_its_bias(arithmetic: Arithmetic) -> None:
    """One launch brings the gradients by weight and by bias of an up-sampling layer."""
    geometry = Geometry(32, 64, (2, 2, 2), (2, 2, 2))
    problem = Problem("grad_weight", geometry, arithmetic, bias=True)
    canonical, size = problem.canonical((16, 16, 16))
    assert canonical == problem
    plan = plan_problem(canonical, 2, size, Gpu())
    assert plan.schedule(2, size).sums_bias


@pytest.mark.parametrize("gpu", [Gpu(), AMPERE], ids=["sm_90", "sm_86"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("arithmetic", [Arithmetic.TF32, Arithmetic.IEEE, Arithmetic.BF16])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_problem_has_a_plan(
    name: str, arithmetic: Arithmetic, operation: str, gpu: Gpu
) -> None:
    geometry = GEOMETRIES[name]
    last = gpu is AMPERE
    problem = Problem(operation, geometry, arithmetic, last, last)
    canonical, size = problem.canonical((9, 10, 11))
    assert plan_problem(problem, 2, (9, 10, 11), gpu).problem == canonical
    for given, extents in ((problem, (9, 10, 11)), (canonical, size)):
        check_plan(given, extents, gpu)


def check_plan(problem: Problem, size: tuple[int, ...], gpu: Gpu) -> None:
    plan = plan_as_given(problem, 2, size, gpu)
    schedule = plan.schedule(2, size)
    assert plan.problem == problem
    assert plan.describe()["kernel"]
    for launch in schedule.launches:
        assert 0 < launch.grid < 2**31
        assert launch.block in range(32, 1025, 32)
        assert launch.shared_bytes <= gpu.shared_per_block
        names = [a for a in launch.arguments if isinstance(a, str)]
        known = {"source", "target", "weight", "bias", *schedule.workspaces}
        assert all(n in known or n.startswith("weight_stride_") for n in names)


def test_workspace_of_grad_weight_is_bounded() -> None:
    for shape in shapes.named().values():
        problem = Problem("grad_weight", shape.geometry, Arithmetic.TF32)
        plan = plan_problem(problem, shape.batch, shape.input_size, Gpu())
        used = sum(plan.schedule(shape.batch, shape.input_size).workspaces.values())
        weight = 4 * np.prod(shape.geometry.weight_size)
        assert used <= max(64 * 2**20, 4 * weight), (shape.name, used)


def test_sizes_share_kernels() -> None:
    """Extents are arguments of a kernel: a new size compiles something only where tiles differ."""
    kernels = []
    for size in (47, 64, 65, 96, 33, 200):
        plan = plan_for("forward", GEOMETRIES["dense"], (size, size, 2 * size), 2, torch.float32)
        launches = plan.schedule(2, (size, size, 2 * size)).launches
        kernels.append(tuple(launch.kernel for launch in launches))
    assert len(set(kernels[:4])) == 1
    assert len(set(kernels)) <= 3


@pytest.mark.sample(every=17)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_plans_take_the_extents_that_they_were_made_for(
    name: str, operation: str, part: int
) -> None:
    sizes = ((2, 3, 5), (9, 10, 12), (12, 11, 13), (20, 33, 40))
    arithmetics = (Arithmetic.TF32, Arithmetic.IEEE, Arithmetic.F16, Arithmetic.BF16)
    for i, (size, arithmetic) in enumerate(itertools.product(sizes, arithmetics)):
        if (i // 4 + i) % 4 != part:
            continue
        last = (i // 4 + part) % 2 == 1
        problem = Problem(operation, GEOMETRIES[name], arithmetic, last, last)
        for plan in ranked_plans(problem, 2, size, Gpu()):
            assert plan.schedule(2, size).launches


@pytest.mark.sample
@pytest.mark.parametrize("size", [(400, 420, 416), (3, 1000, 1016), (1, 1, 70000), (700, 4, 6)])
@pytest.mark.parametrize("operation", ["forward", "grad_input"])
def test_plans_take_extents_that_are_large(operation: str, size: tuple[int, int, int]) -> None:
    """Also where numbers of 32 bits do not count all elements of some families' boxes."""
    for name, arithmetic in (("dense", Arithmetic.BF16), ("strided", Arithmetic.TF32)):
        problem = Problem(operation, GEOMETRIES[name], arithmetic)
        for plan in ranked_plans(problem, 2, size, Gpu()):
            assert plan.schedule(2, size).launches


@dataclass(frozen=True)
class Timed:
    """The plan that won where candidates were timed on an H200."""

    geometry: Geometry
    size: tuple[int, int, int]
    arithmetic: Arithmetic
    tile: dict[str, object]


_K3, _P1 = (3, 3, 3), (1, 1, 1)
TIMED = {
    "rows transposed in pairs": Timed(
        Geometry(256, 256, _K3, padding=_P1),
        (10, 12, 14),
        Arithmetic.BF16,
        {"phased": 1, "blocks": 1, "consumers": 2, "column_tile": 88, "producers": 2, "vector": 2},
    ),
    "one warpgroup": Timed(
        Geometry(128, 128, _K3, padding=_P1),
        (16, 16, 16),
        Arithmetic.TF32,
        {"phased": 1, "blocks": 1, "consumers": 1, "column_tile": 128},
    ),
    "128 columns": Timed(
        Geometry(256, 128, (4, 4, 4), (2, 2, 2), _P1),
        (12, 12, 12),
        Arithmetic.TF32,
        {"phased": 2, "blocks": 1, "consumers": 2, "column_tile": 128},
    ),
    "few units": Timed(
        Geometry(512, 256, _K3, (2, 2, 2), _P1, _P1),
        (8, 8, 8),
        Arithmetic.TF32,
        {"phased": 0, "blocks": 1, "consumers": 1, "column_tile": 32},
    ),
}


@pytest.mark.parametrize("name", TIMED)
def test_what_was_fastest_is_among_the_first(name: str) -> None:
    """So that `convt3d tune` times it; the cost models choose the first of all."""
    timed = TIMED[name]
    problem = Problem("forward", timed.geometry, timed.arithmetic)
    plans = ranked_plans(problem, 2, timed.size, Gpu())[:CANDIDATES]
    tiles = [plan.tile for plan in plans if isinstance(plan, phases.PhasesLaunches)]
    found = [{key: getattr(tile, key, None) for key in timed.tile} for tile in tiles]
    assert timed.tile in found


@pytest.mark.parametrize("arithmetic", [Arithmetic.TF32, Arithmetic.BF16], ids=str)
@pytest.mark.parametrize("size", [(40, 60, 52), (30, 30, 30), (19, 29, 37)])
def test_lines_are_not_cut_for_next_to_nothing(
    size: tuple[int, int, int], arithmetic: Arithmetic
) -> None:
    # Rows along W fill tiles a little better in pieces, which took two to three times as long.
    problem = Problem("forward", Geometry(32, 16, _K3, (2, 2, 2), _P1, _P1), arithmetic)
    target = problem.geometry.output_size(size)
    ranked = sweep.ranked(problem, 2, size, Gpu())
    for _, plan in ranked[:4]:
        assert plan.line(2, size, target).units == size[2]


def test_pieces_of_rows_end_at_sectors_where_stores_count() -> None:
    # Rows of 64 do not fit: pieces of 22 fill tiles as those of 16 do, and took 1.75 times as long.
    problem = Problem("forward", Geometry(3, 64, _K3, padding=_P1), Arithmetic.IEEE)
    size = (64, 64, 64)
    wide = next(
        plan
        for plan in ranked_plans(problem, 4, size, Gpu())
        if isinstance(plan, sweep.WgmmaSweepPlan) and plan.tile.planes == 6
    )
    assert 22 in [line.units for line in wide.lines(4, size, size)]
    assert wide.line(4, size, size).units % 8 == 0


def test_gathers_count_rounds_of_extents_up_to_64() -> None:
    # As for a row of 128, 32 units x 32 columns: 0.080 ms, and 0.036 with the first one.
    problem = Problem("forward", Geometry(96, 32, _K3, padding=_P1), Arithmetic.TF32)
    plan = ampere_gather.ranked(problem, 1, (9, 26, 34), Gpu(), None)[0][1]
    assert plan.describe()["tile"] == "64 M rows x 32 columns"


@pytest.mark.parametrize(
    "geometry, batch, size, wanted",
    [
        # Two halves of nine lines fill a tile better, and took 1.14 times as long.
        (Geometry(64, 64, (3, 5, 7), (1, 2, 3), padding=(1, 2, 3)), 2, (28, 28, 28), (1, 1, 4, 28)),
        # Lines of eight samples have no conflicts of banks, but a larger box: 1.05 times.
        (Geometry(512, 256, (4, 4, 4), (2, 2, 2), _P1), 64, (4, 4, 4), (2, 4, 4, 4)),
    ],
    ids=["whole lines", "small boxes"],
)
def test_tiles_of_transposed_boxes(
    geometry: Geometry, batch: int, size: tuple[int, int, int], wanted: tuple[int, int, int, int]
) -> None:
    problem = Problem("forward", geometry, Arithmetic.BF16)
    _, plan = transposed.ranked(problem, batch, size, Gpu())[0]
    assert plan.shape(batch, geometry.output_size(size)).units == wanted


def test_tiles_cover_the_destination() -> None:
    problem = Problem("forward", GEOMETRIES["strided"], Arithmetic.TF32)
    for size in ((1, 1, 1), (5, 6, 7), (40, 3, 90)):
        target = problem.geometry.output_size(size)
        _, plan = ampere_gather.ranked(problem, 1, size, Gpu())[0]
        box = plan.unit_box(1, target)
        assert box[0] * box[1] * box[2] <= plan.tile.rows
        positions = np.prod([int(n[0]) for n in plan.box(np.array([box]))])
        assert positions <= plan.tile.positions


@pytest.mark.parametrize("target", [(9, 2, 20), (2, 9, 20), (7, 7, 3)])
def test_tiles_of_gathers_are_no_larger_than_the_target(target: tuple[int, int, int]) -> None:
    problem = Problem("grad_input", GEOMETRIES["dense"], Arithmetic.TF32)
    for _, plan in ampere_gather.ranked(problem, 1, target, Gpu())[::20]:
        shapes = gather_cost.work_of(plan, 1, target).shapes
        assert (shapes <= plan.needed(target)).all()
        assert (shapes.prod(axis=1) <= plan.tile.rows).all()


def test_cuts_of_extents() -> None:
    assert even_cuts(10, 4) == [1, 4]
    assert even_cuts(9, 4, halved=True) == [1, 2, 3, 4]
    assert even_cuts(3, 8) == [1, 3]
    assert even_cuts(5, 0) == [1]  # where not even one fits


def test_tiles_follow_the_gpu_that_the_plan_was_made_for() -> None:
    small = Gpu((9, 0), 4, 232448, 233472)
    for operation, family in (
        ("forward", ampere_gather.GatherPlan),
        ("grad_weight", ampere_wgrad.WgradPlan),
    ):
        problem = Problem(operation, GEOMETRIES["dense"], Arithmetic.TF32)
        plans = {
            gpu: next(
                p for p in ranked_plans(problem, 1, (16, 16, 16), gpu) if isinstance(p, family)
            )
            for gpu in (Gpu(), small)
        }
        assert all(plan.gpu == gpu for gpu, plan in plans.items())
        # The same kernel on another GPU has the tiles of that one.
        one, other = plans[Gpu()], replace(plans[Gpu()], gpu=small)
        sizes = [(n, n, n) for n in (8, 16, 24, 32, 48, 64)]
        assert any(plain(one.schedule(1, n)) != plain(other.schedule(1, n)) for n in sizes)


@pytest.mark.parametrize("kernel, pitch", [(2, 9), (3, 27), (5, 65)])
def test_packing_stages_as_many_taps_as_there_are_up_to_64(kernel: int, pitch: int) -> None:
    """In 64 rows of an odd number of words (phases_pack of phases/pack.cu)."""
    geometry = Geometry(32, 32, (kernel, kernel, kernel), (1, 2, 2), _P1)
    _, plan = phases.ranked(Problem("forward", geometry, Arithmetic.TF32), 2, (8, 8, 8), Gpu())[0]
    packing, _ = plan.schedule(2, (8, 8, 8)).launches
    assert packing.kernel.file == "phases/pack.cu"
    assert packing.shared_bytes == 64 * pitch * 4


@pytest.mark.parametrize("inside", [False, True], ids=["samples first", "samples last"])
def test_blocks_of_64_units_are_runs_of_channels_last_boxes(inside: bool) -> None:
    geometry = Geometry(32, 32, _K3, (2, 2, 2), _P1)
    problem = Problem("forward", geometry, Arithmetic.BF16, True, True)
    batch, target = 32, geometry.output_size((4, 4, 4) if inside else (7, 8, 24))
    broken = 0  # tiles of several runs
    for plan in ndhwc.candidates(problem, batch, target, Gpu()):
        if plan.tile.samples_inside != inside or plan.by_warps:
            continue
        for shape in plan.shapes(batch, target):
            extents, pitches = list(shape.units), [*plan.pitches(shape), 1]
            if inside:
                extents.append(extents.pop(0))
                pitches = [pitches[1], pitches[2], shape.units[0], pitches[0]]
            units = np.indices(extents).reshape(4, -1)
            positions = np.tensordot(pitches, units, 1)
            steps = np.diff(positions)
            ends = [int(i) + 1 for i in np.flatnonzero(steps != 1)]
            assert all(end % 64 == 0 for end in ends)
            assert all(int(position) % 8 == 0 for position in positions[::64])
            broken += bool(ends)
    assert broken


def test_kernel_equal_to_stride_needs_no_packing() -> None:
    for operation in ("forward", "grad_input"):
        plan = plan_for(operation, GEOMETRIES["kernel == stride"], (64, 64, 64), 2, torch.float32)
        assert isinstance(plan, (ampere_patch.PatchPlan, patch.WgmmaPatchPlan))
        schedule = plan.schedule(2, (64, 64, 64))
        assert len(schedule.launches) == 1
        assert not schedule.workspaces


def test_channels_last_weights_are_taken_as_they_are() -> None:
    geometry = Geometry(512, 256, (4, 4, 4), (2, 2, 2), (1, 1, 1))
    plan = plan_for("forward", geometry, (4, 4, 4), 64, torch.bfloat16, True)
    weight = torch.empty(geometry.weight_size, dtype=torch.bfloat16, device="meta")
    for layout, files in (
        (torch.contiguous_format, ["ndhwc/pack.cu", "ndhwc/kernel.cu"]),
        (torch.channels_last_3d, ["ndhwc/kernel.cu"]),
    ):
        laid_out = weight.contiguous(memory_format=layout)
        operation = Operation.of(plan.problem, 64, (4, 4, 4), laid_out)
        schedule = operation.launched_by(plan).schedule
        assert [launch.kernel.file for launch in schedule.launches] == files
        assert len(schedule.workspaces) == len(files) - 1


@pytest.mark.parametrize("resident", [False, True])
def test_stages_of_weights_as_they_are_fit_shared_memory(resident: bool) -> None:
    # A chunk of 48 channels is 96 bytes of packed weights, and 128 of weights as they are.
    problem = Problem("forward", Geometry(48, 256, (3, 3, 3)), Arithmetic.BF16, True, True)
    tile = ndhwc.NdhwcTile(3, 1, 256, 2, 3, 4, 2, False, direct=True)
    if resident:
        tile = replace(tile, column_tile=64, weight_stages=27, resident_weights=True)
    plan = ndhwc.WgmmaNdhwcPlan(problem, tile, Gpu())
    assert plan.serves(4, (32, 32, 32))
    flipped_last = WeightLayout(channels_last=True, flipped=True)
    as_it_is = plan.schedule(4, (32, 32, 32)).on_weights.get(flipped_last)
    if resident:
        assert as_it_is is None
    else:
        assert as_it_is is not None
        assert dict(as_it_is.launches[0].kernel.macros)["CONVT3D_WEIGHT_STAGES"] == "3"
        assert as_it_is.launches[0].shared_bytes <= Gpu().shared_per_block


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("arithmetic", [Arithmetic.BF16, Arithmetic.TF32])
def test_plans_on_channels_last_run_at_any_count_of_channels(
    arithmetic: Arithmetic, stride: int
) -> None:
    for channels in (24, 48, 112):
        geometry = Geometry(channels, 256, (3, 3, 3), (stride,) * 3, (1, 1, 1))
        problem = Problem("forward", geometry, arithmetic, True, True)
        for plan in ranked_plans(problem, 4, (32, 32, 32), Gpu())[:4]:
            plan.schedule(4, (32, 32, 32))


@pytest.mark.parametrize("arithmetic", [Arithmetic.BF16, Arithmetic.TF32], ids=str)
def test_long_code_is_not_fetched_for_few_tiles(arithmetic: Arithmetic) -> None:
    # With all 75 taps unrolled, 216 work tiles took three times as long as with a loop over them.
    geometry = Geometry(128, 16, (3, 5, 5), (1, 2, 2), (1, 2, 2))
    problem = Problem("forward", geometry, arithmetic, True, True)
    plan = ndhwc.ranked(problem, 1, (48, 24, 24), Gpu())[0][1]
    assert plan.tile.phased >= 2


@pytest.mark.parametrize("arithmetic", [Arithmetic.BF16, Arithmetic.TF32])
def test_contiguous_layers_of_one_tap_by_their_volume(arithmetic: Arithmetic) -> None:
    def plan_of(channels: tuple[int, int], size: tuple[int, int, int]) -> Any:
        # A Conv3d forward, from the second number of channels to the first.
        problem = Problem("grad_input", Geometry(*channels, (1, 1, 1)), arithmetic)
        plan = ranked_plans(problem, 4, size, Gpu(), first_only=True)[0]
        plan.schedule(4, size)
        return plan

    # Rows along W may have any length, as long as TMA takes whole volumes.
    assert isinstance(plan_of((256, 64), (8, 7, 7)), patch.WgmmaPatchPlan)
    assert isinstance(plan_of((256, 64), (28, 28, 28)), patch.WgmmaPatchPlan)
    # Others are loaded element by element, or as a copy where many sums share what that costs.
    assert isinstance(plan_of((40, 40), (33, 33, 33)), ampere_patch.PatchPlan)
    assert isinstance(plan_of((2048, 1024), (7, 7, 7)), ndhwc.WgmmaNdhwcPlan)


def test_channels_last_gradients_by_their_source_channels() -> None:
    def kind(geometry: Geometry, size: tuple[int, int, int]) -> type:
        problem = Problem("grad_input", geometry, Arithmetic.BF16, True, True)
        return type(ranked_plans(problem, 2, size, Gpu(), first_only=True)[0])

    # One tap, as in a Conv3d forward: patch takes positions of whole 128 bytes, ndhwc the others.
    assert kind(Geometry(144, 24, (1, 1, 1)), (56, 56, 56)) is ndhwc.WgmmaNdhwcPlan
    assert kind(Geometry(64, 128, (1, 1, 1)), (56, 56, 56)) is patch.WgmmaPatchPlan
    # Strided: 8 of the 64 channels that a stage of ndhwc brings.
    planes = {"stride": (1, 2, 2), "padding": _P1}
    assert kind(Geometry(160, 8, _K3, **planes), (40, 80, 80)) is sweep.WgmmaSweepPlan
    assert kind(Geometry(160, 64, _K3, **planes), (40, 80, 80)) is ndhwc.WgmmaNdhwcPlan


def test_long_sums_of_small_volumes_are_split() -> None:
    geometry = Geometry(320, 320, (2, 2, 2), (2, 2, 2))
    problem = Problem("grad_input", geometry, Arithmetic.TF32)
    _, plan = ampere_patch.ranked(problem, 2, (8, 8, 8), Gpu())[0]
    assert plan.tile.splits > 1
    schedule = plan.schedule(2, (8, 8, 8))
    assert [launch.kernel.entry for launch in schedule.launches] == [
        "convt3d_ampere_patch",
        "convt3d_ampere_patch_reduce",
    ]
    assert schedule.workspaces == {"partial": 4 * plan.tile.splits * 2 * 320 * 512}


@pytest.mark.parametrize(
    ("geometry", "reason"),
    [
        (Geometry(8, 8, (2, 2, 2), (2, 2, 1)), "kernel == stride"),
        (Geometry(8, 8, (2, 2, 2), (2, 2, 2), (1, 0, 0)), "no padding"),
        (Geometry(8, 8, (2, 2, 2), (2, 2, 2), output_padding=(0, 0, 1)), "output padding"),
        (Geometry(8, 8, (2, 2, 2), (2, 2, 2), dilation=(2, 1, 1)), "dilation"),
        (Geometry(8, 8, (1, 1, 32), (1, 1, 32)), "stride 32 along W"),
        (Geometry(8, 8, (1, 2, 3), (1, 2, 3), dilation=(5, 1, 1)), None),
    ],
)
def test_what_the_kernel_equal_to_stride_family_declines(
    geometry: Geometry, reason: str | None
) -> None:
    got = ampere_patch.refusal(Problem("forward", geometry, Arithmetic.TF32))
    assert (got is None) if reason is None else (got is not None and reason in got)


STRIDED = {
    "grouped": Geometry(32, 32, (3, 3, 3), (2, 2, 2), (1, 1, 1), groups=4),
    "no tap in most phases": Geometry(8, 24, (3, 3, 3), (2, 2, 2), (1, 1, 1), (0, 0, 0), (2, 2, 2)),
    "anisotropic": Geometry(16, 8, (3, 2, 5), (2, 1, 3), (1, 0, 2), (1, 0, 2), (1, 2, 1)),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("operation", ["forward", "grad_input"])
@pytest.mark.parametrize("name", STRIDED)
def test_strided_tiles_fit(name: str, operation: str, last: bool) -> None:
    geometry = STRIDED[name]
    problem = Problem(operation, geometry, Arithmetic.TF32, last, last)
    for size in ((2, 3, 5), (16, 20, 33)):
        output = geometry.output_size(size)
        target = output if problem.forward else size
        for _, plan in ampere_strided.ranked(problem, 2, size, AMPERE)[::7]:
            # Every output of a phase with taps lies in a unit that tiles cover.
            for axis, (needed, extent) in enumerate(zip(plan.needed(target), target, strict=True)):
                step = plan.axes[axis].unit_target
                live = [o for o in range(extent) if plan.live[axis][o % step]]
                assert needed == max(1, max(live, default=0) // step + 1) or last
                assert needed * step > extent - step
            shapes = plan.shapes(target)
            assert shapes
            for shape in shapes:
                t0, t1, _ = shape.units
                lines = t1 // shape.line_rows * (t0 if problem.forward else 1)
                assert t1 % shape.line_rows == 0
                assert lines * shape.line_fragments <= plan.tile.fragments
                assert plan.box_positions(shape.units) <= plan.tile.positions
                shared = plan.shared_bytes(shape.units, target)
                assert shared <= AMPERE.shared_per_block
            schedule = plan.schedule(2, size)
            assert schedule.launches[1].grid % plan.n_tiles == 0


@pytest.mark.parametrize("operation", ["forward", "grad_input"])
def test_vectors_that_cover_a_row_of_a_strided_box_have_room(operation: str) -> None:
    """Wherever the row begins (BoxShape and BoxFill::vectors2 of load/box.cuh)."""
    cut = 0  # rows of whole vectors and a part of one
    for name, arithmetic in itertools.product(STRIDED, (Arithmetic.TF32, Arithmetic.BF16)):
        problem, size = Problem(operation, STRIDED[name], arithmetic), (4, 6, 33)
        _, target = problem.extents(size)
        for _, plan in ampere_strided.ranked(problem, 2, size, AMPERE)[::7]:
            vector, axis = plan.tile.vector, plan.axes[2]
            for shape in plan.shapes(target):
                units = shape.units[2]
                row = round_up(
                    plan.lead + (units - 1) * axis.unit_source + axis.shifts, plan.pair_source
                )
                ends = [begin + row for begin in range(vector)]
                assert plan.pitch(units) == max(round_up(end, vector) for end in ends)
                cut += row % vector > 0
    assert cut


def test_strided_layers_run_on_the_strided_kernel() -> None:
    for operation in ("forward", "grad_input"):
        plan = plan_for(operation, STRIDED["grouped"], (32, 64, 128), 4, torch.float32, gpu=AMPERE)
        assert isinstance(plan, ampere_strided.StridedPlan)


@pytest.mark.parametrize(
    ("geometry", "operation", "reason"),
    [
        (GEOMETRIES["dense"], "forward", "no stride"),
        (GEOMETRIES["huge kernel"], "forward", "4096 taps"),
        (GEOMETRIES["kernel == stride"], "forward", "one product"),
        (GEOMETRIES["groups"], "grad_weight", "gradients by input"),
        (Geometry(8, 8, (6, 6, 6), (6, 6, 6), (1, 0, 0)), "forward", "216 phases"),
        (Geometry(8, 8, (1, 1, 40), (2, 2, 2)), "forward", "window"),
        (GEOMETRIES["groups"], "forward", None),
    ],
)
def test_strided_refusals(geometry: Geometry, operation: str, reason: str | None) -> None:
    got = ampere_strided.refusal(Problem(operation, geometry, Arithmetic.TF32))
    assert (got is None) if reason is None else (got is not None and reason in got)


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
def test_axis_agrees_with_polyphase(kernel: int, dilation: int, stride: int) -> None:
    for padding in range(4):
        axis = Axis(kernel, stride, padding, dilation, True, 0)
        phases = axis_phases(kernel, stride, padding, dilation)
        assert axis.phase_taps == tuple(map(len, phases))
        shifts = [tap.shift for taps in phases for tap in taps]
        assert axis.reach == (min(shifts), max(shifts))
        assert axis.max_taps == max(map(len, phases))


_SHORT = Geometry(64, 64, (4, 2, 2), padding=(2, 2, 0), dilation=(2, 1, 2))


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    "geometry, size",
    [
        # Padding leaves no outputs of the sizes that stand for the class.
        (Geometry(1, 5, (1, 2, 1), padding=(0, 4, 0)), (1, 8, 1)),
        (Geometry(64, 8, (3, 4, 4), (1, 1, 2), (3, 0, 43), dilation=(1, 3, 1)), (17, 13, 50)),
        (Geometry(16, 64, (2, 3, 1), (2, 2, 2), (0, 54, 1), dilation=(3, 3, 3)), (33, 90, 32)),
        (Geometry(16, 64, (4, 1, 1), (2, 2, 1), (0, 48, 1), dilation=(2, 2, 2)), (16, 70, 17)),
        (Geometry(32, 64, (3, 1, 3), (1, 3, 1), (33, 0, 0), dilation=(1, 1, 3)), (200, 50, 8)),
        # Few short rows do not fill a product's depth, as others of the class do.
        *((_SHORT, size) for size in ((17, 5, 3), (17, 5, 4), (17, 6, 3), (32, 5, 3))),
    ],
)
@pytest.mark.parametrize("channels_last", [False, pytest.param(True, marks=pytest.mark.more)])
def test_every_size_of_a_class_is_scheduled(
    geometry: Geometry, size: tuple[int, int, int], channels_last: bool
) -> None:
    arithmetics = (Arithmetic.TF32, Arithmetic.BF16, Arithmetic.IEEE)
    for operation, arithmetic, batch in itertools.product(OPERATIONS, arithmetics, (2, 16)):
        problem = Problem(operation, geometry, arithmetic, channels_last, channels_last)
        assert plan_problem(problem, batch, size, Gpu()).schedule(batch, size).launches


@pytest.mark.parametrize(
    "kernel, size, arithmetic",
    [
        (3, 48, Arithmetic.TF32),
        (3, 24, Arithmetic.BF16),
        (3, 48, Arithmetic.IEEE),
        (4, 32, Arithmetic.TF32),
        (4, 32, Arithmetic.BF16),
        (4, 32, Arithmetic.IEEE),
    ],
)
def test_a_warpgroup_ahead_waits_for_nobody(arithmetic: Arithmetic, kernel: int, size: int) -> None:
    """It has buffers of its own for as long as the others stand still, one more on its way."""
    geometry = Geometry(64, 32, (kernel,) * 3, (2, 2, 2), (1, 1, 1))
    problem = Problem("forward", geometry, arithmetic)
    ranked = phases.ranked(problem, 2, (size,) * 3, Gpu())
    ping_pong = [plan for _, plan in ranked if plan.tile.ping_pong]
    assert ping_pong
    for plan in ping_pong:
        t = plan.tile
        assert 2 * t.ping_pong <= plan.chunks
        assert t.ping_pong + 2 <= t.source_stages
        assert t.resident_weights or t.ping_pong * plan.most_walked + 2 <= t.weight_stages


def test_problems_are_pickled_without_the_hash_of_a_process() -> None:
    problem = Problem("forward", Geometry(8, 8, _K3), Arithmetic.TF32)
    assert hash(problem) == vars(problem)["_hash"]
    read = pickle.loads(pickle.dumps(problem))
    assert "_hash" not in vars(read) and read == problem and hash(read) == hash(problem)


@pytest.mark.parametrize("arithmetic", [Arithmetic.TF32, Arithmetic.BF16], ids=str)
def test_a_layer_whose_taps_meet_nothing_but_padding_has_a_plan(arithmetic: Arithmetic) -> None:
    geometry = Geometry(16, 32, (2, 4, 2), (2, 2, 2), (1, 2, 0), (0, 1, 0), (3, 3, 1))
    problem = Problem("forward", geometry, arithmetic)
    types = {type(plan) for plan in ranked_plans(problem, 3, (1, 66, 64), Gpu())}
    assert transposed.WgmmaTransposedPlan in types
    assert type(plan_problem(problem, 3, (1, 66, 64), Gpu())) in types


def test_contiguous_layers_of_few_channels_run_on_copies() -> None:
    """24 channels of bfloat16: forward 33 us, and 62 by phases; by weight 67, and 141."""
    geometry = Geometry(24, 160, (7, 7, 7), padding=(3, 3, 3))
    plan = plan_problem(Problem("forward", geometry, Arithmetic.BF16), 2, (8, 8, 8), Gpu())
    assert isinstance(plan, ndhwc.WgmmaNdhwcPlan)
    geometry = Geometry(320, 24, (4, 4, 4), padding=(2, 2, 2))
    problem = Problem("grad_weight", geometry, Arithmetic.BF16)
    plan = plan_problem(problem, 2, (17, 17, 17), Gpu())
    assert isinstance(plan, wgrad_ndhwc.WgmmaWgradNdhwcPlan)


def test_copies_of_large_tensors_are_counted_whole() -> None:
    """One tap, so few products: 0.341 ms by wgrad, 0.689 on copies."""
    problem = Problem("grad_weight", Geometry(320, 512, (1, 1, 1)), Arithmetic.TF32)
    plan = plan_problem(problem, 2, (24, 48, 96), Gpu())
    assert isinstance(plan, wgrad.WgmmaWgradPlan)


@pytest.mark.parametrize(
    ("geometry", "operation", "last", "batch", "size", "kind"),
    [
        # Rows of 14 start anywhere: 26 us on copies, 67 by warps that divide for each copy.
        (Geometry(512, 320, (2,) * 3, (2,) * 3), "grad_input", False, 2, (7,) * 3, "WgmmaNdhwc"),
        # In groups, which the wgmma kernel of kernel == stride leaves: 93 us, and 166.
        (
            Geometry(256, 256, (1, 2, 2), (1, 2, 2), groups=2),
            *("grad_input", True, 4, (48, 24, 24), "WgmmaNdhwc"),
        ),
        # Three columns of phases of few taps: 23 us, and 39 by ampere/strided.
        (
            Geometry(512, 3, (3,) * 3, (2,) * 3, (1,) * 3, (1,) * 3),
            *("forward", True, 8, (5, 10, 20), "Col2im"),
        ),
    ],
    ids=["rows that start anywhere", "groups", "three columns"],
)
def test_families_of_a_group_are_compared(
    geometry: Geometry, operation: str, last: bool, batch: int, size: Triple, kind: str
) -> None:
    problem = Problem(operation, geometry, Arithmetic.BF16, last, last)
    assert any(len(group) > 1 for group in families.order(problem).first)
    plan = plan_problem(problem, batch, size, Gpu())
    assert type(plan).__name__ == f"{kind}Plan"


def test_copies_whose_places_take_divisions_are_counted() -> None:
    """32 by 256 and 128 by 80, float32-grade: 66 and 111 us, and as counted before 79 and 76."""
    geometry = Geometry(512, 320, (2, 2, 2), (2, 2, 2))
    problem = Problem("grad_input", geometry, Arithmetic.IEEE)
    narrow = ampere_patch.Tile(1, 4, 2, 8, 16, 2, False, 2, 6)
    wide = ampere_patch.Tile(4, 2, 2, 5, 32, 2, False, 2, 6)
    times = [
        ampere_patch.PatchPlan(problem, tile, Gpu()).cost(2, (7,) * 3) for tile in (narrow, wide)
    ]
    assert times[0] < times[1]
    whole = [
        ampere_patch.PatchPlan(problem, tile, Gpu()).cost(2, (8,) * 3) for tile in (narrow, wide)
    ]
    assert whole[0] > whole[1]


def test_products_of_all_phases_have_registers_for_their_addresses() -> None:
    """27 taps of four steps, in TF32: 0.412 ms with all of them unrolled, which spills."""
    geometry = Geometry(320, 16, (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1))
    problem = Problem("forward", geometry, Arithmetic.TF32, True, True)
    plan = plan_problem(problem, 8, (24, 24, 24), Gpu())
    assert isinstance(plan, ndhwc.WgmmaNdhwcPlan) and plan.tile.phased > 0


@pytest.mark.parametrize("channels", [(8, 3, 80), (96, 24, 32)], ids=str)
def test_loads_of_strided_sources_are_counted(channels: tuple[int, int, int]) -> None:
    """By input, 0.436 ms and 0.069; the sweep takes 1.160 and 0.155."""
    many, few, extent = channels
    geometry = Geometry(many, few, _K3, (2, 2, 2), (1, 1, 1))
    problem = Problem("grad_input", geometry, Arithmetic.BF16)
    plan = plan_problem(problem, 8 if few == 3 else 2, (extent,) * 3, Gpu())
    assert not isinstance(plan, sweep.WgmmaSweepPlan)


def test_stores_that_write_sectors_twice_are_counted() -> None:
    """Two bfloat16 channels a lane: 0.210 ms, and 0.278 with one CTA a multiprocessor."""
    geometry = Geometry(160, 160, (1, 1, 1), groups=2)
    problem = Problem("grad_input", geometry, Arithmetic.BF16, True, True)
    best = ampere_patch.ranked(problem, 2, (64, 64, 64), Gpu())[0][1]
    large = ampere_patch.Tile(8, 1, 4, 10, 32, 4, True, 1)
    times = [plan.cost(2, (64, 64, 64)) for plan in (best, replace(best, tile=large))]
    assert best.interleave == 1 and 1.1 < times[1] / times[0] < 1.5


def test_ctas_of_the_sweep_have_whole_columns_where_cutting_costs_more() -> None:
    """120 columns, each of three steps with products: CTAs that cut them would fill windows again.

    Measured with TF32: 0.137 ms, and 0.249 with 132 CTAs.
    """
    geometry = Geometry(128, 160, (5, 5, 5), (1, 1, 1), (2, 2, 2))
    problem = Problem("forward", geometry, Arithmetic.TF32, True, True)
    kernel = SweepTile(1, 2, 16, 7, 4, 8, fill_pairs=2, positions=449)
    plan = sweep.WgmmaSweepPlan(problem, kernel, False, 132)

    def shares(plan: sweep.WgmmaSweepPlan, *size: int) -> tuple[int, float, int]:
        whole = max(plan.lines(8, size, size), key=lambda line: line.units)
        return plan.shares(size, size)(whole.rows)

    assert shares(plan, 3, 12, 24) == (120, 3, 0)
    assert plan.schedule(8, (3, 12, 24)).launches[-1].grid == 120
    assert shares(replace(plan, multiprocessors=60), 3, 12, 24) == (60, 6, 0)
    # Two columns each leave 30 of 90 idle.
    assert shares(replace(plan, multiprocessors=90), 3, 12, 24)[0] == 60
    # Long columns are cut where many would be idle.
    ctas, steps, warm = shares(replace(plan, multiprocessors=100), 48, 12, 24)
    assert (ctas, warm) == (100, 4) and 57 < steps < 60


def _split_gather(geometry: Geometry, size: int) -> sweep.WgmmaSweepPlan:
    problem = Problem("forward", geometry, Arithmetic.IEEE, False, False)
    return sweep.ranked(problem, 2, (size,) * 3, Gpu())[0][1]


def test_steps_of_split_products_divide_among_ctas() -> None:
    """On 2 x 40^3, six planes a step would leave three or four steps to a CTA."""
    plan = _split_gather(Geometry(64, 64, (3, 3, 3), padding=(1, 1, 1), groups=2), 40)
    assert plan.sweep.source_step <= 2


def test_chains_of_split_products_grow_with_the_sum() -> None:
    layers = {  # and taps of W that are chained
        Geometry(32, 32, (1, 1, 7), groups=2): 3,
        Geometry(64, 64, (3, 3, 3), groups=2): 3,
        Geometry(64, 64, (1, 3, 7), groups=2): 4,
        Geometry(128, 128, (5, 5, 7), groups=2): 7,
    }
    assert {g: _split_gather(g, 20).chain_taps for g in layers} == layers


def test_depthwise_layers_run_on_cuda_cores() -> None:
    for operation in OPERATIONS:
        plan = plan_for(operation, GEOMETRIES["depthwise"], (16, 16, 16), 2, torch.float32)
        assert isinstance(plan, depthwise.DepthwisePlan | depthwise.DepthwiseWgradPlan)


def test_threads_that_add_up_splits_take_two_each() -> None:
    geometry = Geometry(16, 16, _K3, (2, 2, 2), _P1)
    problem = Problem("grad_weight", geometry, Arithmetic.TF32)
    found = set()
    for _, plan in wgrad.ranked(problem, 4, (4, 8, 8), Gpu()):
        for launch in plan.schedule(4, (4, 8, 8)).launches:
            if launch.kernel.entry == "convt3d_reduce":
                numbers = [int(n) for n in launch.arguments if isinstance(n, np.int32)]
                bits, splits = numbers[0], max(numbers[1:])
                assert bits == 5 or splits <= 2 * 2**bits  # a warp of them at most
                assert bits == 0 or splits > 2**bits
                found.add(bits)
    assert len(found) > 2


def test_a_gradient_by_weight_plan_splits_its_taps() -> None:
    plan = plan_for(
        "grad_weight", Geometry(64, 64, (7, 7, 7)), (32, 32, 32), 2, torch.float32, gpu=AMPERE
    )
    assert isinstance(plan, ampere_wgrad.WgradPlan)
    assert plan.variants > 1
    assert plan.registers <= 128


def test_ranked_plans_are_many_and_distinct() -> None:
    problem = Problem("forward", GEOMETRIES["dense"], Arithmetic.TF32)
    found = ranked_plans(problem, 8, (64, 64, 64), Gpu())
    assert len(found) > 50
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("dtype", "capability", "reason"),
    [
        (torch.float64, (9, 0), "float64"),
        (torch.complex64, (9, 0), "complex64"),
        (torch.float32, (7, 5), r"7\.5 is below 8\.0"),
        (torch.float16, (8, 0), None),
        (torch.bfloat16, (12, 0), None),
    ],
)
def test_refusals(dtype: torch.dtype, capability: tuple[int, int], reason: str | None) -> None:
    got = refusal("forward", GEOMETRIES["dense"], dtype, capability)
    if reason is None:
        assert got is None
    else:
        assert got is not None
        assert re.search(reason, got)


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
def test_parameters_without_end_are_left_to_pytorch(name: str) -> None:
    dense = GEOMETRIES["dense"]
    for value in (1 << 17, 2**62):
        geometry = replace(dense, **{name: (1, value, 1)})
        got = refusal("forward", geometry, torch.float32, (9, 0))
        assert got is not None
        assert f"a {name} of {value} is left to PyTorch" in got
    assert refusal("forward", replace(dense, **{name: (1, 9, 1)}), torch.float32, (9, 0)) is None


@pytest.mark.sample
@pytest.mark.parametrize("operation", OPERATIONS)
def test_planning_is_a_small_part_of_a_first_call(operation: str) -> None:
    """A generous bound in processor time: ten times what it took when this was written.

    And what was chosen can be kept on disk.
    """
    seconds = []
    for shape in shapes.named().values():
        problem = Problem(operation, shape.geometry, Arithmetic.TF32)
        at = (problem, shape.batch, shape.input_size, Gpu())
        begin = time.process_time()
        first = ranked_plans(*at, first_only=True)[0]
        seconds.append(time.process_time() - begin)
        kept = codec.decode(json.loads(json.dumps(codec.encode(first))))
        assert kept == first and repr(kept) == repr(first)
    assert statistics.median(seconds) < 0.5
    assert max(seconds) < 2


@pytest.mark.sample(every=4)  # of all layers, operations and types
@pytest.mark.parametrize("arithmetic", [Arithmetic.BF16, Arithmetic.TF32, Arithmetic.IEEE])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "name", ["kb73_g4", "kb77", "nnunet_128_64", "n=8,in=16,out=3,size=64,k=4,s=2,p=1"]
)
def test_the_first_plan_leads_the_list(name: str, operation: str, arithmetic: Arithmetic) -> None:
    """What is not looked at where one plan is wanted could not have been the first."""
    (shape,) = shapes.select([name])
    problem = Problem(operation, shape.geometry, arithmetic)
    at = (problem, shape.batch, shape.input_size, Gpu())
    (first, *_), every = (ranked_plans(*at, first_only=only) for only in (True, False))
    assert first == every[0]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("arithmetic", [Arithmetic.BF16, Arithmetic.TF32, Arithmetic.IEEE])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "name", ["n=2,in=3,out=160,size=12x12x24,k=5,p=2", "n=2,in=96,out=48,size=16,k=3,s=2,p=1"]
)
def test_bounds_spare_no_plan_that_costs_least(
    name: str, operation: str, arithmetic: Arithmetic
) -> None:
    """A family that knows of a cost a little above its least one still finds that."""
    (shape,) = shapes.select([name])
    problem = Problem(operation, shape.geometry, arithmetic)
    order = families.order(problem)
    for ranked in dict.fromkeys(itertools.chain(*order.first, order.compared)):
        at = (problem, shape.batch, shape.input_size, Gpu())
        least = min((cost for cost, _ in ranked(*at, None)), default=math.inf)
        if least < math.inf:
            assert min(cost for cost, _ in ranked(*at, least * 1.001)) == least


def test_copies_of_few_positions_keep_few_threads_busy() -> None:
    """Threads share out the positions of a contiguous box; each copies all channels of its own."""
    fill = cycles.Fill(cycles.WORDS, vector=1, pieces=1, copies=64, words=64, row_sectors=64)
    (every, busiest), (twice, same) = (fill.cycles(1, n, threads=256) for n in (64, 128))
    assert same == busiest == 64 * cycles.WORDS.in_turn
    assert twice == 2 * every - 64 * 0.5  # a row's sectors once
    assert fill.cycles(1, 257, threads=256)[1] == 2 * busiest


@pytest.mark.parametrize(("warps", "factor"), [(4, 1.0), (6, 8 / 6), (8, 1.0), (9, 12 / 9)])
def test_warps_that_do_not_divide_by_four_wait_for_the_busiest_part(
    warps: int, factor: float
) -> None:
    problem = Problem("grad_weight", shapes.named()["kb61"].geometry, Arithmetic.IEEE)
    got, even = (cycles.step_cycles(problem, 27, False, warps, 4, 4, n) for n in (warps, 4))
    shared = warps * (5 * 4 + 1.2 * 2 * 27 * 4)
    assert got - 0.3 * shared == pytest.approx(factor * (even - 0.3 * shared))


@pytest.mark.parametrize(("kernel", "runs"), [(3, True), (5, True), (7, False)])
def test_products_by_warps_have_registers_for_the_addresses_of_all_positions(
    kernel: int, runs: bool
) -> None:
    (shape,) = shapes.select([f"n=4,in=16,out=16,size=24,k={kernel},s=2,p={kernel // 2},g=2"])
    problem = Problem("forward", shape.geometry, Arithmetic.BF16, True, True)
    found = [plan for _, plan in ndhwc.ranked(problem, 4, shape.input_size, Gpu(), None)]
    assert bool(found) == runs
    assert all(plan.by_warps for plan in found)


def test_gather_counts_the_phase_that_has_most_taps() -> None:
    """Of stride 2, taps 3: along an axis one phase has two taps, the other one."""
    (shape,) = shapes.select(["n=2,in=64,out=64,size=8,k=3,s=2,p=1"])
    problem = Problem("forward", shape.geometry, Arithmetic.IEEE)
    plans = [plan for _, plan in ampere_gather.ranked(problem, 2, shape.input_size, Gpu(), None)]
    most = {plan.tile.block0 > 0: gather_cost._most_taps(plan) for plan in plans}
    assert most.pop(False) == pytest.approx((4 / 3) ** 2)
    assert all(found == pytest.approx(4 / 3) for found in most.values())


def test_the_widest_line_of_col2im_is_found_among_the_first_tiles() -> None:
    drawn = random.Random(0)
    for _ in range(5000):
        units, tile, extent = drawn.randint(1, 80), drawn.randint(1, 20), drawn.randint(1, 90)
        low, high, vector = drawn.randint(-12, 4), drawn.randint(-3, 12), drawn.choice((1, 2, 4))
        plan = SimpleNamespace(
            plane=(None, SimpleNamespace(reach=(low, high))), tile=SimpleNamespace(vector=vector)
        )
        widths = [
            min(round_up(extent, vector), round_up(first + tile + high, vector))
            - max(0, first + low) // vector * vector
            for first in range(0, units, tile)
        ]
        found = col2im.Col2imPlan._width(plan, units, tile, extent)  # type: ignore[arg-type]
        assert found == max(vector, *widths)


@pytest.mark.parametrize("kernel", [(3, 3, 3), (5, 4, 7), (2, 9, 11), (32, 5, 6)])
def test_slices_that_a_tile_of_taps_touches(kernel: tuple[int, int, int]) -> None:
    """Counted tile by tile; the planner counts until where tiles begin repeats itself."""
    geometry = Geometry(24, 40, kernel, (2, 2, 2), (1, 1, 1))
    for arithmetic in (Arithmetic.TF32, Arithmetic.BF16):
        for plan in wgrad_candidates(Problem("grad_weight", geometry, arithmetic), Gpu()):
            per_slice, most = plan.taps[1] * plan.taps[2], 1
            for tile in range(plan.row_tiles):
                first = tile * plan.cta_blocks * 8
                last = min(first + plan.cta_blocks * 8, plan.octets) - 1
                begin = first // plan.channel_octets * plan.octet_taps
                end = (last // plan.channel_octets + 1) * plan.octet_taps
                end = min(end, plan.taps[0] * per_slice) - 1
                most = max(most, end // per_slice - begin // per_slice + 1)
            assert plan.tap_span == most, plan


def test_planning_of_a_huge_kernel_ends() -> None:
    """To count every tile of taps would take minutes."""
    geometry = Geometry(256, 256, (32, 32, 32), (16, 16, 16))
    began = time.process_time()
    plan_for("grad_weight", geometry, (3, 3, 3), 1, torch.float32)
    assert time.process_time() - began < 20
