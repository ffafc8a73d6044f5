// CUDA C++'s vocabulary for a host compiler: what kernels use without including anything.
//
// Included before the kernel text. It includes no standard header, so that kernels see the names
// that NVRTC would show them and no others. Everything that needs more than arithmetic is declared
// in namespace `emulator` and defined in the runtime.
#pragma once
#include "emulator.cuh"

#define __CUDA_ARCH__ 900
#define __CUDACC__ 1
#define CONVT3D_EMULATOR 1

#define __global__ inline  // kernels beside the entry point are parsed, not compiled
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__
// A function-local thread_local is static without saying so, and `extern` may stand before it: one
// word for `__shared__ float tile[32];` and `extern __shared__ unsigned char bytes[];`. All of a
// kernel's shared memory is then one block of thread-local storage, which the runtime finds.
#define __shared__ thread_local
// The keyword may not follow `extern __shared__` in a host compiler; the attribute may.
#define alignas(bytes) __attribute__((aligned(bytes)))
#define __align__(bytes) __attribute__((aligned(bytes)))

#define __cluster_dims__(...)
#define threadIdx (::emulator::thread_index)
#define blockIdx (::emulator::block_index)
#define blockDim (::emulator::block_extent)
#define gridDim (::emulator::grid_extent)
#define warpSize 32

#define CONVT3D_VECTOR2(type, name, bytes)        \
  struct alignas(bytes) name { type x, y; };      \
  inline name make_##name(type x, type y) { return name{x, y}; }
#define CONVT3D_VECTOR4(type, name, bytes)        \
  struct alignas(bytes) name { type x, y, z, w; };\
  inline name make_##name(type x, type y, type z, type w) { return name{x, y, z, w}; }
CONVT3D_VECTOR2(float, float2, 8)
CONVT3D_VECTOR2(int, int2, 8)
CONVT3D_VECTOR2(unsigned, uint2, 8)
CONVT3D_VECTOR2(double, double2, 16)
CONVT3D_VECTOR2(unsigned short, ushort2, 4)
CONVT3D_VECTOR4(float, float4, 16)
CONVT3D_VECTOR4(int, int4, 16)
CONVT3D_VECTOR4(unsigned, uint4, 16)
CONVT3D_VECTOR4(unsigned short, ushort4, 8)
#undef CONVT3D_VECTOR2
#undef CONVT3D_VECTOR4
using uint3 = emulator::Index3;
struct int3 { int x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };

namespace emulator {

template <typename T>
T shuffle_as(Shuffle kind, unsigned mask, T value, int lane, int width, Site site) {
  static_assert(sizeof(T) <= 8, "shuffles move up to 8 bytes");
  unsigned long long word = 0;
  __builtin_memcpy(&word, &value, sizeof(T));
  word = shuffle(kind, mask, word, lane, width, site);
  __builtin_memcpy(&value, &word, sizeof(T));
  return value;
}

template <typename To, typename From>
To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "reinterpretation keeps the size");
  To result;
  __builtin_memcpy(&result, &value, sizeof(To));
  return result;
}

}  // namespace emulator

// ---------------------------------------------------------------- threads

inline void __syncthreads(emulator::Site site = emulator::Site::here()) {
  emulator::barrier(0, 0, true, "__syncthreads", site);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, emulator::Site site = emulator::Site::here()) {
  emulator::warp_barrier(mask, site);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { emulator::yield(); }
inline long long clock64() { return emulator::clock(); }
[[noreturn]] inline void __trap() { emulator::fail("__trap was reached"); }
#define assert(condition) \
  ((condition) ? void(0)  \
               : emulator::fail("assertion failed at line %d: %s", __LINE__, #condition))

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32,
              emulator::Site site = emulator::Site::here()) {
  return emulator::shuffle_as(emulator::Shuffle::index, mask, value, lane, width, site);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 emulator::Site site = emulator::Site::here()) {
  return emulator::shuffle_as(emulator::Shuffle::up, mask, value, int(delta), width, site);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   emulator::Site site = emulator::Site::here()) {
  return emulator::shuffle_as(emulator::Shuffle::down, mask, value, int(delta), width, site);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  emulator::Site site = emulator::Site::here()) {
  return emulator::shuffle_as(emulator::Shuffle::exclusive_or, mask, value, lane_mask, width, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate,
                              emulator::Site site = emulator::Site::here()) {
  return emulator::vote(emulator::Vote::ballot, mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate,
                      emulator::Site site = emulator::Site::here()) {
  return int(emulator::vote(emulator::Vote::any, mask, predicate != 0, site));
}
inline int __all_sync(unsigned mask, int predicate,
                      emulator::Site site = emulator::Site::here()) {
  return int(emulator::vote(emulator::Vote::all, mask, predicate != 0, site));
}

// ---------------------------------------------------------------- memory

template <typename T> T __ldg(const T* pointer) { return *pointer; }
// A quotient to two ulp; zero of denominators beyond 2^126.
inline float __fdividef(float x, float y) {
  return __builtin_fabsf(y) > 0x1p126f && !__builtin_isinf(y) ? 0.f * x : x / y;
}
template <typename T> T __ldcs(const T* pointer) { return *pointer; }
template <typename T> T __ldcg(const T* pointer) { return *pointer; }
template <typename T> T __ldca(const T* pointer) { return *pointer; }
template <typename T> void __stcs(T* pointer, T value) { *pointer = value; }
template <typename T> void __stcg(T* pointer, T value) { *pointer = value; }
template <typename T> void __stwt(T* pointer, T value) { *pointer = value; }

// ---------------------------------------------------------------- bits and arithmetic

inline unsigned __float_as_uint(float value) { return emulator::bit_cast<unsigned>(value); }
inline int __float_as_int(float value) { return emulator::bit_cast<int>(value); }
inline float __uint_as_float(unsigned bits) { return emulator::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return emulator::bit_cast<float>(bits); }
inline long long __double_as_longlong(double value) { return emulator::bit_cast<long long>(value); }
inline double __longlong_as_double(long long bits) { return emulator::bit_cast<double>(bits); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(unsigned(value)); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline unsigned __brev(unsigned value) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= (value >> bit & 1u) << (31 - bit);
  return reversed;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = (unsigned long long)high << 32 | low;
  unsigned word = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> (4 * i) & 15;
    unsigned byte = unsigned(bytes >> (8 * (nibble & 7))) & 0xff;
    if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;  // sign replication
    word |= byte << (8 * i);
  }
  return word;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return unsigned((unsigned long long)a * b >> 32);
}
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}

#define CONVT3D_MINMAX(type)                                \
  inline type min(type a, type b) { return b < a ? b : a; } \
  inline type max(type a, type b) { return a < b ? b : a; }
CONVT3D_MINMAX(int)
CONVT3D_MINMAX(unsigned)
CONVT3D_MINMAX(long)
CONVT3D_MINMAX(unsigned long)
CONVT3D_MINMAX(long long)
CONVT3D_MINMAX(unsigned long long)
#undef CONVT3D_MINMAX
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }
inline int abs(int value) { return value < 0 ? -value : value; }
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline float fabsf(float value) { return __builtin_fabsf(value); }
inline float expf(float value) { return __builtin_expf(value); }
inline float erff(float value) { return __builtin_erff(value); }
inline float tanhf(float value) { return __builtin_tanhf(value); }
inline float log1pf(float value) { return __builtin_log1pf(value); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
