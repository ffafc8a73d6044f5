// The compile-time description of one strided kernel on warpgroup products, and of its packed
// weights. The macros are set by plan/phases/; what only the gradient by input has is in
// strided_dgrad/mainloop.cuh.
#pragma once
#include "device/arithmetic.cuh"
#include "device/pipeline.cuh"
#include "device/wgmma_sums.cuh"
#include "epilogue/fusion.cuh"
#include "geometry/convolution.cuh"
#include "geometry/swept_axis.cuh"
#include "geometry/walked_axis.cuh"
#include "load/box.cuh"

namespace convt3d {

struct PhasesConfig : Convolution {
  using Math = CONVT3D_MATH;

  // Axes are D, H, W. Of a phased axis a work tile has one phase, whose taps are walked at run
  // time; of the others all slots are in registers and all taps unrolled. Axis 2 is never phased,
  // so that the outputs of a row stay together.
  static constexpr int phased = CONVT3D_PHASED;
  using Axis0 = typename Select<(phased > 0), Phased0, Static0<>>::Type;
  using Axis1 = typename Select<(phased > 1), Phased1, Static1<>>::Type;
  using Axis2 = Static2<>;
  using Inner0 = typename Select<(phased > 0), WalkedTap, Axis0>::Type;
  using Inner1 = typename Select<(phased > 1), WalkedTap, Axis1>::Type;
  static constexpr int phases = Axis0::phases * Axis1::phases;
  /// A box has the slices of one walked tap of axis 0, not of all: smaller boxes, and none that
  /// is not read.
  static constexpr bool tap_boxes = CONVT3D_TAP_BOXES;
  static_assert(!tap_boxes || phased > 0, "taps of axis 0 are walked");
  /// Slices, lines and positions of a box from a unit to the next.
  static constexpr int slice_step = 1, line_step = 1, position_step = Axis2::unit_source;

  /// From a sample of the target to the next, in volumes.
  static constexpr int64_t all_channels = tensor_channels(int64_t(groups) * target_channels);

  // Warpgroups that multiply, each with `blocks` blocks of 64 units; fragments of units in
  // flight.
  static constexpr int consumers = CONVT3D_CONSUMERS;
  static constexpr int blocks = CONVT3D_BLOCKS;
  static constexpr int fragments = CONVT3D_FRAGMENTS;
  static constexpr int warpgroup_rows = 64 * blocks;
  static constexpr int rows = consumers * warpgroup_rows;
  // Where boxes are transposed another warpgroup may help the producer's.
  static constexpr int producers = CONVT3D_PRODUCERS;
  static constexpr int threads = 128 * (consumers + producers);
  static constexpr int consumer_registers = CONVT3D_CONSUMER_REGISTERS;
  static constexpr int producer_registers = CONVT3D_PRODUCER_REGISTERS;
  static constexpr bool gives_registers = threads > 256;  // else all threads have as many as there are
  /// A lane's rows g and g + 8 of a block are neighbours along W (gradient by input), so that it
  /// loads what both read at once and stores both together; else every eighth unit.
  static constexpr bool lane_pairs = CONVT3D_LANE_PAIRS;
  static_assert(fragments >= 2, "the next fragment is loaded under the products of this one");

  // A channel chunk is eight words deep: one matrix step, two quads of words.
  static constexpr int quads = 2;
  static constexpr int quad_channels = 4 * Type::channels_per_word;
  static constexpr int chunk_channels = quads * quad_channels;
  static constexpr int chunks = div_up(source_channels, chunk_channels);
  /// The channel of a chunk in word `i` of a quad; a word of 16 bits holds two. In runs of lines
  /// (gradient by input) channels half a chunk apart are aligned alike, and those beside each
  /// other nearly: they are neighbours in a load, in different banks. Where lanes have pairs of
  /// units, words of channels that are one (32 bits) or two (16 bits) apart begin in different
  /// banks by themselves; the two channels of a word, four apart, begin in the same half of it.
  CONVT3D_CONSTEXPR static int channel_at(int quad, int i, int half) {
    constexpr int per_word = Type::channels_per_word;
    if (lane_pairs && CONVT3D_RUNS && per_word == 2)
      return quad + 4 * half + i / 2 * 2 + i % 2 * (chunk_channels / 2);
    return !lane_pairs && CONVT3D_RUNS ? 2 * (per_word * quad + half) + i / 2 + i % 2 * (chunk_channels / 2)
                        : (4 * quad + i) * per_word + half;
  }
  static_assert(groups == 1 || source_channels % chunk_channels == 0,
                "a chunk ends within its group");

  static constexpr int column_tile = CONVT3D_COLUMN_TILE;
  static constexpr int column_tiles = div_up(target_channels, column_tile);
  static_assert(column_tile % 8 == 0 && column_tile <= 256, "columns of one product");
  static constexpr int sums = column_tile / 2;  // accumulators of a thread for one slot and block

  // Packed weights: [group][column tile][chunk][walked tap0][walked tap1] of stages [tap0][tap1]
  // [tap2][part][quad][column][four words], walked taps in the order of their phases. Split
  // operands (see device/arithmetic.cuh) have two parts: the big one comes first.
  static constexpr int parts = Math::words_per_value;
  static constexpr int taps = Inner0::kernel * Inner1::kernel * Axis2::kernel;
  static constexpr int walked0 = phased > 0 ? Axis0::kernel : 1;
  static constexpr int walked1 = phased > 1 ? Axis1::kernel : 1;
  static constexpr int part_bytes = quads * column_tile * 16;
  static constexpr int tap_bytes = parts * part_bytes;
  static constexpr int stage_bytes = taps * tap_bytes;
  static constexpr int64_t n_tile_bytes = int64_t(chunks) * walked0 * walked1 * stage_bytes;
  CONVT3D_CONSTEXPR static int tap_at(int tap0, int tap1, int tap2) {
    return (tap0 * Inner1::kernel + tap1) * Axis2::kernel + tap2;
  }
  /// A sweep along D (gradient by input) has the columns of all taps of a slice in one stage.
  static constexpr bool sweep = CONVT3D_SWEEP;
  using Sweep =
      SweptAxis<kernel0, stride0, padding0, dilation0>;
  static_assert(taps * blocks <= 512, "all products of a stage are written out");

  static_assert(parts == 1 || (forward && !CONVT3D_TRANSPOSED),
                "units are split as they lie in a TMA box");
  static_assert(!forward || (!lane_pairs && !CONVT3D_RUNS), "what gradients by input alone have");

  /// All weights of a CTA stay in shared memory (its phase and columns never change then), else
  /// they pass through a ring.
  static constexpr bool resident_weights = CONVT3D_RESIDENT_WEIGHTS;
  static constexpr int weight_stages = CONVT3D_WEIGHT_STAGES;
  static constexpr int source_stages = CONVT3D_SOURCE_STAGES;
  static_assert(source_stages > 1 && (resident_weights || weight_stages > 1),
                "a buffer is released while the next one is read");
  /// Boxes are transposed on their way to shared memory (phases/transposed.cuh): a position's
  /// words of a quad of channels are 16 bytes, [quad][position]. Units are loaded by ldmatrix.
  static constexpr bool transposed = CONVT3D_TRANSPOSED;
  /// Neighbouring positions that a lane loads at once: rows of the source are multiples of them.
  static constexpr int transposed_vector = CONVT3D_TRANSPOSED_VECTOR;
  static constexpr int transposers = 4 * producers - 1;  // warps beside the one that brings weights
  static_assert(!transposed || (forward && !CONVT3D_BY_MAP && CONVT3D_STORE_WARPS == 0 &&
                                source_channels % chunk_channels == 0),
                "whole chunks from global memory");
  static constexpr int position_bytes = transposed ? 16 : int(sizeof(Storage));
  /// A box is given back by every lane that has read it, unless a tensor map overwrites it.
  static constexpr bool lanes_leave = !CONVT3D_BY_MAP;
  static constexpr int a_stage_readers = arrivals_of(4 * CONVT3D_CONSUMERS, lanes_leave);
  static constexpr int fillers = transposed ? 32 * transposers : 1;  // threads that bring boxes
  static constexpr int most_walked =
      (phased > 0 ? Axis0::max_taps : 1) * (phased > 1 ? Axis1::max_taps : 1);
  static_assert(!resident_weights || weight_stages == chunks * most_walked, "room for all weights");
  static constexpr int slot_bytes = (sweep && !resident_weights ? Sweep::most : 1) * stage_bytes;

  /// Columns that the epilogue stages at a time, in a buffer of a warp, or of the tile where store
  /// warps send.
  static constexpr int staged_columns = CONVT3D_STAGED_COLUMNS;
  static_assert(staged_columns % 8 == 0 && column_tile % staged_columns == 0, "whole rounds");
  /// Warps beside the producer that bring a tile's staged outputs to the target, buffers in turn;
  /// 0: every warp stages and stores its own.
  static constexpr int store_warps = CONVT3D_STORE_WARPS;
  static_assert(store_warps < 4, "warps of the producer's warpgroup");
  /// Words of a column that a warp stages; outputs of a lane where rows are multiples of so many.
  static constexpr int staged_pitch = 16 * Axis2::slots + 4;
  /// Bytes of the epilogue's staging where each warp stores its own outputs.
  static constexpr int staging_bytes = 16 * consumers * staged_columns * staged_pitch;
  static constexpr int wide_outputs = CONVT3D_WIDE_OUTPUTS;
  static_assert(4 * Axis2::slots % wide_outputs == 0 && wide_outputs * int(sizeof(Storage)) <= 16,
                "outputs of four units, one store");

  // Shared memory in bytes: barriers, weights, source boxes, staging (whose sizes follow the
  // tile).
  static constexpr int weight_barriers = resident_weights ? 1 : weight_stages;
  static constexpr int sent_buffers = store_warps > 0 ? 8 : 0;  // at most, as _MOST_BUFFERS
  static constexpr int barriers = 16 * (source_stages + weight_barriers + sent_buffers);
  /// Ping-pong: chunks that the first warpgroup runs ahead of the others, so that one stores
  /// while others multiply.
  static constexpr int ping_pong = CONVT3D_PING_PONG;
  static constexpr int ping_pong_barrier = barriers;
  static constexpr int barrier_bytes = round_up(barriers + (ping_pong > 0 ? 8 : 0), 128);
  static_assert(!(ping_pong > 0 && tap_boxes), "chunks are boxes");
  static_assert(ping_pong < source_stages &&
                    (resident_weights || ping_pong * most_walked < weight_stages || ping_pong == 0),
                "the first warpgroup runs ahead while the others release no stage");
  /// Zeros that are read in place of what lies outside, where TMA does not bring them.
  static constexpr int zero_offset = barrier_bytes;
  static constexpr int zero_bytes = CONVT3D_BY_MAP ? 0 : 128;
  static constexpr int weight_offset = zero_offset + zero_bytes;
  static constexpr int box_offset = round_up(weight_offset + weight_stages * slot_bytes, 128);
};

/// The descriptor of an operand a multiple of 16 bytes further on: nothing carries into the upper
/// word. By one addition, and two moves where a product reads it. Uniform registers have room for
/// those of so few taps: in plain arithmetic they stay there, and where blocks share each nothing
/// comes between products.
template <typename Config>
CONVT3D_DEVICE uint64_t descriptor_at(uint64_t descriptor, uint32_t bytes) {
  const uint32_t low = uint32_t(descriptor) + bytes / 16;
  if constexpr (Config::parts == 1 && Config::blocks > 1 && Config::taps <= 9)
    return (descriptor & 0xffffffff00000000) | low;
  else
    return join_words(low, uint32_t(descriptor >> 32));
}

/// D += A * B of one m64 block, A in registers.
#define CONVT3D_PRODUCT(Arithmetic, name)                                                     \
  template <int N>                                                                            \
  CONVT3D_DEVICE void wgmma_product_of(Arithmetic, float (&d)[N / 2], const uint32_t (&a)[4], \
                                       uint64_t b) {                                          \
    wgmma_##name##_rs<N>(d, a, b);                                                            \
  }
CONVT3D_PRODUCT(MathTf32, tf32)
CONVT3D_PRODUCT(Math16<Float16>, f16)
CONVT3D_PRODUCT(Math16<BFloat16>, bf16)
#undef CONVT3D_PRODUCT

}  // namespace convt3d
