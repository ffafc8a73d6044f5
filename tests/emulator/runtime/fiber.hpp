// Switching between fibers: registers that a call preserves, and the stack pointer.
#pragma once
#include <cstdint>

#include "machine.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.hidden emulator_switch
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, . - emulator_switch
)");

namespace emulator {
/// A stack that, when switched to, calls `entry`, which must not return.
inline void* prepare_context(unsigned char* top, void (*entry)()) {
  auto** slot = reinterpret_cast<void**>(reinterpret_cast<std::uintptr_t>(top) & ~std::uintptr_t(15));
  *--slot = nullptr;  // entry's return address: it has none
  *--slot = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--slot = nullptr;
  return slot;
}
}  // namespace emulator

#else  // any other processor: slower, with a system call per switch
#include <ucontext.h>

#include <map>
namespace emulator {
inline std::map<void*, ucontext_t>& contexts() {
  static std::map<void*, ucontext_t> all;
  return all;
}
inline void* prepare_context(unsigned char* top, void (*entry)()) {
  ucontext_t& context = contexts()[top];
  getcontext(&context);
  context.uc_stack.ss_sp = top - stack_bytes;
  context.uc_stack.ss_size = stack_bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
  return &context;
}
}  // namespace emulator
inline void emulator_switch(void** save, void* load) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(load));
}
#endif
