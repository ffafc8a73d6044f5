// The epilogue of the gather kernel: bias, conversion, and stores that follow the layout.
//
//   channels_last  a lane owns two neighbouring channels of a position and stores them as one
//   paired         contiguous, and a lane owns two neighbours along W (two slots of axis 2): where
//                  rows have even length they leave as one store, straight from registers
//   staged         contiguous: a warp stages eight columns of its units as rows in shared memory,
//                  in destination order (the slots of axis 2 interleave), and stores each row with
//                  neighbouring lanes on neighbouring addresses
#pragma once
#include "ampere/gather/load.cuh"

namespace convt3d {

template <typename Config>
struct Store {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  using Sums = float[Axis0::slots][Axis2::slots][Config::fragments_m][Config::fragments_n][4];

  static constexpr int64_t all_channels =
      tensor_channels(int64_t(Config::groups) * Config::target_channels);
  static constexpr int warp_units = 16 * Config::fragments_m;
  static constexpr int slots2 = Axis2::slots;
  static constexpr int row_length = warp_units * slots2;
  static constexpr int row_pitch = row_length + 4;
  static constexpr int warp_words = 8 * row_pitch;
  // Neighbouring elements that one lane stores at once where they are aligned.
  static constexpr int pair = sizeof(Storage) == 2 ? 2 : 1;
  static constexpr bool paired = !Config::target_channels_last && slots2 % 2 == 0;

  const GatherArguments<Config>& arguments;
  const GatherTile<Config>& tile;
  const TileUnits& units;
  int64_t volume;
  Storage* base;
  int first_unit, first_column, lane;

  CONVT3D_DEVICE Store(const GatherArguments<Config>& arguments_, const GatherTile<Config>& tile_,
                       const TileUnits& units_, int warp_m, int warp_n, int lane_)
      : arguments(arguments_), tile(tile_), units(units_), lane(lane_) {
    volume = arguments.target.volume();
    base = arguments.target.group_base(tile.sample, tile.group, Config::target_channels,
                                       all_channels, Config::target_channels_last);
    first_unit = warp_m * warp_units;
    first_column = tile.column_tile * Config::column_tile + warp_n * Config::fragments_n * 8;
  }

  /// Where a unit's first destination lies, and how many destinations fit from there on along
  /// each axis (one byte an axis; 0 where there is none).
  struct Spot {
    int position;
    int room;
    CONVT3D_DEVICE bool fits(int slot0, int slot2) const {
      return (room & 255) > slot0 && (room >> 8 & 255) > 0 && room >> 16 > slot2;
    }
  };
  CONVT3D_DEVICE Spot spot(int unit) const {
    int u0, u1, u2;
    units.locate(unit, u0, u1, u2);
    const int o0 = (tile.unit0 + u0) * Axis0::unit_destination + tile.phase0;
    const int o1 = (tile.unit1 + u1) * Axis1::unit_destination + tile.phase1;
    const int o2 = (tile.unit2 + u2) * Axis2::unit_destination;
    const auto& target = arguments.target;
    if (unit >= units.count || !target.inside(o0, o1, o2)) return Spot{0, 0};
    return Spot{o0 * target.stride0 + o1 * target.stride1 + o2,
                min(target.extent[0] - o0, 255) | min(target.extent[1] - o1, 255) << 8 |
                    min(target.extent[2] - o2, 255) << 16};
  }

  CONVT3D_DEVICE float bias_of(int channel) const {
    if constexpr (Config::bias) {
      if (channel < Config::target_channels)
        return Type::load(__ldg(arguments.bias + tile.group * Config::target_channels + channel));
    }
    return 0.f;
  }

  /// The steps of the fusion on an output of the group's channel; `value` is its sum with the bias.
  CONVT3D_DEVICE float fuse(float value, int channel, const Storage* to, bool exists = true) const {
    return fused<Config>(arguments.fusion, value, tile.group, channel,
                         to - arguments.target.data, exists);
  }

  CONVT3D_DEVICE int slot_offset(int slot0, int slot2) const {
    return slot0 * arguments.target.stride0 + slot2;
  }

  /// The spots of this lane's rows g and g + 8 of each fragment.
  CONVT3D_DEVICE void lane_spots(Spot (&spots)[Config::fragments_m][2]) const {
#pragma unroll
    for (int m = 0; m < Config::fragments_m; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        spots[m][half] = spot(first_unit + 16 * m + 8 * half + lane / 4);
  }

  // ------------------------------------------------------------ channels_last

  CONVT3D_DEVICE void channels_last(const Sums& sum) const {
    constexpr bool together = Config::target_channels % 2 == 0;
    Spot spots[Config::fragments_m][2];
    lane_spots(spots);
#pragma unroll
    for (int n = 0; n < Config::fragments_n; ++n) {
      const int column = first_column + 8 * n + 2 * (lane % 4);
      const float bias[2] = {bias_of(column), bias_of(column + 1)};
#pragma unroll
      for (int slot0 = 0; slot0 < Axis0::slots; ++slot0)
#pragma unroll
        for (int slot2 = 0; slot2 < slots2; ++slot2)
#pragma unroll
          for (int m = 0; m < Config::fragments_m; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const float* c = sum[slot0][slot2][m][n] + 2 * half;
              const Spot& s = spots[m][half];
#pragma unroll
              for (int i = 0; i < (together ? 1 : 2); ++i) {
                if (column + i >= Config::target_channels || !s.fits(slot0, slot2)) continue;
                Storage* to = base + column + i +
                              int64_t(s.position + slot_offset(slot0, slot2)) * all_channels;
                if constexpr (Fusion::runs) {
                  float output[2];
#pragma unroll
                  for (int j = 0; j < (together ? 2 : 1); ++j)
                    output[j] = fuse(c[i + j] + bias[i + j], column + i + j, to + j);
                  store_channels<Type, together>(to, output, 1);
                } else if constexpr (together)
                  store_two<Type>(to, c[0] + bias[0], c[1] + bias[1]);
                else
                  store_streaming(to, Type::store(c[i] + bias[i]));
              }
            }
    }
  }

  // ------------------------------------------------------------ contiguous, paired

  /// Whether every pair of neighbours along W is whole and aligned.
  CONVT3D_DEVICE bool pairs_aligned() const {
    return arguments.target.extent[2] % 2 == 0 &&
           reinterpret_cast<uint64_t>(arguments.target.data) % (2 * sizeof(Storage)) == 0;
  }

  CONVT3D_DEVICE void pairs(const Sums& sum) const {
    Spot spots[Config::fragments_m][2];
    lane_spots(spots);
#pragma unroll
    for (int n = 0; n < Config::fragments_n; ++n) {
      const int column = first_column + 8 * n + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (column + i >= Config::target_channels) continue;
        const float bias = bias_of(column + i);
        Storage* channel = base + (column + i) * volume;
#pragma unroll
        for (int slot0 = 0; slot0 < Axis0::slots; ++slot0)
#pragma unroll
          for (int slot2 = 0; slot2 + 1 < slots2; slot2 += 2)
#pragma unroll
            for (int m = 0; m < Config::fragments_m; ++m)
#pragma unroll
              for (int half = 0; half < 2; ++half)
                if constexpr (Fusion::runs) {
                  Storage* to = channel + spots[m][half].position + slot_offset(slot0, slot2);
                  float output[2];
#pragma unroll
                  for (int j = 0; j < 2; ++j)
                    output[j] = fuse(sum[slot0][slot2 + j][m][n][2 * half + i] + bias, column + i,
                                     to + j, spots[m][half].fits(slot0, slot2));
                  if (spots[m][half].fits(slot0, slot2))
                    store_two<Type>(to, output[0], output[1]);
                } else if (spots[m][half].fits(slot0, slot2))
                  store_two<Type>(channel + spots[m][half].position + slot_offset(slot0, slot2),
                                  sum[slot0][slot2][m][n][2 * half + i] + bias,
                                  sum[slot0][slot2 + 1][m][n][2 * half + i] + bias);
      }
    }
  }

  // ------------------------------------------------------------ contiguous, staged

  /// Writes one n-column of fragments into the warp's staged rows, bias added.
  CONVT3D_DEVICE void stage(float* staged, const Sums& sum, int slot0, int n, int column) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int in_fragment = 2 * (lane % 4) + i;
      const float bias = bias_of(column + in_fragment);
      float* row = staged + in_fragment * row_pitch + lane / 4 * slots2;
#pragma unroll
      for (int m = 0; m < Config::fragments_m; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int slot2 = 0; slot2 < slots2; ++slot2)
            row[(16 * m + 8 * half) * slots2 + slot2] =
                Config::bias ? sum[slot0][slot2][m][n][2 * half + i] + bias
                             : sum[slot0][slot2][m][n][2 * half + i];
    }
  }

  /// An element of a staged row: where it goes, and how many slots of axis 0 fit there (0:
  /// nowhere).
  struct Element {
    int position, room0;
    CONVT3D_DEVICE bool before(const Element& next) const {
      return room0 > 0 && next.room0 == room0 && next.position == position + 1;
    }
  };
  CONVT3D_DEVICE Element element(int e) const {
    const Spot s = spot(first_unit + e / slots2);
    const bool exists = e < row_length && s.fits(0, e % slots2);
    return Element{s.position + e % slots2, exists ? s.room & 255 : 0};
  }

  CONVT3D_DEVICE void staged(const Sums& sum, float* rows) const {
    if constexpr (pair == 2 && !paired) {
      // Pairs of neighbours that are all whole and aligned need no second look.
      bool whole = volume % 2 == 0 && (Axis0::slots == 1 || arguments.target.stride0 % 2 == 0) &&
                   reinterpret_cast<uint64_t>(base) % 4 == 0;
      constexpr int pairs = row_length / 2;
#pragma unroll
      for (int first = 0; first < pairs; first += 32) {
        const int e = 2 * (first + lane % (pairs < 32 ? pairs : 32));
        const Element low = element(e), high = element(e + 1);
        whole = whole && (low.room0 + high.room0 == 0 ||
                          (low.position % 2 == 0 && low.before(high)));
      }
      if (__all_sync(~0u, whole)) {
        staged_rows<2>(sum, rows);
        return;
      }
    }
    staged_rows<1>(sum, rows);
  }

  /// `width`: neighbours of a lane, whole pairs or single elements; of single ones of 16 bits,
  /// aligned pairs leave as one store of the first one's lane.
  template <int width>
  CONVT3D_DEVICE void staged_rows(const Sums& sum, float* rows) const {
    // Short rows: several at once, by parts of the warp.
    constexpr int row_lanes = 32 * width % row_length == 0 ? row_length / width : 32;
    constexpr int at_once = 32 / row_lanes;
    constexpr int items = div_up(row_length, 32 * width);
    constexpr bool joins = pair == 2 && width == 1;
    const int lane_row = lane / row_lanes, in_row = lane % row_lanes * width;
    Element elements[items];
    bool next[items], previous[items];
#pragma unroll
    for (int item = 0; item < items; ++item) {
      const Element e = element(item * 32 * width + in_row);
      elements[item] = e;
      if constexpr (joins) {
        const Element right{__shfl_down_sync(~0u, e.position, 1),
                            __shfl_down_sync(~0u, e.room0, 1)};
        const Element left{__shfl_up_sync(~0u, e.position, 1), __shfl_up_sync(~0u, e.room0, 1)};
        next[item] = in_row < row_lanes - 1 && e.before(right);
        previous[item] = in_row > 0 && left.before(e);
      }
    }
#pragma unroll
    for (int slot0 = 0; slot0 < Axis0::slots; ++slot0) {
      Storage* slot = base + int64_t(lane_row) * volume + slot_offset(slot0, 0);
      // By the parity of a row's channel, which with odd volumes is that of its addresses.
      bool alone[items][2], first[items][2];
#pragma unroll
      for (int item = 0; item < items; ++item)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          alone[item][odd] = elements[item].room0 > slot0;
          first[item][odd] = false;
          if constexpr (joins) {
            const bool even = reinterpret_cast<uint64_t>(slot + elements[item].position + odd * volume) % 4 == 0;
            first[item][odd] = alone[item][odd] && even && next[item];
            alone[item][odd] = alone[item][odd] && !first[item][odd] && (even || !previous[item]);
          }
        }
#pragma unroll
      for (int n = 0; n < Config::fragments_n; ++n) {
        const int column = first_column + 8 * n;
        if (column >= Config::target_channels) continue;
        stage(rows, sum, slot0, n, column);
        __syncwarp();
        Storage* to[items];
#pragma unroll
        for (int item = 0; item < items; ++item)
          to[item] = slot + column * volume + elements[item].position;
#pragma unroll
        for (int step = 0; step < 8; step += at_once) {
          const float* from = rows + (step + lane_row) * row_pitch;
          const bool live = Config::target_channels % 8 == 0 ||
                            column + step + lane_row < Config::target_channels;
#pragma unroll
          for (int item = 0; item < items; ++item) {
            const float* e = from + min(item * 32 * width + in_row, row_length);
            if constexpr (pair == 1) {
              float value = e[0];
              if constexpr (Fusion::runs)
                value = fuse(value, column + step + lane_row, to[item], live && alone[item][0]);
              if (live && alone[item][0]) store_streaming(to[item], value);
            } else {
              const int odd = joins ? step % 2 : 0;
              uint32_t word;
              if constexpr (Fusion::runs) {
                const int channel = column + step + lane_row;
                const bool both = live && (joins ? first : alone)[item][odd];
                const bool one = both || (live && alone[item][odd]);
                word = Type::pack(fuse(e[0], channel, to[item], one),
                                  fuse(e[1], channel, to[item] + 1, both));
              } else {
                word = Type::pack(e[0], e[1]);
              }
              if (live && (joins ? first : alone)[item][odd])
                store_streaming(reinterpret_cast<uint32_t*>(to[item]), word);
              if (joins && live && alone[item][odd]) store_streaming(to[item], Storage(word));
            }
            to[item] += at_once * volume;
          }
        }
        __syncwarp();
      }
    }
  }
};

template <typename Config>
CONVT3D_DEVICE void store_tile(const GatherArguments<Config>& arguments,
                               const GatherTile<Config>& tile, const TileUnits& units,
                               const typename Store<Config>::Sums& sum, int warp_m, int warp_n,
                               int lane) {
  using S = Store<Config>;
  extern __shared__ __align__(128) unsigned char shared[];
  const S store(arguments, tile, units, warp_m, warp_n, lane);
  if constexpr (Config::target_channels_last) {
    store.channels_last(sum);
  } else {
    if (S::paired && store.pairs_aligned())
      store.pairs(sum);
    else
      store.staged(sum, reinterpret_cast<float*>(shared) +
                            (warp_m * Config::warps_n + warp_n) * S::warp_words);
  }
}

}  // namespace convt3d
