// The epilogue of wgmma_phases.cu where sixteen samples are neighbours among the units: a block of a
// warpgroup is four positions along W of them, a warp each.
//
// Some columns at a time pass through shared memory of the warpgroup, [column][sample] of the outputs of
// four units along W, which leave as vectors of 16 bytes.
#pragma once
#include "wgmma_phases_outputs.cuh"

namespace convt3d {

template <typename Config>
struct PhasesSampleStore : PhasesOutputs<Config> {
  using Base = PhasesOutputs<Config>;
  using typename Base::Arguments;
  using typename Base::Item;
  using typename Base::Storage;
  using typename Base::Sums;
  using typename Base::Type;
  using typename Base::Units;
  using Base::arguments;
  using Base::bias_of;
  using Base::slots0;
  using Base::slots1;
  using Base::slots2;
  using Base::thread;
  using Base::warpgroup;
  static constexpr int columns = Config::staged_columns;
  static constexpr int element = int(sizeof(Storage));
  static constexpr int piece = 4 * slots2 * element;  // bytes of four units along W
  static constexpr int pitch = 16 * piece + 16;       // from a column to the next
  static constexpr int vectors = columns * 16 * piece / 16 / 128;  // of a lane
  static_assert(!Config::samples_inside || (piece % 16 == 0 && columns * 16 * (piece / 16) % 128 == 0),
                "whole rounds");
  static_assert(!Config::samples_inside ||
                    columns * pitch <= 4 * Config::staged_columns * Config::staged_pitch * 4,
                "the room of warps that store");

  uint32_t staging;  // of the warpgroup

  CONVT3D_DEVICE PhasesSampleStore(const Arguments& arguments_, const Units& units_, uint32_t shared,
                                   int warpgroup_)
      : Base(arguments_, units_, warpgroup_),
        staging(shared + arguments_.staging_offset +
                4 * warpgroup_ * columns * Config::staged_pitch * 4) {}
  CONVT3D_DEVICE void finish() const {}

  CONVT3D_DEVICE void operator()(const Item& item, const Sums& sum) const {
    const int64_t volume = arguments.target.volume();
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block) {
      // Of this lane's vectors: the sample is the same for all of them, columns are `step` apart.
      constexpr int parts = piece / 16, step = 128 / (16 * parts);
      const int part = thread % parts, sample = thread / parts % 16, column = thread / (16 * parts);
      const auto o = Base::outputs(item, 64 * block + sample);
      const int channel = item.column_tile * Config::column_tile + column;
      Storage* to = arguments.target.data + Base::element(item, o) + column * volume +
                    part * (16 / element);
      const bool exists = o.fits[2] > 0;
#pragma unroll
      for (int slot0 = 0; slot0 < slots0; ++slot0)
#pragma unroll
        for (int slot1 = 0; slot1 < slots1; ++slot1) {
          Storage* own = to + int64_t(slot0) * arguments.target.stride0 +
                         int64_t(slot1) * arguments.target.stride1;
          const bool fits = exists && slot0 < o.fits[0] && slot1 < o.fits[1];
#pragma unroll
          for (int first = 0; first < Config::column_tile; first += columns) {
            named_barrier_sync(2 + warpgroup, 128);
            stage(item, sum, block, slot0, slot1, first);
            named_barrier_sync(2 + warpgroup, 128);
#pragma unroll
            for (int i = 0; i < vectors; ++i) {
              uint32_t v[4];
              load_shared(staging + (column + i * step) * pitch + sample * piece + part * 16, v[0],
                          v[1], v[2], v[3]);
              if (fits && channel + first + i * step < Config::target_channels)
                store_streaming(reinterpret_cast<uint4*>(own + (first + i * step) * volume),
                                make_uint4(v[0], v[1], v[2], v[3]));
            }
          }
        }
    }
  }

 private:
  CONVT3D_DEVICE void stage(const Item& item, const Sums& sum, int block, int slot0, int slot1,
                            int first) const {
    const int lane = thread % 32;
    const uint32_t own = staging + 2 * (lane % 4) * pitch + lane / 4 * piece +
                         thread / 32 * slots2 * element;
    const bool used =
        has_tap<typename Config::Inner0>(slot0) && has_tap<typename Config::Inner1>(slot1);
#pragma unroll
    for (int eight = 0; eight < columns / 8; ++eight)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float bias = bias_of(item, item.column_tile * Config::column_tile + first +
                                             8 * eight + 2 * (lane % 4) + i);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float value[slots2];
#pragma unroll
          for (int slot2 = 0; slot2 < slots2; ++slot2)
            value[slot2] =
                (used && has_tap<typename Config::Axis2>(slot2)
                     ? sum[slot0][slot1][slot2][block][first / 2 + 4 * eight + 2 * half + i]
                     : 0.f) +
                bias;
          const uint32_t to = own + (8 * eight + i) * pitch + 8 * half * piece;
#pragma unroll
          for (int slot2 = 0; slot2 + 1 < slots2; slot2 += 2)
            if constexpr (element == 2)
              store_shared(to + slot2 * element, Type::pack(value[slot2], value[slot2 + 1]));
            else
              store_shared(to + slot2 * element, bits_of(value[slot2]), bits_of(value[slot2 + 1]));
        }
      }
  }
};

}  // namespace convt3d
