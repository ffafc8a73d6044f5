// Groups of eight channels, of ndhwc/kernel.cu: a warp multiplies 16 units, one group and two
// neighbouring shifts of W at a time (m16n8k16), out of the same boxes. A row of a box has the
// channels of all groups of a work tile; a lane loads its two channels of units g and g + 8, four
// bytes each, which lie in different banks under the swizzle at any shift. So one box serves all
// shifts.
#pragma once
#include "ndhwc/config.cuh"

namespace convt3d {

/// A lane's operands and where they come from.
template <typename Config>
struct NdhwcLane {
  using Multiply = Math16<typename Config::Type>;
  using Paired = typename Config::Paired;
  uint32_t box, weights;          // weights: of this lane
  int row[Config::blocks][2];     // rows of the box of units g and g + 8
  int slice_rows, line_rows;
  uint32_t units[Config::blocks][Config::groups_per_tile][2][2];  // shift, half
  uint32_t words[Config::fragments][4];                // of two products

  /// The channels at one of a pair's shifts.
  CONVT3D_DEVICE void load_units(int which, int shift) {
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at = row[block][half] + shift;
        const uint32_t place = box + at * 128 + at % 8 * 16 + threadIdx.x % 4 * 4;
#pragma unroll
        for (int group = 0; group < Config::groups_per_tile; ++group)
          units[block][group][which][half] = load_shared(place ^ group * 16);
      }
  }

  /// All products of a box from number `Index` on.
  template <int Index>
  CONVT3D_DEVICE void multiply(NdhwcSums<Config>& sum) {
    if constexpr (Index < Paired::count) {
      constexpr auto tap = Paired::at(Index), before = Paired::at(Index == 0 ? 0 : Index - 1);
      if constexpr (Index == 0 || tap.shift0 != before.shift0 || tap.shift1 != before.shift1 ||
                    tap.pair != before.pair) {
        const int shift = tap.shift0 * slice_rows + tap.shift1 * line_rows + 2 * tap.pair;
        load_units(0, shift);
        if constexpr (2 * tap.pair + 1 < Config::Inner2::shifts) load_units(1, shift + 1);
      }
      if constexpr (Index % 2 == 0) {
#pragma unroll
        for (int f = 0; f < Config::fragments; ++f)
          load_shared(weights + (Index / 2 * Config::fragments + f) * 512, words[f][0],
                      words[f][1], words[f][2], words[f][3]);
      }
      // Where one of the shifts has no tap, zeros meet zeros: what lies there may be infinite.
      constexpr bool first = tap.tap2[0] >= 0, second = tap.tap2[1] >= 0;
#pragma unroll
      for (int f = 0; f < Config::fragments; ++f) {
        const typename Multiply::B columns{{words[f][Index % 2 * 2], words[f][Index % 2 * 2 + 1]}};
#pragma unroll
        for (int block = 0; block < Config::blocks; ++block) {
          const auto& u = units[block][f / Config::group_tiles];
          const typename Multiply::A rows{{first ? u[0][0] : 0, first ? u[0][1] : 0,
                                           second ? u[1][0] : 0, second ? u[1][1] : 0}};
          Multiply::multiply_add(*reinterpret_cast<float(*)[4]>(
                                     &sum[tap.slot0][tap.slot1][tap.slot2][block][4 * f]),
                                 rows, columns);
        }
      }
      multiply<Index + 1>(sum);
    }
  }
};

}  // namespace convt3d
