// Threads of a block: who runs, who waits for whom, and what it means that nobody can run.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "fiber.hpp"
#include "machine.hpp"

namespace emulator {

Thread* current;
Index3 thread_index, block_index, block_extent, grid_extent;
Machine machine;

namespace {

void* launcher_context;
#if defined(__SANITIZE_ADDRESS__)
void* launcher_fake_stack;
const void* launcher_stack;
std::size_t launcher_stack_bytes;
#endif
unsigned char* stacks;
std::size_t stacks_bytes;
constexpr std::size_t guard_bytes = 4096;  // below each stack: an overflow faults

// A null thread is the launcher.
void switch_threads(Thread* from, Thread* to, [[maybe_unused]] bool from_ends) {
  current = to;
  if (to) thread_index = to->index, block_index = to->block;
  void** save = from ? &from->context : &launcher_context;
  void* load = to ? to->context : launcher_context;
#if defined(__SANITIZE_ADDRESS__)
  void** fake = from ? &from->fake_stack : &launcher_fake_stack;
  __sanitizer_start_switch_fiber(from_ends ? nullptr : fake, to ? to->stack : launcher_stack,
                                 to ? stack_bytes : launcher_stack_bytes);
#endif
  emulator_switch(save, load);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(*fake, nullptr, nullptr);
#endif
}

unsigned long long next_random() {  // splitmix64
  unsigned long long z = (machine.random += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

Thread* pick() {
  auto& ready = machine.ready;
  if (ready.empty()) return nullptr;
  if (machine.order > 1) std::swap(ready.front(), ready[next_random() % ready.size()]);
  Thread* thread = ready.front();
  ready.pop_front();
  return thread;
}

std::string place(Site site) {
  const char* slash = std::strrchr(site.file, '/');
  return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

std::string ranges(const std::vector<int>& numbers) {
  std::string text;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t end = i;
    while (end + 1 < numbers.size() && numbers[end + 1] == numbers[end] + 1) ++end;
    if (!text.empty()) text += ",";
    text += std::to_string(numbers[i]);
    if (end > i) text += "-" + std::to_string(numbers[end]);
    i = end + 1;
  }
  return text;
}

/// What every thread is doing, one line per group of threads in the same place.
std::string roll_call() {
  struct Group { std::string text; std::vector<int> threads; };
  std::vector<Group> groups;
  for (const Thread& thread : machine.threads) {
    const std::string text = describe(thread);
    Group* group = nullptr;
    for (Group& g : groups)
      if (g.text == text) group = &g;
    if (!group) group = &groups.emplace_back(Group{text, {}});
    group->threads.push_back(thread.number);
  }
  std::string all;
  for (const Group& g : groups) all += "\n  threads " + ranges(g.threads) + ": " + g.text;
  return all + describe_mbarriers();
}

void release(Barrier& barrier) {
  if (machine.check_races) order_threads(barrier.arrivals, barrier.waiting);
  for (Thread* thread : barrier.waiting) wake(thread);
  barrier.waiting.clear();
  barrier.arrivals.clear();
  barrier.arrived = 0;
}

void body() {
#if defined(__SANITIZE_ADDRESS__)
  const void* stack;
  std::size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
  if (!launcher_stack) launcher_stack = stack, launcher_stack_bytes = bytes;
#endif
  machine.invoke(machine.arguments);

  Thread* thread = self();
  finish_thread();
  for (const Rendezvous& meeting : machine.warps[thread->warp].open)
    if (meeting.mask >> thread->lane & 1)
      fail("warp %d: lane %d finished the kernel while other lanes wait for it in %s (%s)",
           thread->warp, thread->lane, meeting.name, place(meeting.site).c_str());
  thread->state = State::finished;
  int& running = machine.running[thread->rank];
  --running;
  if (running == 0 && machine.cluster > 1 && machine.check_races) check_block_ends(thread->rank);
  Barrier& all = machine.barriers[16 * thread->rank];
  if (all.expected == 0 && all.arrived > 0 && all.arrived == running) release(all);
  Thread* next = pick();
  if (!next && std::any_of(machine.running.begin(), machine.running.end(), [](int n) { return n; })) fail("deadlock: no thread can go on%s", roll_call().c_str());
  if (!next) finish_block();
  switch_threads(thread, next, true);
}

void vset_message(const void* pc, const char* format, va_list arguments) {
  char text[8192];
  std::vsnprintf(text, sizeof text, format, arguments);
  machine.message = text;
  if (const Thread* thread = self()) {
    char where[160];
    std::snprintf(where, sizeof where, "\nin block (%u, %u, %u), thread (%u, %u, %u)",
                  block_index.x, block_index.y, block_index.z, thread->index.x, thread->index.y,
                  thread->index.z);
    machine.message += where;
  }
  if (pc) {
    char where[64];
    std::snprintf(where, sizeof where, "\nat pc %p", pc);
    machine.message += where;
  }
}

[[noreturn]] void leave() {
  machine.failed = true;
  switch_threads(self(), nullptr, true);
  __builtin_unreachable();
}

}  // namespace

void allocate_stacks(int threads) {
  stacks_bytes = threads * (guard_bytes + stack_bytes);
  stacks = static_cast<unsigned char*>(mmap(nullptr, stacks_bytes, PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (int i = 0; i < threads; ++i)
    mprotect(stacks + i * (guard_bytes + stack_bytes), guard_bytes, PROT_NONE);
}

void release_stacks() { munmap(stacks, stacks_bytes); }

void run_block() {
  const Index3 extent = block_extent;
  const int each = int(extent.x * extent.y * extent.z), count = machine.cluster * each;
  machine.threads.resize(count);
  machine.warps.resize((count + warp_lanes - 1) / warp_lanes);
  for (Warp& warp : machine.warps) {
    warp.open.clear();
    for (Thread*& lane : warp.lanes) lane = nullptr;
  }
  machine.barriers.assign(16 * machine.cluster, Barrier{});
  machine.cluster_barrier = Barrier{};
  const Index3 first_block = block_index;
  machine.group_meetings.assign((count + group_threads - 1) / group_threads, GroupMeeting{});
  begin_block_mbarriers();
  begin_block_registers();
  machine.ready.clear();
  machine.running.assign(machine.cluster, each);
  for (int i = 0; i < count; ++i) {
    Thread& thread = machine.threads[i];
    const unsigned within = unsigned(i % each);
    thread.index = {within % extent.x, within / extent.x % extent.y, within / (extent.x * extent.y)};
    thread.rank = i / each;
    thread.block = {first_block.x + unsigned(thread.rank), first_block.y, first_block.z};
    thread.number = i;
    thread.warp = i / warp_lanes;
    thread.lane = i % warp_lanes;
    thread.stack = stacks + i * (guard_bytes + stack_bytes) + guard_bytes;
    thread.context = prepare_context(thread.stack + stack_bytes, body);
    thread.fake_stack = nullptr;
    thread.state = State::ready;
    thread.open_copies.clear();
    thread.copy_groups.clear();
    thread.open_stores.clear();
    thread.store_groups.clear();
    thread.fenced = false;
    thread.open_products.clear();
    thread.product_groups.clear();
    thread.accumulators.clear();
    thread.held.clear();
    machine.warps[thread.warp].lanes[thread.lane] = &thread;
    machine.order == 1 ? machine.ready.push_front(&thread) : machine.ready.push_back(&thread);
  }
  switch_threads(nullptr, pick(), false);
}

void wake(Thread* thread) {
  thread->state = State::ready;
  machine.ready.push_back(thread);
}

void block_in(const char* name, Site site) {
  Thread* thread = self();
  thread->state = State::waiting;
  thread->waits_in = name;
  thread->waits_at = site;
  Thread* next = pick();
  if (!next) fail("deadlock: no thread can go on%s", roll_call().c_str());
  switch_threads(thread, next, false);
}

void yield() {
  Thread* thread = self();
  if (machine.ready.empty()) return;
  Thread* next = pick();
  wake(thread);
  switch_threads(thread, next, false);
}

long long clock() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

std::string describe(const Thread& thread) {
  if (thread.state == State::finished) return "finished";
  if (thread.state == State::ready) return "can run";
  return std::string("wait in ") + thread.waits_in + " (" + place(thread.waits_at) + ")";
}

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vset_message(nullptr, format, arguments);
  va_end(arguments);
  leave();
}

void fail_at(const void* pc, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vset_message(pc, format, arguments);
  va_end(arguments);
  leave();
}

void barrier(int id, int threads, bool wait, const char* name, Site site) {
  Thread* thread = self();
  if (id < 0 || id > 15) fail("%s: barrier %d does not exist (0 to 15)", name, id);
  if (threads % warp_lanes != 0)
    fail("%s: %d threads is no multiple of the warp size", name, threads);
  for (const Thread* other : machine.warps[thread->warp].lanes)
    if (other && other->state == State::waiting && other->waits_in == name &&
        other->waits_at.line != site.line)
      fail("divergent %s: lane %d of warp %d is at %s, lane %d at %s", name, thread->lane,
           thread->warp, place(site).c_str(), other->lane, place(other->waits_at).c_str());
  Barrier& meeting = machine.barriers[16 * thread->rank + id];
  if (meeting.arrived > 0 && meeting.expected != threads)
    fail("%s: barrier %d was opened for %d threads, now for %d", name, id, meeting.expected,
         threads);
  meeting.expected = threads;
  ++meeting.arrived;
  meeting.arrivals.push_back(thread->number);
  if (wait) meeting.waiting.push_back(thread);
  const bool complete = meeting.arrived == (threads ? threads : machine.running[thread->rank]);
  if (complete) {
    if (wait) {  // this thread goes on at once, and the others after it
      if (machine.check_races) order_threads(meeting.arrivals, meeting.waiting);
      meeting.waiting.pop_back();
      for (Thread* other : meeting.waiting) wake(other);
      meeting.waiting.clear();
      meeting.arrivals.clear();
      meeting.arrived = 0;
    } else {
      release(meeting);
    }
  } else if (wait) {
    block_in(name, site);
  }
}

void cluster_barrier(Site site) {
  Thread* thread = self();
  Barrier& meeting = machine.cluster_barrier;
  meeting.arrivals.push_back(thread->number);
  meeting.waiting.push_back(thread);
  if (++meeting.arrived < int(machine.threads.size())) {
    block_in("cluster_sync", site);
    return;
  }
  meeting.waiting.pop_back();  // this thread goes on at once
  if (machine.check_races) order_threads(meeting.arrivals, {thread});
  release(meeting);
}

void collective(const char* name, Site site, unsigned mask, void* argument,
                void (*complete)(Warp&, Rendezvous&)) {
  Thread* thread = self();
  Warp& warp = machine.warps[thread->warp];
  const unsigned bit = 1u << thread->lane;
  if (!(mask & bit))
    fail("%s (%s): lane %d calls it but is not in its mask %#x", name, place(site).c_str(),
         thread->lane, mask);
  for (std::size_t i = 0; i < warp.open.size(); ++i) {
    Rendezvous& meeting = warp.open[i];
    if (!(meeting.mask & bit)) continue;
    const bool same_call = meeting.name == name || std::strcmp(meeting.name, name) == 0;
    if (!same_call || meeting.site.line != site.line || meeting.mask != mask)
      fail("divergent call: warp %d, lane %d is in %s (%s, mask %#x) while lanes %#x are in %s "
           "(%s, mask %#x) and wait for it",
           thread->warp, thread->lane, name, place(site).c_str(), mask, meeting.arrived,
           meeting.name, place(meeting.site).c_str(), meeting.mask);
    meeting.arguments[thread->lane] = argument;
    meeting.arrived |= bit;
    if (meeting.arrived != mask) {
      block_in(name, site);
      return;
    }
    complete(warp, meeting);
    for (int lane = 0; lane < warp_lanes; ++lane)
      if (lane != thread->lane && mask >> lane & 1) wake(warp.lanes[lane]);
    warp.open.erase(warp.open.begin() + long(i));
    return;
  }
  Rendezvous meeting{name, site, mask, bit, {}};
  meeting.arguments[thread->lane] = argument;
  for (int lane = 0; lane < warp_lanes; ++lane)
    if (mask >> lane & 1)
      if (!warp.lanes[lane] || warp.lanes[lane]->state == State::finished)
        fail("warp %d: lane %d waits in %s (%s, mask %#x) for lane %d, which %s", thread->warp,
             thread->lane, name, place(site).c_str(), mask, lane,
             warp.lanes[lane] ? "has finished" : "does not exist");
  if (mask == bit) {
    complete(warp, meeting);
    return;
  }
  warp.open.push_back(meeting);
  block_in(name, site);
}

void group_collective(const char* name, Site site, void* argument, void (*complete)(void**)) {
  Thread* thread = self();
  const int group = thread->number / group_threads;
  const int first = group * group_threads;
  if (first + group_threads > int(machine.threads.size()))
    fail("%s: thread %d is in no full warpgroup", name, thread->number);
  GroupMeeting& meeting = machine.group_meetings[group];
  if (meeting.arrived == 0) {
    meeting.name = name;
    meeting.site = site;
  } else if (std::strcmp(meeting.name, name) != 0 || meeting.site.line != site.line) {
    fail("divergent call: thread %d is in %s (%s) while others of its warpgroup are in %s (%s)",
         thread->number, name, place(site).c_str(), meeting.name, place(meeting.site).c_str());
  }
  meeting.arguments[thread->number - first] = argument;
  if (++meeting.arrived < group_threads) {
    block_in(name, site);
    return;
  }
  complete(meeting.arguments);
  meeting.arrived = 0;
  for (int i = first; i < first + group_threads; ++i)
    if (i != thread->number) wake(&machine.threads[i]);
}

}  // namespace emulator
