"""Strided layers by rows through a ring, on the emulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from convt3d import reference
from convt3d.cuda.plan import ampere_strided_rows, ampere_strided_slices
from convt3d.cuda.plan import rows as rows_plan
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic
from emulator import build
from emulator.gpu import EmulatedGpu, backend
from test_emulator_kernels import LAYERS, Case, check, layer

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

# Staged runs of odd lengths, several crews, CTAs that go on from column to column.
LAYERS["k3 s2, rows of 20"] = (layer((16, 12), 3, 2, 1, groups=2), (2, 5, 20))
# Rows of 23, of planes that are no multiple of 16 bytes either; two tiles along H, two CTAs.
LAYERS["k3 s2, lines of 23"] = (layer((16, 16), 3, 2, 1, groups=2), (3, 18, 12))
# Stores from registers, two rows a step; lines of 24 by vectors, three shifts beyond an end.
LAYERS["k(3,5,7) s2, rows of 12"] = (
    layer((16, 16), (3, 5, 7), 2, (1, 2, 3), 1, groups=2),
    (2, 17, 12),
)
# Two tiles along W, two octets of channels, ten produced ones, rows beyond the last source row.
LAYERS["k(4,3,5) s(1,3,2), rows of 66"] = (
    layer((24, 20), (4, 3, 5), (1, 3, 2), (1, 0, 2), (0, 2, 1), groups=2),
    (2, 4, 66),
)
# Streams: rows of 71 outputs, several CTAs, rows of the first and last slices outside.
LAYERS["k3 s2, rows of 71"] = (layer((16, 16), 3, 2, 1, groups=2), (2, 6, 36))


def rows(where: float) -> Callable[..., Any]:
    """Picks a plan of rows through a ring: 0 is the preferred one, 1 the last."""

    def pick(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        target = problem.geometry.output_size(size)
        gpu = replace(gpu, multiprocessors=2)
        ranked = ampere_strided_rows.ranked(problem, batch, size, gpu)
        plan = ranked[int(where * (len(ranked) - 1))][1]
        warp_teams = plan.warp_teams(batch, size, target)
        assert warp_teams is not None and warp_teams.count > 1
        return plan

    return pick


def slices(where: float) -> Callable[..., Any]:
    """The same of slices through a ring."""

    def pick(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        gpu = replace(gpu, multiprocessors=4)
        plans = ampere_strided_slices.ranked(problem, batch, size, gpu)
        plan = plans[int(where * (len(plans) - 1))][1]
        assert plan.shape(batch, size) is not None
        return plan

    return pick


def sweeps(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
    """The same of rows on warpgroup products."""
    target = problem.geometry.output_size(size)
    gpu = replace(gpu, multiprocessors=problem.geometry.groups)
    plan = rows_plan.ranked(problem, batch, size, gpu)[0][1]
    assert plan.takes(size, target)
    return plan


CASES = [
    (Case("k3 s2, rows of 20", "forward", Arithmetic.IEEE), rows(0.0)),
    (Case("k(3,5,7) s2, rows of 12", "forward", Arithmetic.IEEE), rows(0.0)),
    (Case("k(3,5,7) s2, rows of 12", "forward", Arithmetic.IEEE), sweeps),
    (Case("k(4,3,5) s(1,3,2), rows of 66", "forward", Arithmetic.BF16), sweeps),
    (Case("k3 s2, rows of 71", "forward", Arithmetic.BF16), sweeps),
    (Case("k3 s2, lines of 23", "grad_input", Arithmetic.IEEE), slices(0.0)),
    (Case("k(3,5,7) s2, rows of 12", "grad_input", Arithmetic.IEEE), slices(0.0)),
]


@pytest.mark.sample
@pytest.mark.parametrize(("case", "pick"), CASES)
def test_rings(case: Case, pick: Callable[..., Any]) -> None:
    check(case, pick)


def test_halves_of_any_magnitude() -> None:
    """Rows of the source and channels of the weights from 1e-18 to 1e18; an infinite value."""
    geometry, size = LAYERS["k(3,5,7) s2, rows of 12"]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((1, geometry.in_channels, *size), generator=generator)
    w = torch.randn(geometry.weight_size, generator=generator)
    x *= 10.0 ** torch.linspace(-18, 18, size[1])[:, None]
    w *= 10.0 ** torch.linspace(-18, 18, w.shape[1])[:, None, None, None]
    x[0, 3, 1, 2, 7] = torch.inf
    with EmulatedGpu([x, w], sweeps, Arithmetic.IEEE):
        got = backend.forward(x, w, None, geometry, False).double()
    wanted = reference.forward(x, w, None, geometry)
    x[0, 3, 1, 2, 7] = 0
    # A row's error follows its largest value, which elements of it may be far below.
    magnitude = reference.forward(x.abs(), w.abs(), None, geometry)
    finite = wanted.isfinite()
    assert not got[~finite].isfinite().any()
    # Around an infinite value, zeros of a block of weights make some outputs more NaN.
    spoilt = ~got.isfinite() & finite
    assert spoilt.sum() <= (~finite).sum()
    kept = finite & ~spoilt
    assert ((got - wanted).abs()[kept] <= 4e-7 * magnitude[kept]).all()
