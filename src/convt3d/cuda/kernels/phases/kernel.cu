// Forward pass of layers of any stride on Hopper's warpgroup products (sm_90a), contiguous
// source; the gradient by input of strided layers runs in the same kernel with the mainloop of
// strided_dgrad/mainloop.cuh.
//
// A unit is one period of phases, stride0 x stride1 x stride2 outputs, and one row of M. Its
// outputs are its slots: the phases of axes that are unrolled. Of a phased axis a work tile has
// one phase. A persistent CTA goes from work tile to work tile: a tile of units (samples x D x H
// x W, in that order), some columns, and one phase of the phased axes. It is an implicit matrix
// product:
//
//     M = units (64 * blocks to a warpgroup), lanes' fragments loaded from the A stage
//     N = produced channels, from shared memory by descriptor
//     K = (source channel, tap), eight words of channels a step
//
//       source box, 8 words of channels            sums, in registers
//       .-----------------------.          [slot0][slot1][slot2][block][columns]
//       | o o o o o o o o       |  taps of
//       |   units, at any shift | ---------->   outputs  o = unit * stride + slot
//       '-----------------------'  all slots
//
// One fragment of units (a shift of the box) serves every slot with a tap there; each slot has
// sums of its own, so products of different slots do not wait for each other.
//
// Shared memory: barriers | weights, one (chunk, walked taps) a stage, or all of them | A stages,
// each one source box: a chunk of channels (and with `tap_boxes` one walked tap of D),
// [sample][slice] and then [line][channel] or [channel][line] of rows along W | staging of the
// epilogue.
//
// Pipeline: two rings, A stages and weight stages, with full and empty barriers, which are the
// only synchronisation between roles. The first thread of the last warpgroup issues TMA for the
// boxes, which zero-fills what lies outside and rounds to TF32 (not where products are
// IEEE-grade: phases/split.cuh), and bulk copies for the weights. The other warpgroups multiply
// and run the epilogue: they store, or they stage for the store warps of the last warpgroup
// (phases/store_warps.cuh).
#undef CONVT3D_WGMMA_USES
// Gradients by input have the columns of several taps in one product.
#if CONVT3D_FORWARD
#define CONVT3D_WGMMA_USES(n) ((n) == CONVT3D_COLUMN_TILE)
#else
#define CONVT3D_WGMMA_USES(n) ((n) % CONVT3D_COLUMN_TILE == 0)
#endif
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "phases/products.cuh"
#include "phases/split.cuh"
#include "phases/store_warps.cuh"
#include "phases/transposed.cuh"
#include "phases/warp_store.cuh"
#if !CONVT3D_FORWARD
#include "strided_dgrad/mainloop.cuh"
#else

namespace convt3d {

using PhasesKernel = PhasesConfig;
template <typename Config>
using StoreOf = typename Select<
    (Config::store_warps > 0), PhasesStagedStore<Config>, PhasesWarpStore<Config>>::Type;

template <typename Config>
CONVT3D_DEVICE void produce(const PhasesArguments<typename Config::Storage>& a,
                            const TensorMap* map, uint32_t shared, AStageRing<Config> a_stages,
                            WeightRing<Config> stages) {
  using Walk = PhasesProductWalk<Config>;
  if constexpr (Config::transposed) {
    const int transposer = int(threadIdx.x) - Config::threads + Config::fillers;
    if (transposer >= 0) return PhasesTransposer<Config>(a, shared, transposer).fill(a_stages);
  }
  if (threadIdx.x != 128 * Config::consumers) return;
  Walk walk(a);
  WorkTile work;
  grid_dependency_wait();  // for the packed weights
  bool stored = false;
  while (walk.next(a, work)) {
    const unsigned char* weights =
        a.weights + (work.group * Config::column_tiles + work.column_tile) * Config::n_tile_bytes;
    const auto stage_of = [&](int chunk, int tap0, int tap1) {
      const int walked = (chunk * Config::walked0 + work.taps[0].first_position + tap0) *
                             Config::walked1 + work.taps[1].first_position + tap1;
      return weights + int64_t(walked) * Config::stage_bytes;
    };
    if (Config::resident_weights && !stored) {
      stored = true;
      uint32_t to = shared + Config::weight_offset;
      mbarrier_expect(stages.full(), Config::chunks * work.taps_of_chunk() *
                                         Config::stage_bytes);
      for (int chunk = 0; chunk < Config::chunks; ++chunk)
        for (int tap0 = 0; tap0 < work.taps[0].count; ++tap0)
          for (int tap1 = 0; tap1 < work.taps[1].count; ++tap1, to += Config::stage_bytes)
            bulk_copy(to, stage_of(chunk, tap0, tap1), Config::stage_bytes, stages.full());
    }
    if (work.taps_of_chunk() == 0) continue;
    const int h = work.first[1] + work.taps[1].origin;
    const int w = walk.column(work);
    const int d = work.first[0] + work.taps[0].origin;
    for (int chunk = 0; chunk < Config::chunks; ++chunk)
      for (int tap0 = 0; tap0 < work.taps[0].count; ++tap0) {
        if (!Config::transposed && (Config::tap_boxes || tap0 == 0)) {
          a_stages.wait_empty();
          const uint32_t to = shared + Config::box_offset + a_stages.stage * a.box_bytes;
          const int channel = work.group * Config::source_channels + chunk * Config::chunk_channels;
          const int slice =
              d + (Config::tap_boxes ? work.taps[0].offset + tap0 * work.taps[0].step : 0);
          mbarrier_expect(a_stages.full(), a.box_bytes);
          if (a.channel_dimension == 1)
            tma_load_5d(to, *map, w, channel, h, slice, work.sample, a_stages.full());
          else
            tma_load_5d(to, *map, w, h, channel, slice, work.sample, a_stages.full());
          a_stages.advance();
        }
        if constexpr (!Config::resident_weights) {
          for (int tap1 = 0; tap1 < work.taps[1].count; ++tap1) {
            stages.wait_empty();
            mbarrier_expect(stages.full(), Config::stage_bytes);
            bulk_copy(shared + Config::weight_offset + stages.stage * Config::stage_bytes,
                      stage_of(chunk, tap0, tap1), Config::stage_bytes, stages.full());
            stages.advance();
          }
        }
      }
  }
}

template <typename Config>
CONVT3D_DEVICE void consume(const PhasesArguments<typename Config::Storage>& a, uint32_t shared,
                            AStageRing<Config> a_stages, WeightRing<Config> stages, int warpgroup) {
  using Walk = PhasesProductWalk<Config>;
  constexpr int element = sizeof(typename Config::Storage);
  const PhasesUnits<Config> units(a, warpgroup);
  StoreOf<Config> store(a, units, shared, warpgroup);
  uint32_t rows[Config::blocks][4];
  if constexpr (Config::transposed)
    units.transposed_addresses(rows);
  else
    units.addresses(rows);
  PhasesHeld<Config> held{threadIdx.x % 32 == 0};
  bool first = true;
  int passed = 0;
  const uint32_t ping_pong = shared + Config::ping_pong_barrier;
  if (Config::ping_pong > 0 && warpgroup > 0) mbarrier_wait(ping_pong, 0);
  Walk walk(a);
  WorkTile work;
  while (walk.next(a, work)) {
    PhasesSums<Config> sum;
    uint32_t fragment[Config::fragments][Config::blocks][4];
#pragma unroll
    for (int i = 0; i < int(sizeof(sum) / sizeof(float)); ++i) (&sum[0][0][0][0][0])[i] = 0.f;
    if (Config::resident_weights && first) stages.wait_full();
    first = false;
    // Phases without taps hold nothing but the bias. Their loops would run no round at all, which
    // must not look like a way around the products.
    const int chunks = work.taps_of_chunk() ? Config::chunks : 0;
    const int lead = Config::transposed
                         ? 0
                         : work.first[2] + Config::Axis2::min_shift - Walk::column(work);
    StageWeights<Config> weights(shared);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if constexpr (!Config::tap_boxes) a_stages.wait_full();
      int tap0 = 0;
#pragma unroll 1
      do {
        if constexpr (Config::tap_boxes) a_stages.wait_full();
        const uint32_t box =
            shared + Config::box_offset + a_stages.stage * a.box_bytes + lead * element;
        int tap1 = 0;
#pragma unroll 1
        do {
          const uint32_t at = weights.enter(stages);
          const int line = work.taps[1].offset + tap1 * work.taps[1].step;
          const int slice = Config::tap_boxes ? 0 : work.taps[0].offset + tap0 * work.taps[0].step;
          const int offset = slice * a.slice_pitch + line * a.line_pitch;
          const PhasesSource<Config> source{a, rows, box + offset * Config::position_bytes};
          const uint64_t columns = matrix_descriptor(at, Config::column_tile * 16, 128);
          if constexpr (Config::parts > 1) {
            multiply_split<Config, 0>(sum, source, columns);
          } else {
            multiply<Config, 0>(sum, fragment, source, columns,
                                [&]() { held.release(a_stages, stages); });
          }
          weights.leave(stages, held);
          if constexpr (Config::parts > 1) held.release(a_stages, stages);
        } while (++tap1 < work.taps[1].count);
        if constexpr (Config::tap_boxes) {
          held.a_stage = a_stages.stage;
          a_stages.advance();
        }
      } while (++tap0 < work.taps[0].count);
      if constexpr (!Config::tap_boxes) {
        held.a_stage = a_stages.stage;
        a_stages.advance();
      }
      if constexpr (Config::parts > 1) held.release(a_stages, stages);
      if constexpr (Config::ping_pong > 0)
        mbarrier_arrive_if(ping_pong, ++passed == Config::ping_pong && threadIdx.x == 0);
    }
    wgmma_wait<0>();
    held.release(a_stages, stages);
    operand_fence<typename Config::Inner0, typename Config::Inner1, typename Config::Axis2>(sum);
    store(work, sum);
  }
  if (Config::ping_pong > 0 && passed < Config::ping_pong && threadIdx.x == 0) mbarrier_arrive(ping_pong);
}

}  // namespace convt3d
#endif

namespace convt3d {

template <typename Config>
CONVT3D_DEVICE void run_phases(const PhasesArguments<typename Config::Storage>& arguments,
                               const TensorMap* map) {
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t shared_base = shared_address(shared);
  const AStageRing<Config> a_stages(shared_base);
  const WeightRing<Config> stages(shared_base + 16 * Config::source_stages);
  if (threadIdx.x == 0) {
    a_stages.init(Config::fillers, Config::a_stage_readers);
    stages.init(1, 4 * Config::consumers);
    if constexpr (Config::ping_pong > 0) mbarrier_init(shared_base + Config::ping_pong_barrier, 1);
    if constexpr (Config::store_warps > 0)
      output_ring<Config>(shared_base).init(lanes_of(4 * Config::consumers), lanes_of(1));
    mbarrier_init_fence();
  }
  if constexpr (Config::zero_bytes > 0) {
    if (threadIdx.x < Config::zero_bytes / 4)
      store_shared(shared_base + Config::zero_offset + 4 * threadIdx.x, 0u);
  }
  __syncthreads();
  // Uniform in a warp, and known to be: roles must not look divergent around warpgroup products.
  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (warpgroup >= Config::consumers) {
    if constexpr (Config::gives_registers) register_decrease<Config::producer_registers>();
    if constexpr (Config::store_warps > 0) {
      const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0) - 4 * Config::consumers;
      if (warp > 0) {
        const PhasesUnits<Config> tile(arguments);
        const PhasesStoreWarp<Config> store_warp(arguments, tile, shared_base);
        if (warp <= min(Config::store_warps, arguments.buffers))
          store_warp.send(warp - 1);
        else if (PhasesStoreWarp<Config>::filler && warp == Config::store_warps + 1)
          store_warp.fill();
        return;
      }
    }
    produce<Config>(arguments, map, shared_base, a_stages, stages);
  } else {
    if constexpr (Config::gives_registers) register_increase<Config::consumer_registers>();
    consume<Config>(arguments, shared_base, a_stages, stages, warpgroup);
  }
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::PhasesConfig::threads, 1)
    convt3d_phases(const unsigned char* weights,
                   const convt3d::PhasesConfig::Storage* bias,
                   convt3d::PhasesConfig::Storage* target,
#if !CONVT3D_BY_MAP
                   const convt3d::PhasesConfig::Storage* source, int source0,
                   int source1, int source2,
#else
                   const __grid_constant__ convt3d::TensorMap map,
#endif
                   int target0, int target1,
                   int target2, int target_stride0, int target_stride1, int batch,
                   int tile_samples, int tile0, int tile1, int tile2, int tiles_samples,
                   int tiles0, int tiles1, int tiles2, int sample_pitch, int slice_pitch,
                   int line_pitch, int channel_pitch, int channel_dimension, int box_bytes,
                   int warpgroup_units, int staged_row, int staged_slice, int staged_sample,
                   int staged_column, int whole_slices, int runs,
                   int staging_offset, int rotation, int wide,
                   int source_slices, int source_lines, int segment,
                   int buffers CONVT3D_FUSION_PARAMETERS) {
  const convt3d::PhasesArguments<convt3d::PhasesConfig::Storage> arguments{
      weights,
      bias,
      {target, {target0, target1, target2}, target_stride0, target_stride1},
      batch,
      {tile_samples, tile0, tile1, tile2},
      {tiles_samples, tiles0, tiles1, tiles2},
      sample_pitch,
      slice_pitch,
      line_pitch,
      channel_pitch,
      channel_dimension,
      box_bytes,
      warpgroup_units,
      staged_row,
      staged_slice,
      staged_sample,
      staged_column,
      whole_slices != 0,
      runs,
      convt3d::uint32_t(staging_offset),
      rotation,
      wide != 0,
      {source_slices, source_lines},
      segment,
      buffers,
#if !CONVT3D_BY_MAP
      {source, {source0, source1, source2}, source1 * source2, source2} CONVT3D_FUSION_ARGUMENT};
  const convt3d::TensorMap* by_map = nullptr;
#else
      {} CONVT3D_FUSION_ARGUMENT};
  const convt3d::TensorMap* by_map = &map;
#endif
  convt3d::run_phases<convt3d::PhasesKernel>(arguments, by_map);
}
