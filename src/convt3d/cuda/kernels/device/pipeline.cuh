// A ring of buffers in shared memory between the warps that fill it and those that read it.
#pragma once
#include "device/barrier.cuh"

namespace convt3d {

/// Arrivals of so many warps, of every lane. An arrival hands over what its own thread did: where
/// plain loads or stores of lanes, or bulk copies without a tensor map, follow those of another
/// warp, every lane arrives, since behind __syncwarp() one lane's would do, but compute-sanitizer
/// sees no order there. One lane's does where tensor maps alone overwrite what lanes have read, or
/// products alone read what lanes have written.
CONVT3D_CONSTEXPR int lanes_of(int warps) { return 32 * warps; }
/// The same where every lane arrives, else of one lane a warp.
CONVT3D_CONSTEXPR int arrivals_of(int warps, bool every_lane) {
  return every_lane ? lanes_of(warps) : warps;
}

/// Barriers of a ring of `Stages` buffers: full ones, then empty ones.
template <int Stages>
struct Ring {
  uint32_t barriers;
  int stage = 0;
  uint32_t parity = 0;

  CONVT3D_DEVICE explicit Ring(uint32_t barriers_) : barriers(barriers_) {}
  CONVT3D_DEVICE void init(uint32_t writers, uint32_t readers) const {
    for (int i = 0; i < Stages; ++i) {
      mbarrier_init(barriers + 8 * i, writers);
      mbarrier_init(barriers + 8 * (Stages + i), readers);
    }
  }
  CONVT3D_DEVICE uint32_t full() const { return barriers + 8 * stage; }
  CONVT3D_DEVICE uint32_t empty(int which) const { return barriers + 8 * (Stages + which); }
  CONVT3D_DEVICE void wait_full() const { mbarrier_wait(full(), parity); }
  CONVT3D_DEVICE void wait_empty() const { mbarrier_wait(empty(stage), parity ^ 1); }
  CONVT3D_DEVICE void advance() { advance(Stages); }
  /// Over buffers of the first round.
  CONVT3D_DEVICE void skip(int count) {
    stage = count % Stages;
    parity = count / Stages;
  }
  /// Where only so many buffers are used.
  CONVT3D_DEVICE void advance(int used) {
    if (++stage == used) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// Stages of A and of weights that products in flight read: given back once these are done.
/// `Resident` weights never are; `EveryLane`: of A, by every lane (see lanes_of).
template <bool Resident, bool EveryLane = false>
struct HeldStages {
  bool first_lane;
  int a_stage = -1, weights = -1;

  template <typename AStages, typename Weights>
  CONVT3D_DEVICE void release(const AStages& a_stages, const Weights& stages) {
    mbarrier_arrive_if(a_stages.empty(a_stage), (EveryLane || first_lane) && a_stage >= 0);
    if constexpr (!Resident)
      mbarrier_arrive_if(stages.empty(weights), first_lane && weights >= 0);
    a_stage = weights = -1;
  }
};

/// Registers of a thread: warps that do not multiply keep `Others`, the rest goes to those that
/// do.
template <typename Config, int Others>
struct RingRegisters {
  static constexpr int launched = 65536 / Config::threads / 8 * 8;
  static constexpr int others = Others;
  static constexpr int multiplying =
      (launched * Config::threads - others * (Config::threads - 32 * Config::warps)) /
      (32 * Config::warps) / 8 * 8;
  static_assert(Config::warps % 4 == 0 && (Config::threads / 32) % 4 == 0, "whole warpgroups");
};

}  // namespace convt3d
