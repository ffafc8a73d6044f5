// Conversions, as the cvt instructions round.
#include <cstring>

#include "machine.hpp"

namespace emulator {
namespace {
unsigned bits_of(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
float float_of(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
bool is_nan(unsigned bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

/// bits / 2^shift, to nearest, ties to even.
unsigned shift_to_nearest_even(unsigned bits, int shift) {
  if (shift > 31) return 0;
  const unsigned quotient = bits >> shift, rest = bits & ((1u << shift) - 1);
  const unsigned half = 1u << (shift - 1);
  return quotient + (rest > half || (rest == half && (quotient & 1)));
}
}  // namespace

/// cvt.rn.tf32.f32: 10 bits of mantissa, ties to even. Kernels that are compiled for older GPUs than
/// sm_90 round ties away from zero there; here they round as these do.
unsigned round_tf32(float value) {
  const unsigned bits = bits_of(value);
  if (is_nan(bits)) return 0x7fffe000u;
  return shift_to_nearest_even(bits & 0x7fffffffu, 13) << 13 | (bits & 0x80000000u);
}

unsigned short bf16_from_float(float value) {
  const unsigned bits = bits_of(value);
  if (is_nan(bits)) return 0x7fff;
  return (unsigned short)shift_to_nearest_even(bits, 16);
}

unsigned short f16_from_float(float value) {
  const unsigned bits = bits_of(value);
  if (is_nan(bits)) return 0x7fff;
  const unsigned sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  const int exponent = int(magnitude >> 23) - 127;
  if (exponent > 15) return (unsigned short)(sign | 0x7c00u);
  unsigned rounded;
  if (exponent >= -14) {  // normal: rebias, and let a carry run into the exponent
    rounded = shift_to_nearest_even(magnitude - (112u << 23), 13);
  } else {
    const unsigned mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    rounded = magnitude < 0x00800000u ? 0 : shift_to_nearest_even(mantissa, -exponent - 1);
  }
  return (unsigned short)(sign | rounded);
}

float float_from_f16(unsigned short bits) {
  const unsigned sign = unsigned(bits & 0x8000u) << 16;
  unsigned exponent = bits >> 10 & 31, mantissa = bits & 0x3ffu;
  if (exponent == 31) return float_of(mantissa ? 0x7fffffffu : sign | 0x7f800000u);
  if (exponent == 0) {
    const float magnitude = float(mantissa) * 0x1p-24f;
    return float_of(sign | bits_of(magnitude));
  }
  return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

}  // namespace emulator
