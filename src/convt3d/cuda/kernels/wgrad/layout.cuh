// A launch's arguments, and what every role derives from them: the CTA's tile and steps, and the
// map of shared memory.
#pragma once
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "wgrad/config.cuh"

namespace convt3d {

/// The result: [in][out][taps along axes 0, 1, 2], in the order and at the distances of the
/// strides.
template <typename Config>
struct WgradWeight {
  using Storage = typename Config::Storage;
  Storage* data;
  int64_t stride_in, stride_out, stride0, stride1, stride2;

  /// Where an element lies, of a channel of x within its group.
  CONVT3D_DEVICE Storage* at(int group, int in, int out, int k0, int k1, int k2) const {
    return data + (int64_t(group) * Config::source_channels + in) * stride_in + out * stride_out +
           k0 * stride0 + k1 * stride1 + k2 * stride2;
  }
};

template <typename Config>
struct WgradArguments {
  Activation<const typename Config::Storage> source;
  Activation<const typename Config::Storage> gradient;
  float* partial;
  int tile0, tile1, tile2;  // of a step, in positions of x (or gradient rows where taps are columns)
  int tiles1, tiles2, steps0;  // tiles across, steps down a column
  int first1;                  // where the first tile begins
  int planes;                  // of the gradient ring
  int row_pitch, channel_pitch;  // of the gradient's planes, in positions
  int samples, splits_full, splits_last;
  WgradWeight<Config> weight;
  float* sums;  // of the gradient, for each row of each CTA
};

/// Everything both roles derive from the arguments.
template <typename Config_>
struct WgradLayout {
  using Config = Config_;
  const WgradArguments<Config>& a;
  WgradTile<Config> tile;
  int k0_first;      // lowest tap along axis 0 that the CTA needs
  int span, fresh;   // planes of a step; those that are new
  int column_planes;  // from a column's first plane in the ring to the next column's
  int rows_x, rows_g;
  int begin, end;    // steps
  // Steps that share no plane with another one go to the CTAs in turn, so that neighbours read
  // together what lies together in memory. Else columns are, where all CTAs get equally many;
  // else each CTA has a range of steps.
  bool interleaved;
  int next0, next1, next2, next_sample;  // tiles, and samples, from a column or step to the next
  uint32_t x_line;   // bytes from 16 bytes of W to the next
  int chunks;        // of a slice, where x comes by TMA
  uint32_t x_chunk;  // bytes of one
  uint32_t x_slice, x_part, x_slab, plane;
  uint32_t box;      // bytes of a plane
  int chunks_g;      // of a plane's rows, where they are swizzled
  uint32_t g_chunk;  // bytes of one
  uint32_t x_ring, g_ring, barriers;
  bool narrow;       // a row is 16 bytes: a product spans two rows
  bool paired;       // a row is 8 bytes: a product spans four, of x by tensor map
  bool flat;         // chunks run over the rows of a slice, whole rows of x
  bool whole;        // and over the slices too

  CONVT3D_DEVICE WgradLayout(const WgradArguments<Config>& a_, uint32_t shared)
      : a(a_), tile(blockIdx.x, a_.splits_full, a_.splits_last) {
    constexpr int octets = 8 * Config::cta_blocks;
    const int first_octet = tile.row_tile * octets;
    const int last_octet = min(first_octet + octets, Config::octets) - 1;
    k0_first = WgradRow<Config>(first_octet, 0).k0();
    const int last_tap =
        min((last_octet / Config::channel_octets + 1) * Config::octet_taps, Config::taps) - 1;
    const int k0_last = last_tap / (Config::taps1 * Config::taps2);
    span = (a.tile0 - 1) * Config::unit0 + (k0_last - k0_first) * Config::reach0 + 1;
    fresh = min(a.tile0 * Config::unit0, span);
    // Whole samples lie at the same places of each stage, whatever taps a CTA has.
    column_planes = Config::volume ? a.planes / Config::stages : span;
    rows_x = a.tile1 + Config::column_taps - 1;
    rows_g = (a.tile1 - 1) * Config::unit1 + (Config::taps1 - 1) * Config::reach1 + 1;
    const int columns = a.samples * a.tiles1 * a.tiles2;
    interleaved = columns % tile.splits == 0;
    const int apart = interleaved ? tile.splits : 1;
    next2 = apart % a.tiles2;
    next1 = apart / a.tiles2 % a.tiles1;
    next_sample = apart / a.tiles2 / a.tiles1;
    const int64_t steps = int64_t(columns) * a.steps0;
    begin = int(steps * tile.split / tile.splits);
    end = int(steps * (tile.split + 1) / tile.splits);
    if constexpr (Config::separate_steps) {
      next2 = tile.splits % a.tiles2;
      next1 = tile.splits / a.tiles2 % a.tiles1;
      next0 = tile.splits / a.tiles2 / a.tiles1 % a.steps0;
      next_sample = tile.splits / a.tiles2 / a.tiles1 / a.steps0;
      begin = 0, end = (int(steps) - tile.split + tile.splits - 1) / tile.splits;
    }
    narrow = a.tile2 == Config::line;
    paired = Config::source_map && 2 * a.tile2 == Config::line;
    // The extra 16 bytes spread the producers' stores over the banks.
    x_line = rows_x * Config::channel_tile_n * 16 + 16;
    x_slice = a.tile2 / Config::line * x_line;
    flat = Config::column_taps == 1 && a.tile2 == a.source.extent[2];
    whole = flat && a.tile1 == a.source.extent[1];
    chunks = div_up(whole  ? a.tile0 * a.tile1 * a.tile2
                    : flat ? a.tile1 * a.tile2
                           : a.tile2,
                    Config::chunk);
    x_chunk = (flat ? 1 : rows_x) * Config::channel_tile_n * 128;
    if constexpr (Config::source_map) x_slice = chunks * x_chunk;
    x_part = Config::source_map && whole ? x_slice : a.tile0 * x_slice;
    x_slab = Config::parts * x_part;
    box = (Config::target_fill == TargetFill::rows ? rows_g * a.row_pitch
                                                   : Config::channel_tile_m * a.channel_pitch) *
          Config::bytes;
    if constexpr (Config::joined) {
      // The last channel needs no more than its rows.
      const int width = (a.tile2 - 1) * Config::unit2 + (Config::taps2 - 1) * Config::reach2 + 1;
      const int run = (rows_g - 1) * a.row_pitch +
                      max(width, Layer::padding2 + a.gradient.extent[2]) + Config::line - 1;
      box = ((Config::channel_tile_m - 1) * a.channel_pitch + run) * Config::bytes;
    }
    chunks_g = div_up(a.tile2 * Config::unit2, Config::chunk);
    g_chunk = rows_g * Config::channel_tile_m * 128;
    if constexpr (Config::lines) {
      chunks_g = a.tile1 * a.tile2 / Config::depth;
      g_chunk = Config::channel_tile_m * 128;
    }
    if constexpr (Config::swizzled) box = chunks_g * g_chunk;
    constexpr int alignment = Config::swizzled ? 1024 : Config::target_map ? 128 : 16;
    plane = (box + alignment - 1) / alignment * alignment;
    // The swizzle follows address bits.
    x_ring = Config::source_map ? (shared + 1023) / 1024 * 1024 : shared;
    constexpr int ring_alignment = alignment > 128 ? alignment : 128;
    g_ring = (x_ring + Config::stages * x_slab + ring_alignment - 1) / ring_alignment *
             ring_alignment;
    barriers = g_ring + a.planes * plane;
  }
  CONVT3D_DEVICE uint32_t full(int stage) const { return barriers + 8 * stage; }
  CONVT3D_DEVICE uint32_t empty(int stage) const { return full(Config::stages + stage); }
  CONVT3D_DEVICE uint32_t landed(int stage) const { return full(2 * Config::stages + stage); }
  /// Behind the sums, which lie where the rings and their barriers were.
  CONVT3D_DEVICE uint32_t met() const {
    return max(full(3 * Config::stages), x_ring + Config::sum_bytes);
  }
  /// Hands a stage back to the producers, by a warp of consumers that has read it.
  CONVT3D_DEVICE void leave(int stage) const {
    if (Config::lanes_leave || threadIdx.x % 32 == 0) mbarrier_arrive(empty(stage));
  }
  /// All consumers meet, for the first time or the second. Of different numbers of blocks they
  /// are different code, so that no block barrier would do: its threads would be at two places.
  CONVT3D_DEVICE void meet(int time) const {
    mbarrier_arrive(met());
    mbarrier_wait(met(), time);
  }
};

/// The tensor maps of a launch; null where a tensor comes otherwise.
struct WgradMaps {
  const TensorMap* source;
  const TensorMap* target;
};

}  // namespace convt3d
