// Where the cells of a kernel == stride product lie, and which of them and of the columns a CTA
// owns.
#pragma once
#include "patch/product.cuh"

namespace convt3d {

/// `Words` neighbouring words of shared memory, aligned to their size where it is a power of two.
template <int Words>
CONVT3D_DEVICE void load_words(uint32_t address, uint32_t* word) {
  if constexpr (Words % 4 == 0) {
#pragma unroll
    for (int i = 0; i < Words; i += 4)
      load_shared(address + 4 * i, word[i], word[i + 1], word[i + 2], word[i + 3]);
  } else if constexpr (Words % 2 == 0) {
#pragma unroll
    for (int i = 0; i < Words; i += 2) load_shared(address + 4 * i, word[i], word[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < Words; ++i) word[i] = load_shared(address + 4 * i);
  }
}

template <typename Config>
struct PatchArguments {
  using Storage = typename Config::Storage;
  const Storage* source;
  const Storage* weight;
  const Storage* bias;
  typename Config::Target::Storage* target;
  int size0, size1, size2;  // of the tensor without slots
  int64_t stride_in, stride_out, stride_d, stride_h, stride_w;
  int tiles_per_sample, tiles, workers;
  CONVT3D_FUSION_MEMBER

  CONVT3D_DEVICE int cells() const { return size0 * size1 * size2; }
  /// The element of the tensor that has the slots at row (d, h) of cells, counted linearly, slots
  /// at 0, W at 0.
  CONVT3D_DEVICE uint32_t row_start(uint32_t row) const {
    const uint32_t pitch = size2 * Config::stride2;
    if constexpr (Config::stride0 == 1) return row * Config::stride1 * pitch;
    const uint32_t d = row / uint32_t(size1);
    return (d * (Config::stride0 - 1) * size1 + row) * Config::stride1 * pitch;
  }
  CONVT3D_DEVICE int slot_offset(int slot0, int slot1) const {
    return (slot0 * size1 * Config::stride1 + slot1) * size2 * Config::stride2;
  }
  /// The same element of a cell.
  CONVT3D_DEVICE uint32_t cell_start(uint32_t cell) const {
    const uint32_t row = cell / uint32_t(size2);
    return row_start(row) + (cell - row * size2) * Config::stride2;
  }

  /// Whether the weight lies in memory as the matrix (C_in, C_out * slots), or (C_in, slots *
  /// C_out) where slots come first. Strides of axes with one slot say nothing.
  CONVT3D_DEVICE bool weights_in_order() const {
    constexpr int per_slot = Config::slots_first ? Config::slot_channels : 1;
    constexpr int per_channel = Config::slots_first ? 1 : Config::slots;
    return (Config::stride2 == 1 || stride_w == per_slot) &&
           (Config::stride1 == 1 || stride_h == per_slot * Config::stride2) &&
           (Config::stride0 == 1 || stride_d == per_slot * Config::stride2 * Config::stride1) &&
           stride_out == per_channel && stride_in == Config::slot_channels * Config::slots;
  }
  /// Where an element of that matrix lies in any case.
  CONVT3D_DEVICE int64_t weight_at(int64_t row, int column) const {
    const int slot = Config::slots_first ? column / Config::slot_channels : column % Config::slots;
    const int out = Config::slots_first ? column % Config::slot_channels : column / Config::slots;
    return row * stride_in + out * stride_out + slot % Config::stride2 * stride_w +
           slot / Config::stride2 % Config::stride1 * stride_h +
           slot / (Config::stride2 * Config::stride1) * stride_d;
  }
};

/// The columns of a CTA and the tiles of cells that it walks over: worker, worker + workers, ...
template <typename Config>
struct PatchWork {
  int group, column, worker;
  int tiles, workers;
  int split, first_chunk, chunks;

  CONVT3D_DEVICE explicit PatchWork(const PatchArguments<Config>& arguments) {
    int index = blockIdx.x;
    column = index % Config::column_tiles * Config::column_tile;
    index /= Config::column_tiles;
    group = index % Config::groups;
    index /= Config::groups;
    split = index % Config::splits;
    worker = index / Config::splits;
    first_chunk = split * Config::split_chunks;
    chunks = min(Config::split_chunks, Config::chunks - first_chunk);
    tiles = arguments.tiles;
    workers = arguments.workers;
  }
  /// Tiles of the CTA.
  CONVT3D_DEVICE int count() const { return (tiles - worker + workers - 1) / workers; }
};

template <typename Config>
struct PatchTile {
  int sample, cell;
  CONVT3D_DEVICE PatchTile(const PatchArguments<Config>& arguments, int tile) {
    sample = tile / arguments.tiles_per_sample;
    cell = (tile - sample * arguments.tiles_per_sample) * Config::cells;
  }
};

}  // namespace convt3d
