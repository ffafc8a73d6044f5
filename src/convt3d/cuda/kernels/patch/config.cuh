// The compile-time description of a kernel == stride product on warpgroup products
// (patch/kernel.cu). The macros are set by plan/patch/; see patch/product.cuh.
#pragma once
#include "device/pipeline.cuh"
#include "patch/product.cuh"

namespace convt3d {

struct PatchConfig : PatchProduct {
  /// CTAs that share the chunks of a tile, each with sums of its own that are added afterwards.
  static constexpr int splits = CONVT3D_SPLITS;
  using Target = typename Select<splits == 1, Type, Float32>::Type;
  static constexpr int bytes = sizeof(Storage);
  static constexpr int vector = 16 / bytes;  // elements
  /// channels_last: rows of a product are the source's own, and A is read from shared memory.
  static constexpr bool last = source_channels_last;
  static_assert(last == target_channels_last, "one layout");
  /// Gradient of short rows, of so many cells: what follows in memory, the rows of a cell's slots
  /// along H, then those of the next cells along H, makes 128 bytes. 0 where rows are long.
  static constexpr int fold = CONVT3D_FOLD;
  static constexpr int folded = fold > 0 ? stride1 : 1;
  static constexpr int slots1 = stride1 / folded;
  /// Words of a line of a cell in the gradient's source: its slots along W (and H), neighbours in
  /// k.
  static constexpr int slot_words = width / per_word;
  static constexpr int cell_words = slot_words * folded;
  /// Whether lanes read two channels of a cell at once: forward, and where they make a word.
  static constexpr bool channel_pairs = forward || (channel_lines && per_word == 2);
  static_assert(channel_lines || last || (width % per_word == 0 &&
                            (cell_words == 1 || cell_words == 2 || cell_words == 4)),
                "cells are 4, 8 or 16 bytes");
  static_assert(forward || !bias, "the gradient has no bias");
  /// IEEE-grade operands are split in two TF32 parts (see device/arithmetic.cuh): fragments in
  /// registers, weights as they are transposed or copied. Of a stage, those of the big parts come
  /// first.
  static_assert(Math::words_per_value == 1 || (forward && !last),
                "split operands: forward, cells in registers");

  // The tile: `blocks` times 64 cells for each consumer warpgroup, and the columns of a product.
  static constexpr int consumers = CONVT3D_CONSUMERS;
  static constexpr int blocks = CONVT3D_BLOCKS;
  static constexpr int column_tile = CONVT3D_COLUMN_TILE;
  static constexpr int group_cells = 64 * blocks;
  static constexpr int cells = consumers * group_cells;
  static constexpr int column_tiles = div_up(columns, column_tile);
  static constexpr int resident_ctas = CONVT3D_RESIDENT;
  /// Warpgroups 0 .. consumers-1 multiply and store, the others fill.
  static constexpr int fillers = CONVT3D_FILLERS;
  static constexpr int threads = 128 * (consumers + fillers);
  static constexpr bool set_registers = CONVT3D_SET_REGISTERS;
  static constexpr int consumer_registers = CONVT3D_CONSUMER_REGISTERS;
  static constexpr int producer_registers = CONVT3D_PRODUCER_REGISTERS;
  static_assert(column_tile % 8 == 0 && column_tile <= 256, "columns of one product");
  static_assert(consumers >= 1 && consumers <= 3, "a warp fills for each consumer, one turns weights");
  static_assert(fillers == 1 || fillers == 2, "one warpgroup fills, or two");

  // Fragments of a warp and what its lanes hold, as patch/lane_store.cuh needs them.
  static constexpr int fragments_m = blocks;
  static constexpr int fragments_n = column_tile / 8;
  static constexpr int run = CONVT3D_RUN;
  static constexpr int interleave = CONVT3D_INTERLEAVE;
  static constexpr int runs = 2 * blocks / run;
  /// Lanes that load 16 bytes together have neighbouring lines, whose swizzle differs in two
  /// bits, of two runs: these differ in the third.
  static constexpr bool runs_swapped = !channel_pairs && !last && cell_words == 1 && run == 4;
  static_assert(run == 1 || run == 2 || run == 4, "a lane holds 1, 2 or 4 neighbouring cells");
  static_assert(run < 4 || blocks % 2 == 0, "runs of four cells take two blocks");
  static_assert(last || !channel_lines || per_word == 1 || run > 1, "cells are read in pairs");
  static_assert(channel_lines || last ||
                    run == (cell_words == 1 ? 2 * blocks : cell_words == 2 ? 2 : 1),
                "what a lane holds once lanes have exchanged cells");
  static_assert(!last || (run == 1 && blocks == 1), "rows of a block are neighbouring cells");
  static_assert(fragments_n % interleave == 0, "whole groups of interleaved fragments");
  static_assert(2 * interleave % target_width == 0, "a lane holds whole runs of slots along W");
  static constexpr bool offsets_by_tile = true;

  // A chunk is 128 bytes of k in the order of memory, four steps of eight words: lines, which are
  // channels, or, in other gradients, channels and slots of D and H (of D, where H is folded).
  // channels_last: elements.
  static constexpr int cell_bytes = channel_lines || last ? bytes : 4 * cell_words;
  static constexpr int chunk_lines = 128 / cell_bytes;
  static constexpr int line_slots = forward ? 1 : last ? slots : stride0 * slots1;
  static constexpr int chunks = div_up(source_channels * line_slots, chunk_lines);
  /// The slots of H, those of D and the channels of a chunk's box.
  static constexpr int box_slots1 = chunk_lines < slots1 ? chunk_lines : slots1;
  static constexpr int box_slots0 =
      chunk_lines / box_slots1 < stride0 ? chunk_lines / box_slots1 : stride0;
  static constexpr int box_channels = chunk_lines / box_slots1 / box_slots0;
  static_assert(channel_lines || last || (slots1 % box_slots1 == 0 && stride0 % box_slots0 == 0 &&
                            box_slots0 * box_slots1 * box_channels == chunk_lines &&
                            (box_channels == 1 || box_slots0 * box_slots1 == line_slots) &&
                            (box_slots0 == 1 || box_slots1 == slots1)),
                "the lines of a chunk are a box");
  static constexpr int steps = 4;
  /// Fragments are loaded two steps before their products, while those of one step are in flight:
  /// ptxas makes products with more of them wait for one another. Registers hold the fragments of
  /// a chunk.
  static constexpr int ahead = 2;
  static constexpr int pending = last ? 2 : 1;
  static constexpr int split_chunks = div_up(chunks, splits);
  static_assert((splits - 1) * split_chunks < chunks, "no split is empty");
  static_assert(splits == 1 || !forward, "bias is added once");

  // Source stages of each consumer: boxes of [line][128 bytes of cells], swizzled, or one of
  // [cell][128 bytes of channels].
  static constexpr int box_cells = last ? group_cells : 128 / cell_bytes;
  static constexpr int boxes = group_cells / box_cells;
  static constexpr int box_bytes = 128 * (last ? group_cells : chunk_lines);
  static constexpr int source_stage_bytes = boxes * box_bytes;
  static_assert(boxes <= 32, "a lane fetches a box");
  static_assert(fold == 0 || (!forward && stride1 > 1 && fold % 4 == 0 && box_cells % fold == 0),
                "rows of 128 bytes hold whole rows of cells");
  static constexpr int source_stages = CONVT3D_SOURCE_STAGES;

  // Outputs of so many columns at a time are staged and leave as one box of the target; 0: they
  // leave from the accumulators. A consumer's cells are a box then, `box_width` along W by some
  // of H.
  static constexpr int staged_columns = CONVT3D_STAGED_COLUMNS;
  static constexpr bool staged = staged_columns > 0;
  static constexpr int staging_buffers = 2;  // a box leaves while the next one is staged
  static constexpr int staging_bytes = staged_columns * group_cells * bytes;
  /// The gradient of channels_last sources: k goes along rows of the source, of the slots along
  /// W.
  static constexpr bool row_gradient = last && !forward;
  static_assert(!row_gradient || (staged_columns * bytes == 128 && groups == 1 && splits == 1 &&
                                  stride2 * source_channels % chunk_lines == 0),
                "chunks do not cross rows; boxes of 128 bytes of channels are stored");
  static_assert(forward || last || !staged, "contiguous gradients leave from the accumulators");
  /// Columns that a box is made of: the slots of a channel, or, channels_last, those of a slot of
  /// D.
  static constexpr int box_columns = row_gradient ? staged_columns : last ? columns / stride0 : slots;
  static_assert(!staged || (staged_columns % box_columns == 0 &&
                            column_tile % staged_columns == 0 &&
                            staged_columns % (8 * interleave) == 0),
                "whole boxes of one product");
  static_assert(!staged || groups == 1 ||
                    (!last && columns % column_tile == 0 && source_channels % chunk_lines == 0),
                "boxes do not reach into the next group");
  /// Neighbouring elements of a cell in a row of the target, and whether TMA takes them as a
  /// dimension.
  static constexpr int row_elements = last ? stride2 * target_channels : stride2;
  static constexpr bool cells_apart = last && row_elements * bytes % 16 == 0;

  // Weight stages: [column][128 bytes of k], swizzled. All of them stay, or they are a ring.
  //
  // Memory has the forward weights the other way: TMA brings boxes of as many columns as a chunk
  // has channels, 128 bytes of columns a row, and a warp transposes each where it lies. Products
  // of 16-bit operands take them as they are (`n_major`).
  static constexpr bool map_weights = CONVT3D_MAP_WEIGHTS;
  static constexpr bool n_major = CONVT3D_N_MAJOR;
  static constexpr bool transposed = forward && map_weights && !n_major;
  /// Bytes of a row of such a box: 64 where that leaves no columns over.
  static constexpr int weight_box_row = CONVT3D_WEIGHT_BOX_ROW;
  static_assert(weight_box_row == 128 || (weight_box_row == 64 && transposed), "rows of boxes of weights");
  static constexpr int weight_box_columns = weight_box_row / bytes;
  static constexpr int weight_boxes = div_up(column_tile, weight_box_columns);
  static constexpr int weight_box_bytes = weight_box_columns * 128;
  static constexpr int weight_stage_bytes =
      (transposed || n_major ? weight_boxes * weight_box_bytes : column_tile * 128) *
      Math::words_per_value;
  /// Whether registers have room for the bias of a CTA's columns, which all its tiles begin at.
  CONVT3D_CONSTEXPR static bool hold_bias() { return bias && CONVT3D_HOLD_BIAS; }
  CONVT3D_CONSTEXPR static int weight_part_bytes() {
    return weight_stage_bytes / Math::words_per_value;
  }
  static constexpr int weight_stages = CONVT3D_WEIGHT_STAGES;
  static constexpr bool keep_weights = CONVT3D_KEEP_WEIGHTS;
  static_assert(!keep_weights || weight_stages == split_chunks, "all weights stay");
  /// Fragments do not interleave, but lanes exchange words before the stores, as if four of them
  /// did.
  static constexpr bool exchanged = n_major && last;
  static_assert(!exchanged || (interleave == 4 && !staged), "lanes exchange four words of four lanes");
  static_assert(!n_major || (forward && map_weights && per_word == 2 && (last || interleave == 1)),
                "boxes of 16-bit columns in their order");
  static_assert(!transposed || weight_box_columns % (8 * interleave) == 0,
                "fragments interleave within a box");
  /// Units of a chunk's weights where TMA cannot bring them: eight columns.
  static constexpr int chunk_units = column_tile / 8;

  /// Consumers begin one after another, by a share of a tile's chunks, and stay apart: one stores
  /// while others multiply. (Streamed weights would wait for the last of them.)
  static constexpr bool ping_pong = CONVT3D_PING_PONG;
  static_assert(!ping_pong || (keep_weights && consumers > 1), "weights wait for nobody");
  static_assert(!ping_pong || Math::words_per_value == 1,
                "consumers that add are out of step by themselves");
  /// The chunk after which consumer `which` begins.
  CONVT3D_CONSTEXPR static int chunk_before(int which) {
    return chunks * which > consumers ? chunks * which / consumers - 1 : 0;
  }

  // Shared memory in bytes, from a multiple of 1024 on: source stages, weight stages, staging
  // buffers of each consumer, the bias of each column, barriers: rings, for each weight stage
  // whether what it is transposed from has come, for each consumer but the first whether it may
  // begin.
  static constexpr int weight_offset = consumers * source_stages * source_stage_bytes;
  static constexpr int staging_offset = weight_offset + weight_stages * weight_stage_bytes;
  static constexpr int bias_offset =
      staging_offset + (staged ? consumers * staging_buffers * staging_bytes : 0);
  static constexpr int barrier_offset = bias_offset + (forward ? (column_tile * 4 + 15) / 16 * 16 : 0);
  static constexpr int raw_offset = barrier_offset + 16 * (consumers * source_stages + weight_stages);
  static constexpr int ping_pong_offset = raw_offset + (transposed ? 8 * weight_stages : 0);
  static constexpr int barrier_bytes =
      ping_pong_offset - barrier_offset + (ping_pong ? 8 * (consumers - 1) : 0);
  static_assert(1024 + barrier_offset + barrier_bytes <= CONVT3D_SHARED_BYTES,
                "the plan counts shared memory alike");
};

}  // namespace convt3d
