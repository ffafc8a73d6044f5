// The epilogue of phases/kernel.cu in which every warp stores its own outputs, contiguous
// targets: no warp waits for another.
//
// The outputs of a warp's 16 units of a block, along W, of one slot of the other axes and of some
// columns at a time pass through shared memory, [column][unit][slot2] in float32:
//
//     fragment: lane (g, t) has units g, g + 8          store: neighbouring lanes have neighbouring
//     of columns 2t, 2t + 1, all slots of W             outputs, each lane the same ones of every column
//
// A lane computes once a work tile where its outputs lie; a store then needs an offset that all
// lanes share. Rows and tiles that are multiples of `wide_outputs` are stored so many outputs a
// lane, others one.
#pragma once
#include "load/box.cuh"
#include "phases/outputs.cuh"

namespace convt3d {

template <typename Config>
struct PhasesWarpStore : PhasesOutputs<Config> {
  using Base = PhasesOutputs<Config>;
  using typename Base::Arguments;
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
  static constexpr int staged_columns = Config::staged_columns;
  static constexpr int rounds = Config::column_tile / staged_columns;
  static constexpr int pitch = Config::staged_pitch;  // words of a staged column

  uint32_t staging;  // of the warp

  CONVT3D_DEVICE PhasesWarpStore(const Arguments& arguments_, const Units& units_,
                                 uint32_t shared, int warpgroup_)
      : Base(arguments_, units_, warpgroup_),
        staging(shared + arguments_.staging_offset +
                (4 * warpgroup_ + thread / 32) * staged_columns * pitch * 4) {}

  CONVT3D_DEVICE void operator()(const WorkTile& work, const Sums& sum) const {
    if (arguments.wide)
      store<Config::wide_outputs>(work, sum);
    else
      store<1>(work, sum);
  }

 private:
  /// How lanes share the outputs of columns, `Vector` neighbouring ones each: after `columns`
  /// columns, which are `parts` stores, it begins again.
  template <int Vector>
  struct Share {
    static constexpr int of_column = 16 * slots2 / Vector;
    static constexpr int common = gcd(of_column, 32);
    static constexpr int columns = 32 / common, parts = of_column / common;
    static_assert(staged_columns % columns == 0, "whole rounds");

    CONVT3D_DEVICE static int column(int lane, int part) { return (lane + 32 * part) / of_column; }
    CONVT3D_DEVICE static int first(int lane, int part) {
      return (lane + 32 * part) % of_column * Vector;
    }
  };
  /// A lane's outputs of one part: the first column's, and how many slots of axes 0 and 1 exist.
  struct Place {
    Storage* to;
    int column, slots[2];
  };
  template <int Vector>
  CONVT3D_DEVICE void find(const WorkTile& work, int block,
                           Place (&places)[Share<Vector>::parts]) const {
#pragma unroll
    for (int part = 0; part < Share<Vector>::parts; ++part) {
      const int at = Share<Vector>::first(thread % 32, part);
      const int column = Share<Vector>::column(thread % 32, part);
      const auto o = Base::outputs(work, 64 * block + 16 * (thread / 32) + at / slots2);
      places[part] = {arguments.target.data + Base::element(work, o) +
                          column * arguments.target.volume() + at % slots2,
                      work.column_tile * Config::column_tile + column,
                      {at % slots2 < o.fits[2] ? o.fits[0] : 0, o.fits[1]}};
    }
  }
  CONVT3D_DEVICE int64_t offset(int column, int slot0, int slot1) const {
    const auto& target = arguments.target;
    return column * target.volume() + int64_t(slot0) * target.stride0 +
           int64_t(slot1) * target.stride1;
  }
  CONVT3D_DEVICE static bool exists(const Place& p, int column, int slot0, int slot1) {
    constexpr bool whole = Config::target_channels % Config::column_tile == 0;
    return slot0 < p.slots[0] && slot1 < p.slots[1] &&
           (whole || p.column + column < Config::target_channels);
  }

  template <int Vector>
  CONVT3D_DEVICE void store(const WorkTile& work, const Sums& sum) const {
    if constexpr (Base::empty_phases) {
      if (work.taps_of_chunk() == 0) {
#pragma unroll 1
        for (int block = 0; block < Config::blocks; ++block) {
          Place places[Share<Vector>::parts];
          find<Vector>(work, block, places);
          constants<Vector>(work, places, 0, slots0, 0, slots1);
        }
        return;
      }
    }
    // All rounds are written out where stores are wide: a loop copies what lies in registers, but
    // many stores take seconds to compile.
    if constexpr (Vector > 1 && all_rounds <= 16) {
      Place places[Share<Vector>::parts];
      every_round<Vector, 0>(work, sum, places);
    } else {
      looped_rounds<Vector>(work, sum);
    }
  }
  template <int Vector>
  CONVT3D_DEVICE void looped_rounds(const WorkTile& work, const Sums& sum) const {
#pragma unroll 1
    for (int block = 0; block < Config::blocks; ++block) {
      Place places[Share<Vector>::parts];
      find<Vector>(work, block, places);
#pragma unroll 1
      for (int slot = 0; slot < slots0 * slots1; ++slot) {
        const int slot0 = slot / slots1, slot1 = slot % slots1;
        if constexpr (some_empty)
          if (!(live0 >> slot0 & 1 && live1 >> slot1 & 1)) {
            constants<Vector>(work, places, slot0, slot0 + 1, slot1, slot1 + 1);
            continue;
          }
#pragma unroll 1
        for (int round = 0; round < rounds; ++round) {
          Values values = {};  // of slots without taps
          visit_number<0, all_rounds>((block * slots0 * slots1 + slot) * rounds + round,
                                      Take<true>{sum, values});
          move_out<Vector>(work, values, places, slot0, slot1, round * staged_columns);
        }
      }
    }
  }
  template <int Vector, int Number>
  CONVT3D_DEVICE void every_round(const WorkTile& work, const Sums& sum,
                                  Place (&places)[Share<Vector>::parts]) const {
    if constexpr (Number < all_rounds) {
      constexpr int slot1 = Number / rounds % slots1, slot0 = Number / rounds / slots1 % slots0;
      if constexpr (Number % (all_rounds / Config::blocks) == 0)
        find<Vector>(work, Number * Config::blocks / all_rounds, places);
      if constexpr (has_tap<typename Config::Inner0>(slot0) &&
                    has_tap<typename Config::Inner1>(slot1)) {
        Values values = {};
        Take<false>{sum, values}.template at<Number>();
        move_out<Vector>(work, values, places, slot0, slot1, Number % rounds * staged_columns);
      } else if constexpr (Number % rounds == 0) {
        constants<Vector>(work, places, slot0, slot0 + 1, slot1, slot1 + 1);
      }
      every_round<Vector, Number + 1>(work, sum, places);
    }
  }

  static constexpr int all_rounds = Config::blocks * slots0 * slots1 * rounds;
  static constexpr uint32_t live0 = live_slots<typename Config::Inner0>();
  static constexpr uint32_t live1 = live_slots<typename Config::Inner1>();
  static constexpr bool some_empty = live0 != (1u << slots0) - 1 || live1 != (1u << slots1) - 1;

  /// The sums of a round.
  using Values = float[slots2][staged_columns / 2];
  template <bool Copied>
  struct Take {
    const Sums& sum;
    Values& values;

    template <int Number>
    CONVT3D_DEVICE void at() const {
      constexpr int first = Number % rounds * (staged_columns / 2);
      constexpr int slot1 = Number / rounds % slots1;
      constexpr int slot0 = Number / rounds / slots1 % slots0;
      constexpr int block = Number / rounds / slots1 / slots0;
      if constexpr (has_tap<typename Config::Inner0>(slot0) &&
                    has_tap<typename Config::Inner1>(slot1)) {
#pragma unroll
        for (int slot2 = 0; slot2 < slots2; ++slot2)
          if (has_tap<typename Config::Axis2>(slot2))
#pragma unroll
            for (int i = 0; i < staged_columns / 2; ++i) {
              const float value = sum[slot0][slot1][slot2][block][first + i];
              values[slot2][i] = Copied ? own_value(value) : value;
            }
      }
    }
  };

  template <int Vector>
  CONVT3D_DEVICE void move_out(const WorkTile& work, const Values& values,
                               const Place (&places)[Share<Vector>::parts], int slot0, int slot1,
                               int first) const {
    __syncwarp();
    stage(work, values, first);
    __syncwarp();
    if constexpr (Fusion::runs)
      send<Vector>(places, slot0, slot1, first, work);
    else
      send<Vector>(places, slot0, slot1, first);
  }

  CONVT3D_DEVICE void stage(const WorkTile& work, const Values& values, int first) const {
    const int lane = thread % 32;
    const uint32_t own = staging + (2 * (lane % 4) * pitch + lane / 4 * slots2) * 4;
#pragma unroll
    for (int eight = 0; eight < staged_columns / 8; ++eight)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float bias = bias_of(work, work.column_tile * Config::column_tile + first +
                                             8 * eight + 2 * (lane % 4) + i);
        uint32_t word[2][slots2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int slot2 = 0; slot2 < slots2; ++slot2) {
            float value = values[slot2][4 * eight + 2 * half + i];
            if constexpr (Config::bias) value += bias;
            word[half][slot2] = bits_of(value);
          }
        const uint32_t column = own + (8 * eight + i) * pitch * 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t to = column + 8 * half * slots2 * 4;
          if constexpr (slots2 == 2) {
            store_shared(to, word[half][0], word[half][1]);
          } else if constexpr (slots2 == 4) {
            store_shared(to, word[half][0], word[half][1], word[half][2], word[half][3]);
          } else {
#pragma unroll
            for (int slot2 = 0; slot2 < slots2; ++slot2)
              store_shared(to + 4 * slot2, word[half][slot2]);
          }
        }
      }
  }

  /// `work`: the work tile, where a fusion has steps.
  template <int Vector, typename... Work>
  CONVT3D_DEVICE void send(const Place (&places)[Share<Vector>::parts], int slot0, int slot1,
                           int first, const Work&... work) const {
    using Lanes = Share<Vector>;
    constexpr int groups = staged_columns / Lanes::columns;
    const int lane = thread % 32;
    // All loads are on their way before the first store waits for its own.
    uint32_t word[groups][Lanes::parts][Vector];
#pragma unroll
    for (int group = 0; group < groups; ++group)
#pragma unroll
      for (int part = 0; part < Lanes::parts; ++part) {
        const uint32_t from =
            staging + ((group * Lanes::columns + Lanes::column(lane, part)) * pitch +
                       Lanes::first(lane, part)) * 4;
        auto& to = word[group][part];
        if constexpr (Vector == 1) {
          to[0] = load_shared(from);
        } else if constexpr (Vector == 2) {
          load_shared(from, to[0], to[1]);
        } else {
#pragma unroll
          for (int i = 0; i < Vector; i += 4)
            load_shared(from + 4 * i, to[i], to[i + 1], to[i + 2], to[i + 3]);
        }
      }
#pragma unroll
    for (int part = 0; part < Lanes::parts; ++part) {
      Storage* to = places[part].to + offset(first, slot0, slot1);
#pragma unroll
      for (int group = 0; group < groups; ++group) {
        float value[Vector];
#pragma unroll
        for (int i = 0; i < Vector; ++i) value[i] = float_of(word[group][part][i]);
        if (exists(places[part], first + group * Lanes::columns, slot0, slot1)) {
          if constexpr (Fusion::runs)
            fuse_row(work..., value, places[part].column + first + group * Lanes::columns, to);
          store_row<Type>(to, value);
        }
        to += Lanes::columns * arguments.target.volume();
      }
    }
  }

  /// The steps on neighbouring outputs of a channel of the group.
  template <int Vector>
  CONVT3D_DEVICE void fuse_row(const WorkTile& work, float (&value)[Vector], int channel,
                               const Storage* to) const {
#pragma unroll
    for (int i = 0; i < Vector; ++i) value[i] = Base::fuse(work, value[i], channel, to + i);
  }

  /// Outputs without taps are the bias: of slots from some on to others.
  template <int Vector>
  CONVT3D_DEVICE void constants(const WorkTile& work, const Place (&places)[Share<Vector>::parts],
                                int begin0, int end0, int begin1, int end1) const {
#pragma unroll
    for (int part = 0; part < Share<Vector>::parts; ++part)
#pragma unroll 1
      for (int slot0 = begin0; slot0 < end0; ++slot0)
#pragma unroll 1
        for (int slot1 = begin1; slot1 < end1; ++slot1)
#pragma unroll 8
          for (int column = 0; column < Config::column_tile; column += Share<Vector>::columns) {
            if (!exists(places[part], column, slot0, slot1)) continue;
            float value[Vector];
            const float bias = bias_of(work, places[part].column + column);
#pragma unroll
            for (int i = 0; i < Vector; ++i) value[i] = bias;
            if constexpr (Fusion::runs)
              fuse_row(work, value, places[part].column + column,
                       places[part].to + offset(column, slot0, slot1));
            store_row<Type>(places[part].to + offset(column, slot0, slot1), value);
          }
  }
};

}  // namespace convt3d
