// Slabs of both tensors, copied to shared memory by the producer warps.
//
// A slab is some rows of W of a tile of channels. A row is a row of the tensor at (i0, i1), every
// `step`-th position from a first one on; what lies outside the tensor becomes zero. A slab says
// where a position and a channel lie in shared memory:
//
//   x          [slice][16 bytes of W][row][channel][position]   wgmma's core matrices, no swizzle
//   gradient   [channel][row][position]
//
// SlabFill moves positions 16 bytes at a time where W and the address allow, else 4, else (16-bit
// positions whose rows are odd or strided) through registers. RunFill moves whole rows of the
// gradient by bulk copies, or as pieces of 16 bytes, which TMA's maps cannot where rows are no
// multiple of 16 bytes.
#pragma once
#include "wgrad/config.cuh"

namespace convt3d {

enum class Pieces { wide, word, pair };

/// Rows of a slab in a tensor, and what pieces they move in.
template <typename Config, bool gradient>
struct SlabFill {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  static constexpr bool channels_last =
      gradient ? CONVT3D_TARGET_CHANNELS_LAST : CONVT3D_SOURCE_CHANNELS_LAST;
  static constexpr int channels = gradient ? Config::target_channels : Config::source_channels;
  static constexpr int tile = gradient ? Config::channel_tile_m : Config::channel_tile_n;
  static constexpr int step1 = gradient ? Config::step1 : 1;
  static constexpr int step2 = gradient ? Config::step2 : 1;
  static constexpr int padding2 = gradient ? CONVT3D_PADDING2 : 0;
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
    if (!channels_last && step2 == 1) {
      const bool aligned = reinterpret_cast<uint64_t>(tensor.data) % 16 == 0;
      if (aligned && tensor.extent[2] % Config::line == 0)
        pieces = Pieces::wide;
      else if (Config::half && tensor.extent[2] % 2 == 0 &&
               reinterpret_cast<uint64_t>(tensor.data) % 4 == 0)
        pieces = Pieces::word;
    }
    // Tiles begin at multiples of `line`, so that the lead is the same for all.
    lead = floor_mod(-padding2, width());
    if (step2 > 1 || channels_last || pieces == Pieces::pair) lead = 0;
    row_pieces = div_up(positions + lead, width());
    by_pieces = Divider(row_pieces);
  }
  /// Positions of a piece.
  CONVT3D_DEVICE int width() const {
    return pieces == Pieces::wide ? Config::line : pieces == Pieces::pair || Config::half ? 2 : 1;
  }

  /// The first channel of a tile of one sample.
  CONVT3D_DEVICE const Storage* base(int sample, int group, int channel) const {
    const Storage* from = tensor.group_base(sample, group, channels, all_channels, channels_last);
    return from + (channels_last ? int64_t(channel) : channel * volume);
  }

  /// `place(slice, row, position)` is the shared address of the tile's first channel, and channels
  /// are `channel_pitch` bytes apart.
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

  /// Rounds what this thread copied to TF32, in place; what that loses goes `rest` bytes further on.
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
        constexpr int64_t next = step2 * (channels_last ? all_channels : int64_t(1));
        const Storage low = first ? __ldg(from) : Storage(0);
        const Storage high = second ? __ldg(from + next) : Storage(0);
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

  /// Visits this thread's pieces: lanes along W and rows, warps along channels; for channels_last
  /// the other way round.
  template <Pieces kind, typename Place, typename Visit>
  CONVT3D_DEVICE void each(const Storage* base, int live_channels, int i0, int i1, int i2, int channel_pitch,
                           Place place, Visit visit) const {
    constexpr int width = kind == Pieces::wide ? Config::line
                          : kind == Pieces::pair || Config::half ? 2 : 1;
    constexpr int lanes_p = channels_last ? Config::producers / 32 : 32;
    constexpr int lanes_c = Config::producers / lanes_p;
    const int lane_p = channels_last ? threadIdx.x / 32 : threadIdx.x % 32;
    const int lane_c = channels_last ? threadIdx.x % 32 : threadIdx.x / 32;
    const int first2 = i2 - (kind == Pieces::pair ? 0 : lead);
    const int items = slices * rows * row_pieces;
    // Rows and columns of channels that do not exist are computed from whatever lies there, and
    // dropped.
    const int channels_here = min(tile, live_channels);
    for (int item = lane_p; item < items; item += lanes_p) {
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
      const int64_t offset =
          channels_last ? position * all_channels + lane_c : position + lane_c * volume;
      // The loop is bound by its instructions: everything that it can do without is outside.
      const bool read = inside || next;
      const Storage* from = read ? base + offset : tensor.data;
      const int64_t channel_step = !read ? 0 : channels_last ? int64_t(lanes_c) : lanes_c * volume;
      uint32_t to = place(slice, row, x) + lane_c * channel_pitch;
      const uint32_t to_step = lanes_c * channel_pitch;
#pragma unroll 4
      for (int c = lane_c; c < channels_here; c += lanes_c) {
        visit.template piece<kind>(to, from, inside, next);
        to += to_step;
        from += channel_step;
      }
    }
  }
};

/// Rows of the gradient by bulk copies, or by cp.async in pieces of 16 bytes. A row begins where its address modulo 16 bytes is that of the
/// tensor, so that both ends can be rounded outwards; rows are `row_pitch` positions apart, which is
/// the tensor's pitch modulo 16 bytes, so that one `lead` holds for all rows of a channel.
template <typename Config>
struct RunFill {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  static constexpr int tile = Config::channel_tile_m;
  static constexpr int mask = Config::line - 1;

  const Activation<const Storage>& tensor;
  int64_t volume, total;
  int64_t channel_volume;  // from one channel of the tile to the next
  int rows, width, row_pitch, channel_pitch;
  int row_pieces;  // at most
  Divider by_pieces;

  CONVT3D_DEVICE RunFill(const Activation<const Storage>& tensor_, int samples, int rows_,
                         int width_, int row_pitch_, int channel_pitch_)
      : tensor(tensor_), rows(rows_), width(width_), row_pitch(row_pitch_),
        channel_pitch(channel_pitch_), row_pieces((width_ + 2 * mask) / Config::line),
        by_pieces(row_pieces) {
    volume = tensor.volume();
    channel_volume = volume * Config::channel_step;
    total = int64_t(samples) * Config::groups * Config::target_channels * volume;
  }

  /// The element at (o0, o1, o2) of a tile's first channel, which may lie outside.
  CONVT3D_DEVICE int64_t element(int sample, int group, int channel, int o0, int o1, int o2) const {
    const int64_t first =
        (int64_t(sample) * Config::groups + group) * Config::target_channels + channel;
    return first * volume + int64_t(o0) * tensor.stride0 + int64_t(o1) * tensor.stride1 + o2;
  }

  /// Starts the copies of this thread and gives their bytes.
  CONVT3D_DEVICE uint32_t copy(int64_t element, int live_channels, int o0, int o1, int o2,
                               uint32_t plane, uint32_t barrier) const {
    uint32_t bytes = 0;
    if (unsigned(o0) >= unsigned(tensor.extent[0])) return bytes;
    const int first = max(-o2, 0), last = min(tensor.extent[2] - o2, width);
    if (first >= last) return bytes;
    for (int item = first_item(); item < tile * rows; item += Config::producers) {
      const int channel = item % tile;
      const int row = item / tile;
      if (channel >= live_channels || !inside1(o1 + row * Config::step1)) continue;
      const int64_t channel_element = element + channel * channel_volume;
      const int64_t from = channel_element + int64_t(row) * Config::step1 * tensor.stride1 + first;
      const int to = (int(channel_element) & mask) + row * row_pitch + first;
      bytes += move(from, last - first, plane + (Config::slot(channel) * channel_pitch + to) * Config::bytes,
                    barrier);
    }
    return bytes;
  }

  /// The same by cp.async: lanes take pieces of the rows, whose first and last hold neighbours too,
  /// and warps take channels. Without branches: latencies of copies and addresses overlap.
  CONVT3D_DEVICE void copy_pieces(int64_t element, int live_channels, int o0, int o1, int o2,
                                  uint32_t plane) const {
    if (unsigned(o0) >= unsigned(tensor.extent[0])) return;
    const int first = max(-o2, 0), count = min(tensor.extent[2] - o2, width) - first;
    if (count <= 0) return;
    constexpr int each = tile / (Config::producers / 32) + (tile % (Config::producers / 32) != 0);
    const int warp = threadIdx.x / 32, channels = min(tile, live_channels);
    const int items = rows * row_pieces;
    // Of each channel of this warp: where it begins in shared memory and, rounded down alike, in the
    // tensor, and how many positions from there the tensor ends.
    uint32_t to[each];
    int lead[each], end[each];
    const Storage* from[each];
#pragma unroll
    for (int c = 0; c < each; ++c) {
      const int channel = warp + c * (Config::producers / 32);
      const int64_t begin = element + channel * channel_volume;
      lead[c] = int(begin) & mask;
      from[c] = tensor.data + (begin - lead[c]);
      to[c] = plane + Config::slot(channel) * channel_pitch * Config::bytes;
      const int64_t left = total - (begin - lead[c]);
      end[c] = channel < channels ? int(left < 0x7fffffff ? left : 0x7fffffff) : -0x7fffffff;
    }
    const int row_apart = Config::step1 * tensor.stride1 - row_pitch;  // whole pieces
#pragma unroll 1
    for (int item = threadIdx.x % 32; item < items; item += 32) {
      const int row = by_pieces.quotient(item);
      const int at = (item - row * row_pieces) * Config::line;
      const int begin = row * row_pitch + first;
      const bool inside = inside1(o1 + row * Config::step1);
#pragma unroll
      for (int c = 0; c < each; ++c) {
        const int start = begin + lead[c];
        const int there = (start & ~mask) + at;
        const int here = there + row * row_apart;
        const bool reads = inside && there < start + count && here + Config::line <= end[c];
        if (reads) async_copy<16>(to[c] + there * Config::bytes, from[c] + here, true);
      }
    }
    // The tensor may end within the last piece of its last row.
    const int last_row = tensor.extent[1] - 1 - o1;
    if (threadIdx.x == 0 && o0 == tensor.extent[0] - 1 && last_row % Config::step1 == 0 &&
        last_row / Config::step1 < rows) {
      const int row = last_row / Config::step1, channel = channels - 1;
      const int64_t begin = element + channel * channel_volume;
      const int64_t start = begin + int64_t(last_row) * tensor.stride1 + first;
      const int64_t tail = (start + count) & ~int64_t(mask);
      const int place = Config::slot(channel) * channel_pitch + (int(begin) & mask) + row * row_pitch + first;
      if (tail + Config::line > total && tail < start + count)
        finish_row(tail, plane + (place + int(tail - start)) * Config::bytes);
    }
  }

  /// Fewer than 16 bytes, by one thread.
  struct Few {
    Storage value[mask];
    int count = 0;
    Few() = default;
    CONVT3D_DEVICE Few(const Storage* from, int count_) : count(count_) {
#pragma unroll
      for (int i = 0; i < mask; ++i) value[i] = i < count ? __ldg(from + i) : Storage(0);
    }
    /// Halves of words whose others stay.
    CONVT3D_DEVICE void store(uint32_t to) const {
#pragma unroll
      for (int i = 0; i < mask; ++i) {
        if (i >= count) continue;
        if constexpr (Config::half)
          store_shared_half(to + 2 * i, value[i]);
        else
          store_shared(to + 4 * i, Type::word(value[i], value[i]));
      }
    }
  };
  /// Whole rows of a channel, with what lies between them, as one copy: worked out before there is
  /// room for them, since a step waits for the producers from there on.
  struct Joined {
    int64_t from;  // elements of the tensor
    int positions = 0, head, bulk;
    uint32_t begin;  // elements of a plane
    bool exact;      // next to zeros: what does not fill 16 bytes goes by itself
    Few first, last;
  };
  CONVT3D_DEVICE Joined joined(int64_t element, int channel, int o0, int o1) const {
    Joined run;
    int first, last;
    inside_rows(o0, o1, first, last);
    if (first >= last) return run;
    run.begin = first * row_pitch;
    run.positions = (last - 1 - first) * row_pitch + tensor.extent[2];
    run.from = element + channel * channel_volume + CONVT3D_PADDING2 + run.begin;
    run.exact = first > 0 || last < rows;
    if (run.exact) {
      run.head = min(int(-run.from) & mask, run.positions);
      run.bulk = (run.positions - run.head) & ~mask;
      run.first = Few(tensor.data + run.from, run.head);
      run.last = Few(tensor.data + run.from + run.head + run.bulk,
                     run.positions - run.head - run.bulk);
    }
    return run;
  }
  /// Starts that copy; gives its bytes. `to`: where the channel's first row begins.
  CONVT3D_DEVICE uint32_t copy(const Joined& run, uint32_t to, uint32_t barrier) const {
    if (run.positions == 0) return 0;
    to += run.begin * Config::bytes;
    if (!run.exact) return move(run.from, run.positions, to, barrier);
    if (run.bulk > 0)
      bulk_copy(to + run.head * Config::bytes, tensor.data + run.from + run.head,
                run.bulk * Config::bytes, barrier);
    run.first.store(to);
    run.last.store(to + (run.head + run.bulk) * Config::bytes);
    return run.bulk * Config::bytes;
  }
  /// Where a channel's first row begins.
  CONVT3D_DEVICE uint32_t first_row(int64_t element, int channel, uint32_t plane) const {
    const int lead = int(element + channel * channel_volume) & mask;
    return plane + (Config::slot(channel) * channel_pitch + lead + CONVT3D_PADDING2) * Config::bytes;
  }
  /// Whether a plane has rows outside of the tensor.
  CONVT3D_DEVICE bool reaches_out(int o0, int o1) const {
    int first, last;
    inside_rows(o0, o1, first, last);
    return first > 0 || last < rows;
  }
  /// Zeros them, by all producers, before the copies, which bring nothing there.
  CONVT3D_DEVICE void clear_rows(int64_t element, int live_channels, int o0, int o1,
                                 uint32_t plane) const {
    int first, last;
    inside_rows(o0, o1, first, last);
    const int end = (rows - 1) * row_pitch + tensor.extent[2];
    clear_range(element, live_channels, plane, 0, first * row_pitch);
    if (last < rows)
      clear_range(element, live_channels, plane,
                  last > 0 ? (last - 1) * row_pitch + tensor.extent[2] : 0, end);
  }
  /// Zeros what lies outside of the tensor, once the copies have landed. Flat boxes lie likewise.
  CONVT3D_DEVICE void clear_outside(int64_t element, int live_channels, int o0, int o1, int o2,
                                    uint32_t plane) const {
    const bool outside0 = unsigned(o0) >= unsigned(tensor.extent[0]);
    const int first = max(-o2, 0), last = max(min(tensor.extent[2] - o2, width), first);
    if (!outside0 && first == 0 && last == width && inside1(o1) &&
        inside1(o1 + (rows - 1) * Config::step1))
      return;
    for (int item = first_item(); item < tile * rows; item += Config::producers) {
      const int channel = item % tile;
      const int row = item / tile;
      if (channel >= live_channels) continue;
      const int lead = int(element + channel * channel_volume) & mask;
      const uint32_t at =
          plane + (Config::slot(channel) * channel_pitch + lead + row * row_pitch) * Config::bytes;
      if (outside0 || !inside1(o1 + row * Config::step1)) {
        clear(at, 0, width);
      } else {
        clear(at, 0, first);
        clear(at, last, width);
      }
    }
  }

  /// Neighbouring items go to different warps, whose lanes issue bulk copies one after another.
  CONVT3D_DEVICE static int first_item() {
    constexpr int warps = Config::producers / 32;
    constexpr int lanes = Config::producers / warps;
    return threadIdx.x % lanes * warps + threadIdx.x / lanes;
  }

 private:
  /// The rows of a plane that exist.
  CONVT3D_DEVICE void inside_rows(int o0, int o1, int& first, int& last) const {
    first = o1 < 0 ? div_up(-o1, Config::step1) : 0;
    last = o1 < tensor.extent[1] ? min(div_up(tensor.extent[1] - o1, Config::step1), rows) : 0;
    if (unsigned(o0) >= unsigned(tensor.extent[0]) || first >= last) first = last = 0;
  }
  /// Zeros positions [begin, end) from the first row on of every channel, 16 bytes at a time.
  CONVT3D_DEVICE void clear_range(int64_t element, int live_channels, uint32_t plane, int begin,
                                  int end) const {
    if (begin >= end) return;
    const int channels = min(tile, live_channels);
    const int pieces = max((end - begin) / Config::line, 1);
    const Divider by(pieces);
    for (int item = threadIdx.x; item < channels * pieces; item += Config::producers) {
      const int channel = by.quotient(item);
      const uint32_t at = first_row(element, channel, plane);
      const uint32_t to =
          (at + begin * Config::bytes + 15) / 16 * 16 + (item - channel * pieces) * 16;
      if (to + 16 <= at + end * Config::bytes) store_shared(to, 0u, 0u, 0u, 0u);
    }
    for (int item = threadIdx.x; item < 2 * channels; item += Config::producers) {
      const uint32_t at = first_row(element, item / 2, plane);
      const uint32_t until = at + end * Config::bytes;
      const uint32_t up = (at + begin * Config::bytes + 15) / 16 * 16, down = until / 16 * 16;
      if (item % 2 == 0)
        clear(at, begin, up < until ? int(up - at) / Config::bytes : end);
      else if (down >= up)
        clear(at, int(down - at) / Config::bytes, end);
    }
  }
  /// One bulk copy, both ends rounded outwards; gives its bytes.
  CONVT3D_DEVICE uint32_t move(int64_t from, int positions, uint32_t to, uint32_t barrier) const {
    const int before = int(from) & mask;
    from -= before, to -= before * Config::bytes;
    int count = (positions + before + mask) & ~mask;
    if (from + count > total) {
      // The tensor ends within these 16 bytes.
      count -= Config::line;
      finish_row(from + count, to + count * Config::bytes);
    }
    if (count > 0) bulk_copy(to, tensor.data + from, count * Config::bytes, barrier);
    return count * Config::bytes;
  }
  CONVT3D_DEVICE bool inside1(int o1) const { return unsigned(o1) < unsigned(tensor.extent[1]); }

  /// The tensor's last elements, fewer than 16 bytes.
  CONVT3D_DEVICE void finish_row(int64_t from, uint32_t to) const {
    constexpr int step = Config::half ? 2 : 1;
    for (int64_t e = from; e < total; e += step) {
      const Storage low = __ldg(tensor.data + e);
      const Storage high = Config::half && e + 1 < total ? __ldg(tensor.data + e + 1) : Storage(0);
      store_shared(to, Type::word(low, high));
      to += 4;
    }
  }

  /// Zeros positions [first, last) from an address on; 16-bit neighbours in a word stay.
  CONVT3D_DEVICE void clear(uint32_t at, int first, int last) const {
    if constexpr (!Config::half) {
      for (int x = first; x < last; ++x) store_shared(at + 4 * x, 0u);
    } else {
      uint32_t begin = at + 2 * first;
      const uint32_t end = at + 2 * last;
      if (begin >= end) return;
      if (begin % 4) {
        store_shared(begin - 2, load_shared(begin - 2) & 0xffffu);
        begin += 2;
      }
      for (; begin + 4 <= end; begin += 4) store_shared(begin, 0u);
      if (begin < end) store_shared(begin, load_shared(begin) & 0xffff0000u);
    }
  }
};

/// Where a march stands: which column and slices, which stage, and the step's first plane.
template <typename Layout>
struct WgmmaMarch {
  const Layout& l;
  int step, i;
  int slot = 0, stage = 0, phase = 0;
  int sample, i0, i1, i2, o0, o1, o2;

  CONVT3D_DEVICE explicit WgmmaMarch(const Layout& l_) : l(l_), step(l_.begin) {
    int column = step / l.a.steps0;
    i = step - column * l.a.steps0;
    if (l.dealt) column = l.tile.split;
    if constexpr (separate) {
      const int tiles = l.a.tiles1 * l.a.tiles2, slice = l.tile.split / tiles;
      i = slice % l.a.steps0;
      column = slice / l.a.steps0 * tiles + l.tile.split % tiles;
    }
    const int row = column / l.a.tiles2;
    i2 = (column - row * l.a.tiles2) * l.a.tile2;
    sample = row / l.a.tiles1;
    i1 = (row - sample * l.a.tiles1) * l.a.tile1 + l.a.first1;
    locate();
  }
  /// Whether a step loads all planes that it reads.
  CONVT3D_DEVICE bool first() const { return separate || step == l.begin || i == 0; }
  CONVT3D_DEVICE uint32_t plane(int q) const {
    const int at = slot + q;
    return l.g_ring + (at >= l.a.planes ? at - l.a.planes : at) * l.plane;
  }
  // Without branches: ptxas would serialise products around them.
  CONVT3D_DEVICE void advance() {
    ++step, ++stage;
    const bool around = stage == Layout::Config::stages;
    stage = around ? 0 : stage;
    phase ^= around;
    // The next step's first plane; a new column begins after this one's last plane.
    const bool column = separate || i + 1 == l.a.steps0;
    slot += column ? l.span : l.fresh;
    slot -= slot >= l.a.planes ? l.a.planes : 0;
    if constexpr (!separate) i = column ? 0 : i + 1;
    i2 += column ? l.next2 * l.a.tile2 : 0;
    const bool row = i2 >= l.a.tiles2 * l.a.tile2;
    i2 -= row ? l.a.tiles2 * l.a.tile2 : 0;
    i1 += (column ? l.next1 * l.a.tile1 : 0) + (row ? l.a.tile1 : 0);
    const bool volume = i1 >= l.a.tiles1 * l.a.tile1 + l.a.first1;
    i1 -= volume ? l.a.tiles1 * l.a.tile1 : 0;
    bool next = volume;
    if constexpr (separate) {
      i += l.next0 + volume;
      next = i >= l.a.steps0;
      i -= next ? l.a.steps0 : 0;
    }
    sample += (column ? l.next_sample : 0) + next;
    locate();
  }

 private:
  static constexpr bool separate = Layout::Config::separate_steps;
  CONVT3D_DEVICE void locate() {
    i0 = i * l.a.tile0;
    o0 = i0 * CONVT3D_STRIDE0 - CONVT3D_PADDING0 + l.k0_first * CONVT3D_DILATION0;
    o1 = i1 * CONVT3D_STRIDE1 - CONVT3D_PADDING1;
    o2 = i2 * CONVT3D_STRIDE2 - CONVT3D_PADDING2;
  }
};

/// The gradient where a step is a whole sample: a thread's pieces of 16 bytes lie at the same places
/// of every sample, and are worked out once. What lies outside the tensor stays zero.
template <typename Layout>
struct VolumeFill {
  using Config = typename Layout::Config;
  using Storage = typename Config::Storage;
  static constexpr int most = Config::spread ? 4 : 8;  // pieces of a thread

  int from[most];  // elements; negative: none
  uint32_t to[most];

  CONVT3D_DEVICE VolumeFill(const Layout& l, const WgmmaMarch<Layout>& at) {
    const auto& gradient = l.a.gradient;
    const Inside planes(at.o0, Config::step0, gradient.extent[0], l.span);
    const Inside rows(at.o1, Config::step1, gradient.extent[1], l.rows_g);
    const int first2 = Config::spread ? 0 : at.o2 & -Config::line;
    const int pieces =
        Config::spread ? 1 : min(gradient.extent[2], l.a.row_pitch + first2) / Config::line;  // of a row
    const int items = Config::channel_tile_m * planes.count * rows.count * pieces;
    const int live = l.tile.target_live();
#pragma unroll
    for (int k = 0; k < most; ++k) {
      const int item = threadIdx.x + k * Config::producers;
      int rest = item / max(pieces, 1);
      const int x = (item - rest * pieces) * Config::line;
      const int row = rows.first + rest % max(rows.count, 1);
      rest /= max(rows.count, 1);
      const int plane = planes.first + rest % max(planes.count, 1);
      const int channel = rest / max(planes.count, 1);
      from[k] = -1, to[k] = 0;
      if (item >= items || channel >= live) continue;
      from[k] = channel * int(gradient.volume()) +
                (at.o0 + plane * Config::step0) * gradient.stride0 +
                (at.o1 + row * Config::step1) * gradient.stride1 + x;
      to[k] = plane * l.plane + (channel * l.a.channel_pitch + row * l.a.row_pitch + x - first2) *
                                    Config::bytes;
    }
  }
  /// Starts the copies of this thread, from a sample's first channel.
  CONVT3D_DEVICE void copy(const Storage* base, uint32_t planes) const {
#pragma unroll
    for (int k = 0; k < most; ++k)
      if (from[k] >= 0) async_copy<16>(planes + to[k], base + from[k], true);
  }
  /// Rows of 16 bytes on their way, which spread() then stores.
  CONVT3D_DEVICE void fetch(const Storage* base, uint4 (&row)[most]) const {
#pragma unroll
    for (int k = 0; k < most; ++k)
      if (from[k] >= 0) row[k] = __ldg(reinterpret_cast<const uint4*>(base + from[k]));
  }
  /// Stores for each tap along W what the positions of x meet: [tap][position], zeros beyond the row.
  CONVT3D_DEVICE void spread(const uint4 (&row)[most], uint32_t planes) const {
    constexpr int words = Config::taps2 * Config::line / 4;
#pragma unroll
    for (int k = 0; k < most; ++k) {
      if (from[k] < 0) continue;
      const uint32_t word[4] = {row[k].x, row[k].y, row[k].z, row[k].w};
      uint32_t out[words];
#pragma unroll
      for (int i = 0; i < words; ++i) {
        const int tap = i / (Config::line / 4), pair = i % (Config::line / 4);
        const int first = 2 * pair * CONVT3D_STRIDE2 + tap * CONVT3D_DILATION2 - CONVT3D_PADDING2;
        const int second = first + CONVT3D_STRIDE2;
        out[i] = permute_bytes(half(word, first), half(word, second),
                               (first % 2 != 0 ? 0x32 : 0x10) | (second % 2 != 0 ? 0x7600 : 0x5400));
      }
      if constexpr (words == 8) {
        // Rows of 32 bytes: four neighbours store first halves while four store second ones, so that
        // they find different banks.
        const bool swapped = threadIdx.x / 4 % 2 != 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint32_t piece[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) piece[i] = swapped ? out[4 - 4 * h + i] : out[4 * h + i];
          store_shared(planes + to[k] + (swapped ? 16 - 16 * h : 16 * h), piece[0], piece[1], piece[2],
                       piece[3]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < words; i += 2) store_shared(planes + to[k] + 4 * i, out[i], out[i + 1]);
      }
    }
  }
  /// Zeros all planes, by all threads.
  CONVT3D_DEVICE static void clear(const Layout& l) {
    for (uint32_t at = threadIdx.x * 16; at < l.a.planes * l.plane; at += Config::threads * 16)
      store_shared(l.g_ring + at, 0u, 0u, 0u, 0u);
  }

 private:
  /// The word that has a position of a row, or zeros.
  CONVT3D_DEVICE static uint32_t half(const uint32_t (&word)[4], int position) {
    return position >= 0 && position < Config::line ? word[position / 2] : 0;
  }
  /// Which of `most` positions, `step` apart, lie in [0, extent).
  struct Inside {
    int first, count;
    CONVT3D_DEVICE Inside(int position, int step, int extent, int most) {
      first = position < 0 ? div_up(-position, step) : 0;
      count = min(div_up(extent - position, step), most) - first;
      count = max(count, 0);
    }
  };
};

}  // namespace convt3d
