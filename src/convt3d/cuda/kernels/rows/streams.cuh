// Where rows of the target are of odd widths: what a warpgroup completes leaves as streams, one
// of each channel and slot along D.
//
// A sweep along H writes a channel's slice from front to back. A step's rows are laid out in
// shared memory as far from a line of 128 bytes as their destination is, behind what the step
// before left of its last line, and whole lines leave by bulk copies; the rest goes along into
// the other buffer.
//
//     memory       ...|.......line|.......line|.......line|....
//     step n            [ rows of step n            ]
//     leaves          [           ][           ]
//     step n + 1                                [::][ rows of step n + 1 ...
//
// Only the first and last lines of a run are written in part.
#pragma once
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "rows/config.cuh"

namespace convt3d {

/// Streams of a warpgroup. Two buffers of each, `pitch` bytes apart.
template <typename Config>
struct RowStreams {
  using Storage = typename Config::Storage;
  static constexpr int size = int(sizeof(Storage));
  static constexpr int line = 128;
  static constexpr int channels = Config::column_tile;
  static constexpr int count = Config::Axis0::slots * channels;
  static constexpr int threads = 128;
  static constexpr int pieces = line / 16;

  uint32_t buffers;  // of this warpgroup
  int pitch;
  int barrier, thread;
  int steps = 0;

  CONVT3D_DEVICE RowStreams(uint32_t buffers_, int pitch_, int barrier_, int thread_)
      : buffers(buffers_), pitch(pitch_), barrier(barrier_), thread(thread_) {}
  /// Bytes from the line that an address lies in.
  CONVT3D_DEVICE static uint32_t phase(const Storage* to) {
    return uint32_t(reinterpret_cast<uint64_t>(to)) % line;
  }
  CONVT3D_DEVICE uint32_t buffer(int stream, int step) const {
    return buffers + uint32_t((step % 2 * count + stream) * pitch);
  }
  /// Sends what all threads of the warpgroup laid out: `length` bytes of each stream for
  /// to(stream), at least a line; null: the stream does not exist. `first`, `last`: of a run of
  /// rows that follow each other.
  template <typename To>
  CONVT3D_DEVICE void send(int length, bool first, bool last, const To& to) {
    fence_async_proxy();
    __syncwarp();
    named_barrier_sync(barrier, threads);
#pragma unroll 1
    for (int stream = thread / pieces; stream < count; stream += threads / pieces) {
      Storage* const begin = to(stream);
      const uint32_t from = phase(begin), end = begin != nullptr ? from + length : 0;
      // Bytes from the first line on: what leaves at once.
      const uint32_t low = first ? uint32_t(round_up(int(from), 16)) : 0;
      const uint32_t high = last ? end / 16 * 16 : end / line * line;
      const uint32_t laid_out = buffer(stream, steps);
      char* const lines = reinterpret_cast<char*>(begin) - from;
      const int piece = thread % pieces;
      if (piece == 0 && high > low) bulk_store_streaming(lines + low, laid_out + low, high - low);
      bulk_commit();
      // Less than 16 bytes at the ends of a run.
      const uint32_t edge = size * piece;
      if (first && from + edge < min(low, end)) copy(lines, laid_out, from + edge);
      if (last && max(high, low) + edge < end) copy(lines, laid_out, max(high, low) + edge);
    }
    // Bulk copies from the other buffers have read them.
    bulk_wait_read<div_up(count * pieces, threads)>();
    __syncwarp();
    named_barrier_sync(barrier, threads);
    if (!last) {
#pragma unroll 1
      for (int stream = thread / pieces; stream < count; stream += threads / pieces) {
        Storage* const begin = to(stream);
        if (begin == nullptr) continue;
        const uint32_t end = phase(begin) + length, high = end / line * line;
        const uint32_t at = 16 * (thread % pieces);
#pragma unroll
        for (uint32_t i = 0; i < 16; i += size)
          if (high + at + i < end)
            store_shared(buffer(stream, steps + 1) + at + i,
                         load(buffer(stream, steps) + high + at + i));
      }
    }
    ++steps;
  }
  /// All that was sent has left shared memory.
  CONVT3D_DEVICE void finish() const { bulk_wait<0>(); }

 private:
  CONVT3D_DEVICE static Storage load(uint32_t address) {
    return Storage(load_shared_half(address));
  }
  CONVT3D_DEVICE static void copy(char* lines, uint32_t laid_out, uint32_t at) {
    *reinterpret_cast<Storage*>(lines + at) = load(laid_out + at);
  }
};

}  // namespace convt3d
