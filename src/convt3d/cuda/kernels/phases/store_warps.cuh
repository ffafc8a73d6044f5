// The epilogue of phases/kernel.cu with store warps, contiguous targets. Warps that multiply
// stage their outputs (phases/staged_outputs.cuh) and go on to the next work tile; store warps
// copy what is staged to the target.
//
//   multiplying warps   lay out a few columns of one slot of axis 0 of the whole tile in a buffer, each
//                       output as far from the tile's first one as in the target, modulo 16 bytes;
//                       columns follow one another
//   store warp          one bulk copy for each run (see phases/runs.cuh), of what is aligned to 16
//                       bytes. Lanes store the few elements at both ends of a run
//
// Outputs without taps hold the bias alone and are not staged: one more warp stores them from
// registers.
#pragma once
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "phases/runs.cuh"
#include "phases/staged_outputs.cuh"

namespace convt3d {

/// A store warp; its units are all those of a tile.
template <typename Config>
struct PhasesStoreWarp : PhasesRuns<Config> {
  using Base = PhasesRuns<Config>;
  using typename Base::Run;
  using typename Base::Storage;
  using typename Base::Type;
  using typename Base::Units;
  using Base::arguments;
  using Base::bias_of;
  using Base::run;
  using Base::slots0;
  static constexpr int bytes = sizeof(Storage);
  static constexpr int vector = 16 / bytes;
  static constexpr uint32_t live = live_slots<typename Config::Inner0>();
  /// Whether there are phases or slots of axis 0 without taps, for a warp of their own.
  static constexpr bool filler = Base::empty_phases || live != (1u << slots0) - 1;
  static_assert(Config::store_warps <= 2 || !filler, "a warp that is left");

  uint32_t shared;
  PhasesBuffers<Config> buffers;
  int lane;

  CONVT3D_DEVICE PhasesStoreWarp(const PhasesArguments<Storage>& arguments_, const Units& tile,
                                 uint32_t shared_)
      : Base(arguments_, tile, 0),
        shared(shared_),
        buffers{arguments_, shared_ + arguments_.staging_offset},
        lane(threadIdx.x % 32) {}

  /// Copies what is staged; store warps take buffers in turn. There are no more of them than
  /// buffers: the parity of a barrier distinguishes a phase from the one before it only, and a
  /// store warp has a round of its own in every round of buffers.
  CONVT3D_DEVICE void send(int store_warp) const {
    OutputRing<Config> ring = output_ring<Config>(shared);
    PhasesProductWalk<Config> walk(arguments);
    WorkTile work;
    const int count = arguments.runs;
    const int store_warps = min(Config::store_warps, arguments.buffers);
    int next_warp = 0;
    while (walk.next(arguments, work)) {
      if (work.taps_of_chunk() == 0) continue;
      const Run own = run(work, min(lane / Config::staged_columns, count - 1));
#pragma unroll 1
      for (int slot0 = 0; slot0 < slots0; ++slot0) {
        if (!(live >> slot0 & 1)) continue;
#pragma unroll 1
        for (int first = 0; first < Config::column_tile; first += Config::staged_columns) {
          if (next_warp == store_warp) {
            ring.wait_full();
            staged(work, own, buffers.at(ring.stage), slot0, first, count);
            mbarrier_arrive(ring.empty(ring.stage));
          }
          ring.advance(arguments.buffers);
          next_warp = next_warp + 1 < store_warps ? next_warp + 1 : 0;
        }
      }
    }
  }

  /// Stores all outputs without taps, which need no products.
  CONVT3D_DEVICE void fill() const {
    PhasesWalk<Config> walk(arguments);
    WorkTile work;
    const int count = arguments.runs;
    while (walk.next(arguments, work)) {
      const bool taps = work.taps_of_chunk() != 0;
#pragma unroll 1
      for (int slot0 = 0; slot0 < slots0; ++slot0) {
        if (taps && (live >> slot0 & 1)) continue;
#pragma unroll 1
        for (int number = 0; number < count; ++number) constants(work, run(work, number), slot0);
      }
    }
  }

 private:
  CONVT3D_DEVICE static bool exists(const WorkTile& work, int column) {
    return Config::target_channels % Config::column_tile == 0 ||
           work.column_tile * Config::column_tile + column < Config::target_channels;
  }
  CONVT3D_DEVICE int64_t offset(int column, int slot0) const {
    return column * arguments.target.volume() + int64_t(slot0) * arguments.target.stride0;
  }

  /// A run of a staged column: its first element of the target, where that is staged, elements up
  /// to the first whole vector, up to the end of the last one, and in all.
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
  CONVT3D_DEVICE void staged(const WorkTile& work, const Run& own_run, uint32_t buffer, int slot0,
                             int first, int count) const {
    const int all = count * Config::staged_columns;
#pragma unroll 1
    for (int base = 0; base < all; base += 32) {
      const int index = min(base + lane, all - 1);
      const int column = index % Config::staged_columns;
      const Run r = base == 0 ? own_run : run(work, index / Config::staged_columns);
      const int64_t start = r.start + offset(first + column, slot0);
      const int lead = int(uint32_t(start - r.staged) % vector);
      const bool has = base + lane < all && slot0 < r.slots && exists(work, first + column);
      const int length = has ? r.length : 0;
      const int head = min(int(uint32_t(-start) % vector), length);
      const Part own{start,
                     buffer + (column * arguments.staged_column + lead + r.staged) * bytes,
                     head, head + (length - head) / vector * vector, length};
      const int runs_here = min(32, all - base);
      copies(own, runs_here);
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
    bulk_commit();
    bulk_wait_read<0>();
  }
  CONVT3D_DEVICE static float of_word(uint32_t word, float) { return float_of(word); }
  CONVT3D_DEVICE static uint16_t of_word(uint32_t word, uint16_t) { return uint16_t(word); }

  /// The whole vectors of lanes' runs. Operands are known to be the same in all lanes: copies by
  /// lanes for themselves would be issued one by one, in a loop of votes.
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

  /// A run without taps in all columns: lines of 128 bytes as they lie in the target, by two
  /// instructions for 512 bytes.
  CONVT3D_DEVICE void constants(const WorkTile& work, const Run& r, int slot0) const {
    if (slot0 >= r.slots) return;
    constexpr int line = 128, step = 512, ways = 6;  // bytes, stores on their way
    constexpr bool whole_tiles = Config::target_channels % Config::column_tile == 0;
    const int columns = whole_tiles ? Config::column_tile
                                    : min(Config::column_tile, Config::target_channels -
                                                                   work.column_tile * Config::column_tile);
    unsigned char* to =
        reinterpret_cast<unsigned char*>(arguments.target.data + r.start + offset(0, slot0));
    const int64_t volume = arguments.target.volume() * bytes;
    const uint32_t length = r.length * bytes;
    float own = 0.f;
#pragma unroll 1
    for (int column = 0; column < columns; ++column, to += volume) {
      constexpr bool differ = Config::bias || Fusion::runs;
      if constexpr (differ) {
        // The bias of as many columns as there are lanes, loaded at once.
        if (column % 32 == 0) {
          const int channel = work.column_tile * Config::column_tile + column + lane;
          own = bias_of(work, channel);
          if constexpr (Fusion::runs && !Fusion::by_element)
            own = Base::fuse(work, own, channel, arguments.target.data);
        }
      }
      const float constant = differ ? __shfl_sync(0xffffffffu, own, column % 32) : 0.f;
      if constexpr (Fusion::by_element) {
        Storage* first = reinterpret_cast<Storage*>(to);
        for (int i = lane; i < r.length; i += 32)
          store_streaming(first + i,
                          Type::store(Base::fuse(
                              work, constant, work.column_tile * Config::column_tile + column,
                              first + i)));
        continue;
      }
      const Storage value = Type::store(constant);
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
