// The products of a stage: fragments of units, at every shift of the source box, times the
// weights of every slot that has a tap there.
#pragma once
#include "device/wgmma.cuh"
#include "phases/rings.cuh"

namespace convt3d {

/// One fragment of units: a shift of the box. Everything that follows is written out by recursion
/// on constants: control flow that disappears late makes ptxas serialise products in flight.
template <typename Config, int Step>
struct PhasesStep {
  using Axis0 = typename Config::Inner0;
  using Axis1 = typename Config::Inner1;
  using Axis2 = typename Config::Axis2;
  static constexpr int count1 = UsedShifts<Axis1>::count;
  static constexpr int count2 = UsedShifts<Axis2>::count;
  static constexpr int steps = UsedShifts<Axis0>::count * count1 * count2;
  // The end of the recursion has no shift to look for.
  static constexpr int shift0 =
      UsedShifts<Axis0>::at(Step < steps ? Step / (count1 * count2) : 0);
  static constexpr int shift1 = UsedShifts<Axis1>::at(Step / count2 % count1);
  static constexpr int shift2 = UsedShifts<Axis2>::at(Step % count2);
  // The ring of fragments goes on from stage to stage if it divides their steps. From three
  // fragments on, that of the next step is loaded before the products of this one are waited for.
  static constexpr bool broken = steps % Config::fragments != 0;
  static constexpr bool ping_pong = Config::fragments > 2;
  /// Groups of products that may run on while the first fragment of a stage, or that of a later
  /// step, replaces another.
  static constexpr int pending_first = broken ? 0 : Config::fragments - 1;
  static constexpr int pending = Config::fragments - (ping_pong ? 2 : 1);
  /// After which wait only products of this stage are in flight.
  static constexpr int releases = broken ? -1 : pending;

  /// Products of the slots from `Slot` on that have a tap at this shift. `units`: a fragment of
  /// each block.
  template <int Slot>
  CONVT3D_DEVICE static void products(PhasesSums<Config>& sum,
                                      const uint32_t (&units)[Config::blocks][4],
                                      uint64_t weights) {
    if constexpr (Slot < Axis0::slots * Axis1::slots * Axis2::slots) {
      constexpr int slot0 = Slot / (Axis1::slots * Axis2::slots);
      constexpr int slot1 = Slot / Axis2::slots % Axis1::slots;
      constexpr int slot2 = Slot % Axis2::slots;
      constexpr int tap0 = Axis0::tap(slot0, shift0 + Axis0::min_shift);
      constexpr int tap1 = Axis1::tap(slot1, shift1 + Axis1::min_shift);
      constexpr int tap2 = Axis2::tap(slot2, shift2 + Axis2::min_shift);
      if constexpr (tap0 >= 0 && tap1 >= 0 && tap2 >= 0) {
        constexpr int tap = Config::tap_at(tap0, tap1, tap2);
#pragma unroll
        for (int block = 0; block < Config::blocks; ++block)
          wgmma_product_of<Config::column_tile>(
              typename Config::Math{}, sum[slot0][slot1][slot2][block], units[block],
              descriptor_at<Config>(weights, tap * Config::tap_bytes));
      }
      products<Slot + 1>(sum, units, weights);
    }
  }
};

/// What a stage's fragments are loaded from. `rows`: byte addresses of this lane's units in the
/// box, of the channels of both quads.
template <typename Config>
struct PhasesSource {
  const PhasesArguments<typename Config::Storage>& arguments;
  const uint32_t (&rows)[Config::blocks][4];
  uint32_t box;

  template <int Step>
  CONVT3D_DEVICE void load(uint32_t (&units)[Config::blocks][4]) const {
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block) load<Step>(units[block], block);
  }
  /// One block's.
  template <int Step>
  CONVT3D_DEVICE void load(uint32_t (&units)[4], int block) const {
    const uint32_t at = box + offset<Step>() * Config::position_bytes;
    if constexpr (Config::transposed) {
      load_matrix_x4(rows[block][0] + at, units);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = rows[block][i] + at;
      const uint32_t next = word + arguments.channel_pitch * int(sizeof(typename Config::Storage));
      if constexpr (Config::Type::channels_per_word == 1)
        units[i] = load_shared(word);
      else
        units[i] = permute_bytes(load_shared_half(word), load_shared_half(next), 0x5410);
    }
  }

 private:
  /// Positions from the box's first one to those of a step.
  template <int Step>
  CONVT3D_DEVICE int offset() const {
    using Now = PhasesStep<Config, Step>;
    return Now::shift0 * arguments.slice_pitch + Now::shift1 * arguments.line_pitch +
           Now::shift2;
  }
};

/// All products of one stage from a step on.
template <typename Config, int Step, typename Release>
CONVT3D_DEVICE void multiply(PhasesSums<Config>& sum,
                             uint32_t (&fragment)[Config::fragments][Config::blocks][4],
                             const PhasesSource<Config>& source, uint64_t weights,
                             const Release& release) {
  using Now = PhasesStep<Config, Step>;
  if constexpr (Step < Now::steps) {
    if constexpr (Step == 0) {
      wgmma_wait<Now::pending_first>();
      if constexpr (Now::releases < 0) release();
      source.template load<0>(fragment[0]);
    }
    constexpr int loads = Now::ping_pong ? Step + 1 : Step;
    if constexpr (loads > 0 && loads < Now::steps) {
      wgmma_wait<Now::pending>();
      if constexpr (Step == Now::releases) release();
      source.template load<loads>(fragment[loads % Config::fragments]);
    }
    wgmma_fence();
    Now::template products<0>(sum, fragment[Step % Config::fragments], weights);
    wgmma_commit();
    multiply<Config, Step + 1>(sum, fragment, source, weights, release);
  }
}

}  // namespace convt3d
