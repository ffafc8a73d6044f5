"""Layers of few produced channels, all taps at once, on the emulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from convt3d.cuda.plan import col2im
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic
from emulator import build
from test_emulator_kernels import LAYERS, Case, check, layer

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

# Vectors of four, two tiles along H and W; two channels of sixteen more than a round has.
LAYERS["k4 s2, one channel"] = (layer((18, 1), 4, 2, 1), (3, 9, 28))
# Odd lines, two tiles and a last unit of one output; interleaved volumes along D.
LAYERS["k3 d(2,1,1), three channels"] = (
    layer((9, 3), 3, 1, (2, 0, 1), 0, (2, 1, 1)),
    (5, 6, 9),
)
LAYERS["k(3,2,5) s(1,3,1), groups"] = (
    layer((32, 4), (3, 2, 5), (1, 3, 1), (0, 1, 2), (0, 2, 0), groups=2),
    (3, 4, 6),
)


def col2im_of(warps: int, vector: int, keep_planes: bool = False) -> Callable[..., Any]:
    """A plan of few positions, so several tiles, on so small a GPU that CTAs go on."""

    def pick(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        assert col2im.refusal(problem, gpu) is None
        tile = col2im.Col2imTile(warps, vector, keep_planes=keep_planes)
        plan = col2im.Col2imPlan(problem, tile, 3)
        batch = plan.loads if keep_planes else -(-plan.loads // -(-plan.loads // 2))
        return replace(plan, tile=replace(tile, batch=batch))

    return pick


CASES = [
    (Case("k4 s2, one channel", "forward", Arithmetic.TF32), col2im_of(6, 4)),
    (Case("k4 s2, one channel", "forward", Arithmetic.BF16, unaligned=True), col2im_of(5, 2)),
    (Case("k3 d(2,1,1), three channels", "forward", Arithmetic.F16), col2im_of(3, 2)),
    (Case("k(3,2,5) s(1,3,1), groups", "forward", Arithmetic.IEEE, True, True), col2im_of(3, 4)),
    (Case("k(3,2,5) s(1,3,1), groups", "forward", Arithmetic.BF16), col2im_of(2, 4)),
    (Case("k4 s2, one channel", "forward", Arithmetic.TF32), col2im_of(6, 4, True)),
    (Case("k(3,2,5) s(1,3,1), groups", "forward", Arithmetic.F16), col2im_of(3, 2, True)),
    (
        Case("k(3,2,5) s(1,3,1), groups", "forward", Arithmetic.IEEE, True, True),
        col2im_of(3, 2, True),
    ),
    (Case("one channel", "grad_input", Arithmetic.TF32), col2im_of(4, 2)),
]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(("case", "pick"), CASES, ids=lambda v: getattr(v, "name", None))
def test_all_taps_at_once(case: Case, pick: Callable[..., Any]) -> None:
    gpu = check(case, pick)
    assert [spec.file for spec in gpu.launches] == ["col2im/pack.cu", "col2im/kernel.cu"]
