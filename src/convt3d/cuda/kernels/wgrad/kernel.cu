// Gradient by weight on wgmma (sm_90a), TF32, 16-bit and IEEE-grade: the reduction over positions is
// split over CTAs, and a second pass adds the shares in order.
//
//     gw[ci, co, k] = sum over n, i of x[n, ci, i] * gy[n, co, i*s - p + k*d]
//
// rows    = (tap, gradient channel)   fragments in registers, read at any shift along W
// columns = (tap along axis 1, x channel)   x in shared memory by descriptor, shifted by whole rows
// depth   = positions along W, 16 bytes of each row twice a product
//
// A CTA owns some m64 blocks of rows of one tile of channels, and a share of the steps. It marches
// along axis 0 down columns of tile1 rows by tile2 positions; a step is tile0 slices:
//
//     x ring          `stages` slabs   [slice][16 bytes of W][row][channel][position]
//     gradient ring   `planes` planes  [channel][row][position]; a step reads `span` of them, the
//                     first step of a column loads all, later ones only what is new
//     barriers        full (producers), empty (consumers), one pair a stage; one where consumers meet
//
// Pipeline: a producer warpgroup brings slabs by tensor maps (one thread), bulk copies or cp.async
// (and rounds x to TF32 in place, since products would truncate it); two or three consumer warpgroups
// share the slabs and own `blocks` blocks each, with row fragments in a ring, so that products overlap the
// loads of the next. By tensor map the gradient's planes are [row][channel][position]. Where no sum
// is split, CTAs turn theirs in shared memory and store the weight themselves: there is no second
// pass. CTAs of a cluster, which share the steps of the same sums, add them up among themselves. Rows of odd volumes come whole, a bulk copy for all of a channel and plane, as they lie:
// consumers mask what lies beyond a row's ends.
#undef CONVT3D_WGMMA_USES
#define CONVT3D_WGMMA_USES(n) ((n) == CONVT3D_COLUMN_TAPS * CONVT3D_CHANNEL_TILE_N)
#include "wgrad/phases.cuh"

namespace convt3d {

/// The result: [in][out][taps along axes 0, 1, 2], as far apart as strides say.
template <typename Config>
struct WgmmaWeight {
  using Storage = typename Config::Storage;
  Storage* data;
  int64_t stride_in, stride_out, stride0, stride1, stride2;

  /// Where an element lies, of a channel of x within its group.
  CONVT3D_DEVICE Storage* at(int group, int in, int out, int k0, int k1, int k2) const {
    return data + (int64_t(group) * Config::source_channels + in) * stride_in + out * stride_out +
           k0 * stride0 + k1 * stride1 + k2 * stride2;
  }
};

template <typename Config>
struct WgmmaGradWeightArguments {
  Activation<const typename Config::Storage> source;
  Activation<const typename Config::Storage> gradient;
  float* partial;
  int tile0, tile1, tile2;  // of a step, in positions of x (or gradient rows where taps are columns)
  int tiles1, tiles2, steps0;  // tiles across, steps down a column
  int first1;                  // where the first tile begins
  int planes;                  // of the gradient ring
  int row_pitch, channel_pitch;  // of the gradient's planes, in positions
  int samples, splits_full, splits_last;
  WgmmaWeight<Config> weight;
  float* sums;  // of the gradient, for each row of each CTA
};

/// Everything both roles derive from the arguments.
template <typename Config_>
struct WgmmaGradWeightLayout {
  using Config = Config_;
  const WgmmaGradWeightArguments<Config>& a;
  WgmmaTile<Config> tile;
  int k0_first;      // lowest tap along axis 0 that the CTA needs
  int span, fresh;   // planes of a step; those that are new
  int rows_x, rows_g;
  int begin, end;    // steps
  // Steps that read no plane of another's are dealt out in turn, so that neighbours read together what
  // lies together in memory. Else columns are, where all CTAs get equally many; else each CTA has a
  // range of steps.
  bool dealt;
  int next0, next1, next2, next_sample;  // tiles, and samples, from a column or step to the next
  uint32_t x_line;   // bytes from 16 bytes of W to the next
  int chunks;        // of a slice, where x comes by TMA
  uint32_t x_chunk;  // bytes of one
  uint32_t x_slice, x_part, x_slab, plane;
  uint32_t box;      // bytes of a plane
  int chunks_g;      // of a plane's rows, where they are swizzled
  uint32_t g_chunk;  // bytes of one
  uint32_t x_ring, g_ring, barriers;
  bool narrow;       // a row is 16 bytes: a product spans two rows
  bool paired;       // a row is 8 bytes: a product spans four, of x by tensor map
  bool flat;         // chunks run over the rows of a slice, whole rows of x
  bool whole;        // and over the slices too

  CONVT3D_DEVICE WgmmaGradWeightLayout(const WgmmaGradWeightArguments<Config>& a_, uint32_t shared)
      : a(a_), tile(blockIdx.x, a_.splits_full, a_.splits_last) {
    constexpr int octets = 8 * Config::cta_blocks;
    const int first_octet = tile.row_tile * octets;
    const int last_octet = min(first_octet + octets, Config::octets) - 1;
    k0_first = WgmmaRow<Config>(first_octet, 0).k0();
    const int last_tap =
        min((last_octet / Config::channel_octets + 1) * Config::octet_taps, Config::taps) - 1;
    const int k0_last = last_tap / (Config::taps1 * Config::taps2);
    span = (a.tile0 - 1) * Config::unit0 + (k0_last - k0_first) * Config::reach0 + 1;
    fresh = min(a.tile0 * Config::unit0, span);
    rows_x = a.tile1 + Config::column_taps - 1;
    rows_g = (a.tile1 - 1) * Config::unit1 + (Config::taps1 - 1) * Config::reach1 + 1;
    const int columns = a.samples * a.tiles1 * a.tiles2;
    dealt = columns % tile.splits == 0;
    const int apart = dealt ? tile.splits : 1;
    next2 = apart % a.tiles2;
    next1 = apart / a.tiles2 % a.tiles1;
    next_sample = apart / a.tiles2 / a.tiles1;
    const int64_t steps = int64_t(columns) * a.steps0;
    begin = int(steps * tile.split / tile.splits);
    end = int(steps * (tile.split + 1) / tile.splits);
    if constexpr (Config::separate_steps) {
      next2 = tile.splits % a.tiles2;
      next1 = tile.splits / a.tiles2 % a.tiles1;
      next0 = tile.splits / a.tiles2 / a.tiles1 % a.steps0;
      next_sample = tile.splits / a.tiles2 / a.tiles1 / a.steps0;
      begin = 0, end = (int(steps) - tile.split + tile.splits - 1) / tile.splits;
    }
    narrow = a.tile2 == Config::line;
    paired = Config::source_map && 2 * a.tile2 == Config::line;
    // The extra 16 bytes spread the producers' stores over the banks.
    x_line = rows_x * Config::channel_tile_n * 16 + 16;
    x_slice = a.tile2 / Config::line * x_line;
    flat = Config::column_taps == 1 && a.tile2 == a.source.extent[2];
    whole = flat && a.tile1 == a.source.extent[1];
    chunks = div_up(whole  ? a.tile0 * a.tile1 * a.tile2
                    : flat ? a.tile1 * a.tile2
                           : a.tile2,
                    Config::chunk);
    x_chunk = (flat ? 1 : rows_x) * Config::channel_tile_n * 128;
    if constexpr (Config::source_map) x_slice = chunks * x_chunk;
    x_part = Config::source_map && whole ? x_slice : a.tile0 * x_slice;
    x_slab = Config::parts * x_part;
    box = (Config::target_fill == TargetFill::rows ? rows_g * a.row_pitch
                                                   : Config::channel_tile_m * a.channel_pitch) *
          Config::bytes;
    if constexpr (Config::joined) {
      // The last channel needs no more than its rows.
      const int width = (a.tile2 - 1) * Config::unit2 + (Config::taps2 - 1) * Config::reach2 + 1;
      const int run = (rows_g - 1) * a.row_pitch +
                      max(width, CONVT3D_PADDING2 + a.gradient.extent[2]) + Config::line - 1;
      box = ((Config::channel_tile_m - 1) * a.channel_pitch + run) * Config::bytes;
    }
    chunks_g = div_up(a.tile2 * Config::unit2, Config::chunk);
    g_chunk = rows_g * Config::channel_tile_m * 128;
    if constexpr (Config::lines) {
      chunks_g = a.tile1 * a.tile2 / Config::depth;
      g_chunk = Config::channel_tile_m * 128;
    }
    if constexpr (Config::swizzled) box = chunks_g * g_chunk;
    constexpr int alignment = Config::swizzled ? 1024 : Config::target_map ? 128 : 16;
    plane = (box + alignment - 1) / alignment * alignment;
    // The swizzle follows address bits.
    x_ring = Config::source_map ? (shared + 1023) / 1024 * 1024 : shared;
    constexpr int ring_alignment = alignment > 128 ? alignment : 128;
    g_ring = (x_ring + Config::stages * x_slab + ring_alignment - 1) / ring_alignment *
             ring_alignment;
    barriers = g_ring + a.planes * plane;
  }
  CONVT3D_DEVICE uint32_t full(int stage) const { return barriers + 8 * stage; }
  CONVT3D_DEVICE uint32_t empty(int stage) const { return full(Config::stages + stage); }
  CONVT3D_DEVICE uint32_t landed(int stage) const { return full(2 * Config::stages + stage); }
  /// Behind the sums, which lie where the rings and their barriers were.
  CONVT3D_DEVICE uint32_t met() const {
    return max(full(3 * Config::stages), x_ring + Config::sum_bytes);
  }
  /// Hands a stage back to the producers, by a warp of consumers that has read it.
  CONVT3D_DEVICE void leave(int stage) const {
    if (Config::lanes_leave || threadIdx.x % 32 == 0) mbarrier_arrive(empty(stage));
  }
  /// All consumers meet, for the first time or the second. Of different numbers of blocks they are
  /// different code, so that no block barrier would do: its threads would be at two places.
  CONVT3D_DEVICE void meet(int time) const {
    mbarrier_arrive(met());
    mbarrier_wait(met(), time);
  }
};

/// The tensor maps of a launch; null where a tensor comes otherwise.
struct WgmmaGradWeightMaps {
  const TensorMap* source;
  const TensorMap* target;
};

/// A box of a tensor.
template <typename... Places>
CONVT3D_DEVICE void move_box(uint32_t to, const TensorMap& map, uint32_t barrier, Places... at) {
  if constexpr (sizeof...(at) == 3)
    tma_load_3d(to, map, at..., barrier);
  else if constexpr (sizeof...(at) == 4)
    tma_load_4d(to, map, at..., barrier);
  else
    tma_load_5d(to, map, at..., barrier);
}

/// Starts the boxes of a step of x, by one thread; gives their bytes.
template <typename Config>
CONVT3D_DEVICE uint32_t load_source(const WgmmaGradWeightLayout<Config>& l, const TensorMap& map,
                                    const WgmmaMarch<WgmmaGradWeightLayout<Config>>& at,
                                    uint32_t barrier) {
  const auto& x = l.a.source;
  const int channel = l.tile.group * Config::source_channels + l.tile.channel_n;
  const int row = at.i1 - (Config::column_taps - 1);
  const int plane = x.extent[1] * x.extent[2];
  uint32_t to = l.x_ring + at.stage * l.x_slab;
  for (int slice = 0; slice < (l.whole ? 1 : l.a.tile0); ++slice)
    for (int chunk = 0; chunk < l.chunks; ++chunk, to += l.x_chunk) {
      const int first = chunk * Config::chunk;
      if (l.whole)
        move_box(to, map, barrier, at.i0 * plane + first, channel, at.sample);
      else if (l.flat)
        move_box(to, map, barrier, row * x.extent[2] + first, channel, at.i0 + slice,
                        at.sample);
      else
        move_box(to, map, barrier, at.i2 + first, channel, row, at.i0 + slice, at.sample);
    }
  return l.x_part;
}

/// Starts the boxes of a step's new planes of the gradient, by one thread; gives their bytes.
template <typename Config>
CONVT3D_DEVICE uint32_t load_target(const WgmmaGradWeightLayout<Config>& l, const TensorMap& map,
                                    const WgmmaMarch<WgmmaGradWeightLayout<Config>>& at,
                                    uint32_t barrier) {
  const auto& gradient = l.a.gradient;
  const int channel = l.tile.group * Config::target_channels + l.tile.channel_m;
  const int begin = at.first() ? 0 : l.span - l.fresh;
#pragma unroll 1
  for (int q = begin; q < l.span; ++q) {
    const int o0 = at.o0 + q * Config::step0;
    if constexpr (Config::target_fill == TargetFill::flat) {
      // A box begins at 16 bytes; consumers add the rest.
      const int first = o0 * gradient.stride0 + at.o1 * gradient.stride1 + at.o2;
      move_box(at.plane(q), map, barrier, first & -Config::line, channel, at.sample);
    } else if constexpr (Config::lines) {
      const int line = at.i1 * l.a.tile2 / Config::depth;
      move_box(at.plane(q), map, barrier, 0, channel, line, o0, at.sample);
    } else if constexpr (Config::swizzled) {
      for (int chunk = 0; chunk < l.chunks_g; ++chunk)
        move_box(at.plane(q) + chunk * l.g_chunk, map, barrier,
                                         at.o2 + chunk * Config::chunk, channel, at.o1, o0, at.sample);
    } else {
      move_box(at.plane(q), map, barrier, at.o2 & -Config::line, channel, at.o1, o0,
                      at.sample);
    }
  }
  return (l.span - begin) * l.box;
}

/// Everything by tensor maps: one thread issues, consumers wait for the bytes.
template <typename Config>
CONVT3D_DEVICE void produce_boxes(const WgmmaGradWeightLayout<Config>& l,
                                  const WgmmaGradWeightMaps& maps) {
  WgmmaMarch<WgmmaGradWeightLayout<Config>> at(l);
#pragma unroll 1
  for (; at.step < l.end; at.advance()) {
    if (at.step - l.begin >= Config::stages) mbarrier_wait(l.empty(at.stage), at.phase ^ 1);
    const uint32_t barrier = l.full(at.stage);
    const uint32_t bytes = load_source(l, *maps.source, at, barrier);
    mbarrier_expect(barrier, bytes + load_target(l, *maps.target, at, barrier));
  }
}

/// Samples whose rows go through registers, a step ahead, while x comes by tensor map.
template <typename Config>
CONVT3D_DEVICE void produce_spread(const WgmmaGradWeightLayout<Config>& l,
                                   const WgmmaGradWeightMaps& maps) {
  using Volume = VolumeFill<WgmmaGradWeightLayout<Config>>;
  const SlabFill<Config, true> gradient(l.a.gradient, 1, l.rows_g, 1);
  WgmmaMarch<WgmmaGradWeightLayout<Config>> at(l);
  const Volume volumes(l, at);
  uint4 row[Volume::most];
  volumes.fetch(gradient.base(at.sample, l.tile.group, l.tile.channel_m), row);
#pragma unroll 1
  while (at.step < l.end) {
    if (at.step - l.begin >= Config::stages) mbarrier_wait(l.empty(at.stage), at.phase ^ 1);
    const uint32_t barrier = l.full(at.stage);
    const uint32_t bytes = threadIdx.x == 0 ? load_source(l, *maps.source, at, barrier) : 0;
    volumes.spread(row, at.plane(0));
    if (threadIdx.x == 0)
      mbarrier_expect(barrier, bytes);
    else
      mbarrier_arrive(barrier);
    at.advance();
    if (at.step < l.end)
      volumes.fetch(gradient.base(at.sample, l.tile.group, l.tile.channel_m), row);
  }
}

template <typename Config>
CONVT3D_DEVICE void produce(const WgmmaGradWeightLayout<Config>& l,
                            const WgmmaGradWeightMaps& maps) {
  using March = WgmmaMarch<WgmmaGradWeightLayout<Config>>;
  const auto& a = l.a;
  const auto& tile = l.tile;
  const int width = (a.tile2 - 1) * Config::unit2 + (Config::taps2 - 1) * Config::reach2 + 1;
  const SlabFill<Config, false> fill_x(a.source, a.tile0, l.rows_x, a.tile2);
  const SlabFill<Config, true> fill_g(a.gradient, 1, l.rows_g, width);
  const RunFill<Config> runs(a.gradient, a.samples, l.rows_g, width, a.row_pitch, a.channel_pitch);
  const VolumeFill<WgmmaGradWeightLayout<Config>> volumes(l, March(l));
  const int live_x = Config::source_channels - tile.channel_n;
  const int live_g = tile.target_live();
  constexpr bool bulk = Config::source_map || !Config::target_copies;
  constexpr bool copies = !Config::source_map || Config::target_copies;
  constexpr int lag = Config::stages > 2 ? Config::stages - 2 : 0;  // steps in flight

  auto place_x = [&](int stage) {
    const uint32_t slab = l.x_ring + stage * l.x_slab;
    return [=, &l](int slice, int row, int position) {
      return slab + slice * l.x_slice + position / Config::line * l.x_line +
             row * (Config::channel_tile_n * 16) + position % Config::line * Config::bytes;
    };
  };
  auto start = [&](const March& at) {
    uint32_t bytes = 0;
    const int row_x = at.i1 - (Config::column_taps - 1);
    if constexpr (Config::source_map) {
      if (threadIdx.x == 0) bytes = load_source(l, *maps.source, at, l.landed(at.stage));
    } else {
      fill_x.copy(fill_x.base(at.sample, tile.group, tile.channel_n), live_x, at.i0, row_x, at.i2,
                  16, place_x(at.stage));
    }
    if constexpr (Config::target_map) {
      if (threadIdx.x == 0) bytes += load_target(l, *maps.target, at, l.landed(at.stage));
    }
    if constexpr (Config::volume)
      volumes.copy(fill_g.base(at.sample, tile.group, tile.channel_m), at.plane(0));
    constexpr bool each = !Config::target_map && !Config::volume;  // planes by themselves
#pragma unroll 1
    for (int q = at.first() ? 0 : l.span - l.fresh; each && q < l.span; ++q) {
      const uint32_t plane = at.plane(q);
      const int o0 = at.o0 + q * Config::step0;
      if constexpr (Config::pieces)
        runs.copy_pieces(runs.element(at.sample, tile.group, tile.channel_m, o0, at.o1, at.o2),
                         live_g, o0, at.o1, at.o2, plane);
      else if constexpr (!Config::target_copies)
        bytes += runs.copy(
            runs.element(at.sample, tile.group, tile.channel_m, o0, at.o1, at.o2), live_g, o0,
            at.o1, at.o2, plane, l.landed(at.stage));
      else
        fill_g.copy(fill_g.base(at.sample, tile.group, tile.channel_m), live_g, o0, at.o1, at.o2,
                    a.channel_pitch * Config::bytes, [=, &a](int, int r, int position) {
                      return plane + (r * a.row_pitch + position) * Config::bytes;
                    });
    }
    if constexpr (bulk) mbarrier_expect(l.landed(at.stage), bytes);
    if constexpr (copies) async_commit();
  };
  auto finish = [&](const March& at) {
    if constexpr (bulk) mbarrier_wait(l.landed(at.stage), at.phase);
    if constexpr (!Config::source_map && !Config::half)
      fill_x.round(live_x, l.x_part, 16, place_x(at.stage));
    // What others have copied is cleared, too.
    if constexpr (Config::pieces) named_barrier_sync(7, Config::producers);
    if constexpr (Config::target_clear) {
#pragma unroll 1
      for (int q = at.first() ? 0 : l.span - l.fresh; q < l.span; ++q) {
        const int o0 = at.o0 + q * Config::step0;
        const int64_t element =
            runs.element(at.sample, tile.group, tile.channel_m, o0, at.o1, at.o2);
        runs.clear_outside(element, live_g, o0, at.o1, at.o2, at.plane(q));
      }
    }
    fence_async_proxy();
    mbarrier_arrive(l.full(at.stage));
  };

  March started(l), finished(l);
#pragma unroll 1
  for (; started.step < l.end; started.advance()) {
    if (started.step - l.begin >= Config::stages)
      mbarrier_wait(l.empty(started.stage), started.phase ^ 1);
    start(started);
    if (started.step - l.begin >= lag) {
      if constexpr (copies) async_wait<lag>();
      finish(finished);
      finished.advance();
    }
  }
  if constexpr (copies) async_wait<0>();
#pragma unroll 1
  for (; finished.step < l.end; finished.advance()) finish(finished);
}

/// Whole rows of the gradient by bulk copies, x by tensor map: consumers wait for the bytes. All but
/// the last warp copy rows, which they have worked out when a stage becomes free.
template <typename Config>
CONVT3D_DEVICE void produce_joined(const WgmmaGradWeightLayout<Config>& l,
                                   const WgmmaGradWeightMaps& maps) {
  constexpr int copiers = Config::producers - 32, warps = copiers / 32;
  const auto& tile = l.tile;
  const RunFill<Config> runs(l.a.gradient, l.a.samples, l.rows_g, 0, l.a.row_pitch,
                             l.a.channel_pitch);
  const int live = min(tile.target_live(), Config::channel_tile_m);
  const int warp = threadIdx.x / 32, first = threadIdx.x % 32 * warps + warp;
  WgmmaMarch<WgmmaGradWeightLayout<Config>> at(l);
#pragma unroll 1
  for (; at.step < l.end; at.advance()) {
    const int begin = at.first() ? 0 : l.span - l.fresh;
    const int items = warp < warps ? (l.span - begin) * Config::channel_tile_m : 0;
    const auto o0 = [&](int q) { return at.o0 + q * Config::step0; };
    const auto element = [&](int q) {
      return runs.element(at.sample, tile.group, tile.channel_m, o0(q), at.o1, at.o2);
    };
    const auto joined = [&](int item) {
      const int q = begin + item / Config::channel_tile_m, channel = item % Config::channel_tile_m;
      return item < items && channel < live ? runs.joined(element(q), channel, o0(q), at.o1)
                                            : typename RunFill<Config>::Joined();
    };
    const auto place = [&](int item) {
      const int q = begin + item / Config::channel_tile_m, channel = item % Config::channel_tile_m;
      return runs.first_row(element(q), channel, at.plane(q));
    };
    bool outside = false;
    for (int q = begin; q < l.span; ++q) outside |= runs.reaches_out(o0(q), at.o1);
    auto run = joined(first);
    uint32_t to = first < items ? place(first) : 0;

    if (at.step - l.begin >= Config::stages) mbarrier_wait(l.empty(at.stage), at.phase ^ 1);
    // Planes of a new column lie where the step before may still read.
    if (at.step > l.begin && at.first()) {
      const bool around = at.stage == 0;
      mbarrier_wait(l.empty(around ? Config::stages - 1 : at.stage - 1), at.phase ^ around);
    }
    if (outside) {
#pragma unroll 1
      for (int q = begin; q < l.span; ++q)
        if (runs.reaches_out(o0(q), at.o1))
          runs.clear_rows(element(q), live, o0(q), at.o1, at.plane(q));
      named_barrier_sync(7, Config::producers);
    }
    uint32_t bytes = 0;
    if (threadIdx.x == copiers) bytes = load_source(l, *maps.source, at, l.full(at.stage));
#pragma unroll 1
    for (int item = first; item < items; item += copiers) {
      bytes += runs.copy(run, to, l.full(at.stage));
      if (item + copiers < items) run = joined(item + copiers), to = place(item + copiers);
    }
    // Later copies come to where these zeros are.
    if (outside) fence_async_proxy();
    mbarrier_expect(l.full(at.stage), bytes);
  }
}

template <int N>
CONVT3D_DEVICE void multiply(Float32, float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
  wgmma_tf32_rs<N>(d, a, b);
}
template <int N>
CONVT3D_DEVICE void multiply(Float16, float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
  wgmma_f16_rs<N>(d, a, b);
}
template <int N>
CONVT3D_DEVICE void multiply(BFloat16, float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
  wgmma_bf16_rs<N>(d, a, b);
}

/// Stores the sums of a CTA, which are whole: through shared memory, where they lie as
/// [column][row], so that neighbouring threads store neighbouring taps and channels.
template <typename Config, int blocks>
CONVT3D_DEVICE void store_weight(const WgmmaGradWeightLayout<Config>& l, int consumer,
                                 const float (&sum)[blocks][Config::registers]) {
  constexpr int pitch = Config::sum_pitch;
  constexpr int threads = 128 * Config::consumers;
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const uint32_t to = l.x_ring + ((lane % 4 * 2) * pitch + thread / 32 * 16 + lane / 4) * 4;
  l.meet(0);  // the rings are read
#pragma unroll
  for (int b = 0; b < blocks; ++b)
#pragma unroll
    for (int r = 0; r < Config::registers; ++r)
      store_shared(to + ((r / 4 * 8 + r % 2) * pitch +
                         (b * Config::consumers + consumer) * 64 + r % 4 / 2 * 8) *
                            4,
                   sum[b][r]);
  l.meet(1);
  // A thread keeps its tap and channel of the gradient and walks along the channels of x: finding
  // out where an element lies takes ten times as long as moving it.
  constexpr int kernel1 = CONVT3D_KERNEL1, kernel = Config::taps0 * kernel1 * Config::taps2;
  constexpr int each = Config::channel_tile_m * kernel;  // elements of a channel of x
  constexpr int together = each < threads ? threads / each : 1;
  const int first_row = l.tile.row_tile * Config::cta_blocks * 64;
  const int live = min(Config::channel_tile_n, Config::source_channels - l.tile.channel_n);
#pragma unroll 1
  for (int i = consumer * 128 + thread; i < together * each; i += threads) {
    const int k2 = i % Config::taps2, k1 = i / Config::taps2 % kernel1;
    const int k0 = i / (Config::taps2 * kernel1) % Config::taps0;
    const int m = i / kernel % Config::channel_tile_m, first = i / each;
    const int tap = (k0 * Config::taps1 + k1 % Config::taps1) * Config::taps2 + k2;
    const int row = WgmmaRow<Config>::index(tap, m) - first_row;
    const int column =
        (Config::column_taps - 1 - k1 / Config::taps1) * Config::channel_tile_n + first;
    const int out = l.tile.target_channel(m);
    if (unsigned(row) >= unsigned(Config::cta_blocks * 64) || out >= Config::target_channels)
      continue;
    uint32_t from = l.x_ring + (column * pitch + row) * 4;
    auto* at = l.a.weight.at(l.tile.group, l.tile.channel_n + first, out, k0, k1, k2);
#pragma unroll 8
    for (int n = first; n < live; n += together) {
      *at = Config::Type::store(__uint_as_float(load_shared(from)));
      from += together * pitch * 4;
      at += together * l.a.weight.stride_in;
    }
  }
}

/// Where a row lies in a column of a cluster's sums: neighbouring taps and channels of k2 layers, as
/// the lanes of a fragment, find different banks.
CONVT3D_DEVICE uint32_t in_column(int row) {
  return (row ^ (row >> 5 & 1) << 1 ^ (row >> 6 & 1) << 4) * 4;
}

/// Puts the sums of a CTA down where the rings were, as [column][row], for all of its cluster.
template <typename Config, int blocks>
CONVT3D_DEVICE void put_down(const WgmmaGradWeightLayout<Config>& l, int consumer,
                             const float (&sum)[blocks][Config::registers]) {
  static_assert(Config::consumers == 2 || blocks == 1, "blocks do not change the order of rows");
  constexpr int pitch = Config::sum_pitch;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  // One address: with two ptxas serialised the products.
  const uint32_t to =
      l.x_ring + lane % 4 * 2 * pitch * 4 + in_column(consumer * 64 + warp * 16 + lane / 4);
  l.meet(0);  // the rings are read
#pragma unroll
  for (int b = 0; b < blocks; ++b)
#pragma unroll
    for (int r = 0; r < Config::registers; ++r)
      store_shared(to + ((r / 4 * 8 + r % 2) * pitch + b * Config::consumers * 64 +
                         r % 4 / 2 * 8) * 4,
                   sum[b][r]);
}

/// Adds up a CTA's share of its cluster's columns, in the order of the CTAs, and stores them: neighbouring
/// threads store neighbouring taps and channels.
template <typename Config>
CONVT3D_DEVICE void add_cluster(const WgmmaGradWeightLayout<Config>& l, int thread) {
  constexpr int rows = Config::channel_tile_m * Config::taps, threads = 128 * Config::consumers;
  constexpr int together = rows < threads ? threads / rows : 1;
  constexpr int share = Config::columns / Config::cluster;
  constexpr int fetched = 8;  // columns whose sums are on their way
  const int first_column = blockIdx.x % Config::cluster * share;
  const int live = min(Config::channel_tile_n, Config::source_channels - l.tile.channel_n);
  const int last = min(first_column + share, live);
#pragma unroll 1
  for (int i = thread; i < together * rows; i += threads) {
    const int tap = i % Config::taps, m = i / Config::taps % Config::channel_tile_m;
    const uint32_t from = l.x_ring + in_column(WgmmaRow<Config>::index(tap, m));
    const int out = l.tile.target_channel(m);
    if (out >= Config::target_channels) continue;
    auto* column = l.a.weight.at(l.tile.group, l.tile.channel_n, out,
                                 tap / (Config::taps1 * Config::taps2),
                                 tap / Config::taps2 % Config::taps1, tap % Config::taps2);
#pragma unroll 1
    for (int n = first_column + i / rows; n < last; n += fetched * together) {
      uint32_t word[fetched][Config::cluster];
#pragma unroll
      for (int j = 0; j < fetched; ++j)
#pragma unroll
        for (int c = 0; c < Config::cluster; ++c)
          word[j][c] = load_shared_of(
              from + min(n + j * together, last - 1) * (Config::sum_pitch * 4), c);
#pragma unroll
      for (int j = 0; j < fetched; ++j) {
        float total = 0.f;
#pragma unroll
        for (int c = 0; c < Config::cluster; ++c) total += __uint_as_float(word[j][c]);
        const int in = n + j * together;
        if (in < last) column[in * l.a.weight.stride_in] = Config::Type::store(total);
      }
    }
  }
}

template <typename Config, int blocks>
CONVT3D_DEVICE void consume(const WgmmaGradWeightLayout<Config>& l, int consumer) {
  const auto& a = l.a;
  const int lane = threadIdx.x % 32;
  const BlockRows<WgmmaGradWeightLayout<Config>, blocks> rows(l, consumer);
  ProductWalk<WgmmaGradWeightLayout<Config>> walk(l);

  // Products add to `part`, which in IEEE arithmetic is a short run of them.
  float sum[blocks][Config::registers], short_sum[Config::ieee ? blocks : 1][Config::registers];
  auto& part = *[&] {
    if constexpr (Config::ieee)
      return &short_sum;
    else
      return &sum;
  }();

  const uint64_t descriptor = Config::source_map
                                  ? matrix_descriptor_128b(0)
                                  : matrix_descriptor(0, walk.half_x, 128);

  // The words of a product's fragments are fetched while the product before it is begun.
  constexpr int last = Config::fragments - 1;
  uint32_t fragment[Config::fragments][blocks][4];
  uint32_t rest[Config::ieee ? Config::fragments : 1][blocks][4];
  uint32_t raw[Config::direct ? 1 : blocks][RowReader<Config>::words];
  RowReader<Config> reader[blocks];
  float row_sum[blocks][2] = {};  // of the gradient
  uint32_t shared_raw[4][RowReader<Config>::tap_words];  // of all blocks
  auto fetch = [&](int f, uint32_t offset, int product) {
    if constexpr (Config::taps_together) reader[0].fetch_taps(shared_raw, offset, walk.half_g);
#pragma unroll
    for (int b = 0; b < (Config::taps_together ? 0 : blocks); ++b) {
      if (!Config::meets(b * Config::consumers + consumer, product)) continue;
      if constexpr (Config::direct)
        reader[b].fetch(fragment[f][b], offset, walk.half_g, f);
      else
        reader[b].fetch(raw[b], offset, walk.half_g, f);
    }
  };

  // Tensor cores truncate when they add: long sums are put down from time to time. Nothing else may
  // touch sums within the loop of steps, or ptxas would serialise the products.
  constexpr int longest = 2048;
  constexpr bool once = Config::ieee || Config::direct_store;
  const int most_steps = once ? l.end : max(longest / (walk.products * walk.slices()), 1);
  float* out = a.partial + int64_t(blockIdx.x) * Config::cta_elements + threadIdx.x % 128;

  WgmmaMarch<WgmmaGradWeightLayout<Config>> at(l);
  if constexpr (Config::steady) rows.point(reader, at, 0);
#pragma unroll 1
  do {
    const bool stored = at.step > l.begin;
    const int until = min(at.step + most_steps, l.end);
#pragma unroll
    for (int b = 0; b < blocks; ++b)
#pragma unroll
      for (int r = 0; r < Config::registers; ++r) sum[b][r] = 0.f;
#pragma unroll 1
    for (; at.step < until; at.advance()) {
      mbarrier_wait(l.full(at.stage), at.phase);
      const uint32_t slab = l.x_ring + at.stage * l.x_slab;
#pragma unroll 1
      for (int slice = 0; slice < walk.slices(); ++slice) {
        if constexpr (Config::steady) {
          walk.begin(slab, slice, (at.slot + slice * Config::unit0) * l.plane);
        } else {
          rows.point(reader, at, slice);
          walk.begin(slab, slice);
        }
        if constexpr (Config::direct) wgmma_wait<last - 1>();
        fetch(0, walk.g, 0);
        constexpr int fixed = Config::slices * Config::slice_products;
#pragma unroll(Config::skips ? fixed / Config::fragments : 1)
        for (int product = 0; product < (Config::skips ? fixed : walk.products);
             product += Config::fragments) {
#pragma unroll
          for (int f = 0; f < Config::fragments; ++f) {
            // Of a slice's last product the words are fetched again: a branch would serialise.
            const uint64_t columns = descriptor | (walk.x & 0x3ffff) >> 4;
            const uint32_t g = walk.g;
            const uint32_t inner[2] = {walk.past_first(), walk.before_last()};
            walk.advance();
            const uint32_t next =
                f == last && product + Config::fragments >= walk.products ? g : walk.g;
            wgmma_wait<Config::direct ? last - 1 : last>();
            // Now the previous step's products are done.
            if (!Config::joined && f == last && product + slice == 0 && at.step > l.begin)
              l.leave(at.stage == 0 ? Config::stages - 1 : at.stage - 1);
            if constexpr (Config::taps_together) {
              reader[0].finish_taps(fragment[f], shared_raw);
#pragma unroll
              for (int b = 0; b < blocks; ++b) rows.mask_ends(b, inner, fragment[f][b]);
            } else if constexpr (!Config::direct) {
#pragma unroll
              for (int b = 0; b < blocks; ++b) {
                reader[b].finish(fragment[f][b], rest[Config::ieee ? f : 0][b], raw[b]);
                if constexpr (Config::masks_ends) rows.mask_ends(b, inner, fragment[f][b]);
                if constexpr (Config::bias) reader[b].add(row_sum[b], raw[b], fragment[f][b]);
              }
            }
            fetch((f + 1) % Config::fragments, next, product + f + 1);
            if (Config::ieee && f == 0) {
#pragma unroll
              for (int b = 0; b < blocks; ++b)
#pragma unroll
                for (int r = 0; r < Config::registers; ++r) part[b][r] = 0.f;
            }
            wgmma_fence();
#pragma unroll
            for (int b = 0; b < blocks; ++b) {
              if (!Config::meets(b * Config::consumers + consumer, product + f)) continue;
              if constexpr (Config::ieee) {
                multiply<Config::columns>(Float32(), part[b], rest[f][b], columns);
                multiply<Config::columns>(Float32(), part[b], fragment[f][b],
                                          columns + (l.x_part >> 4));
              }
              multiply<Config::columns>(typename Config::Type(), part[b], fragment[f][b], columns);
            }
            wgmma_commit();
          }
          if constexpr (Config::ieee) {
            wgmma_wait<0>();
#pragma unroll
            for (int b = 0; b < blocks; ++b)
#pragma unroll
              for (int r = 0; r < Config::registers; ++r) sum[b][r] += part[b][r];
          }
        }
      }
      if constexpr (Config::joined) {
        wgmma_wait<0>();
        l.leave(at.stage);
      }
    }
    wgmma_wait<0>();
    if constexpr (Config::direct_store) break;
#pragma unroll
    for (int b = 0; b < blocks; ++b)
#pragma unroll
      for (int r = 0; r < Config::registers; ++r) {
        float* to = out + ((b * Config::consumers + consumer) * Config::registers + r) * 128;
        *to = stored ? *to + sum[b][r] : sum[b][r];
      }
  } while (at.step < l.end);
  if constexpr (Config::cluster > 1)
    put_down<Config, blocks>(l, consumer, sum);
  else if constexpr (Config::direct_store)
    store_weight<Config, blocks>(l, consumer, sum);
  if constexpr (Config::bias) {
    const int row = (consumer * 4 + threadIdx.x / 32 % 4) * 16 + lane / 4;
    float* to = a.sums + int64_t(blockIdx.x) * (Config::cta_blocks * 64) + row;
#pragma unroll
    for (int b = 0; b < blocks; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float total = row_sum[b][h];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        if (lane % 4 == 0) to[b * Config::consumers * 64 + h * 8] = total;
      }
  }
}

/// Some products of a warp's 16 rows of each block, by mma.sync. Tensor cores truncate when they add:
/// few products are summed there. `masked`: some lie beyond the gradient's row.
template <typename Config, int blocks, bool masked>
CONVT3D_DEVICE void multiply_group(float (&sum)[blocks][Config::columns / 8][4],
                                   const RowReader<Config> (&reader)[blocks],
                                   const BlockRows<WgmmaGradWeightLayout<Config>, blocks>& rows,
                                   ProductWalk<WgmmaGradWeightLayout<Config>>& walk) {
  constexpr int tiles = Config::columns / 8;
  const uint32_t columns = threadIdx.x % 4 * 4 +
                           threadIdx.x % 32 / 4 * (Config::split_columns ? 128 : 16);
  float part[blocks][tiles][4];
#pragma unroll
  for (int b = 0; b < blocks; ++b)
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) part[b][n][r] = 0.f;
#pragma unroll
  for (int f = 0; f < Config::fragments; ++f) {
    uint32_t big[tiles][2], small[tiles][2];
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (Config::split_columns) {
          // 128 bytes of a row for each lane of a group, under the swizzle.
          const uint32_t from = (walk.x + h * 16) ^ (threadIdx.x % 32 / 4 * 16);
          MathIeee::split(load_shared(from + columns + n * 1024), big[n][h], small[n][h]);
        } else {
          // 16 bytes of a column hold four positions: one for each lane of a group.
          const uint32_t from = walk.x + columns + n * 128 + h * walk.half_x;
          big[n][h] = load_shared(from);
          small[n][h] = load_shared(from + walk.l.x_part);
        }
      }
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      uint32_t raw[4];
      reader[b].fetch(raw, walk.g, walk.half_g, f);
      if constexpr (masked) rows.mask(b, walk.along(), raw);
      MathIeee::A a;
      MathIeee::prepare(a, raw);
#pragma unroll
      for (int n = 0; n < tiles; ++n) {
        mma_tf32(part[b][n], a.small, big[n]);
        mma_tf32(part[b][n], a.big, small[n]);
        mma_tf32(part[b][n], a.big, big[n]);
      }
    }
    walk.advance();
  }
#pragma unroll
  for (int b = 0; b < blocks; ++b)
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) sum[b][n][r] += part[b][n][r];
}

/// The same in IEEE-grade arithmetic for few columns, which would leave most of a wgmma unused: each
/// warp multiplies its 16 rows of a block by itself.
template <typename Config, int blocks>
CONVT3D_DEVICE void consume_warps(const WgmmaGradWeightLayout<Config>& l, int consumer) {
  const BlockRows<WgmmaGradWeightLayout<Config>, blocks> rows(l, consumer);
  ProductWalk<WgmmaGradWeightLayout<Config>> walk(l);
  constexpr int tiles = Config::columns / 8;

  float sum[blocks][tiles][4];
#pragma unroll
  for (int b = 0; b < blocks; ++b)
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) sum[b][n][r] = 0.f;
  RowReader<Config> reader[blocks];

  WgmmaMarch<WgmmaGradWeightLayout<Config>> at(l);
#pragma unroll 1
  for (; at.step < l.end; at.advance()) {
    mbarrier_wait(l.full(at.stage), at.phase);
    const uint32_t slab = l.x_ring + at.stage * l.x_slab;
#pragma unroll 1
    for (int slice = 0; slice < walk.slices(); ++slice) {
      rows.point(reader, at, slice);
      walk.begin(slab, slice);
#pragma unroll 1
      for (int product = 0; product < walk.products; product += Config::fragments) {
        if (Config::joined && rows.group_reaches_out(walk))
          multiply_group<Config, blocks, true>(sum, reader, rows, walk);
        else
          multiply_group<Config, blocks, false>(sum, reader, rows, walk);
      }
    }
    l.leave(at.stage);
  }
  float* out = l.a.partial + int64_t(blockIdx.x) * Config::cta_elements + threadIdx.x % 128;
#pragma unroll
  for (int b = 0; b < blocks; ++b)
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        out[((b * Config::consumers + consumer) * Config::registers + n * 4 + r) * 128] =
            sum[b][n][r];
}

/// One product of all rows of a warpgroup, which are columns of mma.sync here, as x's columns are its
/// rows: x is split once for all of them. Words of the next pairs are on their way while these are
/// multiplied.
template <typename Config, int pairs, int tiles, bool masked>
CONVT3D_DEVICE void multiply_pairs(
    float (&part)[pairs][2][tiles][4], MathIeee::A (&x)[tiles],
    const RowReader<Config> (&reader)[pairs],
    const BlockRows<WgmmaGradWeightLayout<Config>, pairs, true>& rows,
    const ProductWalk<WgmmaGradWeightLayout<Config>>& walk, int product) {
  // Two or three pairs at a time: products that add to the same sums are some apart.
  constexpr int each = pairs > 1 ? div_up(pairs, pairs / 2) : 1;
  uint32_t raw[each][4];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int b = 0; b < each; ++b)
      if (first + b < pairs) reader[first + b].fetch(raw[b], walk.g, walk.half_g, product);
  };
  fetch(0);
  if constexpr (Config::split_columns) {
#pragma unroll
    for (int m = 0; m < tiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) MathIeee::split(x[m].big[i], x[m].big[i], x[m].small[i]);
  }
#pragma unroll
  for (int first = 0; first < pairs; first += each) {
    uint32_t big[each][2][2], small[each][2][2];  // of a pair: octet, half of the depth
#pragma unroll
    for (int b = 0; b < each; ++b) {
      if (first + b >= pairs) continue;
      if constexpr (masked) rows.mask(first + b, walk.along(), raw[b]);
#pragma unroll
      for (int r = 0; r < 4; ++r)
        MathIeee::split(raw[b][r], big[b][r % 2][r / 2], small[b][r % 2][r / 2]);
    }
    fetch(first + each);
#pragma unroll
    for (int term = 0; term < 3; ++term)
#pragma unroll
      for (int b = 0; b < each; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int m = 0; m < tiles; ++m)
            if (first + b < pairs)
              mma_tf32(part[first + b][h][m], term == 0 ? x[m].small : x[m].big,
                       term == 1 ? small[b][h] : big[b][h]);
  }
}

/// IEEE-grade arithmetic of few columns and rows: warps take products in turn, each with all rows of
/// its warpgroup, and add up their sums in order at the end.
template <typename Config, int blocks, int pairs>
CONVT3D_DEVICE void consume_turns(const WgmmaGradWeightLayout<Config>& l, int consumer) {
  using Layout = WgmmaGradWeightLayout<Config>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const BlockRows<Layout, pairs, true> rows(l, consumer);
  ProductWalk<Layout> walk(l);
  constexpr int columns8 = Config::columns / 8, tiles = div_up(columns8, 2);
  const int products = l.a.tile1 * l.a.tile2 / Config::depth;
  const uint32_t columns = lane % 4 * 4 + lane / 4 * (Config::split_columns ? 128 : 16);

  float sum[pairs][2][tiles][4] = {};
  RowReader<Config> reader[pairs];
  WgmmaMarch<Layout> at(l);
#pragma unroll 1
  for (; at.step < l.end; at.advance()) {
    mbarrier_wait(l.full(at.stage), at.phase);
    const uint32_t slab = l.x_ring + at.stage * l.x_slab;
#pragma unroll 1
    for (int slice = 0; slice < l.a.tile0; ++slice) {
      rows.point(reader, at, slice);
      // Tensor cores truncate when they add: few products are summed there.
#pragma unroll 1
      for (int first = warp; first < products; first += 4 * Config::fragments) {
        float part[pairs][2][tiles][4] = {};
#pragma unroll 1
        for (int product = first; product < min(first + 4 * Config::fragments, products);
             product += 4) {
          walk.seek(slab, slice, product);
          MathIeee::A x[tiles];
#pragma unroll
          for (int n = 0; n < 2 * tiles; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              uint32_t& big = x[n / 2].big[2 * h + n % 2];
              uint32_t& small = x[n / 2].small[2 * h + n % 2];
              if (n >= columns8) {
                big = small = 0;
              } else if constexpr (Config::split_columns) {
                // 128 bytes of a row for each lane of a group, under the swizzle.
                const uint32_t from = (walk.x + h * 16) ^ (lane / 4 * 16);
                big = load_shared(from + columns + n * 1024);
              } else {
                const uint32_t from = walk.x + columns + n * 128 + h * walk.half_x;
                big = load_shared(from);
                small = load_shared(from + l.x_part);
              }
            }
          if (Config::joined && rows.reaches_out(walk.along()))
            multiply_pairs<Config, pairs, tiles, true>(part, x, reader, rows, walk, product);
          else
            multiply_pairs<Config, pairs, tiles, false>(part, x, reader, rows, walk, product);
        }
#pragma unroll
        for (int b = 0; b < pairs; ++b)
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int m = 0; m < tiles; ++m)
#pragma unroll
              for (int r = 0; r < 4; ++r) sum[b][h][m][r] += part[b][h][m][r];
      }
    }
    l.leave(at.stage);
  }

  // Sums lie as [column][row] where the rings were.
  constexpr int pitch = Config::sum_pitch;
  l.meet(0);
#pragma unroll 1
  for (int turn = 0; turn < 4; ++turn) {
    if (turn == warp) {
#pragma unroll
      for (int b = 0; b < pairs; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int m = 0; m < tiles; ++m)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
              if (2 * m + r / 2 >= columns8) continue;
              const int column = m * 16 + r / 2 * 8 + lane / 4;
              const int row = (b / 4 * Config::consumers + consumer) * 64 + b % 4 * 16 + h * 8 +
                              lane % 4 * 2 + r % 2;
              const uint32_t to = l.x_ring + (column * pitch + row) * 4;
              const float before = turn == 0 ? 0.f : __uint_as_float(load_shared(to));
              store_shared(to, before + sum[b][h][m][r]);
            }
    }
    named_barrier_sync(2 + consumer, 128);
  }
  float* out = l.a.partial + int64_t(blockIdx.x) * Config::cta_elements + threadIdx.x % 128;
#pragma unroll 1
  for (int b = 0; b < blocks; ++b)
#pragma unroll
    for (int r = 0; r < Config::registers; ++r) {
      const int block = b * Config::consumers + consumer;
      const int row = block * 64 + warp * 16 + r % 4 / 2 * 8 + lane / 4;
      const int column = r / 4 * 8 + lane % 4 * 2 + r % 2;
      out[(block * Config::registers + r) * 128] =
          __uint_as_float(load_shared(l.x_ring + (column * pitch + row) * 4));
    }
}

template <typename Config, int blocks, int pairs>
CONVT3D_DEVICE void multiply_steps(const WgmmaGradWeightLayout<Config>& l, int consumer) {
  if constexpr (Config::turns)
    consume_turns<Config, blocks, pairs>(l, consumer);
  else if constexpr (Config::warp_products)
    consume_warps<Config, blocks>(l, consumer);
  else
    consume<Config, blocks>(l, consumer);
}

template <typename Config>
CONVT3D_DEVICE void wgmma_grad_weight(const WgmmaGradWeightArguments<Config>& a,
                                      const WgmmaGradWeightMaps& maps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const WgmmaGradWeightLayout<Config> l(a, shared_address(shared));
  if (threadIdx.x == 0) {
    for (int s = 0; s < Config::stages; ++s) {
      mbarrier_init(l.full(s), Config::full_arrivals);
      mbarrier_init(l.empty(s), Config::empty_arrivals);
      mbarrier_init(l.landed(s), Config::producers);
    }
    if constexpr (Config::direct_store || Config::turns)
      mbarrier_init(l.met(), lanes_of(4 * Config::consumers));
    mbarrier_init_fence();
  }
  if constexpr (Config::volume) VolumeFill<WgmmaGradWeightLayout<Config>>::clear(l);
  __syncthreads();
  grid_dependency_launch();
  // Warp-uniform, as ptxas can see: else it would serialise the products.
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (role == 0) {
    register_decrease<Config::producer_registers>();
    if constexpr (Config::maps_only) {
      if (threadIdx.x == 0) produce_boxes(l, maps);
    } else if constexpr (Config::joined) {
      produce_joined(l, maps);
    } else if constexpr (Config::spread) {
      produce_spread(l, maps);
    } else {
      produce(l, maps);
    }
  } else {
    register_increase<Config::consumer_registers>();
    if constexpr (Config::phase_rows)
      consume_phases(l);
    else if (Config::skips && role == 1)  // each knows what to skip
      multiply_steps<Config, Config::blocks, 4 * Config::blocks>(l, 0);
    else if (Config::skips)
      multiply_steps<Config, Config::blocks, 4 * Config::blocks>(l, 1);
    else if ((Config::row_tiles > 1 && !l.tile.last) || Config::last_blocks == Config::cta_blocks)
      multiply_steps<Config, Config::blocks, 4 * Config::blocks>(l, role - 1);
    else if (role == 1)
      multiply_steps<Config, Config::last_of(0), Config::last_pairs_of(0)>(l, 0);
    else
      multiply_steps<Config, Config::last_of(1), Config::last_pairs_of(1)>(l, 1);
  }
  if constexpr (Config::cluster > 1) {
    __syncwarp();
    cluster_sync();
    if (role > 0) add_cluster(l, threadIdx.x - 128);
    cluster_sync();  // nobody leaves while others read its sums
  }
}

/// What a thread of the second pass adds up: some taps of a channel of the gradient, in four columns,
/// every second one. The first of each:
template <typename Config>
struct SumItem {
  int channel, tap, column;
  CONVT3D_DEVICE explicit SumItem(int item)
      : channel(item % Config::channel_tile_m),
        tap(item / Config::channel_tile_m % Config::tap_groups * Config::item_taps) {
    const int four = item / (Config::channel_tile_m * Config::tap_groups);
    column = four / 2 * 8 + four % 2;
  }
  CONVT3D_DEVICE bool live(const WgmmaTile<Config>& tile) const {
    return column < Config::columns && tile.target_channel(channel) < Config::target_channels;
  }
};

/// Adds the partial sums of all splits, in the same order every time, and scatters them to the
/// weight. What a block stores lies together. 2^`share_bits` threads take the splits of an item in turn.
template <typename Config>
CONVT3D_DEVICE void reduce(const float* partial, const WgmmaWeight<Config>& weight, int share_bits,
                           int splits_full, int splits_last) {
  extern __shared__ __align__(1024) unsigned char shared[];
  float* sums = reinterpret_cast<float*>(shared);
  using Item = SumItem<Config>;
  constexpr int threads = 256, taps = Config::item_taps;
  constexpr int pitch = taps | 1;  // of an item in shared memory, against conflicts
  constexpr int cta_octets = Config::cta_blocks * 8;
  const int item_bits = 8 - share_bits, items = 1 << item_bits;  // of a block, which has one owner
  const int tile_index = blockIdx.x % Config::tiles;
  const int first_item = int(blockIdx.x / Config::tiles) << item_bits;
  const WgmmaTile<Config> tile(tile_index * Config::cluster, 1, 1);  // for its channels alone
  const int own = threadIdx.x & (items - 1), share = threadIdx.x >> item_bits;
  const Item item(first_item + own);

  float4 sum[taps];
#pragma unroll
  for (int t = 0; t < taps; ++t) sum[t] = make_float4(0.f, 0.f, 0.f, 0.f);
  grid_dependency_wait();
  if (item.live(tile)) {
    // Where a tap's four sums are: in which CTA of a split, and where of its sums.
    int row_tile[taps], within[taps], splits[taps];
    const int first_row = WgmmaRow<Config>::index(item.tap, item.channel);
#pragma unroll
    for (int t = 0; t < taps; ++t) {
      const int live_t = item.tap + t < Config::taps ? t : 0;
      int row = first_row + live_t / Config::octet_taps * Config::channel_octets * 8 +
                live_t % Config::octet_taps * Config::octet_channels;
      if constexpr (Config::taps_together)
        row = WgmmaRow<Config>::index(item.tap + live_t, item.channel);
      const int octet = row / 8;
      const int in_cta = Config::row_tiles == 1 ? octet : octet % cta_octets;
      row_tile[t] = Config::row_tiles == 1 ? 0 : octet / cta_octets;
      splits[t] = row_tile[t] == Config::row_tiles - 1 ? splits_last : splits_full;
      within[t] = (in_cta / 8 * Config::registers + item.column / 8 * 4 + in_cta % 2 * 2 +
                   item.column % 8) * 128 + in_cta / 2 % 4 * 32 + row % 8 * 4;
    }
    constexpr int together = 2;  // splits whose sums are on their way
    const int most = max(Config::row_tiles > 1 ? splits_full : 0, splits_last);
#pragma unroll 1
    for (int first = share; first < most; first += together << share_bits) {
      // Loads without conditions, which would wait for each other.
      float4 part[together][taps];
#pragma unroll
      for (int s = 0; s < together; ++s)
#pragma unroll
        for (int t = 0; t < taps; ++t) {
          const int split = min(first + (s << share_bits), splits[t] - 1);
          const int block = row_tile[t] == Config::row_tiles - 1
                                ? (Config::row_tiles - 1) * splits_full + split
                                : split * (Config::row_tiles - 1) + row_tile[t];
          part[s][t] = *reinterpret_cast<const float4*>(
              partial + (int64_t(block) * Config::tiles + tile_index) * Config::cta_elements +
              within[t]);
        }
#pragma unroll
      for (int s = 0; s < together; ++s)
#pragma unroll
        for (int t = 0; t < taps; ++t)
          if (first + (s << share_bits) < splits[t])
            sum[t] = make_float4(sum[t].x + part[s][t].x, sum[t].y + part[s][t].y,
                                 sum[t].z + part[s][t].z, sum[t].w + part[s][t].w);
    }
  }
  // [share][column][item][tap]
  float* to = sums + (share * 4 * items + own) * pitch;
#pragma unroll
  for (int t = 0; t < taps; ++t) {
    const float four[4] = {sum[t].x, sum[t].y, sum[t].z, sum[t].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i * items * pitch + t] = four[i];
  }
  __syncthreads();
  // Neighbouring threads store neighbouring taps, and channels of the gradient.
#pragma unroll 1
  for (int pair = threadIdx.x; pair < items * taps; pair += threads) {
    const int place = pair / taps;
    const Item at(first_item + place);
    const WgmmaRow<Config> row = WgmmaRow<Config>::of(at.tap + pair % taps, at.channel);
    const int in = tile.channel_n + at.column % Config::channel_tile_n;
    const int k1 = Config::tap1(row.k1(), at.column);
    if (!at.live(tile) || row.tap >= Config::taps || k1 >= CONVT3D_KERNEL1) continue;
    float total[4] = {};
    const float* from = sums + place * pitch + pair % taps;
    int left = 1 << share_bits;
#pragma unroll 1
    do {
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] += from[i * items * pitch];
      from += 4 * items * pitch;
    } while (--left > 0);
    auto* out = weight.at(tile.group, in, tile.target_channel(at.channel), row.k0(), k1, row.k2());
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (in + 2 * i < Config::source_channels)
        out[2 * i * weight.stride_in] = Config::Type::store(total[i]);
  }
}

/// Adds the gradient's sums of all splits, and of the taps that share out its positions: a warp for
/// each channel.
template <typename Config>
CONVT3D_DEVICE void reduce_bias(const float* sums, typename Config::Storage* bias, int channel,
                                int splits_full, int splits_last) {
  constexpr int cta_rows = Config::cta_blocks * 64;
  if (channel >= Config::groups * Config::target_channels) return;
  const int group = channel / Config::target_channels, in_group = channel % Config::target_channels;
  const int tile_m = in_group / Config::channel_tile_m;
  const int tile_index =
      (group * Config::channel_tiles_m + tile_m) * Config::channel_tiles_n;  // x channels: the first
  grid_dependency_wait();
  float total = 0.f;
  for (int tap = 0; tap < Config::taps; ++tap) {
    if (!Config::adds(tap / (Config::taps1 * Config::taps2), tap / Config::taps2 % Config::taps1,
                      tap % Config::taps2))
      continue;
    const int row = WgmmaRow<Config>::index(tap, in_group % Config::channel_tile_m);
    const int row_tile = row / cta_rows;
    const int share = row_tile == Config::row_tiles - 1 ? row_tile * splits_full : row_tile;
    const WgmmaTile<Config> tile((share * Config::tiles + tile_index) * Config::cluster, splits_full,
                                 splits_last);
    for (int split = threadIdx.x % 32; split < tile.splits; split += 32)
      total += sums[tile.block_of(tile_index, split, splits_full) * cta_rows + row % cta_rows];
  }
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2)
    total += __shfl_xor_sync(0xffffffffu, total, apart);
  if (threadIdx.x % 32 == 0) bias[channel] = Config::Type::store(total);
}

}  // namespace convt3d

extern "C" __global__ void
#if CONVT3D_CLUSTER > 1
__cluster_dims__(CONVT3D_CLUSTER, 1, 1)
#endif
__launch_bounds__(convt3d::WgmmaGradWeightConfig::threads, 1)
    convt3d_wgrad(
        const convt3d::WgmmaGradWeightConfig::Storage* source,
        const convt3d::WgmmaGradWeightConfig::Storage* gradient, float* partial,
        convt3d::WgmmaGradWeightConfig::Storage* weight,
#if CONVT3D_SUM_BIAS
        float* sums,
#endif
#if CONVT3D_SOURCE_MAP
        const __grid_constant__ convt3d::TensorMap source_map,
#endif
#if CONVT3D_TARGET_FILL == 2 || CONVT3D_TARGET_FILL == 3 || CONVT3D_TARGET_FILL == 7 || \
    CONVT3D_TARGET_FILL == 8
        const __grid_constant__ convt3d::TensorMap target_map,
#endif
        int source0, int source1, int source2, int source_stride0, int source_stride1, int gradient0,
        int gradient1, int gradient2, int gradient_stride0, int gradient_stride1, int tile0,
        int tile1, int tile2, int tiles1, int tiles2, int steps0, int first1, int planes,
        int row_pitch, int channel_pitch, int samples, int splits_full, int splits_last,
        convt3d::int64_t stride_in, convt3d::int64_t stride_out, convt3d::int64_t stride0,
        convt3d::int64_t stride1, convt3d::int64_t stride2) {
  const convt3d::WgmmaGradWeightArguments<convt3d::WgmmaGradWeightConfig> arguments{
      {source, {source0, source1, source2}, source_stride0, source_stride1},
      {gradient, {gradient0, gradient1, gradient2}, gradient_stride0, gradient_stride1},
      partial,
      tile0,
      tile1,
      tile2,
      tiles1,
      tiles2,
      steps0,
      first1,
      planes,
      row_pitch,
      channel_pitch,
      samples,
      splits_full,
      splits_last,
      {weight, stride_in, stride_out, stride0, stride1, stride2},
#if CONVT3D_SUM_BIAS
      sums
#else
      nullptr
#endif
  };
  convt3d::WgmmaGradWeightMaps maps{nullptr, nullptr};
#if CONVT3D_SOURCE_MAP
  maps.source = &source_map;
#endif
#if CONVT3D_TARGET_FILL == 2 || CONVT3D_TARGET_FILL == 3 || CONVT3D_TARGET_FILL == 7 || \
    CONVT3D_TARGET_FILL == 8
  maps.target = &target_map;
#endif
  convt3d::wgmma_grad_weight(arguments, maps);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    convt3d_reduce(const float* partial, convt3d::WgmmaGradWeightConfig::Storage* weight,
#if CONVT3D_SUM_BIAS
                   const float* sums, convt3d::WgmmaGradWeightConfig::Storage* bias,
#endif
                   int share_bits, int splits_full, int splits_last, convt3d::int64_t stride_in,
                   convt3d::int64_t stride_out, convt3d::int64_t stride0,
                   convt3d::int64_t stride1, convt3d::int64_t stride2) {
  using Config = convt3d::WgmmaGradWeightConfig;
#if CONVT3D_SUM_BIAS
  // The last blocks' warps take a channel each.
  const int blocks =
      Config::direct_store ? 0 : Config::tiles * (((Config::items - 1) >> (8 - share_bits)) + 1);
  if (int(blockIdx.x) >= blocks) {
    convt3d::reduce_bias<Config>(sums, bias, (int(blockIdx.x) - blocks) * 8 + threadIdx.x / 32,
                                 splits_full, splits_last);
    return;
  }
#endif
  convt3d::reduce<Config>(partial, {weight, stride_in, stride_out, stride0, stride1, stride2},
                          share_bits, splits_full, splits_last);
}
