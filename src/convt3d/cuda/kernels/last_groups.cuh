// Groups of eight channels, of wgmma_last.cu: a warp multiplies 16 units and one group at a time
// (m16n8k8), out of the same boxes. A row of a box has the channels of all groups of a team; a lane
// loads its two channels of units g and g + 8, four bytes each, which lie in different banks under the
// swizzle at any shift. So one box serves all shifts.
#pragma once
#include "wgmma_last_config.cuh"

namespace convt3d {

/// Tap number `Index` of all, those of one shift of W together, then of D, then of H.
template <typename Config, int Index>
struct LastTap {
  using Taps0 = TapsByShift<typename Config::Inner0>;
  using Taps1 = TapsByShift<typename Config::Inner1>;
  using Taps2 = TapsByShift<typename Config::Inner2>;
  static constexpr int at0 = Index % Config::taps / Config::Inner1::kernel;
  static constexpr int at1 = Index % Config::taps % Config::Inner1::kernel;
  static constexpr int at2 = Index / Config::taps;
  static constexpr int slot0 = Taps0::at(at0).slot, shift0 = Taps0::at(at0).shift;
  static constexpr int slot1 = Taps1::at(at1).slot, shift1 = Taps1::at(at1).shift;
  static constexpr int slot2 = Taps2::at(at2).slot, shift2 = Taps2::at(at2).shift;
};

/// A lane's operands and where they come from.
template <typename Config>
struct LastLane {
  using Multiply = Math16K8<typename Config::Type>;
  uint32_t box, weights;          // weights: of this lane
  int row[Config::blocks][2];     // rows of the box of units g and g + 8
  int slice_rows, line_rows;
  typename Multiply::A units[Config::blocks][Config::team];
  uint32_t words[Config::fragments][4];  // of four taps

  CONVT3D_DEVICE void load_units(int shift) {
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at = row[block][half] + shift;
        const uint32_t place = box + at * 128 + at % 8 * 16 + threadIdx.x % 4 * 4;
#pragma unroll
        for (int group = 0; group < Config::team; ++group)
          units[block][group].word[half] = load_shared(place ^ group * 16);
      }
  }

  /// All products of a box from tap `Index` on.
  template <int Index>
  CONVT3D_DEVICE void multiply(LastSums<Config>& sum) {
    if constexpr (Index < Config::taps * Config::Inner2::kernel) {
      using Tap = LastTap<Config, Index>;
      using Before = LastTap<Config, Index == 0 ? 0 : Index - 1>;
      if constexpr (Index == 0 || Tap::shift0 != Before::shift0 || Tap::shift1 != Before::shift1 ||
                    Tap::shift2 != Before::shift2)
        load_units(Tap::shift0 * slice_rows + Tap::shift1 * line_rows + Tap::shift2);
      if constexpr (Index % 4 == 0) {
#pragma unroll
        for (int f = 0; f < Config::fragments; ++f)
          load_shared(weights + (Index / 4 * Config::fragments + f) * 512, words[f][0],
                      words[f][1], words[f][2], words[f][3]);
      }
#pragma unroll
      for (int f = 0; f < Config::fragments; ++f) {
        const typename Multiply::B columns{{words[f][Index % 4]}};
#pragma unroll
        for (int block = 0; block < Config::blocks; ++block)
          Multiply::multiply_add(
              *reinterpret_cast<float(*)[4]>(
                  &sum[Tap::slot0][Tap::slot1][Tap::slot2][block][4 * f]),
              units[block][f / Config::group_tiles], columns);
      }
      multiply<Index + 1>(sum);
    }
  }
};

}  // namespace convt3d
