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

}  // namespace convt3d
