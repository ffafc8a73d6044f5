// The partial sums of a kernel == stride product whose k is split among CTAs, added in order.
#pragma once
#include "patch/lane_store.cuh"

namespace convt3d {

template <typename Config>
CONVT3D_DEVICE void add_splits(const float* partial, typename Config::Storage* target,
                               int64_t elements) {
  constexpr int splits = Config::splits;
  grid_dependency_wait();  // for the partial sums
  const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  if (elements % 4 == 0 && reinterpret_cast<uint64_t>(target) % 16 == 0) {
    for (int64_t i = first; i < elements / 4; i += step) {
      float4 part[splits];
#pragma unroll
      for (int split = 0; split < splits; ++split)
        part[split] = __ldg(reinterpret_cast<const float4*>(partial + split * elements) + i);
      float sum[4] = {};
#pragma unroll
      for (int split = 0; split < splits; ++split) {
        sum[0] += part[split].x, sum[1] += part[split].y;
        sum[2] += part[split].z, sum[3] += part[split].w;
      }
      store_piece<typename Config::Type>(target + 4 * i, sum);
    }
  } else {
    for (int64_t i = first; i < elements; i += step) {
      float sum = 0.f;
#pragma unroll
      for (int split = 0; split < splits; ++split) sum += __ldg(partial + split * elements + i);
      target[i] = Config::Type::store(sum);
    }
  }
}

}  // namespace convt3d
