// How the threads of a CTA and of a cluster wait for one another on sm_90: mbarriers, named
// barriers, proxy fences, clusters, setmaxnreg. PTX wrappers like those of device/ptx.cuh, each
// with a counterpart in the emulator.
#pragma once
#include "device/ptx.cuh"

namespace convt3d {

// ---------------------------------------------------------------- mbarriers
// A barrier is 8 bytes of shared memory. A phase completes when all arrivals and all expected
// bytes have come; wait(parity) returns once the phase of that parity has completed, so that
// waiting for parity 1 of a new barrier returns at once.

CONVT3D_DEVICE void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Makes initialised barriers visible to TMA and bulk copies; a block barrier follows.
CONVT3D_DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
CONVT3D_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// The same where `arrives` holds. One block of text: a branch between wgmma instructions in
/// flight would make ptxas serialise them.
CONVT3D_DEVICE void mbarrier_arrive_if(uint32_t barrier, bool arrives) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier),
      "r"(uint32_t(arrives))
      : "memory");
}
/// Arrive, and expect `bytes` more in this phase.
CONVT3D_DEVICE void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
CONVT3D_DEVICE bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}
/// A wait that never ends becomes a trap after some seconds. One block of text: as C++ branches,
/// loop and trap would make ptxas serialise the wgmma instructions around them.
CONVT3D_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .u32 spins;\n"
      "mov.u32 spins, 0;\n"
      "wait_again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra wait_done;\n"
      "add.u32 spins, spins, 1;\n"
      "setp.gt.u32 p, spins, 20000000;\n"
      "@p trap;\n"
      "bra wait_again;\n"
      "wait_done:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// This thread's earlier shared-memory accesses come before later ones of the asynchronous proxy.
CONVT3D_DEVICE void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

CONVT3D_DEVICE void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---------------------------------------------------------------- clusters
// Blocks that run together and reach each other's shared memory.

/// All threads of a cluster.
CONVT3D_DEVICE void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::: "memory");
}
/// A word of the shared memory of another block of the cluster, at the same place.
CONVT3D_DEVICE uint32_t load_shared_of(uint32_t address, uint32_t rank) {
  uint32_t word;
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %1, %2;\n"
      "ld.shared::cluster.b32 %0, [there];\n}"
      : "=r"(word)
      : "r"(address), "r"(rank)
      : "memory");
  return word;
}
/// The same of four words, 16 bytes.
CONVT3D_DEVICE void load_shared_of(uint32_t address, uint32_t rank, uint32_t& a, uint32_t& b,
                                   uint32_t& c, uint32_t& d) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [there];\n}"
      : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
      : "r"(address), "r"(rank)
      : "memory");
}

/// setmaxnreg, by all threads of a warpgroup.
template <int Count>
CONVT3D_DEVICE void register_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
CONVT3D_DEVICE void register_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

}  // namespace convt3d
