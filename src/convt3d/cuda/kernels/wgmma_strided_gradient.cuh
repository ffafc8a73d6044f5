// Gradient by input of strided layers on Hopper's warpgroup products, units in registers (sm_90a).
//
// A unit is one element of the input gradient; it reads the output gradient at unit * stride + shift,
// a shift for each tap. A persistent CTA goes from item to item; an item is a tile of units (samples
// x D x H x W, in that order) and some columns. It is an implicit matrix product:
//
//     rows     = units (64 * blocks to a warpgroup), lanes' fragments loaded from the source box
//     columns  = produced channels, from shared memory by descriptor
//     depth    = (source channel, tap), eight words of channels a step
//
//       a line of the source box, stride 2           sums, in registers
//       .---.---.---.---.---.---.---.---.            [block][columns]
//       | o   o | o   o | o   o | o   o |  two taps
//       '---'---'---'---'---'---'---'---' ---------> unit 0, unit 1, unit 2 ...
//         unit 0  unit 1  unit 2
//
// Where the stride along W is even, neighbours of an even and an odd position are loaded as one: the
// operands of two taps, without bank conflicts.
//
// Shared memory: barriers, zeros | weights, one (chunk, tap of D, tap of H) a stage, or all of them | source
// boxes | staging of the epilogue. A box has a chunk of channels and of D either what all taps read, or one tap, so that its
// slices are those of the units; slices and lines that no tap meets are left out.
//
// The last warpgroup's first thread brings boxes (wgmma_strided_gradient_map.cuh by TMA, or
// wgmma_strided_gradient_runs.cuh where lines have odd lengths) and weights by bulk copies. The others
// multiply and store. Full and empty barriers
// of both rings are the only synchronisation between roles.
#pragma once
#include "wgmma_strided_gradient_map.cuh"
#include "wgmma_strided_gradient_runs.cuh"

namespace convt3d {

template <typename Config>
using GradientReader =
    typename Select<Config::runs, RunReader<Config>, MapReader<Config>>::Type;

template <typename Config>
CONVT3D_DEVICE void produce(const PhasesArguments<typename Config::Storage>& a,
                            const TensorMap* map, uint32_t shared, BoxRing<Config> boxes,
                            WeightRing<Config> stages) {
  using Walk = PhasesWalk<Config>;
  Walk walk(a);
  typename Walk::Item item;
  grid_dependency_wait();  // for the packed weights
  bool stored = false;
  while (walk.next(a, item)) {
    const unsigned char* weights =
        a.weights + (item.group * Config::column_tiles + item.column_tile) * Config::team_bytes;
    if (Config::resident_weights && !stored) {
      stored = true;
      mbarrier_expect(stages.full(), uint32_t(Config::team_bytes));
      for (int stage = 0; stage < Config::weight_stages; ++stage)
        bulk_copy(shared + Config::weight_offset + stage * Config::stage_bytes,
                  weights + stage * Config::stage_bytes, Config::stage_bytes, stages.full());
    }
    for (int chunk = 0; chunk < Config::chunks; ++chunk) {
      for (int box = 0; box < Config::boxes_of_chunk; ++box) {
        boxes.wait_empty();
        const uint32_t to = shared + Config::box_offset + boxes.stage * a.box_bytes;
        GradientReader<Config>::fill(a, map, item, chunk, box, to, boxes.full());
        boxes.advance();
        if constexpr (!Config::resident_weights) {
          for (int tap = 0; tap < Config::taps_of_box * Config::Axis1::kernel; ++tap) {
            stages.wait_empty();
            mbarrier_expect(stages.full(), Config::stage_bytes);
            bulk_copy(shared + Config::weight_offset + stages.stage * Config::stage_bytes, weights,
                      Config::stage_bytes, stages.full());
            weights += Config::stage_bytes;
            stages.advance();
          }
        }
      }
    }
  }
}

/// All products of one stage from a step on.
template <typename Config, int Step, typename Reader, typename Release>
CONVT3D_DEVICE void multiply(float (&sum)[Config::blocks][Config::sums],
                             typename Reader::Fragment (&fragment)[Config::fragments],
                             const Reader& reader, uint64_t weights, const Release& release) {
  if constexpr (Step < Reader::steps) {
    using Now = RingStep<Reader::steps, Config::fragments, Step>;
    auto& units = fragment[Step % Config::fragments];
    wgmma_wait<Now::pending>();
    if constexpr (Now::releases) release();
    reader.template load<Step>(units);
    wgmma_fence();
    Reader::template products<Step>(sum, units, weights);
    wgmma_commit();
    multiply<Config, Step + 1>(sum, fragment, reader, weights, release);
  }
}

template <typename Config>
CONVT3D_DEVICE void consume(const PhasesArguments<typename Config::Storage>& a, uint32_t shared,
                            BoxRing<Config> boxes, WeightRing<Config> stages, int warpgroup) {
  using Walk = PhasesWalk<Config>;
  using Reader = GradientReader<Config>;
  const PhasesUnits<Config> units(a, warpgroup);
  PhasesStore<Config> store(a, units, shared, warpgroup);
  Reader reader(a, units);
  HeldBuffers<Config> held{threadIdx.x % 32 == 0};
  bool first = true;
  Walk walk(a);
  typename Walk::Item item;
  while (walk.next(a, item)) {
    PhasesSums<Config> sums;
    auto& sum = sums[0][0][0];
    typename Reader::Fragment fragment[Config::fragments];
#pragma unroll
    for (int i = 0; i < Config::blocks * Config::sums; ++i) (&sum[0][0])[i] = 0.f;
    if (Config::resident_weights && first) stages.wait_full();
    first = false;
    uint32_t resident = shared + Config::weight_offset;
#pragma unroll 1
    for (int number = 0; number < Config::chunks * Config::boxes_of_chunk; ++number) {
      boxes.wait_full();
      reader.enter(item, shared + Config::box_offset + boxes.stage * a.box_bytes, number);
#pragma unroll 1
      for (int tap0 = 0; tap0 < Config::taps_of_box; ++tap0) {
#pragma unroll 1
        for (int tap1 = 0; tap1 < Config::Axis1::kernel; ++tap1) {
          if constexpr (!Config::resident_weights) {
            stages.wait_full();
            resident = shared + Config::weight_offset + stages.stage * Config::stage_bytes;
          }
          reader.turn(tap0, tap1);
          multiply<Config, 0>(sum, fragment, reader,
                              matrix_descriptor(resident, Config::column_tile * 16, 128),
                              [&]() { held.release(boxes, stages); });
          if constexpr (Config::resident_weights) {
            resident += Config::stage_bytes;
          } else {
            held.stage = stages.stage;
            stages.advance();
          }
        }
      }
      held.box = boxes.stage;
      boxes.advance();
    }
    wgmma_wait<0>();
    held.release(boxes, stages);
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int i = 0; i < Config::sums; ++i) wgmma_accumulated(sum[block][i]);
    store(item, sums);
  }
  store.finish();
}

}  // namespace convt3d
