// The compile-time description of one col2im kernel and of its packed weights. The macros are set
// by plan/col2im.py.
#pragma once
#include "device/arithmetic.cuh"
#include "epilogue/fusion.cuh"
#include "geometry/convolution.cuh"
#include "geometry/stacked_axis.cuh"
#include "load/box.cuh"

namespace convt3d {

struct Col2imConfig : Convolution {
  using Math = CONVT3D_MATH;
  static constexpr bool source_channels_last = CONVT3D_SOURCE_CHANNELS_LAST;
  static constexpr bool target_channels_last = CONVT3D_TARGET_CHANNELS_LAST;

  /// A gradient by input, at stride 1, is a forward pass with taps in reverse order and another
  /// padding, which the macros have: axes are those of a forward pass. Along axis 0, sums of a
  /// window of planes stay in registers; or, of few channels, the sources of all planes that a
  /// unit reads do.
  static constexpr bool keep_planes = CONVT3D_KEEP_PLANES;
  using Stacked0 =
      StackedAxis<true, kernel0, stride0, padding0, keep_planes ? 1 : dilation0, 1>;
  using Static0 = StaticAxis<true, kernel0, stride0, padding0, dilation0, 1>;
  using Axis1 = StaticAxis<true, kernel1, stride1, padding1, dilation1, 1>;
  using Axis2 = StaticAxis<true, kernel2, stride2, padding2, dilation2, 1>;
  static_assert(padding0 >= 0 && padding1 >= 0 && padding2 >= 0,
                "planes that no tap reaches have no step");
  static_assert(forward || stride0 * stride1 * stride2 == 1, "gradients are of stride 1");
  /// The tap of the weights.
  CONVT3D_CONSTEXPR static int own_tap(int tap, int kernel) {
    return forward ? tap : kernel - 1 - tap;
  }

  // Columns of a plane: (tap of axis 1, tap of axis 2, produced channel), the last one fastest.
  static constexpr int columns = kernel1 * kernel2 * target_channels;
  static constexpr int fragments = div_up(columns, 8);
  CONVT3D_CONSTEXPR static int column_of(int tap1, int tap2) {
    return (tap1 * kernel2 + tap2) * target_channels;
  }

  /// Neighbouring positions that a lane loads as one vector: rows of `vector` / 2 fragments.
  static constexpr int vector = CONVT3D_VECTOR;
  static constexpr int fragments_m = vector / 2;
  /// Whether rows of the source are made of whole vectors: both beginnings and lengths.
  static constexpr bool whole_rows = CONVT3D_WHOLE_ROWS;
  static_assert(vector == 2 || vector == 4, "a fragment has two rows of a lane");
  static constexpr int warps = CONVT3D_WARPS;
  static constexpr int threads = 32 * warps;
  static constexpr int warp_positions = 8 * vector;
  static constexpr int positions = warps * warp_positions;
  static constexpr int resident = CONVT3D_RESIDENT;

  // A matrix step is eight words of channels deep. What a lane loads at once are the words of one
  // step, or of two where channels are neighbours in memory; so many loads are in flight, and so
  // many rounds of them make up all channels.
  static constexpr int load_steps = source_channels_last ? 2 : 1;
  static constexpr int load_channels = load_steps * 8 * Type::channels_per_word;
  static constexpr int batch = CONVT3D_BATCH;
  static constexpr int rounds = CONVT3D_ROUNDS;
  static constexpr int steps = rounds * batch * load_steps;
  static_assert(!keep_planes || rounds == 1, "planes that stay are loaded at once");
  static_assert(rounds * batch * load_channels >= source_channels, "all channels are loaded");
  static constexpr bool whole_loads = rounds * batch * load_channels == source_channels;
  /// The word of a channel that row `t` + 4 * `half` of a step's weights belongs to.
  CONVT3D_CONSTEXPR static int word_of(int step, int t, int half) {
    return load_steps == 2 ? step / 2 * 16 + 4 * t + 2 * (step % 2) + half : 8 * step + t + 4 * half;
  }

  // Packed weights: [group][step][tap of axis 0][fragment][lane][words].
  static constexpr int lane_words = 2 * Math::words_per_value;
  static constexpr int fragment_bytes = 32 * lane_words * 4;
  static constexpr int tap_bytes = fragments * fragment_bytes;
  static constexpr int step_bytes = kernel0 * tap_bytes;
  static constexpr int weight_bytes = steps * step_bytes;

  // Shared memory: weights of a group, then two buffers [column][position] of a finished plane.
  static constexpr int pitch = positions + 4;  // columns 0, 2, 4, 6 begin eight banks apart
  static_assert(pitch % 16 == 4, "lanes of a quarter of a warp store to different banks");
  static constexpr int buffer_bytes = columns * pitch * 4;
};

}  // namespace convt3d
