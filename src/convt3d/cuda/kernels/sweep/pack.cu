// Packs the weights of a sweep: the stages of sweep/config.cuh, rounded to TF32
// or split into two TF32 parts where they are float32. One thread writes the four words of one
// stacked column. Runs before every product: weights are never stale.
#undef CONVT3D_WGMMA_USES
#define CONVT3D_WGMMA_USES(n) 0
#include "pack/packer.cuh"
#include "sweep/config.cuh"

namespace convt3d {

template <typename Config>
CONVT3D_DEVICE void pack_sweep(const Packer<Config>& packer, uint4* packed) {
  using Type = typename Config::Type;
  constexpr int64_t quads = int64_t(Config::groups) * Config::column_tiles * Config::chunks *
                            Config::chunk_bytes / 16;
  for (int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; index < quads;
       index += int64_t(gridDim.x) * blockDim.x) {
    int64_t rest = index;
    const int row = int(rest % Config::stacked);
    rest /= Config::stacked;
    const int quad = int(rest % Config::quads);
    rest /= Config::quads;
    const int part = int(rest % Config::parts);
    rest /= Config::parts;
    int k2 = int(rest % Config::Axis2::kernel);
    rest /= Config::Axis2::kernel;
    const int k1 = Config::Axis1::tap_at(int(rest % Config::Axis1::kernel));
    rest /= Config::Axis1::kernel;
    const int chunk = int(rest % Config::chunks);
    rest /= Config::chunks;
    const int column_tile = int(rest % Config::column_tiles);
    const int group = int(rest / Config::column_tiles);

    const int k0 = Config::Axis0::tap_at(row / Config::column_tile);
    const int column = column_tile * Config::column_tile + row % Config::column_tile;
    int channel = chunk * Config::chunk_channels + quad * Config::quad_channels;
    if (Config::tap_pairs && chunk == Config::chunks - 1) {
      k2 = Config::paired_tap(k2, quad);
      channel = k2 < 0 ? Config::source_channels : chunk * Config::chunk_channels;
    }
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = channel + i * Type::channels_per_word;
      if constexpr (Config::parts > 1) {
        uint32_t big, small;
        Config::Math::split(bits_of(packer.at(group, c, column, k0, k1, k2)), big, small);
        word[i] = part ? small : big;
      } else {
        word[i] = packer.word(group, c, column, k0, k1, k2);
      }
    }
    packed[index] = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(256)
    convt3d_sweep_pack(const convt3d::SweepConfig::Storage* weight, uint4* packed,
                       convt3d::int64_t stride_in, convt3d::int64_t stride_out,
                       convt3d::int64_t stride0, convt3d::int64_t stride1,
                       convt3d::int64_t stride2) {
  convt3d::grid_dependency_launch();
  const convt3d::Packer<convt3d::SweepConfig> packer{weight,  stride_in, stride_out,
                                                     stride0, stride1,   stride2};
  convt3d::pack_sweep(packer, packed);
}
