// Packs the weights of wgmma_last.cu: the stages of wgmma_last_config.cuh, rounded to TF32 where they
// are float32. One thread writes four words of one column for every tap of axis 2, which share sectors
// of the weight. Runs before every product: weights are never stale.
#include "packer.cuh"
#include "wgmma_last_config.cuh"

namespace convt3d {

/// One of the layer's groups, of which a team is one group to others.
template <typename Config>
struct LastGroup : Config {
  static constexpr int source_channels = Config::source_channels / Config::team;
  static constexpr int target_channels = Config::target_channels / Config::team;
};

/// Fragments of products by warps: taps of W, then D, then H, each in the order of their shifts.
template <typename Config>
CONVT3D_DEVICE void last_pack_fragments(const Packer<LastGroup<Config>>& packer, uint4* packed) {
  constexpr int vectors = Config::groups * Config::stage_bytes / 16;
  for (int index = blockIdx.x * blockDim.x + threadIdx.x; index < vectors;
       index += gridDim.x * blockDim.x) {
    int rest = index;
    const auto take = [&](int count) {
      const int digit = rest % count;
      rest /= count;
      return digit;
    };
    const int lane = take(32);
    const int column = 8 * take(Config::group_tiles) + lane / 4;
    const int within = take(Config::team);
    const int first = 4 * take(Config::tap_quads);
    const int group = rest * Config::team + within;
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int tap2 = (first + i) / Config::taps, tap01 = (first + i) % Config::taps;
      const int k0 = tap01 / Config::Inner1::kernel, k1 = tap01 % Config::Inner1::kernel;
      word[i] = 0;
      if (tap2 < Config::Inner2::kernel)
        word[i] = packer.word(group, 2 * (lane % 4), column,
                              TapsByShift<typename Config::Inner0>::at(k0).tap,
                              TapsByShift<typename Config::Inner1>::at(k1).tap,
                              TapsByShift<typename Config::Inner2>::at(tap2).tap);
    }
    packed[index] = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

template <typename Config>
CONVT3D_DEVICE void last_pack(const Packer<Config>& packer, uint4* packed) {
  using Type = typename Config::Type;
  constexpr int kernel2 = Config::Axis2::kernel;
  constexpr int64_t vectors =
      int64_t(Config::groups) * Config::column_tiles * Config::team_bytes / 16 / kernel2;
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

/// Contiguous weights whose taps are whole vectors: reads run along the taps of neighbouring columns,
/// and pass through shared memory, [channel][column][words of taps]; writes run along columns.
template <typename Config>
struct LastPackRows {
  using Storage = typename Config::Storage;
  using Type = typename Config::Type;
  static constexpr int kernel0 = Config::Axis0::kernel, kernel1 = Config::Axis1::kernel;
  static constexpr int kernel2 = Config::Axis2::kernel;
  static constexpr int taps = kernel0 * kernel1 * kernel2;
  static constexpr int row_bytes = taps * int(sizeof(Storage));
  /// Of a block's task: fewer where weights are small, so that all multiprocessors have some.
  CONVT3D_CONSTEXPR static int task_columns() {
    int most = 32;
    while (most > 8 && Config::source_channels * Config::groups / Config::vector *
                               (Config::target_channels / most) < 256)
      most /= 2;
    return gcd(Config::column_tile, most);
  }
  static constexpr int columns = task_columns();
  static constexpr int rows = Config::vector * columns;  // of the channels of 16 packed bytes
  static constexpr int pitch = row_bytes / 4 + 1;        // words
  static constexpr bool fits =
      Config::forward && !Config::by_warps && row_bytes % 16 == 0 && rows * pitch <= 40960 / 4;

  CONVT3D_DEVICE static bool suits(const Packer<Config>& p) {
    return p.stride2 == 1 && p.stride1 == kernel2 && p.stride0 == kernel1 * kernel2 &&
           p.stride_out == taps && p.stride_in % Config::vector == 0 &&
           reinterpret_cast<uint64_t>(p.weight) % 16 == 0;
  }

  CONVT3D_DEVICE static void pack(const Packer<Config>& packer, uint4* packed) {
    __shared__ __align__(16) uint32_t staged[rows * pitch];
    constexpr int octets = Config::column_tile / columns, vectors = 2 * Config::steps;
    constexpr int tasks =
        Config::groups * Config::column_tiles * Config::chunks * vectors * octets;
    for (int task = blockIdx.x; task < tasks; task += gridDim.x) {
      int rest = task;
      const auto take = [&](int count) {
        const int digit = rest % count;
        rest /= count;
        return digit;
      };
      const int octet = take(octets), vector = take(vectors), chunk = take(Config::chunks);
      const int column_tile = take(Config::column_tiles), group = rest;
      const int channel = chunk * Config::chunk_channels + vector * Config::vector;
      const int column = column_tile * Config::column_tile + octet * columns;
      constexpr int row_vectors = row_bytes / 16;
#pragma unroll 8
      for (int i = threadIdx.x; i < rows * row_vectors; i += blockDim.x) {
        const int row = i / row_vectors, c = channel + row / columns, j = column + row % columns;
        uint4 value = make_uint4(0, 0, 0, 0);
        if (c < Config::source_channels && j < Config::target_channels)
          value = __ldg(reinterpret_cast<const uint4*>(
                            packer.weight +
                            int64_t(group * Config::source_channels + c) * packer.stride_in +
                            int64_t(j) * taps) +
                        i % row_vectors);
        uint32_t* to = staged + row * pitch + i % row_vectors * 4;
        to[0] = value.x, to[1] = value.y, to[2] = value.z, to[3] = value.w;
      }
      __syncthreads();
      uint4* team = packed + int64_t(group * Config::column_tiles + column_tile) *
                                 (Config::team_bytes / 16) +
                    vector * Config::column_tile + octet * columns;
      for (int i = threadIdx.x; i < taps * columns; i += blockDim.x) {
        rest = i / columns;
        const int inner1 = take(Config::Inner1::kernel), inner0 = take(Config::Inner0::kernel);
        const int walked0 = take(Config::walked0), walked1 = take(Config::walked1);
        const int position = rest, own = i % columns;
        const int k0 = Config::phased > 0 ? Config::Axis0::tap_at(walked0) : inner0;
        const int k1 = Config::phased > 1 ? Config::Axis1::tap_at(walked1) : inner1;
        const int k2 = Config::phased > 2 ? Config::Axis2::tap_at(position) : tap2_at(position);
        const int tap = (k0 * kernel1 + k1) * kernel2 + k2;
        const int stage = ((chunk * kernel2 + position) * Config::walked1 + walked1) *
                              Config::walked0 + walked0;
        uint32_t word[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          constexpr int per_word = Type::channels_per_word;
          const uint32_t* from = staged + (w * per_word * columns + own) * pitch + tap / per_word;
          if constexpr (per_word == 1)
            word[w] = round_tf32(float_of(from[0]));
          else
            word[w] = permute_bytes(from[0], from[columns * pitch], tap % 2 ? 0x7632 : 0x5410);
        }
        team[int64_t(stage) * (Config::stage_bytes / 16) +
             (inner0 * Config::Inner1::kernel + inner1) * vectors * Config::column_tile + own] =
            make_uint4(word[0], word[1], word[2], word[3]);
      }
      __syncthreads();
    }
  }

 private:
  CONVT3D_DEVICE static int tap2_at(int position) {
    int tap = 0;
#pragma unroll
    for (int i = 0; i < Config::Inner2::kernel; ++i)
      if (i == position) tap = TapsByShift<typename Config::Inner2>::at(i).tap;
    return tap;
  }
};

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(256)
    convt3d_wgmma_last_pack(const convt3d::WgmmaLastConfig::Storage* weight, uint4* packed,
                            convt3d::int64_t stride_in, convt3d::int64_t stride_out,
                            convt3d::int64_t stride0, convt3d::int64_t stride1,
                            convt3d::int64_t stride2) {
  convt3d::grid_dependency_launch();
  using Config = convt3d::WgmmaLastConfig;
  using convt3d::LastGroup, convt3d::Packer;
  if constexpr (Config::by_warps) {
    const Packer<LastGroup<Config>> packer{weight,  stride_in, stride_out,
                                           stride0, stride1,   stride2};
    convt3d::last_pack_fragments<Config>(packer, packed);
  } else {
    const Packer<Config> packer{weight, stride_in, stride_out, stride0, stride1, stride2};
    using Rows = convt3d::LastPackRows<Config>;
    if constexpr (Rows::fits) {
      if (Rows::suits(packer)) {
        Rows::pack(packer, packed);
        return;
      }
    }
    convt3d::last_pack(packer, packed);
  }
}
