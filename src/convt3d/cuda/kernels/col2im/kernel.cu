// Forward pass, and gradient by input at stride 1, of layers that produce few channels: every source
// value is multiplied with all taps at once, and the products of a place meet afterwards.
//
// A persistent CTA has a tile of units of the (H, W) plane and marches along D. The columns of its
// products are all taps of a source position (and all produced channels), so each value is read once
// and the tensor core's columns are full, however few the produced channels are:
//
//   source positions that        window of sums, in registers         buffer in shared memory
//   the tile's units read        [planes][taps of H, W x channels]
//        .------.                     .------.------.------.            [column][position]
//        | rows | * all taps  -->     | done |      |      |   -->   each output adds up its taps,
//        '------'                     '------'------'------'            from where they were put
//
// Taps of D are summed in registers (see geometry/stacked_axis.cuh); or the sources of a unit's planes are kept
// there as operands, and its planes are finished one by one. A warp has 8 * vector positions of the
// tile, one after the other, line by line; lane (g, t) loads `vector` of them at once, which become
// rows g and g + 8 of its fragments, so sources pass no shared memory. Loads of the next round, or
// plane, are in flight while one is multiplied, staged and stored.
//
// Shared memory: weights of a group | two buffers of a finished plane's columns, so that one barrier a
// plane is enough.
#include "col2im/config.cuh"

namespace convt3d {

template <typename Config>
struct ScatterArguments {
  using Storage = typename Config::Storage;
  Activation<const Storage> source;
  Activation<Storage> target;
  const unsigned char* weights;
  const Storage* bias;
  int batch;
  int tile1, tile2;  // units of a tile
  int width;  // source columns of a tile's line, a multiple of the vector
};

/// A CTA's share of the work: a run of (group, sample, tile, interleaved volume, step), in order. A step
/// takes a source plane, or finishes a unit.
template <typename Config>
struct ScatterWalk {
  static constexpr int volumes = Config::keep_planes ? 1 : Config::Stacked0::interleaved;
  static constexpr int warm_steps = Config::keep_planes ? 0 : Config::Stacked0::warm_steps;
  int steps, tiles1, tiles2;
  int64_t at, end;

  CONVT3D_DEVICE explicit ScatterWalk(const ScatterArguments<Config>& a) {
    constexpr int planes =
        Config::keep_planes ? Config::Static0::slots : Config::Stacked0::target_step * volumes;
    constexpr int origin = Config::keep_planes ? 0 : Config::Stacked0::target_origin;
    steps = (a.target.extent[0] - origin + planes - 1) / planes;
    constexpr int unit1 = Config::Axis1::unit_destination, unit2 = Config::Axis2::unit_destination;
    tiles1 = (a.target.extent[1] + unit1 * a.tile1 - 1) / (unit1 * a.tile1);
    tiles2 = (a.target.extent[2] + unit2 * a.tile2 - 1) / (unit2 * a.tile2);
    const int64_t total =
        int64_t(Config::groups) * a.batch * tiles1 * tiles2 * volumes * steps;
    at = total * blockIdx.x / gridDim.x;
    end = total * (blockIdx.x + 1) / gridDim.x;
  }

  /// Steps of one march; those before `first` only fill the window.
  struct Leg {
    int group, sample, unit1, unit2, volume0, begin, first, end;
  };
  CONVT3D_DEVICE bool next(Leg& leg, const ScatterArguments<Config>& a) {
    if (at >= end) return false;
    int64_t rest = at / steps;
    leg.first = int(at - rest * steps);
    leg.end = int(min(int64_t(steps), leg.first + (end - at)));
    leg.begin = max(0, leg.first - warm_steps);
    at += leg.end - leg.first;
    leg.volume0 = int(rest % volumes);
    rest /= volumes;
    leg.unit2 = int(rest % tiles2) * a.tile2;
    rest /= tiles2;
    leg.unit1 = int(rest % tiles1) * a.tile1;
    rest /= tiles1;
    leg.sample = int(rest % a.batch);
    leg.group = int(rest / a.batch);
    return true;
  }
};

/// The first source column of a tile's lines: where vectors begin.
template <typename Config>
CONVT3D_DEVICE int first_column(int unit2) {
  const int column = unit2 + Config::Axis2::min_shift;
  return column < 0 ? 0 : column - column % Config::vector;
}

/// Where a lane's positions of a tile lie. Those outside of the tensor are loaded from a place inside,
/// and become zeros later: loads without conditions stay in flight together.
template <typename Config>
struct LanePlace {
  using Storage = typename Config::Storage;
  static constexpr bool last = Config::source_channels_last;
  static constexpr int64_t all_channels = int64_t(Config::groups) * Config::source_channels;
  const Storage* plane0;  // its first position in plane 0 of the lane's first channel
  int64_t plane_stride, load_stride;
  int inside;  // of its positions
  int offset[Config::vector];  // of each, from the first, where they are no vector

  CONVT3D_DEVICE LanePlace(const ScatterArguments<Config>& a,
                           const typename ScatterWalk<Config>::Leg& leg, int first_channel) {
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

/// Outputs of a tile in one plane of the target, out of a buffer of its columns.
template <typename Config>
struct PlaneOutputs {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  static constexpr int slots2 = Axis2::slots;
  static constexpr bool last = Config::target_channels_last;
  static constexpr int64_t all_channels = int64_t(Config::groups) * Config::target_channels;
  static constexpr bool rows_are_vectors = !last && (slots2 & (slots2 - 1)) == 0 &&
                                           slots2 * int(sizeof(Storage)) <= 16;

  const ScatterArguments<Config>& a;
  Divider by_tile2, by_tile;
  int64_t volume;
  bool aligned;

  CONVT3D_DEVICE explicit PlaneOutputs(const ScatterArguments<Config>& a_)
      : a(a_), by_tile2(a_.tile2), by_tile(a_.tile1 * a_.tile2), volume(a_.target.volume()) {
    aligned = rows_are_vectors && a.target.extent[2] % slots2 == 0 &&
              reinterpret_cast<uint64_t>(a.target.data) % (slots2 * sizeof(Storage)) == 0;
  }

  CONVT3D_DEVICE void operator()(const typename ScatterWalk<Config>::Leg& leg, int o0,
                                 uint32_t buffer) const {
    const int units = a.tile1 * a.tile2;
    const int lead = leg.unit2 + Axis2::min_shift - first_column<Config>(leg.unit2);
    const int channel = leg.group * Config::target_channels;
    Storage* plane = a.target.data + leg.sample * all_channels * volume +
                     (last ? channel + int64_t(o0) * a.target.stride0 * all_channels
                           : channel * volume + int64_t(o0) * a.target.stride0);
#pragma unroll 1
    for (int item = threadIdx.x; item < units * Config::target_channels; item += Config::threads) {
      const int j = Config::target_channels == 1 ? 0 : by_tile.quotient(item);
      const int unit = item - j * units;
      const int line = by_tile2.quotient(unit);
      const int beside = unit - line * a.tile2;
      const int o1 = (leg.unit1 + line) * Axis1::unit_destination;
      const int o2 = (leg.unit2 + beside) * Axis2::unit_destination;
      if (o1 >= a.target.extent[1] || o2 >= a.target.extent[2]) continue;
      const Taps taps(a, buffer + 4u * (j * Config::pitch), line, lead + beside);
      const float bias = Config::bias ? Type::load(__ldg(a.bias + channel + j)) : 0.f;
      const int position = o1 * a.target.extent[2] + o2;
      Storage* to = plane + (last ? position * all_channels + j : j * volume + position);
#pragma unroll
      for (int slot1 = 0; slot1 < Axis1::slots; ++slot1) {
        if (o1 + slot1 >= a.target.extent[1]) break;
        float row[slots2];
#pragma unroll
        for (int slot2 = 0; slot2 < slots2; ++slot2) row[slot2] = taps.sum(slot1, slot2, bias);
        store(to, row, a.target.extent[2] - o2);
        to += a.target.extent[2] * (last ? all_channels : 1);
      }
    }
  }

 private:
  /// The columns that a unit adds up: at the positions of its shifts, those of its taps.
  struct Taps {
    uint32_t lines[Axis1::shifts];
    bool inside[Axis2::shifts];  // of the tile's lines

    CONVT3D_DEVICE Taps(const ScatterArguments<Config>& a, uint32_t columns, int line,
                        int column) {
#pragma unroll
      for (int i = 0; i < Axis1::shifts; ++i)
        lines[i] = columns + 4u * ((line + i) * a.width + column);
#pragma unroll
      for (int i = 0; i < Axis2::shifts; ++i) inside[i] = unsigned(column + i) < unsigned(a.width);
    }
    CONVT3D_DEVICE float sum(int slot1, int slot2, float bias) const {
      float sum = bias;
#pragma unroll
      for (int k1 = 0; k1 < CONVT3D_KERNEL1; ++k1) {
        if (!Axis1::valid(slot1, k1)) continue;
        const int line = Axis1::shift_of(slot1, k1) - Axis1::min_shift;
#pragma unroll
        for (int k2 = 0; k2 < CONVT3D_KERNEL2; ++k2) {
          if (!Axis2::valid(slot2, k2)) continue;
          const int shift = Axis2::shift_of(slot2, k2) - Axis2::min_shift;
          if (inside[shift])
            sum += float_of(load_shared(
                lines[line] + 4u * (Config::column_of(k1, k2) * Config::pitch + shift)));
        }
      }
      return sum;
    }
  };

  CONVT3D_DEVICE void store(Storage* to, const float (&row)[slots2], int columns) const {
    if constexpr (rows_are_vectors) {
      if (aligned) {
        store_row<Type>(to, row);
        return;
      }
    }
#pragma unroll
    for (int slot2 = 0; slot2 < slots2; ++slot2)
      if (slot2 < columns)
        store_streaming(to + slot2 * (last ? all_channels : 1), Type::store(row[slot2]));
  }
};

template <typename Config>
CONVT3D_DEVICE void load_weights(const unsigned char* packed, uint32_t shared_base) {
  static_assert(Config::weight_bytes % 16 == 0, "fragments are copied in vectors");
  for (int i = 16 * threadIdx.x; i < Config::weight_bytes; i += 16 * Config::threads) {
    const uint4 v = *reinterpret_cast<const uint4*>(packed + i);
    store_shared(shared_base + i, v.x, v.y, v.z, v.w);
  }
}

/// What goes on from march to march of a CTA.
template <typename Config>
struct ScatterMarch {
  using Words = SourceWords<Config>;
  using Leg = typename ScatterWalk<Config>::Leg;
  const ScatterArguments<Config>& a;
  const PlaneOutputs<Config> outputs;
  const typename Config::Storage* home;  // where loads go that are not needed
  int64_t volume;
  int first_channel;
  uint32_t lane_weights, buffer, other;

  CONVT3D_DEVICE ScatterMarch(const ScatterArguments<Config>& a_, uint32_t shared_base)
      : a(a_), outputs(a_), volume(a_.source.volume()) {
    first_channel = threadIdx.x % 4 * Words::run;
    home = a.source.data + first_channel * (Words::last ? 1 : volume);
    lane_weights = shared_base + threadIdx.x % 32 * (4 * Config::lane_words);
    buffer = shared_base + Config::weight_bytes;
    other = buffer + Config::buffer_bytes;
  }

  /// A plane's loads from number `first` on.
  struct Cursor {
    const typename Config::Storage* from;
    int64_t stride;
    int channel;
  };
  CONVT3D_DEVICE Cursor cursor(const LanePlace<Config>& place, int plane, int first,
                               bool needed) const {
    needed = needed && unsigned(plane) < unsigned(a.source.extent[0]);
    return {needed ? place.plane0 + plane * place.plane_stride + first * place.load_stride : home,
            needed ? place.load_stride : 0, first_channel + first * Config::load_channels};
  }
  CONVT3D_DEVICE void load(Words& words, const Cursor& cursor, int i,
                           const LanePlace<Config>& place) const {
    words.load(cursor.from + i * cursor.stride, cursor.channel + i * Config::load_channels, place,
               volume);
  }
  CONVT3D_DEVICE void load_all(Words (&words)[Config::batch], const Cursor& cursor,
                               const LanePlace<Config>& place) const {
#pragma unroll
    for (int i = 0; i < Config::batch; ++i) load(words[i], cursor, i, place);
  }

  /// Every thread takes part. One barrier: the buffer was read two planes ago, before another one.
  CONVT3D_DEVICE void finish(const Leg& leg, const PlaneSums<Config>& sum, int o0) {
    stage_plane<Config>(sum, buffer);
    __syncthreads();
    outputs(leg, o0, buffer);
    const uint32_t read = buffer;
    buffer = other, other = read;
  }
  CONVT3D_DEVICE bool inside(int o0) const {
    return unsigned(o0) < unsigned(a.target.extent[0]);
  }
};

/// A march with a window of sums: each step takes a source plane.
template <typename Config>
struct WindowMarch : ScatterMarch<Config> {
  using Base = ScatterMarch<Config>;
  using Words = typename Base::Words;
  using Axis0 = typename Config::Stacked0;
  using Base::Base;
  Words words[Config::batch];
  PlaneSums<Config> sum[Axis0::window];

  CONVT3D_DEVICE void begin(const LanePlace<Config>& place, const typename Base::Leg& leg) {
    this->load_all(words, this->cursor(place, Axis0::source_plane(leg.begin, leg.volume0), 0, true),
                   place);
    float* sums = &sum[0][0][0][0];
#pragma unroll
    for (int i = 0; i < int(sizeof(sum) / sizeof(float)); ++i) sums[i] = 0.f;
  }

  CONVT3D_DEVICE void step(const LanePlace<Config>& place, const typename Base::Leg& leg,
                           int step) {
    const int plane = Axis0::source_plane(step, leg.volume0);
    if (plane < this->a.source.extent[0]) {
      uint32_t weights = this->lane_weights;
#pragma unroll 1
      for (int round = 0; round < Config::rounds; ++round) {
        // What is loaded while this round is multiplied: the next one, or the next plane's first.
        const bool last = round + 1 == Config::rounds;
        const int next_plane = last ? plane + Axis0::interleaved : plane;
        const int next = last ? 0 : (round + 1) * Config::batch;
        const auto cursor = this->cursor(place, next_plane, next, !(last && step + 1 == leg.end));
#pragma unroll
        for (int i = 0; i < Config::batch; ++i) {
          const Words now = words[i];
          this->load(words[i], cursor, i, place);
#pragma unroll
          for (int s = 0; s < Config::load_steps; ++s, weights += Config::step_bytes) {
            StepOperands<Config> operands;
            prepare_step<Config>(operands, now, s, place.inside);
#pragma unroll
            for (int k0 = 0; k0 < CONVT3D_KERNEL0; ++k0)
              multiply_tap<Config>(sum[k0], operands, weights + k0 * Config::tap_bytes);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < Axis0::target_step; ++i) {
      const int o0 = Axis0::target_plane(step * Axis0::target_step + i, leg.volume0);
      if (step >= leg.first && this->inside(o0)) this->finish(leg, sum[i], o0);
    }
    float* sums = &sum[0][0][0][0];
    constexpr int count = int(sizeof(sum) / sizeof(float));
    constexpr int leaving = count / Axis0::window * Axis0::target_step;
#pragma unroll
    for (int i = 0; i < count; ++i) sums[i] = i + leaving < count ? sums[i + leaving] : 0.f;
  }
};

/// A march that keeps the planes which a unit reads: each step takes one and finishes a unit.
template <typename Config>
struct KeptMarch : ScatterMarch<Config> {
  using Base = ScatterMarch<Config>;
  using Words = typename Base::Words;
  using Axis0 = typename Config::Static0;
  using Base::Base;
  static constexpr int shifts = Axis0::shifts;
  Words words[Config::batch];
  StepOperands<Config> kept[shifts][Config::steps];

  CONVT3D_DEVICE void load_plane(const LanePlace<Config>& place, int plane, bool needed) {
    this->load_all(words, this->cursor(place, plane, 0, needed), place);
  }
  /// The words of a plane become operands.
  CONVT3D_DEVICE void take(StepOperands<Config> (&operands)[Config::steps],
                           const LanePlace<Config>& place, int plane) const {
    const int inside = unsigned(plane) < unsigned(this->a.source.extent[0]) ? place.inside : 0;
#pragma unroll
    for (int s = 0; s < Config::steps; ++s)
      prepare_step<Config>(operands[s], words[s / Config::load_steps], s % Config::load_steps,
                           inside);
  }
  CONVT3D_DEVICE void begin(const LanePlace<Config>& place, const typename Base::Leg& leg) {
#pragma unroll
    for (int i = 0; i < shifts; ++i) {
      const int plane = leg.begin + Axis0::min_shift + i;
      load_plane(place, plane, true);
      if (i + 1 < shifts) take(kept[i + 1], place, plane);
    }
  }

  CONVT3D_DEVICE void step(const LanePlace<Config>& place, const typename Base::Leg& leg,
                           int step) {
#pragma unroll
    for (int i = 0; i + 1 < shifts; ++i)
#pragma unroll
      for (int s = 0; s < Config::steps; ++s)
#pragma unroll
        for (int m = 0; m < Config::fragments_m; ++m) kept[i][s][m] = kept[i + 1][s][m];
    take(kept[shifts - 1], place, step + Axis0::max_shift);
    load_plane(place, step + 1 + Axis0::max_shift, step + 1 < leg.end);
#pragma unroll
    for (int slot = 0; slot < Axis0::slots; ++slot) {
      const int o0 = step * Axis0::slots + slot;
      if (!this->inside(o0)) continue;
      PlaneSums<Config> sum;
      float* sums = &sum[0][0][0];
#pragma unroll
      for (int i = 0; i < int(sizeof(sum) / sizeof(float)); ++i) sums[i] = 0.f;
#pragma unroll
      for (int s = 0; s < Config::steps; ++s)
#pragma unroll
        for (int i = 0; i < shifts; ++i) {
          const int k0 = Axis0::tap(slot, Axis0::min_shift + i);
          if (k0 < 0) continue;
          multiply_tap<Config>(sum, kept[i][s],
                               this->lane_weights + s * Config::step_bytes +
                                   k0 * Config::tap_bytes);
        }
      this->finish(leg, sum, o0);
    }
  }
};

template <typename Config, typename March>
CONVT3D_DEVICE void scatter(const ScatterArguments<Config>& a) {
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t shared_base = shared_address(shared);
  March march(a, shared_base);
  ScatterWalk<Config> walk(a);
  typename ScatterWalk<Config>::Leg leg;
  int held = -1;
  while (walk.next(leg, a)) {
    const LanePlace<Config> place(a, leg, march.first_channel);
    march.begin(place, leg);
    if (leg.group != held) {
      if (held < 0)
        grid_dependency_wait();
      else
        __syncthreads();
      load_weights<Config>(a.weights + int64_t(leg.group) * Config::weight_bytes, shared_base);
      held = leg.group;
      __syncthreads();
    }
#pragma unroll 1
    for (int step = leg.begin; step < leg.end; ++step) march.step(place, leg, step);
  }
}

template <typename Config, bool KeepPlanes>
struct MarchOf {
  using type = WindowMarch<Config>;
};
template <typename Config>
struct MarchOf<Config, true> {
  using type = KeptMarch<Config>;
};

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::ScatterConfig::threads,
                                             convt3d::ScatterConfig::resident)
    convt3d_col2im(const convt3d::ScatterConfig::Storage* source, const unsigned char* weights,
                    const convt3d::ScatterConfig::Storage* bias,
                    convt3d::ScatterConfig::Storage* target, int source0, int source1, int source2,
                    int target0, int target1, int target2, int batch, int tile1, int tile2,
                    int width) {
  const convt3d::ScatterArguments<convt3d::ScatterConfig> arguments{
      {source, {source0, source1, source2}, source1 * source2, source2},
      {target, {target0, target1, target2}, target1 * target2, target2},
      weights,
      bias,
      batch,
      tile1,
      tile2,
      width};
  using Config = convt3d::ScatterConfig;
  convt3d::scatter<Config, convt3d::MarchOf<Config, Config::keep_planes>::type>(arguments);
}
