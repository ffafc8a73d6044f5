// The epilogue of the gather kernel: bias, conversion, and stores that follow the layout.
//
// channels_last: a lane owns two neighbouring channels of a position and stores them as one word.
// Contiguous: a warp stages eight columns of its units as rows in shared memory, in destination
// order (the slots of axis 2 interleave), and stores each row with neighbouring lanes on
// neighbouring addresses.
#pragma once
#include "gather_fill.cuh"

namespace convt3d {

template <typename Config>
struct Store {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;

  static constexpr int64_t all_channels = int64_t(Config::groups) * Config::target_channels;
  static constexpr int warp_units = 16 * Config::fragments_m;
  static constexpr int slots2 = Axis2::slots;
  // Columns of a fragment that interleave into one staged row.
  static constexpr int flat_run = Config::flat && 8 % CONVT3D_STRIDE2 == 0 ? CONVT3D_STRIDE2 : 1;
  static constexpr int run = Config::flat ? flat_run : slots2;
  static constexpr int staged_rows = Config::flat ? 8 / flat_run : 8;
  static constexpr int row_length = warp_units * run;
  static constexpr int row_pitch = row_length + 4;
  static constexpr int warp_words = staged_rows * row_pitch;
  // Neighbouring elements that one lane stores at once where they are aligned.
  static constexpr int pair = sizeof(Storage) == 2 ? 2 : 1;
  static constexpr int lane_items = div_up(row_length, 32 * pair);

  const GatherArguments<Config>& arguments;
  const GatherTile<Config>& tile;
  int64_t volume;
  Storage* base;

  CONVT3D_DEVICE Store(const GatherArguments<Config>& arguments_, const GatherTile<Config>& tile_)
      : arguments(arguments_), tile(tile_) {
    volume = arguments.target.volume();
    base = arguments.target.group_base(tile.sample, tile.group, Config::target_channels,
                                       all_channels, Config::target_channels_last);
  }

  /// Position of a unit's destination at the given slots, or -1 outside the tensor.
  CONVT3D_DEVICE int position(int unit, int slot0, int slot1, int slot2) const {
    const int u2 = unit % Config::tile2;
    const int u1 = unit / Config::tile2 % Config::tile1;
    const int u0 = unit / (Config::tile2 * Config::tile1);
    const int o0 = (tile.unit0 + u0) * Axis0::unit_destination + slot0;
    const int o1 = (tile.unit1 + u1) * Axis1::unit_destination + slot1;
    const int o2 = (tile.unit2 + u2) * Axis2::unit_destination + slot2;
    const bool inside = unit < Config::units && arguments.target.inside(o0, o1, o2);
    return inside ? o0 * arguments.target.stride0 + o1 * arguments.target.stride1 + o2 : -1;
  }

  CONVT3D_DEVICE float bias_of(int channel) const {
    if constexpr (Config::bias) {
      if (channel < Config::target_channels)
        return Type::load(
            __ldg(arguments.bias + tile.group * Config::target_channels + channel));
    }
    return 0.f;
  }

  /// Splits a column into produced channel and flat slots.
  struct Column {
    int channel, slot0, slot1, slot2;
  };
  CONVT3D_DEVICE Column decode(int column) const {
    if constexpr (!Config::flat) return Column{column, tile.phase0, tile.phase1, 0};
    int slot;
    Column result;
    if constexpr (Config::target_channels_last) {
      slot = column / Config::target_channels;
      result.channel = column - slot * Config::target_channels;
    } else {
      result.channel = column / Config::flat_slots;
      slot = column - result.channel * Config::flat_slots;
    }
    result.slot2 = slot % CONVT3D_STRIDE2;
    result.slot1 = slot / CONVT3D_STRIDE2 % CONVT3D_STRIDE1;
    result.slot0 = slot / (CONVT3D_STRIDE2 * CONVT3D_STRIDE1);
    return result;
  }

  // ------------------------------------------------------------ channels_last

  CONVT3D_DEVICE void store_channels(const float (&c)[4], int unit, int column, int slot0,
                                     int slot2) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = unit + 8 * half;
      if constexpr (Config::target_channels % 2 == 0) {
        if (column >= Config::columns) continue;
        const Column at = decode(column);
        const int where = position(row, at.slot0 + slot0, at.slot1, at.slot2 + slot2);
        if (where < 0) continue;
        Storage* to = base + int64_t(where) * all_channels + at.channel;
        const float low = c[2 * half] + bias_of(at.channel);
        const float high = c[2 * half + 1] + bias_of(at.channel + 1);
        if constexpr (sizeof(Storage) == 2)
          store_streaming(reinterpret_cast<uint32_t*>(to), Type::pack(low, high));
        else
          store_streaming(reinterpret_cast<float2*>(to), make_float2(low, high));
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (column + i >= Config::columns) continue;
          const Column at = decode(column + i);
          const int where = position(row, at.slot0 + slot0, at.slot1, at.slot2 + slot2);
          if (where < 0) continue;
          store_streaming(base + int64_t(where) * all_channels + at.channel,
                          Type::store(c[2 * half + i] + bias_of(at.channel)));
        }
      }
    }
  }

  // ------------------------------------------------------------ contiguous

  /// Element e of a staged row: its unit within the warp, and which column of the run it is.
  CONVT3D_DEVICE void store_row(const float* staged, int row, int first_unit, int slot0,
                                int column) const {
    const Column first = decode(column + (Config::flat ? row * run : row));
    if (first.channel >= Config::target_channels) return;
    Storage* to = base + int64_t(first.channel) * volume;
#pragma unroll
    for (int item = 0; item < lane_items; ++item) {
      const int e = (item * 32 + int(threadIdx.x % 32)) * pair;
      if (row_length % (32 * pair) != 0 && e >= row_length) continue;
      int where[pair];
      float value[pair];
#pragma unroll
      for (int i = 0; i < pair; ++i) {
        where[i] = position(first_unit + (e + i) / run, first.slot0 + slot0, first.slot1,
                            first.slot2 + (e + i) % run);
        value[i] = staged[row * row_pitch + e + i];
      }
      if constexpr (pair == 2) {
        const bool together = where[0] >= 0 && where[1] == where[0] + 1 &&
                              reinterpret_cast<uint64_t>(to + where[0]) % 4 == 0;
        if (together) {
          store_streaming(reinterpret_cast<uint32_t*>(to + where[0]),
                          Type::pack(value[0], value[1]));
          continue;
        }
      }
#pragma unroll
      for (int i = 0; i < pair; ++i)
        if (where[i] >= 0) store_streaming(to + where[i], Type::store(value[i]));
    }
  }

  /// Writes one fragment (rows g and g + 8, columns 2t and 2t + 1) into its staged rows.
  CONVT3D_DEVICE void stage(float* staged, const float (&c)[4], int m, int slot2, int column,
                            int lane) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int in_fragment = 2 * (lane % 4) + i % 2;
      const int unit = 16 * m + lane / 4 + 8 * (i / 2);
      const int row = Config::flat ? in_fragment / run : in_fragment;
      const int e = unit * run + (Config::flat ? in_fragment % run : slot2);
      staged[row * row_pitch + e] = c[i] + bias_of(decode(column + in_fragment).channel);
    }
  }
};

template <typename Config>
CONVT3D_DEVICE void store_tile(
    const GatherArguments<Config>& arguments, const GatherTile<Config>& tile,
    const float (&sum)[Config::Axis0::slots][Config::Axis2::slots][Config::fragments_m]
                      [Config::fragments_n][4],
    uint32_t, int warp_m, int warp_n, int lane) {
  using S = Store<Config>;
  extern __shared__ __align__(128) unsigned char shared[];
  const S store(arguments, tile);
  const int first_unit = warp_m * S::warp_units;
  const int first_column =
      tile.column_tile * Config::column_tile + warp_n * Config::fragments_n * 8;
  float* staged =
      reinterpret_cast<float*>(shared) + (warp_m * Config::warps_n + warp_n) * S::warp_words;
#pragma unroll
  for (int n = 0; n < Config::fragments_n; ++n) {
    const int column = first_column + 8 * n;
    if (column >= Config::columns) continue;
#pragma unroll
    for (int slot0 = 0; slot0 < Config::Axis0::slots; ++slot0) {
      if constexpr (Config::target_channels_last) {
#pragma unroll
        for (int slot2 = 0; slot2 < S::slots2; ++slot2)
#pragma unroll
          for (int m = 0; m < Config::fragments_m; ++m)
            store.store_channels(sum[slot0][slot2][m][n], first_unit + 16 * m + lane / 4,
                                 column + 2 * (lane % 4), slot0, slot2);
      } else {
#pragma unroll
        for (int slot2 = 0; slot2 < S::slots2; ++slot2)
#pragma unroll
          for (int m = 0; m < Config::fragments_m; ++m)
            store.stage(staged, sum[slot0][slot2][m][n], m, slot2, column, lane);
        __syncwarp();
#pragma unroll
        for (int row = 0; row < S::staged_rows; ++row)
          store.store_row(staged, row, first_unit, slot0, column);
        __syncwarp();
      }
    }
  }
}

}  // namespace convt3d
