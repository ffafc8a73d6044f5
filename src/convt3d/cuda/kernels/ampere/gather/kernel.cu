// Forward pass and gradient by input as a tiled gather, on mma.sync (sm_80 and later).
//
// A CTA computes, for one sample, one group, one phase of the phased axes and one column tile,
// the destinations of tile0 x tile1 x tile2 units (run-time numbers). It is an implicit matrix
// product:
//
//     rows    = units of the tile            (16 * fragments_m to a warp, warps_m warps)
//     columns = produced channels            (8 * fragments_n to a warp, warps_n warps)
//     depth   = (source channel, tap)        (eight words a step: 8 TF32 or 16 half channels)
//
//                 box2 = units + reach of the taps
//             .-------------------------.
//      box1   | source box of one chunk |   every tap of every slot reads the same box at its own
//             | (8 words a position)    |   constant shift, so each source value is fetched once
//             '-------------------------'   per CTA
//
// Shared memory: [tile_buffers][source box] [stages][packed weights of a stage]; after the last
// stage all of it becomes the epilogue's staging rows, one part to each warp.
//
// Pipeline: a stage is a channel chunk (or one tap of axis 1 of it); `stages - 1` of them are in
// flight. Top of a stage: wait for its copies, barrier, start the copies of a later stage into
// the buffer that the barrier just freed, transpose what landed (load/octet_box.cuh: contiguous
// 16-bit sources), multiply. Sources move by cp.async, but for contiguous 16-bit ones of strided
// gradients, which lie apart by residue: these pass through registers, which pair up their
// channels.
#include "ampere/gather/config.cuh"
#include "ampere/gather/load.cuh"
#include "ampere/gather/store.cuh"

namespace convt3d {

/// Byte addresses from which a lane loads an A fragment: rows g and g + 8, or a row of a matrix.
template <typename Config>
constexpr int row_addresses = Config::octets ? 1 : 2;

/// One A fragment, of the eight words of a step, `offset` bytes from its rows.
template <typename Config>
CONVT3D_DEVICE void load_fragment(uint32_t (&raw)[4],
                                  const uint32_t (&row)[row_addresses<Config>], uint32_t offset) {
  if constexpr (Config::octets) {
    load_matrix_x4(row[0] + offset, raw);
  } else {
    const uint32_t low = row[0] + offset, high = row[1] + offset;
    if constexpr (Config::source_channels_last) {
      load_shared(low, raw[0], raw[2]);
      load_shared(high, raw[1], raw[3]);
    } else {
      raw[0] = load_shared(low);
      raw[1] = load_shared(high);
      raw[2] = load_shared(low + 16 * GatherBox<Config>::plane_pitch);
      raw[3] = load_shared(high + 16 * GatherBox<Config>::plane_pitch);
    }
  }
}

template <typename Config>
struct Accumulators {
  float value[Config::Axis0::slots][Config::Axis2::slots][Config::fragments_m]
             [Config::fragments_n][4];
};

/// All products of one (tap1, tap0 set) of a chunk. `rows` are byte addresses of this lane's rows
/// for the first shift of every axis, `weights` the lane's words of the first tap.
template <typename Config, typename Shape>
CONVT3D_DEVICE void multiply(
    Accumulators<Config>& sum, const Shape& shape,
    const uint32_t (&rows)[Config::fragments_m][row_addresses<Config>], uint32_t source,
    uint32_t weights) {
  using Math = typename Config::Math;
  using Axis0 = typename Config::Axis0;
  using Axis2 = typename Config::Axis2;
  using Box = GatherBox<Config>;
  constexpr int shifts0 = Config::static0 ? Axis0::shifts : 1;
  constexpr int taps0 = Config::static0 ? Axis0::kernel : 1;
#pragma unroll
  for (int shift2 = 0; shift2 < Axis2::shifts; ++shift2) {
    bool used2 = false;
#pragma unroll
    for (int slot2 = 0; slot2 < Axis2::slots; ++slot2)
      used2 = used2 || Axis2::tap(slot2, shift2 + Axis2::min_shift) >= 0;
    if (!used2) continue;

    typename Math::A a[shifts0][Config::fragments_m];
#pragma unroll
    for (int shift0 = 0; shift0 < shifts0; ++shift0) {
      const uint32_t offset = uint32_t(shift0 * shape.pitch1 + shape.column_of(shift2)) *
                              Box::position_bytes;
#pragma unroll
      for (int m = 0; m < Config::fragments_m; ++m) {
        uint32_t raw[4];
        load_fragment<Config>(raw, rows[m], source + offset);
        Math::prepare(a[shift0][m], raw);
      }
    }
#pragma unroll
    for (int slot2 = 0; slot2 < Axis2::slots; ++slot2) {
      const int tap2 = Axis2::tap(slot2, shift2 + Axis2::min_shift);
      if (tap2 < 0) continue;
#pragma unroll
      for (int tap0 = 0; tap0 < taps0; ++tap0) {
        typename Math::B b[Config::fragments_n];
#pragma unroll
        for (int n = 0; n < Config::fragments_n; ++n)
          Math::load(b[n], weights + 4u * (tap0 * Config::row_words + tap2 * Config::tap_words +
                                           n * Config::fragment_words));
#pragma unroll
        for (int slot0 = 0; slot0 < Axis0::slots; ++slot0) {
          int shift0 = 0;
          if constexpr (Config::static0) {
            if (!Axis0::valid(slot0, tap0)) continue;
            shift0 = Axis0::shift_of(slot0, tap0) - Axis0::min_shift;
          }
#pragma unroll
          for (int m = 0; m < Config::fragments_m; ++m)
#pragma unroll
            for (int n = 0; n < Config::fragments_n; ++n)
              Math::multiply_add(sum.value[slot0][slot2][m][n], a[shift0][m], b[n]);
        }
      }
    }
  }
}

template <typename Config>
CONVT3D_DEVICE void gather(const GatherArguments<Config>& arguments) {
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Box = GatherBox<Config>;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t shared_base = shared_address(shared);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_m = warp / Config::warps_n;
  const int warp_n = warp % Config::warps_n;

  const GatherTile<Config> tile(arguments);
  PhaseTaps taps0{1, 0, Axis0::min_shift, 0};
  if constexpr (!Config::static0) taps0 = Axis0::taps_of(tile.phase0);
  const PhaseTaps taps1 = Axis1::taps_of(tile.phase1);

  const TileUnits units(arguments);
  const Fill<Config> fill(arguments, tile, shared_base, taps0, taps1);
  const auto& shape = fill.fill_box.shape;

  // This lane's rows of the source box. Rows past the tile's units read unit 0 and are not
  // stored.
  uint32_t rows[Config::fragments_m][row_addresses<Config>];
#pragma unroll
  for (int m = 0; m < Config::fragments_m; ++m)
#pragma unroll
    for (int half = 0; half < row_addresses<Config>; ++half) {
      const int unit = (warp_m * Config::fragments_m + m) * 16 +
                       (Config::octets ? lane % 16 : half * 8 + lane / 4);
      int u0, u1, u2;
      units.locate(unit < units.count ? unit : 0, u0, u1, u2);
      const int position =
          u0 * Axis0::unit_source * shape.pitch1 + u1 * Axis1::unit_source * shape.pitch2 +
          u2;
      // The lane's octet, or the first of its words.
      rows[m][half] = shared_base + position * Box::position_bytes +
                      (Config::octets                 ? 16 * Box::plane_positions * (lane / 16)
                       : Config::source_channels_last ? 8 * (lane % 4)
                                                      : 4 * Box::plane_pitch * (lane % 4));
    }

  Accumulators<Config> sum;
#pragma unroll
  for (int i = 0; i < int(sizeof(sum) / sizeof(float)); ++i) (&sum.value[0][0][0][0][0])[i] = 0.f;
  [[maybe_unused]] EarlierParts<sizeof(sum) / sizeof(float)> earlier;
  [[maybe_unused]] int added = 0;  // products of the present part
  if constexpr (Config::sums_in_parts) earlier.begin(&sum.value[0][0][0][0][0]);

  const int stages_per_chunk = Config::split ? taps1.count : 1;
  const int total = taps0.count * taps1.count == 0 ? 0 : Config::chunks * stages_per_chunk;
  auto start = [&](int stage) {
    if (stage < total) {
      const int chunk = Config::split ? stage / stages_per_chunk : stage;
      const int tap1 = Config::split ? stage - chunk * stages_per_chunk : 0;
      if (tap1 == 0) fill.source(chunk, chunk % Config::tile_buffers);
      if (stage == 0) grid_dependency_wait();  // for the packed weights
      fill.weights(chunk, tap1, stage % Config::stages);
    }
    async_commit();
  };

  if (total == 0) grid_dependency_wait();
  // One place that starts copies, for less text: stages below 0 only do that.
#pragma unroll 1
  for (int stage = 1 - Config::stages; stage < total; ++stage) {
    if (stage >= 0) {
      async_wait<Config::stages - 2>();
      __syncthreads();
    }
    start(stage + Config::stages - 1);
    if (stage < 0) continue;

    const int chunk = Config::split ? stage / stages_per_chunk : stage;
    const int first1 = Config::split ? stage - chunk * stages_per_chunk : 0;
    const int count1 = Config::split ? 1 : taps1.count;
    if (first1 == 0) fill.finish(chunk % Config::tile_buffers);
    const uint32_t source =
        4u * (chunk % Config::tile_buffers) * Box::box_words + fill.row_lead() * Box::position_bytes;
    const uint32_t stage_weights = shared_base +
                                   4u * (weight_offset<Config> +
                                         stage % Config::stages * Config::stage_weight_words +
                                         warp_n * Config::fragments_n * Config::fragment_words +
                                         lane * Config::lane_words);
#pragma unroll 1
    for (int step = 0; step < Config::depth; ++step) {
      uint32_t weights = stage_weights + 4u * step * Config::stage_step_words;
#pragma unroll 1
      for (int i1 = 0; i1 < count1; ++i1) {
        const int shift1 =
            taps1.first_shift + (first1 + i1) * taps1.shift_step - Axis1::min_shift;
#pragma unroll 1
        for (int i0 = 0; i0 < taps0.count; ++i0) {
          const int shift0 = taps0.first_shift + i0 * taps0.shift_step - Axis0::min_shift;
          multiply<Config>(sum, shape, rows,
                           source + step * Box::step_bytes +
                               (shift0 * shape.pitch1 + shift1 * shape.pitch2) *
                                   Box::position_bytes,
                           weights);
          if constexpr (!Config::static0) weights += 4u * Config::row_words;
        }
        if constexpr (Config::static0) weights += 4u * Config::slab_words;
        if constexpr (Config::sums_in_parts) {
          added += Config::row_products;
          if (added >= longest_part) {
            earlier.keep(&sum.value[0][0][0][0][0]);
            added = 0;
          }
        }
      }
    }
  }
  if constexpr (Config::sums_in_parts) earlier.join(&sum.value[0][0][0][0][0]);
  async_wait<0>();
  __syncthreads();

  store_tile<Config>(arguments, tile, units, sum.value, warp_m, warp_n, lane);
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::GatherConfig::threads,
                                             convt3d::GatherConfig::resident)
    convt3d_ampere_gather(const convt3d::GatherConfig::Storage* source, const convt3d::uint32_t* weights,
                          const convt3d::GatherConfig::Storage* bias,
                          convt3d::GatherConfig::Storage* target, int source0, int source1, int source2,
                          int source_stride0, int source_stride1, int target0, int target1, int target2,
                          int target_stride0, int target_stride1, int tile0, int tile1, int tile2,
                          int tiles0, int tiles1, int tiles2 CONVT3D_FUSION_PARAMETERS) {
  const convt3d::GatherArguments<convt3d::GatherConfig> arguments{
      {source, {source0, source1, source2}, source_stride0, source_stride1},
      {target, {target0, target1, target2}, target_stride0, target_stride1},
      weights,
      bias,
      tile0,
      tile1,
      tile2,
      tiles0,
      tiles1,
      tiles2 CONVT3D_FUSION_ARGUMENT};
  convt3d::gather<convt3d::GatherConfig>(arguments);
}
