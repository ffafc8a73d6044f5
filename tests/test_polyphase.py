"""Phases and taps against the scatter definition of one axis."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from convt3d.polyphase import Tap, axis_phases, has_empty_phase, phase_extent, tapped_phases

_AXIS = {
    "kernel": st.integers(1, 7),
    "stride": st.integers(1, 6),
    "padding": st.integers(0, 8),
    "dilation": st.integers(1, 5),
}


@given(**_AXIS)
def test_every_tap_belongs_to_one_phase(
    kernel: int, stride: int, padding: int, dilation: int
) -> None:
    phases = axis_phases(kernel, stride, padding, dilation)
    assert len(phases) == stride
    taps = [tap.kernel_index for phase in phases for tap in phase]
    assert sorted(taps) == list(range(kernel))
    for phase in phases:
        assert [tap.shift for tap in phase] == sorted((t.shift for t in phase), reverse=True)


@given(**_AXIS)
def test_phases_without_a_tap_are_known_by_arithmetic(
    kernel: int, stride: int, padding: int, dilation: int
) -> None:
    phases = axis_phases(kernel, stride, padding, dilation)
    assert has_empty_phase(kernel, stride, dilation) == (() in phases)
    tapped = tapped_phases(kernel, stride, padding, dilation)
    assert list(tapped.items()) == [(r, taps) for r, taps in enumerate(phases) if taps]


def test_tapped_phases_take_no_time_at_any_stride() -> None:
    assert tapped_phases(2, 2**62, 0, 2**61) == {0: (Tap(0, 0),), 2**61: (Tap(1, 0),)}


@given(**_AXIS, extent=st.integers(1, 6), extra=st.integers(0, 5))
def test_gather_by_phases_is_the_scatter_form(
    kernel: int, stride: int, padding: int, dilation: int, extent: int, extra: int
) -> None:
    extra = min(extra, max(stride, dilation) - 1)
    size = (extent - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1
    # Which (input, tap) pairs reach each output, by the definition ...
    scatter: dict[int, set[tuple[int, int]]] = {o: set() for o in range(size)}
    for i in range(extent):
        for k in range(kernel):
            o = i * stride - padding + k * dilation
            if 0 <= o < size:
                scatter[o].add((i, k))
    # ... and by the phases.
    phases = axis_phases(kernel, stride, padding, dilation)
    for o in range(size):
        q, r = divmod(o, stride)
        reads = {(q + t.shift, t.kernel_index) for t in phases[r] if 0 <= q + t.shift < extent}
        assert reads == scatter[o]


def test_known_layers() -> None:
    assert axis_phases(2, 2, 0, 1) == ((Tap(0, 0),), (Tap(1, 0),))
    assert axis_phases(3, 2, 1, 1) == ((Tap(1, 0),), (Tap(0, 1), Tap(2, 0)))
    assert axis_phases(3, 1, 0, 1) == ((Tap(0, 0), Tap(1, -1), Tap(2, -2)),)
    # Stride 2 with dilation 2: one phase has every tap, the other is bias only.
    assert axis_phases(3, 2, 1, 2) == ((), (Tap(0, 1), Tap(1, 0), Tap(2, -1)))


@given(st.integers(0, 40), st.integers(1, 7))
def test_phase_extents_share_out_the_outputs(size: int, stride: int) -> None:
    extents = [phase_extent(size, stride, r) for r in range(stride)]
    assert extents == [len(range(r, size, stride)) for r in range(stride)]
    assert sum(extents) == size
