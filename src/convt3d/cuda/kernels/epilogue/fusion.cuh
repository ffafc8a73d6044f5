// What an epilogue does with the sum of an output before it is rounded: it adds the bias, then runs
// the steps of a fusion.
//
// CONVT3D_FUSION lists the steps of a kernel (epilogue/steps.cuh), such as `Shift<0, Float32>, Relu`.
// Where it is not defined nothing of this is left: three macros, which add a kernel's last
// parameters, the last member of its arguments, and that member's value, are empty.
//
// CONVT3D_TENSOR_CHANNELS is the number of channels of a tensor that the target is a slice of.
#pragma once
#include "epilogue/steps.cuh"

namespace convt3d {

template <typename... Steps>
struct StepChain {
  static constexpr bool runs = true;
  /// Whether a step reads a tensor of the target's shape.
  static constexpr bool by_element = (Steps::by_element || ...);
  StepArguments arguments;

  CONVT3D_DEVICE float operator()(float value, int channel, int64_t element) const {
    StepValue x{value, channel, element, value};
    ((x.value = Steps::run(arguments, x)), ...);
    return x.value;
  }
};

/// No steps.
template <>
struct StepChain<> {
  static constexpr bool runs = false, by_element = false;
};

#ifdef CONVT3D_FUSION
using Fusion = StepChain<CONVT3D_FUSION>;
#define CONVT3D_FUSION_PARAMETERS                                                             \
  , const void *operand0, const void *operand1, const void *operand2, const void *operand3,   \
      const void *operand4, const convt3d::StepScalars scalars
#define CONVT3D_FUSION_MEMBER Fusion fusion;
#define CONVT3D_FUSION_ARGUMENT \
  , convt3d::Fusion { {{operand0, operand1, operand2, operand3, operand4}, scalars} }
#else
using Fusion = StepChain<>;
#define CONVT3D_FUSION_PARAMETERS
#define CONVT3D_FUSION_MEMBER
#define CONVT3D_FUSION_ARGUMENT
#endif

/// A base that has `held` where a fusion has steps, else nothing.
template <typename Held, bool Runs = Fusion::runs>
struct WhereFused {
  Held held;
};
template <typename Held>
struct WhereFused<Held, false> {};

#ifndef CONVT3D_TENSOR_CHANNELS
#define CONVT3D_TENSOR_CHANNELS 0
#endif
/// Channels of the tensor that the target's strides are of: its own, or those of a tensor that it
/// is a slice of.
CONVT3D_CONSTEXPR int64_t tensor_channels(int64_t own) {
  return CONVT3D_TENSOR_CHANNELS > 0 ? CONVT3D_TENSOR_CHANNELS : own;
}

/// The bias of a group's channel; 0 where there is no such channel, or no bias.
template <typename Config>
CONVT3D_DEVICE float bias_at(const typename Config::Storage* bias, int group, int channel) {
  if constexpr (Config::bias) {
    if (channel < Config::target_channels)
      return Config::Type::load(__ldg(bias + group * Config::target_channels + channel));
  }
  return 0.f;
}
/// Adding nothing would still be an instruction, which makes -0 positive.
template <typename Config>
CONVT3D_DEVICE float biased(float value, float bias) {
  return Config::bias ? value + bias : value;
}

/// Two neighbouring channels of a position, as far as there are any; `Together`: as one store.
template <typename Type, bool Together>
CONVT3D_DEVICE void store_channels(typename Type::Storage* to, const float (&value)[2], int left) {
  if constexpr (Together) {
    if (left > 0) store_two<Type>(to, value[0], value[1]);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (i < left) store_streaming(to + i, Type::store(value[i]));
  }
}

/// The output whose sum, with the bias, is `value`.
///
/// `channel` is that of its group, `element` counts from the target's first one. `exists`: whether
/// the target has it; else nothing is read at `element`. Calls stand behind `if constexpr
/// (Fusion::runs)`.
template <typename Config>
CONVT3D_DEVICE float fused(const Fusion& fusion, float value, int group, int channel,
                           int64_t element, bool exists = true) {
  constexpr int last = Config::groups * Config::target_channels - 1;
  if (Fusion::by_element && !exists) return value;
  return fusion(value, min(group * Config::target_channels + channel, last), element);
}

}  // namespace convt3d
