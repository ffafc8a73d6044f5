// Gradient by weight on the CUDA cores: variants (a box of taps of a few channel pairs), and the
// second pass, which adds the partial sums of all splits in ascending order:
//     partial = [split][variant][lane][tap]
#pragma once
#include "geometry/layer.cuh"
#include "load/box.cuh"

namespace convt3d {

struct DirectWgradConfig : Layer {
  static constexpr int pairs = groups * source_channels * target_channels;
  static constexpr int lanes = CONVT3D_LANES;
  static constexpr int threads = CONVT3D_THREADS;
  static constexpr int warps = threads / 32;
  static constexpr int rows = threads / lanes;
  static constexpr int taps0 = CONVT3D_TAPS0;
  static constexpr int taps1 = CONVT3D_TAPS1;
  static constexpr int taps2 = CONVT3D_TAPS2;
  static constexpr int taps = taps0 * taps1 * taps2;
  static constexpr int tap_tiles0 = div_up(kernel0, taps0);
  static constexpr int tap_tiles1 = div_up(kernel1, taps1);
  static constexpr int tap_tiles2 = div_up(kernel2, taps2);
  static constexpr int pair_tiles = div_up(pairs, lanes);
  static constexpr int variants = tap_tiles0 * tap_tiles1 * tap_tiles2 * pair_tiles;
  static constexpr int variant_elements = lanes * taps;
};

template <typename Config>
struct PairVariant {
  int first0, first1, first2, pair;
  CONVT3D_DEVICE explicit PairVariant(int index) {
    first2 = index % Config::tap_tiles2 * Config::taps2;
    index /= Config::tap_tiles2;
    first1 = index % Config::tap_tiles1 * Config::taps1;
    index /= Config::tap_tiles1;
    first0 = index % Config::tap_tiles0 * Config::taps0;
    pair = index / Config::tap_tiles0 * Config::lanes;
  }
};

/// A pair's channels: `in` counts all x channels, `out` those of the group's gradient.
template <typename Config>
struct Pair {
  int group, in, out;
  CONVT3D_DEVICE explicit Pair(int index) {
    out = index % Config::target_channels;
    in = index / Config::target_channels;
    group = in / Config::source_channels;
  }
};

template <typename Config>
CONVT3D_DEVICE void direct_reduce(const float* partial, typename Config::Storage* weight,
                                  int splits, int64_t stride_in, int64_t stride_out,
                                  int64_t stride0, int64_t stride1, int64_t stride2) {
  constexpr int64_t elements = int64_t(Config::variants) * Config::variant_elements;
  const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= elements) return;
  const PairVariant<Config> variant(int(index / Config::variant_elements));
  const int e = int(index % Config::variant_elements);
  const int tap = e % Config::taps;
  const int pair_index = variant.pair + e / Config::taps;
  const int k2 = variant.first2 + tap % Config::taps2;
  const int k1 = variant.first1 + tap / Config::taps2 % Config::taps1;
  const int k0 = variant.first0 + tap / (Config::taps2 * Config::taps1);
  if (pair_index >= Config::pairs || k0 >= Layer::kernel0 || k1 >= Layer::kernel1 ||
      k2 >= Layer::kernel2)
    return;
  const Pair<Config> pair(pair_index);
  float total = 0.f;
  for (int split = 0; split < splits; ++split) total += partial[split * elements + index];
  weight[pair.in * stride_in + pair.out * stride_out + k0 * stride0 + k1 * stride1 +
         k2 * stride2] = Config::Type::store(total);
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(256)
    convt3d_direct_reduce(const float* partial, convt3d::DirectWgradConfig::Storage* weight,
                          int splits, convt3d::int64_t stride_in, convt3d::int64_t stride_out,
                          convt3d::int64_t stride0, convt3d::int64_t stride1,
                          convt3d::int64_t stride2) {
  convt3d::direct_reduce<convt3d::DirectWgradConfig>(
      partial, weight, splits, stride_in, stride_out, stride0, stride1, stride2);
}
