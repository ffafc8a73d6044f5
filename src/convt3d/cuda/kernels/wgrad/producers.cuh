// What the producer warpgroup does, by where x and the gradient come from: all by tensor maps;
// whole rows of the gradient by bulk copies; slabs by cp.async or bulk copies, which the producers
// round to TF32 or split.
#pragma once
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "wgrad/layout.cuh"
#include "wgrad/runs.cuh"
#include "wgrad/slab.cuh"
#include "wgrad/volume.cuh"

namespace convt3d {

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
CONVT3D_DEVICE uint32_t load_source(const WgradLayout<Config>& l, const TensorMap& map,
                                    const WgradSteps<WgradLayout<Config>>& at,
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
CONVT3D_DEVICE uint32_t load_target(const WgradLayout<Config>& l, const TensorMap& map,
                                    const WgradSteps<WgradLayout<Config>>& at,
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
CONVT3D_DEVICE void produce_boxes(const WgradLayout<Config>& l,
                                  const WgradMaps& maps) {
  WgradSteps<WgradLayout<Config>> at(l);
#pragma unroll 1
  for (; at.step < l.end; at.advance()) {
    if (at.step - l.begin >= Config::stages) mbarrier_wait(l.empty(at.stage), at.phase ^ 1);
    const uint32_t barrier = l.full(at.stage);
    const uint32_t bytes = load_source(l, *maps.source, at, barrier);
    mbarrier_expect(barrier, bytes + load_target(l, *maps.target, at, barrier));
  }
}

template <typename Config>
CONVT3D_DEVICE void produce(const WgradLayout<Config>& l,
                            const WgradMaps& maps) {
  using Steps = WgradSteps<WgradLayout<Config>>;
  const auto& a = l.a;
  const auto& tile = l.tile;
  const int width = (a.tile2 - 1) * Config::unit2 + (Config::taps2 - 1) * Config::reach2 + 1;
  const SlabFill<Config, false> fill_x(a.source, a.tile0, l.rows_x, a.tile2);
  const SlabFill<Config, true> fill_g(a.gradient, 1, l.rows_g, width);
  const RunFill<Config> runs(a.gradient, a.samples, l.rows_g, width, a.row_pitch, a.channel_pitch);
  const VolumeFill<WgradLayout<Config>> volumes(l, Steps(l));
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
  auto start = [&](const Steps& at) {
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
  auto finish = [&](const Steps& at) {
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

  Steps started(l), finished(l);
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

/// Whole rows of the gradient by bulk copies, x by tensor map: consumers wait for the bytes. All
/// but the last warp copy rows, which they have worked out when a stage becomes free.
template <typename Config>
CONVT3D_DEVICE void produce_joined(const WgradLayout<Config>& l,
                                   const WgradMaps& maps) {
  constexpr int copiers = Config::producers - 32, warps = copiers / 32;
  const auto& tile = l.tile;
  const RunFill<Config> runs(l.a.gradient, l.a.samples, l.rows_g, 0, l.a.row_pitch,
                             l.a.channel_pitch);
  const int live = min(tile.target_live(), Config::channel_tile_m);
  const int warp = threadIdx.x / 32, first = threadIdx.x % 32 * warps + warp;
  WgradSteps<WgradLayout<Config>> at(l);
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

}  // namespace convt3d
