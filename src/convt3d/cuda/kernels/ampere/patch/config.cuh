// The compile-time description of one kernel == stride product (ampere/patch/kernel.cu). The
// macros are set by plan/ampere_patch.py; see patch/product.cuh.
#pragma once
#include "patch/product.cuh"

namespace convt3d {

/// The smallest pitch that holds a row and leaves this rest: what keeps fragment loads off each
/// other's banks.
CONVT3D_CONSTEXPR int pitch_of(int row_words, int rest, int modulus) {
  return row_words + floor_mod(rest - row_words, modulus);
}

struct AmperePatchConfig : PatchProduct {
  // How the eight words of a matrix step (its slots t and t + 4) are spread over lines.
  //   unpaired   16-bit lines of odd width: a word joins elements of two neighbouring lines
  //   even       slots t, t + 4 are neighbouring words of line t
  //   odd        slots t, t + 4 are the same word of lines t and t + 4
  static constexpr bool unpaired =
      !source_channels_last && per_word == 2 && width % 2 == 1;
  static constexpr int width_words = unpaired || source_channels_last ? 1 : width / per_word;
  static constexpr bool even = width_words % 2 == 0;
  static constexpr int block_lines = source_channels_last || unpaired ? 8 * per_word : even ? 4 : 8;
  /// Words of a line that a lane loads for one cell at a time.
  static constexpr int slice_words = even ? (width_words % 4 == 0 ? 4 : 2) : 1;
  static constexpr int slice_steps = even ? slice_words / 2 : 1;
  static constexpr int slices = unpaired ? width : width_words / slice_words;

  // The tile: warps over cells and columns, fragments of a warp.
  static constexpr int warps_m = CONVT3D_WARPS_M;
  static constexpr int warps_n = CONVT3D_WARPS_N;
  static constexpr int fragments_m = CONVT3D_FRAGMENTS_M;
  static constexpr int fragments_n = CONVT3D_FRAGMENTS_N;
  static constexpr int threads = 32 * warps_m * warps_n;
  static constexpr int resident_ctas = CONVT3D_RESIDENT;
  static constexpr int cells = 16 * warps_m * fragments_m;
  static constexpr int column_tile = 8 * warps_n * fragments_n;
  static constexpr int column_tiles = div_up(columns, column_tile);

  /// Neighbouring cells whose rows one lane holds.
  static constexpr int run = CONVT3D_RUN;
  static_assert(run == 1 || run == 2 || run == 4, "a lane holds 1, 2 or 4 neighbouring cells");
  static_assert(run < 4 || fragments_m % 2 == 0, "runs of four cells take two fragments");
  static_assert(!unpaired || width > 1 || run > 1, "lines are paired over neighbouring cells");

  /// Fragments whose columns interleave: a lane holds 2 * interleave neighbouring columns.
  static constexpr int interleave = CONVT3D_INTERLEAVE;
  static_assert(fragments_n % interleave == 0, "whole groups of interleaved fragments");
  static_assert(forward || interleave == 1, "only forward columns interleave");
  static_assert(2 * interleave % target_width == 0, "a lane holds whole runs of slots along W");
  static constexpr bool offsets_by_tile = false;

  // The pipeline.
  static constexpr int stages = CONVT3D_STAGES;
  static constexpr int chunk_lines = CONVT3D_CHUNK_LINES;
  static constexpr int chunk_depth = chunk_lines * width;
  static constexpr int chunks = div_up(lines, chunk_lines);
  /// All weights of the CTA's columns stay in shared memory.
  static constexpr bool keep_weights = CONVT3D_KEEP_WEIGHTS;
  /// CTAs that share the chunks of a tile, each with sums of its own that are added afterwards.
  static constexpr int splits = CONVT3D_SPLITS;
  static constexpr bool exchanged = false;
  static constexpr bool runs_swapped = false;
  /// IEEE-grade: a float32 sum of so many products is made of parts of 64. (PyTorch's gradients
  /// are sums in one chain.)
  static constexpr bool sum_in_parts = Math::words_per_value == 2 && forward && depth > 64;
  static constexpr int split_chunks = div_up(chunks, splits);
  static constexpr int weight_buffers = keep_weights ? split_chunks : stages;
  static_assert((splits - 1) * split_chunks < chunks, "no split is empty");
  static_assert(splits == 1 || !bias, "bias is added once");
  /// What a product writes: elements of the target, or partial sums of them.
  using Target = typename Select<splits == 1, Type, Float32>::Type;
  static_assert(stages >= 2, "the pipeline needs two stages");
  static_assert(chunk_lines % block_lines == 0, "a chunk is whole blocks of lines");

  // Shared memory in words. Contiguous sources: [line][cell][element]; channels_last: [cell][k].
  static constexpr int line_words = cells * width / per_word;
  static constexpr int source_pitch =
      source_channels_last ? chunk_lines / per_word + 4
                           : pitch_of(line_words, unpaired || run * width_words == 16 ? 4 : 8,
                                      unpaired ? 16 : 32);
  static constexpr int source_words =
      source_pitch * (source_channels_last ? cells : chunk_lines);
  static_assert(line_words % 4 == 0 || source_channels_last, "lines are whole vectors");

  // Weights: forward [k][column], backward [column][k].
  static constexpr int weight_rows = forward ? chunk_depth : column_tile;
  static constexpr int weight_row_elements = forward ? column_tile : chunk_depth;
  static constexpr int weight_row_words = weight_row_elements / per_word;
  static constexpr int weight_pitch =
      forward ? (per_word == 1 ? pitch_of(weight_row_words, 8, 32) : pitch_of(weight_row_words, 4, 16))
              : (even ? pitch_of(weight_row_words, 8, 32) : pitch_of(weight_row_words, 4, 8));
  static_assert(weight_row_elements % 8 == 0, "weight rows are whole vectors");
  static constexpr int weight_words = weight_pitch * weight_rows;

  static constexpr int weight_offset = stages * source_words;
  static constexpr int shared_words = weight_offset + weight_buffers * weight_words;
  static_assert(4 * shared_words <= CONVT3D_SHARED_BYTES, "the plan counts shared memory alike");
};

}  // namespace convt3d
