// The steps of a CTA, down columns of tiles along axis 0: positions, ring stage and gradient
// planes.
#pragma once
#include "wgrad/config.cuh"

namespace convt3d {

/// The position in a sweep: which column and slices, which stage, and the step's first plane.
template <typename Layout>
struct WgradSteps {
  const Layout& l;
  int step, i;
  int slot = 0, stage = 0, phase = 0;
  int sample, i0, i1, i2, o0, o1, o2;

  CONVT3D_DEVICE explicit WgradSteps(const Layout& l_) : l(l_), step(l_.begin) {
    int column = step / l.a.steps0;
    i = step - column * l.a.steps0;
    if (l.interleaved) column = l.tile.split;
    if constexpr (separate) {
      const int tiles = l.a.tiles1 * l.a.tiles2, slice = l.tile.split / tiles;
      i = slice % l.a.steps0;
      column = slice / l.a.steps0 * tiles + l.tile.split % tiles;
    }
    const int row = column / l.a.tiles2;
    i2 = (column - row * l.a.tiles2) * l.a.tile2;
    sample = row / l.a.tiles1;
    i1 = (row - sample * l.a.tiles1) * l.a.tile1 + l.a.first1;
    locate();
  }
  /// Whether a step loads all planes that it reads.
  CONVT3D_DEVICE bool first() const { return separate || step == l.begin || i == 0; }
  CONVT3D_DEVICE uint32_t plane(int q) const {
    const int at = slot + q;
    return l.g_ring + (at >= l.a.planes ? at - l.a.planes : at) * l.plane;
  }
  // Without branches: ptxas would serialise products around them.
  CONVT3D_DEVICE void advance() {
    ++step, ++stage;
    const bool around = stage == Layout::Config::stages;
    stage = around ? 0 : stage;
    phase ^= around;
    // The next step's first plane; a new column begins after this one's last plane.
    const bool column = separate || i + 1 == l.a.steps0;
    slot += column ? l.column_planes : l.fresh;
    slot -= slot >= l.a.planes ? l.a.planes : 0;
    if constexpr (!separate) i = column ? 0 : i + 1;
    i2 += column ? l.next2 * l.a.tile2 : 0;
    const bool row = i2 >= l.a.tiles2 * l.a.tile2;
    i2 -= row ? l.a.tiles2 * l.a.tile2 : 0;
    i1 += (column ? l.next1 * l.a.tile1 : 0) + (row ? l.a.tile1 : 0);
    const bool volume = i1 >= l.a.tiles1 * l.a.tile1 + l.a.first1;
    i1 -= volume ? l.a.tiles1 * l.a.tile1 : 0;
    bool next = volume;
    if constexpr (separate) {
      i += l.next0 + volume;
      next = i >= l.a.steps0;
      i -= next ? l.a.steps0 : 0;
    }
    sample += (column ? l.next_sample : 0) + next;
    locate();
  }

 private:
  static constexpr bool separate = Layout::Config::separate_steps;
  CONVT3D_DEVICE void locate() {
    i0 = i * l.a.tile0;
    o0 = i0 * Layer::stride0 - Layer::padding0 + l.k0_first * Layer::dilation0;
    o1 = i1 * Layer::stride1 - Layer::padding1;
    o2 = i2 * Layer::stride2 - Layer::padding2;
  }
};

}  // namespace convt3d
