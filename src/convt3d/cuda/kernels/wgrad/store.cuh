// The epilogue without a second pass: a CTA transposes whole sums in shared memory and stores the
// weight itself, or the CTAs of a cluster, which share the steps of the same sums, add them up
// first.
#pragma once
#include "device/cluster.cuh"
#include "wgrad/layout.cuh"

namespace convt3d {

/// Stores the sums of a CTA, which are whole: through shared memory, where they lie as
/// [column][row], so that neighbouring threads store neighbouring taps and channels.
template <typename Config, int blocks>
CONVT3D_DEVICE void store_weight(const WgradLayout<Config>& l, int consumer,
                                 const float (&sum)[blocks][Config::registers]) {
  constexpr int pitch = Config::sum_pitch;
  constexpr int threads = 128 * Config::consumers;
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const uint32_t to = l.x_ring + ((lane % 4 * 2) * pitch + thread / 32 * 16 + lane / 4) * 4;
  l.meet(0);  // the rings are read
#pragma unroll
  for (int b = 0; b < blocks; ++b)
#pragma unroll
    for (int r = 0; r < Config::registers; ++r)
      store_shared(to + ((r / 4 * 8 + r % 2) * pitch +
                         (b * Config::consumers + consumer) * 64 + r % 4 / 2 * 8) *
                            4,
                   sum[b][r]);
  l.meet(1);
  // A thread keeps its tap and channel of the gradient and walks along the channels of x: finding
  // out where an element lies takes ten times as long as moving it.
  constexpr int kernel1 = Layer::kernel1, kernel = Config::taps0 * kernel1 * Config::taps2;
  constexpr int each = Config::channel_tile_m * kernel;  // elements of a channel of x
  constexpr int together = each < threads ? threads / each : 1;
  const int first_row = l.tile.row_tile * Config::cta_blocks * 64;
  const int live = min(Config::channel_tile_n, Config::source_channels - l.tile.channel_n);
#pragma unroll 1
  for (int i = consumer * 128 + thread; i < together * each; i += threads) {
    const int k2 = i % Config::taps2, k1 = i / Config::taps2 % kernel1;
    const int k0 = i / (Config::taps2 * kernel1) % Config::taps0;
    const int m = i / kernel % Config::channel_tile_m, first = i / each;
    const int tap = (k0 * Config::taps1 + k1 % Config::taps1) * Config::taps2 + k2;
    const int row = WgradRow<Config>::index(tap, m) - first_row;
    const int column =
        (Config::column_taps - 1 - k1 / Config::taps1) * Config::channel_tile_n + first;
    const int out = l.tile.target_channel(m);
    if (unsigned(row) >= unsigned(Config::cta_blocks * 64) || out >= Config::target_channels)
      continue;
    uint32_t from = l.x_ring + (column * pitch + row) * 4;
    auto* at = l.a.weight.at(l.tile.group, l.tile.channel_n + first, out, k0, k1, k2);
#pragma unroll 8
    for (int n = first; n < live; n += together) {
      *at = Config::Type::store(__uint_as_float(load_shared(from)));
      from += together * pitch * 4;
      at += together * l.a.weight.stride_in;
    }
  }
}

/// Where a row lies in a column of a cluster's sums: neighbouring taps and channels of k2 layers,
/// as the lanes of a fragment, find different banks.
CONVT3D_DEVICE uint32_t in_column(int row) {
  return (row ^ (row >> 5 & 1) << 1 ^ (row >> 6 & 1) << 4) * 4;
}

/// Puts the sums of a CTA down where the rings were, as [column][row], for all of its cluster.
template <typename Config, int blocks>
CONVT3D_DEVICE void put_down(const WgradLayout<Config>& l, int consumer,
                             const float (&sum)[blocks][Config::registers]) {
  static_assert(Config::consumers == 2 || blocks == 1, "blocks do not change the order of rows");
  constexpr int pitch = Config::sum_pitch;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  // One address: with two ptxas serialised the products.
  const uint32_t to =
      l.x_ring + lane % 4 * 2 * pitch * 4 + in_column(consumer * 64 + warp * 16 + lane / 4);
  l.meet(0);  // the rings are read
#pragma unroll
  for (int b = 0; b < blocks; ++b)
#pragma unroll
    for (int r = 0; r < Config::registers; ++r)
      store_shared(to + ((r / 4 * 8 + r % 2) * pitch + b * Config::consumers * 64 +
                         r % 4 / 2 * 8) * 4,
                   sum[b][r]);
}

/// Adds up a CTA's share of its cluster's columns, in the order of the CTAs, and stores them:
/// neighbouring threads store neighbouring taps and channels.
template <typename Config>
CONVT3D_DEVICE void add_cluster(const WgradLayout<Config>& l, int thread) {
  constexpr int rows = Config::channel_tile_m * Config::taps, threads = 128 * Config::consumers;
  constexpr int together = rows < threads ? threads / rows : 1;
  constexpr int share = Config::columns / Config::cluster;
  constexpr int fetched = 8;  // columns whose sums are on their way
  const int first_column = blockIdx.x % Config::cluster * share;
  const int live = min(Config::channel_tile_n, Config::source_channels - l.tile.channel_n);
  const int last = min(first_column + share, live);
#pragma unroll 1
  for (int i = thread; i < together * rows; i += threads) {
    const int tap = i % Config::taps, m = i / Config::taps % Config::channel_tile_m;
    const uint32_t from = l.x_ring + in_column(WgradRow<Config>::index(tap, m));
    const int out = l.tile.target_channel(m);
    if (out >= Config::target_channels) continue;
    auto* column = l.a.weight.at(l.tile.group, l.tile.channel_n, out,
                                 tap / (Config::taps1 * Config::taps2),
                                 tap / Config::taps2 % Config::taps1, tap % Config::taps2);
#pragma unroll 1
    for (int n = first_column + i / rows; n < last; n += fetched * together) {
      ClusterSums<Config::cluster, 1> sums[fetched];
#pragma unroll
      for (int j = 0; j < fetched; ++j)
        sums[j].fetch(from + min(n + j * together, last - 1) * (Config::sum_pitch * 4));
#pragma unroll
      for (int j = 0; j < fetched; ++j) {
        const int in = n + j * together;
        if (in < last) column[in * l.a.weight.stride_in] = Config::Type::store(sums[j].total(0));
      }
    }
  }
}

}  // namespace convt3d
