// Gradient by input of strided layers on Hopper's warpgroup products (sm_90a): the mainloop of
// phases/kernel.cu for it.
//
// A unit is one element of the input gradient, and one row of M; it reads the output gradient at
// unit * stride + shift, a shift for each tap. A persistent CTA goes from work tile to work tile:
// a tile of units (samples x D x H x W, in that order) and some columns. It is an implicit matrix
// product:
//
//     M = units (64 * blocks to a warpgroup), lanes' fragments loaded from the A stage
//     N = produced channels, from shared memory by descriptor
//     K = (source channel, tap), eight words of channels a step
//
//       a line of the source box, stride 2           sums, in registers
//       .---.---.---.---.---.---.---.---.            [block][columns]
//       | o   o | o   o | o   o | o   o |  two taps
//       '---'---'---'---'---'---'---'---' ---------> unit 0, unit 1, unit 2 ...
//         unit 0  unit 1  unit 2
//
// Where the stride along W is even, neighbours of an even and an odd position are loaded as one:
// the operands of two taps, without bank conflicts.
//
// Shared memory: barriers, zeros | weights, one (chunk, tap of D, tap of H) a stage, or all of
// them | A stages, each one source box | staging of the epilogue. A box has a chunk of channels,
// and of D either what all taps read or one tap; its slices are those of the units. Slices and
// lines that no tap reads are left out.
//
// Pipeline: two rings with full and empty barriers, which are the only synchronisation between
// roles. Threads of the last warpgroup load boxes (one thread by TMA, strided_dgrad/tma_box.cuh,
// or one for each channel by bulk copies where lines have odd lengths, strided_dgrad/runs.cuh); a
// thread of another warp loads weights, so that neither waits for the other's ring. The other
// warpgroups multiply and store. The sweep along D (strided_dgrad/sweep.cuh) loads each slice
// once for all units that read it.
#pragma once
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "strided_dgrad/sweep.cuh"

namespace convt3d {

/// A CTA's boxes, by each of the threads that bring them.
template <typename Config>
CONVT3D_DEVICE void produce_boxes(const PhasesArguments<typename Config::Storage>& a,
                                  const TensorMap* map, uint32_t shared, AStageRing<Config> a_stages,
                                  int filler) {
  using Walk = PhasesWalk<Config>;
  Walk walk(a);
  WorkTile work;
  while (walk.next(a, work)) {
    for (int chunk = 0; chunk < Config::chunks; ++chunk)
      for (int box = 0; box < Config::boxes_of_chunk; ++box) {
        a_stages.wait_empty();
        DgradReader<Config>::fill(a, map, work, chunk, first_slice<Config>(work, box),
                                     shared + Config::box_offset + a_stages.stage * a.box_bytes,
                                     a_stages.full(), filler);
        a_stages.advance();
      }
  }
}

/// Its weights, by another.
template <typename Config>
CONVT3D_DEVICE void produce_weights(const PhasesArguments<typename Config::Storage>& a,
                                    uint32_t shared, WeightRing<Config> stages) {
  using Walk = PhasesWalk<Config>;
  Walk walk(a);
  WorkTile work;
  while (walk.next(a, work)) {
    const unsigned char* weights = weights_of<Config>(a, work);
    for (int stage = 0; stage < Config::chunks * Config::walked0 * Config::walked1; ++stage) {
      stages.wait_empty();
      mbarrier_expect(stages.full(), Config::stage_bytes);
      bulk_copy(shared + Config::weight_offset + stages.stage * Config::slot_bytes,
                weights + int64_t(stage) * Config::stage_bytes, Config::stage_bytes, stages.full());
      stages.advance();
    }
  }
}

/// By all threads of a warpgroup.
template <typename Config>
CONVT3D_DEVICE void produce(const PhasesArguments<typename Config::Storage>& a,
                            const TensorMap* map, uint32_t shared, AStageRing<Config> a_stages,
                            WeightRing<Config> stages) {
  const int warp = threadIdx.x / 32 - 4 * Config::consumers, lane = threadIdx.x % 32;
  if (warp != 1) {
    // Channels of a warp are as far apart as warps are many.
    const int filler = Config::filling_warps * lane + warp / 2 + warp / 3;
    if (filler >= Config::fillers) return;
    if constexpr (Config::sweep)
      sweep_boxes<Config>(a, map, shared, a_stages, filler);
    else
      produce_boxes<Config>(a, map, shared, a_stages, filler);
  } else if (lane == 0) {
    grid_dependency_wait();  // for the packed weights
    if constexpr (Config::resident_weights)
      produce_resident<Config>(a, shared, stages);
    else if constexpr (Config::sweep)
      sweep_weights<Config>(a, shared, stages);
    else
      produce_weights<Config>(a, shared, stages);
  }
}

template <typename Config>
CONVT3D_DEVICE void consume(const PhasesArguments<typename Config::Storage>& a, uint32_t shared,
                            AStageRing<Config> a_stages, WeightRing<Config> stages, int warpgroup) {
  if constexpr (Config::sweep) {
    sweep<Config>(a, shared, a_stages, stages, warpgroup);
    return;
  }
  using Walk = PhasesWalk<Config>;
  using Reader = DgradReader<Config>;
  const PhasesUnits<Config> units(a, warpgroup);
  DgradStore<Config> store(a, units, shared, warpgroup);
  Reader reader(a, units);
  PhasesHeld<Config> held{threadIdx.x % 32 == 0};
  bool first = true;
  Walk walk(a);
  WorkTile work;
  while (walk.next(a, work)) {
    PhasesSums<Config> sums;
    auto& sum = sums[0][0][0];
    typename Reader::Fragment fragment[Config::fragments];
#pragma unroll
    for (int i = 0; i < Config::blocks * Config::sums; ++i) (&sum[0][0])[i] = 0.f;
    if (Config::resident_weights && first) stages.wait_full();
    first = false;
    StageWeights<Config> weights(shared);
#pragma unroll 1
    for (int number = 0; number < Config::chunks * Config::boxes_of_chunk; ++number) {
      a_stages.wait_full();
      reader.enter(work, shared + Config::box_offset + a_stages.stage * a.box_bytes,
                   number / Config::boxes_of_chunk,
                   first_slice<Config>(work, number % Config::boxes_of_chunk));
#pragma unroll 1
      for (int tap0 = 0; tap0 < Config::taps_of_box; ++tap0) {
#pragma unroll 1
        for (int tap1 = 0; tap1 < Config::walked1; tap1 += lines_together<Config>)
          multiply_lines<Config, 0, Config::column_tile, Config::column_tile>(
              sum, fragment, reader, tap0, tap1,
              [&](int) {
                return matrix_descriptor(weights.enter(stages), Config::column_tile * 16, 128);
              },
              [&]() { held.release(a_stages, stages); },
              [&]() { weights.leave(stages, held); });
      }
      held.a_stage = a_stages.stage;
      a_stages.advance();
    }
    wgmma_wait<0>();
    held.release(a_stages, stages);
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int i = 0; i < Config::sums; ++i) wgmma_accumulated(sum[block][i]);
    store(work, sums);
  }
}

}  // namespace convt3d
