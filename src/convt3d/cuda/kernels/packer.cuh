// One weight of a gather's matrix, whatever the operation: what every packing kernel reads.
#pragma once
#include "types.cuh"

namespace convt3d {

template <typename Config>
struct Packer {
  using Storage = typename Config::Storage;
  const Storage* weight;
  int64_t stride_in, stride_out, stride0, stride1, stride2;

  /// One weight: source channel c and column j of a group, kernel index (k0, k1, k2).
  CONVT3D_DEVICE Storage at(int group, int c, int j, int k0, int k1, int k2) const {
    if (c >= Config::source_channels || j >= Config::columns) return Storage(0);
    int target = j;
    if constexpr (Config::flat) {
      int slot;
      if constexpr (Config::target_channels_last) {
        slot = j / Config::target_channels;
        target = j % Config::target_channels;
      } else {
        slot = j % Config::flat_slots;
        target = j / Config::flat_slots;
      }
      k2 = slot % CONVT3D_STRIDE2;
      k1 = slot / CONVT3D_STRIDE2 % CONVT3D_STRIDE1;
      k0 = slot / (CONVT3D_STRIDE2 * CONVT3D_STRIDE1);
    }
    const int in = Config::forward ? group * Config::source_channels + c
                                   : group * Config::target_channels + target;
    const int out = Config::forward ? target : c;
    return weight[in * stride_in + out * stride_out + k0 * stride0 + k1 * stride1 + k2 * stride2];
  }
};

}  // namespace convt3d
