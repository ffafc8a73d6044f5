// The emulator's intrinsics: the names and signatures of the package's kernels/intrinsics.cuh,
// without inline assembly. Collective functions take one more, defaulted, argument: the call's
// place in the source, by which divergent calls are told apart and reported. cuda.cuh comes first.
#pragma once

#define CONVT3D_DEVICE __device__ __forceinline__
#define CONVT3D_CONSTEXPR __host__ __device__ constexpr

namespace convt3d {

using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int64_t = long long;

// ---------------------------------------------------------------- bits and conversions

CONVT3D_DEVICE uint32_t bits_of(float value) { return __float_as_uint(value); }
CONVT3D_DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }

CONVT3D_DEVICE uint32_t round_tf32(float value) { return emulator::round_tf32(value); }
constexpr uint32_t ties_away = 0x1000u, ties_to_zero = 0x0fffu;
CONVT3D_DEVICE uint32_t round_tf32_operand(uint32_t bits, uint32_t half = ties_away) {
  return uint32_t(max(int(bits + half), int(bits)));
}
CONVT3D_DEVICE float float_from_f16(uint16_t bits) { return emulator::float_from_f16(bits); }
CONVT3D_DEVICE float float_from_bf16(uint16_t bits) { return float_of(uint32_t(bits) << 16); }
CONVT3D_DEVICE uint16_t f16_from_float(float value) { return emulator::f16_from_float(value); }
CONVT3D_DEVICE uint16_t bf16_from_float(float value) { return emulator::bf16_from_float(value); }
CONVT3D_DEVICE uint32_t pack_f16(float low, float high) {
  return uint32_t(f16_from_float(low)) | uint32_t(f16_from_float(high)) << 16;
}
CONVT3D_DEVICE uint32_t pack_bf16(float low, float high) {
  return uint32_t(bf16_from_float(low)) | uint32_t(bf16_from_float(high)) << 16;
}
CONVT3D_DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector & 0xffffu);
}
CONVT3D_DEVICE uint64_t join_words(uint32_t low, uint32_t high) {
  return uint64_t(high) << 32 | low;
}

// ---------------------------------------------------------------- shared memory

CONVT3D_DEVICE uint32_t own_address(uint32_t address) { return address; }
CONVT3D_DEVICE int64_t own_offset(int64_t offset) { return offset; }
CONVT3D_DEVICE float own_value(float value) { return value; }
CONVT3D_DEVICE uint32_t shared_address(const void* pointer) {
  return emulator::shared_address(pointer);
}
CONVT3D_DEVICE uint32_t load_shared(uint32_t address) {
  uint32_t word;
  emulator::shared_read(address, &word, 4);
  return word;
}
CONVT3D_DEVICE uint32_t load_shared_half(uint32_t address) {
  uint16_t half;
  emulator::shared_read(address, &half, 2);
  return half;
}
CONVT3D_DEVICE void load_shared(uint32_t address, uint32_t& a, uint32_t& b) {
  uint32_t words[2];
  emulator::shared_read(address, words, 8);
  a = words[0];
  b = words[1];
}
CONVT3D_DEVICE void load_shared(uint32_t address, uint32_t& a, uint32_t& b, uint32_t& c,
                                uint32_t& d) {
  uint32_t words[4];
  emulator::shared_read(address, words, 16);
  a = words[0];
  b = words[1];
  c = words[2];
  d = words[3];
}
CONVT3D_DEVICE void store_shared(uint32_t address, uint16_t a) {
  emulator::shared_write(address, &a, 2);
}
CONVT3D_DEVICE void store_shared(uint32_t address, float a) {
  emulator::shared_write(address, &a, 4);
}
CONVT3D_DEVICE void store_shared(uint32_t address, uint32_t a) {
  emulator::shared_write(address, &a, 4);
}
CONVT3D_DEVICE void store_shared_half(uint32_t address, uint16_t a) {
  emulator::shared_write(address, &a, 2);
}
CONVT3D_DEVICE void store_shared(uint32_t address, uint32_t a, uint32_t b) {
  const uint32_t words[2] = {a, b};
  emulator::shared_write(address, words, 8);
}
CONVT3D_DEVICE void store_shared(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t words[4] = {a, b, c, d};
  emulator::shared_write(address, words, 16);
}

CONVT3D_DEVICE void store_shared_above(uint32_t address, uint32_t a, int count, int least) {
  if (count > least) store_shared(address, a);
}
CONVT3D_DEVICE void store_shared_half_above(uint32_t address, uint16_t a, int count, int least) {
  if (count > least) store_shared_half(address, a);
}
CONVT3D_DEVICE void store_shared_first(uint32_t address, uint32_t a, uint32_t b, int count) {
  if (count > 1)
    store_shared(address, a, b);
  else if (count == 1)
    store_shared(address, a);
}
CONVT3D_DEVICE void store_shared_halves_first(uint32_t address, uint32_t both, int count) {
  if (count > 1)
    store_shared(address, both);
  else if (count == 1)
    store_shared_half(address, uint16_t(both));
}

CONVT3D_DEVICE void load_matrix_x4(uint32_t address, uint32_t (&r)[4],
                                   emulator::Site site = emulator::Site::here()) {
  uint32_t words[4];
  emulator::load_matrix(address, words, 4, false, site);
  for (int i = 0; i < 4; ++i) r[i] = words[i];
}
CONVT3D_DEVICE void load_matrix_x4_transposed(uint32_t address, uint32_t (&r)[4],
                                              emulator::Site site = emulator::Site::here()) {
  uint32_t words[4];
  emulator::load_matrix(address, words, 4, true, site);
  for (int i = 0; i < 4; ++i) r[i] = words[i];
}
CONVT3D_DEVICE void load_matrix_x2_transposed(uint32_t address, uint32_t (&r)[2],
                                              emulator::Site site = emulator::Site::here()) {
  uint32_t words[2];
  emulator::load_matrix(address, words, 2, true, site);
  for (int i = 0; i < 2; ++i) r[i] = words[i];
}

// ---------------------------------------------------------------- global memory

CONVT3D_DEVICE void store_streaming(float* pointer, float value) { __stcs(pointer, value); }
CONVT3D_DEVICE void store_streaming(float2* pointer, float2 value) { __stcs(pointer, value); }
CONVT3D_DEVICE void store_streaming(float4* pointer, float4 value) { __stcs(pointer, value); }
CONVT3D_DEVICE void store_streaming(uint16_t* pointer, uint16_t value) { __stcs(pointer, value); }
CONVT3D_DEVICE void store_streaming(uint32_t* pointer, uint32_t value) { __stcs(pointer, value); }
CONVT3D_DEVICE void store_streaming(uint2* pointer, uint2 value) { __stcs(pointer, value); }
CONVT3D_DEVICE void store_streaming(uint4* pointer, uint4 value) { __stcs(pointer, value); }

// ---------------------------------------------------------------- asynchronous copies (sm_80)

template <int Bytes>
CONVT3D_DEVICE void async_copy(uint32_t destination, const void* source, bool valid) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async moves 4, 8 or 16 bytes");
  emulator::async_copy(destination, source, Bytes, valid);
}
CONVT3D_DEVICE void async_commit() { emulator::async_commit(); }
template <int Pending>
CONVT3D_DEVICE void async_wait() {
  emulator::async_wait(Pending);
}

/// One launch runs after another here, but what a dependent one touches before it waits is checked.
CONVT3D_DEVICE void grid_dependency_launch() {}
CONVT3D_DEVICE void grid_dependency_wait() { emulator::dependency_wait(); }

// ---------------------------------------------------------------- warp matrix products (sm_80)

// Operands are copied, so that the kernel's own arrays stay local to it.
// A product of depth 8 of 16-bit values is one of depth 16 whose second half is zero.
#define CONVT3D_EMULATED_MMA(name, type, halves)                                             \
  CONVT3D_DEVICE void name(float (&c)[4], const uint32_t (&a)[2 * halves],                   \
                           const uint32_t (&b)[halves],                                      \
                           emulator::Site site = emulator::Site::here()) {                   \
    float sum[4] = {c[0], c[1], c[2], c[3]};                                                 \
    uint32_t left[4] = {}, right[2] = {};                                                    \
    for (int i = 0; i < 2 * halves; ++i) left[i] = a[i];                                     \
    for (int i = 0; i < halves; ++i) right[i] = b[i];                                        \
    emulator::mma(type, sum, left, right, site);                                             \
    for (int i = 0; i < 4; ++i) c[i] = sum[i];                                               \
  }
CONVT3D_EMULATED_MMA(mma_tf32, emulator::Operand::tf32, 2)
CONVT3D_EMULATED_MMA(mma_f16, emulator::Operand::f16, 2)
CONVT3D_EMULATED_MMA(mma_bf16, emulator::Operand::bf16, 2)
CONVT3D_EMULATED_MMA(mma_f16_k8, emulator::Operand::f16, 1)
CONVT3D_EMULATED_MMA(mma_bf16_k8, emulator::Operand::bf16, 1)
#undef CONVT3D_EMULATED_MMA

}  // namespace convt3d
