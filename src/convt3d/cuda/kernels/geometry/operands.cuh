// The tensors of the operation that a kernel is compiled for. This header, geometry/layer.cuh and
// geometry/convolution.cuh are the only readers of the macros that schedule.py writes of a problem;
// the configuration of a kernel derives from one of their structs, and adds its tile.
#pragma once
#include "device/types.cuh"

namespace convt3d {

struct Operands {
  using Type = CONVT3D_TYPE;  // of device/types.cuh
  using Storage = typename Type::Storage;

  // Channels of a group: those that are summed over and those that are produced; in a gradient by
  // weight, those of x and of the output gradient.
  static constexpr int groups = CONVT3D_GROUPS;
  static constexpr int source_channels = CONVT3D_SOURCE_CHANNELS;
  static constexpr int target_channels = CONVT3D_TARGET_CHANNELS;
};

}  // namespace convt3d
