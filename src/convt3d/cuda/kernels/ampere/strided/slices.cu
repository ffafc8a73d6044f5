// Gradient by input of strided layers, float32, on mma.sync and bulk copies (sm_90): the work of
// ampere/strided/dgrad.cu where lines of both tensors stay whole, by warps that share no barrier.
//
// A CTA computes tile1 whole lines of `units0` neighbouring slices of the input gradient, for 8 *
// fragments_n channels of one group, and goes on to further tiles. A stage of its ring is what
// these lines read of one slice of the output gradient: lines of every channel, as they lie in
// memory.
//
//     plane of a channel, in words:  [zeros] [up to 3: the run's alignment] [line][line] ..
//
// Windows of lines beyond the first or last of a slice are read from the zeros in front, and so
// is what windows have beyond the ends of a line: value by value, or vectors where lines are
// multiples of them.
//
//     one warp         each channel's run by one bulk copy, as soon as every warp has left a stage
//     all the others   products (ampere/strided/slice.cuh), and outputs from registers
#include "ampere/strided/slice.cuh"
#include "device/barrier.cuh"
#include "device/pipeline.cuh"
#include "device/tma.cuh"

namespace convt3d {

/// Shared memory, in bytes.
template <typename Config>
struct StridedSlicesShared {
  static constexpr int stage = 4 * StridedBox<Config>::box_words;
  static constexpr int weights = Config::ring * stage;
  static constexpr int barriers = weights + 4 * Config::chunk_weight_words;
  static constexpr int weights_barrier = barriers + 8 * 2 * Config::ring;
};

/// The lines of a stage: of a tile in a slice.
template <typename Config>
struct SliceRun {
  static constexpr int margin = round_up(Config::window, 4);  // words of zeros: a window
  int top, from, lines;  // the first unit's line; lines that exist: [from, from + lines)

  CONVT3D_DEVICE SliceRun(const StridedArguments<Config>& a, const StridedTile<Config>& tile) {
    const int reach = (a.tile[1] - 1) * Config::Axis1::unit_source + Config::Axis1::shifts;
    top = tile.index[1] * a.tile[1] * Config::Axis1::unit_source + Config::origin1;
    from = min(max(top, 0), a.source.extent[1]);
    lines = max(min(top + reach, a.source.extent[1]) - from, 0);
  }
  /// Element of the source where a channel's line `top` lies, or would.
  CONVT3D_DEVICE int64_t start(const StridedArguments<Config>& a, const StridedTile<Config>& tile,
                               int group, int channel, int slice) const {
    return (int64_t(tile.sample * Config::groups + group) * Config::source_channels + channel) *
               a.source.volume() +
           int64_t(slice) * a.source.stride0 + int64_t(top) * a.source.stride1;
  }
  CONVT3D_DEVICE static int lead(int64_t start) { return int(uint32_t(start) % 4); }
};

/// Where a lane's windows of a step lie in the ring.
template <typename Config>
struct RingLines {
  /// Positions that are loaded at once, inside of their line or all outside.
  static constexpr int vector = Config::vector > 1 ? Config::window_vector : 1;
  static constexpr int vectors = Config::window / vector;
  static constexpr int needed = Config::Axis2::unit_source + Config::Axis2::shifts;

  uint32_t first[Config::fragments_m];  // of the window at the first line, in the lane's first plane
  uint32_t zeros;
  int pitch;  // bytes from a line to the next
  int line[Config::fragments_m], lines;  // the first line among those that exist, and how many do
  const bool (&inside)[Config::fragments_m][vectors];

  CONVT3D_DEVICE void load(uint32_t (&raw)[Config::fragments_m][Config::halves][Config::window],
                           int shift) const {
#pragma unroll
    for (int m = 0; m < Config::fragments_m; ++m) {
      const bool exists = unsigned(line[m] + shift) < unsigned(lines);
      const uint32_t from = exists ? first[m] + uint32_t(shift * pitch) : zeros;
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        const int i = v * vector - Config::window_offset;  // of its first position, in what is needed
        if (i >= needed) continue;
        const bool may_be_outside = i < Config::edges || i + vector > needed - Config::edges;
        const uint32_t at = !may_be_outside || inside[m][v] ? from + 4 * vector * v : zeros;
#pragma unroll
        for (int half = 0; half < Config::halves; ++half) {
          uint32_t* to = raw[m][half] + v * vector;
          const uint32_t place = at + half * 16 * StridedBox<Config>::plane_pitch;
          if constexpr (vector == 4)
            load_shared(place, to[0], to[1], to[2], to[3]);
          else if constexpr (vector == 2)
            load_shared(place, to[0], to[1]);
          else
            to[0] = load_shared(place);
        }
      }
    }
  }
  CONVT3D_DEVICE RingLines at_step(int step) const {
    RingLines lines = *this;
#pragma unroll
    for (int m = 0; m < Config::fragments_m; ++m)
      lines.first[m] += step * StridedBox<Config>::step_bytes;
    return lines;
  }
};

template <typename Config>
struct StridedSlicesStore : StridedStore<Config> {
  using StridedStore<Config>::StridedStore;
  using StridedStore<Config>::direct;
};

/// Brings slices. One warp, each channel by one lane.
template <typename Config>
CONVT3D_DEVICE void bring_slices(const StridedArguments<Config>& a, uint32_t shared_base, int worker,
                                 int workers, int group, int lane) {
  using Box = StridedBox<Config>;
  if (lane >= Box::words) return;
  Ring<Config::ring> ring(shared_base + StridedSlicesShared<Config>::barriers);
  const int width = a.source.extent[2];
#pragma unroll 1
  for (int number = worker; number < a.count; number += workers) {
    SliceWalk<Config> walk(a, number);
    const SliceRun<Config> run(a, walk.tile);
    // From line `top` of slice 0, in elements.
    const int64_t top = run.start(a, walk.tile, group, lane, 0);
    const int first = (run.from - run.top) * width;
    const int length = run.lines * width;
#pragma unroll 1
    for (; !walk.done(); walk.advance()) {
      ring.wait_empty();
      const int64_t start = top + int64_t(walk.position()) * a.source.stride0;
      const int lead = run.lead(start);
      const int before = (first + lead) % 4;  // elements of the 16 bytes that the copy begins with
      const int bytes = length > 0 ? (before + length + 3) / 4 * 16 : 0;
      mbarrier_expect(ring.full(), bytes);
      if (bytes > 0)
        bulk_copy(shared_base + ring.stage * StridedSlicesShared<Config>::stage +
                      4 * (lane * Box::plane_pitch + run.margin + lead + first - before),
                  a.source.data + (start + (first - before)), bytes, ring.full());
      ring.advance();
    }
  }
}

/// The products and outputs of one warp.
template <typename Config>
CONVT3D_DEVICE void compute_slices(const StridedArguments<Config>& a, uint32_t shared_base,
                                   int worker, int workers, int group, int column_tile, int warp,
                                   int lane) {
  using Box = StridedBox<Config>;
  using Shared = StridedSlicesShared<Config>;
  using Axis2 = typename Config::Axis2;
  using Lines = RingLines<Config>;
  constexpr int fragments_m = Config::fragments_m;
  const StridedSlicesStore<Config> store(a, group, column_tile, warp, lane);
  const int width = a.source.extent[2];
  UnitPair pairs[fragments_m];
  uint32_t own[fragments_m];
  bool inside[fragments_m][Lines::vectors];
#pragma unroll
  for (int m = 0; m < fragments_m; ++m) {
    const int fragment = warp * fragments_m + m;
    const int row = fragment / a.line_fragments;
    const int unit = (fragment - row * a.line_fragments) * 16 + 2 * (lane / 4);
    const bool live = row < a.tile[1] && unit < a.tile[2];
    pairs[m] = {0, live ? row : 0, unit, live, live && unit + 1 < a.tile[2]};
    const int column = (live ? unit * Axis2::unit_source : 0) + Config::origin2 - Config::window_offset;
    own[m] = uint32_t(4 * (SliceRun<Config>::margin + Box::plane_pitch * (lane % 4) +
                           (live ? row * Config::Axis1::unit_source * width : 0) + column));
#pragma unroll
    for (int v = 0; v < Lines::vectors; ++v)
      inside[m][v] = unsigned(column + v * Lines::vector) < unsigned(width);
  }
  Ring<Config::ring> ring(shared_base + Shared::barriers);
  const uint32_t weights = shared_base + Shared::weights + 4u * lane * Config::lane_words;
  mbarrier_wait(shared_base + Shared::weights_barrier, 0);
#pragma unroll 1
  for (int number = worker; number < a.count; number += workers) {
    SliceWalk<Config> walk(a, number);
    const SliceRun<Config> run(a, walk.tile);
    const int phase = run.lead(run.start(a, walk.tile, group, lane % 4, 0));
    StridedLags<Config> sums;
#pragma unroll
    for (int lag = 0; lag < Config::lags; ++lag) sums.lag[lag].clear();
#pragma unroll 1
    for (int unit = walk.first_unit; unit <= walk.last_unit + Config::lags - 1; ++unit) {
#pragma unroll 1
      while (!walk.done() && walk.unit() == unit) {
        const uint32_t stage = shared_base + ring.stage * Shared::stage;
        const uint32_t lead = uint32_t(phase + walk.position() * a.source.stride0) % 4;
        Lines lines{{}, stage + 4 * Box::plane_pitch * (lane % 4), 4 * width, {}, run.lines, inside};
#pragma unroll
        for (int m = 0; m < fragments_m; ++m) {
          lines.first[m] = stage + own[m] + 4 * lead;
          lines.line[m] = pairs[m].unit1 * Config::Axis1::unit_source + run.top - run.from;
        }
        ring.wait_full();
        multiply_residue<Config>(walk.residue(), sums, lines, weights);
        mbarrier_arrive(ring.empty(ring.stage));
        ring.advance();
        walk.advance();
      }
      // The oldest slice of the result has met all its taps.
      const int finished = unit - (Config::lags - 1);
      if (finished >= walk.first_unit) {
        StridedTile<Config> tile = walk.tile;
        tile.index[0] = finished;
        store.direct(tile, pairs, sums.lag[Config::lags - 1]);
      }
#pragma unroll
      for (int lag = Config::lags - 1; lag > 0; --lag) sums.lag[lag] = sums.lag[lag - 1];
      sums.lag[0].clear();
    }
  }
}

template <typename Config>
CONVT3D_DEVICE void strided_slices(const StridedArguments<Config>& arguments) {
  static_assert(!Config::forward && Config::chunks == 1 && !Config::source_channels_last &&
                    !Config::target_channels_last && Config::Type::channels_per_word == 1 &&
                    Config::step1 == 1 && Config::step2 == 1 &&
                    Config::source_channels % Config::chunk_channels == 0,
                "float32, contiguous lines, all channels in a stage");
  static_assert(StridedBox<Config>::words <= 32 && StridedBox<Config>::plane_pitch % 16 == 8 &&
                    (Config::vector == 1 || Config::window_vector > 1) && Config::edges <= 4,
                "a channel a lane, in banks of their own, zeros enough");
  using Shared = StridedSlicesShared<Config>;
  using Work = StridedWork<Config>;
  using Registers = RingRegisters<Config, (Config::warps > 20 ? 24 : 40)>;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t shared_base = shared_address(shared);
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  const int worker = blockIdx.x / Work::n_tiles, workers = gridDim.x / Work::n_tiles;
  const int group = blockIdx.x % Work::n_tiles / Config::column_tiles;
  const int column_tile = blockIdx.x % Config::column_tiles;
  const uint32_t weights_barrier = shared_base + Shared::weights_barrier;
  constexpr int planes = Config::ring * StridedBox<Config>::words;
  for (int i = threadIdx.x; i < planes * SliceRun<Config>::margin; i += Config::threads)
    store_shared(shared_base + 4 * (i / SliceRun<Config>::margin * StridedBox<Config>::plane_pitch +
                                    i % SliceRun<Config>::margin),
                 0u);
  if (threadIdx.x == 0) {
    Ring<Config::ring>(shared_base + Shared::barriers)
        .init(StridedBox<Config>::words, lanes_of(Config::warps));
    mbarrier_init(weights_barrier, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (warp < Config::warps) {
    if constexpr (Registers::multiplying > Registers::launched)
      register_increase<Registers::multiplying>();
    compute_slices<Config>(arguments, shared_base, worker, workers, group, column_tile, warp, lane);
    return;
  }
  if constexpr (Registers::multiplying > Registers::launched) register_decrease<Registers::others>();
  if (warp == Config::warps)
    bring_slices<Config>(arguments, shared_base, worker, workers, group, lane);
  if (warp == Config::warps + 1 && lane == 0) {
    grid_dependency_wait();
    mbarrier_expect(weights_barrier, 4 * Config::chunk_weight_words);
    bulk_copy(shared_base + Shared::weights,
              arguments.weights +
                  int64_t(group * Config::column_tiles + column_tile) * Config::chunk_weight_words,
              4 * Config::chunk_weight_words, weights_barrier);
  }
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::StridedConfig::threads, 1)
    convt3d_ampere_strided_slices(const float* source, const convt3d::uint32_t* weights, float* target,
                                  int source0, int source1, int source2, int target0, int target1,
                                  int target2, int tile1, int tile2, int tiles0, int tiles1,
                                  int line_fragments, int count,
                                  int units0 CONVT3D_FUSION_PARAMETERS) {
  const convt3d::StridedArguments<convt3d::StridedConfig> arguments{
      {source, {source0, source1, source2}, source1 * source2, source2},
      {target, {target0, target1, target2}, target1 * target2, target2},
      weights,
      nullptr,
      {1, tile1, tile2},
      {tiles0, tiles1, 1},
      1,
      line_fragments,
      count,
      1,
      units0 CONVT3D_FUSION_ARGUMENT};
  convt3d::strided_slices<convt3d::StridedConfig>(arguments);
}
