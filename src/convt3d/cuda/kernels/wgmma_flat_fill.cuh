// How cells and weights reach shared memory in the kernel == stride product on warpgroup products:
// cells by TMA, which rounds them to TF32; weights through the registers of a few warps, which turn
// them, because a product wants TF32 columns with k contiguous and memory has them the other way.
#pragma once
#include "flat_work.cuh"
#include "wgmma_flat_config.cuh"

namespace convt3d {

/// One lane: the source boxes of all tiles for one consumer.
template <typename Config>
CONVT3D_DEVICE void fill_cells(const FlatArguments<Config>& arguments,
                               const FlatWork<Config>& work, const TensorMap& map, uint32_t base,
                               Ring<Config::source_stages> ring, int consumer) {
#pragma unroll 1
  for (int tile = work.worker; tile < arguments.tiles; tile += arguments.workers) {
    const FlatTile<Config> at(arguments, tile);
    const int cell = at.cell + consumer * Config::group_cells;
#pragma unroll 1
    for (int chunk = 0; chunk < Config::chunks; ++chunk) {
      ring.wait_empty();
      mbarrier_expect(ring.full(), Config::source_stage_bytes);
#pragma unroll
      for (int box = 0; box < Config::boxes; ++box)
        tma_load_4d(base + ring.stage * Config::source_stage_bytes + box * Config::box_bytes, map,
                    cell + box * Config::box_cells, chunk * Config::chunk_channels, work.group,
                    at.sample, ring.full());
      ring.advance();
    }
  }
}

/// A warp's share of the weights: units `first`, `first` + `step`, ... of all chunks, in order. A
/// lane takes `vector` rows of k by `vector` columns of a unit at a time.
template <typename Config>
struct WeightTurner {
  using Storage = typename Config::Storage;
  using Type = typename Config::Type;
  static constexpr int vector = Config::vector;
  static constexpr int units = Config::chunk_units;
  static constexpr int halves = 8 / Config::unit_vectors;
  using Square = uint32_t[vector][4];

  const FlatArguments<Config>& arguments;
  const FlatWork<Config>& work;
  unsigned char* stages;
  Ring<Config::weight_stages> ring;
  int lane;

  /// The channel of element `i` of the 16-byte piece `piece` of a chunk's row. TF32 steps take even
  /// channels in their first half, then odd ones: source fragments are free of conflicts so.
  CONVT3D_DEVICE static int channel_of(int piece, int i) {
    return Config::per_word == 1 ? piece / 2 * 8 + 2 * i + piece % 2 : vector * piece + i;
  }
  /// The row of a product that a column is, counted from the CTA's first: fragments interleave.
  CONVT3D_DEVICE static int row_of(int column) {
    constexpr int group = 8 * Config::interleave;
    const int within = column % group;
    return column - within + within % Config::interleave * 8 + within / Config::interleave;
  }
  CONVT3D_DEVICE static uint32_t place(int row, int piece) {
    return row * 128 + (piece ^ row % 8) * 16;
  }
  CONVT3D_DEVICE int piece_of(int unit) const {
    return unit % halves * Config::unit_vectors + lane % Config::unit_vectors;
  }
  CONVT3D_DEVICE int column_of(int unit) const {
    return unit / halves * 32 + lane / Config::unit_vectors * vector;
  }

  CONVT3D_DEVICE void load(int index, Square& square) const {
    const int unit = index % units, chunk = index / units % Config::chunks;
    const int column = work.column + column_of(unit);
    const Storage* from = arguments.weight + column;
#pragma unroll
    for (int i = 0; i < vector; ++i) {
      const int channel = chunk * Config::chunk_channels + channel_of(piece_of(unit), i);
      uint4 v = make_uint4(0, 0, 0, 0);
      if (channel < Config::depth && column < Config::columns)
        v = __ldg(reinterpret_cast<const uint4*>(
            from + (int64_t(work.group) * Config::depth + channel) * Config::columns));
      square[i][0] = v.x, square[i][1] = v.y, square[i][2] = v.z, square[i][3] = v.w;
    }
  }
  CONVT3D_DEVICE void store(int index, uint32_t base, const Square& square) const {
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
      store_shared(base + place(row_of(column + i), piece_of(unit)), word[0], word[1], word[2],
                   word[3]);
    }
  }
  /// A unit of weights in any order, one element at a time.
  CONVT3D_DEVICE void copy_elements(int index, uint32_t offset) const {
    const int unit = index % units, chunk = index / units % Config::chunks;
#pragma unroll 1
    for (int i = 0; i < vector * vector; ++i) {
      const int within = column_of(unit) + i / vector;
      if (within >= Config::column_tile) continue;
      const int column = work.column + within;
      const int channel = chunk * Config::chunk_channels + channel_of(piece_of(unit), i % vector);
      Storage value = Storage(0);
      if (channel < Config::depth && column < Config::columns)
        value = __ldg(arguments.weight +
                      arguments.weight_at(int64_t(work.group) * Config::depth + channel, column));
      if constexpr (Config::per_word == 1)
        value = float_of(round_tf32_operand(bits_of(value)));
      *reinterpret_cast<Storage*>(stages + offset + place(row_of(within), piece_of(unit)) +
                                  i % vector * Config::bytes) = value;
    }
  }

  /// Stores units once their stage is free, while the next ones are on their way.
  CONVT3D_DEVICE void run(int first, int step) {
    const bool vectors = arguments.weights_in_order() && Config::columns % vector == 0 &&
                         reinterpret_cast<uint64_t>(arguments.weight) % 16 == 0;
    const int end = units * Config::chunks * (Config::keep_weights ? 1 : work.count);
    const uint32_t base = shared_address(stages);
    Square square[Config::unit_window];
    if (vectors) {
#pragma unroll
      for (int i = 0; i < Config::unit_window; ++i)
        if (first + i * step < end) load(first + i * step, square[i]);
    }
    int chunk = 0;  // of all tiles
#pragma unroll 1
    for (int index = first; index < end;) {
#pragma unroll
      for (int i = 0; i < Config::unit_window; ++i, index += step) {
        if (index >= end) break;
        for (; chunk < index / units; ++chunk) ring.advance();
        ring.wait_empty();
        const uint32_t offset = ring.stage * Config::weight_stage_bytes;
        if (vectors) {
          store(index, base + offset, square[i]);
          const int next = index + Config::unit_window * step;
          if (next < end) load(next, square[i]);
        } else {
          copy_elements(index, offset);
        }
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(ring.full());
      }
    }
  }
};

}  // namespace convt3d
