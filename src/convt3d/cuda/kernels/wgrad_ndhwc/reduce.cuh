// The second pass: adds the partial sums of all splits in ascending order and stores the weight.
//
// Partial sums lie as the products' threads have them: [split][work tile][pair][thread], where a
// pair is two neighbouring columns. So a warp's pairs are a block of 8 x 8 channels of one tap, 256
// bytes. In the weight neighbours are taps (contiguous) or channels of the gradient
// (channels_last): a block has but few of them. So a CTA takes a run of blocks along that axis, puts
// their sums together in shared memory, and stores lines of the weight:
//
//     partial sums, a block each         shared memory             weight, along taps
//     .-------. .-------. .---      .---------------------.      in 0: out 0 [taps] out 1 [taps] ...
//     | 8 x 8 | | 8 x 8 | |    ---> | 64 x (run | 1) sums | ---> in 1: ...
//     '-------' '-------' '---      '---------------------'
//
// An odd pitch keeps the stores of a warp in different banks. A CTA has eight warps, which sum up
// four blocks each at a time, or one where the run is short; then each stores a channel of x.
#pragma once
#include "device/ptx.cuh"
#include "geometry/axis.cuh"
#include "wgrad_ndhwc/config.cuh"

namespace convt3d {

/// The blocks of a CTA: `run` of them along the taps, or along the gradient's channels.
template <typename Config>
struct ReducedRun {
  static constexpr int in_octets = div_up(Config::source_channels, 8);
  static constexpr int out_octets = div_up(Config::target_channels, 8);
  static constexpr bool along_taps = Config::along_taps;
  int group, in, out, tap;  // of the first block: its group, first channels and tap
  int count;                // blocks, fewer than `run` at the end of the axis

  CONVT3D_DEVICE explicit ReducedRun(int run) {
    const int all = along_taps ? Config::taps : out_octets, runs = div_up(all, run);
    const int first = blockIdx.x % runs * run;
    int index = blockIdx.x / runs;
    const int other = along_taps ? out_octets : Config::taps;
    tap = along_taps ? first : index % other;
    out = 8 * (along_taps ? index % other : first);
    index /= other;
    in = index % in_octets * 8;
    group = index / in_octets;
    count = min(run, all - first);
  }
  CONVT3D_DEVICE int tap_of(int block) const { return along_taps ? tap + block : tap; }
  CONVT3D_DEVICE int out_of(int block) const { return along_taps ? out : out + 8 * block; }
  /// Where a block's pairs begin in a split.
  CONVT3D_DEVICE int64_t pairs_of(int block) const {
    const int first_out = out_of(block);
    const int number = first_out / Config::target_atom * Config::taps +
                       WgradNdhwcAtom<Config>::number_of(tap_of(block));
    const int source = in % Config::source_tile;
    const int target =
        number % Config::target_atoms * Config::target_atom + first_out % Config::target_atom;
    const int tile = (group * Config::target_tiles + number / Config::target_atoms) *
                         Config::source_tiles + in / Config::source_tile;
    const int m = Config::taps_on_m ? target : source, n = Config::taps_on_m ? source : target;
    const int warpgroup = n / Config::columns * Config::consumers_m + m / (64 * Config::blocks);
    const int pair = m / 64 % Config::blocks * (Config::sums / 2) +
                     n % Config::columns / 8 * 2 + m / 8 % 2;
    return (int64_t(tile) * Config::pairs + pair) * (32 * Config::warps) + warpgroup * 128 +
           m / 16 % 4 * 32;
  }
};

/// Sums of `Blocks` blocks of a warp, every `apart`-th from the first, with the loads of `Splits`
/// splits of all of them on their way, into shared memory.
template <typename Config, int Blocks, int Splits>
CONVT3D_DEVICE void sum_blocks(const float2* partial, int splits, const ReducedRun<Config>& run,
                               int first, int apart, float* staged, int pitch) {
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  const float2* from[Blocks];
  float2 total[Blocks];
#pragma unroll
  for (int i = 0; i < Blocks; ++i) {
    const int block = first + i * apart;
    from[i] = partial + run.pairs_of(block < run.count ? block : first) + lane;
    total[i] = make_float2(0.f, 0.f);
  }
#pragma unroll 1
  for (int split = 0; split < splits; split += Splits) {
    float2 part[Splits][Blocks];
#pragma unroll
    for (int s = 0; s < Splits; ++s)
#pragma unroll
      for (int i = 0; i < Blocks; ++i) {
        part[s][i] = make_float2(0.f, 0.f);
        if (split + s < splits && first + i * apart < run.count)
          part[s][i] = from[i][(split + s) * Config::split_pairs];
      }
#pragma unroll
    for (int s = 0; s < Splits; ++s)
#pragma unroll
      for (int i = 0; i < Blocks; ++i)
        total[i] = make_float2(total[i].x + part[s][i].x, total[i].y + part[s][i].y);
  }
  // [in][out][block]; the rows of a block are M.
  const int at = Config::taps_on_m ? column * 8 + row : row * 8 + column;
#pragma unroll
  for (int i = 0; i < Blocks; ++i) {
    const int block = first + i * apart;
    if (block >= run.count) break;
    staged[at * pitch + block] = total[i].x;
    staged[(at + (Config::taps_on_m ? 8 : 1)) * pitch + block] = total[i].y;
  }
}

template <typename Config>
CONVT3D_DEVICE void reduce(const float2* partial, int splits, int blocks,
                           const WgradNdhwcWeight<Config>& weight) {
  extern __shared__ __align__(1024) unsigned char shared_start[];
  float* staged = reinterpret_cast<float*>(shared_start);
  constexpr int warps = 8, together = 4;
  const int pitch = blocks | 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const ReducedRun<Config> run(blocks);
  if (run.count <= warps) {
    if (warp < run.count)
      sum_blocks<Config, 1, 2 * together>(partial, splits, run, warp, warps, staged, pitch);
  } else {
#pragma unroll 1
    for (int first = warp; first < run.count; first += together * warps)
      sum_blocks<Config, together, together>(partial, splits, run, first, warps, staged, pitch);
  }
  __syncthreads();
  const int in = run.in + warp, channels = Config::target_channels - run.out;
  if (in >= Config::source_channels) return;
  const float* from = staged + warp * 8 * pitch;
  constexpr int each = Config::along_taps ? 8 : 1;  // neighbouring channels that a lane stores
#pragma unroll 1
  for (int i = lane; i < 8 / each * run.count; i += 32) {
    const int first = Config::along_taps ? 0 : i, k = run.tap_of(i);
    if (first >= channels) break;
    auto* to = weight.at(run.group, in, run.out + first, k / (Layer::kernel1 * Layer::kernel2),
                         k / Layer::kernel2 % Layer::kernel1, k % Layer::kernel2);
#pragma unroll
    for (int c = 0; c < each; ++c)
      if (each == 1 || c < channels)
        to[c * weight.stride_out] = Config::Type::store(
            Config::along_taps ? from[c * pitch + i] : from[i % 8 * pitch + i / 8]);
  }
}

}  // namespace convt3d
