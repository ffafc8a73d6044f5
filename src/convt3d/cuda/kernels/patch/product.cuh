// One kernel == stride layer as a matrix product: what ampere/patch/kernel.cu and patch/kernel.cu
// have in common. The macros are set by the plans.
//
// Without padding, every output position has exactly one tap, so both operations are plain matrix
// products whose rows are the *cells*: input positions, counted linearly over (D, H, W).
//
//   forward   k = C_in            columns = (C_out, slots of the stride box)
//   backward  k = (C_out, slots)  columns = C_in
//
// One dimension of the weight (C_in, C_out * slots) is k and the other the columns, as it lies in
// memory: nothing is packed. Where the tensor that has the slots is channels_last, their order is
// (slots, C_out).
//
// k is also (line, element): the `width` elements that are contiguous for one cell of the source.
// A line is a channel (forward, and backward of one slot), or a channel and a slot of D and H
// (backward, where the elements are the slots along W). channels_last sources count every k as a
// line.
#pragma once
#include "device/arithmetic.cuh"
#include "device/select.cuh"
#include "epilogue/fusion.cuh"
#include "geometry/operands.cuh"
#include "load/box.cuh"

namespace convt3d {

struct PatchProduct : Operands {
  using Math = CONVT3D_MATH;

  static constexpr bool forward = CONVT3D_FORWARD;
  static constexpr bool bias = CONVT3D_BIAS;
  static constexpr bool source_channels_last = CONVT3D_SOURCE_CHANNELS_LAST;
  static constexpr bool target_channels_last = CONVT3D_TARGET_CHANNELS_LAST;
  static constexpr int stride0 = CONVT3D_STRIDE0;
  static constexpr int stride1 = CONVT3D_STRIDE1;
  static constexpr int stride2 = CONVT3D_STRIDE2;
  static constexpr int slots = stride0 * stride1 * stride2;
  /// Channels of the tensor that has the slots.
  static constexpr int slot_channels = forward ? target_channels : source_channels;
  static constexpr bool slots_first = forward ? target_channels_last : source_channels_last;

  static constexpr int per_word = Type::channels_per_word;
  static constexpr int columns = forward ? target_channels * slots : target_channels;
  static constexpr int depth = forward ? source_channels : source_channels * slots;
  static constexpr int width = !forward && !source_channels_last ? stride2 : 1;
  static constexpr int lines = depth / width;
  /// Whether a line of a contiguous source is a channel, whose cells follow one another.
  static constexpr bool channel_lines = forward || (!source_channels_last && slots == 1);
  static constexpr int target_width = forward && !target_channels_last ? stride2 : 1;
};

}  // namespace convt3d
