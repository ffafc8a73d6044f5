// Warp-wide instructions: shuffles, votes, matrix loads and products, in the fragment layouts of
// the PTX ISA manual. With lane = 4 * g + t, t in 0..3.
#include <cstring>

#include "machine.hpp"

namespace emulator {

void warp_barrier(unsigned mask, Site site) {
  collective("__syncwarp", site, mask, nullptr, [](Warp& warp, Rendezvous& meeting) {
    if (!machine.check_races) return;
    std::vector<int> numbers;
    std::vector<Thread*> threads;
    for (int lane = 0; lane < warp_lanes; ++lane)
      if (meeting.mask >> lane & 1) {
        threads.push_back(warp.lanes[lane]);
        numbers.push_back(warp.lanes[lane]->number);
      }
    order_threads(numbers, threads, true);
  });
}

// ---------------------------------------------------------------- shuffles and votes

namespace {
struct ShuffleArgument {
  Shuffle kind;
  unsigned long long value, result;
  int lane, width;
};
struct VoteArgument {
  Vote kind;
  bool predicate;
  unsigned result;
};
}  // namespace

unsigned long long shuffle(Shuffle kind, unsigned mask, unsigned long long value, int lane,
                           int width, Site site) {
  static const char* const names[] = {"__shfl_sync", "__shfl_up_sync", "__shfl_down_sync",
                                      "__shfl_xor_sync"};
  if (width < 1 || width > 32 || (width & (width - 1)))
    fail("%s: width %d is not a power of two up to 32", names[int(kind)], width);
  ShuffleArgument argument{kind, value, value, lane, width};
  collective(names[int(kind)], site, mask, &argument, [](Warp& warp, Rendezvous& meeting) {
    for (int me = 0; me < warp_lanes; ++me) {
      if (!(meeting.mask >> me & 1)) continue;
      auto* mine = static_cast<ShuffleArgument*>(meeting.arguments[me]);
      const int first = me & ~(mine->width - 1), last = first + mine->width - 1;
      int from = me;
      switch (mine->kind) {
        case Shuffle::index: from = first + (mine->lane & (mine->width - 1)); break;
        case Shuffle::up: from = me - mine->lane < first ? me : me - mine->lane; break;
        case Shuffle::down: from = me + mine->lane > last ? me : me + mine->lane; break;
        case Shuffle::exclusive_or:
          from = (me ^ mine->lane) > last ? me : me ^ mine->lane;
          break;
      }
      if (!(meeting.mask >> from & 1))
        fail("%s: lane %d reads lane %d, which is not in the mask %#x (warp %d)", meeting.name, me,
             from, meeting.mask, warp.lanes[me]->warp);
      mine->result = static_cast<ShuffleArgument*>(meeting.arguments[from])->value;
    }
  });
  return argument.result;
}

unsigned vote(Vote kind, unsigned mask, bool predicate, Site site) {
  static const char* const names[] = {"__all_sync", "__any_sync", "__ballot_sync"};
  VoteArgument argument{kind, predicate, 0};
  collective(names[int(kind)], site, mask, &argument, [](Warp&, Rendezvous& meeting) {
    unsigned ballot = 0;
    for (int lane = 0; lane < warp_lanes; ++lane)
      if (meeting.mask >> lane & 1)
        ballot |= unsigned(static_cast<VoteArgument*>(meeting.arguments[lane])->predicate) << lane;
    for (int lane = 0; lane < warp_lanes; ++lane)
      if (meeting.mask >> lane & 1) {
        auto* mine = static_cast<VoteArgument*>(meeting.arguments[lane]);
        mine->result = mine->kind == Vote::ballot ? ballot
                       : mine->kind == Vote::any  ? ballot != 0
                                                  : ballot == meeting.mask;
      }
  });
  return argument.result;
}

// ---------------------------------------------------------------- ldmatrix, stmatrix

namespace {
struct MatrixArgument {
  unsigned address;
  unsigned* words;  // read or written
  int matrices;
  bool transposed;
  const void* pc;
};

/// Row `row` of matrix `matrix`, at the address that lane 8 * matrix + row supplies.
unsigned char* matrix_row(Warp& warp, Rendezvous& meeting, int matrix, int row, bool write) {
  const int lane = 8 * matrix + row;
  auto* owner = static_cast<MatrixArgument*>(meeting.arguments[lane]);
  unsigned char* pointer = shared_pointer(owner->address, 16, meeting.name, owner->pc);
  if (machine.check_races)
    touch_shared(warp.lanes[lane], shared_offset(pointer), 16, write, owner->pc);
  return pointer;
}

/// Lane (g, t) holds elements (g, 2t) and (g, 2t+1); transposed, (2t, g) and (2t+1, g).
void move_matrices(Warp& warp, Rendezvous& meeting, bool store) {
  const MatrixArgument first = *static_cast<MatrixArgument*>(meeting.arguments[0]);
  for (int matrix = 0; matrix < first.matrices; ++matrix) {
    unsigned short elements[8][8];
    if (!store)
      for (int row = 0; row < 8; ++row)
        std::memcpy(elements[row], matrix_row(warp, meeting, matrix, row, false), 16);
    for (int lane = 0; lane < warp_lanes; ++lane) {
      unsigned& word = static_cast<MatrixArgument*>(meeting.arguments[lane])->words[matrix];
      const int g = lane / 4, t = lane % 4;
      unsigned short& low = first.transposed ? elements[2 * t][g] : elements[g][2 * t];
      unsigned short& high = first.transposed ? elements[2 * t + 1][g] : elements[g][2 * t + 1];
      if (store) {
        low = (unsigned short)word;
        high = (unsigned short)(word >> 16);
      } else {
        word = low | unsigned(high) << 16;
      }
    }
    if (store)
      for (int row = 0; row < 8; ++row)
        std::memcpy(matrix_row(warp, meeting, matrix, row, true), elements[row], 16);
  }
}
}  // namespace

void load_matrix(unsigned address, unsigned* words, int matrices, bool transposed, Site site) {
  MatrixArgument argument{address, words, matrices, transposed, __builtin_return_address(0)};
  collective("ldmatrix", site, ~0u, &argument,
             [](Warp& warp, Rendezvous& meeting) { move_matrices(warp, meeting, false); });
}

void store_matrix(unsigned address, const unsigned* words, int matrices, bool transposed,
                  Site site) {
  MatrixArgument argument{address, const_cast<unsigned*>(words), matrices, transposed,
                          __builtin_return_address(0)};
  collective("stmatrix", site, ~0u, &argument,
             [](Warp& warp, Rendezvous& meeting) { move_matrices(warp, meeting, true); });
}

// ---------------------------------------------------------------- mma.sync

namespace {
struct MmaArgument {
  float* c;
  const unsigned* a;
  const unsigned* b;
};

float tf32_operand(unsigned word) {  // the low 13 bits are not looked at
  word &= 0xffffe000u;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
float bf16_operand(unsigned half) {
  const unsigned word = half << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

template <int Depth>
void multiply_add(const float (&a)[16][Depth], const float (&b)[Depth][8], float (&c)[16][8]) {
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < Depth; ++k)
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
}

template <Operand Type>
void complete_mma(Warp&, Rendezvous& meeting) {
  constexpr int depth = Type == Operand::tf32 ? 8 : 16;
  float a[16][depth], b[depth][8], c[16][8];
  for (int lane = 0; lane < warp_lanes; ++lane) {
    const auto& mine = *static_cast<MmaArgument*>(meeting.arguments[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) c[g + i / 2 * 8][2 * t + i % 2] = mine.c[i];
    for (int i = 0; i < 4; ++i) {
      const int row = g + i % 2 * 8;
      if constexpr (Type == Operand::tf32) {
        a[row][t + i / 2 * 4] = tf32_operand(mine.a[i]);
      } else {
        for (int half = 0; half < 2; ++half) {
          const unsigned bits = mine.a[i] >> (16 * half) & 0xffff;
          a[row][2 * t + half + i / 2 * 8] =
              Type == Operand::f16 ? float_from_f16((unsigned short)bits) : bf16_operand(bits);
        }
      }
    }
    for (int i = 0; i < 2; ++i) {
      if constexpr (Type == Operand::tf32) {
        b[t + 4 * i][g] = tf32_operand(mine.b[i]);
      } else {
        for (int half = 0; half < 2; ++half) {
          const unsigned bits = mine.b[i] >> (16 * half) & 0xffff;
          b[2 * t + half + 8 * i][g] =
              Type == Operand::f16 ? float_from_f16((unsigned short)bits) : bf16_operand(bits);
        }
      }
    }
  }
  multiply_add(a, b, c);
  for (int lane = 0; lane < warp_lanes; ++lane) {
    const auto& mine = *static_cast<MmaArgument*>(meeting.arguments[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) mine.c[i] = c[g + i / 2 * 8][2 * t + i % 2];
  }
}
}  // namespace

void mma(Operand type, float* c, const unsigned* a, const unsigned* b, Site site) {
  MmaArgument argument{c, a, b};
  switch (type) {
    case Operand::tf32:
      return collective("mma_tf32", site, ~0u, &argument, complete_mma<Operand::tf32>);
    case Operand::f16:
      return collective("mma_f16", site, ~0u, &argument, complete_mma<Operand::f16>);
    case Operand::bf16:
      return collective("mma_bf16", site, ~0u, &argument, complete_mma<Operand::bf16>);
  }
}

}  // namespace emulator
