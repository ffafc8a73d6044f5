// The producers of a sweep: one warp streams packed weights with bulk copies,
// the others gather source boxes through registers, where float32 is rounded to TF32 (or split
// into two TF32 parts) and channels that are far apart become quads of words.
#pragma once
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "sweep/config.cuh"

namespace convt3d {

/// One lane: the weight stages of all steps, each one contiguous copy; or sets that stay, as long
/// as a column tile lasts.
template <typename Config>
CONVT3D_DEVICE void stream_weights(const SweepArguments<typename Config::Storage>& arguments,
                                   const RowSpace<Config>& space, uint32_t shared_base,
                                   Ring<Config::weight_stages> ring) {
  grid_dependency_wait();  // for the packed weights
  Walk<Config> walk(arguments, space);
  typename Walk<Config>::Leg leg;
  int held = -1;
  while (walk.next(leg)) {
    const unsigned char* packed = arguments.weights + int64_t(leg.set()) * Config::set_bytes;
    if constexpr (Config::keep_weights) {
      if (leg.set() == held) continue;
      held = leg.set();
      ring.wait_empty();
      mbarrier_expect(ring.full(), Config::set_bytes);
      for (int chunk = 0; chunk < Config::chunks; ++chunk)
        bulk_copy(shared_base + Config::weight_offset + chunk * Config::chunk_bytes,
                  packed + int64_t(chunk) * Config::chunk_bytes, Config::chunk_bytes, ring.full());
      ring.advance();
      continue;
    }
    packed += leg.taps1.first_position * Config::stage_bytes;
    for (int step = leg.begin; step < leg.end; ++step) {
      if (!walk.multiplies(leg, step, arguments.source.extent[0])) continue;
      for (int chunk = 0; chunk < Config::chunks; ++chunk)
        for (int tap1 = 0; tap1 < leg.taps1.count; ++tap1) {
          ring.wait_empty();
          mbarrier_expect(ring.full(), Config::stage_bytes);
          bulk_copy(shared_base + Config::weight_offset + ring.stage * Config::stage_bytes,
                    packed + int64_t(chunk) * Config::chunk_bytes + tap1 * Config::stage_bytes,
                    Config::stage_bytes, ring.full());
          ring.advance();
        }
    }
  }
}

/// Source boxes. A thread owns one quad of the chunk's words and, of every (residue of axis 1,
/// plane), `items` pairs of neighbours along W, whose places it works out once for a column of
/// the sweep. Where rows of the tensor have even length and are aligned, a pair is loaded as one
/// (`vector` 2).
template <typename Config>
struct SourceFill {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  static constexpr int slots = 16 * Config::fill_warps;  // threads that share a quad
  static constexpr int items = Config::fill_pairs;
  static constexpr int loads = Config::residues1 * Axis0::source_step * items;
  static constexpr int residues2 = Config::residues2;
  static constexpr bool last = Config::source_channels_last;
  static constexpr int64_t all_channels = int64_t(Config::groups) * Config::source_channels;
  static constexpr int quad_channels = Config::quad_channels;
  /// Whole quads of channels lie together (channels_last, 16 bytes).
  static constexpr bool whole_quads = last && Config::source_channels % quad_channels == 0;
  static constexpr bool whole_chunks = Config::source_channels % Config::chunk_channels == 0;

  const SweepArguments<Storage>& arguments;
  int64_t volume;
  uint32_t a_stages;
  int quad, slot;

  CONVT3D_DEVICE SourceFill(const SweepArguments<Storage>& arguments_, uint32_t shared_base,
                            int thread)
      : arguments(arguments_),
        volume(arguments_.source.volume()),
        a_stages(shared_base + Config::source_offset),
        quad(thread % 2),
        slot(thread / 2) {}

  /// The four words of a quad at two neighbouring positions.
  template <int vector>
  struct Pair {
    static constexpr bool together = vector == 2 && Type::channels_per_word == 2;
    uint32_t word[8];  // together: a word holds both positions of one channel

    /// `from`: the first channel at each position; null where there is none.
    CONVT3D_DEVICE void load(const Storage* const (&from)[2 / vector], int64_t volume,
                             int channel) {
#pragma unroll
      for (int i = 0; i < 8; ++i) word[i] = 0;
      if constexpr (vector == 2) {
#pragma unroll
        for (int c = 0; c < quad_channels; ++c) {
          if (!from[0] || !(whole_chunks || channel + c < Config::source_channels)) continue;
          const Storage* at = from[0] + c * volume;
          if constexpr (together) {
            word[c] = __ldg(reinterpret_cast<const uint32_t*>(at));
          } else {
            const float2 v = __ldg(reinterpret_cast<const float2*>(at));
            word[c] = bits_of(v.x), word[4 + c] = bits_of(v.y);
          }
        }
      } else {
#pragma unroll
        for (int position = 0; position < 2; ++position) {
          if (!from[position]) continue;
          if constexpr (whole_quads) {
            if (!(whole_chunks || channel < Config::source_channels)) continue;
            const uint4 v = __ldg(reinterpret_cast<const uint4*>(from[position]));
            word[4 * position] = v.x, word[4 * position + 1] = v.y;
            word[4 * position + 2] = v.z, word[4 * position + 3] = v.w;
          } else {
            const int64_t step = last ? 1 : volume;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              Storage part[Type::channels_per_word];
#pragma unroll
              for (int j = 0; j < Type::channels_per_word; ++j) {
                const int c = i * Type::channels_per_word + j;
                const bool live = whole_chunks || channel + c < Config::source_channels;
                part[j] = live ? __ldg(from[position] + c * step) : Storage(0);
              }
              word[4 * position + i] = Type::word(part[0], part[Type::channels_per_word - 1]);
            }
          }
        }
      }
    }

    CONVT3D_DEVICE uint32_t at(int position, int i) const {
      if constexpr (together)
        return permute_bytes(word[2 * i], word[2 * i + 1], position ? 0x7632 : 0x5410);
      else
        return word[4 * position + i];
    }
    CONVT3D_DEVICE void store(uint32_t to, int position) const {
      uint32_t v[4], small[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = at(position, i);
        if constexpr (Config::parts > 1)
          Config::Math::split(v[i], v[i], small[i]);
        else if constexpr (Type::channels_per_word == 1)
          // Ties to even, as PyTorch's results have them, where that takes no time.
          v[i] = last ? round_tf32_operand(v[i]) : round_tf32(float_of(v[i]));
      }
      store_shared(to, v[0], v[1], v[2], v[3]);
      if constexpr (Config::parts > 1)
        store_shared(to + Config::part_bytes, small[0], small[1], small[2], small[3]);
    }
  };

  /// Elements of axis 2, counted from the tile's first row: rows times residues. A pair begins
  /// `lead` before an even one, so that it is aligned in the tensor.
  CONVT3D_DEVICE int first_element(int item, int lead) const {
    return 2 * (slot + item * slots) - lead;
  }

  /// Offsets of this thread's pairs for one column of the sweep; negative where there is nothing.
  template <int vector>
  struct Places {
    int64_t at[Config::residues1][items][2 / vector];
    int lead;

    CONVT3D_DEVICE Places(const SourceFill& fill, const RowTile<Config>& tile, int elements) {
      const auto& source = fill.arguments.source;
      lead = vector == 2 ? (tile.column * residues2 + Axis2::min_shift) & 1 : 0;
      // One text for all places, each selected into its register: compiled once, run once a
      // column.
      constexpr int count = Config::residues1 * items * (2 / vector);
      int64_t* const places = &at[0][0][0];
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const int residue1 = i / (items * (2 / vector));
        const int element =
            fill.first_element(i / (2 / vector) % items, lead) + i % (2 / vector);
        const int clamped = element < 0 ? 0 : element;
        const int row = clamped / residues2;
        const auto place = tile.locate(row);
        const int i1 = place.line * Config::residues1 + residue1 + Axis1::min_shift;
        const int i2 = (place.first2 + place.column - row) * residues2 + element +
                       Axis2::min_shift;
        const bool inside = element < elements && unsigned(i1) < unsigned(source.extent[1]) &&
                            unsigned(i2) < unsigned(source.extent[2]) &&
                            place.sample < fill.arguments.batch;
        const int64_t found =
            inside ? place.sample * all_channels * fill.volume +
                         (int64_t(i1) * source.stride1 + i2) * (last ? all_channels : 1)
                   : -1;
#pragma unroll
        for (int j = 0; j < count; ++j) places[j] = i == j ? found : places[j];
      }
    }
  };

  /// One chunk of one step's box, once its buffer is empty. `base`: this thread's quad of the
  /// chunk.
  template <int vector>
  CONVT3D_DEVICE void box(const Places<vector>& places, const Storage* base, int channel,
                          int plane0, int elements,
                          const Ring<Config::source_stages>& ring) const {
    const auto& source = arguments.source;
    const uint32_t destination =
        a_stages + ring.stage * Config::box_bytes + quad * Config::quad_bytes;
#pragma unroll
    for (int first = 0; first < loads; first += Config::fill_batch) {
      Pair<vector> pair[Config::fill_batch];
#pragma unroll
      for (int i = first; i < first + Config::fill_batch && i < loads; ++i) {
        const int item = i % items, plane = i / items % Axis0::source_step;
        const int residue1 = i / (items * Axis0::source_step);
        const int i0 = plane0 + plane * Axis0::interleaved;
        const bool valid = unsigned(i0) < unsigned(source.extent[0]);
        const Storage* start = base + int64_t(i0) * source.stride0 * (last ? all_channels : 1);
        const Storage* from[2 / vector];
#pragma unroll
        for (int h = 0; h < 2 / vector; ++h) {
          const int64_t at = places.at[residue1][item][h];
          from[h] = valid && at >= 0 ? start + at : nullptr;
        }
        pair[i - first].load(from, volume, channel);
      }
      if (first == 0) ring.wait_empty();
#pragma unroll
      for (int i = first; i < first + Config::fill_batch && i < loads; ++i) {
        const int item = i % items, plane = i / items % Axis0::source_step;
        const int residue1 = i / (items * Axis0::source_step);
        const int begin = first_element(item, places.lead);
#pragma unroll
        for (int position = 0; position < 2; ++position) {
          const int element = begin + position;
          if (element < 0 || element >= elements) continue;
          const int row = element / residues2;
          pair[i - first].store(
              destination + plane * Config::plane_bytes +
                  (residue1 * residues2 + element - row * residues2) * Config::sub_box_bytes +
                  16 * row,
              position);
        }
      }
    }
  }

  /// Whether pairs along W are aligned and whole, also where one line of rows ends.
  CONVT3D_DEVICE bool pairs(const RowSpace<Config>& space) const {
    if constexpr (last) {
      return false;
    } else {
      const int extent2 = arguments.source.extent[2];
      constexpr int min_shift = Axis2::min_shift;
      // A pair that belongs to two lines must be zero in both.
      const bool zeros = min_shift < 0 && space.pieces == 1 &&
                         space.pitch2 * residues2 >= extent2 - min_shift;
      return extent2 % 2 == 0 &&
             reinterpret_cast<uint64_t>(arguments.source.data) % (2 * sizeof(Storage)) == 0 &&
             space.pitch2 * residues2 % 2 == 0 &&
             (space.pieces == 1 || space.tile2 * residues2 % 2 == 0) &&
             (min_shift % 2 == 0 || zeros);
    }
  }

  /// All boxes of this CTA, in order.
  template <int vector>
  CONVT3D_DEVICE void run(const RowSpace<Config>& space,
                          Ring<Config::source_stages> ring) const {
    Walk<Config> walk(arguments, space);
    typename Walk<Config>::Leg leg;
    const int elements =
        (Config::rows + Config::reach1 * space.pitch2 + Config::reach2) * residues2;
    while (walk.next(leg)) {
      const Places<vector> places(*this, RowTile<Config>(space, leg.tile), elements);
      const int first = leg.group * Config::source_channels;
#pragma unroll 1
      for (int step = leg.begin; step < leg.end; ++step) {
        if (!walk.multiplies(leg, step, arguments.source.extent[0])) continue;
        const int plane0 = Axis0::source_plane(step * Axis0::source_step, leg.volume0);
#pragma unroll 1
        for (int chunk = 0; chunk < Config::chunks; ++chunk) {
          const int channel = chunk * Config::chunk_channels + quad * quad_channels;
          box<vector>(places,
                      arguments.source.data + int64_t(first + channel) * (last ? 1 : volume),
                      channel, plane0, elements, ring);
          fence_async_proxy();
          __syncwarp();
          if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.full());
          ring.advance();
        }
      }
    }
  }
  CONVT3D_DEVICE void run(const RowSpace<Config>& space,
                          Ring<Config::source_stages> ring) const {
    if (!last && pairs(space))
      run<last ? 1 : 2>(space, ring);
    else
      run<1>(space, ring);
  }
};

}  // namespace convt3d
