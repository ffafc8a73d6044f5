// Gradient by weight on the CUDA cores, for depthwise layers and groups of a few channels.
//
// A CTA owns `lanes` pairs of (x channel, gradient channel), a box of taps and one share of the
// positions. A thread keeps the sums of all its taps in registers while it walks positions; lanes
// are neighbouring pairs (channels_last) or neighbouring positions along W (contiguous, lanes =
// 1).
//
// Shared memory: the sums of each warp, [warp][lane][tap]. They are added in the order of warps,
// and partial sums of the splits in ascending order by convt3d_direct_reduce: no atomics, the
// same bits on every run.
#include "direct/pairs.cuh"

namespace convt3d {

template <typename Config>
CONVT3D_DEVICE void run_direct_wgrad(const Activation<const typename Config::Storage>& source,
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
      const int o0 = i0 * Layer::stride0 - Layer::padding0 + variant.first0 * Layer::dilation0;
      const int o1 = i1 * Layer::stride1 - Layer::padding1 + variant.first1 * Layer::dilation1;
      const int o2 = i2 * Layer::stride2 - Layer::padding2 + variant.first2 * Layer::dilation2;
#pragma unroll
      for (int k0 = 0; k0 < Config::taps0; ++k0)
#pragma unroll
        for (int k1 = 0; k1 < Config::taps1; ++k1) {
          const int q0 = o0 + k0 * Layer::dilation0;
          const int q1 = o1 + k1 * Layer::dilation1;
          const int64_t base = (int64_t(q0) * gradient.extent[1] + q1) * gradient.extent[2];
#pragma unroll
          for (int k2 = 0; k2 < Config::taps2; ++k2) {
            const int q2 = o2 + k2 * Layer::dilation2;
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

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::DirectWgradConfig::threads)
    convt3d_direct_wgrad(const convt3d::DirectWgradConfig::Storage* source,
                         const convt3d::DirectWgradConfig::Storage* gradient,
                         float* partial, int source0, int source1, int source2,
                         int gradient0, int gradient1, int gradient2, int samples,
                         int splits) {
  using Config = convt3d::DirectWgradConfig;
  const convt3d::Activation<const Config::Storage> x{
      source, {source0, source1, source2}, source1 * source2, source2};
  const convt3d::Activation<const Config::Storage> gy{
      gradient, {gradient0, gradient1, gradient2}, gradient1 * gradient2, gradient2};
  convt3d::run_direct_wgrad<Config>(x, gy, partial, samples, splits);
}
