// Layers on Hopper's warpgroup products of channels_last operands in shared memory (sm_90a):
// forward pass and gradient by input. A contiguous source was copied before
// (layout/channels_last.cu); a contiguous target is written as it is (ndhwc/contiguous_store.cuh).
//
// A unit is one period of phases, stride0 x stride1 x stride2 outputs, and one row of M. A
// persistent CTA goes from work tile to work tile: a tile of units (samples x D x H x W, in that
// order), some columns, and one phase of the phased axes; few work tiles are taken longest first
// (schedule/longest_first.cuh). A row of a box is a source position's chunk of channels, which is
// K of a product already: what TMA brings is the operand.
//
//       source box of one tap of W              sums, in registers
//       .--------------------------.      [slot0][slot1][slot2][block][columns]
//       | 128 bytes of channels    |  taps of
//       | a unit each row, [slice] | --------->   outputs  o = unit * stride + slot
//       | [line][position]         |  D and H
//       '--------------------------'
//
// Under the 128-byte swizzle products begin at multiples of eight rows: a shift along D or H is
// whole lines or slices of the box, a multiple of eight; every shift along W (and along H where
// lines are short: `split`) has a box of its own. TMA fills what a box has outside of the source
// with zeros. In the gradient by input a unit is one position; its taps read every stride-th
// position, which TMA's element strides bring, a box for each tap.
//
// Where work tiles are few, the CTAs of a cluster share the chunks and taps of one (split-K), and
// add their sums up through each other's shared memory (ndhwc/cluster.cuh).
//
// Groups of eight channels are multiplied by warps, out of the same boxes (ndhwc/groups.cuh).
//
// Shared memory: barriers | weights, one (chunk, tap of W, walked taps) a stage, or all of them |
// A stages, a box each | staging of the epilogue.
//
// Pipeline: two rings, A stages and weight stages, with full and empty barriers, which are the
// only synchronisation. The last warpgroup's first thread issues TMA for boxes, and bulk copies
// for packed weights, or TMA for channels_last weights, which need no packing. The other
// warpgroups multiply and store.
#undef CONVT3D_WGMMA_USES
#define CONVT3D_WGMMA_USES(n) ((n) == CONVT3D_COLUMN_TILE)
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "ndhwc/cluster.cuh"
#include "ndhwc/contiguous_store.cuh"
#include "ndhwc/empty_phases.cuh"
#include "ndhwc/groups.cuh"
#include "ndhwc/store.cuh"
#include "schedule/sort_by_length.cuh"

namespace convt3d {

template <typename Config>
using NdhwcStoreOf = typename Select<Config::target_channels_last, NdhwcStore<Config>,
                                     NdhwcContiguousStore<Config>>::Type;

/// Brings one stage of weights: of a chunk and of taps by their positions in packed order.
template <typename Config>
struct NdhwcColumns {
  const NdhwcArguments<typename Config::Storage>& a;
  const TensorMap& map;

  CONVT3D_DEVICE void operator()(uint32_t to, const WorkTile& work, int chunk, int tap2, int tap1,
                                 int tap0, uint32_t barrier) const {
    const WalkedTaps &taps0 = work.taps[0], &taps1 = work.taps[1], &taps2 = work.taps[2];
    if constexpr (Config::direct) {
      using Axis0 = typename Config::Axis0;
      using Axis1 = typename Config::Axis1;
      using Axis2 = typename Config::Axis2;
      const int k2 = Config::phased > 2 ? Axis2::tap_at(taps2.first_position + tap2)
                                        : TapsByShift<typename Config::Inner2>::at(tap2).tap;
      const int k1 = Config::phased > 1 ? Axis1::tap_at(taps1.first_position + tap1) : 0;
      const int k0 = Config::phased > 0 ? Axis0::tap_at(taps0.first_position + tap0) : 0;
      const int first_column = work.column_tile * Config::column_tile;
#pragma unroll
      for (int tap = 0; tap < Config::taps; ++tap) {
        const uint32_t at = to + tap * Config::tap_bytes;
        const int number = ((k0 + tap / Config::Inner1::kernel) * Axis1::kernel + k1 +
                            tap % Config::Inner1::kernel) * Axis2::kernel + k2;
        if constexpr (Config::k_major) {
          constexpr int last = Axis0::kernel * Axis1::kernel * Axis2::kernel - 1;
          tma_load_3d(at, map, chunk * Config::chunk_channels,
                      Config::flipped ? last - number : number, first_column, barrier);
        } else {
#pragma unroll
          for (int box = 0; box < Config::column_boxes; ++box)
            tma_load_3d(at + box * Config::column_box_bytes, map,
                        first_column + box * Config::box_columns, number,
                        chunk * Config::chunk_channels, barrier);
        }
      }
    } else {
      const unsigned char* weights =
          a.weights + (work.group * Config::column_tiles + work.column_tile) * Config::n_tile_bytes;
      const int tap = (chunk * Config::Axis2::kernel + taps2.first_position + tap2) *
                          Config::walked1 + taps1.first_position + tap1;
      bulk_copy(to,
                weights + (int64_t(tap) * Config::walked0 + taps0.first_position + tap0) *
                              Config::stage_bytes,
                Config::stage_bytes, barrier);
    }
  }
};

template <typename Config>
CONVT3D_DEVICE void produce(const NdhwcArguments<typename Config::Storage>& a, const TensorMap& map,
                            const TensorMap& weight_map, uint32_t shared,
                            NdhwcAStages<Config> a_stages, NdhwcWeights<Config> stages) {
  using Walk = NdhwcWalk<Config>;
  using Taps2 = TapsByShift<typename Config::Inner2>;
  Walk walk(a, shared);
  WorkTile work;
  // For the packed weights, and for the source where it was copied to channels_last.
  if constexpr (!Config::direct || !Config::source_channels_last) grid_dependency_wait();
  const NdhwcColumns<Config> columns{a, weight_map};
  bool stored = false;
  while (walk.next(a, work)) {
    if (work.taps_of_chunk() == 0) continue;
    const WalkedTaps &taps0 = work.taps[0], &taps1 = work.taps[1], &taps2 = work.taps[2];
    if (Config::by_warps && !stored) {
      stored = true;
      mbarrier_expect(stages.full(), Config::stage_bytes);
      columns(shared + Config::weight_offset, work, 0, 0, 0, 0, stages.full());
    } else if (Config::resident_weights && !stored) {
      stored = true;
      uint32_t to = shared + Config::weight_offset;
      mbarrier_expect(stages.full(), Config::chunks * work.taps_of_chunk() *
                                         Config::Inner2::kernel * Config::stage_bytes);
      for (int chunk = 0; chunk < Config::chunks; ++chunk)
        for (int tap2 = 0; tap2 < taps2.count * Config::Inner2::kernel; ++tap2)
          for (int tap1 = 0; tap1 < taps1.count; ++tap1)
            for (int tap0 = 0; tap0 < taps0.count; ++tap0, to += Config::stage_bytes)
              columns(to, work, chunk, tap2, tap1, tap0, stages.full());
    }
    const auto load_box = [&](int chunk, int w, int h, int d) {
      a_stages.wait_empty();
      mbarrier_expect(a_stages.full(), a.loaded_bytes);
      const uint32_t to = shared + Config::box_offset + a_stages.stage * a.box_bytes;
      const int channel = work.group * Config::source_channels + chunk * Config::chunk_channels;
      const int at2 = work.first[2] * Config::Axis2::unit_source + taps2.origin + w;
      const int at1 = work.first[1] * Config::Axis1::unit_source + taps1.origin + h;
      const int at0 = work.first[0] * Config::Axis0::unit_source + taps0.origin + d;
      if constexpr (Config::samples_inside)
        tma_load_5d(to, map, channel, work.sample, at2, at1, at0, a_stages.full());
      else
        tma_load_5d(to, map, channel, at2, at1, at0, work.sample, a_stages.full());
      a_stages.advance();
    };
    if (Config::by_warps) {
      load_box(0, 0, 0, 0);
      continue;
    }
    const NdhwcShare<Config> share(work);
    for (int chunk = 0; chunk < Config::chunks; ++chunk)
      for (int walked2 = 0; walked2 < taps2.count; ++walked2) {
        if (!share.has(chunk * taps2.count + walked2)) continue;
#pragma unroll
        for (int position = 0; position < Config::Inner2::kernel; ++position) {
          const int w = taps2.offset + walked2 * taps2.step + Taps2::at(position).shift;
          if (Config::split == 1 && Taps2::moves(position)) load_box(chunk, w, 0, 0);
          for (int tap1 = 0; tap1 < taps1.count; ++tap1) {
            const int h = taps1.offset + tap1 * taps1.step;
            if (Config::split == 2) load_box(chunk, w, h, 0);
            if (Config::split < 3 && Config::resident_weights) continue;
            for (int tap0 = 0; tap0 < taps0.count; ++tap0) {
              if (Config::split == 3) load_box(chunk, w, h, taps0.offset + tap0 * taps0.step);
              if constexpr (!Config::resident_weights) {
                stages.wait_empty();
                mbarrier_expect(stages.full(), Config::stage_bytes);
                columns(shared + Config::weight_offset + stages.stage * Config::stage_bytes, work,
                        chunk, walked2 + position, tap1, tap0, stages.full());
                stages.advance();
              }
            }
          }
        }
      }
  }
}

/// The place of a tap among the slots and shifts of an axis.
template <typename Axis>
CONVT3D_CONSTEXPR int slot_of_tap(int tap) {
  for (int slot = 0; slot < Axis::slots; ++slot)
    for (int shift = 0; shift < Axis::shifts; ++shift)
      if (Axis::tap(slot, shift + Axis::min_shift) == tap) return slot;
  return 0;
}
template <typename Axis>
CONVT3D_CONSTEXPR int shift_of_tap(int tap) {
  for (int slot = 0; slot < Axis::slots; ++slot)
    for (int shift = 0; shift < Axis::shifts; ++shift)
      if (Axis::tap(slot, shift + Axis::min_shift) == tap) return shift;
  return 0;
}

/// All products of one stage from tap number `Tap` of D and H on. `rows`: descriptors of the
/// units of each block; steps from one slice and line to the next are in their units. `Used`: the
/// blocks that are multiplied, a bit each.
template <typename Config, uint32_t Used, int Slot2, int Tap>
CONVT3D_DEVICE void multiply(NdhwcSums<Config>& sum, const uint64_t (&rows)[Config::blocks],
                             int slice, int line, uint64_t weights) {
  using Axis0 = typename Config::Inner0;
  using Axis1 = typename Config::Inner1;
  if constexpr (Tap < Config::taps) {
    constexpr int tap0 = Tap / Axis1::kernel, tap1 = Tap % Axis1::kernel;
    constexpr int slot0 = slot_of_tap<Axis0>(tap0), slot1 = slot_of_tap<Axis1>(tap1);
    const int offset = shift_of_tap<Axis0>(tap0) * slice + shift_of_tap<Axis1>(tap1) * line;
#pragma unroll
    for (int step = 0; step < Config::steps; ++step)
#pragma unroll
      for (int block = 0; block < Config::blocks; ++block)
        if (Used >> block & 1) {
          const uint64_t units = rows[block] + (offset + 2 * step);
          const uint64_t columns =
              weights + (Tap * Config::tap_bytes + step * Config::step_bytes) / 16;
          float(&sums)[Config::sums] = sum[slot0][slot1][Slot2][block];
          if constexpr (Config::direct && !Config::k_major)
            wgmma_product_n_major<Config::column_tile>(typename Config::Math{}, sums, units, columns);
          else
            wgmma_product_of<Config::column_tile>(typename Config::Math{}, sums, units, columns);
        }
    multiply<Config, Used, Slot2, Tap + 1>(sum, rows, slice, line, weights);
  }
}

/// A warpgroup's rings, and the buffers that the products of the previous stage read.
template <typename Config>
struct NdhwcReader {
  const NdhwcArguments<typename Config::Storage>& a;
  uint32_t shared;
  NdhwcAStages<Config> a_stages;
  NdhwcWeights<Config> stages;
  HeldStages<Config::resident_weights> held;
  uint32_t box, weights;     // of the stage at hand
  // Taps of D and H that meet each block of this work tile, a bit each.
  uint32_t met0[Config::blocks], met1[Config::blocks];

  /// Finds the taps that meet each block. `line`: slice and line of its units, negative if of
  /// many.
  CONVT3D_DEVICE void meet(const WorkTile& work, const int (&line)[Config::blocks][2]) {
    if constexpr (Config::skips)
#pragma unroll
      for (int block = 0; block < Config::blocks; ++block) {
        met0[block] = met1[block] = 0xffffffff;
        if (line[block][0] < 0) continue;
        met0[block] = NdhwcWalk<Config>::taps_met(a, work, 0, line[block][0]);
        met1[block] = NdhwcWalk<Config>::taps_met(a, work, 1, line[block][1]);
      }
  }
  CONVT3D_DEVICE uint32_t blocks_met(int tap0, int tap1) const {
    uint32_t used = 0;
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
      used |= (met0[block] >> tap0 & met1[block] >> tap1 & 1) << block;
    return __shfl_sync(0xffffffffu, used, 0);  // uniform, and known to be
  }

  CONVT3D_DEVICE void release() { held.release(a_stages, stages); }
  CONVT3D_DEVICE void next_a_stage() {
    a_stages.wait_full();
    box = shared + Config::box_offset + a_stages.stage * a.box_bytes;
  }
  /// The products that read this box are all issued.
  CONVT3D_DEVICE void leave_a_stage() {
    held.a_stage = a_stages.stage;
    a_stages.advance();
  }

  /// Products of the taps of W from `Position` on with one chunk.
  template <int Position>
  CONVT3D_DEVICE void chunk(NdhwcSums<Config>& sum, const WorkTile& work,
                            const int (&row)[Config::blocks]) {
    using Taps2 = TapsByShift<typename Config::Inner2>;
    if constexpr (Position < Config::Inner2::kernel) {
      constexpr int slot2 = Taps2::at(Position).slot;
      constexpr bool last = Position + 1 == Config::Inner2::kernel || Taps2::moves(Position + 1);
      if constexpr (Config::split == 1 && Taps2::moves(Position)) next_a_stage();
      int tap1 = 0;
#pragma unroll 1
      do {
        if constexpr (Config::split == 2) next_a_stage();
        int tap0 = 0;
#pragma unroll 1
        do {
          if constexpr (Config::split == 3) next_a_stage();
          if constexpr (!Config::resident_weights) {
            stages.wait_full();
            weights = shared + Config::weight_offset + stages.stage * Config::stage_bytes;
          }
          // Places of all taps are not worth registers of their own.
          const int slice = int(own_address(a.slice_rows * 8));
          const int line = int(own_address(a.line_rows * 8));
          int offset = 0;
          if constexpr (Config::split < 3)
            offset += (work.taps[0].offset + tap0 * work.taps[0].step) * slice;
          if constexpr (Config::split == 1)
            offset += (work.taps[1].offset + tap1 * work.taps[1].step) * line;
          uint64_t rows[Config::blocks];
#pragma unroll
          for (int block = 0; block < Config::blocks; ++block)
            rows[block] = matrix_descriptor_128b(box + row[block] * 128) + offset;
          wgmma_fence();
          const uint64_t columns =
              Config::k_major  ? matrix_descriptor_128b(weights)
              : Config::direct ? matrix_descriptor_128b_n_major(weights, Config::column_box_bytes)
                               : matrix_descriptor(weights, Config::column_tile * 16, 128);
          // Every way ends its own group: a group that begins before a branch would be waited
          // for.
          if constexpr (Config::skips) {
            const uint32_t used = blocks_met(tap0, tap1);
            if (used == Config::all_blocks) {
              multiply<Config, Config::all_blocks, slot2, 0>(sum, rows, slice, line, columns);
              wgmma_commit();
            } else if (used == 1) {
              multiply<Config, 1, slot2, 0>(sum, rows, slice, line, columns);
              wgmma_commit();
            } else if (used == 2) {
              multiply<Config, 2, slot2, 0>(sum, rows, slice, line, columns);
              wgmma_commit();
            } else {
              wgmma_commit();
            }
          } else {
            multiply<Config, Config::all_blocks, slot2, 0>(sum, rows, slice, line, columns);
            wgmma_commit();
          }
          wgmma_wait<1>();
          release();
          if constexpr (Config::resident_weights) {
            weights += Config::stage_bytes;
          } else {
            held.weights = stages.stage;
            stages.advance();
          }
          if constexpr (Config::split == 3) leave_a_stage();
        } while (++tap0 < work.taps[0].count);
        if constexpr (Config::split == 2) leave_a_stage();
      } while (++tap1 < work.taps[1].count);
      if constexpr (Config::split == 1 && last) leave_a_stage();
      chunk<Position + 1>(sum, work, row);
    }
  }
};

template <typename Config>
CONVT3D_DEVICE void consume(const NdhwcArguments<typename Config::Storage>& a, uint32_t shared,
                            NdhwcAStages<Config> a_stages, NdhwcWeights<Config> stages, int warpgroup) {
  using Walk = NdhwcWalk<Config>;
  const NdhwcUnits<Config> units(a);
  const NdhwcStoreOf<Config> store(a, units, shared, warpgroup);
  // Where the units of each block begin in a box; those beyond the tile stand for the first ones.
  int row[Config::blocks];
#pragma unroll
  for (int block = 0; block < Config::blocks; ++block) {
    const int index = Config::warpgroup_rows * warpgroup + 64 * block;
    row[block] = units.row(index < units.count ? index : 0);
  }

  int lines[Config::blocks][2];  // slice and line of a block's units, if all share them
#pragma unroll
  for (int block = 0; block < Config::blocks; ++block) {
    const int index = min(Config::warpgroup_rows * warpgroup + 64 * block, units.count - 1);
    const auto first = units.numbered(index);
    const auto last = units.numbered(min(index + 63, units.count - 1));
    const bool shared_line = first.at[0] == last.at[0] && first.at[1] == last.at[1];
    lines[block][0] = shared_line ? first.at[0] : -1;
    lines[block][1] = first.at[1];
  }

  NdhwcReader<Config> reader{a, shared, a_stages, stages, {threadIdx.x % 32 == 0}, 0, 0, {}, {}};
  bool first = true;
  Walk walk(a, shared);
  WorkTile work;
  while (walk.next(a, work)) {
    if (Config::fills && work.taps_of_chunk() == 0) continue;
    NdhwcSums<Config> sum;
#pragma unroll
    for (int i = 0; i < int(sizeof(sum) / sizeof(float)); ++i) (&sum[0][0][0][0][0])[i] = 0.f;
    operand_fence<typename Config::Inner0, typename Config::Inner1, typename Config::Inner2>(sum);
    // Phases without taps hold nothing but the bias. Their loops would run no round at all, which
    // must not look like a way around the products.
    const int chunks = work.taps_of_chunk() ? Config::chunks : 0;
    if (Config::resident_weights && first && chunks) {
      stages.wait_full();
      first = false;
    }
    reader.weights = shared + Config::weight_offset;
    reader.meet(work, lines);
    if constexpr (Config::cluster > 1) {
      const NdhwcShare<Config> share(work);
#pragma unroll 1
      for (int k = share.begin; k < share.end; ++k) reader.template chunk<0>(sum, work, row);
    } else {
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        int tap2 = 0;
#pragma unroll 1
        do {
          reader.template chunk<0>(sum, work, row);
        } while (++tap2 < work.taps[2].count);
      }
    }
    wgmma_wait<0>();
    reader.release();
    operand_fence<typename Config::Inner0, typename Config::Inner1, typename Config::Inner2>(sum);
    if constexpr (Config::cluster > 1) NdhwcCluster<Config>(shared).add(sum[0][0][0]);
    store(work, sum);
  }
}

/// The same for groups of eight channels.
template <typename Config>
CONVT3D_DEVICE void consume_groups(const NdhwcArguments<typename Config::Storage>& a,
                                   uint32_t shared, NdhwcAStages<Config> a_stages,
                                   NdhwcWeights<Config> stages, int warpgroup) {
  using Walk = NdhwcWalk<Config>;
  const NdhwcUnits<Config> units(a);
  const NdhwcStoreOf<Config> store(a, units, shared, warpgroup);
  const int lane = threadIdx.x % 32;
  NdhwcLane<Config> reader;
  reader.slice_rows = a.slice_rows, reader.line_rows = a.line_rows;
  reader.weights = shared + Config::weight_offset + lane * 16;
#pragma unroll
  for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = Config::warpgroup_rows * warpgroup + 64 * block +
                        threadIdx.x / 32 % 4 * 16 + 8 * half + lane / 4;
      reader.row[block][half] = units.row(index < units.count ? index : 0);
    }

  bool first = true;
  Walk walk(a, shared);
  WorkTile work;
  while (walk.next(a, work)) {
    NdhwcSums<Config> sum;
#pragma unroll
    for (int i = 0; i < int(sizeof(sum) / sizeof(float)); ++i) (&sum[0][0][0][0][0])[i] = 0.f;
    if (first) stages.wait_full();
    first = false;
    a_stages.wait_full();
    reader.box = shared + Config::box_offset + a_stages.stage * a.box_bytes;
    reader.template multiply<0>(sum);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(a_stages.empty(a_stages.stage));
    a_stages.advance();
    store(work, sum);
  }
}

template <typename Config>
CONVT3D_DEVICE void run_ndhwc(const NdhwcArguments<typename Config::Storage>& arguments,
                              const TensorMap& map, const TensorMap& weight_map) {
  extern __shared__ __align__(128) unsigned char shared_start[];
  // The swizzle follows address bits.
  const uint32_t shared = (shared_address(shared_start) + 1023) / 1024 * 1024;
  const NdhwcAStages<Config> a_stages(shared);
  const NdhwcWeights<Config> stages(shared + 16 * Config::source_stages);
  if (threadIdx.x == 0) {
    a_stages.init(1, 4 * Config::consumers);
    stages.init(1, 4 * Config::consumers);
    mbarrier_init_fence();
  }
  if constexpr (Config::skips)
    sort_by_length(arguments, NdhwcWalk<Config>(arguments, shared),
                   shared + Config::box_offset + Config::source_stages * arguments.box_bytes);
  __syncthreads();
  // Uniform in a warp, and known to be: roles must not look divergent around warpgroup products.
  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (warpgroup == Config::consumers) {
    register_decrease<Config::producer_registers>();
    if (threadIdx.x == 128 * Config::consumers)
      produce<Config>(arguments, map, weight_map, shared, a_stages, stages);
    if constexpr (Config::fills) {
      if (threadIdx.x / 32 == 4 * Config::consumers + 1)
        NdhwcEmptyPhases<Config>(arguments, shared)(shared);
    }
  } else {
    register_increase<Config::consumer_registers>();
    if constexpr (Config::by_warps)
      consume_groups<Config>(arguments, shared, a_stages, stages, warpgroup);
    else
      consume<Config>(arguments, shared, a_stages, stages, warpgroup);
  }
  if constexpr (Config::cluster > 1) cluster_finish(warpgroup < Config::consumers);
}

}  // namespace convt3d

extern "C" __global__ void
#if CONVT3D_CLUSTER > 1
__cluster_dims__(CONVT3D_CLUSTER, 1, 1)
#endif
__launch_bounds__(convt3d::NdhwcConfig::threads, 1)
    convt3d_ndhwc(const unsigned char* weights, const convt3d::NdhwcConfig::Storage* bias,
                  convt3d::NdhwcConfig::Storage* target,
                  const __grid_constant__ convt3d::TensorMap map,
#if CONVT3D_DIRECT
                  const __grid_constant__ convt3d::TensorMap weight_map,
#endif
                  int target0, int target1,
                  int target2, int target_stride0, int target_stride1, int batch,
                  int tile_samples, int tile0, int tile1, int tile2, int tiles_samples,
                  int tiles0, int tiles1, int tiles2, int sample_rows, int slice_rows,
                  int line_rows, int loaded_bytes, int box_bytes, int rotation,
                  int source0, int source1, int source2 CONVT3D_FUSION_PARAMETERS) {
  const convt3d::NdhwcArguments<convt3d::NdhwcConfig::Storage> arguments{
      weights,
      bias,
      {target, {target0, target1, target2}, target_stride0, target_stride1},
      batch,
      {tile_samples, tile0, tile1, tile2},
      {tiles_samples, tiles0, tiles1, tiles2},
      sample_rows,
      slice_rows,
      line_rows,
      loaded_bytes,
      box_bytes,
      {source0, source1, source2},
      rotation CONVT3D_FUSION_ARGUMENT};
#if CONVT3D_DIRECT
  convt3d::run_ndhwc<convt3d::NdhwcConfig>(arguments, map, weight_map);
#else
  convt3d::run_ndhwc<convt3d::NdhwcConfig>(arguments, map, map);
#endif
}
