// A launch's arguments, the work tiles that a CTA walks over, and the units of a warpgroup.
#pragma once
#include "phases/config.cuh"
#include "schedule/work_tile.cuh"

namespace convt3d {

template <typename Storage>
struct PhasesArguments {
  const unsigned char* weights;
  const Storage* bias;
  Activation<Storage> target;
  int batch;
  int tile[4], tiles[4];  // units of a tile, and tiles: samples, then the axes
  // The box of a tile: positions from a sample, slice, line and channel to the next; which
  // dimension of its tensor map the channels are.
  int sample_pitch, slice_pitch, line_pitch, channel_pitch, channel_dimension;
  int box_bytes;
  int warpgroup_units;  // of a tile, in order
  // The epilogue's staging: elements from a row, slice, sample and column to the next, each as in
  // the target modulo 16 bytes; whether the rows of a slice are one run.
  int staged_row, staged_slice, staged_sample, staged_column;
  bool whole_slices;
  int runs;  // of a staged column
  uint32_t staging_offset;
  int rotation;  // pairs of N tile and phase by which a CTA moves on between rounds
  bool wide;  // rows and tiles are multiples of `wide_outputs`
  int source_extent[2];  // along D and H
  int segment;  // units along D of a work tile, of a sweep
  int buffers;  // of staged outputs, for the store warps
  Activation<const Storage> source;  // where no tensor map brings it
  CONVT3D_FUSION_MEMBER

  CONVT3D_DEVICE int count() const { return tiles[0] * tiles[1] * tiles[2] * tiles[3]; }
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

/// A CTA's work. Work tiles of one tile of units are neighbours, so that they share its source in
/// L2; a CTA whose weights stay keeps its own phase and columns. `Live`: phases with taps alone,
/// so that all CTAs have as many.
template <typename Config, bool Live = false>
struct PhasesWalk {
  CONVT3D_CONSTEXPR static int count_phases() {
    int found = 0;
    for (int phase = 0; phase < Config::phases; ++phase)
      found += !Live || phase_has_taps<Config>(phase);
    return found;
  }
  static constexpr int phases = count_phases();
  static constexpr int n_tiles = Config::groups * Config::column_tiles;
  static constexpr int n_tile_phases = n_tiles * phases;
  int at, end;

  template <typename Arguments>
  CONVT3D_DEVICE explicit PhasesWalk(const Arguments& arguments)
      : at(blockIdx.x), end(arguments.count() * n_tile_phases) {}

  template <typename Arguments>
  CONVT3D_DEVICE bool next(const Arguments& arguments, WorkTile& work) {
    if (at >= end) return false;
    const int tile = at / n_tile_phases;
    // A CTA takes all pairs of N tile and phase in turn: some phases have more taps than others.
    const int round = tile * n_tile_phases / int(gridDim.x);
    const int n_tile_phase =
        Config::sweep ? at % n_tile_phases : (at % n_tile_phases + arguments.rotation * round) % n_tile_phases;
    const int cta = Config::sweep ? at % int(gridDim.x) : 0;
    at += int(gridDim.x) + (Config::sweep ? mirrored(cta) - cta : 0);
    decode(arguments, tile, n_tile_phase, work);
    return true;
  }
  /// Sweeps: segments of the same part of D come one after the other, the short ones at the end
  /// last. CTAs take them in turn and then in reverse, so that a CTA with a long one is the last
  /// to get another.
  CONVT3D_DEVICE static int mirrored(int cta) {
    const int last = int(gridDim.x) - 1 - cta;
    // A CTA whose weights stay keeps its N tile and phase.
    return Config::resident_weights ? last + cta % n_tile_phases * 2 + 1 - n_tile_phases : last;
  }
  /// Where the source box of a work tile begins along W: a multiple of 16 bytes.
  CONVT3D_DEVICE static int column(const WorkTile& work) {
    const int position = work.first[2] * Config::position_step + Config::Axis2::min_shift;
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
  CONVT3D_DEVICE static void decode(const Arguments& arguments, int tile, int n_tile_phase,
                                    WorkTile& work) {
    const int phase = phase_of(n_tile_phase % phases);
    const int n_tile = n_tile_phase / phases;
    work.group = n_tile / Config::column_tiles;
    work.column_tile = n_tile % Config::column_tiles;
    work.set_phase<Config>(phase / Config::Axis1::phases, phase % Config::Axis1::phases, 0);
    work.first[2] = take(tile, arguments.tiles[3]) * arguments.tile[3];
    work.first[1] = take(tile, arguments.tiles[2]) * arguments.tile[2];
    if constexpr (Config::sweep) {
      work.sample = take(tile, arguments.tiles[0]) * arguments.tile[0];
      work.first[0] = tile;  // a segment
    } else if constexpr (Live && phases < Config::phases) {
      // Tiles at the end of D, of which some phases do not exist, come last.
      work.sample = take(tile, arguments.tiles[0]) * arguments.tile[0];
      work.first[0] = tile * arguments.tile[1];
    } else {
      work.first[0] = take(tile, arguments.tiles[1]) * arguments.tile[1];
      work.sample = tile * arguments.tile[0];
    }
    if constexpr (Config::forward && !Config::resident_weights) {
      if constexpr (Config::phased > 0) {
        work.taps[0].trim(work.first[0], arguments.tile[1], arguments.source_extent[0]);
        const int first = work.first[0] * Config::Axis0::unit_destination + work.phase[0];
        if (first >= arguments.target.extent[0]) work.taps[0].count = 0;
      }
      if constexpr (Config::phased > 1)
        work.taps[1].trim(work.first[1], arguments.tile[2], arguments.source_extent[1]);
    }
  }
};

/// The work tiles of warps that multiply, and of those that load and store for them. With store
/// warps, outputs without taps are the filler's alone.
template <typename Config>
using PhasesProductWalk = PhasesWalk<Config, (Config::store_warps > 0)>;

/// The units of a warpgroup: `count` of its tile's from `first` on, one a row of the product.
template <typename Config>
struct PhasesUnits : TileUnits<PhasesArguments<typename Config::Storage>> {
  using Arguments = PhasesArguments<typename Config::Storage>;
  using typename TileUnits<Arguments>::Unit;
  using TileUnits<Arguments>::arguments;
  int first, count;

  CONVT3D_DEVICE PhasesUnits(const Arguments& arguments_, int warpgroup)
      : TileUnits<Arguments>(arguments_) {
    const int all = arguments.tile[0] * arguments.tile[1] * arguments.tile[2] * arguments.tile[3];
    const int own = warpgroup * arguments.warpgroup_units;
    first = own < all ? own : 0;
    count = max(0, min(arguments.warpgroup_units, all - own));
  }
  /// All units of a tile.
  CONVT3D_DEVICE explicit PhasesUnits(const Arguments& arguments_)
      : TileUnits<Arguments>(arguments_),
        first(0),
        count(arguments_.tile[0] * arguments_.tile[1] * arguments_.tile[2] * arguments_.tile[3]) {}
  CONVT3D_DEVICE bool inside(int row) const { return row < count; }

  /// Rows beyond the units stand for the first one.
  CONVT3D_DEVICE Unit operator()(int row) const {
    return this->numbered(first + (row < count ? row : 0));
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
  /// The same of transposed boxes: the row that a lane gives to ldmatrix.
  CONVT3D_DEVICE void transposed_addresses(uint32_t (&rows)[Config::blocks][4]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block) {
      const int row = 64 * block + threadIdx.x / 32 % 4 * 16 + lane % 16;
      rows[block][0] = (position((*this)(row)) + lane / 16 * arguments.channel_pitch) * 16;
    }
  }
  /// Where a row's first output is staged, counted from the tile's first output.
  CONVT3D_DEVICE int staged(int row) const {
    const Unit unit = (*this)(row);
    return unit.sample * arguments.staged_sample + unit.at[0] * arguments.staged_slice +
           unit.at[1] * Config::Inner1::slots * arguments.staged_row +
           unit.at[2] * Config::Axis2::slots;
  }
};

}  // namespace convt3d
