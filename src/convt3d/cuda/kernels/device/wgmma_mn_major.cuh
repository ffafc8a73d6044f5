// Warpgroup matrix products of sm_90a whose operands both lie in shared memory as rows of K
// (MN-major, "transposed"): what TMA brings of channels_last tensors when positions are K. PTX
// wrappers like those of device/ptx.cuh, each with a counterpart in the emulator.
//
// The matrix descriptor of such an operand, 16-bit elements, under the swizzle of `pitch` = 64 or
// 128 bytes. A row has `pitch` bytes of M or N at one k; an atom is a column of such rows:
//
//        atom 0: pitch / 2 of M or N       atom 1: the next ones
//       k 0  |16 B|16 B| ... |            |16 B|16 B| ... |
//       k 1  |    one row, pitch bytes    |
//       ...                                    8 rows are a swizzle pattern of 8 * pitch bytes
//       k 8  <- stride byte offset from k 0
//       ...     leading byte offset from atom 0 to atom 1 ->
//
//   bits  0-13  start address / 16          bits 16-29  leading byte offset / 16
//   bits 32-45  stride byte offset / 16     bits 49-51  base offset: 0
//   bits 62-63  1: 128-byte swizzle, 2: 64-byte swizzle
//
// The base offset is 0 because patterns begin at multiples of their size.
//
// In units of 16 bytes this is the canonical layout ((pitch / 16, atoms), (8, k / 8)) :
// ((1, leading), (pitch / 16, stride)). The swizzle exclusive-ors the place of 16 bytes in a row,
// address bits from 4 on, with the bits from 7 on: three of them for 128 bytes, two for 64, which
// is how TMA writes boxes with rows of as many bytes.
#pragma once
#include "device/wgmma.cuh"

namespace convt3d {

/// Rows of K of `pitch` bytes that follow one another, from a multiple of eight rows on;
/// `atom_step` bytes to the next `pitch` / 2 elements of M or N. Sixteen rows on, a product's K,
/// the descriptor is `pitch` more.
template <int pitch>
CONVT3D_DEVICE uint64_t matrix_descriptor_mn_major(uint32_t address, uint32_t atom_step) {
  static_assert(pitch == 64 || pitch == 128, "bytes of a swizzled row");
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(atom_step >> 4) << 16 |
         uint64_t(8 * pitch >> 4) << 32 | uint64_t(pitch == 128 ? 1 : 2) << 62;
}

template <int N>
CONVT3D_DEVICE void wgmma_f16_ss_mn_major(float (&d)[N / 2], uint64_t a, uint64_t b);
template <int N>
CONVT3D_DEVICE void wgmma_bf16_ss_mn_major(float (&d)[N / 2], uint64_t a, uint64_t b);

// `r` is the number of accumulators, N / 2, and the number of the operand that follows them.
// Behind the descriptors: whether D counts, signs of A and B, then both operands transposed.
#define CONVT3D_WGMMA_MN_MAJOR_OF(type, n, r, r1)                                            \
  template <>                                                                                \
  CONVT3D_DEVICE void wgmma_##type##_ss_mn_major<n>(float (&d)[r], uint64_t a, uint64_t b) {  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type           \
                 " {" CONVT3D_R##r "}, %" #r ", %" #r1 ", 1, 1, 1, 1, 1;"                    \
                 : CONVT3D_D##r                                                              \
                 : "l"(a), "l"(b));                                                          \
  }
#define CONVT3D_WGMMA_MN_MAJOR(n, r, r1)      \
  CONVT3D_WGMMA_MN_MAJOR_OF(f16, n, r, r1)    \
  CONVT3D_WGMMA_MN_MAJOR_OF(bf16, n, r, r1)
#if CONVT3D_WGMMA_USES(16)
CONVT3D_WGMMA_MN_MAJOR(16, 8, 9)
#endif
#if CONVT3D_WGMMA_USES(32)
CONVT3D_WGMMA_MN_MAJOR(32, 16, 17)
#endif
#if CONVT3D_WGMMA_USES(48)
CONVT3D_WGMMA_MN_MAJOR(48, 24, 25)
#endif
#if CONVT3D_WGMMA_USES(64)
CONVT3D_WGMMA_MN_MAJOR(64, 32, 33)
#endif
#if CONVT3D_WGMMA_USES(80)
CONVT3D_WGMMA_MN_MAJOR(80, 40, 41)
#endif
#if CONVT3D_WGMMA_USES(96)
CONVT3D_WGMMA_MN_MAJOR(96, 48, 49)
#endif
#if CONVT3D_WGMMA_USES(112)
CONVT3D_WGMMA_MN_MAJOR(112, 56, 57)
#endif
#if CONVT3D_WGMMA_USES(128)
CONVT3D_WGMMA_MN_MAJOR(128, 64, 65)
#endif
#if CONVT3D_WGMMA_USES(144)
CONVT3D_WGMMA_MN_MAJOR(144, 72, 73)
#endif
#if CONVT3D_WGMMA_USES(160)
CONVT3D_WGMMA_MN_MAJOR(160, 80, 81)
#endif
#if CONVT3D_WGMMA_USES(176)
CONVT3D_WGMMA_MN_MAJOR(176, 88, 89)
#endif
#if CONVT3D_WGMMA_USES(192)
CONVT3D_WGMMA_MN_MAJOR(192, 96, 97)
#endif
#if CONVT3D_WGMMA_USES(208)
CONVT3D_WGMMA_MN_MAJOR(208, 104, 105)
#endif
#if CONVT3D_WGMMA_USES(224)
CONVT3D_WGMMA_MN_MAJOR(224, 112, 113)
#endif
#if CONVT3D_WGMMA_USES(240)
CONVT3D_WGMMA_MN_MAJOR(240, 120, 121)
#endif
#if CONVT3D_WGMMA_USES(256)
CONVT3D_WGMMA_MN_MAJOR(256, 128, 129)
#endif
#undef CONVT3D_WGMMA_MN_MAJOR
#undef CONVT3D_WGMMA_MN_MAJOR_OF

}  // namespace convt3d
