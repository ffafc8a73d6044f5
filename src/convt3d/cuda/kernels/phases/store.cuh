// The epilogue of phases/kernel.cu: bias, conversion, and stores that follow the layout.
//
//   channels_last  straight from registers: a lane owns two neighbouring channels of a position
//   contiguous     a few columns of one slot of axis 0 at a time are laid out in shared memory, each
//                  output as far from the warpgroup's first one as in the target, modulo 16 bytes;
//                  from there runs leave, eight lanes each, by stores of 16 bytes, but for the few
//                  elements at both ends that share 16 bytes with others
//
// A run is a row of W, or all rows of a slice where a tile is as wide as the target. Warpgroups
// stage their own outputs.
#pragma once
#include "device/barrier.cuh"
#include "phases/runs.cuh"

namespace convt3d {

template <typename Config>
struct PhasesStore : PhasesRuns<Config> {
  using Base = PhasesRuns<Config>;
  using typename Base::Outputs;
  using typename Base::Run;
  using typename Base::Storage;
  using typename Base::Type;
  using typename Base::Units;
  using Base::arguments;
  using Base::bias_of;
  using Base::element;
  using Base::outputs;
  using Base::row_of;
  using Base::run;
  using Base::runs;
  using Base::slots0;
  using Base::slots1;
  using Base::slots2;
  using Base::thread;
  using Base::units;
  using Base::warpgroup;
  using Sums = float[slots0][slots1][slots2][Config::blocks][Config::sums];
  static constexpr int vector = 16 / int(sizeof(Storage));

  static constexpr int staged_columns = Config::staged_columns;
  static constexpr int staging_buffers = 2;  // one is written while the other is read

  uint32_t shared_base;
  uint32_t table_base, buffers;  // of the warpgroup, in shared memory
  int buffer = 0, parity = 0;

  CONVT3D_DEVICE PhasesStore(const PhasesArguments<Storage>& arguments_, const Units& units_,
                             uint32_t shared, int warpgroup_)
      : Base(arguments_, units_, warpgroup_), shared_base(shared) {
    const int tables = 2 * arguments.most_runs * 16;
    table_base = shared + arguments.staging_offset + warpgroup * tables;
    buffers = shared + arguments.staging_offset + Config::consumers * tables +
              warpgroup * staging_buffers * buffer_bytes();
  }
  CONVT3D_DEVICE uint32_t buffer_bytes() const {
    return staged_columns * arguments.staged_column * int(sizeof(Storage));
  }

  CONVT3D_DEVICE void operator()(const WorkTile& work, const Sums& sum) {
    if constexpr (Config::target_channels_last)
      channels_last(work, sum);
    else
      contiguous(work, sum);
  }

 private:
  // ------------------------------------------------------------ contiguous

  /// The runs of a work tile, worked out once: 24 bits of the start's word hold the slots.
  CONVT3D_DEVICE uint32_t table(int parity) const {
    return table_base + (parity * arguments.most_runs) * 16;
  }
  CONVT3D_DEVICE void list_runs(const WorkTile& work, int count) const {
    for (int number = thread; number < count; number += 128) {
      const Run r = run(work, number);
      store_shared(table(parity) + 16 * number, uint32_t(r.start),
                   uint32_t(r.start >> 32) | uint32_t(r.slots) << 24, uint32_t(r.staged),
                   uint32_t(r.length));
    }
  }
  CONVT3D_DEVICE Run listed(int number) const {
    uint32_t low, high, staged, length;
    load_shared(table(parity) + 16 * number, low, high, staged, length);
    return {int64_t(high & 0xffffffu) << 32 | low, int(staged), int(length), int(high >> 24)};
  }

  CONVT3D_DEVICE void contiguous(const WorkTile& work, const Sums& sum) {
    const auto& target = arguments.target;
    const uint32_t volume = uint32_t(target.volume());
    // The column that this lane's pairs begin with, and its first output's element of the target.
    const int lane_column = 2 * (thread % 4);
    const uint32_t origin = uint32_t(element(work, outputs(work, 0))) + lane_column * volume;
    const int count = runs();
    list_runs(work, count);
    // Work tiles of phases without taps, which hold nothing but the bias, need no staging.
    if constexpr (Base::empty_phases)
      if (work.taps_of_chunk() == 0) {
        named_barrier_sync(1 + warpgroup, 128);
#pragma unroll 1
        for (int first = 0; first < Config::column_tile; first += staged_columns)
          for (int slot0 = 0; slot0 < slots0; ++slot0) send<true>(work, 0, slot0, first, count);
        parity ^= 1;
        return;
      }
    // Of this lane's units: places in a staged column, and slots along axis 2; 0 where there is
    // none.
    int place[Config::blocks][2], fits[Config::blocks][2];
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(block, half);
        place[block][half] = units.staged(row) * int(sizeof(Storage));
        fits[block][half] = outputs(work, row).fits[2];
      }
#pragma unroll
    for (int slot0 = 0; slot0 < slots0; ++slot0)
#pragma unroll
      for (int first = 0; first < Config::column_tile; first += staged_columns) {
        const uint32_t staging = buffers + buffer * buffer_bytes();
        buffer = buffer + 1 == staging_buffers ? 0 : buffer + 1;
        uint32_t to[staged_columns / 8][2];
        float bias[staged_columns / 8][2];
#pragma unroll
        for (int eight = 0; eight < staged_columns / 8; ++eight)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int column = 8 * eight + i;
            const uint32_t lead =
                (origin + (first + column) * volume + slot0 * target.stride0) % vector;
            to[eight][i] = staging + ((column + lane_column) * arguments.staged_column + lead) *
                                         int(sizeof(Storage));
            bias[eight][i] = bias_of(
                work, work.column_tile * Config::column_tile + first + column + lane_column);
          }
#pragma unroll
        for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (fits[block][half] <= 0) continue;
#pragma unroll
            for (int eight = 0; eight < staged_columns / 8; ++eight)
#pragma unroll
              for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int slot1 = 0; slot1 < slots1; ++slot1) {
                  const uint32_t at = to[eight][i] + place[block][half] +
                                      slot1 * arguments.staged_row * int(sizeof(Storage));
#pragma unroll
                  for (int slot2 = 0; slot2 < slots2; ++slot2) {
                    const float value =
                        sum[slot0][slot1][slot2][block][first / 2 + 4 * eight + 2 * half + i];
                    float output = Config::bias ? value + bias[eight][i] : value;
                    if constexpr (Fusion::runs)
                      output = Base::fuse(work, output,
                                          work.column_tile * Config::column_tile + first +
                                              8 * eight + i + lane_column,
                                          row_of(block, half), slot0, slot1, slot2);
                    // Beyond the end of a row the next one begins.
                    if (slot2 == 0 || slot2 < fits[block][half])
                      put(at + slot2 * int(sizeof(Storage)), output);
                  }
                }
          }
        named_barrier_sync(1 + warpgroup, 128);
        send<false>(work, staging, slot0, first, count);
      }
    parity ^= 1;
  }

  CONVT3D_DEVICE static void put(uint32_t address, float value) {
    if constexpr (sizeof(Storage) == 4)
      store_shared(address, bits_of(value));
    else
      store_shared_half(address, Type::store(value));
  }

  /// Sends the runs of a round's columns, eight lanes each, every lane in one column: what is
  /// staged, or the bias.
  template <bool Constant>
  CONVT3D_DEVICE void send(const WorkTile& work, uint32_t staging, int slot0, int first_column,
                           int count) const {
    extern __shared__ __align__(128) unsigned char shared[];
    static_assert(16 % staged_columns == 0, "sixteen groups of lanes");
    constexpr int alignment = 2 * vector;  // stores begin with a sector
    const int part = thread % 8;
    const int column = thread / 8 % staged_columns;
    const int channel = first_column + column;
    if (work.column_tile * Config::column_tile + channel >= Config::target_channels) return;
    const int in_group = work.column_tile * Config::column_tile + channel;
    float constant = bias_of(work, in_group);
    if constexpr (Constant && Fusion::runs && !Fusion::by_element)
      constant = Base::fuse(work, constant, in_group, arguments.target.data);
    const Storage value = Type::store(constant);
    const int64_t offset =
        channel * arguments.target.volume() + int64_t(slot0) * arguments.target.stride0;
#pragma unroll 1
    for (int number = thread / 8 / staged_columns; number < count; number += 16 / staged_columns) {
      const Run r = listed(number);
      if (slot0 >= r.slots) continue;
      const int64_t start = r.start + offset;
      if constexpr (Constant && Fusion::by_element) {
        Storage* to = arguments.target.data + start;
        for (int at = part; at < r.length; at += 8)
          store_streaming(to + at, Type::store(Base::fuse(work, constant, in_group, to + at)));
        continue;
      }
      const int lead = int(uint32_t(start - r.staged) % vector);
      const int from = column * arguments.staged_column + lead + r.staged;
      Storage* to = arguments.target.data + start;
      const int head = min(int(uint32_t(-start) % alignment), r.length);
      const int whole = head + (r.length - head) / vector * vector;
      copy_vectors<Constant>(to, staging + from * int(sizeof(Storage)), value, head + part * vector,
                             whole);
      const Storage* staged =
          reinterpret_cast<const Storage*>(shared + (staging - shared_base)) + from;
      const auto output = [&](int at) { return Constant ? value : staged[at]; };
      // Fewer than a sector, and than a vector.
#pragma unroll
      for (int at = 0; at < alignment; at += 8)
        if (at + part < head) store_streaming(to + at + part, output(at + part));
      if (whole + part < r.length) store_streaming(to + whole + part, output(whole + part));
    }
  }

  /// Every eighth vector from `begin` to `end`, elements of a run; four on their way at once.
  template <bool Constant>
  CONVT3D_DEVICE static void copy_vectors(Storage* to, uint32_t from, Storage value, int begin,
                                          int end) {
    constexpr int ways = 4, step = 8 * vector;
    uint32_t all;
    if constexpr (sizeof(Storage) == 4)
      all = bits_of(value);
    else
      all = value * 0x10001u;
#pragma unroll 1
    for (int at = begin; at < end; at += ways * step) {
      uint32_t word[ways][4];
#pragma unroll
      for (int i = 0; i < ways; ++i)
        if constexpr (Constant)
          word[i][0] = word[i][1] = word[i][2] = word[i][3] = all;
        else if (at + i * step < end)
          load_shared(from + (at + i * step) * int(sizeof(Storage)), word[i][0], word[i][1],
                      word[i][2], word[i][3]);
#pragma unroll
      for (int i = 0; i < ways; ++i)
        if (at + i * step < end)
          store_streaming(reinterpret_cast<uint4*>(to + at + i * step),
                          make_uint4(word[i][0], word[i][1], word[i][2], word[i][3]));
    }
  }

  // ------------------------------------------------------------ channels_last

  CONVT3D_DEVICE void channels_last(const WorkTile& work, const Sums& sum) const {
    constexpr bool together = Config::all_channels % 2 == 0 && Config::target_channels % 2 == 0;
    const auto& target = arguments.target;
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Outputs o = outputs(work, row_of(block, half));
        const int64_t position = int64_t(o.sample) * target.volume() +
                                 int64_t(o.first[0]) * target.stride0 +
                                 int64_t(o.first[1]) * target.stride1 + o.first[2];
        Storage* base = target.data + position * Config::all_channels +
                        work.group * Config::target_channels;
#pragma unroll
        for (int eight = 0; eight < Config::column_tile / 8; ++eight) {
          const int channel =
              work.column_tile * Config::column_tile + 8 * eight + 2 * (thread % 4);
          const float bias[2] = {bias_of(work, channel), bias_of(work, channel + 1)};
#pragma unroll
          for (int slot0 = 0; slot0 < slots0; ++slot0)
#pragma unroll
            for (int slot1 = 0; slot1 < slots1; ++slot1)
#pragma unroll
              for (int slot2 = 0; slot2 < slots2; ++slot2) {
                if (slot0 >= o.fits[0] || slot1 >= o.fits[1] || slot2 >= o.fits[2]) continue;
                const float* c = &sum[slot0][slot1][slot2][block][4 * eight + 2 * half];
                Storage* to = base + channel +
                              (int64_t(slot0) * target.stride0 + slot1 * target.stride1 + slot2) *
                                  Config::all_channels;
                if constexpr (Fusion::runs) {
                  float output[2];
#pragma unroll
                  for (int i = 0; i < 2; ++i)
                    if (channel + i < Config::target_channels)
                      output[i] = Base::fuse(work, c[i] + bias[i], channel + i, to + i);
                  store_channels<Type, together>(to, output, Config::target_channels - channel);
                } else if constexpr (together) {
                  if (channel < Config::target_channels)
                    store_two<Type>(to, c[0] + bias[0], c[1] + bias[1]);
                } else {
#pragma unroll
                  for (int i = 0; i < 2; ++i)
                    if (channel + i < Config::target_channels)
                      store_streaming(to + i, Type::store(c[i] + bias[i]));
                }
              }
        }
      }
  }
};

}  // namespace convt3d
