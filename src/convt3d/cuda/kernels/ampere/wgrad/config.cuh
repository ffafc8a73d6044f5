// The compile-time description of a gradient-by-weight kernel and of its partial sums.
#pragma once
#include "device/arithmetic.cuh"
#include "geometry/layer.cuh"
#include "load/box.cuh"

namespace convt3d {

struct AmpereWgradConfig : Layer {
  using Math = CONVT3D_MATH;
  static constexpr bool half = Type::channels_per_word == 2;

  // A CTA's share of the kernel: a box of taps.
  static constexpr int taps0 = CONVT3D_TAPS0;
  static constexpr int taps1 = CONVT3D_TAPS1;
  static constexpr int taps2 = CONVT3D_TAPS2;
  static constexpr int taps = taps0 * taps1 * taps2;
  static constexpr int tap_tiles0 = div_up(kernel0, taps0);
  static constexpr int tap_tiles1 = div_up(kernel1, taps1);
  static constexpr int tap_tiles2 = div_up(kernel2, taps2);

  // Warps over x channels (rows), gradient channels (columns) and positions (depth).
  static constexpr int warps_m = CONVT3D_WARPS_M;
  static constexpr int warps_n = CONVT3D_WARPS_N;
  static constexpr int warps_k = CONVT3D_WARPS_K;
  static constexpr int fragments_m = CONVT3D_FRAGMENTS_M;
  static constexpr int fragments_n = CONVT3D_FRAGMENTS_N;
  static constexpr int threads = 32 * warps_m * warps_n * warps_k;
  /// Of few gradient channels all at all taps of the CTA are columns, channels fastest. Else
  /// columns are channels, and a fragment of 8 is of one tap.
  static constexpr bool taps_in_columns = target_channels <= 5;
  static constexpr int columns = 8 * warps_n * fragments_n;
  static_assert(!taps_in_columns || taps * target_channels <= columns, "a column for each");
  static constexpr int taps_apart = taps_in_columns ? 1 : taps;  // that have products of their own
  static constexpr int channel_tile_m = 16 * warps_m * fragments_m;
  static constexpr int channel_tile_n = taps_in_columns ? target_channels : columns;
  static constexpr int channel_tiles_m = div_up(source_channels, channel_tile_m);
  static constexpr int channel_tiles_n = div_up(target_channels, channel_tile_n);
  /// CTAs that see the same positions: every box of taps and pair of channel tiles of every
  /// group.
  static constexpr int variants = tap_tiles0 * tap_tiles1 * tap_tiles2 * channel_tiles_m *
                                  channel_tiles_n * groups;

  static constexpr int depth = half ? 16 : 8;  // positions of one matrix step, along W

  // Partial sums: [split][variant][register][thread of one position share].
  static constexpr int registers = taps_apart * fragments_m * fragments_n * 4;
  static constexpr int share_threads = 32 * warps_m * warps_n;
  static constexpr int variant_elements = registers * share_threads;
};

/// The boxes of x and of the output gradient. Plane pitches of 4 and position pitches of 8 modulo
/// 32 words keep TF32 fragments free of bank conflicts; 16-bit positions are odd multiples of 16
/// bytes apart for ldmatrix.
template <typename Config, bool gradient>
struct AmpereWgradBox {
  using Type = typename Config::Type;
  static constexpr int channels = gradient ? Config::target_channels : Config::source_channels;
  static constexpr int64_t all_channels = int64_t(Config::groups) * channels;
  /// One channel lies alike in both layouts, and is copied faster as contiguous.
  static constexpr bool channels_last =
      all_channels > 1 && (gradient ? CONVT3D_TARGET_CHANNELS_LAST : CONVT3D_SOURCE_CHANNELS_LAST);
  static constexpr int vector = gradient ? CONVT3D_TARGET_VECTOR : CONVT3D_SOURCE_VECTOR;
  /// Whether 16-bit rows of W are copied as they lie: those of a tensor that no tap shifts.
  static constexpr bool paired = Config::half && !channels_last && vector == 8;
  static_assert(!paired || !gradient || (Config::taps == 1 && !Config::taps_in_columns &&
                                         Layer::stride2 == 1 && Layer::padding2 % 8 == 0),
                "rows that begin at multiples of 8 positions");
  static constexpr bool position_major = channels_last || (Config::half && !paired);
  static constexpr int channels_per_word = paired ? 1 : Type::channels_per_word;
  static constexpr int threads = Config::threads;
  static constexpr int tile_channels =
      gradient ? Config::channel_tile_n : Config::channel_tile_m;
  static constexpr int words = div_up(tile_channels, channels_per_word);
  // Along an axis of a single tap only every stride-th position of the gradient is of use.
  static constexpr int step0 = gradient && Config::taps0 == 1 ? Layer::stride0 : 1;
  static constexpr int step1 = gradient && Config::taps1 == 1 ? Layer::stride1 : 1;
  static constexpr int step2 = gradient && Config::taps2 == 1 ? Layer::stride2 : 1;
  /// Box positions from one position of x to the next.
  static constexpr int unit0 = gradient && Config::taps0 > 1 ? Layer::stride0 : 1;
  static constexpr int unit1 = gradient && Config::taps1 > 1 ? Layer::stride1 : 1;
  static constexpr int unit2 = gradient && Config::taps2 > 1 ? Layer::stride2 : 1;
  static constexpr int residues = unit2;
  /// Room for the boxes of this kernel's tiles.
  static constexpr int positions = gradient ? CONVT3D_TARGET_POSITIONS : CONVT3D_SOURCE_POSITIONS;
  static constexpr int positions_per_word = paired ? 2 : 1;
  static constexpr int plane_pitch = round_up(positions / positions_per_word - 4, 32) + 4;
  static constexpr int position_pitch =
      gradient && Config::taps_in_columns ? words
      : Config::half                      ? (words / 4 % 2 ? words : words + 4)
                                          : round_up(words - 8, 32) + 8;
  static constexpr int box_words = position_major
                                       ? positions * position_pitch
                                       : plane_pitch * words;
  // Where a channel and a position lie, in words: of a word of two, the next two.
  static constexpr int channel_step = position_major ? 1 : plane_pitch;
  static constexpr int position_step = position_major ? position_pitch : 1;
};

}  // namespace convt3d
