// Consumers of wgrad/kernel.cu for few channels a group and stride 2 along W, by mma.sync: every
// word of the gradient is loaded, and split or paired, once for all taps that it meets along H
// and W.
//
// A fragment's rows are (phase of W, gradient channel): row g has positions 2a of a row of the
// gradient, row g + 8 positions 2a + 1, whose depth is a. Tap k2 = phase + padding - 2 shift
// meets x at a + shift, so columns are (shift, x channel), and both come from words that lie
// together: a lane takes four neighbouring a of sixteen, eight words of the gradient and four of
// x, besides those of x that shifts reach. Warps take sixteen a of two rows (along axis 1) in
// turn, and add up their sums in order at the end.
#pragma once
#include "device/barrier.cuh"
#include "wgrad/rows.cuh"

namespace convt3d {

/// The taps along W of a shift and a phase.
template <typename Config>
struct PhaseShifts {
  static constexpr int padding = Layer::padding2;
  static constexpr int first = -((Config::taps2 - 1 - padding) / 2), last = (1 + padding) / 2;
  static constexpr int count = last - first + 1;
  static_assert(padding < Config::taps2 && first >= -4 && last <= 4, "neighbours of four positions");
  CONVT3D_CONSTEXPR static int tap(int phase, int shift) {
    return phase + padding - 2 * (first + shift);
  }
};

/// One row of x for sixteen positions: a lane's four of a channel, and what shifts reach.
template <typename Config>
struct PhaseSource {
  using Shifts = PhaseShifts<Config>;
  using Math = typename Config::Math;
  static constexpr bool half = Config::half;
  static constexpr int products = half ? 1 : 2;  // of sixteen positions
  static constexpr int words = half ? 2 : 4;     // of four
  static constexpr int before = Shifts::first < 0 ? (half ? 2 : -Shifts::first) : 0;
  static constexpr int after =
      Shifts::last > 0 ? (half ? div_up(Shifts::last, 2) : Shifts::last) : 0;
  static constexpr int all = before + words + after;

  uint32_t big[all], small[half ? 1 : all];

  /// Where four positions of a lane's channel begin, in a row of 128-byte lines under the
  /// swizzle.
  CONVT3D_DEVICE static uint32_t place(int four, uint32_t chunk) {
    const int at = four * 4 * Config::bytes;
    const uint32_t within = at % 128;
    return at / 128 * chunk + ((within & 112) ^ (threadIdx.x % 32 / 4 * 16)) + within % 16;
  }
  /// `masked`: some lie beyond the row's ends, and are zeros.
  template <bool masked>
  CONVT3D_DEVICE void load(uint32_t row, int four, int fours, uint32_t chunk) {
    uint32_t raw[all];
    const auto fetch = [&](int at, int from, int to, int first) {
      const bool inside = !masked || unsigned(at) < unsigned(fours);
      const uint32_t address = row + place(inside ? at : 0, chunk);
#pragma unroll
      for (int i = 0; i < words; ++i) {
        if (i < from || i >= to) continue;
        const uint32_t word = load_shared(address + 4 * i);
        raw[first + i - from] = inside ? word : 0;
      }
    };
    if constexpr (before > 0) fetch(four - 1, words - before, words, 0);
    {
      const bool inside = !masked || four < fours;
      const uint32_t address = row + place(inside ? four : 0, chunk);
      if constexpr (half)
        load_shared(address, raw[before], raw[before + 1]);
      else
        load_shared(address, raw[before], raw[before + 1], raw[before + 2], raw[before + 3]);
#pragma unroll
      for (int i = 0; i < words; ++i) raw[before + i] = inside ? raw[before + i] : 0;
    }
    if constexpr (after > 0) fetch(four + 1, 0, after, before + words);
#pragma unroll
    for (int i = 0; i < all; ++i) {
      if constexpr (half)
        big[i] = raw[i];
      else
        MathIeee::split(raw[i], big[i], small[i]);
    }
  }
  CONVT3D_DEVICE typename Math::B column(int product, int shift) const {
    typename Math::B b;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (half) {
        const int position = Shifts::first + shift + 2 * r + 2 * before;
        b.word[r] = position % 2 == 0 ? big[position / 2]
                                      : permute_bytes(big[position / 2], big[position / 2 + 1], 0x5432);
      } else {
        const int position = Shifts::first + shift + 2 * product + r + before;
        b.big[r] = big[position];
        b.small[r] = small[position];
      }
    }
    return b;
  }
};

/// Sixteen positions of both phases of a row of the gradient: a lane's eight words, or halves.
template <typename Config>
struct PhaseTarget {
  using Math = typename Config::Math;
  static constexpr bool half = Config::half;
  static constexpr int products = half ? 1 : 2;
  static constexpr int words = half ? 5 : 8;

  uint32_t raw[words];
  int left;      // positions of the row from the lane's first on
  uint32_t odd;  // whether the first is a word's second half

  /// `row`: where the row begins; `first`: the lane's first position, of `width`. `masked`: some
  /// lie beyond, and are zeros.
  template <bool masked>
  CONVT3D_DEVICE void load(uint32_t row, int first, int width) {
    left = width - first;
    odd = 0;
    if constexpr (!half) {
#pragma unroll
      for (int i = 0; i < words; ++i) {
        const bool inside = !masked || i < left;
        raw[i] = load_shared(row + (inside ? first + i : 0) * 4);
        raw[i] = inside ? raw[i] : 0;
      }
    } else {
      odd = row / 2 % 2;
      const bool inside = !masked || left > 0;
      const uint32_t from = row - 2 * odd + (inside ? 2 * first : 0);
      // Nothing is read beyond what is needed: others may be writing there.
      const int last = masked ? (max(min(left, 8), 1) - 1 + int(odd)) / 2 : 3 + int(odd);
#pragma unroll
      for (int i = 0; i < words; ++i)
        raw[i] = load_shared(from + 4 * (masked || i == words - 1 ? min(i, last) : i));
    }
  }
  template <bool masked>
  CONVT3D_DEVICE void finish(typename Math::A (&a)[products]) const {
    if constexpr (!half) {
#pragma unroll
      for (int k = 0; k < products; ++k) {
        const uint32_t four[4] = {raw[4 * k], raw[4 * k + 1], raw[4 * k + 2], raw[4 * k + 3]};
        Math::prepare(a[k], four);
      }
    } else {
      uint32_t pair[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pair[i] = permute_bytes(raw[i], raw[i + 1], odd ? 0x5432 : 0x3210);
        if (masked) pair[i] = 2 * i + 1 < left ? pair[i] : 2 * i < left ? pair[i] & 0xffffu : 0;
      }
      a[0].word[0] = permute_bytes(pair[0], pair[1], 0x5410);
      a[0].word[1] = permute_bytes(pair[0], pair[1], 0x7632);
      a[0].word[2] = permute_bytes(pair[2], pair[3], 0x5410);
      a[0].word[3] = permute_bytes(pair[2], pair[3], 0x7632);
    }
  }
};

/// Where a lane's channel of the gradient lies in the planes of a step.
template <typename Layout>
struct PhaseRows {
  using Config = typename Layout::Config;
  const Layout& l;
  RunFill<Config> runs;
  uint32_t inside;   // of a plane: the channel's first row, bytes
  uint32_t channel;  // elements before it in the tensor

  CONVT3D_DEVICE explicit PhaseRows(const Layout& l_)
      : l(l_), runs(l.a.gradient, l.a.samples, l.rows_g, 1, l.a.row_pitch, l.a.channel_pitch) {
    const int g = threadIdx.x % 32 / 4;
    inside = (Config::slot(g) * l.a.channel_pitch + Layer::padding2) * Config::bytes;
    channel = uint32_t(g) * uint32_t(runs.channel_volume);
  }
  CONVT3D_DEVICE void point(uint32_t (&plane)[Config::taps0], const WgradSteps<Layout>& at,
                            int slice) const {
    const uint32_t first =
        channel + uint32_t(runs.element(at.sample, l.tile.group, l.tile.channel_m,
                                        at.o0 + slice * Layer::stride0, at.o1, at.o2));
#pragma unroll
    for (int k0 = 0; k0 < Config::taps0; ++k0) {
      const uint32_t element =
          first + uint32_t(k0 * Config::reach0 * Config::step0) * uint32_t(l.a.gradient.stride0);
      plane[k0] = at.plane(slice * Config::unit0 + k0 * Config::reach0) + inside +
                  (element & runs.mask) * Config::bytes;
    }
  }
};

/// Sums of a warp: [tap of axis 0][row tap][column tap][shift].
template <typename Config>
using PhaseSums =
    float[Config::taps0][Config::taps1][Config::column_taps][PhaseShifts<Config>::count][4];

[[maybe_unused]] constexpr int phase_together = 2;  // rows of a turn

/// Sixteen positions of two rows of every tap. Tensor cores truncate when they add: what they add
/// up here is short.
template <typename Layout, bool masked>
CONVT3D_DEVICE void multiply_phases(PhaseSums<typename Layout::Config>& sum, const Layout& l,
                                    const uint32_t (&plane)[Layout::Config::taps0],
                                    uint32_t source, int item, int sixteen) {
  using Config = typename Layout::Config;
  using Shifts = PhaseShifts<Config>;
  using Math = typename Config::Math;
  using Source = PhaseSource<Config>;
  using Target = PhaseTarget<Config>;
  constexpr int together = phase_together, groups = Config::taps0 * Config::taps1 * together;
  const int lane = threadIdx.x % 32;
  const int four = sixteen * 4 + lane % 4;
  const int width = l.a.gradient.extent[2];

  Target target[2];
  const auto fetch = [&](int i) {
    const int k0 = i / (Config::taps1 * together), k1 = i / together % Config::taps1;
    const int row = (item * together + i % together) * Config::unit1 + k1 * Config::reach1;
    target[i % 2].template load<masked>(plane[k0] + row * l.a.row_pitch * Config::bytes, 8 * four,
                                        width);
  };
  fetch(0);
  Source x[Config::column_taps + together - 1];
#pragma unroll
  for (int r = 0; r < Config::column_taps + together - 1; ++r) {
    const int row = item * together + r;
    x[r].template load<masked>(source + (row * 8 + lane / 4) * 128, four, l.a.tile2 / 4, l.x_chunk);
  }
  float part[Config::column_taps][Shifts::count][4];
#pragma unroll
  for (int i = 0; i < groups; ++i) {
    const int k0 = i / (Config::taps1 * together), k1 = i / together % Config::taps1;
    typename Math::A a[Target::products];
    target[i % 2].template finish<masked>(a);
    if (i + 1 < groups) fetch(i + 1);
    constexpr int terms = Config::ieee ? 3 : 1;
#pragma unroll
    for (int c = 0; c < Config::column_taps; ++c)
#pragma unroll
      for (int s = 0; s < Shifts::count; ++s)
#pragma unroll
        for (int r = 0; r < 4; ++r) part[c][s][r] = i % together == 0 ? 0.f : part[c][s][r];
#pragma unroll
    for (int term = 0; term < terms; ++term)
#pragma unroll
      for (int k = 0; k < Target::products; ++k)
#pragma unroll
        for (int c = 0; c < Config::column_taps; ++c)
#pragma unroll
          for (int s = 0; s < Shifts::count; ++s) {
            if (Config::tap1(k1, c * Config::channel_tile_n) >= Layer::kernel1) continue;
            const auto b = x[i % together + c].column(k, s);
            if constexpr (Config::ieee)
              Math::multiply_part(term, part[c][s], a[k], b);
            else
              Math::multiply_add(part[c][s], a[k], b);
          }
    if (i % together < together - 1) continue;
#pragma unroll
    for (int c = 0; c < Config::column_taps; ++c)
#pragma unroll
      for (int s = 0; s < Shifts::count; ++s)
#pragma unroll
        for (int r = 0; r < 4; ++r) sum[k0][k1][c][s][r] += part[c][s][r];
    // Else ptxas would bring all words first, for which there are no registers.
    __syncwarp();
  }
}

template <typename Layout>
CONVT3D_DEVICE void consume_phases(const Layout& l) {
  using Config = typename Layout::Config;
  using Shifts = PhaseShifts<Config>;
  static_assert(Config::row_tiles == 1 && Config::channel_tile_m == 8 && Config::channel_tile_n == 8,
                "warps share all rows; a channel of each for every four lanes");
  static_assert(Config::unit2 == 2 && Config::reach2 == 1 && Config::column_taps > 1 && Config::joined,
                "rows of x by themselves, two phases of the gradient's, whole");
  constexpr int warps = 4 * Config::consumers;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - Config::producers / 32;
  const PhaseRows<Layout> rows(l);
  const int outputs = l.a.gradient.extent[2];
  const int sixteens = div_up(div_up(outputs, 2), 16);
  const int items = l.a.tile1 / phase_together * sixteens;
  const Divider by_sixteens(sixteens);

  PhaseSums<Config> sum = {};
  WgradSteps<Layout> at(l);
#pragma unroll 1
  for (; at.step < l.end; at.advance()) {
    mbarrier_wait(l.full(at.stage), at.phase);
#pragma unroll 1
    for (int slice = 0; slice < l.a.tile0; ++slice) {
      uint32_t plane[Config::taps0];
      rows.point(plane, at, slice);
      const uint32_t source = l.x_ring + at.stage * l.x_slab + slice * l.x_slice;
#pragma unroll 1
      for (int item = warp; item < items; item += warps) {
        const int pair = by_sixteens.quotient(item), sixteen = item - pair * sixteens;
        const bool ends = 32 * (sixteen + 1) > outputs || 16 * (sixteen + 1) >= l.a.tile2 ||
                          (Shifts::first < 0 && sixteen == 0);
        if (ends)
          multiply_phases<Layout, true>(sum, l, plane, source, pair, sixteen);
        else
          multiply_phases<Layout, false>(sum, l, plane, source, pair, sixteen);
      }
    }
    l.leave(at.stage);
  }

  // Sums lie as [column][row] where the rings were.
  constexpr int pitch = Config::sum_pitch;
#pragma unroll 1
  for (int turn = 0; turn <= warps; ++turn) {
    named_barrier_sync(1, 32 * warps);
    if (turn != warp) continue;
#pragma unroll
    for (int k0 = 0; k0 < Config::taps0; ++k0)
#pragma unroll
      for (int k1 = 0; k1 < Config::taps1; ++k1)
#pragma unroll
        for (int c = 0; c < Config::column_taps; ++c)
#pragma unroll
          for (int s = 0; s < Shifts::count; ++s)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
              const int k2 = Shifts::tap(r / 2, s);
              if (Config::tap1(k1, c * Config::channel_tile_n) >= Layer::kernel1 || k2 < 0 ||
                  k2 >= Config::taps2)
                continue;
              const int tap = (k0 * Config::taps1 + k1) * Config::taps2 + k2;
              const int row = WgradRow<Config>::index(tap, lane / 4);
              const int column = c * Config::channel_tile_n + lane % 4 * 2 + r % 2;
              const uint32_t to = l.x_ring + (column * pitch + row) * 4;
              const float before = turn == 0 ? 0.f : __uint_as_float(load_shared(to));
              store_shared(to, before + sum[k0][k1][c][s][r]);
            }
  }
  float* out = l.a.partial + int64_t(blockIdx.x) * Config::cta_elements + threadIdx.x % 128;
#pragma unroll 1
  for (int block = warp / 4; block < Config::cta_blocks; block += Config::consumers)
#pragma unroll
    for (int r = 0; r < Config::registers; ++r) {
      const int octet = block * 8 + warp % 4 * 2 + r % 4 / 2;
      const int column = r / 4 * 8 + lane % 4 * 2 + r % 2;
      const WgradRow<Config> row(octet, lane / 4);
      const bool live = row.live && Config::tap1(row.k1(), column) < Layer::kernel1;
      const uint32_t from = l.x_ring + (column * pitch + octet * 8 + lane / 4) * 4;
      out[(block * Config::registers + r) * 128] = live ? __uint_as_float(load_shared(from)) : 0.f;
    }
}

}  // namespace convt3d
