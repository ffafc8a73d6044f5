// Gradient by weight of channels_last tensors on wgmma (sm_90a), 16-bit types and TF32: both
// operands come by TMA as they lie in memory. The reduction over positions is split over CTAs,
// and a second pass adds the shares in order.
//
//     gw[ci, co, k] = sum over n, i of x[n, i, ci] * gy[n, i*s - p + k*d, co]
//
// Positions i are K. A CTA has one work tile: a group, some channels of x, some atoms of the
// gradient (32 or 64 channels co of one tap k), and a share of the K steps. A K step is a box of
// samples x D x H x W positions of x; each of its rows is a row of K of both operands:
//
//          stage                     x                     gradient, an atom for each tap
//                              .----------.           .----------..----------..---
//      rows: positions of      | 64 ci    | i = 0     | 64 co of || 64 co of || ...
//      the box, W fastest,     | (128 B)  |   1       | tap 0    || tap 1    ||
//      under the swizzle       |          |  ...      |          ||          ||
//                              '----------'           '----------''----------''---
//                              K x M (or K x N)        K x N (or K x M): columns (tap, co)
//
// That is the MN-major layout of wgmma (device/wgmma_mn_major.cuh), which takes 16-bit types so:
// nothing is transposed, and no operand passes through registers; TF32 needs both
// (wgrad_ndhwc/transposed.cuh). The gradient's box of a tap begins at i*s - p + k*d and takes
// every s-th element (TMA's element strides); what lies outside is zero, which is the padding.
// `taps_on_m` says which operand is M: wide products (N up to 256) read least shared memory.
//
// Taps along H may share a box that has some lines more (`shares`): their atoms overlap, and
// begin some lines apart, which the descriptors say. So three taps cost L2 little more than one.
//
// Positions that are none: rows behind a step's box (it may have fewer positions than products
// take) are zeros in both operands from the start, and no copy comes there. Rows of a box outside
// of x are zeros in x, but the gradient may be anything there, and 0 * inf would be NaN: a warp
// beside the producer clears them, in steps whose box reaches out of x alone. As in any implicit
// GEMM, x meets zeros where a tap meets padding: inf in x is NaN there.
//
// Channels behind a group's last one, of its last atom or tile, are zeros or the next group's,
// and boxes without any are not loaded: M and N alone have them, and no sum of theirs is stored.
//
// Shared memory: stages [x atoms | gradient atoms | x transposed, of TF32], then barriers.
//
// Pipeline: a ring of stages. In the last warpgroup one warp issues a step's boxes, a lane for
// each; another one clears, or all others transpose and clear. The other warpgroups multiply,
// `blocks` m64 blocks of `columns` columns each, side by side along M and N. A stage is free when
// the products after its own have begun and its own have ended.
#undef CONVT3D_WGMMA_USES
#define CONVT3D_WGMMA_USES(n) ((n) == CONVT3D_COLUMNS)
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "device/wgmma_mn_major.cuh"
#include "wgrad_ndhwc/config.cuh"
#include "wgrad_ndhwc/produce.cuh"
#include "wgrad_ndhwc/reduce.cuh"
#include "wgrad_ndhwc/store.cuh"
#include "wgrad_ndhwc/transposed.cuh"

namespace convt3d {

template <int N>
CONVT3D_DEVICE void multiply(Float16, float (&d)[N / 2], uint64_t a, uint64_t b) {
  wgmma_f16_ss_mn_major<N>(d, a, b);
}
template <int N>
CONVT3D_DEVICE void multiply(BFloat16, float (&d)[N / 2], uint64_t a, uint64_t b) {
  wgmma_bf16_ss_mn_major<N>(d, a, b);
}

template <typename Config>
CONVT3D_DEVICE void consume(const WgradNdhwcArguments& a, uint32_t shared,
                            WgradNdhwcRing<Config> ring, int warpgroup, int split,
                            float (&sum)[Config::blocks][Config::sums]) {
  constexpr int m_pitch = Config::m_atom * Config::bytes, n_pitch = Config::n_atom * Config::bytes;
  constexpr int m_atoms = 64 / Config::m_atom;  // of a block
  const int along_m = warpgroup % Config::consumers_m * Config::blocks;
  const int along_n = warpgroup / Config::consumers_m * (Config::columns / Config::n_atom);
  // Of the gradient, atoms that share a box lie some lines apart, others a box; x is boxes alone.
  uint64_t m_first[Config::blocks];
#pragma unroll
  for (int block = 0; block < Config::blocks; ++block) {
    const int first = (along_m + block) * m_atoms;
    const uint32_t offset = Config::taps_on_m ? a.template atom_offset<Config>(first)
                                              : first * Config::source_box_bytes;
    const uint32_t step = Config::taps_on_m && Config::shares && m_atoms > 1
                              ? a.template atom_offset<Config>(first + 1) - offset
                              : Config::m_box_bytes;
    m_first[block] = matrix_descriptor_mn_major<m_pitch>(shared + offset, step);
  }
  const uint32_t n_offset = Config::taps_on_m ? along_n * Config::source_box_bytes
                                              : a.template atom_offset<Config>(along_n);
  const uint64_t n_first = matrix_descriptor_mn_major<n_pitch>(
      shared + n_offset,
      Config::shares && !Config::taps_on_m ? a.tap_rows() * n_pitch : Config::n_box_bytes);
  const bool first_lane = threadIdx.x % 32 == 0;
#pragma unroll
  for (int block = 0; block < Config::blocks; ++block) {
#pragma unroll
    for (int i = 0; i < Config::sums; ++i) sum[block][i] = 0.f;
    wgmma_fence_registers(sum[block]);
  }
  int held = -1;  // the stage that the products before read
#pragma unroll 1
  for (int left = WgradNdhwcSteps(a, split).left; left > 0; --left) {
    ring.wait_full();
    const uint32_t stage = ring.stage * (Config::stage_bytes / 16);
    wgmma_fence();
#pragma unroll
    for (int product = 0; product < Config::products; ++product)
#pragma unroll
      for (int block = 0; block < Config::blocks; ++block)
        multiply<Config::columns>(typename Config::Type(), sum[block],
                                  m_first[block] + stage + product * m_pitch,
                                  n_first + stage + product * n_pitch);
    wgmma_commit();
    wgmma_wait<1>();
    mbarrier_arrive_if(ring.empty(held < 0 ? 0 : held), first_lane && held >= 0);
    held = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int block = 0; block < Config::blocks; ++block) wgmma_fence_registers(sum[block]);
}

template <typename Config>
CONVT3D_DEVICE void run_wgrad_ndhwc(const WgradNdhwcArguments& a, const TensorMap& source_map,
                                    const TensorMap& target_map, float2* partial,
                                    const WgradNdhwcWeight<Config>& weight) {
  extern __shared__ __align__(1024) unsigned char shared_start[];
  const uint32_t shared = shared_address(shared_start);
  const WgradNdhwcRing<Config> ring(shared);
  if (threadIdx.x == 0) {
    ring.init();
    mbarrier_init_fence();
  }
  clear_tails<Config>(a, shared);
  __syncthreads();
  grid_dependency_launch();
  const WgradNdhwcTile<Config> tile(blockIdx.x / Config::cluster % Config::tiles);
  const int split = Config::cluster > 1 ? Config::rank() : int(blockIdx.x) / Config::tiles;
  const bool whole = Config::cluster > 1 || (!Config::along_taps && a.splits == 1);
  using Registers = RingRegisters<Config, Config::producer_registers>;
  // Uniform in a warp, and known to be: roles must not look divergent around warpgroup products.
  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (warpgroup == Config::consumers) {
    register_decrease<Registers::others>();
    const int warp = threadIdx.x / 32 % 4;
    if (warp == 0)
      produce<Config>(a, source_map, target_map, shared, ring, tile, split);
    else if constexpr (Config::transposes)
      transpose_steps<Config>(a, shared, ring, tile, split, warp - 1);
    else if (warp == 1)
      clear_steps<Config>(a, shared, ring, tile, split);
  } else {
    register_increase<Registers::multiplying>();
    float sum[Config::blocks][Config::sums];
    if constexpr (Config::transposes)
      consume_transposed<Config>(a, shared, ring, warpgroup, split, sum);
    else
      consume<Config>(a, shared, ring, warpgroup, split, sum);
    if (whole) {
      store_whole<Config>(shared, tile, weight, sum);
    } else {
      constexpr int threads = 32 * Config::warps;
      float2* out = partial + int64_t(blockIdx.x) * (Config::pairs * threads) + threadIdx.x;
#pragma unroll
      for (int pair = 0; pair < Config::pairs; ++pair) {
        const int block = pair / (Config::sums / 2), i = pair % (Config::sums / 2) * 2;
        out[pair * threads] = make_float2(sum[block][i], sum[block][i + 1]);
      }
    }
  }
  if constexpr (Config::cluster > 1) cluster_finish(warpgroup < Config::consumers);
}

}  // namespace convt3d

extern "C" __global__ void
#if CONVT3D_CLUSTER > 1
__cluster_dims__(CONVT3D_CLUSTER, 1, 1)
#endif
__launch_bounds__(convt3d::WgradNdhwcConfig::threads, 1)
    convt3d_wgrad_ndhwc(const __grid_constant__ convt3d::TensorMap source_map,
                        const __grid_constant__ convt3d::TensorMap target_map, float2* partial,
                        convt3d::WgradNdhwcConfig::Storage* weight, int samples, int source0,
                        int source1, int source2, int box_samples, int box0, int box1, int box2,
                        int splits, convt3d::int64_t stride_in, convt3d::int64_t stride_out,
                        convt3d::int64_t stride0, convt3d::int64_t stride1,
                        convt3d::int64_t stride2) {
  const convt3d::WgradNdhwcArguments arguments{
      {samples, source0, source1, source2}, {box_samples, box0, box1, box2}, splits};
  convt3d::run_wgrad_ndhwc<convt3d::WgradNdhwcConfig>(
      arguments, source_map, target_map, partial,
      {weight, stride_in, stride_out, {stride0, stride1, stride2}});
}

/// `run`: blocks of a CTA, along the taps or along channels.
extern "C" __global__ void __launch_bounds__(256)
    convt3d_reduce(const float2* partial, convt3d::WgradNdhwcConfig::Storage* weight, int splits,
                   int run, convt3d::int64_t stride_in, convt3d::int64_t stride_out,
                   convt3d::int64_t stride0, convt3d::int64_t stride1,
                   convt3d::int64_t stride2) {
  convt3d::grid_dependency_wait();
  convt3d::reduce<convt3d::WgradNdhwcConfig>(
      partial, splits, run, {weight, stride_in, stride_out, {stride0, stride1, stride2}});
}
