// The steps of a fusion on the sums of a kernel == stride product, in registers before any store.
#pragma once
#include "patch/lane_store.cuh"

namespace convt3d {

/// A cell of the tensor without slots; whether there is one.
struct PatchCell {
  int d, h, w;
  bool exists;
};

/// Cells of a warp that follow one another, from `first` on.
template <typename Config>
struct LinearCells {
  const PatchArguments<Config>& arguments;
  int first;

  CONVT3D_DEVICE PatchCell operator()(int in_warp) const {
    const int cell = first + in_warp;
    const int row = cell / arguments.size2, d = row / arguments.size1;
    return {d, row - d * arguments.size1, cell - row * arguments.size2,
            cell < arguments.cells()};
  }
};

/// Where the output of a cell and of a column of the group lies in the target.
template <typename Config>
CONVT3D_DEVICE int64_t patch_element(const PatchArguments<Config>& a, int group, int sample,
                                     const PatchCell& cell, int column) {
  constexpr int stride0 = Config::forward ? Config::stride0 : 1;
  constexpr int stride1 = Config::forward ? Config::stride1 : 1;
  constexpr int stride2 = Config::forward ? Config::stride2 : 1;
  constexpr int slots = stride0 * stride1 * stride2;
  constexpr int64_t all = tensor_channels(Config::groups * Config::target_channels);
  const int slot = Config::slots_first ? column / Config::target_channels % slots : column % slots;
  const int channel =
      Config::slots_first ? column % Config::target_channels : column / slots;
  const int d = cell.d * stride0 + slot / (stride2 * stride1);
  const int h = cell.h * stride1 + slot / stride2 % stride1;
  const int w = cell.w * stride2 + slot % stride2;
  const int64_t volume = int64_t(a.cells()) * slots;
  const int64_t position = (int64_t(d) * (a.size1 * stride1) + h) * (a.size2 * stride2) + w;
  const int64_t of_all = group * Config::target_channels + channel;
  return Config::target_channels_last ? (sample * volume + position) * all + of_all
                                      : (sample * all + of_all) * volume + position;
}

/// Runs the steps on a lane's sums, with the bias, of columns from `first_column` on.
template <typename Config, typename Cells>
CONVT3D_DEVICE void fuse_sums(const PatchArguments<Config>& a, int group, int sample,
                              int first_column, int lane, const Cells& cells,
                              typename PatchLaneStore<Config>::Sums& sum) {
  using Store = PatchLaneStore<Config>;
  constexpr int interleave = Config::interleave;
  PatchCell cell[Config::fragments_m][2] = {};
  if constexpr (Fusion::by_element) {
#pragma unroll
    for (int m = 0; m < Config::fragments_m; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        cell[m][half] = cells(linear_cell<Config>(m, half, lane / 4));
  }
  // What a channel's steps read serves all its sums at once.
#pragma unroll
  for (int n = 0; n < Config::fragments_n; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column =
          Config::exchanged
              ? first_column - (Store::lane_columns - 2) * (lane % 4) + 8 * n + i
              : first_column + Store::group_columns * (n / interleave) + n % interleave +
                    interleave * i;
      const int channel = !Config::forward      ? column
                          : Config::slots_first ? column % Config::target_channels
                                                : column / Config::slots;
#pragma unroll
      for (int m = 0; m < Config::fragments_m; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const PatchCell& c = cell[m][half];
          int64_t at = 0;
          if constexpr (Fusion::by_element) at = patch_element(a, group, sample, c, column);
          float& value = sum[m][n][2 * half + i];
          value = fused<Config>(a.fusion, value, group, channel, at,
                                c.exists && column < Config::columns);
        }
    }
}

}  // namespace convt3d
