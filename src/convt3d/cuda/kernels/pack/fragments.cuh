// How weights become the fragments of a matrix product: rounded or split by the arithmetic, in
// the order [group][column tile][step][tap1][tap0][tap2][fragment][lane][words].
//
// One thread writes the words of one lane of one fragment. Reads are strided (weights are small
// and stay in L2), writes are contiguous.
#pragma once
#include "device/arithmetic.cuh"
#include "geometry/axis.cuh"
#include "pack/packer.cuh"

namespace convt3d {

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

    const int column =
        column_tile * Config::column_tile + fragment * 8 + Config::column_of(lane / 4);
    uint32_t* out = packed + index * Config::lane_words;
#pragma unroll
    for (int half = 0; half < Config::halves; ++half) {
      const int channel = step * Config::step_channels +
                          Config::word_of(lane % 4, half) * Type::channels_per_word;
      if constexpr (Config::Math::words_per_value == 2) {
        uint32_t big, small;
        Config::Math::split(bits_of(packer.at(group, channel, column, k0, k1, k2)), big, small);
        out[half] = big;
        out[2 + half] = small;
      } else {
        out[half] = packer.word(group, channel, column, k0, k1, k2);
      }
    }
  }
}

}  // namespace convt3d
