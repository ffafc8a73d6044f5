// Slabs of both tensors, copied to shared memory by the producer warps.
//
// A slab is some rows of W of a tile of channels. A row is a row of the tensor at (i0, i1), every
// `step`-th position from a first one on; what lies outside the tensor becomes zero. The caller
// gives the place of a position and a channel in shared memory:
//
//   x          [slice][16 bytes of W][row][channel][position]   wgmma's core matrices, no swizzle
//   gradient   [channel][row][position]
//
// Positions move 16 bytes at a time where W and the address allow it, else 4 bytes. 16-bit
// positions whose rows are odd or strided pass through registers.
#pragma once
#include "wgrad/config.cuh"

namespace convt3d {

enum class Pieces { wide, word, pair };

/// Rows of a slab in a tensor, and what pieces they move in.
template <typename Config, bool gradient>
struct SlabFill {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  static constexpr int channels = gradient ? Config::target_channels : Config::source_channels;
  static constexpr int tile = gradient ? Config::channel_tile_m : Config::channel_tile_n;
  static constexpr int step1 = gradient ? Config::step1 : 1;
  static constexpr int step2 = gradient ? Config::step2 : 1;
  static constexpr int padding2 = gradient ? Layer::padding2 : 0;
  static constexpr int64_t all_channels = int64_t(Config::groups) * channels;

  const Activation<const Storage>& tensor;
  int64_t volume;
  Pieces pieces;
  int lead;      // positions that pieces begin before the first one
  int slices, rows;  // positions along axis 0, and rows of each
  int row_pieces;
  Divider by_pieces, by_rows;

  CONVT3D_DEVICE SlabFill(const Activation<const Storage>& tensor_, int slices_, int rows_,
                          int positions)
      : tensor(tensor_), slices(slices_), rows(rows_), by_pieces(1), by_rows(rows_) {
    volume = tensor.volume();
    pieces = Pieces::pair;
    if (!Config::half) pieces = Pieces::word;
    if (step2 == 1) {
      const bool aligned = reinterpret_cast<uint64_t>(tensor.data) % 16 == 0;
      if (aligned && tensor.extent[2] % Config::line == 0)
        pieces = Pieces::wide;
      else if (Config::half && tensor.extent[2] % 2 == 0 &&
               reinterpret_cast<uint64_t>(tensor.data) % 4 == 0)
        pieces = Pieces::word;
    }
    // Tiles begin at multiples of `line`, so that the lead is the same for all.
    lead = floor_mod(-padding2, width());
    if (step2 > 1 || pieces == Pieces::pair) lead = 0;
    row_pieces = div_up(positions + lead, width());
    by_pieces = Divider(row_pieces);
  }
  /// Positions of a piece.
  CONVT3D_DEVICE int width() const {
    return pieces == Pieces::wide ? Config::line : pieces == Pieces::pair || Config::half ? 2 : 1;
  }

  /// The first channel of a tile of one sample.
  CONVT3D_DEVICE const Storage* base(int sample, int group, int channel) const {
    return tensor.group_base(sample, group, channels, all_channels, false) + channel * volume;
  }

  /// `place(slice, row, position)` is the shared address of the tile's first channel, and
  /// channels are `channel_pitch` bytes apart.
  template <typename Place>
  CONVT3D_DEVICE void copy(const Storage* from, int live_channels, int i0, int i1, int i2,
                           int channel_pitch, Place place) const {
    if (pieces == Pieces::wide)
      each<Pieces::wide>(from, live_channels, i0, i1, i2, channel_pitch, place, Copy{});
    else if (pieces == Pieces::word)
      each<Pieces::word>(from, live_channels, i0, i1, i2, channel_pitch, place, Copy{});
    else
      each<Pieces::pair>(from, live_channels, i0, i1, i2, channel_pitch, place, Copy{});
  }

  /// Rounds what this thread copied to TF32, in place; what that loses goes `rest` bytes further
  /// on.
  template <typename Place>
  CONVT3D_DEVICE void round(int live_channels, uint32_t rest, int channel_pitch,
                            Place place) const {
    if (pieces == Pieces::wide)
      each<Pieces::wide>(nullptr, live_channels, 0, 0, 0, channel_pitch, place, Round{rest});
    else
      each<Pieces::word>(nullptr, live_channels, 0, 0, 0, channel_pitch, place, Round{rest});
  }

 private:
  struct Copy {
    static constexpr bool reads = true;
    template <Pieces kind>
    CONVT3D_DEVICE void piece(uint32_t to, const Storage* from, bool first, bool second) const {
      if constexpr (kind == Pieces::wide) {
        async_copy<16>(to, from, first);
      } else if constexpr (kind == Pieces::word) {
        async_copy<4>(to, from, first);
      } else {
        const Storage low = first ? __ldg(from) : Storage(0);
        const Storage high = second ? __ldg(from + step2) : Storage(0);
        store_shared(to, Type::word(low, high));
      }
    }
  };
  struct Round {
    uint32_t rest;
    static constexpr bool reads = false;
    template <Pieces kind>
    CONVT3D_DEVICE void piece(uint32_t at, const Storage*, bool, bool) const {
      constexpr int words = kind == Pieces::wide ? 4 : 1;
      uint32_t raw[4], big[4], small[4];
      if constexpr (words == 4)
        load_shared(at, raw[0], raw[1], raw[2], raw[3]);
      else
        raw[0] = load_shared(at);
#pragma unroll
      for (int i = 0; i < words; ++i) {
        if constexpr (Config::ieee)
          MathIeee::split(raw[i], big[i], small[i]);
        else
          big[i] = round_tf32_operand(raw[i]);
      }
      store<words>(at, big);
      if constexpr (Config::ieee) store<words>(at + rest, small);
    }
    template <int words>
    CONVT3D_DEVICE static void store(uint32_t at, const uint32_t (&word)[4]) {
      if constexpr (words == 4)
        store_shared(at, word[0], word[1], word[2], word[3]);
      else
        store_shared(at, word[0]);
    }
  };

  /// Visits this thread's pieces: lanes along W and rows, warps along channels.
  template <Pieces kind, typename Place, typename Visit>
  CONVT3D_DEVICE void each(const Storage* base, int live_channels, int i0, int i1, int i2, int channel_pitch,
                           Place place, Visit visit) const {
    constexpr int width = kind == Pieces::wide ? Config::line
                          : kind == Pieces::pair || Config::half ? 2 : 1;
    constexpr int warps = Config::producers / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first2 = i2 - (kind == Pieces::pair ? 0 : lead);
    const int items = slices * rows * row_pieces;
    // Rows and columns of channels that do not exist are computed from whatever lies there, and
    // dropped.
    const int channels_here = min(tile, live_channels);
    for (int item = lane; item < items; item += 32) {
      int row = by_pieces.quotient(item);
      const int x = (item - row * row_pieces) * width;
      const int slice = by_rows.quotient(row);
      row -= slice * rows;
      const int at0 = i0 + slice;
      const int at1 = i1 + row * step1;
      const int at2 = first2 + x * step2;
      const bool inside = Visit::reads && tensor.inside(at0, at1, at2);
      const bool next = kind == Pieces::pair && Visit::reads && tensor.inside(at0, at1, at2 + step2);
      const int64_t position =
          inside || next ? int64_t(at0) * tensor.stride0 + at1 * tensor.stride1 + at2 : 0;
      // The loop is bound by its instructions: everything that it can do without is outside.
      const bool read = inside || next;
      const int64_t offset = position + warp * volume;
      const Storage* from = read ? base + offset : tensor.data;
      const int64_t from_step = !read ? 0 : warps * volume;
      uint32_t to = place(slice, row, x) + warp * channel_pitch;
      const uint32_t to_step = warps * channel_pitch;
#pragma unroll 4
      for (int c = warp; c < channels_here; c += warps) {
        visit.template piece<kind>(to, from, inside, next);
        to += to_step;
        from += from_step;
      }
    }
  }
};

}  // namespace convt3d
