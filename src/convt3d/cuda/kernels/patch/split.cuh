// IEEE-grade products of patch/kernel.cu: both operands are split in two TF32 parts, three
// products stand for one (see device/arithmetic.cuh). A consumer has the parts of a chain's cells
// in registers; those of the weights lie in shared memory. A chain's products have accumulators
// of their own, which are added to the sums outside the tensor core, whose adder truncates: while
// one consumer adds, others multiply.
#pragma once
#include "device/barrier.cuh"
#include "device/sum_parts.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "patch/cells.cuh"

namespace convt3d {

/// The cells of a chain of steps: of sixteen channels, whose products are one addition to a sum.
template <typename Config>
struct SplitChain {
  static constexpr int N = Config::column_tile;
  static constexpr int length = 2;
  static constexpr bool sums_in_parts = Config::depth > 2 * longest_part;
  static constexpr int part_chunks = longest_part / Config::chunk_lines;
  uint32_t big[length][Config::blocks][4];
  uint32_t small[length][Config::blocks][4];

  CONVT3D_DEVICE void load(const CellFragments<Config>& fragments, uint32_t stage, int first) {
#pragma unroll
    for (int step = 0; step < length; ++step)
      fragments.load(stage, first + step, big[step]);
  }
  CONVT3D_DEVICE void split() {
#pragma unroll
    for (int step = 0; step < length; ++step)
#pragma unroll
      for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          Config::Math::split(big[step][block][i], big[step][block][i], small[step][block][i]);
  }
  /// All products with a small part come first: until the others come, the sum is small, and so
  /// is what the adder cuts off. `weights`: of the first step.
  CONVT3D_DEVICE void multiply(float (&product)[Config::blocks][N / 2], uint64_t weights) const {
    constexpr int small_weights = Config::weight_part_bytes() / 16;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < length; ++step)
#pragma unroll
      for (int block = 0; block < Config::blocks; ++block) {
        if (step == 0)
          wgmma_tf32_rs_first<N>(product[block], small[step][block], weights);
        else
          wgmma_tf32_rs<N>(product[block], small[step][block], weights + 2 * step);
        wgmma_tf32_rs<N>(product[block], big[step][block], weights + (small_weights + 2 * step));
      }
#pragma unroll
    for (int step = 0; step < length; ++step)
#pragma unroll
      for (int block = 0; block < Config::blocks; ++block)
        wgmma_tf32_rs<N>(product[block], big[step][block], weights + 2 * step);
    wgmma_commit();
  }
};

template <typename Config>
CONVT3D_DEVICE void consume_split(const PatchArguments<Config>& arguments,
                                  const PatchWork<Config>& work, const TensorMap& target_map,
                                  int box_width, uint32_t base, Ring<Config::source_stages> cells,
                                  Ring<Config::weight_stages> weights, int consumer, int warp) {
  constexpr int N = Config::column_tile;
  constexpr int sums = Config::blocks * N / 2;
  using Chain = SplitChain<Config>;
  // From a shuffle: threadIdx would be read anew for every chunk.
  const int lane = __shfl_sync(0xffffffffu, int(threadIdx.x), int(threadIdx.x)) % 32;
  const CellFragments<Config> fragments(warp, lane);
  PatchLaneStore<Config> store(arguments, work, consumer * 4 + warp, 0, lane);
  const int first_column = store.first_column;
  typename Select<Config::staged, PatchStaging<Config>, NoStaging>::Type staging(
      arguments, work, target_map, base + Config::staging_offset, consumer, box_width);
  const uint32_t source = base + consumer * Config::source_stages * Config::source_stage_bytes;
  const uint64_t columns = matrix_descriptor_128b(base + Config::weight_offset);
  const uint32_t bias = base + Config::bias_offset;
  typename PatchLaneStore<Config>::Sums sum;
  float(&flat)[sums] = *reinterpret_cast<float(*)[sums]>(&sum[0][0][0]);
  [[maybe_unused]] EarlierParts<sums> earlier;
  [[maybe_unused]] typename PatchLaneStore<Config>::Bias held;
  if constexpr (Config::hold_bias()) store.load_kept(held, bias);

#pragma unroll 1
  for (int tile = work.worker; tile < arguments.tiles; tile += arguments.workers) {
    const PatchTile<Config> place(arguments, tile);
    Ring<Config::source_stages> at = cells;  // without the copy registers are allocated otherwise
    // The sign is 0: columns are decoded when they are needed.
    store.first_column = first_column + (uint32_t(place.sample) >> 31);
    if constexpr (Config::hold_bias())
      store.begin_at(sum, held);
    else
      store.begin_kept(sum, bias);
    if constexpr (Chain::sums_in_parts) earlier.begin(flat);
#pragma unroll 1
    for (int chunk = 0; chunk < Config::chunks; ++chunk) {
      if constexpr (Chain::sums_in_parts)
        if (chunk > 0 && chunk % Chain::part_chunks == 0) earlier.keep(flat);
      at.wait_full();
      const uint32_t stage = source + at.stage * Config::source_stage_bytes;
      const int weight_stage = Config::keep_weights ? chunk : weights.stage;
      const uint64_t b = columns + weight_stage * (Config::weight_stage_bytes / 16);
#pragma unroll
      for (int first = 0; first < Config::steps; first += Chain::length) {
        Chain chain;
        chain.load(fragments, stage, first);
        chain.split();
        if (first == 0) {
          if constexpr (Config::keep_weights)
            mbarrier_wait(weights.barriers + 8 * chunk, 0);
          else
            weights.wait_full();
        }
        float product[Config::blocks][N / 2];
        chain.multiply(product, b + 2 * first);
        wgmma_wait<0>();
#pragma unroll
        for (int block = 0; block < Config::blocks; ++block) {
          wgmma_fence_registers(product[block]);
#pragma unroll
          for (int i = 0; i < N / 2; ++i) flat[block * (N / 2) + i] += product[block][i];
        }
      }
      if (lane == 0) mbarrier_arrive(at.empty(at.stage));
      at.advance();
      if constexpr (!Config::keep_weights) {
        if (lane == 0) mbarrier_arrive(weights.empty(weights.stage));
        weights.advance();
      }
    }
    if constexpr (Chain::sums_in_parts) earlier.join(flat);
    if constexpr (Fusion::runs)
      fuse_tile<Config>(arguments, work, place, box_width, consumer, warp, store, sum);
    if constexpr (Config::staged)
      staging(place, sum);
    else
      store(place, sum);
    cells = at;
  }
  if constexpr (Config::staged) staging.finish();
}

}  // namespace convt3d
