"""Phases and taps of one axis of a transposed convolution.

With output index o = stride * q + r, every output of phase r reads the same kernel taps at constant
shifts: tap k belongs to phase r when (r + padding - k * dilation) is a multiple of the stride, and
then reads input index q + (r + padding - k * dilation) / stride. So a phase is a stride-1
correlation, and nothing is multiplied by the zeros that a stride inserts. See Vaidyanathan,
"Multirate Systems and Filter Banks" (1993), section 4.3, on polyphase interpolation filters.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple


class Tap(NamedTuple):
    """One kernel element of a phase; it reads input index ``q + shift`` for output index q."""

    kernel_index: int
    shift: int


@lru_cache(maxsize=4096)
def tapped_phases(
    kernel_size: int, stride: int, padding: int, dilation: int
) -> dict[int, tuple[Tap, ...]]:
    """Taps of the phases that have one, by rising phase; as many steps as taps, at any stride.

    Taps stand by rising kernel index (so falling shift). The input index is ``q + shift``, and what
    lies outside the input is zero.
    """
    found: dict[int, list[Tap]] = {}
    for k in range(kernel_size):
        shift, phase = divmod(k * dilation - padding, stride)
        found.setdefault(phase, []).append(Tap(k, -shift))
    return {phase: tuple(found[phase]) for phase in sorted(found)}


@lru_cache(maxsize=4096)
def axis_phases(
    kernel_size: int, stride: int, padding: int, dilation: int
) -> tuple[tuple[Tap, ...], ...]:
    """Taps of every phase r in ``range(stride)``: :func:`tapped_phases` and those between them.

    A phase without a tap (for instance stride 2 with dilation 2) is an empty tuple: its outputs
    are bias only. This takes time and memory in proportion to the stride.
    """
    tapped = tapped_phases(kernel_size, stride, padding, dilation)
    return tuple(tapped.get(phase, ()) for phase in range(stride))


def has_empty_phase(kernel_size: int, stride: int, dilation: int) -> bool:
    """Whether a phase has no tap: taps reach ``stride / gcd`` phases at most, each a new one."""
    return kernel_size < stride or gcd(stride, dilation) > 1


def phase_extent(output_extent: int, stride: int, phase: int) -> int:
    """Number of outputs o in ``range(output_extent)`` with o mod stride == phase."""
    return max(0, -(-(output_extent - phase) // stride))
