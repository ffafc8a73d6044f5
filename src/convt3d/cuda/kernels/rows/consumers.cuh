// Products of source rows, the sums of target rows that go on from row to row, and how complete
// rows leave.
#pragma once
#include "device/barrier.cuh"
#include "device/pipeline.cuh"
#include "device/wgmma.cuh"
#include "device/wgmma_product.cuh"
#include "rows/runs.cuh"
#include "rows/streams.cuh"

namespace convt3d {

/// Sums of a lane, by slot along D: [tap along H, or row][half of the channels][half of 16
/// units][slot along W].
template <typename Config, int Rows>
struct RowSums {
  float columns[Config::Axis0::slots][8 * (Rows > 0 ? Rows : 1)];

  CONVT3D_DEVICE void clear() {
#pragma unroll
    for (int slot = 0; slot < Config::Axis0::slots; ++slot)
#pragma unroll
      for (float& sum : columns[slot]) sum = 0.f;
  }
  /// Keeps what writes or reads them on its side of the products.
  CONVT3D_DEVICE void fence() {
#pragma unroll
    for (int slot = 0; slot < Config::Axis0::slots; ++slot) wgmma_fence_registers(columns[slot]);
  }
  CONVT3D_CONSTEXPR static int index(int row, int half, int rest, int slot2) {
    return 8 * row + 4 * half + 2 * rest + slot2;
  }
};

/// Products of a stage with all weights: crosswise ones, or the others.
template <typename Config, bool Cross>
CONVT3D_DEVICE void multiply_row(RowSums<Config, Config::kernel1>& part, uint32_t stage,
                                 uint32_t weights) {
  constexpr int count = Cross ? Config::shifts : Config::pairs;
  // Low and high half of a position; high ones of two positions.
  const uint64_t rows =
      Cross ? matrix_descriptor(stage, Config::plane_bytes, 128)
            : matrix_descriptor(stage + (Config::parts - 1) * Config::plane_bytes, 16, 128);
#pragma unroll
  for (int slice = 0; slice < Config::slices; ++slice) {
    const uint64_t columns = matrix_descriptor(weights, 16 * Config::columns_of(slice), 128);
#pragma unroll
    for (int octet = 0; octet < Config::octets; ++octet)
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int plane = slice * Config::slice_bytes + octet * Config::octet_bytes;
        const int position = Cross ? i : Config::pair_shift(i);
        const int step = (Cross ? 0 : Config::cross_steps) + octet * count + i;
#pragma unroll
        for (int rank = 0; rank < Config::slots_of(slice); ++rank) {
          const int column = 2 * step * Config::columns_of(slice) + rank * Config::slot_columns;
          wgmma_product_of<Config::slot_columns>(
              typename Config::Math{}, part.columns[Config::slot_of(slice, rank)],
              rows + (plane + 16 * position) / 16,
              columns + Config::weights_before(slice) / 16 + column);
        }
      }
  }
}

template <typename Config>
struct FusedGroup {
  int group;
};

/// Sums of a warpgroup's rows, and how they leave.
template <typename Config>
struct RowOutputs : WhereFused<FusedGroup<Config>> {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  using Part = RowSums<Config, Config::kernel1>;
  using Sums = RowSums<Config, Config::kept>;
  static constexpr int slots0 = Config::Axis0::slots;
  static constexpr int kept = Config::kept;
  static constexpr uint32_t size = sizeof(Storage);

  const RowsArguments<Config>& arguments;
  int first_channel;
  int64_t line, plane, half_step;  // of the target: to the next row, slice, four channels on
  float bias[2];                   // by half of the channels
  Sums sum[Config::blocks];
  int width;      // of the target, from this lane's first unit on
  int first0;     // slice
  int in_tile;    // this lane's first unit
  Storage* to;    // the first row that the next source row reaches, of this lane's first channel and unit
  RowStreams<Config> streams;

  CONVT3D_DEVICE RowOutputs(const RowsArguments<Config>& arguments_, int group, int column_tile,
                            int warp, int lane, const RowStreams<Config>& streams_)
      : arguments(arguments_),
        first_channel(column_tile * Config::column_tile + lane % 4),
        in_tile(16 * warp + lane / 4),
        streams(streams_) {
    if constexpr (Fusion::runs) this->held = {group};
    line = own_offset(int64_t(arguments.target_extent[2]));
    plane = own_offset(arguments.target_extent[1] * line);
    half_step = own_offset(4 * arguments.target_extent[0] * plane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int channel = first_channel + 4 * half;
      bias[half] = Config::bias && channel < Config::target_channels
                       ? Type::load(__ldg(arguments.bias + group * Config::target_channels + channel))
                       : 0.f;
    }
  }
  CONVT3D_DEVICE void begin(const RowRuns<Config>& run, int group) {
#pragma unroll
    for (Sums& each : sum) each.clear();
    const int first = Config::slots2 * (run.first2 + in_tile);
    width = arguments.target_extent[2] - first;
    first0 = run.unit0 * slots0;
    to = arguments.target +
         ((int64_t(run.sample) * Config::groups + group) * Config::target_channels + first_channel) *
             (arguments.target_extent[0] * plane) +
         first0 * plane + (run.begin * Config::stride1 - Config::padding1) * line +
         (Config::streams ? 0 : first);
    constexpr int own = Config::groups * Config::target_channels;
    if constexpr (tensor_channels(own) != own)
      to += run.sample * (tensor_channels(own) - own) * (arguments.target_extent[0] * plane);
  }
  /// Before a source row's blocks.
  CONVT3D_DEVICE void lay_out(int row) {
    if constexpr (Config::streams) {
      const int outside = max(Config::padding1 - row * Config::stride1, 0);
#pragma unroll
      for (int slot0 = 0; slot0 < slots0; ++slot0)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int stream = slot0 * Config::column_tile + int(threadIdx.x % 4) + 4 * half;
          laid_out[slot0][half] =
              streams.buffer(stream, streams.steps) +
              RowStreams<Config>::phase(to + (half * half_step + slot0 * plane + outside * line)) +
              size * uint32_t(Config::slots2 * in_tile - outside * arguments.target_extent[2]);
        }
    }
  }
  /// Adds a row's products of a block of units, where there are some, takes leave of the rows
  /// that are complete, if these are this run's, and moves the others up.
  template <bool Products>
  CONVT3D_DEVICE void complete(int block, int row, bool leave, const Part& part,
                               const float (&factor)[2]) {
    const int first1 = row * Config::stride1 - Config::padding1;
#pragma unroll
    for (int slot0 = 0; slot0 < slots0; ++slot0)
#pragma unroll
      for (int reached = 0; reached < kept + Config::stride1; ++reached) {
        const int tap = Products ? Config::tap_of(reached) : -1;
        const bool leaves = reached < Config::stride1;
        const bool exists =
            leave && unsigned(first1 + reached) < unsigned(arguments.target_extent[1]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float value[2][2];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int rest = i / 2, slot2 = i % 2;
            float(&sums)[sizeof(Sums::columns[0]) / sizeof(float)] = sum[block].columns[slot0];
            float v = reached < kept ? sums[Sums::index(reached, half, rest, slot2)] : 0.f;
            if (tap >= 0)
              v += part.columns[slot0][Sums::index(tap, half, rest, slot2)] * factor[half];
            if (!leaves) sums[Sums::index(reached - Config::stride1, half, rest, slot2)] = v;
            value[rest][slot2] = Config::bias ? v + bias[half] : v;
          }
          if (!leaves || !exists) continue;
          const int first = 64 * Config::slots2 * block;
          if constexpr (Fusion::runs) fuse(value, slot0, reached, half, first);
          if constexpr (Config::streams) {
            const uint32_t address =
                laid_out[slot0][half] + size * uint32_t(reached * arguments.target_extent[2]);
            stage(address, first, value[0]);
            stage(address, first + 16, value[1]);
          } else {
            const bool produced = first0 + slot0 < arguments.target_extent[0] &&
                                  first_channel + 4 * half < Config::target_channels;
            Storage* const at = to + (slot0 * plane + reached * line) + half * half_step;
#pragma unroll
            for (int rest = 0; rest < 2; ++rest)
              if (produced && 16 * rest < width)
                store_two<Type>(at + 16 * rest, value[rest][0], value[rest][1]);
          }
        }
      }
  }
  /// Behind all blocks of a row: of a run from `run.store` to `run.last`.
  CONVT3D_DEVICE void advance(int row, const RowRuns<Config>& run) {
    if constexpr (Config::streams) {
      if (row >= run.store) {
        const int first1 = row * Config::stride1 - Config::padding1, outside = max(-first1, 0);
        const int rows = min(Config::stride1, arguments.target_extent[1] - first1) - outside;
        const int64_t volume = arguments.target_extent[0] * plane;
        const int lane4 = threadIdx.x % 4;
        streams.send(rows * int(line) * int(sizeof(Storage)), row == run.store, row + 1 == run.last,
                     [&](int stream) -> Storage* {
                       const int slot0 = stream / Config::column_tile;
                       const int further = stream % Config::column_tile - lane4;
                       if (first0 + slot0 >= arguments.target_extent[0] ||
                           first_channel + further >= Config::target_channels)
                         return nullptr;
                       return to + further * volume + slot0 * plane + outside * line;
                     });
      }
    }
    to += Config::stride1 * line;
  }

 private:
  // Where a source row's first row of the target is laid out, from this lane's first unit on.
  uint32_t laid_out[slots0][2];

  /// The steps of the fusion on a lane's outputs of a row, `first` elements from the lane's first.
  CONVT3D_DEVICE void fuse(float (&value)[2][2], int slot0, int reached, int half,
                           int first) const {
    const int channel = first_channel + 4 * half;
    const bool produced = first0 + slot0 < arguments.target_extent[0] &&
                          channel < Config::target_channels;
    // Of streams, `to` is the first element of a row, not this lane's.
    const int lead = first + (Config::streams ? arguments.target_extent[2] - width : 0);
    const int64_t at =
        to - arguments.target + (slot0 * plane + reached * line) + half * half_step + lead;
#pragma unroll
    for (int rest = 0; rest < 2; ++rest)
#pragma unroll
      for (int slot2 = 0; slot2 < 2; ++slot2) {
        const int beside = 16 * rest + slot2;
        value[rest][slot2] = fused<Config>(arguments.fusion, value[rest][slot2], this->held.group, channel,
                                           at + beside, produced && first + beside < width);
      }
  }

  /// Lays out two neighbours of a row, as far as they exist.
  CONVT3D_DEVICE void stage(uint32_t address, int at, const float (&value)[2]) const {
    const uint32_t word = Type::pack(value[0], value[1]);
    if (at < width) store_shared_half(address + size * at, uint16_t(word));
    if (at + 1 < width) store_shared_half(address + size * (at + 1), uint16_t(word >> 16));
  }
};

template <typename Config>
CONVT3D_DEVICE void consume_rows(uint32_t stages, uint32_t barriers, uint32_t scales, uint32_t weights,
                                 RowRuns<Config> runs, RowOutputs<Config>& outputs, int group, int lane) {
  using Part = RowSums<Config, Config::kernel1>;
  Ring<Config::ring> ring(barriers);
  float channel_scale[2] = {1.f, 1.f};
  if constexpr (Config::in_f16x3) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      channel_scale[half] =
          float_of(load_shared(weights + Config::weight_bytes() + 4 * (lane % 4 + 4 * half)));
  }
  while (runs.advance()) {
    outputs.begin(runs, group);
    const int end = runs.rows_end();
#pragma unroll 1
    for (int row = runs.begin; row < runs.last; ++row) {
      const bool leave = row >= runs.store;
      outputs.lay_out(row);
      if (row < end) {
        ring.wait_full();
        float factor[2] = {1.f, 1.f};
        if constexpr (Config::in_f16x3) {
          const float scale = float_of(load_shared(scales + 4 * ring.stage));
#pragma unroll
          for (int half = 0; half < 2; ++half) factor[half] = scale * channel_scale[half];
        }
#pragma unroll
        for (int block = 0; block < Config::blocks; ++block) {
          const uint32_t rows = stages + ring.stage * Config::stage_bytes + block * 64 * 16;
          Part part;
          part.clear();
          part.fence();
          wgmma_fence();
          // Crosswise products are 2^-11 of the others: they come first.
          if constexpr (Config::in_f16x3) multiply_row<Config, true>(part, rows, weights);
          multiply_row<Config, false>(part, rows, weights);
          wgmma_commit();
          wgmma_wait<0>();
          part.fence();
          if (block + 1 == Config::blocks) {
            mbarrier_arrive(ring.empty(ring.stage));
            ring.advance();
          }
          outputs.template complete<true>(block, row, leave, part, factor);
        }
      } else {
        // Behind the last source row.
#pragma unroll
        for (int block = 0; block < Config::blocks; ++block)
          outputs.template complete<false>(block, row, leave, {}, {});
      }
      outputs.advance(row, runs);
    }
  }
  if constexpr (Config::streams) outputs.streams.finish();
}

}  // namespace convt3d
