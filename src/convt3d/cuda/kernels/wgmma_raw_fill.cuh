// Source boxes of the warp-specialised gather by TMA and transposition, for contiguous sources that
// no residue splits (axes 1 and 2 step by one).
//
//   tensor --TMA--> raw ring [line][channel][pitch] --LDS, STS--> box [quad][position][four words]
//
// A raw stage holds all lines that a box touches, of one chunk of channels and one plane, from an
// aligned column on. Where rows of the tensor are odd, but planes are not, and no tap leaves a plane,
// lines are cut from whole planes instead (`raw_flat`). TMA fills in the zeros around the tensor and, where it can, rounds to TF32; the
// latency of memory is hidden by the ring, so that filling warps wait for shared memory only.
#pragma once
#include "wgmma_fill.cuh"

namespace convt3d {

/// Where lines lie in a raw stage, and which ones a tile has: the first one holds its first row.
template <typename Config>
struct RawLines {
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  using Space = RowSpace<Config>;
  using Tile = RowTile<Config>;
  static constexpr int alignment = 16 / int(sizeof(typename Config::Storage));  // of columns
  static_assert(!Config::raw_flat || (Axis1::min_shift == 0 && Axis2::min_shift == 0),
                "flat planes have no border");
  int pitch;  // elements from one channel to the next; flat: from one line to the next, too

  struct Place {
    int sample, line, column;  // in the tensor
  };
  struct Spot {
    int line, column;  // in the raw stage
  };

  CONVT3D_DEVICE int channel_bytes() const {
    return pitch * int(sizeof(typename Config::Storage));
  }
  CONVT3D_DEVICE int line_bytes() const { return Config::chunk_channels * channel_bytes(); }
  /// Columns before the first one of a line whose piece begins at unit first2.
  CONVT3D_DEVICE static int lead(int first2) {
    return (first2 + Axis2::min_shift) & (alignment - 1);
  }
  CONVT3D_DEVICE static int plane(const Space& space) { return space.pitch1 * space.pitch2; }
  CONVT3D_DEVICE static int first_row(const Tile& tile) {
    return tile.line * tile.space.pitch2 + tile.column;
  }

  /// Where the tile's line `line` begins in the tensor.
  CONVT3D_DEVICE Place place(const Tile& tile, int line) const {
    if constexpr (Config::raw_flat) {
      const int in_plane = (plane(tile.space) + pitch - 1) / pitch;
      line += first_row(tile) / pitch;
      const int samples = line / in_plane;
      return {tile.sample + samples, 0, (line - samples * in_plane) * pitch};
    } else {
      const auto at = tile.locate(line * tile.space.pitch2 - tile.column);
      return {at.sample, at.line + Axis1::min_shift,
              at.first2 + Axis2::min_shift - lead(at.first2)};
    }
  }
  /// Where a row of the tile lies; one before its first row belongs to the first line.
  CONVT3D_DEVICE Spot spot(const Tile& tile, int row) const {
    if constexpr (Config::raw_flat) {
      const int x = first_row(tile) + row;
      const int samples = x / plane(tile.space);
      const int rest = x - samples * plane(tile.space);
      const int line = rest / pitch;
      const int in_plane = (plane(tile.space) + pitch - 1) / pitch;
      return {samples * in_plane + line - first_row(tile) / pitch, rest - line * pitch};
    } else {
      const int x = tile.column + row;
      const int line = x < 0 ? 0 : tile.space.by_pitch2.quotient(x);
      const auto at = tile.locate(line * tile.space.pitch2 - tile.column);
      return {line, x - line * tile.space.pitch2 + lead(at.first2)};
    }
  }
};

/// Positions that a box holds for one tile.
template <typename Config>
CONVT3D_DEVICE int box_elements(const RowSpace<Config>& space) {
  return Config::rows + Config::reach1 * space.pitch2 + Config::reach2;
}

/// One warp: the raw stages of all boxes, a line each lane.
template <typename Config>
CONVT3D_DEVICE void stream_lines(const WgmmaArguments<typename Config::Storage>& arguments,
                                 const RowSpace<Config>& space, uint32_t shared_base,
                                 Ring<Config::raw_stages> ring) {
  using Axis0 = typename Config::Axis0;
  using Lines = RawLines<Config>;
  const Lines layout{arguments.raw_pitch};
  const int lane = threadIdx.x % 32;
  Walk<Config> walk(arguments, space);
  typename Walk<Config>::Leg leg;
  while (walk.next(leg)) {
    const RowTile<Config> tile(space, leg.tile);
    const int lines = layout.spot(tile, box_elements<Config>(space) - 1).line + 1;
    const auto place = layout.place(tile, lane);
    for (int step = leg.begin; step < leg.end; ++step) {
      if (!walk.multiplies(leg, step, arguments.source.extent[0])) continue;
      const int plane0 = step * Axis0::source_step + Axis0::source_origin;
      for (int chunk = 0; chunk < Config::chunks; ++chunk)
        for (int plane = 0; plane < Axis0::source_step; ++plane) {
          ring.wait_empty();
          // The barrier cannot complete before this arrival, whichever lane's bytes come first.
          if (lane == 0) mbarrier_expect(ring.full(), lines * layout.line_bytes());
          if (lane < lines)
            tma_load_5d(shared_base + Config::raw_offset + ring.stage * Config::raw_bytes +
                            lane * layout.line_bytes(),
                        *arguments.source_map, place.column, place.line, plane0 + plane,
                        leg.group * Config::source_channels + chunk * Config::chunk_channels,
                        place.sample, ring.full());
          ring.advance();
        }
    }
  }
}

/// The warps that turn raw stages into boxes. A thread owns one quad of the chunk's words and
/// `fill_items` positions, or pairs of them where a word holds two neighbours of one channel.
template <typename Config>
struct RawFill {
  using Storage = typename Config::Storage;
  using Axis0 = typename Config::Axis0;
  using Lines = RawLines<Config>;
  static constexpr int slots = 32 * Config::box_warps / 2;  // threads that share a quad
  static_assert(Config::box_warps % 2 == 0, "a warp has one quad");
  static constexpr int width = Config::Type::channels_per_word;
  static constexpr int items = Config::fill_items;
  static constexpr int quad_channels = Config::quad_channels;

  const WgmmaArguments<Storage>& arguments;
  const RowSpace<Config>& space;
  const Lines layout;
  uint32_t shared_base;
  int lane, quad, slot;
  bool late;  // stores the second position of a pair first: all banks at once

  CONVT3D_DEVICE RawFill(const WgmmaArguments<Storage>& arguments_,
                         const RowSpace<Config>& space_, uint32_t shared_base_, int thread)
      : arguments(arguments_),
        space(space_),
        layout{arguments_.raw_pitch},
        shared_base(shared_base_),
        lane(thread % 32),
        quad(thread / 32 % 2),
        slot(thread / 64 * 32 + thread % 32),
        late(width == 2 && thread & 4) {}

  /// Positions before the tile's first row where this thread's items begin: pairs are aligned.
  CONVT3D_DEVICE static int lead(const RowTile<Config>& tile) {
    const int first = Config::raw_flat ? Lines::first_row(tile) : tile.column;
    return width == 2 ? (first + Config::Axis2::min_shift) & 1 : 0;
  }
  CONVT3D_DEVICE int element(int item, int lead) const {
    return width * (slot + item * slots) - lead;
  }

  /// Where this thread's items begin in a raw stage; for one column of the march.
  CONVT3D_DEVICE void locate(uint32_t (&from)[items], const RowTile<Config>& tile,
                             int elements) const {
#pragma unroll
    for (int item = 0; item < items; ++item) {
      const int last = elements - 1 - (elements - 1 + lead(tile)) % width;
      const auto spot = layout.spot(tile, min(element(item, lead(tile)), last));
      from[item] = spot.line * layout.line_bytes() + spot.column * int(sizeof(Storage));
    }
  }

  struct Item {
    uint32_t word[quad_channels];
    CONVT3D_DEVICE void load(uint32_t from, int channel_bytes) {
#pragma unroll
      for (int c = 0; c < quad_channels; ++c) word[c] = load_shared(from + c * channel_bytes);
    }
    /// The quad at one position of the item.
    CONVT3D_DEVICE void store(uint32_t to, bool second) const {
      if constexpr (width == 2) {
        const uint32_t halves = second ? 0x7632 : 0x5410;
        store_shared(to, permute_bytes(word[0], word[1], halves),
                     permute_bytes(word[2], word[3], halves),
                     permute_bytes(word[4], word[5], halves),
                     permute_bytes(word[6], word[7], halves));
      } else {
        store_quad<Config, true>(to, word[0], word[1], word[2], word[3]);
      }
    }
  };

  /// One plane of one chunk, from a raw stage to a box.
  CONVT3D_DEVICE void turn(const uint32_t (&from)[items], uint32_t raw, uint32_t box, int lead,
                           int elements) const {
#pragma unroll
    for (int first = 0; first < items; first += Config::fill_batch) {
      Item item[Config::fill_batch];
#pragma unroll
      for (int i = first; i < first + Config::fill_batch && i < items; ++i)
        item[i - first].load(raw + from[i], layout.channel_bytes());
#pragma unroll
      for (int i = first; i < first + Config::fill_batch && i < items; ++i)
#pragma unroll
        for (int j = 0; j < width; ++j) {
          const bool second = width == 2 && late != (j == 1);
          const int position = element(i, lead) + second;
          if (position >= 0 && position < elements)
            item[i - first].store(box + 16 * position, second);
        }
    }
  }

  /// All boxes of this CTA, in order.
  CONVT3D_DEVICE void run(Ring<Config::raw_stages> raw, Ring<Config::source_stages> ring) const {
    Walk<Config> walk(arguments, space);
    typename Walk<Config>::Leg leg;
    const int elements = box_elements<Config>(space);
    while (walk.next(leg)) {
      const RowTile<Config> tile(space, leg.tile);
      uint32_t from[items];
      locate(from, tile, elements);
#pragma unroll 1
      for (int step = leg.begin; step < leg.end; ++step) {
        if (!walk.multiplies(leg, step, arguments.source.extent[0])) continue;
#pragma unroll 1
        for (int chunk = 0; chunk < Config::chunks; ++chunk) {
          ring.wait_empty();
#pragma unroll 1
          for (int plane = 0; plane < Axis0::source_step; ++plane) {
            raw.wait_full();
            turn(from,
                 shared_base + Config::raw_offset + raw.stage * Config::raw_bytes +
                     quad * quad_channels * layout.channel_bytes(),
                 shared_base + Config::source_offset + ring.stage * Config::box_bytes +
                     plane * Config::plane_bytes + quad * Config::quad_bytes,
                 lead(tile), elements);
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(raw.empty(raw.stage));
            raw.advance();
          }
          if (lane == 0) mbarrier_arrive(ring.full());
          ring.advance();
        }
      }
    }
  }
};

}  // namespace convt3d
