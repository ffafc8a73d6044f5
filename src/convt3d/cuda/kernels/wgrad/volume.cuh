// The gradient of samples that are one step each, copied to the same places of shared memory
// every time.
#pragma once
#include "wgrad/walk.cuh"

namespace convt3d {

/// The gradient where a step is a whole sample: a thread's pieces of 16 bytes lie at the same
/// places of every sample, and are worked out once. What lies outside the tensor stays zero.
template <typename Layout>
struct VolumeFill {
  using Config = typename Layout::Config;
  using Storage = typename Config::Storage;
  static constexpr int most = 8;  // pieces of a thread

  int from[most];  // elements; negative: none
  uint32_t to[most];

  CONVT3D_DEVICE VolumeFill(const Layout& l, const WgradSteps<Layout>& at) {
    const auto& gradient = l.a.gradient;
    const Inside planes(at.o0, Config::step0, gradient.extent[0], l.span);
    const Inside rows(at.o1, Config::step1, gradient.extent[1], l.rows_g);
    const int first2 = at.o2 & -Config::line;
    const int pieces = min(gradient.extent[2], l.a.row_pitch + first2) / Config::line;  // of a row
    const int items = Config::channel_tile_m * planes.count * rows.count * pieces;
    const int live = l.tile.target_live();
#pragma unroll
    for (int k = 0; k < most; ++k) {
      const int item = threadIdx.x + k * Config::producers;
      int rest = item / max(pieces, 1);
      const int x = (item - rest * pieces) * Config::line;
      const int row = rows.first + rest % max(rows.count, 1);
      rest /= max(rows.count, 1);
      const int plane = planes.first + rest % max(planes.count, 1);
      const int channel = rest / max(planes.count, 1);
      from[k] = -1, to[k] = 0;
      if (item >= items || channel >= live) continue;
      from[k] = channel * int(gradient.volume()) +
                (at.o0 + plane * Config::step0) * gradient.stride0 +
                (at.o1 + row * Config::step1) * gradient.stride1 + x;
      to[k] = plane * l.plane + (channel * l.a.channel_pitch + row * l.a.row_pitch + x - first2) *
                                    Config::bytes;
    }
  }
  /// Starts the copies of this thread, from a sample's first channel.
  CONVT3D_DEVICE void copy(const Storage* base, uint32_t planes) const {
#pragma unroll
    for (int k = 0; k < most; ++k)
      if (from[k] >= 0) async_copy<16>(planes + to[k], base + from[k], true);
  }
  /// Zeros all planes, by all threads.
  CONVT3D_DEVICE static void clear(const Layout& l) {
    for (uint32_t at = threadIdx.x * 16; at < l.a.planes * l.plane; at += Config::threads * 16)
      store_shared(l.g_ring + at, 0u, 0u, 0u, 0u);
  }

 private:
  /// Which of `most` positions, `step` apart, lie in [0, extent).
  struct Inside {
    int first, count;
    CONVT3D_DEVICE Inside(int position, int step, int extent, int most) {
      first = position < 0 ? div_up(-position, step) : 0;
      count = min(div_up(extent - position, step), most) - first;
      count = max(count, 0);
    }
  };
};

}  // namespace convt3d
