// The second pass: adds the partial sums of all splits in ascending order and stores the weight
// and, where it is asked for, the gradient by bias.
#pragma once
#include "wgrad/layout.cuh"

namespace convt3d {

/// What a thread of the second pass adds up: some taps of a channel of the gradient, in four
/// columns, every second one. The first of each:
template <typename Config>
struct SumItem {
  int channel, tap, column;
  CONVT3D_DEVICE explicit SumItem(int item)
      : channel(item % Config::channel_tile_m),
        tap(item / Config::channel_tile_m % Config::tap_groups * Config::item_taps) {
    const int four = item / (Config::channel_tile_m * Config::tap_groups);
    column = four / 2 * 8 + four % 2;
  }
  CONVT3D_DEVICE bool live(const WgradTile<Config>& tile) const {
    return column < Config::columns && tile.target_channel(channel) < Config::target_channels;
  }
};

/// Adds the partial sums of all splits, in the same order every time, and stores them in the
/// weight. What a block stores lies together. 2^`share_bits` threads take the splits of an item
/// in turn.
template <typename Config>
CONVT3D_DEVICE void reduce(const float* partial, const WgradWeight<Config>& weight, int share_bits,
                           int splits_full, int splits_last) {
  extern __shared__ __align__(1024) unsigned char shared[];
  float* sums = reinterpret_cast<float*>(shared);
  using Item = SumItem<Config>;
  constexpr int threads = 256, taps = Config::item_taps;
  constexpr int pitch = taps | 1;  // of an item in shared memory, against conflicts
  constexpr int cta_octets = Config::cta_blocks * 8;
  const int item_bits = 8 - share_bits, items = 1 << item_bits;  // of a block, which has one owner
  const int tile_index = blockIdx.x % Config::tiles;
  const int first_item = int(blockIdx.x / Config::tiles) << item_bits;
  const WgradTile<Config> tile(tile_index * Config::cluster, 1, 1);  // for its channels alone
  const int own = threadIdx.x & (items - 1), share = threadIdx.x >> item_bits;
  const Item item(first_item + own);

  float4 sum[taps];
#pragma unroll
  for (int t = 0; t < taps; ++t) sum[t] = make_float4(0.f, 0.f, 0.f, 0.f);
  grid_dependency_wait();
  if (item.live(tile)) {
    // Where a tap's four sums are: in which CTA of a split, and where of its sums.
    int row_tile[taps], within[taps], splits[taps];
    const int first_row = WgradRow<Config>::index(item.tap, item.channel);
#pragma unroll
    for (int t = 0; t < taps; ++t) {
      const int live_t = item.tap + t < Config::taps ? t : 0;
      const int row = first_row + live_t / Config::octet_taps * Config::channel_octets * 8 +
                      live_t % Config::octet_taps * Config::octet_channels;
      const int octet = row / 8;
      const int in_cta = Config::row_tiles == 1 ? octet : octet % cta_octets;
      row_tile[t] = Config::row_tiles == 1 ? 0 : octet / cta_octets;
      splits[t] = row_tile[t] == Config::row_tiles - 1 ? splits_last : splits_full;
      within[t] = (in_cta / 8 * Config::registers + item.column / 8 * 4 + in_cta % 2 * 2 +
                   item.column % 8) * 128 + in_cta / 2 % 4 * 32 + row % 8 * 4;
    }
    constexpr int together = 2;  // splits whose sums are on their way
    const int most = max(Config::row_tiles > 1 ? splits_full : 0, splits_last);
#pragma unroll 1
    for (int first = share; first < most; first += together << share_bits) {
      // Loads without conditions, which would wait for each other.
      float4 part[together][taps];
#pragma unroll
      for (int s = 0; s < together; ++s)
#pragma unroll
        for (int t = 0; t < taps; ++t) {
          const int split = min(first + (s << share_bits), splits[t] - 1);
          const int block = row_tile[t] == Config::row_tiles - 1
                                ? (Config::row_tiles - 1) * splits_full + split
                                : split * (Config::row_tiles - 1) + row_tile[t];
          part[s][t] = *reinterpret_cast<const float4*>(
              partial + (int64_t(block) * Config::tiles + tile_index) * Config::cta_elements +
              within[t]);
        }
#pragma unroll
      for (int s = 0; s < together; ++s)
#pragma unroll
        for (int t = 0; t < taps; ++t)
          if (first + (s << share_bits) < splits[t])
            sum[t] = make_float4(sum[t].x + part[s][t].x, sum[t].y + part[s][t].y,
                                 sum[t].z + part[s][t].z, sum[t].w + part[s][t].w);
    }
  }
  // [share][column][item][tap]
  float* to = sums + (share * 4 * items + own) * pitch;
#pragma unroll
  for (int t = 0; t < taps; ++t) {
    const float four[4] = {sum[t].x, sum[t].y, sum[t].z, sum[t].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i * items * pitch + t] = four[i];
  }
  __syncthreads();
  // Neighbouring threads store neighbouring taps, and channels of the gradient.
#pragma unroll 1
  for (int pair = threadIdx.x; pair < items * taps; pair += threads) {
    const int place = pair / taps;
    const Item at(first_item + place);
    const WgradRow<Config> row = WgradRow<Config>::of(at.tap + pair % taps, at.channel);
    const int in = tile.channel_n + at.column % Config::channel_tile_n;
    const int k1 = Config::tap1(row.k1(), at.column);
    if (!at.live(tile) || row.tap >= Config::taps || k1 >= Layer::kernel1) continue;
    float total[4] = {};
    const float* from = sums + place * pitch + pair % taps;
    int left = 1 << share_bits;
#pragma unroll 1
    do {
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] += from[i * items * pitch];
      from += 4 * items * pitch;
    } while (--left > 0);
    auto* out = weight.at(tile.group, in, tile.target_channel(at.channel), row.k0(), k1, row.k2());
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (in + 2 * i < Config::source_channels)
        out[2 * i * weight.stride_in] = Config::Type::store(total[i]);
  }
}

/// Adds the gradient's sums of all splits, and of the taps that share out its positions: a warp
/// for each channel.
template <typename Config>
CONVT3D_DEVICE void reduce_bias(const float* sums, typename Config::Storage* bias, int channel,
                                int splits_full, int splits_last) {
  constexpr int cta_rows = Config::cta_blocks * 64;
  if (channel >= Config::groups * Config::target_channels) return;
  const int group = channel / Config::target_channels, in_group = channel % Config::target_channels;
  const int tile_m = in_group / Config::channel_tile_m;
  const int tile_index =
      (group * Config::channel_tiles_m + tile_m) * Config::channel_tiles_n;  // x channels: the first
  grid_dependency_wait();
  float total = 0.f;
  for (int tap = 0; tap < Config::taps; ++tap) {
    if (!Config::adds(tap / (Config::taps1 * Config::taps2), tap / Config::taps2 % Config::taps1,
                      tap % Config::taps2))
      continue;
    const int row = WgradRow<Config>::index(tap, in_group % Config::channel_tile_m);
    const int row_tile = row / cta_rows;
    const int share = row_tile == Config::row_tiles - 1 ? row_tile * splits_full : row_tile;
    const WgradTile<Config> tile((share * Config::tiles + tile_index) * Config::cluster, splits_full,
                                 splits_last);
    for (int split = threadIdx.x % 32; split < tile.splits; split += 32)
      total += sums[tile.block_of(tile_index, split, splits_full) * cta_rows + row % cta_rows];
  }
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2)
    total += __shfl_xor_sync(0xffffffffu, total, apart);
  if (threadIdx.x % 32 == 0) bias[channel] = Config::Type::store(total);
}

}  // namespace convt3d
