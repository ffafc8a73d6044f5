// Where a CTA of the strided kernel works, which units its lanes hold, and how a stage is filled.
#pragma once
#include "ampere/strided/config.cuh"

namespace convt3d {

template <typename Config>
struct StridedArguments {
  Activation<const typename Config::Storage> source;
  Activation<typename Config::Storage> target;
  const uint32_t* weights;
  const typename Config::Storage* bias;
  int tile[3];         // units of a tile along each axis
  int tiles[3];        // tiles along each axis
  int line_rows;       // rows of axis 1 that fragments run through without a break: 1 or tile[1]
  int line_fragments;  // fragments of such a line
  int count;           // tiles of all samples
  int staging_buffers; // 1 or 2
  int units0;           // gradient by input: units along axis 0 that a CTA computes one by one
  CONVT3D_FUSION_MEMBER
};

/// The tile that a running number stands for.
template <typename Config>
struct StridedTile {
  int sample;
  int index[3];

  CONVT3D_DEVICE StridedTile(int sample_, int index0, int index1, int index2)
      : sample(sample_), index{index0, index1, index2} {}
  CONVT3D_DEVICE StridedTile(const StridedArguments<Config>& arguments, int number) {
    const int row = number / arguments.tiles[2];
    index[2] = number - row * arguments.tiles[2];
    const int slice = row / arguments.tiles[1];
    index[1] = row - slice * arguments.tiles[1];
    sample = slice / arguments.tiles[0];
    index[0] = slice - sample * arguments.tiles[0];
  }

  /// Goes on by a number of tiles, given as the tile that it stands for: digits with carries,
  /// since divisions are long chains.
  CONVT3D_DEVICE void advance(const StridedArguments<Config>& arguments, const StridedTile& step) {
    sample += step.sample;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) index[axis] += step.index[axis];
    carry(arguments, index[2], 2, index[1]);
    carry(arguments, index[1], 1, index[0]);
    carry(arguments, index[0], 0, sample);
  }

 private:
  CONVT3D_DEVICE static void carry(const StridedArguments<Config>& arguments, int& digit, int axis,
                                   int& next) {
    if (digit < arguments.tiles[axis]) return;
    digit -= arguments.tiles[axis];
    ++next;
  }
};

template <typename Config>
CONVT3D_DEVICE BoxShape<StridedBox<Config>> strided_shape(const StridedArguments<Config>& a) {
  using Axis0 = typename Config::Axis0;
  using Axis2 = typename Config::Axis2;
  const int slices =
      Config::forward ? (a.tile[0] - 1) * Axis0::unit_source + Axis0::shifts : 1;
  const int width = Config::lead + (a.tile[2] - 1) * Axis2::unit_source + Axis2::shifts;
  return BoxShape<StridedBox<Config>>(
      slices, (a.tile[1] - 1) * Config::Axis1::unit_source + Config::Axis1::shifts,
      round_up(width, Config::source_channels_last ? 1 : Config::pair_source));
}

/// A pair of units of one fragment, relative to the tile; the same in all tiles.
struct UnitPair {
  int unit0, unit1, unit2;
  bool first, second;  // whether each of the two belongs to the tile
};

template <typename Config>
struct StridedUnits {
  int line_pitch;  // units from a row to the next within a line
  int lines_per_slice;
  Divider by_pitch, by_fragments, by_lines;
  const StridedArguments<Config>& arguments;

  CONVT3D_DEVICE StridedUnits(const StridedArguments<Config>& a, int pitch2)
      : line_pitch(a.line_rows == 1
                       ? 16 * a.line_fragments
                       : pitch2 * Config::Axis1::unit_source / Config::Axis2::unit_source),
        lines_per_slice(a.tile[1] / a.line_rows),
        by_pitch(line_pitch),
        by_fragments(a.line_fragments),
        by_lines(lines_per_slice),
        arguments(a) {}

  /// One of the eight pairs of a fragment.
  CONVT3D_DEVICE UnitPair pair(int fragment, int number) const {
    const int line = by_fragments.quotient(fragment);
    const int slice = by_lines.quotient(line);
    const int place = (fragment - line * arguments.line_fragments) * 16 + number * 2;
    const int row = by_pitch.quotient(place);
    UnitPair p;
    p.unit0 = slice;
    p.unit1 = (line - slice * lines_per_slice) * arguments.line_rows + row;
    p.unit2 = place - row * line_pitch;
    p.first = slice < arguments.tile[0] && row < arguments.line_rows && p.unit2 < arguments.tile[2];
    p.second = p.first && p.unit2 + 1 < arguments.tile[2];
    return p;
  }
};

template <typename Config>
struct StridedFill {
  using Storage = typename Config::Storage;
  using Box = StridedBox<Config>;
  using Shared = StridedShared<Config>;

  const StridedArguments<Config>& arguments;
  BoxFill<Box> fill_box;
  uint32_t shared_base;
  int group;
  const uint32_t* packed;

  CONVT3D_DEVICE StridedFill(const StridedArguments<Config>& arguments_, uint32_t shared_base_,
                             int group_, int column_tile)
      : arguments(arguments_),
        fill_box(arguments_.source, strided_shape<Config>(arguments_)),
        shared_base(shared_base_),
        group(group_) {
    packed = arguments.weights + int64_t(group * Config::column_tiles + column_tile) *
                                     Config::chunks * Config::chunk_weight_words;
  }

  CONVT3D_DEVICE void copy_words(const uint32_t* from, uint32_t to, int words) const {
    for (int word = 4 * threadIdx.x; word < words; word += 4 * Config::threads)
      async_copy<16>(to + 4 * word, from + word, true);
  }

  CONVT3D_DEVICE void resident_weights() const {
    if constexpr (Config::resident_weights)
      copy_words(packed, shared_base + 4u * Shared::weights,
                 Config::chunks * Config::chunk_weight_words);
  }

  /// One channel chunk of the source box of a tile whose first slice is `slice0`.
  CONVT3D_DEVICE void source(const StridedTile<Config>& tile, int slice0, int chunk,
                             int buffer) const {
    const Storage* base =
        arguments.source.group_base(tile.sample, group, Config::source_channels, Box::all_channels,
                                    Box::channels_last);
    fill_box(base, chunk * Config::chunk_channels, slice0,
             tile.index[1] * arguments.tile[1] * Config::Axis1::unit_source * Config::step1 +
                 Config::origin1,
             tile.index[2] * arguments.tile[2] * Config::Axis2::unit_source * Config::step2 +
                 Config::origin2 - Config::lead,
             shared_base + 4u * buffer * Shared::stage);
  }

  /// All weights of a chunk, unless they are resident.
  CONVT3D_DEVICE void weights(int chunk, int buffer) const {
    if constexpr (!Config::resident_weights)
      copy_words(packed + int64_t(chunk) * Config::chunk_weight_words,
                 shared_base + 4u * (buffer * Shared::stage + Shared::box),
                 Config::chunk_weight_words);
  }

  /// Those that slices of a residue meet: [step][tap0 of the residue][tap1][tap2].
  CONVT3D_DEVICE void slice_weights(int residue, int chunk, int buffer) const {
    if constexpr (!Config::resident_weights) {
      constexpr int words = Config::Axis1::kernel * Config::row_words;
      uint32_t to = shared_base + 4u * (buffer * Shared::stage + Shared::box);
      for (int step = 0; step < Config::depth; ++step)
        for (int lag = 0; lag < Config::lags; ++lag) {
          const int k0 = Config::slice_tap(residue, lag);
          if (k0 < 0) continue;
          copy_words(packed + int64_t(chunk * Config::depth + step) * Config::step_weight_words +
                         Config::tap_offset(k0, 0, 0),
                     to, words);
          to += 4u * words;
        }
    }
  }
};

/// What a CTA and its lanes keep to: CTAs of an N tile work on one group and its column tile,
/// each on every workers-th tile.
template <typename Config>
struct StridedWork {
  using Box = StridedBox<Config>;
  static constexpr int n_tiles = Config::groups * Config::column_tiles;
  static constexpr int fragments_m = Config::fragments_m;

  int lane, warp;
  int worker, workers;
  int group, column_tile;
  uint32_t shared_base;
  StridedFill<Config> fill;
  UnitPair pairs[fragments_m];  // those whose sums a lane ends with
  uint32_t rows[fragments_m];                       // addresses of the values that it loads

  CONVT3D_DEVICE StridedWork(const StridedArguments<Config>& arguments, const void* shared)
      : lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        worker(blockIdx.x / n_tiles),
        workers(gridDim.x / n_tiles),
        group(blockIdx.x % n_tiles / Config::column_tiles),
        column_tile(blockIdx.x % Config::column_tiles),
        shared_base(shared_address(shared)),
        fill(arguments, shared_base, group, column_tile) {
    const auto& shape = fill.fill_box.shape;
    const StridedUnits<Config> units(arguments, shape.pitch2);
#pragma unroll
    for (int m = 0; m < fragments_m; ++m) {
      const int fragment = warp * fragments_m + m;
      // Loops of one turn, this one and that of StridedStore::stage, keep the order in which the
      // compiler unrolls, and with it the machine code that was measured.
#pragma unroll
      for (int turn = 0; turn < 1; ++turn) pairs[m] = units.pair(fragment, lane / 4);
      // Pairs outside the tile read the first unit and are not stored.
      const UnitPair p = units.pair(fragment, lane / 4);
      const int position = p.first ? p.unit0 * Config::Axis0::unit_source * shape.pitch1 +
                                         p.unit1 * Config::Axis1::unit_source * shape.pitch2 +
                                         p.unit2 * Config::Axis2::unit_source
                                   : 0;
      rows[m] = shared_base + position * Box::position_bytes +
                (Config::source_channels_last ? 4 * Config::halves * (lane % 4)
                                              : 4 * Box::plane_pitch * (lane % 4));
    }
  }

  /// This lane's weights of a chunk that lies in a stage, unless weights are resident.
  CONVT3D_DEVICE uint32_t weights(int chunk, uint32_t stage) const {
    using Shared = StridedShared<Config>;
    return shared_base + 4u * lane * Config::lane_words +
           (Config::resident_weights
                ? 4u * (Shared::weights + chunk * Config::chunk_weight_words)
                : stage + 4u * Shared::box);
  }
};

/// Products of neighbouring taps along W of one sum, chained where the arithmetic adds outside
/// the tensor core: `count` taps in equal parts of at most Math::chain.
template <typename Config>
CONVT3D_CONSTEXPR int chain_length(int count) {
  const int most = Config::Math::chain;
  const int parts = (count + most - 1) / most;
  return (count + parts - 1) / parts;
}

/// sum[s][m][n] += a[i][m] * b[s][i][n] of some slots s, for all i of a chain whose tap exists;
/// `fresh`: the sum was zero. Slots alternate, since each product of a chain waits for the last.
template <typename Math, int slots, int chain, int fragments_m, int fragments_n>
CONVT3D_DEVICE void multiply_chain(float (*sum)[fragments_m][fragments_n][4],
                                   const typename Math::A (&a)[chain][fragments_m],
                                   const typename Math::B (&b)[slots][chain][fragments_n],
                                   const bool (&used)[slots][chain], const bool (&fresh)[slots]) {
  constexpr bool split = Math::words_per_value == 2;
  float part[split ? slots : 1][fragments_m][fragments_n][4] = {};
#pragma unroll
  for (int p = 0; p < (split ? 3 : 1); ++p)
#pragma unroll
    for (int i = 0; i < chain; ++i)
#pragma unroll
      for (int s = 0; s < slots; ++s)
#pragma unroll
        for (int m = 0; m < fragments_m; ++m)
#pragma unroll
          for (int n = 0; n < fragments_n; ++n) {
            if (!used[s][i]) continue;
            if constexpr (split)
              Math::multiply_part(p, part[s][m][n], a[i][m], b[s][i][n]);
            else
              Math::multiply_add(sum[s][m][n], a[i][m], b[s][i][n]);
          }
  if constexpr (split) {
#pragma unroll
    for (int s = 0; s < slots; ++s) {
      bool any = false;
#pragma unroll
      for (int i = 0; i < chain; ++i) any = any || used[s][i];
#pragma unroll
      for (int m = 0; m < fragments_m; ++m)
#pragma unroll
        for (int n = 0; n < fragments_n; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            if (any)
              sum[s][m][n][c] = fresh[s] ? part[s][m][n][c] : sum[s][m][n][c] + part[s][m][n][c];
    }
  }
}

/// The operand of one tap out of a window: both units' values, by word half.
template <typename Config>
CONVT3D_DEVICE void prepare_tap(typename Config::Math::A& a,
                                const uint32_t (&raw)[Config::halves][Config::window], int shift) {
  constexpr int neighbour = Config::Axis2::unit_source;
  const int at = Config::window_offset + shift;
  uint32_t words[2 * Config::halves];
#pragma unroll
  for (int half = 0; half < Config::halves; ++half) {
    words[2 * half] = raw[half][at];
    words[2 * half + 1] = raw[half][at + neighbour];
  }
  // Of neighbouring units, one tap's second value is the next tap's first. A fragment's registers
  // lie side by side, so it is cheaper to prepare a value twice than to move it: rounded
  // differently in ties, it is not the same value to the compiler.
  Config::Math::prepare(a, words, shift / neighbour % 2 ? ties_to_zero : ties_away);
}

/// The window of a fragment: values of this lane's pair of units along W, by word half.
template <typename Config>
CONVT3D_DEVICE void load_window(uint32_t (&raw)[Config::halves][Config::window],
                                uint32_t address) {
  using Box = StridedBox<Config>;
  if constexpr (Config::source_channels_last) {
#pragma unroll
    for (int i = 0; i < Config::window; ++i) {
      if constexpr (Config::halves == 2)
        load_shared(address + i * Box::position_bytes, raw[0][i], raw[1][i]);
      else
        raw[0][i] = load_shared(address + i * Box::position_bytes);
    }
  } else {
#pragma unroll
    for (int half = 0; half < Config::halves; ++half) {
      const uint32_t from = address + 4 * (half * 4 * Box::plane_pitch + Config::window_first);
#pragma unroll
      for (int i = 0; i < Config::window; i += Config::window_vector) {
        if constexpr (Config::window_vector == 4)
          load_shared(from + 4 * i, raw[half][i], raw[half][i + 1], raw[half][i + 2],
                      raw[half][i + 3]);
        else
          load_shared(from + 4 * i, raw[half][i], raw[half][i + 1]);
      }
    }
  }
}

}  // namespace convt3d
