// The epilogue of phases/kernel.cu without shared memory, for units that are one output each:
// lanes store their sums as they lie, contiguous targets. Eight lanes have neighbouring units of
// a column, or pairs of them, which are whole sectors of 32 bytes where rows are: a warp's store
// is four columns.
#pragma once
#include "phases/outputs.cuh"

namespace convt3d {

template <typename Config>
struct PhasesLaneStore : PhasesOutputs<Config> {
  using Base = PhasesOutputs<Config>;
  using typename Base::Storage;
  using typename Base::Type;
  using typename Base::Units;
  using Base::arguments;
  using Base::bias_of;
  using Base::thread;

  CONVT3D_DEVICE PhasesLaneStore(const PhasesArguments<Storage>& arguments_, const Units& units_,
                                 uint32_t, int warpgroup_)
      : Base(arguments_, units_, warpgroup_) {}

  CONVT3D_DEVICE void operator()(const WorkTile& work, const PhasesSums<Config>& sum) const {
    if (Config::lane_pairs && arguments.wide)
      store<true>(work, sum);
    else
      store<false>(work, sum);
  }

 private:
  /// `Pairs`: both units of a lane's pair exist, or none, and their outputs are aligned to two.
  template <bool Pairs>
  CONVT3D_DEVICE void store(const WorkTile& work, const PhasesSums<Config>& sum) const {
    constexpr bool whole = Config::target_channels % Config::column_tile == 0;
    const int64_t volume = arguments.target.volume();
    const int column = work.column_tile * Config::column_tile + 2 * (thread % 4);
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int half = 0; half < (Pairs ? 1 : 2); ++half) {
        const auto o = Base::outputs(work, Base::row_of(block, half));
        if (o.fits[0] <= 0 || o.fits[1] <= 0 || o.fits[2] <= 0) continue;
        Storage* to = arguments.target.data + Base::element(work, o) + 2 * (thread % 4) * volume;
#pragma unroll
        for (int eight = 0; eight < Config::column_tile / 8; ++eight) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = column + 8 * eight + i;
            if (whole || at < Config::target_channels) {
              const float bias = bias_of(work, at);
              const float* values = &sum[0][0][0][block][4 * eight + 2 * half + i];
              float first = values[0] + bias;
              if constexpr (Fusion::runs) first = Base::fuse(work, first, at, to + i * volume);
              if constexpr (Pairs) {
                float second = values[2] + bias;
                if constexpr (Fusion::runs)
                  second = Base::fuse(work, second, at, to + i * volume + 1);
                store_two<Type>(to + i * volume, first, second);
              } else {
                store_streaming(to + i * volume, Type::store(first));
              }
            }
          }
          to += 8 * volume;
        }
      }
  }
};

}  // namespace convt3d
