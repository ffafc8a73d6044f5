// One weight of a gather's matrix, whatever the operation: what every packing kernel reads.
#pragma once
#include "device/types.cuh"

namespace convt3d {

template <typename Config>
struct Packer {
  using Storage = typename Config::Storage;
  const Storage* weight;
  int64_t stride_in, stride_out, stride0, stride1, stride2;

  /// One weight: source channel c and produced channel j of a group, kernel index (k0, k1, k2).
  CONVT3D_DEVICE Storage at(int group, int c, int j, int k0, int k1, int k2) const {
    if (c >= Config::source_channels || j >= Config::target_channels) return Storage(0);
    const int in = Config::forward ? group * Config::source_channels + c
                                   : group * Config::target_channels + j;
    const int out = Config::forward ? j : c;
    return weight[in * stride_in + out * stride_out + k0 * stride0 + k1 * stride1 + k2 * stride2];
  }

  /// The word of a tensor-core operand that begins with channel c: rounded to TF32, or 16-bit
  /// channels c and c + 1.
  CONVT3D_DEVICE uint32_t word(int group, int c, int j, int k0, int k1, int k2) const {
    return word(group, c, c + 1, j, k0, k1, k2);
  }
  /// The same, of 16-bit channels c and `next`.
  CONVT3D_DEVICE uint32_t word(int group, int c, int next, int j, int k0, int k1, int k2) const {
    using Type = typename Config::Type;
    const Storage low = at(group, c, j, k0, k1, k2);
    if constexpr (Type::channels_per_word == 1)
      return round_tf32(low);
    else
      return Type::word(low, at(group, next, j, k0, k1, k2));
  }
};

}  // namespace convt3d
