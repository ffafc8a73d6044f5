// The epilogue of the warp-specialised gather: finished planes of a warpgroup, bias added.
//
//   contiguous     eight columns at a time pass through shared memory, so that lanes store neighbours
//                  along W (the slots of axis 2 interleave there); two buffers, one barrier each
//   channels_last  straight from registers: a lane owns two neighbouring channels of a row
#pragma once
#include "wgmma_config.cuh"

namespace convt3d {

template <typename Config>
struct WgmmaStore {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  using Sums = float[Config::slots2][Config::blocks][Config::sums];
  using Leg = typename Walk<Config>::Leg;
  static constexpr int64_t all_channels = int64_t(Config::groups) * Config::target_channels;
  static constexpr int slots2 = Config::slots2;
  // Neighbouring elements of a staged row that a lane stores together, where they are aligned.
  static constexpr int pair = sizeof(Storage) == 2 ? 2 : 1;
  static constexpr int row_elements = Config::warpgroup_rows * slots2;
  static constexpr int items = row_elements / (32 * pair);
  static_assert(row_elements % (32 * pair) == 0, "whole warps store");

  const WgmmaArguments<Storage>& arguments;
  const RowTile<Config>& tile;
  const Leg& leg;
  int64_t volume;
  int warpgroup, warp, lane;
  float* staging;

  CONVT3D_DEVICE WgmmaStore(const WgmmaArguments<Storage>& arguments_,
                            const RowTile<Config>& tile_, const Leg& leg_, int warpgroup_,
                            unsigned char* shared)
      : arguments(arguments_), tile(tile_), leg(leg_), warpgroup(warpgroup_) {
    volume = arguments.target.volume();
    warp = threadIdx.x / 32 % 4;
    lane = threadIdx.x % 32;
    staging = reinterpret_cast<float*>(shared + Config::staging_offset) +
              warpgroup * 2 * Config::staged_floats;
  }

  /// Where a row's slot lies from its group's first channel on, in plane 0; negative if nowhere.
  CONVT3D_DEVICE int64_t spot(int row, int slot2) const {
    const auto& target = arguments.target;
    const auto place = tile.locate(warpgroup * Config::warpgroup_rows + row);
    const int o1 = place.line * Axis1::unit_destination + leg.phase1;
    const int o2 = (place.first2 + place.column) * Axis2::unit_destination + slot2;
    if (place.sample >= arguments.batch || place.column >= tile.space.tile2 ||
        unsigned(o1) >= unsigned(target.extent[1]) || unsigned(o2) >= unsigned(target.extent[2]))
      return -1;
    const int64_t position = int64_t(o1) * target.stride1 + o2;
    return place.sample * all_channels * volume +
           position * (Config::target_channels_last ? all_channels : 1);
  }

  CONVT3D_DEVICE float bias_of(int column) const {
    if constexpr (Config::bias) {
      if (column < Config::columns)
        return Type::load(__ldg(arguments.bias + leg.group * Config::target_channels + column));
    }
    return 0.f;
  }

  /// Stores the planes that step `step` completes.
  CONVT3D_DEVICE void operator()(const Sums& sum, int step) const {
    if constexpr (Config::target_channels_last)
      channels_last(sum, step);
    else
      contiguous(sum, step);
  }

  CONVT3D_DEVICE void contiguous(const Sums& sum, int step) const {
    int64_t spots[items][pair];
#pragma unroll
    for (int item = 0; item < items; ++item)
#pragma unroll
      for (int i = 0; i < pair; ++i) {
        const int element = (item * 32 + lane) * pair + i;
        spots[item][i] = spot(element / slots2, element % slots2);
      }
    int buffer = 0;
    named_barrier_sync(1 + warpgroup, 128);  // the previous call's readers
#pragma unroll
    for (int plane = 0; plane < Axis0::target_step; ++plane) {
      const int o0 = step * Axis0::target_step + Axis0::target_origin + plane;
      if (unsigned(o0) >= unsigned(arguments.target.extent[0])) continue;
      Storage* to = arguments.target.data + int64_t(o0) * arguments.target.stride0;
#pragma unroll
      for (int first = 0; first < Config::column_tile; first += 8) {
        const int column = leg.column_tile * Config::column_tile + first;
        float* rows = staging + buffer * Config::staged_floats;
        stage(rows, sum, plane * Config::plane_sums + first / 2, column);
        // The other buffer's readers are past this barrier too, before it is written again.
        named_barrier_sync(1 + warpgroup, 128);
#pragma unroll
        for (int i = 0; i < 2; ++i) store_row(rows, to, spots, column, 2 * warp + i);
        buffer ^= 1;
      }
    }
  }

  /// Eight columns of all rows, as rows of neighbouring destinations.
  CONVT3D_DEVICE void stage(float* rows, const Sums& sum, int at, int column) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int in_fragment = 2 * (lane % 4) + i;
      const float bias = bias_of(column + in_fragment);
      float* row = rows + in_fragment * Config::staged_row + (16 * warp + lane / 4) * slots2;
#pragma unroll
      for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int slot2 = 0; slot2 < slots2; ++slot2)
            row[(64 * block + 8 * half) * slots2 + slot2] =
                sum[slot2][block][at + 2 * half + i] + bias;
    }
  }

  CONVT3D_DEVICE void store_row(const float* rows, Storage* to, const int64_t (&spots)[items][pair],
                                int first_column, int row) const {
    const int column = first_column + row;
    if (column >= Config::columns) return;
    rows += row * Config::staged_row;
    to += (int64_t(leg.group) * Config::target_channels + column) * volume;
#pragma unroll
    for (int item = 0; item < items; ++item) {
      const int element = (item * 32 + lane) * pair;
      if constexpr (pair == 2) {
        if (spots[item][0] >= 0 && spots[item][1] == spots[item][0] + 1 &&
            reinterpret_cast<uint64_t>(to + spots[item][0]) % 4 == 0) {
          store_two<Type>(to + spots[item][0], rows[element], rows[element + 1]);
          continue;
        }
      }
#pragma unroll
      for (int i = 0; i < pair; ++i)
        if (spots[item][i] >= 0)
          store_streaming(to + spots[item][i], Type::store(rows[element + i]));
    }
  }

  CONVT3D_DEVICE void channels_last(const Sums& sum, int step) const {
    constexpr bool together = all_channels % 2 == 0 && Config::target_channels % 2 == 0;
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int slot2 = 0; slot2 < slots2; ++slot2) {
          const int64_t at = spot(64 * block + 16 * warp + 8 * half + lane / 4, slot2);
          if (at < 0) continue;
#pragma unroll
          for (int plane = 0; plane < Axis0::target_step; ++plane) {
            const int o0 = step * Axis0::target_step + Axis0::target_origin + plane;
            if (unsigned(o0) >= unsigned(arguments.target.extent[0])) continue;
            Storage* to = arguments.target.data + at +
                          int64_t(o0) * arguments.target.stride0 * all_channels +
                          leg.group * Config::target_channels;
#pragma unroll
            for (int n = 0; n < Config::column_tile / 8; ++n) {
              const int column = leg.column_tile * Config::column_tile + 8 * n + 2 * (lane % 4);
              const float* c =
                  &sum[slot2][block][plane * Config::plane_sums + 4 * n + 2 * half];
              const float low = c[0] + bias_of(column), high = c[1] + bias_of(column + 1);
              if constexpr (together) {
                if (column < Config::columns) store_two<Type>(to + column, low, high);
              } else {
                if (column < Config::columns) store_streaming(to + column, Type::store(low));
                if (column + 1 < Config::columns)
                  store_streaming(to + column + 1, Type::store(high));
              }
            }
          }
        }
  }
};

}  // namespace convt3d
