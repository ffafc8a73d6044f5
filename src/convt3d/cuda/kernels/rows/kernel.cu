// Forward pass of strided layers with few channels a group on warpgroup products of 16 bits (sm_90a):
// float16, bfloat16, and float32 split in halves of float16 (ampere/strided/f16x3.cuh says how and why).
//
// A warpgroup marches along H with 64 units of W and all slots along D of one unit. Each source row is
// multiplied with all taps along H at once, their columns side by side: a product is 64 units deep in
// rows, and reads the source as producers laid it out, 16 bytes of eight channels a position, so that a
// shift along W is another address and two shifts are one product 16 deep.
//
//     columns    [slot along D][tap along H][slot along W, channel]
//     source row h adds tap k to target row  h * stride - padding + k * dilation
//
// A row's products are added to sums that wait in registers, times the row's and the channel's scale where
// operands are halves. After it the first `stride` rows of the target are complete and leave, from registers
// or as streams (rows/streams.cuh), and the others move up.
//
//     consumers   warpgroups, each with a ring of stages of its own
//     producers   warps of a warpgroup, in turns: a stage is a source row of all channels at all slices
//                 along D, loaded value by value and transposed, scaled and split on the way
//
// What a warpgroup does is a run of rows of units, columns (sample, unit along D, tile along W) one after
// the other. Shared memory: [rings][weights][barriers, scales][streams], see WgmmaRowsShared.
#include "rows/streams.cuh"
#include "device/pipeline.cuh"
#include "device/wgmma_product.cuh"

namespace convt3d {

template <typename Config>
struct WgmmaRowsArguments {
  const typename Config::Storage* source;
  const uint32_t* weights;
  const typename Config::Storage* bias;
  typename Config::Storage* target;
  int source_extent[3], target_extent[3];
  int units0, tiles2;           // of a sample, along D and W
  int first_block, blocks;      // rows of units of a column that are stored
  int count;                    // of all columns
  int pitch;                    // bytes of a stream's buffer
};

/// Runs of rows of units, one for each column that a warpgroup's share meets.
template <typename Config>
struct RowRuns {
  const WgmmaRowsArguments<Config>& arguments;
  int next, end;
  int sample, unit0, first2;    // first2: the first unit along W
  int begin, store, last;       // source rows [begin, last); those from `store` on complete rows

  CONVT3D_DEVICE RowRuns(const WgmmaRowsArguments<Config>& arguments_, int worker, int workers)
      : arguments(arguments_) {
    next = int(int64_t(arguments.count) * worker / workers);
    end = int(int64_t(arguments.count) * (worker + 1) / workers);
  }
  CONVT3D_DEVICE bool advance() {
    if (next >= end) return false;
    const auto& a = arguments;
    const int column = next / a.blocks, block = next - column * a.blocks;
    const int stop = min(a.blocks, block + end - next);
    const int row = column / a.tiles2;
    first2 = (column - row * a.tiles2) * Config::units;
    sample = row / a.units0;
    unit0 = row - sample * a.units0;
    store = a.first_block + block;
    begin = max(store - Config::back, 0);
    last = a.first_block + stop;
    next += stop - block;
    return true;
  }
  /// Source rows that exist.
  CONVT3D_DEVICE int rows_end() const { return min(last, arguments.source_extent[1]); }
};

// ---------------------------------------------------------------- producers

/// One source row of all channels at all slices, by one warp: an item is a position of a slice.
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

  const WgmmaRowsArguments<Config>& arguments;
  int lane, items;
  int64_t volume;
  const Storage* base;     // channel 0 of a sample's group
  uint32_t from[batches * turns];  // elements from a row's begin in slice 0
  bool inside[batches * turns];
  uint32_t to[batches * turns];    // in a stage

  CONVT3D_DEVICE RowProducer(const WgmmaRowsArguments<Config>& arguments_, int lane_)
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
        if constexpr (Config::in_halves) {
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
CONVT3D_DEVICE void produce_rows(const WgmmaRowsArguments<Config>& arguments, uint32_t stages,
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
        if constexpr (Config::in_halves) {
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
        constexpr bool loaded = Config::in_halves && Config::octets * RowProducer<Config>::batches == 1;
        every_part<Config>([&](int octet, int batch) {
          if constexpr (!loaded) source.load(values, row, octet, batch);
          if (octet == 0 && batch == 0) ring.wait_empty();
          source.store(values, stages + ring.stage * Config::stage_bytes, octet, batch, scale);
        });
        if (Config::in_halves && lane == 0) store_shared(scales + 4 * ring.stage, unscale);
        fence_async_proxy();
        mbarrier_arrive(ring.full());
        turn = Config::producers;
      }
      --turn;
      ring.advance();
    }
  }
}

// ---------------------------------------------------------------- consumers

/// Sums of a lane, by slot along D: [tap along H, or row][half of the channels][half of 16 units][slot
/// along W].
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

/// Sums of a warpgroup's rows, and how they leave.
template <typename Config>
struct RowOutputs {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  using Part = RowSums<Config, Config::kernel1>;
  using Sums = RowSums<Config, Config::kept>;
  static constexpr int slots0 = Config::Axis0::slots;
  static constexpr int kept = Config::kept;
  static constexpr uint32_t size = sizeof(Storage);

  const WgmmaRowsArguments<Config>& arguments;
  int first_channel;
  int64_t line, plane, half_step;  // of the target: to the next row, slice, four channels on
  float bias[2];                   // by half of the channels
  Sums sum[Config::blocks];
  int width;      // of the target, from this lane's first unit on
  int first0;     // slice
  int in_tile;    // this lane's first unit
  Storage* to;    // the first row that the next source row reaches, of this lane's first channel and unit
  RowStreams<Config> streams;

  CONVT3D_DEVICE RowOutputs(const WgmmaRowsArguments<Config>& arguments_, int group, int column_tile,
                            int warp, int lane, const RowStreams<Config>& streams_)
      : arguments(arguments_),
        first_channel(column_tile * Config::column_tile + lane % 4),
        in_tile(16 * warp + lane / 4),
        streams(streams_) {
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
  /// Adds a row's products of a block of units, where there are some, takes leave of the rows that are
  /// complete, if these are this run's, and moves the others up.
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
  if constexpr (Config::in_halves) {
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
        if constexpr (Config::in_halves) {
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
          if constexpr (Config::in_halves) multiply_row<Config, true>(part, rows, weights);
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

template <typename Config>
CONVT3D_DEVICE void wgmma_rows(const WgmmaRowsArguments<Config>& arguments) {
  using Shared = WgmmaRowsShared<Config>;
  using Registers = RingRegisters<Config, Config::blocks == 1 ? 80 : 112>;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t shared_base = shared_address(shared);
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  const int worker = blockIdx.x / Config::teams, workers = gridDim.x / Config::teams;
  const int team = blockIdx.x % Config::teams;
  const int group = team / Config::column_tiles, column_tile = team % Config::column_tiles;
  const bool consumes = warp < Config::warps;
  const int warpgroup = consumes ? warp / 4 : (warp - Config::warps) % Config::consumers;
  const uint32_t barriers = shared_base + Shared::barriers + 16 * Config::ring * warpgroup;
  const uint32_t scales = shared_base + Shared::scales + 4 * Config::ring * warpgroup;
  const uint32_t stages = shared_base + Shared::warpgroup * warpgroup;
  const uint32_t weights_barrier = shared_base + Shared::weights_barrier;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::consumers; ++i)
      Ring<Config::ring>(shared_base + Shared::barriers + 16 * Config::ring * i)
          .init(lanes_of(1), lanes_of(4));
    mbarrier_init(weights_barrier, 1);
    mbarrier_init_fence();
  }
  // Positions behind a tile's last are read for units that do not exist.
  for (int at = 16 * threadIdx.x; at < Shared::weights; at += 16 * Config::threads)
    store_shared(shared_base + at, 0u, 0u, 0u, 0u);
  fence_async_proxy();
  __syncthreads();
  const RowRuns<Config> runs(arguments, worker * Config::consumers + warpgroup,
                             workers * Config::consumers);
  if (consumes) {
    if constexpr (Registers::multiplying > Registers::launched)
      register_increase<Registers::multiplying>();
    const uint32_t buffers = shared_base + Shared::staging +
                             uint32_t(2 * warpgroup * RowStreams<Config>::count * arguments.pitch);
    RowOutputs<Config> outputs(
        arguments, group, column_tile, warp % 4, lane,
        RowStreams<Config>(buffers, arguments.pitch, 1 + warpgroup, threadIdx.x % 128));
    mbarrier_wait(weights_barrier, 0);
    consume_rows<Config>(stages, barriers, scales, shared_base + Shared::weights, runs, outputs, group,
                         lane);
  } else {
    if constexpr (Registers::multiplying > Registers::launched)
      register_decrease<Registers::others>();
    if (warp == Config::warps && lane == 0) {
      grid_dependency_wait();
      mbarrier_expect(weights_barrier, Config::team_bytes());
      bulk_copy(shared_base + Shared::weights,
                arguments.weights + int64_t(team) * (Config::team_bytes() / 4), Config::team_bytes(),
                weights_barrier);
    }
    __syncwarp();
    produce_rows<Config>(arguments, stages, barriers, scales, runs, group,
                         (warp - Config::warps) / Config::consumers, lane);
  }
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::WgmmaRowsConfig::threads, 1)
    convt3d_rows(const convt3d::WgmmaRowsConfig::Storage* source,
                       const convt3d::uint32_t* weights,
                       const convt3d::WgmmaRowsConfig::Storage* bias,
                       convt3d::WgmmaRowsConfig::Storage* target, int source0, int source1,
                       int source2, int target0, int target1, int target2, int units0, int tiles2,
                       int first_block, int blocks, int count, int pitch) {
  const convt3d::WgmmaRowsArguments<convt3d::WgmmaRowsConfig> arguments{
      source, weights, bias, target, {source0, source1, source2}, {target0, target1, target2},
      units0, tiles2, first_block, blocks, count, pitch};
  convt3d::wgmma_rows<convt3d::WgmmaRowsConfig>(arguments);
}
