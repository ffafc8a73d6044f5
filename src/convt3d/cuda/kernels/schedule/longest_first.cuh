// Longest-first scheduling of few work tiles of unequal length over the CTAs of a persistent
// grid: ranked by length, round by round, every second round in reverse, so that the CTA with the
// longest one of a round has the shortest one of the next.
#pragma once
#include "device/ptx.cuh"

namespace convt3d {

struct LongestFirst {
  static constexpr int most = 1024, most_rounds = 32;
  uint32_t order;  // of this CTA's work tiles, in shared memory: four bytes a round
  bool by_length;  // else every CTA has every gridDim-th work tile
  int round = 0;

  CONVT3D_DEVICE LongestFirst(uint32_t order_, int tiles)
      : order(order_), by_length(tiles <= min(most, most_rounds * int(gridDim.x))) {}

  /// The rank by length of the work tile that a CTA has in a round.
  CONVT3D_DEVICE static int rank_of(int cta, int round) {
    return round * int(gridDim.x) + (round % 2 ? int(gridDim.x) - 1 - cta : cta);
  }
  /// Whether there is a work tile of this round, and which; `at` is the CTA's where they are not
  /// sorted, `rotation` becomes zero where they are.
  CONVT3D_DEVICE bool next(int at, int end, int& number, int& rotation) {
    // Unknown to the compiler, which would else double the products for both ways.
    const int sorted = int(own_address(by_length)), plain = 1 - sorted;
    if (sorted * rank_of(blockIdx.x, round) + plain * at >= end) return false;
    number = plain * at + int(load_shared(order + 4 * min(round, most_rounds - 1)));
    rotation *= plain;
    ++round;
    return true;
  }
};

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
