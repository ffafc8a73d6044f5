// The strided gradient as a sweep along D: a work tile is a tile of a slice's units and a segment
// of D. Each slice of the source is brought once, chunk by chunk, and multiplied with the weights
// of all taps that meet it: columns are (unit of the window, produced channel), neighbours in one
// product.
//
//     sums, a window of two units        slice 2q        [q]            one tap
//                                        slice 2q + 1    [q][q + 1]     two taps, twice the columns
//                                        unit q is stored; q + 1 takes its place
//
// Taps, units and periods: geometry/swept_axis.cuh. Slices outside the source, and taps of units
// outside of the segment, are left out: the first sums are always those of the lowest unit of the
// segment that a slice meets.
#pragma once
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "phases/lane_store.cuh"
#include "strided_dgrad/pairs.cuh"
#include "strided_dgrad/runs.cuh"

namespace convt3d {

template <typename Config>
using BoxReader =
    typename Select<Config::lane_pairs, PairReader<Config>,
                    typename Select<Config::volumes, VolumeReader<Config>,
                                    MapReader<Config>>::Type>::Type;
template <typename Config>
using DgradReader =
    typename Select<Config::runs, RunReader<Config>, BoxReader<Config>>::Type;
template <typename Config>
using DgradStore = typename Select<Config::lane_stores, PhasesLaneStore<Config>,
                                      PhasesWarpStore<Config>>::Type;

template <typename Config>
CONVT3D_DEVICE const unsigned char* weights_of(const PhasesArguments<typename Config::Storage>& a,
                                               const WorkTile& work) {
  return a.weights + (work.group * Config::column_tiles + work.column_tile) * Config::n_tile_bytes;
}

/// All weights of a CTA that keeps them, in packed order.
template <typename Config>
CONVT3D_DEVICE void produce_resident(const PhasesArguments<typename Config::Storage>& a,
                                     uint32_t shared, const WeightRing<Config>& stages) {
  WorkTile work;
  PhasesWalk<Config> walk(a);
  if (!walk.next(a, work)) return;
  mbarrier_expect(stages.full(), uint32_t(Config::n_tile_bytes));
  for (int stage = 0; stage < Config::weight_stages; ++stage)
    bulk_copy(shared + Config::weight_offset + stage * Config::stage_bytes,
              weights_of<Config>(a, work) + stage * Config::stage_bytes, Config::stage_bytes,
              stages.full());
}

/// Taps of H that are written out one after the other, so that each fetches for the next.
template <typename Config>
constexpr int lines_together = Config::walked1 <= 4 ? Config::walked1 : 1;

template <typename Reader, int Step>
CONVT3D_DEVICE void fetch_step(Reader& reader) {
  if constexpr (Reader::ahead)
    if constexpr (Reader::Parts::first(Step) == 0)
      reader.template fetch<Step / Reader::Parts::count>();
}

/// All products of one stage from a step on, with the first columns of weights `Pitch` columns
/// apart. `next`: points the reader at the next stage's taps.
template <typename Config, int Step, int Columns, int Pitch, int Sums, typename Reader,
          typename Release, typename Next>
CONVT3D_DEVICE void multiply(float (&sum)[Config::blocks][Sums],
                             typename Reader::Fragment (&fragment)[Config::fragments],
                             Reader& reader, uint64_t weights, const Release& release,
                             const Next& next) {
  if constexpr (Step < Reader::steps) {
    using Now = RingStep<Reader::steps, Config::fragments, Step>;
    auto& units = fragment[Step % Config::fragments];
    wgmma_wait<Now::pending>();
    if constexpr (Now::releases) release();
    reader.template load<Step>(units);
    wgmma_fence();
    Reader::template products<Step, Columns, Pitch>(sum, units, weights);
    wgmma_commit();
    // Under these products.
    if constexpr (Step + 1 < Reader::steps)
      fetch_step<Reader, Step + 1>(reader);
    else
      next();
    multiply<Config, Step + 1, Columns, Pitch>(sum, fragment, reader, weights, release, next);
  }
}

/// The stages of some taps of H from one on. `enter` waits for the weights of a tap, `leave` is
/// called behind its products.
template <typename Config, int Line, int Columns, int Pitch, int Sums, typename Reader,
          typename Enter, typename Release, typename Leave>
CONVT3D_DEVICE void multiply_lines(float (&sum)[Config::blocks][Sums],
                                   typename Reader::Fragment (&fragment)[Config::fragments],
                                   Reader& reader, int tap0, int tap1, const Enter& enter,
                                   const Release& release, const Leave& leave) {
  if constexpr (Line < lines_together<Config>) {
    if constexpr (Line == 0) {
      // A loop over taps begins with no product in flight: across its end, ptxas does not know
      // which registers products still read, and writes fetched words, addresses and operands
      // into them.
      if constexpr (Reader::ahead && lines_together<Config> == 1) wgmma_wait<0>();
      reader.point(tap0, tap1);
      fetch_step<Reader, 0>(reader);
    }
    const uint64_t weights = enter(tap1 + Line);
    multiply<Config, 0, Columns, Pitch>(sum, fragment, reader, weights, release, [&]() {
      if constexpr (Line + 1 < lines_together<Config>) {
        reader.point(tap0, tap1 + Line + 1);
        fetch_step<Reader, 0>(reader);
      }
    });
    leave();
    multiply_lines<Config, Line + 1, Columns, Pitch>(sum, fragment, reader, tap0, tap1, enter,
                                                     release, leave);
  }
}

/// The units of a work tile along D, and the slices that they meet.
template <typename Config>
struct SweepSpan {
  using Sweep = typename Config::Sweep;
  int begin, end, slices;
  CONVT3D_DEVICE SweepSpan(const PhasesArguments<typename Config::Storage>& a, const WorkTile& work)
      : begin(work.first[0] * a.segment),
        end(min(begin + a.segment, a.target.extent[0])),
        slices(a.source_extent[0]) {}
  CONVT3D_DEVICE int first_period() const { return begin - Sweep::max_unit; }
  CONVT3D_DEVICE int end_period() const { return end - Sweep::min_unit; }

  CONVT3D_DEVICE static int slice(int period, int residue) {
    return period * Sweep::stride + residue + Sweep::lead;
  }
  /// The units of the segment that a slice of the source meets, beginning with its tap `skipped`.
  template <int Residue>
  CONVT3D_DEVICE int met(int period, int& skipped) const {
    const int first = period + Sweep::first_unit(Residue);
    skipped = max(begin - first, 0);
    if (unsigned(slice(period, Residue)) >= unsigned(slices)) return 0;
    return min(Sweep::count(Residue), end - first) - skipped;
  }
};

/// Calls what a role does with each slice of a period, its residue at compile time.
template <typename Config, int Residue, typename Role>
CONVT3D_DEVICE void visit_slices(const SweepSpan<Config>& span, int period, Role& role) {
  if constexpr (Residue < Config::Sweep::stride) {
    if constexpr (Config::Sweep::count(Residue) > 0) {
      int skipped;
      const int met = span.template met<Residue>(period, skipped);
      // Always called: a branch around products would make ptxas serialise them.
      role.template visit<Residue>(span.slice(period, Residue), met, skipped);
    }
    visit_slices<Config, Residue + 1>(span, period, role);
  }
}

template <typename Config>
struct SweepBoxes {
  const PhasesArguments<typename Config::Storage>& a;
  const TensorMap* map;
  uint32_t shared;
  AStageRing<Config> a_stages;
  int filler;
  WorkTile work;

  template <int Residue>
  CONVT3D_DEVICE void visit(int slice, int met, int) {
    for (int chunk = 0; met > 0 && chunk < Config::chunks; ++chunk) {
      a_stages.wait_empty();
      DgradReader<Config>::fill(a, map, work, chunk, slice,
                                   shared + Config::box_offset + a_stages.stage * a.box_bytes,
                                   a_stages.full(), filler);
      a_stages.advance();
    }
  }
};

/// The packed weights of a slice's taps, from those of its group and columns on.
template <typename Config, int Residue>
struct SweepStage {
  using Sweep = typename Config::Sweep;
  static constexpr int columns = Sweep::count(Residue) * Config::column_tile;
  static constexpr int bytes = Sweep::count(Residue) * Config::stage_bytes;
  CONVT3D_DEVICE static int at(int chunk, int tap1) {
    return (chunk * Config::walked0 + Sweep::before(Residue)) * Config::walked1 *
               Config::stage_bytes +
           tap1 * bytes;
  }
};

template <typename Config>
struct SweepWeights {
  uint32_t shared;
  WeightRing<Config> stages;
  const unsigned char* weights;

  template <int Residue>
  CONVT3D_DEVICE void visit(int, int met, int) {
    using Stage = SweepStage<Config, Residue>;
    for (int chunk = 0; met > 0 && chunk < Config::chunks; ++chunk)
      for (int tap1 = 0; tap1 < Config::walked1; ++tap1) {
        stages.wait_empty();
        mbarrier_expect(stages.full(), Stage::bytes);
        bulk_copy(shared + Config::weight_offset + stages.stage * Config::slot_bytes,
                  weights + Stage::at(chunk, tap1), Stage::bytes, stages.full());
        stages.advance();
      }
  }
};

template <typename Config>
CONVT3D_DEVICE void sweep_boxes(const PhasesArguments<typename Config::Storage>& a,
                                const TensorMap* map, uint32_t shared, AStageRing<Config> a_stages,
                                int filler) {
  PhasesWalk<Config> walk(a);
  SweepBoxes<Config> role{a, map, shared, a_stages, filler, {}};
  while (walk.next(a, role.work)) {
    const SweepSpan<Config> span(a, role.work);
    for (int period = span.first_period(); period < span.end_period(); ++period)
      visit_slices<Config, 0>(span, period, role);
  }
}

template <typename Config>
CONVT3D_DEVICE void sweep_weights(const PhasesArguments<typename Config::Storage>& a,
                                  uint32_t shared, WeightRing<Config> stages) {
  PhasesWalk<Config> walk(a);
  WorkTile work;
  SweepWeights<Config> role{shared, stages, nullptr};
  while (walk.next(a, work)) {
    role.weights = weights_of<Config>(a, work);
    const SweepSpan<Config> span(a, work);
    for (int period = span.first_period(); period < span.end_period(); ++period)
      visit_slices<Config, 0>(span, period, role);
  }
}

template <typename Config>
struct SweepProducts {
  using Reader = DgradReader<Config>;
  const PhasesArguments<typename Config::Storage>& a;
  uint32_t shared;
  AStageRing<Config> a_stages;
  WeightRing<Config> stages;
  Reader reader;
  PhasesHeld<Config> held;
  WorkTile work;
  float sum[Config::blocks][Config::window * Config::sums];

  template <int Residue>
  CONVT3D_DEVICE void visit(int slice, int met, int skipped) {
    visit_units<Residue, Config::Sweep::count(Residue)>(slice, met, skipped);
  }
  /// Slices at the ends of a segment meet fewer units, each number of them in products of its
  /// own.
  template <int Residue, int Units>
  CONVT3D_DEVICE void visit_units(int slice, int met, int skipped) {
    using Stage = SweepStage<Config, Residue>;
    const int chunks = met == Units ? Config::chunks : 0;
    typename Reader::Fragment fragment[Config::fragments];
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      a_stages.wait_full();
      reader.enter(work, shared + Config::box_offset + a_stages.stage * a.box_bytes, chunk, slice);
#pragma unroll 1
      for (int tap1 = 0; tap1 < Config::walked1; tap1 += lines_together<Config>)
        multiply_lines<Config, 0, Units * Config::column_tile, Stage::columns>(
            sum, fragment, reader, 0, tap1,
            [&](int tap) {
              uint32_t weights =
                  shared + Config::weight_offset + skipped * (Config::column_tile * 16);
              if constexpr (Config::resident_weights) {
                weights += Stage::at(chunk, tap);
              } else {
                stages.wait_full();
                weights += stages.stage * Config::slot_bytes;
              }
              return matrix_descriptor(weights, Stage::columns * 16, 128);
            },
            [&]() { held.release(a_stages, stages); },
            [&]() {
              if constexpr (!Config::resident_weights) {
                held.weights = stages.stage;
                stages.advance();
              }
            });
      held.a_stage = a_stages.stage;
      a_stages.advance();
    }
    // Sums move on behind the slices of a period.
    wgmma_wait<0>();
    held.release(a_stages, stages);
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int i = 0; i < Config::window * Config::sums; ++i) wgmma_accumulated(sum[block][i]);
    if constexpr (Units > 1) visit_units<Residue, Units - 1>(slice, met, skipped);
  }
};

template <typename Config>
CONVT3D_DEVICE void sweep(const PhasesArguments<typename Config::Storage>& a, uint32_t shared,
                          AStageRing<Config> a_stages, WeightRing<Config> stages, int warpgroup) {
  constexpr int sums = Config::sums, kept = (Config::window - 1) * sums;
  const PhasesUnits<Config> units(a, warpgroup);
  DgradStore<Config> store(a, units, shared, warpgroup);
  SweepProducts<Config> role{a,     shared, a_stages, stages, DgradReader<Config>(a, units),
                             {threadIdx.x % 32 == 0}, {},  {}};
  if constexpr (Config::resident_weights) stages.wait_full();
  PhasesWalk<Config> walk(a);
  while (walk.next(a, role.work)) {
    const SweepSpan<Config> span(a, role.work);
#pragma unroll
    for (int i = 0; i < Config::blocks * Config::window * sums; ++i) (&role.sum[0][0])[i] = 0.f;
#pragma unroll 1
    for (int period = span.first_period(); period < span.end_period(); ++period) {
      visit_slices<Config, 0>(span, period, role);
      // The lowest unit has met all of its slices.
      auto work = role.work;
      work.first[0] = period + Config::Sweep::min_unit;
      if (work.first[0] >= span.begin) {
        PhasesSums<Config> done;
#pragma unroll
        for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
          for (int i = 0; i < sums; ++i) done[0][0][0][block][i] = role.sum[block][i];
        store(work, done);
      }
      // Before the first unit has met all, the sums stay where they are.
      const bool moves = work.first[0] >= span.begin;
      // Not before they are stored: that would take registers for both.
#pragma unroll
      for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
        for (int i = 0; i < Config::window * sums; ++i) wgmma_accumulated(role.sum[block][i]);
#pragma unroll
      for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
        for (int i = 0; i < Config::window * sums; ++i)
          if (moves) role.sum[block][i] = i < kept ? role.sum[block][i + sums] : 0.f;
    }
  }
}

}  // namespace convt3d
