// The emulator's warpgroup products of two operands as rows of K.
// A kernel's wrappers of the PTX instructions have these names and parameters.
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
CONVT3D_DEVICE void wgmma_f16_ss_mn_major(float (&d)[N / 2], uint64_t a, uint64_t b,
                                          emulator::Site site = emulator::Site::here()) {
  emulator::wgmma(emulator::Operand::f16, N, d, nullptr, a, b, site, false, true, true);
}
template <int N>
CONVT3D_DEVICE void wgmma_bf16_ss_mn_major(float (&d)[N / 2], uint64_t a, uint64_t b,
                                           emulator::Site site = emulator::Site::here()) {
  emulator::wgmma(emulator::Operand::bf16, N, d, nullptr, a, b, site, false, true, true);
}

}  // namespace convt3d
