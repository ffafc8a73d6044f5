// The epilogue of the warp-specialised gather: finished planes of a warpgroup, bias added. Where
// each row's outputs lie in plane 0 is worked out once for a column of the sweep, into a table.
//
//   contiguous     some columns at a time pass through shared memory, as the target's elements (16-bit
//                  ones transposed by stmatrix), so that lanes store neighbours along W, two at once
//                  where pairs are aligned; the slots of axis 2 interleave there
//   channels_last  straight from registers: a lane owns two neighbouring channels of a row
#pragma once
#include "device/barrier.cuh"
#include "device/wgmma.cuh"
#include "sweep/config.cuh"

namespace convt3d {

template <typename Config>
struct SweepStore {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  using Sums = float[Config::slots2][Config::blocks][Config::sums];
  using Leg = typename Walk<Config>::Leg;
  static constexpr int element_bytes = int(sizeof(Storage));
  static constexpr int64_t all_channels =
      tensor_channels(int64_t(Config::groups) * Config::target_channels);
  static constexpr int slots2 = Config::slots2;
  static constexpr int row_elements = Config::row_elements;
  static constexpr int staged_columns = Config::staged_columns;
  static constexpr int staged_row_bytes = Config::staged_row * element_bytes;
  static_assert(row_elements % 64 == 0, "whole warps store pairs");
  static_assert(staged_columns % 8 == 0, "four warps store whole columns");
  static_assert(Config::staged_buffers == 2 ||
                    (staged_columns >= Config::column_tile && Axis0::target_step == 1),
                "a buffer is read while another one is written");

  const SweepArguments<Storage>& arguments;
  const RowSpace<Config>& space;
  int64_t volume;
  int warpgroup, warp, lane;
  uint32_t table, buffers;
  bool even;

  CONVT3D_DEVICE SweepStore(const SweepArguments<Storage>& arguments_,
                            const RowSpace<Config>& space_, int warpgroup_, uint32_t shared_base)
      : arguments(arguments_), space(space_), warpgroup(warpgroup_) {
    const auto& target = arguments.target;
    volume = target.volume();
    warp = threadIdx.x / 32 % 4;
    lane = threadIdx.x % 32;
    table = shared_base + Config::staging_offset + warpgroup * Config::store_bytes;
    buffers = table + Config::table_bytes;
    // Whether pairs of elements are neighbours in the target, aligned, and both there or neither.
    even = target.extent[2] % 2 == 0 && space.tile2 * slots2 % 2 == 0 &&
           space.pitch2 * slots2 % 2 == 0 &&
           reinterpret_cast<uint64_t>(target.data) % (2 * element_bytes) == 0;
  }

  /// Where a row's slot lies from its group's first channel on, in plane 0; negative if nowhere.
  CONVT3D_DEVICE int64_t spot(const RowTile<Config>& tile, int phase1, int row, int slot2) const {
    const auto& target = arguments.target;
    const auto place = tile.locate(warpgroup * Config::warpgroup_rows + row);
    const int o1 = place.line * Axis1::unit_destination + phase1;
    const int o2 = (place.first2 + place.column) * Axis2::unit_destination + slot2;
    if (place.sample >= arguments.batch || place.column >= tile.space.tile2 ||
        unsigned(o1) >= unsigned(target.extent[1]) || unsigned(o2) >= unsigned(target.extent[2]))
      return -1;
    const int64_t position = int64_t(o1) * target.stride1 + o2;
    return place.sample * all_channels * volume +
           position * (Config::target_channels_last ? all_channels : 1);
  }

  /// Before the first step of a column of the sweep.
  CONVT3D_DEVICE void begin(const Leg& leg) const {
    const RowTile<Config> tile(space, leg.tile);
    named_barrier_sync(1 + warpgroup, 128);  // the previous column's readers
#pragma unroll 1
    for (int element = 32 * warp + lane; element < row_elements; element += 128) {
      const int64_t bytes =
          spot(tile, leg.phase1, element / slots2, element % slots2) * element_bytes;
      store_shared(table + 8 * element, uint32_t(bytes), uint32_t(bytes >> 32));
    }
    named_barrier_sync(1 + warpgroup, 128);
  }
  CONVT3D_DEVICE int64_t spot_bytes(int element) const {
    uint32_t low, high;
    load_shared(table + 8 * element, low, high);
    return int64_t(uint64_t(high) << 32 | low);
  }

  CONVT3D_DEVICE float bias_of(const Leg& leg, int column) const {
    if constexpr (Config::bias) {
      if (column < Config::columns)
        return Type::load(__ldg(arguments.bias + leg.group * Config::target_channels + column));
    }
    return 0.f;
  }
  /// The steps of the fusion on an output of a row's slot in plane o0; `value` is its sum with the
  /// bias, `column` that of the group.
  CONVT3D_DEVICE float fuse(const Leg& leg, float value, int column, int row, int slot2,
                            int o0) const {
    int64_t at = 0;
    bool exists = true;
    if constexpr (Fusion::by_element) {
      at = spot_bytes(row * slots2 + slot2) / element_bytes;
      exists = at >= 0 && column < Config::columns;
      const int64_t plane = int64_t(o0) * arguments.target.stride0;
      const int channel = leg.group * Config::target_channels + column;
      at += Config::target_channels_last ? plane * all_channels + channel : plane + channel * volume;
    }
    return fused<Config>(arguments.fusion, value, leg.group, column, at, exists);
  }

  /// Stores the planes that step `step` completes.
  CONVT3D_DEVICE void operator()(const Leg& leg, const Sums& sum, int step) const {
    if constexpr (Config::target_channels_last)
      channels_last(leg, sum, step);
    else if (even)
      contiguous<2>(leg, sum, step);
    else
      contiguous<1>(leg, sum, step);
  }

  /// Lanes store `pair` neighbours at a time.
  template <int pair>
  CONVT3D_DEVICE void contiguous(const Leg& leg, const Sums& sum, int step) const {
    uint32_t rows = buffers, other = buffers + Config::buffer_bytes;
    named_barrier_sync(1 + warpgroup, 128);  // the previous call's readers
#pragma unroll
    for (int plane = 0; plane < Axis0::target_step; ++plane) {
      const int o0 = Axis0::target_plane(step * Axis0::target_step + plane, leg.volume0);
      if (unsigned(o0) >= unsigned(arguments.target.extent[0])) continue;
#pragma unroll
      for (int first = 0; first < Config::column_tile; first += staged_columns) {
        const int column = leg.column_tile * Config::column_tile + first;
        stage(leg, rows, sum, plane, first, column, o0);
        // The other buffer's readers are past this barrier too, before it is written again.
        named_barrier_sync(1 + warpgroup, 128);
        Storage* to = arguments.target.data + int64_t(o0) * arguments.target.stride0 +
                      (int64_t(leg.group) * Config::target_channels + column) * volume;
        store_columns<pair>(rows, to, first, column);
        if constexpr (Config::staged_buffers == 2) {
          const uint32_t read = rows;
          rows = other, other = read;
        }
      }
    }
  }

  /// Columns from `first` of the tile on, `column` of the group, as elements of the target.
  CONVT3D_DEVICE void stage(const Leg& leg, uint32_t rows, const Sums& sum, int plane, int first,
                            int column, int o0) const {
    const int at = plane * Config::plane_sums + first / 2;
#pragma unroll
    for (int n = 0; n < staged_columns / 8; n += Config::staged_eights) {
      float bias[Config::staged_eights][2];
#pragma unroll
      for (int e = 0; e < Config::staged_eights; ++e)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          bias[e][i] = bias_of(leg, column + 8 * (n + e) + 2 * (lane % 4) + i);
#pragma unroll
      for (int block = 0; block < Config::blocks; ++block) {
        if constexpr (Config::staged_eights == 2) {
          // Matrices of eight columns and eight rows: both halves of a fragment, twice.
          uint32_t word[4];
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const int e = m / 2;
            word[m] = 0;
            if (first + 8 * (n + e) >= Config::column_tile || n + e >= staged_columns / 8) continue;
            const float* c = &sum[0][block][at + 4 * (n + e) + 2 * (m % 2)];
            float low = biased<Config>(c[0], bias[e][0]), high = biased<Config>(c[1], bias[e][1]);
            if constexpr (Fusion::runs) {
              const int row = 64 * block + 16 * warp + 8 * (m % 2) + lane / 4;
              const int of_low = column + 8 * (n + e) + 2 * (lane % 4);
              low = fuse(leg, low, of_low, row, 0, o0);
              high = fuse(leg, high, of_low + 1, row, 0, o0);
            }
            word[m] = Type::pack(low, high);
          }
          const int matrix = lane / 8;
          store_matrix_x4_transposed(
              rows + (8 * (n + matrix / 2) + lane % 8) * staged_row_bytes +
                  (64 * block + 16 * warp + 8 * (matrix % 2)) * element_bytes,
              word);
        } else {
          if (first + 8 * n >= Config::column_tile) continue;
#pragma unroll
          for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
              for (int slot2 = 0; slot2 < slots2; ++slot2) {
                const int row = 64 * block + 16 * warp + 8 * half + lane / 4;
                float value =
                    biased<Config>(sum[slot2][block][at + 4 * n + 2 * half + i], bias[0][i]);
                if constexpr (Fusion::runs)
                  value = fuse(leg, value, column + 8 * n + 2 * (lane % 4) + i, row, slot2, o0);
                store_shared(rows + (8 * n + 2 * (lane % 4) + i) * staged_row_bytes +
                                 (row * slots2 + slot2) * element_bytes,
                             Type::store(value));
              }
        }
      }
    }
  }

  template <int pair>
  CONVT3D_DEVICE void store_columns(uint32_t rows, Storage* to, int first, int column) const {
    constexpr int items = row_elements / (32 * pair);
    int64_t spots[items];
#pragma unroll
    for (int item = 0; item < items; ++item) spots[item] = spot_bytes((item * 32 + lane) * pair);
    unsigned char* at = reinterpret_cast<unsigned char*>(to + warp * volume);
    rows += warp * staged_row_bytes + lane * pair * element_bytes;
#pragma unroll
    for (int row = 0; row < staged_columns; row += 4) {
      if (first + row >= Config::column_tile) continue;
      const bool there = Config::columns % Config::column_tile == 0 ||
                         column + row + warp < Config::columns;
#pragma unroll
      for (int item = 0; item < items; ++item) {
        const uint32_t from = rows + row * staged_row_bytes + item * (32 * pair * element_bytes);
        if (there && spots[item] >= 0) store_elements<pair>(at + spots[item], from);
      }
      at += 4 * volume * element_bytes;
    }
  }

  template <int pair>
  CONVT3D_DEVICE static void store_elements(unsigned char* to, uint32_t from) {
    if constexpr (pair * element_bytes == 8) {
      uint2 v;
      load_shared(from, v.x, v.y);
      store_streaming(reinterpret_cast<uint2*>(to), v);
    } else if constexpr (pair * element_bytes == 4) {
      store_streaming(reinterpret_cast<uint32_t*>(to), load_shared(from));
    } else {
      store_streaming(reinterpret_cast<uint16_t*>(to), uint16_t(load_shared_half(from)));
    }
  }

  CONVT3D_DEVICE void channels_last(const Leg& leg, const Sums& sum, int step) const {
    constexpr bool together = all_channels % 2 == 0 && Config::target_channels % 2 == 0;
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int slot2 = 0; slot2 < slots2; ++slot2) {
          const int row = 64 * block + 16 * warp + 8 * half + lane / 4;
          const int64_t at = spot_bytes(row * slots2 + slot2);
          if (at < 0) continue;
#pragma unroll
          for (int plane = 0; plane < Axis0::target_step; ++plane) {
            const int o0 = Axis0::target_plane(step * Axis0::target_step + plane, leg.volume0);
            if (unsigned(o0) >= unsigned(arguments.target.extent[0])) continue;
            Storage* to = arguments.target.data + at / element_bytes +
                          int64_t(o0) * arguments.target.stride0 * all_channels +
                          leg.group * Config::target_channels;
#pragma unroll
            for (int n = 0; n < Config::column_tile / 8; ++n) {
              const int column = leg.column_tile * Config::column_tile + 8 * n + 2 * (lane % 4);
              const float* c =
                  &sum[slot2][block][plane * Config::plane_sums + 4 * n + 2 * half];
              float low = biased<Config>(c[0], bias_of(leg, column));
              float high = biased<Config>(c[1], bias_of(leg, column + 1));
              if constexpr (Fusion::runs) {
                low = fuse(leg, low, column, row, slot2, o0);
                high = fuse(leg, high, column + 1, row, slot2, o0);
              }
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
