// One small kernel for each intrinsic: inputs in, raw results out. The emulator runs them in the
// tests; record_vectors.py runs the same text on a GPU. Every block is one warp and one case.
#include "device/ptx.cuh"

namespace convt3d {

// ---------------------------------------------------------------- conversions

extern "C" __global__ void probe_round_tf32(const uint32_t* in, uint32_t* out) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  out[i] = round_tf32(float_of(in[i]));
}
extern "C" __global__ void probe_f16_from_float(const uint32_t* in, uint32_t* out) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  out[i] = f16_from_float(float_of(in[i]));
}
extern "C" __global__ void probe_bf16_from_float(const uint32_t* in, uint32_t* out) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  out[i] = bf16_from_float(float_of(in[i]));
}
extern "C" __global__ void probe_float_from_f16(const uint32_t* in, uint32_t* out) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  out[i] = bits_of(float_from_f16(uint16_t(in[i])));
}
extern "C" __global__ void probe_float_from_bf16(const uint32_t* in, uint32_t* out) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  out[i] = bits_of(float_from_bf16(uint16_t(in[i])));
}
extern "C" __global__ void probe_pack_f16(const uint32_t* in, uint32_t* out) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  out[i] = pack_f16(float_of(in[2 * i]), float_of(in[2 * i + 1]));
}
extern "C" __global__ void probe_pack_bf16(const uint32_t* in, uint32_t* out) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  out[i] = pack_bf16(float_of(in[2 * i]), float_of(in[2 * i + 1]));
}
extern "C" __global__ void probe_permute_bytes(const uint32_t* in, uint32_t* out) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  out[i] = permute_bytes(in[3 * i], in[3 * i + 1], in[3 * i + 2]);
}

// ---------------------------------------------------------------- shared memory

/// Words written one, two and four at a time come back at every width.
extern "C" __global__ void probe_shared(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(16) unsigned char bytes[3 * 512];
  const uint32_t base = shared_address(bytes);
  const int lane = threadIdx.x;
  const uint32_t* mine = in + blockIdx.x * 384 + 4 * lane;
  for (int i = 0; i < 4; ++i) store_shared(base + 16 * lane + 4 * i, mine[i]);
  store_shared(base + 512 + 16 * lane, mine[128], mine[129]);
  store_shared(base + 512 + 16 * lane + 8, mine[130], mine[131]);
  store_shared(base + 1024 + 16 * lane, mine[256], mine[257], mine[258], mine[259]);
  __syncwarp();
  uint32_t word[12];
  const int other = lane ^ 5;
  load_shared(base + 16 * other, word[0], word[1], word[2], word[3]);
  for (int i = 0; i < 4; ++i) word[4 + i] = load_shared(base + 512 + 16 * other + 4 * i);
  load_shared(base + 1024 + 16 * other, word[8], word[9]);
  load_shared(base + 1024 + 16 * other + 8, word[10], word[11]);
  for (int i = 0; i < 12; ++i) out[(blockIdx.x * 32 + lane) * 12 + i] = word[i];
}

/// Lane l supplies row address in[256 + l]; the matrices' elements are in[0..255], as words.
template <int Count, bool Transposed>
CONVT3D_DEVICE void load_matrices(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(16) uint32_t words[256];
  const uint32_t* mine = in + blockIdx.x * 288;
  for (int i = threadIdx.x; i < 256; i += 32) words[i] = mine[i];
  __syncwarp();
  uint32_t r[Count];
  const uint32_t address = shared_address(words) + 16 * mine[256 + threadIdx.x];
  if constexpr (!Transposed) load_matrix_x4(address, r);
  else if constexpr (Count == 4) load_matrix_x4_transposed(address, r);
  else load_matrix_x2_transposed(address, r);
  for (int i = 0; i < Count; ++i) out[(blockIdx.x * 32 + threadIdx.x) * Count + i] = r[i];
}
extern "C" __global__ void probe_load_matrix_x4_transposed(const uint32_t* in, uint32_t* out) {
  load_matrices<4, true>(in, out);
}
extern "C" __global__ void probe_load_matrix_x2_transposed(const uint32_t* in, uint32_t* out) {
  load_matrices<2, true>(in, out);
}
extern "C" __global__ void probe_load_matrix_x4(const uint32_t* in, uint32_t* out) {
  load_matrices<4, false>(in, out);
}

// ---------------------------------------------------------------- asynchronous copies

/// Two groups; the second is waited for after the first has been read. in[512 + lane] is `valid`.
template <int Bytes>
CONVT3D_DEVICE void copies(const uint32_t* in, uint32_t* out) {
  constexpr int words = Bytes / 4;
  __shared__ __align__(16) uint32_t tile[2][32 * words];
  const int lane = threadIdx.x;
  const uint32_t* mine = in + blockIdx.x * 544;
  for (int group = 0; group < 2; ++group) {
    async_copy<Bytes>(shared_address(&tile[group][lane * words]),
                      mine + group * 256 + (31 - lane) * words, mine[512 + lane] >> group & 1);
    async_commit();
  }
  async_wait<1>();
  __syncwarp();
  uint32_t* to = out + (blockIdx.x * 32 + lane) * 2 * words;
  for (int i = 0; i < words; ++i) to[i] = tile[0][(lane ^ 1) * words + i];
  async_wait<0>();
  __syncwarp();
  for (int i = 0; i < words; ++i) to[words + i] = tile[1][(lane ^ 1) * words + i];
}
extern "C" __global__ void probe_async_copy_4(const uint32_t* in, uint32_t* out) {
  copies<4>(in, out);
}
extern "C" __global__ void probe_async_copy_8(const uint32_t* in, uint32_t* out) {
  copies<8>(in, out);
}
extern "C" __global__ void probe_async_copy_16(const uint32_t* in, uint32_t* out) {
  copies<16>(in, out);
}

// ---------------------------------------------------------------- matrix products

#define CONVT3D_PROBE_MMA(type)                                                 \
  extern "C" __global__ void probe_mma_##type(const uint32_t* in, uint32_t* out) { \
    const int lane = blockIdx.x * 32 + threadIdx.x;                             \
    uint32_t a[4], b[2];                                                        \
    float c[4];                                                                 \
    for (int i = 0; i < 4; ++i) a[i] = in[10 * lane + i];                       \
    for (int i = 0; i < 2; ++i) b[i] = in[10 * lane + 4 + i];                   \
    for (int i = 0; i < 4; ++i) c[i] = float_of(in[10 * lane + 6 + i]);         \
    mma_##type(c, a, b);                                                        \
    for (int i = 0; i < 4; ++i) out[4 * lane + i] = bits_of(c[i]);              \
  }
CONVT3D_PROBE_MMA(tf32)
CONVT3D_PROBE_MMA(f16)
CONVT3D_PROBE_MMA(bf16)

#define CONVT3D_PROBE_MMA_K8(type)                                                      \
  extern "C" __global__ void probe_mma_##type##_k8(const uint32_t* in, uint32_t* out) { \
    const int lane = blockIdx.x * 32 + threadIdx.x;                                     \
    const uint32_t a[2] = {in[10 * lane], in[10 * lane + 1]}, b[1] = {in[10 * lane + 4]}; \
    float c[4];                                                                         \
    for (int i = 0; i < 4; ++i) c[i] = float_of(in[10 * lane + 6 + i]);                 \
    mma_##type##_k8(c, a, b);                                                           \
    for (int i = 0; i < 4; ++i) out[4 * lane + i] = bits_of(c[i]);                      \
  }
CONVT3D_PROBE_MMA_K8(f16)
CONVT3D_PROBE_MMA_K8(bf16)

// ---------------------------------------------------------------- CUDA's own warp functions

extern "C" __global__ void probe_shuffle(const uint32_t* in, uint32_t* out) {
  const int lane = blockIdx.x * 32 + threadIdx.x;
  const uint32_t value = in[2 * lane], from = in[2 * lane + 1];
  uint32_t* to = out + 8 * lane;
  to[0] = __shfl_sync(0xffffffffu, value, int(from));
  to[1] = __shfl_sync(0xffffffffu, value, int(from), 8);
  to[2] = __shfl_up_sync(0xffffffffu, value, 3);
  to[3] = __shfl_up_sync(0xffffffffu, value, 3, 16);
  to[4] = __shfl_down_sync(0xffffffffu, value, 5);
  to[5] = __shfl_xor_sync(0xffffffffu, value, 21);
  to[6] = __ballot_sync(0xffffffffu, int(value & 1));
  to[7] = uint32_t(__any_sync(0xffffffffu, value == in[64 * blockIdx.x])) |
          uint32_t(__all_sync(0xffffffffu, value != 0)) << 1;
}

}  // namespace convt3d
