// Source boxes of phases/kernel.cu that are transposed on their way to shared memory: what lies
// [channel][position] in the source becomes
//
//     [quad][sample][slice][line][position] of 16 bytes, the four words of a quad of channels,
//
// which is a row of an operand at any shift. Units are then loaded by ldmatrix. A lane loads four
// neighbouring positions of all channels of a quad (two or one where rows are no multiples of
// four), and stores each as a row some rounds later, perhaps in the next chunk or work tile. The
// places are computed once a work tile and kept in shared memory.
#pragma once
#include "device/barrier.cuh"
#include "phases/rings.cuh"

namespace convt3d {

/// Neighbouring positions of all channels of a quad, which are a row each.
template <typename Config>
struct TransposedVector {
  using Storage = typename Config::Storage;
  static constexpr int positions = Config::transposed_vector;
  static constexpr int channels = Config::quad_channels;
  static constexpr int bytes = positions * int(sizeof(Storage));
  static constexpr int words = div_up(bytes, 4);  // of a channel
  uint32_t word[channels][words];

  CONVT3D_DEVICE void clear() {
#pragma unroll
    for (int channel = 0; channel < channels; ++channel)
#pragma unroll
      for (int i = 0; i < words; ++i) word[channel][i] = 0;
  }
  /// `volume`: elements from a channel to the next.
  CONVT3D_DEVICE void load(const Storage* from, uint32_t volume) {
    // One instruction for the address of a channel.
    const uint32_t step = volume * uint32_t(sizeof(Storage));
    const char* at = reinterpret_cast<const char*>(from);
#pragma unroll
    for (int channel = 0; channel < channels; ++channel) {
      const char* own = at + uint64_t(step) * uint32_t(channel);
      if constexpr (bytes == 2) {
        word[channel][0] = __ldg(reinterpret_cast<const uint16_t*>(own));
      } else if constexpr (bytes == 4) {
        word[channel][0] = __ldg(reinterpret_cast<const uint32_t*>(own));
      } else if constexpr (bytes == 8) {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(own));
        word[channel][0] = v.x, word[channel][1] = v.y;
      } else {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(own));
        word[channel][0] = v.x, word[channel][1] = v.y;
        word[channel][2] = v.z, word[channel][3] = v.w;
      }
    }
  }
  /// The row of a position.
  CONVT3D_DEVICE void row(int j, uint32_t (&row)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if constexpr (Config::Type::channels_per_word == 1)
        row[i] = round_tf32_operand(word[i][j]);
      else
        row[i] = permute_bytes(word[2 * i][j / 2], word[2 * i + 1][j / 2], j % 2 ? 0x7632 : 0x5410);
  }
};

/// One of the threads that transpose boxes.
template <typename Config>
struct PhasesTransposer {
  using Storage = typename Config::Storage;
  using Arguments = PhasesArguments<Storage>;
  using Walk = PhasesWalk<Config>;
  static constexpr int vector = Config::transposed_vector;  // positions
  static_assert(vector == 1 || vector == 2 || vector == 4, "one load a channel");
  static constexpr int channels = Config::quad_channels;
  /// Vectors of a lane: all but one are on their way. Fewer warps have more registers.
  static constexpr int sets = Config::producers == 1 || vector < 4 ? 4 : 2;

  const Arguments& a;
  uint32_t boxes_at, table;
  int transposer;
  int samples, slices, lines, width;  // of a box
  bool whole;  // of W in every box: what is beside the source stays zero
  int vectors, count;  // of a line, of a box
  Divider by_vectors, by_lines, by_slices, by_samples;

  CONVT3D_DEVICE PhasesTransposer(const Arguments& arguments, uint32_t shared, int transposer_)
      : a(arguments),
        boxes_at(shared + Config::box_offset),
        table(shared + arguments.staging_offset + Config::staging_bytes),
        transposer(transposer_),
        samples(arguments.tile[0]),
        slices(arguments.sample_pitch / arguments.slice_pitch),
        lines(arguments.slice_pitch / arguments.line_pitch),
        width(arguments.tile[3] + Config::Axis2::shifts - 1),
        whole(arguments.tiles[3] == 1),
        vectors(whole ? arguments.source.extent[2] / vector : div_up(width + vector - 1, vector)),
        count(Config::quads * samples * slices * lines * vectors),
        by_vectors(vectors),
        by_lines(lines),
        by_slices(slices),
        by_samples(samples) {}

  CONVT3D_DEVICE void fill(AStageRing<Config> a_stages) const {
    for (int at = transposer * 16; at < Config::source_stages * a.box_bytes; at += Config::fillers * 16)
      store_shared(boxes_at + at, 0u, 0u, 0u, 0u);
    named_barrier_sync(1, Config::fillers);
    Cursor cursor{Walk(a), a.source.data, Config::chunks, 0};
    const int rounds = div_up(count, Config::fillers);
    Vectors found[sets];
#pragma unroll
    for (int i = 0; i + 1 < sets; ++i) found[i].place = nothing;
    int round = 0;
#pragma unroll 1
    while (true) {
#pragma unroll
      for (int i = 0; i < sets; ++i) {
        load(found[(i + sets - 1) % sets], cursor, rounds);
        if (found[i].place == ended) return;
        if (found[i].place == nothing) continue;
        if (round == 0) a_stages.wait_empty();
        store(found[i], boxes_at + a_stages.stage * a.box_bytes);
        if (++round < rounds) continue;
        round = 0;
        mbarrier_arrive(a_stages.full());
        a_stages.advance();
      }
    }
  }

 private:
  struct Vectors : TransposedVector<Config> {
    uint32_t place;
  };
  static constexpr uint32_t ended = ~0u, nothing = ended - 1;  // no places
  /// What is loaded next: a round of a chunk, whose first channel begins at `from`.
  struct Cursor {
    Walk walk;
    const Storage* from;
    int chunk, round;
  };

  /// Writes what this thread loads of every chunk: the first channel's element, or all ones where
  /// it is not in the source, and rows of the box: which of them it has, a bit each, and the
  /// first, counted from `vector` positions before the box.
  CONVT3D_DEVICE void locate(const WorkTile& work) const {
    const int first2 = work.first[2] + Config::Axis2::min_shift;
    const int begin = whole ? 0 : first2 - floor_mod(first2, vector);
    for (int i = transposer; i < count; i += Config::fillers) {
      const int by_line = by_vectors.quotient(i);
      const int by_slice = by_lines.quotient(by_line);
      const int by_sample = by_slices.quotient(by_slice);
      const int quad = by_samples.quotient(by_sample);
      const int line = by_line - by_slice * lines, slice = by_slice - by_sample * slices;
      const int sample = by_sample - quad * samples;
      const int w = begin + (i - by_line * vectors) * vector;
      const int h = work.first[1] + work.taps[1].origin + line;
      const int d = work.first[0] + work.taps[0].origin + slice;
      const bool inside = a.source.inside(d, h, w) && work.sample + sample < a.batch;
      const int64_t channel = int64_t(sample) * Config::groups * Config::source_channels +
                              quad * channels;
      const int64_t element = channel * a.source.volume() + int64_t(d) * a.source.stride0 +
                              int64_t(h) * a.source.stride1 + w;
      uint32_t mask = 0;
#pragma unroll
      for (int j = 0; j < vector; ++j) mask |= uint32_t(unsigned(w - first2 + j) < unsigned(width)) << j;
      const int row = sample * a.sample_pitch + slice * a.slice_pitch + line * a.line_pitch +
                      quad * a.channel_pitch + w - first2 + vector;
      store_shared(table + 8 * i, inside ? uint32_t(element) : ~0u, uint32_t(row) << vector | mask);
    }
  }

  CONVT3D_DEVICE void load(Vectors& found, Cursor& cursor, int rounds) const {
    const int64_t volume = a.source.volume();
    if (cursor.chunk == Config::chunks) {
      WorkTile work;
      do {
        found.place = ended;
        if (!cursor.walk.next(a, work)) return;
      } while (work.taps_of_chunk() == 0);
      locate(work);
      cursor.from = a.source.data + (int64_t(work.sample) * Config::groups + work.group) *
                                        Config::source_channels * volume;
      cursor.chunk = 0;
    }
    const int index = transposer + cursor.round * Config::fillers;
    uint32_t element = ~0u;
    found.place = 0;
    if (index < count) load_shared(table + 8 * index, element, found.place);
    const Storage* from = cursor.from;
    if (++cursor.round == rounds) {
      cursor.round = 0;
      ++cursor.chunk;
      cursor.from += Config::chunk_channels * volume;
    }
    const bool inside = element != ~0u;
    if (__any_sync(0xffffffffu, !inside)) found.clear();
    if (!inside) return;
    found.load(from + element, uint32_t(volume));
  }

  CONVT3D_DEVICE void store(const Vectors& found, uint32_t box) const {
    const uint32_t to = box + ((found.place >> vector) - vector) * 16;
#pragma unroll
    for (int j = 0; j < vector; ++j) {
      uint32_t row[4];
      found.row(j, row);
      if (found.place >> j & 1) store_shared(to + 16 * j, row[0], row[1], row[2], row[3]);
    }
  }
};

}  // namespace convt3d
