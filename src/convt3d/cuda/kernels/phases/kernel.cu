// Strided layers on Hopper's warpgroup products, units in registers (sm_90a): forward
// pass; what the gradient by input has in its stead is in strided_dgrad/mainloop.cuh.
//
// A unit is one period of phases: stride0 x stride1 x stride2 outputs. A persistent CTA goes from
// item to item; an item is a tile of units (samples x D x H x W, in that order), some columns, and
// of phased axes one phase. It is an implicit matrix product:
//
//     rows     = units (64 * blocks to a warpgroup), lanes' fragments loaded from the source box
//     columns  = produced channels, from shared memory by descriptor
//     depth    = (source channel, tap), eight words of channels a step
//
//       source box, 8 words of channels            sums, in registers
//       .-----------------------.          [slot0][slot1][slot2][block][columns]
//       | o o o o o o o o       |  taps of
//       |   units, at any shift | ---------->   outputs  o = unit * stride + slot
//       '-----------------------'  all slots
//
// One fragment of units (a shift of the box) serves every slot with a tap there; each slot has sums
// of its own, so products of different slots do not wait for each other.
//
// Shared memory: barriers | weights, one (chunk, walked taps) a stage, or all of them | source
// boxes, a chunk (and, if wanted, a walked tap of D) each, [sample][slice] and then
// [line][channel] or [channel][line] of rows along W | staging of the epilogue.
//
// The last warpgroup's first thread brings boxes by TMA, which zero-fills what lies outside and
// rounds to TF32 (not where products are IEEE-grade: phases/split.cuh), and weights by bulk
// copies. The others multiply, and store or stage for the last warpgroup's other warps, which send.
// Full and empty barriers of rings are the only synchronisation between roles.
#undef CONVT3D_WGMMA_USES
// Gradients by input have the columns of several taps in one product.
#if CONVT3D_FORWARD
#define CONVT3D_WGMMA_USES(n) ((n) == CONVT3D_COLUMN_TILE)
#else
#define CONVT3D_WGMMA_USES(n) ((n) % CONVT3D_COLUMN_TILE == 0)
#endif
#include "phases/store_warps.cuh"
#include "phases/split.cuh"
#include "phases/store.cuh"
#include "phases/transposed.cuh"
#include "phases/warp_store.cuh"
#if !CONVT3D_FORWARD
#include "strided_dgrad/mainloop.cuh"
#else

namespace convt3d {

using PhasesKernel = WgmmaPhasesConfig;
template <typename Config>
using StoreOf = typename Select<
    (Config::senders > 0), PhasesStagedStore<Config>,
    typename Select<Config::warp_stores, PhasesWarpStore<Config>, PhasesStore<Config>>::Type>::Type;

template <typename Config>
CONVT3D_DEVICE void produce(const PhasesArguments<typename Config::Storage>& a,
                            const TensorMap* map, uint32_t shared, BoxRing<Config> boxes,
                            WeightRing<Config> stages) {
  using Walk = PhasesProductWalk<Config>;
  if constexpr (Config::turned) {
    const int turner = int(threadIdx.x) - Config::threads + Config::fillers;
    if (turner >= 0) return PhasesTurner<Config>(a, shared, turner).fill(boxes);
  }
  if (threadIdx.x != 128 * Config::consumers) return;
  Walk walk(a);
  typename Walk::Item item;
  grid_dependency_wait();  // for the packed weights
  bool stored = false;
  while (walk.next(a, item)) {
    const unsigned char* weights =
        a.weights + (item.group * Config::column_tiles + item.column_tile) * Config::team_bytes;
    const auto stage_of = [&](int chunk, int tap0, int tap1) {
      const int walked = (chunk * Config::walked0 + item.taps0.first_position + tap0) *
                             Config::walked1 + item.taps1.first_position + tap1;
      return weights + int64_t(walked) * Config::stage_bytes;
    };
    if (Config::resident_weights && !stored) {
      stored = true;
      uint32_t to = shared + Config::weight_offset;
      mbarrier_expect(stages.full(), Config::chunks * item.taps0.count * item.taps1.count *
                                         Config::stage_bytes);
      for (int chunk = 0; chunk < Config::chunks; ++chunk)
        for (int tap0 = 0; tap0 < item.taps0.count; ++tap0)
          for (int tap1 = 0; tap1 < item.taps1.count; ++tap1, to += Config::stage_bytes)
            bulk_copy(to, stage_of(chunk, tap0, tap1), Config::stage_bytes, stages.full());
    }
    if (item.taps0.count * item.taps1.count == 0) continue;
    const int line = item.first[1] + item.taps1.origin;
    const int w = Config::plane_parts ? walk.aligned(line * a.line_pitch)
                  : Config::planes    ? 0
                                      : walk.column(item);
    const int h = Config::planes ? 0 : line;
    const int d = item.first[0] + item.taps0.origin;
    for (int chunk = 0; chunk < Config::chunks; ++chunk)
      for (int tap0 = 0; tap0 < item.taps0.count; ++tap0) {
        if (!Config::turned && (Config::tap_boxes || tap0 == 0)) {
          boxes.wait_empty();
          const uint32_t to = shared + Config::box_offset + boxes.stage * a.box_bytes;
          const int channel = item.group * Config::source_channels + chunk * Config::chunk_channels;
          const int slice =
              d + (Config::tap_boxes ? item.taps0.offset + tap0 * item.taps0.step : 0);
          mbarrier_expect(boxes.full(), a.box_bytes);
          if (a.channel_dimension == 1)
            tma_load_5d(to, *map, w, channel, h, slice, item.sample, boxes.full());
          else
            tma_load_5d(to, *map, w, h, channel, slice, item.sample, boxes.full());
          boxes.advance();
        }
        if constexpr (!Config::resident_weights) {
          for (int tap1 = 0; tap1 < item.taps1.count; ++tap1) {
            stages.wait_empty();
            mbarrier_expect(stages.full(), Config::stage_bytes);
            bulk_copy(shared + Config::weight_offset + stages.stage * Config::stage_bytes,
                      stage_of(chunk, tap0, tap1), Config::stage_bytes, stages.full());
            stages.advance();
          }
        }
      }
  }
}

/// One fragment of units: a shift of the box. Everything that follows is written out by recursion on
/// constants: control flow that disappears late makes ptxas serialise products in flight.
template <typename Config, int Step>
struct PhasesStep {
  using Axis0 = typename Config::Inner0;
  using Axis1 = typename Config::Inner1;
  using Axis2 = typename Config::Axis2;
  static constexpr int count1 = UsedShifts<Axis1>::count;
  static constexpr int count2 = UsedShifts<Axis2>::count;
  static constexpr int steps = UsedShifts<Axis0>::count * count1 * count2;
  // The end of the recursion has no shift to look for.
  static constexpr int shift0 =
      UsedShifts<Axis0>::at(Step < steps ? Step / (count1 * count2) : 0);
  static constexpr int shift1 = UsedShifts<Axis1>::at(Step / count2 % count1);
  static constexpr int shift2 = UsedShifts<Axis2>::at(Step % count2);
  // The ring of fragments goes on from stage to stage if it divides their steps. From three fragments
  // on, that of the next step is loaded before the products of this one are waited for.
  static constexpr bool broken = steps % Config::fragments != 0;
  static constexpr bool ahead = Config::fragments > 2;
  /// Groups of products that may run on while the first fragment of a stage, or that of a later
  /// step, replaces another.
  static constexpr int pending_first = broken ? 0 : Config::fragments - 1;
  static constexpr int pending = Config::fragments - (ahead ? 2 : 1);
  /// After which wait only products of this stage are in flight.
  static constexpr int releases = broken ? -1 : pending;

  /// Products of the slots from `Slot` on that have a tap at this shift. `units`: a fragment of each
  /// block, or the descriptor of its rows.
  template <int Slot, typename Units>
  CONVT3D_DEVICE static void products(PhasesSums<Config>& sum,
                                      const Units (&units)[Config::blocks],
                                      uint64_t weights) {
    if constexpr (Slot < Axis0::slots * Axis1::slots * Axis2::slots) {
      constexpr int slot0 = Slot / (Axis1::slots * Axis2::slots);
      constexpr int slot1 = Slot / Axis2::slots % Axis1::slots;
      constexpr int slot2 = Slot % Axis2::slots;
      constexpr int tap0 = Axis0::tap(slot0, shift0 + Axis0::min_shift);
      constexpr int tap1 = Axis1::tap(slot1, shift1 + Axis1::min_shift);
      constexpr int tap2 = Axis2::tap(slot2, shift2 + Axis2::min_shift);
      if constexpr (tap0 >= 0 && tap1 >= 0 && tap2 >= 0) {
        constexpr int tap = Config::tap_at(tap0, tap1, tap2);
#pragma unroll
        for (int block = 0; block < Config::blocks; ++block)
          wgmma_product_of<Config::column_tile>(
              typename Config::Math{}, sum[slot0][slot1][slot2][block], units[block],
              descriptor_at<Config>(weights, tap * Config::tap_bytes));
      }
      products<Slot + 1>(sum, units, weights);
    }
  }
};

/// The words of 16 bits that a lane's pair of units reads at any shift of W: aligned words of two
/// positions, counted from the pair's own, of two channels and both quads.
template <typename Config>
struct PhasesWords {
  using Axis2 = typename Config::Axis2;
  using Used = UsedShifts<Axis2>;
  static constexpr int lowest = floor_div(Axis2::min_shift + Used::at(0), 2);
  static constexpr int highest =
      floor_div(Axis2::min_shift + Used::at(Used::count - 1) + 1, 2);
  static constexpr int count = Config::lane_pairs ? highest - lowest + 1 : 1;
  static_assert(!Config::lane_pairs || (Config::Type::channels_per_word == 2 && !Config::planes &&
                                        Config::position_step == 1 && Config::warp_stores),
                "pairs of 16-bit units");
  uint32_t word[Config::blocks][2][2][count];
};

/// Which positions of this lane's units are inside of their planes; see WgmmaPhasesConfig::planes.
template <typename Config>
struct PhasesInside {
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  uint32_t bits[Config::blocks][2];

  CONVT3D_DEVICE PhasesInside(const PhasesArguments<typename Config::Storage>& a,
                              const PhasesUnits<Config>& units) {
    if constexpr (Config::planes) {
#pragma unroll
      for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto unit = units(units.row_of(block, half));
          uint32_t found = 0;
#pragma unroll
          for (int shift1 = 0; shift1 < Config::line_shifts; ++shift1)
#pragma unroll
            for (int number = 0; number < Config::line_bits; ++number) {
              const int line = unit.at[1] + Axis1::min_shift + shift1;
              const int at = unit.at[2] + Axis2::min_shift + UsedShifts<Axis2>::at(number);
              const bool inside =
                  (Config::plane_parts || unsigned(line) < unsigned(a.source_extent[1])) &&
                  unsigned(at) < unsigned(a.line_pitch);
              found |= uint32_t(inside) << (shift1 * Config::line_bits + number);
            }
          bits[block][half] = found;
        }
    }
  }
  /// Where taps of axis 1 are walked: those of a shift from the smallest one on.
  CONVT3D_DEVICE PhasesInside(const PhasesInside& all, int shift1) {
    if constexpr (Config::planes)
#pragma unroll
      for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          bits[block][half] =
              all.bits[block][half] >> (Config::plane_parts ? 0 : shift1 * Config::line_bits);
  }
};

/// What a stage's fragments are loaded from. `rows`: byte addresses of this lane's units in the box, of
/// the channels of both quads.
template <typename Config>
struct PhasesSource {
  const PhasesArguments<typename Config::Storage>& arguments;
  const uint32_t (&rows)[Config::blocks][4];
  PhasesInside<Config> inside;
  uint32_t box, zeros;

  /// The words of all steps that share this one's shifts of D and H.
  template <int Step>
  CONVT3D_DEVICE void load_words(PhasesWords<Config>& words) const {
    using Now = PhasesStep<Config, Step>;
    using Words = PhasesWords<Config>;
    constexpr int element = sizeof(typename Config::Storage);
    const auto& a = arguments;
    const uint32_t at = box + (Now::shift0 * a.slice_pitch + Now::shift1 * a.line_pitch +
                               2 * Words::lowest - Config::Axis2::min_shift) *
                                  element;
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int quad = 0; quad < 2; ++quad)
#pragma unroll
        for (int channel = 0; channel < 2; ++channel)
#pragma unroll
          for (int i = 0; i < Words::count; ++i)
            words.word[block][quad][channel][i] = load_shared(
                rows[block][2 * quad] + at + (channel * a.channel_pitch + 2 * i) * element);
  }
  /// A step's fragment out of them.
  template <int Step>
  CONVT3D_DEVICE static void take(uint32_t (&units)[Config::blocks][4],
                                  const PhasesWords<Config>& words) {
    constexpr int shift = Config::Axis2::min_shift + PhasesStep<Config, Step>::shift2;
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        constexpr int lowest = PhasesWords<Config>::lowest;
        const int at = floor_div(shift + i % 2, 2) - lowest;
        const auto& both = words.word[block][i / 2];
        units[block][i] = permute_bytes(both[0][at], both[1][at],
                                        floor_mod(shift + i % 2, 2) ? 0x7632 : 0x5410);
      }
  }

  /// The fragments of all steps that share this one's words, each in registers of its own.
  template <int Step, int I>
  CONVT3D_DEVICE static void take_all(uint32_t (&fragment)[Config::fragments][Config::blocks][4],
                                      const PhasesWords<Config>& words) {
    if constexpr (I < PhasesStep<Config, Step>::count2) {
      static_assert(I < Config::fragments, "a fragment for each shift of W");
      take<Step + I>(fragment[I], words);
      take_all<Step, I + 1>(fragment, words);
    }
  }

  template <int Step>
  CONVT3D_DEVICE void load(uint32_t (&units)[Config::blocks][4]) const {
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block) load<Step>(units[block], block);
  }
  /// One block's.
  template <int Step>
  CONVT3D_DEVICE void load(uint32_t (&units)[4], int block) const {
    using Now = PhasesStep<Config, Step>;
    constexpr int element = sizeof(typename Config::Storage);
    constexpr int bit =
        (Config::plane_parts ? 0 : Now::shift1 * Config::line_bits) + Step % Now::count2;
    const auto& a = arguments;
    const uint32_t at = box + offset<Step>() * Config::position_bytes;
    if constexpr (Config::turned) {
      load_matrix_x4(rows[block][0] + at, units);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t word = rows[block][i] + at;
      uint32_t next = word + a.channel_pitch * element;
      if constexpr (Config::planes) {
        const bool found = inside.bits[block][i % 2] & uint32_t(1) << bit;
        word = found ? word : zeros;
        next = found ? next : zeros;
      }
      if constexpr (Config::Type::channels_per_word == 1)
        units[i] = load_shared(word);
      else
        units[i] = permute_bytes(load_shared_half(word), load_shared_half(next), 0x5410);
    }
  }
  /// The same as operands in shared memory.
  template <int Step>
  CONVT3D_DEVICE void describe(uint64_t (&units)[Config::blocks]) const {
    const auto& a = arguments;
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
      units[block] =
          matrix_descriptor(box + rows[block][0], a.channel_pitch * 16, a.line_pitch * 16) +
          offset<Step>();
  }

 private:
  /// Positions from the box's first one to those of a step.
  template <int Step>
  CONVT3D_DEVICE int offset() const {
    using Now = PhasesStep<Config, Step>;
    return Now::shift0 * arguments.slice_pitch + Now::shift1 * arguments.line_pitch +
           Now::shift2;
  }
};

/// All products of one stage from a step on, both operands in shared memory.
template <typename Config, int Step>
CONVT3D_DEVICE void multiply_shared(PhasesSums<Config>& sum, const PhasesSource<Config>& source,
                                    uint64_t weights) {
  using Now = PhasesStep<Config, Step>;
  if constexpr (Step < Now::steps) {
    uint64_t units[Config::blocks];
    source.template describe<Step>(units);
    Now::template products<0>(sum, units, weights);
    multiply_shared<Config, Step + 1>(sum, source, weights);
  }
}

/// All products of one stage from a step on.
template <typename Config, int Step, typename Release>
CONVT3D_DEVICE void multiply(PhasesSums<Config>& sum,
                             uint32_t (&fragment)[Config::fragments][Config::blocks][4],
                             const PhasesSource<Config>& source, PhasesWords<Config>& words,
                             uint64_t weights, const Release& release) {
  using Now = PhasesStep<Config, Step>;
  if constexpr (Step < Now::steps) {
    if constexpr (Config::lane_pairs) {
      // Nothing is in flight while words and fragments are written: ptxas moves permutations past waits.
      if constexpr (Step % Now::count2 == 0) {
        wgmma_wait<0>();
        if constexpr (Step == 0) release();
        source.template load_words<Step>(words);
        source.template take_all<Step, 0>(fragment, words);
      }
    } else {
      if constexpr (Step == 0) {
        wgmma_wait<Now::pending_first>();
        if constexpr (Now::releases < 0) release();
        source.template load<0>(fragment[0]);
      }
      constexpr int loads = Now::ahead ? Step + 1 : Step;
      if constexpr (loads > 0 && loads < Now::steps) {
        wgmma_wait<Now::pending>();
        if constexpr (Step == Now::releases) release();
        source.template load<loads>(fragment[loads % Config::fragments]);
      }
    }
    wgmma_fence();
    constexpr int own = Config::lane_pairs ? Step % Now::count2 : Step % Config::fragments;
    Now::template products<0>(sum, fragment[own], weights);
    wgmma_commit();
    multiply<Config, Step + 1>(sum, fragment, source, words, weights, release);
  }
}

template <typename Config>
CONVT3D_DEVICE void consume(const PhasesArguments<typename Config::Storage>& a, uint32_t shared,
                            BoxRing<Config> boxes, WeightRing<Config> stages, int warpgroup) {
  using Walk = PhasesProductWalk<Config>;
  constexpr int element = sizeof(typename Config::Storage);
  constexpr bool whole_planes = Config::planes && !Config::plane_parts;
  const PhasesUnits<Config> units(a, warpgroup);
  StoreOf<Config> store(a, units, shared, warpgroup);
  uint32_t rows[Config::blocks][4];
  if constexpr (Config::turned)
    units.turned_addresses(rows);
  else
    units.addresses(rows);
  const PhasesInside<Config> inside(a, units);
  HeldBuffers<Config> held{threadIdx.x % 32 == 0};
  bool first = true;
  int passed = 0;
  const uint32_t ahead = shared + Config::ahead_barrier;
  if (Config::ahead > 0 && warpgroup > 0) mbarrier_wait(ahead, 0);
  Walk walk(a);
  typename Walk::Item item;
  while (walk.next(a, item)) {
    PhasesSums<Config> sum;
    uint32_t fragment[Config::fragments][Config::blocks][4];
    PhasesWords<Config> words;
#pragma unroll
    for (int i = 0; i < int(sizeof(sum) / sizeof(float)); ++i) (&sum[0][0][0][0][0])[i] = 0.f;
    if (Config::resident_weights && first) stages.wait_full();
    first = false;
    // Phases without taps hold nothing but the bias. Their loops would run no round at all, which must
    // not look like a way around the products.
    const int chunks = item.taps0.count * item.taps1.count ? Config::chunks : 0;
    int lead = Config::planes ? Config::Axis2::min_shift
                              : item.first[2] + Config::Axis2::min_shift - Walk::column(item);
    if constexpr (Config::turned) lead = 0;
    if constexpr (Config::plane_parts) {
      const int begin = (item.first[1] + item.taps1.origin) * a.line_pitch;
      lead += begin - Walk::aligned(begin);
    }
    StageWeights<Config> weights(shared);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if constexpr (!Config::tap_boxes) boxes.wait_full();
      int tap0 = 0;
#pragma unroll 1
      do {
        if constexpr (Config::tap_boxes) boxes.wait_full();
        const uint32_t box =
            shared + Config::box_offset + boxes.stage * a.box_bytes + lead * element;
        int tap1 = 0;
#pragma unroll 1
        do {
          const uint32_t at = weights.enter(stages);
          const int line = item.taps1.offset + tap1 * item.taps1.step;
          const int slice = Config::tap_boxes ? 0 : item.taps0.offset + tap0 * item.taps0.step;
          const int offset = slice * a.slice_pitch +
                             (line + (whole_planes ? item.taps1.origin : 0)) * a.line_pitch;
          const PhasesSource<Config> source{
              a, rows,
              PhasesInside<Config>(inside, item.taps1.origin - Config::Axis1::min_shift + line),
              box + offset * Config::position_bytes, shared + Config::zero_offset};
          const uint64_t columns = matrix_descriptor(at, Config::column_tile * 16, 128);
          if constexpr (Config::parts > 1) {
            multiply_split<Config, 0>(sum, source, columns);
          } else if constexpr (Config::both_shared) {
            wgmma_fence();
            multiply_shared<Config, 0>(sum, source, columns);
            wgmma_commit();
            wgmma_wait<1>();
            held.release(boxes, stages);
          } else {
            multiply<Config, 0>(sum, fragment, source, words, columns,
                                [&]() { held.release(boxes, stages); });
          }
          weights.leave(stages, held);
          if constexpr (Config::parts > 1) held.release(boxes, stages);
        } while (++tap1 < item.taps1.count);
        if constexpr (Config::tap_boxes) {
          held.box = boxes.stage;
          boxes.advance();
        }
      } while (++tap0 < item.taps0.count);
      if constexpr (!Config::tap_boxes) {
        held.box = boxes.stage;
        boxes.advance();
      }
      if constexpr (Config::parts > 1) held.release(boxes, stages);
      if constexpr (Config::ahead > 0)
        mbarrier_arrive_if(ahead, ++passed == Config::ahead && threadIdx.x == 0);
    }
    wgmma_wait<0>();
    held.release(boxes, stages);
    settle<typename Config::Inner0, typename Config::Inner1, typename Config::Axis2>(sum);
    store(item, sum);
  }
  if (Config::ahead > 0 && passed < Config::ahead && threadIdx.x == 0) mbarrier_arrive(ahead);
  store.finish();
}

}  // namespace convt3d
#endif

namespace convt3d {

template <typename Config>
CONVT3D_DEVICE void wgmma_phases(const PhasesArguments<typename Config::Storage>& arguments,
                                 const TensorMap* map) {
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t shared_base = shared_address(shared);
  const BoxRing<Config> boxes(shared_base);
  const WeightRing<Config> stages(shared_base + 16 * Config::source_stages);
  if (threadIdx.x == 0) {
    boxes.init(Config::fillers, Config::box_readers);
    stages.init(1, 4 * Config::consumers);
    if constexpr (Config::ahead > 0) mbarrier_init(shared_base + Config::ahead_barrier, 1);
    if constexpr (Config::senders > 0)
      output_ring<Config>(shared_base).init(lanes_of(4 * Config::consumers), lanes_of(1));
    mbarrier_init_fence();
  }
  if constexpr (Config::zero_bytes > 0) {
    if (threadIdx.x < Config::zero_bytes / 4)
      store_shared(shared_base + Config::zero_offset + 4 * threadIdx.x, 0u);
  }
  __syncthreads();
  // Uniform in a warp, and known to be: roles must not look divergent around warpgroup products.
  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (warpgroup >= Config::consumers) {
    if constexpr (Config::gives_registers) register_decrease<Config::producer_registers>();
    if constexpr (Config::senders > 0) {
      const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0) - 4 * Config::consumers;
      if (warp > 0) {
        const PhasesUnits<Config> tile(arguments);
        const PhasesSender<Config> sender(arguments, tile, shared_base);
        if (warp <= min(Config::senders, arguments.buffers))
          sender.send(warp - 1);
        else if (PhasesSender<Config>::filler && warp == Config::senders + 1)
          sender.fill();
        return;
      }
    }
    produce<Config>(arguments, map, shared_base, boxes, stages);
  } else {
    if constexpr (Config::gives_registers) register_increase<Config::consumer_registers>();
    consume<Config>(arguments, shared_base, boxes, stages, warpgroup);
  }
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::WgmmaPhasesConfig::threads, 1)
    convt3d_phases(const unsigned char* weights,
                         const convt3d::WgmmaPhasesConfig::Storage* bias,
                         convt3d::WgmmaPhasesConfig::Storage* target,
#if !CONVT3D_BY_MAP
                         const convt3d::WgmmaPhasesConfig::Storage* source, int source0,
                         int source1, int source2,
#else
                         const __grid_constant__ convt3d::TensorMap map,
#endif
                         int target0, int target1,
                         int target2, int target_stride0, int target_stride1, int batch,
                         int tile_samples, int tile0, int tile1, int tile2, int tiles_samples,
                         int tiles0, int tiles1, int tiles2, int sample_pitch, int slice_pitch,
                         int line_pitch, int channel_pitch, int channel_dimension, int box_bytes,
                         int warpgroup_units, int staged_row, int staged_slice, int staged_sample,
                         int staged_column, int whole_slices, int most_runs,
                         int staging_offset, int turn, int wide,
                         int source_slices, int source_lines, int segment, int buffers) {
  const convt3d::PhasesArguments<convt3d::WgmmaPhasesConfig::Storage> arguments{
      weights,
      bias,
      {target, {target0, target1, target2}, target_stride0, target_stride1},
      batch,
      {tile_samples, tile0, tile1, tile2},
      {tiles_samples, tiles0, tiles1, tiles2},
      sample_pitch,
      slice_pitch,
      line_pitch,
      channel_pitch,
      channel_dimension,
      box_bytes,
      warpgroup_units,
      staged_row,
      staged_slice,
      staged_sample,
      staged_column,
      whole_slices != 0,
      most_runs,
      convt3d::uint32_t(staging_offset),
      turn,
      wide != 0,
      {source_slices, source_lines},
      segment,
      buffers,
#if !CONVT3D_BY_MAP
      {source, {source0, source1, source2}, source1 * source2, source2}};
  const convt3d::TensorMap* by_map = nullptr;
#else
      {}};
  const convt3d::TensorMap* by_map = &map;
#endif
  convt3d::wgmma_phases<convt3d::PhasesKernel>(arguments, by_map);
}
