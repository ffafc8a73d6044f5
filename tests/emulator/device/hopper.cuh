// The emulator's Hopper vocabulary (sm_90a): mbarriers, TMA, bulk copies, wgmma. Comes after
// intrinsics.cuh. A kernel's wrappers of the PTX instructions have these names and parameters.
#pragma once

namespace convt3d {

/// The 128 bytes of a CUtensorMap, passed as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap { uint64_t opaque[16]; };

// ---------------------------------------------------------------- mbarriers
// A barrier is 8 bytes of shared memory. A phase completes when all arrivals and all expected
// bytes have come; wait(parity) returns once the phase of that parity has completed, so that
// waiting for parity 1 of a new barrier returns at once.

CONVT3D_DEVICE void mbarrier_init(uint32_t barrier, uint32_t arrivals,
                                  emulator::Site site = emulator::Site::here()) {
  emulator::mbarrier_init(barrier, arrivals, site);
}
/// Makes initialised barriers visible to TMA and bulk copies; a block barrier follows.
CONVT3D_DEVICE void mbarrier_init_fence() { emulator::mbarrier_init_fence(); }
CONVT3D_DEVICE void mbarrier_arrive(uint32_t barrier,
                                    emulator::Site site = emulator::Site::here()) {
  emulator::mbarrier_arrive(barrier, site);
}
/// The same where `arrives` holds.
CONVT3D_DEVICE void mbarrier_arrive_if(uint32_t barrier, bool arrives,
                                       emulator::Site site = emulator::Site::here()) {
  if (arrives) emulator::mbarrier_arrive(barrier, site);
}
/// Arrive, and expect `bytes` more in this phase.
CONVT3D_DEVICE void mbarrier_expect(uint32_t barrier, uint32_t bytes,
                                    emulator::Site site = emulator::Site::here()) {
  emulator::mbarrier_expect(barrier, bytes, site);
}
/// Arrive once all cp.async of this thread so far have landed; counts as one of the arrivals.
CONVT3D_DEVICE void mbarrier_arrive_after_copies(uint32_t barrier,
                                                 emulator::Site site = emulator::Site::here()) {
  emulator::mbarrier_arrive_after_copies(barrier, site);
}
CONVT3D_DEVICE bool mbarrier_try_wait(uint32_t barrier, uint32_t parity,
                                      emulator::Site site = emulator::Site::here()) {
  return emulator::mbarrier_try_wait(barrier, parity, site);
}
CONVT3D_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity,
                                  emulator::Site site = emulator::Site::here()) {
  emulator::mbarrier_wait(barrier, parity, site);
}

/// This thread's earlier shared-memory accesses come before later ones of the asynchronous proxy.
CONVT3D_DEVICE void fence_async_proxy() { emulator::fence_async_proxy(); }

CONVT3D_DEVICE void named_barrier_sync(int barrier, int threads,
                                       emulator::Site site = emulator::Site::here()) {
  emulator::barrier(barrier, threads, true, "named_barrier_sync", site);
}
CONVT3D_DEVICE void named_barrier_arrive(int barrier, int threads,
                                         emulator::Site site = emulator::Site::here()) {
  emulator::barrier(barrier, threads, false, "named_barrier_arrive", site);
}

// ---------------------------------------------------------------- clusters

CONVT3D_DEVICE uint32_t cluster_rank() { return emulator::cluster_rank(); }
CONVT3D_DEVICE void cluster_sync(emulator::Site site = emulator::Site::here()) {
  emulator::cluster_barrier(site);
}
/// A word of the shared memory of another block of the cluster, at the same place.
CONVT3D_DEVICE uint32_t load_shared_of(uint32_t address, uint32_t rank) {
  return load_shared(emulator::shared_address_of(address, rank));
}
/// 16 bytes of the shared memory of another block of the cluster, at the same place.
CONVT3D_DEVICE void load_shared_of(uint32_t address, uint32_t rank, uint32_t (&word)[4]) {
  emulator::shared_read(emulator::shared_address_of(address, rank), word, 16);
}

// ---------------------------------------------------------------- bulk copies and TMA

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
CONVT3D_DEVICE void tma_store_5d(const TensorMap& map, int c0, int c1, int c2, int c3, int c4,
                                 uint32_t source) {
  const int at[] = {c0, c1, c2, c3, c4};
  emulator::tensor_store(&map, at, 5, source);
}
CONVT3D_DEVICE void tma_store_5d_streaming(const TensorMap& map, int c0, int c1, int c2, int c3,
                                           int c4, uint32_t source) {
  tma_store_5d(map, c0, c1, c2, c3, c4, source);
}
/// Contiguous bytes; addresses and size are multiples of 16.
CONVT3D_DEVICE void bulk_store(void* destination, uint32_t source, uint32_t bytes) {
  emulator::bulk_store(destination, source, bytes);
}
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

// ---------------------------------------------------------------- stmatrix

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

/// setmaxnreg, by all threads of a warpgroup.
template <int Count>
CONVT3D_DEVICE void register_increase(emulator::Site site = emulator::Site::here()) {
  emulator::set_registers(Count, true, site);
}
template <int Count>
CONVT3D_DEVICE void register_decrease(emulator::Site site = emulator::Site::here()) {
  emulator::set_registers(Count, false, site);
}

}  // namespace convt3d
