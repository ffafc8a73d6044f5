// Forward pass of strided layers with few channels a group on warpgroup products of 16 bits
// (sm_90a): float16, bfloat16, and float32 as F16x3, that is split into two float16 parts.
//
// A warpgroup sweeps along H with 64 units of W and all slots along D of one unit. Each source
// row is multiplied with all taps along H at once, their columns side by side: a product is 64
// units deep in rows, and reads the source as producers laid it out, 16 bytes of eight channels a
// position, so that a shift along W is another address and two shifts are one product 16 deep.
//
//     columns    [slot along D][tap along H][slot along W, channel]
//     source row h adds tap k to target row  h * stride - padding + k * dilation
//
// A row's products are added to sums that wait in registers, times the row's and the channel's
// scale where operands are F16x3. After it the first `stride` rows of the target are complete and
// leave, from registers or as streams (rows/streams.cuh), and the others move up.
//
//     consumers   warpgroups, each with a ring of stages of its own
//     producers   warps of a warpgroup, one after the other: a stage is a source row of all
//                 channels at all slices along D, loaded value by value and transposed, scaled and
//                 split on the way
//
// F16x3: float16 has 11 bits, as TF32 has, and twice its rate. An operand is its high half and a low
// one (MathF16x3), and high x high, high x low and low x high are half the work of the same three in
// TF32. What float16 lacks is range. So each row of the source and each channel's weights are scaled
// by a power of two before they are split, their largest value to 2^14 or more; sums of a row are
// scaled back when they join the others. A product x * w then errs by at most 2^-22 of itself, 2^-50
// of the row's largest |x| times |w|, and 2^-40 of the channel's largest |w| times |x|.
//
// What a warpgroup does is a run of rows of units, columns (sample, unit along D, tile along W)
// one after the other. Shared memory: [rings][weights][barriers, scales][streams], see
// RowsShared.
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "rows/consumers.cuh"
#include "rows/producers.cuh"

namespace convt3d {

template <typename Config>
CONVT3D_DEVICE void run_rows(const RowsArguments<Config>& arguments) {
  using Shared = RowsShared<Config>;
  using Registers = RingRegisters<Config, Config::blocks == 1 ? 80 : 112>;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t shared_base = shared_address(shared);
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  const int worker = blockIdx.x / Config::n_tiles, workers = gridDim.x / Config::n_tiles;
  const int n_tile = blockIdx.x % Config::n_tiles;
  const int group = n_tile / Config::column_tiles, column_tile = n_tile % Config::column_tiles;
  const bool consumes = warp < Config::warps;
  const int warpgroup = consumes ? warp / 4 : (warp - Config::warps) % Config::consumers;
  const uint32_t barriers = shared_base + Shared::barriers + 16 * Config::ring * warpgroup;
  const uint32_t scales = shared_base + Shared::scales + 4 * Config::ring * warpgroup;
  const uint32_t stages = shared_base + Shared::warpgroup * warpgroup;
  const uint32_t weights_barrier = shared_base + Shared::weights_barrier;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::consumers; ++i)
      Ring<Config::ring>(shared_base + Shared::barriers + 16 * Config::ring * i)
          .init(lanes_of(1), lanes_of(4));
    mbarrier_init(weights_barrier, 1);
    mbarrier_init_fence();
  }
  // Positions behind a tile's last are read for units that do not exist.
  for (int at = 16 * threadIdx.x; at < Shared::weights; at += 16 * Config::threads)
    store_shared(shared_base + at, 0u, 0u, 0u, 0u);
  fence_async_proxy();
  __syncthreads();
  const RowRuns<Config> runs(arguments, worker * Config::consumers + warpgroup,
                             workers * Config::consumers);
  if (consumes) {
    if constexpr (Registers::multiplying > Registers::launched)
      register_increase<Registers::multiplying>();
    const uint32_t buffers = shared_base + Shared::staging +
                             uint32_t(2 * warpgroup * RowStreams<Config>::count * arguments.pitch);
    RowOutputs<Config> outputs(
        arguments, group, column_tile, warp % 4, lane,
        RowStreams<Config>(buffers, arguments.pitch, 1 + warpgroup, threadIdx.x % 128));
    mbarrier_wait(weights_barrier, 0);
    consume_rows<Config>(stages, barriers, scales, shared_base + Shared::weights, runs, outputs, group,
                         lane);
  } else {
    if constexpr (Registers::multiplying > Registers::launched)
      register_decrease<Registers::others>();
    if (warp == Config::warps && lane == 0) {
      grid_dependency_wait();
      mbarrier_expect(weights_barrier, Config::n_tile_bytes());
      bulk_copy(shared_base + Shared::weights,
                arguments.weights + int64_t(n_tile) * (Config::n_tile_bytes() / 4), Config::n_tile_bytes(),
                weights_barrier);
    }
    __syncwarp();
    produce_rows<Config>(arguments, stages, barriers, scales, runs, group,
                         (warp - Config::warps) / Config::consumers, lane);
  }
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::RowsConfig::threads, 1)
    convt3d_rows(const convt3d::RowsConfig::Storage* source,
                 const convt3d::uint32_t* weights,
                 const convt3d::RowsConfig::Storage* bias,
                 convt3d::RowsConfig::Storage* target, int source0, int source1,
                 int source2, int target0, int target1, int target2, int units0, int tiles2,
                 int first_block, int blocks, int count, int pitch CONVT3D_FUSION_PARAMETERS) {
  const convt3d::RowsArguments<convt3d::RowsConfig> arguments{
      source, weights, bias, target, {source0, source1, source2}, {target0, target1, target2},
      units0, tiles2, first_block, blocks, count, pitch CONVT3D_FUSION_ARGUMENT};
  convt3d::run_rows<convt3d::RowsConfig>(arguments);
}
