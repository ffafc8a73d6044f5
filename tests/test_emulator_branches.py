"""Branches of kernels that small layers seldom take, on the emulated GPU.

Each case says by its plan that it takes the branch. A planted bug in that branch must turn it red.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from convt3d import reference
from convt3d.cuda.plan import ampere_gather, depthwise, ndhwc, patch
from convt3d.cuda.plan.wgrad import Fill
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.geometry import Geometry, Triple
from convt3d.precision import Arithmetic
from emulator import build
from emulator.gpu import EmulatedGpu, backend
from emulator.harness import EmulatorError, Flavour
from test_emulator_col2im import col2im_of
from test_emulator_kernels import (
    DTYPES,
    FLAT_TILES,
    LAYERS,
    Case,
    check,
    flat_tile,
    layer,
    wgmma_at,
)
from test_emulator_mutations import Mutation
from test_emulator_ndhwc import ndhwc_with
from test_emulator_phases import phases_with
from test_emulator_strided_dgrad import gradient_with
from test_emulator_wgrad import FEW, TOLERANCE, plan_for

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

Picker = Callable[[Problem, int, Triple, Gpu], Any]


Edit = Callable[[str, str], str]


@dataclass(frozen=True)
class Branch:
    """Calls that together take a branch, as their plans say, and bugs in it that they must show."""

    calls: tuple[Callable[[Edit | None], object], ...]
    bugs: tuple[Mutation, ...]


def taken(condition: bool) -> None:
    """What a plan must be for a call to take the branch; no error that a bug could cause."""
    if not condition:
        raise LookupError("the plan does not take the branch")


def call(case: Case, plan: Picker, **options: Any) -> Callable[[Edit | None], object]:
    """``plan`` asserts that what it picks takes the branch; ``options`` are of the launches."""
    return lambda edit: check(case, plan, edit=edit, **options)


# ---------------------------------------------------------------- depthwise/conv.cu: segments of D

LAYERS["depthwise, depth 41"] = (layer((6, 6), (3, 2, 2), groups=6), (41, 2, 3))


def marched(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
    """The first plan that marches; its last segment of D is the shortest."""
    _, plan = depthwise.ranked(problem, batch, size, gpu)[0]
    depth = problem.geometry.output_size(size)[0] if problem.forward else size[0]
    arguments = plan.schedule(batch, size).launches[0].arguments
    numbers = [int(n) for n in arguments if isinstance(n, np.integer)]
    steps = numbers[8] if problem.operation == "grad_weight" else numbers[9]
    taken(depth > 2 * steps and depth % steps > 0)
    return plan


def segments(file: str, extent: str, index: int | None = None) -> Mutation:
    """The last segment is forgotten."""
    pattern = rf"\({re.escape(extent)} \+ a\.steps - 1\) / a\.steps"
    return Mutation(file, pattern, f"{extent} / a.steps", index)


# ---------------------------------------------------------------- sweep/kernel.cu: pieces of lines


def in_pieces(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
    """Lines of rows are pieces of four units."""
    plan = wgmma_at(0.0)(problem, batch, size, gpu)
    taken(size[2] == 8 and plan.plane[1].units(8) == 8)
    return replace(plan, units2=4)


# ---------------------------------------------------------------- packed weights, biases of groups

LAYERS["k3 s2, groups of 12"] = (layer((32, 24), 3, 2, 1, groups=2), (2, 3, 5))


def every_second(name: str, plan: Picker) -> Callable[[Edit | None], object]:
    """Forward with every second out channel of a weight, whose taps lie together."""
    geometry, size = LAYERS[name]

    def run(edit: Edit | None) -> None:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(2, geometry.in_channels, *size, generator=generator)
        first, out, *kernel = geometry.weight_size
        wide = torch.randn(first, 2 * out, *kernel, generator=generator)
        w = wide[:, ::2]
        with EmulatedGpu([x, wide], plan, Arithmetic.TF32, edit):
            got = backend.forward(x, w, None, geometry, False)
        want = reference.forward(x, w, None, geometry)
        assert (got.double() - want).norm() / want.norm() <= TOLERANCE[Arithmetic.TF32]

    return run


# ---------------------------------------------------------------- kernel == stride, split


def split_flat(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
    plan = flat_tile(FLAT_TILES[0])(problem, batch, size, gpu)
    taken(plan.tile.splits > 1 and plan.schedule(batch, size).launches[-1].dependent)
    return plan


LAYERS["k222, 64 channels"] = (layer((64, 8), 2, 2), (3, 2, 8))


def split_wgmma_flat(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
    tile = patch.Tile(2, 1, 64, 2, 2, False, splits=2, fold=8)
    plan = patch.WgmmaPatchPlan(problem, tile, FEW)
    taken(plan.schedule(batch, size).launches[-1].dependent)
    return plan


def no_wait(file: str, index: int = 0) -> Mutation:
    """What the launch before writes is not waited for."""
    return Mutation(file, r"\bgrid_dependency_wait\(\);", ";", index)


# ---------------------------------------------------------------- col2im/store.cuh

LAYERS["k4 s2, three channels"] = (layer((16, 3), 4, 2, 1), (2, 3, 6))


def pairs_of_outputs(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
    """Lines of pairs, which would be vectors were they not channels_last."""
    plan = col2im_of(3, 4)(problem, batch, size, gpu)
    taken(problem.target_channels_last and plan.plane[1].stride == 2)
    taken(problem.geometry.output_size(size)[2] % 2 == 0)
    return plan


# ---------------------------------------------------------------- col2im/walk.cuh

LAYERS["k4 s2, one channel, tall"] = (layer((18, 1), 4, 2, 1), (2, 40, 5))


def more_tiles_along_h(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
    """Tiles of H that the extent of W would not make."""
    plan = col2im_of(6, 4)(problem, batch, size, gpu)
    outputs = problem.geometry.output_size(size)
    taken(outputs[1] > 6 * outputs[2])
    return plan


# ---------------------------------------------------------------- wgrad/kernel.cu


def weighed(
    case: tuple[Geometry, Triple, Arithmetic, int, Fill, dict[str, Any]],
    gpu: Gpu = FEW,
    splits: tuple[int, int] | None = None,
    cluster: int = 1,
    bias: bool = False,
) -> Callable[[Edit | None], object]:
    """A gradient by weight whose source comes as told, split as told."""
    geometry, size, arithmetic, stages, fill, wanted = case

    def run(edit: Edit | None) -> None:
        problem = Problem("grad_weight", geometry, arithmetic, bias=bias)
        plan = plan_for(problem, size, stages, fill, wanted)
        plan = replace(plan, gpu=gpu, cluster=cluster)
        if splits is not None:
            reduce = plan.schedule(2, size).launches[1]
            numbers = tuple(int(n) for n in reduce.arguments if isinstance(n, np.integer))
            taken(numbers[1:] == splits)
        generator = torch.Generator().manual_seed(3)
        dtype = DTYPES[arithmetic]
        x = torch.randn(2, geometry.in_channels, *size, generator=generator).to(dtype)
        output = (2, geometry.out_channels, *geometry.output_size(size))
        gy = torch.randn(output, generator=generator).to(dtype)
        with EmulatedGpu([x, gy], lambda *_: plan, arithmetic, edit) as emulated:
            if bias:
                got, by_bias = backend.grad_weight_bias(x, gy, geometry, False)
                sums = reference.grad_bias(gy)
                assert (by_bias.double() - sums).norm() / sums.norm() <= 1e-6
            else:
                got = backend.grad_weight(x, gy, geometry, False)
        taken(dict(emulated.launches[0].macros)["CONVT3D_CLUSTER"] == str(cluster))
        want = reference.grad_weight(x, gy, geometry)
        assert (got.double() - want).norm() / want.norm() <= TOLERANCE[arithmetic]

    return run


def joined(depth: int) -> tuple[Geometry, Triple, Arithmetic, int, Fill, dict[str, Any]]:
    """Planes of a column fill both stages, then those of the next one begin in either."""
    return (layer((8, 16), 3, 2, 1), (depth, 4, 32), Arithmetic.BF16, 2, Fill.JOINED, JOINED)


CLUSTER: dict[str, Any] = {"column_taps": False, "runs": False, "phases": False, "row_tiles": 1}
CLUSTER |= {"channel_tile_n": 16}
JOINED: dict[str, Any] = {"runs": True, "column_taps": True, "channel_tile_m": 16}
BIAS: dict[str, Any] = {"column_taps": False}
ROW_TILES: dict[str, Any] = {"row_tiles": 2, "blocks": 1, "channel_tile_n": 16, "runs": True}

# ---------------------------------------------------------------- offsets of more than 32 bits


def beyond(channels: int, plan: Picker) -> Callable[[Edit | None], object]:
    """The last blocks of a forward call whose output has more than 2^31 elements, or 2^32.

    Of input and output only the last corner is ever touched.
    """
    geometry, size = layer((8, channels), 3, 2, 1, 1), (162, 162, 162)
    corner = (slice(None), slice(None), *[slice(-2, None)] * 3)

    def run(edit: Edit | None) -> None:
        try:
            torch.empty(1, channels, *geometry.output_size(size), dtype=torch.bfloat16)
        except RuntimeError:
            pytest.skip("this machine has not so much address space for a tensor")
        generator = torch.Generator().manual_seed(5)
        x = torch.zeros(1, *size, 8, dtype=torch.bfloat16).permute(0, 4, 1, 2, 3)
        x[corner] = torch.randn(1, 8, 2, 2, 2, generator=generator).bfloat16()
        w = torch.randn(geometry.weight_size, generator=generator).bfloat16()
        w = w.contiguous(memory_format=torch.channels_last_3d)
        options = {"most_blocks": 32, "check_races": False}
        with EmulatedGpu([x, w], plan, Arithmetic.BF16, edit, options):
            y = backend.forward(x, w, None, geometry, True)
        taken(y.numel() > 2**31 and (channels <= 64 or y.numel() > 2**32))
        got = y[corner].double()
        want = reference.forward(x[corner].contiguous(), w, None, geometry)[corner]
        written = got != 0
        assert written.sum() >= channels
        assert ((got - want)[written].abs() <= 0.02 * want.abs()[written] + 0.02).all()

    return run


def gathered(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
    return ampere_gather.ranked(problem, batch, size, gpu)[0][1]


def one_item_each(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
    """As many multiprocessors as items, so that the last blocks have the last ones."""
    many, target = replace(gpu, multiprocessors=10**6), problem.geometry.output_size(size)
    plans = ndhwc.candidates(problem, batch, target, many)
    return min(plans, key=lambda plan: plan.cost(batch, target))


BRANCHES = {
    "gather, channels_last: offsets of more than 32 bits": Branch(
        (beyond(64, gathered),),
        (
            Mutation(
                "ampere/gather/kernel.cu",
                r"int64_t\((s\.position \+ slot_offset\(slot0, slot2\))\) \* all_channels",
                r"(\1) * int(all_channels)",
            ),
        ),
    ),
    "warpgroups, channels_last: offsets of more than 32 bits": Branch(
        (beyond(128, one_item_each),),
        (
            Mutation("ndhwc/kernel.cu", r"uint32_t\(position >> 32\)", "0u"),
            Mutation("ndhwc/kernel.cu", r"int64_t (position = work\.sample)", r"int \1"),
        ),
    ),
    "kernel == stride: partial sums are waited for": Branch(
        (call(Case("k222", "grad_input", Arithmetic.TF32), split_flat),),
        (no_wait("ampere/patch/kernel.cu"),),
    ),
    "kernel == stride, warpgroups: partial sums are waited for": Branch(
        (call(Case("k222, 64 channels", "grad_input", Arithmetic.TF32), split_wgmma_flat),),
        (no_wait("patch/kernel.cu"),),
    ),
    "kernel == stride, warpgroups: as many partial sums as there are": Branch(
        (
            call(
                Case("k222, 64 channels", "grad_input", Arithmetic.TF32),
                split_wgmma_flat,
                flavour=Flavour.SANITIZED,  # one too many is some other local variable
            ),
        ),
        (
            Mutation(
                "patch/kernel.cu", r"(int split = 0; split) < (splits; \+\+split\) \{)", r"\1 <= \2"
            ),
        ),
    ),
    "gradient by input, warpgroups: packed weights are waited for": Branch(
        (
            call(
                Case("gradient, k3 s2", "grad_input", Arithmetic.BF16),
                gradient_with(whole_boxes=True, resident_weights=True),
            ),
        ),
        (no_wait("phases/kernel.cu"),),
    ),
    "gradient by weight: sums of the gradient by bias are waited for": Branch(
        (
            weighed(
                (layer((16, 16), 2, 2), (2, 4, 32), Arithmetic.TF32, 2, Fill.SWIZZLED, BIAS),
                bias=True,
            ),
        ),
        (no_wait("wgrad/kernel.cu", 1),),
    ),
    "gradient by weight: no block of a cluster leaves too early": Branch(
        (
            weighed(
                (layer((16, 16), 2, 2), (4, 4, 8), Arithmetic.BF16, 2, Fill.LINES, CLUSTER),
                replace(FEW, multiprocessors=4),
                cluster=2,
            ),
        ),
        (
            Mutation(
                "wgrad/kernel.cu", r"(!consumer\) cluster_sync\(\);\s*)cluster_sync\(\);", r"\1"
            ),
        ),
    ),
    "packed weights: out channels that do not follow one another": Branch(
        (every_second("k4 s2, small volume", phases_with(phased=2)),),
        (Mutation("phases/pack.cu", r"p\.stride_out == taps && ", ""),),
    ),
    "channels_last: the bias of a group that is no whole tile": Branch(
        (
            call(
                Case("k3 s2, groups of 12", "forward", Arithmetic.TF32, True, True),
                ndhwc_with(phased=2),
            ),
        ),
        tuple(
            Mutation("ndhwc/kernel.cu", r"a\.bias \+ work\.group \* Config::target_channels", wrong)
            for wrong in ("a.bias", "a.bias + work.group * Config::column_tile")
        ),
    ),
    "warpgroups: no pair of positions crosses the end of a piece": Branch(
        (call(Case("k3 p1, rows of 8", "forward", Arithmetic.F16), in_pieces),),
        (
            Mutation("sweep/kernel.cu", r"\(min_shift % 2 == 0 \|\| zeros\)", "true"),
            Mutation("sweep/kernel.cu", r"space\.pieces == 1 &&\s*space\.pitch2[^;]*;", "true;"),
        ),
    ),
    "gradient by weight: a new column waits for the stage before": Branch(
        (weighed(joined(4)), weighed(joined(5))),
        tuple(
            Mutation("wgrad/kernel.cu", r"at\.phase \^ around\)", wrong)
            for wrong in ("at.phase)", "at.phase ^ 1)", "at.phase ^ !around)")
        ),
    ),
    "gradient by weight: more splits of full row tiles than of the last": Branch(
        (
            weighed(
                (layer((16, 16), 3), (4, 5, 8), Arithmetic.BF16, 2, Fill.RUNS, ROW_TILES),
                replace(FEW, multiprocessors=15),
                (9, 6),
            ),
        ),
        (
            Mutation(
                "wgrad/kernel.cu",
                r"const int most = max\([^;]*;",
                "const int most = splits_last;",
            ),
        ),
    ),
    "all taps at once, channels_last: outputs of a line are no vector": Branch(
        (
            call(
                Case("k4 s2, three channels", "forward", Arithmetic.TF32, True, True),
                pairs_of_outputs,
            ),
        ),
        (
            Mutation("col2im/kernel.cu", r"(rows_are_vectors = !last) &&", r"\1 ||"),
            Mutation("col2im/kernel.cu", r"(rows_are_vectors = )!last &&", r"\1"),
        ),
    ),
    "all taps at once: more tiles along H than along W": Branch(
        (call(Case("k4 s2, one channel, tall", "forward", Arithmetic.TF32), more_tiles_along_h),),
        (
            Mutation(
                "col2im/kernel.cu", r"(tiles1 = \(a\.target\.extent)\[1\]( \+ unit1)", r"\1[2]\2"
            ),
        ),
    ),
    "depthwise: the last segment of D": Branch(
        (call(Case("depthwise, depth 41", "forward", Arithmetic.TF32), marched),),
        (
            segments("depthwise/conv.cu", "a.units0", 0),
            segments("depthwise/conv.cu", "a.units0", 1),
        ),
    ),
    "depthwise, gradient by weight: the last segment of D": Branch(
        (call(Case("depthwise, depth 41", "grad_weight", Arithmetic.F16), marched),),
        (segments("depthwise/wgrad.cu", "a.source_extent[0]"),),
    ),
}


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("name", BRANCHES)
def test_branch(name: str) -> None:
    for run in BRANCHES[name].calls:
        run(None)


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("name", BRANCHES)
def test_a_bug_in_the_branch_is_seen(name: str) -> None:
    for bug in BRANCHES[name].bugs:
        assert any(fails(run, bug) for run in BRANCHES[name].calls), bug


def fails(run: Callable[[Edit | None], object], bug: Mutation) -> bool:
    """Whether a call comes out wrong with a bug in its kernel."""
    try:
        run(bug)
    except (EmulatorError, AssertionError) as error:
        assert "no longer contains" not in str(error)
        return True
    return False
