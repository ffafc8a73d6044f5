// A box of positions of an activation tensor, copied to shared memory by a whole CTA.
//
// In shared memory a *word* is one float or two 16-bit channels. Three arrangements exist:
//   plane-major     [word][axis 0][axis 1][axis 2]      planes `plane_pitch` words apart
//   position-major  [axis 0][axis 1][axis 2][word]      positions `position_pitch` words apart
//   paired          [channel][axis 0][axis 1][axis 2]   16 bits: plane-major, a word is two positions
// Along axis 2, positions of equal residue modulo `residues` are stored together, so that every
// residues-th position is a neighbour. What lies outside the tensor becomes zero.
//
// Float32, channels_last and paired sources move by cp.async; other contiguous 16-bit sources pass
// through registers, where their channels are paired. A paired box takes tensors whose W and
// address are multiples of its vector of 8, begins at such a position, and is as wide.
//
// A Box supplies what is known at compile time: Type; channels_last, position_major, paired; threads;
// words; residues; vector (elements of one copy, where addresses allow); plane_pitch,
// position_pitch; channels (of a group), all_channels; step0, step1, step2 (tensor positions from
// one box position to the next). Its extents are a BoxShape.
#pragma once
#include "geometry/axis.cuh"

namespace convt3d {

/// A tensor seen by a kernel: extents and strides in positions, in the kernel's order of axes.
template <typename Storage>
struct Activation {
  Storage* data;
  int extent[3];
  int stride0, stride1;

  CONVT3D_DEVICE int64_t volume() const { return int64_t(extent[0]) * extent[1] * extent[2]; }
  CONVT3D_DEVICE bool inside(int i0, int i1, int i2) const {
    return unsigned(i0) < unsigned(extent[0]) && unsigned(i1) < unsigned(extent[1]) &&
           unsigned(i2) < unsigned(extent[2]);
  }
  /// The first element of a group's channels of one sample.
  CONVT3D_DEVICE Storage* group_base(int sample, int group, int channels, int64_t all_channels,
                                     bool channels_last) const {
    return data + int64_t(sample) * all_channels * volume() +
           int64_t(group) * channels * (channels_last ? 1 : volume());
  }
};

/// Exact division of small numbers by a run-time divisor, as one multiplication.
struct Divider {
  uint32_t divisor, magic;
  CONVT3D_DEVICE explicit Divider(int divisor_)
      : divisor(divisor_), magic(divisor_ == 1 ? 0 : 0xffffffffu / divisor_ + 1) {}
  /// n / divisor, for n * divisor < 2^32.
  CONVT3D_DEVICE int quotient(int n) const {
    return divisor == 1 ? n : int(__umulhi(uint32_t(n), magic));
  }
};

template <typename Box>
struct BoxShape {
  // Vector fills begin at an aligned position, up to vector - 1 before the box's first.
  static constexpr bool aligned_rows = !Box::channels_last && !Box::position_major &&
                                       !Box::paired && Box::vector > 1 && Box::residues == 1;
  static_assert(Box::channels_last || Box::vector == 1 || Box::residues == 1 ||
                    Box::Type::channels_per_word == 2,
                "asynchronous vector copies cannot separate residues");
  static_assert(Box::channels_last || Box::vector == 1 || Box::step2 == 1,
                "vector copies take neighbouring positions");
  static_assert(Box::channels_last || Box::Type::channels_per_word == 2 || !Box::position_major,
                "contiguous float32 boxes are plane-major");

  int size0, size1, size2;
  int residue_width;  // positions of one residue in a row
  int pitch2, pitch1;  // positions from a row, and from a slice of axis 0, to the next

  CONVT3D_DEVICE BoxShape(int size0_, int size1_, int size2_)
      : size0(size0_), size1(size1_), size2(size2_) {
    const int width =
        aligned_rows ? (size2 + Box::vector - 1 + Box::vector - 1) / Box::vector * Box::vector
                     : size2;
    residue_width = (width + Box::residues - 1) / Box::residues;
    pitch2 = Box::residues * residue_width;
    pitch1 = size1 * pitch2;
  }
  CONVT3D_DEVICE int column_of(int x) const {
    return Box::residues == 1 ? x : x % Box::residues * residue_width + x / Box::residues;
  }
};

template <typename Box>
struct BoxFill {
  using Type = typename Box::Type;
  using Storage = typename Type::Storage;
  using Shape = BoxShape<Box>;
  static constexpr int box_channels = Box::words * Type::channels_per_word;

  const Activation<const Storage>& tensor;
  Shape shape;
  Divider by_size1, by_width;
  int64_t volume;
  bool vectorised;

  CONVT3D_DEVICE BoxFill(const Activation<const Storage>& tensor_, const Shape& shape_)
      : tensor(tensor_), shape(shape_), by_size1(shape_.size1), by_width(1) {
    volume = tensor.volume();
    vectorised = !Box::channels_last && !Box::paired && Box::vector > 1 &&
                 tensor.extent[2] % Box::vector == 0 &&
                 reinterpret_cast<uint64_t>(tensor.data) % (Box::vector * sizeof(Storage)) == 0;
    by_width = Divider(Box::paired || vectorised ? vectors2<Box::vector>() : shape.size2);
  }

  /// Positions that an aligned row begins before the box's first one.
  CONVT3D_DEVICE int lead(int origin2) const {
    return vectorised ? floor_mod(origin2, Box::vector) : 0;
  }
  /// The same, where it shifts what readers find.
  CONVT3D_DEVICE int row_lead(int origin2) const {
    return Shape::aligned_rows ? lead(origin2) : 0;
  }

  /// `base`: the group's channels of one sample; `channel`: the first one to copy.
  CONVT3D_DEVICE void operator()(const Storage* base, int channel, int origin0, int origin1,
                                 int origin2, uint32_t destination) const {
    if constexpr (Box::channels_last)
      channels_last(base, channel, origin0, origin1, origin2, destination);
    else if constexpr (Box::paired)
      contiguous<Box::vector>(base, channel, origin0, origin1, origin2, destination);
    else if (Box::vector > 1 && vectorised)
      contiguous<Box::vector>(base, channel, origin0, origin1, origin2, destination);
    else
      contiguous<1>(base, channel, origin0, origin1, origin2, destination);
  }

 private:
  /// Vectors that cover a row wherever its aligned start lies.
  template <int vector>
  CONVT3D_DEVICE int vectors2() const {
    if constexpr (Box::paired) return shape.size2 / vector;
    return vector == 1 ? shape.size2 : (shape.size2 + 2 * (vector - 1)) / vector;
  }

  /// Rows of W moved `vector` positions at a time; W and the address are multiples of it.
  template <int vector>
  CONVT3D_DEVICE void contiguous(const Storage* base, int channel, int origin0, int origin1,
                                 int origin2, uint32_t destination) const {
    const int width = vectors2<vector>();
    const int items = shape.size0 * shape.size1 * width;
    const int first = origin2 - (vector == 1 ? 0 : lead(origin2));
    for (int item = threadIdx.x; item < items; item += Box::threads) {
      const int row = by_width.quotient(item);
      const int x = (item - row * width) * vector;
      const int slice = by_size1.quotient(row);
      const int i0 = origin0 + slice * Box::step0;
      const int i1 = origin1 + (row - slice * shape.size1) * Box::step1;
      const int i2 = first + x * Box::step2;
      const bool valid = tensor.inside(i0, i1, i2);
      const int position = valid ? i0 * tensor.stride0 + i1 * tensor.stride1 + i2 : 0;
      const Storage* from = base + channel * volume + position;
      if constexpr (Type::channels_per_word == 1 || Box::paired) {
        constexpr int bytes = sizeof(Storage);
        const uint32_t to =
            destination + uint32_t(bytes) * (row * shape.pitch2 + shape.column_of(x));
#pragma unroll
        for (int word = 0; word < Box::words; ++word) {
          const bool live =
              valid && (Box::channels % Box::words == 0 || channel + word < Box::channels);
          async_copy<bytes * vector>(to + 4u * word * Box::plane_pitch, from, live);
          // Past the last channel nothing is read, and the pointer stays inside.
          if (Box::channels % Box::words == 0 || channel + word + 1 < Box::channels) from += volume;
        }
      } else {
        pair_channels<vector>(from, channel, valid, destination, row, x,
                              vector == 1 ? 0 : origin2 - first);
      }
    }
  }

  /// Channels of `vector` neighbouring positions, loaded as vectors, stored as words of two, a
  /// few words at a time so that the loads in flight fit in registers.
  template <int vector>
  CONVT3D_DEVICE void pair_channels(const Storage* from, int channel, bool valid,
                                    uint32_t destination, int row, int x, int before) const {
    constexpr int batch = Box::words % 8 == 0 ? 8 : Box::words % 4 == 0 ? 4 : Box::words;
    static_assert(batch <= 8, "loads in flight fit in registers");
    // Neighbouring lanes are `vector` positions apart and share banks: so in fours, where they can.
    constexpr int together =
        Box::position_major && batch % 4 == 0 && Box::position_pitch % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int first = 0; first < Box::words; first += batch) {
      HalfVector<vector> loaded[2 * batch];
#pragma unroll
      for (int c = 0; c < 2 * batch; ++c) {
        if (valid && channel + 2 * first + c < Box::channels)
          loaded[c].load(from + (2 * first + c) * volume);
        else
          loaded[c].clear();
      }
#pragma unroll
      for (int word = 0; word < batch; word += together) {
        uint32_t pairs[together][vector];
#pragma unroll
        for (int w = 0; w < together; ++w)
#pragma unroll
          for (int v = 0; v < vector; ++v)
            pairs[w][v] = loaded[2 * (word + w)].pair(loaded[2 * (word + w) + 1], v);
        if constexpr (together == 4)
          store_quads<vector>(pairs, destination, first + word, row, x, before);
        else
          store_pairs<vector>(pairs[0], destination, first + word, row, x, before);
      }
    }
  }

  /// Four words of each position, position-major.
  template <int vector>
  CONVT3D_DEVICE void store_quads(const uint32_t (&quads)[4][vector], uint32_t destination,
                                  int word, int row, int x, int before) const {
#pragma unroll
    for (int v = 0; v < vector; ++v) {
      const int column = x + v - before;
      if (vector == 1 || unsigned(column) < unsigned(shape.size2))
        store_shared(
            destination +
                4u * ((row * shape.pitch2 + shape.column_of(column)) * Box::position_pitch + word),
            quads[0][v], quads[1][v], quads[2][v], quads[3][v]);
    }
  }

  template <int vector>
  CONVT3D_DEVICE void store_pairs(const uint32_t (&pairs)[vector], uint32_t destination, int word,
                                  int row, int x, int before) const {
    const uint32_t plane =
        destination + 4u * (Box::position_major ? word : word * Box::plane_pitch);
    constexpr int step = Box::position_major ? Box::position_pitch : 1;
    if constexpr (Shape::aligned_rows && vector == 2) {
      store_shared(plane + 4u * (row * shape.pitch2 + x), pairs[0], pairs[1]);
    } else if constexpr (Shape::aligned_rows && vector % 4 == 0) {
#pragma unroll
      for (int v = 0; v < vector; v += 4)
        store_shared(plane + 4u * (row * shape.pitch2 + x + v), pairs[v], pairs[v + 1],
                     pairs[v + 2], pairs[v + 3]);
    } else {
#pragma unroll
      for (int v = 0; v < vector; ++v) {
        const int column = x + v - before;
        if (vector == 1 || unsigned(column) < unsigned(shape.size2))
          store_shared(plane + 4u * (row * shape.pitch2 + shape.column_of(column)) * step,
                       pairs[v]);
      }
    }
  }

  CONVT3D_DEVICE void channels_last(const Storage* base, int channel, int origin0, int origin1,
                                    int origin2, uint32_t destination) const {
    // Channels moved at once. Of odd 16-bit channel counts a thread joins two into a word.
    constexpr bool joined = Box::vector * sizeof(Storage) < 4;
    constexpr int vector = joined ? 2 : Box::vector;
    constexpr int pieces = box_channels / vector;
    constexpr int bytes = vector * int(sizeof(Storage));
    const int items = shape.size0 * shape.size1 * shape.size2 * pieces;
    for (int item = threadIdx.x; item < items; item += Box::threads) {
      const int piece = item % pieces;
      const int row = by_width.quotient(item / pieces);
      const int x = item / pieces - row * shape.size2;
      const int slice = by_size1.quotient(row);
      const int i0 = origin0 + slice * Box::step0;
      const int i1 = origin1 + (row - slice * shape.size1) * Box::step1;
      const int i2 = origin2 + x * Box::step2;
      const int c = channel + piece * vector;
      const bool valid = tensor.inside(i0, i1, i2) && c < Box::channels;
      const int64_t position = valid ? i0 * tensor.stride0 + i1 * tensor.stride1 + i2 : 0;
      const Storage* from = valid ? base + position * Box::all_channels + c : tensor.data;
      const int where = row * shape.pitch2 + shape.column_of(x);
      const uint32_t to = destination + 4u * where * Box::position_pitch + piece * bytes;
      if constexpr (!joined) {
        async_copy<bytes>(to, from, valid);
      } else {
        const Storage low = valid ? __ldg(from) : Storage(0);
        const Storage high = valid && c + 1 < Box::channels ? __ldg(from + 1) : Storage(0);
        store_shared(to, Type::word(low, high));
      }
    }
  }
};

}  // namespace convt3d
