// How cells of the source and weights reach shared memory in the kernel == stride product.
#pragma once
#include "flat_config.cuh"

namespace convt3d {

template <typename Config>
struct FlatArguments {
  using Storage = typename Config::Storage;
  const Storage* source;
  const Storage* weight;
  const Storage* bias;
  typename Config::Target::Storage* target;
  int size0, size1, size2;  // of the tensor without slots
  int64_t stride_in, stride_out, stride_d, stride_h, stride_w;
  int tiles_per_sample, tiles, workers;

  CONVT3D_DEVICE int cells() const { return size0 * size1 * size2; }
  /// Elements of one channel of the tensor that has the slots.
  CONVT3D_DEVICE int64_t slot_volume() const { return int64_t(cells()) * Config::slots; }
  /// Its element at row (d, h) of cells, counted linearly, slots at 0, W at 0.
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
};

/// The columns of a CTA and the tiles of cells that it walks over: worker, worker + workers, ...
template <typename Config>
struct FlatWork {
  int group, column, worker, count;
  int split, first_chunk, chunks;

  CONVT3D_DEVICE explicit FlatWork(const FlatArguments<Config>& arguments) {
    int index = blockIdx.x;
    column = index % Config::column_tiles * Config::column_tile;
    index /= Config::column_tiles;
    group = index % Config::groups;
    index /= Config::groups;
    split = index % Config::splits;
    worker = index / Config::splits;
    first_chunk = split * Config::split_chunks;
    chunks = min(Config::split_chunks, Config::chunks - first_chunk);
    count = (arguments.tiles - worker + arguments.workers - 1) / arguments.workers;
  }
};

template <typename Config>
struct FlatTile {
  int sample, cell;
  CONVT3D_DEVICE FlatTile(const FlatArguments<Config>& arguments, int tile) {
    sample = tile / arguments.tiles_per_sample;
    cell = (tile - sample * arguments.tiles_per_sample) * Config::cells;
  }
};

template <typename Config>
struct FlatFill {
  using Storage = typename Config::Storage;
  using Type = typename Config::Type;
  static constexpr int bytes = sizeof(Storage);
  static constexpr int widest = 16 / bytes;
  static constexpr int64_t all_channels = int64_t(Config::groups) * Config::source_channels;

  const FlatArguments<Config>& arguments;
  const FlatWork<Config>& work;
  unsigned char* shared;
  uint32_t shared_base;
  int source_vector;  // elements of one copy along a line
  bool weight_vectors;

  CONVT3D_DEVICE FlatFill(const FlatArguments<Config>& arguments_, const FlatWork<Config>& work_,
                          unsigned char* shared_)
      : arguments(arguments_), work(work_), shared(shared_), shared_base(shared_address(shared_)) {
    const uint64_t address = reinterpret_cast<uint64_t>(arguments.source);
    const int row = Config::forward ? arguments.cells() : arguments.size2 * Config::stride2;
    source_vector = row % widest == 0 && address % 16 == 0 ? widest
                    : row % 2 == 0 && address % 4 == 0     ? 2
                                                           : 1;
    const auto& a = arguments;
    const bool in_order =
        Config::slots_first
            ? a.stride_out == 1 && a.stride_w == Config::slot_channels &&
                  a.stride_h == a.stride_w * Config::stride2
                  && a.stride_d == a.stride_h * Config::stride1
            : a.stride_w == 1 && a.stride_h == Config::stride2 &&
                  a.stride_d == Config::stride1 * Config::stride2 && a.stride_out == Config::slots;
    weight_vectors = in_order && a.stride_in % widest == 0 &&
                     Config::slot_channels * Config::slots % widest == 0 &&
                     reinterpret_cast<uint64_t>(arguments.weight) % 16 == 0;
  }

  CONVT3D_DEVICE void operator()(const FlatTile<Config>& tile, int chunk, int buffer) const {
    const int offset = 4 * buffer * Config::source_words;
    if constexpr (Config::source_channels_last)
      channels_last(tile, chunk, offset);
    else if (source_vector == widest)
      contiguous<widest>(tile, chunk, offset);
    else if (Config::per_word == 2 && source_vector == 2)
      contiguous<2>(tile, chunk, offset);
    else
      contiguous<1>(tile, chunk, offset);
  }

  CONVT3D_DEVICE void weights(int chunk, int buffer) const {
    const int offset = 4 * (Config::weight_offset + buffer * Config::weight_words);
    if (weight_vectors)
      weight_rows<widest>(chunk, offset);
    else
      weight_rows<1>(chunk, offset);
  }

 private:
  /// `vector` elements to shared memory, or zeros.
  template <int vector>
  CONVT3D_DEVICE void copy(int to, const Storage* from, bool valid) const {
    if constexpr (vector * bytes >= 4)
      async_copy<vector * bytes>(shared_base + to, valid ? from : arguments.source, valid);
    else
      *reinterpret_cast<Storage*>(shared + to) = valid ? __ldg(from) : Storage(0);
  }

  /// Lines of the tile's cells; neighbouring threads take neighbouring pieces of one line.
  template <int vector>
  CONVT3D_DEVICE void contiguous(const FlatTile<Config>& tile, int chunk, int offset) const {
    constexpr int pieces = Config::cells * Config::width / vector;
    constexpr int at_once = pieces < Config::threads ? pieces : Config::threads;
    constexpr int lines_at_once = Config::threads / at_once;
    const int64_t volume =
        Config::forward ? int64_t(arguments.cells()) : arguments.slot_volume();
    const Storage* base =
        arguments.source +
        (tile.sample * all_channels + int64_t(work.group) * Config::source_channels) * volume;
    const int first_line = threadIdx.x / at_once;
    if (Config::threads % at_once != 0 && first_line >= lines_at_once) return;
    const uint32_t end = uint32_t(arguments.cells()) * Config::width;
    for (int piece = threadIdx.x % at_once; piece < pieces; piece += at_once) {
      const uint32_t element = uint32_t(tile.cell) * Config::width + piece * vector;
      const bool inside = element < end;
      uint32_t from = element;
      if constexpr (!Config::forward) {
        const uint32_t pitch = arguments.size2 * Config::stride2;
        const uint32_t row = element / pitch;
        from = arguments.row_start(row) + (element - row * pitch);
      }
#pragma unroll 4
      for (int line = first_line; line < Config::chunk_lines; line += lines_at_once) {
        const int k = chunk * Config::chunk_lines + line;
        int64_t at = from;
        if constexpr (Config::forward) {
          at += k * volume;
        } else {
          const int channel = k / (Config::stride0 * Config::stride1);
          const int slot = k - channel * (Config::stride0 * Config::stride1);
          at += channel * volume +
                arguments.slot_offset(slot / Config::stride1, slot % Config::stride1);
        }
        copy<vector>(offset + 4 * line * Config::source_pitch + bytes * piece * vector, base + at,
                     inside && k < Config::lines);
      }
    }
  }

  /// Rows of k, one for each cell.
  CONVT3D_DEVICE void channels_last(const FlatTile<Config>& tile, int chunk, int offset) const {
    constexpr int vector = Config::source_channels % widest == 0 ? widest
                           : Config::source_channels % 2 == 0    ? 2
                                                                 : 1;
    constexpr int pieces = Config::chunk_lines / vector;
    const int64_t volume =
        Config::forward ? int64_t(arguments.cells()) : arguments.slot_volume();
    const Storage* base = arguments.source + tile.sample * all_channels * volume +
                          work.group * Config::source_channels;
#pragma unroll 4
    for (int item = threadIdx.x; item < Config::cells * pieces; item += Config::threads) {
      const int row = item / pieces;
      const int within = item % pieces * vector;
      const int k = chunk * Config::chunk_lines + within;
      const int cell = tile.cell + row;
      const bool valid = cell < arguments.cells() && k < Config::depth;
      int64_t at = 0;
      if (valid) {
        if constexpr (Config::forward) {
          at = cell * all_channels + k;
        } else {
          const int slot = k / Config::source_channels;
          const uint32_t position =
              arguments.cell_start(cell) + slot % Config::stride2 +
              arguments.slot_offset(slot / (Config::stride2 * Config::stride1),
                                    slot / Config::stride2 % Config::stride1);
          at = position * all_channels + (k - slot * Config::source_channels);
        }
      }
      copy<vector>(offset + 4 * row * Config::source_pitch + bytes * within, base + at, valid);
    }
  }

  /// Rows of the weight matrix (C_in, C_out * slots) as they lie in memory.
  template <int vector>
  CONVT3D_DEVICE void weight_rows(int chunk, int offset) const {
    constexpr int pieces = Config::weight_row_elements / vector;
    const int first_row = Config::forward ? chunk * Config::chunk_depth : work.column;
    const int first = Config::forward ? work.column : chunk * Config::chunk_depth;
    constexpr int rows = Config::forward ? Config::depth : Config::columns;
    constexpr int elements = Config::slot_channels * Config::slots;
    const Storage* base = arguments.weight + int64_t(work.group) * rows * arguments.stride_in;
#pragma unroll 4
    for (int item = threadIdx.x; item < Config::weight_rows * pieces; item += Config::threads) {
      const int row = item / pieces;
      const int within = item % pieces * vector;
      const bool valid = first_row + row < rows && first + within < elements;
      int64_t at = (first_row + row) * arguments.stride_in;
      if constexpr (vector > 1) {
        at += first + within;
      } else {
        const int j = first + within;
        const int slot = Config::slots_first ? j / Config::slot_channels : j % Config::slots;
        const int out = Config::slots_first ? j % Config::slot_channels : j / Config::slots;
        at += out * arguments.stride_out + slot % Config::stride2 * arguments.stride_w +
              slot / Config::stride2 % Config::stride1 * arguments.stride_h +
              slot / (Config::stride2 * Config::stride1) * arguments.stride_d;
      }
      copy<vector>(offset + 4 * row * Config::weight_pitch + bytes * within, base + at, valid);
    }
  }
};

}  // namespace convt3d
