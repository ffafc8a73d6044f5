// Where a CTA of the gather kernel works, and how its source box and weights reach shared memory.
#pragma once
#include "ampere/gather/config.cuh"

namespace convt3d {

template <typename Config>
struct GatherArguments {
  Activation<const typename Config::Storage> source;
  Activation<typename Config::Storage> target;
  const uint32_t* weights;
  const typename Config::Storage* bias;
  int tile0, tile1, tile2;     // units of a CTA along each axis
  int tiles0, tiles1, tiles2;  // CTAs along each axis
  CONVT3D_FUSION_MEMBER
};

/// Decodes the CTA index; phases vary fastest so that CTAs which share a source box, and whose
/// destinations share cache lines, run together.
template <typename Config>
struct GatherTile {
  int phase0, phase1, column_tile, group, sample;
  int unit0, unit1, unit2;

  CONVT3D_DEVICE explicit GatherTile(const GatherArguments<Config>& arguments) {
    int index = blockIdx.x;
    phase1 = index % Config::Axis1::phases;
    index /= Config::Axis1::phases;
    phase0 = index % Config::Axis0::phases;
    index /= Config::Axis0::phases;
    column_tile = index % Config::column_tiles;
    index /= Config::column_tiles;
    group = index % Config::groups;
    index /= Config::groups;
    unit2 = index % arguments.tiles2 * arguments.tile2;
    index /= arguments.tiles2;
    unit1 = index % arguments.tiles1 * arguments.tile1;
    index /= arguments.tiles1;
    unit0 = index % arguments.tiles0 * arguments.tile0;
    sample = index / arguments.tiles0;
  }
};

/// Coordinates of a unit within its tile; row by row, axis 2 fastest.
struct TileUnits {
  Divider by_tile2, by_tile1;
  int tile1, tile2, count;
  template <typename Config>
  CONVT3D_DEVICE explicit TileUnits(const GatherArguments<Config>& arguments)
      : by_tile2(arguments.tile2),
        by_tile1(arguments.tile1),
        tile1(arguments.tile1),
        tile2(arguments.tile2),
        count(arguments.tile0 * arguments.tile1 * arguments.tile2) {}
  CONVT3D_DEVICE void locate(int unit, int& u0, int& u1, int& u2) const {
    const int row = by_tile2.quotient(unit);
    u2 = unit - row * tile2;
    u0 = by_tile1.quotient(row);
    u1 = row - u0 * tile1;
  }
};

/// How source boxes are filled.
template <typename Config, bool octets = Config::octets>
struct SourceFill : BoxFill<GatherBox<Config>> {
  using Base = BoxFill<GatherBox<Config>>;
  CONVT3D_DEVICE SourceFill(const GatherArguments<Config>& arguments, int size0, int size1,
                            int size2, int)
      : Base(arguments.source, typename Base::Shape(size0, size1, size2)) {}
};
template <typename Config>
struct SourceFill<Config, true> : OctetFill<GatherBox<Config>> {
  CONVT3D_DEVICE SourceFill(const GatherArguments<Config>& arguments, int size0, int size1,
                            int size2, int origin2)
      : OctetFill<GatherBox<Config>>(arguments.source, size0, size1, size2, origin2) {}
};

template <typename Config>
struct Fill {
  using Storage = typename Config::Storage;
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  using Box = GatherBox<Config>;

  int origin0, origin1, origin2;
  SourceFill<Config> fill_box;
  uint32_t shared_base;
  const uint32_t* packed;
  const Storage* source_base;
  PhaseTaps taps0, taps1;

  CONVT3D_DEVICE Fill(const GatherArguments<Config>& arguments, const GatherTile<Config>& tile,
                      uint32_t shared_base_, const PhaseTaps& taps0_, const PhaseTaps& taps1_)
      : origin0(tile.unit0 * Axis0::unit_source + Axis0::min_shift),
        origin1(tile.unit1 * Axis1::unit_source + Axis1::min_shift),
        origin2(tile.unit2 * Axis2::unit_source + Axis2::min_shift),
        fill_box(arguments, (arguments.tile0 - 1) * Axis0::unit_source + Axis0::shifts,
                 (arguments.tile1 - 1) * Axis1::unit_source + Axis1::shifts,
                 (arguments.tile2 - 1) * Axis2::unit_source + Axis2::shifts, origin2),
        shared_base(shared_base_), taps0(taps0_), taps1(taps1_) {
    source_base = arguments.source.group_base(tile.sample, tile.group, Config::source_channels,
                                              Box::all_channels, Box::channels_last);
    packed = arguments.weights + int64_t(tile.group * Config::column_tiles + tile.column_tile) *
                                     Config::chunks * Config::chunk_weight_words;
  }

  /// Positions between a row's start in shared memory and the tile's first position.
  CONVT3D_DEVICE int row_lead() const { return fill_box.row_lead(origin2); }

  /// The source box of one channel chunk.
  CONVT3D_DEVICE void source(int chunk, int buffer) const {
    fill_box(source_base, chunk * Config::chunk_channels, origin0, origin1, origin2,
             shared_base + 4u * buffer * Box::box_words);
  }

  /// What a box that has landed needs before it is read, barrier included.
  CONVT3D_DEVICE void finish(int buffer) const {
    if constexpr (Config::octets) {
      if (fill_box.transposes()) {
        fill_box.transpose(shared_base + 4u * buffer * Box::box_words);
        __syncthreads();
      }
    }
  }

  /// Words of (taps0 x kernel2), where all phases have as many taps.
  CONVT3D_CONSTEXPR static int run_words() {
    if constexpr (Config::static0)
      return Axis0::kernel * Config::row_words;
    else
      return Axis0::min_taps == Axis0::max_taps ? Axis0::max_taps * Config::row_words : 0;
  }
  static constexpr int known_run = run_words();

  /// The packed weights of one stage: for each matrix step and each tap of axis 1, a contiguous
  /// run of (taps0 x kernel2).
  CONVT3D_DEVICE void weights(int chunk, int tap1, int buffer) const {
    const int count1 = Config::split ? 1 : taps1.count;
    const int run = known_run > 0 ? known_run : taps0.count * Config::row_words;
    const uint32_t stage =
        shared_base + 4u * (weight_offset<Config> + buffer * Config::stage_weight_words);
    for (int step = 0; step < Config::depth; ++step) {
      uint32_t destination = stage + 4u * step * Config::stage_step_words;
      const uint32_t* from =
          packed + int64_t(chunk * Config::depth + step) * Config::step_weight_words +
          (taps1.first_position + tap1) * Config::slab_words +
          taps0.first_position * Config::row_words;
      for (int i = 0; i < count1; ++i) {
        if constexpr (known_run > 0 && known_run <= 64 * Config::threads) {
#pragma unroll
          for (int word = 0; word < known_run; word += 4 * Config::threads)
            if (word + 4 * Config::threads <= known_run ||
                word + 4 * threadIdx.x < known_run)
              async_copy<16>(destination + 4 * word + 16 * threadIdx.x,
                             from + word + 4 * threadIdx.x, true);
        } else {
          for (int word = 4 * threadIdx.x; word < run; word += 4 * Config::threads)
            async_copy<16>(destination + 4 * word, from + word, true);
        }
        destination += 4 * run;
        from += Config::slab_words;
      }
    }
  }
};

}  // namespace convt3d
