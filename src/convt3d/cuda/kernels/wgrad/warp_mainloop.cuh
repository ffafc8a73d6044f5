// The IEEE-grade mainloop for few columns, which would leave most of a wgmma unused: mma.sync with
// both operands split in two TF32 parts, three products of a pair.
#pragma once
#include "device/barrier.cuh"
#include "wgrad/layout.cuh"
#include "wgrad/rows.cuh"

namespace convt3d {

/// Some products of a warp's 16 rows of each block, by mma.sync. Tensor cores truncate when they
/// add: few products are summed there. `masked`: some lie beyond the gradient's row.
template <typename Config, int blocks, bool masked>
CONVT3D_DEVICE void multiply_group(float (&sum)[blocks][Config::columns / 8][4],
                                   const RowReader<Config> (&reader)[blocks],
                                   const BlockRows<WgradLayout<Config>, blocks>& rows,
                                   ProductWalk<WgradLayout<Config>>& walk) {
  constexpr int tiles = Config::columns / 8;
  const uint32_t columns = threadIdx.x % 4 * 4 +
                           threadIdx.x % 32 / 4 * (Config::split_columns ? 128 : 16);
  float part[blocks][tiles][4];
#pragma unroll
  for (int b = 0; b < blocks; ++b)
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) part[b][n][r] = 0.f;
#pragma unroll
  for (int f = 0; f < Config::fragments; ++f) {
    uint32_t big[tiles][2], small[tiles][2];
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (Config::split_columns) {
          // 128 bytes of a row for each lane of a group, under the swizzle.
          const uint32_t from = (walk.x + h * 16) ^ (threadIdx.x % 32 / 4 * 16);
          MathIeee::split(load_shared(from + columns + n * 1024), big[n][h], small[n][h]);
        } else {
          // 16 bytes of a column hold four positions: one for each lane of a group.
          const uint32_t from = walk.x + columns + n * 128 + h * walk.half_x;
          big[n][h] = load_shared(from);
          small[n][h] = load_shared(from + walk.l.x_part);
        }
      }
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      uint32_t raw[4];
      reader[b].fetch(raw, walk.g, walk.half_g, f);
      if constexpr (masked) rows.mask(b, walk.along(), raw);
      MathIeee::A a;
      MathIeee::prepare(a, raw);
#pragma unroll
      for (int n = 0; n < tiles; ++n) {
        mma_tf32(part[b][n], a.small, big[n]);
        mma_tf32(part[b][n], a.big, small[n]);
        mma_tf32(part[b][n], a.big, big[n]);
      }
    }
    walk.advance();
  }
#pragma unroll
  for (int b = 0; b < blocks; ++b)
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) sum[b][n][r] += part[b][n][r];
}

/// Each warp multiplies its 16 rows of a block by itself.
template <typename Config, int blocks>
CONVT3D_DEVICE void consume_warps(const WgradLayout<Config>& l, int consumer) {
  const BlockRows<WgradLayout<Config>, blocks> rows(l, consumer);
  ProductWalk<WgradLayout<Config>> walk(l);
  constexpr int tiles = Config::columns / 8;

  float sum[blocks][tiles][4];
#pragma unroll
  for (int b = 0; b < blocks; ++b)
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) sum[b][n][r] = 0.f;
  RowReader<Config> reader[blocks];

  WgradSteps<WgradLayout<Config>> at(l);
#pragma unroll 1
  for (; at.step < l.end; at.advance()) {
    mbarrier_wait(l.full(at.stage), at.phase);
    const uint32_t slab = l.x_ring + at.stage * l.x_slab;
#pragma unroll 1
    for (int slice = 0; slice < walk.slices(); ++slice) {
      rows.point(reader, at, slice);
      walk.begin(slab, slice);
#pragma unroll 1
      for (int product = 0; product < walk.products; product += Config::fragments) {
        if (Config::joined && rows.group_reaches_out(walk))
          multiply_group<Config, blocks, true>(sum, reader, rows, walk);
        else
          multiply_group<Config, blocks, false>(sum, reader, rows, walk);
      }
    }
    l.leave(at.stage);
  }
  float* out = l.a.partial + int64_t(blockIdx.x) * Config::cta_elements + threadIdx.x % 128;
#pragma unroll
  for (int b = 0; b < blocks; ++b)
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        out[((b * Config::consumers + consumer) * Config::registers + n * 4 + r) * 128] =
            sum[b][n][r];
}

}  // namespace convt3d
