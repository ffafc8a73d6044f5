// Sums of many float32-grade products, added up in parts: each addition errs by what the sum so
// far is worth, so that one long chain of them errs most.
#pragma once
#include "device/types.cuh"

namespace convt3d {

/// Additions that a part has, about; sums of twice as many and less are one part.
constexpr int longest_part = 128;

/// What the parts of a thread's `count` sums add up to before the present one. It lies in local
/// memory: registers are full, and a part takes long.
template <int count>
struct EarlierParts {
  volatile float value[count];

  /// From what `sum` holds; the present part begins.
  CONVT3D_DEVICE void begin(float* sum) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      value[i] = sum[i];
      sum[i] = 0.f;
    }
  }
  /// The present part ends, the next one begins.
  CONVT3D_DEVICE void keep(float* sum) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      value[i] = value[i] + sum[i];
      sum[i] = 0.f;
    }
  }
  CONVT3D_DEVICE void join(float* sum) const {
#pragma unroll
    for (int i = 0; i < count; ++i) sum[i] += value[i];
  }
};

}  // namespace convt3d
