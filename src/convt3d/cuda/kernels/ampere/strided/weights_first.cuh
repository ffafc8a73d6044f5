// Products of the strided kernel with weights as the first operand: 8 channels of two slots by 8
// units, in float32's split arithmetic (StridedBlocks of ampere/strided/config.cuh).
//
// A lane holds one unit's value of a source channel, so each value of its window is split once
// for all taps; where units are rows, a fragment's registers hold two units side by side, and
// each value is split again for every shift along W.
#pragma once
#include "ampere/strided/store.cuh"

namespace convt3d {

/// Sums of a chain of products: [unit of a pair][fragment of units][fragment of channels], each
/// with two pairs of units of the first slot, then of the second.
template <typename Config>
struct StridedPart {
  float value[2][Config::fragments_m][Config::fragments_n][4];
};

/// part += a[i] * units at shift[i], for all i of a chain whose shift is not negative.
template <typename Config, int chain, int positions>
CONVT3D_DEVICE void multiply_blocks(
    StridedPart<Config>& part, const typename Config::Math::A (&a)[chain][Config::fragments_n],
    const typename Config::Math::B (&x)[Config::fragments_m][positions],
    const int (&shift)[chain]) {
#pragma unroll
  for (int p = 0; p < 3; ++p)
#pragma unroll
    for (int i = 0; i < chain; ++i)
#pragma unroll
      for (int n = 0; n < Config::fragments_n; ++n)
#pragma unroll
        for (int m = 0; m < Config::fragments_m; ++m)
#pragma unroll
          for (int unit = 0; unit < 2; ++unit)
            if (shift[i] >= 0)
              Config::Math::multiply_part(p, part.value[unit][m][n], a[i][n],
                                          x[m][shift[i] + unit]);
}

/// One slot's half of a chain joins its sums; `fresh`: these were zero.
template <typename Config>
CONVT3D_DEVICE void join_sums(float (&sum)[Config::fragments_m][Config::fragments_n][4],
                              const StridedPart<Config>& part, int half, bool fresh) {
#pragma unroll
  for (int m = 0; m < Config::fragments_m; ++m)
#pragma unroll
    for (int n = 0; n < Config::fragments_n; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float value = part.value[c / 2][m][n][2 * half + c % 2];
        sum[m][n][c] = fresh ? value : sum[m][n][c] + value;
      }
}

/// All products of one step.
template <typename Config, typename Windows>
CONVT3D_DEVICE void multiply_weights_first(StridedSums<Config>& sum, const Windows& windows,
                                           uint32_t weights) {
  using Math = typename Config::Math;
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  using Blocks = typename Config::Blocks;
  constexpr int fragments_m = Config::fragments_m;
  constexpr int fragments_n = Config::fragments_n;
  constexpr bool only_step = Config::chunks * Config::depth == 1;
  constexpr int positions = Axis2::shifts + 1;
  constexpr int chain = chain_length<Config>(Blocks::full_shifts);
#pragma unroll
  for (int shift0 = 0; shift0 < Axis0::shifts; ++shift0) {
#pragma unroll
    for (int shift1 = 0; shift1 < Axis1::shifts; ++shift1) {
      if (slots_at<Axis0>(shift0) == 0 || slots_at<Axis1>(shift1) == 0) continue;
      typename Math::B x[fragments_m][positions];
#pragma unroll
      for (int m = 0; m < fragments_m; ++m) {
        uint32_t raw[Config::halves][Config::window];
        load_window<Config>(raw, windows(m, shift0, shift1));
#pragma unroll
        for (int i = 0; i < positions; ++i) {
          const int at = Config::window_offset + i;
          const uint32_t words[2] = {raw[0][at], raw[1][at]};
          Math::prepare(x[m][i], words);
        }
      }
#pragma unroll
      for (int slot0 = 0; slot0 < Axis0::slots; ++slot0) {
        const int tap0 = Axis0::tap(slot0, shift0 + Axis0::min_shift);
        if (tap0 < 0) continue;
        const bool first0 = only_step && !tap_before<Axis0>(slot0, shift0);
#pragma unroll
        for (int slot1 = 0; slot1 < Axis1::slots; ++slot1) {
          const int tap1 = Axis1::tap(slot1, shift1 + Axis1::min_shift);
          if (tap1 < 0) continue;
#pragma unroll
          for (int pair = 0; pair < Blocks::pairs; ++pair) {
            bool fresh[2];
            fresh[0] = fresh[1] = first0 && !tap_before<Axis1>(slot1, shift1);
#pragma unroll
            for (int first = 0; first < Blocks::full_shifts; first += chain) {
              typename Math::A a[chain][fragments_n];
              StridedPart<Config> part = {};
              int shift[chain];
              bool used[2] = {false, false};
#pragma unroll
              for (int i = 0; i < chain; ++i) {
                const int at = Blocks::shift_of(false, first + i);
                bool any = false;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  const bool met = meets<Axis2>(2 * pair + half, at);
                  used[half] = used[half] || met;
                  any = any || met;
                }
                shift[i] = any ? at : -1;
#pragma unroll
                for (int n = 0; n < fragments_n; ++n)
                  if (any)
                    Math::load(a[i][n],
                               weights + 4u * (Blocks::full_block(tap0, tap1, pair, first + i) *
                                                   Config::tap_words +
                                               n * Config::fragment_words));
              }
              multiply_blocks<Config>(part, a, x, shift);
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                if (!used[half]) continue;
                join_sums<Config>(sum.value[slot0][slot1][2 * pair + half], part, half,
                                  fresh[half]);
                fresh[half] = false;
              }
            }
          }
        }
#pragma unroll
        for (int rank = 0; rank < Blocks::lone_shifts; ++rank) {
          const int shift[1] = {Blocks::shift_of(true, rank)};
          const int slot2 = meets<Axis2>(0, shift[0]) ? 0 : 1;
          bool fresh2 = true;
#pragma unroll
          for (int i = 0; i < Axis2::shifts; ++i)
            if (meets<Axis2>(slot2, i) && (i < shift[0] || !Blocks::lone(i))) fresh2 = false;
          typename Math::A a[1][fragments_n];
          StridedPart<Config> part = {};
#pragma unroll
          for (int n = 0; n < fragments_n; ++n)
            Math::load(a[0][n], weights + 4u * (Blocks::lone_block(tap0, shift1, rank) *
                                                    Config::tap_words +
                                                n * Config::fragment_words));
          multiply_blocks<Config>(part, a, x, shift);
#pragma unroll
          for (int slot1 = 0; slot1 < 2; ++slot1)
            if (meets<Axis1>(slot1, shift1))
              join_sums<Config>(sum.value[slot0][slot1][slot2], part, slot1,
                                fresh2 && first0 && !tap_before<Axis1>(slot1, shift1));
        }
      }
    }
  }
}

}  // namespace convt3d
