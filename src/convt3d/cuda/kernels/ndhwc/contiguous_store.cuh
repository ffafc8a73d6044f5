// The epilogue of ndhwc/kernel.cu where the target is contiguous: each warp alone stages the
// outputs of its 16 rows of a block, for one slot of D and H and some columns at a time, a column a
// line. The slots of W of neighbouring units are neighbours in memory: one to eight rows are 16
// bytes, which a lane stores where rows follow one another and the target's lines are aligned.
// Elsewhere a lane stores an element.
#pragma once
#include "ndhwc/outputs.cuh"

namespace convt3d {

template <typename Config>
struct NdhwcContiguousStore : NdhwcOutputs<Config> {
  using Base = NdhwcOutputs<Config>;
  using typename Base::Row;
  using typename Base::Storage;
  using typename Base::Type;
  using Base::a;
  using Base::Base;
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
  static constexpr int outputs = 16 * slots2;  // of a staged column
  static constexpr int piece_rows = Config::vector / slots2;
  static constexpr int pieces = 16 / piece_rows;  // of a column

  CONVT3D_DEVICE void operator()(const WorkTile& work, const NdhwcSums<Config>& sum) const {
    store<0>(work, sum);
  }

 private:
  /// Blocks from one on, by recursion: as a loop, their sums would be in local memory.
  template <int Block>
  CONVT3D_DEVICE void store(const WorkTile& work, const NdhwcSums<Config>& sum) const {
    if (lane < 16)
      locate(work, Config::warpgroup_rows * warpgroup + 64 * Block + 16 * warp + lane);
    __syncwarp();
    const bool whole = aligned() && rows_follow();
#pragma unroll
    for (int slot0 = 0; slot0 < slots0; ++slot0)
#pragma unroll
      for (int slot1 = 0; slot1 < slots1; ++slot1)
#pragma unroll
        for (int first = 0; first < Config::stored_columns; first += Config::staged_columns) {
#pragma unroll
          for (int slot2 = 0; slot2 < slots2; ++slot2)
            stage(work, slot2, sum[slot0][slot1][slot2][Block], first, slot0, slot1);
          __syncwarp();
          if (whole)
            send_pieces(work, slot0, slot1, first);
          else
            send_elements(work, slot0, slot1, first);
          __syncwarp();
        }
    if constexpr (Block + 1 < Config::blocks) store<Block + 1>(work, sum);
  }

  /// Whether all lines of outputs begin at multiples of 16 bytes, and so do the channels.
  CONVT3D_DEVICE bool aligned() const {
    return a.target.extent[2] % Config::vector == 0 &&
           reinterpret_cast<uint64_t>(a.target.data) % 16 == 0;
  }
  /// Whether the rows of every piece are neighbours and have all of their slots, or none.
  CONVT3D_DEVICE bool rows_follow() const {
    const Row own = row(lane % 16), next = row(min(lane % 16 + 1, 15));
    const bool last = lane % piece_rows == piece_rows - 1;
    const bool follows = last || (own.limits == next.limits &&
                                  (own.limits == 0 || next.at == own.at + slots2));
    const int there = int(own.limits >> 16);
    const bool begins = lane % piece_rows > 0 || own.limits == 0 || own.at % Config::vector == 0;
    return __all_sync(0xffffffffu, follows && begins && (there == 0 || there == slots2));
  }

  /// Some columns from `begin` on, [column][row][slot of W].
  CONVT3D_DEVICE void stage(const WorkTile& work, int slot2, const float (&sum)[Config::sums],
                            int begin, int slot0, int slot1) const {
    const int first = first_column(work) + begin;
#pragma unroll
    for (int eight = 0; eight < Config::staged_columns; eight += 8)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = eight + 2 * (lane % 4) + i;
        const float add = bias_of(work, first + column);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int number = lane / 4 + 8 * half;
          float value = sum[(begin + eight) / 2 + 2 * half + i] + add;
          if constexpr (Fusion::runs)
            value = fuse(work, value, first + column, number, slot0, slot1, slot2);
          store_shared(staged + column * Config::column_pitch +
                           (number * slots2 + slot2) * Config::element_bytes,
                       Type::store(value));
        }
      }
  }

  CONVT3D_DEVICE void send_pieces(const WorkTile& work, int slot0, int slot1, int first) const {
    static_assert(32 % pieces == 0, "a lane stores the same rows of all its columns");
    const int piece = lane % pieces;
    const Row own = row(piece * piece_rows);
    const bool exists = own.has(slot0, slot1, 0);
#pragma unroll 4
    for (int begin = 0; begin < Config::staged_columns; begin += 32 / pieces) {
      const int column = begin + lane / pieces;
      const int channel = first_column(work) + first + column;
      if (!exists || column >= Config::staged_columns || channel >= end_column(work)) continue;
      uint32_t v[4];
      load_shared(staged + column * Config::column_pitch + piece * 16, v[0], v[1], v[2], v[3]);
      store_streaming(reinterpret_cast<uint4*>(a.target.data + own.at +
                                               offset(channel, slot0, slot1, 0)),
                      make_uint4(v[0], v[1], v[2], v[3]));
    }
  }

  CONVT3D_DEVICE void send_elements(const WorkTile& work, int slot0, int slot1, int first) const {
#pragma unroll 4
    for (int index = lane; index < outputs * Config::staged_columns; index += 32) {
      const int column = index / outputs, output = index % outputs;
      const int channel = first_column(work) + first + column;
      const Row own = row(output / slots2);
      if (!own.has(slot0, slot1, output % slots2) || channel >= end_column(work)) continue;
      const uint32_t from = staged + column * Config::column_pitch + output * Config::element_bytes;
      Storage* to = a.target.data + own.at + offset(channel, slot0, slot1, output % slots2);
      // To stay in L2, where other warps fill the sectors up.
      if constexpr (Config::element_bytes == 2)
        *to = uint16_t(load_shared_half(from));
      else
        *to = float_of(load_shared(from));
    }
  }
};

}  // namespace convt3d
