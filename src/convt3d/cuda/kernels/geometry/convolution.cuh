// The convolution that a kernel is compiled for: forward, or the gradient by input.
#pragma once
#include "geometry/axis.cuh"
#include "geometry/layer.cuh"

namespace convt3d {

struct Convolution : Layer {
  static constexpr bool forward = CONVT3D_FORWARD;  // else the gradient by input
  static constexpr bool bias = CONVT3D_BIAS;

  /// Axes all of whose phases are unrolled, and axes whose phase is a run-time number.
  template <int Block = 1>
  using Static0 = StaticAxis<forward, kernel0, stride0, padding0, dilation0, Block>;
  template <int Block = 1>
  using Static1 = StaticAxis<forward, kernel1, stride1, padding1, dilation1, Block>;
  template <int Block = 1>
  using Static2 = StaticAxis<forward, kernel2, stride2, padding2, dilation2, Block>;
  using Phased0 = PhasedAxis<forward, kernel0, stride0, padding0, dilation0>;
  using Phased1 = PhasedAxis<forward, kernel1, stride1, padding1, dilation1>;
  using Phased2 = PhasedAxis<forward, kernel2, stride2, padding2, dilation2>;
};

}  // namespace convt3d
