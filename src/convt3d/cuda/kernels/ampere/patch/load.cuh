// How cells of the source and weights reach shared memory in the kernel == stride product.
#pragma once
#include "patch/work.cuh"

namespace convt3d {

/// One thread's share of `Rows` rows of `Pieces` copies each: neighbouring threads take
/// neighbouring pieces of a row.
template <int Threads, int Pieces, int Rows>
struct Share {
  static constexpr int at_once = Pieces < Threads ? Pieces : Threads;
  static constexpr int pieces = div_up(Pieces, at_once);  // of this thread
  static constexpr int row_step = Threads / at_once;
  static constexpr int rows = div_up(Rows, row_step);  // of this thread
  int piece, row;

  CONVT3D_DEVICE Share() : piece(threadIdx.x % at_once), row(threadIdx.x / at_once) {}
  CONVT3D_DEVICE bool takes(int p, int r) const {
    return (Threads % at_once == 0 || row < row_step) &&
           (Pieces % at_once == 0 || piece + p * at_once < Pieces) &&
           (Rows % row_step == 0 || row + r * row_step < Rows);
  }
};

template <typename Config>
struct PatchFill {
  using Storage = typename Config::Storage;
  static constexpr int bytes = sizeof(Storage);
  static constexpr int widest = 16 / bytes;
  static constexpr int64_t all_channels = int64_t(Config::groups) * Config::source_channels;
  static constexpr int slots01 = Config::stride0 * Config::stride1;
  /// Elements of a weight row as it lies in memory.
  static constexpr int row_elements = Config::slot_channels * Config::slots;
  /// Elements of one copy from a channels_last source.
  static constexpr int last_vector = Config::source_channels % widest == 0 ? widest
                                     : Config::source_channels % 2 == 0    ? 2
                                                                           : 1;
  using Lines = Share<Config::threads, Config::cells * Config::width / widest, Config::chunk_lines>;
  using Cells = Share<Config::threads, Config::chunk_lines / last_vector, Config::cells>;
  using Weights =
      Share<Config::threads, Config::weight_row_elements / widest, Config::weight_rows>;
  /// Whether a line's place is that of the thread's first line plus a constant.
  static constexpr bool additive =
      Config::forward ||
      (Config::chunk_lines % slots01 == 0 &&
       (Lines::row_step % slots01 == 0 ||
        (slots01 % Lines::row_step == 0 && (Lines::row_step % Config::stride1 == 0 ||
                                            Config::stride1 % Lines::row_step == 0))));
  static constexpr bool remember_cells = !Config::forward && Cells::rows <= 8;

  const PatchArguments<Config>& arguments;
  const PatchWork<Config>& work;
  unsigned char* shared;
  uint32_t shared_base;
  uint32_t volume;    // of a channel of the source
  int source_vector;  // elements of one copy along a line
  bool weight_vectors;
  Lines lines;
  Cells cells;
  Weights weights_share;
  const Storage* weight_from;
  // Of the tile that is being filled.
  PatchTile<Config> tile;
  const Storage* base;
  const Storage* from[Lines::pieces];
  bool inside[Lines::pieces];
  uint32_t cell_starts[remember_cells ? Cells::rows : 1];

  CONVT3D_DEVICE PatchFill(const PatchArguments<Config>& arguments_, const PatchWork<Config>& work_,
                           unsigned char* shared_)
      : arguments(arguments_),
        work(work_),
        shared(shared_),
        shared_base(shared_address(shared_)),
        tile(arguments_, work_.worker) {
    volume = uint32_t(arguments.cells()) * (Config::forward ? 1 : Config::slots);
    const uint64_t address = reinterpret_cast<uint64_t>(arguments.source);
    const int row = Config::channel_lines ? arguments.cells() : arguments.size2 * Config::stride2;
    source_vector = row % widest == 0 && address % 16 == 0 ? widest
                    : row % 2 == 0 && address % 4 == 0     ? 2
                                                           : 1;
    weight_vectors = arguments.weights_in_order() && row_elements % widest == 0 &&
                     reinterpret_cast<uint64_t>(arguments.weight) % 16 == 0;
    const int64_t first_row =
        int64_t(work.group) * (Config::forward ? Config::depth : Config::columns) +
        (Config::forward ? 0 : work.column) + weights_share.row;
    weight_from = arguments.weight + first_row * row_elements +
                  (Config::forward ? work.column : 0) + weights_share.piece * widest;
    enter(tile);
  }

  /// Go on with this tile.
  CONVT3D_DEVICE void enter(const PatchTile<Config>& tile_) {
    tile = tile_;
    base = arguments.source;
    if constexpr (Config::source_channels_last) {
      base += tile.sample * all_channels * volume + work.group * Config::source_channels;
      if constexpr (remember_cells) {
#pragma unroll
        for (int r = 0; r < Cells::rows; ++r)
          cell_starts[r] = arguments.cell_start(tile.cell + cells.row + r * Cells::row_step);
      }
    } else {
      base += (tile.sample * all_channels + int64_t(work.group) * Config::source_channels) * volume;
#pragma unroll
      for (int p = 0; p < Lines::pieces; ++p) {
        const uint32_t element = uint32_t(tile.cell) * Config::width +
                                 (lines.piece + p * Lines::at_once) * widest;
        inside[p] = element < uint32_t(arguments.cells()) * Config::width;
        from[p] = base + element_start(element);
        if constexpr (additive) from[p] += line_start(lines.row);
      }
    }
  }

  /// One chunk of the tile's source.
  CONVT3D_DEVICE void source(int chunk, int buffer) const {
    const int offset = 4 * buffer * Config::source_words;
    if constexpr (Config::source_channels_last)
      channels_last(chunk, offset);
    else if (source_vector == widest)
      contiguous(chunk, offset);
    else if (Config::per_word == 2 && source_vector == 2)
      narrow<2>(chunk, offset);
    else
      narrow<1>(chunk, offset);
  }

  CONVT3D_DEVICE void weights(int chunk, int buffer) const {
    const int offset = 4 * (Config::weight_offset + buffer * Config::weight_words);
    if (weight_vectors)
      weight_rows(chunk, offset);
    else
      weight_elements(chunk, offset);
  }

 private:
  /// `vector` elements to shared memory, or zeros.
  template <int vector>
  CONVT3D_DEVICE void copy(int to, const Storage* from, bool valid) const {
    if constexpr (vector * bytes >= 4)
      async_copy<vector * bytes>(shared_base + to, from, valid);
    else
      *reinterpret_cast<Storage*>(shared + to) = valid ? __ldg(from) : Storage(0);
  }

  /// Where a line begins, from the first one of the group.
  CONVT3D_DEVICE int64_t line_start(int line) const {
    if constexpr (Config::channel_lines) return int64_t(line) * volume;
    const int channel = line / slots01;
    const int slot = line - channel * slots01;
    return int64_t(channel) * volume +
           arguments.slot_offset(slot / Config::stride1, slot % Config::stride1);
  }
  /// Where an element of the tile's row of cells lies within a line.
  CONVT3D_DEVICE uint32_t element_start(uint32_t element) const {
    if constexpr (Config::channel_lines) return element;
    const uint32_t pitch = arguments.size2 * Config::stride2;
    const uint32_t row = element / pitch;
    return arguments.row_start(row) + (element - row * pitch);
  }

  /// Lines of cells in copies of 16 bytes.
  CONVT3D_DEVICE void contiguous(int chunk, int offset) const {
    const int first_line = chunk * Config::chunk_lines;
    const int64_t chunk_start = additive ? line_start(first_line) : 0;
    const int to = offset + 4 * lines.row * Config::source_pitch + 16 * lines.piece;
#pragma unroll
    for (int p = 0; p < Lines::pieces; ++p)
#pragma unroll
      for (int r = 0; r < Lines::rows; ++r) {
        if (!lines.takes(p, r)) continue;
        const int line = lines.row + r * Lines::row_step;
        const int64_t at = additive ? chunk_start + line_start(r * Lines::row_step)
                                    : line_start(first_line + line);
        copy<widest>(to + 4 * r * Lines::row_step * Config::source_pitch + 16 * p * Lines::at_once,
                     from[p] + at,
                     inside[p] && (Config::lines % Config::chunk_lines == 0 ||
                                   first_line + line < Config::lines));
      }
  }

  /// The same in narrower copies, where rows or the tensor begin anywhere. Several are on their
  /// way together, since a thread waits for those that pass through its registers.
  template <int vector>
  CONVT3D_DEVICE void narrow(int chunk, int offset) const {
    constexpr int pieces = Config::cells * Config::width / vector;
    constexpr int items = pieces * Config::chunk_lines;
    constexpr int together = 8;
    constexpr bool by_registers = vector * bytes < 4;
#pragma unroll 1
    for (int first = threadIdx.x; first < items; first += together * Config::threads) {
      Storage value[together];
#pragma unroll
      for (int i = 0; i < together; ++i) {
        const int item = first + i * Config::threads;
        const int line = item / pieces;
        const int piece = item - line * pieces;
        const uint32_t element = uint32_t(tile.cell) * Config::width + piece * vector;
        const int k = chunk * Config::chunk_lines + line;
        const bool valid = item < items && k < Config::lines &&
                           element < uint32_t(arguments.cells()) * Config::width;
        const Storage* at = base + line_start(k) + element_start(element);
        if constexpr (by_registers)
          value[i] = valid ? __ldg(at) : Storage(0);
        else if (item < items)
          copy<vector>(offset + narrow_place(line, piece * vector), at, valid);
      }
      if constexpr (by_registers) {
#pragma unroll
        for (int i = 0; i < together; ++i) {
          const int item = first + i * Config::threads;
          const int line = item / pieces;
          if (item < items)
            *reinterpret_cast<Storage*>(
                shared + offset + narrow_place(line, item - line * pieces)) = value[i];
        }
      }
    }
  }
  /// Where an element of a line lies within a stage, in bytes.
  CONVT3D_DEVICE static int narrow_place(int line, int element) {
    return 4 * line * Config::source_pitch + bytes * element;
  }

  /// Rows of k, one for each cell.
  CONVT3D_DEVICE void channels_last(int chunk, int offset) const {
    const int k = chunk * Config::chunk_lines + cells.piece * last_vector;
    int64_t at = k;
    if constexpr (!Config::forward) {
      const int slot = k / Config::source_channels;
      const int position = slot % Config::stride2 +
                           arguments.slot_offset(slot / (Config::stride2 * Config::stride1),
                                                 slot / Config::stride2 % Config::stride1);
      at = position * all_channels + (k - slot * Config::source_channels);
    }
    static_assert(Cells::pieces == 1, "a thread takes one piece of a row");
    const bool whole = Config::depth % Config::chunk_lines == 0 || k < Config::depth;
#pragma unroll
    for (int r = 0; r < Cells::rows; ++r) {
      if (!cells.takes(0, r)) continue;
      const int row = cells.row + r * Cells::row_step;
      const uint32_t cell = tile.cell + row;
      const uint32_t start = Config::forward   ? cell
                             : remember_cells ? cell_starts[remember_cells ? r : 0]
                                              : arguments.cell_start(cell);
      copy<last_vector>(offset + 4 * row * Config::source_pitch + bytes * last_vector * cells.piece,
                        base + (start * all_channels + at),
                        whole && cell < uint32_t(arguments.cells()));
    }
  }

  /// Rows of the weight matrix (C_in, C_out * slots), as they lie in memory.
  CONVT3D_DEVICE void weight_rows(int chunk, int offset) const {
    const int first = chunk * Config::chunk_depth;
    const Storage* chunk_from = weight_from + int64_t(first) * (Config::forward ? row_elements : 1);
    const int to = offset + 4 * weights_share.row * Config::weight_pitch + 16 * weights_share.piece;
#pragma unroll
    for (int p = 0; p < Weights::pieces; ++p)
#pragma unroll
      for (int r = 0; r < Weights::rows; ++r) {
        if (!weights_share.takes(p, r)) continue;
        const int row = weights_share.row + r * Weights::row_step;
        const int within = (weights_share.piece + p * Weights::at_once) * widest;
        const int k = first + (Config::forward ? row : within);
        const int column = work.column + (Config::forward ? within : row);
        copy<widest>(to + 4 * r * Weights::row_step * Config::weight_pitch +
                         16 * p * Weights::at_once,
                     chunk_from + (int64_t(r) * Weights::row_step * row_elements +
                                   p * Weights::at_once * widest),
                     (Config::depth % Config::chunk_depth == 0 || k < Config::depth) &&
                         (Config::columns % Config::column_tile == 0 || column < Config::columns));
      }
  }

  /// The same, one element at a time, from weights in any order.
  CONVT3D_DEVICE void weight_elements(int chunk, int offset) const {
    constexpr int rows = Config::forward ? Config::depth : Config::columns;
#pragma unroll 1
    for (int item = threadIdx.x; item < Config::weight_rows * Config::weight_row_elements;
         item += Config::threads) {
      const int row = item / Config::weight_row_elements;
      const int within = item % Config::weight_row_elements;
      const int first = chunk * Config::chunk_depth;
      const int ci = row + (Config::forward ? first : work.column);
      const int j = within + (Config::forward ? work.column : first);
      const int64_t at = arguments.weight_at(int64_t(work.group) * rows + ci, j);
      copy<1>(offset + 4 * row * Config::weight_pitch + bytes * within, arguments.weight + at,
              ci < rows && j < row_elements);
    }
  }
};

}  // namespace convt3d
