// Outputs of a finished plane: each adds up its taps, from where the products of a position were
// put.
#pragma once
#include "col2im/walk.cuh"

namespace convt3d {

/// Outputs of a tile in one plane of the target, out of a buffer of its columns.
template <typename Config>
struct PlaneOutputs {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  static constexpr int slots2 = Axis2::slots;
  static constexpr bool last = Config::target_channels_last;
  static constexpr int64_t all_channels =
      tensor_channels(int64_t(Config::groups) * Config::target_channels);
  static constexpr bool rows_are_vectors = !last && (slots2 & (slots2 - 1)) == 0 &&
                                           slots2 * int(sizeof(Storage)) <= 16;

  const Col2imArguments<Config>& a;
  Divider by_tile2, by_tile;
  int64_t volume;
  bool aligned;

  CONVT3D_DEVICE explicit PlaneOutputs(const Col2imArguments<Config>& a_)
      : a(a_), by_tile2(a_.tile2), by_tile(a_.tile1 * a_.tile2), volume(a_.target.volume()) {
    aligned = rows_are_vectors && a.target.extent[2] % slots2 == 0 &&
              reinterpret_cast<uint64_t>(a.target.data) % (slots2 * sizeof(Storage)) == 0;
  }

  CONVT3D_DEVICE void operator()(const typename Col2imWalk<Config>::Leg& leg, int o0,
                                 uint32_t buffer) const {
    const int units = a.tile1 * a.tile2;
    const int lead = leg.unit2 + Axis2::min_shift - first_column<Config>(leg.unit2);
    const int channel = leg.group * Config::target_channels;
    Storage* plane = a.target.data + leg.sample * all_channels * volume +
                     (last ? channel + int64_t(o0) * a.target.stride0 * all_channels
                           : channel * volume + int64_t(o0) * a.target.stride0);
#pragma unroll 1
    for (int item = threadIdx.x; item < units * Config::target_channels; item += Config::threads) {
      const int j = Config::target_channels == 1 ? 0 : by_tile.quotient(item);
      const int unit = item - j * units;
      const int line = by_tile2.quotient(unit);
      const int beside = unit - line * a.tile2;
      const int o1 = (leg.unit1 + line) * Axis1::unit_destination;
      const int o2 = (leg.unit2 + beside) * Axis2::unit_destination;
      if (o1 >= a.target.extent[1] || o2 >= a.target.extent[2]) continue;
      const Taps taps(a, buffer + 4u * (j * Config::pitch), line, lead + beside);
      const float bias = Config::bias ? Type::load(__ldg(a.bias + channel + j)) : 0.f;
      const int position = o1 * a.target.extent[2] + o2;
      Storage* to = plane + (last ? position * all_channels + j : j * volume + position);
#pragma unroll
      for (int slot1 = 0; slot1 < Axis1::slots; ++slot1) {
        if (o1 + slot1 >= a.target.extent[1]) break;
        float row[slots2];
#pragma unroll
        for (int slot2 = 0; slot2 < slots2; ++slot2) row[slot2] = taps.sum(slot1, slot2, bias);
        if constexpr (Fusion::runs) {
#pragma unroll
          for (int slot2 = 0; slot2 < slots2; ++slot2)
            row[slot2] = fused<Config>(
                a.fusion, row[slot2], leg.group, j,
                to + slot2 * (last ? all_channels : 1) - a.target.data,
                o2 + slot2 < a.target.extent[2]);
        }
        store(to, row, a.target.extent[2] - o2);
        to += a.target.extent[2] * (last ? all_channels : 1);
      }
    }
  }

 private:
  /// The columns that a unit adds up: at the positions of its shifts, those of its taps.
  struct Taps {
    uint32_t lines[Axis1::shifts];
    bool inside[Axis2::shifts];  // of the tile's lines

    CONVT3D_DEVICE Taps(const Col2imArguments<Config>& a, uint32_t columns, int line,
                        int column) {
#pragma unroll
      for (int i = 0; i < Axis1::shifts; ++i)
        lines[i] = columns + 4u * ((line + i) * a.width + column);
#pragma unroll
      for (int i = 0; i < Axis2::shifts; ++i) inside[i] = unsigned(column + i) < unsigned(a.width);
    }
    CONVT3D_DEVICE float sum(int slot1, int slot2, float bias) const {
      float sum = bias;
#pragma unroll
      for (int k1 = 0; k1 < Layer::kernel1; ++k1) {
        if (!Axis1::valid(slot1, k1)) continue;
        const int line = Axis1::shift_of(slot1, k1) - Axis1::min_shift;
#pragma unroll
        for (int k2 = 0; k2 < Layer::kernel2; ++k2) {
          if (!Axis2::valid(slot2, k2)) continue;
          const int shift = Axis2::shift_of(slot2, k2) - Axis2::min_shift;
          if (inside[shift])
            sum += float_of(load_shared(
                lines[line] + 4u * (Config::column_of(k1, k2) * Config::pitch + shift)));
        }
      }
      return sum;
    }
  };

  CONVT3D_DEVICE void store(Storage* to, const float (&row)[slots2], int columns) const {
    if constexpr (rows_are_vectors) {
      if (aligned) {
        store_row<Type>(to, row);
        return;
      }
    }
#pragma unroll
    for (int slot2 = 0; slot2 < slots2; ++slot2)
      if (slot2 < columns)
        store_streaming(to + slot2 * (last ? all_channels : 1), Type::store(row[slot2]));
  }
};

}  // namespace convt3d
