// Element types as tags: storage, conversion to and from float, and how many channels fill one
// 32-bit word of an operand (a TF32 value, or a pair of 16-bit values).
#pragma once
#include "device/ptx.cuh"

namespace convt3d {

struct Float32 {
  using Storage = float;
  static constexpr int channels_per_word = 1;
  CONVT3D_DEVICE static float load(Storage value) { return value; }
  CONVT3D_DEVICE static Storage store(float value) { return value; }
  CONVT3D_DEVICE static uint32_t word(Storage low, Storage) { return bits_of(low); }
};

struct Float16 {
  using Storage = uint16_t;
  static constexpr int channels_per_word = 2;
  CONVT3D_DEVICE static float load(Storage value) { return float_from_f16(value); }
  CONVT3D_DEVICE static Storage store(float value) { return f16_from_float(value); }
  CONVT3D_DEVICE static uint32_t pack(float low, float high) { return pack_f16(low, high); }
  CONVT3D_DEVICE static uint32_t word(Storage low, Storage high) {
    return uint32_t(low) | uint32_t(high) << 16;
  }
};

struct BFloat16 {
  using Storage = uint16_t;
  static constexpr int channels_per_word = 2;
  CONVT3D_DEVICE static float load(Storage value) { return float_from_bf16(value); }
  CONVT3D_DEVICE static Storage store(float value) { return bf16_from_float(value); }
  CONVT3D_DEVICE static uint32_t pack(float low, float high) { return pack_bf16(low, high); }
  CONVT3D_DEVICE static uint32_t word(Storage low, Storage high) {
    return uint32_t(low) | uint32_t(high) << 16;
  }
};

/// Two neighbouring values as one streaming store; the address is aligned to both.
template <typename Type>
CONVT3D_DEVICE void store_two(typename Type::Storage* to, float low, float high) {
  if constexpr (Type::channels_per_word == 2)
    store_streaming(reinterpret_cast<uint32_t*>(to), Type::pack(low, high));
  else
    store_streaming(reinterpret_cast<float2*>(to), make_float2(low, high));
}

/// A row of 1, 2, 4 or 8 values (up to 16 bytes) as one streaming store; aligned to its size.
template <typename Type, int Count>
CONVT3D_DEVICE void store_row(typename Type::Storage* to, const float (&value)[Count]) {
  static_assert(Count * int(sizeof(*to)) <= 16, "one store moves 16 bytes");
  if constexpr (Count == 1) {
    store_streaming(to, Type::store(value[0]));
  } else if constexpr (Count == 2) {
    store_two<Type>(to, value[0], value[1]);
  } else if constexpr (Type::channels_per_word == 1) {
    store_streaming(reinterpret_cast<float4*>(to),
                    make_float4(value[0], value[1], value[2], value[3]));
  } else if constexpr (Count == 4) {
    store_streaming(reinterpret_cast<uint2*>(to), make_uint2(Type::pack(value[0], value[1]),
                                                             Type::pack(value[2], value[3])));
  } else {
    store_streaming(reinterpret_cast<uint4*>(to),
                    make_uint4(Type::pack(value[0], value[1]), Type::pack(value[2], value[3]),
                               Type::pack(value[4], value[5]), Type::pack(value[6], value[7])));
  }
}

/// `Count` neighbouring 16-bit values, loaded at once; aligned to their size.
template <int Count>
struct HalfVector {
  static constexpr int words = Count == 1 ? 1 : Count / 2;
  uint32_t word[words];

  CONVT3D_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < words; ++i) word[i] = 0;
  }
  CONVT3D_DEVICE void load(const uint16_t* from) {
    if constexpr (Count == 1) {
      word[0] = __ldg(from);
    } else if constexpr (Count == 2) {
      word[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
    } else if constexpr (Count == 4) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(from));
      word[0] = v.x, word[1] = v.y;
    } else {
      static_assert(Count == 8, "a vector holds 1, 2, 4 or 8 values");
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
      word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    }
  }
  /// Value i of this vector in the low half, value i of `other` in the high half.
  CONVT3D_DEVICE uint32_t pair(const HalfVector& other, int i) const {
    return permute_bytes(word[i / 2], other.word[i / 2], i % 2 ? 0x7632 : 0x5410);
  }
};

}  // namespace convt3d
