// Asynchronous copies of sm_90: TMA boxes by tensor map, and bulk copies of contiguous bytes. PTX
// wrappers like those of device/ptx.cuh, each with a counterpart in the emulator.
#pragma once
#include "device/ptx.cuh"

namespace convt3d {

/// The 128 bytes of a CUtensorMap, passed as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap { uint64_t opaque[16]; };

/// Contiguous bytes; addresses and size are multiples of 16.
CONVT3D_DEVICE void bulk_copy(uint32_t destination, const void* source, uint32_t bytes,
                              uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

/// Fetches a map before its first use.
CONVT3D_DEVICE void tma_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// A box of a tensor, innermost coordinate first; what lies outside becomes zero.
CONVT3D_DEVICE void tma_load_2d(uint32_t destination, const TensorMap& map, int c0, int c1,
                                uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(destination),
      "l"(&map), "r"(c0), "r"(c1), "r"(barrier)
      : "memory");
}
CONVT3D_DEVICE void tma_load_3d(uint32_t destination, const TensorMap& map, int c0, int c1, int c2,
                                uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(destination),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier)
      : "memory");
}
CONVT3D_DEVICE void tma_load_4d(uint32_t destination, const TensorMap& map, int c0, int c1, int c2,
                                int c3, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(destination),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
      : "memory");
}
CONVT3D_DEVICE void tma_load_5d(uint32_t destination, const TensorMap& map, int c0, int c1, int c2,
                                int c3, int c4, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(destination),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier)
      : "memory");
}
/// To be evicted from L2 first, as what streaming stores write.
CONVT3D_DEVICE void tma_store_5d_streaming(const TensorMap& map, int c0, int c1, int c2, int c3,
                                           int c4, uint32_t source) {
  asm volatile(
      "{\n.reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group.L2::cache_hint "
      "[%0, {%1, %2, %3, %4, %5}], [%6], policy;\n}" ::"l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(source)
      : "memory");
}
/// Contiguous bytes, to be evicted from L2 first, as what streaming stores write; addresses and
/// size are multiples of 16.
CONVT3D_DEVICE void bulk_store_streaming(void* destination, uint32_t source, uint32_t bytes) {
  asm volatile(
      "{\n.reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, policy;\n}" ::"l"(
          destination),
      "r"(source), "r"(bytes)
      : "memory");
}
/// The same where `stores` holds: one block of text, without a branch. The policy is what
/// createpolicy makes, which ptxas would work out again for every copy.
CONVT3D_DEVICE void bulk_store_streaming_if(void* destination, uint32_t source, uint32_t bytes,
                                            bool stores) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.u32 p, %4, 0;\n"
      "@p cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;\n}" ::"l"(
          destination),
      "r"(source), "r"(bytes), "l"(0x12f0000000000000ull), "r"(uint32_t(stores))
      : "memory");
}
CONVT3D_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Wait until at most `Pending` of this thread's most recent groups of stores are unfinished.
template <int Pending>
CONVT3D_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

/// The same, until they have read shared memory.
template <int Pending>
CONVT3D_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

}  // namespace convt3d
