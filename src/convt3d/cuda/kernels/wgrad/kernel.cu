// Gradient by weight on wgmma (sm_90a), TF32, 16-bit and IEEE-grade: the reduction over positions
// is split over CTAs, and a second pass adds the shares in order.
//
//     gw[ci, co, k] = sum over n, i of x[n, ci, i] * gy[n, co, i*s - p + k*d]
//
// rows    = (tap, gradient channel)   fragments in registers, read at any shift along W
// columns = (tap along axis 1, x channel)   x in shared memory by descriptor, shifted by whole rows
// depth   = positions along W, 16 bytes of each row twice a product
//
// A CTA owns some m64 blocks of rows of one tile of channels, and a share of the steps. It sweeps
// along axis 0 down columns of tile1 rows by tile2 positions; a step is tile0 slices:
//
//     x ring          `stages` slabs   [slice][16 bytes of W][row][channel][position]
//     gradient ring   `planes` planes  [channel][row][position]; a step reads `span` of them, the
//                     first step of a column loads all, later ones only what is new
//     barriers        full (producers), empty (consumers), one pair a stage; one where consumers meet
//
// Pipeline: a producer warpgroup brings slabs by tensor maps (one thread), bulk copies or
// cp.async (and rounds x to TF32 in place, since products would truncate it); two or three
// consumer warpgroups share the slabs and own `blocks` blocks each, with row fragments in a ring,
// so that products overlap the loads of the next. By tensor map the gradient's planes are
// [row][channel][position]. Where no sum is split, CTAs transpose theirs in shared memory and
// store the weight themselves: there is no second pass. CTAs of a cluster, which share the steps
// of the same sums, add them up among themselves. Rows of odd volumes come whole, a bulk copy for
// all of a channel and plane, as they lie: consumers mask what lies beyond a row's ends.
#undef CONVT3D_WGMMA_USES
#define CONVT3D_WGMMA_USES(n) ((n) == CONVT3D_COLUMN_TAPS * CONVT3D_CHANNEL_TILE_N)
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "wgrad/mainloop.cuh"
#include "wgrad/phases.cuh"
#include "wgrad/producers.cuh"
#include "wgrad/reduce.cuh"
#include "wgrad/warp_mainloop.cuh"

namespace convt3d {

template <typename Config, int blocks>
CONVT3D_DEVICE void multiply_steps(const WgradLayout<Config>& l, int consumer) {
  if constexpr (Config::warp_products)
    consume_warps<Config, blocks>(l, consumer);
  else
    consume<Config, blocks>(l, consumer);
}

template <typename Config>
CONVT3D_DEVICE void run_wgrad(const WgradArguments<Config>& a,
                              const WgradMaps& maps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const WgradLayout<Config> l(a, shared_address(shared));
  if (threadIdx.x == 0) {
    for (int s = 0; s < Config::stages; ++s) {
      mbarrier_init(l.full(s), Config::full_arrivals);
      mbarrier_init(l.empty(s), Config::empty_arrivals);
      mbarrier_init(l.landed(s), Config::producers);
    }
    if constexpr (Config::direct_store)
      mbarrier_init(l.met(), lanes_of(4 * Config::consumers));
    mbarrier_init_fence();
  }
  if constexpr (Config::volume) VolumeFill<WgradLayout<Config>>::clear(l);
  __syncthreads();
  grid_dependency_launch();
  // Warp-uniform, as ptxas can see: else it would serialise the products.
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (role == 0) {
    register_decrease<Config::producer_registers>();
    if constexpr (Config::maps_only) {
      if (threadIdx.x == 0) produce_boxes(l, maps);
    } else if constexpr (Config::joined) {
      produce_joined(l, maps);
    } else {
      produce(l, maps);
    }
  } else {
    register_increase<Config::consumer_registers>();
    if constexpr (Config::phase_rows)
      consume_phases(l);
    else if (Config::skips && role == 1)  // each skips other products
      multiply_steps<Config, Config::blocks>(l, 0);
    else if (Config::skips)
      multiply_steps<Config, Config::blocks>(l, 1);
    else if ((Config::row_tiles > 1 && !l.tile.last) || Config::last_blocks == Config::cta_blocks)
      multiply_steps<Config, Config::blocks>(l, role - 1);
    else if (role == 1)
      multiply_steps<Config, Config::last_of(0)>(l, 0);
    else
      multiply_steps<Config, Config::last_of(1)>(l, 1);
    if constexpr (Config::cluster > 1) {
      cluster_sync();
      add_cluster(l, threadIdx.x - 128);
    }
  }
  if constexpr (Config::cluster > 1) cluster_finish(role > 0);
}

}  // namespace convt3d

extern "C" __global__ void
#if CONVT3D_CLUSTER > 1
__cluster_dims__(CONVT3D_CLUSTER, 1, 1)
#endif
__launch_bounds__(convt3d::WgradConfig::threads, 1)
    convt3d_wgrad(
        const convt3d::WgradConfig::Storage* source,
        const convt3d::WgradConfig::Storage* gradient, float* partial,
        convt3d::WgradConfig::Storage* weight,
#if CONVT3D_SUM_BIAS
        float* sums,
#endif
#if CONVT3D_SOURCE_MAP
        const __grid_constant__ convt3d::TensorMap source_map,
#endif
#if CONVT3D_TARGET_FILL == 2 || CONVT3D_TARGET_FILL == 3 || CONVT3D_TARGET_FILL == 7 || \
    CONVT3D_TARGET_FILL == 8
        const __grid_constant__ convt3d::TensorMap target_map,
#endif
        int source0, int source1, int source2, int source_stride0, int source_stride1, int gradient0,
        int gradient1, int gradient2, int gradient_stride0, int gradient_stride1, int tile0,
        int tile1, int tile2, int tiles1, int tiles2, int steps0, int first1, int planes,
        int row_pitch, int channel_pitch, int samples, int splits_full, int splits_last,
        convt3d::int64_t stride_in, convt3d::int64_t stride_out, convt3d::int64_t stride0,
        convt3d::int64_t stride1, convt3d::int64_t stride2) {
  const convt3d::WgradArguments<convt3d::WgradConfig> arguments{
      {source, {source0, source1, source2}, source_stride0, source_stride1},
      {gradient, {gradient0, gradient1, gradient2}, gradient_stride0, gradient_stride1},
      partial,
      tile0,
      tile1,
      tile2,
      tiles1,
      tiles2,
      steps0,
      first1,
      planes,
      row_pitch,
      channel_pitch,
      samples,
      splits_full,
      splits_last,
      {weight, stride_in, stride_out, stride0, stride1, stride2},
#if CONVT3D_SUM_BIAS
      sums
#else
      nullptr
#endif
  };
  convt3d::WgradMaps maps{nullptr, nullptr};
#if CONVT3D_SOURCE_MAP
  maps.source = &source_map;
#endif
#if CONVT3D_TARGET_FILL == 2 || CONVT3D_TARGET_FILL == 3 || CONVT3D_TARGET_FILL == 7 || \
    CONVT3D_TARGET_FILL == 8
  maps.target = &target_map;
#endif
  convt3d::run_wgrad(arguments, maps);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    convt3d_reduce(const float* partial, convt3d::WgradConfig::Storage* weight,
#if CONVT3D_SUM_BIAS
                   const float* sums, convt3d::WgradConfig::Storage* bias,
#endif
                   int share_bits, int splits_full, int splits_last, convt3d::int64_t stride_in,
                   convt3d::int64_t stride_out, convt3d::int64_t stride0,
                   convt3d::int64_t stride1, convt3d::int64_t stride2) {
  using Config = convt3d::WgradConfig;
#if CONVT3D_SUM_BIAS
  // The last blocks' warps take a channel each.
  const int blocks =
      Config::direct_store ? 0 : Config::tiles * (((Config::items - 1) >> (8 - share_bits)) + 1);
  if (int(blockIdx.x) >= blocks) {
    convt3d::reduce_bias<Config>(sums, bias, (int(blockIdx.x) - blocks) * 8 + threadIdx.x / 32,
                                 splits_full, splits_last);
    return;
  }
#endif
  convt3d::reduce<Config>(partial, {weight, stride_in, stride_out, stride0, stride1, stride2},
                          share_bits, splits_full, splits_last);
}
