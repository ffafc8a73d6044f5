// kernel == stride layers without padding on Hopper's warpgroup products (sm_90a), forward and
// gradient by input: one matrix product, rows = cells (see patch/product.cuh).
//
// A persistent CTA owns `column_tile` columns and walks over tiles of `cells` input positions,
// counted linearly over (D, H, W):
//
//            columns (rows of shared memory, k contiguous)
//          +---------------------+
//    cells | consumer 0          |   one product is m64 x column_tile x 8 words, A in registers, B in
//          +---------------------+   shared memory
//          | consumer 1 ...
//
// Rows of a fragment stand for neighbouring cells, as in ampere/patch/kernel.cu, so that a lane
// ends with outputs that are neighbours in memory: 16 bytes a store, straight from the
// accumulators. channels_last sources have k contiguous: both operands of a product are in shared
// memory.
//
// Shared memory: source stages of each consumer, one chunk of k each (TMA boxes of [line][128
// bytes of cells, with their slots along W], swizzled) | weight stages, [column][128 bytes of k],
// swizzled | staged outputs | the bias of each column | barriers.
//
// Warpgroups 0 .. consumers-1 multiply and store; each has a ring of source stages of its own, so
// that one stores while another multiplies. Of the other warpgroups, warp i < consumers fetches
// the source ring of consumer i, the others bring weights (patch/load.cuh), all of them once or
// chunk by chunk for every tile: both by TMA. Weights of the forward pass come as memory has
// them, 128 bytes of columns a row, and are transposed within their stage; k of the gradient is
// in the order of the weight. IEEE-grade products are in patch/split.cuh.
//
// Where tiles are few and k is long, CTAs share the chunks of a tile. Their partial sums are
// added in a fixed order by convt3d_patch_reduce.
#undef CONVT3D_WGMMA_USES
#define CONVT3D_WGMMA_USES(n) ((n) == CONVT3D_COLUMN_TILE)
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "patch/load.cuh"
#include "patch/reduce.cuh"
#include "patch/split.cuh"
#include "patch/store.cuh"

namespace convt3d {

template <int N>
CONVT3D_DEVICE void multiply(MathTf32, float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
  wgmma_tf32_rs<N>(d, a, b);
}
template <int N>
CONVT3D_DEVICE void multiply(Math16<Float16>, float (&d)[N / 2], const uint32_t (&a)[4],
                             uint64_t b) {
  wgmma_f16_rs<N>(d, a, b);
}
template <int N>
CONVT3D_DEVICE void multiply(Math16<BFloat16>, float (&d)[N / 2], const uint32_t (&a)[4],
                             uint64_t b) {
  wgmma_bf16_rs<N>(d, a, b);
}

/// Rows of B are of k.
template <int N>
CONVT3D_DEVICE void multiply_n_major(Math16<Float16>, float (&d)[N / 2], const uint32_t (&a)[4],
                                     uint64_t b) {
  wgmma_f16_rs_n_major<N>(d, a, b);
}
template <int N>
CONVT3D_DEVICE void multiply_n_major(Math16<BFloat16>, float (&d)[N / 2], const uint32_t (&a)[4],
                                     uint64_t b) {
  wgmma_bf16_rs_n_major<N>(d, a, b);
}

/// Both operands in shared memory.
template <int N>
CONVT3D_DEVICE void multiply_n_major(Math16<Float16>, float (&d)[N / 2], uint64_t a, uint64_t b) {
  wgmma_f16_ss_n_major<N>(d, a, b);
}
template <int N>
CONVT3D_DEVICE void multiply_n_major(Math16<BFloat16>, float (&d)[N / 2], uint64_t a, uint64_t b) {
  wgmma_bf16_ss_n_major<N>(d, a, b);
}
template <int N>
CONVT3D_DEVICE void multiply(MathTf32, float (&d)[N / 2], uint64_t a, uint64_t b) {
  wgmma_tf32_ss<N>(d, a, b);
}
template <int N>
CONVT3D_DEVICE void multiply(Math16<Float16>, float (&d)[N / 2], uint64_t a, uint64_t b) {
  wgmma_f16_ss<N>(d, a, b);
}
template <int N>
CONVT3D_DEVICE void multiply(Math16<BFloat16>, float (&d)[N / 2], uint64_t a, uint64_t b) {
  wgmma_bf16_ss<N>(d, a, b);
}

template <int Value>
struct Constant {
  static constexpr int value = Value;
};

/// The accumulators of one product: fragments of eight columns.
template <int N>
CONVT3D_DEVICE float (&sums_of(float (&fragments)[N / 8][4]))[N / 2] {
  return *reinterpret_cast<float(*)[N / 2]>(&fragments[0][0]);
}

/// Source fragments of the gradient, but of one slot in 16 bits (CellFragments). k is in the order
/// of memory, so that weights come by TMA: of a step's eight words a lane reads words t and t + 4,
/// of which `cell_words` lie in one line.
///
/// With two words a line, lanes of the same cells read two lines at once. Cells 0, 1, 4, 5 .. of
/// a fragment are its rows g, and cells 2, 3, 6, 7 .. its rows g + 8, so that these differ in
/// banks.
template <typename Config>
struct LineFragments {
  static constexpr int words = Config::cell_words;
  uint32_t start;  // of the lane's first word

  CONVT3D_DEVICE LineFragments(int warp, int lane) {
    const int g = lane / 4, line = lane % 4 / words, word = lane % 4 % words;
    int cell = 16 * Config::blocks * warp;
    cell += words == 1 ? flat_run<Config>(g) * Config::run : words == 2 ? g / 2 * 4 + g % 2 : g;
    // Folded: (cell along H, slot along H, cell along W, word), else (cell along W, word).
    constexpr int row_cells = Config::fold ? Config::fold : Config::box_cells;
    const int row = cell % Config::box_cells / row_cells * Config::folded + word / Config::slot_words;
    const int in_line = 4 * ((row * row_cells + cell % row_cells) * Config::slot_words +
                             word % Config::slot_words);
    start = cell / Config::box_cells * Config::box_bytes + line * 128 + (in_line ^ line * 16);
  }

  CONVT3D_DEVICE void load(uint32_t stage, int step, uint32_t (&a)[Config::blocks][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // of the step
      const int line = (8 * step + 4 * half) / words;
      const uint32_t at = ((stage + start) ^ line % 8 * 16) + line * 128;
      if constexpr (words == 1) {
        uint32_t word[Config::run];
        load_words<Config::run>(at, word);
#pragma unroll
        for (int row = 0; row < Config::run; ++row) a[row / 2][2 * half + row % 2] = word[row];
      } else {
        // Two cells further, or in the next box of eight cells.
        constexpr int next = 8 * Config::slot_words;
#pragma unroll
        for (int m = 0; m < Config::blocks; ++m)
#pragma unroll
          for (int row = 0; row < 2; ++row)
            a[m][2 * half + row] = words == 2
                                       ? load_shared((at ^ row * next) + m * Config::box_bytes)
                                       : load_shared(at + (2 * m + row) * Config::box_bytes);
      }
    }
  }
  CONVT3D_DEVICE static void pair(uint32_t (&)[Config::blocks][4]) {}

  /// Lanes exchange cells, so that each has two neighbours.
  CONVT3D_DEVICE static void exchange(float (&sum)[Config::fragments_n][4]) {
    const bool odd = threadIdx.x / 4 % 2;
#pragma unroll
    for (int n = 0; n < Config::fragments_n; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low = sum[n][i], high = sum[n][2 + i];
        const float other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 4);
        sum[n][i] = odd ? other : low;
        sum[n][2 + i] = odd ? high : other;
      }
  }
};

/// channels_last: products read the source themselves.
template <typename Config>
struct NoFragments {
  CONVT3D_DEVICE NoFragments(int, int) {}
  CONVT3D_DEVICE void load(uint32_t, int, uint32_t (&)[Config::blocks][4]) const {}
  CONVT3D_DEVICE static void pair(uint32_t (&)[Config::blocks][4]) {}
};

template <typename Config>
CONVT3D_DEVICE void consume(const PatchArguments<Config>& arguments, const PatchWork<Config>& work,
                            const TensorMap& target_map, int box_width, uint32_t base,
                            Ring<Config::source_stages> cells, Ring<Config::weight_stages> weights,
                            int consumer, int warp) {
  constexpr int N = Config::column_tile;
  constexpr int ahead = Config::ahead, pending = Config::pending;
  // From a shuffle: threadIdx would be read anew for every chunk, behind the loads of fragments.
  const int lane = __shfl_sync(0xffffffffu, int(threadIdx.x), int(threadIdx.x)) % 32;
  const typename Select<
      Config::last, NoFragments<Config>,
      typename Select<Config::channel_pairs, CellFragments<Config>,
                      LineFragments<Config>>::Type>::Type
      fragments(warp, lane);
  PatchLaneStore<Config> store(arguments, work, consumer * 4 + warp, 0, lane);
  const int first_column = store.first_column;
  using Staging = typename Select<Config::row_gradient, DgradStaging<Config>,
                                  PatchStaging<Config>>::Type;
  typename Select<Config::staged, Staging, NoStaging>::Type staging(
      arguments, work, target_map, base + Config::staging_offset, consumer, box_width);
  const uint32_t source =
      base + consumer * Config::source_stages * Config::source_stage_bytes;
  const uint64_t columns =
      Config::n_major ? matrix_descriptor_128b_n_major(base + Config::weight_offset,
                                                       Config::weight_box_bytes)
                      : matrix_descriptor_128b(base + Config::weight_offset);
  constexpr int step_bytes = Config::n_major ? 16 * 128 : 32;

  const uint32_t bias = base + Config::bias_offset;
  if constexpr (Config::ping_pong) {
    if (consumer > 0) mbarrier_wait(base + Config::ping_pong_offset + 8 * (consumer - 1), 0);
  }
  uint32_t a[Config::steps][Config::blocks][4];
  typename PatchLaneStore<Config>::Sums sum;

#pragma unroll 1
  for (int tile = work.worker; tile < arguments.tiles; tile += arguments.workers) {
    const PatchTile<Config> place(arguments, tile);
    Ring<Config::source_stages> at = cells;  // without the copy registers are allocated otherwise
    // The sign is 0: as in the epilogue, columns are decoded when they are needed.
    store.first_column = first_column + (uint32_t(place.sample) >> 31);
    store.begin_kept(sum, bias);
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
      wgmma_fence_registers(sums_of<N>(sum[block]));
    int held = -1, held_cells = -1;  // the stages that the previous chunk's products read
    // The others begin behind the first chunks of the first consumer.
    bool begins = false;
    if constexpr (Config::ping_pong)
      begins = __shfl_sync(0xffffffffu, consumer + warp + lane == 0 && tile == work.worker, lane);
    const int chunks = Config::splits == 1 ? Config::chunks : work.chunks;
    if constexpr (!Config::last) {
      at.wait_full();
#pragma unroll
      for (int step = 0; step < ahead; ++step)
        fragments.load(source + at.stage * Config::source_stage_bytes, step, a[step]);
    }
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if constexpr (Config::last) at.wait_full();
      const int weight_stage = Config::keep_weights ? chunk : weights.stage;
      if constexpr (Config::keep_weights)
        mbarrier_wait(weights.barriers + 8 * chunk, 0);
      else
        weights.wait_full();
      const uint32_t stage = source + at.stage * Config::source_stage_bytes;
      // Where fragments are loaded ahead; behind the last chunk once more its own, which is not
      // used.
      Ring<Config::source_stages> next = at;
      next.advance();
      const bool more = chunk + 1 < chunks;
      next.stage = more ? next.stage : at.stage;
      next.parity = more ? next.parity : at.parity;
      const uint64_t b = columns + weight_stage * (Config::weight_stage_bytes / 16);
#pragma unroll
      for (int step = 0; step < Config::steps; ++step) {
        wgmma_wait<pending>();
        if (step == pending) {  // the previous chunk's products are done
          if constexpr (!Config::keep_weights) {
            if (lane == 0 && held >= 0) mbarrier_arrive(weights.empty(held));
            held = weights.stage;
          }
          if constexpr (Config::last) {
            if (lane == 0 && held_cells >= 0) mbarrier_arrive(at.empty(held_cells));
            held_cells = at.stage;
          }
        }
        if constexpr (!Config::last) {
          const int later = step + ahead;
          if (later == Config::steps) next.wait_full();
          if (later < Config::steps)
            fragments.load(stage, later, a[later]);
          else
            fragments.load(source + next.stage * Config::source_stage_bytes,
                           later - Config::steps, a[later - Config::steps]);
          fragments.pair(a[step]);
        }
        wgmma_fence();
#pragma unroll
        for (int block = 0; block < Config::blocks; ++block) {
          if constexpr (Config::last && Config::n_major)
            multiply_n_major<N>(typename Config::Math{}, sums_of<N>(sum[block]),
                                matrix_descriptor_128b(stage) + 2 * step,
                                b + step_bytes / 16 * step);
          else if constexpr (Config::last)
            multiply<N>(typename Config::Math{}, sums_of<N>(sum[block]),
                        matrix_descriptor_128b(stage) + 2 * step, b + 2 * step);
          else if constexpr (Config::n_major)
            multiply_n_major<N>(typename Config::Math{}, sums_of<N>(sum[block]), a[step][block],
                                b + step_bytes / 16 * step);
          else
            multiply<N>(typename Config::Math{}, sums_of<N>(sum[block]), a[step][block],
                        b + 2 * step);
        }
        wgmma_commit();
      }
      if constexpr (Config::ping_pong) {
#pragma unroll
        for (int next = 1; next < Config::consumers; ++next)
          mbarrier_arrive_if(base + Config::ping_pong_offset + 8 * (next - 1),
                             begins && chunk == Config::chunk_before(next));
      }
      // The fragments are in registers.
      if (!Config::last && lane == 0) mbarrier_arrive(at.empty(at.stage));
      at.advance();
      if constexpr (!Config::keep_weights) weights.advance();
    }
    wgmma_wait<0>();
    if constexpr (!Config::keep_weights) {
      if (lane == 0) mbarrier_arrive(weights.empty(held));
    }
    if constexpr (Config::last) {
      if (lane == 0) mbarrier_arrive(at.empty(held_cells));
    }
    // Where fragments stand for cells that are no neighbours.
    if constexpr (!Config::channel_lines && Config::cell_words == 2) {
#pragma unroll
      for (int block = 0; block < Config::blocks; ++block)
        LineFragments<Config>::exchange(sum[block]);
    }
    if constexpr (Fusion::runs && Config::splits == 1)
      fuse_tile<Config>(arguments, work, place, box_width, consumer, warp, store, sum);
    if constexpr (Config::staged)
      staging(place, sum);
    else
      store(place, sum);
    cells = at;
  }
  if constexpr (Config::staged) staging.finish();
}

template <typename Config>
CONVT3D_DEVICE void run_patch(const PatchArguments<Config>& arguments, const TensorMap& map,
                              const TensorMap& weight_map, const TensorMap& target_map,
                              int box_width) {
  if constexpr (Config::splits > 1) grid_dependency_launch();
  extern __shared__ __align__(128) unsigned char shared_start[];
  // The swizzle follows address bits.
  const uint32_t base = (shared_address(shared_start) + 1023) / 1024 * 1024;
  // Uniform in a warp, and known to be: roles must not look divergent around warpgroup products.
  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  const uint32_t barriers = base + Config::barrier_offset, raw = base + Config::raw_offset;
  const Ring<Config::weight_stages> weights(barriers);
  auto ring_of = [&](int consumer) {
    return Ring<Config::source_stages>(
        barriers + 16 * (Config::weight_stages + consumer * Config::source_stages));
  };
  const bool by_tma = Config::map_weights && arguments.weights_in_order();
  // Forward, which barriers say that weights have come.
  const uint32_t weights_full = !by_tma ? 0 : Config::transposed ? raw : weights.barriers;
  const PatchWork<Config> work(arguments);
  const uint32_t weight_base = base + Config::weight_offset;
  if (threadIdx.x == 128 * Config::consumers) {
    tma_prefetch(map);
    if constexpr (Config::map_weights) tma_prefetch(weight_map);
    if constexpr (Config::staged) tma_prefetch(target_map);
    weights.init(by_tma ? (Config::transposed ? Config::weight_boxes : 1) : Config::chunk_units,
                 4 * Config::consumers);
    if constexpr (Config::transposed)
      for (int i = 0; i < Config::weight_stages; ++i) mbarrier_init(raw + 8 * i, 1);
    if constexpr (Config::ping_pong)
      for (int i = 1; i < Config::consumers; ++i)
        mbarrier_init(base + Config::ping_pong_offset + 8 * (i - 1), 1);
    for (int i = 0; i < Config::consumers; ++i) ring_of(i).init(1, 4);
    mbarrier_init_fence();
    // What comes first is on its way before the other warps have seen the barriers.
    fill_first<Config>(arguments, work, map, box_width, base, ring_of(0).barriers, weight_map,
                       weight_base, weights_full);
  } else if (Config::bias && warpgroup < Config::consumers) {
    PatchLaneStore<Config>(arguments, work, 0, 0, 0)
        .keep_bias(base + Config::bias_offset, threadIdx.x, 128 * Config::consumers);
  }
  __syncthreads();

  // Warps that bring weights, `helpers` of them consumers where TMA cannot and weights stay.
  constexpr int helpers = Config::keep_weights ? 4 * Config::consumers : 0;
  constexpr int bringers = 4 * Config::fillers - Config::consumers;
  if (warpgroup >= Config::consumers) {
    if constexpr (Config::set_registers) register_decrease<Config::producer_registers>();
    const int producer = warp - 4 * Config::consumers, bringer = producer - Config::consumers;
    if (bringer < 0) {
      if (!Config::channel_lines || threadIdx.x % 32 == 0)
        fill_cells<Config>(arguments, work, map, box_width,
                           base + producer * Config::source_stages * Config::source_stage_bytes,
                           ring_of(producer), producer, weight_map, weight_base, weights,
                           producer == 0 ? weights_full : 0);
    } else if (!by_tma)
      copy_weights<Config>(arguments, work, weight_base, weights, helpers + bringer,
                           helpers + bringers);
    else if constexpr (Config::transposed) {
      // With a box of every chunk, a warp meets all phases of the ring's barriers.
      constexpr bool fewer = !Config::keep_weights && Config::weight_boxes < bringers;
      constexpr int transposers = fewer ? Config::weight_boxes : bringers;
      if (!fewer || bringer < transposers)
        transpose_weights<Config>(work, weight_base, weights, raw, bringer, transposers);
    } else if (!Config::forward && bringer == 0 && threadIdx.x % 32 == 0)
      load_weights<Config>(work, weight_map, weight_base, weights);
  } else {
    if constexpr (Config::set_registers) register_increase<Config::consumer_registers>();
    if (helpers > 0 && !by_tma)
      copy_weights<Config>(arguments, work, weight_base, weights, warp, helpers + bringers);
    if constexpr (Config::Math::words_per_value > 1)
      consume_split<Config>(arguments, work, target_map, box_width, base, ring_of(warpgroup),
                            weights, warpgroup, warp % 4);
    else
      consume<Config>(arguments, work, target_map, box_width, base, ring_of(warpgroup), weights,
                      warpgroup, warp % 4);
  }
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::PatchConfig::threads,
                                             convt3d::PatchConfig::resident_ctas)
    convt3d_patch(const convt3d::PatchConfig::Storage* weight,
                  const convt3d::PatchConfig::Storage* bias,
                  convt3d::PatchConfig::Target::Storage* target,
                  const __grid_constant__ convt3d::TensorMap source,
#if CONVT3D_MAP_WEIGHTS
                  const __grid_constant__ convt3d::TensorMap weights,
#endif
#if CONVT3D_STAGED_COLUMNS
                  const __grid_constant__ convt3d::TensorMap target_map, int box_width,
#endif
                  int size0, int size1, int size2, int tiles_per_sample, int tiles,
                  int workers,
                  convt3d::int64_t stride_in, convt3d::int64_t stride_out,
                  convt3d::int64_t stride_d, convt3d::int64_t stride_h,
                  convt3d::int64_t stride_w
#if CONVT3D_SPLITS == 1
                      CONVT3D_FUSION_PARAMETERS
#endif
    ) {
  const convt3d::PatchArguments<convt3d::PatchConfig> arguments{
      nullptr,    weight,     bias,     target,   size0,    size1,            size2,
      stride_in,  stride_out, stride_d, stride_h, stride_w, tiles_per_sample, tiles,
      workers
#if CONVT3D_SPLITS == 1
          CONVT3D_FUSION_ARGUMENT
#endif
  };
#if !CONVT3D_MAP_WEIGHTS
  const convt3d::TensorMap& weights = source;
#endif
#if !CONVT3D_STAGED_COLUMNS
  const convt3d::TensorMap& target_map = source;
  constexpr int box_width = 0;
#endif
  convt3d::run_patch(arguments, source, weights, target_map, box_width);
}

#if CONVT3D_SPLITS > 1
extern "C" __global__ void __launch_bounds__(256)
    convt3d_patch_reduce(const float* partial, convt3d::PatchConfig::Storage* target,
                         convt3d::int64_t elements,
                         convt3d::int64_t volume CONVT3D_FUSION_PARAMETERS) {
  convt3d::add_splits<convt3d::PatchConfig>(partial, target, elements,
                                            convt3d::ReducedOutputs{volume CONVT3D_FUSION_ARGUMENT});
}
#endif
