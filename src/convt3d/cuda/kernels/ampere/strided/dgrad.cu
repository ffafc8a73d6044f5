// Gradient by input of strided layers that memory bounds, on mma.sync (sm_80 and later): each
// slice of the output gradient passes through shared memory once.
//
// A CTA computes tile1 x tile2 elements of `units0` neighbouring slices of the input gradient,
// for 8 * fragments_n channels of one group, and goes on to further tiles. It walks along the
// slices of the output gradient; each serves several taps of axis 0, and so several slices of the
// result, whose sums wait in registers (`lags` of them):
//
//     slices of gy:   ..  q    q+1   q+2   q+3  ..        stride 2, kernel 3
//                         |\     |    |\     |
//     slices of gx:      i-1  i  i    i  i+1  i+1
//
// It is an implicit matrix product: rows are elements along W and H (16 * fragments_m to a warp,
// a lane has neighbours along W), columns produced channels, depth (channel of gy, tap). Along W
// a lane loads one window of positions for all taps of both its elements.
//
// Shared memory: [stages][source box of a slice, weights it meets] [resident weights] [staging],
// see StridedShared.
//
// Pipeline: a stage is a channel chunk of a slice; stages - 1 are in flight, across tiles.
#include "ampere/strided/slice.cuh"
#include "device/tma.cuh"

namespace convt3d {

template <typename Config>
CONVT3D_DEVICE void strided_gradient(const StridedArguments<Config>& arguments) {
  static_assert(!Config::forward, "this kernel computes the gradient by input");
  using Shared = StridedShared<Config>;
  extern __shared__ __align__(128) unsigned char shared[];
  const StridedWork<Config> work(arguments, shared);
  const StridedFill<Config>& fill = work.fill;
  const auto& shape = fill.fill_box.shape;
  const StridedStore<Config> store(arguments, work.group, work.column_tile, work.warp, work.lane);

  // Packed weights are waited for, the source is not: it was there before they were packed.
  if constexpr (!Config::resident_weights) grid_dependency_wait();
  int fill_number = work.worker, fill_chunk = 0, fill_buffer = 0;
  SliceWalk<Config> fill_walk(arguments, work.worker);
  auto start = [&]() {
    if (fill_number < arguments.count) {
      fill.source(fill_walk.tile, fill_walk.position(), fill_chunk, fill_buffer);
      fill.slice_weights(fill_walk.residue(), fill_chunk, fill_buffer);
      if (++fill_buffer == Config::stages) fill_buffer = 0;
      if (++fill_chunk == Config::chunks) {
        fill_chunk = 0;
        fill_walk.advance();
        if (fill_walk.done()) {
          fill_number += work.workers;
          fill_walk = SliceWalk<Config>(arguments, fill_number);
        }
      }
    }
    async_commit();
  };
#pragma unroll 1
  for (int stage = 0; stage < Config::stages - 1; ++stage) start();
  if constexpr (Config::resident_weights) {
    grid_dependency_wait();
    fill.resident_weights();
    async_commit();
    async_wait<0>();
  }

  int buffer = 0;
#pragma unroll 1
  for (int number = work.worker; number < arguments.count; number += work.workers) {
    SliceWalk<Config> walk(arguments, number);
    StridedLags<Config> sums;
#pragma unroll
    for (int lag = 0; lag < Config::lags; ++lag) sums.lag[lag].clear();
#pragma unroll 1
    for (int unit = walk.first_unit; unit <= walk.last_unit + Config::lags - 1; ++unit) {
#pragma unroll 1
      while (!walk.done() && walk.unit() == unit) {
#pragma unroll 1
        for (int chunk = 0; chunk < Config::chunks; ++chunk) {
          async_wait<Config::stages - 2>();
          __syncthreads();
          start();
          const uint32_t stage = 4u * buffer * Shared::stage;
          const uint32_t weights = work.weights(chunk, stage);
          multiply_residue<Config>(walk.residue(), sums,
                                   SliceWindows<Config>{shape, work.rows, stage}, weights);
          if (++buffer == Config::stages) buffer = 0;
        }
        walk.advance();
      }
      // The oldest slice of the result has met all its taps.
      const int finished = unit - (Config::lags - 1);
      if (finished >= walk.first_unit) {
        StridedTile<Config> tile = walk.tile;
        tile.index[0] = finished;
        store(tile, work.pairs, sums.lag[Config::lags - 1]);
      }
#pragma unroll
      for (int lag = Config::lags - 1; lag > 0; --lag) sums.lag[lag] = sums.lag[lag - 1];
      sums.lag[0].clear();
    }
  }
  async_wait<0>();
  if constexpr (Config::bulk_stores) bulk_wait<0>();
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::StridedConfig::threads,
                                             convt3d::StridedConfig::resident)
    convt3d_ampere_strided_dgrad(const convt3d::StridedConfig::Storage* source,
                                 const convt3d::uint32_t* weights,
                                 const convt3d::StridedConfig::Storage* bias,
                                 convt3d::StridedConfig::Storage* target, int source0, int source1,
                                 int source2, int source_stride0, int source_stride1, int target0,
                                 int target1, int target2, int target_stride0, int target_stride1,
                                 int tile0, int tile1, int tile2, int tiles0, int tiles1, int tiles2,
                                 int line_rows, int line_fragments, int count, int staging_buffers CONVT3D_FUSION_PARAMETERS) {
  const convt3d::StridedArguments<convt3d::StridedConfig> arguments{
      {source, {source0, source1, source2}, source_stride0, source_stride1},
      {target, {target0, target1, target2}, target_stride0, target_stride1},
      weights,
      bias,
      {1, tile1, tile2},
      {tiles0, tiles1, tiles2},
      line_rows,
      line_fragments,
      count,
      staging_buffers,
      tile0 CONVT3D_FUSION_ARGUMENT};
  convt3d::strided_gradient<convt3d::StridedConfig>(arguments);
}
