// Axes of strided layers whose phases may be work tiles of their own. Such an axis is walked, tap
// by tap, at run time; of the others all slots are in registers and all taps unrolled.
#pragma once
#include "device/select.cuh"
#include "geometry/axis.cuh"

namespace convt3d {

/// What is left to unroll of an axis whose phases and taps are walked at run time.
struct WalkedTap {
  static constexpr int kernel = 1, slots = 1, shifts = 1, min_shift = 0;
  CONVT3D_CONSTEXPR static int tap(int, int) { return 0; }
};

/// The shifts of an axis that any tap uses, numbered without gaps.
template <typename Axis>
struct UsedShifts {
  CONVT3D_CONSTEXPR static bool used(int shift) {
    for (int slot = 0; slot < Axis::slots; ++slot)
      if (Axis::tap(slot, shift + Axis::min_shift) >= 0) return true;
    return false;
  }
  CONVT3D_CONSTEXPR static int total() {
    int found = 0;
    for (int shift = 0; shift < Axis::shifts; ++shift) found += used(shift);
    return found;
  }
  static constexpr int count = total();
  /// The shift of a number, counted from the smallest one of the axis.
  CONVT3D_CONSTEXPR static int at(int number) {
    int shift = 0;
    while (!used(shift) || number-- > 0) ++shift;
    return shift;
  }
};

/// Whether a slot has a tap at any shift.
template <typename Axis>
CONVT3D_CONSTEXPR bool has_tap(int slot) {
  for (int shift = 0; shift < Axis::shifts; ++shift)
    if (Axis::tap(slot, shift + Axis::min_shift) >= 0) return true;
  return false;
}

/// Which slots have taps, a bit each.
template <typename Axis>
CONVT3D_CONSTEXPR uint32_t live_slots() {
  uint32_t found = 0;
  for (int slot = 0; slot < Axis::slots; ++slot) found |= uint32_t(has_tap<Axis>(slot)) << slot;
  return found;
}

/// How an axis is walked: `count` taps from `first_position` in packed order, each `step`
/// positions from the other, the first one `offset` past the box, which begins `origin` from the
/// first unit.
struct WalkedTaps {
  int count, first_position, origin, offset, step;

  template <bool Phased, typename Axis>
  CONVT3D_DEVICE static WalkedTaps of(int phase) {
    if constexpr (Phased) {
      const PhaseTaps taps = Axis::taps_of(phase);
      const int reach = max(taps.count - 1, 0) * taps.shift_step;
      const int origin = taps.first_shift + min(reach, 0);
      return {taps.count, taps.first_position, origin, taps.first_shift - origin, taps.shift_step};
    } else {
      return {1, 0, Axis::min_shift, 0, 0};
    }
  }

  /// Leaves out the taps that meet nothing but padding with all `units` units from the first one
  /// on.
  CONVT3D_DEVICE void trim(int first, int units, int extent) {
    const auto outside = [&](int tap) {
      const int at = first + origin + offset + tap * step;
      return at + units <= 0 || at >= extent;
    };
    while (count > 0 && outside(0)) {
      --count;
      ++first_position;
      offset += step;
    }
    while (count > 0 && outside(count - 1)) --count;
  }
};

}  // namespace convt3d
