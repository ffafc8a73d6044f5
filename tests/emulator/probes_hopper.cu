// As probes.cu, for the intrinsics of sm_90a. Every block is one warpgroup and one case.
#include "device/ptx.cuh"
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "device/wgmma_mn_major.cuh"

namespace convt3d {

constexpr int probe_columns = 24;

/// Rows of eight words as core matrices: [16-byte piece][row].
CONVT3D_DEVICE void fill_pieces(uint32_t base, const uint32_t* words, int rows) {
  for (int i = threadIdx.x; i < rows * 8; i += 128)
    store_shared(base + (i % 8 / 4 * rows + i / 8) * 16 + i % 4 * 4, words[i]);
}

/// One array for all kernels: descriptors reach 256 KiB.
CONVT3D_DEVICE unsigned char* operand_bytes() {
  __shared__ __align__(128) unsigned char bytes[88 * 32];
  return bytes;
}

/// in: A (64 rows), B (24 rows), of eight words; then D, twelve words a thread. out: D.
#define CONVT3D_PROBE_WGMMA(type)                                                                  \
  template <bool Shared, bool First = false>                                                       \
  CONVT3D_DEVICE void product_##type(const uint32_t* in, uint32_t* out) {                          \
    const uint32_t a_base = shared_address(operand_bytes()), b_base = a_base + 64 * 32;            \
    const int tid = threadIdx.x, lane = tid % 32;                                                  \
    const uint32_t* a_words = in + blockIdx.x * (88 * 8 + 128 * 12);                               \
    const uint32_t* d_words = a_words + 88 * 8 + tid * 12;                                         \
    fill_pieces(a_base, a_words, 64);                                                              \
    fill_pieces(b_base, a_words + 64 * 8, probe_columns);                                          \
    fence_async_proxy();                                                                           \
    __syncthreads();                                                                               \
    float d[probe_columns / 2];                                                                    \
    for (int i = 0; i < probe_columns / 2; ++i) d[i] = float_of(d_words[i]);                       \
    uint32_t a[4];                                                                                 \
    for (int i = 0; i < 4; ++i)                                                                    \
      a[i] = a_words[(tid / 32 * 16 + lane / 4 + i % 2 * 8) * 8 + lane % 4 + i / 2 * 4];           \
    const uint64_t b = matrix_descriptor(b_base, probe_columns * 16, 128);                         \
    wgmma_fence();                                                                                 \
    if constexpr (First && Shared)                                                                 \
      wgmma_tf32_ss_first<probe_columns>(d, matrix_descriptor(a_base, 64 * 16, 128), b);           \
    else if constexpr (First)                                                                      \
      wgmma_tf32_rs_first<probe_columns>(d, a, b);                                                 \
    else if constexpr (Shared)                                                                     \
      wgmma_##type##_ss<probe_columns>(d, matrix_descriptor(a_base, 64 * 16, 128), b);             \
    else                                                                                           \
      wgmma_##type##_rs<probe_columns>(d, a, b);                                                   \
    wgmma_commit();                                                                                \
    wgmma_wait<0>();                                                                               \
    for (int i = 0; i < probe_columns / 2; ++i)                                                    \
      out[(blockIdx.x * 128 + tid) * 12 + i] = bits_of(d[i]);                                      \
  }                                                                                                \
  extern "C" __global__ void probe_wgmma_##type##_ss(const uint32_t* in, uint32_t* out) {          \
    product_##type<true>(in, out);                                                                 \
  }                                                                                                \
  extern "C" __global__ void probe_wgmma_##type##_rs(const uint32_t* in, uint32_t* out) {          \
    product_##type<false>(in, out);                                                                \
  }
CONVT3D_PROBE_WGMMA(tf32)
CONVT3D_PROBE_WGMMA(f16)
CONVT3D_PROBE_WGMMA(bf16)
extern "C" __global__ void probe_wgmma_tf32_ss_first(const uint32_t* in, uint32_t* out) {
  product_tf32<true, true>(in, out);
}
extern "C" __global__ void probe_wgmma_tf32_rs_first(const uint32_t* in, uint32_t* out) {
  product_tf32<false, true>(in, out);
}

/// As above with rows of 32 words: four steps of K along B under the 128-byte swizzle.
extern "C" __global__ void probe_wgmma_swizzled(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(1024) unsigned char bytes[probe_columns * 128];
  const uint32_t base = shared_address(bytes);
  const int tid = threadIdx.x, lane = tid % 32;
  const uint32_t* a_words = in + blockIdx.x * (88 * 32 + 128 * 12);
  const uint32_t* d_words = a_words + 88 * 32 + tid * 12;
  for (int i = tid; i < probe_columns * 32; i += 128) {
    const uint32_t address = base + i * 4;
    store_shared(address ^ (address >> 3 & 0x70), a_words[64 * 32 + i]);
  }
  fence_async_proxy();
  __syncthreads();
  float d[probe_columns / 2];
  for (int i = 0; i < probe_columns / 2; ++i) d[i] = float_of(d_words[i]);
  uint32_t a[4][4];
  for (int step = 0; step < 4; ++step)
    for (int i = 0; i < 4; ++i)
      a[step][i] =
          a_words[(tid / 32 * 16 + lane / 4 + i % 2 * 8) * 32 + step * 8 + lane % 4 + i / 2 * 4];
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step)
    wgmma_tf32_rs<probe_columns>(d, a[step], matrix_descriptor_128b(base + 32 * step));
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < probe_columns / 2; ++i)
    out[(blockIdx.x * 128 + tid) * 12 + i] = bits_of(d[i]);
}

/// As wgmma_bf16_rs, B as rows of K.
extern "C" __global__ void probe_wgmma_bf16_rs_n_major(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(1024) unsigned char bytes[2048];
  const uint32_t base = shared_address(bytes);
  const int tid = threadIdx.x, lane = tid % 32;
  const uint32_t* a_words = in + blockIdx.x * (88 * 8 + 128 * 12);
  const uint32_t* d_words = a_words + 88 * 8 + tid * 12;
  for (int i = tid; i < probe_columns / 2 * 16; i += 128) {
    const int column = i / 16 * 2, k = i % 16;
    const uint32_t low = a_words[64 * 8 + column * 8 + k / 2] >> k % 2 * 16 & 0xffff;
    const uint32_t high = a_words[64 * 8 + (column + 1) * 8 + k / 2] >> k % 2 * 16 & 0xffff;
    const uint32_t address = base + k * 128 + column * 2;
    store_shared(address ^ (address >> 3 & 0x70), low | high << 16);
  }
  fence_async_proxy();
  __syncthreads();
  float d[probe_columns / 2];
  for (int i = 0; i < probe_columns / 2; ++i) d[i] = float_of(d_words[i]);
  uint32_t a[4];
  for (int i = 0; i < 4; ++i)
    a[i] = a_words[(tid / 32 * 16 + lane / 4 + i % 2 * 8) * 8 + lane % 4 + i / 2 * 4];
  wgmma_fence();
  wgmma_bf16_rs_n_major<probe_columns>(d, a, matrix_descriptor_128b_n_major(base, 2048));
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < probe_columns / 2; ++i)
    out[(blockIdx.x * 128 + tid) * 12 + i] = bits_of(d[i]);
}

/// A matrix of 8 words a row as rows of K, atoms of `pitch` bytes of rows.
template <int pitch>
CONVT3D_DEVICE void fill_mn_major(uint32_t base, const uint32_t* words, int rows) {
  for (int i = threadIdx.x; i < rows / 2 * 16; i += 128) {
    const int row = i / 16 * 2, k = i % 16;
    const uint32_t low = words[row * 8 + k / 2] >> k % 2 * 16 & 0xffff;
    const uint32_t high = words[(row + 1) * 8 + k / 2] >> k % 2 * 16 & 0xffff;
    const uint32_t address = base + row * 2 / pitch * (16 * pitch) + k * pitch + row * 2 % pitch;
    store_shared(address ^ (address >> 3 & (pitch - 16)), low | high << 16);
  }
}

/// As wgmma_bf16_ss, both operands as rows of K: with atoms of 32 rows, A has two of them.
template <int pitch>
CONVT3D_DEVICE void product_mn_major(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(1024) unsigned char bytes[4096];
  const uint32_t a_base = shared_address(bytes), b_base = a_base + 2048;
  const int tid = threadIdx.x;
  const uint32_t* a_words = in + blockIdx.x * (88 * 8 + 128 * 12);
  const uint32_t* d_words = a_words + 88 * 8 + tid * 12;
  fill_mn_major<pitch>(a_base, a_words, 64);
  fill_mn_major<pitch>(b_base, a_words + 64 * 8, probe_columns);
  fence_async_proxy();
  __syncthreads();
  // The products of columns from 24 on are of no interest: their operand is never written.
  float d[16];
  for (int i = 0; i < 16; ++i) d[i] = i < probe_columns / 2 ? float_of(d_words[i]) : 0.f;
  wgmma_fence();
  wgmma_bf16_ss_mn_major<32>(d, matrix_descriptor_mn_major<pitch>(a_base, 16 * pitch),
                             matrix_descriptor_mn_major<pitch>(b_base, 16 * pitch));
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < probe_columns / 2; ++i)
    out[(blockIdx.x * 128 + tid) * 12 + i] = bits_of(d[i]);
}
extern "C" __global__ void probe_wgmma_bf16_ss_mn_major(const uint32_t* in, uint32_t* out) {
  product_mn_major<128>(in, out);
}
extern "C" __global__ void probe_wgmma_bf16_ss_mn_major_64b(const uint32_t* in, uint32_t* out) {
  product_mn_major<64>(in, out);
}

/// Two bulk copies of 256 and 768 bytes complete one phase; a third one the next.
extern "C" __global__ void probe_bulk_copy(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(128) uint32_t words[512];
  __shared__ __align__(8) uint64_t barrier_word;
  const uint32_t barrier = shared_address(&barrier_word), base = shared_address(words);
  const uint32_t* mine = in + blockIdx.x * 512;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_expect(barrier, 1024);
    bulk_copy(base + 768, mine, 256, barrier);
    bulk_copy(base, mine + 64, 768, barrier);
  }
  mbarrier_wait(barrier, 0);
  __syncthreads();  // or a late thread might find the barrier two phases on
  if (threadIdx.x == 0) {
    mbarrier_expect(barrier, 1024);
    bulk_copy(base + 1024, mine + 256, 1024, barrier);
  }
  mbarrier_wait(barrier, 1);
  for (int i = threadIdx.x; i < 512; i += 128) out[blockIdx.x * 512 + i] = words[i];
}

template <bool Transposed>
CONVT3D_DEVICE void store_matrices(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(16) uint32_t words[512];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t* mine = in + (blockIdx.x * 128 + threadIdx.x) * 5;
  const uint32_t r[4] = {mine[0], mine[1], mine[2], mine[3]};
  const uint32_t address = shared_address(words) + warp * 512 + 16 * mine[4];
  if constexpr (Transposed) store_matrix_x4_transposed(address, r);
  else store_matrix_x4(address, r);
  __syncwarp();
  for (int i = lane; i < 128; i += 32)
    out[blockIdx.x * 512 + warp * 128 + i] = words[warp * 128 + i];
}
extern "C" __global__ void probe_store_matrix_x4(const uint32_t* in, uint32_t* out) {
  store_matrices<false>(in, out);
}
extern "C" __global__ void probe_store_matrix_x4_transposed(const uint32_t* in, uint32_t* out) {
  store_matrices<true>(in, out);
}

}  // namespace convt3d
