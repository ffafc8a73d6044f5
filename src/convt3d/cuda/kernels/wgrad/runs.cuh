// Whole rows of the gradient, copied to shared memory as they lie: by bulk copies, or by cp.async
// in pieces of 16 bytes. TMA cannot bring them where rows are no multiple of 16 bytes.
#pragma once
#include "device/tma.cuh"
#include "wgrad/config.cuh"

namespace convt3d {

/// Rows of the gradient by bulk copies, or by cp.async in pieces of 16 bytes. A row begins where
/// its address modulo 16 bytes is that of the tensor, so that both ends can be rounded outwards;
/// rows are `row_pitch` positions apart, which is the tensor's pitch modulo 16 bytes, so that one
/// `lead` holds for all rows of a channel.
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

  /// The same by cp.async: lanes take pieces of the rows, whose first and last hold neighbours
  /// too, and warps take channels. Without branches: latencies of copies and addresses overlap.
  CONVT3D_DEVICE void copy_pieces(int64_t element, int live_channels, int o0, int o1, int o2,
                                  uint32_t plane) const {
    if (unsigned(o0) >= unsigned(tensor.extent[0])) return;
    const int first = max(-o2, 0), count = min(tensor.extent[2] - o2, width) - first;
    if (count <= 0) return;
    constexpr int each = tile / (Config::producers / 32) + (tile % (Config::producers / 32) != 0);
    const int warp = threadIdx.x / 32, channels = min(tile, live_channels);
    const int items = rows * row_pieces;
    // Of each channel of this warp: where it begins in shared memory and, rounded down alike, in
    // the tensor, and how many positions from there the tensor ends.
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
  /// Whole rows of a channel, with what lies between them, as one copy: worked out before there
  /// is room for them, since a step waits for the producers from there on.
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
    run.from = element + channel * channel_volume + Layer::padding2 + run.begin;
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
    return plane + (Config::slot(channel) * channel_pitch + lead + Layer::padding2) * Config::bytes;
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

}  // namespace convt3d
