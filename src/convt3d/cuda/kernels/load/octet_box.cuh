// A box of positions of a contiguous 16-bit tensor, copied to shared memory by a whole CTA so
// that ldmatrix reads a matrix product's rows from it at any shift along W:
//
//   [octet of channels][axis 0][axis 1][axis 2][8 channels]     16 bytes a position
//
// Eight neighbouring positions are 128 bytes without bank conflicts. Rows of W are multiples of
// eight positions. They arrive by cp.async as they lie, in blocks of eight channels by eight
// positions, whose rows are exchanged so that copies of neighbouring blocks fall in different
// banks; once all has landed, warps transpose the blocks in place. Rows that no copy of four
// bytes fits pass through registers and arrive transposed. What lies outside the tensor becomes
// zero.
//
// A Box supplies Type; threads; words (of four bytes a position); plane_positions (room of an
// octet, a multiple of 32); channels (of a group).
#pragma once
#include "load/box.cuh"

namespace convt3d {

struct OctetShape {
  int size0, size1, size2;
  int pitch2, pitch1;  // positions from a row, and from a slice of axis 0, to the next

  CONVT3D_DEVICE int column_of(int x) const { return x; }
};

template <typename Box>
struct OctetFill {
  using Type = typename Box::Type;
  using Storage = typename Type::Storage;
  static_assert(Type::channels_per_word == 2, "octets are of 16-bit channels");
  static_assert(Box::plane_positions % 32 == 0, "four blocks are transposed at once");
  static constexpr int octets = Box::words / 4;
  static constexpr int plane_bytes = 16 * Box::plane_positions;
  static constexpr bool whole = Box::channels % (8 * octets) == 0;

  const Activation<const Storage>& tensor;
  OctetShape shape;
  int vector;  // positions of one copy; 1: through registers
  int first2;  // where rows begin, at or before the box's first position
  int lead;
  Divider by_size1, by_width;
  int64_t volume;

  CONVT3D_DEVICE OctetFill(const Activation<const Storage>& tensor_, int size0, int size1,
                           int size2, int origin2)
      : tensor(tensor_), by_size1(size1), by_width(1) {
    volume = tensor.volume();
    vector = 8;
    while (vector > 1 &&
           (tensor.extent[2] % vector != 0 ||
            reinterpret_cast<uint64_t>(tensor.data) % (2 * vector) != 0))
      vector /= 2;
    // Rows that begin at a multiple of eight are longer at times: then copies of four move them.
    const int pitch2 = round_up(floor_mod(origin2, min(vector, 4)) + size2, 8);
    if (vector == 8 && floor_mod(origin2, 8) + size2 > pitch2) vector = 4;
    lead = floor_mod(origin2, vector);
    first2 = origin2 - lead;
    shape = {size0, size1, size2, pitch2, size1 * pitch2};
    by_width = Divider(vector == 1 ? size2 : pitch2 / vector);
  }

  CONVT3D_DEVICE int row_lead(int) const { return lead; }

  /// `base`: the group's channels of one sample; `channel`: the first one to copy. `destination`
  /// is a multiple of 128 bytes.
  CONVT3D_DEVICE void operator()(const Storage* base, int channel, int origin0, int origin1, int,
                                 uint32_t destination) const {
    const Storage* from = base + channel * volume;
    if (vector == 8)
      copy<8>(from, channel, origin0, origin1, destination);
    else if (vector == 4)
      copy<4>(from, channel, origin0, origin1, destination);
    else if (vector == 2)
      copy<2>(from, channel, origin0, origin1, destination);
    else
      transfer(from, channel, origin0, origin1, destination);
  }

  /// Whether boxes have to be transposed once they have landed.
  CONVT3D_DEVICE bool transposes() const { return vector > 1; }

  /// Four blocks of each octet at a time; what is read past the last one is room of the plane.
  CONVT3D_DEVICE void transpose(uint32_t destination) const {
    constexpr int batch = octets < 4 ? octets : 4;
    const int lane = threadIdx.x % 32;
    const int groups = (shape.size0 * shape.pitch1 + 31) / 32;
#pragma unroll 2
    for (int group = threadIdx.x / 32; group < groups; group += Box::threads / 32) {
      const uint32_t block = 4 * group + lane / 8;
      const uint32_t from = destination + 128 * block + 16 * ((lane ^ block) & 7);
      const uint32_t to = destination + 512 * group + 4 * lane;
#pragma unroll
      for (int first = 0; first < octets; first += batch) {
        uint32_t words[batch][4];
#pragma unroll
        for (int octet = 0; octet < batch; ++octet)
          load_matrix_x4_transposed(from + (first + octet) * plane_bytes, words[octet]);
        __syncwarp();
#pragma unroll
        for (int octet = 0; octet < batch; ++octet)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            store_shared(to + (first + octet) * plane_bytes + 128 * i, words[octet][i]);
      }
    }
  }

 private:
  /// The first channel's element at (row, x) of the box, or any element where there is none.
  CONVT3D_DEVICE bool locate(const Storage*& from, int row, int x, int origin0,
                             int origin1) const {
    const int slice = by_size1.quotient(row);
    const int i0 = origin0 + slice;
    const int i1 = origin1 + row - slice * shape.size1;
    const int i2 = first2 + x;
    const bool valid = tensor.inside(i0, i1, i2);
    from += valid ? i0 * tensor.stride0 + i1 * tensor.stride1 + i2 : 0;
    return valid;
  }

  template <int vector>
  CONVT3D_DEVICE void copy(const Storage* base, int channel, int origin0, int origin1,
                           uint32_t destination) const {
    const int items = shape.size0 * shape.pitch1 / vector;
    for (int item = threadIdx.x; item < items; item += Box::threads) {
      const int row = by_width.quotient(item);
      const int position = item * vector;
      const Storage* from = base;
      const bool valid = locate(from, row, position - row * shape.pitch2, origin0, origin1);
      // Channel c is row c ^ (block % 8) of its block.
      const int block = position / 8;
      uint32_t to = destination + 128 * block + 16 * (block % 8) + 2 * (position % 8);
#pragma unroll 1
      for (int octet = 0; octet < octets; ++octet) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const int next = channel + 8 * octet + c + 1;
          async_copy<2 * vector>(to ^ (16 * c), from,
                                 valid && (whole || next <= Box::channels));
          // Past the last channel nothing is read, and the pointer stays inside.
          if (whole || next < Box::channels) from += volume;
        }
        to += plane_bytes;
      }
    }
  }

  CONVT3D_DEVICE void transfer(const Storage* base, int channel, int origin0, int origin1,
                               uint32_t destination) const {
    const int items = shape.size0 * shape.size1 * shape.size2;
    for (int item = threadIdx.x; item < items; item += Box::threads) {
      const int row = by_width.quotient(item);
      const int x = item - row * shape.size2;
      const Storage* from = base;
      const bool valid = locate(from, row, x, origin0, origin1);
      uint32_t to = destination + 16 * (row * shape.pitch2 + x);
#pragma unroll 1
      for (int octet = 0; octet < octets; ++octet) {
        Storage value[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const int k = 8 * octet + c;
          value[c] = valid && (whole || channel + k < Box::channels) ? __ldg(from + k * volume)
                                                                     : Storage(0);
        }
        store_shared(to, Type::word(value[0], value[1]), Type::word(value[2], value[3]),
                     Type::word(value[4], value[5]), Type::word(value[6], value[7]));
        to += plane_bytes;
      }
    }
  }
};

}  // namespace convt3d
