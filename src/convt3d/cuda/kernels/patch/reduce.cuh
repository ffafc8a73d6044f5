// The partial sums of a kernel == stride product whose k is split among CTAs, added in order.
#pragma once
#include "patch/fuse.cuh"

namespace convt3d {

template <typename Config, typename Outputs>
CONVT3D_DEVICE float fused_at(const Outputs& outputs, float value, int channel, int64_t i) {
  return fused<Config>(outputs.fusion, value, 0, channel, i);
}

/// What a reduction needs of outputs: the volume of a channel, the fusion.
struct ReducedOutputs {
  int64_t volume;
  CONVT3D_FUSION_MEMBER

  /// An output, of which `i` counts the elements of a dense tensor, after the steps of the fusion.
  template <typename Config>
  CONVT3D_DEVICE float fuse(float value, int64_t i) const {
    constexpr int own = Config::groups * Config::target_channels;
    const int channel = int((Config::target_channels_last ? i : i / volume) % own);
    return fused_at<Config>(*this, value, channel, i);
  }
  /// Its element of the target.
  template <typename Config>
  CONVT3D_DEVICE int64_t place(int64_t i) const {
    constexpr int own = Config::groups * Config::target_channels;
    constexpr int64_t more = tensor_channels(own) - own;
    return i + i / own / (Config::target_channels_last ? 1 : volume) *
                   (Config::target_channels_last ? 1 : volume) * more;
  }
};

template <typename Config>
CONVT3D_DEVICE void add_splits(const float* partial, typename Config::Storage* target,
                               int64_t elements, const ReducedOutputs& outputs) {
  constexpr int splits = Config::splits;
  grid_dependency_wait();  // for the partial sums
  const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  constexpr int own = Config::groups * Config::target_channels;
  constexpr bool dense = tensor_channels(own) == own;
  if (dense && elements % 4 == 0 && reinterpret_cast<uint64_t>(target) % 16 == 0) {
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
      if constexpr (Fusion::runs) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] = outputs.template fuse<Config>(sum[e], 4 * i + e);
      }
      store_piece<typename Config::Type>(target + 4 * i, sum);
    }
  } else {
    for (int64_t i = first; i < elements; i += step) {
      float sum = 0.f;
#pragma unroll
      for (int split = 0; split < splits; ++split) sum += __ldg(partial + split * elements + i);
      if constexpr (Fusion::runs) sum = outputs.template fuse<Config>(sum, i);
      target[dense ? i : outputs.template place<Config>(i)] = Config::Type::store(sum);
    }
  }
}

}  // namespace convt3d
