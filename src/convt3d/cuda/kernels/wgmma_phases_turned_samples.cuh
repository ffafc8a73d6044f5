// Boxes of many samples that are turned on their way to shared memory (wgmma_phases_columns.cuh):
//
//     [quad][slice][position along W][line][sample] of 16 bytes, the words of a quad of channels.
//
// Two groups of four warps take turns with the boxes, so that one waits for its loads while the other
// stores. A lane has a line of a sample and a quad of channels, in every slice that an item reads: where
// it lies is worked out once an item.
#pragma once
#include "wgmma_phases_turned.cuh"

namespace convt3d {

template <typename Config>
struct PhasesSampleTurner {
  using Storage = typename Config::Storage;
  using Arguments = PhasesArguments<Storage>;
  using Walk = PhasesWalk<Config>;
  using Item = typename Walk::Item;
  using Vector = TurnedVector<Config>;
  static constexpr int groups = Config::samples_inside ? 2 : 1, lanes = Config::box_writers;
  static constexpr int inner = Config::inner_samples, units = Config::line_units;
  static constexpr int slices = Config::box_slices;
  static_assert(!Config::samples_inside || (Config::quads * inner * 4 == lanes &&
                                            Config::quads * Config::edge_samples <= lanes &&
                                            Config::turned_vector == units),
                "a lane for each line");

  const Arguments& a;
  uint32_t shared, boxes_at;
  int turner, group, lane;

  CONVT3D_DEVICE PhasesSampleTurner(const Arguments& arguments, uint32_t shared_, int turner_)
      : a(arguments),
        shared(shared_),
        boxes_at(shared + Config::box_offset),
        turner(turner_),
        group(turner_ / lanes),
        lane(turner_ % lanes) {}

  CONVT3D_DEVICE void fill(BoxRing<Config> boxes) const {
    for (int at = turner * 16; at < Config::source_stages * a.box_bytes; at += Config::fillers * 16)
      store_shared(boxes_at + at, 0u, 0u, 0u, 0u);
    named_barrier_sync(1, Config::fillers);
    if (group > 0) boxes.advance();
    const int position_pitch = a.slice_pitch / units * 16;
    const uint32_t volume = uint32_t(a.source.volume());
    Walk walk(a, shared);
    Item item;
    int chunk = group;
    while (walk.next(a, item)) {
      if (item.taps0.count * item.taps1.count == 0) continue;
      // Neighbouring lanes have neighbouring samples, whose rows are neighbours, then lines.
      int quad = lane / (4 * inner), line = lane / 8 % 4;
      int sample = lane % 8 + lane / 32 % (inner / 8) * 8, h = line;
      if constexpr (!Config::edges) ++line;  // one of zeros before
      if (item.edge) {
        quad = lane / Config::edge_samples, sample = lane % Config::edge_samples, line = 0;
        h = item.first[1] + item.taps1.origin + item.taps1.offset;
      }
      const bool exists = quad < Config::quads;
      const bool inside = exists && unsigned(h) < unsigned(a.source.extent[1]) &&
                          item.sample + sample < a.batch;
      const int d = item.first[0] + item.taps0.origin;
      // The slices that walked taps of D read.
      const int from = item.taps0.offset, to = from + (item.taps0.count - 1) * item.taps0.step;
      const int first = min(from, to), last = max(from, to);
      const Storage* at =
          a.source.data +
          ((int64_t(item.sample + sample) * Config::groups + item.group) * Config::source_channels +
           quad * Config::quad_channels) * a.source.volume() +
          int64_t(d) * a.source.stride0 + int64_t(h) * a.source.stride1;
      const uint32_t row = uint32_t(quad * a.channel_pitch + line * inner + sample) * 16;
      for (; chunk < Config::chunks; chunk += groups) {
        Vector found[slices];
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) {
          if (slice < first || slice > last) continue;
          const bool loads = inside && unsigned(d + slice) < unsigned(a.source.extent[0]);
          if (!loads) found[slice].clear();
          if (loads)
            found[slice].load(at + int64_t(chunk) * Config::chunk_channels * volume +
                                  int64_t(slice) * a.source.stride0,
                              volume);
        }
        boxes.wait_empty();
        const uint32_t box = boxes_at + boxes.stage * a.box_bytes + row;
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) {
          if (slice < first || slice > last || !exists) continue;
#pragma unroll
          for (int j = 0; j < units; ++j) {
            uint32_t words[4];
            found[slice].row(j, words);
            store_shared(box + slice * a.slice_pitch * 16 + j * position_pitch, words[0], words[1],
                         words[2], words[3]);
          }
        }
        fence_async_proxy();
        mbarrier_arrive(boxes.full());
#pragma unroll
        for (int i = 0; i < groups; ++i) boxes.advance();
      }
      chunk -= Config::chunks;
    }
  }
};

}  // namespace convt3d
