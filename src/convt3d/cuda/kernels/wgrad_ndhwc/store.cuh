// The epilogue without a second pass: sums that are whole, of a CTA or of a cluster, whose CTAs
// share the K steps of one work tile.
//
// Accumulators hold 8 x 8 channels of a tap a warp. So a CTA writes them to shared memory, where
// the steps were, and each CTA of the cluster adds up some lines (device/cluster.cuh). Channels of
// the gradient are neighbours in a channels_last weight: a thread stores 16 bytes.
//
//     CTA 0                     CTA 1                               weight
//     [ci 0][tap, co]           [ci 0][tap, co]     CTA 0 adds up   [ci 0][tap 0][co] [tap 1][co]
//     [ci 1]                    [ci 1]              and stores      [ci 1]
//     ..                        ..                  CTA 1           ..
#pragma once
#include "device/cluster.cuh"
#include "wgrad_ndhwc/config.cuh"

namespace convt3d {

/// Sums of a CTA, in its shared memory, by a thread of those that multiply.
template <typename Config>
struct WgradNdhwcSums {
  static constexpr int pitch = Config::sum_pitch;  // of a channel of x
  static constexpr int vector = Config::vector;    // values of 16 bytes of the weight
  static constexpr int pieces = Config::target_tile / vector;  // of a line
  static constexpr int threads = 32 * Config::warps;
  static constexpr int together = threads / pieces;  // lines that are stored at once
  static constexpr int share = div_up(Config::source_tile, Config::cluster);  // lines of a CTA
  // Lines whose sums a thread has on their way.
  static constexpr int all_words = vector * Config::cluster;
  static constexpr int fetched = all_words > 32 ? 1 : 32 / all_words;
  static_assert(together > 0, "a thread stores one piece of a line");

  uint32_t shared;

  CONVT3D_DEVICE void put_down(const float (&sum)[Config::blocks][Config::sums]) const {
    constexpr int along_m = Config::taps_on_m ? 4 : 4 * pitch;
    constexpr int along_n = Config::taps_on_m ? 4 * pitch : 4;
    const int lane = threadIdx.x % 32, warpgroup = threadIdx.x / 128;
    const int row = warpgroup % Config::consumers_m * Config::blocks * 64 +
                    threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int column = warpgroup / Config::consumers_m * Config::columns + lane % 4 * 2;
    const uint32_t to = shared + row * along_m + column * along_n;
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int i = 0; i < Config::sums; i += 2) {
        const uint32_t at = to + (64 * block + i / 2 % 2 * 8) * along_m + i / 4 * 8 * along_n;
        if constexpr (Config::taps_on_m) {
          store_shared(at, sum[block][i]);
          store_shared(at + along_n, sum[block][i + 1]);
        } else {
          store_shared(at, bits_of(sum[block][i]), bits_of(sum[block][i + 1]));
        }
      }
  }

  /// Stores a CTA's lines. A thread keeps its piece, that is a tap and channels of the gradient.
  CONVT3D_DEVICE void store(const WgradNdhwcTile<Config>& tile,
                            const WgradNdhwcWeight<Config>& weight) const {
    using Storage = typename Config::Storage;
    const int piece = threadIdx.x % pieces, first = Config::rank() * share;
    const int column = piece * vector, number = tile.atom + column / Config::target_atom;
    const WgradNdhwcAtom<Config> atom(number);
    const int out = atom.channel + column % Config::target_atom;
    const int end =
        min(min(first + share, Config::source_tile), Config::source_channels - tile.channel);
    int line = first + threadIdx.x / pieces;
    // Channels are multiples of 16 bytes: a piece is there, or it is not.
    if (int(threadIdx.x) >= together * pieces || number >= Config::atoms ||
        out >= Config::target_channels)
      return;
    Storage* to = weight.at(tile.group, tile.channel + line, out, atom.k0, atom.k1, atom.k2);
    const bool whole = weight.has_lines();
#pragma unroll 1
    for (; line < end; line += fetched * together) {
      ClusterSums<Config::cluster, vector> sums[fetched];
#pragma unroll
      for (int i = 0; i < fetched; ++i)
        sums[i].fetch(shared + 4 * (min(line + i * together, end - 1) * pitch + column));
#pragma unroll
      for (int i = 0; i < fetched; ++i) {
        float total[vector];
#pragma unroll
        for (int j = 0; j < vector; ++j) total[j] = sums[i].total(j);
        if (line + i * together < end) {
          if (whole)
            store_row<typename Config::Type>(to, total);
          else
#pragma unroll
            for (int j = 0; j < vector; ++j)
              to[j * weight.stride_out] = Config::Type::store(total[j]);
        }
        to += together * weight.stride_in;
      }
    }
  }
};

/// By all consumers.
template <typename Config>
CONVT3D_DEVICE void store_whole(uint32_t shared, const WgradNdhwcTile<Config>& tile,
                                const WgradNdhwcWeight<Config>& weight,
                                const float (&sum)[Config::blocks][Config::sums]) {
  const WgradNdhwcSums<Config> sums{shared};
  named_barrier_sync(1, sums.threads);  // no product reads the stages any more
  sums.put_down(sum);
  if constexpr (Config::cluster > 1)
    cluster_sync();
  else
    named_barrier_sync(1, sums.threads);
  sums.store(tile, weight);
}

}  // namespace convt3d
