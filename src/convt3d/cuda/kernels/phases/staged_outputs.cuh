// Outputs that multiplying warps lay out in shared memory for the store warps of
// phases/store_warps.cuh.
#pragma once
#include "device/barrier.cuh"
#include "phases/outputs.cuh"

namespace convt3d {

/// Where the staged outputs of a tile lie.
template <typename Config>
struct PhasesBuffers {
  const PhasesArguments<typename Config::Storage>& arguments;
  uint32_t first;

  CONVT3D_DEVICE uint32_t at(int buffer) const {
    return first + buffer * Config::staged_columns * arguments.staged_column *
                       int(sizeof(typename Config::Storage));
  }
};

/// What multiplying warps do.
template <typename Config>
struct PhasesStagedStore : PhasesOutputs<Config> {
  using Base = PhasesOutputs<Config>;
  using typename Base::Storage;
  using typename Base::Type;
  using typename Base::Units;
  using Base::arguments;
  using Base::bias_of;
  using Base::slots0;
  using Base::slots1;
  using Base::slots2;
  using Base::thread;
  using Base::units;
  static constexpr int vector = 16 / int(sizeof(Storage));
  static constexpr int bytes = sizeof(Storage);
  static constexpr int staged_columns = Config::staged_columns;

  OutputRing<Config> ring;
  PhasesBuffers<Config> buffers;

  CONVT3D_DEVICE PhasesStagedStore(const PhasesArguments<Storage>& arguments_, const Units& units_,
                                   uint32_t shared, int warpgroup_)
      : Base(arguments_, units_, warpgroup_),
        ring(output_ring<Config>(shared)),
        buffers{arguments_, shared + arguments_.staging_offset},
        regular(slots1 * arguments_.staged_row % 2 == 0 &&
                (arguments_.tile[1] == 1 || arguments_.staged_slice % 2 == 0) &&
                (arguments_.tile[0] == 1 || arguments_.staged_sample % 2 == 0)) {}

  CONVT3D_DEVICE void operator()(const WorkTile& work, const PhasesSums<Config>& sum) {
    if (work.taps_of_chunk() == 0) return;
    // The column that this lane's pairs begin with, and its first output's element of the target.
    const int lane_column = 2 * (thread % 4);
    const uint32_t origin =
        uint32_t(Base::element(work)) + lane_column * uint32_t(arguments.target.volume());
    // Of this lane's units: places in a staged column, and slots along axis 2; 0 where there is
    // none.
    Places places;
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = Base::row_of(block, half);
        places.at[block][half] = units.staged(row) * bytes;
        places.fits[block][half] = Base::outputs(work, row).fits[2];
      }
    if constexpr (unrolled) {
      all_rounds<0>(work, sum, places, origin);
    } else {
#pragma unroll 1
      for (int part = 0; part < parts; ++part) {
        const int slot0 = part / (slots1 * all_eights);
        if constexpr (live != (1u << slots0) - 1)
          if (!(live >> slot0 & 1)) continue;
        const int slot1 = part % slots1, eight = part / slots1 % all_eights;
        Values<1> values = {};  // of slots without taps
        visit_number<0, parts>(part, Take<1, true>{sum, values});
        const int place = eight % eights;
        if (slot1 == 0 && place == 0) ring.wait_empty();
        put<1>(work, values, places, origin, slot0, slot1, eight, place);
        if (slot1 == slots1 - 1 && place == eights - 1) pass_on();
      }
    }
  }

 private:
  static constexpr int eights = staged_columns / 8, all_eights = Config::column_tile / 8;
  static constexpr int rounds = Config::column_tile / staged_columns;
  static constexpr int parts = slots0 * slots1 * all_eights;
  static constexpr uint32_t live = live_slots<typename Config::Inner0>();
  /// All stores are written out where they are few: a loop takes half as long again, and copies
  /// what lies in registers, but many stores take seconds to compile.
  static constexpr bool unrolled = parts * Config::blocks <= 16;
  /// Outputs of a unit along W that are pairs.
  static constexpr bool pairs = slots2 == 2;
  /// Whether all units of a tile are staged an even number of outputs apart.
  bool regular;

  struct Places {
    int at[Config::blocks][2], fits[Config::blocks][2];
  };
  /// The sums of some eights of columns, of a slot of axes 0 and 1.
  template <int Eights>
  using Values = float[slots2][Config::blocks][4 * Eights];
  template <int Eights, bool Copied>
  struct Take {
    const PhasesSums<Config>& sum;
    Values<Eights>& values;

    template <int Part>
    CONVT3D_DEVICE void at() const {
      constexpr int slot1 = Part % slots1, first = Part / slots1 % all_eights * 4;
      constexpr int slot0 = Part / slots1 / all_eights;
      if constexpr (has_tap<typename Config::Inner0>(slot0) &&
                    has_tap<typename Config::Inner1>(slot1)) {
#pragma unroll
        for (int slot2 = 0; slot2 < slots2; ++slot2)
          if (has_tap<typename Config::Axis2>(slot2))
#pragma unroll
            for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
              for (int i = 0; i < 4 * Eights; ++i) {
                const float value = sum[slot0][slot1][slot2][block][first + i];
                values[slot2][block][i] = Copied ? own_value(value) : value;
              }
      }
    }
  };

  template <int Round>
  CONVT3D_DEVICE void all_rounds(const WorkTile& work, const PhasesSums<Config>& sum,
                                 const Places& places, uint32_t origin) {
    if constexpr (Round < slots0 * rounds) {
      if constexpr (has_tap<typename Config::Inner0>(Round / rounds)) {
        ring.wait_empty();
        all_slots<Round, 0>(work, sum, places, origin);
        pass_on();
      }
      all_rounds<Round + 1>(work, sum, places, origin);
    }
  }
  template <int Round, int Slot1>
  CONVT3D_DEVICE void all_slots(const WorkTile& work, const PhasesSums<Config>& sum,
                                const Places& places, uint32_t origin) const {
    if constexpr (Slot1 < slots1) {
      constexpr int slot0 = Round / rounds, first = Round % rounds * eights;
      Values<eights> values = {};
      Take<eights, false>{sum, values}
          .template at<(slot0 * all_eights + first) * slots1 + Slot1>();
      put<eights>(work, values, places, origin, slot0, Slot1, first, 0);
      all_slots<Round, Slot1 + 1>(work, sum, places, origin);
    }
  }
  /// A buffer is full.
  CONVT3D_DEVICE void pass_on() {
    fence_async_proxy();
    mbarrier_arrive(ring.full());
    ring.advance(arguments.buffers);
  }

  /// Some eights of columns from `first` on, of a slot of axes 0 and 1; in a buffer from eight
  /// `place` on.
  template <int Eights>
  CONVT3D_DEVICE void put(const WorkTile& work, const Values<Eights>& values, const Places& places,
                          uint32_t origin, int slot0, int slot1, int first, int place) const {
    const uint32_t volume = uint32_t(arguments.target.volume());
    const int column = 2 * (thread % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Columns that are a multiple of eight apart lie alike modulo 16 bytes.
      const uint32_t lead = (origin + i * volume + slot0 * arguments.target.stride0) % vector;
      const uint32_t to =
          buffers.at(ring.stage) + ((8 * place + column + i) * arguments.staged_column +
                                    slot1 * arguments.staged_row + lead) * bytes;
      // The same in all lanes, whose columns are an even number apart.
      if (pairs && regular && (lead + slot1 * arguments.staged_row) % 2 == 0)
        put_column<Eights, true>(work, values, places, to, 8 * first + column, i, slot0, slot1);
      else
        put_column<Eights, false>(work, values, places, to, 8 * first + column, i, slot0, slot1);
    }
  }
  /// A lane's first (0) or second column of eights. `Aligned`: all pairs are.
  template <int Eights, bool Aligned>
  CONVT3D_DEVICE void put_column(const WorkTile& work, const Values<Eights>& values,
                                 const Places& places, uint32_t to, int column, int i, int slot0,
                                 int slot1) const {
    const uint32_t step = 8 * arguments.staged_column * bytes;
    float bias[Eights];
#pragma unroll
    for (int eight = 0; eight < Eights; ++eight)
      bias[eight] =
          bias_of(work, work.column_tile * Config::column_tile + column + 8 * eight + i);
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t at = to + places.at[block][half];
        const int fits = places.fits[block][half];
#pragma unroll
        for (int eight = 0; eight < Eights; ++eight, at += step) {
          float value[slots2];
#pragma unroll
          for (int slot2 = 0; slot2 < slots2; ++slot2) {
            value[slot2] = values[slot2][block][4 * eight + 2 * half + i];
            if constexpr (Config::bias) value[slot2] += bias[eight];
            if constexpr (Fusion::runs)
              value[slot2] = Base::fuse(
                  work, value[slot2],
                  work.column_tile * Config::column_tile + column + 8 * eight + i,
                  Base::row_of(block, half), slot0, slot1, slot2);
          }
          if constexpr (Aligned)
            put_pair(at, value, fits);
          else
            put_each(at, value, fits);
        }
      }
  }

  /// The outputs of a unit; beyond the end of a row the next one begins.
  CONVT3D_DEVICE void put_each(uint32_t to, const float (&value)[slots2], int fits) const {
    if constexpr (slots2 == 2 && bytes == 4) {
      // Neighbouring lanes begin with different ones: of all lanes they are in different banks.
      const int odd = thread % 2;
      store_shared_above(to + 4 * odd, bits_of(odd ? value[1] : value[0]), fits, odd);
      store_shared_above(to + 4 * (1 - odd), bits_of(odd ? value[0] : value[1]), fits, 1 - odd);
    } else if constexpr (slots2 == 2) {
      const uint32_t both = Type::pack(value[0], value[1]);
      store_shared_half_above(to, uint16_t(both), fits, 0);
      store_shared_half_above(to + 2, uint16_t(both >> 16), fits, 1);
    } else {
#pragma unroll
      for (int slot2 = 0; slot2 < slots2; ++slot2) {
        if constexpr (bytes == 4)
          store_shared_above(to + 4 * slot2, bits_of(value[slot2]), fits, slot2);
        else
          store_shared_half_above(to + 2 * slot2, Type::store(value[slot2]), fits, slot2);
      }
    }
  }
  /// The same of an aligned pair.
  CONVT3D_DEVICE void put_pair(uint32_t to, const float (&value)[slots2], int fits) const {
    if constexpr (slots2 == 2 && bytes == 4)
      store_shared_first(to, bits_of(value[0]), bits_of(value[1]), fits);
    else if constexpr (slots2 == 2)
      store_shared_halves_first(to, Type::pack(value[0], value[1]), fits);
  }
};

}  // namespace convt3d
