// The runs of outputs that a work tile of phases/kernel.cu has in one column: rows of W, or all
// rows of a slice where a tile is as wide as the target.
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
  CONVT3D_DEVICE int runs() const {
    if (units.count == 0) return 0;
    const int last = units.first + units.count - 1;
    const int first_line = units.by_lines.quotient(units.first);
    const int last_line = units.by_lines.quotient(last);
    if (!arguments.whole_slices) return (last_line - first_line + 1) * slots1;
    return units.by_slices.quotient(last_line) - units.by_slices.quotient(first_line) + 1;
  }
  CONVT3D_DEVICE Run run(const WorkTile& work, int number) const {
    const auto& target = arguments.target;
    const int end = units.first + units.count;
    const int first_line = units.by_lines.quotient(units.first);
    int begin, slot1 = 0, lines = 1, length;
    if (arguments.whole_slices) {
      const int slice = units.by_slices.quotient(first_line) + number;
      const int line = max(first_line, slice * arguments.tile[2]);
      lines = min(units.by_lines.quotient(end), (slice + 1) * arguments.tile[2]) - line;
      begin = line * arguments.tile[3];
    } else {
      const int line = first_line + number / slots1;
      slot1 = number % slots1;
      begin = max(units.first, line * arguments.tile[3]);
      length = (min(end, (line + 1) * arguments.tile[3]) - begin) * slots2;
    }
    const Outputs o = outputs(work, begin - units.first);
    if (arguments.whole_slices)
      length = min(lines * slots1, target.extent[1] - o.first[1]) * target.extent[2];
    else
      length = min(length, target.extent[2] - o.first[2]);
    return {element(work, o) + slot1 * target.stride1,
            units.staged(begin - units.first) + slot1 * arguments.staged_row, length,
            slot1 < o.fits[1] ? o.fits[0] : 0};
  }
};

}  // namespace convt3d
