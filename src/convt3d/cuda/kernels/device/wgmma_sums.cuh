// Sums of warpgroup products for each slot of a unit.
#pragma once
#include "device/wgmma.cuh"
#include "geometry/walked_axis.cuh"

namespace convt3d {

/// Sums that products write, as they are now: what was written to them comes before, what reads
/// them after. Slots without a tap hold nothing but zeros, which need no registers.
template <typename Axis0, typename Axis1, typename Axis2, int Blocks, int Sums>
CONVT3D_DEVICE void operand_fence(float (&sum)[Axis0::slots][Axis1::slots][Axis2::slots][Blocks][Sums]) {
#pragma unroll
  for (int slot0 = 0; slot0 < Axis0::slots; ++slot0)
#pragma unroll
    for (int slot1 = 0; slot1 < Axis1::slots; ++slot1)
#pragma unroll
      for (int slot2 = 0; slot2 < Axis2::slots; ++slot2) {
        if (!has_tap<Axis0>(slot0) || !has_tap<Axis1>(slot1) || !has_tap<Axis2>(slot2)) continue;
#pragma unroll
        for (int block = 0; block < Blocks; ++block)
#pragma unroll
          for (int i = 0; i < Sums; ++i) wgmma_accumulated(sum[slot0][slot1][slot2][block][i]);
      }
}

/// Calls `visit.at<N>()`, N the one from `Begin` to before `End` that `number` is. So a loop at
/// run time can take what lies in registers: a body for each N would take seconds to compile, and
/// more instructions than their cache holds.
template <int Begin, int End, typename Visit>
CONVT3D_DEVICE void visit_number(int number, const Visit& visit) {
  if constexpr (End - Begin == 1) {
    visit.template at<Begin>();
  } else {
    constexpr int middle = (Begin + End) / 2;
    if (number < middle)
      visit_number<Begin, middle>(number, visit);
    else
      visit_number<middle, End>(number, visit);
  }
}

}  // namespace convt3d
