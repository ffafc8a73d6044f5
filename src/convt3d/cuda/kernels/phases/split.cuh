// IEEE-grade products of phases/kernel.cu: units and weights in two TF32 parts each, three
// products of a pair. Units are split in registers, weights come split (phases/pack.cu).
//
// A block's fragments of some steps of a stage, which are rows of shifts along W, are loaded and
// split together. A set is one slot's chain of products of all of them and both parts, in
// accumulators of its own that are added to the sums outside the tensor core, whose adder
// truncates. One set multiplies while the one before it is added. Nothing is in flight while
// fragments are written: ptxas would let them into registers that products still read.
#pragma once
#include "device/wgmma.cuh"
#include "phases/products.cuh"

namespace convt3d {

/// A lane's fragments of a block at the steps of some rows of shifts.
template <typename Config>
struct SplitUnits {
  static constexpr int all = PhasesStep<Config, 0>::steps;
  static constexpr int most = CONVT3D_SPLIT_ROWS * UsedShifts<typename Config::Axis2>::count;
  uint32_t big[most][4], small[most][4];

  /// Steps of the rows that begin at one.
  template <int Step>
  CONVT3D_CONSTEXPR static int count() {
    return all - Step < most ? all - Step : most;
  }

  /// Those of step `Step` on, up to number `most` of them.
  template <int Step, int I>
  CONVT3D_DEVICE void load(const PhasesSource<Config>& source, int block) {
    if constexpr (I < count<Step>()) {
      source.template load<Step + I>(big[I], block);
      load<Step, I + 1>(source, block);
    }
  }
  template <int Step>
  CONVT3D_DEVICE void split() {
#pragma unroll
    for (int number = 0; number < count<Step>(); ++number)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        Config::Math::split(big[number][i], big[number][i], small[number][i]);
  }
};

/// Number `Index` of the sets of a block and the rows of shifts that begin at step `First`: its
/// slots.
template <typename Config, int First, int Index>
struct PhasesSplitSet {
  using Axis0 = typename Config::Inner0;
  using Axis1 = typename Config::Inner1;
  using Axis2 = typename Config::Axis2;
  static constexpr int all = Axis0::slots * Axis1::slots * Axis2::slots;
  static constexpr int slot2 = Index % Axis2::slots;
  static constexpr int slot1 = Index / Axis2::slots % Axis1::slots;
  static constexpr int slot0 = Index / (Axis2::slots * Axis1::slots) % Axis0::slots;
  static constexpr int steps = SplitUnits<Config>::template count<First>();

  /// The slot's tap at a step, or -1. A step of the end of the recursion has none.
  template <int Number>
  CONVT3D_CONSTEXPR static int tap() {
    using Now = PhasesStep<Config, First + Number>;
    const int tap0 = Axis0::tap(slot0, Now::shift0 + Axis0::min_shift);
    const int tap1 = Axis1::tap(slot1, Now::shift1 + Axis1::min_shift);
    const int tap2 = Axis2::tap(slot2, Now::shift2 + Axis2::min_shift);
    return tap0 >= 0 && tap1 >= 0 && tap2 >= 0 ? Config::tap_at(tap0, tap1, tap2) : -1;
  }
  /// The first step from this one on at which the slot has a tap.
  template <int Number>
  CONVT3D_CONSTEXPR static int step_from() {
    if constexpr (Number >= steps)
      return steps;
    else
      return tap<Number>() >= 0 ? Number : step_from<Number + 1>();
  }
  static constexpr int first_step = step_from<0>();
  static constexpr bool valid = first_step < steps;

  /// Products of the parts at a step and at those after it: all with a small part come first.
  /// Until the others come, the sum is small, and so is what the adder cuts off.
  template <bool Small, int Number>
  CONVT3D_DEVICE static void multiply_steps(float (&d)[Config::sums], const SplitUnits<Config>& units,
                                            uint64_t weights) {
    if constexpr (Number < steps) {
      const uint64_t by = descriptor_at<Config>(weights, tap<Number>() * Config::tap_bytes);
      if constexpr (!Small) {
        wgmma_tf32_rs<Config::column_tile>(d, units.big[Number], by);
      } else {
        if constexpr (Number == first_step)
          wgmma_tf32_rs_first<Config::column_tile>(d, units.small[Number], by);
        else
          wgmma_tf32_rs<Config::column_tile>(d, units.small[Number], by);
        wgmma_tf32_rs<Config::column_tile>(d, units.big[Number],
                                           descriptor_at<Config>(by, Config::part_bytes));
      }
      multiply_steps<Small, step_from<Number + 1>()>(d, units, weights);
    }
  }
  CONVT3D_DEVICE static void multiply(float (&d)[Config::sums], const SplitUnits<Config>& units,
                                      uint64_t weights) {
    wgmma_fence();
    multiply_steps<true, first_step>(d, units, weights);
    multiply_steps<false, first_step>(d, units, weights);
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

/// All sets of a block and the rows that begin at step `First`, from `Index` on; `Before` is the
/// one in flight, if any, in the other accumulators. Where registers have no room for those, each
/// set is added before the next one.
template <typename Config, int First, int Index, int Before>
CONVT3D_DEVICE void multiply_sets(PhasesSums<Config>& sum, int block, float (&product)[Config::sums],
                                  float (&other)[Config::sums], const SplitUnits<Config>& units,
                                  uint64_t weights) {
  using Set = PhasesSplitSet<Config, First, Index>;
  if constexpr (Index >= Set::all) {
    if constexpr (Before >= 0) {
      wgmma_wait<0>();
      PhasesSplitSet<Config, First, Before>::add(sum, block, other);
    }
  } else if constexpr (!Set::valid) {
    multiply_sets<Config, First, Index + 1, Before>(sum, block, product, other, units, weights);
  } else {
    Set::multiply(product, units, weights);
    if constexpr (CONVT3D_SPLIT_CHAINS == 1) {
      wgmma_wait<0>();
      Set::add(sum, block, product);
      multiply_sets<Config, First, Index + 1, -1>(sum, block, product, other, units, weights);
    } else {
      if constexpr (Before >= 0) {
        wgmma_wait<1>();
        PhasesSplitSet<Config, First, Before>::add(sum, block, other);
      }
      multiply_sets<Config, First, Index + 1, Index>(sum, block, other, product, units, weights);
    }
  }
}

/// All products of one stage from a step on. Nothing is in flight before and after.
template <typename Config, int Step>
CONVT3D_DEVICE void multiply_split(PhasesSums<Config>& sum, const PhasesSource<Config>& source,
                                   uint64_t weights) {
  if constexpr (Step < SplitUnits<Config>::all) {
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block) {
      SplitUnits<Config> units;
      units.template load<Step, 0>(source, block);
      units.template split<Step>();
      float product[2][Config::sums];
      multiply_sets<Config, Step, 0, -1>(sum, block, product[0], product[1], units, weights);
    }
    multiply_split<Config, Step + SplitUnits<Config>::most>(sum, source, weights);
  }
}

}  // namespace convt3d
