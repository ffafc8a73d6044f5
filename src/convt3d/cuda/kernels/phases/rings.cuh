// The rings of a CTA (weights, source boxes, staged outputs) and what holds their buffers; the
// sums of a warpgroup.
#pragma once
#include "device/pipeline.cuh"
#include "phases/work.cuh"

namespace convt3d {

template <typename Config>
using PhasesSums = float[Config::Inner0::slots][Config::Inner1::slots][Config::Axis2::slots]
                        [Config::blocks][Config::sums];
template <typename Config>
using WeightRing = Ring<Config::weight_barriers>;
template <typename Config>
using AStageRing = Ring<Config::source_stages>;
/// Staged outputs, between the warps that multiply and the store warps: the first buffers of the
/// ring.
template <typename Config>
using OutputRing = Ring<(Config::store_warps > 0 ? Config::sent_buffers : 1)>;
template <typename Config>
CONVT3D_DEVICE OutputRing<Config> output_ring(uint32_t shared) {
  return OutputRing<Config>(shared + 16 * (Config::source_stages + Config::weight_barriers));
}

template <typename Config>
using PhasesHeld = HeldStages<Config::resident_weights, Config::lanes_leave>;

/// The weights of stages, one after the other.
template <typename Config>
struct StageWeights {
  uint32_t first, at;

  CONVT3D_DEVICE explicit StageWeights(uint32_t shared)
      : first(shared + Config::weight_offset), at(first) {}
  CONVT3D_DEVICE uint32_t enter(const WeightRing<Config>& stages) {
    if constexpr (!Config::resident_weights) {
      stages.wait_full();
      at = first + stages.stage * Config::slot_bytes;
    }
    return at;
  }
  CONVT3D_DEVICE void leave(WeightRing<Config>& stages, PhasesHeld<Config>& held) {
    if constexpr (Config::resident_weights) {
      at += Config::stage_bytes;
    } else {
      held.weights = stages.stage;
      stages.advance();
    }
  }
};

}  // namespace convt3d
