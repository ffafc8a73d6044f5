// Activations of one float32 value. NaN passes through all of them, as it does in PyTorch. A result
// is within a few ulp of PyTorch's: exponentials are the accurate ones of CUDA's math library,
// quotients those of two ulp, whose denominators are 1 and more.
#pragma once

namespace convt3d {

CONVT3D_DEVICE float relu(float x) { return x < 0.f ? 0.f : x; }

CONVT3D_DEVICE float leaky_relu(float x, float slope) { return x > 0.f ? x : x * slope; }

CONVT3D_DEVICE float sigmoid(float x) { return __fdividef(1.f, 1.f + expf(-x)); }

CONVT3D_DEVICE float silu(float x) { return __fdividef(x, 1.f + expf(-x)); }

CONVT3D_DEVICE float gelu(float x) {
  constexpr float root_half = 0.70710678118654752440f;
  return x * 0.5f * (1.f + erff(x * root_half));
}

CONVT3D_DEVICE float gelu_tanh(float x) {
  // (1 + tanh(u)) / 2 is the sigmoid of 2u.
  constexpr float twice_root_2_by_pi = 1.59576912160573071176f, cubic = 0.044715f;
  const float twice = twice_root_2_by_pi * (x + cubic * (x * x * x));
  return __fdividef(x, 1.f + expf(-twice));
}

CONVT3D_DEVICE float hardswish(float x) {
  return x * fminf(fmaxf(x + 3.f, 0.f), 6.f) * (1.f / 6.f);
}

CONVT3D_DEVICE float mish(float x) {
  // tanh(log(1 + e)) is ((1 + e)^2 - 1) / ((1 + e)^2 + 1); 1 to rounding where e is large.
  const float e = expf(fminf(x, 20.f)), square = e * (e + 2.f);
  return x * __fdividef(square, square + 2.f);
}

/// Between two bounds; where the lower one is above the upper one, that one.
CONVT3D_DEVICE float clamp(const float& x, float low, float high) {
  // A comparison with NaN is false: NaN stays, of the value and of the bounds.
  const float above = x >= low || x != x ? x : low;
  return above <= high || above != above ? above : high;
}

}  // namespace convt3d
