// Products of float32 operands split into two float16 parts (F16x3), with weights as the first
// operand.
//
// float16 has 11 bits, as TF32 has, and twice its rate: an operand is its high half and a low one
// (MathF16x3), and high x high, high x low and low x high are half the work of the same three in
// TF32. What float16 lacks is range. So each row of the source and each channel's weights are
// scaled by a power of two before they are split, their largest value to 2^14 or more; sums of a
// row are scaled back when they join the others. A product x * w then errs by at most 2^-22 of
// itself, 2^-50 of the row's largest |x| times |w|, and 2^-40 of the channel's largest |w| times
// |x|.
//
//     products of 16 rows (8 channels of two slots) x 8 units, 16 deep:
//       crosswise   8 source channels of one shift, low half x high weight, high half x low weight
//       high        8 source channels of two shifts
//
// Splitters rewrite a row of the ring in place: channels c and c + 4 of a step, one after the
// other at each position, in the order of an operand's registers. Four positions of both fill the
// same words as before:
//
//     channel c      [p: c, c + 4][p + 1: c, c + 4]
//     channel c + 4  [p + 2: c, c + 4][p + 3: c, c + 4]
#pragma once
#include "ampere/strided/weights_first.cuh"

namespace convt3d {

/// Splits a row of the ring, all channels at all its slices, by one warp. Returns what its sums
/// are to be multiplied by.
template <typename Config>
CONVT3D_DEVICE float split_row(uint32_t row, int lane) {
  using Box = StridedBox<Config>;
  using Math = typename Config::Math;
  constexpr int quads = Box::plane_pitch / 4;
  constexpr int items = Config::depth * 4 * quads;
  const auto address = [row](int item) {
    const int channel = item / quads;
    return row + uint32_t(16 * (item - channel * quads) +
                          4 * Box::plane_pitch * (channel / 4 * 8 + channel % 4));
  };
  // Items whose loads are on their way together.
  constexpr int turns = div_up(items, 32);
  constexpr int batch = div_up(turns, div_up(turns, 5));
  int part[2] = {0, 0};
#pragma unroll 1
  for (int first = lane; first < items; first += 32 * batch) {
    uint32_t word[batch][8];
#pragma unroll
    for (int i = 0; i < batch; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Behind the last item: the last again.
        const uint32_t from =
            address(min(first + 32 * i, items - 1)) + half * 16 * Box::plane_pitch;
        uint32_t* const to = word[i] + 4 * half;
        load_shared(from, to[0], to[1], to[2], to[3]);
      }
#pragma unroll
    for (int i = 0; i < 8 * batch; ++i) part[i % 2] = Math::larger(part[i % 2], word[i / 8][i % 8]);
  }
  int largest = max(part[0], part[1]);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  __syncwarp();  // lanes have read the last item, which is another's
  const int exponent = Math::exponent(largest);
  const float scale = Math::scale(exponent);
#pragma unroll 1
  for (int first = lane; first < items; first += 32 * batch) {
    uint32_t word[batch][2][4];
#pragma unroll
    for (int i = 0; i < batch; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (first + 32 * i < items)
          load_shared(address(first + 32 * i) + half * 16 * Box::plane_pitch, word[i][half][0],
                      word[i][half][1], word[i][half][2], word[i][half][3]);
#pragma unroll
    for (int i = 0; i < batch; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (first + 32 * i < items) {
          const auto at = [&](int which, int position) {
            return Math::split(float_of(word[i][which][position]) * scale);
          };
          store_shared(address(first + 32 * i) + half * 16 * Box::plane_pitch, at(0, 2 * half),
                       at(1, 2 * half), at(0, 2 * half + 1), at(1, 2 * half + 1));
        }
  }
  return Math::unscale(exponent);
}

/// Where a lane's window lies in a row that was split: position pairs alternate between two
/// channels.
template <typename Config>
struct HalfWindow {
  static_assert(Config::window_vector == 2, "pairs of positions");
  /// Bytes from channel lane % 4 of a step to the pair of positions that begins at an even one,
  /// and from there to the next pair.
  CONVT3D_DEVICE static uint32_t place(int position) {
    return uint32_t(4 * (position / 4 * 4 + position / 2 % 2 * 4 * StridedBox<Config>::plane_pitch));
  }
  CONVT3D_DEVICE static uint32_t next(int position) {
    constexpr uint32_t planes = 16 * StridedBox<Config>::plane_pitch;
    return position / 2 % 2 ? 16 - planes : planes;
  }
};

/// All products of one step.
template <typename Config, typename Windows>
CONVT3D_DEVICE void multiply_f16x3(StridedSums<Config>& sum, const Windows& windows,
                                   uint32_t weights) {
  using Math = typename Config::Math;
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  using Blocks = typename Config::Halves;
  constexpr int fragments_m = Config::fragments_m;
  constexpr int fragments_n = Config::fragments_n;
  constexpr bool only_step = Config::chunks * Config::depth == 1;
  constexpr int shifts = Axis2::shifts, positions = shifts + 1;
#pragma unroll
  for (int shift0 = 0; shift0 < Axis0::shifts; ++shift0) {
#pragma unroll
    for (int shift1 = 0; shift1 < Axis1::shifts; ++shift1) {
      if (slots_at<Axis0>(shift0) == 0 || slots_at<Axis1>(shift1) == 0) continue;
      typename Math::B x[fragments_m][positions];
      uint32_t high[fragments_m][positions];
#pragma unroll
      for (int m = 0; m < fragments_m; ++m) {
        uint32_t raw[Config::window / 2][4];
        const uint32_t from = windows(m, shift0, shift1);
#pragma unroll
        for (int v = 0; v < Config::window / 2; ++v)
          load_shared(from + v / 2 * 16 + v % 2 * windows.next[m], raw[v][0], raw[v][1], raw[v][2],
                      raw[v][3]);
#pragma unroll
        for (int i = 0; i < positions; ++i) {
          const int at = Config::window_offset + i;
#pragma unroll
          for (int half = 0; half < 2; ++half) x[m][i].word[half] = raw[at / 2][at % 2 * 2 + half];
          high[m][i] = permute_bytes(x[m][i].word[0], x[m][i].word[1], 0x5410);
        }
      }
#pragma unroll
      for (int slot0 = 0; slot0 < Axis0::slots; ++slot0) {
        const int tap0 = Axis0::tap(slot0, shift0 + Axis0::min_shift);
        if (tap0 < 0) continue;
#pragma unroll
        for (int slot1 = 0; slot1 < Axis1::slots; ++slot1) {
          const int tap1 = Axis1::tap(slot1, shift1 + Axis1::min_shift);
          if (tap1 < 0) continue;
          const bool fresh =
              only_step && !tap_before<Axis0>(slot0, shift0) && !tap_before<Axis1>(slot1, shift1);
#pragma unroll
          for (int pair = 0; pair < Blocks::pairs; ++pair) {
            StridedPart<Config> part = {};
            // Crosswise products are 2^-11 of the others: they come first.
#pragma unroll
            for (int rank = 0; rank < Blocks::own; ++rank) {
              const bool crosswise = rank < shifts;
              const int shift = crosswise ? rank : 2 * (rank - shifts);
              const int block = crosswise ? Blocks::both + rank : rank - shifts;
              // An odd last shift has no other beside it: its weights are zeros.
              const int other = shift + 1 < shifts ? shift + 1 : shift;
#pragma unroll
              for (int n = 0; n < fragments_n; ++n) {
                typename Math::A a;
                Math::load(a, weights + 4u * (Blocks::block(tap0, tap1, pair, block) *
                                                  Config::tap_words +
                                              n * Config::fragment_words));
#pragma unroll
                for (int m = 0; m < fragments_m; ++m)
#pragma unroll
                  for (int unit = 0; unit < 2; ++unit) {
                    const typename Math::B b =
                        crosswise ? x[m][shift + unit]
                                  : typename Math::B{{high[m][shift + unit], high[m][other + unit]}};
                    Math::multiply_add(part.value[unit][m][n], a, b);
                  }
              }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
              for (int m = 0; m < fragments_m; ++m)
#pragma unroll
                for (int n = 0; n < fragments_n; ++n) {
                  const float factor = windows.factor(m, n, shift1);
                  float(&to)[4] = sum.value[slot0][slot1][2 * pair + half][m][n];
#pragma unroll
                  for (int c = 0; c < 4; ++c) {
                    const float value = part.value[c / 2][m][n][2 * half + c % 2];
                    to[c] = fresh ? value * factor : to[c] + value * factor;
                  }
                }
          }
        }
      }
    }
  }
}

}  // namespace convt3d
