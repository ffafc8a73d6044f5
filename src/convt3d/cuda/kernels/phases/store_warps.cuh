// The epilogue of phases/kernel.cu in which warps of their own send, contiguous targets: those that
// multiply stage their outputs and go on.
//
//   multiplying warps       a few columns of one slot of axis 0 of the whole tile are laid out in a
//                           buffer, each output as far from the tile's first one as in the target,
//                           modulo 16 bytes; columns follow one another
//   sending warp            a lane for each run (see phases/runs.cuh): one bulk copy of what is
//                           aligned to 16 bytes; or all lanes one run, 16 bytes each, lines of 128
//                           bytes as they lie in the target. The few elements at both ends of a run
//                           are stored by lanes of their own
//
// Outputs without taps are the bias, which nobody stages: one more warp stores them from registers and
// waits for nobody.
#pragma once
#include "phases/runs.cuh"

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
  using typename Base::Item;
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
  CONVT3D_DEVICE void finish() const {}

  CONVT3D_DEVICE void operator()(const Item& item, const PhasesSums<Config>& sum) {
    if (item.taps0.count * item.taps1.count == 0) return;
    // The column that this lane's pairs begin with, and its first output's element of the target.
    const int lane_column = 2 * (thread % 4);
    const uint32_t origin =
        uint32_t(Base::element(item)) + lane_column * uint32_t(arguments.target.volume());
    // Of this lane's units: places in a staged column, and slots along axis 2; 0 where there is none.
    Places places;
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = Base::row_of(block, half);
        places.at[block][half] = units.staged_in_tile(row) * bytes;
        places.fits[block][half] = Base::outputs(item, row).fits[2];
      }
    if constexpr (unrolled) {
      all_rounds<0>(item, sum, places, origin);
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
        put<1>(item, values, places, origin, slot0, slot1, eight, place);
        if (slot1 == slots1 - 1 && place == eights - 1) pass_on();
      }
    }
  }

 private:
  static constexpr int eights = staged_columns / 8, all_eights = Config::column_tile / 8;
  static constexpr int rounds = Config::column_tile / staged_columns;
  static constexpr int parts = slots0 * slots1 * all_eights;
  static constexpr uint32_t live = live_slots<typename Config::Inner0>();
  /// All stores are written out where they are few: a loop takes half as long again, and copies what lies
  /// in registers, but many stores take seconds to compile.
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
  CONVT3D_DEVICE void all_rounds(const Item& item, const PhasesSums<Config>& sum,
                                 const Places& places, uint32_t origin) {
    if constexpr (Round < slots0 * rounds) {
      if constexpr (has_tap<typename Config::Inner0>(Round / rounds)) {
        ring.wait_empty();
        all_slots<Round, 0>(item, sum, places, origin);
        pass_on();
      }
      all_rounds<Round + 1>(item, sum, places, origin);
    }
  }
  template <int Round, int Slot1>
  CONVT3D_DEVICE void all_slots(const Item& item, const PhasesSums<Config>& sum,
                                const Places& places, uint32_t origin) const {
    if constexpr (Slot1 < slots1) {
      constexpr int slot0 = Round / rounds, first = Round % rounds * eights;
      Values<eights> values = {};
      Take<eights, false>{sum, values}
          .template at<(slot0 * all_eights + first) * slots1 + Slot1>();
      put<eights>(item, values, places, origin, slot0, Slot1, first, 0);
      all_slots<Round, Slot1 + 1>(item, sum, places, origin);
    }
  }
  /// A buffer is full.
  CONVT3D_DEVICE void pass_on() {
    if constexpr (Config::bulk_copies) fence_async_proxy();
    mbarrier_arrive(ring.full());
    ring.advance(arguments.buffers);
  }

  /// Some eights of columns from `first` on, of a slot of axes 0 and 1; in a buffer from eight `place` on.
  template <int Eights>
  CONVT3D_DEVICE void put(const Item& item, const Values<Eights>& values, const Places& places,
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
        put_column<Eights, true>(item, values, places, to, 8 * first + column, i);
      else
        put_column<Eights, false>(item, values, places, to, 8 * first + column, i);
    }
  }
  /// A lane's first (0) or second column of eights. `Aligned`: all pairs are.
  template <int Eights, bool Aligned>
  CONVT3D_DEVICE void put_column(const Item& item, const Values<Eights>& values,
                                 const Places& places, uint32_t to, int column, int i) const {
    const uint32_t step = 8 * arguments.staged_column * bytes;
    float bias[Eights];
#pragma unroll
    for (int eight = 0; eight < Eights; ++eight)
      bias[eight] =
          bias_of(item, item.column_tile * Config::column_tile + column + 8 * eight + i);
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

/// What sending warps do; their units are all those of a tile.
template <typename Config>
struct PhasesSender : PhasesRuns<Config> {
  using Base = PhasesRuns<Config>;
  using typename Base::Item;
  using typename Base::Run;
  using typename Base::Storage;
  using typename Base::Type;
  using typename Base::Units;
  using Base::arguments;
  using Base::bias_of;
  using Base::run;
  using Base::runs;
  using Base::slots0;
  static constexpr int bytes = sizeof(Storage);
  static constexpr int vector = 16 / bytes;
  static constexpr uint32_t live = live_slots<typename Config::Inner0>();
  /// Whether there are phases or slots of axis 0 without taps, for a warp of their own.
  static constexpr bool filler = Base::empty_phases || live != (1u << slots0) - 1;
  static_assert(Config::senders <= 2 || !filler, "a warp that is left");

  uint32_t shared;
  PhasesBuffers<Config> buffers;
  int lane;

  CONVT3D_DEVICE PhasesSender(const PhasesArguments<Storage>& arguments_, const Units& tile,
                              uint32_t shared_)
      : Base(arguments_, tile, 0),
        shared(shared_),
        buffers{arguments_, shared_ + arguments_.staging_offset},
        lane(threadIdx.x % 32) {}

  /// Sends what is staged; senders take turns. There are no more of them than buffers: a barrier's parity
  /// tells a phase from the one before it, no further, and of a buffer's last round the sender of its
  /// next one knows by a round of its own.
  CONVT3D_DEVICE void send(int sender) const {
    OutputRing<Config> ring = output_ring<Config>(shared);
    PhasesProductWalk<Config> walk(arguments);
    Item item;
    const int count = runs();
    const int senders = min(Config::senders, arguments.buffers);
    int turn = 0;
    while (walk.next(arguments, item)) {
      if (item.taps0.count * item.taps1.count == 0) continue;
      const Run own = run(item, min(lane / Config::staged_columns, count - 1));
#pragma unroll 1
      for (int slot0 = 0; slot0 < slots0; ++slot0) {
        if (!(live >> slot0 & 1)) continue;
#pragma unroll 1
        for (int first = 0; first < Config::column_tile; first += Config::staged_columns) {
          if (turn == sender) {
            ring.wait_full();
            staged(item, own, buffers.at(ring.stage), slot0, first, count);
            mbarrier_arrive(ring.empty(ring.stage));
          }
          ring.advance(arguments.buffers);
          turn = turn + 1 < senders ? turn + 1 : 0;
        }
      }
    }
  }

  /// Stores all outputs without taps, which wait for nobody.
  CONVT3D_DEVICE void fill() const {
    PhasesWalk<Config> walk(arguments);
    Item item;
    const int count = runs();
    while (walk.next(arguments, item)) {
      const bool taps = item.taps0.count * item.taps1.count != 0;
#pragma unroll 1
      for (int slot0 = 0; slot0 < slots0; ++slot0) {
        if (taps && (live >> slot0 & 1)) continue;
#pragma unroll 1
        for (int number = 0; number < count; ++number) constants(item, run(item, number), slot0);
      }
    }
  }

 private:
  CONVT3D_DEVICE static bool exists(const Item& item, int column) {
    return Config::target_channels % Config::column_tile == 0 ||
           item.column_tile * Config::column_tile + column < Config::target_channels;
  }
  CONVT3D_DEVICE int64_t offset(int column, int slot0) const {
    return column * arguments.target.volume() + int64_t(slot0) * arguments.target.stride0;
  }

  /// A run of a staged column: its first element of the target, where that is staged, elements up to
  /// the first whole vector, up to the end of the last one, and in all.
  struct Part {
    int64_t start;
    uint32_t from;
    int head, whole, length;

    /// That of another lane.
    CONVT3D_DEVICE Part of(int lane) const {
      const uint32_t low = __shfl_sync(0xffffffffu, uint32_t(start), lane);
      const uint32_t high = __shfl_sync(0xffffffffu, uint32_t(start >> 32), lane);
      const uint32_t lengths = __shfl_sync(
          0xffffffffu, uint32_t(whole) << 8 | uint32_t(head) << 4 | uint32_t(length - whole), lane);
      const int end = int(lengths >> 8);
      return {int64_t(high) << 32 | low, __shfl_sync(0xffffffffu, from, lane),
              int(lengths >> 4 & 15), end, end + int(lengths & 15)};
    }
  };

  /// The runs of staged columns, until they have left shared memory.
  CONVT3D_DEVICE void staged(const Item& item, const Run& own_run, uint32_t buffer, int slot0,
                             int first, int count) const {
    const int all = count * Config::staged_columns;
#pragma unroll 1
    for (int base = 0; base < all; base += 32) {
      const int index = min(base + lane, all - 1);
      const int column = index % Config::staged_columns;
      const Run r = base == 0 ? own_run : run(item, index / Config::staged_columns);
      const int64_t start = r.start + offset(first + column, slot0);
      const int lead = int(uint32_t(start - r.staged) % vector);
      const bool has = base + lane < all && slot0 < r.slots && exists(item, first + column);
      const int length = has ? r.length : 0;
      const int head = min(int(uint32_t(-start) % vector), length);
      const Part own{start,
                     buffer + (column * arguments.staged_column + lead + r.staged) * bytes,
                     head, head + (length - head) / vector * vector, length};
      const int runs_here = min(32, all - base);
      if constexpr (Config::bulk_copies)
        copies(own, runs_here);
      else
        for (int i = 0; i < runs_here; ++i) vectors(own.of(i));
      // Fewer than a vector at each end, by lanes of their own; four on their way at once.
      constexpr int together = 32 / (2 * vector), ways = 4;
#pragma unroll 1
      for (int i = 0; i < runs_here; i += ways * together) {
        Storage* to[ways];
        uint32_t word[ways];
        bool has[ways];
#pragma unroll
        for (int way = 0; way < ways; ++way) {
          // Lanes beyond the last run have none.
          const Part part = own.of((i + way * together + lane / (2 * vector)) % 32);
          const int at = lane % vector;
          const bool tail = lane / vector % 2;
          const int position = at + (tail ? part.whole : 0);
          has[way] = i + way * together < runs_here &&
                     at < (tail ? part.length - part.whole : part.head);
          to[way] = arguments.target.data + part.start + position;
          if (has[way])
            word[way] = bytes == 4 ? load_shared(part.from + 4 * position)
                                   : load_shared_half(part.from + 2 * position);
        }
#pragma unroll
        for (int way = 0; way < ways; ++way)
          if (has[way]) store_streaming(to[way], of_word(word[way], Storage{}));
      }
    }
    if constexpr (Config::bulk_copies) {
      bulk_commit();
      bulk_wait_read<0>();
    }
  }
  CONVT3D_DEVICE static float of_word(uint32_t word, float) { return float_of(word); }
  CONVT3D_DEVICE static uint16_t of_word(uint32_t word, uint16_t) { return uint16_t(word); }

  /// The whole vectors of lanes' runs. Operands are known to be the same in all lanes: copies by lanes
  /// for themselves would be issued one by one, in a loop of votes.
  CONVT3D_DEVICE void copies(const Part& own, int count) const {
    constexpr int ways = 4;
    const uint64_t to = reinterpret_cast<uint64_t>(arguments.target.data + own.start + own.head);
    const uint32_t from = own.from + own.head * bytes;
    const uint32_t size = (own.whole - own.head) * bytes;
#pragma unroll 1
    for (int first = 0; first < count; first += ways) {
      uint32_t low[ways], high[ways], from_[ways], size_[ways];
#pragma unroll
      for (int i = 0; i < ways; ++i) {
        // Beyond the last run there is nothing.
        low[i] = __shfl_sync(0xffffffffu, uint32_t(to), first + i);
        high[i] = __shfl_sync(0xffffffffu, uint32_t(to >> 32), first + i);
        from_[i] = __shfl_sync(0xffffffffu, from, first + i);
        size_[i] = __shfl_sync(0xffffffffu, size, first + i);
      }
#pragma unroll
      for (int i = 0; i < ways; ++i)
        bulk_store_streaming_if(reinterpret_cast<void*>(uint64_t(high[i]) << 32 | low[i]), from_[i],
                                size_[i], lane == 0 && first + i < count && size_[i] > 0);
    }
  }

  /// A run's whole vectors, by all lanes: lines of 128 bytes as they lie in the target, as many on their
  /// way at once as 2 KB have.
  CONVT3D_DEVICE void vectors(const Part& part) const {
    constexpr int line = 128, step = 512, ways = 5;  // bytes, loads on their way
    unsigned char* to = reinterpret_cast<unsigned char*>(arguments.target.data + part.start);
    const int lead = int(uint32_t(reinterpret_cast<uint64_t>(to)) % line);
    const int first = 16 * lane - lead, whole = part.whole * bytes;
    to += first;
    uint32_t from = part.from + first;
    int left = whole - first;
    bool inside = first >= part.head * bytes;
#pragma unroll 1
    for (int rest = whole + lead; rest > 0; rest -= ways * step) {
      uint32_t word[ways][4];
#pragma unroll
      for (int i = 0; i < ways; ++i)
        if (left > i * step && (i > 0 || inside))
          load_shared(from + i * step, word[i][0], word[i][1], word[i][2], word[i][3]);
#pragma unroll
      for (int i = 0; i < ways; ++i)
        if (left > i * step && (i > 0 || inside))
          store_streaming(reinterpret_cast<uint4*>(to + i * step),
                          make_uint4(word[i][0], word[i][1], word[i][2], word[i][3]));
      to += ways * step;
      from += ways * step;
      left -= ways * step;
      inside = true;
    }
  }

  /// A run without taps in all columns: lines of 128 bytes as they lie in the target, by two instructions
  /// for 512 bytes.
  CONVT3D_DEVICE void constants(const Item& item, const Run& r, int slot0) const {
    if (slot0 >= r.slots) return;
    constexpr int line = 128, step = 512, ways = 6;  // bytes, stores on their way
    constexpr bool whole_tiles = Config::target_channels % Config::column_tile == 0;
    const int columns = whole_tiles ? Config::column_tile
                                    : min(Config::column_tile, Config::target_channels -
                                                                   item.column_tile * Config::column_tile);
    unsigned char* to =
        reinterpret_cast<unsigned char*>(arguments.target.data + r.start + offset(0, slot0));
    const int64_t volume = arguments.target.volume() * bytes;
    const uint32_t length = r.length * bytes;
    float own = 0.f;
#pragma unroll 1
    for (int column = 0; column < columns; ++column, to += volume) {
      if constexpr (Config::bias) {
        // The bias of as many columns as there are lanes, loaded at once.
        if (column % 32 == 0)
          own = bias_of(item, item.column_tile * Config::column_tile + column + lane);
      }
      const Storage value =
          Type::store(Config::bias ? __shfl_sync(0xffffffffu, own, column % 32) : 0.f);
      const uint32_t word = bytes == 4 ? bits(value) : bits(value) * 0x10001u;
      const uint4 words = make_uint4(word, word, word, word);
      const uint32_t low = uint32_t(reinterpret_cast<uint64_t>(to));
      const uint32_t head = min(-low % 16, length);
      const uint32_t whole = head + (length - head) / 16 * 16;
      const int first = 16 * lane - int(low % line);
      unsigned char* at = to + first;
      if (first >= int(head) && first < int(whole))
        store_streaming(reinterpret_cast<uint4*>(at), words);
      int left = int(whole) - first - step;
#pragma unroll 1
      for (int rest = int(whole + low % line) - step; rest > 0; rest -= ways * step) {
#pragma unroll
        for (int i = 0; i < ways; ++i)
          if (left > i * step) store_streaming(reinterpret_cast<uint4*>(at + (i + 1) * step), words);
        at += ways * step;
        left -= ways * step;
      }
      // Fewer than 16 bytes at each end.
      const uint32_t end = (lane < vector ? lane : lane - vector) * bytes + (lane < vector ? 0 : whole);
      if (lane < 2 * vector && end < (lane < vector ? head : length))
        store_streaming(reinterpret_cast<Storage*>(to + end), value);
    }
  }
  CONVT3D_DEVICE static uint32_t bits(float value) { return bits_of(value); }
  CONVT3D_DEVICE static uint32_t bits(uint16_t value) { return value; }
};

}  // namespace convt3d
