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
  template <typename From, int Count>
  CONVT3D_DEVICE void load_row(int number, int64_t at, float (&value)[Count]) const {
    convt3d::load_row<From>(static_cast<const typename From::Storage*>(operand[number]) + at,
                            value);
  }
  CONVT3D_DEVICE float scalar(int number) const { return scalars.value[number]; }
};

/// What steps read of tensors of the target's shape, for `Count` neighbouring outputs: of operand i
/// `value[i]`. Steps that read none leave theirs unset.
template <int Count>
struct StepTensors {
  float value[most_step_operands][Count];
};

/// An output's value, its channel, the value that is held, and what is read of tensors.
struct StepValue {
  float value;
  int channel;
  float held;
  float tensor[most_step_operands];
};

/// A step that reads no tensor of the target's shape.
struct StepAlone {
  static constexpr bool by_element = false;
  template <int Count>
  CONVT3D_DEVICE static void read(const StepArguments&, int64_t, StepTensors<Count>&) {}
};

/// A step that reads such a tensor.
template <int Operand, typename From>
struct StepOfTensor {
  static constexpr bool by_element = true;
  template <int Count>
  CONVT3D_DEVICE static void read(const StepArguments& a, int64_t element,
                                  StepTensors<Count>& tensors) {
    a.load_row<From>(Operand, element, tensors.value[Operand]);
  }
};

template <int Operand, typename From>
struct Scale : StepAlone {
  CONVT3D_DEVICE static float run(const StepArguments& a, const StepValue& x) {
    return x.value * a.load<From>(Operand, x.channel);
  }
};

template <int Operand, typename From>
struct Shift : StepAlone {
  CONVT3D_DEVICE static float run(const StepArguments& a, const StepValue& x) {
    return x.value + a.load<From>(Operand, x.channel);
  }
};

template <int Operand, typename From>
struct Add : StepOfTensor<Operand, From> {
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return x.value + x.tensor[Operand];
  }
};

template <int Operand, typename From>
struct Mul : StepOfTensor<Operand, From> {
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return x.value * x.tensor[Operand];
  }
};

template <int Scalar>
struct AddScalar : StepAlone {
  CONVT3D_DEVICE static float run(const StepArguments& a, const StepValue& x) {
    return x.value + a.scalar(Scalar);
  }
};

template <int Scalar>
struct MulScalar : StepAlone {
  CONVT3D_DEVICE static float run(const StepArguments& a, const StepValue& x) {
    return x.value * a.scalar(Scalar);
  }
};

struct Relu : StepAlone {
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return x.value < 0.f ? 0.f : x.value;
  }
};

template <int Scalar>
struct LeakyRelu : StepAlone {
  CONVT3D_DEVICE static float run(const StepArguments& a, const StepValue& x) {
    return x.value > 0.f ? x.value : x.value * a.scalar(Scalar);
  }
};

struct Sigmoid : StepAlone {
  CONVT3D_DEVICE static float of(float x) { return __fdividef(1.f, 1.f + expf(-x)); }
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) { return of(x.value); }
};

struct Silu : StepAlone {
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return __fdividef(x.value, 1.f + expf(-x.value));
  }
};

struct Tanh : StepAlone {
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return tanhf(x.value);
  }
};

struct Gelu : StepAlone {
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    constexpr float root_half = 0.70710678118654752440f;
    return x.value * 0.5f * (1.f + erff(x.value * root_half));
  }
};

struct GeluTanh : StepAlone {
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    // (1 + tanh(u)) / 2 is the sigmoid of 2u.
    constexpr float twice_root_2_by_pi = 1.59576912160573071176f, cubic = 0.044715f;
    const float twice = twice_root_2_by_pi * (x.value + cubic * (x.value * x.value * x.value));
    return __fdividef(x.value, 1.f + expf(-twice));
  }
};

struct HardSwish : StepAlone {
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return x.value * fminf(fmaxf(x.value + 3.f, 0.f), 6.f) * (1.f / 6.f);
  }
};

struct Mish : StepAlone {
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    // tanh(log(1 + e)) is ((1 + e)^2 - 1) / ((1 + e)^2 + 1); 1 to rounding where e is large.
    const float e = expf(fminf(x.value, 20.f)), square = e * (e + 2.f);
    return x.value * __fdividef(square, square + 2.f);
  }
};

struct Hold : StepAlone {
  CONVT3D_DEVICE static float run(const StepArguments&, StepValue& x) {
    x.held = x.value;
    return x.value;
  }
};

struct AddHeld : StepAlone {
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return x.value + x.held;
  }
};

struct MulHeld : StepAlone {
  CONVT3D_DEVICE static float run(const StepArguments&, const StepValue& x) {
    return x.value * x.held;
  }
};

/// Between two scalars; where the lower one is above the upper one, that one.
template <int Scalar>
struct Clamp : StepAlone {
  CONVT3D_DEVICE static float run(const StepArguments& a, const StepValue& x) {
    const float low = a.scalar(Scalar), high = a.scalar(Scalar + 1);
    // A comparison with NaN is false: NaN stays, of the value and of the bounds.
    const float above = x.value >= low || x.value != x.value ? x.value : low;
    return above <= high || above != above ? above : high;
  }
};

}  // namespace convt3d
