// Source fragments of kernel == stride products that read two channels of a cell at once: forward,
// and the gradient of one slot in 16 bits.
#pragma once
#include "patch/store.cuh"

namespace convt3d {

/// Where a lane's cell of a fragment's row lies within a stage, at channel 2t or 2t + 1: of eight
/// channels, those that four lanes read together lie in different banks.
template <typename Config>
CONVT3D_DEVICE uint32_t cell_place(int warp, int m, int half, int lane, int odd) {
  const int cell = 16 * Config::blocks * warp + linear_cell<Config>(m, half, lane / 4);
  const int channel = 2 * (lane % 4) + odd;
  return cell / Config::box_cells * Config::box_bytes + channel * 128 +
         (cell % Config::box_cells * Config::cell_bytes ^ channel * 16);
}

/// Source fragments of one lane, out of a stage.
template <typename Config>
struct CellFragments {
  static constexpr int run = Config::run;
  /// Where each run of cells lies for the lane's even and odd channels.
  uint32_t offset[Config::runs][2];

  CONVT3D_DEVICE CellFragments(int warp, int lane) {
#pragma unroll
    for (int r = 0; r < Config::runs; ++r)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        offset[r][i] = cell_place<Config>(warp, r * run / 2, r * run % 2, lane, i);
  }

  /// Those of a step of a chunk; 16 bits: two cells of one channel a word.
  CONVT3D_DEVICE void load(uint32_t stage, int step, uint32_t (&a)[Config::blocks][4]) const {
#pragma unroll
    for (int r = 0; r < Config::runs; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t word[run];
        if constexpr (Config::per_word == 1) {
          load_words<run>(stage + offset[r][half] + step * 1024, word);
        } else {
          uint32_t low[run / 2], high[run / 2];
          load_words<run / 2>(stage + offset[r][0] + (2 * step + half) * 1024, low);
          load_words<run / 2>(stage + offset[r][1] + (2 * step + half) * 1024, high);
#pragma unroll
          for (int i = 0; i < run; ++i) word[i] = i % 2 ? high[i / 2] : low[i / 2];
        }
#pragma unroll
        for (int i = 0; i < run; ++i) {
          const int row = r * run + i;
          a[row / 2][2 * half + row % 2] = word[i];
        }
      }
  }
  /// What was loaded, as products take it: two neighbouring channels of a cell make a word.
  CONVT3D_DEVICE static void pair(uint32_t (&a)[Config::blocks][4]) {
    if constexpr (Config::per_word > 1) {
#pragma unroll
      for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t(&word)[4] = a[block];
          const uint32_t low = word[2 * half], high = word[2 * half + 1];
          word[2 * half] = permute_bytes(low, high, 0x5410);
          word[2 * half + 1] = permute_bytes(low, high, 0x7632);
        }
    }
  }
};

}  // namespace convt3d
