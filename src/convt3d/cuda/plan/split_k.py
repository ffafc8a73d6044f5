"""Split-K: CTAs share the positions of a gradient by weight, and a second pass adds their sums."""

from __future__ import annotations

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.schedule import WEIGHT_STRIDES, Launch, Schedule, div_up

WORKSPACE_BYTES = 64 * 2**20
"""Of all partial sums, at most."""
LONGEST_SUM = 2048
"""Products that one accumulator adds up: tensor cores truncate when they add."""
MAX_REGISTERS = {2: 176, 3: 112}
"""Of a thread, for accumulators and fragments, where so many warpgroups multiply."""
_THREADS = 256


def most_splits(elements: int) -> int:
    """How many times the workspace holds so many sums; once in any case."""
    return max(1, WORKSPACE_BYTES // (4 * elements))


def in_two_passes(
    product: Launch,
    reduce: KernelSpec,
    elements: int,
    splits: int,
    *,
    dependent: bool = True,
    aligned: tuple[str, ...] = (),
) -> Schedule:
    """A product that leaves ``splits`` times so many partial sums, and the pass that adds them.

    Args:
        product, reduce: the first launch, and the kernel of the second.
        elements, splits: partial sums of a split, each of a thread of the second pass, and how
            many splits there are.
        dependent: whether that kernel waits for the first one by itself (see Launch).
        aligned: see Schedule.
    """
    grid = div_up(elements, _THREADS)
    arguments = ("partial", "weight", np.int32(splits), *WEIGHT_STRIDES)
    second = Launch(reduce, grid, _THREADS, 0, arguments, dependent)
    return Schedule((product, second), {"partial": 4 * elements * splits}, aligned)
