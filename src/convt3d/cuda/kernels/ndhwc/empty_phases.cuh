// Outputs of strided channels_last layers where no tap reaches: the bias alone. One warp sends
// whole lines of a tile by bulk copies, while warpgroups multiply what has taps.
#pragma once
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "ndhwc/config.cuh"

namespace convt3d {

template <typename Config>
struct NdhwcEmptyPhases {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  const NdhwcArguments<Storage>& a;
  uint32_t positions;  // in shared memory
  int lane;

  CONVT3D_DEVICE NdhwcEmptyPhases(const NdhwcArguments<Storage>& a_, uint32_t shared)
      : a(a_), lane(threadIdx.x % 32) {
    positions = shared + Config::box_offset + Config::source_stages * a.box_bytes +
                4 * Config::consumers * Config::store_bytes;
  }

  CONVT3D_DEVICE void operator()(uint32_t shared) const {
    prepare();
    NdhwcWalk<Config> walk(a, shared);
    WorkTile work;
    while (walk.next(a, work)) {
      if (work.taps_of_chunk() != 0) continue;
      fill(work);
      bulk_commit();
      bulk_wait<1>();  // else all of it would come before what is multiplied
    }
    bulk_wait<0>();
  }

 private:
  CONVT3D_DEVICE void prepare() const {
    for (int word = lane; word < Config::fill_bytes / 4; word += 32) {
      const int channel = word * (4 / Config::element_bytes) % Config::target_channels;
      uint32_t bits = 0;
      if constexpr (Fusion::runs) {
        bits = bits_of(constant(channel, 0));
        if constexpr (Config::element_bytes == 2)
          bits = Type::pack(constant(channel, 0), constant(channel + 1, 0));
      } else if constexpr (Config::bias) {
        if constexpr (Config::element_bytes == 2)
          bits = __ldg(a.bias + channel) | uint32_t(__ldg(a.bias + channel + 1)) << 16;
        else
          bits = bits_of(__ldg(a.bias + channel));
      }
      store_shared(positions + 4 * word, bits);
    }
    fence_async_proxy();
    __syncwarp();
  }

  /// An output that no tap reaches.
  CONVT3D_DEVICE float constant(int channel, int64_t element) const {
    return fused<Config>(a.fusion, bias_at<Config>(a.bias, 0, channel), 0, channel, element);
  }
  /// A position of a slice, or one whose elements differ.
  CONVT3D_DEVICE void fill_position(Storage* to) const {
    if constexpr (Fusion::by_element) {
      for (int channel = 0; channel < Config::own_channels; ++channel)
        to[channel] = Type::store(constant(channel, to - a.target.data + channel));
    } else {
      bulk_store_streaming(to, positions, Config::position_bytes);
    }
  }

  /// Where the outputs of some units end: the last unit of an axis has the slots beyond it as
  /// well.
  CONVT3D_DEVICE static int end_of(int units, int stride, int beyond, int extent) {
    return extent - units * stride <= beyond ? extent : units * stride;
  }
  /// Phases before the first one with a tap.
  template <typename Axis>
  CONVT3D_CONSTEXPR static int empty_before() {
    int phase = 0;
    while (phase < Axis::phases && Axis::count(phase) == 0) ++phase;
    return phase;
  }

  CONVT3D_CONSTEXPR static int lines_beyond() {
    if constexpr (Config::phased > 1)
      return empty_before<typename Config::Axis1>();
    else
      return Config::beyond1;
  }

  CONVT3D_DEVICE void fill(const WorkTile& work) const {
    constexpr int stride0 = Config::Axis0::unit_destination;
    constexpr int stride1 = Config::Axis1::unit_destination;
    constexpr int stride2 = Config::Axis2::unit_destination;
    constexpr bool apart1 = Config::phased > 1;  // lines of one phase
    constexpr int beyond0 = empty_before<typename Config::Axis0>();
    constexpr int beyond1 = lines_beyond();
    const int end0 = end_of(work.first[0] + a.tile[1], stride0, beyond0, a.target.extent[0]);
    const int begin2 = work.first[2] * stride2;
    const int end2 = end_of(work.first[2] + a.tile[3], stride2, Config::beyond2, a.target.extent[2]);
    const int begin1 = work.first[1] * stride1;
    const int end1 = end_of(work.first[1] + a.tile[2], stride1, beyond1, a.target.extent[1]);
    const int slices = a.tile[1] + 1;  // one may be beyond the last unit
    const int lines = apart1 ? a.tile[2] + 1 : end1 - begin1;
    for (int index = lane; index < a.tile[0] * slices * lines; index += 32) {
      const int slice = index / lines, line = index - slice * lines;
      const int sample = slice / slices;
      const int o0 = (work.first[0] + slice - sample * slices) * stride0 + work.phase[0];
      const int o1 = begin1 + (apart1 ? line * stride1 + work.phase[1] : line);
      if (work.sample + sample >= a.batch || o0 >= end0 || o1 >= end1) continue;
      const int64_t position =
          ((int64_t(work.sample + sample) * a.target.extent[0] + o0) * a.target.extent[1] + o1) *
              a.target.extent[2] + begin2;
      if constexpr (Fusion::by_element || Config::all_channels != Config::own_channels) {
        for (int i = 0; i < end2 - begin2; ++i)
          fill_position(a.target.data + (position + i) * Config::all_channels);
        continue;
      }
      auto* to = reinterpret_cast<unsigned char*>(a.target.data) + position * Config::position_bytes;
      for (int left = (end2 - begin2) * Config::position_bytes; left > 0;
           left -= Config::fill_bytes, to += Config::fill_bytes)
        bulk_store_streaming(to, positions, min(left, Config::fill_bytes));
    }
  }
};

}  // namespace convt3d
