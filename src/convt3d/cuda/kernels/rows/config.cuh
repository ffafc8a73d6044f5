// The compile-time description of one kernel of rows/kernel.cu and of its packed weights. The
// macros are set by plan/rows.py.
#pragma once
#include "device/arithmetic.cuh"
#include "epilogue/fusion.cuh"
#include "geometry/axis.cuh"
#include "geometry/layer.cuh"

namespace convt3d {

struct RowsConfig : Layer {
  using Math = CONVT3D_MATH;
  static constexpr bool forward = true;
  static constexpr bool bias = CONVT3D_BIAS;
  /// Operands are split in two float16 parts (MathF16x3), else they are of 16 bits.
  static constexpr bool in_f16x3 = is_f16x3<Math>;
  static_assert(in_f16x3 == (Type::channels_per_word == 1), "products are of 16 bits");

  using Axis0 = StaticAxis<true, kernel0, stride0, padding0, dilation0, 1>;
  using Axis1 = StaticAxis<true, kernel1, stride1, padding1, dilation1, 1>;
  using Axis2 = StaticAxis<true, kernel2, stride2, padding2, dilation2, 1>;

  static constexpr int octets = div_up(source_channels, 8);
  static constexpr int column_tile = 8;
  static constexpr int column_tiles = div_up(target_channels, column_tile);
  static constexpr int n_tiles = groups * column_tiles;

  static constexpr int consumers = CONVT3D_CONSUMERS;  // warpgroups
  static constexpr int producers = CONVT3D_PRODUCERS;  // warps of each
  static constexpr int ring = CONVT3D_RING;            // stages of each
  static constexpr int threads = 128 * consumers + 32 * consumers * producers;
  /// Warps, for RingRegisters.
  static constexpr int warps = 4 * consumers;

  /// Units of a tile, along W: blocks of 64, each a product's rows.
  static constexpr int blocks = CONVT3D_BLOCKS;
  static constexpr int units = 64 * blocks;
  /// Outputs of odd widths leave as streams (rows/streams.cuh), from tiles as wide as rows are;
  /// else lanes store two neighbours at once.
  static constexpr bool streams = CONVT3D_STREAMS;
  static_assert(!streams || !in_f16x3, "streams are of 16 bits");
  static_assert(streams || blocks == 1, "only streams have several blocks");
  /// A stage: [slice along D][octet of channels][low half, high half][position][8 channels].
  static constexpr int slices = Axis0::shifts;
  static constexpr int parts = in_f16x3 ? 2 : 1;
  static constexpr int shifts = Axis2::shifts;
  static constexpr int positions = units + shifts - 1;
  static constexpr int plane_bytes = 16 * positions;
  static constexpr int octet_bytes = parts * plane_bytes;
  static constexpr int slice_bytes = octets * octet_bytes;
  static constexpr int stage_bytes = slices * slice_bytes;

  /// Columns: [slot along D][tap along H][slot along W, channel], a lane's two of a product being
  /// neighbours along W.
  static constexpr int slots2 = Axis2::slots;
  static_assert(slots2 == 2, "a lane stores pairs of outputs");
  static constexpr int tap_columns = 2 * column_tile;
  static constexpr int slot_columns = kernel1 * tap_columns;
  static constexpr int sums = slot_columns / 2;  // of a lane and slot along D
  CONVT3D_CONSTEXPR static int channel_of(int column) { return column % 16 / 8 * 4 + column % 8 / 2; }
  /// Those of a slice: of slots that have a tap there.
  CONVT3D_CONSTEXPR static bool meets0(int slice, int slot) {
    return Axis0::tap(slot, slice + Axis0::min_shift) >= 0;
  }
  CONVT3D_CONSTEXPR static int slots_of(int slice) {
    int count = 0;
    for (int slot = 0; slot < Axis0::slots; ++slot) count += meets0(slice, slot);
    return count;
  }
  CONVT3D_CONSTEXPR static int slot_of(int slice, int rank) {
    int slot = 0;
    for (; rank > 0 || !meets0(slice, slot); ++slot) rank -= meets0(slice, slot);
    return slot;
  }
  CONVT3D_CONSTEXPR static int columns_of(int slice) { return slots_of(slice) * slot_columns; }
  static_assert(slot_columns <= 256, "columns of one product");

  /// Products of a slice, 16 deep: crosswise ones (low half of the source by high one of the
  /// weights, and the reverse) of each octet and shift, then those of each octet and pair of
  /// shifts.
  static constexpr int cross_steps = in_f16x3 ? octets * shifts : 0;
  static constexpr int pairs = div_up(shifts, 2);
  static constexpr int steps = cross_steps + octets * pairs;
  static_assert(shifts >= 2, "pairs of shifts");
  /// An odd last shift comes with the one before it, whose weights are zeros.
  CONVT3D_CONSTEXPR static int pair_shift(int pair) {
    return 2 * pair + 2 <= shifts ? 2 * pair : shifts - 2;
  }

  // Packed weights of an N tile: [slice][step][two octets of its depth][slot along D][column][8
  // channels], then what sums of each channel are to be multiplied by.
  CONVT3D_CONSTEXPR static int weights_before(int slice) {
    int bytes = 0;
    for (int i = 0; i < slice; ++i) bytes += steps * columns_of(i) * 32;
    return bytes;
  }
  CONVT3D_CONSTEXPR static int weight_bytes() { return weights_before(slices); }
  CONVT3D_CONSTEXPR static int n_tile_bytes() {
    return weight_bytes() + (in_f16x3 ? 4 * column_tile : 0);
  }

  /// Rows of the target that a source row reaches, of which the first `stride1` are then
  /// complete.
  static constexpr int reach = (kernel1 - 1) * dilation1 + 1;
  static constexpr int kept = reach > stride1 ? reach - stride1 : 0;
  /// Source rows before the first of a run of rows that reach into it.
  static constexpr int back = (reach - 1) / stride1;
  /// The tap that reaches the row'th, or -1.
  CONVT3D_CONSTEXPR static int tap_of(int row) {
    return row < reach && row % dilation1 == 0 ? row / dilation1 : -1;
  }
};

/// Shared memory, in bytes.
template <typename Config>
struct RowsShared {
  static constexpr int warpgroup = Config::ring * Config::stage_bytes;
  static constexpr int weights = Config::consumers * warpgroup;
  // Of each warpgroup, by stage: full, empty; what sums of a row are to be multiplied by. Of
  // weights.
  static constexpr int barriers = round_up(weights + Config::n_tile_bytes(), 16);
  static constexpr int scales = barriers + 8 * 2 * Config::ring * Config::consumers;
  static constexpr int weights_barrier = scales + 8 * Config::ring * Config::consumers;
  static constexpr int staging = round_up(weights_barrier + 8, 128);
};

}  // namespace convt3d
