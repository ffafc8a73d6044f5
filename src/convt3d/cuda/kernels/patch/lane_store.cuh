// The epilogue of the kernel == stride product: bias, conversion, and stores straight from the
// accumulators, which a lane holds so that its outputs are neighbours in memory:
//
//   contiguous     `run` cells next to each other along W, each with its `target_width` slots: one
//                  piece of run * target_width elements, and the eight lanes of a column follow one
//                  another
//   channels_last  2 * interleave neighbouring channels of one position
#pragma once
#include "patch/work.cuh"

namespace convt3d {

/// Which of eight runs of cells lane g / 4 has.
template <typename Config>
CONVT3D_DEVICE int flat_run(int g) {
  return Config::runs_swapped ? g >> 2 | (g & 2) | (g & 1) << 2 : g;
}

/// The tile's cell that a lane's row `half` (g or g + 8) of fragment m holds, within its warp.
template <typename Config>
CONVT3D_DEVICE int linear_cell(int m, int half, int g) {
  if constexpr (Config::run == 1)
    return 16 * m + 8 * half + g;
  else
    return m / (Config::run / 2) * 8 * Config::run + flat_run<Config>(g) * Config::run +
           m % (Config::run / 2) * 2 + half;
}

/// `Count` neighbouring elements in as few stores as their alignment allows, where they are
/// inside.
template <typename Type, int Count>
CONVT3D_DEVICE void store_piece(typename Type::Storage* to, const float (&value)[Count],
                                bool inside = true) {
  constexpr int bytes = Count * int(sizeof(typename Type::Storage));
  if constexpr (Type::channels_per_word == 1) {
    if constexpr (bytes % 16 == 0) {
#pragma unroll
      for (int i = 0; i < Count; i += 4)
        if (inside)
          store_streaming(reinterpret_cast<float4*>(to + i),
                          make_float4(value[i], value[i + 1], value[i + 2], value[i + 3]));
    } else if constexpr (bytes % 8 == 0) {
#pragma unroll
      for (int i = 0; i < Count; i += 2)
        if (inside) store_two<Type>(to + i, value[i], value[i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < Count; ++i)
        if (inside) store_streaming(to + i, value[i]);
    }
  } else if constexpr (Count % 2 == 0) {
    uint32_t word[Count / 2];
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) word[i] = Type::pack(value[2 * i], value[2 * i + 1]);
    if constexpr (bytes % 16 == 0) {
#pragma unroll
      for (int i = 0; i < Count / 2; i += 4)
        if (inside)
          store_streaming(reinterpret_cast<uint4*>(to + 2 * i),
                          make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]));
    } else if constexpr (bytes % 8 == 0) {
#pragma unroll
      for (int i = 0; i < Count / 2; i += 2)
        if (inside)
          store_streaming(reinterpret_cast<uint2*>(to + 2 * i), make_uint2(word[i], word[i + 1]));
    } else {
#pragma unroll
      for (int i = 0; i < Count / 2; ++i)
        if (inside) store_streaming(reinterpret_cast<uint32_t*>(to + 2 * i), word[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Count; ++i)
      if (inside) store_streaming(to + i, Type::store(value[i]));
  }
}

template <typename Config>
struct PatchLaneStore {
  using Type = typename Config::Target;
  using Storage = typename Type::Storage;
  using Sums = float[Config::fragments_m][Config::fragments_n][4];
  static constexpr bool partial = Config::splits > 1;
  static constexpr int64_t own_channels = int64_t(Config::groups) * Config::target_channels;
  static constexpr int64_t all_channels = partial ? own_channels : tensor_channels(own_channels);
  /// Columns of a lane in a group of interleaved fragments, and how many make one piece.
  static constexpr int lane_columns = 2 * Config::interleave;
  static constexpr int piece_columns =
      Config::target_channels_last
          ? (Config::target_channels % lane_columns == 0 ? lane_columns
             : Config::target_channels % 2 == 0          ? 2
                                                         : 1)
          : Config::target_width;
  static constexpr int pieces = lane_columns / piece_columns;

  /// Columns from one group of fragments to the next, and whether these are whole boxes of slots,
  /// so that only the channel changes.
  static constexpr int group_columns = 8 * Config::interleave;
  static constexpr bool regular =
      !Config::target_channels_last && group_columns % (Config::forward ? Config::slots : 1) == 0;
  static constexpr int group_channels = group_columns / (Config::forward ? Config::slots : 1);

  const PatchArguments<Config>& arguments;
  const PatchWork<Config>& work;
  int first_column, warp_cell, lane;

  CONVT3D_DEVICE PatchLaneStore(const PatchArguments<Config>& arguments_, const PatchWork<Config>& work_,
                                int warp_m, int warp_n, int lane_)
      : arguments(arguments_), work(work_), lane(lane_) {
    first_column = work.column + warp_n * 8 * Config::fragments_n + lane_columns * (lane % 4);
    warp_cell = 16 * Config::fragments_m * warp_m;
  }

  /// The bias of a lane's columns in the order of its sums.
  using Bias = uint32_t[2 * Config::fragments_n];
  /// Sums begin at the bias.
  CONVT3D_DEVICE void begin(Sums& sum) const {
    Bias bias = {};
    if constexpr (Config::bias) {
#pragma unroll
      for (int n = 0; n < Config::fragments_n / Config::interleave; ++n)
#pragma unroll
        for (int i = 0; i < lane_columns; ++i) {
          int channel = column_at(n, i).channel;
          if (Config::columns % Config::column_tile != 0)
            channel = min(channel, Config::target_channels - 1);
          bias[n * lane_columns + i] = bits_of(Config::Type::load(
              __ldg(arguments.bias + work.group * Config::target_channels + channel)));
        }
    }
    begin_at(sum, bias);
  }

  /// The bias of the CTA's columns, as shared memory keeps it; a barrier follows.
  CONVT3D_DEVICE void keep_bias(uint32_t place, int first, int step) const {
    for (int i = first; i < Config::column_tile; i += step) {
      const int channel = decode(work.column + i).channel;
      store_shared(place + 4 * i,
                   channel < Config::target_channels && work.column + i < Config::columns
                       ? Config::Type::load(__ldg(arguments.bias +
                                                  work.group * Config::target_channels + channel))
                       : 0.f);
    }
  }
  /// The bias that `keep_bias` has put there.
  CONVT3D_DEVICE void load_kept(Bias& bias, uint32_t place) const {
#pragma unroll
    for (int i = 0; i < 2 * Config::fragments_n; ++i) bias[i] = 0;
    if constexpr (!Config::bias) return;
    if constexpr (Config::exchanged) {
      const int first = first_column - work.column - (lane_columns - 2) * (lane % 4);
#pragma unroll
      for (int n = 0; n < Config::fragments_n; ++n) {
        uint32_t word[2];
        load_words<2>(place + 4 * (first + 8 * n), word);
        bias[2 * n] = word[0], bias[2 * n + 1] = word[1];
      }
    } else {
#pragma unroll
      for (int n = 0; n < Config::fragments_n / Config::interleave; ++n) {
        uint32_t word[lane_columns];
        load_words<lane_columns>(place + 4 * (first_column - work.column + n * group_columns), word);
#pragma unroll
        for (int i = 0; i < lane_columns; ++i) bias[n * lane_columns + i] = word[i];
      }
    }
  }
  /// Sums begin at it.
  CONVT3D_DEVICE static void begin_at(Sums& sum, const Bias& bias) {
#pragma unroll
    for (int n = 0; n < Config::fragments_n / Config::interleave; ++n)
#pragma unroll
      for (int i = 0; i < lane_columns; ++i)
#pragma unroll
        for (int m = 0; m < Config::fragments_m; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if constexpr (Config::exchanged)
              sum[m][n * Config::interleave + i / 2][2 * half + i % 2] =
                  float_of(bias[n * lane_columns + i]);
            else
              sum[m][n * Config::interleave + i % Config::interleave]
                 [2 * half + i / Config::interleave] = float_of(bias[n * lane_columns + i]);
          }
  }
  CONVT3D_DEVICE void begin_kept(Sums& sum, uint32_t place) const {
    Bias bias;
    load_kept(bias, place);
    begin_at(sum, bias);
  }

  CONVT3D_DEVICE void operator()(const PatchTile<Config>& tile, const Sums& sum) const {
    if (Config::target_channels_last || Config::run == 1 || arguments.size2 % Config::run == 0)
      store<Config::target_channels_last ? 1 : Config::run>(tile, sum);
    else
      store<1>(tile, sum);
  }

 private:
  /// Four fragments of a row, two columns each, for eight columns of one of them: lanes exchange
  /// words.
  CONVT3D_DEVICE static uint4 exchange_words(const float (&sum)[4][4], int half) {
    const int t = threadIdx.x % 4;
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = Type::pack(sum[i][2 * half], sum[i][2 * half + 1]);
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & bit) continue;
        const bool upper = t & bit;
        const uint32_t other =
            __shfl_xor_sync(0xffffffffu, upper ? word[i] : word[i | bit], bit);
        (upper ? word[i] : word[i | bit]) = other;
      }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
  /// A column's channel and where its slot lies, from the first element of a cell.
  struct Column {
    int channel, slot;
  };
  CONVT3D_DEVICE Column decode(int column) const {
    if constexpr (!Config::forward) return Column{column, 0};
    const int channel = Config::slots_first ? column % Config::target_channels
                                            : column / Config::slots;
    const int slot =
        Config::slots_first ? column / Config::target_channels : column % Config::slots;
    return Column{channel, arguments.slot_offset(slot / (Config::stride2 * Config::stride1),
                                                 slot / Config::stride2 % Config::stride1) +
                               slot % Config::stride2};
  }
  /// Column i of this lane in a group of fragments.
  CONVT3D_DEVICE Column column_at(int group, int i) const {
    if constexpr (regular) {
      const Column first = decode(first_column + i);
      return Column{first.channel + group * group_channels, first.slot};
    } else {
      return decode(first_column + group * group_columns + i);
    }
  }

  /// Stores pieces of `run` neighbouring cells, whole and aligned: where W is not a multiple of
  /// the run, one cell at a time. (Outputs begin at 16-byte boundaries.)
  template <int run>
  CONVT3D_DEVICE void store(const PatchTile<Config>& tile, const Sums& sum) const {
    constexpr int runs = 2 * Config::fragments_m / run;
    // Without this the compiler works out the offsets of all columns before the first tile, and
    // spills them where accumulators take most registers.
    const uint32_t nothing = Config::offsets_by_tile ? uint32_t(tile.sample) >> 31 : 0;
    const uint32_t volume =
        uint32_t(arguments.cells()) * (Config::forward ? Config::slots : 1) + nothing;
    Storage* base = arguments.target;
    // Partial sums of all samples follow one another, split by split.
    if constexpr (partial)
      base += work.split * (arguments.tiles / arguments.tiles_per_sample * all_channels * volume);
    if constexpr (Config::target_channels_last)
      base += tile.sample * volume * all_channels + work.group * Config::target_channels;
    else
      base += (tile.sample * all_channels + int64_t(work.group) * Config::target_channels) * volume;
    // Bytes, so that an address is one sum.
    char* start[runs];
    bool inside[runs];
#pragma unroll
    for (int r = 0; r < runs; ++r) {
      const uint32_t cell =
          tile.cell + warp_cell + linear_cell<Config>(r * run / 2, r * run % 2, lane / 4);
      inside[r] = cell < uint32_t(arguments.cells());
      const uint32_t position = Config::forward ? arguments.cell_start(cell) : cell;
      start[r] = reinterpret_cast<char*>(
          base + (Config::target_channels_last ? position * all_channels : position));
    }
    // From one group of fragments to the next an address grows by as much.
    constexpr bool steps = regular && pieces == 1;
    const int64_t step = int64_t(int(sizeof(Storage)) * group_channels) * volume;
    if constexpr (steps) {
      const Column at = column_at(0, 0);
#pragma unroll
      for (int r = 0; r < runs; ++r)
        start[r] += int(sizeof(Storage)) * (int64_t(at.channel) * volume + at.slot);
    }
#pragma unroll
    for (int n = 0; n < Config::fragments_n / Config::interleave; ++n)
#pragma unroll
      for (int piece = 0; piece < pieces; ++piece) {
        const int column = first_column + group_columns * n + piece * piece_columns;
        const bool whole = Config::columns % Config::column_tile == 0 || column < Config::columns;
        // Lanes that exchange words, and addresses that grow, stay together.
        if (!Config::exchanged && !steps && !whole) continue;
        int64_t offset = 0;
        if constexpr (!steps) {
          const Column at = column_at(n, piece * piece_columns);
          offset = int(sizeof(Storage)) * (Config::target_channels_last
                                               ? at.slot * all_channels + at.channel
                                               : int64_t(at.channel) * volume + at.slot);
        }
        if constexpr (Config::exchanged) {
#pragma unroll
          for (int r = 0; r < runs; ++r) {
            const uint4 words = exchange_words(
                reinterpret_cast<const float(&)[4][4]>(sum[r / 2][4 * n]), r % 2);
            if (inside[r] && whole)
              store_streaming(reinterpret_cast<uint4*>(start[r] + offset), words);
          }
        } else {
#pragma unroll
          for (int r = 0; r < runs; ++r) {
            float value[run * piece_columns];
#pragma unroll
            for (int i = 0; i < run * piece_columns; ++i) {
              const int row = r * run + i / piece_columns;
              const int in_lane = piece * piece_columns + i % piece_columns;
              value[i] = sum[row / 2][n * Config::interleave + in_lane % Config::interleave]
                            [2 * (row % 2) + in_lane / Config::interleave];
            }
            store_piece<Type>(reinterpret_cast<Storage*>(start[r] + offset), value,
                              inside[r] && (!steps || whole));
            if constexpr (steps) start[r] += step;
          }
        }
      }
  }
};

}  // namespace convt3d
