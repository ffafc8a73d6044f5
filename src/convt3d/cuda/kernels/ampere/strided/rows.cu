// Forward pass of strided layers whose source rows are multiples of 16 bytes, on mma.sync and TMA
// (sm_90): the work of ampere/strided/forward.cu, by warps that share no barrier.
//
// A CTA goes through columns of units: one unit along D, all of a part of H, whole lines of W. A
// stage of its ring is one source row of every channel at all shifts along D, brought as one box;
// each row serves all units along H that it meets. Warp teams, as many as steps of a few rows of
// units allow, take steps in ping-pong:
//
//     one warp    source rows by TMA, as soon as every team has left a stage
//     teams       products of a step (ampere/strided/product.cuh), then its outputs, from registers or laid
//                 out in the team's staging buffers, two in turn
//     store       bulk copies of what teams staged
//
//     ring    [row 0][row 1][row 2][row 3][row 4] ...        team 0: rows 0, 1   team 1: rows 1, 2
//
// While one team multiplies, another one's outputs are laid out, a third one's leave, and rows
// arrive.
//
// Shared memory: [ring][weights][barriers][staging: team, buffer], see StridedRowsShared.
#include "ampere/strided/product.cuh"
#include "device/barrier.cuh"
#include "device/pipeline.cuh"
#include "device/tma.cuh"

namespace convt3d {

template <typename Config>
struct StridedRowsArguments : StridedArguments<Config> {
  int warp_teams, team_warps;
};

/// Shared memory, in bytes.
template <typename Config>
struct StridedRowsShared {
  static constexpr int most_teams = 8;
  static constexpr int stage = 4 * StridedBox<Config>::box_words;
  static constexpr int weights = Config::ring * stage;
  static constexpr int barriers = weights + 4 * Config::chunk_weight_words;
  // Of stages: full, empty. Of weights. Of staging buffers: full, empty.
  static constexpr int weights_barrier = barriers + 8 * 2 * Config::ring;
  static constexpr int staging_barriers = weights_barrier + 8;
  static constexpr int staging = round_up(staging_barriers + 8 * 4 * most_teams, 128);
  static_assert(stage % 128 == 0, "TMA writes to whole lines");
};

/// Every `stride`-th step of a CTA, in order. What arguments say of tiles means steps: tile[1]
/// rows of units each, tiles[1] of them along H, of which a column has `units0`.
template <typename Config>
struct StepWalk {
  const StridedRowsArguments<Config>& arguments;
  int workers, stride;
  int number, step;     // column, and step of it
  int sample, unit0, first_step;
  int first_stage;      // of the column

  CONVT3D_DEVICE StepWalk(const StridedRowsArguments<Config>& arguments_, int worker, int workers_,
                          int first, int stride_)
      : arguments(arguments_),
        workers(workers_),
        stride(stride_),
        number(worker),
        step(first),
        first_stage(0) {
    find();
    operand_fence();
  }
  /// Stages of a column.
  CONVT3D_DEVICE int stages() const {
    return arguments.units0 * arguments.tile[1] + Config::Axis1::shifts - 1;
  }
  CONVT3D_DEVICE bool done() const { return number >= arguments.count; }
  CONVT3D_DEVICE StridedTile<Config> tile() const {
    return {sample, unit0, first_step + step, 0};
  }
  /// The stage of the first row that a step reads.
  CONVT3D_DEVICE int stage() const { return first_stage + step * arguments.tile[1]; }
  CONVT3D_DEVICE void advance() {
    step += stride;
    operand_fence();
  }
  CONVT3D_DEVICE void advance_column() {
    number += workers;
    first_stage += stages();
    find();
  }

 private:
  CONVT3D_DEVICE void find() {
    const int parts = arguments.tiles[1] / arguments.units0;
    const int column = number / parts;
    first_step = (number - column * parts) * arguments.units0;
    sample = column / arguments.tiles[0];
    unit0 = column - sample * arguments.tiles[0];
  }
  CONVT3D_DEVICE void operand_fence() {
    while (!done() && step >= arguments.units0) {
      step -= arguments.units0;
      advance_column();
    }
  }
};

/// Stages by running number, as a warp of a team sees them.
template <typename Config>
struct WarpTeamStages {
  uint32_t shared_base;
  int lane;
  int left = 0;  // stages that this warp has left

  CONVT3D_DEVICE uint32_t barrier(int stage) const {
    return shared_base + StridedRowsShared<Config>::barriers + 8 * (stage % Config::ring);
  }
  CONVT3D_DEVICE uint32_t address(int stage) const {
    return shared_base + stage % Config::ring * StridedRowsShared<Config>::stage;
  }
  CONVT3D_DEVICE void wait(int stage) const {
    mbarrier_wait(barrier(stage), uint32_t(stage / Config::ring) % 2);
  }
  /// Leaves all stages before one, which this warp has read.
  CONVT3D_DEVICE void leave(int end) {
    __syncwarp();
#pragma unroll 1
    for (; left < end; ++left)
      if (lane == 0) mbarrier_arrive(barrier(left) + 8 * Config::ring);
  }
  /// The same of stages that other teams read. Every warp leaves every stage once, and none
  /// before it was full: its barrier may still be about the row before.
  CONVT3D_DEVICE void skip(int end) {
#pragma unroll 1
    while (left < end) {
      wait(left);
      leave(left + 1);
    }
  }
};

/// Where windows lie in the ring.
template <typename Config>
struct RowWindows {
  uint32_t line[Config::fragments_m][Config::Axis1::shifts];
  uint32_t step;
  CONVT3D_DEVICE uint32_t operator()(int m, int shift0, int shift1) const {
    return line[m][shift1] + (step + uint32_t(4 * shift0 * Config::ring_width));
  }
};

template <typename Config>
struct StridedRowsStore : StridedStore<Config> {
  using Base = StridedStore<Config>;
  using Storage = typename Base::Storage;
  using Tile = typename Base::Tile;
  static_assert(Config::all_slots_live, "outputs without taps are not filled");

  uint32_t shared_base;

  CONVT3D_DEVICE StridedRowsStore(const StridedRowsArguments<Config>& arguments_, int group_, int column_tile_,
                                  int lane_, uint32_t shared_base_)
      : Base(arguments_, group_, column_tile_, 0, lane_), shared_base(shared_base_) {}
  using Base::direct;
  using Base::stages;

  /// By a warp of a team: its part of all rounds of the team's `count`-th step.
  CONVT3D_DEVICE void stage_all(int warp_team, int count, const Tile& tile,
                                const typename Base::Pairs& pairs,
                                const typename Base::Fits& fits,
                                const typename Base::Sums& sum) const {
    const auto r = Base::region(tile);
    const uint32_t base_phase = phase_of(Base::base_of(tile));
    uint32_t round = uint32_t(count) * rounds;
#pragma unroll
    for (int slot0 = 0; slot0 < Config::Axis0::slots; ++slot0)
#pragma unroll
      for (int n = 0; n < Config::fragments_n; ++n, ++round) {
        mbarrier_wait(empty(warp_team, round), ~(round / 2) % 2);
        Base::stage(buffer(warp_team, round), r, base_phase, pairs, fits, sum, slot0, n,
                    Base::base_of(tile));
        fence_async_proxy();
        mbarrier_arrive(full(warp_team, round));
      }
  }

  /// By a warp that stores: a step that a team stages. A buffer is free as soon as bulk copies
  /// have read it: a round later, the team would wait for the copies of that one to begin.
  CONVT3D_DEVICE void store_all(int warp_team, int count, const Tile& tile) const {
    const auto r = Base::region(tile);
    Storage* base = Base::base_of(tile);
    uint32_t round = uint32_t(count) * rounds;
#pragma unroll
    for (int slot0 = 0; slot0 < Config::Axis0::slots; ++slot0)
#pragma unroll
      for (int n = 0; n < Config::fragments_n; ++n, ++round) {
        mbarrier_wait(full(warp_team, round), round / 2 % 2);
        Base::template store_runs<Base::vector>(r, base, phase_of(base), buffer(warp_team, round), slot0,
                                                n, 0, 1);
        bulk_wait_read<0>();
        mbarrier_arrive(empty(warp_team, round));
      }
  }

 private:
  static constexpr uint32_t rounds = Config::Axis0::slots * Config::fragments_n;  // of a step

  CONVT3D_DEVICE static uint32_t phase_of(const Storage* base) {
    return uint32_t(reinterpret_cast<uint64_t>(base) / sizeof(Storage));
  }
  CONVT3D_DEVICE uint32_t full(int warp_team, uint32_t round) const {
    return shared_base + StridedRowsShared<Config>::staging_barriers + 8 * (4 * warp_team + round % 2);
  }
  CONVT3D_DEVICE uint32_t empty(int warp_team, uint32_t round) const { return full(warp_team, round) + 16; }
  CONVT3D_DEVICE Storage* buffer(int warp_team, uint32_t round) const {
    extern __shared__ __align__(128) unsigned char shared[];
    return reinterpret_cast<Storage*>(shared + StridedRowsShared<Config>::staging) +
           (2 * warp_team + int(round % 2)) * 8 * Base::run_pitch;
  }
};

/// Brings source rows. One thread.
template <typename Config>
CONVT3D_DEVICE void bring_rows(const StridedRowsArguments<Config>& arguments, const TensorMap& map,
                               uint32_t shared_base, int worker, int workers, int group) {
  StepWalk<Config> walk(arguments, worker, workers, 0, 1);
  Ring<Config::ring> ring(shared_base + StridedRowsShared<Config>::barriers);
  tma_prefetch(map);
  const int rows = walk.stages();
#pragma unroll 1
  for (; !walk.done(); walk.advance_column()) {
    const StridedTile<Config> tile = walk.tile();
    const int first = tile.index[1] * arguments.tile[1] + Config::origin1;
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
      ring.wait_empty();
      mbarrier_expect(ring.full(), StridedRowsShared<Config>::stage);
      tma_load_5d(shared_base + ring.stage * StridedRowsShared<Config>::stage, map,
                  Config::origin2 - Config::lead, first + row, tile.index[0] + Config::origin0,
                  group * Config::source_channels, tile.sample, ring.full());
      ring.advance();
    }
  }
}

/// The products and outputs of a team, by one of its warps.
template <typename Config>
CONVT3D_DEVICE void compute_rows(const StridedRowsArguments<Config>& arguments, uint32_t shared_base,
                                 int worker, int workers, const StridedRowsStore<Config>& store, int warp_team,
                                 int in_team, int lane) {
  using Shared = StridedRowsShared<Config>;
  using Axis1 = typename Config::Axis1;
  constexpr int fragments_m = Config::fragments_m;
  UnitPair pairs[fragments_m];
  typename StridedRowsStore<Config>::Fits fits;
  uint32_t own[fragments_m];  // this lane's windows in a row of the ring
  RowWindows<Config> windows;
  int row[fragments_m];
#pragma unroll
  for (int m = 0; m < fragments_m; ++m) {
    const int fragment = in_team * fragments_m + m;
    row[m] = fragment / arguments.line_fragments;
    const int first = (fragment - row[m] * arguments.line_fragments) * 16;
    const bool live = row[m] < arguments.tile[1];
    if (!live) row[m] = 0;
    const int unit = first + 2 * (lane / 4);
    const UnitPair p{0, row[m], unit, live && unit < arguments.tile[2],
                     live && unit + 1 < arguments.tile[2]};
    // Of one turn: see StridedWork.
#pragma unroll
    for (int turn = 0; turn < 1; ++turn) {
      pairs[m] = p;
      const int units = (p.first ? 1 : 0) + (p.second ? 1 : 0);
      fits[m] = min(units * Config::Axis2::slots,
                    arguments.target.extent[2] - p.unit2 * Config::Axis2::slots);
    }
    own[m] = uint32_t(4 * StridedBox<Config>::plane_pitch * (lane % 4)) +
             uint32_t(4 * (p.first ? p.unit2 : 0));
  }
  WarpTeamStages<Config> stages{shared_base, lane};
  const int rows = arguments.tile[1];
  const int taken = rows - 1 + Axis1::shifts;  // stages of a step
  StepWalk<Config> walk(arguments, worker, workers, warp_team, arguments.warp_teams);
  mbarrier_wait(shared_base + Shared::weights_barrier, 0);
#pragma unroll 1
  for (int count = 0; !walk.done(); walk.advance(), ++count) {
    const int first = walk.stage();
    stages.skip(first);
#pragma unroll 1
    for (int i = 0; i < taken; ++i) stages.wait(first + i);
#pragma unroll
    for (int m = 0; m < fragments_m; ++m)
#pragma unroll
      for (int shift1 = 0; shift1 < Axis1::shifts; ++shift1)
        windows.line[m][shift1] = stages.address(first + row[m] + shift1) + own[m];
    StridedSums<Config> sum;
    sum.clear();
#pragma unroll 1
    for (int step = 0; step < Config::depth; ++step) {
      windows.step = uint32_t(step * StridedBox<Config>::step_bytes);
      multiply_step<Config>(sum, windows,
                            shared_base + Shared::weights +
                                4u * (step * Config::step_weight_words + lane * Config::lane_words));
    }
    // The next step of this team begins behind those of the others.
    stages.leave(first + min(arguments.warp_teams * rows, taken));
    if (store.stages())
      store.stage_all(warp_team, count, walk.tile(), pairs, fits, sum);
    else
      store.direct(walk.tile(), pairs, sum);
  }
  stages.skip(walk.first_stage);
}

template <typename Config>
CONVT3D_DEVICE void strided_rows(const StridedRowsArguments<Config>& arguments, const TensorMap& map) {
  static_assert(Config::forward && Config::chunks == 1 && !Config::source_channels_last &&
                    !Config::target_channels_last &&
                    Config::Type::channels_per_word == 1 && Config::vector == 4 &&
                    Config::bulk_stores,
                "float32, contiguous, all channels in a stage");
  static_assert(StridedBox<Config>::plane_pitch % 16 == 8, "channels in different banks");
  using Shared = StridedRowsShared<Config>;
  using Work = StridedWork<Config>;
  using Registers = RingRegisters<Config, 56>;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t shared_base = shared_address(shared);
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  const int worker = blockIdx.x / Work::n_tiles, workers = gridDim.x / Work::n_tiles;
  const int group = blockIdx.x % Work::n_tiles / Config::column_tiles;
  const int column_tile = blockIdx.x % Config::column_tiles;
  const uint32_t weights_barrier = shared_base + Shared::weights_barrier;
  if (threadIdx.x == 0) {
    Ring<Config::ring>(shared_base + Shared::barriers)
        .init(1, arguments.warp_teams * arguments.team_warps);
    mbarrier_init(weights_barrier, 1);
    for (int i = 0; i < 4 * arguments.warp_teams; ++i)
      mbarrier_init(shared_base + Shared::staging_barriers + 8 * i,
                    lanes_of(i % 4 < 2 ? arguments.team_warps : 1));
    mbarrier_init_fence();
  }
  __syncthreads();
  const StridedRowsStore<Config> store(arguments, group, column_tile, lane, shared_base);
  if (warp < Config::warps) {
    if constexpr (Registers::multiplying > Registers::launched)
      register_increase<Registers::multiplying>();
    const int warp_team = warp / arguments.team_warps;
    if (warp_team < arguments.warp_teams)
      compute_rows<Config>(arguments, shared_base, worker, workers, store, warp_team,
                           warp - warp_team * arguments.team_warps, lane);
    return;
  }
  if constexpr (Registers::multiplying > Registers::launched) register_decrease<Registers::others>();
  if (warp == Config::warps) {
    if (lane == 0) bring_rows<Config>(arguments, map, shared_base, worker, workers, group);
  } else {
    const int store_warp = warp - Config::warps - 1;
    if (warp == Config::threads / 32 - 1 && lane == 0) {
      grid_dependency_wait();
      mbarrier_expect(weights_barrier, 4 * Config::chunk_weight_words);
      bulk_copy(shared_base + Shared::weights,
                arguments.weights +
                    int64_t(group * Config::column_tiles + column_tile) * Config::chunk_weight_words,
                4 * Config::chunk_weight_words, weights_barrier);
    }
    if (!store.stages()) return;
    StepWalk<Config> walk(arguments, worker, workers, 0, 1);
    int warp_team = 0, count = 0;
#pragma unroll 1
    for (; !walk.done(); walk.advance()) {
      if (warp_team % Config::store_warps == store_warp) store.store_all(warp_team, count, walk.tile());
      if (++warp_team == arguments.warp_teams) {
        warp_team = 0;
        ++count;
      }
    }
    bulk_wait<0>();
  }
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::StridedConfig::threads, 1)
    convt3d_ampere_strided_rows(const convt3d::uint32_t* weights, const float* bias, float* target,
                                const __grid_constant__ convt3d::TensorMap map, int target0, int target1,
                                int target2, int target_stride0, int target_stride1, int tile0, int tile1,
                                int tile2, int tiles0, int tiles1, int line_fragments, int count,
                                int units0, int warp_teams,
                                int team_warps CONVT3D_FUSION_PARAMETERS) {
  const convt3d::StridedRowsArguments<convt3d::StridedConfig> arguments{
      {{nullptr, {0, 0, 0}, 0, 0},
      {target, {target0, target1, target2}, target_stride0, target_stride1},
      weights,
      bias,
      {tile0, tile1, tile2},
      {tiles0, tiles1, 1},
      1,
      line_fragments,
      count,
      2,
      units0 CONVT3D_FUSION_ARGUMENT},
      warp_teams,
      team_warps};
  convt3d::strided_rows<convt3d::StridedConfig>(arguments, map);
}
