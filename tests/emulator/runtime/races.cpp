// Data races, found by happens-before and not by luck of the schedule.
//
// Every thread has a vector clock: what it knows of every other agent's progress. Barriers,
// __syncwarp and mbarriers join clocks; nothing else orders threads (in particular not shuffles,
// ldmatrix or mma). Each cell of memory remembers its last write and, per warp, the last read; an
// access that does not know of a conflicting one is an error.
//
// What a thread hands over by an mbarrier is narrower: its own accesses, and what barriers and mbarriers
// told it, but not what __syncwarp() did. The memory model would have that too, compute-sanitizer does
// not: where plain accesses go from warp to warp, every lane arrives. Each clock is followed by one of
// this kind, against which plain accesses of different warps are checked.
//
// Agents are threads as writers, threads as readers, mbarriers (what TMA and bulk copies write), warps
// (what their asynchronous instructions read) and the launches before. Between plain stores and the asynchronous proxy
// a fence is needed besides. A wgmma orders the earlier reads of a warp's lanes, and no writes: all
// lanes have their operands, so one of them may release the buffer they came from.
//
// A cell is 2 bytes. Of each warp only the latest reader is kept: a write that races with an older
// reader of the same warp, and with no other, is missed.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "machine.hpp"

extern "C" void emulated_invoke(void** values);

namespace emulator {
namespace {

constexpr unsigned short in_flight = 1;     // an asynchronous copy not waited for
constexpr unsigned short asynchronous = 2;  // by the asynchronous proxy

struct Access {
  unsigned clock;  // 0: none
  unsigned short agent;
  unsigned short flags;
  unsigned pc;  // offset from the kernel's code, for messages
};

struct GlobalCell {
  unsigned long long writer_block, reader_block;  // block number, counted from 1
  Access write, read;
};

constexpr int cell_bytes = 2;

int thread_count, warp_count, agent_count;
int earlier_launches;  // as an agent; who knows its only event has waited for it
int agents_in_use;     // mbarriers come last, and count once their first phase has completed
std::vector<unsigned> clocks;  // [thread][known, handed over][agent]
std::vector<unsigned> fences;  // [thread][agent]: what the thread knew at its last proxy fence
std::vector<unsigned> agent_clocks;  // of mbarriers and warps: [agent - threads]
unsigned block_start;                // clocks up to this one are of earlier blocks
Access* shared_cells;                // [1 + warp][cell]: the writes, then reads
std::size_t shared_cell_count, shared_cells_bytes;
std::vector<Access> remote_reads;    // [thread][block of the cluster]: the latest in that one's memory
std::vector<GlobalCell*> global_cells;  // as machine.regions
std::vector<std::size_t> global_cells_bytes;

void* reserve(std::size_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
              -1, 0);
}

const char* code_base() { return reinterpret_cast<const char*>(&emulated_invoke); }
unsigned encode(const void* pc) { return unsigned(static_cast<const char*>(pc) - code_base()); }
const void* decode(unsigned pc) { return code_base() + int(pc); }

unsigned* clock_of(int thread) { return &clocks[std::size_t(thread) * 2 * agent_count]; }
unsigned* handed_to(int thread) { return clock_of(thread) + agent_count; }

/// The clock of what a thread does now.
unsigned now(const Thread* thread, bool write) {
  return clock_of(thread->number)[thread->number + (write ? 0 : thread_count)];
}
/// What the thread does from now on is not covered by what others learned so far.
void tick(int thread) {
  for (int agent : {thread, thread_count + thread})
    handed_to(thread)[agent] = ++clock_of(thread)[agent];
}
Access access_by(const Thread* thread, bool write, unsigned short flags, const void* pc) {
  const int agent = thread->number + (write ? 0 : thread_count);
  return {now(thread, write), (unsigned short)agent, flags, encode(pc)};
}

/// The next event of an mbarrier's copies, or of a warp's asynchronous instructions.
Access access_of(int agent, const void* pc) {
  return {agent_clocks[agent - 2 * thread_count] + 1, (unsigned short)agent, asynchronous, encode(pc)};
}

bool known(const Thread* thread, const Access& access) {
  return clock_of(thread->number)[access.agent] >= access.clock;
}

/// Whether a plain access of another warp has been handed over to this thread.
bool handed(const Thread* thread, const Access& access) {
  if (access.agent >= 2 * thread_count || access.agent % thread_count / warp_lanes == thread->warp)
    return true;
  return handed_to(thread->number)[access.agent] >= access.clock;
}

std::string name(int agent) {
  if (agent < 2 * thread_count) return "thread " + std::to_string(agent % thread_count);
  if (agent >= mbarrier_agent(0))
    return "an asynchronous copy of mbarrier " + std::to_string(agent - mbarrier_agent(0));
  return "wgmma of warp " + std::to_string(agent - warp_agent(0));
}

[[noreturn]] void report(const char* memory, std::size_t byte, const std::string& who, int warp,
                         bool write, const Access& other, bool other_wrote, const void* pc) {
  const char* missing = "__syncthreads";
  if (other.agent < 2 * thread_count) {
    if (other.agent % thread_count / warp_lanes == warp) missing = "__syncwarp or __syncthreads";
  } else if (other.agent >= mbarrier_agent(0)) {
    missing = "mbarrier_wait";
  }
  fail_at(pc,
          "missing %s: %s %s %s byte %zu, which %s %s without a barrier between (there: pc %p)",
          missing, who.c_str(), write ? "writes" : "reads", memory, byte,
          name(other.agent).c_str(), other_wrote ? "wrote" : "read", decode(other.pc));
}

constexpr int writes = 0, first_read = 1;  // rows of cells; a warp's reads follow those of the one before

Access* cell_at(std::size_t offset, int row = writes) {
  return shared_cells + row * shared_cell_count + offset / cell_bytes;
}

std::size_t first_cell(std::size_t offset) { return offset / cell_bytes * cell_bytes; }

/// The last write, or one warp's last read, of each cell of a range becomes this one.
void set_cells(std::size_t offset, int bytes, int row, const Access& access) {
  const Access* end = cell_at(offset + bytes - 1, row);
  for (Access* cell = cell_at(offset, row); cell <= end; ++cell) *cell = access;
}

void check_landed(const Access& write, std::size_t offset, const std::string& who, bool writes,
                  const void* pc) {
  if (!(write.flags & in_flight)) return;
  fail_at(pc,
          "missing %s: %s %s shared byte %zu, to which an asynchronous copy of thread %d is in "
          "flight (there: pc %p)",
          write.flags & asynchronous ? "mbarrier_wait" : "async_wait", who.c_str(),
          writes ? "writes" : "reads", offset, int(write.agent), decode(write.pc));
}

/// `own`: this access is the thread's own, as plain ones and bulk copies without a tensor map are to
/// compute-sanitizer, not that of a tensor map or product that it issues.
void check_order(const Thread* thread, const Access& other, std::size_t offset, bool write,
                 bool other_wrote, bool own, const void* pc) {
  if (other.clock <= block_start) return;  // of no block, or of one before
  if (!known(thread, other))
    report("shared", offset, name(thread->number), thread->warp, write, other, other_wrote, pc);
  if (own && !handed(thread, other))
    fail_at(pc,
            "missing arrival of every lane: %s %s shared byte %zu, which %s %s; another lane of its "
            "warp arrived at the mbarrier between (there: pc %p)",
            name(thread->number).c_str(), write ? "writes" : "reads", offset,
            name(other.agent).c_str(), other_wrote ? "wrote" : "read", decode(other.pc));
}

/// Whether checks of two accesses have one answer, whatever their places in the code are.
bool same(const Access& a, const Access& b) {
  return a.clock == b.clock && a.agent == b.agent && a.flags == b.flags;
}

bool same(const GlobalCell& a, const GlobalCell& b) {
  return a.writer_block == b.writer_block && a.reader_block == b.reader_block &&
         same(a.write, b.write) && same(a.read, b.read);
}

/// Calls check(access, offset) for what a row of cells holds in a range, but for repetitions.
template <typename Check>
void for_each_access(std::size_t offset, int bytes, int row, Check check) {
  const Access* end = cell_at(offset + bytes - 1, row);
  Access checked{};
  for (const Access* cell = cell_at(offset, row); cell <= end; ++cell) {
    if (same(*cell, checked)) continue;
    check(*cell, (cell - cell_at(0, row)) * cell_bytes);
    checked = *cell;
  }
}

void check_write_before(const Thread* thread, const Access& other, std::size_t offset, bool write,
                        bool own, const void* pc) {
  if (other.flags & in_flight) check_landed(other, offset, name(thread->number), write, pc);
  check_order(thread, other, offset, write, true, own, pc);
}

void check_reads_before(const Thread* thread, std::size_t offset, int bytes, bool own, const void* pc) {
  for (int warp = 0; warp < warp_count; ++warp)
    for_each_access(offset, bytes, first_read + warp, [&](const Access& other, std::size_t at) {
      check_order(thread, other, at, true, false, own, pc);
    });
}

void check_plain(const Thread* thread, std::size_t offset, int bytes, bool write, const void* pc) {
  for_each_access(offset, bytes, writes, [&](const Access& other, std::size_t at) {
    check_write_before(thread, other, at, write, true, pc);
  });
  if (write) check_reads_before(thread, offset, bytes, true, pc);
}

bool fenced(const Thread* thread, const Access& write) {
  if (fences.empty()) return false;
  const auto at = [&](int who) { return fences[std::size_t(who) * agent_count + write.agent]; };
  return at(write.agent) >= write.clock || at(thread->number) >= write.clock;
}

}  // namespace

void begin_launch_races(int threads, int warps, std::size_t shared_bytes) {
  thread_count = threads;
  warp_count = warps;
  earlier_launches = 2 * threads + warps;
  agents_in_use = earlier_launches + 1;
  agent_count = agents_in_use + max_mbarriers;
  clocks.assign(std::size_t(threads) * 2 * agent_count, 0);
  agent_clocks.assign(agent_count - 2 * threads, 0);
  fences.clear();
  block_start = 0;
  shared_cell_count = shared_bytes / cell_bytes + 1;
  shared_cells_bytes = shared_cell_count * (1 + warps) * sizeof(Access);
  shared_cells = static_cast<Access*>(reserve(shared_cells_bytes));
  for (const Region& region : machine.regions) {
    const std::size_t size = (region.bytes / cell_bytes + 2) * sizeof(GlobalCell);
    global_cells.push_back(static_cast<GlobalCell*>(reserve(size)));
    global_cells_bytes.push_back(size);
  }
}

void end_launch_races() {
  munmap(shared_cells, shared_cells_bytes);
  for (std::size_t i = 0; i < global_cells.size(); ++i)
    munmap(global_cells[i], global_cells_bytes[i]);
  global_cells.clear();
  global_cells_bytes.clear();
}

void begin_block_races() {
  for (int i = 0; i < thread_count; ++i)
    for (int agent : {i, thread_count + i})
      block_start = std::max(block_start, clock_of(i)[agent]);
  for (unsigned clock : agent_clocks) block_start = std::max(block_start, clock);
  std::fill(clocks.begin(), clocks.end(), block_start);  // what came before this block is known
  std::fill(agent_clocks.begin(), agent_clocks.end(), block_start);
  agents_in_use = earlier_launches + 1;
  remote_reads.assign(std::size_t(thread_count) * machine.cluster, Access{});
  for (int i = 0; i < thread_count; ++i) {
    tick(i);
    clock_of(i)[earlier_launches] = handed_to(i)[earlier_launches] = 0;
  }
}

void learn_of_earlier_launches(Thread* thread) {
  clock_of(thread->number)[earlier_launches] = handed_to(thread->number)[earlier_launches] = 1;
}

// ---------------------------------------------------------------- ordering

namespace {
void join_half(unsigned* __restrict__ into, const unsigned* __restrict__ from, int count) {
  for (int i = 0; i < count; ++i) into[i] = std::max(into[i], from[i]);
}
/// Both halves: what is known, and what is handed over.
void join(unsigned* into, const unsigned* from) {
  join_half(into, from, agents_in_use);
  join_half(into + agent_count, from + agent_count, agents_in_use);
}
}  // namespace

void order_threads(const std::vector<int>& from, const std::vector<Thread*>& to, bool in_warp) {
  static Clock joined;
  joined.assign(2 * agent_count, 0);
  for (int half = 0; half < (in_warp ? 1 : 2); ++half) {
    unsigned* all = &joined[half * agent_count];
    for (int thread : from) join_half(all, clock_of(thread) + half * agent_count, agents_in_use);
    for (Thread* thread : to)
      std::copy_n(all, agents_in_use, clock_of(thread->number) + half * agent_count);
  }
  for (int thread : from) tick(thread);
}

void release_clock(Thread* thread, Clock& clock) {
  clock.resize(2 * agent_count);
  join(clock.data(), clock_of(thread->number));
  tick(thread->number);
}

void acquire_clock(Thread* thread, const Clock& clock) {
  if (!clock.empty()) join(clock_of(thread->number), clock.data());
}

bool knows(const Thread* thread, int agent, unsigned clock) {
  return clock_of(thread->number)[agent] >= clock;
}
unsigned own_clock(const Thread* thread) { return now(thread, true); }

int warp_agent(int warp) { return 2 * thread_count + warp; }
int mbarrier_agent(int index) { return earlier_launches + 1 + index; }

void advance_agent(int agent, Clock* clock) {
  agents_in_use = std::max(agents_in_use, agent + 1);
  clock->resize(2 * agent_count);
  (*clock)[agent] = ++agent_clocks[agent - 2 * thread_count];
}
void advance_agent(int agent, Warp& knowers) {
  const unsigned clock = ++agent_clocks[agent - 2 * thread_count];
  for (const Thread* lane : knowers.lanes)
    if (lane) clock_of(lane->number)[agent] = clock;
}

void fence_proxy(Thread* thread) {
  if (fences.empty()) fences.assign(std::size_t(thread_count) * agent_count, 0);
  unsigned* mine = clock_of(thread->number);
  std::copy(mine, mine + agent_count, &fences[std::size_t(thread->number) * agent_count]);
  tick(thread->number);  // stores after the fence are not covered by it
}

void order_reads(const Warp& warp) {
  for (const Thread* lane : warp.lanes)
    for (const Thread* other : warp.lanes) {
      const int agent = thread_count + other->number;
      clock_of(lane->number)[agent] = clock_of(other->number)[agent];
    }
  for (const Thread* lane : warp.lanes) {
    const int agent = thread_count + lane->number;
    handed_to(lane->number)[agent] = ++clock_of(lane->number)[agent];
  }
}

// ---------------------------------------------------------------- shared memory

void touch_shared(Thread* thread, std::size_t offset, int bytes, bool write, const void* pc) {
  check_plain(thread, offset, bytes, write, pc);
  set_cells(offset, bytes, write ? writes : first_read + thread->warp,
            access_by(thread, write, 0, pc));
}

void mark_in_flight(Thread* thread, std::size_t offset, int bytes, const void* pc) {
  check_plain(thread, offset, bytes, true, pc);
  set_cells(offset, bytes, writes, access_by(thread, true, in_flight, pc));
}

void mark_landed(Thread* thread, std::size_t offset, int bytes) {
  const unsigned clock = own_clock(thread);
  for (std::size_t at = offset; at < offset + bytes; at += cell_bytes) {
    cell_at(at)->flags = 0;
    cell_at(at)->clock = clock;
  }
}

void check_asynchronous(const Thread* thread, std::size_t offset, int bytes, bool write, bool own,
                        const char* what, const void* pc) {
  for_each_access(offset, bytes, writes, [&](const Access& other, std::size_t at) {
    check_write_before(thread, other, at, write, own, pc);
    if (other.clock > block_start && !(other.flags & asynchronous) && !fenced(thread, other))
      fail_at(pc,
              "missing fence_async_proxy: %s of thread %d %s shared byte %zu, which thread %d wrote "
              "with plain stores (there: pc %p)",
              what, thread->number, write ? "writes" : "reads", at, int(other.agent),
              decode(other.pc));
  });
  if (!write) return;
  check_reads_before(thread, offset, bytes, own, pc);
  set_cells(offset, bytes, writes, access_by(thread, true, in_flight | asynchronous, pc));
}

void mark_asynchronous(int agent, std::size_t offset, int bytes, const void* pc) {
  set_cells(offset, bytes, writes, access_of(agent, pc));
}

void mark_asynchronous_read(int warp, std::size_t offset, int bytes, const void* pc) {
  set_cells(offset, bytes, first_read + warp, access_of(warp_agent(warp), pc));
}

// The shared memory of a block is there until its last thread ends: whoever reads it from another block
// must have told one of its threads by then.
void touch_block(const Thread* thread, int rank, const void* pc) {
  if (rank == thread->rank) return;
  if (machine.running[rank] == 0)
    fail_at(pc, "missing cluster_sync: thread %d reads shared memory of block %d of its cluster, which has ended",
            thread->number, rank);
  if (!machine.check_races) return;
  remote_reads[std::size_t(thread->number) * machine.cluster + rank] =
      access_by(thread, false, 0, pc);
}

void check_block_ends(int rank) {
  const int each = thread_count / machine.cluster;
  for (int reader = 0; reader < thread_count; ++reader) {
    const Access& read = remote_reads[std::size_t(reader) * machine.cluster + rank];
    if (!read.clock) continue;
    bool told = false;
    for (int i = rank * each; i < (rank + 1) * each; ++i)
      told |= known(&machine.threads[i], read);
    if (!told)
      fail_at(decode(read.pc),
              "missing cluster_sync: block %d of the cluster ends, and may have ended before thread %d "
              "reads its shared memory",
              rank, reader);
  }
}

// ---------------------------------------------------------------- global memory

void touch_global(Thread* thread, const Region& region, std::size_t offset, int bytes, bool write,
                  const void* pc) {
  GlobalCell* cells = global_cells[&region - machine.regions.data()];
  const unsigned long long block = machine.block_number + 1;
  const Access access = access_by(thread, write, 0, pc);
  const auto race = [&](unsigned long long other_block, const Access& other, const char* then) {
    fail_at(pc,
            "race between blocks: byte %zu of argument %d was %s by block %llu and is %s by block "
            "%llu of the same launch (there: pc %p)",
            offset, region.argument, then, other_block - 1, write ? "written" : "read", block - 1,
            decode(other.pc));
  };
  if (region.earlier > (write ? 0 : 1) && clock_of(thread->number)[earlier_launches] == 0)
    fail_at(pc,
            "missing grid_dependency_wait: thread %d %s byte %zu of argument %d, which a launch before, "
            "that may still run, %s",
            thread->number, write ? "writes" : "reads", offset, region.argument,
            region.earlier > 1 ? "writes" : "reads");
  const std::size_t first = offset / cell_bytes, last = (offset + bytes - 1) / cell_bytes;
  const GlobalCell* checked = nullptr;
  for (std::size_t i = first; i <= last; checked = &cells[i], ++i) {
    const GlobalCell& cell = cells[i];
    if (checked && same(cell, *checked)) continue;
    if (cell.writer_block && cell.writer_block != block)
      race(cell.writer_block, cell.write, "written");
    if (cell.writer_block && !known(thread, cell.write))
      report("global", i * cell_bytes, name(thread->number), thread->warp, write, cell.write, true, pc);
    if (write && cell.reader_block) {
      if (cell.reader_block != block) race(cell.reader_block, cell.read, "read");
      if (!known(thread, cell.read))
        report("global", i * cell_bytes, name(thread->number), thread->warp, write, cell.read, false, pc);
    }
  }
  for (std::size_t i = first; i <= last; ++i) {
    if (write) cells[i].write = access, cells[i].writer_block = block;
    else cells[i].read = access, cells[i].reader_block = block;
  }
}

}  // namespace emulator
