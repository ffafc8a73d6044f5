// Forward pass and gradient by input as a gather on Hopper's warpgroup products (sm_90a).
//
// A persistent CTA computes, for one group, one phase of axis 1 and one column tile, a *tile* of
// rows (neighbouring units of the planes across axis 0, counted through lines, pieces and
// samples), and sweeps with it along axis 0:
//
//      source planes of a step        window of sums, in registers
//      (boxes in shared memory)       [slots of axis 2][blocks of 64 rows][planes][columns]
//            .------.                      .------.------.------.------.
//      x --> | rows | * all taps of  -->   | done | done |      |      |   complete planes leave
//            '------'   axis 0             '------'------'------'------'   through the epilogue, the
//                                                                          rest moves to the left
//
// One product is m64 x (a run of taps of axis 0 x column tile) x eight words; both operands are
// read from shared memory, and a tap of axes 1 and 2 is nothing but another start address of the
// rows.
//
// Shared memory: barriers | source boxes, one chunk of channels of a step each | weight stages,
// one (chunk, tap of axis 1) each, or all weights of a column tile | of each warpgroup, the
// epilogue's table of rows and staged columns.
//
// Warpgroups 0 .. consumers-1 multiply and store, each its own rows, so that one stores while the
// others multiply. Of the last warpgroup(s), warp 0 streams weights and the others fill boxes.
// Full and empty barriers of both rings are the only synchronisation.
#undef CONVT3D_WGMMA_USES
#define CONVT3D_WGMMA_USES(n) ((n) % CONVT3D_COLUMN_TILE == 0)  // of several taps
#include "device/barrier.cuh"
#include "device/wgmma.cuh"
#include "sweep/load.cuh"
#include "sweep/store.cuh"

namespace convt3d {

template <int N>
CONVT3D_DEVICE float (&part_of(float* sums))[N / 2] {
  return *reinterpret_cast<float(*)[N / 2]>(sums);
}

/// Products of one source plane and one tap of axis 2 with the window planes from `From` on.
template <typename Config, int Plane, int From>
CONVT3D_DEVICE void multiply_plane(float (&sum)[Config::sums], uint64_t rows, uint64_t weights) {
  using Axis0 = typename Config::Axis0;
  constexpr int first = Axis0::first(Plane);
  constexpr int end = first + Axis0::count(Plane);
  if constexpr (From < end) {
    constexpr int to = Axis0::block_end(From, end);
    constexpr int columns = (to - From) * Config::column_tile;
    constexpr int at = (Axis0::position(Plane) + From - first) * Config::column_tile;
    wgmma_product_of<columns>(typename Config::Math{},
                              part_of<columns>(sum + From * Config::plane_sums), rows,
                              weights + at);
    multiply_plane<Config, Plane, to>(sum, rows, weights);
  }
}

/// Products of one tap of axis 2 with all source planes of a step.
template <typename Config, int Plane>
CONVT3D_DEVICE void multiply_planes(float (&sum)[Config::sums], uint64_t rows, uint64_t weights) {
  if constexpr (Plane < Config::Axis0::source_step) {
    if constexpr (Config::Axis0::count(Plane) > 0)
      multiply_plane<Config, Plane, Config::Axis0::first(Plane)>(
          sum, rows + Plane * (Config::plane_bytes / 16), weights);
    multiply_planes<Config, Plane + 1>(sum, rows, weights);
  }
}

/// Products of one (chunk, tap of axis 1), which are left in flight. `Pairs`: of two taps of axis
/// 2 each, in the depth of one product.
template <typename Config, bool Pairs, typename Sums>
CONVT3D_DEVICE void multiply_stage(Sums& sum, uint64_t rows, uint64_t weights) {
  using Axis2 = typename Config::Axis2;
  wgmma_fence();
  if constexpr (Pairs) {
    // The second quad of a pair's rows is the first one of the other tap's.
    const uint64_t paired =
        (rows & ~(uint64_t(0x3fff) << 16)) | uint64_t(Layer::dilation2) << 16;
#pragma unroll
    for (int pair = 0; 2 * pair < Axis2::kernel; ++pair) {
      const int offset = Axis2::shift_of(0, Config::paired_tap(pair, 0)) - Axis2::min_shift;
      const uint64_t own = 2 * pair + 1 < Axis2::kernel ? paired : rows;
#pragma unroll
      for (int block = 0; block < Config::blocks; ++block)
        multiply_planes<Config, 0>(sum[0][block], own + (offset + 64 * block),
                                   weights + pair * (Config::tap_bytes / 16));
    }
  } else {
#pragma unroll
    for (int tap2 = 0; tap2 < Axis2::kernel; ++tap2)
#pragma unroll
      for (int slot2 = 0; slot2 < Config::slots2; ++slot2) {
        if (!Axis2::valid(slot2, tap2)) continue;
        const int shift2 = Axis2::shift_of(slot2, tap2) - Axis2::min_shift;
        const int offset = shift2 % Config::residues2 * (Config::sub_box_bytes / 16) +
                           shift2 / Config::residues2;
#pragma unroll
        for (int block = 0; block < Config::blocks; ++block)
          multiply_planes<Config, 0>(sum[slot2][block], rows + (offset + 64 * block),
                                     weights + tap2 * (Config::tap_bytes / 16));
      }
  }
  wgmma_commit();
}

/// Number `Index` of the sets of split products of one (chunk, tap of axis 1): a chain of taps of
/// axis 2, their slot, a block of rows and a source plane, the last one fastest.
template <typename Config, int Index>
struct SplitSet {
  using Axis0 = typename Config::Axis0;
  using Axis2 = typename Config::Axis2;
  static constexpr int plane = Index % Axis0::source_step;
  static constexpr int block = Index / Axis0::source_step % Config::blocks;
  static constexpr int slot2 = Index / (Axis0::source_step * Config::blocks) % Config::slots2;
  static constexpr int chain = Index / (Axis0::source_step * Config::blocks * Config::slots2);
  static constexpr int next_chain = (chain + 1) * Config::chain_taps;
  static constexpr int end_tap = next_chain < Axis2::kernel ? next_chain : Axis2::kernel;
  CONVT3D_CONSTEXPR static int tap_from(int tap2) {
    while (tap2 < end_tap && !Axis2::valid(slot2, tap2)) ++tap2;
    return tap2;
  }
  static constexpr int first_tap = tap_from(chain * Config::chain_taps);
  static constexpr bool valid = first_tap < end_tap && Axis0::count(plane) > 0;
  // Of a plane that no tap meets there are none: the type needs one.
  static constexpr int columns =
      (Axis0::count(plane) > 0 ? Axis0::count(plane) : 1) * Config::column_tile;

  /// Products of the parts of `tap2` and of the taps after it: all those with a small part come
  /// first. Until the others come, the sum is small, and so is what the adder cuts off.
  template <bool Small, int tap2>
  CONVT3D_DEVICE static void multiply_taps(float (&d)[columns / 2], uint64_t rows,
                                           uint64_t weights) {
    if constexpr (tap2 < end_tap) {
      constexpr int shift2 = Axis2::shift_of(slot2, tap2) - Axis2::min_shift;
      const uint64_t from =
          rows + (shift2 % Config::residues2 * (Config::sub_box_bytes / 16) + shift2 / Config::residues2);
      const uint64_t by = weights + tap2 * (Config::tap_bytes / 16);
      if constexpr (!Small) {
        wgmma_tf32_ss<columns>(d, from, by);
      } else {
        constexpr int small_rows = Config::part_bytes / 16;
        constexpr int small_weights = Config::weight_part_bytes / 16;
        if constexpr (tap2 == first_tap)
          wgmma_tf32_ss_first<columns>(d, from + small_rows, by);
        else
          wgmma_tf32_ss<columns>(d, from + small_rows, by);
        wgmma_tf32_ss<columns>(d, from, by + small_weights);
      }
      multiply_taps<Small, tap_from(tap2 + 1)>(d, rows, weights);
    }
  }
  template <typename Product>
  CONVT3D_DEVICE static void multiply(Product& product, uint64_t rows, uint64_t weights) {
    auto& d = part_of<columns>(product);
    rows += plane * (Config::plane_bytes / 16) + 64 * block;
    weights += Axis0::position(plane) * Config::column_tile;
    wgmma_fence();
    multiply_taps<true, first_tap>(d, rows, weights);
    multiply_taps<false, first_tap>(d, rows, weights);
    wgmma_commit();
  }
  template <typename Sums, typename Product>
  CONVT3D_DEVICE static void add(Sums& sum, const Product& product) {
    constexpr int first = Axis0::first(plane) * Config::plane_sums;
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) sum[slot2][block][first + i] += product[i];
  }
};

/// All sets from `Index` on; `Before` is the one in flight, if any, in the other accumulators.
template <typename Config, int Index, int Before, typename Sums, typename Product>
CONVT3D_DEVICE void multiply_split(Sums& sum, Product& product, Product& other, uint64_t rows,
                                   uint64_t weights) {
  using Set = SplitSet<Config, Index>;
  constexpr bool overlapped = Config::product_sets > 1;
  if constexpr (Set::chain >= Config::chains) {
    if constexpr (Before >= 0) {
      wgmma_wait<0>();
      SplitSet<Config, Before>::add(sum, other);
    }
  } else if constexpr (!Set::valid) {
    multiply_split<Config, Index + 1, Before>(sum, product, other, rows, weights);
  } else {
    Set::multiply(product, rows, weights);
    if constexpr (!overlapped) {
      wgmma_wait<0>();
      Set::add(sum, product);
    } else if constexpr (Before >= 0) {
      wgmma_wait<1>();
      SplitSet<Config, Before>::add(sum, other);
    }
    multiply_split<Config, Index + 1, overlapped ? Index : -1>(sum, other, product, rows, weights);
  }
}

/// Ping-pong of two warpgroups: one begins a step when the other one is in the middle of its own,
/// so that it stores while the other one multiplies. Left alone, they stay in step and store at
/// the same time.
template <typename Config>
struct PingPong {
  uint32_t mine, other, parity;
  int left = 0;

  CONVT3D_DEVICE PingPong(uint32_t shared_base, int warpgroup)
      : mine(shared_base + Config::ping_pong_offset + 8 * warpgroup),
        other(shared_base + Config::ping_pong_offset + 8 * (1 - warpgroup)),
        parity(1 - warpgroup) {}
  CONVT3D_DEVICE void begin(int taps1) {
    mbarrier_wait(other, parity);
    parity ^= 1;
    // As far as one can come while the other one holds the last buffer of each ring.
    left = min((Config::chunks * taps1 + 1) / 2, (Config::source_stages - 1) * taps1);
    if (!Config::keep_weights) left = min(left, Config::weight_stages - 1);
  }
  CONVT3D_DEVICE void issued(bool first_lane) {
    --left;
    if (first_lane && left == 0) mbarrier_arrive(mine);
  }
};

/// What a warpgroup of consumers goes on with from chunk to chunk of a step.
template <typename Config>
struct StepState {
  Ring<Config::source_stages> a_stages;
  Ring<Config::weight_stages> stages;
  PingPong<Config> ping_pong;
  int stage_held, a_stage_held;  // read by the products of the previous stage
};

/// All products of one chunk of a step. `Pairs`: of its last one, see SweepConfig::tap_pairs.
template <typename Config, bool Pairs, typename Leg, typename Sums>
CONVT3D_DEVICE void multiply_chunk(Sums& sum, const RowSpace<Config>& space, const Leg& leg,
                                   StepState<Config>& state, uint32_t shared_base, int warpgroup,
                                   int chunk) {
  using Axis1 = typename Config::Axis1;
  const bool first_lane = threadIdx.x % 32 == 0;
  auto& a_stages = state.a_stages;
  auto& stages = state.stages;
  a_stages.wait_full();
  const uint32_t box = shared_base + Config::source_offset + a_stages.stage * Config::box_bytes +
                       warpgroup * Config::warpgroup_rows * 16;
#pragma unroll 1
  for (int tap1 = 0; tap1 < leg.taps1.count; ++tap1) {
    if constexpr (!Config::keep_weights) stages.wait_full();
    const int shift1 = leg.taps1.first_shift + tap1 * leg.taps1.shift_step - Axis1::min_shift;
    const int line = shift1 / Config::residues1;
    const int residue1 = shift1 - line * Config::residues1;
    const uint64_t rows = matrix_descriptor(
        box + residue1 * (Config::residues2 * Config::sub_box_bytes) + line * space.pitch2 * 16,
        Config::quad_bytes, 128);
    const int at = Config::keep_weights
                       ? chunk * Axis1::kernel + leg.taps1.first_position + tap1
                       : stages.stage;
    const uint64_t weights =
        matrix_descriptor(shared_base + Config::weight_offset + at * Config::stage_bytes,
                          Config::stacked * 16, 128);
    if constexpr (Config::parts > 1) {
      float product[Config::product_sets][Config::stacked / 2];
      multiply_split<Config, 0, -1>(sum, product[0], product[Config::product_sets - 1], rows,
                                    weights);
      if (!Config::keep_weights && first_lane) mbarrier_arrive(stages.empty(stages.stage));
    } else {
      multiply_stage<Config, Pairs>(sum, rows, weights);
      wgmma_wait<1>();
      if constexpr (Config::ping_pong) state.ping_pong.issued(first_lane);
      if (!Config::keep_weights && first_lane && state.stage_held >= 0)
        mbarrier_arrive(stages.empty(state.stage_held));
      if (first_lane && tap1 == 0 && state.a_stage_held >= 0)
        mbarrier_arrive(a_stages.empty(state.a_stage_held));
      state.stage_held = stages.stage;
    }
    if constexpr (!Config::keep_weights) stages.advance();
  }
  if constexpr (Config::parts > 1) {
    if (first_lane) mbarrier_arrive(a_stages.empty(a_stages.stage));
  }
  state.a_stage_held = a_stages.stage;
  a_stages.advance();
}

template <typename Config>
CONVT3D_DEVICE void consume(const SweepArguments<typename Config::Storage>& arguments,
                            const RowSpace<Config>& space, uint32_t shared_base,
                            const Ring<Config::source_stages>& a_stages_,
                            const Ring<Config::weight_stages>& stages_, int warpgroup) {
  using Axis0 = typename Config::Axis0;
  constexpr int slots2 = Config::slots2;
  const bool first_lane = threadIdx.x % 32 == 0;
  const SweepStore<Config> store(arguments, space, warpgroup, shared_base);
  float sum[slots2][Config::blocks][Config::sums];
  constexpr int sums = slots2 * Config::blocks * Config::sums;
  [[maybe_unused]] EarlierParts<sums> earlier;

  Walk<Config> walk(arguments, space);
  typename Walk<Config>::Leg leg;
  StepState<Config> state{a_stages_, stages_, PingPong<Config>(shared_base, warpgroup), -1, -1};
  auto& stages = state.stages;
  int set_held = -1;
  while (walk.next(leg)) {
    store.begin(leg);
    if constexpr (Config::keep_weights) {
      if (leg.set() != set_held) {
        if (set_held >= 0) {
          if (first_lane) mbarrier_arrive(stages.empty(0));
          stages.advance();
        }
        stages.wait_full();
        set_held = leg.set();
      }
    }
#pragma unroll
    for (int i = 0; i < sums; ++i) (&sum[0][0][0])[i] = 0.f;
    if constexpr (Config::sums_in_parts) earlier.begin(&sum[0][0][0]);
#pragma unroll 1
    for (int step = leg.begin; step < leg.end; ++step) {
      if (walk.multiplies(leg, step, arguments.source.extent[0])) {
        state.stage_held = state.a_stage_held = -1;
        if constexpr (Config::ping_pong) state.ping_pong.begin(leg.taps1.count);
#pragma unroll 1
        for (int chunk = 0; chunk < Config::chunks - Config::tap_pairs; ++chunk) {
          if constexpr (Config::sums_in_parts && Config::part_chunks < Config::chunks)
            if (chunk > 0 && chunk % Config::part_chunks == 0) earlier.keep(&sum[0][0][0]);
          multiply_chunk<Config, false>(sum, space, leg, state, shared_base, warpgroup, chunk);
        }
        if constexpr (Config::tap_pairs)
          multiply_chunk<Config, true>(sum, space, leg, state, shared_base, warpgroup,
                                       Config::chunks - 1);
        if constexpr (Config::parts == 1) {
          wgmma_wait<0>();
          if (first_lane) {
            if constexpr (!Config::keep_weights) mbarrier_arrive(stages.empty(state.stage_held));
            mbarrier_arrive(state.a_stages.empty(state.a_stage_held));
          }
        }
      }
      if constexpr (Config::sums_in_parts) earlier.join(&sum[0][0][0]);
      if (step >= leg.first) store(leg, sum, step);
      constexpr int leaving = Axis0::target_step * Config::plane_sums;
#pragma unroll
      for (int slot2 = 0; slot2 < slots2; ++slot2)
#pragma unroll
        for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
          for (int i = 0; i < Config::sums; ++i)
            sum[slot2][block][i] =
                i + leaving < Config::sums ? sum[slot2][block][i + leaving] : 0.f;
      if constexpr (Config::sums_in_parts) earlier.begin(&sum[0][0][0]);
    }
  }
}

template <typename Config>
CONVT3D_DEVICE void run_sweep(const SweepArguments<typename Config::Storage>& arguments) {
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t shared_base = shared_address(shared);
  const Ring<Config::source_stages> a_stages(shared_base);
  const Ring<Config::weight_stages> stages(shared_base + 16 * Config::source_stages);
  if (threadIdx.x == 0) {
    a_stages.init(Config::fill_warps, 4 * Config::consumers);
    stages.init(1, 4 * Config::consumers);
    if constexpr (Config::ping_pong)
      for (int i = 0; i < 2; ++i) mbarrier_init(shared_base + Config::ping_pong_offset + 8 * i, 4);
    mbarrier_init_fence();
  }
  __syncthreads();

  const RowSpace<Config> space(arguments);
  // Uniform in a warp, and known to be: roles must not look divergent around warpgroup products.
  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (warpgroup >= Config::consumers) {
    register_decrease<Config::producer_registers>();
    const int thread = int(threadIdx.x) - 128 * Config::consumers;
    if (thread >= 32)
      SourceFill<Config>(arguments, shared_base, thread - 32).run(space, a_stages);
    else if (thread == 0)
      stream_weights<Config>(arguments, space, shared_base, stages);
  } else {
    register_increase<Config::consumer_registers>();
    consume<Config>(arguments, space, shared_base, a_stages, stages, warpgroup);
  }
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::SweepConfig::threads, 1)
    convt3d_sweep(const convt3d::SweepConfig::Storage* source, const unsigned char* weights,
                  const convt3d::SweepConfig::Storage* bias,
                  convt3d::SweepConfig::Storage* target, int source0, int source1,
                  int source2, int source_stride0, int source_stride1, int target0,
                  int target1, int target2, int target_stride0, int target_stride1,
                  int batch, int tile2 CONVT3D_FUSION_PARAMETERS) {
  const convt3d::SweepArguments<convt3d::SweepConfig::Storage> arguments{
      {source, {source0, source1, source2}, source_stride0, source_stride1},
      {target, {target0, target1, target2}, target_stride0, target_stride1},
      weights,
      bias,
      batch,
      tile2 CONVT3D_FUSION_ARGUMENT};
  convt3d::run_sweep<convt3d::SweepConfig>(arguments);
}
