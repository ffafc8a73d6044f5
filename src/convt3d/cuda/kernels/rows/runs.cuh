// A launch's arguments, and the runs of rows that a warpgroup computes.
#pragma once
#include "rows/config.cuh"

namespace convt3d {

template <typename Config>
struct RowsArguments {
  const typename Config::Storage* source;
  const uint32_t* weights;
  const typename Config::Storage* bias;
  typename Config::Storage* target;
  int source_extent[3], target_extent[3];
  int units0, tiles2;           // of a sample, along D and W
  int first_block, blocks;      // rows of units of a column that are stored
  int count;                    // of all columns
  int pitch;                    // bytes of a stream's buffer
  CONVT3D_FUSION_MEMBER
};

/// Runs of rows of units, one for each column that a warpgroup's share meets.
template <typename Config>
struct RowRuns {
  const RowsArguments<Config>& arguments;
  int next, end;
  int sample, unit0, first2;    // first2: the first unit along W
  int begin, store, last;       // source rows [begin, last); those from `store` on complete rows

  CONVT3D_DEVICE RowRuns(const RowsArguments<Config>& arguments_, int worker, int workers)
      : arguments(arguments_) {
    next = int(int64_t(arguments.count) * worker / workers);
    end = int(int64_t(arguments.count) * (worker + 1) / workers);
  }
  CONVT3D_DEVICE bool advance() {
    if (next >= end) return false;
    const auto& a = arguments;
    const int column = next / a.blocks, block = next - column * a.blocks;
    const int stop = min(a.blocks, block + end - next);
    const int row = column / a.tiles2;
    first2 = (column - row * a.tiles2) * Config::units;
    sample = row / a.units0;
    unit0 = row - sample * a.units0;
    store = a.first_block + block;
    begin = max(store - Config::back, 0);
    last = a.first_block + stop;
    next += stop - block;
    return true;
  }
  /// Source rows that exist.
  CONVT3D_DEVICE int rows_end() const { return min(last, arguments.source_extent[1]); }
};

}  // namespace convt3d
