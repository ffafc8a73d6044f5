"""Split-K: CTAs share the depth of the same sums, which a cluster adds up, or a second pass."""

from __future__ import annotations

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.schedule import WEIGHT_STRIDES, Gpu, Launch, Schedule, div_up

WORKSPACE_BYTES = 64 * 2**20
"""Of all partial sums, at most."""
LONGEST_SUM = 2048
"""Products that one accumulator adds up: tensor cores truncate when they add."""
MAX_REGISTERS = {2: 176, 3: 112}
"""Of a thread, for accumulators and fragments, where so many warpgroups multiply."""
_THREADS = 256
# Clusters of so many CTAs that an H200 ran at once. It has GPCs of fewer than 16 multiprocessors,
# which a cluster stays within: 32 of 4 or 16 of 8 took twice as long as 30 and 14.
_AT_ONCE = {2: 64, 3: 36, 4: 30, 5: 20, 6: 16, 7: 14, 8: 14}
CLUSTERS = tuple(_AT_ONCE)
"""CTAs of a cluster, of which kernels are compiled."""


def most_splits(elements: int) -> int:
    """How many times the workspace holds so many sums; once in any case."""
    return max(1, WORKSPACE_BYTES // (4 * elements))


def clusters_at_once(cluster: int, multiprocessors: int) -> int:
    """Clusters of so many CTAs, one a multiprocessor, that run at the same time."""
    return max(1, _AT_ONCE[cluster] * multiprocessors // Gpu().multiprocessors)


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
