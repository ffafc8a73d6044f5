// Address spaces. Shared memory is the kernel's thread-local storage: arrays of static size, and
// one block for dynamic shared memory (defined by the harness under the kernel's own names for it).
// Global memory is the launch's tensors and nothing else.
#include <link.h>

#include <algorithm>
#include <cstring>

#include "machine.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

extern "C" {
extern __thread unsigned char emulated_dynamic_shared[];
void emulated_invoke(void** values);
}

namespace emulator {
namespace {

unsigned char* shared_low;  // of the whole thread-local block
std::size_t shared_size;
unsigned char* dynamic_low;
std::uintptr_t image_low, image_high;  // the kernel's code and constants

int inspect_module(dl_phdr_info* info, std::size_t, void*) {
  const auto probe = reinterpret_cast<std::uintptr_t>(&emulated_invoke);
  std::uintptr_t low = ~std::uintptr_t(0), high = 0;
  std::size_t thread_local_size = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type == PT_LOAD) {
      low = std::min<std::uintptr_t>(low, info->dlpi_addr + header.p_vaddr);
      high = std::max<std::uintptr_t>(high, info->dlpi_addr + header.p_vaddr + header.p_memsz);
    } else if (header.p_type == PT_TLS) {
      thread_local_size = header.p_memsz;
    }
  }
  if (probe < low || probe >= high) return 0;
  image_low = low;
  image_high = high;
  shared_low = static_cast<unsigned char*>(info->dlpi_tls_data);
  shared_size = thread_local_size;
  return 1;
}

bool on_stack(std::uintptr_t address) {
  return address - reinterpret_cast<std::uintptr_t>(self()->stack) < stack_bytes;
}

/// The tensor nearest to an address that lies in none, for the error message.
std::string neighbourhood(std::uintptr_t address) {
  const Region* nearest = nullptr;
  std::uintptr_t distance = ~std::uintptr_t(0);
  for (const Region& region : machine.regions) {
    const auto low = reinterpret_cast<std::uintptr_t>(region.base);
    const std::uintptr_t gap = address < low ? low - address : address - (low + region.bytes) + 1;
    if (gap < distance) distance = gap, nearest = &region;
  }
  if (!nearest) return "there is no tensor";
  const long long offset = (long long)(address - reinterpret_cast<std::uintptr_t>(nearest->base));
  return "byte " + std::to_string(offset) + " of argument " + std::to_string(nearest->argument) +
         ", which has " + std::to_string(nearest->bytes) + " bytes";
}

}  // namespace

void find_shared_memory() {
  dynamic_low = emulated_dynamic_shared;  // also allocates this thread's block
  dl_iterate_phdr(inspect_module, nullptr);
}

void begin_launch_memory() {
  std::sort(machine.regions.begin(), machine.regions.end(),
            [](const Region& a, const Region& b) { return a.base < b.base; });
  if (machine.check_races)
    begin_launch_races(int(machine.threads.size()), int(machine.warps.size()), shared_size);
}

void begin_block_memory() {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(shared_low, shared_size);
#endif
  std::memset(shared_low, poison, shared_size);
#if defined(__SANITIZE_ADDRESS__)
  for (int rank = 0; rank < machine.cluster; ++rank)
    ASAN_POISON_MEMORY_REGION(dynamic_low + rank * dynamic_capacity + machine.shared_bytes,
                              dynamic_capacity - machine.shared_bytes);
#endif
  if (machine.check_races) begin_block_races();
}

unsigned shared_address(const void* pointer) {
  const std::size_t offset = std::size_t(static_cast<const unsigned char*>(pointer) - shared_low);
  if (offset > shared_size)
    fail_at(__builtin_return_address(0), "shared_address of %p, which is not in shared memory",
            pointer);
  return shared_window + unsigned(offset) + unsigned(self()->rank * dynamic_capacity);
}

// Dynamic shared memory of each block of a cluster follows that of the one before.
unsigned shared_address_of(unsigned address, unsigned rank) {
  if (int(rank) >= machine.cluster) fail("there is no block %u in the cluster", rank);
  touch_block(self(), int(rank), __builtin_return_address(0));
  return address + (rank - unsigned(self()->rank)) * unsigned(dynamic_capacity);
}

std::size_t shared_offset(const void* pointer) {
  return std::size_t(static_cast<const unsigned char*>(pointer) - shared_low);
}

unsigned char* shared_pointer(unsigned address, int bytes, const char* what, const void* pc) {
  const std::size_t offset = address - shared_window;
  unsigned char* pointer = shared_low + offset;
  if (address < shared_window || offset + bytes > shared_size)
    fail_at(pc, "%s: shared address %#x is out of bounds", what, address);
  if (address % bytes != 0)
    fail_at(pc, "%s: shared address %#x is not aligned to %d bytes", what, address, bytes);
  long long dynamic = pointer - dynamic_low;
  const bool is_dynamic =
      dynamic >= 0 && std::size_t(dynamic) < machine.cluster * dynamic_capacity;
  if (is_dynamic) dynamic %= dynamic_capacity;
  if (is_dynamic && dynamic + bytes > (long long)machine.shared_bytes)
    fail_at(pc, "%s: byte %lld of dynamic shared memory is out of bounds (the launch has %u bytes)",
            what, dynamic, machine.shared_bytes);
  return pointer;
}

void check_global(const void* pointer, int bytes, bool write, const char* what, const void* pc) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (address % bytes != 0)
    fail_at(pc, "%s: global address %p is not aligned to %d bytes", what, pointer, bytes);
  for (Region& region : machine.regions) {
    const std::uintptr_t offset = address - reinterpret_cast<std::uintptr_t>(region.base);
    if (offset >= region.bytes) continue;
    if (offset + bytes > region.bytes) break;
    region.touched |= write ? 2 : 1;
    if (machine.check_races) touch_global(self(), region, offset, bytes, write, pc);
    return;
  }
  fail_at(pc, "%s out of bounds: %s", what, neighbourhood(address).c_str());
}

void dependency_wait() {
  machine.waited = true;
  if (machine.check_races) learn_of_earlier_launches(self());
}

void shared_read(unsigned address, void* words, int bytes) {
  const void* pc = __builtin_return_address(0);
  const unsigned char* pointer = shared_pointer(address, bytes, "load_shared", pc);
  if (machine.check_races) touch_shared(self(), shared_offset(pointer), bytes, false, pc);
  std::memcpy(words, pointer, bytes);
}

void shared_write(unsigned address, const void* words, int bytes) {
  const void* pc = __builtin_return_address(0);
  unsigned char* pointer = shared_pointer(address, bytes, "store_shared", pc);
  if (machine.check_races) touch_shared(self(), shared_offset(pointer), bytes, true, pc);
  std::memcpy(pointer, words, bytes);
}

// ---------------------------------------------------------------- cp.async
// The destination is spoiled when the copy is issued and filled when its issuer waits for it: the
// two ends of the time in which the hardware may do it.

void async_copy(unsigned destination, const void* source, int bytes, bool valid) {
  const void* pc = __builtin_return_address(0);
  unsigned char* pointer = shared_pointer(destination, bytes, "async_copy", pc);
  if (valid) {
    check_global(source, bytes, false, "async_copy", pc);
  } else if (reinterpret_cast<std::uintptr_t>(source) % bytes != 0) {
    fail_at(pc, "async_copy: global address %p is not aligned to %d bytes", source, bytes);
  }
  Thread* thread = self();
  if (machine.check_races) mark_in_flight(thread, shared_offset(pointer), bytes, pc);
  std::memset(pointer, poison, bytes);
  thread->open_copies.push_back({pointer, static_cast<const unsigned char*>(source), bytes, valid});
}

void async_commit() {
  Thread* thread = self();
  thread->copy_groups.push_back(std::move(thread->open_copies));
  thread->open_copies.clear();
}

void async_wait(int pending) {
  Thread* thread = self();
  while (int(thread->copy_groups.size()) > pending) {
    for (const AsyncCopy& copy : thread->copy_groups.front()) {
      if (copy.valid) std::memcpy(copy.destination, copy.source, copy.bytes);
      else std::memset(copy.destination, 0, copy.bytes);
      if (machine.check_races) mark_landed(thread, shared_offset(copy.destination), copy.bytes);
    }
    thread->copy_groups.pop_front();
  }
}

// ---------------------------------------------------------------- plain C++ accesses
// The kernel is compiled with thread-sanitizer instrumentation, whose calls land here.

namespace {
void plain_access(const void* pointer, int bytes, bool aligned, bool write, const void* pc) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (!current) return;
  if (on_stack(address)) {
    if (!current->held.empty()) check_registers(current, pointer, bytes, write, pc);
    return;
  }
  const std::size_t offset = shared_offset(pointer);
  if (offset < shared_size) {
    if (machine.cluster > 1)
      fail_at(pc, "in a cluster, shared memory is emulated by address only, not through pointers");
    shared_pointer(unsigned(offset) + shared_window, aligned ? bytes : 1,
                   write ? "store to shared memory" : "load from shared memory", pc);
    if (!aligned)
      shared_pointer(unsigned(offset) + shared_window + bytes - 1, 1, "shared memory", pc);
    if (machine.check_races) touch_shared(self(), offset, bytes, write, pc);
    return;
  }
  if (address >= image_low && address < image_high) {
    if (write) fail_at(pc, "store to constant or module memory at %p", pointer);
    return;
  }
  const char* what = write ? "global store" : "global load";
  if (aligned) {
    check_global(pointer, bytes, write, what, pc);
  } else {
    for (int i = 0; i < bytes; ++i)
      check_global(static_cast<const char*>(pointer) + i, 1, write, what, pc);
  }
}
}  // namespace
}  // namespace emulator

#if !defined(__SANITIZE_ADDRESS__)
#define EMULATOR_HOOKS(bytes)                                                             \
  void __tsan_read##bytes(void* p) {                                                      \
    emulator::plain_access(p, bytes, true, false, __builtin_return_address(0));           \
  }                                                                                       \
  void __tsan_write##bytes(void* p) {                                                     \
    emulator::plain_access(p, bytes, true, true, __builtin_return_address(0));            \
  }                                                                                       \
  void __tsan_unaligned_read##bytes(void* p) {                                            \
    emulator::plain_access(p, bytes, false, false, __builtin_return_address(0));          \
  }                                                                                       \
  void __tsan_unaligned_write##bytes(void* p) {                                           \
    emulator::plain_access(p, bytes, false, true, __builtin_return_address(0));           \
  }
extern "C" {
EMULATOR_HOOKS(1)
EMULATOR_HOOKS(2)
EMULATOR_HOOKS(4)
EMULATOR_HOOKS(8)
EMULATOR_HOOKS(16)
void __tsan_read_range(void* p, unsigned long bytes) {
  emulator::plain_access(p, int(bytes), false, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long bytes) {
  emulator::plain_access(p, int(bytes), false, true, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
#endif
