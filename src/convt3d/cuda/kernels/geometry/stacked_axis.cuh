// The axis that a CTA sweeps along, as compile-time tables.
//
// This is the col2im form of a convolution: every source plane is multiplied with all taps of
// this axis at once, their columns stacked side by side, and the products go to a *window* of
// destination planes that stays in registers. A step takes `source_step` source planes; after it
// the first `target_step` planes of the window are complete, leave, and the window moves on. No
// phase and no halo exists along this axis, whatever the stride.
//
//   forward   source plane i adds tap k to destination  i * s - p + k
//   backward  source plane o adds tap k to destination (o + p - k) / s, where that is whole
//
// Dilated taps, of stride 1, connect every `Dilation`-th plane with every `Dilation`-th: these
// make up so many volumes without dilation, interleaved, each swept through by itself.
#pragma once
#include "geometry/axis.cuh"

namespace convt3d {

template <bool Forward, int Kernel, int Stride, int Padding, int Dilation, int Planes>
struct StackedAxis {
  static constexpr int kernel = Kernel;
  /// Volumes of planes that do not meet, and planes from one of the same volume to the next.
  static constexpr int interleaved = Kernel > 1 ? Dilation : 1;
  static_assert(interleaved == 1 || Stride == 1, "dilated taps are stacked at stride 1");
  static constexpr int source_step = Planes * (Forward ? 1 : Stride);
  static constexpr int target_step = Planes * (Forward ? Stride : 1);
  static constexpr int back = Forward ? 0 : (Kernel - 1) / Stride;
  /// Step j takes the source planes from number j * source_step on; its window begins at number
  /// j * target_step of the destination's. Of an interleaved volume these are the planes
  static constexpr int source_origin = Forward ? 0 : -Padding;
  static constexpr int target_origin = Forward ? -Padding : -back * interleaved;
  CONVT3D_CONSTEXPR static int source_plane(int number, int volume) {
    return number * interleaved + volume + source_origin;
  }
  CONVT3D_CONSTEXPR static int target_plane(int number, int volume) {
    return number * interleaved + volume + target_origin;
  }
  static constexpr int reached = Forward ? (Planes - 1) * Stride + Kernel : back + Planes;
  static constexpr int window = reached > target_step ? reached : target_step;
  /// Steps before a step that reach into its window.
  static constexpr int warm_steps = div_up(window, target_step) - 1;

  /// Taps of the step's source plane `plane`; they fall on neighbouring planes of the window.
  CONVT3D_CONSTEXPR static int count(int plane) {
    if (Forward) return Kernel;
    const int residue = plane % Stride;
    return residue < Kernel ? div_up(Kernel - residue, Stride) : 0;
  }
  CONVT3D_CONSTEXPR static int first(int plane) {
    return Forward ? plane * Stride : plane / Stride - (count(plane) - 1) + back;
  }
  /// Where these taps stand in packed order.
  CONVT3D_CONSTEXPR static int position(int plane) {
    if (Forward) return 0;
    int before = 0;
    for (int residue = 0; residue < plane % Stride; ++residue) before += count(residue);
    return before;
  }
  CONVT3D_DEVICE static int tap_at(int position) {
    if (Forward) return position;
    int residue = 0;
    for (; position >= count(residue); ++residue) position -= count(residue);
    return residue + (count(residue) - 1 - position) * Stride;
  }
  /// The end of the run of window planes from `from` on that every source plane uses as a whole:
  /// accumulators of different products must be the same or disjoint.
  CONVT3D_CONSTEXPR static int block_end(int from, int end) {
    for (int at = from + 1; at < end; ++at)
      for (int plane = 0; plane < source_step; ++plane)
        if (count(plane) > 0 && (first(plane) == at || first(plane) + count(plane) == at)) return at;
    return end;
  }
};

}  // namespace convt3d
