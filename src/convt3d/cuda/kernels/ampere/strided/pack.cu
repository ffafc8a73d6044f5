// Packs the weights of a strided kernel. Runs before every product: weights are never stale.
#include "ampere/strided/config.cuh"
#include "pack/fragments.cuh"

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

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(256)
    convt3d_ampere_strided_pack(const convt3d::StridedConfig::Storage* weight, convt3d::uint32_t* packed,
                                convt3d::int64_t stride_in, convt3d::int64_t stride_out,
                                convt3d::int64_t stride0, convt3d::int64_t stride1,
                                convt3d::int64_t stride2) {
  convt3d::grid_dependency_launch();
  if constexpr (convt3d::StridedConfig::weights_first)
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
