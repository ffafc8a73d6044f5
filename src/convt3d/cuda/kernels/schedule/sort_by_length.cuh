// Sorts few work tiles by length at the start of a kernel, for schedule/longest_first.cuh.
#pragma once
#include "schedule/longest_first.cuh"

namespace convt3d {

/// Writes the work tiles of this CTA: each thread finds the ranks of some. `scratch`: four bytes
/// a work tile.
template <typename Walk, typename Arguments>
CONVT3D_DEVICE void sort_by_length(const Arguments& arguments, const Walk& walk, uint32_t scratch) {
  const LongestFirst& schedule = walk.longest_first;
  if (threadIdx.x < LongestFirst::most_rounds) store_shared(schedule.order + 4 * threadIdx.x, 0u);
  if (!schedule.by_length) return;
  const int padded = (walk.end + 3) / 4 * 4;
  for (int i = threadIdx.x; i < padded; i += blockDim.x)
    store_shared(scratch + 4 * i,
                 i < walk.end ? uint32_t(Walk::length(arguments, i)) << 16 | (0xffff - i) : 0u);
  __syncthreads();
  for (int i = threadIdx.x; i < walk.end; i += blockDim.x) {
    const uint32_t mine = load_shared(scratch + 4 * i);
    int rank = 0;
    for (int j = 0; j < padded; j += 4) {
      uint32_t other[4];
      load_shared(scratch + 4 * j, other[0], other[1], other[2], other[3]);
#pragma unroll
      for (int k = 0; k < 4; ++k) rank += other[k] > mine;
    }
    const int round = rank / int(gridDim.x);
    if (LongestFirst::rank_of(blockIdx.x, round) == rank)
      store_shared(schedule.order + 4 * round, uint32_t(i));
  }
}

}  // namespace convt3d
