// Forward pass, and gradient by input at stride 1, of layers that produce few channels: every
// source value is multiplied with all taps at once, and the products of a place meet afterwards.
//
// A persistent CTA has a tile of units of the (H, W) plane and sweeps along D. The columns of its
// products are all taps of a source position (and all produced channels), so each value is read
// once and the tensor core's columns are full, however few the produced channels are:
//
//   source positions that        window of sums, in registers         buffer in shared memory
//   the tile's units read        [planes][taps of H, W x channels]
//        .------.                     .------.------.------.            [column][position]
//        | rows | * all taps  -->     | done |      |      |   -->   each output adds up its taps,
//        '------'                     '------'------'------'            from where they were put
//
// Taps of D are summed in registers (see geometry/stacked_axis.cuh); or the sources of a unit's
// planes are kept there as operands, and its planes are finished one by one. A warp has 8 *
// vector positions of the tile, one after the other, line by line; lane (g, t) loads `vector` of
// them at once, which become rows g and g + 8 of its fragments, so sources pass no shared memory.
// Loads of the next round, or plane, are in flight while one is multiplied, staged and stored.
//
// Shared memory: weights of a group | two buffers of a finished plane's columns, so that one
// barrier a plane is enough.
#include "col2im/products.cuh"
#include "col2im/store.cuh"

namespace convt3d {

template <typename Config>
CONVT3D_DEVICE void load_weights(const unsigned char* packed, uint32_t shared_base) {
  static_assert(Config::weight_bytes % 16 == 0, "fragments are copied in vectors");
  for (int i = 16 * threadIdx.x; i < Config::weight_bytes; i += 16 * Config::threads) {
    const uint4 v = *reinterpret_cast<const uint4*>(packed + i);
    store_shared(shared_base + i, v.x, v.y, v.z, v.w);
  }
}

/// What goes on from sweep to sweep of a CTA.
template <typename Config>
struct Col2imSweep {
  using Words = SourceWords<Config>;
  using Leg = typename Col2imWalk<Config>::Leg;
  const Col2imArguments<Config>& a;
  const PlaneOutputs<Config> outputs;
  const typename Config::Storage* home;  // where loads go that are not needed
  int64_t volume;
  int first_channel;
  uint32_t lane_weights, buffer, other;

  CONVT3D_DEVICE Col2imSweep(const Col2imArguments<Config>& a_, uint32_t shared_base)
      : a(a_), outputs(a_), volume(a_.source.volume()) {
    first_channel = threadIdx.x % 4 * Words::run;
    home = a.source.data + first_channel * (Words::last ? 1 : volume);
    lane_weights = shared_base + threadIdx.x % 32 * (4 * Config::lane_words);
    buffer = shared_base + Config::weight_bytes;
    other = buffer + Config::buffer_bytes;
  }

  /// A plane's loads from number `first` on.
  struct Cursor {
    const typename Config::Storage* from;
    int64_t stride;
    int channel;
  };
  CONVT3D_DEVICE Cursor cursor(const LanePlace<Config>& place, int plane, int first,
                               bool needed) const {
    needed = needed && unsigned(plane) < unsigned(a.source.extent[0]);
    return {needed ? place.plane0 + plane * place.plane_stride + first * place.load_stride : home,
            needed ? place.load_stride : 0, first_channel + first * Config::load_channels};
  }
  CONVT3D_DEVICE void load(Words& words, const Cursor& cursor, int i,
                           const LanePlace<Config>& place) const {
    words.load(cursor.from + i * cursor.stride, cursor.channel + i * Config::load_channels, place,
               volume);
  }
  CONVT3D_DEVICE void load_all(Words (&words)[Config::batch], const Cursor& cursor,
                               const LanePlace<Config>& place) const {
#pragma unroll
    for (int i = 0; i < Config::batch; ++i) load(words[i], cursor, i, place);
  }

  /// Every thread takes part. One barrier: the buffer was read two planes ago, before another
  /// one.
  CONVT3D_DEVICE void finish(const Leg& leg, const PlaneSums<Config>& sum, int o0) {
    stage_plane<Config>(sum, buffer);
    __syncthreads();
    outputs(leg, o0, buffer);
    const uint32_t read = buffer;
    buffer = other, other = read;
  }
  CONVT3D_DEVICE bool inside(int o0) const {
    return unsigned(o0) < unsigned(a.target.extent[0]);
  }
};

/// A sweep with a window of sums: each step takes a source plane.
template <typename Config>
struct WindowSweep : Col2imSweep<Config> {
  using Base = Col2imSweep<Config>;
  using Words = typename Base::Words;
  using Axis0 = typename Config::Stacked0;
  using Base::Base;
  Words words[Config::batch];
  PlaneSums<Config> sum[Axis0::window];

  CONVT3D_DEVICE void begin(const LanePlace<Config>& place, const typename Base::Leg& leg) {
    this->load_all(words, this->cursor(place, Axis0::source_plane(leg.begin, leg.volume0), 0, true),
                   place);
    float* sums = &sum[0][0][0][0];
#pragma unroll
    for (int i = 0; i < int(sizeof(sum) / sizeof(float)); ++i) sums[i] = 0.f;
  }

  CONVT3D_DEVICE void step(const LanePlace<Config>& place, const typename Base::Leg& leg,
                           int step) {
    const int plane = Axis0::source_plane(step, leg.volume0);
    if (plane < this->a.source.extent[0]) {
      uint32_t weights = this->lane_weights;
#pragma unroll 1
      for (int round = 0; round < Config::rounds; ++round) {
        // What is loaded while this round is multiplied: the next one, or the next plane's first.
        const bool last = round + 1 == Config::rounds;
        const int next_plane = last ? plane + Axis0::interleaved : plane;
        const int next = last ? 0 : (round + 1) * Config::batch;
        const auto cursor = this->cursor(place, next_plane, next, !(last && step + 1 == leg.end));
#pragma unroll
        for (int i = 0; i < Config::batch; ++i) {
          const Words now = words[i];
          this->load(words[i], cursor, i, place);
#pragma unroll
          for (int s = 0; s < Config::load_steps; ++s, weights += Config::step_bytes) {
            StepOperands<Config> operands;
            prepare_step<Config>(operands, now, s, place.inside);
#pragma unroll
            for (int k0 = 0; k0 < Layer::kernel0; ++k0)
              multiply_tap<Config>(sum[k0], operands, weights + k0 * Config::tap_bytes);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < Axis0::target_step; ++i) {
      const int o0 = Axis0::target_plane(step * Axis0::target_step + i, leg.volume0);
      if (step >= leg.first && this->inside(o0)) this->finish(leg, sum[i], o0);
    }
    float* sums = &sum[0][0][0][0];
    constexpr int count = int(sizeof(sum) / sizeof(float));
    constexpr int leaving = count / Axis0::window * Axis0::target_step;
#pragma unroll
    for (int i = 0; i < count; ++i) sums[i] = i + leaving < count ? sums[i + leaving] : 0.f;
  }
};

/// A sweep that keeps the planes which a unit reads: each step takes one and finishes a unit.
template <typename Config>
struct KeptSweep : Col2imSweep<Config> {
  using Base = Col2imSweep<Config>;
  using Words = typename Base::Words;
  using Axis0 = typename Config::Static0;
  using Base::Base;
  static constexpr int shifts = Axis0::shifts;
  Words words[Config::batch];
  StepOperands<Config> kept[shifts][Config::steps];

  CONVT3D_DEVICE void load_plane(const LanePlace<Config>& place, int plane, bool needed) {
    this->load_all(words, this->cursor(place, plane, 0, needed), place);
  }
  /// The words of a plane become operands.
  CONVT3D_DEVICE void take(StepOperands<Config> (&operands)[Config::steps],
                           const LanePlace<Config>& place, int plane) const {
    const int inside = unsigned(plane) < unsigned(this->a.source.extent[0]) ? place.inside : 0;
#pragma unroll
    for (int s = 0; s < Config::steps; ++s)
      prepare_step<Config>(operands[s], words[s / Config::load_steps], s % Config::load_steps,
                           inside);
  }
  CONVT3D_DEVICE void begin(const LanePlace<Config>& place, const typename Base::Leg& leg) {
#pragma unroll
    for (int i = 0; i < shifts; ++i) {
      const int plane = leg.begin + Axis0::min_shift + i;
      load_plane(place, plane, true);
      if (i + 1 < shifts) take(kept[i + 1], place, plane);
    }
  }

  CONVT3D_DEVICE void step(const LanePlace<Config>& place, const typename Base::Leg& leg,
                           int step) {
#pragma unroll
    for (int i = 0; i + 1 < shifts; ++i)
#pragma unroll
      for (int s = 0; s < Config::steps; ++s)
#pragma unroll
        for (int m = 0; m < Config::fragments_m; ++m) kept[i][s][m] = kept[i + 1][s][m];
    take(kept[shifts - 1], place, step + Axis0::max_shift);
    load_plane(place, step + 1 + Axis0::max_shift, step + 1 < leg.end);
#pragma unroll
    for (int slot = 0; slot < Axis0::slots; ++slot) {
      const int o0 = step * Axis0::slots + slot;
      if (!this->inside(o0)) continue;
      PlaneSums<Config> sum;
      float* sums = &sum[0][0][0];
#pragma unroll
      for (int i = 0; i < int(sizeof(sum) / sizeof(float)); ++i) sums[i] = 0.f;
#pragma unroll
      for (int s = 0; s < Config::steps; ++s)
#pragma unroll
        for (int i = 0; i < shifts; ++i) {
          const int k0 = Axis0::tap(slot, Axis0::min_shift + i);
          if (k0 < 0) continue;
          multiply_tap<Config>(sum, kept[i][s],
                               this->lane_weights + s * Config::step_bytes +
                                   k0 * Config::tap_bytes);
        }
      this->finish(leg, sum, o0);
    }
  }
};

template <typename Config, typename Sweep>
CONVT3D_DEVICE void run_col2im(const Col2imArguments<Config>& a) {
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t shared_base = shared_address(shared);
  Sweep sweep(a, shared_base);
  Col2imWalk<Config> walk(a);
  typename Col2imWalk<Config>::Leg leg;
  int held = -1;
  while (walk.next(leg, a)) {
    const LanePlace<Config> place(a, leg, sweep.first_channel);
    sweep.begin(place, leg);
    if (leg.group != held) {
      if (held < 0)
        grid_dependency_wait();
      else
        __syncthreads();
      load_weights<Config>(a.weights + int64_t(leg.group) * Config::weight_bytes, shared_base);
      held = leg.group;
      __syncthreads();
    }
#pragma unroll 1
    for (int step = leg.begin; step < leg.end; ++step) sweep.step(place, leg, step);
  }
}

template <typename Config, bool KeepPlanes>
struct SweepOf {
  using type = WindowSweep<Config>;
};
template <typename Config>
struct SweepOf<Config, true> {
  using type = KeptSweep<Config>;
};

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::Col2imConfig::threads,
                                             convt3d::Col2imConfig::resident)
    convt3d_col2im(const convt3d::Col2imConfig::Storage* source, const unsigned char* weights,
                   const convt3d::Col2imConfig::Storage* bias,
                   convt3d::Col2imConfig::Storage* target, int source0, int source1, int source2,
                   int target0, int target1, int target2, int batch, int tile1, int tile2,
                   int width CONVT3D_FUSION_PARAMETERS) {
  const convt3d::Col2imArguments<convt3d::Col2imConfig> arguments{
      {source, {source0, source1, source2}, source1 * source2, source2},
      {target, {target0, target1, target2}, target1 * target2, target2},
      weights,
      bias,
      batch,
      tile1,
      tile2,
      width CONVT3D_FUSION_ARGUMENT};
  using Config = convt3d::Col2imConfig;
  convt3d::run_col2im<Config, convt3d::SweepOf<Config, Config::keep_planes>::type>(arguments);
}
