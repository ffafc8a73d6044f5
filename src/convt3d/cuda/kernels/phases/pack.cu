// Packs the weights of phases/kernel.cu: the stages of phases/config.cuh, rounded to TF32 where
// they are float32, or split into two TF32 parts. A CTA takes eight columns and a chunk of
// channels, or half of one, at a time: reads run along taps, which are neighbours in the weight,
// and pass through shared memory, writes along columns. Where taps are whole vectors threads
// transpose them in registers instead (pack/vectors.cuh). Runs before every product: weights are
// never stale.
//
// Shared memory: [column][word of the chunk][tap], some taps at a time.
#undef CONVT3D_WGMMA_USES
#define CONVT3D_WGMMA_USES(n) 0
#include "pack/vectors.cuh"
#include "phases/config.cuh"

namespace convt3d {

template <typename Config>
struct PhasesTaps {
  static constexpr int all = Config::walked0 * Config::walked1 * Config::taps;
  int k0, k1, k2;
  /// Where a stage's column 0 of quad 0 lies, in 16 bytes from the chunk's first; from a quad to
  /// the next.
  int place, quad_step;

  /// A tap by its number in the order of walked and unrolled axes.
  CONVT3D_DEVICE explicit PhasesTaps(int number) {
    constexpr int columns = Config::column_tile * Config::quads * Config::parts;
    int rest = number;
    const auto take = [&](int count) {
      const int digit = rest % count;
      rest /= count;
      return digit;
    };
    k2 = take(Config::Axis2::kernel);
    const int inner1 = take(Config::Inner1::kernel);
    const int inner0 = take(Config::Inner0::kernel);
    const int walked1 = take(Config::walked1);
    k0 = Config::phased > 0 ? Config::Axis0::tap_at(rest) : inner0;
    k1 = Config::phased > 1 ? Config::Axis1::tap_at(walked1) : inner1;
    place = number * columns;
    quad_step = Config::column_tile;
    if constexpr (Config::sweep) {
      // All taps of D that meet a slice are columns of one stage.
      using Sweep = typename Config::Sweep;
      const int residue = Sweep::residue_of(k0), count = Sweep::count(residue);
      place = ((Sweep::before(residue) * Config::walked1 + walked1 * count) * Config::Axis2::kernel +
               k2 * count) *
                  columns +
              Sweep::place_of(k0) * Config::column_tile;
      quad_step = count * Config::column_tile;
    }
  }
};

/// The same of taps that are whole vectors.
template <typename Config>
CONVT3D_DEVICE void phases_pack_vectors(const Packer<Config>& packer, uint4* packed) {
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  const auto place = [](int group, int part, int column, int k0, int k1, int k2) {
    int walked = 0, inner = k2;
    if constexpr (Config::phased > 0)
      walked = position_of<Axis0::kernel>(k0, [](int at) { return Axis0::tap_at(at); });
    else
      inner += k0 * Config::Inner1::kernel * Config::Axis2::kernel;
    if constexpr (Config::phased > 1)
      walked = walked * Axis1::kernel +
               position_of<Axis1::kernel>(k1, [](int at) { return Axis1::tap_at(at); });
    else
      inner += k1 * Config::Axis2::kernel;
    const int chunk = part / Config::quads, quad = part % Config::quads;
    const int tile = column / Config::column_tile;
    return int64_t(group * Config::column_tiles + tile) * (Config::n_tile_bytes / 16) +
           int64_t(chunk) * (Config::n_tile_bytes / 16 / Config::chunks) +
           walked * (Config::stage_bytes / 16) +
           (inner * Config::parts * Config::quads + quad) * Config::column_tile +
           column % Config::column_tile;
  };
  PackVectors<Config>::pack(packer, packed, place);
}

template <typename Config>
CONVT3D_DEVICE void phases_pack(const Packer<Config>& packer, uint4* packed) {
  using Taps = PhasesTaps<Config>;
  extern __shared__ __align__(128) unsigned char shared[];
  uint32_t* staged = reinterpret_cast<uint32_t*>(shared);
  constexpr int most = 64;  // taps at a time, as _PACKED_TAPS
  constexpr int few = 512;  // tasks, as _FEW_PACKED
  constexpr int together = Taps::all < most ? Taps::all : most;
  constexpr int pitch = together + 1 - together % 2;
  constexpr int octets = Config::column_tile / 8;
  constexpr int whole = Config::groups * Config::column_tiles * Config::chunks * octets;
  // Where there are few, a task has one quad of the words: fewer loads one after the other.
  constexpr int quads = whole < few ? 1 : Config::quads, words = 4 * quads;
  constexpr int tasks = whole * Config::quads / quads;
  // Of a thread: its tap, and rows (column, word) that share it.
  constexpr int ways = 256 / together;
  const int mine = threadIdx.x % together, way = threadIdx.x / together;
  for (int part = blockIdx.x; part < tasks; part += gridDim.x) {
    const int task = part / (Config::quads / quads);
    const int first_quad = part % (Config::quads / quads);
    const int octet = task % octets;
    const int chunk = task / octets % Config::chunks;
    const int n_tile = task / (octets * Config::chunks);
    const int column_tile = n_tile % Config::column_tiles, group = n_tile / Config::column_tiles;
    const int first_column = column_tile * Config::column_tile + 8 * octet;
    uint4* to = packed + int64_t(n_tile) * (Config::n_tile_bytes / 16) +
                chunk * (Config::n_tile_bytes / 16 / Config::chunks) + 8 * octet;
    for (int first = 0; first < Taps::all; first += together) {
      if (way < ways && first + mine < Taps::all) {
        const Taps tap(first + mine);
        const int channel = chunk * Config::chunk_channels;
#pragma unroll 4
        for (int row = way; row < 8 * words; row += ways) {
          const int word = 4 * first_quad + row % words;
          if constexpr (Config::parts > 1)
            staged[row * pitch + mine] =
                bits_of(packer.at(group, channel + Config::channel_at(word / 4, word % 4, 0),
                                  first_column + row / words, tap.k0, tap.k1, tap.k2));
          else
            staged[row * pitch + mine] =
                packer.word(group, channel + Config::channel_at(word / 4, word % 4, 0),
                            channel + Config::channel_at(word / 4, word % 4, 1),
                            first_column + row / words, tap.k0, tap.k1, tap.k2);
        }
      }
      __syncthreads();
      const int count = 8 * quads * min(together, Taps::all - first);
      for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const int column = i % 8, quad = i / 8 % quads, number = i / (8 * quads);
        const Taps tap(first + number);
        const uint32_t* from = staged + (column * words + 4 * quad) * pitch + number;
        if constexpr (Config::parts > 1) {
          uint4* place = to + tap.place + (first_quad + quad) * tap.quad_step + column;
          uint32_t big[4], small[4];
#pragma unroll
          for (int word = 0; word < 4; ++word)
            Config::Math::split(from[word * pitch], big[word], small[word]);
          place[0] = make_uint4(big[0], big[1], big[2], big[3]);
          place[Config::part_bytes / 16] = make_uint4(small[0], small[1], small[2], small[3]);
        } else {
          to[tap.place + (first_quad + quad) * tap.quad_step + column] =
              make_uint4(from[0], from[pitch], from[2 * pitch], from[3 * pitch]);
        }
      }
      __syncthreads();
    }
  }
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(256)
    convt3d_phases_pack(const convt3d::PhasesConfig::Storage* weight, uint4* packed,
                        convt3d::int64_t stride_in, convt3d::int64_t stride_out,
                        convt3d::int64_t stride0, convt3d::int64_t stride1,
                        convt3d::int64_t stride2) {
  convt3d::grid_dependency_launch();
  const convt3d::Packer<convt3d::PhasesConfig> packer{weight,  stride_in, stride_out,
                                                           stride0, stride1,   stride2};
  using Vectors = convt3d::PackVectors<convt3d::PhasesConfig>;
  if constexpr (Vectors::fits) {
    if (Vectors::suits(packer)) {
      convt3d::phases_pack_vectors(packer, packed);
      return;
    }
  }
  convt3d::phases_pack(packer, packed);
}
