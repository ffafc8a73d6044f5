// The epilogue of the kernel == stride product by TMA: outputs of some columns of a consumer's
// cells are staged as the box of the target that they are, which one thread stores while others
// go on:
//
//   contiguous     [channel][slot of D][row of H, slot of H][cell of W, slot of W]
//   channels_last  [slot of D][row of H, slot of H][cell of W, slot of W][channel]
#pragma once
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "patch/config.cuh"
#include "patch/fuse.cuh"

namespace convt3d {

/// The box of cells of a consumer: `width` along W by as many of H as make its cells.
template <typename Config>
struct CellBox {
  int d, h, w;

  CONVT3D_DEVICE CellBox(const PatchArguments<Config>& arguments, int width, int cell) {
    const int across = arguments.size2 / width, rows = Config::group_cells / width;
    const int down = (arguments.size1 + rows - 1) / rows;
    const int index = cell / Config::group_cells;
    const int line = index / across;
    w = (index - line * across) * width;
    d = line / down;
    h = (line - d * down) * rows;
  }
};

/// The cells of a warp in such a box.
template <typename Config>
struct BoxCells {
  const PatchArguments<Config>& arguments;
  CellBox<Config> box;
  int width, first;

  CONVT3D_DEVICE PatchCell operator()(int in_warp) const {
    const int row = (first + in_warp) / width;
    const int h = box.h + row, w = box.w + first + in_warp - row * width;
    return {box.d, h, w, box.d < arguments.size0 && h < arguments.size1};
  }
};

/// Runs the steps of a fusion on a consumer's sums before they are stored. `staged`: its cells are
/// a box.
template <typename Config>
CONVT3D_DEVICE void fuse_tile(const PatchArguments<Config>& arguments,
                              const PatchWork<Config>& work, const PatchTile<Config>& tile,
                              int box_width, int consumer, int warp,
                              const PatchLaneStore<Config>& store,
                              typename PatchLaneStore<Config>::Sums& sum) {
  if constexpr (Config::staged) {
    const BoxCells<Config> cells{
        arguments,
        CellBox<Config>(arguments, box_width, tile.cell + consumer * Config::group_cells),
        box_width, 16 * Config::blocks * warp};
    fuse_sums<Config>(arguments, work.group, tile.sample, store.first_column, store.lane, cells,
                      sum);
  } else {
    const LinearCells<Config> cells{arguments, tile.cell + store.warp_cell};
    fuse_sums<Config>(arguments, work.group, tile.sample, store.first_column, store.lane, cells,
                      sum);
  }
}

template <typename Config>
struct PatchStaging {
  using Type = typename Config::Type;
  using Sums = float[Config::fragments_m][Config::fragments_n][4];
  static constexpr int bytes = Config::bytes;
  static constexpr int interleave = Config::interleave;
  static constexpr int run = Config::run;
  static constexpr bool last = Config::last;
  static constexpr int group_columns = 8 * interleave;
  static constexpr int lane_columns = 2 * interleave;
  /// Columns of a lane that are neighbours in memory, and bytes of a cell in a row.
  static constexpr int piece_columns = !last                                  ? Config::stride2
                                       : Config::row_elements % lane_columns == 0 ? lane_columns
                                       : Config::row_elements % 2 == 0            ? 2
                                                                                  : 1;
  static constexpr int pieces = lane_columns / piece_columns;
  static constexpr int cell_bytes = Config::row_elements * bytes;
  /// Bytes of a slot of D, of a channel where these come first.
  static constexpr int plane_bytes = Config::group_cells * Config::stride1 * cell_bytes;

  const PatchArguments<Config>& arguments;
  const PatchWork<Config>& work;
  const TensorMap& map;
  int consumer, box_width, buffer = 0;
  uint32_t base;
  uint32_t start[Config::runs];  // of a lane's cells
  int column;                    // the lane's first one of a fragment

  CONVT3D_DEVICE PatchStaging(const PatchArguments<Config>& arguments_, const PatchWork<Config>& work_,
                              const TensorMap& map_, uint32_t staging, int consumer_, int box_width_)
      : arguments(arguments_), work(work_), map(map_), consumer(consumer_), box_width(box_width_) {
    base = staging + consumer * (Config::staging_buffers * Config::staging_bytes);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    column = lane_columns * (lane % 4);
#pragma unroll
    for (int r = 0; r < Config::runs; ++r) {
      const int cell =
          16 * Config::blocks * warp + linear_cell<Config>(r * run / 2, r * run % 2, lane / 4);
      const int row = cell / box_width;
      start[r] = ((row * Config::stride1 - row) * box_width + cell) * cell_bytes;
    }
  }

  CONVT3D_DEVICE void operator()(const PatchTile<Config>& tile, const Sums& sum) {
    const CellBox<Config> box(arguments, box_width, tile.cell + consumer * Config::group_cells);
    constexpr int groups = Config::staged_columns / group_columns;
#pragma unroll
    for (int part = 0; part < Config::column_tile / Config::staged_columns; ++part) {
      const uint32_t to = base + buffer * Config::staging_bytes;
#pragma unroll
      for (int n = 0; n < groups; ++n)
#pragma unroll
        for (int piece = 0; piece < pieces; ++piece) stage(to, part * groups, n, piece, sum);
      fence_async_proxy();
      // The buffer that comes next is free.
      if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
      named_barrier_sync(2 + consumer, 128);
      if (threadIdx.x % 128 == 0) {
        // The channel, or the slot of D.
        const int index = (work.column + part * Config::staged_columns) / Config::box_columns;
        const int h = box.h * Config::stride1, d = box.d * Config::stride0;
        if constexpr (!last) {
          if (index < Config::target_channels)
            tma_store_5d_streaming(map, box.w * Config::stride2, h, d,
                                   work.group * Config::target_channels + index, tile.sample, to);
        } else if (index < Config::stride0) {
          if constexpr (Config::cells_apart)
            tma_store_5d_streaming(map, 0, box.w, h, d + index, tile.sample, to);
          else
            tma_store_5d_streaming(map, box.w * Config::row_elements, h, d + index, tile.sample, 0, to);
        }
        bulk_commit();
      }
      buffer = buffer + 1 == Config::staging_buffers ? 0 : buffer + 1;
    }
  }

  CONVT3D_DEVICE void finish() const {
    if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
  }

 private:
  CONVT3D_DEVICE void stage(uint32_t to, int first_group, int n, int piece, const Sums& sum) const {
    // Where fragments are whole channels, the slot is the lane's own.
    constexpr bool whole = !last && group_columns % Config::slots == 0;
    const int at = column + piece * piece_columns + (whole ? 0 : n * group_columns);
    const int row_bytes = box_width * cell_bytes;
    uint32_t offset;
    if constexpr (last) {
      const int row = at / Config::row_elements;
      offset = row / Config::stride1 * plane_bytes + row % Config::stride1 * row_bytes +
               at % Config::row_elements * bytes;
    } else {
      const int slot = at % Config::slots / Config::stride2;
      offset = (at / Config::slots * Config::stride0 + slot / Config::stride1) * plane_bytes +
               slot % Config::stride1 * row_bytes;
    }
    if constexpr (whole)
      offset += n * (group_columns / Config::slots * Config::stride0 * plane_bytes);
#pragma unroll
    for (int r = 0; r < Config::runs; ++r) {
      float value[run * piece_columns];
#pragma unroll
      for (int i = 0; i < run * piece_columns; ++i) {
        const int row = r * run + i / piece_columns;
        const int in_lane = piece * piece_columns + i % piece_columns;
        value[i] = sum[row / 2][(first_group + n) * interleave + in_lane % interleave]
                      [2 * (row % 2) + in_lane / interleave];
      }
      stage_words(to + start[r] + offset, value);
    }
  }

  template <int Count>
  CONVT3D_DEVICE static void stage_words(uint32_t to, const float (&value)[Count]) {
    constexpr int words = div_up(Count, Config::per_word);
    static_assert(Count % Config::per_word == 0, "whole words");
    uint32_t word[words];
#pragma unroll
    for (int i = 0; i < words; ++i) {
      if constexpr (Config::per_word == 1)
        word[i] = bits_of(value[i]);
      else
        word[i] = Type::pack(value[2 * i], value[2 * i + 1]);
    }
    if constexpr (words % 4 == 0) {
#pragma unroll
      for (int i = 0; i < words; i += 4)
        store_shared(to + 4 * i, word[i], word[i + 1], word[i + 2], word[i + 3]);
    } else if constexpr (words % 2 == 0) {
#pragma unroll
      for (int i = 0; i < words; i += 2) store_shared(to + 4 * i, word[i], word[i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < words; ++i) store_shared(to + 4 * i, word[i]);
    }
  }
};

/// The same for the gradient of channels_last sources: [row of H, cell of W][128 bytes of
/// channels], swizzled.
template <typename Config>
struct DgradStaging {
  using Type = typename Config::Type;
  using Sums = float[Config::fragments_m][Config::fragments_n][4];

  const PatchArguments<Config>& arguments;
  const PatchWork<Config>& work;
  const TensorMap& map;
  int consumer, box_width, buffer = 0;
  uint32_t base;

  CONVT3D_DEVICE DgradStaging(const PatchArguments<Config>& arguments_,
                              const PatchWork<Config>& work_, const TensorMap& map_,
                              uint32_t staging, int consumer_, int box_width_)
      : arguments(arguments_), work(work_), map(map_), consumer(consumer_), box_width(box_width_) {
    base = staging + consumer * (Config::staging_buffers * Config::staging_bytes);
  }

  CONVT3D_DEVICE void operator()(const PatchTile<Config>& tile, const Sums& sum) {
    const CellBox<Config> box(arguments, box_width, tile.cell + consumer * Config::group_cells);
    constexpr int groups = Config::staged_columns / 8;
#pragma unroll
    for (int part = 0; part < Config::column_tile / Config::staged_columns; ++part) {
      const uint32_t to = base + buffer * Config::staging_bytes;
      stage(to, part * groups, sum);
      fence_async_proxy();
      // The buffer that comes next is free.
      if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
      named_barrier_sync(2 + consumer, 128);
      if (threadIdx.x % 128 == 0) {
        const int channel = work.column + part * Config::staged_columns;
        if (channel < Config::columns)
          tma_store_5d_streaming(map, channel, box.w, box.h, box.d, tile.sample, to);
        bulk_commit();
      }
      buffer = buffer + 1 == Config::staging_buffers ? 0 : buffer + 1;
    }
  }

  CONVT3D_DEVICE void finish() const {
    if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
  }

 private:
  CONVT3D_DEVICE static void stage(uint32_t to, int first_group, const Sums& sum) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    if constexpr (Config::per_word == 2) {
      // Four blocks of eight cells by eight channels.
      const int row = 16 * warp + lane % 16;
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        const float(&low)[4] = sum[0][first_group + n];
        const float(&high)[4] = sum[0][first_group + n + 1];
        const uint32_t word[4] = {Type::pack(low[0], low[1]), Type::pack(low[2], low[3]),
                                  Type::pack(high[0], high[1]), Type::pack(high[2], high[3])};
        store_matrix_x4(to + row * 128 + ((n + lane / 16) ^ row % 8) * 16, word);
      }
    } else {
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * warp + 8 * half + lane / 4;
          store_shared(to + row * 128 + ((2 * n + lane % 4 / 2) ^ row % 8) * 16 + lane % 2 * 8,
                       bits_of(sum[0][first_group + n][2 * half]),
                       bits_of(sum[0][first_group + n][2 * half + 1]));
        }
    }
  }
};

/// Nothing is staged.
struct NoStaging {
  template <typename... Arguments>
  CONVT3D_DEVICE explicit NoStaging(const Arguments&...) {}
};

}  // namespace convt3d
