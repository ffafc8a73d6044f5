// The element-wise steps that an epilogue can run on an output in a float32 register, one functor a
// kind; convt3d/fusion.py has their names and what PyTorch computes. NaN passes through all of them.
// A float32 result is within a few ulp of PyTorch's: exponentials are the accurate ones of CUDA's
// math library, quotients those of two ulp, whose denominators are 1 and more.
//
// `Operand` numbers the pointers of a launch, `Scalar` its scalars; `From` is the type of an
// operand's elements.
#pragma once
#include "device/types.cuh"

namespace convt3d {

constexpr int most_step_operands = 5;  // of four steps, and a bias

struct StepScalars {
  float value[8];  // of four steps
};

/// What the steps of a launch read beside the output.
struct StepArguments {
  const void* operand[most_step_operands];
  StepScalars scalars;

  template <typename From>
  CONVT3D_DEVICE float load(int number, int64_t at) const {
    return From::load(__ldg(static_cast<const typename From::Storage*>(operand[number]) + at));
  }
  CONVT3D_DEVICE float scalar(int number) const { return scalars.value[number]; }
};

/// An output's value, its channel, its element of the target, and the value that is held.
struct StepValue {
  float value;
  int channel;
  int64_t element;
  float held;
};

template <int Operand, typename From>
struct Scale {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments& a, const StepValue& x) {
    return x.value * a.load<From>(Operand, x.channel);
  }
};

template <int Operand, typename From>
struct Shift {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments& a, const StepValue& x) {
    return x.value + a.load<From>(Operand, x.channel);
  }
};

/// A channel's bias, where no kernel adds it to its sums: the output as it comes, which is held.
template <int Operand, typename From>
struct Bias {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments& a, StepValue& x) {
    x.held = x.value + a.load<From>(Operand, x.channel);
    return x.held;
  }
};

template <int Operand, typename From>
struct Add {
  static constexpr bool by_element = true;
  CONVT3D_DEVICE static float run(const StepArguments& a, const StepValue& x) {
    return x.value + a.load<From>(Operand, x.element);
  }
};

template <int Operand, typename From>
struct Mul {
  static constexpr bool by_element = true;
  CONVT3D_DEVICE static float run(const StepArguments& a, const StepValue& x) {
    return x.value * a.load<From>(Operand, x.element);
  }
};

template <int Scalar>
struct AddScalar {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments& a, const StepValue& x) {
    return x.value + a.scalar(Scalar);
  }
};

template <int Scalar>
struct MulScalar {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments& a, const StepValue& x) {
    return x.value * a.scalar(Scalar);
  }
};

struct Relu {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return x.value < 0.f ? 0.f : x.value;
  }
};

template <int Scalar>
struct LeakyRelu {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments& a, const StepValue& x) {
    return x.value > 0.f ? x.value : x.value * a.scalar(Scalar);
  }
};

struct Sigmoid {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float of(float x) { return __fdividef(1.f, 1.f + expf(-x)); }
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) { return of(x.value); }
};

struct Silu {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return __fdividef(x.value, 1.f + expf(-x.value));
  }
};

struct Tanh {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return tanhf(x.value);
  }
};

struct Gelu {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    constexpr float root_half = 0.70710678118654752440f;
    return x.value * 0.5f * (1.f + erff(x.value * root_half));
  }
};

struct GeluTanh {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    // (1 + tanh(u)) / 2 is the sigmoid of 2u.
    constexpr float twice_root_2_by_pi = 1.59576912160573071176f, cubic = 0.044715f;
    const float twice = twice_root_2_by_pi * (x.value + cubic * (x.value * x.value * x.value));
    return __fdividef(x.value, 1.f + expf(-twice));
  }
};

struct HardSwish {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return x.value * fminf(fmaxf(x.value + 3.f, 0.f), 6.f) * (1.f / 6.f);
  }
};

struct Mish {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    // tanh(log(1 + e)) is ((1 + e)^2 - 1) / ((1 + e)^2 + 1); 1 to rounding where e is large.
    const float e = expf(fminf(x.value, 20.f)), square = e * (e + 2.f);
    return x.value * __fdividef(square, square + 2.f);
  }
};

struct Hold {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments&, StepValue& x) {
    x.held = x.value;
    return x.value;
  }
};

struct AddHeld {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return x.value + x.held;
  }
};

struct MulHeld {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return x.value * x.held;
  }
};

/// Between two scalars; where the lower one is above the upper one, that one.
template <int Scalar>
struct Clamp {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments& a, const StepValue& x) {
    const float low = a.scalar(Scalar), high = a.scalar(Scalar + 1);
    // A comparison with NaN is false: NaN stays, of the value and of the bounds.
    const float above = x.value >= low || x.value != x.value ? x.value : low;
    return above <= high || above != above ? above : high;
  }
};

}  // namespace convt3d
