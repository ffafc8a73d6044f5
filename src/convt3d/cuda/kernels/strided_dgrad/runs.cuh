// Source boxes of the strided gradient as runs of whole lines, where rows of W are no multiple of
// 16 bytes, which TMA asks for: one bulk copy for each channel of a slice.
//
//     | 16 bytes | lead | line | line | ...      a channel: what lies from `from` on, from the 16
//                       ^ element 0 of a line    bytes before on that the copy begins with
//
// A box has one slice and one tap of D. What neighbours along W have beyond the ends of their
// line is that of other lines, and masked; units beyond the source along D and H read zeros.
#pragma once
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "strided_dgrad/config.cuh"

namespace convt3d {

/// The lines of a box that exist, in the first channel of a chunk.
template <typename Config>
struct Run {
  using Storage = typename Config::Storage;
  static constexpr int vector = 16 / int(sizeof(Storage));
  int top, from, lines;  // the units' first line; lines [from, from + lines)
  int64_t start;         // element of the source

  CONVT3D_DEVICE Run(const PhasesArguments<Storage>& a,
                     const WorkTile& work, int chunk, int slice) {
    const auto& source = a.source;
    const int reach = (a.tile[2] - 1) * Config::Axis1::unit_source + Config::Axis1::shifts;
    top = work.first[1] * Config::Axis1::unit_source + Config::Axis1::min_shift;
    from = max(top, 0);
    lines = unsigned(slice) < unsigned(source.extent[0])
                ? max(min(top + reach, source.extent[1]) - from, 0)
                : 0;
    const int64_t channel = int64_t(work.sample) * Config::groups * Config::source_channels +
                            work.group * Config::source_channels + chunk * Config::chunk_channels;
    start = channel * source.volume() + int64_t(slice) * source.stride0 +
            int64_t(from) * source.stride1;
  }
  /// Elements that a channel's copy begins with before its first line.
  CONVT3D_DEVICE static int lead(int64_t start) { return int(uint32_t(start) % vector); }
};

template <typename Config>
struct RunReader : TapReader<Config> {
  using typename TapReader<Config>::Parts, typename TapReader<Config>::Fragment;
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  using Arguments = PhasesArguments<Storage>;
  using Axis2 = typename Config::Axis2;
  static constexpr int element = sizeof(Storage);
  static constexpr int vector = Run<Config>::vector;
  static constexpr int per_word = Type::channels_per_word;
  static constexpr int span = Axis2::shifts;
  static constexpr int edges = -Axis2::min_shift;  // neighbours that may lie beyond an end
  // A lane reads a window of neighbours along W for each of its rows g and g + 8 of a block, or
  // one for both.
  static constexpr int windows = Config::lane_pairs ? 1 : 2;
  static constexpr int window = span + (2 / windows - 1) * Config::position_step;
  static_assert(!Config::runs || (edges <= 2 && (window + 1) * element <= Config::zero_bytes),
                "masks in registers, zeros enough");
  static_assert(!Config::runs || Config::source_channels % Config::chunk_channels == 0,
                "whole chunks");
  static_assert(!Config::runs || !Config::whole_boxes, "a slice a box");
  static_assert(!Config::runs || windows == 2 || edges <= Config::position_step,
                "what lies beyond an end is at the window's");

  const Arguments& arguments;
  uint32_t zeros;
  // Of this lane's windows: bytes from the first unit's line, the line, and masks of the
  // neighbours at both ends of a line.
  int rows[Config::blocks][windows], lines[Config::blocks][windows];
  uint32_t first[Config::blocks][windows][edges + 1], last[Config::blocks][windows][edges + 1];
  // Of the box: where unit 0's first neighbour lies in this lane's channels; the units' first
  // line, and how many lines of the source there are. Of a stage: the tap's line and bytes to it.
  uint32_t channels[2][per_word];
  int top, extent, line;
  uint32_t offset;
  /// Of 16 bits: all units begin in whole words of a channel's first line, so that those of a
  /// stage have their first neighbour in the same half of a word, of both channels of a quad.
  static constexpr bool alike = per_word == 2 && windows == 1 && Config::line_step % 2 == 0 &&
                                Config::position_step % 2 == 0;
  uint32_t base[2][per_word];  // of a stage, whole words; whether neighbours begin in the second half
  bool late[2];
  // Of a block, of both quads: neighbours of one channel, or aligned words of two of 16 bits.
  static constexpr int words = per_word == 1 ? window : (window + 2) / 2;
  uint32_t word[windows][2][per_word][words];

  /// Bytes from a box's beginning to a channel's copy. In words of two channels, those of a
  /// second half are eight banks further on, sixteen where lanes are two words apart.
  CONVT3D_DEVICE static uint32_t region(const Arguments& a, int channel) {
    constexpr int half = Config::lane_pairs ? 64 : 32;
    const int shift = per_word == 2 ? channel / (Config::chunk_channels / 2) * half : 0;
    return channel * a.channel_pitch * element + shift + 16;
  }

  /// A channel.
  CONVT3D_DEVICE static void fill(const Arguments& a, const TensorMap*, const WorkTile& work, int chunk,
                                  int slice, uint32_t to, uint32_t barrier, int channel) {
    const Run<Config> run(a, work, chunk, slice);
    const int length = run.lines * a.source.extent[2];
    const int64_t start = run.start + channel * a.source.volume();
    const int lead = run.lead(start);
    const int bytes = length == 0 ? 0 : (lead + length + vector - 1) / vector * 16;
    mbarrier_expect(barrier, bytes);
    if (bytes > 0)
      bulk_copy(to + region(a, channel), a.source.data + (start - lead), bytes, barrier);
  }

  CONVT3D_DEVICE RunReader(const Arguments& arguments_, const PhasesUnits<Config>& units)
      : arguments(arguments_), top(0), extent(0), line(0), offset(0) {
    extern __shared__ __align__(128) unsigned char shared[];
    zeros = shared_address(shared) + Config::zero_offset;
    const int width = arguments.source.extent[2];
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int w = 0; w < windows; ++w) {
        const auto unit = units(units.row_of(block, w));
        lines[block][w] = unit.at[1] * Config::line_step;
        rows[block][w] =
            (lines[block][w] * width + unit.at[2] * Config::position_step) * element;
        const int x = unit.at[2] * Config::position_step + Axis2::min_shift;
#pragma unroll
        for (int i = 0; i < edges; ++i) {
          first[block][w][i] = x + i >= 0 ? ~0u : 0u;
          last[block][w][i] = x + window - 1 - i < width ? ~0u : 0u;
        }
      }
  }
  CONVT3D_DEVICE void enter(const WorkTile& work, uint32_t address, int chunk, int slice) {
    const Run<Config> run(arguments, work, chunk, slice);
    top = run.top;
    extent = run.lines > 0 ? arguments.source.extent[1] : 0;
    const int ahead = (run.top - run.from) * arguments.source.extent[2] + Axis2::min_shift;
#pragma unroll
    for (int quad = 0; quad < 2; ++quad)
#pragma unroll
      for (int i = 0; i < per_word; ++i) {
        const int channel = Config::channel_at(quad, threadIdx.x % 4, i);
        const int lead = run.lead(run.start + channel * arguments.source.volume());
        channels[quad][i] =
            address + region(arguments, channel) + (lead + ahead) * element;
      }
  }
  CONVT3D_DEVICE void point(int, int tap1) {
    line = top + tap1 * Config::tap_lines;
    offset = tap1 * Config::tap_lines * arguments.source.extent[2] * element;
    if constexpr (alike) {
#pragma unroll
      for (int quad = 0; quad < 2; ++quad) {
        late[quad] = (channels[quad][0] + offset) % 4 != 0;
#pragma unroll
        for (int i = 0; i < per_word; ++i) base[quad][i] = (channels[quad][i] + offset) / 4 * 4;
      }
    }
  }

  template <int Step>
  CONVT3D_DEVICE void load(Fragment& units) const {
    constexpr int block = Step / Parts::count;
#pragma unroll
    for (int w = 0; w < windows; ++w)
#pragma unroll
      for (int quad = 0; quad < 2; ++quad) {
        uint32_t found[window];
        neighbours<block>(found, w, quad);
#pragma unroll
        for (int tap2 = Parts::first(Step); tap2 < Parts::end(Step); ++tap2)
#pragma unroll
          for (int unit = 0; unit < 2 / windows; ++unit)
            units[tap2 - Parts::first(Step)][w + unit + 2 * quad] =
                found[unit * Config::position_step + tap2 * Layer::dilation2];
      }
  }

  /// The words of a block, whose operands `load` forms.
  template <int Block>
  CONVT3D_DEVICE void fetch() {
#pragma unroll
    for (int w = 0; w < windows; ++w) {
      const bool exists = unsigned(lines[Block][w] + line) < unsigned(extent);
#pragma unroll
      for (int quad = 0; quad < 2; ++quad)
#pragma unroll
        for (int i = 0; i < per_word; ++i) {
          uint32_t at;
          if constexpr (alike)
            at = exists ? base[quad][i] + uint32_t(rows[Block][w]) : zeros;
          else
            at = (exists ? address<Block>(w, quad, i) : zeros) / 4 * 4;
#pragma unroll
          for (int n = 0; n < words; ++n)
            if (per_word == 2 || met(n)) word[w][quad][i][n] = load_shared(at + 4 * n);
        }
    }
  }

 private:
  template <int Block>
  CONVT3D_DEVICE uint32_t address(int w, int quad, int i) const {
    return channels[quad][i] + uint32_t(rows[Block][w]) + offset;
  }
  CONVT3D_CONSTEXPR static bool met(int at) {
    for (int unit = 0; unit < 2 / windows; ++unit) {
      const int shift = at - unit * Config::position_step;
      if (shift >= 0 && shift < span && shift % Layer::dilation2 == 0) return true;
    }
    return false;
  }
  /// Operands from a window's words: one channel rounded to TF32, or two of 16 bits; zeros beyond
  /// the ends of a line.
  template <int Block>
  CONVT3D_DEVICE void neighbours(uint32_t (&found)[window], int w, int quad) const {
    if constexpr (per_word == 1) {
#pragma unroll
      for (int i = 0; i < window; ++i)
        found[i] = met(i) ? round_tf32_operand(word[w][quad][0][i]) : 0;
    } else if constexpr (alike) {
      const auto& own = word[w][quad];
      const bool second = late[quad];
#pragma unroll
      for (int i = 0; i < window; ++i) {
        const int n = i / 2, next = n + i % 2;  // its words, if it begins in the first or second half
        found[i] = permute_bytes(second ? own[0][next] : own[0][n], second ? own[1][next] : own[1][n],
                                 second == (i % 2 == 0) ? 0x7632 : 0x5410);
      }
    } else {
      // Two neighbours a word from the first one on, whose address may be odd.
      uint32_t pairs[2][words];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t order = address<Block>(w, quad, i) % 4 ? 0x5432 : 0x3210;
        const auto& own = word[w][quad][i];
#pragma unroll
        for (int n = 0; n < words; ++n)
          pairs[i][n] = permute_bytes(own[n], own[n + 1 < words ? n + 1 : n], order);
      }
#pragma unroll
      for (int i = 0; i < window; ++i) {
        constexpr uint32_t orders[2] = {0x5410, 0x7632};
        found[i] = permute_bytes(pairs[0][i / 2], pairs[1][i / 2], orders[i % 2]);
      }
    }
#pragma unroll
    for (int i = 0; i < window; ++i) {
      if (i < edges) found[i] &= first[Block][w][i];
      if (window - 1 - i < edges) found[i] &= last[Block][w][window - 1 - i];
    }
  }
};

}  // namespace convt3d
