// Source rows into stages: loaded value by value, transposed, scaled and split on the way.
#pragma once
#include "device/barrier.cuh"
#include "device/pipeline.cuh"
#include "rows/runs.cuh"

namespace convt3d {

/// One source row of all channels at all slices, by one warp: `items` counts its positions.
template <typename Config>
struct RowProducer {
  using Math = typename Config::Math;
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  // Items of a lane; those whose loads are on their way together.
  static constexpr int all_turns = div_up(Config::slices * Config::positions, 32);
  static constexpr int batches = div_up(all_turns, 5);
  static constexpr int turns = div_up(all_turns, batches);
  using Values = Storage[turns][8];

  const RowsArguments<Config>& arguments;
  int lane, items;
  int64_t volume;
  const Storage* base;     // channel 0 of a sample's group
  uint32_t from[batches * turns];  // elements from a row's begin in slice 0
  bool inside[batches * turns];
  uint32_t to[batches * turns];    // in a stage

  CONVT3D_DEVICE RowProducer(const RowsArguments<Config>& arguments_, int lane_)
      : arguments(arguments_), lane(lane_) {
    volume = int64_t(arguments.source_extent[0]) * arguments.source_extent[1] *
             arguments.source_extent[2];
  }
  CONVT3D_DEVICE void begin(const RowRuns<Config>& run, int group) {
    const auto& a = arguments;
    const int units =
        min(Config::units, div_up(a.target_extent[2], Config::slots2) - run.first2);
    const int positions = units + Config::shifts - 1;
    items = Config::slices * positions;
    base = a.source + (int64_t(run.sample) * Config::groups + group) * Config::source_channels * volume;
#pragma unroll
    for (int i = 0; i < batches * turns; ++i) {
      const int item = lane + 32 * i;
      int slice = 0;
#pragma unroll
      for (int j = 1; j < Config::slices; ++j) slice += item >= j * positions;
      const int position = item - slice * positions;
      const int d = run.unit0 + Config::Axis0::min_shift + slice;
      const int w = run.first2 + Config::Axis2::min_shift + position;
      inside[i] = item < items && unsigned(d) < unsigned(a.source_extent[0]) &&
                  unsigned(w) < unsigned(a.source_extent[2]);
      from[i] = uint32_t(d * a.source_extent[1] * a.source_extent[2] + w);
      to[i] = uint32_t(slice * Config::slice_bytes + 16 * position);
    }
  }
  CONVT3D_DEVICE void load(Values& values, int row, int octet, int batch) const {
    const Storage* first = base + (8 * octet * volume + int64_t(row) * arguments.source_extent[2]);
#pragma unroll
    for (int c = 0; c < 8; ++c, first += volume)
#pragma unroll
      for (int i = 0; i < turns; ++i) {
        const int turn = batch * turns + i;
        values[i][c] = 0;
        if (8 * octet + c < Config::source_channels && inside[turn])
          values[i][c] = __ldg(first + from[turn]);
      }
  }
  CONVT3D_DEVICE static int largest(const Values& values, int before) {
    int part[2] = {before, 0};
#pragma unroll
    for (int i = 0; i < turns * 8; ++i)
      part[i % 2] = Math::larger(part[i % 2], bits_of(values[i / 8][i % 8]));
    return max(part[0], part[1]);
  }
  CONVT3D_DEVICE void store(const Values& values, uint32_t stage, int octet, int batch,
                            float scale) const {
    stage += uint32_t(octet * Config::octet_bytes);
#pragma unroll
    for (int i = 0; i < turns; ++i) {
      const int turn = batch * turns + i;
      if (lane + 32 * turn >= items) continue;
      uint32_t word[Config::parts][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (Config::in_f16x3) {
          const float a = values[i][2 * j] * scale, b = values[i][2 * j + 1] * scale;
          word[0][j] = pack_f16(Math::low_of(a) * Math::low_scale, Math::low_of(b) * Math::low_scale);
          word[1][j] = pack_f16(a, b);
        } else {
          word[0][j] = Type::word(values[i][2 * j], values[i][2 * j + 1]);
        }
      }
#pragma unroll
      for (int part = 0; part < Config::parts; ++part)
        store_shared(stage + to[turn] + part * Config::plane_bytes, word[part][0], word[part][1],
                     word[part][2], word[part][3]);
    }
  }
};

/// Calls part(octet, batch) for all that a row is loaded in.
template <typename Config, typename Part>
CONVT3D_DEVICE void every_part(const Part& part) {
#pragma unroll 1
  for (int octet = 0; octet < Config::octets; ++octet)
#pragma unroll
    for (int batch = 0; batch < RowProducer<Config>::batches; ++batch) part(octet, batch);
}

/// Every producers-th row of a warpgroup's, by one warp.
template <typename Config>
CONVT3D_DEVICE void produce_rows(const RowsArguments<Config>& arguments, uint32_t stages,
                                 uint32_t barriers, uint32_t scales, RowRuns<Config> runs, int group,
                                 int producer, int lane) {
  using Math = typename Config::Math;
  RowProducer<Config> source(arguments, lane);
  Ring<Config::ring> ring(barriers);
  int turn = producer;  // rows until this warp's next
  while (runs.advance()) {
    source.begin(runs, group);
    const int end = runs.rows_end();
#pragma unroll 1
    for (int row = runs.begin; row < end; ++row) {
      if (turn == 0) {
        float scale = 1.f, unscale = 1.f;
        typename RowProducer<Config>::Values values;
        if constexpr (Config::in_f16x3) {
          int largest = 0;
          every_part<Config>([&](int octet, int batch) {
            source.load(values, row, octet, batch);
            largest = RowProducer<Config>::largest(values, largest);
          });
#pragma unroll
          for (int distance = 16; distance > 0; distance /= 2)
            largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
          const int exponent = Math::exponent(largest);
          scale = Math::scale(exponent);
          unscale = Math::unscale(exponent);
        }
        // One part alone stays in registers.
        constexpr bool loaded = Config::in_f16x3 && Config::octets * RowProducer<Config>::batches == 1;
        every_part<Config>([&](int octet, int batch) {
          if constexpr (!loaded) source.load(values, row, octet, batch);
          if (octet == 0 && batch == 0) ring.wait_empty();
          source.store(values, stages + ring.stage * Config::stage_bytes, octet, batch, scale);
        });
        if (Config::in_f16x3 && lane == 0) store_shared(scales + 4 * ring.stage, unscale);
        fence_async_proxy();
        mbarrier_arrive(ring.full());
        turn = Config::producers;
      }
      --turn;
      ring.advance();
    }
  }
}

}  // namespace convt3d
