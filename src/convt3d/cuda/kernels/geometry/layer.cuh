// The window of the layer that a kernel is compiled for. Axes are D, H, W, unless the plan numbers
// them in another order.
#pragma once
#include "geometry/operands.cuh"

namespace convt3d {

struct Layer : Operands {
  static constexpr int kernel0 = CONVT3D_KERNEL0;
  static constexpr int kernel1 = CONVT3D_KERNEL1;
  static constexpr int kernel2 = CONVT3D_KERNEL2;
  static constexpr int stride0 = CONVT3D_STRIDE0;
  static constexpr int stride1 = CONVT3D_STRIDE1;
  static constexpr int stride2 = CONVT3D_STRIDE2;
  static constexpr int padding0 = CONVT3D_PADDING0;
  static constexpr int padding1 = CONVT3D_PADDING1;
  static constexpr int padding2 = CONVT3D_PADDING2;
  static constexpr int dilation0 = CONVT3D_DILATION0;
  static constexpr int dilation1 = CONVT3D_DILATION1;
  static constexpr int dilation2 = CONVT3D_DILATION2;
};

}  // namespace convt3d
