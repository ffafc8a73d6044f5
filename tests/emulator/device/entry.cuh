// How the runtime calls a kernel: arguments come as an array of pointers, as in cuLaunchKernel.
// Included after the kernel text; CONVT3D_EMULATED_KERNEL names the entry point.
#pragma once

namespace convt3d {}

// The launcher's own memory is no business of the kernel's: reads of it are not checked.
#define CONVT3D_UNCHECKED __attribute__((no_sanitize("thread")))

namespace emulator {
namespace entry {

template <typename T> struct Plain { using Type = T; };
template <typename T> struct Plain<const T> { using Type = T; };

template <typename T> struct Description {
  static constexpr Parameter value = Parameter{__is_class(T) ? 's' : 'i', int(sizeof(T))};
};
template <> struct Description<float> { static constexpr Parameter value = Parameter{'f', 4}; };
template <> struct Description<double> { static constexpr Parameter value = Parameter{'f', 8}; };
template <typename T> struct Description<T*> {
  static constexpr Parameter value = Parameter{'p', int(sizeof(T*))};
};
template <typename T> struct Description<T* __restrict__> {
  static constexpr Parameter value = Parameter{'p', int(sizeof(T*))};
};

template <int...> struct Positions {};
template <int Count, int... Tail>
struct MakePositions : MakePositions<Count - 1, Count - 1, Tail...> {};
template <int... All> struct MakePositions<0, All...> { using Type = Positions<All...>; };

template <typename... Arguments, int... Position>
CONVT3D_UNCHECKED void call(void (*kernel)(Arguments...), void** values, Positions<Position...>) {
  asm volatile("" : "+r"(kernel));  // or it would be inlined here, unchecked
  kernel(*static_cast<typename Plain<Arguments>::Type*>(values[Position])...);
}

template <typename... Arguments>
struct Kernel {
  static constexpr int count = sizeof...(Arguments);
  CONVT3D_UNCHECKED static void invoke(void (*kernel)(Arguments...), void** values) {
    call(kernel, values, typename MakePositions<count>::Type{});
  }
  CONVT3D_UNCHECKED static int describe_parameters(Parameter* out, int capacity) {
    const Parameter all[count + 1] = {Description<typename Plain<Arguments>::Type>::value...,
                                      Parameter{0, 0}};
    for (int i = 0; i < count && i < capacity; ++i) out[i] = all[i];
    return count;
  }
};
template <typename... Arguments>
constexpr Kernel<Arguments...> kernel_of(void (*)(Arguments...)) { return {}; }

}  // namespace entry
}  // namespace emulator

namespace emulated_kernel {
using namespace convt3d;
inline constexpr auto pointer = &CONVT3D_EMULATED_KERNEL;
}  // namespace emulated_kernel

extern "C" CONVT3D_UNCHECKED void emulated_invoke(void** values) {
  decltype(emulator::entry::kernel_of(emulated_kernel::pointer))::invoke(emulated_kernel::pointer,
                                                                         values);
}
extern "C" CONVT3D_UNCHECKED __attribute__((visibility("default"))) int emulated_parameters(
    emulator::Parameter* out, int capacity) {
  return decltype(emulator::entry::kernel_of(emulated_kernel::pointer))::describe_parameters(
      out, capacity);
}
