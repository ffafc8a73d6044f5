// The element-wise steps that an epilogue can run on an output in a float32 register, one functor a
// kind; convt3d/fusion.py has their names and what PyTorch computes. NaN passes through all of them.
// epilogue/functions.cuh has the formulas.
//
// `Operand` numbers the pointers of a launch, `Scalar` its scalars; `From` is the type of an
// operand's elements.
#pragma once
#include "device/types.cuh"
#include "epilogue/functions.cuh"

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
    return relu(x.value);
  }
};

template <int Scalar>
struct LeakyRelu {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments& a, const StepValue& x) {
    return leaky_relu(x.value, a.scalar(Scalar));
  }
};

struct Sigmoid {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return sigmoid(x.value);
  }
};

struct Silu {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return silu(x.value);
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
    return gelu(x.value);
  }
};

struct GeluTanh {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return gelu_tanh(x.value);
  }
};

struct HardSwish {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return hardswish(x.value);
  }
};

struct Mish {
  static constexpr bool by_element = false;
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return mish(x.value);
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
    return clamp(x.value, low, high);
  }
};

}  // namespace convt3d
