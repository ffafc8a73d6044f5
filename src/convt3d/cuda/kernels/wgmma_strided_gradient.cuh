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
// Shared memory: barriers | weights, one (chunk, tap of D, tap of H) a stage, or all of them | source
// boxes, [sample][slice] and then [line][channel] or [channel][line] of rows along W | staging of the
// epilogue. A box has a chunk of channels and of D either what all taps read, or one tap, so that its
// slices are those of the units; slices and lines that no tap meets are left out.
//
// The last warpgroup's first thread brings boxes by TMA, which zero-fills what lies outside and
// rounds to TF32, and weights by bulk copies. The others multiply and store. Full and empty barriers
// of both rings are the only synchronisation between roles.
#pragma once
#include "wgmma_phases_store.cuh"

namespace convt3d {

/// Positions that taps of an axis meet are multiples of this from each other.
CONVT3D_CONSTEXPR int met_step(int kernel, int stride, int dilation) {
  return kernel == 1 ? stride : gcd(stride, dilation);
}

struct WgmmaStridedGradientConfig : WgmmaPhasesConfig {
  static_assert(!forward && phased == 2, "taps of D and H are walked");
  /// Whether a box has what all taps of axis 0 read, or one tap.
  static constexpr bool whole_boxes = CONVT3D_WHOLE_BOXES;
  static constexpr int met0 = met_step(Axis0::kernel, CONVT3D_STRIDE0, CONVT3D_DILATION0);
  static constexpr int met1 = met_step(Axis1::kernel, CONVT3D_STRIDE1, CONVT3D_DILATION1);
  // In slices and lines of a box: from a unit to the next, and from a tap to the next.
  static constexpr int slice_step = whole_boxes ? CONVT3D_STRIDE0 / met0 : 1;
  static constexpr int line_step = CONVT3D_STRIDE1 / met1;
  static constexpr int tap_slices = whole_boxes ? CONVT3D_DILATION0 / met0 : 0;
  static constexpr int tap_lines = CONVT3D_DILATION1 / met1;
  static constexpr int boxes_of_chunk = whole_boxes ? 1 : Axis0::kernel;
  static constexpr int taps_of_box = whole_boxes ? Axis0::kernel : 1;

  /// Neighbours along W that are loaded at once: the first at a multiple of `pair`.
  static constexpr int pair = position_step % 2 == 0 ? 2 : 1;
  using Units = uint32_t[pair][blocks][4];
};
using PhasesKernel = WgmmaStridedGradientConfig;

template <typename Config>
CONVT3D_DEVICE void produce(const PhasesArguments<typename Config::Storage>& a,
                            const TensorMap& map, uint32_t shared, BoxRing<Config> boxes,
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
    const int w = walk.column(item);
    const int h = item.first[1] * Config::Axis1::unit_source + Config::Axis1::min_shift;
    const int d = item.first[0] * Config::Axis0::unit_source + Config::Axis0::min_shift;
    for (int chunk = 0; chunk < Config::chunks; ++chunk) {
      const int channel = item.group * Config::source_channels + chunk * Config::chunk_channels;
      for (int box = 0; box < Config::boxes_of_chunk; ++box) {
        boxes.wait_empty();
        const uint32_t to = shared + Config::box_offset + boxes.stage * a.box_bytes;
        const int slice = d + box * CONVT3D_DILATION0;
        mbarrier_expect(boxes.full(), a.box_bytes);
        if (a.channel_dimension == 1)
          tma_load_5d(to, map, w, channel, h, slice, item.sample, boxes.full());
        else
          tma_load_5d(to, map, w, h, channel, slice, item.sample, boxes.full());
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

CONVT3D_CONSTEXPR int floor_div(int a, int b) { return (a - floor_mod(a, b)) / b; }

/// A step loads, for all units, the `pair` positions of one place along W that any tap meets.
template <typename Config, int Step>
struct GradientStep {
  using Axis2 = typename Config::Axis2;
  static constexpr int pair = Config::pair;
  static constexpr int first = floor_div(Axis2::min_shift, pair);
  static constexpr int last = floor_div(Axis2::max_shift, pair);
  /// The tap of a residue at a place, or -1.
  CONVT3D_CONSTEXPR static int tap(int place, int residue) {
    return Axis2::tap(0, place * pair + residue);
  }
  CONVT3D_CONSTEXPR static bool met(int place) {
    for (int residue = 0; residue < pair; ++residue)
      if (tap(place, residue) >= 0) return true;
    return false;
  }
  CONVT3D_CONSTEXPR static int total() {
    int found = 0;
    for (int place = first; place <= last; ++place) found += met(place);
    return found;
  }
  CONVT3D_CONSTEXPR static int at(int number) {
    int place = first;
    while (!met(place) || number-- > 0) ++place;
    return place;
  }
  static constexpr int steps = total();
  static constexpr int place = at(Step < steps ? Step : 0);
  // The ring of fragments goes on from stage to stage if it divides their steps.
  static constexpr bool broken = steps % Config::fragments != 0;
  static constexpr int pending = broken && Step == 0 ? 0 : Config::fragments - 1;
  /// Here only products of this stage are in flight.
  static constexpr bool releases = Step == (broken ? 0 : Config::fragments - 1);

  template <int Residue>
  CONVT3D_DEVICE static void products(float (&sum)[Config::blocks][Config::sums],
                                      const typename Config::Units& units, uint64_t weights) {
    if constexpr (Residue < pair) {
      constexpr int k2 = tap(place, Residue);
      if constexpr (k2 >= 0) {
#pragma unroll
        for (int block = 0; block < Config::blocks; ++block)
          wgmma_product_of<Config::column_tile>(typename Config::Math{}, sum[block],
                                                units[Residue][block],
                                                weights + k2 * (Config::tap_bytes / 16));
      }
      products<Residue + 1>(sum, units, weights);
    }
  }
};

/// The words of one unit and channel (or two of 16 bits) at `pair` neighbours.
template <typename Config>
CONVT3D_DEVICE void load_units(uint32_t (&word)[Config::pair], uint32_t address,
                               uint32_t channel_bytes) {
  constexpr bool one = Config::Type::channels_per_word == 1;
  if constexpr (one && Config::pair == 2) {
    load_shared(address, word[0], word[1]);
  } else if constexpr (one) {
    word[0] = load_shared(address);
  } else if constexpr (Config::pair == 2) {
    const uint32_t low = load_shared(address), high = load_shared(address + channel_bytes);
    word[0] = permute_bytes(low, high, 0x5410);
    word[1] = permute_bytes(low, high, 0x7632);
  } else {
    word[0] = permute_bytes(load_shared_half(address), load_shared_half(address + channel_bytes),
                            0x5410);
  }
}

/// All products of one stage from a step on. `rows`: byte addresses of this lane's units, of the
/// channels of both quads.
template <typename Config, int Step, typename Release>
CONVT3D_DEVICE void multiply(float (&sum)[Config::blocks][Config::sums],
                             typename Config::Units (&fragment)[Config::fragments],
                             const uint32_t (&rows)[Config::blocks][4], uint32_t box,
                             uint32_t channel_bytes, uint64_t weights, const Release& release) {
  using Now = GradientStep<Config, Step>;
  if constexpr (Step < Now::steps) {
    constexpr int element = sizeof(typename Config::Storage);
    auto& units = fragment[Step % Config::fragments];
    wgmma_wait<Now::pending>();
    if constexpr (Now::releases) release();
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t word[Config::pair];
        load_units<Config>(word, rows[block][i] + box + Now::place * Config::pair * element,
                           channel_bytes);
#pragma unroll
        for (int residue = 0; residue < Config::pair; ++residue)
          units[residue][block][i] = word[residue];
      }
    wgmma_fence();
    Now::template products<0>(sum, units, weights);
    wgmma_commit();
    multiply<Config, Step + 1>(sum, fragment, rows, box, channel_bytes, weights, release);
  }
}

template <typename Config>
CONVT3D_DEVICE void consume(const PhasesArguments<typename Config::Storage>& a, uint32_t shared,
                            BoxRing<Config> boxes, WeightRing<Config> stages, int warpgroup) {
  using Walk = PhasesWalk<Config>;
  constexpr int element = sizeof(typename Config::Storage);
  const int lane = threadIdx.x % 32;
  const PhasesUnits<Config> units(a, warpgroup);
  PhasesStore<Config> store(a, units, shared, warpgroup);
  // Bytes from a box's beginning to this lane's units, rows g and g + 8 of a block.
  uint32_t rows[Config::blocks][4];
  const int first_row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = units.position(units(first_row + 64 * block + 8 * (i % 2)));
      const int channel = (lane % 4 + 4 * (i / 2)) * Config::Type::channels_per_word;
      rows[block][i] = (position + channel * a.channel_pitch) * element;
    }

  HeldBuffers<Config> held{lane == 0};
  bool first = true;
  Walk walk(a);
  typename Walk::Item item;
  while (walk.next(a, item)) {
    PhasesSums<Config> sums;
    auto& sum = sums[0][0][0];
    typename Config::Units fragment[Config::fragments];
#pragma unroll
    for (int i = 0; i < Config::blocks * Config::sums; ++i) (&sum[0][0])[i] = 0.f;
    if (Config::resident_weights && first) stages.wait_full();
    first = false;
    const int lead = item.first[2] * Config::position_step - Walk::column(item);
    uint32_t resident = shared + Config::weight_offset;
#pragma unroll 1
    for (int number = 0; number < Config::chunks * Config::boxes_of_chunk; ++number) {
      boxes.wait_full();
      const uint32_t box =
          shared + Config::box_offset + boxes.stage * a.box_bytes + lead * element;
#pragma unroll 1
      for (int tap0 = 0; tap0 < Config::taps_of_box; ++tap0) {
#pragma unroll 1
        for (int tap1 = 0; tap1 < Config::Axis1::kernel; ++tap1) {
          if constexpr (!Config::resident_weights) {
            stages.wait_full();
            resident = shared + Config::weight_offset + stages.stage * Config::stage_bytes;
          }
          const int offset = tap0 * Config::tap_slices * a.slice_pitch +
                             tap1 * Config::tap_lines * a.line_pitch;
          multiply<Config, 0>(sum, fragment, rows, box + offset * element,
                              a.channel_pitch * element,
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
