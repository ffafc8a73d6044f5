// The compile-time description of one gather kernel and of its packed weights. The macros are set
// by plan.py; everything else is derived here, so that packing and product agree by construction.
#pragma once
#include "box.cuh"
#include "math.cuh"

namespace convt3d {

struct GatherConfig {
  using Type = CONVT3D_TYPE;
  using Math = CONVT3D_MATH;
  using Storage = typename Type::Storage;

  static constexpr bool forward = CONVT3D_FORWARD;
  static constexpr bool flat = CONVT3D_FLAT;
  static constexpr bool bias = CONVT3D_BIAS;
  static constexpr bool source_channels_last = CONVT3D_SOURCE_CHANNELS_LAST;
  static constexpr bool target_channels_last = CONVT3D_TARGET_CHANNELS_LAST;

#if CONVT3D_FLAT
  using Axis0 = FlatAxis<CONVT3D_STRIDE0>;
  using Axis1 = FlatAxis<CONVT3D_STRIDE1>;
  using Axis2 = FlatAxis<CONVT3D_STRIDE2>;
#else
#if CONVT3D_BLOCK0
  using Axis0 = StaticAxis<forward, CONVT3D_KERNEL0, CONVT3D_STRIDE0, CONVT3D_PADDING0,
                           CONVT3D_DILATION0, CONVT3D_BLOCK0>;
#else
  using Axis0 = PhasedAxis<forward, CONVT3D_KERNEL0, CONVT3D_STRIDE0, CONVT3D_PADDING0,
                           CONVT3D_DILATION0>;
#endif
  using Axis1 = PhasedAxis<forward, CONVT3D_KERNEL1, CONVT3D_STRIDE1, CONVT3D_PADDING1,
                           CONVT3D_DILATION1>;
  using Axis2 = StaticAxis<forward, CONVT3D_KERNEL2, CONVT3D_STRIDE2, CONVT3D_PADDING2,
                           CONVT3D_DILATION2, 1>;
#endif
  /// Axis 0 in registers (enumerated at compile time) or walked phase by phase.
  static constexpr bool static0 = CONVT3D_BLOCK0 > 0;

  // Channels of one group: those summed over, and those produced.
  static constexpr int groups = CONVT3D_GROUPS;
  static constexpr int source_channels = CONVT3D_SOURCE_CHANNELS;
  static constexpr int target_channels = CONVT3D_TARGET_CHANNELS;
  /// Destinations that share one source position, counted as columns (flat only).
  static constexpr int flat_slots =
      flat ? CONVT3D_STRIDE0 * CONVT3D_STRIDE1 * CONVT3D_STRIDE2 : 1;
  static constexpr int columns = target_channels * flat_slots;

  // Tile: units along each axis; warps over units and columns; fragments of a warp.
  static constexpr int tile0 = CONVT3D_TILE0;
  static constexpr int tile1 = CONVT3D_TILE1;
  static constexpr int tile2 = CONVT3D_TILE2;
  static constexpr int warps_m = CONVT3D_WARPS_M;
  static constexpr int warps_n = CONVT3D_WARPS_N;
  static constexpr int fragments_m = CONVT3D_FRAGMENTS_M;
  static constexpr int fragments_n = CONVT3D_FRAGMENTS_N;
  static constexpr int stages = CONVT3D_STAGES;
  /// A pipeline stage is one tap of axis 1 of one channel chunk, else a whole chunk.
  static constexpr bool split = CONVT3D_SPLIT;
  /// Elements moved by one copy of the fill.
  static constexpr int vector = CONVT3D_VECTOR;

  static constexpr int threads = 32 * warps_m * warps_n;
  static constexpr int units = tile0 * tile1 * tile2;
  static constexpr int rows = 16 * warps_m * fragments_m;
  static_assert(units <= rows, "a tile's units must fit its matrix rows");
  static_assert(!split || stages == 2, "the split pipeline is double-buffered");
  static_assert(stages >= 2, "the pipeline needs two stages");

  // Channel chunks: eight words deep, one matrix step.
  static constexpr int chunk_words = 8;
  static constexpr int chunk_channels = chunk_words * Type::channels_per_word;
  static constexpr int chunks = div_up(source_channels, chunk_channels);

  // Weights: [group][column tile][chunk][tap1][tap0][tap2][fragment][lane][words].
  static constexpr int column_tile = 8 * warps_n * fragments_n;
  static constexpr int column_tiles = div_up(columns, column_tile);
  static constexpr int tile_fragments = warps_n * fragments_n;
  static constexpr int lane_words = 2 * Math::words_per_value;
  static constexpr int fragment_words = 32 * lane_words;
  static constexpr int tap_words = tile_fragments * fragment_words;
  static constexpr int row_words = Axis2::kernel * tap_words;      // one (tap1, tap0)
  static constexpr int slab_words = Axis0::kernel * row_words;     // one tap1
  static constexpr int chunk_weight_words = Axis1::kernel * slab_words;

  static constexpr int stage_weight_words =
      (split ? 1 : Axis1::max_taps) * Axis0::max_taps * row_words;

  /// The word of a chunk that matrix column t + 4 * half reads (see load_fragment in gather.cu).
  CONVT3D_CONSTEXPR static int word_of(int t, int half) {
    return source_channels_last ? 2 * t + half : t + 4 * half;
  }

  static constexpr int tile_buffers = split ? 2 : stages;
};

/// The source box that a tile's units reach, one channel chunk of it. Contiguous sources become
/// planes whose pitch is 8 modulo 32, so that the four words and eight rows of a fragment fall in
/// different banks; channels_last sources stay eight words a position.
template <typename Config>
struct GatherBox {
  using Type = typename Config::Type;
  static constexpr bool channels_last = Config::source_channels_last;
  static constexpr bool position_major = channels_last;
  static constexpr int threads = Config::threads;
  static constexpr int words = Config::chunk_words;
  static constexpr int size0 = (Config::tile0 - 1) * Config::Axis0::unit_source + Config::Axis0::shifts;
  static constexpr int size1 = (Config::tile1 - 1) * Config::Axis1::unit_source + Config::Axis1::shifts;
  static constexpr int size2 = (Config::tile2 - 1) * Config::Axis2::unit_source + Config::Axis2::shifts;
  static constexpr int residues = Config::Axis2::unit_source;
  static constexpr int vector = Config::vector;
  static constexpr int plane_pitch = round_up(BoxLayout<GatherBox>::positions - 8, 32) + 8;
  static constexpr int position_pitch = words;
  static constexpr int channels = Config::source_channels;
  static constexpr int64_t all_channels = int64_t(Config::groups) * channels;
  static constexpr int box_words =
      (position_major ? BoxLayout<GatherBox>::positions : plane_pitch) * words;
};

/// Shared memory, in words: source boxes, then weight stages; the epilogue reuses it all.
template <typename Config>
constexpr int weight_offset = Config::tile_buffers * GatherBox<Config>::box_words;

}  // namespace convt3d
