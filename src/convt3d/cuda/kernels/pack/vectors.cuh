// Packs contiguous weights whose taps, and whose channels of 16 packed bytes, are whole vectors:
// a thread loads 16 bytes of taps of each of those channels, transposes them in registers and
// writes 16 bytes a tap. Neighbouring lanes have neighbouring taps, up to 128 bytes of them, then
// columns: loads and stores are whole sectors. Split operands (see device/arithmetic.cuh) are
// split on the way, and written as 16 bytes of big words and 16 of small ones.
#pragma once
#include "geometry/axis.cuh"
#include "pack/packer.cuh"

namespace convt3d {

/// The position at which a table of `Count` taps has one.
template <int Count, typename Table>
CONVT3D_DEVICE int position_of(int tap, const Table& table) {
  int found = 0;
#pragma unroll
  for (int position = 0; position < Count; ++position)
    if (table(position) == tap) found = position;
  return found;
}

template <typename Config>
struct PackVectors {
  using Storage = typename Config::Storage;
  using Type = typename Config::Type;
  static constexpr int kernel0 = Config::Axis0::kernel, kernel1 = Config::Axis1::kernel;
  static constexpr int kernel2 = Config::Axis2::kernel;
  static constexpr int taps = kernel0 * kernel1 * kernel2;
  static constexpr int vector = 16 / int(sizeof(Storage));  // taps, and channels
  static constexpr int vectors = taps / vector;
  static constexpr int lanes = gcd(vectors, 8);  // of the same channels and column
  static constexpr int columns = Config::column_tiles * Config::column_tile;
  static constexpr int parts = Config::chunks * Config::chunk_channels / vector;  // of channels
  static constexpr int64_t all = int64_t(Config::groups) * parts * columns * vectors;
  static constexpr bool fits = Config::forward && taps % vector == 0 &&
                               columns % (32 / lanes) == 0 && all < (int64_t(1) << 31);

  CONVT3D_DEVICE static bool suits(const Packer<Config>& p) {
    return p.stride2 == 1 && p.stride1 == kernel2 && p.stride0 == kernel1 * kernel2 &&
           p.stride_out == taps && p.stride_in % vector == 0 &&
           reinterpret_cast<uint64_t>(p.weight) % 16 == 0;
  }

  /// `place(group, part, column, k0, k1, k2)`: where 16 bytes go, in units of that; the big
  /// words of split operands.
  template <typename Place>
  CONVT3D_DEVICE static void pack(const Packer<Config>& packer, uint4* packed, const Place& place) {
#pragma unroll 1
    for (uint32_t index = blockIdx.x * blockDim.x + threadIdx.x; index < uint32_t(all);
         index += gridDim.x * blockDim.x) {
      uint32_t rest = index;
      const auto take = [&](uint32_t count) {
        const uint32_t digit = rest % count;
        rest /= count;
        return int(digit);
      };
      const int low = take(lanes), column_low = take(32 / lanes), high = take(vectors / lanes);
      const int column = take(columns / (32 / lanes)) * (32 / lanes) + column_low;
      const int part = take(parts), group = int(rest);
      const int first = (high * lanes + low) * vector;  // tap
      uint32_t word[vector][4];
      const Storage* from =
          packer.weight + int64_t(group * Config::source_channels + part * vector) * packer.stride_in +
          int64_t(column) * taps + first;
      const bool exists = column < Config::target_channels;
#pragma unroll
      for (int channel = 0; channel < vector; ++channel) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (exists && part * vector + channel < Config::source_channels)
          v = __ldg(reinterpret_cast<const uint4*>(from + channel * packer.stride_in));
        word[channel][0] = v.x, word[channel][1] = v.y, word[channel][2] = v.z, word[channel][3] = v.w;
      }
#pragma unroll
      for (int i = 0; i < vector; ++i) {
        uint32_t transposed[Config::Math::words_per_value][4];
#pragma unroll
        for (int w = 0; w < 4; ++w)
          if constexpr (Config::Math::words_per_value == 2)
            Config::Math::split(word[w][i], transposed[0][w], transposed[1][w]);
          else if constexpr (Type::channels_per_word == 1)
            transposed[0][w] = round_tf32(float_of(word[w][i]));
          else
            transposed[0][w] = permute_bytes(word[2 * w][i / 2], word[2 * w + 1][i / 2],
                                         i % 2 ? 0x7632 : 0x5410);
        const int tap = first + i;
        uint4* to = packed + place(group, part, column, tap / kernel2 / kernel1,
                                   tap / kernel2 % kernel1, tap % kernel2);
        to[0] = make_uint4(transposed[0][0], transposed[0][1], transposed[0][2], transposed[0][3]);
        if constexpr (Config::Math::words_per_value == 2)
          to[Config::part_bytes / 16] =
              make_uint4(transposed[1][0], transposed[1][1], transposed[1][2], transposed[1][3]);
      }
    }
  }
};

}  // namespace convt3d
