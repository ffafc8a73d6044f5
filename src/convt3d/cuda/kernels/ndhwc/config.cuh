// The compile-time description of one channels_last kernel on warpgroup products, and of
// its packed weights. The macros are set by plan/ndhwc/.
#pragma once
#include "device/pipeline.cuh"
#include "device/wgmma_product.cuh"
#include "device/wgmma_sums.cuh"
#include "epilogue/fusion.cuh"
#include "geometry/convolution.cuh"
#include "geometry/walked_axis.cuh"
#include "load/box.cuh"
#include "schedule/longest_first.cuh"
#include "schedule/work_tile.cuh"

namespace convt3d {

/// The taps of an axis, those of the smallest shift first.
template <typename Axis>
struct TapsByShift {
  struct Place { int slot, shift, tap; };
  CONVT3D_CONSTEXPR static Place at(int position) {
    for (int shift = 0; shift < Axis::shifts; ++shift)
      for (int slot = 0; slot < Axis::slots; ++slot) {
        const int tap = Axis::tap(slot, shift + Axis::min_shift);
        if (tap >= 0 && position-- == 0) return {slot, shift, tap};
      }
    return {0, 0, 0};
  }
  /// Whether the tap at a position reads other source positions than the one before it.
  CONVT3D_CONSTEXPR static bool moves(int position) {
    return position == 0 || at(position).shift != at(position - 1).shift;
  }
  /// Positions that a box of all shifts has beside those of one.
  static constexpr int span = Axis::shifts - 1;
};

/// Slots of a unit before the first one with a tap. Where an axis ends in no others, the last
/// unit has these as slots of its own, so that no unit is without products.
template <typename Axis>
CONVT3D_CONSTEXPR int slots_beyond() {
  int slot = 0;
  while (slot < Axis::slots && !has_tap<Axis>(slot)) ++slot;
  return slot;
}

/// Products of warps: two neighbouring shifts of W, of eight channels each, are the depth of one
/// (m16n8k16). Those that read the same positions follow one another.
template <typename Axis0, typename Axis1, typename Axis2>
struct PairedTaps {
  struct Place {
    int shift0, shift1, pair;  // of the positions
    int slot0, slot1, slot2;
    int tap0, tap1, tap2[2];  // a negative one: no tap
  };
  static constexpr int pairs = div_up(Axis2::shifts, 2);

  /// The tap of W of a slot at one of the shifts.
  CONVT3D_CONSTEXPR static int tap2(int slot, int shift) {
    return shift < Axis2::shifts ? Axis2::tap(slot, shift + Axis2::min_shift) : -1;
  }
  /// Products along W for one tap of D and H.
  CONVT3D_CONSTEXPR static int along_w() {
    int found = 0;
    for (int pair = 0; pair < pairs; ++pair)
      for (int slot = 0; slot < Axis2::slots; ++slot)
        found += tap2(slot, 2 * pair) >= 0 || tap2(slot, 2 * pair + 1) >= 0;
    return found;
  }
  static constexpr int count = Axis0::kernel * Axis1::kernel * along_w();
  CONVT3D_CONSTEXPR static Place at(int index) {
    for (int shift0 = 0; shift0 < Axis0::shifts; ++shift0)
      for (int shift1 = 0; shift1 < Axis1::shifts; ++shift1)
        for (int pair = 0; pair < pairs; ++pair)
          for (int slot0 = 0; slot0 < Axis0::slots; ++slot0)
            for (int slot1 = 0; slot1 < Axis1::slots; ++slot1)
              for (int slot2 = 0; slot2 < Axis2::slots; ++slot2) {
                const Place place{shift0, shift1, pair, slot0, slot1, slot2,
                                  Axis0::tap(slot0, shift0 + Axis0::min_shift),
                                  Axis1::tap(slot1, shift1 + Axis1::min_shift),
                                  {tap2(slot2, 2 * pair), tap2(slot2, 2 * pair + 1)}};
                const bool any = place.tap2[0] >= 0 || place.tap2[1] >= 0;
                if (place.tap0 >= 0 && place.tap1 >= 0 && any && index-- == 0) return place;
              }
    return {};
  }
};

struct NdhwcConfig : Convolution {
  using Math = CONVT3D_MATH;
  static constexpr int element_bytes = int(sizeof(Storage));
  static constexpr int vector = 16 / element_bytes;  // elements of 16 bytes
  /// Products read channels_last alone: a contiguous source was copied (layout/channels_last.cu).
  static constexpr bool source_channels_last = CONVT3D_SOURCE_CHANNELS_LAST;
  static constexpr bool target_channels_last = CONVT3D_TARGET_CHANNELS_LAST;

  // Axes are D, H, W. Of the first `phased` axes a work tile has one phase, whose taps are walked
  // at run time; of the others all slots are in registers and all taps unrolled.
  static constexpr int phased = CONVT3D_PHASED;
  using Axis0 = typename Select<(phased > 0), Phased0, Static0<>>::Type;
  using Axis1 = typename Select<(phased > 1), Phased1, Static1<>>::Type;
  using Axis2 = typename Select<(phased > 2), Phased2, Static2<>>::Type;
  using Inner0 = typename Select<(phased > 0), WalkedTap, Axis0>::Type;
  using Inner1 = typename Select<(phased > 1), WalkedTap, Axis1>::Type;
  using Inner2 = typename Select<(phased > 2), WalkedTap, Axis2>::Type;
  static constexpr int phases = Axis0::phases * Axis1::phases * Axis2::phases;
  static constexpr int beyond0 = slots_beyond<Inner0>();
  static constexpr int beyond1 = slots_beyond<Inner1>();
  static constexpr int beyond2 = slots_beyond<Inner2>();

  /// Every tap of W has a box of its own; of H too, where `split` is two; of D too, where it is
  /// three. 0: all share one.
  static constexpr int split = CONVT3D_SPLIT;
  static_assert(split <= 1 || phased >= split, "taps of D and H with boxes are walked");
  static_assert(forward || split == 3, "units of the gradient are no neighbours in the source");

  /// Groups of eight channels: `groups_per_tile` of them are one group to all but the products,
  /// which are those of a warp (mma.sync), as no warpgroup product is so shallow.
  static constexpr int groups_per_tile = CONVT3D_GROUPS_PER_TILE;
  static constexpr int groups = Layer::groups / groups_per_tile;
  static constexpr int source_channels = Layer::source_channels * groups_per_tile;
  static constexpr int target_channels = Layer::target_channels * groups_per_tile;
  static constexpr bool by_warps = split == 0;
  static_assert(!by_warps || (phased == 0 && Layer::source_channels == 8 &&
                              Layer::target_channels % 8 == 0 && Layer::groups % groups_per_tile == 0),
                "all slots of some groups of eight channels");
  static_assert(by_warps || groups_per_tile == 1, "products of a warpgroup have one group");
  /// From a position of the target to the next, and those that are written.
  static constexpr int64_t all_channels = tensor_channels(int64_t(groups) * target_channels);
  static constexpr int own_channels = groups * target_channels;

  static_assert(target_channels_last || (beyond0 + beyond1 + beyond2 == 0 && !by_warps &&
                                         vector % Inner2::slots == 0),
                "16 bytes of a contiguous target are the slots of whole units");

  // Warpgroups that multiply, each with `blocks` blocks of 64 units.
  static constexpr int consumers = CONVT3D_CONSUMERS;
  static constexpr int blocks = CONVT3D_BLOCKS;
  static constexpr int warpgroup_rows = 64 * blocks;
  static constexpr int threads = 128 * (consumers + 1);
  static constexpr int consumer_registers = CONVT3D_CONSUMER_REGISTERS;
  static constexpr int producer_registers = CONVT3D_FILLS ? 40 : CONVT3D_CLUSTER > 1 ? 56 : 24;

  /// Units are in the order D, H, W, samples, not samples first: all shifts are whole lines of
  /// samples, and the units of a block can share theirs.
  static constexpr bool samples_inside = CONVT3D_SAMPLES_INSIDE;
  /// Taps of D and H that meet nothing but padding in a block of units are left out there.
  static constexpr bool skips = samples_inside;
  static constexpr uint32_t all_blocks = (1u << blocks) - 1;
  static_assert(!skips || (forward && phased >= 2 && split <= 2 && blocks <= 2 &&
                           !CONVT3D_RESIDENT_WEIGHTS),
                "walked taps of D and H");

  // A chunk of channels: `steps` products deep, part of a row of 128 bytes of a box.
  static constexpr int steps = CONVT3D_STEPS;
  static constexpr int chunk_channels = steps * 2 * vector;
  static constexpr int chunks = div_up(source_channels, chunk_channels);
  static_assert(steps <= 4, "a row holds four products");
  static_assert(groups == 1 || by_warps || source_channels % (2 * vector) == 0,
                "products end within their group");
  static_assert(!by_warps || (chunks == 1 && element_bytes == 2), "a row of a box has a team");

  static constexpr int column_tile = CONVT3D_COLUMN_TILE;
  static constexpr int column_tiles = div_up(target_channels, column_tile);
  static_assert(column_tile % 16 == 0 && column_tile <= 256, "columns of one product");
  static_assert(target_channels % vector == 0, "outputs leave as 16 bytes");
  static constexpr int sums = column_tile / 2;  // accumulators of a thread for one slot and block

  // Packed weights: [group][column tile][chunk][tap2][walked tap1][walked tap0] of stages
  // [tap0][tap1][step][quad][column][four words]. Taps of phased axes are in the order of their
  // phases, those of W else in the order of their shifts.
  static constexpr int walked0 = phased > 0 ? Axis0::kernel : 1;
  static constexpr int walked1 = phased > 1 ? Axis1::kernel : 1;
  static constexpr int taps = Inner0::kernel * Inner1::kernel;
  //
  // By warps, one stage of fragments of m16n8k16 products: [two products][group][eight
  // columns][lane] [product][tap of W].
  //
  // As they are (`direct`), channels_last weights are a product's second operand already, in rows
  // of 128 bytes under the 128-byte swizzle, which TMA brings. Where columns are neighbours in
  // memory, a row is a source channel's columns of one tap: stages [tap0][tap1][64 columns][channel]
  // [128 bytes]. Where source channels are (`k_major`), it is a column's chunk: stages [tap0][tap1]
  // [column][128 bytes]; so the gradient by input sees a weight, and in reverse order of its taps
  // (`flipped`) the forward pass that stands for one of stride 1.
  static constexpr bool direct = CONVT3D_DIRECT != 0;
  static constexpr bool k_major = CONVT3D_DIRECT >= 2;
  static constexpr bool flipped = CONVT3D_DIRECT == 3;
  static constexpr int box_columns = 64;
  static constexpr int column_boxes = div_up(column_tile, box_columns);
  static constexpr int column_box_bytes = chunk_channels * 128;
  static_assert(!direct || (groups == 1 && !by_warps), "of one group");
  static_assert(!direct || k_major || (forward && element_bytes == 2),
                "columns are neighbours in memory, and 16-bit operands may have them as rows");
  static constexpr int step_bytes = k_major ? 32 : direct ? 16 * 128 : 2 * column_tile * 16;
  using Paired = PairedTaps<Inner0, Inner1, Inner2>;
  static constexpr int product_pairs = div_up(Paired::count, 2);
  static constexpr int group_tiles = Layer::target_channels / 8;
  static constexpr int fragments = groups_per_tile * group_tiles;  // of a tap
  static constexpr int stage_bytes =
      by_warps ? product_pairs * fragments * 32 * 16
               : taps * (k_major  ? column_tile * 128
                         : direct ? column_boxes * column_box_bytes
                                  : steps * step_bytes);
  static constexpr int tap_bytes = stage_bytes / taps;  // of products that are not by warps
  static constexpr int64_t n_tile_bytes =
      by_warps ? stage_bytes : int64_t(chunks) * Axis2::kernel * walked1 * walked0 * stage_bytes;
  static_assert((by_warps ? Paired::count * fragments : taps * Inner2::kernel * steps) * blocks <= 512,
                "all products are written out");

  /// All weights of a CTA stay in shared memory (its phase and columns never change then), else
  /// they pass through a ring.
  static constexpr bool resident_weights = CONVT3D_RESIDENT_WEIGHTS;
  static constexpr int weight_stages = CONVT3D_WEIGHT_STAGES;
  static constexpr int source_stages = CONVT3D_SOURCE_STAGES;
  static_assert(source_stages >= 2 && weight_stages >= 1, "one is read while another is filled");
  static_assert(!by_warps || (resident_weights && weight_stages == 1), "all fragments stay");

  /// A warp beside the producer writes the outputs of work tiles without taps, which are the bias
  /// alone: bulk copies of a few positions that lie behind the epilogue's memory.
  static constexpr bool fills = CONVT3D_FILLS;
  static_assert(!fills || (forward && !resident_weights && !samples_inside && groups == 1 &&
                           column_tiles == 1 && phased > 0 && phased < 3),
                "whole lines of a tile");
  static constexpr int position_bytes = own_channels * element_bytes;
  static constexpr int fill_bytes =
      position_bytes * (position_bytes < 2048 ? 2048 / position_bytes : 1);

  /// Split-K: the CTAs of a cluster share the chunks and taps of W of one work tile, add their sums
  /// up in the order of the CTAs, and store some columns each (ndhwc/cluster.cuh).
  static constexpr int cluster = CONVT3D_CLUSTER;
  static_assert(cluster == 1 || (phased == 3 && !by_warps && !resident_weights && !skips),
                "each stage has its own boxes and weights");
  CONVT3D_DEVICE static int rank() { return int(blockIdx.x) % cluster; }  // of a CTA in its cluster
  /// Columns that a CTA stores, beginning at its rank times so many.
  static constexpr int stored_columns = 16 * div_up(column_tile / 16, cluster);

  // The epilogue's shared memory: of each warp a table of rows, and one slot of D and H of 16
  // rows, some columns at a time.
  static constexpr int staged_columns = CONVT3D_STAGED_COLUMNS;
  static_assert(staged_columns % 16 == 0 && stored_columns % staged_columns == 0, "whole rounds");
  static constexpr int table_bytes = 16 * 16;
  static constexpr int row_bytes = Inner2::slots * staged_columns * element_bytes;
  static constexpr int row_pitch = row_bytes + 16;
  // Of contiguous targets, the 16 rows of each column.
  static constexpr int column_pitch = 16 * Inner2::slots * element_bytes + 16;
  static constexpr int staging_bytes =
      target_channels_last ? 16 * row_pitch : staged_columns * column_pitch;
  static constexpr int store_bytes = table_bytes + staging_bytes;

  static constexpr int order_offset = 128;  // of work tiles, longest first

  // Shared memory in bytes: barriers, order, weights, source boxes (whose size follows the tile),
  // epilogue.
  static constexpr int weight_offset =
      round_up(order_offset + (skips ? 4 * LongestFirst::most_rounds : 0), direct ? 1024 : 128);
  static constexpr int box_offset = round_up(weight_offset + weight_stages * stage_bytes, 1024);
  static constexpr int weight_barriers = resident_weights ? 1 : weight_stages;
  static_assert(16 * (source_stages + weight_barriers) <= order_offset, "room for barriers");
  static_assert(!skips || 4 * consumers * store_bytes >= 4 * LongestFirst::most, "room to sort items");
};

template <typename Storage>
struct NdhwcArguments {
  const unsigned char* weights;
  const Storage* bias;
  Activation<Storage> target;
  int batch;
  int tile[4], tiles[4];  // units of a tile, and tiles: samples, then the axes
  int sample_rows, slice_rows, line_rows;  // rows of a box from a sample, slice and line to the next
  int loaded_bytes, box_bytes;  // what comes, and from a box to the next
  int source_extent[3];
  int rotation;  // pairs of N tile and phase by which a CTA moves on between rounds
  CONVT3D_FUSION_MEMBER

  CONVT3D_DEVICE int count() const { return tiles[0] * tiles[1] * tiles[2] * tiles[3]; }
  CONVT3D_DEVICE int units() const { return tile[0] * tile[1] * tile[2] * tile[3]; }
};

/// A CTA's work: tiles, and of each a phase, columns and group. Those of a tile are neighbours,
/// so that they share its source in L2; a CTA whose weights stay keeps its own.
template <typename Config>
struct NdhwcWalk {
  static constexpr int n_tile_phases = Config::groups * Config::column_tiles * Config::phases;
  int at, end;
  LongestFirst longest_first;

  template <typename Arguments>
  CONVT3D_DEVICE NdhwcWalk(const Arguments& arguments, uint32_t shared)
      : at(blockIdx.x / Config::cluster),
        end(arguments.count() * n_tile_phases),
        longest_first(shared + Config::order_offset, end) {}

  template <typename Arguments>
  CONVT3D_DEVICE bool next(const Arguments& arguments, WorkTile& work) {
    int number = at, rotation = arguments.rotation;
    if constexpr (Config::skips) {
      if (!longest_first.next(at, end, number, rotation)) return false;
    } else if (at >= end) {
      return false;
    }
    const int tile = number / n_tile_phases;
    // A CTA takes all pairs of N tile and phase in turn: some phases have more taps than others.
    const int rotations = tile * n_tile_phases / int(gridDim.x);
    const int n_tile_phase = (number % n_tile_phases + rotation * rotations) % n_tile_phases;
    at += gridDim.x / Config::cluster;
    decode(arguments, tile, n_tile_phase, work);
    return true;
  }
  /// Products of a column's units, in blocks' shares.
  template <typename Arguments>
  CONVT3D_DEVICE static int length(const Arguments& arguments, int number) {
    WorkTile work;
    decode(arguments, number / n_tile_phases, number % n_tile_phases, work);
    int all = work.taps[2].count;
#pragma unroll
    for (int axis = 0; axis < 2; ++axis) {
      int met = 0;
      for (int unit = 0; unit < arguments.tile[axis + 1]; ++unit)
        met += __popc(taps_met(arguments, work, axis, unit));
      all *= met;
    }
    return all;
  }
  /// The taps along an axis that meet a unit's source, a bit each.
  template <typename Arguments>
  CONVT3D_DEVICE static uint32_t taps_met(const Arguments& arguments, const WorkTile& work, int axis,
                                          int unit) {
    const WalkedTaps& taps = work.taps[axis];
    uint32_t found = 0;
    for (int tap = 0; tap < taps.count; ++tap) {
      const int place = work.first[axis] + unit + taps.origin + taps.offset + tap * taps.step;
      found |= uint32_t(unsigned(place) < unsigned(arguments.source_extent[axis])) << tap;
    }
    return found;
  }

 private:
  template <typename Arguments>
  CONVT3D_DEVICE static void decode(const Arguments& arguments, int tile, int n_tile_phase,
                                    WorkTile& work) {
    const int phase2 = n_tile_phase % Config::Axis2::phases;
    n_tile_phase /= Config::Axis2::phases;
    const int phase1 = n_tile_phase % Config::Axis1::phases;
    n_tile_phase /= Config::Axis1::phases;
    const int phase0 = n_tile_phase % Config::Axis0::phases;
    n_tile_phase /= Config::Axis0::phases;
    work.group = n_tile_phase / Config::column_tiles;
    work.column_tile = n_tile_phase % Config::column_tiles;
    work.set_phase<Config>(phase0, phase1, phase2);
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      const int rest = tile / arguments.tiles[axis + 1];
      work.first[axis] = (tile - rest * arguments.tiles[axis + 1]) * arguments.tile[axis + 1];
      tile = rest;
    }
    work.sample = tile * arguments.tile[0];
    if constexpr (Config::forward && !Config::resident_weights) {
#pragma unroll
      for (int axis = 0; axis < Config::phased; ++axis)
        work.taps[axis].trim(work.first[axis], arguments.tile[axis + 1],
                             arguments.source_extent[axis]);
    }
  }
};

/// The units of a tile, one a row of the products.
template <typename Config>
struct NdhwcUnits : TileUnits<NdhwcArguments<typename Config::Storage>, Config::samples_inside> {
  using Base = TileUnits<NdhwcArguments<typename Config::Storage>, Config::samples_inside>;
  using Base::arguments;
  int count;

  CONVT3D_DEVICE explicit NdhwcUnits(const NdhwcArguments<typename Config::Storage>& arguments_)
      : Base(arguments_), count(arguments_.units()) {}

  /// The row of a box where a unit lies at no shift.
  CONVT3D_DEVICE int row(int index) const {
    const auto unit = this->numbered(index);
    return unit.sample * arguments.sample_rows + unit.at[0] * arguments.slice_rows +
           unit.at[1] * arguments.line_rows +
           unit.at[2] * (Config::samples_inside ? arguments.tile[0] : 1);
  }
};

template <typename Config>
using NdhwcSums = float[Config::Inner0::slots][Config::Inner1::slots][Config::Inner2::slots]
                      [Config::blocks][Config::sums];
template <typename Config>
using NdhwcWeights = Ring<Config::weight_barriers>;
template <typename Config>
using NdhwcAStages = Ring<Config::source_stages>;

}  // namespace convt3d
