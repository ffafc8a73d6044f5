// Packs the weights of a col2im kernel as fragments of B, in the order of col2im/config.cuh:
// rounded to TF32, or split in two TF32 parts. One thread writes the words of one lane of one
// fragment.
#include "col2im/config.cuh"
#include "pack/packer.cuh"

namespace convt3d {

template <typename Config>
CONVT3D_DEVICE void pack_col2im(const Packer<Config>& packer, uint32_t* packed) {
  constexpr int64_t lanes = int64_t(Config::groups) * Config::weight_bytes / (4 * Config::lane_words);
  for (int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; index < lanes;
       index += int64_t(gridDim.x) * blockDim.x) {
    int64_t rest = index;
    const int lane = int(rest % 32);
    rest /= 32;
    const int column = int(rest % Config::fragments) * 8 + lane / 4;
    rest /= Config::fragments;
    const int k0 = Config::own_tap(int(rest % Layer::kernel0), Layer::kernel0);
    rest /= Layer::kernel0;
    const int step = int(rest % Config::steps);
    const int group = int(rest / Config::steps);

    const int tap = column / Config::target_channels;
    const int produced =
        column < Config::columns ? column % Config::target_channels : Config::target_channels;
    const int k1 = Config::own_tap(tap / Layer::kernel2 % Layer::kernel1, Layer::kernel1);
    const int k2 = Config::own_tap(tap % Layer::kernel2, Layer::kernel2);
    uint32_t* out = packed + index * Config::lane_words;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int channel =
          Config::word_of(step, lane % 4, half) * Config::Type::channels_per_word;
      if constexpr (Config::Math::words_per_value == 2)
        Config::Math::split(bits_of(packer.at(group, channel, produced, k0, k1, k2)), out[half],
                            out[2 + half]);
      else
        out[half] = packer.word(group, channel, produced, k0, k1, k2);
    }
  }
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(256)
    convt3d_col2im_pack(const convt3d::Col2imConfig::Storage* weight, convt3d::uint32_t* packed,
                        convt3d::int64_t stride_in, convt3d::int64_t stride_out,
                        convt3d::int64_t stride0, convt3d::int64_t stride1,
                        convt3d::int64_t stride2) {
  convt3d::grid_dependency_launch();
  const convt3d::Packer<convt3d::Col2imConfig> packer{weight,  stride_in, stride_out,
                                                       stride0, stride1,   stride2};
  convt3d::pack_col2im(packer, packed);
}
