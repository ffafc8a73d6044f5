// The runs of outputs that a work tile of phases/kernel.cu has in one column, for store warps: rows
// of W, or all rows of a slice where a tile is as wide as the target.
#pragma once
#include "phases/outputs.cuh"

namespace convt3d {

template <typename Config>
struct PhasesRuns : PhasesOutputs<Config> {
  using Base = PhasesOutputs<Config>;
  using Base::arguments;
  using Base::element;
  using Base::outputs;
  using Base::slots1;
  using Base::slots2;
  using Base::units;
  using typename Base::Outputs;
  using Base::Base;

  /// A run of outputs in the first channel and slot of axis 0: where it begins in the target and
  /// in a staged column, its length, and how many slots of axis 0 exist there.
  struct Run {
    int64_t start;
    int staged, length, slots;
  };
  CONVT3D_DEVICE Run run(const WorkTile& work, int number) const {
    const auto& target = arguments.target;
    const bool slices = arguments.whole_slices;
    const int line = slices ? number * arguments.tile[2] : number / slots1;
    const int slot1 = slices ? 0 : number % slots1;
    const int begin = line * arguments.tile[3];
    const Outputs o = outputs(work, begin);
    const int length =
        slices ? min(arguments.tile[2] * slots1, target.extent[1] - o.first[1]) * target.extent[2]
               : min(arguments.tile[3] * slots2, target.extent[2] - o.first[2]);
    return {element(work, o) + slot1 * target.stride1,
            units.staged(begin) + slot1 * arguments.staged_row, length,
            slot1 < o.fits[1] ? o.fits[0] : 0};
  }
};

}  // namespace convt3d
