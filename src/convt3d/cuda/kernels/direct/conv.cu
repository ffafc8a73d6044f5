// Forward pass and gradient by input on the CUDA cores: depthwise layers, groups of a few
// channels, and every geometry that the tiled kernels decline.
//
// A thread computes all slots of one unit for `block_channels` produced channels, reading the
// source through L1: each value is loaded once for all the slots that use it. Neighbouring
// threads take neighbouring channel blocks (channels_last) or neighbouring units along W
// (contiguous).
//
//     CTA = (sample, `lanes` channel blocks, threads / lanes units)
//
// Shared memory: the weights of the CTA's channel blocks as float32,
// [source channel][tap][lane][block channel]; where they do not fit they are read through L1.
// No pipeline: occupancy hides the latency.
#include "direct/config.cuh"
#include "epilogue/fusion.cuh"

namespace convt3d {

template <typename Config>
struct DirectArguments {
  const typename Config::Storage* source;
  WeightView<typename Config::Storage> weight;
  const typename Config::Storage* bias;
  typename Config::Storage* target;
  int source_extent[3];
  int target_extent[3];
  int units0, units1, units2;
  CONVT3D_FUSION_MEMBER
};

/// The steps along one axis: every shift of a static axis, or the taps of a phase.
template <typename Axis, bool is_static>
struct Walk {
  PhaseTaps taps;
  CONVT3D_DEVICE explicit Walk(int phase) {
    if constexpr (is_static)
      taps = PhaseTaps{Axis::shifts, 0, Axis::min_shift, 1};
    else
      taps = Axis::taps_of(phase);
  }
  CONVT3D_DEVICE int shift(int i) const { return taps.first_shift + i * taps.shift_step; }
  /// Kernel index that `slot` takes at step i, or -1.
  CONVT3D_DEVICE int tap(int slot, int i, int phase) const {
    if constexpr (is_static)
      return Axis::tap(slot, i + Axis::min_shift);
    else
      return Axis::first_tap(phase) + i * Axis::kernel_step;
  }
};

template <typename Config>
CONVT3D_DEVICE void direct(const DirectArguments<Config>& a) {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  constexpr bool static0 = Config::Choice0::is_static;
  constexpr bool static1 = Config::Choice1::is_static;
  constexpr bool static2 = Config::Choice2::is_static;
  constexpr int block_channels = Config::block_channels;
  extern __shared__ __align__(128) unsigned char shared[];
  float* weights = reinterpret_cast<float*>(shared);

  int index = blockIdx.x;
  const int phase2 = index % Axis2::phases;
  index /= Axis2::phases;
  const int phase1 = index % Axis1::phases;
  index /= Axis1::phases;
  const int phase0 = index % Axis0::phases;
  index /= Axis0::phases;
  constexpr int lane_groups = div_up(Config::channel_blocks, Config::lanes);
  const int first_block = index % lane_groups * Config::lanes;
  index /= lane_groups;
  constexpr int unit_threads = Config::threads / Config::lanes;
  const int64_t units = int64_t(a.units0) * a.units1 * a.units2;
  const int unit_blocks = int((units + unit_threads - 1) / unit_threads);
  const int64_t unit = int64_t(index % unit_blocks) * unit_threads + threadIdx.x / Config::lanes;
  const int sample = index / unit_blocks;
  const int lane = threadIdx.x % Config::lanes;
  const int block = first_block + lane;

  if constexpr (Config::weights_shared) {
    constexpr int per_tap = Config::lanes * block_channels;
    constexpr int count = Config::source_channels * Config::taps * per_tap;
    for (int i = threadIdx.x; i < count; i += Config::threads) {
      const int tap = i / per_tap % Config::taps;
      weights[i] = block_weight<Config>(
          a.weight, first_block + i % per_tap / block_channels, i / (per_tap * Config::taps),
          tap / (Layer::kernel1 * Layer::kernel2), tap / Layer::kernel2 % Layer::kernel1,
          tap % Layer::kernel2, i % block_channels);
    }
    __syncthreads();
  }
  if (unit >= units || block >= Config::channel_blocks) return;

  const int u2 = int(unit % a.units2);
  const int u1 = int(unit / a.units2 % a.units1);
  const int u0 = int(unit / (int64_t(a.units2) * a.units1));
  const int group = Config::group_of(block);
  const int target0 = Config::first_of(block);

  const int64_t source_volume =
      int64_t(a.source_extent[0]) * a.source_extent[1] * a.source_extent[2];
  constexpr int64_t all_source = int64_t(Config::groups) * Config::source_channels;
  constexpr int64_t all_target = tensor_channels(int64_t(Config::groups) * Config::target_channels);
  constexpr bool source_last = Config::source_channels_last;
  const int64_t position_stride = source_last ? all_source : 1;
  const int64_t channel_stride = source_last ? 1 : source_volume;
  const Storage* source = a.source + sample * all_source * source_volume +
                          int64_t(group) * Config::source_channels * channel_stride;

  float sum[Axis0::slots][Axis1::slots][Axis2::slots][block_channels];
#pragma unroll
  for (int i = 0; i < int(sizeof(sum) / sizeof(float)); ++i) (&sum[0][0][0][0])[i] = 0.f;

  const Walk<Axis0, static0> walk0(phase0);
  const Walk<Axis1, static1> walk1(phase1);
  const Walk<Axis2, static2> walk2(phase2);
  constexpr int steps0 = static0 ? Axis0::shifts : 1;
  constexpr int steps1 = static1 ? Axis1::shifts : 1;
  constexpr int steps2 = static2 ? Axis2::shifts : 1;
  const int loops0 = static0 ? 1 : walk0.taps.count;
  const int loops1 = static1 ? 1 : walk1.taps.count;
  const int loops2 = static2 ? 1 : walk2.taps.count;

#pragma unroll 1
  for (int c = 0; c < Config::source_channels; ++c) {
#pragma unroll 1
    for (int l0 = 0; l0 < loops0; ++l0)
#pragma unroll
      for (int s0 = 0; s0 < steps0; ++s0) {
        const int j0 = static0 ? s0 : l0;
        const int i0 = u0 * Axis0::unit_source + walk0.shift(j0);
        const bool inside0 = unsigned(i0) < unsigned(a.source_extent[0]);
#pragma unroll 1
        for (int l1 = 0; l1 < loops1; ++l1)
#pragma unroll
          for (int s1 = 0; s1 < steps1; ++s1) {
            const int j1 = static1 ? s1 : l1;
            const int i1 = u1 * Axis1::unit_source + walk1.shift(j1);
            const bool inside1 = inside0 && unsigned(i1) < unsigned(a.source_extent[1]);
            const Storage* row =
                source + c * channel_stride +
                (int64_t(i0) * a.source_extent[1] + i1) * a.source_extent[2] * position_stride;
#pragma unroll 1
            for (int l2 = 0; l2 < loops2; ++l2)
#pragma unroll
              for (int s2 = 0; s2 < steps2; ++s2) {
                const int j2 = static2 ? s2 : l2;
                const int i2 = u2 * Axis2::unit_source + walk2.shift(j2);
                const bool inside2 = inside1 && unsigned(i2) < unsigned(a.source_extent[2]);
                const float value =
                    inside2 ? Type::load(__ldg(row + i2 * position_stride)) : 0.f;
#pragma unroll
                for (int r0 = 0; r0 < Axis0::slots; ++r0)
#pragma unroll
                  for (int r1 = 0; r1 < Axis1::slots; ++r1)
#pragma unroll
                    for (int r2 = 0; r2 < Axis2::slots; ++r2) {
                      const int k0 = walk0.tap(r0, j0, phase0);
                      const int k1 = walk1.tap(r1, j1, phase1);
                      const int k2 = walk2.tap(r2, j2, phase2);
                      if (k0 < 0 || k1 < 0 || k2 < 0) continue;
                      const int tap = (k0 * Layer::kernel1 + k1) * Layer::kernel2 + k2;
#pragma unroll
                      for (int i = 0; i < block_channels; ++i) {
                        float weight;
                        if constexpr (Config::weights_shared)
                          weight = weights[((c * Config::taps + tap) * Config::lanes + lane) *
                                               block_channels +
                                           i];
                        else
                          weight = block_weight<Config>(a.weight, block, c, k0, k1, k2, i);
                        sum[r0][r1][r2][i] = fmaf(value, weight, sum[r0][r1][r2][i]);
                      }
                    }
              }
          }
      }
  }

  const int64_t target_volume =
      int64_t(a.target_extent[0]) * a.target_extent[1] * a.target_extent[2];
  constexpr bool target_last = Config::target_channels_last;
  constexpr int vector = Config::channel_vector;
  const bool pairs = !target_last && a.target_extent[2] % 2 == 0 &&
                     reinterpret_cast<uint64_t>(a.target) % (2 * sizeof(Storage)) == 0;
#pragma unroll
  for (int i = 0; i < block_channels; i += vector) {
    const int channel = target0 + i;
    if (channel >= Config::target_channels) continue;
    const int64_t all_channel = int64_t(group) * Config::target_channels + channel;
    float bias[vector];
#pragma unroll
    for (int v = 0; v < vector; ++v) bias[v] = bias_at<Config>(a.bias, group, channel + v);
    Storage* target = a.target + sample * all_target * target_volume +
                      (target_last ? all_channel : all_channel * target_volume);
#pragma unroll
    for (int r0 = 0; r0 < Axis0::slots; ++r0)
#pragma unroll
      for (int r1 = 0; r1 < Axis1::slots; ++r1) {
        const int o0 = u0 * Axis0::unit_destination + r0 + (static0 ? 0 : phase0);
        const int o1 = u1 * Axis1::unit_destination + r1 + (static1 ? 0 : phase1);
        const int64_t row = (int64_t(o0) * a.target_extent[1] + o1) * a.target_extent[2];
#pragma unroll
        for (int r2 = 0; r2 < Axis2::slots; ++r2) {
          const int o2 = u2 * Axis2::unit_destination + r2 + (static2 ? 0 : phase2);
          if (o0 >= a.target_extent[0] || o1 >= a.target_extent[1] || o2 >= a.target_extent[2])
            continue;
          Storage* to = target + (row + o2) * (target_last ? all_target : 1);
          float value[vector];
#pragma unroll
          for (int v = 0; v < vector; ++v) {
            value[v] = sum[r0][r1][r2][i + v] + bias[v];
            if constexpr (Fusion::runs)
              value[v] = fused<Config>(a.fusion, value[v], group, channel + v, to - a.target + v);
          }
          // Two neighbours along W leave as one store where rows keep them aligned.
          if (Axis2::slots % 2 == 0 && pairs) {
            if (r2 % 2 == 0) {
              float next = sum[r0][r1][(r2 + 1) % Axis2::slots][i] + bias[0];
              if constexpr (Fusion::runs)
                next = fused<Config>(a.fusion, next, group, channel, to - a.target + 1);
              store_two<Type>(to, value[0], next);
            }
          } else {
            store_row<Type>(to, value);
          }
        }
      }
  }
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::DirectConfig::threads)
    convt3d_direct(const convt3d::DirectConfig::Storage* source,
                   const convt3d::DirectConfig::Storage* weight,
                   const convt3d::DirectConfig::Storage* bias,
                   convt3d::DirectConfig::Storage* target, int source0, int source1, int source2,
                   int target0, int target1, int target2, int units0, int units1, int units2,
                   convt3d::int64_t stride_in, convt3d::int64_t stride_out,
                   convt3d::int64_t stride0, convt3d::int64_t stride1,
                   convt3d::int64_t stride2 CONVT3D_FUSION_PARAMETERS) {
  const convt3d::DirectArguments<convt3d::DirectConfig> arguments{
      source, {weight, stride_in, stride_out, stride0, stride1, stride2},
      bias,   target,
      {source0, source1, source2}, {target0, target1, target2},
      units0, units1, units2 CONVT3D_FUSION_ARGUMENT};
  convt3d::direct(arguments);
}
