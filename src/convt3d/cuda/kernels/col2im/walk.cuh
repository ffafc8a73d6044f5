// A launch's arguments, and the CTA's share of the work.
#pragma once
#include "col2im/config.cuh"

namespace convt3d {

template <typename Config>
struct Col2imArguments {
  using Storage = typename Config::Storage;
  Activation<const Storage> source;
  Activation<Storage> target;
  const unsigned char* weights;
  const Storage* bias;
  int batch;
  int tile1, tile2;  // units of a tile
  int width;  // source columns of a tile's line, a multiple of the vector
  CONVT3D_FUSION_MEMBER
};

/// A CTA's share of the work: a run of (group, sample, tile, interleaved volume, step), in order.
/// A step takes a source plane, or finishes a unit.
template <typename Config>
struct Col2imWalk {
  static constexpr int volumes = Config::keep_planes ? 1 : Config::Stacked0::interleaved;
  static constexpr int warm_steps = Config::keep_planes ? 0 : Config::Stacked0::warm_steps;
  int steps, tiles1, tiles2;
  int64_t at, end;

  CONVT3D_DEVICE explicit Col2imWalk(const Col2imArguments<Config>& a) {
    constexpr int planes =
        Config::keep_planes ? Config::Static0::slots : Config::Stacked0::target_step * volumes;
    constexpr int origin = Config::keep_planes ? 0 : Config::Stacked0::target_origin;
    steps = (a.target.extent[0] - origin + planes - 1) / planes;
    constexpr int unit1 = Config::Axis1::unit_destination, unit2 = Config::Axis2::unit_destination;
    tiles1 = (a.target.extent[1] + unit1 * a.tile1 - 1) / (unit1 * a.tile1);
    tiles2 = (a.target.extent[2] + unit2 * a.tile2 - 1) / (unit2 * a.tile2);
    const int64_t total =
        int64_t(Config::groups) * a.batch * tiles1 * tiles2 * volumes * steps;
    at = total * blockIdx.x / gridDim.x;
    end = total * (blockIdx.x + 1) / gridDim.x;
  }

  /// Steps of one sweep; those before `first` only fill the window.
  struct Leg {
    int group, sample, unit1, unit2, volume0, begin, first, end;
  };
  CONVT3D_DEVICE bool next(Leg& leg, const Col2imArguments<Config>& a) {
    if (at >= end) return false;
    int64_t rest = at / steps;
    leg.first = int(at - rest * steps);
    leg.end = int(min(int64_t(steps), leg.first + (end - at)));
    leg.begin = max(0, leg.first - warm_steps);
    at += leg.end - leg.first;
    leg.volume0 = int(rest % volumes);
    rest /= volumes;
    leg.unit2 = int(rest % tiles2) * a.tile2;
    rest /= tiles2;
    leg.unit1 = int(rest % tiles1) * a.tile1;
    rest /= tiles1;
    leg.sample = int(rest % a.batch);
    leg.group = int(rest / a.batch);
    return true;
  }
};

}  // namespace convt3d
