"""Random tails, folded by the graph pass, on the kernels of a GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from support.tails import Case, Maker, traced
from test_compile_tails import check, fused

SEEDS, AT_ONCE = 500, 20


def on_gpu(case: Case) -> Case:
    """The case with its tensors on the GPU, in the memory formats that they have."""
    return replace(case, inputs=[tensor.cuda() for tensor in case.inputs])


@pytest.mark.usefixtures("saved_passes")
@pytest.mark.parametrize("start", range(3000, 3000 + SEEDS, AT_ONCE))
def test_random_tails(start: int, ieee: None) -> None:
    """As right as eager PyTorch against float64, and tails are folded."""
    counts: Counter[str] = Counter()
    for seed in range(start, start + AT_ONCE):
        case = on_gpu(Maker(seed).case())
        symbolic = seed % 3 == 0
        graph, sites = fused(case, symbolic)
        check(case, graph, traced(case))
        if symbolic:
            larger = on_gpu(Maker(seed).case(larger=3))
            check(larger, graph, traced(larger))
        counts["sites"] += len(sites)
        counts["fused"] += sum(bool(site.fused) for site in sites)
    # Steps that read a tensor of the output's shape are left to Inductor where they cost more.
    assert counts["fused"] > 0.15 * counts["sites"] > 0, counts
