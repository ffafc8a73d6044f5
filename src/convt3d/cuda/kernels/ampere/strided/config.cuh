// The compile-time description of one strided kernel and of its packed weights. The macros are
// set by plan/ampere_strided/.
#pragma once
#undef CONVT3D_WGMMA_USES
#define CONVT3D_WGMMA_USES(n) 0
#include "device/arithmetic.cuh"
#include "epilogue/fusion.cuh"
#include "geometry/convolution.cuh"
#include "load/box.cuh"

namespace convt3d {

template <typename Axis>
CONVT3D_CONSTEXPR bool has_tap(int slot) {
  for (int k = 0; k < Axis::kernel; ++k)
    if (Axis::valid(slot, k)) return true;
  return false;
}
/// Whether a slot has a tap at an earlier shift, counted from the first.
template <typename Axis>
CONVT3D_CONSTEXPR bool tap_before(int slot, int shift) {
  for (int earlier = 0; earlier < shift; ++earlier)
    if (Axis::tap(slot, earlier + Axis::min_shift) >= 0) return true;
  return false;
}

template <typename Axis>
CONVT3D_CONSTEXPR bool every_slot_has_tap() {
  for (int slot = 0; slot < Axis::slots; ++slot)
    if (!has_tap<Axis>(slot)) return false;
  return true;
}

struct StridedConfig : Convolution {
  using Math = CONVT3D_MATH;
  static constexpr bool source_channels_last = CONVT3D_SOURCE_CHANNELS_LAST;
  static constexpr bool target_channels_last = CONVT3D_TARGET_CHANNELS_LAST;

  // Forward, axes are the layer's. Of the gradient by input, which reads gy[i*s - p + k*d], a
  // factor common to stride and dilation goes into the positions of the source box (`step`) and
  // padding into its origin, so that only what is read is copied.
  static constexpr int step0 = forward ? 1 : gcd(stride0, dilation0);
  static constexpr int step1 = forward ? 1 : gcd(stride1, dilation1);
  static constexpr int step2 = forward ? 1 : gcd(stride2, dilation2);
  using Axis0 = StaticAxis<forward, kernel0, stride0 / step0,
                           forward ? padding0 : 0, dilation0 / step0, 1>;
  using Axis1 = StaticAxis<forward, kernel1, stride1 / step1,
                           forward ? padding1 : 0, dilation1 / step1, 1>;
  using Axis2 = StaticAxis<forward, kernel2, stride2 / step2,
                           forward ? padding2 : 0, dilation2 / step2, 1>;
  // The source position that unit 0 reads first.
  static constexpr int origin0 = forward ? Axis0::min_shift : -padding0;
  static constexpr int origin1 = forward ? Axis1::min_shift : -padding1;
  static constexpr int origin2 = forward ? Axis2::min_shift : -padding2;

  static constexpr int columns = target_channels;

  // Every warp holds all columns of the CTA for its fragments of 16 units.
  static constexpr int warps = CONVT3D_WARPS;
  static constexpr int fragments_m = CONVT3D_FRAGMENTS_M;
  static constexpr int fragments_n = CONVT3D_FRAGMENTS_N;
  static constexpr int stages = CONVT3D_STAGES;
  /// The weights of all chunks stay in shared memory, else each stage brings its own.
  static constexpr bool resident_weights = CONVT3D_RESIDENT_WEIGHTS;
  /// Staged outputs leave by bulk copies (sm_90 and later).
  static constexpr bool bulk_stores = CONVT3D_BULK_STORES;
  /// Elements moved by one copy of the fill.
  static constexpr int vector = CONVT3D_VECTOR;
  /// Room in a source box; a tile's box has at most this many positions.
  static constexpr int positions = CONVT3D_POSITIONS;
  /// Stages of the ring through which ampere/strided/rows.cu takes source rows, one of all
  /// channels a stage; besides the warps that multiply one fills the ring and `store_warps` store. 0:
  /// the other kernels.
  static constexpr int ring = CONVT3D_RING;
  static constexpr int ring_width = CONVT3D_RING_WIDTH;    // positions of a row in a stage
  static constexpr int ring_slices = CONVT3D_RING_SLICES;  // rows of a stage, along D
  static constexpr int store_warps = 3;
  static constexpr int threads = 32 * (warps + (ring > 0 ? store_warps + 1 : 0));
  /// CTAs that share a multiprocessor: bounds the registers.
  static constexpr int resident = CONVT3D_RESIDENT;
  /// Slots along W whose chains of products alternate, where registers allow: one fragment alone
  /// would wait for each of its products.
  static constexpr int slots_together =
      Math::words_per_value == 2 && fragments_m == 1 && Axis2::slots == 2 &&
              65536 / (threads * resident) >= 128
          ? 2
          : 1;
  static_assert(stages >= 2, "the pipeline needs two stages");

  // Channel chunks: `depth` matrix steps of eight words each, or of four.
  static constexpr int depth = CONVT3D_DEPTH;
  static constexpr int step_words = Math::step_words;
  static constexpr int halves = step_words / 4;  // words of a row that a lane holds
  static constexpr int step_channels = step_words * Type::channels_per_word;
  static constexpr int chunk_channels = depth * step_channels;
  static constexpr int chunks = div_up(source_channels, chunk_channels);

  // Weights: [group][column tile][step][tap1][tap0][tap2][fragment][lane][words]; of the gradient
  // by input [tap0][tap1], since its slices meet some taps of axis 0 only.
  static constexpr int column_tile = 8 * fragments_n;
  static constexpr int column_tiles = div_up(columns, column_tile);
  static constexpr int tile_fragments = fragments_n;
  static constexpr int lane_words = halves * Math::words_per_value;
  static constexpr int fragment_words = 32 * lane_words;
  static constexpr int tap_words = tile_fragments * fragment_words;
  static constexpr int taps = Axis0::kernel * Axis1::kernel * Axis2::kernel;
  static constexpr int step_weight_words = taps * tap_words;
  static constexpr int chunk_weight_words = depth * step_weight_words;

  // The gradient by input takes one source slice after the other. A slice of residue r modulo the
  // stride serves the units i - lag, lag = 0 to `lags` - 1, with tap (r + lag * stride) /
  // dilation.
  static constexpr int lags =
      forward ? 1 : (Axis0::kernel - 1) * (dilation0 / step0) / Axis0::unit_source + 1;
  static constexpr int residues0 = forward ? 1 : Axis0::unit_source;
  /// The tap of axis 0 that connects them, or -1.
  CONVT3D_CONSTEXPR static int slice_tap(int residue, int lag) {
    return Axis0::tap(0, residue + lag * Axis0::unit_source);
  }
  /// Taps of a residue; the taps before a tap of the same residue.
  CONVT3D_CONSTEXPR static int slice_taps(int residue) {
    int count = 0;
    for (int lag = 0; lag < lags; ++lag) count += slice_tap(residue, lag) >= 0;
    return count;
  }
  CONVT3D_CONSTEXPR static int slice_rank(int residue, int lag) {
    int count = 0;
    for (int before = 0; before < lag; ++before) count += slice_tap(residue, before) >= 0;
    return count;
  }
  CONVT3D_CONSTEXPR static int most_slice_taps() {
    int most = 0;
    for (int r = 0; r < residues0; ++r) most = slice_taps(r) > most ? slice_taps(r) : most;
    return most;
  }
  static constexpr int row_words = Axis2::kernel * tap_words;
  /// Weights that a stage brings: a chunk's; of the gradient by input, those of one residue.
  CONVT3D_CONSTEXPR static int stage_words_of(int slice_taps_) {
    return depth * Axis1::kernel * slice_taps_ * row_words;
  }
  CONVT3D_CONSTEXPR static int tap_offset(int k0, int k1, int k2) {
    const int row = forward ? k1 * Axis0::kernel + k0 : k0 * Axis1::kernel + k1;
    return row * row_words + k2 * tap_words;
  }
  static_assert(taps * fragments_m * fragments_n * Math::words_per_value <= 4096,
                "all products of a step are written out");

  /// The word of a step that matrix column t + 4 * half reads.
  CONVT3D_CONSTEXPR static int word_of(int t, int half) {
    return source_channels_last ? halves * t + half : t + 4 * half;
  }
  /// The produced channel, within a fragment, of its matrix column n. A lane ends with columns 2t
  /// and 2t + 1: neighbouring channels where they are stored together, else channels t and t + 4,
  /// so that the lanes of a warp stage them in different banks.
  CONVT3D_CONSTEXPR static int column_of(int n) {
    return target_channels_last ? n : n / 2 + 4 * (n % 2);
  }

  // A lane's rows of a fragment are two neighbouring units, `pair_source` positions apart in all:
  // along W it loads one window of positions that both units read at every shift.
  static constexpr int pair_source = 2 * Axis2::unit_source;
  static constexpr int window_vector =
      source_channels_last ? 1 : (pair_source % 4 == 0 ? 4 : 2);
  /// Positions of a box row before the first unit's first one: rows begin at a multiple of
  /// `vector`.
  static constexpr int lead =
      source_channels_last || vector == 1 ? 0 : floor_mod(origin2, vector);
  static constexpr int window_first = lead / window_vector * window_vector;
  static constexpr int window_offset = lead - window_first;
  static constexpr int window =
      round_up(window_offset + Axis2::unit_source + Axis2::shifts, window_vector);

  /// Gradient by input: neighbours along W that may lie beyond an end of a line.
  static constexpr int edges = origin2 < 0 ? -origin2 : 0;

  static constexpr int slots = Axis0::slots * Axis1::slots * Axis2::slots;
  /// Slots without a tap only ever hold the bias.
  CONVT3D_CONSTEXPR static bool live0(int slot) { return has_tap<Axis0>(slot); }
  static constexpr bool all_slots_live =
      every_slot_has_tap<Axis0>() && every_slot_has_tap<Axis1>() && every_slot_has_tap<Axis2>();
};

/// The same with axes 0 and 1 exchanged, for pack/fragments.cuh, which counts axis 1 outermost.
struct StridedExchangedConfig : StridedConfig {
  using Axis0 = StridedConfig::Axis1;
  using Axis1 = StridedConfig::Axis0;
};

/// What a stage brings of the weights, at most.
template <typename Config>
constexpr int strided_stage_weights =
    Config::forward ? Config::chunk_weight_words
                    : Config::stage_words_of(Config::most_slice_taps());

/// The source box of a tile, one channel chunk of it. Pitches are such that the four words and
/// the neighbouring pairs of units that a fragment load touches fall in different banks.
template <typename Config>
struct StridedBox {
  using Type = typename Config::Type;
  static constexpr bool channels_last = Config::source_channels_last;
  static constexpr bool position_major = channels_last;
  static constexpr bool paired = false;
  static constexpr int threads = Config::threads;
  static constexpr int words = Config::depth * Config::step_words;
  static constexpr int residues = 1;
  static constexpr int step0 = Config::step0, step1 = Config::step1, step2 = Config::step2;
  static constexpr int vector = Config::vector;
  static constexpr int plane_pitch = Config::ring > 0 ? Config::ring_width * Config::ring_slices
                                                      : round_up(Config::positions - 8, 32) + 8;
  static constexpr int position_pitch = words + 4;
  static constexpr int channels = Config::source_channels;
  static constexpr int64_t all_channels = int64_t(Config::groups) * channels;
  static constexpr int box_words =
      position_major ? Config::positions * position_pitch : plane_pitch * words;
  static constexpr int position_bytes = position_major ? 4 * position_pitch : 4;
  static constexpr int step_bytes = 4 * Config::step_words * (position_major ? 1 : plane_pitch);
};

/// Shared memory, in words: [stages][source box, weights unless resident] [resident weights]
/// [staging]
template <typename Config>
struct StridedShared {
  static constexpr int box = StridedBox<Config>::box_words;
  static constexpr int stage = box + (Config::resident_weights ? 0 : strided_stage_weights<Config>);
  static constexpr int weights = Config::stages * stage;
  static constexpr int staging =
      weights + (Config::resident_weights ? Config::chunks * Config::chunk_weight_words : 0);
};

}  // namespace convt3d
