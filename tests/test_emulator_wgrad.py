"""The gradient by weight on wgmma, on the emulated GPU: every way of filling its slabs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from convt3d import reference
from convt3d.cuda import backend
from convt3d.cuda.plan.wgrad import Fill, WgmmaWgradPlan, candidates, refusal
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.geometry import Geometry, Triple
from convt3d.precision import Arithmetic
from emulator import build
from emulator.gpu import EmulatedGpu
from test_emulator_kernels import DTYPES, layer, sampled

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

BATCH = 2
#: Few multiprocessors, whose CTAs fill their buffers more than once.
FEW = replace(Gpu(), multiprocessors=3)
TOLERANCE = {
    Arithmetic.IEEE: 5e-7,
    Arithmetic.TF32: 5e-4,
    Arithmetic.F16: 5e-4,
    Arithmetic.BF16: 3e-3,
}

K3 = layer((16, 16), 3)
WHOLE = {"fragments": 4, "whole_samples": True}
STRIDED = layer((8, 8), 3, 2, 1)
THREE: dict[str, Any] = {"consumers": 3}
PHASES: dict[str, Any] = {"phases": True, "runs": True}
CHOSEN = ("fragments", "whole_samples")  # of a base that has neither

#: Layer, input size, arithmetic, stages, how the gradient comes, and what the plan must be.
CASES: list[tuple[Geometry, Triple, Arithmetic, int, Fill, dict[str, Any]]] = [
    (K3, (4, 5, 32), Arithmetic.TF32, 3, Fill.FLAT, {"column_taps": True}),
    (K3, (3, 4, 8), Arithmetic.BF16, 2, Fill.COPIES, {"column_taps": True}),
    (layer((16, 8), 3, 1, 1), (3, 4, 35), Arithmetic.BF16, 4, Fill.COPIES, {"whole_rows": True}),
    (layer((16, 8), 3, 1, 1), (2, 4, 34), Arithmetic.TF32, 2, Fill.FLAT, {}),
    (layer((8, 8), 3), (2, 3, 36), Arithmetic.BF16, 2, Fill.FLAT, {}),
    (STRIDED, (3, 4, 33), Arithmetic.TF32, 4, Fill.RUNS, {"runs": True}),
    (STRIDED, (3, 4, 40), Arithmetic.BF16, 2, Fill.RUNS, {"runs": True}),
    (layer((8, 32), 3, 2, 1), (3, 4, 34), Arithmetic.TF32, 3, Fill.PIECES, {"channel_tile_m": 8}),
    (layer((8, 16), 3, 2, 1), (3, 4, 40), Arithmetic.BF16, 3, Fill.PIECES, {"channel_tile_m": 8}),
    (
        layer((8, 32), 3, 2, 1),
        (3, 4, 32),
        Arithmetic.BF16,
        2,
        Fill.JOINED,
        {"runs": True, "column_taps": True, "channel_tile_m": 8},
    ),
    (layer((8, 16), 3, 2, 1, 0, 2), (3, 4, 32), Arithmetic.TF32, 2, Fill.JOINED, {"runs": True}),
    (layer((8, 8), 3, 2, 1, 1), (3, 4, 32), Arithmetic.BF16, 2, Fill.ROWS, {}),
    (layer((8, 8), 5, 2, 2, 1), (3, 4, 32), Arithmetic.IEEE, 3, Fill.ROWS, {"column_taps": True}),
    (layer((8, 8), 3, 2, 1, 0, 2), (3, 4, 32), Arithmetic.TF32, 3, Fill.COPIES, {}),
    (
        layer((16, 16), 3, 2, 1, groups=2),
        (3, 4, 16),
        Arithmetic.IEEE,
        2,
        Fill.JOINED,
        {"runs": True},
    ),
    (layer((16, 16), 3, 2, 1, groups=2), (3, 5, 32), Arithmetic.IEEE, 2, Fill.JOINED, PHASES),
    (layer((16, 16), 3, 2, 1, groups=2), (3, 5, 64), Arithmetic.BF16, 2, Fill.JOINED, PHASES),
    (layer((8, 8), (2, 3, 4), 2, (0, 1, 2)), (3, 4, 40), Arithmetic.IEEE, 2, Fill.JOINED, PHASES),
    (layer((8, 8), 3, 2, 1), (2, 4, 80), Arithmetic.F16, 2, Fill.JOINED, PHASES),
    (layer((16, 12), 4, 2, 1), (4, 4, 4), Arithmetic.TF32, 2, Fill.ROWS, {"fragments": 4}),
    (
        layer((16, 12), 4, 2, 1),
        (4, 4, 4),
        Arithmetic.TF32,
        4,
        Fill.VOLUME,
        WHOLE | {"channel_tile_m": 4, "blocks": 2},
    ),
    (layer((16, 8), 4, 2, 1), (4, 4, 4), Arithmetic.BF16, 4, Fill.VOLUME, WHOLE),
    (layer((16, 8), 4, 2, 1), (4, 4, 8), Arithmetic.BF16, 3, Fill.VOLUME, {"whole_samples": True}),
    (layer((16, 16), 2, 2), (2, 4, 36), Arithmetic.TF32, 2, Fill.SWIZZLED, {"fragments": 4}),
    (layer((8, 5), 4, 4), (2, 2, 34), Arithmetic.BF16, 3, Fill.SWIZZLED, {}),
    (
        layer((16, 5), (2, 4, 4), (2, 4, 4)),
        (3, 2, 34),
        Arithmetic.BF16,
        4,
        Fill.SWIZZLED,
        THREE,
    ),
    (layer((16, 16), 2, 2), (2, 4, 8), Arithmetic.TF32, 2, Fill.FLAT, {"runs": True}),
    (layer((16, 16), 2, 2), (3, 4, 8), Arithmetic.TF32, 2, Fill.LINES, {"fragments": 4}),
    (layer((16, 16), 2, 2), (3, 5, 16), Arithmetic.BF16, 4, Fill.LINES, {}),
    (layer((16, 16), 2, 2), (3, 4, 8), Arithmetic.BF16, 2, Fill.LINES, {}),
    (layer((8, 8), (3, 5, 7)), (3, 9, 32), Arithmetic.TF32, 3, Fill.COPIES, {"order": (1, 0, 2)}),
]


def plan_for(
    problem: Problem, size: Triple, stages: int, fill: Fill, wanted: dict[str, Any]
) -> WgmmaWgradPlan:
    choices = {"stages": stages, "fragments": 4 if problem.arithmetic is Arithmetic.IEEE else 2}
    choices |= {name: wanted[name] for name in wanted if name in CHOSEN}
    plans = [
        replace(plan, **choices)
        for plan in candidates(problem, FEW)
        if all(getattr(plan, name) == wanted[name] for name in wanted if name not in choices)
    ]
    plans = [plan for plan in plans if plan.fill(size) is fill]
    return min(plans, key=lambda plan: plan.cost(BATCH, size))


def test_whole_samples_keep_their_places_whatever_taps_a_cta_has() -> None:
    """CTAs of five taps along D and of two, and more samples than stages."""
    geometry, size, batch = layer((8, 8), (5, 3, 3), 1, (2, 1, 1)), (4, 4, 4), 7
    problem = Problem("grad_weight", geometry, Arithmetic.TF32)
    whole = WHOLE | {"channel_tile_m": 8, "blocks": 2}
    plan = plan_for(problem, size, 2, Fill.VOLUME, whole)
    x = torch.randn(batch, 8, *size, generator=torch.Generator().manual_seed(3))
    gy = torch.randn(x.shape, generator=torch.Generator().manual_seed(4))
    with EmulatedGpu([x, gy], lambda *_: plan, Arithmetic.TF32):
        got = backend.grad_weight(x, gy, geometry, False)
    want = reference.grad_weight(x, gy, geometry)
    assert (got.double() - want).norm() / want.norm() <= 1e-3


@pytest.mark.sample
@pytest.mark.parametrize(
    "case", sampled([(case,) for case in CASES], 5), ids=lambda c: f"{c[0].label} {c[2].value}"
)
def test_every_fill(
    case: tuple[Geometry, Triple, Arithmetic, int, Fill, dict[str, Any]],
) -> None:
    geometry, size, arithmetic, stages, fill, wanted = case
    problem = Problem("grad_weight", geometry, arithmetic)
    plan = plan_for(problem, size, stages, fill, wanted)
    generator = torch.Generator().manual_seed(3)

    def values(channels: int, extents: Triple) -> torch.Tensor:
        return torch.randn(BATCH, channels, *extents, generator=generator).to(DTYPES[arithmetic])

    x = values(geometry.in_channels, size)
    gy = values(geometry.out_channels, geometry.output_size(size))
    with EmulatedGpu([x, gy], lambda *_: plan, arithmetic) as gpu:
        got = backend.grad_weight(x, gy, geometry, False)
    assert {spec.file for spec in gpu.launches} == {"wgrad/kernel.cu"}
    want = reference.grad_weight(x, gy, geometry)
    error = (got.double() - want).norm() / want.norm()
    assert error <= TOLERANCE[arithmetic]


@pytest.mark.parametrize(
    ("bias", "arithmetic", "fill"),
    [(False, Arithmetic.BF16, Fill.LINES), (True, Arithmetic.TF32, Fill.SWIZZLED)],
    ids=["alone", "and by bias"],
)
def test_clusters_add_up_their_sums(bias: bool, arithmetic: Arithmetic, fill: Fill) -> None:
    problem = Problem("grad_weight", layer((16, 16), 2, 2), arithmetic, bias=bias)
    wanted = {"column_taps": False, "runs": False, "phases": False, "row_tiles": 1}
    size = (4, 4, 8) if fill is Fill.LINES else (2, 3, 32)
    plan = plan_for(problem, size, 2, fill, wanted | {"channel_tile_n": 16})
    plan = replace(plan, gpu=replace(FEW, multiprocessors=4), cluster=2)
    generator = torch.Generator().manual_seed(3)
    output = problem.geometry.output_size(size)
    x = torch.randn(BATCH, 16, *size, generator=generator).to(DTYPES[arithmetic])
    gy = torch.randn(BATCH, 16, *output, generator=generator).to(DTYPES[arithmetic])
    with EmulatedGpu([x, gy], lambda *_: plan, arithmetic) as gpu:
        if bias:
            got, by_bias = backend.grad_weight_bias(x, gy, problem.geometry, False)
            sums = reference.grad_bias(gy)
            assert (by_bias.double() - sums).norm() / sums.norm() <= 1e-6
        else:
            got = backend.grad_weight(x, gy, problem.geometry, False)
    assert dict(gpu.launches[0].macros)["CONVT3D_CLUSTER"] == "2"
    want = reference.grad_weight(x, gy, problem.geometry)
    assert (got.double() - want).norm() / want.norm() <= TOLERANCE[arithmetic]


def test_whole_sums_are_stored_at_once() -> None:
    plan = plan_for(
        Problem("grad_weight", layer((16, 8), 4, 2, 1), Arithmetic.BF16),
        (4, 4, 4),
        3,
        Fill.VOLUME,
        WHOLE | {"channel_tile_m": 4, "blocks": 2},
    )
    plan = replace(plan, gpu=replace(Gpu(), multiprocessors=1))
    x, gy = torch.randn(3, 16, 4, 4, 4), torch.randn(3, 8, 8, 8, 8)
    x, gy = x.bfloat16(), gy.bfloat16()
    with EmulatedGpu([x, gy], lambda *_: plan, Arithmetic.BF16) as gpu:
        got = backend.grad_weight(x, gy, plan.problem.geometry, False)
    assert len(gpu.launches) == 1
    # Blocks of the first and the last tap along D leave out a slice each.
    assert ("CONVT3D_SLICES", "4") in gpu.launches[0].macros
    want = reference.grad_weight(x, gy, plan.problem.geometry)
    assert (got.double() - want).norm() / want.norm() <= TOLERANCE[Arithmetic.BF16]


@pytest.mark.sample
@pytest.mark.parametrize(
    ("geometry", "size", "arithmetic", "fill"),
    [
        (layer((16, 16), 2, 2), (2, 4, 32), Arithmetic.TF32, Fill.SWIZZLED),
        (layer((8, 8), 3, 2, 1, 1), (3, 4, 32), Arithmetic.BF16, Fill.ROWS),
    ],
    ids=["k2", "k3"],
)
def test_gradient_by_bias_comes_along(
    geometry: Geometry, size: Triple, arithmetic: Arithmetic, fill: Fill
) -> None:
    problem = Problem("grad_weight", geometry, arithmetic, bias=True)
    plan = plan_for(problem, size, 2, fill, {"column_taps": False})
    assert plan.layout(size).sums_bias
    x = torch.randn(BATCH, geometry.in_channels, *size).to(DTYPES[arithmetic])
    gy = torch.randn(BATCH, geometry.out_channels, *geometry.output_size(size)).to(x.dtype)
    with EmulatedGpu([x, gy], lambda *_: plan, arithmetic):
        by_weight, by_bias = backend.grad_weight_bias(x, gy, geometry, False)
    want = reference.grad_weight(x, gy, geometry)
    assert (by_weight.double() - want).norm() / want.norm() <= TOLERANCE[arithmetic]
    # Sums see the gradient before it is rounded to TF32.
    sums = reference.grad_bias(gy)
    error = (by_bias.double() - sums).norm() / sums.norm()
    assert error <= (1e-6 if arithmetic is Arithmetic.TF32 else 3e-3)


def test_refusals() -> None:
    ampere = replace(Gpu(), capability=(8, 6))
    problem = Problem("grad_weight", K3, Arithmetic.TF32)
    assert refusal(problem, Gpu()) is None
    assert "9.0" in str(refusal(problem, ampere))
    few = Problem("grad_weight", layer((3, 8), 3), Arithmetic.TF32)
    assert "channels" in str(refusal(few, Gpu()))
    for layout in ("source_channels_last", "target_channels_last"):
        assert "contiguous" in str(refusal(replace(problem, **{layout: True}), Gpu()))
