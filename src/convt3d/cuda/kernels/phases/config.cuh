// The compile-time description of one strided kernel on warpgroup products, and of its packed
// weights. The macros are set by plan/phases.py; what only the gradient by input has is in
// strided_dgrad/mainloop.cuh.
#pragma once
#include "load/box.cuh"
#include "device/hopper.cuh"
#include "geometry/swept_axis.cuh"
#include "device/arithmetic.cuh"
#include "device/pipeline.cuh"
#include "geometry/walked_axis.cuh"
#include "device/wgmma_product.cuh"
#include "device/wgmma_sums.cuh"

namespace convt3d {

struct WgmmaPhasesConfig {
  using Type = CONVT3D_TYPE;
  using Math = CONVT3D_MATH;
  using Storage = typename Type::Storage;

  static constexpr bool forward = CONVT3D_FORWARD;
  static constexpr bool bias = CONVT3D_BIAS;
  static constexpr bool target_channels_last = CONVT3D_TARGET_CHANNELS_LAST;

  // Axes are D, H, W. Of a phased axis a work item has one phase, whose taps are walked at run time;
  // of the others all slots are in registers and all taps unrolled. Axis 2 is never phased, so that
  // the outputs of a row stay together.
  static constexpr int phased = CONVT3D_PHASED;
  template <int Kernel, int Stride, int Padding, int Dilation, bool Phased>
  using AxisOf = typename Select<Phased, PhasedAxis<forward, Kernel, Stride, Padding, Dilation>,
                                 StaticAxis<forward, Kernel, Stride, Padding, Dilation, 1>>::Type;
  using Axis0 = AxisOf<CONVT3D_KERNEL0, CONVT3D_STRIDE0, CONVT3D_PADDING0, CONVT3D_DILATION0,
                       (phased > 0)>;
  using Axis1 = AxisOf<CONVT3D_KERNEL1, CONVT3D_STRIDE1, CONVT3D_PADDING1, CONVT3D_DILATION1,
                       (phased > 1)>;
  using Axis2 = AxisOf<CONVT3D_KERNEL2, CONVT3D_STRIDE2, CONVT3D_PADDING2, CONVT3D_DILATION2, false>;
  using Inner0 = typename Select<(phased > 0), WalkedTap, Axis0>::Type;
  using Inner1 = typename Select<(phased > 1), WalkedTap, Axis1>::Type;
  static constexpr int phases = Axis0::phases * Axis1::phases;
  /// The rows of a box are whole planes of the source, for small ones: lanes know which of their
  /// positions lie outside, a bit for each shift of axis 1 and used shift of axis 2.
  static constexpr bool planes = CONVT3D_PLANES;
  static constexpr int line_bits = UsedShifts<Axis2>::count;
  /// A box has the slices of one walked tap of axis 0, not of all: smaller boxes, and none that is not read.
  static constexpr bool tap_boxes = CONVT3D_TAP_BOXES;
  static_assert(!tap_boxes || phased > 0, "taps of axis 0 are walked");
  /// Of them a box has only the lines that its tile's taps reach: those beyond the plane are zeros.
  static constexpr bool plane_parts = CONVT3D_PLANE_PARTS;
  static_assert(!plane_parts || planes, "parts of what a box's rows are");
  static constexpr int line_shifts = plane_parts ? 1 : Axis1::shifts;  // that have bits of their own
  static_assert(!planes || line_shifts * line_bits <= 32, "bits of a word");
  /// Slices, lines and positions of a box from a unit to the next.
  static constexpr int slice_step = 1, line_step = 1, position_step = Axis2::unit_source;

  static constexpr int groups = CONVT3D_GROUPS;
  static constexpr int source_channels = CONVT3D_SOURCE_CHANNELS;
  static constexpr int target_channels = CONVT3D_TARGET_CHANNELS;
  static constexpr int64_t all_channels = int64_t(groups) * target_channels;

  // Warpgroups that multiply, each with `blocks` blocks of 64 units; fragments of units in flight.
  static constexpr int consumers = CONVT3D_CONSUMERS;
  static constexpr int blocks = CONVT3D_BLOCKS;
  static constexpr int fragments = CONVT3D_FRAGMENTS;
  static constexpr int warpgroup_rows = 64 * blocks;
  static constexpr int rows = consumers * warpgroup_rows;
  // Where boxes are turned another warpgroup may help the producer's.
  static constexpr int producers = CONVT3D_PRODUCERS;
  static constexpr int threads = 128 * (consumers + producers);
  static constexpr int consumer_registers = CONVT3D_CONSUMER_REGISTERS;
  static constexpr int producer_registers = CONVT3D_PRODUCER_REGISTERS;
  static constexpr bool gives_registers = threads > 256;  // else all threads have as many as there are
  /// A lane's rows g and g + 8 of a block are neighbours along W, so that it loads what both read at
  /// once and stores both together; else every eighth unit.
  static constexpr bool lane_pairs = CONVT3D_LANE_PAIRS;
  static_assert(fragments >= 2, "the next fragment is loaded under the products of this one");

  // A channel chunk is eight words deep: one matrix step, two quads of words.
  static constexpr int quads = 2;
  static constexpr int quad_channels = 4 * Type::channels_per_word;
  static constexpr int chunk_channels = quads * quad_channels;
  static constexpr int chunks = div_up(source_channels, chunk_channels);
  /// The channel of a chunk in word `i` of a quad; a word of 16 bits holds two. In runs of lines
  /// (gradient by input) channels half a chunk apart are aligned alike, and those beside each other
  /// nearly: they are neighbours in a load, in different banks. Where lanes have pairs of units, words
  /// of channels that are one (32 bits) or two (16 bits) apart begin in different banks by themselves;
  /// the two channels of a word, four apart, begin in the same half of it.
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
  // [tap2][part][quad][column][four words], walked taps in the order of their phases. Split operands (see
  // device/arithmetic.cuh) have two parts: the big one comes first.
  static constexpr int parts = Math::words_per_value;
  static constexpr int taps = Inner0::kernel * Inner1::kernel * Axis2::kernel;
  static constexpr int walked0 = phased > 0 ? Axis0::kernel : 1;
  static constexpr int walked1 = phased > 1 ? Axis1::kernel : 1;
  static constexpr int part_bytes = quads * column_tile * 16;
  static constexpr int tap_bytes = parts * part_bytes;
  static constexpr int stage_bytes = taps * tap_bytes;
  static constexpr int64_t team_bytes = int64_t(chunks) * walked0 * walked1 * stage_bytes;
  CONVT3D_CONSTEXPR static int tap_at(int tap0, int tap1, int tap2) {
    return (tap0 * Inner1::kernel + tap1) * Axis2::kernel + tap2;
  }
  /// A march along D (gradient by input) has the columns of all taps of a slice in one stage.
  static constexpr bool march = CONVT3D_MARCH;
  using March =
      MarchAxis<CONVT3D_KERNEL0, CONVT3D_STRIDE0, CONVT3D_PADDING0, CONVT3D_DILATION0>;
  static_assert(taps * blocks <= 512, "all products of a stage are written out");

  static_assert(parts == 1 || (forward && !lane_pairs && !CONVT3D_TURNED && !CONVT3D_RUNS),
                "units are split as they lie in a TMA box");

  /// All weights of a CTA stay in shared memory (its phase and columns never change then), else they
  /// pass through a ring.
  static constexpr bool resident_weights = CONVT3D_RESIDENT_WEIGHTS;
  static constexpr int weight_stages = CONVT3D_WEIGHT_STAGES;
  static constexpr int source_stages = CONVT3D_SOURCE_STAGES;
  static_assert(source_stages > 1 && (resident_weights || weight_stages > 1),
                "a buffer is released while the next one is read");
  /// Boxes are turned on their way to shared memory (phases/transposed.cuh): a position's words of a
  /// quad of channels are 16 bytes, [quad][position]. Units are loaded by ldmatrix, or by the products
  /// themselves: then they lie in runs of eight that are all as far apart.
  static constexpr bool turned = CONVT3D_TURNED;
  static constexpr bool both_shared = CONVT3D_BOTH_SHARED;
  static_assert(!both_shared || turned, "a product's rows are 16 bytes");
  /// Neighbouring positions that a lane loads at once: rows of the source are multiples of them.
  static constexpr int turned_vector = CONVT3D_TURNED_VECTOR;
  static constexpr int turners = 4 * producers - 1;  // warps beside the one that brings weights
  static_assert(!turned || (!CONVT3D_BY_MAP && !planes && CONVT3D_WARP_STORES && !lane_pairs &&
                            source_channels % chunk_channels == 0),
                "whole chunks from global memory");
  static constexpr int position_bytes = turned ? 16 : int(sizeof(Storage));
  /// Arrivals when a box is read: of every lane where plain loads come before plain stores.
  static constexpr int box_readers = (turned && !both_shared ? 128 : 4) * CONVT3D_CONSUMERS;
  static constexpr int fillers = turned ? 32 * turners : 1;  // threads that bring boxes
  /// Slices that the walked taps of axis 0 reach.
  static constexpr int box_slices =
      ((phased > 0 ? Axis0::max_taps : 1) - 1) * (CONVT3D_DILATION0 / gcd(CONVT3D_STRIDE0, CONVT3D_DILATION0)) + 1;
  static constexpr int most_walked =
      (phased > 0 ? Axis0::max_taps : 1) * (phased > 1 ? Axis1::max_taps : 1);
  static_assert(!resident_weights || weight_stages == chunks * most_walked, "room for all weights");
  static constexpr int slot_bytes = (march && !resident_weights ? March::most : 1) * stage_bytes;

  /// Buffers of the epilogue, each of some columns: of a warpgroup, or of the tile where warps send,
  /// which may use fewer.
  static constexpr int staged_columns = CONVT3D_STAGED_COLUMNS;
  static_assert(staged_columns % 8 == 0 && column_tile % staged_columns == 0, "whole rounds");
  static constexpr int staging_buffers = CONVT3D_STAGING_BUFFERS;
  static_assert(staging_buffers >= 2, "one is written while others are read");
  static constexpr bool bulk_copies = CONVT3D_BULK_COPIES;  // out of them, or stores of 16 bytes
  /// Every warp stages and stores for itself: words of a staged column, outputs of a lane where rows
  /// are multiples of so many.
  static constexpr bool warp_stores = CONVT3D_WARP_STORES;
  /// Warps beside the producer that bring a tile's staged outputs to the target, buffers in turn.
  static constexpr int senders = CONVT3D_SENDERS;
  static_assert(senders < 4 && !(senders && warp_stores) && !(senders && target_channels_last),
                "warps of the producer's warpgroup, contiguous targets");
  static constexpr int staged_pitch = 16 * Axis2::slots + 4;
  /// Bytes of the epilogue's staging where warps store for themselves.
  static constexpr int staging_bytes = 16 * consumers * staged_columns * staged_pitch;
  static constexpr int wide_outputs = CONVT3D_WIDE_OUTPUTS;
  static_assert(4 * Axis2::slots % wide_outputs == 0 && wide_outputs * int(sizeof(Storage)) <= 16,
                "outputs of four units, one store");

  // Shared memory in bytes: barriers, weights, source boxes, staging (whose sizes follow the tile).
  static constexpr int weight_barriers = resident_weights ? 1 : weight_stages;
  static constexpr int sent_buffers = senders > 0 ? staging_buffers : 0;
  static constexpr int barriers = 16 * (source_stages + weight_barriers + sent_buffers);
  /// Chunks that the first warpgroup is ahead of the others: so that not all store at once.
  static constexpr int ahead = CONVT3D_AHEAD;
  static constexpr int ahead_barrier = barriers;
  static constexpr int barrier_bytes = round_up(barriers + (ahead > 0 ? 8 : 0), 128);
  static_assert(!(ahead > 0 && tap_boxes), "chunks are boxes");
  static_assert(ahead < source_stages &&
                    (resident_weights || ahead * most_walked < weight_stages || ahead == 0),
                "the first warpgroup goes ahead while nobody else releases anything");
  /// Zeros that are read in place of what lies outside, where TMA does not bring them.
  static constexpr int zero_offset = barrier_bytes;
  static constexpr int zero_bytes = !CONVT3D_BY_MAP || CONVT3D_PLANES ? 128 : 0;
  static constexpr int weight_offset = zero_offset + zero_bytes;
  static constexpr int box_offset = round_up(weight_offset + weight_stages * slot_bytes, 128);
};

/// The descriptor of an operand a multiple of 16 bytes further on: nothing carries into the upper word.
/// By one addition, and two moves where a product reads it. Uniform registers have room for those of so
/// few taps: in plain arithmetic they stay there, and where blocks share each nothing comes between products.
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

template <typename Storage>
struct PhasesArguments {
  const unsigned char* weights;
  const Storage* bias;
  Activation<Storage> target;
  int batch;
  int tile[4], tiles[4];  // units of a tile, and tiles: samples, then the axes
  // The box of a tile: positions from a sample, slice, line and channel to the next; which dimension
  // of its tensor map the channels are.
  int sample_pitch, slice_pitch, line_pitch, channel_pitch, channel_dimension;
  int box_bytes;
  int warpgroup_units;  // of a tile, in order
  // The epilogue's staging: elements from a row, slice, sample and column to the next, each as in the
  // target modulo 16 bytes; whether the rows of a slice are one run.
  int staged_row, staged_slice, staged_sample, staged_column;
  bool whole_slices;
  int most_runs;  // of a warpgroup
  uint32_t staging_offset;
  int turn;  // variants that a CTA's next item is further on than its number says
  bool wide;  // rows and tiles are multiples of `wide_outputs`
  int source_extent[2];  // along D and H
  int segment;  // units along D of an item, of a march
  int buffers;  // of staged outputs that warps send
  Activation<const Storage> source;  // where no tensor map brings it

  CONVT3D_DEVICE int count() const { return tiles[0] * tiles[1] * tiles[2] * tiles[3]; }
};

/// A tile, and of it a phase, columns and group.
struct PhasesItem {
  int sample, first[3];  // the first unit
  int group, column_tile, phase0, phase1;
  WalkedTaps taps0, taps1;
};

template <typename Config>
CONVT3D_CONSTEXPR bool phase_has_taps(int phase) {
  bool found = true;
  if constexpr (Config::phased > 0)
    found = found && Config::Axis0::count(phase / Config::Axis1::phases) > 0;
  if constexpr (Config::phased > 1)
    found = found && Config::Axis1::count(phase % Config::Axis1::phases) > 0;
  return found;
}

/// A CTA's work. Items of a tile are neighbours, so that they share its source in L2; a CTA whose weights
/// stay keeps its own phase and columns. `Live`: phases with taps alone, so that all CTAs have as many.
template <typename Config, bool Live = false>
struct PhasesWalk {
  using Item = PhasesItem;
  CONVT3D_CONSTEXPR static int count_phases() {
    int found = 0;
    for (int phase = 0; phase < Config::phases; ++phase)
      found += !Live || phase_has_taps<Config>(phase);
    return found;
  }
  static constexpr int phases = count_phases();
  static constexpr int teams = Config::groups * Config::column_tiles;
  static constexpr int variants = teams * phases;
  int at, end;

  template <typename Arguments>
  CONVT3D_DEVICE explicit PhasesWalk(const Arguments& arguments)
      : at(blockIdx.x), end(arguments.count() * variants) {}

  template <typename Arguments>
  CONVT3D_DEVICE bool next(const Arguments& arguments, Item& item) {
    if (at >= end) return false;
    const int tile = at / variants;
    // A CTA meets all variants in turn: some phases have more taps than others.
    const int round = tile * variants / int(gridDim.x);
    const int variant =
        Config::march ? at % variants : (at % variants + arguments.turn * round) % variants;
    const int cta = Config::march ? at % int(gridDim.x) : 0;
    at += int(gridDim.x) + (Config::march ? mirrored(cta) - cta : 0);
    decode(arguments, tile, variant, item);
    return true;
  }
  /// Marches: segments of the same part of D come one after the other, the short ones at the end last.
  /// CTAs take them in turn and then back, so that who had a long one is the last to get another.
  CONVT3D_DEVICE static int mirrored(int cta) {
    const int last = int(gridDim.x) - 1 - cta;
    // A CTA whose weights stay keeps its variant.
    return Config::resident_weights ? last + cta % variants * 2 + 1 - variants : last;
  }
  /// Where the source box of an item begins along W: a multiple of 16 bytes.
  CONVT3D_DEVICE static int column(const Item& item) {
    return aligned(item.first[2] * Config::position_step + Config::Axis2::min_shift);
  }
  CONVT3D_DEVICE static int aligned(int position) {
    return position - floor_mod(position, 16 / int(sizeof(typename Config::Storage)));
  }

 private:
  /// The phase of a number among those that are walked along.
  CONVT3D_DEVICE static int phase_of(int number) {
    if constexpr (Live && phases < Config::phases) {
#pragma unroll
      for (int phase = 0; phase < Config::phases; ++phase)
        if (phase_has_taps<Config>(phase) && number-- == 0) return phase;
    }
    return number;
  }
  CONVT3D_DEVICE static int take(int& number, int count) {
    const int rest = number / count, digit = number - rest * count;
    number = rest;
    return digit;
  }
  template <typename Arguments>
  CONVT3D_DEVICE static void decode(const Arguments& arguments, int tile, int variant,
                                    Item& item) {
    const int phase = phase_of(variant % phases);
    const int team = variant / phases;
    item.group = team / Config::column_tiles;
    item.column_tile = team % Config::column_tiles;
    item.phase0 = phase / Config::Axis1::phases;
    item.phase1 = phase % Config::Axis1::phases;
    item.taps0 = WalkedTaps::of<(Config::phased > 0), typename Config::Axis0>(item.phase0);
    item.taps1 = WalkedTaps::of<(Config::phased > 1), typename Config::Axis1>(item.phase1);
    item.first[2] = take(tile, arguments.tiles[3]) * arguments.tile[3];
    item.first[1] = take(tile, arguments.tiles[2]) * arguments.tile[2];
    if constexpr (Config::march) {
      item.sample = take(tile, arguments.tiles[0]) * arguments.tile[0];
      item.first[0] = tile;  // a segment
    } else if constexpr (Live && phases < Config::phases) {
      // Tiles at the end of D, of which some phases do not exist, come last.
      item.sample = take(tile, arguments.tiles[0]) * arguments.tile[0];
      item.first[0] = tile * arguments.tile[1];
    } else {
      item.first[0] = take(tile, arguments.tiles[1]) * arguments.tile[1];
      item.sample = tile * arguments.tile[0];
    }
    if constexpr (Config::forward && !Config::resident_weights) {
      if constexpr (Config::phased > 0) {
        item.taps0.trim(item.first[0], arguments.tile[1], arguments.source_extent[0]);
        const int first = item.first[0] * Config::Axis0::unit_destination + item.phase0;
        if (first >= arguments.target.extent[0]) item.taps0.count = 0;
      }
      if constexpr (Config::phased > 1)
        item.taps1.trim(item.first[1], arguments.tile[2], arguments.source_extent[1]);
    }
  }
};

/// What warps that multiply walk along, and those that bring and send what is theirs: where others send,
/// outputs without taps are nobody's item but the filler's.
template <typename Config>
using PhasesProductWalk = PhasesWalk<Config, (Config::senders > 0)>;

/// The units of a warpgroup: `count` of its tile's from `first` on, one a row of the product.
template <typename Config>
struct PhasesUnits {
  const PhasesArguments<typename Config::Storage>& arguments;
  Divider by_lines, by_slices, by_samples;
  int first, count;

  CONVT3D_DEVICE PhasesUnits(const PhasesArguments<typename Config::Storage>& arguments_,
                             int warpgroup)
      : arguments(arguments_),
        by_lines(arguments_.tile[3]),
        by_slices(arguments_.tile[2]),
        by_samples(arguments_.tile[1]) {
    const int all = arguments.tile[0] * arguments.tile[1] * arguments.tile[2] * arguments.tile[3];
    const int own = warpgroup * arguments.warpgroup_units;
    first = own < all ? own : 0;
    count = max(0, min(arguments.warpgroup_units, all - own));
  }
  /// All units of a tile.
  CONVT3D_DEVICE explicit PhasesUnits(const PhasesArguments<typename Config::Storage>& arguments_)
      : arguments(arguments_),
        by_lines(arguments_.tile[3]),
        by_slices(arguments_.tile[2]),
        by_samples(arguments_.tile[1]),
        first(0),
        count(arguments_.tile[0] * arguments_.tile[1] * arguments_.tile[2] * arguments_.tile[3]) {}
  CONVT3D_DEVICE bool inside(int row) const { return row < count; }

  struct Unit {
    int sample, at[3];
  };
  /// Rows beyond the units stand for the first one.
  CONVT3D_DEVICE Unit operator()(int row) const {
    return numbered(first + (row < count ? row : 0));
  }
  /// A unit by its number in the tile.
  CONVT3D_DEVICE Unit numbered(int index) const {
    const int line = by_lines.quotient(index);
    const int slice = by_slices.quotient(line);
    const int sample = by_samples.quotient(slice);
    return {sample, {slice - sample * arguments.tile[1], line - slice * arguments.tile[2],
                     index - line * arguments.tile[3]}};
  }
  CONVT3D_DEVICE int position(const Unit& unit) const {
    return unit.sample * arguments.sample_pitch +
           unit.at[0] * Config::slice_step * arguments.slice_pitch +
           unit.at[1] * Config::line_step * arguments.line_pitch +
           unit.at[2] * Config::position_step;
  }
  /// The unit of a lane's row g (half 0) or g + 8 of a block, counted from the warpgroup's first.
  CONVT3D_DEVICE static int row_of(int block, int half) {
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
    return 64 * block + 16 * warp + (Config::lane_pairs ? 2 * g + half : g + 8 * half);
  }
  /// Bytes from a box's beginning to a lane's units, of the channels of both quads.
  CONVT3D_DEVICE void addresses(uint32_t (&rows)[Config::blocks][4]) const {
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int channel = (threadIdx.x % 4 + 4 * (i / 2)) * Config::Type::channels_per_word;
        rows[block][i] = (position((*this)(row_of(block, i % 2))) +
                          channel * arguments.channel_pitch) *
                         int(sizeof(typename Config::Storage));
      }
  }
  /// The same of turned boxes: the row that a lane gives to ldmatrix, or a block's first one. Blocks
  /// beyond the tile stand for its first.
  CONVT3D_DEVICE void turned_addresses(uint32_t (&rows)[Config::blocks][4]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block) {
      int at;
      if constexpr (Config::both_shared)
        at = position(numbered(64 * block < count ? first + 64 * block : 0));
      else
        at = position((*this)(64 * block + threadIdx.x / 32 % 4 * 16 + lane % 16)) +
             lane / 16 * arguments.channel_pitch;
      rows[block][0] = at * 16;
    }
  }
  /// Where a row's first output is staged, counted from the warpgroup's first output.
  CONVT3D_DEVICE int staged(int row) const { return staged((*this)(row)) - staged((*this)(0)); }
  /// The same, counted from the tile's first output.
  CONVT3D_DEVICE int staged_in_tile(int row) const { return staged((*this)(row)); }

 private:
  CONVT3D_DEVICE int staged(const Unit& unit) const {
    return unit.sample * arguments.staged_sample + unit.at[0] * arguments.staged_slice +
           unit.at[1] * Config::Inner1::slots * arguments.staged_row +
           unit.at[2] * Config::Axis2::slots;
  }
};

template <typename Config>
using PhasesSums = float[Config::Inner0::slots][Config::Inner1::slots][Config::Axis2::slots]
                        [Config::blocks][Config::sums];
template <typename Config>
using WeightRing = Ring<Config::weight_barriers>;
template <typename Config>
using BoxRing = Ring<Config::source_stages>;
/// Staged outputs, between the warps that multiply and those that send: of the ring's buffers the first.
template <typename Config>
using OutputRing = Ring<(Config::senders > 0 ? Config::staging_buffers : 1)>;
template <typename Config>
CONVT3D_DEVICE OutputRing<Config> output_ring(uint32_t shared) {
  return OutputRing<Config>(shared + 16 * (Config::source_stages + Config::weight_barriers));
}

/// Buffers that the products of the previous stage read.
template <typename Config>
struct HeldBuffers {
  bool first_lane;
  int box = -1, stage = -1;

  CONVT3D_DEVICE void release(const BoxRing<Config>& boxes, const WeightRing<Config>& stages) {
    constexpr bool every_lane = Config::box_readers > 4 * Config::consumers;
    mbarrier_arrive_if(boxes.empty(box), (every_lane || first_lane) && box >= 0);
    if constexpr (!Config::resident_weights)
      mbarrier_arrive_if(stages.empty(stage), first_lane && stage >= 0);
    box = stage = -1;
  }
};

/// The weights of stages, one after the other.
template <typename Config>
struct StageWeights {
  uint32_t first, at;

  CONVT3D_DEVICE explicit StageWeights(uint32_t shared)
      : first(shared + Config::weight_offset), at(first) {}
  CONVT3D_DEVICE uint32_t enter(const WeightRing<Config>& stages) {
    if constexpr (!Config::resident_weights) {
      stages.wait_full();
      at = first + stages.stage * Config::slot_bytes;
    }
    return at;
  }
  CONVT3D_DEVICE void leave(WeightRing<Config>& stages, HeldBuffers<Config>& held) {
    if constexpr (Config::resident_weights) {
      at += Config::stage_bytes;
    } else {
      held.stage = stages.stage;
      stages.advance();
    }
  }
};

}  // namespace convt3d
