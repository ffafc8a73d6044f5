// The D axis of a strided gradient by input, walked slice by slice of the output gradient.
//
// Slice z = Stride * period + residue + lead meets the units (of the input gradient) period + u,
// one for each tap k with Stride * (period + u) = z + Padding - k * Dilation. The units that
// slices of one period meet are a window of neighbours: each is a set of sums, the lowest unit's
// the first.
//
//     kernel 3, stride 2, padding 1      slice   2q  2q+1 2q+2 2q+3
//                                        unit q   1    2                 taps, by unit: a window
//                                        unit q+1      0    1    2       of two units
#pragma once
#include "geometry/axis.cuh"

namespace convt3d {

template <int Kernel, int Stride, int Padding, int Dilation>
struct SweptAxis {
  static constexpr int stride = Stride;
  CONVT3D_CONSTEXPR static bool meets(int from, int residue, int k) {
    return floor_mod(residue + from + Padding - k * Dilation, Stride) == 0;
  }
  CONVT3D_CONSTEXPR static int unit_of(int from, int residue, int k) {
    return (residue + from + Padding - k * Dilation) / Stride;
  }
  /// The lowest (sign -1) or highest (1) unit of a period that begins with slice `from`.
  CONVT3D_CONSTEXPR static int extreme(int from, int sign) {
    int best = 0;
    bool found = false;
    for (int residue = 0; residue < Stride; ++residue)
      for (int k = 0; k < Kernel; ++k)
        if (meets(from, residue, k) && (!found || sign * unit_of(from, residue, k) > sign * best)) {
          best = unit_of(from, residue, k);
          found = true;
        }
    return best;
  }
  /// The lowest unit of a slice.
  CONVT3D_CONSTEXPR static int lowest(int from, int residue) {
    int best = extreme(from, -1);
    for (int k = 0; k < Kernel; ++k)
      if (meets(from, residue, k)) best = unit_of(from, residue, k);
    return best;
  }
  /// Slices of a period that do not meet its lowest unit: their sums would begin within those of
  /// others, which ptxas finds no registers for.
  CONVT3D_CONSTEXPR static int astray(int from) {
    int found = 0;
    for (int residue = 0; residue < Stride; ++residue)
      found += lowest(from, residue) != extreme(from, -1);
    return found;
  }
  CONVT3D_CONSTEXPR static int best_lead() {
    int best = 0;
    for (int from = 1; from < Stride; ++from)
      if (astray(from) < astray(best)) best = from;
    return best;
  }
  static constexpr int lead = best_lead();
  static constexpr int min_unit = extreme(lead, -1), max_unit = extreme(lead, 1);
  static constexpr int window = max_unit - min_unit + 1;

  CONVT3D_CONSTEXPR static int count(int residue) {
    int found = 0;
    for (int k = 0; k < Kernel; ++k) found += meets(lead, residue, k);
    return found;
  }
  /// Units of a residue, lowest and highest.
  CONVT3D_CONSTEXPR static int first_unit(int residue) { return lowest(lead, residue); }
  CONVT3D_CONSTEXPR static int last_unit(int residue) {
    return first_unit(residue) + count(residue) - 1;
  }
  CONVT3D_CONSTEXPR static int most_taps() {
    int best = 0;
    for (int residue = 0; residue < Stride; ++residue)
      best = count(residue) > best ? count(residue) : best;
    return best;
  }
  static constexpr int most = most_taps();

  // In packed order: residue by residue, units of one ascending.
  CONVT3D_CONSTEXPR static int before(int residue) {
    int found = 0;
    for (int r = 0; r < residue; ++r) found += count(r);
    return found;
  }
  CONVT3D_CONSTEXPR static int residue_of(int k) { return floor_mod(k * Dilation - Padding - lead, Stride); }
  CONVT3D_CONSTEXPR static int place_of(int k) {
    return unit_of(lead, residue_of(k), k) - first_unit(residue_of(k));
  }
  /// Whether the units of a slice are neighbours from the lowest one on.
  static constexpr bool dense = Dilation == gcd(Stride, Dilation) && astray(lead) == 0;
};

}  // namespace convt3d
