// Packs the weights of a strided kernel. Runs before every product: weights are never stale.
#include "ampere/strided/config.cuh"
#include "pack/fragments.cuh"
#include "pack/scales.cuh"

namespace convt3d {

/// Weights that come first: [group][column tile][step][block][fragment][big, small][lane][4
/// words]. A thread writes four words of a part.
template <typename Config>
CONVT3D_DEVICE void pack_blocks(const Packer<Config>& packer, uint32_t* packed) {
  using Math = typename Config::Math;
  using Blocks = typename Config::Blocks;
  constexpr int steps = Config::chunks * Config::depth;
  constexpr int64_t quads =
      int64_t(Config::groups) * Config::column_tiles * steps * Config::step_weight_words / 4;
  for (int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; index < quads;
       index += int64_t(gridDim.x) * blockDim.x) {
    const int lane = int(index % 32);
    const bool small_part = index / 32 % 2 != 0;
    int64_t rest = index / 64;
    const int fragment = int(rest % Config::fragments_n);
    rest /= Config::fragments_n;
    const int block = int(rest % Blocks::count);
    rest /= Blocks::count;
    const int step = int(rest % steps);
    rest /= steps;
    const int column_tile = int(rest % Config::column_tiles);
    const int group = int(rest / Config::column_tiles);
    const int column = column_tile * Config::column_tile + fragment * 8 + lane / 4;
    // Rows of the first slot are words 0 and 2, those of the second 1 and 3.
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const auto taps = Blocks::taps_of(block, slot);
      const bool exists = taps.tap[0] >= 0 && taps.tap[1] >= 0 && taps.tap[2] >= 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = step * Config::step_channels + Config::word_of(lane % 4, half);
        uint32_t big = 0, small = 0;
        if (exists)
          Math::split(bits_of(packer.at(group, channel, column, taps.tap[0], taps.tap[1],
                                        taps.tap[2])),
                      big, small);
        packed[4 * index + 2 * half + slot] = small_part ? small : big;
      }
    }
  }
}

/// The same for F16x3. CTAs of an N tile pack eight channels: first, each finds what these are
/// scaled by.
template <typename Config>
CONVT3D_DEVICE void pack_f16x3(const Packer<Config>& packer, uint32_t* packed) {
  using Math = typename Config::Math;
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  using Blocks = typename Config::Halves;
  constexpr int n_tiles = Config::groups * Config::column_tiles * Config::fragments_n;
  __shared__ int exponents[8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int n_tile = blockIdx.x % n_tiles, part = blockIdx.x / n_tiles, parts = gridDim.x / n_tiles;
  const int fragment = n_tile % Config::fragments_n;
  const int column_tile = n_tile / Config::fragments_n % Config::column_tiles;
  const int group = n_tile / Config::fragments_n / Config::column_tiles;
  const int first_column = column_tile * Config::column_tile + fragment * 8;
  uint32_t* const chunk =
      packed + int64_t(n_tile / Config::fragments_n) * Config::chunk_weight_words;

  const int exponent = channel_exponent(packer, group, first_column + warp, lane);
  if (lane == 0) {
    exponents[warp] = exponent;
    if (part == 0)
      chunk[Config::weight_scales + 8 * fragment + warp] = bits_of(Math::unscale(exponent));
  }
  __syncthreads();
  const float scale = Math::scale(exponents[lane / 4]);

  constexpr int quads = Config::depth * Blocks::count * 32;
  for (int quad = part * blockDim.x + threadIdx.x; quad < quads; quad += parts * blockDim.x) {
    const int step = quad / 32 / Blocks::count, block = quad / 32 % Blocks::count;
    const int rank = block % Blocks::own, pair = block / Blocks::own % Blocks::pairs;
    const int tap01 = block / Blocks::own / Blocks::pairs;
    const int tap0 = tap01 % Axis0::kernel, tap1 = tap01 / Axis0::kernel;
    const bool crosswise = rank >= Blocks::both;
    // Rows of the first slot are words 0 and 2, those of the second 1 and 3.
    float weight[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i / 2, slot2 = 2 * pair + i % 2;
      const int shift = crosswise ? rank - Blocks::both : 2 * rank + half;
      const int tap2 = shift < Axis2::shifts && slot2 < Axis2::slots
                           ? Axis2::tap(slot2, shift + Axis2::min_shift)
                           : -1;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // Channels t and t + 4; crosswise, one by half.
        const int channel = lane % 4 + 4 * (crosswise ? half : j);
        weight[i][j] = packer.at(group, step * 8 + channel, first_column + lane / 4, tap0, tap1,
                                 max(tap2, 0));
        if (tap2 < 0) weight[i][j] = 0.f;
      }
    }
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low = scale * weight[i][0], high = scale * weight[i][1];
      if (crosswise) {
        // Sources have the high half below, and 2^11 times the low one above.
        high = float_from_f16(f16_from_float(low)) / Math::low_scale;
        low = Math::low_of(low);
      }
      word[i] = pack_f16(low, high);
    }
    uint32_t* const to = chunk + int64_t(quad / 32 * Config::fragments_n + fragment) * 128 + 4 * lane;
    *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(256)
    convt3d_ampere_strided_pack(const convt3d::StridedConfig::Storage* weight, convt3d::uint32_t* packed,
                                convt3d::int64_t stride_in, convt3d::int64_t stride_out,
                                convt3d::int64_t stride0, convt3d::int64_t stride1,
                                convt3d::int64_t stride2) {
  convt3d::grid_dependency_launch();
  if constexpr (convt3d::StridedConfig::in_f16x3)
    convt3d::pack_f16x3(convt3d::Packer<convt3d::StridedConfig>{weight, stride_in, stride_out,
                                                                 stride0, stride1, stride2},
                         packed);
  else if constexpr (convt3d::StridedConfig::weights_first)
    convt3d::pack_blocks(convt3d::Packer<convt3d::StridedConfig>{weight, stride_in, stride_out,
                                                                 stride0, stride1, stride2},
                         packed);
  else if constexpr (convt3d::StridedConfig::forward)
    convt3d::pack(convt3d::Packer<convt3d::StridedConfig>{weight, stride_in, stride_out, stride0,
                                                          stride1, stride2},
                  packed);
  else
    convt3d::pack(convt3d::Packer<convt3d::StridedExchangedConfig>{weight, stride_in, stride_out,
                                                                   stride1, stride0, stride2},
                  packed);
}
