// Packs the weights of a gather kernel: fragment order, rounded or split as its arithmetic wants.
//
// One thread writes the words of one lane of one fragment. Reads are strided (weights are small
// and stay in L2), writes are contiguous. Runs before every product: weights are never stale.
#include "gather_config.cuh"

namespace convt3d {

template <typename Config>
struct Packer {
  using Storage = typename Config::Storage;
  const Storage* weight;
  int64_t stride_in, stride_out, stride0, stride1, stride2;

  /// One weight: source channel c and produced channel j of a group, kernel index (k0, k1, k2).
  CONVT3D_DEVICE Storage at(int group, int c, int j, int k0, int k1, int k2) const {
    if (c >= Config::source_channels || j >= Config::target_channels) return Storage(0);
    const int in = Config::forward ? group * Config::source_channels + c
                                   : group * Config::target_channels + j;
    const int out = Config::forward ? j : c;
    return weight[in * stride_in + out * stride_out + k0 * stride0 + k1 * stride1 + k2 * stride2];
  }
};

template <typename Config>
CONVT3D_DEVICE void pack(const Packer<Config>& packer, uint32_t* packed) {
  using Type = typename Config::Type;
  constexpr int steps = Config::chunks * Config::depth;
  constexpr int64_t lanes = int64_t(Config::groups) * Config::column_tiles * steps *
                            Config::step_weight_words / Config::lane_words;
  for (int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; index < lanes;
       index += int64_t(gridDim.x) * blockDim.x) {
    int64_t rest = index;
    const int lane = int(rest % 32);
    rest /= 32;
    const int fragment = int(rest % Config::tile_fragments);
    rest /= Config::tile_fragments;
    const int k2 = int(rest % Config::Axis2::kernel);
    rest /= Config::Axis2::kernel;
    const int k0 = Config::Axis0::tap_at(int(rest % Config::Axis0::kernel));
    rest /= Config::Axis0::kernel;
    const int k1 = Config::Axis1::tap_at(int(rest % Config::Axis1::kernel));
    rest /= Config::Axis1::kernel;
    const int step = int(rest % steps);
    rest /= steps;
    const int column_tile = int(rest % Config::column_tiles);
    const int group = int(rest / Config::column_tiles);

    const int column = column_tile * Config::column_tile + fragment * 8 + lane / 4;
    uint32_t* out = packed + index * Config::lane_words;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int channel = step * Config::step_channels +
                          Config::word_of(lane % 4, half) * Type::channels_per_word;
      const auto low = packer.at(group, channel, column, k0, k1, k2);
      if constexpr (Config::Math::words_per_value == 2) {
        uint32_t big, small;
        Config::Math::split(bits_of(low), big, small);
        out[half] = big;
        out[2 + half] = small;
      } else if constexpr (Type::channels_per_word == 1) {
        out[half] = round_tf32(low);
      } else {
        out[half] = Type::word(low, packer.at(group, channel + 1, column, k0, k1, k2));
      }
    }
  }
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(256)
    convt3d_pack(const convt3d::GatherConfig::Storage* weight, convt3d::uint32_t* packed, convt3d::int64_t stride_in,
                 convt3d::int64_t stride_out, convt3d::int64_t stride0, convt3d::int64_t stride1, convt3d::int64_t stride2) {
  convt3d::grid_dependency_launch();
  const convt3d::Packer<convt3d::GatherConfig> packer{weight,  stride_in, stride_out,
                                                      stride0, stride1,   stride2};
  convt3d::pack(packer, packed);
}
