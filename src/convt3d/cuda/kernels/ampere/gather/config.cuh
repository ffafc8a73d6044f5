// The compile-time description of one gather kernel and of its packed weights. The macros are set
// by plan/choose.py; everything else is derived here, so that packing and product agree by
// construction.
#pragma once
#include "device/arithmetic.cuh"
#include "device/sum_parts.cuh"
#include "epilogue/fusion.cuh"
#include "geometry/convolution.cuh"
#include "load/octet_box.cuh"

namespace convt3d {

struct GatherConfig : Convolution {
  using Math = CONVT3D_MATH;
  static constexpr bool source_channels_last = CONVT3D_SOURCE_CHANNELS_LAST;
  static constexpr bool target_channels_last = CONVT3D_TARGET_CHANNELS_LAST;

#if CONVT3D_BLOCK0
  using Axis0 = Static0<CONVT3D_BLOCK0>;
#else
  using Axis0 = Phased0;
#endif
  using Axis1 = Phased1;
  using Axis2 = Static2<>;
  /// Axis 0 in registers (enumerated at compile time) or walked phase by phase.
  static constexpr bool static0 = CONVT3D_BLOCK0 > 0;

  // Warps over units and columns; fragments of a warp. How many units a tile has along each axis
  // is a run-time choice: any box of at most `rows` units whose source box fits `positions`.
  static constexpr int warps_m = CONVT3D_WARPS_M;
  static constexpr int warps_n = CONVT3D_WARPS_N;
  static constexpr int fragments_m = CONVT3D_FRAGMENTS_M;
  static constexpr int fragments_n = CONVT3D_FRAGMENTS_N;
  static constexpr int stages = CONVT3D_STAGES;
  /// A pipeline stage is one tap of axis 1 of one channel chunk, else a whole chunk.
  static constexpr bool split = CONVT3D_SPLIT;
  /// Contiguous 16-bit sources lie in shared memory by octets of channels (load/octet_box.cuh),
  /// where a unit has one position.
  static constexpr bool octets =
      Type::channels_per_word == 2 && !source_channels_last && Axis2::unit_source == 1;
  /// Elements moved by one copy of the fill.
  static constexpr int vector = CONVT3D_VECTOR;

  static constexpr int threads = 32 * warps_m * warps_n;
  /// CTAs that share a multiprocessor: bounds the registers.
  static constexpr int resident = CONVT3D_RESIDENT;
  static constexpr int rows = 16 * warps_m * fragments_m;
  static constexpr int positions = CONVT3D_POSITIONS;
  static_assert(!split || stages - 1 <= (Axis1::min_taps > 1 ? Axis1::min_taps : 1),
                "split stages in flight are of the next chunk at most");
  static_assert(stages >= 2, "the pipeline needs two stages");

  // Channel chunks: `depth` matrix steps of eight words each.
  static constexpr int depth = CONVT3D_DEPTH;
  static constexpr int step_words = 8;
  static constexpr int halves = step_words / 4;  // words of a row that a lane holds
  static constexpr int step_channels = step_words * Type::channels_per_word;
  static constexpr int chunk_channels = depth * step_channels;
  static constexpr int chunks = div_up(source_channels, chunk_channels);
  static_assert(depth == 1 || !split, "split stages are one step deep");

  // Weights: [group][column tile][step][tap1][tap0][tap2][fragment][lane][words], a chunk being
  // `depth` steps.
  static constexpr int column_tile = 8 * warps_n * fragments_n;
  static constexpr int column_tiles = div_up(target_channels, column_tile);
  static constexpr int tile_fragments = warps_n * fragments_n;
  static constexpr int lane_words = 2 * Math::words_per_value;
  static constexpr int fragment_words = 32 * lane_words;
  static constexpr int tap_words = tile_fragments * fragment_words;
  static constexpr int row_words = Axis2::kernel * tap_words;      // one (tap1, tap0)
  static constexpr int slab_words = Axis0::kernel * row_words;     // one tap1
  static constexpr int step_weight_words = Axis1::kernel * slab_words;
  static constexpr int chunk_weight_words = depth * step_weight_words;

  static constexpr int stage_step_words =
      (split ? 1 : Axis1::max_taps) * Axis0::max_taps * row_words;
  static constexpr int stage_weight_words = depth * stage_step_words;

  /// Products added to an output by one tap of axis 1 of a step, and by all. Where the latter are
  /// many float32-grade ones, forward, they are added up in parts; PyTorch's gradients are sums
  /// of one part.
  static constexpr int row_products = Phased0::max_taps * Phased2::max_taps;
  static constexpr bool sums_in_parts =
      Math::words_per_value > 1 && forward &&
      chunks * depth * Axis1::max_taps * row_products > 2 * longest_part;

  /// The word of a chunk that matrix column t + 4 * half reads (see load_fragment in
  /// ampere/gather/kernel.cu).
  CONVT3D_CONSTEXPR static int word_of(int t, int half) {
    return source_channels_last ? 2 * t + half : t + 4 * half;
  }

  /// The produced channel, within a fragment, of its matrix column n.
  CONVT3D_CONSTEXPR static int column_of(int n) { return n; }

  static constexpr int tile_buffers = split ? 2 : stages;
};

/// The source box that a tile's units reach, one channel chunk of it. Contiguous sources become
/// planes whose pitch is 8 modulo 32, so that the four words and eight rows of a fragment fall in
/// different banks, or octets; channels_last positions are an odd multiple of eight words apart.
template <typename Config>
struct GatherBox {
  using Type = typename Config::Type;
  static constexpr bool channels_last = Config::source_channels_last;
  static constexpr bool position_major = channels_last;
  static constexpr bool paired = false;
  static constexpr int threads = Config::threads;
  static constexpr int words = Config::depth * Config::step_words;
  /// Positions of a unit lie apart by residue, so that units are neighbours.
  static constexpr int residues = Config::Axis2::unit_source;
  static constexpr int step0 = 1, step1 = 1, step2 = 1;
  static constexpr int vector = Config::vector;
  static constexpr int plane_pitch = round_up(Config::positions - 8, 32) + 8;
  static constexpr int plane_positions = round_up(Config::positions, 32);  // of an octet
  static constexpr int position_pitch = Config::depth % 2 ? words : words + 8;
  static constexpr int channels = Config::source_channels;
  static constexpr int64_t all_channels = int64_t(Config::groups) * channels;
  static constexpr int box_words = Config::octets   ? plane_positions * words
                                   : position_major ? Config::positions * position_pitch
                                                    : plane_pitch * words;
  // Bytes from one position, and from one matrix step, to the next.
  static constexpr int position_bytes = Config::octets   ? 16
                                        : position_major ? 4 * position_pitch
                                                         : 4;
  static constexpr int step_bytes = 4 * Config::step_words * (Config::octets   ? plane_positions
                                                              : position_major ? 1
                                                                               : plane_pitch);
};

/// Shared memory, in words: source boxes, then weight stages; the epilogue reuses it all.
template <typename Config>
constexpr int weight_offset = Config::tile_buffers * GatherBox<Config>::box_words;

}  // namespace convt3d
