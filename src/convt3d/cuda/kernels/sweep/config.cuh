// The compile-time description of one sweep kernel and of its packed weights.
// The macros are set by plan/sweep/.
#pragma once
#include "device/pipeline.cuh"
#include "device/sum_parts.cuh"
#include "device/wgmma_product.cuh"
#include "epilogue/fusion.cuh"
#include "geometry/convolution.cuh"
#include "geometry/stacked_axis.cuh"
#include "load/box.cuh"

namespace convt3d {

struct SweepConfig : Convolution {
  using Math = CONVT3D_MATH;
  static constexpr bool source_channels_last = CONVT3D_SOURCE_CHANNELS_LAST;
  static constexpr bool target_channels_last = CONVT3D_TARGET_CHANNELS_LAST;

  /// Axis 0 is swept along; axis 1 is walked tap by tap and phase by phase; the taps of axis 2
  /// are unrolled and its phases are slots in registers.
  using Axis0 = StackedAxis<forward, kernel0, stride0, padding0, dilation0, CONVT3D_PLANES>;
  using Axis1 = Phased1;
  using Axis2 = Static2<>;

  static constexpr int columns = target_channels;

  // Warpgroups that multiply, each with `blocks` blocks of 64 rows; warps that fill source boxes.
  static constexpr int consumers = 2;
  static constexpr int blocks = CONVT3D_BLOCKS;
  static constexpr int fill_warps = CONVT3D_FILL_WARPS;
  /// Pairs of positions of a plane that a filling thread loads.
  static constexpr int fill_pairs = CONVT3D_FILL_PAIRS;
  /// Of these, how many are in flight at once.
  static constexpr int fill_batch = CONVT3D_FILL_BATCH;
  static constexpr int warpgroup_rows = 64 * blocks;
  static constexpr int rows = consumers * warpgroup_rows;
  static constexpr int threads = 128 * consumers + 32 * (fill_warps + 1);
  static_assert((fill_warps + 1) % 4 == 0, "producers are whole warpgroups");
  static constexpr int consumer_registers = CONVT3D_CONSUMER_REGISTERS;
  static constexpr int producer_registers = CONVT3D_PRODUCER_REGISTERS;

  // A channel chunk is eight words deep: one matrix step, two quads of words.
  static constexpr int quads = 2;
  static constexpr int quad_channels = 4 * Type::channels_per_word;
  static constexpr int chunk_channels = quads * quad_channels;
  static constexpr int chunks = div_up(source_channels, chunk_channels);

  /// Split operands (see device/arithmetic.cuh) come as two parts: all big quads of a chunk, then
  /// the small ones.
  static constexpr int parts = Math::words_per_value;

  /// Whether two warpgroups run in ping-pong (see PingPong).
  static constexpr bool ping_pong = CONVT3D_PING_PONG;
  static_assert(!ping_pong || parts == 1, "two that multiply without adding");

  // Columns of a CTA, and what they become when the taps of axis 0 are stacked.
  static constexpr int column_tile = CONVT3D_COLUMN_TILE;
  static constexpr int column_tiles = div_up(columns, column_tile);
  static constexpr int stacked = Axis0::kernel * column_tile;
  static_assert(column_tile % 8 == 0, "columns come in eights");
  static_assert(stacked <= 256, "a product has at most 256 columns");
  static constexpr int plane_sums = column_tile / 2;  // accumulators of a thread for one plane
  static constexpr int sums = Axis0::window * plane_sums;

  /// Products of split operands have accumulators of their own and are added to the sums outside
  /// the tensor core, whose adder truncates. So many sets of them are in flight.
  static constexpr int product_sets = CONVT3D_PRODUCT_SETS;
  static_assert((product_sets > 0) == (parts > 1), "split products have sums of their own");
  /// Neighbouring taps of axis 2 whose products one set adds up.
  static constexpr int chain_taps = CONVT3D_CHAIN_TAPS;
  static constexpr int chains = div_up(Axis2::kernel, chain_taps);
  /// Where many sets are added to an output, forward, they are added up in parts: those of so
  /// many chunks of a step. PyTorch's gradients are sums of one part.
  static constexpr int reaching_planes = div_up(kernel0, forward ? stride0 : 1);
  static constexpr int plane_sets = chunks * Axis1::max_taps * chains;  // of one source plane
  static constexpr bool sums_in_parts =
      parts > 1 && forward && reaching_planes * plane_sets > 2 * longest_part;
  static constexpr int step_planes =
      Axis0::source_step < reaching_planes ? Axis0::source_step : reaching_planes;
  static constexpr int part_chunks = div_up(chunks, div_up(step_planes * plane_sets, longest_part));

  // Packed weights: [group][column tile][chunk][tap1] of stages
  // [tap2][part][quad][stacked][four words].
  static constexpr int weight_part_bytes = quads * stacked * 16;
  static constexpr int tap_bytes = parts * weight_part_bytes;
  static constexpr int stage_bytes = Axis2::kernel * tap_bytes;
  static constexpr int chunk_bytes = Axis1::kernel * stage_bytes;
  /// Whether all weights of a column tile stay in shared memory; otherwise they stream, in
  /// stages.
  static constexpr bool keep_weights = CONVT3D_KEEP_WEIGHTS;
  static constexpr int weight_stages = CONVT3D_WEIGHT_STAGES;
  static_assert(!keep_weights || weight_stages == 1, "what stays is one stage");
  static constexpr int set_bytes = chunks * chunk_bytes;
  static constexpr int weight_bytes = keep_weights ? set_bytes : weight_stages * stage_bytes;
  static constexpr int source_stages = CONVT3D_SOURCE_STAGES;

  /// A last chunk that has channels in its first quad alone: the depth of its products is two
  /// taps of axis 2 side by side, not one and zeros. They read neighbouring rows.
  static constexpr bool tap_pairs = parts == 1 && Axis2::slots == 1 && Axis2::unit_source == 1 &&
                                    Axis2::kernel > 1 &&
                                    (source_channels - 1) % chunk_channels < quad_channels;
  /// The tap in a quad of such a product, that of the lower row first; or -1, a quad of zeros.
  CONVT3D_CONSTEXPR static int paired_tap(int pair, int quad) {
    const bool whole = 2 * pair + 1 < Axis2::kernel;
    if (2 * pair + (whole ? 1 : quad) >= Axis2::kernel) return -1;
    return 2 * pair + (whole && forward ? 1 - quad : quad);
  }

  // A source box: [plane][residue of axis 1][residue of axis 2][quad][position], 16 bytes each.
  static constexpr int residues1 = Axis1::unit_source;
  static constexpr int residues2 = Axis2::unit_source;
  static constexpr int positions = CONVT3D_POSITIONS;
  static constexpr int quad_bytes = positions * 16;
  static constexpr int part_bytes = quads * quad_bytes;
  static constexpr int sub_box_bytes = parts * part_bytes;
  static constexpr int plane_bytes = residues1 * residues2 * sub_box_bytes;
  static constexpr int box_bytes = Axis0::source_step * plane_bytes;
  /// The farthest that taps reach past a unit, in units.
  static constexpr int reach1 = (Axis1::shifts - 1) / residues1;
  static constexpr int reach2 = (Axis2::shifts - 1) / residues2;

  // The epilogue: a table of a warpgroup's rows, eight bytes each slot, and for contiguous
  // targets one or two buffers of staged columns. 16-bit ones of one slot along axis 2 pass by
  // stmatrix, sixteen at once.
  static constexpr int slots2 = Axis2::slots;
  static constexpr int row_elements = warpgroup_rows * slots2;
  static constexpr int table_bytes = 8 * row_elements;
  static constexpr int staged_columns = CONVT3D_STAGED_COLUMNS;
  static constexpr int staged_buffers = CONVT3D_STAGED_BUFFERS;
  static constexpr int staged_eights = sizeof(Storage) == 2 && slots2 == 1 ? 2 : 1;
  static constexpr int staged_row = row_elements + 16 / int(sizeof(Storage));  // other banks
  static constexpr int buffer_bytes =
      round_up(staged_columns, 8 * staged_eights) * staged_row * int(sizeof(Storage));
  static constexpr int store_bytes =
      table_bytes + (target_channels_last ? 0 : staged_buffers * buffer_bytes);

  // Shared memory in bytes: barriers, source boxes, weight stages, staging.
  static constexpr int barrier_bytes = 256;
  static constexpr int source_offset = barrier_bytes;
  static constexpr int weight_offset = source_offset + source_stages * box_bytes;
  static constexpr int staging_offset = weight_offset + weight_bytes;
  static constexpr int ping_pong_offset = 16 * (source_stages + weight_stages);
  static_assert(ping_pong_offset + 16 <= barrier_bytes, "room for barriers");
};

template <typename Storage>
struct SweepArguments {
  Activation<const Storage> source;
  Activation<Storage> target;
  const unsigned char* weights;
  const Storage* bias;
  int batch, tile2;
  CONVT3D_FUSION_MEMBER
};

/// The rows of all products of the call, one after the other: sample, piece of axis 2, line of
/// axis 1, unit of axis 2. Lines and samples stand just far enough apart that a tap which leaves
/// one meets zeros; these rows compute nothing that is kept.
template <typename Config>
struct RowSpace {
  int tile2, pieces, pitch1, pitch2;
  int beyond;  // rows after the last unit of the last sample
  Divider by_pitch2, by_pitch1, by_pieces;

  CONVT3D_DEVICE static int units(int extent, int unit) { return (extent + unit - 1) / unit; }
  /// Rows from one line to the next; neighbours share their zeros if they can.
  CONVT3D_DEVICE static int shared_pitch(int units, int extent, int min_shift, int stride,
                                         int reach) {
    const int zeros = min_shift < 0 ? -min_shift / stride : 0;
    const int shared =
        max(max(units, units + reach - zeros), (extent - min_shift + stride - 1) / stride);
    return min(shared, units + reach);
  }
  template <typename Arguments>
  CONVT3D_DEVICE explicit RowSpace(const Arguments& arguments)
      : by_pitch2(1), by_pitch1(1), by_pieces(1) {
    using Axis1 = typename Config::Axis1;
    using Axis2 = typename Config::Axis2;
    const int units1 = units(arguments.target.extent[1], Axis1::unit_destination);
    const int units2 = units(arguments.target.extent[2], Axis2::unit_destination);
    tile2 = min(arguments.tile2, units2);
    pieces = (units2 + tile2 - 1) / tile2;
    pitch1 = shared_pitch(units1, arguments.source.extent[1], Axis1::min_shift, Config::residues1,
                          Config::reach1);
    pitch2 = pieces > 1 ? tile2 + Config::reach2
                        : shared_pitch(units2, arguments.source.extent[2], Axis2::min_shift,
                                       Config::residues2, Config::reach2);
    // Contiguous rows of even length are loaded in pairs, which must not drift from line to line.
    if (!Config::source_channels_last && arguments.source.extent[2] % 2 == 0)
      pitch2 += pitch2 * Config::residues2 % 2;
    beyond = (pitch1 - units1) * pitch2 + pitch2 - tile2;
    by_pitch2 = Divider(pitch2);
    by_pitch1 = Divider(pitch1);
    by_pieces = Divider(pieces);
  }
  CONVT3D_DEVICE int tiles(int batch) const {
    return int((int64_t(batch) * pieces * pitch1 * pitch2 - beyond + Config::rows - 1) /
               Config::rows);
  }
};

/// Rows counted from a CTA's first one.
template <typename Config>
struct RowTile {
  const RowSpace<Config>& space;
  int sample, piece, line, column;

  CONVT3D_DEVICE RowTile(const RowSpace<Config>& space_, int tile) : space(space_) {
    const int64_t row = int64_t(tile) * Config::rows;
    const int64_t rest = row / space.pitch2;
    column = int(row - rest * space.pitch2);
    const int above = int(rest / space.pitch1);
    line = int(rest - int64_t(above) * space.pitch1);
    sample = above / space.pieces;
    piece = above - sample * space.pieces;
  }
  struct Place {
    int sample, line, column, first2;  // the piece begins at unit first2
  };
  CONVT3D_DEVICE Place locate(int row) const {
    Place place;
    const int x = column + row;
    const int lines = space.by_pitch2.quotient(x);
    place.column = x - lines * space.pitch2;
    const int y = line + lines;
    const int above = space.by_pitch1.quotient(y);
    place.line = y - above * space.pitch1;
    const int z = piece + above;
    const int samples = space.by_pieces.quotient(z);
    place.first2 = (z - samples * space.pieces) * space.tile2;
    place.sample = sample + samples;
    return place;
  }
};

/// A CTA's share of the work: a run of (column of the sweep, step), walked in order by all roles.
template <typename Config>
struct Walk {
  using Axis0 = typename Config::Axis0;
  int steps, tiles;
  int64_t at, end;

  template <typename Arguments>
  CONVT3D_DEVICE Walk(const Arguments& arguments, const RowSpace<Config>& space) {
    constexpr int planes = Axis0::target_step * Axis0::interleaved;
    steps = (arguments.target.extent[0] - Axis0::target_origin + planes - 1) / planes;
    tiles = space.tiles(arguments.batch);
    const int64_t total = int64_t(tiles) * Config::groups * Config::column_tiles *
                          Config::Axis1::phases * Axis0::interleaved * steps;
    at = total * blockIdx.x / gridDim.x;
    end = total * (blockIdx.x + 1) / gridDim.x;
  }

  /// Steps of one column; those before `first` only fill the window.
  struct Leg {
    int tile, group, column_tile, phase1, volume0, begin, first, end;
    PhaseTaps taps1;
    /// Number of the weights of all its products.
    CONVT3D_DEVICE int set() const { return group * Config::column_tiles + column_tile; }
  };
  CONVT3D_DEVICE bool next(Leg& leg) {
    if (at >= end) return false;
    int64_t column = at / steps;
    leg.first = int(at - column * steps);
    leg.end = int(min(int64_t(steps), leg.first + (end - at)));
    leg.begin = max(0, leg.first - Axis0::warm_steps);
    at += leg.end - leg.first;
    leg.phase1 = int(column % Config::Axis1::phases);
    column /= Config::Axis1::phases;
    leg.volume0 = int(column % Axis0::interleaved);
    column /= Axis0::interleaved;
    if constexpr (Config::keep_weights) {
      // Weights change as rarely as can be.
      leg.tile = int(column % tiles);
      column /= tiles;
      leg.column_tile = int(column % Config::column_tiles);
      leg.group = int(column / Config::column_tiles);
    } else {
      leg.column_tile = int(column % Config::column_tiles);
      column /= Config::column_tiles;
      leg.group = int(column % Config::groups);
      leg.tile = int(column / Config::groups);
    }
    leg.taps1 = Config::Axis1::taps_of(leg.phase1);
    return true;
  }
  /// Whether a step has any product at all.
  CONVT3D_DEVICE static bool multiplies(const Leg& leg, int step, int extent0) {
    const int number = step * Axis0::source_step;
    return leg.taps1.count > 0 && Axis0::source_plane(number, leg.volume0) < extent0 &&
           Axis0::source_plane(number + Axis0::source_step - 1, leg.volume0) >= 0;
  }
};

}  // namespace convt3d
