// Forward pass of strided layers that memory bounds, on mma.sync (sm_80 and later): every phase
// of a tile in one CTA.
//
// A unit is one period of phases: stride0 x stride1 x stride2 outputs. A CTA computes tile0 x
// tile1 x tile2 units of 8 * fragments_n produced channels of one group, and goes on to further
// tiles of the same group and channels. It is an implicit matrix product:
//
//     rows     = units (16 * fragments_m to a warp; a lane has neighbours along W)
//     columns  = produced channels (every warp has all of the CTA's)
//     depth    = (source channel, tap) (eight words a step: 8 TF32 or 16 half channels)
//
// All slots of a unit stay in registers, and every tap of every slot is written out at compile
// time: a fragment of the source box is loaded once for a shift along D and H (as a window along
// W) and serves every tap of every slot there; a weight fragment serves all fragments of the
// warp.
//
//     units of one fragment, along W:   g = 0        1        ...     7
//                                      [u0 u1]    [u2 u3]           [u14 u15]
//     outputs of a lane, stride 2:    o0 o1 o2 o3   ...            one run of 2 * stride
//
// Shared memory: [stages][source box, weights of the chunk] [resident weights] [staging], see
// StridedShared. Staging holds outputs as they lie in memory (ampere/strided/store.cuh).
//
// Pipeline: a stage is a channel chunk of a tile; stages - 1 are in flight, across tiles, so the
// copies of the next tile run under the products and stores of this one.
#include "ampere/strided/product.cuh"
#include "device/tma.cuh"

namespace convt3d {

template <typename Config>
CONVT3D_DEVICE void strided(const StridedArguments<Config>& arguments) {
  using Box = StridedBox<Config>;
  using Shared = StridedShared<Config>;
  extern __shared__ __align__(128) unsigned char shared[];
  const StridedWork<Config> work(arguments, shared);
  const StridedFill<Config>& fill = work.fill;
  const auto& shape = fill.fill_box.shape;
  const StridedStore<Config> store(arguments, work.group, work.column_tile, work.warp, work.lane);

  // Packed weights are waited for, the source is not: it was there before they were packed.
  if constexpr (!Config::resident_weights) grid_dependency_wait();
  int fill_number = work.worker, fill_chunk = 0, fill_buffer = 0;
  StridedTile<Config> fill_tile(arguments, work.worker);
  StridedTile<Config> tile = fill_tile;
  const StridedTile<Config> step(arguments, work.workers);
  auto start = [&]() {
    if (fill_number < arguments.count) {
      fill.source(fill_tile,
                  fill_tile.index[0] * arguments.tile[0] * Config::Axis0::unit_source +
                      Config::origin0,
                  fill_chunk, fill_buffer);
      fill.weights(fill_chunk, fill_buffer);
      if (++fill_chunk == Config::chunks) {
        fill_chunk = 0;
        fill_number += work.workers;
        fill_tile.advance(arguments, step);
      }
      if (++fill_buffer == Config::stages) fill_buffer = 0;
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
  } else {
    async_wait<Config::stages - 2>();
  }
  __syncthreads();

  int buffer = 0;
#pragma unroll 1
  for (int number = work.worker; number < arguments.count; number += work.workers) {
    StridedSums<Config> sum;
    sum.clear();
#pragma unroll 1
    for (int chunk = 0; chunk < Config::chunks; ++chunk) {
      // All have read the stage that is filled next, and see each other's copies of this one.
      if (chunk > 0 || !store.meets()) __syncthreads();
      start();
      const uint32_t stage = 4u * buffer * Shared::stage;
      const uint32_t weights = work.weights(chunk, stage);
#pragma unroll 1
      for (int step = 0; step < Config::depth; ++step) {
        const uint32_t box = stage + step * Box::step_bytes;
        const uint32_t step_weights = weights + 4u * step * Config::step_weight_words;
        multiply_step<Config>(sum, BoxWindows<Config>{shape, work.rows, box}, step_weights);
      }
      if (++buffer == Config::stages) buffer = 0;
      // Before the stores: bulk copies count as outstanding, too, where this waits.
      async_wait<Config::stages - 2>();
    }
    store(tile, work.pairs, sum);
    tile.advance(arguments, step);
  }
  async_wait<0>();
  if constexpr (Config::bulk_stores) bulk_wait<0>();
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::StridedConfig::threads,
                                             convt3d::StridedConfig::resident)
    convt3d_ampere_strided(const convt3d::StridedConfig::Storage* source, const convt3d::uint32_t* weights,
                           const convt3d::StridedConfig::Storage* bias,
                           convt3d::StridedConfig::Storage* target, int source0, int source1, int source2,
                           int source_stride0, int source_stride1, int target0, int target1, int target2,
                           int target_stride0, int target_stride1, int tile0, int tile1, int tile2,
                           int tiles0, int tiles1, int tiles2, int line_rows, int line_fragments,
                           int count, int staging_buffers CONVT3D_FUSION_PARAMETERS) {
  const convt3d::StridedArguments<convt3d::StridedConfig> arguments{
      {source, {source0, source1, source2}, source_stride0, source_stride1},
      {target, {target0, target1, target2}, target_stride0, target_stride1},
      weights,
      bias,
      {tile0, tile1, tile2},
      {tiles0, tiles1, tiles2},
      line_rows,
      line_fragments,
      count,
      staging_buffers,
      0 CONVT3D_FUSION_ARGUMENT};
  convt3d::strided<convt3d::StridedConfig>(arguments);
}
