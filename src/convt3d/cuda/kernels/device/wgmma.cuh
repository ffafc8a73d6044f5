// Warpgroup matrix products of sm_90a: wgmma in every shape, its fences and descriptors, and
// stmatrix. PTX wrappers like those of device/ptx.cuh, each with a counterpart in the emulator.
#pragma once
#include "device/ptx.cuh"

namespace convt3d {

CONVT3D_DEVICE void store_matrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
CONVT3D_DEVICE void store_matrix_x4_transposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// ---------------------------------------------------------------- wgmma
// D (64 x N, float32) += A (64 x K) * B (K x N), K = 8 TF32 or 16 half values. Lane (g, t) of warp
// w holds d[4j], d[4j+1] = (row 16w + g, columns 8j + 2t, +1) and d[4j+2], d[4j+3] = row + 8.
// Operand registers and accumulators belong to the instruction until its group is waited for.

/// Before the first product, and after registers that products use were written or waited for.
CONVT3D_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Keeps what wrote these registers, and what reads them, on its side of the products between.
template <int N>
CONVT3D_DEVICE void wgmma_fence_registers(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
CONVT3D_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Pending>
CONVT3D_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/// An accumulator that is read after a wait: without it the compiler may merge what products left
/// with other values before the wait, and ptxas then serialises the products.
CONVT3D_DEVICE void wgmma_accumulated(float& value) { asm volatile("" : "+f"(value)::"memory"); }

/// A copy of an operand, in a register of its own. An assignment is none to the compiler:
/// products would read the register of `word` itself, which may then not be written while they
/// are in flight.
CONVT3D_DEVICE uint32_t wgmma_operand(uint32_t word) {
  uint32_t copy;
  asm volatile("mov.b32 %0, %1;" : "=r"(copy) : "r"(word) : "memory");
  return copy;
}

/// A K-major operand without swizzle, as core matrices of 8 rows of 16 bytes, 128 bytes together:
/// `depth_step` bytes from one to the next along K, `row_step` along M or N.
CONVT3D_DEVICE uint64_t matrix_descriptor(uint32_t address, uint32_t depth_step,
                                          uint32_t row_step) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(depth_step >> 4) << 16 |
         uint64_t(row_step >> 4) << 32;
}
/// A K-major operand with rows of 128 bytes under the 128-byte swizzle, 1024 bytes to eight rows.
CONVT3D_DEVICE uint64_t matrix_descriptor_128b(uint32_t address) {
  return uint64_t((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

/// An operand whose rows are of K, 64 elements of M or N each, under the 128-byte swizzle: 1024
/// bytes to eight rows, `block_step` to the next 64 elements.
CONVT3D_DEVICE uint64_t matrix_descriptor_128b_n_major(uint32_t address, uint32_t block_step) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(block_step >> 4) << 16 | 64ull << 32 |
         1ull << 62;
}

// The accumulators of N columns, as text and as operands: lists that grow by four registers.
#define CONVT3D_R4 "%0, %1, %2, %3"
#define CONVT3D_D4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define CONVT3D_R8 CONVT3D_R4 ", %4, %5, %6, %7"
#define CONVT3D_D8 CONVT3D_D4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define CONVT3D_R12 CONVT3D_R8 ", %8, %9, %10, %11"
#define CONVT3D_D12 CONVT3D_D8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define CONVT3D_R16 CONVT3D_R12 ", %12, %13, %14, %15"
#define CONVT3D_D16 CONVT3D_D12, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define CONVT3D_R20 CONVT3D_R16 ", %16, %17, %18, %19"
#define CONVT3D_D20 CONVT3D_D16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define CONVT3D_R24 CONVT3D_R20 ", %20, %21, %22, %23"
#define CONVT3D_D24 CONVT3D_D20, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define CONVT3D_R28 CONVT3D_R24 ", %24, %25, %26, %27"
#define CONVT3D_D28 CONVT3D_D24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define CONVT3D_R32 CONVT3D_R28 ", %28, %29, %30, %31"
#define CONVT3D_D32 CONVT3D_D28, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define CONVT3D_R36 CONVT3D_R32 ", %32, %33, %34, %35"
#define CONVT3D_D36 CONVT3D_D32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define CONVT3D_R40 CONVT3D_R36 ", %36, %37, %38, %39"
#define CONVT3D_D40 CONVT3D_D36, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define CONVT3D_R44 CONVT3D_R40 ", %40, %41, %42, %43"
#define CONVT3D_D44 CONVT3D_D40, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define CONVT3D_R48 CONVT3D_R44 ", %44, %45, %46, %47"
#define CONVT3D_D48 CONVT3D_D44, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define CONVT3D_R52 CONVT3D_R48 ", %48, %49, %50, %51"
#define CONVT3D_D52 CONVT3D_D48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define CONVT3D_R56 CONVT3D_R52 ", %52, %53, %54, %55"
#define CONVT3D_D56 CONVT3D_D52, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define CONVT3D_R60 CONVT3D_R56 ", %56, %57, %58, %59"
#define CONVT3D_D60 CONVT3D_D56, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define CONVT3D_R64 CONVT3D_R60 ", %60, %61, %62, %63"
#define CONVT3D_D64 CONVT3D_D60, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define CONVT3D_R68 CONVT3D_R64 ", %64, %65, %66, %67"
#define CONVT3D_D68 CONVT3D_D64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define CONVT3D_R72 CONVT3D_R68 ", %68, %69, %70, %71"
#define CONVT3D_D72 CONVT3D_D68, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define CONVT3D_R76 CONVT3D_R72 ", %72, %73, %74, %75"
#define CONVT3D_D76 CONVT3D_D72, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define CONVT3D_R80 CONVT3D_R76 ", %76, %77, %78, %79"
#define CONVT3D_D80 CONVT3D_D76, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define CONVT3D_R84 CONVT3D_R80 ", %80, %81, %82, %83"
#define CONVT3D_D84 CONVT3D_D80, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define CONVT3D_R88 CONVT3D_R84 ", %84, %85, %86, %87"
#define CONVT3D_D88 CONVT3D_D84, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define CONVT3D_R92 CONVT3D_R88 ", %88, %89, %90, %91"
#define CONVT3D_D92 CONVT3D_D88, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define CONVT3D_R96 CONVT3D_R92 ", %92, %93, %94, %95"
#define CONVT3D_D96 CONVT3D_D92, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define CONVT3D_R100 CONVT3D_R96 ", %96, %97, %98, %99"
#define CONVT3D_D100 CONVT3D_D96, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define CONVT3D_R104 CONVT3D_R100 ", %100, %101, %102, %103"
#define CONVT3D_D104 CONVT3D_D100, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define CONVT3D_R108 CONVT3D_R104 ", %104, %105, %106, %107"
#define CONVT3D_D108 CONVT3D_D104, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define CONVT3D_R112 CONVT3D_R108 ", %108, %109, %110, %111"
#define CONVT3D_D112 CONVT3D_D108, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define CONVT3D_R116 CONVT3D_R112 ", %112, %113, %114, %115"
#define CONVT3D_D116 CONVT3D_D112, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define CONVT3D_R120 CONVT3D_R116 ", %116, %117, %118, %119"
#define CONVT3D_D120 CONVT3D_D116, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define CONVT3D_R124 CONVT3D_R120 ", %120, %121, %122, %123"
#define CONVT3D_D124 CONVT3D_D120, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define CONVT3D_R128 CONVT3D_R124 ", %124, %125, %126, %127"
#define CONVT3D_D128 CONVT3D_D124, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

template <int N>
CONVT3D_DEVICE void wgmma_tf32_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b);
template <int N>
CONVT3D_DEVICE void wgmma_tf32_ss(float (&d)[N / 2], uint64_t a, uint64_t b);
/// D = A * B, whatever D held: the first product of a sum.
template <int N>
CONVT3D_DEVICE void wgmma_tf32_rs_first(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b);
template <int N>
CONVT3D_DEVICE void wgmma_tf32_ss_first(float (&d)[N / 2], uint64_t a, uint64_t b);
template <int N>
CONVT3D_DEVICE void wgmma_f16_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b);
/// The same, B by matrix_descriptor_128b_n_major.
template <int N>
CONVT3D_DEVICE void wgmma_f16_rs_n_major(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b);
template <int N>
CONVT3D_DEVICE void wgmma_bf16_rs_n_major(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b);
template <int N>
CONVT3D_DEVICE void wgmma_f16_ss_n_major(float (&d)[N / 2], uint64_t a, uint64_t b);
template <int N>
CONVT3D_DEVICE void wgmma_bf16_ss_n_major(float (&d)[N / 2], uint64_t a, uint64_t b);
template <int N>
CONVT3D_DEVICE void wgmma_f16_ss(float (&d)[N / 2], uint64_t a, uint64_t b);
template <int N>
CONVT3D_DEVICE void wgmma_bf16_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b);
template <int N>
CONVT3D_DEVICE void wgmma_bf16_ss(float (&d)[N / 2], uint64_t a, uint64_t b);

// A kernel may name the N that it uses: compiling all of them takes 0.2 s.
#ifndef CONVT3D_WGMMA_USES
#define CONVT3D_WGMMA_USES(n) 1
#endif
// `r` is the number of accumulators, N / 2; r0 .. r4 are the operand numbers that follow them.
#define CONVT3D_WGMMA(type, shape, suffix, transposed, n, r, r0, r1, r2, r3, r4)                  \
  template <>                                                                                     \
  CONVT3D_DEVICE void wgmma_##type##_rs<n>(float (&d)[r], const uint32_t (&a)[4], uint64_t b) {   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n shape ".f32" suffix " {" CONVT3D_R##r     \
                 "}, {%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 ", 1, 1, 1"                 \
                 transposed(, 0) ";"                                                              \
                 : CONVT3D_D##r                                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                           \
  }                                                                                               \
  template <>                                                                                     \
  CONVT3D_DEVICE void wgmma_##type##_ss<n>(float (&d)[r], uint64_t a, uint64_t b) {               \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n shape ".f32" suffix " {" CONVT3D_R##r     \
                 "}, %" #r0 ", %" #r1 ", 1, 1, 1" transposed(, 0, 0) ";"                          \
                 : CONVT3D_D##r                                                                   \
                 : "l"(a), "l"(b));                                                               \
  }
#define CONVT3D_WGMMA_FIRST(n, r, r0, r1, r2, r3, r4)                                             \
  template <>                                                                                     \
  CONVT3D_DEVICE void wgmma_tf32_rs_first<n>(float (&d)[r], const uint32_t (&a)[4], uint64_t b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k8.f32.tf32.tf32 {" CONVT3D_R##r         \
                 "}, {%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 ", 0, 1, 1;"                \
                 : CONVT3D_D##r                                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                           \
  }                                                                                               \
  template <>                                                                                     \
  CONVT3D_DEVICE void wgmma_tf32_ss_first<n>(float (&d)[r], uint64_t a, uint64_t b) {             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k8.f32.tf32.tf32 {" CONVT3D_R##r         \
                 "}, %" #r0 ", %" #r1 ", 0, 1, 1;"                                                \
                 : CONVT3D_D##r                                                                   \
                 : "l"(a), "l"(b));                                                               \
  }
#define CONVT3D_WGMMA_N_MAJOR(type, n, r, r0, r1, r2, r3, r4)                                     \
  template <>                                                                                     \
  CONVT3D_DEVICE void wgmma_##type##_rs_n_major<n>(float (&d)[r], const uint32_t (&a)[4],         \
                                                   uint64_t b) {                                  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type                \
                 " {" CONVT3D_R##r "}, {%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4           \
                 ", 1, 1, 1, 1;"                                                                  \
                 : CONVT3D_D##r                                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                           \
  }                                                                                               \
  template <>                                                                                     \
  CONVT3D_DEVICE void wgmma_##type##_ss_n_major<n>(float (&d)[r], uint64_t a, uint64_t b) {        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type                \
                 " {" CONVT3D_R##r "}, %" #r0 ", %" #r1 ", 1, 1, 1, 0, 1;"                        \
                 : CONVT3D_D##r                                                                   \
                 : "l"(a), "l"(b));                                                               \
  }
#define CONVT3D_NOTHING(...)
#define CONVT3D_TEXT_OF(...) #__VA_ARGS__
#define CONVT3D_WGMMA_TYPES(n, r, ...)                                                            \
  CONVT3D_WGMMA(tf32, "k8", ".tf32.tf32", CONVT3D_NOTHING, n, r, __VA_ARGS__)                     \
  CONVT3D_WGMMA_FIRST(n, r, __VA_ARGS__)                                                          \
  CONVT3D_WGMMA(f16, "k16", ".f16.f16", CONVT3D_TEXT_OF, n, r, __VA_ARGS__)                       \
  CONVT3D_WGMMA(bf16, "k16", ".bf16.bf16", CONVT3D_TEXT_OF, n, r, __VA_ARGS__)                     \
  CONVT3D_WGMMA_N_MAJOR(f16, n, r, __VA_ARGS__)                                                   \
  CONVT3D_WGMMA_N_MAJOR(bf16, n, r, __VA_ARGS__)
#if CONVT3D_WGMMA_USES(8)
CONVT3D_WGMMA_TYPES(8, 4, 4, 5, 6, 7, 8)
#endif
#if CONVT3D_WGMMA_USES(16)
CONVT3D_WGMMA_TYPES(16, 8, 8, 9, 10, 11, 12)
#endif
#if CONVT3D_WGMMA_USES(24)
CONVT3D_WGMMA_TYPES(24, 12, 12, 13, 14, 15, 16)
#endif
#if CONVT3D_WGMMA_USES(32)
CONVT3D_WGMMA_TYPES(32, 16, 16, 17, 18, 19, 20)
#endif
#if CONVT3D_WGMMA_USES(40)
CONVT3D_WGMMA_TYPES(40, 20, 20, 21, 22, 23, 24)
#endif
#if CONVT3D_WGMMA_USES(48)
CONVT3D_WGMMA_TYPES(48, 24, 24, 25, 26, 27, 28)
#endif
#if CONVT3D_WGMMA_USES(56)
CONVT3D_WGMMA_TYPES(56, 28, 28, 29, 30, 31, 32)
#endif
#if CONVT3D_WGMMA_USES(64)
CONVT3D_WGMMA_TYPES(64, 32, 32, 33, 34, 35, 36)
#endif
#if CONVT3D_WGMMA_USES(72)
CONVT3D_WGMMA_TYPES(72, 36, 36, 37, 38, 39, 40)
#endif
#if CONVT3D_WGMMA_USES(80)
CONVT3D_WGMMA_TYPES(80, 40, 40, 41, 42, 43, 44)
#endif
#if CONVT3D_WGMMA_USES(88)
CONVT3D_WGMMA_TYPES(88, 44, 44, 45, 46, 47, 48)
#endif
#if CONVT3D_WGMMA_USES(96)
CONVT3D_WGMMA_TYPES(96, 48, 48, 49, 50, 51, 52)
#endif
#if CONVT3D_WGMMA_USES(104)
CONVT3D_WGMMA_TYPES(104, 52, 52, 53, 54, 55, 56)
#endif
#if CONVT3D_WGMMA_USES(112)
CONVT3D_WGMMA_TYPES(112, 56, 56, 57, 58, 59, 60)
#endif
#if CONVT3D_WGMMA_USES(120)
CONVT3D_WGMMA_TYPES(120, 60, 60, 61, 62, 63, 64)
#endif
#if CONVT3D_WGMMA_USES(128)
CONVT3D_WGMMA_TYPES(128, 64, 64, 65, 66, 67, 68)
#endif
#if CONVT3D_WGMMA_USES(136)
CONVT3D_WGMMA_TYPES(136, 68, 68, 69, 70, 71, 72)
#endif
#if CONVT3D_WGMMA_USES(144)
CONVT3D_WGMMA_TYPES(144, 72, 72, 73, 74, 75, 76)
#endif
#if CONVT3D_WGMMA_USES(152)
CONVT3D_WGMMA_TYPES(152, 76, 76, 77, 78, 79, 80)
#endif
#if CONVT3D_WGMMA_USES(160)
CONVT3D_WGMMA_TYPES(160, 80, 80, 81, 82, 83, 84)
#endif
#if CONVT3D_WGMMA_USES(168)
CONVT3D_WGMMA_TYPES(168, 84, 84, 85, 86, 87, 88)
#endif
#if CONVT3D_WGMMA_USES(176)
CONVT3D_WGMMA_TYPES(176, 88, 88, 89, 90, 91, 92)
#endif
#if CONVT3D_WGMMA_USES(184)
CONVT3D_WGMMA_TYPES(184, 92, 92, 93, 94, 95, 96)
#endif
#if CONVT3D_WGMMA_USES(192)
CONVT3D_WGMMA_TYPES(192, 96, 96, 97, 98, 99, 100)
#endif
#if CONVT3D_WGMMA_USES(200)
CONVT3D_WGMMA_TYPES(200, 100, 100, 101, 102, 103, 104)
#endif
#if CONVT3D_WGMMA_USES(208)
CONVT3D_WGMMA_TYPES(208, 104, 104, 105, 106, 107, 108)
#endif
#if CONVT3D_WGMMA_USES(216)
CONVT3D_WGMMA_TYPES(216, 108, 108, 109, 110, 111, 112)
#endif
#if CONVT3D_WGMMA_USES(224)
CONVT3D_WGMMA_TYPES(224, 112, 112, 113, 114, 115, 116)
#endif
#if CONVT3D_WGMMA_USES(232)
CONVT3D_WGMMA_TYPES(232, 116, 116, 117, 118, 119, 120)
#endif
#if CONVT3D_WGMMA_USES(240)
CONVT3D_WGMMA_TYPES(240, 120, 120, 121, 122, 123, 124)
#endif
#if CONVT3D_WGMMA_USES(248)
CONVT3D_WGMMA_TYPES(248, 124, 124, 125, 126, 127, 128)
#endif
#if CONVT3D_WGMMA_USES(256)
CONVT3D_WGMMA_TYPES(256, 128, 128, 129, 130, 131, 132)
#endif
#undef CONVT3D_WGMMA_TYPES
#undef CONVT3D_WGMMA
#undef CONVT3D_WGMMA_FIRST
#undef CONVT3D_WGMMA_N_MAJOR
#undef CONVT3D_TEXT_OF
#undef CONVT3D_NOTHING

}  // namespace convt3d
