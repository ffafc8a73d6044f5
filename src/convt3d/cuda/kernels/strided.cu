// Forward pass of strided layers that memory bounds, on mma.sync (sm_80 and later): every phase
// of a tile in one CTA.
//
// A unit is one period of phases: stride0 x stride1 x stride2 outputs. A CTA computes tile0 x
// tile1 x tile2 units of 8 * fragments_n produced channels of one group, and goes on to further
// tiles of the same group and channels. It is an implicit matrix product:
//
//     rows     = units (16 * fragments_m to a warp; a lane has neighbours along W)
//     columns  = produced channels (every warp has all of the CTA's)
//     depth    = (source channel, tap) (eight words a step: 8 TF32 or 16 half channels)
//
// Where weights come first (strided_weights_first.cuh), rows are channels of two slots, columns
// units.
//
// All slots of a unit stay in registers, and every tap of every slot is written out at compile
// time: a fragment of the source box is loaded once for a shift along D and H (as a window along
// W) and serves every tap of every slot there; a weight fragment serves all fragments of the warp.
//
//     units of one fragment, along W:   g = 0        1        ...     7
//                                      [u0 u1]    [u2 u3]           [u14 u15]
//     outputs of a lane, stride 2:    o0 o1 o2 o3   ...            one run of 2 * stride
//
// Shared memory: [stages][source box, weights of the chunk] [resident weights] [staging], see
// StridedShared. Staging holds outputs as they lie in memory (strided_store.cuh).
//
// Pipeline: a stage is a channel chunk of a tile; stages - 1 are in flight, across tiles, so the
// copies of the next tile run under the products and stores of this one.
#include "strided_weights_first.cuh"

namespace convt3d {

/// The tap that connects a slot along W with a shift, counted from the first; -1: none.
template <typename Config>
CONVT3D_CONSTEXPR int tap2_of(int slot, int shift) {
  using Axis2 = typename Config::Axis2;
  return shift < Axis2::shifts ? Axis2::tap(slot, shift + Axis2::min_shift) : -1;
}

/// All products of one step. `rows` are byte addresses of this lane's pairs at the first shift.
template <typename Config>
CONVT3D_DEVICE void multiply(StridedSums<Config>& sum, const BoxShape<StridedBox<Config>>& shape,
                             const uint32_t (&rows)[Config::fragments_m], uint32_t source,
                             uint32_t weights) {
  using Math = typename Config::Math;
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  constexpr int fragments_m = Config::fragments_m;
  constexpr bool only_step = Config::chunks * Config::depth == 1;
  // Slots along W whose products take turns.
  constexpr int together = Config::slots_together;
#pragma unroll
  for (int shift0 = 0; shift0 < Axis0::shifts; ++shift0) {
#pragma unroll
    for (int shift1 = 0; shift1 < Axis1::shifts; ++shift1) {
      bool used0 = false, used1 = false;
#pragma unroll
      for (int slot = 0; slot < Axis0::slots; ++slot)
        used0 = used0 || Axis0::tap(slot, shift0 + Axis0::min_shift) >= 0;
#pragma unroll
      for (int slot = 0; slot < Axis1::slots; ++slot)
        used1 = used1 || Axis1::tap(slot, shift1 + Axis1::min_shift) >= 0;
      if (!used0 || !used1) continue;

      const uint32_t offset = source + uint32_t(shift0 * shape.pitch1 + shift1 * shape.pitch2) *
                                           StridedBox<Config>::position_bytes;
      uint32_t raw[fragments_m][Config::halves][Config::window];
#pragma unroll
      for (int m = 0; m < fragments_m; ++m) load_window<Config>(raw[m], rows[m] + offset);
      constexpr int chain = chain_length<Config>(Axis2::shifts);
#pragma unroll
      for (int first2 = 0; first2 < Axis2::shifts; first2 += chain) {
        typename Math::A a[chain][fragments_m];
#pragma unroll
        for (int i = 0; i < chain; ++i) {
          bool used2 = false;
#pragma unroll
          for (int slot = 0; slot < Axis2::slots; ++slot)
            used2 = used2 || tap2_of<Config>(slot, first2 + i) >= 0;
#pragma unroll
          for (int m = 0; m < fragments_m; ++m)
            if (used2) prepare_tap<Config>(a[i][m], raw[m], first2 + i);
        }
#pragma unroll
        for (int slot0 = 0; slot0 < Axis0::slots; ++slot0) {
          const int tap0 = Axis0::tap(slot0, shift0 + Axis0::min_shift);
          if (tap0 < 0) continue;
#pragma unroll
          for (int slot1 = 0; slot1 < Axis1::slots; ++slot1) {
            const int tap1 = Axis1::tap(slot1, shift1 + Axis1::min_shift);
            if (tap1 < 0) continue;
#pragma unroll
            for (int first_slot = 0; first_slot < Axis2::slots; first_slot += together) {
              typename Math::B b[together][chain][Config::fragments_n];
              bool used[together][chain], fresh[together];
#pragma unroll
              for (int s = 0; s < together; ++s) {
                const int slot2 = first_slot + s;
                fresh[s] = only_step && !tap_before<Axis0>(slot0, shift0) &&
                           !tap_before<Axis1>(slot1, shift1) && !tap_before<Axis2>(slot2, first2);
#pragma unroll
                for (int i = 0; i < chain; ++i) {
                  const int tap2 = tap2_of<Config>(slot2, first2 + i);
                  used[s][i] = tap2 >= 0;
#pragma unroll
                  for (int n = 0; n < Config::fragments_n; ++n)
                    if (used[s][i])
                      Math::load(b[s][i][n], weights + 4u * (Config::tap_offset(tap0, tap1, tap2) +
                                                             n * Config::fragment_words));
                }
              }
              multiply_chain<Math>(sum.value[slot0][slot1] + first_slot, a, b, used, fresh);
            }
          }
        }
      }
    }
  }
}

template <typename Config>
CONVT3D_DEVICE void strided(const StridedArguments<Config>& arguments) {
  using Box = StridedBox<Config>;
  using Shared = StridedShared<Config>;
  extern __shared__ __align__(128) unsigned char shared[];
  const StridedWork<Config> work(arguments, shared);
  const StridedFill<Config>& fill = work.fill;
  const auto& shape = fill.fill_box.shape;
  const StridedStore<Config> store(arguments, work.group, work.column_tile, work.warp, work.lane);

  // Packed weights are waited for, the source is not: it was there before they were packed.
  if constexpr (!Config::resident_weights) grid_dependency_wait();
  int fill_number = work.worker, fill_chunk = 0, fill_buffer = 0;
  StridedTile<Config> fill_tile(arguments, work.worker);
  StridedTile<Config> tile = fill_tile;
  const StridedTile<Config> step(arguments, work.workers);
  auto start = [&]() {
    if (fill_number < arguments.count) {
      fill.source(fill_tile,
                  fill_tile.index[0] * arguments.tile[0] * Config::Axis0::unit_source +
                      Config::origin0,
                  fill_chunk, fill_buffer);
      fill.weights(fill_chunk, fill_buffer);
      if (++fill_chunk == Config::chunks) {
        fill_chunk = 0;
        fill_number += work.workers;
        fill_tile.advance(arguments, step);
      }
      if (++fill_buffer == Config::stages) fill_buffer = 0;
    }
    async_commit();
  };
#pragma unroll 1
  for (int stage = 0; stage < Config::stages - 1; ++stage) start();
  if constexpr (Config::resident_weights) {
    grid_dependency_wait();
    fill.resident_weights();
    async_commit();
    async_wait<0>();
  } else {
    async_wait<Config::stages - 2>();
  }
  __syncthreads();

  int buffer = 0;
#pragma unroll 1
  for (int number = work.worker; number < arguments.count; number += work.workers) {
    StridedSums<Config> sum;
    sum.clear();
#pragma unroll 1
    for (int chunk = 0; chunk < Config::chunks; ++chunk) {
      // All have read the stage that is filled next, and see each other's copies of this one.
      if (chunk > 0 || !store.meets()) __syncthreads();
      start();
      const uint32_t stage = 4u * buffer * Shared::stage;
      const uint32_t weights = work.weights(chunk, stage);
#pragma unroll 1
      for (int step = 0; step < Config::depth; ++step) {
        const uint32_t box = stage + step * Box::step_bytes;
        const uint32_t step_weights = weights + 4u * step * Config::step_weight_words;
        if constexpr (Config::weights_first)
          multiply_weights_first<Config>(sum, shape, work.rows, box, step_weights);
        else
          multiply<Config>(sum, shape, work.rows, box, step_weights);
      }
      if (++buffer == Config::stages) buffer = 0;
      // Before the stores: bulk copies count as outstanding, too, where this waits.
      async_wait<Config::stages - 2>();
    }
    store(tile, work.pairs, sum);
    tile.advance(arguments, step);
  }
  async_wait<0>();
  if constexpr (Config::bulk_stores) bulk_wait<0>();
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::StridedConfig::threads,
                                             convt3d::StridedConfig::resident)
    convt3d_strided(const convt3d::StridedConfig::Storage* source, const convt3d::uint32_t* weights,
                    const convt3d::StridedConfig::Storage* bias,
                    convt3d::StridedConfig::Storage* target, int source0, int source1, int source2,
                    int source_stride0, int source_stride1, int target0, int target1, int target2,
                    int target_stride0, int target_stride1, int tile0, int tile1, int tile2,
                    int tiles0, int tiles1, int tiles2, int line_rows, int line_fragments,
                    int count, int staging_buffers) {
  const convt3d::StridedArguments<convt3d::StridedConfig> arguments{
      {source, {source0, source1, source2}, source_stride0, source_stride1},
      {target, {target0, target1, target2}, target_stride0, target_stride1},
      weights,
      bias,
      {tile0, tile1, tile2},
      {tiles0, tiles1, tiles2},
      line_rows,
      line_fragments,
      count,
      staging_buffers,
      0};
  convt3d::strided<convt3d::StridedConfig>(arguments);
}
