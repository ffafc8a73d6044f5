// What a work tile of phases/kernel.cu produces: where the outputs of a unit lie in the target,
// and bias.
#pragma once
#include "phases/rings.cuh"

namespace convt3d {

template <bool Phased, typename Axis>
CONVT3D_CONSTEXPR bool has_empty_phase() {
  if constexpr (Phased)
    for (int phase = 0; phase < Axis::phases; ++phase)
      if (Axis::count(phase) == 0) return true;
  return false;
}

/// Where outputs lie in the target.
template <typename Config>
struct PhasesOutputs {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  using Units = PhasesUnits<Config>;
  using Arguments = PhasesArguments<Storage>;
  using Sums = PhasesSums<Config>;
  static constexpr int slots0 = Config::Inner0::slots;
  static constexpr int slots1 = Config::Inner1::slots;
  static constexpr int slots2 = Config::Axis2::slots;
  static constexpr bool empty_phases =
      has_empty_phase<(Config::phased > 0), typename Config::Axis0>() ||
      has_empty_phase<(Config::phased > 1), typename Config::Axis1>();

  const PhasesArguments<Storage>& arguments;
  const Units& units;
  int warpgroup, thread;  // of the warpgroup

  CONVT3D_DEVICE PhasesOutputs(const PhasesArguments<Storage>& arguments_, const Units& units_,
                               int warpgroup_)
      : arguments(arguments_), units(units_), warpgroup(warpgroup_), thread(threadIdx.x % 128) {}

  CONVT3D_DEVICE float bias_of(const WorkTile& work, int channel) const {
    return bias_at<Config>(arguments.bias, work.group, channel);
  }
  CONVT3D_DEVICE int row_of(int block, int half) const {
    return Units::row_of(block, half);
  }

  /// Where the first output of a unit lies, and how many of its slots exist along each axis.
  struct Outputs {
    int sample, first[3], fits[3];
  };
  CONVT3D_DEVICE Outputs outputs(const WorkTile& work, int row) const {
    const auto unit = units(row);
    Outputs o;
    o.sample = work.sample + unit.sample;
    const int phase[3] = {work.phase[0], work.phase[1], 0};
    const int stride[3] = {Config::Axis0::unit_destination, Config::Axis1::unit_destination, slots2};
    const int slots[3] = {slots0, slots1, slots2};
    const bool exists = units.inside(row) && o.sample < arguments.batch;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      o.first[axis] = (work.first[axis] + unit.at[axis]) * stride[axis] + phase[axis];
      // Tiles may go on beyond the target.
      o.fits[axis] =
          exists ? max(0, min(slots[axis], arguments.target.extent[axis] - o.first[axis])) : 0;
    }
    return o;
  }
  /// The element of the target at a unit's first output, in channel 0 of the work tile's columns.
  CONVT3D_DEVICE int64_t element(const WorkTile& work, const Outputs& o) const {
    return element(work, o.sample, o.first);
  }
  CONVT3D_DEVICE int64_t element(const WorkTile& work, int sample, const int (&first)[3]) const {
    const auto& target = arguments.target;
    const int64_t channel = int64_t(sample) * Config::all_channels +
                            work.group * Config::target_channels +
                            work.column_tile * Config::column_tile;
    return channel * target.volume() + int64_t(first[0]) * target.stride0 +
           int64_t(first[1]) * target.stride1 + first[2];
  }
  /// The same of a tile's first unit.
  CONVT3D_DEVICE int64_t element(const WorkTile& work) const {
    const int first[3] = {work.first[0] * Config::Axis0::unit_destination + work.phase[0],
                          work.first[1] * Config::Axis1::unit_destination + work.phase[1],
                          work.first[2] * slots2};
    return element(work, work.sample, first);
  }

  /// The steps of the fusion on an output of a unit: `value` is its sum with the bias, `channel`
  /// that of the group. Stored at once, or where it is staged.
  CONVT3D_DEVICE float fuse(const WorkTile& work, float value, int channel,
                            const Storage* to) const {
    return fused<Config>(arguments.fusion, value, work.group, channel, to - arguments.target.data);
  }
  CONVT3D_DEVICE float fuse(const WorkTile& work, float value, int channel, int row, int slot0,
                            int slot1, int slot2) const {
    int64_t at = 0;
    bool exists = true;
    if constexpr (Fusion::by_element) {
      const auto& target = arguments.target;
      const Outputs o = outputs(work, row);
      exists = slot0 < o.fits[0] && slot1 < o.fits[1] && slot2 < o.fits[2] &&
               channel < Config::target_channels;
      at = element(work, o) + (channel - work.column_tile * Config::column_tile) * target.volume() +
           int64_t(slot0) * target.stride0 + int64_t(slot1) * target.stride1 + slot2;
    }
    return fused<Config>(arguments.fusion, value, work.group, channel, at, exists);
  }
};

}  // namespace convt3d
