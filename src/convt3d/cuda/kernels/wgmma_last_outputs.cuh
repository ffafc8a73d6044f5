// Where the outputs of wgmma_last.cu lie in a contiguous target, for wgmma_phases_warp_store.cuh.
#pragma once
#include "wgmma_last_config.cuh"

namespace convt3d {

template <typename Config>
struct LastOutputs {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  using Units = LastUnits<Config>;
  using Item = typename LastWalk<Config>::Item;
  using Arguments = LastArguments<Storage>;
  using Sums = LastSums<Config>;
  static constexpr int slots0 = Config::Inner0::slots;
  static constexpr int slots1 = Config::Inner1::slots;
  static constexpr int slots2 = Config::Inner2::slots;
  /// Phases without taps are staged as others, from sums that are zero.
  static constexpr bool empty_phases = false;

  /// Units that are staged together: of a warp, or of a block, whose warps have one position each.
  static constexpr int staged_units = Config::staged_units;

  const Arguments& arguments;
  const Units& units;
  int warpgroup, thread;  // of the warpgroup

  /// Where a row of a block is staged among these units, so that a line is together, and the other way.
  CONVT3D_DEVICE int place_of_row(int row) const {
    const int samples = arguments.tile[0];
    return row % samples * arguments.tile[3] + row / samples;
  }
  CONVT3D_DEVICE int row_of_place(int place) const {
    const int width = arguments.tile[3];
    return place % width * arguments.tile[0] + place / width;
  }

  CONVT3D_DEVICE LastOutputs(const Arguments& arguments_, const Units& units_, int warpgroup_)
      : arguments(arguments_), units(units_), warpgroup(warpgroup_), thread(threadIdx.x % 128) {}

  CONVT3D_DEVICE float bias_of(const Item& item, int channel) const {
    if constexpr (Config::bias) {
      if (channel < Config::target_channels)
        return Type::load(__ldg(arguments.bias + item.group * Config::target_channels + channel));
    }
    return 0.f;
  }

  /// Where the first output of a unit lies, and how many of its slots exist along each axis.
  struct Outputs {
    int sample, first[3], fits[3];
  };
  CONVT3D_DEVICE Outputs outputs(const Item& item, int row) const {
    const int index = Config::warpgroup_rows * warpgroup + row;
    const typename Units::Unit unit = units(index < units.count ? index : 0);
    Outputs o;
    o.sample = item.sample + unit.sample;
    const bool exists = index < units.count && o.sample < arguments.batch;
    const int stride[3] = {Config::Axis0::unit_destination, Config::Axis1::unit_destination,
                           Config::Axis2::unit_destination};
    const int slots[3] = {slots0, slots1, slots2};
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      o.first[axis] = (item.first[axis] + unit.at[axis]) * stride[axis] + item.phase[axis];
      // Tiles may go on beyond the target.
      o.fits[axis] =
          exists ? max(0, min(slots[axis], arguments.target.extent[axis] - o.first[axis])) : 0;
    }
    return o;
  }
  /// The element of the target at a unit's first output, in channel 0 of the item's columns.
  CONVT3D_DEVICE int64_t element(const Item& item, const Outputs& o) const {
    const auto& target = arguments.target;
    const int64_t channel = int64_t(o.sample) * Config::all_channels +
                            item.group * Config::target_channels +
                            item.column_tile * Config::column_tile;
    return channel * target.volume() + int64_t(o.first[0]) * target.stride0 +
           int64_t(o.first[1]) * target.stride1 + o.first[2];
  }
};

}  // namespace convt3d
