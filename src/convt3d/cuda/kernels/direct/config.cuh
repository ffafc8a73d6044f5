// The compile-time description of the CUDA-core kernels direct/conv.cu and depthwise/conv.cu.
#pragma once
#include "geometry/convolution.cuh"

namespace convt3d {

/// A StaticAxis of `Block` periods a unit, or a PhasedAxis where Block is 0.
template <bool Forward, int Kernel, int Stride, int Padding, int Dilation, int Block>
struct DirectAxis {
  using type = StaticAxis<Forward, Kernel, Stride, Padding, Dilation, Block>;
  static constexpr bool is_static = true;
};
template <bool Forward, int Kernel, int Stride, int Padding, int Dilation>
struct DirectAxis<Forward, Kernel, Stride, Padding, Dilation, 0> {
  using type = PhasedAxis<Forward, Kernel, Stride, Padding, Dilation>;
  static constexpr bool is_static = false;
};

struct DirectConfig : Convolution {
  static constexpr bool source_channels_last = CONVT3D_SOURCE_CHANNELS_LAST;
  static constexpr bool target_channels_last = CONVT3D_TARGET_CHANNELS_LAST;

  using Choice0 = DirectAxis<forward, kernel0, stride0, padding0, dilation0, CONVT3D_BLOCK0>;
  using Choice1 = DirectAxis<forward, kernel1, stride1, padding1, dilation1, CONVT3D_BLOCK1>;
  using Choice2 = DirectAxis<forward, kernel2, stride2, padding2, dilation2, CONVT3D_BLOCK2>;
  using Axis0 = typename Choice0::type;
  using Axis1 = typename Choice1::type;
  using Axis2 = typename Choice2::type;

  /// Produced channels of a thread, all of one group, and such blocks in the whole tensor.
  static constexpr int block_channels = CONVT3D_BLOCK_CHANNELS;
  static constexpr int blocks_per_group = div_up(target_channels, block_channels);
  /// Where a channel block lies: its (first) group, and its first channel within it.
  CONVT3D_DEVICE static int group_of(int block) { return block / blocks_per_group * packed; }
  CONVT3D_DEVICE static int first_of(int block) {
    return block % blocks_per_group * block_channels;
  }
  /// Groups of one channel that make up a block, where they do; else a block is of one group.
  static constexpr int packed = CONVT3D_PACKED;
  static_assert(packed == 1 || (packed == block_channels && groups % packed == 0 &&
                                source_channels == 1 && target_channels == 1),
                "packed groups have one channel");
  static constexpr int channel_blocks = groups / packed * blocks_per_group;
  /// Channels of a position that leave as one vector, where blocks are whole.
  static constexpr int channel_vector =
      target_channels_last && (packed > 1 || target_channels % block_channels == 0)
          ? largest_vector(block_channels, 4)
          : 1;
  /// Neighbouring threads that work on neighbouring channel blocks (the rest: on units).
  static constexpr int lanes = CONVT3D_LANES;
  static constexpr int threads = 128;
  static constexpr int taps = kernel0 * kernel1 * kernel2;
  /// Weights of the CTA's channel blocks are kept in shared memory where they fit.
  static constexpr bool weights_shared = CONVT3D_WEIGHTS_SHARED;
};

/// A layer's weights: data and strides of (C_in, C_out / groups, kD, kH, kW).
template <typename Storage>
struct WeightView {
  const Storage* data;
  int64_t stride_in, stride_out, stride0, stride1, stride2;
};

/// The weight that connects source channel c of its group with channel i of a channel block; 0
/// past the last channel.
template <typename Config>
CONVT3D_DEVICE float block_weight(const WeightView<typename Config::Storage>& view, int block, int c,
                                  int k0, int k1, int k2, int i) {
  const int group = Config::group_of(block) + (Config::packed > 1 ? i : 0);
  const int target = Config::first_of(block) + (Config::packed > 1 ? 0 : i);
  if (block >= Config::channel_blocks || target >= Config::target_channels) return 0.f;
  const int in = Config::forward ? group * Config::source_channels + c
                                 : group * Config::target_channels + target;
  const int out = Config::forward ? target : c;
  return Config::Type::load(__ldg(view.data + in * view.stride_in + out * view.stride_out +
                                  k0 * view.stride0 + k1 * view.stride1 + k2 * view.stride2));
}

}  // namespace convt3d
