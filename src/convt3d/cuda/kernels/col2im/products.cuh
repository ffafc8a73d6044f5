// One source plane: loads into registers, products with all taps, and their sums into shared
// memory.
#pragma once
#include "col2im/walk.cuh"

namespace convt3d {

/// The first source column of a tile's lines: where vectors begin.
template <typename Config>
CONVT3D_DEVICE int first_column(int unit2) {
  const int column = unit2 + Config::Axis2::min_shift;
  return column < 0 ? 0 : column - column % Config::vector;
}

/// Where a lane's positions of a tile lie. Those outside of the tensor are loaded from a place
/// inside, and become zeros later: loads without conditions stay in flight together.
template <typename Config>
struct LanePlace {
  using Storage = typename Config::Storage;
  static constexpr bool last = Config::source_channels_last;
  static constexpr int64_t all_channels = int64_t(Config::groups) * Config::source_channels;
  const Storage* plane0;  // its first position in plane 0 of the lane's first channel
  int64_t plane_stride, load_stride;
  int inside;  // of its positions
  int offset[Config::vector];  // of each, from the first, where they are no vector

  CONVT3D_DEVICE LanePlace(const Col2imArguments<Config>& a,
                           const typename Col2imWalk<Config>::Leg& leg, int first_channel) {
    const auto& source = a.source;
    const int position = threadIdx.x / 32 * Config::warp_positions +
                         threadIdx.x % 32 / 4 * Config::vector;
    const int line = position / a.width;
    const int i1 = leg.unit1 + Config::Axis1::min_shift + line;
    const int i2 = first_column<Config>(leg.unit2) + position - line * a.width;
    inside = unsigned(i1) < unsigned(source.extent[1])
                 ? max(0, min(Config::vector, source.extent[2] - i2))
                 : 0;
    const int line1 = max(0, min(i1, source.extent[1] - 1));
    const int column = min(i2, source.extent[2] - (Config::whole_rows ? Config::vector : 1));
#pragma unroll
    for (int j = 0; j < Config::vector; ++j)
      offset[j] = Config::whole_rows ? j : min(j, source.extent[2] - 1 - column);
    const int64_t at = int64_t(line1) * source.extent[2] + column;
    plane_stride = int64_t(source.stride0) * (last ? all_channels : 1);
    const int64_t channel_stride = last ? 1 : source.volume();
    load_stride = Config::load_channels * channel_stride;
    plane0 = source.group_base(leg.sample, leg.group, Config::source_channels, all_channels, last) +
             at * (last ? all_channels : 1) + first_channel * channel_stride;
  }
};

/// What a lane loads at once: the words of `load_steps` matrix steps at its `vector` positions.
template <typename Config>
struct SourceWords {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  using Place = LanePlace<Config>;
  static constexpr int vector = Config::vector;
  static constexpr bool last = Config::source_channels_last;
  static constexpr bool pairs = Type::channels_per_word == 2;
  static constexpr int count = 2 * vector * Config::load_steps;
  /// Channels of a lane that are neighbours.
  static constexpr int run = (last ? 4 : 1) * Type::channels_per_word;
  uint32_t word[count];

  CONVT3D_DEVICE static bool exists(int channel) {
    return Config::whole_loads || channel < Config::source_channels;
  }
  /// `from`: the lane's first channel, which is number `channel`, at its first position.
  CONVT3D_DEVICE void load(const Storage* from, int channel, const Place& place, int64_t volume) {
    if constexpr (!Config::whole_loads || (pairs && !last && !Config::whole_rows)) {
#pragma unroll
      for (int i = 0; i < count; ++i) word[i] = 0;
    }
    if constexpr (last) {
      if (!exists(channel)) return;
#pragma unroll
      for (int j = 0; j < vector; ++j) {
        const uint4 v =
            __ldg(reinterpret_cast<const uint4*>(from + place.offset[j] * Place::all_channels));
        word[4 * j] = v.x, word[4 * j + 1] = v.y, word[4 * j + 2] = v.z, word[4 * j + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2 * run; ++i) {
        const int c = i / run * 4 * Type::channels_per_word + i % run;
        if (!exists(channel + c)) continue;
        if constexpr (Config::whole_rows) {
          load_vector(i, from + c * volume);
        } else {
#pragma unroll
          for (int j = 0; j < vector; ++j) {
            const Storage v = __ldg(from + c * volume + place.offset[j]);
            if constexpr (pairs)
              word[(i * vector + j) / 2] |= uint32_t(v) << 16 * (j % 2);
            else
              word[i * vector + j] = bits_of(v);
          }
        }
      }
    }
  }

  /// The operand word in row t + 4 * `half` of step `step` at position j.
  CONVT3D_DEVICE uint32_t operand(int step, int half, int j) const {
    if constexpr (last) {
      return word[4 * j + 2 * step + half];
    } else if constexpr (pairs) {
      const int at = half * vector + j / 2;
      return permute_bytes(word[at], word[at + vector / 2], j % 2 ? 0x7632 : 0x5410);
    } else {
      return word[half * vector + j];
    }
  }

 private:
  CONVT3D_DEVICE void load_vector(int i, const Storage* from) {
    constexpr int bytes = vector * int(sizeof(Storage));
    constexpr int words = bytes / 4;
    if constexpr (bytes == 16) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
      word[words * i] = v.x, word[words * i + 1] = v.y;
      word[words * i + 2] = v.z, word[words * i + 3] = v.w;
    } else if constexpr (bytes == 8) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(from));
      word[words * i] = v.x, word[words * i + 1] = v.y;
    } else {
      word[words * i] = __ldg(reinterpret_cast<const uint32_t*>(from));
    }
  }
};

template <typename Config>
using PlaneSums = float[Config::fragments][Config::fragments_m][4];
/// A lane's sources of one matrix step.
template <typename Config>
using StepOperands = typename Config::Math::A[Config::fragments_m];

/// Step `step` of those that the words hold; zeros at positions from `inside` on.
template <typename Config>
CONVT3D_DEVICE void prepare_step(StepOperands<Config>& a, const SourceWords<Config>& words, int step,
                                 int inside) {
#pragma unroll
  for (int m = 0; m < Config::fragments_m; ++m) {
    uint32_t raw[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = 2 * m + i % 2;
      const bool there = Config::whole_rows ? inside > 0 : j < inside;
      raw[i] = there ? words.operand(step, i / 2, j) : 0;
    }
    Config::Math::prepare(a[m], raw);
  }
}

/// Products with all columns of a tap of axis 0. `weights`: this lane's, of this step and tap.
template <typename Config>
CONVT3D_DEVICE void multiply_tap(PlaneSums<Config>& sum, const StepOperands<Config>& a,
                                 uint32_t weights) {
  using Math = typename Config::Math;
#pragma unroll
  for (int n = 0; n < Config::fragments; ++n) {
    typename Math::B b;
    Math::load(b, weights + n * Config::fragment_bytes);
#pragma unroll
    for (int m = 0; m < Config::fragments_m; ++m) Math::multiply_add(sum[n][m], a[m], b);
  }
}

/// Puts this warp's columns of a finished plane into a buffer.
template <typename Config>
CONVT3D_DEVICE void stage_plane(const PlaneSums<Config>& sum, uint32_t buffer) {
  const int lane = threadIdx.x % 32;
  const int position =
      threadIdx.x / 32 * Config::warp_positions + lane / 4 * Config::vector;
#pragma unroll
  for (int n = 0; n < Config::fragments; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = 8 * n + 2 * (lane % 4) + i;
      if (Config::columns % 8 != 0 && column >= Config::columns) continue;
      const uint32_t to = buffer + 4u * (column * Config::pitch + position);
      const auto& first = sum[n][0];
      if constexpr (Config::vector == 4) {
        const auto& second = sum[n][1];
        store_shared(to, bits_of(first[i]), bits_of(first[2 + i]), bits_of(second[i]),
                     bits_of(second[2 + i]));
      } else {
        store_shared(to, bits_of(first[i]), bits_of(first[2 + i]));
      }
    }
}

}  // namespace convt3d
