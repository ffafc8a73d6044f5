// The emulator's barriers of sm_90.
// A kernel's wrappers of the PTX instructions have these names and parameters.
#pragma once
#include "device/ptx.cuh"

namespace convt3d {

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

// ---------------------------------------------------------------- clusters

CONVT3D_DEVICE void cluster_sync(emulator::Site site = emulator::Site::here()) {
  emulator::cluster_barrier(site);
}
/// A word of the shared memory of another block of the cluster, at the same place.
CONVT3D_DEVICE uint32_t load_shared_of(uint32_t address, uint32_t rank) {
  return load_shared(emulator::shared_address_of(address, rank));
}
/// The same of four words, 16 bytes.
CONVT3D_DEVICE void load_shared_of(uint32_t address, uint32_t rank, uint32_t& a, uint32_t& b,
                                   uint32_t& c, uint32_t& d) {
  load_shared(emulator::shared_address_of(address, rank), a, b, c, d);
}

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
