// The mainloop of a consumer warpgroup on wgmma: fragments of rows in registers, columns in
// shared memory.
#pragma once
#include "device/barrier.cuh"
#include "device/wgmma.cuh"
#include "wgrad/layout.cuh"
#include "wgrad/rows.cuh"
#include "wgrad/store.cuh"

namespace convt3d {

template <int N>
CONVT3D_DEVICE void multiply(Float32, float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
  wgmma_tf32_rs<N>(d, a, b);
}
template <int N>
CONVT3D_DEVICE void multiply(Float16, float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
  wgmma_f16_rs<N>(d, a, b);
}
template <int N>
CONVT3D_DEVICE void multiply(BFloat16, float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
  wgmma_bf16_rs<N>(d, a, b);
}

template <typename Config, int blocks>
CONVT3D_DEVICE void consume(const WgradLayout<Config>& l, int consumer) {
  const auto& a = l.a;
  const int lane = threadIdx.x % 32;
  const BlockRows<WgradLayout<Config>, blocks> rows(l, consumer);
  ProductWalk<WgradLayout<Config>> walk(l);

  // Products add to `part`, which in IEEE arithmetic is a short run of them.
  float sum[blocks][Config::registers], short_sum[Config::ieee ? blocks : 1][Config::registers];
  auto& part = *[&] {
    if constexpr (Config::ieee)
      return &short_sum;
    else
      return &sum;
  }();

  const uint64_t descriptor = Config::source_map
                                  ? matrix_descriptor_128b(0)
                                  : matrix_descriptor(0, walk.half_x, 128);

  // The words of a product's fragments are fetched while the product before it is begun.
  constexpr int last = Config::fragments - 1;
  uint32_t fragment[Config::fragments][blocks][4];
  uint32_t rest[Config::ieee ? Config::fragments : 1][blocks][4];
  uint32_t raw[Config::direct ? 1 : blocks][RowReader<Config>::words];
  RowReader<Config> reader[blocks];
  float row_sum[blocks][2] = {};  // of the gradient
  auto fetch = [&](int f, uint32_t offset, int product) {
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      if (!Config::meets(b * Config::consumers + consumer, product)) continue;
      if constexpr (Config::direct)
        reader[b].fetch(fragment[f][b], offset, walk.half_g, f);
      else
        reader[b].fetch(raw[b], offset, walk.half_g, f);
    }
  };

  // Tensor cores truncate when they add: long sums are put down from time to time. Nothing else
  // may touch sums within the loop of steps, or ptxas would serialise the products.
  constexpr int longest = 2048;
  constexpr bool once = Config::ieee || Config::direct_store;
  const int most_steps = once ? l.end : max(longest / (walk.products * walk.slices()), 1);
  float* out = a.partial + int64_t(blockIdx.x) * Config::cta_elements + threadIdx.x % 128;

  WgradSteps<WgradLayout<Config>> at(l);
  if constexpr (Config::steady) rows.point(reader, at, 0);
#pragma unroll 1
  do {
    const bool stored = at.step > l.begin;
    const int until = min(at.step + most_steps, l.end);
#pragma unroll
    for (int b = 0; b < blocks; ++b)
#pragma unroll
      for (int r = 0; r < Config::registers; ++r) sum[b][r] = 0.f;
#pragma unroll 1
    for (; at.step < until; at.advance()) {
      mbarrier_wait(l.full(at.stage), at.phase);
      const uint32_t slab = l.x_ring + at.stage * l.x_slab;
#pragma unroll 1
      for (int slice = 0; slice < walk.slices(); ++slice) {
        if constexpr (Config::steady) {
          walk.begin(slab, slice, (at.slot + slice * Config::unit0) * l.plane);
        } else {
          rows.point(reader, at, slice);
          walk.begin(slab, slice);
        }
        if constexpr (Config::direct) wgmma_wait<last - 1>();
        fetch(0, walk.g, 0);
        constexpr int fixed = Config::slices * Config::slice_products;
#pragma unroll(Config::skips ? fixed / Config::fragments : 1)
        for (int product = 0; product < (Config::skips ? fixed : walk.products);
             product += Config::fragments) {
#pragma unroll
          for (int f = 0; f < Config::fragments; ++f) {
            // Of a slice's last product the words are fetched again: a branch would serialise.
            const uint64_t columns = descriptor | (walk.x & 0x3ffff) >> 4;
            const uint32_t g = walk.g;
            const uint32_t inner[2] = {walk.past_first(), walk.before_last()};
            walk.advance();
            const uint32_t next =
                f == last && product + Config::fragments >= walk.products ? g : walk.g;
            wgmma_wait<Config::direct ? last - 1 : last>();
            // Now the previous step's products are done.
            if (!Config::joined && f == last && product + slice == 0 && at.step > l.begin)
              l.leave(at.stage == 0 ? Config::stages - 1 : at.stage - 1);
            if constexpr (!Config::direct) {
#pragma unroll
              for (int b = 0; b < blocks; ++b) {
                reader[b].finish(fragment[f][b], rest[Config::ieee ? f : 0][b], raw[b]);
                if constexpr (Config::masks_ends) rows.mask_ends(b, inner, fragment[f][b]);
                if constexpr (Config::bias) reader[b].add(row_sum[b], raw[b], fragment[f][b]);
              }
            }
            fetch((f + 1) % Config::fragments, next, product + f + 1);
            if (Config::ieee && f == 0) {
#pragma unroll
              for (int b = 0; b < blocks; ++b)
#pragma unroll
                for (int r = 0; r < Config::registers; ++r) part[b][r] = 0.f;
            }
            wgmma_fence();
#pragma unroll
            for (int b = 0; b < blocks; ++b) {
              if (!Config::meets(b * Config::consumers + consumer, product + f)) continue;
              if constexpr (Config::ieee) {
                multiply<Config::columns>(Float32(), part[b], rest[f][b], columns);
                multiply<Config::columns>(Float32(), part[b], fragment[f][b],
                                          columns + (l.x_part >> 4));
              }
              multiply<Config::columns>(typename Config::Type(), part[b], fragment[f][b], columns);
            }
            wgmma_commit();
          }
          if constexpr (Config::ieee) {
            wgmma_wait<0>();
#pragma unroll
            for (int b = 0; b < blocks; ++b)
#pragma unroll
              for (int r = 0; r < Config::registers; ++r) sum[b][r] += part[b][r];
          }
        }
      }
      if constexpr (Config::joined) {
        wgmma_wait<0>();
        l.leave(at.stage);
      }
    }
    wgmma_wait<0>();
    if constexpr (Config::direct_store) break;
#pragma unroll
    for (int b = 0; b < blocks; ++b)
#pragma unroll
      for (int r = 0; r < Config::registers; ++r) {
        float* to = out + ((b * Config::consumers + consumer) * Config::registers + r) * 128;
        *to = stored ? *to + sum[b][r] : sum[b][r];
      }
  } while (at.step < l.end);
  if constexpr (Config::cluster > 1)
    put_down<Config, blocks>(l, consumer, sum);
  else if constexpr (Config::direct_store)
    store_weight<Config, blocks>(l, consumer, sum);
  if constexpr (Config::bias) {
    const int row = (consumer * 4 + threadIdx.x / 32 % 4) * 16 + lane / 4;
    float* to = a.sums + int64_t(blockIdx.x) * (Config::cta_blocks * 64) + row;
#pragma unroll
    for (int b = 0; b < blocks; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float total = row_sum[b][h];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        if (lane % 4 == 0) to[b * Config::consumers * 64 + h * 8] = total;
      }
  }
}

}  // namespace convt3d
