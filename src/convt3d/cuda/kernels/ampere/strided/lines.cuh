// Sources of the strided gradient whose lines have odd lengths: where a tile has whole lines,
// those of a slice and channel are one run in memory, which copies of 16 bytes bring as it lies
// there.
//
//     plane of a channel, in words:  [a window of zeros] [up to 3: the run's alignment] [line][line] ..
//
// Nothing separates lines: what lies beyond their ends, and lines outside, readers take from the
// zeros. Other tiles are copied value by value to boxes (load/box.cuh).
#pragma once
#include "ampere/strided/store.cuh"

namespace convt3d {

template <typename Config>
struct StridedLines {
  using Storage = typename Config::Storage;
  using Shared = StridedShared<Config>;
  using Box = StridedBox<Config>;
  using Work = StridedWork<Config>;
  static constexpr int margin = Config::line_margin;
  static constexpr int padding = -Config::origin2;
  static constexpr int needed = Config::Axis2::unit_source + Config::Axis2::shifts;
  static_assert(!Config::linear_lines || (padding <= margin && Config::vector == 1 &&
                                        Config::source_channels % Config::chunk_channels == 0),
                "runs are as they lie in memory");

  const StridedArguments<Config>& arguments;
  const Work& work;
  bool flat;
  int line[Config::fragments_m], column[Config::fragments_m];  // of this lane's pairs in a tile
  // Of the stage at hand:
  int first_line;
  bool live;

  CONVT3D_DEVICE StridedLines(const StridedArguments<Config>& arguments_, const Work& work_)
      : arguments(arguments_), work(work_), flat(lines_are_linear(arguments_)), first_line(0),
        live(false) {
    if (flat) {
      for (int i = threadIdx.x; i < Config::stages * Box::words * margin; i += Config::threads) {
        const int plane = i / margin;
        store_shared(work.shared_base + 4u * (plane / Box::words * Shared::stage +
                                              plane % Box::words * Box::plane_pitch + i % margin),
                     0u);
      }
    }
#pragma unroll
    for (int m = 0; m < Config::fragments_m; ++m) {
      line[m] = work.pairs[m].first ? work.pairs[m].unit1 * Config::Axis1::unit_source : 0;
      column[m] = work.pairs[m].first ? work.pairs[m].unit2 * Config::Axis2::unit_source : 0;
      column[m] += Config::origin2;
    }
  }

  CONVT3D_DEVICE int line_of(const StridedTile<Config>& tile) const {
    return tile.index[1] * arguments.tile[1] * Config::Axis1::unit_source + Config::origin1;
  }
  /// The run of a chunk's first channel in a slice that exists.
  CONVT3D_DEVICE const Storage* run(const StridedTile<Config>& tile, int slice, int chunk) const {
    const auto& source = arguments.source;
    return source.group_base(tile.sample, work.group, Config::source_channels, Box::all_channels,
                             false) +
           chunk * Config::chunk_channels * source.volume() +
           int64_t(slice) * source.stride0 + max(line_of(tile), 0) * source.stride1;
  }
  CONVT3D_DEVICE static int phase(const Storage* run) {
    return int(uint32_t(reinterpret_cast<uint64_t>(run)) / 4 % 4);
  }

  /// One chunk of a slice; each channel by one warp.
  CONVT3D_DEVICE void fill(const StridedTile<Config>& tile, int slice, int chunk,
                           int buffer) const {
    const auto& source = arguments.source;
    if (!flat) {
      work.fill.source(tile, slice, chunk, buffer);
      return;
    }
    if (unsigned(slice) >= unsigned(source.extent[0])) return;
    const int from_line = line_of(tile);
    const int last = min(from_line + work.fill.fill_box.shape.size1, source.extent[1]);
    const int length = (last - max(from_line, 0)) * source.stride1;
    const Storage* first = run(tile, slice, chunk);
#pragma unroll 1
    for (int word = work.warp; word < Box::words; word += Config::warps) {
      const Storage* from = first + word * source.volume();
      const uint32_t to = work.shared_base +
                          4u * (buffer * Shared::stage + word * Box::plane_pitch + margin +
                                phase(from));
      const int head = min((4 - phase(from)) % 4, length);
      const int whole = (length - head) / 4 * 4;
      if (work.lane < head) async_copy<4>(to + 4 * work.lane, from + work.lane, true);
      const int rest = head + whole + work.lane;
      if (rest < length) async_copy<4>(to + 4 * rest, from + rest, true);
#pragma unroll 4
      for (int i = 4 * work.lane; i < whole; i += 128)
        async_copy<16>(to + 4 * (head + i), from + head + i, true);
    }
  }

  /// Goes to a stage that was filled; returns how far this lane's rows lie from those of a box.
  CONVT3D_DEVICE uint32_t begin(const StridedTile<Config>& tile, int slice, int chunk) {
    const auto& source = arguments.source;
    live = true;
    first_line = line_of(tile);
    if (!flat) return 0;
    live = unsigned(slice) < unsigned(source.extent[0]);
    const Storage* from = run(tile, slice, chunk) + work.lane % 4 * source.volume();
    return uint32_t(4 * (margin + phase(from) + Config::origin2 +
                         min(first_line, 0) * source.stride1));
  }

  /// The window of fragment m, a shift along H from its first line; `zeros`: where this lane's
  /// first plane of the stage begins.
  CONVT3D_DEVICE void load(uint32_t (&raw)[Config::halves][Config::window], int m,
                           uint32_t address, uint32_t zeros, int shift) const {
    const bool exists =
        !flat || (live && unsigned(first_line + line[m] + shift) < unsigned(arguments.source.extent[1]));
    const uint32_t from = exists ? address : zeros;
#pragma unroll
    for (int i = 0; i < needed; ++i) {
      const bool may_be_outside = i < padding || i >= needed - padding;
      const bool inside = !may_be_outside || !flat ||
                          unsigned(column[m] + i) < unsigned(arguments.source.extent[2]);
      const uint32_t at = inside ? from + 4 * i : zeros;
#pragma unroll
      for (int half = 0; half < Config::halves; ++half)
        raw[half][i] = load_shared(at + half * 16 * Box::plane_pitch);
    }
  }
};

}  // namespace convt3d
