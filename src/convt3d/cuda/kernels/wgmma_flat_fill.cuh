// How cells and weights reach shared memory in the kernel == stride product on warpgroup products:
// cells by TMA, which rounds them to TF32; weights of the gradient, which have k contiguous, the same
// way; those of the forward pass through the registers of a few warps, which turn them, because a
// product wants TF32 columns with k contiguous and memory has them the other way.
#pragma once
#include "flat_work.cuh"
#include "wgmma_flat_config.cuh"

namespace convt3d {

/// One warp: the source boxes of all tiles for one consumer, a lane each.
template <typename Config>
CONVT3D_DEVICE void fill_cells(const FlatArguments<Config>& arguments,
                               const FlatWork<Config>& work, const TensorMap& map, uint32_t base,
                               Ring<Config::source_stages> ring, int consumer) {
  const int box = threadIdx.x % 32;
#pragma unroll 1
  for (int tile = work.worker; tile < arguments.tiles; tile += arguments.workers) {
    const FlatTile<Config> at(arguments, tile);
    const int cell = at.cell + consumer * Config::group_cells + box * Config::box_cells;
    // The gradient's boxes are parts of rows of W or, folded, of planes.
    const int row = Config::forward || Config::fold ? 0 : cell / arguments.size2;
    const int d = Config::forward ? 0
                  : Config::fold  ? cell / (arguments.size1 * arguments.size2)
                                  : row / arguments.size1;
    const int c0 = Config::fold ? (cell - d * arguments.size1 * arguments.size2) *
                                      (Config::width * Config::folded)
                                : (cell - row * arguments.size2) * Config::width;
    const int c1 = Config::fold ? 0 : (row - d * arguments.size1) * Config::slots1;
    const int c2 = d * Config::stride0;
#pragma unroll 1
    for (int chunk = 0; chunk < work.chunks; ++chunk) {
      const int line = (work.first_chunk + chunk) * Config::chunk_lines;
      const int slot = line % Config::line_slots, channel = line / Config::line_slots;
      ring.wait_empty();
      if (box == 0) mbarrier_expect(ring.full(), Config::source_stage_bytes);
      const uint32_t to = base + ring.stage * Config::source_stage_bytes + box * Config::box_bytes;
      if (box < Config::boxes) {
        if constexpr (Config::last)
          tma_load_4d(to, map, channel, work.group, cell, at.sample, ring.full());
        else if constexpr (Config::forward)
          tma_load_4d(to, map, c0, channel, work.group, at.sample, ring.full());
        else
          tma_load_5d(to, map, c0, c1 + slot % Config::slots1, c2 + slot / Config::slots1,
                      work.group * Config::source_channels + channel, at.sample, ring.full());
      }
      ring.advance();
    }
  }
}

/// What the lanes of a warp have stored is there, for products too.
CONVT3D_DEVICE void arrive_stored(uint32_t barrier, int lane) {
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) mbarrier_arrive(barrier);
}

/// Where a 16-byte piece of a product's row of weights lies within a stage.
CONVT3D_DEVICE uint32_t weight_place(int row, int piece) {
  return row * 128 + (piece ^ row % 8) * 16;
}

/// Units of the forward pass: a lane takes `vector` rows of k by `vector` columns at a time.
template <typename Config>
struct WeightTurner {
  using Storage = typename Config::Storage;
  using Type = typename Config::Type;
  static constexpr int vector = Config::vector;
  static constexpr int units = Config::chunk_units;
  static constexpr int halves = 8 / Config::unit_vectors;
  using Words = uint32_t[vector][4];

  const FlatArguments<Config>& arguments;
  const FlatWork<Config>& work;
  unsigned char* stages;
  int lane;

  /// Whether the weight can be read in vectors.
  CONVT3D_DEVICE bool vectors() const {
    return arguments.weights_in_order() && Config::columns % vector == 0 &&
           reinterpret_cast<uint64_t>(arguments.weight) % 16 == 0;
  }

  /// The channel of element `i` of the 16-byte piece `piece` of a chunk's row. TF32 steps take even
  /// channels in their first half, then odd ones: source fragments are free of conflicts so.
  CONVT3D_DEVICE static int channel_of(int piece, int i) {
    return Config::per_word == 1 && !Config::last ? piece / 2 * 8 + 2 * i + piece % 2
                                                  : vector * piece + i;
  }
  /// The row of a product that a column is, counted from the CTA's first: fragments interleave.
  CONVT3D_DEVICE static int row_of(int column) {
    constexpr int group = 8 * Config::interleave;
    const int within = column % group;
    return column - within + within % Config::interleave * 8 + within / Config::interleave;
  }
  CONVT3D_DEVICE int piece_of(int unit) const {
    return unit % halves * Config::unit_vectors + lane % Config::unit_vectors;
  }
  CONVT3D_DEVICE int column_of(int unit) const {
    return unit / halves * 32 + lane / Config::unit_vectors * vector;
  }

  CONVT3D_DEVICE void load(int index, Words& square) const {
    const int unit = index % units, chunk = index / units % Config::chunks;
    const int column = work.column + column_of(unit);
    const Storage* from = arguments.weight + column;
#pragma unroll
    for (int i = 0; i < vector; ++i) {
      const int channel = chunk * Config::chunk_lines + channel_of(piece_of(unit), i);
      uint4 v = make_uint4(0, 0, 0, 0);
      if (channel < Config::depth && column < Config::columns)
        v = __ldg(reinterpret_cast<const uint4*>(
            from + (int64_t(work.group) * Config::depth + channel) * Config::columns));
      square[i][0] = v.x, square[i][1] = v.y, square[i][2] = v.z, square[i][3] = v.w;
    }
  }
  CONVT3D_DEVICE void store(int index, uint32_t base, const Words& square) const {
    const int unit = index % units;
    const int column = column_of(unit);
#pragma unroll
    for (int i = 0; i < vector; ++i) {
      if (Config::column_tile % 32 != 0 && column + i >= Config::column_tile) continue;
      uint32_t word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (Config::per_word == 1)
          word[j] = round_tf32_operand(square[j][i]);
        else
          word[j] = permute_bytes(square[2 * j][i / 2], square[2 * j + 1][i / 2],
                                  i % 2 ? 0x7632 : 0x5410);
      }
      store_shared(base + weight_place(row_of(column + i), piece_of(unit)), word[0], word[1], word[2],
                   word[3]);
    }
  }
  /// A unit of weights in any order, one column at a time.
  CONVT3D_DEVICE void copy_elements(int index, uint32_t offset) const {
    const int unit = index % units, chunk = index / units % Config::chunks;
#pragma unroll 1
    for (int i = 0; i < vector; ++i) {
      const int within = column_of(unit) + i;
      if (within >= Config::column_tile) continue;
      const int column = work.column + within;
      Storage value[vector];
#pragma unroll
      for (int j = 0; j < vector; ++j) {
        const int channel = chunk * Config::chunk_lines + channel_of(piece_of(unit), j);
        value[j] = Storage(0);
        if (channel < Config::depth && column < Config::columns)
          value[j] = __ldg(arguments.weight + arguments.weight_at(
                               int64_t(work.group) * Config::depth + channel, column));
      }
      Storage* to = reinterpret_cast<Storage*>(stages + offset +
                                               weight_place(row_of(within), piece_of(unit)));
#pragma unroll
      for (int j = 0; j < vector; ++j) {
        if constexpr (Config::per_word == 1)
          to[j] = float_of(round_tf32_operand(bits_of(value[j])));
        else
          to[j] = value[j];
      }
    }
  }
};

/// One lane: the weights of the gradient as they lie in memory, rows of `columns` with k contiguous.
template <typename Config>
CONVT3D_DEVICE void load_weights(const FlatWork<Config>& work, const TensorMap& map, uint32_t base,
                                 Ring<Config::weight_stages> ring) {
  const int row = work.group * Config::columns + work.column;
  const int tiles = Config::keep_weights ? 1 : work.count;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile)
#pragma unroll 1
    for (int chunk = 0; chunk < work.chunks; ++chunk) {
      ring.wait_empty();
      mbarrier_expect(ring.full(), Config::weight_stage_bytes);
#pragma unroll 1
      for (int pass = 0; pass < Config::passes; ++pass)
        tma_load_2d(base + ring.stage * Config::weight_stage_bytes +
                        pass * Config::product_columns * 128,
                    map, (work.first_chunk + chunk) * (128 / Config::bytes),
                    row + pass * Config::product_columns, ring.full());
      ring.advance();
    }
}

/// A warp's share of the same where they lie in another order: a lane copies a step of a column.
template <typename Config>
CONVT3D_DEVICE void copy_weights(const FlatArguments<Config>& arguments,
                                 const FlatWork<Config>& work, unsigned char* stages,
                                 Ring<Config::weight_stages> ring, int first, int step) {
  using Storage = typename Config::Storage;
  constexpr int units = Config::chunk_units;
  const int lane = threadIdx.x % 32;
  const int end = units * work.chunks * (Config::keep_weights ? 1 : work.count);
  int chunk = 0;  // of all tiles
#pragma unroll 1
  for (int index = first; index < end; index += step) {
    for (; chunk < index / units; ++chunk) ring.advance();
    ring.wait_empty();
    const int row = index % units * 8 + lane % 8, column = work.column + row;
    const int k = (work.first_chunk + chunk % work.chunks) * (128 / Config::bytes);
#pragma unroll 1
    for (int piece = lane / 8 * 2; piece < lane / 8 * 2 + 2; ++piece) {
      Storage* to = reinterpret_cast<Storage*>(
          stages + ring.stage * Config::weight_stage_bytes + weight_place(row, piece));
#pragma unroll
      for (int j = 0; j < Config::vector; ++j) {
        const int at = k + piece * Config::vector + j;
        Storage value = Storage(0);
        if (at < Config::depth && column < Config::columns)
          value = __ldg(arguments.weight +
                        arguments.weight_at(int64_t(work.group) * Config::columns + column, at));
        if constexpr (Config::per_word == 1)
          to[j] = float_of(round_tf32_operand(bits_of(value)));
        else
          to[j] = value;
      }
    }
    arrive_stored(ring.full(), lane);
  }
}

/// A warp's share of the weights: units `first`, `first` + `step`, ... of all chunks, in order. Stores
/// units once their stage is free, while the next ones are on their way.
template <typename Config, int window>
CONVT3D_DEVICE void fill_weights(const WeightTurner<Config>& by, Ring<Config::weight_stages> ring,
                                 int first, int step) {
  constexpr int units = Config::chunk_units;
  const bool vectors = by.vectors();
  const int end = units * Config::chunks * (Config::keep_weights ? 1 : by.work.count);
  const uint32_t base = shared_address(by.stages);
  typename WeightTurner<Config>::Words words[window];
  if (vectors) {
#pragma unroll
    for (int i = 0; i < window; ++i)
      if (first + i * step < end) by.load(first + i * step, words[i]);
  }
  int chunk = 0;  // of all tiles
#pragma unroll 1
  for (int index = first; index < end;) {
#pragma unroll
    for (int i = 0; i < window; ++i, index += step) {
      if (index >= end) break;
      for (; chunk < index / units; ++chunk) ring.advance();
      ring.wait_empty();
      const uint32_t offset = ring.stage * Config::weight_stage_bytes;
      if (vectors) {
        by.store(index, base + offset, words[i]);
        const int next = index + window * step;
        if (next < end) by.load(next, words[i]);
      } else {
        by.copy_elements(index, offset);
      }
      arrive_stored(ring.full(), by.lane);
    }
  }
}

}  // namespace convt3d
