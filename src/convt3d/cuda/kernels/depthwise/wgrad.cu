// Gradient by weight on the CUDA cores for groups of few channels, bounded by memory.
//
// A thread owns one pair of (x channel, gradient channel) and `block1` x `block2` positions of x
// in the (H, W) plane, and sweeps along D. It takes in one gradient plane after the other,
// multiplies it with the x planes that meet it (kept in registers, by age) and adds to the sums
// of all taps of its box, in registers too. The next planes are loaded while one is computed
// with.
//
//     CTA = (tap box, `lanes` pairs, every splits-th of (sample, segment of D, tile of the plane))
//     tile = threads / lanes units
//
// Contiguous tensors: neighbouring threads take neighbouring units along W, whose aligned rows
// move as vectors. channels_last: neighbouring threads take neighbouring pairs.
//
// Shared memory, after the sweep: sums of `staged_taps` taps at a time, [tap][thread], added over
// the threads of a lane in a fixed order: no atomics, the same bits on every run.
#include "depthwise/plane.cuh"
#include "direct/pairs.cuh"

namespace convt3d {

/// Neighbouring threads that share one of `sums` sums.
CONVT3D_CONSTEXPR int threads_a_sum(int threads, int sums) {
  int parts = 1;
  while (2 * parts <= 32 && 2 * parts * sums <= threads) parts *= 2;
  return parts;
}

struct DepthwiseWgradConfig : DirectWgradConfig {
  static_assert(taps1 == kernel1 && taps2 == kernel2, "boxes of taps cut axis 0");
  static constexpr bool source_channels_last = CONVT3D_SOURCE_CHANNELS_LAST;
  static constexpr bool target_channels_last = CONVT3D_TARGET_CHANNELS_LAST;
  using Axis0 = StaticAxis<false, taps0, stride0, padding0, dilation0, 1>;
  using Axis1 =
      StaticAxis<false, taps1, stride1, padding1, dilation1, CONVT3D_BLOCK1>;
  using Axis2 =
      StaticAxis<false, taps2, stride2, padding2, dilation2, CONVT3D_BLOCK2>;
  // The positions of x that a unit owns, as axes of one tap.
  using Own1 = StaticAxis<false, 1, 1, 0, 1, CONVT3D_BLOCK1>;
  using Own2 = StaticAxis<false, 1, 1, 0, 1, CONVT3D_BLOCK2>;
  using Steps = SweepSteps<Axis0>;
  static constexpr bool contiguous = !source_channels_last && !target_channels_last;
  static constexpr int source_stride = source_channels_last ? groups * source_channels : 1;
  static constexpr int target_stride = target_channels_last ? groups * target_channels : 1;
  static constexpr int most = 16 / int(sizeof(Storage));
  static constexpr int source_vector = contiguous ? largest_vector(Own2::unit_source, most) : 1;
  static constexpr int target_vector = contiguous ? largest_vector(Axis2::unit_source, most) : 1;

  static constexpr int staged_taps = 16;
  static constexpr int pitch = threads + 1;
  static constexpr int staged = staged_taps * lanes;
  static constexpr int parts = threads_a_sum(threads, staged);
};

template <typename Config>
struct DepthwiseWgradArguments {
  const typename Config::Storage* source;
  const typename Config::Storage* gradient;
  int source_extent[3];
  int gradient_extent[3];
  int units1, units2;
  int steps;  // x planes in a segment
  int samples, splits;
};

template <typename Config>
using TapSums = float[Config::taps0][Config::taps1][Config::taps2];

/// Adds what a thread's share of one item gives to the sums.
template <typename Config, bool aligned>
struct PairSweep {
  using Storage = typename Config::Storage;
  using Type = typename Config::Type;
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  using Own1 = typename Config::Own1;
  using Own2 = typename Config::Own2;
  using Steps = typename Config::Steps;
  using SourcePlane = DepthwisePlane<
      Own1, DepthwiseRow<Own2, Type, aligned ? Config::source_vector : 1, Config::source_stride>>;
  using GradientPlane = DepthwisePlane<
      Axis1, DepthwiseRow<Axis2, Type, aligned ? Config::target_vector : 1, Config::target_stride>>;
  static constexpr int ages = Steps::ages;

  CONVT3D_DEVICE static void run(const DepthwiseWgradArguments<Config>& a, const Storage* source,
                                 const Storage* gradient, bool live, int unit, int begin, int last,
                                 int first0, TapSums<Config>& sum) {
    const int u1 = live ? unit / a.units2 : 0;
    const int u2 = live ? unit - u1 * a.units2 : 0;
    const int x1 = u1 * Own1::unit_source, x2 = u2 * Own2::unit_source;
    const int g1 = u1 * Axis1::unit_source, g2 = u2 * Axis2::unit_source;
    const int64_t source_row = int64_t(a.source_extent[2]) * Config::source_stride;
    const int64_t gradient_row = int64_t(a.gradient_extent[2]) * Config::target_stride;
    const int64_t gradient_plane = a.gradient_extent[1] * gradient_row;
    source += x1 * source_row + int64_t(x2) * Config::source_stride;
    gradient += g1 * gradient_row + int64_t(g2) * Config::target_stride;

    float x[ages][SourcePlane::rows][SourcePlane::count][1];
#pragma unroll
    for (int i = 0; i < int(sizeof(x) / sizeof(float)); ++i) (&x[0][0][0][0])[i] = 0.f;
    auto fetch_source = [&](SourcePlane& to, int i0) {
      to.load(source + i0 * (a.source_extent[1] * source_row), source_row, live && i0 < last, x1,
              a.source_extent[1], x2, a.source_extent[2]);
    };
    auto fetch_gradient = [&](GradientPlane& to, int i0) {
      to.load(gradient + i0 * gradient_plane, gradient_row,
              live && unsigned(i0) < unsigned(a.gradient_extent[0]), g1, a.gradient_extent[1], g2,
              a.gradient_extent[2]);
    };
    SourcePlane own;
    GradientPlane current;
    int plane = begin * Axis0::unit_source + Axis0::min_shift + first0 * Layer::dilation0;
    const int end = last + ages - 1;
    fetch_gradient(current, plane);
    fetch_source(own, begin);
#pragma unroll 1
    for (int step = begin; step < end; ++step) {
      own.values(x[0]);
      fetch_source(own, step + 1);
#pragma unroll
      for (int part = 0; part < Axis0::unit_source; ++part, ++plane) {
        float value[GradientPlane::rows][GradientPlane::count][1];
        if (Steps::used(part)) current.values(value);
        if (Steps::used((part + 1) % Axis0::unit_source)) fetch_gradient(current, plane + 1);
        if (!Steps::used(part)) continue;
#pragma unroll
        for (int age = 0; age < ages; ++age) {
          const int k0 = Axis0::tap(0, Steps::shift(age, part));
          if (k0 < 0) continue;
          const auto& met = x[age];
#pragma unroll
          for (int r1 = 0; r1 < Axis1::slots; ++r1)
#pragma unroll
            for (int r2 = 0; r2 < Axis2::slots; ++r2)
#pragma unroll
              for (int k1 = 0; k1 < Config::taps1; ++k1)
#pragma unroll
                for (int k2 = 0; k2 < Config::taps2; ++k2)
                  sum[k0][k1][k2] = fmaf(met[r1][r2][0],
                                         value[Axis1::shift_of(r1, k1) - Axis1::min_shift]
                                              [Axis2::shift_of(r2, k2) - Axis2::min_shift][0],
                                         sum[k0][k1][k2]);
        }
      }
#pragma unroll
      for (int age = ages - 1; age > 0; --age)
#pragma unroll
        for (int i = 0; i < int(sizeof(x[0]) / sizeof(float)); ++i)
          (&x[age][0][0][0])[i] = (&x[age - 1][0][0][0])[i];
    }
  }
};

template <typename Config>
CONVT3D_DEVICE void run_depthwise_wgrad(const DepthwiseWgradArguments<Config>& a, float* partial) {
  using Storage = typename Config::Storage;
  extern __shared__ __align__(128) unsigned char shared[];
  float* staged = reinterpret_cast<float*>(shared);

  const PairVariant<Config> variant(blockIdx.x % Config::variants);
  const int lane = threadIdx.x % Config::lanes;
  const int row = threadIdx.x / Config::lanes;
  const bool exists = row < Config::rows && variant.pair + lane < Config::pairs;
  const Pair<Config> pair(exists ? variant.pair + lane : 0);
  const int64_t out_channel = int64_t(pair.group) * Config::target_channels + pair.out;
  const int64_t source_volume =
      int64_t(a.source_extent[0]) * a.source_extent[1] * a.source_extent[2];
  const int64_t gradient_volume =
      int64_t(a.gradient_extent[0]) * a.gradient_extent[1] * a.gradient_extent[2];
  constexpr int64_t all_source = int64_t(Config::groups) * Config::source_channels;
  constexpr int64_t all_gradient = int64_t(Config::groups) * Config::target_channels;

  constexpr uint64_t source_bytes = Config::source_vector * sizeof(Storage);
  constexpr uint64_t target_bytes = Config::target_vector * sizeof(Storage);
  const bool aligned = a.source_extent[2] % Config::source_vector == 0 &&
                       a.gradient_extent[2] % Config::target_vector == 0 &&
                       reinterpret_cast<uint64_t>(a.source) % source_bytes == 0 &&
                       reinterpret_cast<uint64_t>(a.gradient) % target_bytes == 0;
  TapSums<Config> sum;
#pragma unroll
  for (int i = 0; i < Config::taps; ++i) (&sum[0][0][0])[i] = 0.f;

  const int64_t units = int64_t(a.units1) * a.units2;
  const int tiles = int((units + Config::rows - 1) / Config::rows);
  const int segments = (a.source_extent[0] + a.steps - 1) / a.steps;
  const int64_t items = int64_t(tiles) * segments * a.samples;
#pragma unroll 1
  for (int64_t item = blockIdx.x / Config::variants; item < items; item += a.splits) {
    const int tile = int(item % tiles);
    const int begin = int(item / tiles % segments) * a.steps;
    const int sample = int(item / tiles / segments);
    const int last =
        begin + a.steps < a.source_extent[0] ? begin + a.steps : a.source_extent[0];
    const int unit = tile * Config::rows + row;
    const Storage* source = a.source + sample * all_source * source_volume +
                            pair.in * (Config::source_stride == 1 ? source_volume : 1);
    const Storage* gradient = a.gradient + sample * all_gradient * gradient_volume +
                              out_channel * (Config::target_stride == 1 ? gradient_volume : 1);
    const bool live = exists && unit < units;
    if (Config::contiguous && aligned)
      PairSweep<Config, Config::contiguous>::run(a, source, gradient, live, unit, begin, last,
                                                 variant.first0, sum);
    else
      PairSweep<Config, false>::run(a, source, gradient, live, unit, begin, last, variant.first0,
                                    sum);
  }

#pragma unroll
  for (int first = 0; first < Config::taps; first += Config::staged_taps) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Config::staged_taps; ++i)
      if (first + i < Config::taps)
        staged[i * Config::pitch + threadIdx.x] = (&sum[0][0][0])[first + i];
    __syncthreads();
    for (int e = threadIdx.x / Config::parts; e < round_up(Config::staged, 32);
         e += Config::threads / Config::parts) {
      const int tap = e / Config::lanes, of_lane = e % Config::lanes;
      float total = 0.f;
      if (e < Config::staged && first + tap < Config::taps)
        for (int r = threadIdx.x % Config::parts; r < Config::rows; r += Config::parts)
          total += staged[tap * Config::pitch + r * Config::lanes + of_lane];
#pragma unroll
      for (int offset = Config::parts / 2; offset > 0; offset /= 2)
        total += __shfl_xor_sync(0xffffffffu, total, offset);
      if (threadIdx.x % Config::parts == 0 && e < Config::staged && first + tap < Config::taps)
        partial[int64_t(blockIdx.x) * Config::variant_elements + of_lane * Config::taps + first +
                tap] = total;
    }
  }
}

}  // namespace convt3d

extern "C" __global__ void
__launch_bounds__(convt3d::DepthwiseWgradConfig::threads, CONVT3D_MIN_BLOCKS)
    convt3d_depthwise_wgrad(const convt3d::DepthwiseWgradConfig::Storage* source,
                            const convt3d::DepthwiseWgradConfig::Storage* gradient,
                            float* partial, int source0, int source1, int source2, int gradient0,
                            int gradient1, int gradient2, int units1, int units2, int steps,
                            int samples, int splits) {
  const convt3d::DepthwiseWgradArguments<convt3d::DepthwiseWgradConfig> arguments{
      source, gradient, {source0, source1, source2}, {gradient0, gradient1, gradient2},
      units1, units2,   steps,                       samples, splits};
  convt3d::run_depthwise_wgrad(arguments, partial);
}
