// What weights that are split into two float16 parts (F16x3) are scaled by: a power of two for
// each produced channel.
#pragma once
#include "device/arithmetic.cuh"
#include "geometry/axis.cuh"
#include "pack/packer.cuh"

namespace convt3d {

/// The exponent of a produced channel's largest weight (MathF16x3::exponent), found by one warp.
template <typename Config>
CONVT3D_DEVICE int channel_exponent(const Packer<Config>& packer, int group, int column, int lane) {
  using Math = typename Config::Math;
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  constexpr int taps = Axis0::kernel * Axis1::kernel * Axis2::kernel;
  constexpr int turns = div_up(taps, 32) < 4 ? div_up(taps, 32) : 4;
  int largest = 0;
  // Channels and taps that do not exist: others in their place.
  column = min(column, Config::target_channels - 1);
  for (int first = lane; first < taps + lane; first += 32 * turns)
    for (int channel = 0; channel < Config::source_channels; channel += 8) {
      uint32_t bits[turns][8];
#pragma unroll
      for (int turn = 0; turn < turns; ++turn) {
        const int tap = min(first + 32 * turn, taps - 1), tap01 = tap / Axis2::kernel;
#pragma unroll
        for (int c = 0; c < 8; ++c)
          bits[turn][c] = bits_of(packer.at(group, min(channel + c, Config::source_channels - 1),
                                            column, tap01 / Axis1::kernel, tap01 % Axis1::kernel,
                                            tap - tap01 * Axis2::kernel));
      }
#pragma unroll
      for (int i = 0; i < turns * 8; ++i) largest = Math::larger(largest, bits[i / 8][i % 8]);
    }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  return Math::exponent(largest);
}

}  // namespace convt3d
