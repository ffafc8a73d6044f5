// Fragments of the strided gradient where a lane's rows g and g + 8 are neighbours along W, of
// boxes by TMA, of volumes, and of runs of whole lines by one bulk copy for each channel, where
// lines are multiples of 16 bytes. Stride 2: what both read lies around four positions, which one
// load brings.
//
//     positions  -1 | 0  1  2  3 | 4        kernel 3, padding 1: unit 0 reads -1, 0, 1, unit 1 reads
//     unit 0      o   o  o                  1, 2, 3; the fourth tap of kernel 4 meets 2 and 4
//     unit 1             o  o  o
#pragma once
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "strided_dgrad/runs.cuh"
#include "strided_dgrad/volumes.cuh"

namespace convt3d {

/// The positions that a pair of units reads, in aligned groups of four, counted from the first
/// unit's.
template <typename Config>
struct PairWindow {
  using Axis2 = typename Config::Axis2;
  static constexpr int step = Config::position_step;
  static constexpr int begin = floor_div(Axis2::min_shift, 4) * 4;
  static constexpr int end = floor_div(Axis2::max_shift + step, 4) * 4 + 4;
  static constexpr int groups = (end - begin) / 4;
  CONVT3D_CONSTEXPR static bool met(int at) {
    return Axis2::tap(0, at) >= 0 || Axis2::tap(0, at - step) >= 0;
  }
  CONVT3D_CONSTEXPR static int first_met(int group) {
    for (int i = 0; i < 4; ++i)
      if (met(begin + 4 * group + i)) return i;
    return 4;
  }
  CONVT3D_CONSTEXPR static int last_met(int group) {
    int last = -2;
    for (int i = 0; i < 4; ++i)
      if (met(begin + 4 * group + i)) last = i;
    return last;
  }
};

template <typename Config>
struct PairReader : TapReader<Config> {
  using typename TapReader<Config>::Parts, typename TapReader<Config>::Fragment;
  using Base = typename Select<Config::volumes, VolumeReader<Config>, MapReader<Config>>::Type;
  using Arguments = PhasesArguments<typename Config::Storage>;
  using Axis2 = typename Config::Axis2;
  using Window = PairWindow<Config>;
  static constexpr int element = sizeof(typename Config::Storage);
  static constexpr int taps0 = Config::Axis0::kernel, taps1 = Config::Axis1::kernel;
  static constexpr int per_word = Config::Type::channels_per_word;
  static constexpr int positions = 4 * Window::groups;
  static_assert(!Config::lane_pairs || Config::runs || Config::position_step == 2,
                "pairs share four positions");
  static_assert(!Config::lane_pairs || taps0 + taps1 + Window::groups <= 32,
                "a bit each");

  const Arguments& arguments;
  // Bytes from a box's beginning to this lane's pairs, of the channels of both quads; where
  // position 0 of a box lies, and that of a stage's taps.
  uint32_t rows[Config::blocks][2];
  uint32_t box, at;
  // Of volumes: bits of the taps of D, taps of H and groups of positions that lie inside the
  // source; those that a stage's taps need. Of runs: bits of groups alone; the lines of pairs,
  // how many lines of the source there are, and that of a stage's taps.
  uint32_t zeros, inside[Config::blocks], needed;
  int lines[Config::blocks], extent, line, top;
  // Of a block, of both quads: positions of one channel, or of two of 16 bits.
  uint32_t word[2][per_word][positions / per_word];

  CONVT3D_DEVICE static void fill(const Arguments& a, const TensorMap* map, const WorkTile& work,
                                  int chunk, int slice, uint32_t to, uint32_t barrier,
                                  int channel) {
    if constexpr (Config::aligned_runs) {
      const Run<Config> run(a, work, chunk, slice);
      const int bytes = run.lines * a.source.extent[2] * element;
      mbarrier_expect(barrier, bytes);
      if (bytes > 0)
        bulk_copy(to + channel * a.channel_pitch * element,
                  a.source.data + run.start + channel * a.source.volume(), bytes, barrier);
    } else {
      Base::fill(a, map, work, chunk, slice, to, barrier, channel);
    }
  }

  CONVT3D_DEVICE PairReader(const Arguments& arguments_, const PhasesUnits<Config>& units)
      : arguments(arguments_), box(0), at(0), needed(0), extent(0), line(0), top(0) {
    extern __shared__ __align__(128) unsigned char shared[];
    zeros = shared_address(shared) + Config::zero_offset;
    uint32_t all[Config::blocks][4];
    units.addresses(all);
    const auto exists = [&](int axis, int position) {
      return uint32_t(unsigned(position) < unsigned(arguments_.source.extent[axis]));
    };
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block) {
      rows[block][0] = all[block][0];
      rows[block][1] = all[block][2];
      inside[block] = 0;
      const auto unit = units(units.row_of(block, 0));
      lines[block] = unit.at[1] * Config::line_step;
      if constexpr (Config::volumes) {
        for (int tap = 0; tap < taps0; ++tap)
          inside[block] |= exists(0, unit.at[0] * Config::slice_step + Config::Axis0::min_shift +
                                         tap * Config::tap_slices)
                           << tap;
        for (int tap = 0; tap < taps1; ++tap)
          inside[block] |= exists(1, unit.at[1] * Config::line_step + Config::Axis1::min_shift +
                                         tap * Config::tap_lines)
                           << (taps0 + tap);
      }
      if constexpr (Config::volumes || Config::aligned_runs) {
        for (int group = 0; group < Window::groups; ++group)
          inside[block] |=
              exists(2, unit.at[2] * Config::position_step + Window::begin + 4 * group)
              << (taps0 + taps1 + group);
      }
    }
  }
  CONVT3D_DEVICE void enter(const WorkTile& work, uint32_t address, int chunk, int slice) {
    if constexpr (Config::aligned_runs) {
      const Run<Config> run(arguments, work, chunk, slice);
      top = run.top;
      extent = run.lines > 0 ? arguments.source.extent[1] : 0;
      box = address + (run.top - run.from) * arguments.line_pitch * element;
    } else if constexpr (Config::volumes)
      box = address + (Config::Axis0::min_shift * arguments.slice_pitch +
                       Config::Axis1::min_shift * arguments.line_pitch) *
                          element;
    else
      box = address +
            (work.first[2] * Config::position_step - PhasesWalk<Config>::column(work)) * element;
  }
  CONVT3D_DEVICE void point(int tap0, int tap1) {
    at = box + (tap0 * Config::tap_slices * arguments.slice_pitch +
                tap1 * Config::tap_lines * arguments.line_pitch) *
                   element;
    needed = 1u << tap0 | 1u << (taps0 + tap1);
    line = top + tap1 * Config::tap_lines;
  }

  template <int Step>
  CONVT3D_DEVICE void load(Fragment& units) const {
#pragma unroll
    for (int tap2 = Parts::first(Step); tap2 < Parts::end(Step); ++tap2)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        units[tap2 - Parts::first(Step)][i] =
            operand(word[i / 2], i % 2 * Config::position_step + tap2 * Layer::dilation2 +
                                     Axis2::min_shift - Window::begin);
  }

  /// The words of a block, whose operands `load` forms.
  template <int Block>
  CONVT3D_DEVICE void fetch() {
    const bool found = unsigned(lines[Block] + line) < unsigned(extent);
#pragma unroll
    for (int quad = 0; quad < 2; ++quad)
#pragma unroll
      for (int group = 0; group < Window::groups; ++group) {
        uint32_t address =
            rows[Block][quad] + at + uint32_t((Window::begin + 4 * group) * element);
        uint32_t pitch = arguments.channel_pitch * element;
        if constexpr (Config::volumes || Config::aligned_runs) {
          const uint32_t own = 1u << (taps0 + taps1 + group);
          const uint32_t bits = Config::volumes ? needed | own : own;
          const bool exists = (inside[Block] & bits) == bits && (Config::volumes || found);
          address = exists ? address : zeros;
          pitch = exists ? pitch : 0;
        }
#pragma unroll
        for (int i = 0; i < per_word; ++i)
          load_group(word[quad][i] + 4 / per_word * group, address + i * pitch,
                     Window::first_met(group) / per_word, Window::last_met(group) / per_word);
      }
  }

 private:
  /// Those words of an aligned group of four positions that are read, from `first` to `last`.
  CONVT3D_DEVICE static void load_group(uint32_t* to, uint32_t address, int first, int last) {
    if (first > last) return;
    if (first == last)
      to[first] = load_shared(address + 4 * first);
    else if (first / 2 == last / 2)
      load_shared(address + first / 2 * 8, to[first / 2 * 2], to[first / 2 * 2 + 1]);
    else
      load_shared(address, to[0], to[1], to[2], to[3]);
  }
  CONVT3D_DEVICE static uint32_t operand(const uint32_t (&words)[per_word][positions / per_word],
                                         int position) {
    if constexpr (per_word == 1)
      return CONVT3D_BY_MAP ? words[0][position] : round_tf32_operand(words[0][position]);
    else
      return permute_bytes(words[0][position / 2], words[1][position / 2],
                           position % 2 ? 0x7632 : 0x5410);
  }
};

}  // namespace convt3d
