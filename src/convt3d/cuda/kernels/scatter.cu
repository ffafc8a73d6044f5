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
// Taps of D are summed in registers (see stacked_axis.cuh). A warp has 8 * vector positions of the
// tile, one after the other, line by line; lane (g, t) loads `vector` of them at once, which become
// rows g and g + 8 of its fragments, so sources pass no shared memory. Loads of the next round, or
// plane, are in flight while one is multiplied, staged and stored.
//
// Shared memory: weights of a group | two buffers of a finished plane's columns, so that one barrier a
// plane is enough.
#include "scatter_config.cuh"

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

/// A CTA's share of the work: a run of (group, sample, tile, interleaved volume, step), in order.
template <typename Config>
struct ScatterWalk {
  using Axis0 = typename Config::Axis0;
  int steps, tiles1, tiles2;
  int64_t at, end;

  CONVT3D_DEVICE explicit ScatterWalk(const ScatterArguments<Config>& a) {
    constexpr int planes = Axis0::target_step * Axis0::interleaved;
    steps = (a.target.extent[0] - Axis0::target_origin + planes - 1) / planes;
    constexpr int unit1 = Config::Axis1::unit_destination, unit2 = Config::Axis2::unit_destination;
    tiles1 = (a.target.extent[1] + unit1 * a.tile1 - 1) / (unit1 * a.tile1);
    tiles2 = (a.target.extent[2] + unit2 * a.tile2 - 1) / (unit2 * a.tile2);
    const int64_t total =
        int64_t(Config::groups) * a.batch * tiles1 * tiles2 * Axis0::interleaved * steps;
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
    leg.begin = max(0, leg.first - Axis0::warm_steps);
    at += leg.end - leg.first;
    leg.volume0 = int(rest % Axis0::interleaved);
    rest /= Axis0::interleaved;
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

/// What a lane loads at once: the words of `load_steps` matrix steps at its `vector` positions.
template <typename Config>
struct SourceWords {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  static constexpr int vector = Config::vector;
  static constexpr bool last = Config::source_channels_last;
  static constexpr bool pairs = Type::channels_per_word == 2;
  static constexpr int count = 2 * vector * Config::load_steps;
  static constexpr int64_t all_channels = int64_t(Config::groups) * Config::source_channels;
  /// Channels of a lane that are neighbours.
  static constexpr int run = (last ? 4 : 1) * Type::channels_per_word;
  uint32_t word[count];

  /// `from`: the lane's first channel, which is number `channel`, at its first position; of the others,
  /// the first `inside` exist. `whole`: they are one vector.
  CONVT3D_DEVICE void load(const Storage* from, int channel, int inside, bool whole,
                           int64_t volume) {
#pragma unroll
    for (int i = 0; i < count; ++i) word[i] = 0;
    if constexpr (last) {
      if (channel >= Config::source_channels) return;
#pragma unroll
      for (int j = 0; j < vector; ++j) {
        if (j >= inside) continue;
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(from + j * all_channels));
        word[4 * j] = v.x, word[4 * j + 1] = v.y, word[4 * j + 2] = v.z, word[4 * j + 3] = v.w;
      }
    } else if (whole) {
#pragma unroll
      for (int i = 0; i < 2 * run; ++i) {
        const int c = place_of(i);
        if (inside > 0 && channel + c < Config::source_channels)
          load_vector(i, from + c * volume);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2 * run; ++i) {
        const int c = place_of(i);
#pragma unroll
        for (int j = 0; j < vector; ++j) {
          if (j >= inside || channel + c >= Config::source_channels) continue;
          const Storage v = __ldg(from + c * volume + j);
          if constexpr (pairs)
            word[(i * vector + j) / 2] |= uint32_t(v) << 16 * (j % 2);
          else
            word[i * vector + j] = bits_of(v);
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
  /// Which channel, counted from the lane's first, is the i-th of those it loads.
  CONVT3D_CONSTEXPR static int place_of(int i) {
    return i / run * 4 * Type::channels_per_word + i % run;
  }
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

/// Where a lane's positions of a tile lie.
template <typename Config>
struct LanePlace {
  using Storage = typename Config::Storage;
  using Words = SourceWords<Config>;
  const Storage* plane0;  // its first position in plane 0 of the lane's first channel
  int64_t plane_stride, load_stride;
  int inside;  // of its positions

  CONVT3D_DEVICE LanePlace(const ScatterArguments<Config>& a,
                           const typename ScatterWalk<Config>::Leg& leg, int first_channel) {
    const auto& source = a.source;
    constexpr bool last = Config::source_channels_last;
    const int position = threadIdx.x / 32 * Config::warp_positions +
                         threadIdx.x % 32 / 4 * Config::vector;
    const int line = position / a.width;
    const int i1 = leg.unit1 + Config::Axis1::min_shift + line;
    const int i2 = first_column<Config>(leg.unit2) + position - line * a.width;
    const bool there = line < a.tile1 + Config::Axis1::shifts - 1 &&
                       unsigned(i1) < unsigned(source.extent[1]);
    inside = there ? max(0, min(Config::vector, source.extent[2] - i2)) : 0;
    const int64_t at = inside > 0 ? int64_t(i1) * source.extent[2] + i2 : 0;
    plane_stride = int64_t(source.extent[1]) * source.extent[2] * (last ? Words::all_channels : 1);
    const int64_t channel_stride = last ? 1 : source.volume();
    load_stride = Config::load_channels * channel_stride;
    plane0 = source.group_base(leg.sample, leg.group, Config::source_channels, Words::all_channels,
                               last) +
             at * (last ? Words::all_channels : 1) + first_channel * channel_stride;
  }
};

template <typename Config>
using WindowSums = float[Config::Axis0::window][Config::fragments][Config::fragments_m][4];

/// Products of a step's source words with all columns. `weights`: this lane's, of this step.
template <typename Config>
CONVT3D_DEVICE void multiply_step(WindowSums<Config>& sum, const SourceWords<Config>& words,
                                  int step, uint32_t weights) {
  using Math = typename Config::Math;
  typename Math::A a[Config::fragments_m];
#pragma unroll
  for (int m = 0; m < Config::fragments_m; ++m) {
    const uint32_t raw[4] = {words.operand(step, 0, 2 * m), words.operand(step, 0, 2 * m + 1),
                             words.operand(step, 1, 2 * m), words.operand(step, 1, 2 * m + 1)};
    Math::prepare(a[m], raw);
  }
#pragma unroll
  for (int k0 = 0; k0 < CONVT3D_KERNEL0; ++k0)
#pragma unroll
    for (int n = 0; n < Config::fragments; ++n) {
      typename Math::B b;
      Math::load(b, weights + k0 * Config::tap_bytes + n * Config::fragment_bytes);
#pragma unroll
      for (int m = 0; m < Config::fragments_m; ++m) Math::multiply_add(sum[k0][n][m], a[m], b);
    }
}

/// Puts this warp's columns of the window's plane `plane` into a buffer.
template <typename Config>
CONVT3D_DEVICE void stage_plane(const WindowSums<Config>& sum, int plane, uint32_t buffer) {
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
      const auto& first = sum[plane][n][0];
      if constexpr (Config::vector == 4) {
        const auto& second = sum[plane][n][1];
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
  bool aligned;

  CONVT3D_DEVICE explicit PlaneOutputs(const ScatterArguments<Config>& a_)
      : a(a_), by_tile2(a_.tile2), by_tile(a_.tile1 * a_.tile2) {
    aligned = rows_are_vectors && a.target.extent[2] % slots2 == 0 &&
              reinterpret_cast<uint64_t>(a.target.data) % (slots2 * sizeof(Storage)) == 0;
  }

  CONVT3D_DEVICE void operator()(const typename ScatterWalk<Config>::Leg& leg, int o0,
                                 uint32_t buffer) const {
    const int units = a.tile1 * a.tile2;
    for (int item = threadIdx.x; item < units * Config::target_channels; item += Config::threads) {
      const int j = Config::target_channels == 1 ? 0 : by_tile.quotient(item);
      const int unit = item - j * units;
      const int line = by_tile2.quotient(unit);
      const int unit2 = leg.unit2 + unit - line * a.tile2;
      const int o1 = (leg.unit1 + line) * Axis1::unit_destination;
      const int o2 = unit2 * Axis2::unit_destination;
      if (o1 >= a.target.extent[1] || o2 >= a.target.extent[2]) continue;
      const int column = unit2 + Axis2::min_shift - first_column<Config>(leg.unit2);
      const uint32_t from = buffer + 4u * (j * Config::pitch + line * a.width + column);
      const int channel = leg.group * Config::target_channels + j;
      const float bias = Config::bias ? Type::load(__ldg(a.bias + channel)) : 0.f;
      const int64_t position =
          (int64_t(o0) * a.target.extent[1] + o1) * a.target.extent[2] + o2;
      Storage* to = a.target.data + leg.sample * all_channels * a.target.volume() +
                    (last ? position * all_channels + channel
                          : channel * a.target.volume() + position);
#pragma unroll
      for (int slot1 = 0; slot1 < Axis1::slots; ++slot1) {
        if (o1 + slot1 >= a.target.extent[1]) break;
        float row[slots2];
#pragma unroll
        for (int slot2 = 0; slot2 < slots2; ++slot2)
          row[slot2] = sum_of_taps(from, column, slot1, slot2, bias);
        store(to + int64_t(slot1) * a.target.extent[2] * (last ? all_channels : 1), row,
              a.target.extent[2] - o2);
      }
    }
  }

 private:
  /// `from`: the tile's position of the lowest shifts, `column` of its line.
  CONVT3D_DEVICE float sum_of_taps(uint32_t from, int column, int slot1, int slot2,
                                   float bias) const {
    float sum = bias;
#pragma unroll
    for (int k1 = 0; k1 < CONVT3D_KERNEL1; ++k1) {
      if (!Axis1::valid(slot1, k1)) continue;
      const int line = Axis1::shift_of(slot1, k1) - Axis1::min_shift;
#pragma unroll
      for (int k2 = 0; k2 < CONVT3D_KERNEL2; ++k2) {
        if (!Axis2::valid(slot2, k2)) continue;
        const int shift = Axis2::shift_of(slot2, k2) - Axis2::min_shift;
        if (unsigned(column + shift) < unsigned(a.width))
          sum += float_of(load_shared(
              from + 4u * (Config::column_of(k1, k2) * Config::pitch + line * a.width + shift)));
      }
    }
    return sum;
  }
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

template <typename Config>
CONVT3D_DEVICE void scatter(const ScatterArguments<Config>& a) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Axis0 = typename Config::Axis0;
  using Words = SourceWords<Config>;
  const uint32_t shared_base = shared_address(shared);
  const uint32_t lane_weights = shared_base + threadIdx.x % 32 * (4 * Config::lane_words);
  uint32_t buffer = shared_base + Config::weight_bytes;
  uint32_t other = buffer + Config::buffer_bytes;
  const int first_channel = threadIdx.x % 4 * Words::run;
  const int64_t volume = a.source.volume();
  const bool whole = !Words::last && a.source.extent[2] % Config::vector == 0 &&
                     reinterpret_cast<uint64_t>(a.source.data) %
                             (Config::vector * sizeof(typename Config::Storage)) == 0;
  const PlaneOutputs<Config> outputs(a);

  ScatterWalk<Config> walk(a);
  typename ScatterWalk<Config>::Leg leg;
  int held = -1;
  WindowSums<Config> sum;
  float* sums = &sum[0][0][0][0];
  constexpr int count = int(sizeof(sum) / sizeof(float));
  while (walk.next(leg, a)) {
    const LanePlace<Config> place(a, leg, first_channel);
    const auto plane_of = [&](int step) { return Axis0::source_plane(step, leg.volume0); };
    Words words[Config::batch];
    const typename Config::Storage* from = place.plane0 + plane_of(leg.begin) * place.plane_stride;
    const int first_inside = plane_of(leg.begin) < a.source.extent[0] ? place.inside : 0;
#pragma unroll
    for (int i = 0; i < Config::batch; ++i)
      words[i].load(from + i * place.load_stride, first_channel + i * Config::load_channels,
                    first_inside, whole, volume);
    if (leg.group != held) {
      if (held < 0)
        grid_dependency_wait();
      else
        __syncthreads();
      load_weights<Config>(a.weights + int64_t(leg.group) * Config::weight_bytes, shared_base);
      held = leg.group;
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < count; ++i) sums[i] = 0.f;
#pragma unroll 1
    for (int step = leg.begin; step < leg.end; ++step) {
      if (plane_of(step) < a.source.extent[0]) {
        const bool more = step + 1 < leg.end && plane_of(step + 1) < a.source.extent[0];
        const auto* ahead = place.plane0 + plane_of(step + 1) * place.plane_stride;
        uint32_t weights = lane_weights;
#pragma unroll 1
        for (int round = 0; round < Config::rounds; ++round) {
          // What is loaded while this round is multiplied: the next one, or the next plane's first.
          const bool next_round = round + 1 < Config::rounds;
          const int next = next_round ? (round + 1) * Config::batch : 0;
          from = next_round ? from + Config::batch * place.load_stride : ahead;
          const int inside = next_round || more ? place.inside : 0;
#pragma unroll
          for (int i = 0; i < Config::batch; ++i) {
            const Words now = words[i];
            words[i].load(from + i * place.load_stride,
                          first_channel + (next + i) * Config::load_channels, inside, whole,
                          volume);
#pragma unroll
            for (int s = 0; s < Config::load_steps; ++s, weights += Config::step_bytes)
              multiply_step<Config>(sum, now, s, weights);
          }
        }
      }
#pragma unroll
      for (int plane = 0; plane < Axis0::target_step; ++plane) {
        const int o0 = Axis0::target_plane(step * Axis0::target_step + plane, leg.volume0);
        if (step < leg.first || unsigned(o0) >= unsigned(a.target.extent[0])) continue;
        stage_plane<Config>(sum, plane, buffer);
        __syncthreads();
        outputs(leg, o0, buffer);
        const uint32_t read = buffer;
        buffer = other, other = read;
      }
      constexpr int leaving = count / Axis0::window * Axis0::target_step;
#pragma unroll
      for (int i = 0; i < count; ++i) sums[i] = i + leaving < count ? sums[i + leaving] : 0.f;
    }
  }
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::ScatterConfig::threads,
                                             convt3d::ScatterConfig::resident)
    convt3d_scatter(const convt3d::ScatterConfig::Storage* source, const unsigned char* weights,
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
  convt3d::scatter(arguments);
}
