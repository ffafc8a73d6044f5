// The compile-time description of a gradient-by-weight kernel on wgmma: its rows, columns and how
// the slabs of both tensors lie in shared memory. Axes are in the kernel's order: axis 0 is swept
// along, axis 1 counts rows of W, axis 2 is W.
#pragma once
#include "device/arithmetic.cuh"
#include "device/pipeline.cuh"
#include "geometry/layer.cuh"
#include "load/box.cuh"

namespace convt3d {

/// The greatest step between positions of the gradient that reaches all of an axis' taps.
CONVT3D_CONSTEXPR int tap_step(int taps, int stride, int dilation) {
  return taps > 1 ? gcd(stride, dilation) : stride;
}

/// How the gradient comes: cp.async; bulk copies of rows, whose start is rounded down to 16
/// bytes; by tensor map, boxes of (W, channels, rows), or of (volume, channels), whose rows may
/// be odd; bulk copies of all rows of a channel, which consumers mask where zeros should be
/// between them; by cp.async, whole volumes of samples; runs by cp.async of 16 bytes; boxes of
/// 128 bytes of W under the swizzle, which come three times as fast; the same of several short
/// rows, just those of a product.
enum class TargetFill { copies, runs, rows, flat, joined, volume, pieces, swizzled, lines };

struct WgradConfig : Layer {
  static constexpr bool half = Type::channels_per_word == 2;
  /// Operands in two TF32 parts, three products; summed outside the tensor core, which truncates.
  static constexpr bool ieee = CONVT3D_IEEE;
  static_assert(!(half && ieee), "16-bit operands have one part");
  static constexpr int bytes = int(sizeof(Storage));
  static constexpr int line = 16 / bytes;     // positions of 16 bytes
  static constexpr int depth = 2 * line;      // positions of one product

  /// x by TMA: rows of 128 bytes under the swizzle, rounded to TF32 on load.
  static constexpr bool source_map = CONVT3D_SOURCE_MAP;
  /// By mma.sync, not wgmma.
  static constexpr bool warp_products = CONVT3D_WARP_PRODUCTS;
  static_assert(!warp_products || ieee, "few columns of IEEE-grade arithmetic");
  /// Likewise, fragments of both phases of W, whose stride is 2 (wgrad/phases.cuh).
  static constexpr bool phase_rows = CONVT3D_PHASE_ROWS;
  static_assert(!phase_rows || (ieee ? warp_products : half), "short sums by mma.sync");
  using Math = CONVT3D_MATH;
  /// Of IEEE-grade operands, x lies in shared memory in two parts; from boxes, warps split it.
  static constexpr bool split_columns = source_map && ieee;
  static_assert(!split_columns || warp_products, "wgmma takes both parts from shared memory");
  static constexpr int parts = ieee && !split_columns ? 2 : 1;
  static constexpr TargetFill target_fill = TargetFill(CONVT3D_TARGET_FILL);
  static constexpr bool volume = target_fill == TargetFill::volume;
  static constexpr bool pieces = target_fill == TargetFill::pieces;
  static constexpr bool target_copies = target_fill == TargetFill::copies || volume || pieces;
  static constexpr bool lines = target_fill == TargetFill::lines;
  static constexpr bool swizzled = target_fill == TargetFill::swizzled || lines;
  static constexpr bool target_map =
      target_fill == TargetFill::rows || target_fill == TargetFill::flat || swizzled;
  /// Neither runs nor boxes of whole lines bring the zeros beyond the border: producers write
  /// them.
  static constexpr bool joined = target_fill == TargetFill::joined;
  static_assert(!joined || source_map, "consumers wait for the bytes");
  static constexpr bool target_clear =
      target_fill == TargetFill::runs || joined || pieces || CONVT3D_TARGET_CLEAR;
  /// The tensor's address modulo 16 bytes decides where a row begins.
  static constexpr bool floating_rows =
      target_fill == TargetFill::runs || target_fill == TargetFill::flat || joined || pieces;
  /// One thread produces, and nothing has to be done to what it brings.
  static constexpr bool maps_only = source_map && target_map && !target_clear;
  static constexpr int chunk = 128 / bytes;  // positions of a swizzled row

  // Taps along axis 1 are columns (shifts of x by whole rows) or rows of the product. Columns are
  // those of one phase, which x meets one row on; rows, those of the different phases.
  static constexpr int column_taps = CONVT3D_COLUMN_TAPS;
  static constexpr int phases1 = stride1 / dilation1;
  static constexpr int taps0 = kernel0;
  static constexpr int taps1 =
      column_taps > 1 && phases1 < kernel1 ? phases1 : kernel1;
  static constexpr int taps2 = kernel2;
  static constexpr int taps = taps0 * taps1 * taps2;

  // Of the gradient only every step-th position is of use; unit: useful positions from one
  // position of x to the next; reach: from one tap to the next.
  static constexpr int step0 = tap_step(taps0, stride0, dilation0);
  static constexpr int step1 = tap_step(taps1, stride1, dilation1);
  static constexpr int step2 =
      CONVT3D_WHOLE_ROWS ? 1 : tap_step(taps2, stride2, dilation2);
  static constexpr int unit0 = stride0 / step0;
  static constexpr int unit1 = stride1 / step1;
  static constexpr int unit2 = stride2 / step2;
  static constexpr int reach0 = taps0 > 1 ? dilation0 / step0 : 1;
  static constexpr int reach1 = taps1 > 1 ? dilation1 / step1 : 1;
  static constexpr int reach2 = taps2 > 1 ? dilation2 / step2 : 1;
  /// Whether the planes of a step are its own, and steps can come in any order.
  static constexpr bool separate_steps = (taps0 - 1) * reach0 + 1 <= unit0 && column_taps == 1;
  static_assert(column_taps == 1 || (stride1 % dilation1 == 0 &&
                                     column_taps == div_up(kernel1, phases1)),
                "columns shift x by one row a tap");

  /// Products then take whole 128 bytes of the gradient's rows, or halves in turn.
  static constexpr int chunk_products = 4 / unit2 < 1 ? 1 : 4 / unit2;
  static_assert(!lines || (unit1 * unit2 == 4 && taps1 == unit1 && reach1 == 1 && source_map &&
                           padding1 == 0 && CONVT3D_CHANNEL_TILE_M % 8 == 0),
                "a product's rows of the gradient are 128 bytes that lie together");
  static_assert(!swizzled || ((unit2 == 2 || unit2 == 4) && taps2 == unit2 && reach2 == 1 &&
                              padding2 == 0 && unit1 * CONVT3D_CHANNEL_TILE_M % 8 == 0 &&
                              CONVT3D_FRAGMENTS % 2 == 0),
                "taps do not overlap, and lines keep their swizzle from row to row");

  /// A step is then a whole sample, through whose slices products run without a pause.
  static_assert(!volume || step2 == 1, "pieces of 16 bytes of whole rows");

  /// The gradient's sums are the gradient by bias: consumers add up what their fragments hold,
  /// whose rows of some taps share out all positions.
  static constexpr bool bias = CONVT3D_SUM_BIAS;
  static_assert(!bias || (dilation0 == 1 && dilation1 == 1 &&
                          dilation2 == 1 && column_taps == 1 &&
                          padding0 + stride0 <= kernel0 &&
                          padding1 + stride1 <= kernel1 &&
                          padding2 + stride2 <= kernel2),
                "`stride` neighbouring taps of each axis reach all positions");
  /// Whether a tap is one of those.
  CONVT3D_CONSTEXPR static bool adds(int k0, int k1, int k2) {
    return k0 >= padding0 && k0 < padding0 + stride0 &&
           k1 >= padding1 && k1 < padding1 + stride1 &&
           k2 >= padding2 && k2 < padding2 + stride2;
  }

  // Columns: [tap along axis 1, descending][x channel].
  static constexpr int channel_tile_n = CONVT3D_CHANNEL_TILE_N;
  static constexpr int columns = column_taps * channel_tile_n;
  /// The tap along axis 1 of a row and a column, which may not exist.
  CONVT3D_CONSTEXPR static int tap1(int row_tap, int column) {
    return row_tap + (column_taps - 1 - column / channel_tile_n) * (column_taps > 1 ? phases1 : 1);
  }
  static constexpr int channel_tiles_n = div_up(source_channels, channel_tile_n);
  static_assert(channel_tile_n % 8 == 0 && columns <= 256, "columns of one wgmma");

  // Rows come in octets: octet_taps neighbouring taps times octet_channels, so that the lanes of
  // a fragment find their words in 32 different banks; [taps][channels of the tile][octet].
  // Channels of an octet may be two apart, and those of a tile as far apart as there are tiles,
  // so that the runs of an octet begin alike modulo 16 bytes.
  static constexpr int octet_taps = unit2 % 4 == 0 ? 4 : unit2 % 2 == 0 ? 2 : 1;
  static constexpr int octet_channels = 8 / octet_taps;
  static constexpr int channel_tile_m = CONVT3D_CHANNEL_TILE_M;
  static constexpr int channel_tiles_m = div_up(target_channels, channel_tile_m);
  static constexpr int channel_octets = channel_tile_m / octet_channels;
  static constexpr int octets = div_up(taps, octet_taps) * channel_octets;
  static_assert(channel_tile_m % octet_channels == 0, "a tile is whole octets");
  static constexpr int octet_step = CONVT3D_OCTET_STEP;
  static_assert(channel_octets % octet_step == 0, "octets share blocks of channels");
  /// Runs of an octet's channels, as far apart in the tensor as there are octets, are neighbours
  /// in shared memory: which of those a channel of the tile is.
  CONVT3D_CONSTEXPR static int slot(int channel) {
    if (phase_rows) return half ? channel : channel % 4 * 2 + channel / 4;
    return target_fill == TargetFill::runs || joined || pieces
               ? channel % octet_step * octet_channels + channel / octet_step
               : channel;
  }
  static constexpr int channel_step = CONVT3D_CHANNEL_STEP;
  static_assert(channel_step == 1 || channel_step == channel_tiles_m, "tiles take turns");

  // A CTA has `blocks` m64 blocks in each consumer warpgroup; the last CTA of a tile has fewer.
  static constexpr int consumers = CONVT3D_CONSUMERS;
  static constexpr int blocks = CONVT3D_BLOCKS;
  static constexpr int row_blocks = div_up(octets, 8);
  static constexpr int cta_blocks = consumers * blocks;
  static constexpr int row_tiles = div_up(row_blocks, cta_blocks);
  static constexpr int last_blocks = row_blocks - (row_tiles - 1) * cta_blocks;
  /// Blocks of a consumer of the last CTA; at least one, which may be empty.
  CONVT3D_CONSTEXPR static int last_of(int consumer) {
    return (last_blocks + consumers - 1 - consumer) / consumers > 0
               ? (last_blocks + consumers - 1 - consumer) / consumers
               : 1;
  }
  /// Of joined rows, the first 16 bytes of x and the last alone meet what lies beyond an end.
  static constexpr bool masks_ends = joined && !warp_products && !phase_rows;
  static_assert(!masks_ends || padding2 <= line * unit2, "no others do");
  /// A step's planes follow each other in their ring, without a turn, as far apart as those of
  /// every other: readers find out once where they read.
  static constexpr bool steady =
      (separate_steps || volume) && !floating_rows && row_tiles == 1;
  /// Where a step is a whole sample of so many slices, blocks skip those that none of their taps
  /// meets within the gradient.
  static constexpr int slices = CONVT3D_SLICES, slice_products = CONVT3D_SLICE_PRODUCTS;
  static constexpr bool skips = slices > 0;
  static_assert(!skips || (volume && !ieee && row_tiles == 1 && consumers == 2 &&
                           last_blocks == cta_blocks && slices * slice_products % CONVT3D_FRAGMENTS == 0),
                "every consumer has its blocks, every fragment its slice");
  CONVT3D_CONSTEXPR static bool meets(int block, int product) {
    for (int octet = block * 8; skips && octet < block * 8 + 8; ++octet) {
      const int k0 = octet / channel_octets * octet_taps / (taps1 * taps2);
      const int plane =
          product / slice_products * stride0 - padding0 + k0 * dilation0;
      if (plane >= 0 && plane < CONVT3D_OUTPUTS0) return true;
    }
    return !skips;
  }
  static constexpr int registers = columns / 2;  // accumulators of a block, in each thread
  static constexpr int block_elements = registers * 128;
  static constexpr int cta_elements = cta_blocks * block_elements;
  /// Sums are whole: they go to the weight at once, through shared memory.
  static constexpr bool direct_store = CONVT3D_DIRECT_STORE;
  /// CTAs of a cluster share the steps of the same sums, and add these up among themselves.
  static constexpr int cluster = CONVT3D_CLUSTER;
  static_assert(cluster == 1 || (CONVT3D_DIRECT_STORE && row_tiles == 1 && column_taps == 1 &&
                                 !warp_products && columns % cluster == 0),
                "whole sums of one warpgroup product, of all rows");
  /// Between columns of sums in shared memory; lanes of a warp find different banks.
  static constexpr int sum_pitch = cta_blocks * 64 + 4;
  static constexpr int sum_bytes = 4 * columns * sum_pitch;
  static constexpr int tiles = channel_tiles_n * channel_tiles_m * groups;
  /// What a thread of the second pass adds up: so many taps of a channel, four columns.
  static constexpr int item_taps = taps < 8 ? taps : 8;
  static constexpr int tap_groups = div_up(taps, item_taps);
  static constexpr int items = channel_tile_m * tap_groups * (columns / 4);

  static constexpr int stages = CONVT3D_STAGES;  // of x
  static constexpr int producers = 128;
  static constexpr int full_arrivals = maps_only ? 1 : producers;
  static constexpr int threads = producers + 128 * consumers;
  /// Producers write by plain stores where consumers have read, or no product gathers a warp's
  /// lanes before it is done with a stage: every lane hands it back.
  static constexpr bool lanes_leave = !maps_only || warp_products || phase_rows;
  static constexpr int empty_arrivals = arrivals_of(4 * consumers, lanes_leave);
  /// Of each thread, by role; what a CTA is launched with is shared out anew.
  static constexpr int producer_registers =
      consumers == 3 ? (maps_only ? 56 : 80) : pieces ? 104 : joined && !phase_rows ? 88 : 72;
  static constexpr int consumer_registers =
      ((consumers == 3 ? 512 : 504) - producer_registers) / consumers;
  static_assert(consumers == 2 || (row_tiles == 1 && last_blocks == cta_blocks),
                "three consumers have as much to do");
  static constexpr int fragments = CONVT3D_FRAGMENTS;  // row fragments in flight
  /// Words are operands as they lie in shared memory.
  static constexpr bool operands_are_words = target_map && !half && !ieee && !bias;
  /// Fragments are loaded as they are, early; else words are, from which they are then made.
  static constexpr bool direct = operands_are_words && fragments > 2;
};

/// What a CTA owns: a tile of channels, a range of rows, a share of the positions.
template <typename Config>
struct WgradTile {
  int channel_n, channel_m, group, row_tile, split, splits;
  bool last;

  /// CTAs: [row tiles but the last x their splits, then the splits of the last][tile]; of a
  /// cluster, those of a tile follow each other.
  CONVT3D_DEVICE WgradTile(int block, int splits_full, int splits_last) {
    int tile = block / Config::cluster % Config::tiles;
    const int share =
        block / Config::cluster / Config::tiles * Config::cluster + block % Config::cluster;
    channel_n = tile % Config::channel_tiles_n * Config::channel_tile_n;
    tile /= Config::channel_tiles_n;
    channel_m =
        tile % Config::channel_tiles_m * (Config::channel_step > 1 ? 1 : Config::channel_tile_m);
    group = tile / Config::channel_tiles_m;
    const int full = (Config::row_tiles - 1) * splits_full;
    last = share >= full;
    row_tile = last ? Config::row_tiles - 1 : share % (Config::row_tiles - 1 + (Config::row_tiles == 1));
    split = last ? share - full : share / (Config::row_tiles - 1 + (Config::row_tiles == 1));
    splits = last ? splits_last : splits_full;
  }
  /// A channel of the gradient within its group.
  CONVT3D_DEVICE int target_channel(int channel) const {
    return channel_m + channel * Config::channel_step;
  }
  /// Channels of the tile that exist.
  CONVT3D_DEVICE int target_live() const {
    return div_up(Config::target_channels - channel_m, Config::channel_step);
  }
  /// The CTA that has another split of the same sums.
  CONVT3D_DEVICE int64_t block_of(int tile, int split_, int splits_full) const {
    const int share = last ? (Config::row_tiles - 1) * splits_full + split_
                           : split_ * (Config::row_tiles - 1) + row_tile;
    return (int64_t(share / Config::cluster) * Config::tiles + tile) * Config::cluster +
           share % Config::cluster;
  }
};

/// One row of the product: a tap and a channel of the tile.
template <typename Config>
struct WgradRow {
  static constexpr int step = Config::octet_step;
  static constexpr int together = Config::octet_channels * step;  // channels of neighbouring octets
  int tap, channel;
  bool live;
  /// `octet` counts over the rows of a channel tile, `row` within it.
  CONVT3D_DEVICE WgradRow(int octet, int row) {
    live = octet < Config::octets;
    const int pair = live ? octet / Config::channel_octets : 0;
    tap = pair * Config::octet_taps + row / Config::octet_channels;
    const int of = live ? octet % Config::channel_octets : 0;
    channel = of / step * together + row % Config::octet_channels * step + of % step;
    if (tap >= Config::taps) {
      live = false;
      tap = pair * Config::octet_taps;
    }
  }
  CONVT3D_DEVICE static WgradRow of(int tap, int channel) {
    WgradRow row(0, 0);
    row.tap = tap, row.channel = channel;
    return row;
  }
  /// Which row of a channel tile a tap and a channel are.
  CONVT3D_DEVICE static int index(int tap, int channel) {
    const int octet = tap / Config::octet_taps * Config::channel_octets +
                      channel / together * step + channel % step;
    return octet * 8 + tap % Config::octet_taps * Config::octet_channels +
           channel % together / step;
  }
  CONVT3D_DEVICE int k0() const { return tap / (Config::taps1 * Config::taps2); }
  CONVT3D_DEVICE int k1() const { return tap / Config::taps2 % Config::taps1; }
  CONVT3D_DEVICE int k2() const { return tap % Config::taps2; }
};

}  // namespace convt3d
