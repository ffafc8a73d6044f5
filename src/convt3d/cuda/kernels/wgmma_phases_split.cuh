// IEEE-grade products of wgmma_phases.cu: units and weights in two TF32 parts each, three products of a
// pair. Units are split in registers, weights come split (wgmma_phases_pack.cu).
//
// A set is of one slot and block at one place along D and H: a chain of its taps of W and both parts, in
// accumulators of its own that are added to the sums outside the tensor core, whose adder
// truncates. One set multiplies while the one before it is added. Nothing is in flight while fragments
// are written: ptxas would let them into registers that products still read.
#pragma once
#include "wgmma_phases_config.cuh"

namespace convt3d {

template <typename Config, int Step>
struct PhasesStep;

/// A lane's fragments of a block at all used shifts of W.
template <typename Config>
struct SplitUnits {
  static constexpr int shifts = UsedShifts<typename Config::Axis2>::count;
  uint32_t big[shifts][4], small[shifts][4];

  /// Those of the steps from number `Row` times `shifts` on.
  template <int Row, int I, typename Source>
  CONVT3D_DEVICE void load(const Source& source, int block) {
    if constexpr (I < shifts) {
      source.template load<Row * shifts + I>(big[I], block);
      load<Row, I + 1>(source, block);
    }
  }
  CONVT3D_DEVICE void split() {
#pragma unroll
    for (int shift = 0; shift < shifts; ++shift)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        Config::Math::split(big[shift][i], big[shift][i], small[shift][i]);
  }
};

/// Number `Index` of the sets of a block and row of shifts: its slots.
template <typename Config, int Row, int Index>
struct PhasesSplitSet {
  using Axis0 = typename Config::Inner0;
  using Axis1 = typename Config::Inner1;
  using Axis2 = typename Config::Axis2;
  using First = PhasesStep<Config, Row * SplitUnits<Config>::shifts>;
  static constexpr int all = Axis0::slots * Axis1::slots * Axis2::slots;
  static constexpr int slot2 = Index % Axis2::slots;
  static constexpr int slot1 = Index / Axis2::slots % Axis1::slots;
  static constexpr int slot0 = Index / (Axis2::slots * Axis1::slots) % Axis0::slots;
  static constexpr int tap0 = Axis0::tap(slot0, First::shift0 + Axis0::min_shift);
  static constexpr int tap1 = Axis1::tap(slot1, First::shift1 + Axis1::min_shift);
  CONVT3D_CONSTEXPR static int tap2(int number) {
    return Axis2::tap(slot2, UsedShifts<Axis2>::at(number) + Axis2::min_shift);
  }
  /// The first shift from this one on at which the slot has a tap.
  CONVT3D_CONSTEXPR static int shift_from(int number) {
    while (number < SplitUnits<Config>::shifts && tap2(number) < 0) ++number;
    return number;
  }
  static constexpr int first_shift = shift_from(0);
  static constexpr bool valid =
      tap0 >= 0 && tap1 >= 0 && first_shift < SplitUnits<Config>::shifts;

  /// Products of the parts at a shift and at those after it: all with a small part come first. Until the
  /// others come, the sum is small, and so is what the adder cuts off.
  template <bool Small, int Shift>
  CONVT3D_DEVICE static void multiply_taps(float (&d)[Config::sums], const SplitUnits<Config>& units,
                                           uint64_t weights) {
    if constexpr (Shift < SplitUnits<Config>::shifts) {
      constexpr int tap = Config::tap_at(tap0, tap1, tap2(Shift));
      const uint64_t by = descriptor_at(weights, tap * Config::tap_bytes);
      if constexpr (!Small) {
        wgmma_tf32_rs<Config::column_tile>(d, units.big[Shift], by);
      } else {
        if constexpr (Shift == first_shift)
          wgmma_tf32_rs_first<Config::column_tile>(d, units.small[Shift], by);
        else
          wgmma_tf32_rs<Config::column_tile>(d, units.small[Shift], by);
        wgmma_tf32_rs<Config::column_tile>(d, units.big[Shift],
                                           descriptor_at(by, Config::part_bytes()));
      }
      multiply_taps<Small, shift_from(Shift + 1)>(d, units, weights);
    }
  }
  CONVT3D_DEVICE static void multiply(float (&d)[Config::sums], const SplitUnits<Config>& units,
                                      uint64_t weights) {
    wgmma_fence();
    multiply_taps<true, first_shift>(d, units, weights);
    multiply_taps<false, first_shift>(d, units, weights);
    wgmma_commit();
  }
  CONVT3D_DEVICE static void add(PhasesSums<Config>& sum, int block, float (&d)[Config::sums]) {
#pragma unroll
    for (int i = 0; i < Config::sums; ++i) {
      float& to = sum[slot0][slot1][slot2][block][i];
      wgmma_accumulated(d[i]);
      to += d[i];
      wgmma_accumulated(to);  // here: additions that are put off keep two registers each
    }
  }
};

/// All sets of a block and row of shifts from `Index` on; `Before` is the one in flight, if any, in the other
/// accumulators.
template <typename Config, int Row, int Index, int Before>
CONVT3D_DEVICE void multiply_sets(PhasesSums<Config>& sum, int block, float (&product)[Config::sums],
                                  float (&other)[Config::sums], const SplitUnits<Config>& units,
                                  uint64_t weights) {
  using Set = PhasesSplitSet<Config, Row, Index>;
  if constexpr (Index >= Set::all) {
    if constexpr (Before >= 0) {
      wgmma_wait<0>();
      PhasesSplitSet<Config, Row, Before>::add(sum, block, other);
    }
  } else if constexpr (!Set::valid) {
    multiply_sets<Config, Row, Index + 1, Before>(sum, block, product, other, units, weights);
  } else {
    Set::multiply(product, units, weights);
    if constexpr (Before >= 0) {
      wgmma_wait<1>();
      PhasesSplitSet<Config, Row, Before>::add(sum, block, other);
    }
    multiply_sets<Config, Row, Index + 1, Index>(sum, block, other, product, units, weights);
  }
}

/// All products of one stage from a row of shifts on. Nothing is in flight before and after.
template <typename Config, int Row, typename Source>
CONVT3D_DEVICE void multiply_split(PhasesSums<Config>& sum, const Source& source,
                                   uint64_t weights) {
  if constexpr (Row * SplitUnits<Config>::shifts < PhasesStep<Config, 0>::steps) {
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block) {
      SplitUnits<Config> units;
      units.template load<Row, 0>(source, block);
      units.split();
      float product[2][Config::sums];
      multiply_sets<Config, Row, 0, -1>(sum, block, product[0], product[1], units, weights);
    }
    multiply_split<Config, Row + 1>(sum, source, weights);
  }
}

}  // namespace convt3d
