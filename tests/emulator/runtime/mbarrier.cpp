// mbarriers, and what completes on them: TMA boxes and bulk copies.
//
// A copy spoils its destination when it is issued, and lands when somebody waits for its barrier:
// nobody sees the data without waiting. Stores by TMA take place when their group is waited for.
#include <algorithm>
#include <cstring>
#include <map>

#include "machine.hpp"

namespace emulator {
namespace {

struct InFlight {
  unsigned char* destination;
  unsigned bytes;
  std::function<void()> land;
  const void* pc;
};

struct Mbarrier {
  int index;
  unsigned address;
  Site initialised;
  int initialiser;
  unsigned initialised_clock;
  bool fenced;  // mbarrier_init_fence by the initialiser
  int count, pending;
  long long bytes;  // expected in this phase and not yet landed
  unsigned phase;   // of the next completion
  std::vector<InFlight> in_flight;
  std::vector<Thread*> waiting;
  Clock gathered, released;
};

std::map<unsigned, Mbarrier> mbarriers;
unsigned long long idle_polls;

unsigned long long token(const Mbarrier& barrier) {
  return 0x6d62617272696572ull ^ barrier.address;  // what the 8 bytes hold, to see them overwritten
}

std::string describe(const Mbarrier& barrier) {
  const char* slash = std::strrchr(barrier.initialised.file, '/');
  return "mbarrier at shared address " + std::to_string(barrier.address) + " (initialised at " +
         (slash ? slash + 1 : barrier.initialised.file) + ":" +
         std::to_string(barrier.initialised.line) + "), phase " + std::to_string(barrier.phase) +
         ": " + std::to_string(barrier.pending) + " of " + std::to_string(barrier.count) +
         " arrivals and " + std::to_string(barrier.bytes) + " bytes to come";
}

Mbarrier& find(unsigned address, const char* what, bool asynchronous) {
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end())
    fail("%s: there is no initialised mbarrier at shared address %u", what, address);
  Mbarrier& barrier = found->second;
  unsigned long long held;
  std::memcpy(&held, shared_pointer(address, 8, what, nullptr), 8);
  if (held != token(barrier)) fail("%s: overwritten: %s", what, describe(barrier).c_str());
  if (machine.check_races) {
    if (!knows(self(), barrier.initialiser, barrier.initialised_clock))
      fail("%s: no barrier between the initialisation and this use: %s", what,
           describe(barrier).c_str());
    if (asynchronous && !barrier.fenced)
      fail("%s: missing mbarrier_init_fence: %s", what, describe(barrier).c_str());
  }
  return barrier;
}

void complete_if_ready(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0 || !barrier.in_flight.empty()) return;
  ++barrier.phase;
  barrier.pending = barrier.count;
  if (machine.check_races) {
    advance_agent(mbarrier_agent(barrier.index), &barrier.gathered);
    barrier.released = barrier.gathered;
    for (Thread* thread : barrier.waiting) acquire_clock(thread, barrier.released);
  }
  for (Thread* thread : barrier.waiting)
    if (thread != self()) wake(thread);
  barrier.waiting.clear();
}

void land(Mbarrier& barrier) {
  for (const InFlight& copy : barrier.in_flight) {
    copy.land();
    barrier.bytes -= copy.bytes;
    if (machine.check_races)
      mark_asynchronous(mbarrier_agent(barrier.index), shared_offset(copy.destination),
                        int(copy.bytes), copy.pc);
  }
  barrier.in_flight.clear();
  if (barrier.pending == 0 && barrier.bytes < 0)
    fail("%lld bytes more have landed than were expected: %s", -barrier.bytes,
         describe(barrier).c_str());
  complete_if_ready(barrier);
}

void arrive(Mbarrier& barrier, const char* what) {
  if (barrier.pending == 0) land(barrier);
  if (barrier.pending == 0) fail("%s: one arrival too many: %s", what, describe(barrier).c_str());
  if (machine.check_races) release_clock(self(), barrier.gathered);
  --barrier.pending;
  idle_polls = 0;
  if (!barrier.waiting.empty()) land(barrier);
  else complete_if_ready(barrier);
}

void start(Mbarrier& barrier, InFlight copy) {
  std::memset(copy.destination, poison, copy.bytes);
  barrier.in_flight.push_back(std::move(copy));
  idle_polls = 0;
  if (!barrier.waiting.empty()) land(barrier);
}

bool completed(Mbarrier& barrier, unsigned parity) {
  return (barrier.phase & 1) != (parity & 1);
}

}  // namespace

void begin_block_mbarriers() {
  mbarriers.clear();
  idle_polls = 0;
}

std::string describe_mbarriers() {
  std::string all;
  for (const auto& [address, barrier] : mbarriers)
    if (!barrier.waiting.empty()) all += "\n  " + describe(barrier);
  return all;
}

void finish_block() {
  for (const auto& [address, barrier] : mbarriers)
    if (!barrier.in_flight.empty())
      fail("the block ends with copies in flight: %s", describe(barrier).c_str());
}

void mbarrier_init(unsigned address, unsigned arrivals, Site site) {
  unsigned char* pointer = shared_pointer(address, 8, "mbarrier_init", __builtin_return_address(0));
  if (arrivals < 1 || arrivals > (1u << 20) - 1) fail("mbarrier_init: %u arrivals", arrivals);
  if (mbarriers.count(address))
    fail("mbarrier_init: already initialised: %s", describe(mbarriers[address]).c_str());
  Mbarrier barrier{};
  barrier.index = int(mbarriers.size());
  if (barrier.index >= max_mbarriers) fail("more than %d mbarriers in a block", max_mbarriers);
  barrier.address = address;
  barrier.initialised = site;
  barrier.initialiser = self()->number;
  barrier.count = barrier.pending = int(arrivals);
  if (machine.check_races) {
    touch_shared(self(), shared_offset(pointer), 8, true, __builtin_return_address(0));
    barrier.initialised_clock = own_clock(self());
  }
  const unsigned long long held = token(barrier);
  std::memcpy(pointer, &held, 8);
  mbarriers[address] = barrier;
}

void mbarrier_init_fence() {
  for (auto& [address, barrier] : mbarriers)
    if (barrier.initialiser == self()->number) barrier.fenced = true;
}

void mbarrier_arrive(unsigned address, Site) {
  arrive(find(address, "mbarrier_arrive", false), "mbarrier_arrive");
}

void mbarrier_expect(unsigned address, unsigned bytes, Site) {
  Mbarrier& barrier = find(address, "mbarrier_expect", false);
  if (barrier.pending == 0) land(barrier);
  barrier.bytes += bytes;
  if (barrier.bytes >= 1 << 20)
    fail("mbarrier_expect: a barrier counts less than 2^20 bytes: %s", describe(barrier).c_str());
  arrive(barrier, "mbarrier_expect");
}

bool mbarrier_try_wait(unsigned address, unsigned parity, Site) {
  Mbarrier& barrier = find(address, "mbarrier_try_wait", false);
  if (!completed(barrier, parity)) land(barrier);
  if (completed(barrier, parity)) {
    if (machine.check_races) acquire_clock(self(), barrier.released);
    idle_polls = 0;
    return true;
  }
  if (++idle_polls > 1000ull * machine.threads.size())
    fail("deadlock: threads only poll: %s", describe(barrier).c_str());
  yield();
  return false;
}

void mbarrier_wait(unsigned address, unsigned parity, Site site) {
  Mbarrier& barrier = find(address, "mbarrier_wait", false);
  if (!completed(barrier, parity)) {
    barrier.waiting.push_back(self());
    land(barrier);
    if (!completed(barrier, parity)) block_in("mbarrier_wait", site);
    return;
  }
  if (machine.check_races) acquire_clock(self(), barrier.released);
}

void fence_async_proxy() {
  if (machine.check_races) fence_proxy(self());
}

// ---------------------------------------------------------------- copies

void bulk_copy(unsigned destination, const void* source, unsigned bytes, unsigned address) {
  const void* pc = __builtin_return_address(0);
  if (bytes == 0 || bytes % 16)
    fail_at(pc, "bulk_copy: %u bytes are no positive multiple of 16", bytes);
  unsigned char* pointer = shared_pointer(destination, 16, "bulk_copy", pc);
  shared_pointer(destination + bytes - 16, 16, "bulk_copy", pc);
  Mbarrier& barrier = find(address, "bulk_copy", true);
  const auto* from = static_cast<const unsigned char*>(source);
  for (unsigned i = 0; i < bytes; i += 16) check_global(from + i, 16, false, "bulk_copy", pc);
  if (machine.check_races)
    check_asynchronous(self(), shared_offset(pointer), int(bytes), true, true, "bulk_copy", pc);
  start(barrier, {pointer, bytes, [=] { std::memcpy(pointer, from, bytes); }, pc});
}

namespace {

enum class Element : unsigned char { float32, tfloat32, float16, bfloat16 };

/// The emulator's 128 bytes of a tensor map; tensor_map.py writes them.
struct TensorMapData {
  unsigned magic;
  unsigned char rank;
  Element element;
  unsigned char swizzle;  // 0, 64 or 128 bytes
  unsigned char unused;
  unsigned char* base;
  unsigned long long extent[5];
  unsigned long long stride[5];  // bytes; stride[0] is an element
  unsigned box[5];  // elements in shared memory
  unsigned char step[5];  // between them in the tensor
};
static_assert(sizeof(TensorMapData) <= 128, "a tensor map has 128 bytes");
constexpr unsigned tensor_map_magic = 0x70616d74;

unsigned swizzled(unsigned address, const TensorMapData& map) {
  return address ^ (address >> 3 & (map.swizzle == 128 ? 0x70 : map.swizzle == 64 ? 0x30 : 0));
}

TensorMapData read_map(const void* pointer, int rank, const int* at, const char* what,
                       const void* pc) {
  TensorMapData map;
  std::memcpy(&map, pointer, sizeof map);
  if (reinterpret_cast<std::uintptr_t>(pointer) % 64)
    fail_at(pc, "%s: the tensor map is not aligned to 64 bytes", what);
  if (map.magic != tensor_map_magic) fail_at(pc, "%s: not a tensor map", what);
  if (map.rank != rank) fail_at(pc, "%s: a map of %d dimensions, used with %d", what, map.rank, rank);
  if (at[0] * (long long)map.stride[0] % 16)
    fail_at(pc, "%s: the innermost coordinate %d is not at a multiple of 16 bytes", what, at[0]);
  return map;
}

unsigned box_bytes(const TensorMapData& map) {
  unsigned bytes = unsigned(map.stride[0]);
  for (int i = 0; i < map.rank; ++i) bytes *= map.box[i];
  return bytes;
}

/// Calls visit(offset in the box, address in the tensor or null) for each element of a box.
template <typename Visit>
void for_each_element(const TensorMapData& map, const int* at, Visit visit) {
  unsigned index[5] = {};
  const unsigned bytes = box_bytes(map), size = unsigned(map.stride[0]);
  for (unsigned offset = 0; offset < bytes; offset += size) {
    unsigned char* pointer = map.base;
    bool inside = true;
    for (int i = 0; i < map.rank; ++i) {
      const long long where = at[i] + (long long)index[i] * map.step[i];
      inside = inside && where >= 0 && where < (long long)map.extent[i];
      pointer += where * (long long)map.stride[i];
    }
    visit(offset, inside ? pointer : nullptr);
    for (int i = 0; i < map.rank && ++index[i] == map.box[i]; ++i) index[i] = 0;
  }
}

unsigned char* box_in_shared(unsigned address, const TensorMapData& map, const char* what,
                             const void* pc) {
  unsigned char* pointer = shared_pointer(address, 1, what, pc);
  if (address % 128)
    fail_at(pc, "%s: shared address %#x is not aligned to 128 bytes", what, address);
  shared_pointer(address + box_bytes(map) - 1, 1, what, pc);
  return pointer;
}

}  // namespace

void tensor_load(unsigned destination, const void* pointer, const int* coordinates, int rank,
                 unsigned address) {
  const void* pc = __builtin_return_address(0);
  const TensorMapData map = read_map(pointer, rank, coordinates, "tma_load", pc);
  unsigned char* to = box_in_shared(destination, map, "tma_load", pc);
  const unsigned bytes = box_bytes(map), size = unsigned(map.stride[0]);
  Mbarrier& barrier = find(address, "tma_load", true);
  for_each_element(map, coordinates, [&](unsigned, unsigned char* from) {
    if (from) check_global(from, int(size), false, "tma_load", pc);
  });
  if (machine.check_races)
    check_asynchronous(self(), shared_offset(to), int(bytes), true, false, "tma_load", pc);
  std::vector<int> at(coordinates, coordinates + rank);
  start(barrier, {to, bytes, [=] {
    for_each_element(map, at.data(), [&](unsigned offset, unsigned char* from) {
      unsigned char* where = to + (swizzled(destination + offset, map) - destination);
      std::memset(where, 0, size);
      if (!from) return;
      std::memcpy(where, from, size);
      if (map.element == Element::tfloat32) {
        float value;
        std::memcpy(&value, from, 4);
        const unsigned rounded = round_tf32(value);
        std::memcpy(where, &rounded, 4);
      }
    });
  }, pc});
}

void tensor_store(const void* pointer, const int* coordinates, int rank, unsigned source) {
  const void* pc = __builtin_return_address(0);
  const TensorMapData map = read_map(pointer, rank, coordinates, "tma_store", pc);
  const unsigned char* from = box_in_shared(source, map, "tma_store", pc);
  Thread* thread = self();
  const auto read = [=] {
    if (!machine.check_races) return;
    check_asynchronous(thread, shared_offset(from), int(box_bytes(map)), false, false, "tma_store", pc);
    touch_shared(thread, shared_offset(from), int(box_bytes(map)), false, pc);
  };
  read();
  std::vector<int> at(coordinates, coordinates + rank);
  thread->open_stores.push_back([=] {
    read();
    for_each_element(map, at.data(), [&](unsigned offset, unsigned char* to) {
      if (!to) return;
      check_global(to, int(map.stride[0]), true, "tma_store", pc);
      std::memcpy(to, from + (swizzled(source + offset, map) - source), map.stride[0]);
    });
  });
}

void bulk_store(void* destination, unsigned source, unsigned bytes) {
  const void* pc = __builtin_return_address(0);
  if (bytes == 0 || bytes % 16)
    fail_at(pc, "bulk_store: %u bytes are no positive multiple of 16", bytes);
  const unsigned char* from = shared_pointer(source, 16, "bulk_store", pc);
  shared_pointer(source + bytes - 16, 16, "bulk_store", pc);
  Thread* thread = self();
  const auto read = [=] {
    if (!machine.check_races) return;
    check_asynchronous(thread, shared_offset(from), int(bytes), false, false, "bulk_store", pc);
    touch_shared(thread, shared_offset(from), int(bytes), false, pc);
  };
  read();
  auto* to = static_cast<unsigned char*>(destination);
  for (unsigned i = 0; i < bytes; i += 16) check_global(to + i, 16, true, "bulk_store", pc);
  thread->open_stores.push_back([=] {
    read();
    std::memcpy(to, from, bytes);
  });
}

void bulk_commit() {
  Thread* thread = self();
  thread->store_groups.push_back(std::move(thread->open_stores));
  thread->open_stores.clear();
}

void bulk_wait(int pending) {
  Thread* thread = self();
  while (int(thread->store_groups.size()) > pending) {
    for (const auto& store : thread->store_groups.front()) store();
    thread->store_groups.pop_front();
  }
}

}  // namespace emulator
