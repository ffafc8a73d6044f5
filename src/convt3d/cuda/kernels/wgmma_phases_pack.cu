// Packs the weights of wgmma_phases.cu: the stages of wgmma_phases_config.cuh, rounded to TF32 where
// they are float32. One thread writes four words of one column for every tap of axis 2. Runs before
// every product: weights are never stale.
#include "packer.cuh"
#include "wgmma_phases_config.cuh"

namespace convt3d {

template <typename Config>
CONVT3D_DEVICE void phases_pack(const Packer<Config>& packer, uint4* packed) {
  using Type = typename Config::Type;
  // A column's four words for one tap of axis 2; taps beside it share its sectors of the weight.
  constexpr int kernel2 = Config::Axis2::kernel;
  constexpr int columns = Config::column_tile * Config::quads;
  constexpr int64_t quads =
      int64_t(Config::groups) * Config::column_tiles * Config::team_bytes / 16 / kernel2;
  static_assert(quads < (int64_t(1) << 31), "numbers of 32 bits");
  for (uint32_t index = blockIdx.x * blockDim.x + threadIdx.x; index < uint32_t(quads);
       index += gridDim.x * blockDim.x) {
    uint32_t rest = index;
    const auto take = [&](uint32_t count) {
      const uint32_t digit = rest % count;
      rest /= count;
      return int(digit);
    };
    const int row = take(Config::column_tile);
    const int quad = take(Config::quads);
    const int inner1 = take(Config::Inner1::kernel);
    const int inner0 = take(Config::Inner0::kernel);
    const int walked1 = take(Config::walked1);
    const int walked0 = take(Config::walked0);
    const int chunk = take(Config::chunks);
    const int column_tile = take(Config::column_tiles);
    const int group = int(rest);

    const int k0 = Config::phased > 0 ? Config::Axis0::tap_at(walked0) : inner0;
    const int k1 = Config::phased > 1 ? Config::Axis1::tap_at(walked1) : inner1;
    const int column = column_tile * Config::column_tile + row;
    const int channel = chunk * Config::chunk_channels;
    uint4* to = packed + int64_t(index / columns) * columns * kernel2 + index % columns;
#pragma unroll
    for (int k2 = 0; k2 < kernel2; ++k2) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        word[i] = packer.word(group, channel + Config::channel_at(quad, i, 0),
                              channel + Config::channel_at(quad, i, 1), column, k0, k1, k2);
      to[k2 * columns] = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(256)
    convt3d_wgmma_phases_pack(const convt3d::WgmmaPhasesConfig::Storage* weight, uint4* packed,
                              convt3d::int64_t stride_in, convt3d::int64_t stride_out,
                              convt3d::int64_t stride0, convt3d::int64_t stride1,
                              convt3d::int64_t stride2) {
  convt3d::grid_dependency_launch();
  const convt3d::Packer<convt3d::WgmmaPhasesConfig> packer{weight,  stride_in, stride_out,
                                                           stride0, stride1,   stride2};
  convt3d::phases_pack(packer, packed);
}
