// The emulator's warpgroup products and stmatrix.
// A kernel's wrappers of the PTX instructions have these names and parameters.
#pragma once
#include "device/ptx.cuh"

namespace convt3d {

CONVT3D_DEVICE void store_matrix_x4(uint32_t address, const uint32_t (&r)[4],
                                    emulator::Site site = emulator::Site::here()) {
  const uint32_t words[4] = {r[0], r[1], r[2], r[3]};
  emulator::store_matrix(address, words, 4, false, site);
}
CONVT3D_DEVICE void store_matrix_x4_transposed(uint32_t address, const uint32_t (&r)[4],
                                               emulator::Site site = emulator::Site::here()) {
  const uint32_t words[4] = {r[0], r[1], r[2], r[3]};
  emulator::store_matrix(address, words, 4, true, site);
}

// ---------------------------------------------------------------- wgmma
// D (64 x N, float32) += A (64 x K) * B (K x N), K = 8 TF32 or 16 half values. Lane (g, t) of warp
// w holds d[4j], d[4j+1] = (row 16w + g, columns 8j + 2t, +1) and d[4j+2], d[4j+3] = row + 8.
// Operand registers and accumulators belong to the instruction until its group is waited for.

/// Before the first product, and after registers that products use were written or waited for.
CONVT3D_DEVICE void wgmma_fence(emulator::Site site = emulator::Site::here()) {
  emulator::wgmma_fence(site);
}
/// Keeps what wrote these registers, and what reads them, on its side of the products between.
template <int N>
CONVT3D_DEVICE void wgmma_fence_registers(float (&)[N]) {}
CONVT3D_DEVICE void wgmma_commit(emulator::Site site = emulator::Site::here()) {
  emulator::wgmma_commit(site);
}
template <int Pending>
CONVT3D_DEVICE void wgmma_wait(emulator::Site site = emulator::Site::here()) {
  emulator::wgmma_wait(Pending, site);
}

/// An accumulator that is read after a wait.
CONVT3D_DEVICE void wgmma_accumulated(float&) {}

/// A copy of an operand, in a register of its own.
CONVT3D_DEVICE uint32_t wgmma_operand(uint32_t word) { return word; }

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

/// An operand whose rows are of K, 64 elements of M or N each, under the 128-byte swizzle: 1024 bytes to
/// eight rows, `block_step` to the next 64 elements.
CONVT3D_DEVICE uint64_t matrix_descriptor_128b_n_major(uint32_t address, uint32_t block_step) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(block_step >> 4) << 16 | 64ull << 32 |
         1ull << 62;
}

#define CONVT3D_EMULATED_WGMMA(type)                                                            \
  template <int N>                                                                              \
  CONVT3D_DEVICE void wgmma_##type##_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,   \
                                        emulator::Site site = emulator::Site::here()) {         \
    emulator::wgmma(emulator::Operand::type, N, d, a, 0, b, site);                              \
  }                                                                                             \
  template <int N>                                                                              \
  CONVT3D_DEVICE void wgmma_##type##_ss(float (&d)[N / 2], uint64_t a, uint64_t b,               \
                                        emulator::Site site = emulator::Site::here()) {         \
    emulator::wgmma(emulator::Operand::type, N, d, nullptr, a, b, site);                        \
  }
CONVT3D_EMULATED_WGMMA(tf32)
template <int N>
CONVT3D_DEVICE void wgmma_tf32_rs_first(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                        emulator::Site site = emulator::Site::here()) {
  emulator::wgmma(emulator::Operand::tf32, N, d, a, 0, b, site, true);
}
template <int N>
CONVT3D_DEVICE void wgmma_tf32_ss_first(float (&d)[N / 2], uint64_t a, uint64_t b,
                                        emulator::Site site = emulator::Site::here()) {
  emulator::wgmma(emulator::Operand::tf32, N, d, nullptr, a, b, site, true);
}
CONVT3D_EMULATED_WGMMA(f16)
CONVT3D_EMULATED_WGMMA(bf16)
template <int N>
CONVT3D_DEVICE void wgmma_f16_rs_n_major(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                         emulator::Site site = emulator::Site::here()) {
  emulator::wgmma(emulator::Operand::f16, N, d, a, 0, b, site, false, true);
}
template <int N>
CONVT3D_DEVICE void wgmma_bf16_rs_n_major(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                          emulator::Site site = emulator::Site::here()) {
  emulator::wgmma(emulator::Operand::bf16, N, d, a, 0, b, site, false, true);
}
template <int N>
CONVT3D_DEVICE void wgmma_f16_ss_n_major(float (&d)[N / 2], uint64_t a, uint64_t b,
                                         emulator::Site site = emulator::Site::here()) {
  emulator::wgmma(emulator::Operand::f16, N, d, nullptr, a, b, site, false, true);
}
template <int N>
CONVT3D_DEVICE void wgmma_bf16_ss_n_major(float (&d)[N / 2], uint64_t a, uint64_t b,
                                          emulator::Site site = emulator::Site::here()) {
  emulator::wgmma(emulator::Operand::bf16, N, d, nullptr, a, b, site, false, true);
}
#undef CONVT3D_EMULATED_WGMMA

}  // namespace convt3d
