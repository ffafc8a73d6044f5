// How cells and weights reach shared memory in the kernel == stride product on warpgroup
// products: by TMA, which rounds them to TF32 (not where operands are split). Products need
// columns with k contiguous: so lie the weights of the gradient; those of the forward pass are
// transposed in shared memory by a few warps, which split them too.
#pragma once
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "patch/store.cuh"
#include "patch/work.cuh"

namespace convt3d {

// Boxes of channels' cells are fetched by one lane: where each lane fetches its own, ptxas makes
// the warp go through its lanes one by one, 100 cycles each.

/// One lane: the weights of a chunk as memory has them, rows of k of the columns of a CTA.
template <typename Config>
CONVT3D_DEVICE void load_boxes(const PatchWork<Config>& work, const TensorMap& map, uint32_t stage,
                               uint32_t full, int chunk) {
  mbarrier_expect(full, Config::weight_part_bytes());
  constexpr int together = Config::weight_boxes <= 8 ? Config::weight_boxes : 1;
#pragma unroll together
  for (int box = 0; box < Config::weight_boxes; ++box)
    tma_load_3d(stage + box * Config::weight_box_bytes, map,
                work.column + box * Config::weight_box_columns, chunk * Config::chunk_lines,
                work.group, full);
}

/// The source boxes of a consumer's cells of a tile.
template <typename Config>
struct CellPlace {
  const PatchWork<Config>& work;
  const TensorMap& map;
  int sample, cell;
  int c0 = 0, c1 = 0, c2 = 0;             // where a lane's box of slots begins
  int box_width, box_d = 0, box_h = 0, box_w = 0;  // where outputs are staged

  CONVT3D_DEVICE CellPlace(const PatchArguments<Config>& arguments, const PatchWork<Config>& work_,
                           const TensorMap& map_, int box_width_, const PatchTile<Config>& at,
                           int consumer)
      : work(work_), map(map_), box_width(box_width_) {
    sample = at.sample;
    cell = at.cell + consumer * Config::group_cells;
    if constexpr (Config::staged) {
      const CellBox<Config> place(arguments, box_width, cell);
      box_d = place.d;
      box_h = place.h;
      box_w = place.w;
    } else if constexpr (!Config::channel_lines) {
      // Parts of rows of W or, folded, of planes.
      cell += threadIdx.x % 32 * Config::box_cells;
      const int row = Config::fold ? 0 : cell / arguments.size2;
      const int d = Config::fold ? cell / (arguments.size1 * arguments.size2)
                                 : row / arguments.size1;
      c0 = Config::fold ? (cell - d * arguments.size1 * arguments.size2) *
                              (Config::width * Config::folded)
                        : (cell - row * arguments.size2) * Config::width;
      c1 = Config::fold ? 0 : (row - d * arguments.size1) * Config::slots1;
      c2 = d * Config::stride0;
    }
  }

  /// A chunk: by one lane, that of lines of slots by as many as it has boxes.
  CONVT3D_DEVICE void load(int chunk, uint32_t stage, uint32_t full) const {
    const int lane = threadIdx.x % 32;
    const int line = (work.first_chunk + chunk) * Config::chunk_lines;
    if (Config::channel_lines || lane == 0) mbarrier_expect(full, Config::source_stage_bytes);
    if constexpr (Config::channel_lines) {
#pragma unroll
      for (int box = 0; box < Config::boxes; ++box)
        load_cells(line, box * Config::box_cells, stage + box * Config::box_bytes, full);
    } else if (lane < Config::boxes) {
      load_gradient(line, stage + lane * Config::box_bytes, full);
    }
  }

 private:
  /// The box that begins so many cells behind the consumer's first.
  CONVT3D_DEVICE void load_cells(int channel, int first, uint32_t to, uint32_t full) const {
    const int plane = work.group * Config::source_channels + channel;
    if constexpr (Config::staged && Config::last)
      tma_load_5d(to, map, plane, box_w, box_h, box_d, sample, full);
    else if constexpr (Config::last)
      tma_load_4d(to, map, channel, work.group, cell, sample, full);
    else if constexpr (Config::staged)
      tma_load_5d(to, map, box_w + first % box_width, box_h + first / box_width, box_d, plane, sample,
                  full);
    else
      tma_load_4d(to, map, cell + first, channel, work.group, sample, full);
  }
  CONVT3D_DEVICE void load_gradient(int line, uint32_t to, uint32_t full) const {
    if constexpr (Config::row_gradient) {
      constexpr int row_depth = Config::stride2 * Config::source_channels;
      const int row_slot = line / row_depth;
      tma_load_5d(to, map, line % row_depth,
                  box_w, box_h * Config::stride1 + row_slot % Config::stride1,
                  box_d * Config::stride0 + row_slot / Config::stride1, sample, full);
    } else {
      const int slot = line % Config::line_slots;
      tma_load_5d(to, map, c0, c1 + slot % Config::slots1, c2 + slot / Config::slots1,
                  work.group * Config::source_channels + line / Config::line_slots, sample, full);
    }
  }
};

/// Chunks of cells of the first tile, with their weights, that are fetched before all warps have
/// seen the barriers: one where one lane fetches, since others wait meanwhile.
template <typename Config>
struct FirstChunks {
  static constexpr int count = Config::channel_lines ? 1 : 0;
  /// Forward weights come along with the cells of the first consumer: those that stay with its
  /// first tile.
  static constexpr bool along = Config::transposed || Config::n_major;
};

/// One lane, the one that has made the barriers.
template <typename Config>
CONVT3D_DEVICE void fill_first(const PatchArguments<Config>& arguments, const PatchWork<Config>& work,
                               const TensorMap& map, int box_width, uint32_t base,
                               uint32_t barriers, const TensorMap& weight_map,
                               uint32_t weight_base, uint32_t weights_full) {
  const PatchTile<Config> tile(arguments, work.worker);
#pragma unroll 1
  for (int chunk = 0; chunk < FirstChunks<Config>::count; ++chunk) {
    if (FirstChunks<Config>::along && weights_full)
      load_boxes<Config>(work, weight_map, weight_base + chunk * Config::weight_stage_bytes,
                         weights_full + 8 * chunk, chunk);
#pragma unroll
    for (int consumer = 0; consumer < Config::consumers; ++consumer) {
      const CellPlace<Config> place(arguments, work, map, box_width, tile, consumer);
      const int stage = consumer * Config::source_stages + chunk;
      place.load(chunk, base + stage * Config::source_stage_bytes,
                 barriers + 8 * (stage + consumer * Config::source_stages));
    }
  }
}

/// One lane, of lines of slots a warp: the source boxes of all tiles for one consumer, but the
/// first. Where `weights_full` is given, the place of these barriers, the forward weights along
/// with them.
template <typename Config>
CONVT3D_DEVICE void fill_cells(const PatchArguments<Config>& arguments,
                               const PatchWork<Config>& work, const TensorMap& map, int box_width,
                               uint32_t base, Ring<Config::source_stages> ring, int consumer,
                               const TensorMap& weight_map, uint32_t weight_base,
                               Ring<Config::weight_stages> weights, uint32_t weights_full) {
  int chunk = FirstChunks<Config>::count;
  ring.skip(chunk);
  if constexpr (FirstChunks<Config>::along) weights.skip(chunk);
#pragma unroll 1
  for (int tile = work.worker; tile < arguments.tiles; tile += arguments.workers, chunk = 0) {
    const PatchTile<Config> at(arguments, tile);
    const CellPlace<Config> place(arguments, work, map, box_width, at, consumer);
    const bool bring = FirstChunks<Config>::along && weights_full &&
                       (!Config::keep_weights || tile == work.worker);
#pragma unroll 1
    for (; chunk < work.chunks; ++chunk) {
      if (FirstChunks<Config>::along && bring) {
        weights.wait_empty();
        load_boxes<Config>(work, weight_map, weight_base + weights.stage * Config::weight_stage_bytes,
                           weights_full + 8 * weights.stage, chunk);
        weights.advance();
      }
      ring.wait_empty();
      place.load(chunk, base + ring.stage * Config::source_stage_bytes, ring.full());
      ring.advance();
    }
  }
}

/// What the lanes of a warp have stored is there, for products too, whichever lane says so.
CONVT3D_DEVICE void publish_stores() {
  fence_async_proxy();
  __syncwarp();
}

/// Where a 16-byte piece of a product's row of weights lies within a stage.
CONVT3D_DEVICE uint32_t weight_place(int row, int piece) {
  return row * 128 + (piece ^ row % 8) * 16;
}

/// The channel of element `i` of the 16-byte piece `piece` of a chunk's row. TF32 steps take even
/// channels in their first half, then odd ones: source fragments are free of conflicts so.
template <typename Config>
CONVT3D_DEVICE int channel_of(int piece, int i) {
  return Config::per_word == 1 && Config::forward && !Config::last
             ? piece / 2 * 8 + 2 * i + piece % 2
             : Config::vector * piece + i;
}
/// The row of a product that a column is, counted from the CTA's first: fragments interleave.
template <typename Config>
CONVT3D_DEVICE int row_of(int column) {
  constexpr int group = 8 * Config::interleave;
  const int within = column % group;
  return column - within + within % Config::interleave * 8 + within / Config::interleave;
}

/// Where a box's word lies that has these bits of row and piece alone: places of sums of such
/// bits are these, combined by exclusive or.
CONVT3D_CONSTEXPR uint32_t place_bits(int row, int piece) {
  return uint32_t(row * 128 + (piece ^ row % 8) * 16);
}

/// Where a 16-byte piece of a row of k lies within a box that is not transposed yet, under the
/// swizzle of its rows.
template <typename Config>
CONVT3D_CONSTEXPR uint32_t raw_bits(int k, int piece = 0) {
  constexpr uint32_t swizzle = Config::weight_box_row == 128 ? 0x70 : 0x30;
  return uint32_t(k * Config::weight_box_row + piece * 16) ^
         (uint32_t(k * Config::weight_box_row + piece * 16) >> 3 & swizzle);
}
template <typename Config>
CONVT3D_DEVICE uint32_t raw_place(int k, int piece) {
  return raw_bits<Config>(k, piece);
}

/// Four weights along k; their small parts follow those of the stage's big ones.
template <typename Config>
CONVT3D_DEVICE void store_weights(uint32_t to, const uint32_t (&word)[4]) {
  if constexpr (Config::Math::words_per_value > 1) {
    typename Config::Math::A split;
    Config::Math::prepare(split, word);
    store_shared(to, split.big[0], split.big[1], split.big[2], split.big[3]);
    store_shared(to + Config::weight_part_bytes(), split.small[0], split.small[1], split.small[2],
                 split.small[3]);
  } else {
    store_shared(to, word[0], word[1], word[2], word[3]);
  }
}

/// A box of weights that one warp transposes in place: all of it goes through registers. Eight
/// lanes access eight different pieces of the banks, as they load and as they store.
template <typename Config>
struct WeightBox {
  static constexpr bool squares = Config::per_word == 1;
  static constexpr int parts = Config::weight_box_row / 64;
  /// Boxes that a warp has in registers, for the latency of loads.
  static constexpr int together = (Config::fillers == 1 && squares ? 4 : 2) / parts;
  /// Squares of four channels by four columns, `parts` a lane; 16 bits: blocks of eight by eight,
  /// four at a time.
  uint32_t words[squares ? 4 * parts : 8 * parts][4];

  /// A lane's pieces of a row of columns and, transposed, of k.
  CONVT3D_DEVICE static int columns_of(int lane) { return lane % (4 * parts); }
  CONVT3D_DEVICE static int depth_of(int lane) {
    if constexpr (parts == 2) return lane / 8 ^ lane % 8 / 2;
    return lane / 4 % 2 | (lane / 2 ^ lane / 8) % 2 * 2 | lane / 16 * 4;
  }
  // The sign of the address is 0: the compiler would keep sixteen places in registers, and spill
  // them.
  CONVT3D_DEVICE static uint32_t load_place(uint32_t box, int lane) {
    return raw_place<Config>(channel_of<Config>(depth_of(lane), 0), columns_of(lane)) ^ box >> 31;
  }
  CONVT3D_DEVICE static uint32_t store_place(uint32_t box, int lane) {
    return weight_place(row_of<Config>(4 * columns_of(lane)), depth_of(lane)) ^ box >> 31;
  }

  CONVT3D_DEVICE void load(uint32_t box, int lane) {
    if constexpr (squares) {
      const uint32_t place = load_place(box, lane);
#pragma unroll
      for (int i = 0; i < 4 * parts; ++i)
        load_shared(box + (place ^ raw_bits<Config>(channel_of<Config>(i / 4 * 4, i % 4))),
                    words[i][0], words[i][1], words[i][2], words[i][3]);
    } else {
#pragma unroll
      for (int i = 0; i < 8 * parts; ++i)
        load_matrix_x4_transposed(
            box + raw_place<Config>(i / parts * 8 + lane % 8, i % parts * 4 + lane / 8), words[i]);
    }
  }
  CONVT3D_DEVICE void store(uint32_t box, int lane) const {
    if constexpr (squares) {
      const uint32_t place = store_place(box, lane);
#pragma unroll
      for (int i = 0; i < 4 * parts; ++i) {
        const int first = i / 4 * 4, column = i % 4;
        const uint32_t to = box + (place ^ place_bits(row_of<Config>(column), first));
        const uint32_t word[4] = {words[first][column], words[first + 1][column],
                                  words[first + 2][column], words[first + 3][column]};
        store_weights<Config>(to, word);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8 * parts; ++i)
        store_matrix_x4(box + weight_place(row_of<Config>((i % parts * 4 + lane / 8) * 8 + lane % 8),
                                           i / parts),
                        words[i]);
    }
  }
};

/// A warp's share of the forward weights: boxes `first`, `first` + `step`, ... of all chunks, in
/// order.
template <typename Config>
CONVT3D_DEVICE void transpose_weights(const PatchWork<Config>& work, uint32_t base,
                                      Ring<Config::weight_stages> ring, uint32_t raw, int first,
                                      int step) {
  constexpr int boxes = Config::weight_boxes;
  const int lane = threadIdx.x % 32;
  const int end = boxes * Config::chunks * (Config::keep_weights ? 1 : work.count());
  int chunk = 0;  // of all tiles
#pragma unroll 1
  for (int index = first; index < end;) {
    WeightBox<Config> box[WeightBox<Config>::together];
    uint32_t place[WeightBox<Config>::together], full[WeightBox<Config>::together] = {};
#pragma unroll
    for (int i = 0; i < WeightBox<Config>::together; ++i, index += step) {
      // A box of a later chunk may wait for what the first one is transposed for.
      if (index >= end || (i > 0 && chunk < index / boxes)) break;
      for (; chunk < index / boxes; ++chunk) ring.advance();
      mbarrier_wait(raw + 8 * ring.stage, ring.parity);
      place[i] = base + ring.stage * Config::weight_stage_bytes +
                 index % boxes * Config::weight_box_bytes;
      full[i] = ring.full();
      box[i].load(place[i], lane);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < WeightBox<Config>::together; ++i)
      if (full[i]) box[i].store(place[i], lane);
    publish_stores();
#pragma unroll
    for (int i = 0; i < WeightBox<Config>::together; ++i)
      if (full[i] && lane == 0) mbarrier_arrive(full[i]);
  }
}

/// One lane: the weights of the gradient as they lie in memory, rows of `columns` with k
/// contiguous.
template <typename Config>
CONVT3D_DEVICE void load_weights(const PatchWork<Config>& work, const TensorMap& map, uint32_t base,
                                 Ring<Config::weight_stages> ring) {
  const int row = work.group * Config::columns + work.column;
  const int tiles = Config::keep_weights ? 1 : work.count();
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile)
#pragma unroll 1
    for (int chunk = 0; chunk < work.chunks; ++chunk) {
      ring.wait_empty();
      mbarrier_expect(ring.full(), Config::weight_stage_bytes);
      tma_load_2d(base + ring.stage * Config::weight_stage_bytes, map,
                  (work.first_chunk + chunk) * (128 / Config::bytes), row, ring.full());
      ring.advance();
    }
}

/// A warp's share of the weights where they lie in another order: a lane copies 32 bytes of a
/// stage.
template <typename Config>
CONVT3D_DEVICE void copy_weights(const PatchArguments<Config>& arguments,
                                 const PatchWork<Config>& work, uint32_t base,
                                 Ring<Config::weight_stages> ring, int first, int step) {
  using Storage = typename Config::Storage;
  constexpr int units = Config::chunk_units;
  const int lane = threadIdx.x % 32;
  const int end = units * work.chunks * (Config::keep_weights ? 1 : work.count());
  int chunk = 0;  // of all tiles
#pragma unroll 1
  for (int index = first; index < end; index += step) {
    for (; chunk < index / units; ++chunk) ring.advance();
    ring.wait_empty();
    const int k = (work.first_chunk + chunk % work.chunks) * (128 / Config::bytes);
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      // Eight elements of k of a column or, N-major, eight columns at one k.
      const int piece = Config::n_major ? index % units % 8 : lane / 8 * 2 + part;
      const int within = index % units * 8 + (Config::n_major ? 0 : lane % 8);
      const int row = Config::n_major ? lane + 32 * part : row_of<Config>(within);
      Storage value[Config::vector];
#pragma unroll
      for (int j = 0; j < Config::vector; ++j) {
        const int at = k + (Config::n_major ? row : channel_of<Config>(piece, j));
        const int column = work.column + within + (Config::n_major ? j : 0);
        value[j] = Storage(0);
        if (at < Config::depth && column < Config::columns)
          value[j] = __ldg(
              arguments.weight +
              (Config::forward
                   ? arguments.weight_at(int64_t(work.group) * Config::depth + at, column)
                   : arguments.weight_at(int64_t(work.group) * Config::columns + column, at)));
      }
      uint32_t word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (Config::Math::words_per_value > 1)
          word[j] = bits_of(value[j]);
        else if constexpr (Config::per_word == 1)
          word[j] = round_tf32_operand(bits_of(value[j]));
        else
          word[j] = value[2 * j] | uint32_t(value[2 * j + 1]) << 16;
      }
      const int box = Config::n_major ? within / Config::weight_box_columns : 0;
      store_weights<Config>(base + ring.stage * Config::weight_stage_bytes +
                                box * Config::weight_box_bytes + weight_place(row, piece),
                            word);
    }
    publish_stores();
    if (lane == 0) mbarrier_arrive(ring.full());
  }
}

}  // namespace convt3d
