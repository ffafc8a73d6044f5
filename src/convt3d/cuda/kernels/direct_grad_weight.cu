// Gradient by weight on the CUDA cores, for depthwise layers and groups of a few channels.
//
// A CTA owns `lanes` pairs of (x channel, gradient channel), a box of taps and one share of the
// positions. A thread keeps the sums of all its taps in registers while it walks positions; lanes
// are neighbouring pairs (channels_last) or neighbouring positions along W (contiguous, lanes = 1).
//
// Shared memory: the sums of each warp, [warp][lane][tap]. They are added in the order of warps,
// and partial sums of the splits in ascending order by convt3d_direct_reduce: no atomics, the same
// bits on every run.
#include "box.cuh"

namespace convt3d {

struct DirectGradWeightConfig {
  using Type = CONVT3D_TYPE;
  using Storage = typename Type::Storage;
  static constexpr int groups = CONVT3D_GROUPS;
  static constexpr int source_channels = CONVT3D_SOURCE_CHANNELS;
  static constexpr int target_channels = CONVT3D_TARGET_CHANNELS;
  static constexpr int pairs = groups * source_channels * target_channels;
  static constexpr int lanes = CONVT3D_LANES;
  static constexpr int threads = CONVT3D_THREADS;
  static constexpr int warps = threads / 32;
  static constexpr int rows = threads / lanes;
  static constexpr int taps0 = CONVT3D_TAPS0;
  static constexpr int taps1 = CONVT3D_TAPS1;
  static constexpr int taps2 = CONVT3D_TAPS2;
  static constexpr int taps = taps0 * taps1 * taps2;
  static constexpr int tap_tiles0 = div_up(CONVT3D_KERNEL0, taps0);
  static constexpr int tap_tiles1 = div_up(CONVT3D_KERNEL1, taps1);
  static constexpr int tap_tiles2 = div_up(CONVT3D_KERNEL2, taps2);
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
CONVT3D_DEVICE void direct_grad_weight(const Activation<const typename Config::Storage>& source,
                                       const Activation<const typename Config::Storage>& gradient,
                                       float* partial, int samples, int splits) {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  constexpr bool source_last = CONVT3D_SOURCE_CHANNELS_LAST;
  constexpr bool gradient_last = CONVT3D_TARGET_CHANNELS_LAST;
  constexpr int64_t all_source = int64_t(Config::groups) * Config::source_channels;
  constexpr int64_t all_gradient = int64_t(Config::groups) * Config::target_channels;
  extern __shared__ __align__(128) unsigned char shared[];
  float* staged = reinterpret_cast<float*>(shared);

  const PairVariant<Config> variant(blockIdx.x % Config::variants);
  const int split = blockIdx.x / Config::variants;
  const int lane = threadIdx.x % Config::lanes;
  const int row = threadIdx.x / Config::lanes;
  const int pair_index = variant.pair + lane;
  const bool live = pair_index < Config::pairs;
  const Pair<Config> pair(live ? pair_index : 0);
  const int64_t out_channel = int64_t(pair.group) * Config::target_channels + pair.out;
  const int64_t source_volume = source.volume();
  const int64_t gradient_volume = gradient.volume();

  float sum[Config::taps];
#pragma unroll
  for (int i = 0; i < Config::taps; ++i) sum[i] = 0.f;

  for (int sample = 0; live && sample < samples; ++sample) {
    const Storage* x = source.data + sample * all_source * source_volume +
                       (source_last ? pair.in : pair.in * source_volume);
    const Storage* gy = gradient.data + sample * all_gradient * gradient_volume +
                        (gradient_last ? out_channel : out_channel * gradient_volume);
    for (int64_t p = int64_t(split) * Config::rows + row; p < source_volume;
         p += int64_t(splits) * Config::rows) {
      const int position = int(p);
      const int i2 = position % source.extent[2];
      const int i1 = position / source.extent[2] % source.extent[1];
      const int i0 = position / source.extent[2] / source.extent[1];
      const float value = Type::load(__ldg(x + p * (source_last ? all_source : 1)));
      const int o0 = i0 * CONVT3D_STRIDE0 - CONVT3D_PADDING0 + variant.first0 * CONVT3D_DILATION0;
      const int o1 = i1 * CONVT3D_STRIDE1 - CONVT3D_PADDING1 + variant.first1 * CONVT3D_DILATION1;
      const int o2 = i2 * CONVT3D_STRIDE2 - CONVT3D_PADDING2 + variant.first2 * CONVT3D_DILATION2;
#pragma unroll
      for (int k0 = 0; k0 < Config::taps0; ++k0)
#pragma unroll
        for (int k1 = 0; k1 < Config::taps1; ++k1) {
          const int q0 = o0 + k0 * CONVT3D_DILATION0;
          const int q1 = o1 + k1 * CONVT3D_DILATION1;
          const int64_t base = (int64_t(q0) * gradient.extent[1] + q1) * gradient.extent[2];
#pragma unroll
          for (int k2 = 0; k2 < Config::taps2; ++k2) {
            const int q2 = o2 + k2 * CONVT3D_DILATION2;
            const float g = gradient.inside(q0, q1, q2)
                                ? Type::load(__ldg(gy + (base + q2) *
                                                            (gradient_last ? all_gradient : 1)))
                                : 0.f;
            float& total = sum[(k0 * Config::taps1 + k1) * Config::taps2 + k2];
            total = fmaf(value, g, total);
          }
        }
    }
  }

#pragma unroll
  for (int i = 0; i < Config::taps; ++i) {
#pragma unroll
    for (int offset = 16; offset >= Config::lanes; offset /= 2)
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], offset);
    if (threadIdx.x % 32 < Config::lanes)
      staged[(threadIdx.x / 32 * Config::lanes + lane) * Config::taps + i] = sum[i];
  }
  __syncthreads();
  for (int e = threadIdx.x; e < Config::variant_elements; e += Config::threads) {
    float total = 0.f;
    for (int warp = 0; warp < Config::warps; ++warp)
      total += staged[warp * Config::variant_elements + e];
    partial[int64_t(blockIdx.x) * Config::variant_elements + e] = total;
  }
}

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
  if (pair_index >= Config::pairs || k0 >= CONVT3D_KERNEL0 || k1 >= CONVT3D_KERNEL1 ||
      k2 >= CONVT3D_KERNEL2)
    return;
  const Pair<Config> pair(pair_index);
  float total = 0.f;
  for (int split = 0; split < splits; ++split) total += partial[split * elements + index];
  weight[pair.in * stride_in + pair.out * stride_out + k0 * stride0 + k1 * stride1 +
         k2 * stride2] = Config::Type::store(total);
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::DirectGradWeightConfig::threads)
    convt3d_direct_grad_weight(const convt3d::DirectGradWeightConfig::Storage* source,
                               const convt3d::DirectGradWeightConfig::Storage* gradient,
                               float* partial, int source0, int source1, int source2,
                               int gradient0, int gradient1, int gradient2, int samples,
                               int splits) {
  using Config = convt3d::DirectGradWeightConfig;
  const convt3d::Activation<const Config::Storage> x{
      source, {source0, source1, source2}, source1 * source2, source2};
  const convt3d::Activation<const Config::Storage> gy{
      gradient, {gradient0, gradient1, gradient2}, gradient1 * gradient2, gradient2};
  convt3d::direct_grad_weight<Config>(x, gy, partial, samples, splits);
}

extern "C" __global__ void __launch_bounds__(256)
    convt3d_direct_reduce(const float* partial, convt3d::DirectGradWeightConfig::Storage* weight,
                          int splits, convt3d::int64_t stride_in, convt3d::int64_t stride_out,
                          convt3d::int64_t stride0, convt3d::int64_t stride1,
                          convt3d::int64_t stride2) {
  convt3d::direct_reduce<convt3d::DirectGradWeightConfig>(
      partial, weight, splits, stride_in, stride_out, stride0, stride1, stride2);
}
