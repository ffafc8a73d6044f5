// What a persistent CTA takes at a time where M rows are units, one period of phases each: the
// kernels of phases/ and ndhwc/.
#pragma once
#include "geometry/walked_axis.cuh"
#include "load/box.cuh"

namespace convt3d {

/// A tile of units, and of it a group, an N tile and a phase, whose taps are walked. An axis that is
/// not phased has one phase and one walked tap.
struct WorkTile {
  int sample, first[3];  // the first unit
  int group, column_tile, phase[3];
  WalkedTaps taps[3];

  CONVT3D_DEVICE int taps_of_chunk() const {
    return taps[0].count * taps[1].count * taps[2].count;
  }
  template <typename Config>
  CONVT3D_DEVICE void set_phase(int phase0, int phase1, int phase2) {
    phase[0] = phase0, phase[1] = phase1, phase[2] = phase2;
    taps[0] = WalkedTaps::of<(Config::phased > 0), typename Config::Axis0>(phase0);
    taps[1] = WalkedTaps::of<(Config::phased > 1), typename Config::Axis1>(phase1);
    taps[2] = WalkedTaps::of<(Config::phased > 2), typename Config::Axis2>(phase2);
  }
};

/// The units of a tile by their numbers, in the order samples, D, H, W; or, where samples are
/// inside, D, H, W, samples. `arguments.tile`: samples, then the axes.
template <typename Arguments, bool SamplesInside = false>
struct TileUnits {
  struct Unit {
    int sample, at[3];
  };
  const Arguments& arguments;
  Divider by_lines, by_slices, by_samples;

  CONVT3D_DEVICE explicit TileUnits(const Arguments& arguments_)
      : arguments(arguments_),
        by_lines(arguments_.tile[SamplesInside ? 0 : 3]),
        by_slices(arguments_.tile[SamplesInside ? 3 : 2]),
        by_samples(arguments_.tile[SamplesInside ? 2 : 1]) {}

  CONVT3D_DEVICE Unit numbered(int index) const {
    const int line = by_lines.quotient(index);
    const int slice = by_slices.quotient(line);
    const int outer = by_samples.quotient(slice);
    if constexpr (SamplesInside)
      return {index - line * arguments.tile[0],
              {outer, slice - outer * arguments.tile[2], line - slice * arguments.tile[3]}};
    else
      return {outer, {slice - outer * arguments.tile[1], line - slice * arguments.tile[2],
                      index - line * arguments.tile[3]}};
  }
};

}  // namespace convt3d
