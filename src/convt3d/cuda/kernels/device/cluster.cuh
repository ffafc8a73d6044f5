// Split-K in a cluster, whose CTAs share the K steps of one work tile. Each CTA writes its sums to
// its shared memory, at the same offsets; after a cluster barrier each adds up a share of the sums
// of all CTAs, by distributed shared memory, and stores it. The order of the CTAs is fixed, so the
// result is the same in every run. A second cluster barrier keeps the shared memory alive until
// all have read it.
#pragma once
#include "device/barrier.cuh"

namespace convt3d {

/// `Words` sums at consecutive addresses, of every CTA of the cluster. Loads are apart from
/// additions, so that several are in flight.
template <int Cluster, int Words>
struct ClusterSums {
  static_assert(Words == 1 || Words % 4 == 0, "a word, or vectors of 16 bytes");
  uint32_t word[Cluster][Words];

  CONVT3D_DEVICE void fetch(uint32_t at) {
#pragma unroll
    for (int rank = 0; rank < Cluster; ++rank) {
      auto& w = word[rank];
      if constexpr (Words == 1) {
        w[0] = load_shared_of(at, rank);
      } else {
#pragma unroll
        for (int i = 0; i < Words; i += 4) {
          if constexpr (Cluster > 1)
            load_shared_of(at + 4 * i, rank, w[i], w[i + 1], w[i + 2], w[i + 3]);
          else
            load_shared(at + 4 * i, w[i], w[i + 1], w[i + 2], w[i + 3]);
        }
      }
    }
  }
  CONVT3D_DEVICE float total(int i) const {
    float sum = __uint_as_float(word[0][i]);
#pragma unroll
    for (int rank = 1; rank < Cluster; ++rank) sum += __uint_as_float(word[rank][i]);
    return sum;
  }
};

/// The last cluster barriers, by all threads of a CTA. Consumers have passed the first one, between
/// writing and reading sums; producers pass both here.
CONVT3D_DEVICE void cluster_finish(bool consumer) {
  __syncwarp();
  if (!consumer) cluster_sync();
  cluster_sync();
}

}  // namespace convt3d
