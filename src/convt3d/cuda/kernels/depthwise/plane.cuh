// Source values of a sweeping thread: the part of one plane (an index of axis 0) that its unit
// reads, kept as raw words, so that a plane can be in flight while the one before is computed
// with.
//
// A row is cut into aligned groups of `Vector` positions. A group of which two or more positions
// are read is one vector load; a single position is loaded alone. The extent of axis 2 is a
// multiple of Vector, so that a group lies inside the row or outside.
#pragma once
#include "geometry/axis.cuh"

namespace convt3d {

/// One row of StaticAxis `Axis`; neighbouring positions are `PositionStride` elements apart. Of
/// each position `Channels` neighbouring elements are read.
template <typename Axis, typename Type, int Vector, int PositionStride, int Channels = 1>
struct DepthwiseRow {
  using Storage = typename Type::Storage;
  static constexpr int bytes = int(sizeof(Storage));
  static constexpr int count = Axis::shifts;
  static constexpr int channels = Channels;
  static_assert(Vector == 1 || (PositionStride == 1 && Channels == 1),
                "vectors take neighbouring positions");
  static_assert(Channels * bytes <= 8, "the channels of a position are one load");
  static_assert(Axis::unit_source % Vector == 0, "vectors begin where units do");

  CONVT3D_CONSTEXPR static bool used(int i) {
    for (int slot = 0; slot < Axis::slots; ++slot)
      if (Axis::tap(slot, i + Axis::min_shift) >= 0) return true;
    return false;
  }
  CONVT3D_CONSTEXPR static int element(int i) { return floor_mod(i + Axis::min_shift, Vector); }
  CONVT3D_CONSTEXPR static int group(int i) {
    return (i + Axis::min_shift - element(i) - Axis::min_shift + element(0)) / Vector;
  }
  CONVT3D_CONSTEXPR static int used_in(int g) {
    int found = 0;
    for (int i = 0; i < count; ++i) found += group(i) == g && used(i);
    return found;
  }
  CONVT3D_CONSTEXPR static bool is_vector(int g) { return Vector > 1 && used_in(g) > 1; }
  CONVT3D_CONSTEXPR static int group_words(int g) {
    return is_vector(g) ? Vector * bytes / 4 : used_in(g) * ((Channels * bytes + 3) / 4);
  }
  CONVT3D_CONSTEXPR static int first_word(int g) {
    int sum = 0;
    for (int before = 0; before < g; ++before) sum += group_words(before);
    return sum;
  }
  static constexpr int groups = group(count - 1) + 1;
  static constexpr int words = first_word(groups);
  /// The position, relative to the unit's own, at which group 0 begins.
  static constexpr int origin = Axis::min_shift - element(0);

  /// `row` points at the unit's own position, which is `first` of `extent`.
  template <int g = 0>
  CONVT3D_DEVICE static void load(uint32_t (&word)[words], const Storage* row, bool valid, int first,
                                  int extent) {
    constexpr int position = origin + g * Vector;
    constexpr int at = first_word(g);
    if constexpr (used_in(g) > 0) {
      const bool inside = valid && unsigned(first + position) < unsigned(extent);
      if constexpr (is_vector(g))
        load_vector<at>(word, row + position, inside);
      else
        load_one<at>(word, row + (position + only_used(g)) * PositionStride, inside);
    }
    if constexpr (g + 1 < groups) load<g + 1>(word, row, valid, first, extent);
  }
  template <int i = 0>
  CONVT3D_DEVICE static void values(const uint32_t (&word)[words],
                                    float (&value)[count][Channels]) {
    if constexpr (used(i)) {
      constexpr int in_group = is_vector(group(i)) ? element(i) : 0;
      constexpr int at = first_word(group(i));
#pragma unroll
      for (int c = 0; c < Channels; ++c) {
        if constexpr (bytes == 4)
          value[i][c] = float_of(word[at + in_group + c]);
        else
          value[i][c] =
              Type::load(Storage(word[at + in_group / 2] >> 16 * ((in_group + c) % 2)));
      }
    }
    if constexpr (i + 1 < count) values<i + 1>(word, value);
  }

 private:
  /// The element of a group that is read, where it is one.
  CONVT3D_CONSTEXPR static int only_used(int g) {
    int found = 0;
    for (int i = 0; i < count; ++i)
      if (group(i) == g && used(i)) found = element(i);
    return found;
  }
  template <int at>
  CONVT3D_DEVICE static void load_one(uint32_t (&word)[words], const Storage* from, bool inside) {
    if constexpr (Channels * bytes == 8) {
      uint2 v = make_uint2(0, 0);
      if (inside) v = __ldg(reinterpret_cast<const uint2*>(from));
      word[at] = v.x, word[at + 1] = v.y;
    } else if constexpr (Channels * bytes == 4) {
      word[at] = 0;
      if (inside) word[at] = __ldg(reinterpret_cast<const uint32_t*>(from));
    } else {
      word[at] = 0;
      if (inside) word[at] = __ldg(from);
    }
  }
  template <int at>
  CONVT3D_DEVICE static void load_vector(uint32_t (&word)[words], const Storage* from, bool inside) {
    if constexpr (Vector * bytes == 16) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (inside) v = __ldg(reinterpret_cast<const uint4*>(from));
      word[at] = v.x, word[at + 1] = v.y, word[at + 2] = v.z, word[at + 3] = v.w;
    } else if constexpr (Vector * bytes == 8) {
      uint2 v = make_uint2(0, 0);
      if (inside) v = __ldg(reinterpret_cast<const uint2*>(from));
      word[at] = v.x, word[at + 1] = v.y;
    } else {
      word[at] = 0;
      if (inside) word[at] = __ldg(reinterpret_cast<const uint32_t*>(from));
    }
  }
};

/// The rows of one plane that a unit of `Axis1` x the row's axis reads.
template <typename Axis1, typename Row>
struct DepthwisePlane {
  static constexpr int rows = Axis1::shifts;
  static constexpr int count = Row::count;
  static constexpr int channels = Row::channels;
  uint32_t word[rows][Row::words];

  CONVT3D_CONSTEXPR static bool used(int i1) {
    for (int slot = 0; slot < Axis1::slots; ++slot)
      if (Axis1::tap(slot, i1 + Axis1::min_shift) >= 0) return true;
    return false;
  }
  /// `plane` points at the unit's own position, (first1, first2) of (extent1, extent2).
  template <int i1 = 0>
  CONVT3D_DEVICE void load(const typename Row::Storage* plane, int64_t row_stride, bool valid,
                           int first1, int extent1, int first2, int extent2) {
    constexpr int shift = Axis1::min_shift + i1;
    if constexpr (used(i1))
      Row::load(word[i1], plane + shift * row_stride,
                valid && unsigned(first1 + shift) < unsigned(extent1), first2, extent2);
    if constexpr (i1 + 1 < rows)
      load<i1 + 1>(plane, row_stride, valid, first1, extent1, first2, extent2);
  }
  template <int i1 = 0>
  CONVT3D_DEVICE void values(float (&value)[rows][count][channels]) const {
    if constexpr (used(i1)) Row::values(word[i1], value[i1]);
    if constexpr (i1 + 1 < rows) values<i1 + 1>(value);
  }
};

/// How a thread sweeps along axis 0. Step t takes in `unit_source` planes; plane `part` of them
/// serves unit t - age for each age below `ages`, and with step t unit t - (ages - 1) is
/// complete.
template <typename Axis0>
struct SweepSteps {
  static constexpr int ages = div_up(Axis0::shifts, Axis0::unit_source);
  CONVT3D_CONSTEXPR static bool used(int part) { return part < Axis0::shifts; }
  CONVT3D_CONSTEXPR static int shift(int age, int part) {
    return age * Axis0::unit_source + part + Axis0::min_shift;
  }
  CONVT3D_CONSTEXPR static bool serves(int slot, int age) {
    for (int part = 0; part < Axis0::unit_source; ++part)
      if (Axis0::tap(slot, shift(age, part)) >= 0) return true;
    return false;
  }
  /// The age at which a slot is complete.
  CONVT3D_CONSTEXPR static int last_age(int slot) {
    int last = 0;
    for (int age = 0; age < ages; ++age)
      if (serves(slot, age)) last = age;
    return last;
  }
  /// Units of which the same slot is in progress at once.
  CONVT3D_CONSTEXPR static int most_in_progress() {
    int most = 1;
    for (int slot = 0; slot < Axis0::slots; ++slot) {
      int first = last_age(slot);
      for (int age = first; age >= 0; --age)
        if (serves(slot, age)) first = age;
      most = last_age(slot) - first + 1 > most ? last_age(slot) - first + 1 : most;
    }
    return most;
  }
  static constexpr int in_progress = most_in_progress();
};

}  // namespace convt3d
