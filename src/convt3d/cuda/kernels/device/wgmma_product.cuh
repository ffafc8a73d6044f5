// Warpgroup products by arithmetic.
#pragma once
#include "device/arithmetic.cuh"
#include "device/wgmma.cuh"

namespace convt3d {

/// D += A * B of one m64 block, both operands in shared memory.
#define CONVT3D_PRODUCT(Arithmetic, name)                                                     \
  template <int N>                                                                            \
  CONVT3D_DEVICE void wgmma_product_of(Arithmetic, float (&d)[N / 2], uint64_t a, uint64_t b) { \
    wgmma_##name##_ss<N>(d, a, b);                                                            \
  }
CONVT3D_PRODUCT(MathTf32, tf32)
CONVT3D_PRODUCT(MathF16x3, f16)
CONVT3D_PRODUCT(Math16<Float16>, f16)
CONVT3D_PRODUCT(Math16<BFloat16>, bf16)
#undef CONVT3D_PRODUCT

/// The same, rows of the second operand are of its depth (matrix_descriptor_128b_n_major).
template <int N>
CONVT3D_DEVICE void wgmma_product_n_major(Math16<Float16>, float (&d)[N / 2], uint64_t a, uint64_t b) {
  wgmma_f16_ss_n_major<N>(d, a, b);
}
template <int N>
CONVT3D_DEVICE void wgmma_product_n_major(Math16<BFloat16>, float (&d)[N / 2], uint64_t a,
                                          uint64_t b) {
  wgmma_bf16_ss_n_major<N>(d, a, b);
}

}  // namespace convt3d
