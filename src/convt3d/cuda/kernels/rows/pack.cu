// Packs the weights of rows/kernel.cu. Runs before every product: weights are never stale.
//
// CTAs of an N tile work on one group and eight produced channels. A thread packs 16 bytes, a
// column of eight source channels; each CTA finds the scale of its channels.
#include "pack/scales.cuh"
#include "rows/config.cuh"

namespace convt3d {

/// Where one item of the weights of an N tile belongs.
template <typename Config>
struct PackedColumn {
  int octet, channel;
  int tap0, tap1, tap2;  // tap2 is negative: there is none
  bool cross, low;       // a product crosswise; the low half of the weights

  CONVT3D_DEVICE explicit PackedColumn(int item) {
    using Axis0 = typename Config::Axis0;
    using Axis2 = typename Config::Axis2;
    int slice = 0;
#pragma unroll
    for (int i = 1; i < Config::slices; ++i)
      if (item >= Config::weights_before(i) / 16) slice = i;
    int columns = 0, before = 0;
#pragma unroll
    for (int i = 0; i < Config::slices; ++i)
      if (i == slice) {
        columns = Config::columns_of(i);
        before = Config::weights_before(i) / 16;
      }
    item -= before;
    const int row = item / columns, column = item - row * columns;
    const int step = row / 2, half = row % 2;
    cross = step < Config::cross_steps;
    low = cross && half == 1;
    int shift;
    if (cross) {
      octet = step / Config::shifts;
      shift = step % Config::shifts;
    } else {
      octet = (step - Config::cross_steps) / Config::pairs;
      const int pair = (step - Config::cross_steps) % Config::pairs;
      shift = Config::pair_shift(pair) + half;
      if (shift < 2 * pair) shift = Config::shifts;  // comes with the pair before
    }
    int slot0 = 0;
#pragma unroll
    for (int i = 0; i < Config::slices; ++i)
#pragma unroll
      for (int rank = 0; rank < Config::slots_of(i); ++rank)
        if (i == slice && rank == column / Config::slot_columns) slot0 = Config::slot_of(i, rank);
    tap0 = Axis0::tap(slot0, slice + Axis0::min_shift);
    tap1 = column % Config::slot_columns / Config::tap_columns;
    tap2 = shift < Config::shifts ? Axis2::tap(column % 2, shift + Axis2::min_shift) : -1;
    channel = Config::channel_of(column);
  }
};

/// What an item holds.
template <typename Config>
struct Weights {
  PackedColumn<Config> at;
  typename Config::Storage weight[8];

  CONVT3D_DEVICE Weights(const Packer<Config>& packer, int group, int first_channel, int item)
      : at(item) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      weight[c] = packer.at(group, 8 * at.octet + c, first_channel + at.channel, at.tap0, at.tap1,
                            max(at.tap2, 0));
      if (at.tap2 < 0) weight[c] = 0;
    }
  }
};

template <typename Config>
CONVT3D_DEVICE void pack_rows(const Packer<Config>& packer, uint32_t* packed) {
  using Math = typename Config::Math;
  using Type = typename Config::Type;
  __shared__ int exponents[8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int n_tile = blockIdx.x % Config::n_tiles, part = blockIdx.x / Config::n_tiles;
  const int parts = gridDim.x / Config::n_tiles;
  const int group = n_tile / Config::column_tiles;
  const int first_channel = n_tile % Config::column_tiles * Config::column_tile;
  uint32_t* const chunk = packed + int64_t(n_tile) * (Config::n_tile_bytes() / 4);

  constexpr int items = Config::weight_bytes() / 16;
  // The first item's weights are on their way while the largest ones are found.
  const int first = min(part * int(blockDim.x) + int(threadIdx.x), items - 1);
  Weights<Config> next(packer, group, first_channel, first);
  if constexpr (Config::in_f16x3) {
    const int exponent = channel_exponent(packer, group, first_channel + warp, lane);
    if (lane == 0) {
      exponents[warp] = exponent;
      if (part == 0) chunk[Config::weight_bytes() / 4 + warp] = bits_of(Math::unscale(exponent));
    }
    __syncthreads();
  }
  for (int item = part * blockDim.x + threadIdx.x; item < items; item += parts * blockDim.x) {
    if (item != first) next = Weights<Config>(packer, group, first_channel, item);
    const PackedColumn<Config>& at = next.at;
    auto& weight = next.weight;
    uint32_t word[4];
    if constexpr (Config::in_f16x3) {
      const float scale = Math::scale(exponents[at.channel]);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        weight[c] *= scale;
        // Low halves of sources, which come first, are 2^11 times themselves.
        if (at.low)
          weight[c] = Math::low_of(weight[c]);
        else if (at.cross)
          weight[c] = float_from_f16(f16_from_float(weight[c])) / Math::low_scale;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) word[i] = pack_f16(weight[2 * i], weight[2 * i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) word[i] = Type::word(weight[2 * i], weight[2 * i + 1]);
    }
    *reinterpret_cast<uint4*>(chunk + 4 * item) = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(256)
    convt3d_rows_pack(const convt3d::RowsConfig::Storage* weight,
                      convt3d::uint32_t* packed, convt3d::int64_t stride_in,
                      convt3d::int64_t stride_out, convt3d::int64_t stride0,
                      convt3d::int64_t stride1, convt3d::int64_t stride2) {
  convt3d::grid_dependency_launch();
  convt3d::pack_rows(convt3d::Packer<convt3d::RowsConfig>{weight, stride_in, stride_out, stride0,
                                                               stride1, stride2},
                     packed);
}
