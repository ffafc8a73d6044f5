// The products of the strided gradients by input: slice after slice of the output gradient.
#pragma once
#include "ampere/strided/store.cuh"

namespace convt3d {

template <typename Config>
struct StridedLags {
  StridedSums<Config> lag[Config::lags];
};

/// Where a lane's windows of a step lie in a tile's source box. `rows` are byte addresses of this
/// lane's pairs.
template <typename Config>
struct SliceWindows {
  const BoxShape<StridedBox<Config>>& shape;
  const uint32_t (&rows)[Config::fragments_m];
  uint32_t source;

  /// The windows of all fragments, so many lines from the first unit's.
  CONVT3D_DEVICE void load(uint32_t (&raw)[Config::fragments_m][Config::halves][Config::window],
                           int shift) const {
    const uint32_t offset =
        source + uint32_t(shift * shape.pitch2) * StridedBox<Config>::position_bytes;
#pragma unroll
    for (int m = 0; m < Config::fragments_m; ++m) load_window<Config>(raw[m], rows[m] + offset);
  }
  CONVT3D_DEVICE SliceWindows at_step(int step) const {
    return {shape, rows, source + step * StridedBox<Config>::step_bytes};
  }
};

/// All products of one step of a slice.
template <typename Config, int residue, typename Windows>
CONVT3D_DEVICE void multiply_slice(StridedLags<Config>& sums, const Windows& windows,
                                   uint32_t weights) {
  using Math = typename Config::Math;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  constexpr int fragments_m = Config::fragments_m;
#pragma unroll
  for (int k1 = 0; k1 < Axis1::kernel; ++k1) {
    uint32_t raw[fragments_m][Config::halves][Config::window];
    windows.load(raw, Axis1::shift_of(0, k1));
    constexpr int chain = chain_length<Config>(Axis2::kernel);
#pragma unroll
    for (int first2 = 0; first2 < Axis2::kernel; first2 += chain) {
      typename Math::A a[chain][fragments_m];
#pragma unroll
      for (int i = 0; i < chain; ++i)
#pragma unroll
        for (int m = 0; m < fragments_m; ++m)
          if (first2 + i < Axis2::kernel)
            prepare_tap<Config>(a[i][m], raw[m], Axis2::shift_of(0, first2 + i));
#pragma unroll
      for (int lag = 0; lag < Config::lags; ++lag) {
        const int k0 = Config::slice_tap(residue, lag);
        if (k0 < 0) continue;
        const int row = Config::resident_weights
                            ? k0 * Axis1::kernel + k1
                            : Config::slice_rank(residue, lag) * Axis1::kernel + k1;
        typename Math::B b[1][chain][Config::fragments_n];
        bool used[1][chain];
#pragma unroll
        for (int i = 0; i < chain; ++i) {
          used[0][i] = first2 + i < Axis2::kernel;
#pragma unroll
          for (int n = 0; n < Config::fragments_n; ++n)
            if (used[0][i])
              Math::load(b[0][i][n], weights + 4u * (row * Config::row_words +
                                                  (first2 + i) * Config::tap_words +
                                                  n * Config::fragment_words));
        }
        multiply_chain<Math>(sums.lag[lag].value[0][0], a, b, used, {false});
      }
    }
  }
}

/// The products of a slice whose residue is a run-time number.
template <typename Config, int residue = 0, typename Windows>
CONVT3D_DEVICE void multiply_residue(int which, StridedLags<Config>& sums, const Windows& windows,
                                     uint32_t weights) {
  if constexpr (residue < Config::residues0) {
    if (which == residue) {
      constexpr int step_words =
          Config::resident_weights
              ? Config::step_weight_words
              : Config::stage_words_of(Config::slice_taps(residue)) / Config::depth;
#pragma unroll 1
      for (int step = 0; step < Config::depth; ++step)
        multiply_slice<Config, residue>(sums, windows.at_step(step),
                                        weights + 4u * step * step_words);
    } else {
      multiply_residue<Config, residue + 1>(which, sums, windows, weights);
    }
  }
}

/// The slices of a tile in order: slice index q counts from unit 0's first tap, in steps of
/// `step0`. Those that meet no tap are left out; where slices pass through a ring, those outside
/// the source, too.
template <typename Config>
struct SliceWalk {
  StridedTile<Config> tile;
  int first_unit, last_unit, slice;
  int extent;

  CONVT3D_DEVICE SliceWalk(const StridedArguments<Config>& arguments, int number)
      : tile(arguments, number), extent(arguments.source.extent[0]) {
    first_unit = tile.index[0] * arguments.units0;
    last_unit = min(first_unit + arguments.units0, arguments.target.extent[0]) - 1;
    slice = first_unit * Config::Axis0::unit_source;
    skip();
  }
  CONVT3D_DEVICE int residue() const { return slice % Config::residues0; }
  CONVT3D_DEVICE int unit() const { return slice / Config::residues0; }
  CONVT3D_DEVICE bool done() const {
    return slice > last_unit * Config::Axis0::unit_source + Config::Axis0::shifts - 1;
  }
  CONVT3D_DEVICE void advance() {
    ++slice;
    skip();
  }
  /// Where the slice lies in the source.
  CONVT3D_DEVICE int position() const { return slice * Config::step0 + Config::origin0; }

 private:
  CONVT3D_DEVICE void skip() {
    while (!done() && (Config::slice_taps(residue()) == 0 ||
                       (Config::ring > 0 && unsigned(position()) >= unsigned(extent))))
      ++slice;
  }
};

}  // namespace convt3d
