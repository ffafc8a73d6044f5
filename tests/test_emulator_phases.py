"""Strided layers on warpgroup products with units in registers, on the emulated GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from convt3d.cuda.plan import phases, transposed
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic
from emulator import build
from emulator.gpu import EmulatedGpu, backend
from test_emulator_kernels import LAYERS, Case, check, layer, plan_at, sampled

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

LAYERS["k3 s2, rows of 71"] = (layer((16, 12), 3, 2, 1), (2, 3, 36))
# Tiles of three units along D, of which the second has one that exists, past an odd last slice.
LAYERS["k3 s2, tiles beyond D"] = (layer((8, 12), 3, 2, 1), (4, 3, 36))
LAYERS["k4 s2, small volume"] = (layer((12, 16), 4, 2, 1), (4, 4, 4))
LAYERS["k4 s2, rows of 16"] = (layer((24, 12), 4, 2, 1), (3, 4, 16))
LAYERS["k4 s2, one row of 16"] = (layer((24, 12), 4, 2, 1), (1, 1, 16))
LAYERS["k3 s2 d2, rows of 17"] = (layer((8, 20), 3, 2, 1, 0, 2), (3, 4, 8))
LAYERS["k325 s213"] = (
    layer((9, 12), (3, 2, 5), (2, 1, 3), (1, 0, 2), (1, 0, 1), (1, 2, 1)),
    (3, 4, 8),
)
LAYERS["k3 s1, rows of 8"] = (layer((9, 24), 3, 1, 1), (3, 5, 8))
LAYERS["k3 s2 in groups, rows of 79"] = (layer((32, 16), 3, 2, 1, groups=2), (2, 3, 40))
LAYERS["k3 s2, wide, rows of 71"] = (layer((20, 36), 3, 2, 1), (2, 3, 36))
LAYERS["k3 s2, 24 columns, rows of 71"] = (layer((9, 24), 3, 2, 1), (2, 3, 36))
LAYERS["k3 s2 in groups of 24, rows of 79"] = (layer((16, 48), 3, 2, 1, groups=2), (2, 3, 40))
LAYERS["k4 s2, 4096 products"] = (layer((512, 24), 4, 2, 1), (2, 2, 4))
LAYERS["k4 s2, wide, rows of 32"] = (layer((19, 40), 4, 2, 1), (2, 3, 16))
LAYERS["k3 s2 d2, wide, rows of 17"] = (layer((9, 52), 3, 2, 1, 0, 2), (3, 4, 8))
LAYERS["k325 s213, wide"] = (
    layer((9, 28), (3, 2, 5), (2, 1, 3), (1, 0, 2), (1, 0, 1), (1, 2, 1)),
    (3, 4, 8),
)
PHASES: list[tuple[Case, dict[str, Any]]] = [
    (
        Case("k3 s2, rows of 71", "forward", Arithmetic.TF32),
        {"phased": 0, "resident_weights": True},
    ),
    (
        Case("k3 s2, tiles beyond D", "forward", Arithmetic.TF32, bias=False),
        {"phased": 1, "consumers": 3, "blocks": 2, "resident_weights": False},
    ),
    (
        Case("k4 s2, small volume", "forward", Arithmetic.TF32),
        {"phased": 2},
    ),
    (
        Case("k3 s1, rows of 8", "forward", Arithmetic.TF32),
        {"phased": 1},
    ),
    (Case("k3 s1, rows of 8", "forward", Arithmetic.BF16), {"phased": 0}),
    (
        Case("k3 s1, rows of 8", "forward", Arithmetic.TF32, batch=1),
        {"phased": 1, "consumers": 1},
    ),
    (Case("k3 s2 d2, rows of 17", "forward", Arithmetic.TF32), {"phased": 1}),
    (
        Case("k325 s213", "forward", Arithmetic.TF32),
        {"phased": 2, "resident_weights": False},
    ),
    (Case("k325 s213", "forward", Arithmetic.TF32), {"phased": 0}),
    (
        Case("k4 s2, rows of 16", "forward", Arithmetic.BF16),
        {"phased": 1, "resident_weights": False},
    ),
    (
        Case("k3 s2 in groups, rows of 79", "forward", Arithmetic.BF16),
        {"phased": 0},
    ),
    (Case("k3 s2 d2, rows of 17", "forward", Arithmetic.F16), {"phased": 2}),
    (
        Case("k3 s2, rows of 71", "forward", Arithmetic.TF32, bias=False),
        {"phased": 0, "resident_weights": True, "store_warps": 2},
    ),
    (
        Case("k3 s2 d2, rows of 17", "forward", Arithmetic.TF32),
        {"phased": 1, "store_warps": 2, "consumers": 3, "tap_boxes": True},
    ),
    (
        Case("k3 s2 in groups, rows of 79", "forward", Arithmetic.BF16),
        {"phased": 0, "store_warps": 2},
    ),
    (
        Case("k3 s2 in groups, rows of 79", "forward", Arithmetic.BF16, bias=False),
        {"phased": 1, "store_warps": 2, "round_columns": 8},
    ),
    (
        Case("k325 s213", "forward", Arithmetic.TF32),
        {"phased": 1, "resident_weights": False, "with_ping_pong": True},
    ),
    # IEEE-grade: chains of one, two and three taps of W.
    (
        Case("k3 s2 in groups of 24, rows of 79", "forward", Arithmetic.IEEE),
        {"phased": 0, "resident_weights": True},
    ),
    (
        Case("k3 s2, wide, rows of 71", "forward", Arithmetic.IEEE),
        {"phased": 1, "resident_weights": False},
    ),
    (
        Case("k3 s2, 24 columns, rows of 71", "forward", Arithmetic.IEEE, bias=False),
        {"phased": 0, "store_warps": 2},
    ),
    (
        Case("k4 s2, wide, rows of 32", "forward", Arithmetic.IEEE),
        {"phased": 2},
    ),
    # Registers for a row of shifts and one chain; for all rows and one.
    (
        Case("k3 s2, wide, rows of 71", "forward", Arithmetic.IEEE),
        {"phased": 1, "blocks": 2, "way": (1, 1)},
    ),
    (
        Case("k325 s213, wide", "forward", Arithmetic.IEEE),
        {"phased": 1, "blocks": 3, "way": (2, 1)},
    ),
    # Weights whose taps are whole vectors: contiguous ones, those in channels_last.
    (
        Case("k4 s2, wide, rows of 32", "forward", Arithmetic.IEEE),
        {"phased": 1, "way": (3, 2)},
    ),
    (
        Case("k4 s2, wide, rows of 32", "forward", Arithmetic.IEEE, weight_last=True),
        {"phased": 1},
    ),
    (
        Case("k3 s2 d2, wide, rows of 17", "forward", Arithmetic.IEEE),
        # Two of three rows.
        {"phased": 1, "store_warps": 2, "consumers": 2, "tap_boxes": True, "way": (2, 2)},
    ),
    (
        Case("k325 s213, wide", "forward", Arithmetic.IEEE),
        {"phased": 2, "resident_weights": True},
    ),
    (
        Case("k325 s213, wide", "forward", Arithmetic.IEEE),
        {"phased": 2, "resident_weights": False, "with_ping_pong": True},
    ),
]


def phases_with(
    with_ping_pong: bool = False,
    way: tuple[int, int] | None = None,
    **wanted: Any,
) -> Callable[..., Any]:
    """The cheapest plan of phases/kernel.cu with these choices, for CTAs that walk on.

    ``way``: rows of shifts that are split at once, and chains.
    """

    choices = {"tap_boxes": False, "store_warps": 0, **wanted}

    def pick(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        target = problem.geometry.output_size(size)
        few = replace(Gpu(), multiprocessors=3)
        plans = [
            plan
            for plan in phases.candidates(problem, batch, target, few)
            if all(getattr(plan.tile, name) == value for name, value in choices.items())
            and (way is None or (plan.split_rows, plan.split_chains) == way)
        ]
        best = min(plans, key=lambda plan: plan.cost(batch, target))
        if with_ping_pong:
            _, best = next(phases.with_ping_pong([best], batch, target))
        return best

    return pick


@pytest.mark.sample
@pytest.mark.parametrize(
    "case, wanted", sampled(PHASES, 5), ids=lambda v: getattr(v, "name", None) or str(v)
)
def test_units_in_registers(case: Case, wanted: dict[str, Any]) -> None:
    gpu = check(case, phases_with(**wanted))
    assert [spec.file for spec in gpu.launches] == ["phases/pack.cu", "phases/kernel.cu"]


def test_warpgroup_without_units() -> None:
    """A tile of one line is the first warpgroup's alone."""
    case = Case("k4 s2, one row of 16", "forward", Arithmetic.BF16, bias=False, batch=1)
    check(case, phases_with(phased=1, consumers=2))


def test_long_sums_of_split_operands() -> None:
    case = Case("k4 s2, 4096 products", "forward", Arithmetic.IEEE, bias=False)
    gpu = check(case, phases_with(phased=2), most=3.2e-7)
    assert gpu.launches[1].file == "phases/kernel.cu"


@pytest.mark.sample
@pytest.mark.parametrize("phased", [1, 2])
def test_split_weights_in_vectors(phased: int) -> None:
    """The same bits as packed one by one; of aligned weights alone, where a planted bug shows."""
    case = Case("k4 s2, wide, rows of 32", "forward", Arithmetic.IEEE, bias=False)
    geometry, size = LAYERS[case.layer]
    generator = torch.Generator().manual_seed(21)
    x = torch.randn(1, geometry.in_channels, *size, generator=generator)
    w = torch.randn(geometry.weight_size, generator=generator)
    storage = torch.empty(w.numel() + 1)
    unaligned = storage.as_strided(w.shape, w.stride(), 1).copy_(w)

    def result(weight: torch.Tensor, pattern: str, replacement: str) -> torch.Tensor:
        def edit(file: str, text: str) -> str:
            if file != "phases/pack.cu":
                return text
            assert pattern in text
            return text.replace(pattern, replacement)

        pick = phases_with(phased=phased)
        with EmulatedGpu([x, weight], pick, case.arithmetic, edit) as gpu:
            found = backend.forward(x, weight, None, geometry, False)
        assert gpu.launches[0].file == "phases/pack.cu"
        return found

    wanted = result(w, "if (Vectors::suits(packer))", "if (false)")
    right, wrong = "transposed[0][w], transposed[1][w]", "transposed[1][w], transposed[0][w]"
    assert torch.equal(result(w, right, right), wanted)
    assert not torch.equal(result(w, right, wrong), wanted)
    assert torch.equal(result(unaligned, right, wrong), wanted)


def test_refusals_of_split_operands() -> None:
    def reason(channels: tuple[int, int], kernel: int) -> str | None:
        geometry = layer(channels, kernel, 2, 1)
        return phases.refusal(Problem("forward", geometry, Arithmetic.IEEE), Gpu())

    assert reason((32, 32), 3) is None and reason((512, 32), 4) is None
    assert "few columns" in str(reason((32, 16), 3))
    assert "chains" in str(reason((32, 32), 9))
    assert reason((1024, 32), 4) is None
    assert "parts" in str(reason((1032, 32), 4))


def test_sums_of_split_operands_are_not_too_long() -> None:
    """Layers of many channels have plans whose chains are long enough, and no others."""
    problem = Problem("forward", layer((512, 256), 3, 1, 1), Arithmetic.IEEE)
    plans = list(phases.candidates(problem, 2, (8, 8, 8), Gpu()))
    assert plans and max(plan.additions for plan in plans) <= 256
    assert min(plan.split_rows for plan in plans) > 1


def test_rows_that_tma_cannot_bring_run_elsewhere() -> None:
    geometry, size = LAYERS["k3 s2, rows of 69"]
    problem = Problem("forward", geometry, Arithmetic.TF32)
    assert phases.ranked(problem, 2, size, Gpu()) == []
    other = phases.ranked(problem, 2, (*size[:2], size[2] + 1), Gpu())[0][1]
    with pytest.raises(ValueError, match="does not take"):
        other.schedule(2, size)
    gpu = check(Case("k3 s2, rows of 69", "forward", Arithmetic.TF32), plan_at(0.0))
    assert "phases/kernel.cu" not in {spec.file for spec in gpu.launches}


LAYERS["k4 s2, transposed volumes"] = (layer((32, 32), 4, 2, 1), (4, 4, 4))
LAYERS["k3 s2, transposed"] = (layer((16, 32), 3, 2, 1, 1), (3, 5, 12))
LAYERS["k325 s213, transposed"] = (
    layer((32, 16), (3, 2, 5), (2, 1, 3), (1, 0, 2), (1, 0, 1), (1, 2, 1), groups=2),
    (3, 9, 20),
)
LAYERS["k133 s122, rows of 10"] = (
    layer((16, 32), (1, 3, 3), (1, 2, 2), (0, 1, 1), (0, 1, 1)),
    (2, 5, 10),
)
LAYERS["k4 s2, rows of 7"] = (layer((32, 24), 4, 2, 1), (3, 4, 7))
TRANSPOSED: list[tuple[Case, dict[str, Any]]] = [
    (Case("k4 s2, transposed volumes", "forward", Arithmetic.BF16, batch=5), {"phased": 2}),
    (
        Case("k4 s2, transposed volumes", "forward", Arithmetic.TF32, bias=False),
        {"phased": 1},
    ),
    (Case("k3 s2, transposed", "forward", Arithmetic.TF32), {"phased": 0}),
    (Case("k325 s213, transposed", "forward", Arithmetic.F16), {"phased": 2}),
    (Case("k3 s2, transposed", "forward", Arithmetic.BF16), {"phased": 1, "blocks": 2}),
    (
        Case("k133 s122, rows of 10", "forward", Arithmetic.BF16),
        {"phased": 0, "vector": 2, "outputs": 2},
    ),
    (Case("k4 s2, rows of 7", "forward", Arithmetic.TF32), {"phased": 1, "outputs": 2}),
    (Case("k4 s2, rows of 7", "forward", Arithmetic.F16), {"phased": 2, "outputs": 2}),
    (Case("k133 s122, rows of 10", "forward", Arithmetic.TF32), {"phased": 1, "outputs": 0}),
]


def transposed_with(**wanted: Any) -> Callable[..., Any]:
    """The cheapest plan of transposed boxes with these choices, for CTAs that walk on."""

    def pick(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        target = problem.geometry.output_size(size)
        few, vector = replace(Gpu(), multiprocessors=3), math.gcd(size[2], 4)
        plans = [
            plan
            for plan in transposed.candidates(problem, batch, target, few, vector)
            if all(getattr(plan.tile, name) == value for name, value in wanted.items())
        ]
        return min(plans, key=lambda plan: plan.cost(batch, target))

    return pick


@pytest.mark.sample
@pytest.mark.parametrize(
    "case, wanted", sampled(TRANSPOSED, 3), ids=lambda v: getattr(v, "name", None) or str(v)
)
def test_transposed_boxes(case: Case, wanted: dict[str, Any]) -> None:
    gpu = check(case, transposed_with(**wanted))
    assert [spec.file for spec in gpu.launches] == ["phases/pack.cu", "phases/kernel.cu"]
