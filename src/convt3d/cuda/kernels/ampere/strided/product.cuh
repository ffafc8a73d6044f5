// All products of one step of the strided forward kernels.
#pragma once
#include "ampere/strided/store.cuh"

namespace convt3d {

/// Where a lane's window of fragment m lies at a shift along D and H, counted from the first: in
/// a tile's source box. `rows` are byte addresses of this lane's pairs at the first shift.
template <typename Config>
struct BoxWindows {
  const BoxShape<StridedBox<Config>>& shape;
  const uint32_t (&rows)[Config::fragments_m];
  uint32_t source;
  CONVT3D_DEVICE uint32_t operator()(int m, int shift0, int shift1) const {
    return rows[m] + (source + uint32_t(shift0 * shape.pitch1 + shift1 * shape.pitch2) *
                                   StridedBox<Config>::position_bytes);
  }
};

/// The tap that connects a slot along W with a shift, counted from the first; -1: none.
template <typename Config>
CONVT3D_CONSTEXPR int tap2_of(int slot, int shift) {
  using Axis2 = typename Config::Axis2;
  return shift < Axis2::shifts ? Axis2::tap(slot, shift + Axis2::min_shift) : -1;
}

/// All products of one step.
template <typename Config, typename Windows>
CONVT3D_DEVICE void multiply_step(StridedSums<Config>& sum, const Windows& windows,
                                  uint32_t weights) {
  using Math = typename Config::Math;
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  constexpr int fragments_m = Config::fragments_m;
  constexpr bool only_step = Config::chunks * Config::depth == 1;
  // Slots along W whose products alternate.
  constexpr int together = Config::slots_together;
#pragma unroll
  for (int shift0 = 0; shift0 < Axis0::shifts; ++shift0) {
#pragma unroll
    for (int shift1 = 0; shift1 < Axis1::shifts; ++shift1) {
      bool used0 = false, used1 = false;
#pragma unroll
      for (int slot = 0; slot < Axis0::slots; ++slot)
        used0 = used0 || Axis0::tap(slot, shift0 + Axis0::min_shift) >= 0;
#pragma unroll
      for (int slot = 0; slot < Axis1::slots; ++slot)
        used1 = used1 || Axis1::tap(slot, shift1 + Axis1::min_shift) >= 0;
      if (!used0 || !used1) continue;

      uint32_t raw[fragments_m][Config::halves][Config::window];
#pragma unroll
      for (int m = 0; m < fragments_m; ++m) load_window<Config>(raw[m], windows(m, shift0, shift1));
      constexpr int chain = chain_length<Config>(Axis2::shifts);
#pragma unroll
      for (int first2 = 0; first2 < Axis2::shifts; first2 += chain) {
        typename Math::A a[chain][fragments_m];
#pragma unroll
        for (int i = 0; i < chain; ++i) {
          bool used2 = false;
#pragma unroll
          for (int slot = 0; slot < Axis2::slots; ++slot)
            used2 = used2 || tap2_of<Config>(slot, first2 + i) >= 0;
#pragma unroll
          for (int m = 0; m < fragments_m; ++m)
            if (used2) prepare_tap<Config>(a[i][m], raw[m], first2 + i);
        }
#pragma unroll
        for (int slot0 = 0; slot0 < Axis0::slots; ++slot0) {
          const int tap0 = Axis0::tap(slot0, shift0 + Axis0::min_shift);
          if (tap0 < 0) continue;
#pragma unroll
          for (int slot1 = 0; slot1 < Axis1::slots; ++slot1) {
            const int tap1 = Axis1::tap(slot1, shift1 + Axis1::min_shift);
            if (tap1 < 0) continue;
#pragma unroll
            for (int first_slot = 0; first_slot < Axis2::slots; first_slot += together) {
              typename Math::B b[together][chain][Config::fragments_n];
              bool used[together][chain], fresh[together];
#pragma unroll
              for (int s = 0; s < together; ++s) {
                const int slot2 = first_slot + s;
                fresh[s] = only_step && !tap_before<Axis0>(slot0, shift0) &&
                           !tap_before<Axis1>(slot1, shift1) && !tap_before<Axis2>(slot2, first2);
#pragma unroll
                for (int i = 0; i < chain; ++i) {
                  const int tap2 = tap2_of<Config>(slot2, first2 + i);
                  used[s][i] = tap2 >= 0;
#pragma unroll
                  for (int n = 0; n < Config::fragments_n; ++n)
                    if (used[s][i])
                      Math::load(b[s][i][n], weights + 4u * (Config::tap_offset(tap0, tap1, tap2) +
                                                             n * Config::fragment_words));
                }
              }
              multiply_chain<Math>(sum.value[slot0][slot1] + first_slot, a, b, used, fresh);
            }
          }
        }
      }
    }
  }
}

}  // namespace convt3d
