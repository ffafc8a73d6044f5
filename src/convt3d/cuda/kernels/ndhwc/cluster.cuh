// Split-K of strided and unstrided channels_last layers (device/cluster.cuh): each CTA of a cluster
// takes some chunks and taps of W of one work tile. Its sums lie where the rings were, and it adds
// up and stores some columns of the tile.
//
//       sums of a CTA, in its shared memory           what CTA 1 of 4 adds up and stores
//       [block][4 registers][thread]                  columns 1/4 .. 2/4 of the tile, all rows
#pragma once
#include "device/cluster.cuh"
#include "ndhwc/config.cuh"

namespace convt3d {

/// The pairs of a chunk and a tap of W, chunks first, that a CTA of the cluster multiplies.
template <typename Config>
struct NdhwcShare {
  int begin, end;

  CONVT3D_DEVICE explicit NdhwcShare(const WorkTile& work) {
    const int all = work.taps_of_chunk() ? Config::chunks * work.taps[2].count : 0;
    begin = all * Config::rank() / Config::cluster;
    end = all * (Config::rank() + 1) / Config::cluster;
  }
  CONVT3D_DEVICE bool has(int pair) const {
    return Config::cluster == 1 || (begin <= pair && pair < end);
  }
};

/// A consumer's part in adding up the sums of its cluster.
template <typename Config>
struct NdhwcCluster {
  static constexpr int threads = 128 * Config::consumers;
  static constexpr int registers = Config::stored_columns / 2;  // of a block, that a CTA adds up
  static constexpr int vectors = 2;  // of four registers, whose words are on their way
  static constexpr int pitch = 16 * threads;  // bytes from a vector to a thread's next one
  static_assert(registers % (4 * vectors) == 0 && Config::sums % 4 == 0, "whole vectors");
  uint32_t own;

  CONVT3D_DEVICE explicit NdhwcCluster(uint32_t shared)
      : own(shared + Config::weight_offset + threadIdx.x * 16) {}

  /// Leaves the totals of this CTA's columns in the first registers of each block.
  CONVT3D_DEVICE void add(float (&sum)[Config::blocks][Config::sums]) const {
    named_barrier_sync(1, threads);  // no product reads the rings any more
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int i = 0; i < Config::sums; i += 4) {
        const float* four = sum[block] + i;
        store_shared(own + (block * Config::sums + i) / 4 * pitch, bits_of(four[0]),
                     bits_of(four[1]), bits_of(four[2]), bits_of(four[3]));
      }
    cluster_sync();
    const int first = Config::rank() * registers;
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int begin = 0; begin < registers; begin += 4 * vectors) {
        ClusterSums<Config::cluster, 4> fetched[vectors];
#pragma unroll
        for (int v = 0; v < vectors; ++v) {
          // The last CTAs may have fewer columns, and add up others that they do not store.
          const int at = block * Config::sums + min(first + begin + 4 * v, Config::sums - 4);
          fetched[v].fetch(own + at / 4 * pitch);
        }
#pragma unroll
        for (int i = 0; i < 4 * vectors; ++i) sum[block][begin + i] = fetched[i / 4].total(i % 4);
      }
  }
};

}  // namespace convt3d
