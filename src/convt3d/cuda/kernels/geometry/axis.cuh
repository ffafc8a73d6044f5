// One spatial axis of the operator, as compile-time tables.
//
// Both the forward pass and the gradient by input are gathers: a *unit* is the smallest repeating
// piece of the destination, `unit_destination` wide, fed by `unit_source` source positions; unit
// u reads source index u * unit_source + shift. In matrix products a unit is one row of M. The
// destinations inside a unit are its *slots*, one for each phase that is unrolled.
//
//   forward  (source x,  destination y):  slot r takes tap k iff (r + p - k*d) is divisible by s,
//                                         shift = (r + p - k*d) / s
//   backward (source gy, destination gx): every tap,  shift = r*s - p + k*d
//
// A StaticAxis keeps all slots of a unit in one thread's registers and enumerates taps at compile
// time; a unit holds `Block` periods of phases. A PhasedAxis keeps one slot: its phase is a
// run-time number, and its taps are walked by a run-time loop.
#pragma once
#include "device/types.cuh"

namespace convt3d {

CONVT3D_CONSTEXPR int floor_mod(int a, int b) { return ((a % b) + b) % b; }
CONVT3D_CONSTEXPR int floor_div(int a, int b) { return (a - floor_mod(a, b)) / b; }
CONVT3D_CONSTEXPR int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }
CONVT3D_CONSTEXPR int div_up(int a, int b) { return (a + b - 1) / b; }
CONVT3D_CONSTEXPR int round_up(int a, int b) { return div_up(a, b) * b; }
/// The largest power of two, up to `limit`, that divides `count`.
CONVT3D_CONSTEXPR int largest_vector(int count, int limit) {
  int vector = 1;
  while (2 * vector <= limit && count % (2 * vector) == 0) vector *= 2;
  return vector;
}

template <bool Forward, int Kernel, int Stride, int Padding, int Dilation, int Block>
struct StaticAxis {
  static constexpr int kernel = Kernel;
  static constexpr int phases = 1;
  static constexpr int unit_source = Forward ? Block : Block * Stride;
  static constexpr int unit_destination = Forward ? Block * Stride : Block;
  static constexpr int slots = unit_destination;
  static constexpr int max_taps = Kernel;

  /// The tap that connects a slot with a shift, or -1.
  CONVT3D_CONSTEXPR static int tap(int slot, int shift) {
    const int numerator = Forward ? slot + Padding - shift * Stride : shift + Padding - slot * Stride;
    if (numerator < 0 || numerator % Dilation != 0) return -1;
    return numerator / Dilation < Kernel ? numerator / Dilation : -1;
  }
  CONVT3D_CONSTEXPR static bool valid(int slot, int k) {
    return !Forward || floor_mod(slot + Padding - k * Dilation, Stride) == 0;
  }
  CONVT3D_CONSTEXPR static int shift_of(int slot, int k) {
    return Forward ? (slot + Padding - k * Dilation) / Stride
                   : slot * Stride - Padding + k * Dilation;
  }
  CONVT3D_CONSTEXPR static int extreme_shift(int sign) {
    int best = 0;
    bool found = false;
    for (int slot = 0; slot < slots; ++slot)
      for (int k = 0; k < Kernel; ++k)
        if (valid(slot, k) && (!found || sign * shift_of(slot, k) > sign * best)) {
          best = shift_of(slot, k);
          found = true;
        }
    return best;
  }
  static constexpr int min_shift = extreme_shift(-1);
  static constexpr int max_shift = extreme_shift(+1);
  static constexpr int shifts = max_shift - min_shift + 1;

  /// Weights are packed in this order of taps.
  CONVT3D_CONSTEXPR static int tap_at(int position) { return position; }
};

/// The taps of one phase: kernel indices first + j * kernel_step with shift first_shift + j *
/// step.
struct PhaseTaps {
  int count;
  int first_position;  // in packed order
  int first_shift;
  int shift_step;
};

template <bool Forward, int Kernel, int Stride, int Padding, int Dilation>
struct PhasedAxis {
  using Whole = StaticAxis<Forward, Kernel, Stride, Padding, Dilation, 1>;
  static constexpr int kernel = Kernel;
  static constexpr int phases = Forward ? Stride : 1;
  static constexpr int unit_source = Forward ? 1 : Stride;
  static constexpr int unit_destination = Forward ? Stride : 1;
  static constexpr int slots = 1;
  static constexpr int min_shift = Whole::min_shift;
  static constexpr int max_shift = Whole::max_shift;
  static constexpr int shifts = Whole::shifts;

  static constexpr int kernel_step = Forward ? Stride / gcd(Stride, Dilation) : 1;

  CONVT3D_CONSTEXPR static int first_tap(int phase) {
    for (int k = 0; k < kernel_step && k < Kernel; ++k)
      if (Whole::valid(phase, k)) return k;
    return Kernel;
  }
  CONVT3D_CONSTEXPR static int count(int phase) {
    return first_tap(phase) < Kernel ? div_up(Kernel - first_tap(phase), kernel_step) : 0;
  }
  CONVT3D_CONSTEXPR static int most_taps() {
    int best = 0;
    for (int phase = 0; phase < phases; ++phase) best = count(phase) > best ? count(phase) : best;
    return best;
  }
  static constexpr int max_taps = most_taps();
  CONVT3D_CONSTEXPR static int fewest_taps() {
    int best = max_taps;
    for (int phase = 0; phase < phases; ++phase) best = count(phase) < best ? count(phase) : best;
    return best;
  }
  static constexpr int min_taps = fewest_taps();
  CONVT3D_DEVICE static PhaseTaps taps_of(int phase) {
    PhaseTaps taps{0, 0, 0, Forward ? -Dilation / gcd(Stride, Dilation) : Dilation};
    for (int before = 0; before < phase; ++before) taps.first_position += count(before);
    taps.count = count(phase);
    if (taps.count > 0) taps.first_shift = Whole::shift_of(phase, first_tap(phase));
    return taps;
  }
  /// Packed order: phase by phase, ascending taps within a phase.
  CONVT3D_DEVICE static int tap_at(int position) {
    for (int phase = 0; phase < phases; ++phase) {
      if (position < count(phase)) return first_tap(phase) + position * kernel_step;
      position -= count(phase);
    }
    return 0;
  }
};

}  // namespace convt3d
