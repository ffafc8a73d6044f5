// The emulator's TMA and bulk copies.
// A kernel's wrappers of the PTX instructions have these names and parameters.
#pragma once
#include "device/ptx.cuh"

namespace convt3d {

/// The 128 bytes of a CUtensorMap, passed as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap { uint64_t opaque[16]; };

/// Contiguous bytes; addresses and size are multiples of 16.
CONVT3D_DEVICE void bulk_copy(uint32_t destination, const void* source, uint32_t bytes,
                              uint32_t barrier) {
  emulator::bulk_copy(destination, source, bytes, barrier);
}

CONVT3D_DEVICE void tma_prefetch(const TensorMap&) {}

/// A box of a tensor, innermost coordinate first; what lies outside becomes zero.
CONVT3D_DEVICE void tma_load_2d(uint32_t destination, const TensorMap& map, int c0, int c1,
                                uint32_t barrier) {
  const int at[] = {c0, c1};
  emulator::tensor_load(destination, &map, at, 2, barrier);
}
CONVT3D_DEVICE void tma_load_3d(uint32_t destination, const TensorMap& map, int c0, int c1, int c2,
                                uint32_t barrier) {
  const int at[] = {c0, c1, c2};
  emulator::tensor_load(destination, &map, at, 3, barrier);
}
CONVT3D_DEVICE void tma_load_4d(uint32_t destination, const TensorMap& map, int c0, int c1, int c2,
                                int c3, uint32_t barrier) {
  const int at[] = {c0, c1, c2, c3};
  emulator::tensor_load(destination, &map, at, 4, barrier);
}
CONVT3D_DEVICE void tma_load_5d(uint32_t destination, const TensorMap& map, int c0, int c1, int c2,
                                int c3, int c4, uint32_t barrier) {
  const int at[] = {c0, c1, c2, c3, c4};
  emulator::tensor_load(destination, &map, at, 5, barrier);
}
CONVT3D_DEVICE void tma_store_5d_streaming(const TensorMap& map, int c0, int c1, int c2, int c3,
                                           int c4, uint32_t source) {
  const int at[] = {c0, c1, c2, c3, c4};
  emulator::tensor_store(&map, at, 5, source);
}
/// Contiguous bytes; addresses and size are multiples of 16.
CONVT3D_DEVICE void bulk_store_streaming(void* destination, uint32_t source, uint32_t bytes) {
  emulator::bulk_store(destination, source, bytes);
}
CONVT3D_DEVICE void bulk_store_streaming_if(void* destination, uint32_t source, uint32_t bytes,
                                            bool stores) {
  if (stores) emulator::bulk_store(destination, source, bytes);
}
CONVT3D_DEVICE void bulk_commit() { emulator::bulk_commit(); }
/// Wait until at most `Pending` of this thread's most recent groups of stores are unfinished.
template <int Pending>
CONVT3D_DEVICE void bulk_wait() {
  emulator::bulk_wait(Pending);
}

/// The same, until they have read shared memory.
template <int Pending>
CONVT3D_DEVICE void bulk_wait_read() {
  emulator::bulk_wait(Pending);
}

}  // namespace convt3d
