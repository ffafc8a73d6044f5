// What the gradient by input of strided layers on warpgroup products has at compile time beside
// phases/config.cuh. The macros are set by plan/strided_dgrad/.
#pragma once
#include "phases/warp_store.cuh"

namespace convt3d {

/// Positions that taps of an axis meet are multiples of this from each other.
CONVT3D_CONSTEXPR int met_step(int kernel, int stride, int dilation) {
  return kernel == 1 ? stride : gcd(stride, dilation);
}

struct StridedDgradConfig : PhasesConfig {
  static_assert(!forward && phased == 2, "taps of D and H are walked");
  /// Whether boxes come as runs of whole lines, see strided_dgrad/runs.cuh, or by TMA.
  static constexpr bool runs = CONVT3D_RUNS;
  /// Whether a box has what all taps of axis 0 read, or one tap.
  static constexpr bool whole_boxes = CONVT3D_WHOLE_BOXES;
  /// The same of lines that are multiples of 16 bytes, see strided_dgrad/pairs.cuh.
  static constexpr bool aligned_runs = CONVT3D_ALIGNED_RUNS;
  static_assert(!aligned_runs || (lane_pairs && !runs && !whole_boxes), "pairs, a slice a box");
  /// Or whole volumes, see strided_dgrad/volumes.cuh.
  static constexpr bool volumes = CONVT3D_VOLUMES;
  /// Lanes store their sums without staging, else warps store their own.
  static constexpr bool lane_stores = CONVT3D_LANE_STORES;
  static constexpr int met0 =
      volumes ? 1 : met_step(Axis0::kernel, stride0, dilation0);
  static constexpr int met1 =
      runs || aligned_runs || volumes ? 1 : met_step(Axis1::kernel, stride1, dilation1);
  // In slices and lines of a box: from a unit to the next, and from a tap to the next.
  static constexpr int slice_step = whole_boxes ? stride0 / met0 : 1;
  static constexpr int line_step = stride1 / met1;
  static constexpr int tap_slices = whole_boxes ? dilation0 / met0 : 0;
  static constexpr int tap_lines = dilation1 / met1;
  static constexpr int boxes_of_chunk = whole_boxes ? 1 : Axis0::kernel;
  static constexpr int taps_of_box = whole_boxes ? Axis0::kernel : 1;

  /// Threads that bring a box: by bulk copies one for each channel, lanes of several warps, since
  /// what a thread computes for a copy and issues takes 400 cycles.
  static constexpr int filling_warps = 3;
  static constexpr int fillers = runs || aligned_runs || volumes ? chunk_channels : 1;

  static_assert(!sweep || (!whole_boxes && Sweep::dense), "a slice a box; taps are neighbours");
  /// Sets of sums: units of D that wait for slices to come.
  static constexpr int window = sweep ? Sweep::window : 1;

  /// Neighbours along W that are loaded at once: the first at a multiple of `pair`.
  static constexpr int pair = position_step % 2 == 0 ? 2 : 1;
};
using PhasesKernel = StridedDgradConfig;

/// One step of a stage's products: loads a fragment, whose products are left in flight.
template <int Steps, int Fragments, int Step>
struct RingStep {
  // The ring of fragments goes on from stage to stage if it divides their steps.
  static constexpr bool broken = Steps % Fragments != 0;
  static constexpr int pending = broken && Step == 0 ? 0 : Fragments - 1;
  /// Here only products of this stage are in flight.
  static constexpr bool releases = Step == (broken ? 0 : Fragments - 1);
};

/// The steps of a block whose fragments hold taps of W. A single block's are two, so that the
/// ring of fragments goes on from stage to stage: the first loads what both need.
template <typename Config>
struct TapParts {
  static constexpr int all = Config::Axis2::kernel;
  static constexpr int count = Config::blocks == 1 && all > 1 ? 2 : 1;
  static constexpr int taps = (all + count - 1) / count;
  CONVT3D_CONSTEXPR static int first(int step) { return step % count * taps; }
  CONVT3D_CONSTEXPR static int end(int step) {
    return first(step) + taps < all ? first(step) + taps : all;
  }
};

/// The sums of the first `Columns` columns.
template <int Columns, int Sums>
CONVT3D_DEVICE float (&columns_of(float (&sum)[Sums]))[Columns / 2] {
  static_assert(Columns / 2 <= Sums, "sums of the thread");
  return reinterpret_cast<float(&)[Columns / 2]>(sum[0]);
}

/// A reader whose fragments hold the taps of W of one block's units, fetched a step ahead.
template <typename Config>
struct TapReader {
  using Parts = TapParts<Config>;
  static constexpr int steps = Parts::count * Config::blocks;
  static constexpr bool ahead = true;
  using Fragment = uint32_t[Parts::taps][4];

  template <int Step, int Columns, int Pitch, int Sums>
  CONVT3D_DEVICE static void products(float (&sum)[Config::blocks][Sums], const Fragment& units,
                                      uint64_t weights) {
#pragma unroll
    for (int tap2 = Parts::first(Step); tap2 < Parts::end(Step); ++tap2)
      wgmma_product_of<Columns>(typename Config::Math{},
                                columns_of<Columns>(sum[Step / Parts::count]),
                                units[tap2 - Parts::first(Step)],
                                weights + tap2 * Config::quads * Pitch);
  }
};

/// The slice of the source that begins a box, whose tap of D is `tap0`.
template <typename Config>
CONVT3D_DEVICE int first_slice(const WorkTile& work, int tap0) {
  return work.first[0] * Config::Axis0::unit_source + Config::Axis0::min_shift +
         tap0 * Layer::dilation0;
}

}  // namespace convt3d
