// Source boxes of the strided gradient as whole volumes, where those are small: one bulk copy for
// each channel and sample, [sample][channel], with a gap between channels for their banks. TMA
// takes as long for a row of 16 elements as for one of 40, and every tap of D would bring the
// same again.
//
// Units beyond the source read zeros. Extents along W are multiples of `pair`, so that the
// positions that are loaded at once exist together or not at all.
#pragma once
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "strided_dgrad/tma_box.cuh"

namespace convt3d {

template <typename Config>
struct VolumeReader : MapReader<Config> {
  using Map = MapReader<Config>;
  using Arguments = typename Map::Arguments;
  using Fragment = typename Map::Fragment;
  using Map::arguments, Map::at, Map::box, Map::element, Map::pair, Map::rows, Map::steps;
  static constexpr int taps0 = Config::Axis0::kernel, taps1 = Config::Axis1::kernel;
  static_assert(!Config::volumes || taps0 + taps1 + steps <= 32, "a bit each");
  static_assert(!Config::volumes || Config::source_channels % Config::chunk_channels == 0,
                "whole chunks");

  uint32_t zeros;
  /// Of this lane's units, rows g and g + 8 of a block: bits of the taps of D, taps of H and
  /// places along W that lie inside the source. Those that a stage's taps need.
  uint32_t inside[Config::blocks][2];
  uint32_t needed;

  /// A channel.
  CONVT3D_DEVICE static void fill(const Arguments& a, const TensorMap*, const WorkTile& work, int chunk,
                                  int, uint32_t to, uint32_t barrier, int channel) {
    const int volume = a.source.volume();
    const int samples = min(a.tile[0], a.batch - work.sample);
    const int first = work.group * Config::source_channels + chunk * Config::chunk_channels;
    const auto* from =
        a.source.data + (int64_t(work.sample) * Config::groups * Config::source_channels + first +
                         channel) *
                            volume;
    mbarrier_expect(barrier, samples * volume * element);
    for (int sample = 0; sample < samples; ++sample) {
      bulk_copy(to + (sample * a.sample_pitch + channel * a.channel_pitch) * element, from,
                volume * element, barrier);
      from += int64_t(Config::groups) * Config::source_channels * volume;
    }
  }

  CONVT3D_DEVICE VolumeReader(const Arguments& arguments_, const PhasesUnits<Config>& units)
      : Map(arguments_, units), needed(0) {
    extern __shared__ __align__(128) unsigned char shared[];
    zeros = shared_address(shared) + Config::zero_offset;
    const auto exists = [&](int axis, int at) {
      return uint32_t(unsigned(at) < unsigned(arguments_.source.extent[axis]));
    };
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto unit = units(units.row_of(block, half));
        uint32_t bits = 0;
        for (int tap = 0; tap < taps0; ++tap)
          bits |= exists(0, unit.at[0] * Config::slice_step + Config::Axis0::min_shift +
                                tap * Config::tap_slices)
                  << tap;
        for (int tap = 0; tap < taps1; ++tap)
          bits |= exists(1, unit.at[1] * Config::line_step + Config::Axis1::min_shift +
                                tap * Config::tap_lines)
                  << (taps0 + tap);
        inside[block][half] = bits | places<0>(unit.at[2] * Config::position_step);
      }
  }
  CONVT3D_DEVICE void enter(const WorkTile&, uint32_t address, int, int) {
    box = address + (Config::Axis0::min_shift * arguments.slice_pitch +
                     Config::Axis1::min_shift * arguments.line_pitch) *
                        element;
  }
  CONVT3D_DEVICE void point(int tap0, int tap1) {
    Map::point(tap0, tap1);
    needed = 1u << tap0 | 1u << (taps0 + tap1);
  }

  template <int Step>
  CONVT3D_DEVICE void load(Fragment& units) const {
    constexpr int place = Places<Config>::at(Step);
    const uint32_t bits = needed | 1u << (taps0 + taps1 + Step);
#pragma unroll
    for (int block = 0; block < Config::blocks; ++block)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool exists = (inside[block][i % 2] & bits) == bits;
        uint32_t word[pair];
        Map::load_neighbours(
            word, exists ? rows[block][i] + at + uint32_t(place * pair * element) : zeros,
            exists ? arguments.channel_pitch * element : 0);
#pragma unroll
        for (int residue = 0; residue < pair; ++residue)
          units[residue][block][i] = Config::Type::channels_per_word == 1
                                         ? round_tf32_operand(word[residue])
                                         : word[residue];
      }
  }

 private:
  template <int Step>
  CONVT3D_DEVICE uint32_t places(int position) const {
    if constexpr (Step < steps) {
      const int first = position + Places<Config>::at(Step) * pair;
      return uint32_t(unsigned(first) < unsigned(arguments.source.extent[2]))
                 << (taps0 + taps1 + Step) |
             places<Step + 1>(position);
    } else {
      return 0;
    }
  }
};

}  // namespace convt3d
