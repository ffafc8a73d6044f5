// Products of 16-bit operands of a ring, with weights as the first operand: 16 rows (8 channels of two
// slots) x 8 units, 8 source channels at two shifts along W deep.
//
// Preparers rewrite a row of the ring in place: two planes of channels become one of pairs, a word a
// position, which is what a lane's register holds of an operand at one shift.
#pragma once
#include "strided_halves.cuh"

namespace convt3d {

/// Makes pairs of channels of a row of the ring, all of them at all its slices, by one warp.
template <typename Config>
CONVT3D_DEVICE void pair_row(uint32_t row, int lane) {
  using Box = StridedBox<Config>;
  // Vectors of a channel: of both of a pair, they lie where the words of as many positions are to lie.
  constexpr int vectors = Box::plane_pitch / 8;
  constexpr int turns = div_up(vectors, 32);
  static_assert(turns <= 3, "a pair of planes passes through registers");
#pragma unroll 1
  for (int pair = 0; pair < Box::words; ++pair) {
    const uint32_t plane = row + 4 * pair * Box::plane_pitch + 16 * lane;
    uint32_t word[turns][2][4];
#pragma unroll
    for (int turn = 0; turn < turns; ++turn)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (32 * turn + lane < vectors)
          load_shared(plane + 512 * turn + half * 2 * Box::plane_pitch, word[turn][half][0],
                      word[turn][half][1], word[turn][half][2], word[turn][half][3]);
    __syncwarp();
#pragma unroll
    for (int turn = 0; turn < turns; ++turn)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto at = [&](int position) {
          const int i = 2 * half + position / 2;
          return permute_bytes(word[turn][0][i], word[turn][1][i], position % 2 ? 0x7632 : 0x5410);
        };
        if (32 * turn + lane < vectors)
          store_shared(plane + 1024 * turn + 16 * lane + 16 * half, at(0), at(1), at(2), at(3));
      }
  }
}

template <typename Config>
using PairParts = StridedPart<Config>[Config::Axis0::slots][Config::Axis1::slots]
                                     [Config::PreparedBlocks::pairs];

/// Sums as products want them, and back: names of registers.
template <typename Config, bool back>
CONVT3D_DEVICE void exchange_sums(StridedSums<Config>& sum, PairParts<Config>& part) {
#pragma unroll
  for (int slot0 = 0; slot0 < Config::Axis0::slots; ++slot0)
#pragma unroll
    for (int slot1 = 0; slot1 < Config::Axis1::slots; ++slot1)
#pragma unroll
      for (int slot2 = 0; slot2 < Config::Axis2::slots; ++slot2)
#pragma unroll
        for (int m = 0; m < Config::fragments_m; ++m)
#pragma unroll
          for (int n = 0; n < Config::fragments_n; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              float& own = part[slot0][slot1][slot2 / 2].value[c / 2][m][n][2 * (slot2 % 2) + c % 2];
              float& other = sum.value[slot0][slot1][slot2][m][n][c];
              if (back)
                other = own;
              else
                own = other;
            }
}

/// All products of one step.
template <typename Config, typename Windows>
CONVT3D_DEVICE void multiply_pairs(StridedSums<Config>& sum, const Windows& windows,
                                   uint32_t weights) {
  using Math = typename Config::Math;
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  using Blocks = typename Config::PreparedBlocks;
  constexpr int fragments_m = Config::fragments_m;
  constexpr int fragments_n = Config::fragments_n;
  constexpr int shifts = Axis2::shifts;
  PairParts<Config> part;
  exchange_sums<Config, false>(sum, part);
#pragma unroll
  for (int shift0 = 0; shift0 < Axis0::shifts; ++shift0) {
#pragma unroll
    for (int shift1 = 0; shift1 < Axis1::shifts; ++shift1) {
      if (slots_at<Axis0>(shift0) == 0 || slots_at<Axis1>(shift1) == 0) continue;
      uint32_t raw[fragments_m][1][Config::window];
#pragma unroll
      for (int m = 0; m < fragments_m; ++m) load_window<Config>(raw[m], windows(m, shift0, shift1));
#pragma unroll
      for (int slot0 = 0; slot0 < Axis0::slots; ++slot0) {
        const int tap0 = Axis0::tap(slot0, shift0 + Axis0::min_shift);
        if (tap0 < 0) continue;
#pragma unroll
        for (int slot1 = 0; slot1 < Axis1::slots; ++slot1) {
          const int tap1 = Axis1::tap(slot1, shift1 + Axis1::min_shift);
          if (tap1 < 0) continue;
#pragma unroll
          for (int pair = 0; pair < Blocks::pairs; ++pair)
#pragma unroll
            for (int rank = 0; rank < Blocks::both; ++rank) {
              const int shift = 2 * rank;
              // An odd last shift has no other beside it: its weights are zeros.
              const int other = shift + 1 < shifts ? shift + 1 : shift;
#pragma unroll
              for (int n = 0; n < fragments_n; ++n) {
                typename Math::A a;
                Math::load(a, weights + 4u * (Blocks::block(tap0, tap1, pair, rank) *
                                                  Config::tap_words +
                                              n * Config::fragment_words));
#pragma unroll
                for (int m = 0; m < fragments_m; ++m)
#pragma unroll
                  for (int unit = 0; unit < 2; ++unit) {
                    const int at = Config::window_offset + unit;
                    const typename Math::B b{{raw[m][0][at + shift], raw[m][0][at + other]}};
                    Math::multiply_add(part[slot0][slot1][pair].value[unit][m][n], a, b);
                  }
              }
            }
        }
      }
    }
  }
  exchange_sums<Config, true>(sum, part);
}

}  // namespace convt3d
