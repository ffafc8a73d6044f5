// Copies a contiguous tensor to channels_last, for kernels whose operands are channels_last:
// [sample][channel][position] becomes [sample][position][channel].
//
// A CTA copies a tile of a sample: the channels of 128 bytes of the copy, and 32 words along the
// positions. It reads lines of positions and writes lines of channels:
//
//     source, a channel a line               shared memory            copy, a position a line
//     .-- 128 bytes of positions --.                              .-- 128 bytes of channels --.
//     | p0 p1 p2 ...               | ---> [channel][32 words] --->  | c0 c1 c2 ...              |
//     '----------------------------'                              '---------------------------'
//
// The channels of 16 bytes of the copy are a group, whose lines begin four words further on than
// those of the group before, modulo 32. A lane reads a word of each channel of a group; eight lanes
// have the groups of a line of the copy, and the 32 of a warp read from 32 banks.
//
// Channels of few positions, as of weights, whose lines are no whole vectors, lie in one run: it is
// read, and kept in shared memory, as it lies. Few channels that are no whole vectors, as the taps
// of a channels_last weight that becomes contiguous, are written as one.
#include "device/types.cuh"
#include "geometry/axis.cuh"

namespace convt3d {

struct ChannelsLastConfig {
  using Storage = typename CONVT3D_TYPE::Storage;
  static constexpr int element_bytes = int(sizeof(Storage));
  static constexpr int vector = 16 / element_bytes;
  static constexpr int channels = 8 * vector;  // of a tile
  static constexpr int words = 32;             // of a channel of a tile
  static constexpr int word_positions = 4 / element_bytes;
  static constexpr int positions = words * word_positions;
  static constexpr int threads = 8 * words;
};

/// Where a word of a channel is in the tile.
CONVT3D_DEVICE int tile_word(int channel, int word) {
  using Config = ChannelsLastConfig;
  return channel * Config::words + (word + 4 * (channel / Config::vector)) % Config::words;
}

struct ChannelsLastTile {
  using Config = ChannelsLastConfig;
  using Storage = Config::Storage;
  const Storage* from;  // the sample's
  Storage* to;
  int channels, positions;              // of the tensor
  int first_channel, first_position;    // of the tile
  uint32_t tile;

  /// Reads the tile, `Count` neighbouring positions at a time: all loads of a thread are on their
  /// way before the first one is stored.
  template <int Count, typename Vector>
  CONVT3D_DEVICE void read() const {
    constexpr int vectors = Config::positions / Count;  // of a channel
    constexpr int loads = Config::channels * vectors / Config::threads;
    Vector value[loads];
#pragma unroll
    for (int i = 0; i < loads; ++i) {
      const int index = i * Config::threads + threadIdx.x;
      const int channel = first_channel + index / vectors;
      const int position = first_position + index % vectors * Count;
      if (channel < channels && position < positions)
        value[i] = __ldg(reinterpret_cast<const Vector*>(from + int64_t(channel) * positions +
                                                         position));
    }
#pragma unroll
    for (int i = 0; i < loads; ++i) {
      const int index = i * Config::threads + threadIdx.x;
      const int position = index % vectors * Count;
      const uint32_t at =
          tile + 4 * tile_word(index / vectors, position / Config::word_positions) +
          position % Config::word_positions * Config::element_bytes;
      if constexpr (Count == 1)
        store_shared(at, value[i]);
      else
        store_shared(at, value[i].x, value[i].y, value[i].z, value[i].w);
    }
  }
  /// Whether the tile has all positions, of lines that are no whole vectors.
  CONVT3D_DEVICE bool is_run() const {
    return positions <= Config::positions && positions % Config::vector != 0;
  }
  /// Reads the run of all channels of the tile.
  CONVT3D_DEVICE void read_as_run() const {
    const int count = min(Config::channels, channels - first_channel) * positions / Config::vector;
    const uint4* run = reinterpret_cast<const uint4*>(from + int64_t(first_channel) * positions);
    constexpr int loads = Config::channels * Config::positions / Config::vector / Config::threads;
    uint4 value[loads];
#pragma unroll
    for (int i = 0; i < loads; ++i) {
      const int index = i * Config::threads + threadIdx.x;
      if (index < count) value[i] = __ldg(run + index);
    }
#pragma unroll
    for (int i = 0; i < loads; ++i) {
      const uint32_t at = tile + 16 * (i * Config::threads + threadIdx.x);
      store_shared(at, value[i].x, value[i].y, value[i].z, value[i].w);
    }
  }
  /// What was read as a run: a thread writes 16 bytes of channels of a position at a time.
  CONVT3D_DEVICE void write_from_run() const {
    const int channel = threadIdx.x % 8 * Config::vector;
    if (first_channel + channel >= channels) return;
    for (int position = threadIdx.x / 8; position < positions; position += Config::threads / 8) {
      const uint32_t at = tile + (channel * positions + position) * Config::element_bytes;
      uint32_t v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if constexpr (Config::element_bytes == 4)
          v[i] = load_shared(at + 4 * i * positions);
        else
          v[i] = load_shared_half(at + 4 * i * positions) |
                 load_shared_half(at + (4 * i + 2) * positions) << 16;
      *reinterpret_cast<uint4*>(to + int64_t(position) * channels + first_channel + channel) =
          make_uint4(v[0], v[1], v[2], v[3]);
    }
  }
  /// Writes the run of all positions of the tile, which has all channels.
  CONVT3D_DEVICE void write_as_run() const {
    const int count =
        min(Config::positions, positions - first_position) * channels / Config::vector;
    uint4* run = reinterpret_cast<uint4*>(to + int64_t(first_position) * channels);
    for (int index = threadIdx.x; index < count; index += Config::threads) {
      int position = index * Config::vector / channels;
      int channel = index * Config::vector - position * channels;
      uint32_t v[4] = {};
#pragma unroll
      for (int i = 0; i < Config::vector; ++i) {
        const uint32_t at = tile + 4 * tile_word(channel, position / Config::word_positions) +
                            position % Config::word_positions * Config::element_bytes;
        if constexpr (Config::element_bytes == 4)
          v[i] = load_shared(at);
        else
          v[i / 2] |= load_shared_half(at) << i % 2 * 16;
        if (++channel == channels) {
          channel = 0;
          ++position;
        }
      }
      run[index] = make_uint4(v[0], v[1], v[2], v[3]);
    }
  }
  /// A thread writes 16 bytes of channels, of the positions of a word.
  CONVT3D_DEVICE void write() const {
    const int channel = threadIdx.x % 8 * Config::vector, word = threadIdx.x / 8;
    const int position = first_position + word * Config::word_positions;
    if (first_channel + channel >= channels) return;
    uint32_t read[Config::vector];
#pragma unroll
    for (int i = 0; i < Config::vector; ++i)
      read[i] = load_shared(tile + 4 * tile_word(channel + i, word));
    Storage* at = to + int64_t(position) * channels + first_channel + channel;
    if constexpr (Config::word_positions == 1) {
      if (position < positions)
        *reinterpret_cast<uint4*>(at) = make_uint4(read[0], read[1], read[2], read[3]);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t halves = half ? 0x7632 : 0x5410;
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = permute_bytes(read[2 * i], read[2 * i + 1], halves);
        if (position + half < positions)
          *reinterpret_cast<uint4*>(at + int64_t(half) * channels) =
              make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }
};

}  // namespace convt3d

/// `channels` is a multiple of 16 bytes; or it is at most a tile's, and `positions` is one. `to` is
/// aligned to them.
extern "C" __global__ void __launch_bounds__(convt3d::ChannelsLastConfig::threads)
    convt3d_layout_channels_last(const convt3d::ChannelsLastConfig::Storage* from,
                                 convt3d::ChannelsLastConfig::Storage* to, int channels,
                                 int positions) {
  using namespace convt3d;
  using Config = ChannelsLastConfig;
  __shared__ __align__(16) uint32_t tile[Config::channels * Config::words];
  grid_dependency_launch();
  const int across = div_up(positions, Config::positions);
  const int along = div_up(channels, Config::channels);
  const int64_t sample = int64_t(blockIdx.x / across / along) * channels * positions;
  const ChannelsLastTile copy{from + sample,
                              to + sample,
                              channels,
                              positions,
                              int(blockIdx.x / across % along) * Config::channels,
                              int(blockIdx.x % across) * Config::positions,
                              shared_address(tile)};
  const bool aligned = reinterpret_cast<uint64_t>(from) % 16 == 0;
  const bool run = aligned && copy.is_run();
  if (run)
    copy.read_as_run();
  else if (aligned && positions % Config::vector == 0)
    copy.read<Config::vector, uint4>();
  else
    copy.read<1, Config::Storage>();
  __syncthreads();
  if (run)
    copy.write_from_run();
  else if (channels % Config::vector != 0)
    copy.write_as_run();
  else
    copy.write();
  grid_dependency_wait();  // so that whoever waits for this kernel has waited for that before, too
}
