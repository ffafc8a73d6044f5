// The emulated machine: one block of threads at a time, each thread a fiber.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "../device/emulator.cuh"

namespace emulator {

constexpr int warp_lanes = 32;
constexpr std::size_t stack_bytes = 256 * 1024;
/// The window of shared addresses starts here, as on sm_90, where the first KiB is reserved.
constexpr unsigned shared_window = 1024;
constexpr unsigned char poison = 0xff;  // NaN in every floating-point type, -1 in every integer

struct AsyncCopy {
  unsigned char* destination;
  const unsigned char* source;
  int bytes;
  bool valid;
};

enum class State { ready, waiting, finished };

struct Thread {
  Index3 index;
  int number;  // within the block
  int warp, lane;
  void* context;  // saved stack pointer
  unsigned char* stack;
  void* fake_stack;  // AddressSanitizer's
  State state;
  const char* waits_in;  // name of the call it waits in
  Site waits_at;
  std::vector<AsyncCopy> open_copies;
  std::deque<std::vector<AsyncCopy>> copy_groups;
};

/// Lanes of a warp that meet in one collective instruction.
struct Rendezvous {
  const char* name;
  Site site;
  unsigned mask;
  unsigned arrived;
  void* arguments[warp_lanes];
};

struct Warp {
  Thread* lanes[warp_lanes];
  std::vector<Rendezvous> open;
};

struct Barrier {
  int expected;  // 0: every running thread
  int arrived;
  std::vector<Thread*> waiting;
  std::vector<int> arrivals;  // numbers of the threads that arrived, waiting or not
};

/// One argument in global memory.
struct Region {
  unsigned char* base;
  std::size_t bytes;
  int argument;
};

struct Machine {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barriers[16];
  std::deque<Thread*> ready;
  int running;  // threads not finished
  unsigned long long random;
  int order;  // of threads: 0 ascending, 1 descending, else at random from this seed
  unsigned shared_bytes;
  bool check_races;
  std::vector<Region> regions;
  unsigned long long block_number;
  void (*invoke)(void**);
  void** arguments;
  std::string message;
  bool failed;
};
extern Machine machine;

extern Thread* current;  // null outside of blocks
inline Thread* self() { return current; }

// scheduler.cpp
void allocate_stacks(int threads);
void release_stacks();
void run_block();
void block_in(const char* name, Site site);  // returns when another thread calls wake
void wake(Thread* thread);
[[noreturn]] void fail_at(const void* pc, const char* format, ...)
    __attribute__((format(printf, 2, 3)));
std::string describe(const Thread& thread);

/// Lanes in `mask` meet; the last to arrive runs `complete` for all of them.
void collective(const char* name, Site site, unsigned mask, void* argument,
                void (*complete)(Warp&, Rendezvous&));

// memory.cpp: where an address lies, and whether it may be touched
void find_shared_memory();
void begin_launch_memory();
void begin_block_memory();
unsigned char* shared_pointer(unsigned address, int bytes, const char* what, const void* pc);
void check_global(const void* pointer, int bytes, bool write, const char* what, const void* pc);

// races.cpp: happens-before, by vector clocks
void begin_launch_races(int threads, int warps, std::size_t shared_bytes);
void begin_block_races();
void end_launch_races();
void order_threads(const std::vector<int>& from, const std::vector<Thread*>& to);
void touch_shared(Thread* thread, std::size_t offset, int bytes, bool write, const void* pc);
void mark_in_flight(Thread* thread, std::size_t offset, int bytes, const void* pc);
void mark_landed(Thread* thread, std::size_t offset, int bytes);
void touch_global(Thread* thread, const Region& region, std::size_t offset, int bytes, bool write,
                  const void* pc);
std::size_t shared_offset(const void* pointer);

}  // namespace emulator
