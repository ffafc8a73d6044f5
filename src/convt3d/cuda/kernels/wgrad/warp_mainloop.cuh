// IEEE-grade mainloops for few columns, which would leave most of a wgmma unused: mma.sync with
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

/// The same in IEEE-grade arithmetic for few columns, which would leave most of a wgmma unused:
/// each warp multiplies its 16 rows of a block by itself.
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

/// One product of all rows of a warpgroup, which are columns of mma.sync here, as x's columns are
/// its rows: x is split once for all of them. Words of the next pairs are on their way while
/// these are multiplied.
template <typename Config, int pairs, int tiles, bool masked>
CONVT3D_DEVICE void multiply_pairs(
    float (&part)[pairs][2][tiles][4], MathIeee::A (&x)[tiles],
    const RowReader<Config> (&reader)[pairs],
    const BlockRows<WgradLayout<Config>, pairs, true>& rows,
    const ProductWalk<WgradLayout<Config>>& walk, int product) {
  // Two or three pairs at a time: products that add to the same sums are some apart.
  constexpr int each = pairs > 1 ? div_up(pairs, pairs / 2) : 1;
  uint32_t raw[each][4];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int b = 0; b < each; ++b)
      if (first + b < pairs) reader[first + b].fetch(raw[b], walk.g, walk.half_g, product);
  };
  fetch(0);
  if constexpr (Config::split_columns) {
#pragma unroll
    for (int m = 0; m < tiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) MathIeee::split(x[m].big[i], x[m].big[i], x[m].small[i]);
  }
#pragma unroll
  for (int first = 0; first < pairs; first += each) {
    uint32_t big[each][2][2], small[each][2][2];  // of a pair: octet, half of the depth
#pragma unroll
    for (int b = 0; b < each; ++b) {
      if (first + b >= pairs) continue;
      if constexpr (masked) rows.mask(first + b, walk.along(), raw[b]);
#pragma unroll
      for (int r = 0; r < 4; ++r)
        MathIeee::split(raw[b][r], big[b][r % 2][r / 2], small[b][r % 2][r / 2]);
    }
    fetch(first + each);
#pragma unroll
    for (int term = 0; term < 3; ++term)
#pragma unroll
      for (int b = 0; b < each; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int m = 0; m < tiles; ++m)
            if (first + b < pairs)
              mma_tf32(part[first + b][h][m], term == 0 ? x[m].small : x[m].big,
                       term == 1 ? small[b][h] : big[b][h]);
  }
}

/// IEEE-grade arithmetic of few columns and rows: warps take products in turn, each with all rows
/// of its warpgroup, and add up their sums in order at the end.
template <typename Config, int blocks, int pairs>
CONVT3D_DEVICE void consume_split_k(const WgradLayout<Config>& l, int consumer) {
  using Layout = WgradLayout<Config>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const BlockRows<Layout, pairs, true> rows(l, consumer);
  ProductWalk<Layout> walk(l);
  constexpr int columns8 = Config::columns / 8, tiles = div_up(columns8, 2);
  const int products = l.a.tile1 * l.a.tile2 / Config::depth;
  const uint32_t columns = lane % 4 * 4 + lane / 4 * (Config::split_columns ? 128 : 16);

  float sum[pairs][2][tiles][4] = {};
  RowReader<Config> reader[pairs];
  WgradSteps<Layout> at(l);
#pragma unroll 1
  for (; at.step < l.end; at.advance()) {
    mbarrier_wait(l.full(at.stage), at.phase);
    const uint32_t slab = l.x_ring + at.stage * l.x_slab;
#pragma unroll 1
    for (int slice = 0; slice < l.a.tile0; ++slice) {
      rows.point(reader, at, slice);
      // Tensor cores truncate when they add: few products are summed there.
#pragma unroll 1
      for (int first = warp; first < products; first += 4 * Config::fragments) {
        float part[pairs][2][tiles][4] = {};
#pragma unroll 1
        for (int product = first; product < min(first + 4 * Config::fragments, products);
             product += 4) {
          walk.seek(slab, slice, product);
          MathIeee::A x[tiles];
#pragma unroll
          for (int n = 0; n < 2 * tiles; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              uint32_t& big = x[n / 2].big[2 * h + n % 2];
              uint32_t& small = x[n / 2].small[2 * h + n % 2];
              if (n >= columns8) {
                big = small = 0;
              } else if constexpr (Config::split_columns) {
                // 128 bytes of a row for each lane of a group, under the swizzle.
                const uint32_t from = (walk.x + h * 16) ^ (lane / 4 * 16);
                big = load_shared(from + columns + n * 1024);
              } else {
                const uint32_t from = walk.x + columns + n * 128 + h * walk.half_x;
                big = load_shared(from);
                small = load_shared(from + l.x_part);
              }
            }
          if (Config::joined && rows.reaches_out(walk.along()))
            multiply_pairs<Config, pairs, tiles, true>(part, x, reader, rows, walk, product);
          else
            multiply_pairs<Config, pairs, tiles, false>(part, x, reader, rows, walk, product);
        }
#pragma unroll
        for (int b = 0; b < pairs; ++b)
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int m = 0; m < tiles; ++m)
#pragma unroll
              for (int r = 0; r < 4; ++r) sum[b][h][m][r] += part[b][h][m][r];
      }
    }
    l.leave(at.stage);
  }

  // Sums lie as [column][row] where the rings were.
  constexpr int pitch = Config::sum_pitch;
  l.meet(0);
#pragma unroll 1
  for (int turn = 0; turn < 4; ++turn) {
    if (turn == warp) {
#pragma unroll
      for (int b = 0; b < pairs; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int m = 0; m < tiles; ++m)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
              if (2 * m + r / 2 >= columns8) continue;
              const int column = m * 16 + r / 2 * 8 + lane / 4;
              const int row = (b / 4 * Config::consumers + consumer) * 64 + b % 4 * 16 + h * 8 +
                              lane % 4 * 2 + r % 2;
              const uint32_t to = l.x_ring + (column * pitch + row) * 4;
              const float before = turn == 0 ? 0.f : __uint_as_float(load_shared(to));
              store_shared(to, before + sum[b][h][m][r]);
            }
    }
    named_barrier_sync(2 + consumer, 128);
  }
  float* out = l.a.partial + int64_t(blockIdx.x) * Config::cta_elements + threadIdx.x % 128;
#pragma unroll 1
  for (int b = 0; b < blocks; ++b)
#pragma unroll
    for (int r = 0; r < Config::registers; ++r) {
      const int block = b * Config::consumers + consumer;
      const int row = block * 64 + warp * 16 + r % 4 / 2 * 8 + lane / 4;
      const int column = r / 4 * 8 + lane % 4 * 2 + r % 2;
      out[(block * Config::registers + r) * 128] =
          __uint_as_float(load_shared(l.x_ring + (column * pitch + row) * 4));
    }
}

}  // namespace convt3d
