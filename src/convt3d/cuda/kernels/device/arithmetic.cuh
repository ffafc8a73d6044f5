// The arithmetic of a product: how an operand word is prepared, and what one m16n8 step does.
//
//   MathTf32   operands rounded to nearest TF32, one product
//   MathIeee   each operand split in two TF32 parts, three products (the small x small one is below
//              float32's last bit); summed outside the tensor core, whose adder truncates
//   MathF16x3  operands scaled, then split in two float16 parts: three products for the price of one
//              and a half of TF32 (rows/kernel.cu)
//   Math16     float16 or bfloat16 pairs, float32 accumulation
//   Math16K8   the same, eight channels a step instead of sixteen
#pragma once
#include "device/types.cuh"

namespace convt3d {

struct MathTf32 {
  static constexpr int step_words = 8;  // depth of a product, in words of operands
  static constexpr int words_per_value = 1;
  static constexpr int chain = 1;  // products of a sum that are added up before they join it
  struct A { uint32_t word[4]; };
  struct B { uint32_t word[2]; };
  CONVT3D_DEVICE static void prepare(A& a, const uint32_t (&raw)[4], uint32_t half = ties_away) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a.word[i] = round_tf32_operand(raw[i], half);
  }
  CONVT3D_DEVICE static void prepare(B& b, const uint32_t (&raw)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) b.word[i] = round_tf32_operand(raw[i]);
  }
  /// B packed beforehand, in shared memory: 2 words a lane.
  CONVT3D_DEVICE static void load(B& b, uint32_t address) {
    load_shared(address, b.word[0], b.word[1]);
  }
  CONVT3D_DEVICE static void multiply_add(float (&c)[4], const A& a, const B& b) {
    mma_tf32(c, a.word, b.word);
  }
};

struct MathIeee {
  static constexpr int step_words = 8;
  static constexpr int words_per_value = 2;
  // Up to three products cost a tenth more error than one alone; more of them, a third and up.
  static constexpr int chain = 3;
  struct A { uint32_t big[4], small[4]; };
  struct B { uint32_t big[2], small[2]; };
  /// Three instructions. The difference is exact; products ignore its low bits, which costs at
  /// most the last bit of a float32, as rounding it would.
  CONVT3D_DEVICE static void split(uint32_t raw, uint32_t& big, uint32_t& small,
                                   uint32_t half = ties_away) {
    big = (raw + half) & 0xffffe000u;
    small = bits_of(float_of(raw) - float_of(big));
  }
  CONVT3D_DEVICE static void prepare(A& a, const uint32_t (&raw)[4], uint32_t half = ties_away) {
#pragma unroll
    for (int i = 0; i < 4; ++i) split(raw[i], a.big[i], a.small[i], half);
  }
  CONVT3D_DEVICE static void prepare(B& b, const uint32_t (&raw)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) split(raw[i], b.big[i], b.small[i]);
  }
  CONVT3D_DEVICE static void load(B& b, uint32_t address) {
    load_shared(address, b.big[0], b.big[1], b.small[0], b.small[1]);
  }
  CONVT3D_DEVICE static void multiply_add(float (&c)[4], const A& a, const B& b) {
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    mma_tf32(sum, a.small, b.big);
    mma_tf32(sum, a.big, b.small);
    mma_tf32(sum, a.big, b.big);
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += sum[i];
  }
  /// The three products of a pair of operands, to be called in this order for all pairs of a
  /// chain: the sum is small until the last.
  CONVT3D_DEVICE static void multiply_part(int part, float (&sum)[4], const A& a, const B& b) {
    mma_tf32(sum, part == 0 ? a.small : a.big, part == 1 ? b.small : b.big);
  }
};

/// Of operands scaled so that the largest lies below 2^15: x becomes `high`, x rounded to
/// float16, and `low` = x - high, of which float16 keeps 11 bits: together x to within 2^-23 of
/// itself.
struct MathF16x3 {
  static constexpr float low_scale = 2048.f;  // keeps low parts of sources from vanishing
  CONVT3D_DEVICE static float low_of(float value) {
    return value - float_from_f16(f16_from_float(value));
  }
  /// The biased exponent of the largest of some values out of their bits: of the finite ones, and
  /// not too small to scale by. Starts from 0.
  CONVT3D_DEVICE static int larger(int largest, uint32_t bits) {
    return max(int((bits & 0x7fffffffu) + 0x00800000u), largest);
  }
  CONVT3D_DEVICE static int exponent(int largest) { return max((largest >> 23) - 1, 77); }
  /// Brings values of that exponent to [2^14, 2^15), and back.
  CONVT3D_DEVICE static float scale(int exponent) { return float_of(uint32_t(268 - exponent) << 23); }
  CONVT3D_DEVICE static float unscale(int exponent) { return float_of(uint32_t(exponent - 14) << 23); }
};
template <typename Math>
constexpr bool is_f16x3 = false;
template <>
constexpr bool is_f16x3<MathF16x3> = true;

template <typename Type>
struct Math16 {
  static constexpr int step_words = 8;
  static constexpr int words_per_value = 1;
  static constexpr int chain = 1;
  struct A { uint32_t word[4]; };
  struct B { uint32_t word[2]; };
  CONVT3D_DEVICE static void prepare(A& a, const uint32_t (&raw)[4], uint32_t = ties_away) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a.word[i] = raw[i];
  }
  CONVT3D_DEVICE static void prepare(B& b, const uint32_t (&raw)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) b.word[i] = raw[i];
  }
  CONVT3D_DEVICE static void load(B& b, uint32_t address) {
    load_shared(address, b.word[0], b.word[1]);
  }
  CONVT3D_DEVICE static void multiply_add(float (&c)[4], const A& a, const B& b);
};
template <>
CONVT3D_DEVICE void Math16<Float16>::multiply_add(float (&c)[4], const A& a, const B& b) {
  mma_f16(c, a.word, b.word);
}
template <>
CONVT3D_DEVICE void Math16<BFloat16>::multiply_add(float (&c)[4], const A& a, const B& b) {
  mma_bf16(c, a.word, b.word);
}

template <typename Type>
struct Math16K8 {
  static constexpr int step_words = 4;
  static constexpr int words_per_value = 1;
  static constexpr int chain = 1;
  struct A { uint32_t word[2]; };
  struct B { uint32_t word[1]; };
  CONVT3D_DEVICE static void prepare(A& a, const uint32_t (&raw)[2], uint32_t = ties_away) {
    a.word[0] = raw[0];
    a.word[1] = raw[1];
  }
  CONVT3D_DEVICE static void load(B& b, uint32_t address) { b.word[0] = load_shared(address); }
  CONVT3D_DEVICE static void multiply_add(float (&c)[4], const A& a, const B& b);
};
template <>
CONVT3D_DEVICE void Math16K8<Float16>::multiply_add(float (&c)[4], const A& a, const B& b) {
  mma_f16_k8(c, a.word, b.word);
}
template <>
CONVT3D_DEVICE void Math16K8<BFloat16>::multiply_add(float (&c)[4], const A& a, const B& b) {
  mma_bf16_k8(c, a.word, b.word);
}

}  // namespace convt3d
