// Data races, found by happens-before and not by luck of the schedule.
//
// Every thread has a vector clock: what it knows of every other thread's progress. Barriers,
// __syncwarp and mbarriers join clocks; nothing else orders threads (in particular not shuffles,
// ldmatrix or mma). Each cell of memory remembers its last write and, per warp, the last read; an
// access that does not know of a conflicting one is an error.
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

struct Access {
  unsigned clock;  // 0: none
  unsigned short thread;
  unsigned short in_flight;  // asynchronous copies not waited for
  unsigned pc;               // offset from the kernel's code, for messages
};

struct GlobalCell {
  unsigned long long writer_block, reader_block;  // block number, counted from 1
  Access write, read;
};

constexpr int cell_bytes = 2;

int thread_count, warp_count;
std::vector<unsigned> clocks;  // [thread][thread]
unsigned next_clock = 1;
Access* shared_cells;  // [cell][1 + warp]: the write, then reads
std::size_t shared_cells_bytes;
std::vector<GlobalCell*> global_cells;  // as machine.regions
std::vector<std::size_t> global_cells_bytes;

void* reserve(std::size_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
              -1, 0);
}

const char* code_base() { return reinterpret_cast<const char*>(&emulated_invoke); }
unsigned encode(const void* pc) {
  return unsigned(static_cast<const char*>(pc) - code_base());
}
const void* decode(unsigned pc) { return code_base() + int(pc); }

unsigned* clock_of(int thread) { return &clocks[std::size_t(thread) * thread_count]; }

bool known(const Thread* thread, const Access& access) {
  return clock_of(thread->number)[access.thread] >= access.clock;
}

[[noreturn]] void report(const char* memory, std::size_t byte, const Thread* thread, bool write,
                         const Access& other, bool other_wrote, const void* pc) {
  const bool same_warp = other.thread / warp_lanes == thread->warp;
  fail_at(pc,
          "missing %s: thread %d %s %s byte %zu, which thread %d %s without a barrier between "
          "(there: pc %p)",
          same_warp ? "__syncwarp or __syncthreads" : "__syncthreads", thread->number, write ? "writes" : "reads",
          memory, byte, int(other.thread), other_wrote ? "wrote" : "read", decode(other.pc));
}

Access* cell_at(std::size_t offset) {
  return shared_cells + (offset / cell_bytes) * (1 + warp_count);
}

void check_cell(Thread* thread, Access* cell, std::size_t offset, bool write, const void* pc) {
  if (cell->in_flight)
    fail_at(pc,
            "missing async_wait: thread %d %s shared byte %zu, to which an asynchronous copy of "
            "thread %d is in flight (there: pc %p)",
            thread->number, write ? "writes" : "reads", offset, int(cell->thread),
            decode(cell->pc));
  if (cell->clock && !known(thread, *cell))
    report("shared", offset, thread, write, *cell, true, pc);
  if (write)
    for (int warp = 0; warp < warp_count; ++warp) {
      const Access& read = cell[1 + warp];
      if (read.clock && !known(thread, read))
        report("shared", offset, thread, write, read, false, pc);
    }
}

}  // namespace

void begin_launch_races(int threads, int warps, std::size_t shared_bytes) {
  thread_count = threads;
  warp_count = warps;
  clocks.assign(std::size_t(threads) * threads, 0);
  next_clock = 1;
  shared_cells_bytes = (shared_bytes / cell_bytes + 1) * (1 + warps) * sizeof(Access);
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
  unsigned last = next_clock;
  for (int i = 0; i < thread_count; ++i) last = std::max(last, clock_of(i)[i]);
  next_clock = last + 1;
  std::fill(clocks.begin(), clocks.end(), last);  // everything before this block is known
  for (int i = 0; i < thread_count; ++i) clock_of(i)[i] = next_clock;
}

void order_threads(const std::vector<int>& from, const std::vector<Thread*>& to) {
  static std::vector<unsigned> joined;
  joined.assign(thread_count, 0);
  for (int thread : from) {
    const unsigned* clock = clock_of(thread);
    for (int i = 0; i < thread_count; ++i) joined[i] = std::max(joined[i], clock[i]);
  }
  for (Thread* thread : to) {
    unsigned* clock = clock_of(thread->number);
    for (int i = 0; i < thread_count; ++i) clock[i] = std::max(clock[i], joined[i]);
  }
  for (int thread : from) ++clock_of(thread)[thread];
}

void touch_shared(Thread* thread, std::size_t offset, int bytes, bool write, const void* pc) {
  const unsigned clock = clock_of(thread->number)[thread->number];
  const Access access{clock, (unsigned short)thread->number, 0, encode(pc)};
  for (std::size_t at = offset / cell_bytes * cell_bytes; at < offset + bytes; at += cell_bytes) {
    Access* cell = cell_at(at);
    check_cell(thread, cell, at, write, pc);
    cell[write ? 0 : 1 + thread->warp] = access;
  }
}

void mark_in_flight(Thread* thread, std::size_t offset, int bytes, const void* pc) {
  touch_shared(thread, offset, bytes, true, pc);
  for (std::size_t at = offset; at < offset + bytes; at += cell_bytes) cell_at(at)->in_flight = 1;
}

void mark_landed(Thread* thread, std::size_t offset, int bytes) {
  for (std::size_t at = offset; at < offset + bytes; at += cell_bytes) {
    cell_at(at)->in_flight = 0;
    cell_at(at)->clock = clock_of(thread->number)[thread->number];
  }
}

void touch_global(Thread* thread, const Region& region, std::size_t offset, int bytes, bool write,
                  const void* pc) {
  GlobalCell* cells = global_cells[&region - machine.regions.data()];
  const unsigned long long block = machine.block_number + 1;
  const Access access{clock_of(thread->number)[thread->number], (unsigned short)thread->number, 0,
                      encode(pc)};
  for (std::size_t at = offset / cell_bytes * cell_bytes; at < offset + bytes; at += cell_bytes) {
    GlobalCell& cell = cells[at / cell_bytes];
    if (cell.writer_block && cell.writer_block != block)
      fail_at(pc, "race between blocks: byte %zu of argument %d was written by block %llu and is "
              "%s by block %llu of the same launch (there: pc %p)",
              at, region.argument, cell.writer_block - 1, write ? "written" : "read", block - 1,
              decode(cell.write.pc));
    if (cell.writer_block && !known(thread, cell.write))
      report("global", at, thread, write, cell.write, true, pc);
    if (write && cell.reader_block) {
      if (cell.reader_block != block)
        fail_at(pc, "race between blocks: byte %zu of argument %d was read by block %llu and is "
                "written by block %llu of the same launch (there: pc %p)",
                at, region.argument, cell.reader_block - 1, block - 1, decode(cell.read.pc));
      if (!known(thread, cell.read)) report("global", at, thread, write, cell.read, false, pc);
    }
    if (write) cell.write = access, cell.writer_block = block;
    else cell.read = access, cell.reader_block = block;
  }
}

}  // namespace emulator
