// TF32: wgmma takes operands of 32 bits from shared memory as columns of K alone (K-major), and
// boxes are rows of K. So rows of M, the gradient's, come as fragments through registers, and x,
// of which all taps read the same, is transposed in shared memory by three warps of the
// producers.
//
// TMA has rounded both to TF32. Fragments of m64k8: lane (g, t) of warp w holds rows 16w + g, + 8
// at k = t and t + 4. With k in the order of positions the words of a warp would meet in pairs in
// the same bank; so k = 0 .. 7 are the positions 0, 2, 4, 6, 1, 3, 5, 7 of eight, and the swizzle
// of 128 bytes, which exclusive-ors the place of 16 bytes with the position, keeps all 32 apart.
//
//   x, transposed:   16 bytes are four k of a column: [positions / 4][column][four k]
#pragma once
#include "device/barrier.cuh"
#include "device/wgmma.cuh"
#include "wgrad_ndhwc/produce.cuh"

namespace convt3d {

/// The position, of eight, of a product's k.
CONVT3D_CONSTEXPR int position_of(int k) { return k % 4 * 2 + k / 4; }

/// Transposes x of every step, and clears the gradient where the step reaches out of x.
template <typename Config>
CONVT3D_DEVICE void transpose_steps(const WgradNdhwcArguments& a, uint32_t shared,
                                    WgradNdhwcRing<Config> ring,
                                    const WgradNdhwcTile<Config>& tile, int split, int warp) {
  constexpr int threads = lanes_of(Config::transposing_warps);
  const int lane = threadIdx.x % 32;
  const int boxes = tile.source_boxes();
#pragma unroll 1
  for (WgradNdhwcSteps at(a, split); at.left > 0; at.advance(), ring.advance()) {
    mbarrier_wait(ring.landed(), ring.parity);
    const uint32_t stage = shared + ring.stage * Config::stage_bytes;
    // A warp has 32 columns of one box and eight positions, each lane a column.
    constexpr int octets = Config::positions / 8;
#pragma unroll 2
    for (int item = warp; item < boxes * octets; item += Config::transposing_warps) {
      const int box = item / octets, octet = item % octets;
      const uint32_t from = stage + box * Config::source_box_bytes + octet * 1024 + lane % 4 * 4;
      uint32_t word[8];
#pragma unroll
      for (int k = 0; k < 8; ++k)
        word[k] = load_shared(from + position_of(k) * 128 + (lane / 4 ^ position_of(k)) * 16);
      const int column = box * 32 + lane;
      if (Config::columns % 32 == 0 || column < Config::columns) {
        const uint32_t to =
            stage + Config::columns_offset + (octet * 2 * Config::columns + column) * 16;
        store_shared(to, word[0], word[1], word[2], word[3]);
        store_shared(to + Config::columns * 16, word[4], word[5], word[6], word[7]);
      }
    }
    if (at.reaches_out())
      clear_outside<Config>(at, stage, tile.target_boxes(), warp * 32 + lane, threads);
    fence_async_proxy();
    mbarrier_arrive(ring.full());
  }
}

/// Multiplies the steps of a split, rows in registers.
template <typename Config>
CONVT3D_DEVICE void consume_transposed(const WgradNdhwcArguments& a, uint32_t shared,
                                       WgradNdhwcRing<Config> ring, int warpgroup, int split,
                                       float (&sum)[Config::blocks][Config::sums]) {
  static_assert(Config::products % 2 == 0, "two sets of fragments take turns");
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32 % 4;
  // A block is two atoms; a warp has half of one.
  uint32_t atom_at[Config::blocks];
#pragma unroll
  for (int block = 0; block < Config::blocks; ++block)
    atom_at[block] =
        a.template atom_offset<Config>((warpgroup * Config::blocks + block) * 2 + warp / 2);
  // Words of fragments, of the first product, in an atom:
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int position = 2 * t + i / 2, piece = warp % 2 * 4 + i % 2 * 2 + g / 4;
    word[i] = shared + g % 4 * 4 + position * 128 + (piece ^ position) * 16;
  }
  const uint64_t first_columns =
      matrix_descriptor(shared + Config::columns_offset, Config::columns * 16, 128);
#pragma unroll
  for (int block = 0; block < Config::blocks; ++block) {
#pragma unroll
    for (int i = 0; i < Config::sums; ++i) sum[block][i] = 0.f;
    wgmma_fence_registers(sum[block]);
  }
  constexpr int block_bytes = 2 * Config::target_box_bytes;  // where no taps share a box
  uint32_t fragment[2][Config::blocks][4];
  int held = -1;  // the stage that the products before read
#pragma unroll 1
  for (int left = WgradNdhwcSteps(a, split).left; left > 0; --left) {
    ring.wait_full();
    const uint32_t stage = ring.stage * Config::stage_bytes;
    const uint64_t columns = first_columns + stage / 16;
#pragma unroll
    for (int product = 0; product < Config::products; ++product) {
      // The product before the last is done: its fragments are free, and at the second product
      // of a step so is the stage before.
      wgmma_wait<1>();
      if (product == 1)
        mbarrier_arrive_if(ring.empty(held < 0 ? 0 : held), held >= 0);
      auto& words = fragment[product % 2];
#pragma unroll
      for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          words[block][i] = load_shared(word[i] + stage + product * 1024 +
                                        (Config::shares ? atom_at[block]
                                                        : atom_at[0] + block * block_bytes));
      wgmma_fence();
#pragma unroll
      for (int block = 0; block < Config::blocks; ++block)
        wgmma_tf32_rs<Config::columns>(sum[block], words[block],
                                       columns + product * 2 * Config::columns);
      wgmma_commit();
    }
    held = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int block = 0; block < Config::blocks; ++block) wgmma_fence_registers(sum[block]);
}

}  // namespace convt3d
