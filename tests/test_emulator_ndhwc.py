"""Layers on warpgroup products of channels_last operands, on the emulated GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from convt3d.cuda.plan import ndhwc
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic
from emulator import build
from emulator.gpu import EmulatedGpu, backend
from test_emulator_kernels import DTYPES, LAYERS, Case, check, layer, sampled

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

LAYERS["k3 s2, tiles of 8"] = (layer((24, 24), 3, 2, 1), (3, 9, 10))
LAYERS["k4 s2, planes of 16"] = (layer((72, 16), 4, 2, 1), (4, 4, 4))
LAYERS["k4 s2, many samples"] = (layer((40, 32), 4, 2, 1), (3, 4, 4))
LAYERS["k3 s2 d2, 40 columns"] = (layer((16, 40), 3, 2, 1, 0, 2), (3, 4, 5))
LAYERS["k325 s213, channels of 8"] = (
    layer((8, 16), (3, 2, 5), (2, 1, 3), (1, 0, 2), (1, 0, 1), (1, 2, 1)),
    (3, 4, 7),
)
LAYERS["k3 s1, one phase"] = (layer((40, 24), 3, 1, 1), (3, 9, 10))
LAYERS["k325 s1 d121, one phase"] = (
    layer((72, 40), (3, 2, 5), 1, (1, 0, 2), 0, (1, 2, 1)),
    (3, 5, 7),
)
LAYERS["k1 s1, one phase"] = (layer((80, 24), 1), (3, 5, 7))
LAYERS["k1 s1, to 136"] = (layer((40, 136), 1), (3, 5, 7))
LAYERS["k213 s1, three chunks"] = (layer((136, 72), (2, 1, 3), 1, (0, 0, 1)), (3, 3, 4))
LAYERS["k213 s1, to 48"] = layer((72, 48), (2, 1, 3), 1, (0, 0, 1)), (3, 3, 4)
LAYERS["k3 s2, three chunks"] = (layer((136, 72), 3, 2, 1), (2, 3, 4))
LAYERS["k213 s2, to three chunks"] = (layer((40, 136), (2, 1, 3), 2, (0, 0, 1)), (2, 3, 3))
LAYERS["k3 s2, two groups of 16"] = (layer((32, 32), 3, 2, 1, groups=2), (2, 3, 9))
LAYERS["k3 s2, groups of 8"] = (layer((32, 32), 3, 2, 1, groups=4), (3, 5, 9))
LAYERS["k3 s2, groups of 40"] = (layer((80, 32), 3, 2, 1, groups=2), (2, 3, 9))
LAYERS["k3 s2, groups of 80"] = (layer((160, 32), 3, 2, 1, groups=2), (2, 3, 9))
LAST: list[tuple[Case, dict[str, Any]]] = [
    (
        Case("k3 s2, tiles of 8", "forward", Arithmetic.BF16, True, True),
        {"phased": 0, "resident_weights": True},
    ),
    (
        Case("k3 s2, groups of 8", "forward", Arithmetic.BF16, True, True),
        {"split": 0, "groups_per_tile": 4},
    ),
    (
        Case("k4 s2, planes of 16", "forward", Arithmetic.F16, True, True, bias=False),
        {"phased": 3, "split": 2, "resident_weights": False, "direct": True},
    ),
    (
        Case("k3 s2 d2, 40 columns", "forward", Arithmetic.BF16, True, True),
        {"phased": 1, "split": 1, "resident_weights": False, "direct": True},
    ),
    (
        Case("k325 s213, channels of 8", "forward", Arithmetic.TF32, True, True),
        {"phased": 3, "split": 1},
    ),
    (
        Case("k3 s2, two groups of 16", "forward", Arithmetic.BF16, True, True),
        {"phased": 2, "split": 2, "resident_weights": True},
    ),
    (
        Case("k4 s2, many samples", "forward", Arithmetic.TF32, True, True, batch=18),
        {"phased": 2, "samples_inside": True},
    ),
    (
        Case("k4 s2, many samples", "forward", Arithmetic.BF16, True, True, batch=17),
        {"phased": 3, "samples_inside": True, "split": 2},
    ),
    (
        Case("k4 s2, planes of 16", "forward", Arithmetic.BF16, True, True),
        {"phased": 2, "split": 1, "consumers": 3, "resident_weights": False},
    ),
    (
        Case("k3 s2, tiles of 8", "forward", Arithmetic.F16, True, True),
        {"phased": 1, "consumers": 3, "direct": True},
    ),
    (
        Case("k3 s2 d2, 40 columns", "forward", Arithmetic.BF16, True, True),
        {"phased": 2, "split": 2, "fills": True},
    ),
    (
        Case("k3 s2 d2, 40 columns", "forward", Arithmetic.TF32, True, True),
        {"phased": 1, "fills": True},
    ),
    (
        Case("k3 s1, one phase", "forward", Arithmetic.BF16, True, True),
        {"phased": 3, "split": 1, "direct": True},
    ),
    (
        Case("k3 s1, one phase", "forward", Arithmetic.TF32, True, True),
        {"phased": 1, "split": 1},
    ),
    (
        Case("k325 s1 d121, one phase", "forward", Arithmetic.F16, True, True),
        {"phased": 3, "split": 2},
    ),
    (
        Case("k325 s1 d121, one phase", "forward", Arithmetic.TF32, True, True),
        {"phased": 3, "split": 2},
    ),
    (
        Case("k1 s1, one phase", "forward", Arithmetic.BF16, True, True),
        {"phased": 1, "resident_weights": True},
    ),
    # A Conv3d of one tap is a gradient by input.
    (
        Case("k1 s1, to 136", "grad_input", Arithmetic.BF16, True, True),
        {"direct": True},
    ),
    (
        Case("k1 s1, one phase", "grad_input", Arithmetic.TF32, True, True),
        {"resident_weights": True},
    ),
    (
        Case("k1 s1, to 136", "grad_input", Arithmetic.F16, True, True),
        {"direct": True, "cluster": 3},
    ),
    # Split-K. Three CTAs have two times 16 columns each, of five: the last one less.
    (
        Case("k213 s1, three chunks", "forward", Arithmetic.BF16, True, True),
        {"cluster": 3, "column_tile": 80, "direct": True},
    ),
    (
        Case("k213 s1, three chunks", "forward", Arithmetic.TF32, True, True),
        {"cluster": 4, "consumers": 2},
    ),
    (
        Case("k3 s2, three chunks", "forward", Arithmetic.F16, True, True),
        {"cluster": 3, "split": 2},
    ),
    (
        Case("k213 s2, to three chunks", "grad_input", Arithmetic.BF16, True, True),
        {"cluster": 5},
    ),
    (
        Case("k325 s213, channels of 8", "grad_input", Arithmetic.BF16, True, True),
        {"resident_weights": False},
    ),
    # Weights as they are, whose source channels are neighbours: of a gradient by input, which at
    # stride 1 is a forward pass with taps in reverse.
    (
        Case("k213 s2, to three chunks", "grad_input", Arithmetic.BF16, True, True),
        {"cluster": 5, "direct": True},
    ),
    (
        Case("k213 s2, to three chunks", "grad_input", Arithmetic.TF32, True, True),
        {"direct": True},
    ),
    (
        Case("k213 s1, three chunks", "grad_input", Arithmetic.F16, True, True),
        {"flipped": True, "direct": True, "phased": 1},
    ),
    (
        Case("k213 s1, three chunks", "grad_input", Arithmetic.BF16, True, True),
        {"flipped": True, "direct": True, "cluster": 2},
    ),
    (
        Case("k213 s1, three chunks", "grad_input", Arithmetic.TF32, True, True),
        {"flipped": True, "direct": True, "phased": 3, "split": 2},
    ),
    # Three products of 16 channels a chunk, in rows that have room for four.
    (
        Case("k213 s1, to 48", "grad_input", Arithmetic.BF16, True, True),
        {"flipped": True, "direct": True, "phased": 3, "split": 2},
    ),
    (
        Case("k3 s2, two groups of 16", "grad_input", Arithmetic.TF32, True, True),
        {"resident_weights": True},
    ),
]


#: Contiguous tensors. A warp stores 16 bytes where lines are multiples of them, else elements.
CONTIGUOUS: list[tuple[Case, dict[str, Any]]] = [
    (Case("k3 p1, 32 channels", "forward", Arithmetic.BF16), {"phased": 3, "split": 1}),
    (Case("k3 p1, 32 channels", "forward", Arithmetic.TF32), {"phased": 1}),
    (Case("k3 s1, one phase", "forward", Arithmetic.F16), {"phased": 3, "split": 2}),
    (Case("k3 s1, one phase", "forward", Arithmetic.TF32), {"phased": 1, "split": 1}),
    # Units of one, two and eight outputs.
    (Case("k4 s2, planes of 16", "forward", Arithmetic.F16, bias=False), {"phased": 3, "split": 2}),
    (Case("k4 s2, planes of 16", "forward", Arithmetic.BF16), {"phased": 2}),
    (Case("k4 s2, planes of 16", "forward", Arithmetic.TF32), {"phased": 1}),
    (Case("k3 s2, tiles of 8", "forward", Arithmetic.BF16), {"phased": 0}),
    (Case("k213 s1, three chunks", "forward", Arithmetic.BF16), {"cluster": 3, "column_tile": 80}),
    (Case("k3 s2, three chunks", "forward", Arithmetic.TF32), {"cluster": 3}),
    (Case("k213 s2, to three chunks", "grad_input", Arithmetic.BF16), {"cluster": 5}),
    (Case("k325 s213, channels of 8", "grad_input", Arithmetic.TF32), {}),
    (
        Case("k3 p1, 32 channels", "forward", Arithmetic.BF16, weight_last=True),
        {"phased": 3, "direct": True},
    ),
    # Weights that are copied to channels_last as well, of gradients and of flipped problems.
    (Case("k3 s2, three chunks", "grad_input", Arithmetic.TF32), {"direct": True}),
    (
        Case("k213 s1, three chunks", "grad_input", Arithmetic.TF32),
        {"flipped": True, "direct": True, "phased": 3, "split": 2},
    ),
    (
        Case("k213 s1, three chunks", "grad_input", Arithmetic.F16),
        {"flipped": True, "direct": True, "cluster": 3},
    ),
    # Of forward passes. In 16 bits weights are copied to channels_last; in TF32 they are
    # transposed, which makes source channels neighbours.
    (Case("k3 s2, three chunks", "forward", Arithmetic.F16), {"direct": True, "split": 2}),
    (Case("k213 s1, three chunks", "forward", Arithmetic.BF16), {"direct": True, "cluster": 3}),
    (Case("k213 s1, three chunks", "forward", Arithmetic.TF32), {"direct": True, "phased": 3}),
    (Case("k4 s2, planes of 16", "forward", Arithmetic.TF32), {"direct": True, "phased": 2}),
    # Of different layouts.
    (Case("k1 s1, one phase", "forward", Arithmetic.BF16, True, False), {"phased": 1}),
    (Case("k3 p1, 32 channels", "forward", Arithmetic.F16, False, True), {"phased": 3}),
]


def ndhwc_with(**wanted: Any) -> Callable[..., Any]:
    """The cheapest plan of ndhwc/kernel.cu with these choices, for CTAs that walk on."""
    wanted = {"direct": False, "fills": False, "cluster": 1, **wanted}
    is_flipped = wanted.pop("flipped", False)
    # Clusters are for layers that leave multiprocessors without a work tile.
    multiprocessors = 8 if wanted["cluster"] == 1 else Gpu().multiprocessors

    def pick(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        if is_flipped:
            problem, size = problem.canonical(size)
        target = problem.geometry.output_size(size) if problem.forward else size
        few = replace(Gpu(), multiprocessors=3)
        plans = [
            plan
            for plan in ndhwc.candidates(
                problem, batch, target, replace(few, multiprocessors=multiprocessors)
            )
            if all(getattr(plan.tile, name) == value for name, value in wanted.items())
        ]
        return replace(min(plans, key=lambda plan: plan.cost(batch, target)), gpu=few)

    return pick


@pytest.mark.sample
@pytest.mark.parametrize(
    "case, wanted", sampled(LAST, 5), ids=lambda v: getattr(v, "name", None) or str(v)
)
def test_operands_from_shared_memory(case: Case, wanted: dict[str, Any]) -> None:
    direct = wanted.get("direct", False)
    gpu = check(replace(case, weight_last=direct), ndhwc_with(**wanted))
    packed = [] if direct else ["ndhwc/pack.cu"]
    assert [spec.file for spec in gpu.launches] == [*packed, "ndhwc/kernel.cu"]


@pytest.mark.sample
@pytest.mark.parametrize(
    "case, wanted", sampled(CONTIGUOUS, 4), ids=lambda v: getattr(v, "name", None) or str(v)
)
def test_contiguous_tensors(case: Case, wanted: dict[str, Any]) -> None:
    gpu = check(case, ndhwc_with(**wanted))
    direct = wanted.get("direct", False)
    packed = [] if direct else ["ndhwc/pack.cu"]
    read_from_copies = (not case.source_last, direct and not case.weight_last)
    copied = ["layout/channels_last.cu"] * sum(read_from_copies)
    assert [spec.file for spec in gpu.launches] == [*packed, *copied, "ndhwc/kernel.cu"]


@pytest.mark.sample
@pytest.mark.parametrize(
    "name, arithmetic",
    [
        # Five products of channels, which neither two chunks nor three divide.
        ("k3 s2, groups of 40", Arithmetic.TF32),
        ("k3 s2, groups of 80", Arithmetic.BF16),
        # Products by warps, of several groups of a box.
        ("k3 s2, groups of 8", Arithmetic.BF16),
    ],
    ids=lambda v: getattr(v, "value", v),
)
def test_what_is_infinite_in_a_group_stays_there(name: str, arithmetic: Arithmetic) -> None:
    geometry, size = LAYERS[name]
    case = Case(name, "forward", arithmetic, True, True)
    check(case, ndhwc_with())

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, geometry.in_channels, *size, generator=generator).to(DTYPES[arithmetic])
    x[:, geometry.in_channels // geometry.groups :] = math.inf
    x = x.contiguous(memory_format=torch.channels_last_3d)
    w = torch.randn(geometry.weight_size, generator=generator).to(x.dtype)
    with EmulatedGpu([x, w], ndhwc_with(), arithmetic):
        y = backend.forward(x, w, None, geometry, True)
    own = geometry.out_channels // geometry.groups
    assert y[:, :own].isfinite().all() and not y[:, own:].isfinite().any()
