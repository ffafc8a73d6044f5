// kernel == stride without padding: every output has one tap, so forward and gradient by input
// are plain matrix products (see patch/product.cuh). Bound by memory, or by latency where small.
//
// A CTA owns `column_tile` columns and walks over tiles of `cells` input positions, counted
// linearly over (D, H, W); its warps split both. Where several tiles fall to one CTA, and their
// weights fit, these are read once and stay.
//
//            columns (weight as in memory)
//          +--------+--------+
//    cells | warp 0 | warp 1 |   every lane ends with outputs that are neighbours in memory: rows of
//          +--------+--------+   a fragment stand for neighbouring cells, and fragments interleave
//          | warp 2 | warp 3 |   their columns so that a lane has whole runs of slots along W
//          +--------+--------+
//
// Shared memory: `stages` source chunks, then one weight chunk for each stage (or all of them).
// Where there are fewer tiles than multiprocessors and k is long, several CTAs share a tile's
// chunks; their partial sums are added by convt3d_ampere_patch_reduce in a fixed order. Pipeline:
// cp.async, `stages` deep, without a break between tiles: while a tile is stored, the first
// chunks of the next one arrive.
#include "ampere/patch/config.cuh"
#include "ampere/patch/load.cuh"
#include "patch/lane_store.cuh"
#include "patch/reduce.cuh"

namespace convt3d {

template <typename Config>
struct PatchFragments {
  using Math = typename Config::Math;
  using Storage = typename Config::Storage;
  static constexpr int steps = Config::slice_steps;
  static constexpr int runs = 2 * Config::fragments_m / Config::run;

  const unsigned char* shared;
  uint32_t shared_base;
  int g, t, warp_cell, warp_column;

  CONVT3D_DEVICE uint32_t element(uint32_t address) const {
    return *reinterpret_cast<const Storage*>(shared + (address - shared_base));
  }

  // ------------------------------------------------------------ source

  /// Words of one line for every run of cells, beginning `offset` words into each cell.
  CONVT3D_DEVICE void line(uint32_t address, int offset,
                           uint32_t (&word)[runs][Config::run * Config::slice_words]) const {
    constexpr int run = Config::run, slice = Config::slice_words, pitch = Config::width_words;
#pragma unroll
    for (int r = 0; r < runs; ++r) {
      const int cell = warp_cell + linear_cell<Config>(r * run / 2, r * run % 2, g);
      const uint32_t at = address + 4 * (cell * pitch + offset);
      if constexpr (slice == pitch) {
        load_words<run * slice>(at, word[r]);
      } else {
#pragma unroll
        for (int i = 0; i < run; ++i)
          load_words<slice>(at + 4 * i * pitch, word[r] + i * slice);
      }
    }
  }

  /// 16-bit elements of two neighbouring lines, joined to words.
  CONVT3D_DEVICE void two_lines(uint32_t address, int offset,
                                uint32_t (&word)[runs][Config::run]) const {
    constexpr int run = Config::run, pitch = 4 * Config::source_pitch;
#pragma unroll
    for (int r = 0; r < runs; ++r) {
      const int cell = warp_cell + linear_cell<Config>(r * run / 2, r * run % 2, g);
      const uint32_t at = address + 2 * (cell * Config::width + offset);
      if constexpr (Config::width == 1) {
        uint32_t low[run / 2], high[run / 2];
        load_words<run / 2>(at, low);
        load_words<run / 2>(at + pitch, high);
#pragma unroll
        for (int i = 0; i < run; ++i)
          word[r][i] = permute_bytes(low[i / 2], high[i / 2], i % 2 ? 0x7632 : 0x5410);
      } else {
#pragma unroll
        for (int i = 0; i < run; ++i)
          word[r][i] = element(at + 2 * i * Config::width) |
                       element(at + 2 * i * Config::width + pitch) << 16;
      }
    }
  }

  /// The fragments of a slice of a block of lines.
  CONVT3D_DEVICE void source(uint32_t chunk, int block, int slice,
                             typename Math::A (&a)[steps][Config::fragments_m]) const {
    uint32_t raw[steps][Config::fragments_m][4];
    constexpr int run = Config::run;
    if constexpr (Config::source_channels_last) {
#pragma unroll
      for (int m = 0; m < Config::fragments_m; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int cell = warp_cell + linear_cell<Config>(m, half, g);
          const uint32_t at = chunk + 4 * (cell * Config::source_pitch + 8 * block + t);
          raw[0][m][half] = load_shared(at);
          raw[0][m][2 + half] = load_shared(at + 16);
        }
    } else if constexpr (Config::even) {
      uint32_t word[runs][run * Config::slice_words];
      line(chunk + 4 * (block * 4 + t) * Config::source_pitch, slice * Config::slice_words, word);
#pragma unroll
      for (int s = 0; s < steps; ++s)
#pragma unroll
        for (int row = 0; row < 2 * Config::fragments_m; ++row)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            raw[s][row / 2][2 * i + row % 2] =
                word[row / run][row % run * Config::slice_words + 2 * s + i];
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t word[runs][run];
        if constexpr (Config::unpaired)
          two_lines(chunk + 4 * (block * 16 + 2 * t + 8 * i) * Config::source_pitch, slice, word);
        else
          line(chunk + 4 * (block * 8 + t + 4 * i) * Config::source_pitch, slice, word);
#pragma unroll
        for (int row = 0; row < 2 * Config::fragments_m; ++row)
          raw[0][row / 2][2 * i + row % 2] = word[row / run][row % run];
      }
    }
#pragma unroll
    for (int s = 0; s < steps; ++s)
#pragma unroll
      for (int m = 0; m < Config::fragments_m; ++m) Math::prepare(a[s][m], raw[s][m]);
  }

  // ------------------------------------------------------------ weights

  /// Fragments that are loaded together: interleaved ones, or a pair by ldmatrix.
  static constexpr bool by_matrix =
      Config::forward && Config::per_word == 2 && Config::interleave == 1;
  static constexpr int together =
      by_matrix && Config::fragments_n % 2 == 0 ? 2 : Config::interleave;

  /// A group of fragments of one matrix step: k along the rows of shared memory.
  CONVT3D_DEVICE void forward_weights(uint32_t chunk, int k, int group,
                                      uint32_t (&raw)[together][2]) const {
    constexpr int count = Config::interleave, pitch = 4 * Config::weight_pitch;
    const int column = warp_column + 8 * count * group + count * g;
    if constexpr (Config::per_word == 1) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t word[count];
        load_words<count>(chunk + (k + t + 4 * half) * pitch + 4 * column, word);
#pragma unroll
        for (int i = 0; i < count; ++i) raw[i][half] = word[i];
      }
    } else if constexpr (by_matrix) {
      // Lane l supplies row l % 16 of fragment l / 16.
      const int row = (4 * g + t) % 16, fragment = together * group + (4 * g + t) / 16 % together;
      const uint32_t at = chunk + (k + row) * pitch + 2 * (warp_column + 8 * fragment);
      if constexpr (together == 2) {
        uint32_t word[4];
        load_matrix_x4_transposed(at, word);
#pragma unroll
        for (int i = 0; i < 4; ++i) raw[i / 2][i % 2] = word[i];
      } else {
        load_matrix_x2_transposed(at, raw[0]);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at = chunk + (k + 2 * t + 8 * half) * pitch + 2 * column;
        if constexpr (count % 2 == 0) {
          uint32_t low[count / 2], high[count / 2];
          load_words<count / 2>(at, low);
          load_words<count / 2>(at + pitch, high);
#pragma unroll
          for (int i = 0; i < count; ++i)
            raw[i][half] = permute_bytes(low[i / 2], high[i / 2], i % 2 ? 0x7632 : 0x5410);
        } else {
#pragma unroll
          for (int i = 0; i < count; ++i)
            raw[i][half] = element(at + 2 * i) | element(at + pitch + 2 * i) << 16;
        }
      }
    }
  }

  /// One fragment of one matrix step: columns along the rows of shared memory.
  CONVT3D_DEVICE void backward_weights(uint32_t chunk, int block, int slice, int step, int n,
                                       uint32_t (&raw)[2]) const {
    const uint32_t row = chunk + 4 * (warp_column + 8 * n + g) * Config::weight_pitch;
    const int line = block * Config::block_lines;
    if constexpr (Config::source_channels_last || (Config::unpaired && Config::width == 1)) {
      raw[0] = load_shared(row + 4 * (line / Config::per_word + t));
      raw[1] = load_shared(row + 4 * (line / Config::per_word + t + 4));
    } else if constexpr (Config::unpaired) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at = row + 2 * ((line + 2 * t + 8 * half) * Config::width + slice);
        raw[half] = element(at) | element(at + 2 * Config::width) << 16;
      }
    } else if constexpr (Config::even) {
      load_shared(row + 4 * ((line + t) * Config::width_words + slice * Config::slice_words +
                             2 * step),
                  raw[0], raw[1]);
    } else {
      raw[0] = load_shared(row + 4 * ((line + t) * Config::width_words + slice));
      raw[1] = load_shared(row + 4 * ((line + t + 4) * Config::width_words + slice));
    }
  }
};

/// All products of one chunk; `between` runs while the first of them are under way.
template <typename Config, typename Between>
CONVT3D_DEVICE void multiply(const PatchFragments<Config>& fragments, uint32_t source,
                             uint32_t weights, typename PatchLaneStore<Config>::Sums& sum,
                             const Between& between) {
  using Math = typename Config::Math;
  constexpr int together = PatchFragments<Config>::together;
  constexpr int blocks = Config::chunk_lines / Config::block_lines;
  // The split operands of several blocks would not fit in registers beside the sums.
  constexpr int unrolled = Math::words_per_value > 1 ? 1 : blocks <= 8 ? blocks : 4;
#pragma unroll(unrolled)
  for (int block = 0; block < blocks; ++block) {
#pragma unroll
    for (int slice = 0; slice < Config::slices; ++slice) {
      typename Math::A a[Config::slice_steps][Config::fragments_m];
      fragments.source(source, block, slice, a);
#pragma unroll
      for (int step = 0; step < Config::slice_steps; ++step)
#pragma unroll
        for (int group = 0; group < Config::fragments_n / together; ++group) {
          uint32_t raw[together][2];
          if constexpr (Config::forward)
            fragments.forward_weights(weights, block * Config::block_lines, group, raw);
          else
            fragments.backward_weights(weights, block, slice, step, group, raw[0]);
#pragma unroll
          for (int i = 0; i < together; ++i) {
            typename Math::B b;
            Math::prepare(b, raw[i]);
#pragma unroll
            for (int m = 0; m < Config::fragments_m; ++m)
              Math::multiply_add(sum[m][group * together + i], a[step][m], b);
          }
        }
    }
    if (block == 0) between();
  }
}

/// Sums as products add to them: of some chunks of k, where a long chain of float32 additions to
/// the whole sum would cost more than the rounding of IEEE-grade products.
template <typename Config, bool Parts = Config::sum_in_parts>
struct SumInParts {
  using Sums = typename PatchLaneStore<Config>::Sums;
  /// Chunks of a part: about 64 products.
  static constexpr int chunks = Config::chunk_depth < 64 ? 64 / Config::chunk_depth : 1;
  Sums part = {};
  int count = 0;

  CONVT3D_DEVICE Sums& target(Sums&) { return part; }
  CONVT3D_DEVICE void join(Sums& sum, bool last) {
    if (++count < chunks && !last) return;
    count = 0;
#pragma unroll
    for (int m = 0; m < Config::fragments_m; ++m)
#pragma unroll
      for (int n = 0; n < Config::fragments_n; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[m][n][i] += part[m][n][i];
          part[m][n][i] = 0.f;
        }
  }
};
template <typename Config>
struct SumInParts<Config, false> {
  using Sums = typename PatchLaneStore<Config>::Sums;
  CONVT3D_DEVICE Sums& target(Sums& sum) { return sum; }
  CONVT3D_DEVICE void join(Sums&, bool) {}
};

template <typename Config>
CONVT3D_DEVICE void run_ampere_patch(const PatchArguments<Config>& arguments) {
  if constexpr (Config::splits > 1) grid_dependency_launch();
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_m = warp / Config::warps_n;
  const int warp_n = warp % Config::warps_n;
  const uint32_t base = shared_address(shared);

  const PatchWork<Config> work(arguments);
  PatchFill<Config> fill(arguments, work, shared);
  const PatchLaneStore<Config> store(arguments, work, warp_m, warp_n, lane);
  const PatchFragments<Config> fragments{shared,
                                        base,
                                        lane / 4,
                                        lane % 4,
                                        16 * Config::fragments_m * warp_m,
                                        8 * Config::fragments_n * warp_n};

  const int total = work.count() * work.chunks;
  int started = 0, start_chunk = 0, start_tile = work.worker;
  auto start = [&]() {
    if (started < total) {
      fill.source(work.first_chunk + start_chunk, started % Config::stages);
      if (!Config::keep_weights || started < work.chunks)
        fill.weights(work.first_chunk + start_chunk,
                     Config::keep_weights ? start_chunk : started % Config::stages);
      ++started;
      if (++start_chunk == work.chunks) {
        start_chunk = 0;
        start_tile += arguments.workers;
        fill.enter(PatchTile<Config>(arguments, start_tile));
      }
    }
    async_commit();
  };

#pragma unroll 1
  for (int stage = 0; stage < Config::stages - 1; ++stage) start();
  int stage = 0;
#pragma unroll 1
  for (int tile = work.worker; tile < arguments.tiles; tile += arguments.workers) {
    typename PatchLaneStore<Config>::Sums sum;
    store.begin(sum);
    SumInParts<Config> parts;
#pragma unroll 1
    for (int chunk = 0; chunk < work.chunks; ++chunk, ++stage) {
      async_wait<Config::stages - 2>();
      __syncthreads();
      multiply<Config>(
          fragments, base + 4 * (stage % Config::stages * Config::source_words),
          base + 4 * (Config::weight_offset +
                      (Config::keep_weights ? chunk : stage % Config::stages) *
                          Config::weight_words),
          parts.target(sum), start);
      parts.join(sum, chunk + 1 == work.chunks);
    }
    if constexpr (Fusion::runs && Config::splits == 1) {
      const PatchTile<Config> place(arguments, tile);
      const LinearCells<Config> cells{arguments, place.cell + store.warp_cell};
      // The sign is 0: columns are decoded when they are needed, not before the first tile.
      const int first_column = store.first_column + int(uint32_t(place.sample) >> 31);
      fuse_sums<Config>(arguments, work.group, place.sample, first_column, store.lane, cells, sum);
    }
    store(PatchTile<Config>(arguments, tile), sum);
  }
  async_wait<0>();
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::AmperePatchConfig::threads,
                                             convt3d::AmperePatchConfig::resident_ctas)
    convt3d_ampere_patch(const convt3d::AmperePatchConfig::Storage* source,
                         const convt3d::AmperePatchConfig::Storage* weight,
                         const convt3d::AmperePatchConfig::Storage* bias,
                         convt3d::AmperePatchConfig::Target::Storage* target,
                         int size0, int size1, int size2, int tiles_per_sample, int tiles, int workers,
                         convt3d::int64_t stride_in, convt3d::int64_t stride_out,
                         convt3d::int64_t stride_d, convt3d::int64_t stride_h,
                         convt3d::int64_t stride_w
#if CONVT3D_SPLITS == 1
                             CONVT3D_FUSION_PARAMETERS
#endif
    ) {
  const convt3d::PatchArguments<convt3d::AmperePatchConfig> arguments{
      source,     weight,   bias,     target,   size0,    size1,            size2,
      stride_in,  stride_out, stride_d, stride_h, stride_w, tiles_per_sample, tiles,
      workers
#if CONVT3D_SPLITS == 1
          CONVT3D_FUSION_ARGUMENT
#endif
  };
  convt3d::run_ampere_patch<convt3d::AmperePatchConfig>(arguments);
}

#if CONVT3D_SPLITS > 1
extern "C" __global__ void __launch_bounds__(256)
    convt3d_ampere_patch_reduce(const float* partial, convt3d::AmperePatchConfig::Storage* target,
                                convt3d::int64_t elements,
                                convt3d::int64_t volume CONVT3D_FUSION_PARAMETERS) {
  convt3d::add_splits<convt3d::AmperePatchConfig>(
      partial, target, elements, convt3d::ReducedOutputs{volume CONVT3D_FUSION_ARGUMENT});
}
#endif
