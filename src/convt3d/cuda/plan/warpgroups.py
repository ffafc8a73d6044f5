"""What plans of kernels with warpgroup products share.

Columns, registers, CTAs and tensor maps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from convt3d.cuda.schedule import Gpu, div_up, round_up
from convt3d.precision import Arithmetic

ROUNDED = (Arithmetic.TF32, Arithmetic.F16, Arithmetic.BF16)
"""Arithmetics whose operands are single words."""
MAX_PRODUCTS = 512  # of a stage: all of them are unrolled
MAX_STAGE_BYTES = 48 << 10  # of weights; larger ones leave no room to fetch ahead
STORE_BYTES = 18.0  # a cycle of a multiprocessor, its share of memory
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
    launched = min(248, 65536 // (threads * resident) // 8 * 8)
    total = launched * threads - other_registers * (threads - multiplying)
    return min(240, total // multiplying // 8 * 8)


def column_tiles(
    channels: int, parts: Iterable[int], narrow: int, wide: int = 256, multiple: int = 8
) -> list[int]:
    """Columns of products that cut channels into so many parts, from narrow to wide if any are."""
    columns = {min(256, round_up(div_up(channels, n), multiple)) for n in parts}
    return sorted(n for n in columns if narrow <= n <= wide) or [max(columns)]


def ctas_of(gpu: Gpu, items: int, variants: int, resident_weights: bool) -> int:
    """CTAs for so many work tiles, whose weights are one of so many variants.

    Where weights stay, every variant has the same number of CTAs.
    """
    if not resident_weights:
        return min(gpu.multiprocessors, items)
    return min(max(1, gpu.multiprocessors // variants) * variants, items)


def rotation_of(ctas: int, variants: int) -> int:
    """Variants by which a CTA moves on between rounds, to get all of them."""
    step = ctas % variants
    return next(n for n in range(variants) if math.gcd(step + n, variants) == 1)


def stepped(counts: Sequence[int], steps: Sequence[int]) -> tuple[list[int], list[int]]:
    """The box of so many elements that are steps apart, and its element strides.

    A step beside a single element moves nothing more.
    """
    steps = [step if n > 1 else 1 for n, step in zip(counts, steps, strict=True)]
    return [(n - 1) * step + 1 for n, step in zip(counts, steps, strict=True)], steps


def overlapped(*cycles: float, power: int = 3) -> float:
    """Cycles of what mostly hides under the longest: their sum at 1, the longest at infinity."""
    return math.fsum(n**power for n in cycles) ** (1 / power)
