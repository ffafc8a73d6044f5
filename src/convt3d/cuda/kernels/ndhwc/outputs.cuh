// Where the outputs of a work tile of ndhwc/kernel.cu are, and what is added to them: shared by the
// epilogues of both layouts (ndhwc/store.cuh, ndhwc/contiguous_store.cuh).
#pragma once
#include "device/wgmma.cuh"
#include "ndhwc/config.cuh"

namespace convt3d {

template <typename Config>
struct NdhwcOutputs {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  static constexpr int slots0 = Config::Inner0::slots;
  static constexpr int slots1 = Config::Inner1::slots;
  static constexpr int slots2 = Config::Inner2::slots;
  static constexpr int beyond0 = Config::beyond0, beyond1 = Config::beyond1;
  static constexpr int beyond2 = Config::beyond2;
  /// Whether all columns that are staged exist.
  static constexpr bool whole_columns =
      Config::target_channels % Config::column_tile == 0 &&
      Config::column_tile == Config::stored_columns * Config::cluster;

  const NdhwcArguments<Storage>& a;
  const NdhwcUnits<Config>& units;
  uint32_t table, staged;
  int warpgroup, warp, lane;

  CONVT3D_DEVICE NdhwcOutputs(const NdhwcArguments<Storage>& a_, const NdhwcUnits<Config>& units_,
                              uint32_t shared, int warpgroup_)
      : a(a_), units(units_), warpgroup(warpgroup_) {
    warp = threadIdx.x / 32 % 4;
    lane = threadIdx.x % 32;
    table = shared + Config::box_offset + Config::source_stages * a.box_bytes +
            (4 * warpgroup + warp) * Config::store_bytes;
    staged = table + Config::table_bytes;
  }

  /// A row's first output in the target, and how many slots exist along each axis, a byte each.
  struct Row {
    int64_t at;
    uint32_t limits;
    CONVT3D_DEVICE bool has(int slot0, int slot1, int slot2) const {
      return slot0 < int(limits & 0xff) && slot1 < int(limits >> 8 & 0xff) &&
             slot2 < int(limits >> 16);
    }
  };
  CONVT3D_DEVICE Row row(int number) const {
    uint32_t low, high, limits, nothing;
    load_shared(table + 16 * number, low, high, limits, nothing);
    return {int64_t(uint64_t(high) << 32 | low), limits};
  }
  /// Elements from a row's first output to that of a column and slots.
  CONVT3D_DEVICE int64_t offset(int column, int slot0, int slot1, int slot2) const {
    const int64_t position =
        (int64_t(slot0) * a.target.extent[1] + slot1) * a.target.extent[2] + slot2;
    if constexpr (Config::target_channels_last) return column + position * Config::all_channels;
    return column * a.target.volume() + position;
  }

  /// The first column that this CTA stores, and the end of the work tile's.
  CONVT3D_DEVICE int first_column(const WorkTile& work) const {
    const int first = work.column_tile * Config::column_tile;
    if constexpr (Config::cluster == 1) return first;
    return first + Config::rank() * Config::stored_columns;
  }
  CONVT3D_DEVICE int end_column(const WorkTile& work) const {
    if constexpr (Config::cluster == 1) return Config::target_channels;
    return min(Config::target_channels, (work.column_tile + 1) * Config::column_tile);
  }
  /// A row's first output, and how many of its slots exist along each axis, which are returned.
  CONVT3D_DEVICE uint32_t locate(const WorkTile& work, int index) const {
    constexpr int stride[3] = {Config::Axis0::unit_destination, Config::Axis1::unit_destination,
                               Config::Axis2::unit_destination};
    constexpr int slots[3] = {slots0, slots1, slots2};
    constexpr int beyond[3] = {beyond0, beyond1, beyond2};
    bool inside = index < units.count;
    const auto unit = units.numbered(inside ? index : 0);
    int64_t position = work.sample + unit.sample;
    if constexpr (!Config::target_channels_last)
      position = position * Config::all_channels + work.group * Config::target_channels;
    uint32_t limits = 0;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      const int number = work.first[axis] + unit.at[axis];
      const int o = number * stride[axis] + work.phase[axis];
      // Units of nothing but slots without taps are left to the one before.
      if (number > 0 && number * stride[axis] + beyond[axis] >= a.target.extent[axis])
        inside = false;
      position = position * a.target.extent[axis] + o;
      const int left = max(0, a.target.extent[axis] - o);
      limits |= uint32_t(left > slots[axis] + beyond[axis] ? slots[axis] : left) << 8 * axis;
    }
    if (!inside || work.sample + unit.sample >= a.batch) limits = 0;
    if constexpr (Config::target_channels_last)
      position = position * Config::all_channels + work.group * Config::target_channels;
    store_shared(table + 16 * lane, uint32_t(position), uint32_t(position >> 32), limits, 0u);
    return limits;
  }

  CONVT3D_DEVICE float bias_of(const WorkTile& work, int column) const {
    if constexpr (Config::bias) {
      if (whole_columns || column < Config::target_channels)
        return Type::load(__ldg(a.bias + work.group * Config::target_channels + column));
    }
    return 0.f;
  }
  /// The steps of the fusion on an output of a row of the table; `value` is its sum with the bias.
  CONVT3D_DEVICE float fuse(const WorkTile& work, float value, int column, int number, int slot0,
                            int slot1, int slot2) const {
    int64_t at = 0;
    bool exists = true;
    if constexpr (Fusion::by_element) {
      uint32_t low, high, limits, nothing;
      load_shared(table + 16 * number, low, high, limits, nothing);
      exists = slot0 < int(limits & 0xff) && slot1 < int(limits >> 8 & 0xff) &&
               slot2 < int(limits >> 16) && column < end_column(work);
      at = int64_t(uint64_t(high) << 32 | low) + offset(column, slot0, slot1, slot2);
    }
    return fused<Config>(a.fusion, value, work.group, column, at, exists);
  }
};

}  // namespace convt3d
