// Gradient by weight on mma.sync (sm_80 and later), split over CTAs and reduced in a second pass.
//
//     gw[ci, co, k] = sum over n, i of x[n, ci, i] * gy[n, co, i*s - p + k*d]
//
// A CTA owns a box of taps, a tile of x channels and a tile of gradient channels of one group,
// and every `splits`-th tile of positions; its sums stay in registers from first to last tile.
//
//     rows    = x channels           (16 * fragments_m to a warp)
//     columns = gradient channels    (8 * fragments_n to a warp), for each tap
//     depth   = positions along W    (8 TF32 or 16 half positions a step), shared among warps_k
//
// One x fragment serves all taps; the gradient fragment of a tap is the same box read at the
// tap's shift. Of few gradient channels, of which a fragment of one tap would be mostly padding,
// columns are the channels at all taps: (tap 0, c 0), (tap 0, c 1), .. (tap 1, c 0), .. Each lane
// then reads the box at the shift of its own column.
//
// Boxes of 16-bit channels_last tensors lie position by position, as those of contiguous ones that
// taps shift, whose channels are paired on the way; ldmatrix transposes their fragments. Contiguous
// rows that no tap shifts may lie as in memory: their words are pairs of positions, as fragments
// want them.
//
// Shared memory: two buffers of [x box][gradient box]; at the end, the sums of warps_k - 1
// position shares. Pipeline: cp.async, double-buffered, one barrier a tile.
//
// Nothing is added atomically: partial sums go to global memory and convt3d_reduce adds them in
// ascending order of splits, so every run gives the same bits.
#include "ampere/wgrad/config.cuh"

namespace convt3d {

template <typename Config>
struct AmpereWgradArguments {
  Activation<const typename Config::Storage> source;
  Activation<const typename Config::Storage> gradient;
  float* partial;
  int tile0, tile1, tile2;     // positions of x in a tile; tile2 is a multiple of a step's depth
  int tiles0, tiles1, tiles2;  // tiles along each axis
  int samples, splits;
};

/// Which taps, channels and group a CTA owns.
template <typename Config>
struct Variant {
  int first0, first1, first2, channel_m, channel_n, group;
  CONVT3D_DEVICE explicit Variant(int index) {
    first2 = index % Config::tap_tiles2 * Config::taps2;
    index /= Config::tap_tiles2;
    first1 = index % Config::tap_tiles1 * Config::taps1;
    index /= Config::tap_tiles1;
    first0 = index % Config::tap_tiles0 * Config::taps0;
    index /= Config::tap_tiles0;
    channel_n = index % Config::channel_tiles_n * Config::channel_tile_n;
    index /= Config::channel_tiles_n;
    channel_m = index % Config::channel_tiles_m * Config::channel_tile_m;
    group = index / Config::channel_tiles_m;
  }
};

/// x fragment: rows are channels, depth is positions. `base` is the lane's own address.
template <typename Config, typename Box>
CONVT3D_DEVICE void load_rows(uint32_t (&raw)[4], uint32_t base) {
  if constexpr (Config::half && !Box::paired) {
    load_matrix_x4_transposed(base, raw);
  } else {
    raw[0] = load_shared(base);
    raw[1] = load_shared(base + 4u * 8 * Box::channel_step);
    raw[2] = load_shared(base + 4u * 4 * Box::position_step);
    raw[3] = load_shared(base + 4u * (8 * Box::channel_step + 4 * Box::position_step));
  }
}
template <typename Config, typename Box>
CONVT3D_DEVICE void load_columns(uint32_t (&raw)[2], uint32_t base) {
  if constexpr (Config::half && !Box::paired) {
    load_matrix_x2_transposed(base, raw);
  } else {
    raw[0] = load_shared(base);
    raw[1] = load_shared(base + 4u * 4 * Box::position_step);
  }
}

/// The same where a lane's column is a channel at a tap of its own. Of 16-bit types `halves` picks
/// that channel out of the words of two positions.
template <typename Config, typename Box>
CONVT3D_DEVICE void load_tap_columns(uint32_t (&raw)[2], uint32_t base, uint32_t halves) {
  if constexpr (Config::half) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t first = base + 4u * 8 * i * Box::position_step;
      raw[i] = permute_bytes(load_shared(first), load_shared(first + 4u * Box::position_step),
                            halves);
    }
  } else {
    load_columns<Config, Box>(raw, base);
  }
}

/// Positions of the gradient's box from the first of the CTA's taps to another one.
template <typename Config, typename Box>
CONVT3D_DEVICE int box_shift(const BoxShape<Box>& shape, int tap) {
  const int k2 = tap % Config::taps2, k1 = tap / Config::taps2 % Config::taps1;
  const int k0 = tap / (Config::taps2 * Config::taps1);
  return k0 * Layer::dilation0 * shape.pitch1 + k1 * Layer::dilation1 * shape.pitch2 +
         shape.column_of(k2 * Layer::dilation2);
}

/// Where the lane's column of each fragment lies in the gradient's box, and what picks its channel.
template <typename Config, typename Box>
struct TapColumns {
  uint32_t shift[Config::fragments_n], halves[Config::fragments_n];

  /// `first`: the warp's first column. Columns behind the last one have the place of the first.
  CONVT3D_DEVICE TapColumns(const BoxShape<Box>& shape, int first, int lane) {
    constexpr int per_word = Config::Type::channels_per_word;
#pragma unroll
    for (int n = 0; n < Config::fragments_n; ++n) {
      const int number = first + n * 8 + lane / 4;
      const int column = number < Config::taps * Config::target_channels ? number : 0;
      const int channel = column % Config::target_channels, tap = column / Config::target_channels;
      shift[n] = 4u * (box_shift<Config>(shape, tap) * Box::position_step +
                       channel / per_word * Box::channel_step);
      halves[n] = channel % per_word == 0 ? 0x5410u : 0x7632u;
    }
  }
};

/// Address of a lane's first element of a fragment, relative to the box.
template <typename Config, typename Box>
CONVT3D_DEVICE uint32_t lane_offset(int lane, bool rows) {
  if constexpr (Config::half && !Box::paired) {
    // ldmatrix: matrix l / 8, row (position) l % 8; x fragments pair up channels first.
    const int matrix = lane / 8;
    const int position = lane % 8 + 8 * (rows ? matrix / 2 : matrix % 2);
    const int channel = rows ? 8 * (matrix % 2) : 0;
    return 4u * (position * Box::position_step + channel / 2);
  } else {
    return 4u * (lane / 4 * Box::channel_step + lane % 4 * Box::position_step);
  }
}

template <typename Config>
CONVT3D_DEVICE void grad_weight(const AmpereWgradArguments<Config>& a) {
  using Math = typename Config::Math;
  using Source = AmpereWgradBox<Config, false>;
  using Gradient = AmpereWgradBox<Config, true>;
  constexpr int stage_words = Source::box_words + Gradient::box_words;
  constexpr int channels_per_word = Config::Type::channels_per_word;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t shared_base = shared_address(shared);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_m = warp % Config::warps_m;
  const int warp_n = warp / Config::warps_m % Config::warps_n;
  const int warp_k = warp / (Config::warps_m * Config::warps_n);
  const Variant<Config> variant(blockIdx.x % Config::variants);
  const int split = blockIdx.x / Config::variants;

  float sum[Config::taps_apart][Config::fragments_m][Config::fragments_n][4];
#pragma unroll
  for (int i = 0; i < Config::registers; ++i) (&sum[0][0][0][0])[i] = 0.f;

  const BoxFill<Source> fill_source(a.source, BoxShape<Source>(a.tile0, a.tile1, a.tile2));
  const BoxFill<Gradient> fill_gradient(
      a.gradient,
      BoxShape<Gradient>(
          (a.tile0 - 1) * Gradient::unit0 + (Config::taps0 - 1) * Layer::dilation0 + 1,
          (a.tile1 - 1) * Gradient::unit1 + (Config::taps1 - 1) * Layer::dilation1 + 1,
          (a.tile2 - 1) * Gradient::unit2 + (Config::taps2 - 1) * Layer::dilation2 + 1));
  const auto& source_shape = fill_source.shape;
  const auto& gradient_shape = fill_gradient.shape;
  const int steps2 = a.tile2 / Config::depth;
  const int steps = a.tile0 * a.tile1 * steps2;
  const Divider by_steps2(steps2), by_tile1(a.tile1);
  const int tiles = a.samples * a.tiles0 * a.tiles1 * a.tiles2;

  struct Origin {
    int sample, i0, i1, i2;
  };
  auto origin_of = [&](int tile) {
    Origin o;
    o.i2 = tile % a.tiles2 * a.tile2;
    tile /= a.tiles2;
    o.i1 = tile % a.tiles1 * a.tile1;
    tile /= a.tiles1;
    o.i0 = tile % a.tiles0 * a.tile0;
    o.sample = tile / a.tiles0;
    return o;
  };
  auto gradient_origin2 = [&](const Origin& o) {
    return o.i2 * Layer::stride2 - Layer::padding2 + variant.first2 * Layer::dilation2;
  };
  auto start = [&](int tile, int buffer) {
    if (tile < tiles) {
      const Origin o = origin_of(tile);
      const uint32_t to = shared_base + 4u * buffer * stage_words;
      fill_source(a.source.group_base(o.sample, variant.group, Source::channels,
                                      Source::all_channels, Source::channels_last),
                  variant.channel_m, o.i0, o.i1, o.i2, to);
      fill_gradient(a.gradient.group_base(o.sample, variant.group, Gradient::channels,
                                          Gradient::all_channels, Gradient::channels_last),
                    variant.channel_n,
                    o.i0 * Layer::stride0 - Layer::padding0 + variant.first0 * Layer::dilation0,
                    o.i1 * Layer::stride1 - Layer::padding1 + variant.first1 * Layer::dilation1,
                    gradient_origin2(o), to + 4u * Source::box_words);
    }
    async_commit();
  };

  const uint32_t lane_m =
      shared_base + lane_offset<Config, Source>(lane, true) +
      4u * (warp_m * Config::fragments_m * 16 / Source::channels_per_word * Source::channel_step);
  // Columns of taps lie where TapColumns says; a lane begins at its position.
  const uint32_t lane_n =
      shared_base + 4u * Source::box_words +
      (Config::taps_in_columns
           ? 4u * (lane % 4 * channels_per_word * Gradient::position_step)
           : lane_offset<Config, Gradient>(lane, false) +
                 4u * (warp_n * Config::fragments_n * 8 / Gradient::channels_per_word *
                       Gradient::channel_step));
  const TapColumns<Config, Gradient> tap_columns(gradient_shape, warp_n * Config::fragments_n * 8,
                                                 lane);

  start(split, 0);
  int buffer = 0;
#pragma unroll 1
  for (int tile = split; tile < tiles; tile += a.splits, buffer ^= 1) {
    async_wait<0>();
    __syncthreads();
    start(tile + a.splits, buffer ^ 1);
    const Origin o = origin_of(tile);
    const uint32_t at_m = lane_m + 4u * (buffer * stage_words +
                                         fill_source.row_lead(o.i2) * Source::position_step);
    const uint32_t at_n =
        lane_n + 4u * (buffer * stage_words +
                       fill_gradient.row_lead(gradient_origin2(o)) * Gradient::position_step);
#pragma unroll 1
    for (int step = warp_k; step < steps; step += Config::warps_k) {
      const int row = by_steps2.quotient(step);
      const int u2 = (step - row * steps2) * Config::depth;
      const int u0 = by_tile1.quotient(row);
      const int u1 = row - u0 * a.tile1;
      const uint32_t from_m = at_m + 4u * (u0 * source_shape.pitch1 + u1 * source_shape.pitch2 + u2) *
                                         Source::position_step / Source::positions_per_word;
      const uint32_t from_n = at_n + 4u * (u0 * Gradient::unit0 * gradient_shape.pitch1 +
                                           u1 * Gradient::unit1 * gradient_shape.pitch2 + u2) *
                                         Gradient::position_step / Gradient::positions_per_word;
      typename Math::A x[Config::fragments_m];
#pragma unroll
      for (int m = 0; m < Config::fragments_m; ++m) {
        uint32_t raw[4];
        load_rows<Config, Source>(
            raw, from_m + 4u * m * 16 / Source::channels_per_word * Source::channel_step);
        Math::prepare(x[m], raw);
      }
#pragma unroll
      for (int tap = 0; tap < Config::taps_apart; ++tap) {
        const int shift = box_shift<Config>(gradient_shape, tap);
#pragma unroll
        for (int n = 0; n < Config::fragments_n; ++n) {
          uint32_t raw[2];
          if constexpr (Config::taps_in_columns)
            load_tap_columns<Config, Gradient>(raw, from_n + tap_columns.shift[n],
                                               tap_columns.halves[n]);
          else
            load_columns<Config, Gradient>(
                raw, from_n + 4u * (shift * Gradient::position_step +
                                    n * 8 / Gradient::channels_per_word * Gradient::channel_step));
          typename Math::B g;
          Math::prepare(g, raw);
#pragma unroll
          for (int m = 0; m < Config::fragments_m; ++m) Math::multiply_add(sum[tap][m][n], x[m], g);
        }
      }
    }
  }
  async_wait<0>();
  __syncthreads();

  // Position shares meet in shared memory, in order, then leave for global memory.
  const int share_thread = threadIdx.x % Config::share_threads;
  if constexpr (Config::warps_k > 1) {
    float* staged = reinterpret_cast<float*>(shared);
    for (int share = 1; share < Config::warps_k; ++share) {
      if (warp_k == share) {
#pragma unroll
        for (int r = 0; r < Config::registers; ++r)
          staged[r * Config::share_threads + share_thread] = (&sum[0][0][0][0])[r];
      }
      __syncthreads();
      if (warp_k == 0) {
#pragma unroll
        for (int r = 0; r < Config::registers; ++r)
          (&sum[0][0][0][0])[r] += staged[r * Config::share_threads + share_thread];
      }
      __syncthreads();
    }
  }
  if (warp_k == 0) {
    float* out = a.partial + int64_t(blockIdx.x) * Config::variant_elements + share_thread;
#pragma unroll
    for (int r = 0; r < Config::registers; ++r)
      out[r * Config::share_threads] = (&sum[0][0][0][0])[r];
  }
}

/// Adds the partial sums of all splits in ascending order and stores them in the weight.
template <typename Config>
CONVT3D_DEVICE void reduce(const float* partial, typename Config::Storage* weight, int splits,
                           int64_t stride_in, int64_t stride_out, int64_t stride0, int64_t stride1,
                           int64_t stride2) {
  constexpr int64_t elements = int64_t(Config::variants) * Config::variant_elements;
  const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= elements) return;
  const Variant<Config> variant(int(index / Config::variant_elements));
  int rest = int(index % Config::variant_elements);
  const int thread = rest % Config::share_threads;
  rest /= Config::share_threads;
  const int i = rest % 4;
  rest /= 4;
  const int n = rest % Config::fragments_n;
  rest /= Config::fragments_n;
  const int m = rest % Config::fragments_m;
  rest /= Config::fragments_m;
  int tap = rest;
  const int lane = thread % 32;
  const int warp_m = thread / 32 % Config::warps_m;
  const int warp_n = thread / 32 / Config::warps_m;
  const int in = variant.channel_m + (warp_m * Config::fragments_m + m) * 16 + lane / 4 + i / 2 * 8;
  int out = variant.channel_n + (warp_n * Config::fragments_n + n) * 8 + lane % 4 * 2 + i % 2;
  if constexpr (Config::taps_in_columns) {
    tap = out / Config::target_channels;
    out %= Config::target_channels;
    if (tap >= Config::taps) return;
  }
  const int k2 = variant.first2 + tap % Config::taps2;
  const int k1 = variant.first1 + tap / Config::taps2 % Config::taps1;
  const int k0 = variant.first0 + tap / (Config::taps2 * Config::taps1);
  if (in >= Config::source_channels || out >= Config::target_channels ||
      k0 >= Layer::kernel0 || k1 >= Layer::kernel1 || k2 >= Layer::kernel2)
    return;
  float total = 0.f;
  for (int split = 0; split < splits; ++split) total += partial[split * elements + index];
  weight[(int64_t(variant.group) * Config::source_channels + in) * stride_in + out * stride_out +
         k0 * stride0 + k1 * stride1 + k2 * stride2] = Config::Type::store(total);
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::AmpereWgradConfig::threads,
                                             CONVT3D_RESIDENT)
    convt3d_ampere_wgrad(const convt3d::AmpereWgradConfig::Storage* source,
                         const convt3d::AmpereWgradConfig::Storage* gradient, float* partial,
                         int source0, int source1, int source2, int source_stride0,
                         int source_stride1, int gradient0, int gradient1, int gradient2,
                         int gradient_stride0, int gradient_stride1, int tile0, int tile1,
                         int tile2, int tiles0, int tiles1, int tiles2, int samples, int splits) {
  const convt3d::AmpereWgradArguments<convt3d::AmpereWgradConfig> arguments{
      {source, {source0, source1, source2}, source_stride0, source_stride1},
      {gradient, {gradient0, gradient1, gradient2}, gradient_stride0, gradient_stride1},
      partial,
      tile0,
      tile1,
      tile2,
      tiles0,
      tiles1,
      tiles2,
      samples,
      splits};
  convt3d::grid_dependency_launch();
  convt3d::grad_weight(arguments);
}

extern "C" __global__ void __launch_bounds__(256)
    convt3d_reduce(const float* partial, convt3d::AmpereWgradConfig::Storage* weight, int splits,
                   convt3d::int64_t stride_in, convt3d::int64_t stride_out,
                   convt3d::int64_t stride0, convt3d::int64_t stride1,
                   convt3d::int64_t stride2) {
  convt3d::grid_dependency_wait();
  convt3d::reduce<convt3d::AmpereWgradConfig>(partial, weight, splits, stride_in, stride_out,
                                             stride0, stride1, stride2);
}
