// The emulated machine: one block of threads, or one cluster of blocks, at a time; each thread a fiber.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../device/emulator.cuh"

namespace emulator {

constexpr int warp_lanes = 32;
constexpr std::size_t stack_bytes = 256 * 1024;
/// The window of shared addresses starts here, as on sm_90, where the first KiB is reserved.
constexpr unsigned shared_window = 1024;
constexpr unsigned char poison = 0xff;  // NaN in every floating-point type, -1 in every integer
constexpr int group_threads = 128;      // a warpgroup
constexpr int max_mbarriers = 256;  // of a cluster
constexpr std::size_t dynamic_capacity = 228 * 1024;  // dynamic shared memory of a block

struct AsyncCopy {
  unsigned char* destination;
  const unsigned char* source;
  int bytes;
  bool valid;
};

/// Registers that belong to products not waited for: memory of this thread's stack.
struct HeldRegisters {
  unsigned char* low;
  int bytes;
  bool accumulator;  // may not even be read
};

struct Product;  // wgmma.cpp

/// One wgmma as one thread sees it.
struct ThreadProduct {
  std::shared_ptr<Product> product;
  float* d;
  const unsigned* a;  // null: in shared memory
};

/// An accumulator while products on it are pending; its memory is poisoned meanwhile.
struct Accumulator {
  float* d;
  int pending;
  std::vector<float> value;
};

enum class State { ready, waiting, finished };

struct Thread {
  Index3 index, block;
  int number;  // within the block, or its cluster
  int rank;    // of the block in its cluster
  int warp, lane;
  void* context;  // saved stack pointer
  unsigned char* stack;
  void* fake_stack;  // AddressSanitizer's
  State state;
  const char* waits_in;  // name of the call it waits in
  Site waits_at;
  std::vector<AsyncCopy> open_copies;
  std::deque<std::vector<AsyncCopy>> copy_groups;
  std::vector<std::function<void()>> open_stores;
  std::deque<std::vector<std::function<void()>>> store_groups;
  bool fenced;  // wgmma_fence since the last wait
  std::vector<ThreadProduct> open_products;
  std::deque<std::vector<ThreadProduct>> product_groups;
  std::vector<Accumulator> accumulators;
  std::vector<HeldRegisters> held;
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

/// Threads of a warpgroup that meet in one instruction.
struct GroupMeeting {
  const char* name;  // null: nobody has arrived
  Site site;
  int arrived;
  void* arguments[group_threads];
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
  int earlier, touched;  // as a Tensor's
};

struct Machine {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Barrier> barriers;  // 16 of each block
  Barrier cluster_barrier;
  std::vector<GroupMeeting> group_meetings;
  std::deque<Thread*> ready;
  std::vector<int> running;  // threads of each block not finished
  int cluster;               // blocks that run together
  unsigned long long random;
  int order;  // of threads: 0 ascending, 1 descending, else at random from this seed
  unsigned shared_bytes;
  bool check_races;
  bool dependent, waited;  // whether earlier launches may still run; whether a thread waited for them
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

/// The same for the threads of a warpgroup, in the order of their numbers.
void group_collective(const char* name, Site site, void* argument, void (*complete)(void**));

// memory.cpp: where an address lies, and whether it may be touched
void find_shared_memory();
void begin_launch_memory();
void begin_block_memory();
unsigned char* shared_pointer(unsigned address, int bytes, const char* what, const void* pc);
/// Also notes what the launch has touched.
void check_global(const void* pointer, int bytes, bool write, const char* what, const void* pc);

// races.cpp: happens-before, by vector clocks
void begin_launch_races(int threads, int warps, std::size_t shared_bytes);
void begin_block_races();
void end_launch_races();
/// What all of `from` know, those of `to` do, which are among them. `in_warp`: by __syncwarp.
void order_threads(const std::vector<int>& from, const std::vector<Thread*>& to,
                   bool in_warp = false);
void touch_shared(Thread* thread, std::size_t offset, int bytes, bool write, const void* pc);
void mark_in_flight(Thread* thread, std::size_t offset, int bytes, const void* pc);
void mark_landed(Thread* thread, std::size_t offset, int bytes);
void touch_global(Thread* thread, const Region& region, std::size_t offset, int bytes, bool write,
                  const void* pc);
std::size_t shared_offset(const void* pointer);
void touch_block(const Thread* thread, int rank, const void* pc);  // reads its shared memory
void check_block_ends(int rank);  // nobody may still read its shared memory

void learn_of_earlier_launches(Thread* thread);  // that they have ended

// races.cpp, for mbarriers and the asynchronous proxy
using Clock = std::vector<unsigned>;
void release_clock(Thread* thread, Clock& clock);
void acquire_clock(Thread* thread, const Clock& clock);
bool knows(const Thread* thread, int agent, unsigned clock);
unsigned own_clock(const Thread* thread);
int mbarrier_agent(int index);  // who wrote what an asynchronous copy brought
int warp_agent(int warp);       // who read what a warp's asynchronous instructions read
void advance_agent(int agent, Clock* clock);  // one more event of this agent, put into a clock
void advance_agent(int agent, Warp& knowers);
void fence_proxy(Thread* thread);
void order_reads(const Warp& warp);  // of the lanes among themselves
/// An access by TMA, a bulk copy or wgmma: as touch_shared, and plain writes need a proxy fence.
/// `own`: as in races.cpp; what other lanes did before it takes an arrival of each of them.
void check_asynchronous(const Thread* thread, std::size_t offset, int bytes, bool write, bool own,
                        const char* what, const void* pc);
void mark_asynchronous(int agent, std::size_t offset, int bytes, const void* pc);
void mark_asynchronous_read(int warp, std::size_t offset, int bytes, const void* pc);

// mbarrier.cpp and wgmma.cpp
void begin_block_mbarriers();
void begin_block_registers();
std::string describe_mbarriers();  // those that somebody waits for
void finish_thread();              // nothing asynchronous may be left
void finish_block();
void check_registers(const Thread* thread, const void* pointer, int bytes, bool write,
                     const void* pc);

}  // namespace emulator
