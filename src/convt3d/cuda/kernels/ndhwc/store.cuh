// The epilogue of channels_last layers: each warp alone stages the outputs of its 16 rows
// of a block, for one slot of D and H at a time, and stores them as 16 bytes a lane. The slots of
// W and the channels of a unit are neighbours in memory, and so are units along W.
#pragma once
#include "ndhwc/outputs.cuh"

namespace convt3d {

template <typename Config>
struct NdhwcStore : NdhwcOutputs<Config> {
  using Base = NdhwcOutputs<Config>;
  using typename Base::Row;
  using typename Base::Storage;
  using typename Base::Type;
  using Base::a;
  using Base::Base;
  using Base::beyond0;
  using Base::beyond1;
  using Base::beyond2;
  using Base::bias_of;
  using Base::end_column;
  using Base::first_column;
  using Base::fuse;
  using Base::lane;
  using Base::locate;
  using Base::offset;
  using Base::row;
  using Base::slots0;
  using Base::slots1;
  using Base::slots2;
  using Base::staged;
  using Base::table;
  using Base::warp;
  using Base::warpgroup;
  static constexpr int pieces = Config::row_bytes / 16;  // of a row
  static constexpr int slot_pieces = pieces / slots2;
  static constexpr int rounds = div_up(16 * pieces, 32);
  static constexpr int batch = rounds < 4 ? rounds : 4;
  /// Places that registers hold for all slots of D and H.
  static constexpr int kept = rounds <= 4 && slots0 * slots1 > 1 ? rounds : 1;

  CONVT3D_DEVICE void operator()(const WorkTile& work, const NdhwcSums<Config>& sum) const {
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block) {
      uint32_t limits = 0;
      if (lane < 16)
        limits = locate(work, Config::warpgroup_rows * warpgroup + 64 * block + 16 * warp + lane);
      // Whether any row of the warp has slots beyond its unit's.
      const bool more0 = beyond0 && __any_sync(0xffffffffu, int(limits & 0xff) > slots0);
      const bool more1 = beyond1 && __any_sync(0xffffffffu, int(limits >> 8 & 0xff) > slots1);
      const bool more2 = beyond2 && __any_sync(0xffffffffu, int(limits >> 16) > slots2);
      __syncwarp();
      Place places[kept];
      if constexpr (kept == rounds) {
#pragma unroll
        for (int round = 0; round < rounds; ++round) places[round] = place_of(work, round);
      }
#pragma unroll
      for (int slot0 = 0; slot0 < slots0 + beyond0; ++slot0) {
        if (slot0 >= slots0 && !more0) continue;
#pragma unroll
        for (int slot1 = 0; slot1 < slots1 + beyond1; ++slot1) {
          if (slot1 >= slots1 && !more1) continue;
          const bool used = slot0 < slots0 && has_tap<typename Config::Inner0>(slot0) &&
                            slot1 < slots1 && has_tap<typename Config::Inner1>(slot1);
#pragma unroll
          for (int first = 0; first < Config::stored_columns; first += Config::staged_columns) {
#pragma unroll
            for (int slot2 = 0; slot2 < slots2; ++slot2)
              stage(work, slot2, sum[slot0 % slots0][slot1 % slots1][slot2][block], first,
                    used && has_tap<typename Config::Inner2>(slot2), slot0, slot1);
            __syncwarp();
            send(work, places, slot0, slot1, first);
            if constexpr (beyond2 > 0) {
              if (more2) send_beyond(work, slot0, slot1, first);
            }
            __syncwarp();
          }
        }
      }
    }
  }

 private:
  /// Some columns from `begin` on.
  CONVT3D_DEVICE void stage(const WorkTile& work, int slot2, const float (&sum)[Config::sums],
                            int begin, bool used, int slot0, int slot1) const {
    const int first = first_column(work) + begin + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < Config::staged_columns / 8; n += 2) {
      float value[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float add = bias_of(work, first + 8 * (n + half) + i);
          value[half][i] = (used ? sum[begin / 2 + 4 * (n + half) + i] : 0.f) + add;
          value[half][2 + i] = (used ? sum[begin / 2 + 4 * (n + half) + 2 + i] : 0.f) + add;
          if constexpr (Fusion::runs) {
#pragma unroll
            for (int lower = 0; lower < 2; ++lower) {
              float& output = value[half][2 * lower + i];
              output = fuse(work, output, first + 8 * (n + half) + i, lane / 4 + 8 * lower, slot0,
                            slot1, slot2);
            }
          }
        }
      const int column = slot2 * Config::staged_columns + 8 * n;
      if constexpr (Config::element_bytes == 2) {
        const uint32_t word[4] = {
            Type::pack(value[0][0], value[0][1]), Type::pack(value[0][2], value[0][3]),
            Type::pack(value[1][0], value[1][1]), Type::pack(value[1][2], value[1][3])};
        store_matrix_x4(staged + lane % 16 * Config::row_pitch + column * 2 + lane / 16 * 16, word);
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            store_shared(staged + (lane / 4 + 8 * i) * Config::row_pitch +
                             (column + 8 * half + 2 * (lane % 4)) * 4,
                         bits_of(value[half][2 * i]), bits_of(value[half][2 * i + 1]));
      }
    }
  }

  /// Where a lane's piece of 16 bytes goes, from the first slot of D and H on.
  struct Place {
    Storage* to;
    int slots0, slots1;  // that exist, if this piece's slot of W does
    int column;
  };
  CONVT3D_DEVICE Place place_of(const WorkTile& work, int round) const {
    const int index = 32 * round + lane;
    const int number = index / pieces, piece = index % pieces;
    const int slot2 = piece / slot_pieces;
    const int column = first_column(work) + piece % slot_pieces * Config::vector;
    const Row own = row(min(number, 15));
    const bool there = slot2 < int(own.limits >> 16) && (16 * pieces % 32 == 0 || number < 16);
    return {a.target.data + own.at + offset(column, 0, 0, slot2),
            there ? int(own.limits & 0xff) : 0, int(own.limits >> 8 & 0xff), column};
  }

  /// Slots of W beyond a unit's, which are as its first ones: without taps.
  CONVT3D_DEVICE void send_beyond(const WorkTile& work, int slot0, int slot1, int first) const {
#pragma unroll 1
    for (int index = lane; index < 16 * beyond2 * slot_pieces; index += 32) {
      const int row = index / (beyond2 * slot_pieces);
      const int slot2 = index / slot_pieces % beyond2, piece = index % slot_pieces;
      const int column = first_column(work) + first + piece * Config::vector;
      uint32_t low, high, limits, nothing, v[4];
      load_shared(table + 16 * row, low, high, limits, nothing);
      load_shared(staged + row * Config::row_pitch + (slot2 * slot_pieces + piece) * 16, v[0],
                  v[1], v[2], v[3]);
      const int64_t position = (int64_t(slot0) * a.target.extent[1] + slot1) * a.target.extent[2] +
                               slots2 + slot2;
      const bool exists = slot0 < int(limits & 0xff) && slot1 < int(limits >> 8 & 0xff) &&
                          slots2 + slot2 < int(limits >> 16) && column < end_column(work);
      if constexpr (Fusion::by_element) {
        Storage* to = a.target.data + int64_t(uint64_t(high) << 32 | low) +
                      position * Config::all_channels + column;
        for (int i = 0; i < (exists ? Config::vector : 0); ++i)
          store_streaming(to + i, Type::store(fuse(work, bias_of(work, column + i), column + i, row,
                                                   slot0, slot1, slots2 + slot2)));
        continue;
      }
      if (exists)
        store_streaming(reinterpret_cast<uint4*>(a.target.data + int64_t(uint64_t(high) << 32 | low) +
                                                 position * Config::all_channels + column),
                        make_uint4(v[0], v[1], v[2], v[3]));
    }
  }

  /// A batch of pieces is on its way before the first one is stored.
  CONVT3D_DEVICE void send(const WorkTile& work, const Place (&places)[kept], int slot0, int slot1,
                           int column) const {
    const int64_t slot = offset(column, slot0, slot1, 0);
#pragma unroll
    for (int first = 0; first < rounds; first += batch) {
      uint32_t v[batch][4];
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        const int index = 32 * (first + i) + lane;
        const int row = 16 * pieces % 32 == 0 ? index / pieces : min(index / pieces, 15);
        if (first + i < rounds)
          load_shared(staged + row * Config::row_pitch + index % pieces * 16, v[i][0], v[i][1],
                      v[i][2], v[i][3]);
      }
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        if (first + i >= rounds) continue;
        const Place place = kept == rounds ? places[(first + i) % kept] : place_of(work, first + i);
        if (slot0 < place.slots0 && slot1 < place.slots1 &&
            place.column + column < end_column(work))
          store_streaming(reinterpret_cast<uint4*>(place.to + slot),
                          make_uint4(v[i][0], v[i][1], v[i][2], v[i][3]));
      }
    }
  }
};

}  // namespace convt3d
