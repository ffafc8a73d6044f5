// Source boxes of the strided gradient that TMA brings: [sample][slice] and then [line][channel]
// or [channel][line] of rows along W. TMA zero-fills what lies outside, and rounds to TF32.
#pragma once
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "strided_dgrad/config.cuh"

namespace convt3d {

/// A step loads, for all units, the `pair` positions of one place along W that any tap meets.
template <typename Config>
struct Places {
  using Axis2 = typename Config::Axis2;
  static constexpr int pair = Config::pair;
  static constexpr int first = floor_div(Axis2::min_shift, pair);
  static constexpr int last = floor_div(Axis2::max_shift, pair);
  /// The tap of a residue at a place, or -1.
  CONVT3D_CONSTEXPR static int tap(int place, int residue) {
    return Axis2::tap(0, place * pair + residue);
  }
  CONVT3D_CONSTEXPR static bool met(int place) {
    for (int residue = 0; residue < pair; ++residue)
      if (tap(place, residue) >= 0) return true;
    return false;
  }
  CONVT3D_CONSTEXPR static int total() {
    int found = 0;
    for (int place = first; place <= last; ++place) found += met(place);
    return found;
  }
  static constexpr int count = total();
  CONVT3D_CONSTEXPR static int at(int number) {
    int place = first;
    while (!met(place) || number-- > 0) ++place;
    return place;
  }
};

template <typename Config>
struct MapReader {
  using Storage = typename Config::Storage;
  using Arguments = PhasesArguments<Storage>;
  using Walk = PhasesWalk<Config>;
  static constexpr int element = sizeof(Storage);
  static constexpr int pair = Config::pair;
  static constexpr int steps = Places<Config>::count;
  static constexpr bool ahead = false;  // fragments are not fetched before their time
  using Fragment = uint32_t[pair][Config::blocks][4];

  const Arguments& arguments;
  // Bytes from a box's beginning to this lane's units, rows g and g + 8 of a block, of the
  // channels of both quads; where the units' position 0 of a box lies, and that of a stage's
  // taps.
  uint32_t rows[Config::blocks][4];
  uint32_t box, at;

  /// By one thread.
  CONVT3D_DEVICE static void fill(const Arguments& a, const TensorMap* map, const WorkTile& work,
                                  int chunk, int d, uint32_t to, uint32_t barrier, int) {
    const int channel = work.group * Config::source_channels + chunk * Config::chunk_channels;
    const int w = Walk::column(work);
    const int h = work.first[1] * Config::Axis1::unit_source + Config::Axis1::min_shift;
    mbarrier_expect(barrier, a.box_bytes);
    if (a.channel_dimension == 1)
      tma_load_5d(to, *map, w, channel, h, d, work.sample, barrier);
    else
      tma_load_5d(to, *map, w, h, channel, d, work.sample, barrier);
  }

  CONVT3D_DEVICE MapReader(const Arguments& arguments_, const PhasesUnits<Config>& units)
      : arguments(arguments_), box(0), at(0) {
    units.addresses(rows);
  }
  CONVT3D_DEVICE void enter(const WorkTile& work, uint32_t address, int, int) {
    box = address + (work.first[2] * Config::position_step - Walk::column(work)) * element;
  }
  CONVT3D_DEVICE void point(int tap0, int tap1) {
    at = box + (tap0 * Config::tap_slices * arguments.slice_pitch +
                tap1 * Config::tap_lines * arguments.line_pitch) *
                   element;
  }

  template <int Step>
  CONVT3D_DEVICE void load(Fragment& units) const {
    constexpr int place = Places<Config>::at(Step);
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t word[pair];
        load_neighbours(word, rows[block][i] + at + uint32_t(place * pair * element),
                        arguments.channel_pitch * element);
#pragma unroll
        for (int residue = 0; residue < pair; ++residue)
          units[residue][block][i] = word[residue];
      }
  }
  template <int Step, int Columns, int Pitch, int Sums, int Residue = 0>
  CONVT3D_DEVICE static void products(float (&sum)[Config::blocks][Sums], const Fragment& units,
                                      uint64_t weights) {
    if constexpr (Residue < pair) {
      constexpr int tap2 = Places<Config>::tap(Places<Config>::at(Step), Residue);
      if constexpr (tap2 >= 0) {
#pragma unroll
        for (int block = 0; block < Config::blocks; ++block)
          wgmma_product_of<Columns>(typename Config::Math{}, columns_of<Columns>(sum[block]),
                                    units[Residue][block], weights + tap2 * Config::quads * Pitch);
      }
      products<Step, Columns, Pitch, Sums, Residue + 1>(sum, units, weights);
    }
  }

 protected:
  /// The words of one channel (or two of 16 bits, `pitch` bytes apart) at `pair` neighbours.
  CONVT3D_DEVICE static void load_neighbours(uint32_t (&word)[pair], uint32_t address,
                                             uint32_t pitch) {
    constexpr bool one = Config::Type::channels_per_word == 1;
    const uint32_t next = address + pitch;
    if constexpr (one && pair == 2) {
      load_shared(address, word[0], word[1]);
    } else if constexpr (one) {
      word[0] = load_shared(address);
    } else if constexpr (pair == 2) {
      const uint32_t low = load_shared(address), high = load_shared(next);
      word[0] = permute_bytes(low, high, 0x5410);
      word[1] = permute_bytes(low, high, 0x7632);
    } else {
      word[0] = permute_bytes(load_shared_half(address), load_shared_half(next), 0x5410);
    }
  }
};

}  // namespace convt3d
