"""What plans of kernels with warpgroup products share.

Columns, registers and tensor maps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from convt3d.cuda.schedule import MAP_BOX, Problem, TensorMap, div_up, round_up
from convt3d.precision import Arithmetic

ROUNDED = (Arithmetic.TF32, Arithmetic.F16, Arithmetic.BF16)
"""Arithmetics whose operands are single words."""
MAX_PRODUCTS = 512  # of a stage: all of them are unrolled
MAX_STAGE_BYTES = 48 << 10  # of weights; larger ones leave no room to fetch ahead
ONLY_HOPPER = "warpgroup products exist on compute capability 9.0 only"


def consumer_registers(
    threads: int, consumers: int, producer_registers: int, resident: int = 1
) -> int:
    """Registers of a thread that multiplies once all others have given theirs away.

    Args:
        threads: of a CTA.
        consumers: warpgroups of them that multiply.
        producer_registers: that the others keep.
        resident: CTAs that share a multiprocessor.
    """
    return multiplying_registers(threads, 128 * consumers, producer_registers, resident)


def multiplying_registers(
    threads: int, multiplying: int, other_registers: int, resident: int = 1
) -> int:
    """The same where ``multiplying`` threads multiply."""
    launched = _launched_registers(threads, resident)
    total = launched * threads - other_registers * (threads - multiplying)
    return min(240, total // multiplying // 8 * 8)


def _launched_registers(threads: int, resident: int = 1) -> int:
    """Registers that a thread is launched with."""
    return min(248, 65536 // (threads * resident) // 8 * 8)


def compiles(columns: int, threads: int) -> bool:
    """Whether ptxas takes a product of so many columns in a CTA of so many threads.

    It counts with the registers that a thread is launched with, and asks for 26 beside the sums.
    """
    return columns // 2 + 26 <= _launched_registers(threads)


def column_tiles(
    channels: int, parts: Iterable[int], narrow: int, wide: int = 256, multiple: int = 8
) -> list[int]:
    """Columns of products that cut channels into so many parts, from narrow to wide if any are."""
    columns = {min(256, round_up(div_up(channels, n), multiple)) for n in parts}
    return sorted(n for n in columns if narrow <= n <= wide) or [max(columns)]


def fits_map(counts: Sequence[int], steps: Sequence[int]) -> bool:
    """Whether a tensor map's box can have so many elements that are steps apart."""
    return all((n - 1) * step < MAP_BOX for n, step in zip(counts, steps, strict=True))


def source_map(
    problem: Problem,
    extents: Sequence[int],
    counts: Sequence[int],
    steps: Sequence[int],
    swizzle: int = 0,
    order: Sequence[int] = (),
) -> TensorMap:
    """The map of the source whose boxes have so many elements that are steps apart.

    All are innermost first; ``swizzle`` and ``order`` are those of TensorMap.
    """
    # A step beside a single element moves nothing more.
    steps = [step if n > 1 else 1 for n, step in zip(counts, steps, strict=True)]
    box = [(n - 1) * step + 1 for n, step in zip(counts, steps, strict=True)]
    element = problem.map_element
    return TensorMap.dense("source", element, extents, box, swizzle, steps, order)


def overlapped(*cycles: float, power: int = 3) -> float:
    """Cycles of what mostly hides under the longest: their sum at 1, the longest at infinity."""
    return math.fsum(n**power for n in cycles) ** (1 / power)
