// PTX wrappers: the only file with inline assembly. Every function is one instruction, or one
// wait loop, with the semantics of the PTX ISA manual; kernels are written in terms of these
// alone, so that another implementation of this header can run them elsewhere.
//
// Names of fragment registers follow the PTX manual: with lane = 4 * g + t (g in 0..7, t in
// 0..3), an m16n8 accumulator holds c0,c1 = (row g, columns 2t, 2t+1) and c2,c3 = (row g+8, same
// columns).
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

/// Round to TF32, NaN and infinity kept: ties to even, as TMA and cuDNN do; away from zero where
/// there is no such instruction.
CONVT3D_DEVICE uint32_t round_tf32(float value) {
  uint32_t bits;
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
#endif
  return bits;
}
inline constexpr uint32_t ties_away = 0x1000u, ties_to_zero = 0x0fffu;
/// For an operand of a product, which ignores the low 13 bits: they are left as they fall. One
/// instruction on sm_90, faster than that of round_tf32; ties away from zero. max keeps NaN (of
/// bits below 0xfffff000).
CONVT3D_DEVICE uint32_t round_tf32_operand(uint32_t bits, uint32_t half = ties_away) {
  return uint32_t(max(int(bits + half), int(bits)));
}

CONVT3D_DEVICE float float_from_f16(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
CONVT3D_DEVICE float float_from_bf16(uint16_t bits) { return float_of(uint32_t(bits) << 16); }

CONVT3D_DEVICE uint16_t f16_from_float(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
CONVT3D_DEVICE uint16_t bf16_from_float(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

/// Two floats to one packed word, round to nearest even; `low` fills bits 0..15.
CONVT3D_DEVICE uint32_t pack_f16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
CONVT3D_DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

/// Pick four bytes out of {high, low}; see PTX prmt.b32, default mode.
CONVT3D_DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t word;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(low), "r"(high), "r"(selector));
  return word;
}
/// Two words as one of 64 bits. In plain arithmetic constant parts of it become sums that carry.
CONVT3D_DEVICE uint64_t join_words(uint32_t low, uint32_t high) {
  uint64_t joined;
  asm("mov.b64 %0, {%1, %2};" : "=l"(joined) : "r"(low), "r"(high));
  return joined;
}

// ---------------------------------------------------------------- shared memory

/// The same address, worked out here and once, not anew in each branch that uses it.
CONVT3D_DEVICE uint32_t own_address(uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}
CONVT3D_DEVICE int64_t own_offset(int64_t offset) {
  asm volatile("" : "+l"(offset));
  return offset;
}
/// The same value, copied to a register here, not chosen among others where it is used.
CONVT3D_DEVICE float own_value(float value) {
  asm volatile("" : "+f"(value));
  return value;
}
/// Address of a shared-memory object in the 32-bit shared window.
CONVT3D_DEVICE uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

CONVT3D_DEVICE uint32_t load_shared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}
CONVT3D_DEVICE uint32_t load_shared_half(uint32_t address) {
  uint32_t half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(half) : "r"(address));
  return half;
}
CONVT3D_DEVICE void load_shared(uint32_t address, uint32_t& a, uint32_t& b) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(address));
}
CONVT3D_DEVICE void load_shared(uint32_t address, uint32_t& a, uint32_t& b, uint32_t& c,
                                uint32_t& d) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(address));
}
CONVT3D_DEVICE void store_shared(uint32_t address, uint16_t a) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(a) : "memory");
}
CONVT3D_DEVICE void store_shared(uint32_t address, float a) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(a) : "memory");
}
CONVT3D_DEVICE void store_shared(uint32_t address, uint32_t a) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(a) : "memory");
}
CONVT3D_DEVICE void store_shared_half(uint32_t address, uint16_t a) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(a) : "memory");
}
CONVT3D_DEVICE void store_shared(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}
CONVT3D_DEVICE void store_shared(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

/// The same if `count` is above `least`: without a branch, and compared here, not kept in a
/// predicate.
CONVT3D_DEVICE void store_shared_above(uint32_t address, uint32_t a, int count, int least) {
  asm volatile("{\n.reg .pred p;\nsetp.gt.s32 p, %2, %3;\n@p st.shared.u32 [%0], %1;\n}" ::"r"(
                   address),
               "r"(a), "r"(count), "r"(least)
               : "memory");
}
CONVT3D_DEVICE void store_shared_half_above(uint32_t address, uint16_t a, int count, int least) {
  asm volatile("{\n.reg .pred p;\nsetp.gt.s32 p, %2, %3;\n@p st.shared.u16 [%0], %1;\n}" ::"r"(
                   address),
               "h"(a), "r"(count), "r"(least)
               : "memory");
}
/// The first `count` of two words: both, one or none.
CONVT3D_DEVICE void store_shared_first(uint32_t address, uint32_t a, uint32_t b, int count) {
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.gt.s32 p, %3, 1;\nsetp.eq.s32 q, %3, 1;\n"
      "@p st.shared.v2.u32 [%0], {%1, %2};\n@q st.shared.u32 [%0], %1;\n}" ::"r"(address),
      "r"(a), "r"(b), "r"(count)
      : "memory");
}
/// The same of the halves of a word.
CONVT3D_DEVICE void store_shared_halves_first(uint32_t address, uint32_t both, int count) {
  asm volatile(
      "{\n.reg .pred p, q;\n.reg .b16 low;\nsetp.gt.s32 p, %2, 1;\nsetp.eq.s32 q, %2, 1;\n"
      "cvt.u16.u32 low, %1;\n@p st.shared.u32 [%0], %1;\n@q st.shared.u16 [%0], low;\n}" ::"r"(
          address),
      "r"(both), "r"(count)
      : "memory");
}

/// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8;
/// lane (g, t) receives word t of row g of each matrix.
CONVT3D_DEVICE void load_matrix_x4(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
/// Four transposed 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of
/// matrix l / 8; lane (g, t) receives elements (2t, g) and (2t+1, g) of each matrix.
CONVT3D_DEVICE void load_matrix_x4_transposed(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
CONVT3D_DEVICE void load_matrix_x2_transposed(uint32_t address, uint32_t (&r)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address));
}

// ---------------------------------------------------------------- global memory

/// Streaming stores: output is written once and not read again by the kernel.
CONVT3D_DEVICE void store_streaming(float* pointer, float value) { __stcs(pointer, value); }
CONVT3D_DEVICE void store_streaming(float2* pointer, float2 value) { __stcs(pointer, value); }
CONVT3D_DEVICE void store_streaming(float4* pointer, float4 value) { __stcs(pointer, value); }
CONVT3D_DEVICE void store_streaming(uint16_t* pointer, uint16_t value) { __stcs(pointer, value); }
CONVT3D_DEVICE void store_streaming(uint32_t* pointer, uint32_t value) { __stcs(pointer, value); }
CONVT3D_DEVICE void store_streaming(uint2* pointer, uint2 value) { __stcs(pointer, value); }
CONVT3D_DEVICE void store_streaming(uint4* pointer, uint4 value) { __stcs(pointer, value); }

// ---------------------------------------------------------------- asynchronous copies (sm_80)

/// Copy `Bytes` (4, 8 or 16) to shared memory; where `valid` is false write zeros and read
/// nothing. Both addresses are aligned to `Bytes`. Visible after async_wait and a barrier.
template <int Bytes>
CONVT3D_DEVICE void async_copy(uint32_t destination, const void* source, bool valid) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async moves 4, 8 or 16 bytes");
  const int read = valid ? Bytes : 0;
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
                 "r"(read)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(destination), "l"(source),
                 "n"(Bytes), "r"(read)
                 : "memory");
  }
}
CONVT3D_DEVICE void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Wait until at most `Pending` of this thread's most recent groups are unfinished.
template <int Pending>
CONVT3D_DEVICE void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// ---------------------------------------------------------------- overlapping launches (sm_90)
// A launch that is marked `dependent` may start while the one before it runs. Before sm_90, and for
// any other launch, these do nothing.

/// Lets the next kernel of the stream start once every block has come here.
CONVT3D_DEVICE void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// Waits until the kernel before has ended and all that it wrote is visible.
CONVT3D_DEVICE void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---------------------------------------------------------------- warp matrix products (sm_80)

CONVT3D_DEVICE void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
CONVT3D_DEVICE void mma_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
CONVT3D_DEVICE void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
CONVT3D_DEVICE void mma_f16_k8(float (&c)[4], const uint32_t (&a)[2], const uint32_t (&b)[1]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}
CONVT3D_DEVICE void mma_bf16_k8(float (&c)[4], const uint32_t (&a)[2], const uint32_t (&b)[1]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

}  // namespace convt3d
