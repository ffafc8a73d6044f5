// What the kernel side and the runtime agree on: builtin types only, so that both can include it.
#pragma once

namespace emulator {

/// Where in the kernel's source a call stands; filled in by the compiler as a default argument.
struct Site {
  const char* file;
  const char* function;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(),
                             const char* function = __builtin_FUNCTION(),
                             int line = __builtin_LINE()) {
    return Site{file, function, line};
  }
};

// The running thread and its block; the scheduler sets them before it switches.
struct Index3 { unsigned x, y, z; };
extern Index3 thread_index, block_index, block_extent, grid_extent;
int cluster_blocks();  // blocks of a cluster; defined beside the kernel

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void yield();
long long clock();

// ---------------------------------------------------------------- meeting points

/// bar.sync (wait) or bar.arrive; threads == 0 means all threads of the block that still run.
void barrier(int id, int threads, bool wait, const char* name, Site site);
void warp_barrier(unsigned mask, Site site);

/// All threads of a cluster.
void cluster_barrier(Site site);

enum class Shuffle { index, up, down, exclusive_or };
unsigned long long shuffle(Shuffle kind, unsigned mask, unsigned long long value, int lane,
                           int width, Site site);
enum class Vote { all, any, ballot };
unsigned vote(Vote kind, unsigned mask, bool predicate, Site site);

/// The launches before this one have ended, and what they wrote is there.
void dependency_wait();

// ---------------------------------------------------------------- numbers

unsigned round_tf32(float value);
unsigned short f16_from_float(float value);
unsigned short bf16_from_float(float value);
float float_from_f16(unsigned short bits);

// ---------------------------------------------------------------- shared memory

unsigned shared_address(const void* pointer);
/// The same place in the shared memory of another block of the cluster.
unsigned shared_address_of(unsigned address, unsigned rank);
void shared_read(unsigned address, void* words, int bytes);
void shared_write(unsigned address, const void* words, int bytes);
void load_matrix(unsigned address, unsigned* words, int matrices, bool transposed, Site site);
void store_matrix(unsigned address, const unsigned* words, int matrices, bool transposed,
                  Site site);

void async_copy(unsigned destination, const void* source, int bytes, bool valid);
void async_commit();
void async_wait(int pending);

// ---------------------------------------------------------------- matrix products

enum class Operand { tf32, f16, bf16 };
void mma(Operand type, float* c, const unsigned* a, const unsigned* b, Site site);

// ---------------------------------------------------------------- mbarriers and bulk copies (sm_90)

void mbarrier_init(unsigned barrier, unsigned arrivals, Site site);
void mbarrier_init_fence();
void mbarrier_arrive(unsigned barrier, Site site);
void mbarrier_expect(unsigned barrier, unsigned bytes, Site site);
bool mbarrier_try_wait(unsigned barrier, unsigned parity, Site site);
void mbarrier_wait(unsigned barrier, unsigned parity, Site site);
void fence_async_proxy();

void bulk_copy(unsigned destination, const void* source, unsigned bytes, unsigned barrier);
void tensor_load(unsigned destination, const void* map, const int* coordinates, int rank,
                 unsigned barrier);
void tensor_store(const void* map, const int* coordinates, int rank, unsigned source);
void bulk_store(void* destination, unsigned source, unsigned bytes);
void bulk_commit();
void bulk_wait(int pending);

// ---------------------------------------------------------------- warpgroup products (sm_90)

void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(int pending, Site site);
/// `a` is the thread's four operand words, or null where a_descriptor describes shared memory;
/// `first`: d is overwritten instead of added to.
void wgmma(Operand type, int columns, float* d, const unsigned* a, unsigned long long a_descriptor,
           unsigned long long b_descriptor, Site site, bool first = false,
           bool n_major = false, bool m_major = false);
void set_registers(int count, bool increase, Site site);

// ---------------------------------------------------------------- kernel entry

/// One kernel parameter, for checking how its argument was packed.
struct Parameter {
  char kind;  // 'p' pointer, 'i' integer, 'f' floating point, 's' structure
  int bytes;
};

}  // namespace emulator
