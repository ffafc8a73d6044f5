// wgmma: products that take their operands between issue and wait.
//
// Shared-memory operands are checked when the product is issued, and read when its group is first
// waited for. An accumulator is poisoned meanwhile; accumulator and A registers are memory of the
// thread's stack, and plain accesses to them before the wait are errors.
#include <algorithm>
#include <cstring>

#include "machine.hpp"

namespace emulator {

struct Product {
  Operand type;
  int columns;
  bool a_shared, first;        // first: D is overwritten
  bool m_major, n_major;       // operands from shared memory whose rows are of K
  unsigned long long a, b;      // descriptors
  unsigned registers[group_threads][4];
  const void* pc;
  bool done;
  std::vector<float> result;  // [64][columns]
};

namespace {

struct Argument {
  Operand type;
  int columns;
  float* d;
  const unsigned* a;
  unsigned long long a_descriptor, b_descriptor;
  const void* pc;
  bool first, n_major, m_major;
};

int depth_of(Operand type) { return type == Operand::tf32 ? 8 : 16; }

/// Shared addresses of the 16-byte pieces of an operand: two make a row of K; MN-major, eight rows
/// of M or N at one k.
struct Descriptor {
  unsigned start, depth_step, row_step;
  bool swizzled, mn_major;
  unsigned pitch;  // bytes of a swizzled row

  Descriptor(unsigned long long bits, const void* pc, bool mn_major_ = false)
      : start(unsigned(bits & 0x3fff) << 4),
        depth_step(unsigned(bits >> 16 & 0x3fff) << 4),
        row_step(unsigned(bits >> 32 & 0x3fff) << 4),
        swizzled(bits >> 62 != 0),
        mn_major(mn_major_),
        pitch(bits >> 62 == 2 ? 64 : 128) {
    // 18 bits of an address in this block's part of a cluster's shared memory.
    const unsigned low = unsigned(self()->rank * dynamic_capacity);
    while (start < low) start += 1u << 18;
    if (mn_major && (!swizzled || start % (8 * pitch)))
      fail_at(pc, "wgmma: an MN-major operand is emulated with swizzle, from eight whole rows on");
    if (bits >> 62 > (mn_major ? 2 : 1))
      fail_at(pc, "wgmma: only no swizzle and the 128-byte one are emulated, MN-major the 64-byte one");
    if (bits >> 49 & 7) fail_at(pc, "wgmma: a base offset in a descriptor is not emulated");
    if (swizzled && start % 1024 >= 128 && !mn_major)
      fail_at(pc, "wgmma: a swizzled operand at shared address %#x starts within eight rows", start);
  }
  /// MN-major: eight rows of M or N at one k. A row of shared memory has `pitch` bytes of them, the
  /// next ones come `depth_step` (the leading byte offset) later, eight k `row_step` (the stride
  /// byte offset) later.
  unsigned mn_piece(int row, int k) const {
    const unsigned address = start + row * 2 / pitch * depth_step + row * 2 % pitch +
                             k / 8 * row_step + k % 8 * pitch;
    return address ^ (address >> 3 & (pitch - 16));
  }
  unsigned piece(int row, int half) const {
    if (!swizzled)
      return start + row / 8 * row_step + row % 8 * 16 + half * depth_step;
    const unsigned address = start + row / 8 * row_step + row % 8 * 128 + half * 16;
    return address ^ (address >> 3 & 0x70);
  }
};

float decode(Operand type, const unsigned char* bytes) {
  unsigned word = 0;
  if (type == Operand::tf32) {
    std::memcpy(&word, bytes, 4);
    word &= 0xffffe000u;  // the low 13 bits are not looked at
  } else {
    unsigned short half;
    std::memcpy(&half, bytes, 2);
    if (type == Operand::f16) return float_from_f16(half);
    word = unsigned(half) << 16;
  }
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

template <typename Visit>
void for_each_piece(const Descriptor& matrix, int rows, const void* pc, Visit visit) {
  if (matrix.mn_major) {
    for (int row = 0; row < rows; row += 8)
      for (int k = 0; k < 16; ++k)
        visit(row, k, shared_pointer(matrix.mn_piece(row, k), 16, "wgmma", pc));
    return;
  }
  for (int row = 0; row < rows; ++row)
    for (int half = 0; half < 2; ++half)
      visit(row, half, shared_pointer(matrix.piece(row, half), 16, "wgmma", pc));
}

/// A warp's asynchronous read: ordered if any of its lanes, which go together, knows of the writes.
void check_reads(int warp, const Descriptor& matrix, int rows, const void* pc) {
  if (!machine.check_races) return;
  for_each_piece(matrix, rows, pc, [&](int, int, const unsigned char* pointer) {
    check_asynchronous(machine.warps[warp].lanes[0], shared_offset(pointer), 16, false, false,
                       "wgmma", pc);
  });
}

void mark_reads(int warp, const Descriptor& matrix, int rows, const void* pc) {
  for_each_piece(matrix, rows, pc, [&](int, int, const unsigned char* pointer) {
    mark_asynchronous_read(warp, shared_offset(pointer), 16, pc);
  });
}

/// [k][row]
std::vector<float> read_operand(Operand type, const Descriptor& matrix, int rows, const void* pc) {
  const int depth = depth_of(type), size = type == Operand::tf32 ? 4 : 2;
  std::vector<float> values(rows * depth);
  for_each_piece(matrix, rows, pc, [&](int row, int half, const unsigned char* pointer) {
    for (int i = 0; i < 16 / size; ++i)
      values[matrix.mn_major ? half * rows + row + i : (half * (depth / 2) + i) * rows + row] =
          decode(type, pointer + i * size);
  });
  return values;
}

void multiply(Product& product) {
  const int depth = depth_of(product.type), columns = product.columns;
  const Descriptor b_matrix(product.b, product.pc, product.n_major);
  std::vector<float> a(64 * depth);
  if (product.a_shared) {
    a = read_operand(product.type, Descriptor(product.a, product.pc, product.m_major), 64, product.pc);
  } else {
    for (int thread = 0; thread < group_threads; ++thread) {
      const int g = thread % 32 / 4, t = thread % 4;
      for (int i = 0; i < 4; ++i) {
        const int row = thread / 32 * 16 + g + i % 2 * 8;
        const auto* bytes = reinterpret_cast<const unsigned char*>(&product.registers[thread][i]);
        if (product.type == Operand::tf32) {
          a[(t + i / 2 * 4) * 64 + row] = decode(product.type, bytes);
        } else {
          for (int half = 0; half < 2; ++half)
            a[(2 * t + half + i / 2 * 8) * 64 + row] = decode(product.type, bytes + 2 * half);
        }
      }
    }
  }
  const std::vector<float> b = read_operand(product.type, b_matrix, columns, product.pc);
  product.result.assign(64 * columns, 0.f);
  for (int row = 0; row < 64; ++row) {
    float* __restrict__ sums = &product.result[row * columns];
    for (int k = 0; k < depth; ++k) {
      const float left = a[k * 64 + row];
      const float* __restrict__ right = &b[k * columns];
      for (int column = 0; column < columns; ++column) sums[column] += left * right[column];
    }
  }
  product.done = true;
}

Accumulator& hold(Thread* thread, float* d, int count) {
  for (Accumulator& other : thread->accumulators) {
    if (other.d == d && int(other.value.size()) == count) return other;
    if (other.d < d + count && d < other.d + other.value.size())
      fail("wgmma: accumulators of pending products overlap without being the same");
  }
  thread->accumulators.push_back({d, 0, std::vector<float>(d, d + count)});
  std::memset(d, poison, count * sizeof(float));
  thread->held.push_back({reinterpret_cast<unsigned char*>(d), int(count * sizeof(float)), true});
  return thread->accumulators.back();
}

void release(Thread* thread, const void* pointer) {
  auto& held = thread->held;
  held.erase(std::find_if(held.begin(), held.end(),
                          [&](const HeldRegisters& h) { return h.low == pointer; }));
}

void issue(void** arguments) {
  const auto& first = *static_cast<Argument*>(arguments[0]);
  auto product = std::make_shared<Product>();
  product->type = first.type;
  product->columns = first.columns;
  product->a_shared = first.a == nullptr;
  product->first = first.first;
  product->m_major = first.m_major;
  product->n_major = first.n_major;
  product->a = first.a_descriptor;
  product->b = first.b_descriptor;
  product->pc = first.pc;
  product->done = false;
  const int group = self()->number / group_threads;
  for (int i = 0; i < group_threads; ++i) {
    const auto& mine = *static_cast<Argument*>(arguments[i]);
    if (mine.b_descriptor != first.b_descriptor || mine.a_descriptor != first.a_descriptor)
      fail("wgmma: descriptors differ between threads of a warpgroup");
    Thread* thread = &machine.threads[group * group_threads + i];
    if (!thread->fenced)
      fail("missing wgmma_fence: thread %d issues a product after a wait or at the start",
           thread->number);
    if (mine.a) {
      std::memcpy(product->registers[i], mine.a, sizeof product->registers[i]);
      thread->held.push_back(
          {reinterpret_cast<unsigned char*>(const_cast<unsigned*>(mine.a)), 16, false});
    }
    ++hold(thread, mine.d, first.columns / 2).pending;
    thread->open_products.push_back({product, mine.d, mine.a});
  }
  const Descriptor b(product->b, product->pc, product->n_major);
  for (int i = 0; i < 4; ++i) {
    if (machine.check_races) order_reads(machine.warps[group * 4 + i]);
    check_reads(group * 4 + i, b, product->columns, product->pc);
    if (product->a_shared)
      check_reads(group * 4 + i, Descriptor(product->a, product->pc, product->m_major), 64,
                  product->pc);
  }
}

void retire(Thread* thread, const ThreadProduct& part) {
  Product& product = *part.product;
  if (!product.done) {
    const Descriptor b(product.b, product.pc, product.n_major);
    const int first_warp = thread->number / group_threads * 4;
    for (int warp = first_warp; warp < first_warp + 4; ++warp) {
      check_reads(warp, b, product.columns, product.pc);
      if (machine.check_races) mark_reads(warp, b, product.columns, product.pc);
      if (product.a_shared) {
        const Descriptor a(product.a, product.pc, product.m_major);
        check_reads(warp, a, 64, product.pc);
        if (machine.check_races) mark_reads(warp, a, 64, product.pc);
      }
    }
    multiply(product);
  }
  if (part.a) release(thread, part.a);
  const auto found = std::find_if(thread->accumulators.begin(), thread->accumulators.end(),
                                  [&](const Accumulator& a) { return a.d == part.d; });
  const int position = thread->number % group_threads;
  const int g = position % 32 / 4, t = position % 4;
  for (int i = 0; i < product.columns / 2; ++i) {
    const int row = position / 32 * 16 + g + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * t + i % 2;
    if (product.first) found->value[i] = 0;
    found->value[i] += product.result[row * product.columns + column];
  }
  if (--found->pending > 0) return;
  const auto* bytes = reinterpret_cast<const unsigned char*>(found->d);
  for (std::size_t i = 0; i < found->value.size() * sizeof(float); ++i)
    if (bytes[i] != poison) fail_at(product.pc, "wgmma: an accumulator was written before its wait");
  std::memcpy(found->d, found->value.data(), found->value.size() * sizeof(float));
  release(thread, found->d);
  thread->accumulators.erase(found);
}

// ---------------------------------------------------------------- setmaxnreg

struct Registers {
  std::vector<int> of_group;
  std::vector<int> free;  // of each block
  std::vector<Thread*> waiting;
};
Registers registers;

}  // namespace

void begin_block_registers() {
  // What a launch of this size can have at most, shared evenly.
  const int threads = int(machine.threads.size()) / machine.cluster;
  const int each = std::min(65536 / threads / 8 * 8, 255);
  registers.of_group.assign((machine.threads.size() + group_threads - 1) / group_threads, each);
  registers.free.assign(machine.cluster, 0);
  registers.waiting.clear();
}

void wgmma_fence(Site) { self()->fenced = true; }

void wgmma_commit(Site) {
  Thread* thread = self();
  thread->product_groups.push_back(std::move(thread->open_products));
  thread->open_products.clear();
}

void wgmma_wait(int pending, Site site) {
  collective("wgmma_wait", site, ~0u, &pending, [](Warp& warp, Rendezvous& meeting) {
    const int left = *static_cast<int*>(meeting.arguments[0]);
    bool retired = false;
    for (Thread* thread : warp.lanes) {
      for (; int(thread->product_groups.size()) > left; thread->product_groups.pop_front())
        for (const ThreadProduct& part : thread->product_groups.front()) {
          retire(thread, part);
          retired = true;
          thread->fenced = false;
        }
    }
    // The lanes wait together: whichever announces it, announces it for the warp.
    if (machine.check_races && retired) advance_agent(warp_agent(warp.lanes[0]->warp), warp);
  });
}

void wgmma(Operand type, int columns, float* d, const unsigned* a, unsigned long long a_descriptor,
           unsigned long long b_descriptor, Site site, bool first, bool n_major, bool m_major) {
  static const char* const names[] = {"wgmma_tf32", "wgmma_f16", "wgmma_bf16"};
  if (columns < 8 || columns > 256 || columns % 8)
    fail("%s: N = %d is no multiple of 8 up to 256", names[int(type)], columns);
  Argument argument{type,         columns,      d, a,
                    a_descriptor, b_descriptor, __builtin_return_address(0), first,
                    n_major,      m_major};
  group_collective(names[int(type)], site, &argument, issue);
}

void set_registers(int count, bool increase, Site site) {
  const char* name = increase ? "register_increase" : "register_decrease";
  if (count < 24 || count > 256 || count % 8)
    fail("%s: %d is no multiple of 8 from 24 to 256", name, count);
  Thread* thread = self();
  const int group = thread->number / group_threads;
  const int have = registers.of_group[group];
  if (increase ? count < have : count > have)
    fail("%s: from %d registers to %d", name, have, count);
  group_collective(name, site, nullptr, [](void**) {});
  if (thread->number % group_threads == 0) {
    const auto wanted = [&] { return (count - have) * group_threads; };
    while (wanted() > registers.free[thread->rank]) {
      registers.waiting.push_back(thread);
      block_in("setmaxnreg", site);
    }
    registers.free[thread->rank] -= wanted();
    registers.of_group[group] = count;
    for (Thread* other : registers.waiting) wake(other);
    registers.waiting.clear();
  }
  group_collective(name, site, nullptr, [](void**) {});
}

void check_registers(const Thread* thread, const void* pointer, int bytes, bool write,
                     const void* pc) {
  const auto* low = static_cast<const unsigned char*>(pointer);
  for (const HeldRegisters& held : thread->held)
    if (low < held.low + held.bytes && held.low < low + bytes && (write || held.accumulator))
      fail_at(pc, "missing wgmma_wait: %s register of a pending product is %s",
              held.accumulator ? "an accumulator" : "an A", write ? "written" : "read");
}

void finish_thread() {
  Thread* thread = self();
  if (!thread->open_products.empty() || !thread->product_groups.empty())
    fail("missing wgmma_wait: the thread ends with products pending");
  if (!thread->open_stores.empty() || !thread->store_groups.empty())
    fail("missing bulk_wait: the thread ends with stores pending");
}

}  // namespace emulator
