// Packs the weights of ndhwc/kernel.cu: the stages of ndhwc/config.cuh, rounded to TF32 where
// they are float32. One thread writes four words of one column for every tap of axis 2, which
// share sectors of the weight. Runs before every product: weights are never stale.
#undef CONVT3D_WGMMA_USES
#define CONVT3D_WGMMA_USES(n) 0
#include "ndhwc/config.cuh"
#include "pack/vectors.cuh"

namespace convt3d {

/// One of the layer's groups, of which `groups_per_tile` are one group elsewhere.
template <typename Config>
struct NdhwcGroup : Config {
  static constexpr int source_channels = Config::source_channels / Config::groups_per_tile;
  static constexpr int target_channels = Config::target_channels / Config::groups_per_tile;
};

/// The two words of a product of warps.
template <typename Config, int Index>
CONVT3D_DEVICE void last_pack_product(const Packer<NdhwcGroup<Config>>& packer, int group,
                                      int column, uint32_t& first, uint32_t& second) {
  first = second = 0;
  if constexpr (Index < Config::Paired::count) {
    constexpr auto place = Config::Paired::at(Index);
    const int channel = 2 * (threadIdx.x % 4);
    if constexpr (place.tap2[0] >= 0)
      first = packer.word(group, channel, column, place.tap0, place.tap1, place.tap2[0]);
    if constexpr (place.tap2[1] >= 0)
      second = packer.word(group, channel, column, place.tap0, place.tap1, place.tap2[1]);
  }
}

/// Fragments of products by warps, a block for two products of all groups: which taps these are
/// is known before.
template <typename Config, int Pair>
CONVT3D_DEVICE void last_pack_fragments(const Packer<NdhwcGroup<Config>>& packer, uint4* packed) {
  if constexpr (Pair < Config::product_pairs) {
    if (int(blockIdx.x) != Pair) return last_pack_fragments<Config, Pair + 1>(packer, packed);
    constexpr int vectors = Config::fragments * 32;
    for (int index = threadIdx.x; index < Config::groups * vectors; index += blockDim.x) {
      const int groups_per_tile = index / vectors, within = index % vectors / 32;
      const int group = groups_per_tile * Config::groups_per_tile + within / Config::group_tiles;
      const int column = 8 * (within % Config::group_tiles) + index % 32 / 4;
      uint4 words;
      last_pack_product<Config, 2 * Pair>(packer, group, column, words.x, words.y);
      last_pack_product<Config, 2 * Pair + 1>(packer, group, column, words.z, words.w);
      packed[(groups_per_tile * Config::product_pairs + Pair) * vectors + index % vectors] = words;
    }
  }
}

template <typename Config>
CONVT3D_DEVICE void last_pack(const Packer<Config>& packer, uint4* packed) {
  using Type = typename Config::Type;
  constexpr int kernel2 = Config::Axis2::kernel;
  constexpr int64_t vectors =
      int64_t(Config::groups) * Config::column_tiles * Config::n_tile_bytes / 16 / kernel2;
  // From a tap of axis 2 to the next.
  constexpr int64_t pitch =
      int64_t(Config::walked1) * Config::walked0 * Config::stage_bytes / 16;
  static_assert(vectors < (int64_t(1) << 31), "numbers of 32 bits");
  for (uint32_t index = blockIdx.x * blockDim.x + threadIdx.x; index < uint32_t(vectors);
       index += gridDim.x * blockDim.x) {
    uint32_t rest = index;
    const auto take = [&](uint32_t count) {
      const uint32_t digit = rest % count;
      rest /= count;
      return int(digit);
    };
    const int row = take(Config::column_tile);
    const int quad = take(2);
    const int step = take(Config::steps);
    const int inner1 = take(Config::Inner1::kernel);
    const int inner0 = take(Config::Inner0::kernel);
    const int walked0 = take(Config::walked0);
    const int walked1 = take(Config::walked1);
    const int chunk = take(Config::chunks);
    const int column_tile = take(Config::column_tiles);
    const int group = int(rest);

    const int k0 = Config::phased > 0 ? Config::Axis0::tap_at(walked0) : inner0;
    const int k1 = Config::phased > 1 ? Config::Axis1::tap_at(walked1) : inner1;
    const int column = column_tile * Config::column_tile + row;
    const int channel = chunk * Config::chunk_channels + (2 * step + quad) * Config::vector;
    uint4* to = packed + int64_t(index / pitch) * pitch * kernel2 + index % pitch;
#pragma unroll
    for (int position = 0; position < kernel2; ++position) {
      const int k2 = Config::phased > 2 ? Config::Axis2::tap_at(position)
                                        : TapsByShift<typename Config::Inner2>::at(position).tap;
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        word[i] = packer.word(group, channel + i * Type::channels_per_word, column, k0, k1, k2);
      to[position * pitch] = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
}

/// Contiguous weights whose taps are whole vectors.
template <typename Config>
CONVT3D_DEVICE void last_pack_vectors(const Packer<Config>& packer, uint4* packed) {
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  const auto place = [](int group, int part, int column, int k0, int k1, int k2) {
    int walked0 = 0, walked1 = 0, inner = 0;
    if constexpr (Config::phased > 0)
      walked0 = position_of<Axis0::kernel>(k0, [](int at) { return Axis0::tap_at(at); });
    else
      inner = k0 * Config::Inner1::kernel;
    if constexpr (Config::phased > 1)
      walked1 = position_of<Axis1::kernel>(k1, [](int at) { return Axis1::tap_at(at); });
    else
      inner += k1;
    const int position = position_of<Axis2::kernel>(k2, [](int at) {
      if constexpr (Config::phased > 2)
        return Axis2::tap_at(at);
      else
        return TapsByShift<Axis2>::at(at).tap;
    });
    constexpr int quads = 2 * Config::steps;
    const int chunk = part / quads, quad = part % quads, tile = column / Config::column_tile;
    const int stage =
        ((chunk * Axis2::kernel + position) * Config::walked1 + walked1) * Config::walked0 + walked0;
    return int64_t(group * Config::column_tiles + tile) * (Config::n_tile_bytes / 16) +
           int64_t(stage) * (Config::stage_bytes / 16) +
           (inner * quads + quad) * Config::column_tile + column % Config::column_tile;
  };
  PackVectors<Config>::pack(packer, packed, place);
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(256)
    convt3d_ndhwc_pack(const convt3d::NdhwcConfig::Storage* weight, uint4* packed,
                       convt3d::int64_t stride_in, convt3d::int64_t stride_out,
                       convt3d::int64_t stride0, convt3d::int64_t stride1,
                       convt3d::int64_t stride2) {
  convt3d::grid_dependency_launch();
  using Config = convt3d::NdhwcConfig;
  using convt3d::NdhwcGroup, convt3d::Packer;
  if constexpr (Config::by_warps) {
    const Packer<NdhwcGroup<Config>> packer{weight,  stride_in, stride_out,
                                           stride0, stride1,   stride2};
    convt3d::last_pack_fragments<Config, 0>(packer, packed);
  } else {
    const Packer<Config> packer{weight, stride_in, stride_out, stride0, stride1, stride2};
    using Vectors = convt3d::PackVectors<Config>;
    if constexpr (Vectors::fits) {
      if (Vectors::suits(packer)) {
        convt3d::last_pack_vectors(packer, packed);
        return;
      }
    }
    convt3d::last_pack(packer, packed);
  }
}
