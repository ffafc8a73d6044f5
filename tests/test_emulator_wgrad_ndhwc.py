"""The gradient by weight of channels_last tensors, on the emulated GPU, against float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from convt3d import reference
from convt3d.cuda import backend
from convt3d.cuda.plan import ranked_plans, wgrad_ndhwc
from convt3d.cuda.plan.position_box import smallest_box
from convt3d.cuda.plan.wgrad_ndhwc import Tile, WgmmaWgradNdhwcPlan
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.geometry import Geometry, Triple
from convt3d.precision import Arithmetic
from emulator import build
from emulator.gpu import EmulatedGpu
from test_emulator_kernels import DTYPES, layer, sampled

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

#: Few multiprocessors, whose CTAs fill their stages more than once.
FEW = replace(Gpu(), multiprocessors=3)
TOLERANCE = {Arithmetic.F16: 5e-4, Arithmetic.BF16: 3e-3, Arithmetic.TF32: 5e-4}
F16, BF16, TF32 = Arithmetic.F16, Arithmetic.BF16, Arithmetic.TF32

#: Layer, input size, batch, arithmetic, and the tile.
CASES: list[tuple[Geometry, Triple, int, Arithmetic, Tile]] = [
    # Odd sizes; tap groups that do not divide; a step reaches out of x along every axis.
    (layer((64, 64), 3, 1, 1), (3, 5, 7), 2, BF16, Tile(False, (1, 2), 1, 256, 32, 2)),
    # Channels that are no whole atoms; atoms of 32 channels; two tiles of x.
    (layer((72, 40), (2, 1, 3)), (2, 5, 9), 1, F16, Tile(False, (1, 2), 1, 128, 32, 3)),
    (layer((136, 96), (1, 3, 1), 1, (0, 1, 0)), (2, 4, 6), 2, BF16,
     Tile(False, (2, 1), 1, 192, 64, 2)),
    # Rows of M are taps; partly filled atoms of x; both atoms of 32 channels.
    (layer((32, 32), 3, 1, 1), (2, 3, 8), 2, BF16, Tile(True, (2, 1), 2, 32, 32, 2)),
    (layer((80, 24), (3, 1, 2), 2, (1, 0, 0)), (3, 4, 5), 2, F16, Tile(True, (2, 1), 1, 80, 32, 2)),
    (layer((160, 64), 1), (3, 4, 5), 2, BF16, Tile(True, (2, 1), 1, 160, 64, 2)),
    # Strides, dilation, padding beyond an extent, output padding; strides of three, by axis.
    (layer((64, 64), 3, 2, 1, 1), (3, 4, 5), 2, BF16, Tile(False, (1, 3), 1, 192, 32, 2)),
    (layer((64, 32), (1, 2, 3), (1, 2, 3), (0, 1, 2), 0, (1, 3, 2)), (2, 5, 6), 1, F16,
     Tile(True, (2, 1), 1, 64, 32, 2)),
    (layer((64, 64), 5, 1, 3), (3, 4, 6), 1, BF16, Tile(True, (2, 1), 4, 64, 32, 2)),
    (layer((48, 64), 3, 1, 2, 0, 2), (2, 1, 17), 3, BF16, Tile(True, (3, 1), 1, 48, 64, 2)),
    # Groups: of whole atoms, and of fewer channels than an atom.
    (layer((128, 128), (1, 3, 3), 1, (0, 1, 1), groups=2), (2, 4, 4), 1, BF16,
     Tile(False, (1, 2), 1, 128, 32, 2)),
    (layer((48, 72), 2, 2, groups=3), (2, 3, 6), 2, F16, Tile(True, (2, 1), 1, 16, 32, 2)),
    # kernel == stride, one tap; samples in a box.
    (layer((8, 8), 2, 2), (1, 3, 3), 5, BF16, Tile(True, (2, 1), 1, 16, 64, 4)),
    (layer((200, 72), 1), (1, 1, 1), 40, F16, Tile(False, (3, 1), 1, 128, 32, 2)),
    # TF32: partly filled atoms, two tiles of x, three warpgroups, groups, strides, dilation.
    (layer((64, 64), 3, 1, 1), (3, 5, 7), 2, TF32, Tile(True, (2, 1), 4, 64, 16, 2)),
    (layer((80, 36), (3, 1, 2), 2, (1, 0, 0)), (3, 4, 5), 2, TF32,
     Tile(True, (2, 1), 1, 48, 32, 3)),
    (layer((32, 64), (1, 2, 3), (1, 2, 3), (0, 1, 2), 0, (1, 3, 2)), (2, 5, 6), 1, TF32,
     Tile(True, (3, 1), 1, 32, 64, 2)),
    (layer((24, 36), 3, 2, 1, 1, groups=3), (2, 3, 9), 2, TF32, Tile(True, (2, 1), 2, 16, 32, 2)),
    (layer((4, 4), 1), (3, 4, 5), 3, TF32, Tile(True, (2, 1), 1, 16, 16, 4)),
    # Taps along H share boxes: columns, rows of one and of two atoms, dilated; W does not fit.
    (layer((64, 64), 3, 1, 1), (2, 8, 13), 2, BF16, Tile(False, (1, 3), 1, 192, 64, 2, 4)),
    (layer((136, 40), (1, 3, 2), 1, (0, 2, 0), 0, (1, 2, 1)), (1, 12, 16), 1, F16,
     Tile(False, (2, 1), 1, 192, 32, 3, 4)),
    (layer((32, 32), 3, 1, 1), (2, 8, 10), 1, BF16, Tile(True, (3, 1), 5, 32, 64, 2, 8)),
    (layer((48, 64), (2, 3, 1), (2, 1, 2), (0, 1, 0)), (2, 8, 5), 2, F16,
     Tile(True, (3, 1), 1, 48, 32, 2, 4)),
    (layer((64, 32), (2, 2, 1)), (2, 8, 9), 1, F16, Tile(False, (1, 2), 1, 64, 64, 2, 8)),
    (layer((32, 64), 3, 1, 1), (2, 4, 11), 2, TF32, Tile(True, (2, 1), 3, 32, 32, 2, 4)),
    (layer((48, 36), (1, 3, 3), 1, (0, 1, 1), groups=3), (2, 16, 9), 1, TF32,
     Tile(True, (3, 1), 1, 16, 64, 2, 8)),
    # Clusters: of more CTAs than steps, of lines that they cannot share evenly, in groups, in TF32.
    (layer((64, 64), 3, 1, 1), (3, 5, 7), 2, BF16, Tile(False, (1, 2), 1, 256, 32, 2, 0, 3)),
    (layer((136, 96), (1, 3, 1), 1, (0, 1, 0)), (2, 4, 6), 2, F16,
     Tile(False, (2, 1), 1, 192, 64, 2, 0, 8)),
    (layer((80, 24), (3, 1, 2), 2, (1, 0, 0)), (3, 4, 5), 2, BF16,
     Tile(True, (2, 1), 1, 80, 32, 2, 0, 7)),
    (layer((48, 72), 2, 2, groups=3), (2, 3, 6), 2, F16,
     Tile(True, (2, 1), 1, 16, 32, 2, 0, 2)),
    (layer((48, 36), (1, 3, 3), 1, (0, 1, 1), groups=3), (2, 16, 9), 1, TF32,
     Tile(True, (3, 1), 1, 16, 64, 2, 8, 4)),
]  # fmt: skip


Layouts = tuple[bool, bool]


def values(
    geometry: Geometry,
    size: Triple,
    batch: int,
    arithmetic: Arithmetic,
    layouts: Layouts = (True, True),
) -> Any:
    """x and the output gradient, channels_last where the layouts say so."""
    generator = torch.Generator().manual_seed(3)
    output = geometry.output_size(size)
    return (
        torch.randn((batch, channels, *extents), generator=generator)
        .to(DTYPES[arithmetic])
        .contiguous(memory_format=torch.channels_last_3d if last else torch.contiguous_format)
        for channels, extents, last in zip(
            (geometry.in_channels, geometry.out_channels), (size, output), layouts, strict=True
        )
    )


def plan_of(
    geometry: Geometry,
    arithmetic: Arithmetic,
    tile: Tile,
    gpu: Gpu = FEW,
    layouts: Layouts = (True, True),
) -> WgmmaWgradNdhwcPlan:
    last = Problem("grad_weight", geometry, arithmetic, True, True)
    assert wgrad_ndhwc.refusal(last, gpu) is None
    return WgmmaWgradNdhwcPlan(Problem("grad_weight", geometry, arithmetic, *layouts), tile, gpu)


def run(plan: WgmmaWgradNdhwcPlan, x: Any, gy: Any, last: bool = True, **options: Any) -> Any:
    """The gradient and the emulated GPU, whose outputs and workspaces start as NaN."""
    p = plan.problem
    with EmulatedGpu([x, gy], lambda *_: plan, p.arithmetic, **options) as gpu:
        got = backend.grad_weight(x, gy, p.geometry, last)
    copies = 2 - p.source_channels_last - p.target_channels_last
    files = [spec.file for spec in gpu.launches]
    assert files[:copies] == ["layout/channels_last.cu"] * copies
    if files[-1] == "layout/channels_last.cu":  # of a contiguous weight
        assert files.pop(-1) and not last and len(files) == copies + 1
    assert set(files[copies:]) == {"wgrad_ndhwc/kernel.cu"}
    return got, gpu


def check(plan: WgmmaWgradNdhwcPlan, size: Triple, batch: int, last: bool = True) -> EmulatedGpu:
    p = plan.problem
    layouts = p.source_channels_last, p.target_channels_last
    x, gy = values(p.geometry, size, batch, p.arithmetic, layouts)
    got, gpu = run(plan, x, gy, last)
    want = reference.grad_weight(x, gy, p.geometry)
    assert (got.double() - want).norm() / want.norm() <= TOLERANCE[p.arithmetic]
    return gpu


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    "case", sampled([(case,) for case in CASES], 3), ids=lambda c: f"{c[0].label} {c[3].value}"
)
def test_against_float64(case: tuple[Geometry, Triple, int, Arithmetic, Tile]) -> None:
    geometry, size, batch, arithmetic, tile = case
    # Both layouts of the weight take turns.
    check(plan_of(geometry, arithmetic, tile), size, batch, tile.taps_on_m)


@pytest.mark.sample
@pytest.mark.parametrize("layouts", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(
    "case",
    sampled([(CASES[n],) for n in (0, 1, 3, 7, 15, 23)], 5),
    ids=lambda c: f"{c[0].label} {c[3].value}",
)
def test_contiguous_tensors_are_copied(
    case: tuple[Geometry, Triple, int, Arithmetic, Tile], layouts: Layouts
) -> None:
    geometry, size, batch, arithmetic, tile = case
    check(plan_of(geometry, arithmetic, tile, layouts=layouts), size, batch, layouts[0])


@pytest.mark.parametrize("multiprocessors", [1, 9])
def test_splits_are_added_in_order(multiprocessors: int) -> None:
    gpu = replace(Gpu(), multiprocessors=multiprocessors)
    plan = plan_of(layer((64, 64), 1), BF16, Tile(False, (1, 2), 1, 64, 32, 2), gpu)
    launches = check(plan, (3, 8, 32), 1).launches
    assert len(launches) == (1 if multiprocessors == 1 else 2)


def test_clusters_where_work_tiles_are_few() -> None:
    """A channels_last weight of many steps is shared by clusters, a contiguous one is not."""
    problem = Problem("grad_weight", layer((256, 256), 3, 1, 1), BF16, True, True)
    best = wgrad_ndhwc.ranked(problem, 2, (10, 12, 14), Gpu())[0][1]
    assert best.tile.cluster > 1
    (launch,) = best.schedule(2, (10, 12, 14)).launches
    assert launch.grid == best.tiles * best.tile.cluster
    contiguous = replace(problem, source_channels_last=False, target_channels_last=False)
    plans = [plan for _, plan in wgrad_ndhwc.ranked(contiguous, 2, (10, 12, 14), Gpu())]
    assert plans and all(plan.tile.cluster == 1 for plan in plans)


@pytest.mark.parametrize("arithmetic", [BF16, TF32], ids=lambda a: a.value)
@pytest.mark.parametrize(
    ("kernel", "multiprocessors", "copied"),
    [
        (3, 9, True),
        ((1, 2, 4), 1, True),
        pytest.param(5, 9, False, marks=pytest.mark.more),
        (3, 132, False),
    ],
)
def test_contiguous_weights_are_copied_from_whole_sums(
    arithmetic: Arithmetic, kernel: Any, multiprocessors: int, copied: bool
) -> None:
    """Taps that are no whole vectors, a vector, and more than a tile has; sums that are split."""
    gpu = replace(Gpu(), multiprocessors=multiprocessors)
    tile = Tile(True, (2, 1), 1, 32, 32, 2)
    plan = plan_of(layer((40, 72), kernel, 1, 1), arithmetic, tile, gpu, (False, False))
    launches = check(plan, (4, 7, 8), 1, False).launches
    assert (launches[-1].file == "layout/channels_last.cu") == copied


def test_the_copy_of_whole_sums_is_counted() -> None:
    """1024 to 512 channels fill a GPU without splits: the copy costs less than a second pass."""
    geometry = layer((1024, 512), 4, 2, 1)
    plan = plan_of(geometry, BF16, Tile(True, (2, 1), 1, 128, 64, 4), Gpu(), (False, False))

    class InTwoPasses(WgmmaWgradNdhwcPlan):
        copies_sums = False  # type: ignore[assignment]

    by_copy, in_two = plan, InTwoPasses(plan.problem, plan.tile, plan.gpu)
    assert not in_two.schedule(16, (4, 4, 4)).on_weights
    assert by_copy.schedule(16, (4, 4, 4)).on_weights
    least = 2 * 2 * math.prod(geometry.weight_size) / 16 / Gpu().multiprocessors
    assert in_two.cost(16, (4, 4, 4)) > by_copy.cost(16, (4, 4, 4)) > least


@pytest.mark.parametrize(
    ("arithmetic", "multiprocessors", "blocks"),
    [(BF16, 1, 15 * 5), (BF16, 30, 15 * 8), (TF32, 1, 6 * 5), (TF32, 30, 6 * 19)],
    ids=lambda value: str(getattr(value, "value", value)),
)
def test_runs_of_taps(arithmetic: Arithmetic, multiprocessors: int, blocks: int) -> None:
    """A contiguous weight of 147 taps: more than a CTA takes, and parts that fill the GPU."""
    geometry = layer((24, 40), (3, 7, 7), 1, (1, 3, 3))
    tile = Tile(True, (2, 1), 1, 32, 32, 2)
    if arithmetic is TF32:
        geometry = layer((12, 36), (3, 7, 7), 1, (1, 3, 3), groups=3)
        tile = replace(tile, columns=16)
    gpu = replace(Gpu(), multiprocessors=multiprocessors)
    plan = plan_of(geometry, arithmetic, tile, gpu, (False, False))
    check(plan, (2, 3, 9), 1, False)
    assert plan.schedule(1, (2, 3, 9)).launches[-1].grid == blocks


def test_long_sums_are_split() -> None:
    plan = plan_of(layer((64, 64), 1), BF16, Tile(False, (1, 2), 1, 64, 64, 2), FEW)
    extents, box = (4, 16, 64, 64), (1, 1, 1, 64)
    assert plan.splits(extents, box) >= 4 * 16 * 64 * 4 / 2048


@pytest.mark.parametrize("arithmetic", [BF16, TF32], ids=lambda a: a.value)
@pytest.mark.parametrize("lines", [0, 4])
def test_infinities_beyond_x_do_not_matter(arithmetic: Arithmetic, lines: int) -> None:
    """Positions of a box outside of x are zero, and so must be the gradient that they meet."""
    geometry = layer((16, 16), 3, 1, 1)
    tile = Tile(True, (3, 1), 1, 16, 32, 2, lines)
    plan = plan_of(geometry, arithmetic, tile)
    size = (3, 4 if lines else 3, 11)
    box = plan.box(1, size)
    assert box is not None
    assert any(n % b for n, b in zip((1, *size), box, strict=True))
    x, gy = values(geometry, size, 1, arithmetic)
    x[:, :, :, :, -1] = 0  # so that taps which meet the last position alone would see inf * 0
    gy[:, :, :, :, -1] = float("inf")
    got, _ = run(plan, x, gy)
    want = reference.grad_weight(x, gy, geometry)
    assert torch.equal(torch.isfinite(got), torch.isfinite(want))
    there = torch.isfinite(want)
    assert there.any() and not there.all()
    assert (got.double() - want)[there].norm() / want[there].norm() <= TOLERANCE[arithmetic]


def split_in_three(where: float) -> Callable[..., Any]:
    """Picks a plan of three splits and two stages, where taps share boxes if extents suit."""

    def pick(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        plans = list(wgrad_ndhwc.candidates(problem, gpu))
        suited = [plan for plan in plans if plan.tile.lines and plan.box(batch, size) is not None]
        suited = suited or [plan for plan in plans if not plan.tile.lines]
        plan = suited[int(where * (len(suited) - 1))]
        few = replace(gpu, multiprocessors=3 * plan.tiles)
        return replace(plan, tile=replace(plan.tile, stages=2), gpu=few)

    return pick


def clustered(cluster: int) -> Callable[..., Any]:
    """Picks the first of these plans whose sums are whole: of a CTA, or of a cluster."""

    def pick(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        plan = split_in_three(0.0)(problem, batch, size, gpu)
        one = replace(plan.gpu, multiprocessors=1)
        return replace(plan, tile=replace(plan.tile, cluster=cluster), gpu=one)

    return pick


def every_tile(gpu: Gpu = FEW) -> Iterator[tuple[WgmmaWgradNdhwcPlan, int, Triple]]:
    """Plans of each shape in the planner's list, with a layer that it suits."""
    seen = set()
    layers = ((64, 64), (320, 64), (32, 32), (96, 48), (256, 128))
    for channels, arithmetic in itertools.product(layers, (BF16, TF32)):
        problem = Problem("grad_weight", layer(channels, 3, 1, 1), arithmetic, True, True)
        for plan in wgrad_ndhwc.candidates(problem, gpu):
            t = plan.tile
            key = (arithmetic, t.lines, t.taps_on_m, t.consumers, t.blocks, t.columns, t.positions)
            if key not in seen:
                seen.add(key)
                yield plan, 2, (6, 8, 9)


@pytest.mark.more
@pytest.mark.parametrize(
    "plan", [plan for plan, *_ in every_tile()], ids=lambda plan: str(plan.describe()["warps"])
)
def test_every_tile(plan: WgmmaWgradNdhwcPlan) -> None:
    check(plan, (2, 8, 9), 1)


def test_boxes_hold_every_position() -> None:
    for extents in (
        (1, 1, 1, 1),
        (2, 20, 20, 20),
        (1, 66, 66, 130),
        (3, 131, 1, 257),
        (70, 4, 4, 4),
    ):
        for positions in (32, 64, 128):
            for stride in ((1, 1, 1), (2, 2, 2), (8, 8, 8)):
                n, d, h, w = smallest_box(extents, positions, stride)
                assert n * d * h * w <= positions
                assert all((b - 1) * s < 256 for b, s in zip((d, h, w), stride, strict=True))
    assert math.prod(smallest_box((2, 20, 20, 20), 64, (1, 1, 1))) == 64


def test_taps_share_boxes_where_extents_suit() -> None:
    plan = plan_of(layer((64, 64), 3, 1, 1), BF16, Tile(False, (1, 3), 1, 192, 64, 2, 4))
    assert plan.box(1, (4, 12, 20)) == (1, 1, 4, 16)
    assert plan.box(1, (4, 7, 20)) is None
    macros = dict(plan.schedule(1, (4, 7, 20)).launches[0].kernel.macros)
    assert macros["CONVT3D_SHARES"] == "0" and macros["CONVT3D_TARGET_ROWS"] == "64"
    check(plan, (2, 7, 9), 1)
    for one, *_ in every_tile():
        if one.tile.lines:
            assert one.apart.tile.stages >= 2 and sum(one.apart.boxes) <= 32


def test_refusals() -> None:
    def reason(problem: Problem, gpu: Gpu = FEW) -> str:
        return str(wgrad_ndhwc.refusal(problem, gpu))

    problem = Problem("grad_weight", layer((64, 64), 3), BF16, True, True)
    assert reason(problem) == "None"
    assert "9.0" in reason(problem, replace(Gpu(), capability=(8, 6)))
    assert "alone" in reason(replace(problem, operation="forward"))
    assert "arithmetics" in reason(replace(problem, arithmetic=Arithmetic.IEEE))
    contiguous = replace(problem, source_channels_last=False)
    assert reason(contiguous) == "None"
    assert "not copied" in reason(replace(contiguous, geometry=layer((8, 64), 3)))
    assert "16 bytes" in reason(replace(problem, geometry=layer((12, 64), 3)))
    assert "stride" in reason(replace(problem, geometry=layer((64, 64), 3, 9)))


def test_it_is_first_where_channels_are_many() -> None:
    """Groups of few channels leave most of its products empty."""
    for geometry, first in (
        (layer((64, 64), 3), True),
        (Geometry(64, 64, (3, 3, 3), groups=8), False),
    ):
        problem = Problem("grad_weight", geometry, BF16, True, True)
        plans = ranked_plans(problem, 2, (32, 32, 32), Gpu())
        ours = [isinstance(plan, WgmmaWgradNdhwcPlan) for plan in plans]
        assert any(ours) and ours[0] == first
