// Contiguous runs of the target that the epilogue of the strided kernel writes with one warp: of one
// value, of values that are computed, or staged in shared memory.
#pragma once
#include "load/box.cuh"

namespace convt3d {

/// A run of one value.
template <typename Type>
struct FilledRun {
  typename Type::Storage each;
  uint32_t word;
  CONVT3D_DEVICE explicit FilledRun(float value) : each(Type::store(value)) {
    if constexpr (Type::channels_per_word == 2)
      word = Type::word(each, each);
    else
      word = bits_of(each);
  }
  CONVT3D_DEVICE uint4 vector(int) const { return make_uint4(word, word, word, word); }
  CONVT3D_DEVICE typename Type::Storage value(int) const { return each; }
};

/// A run of values that `each` computes, from its element `first` on.
template <typename Storage, typename Each>
struct ComputedRun {
  const Each& each;
  int first;
  CONVT3D_DEVICE uint4 vector(int i) const {
    constexpr int per_word = 4 / int(sizeof(Storage));
    uint32_t word[4] = {};
#pragma unroll
    for (int e = 0; e < 4 * per_word; ++e)
      word[e / per_word] |= bits(value(i + e)) << 16 * (e % per_word);
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
  CONVT3D_DEVICE Storage value(int i) const { return each(first + i); }
  CONVT3D_DEVICE static uint32_t bits(float value) { return bits_of(value); }
  CONVT3D_DEVICE static uint32_t bits(uint16_t value) { return value; }
};

/// A run staged in shared memory, aligned as its destination is.
template <typename Storage>
struct StagedRun {
  const Storage* from;
  CONVT3D_DEVICE uint4 vector(int i) const { return *reinterpret_cast<const uint4*>(from + i); }
  CONVT3D_DEVICE Storage value(int i) const { return from[i]; }
};

/// Writes the part of a contiguous run that is whole vectors with one warp: 16 bytes a lane from
/// a line's start, five at a time so that their loads overlap. `lead`: elements of the line
/// before it.
template <typename Storage, typename Run>
CONVT3D_DEVICE void store_vectors(Storage* to, int lead, int length, int lane, const Run& run) {
  constexpr int vector = 16 / int(sizeof(Storage));
  constexpr int batch = 5;
  const int last = length - vector;
  for (int first = lane * vector - lead; first <= last; first += batch * 32 * vector) {
    uint4 values[batch];
#pragma unroll
    for (int j = 0; j < batch; ++j) {
      const int i = first + j * 32 * vector;
      if (i >= 0 && i <= last) values[j] = run.vector(i);
    }
#pragma unroll
    for (int j = 0; j < batch; ++j) {
      const int i = first + j * 32 * vector;
      if (i >= 0 && i <= last) store_streaming(reinterpret_cast<uint4*>(to + i), values[j]);
    }
  }
}

/// A run in memory: a few elements up to an aligned address, whole vectors of 16 bytes, the rest.
template <typename Storage>
struct RunParts {
  static constexpr int vector = 16 / int(sizeof(Storage));
  int head, whole, tail;
  CONVT3D_DEVICE RunParts(const Storage* to, int length) {
    const uint32_t element = uint32_t(reinterpret_cast<uint64_t>(to)) / uint32_t(sizeof(Storage));
    head = min(int((0u - element) % vector), length);
    whole = (length - head) / vector * vector;
    tail = length - head - whole;
  }
};

/// Writes a contiguous run with one warp.
template <typename Storage, typename Run>
CONVT3D_DEVICE void store_run(Storage* to, int length, int lane, const Run& run) {
  constexpr int line = 128 / int(sizeof(Storage));
  const int lead = int(uint32_t(reinterpret_cast<uint64_t>(to)) / sizeof(Storage) % line);
  const RunParts<Storage> parts(to, length);
  store_vectors(to, lead, length, lane, run);
  const int i = lane < 16 ? lane : parts.head + parts.whole + lane - 16;
  if (lane < 16 ? i < parts.head : i < length) store_streaming(to + i, run.value(i));
}

}  // namespace convt3d
