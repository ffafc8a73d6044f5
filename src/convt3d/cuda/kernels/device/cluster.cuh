// Split-K in a cluster: each CTA puts its sums down in its shared memory, at the same places; all
// meet (cluster_sync); each adds up a share of the sums of all, in the order of the CTAs, which
// makes the result the same in every run, and stores these; and all meet again, as they end.
#pragma once
#include "device/barrier.cuh"

namespace convt3d {

/// Neighbouring sums, `Words` in all, of every CTA of a cluster: fetched, then added up.
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

/// Ends a CTA of a cluster, by all of its threads: others may still read its sums. Those that
/// multiplied have met the cluster before.
CONVT3D_DEVICE void cluster_leave(bool multiplied) {
  __syncwarp();
  if (!multiplied) cluster_sync();
  cluster_sync();
}

}  // namespace convt3d
