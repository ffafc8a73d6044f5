// Products of wgmma_phases.cu whose columns are units, for small volumes of many samples: the weight is
// the operand in registers, which lanes load from global memory, as they have it to themselves.
//
// A tile is four lines of units along H, all of W, sixteen samples: of a turned box
// [position along W][line][sample] the 64 rows of a position are the columns of a product. A warpgroup
// has one slot of W and 64 produced channels:
//
//     sums[position][channel][line, sample] += weight[channel][k] * box[position + shift2][line + shift1]
//
// Positions that lie outside are left out, so boxes have no halo along W; along H they have lines of
// zeros, or the line that has fewer taps is left to tiles of its own: then a tile is the other three
// lines of sixteen samples, or that one of 48.
//
// Epilogue: the warpgroups have one slot each of every output row, so they swap halves of their
// channels through shared memory, a line at a time; then a lane has whole rows of the target.
#pragma once
#include "wgmma_phases_config.cuh"

namespace convt3d {

/// The taps of a slot of W, by shift.
template <typename Axis>
struct SlotTaps {
  CONVT3D_CONSTEXPR static int count(int slot) {
    int found = 0;
    for (int shift = 0; shift < Axis::shifts; ++shift)
      found += Axis::tap(slot, shift + Axis::min_shift) >= 0;
    return found;
  }
  CONVT3D_CONSTEXPR static int shift(int slot, int number) {
    int found = 0;
    while (Axis::tap(slot, found + Axis::min_shift) < 0 || number-- > 0) ++found;
    return found + Axis::min_shift;
  }
  CONVT3D_CONSTEXPR static int tap(int slot, int number) {
    return Axis::tap(slot, shift(slot, number));
  }
  CONVT3D_CONSTEXPR static int most() {
    int found = 0;
    for (int slot = 0; slot < Axis::slots; ++slot) found = found < count(slot) ? count(slot) : found;
    return found;
  }
};

template <typename Config>
struct PhasesColumns {
  using Storage = typename Config::Storage;
  using Type = typename Config::Type;
  using Arguments = PhasesArguments<Storage>;
  using Walk = PhasesWalk<Config>;
  using Item = typename Walk::Item;
  using Axis2 = typename Config::Axis2;
  using Taps = SlotTaps<Axis2>;
  static constexpr int units = Config::line_units, inner = Config::inner_samples;
  static constexpr int lines = Config::edges ? 3 : 4;
  static constexpr int rows = lines * inner;  // of a position in a product
  static constexpr int position_pitch = (Config::edges ? 4 : lines + 2) * inner;  // rows of a box
  static constexpr int taps = Taps::most();
  static constexpr int ring = Config::fragments;  // stages of weights in registers
  static constexpr int eights = inner / 8;        // of samples
  static_assert(!Config::samples_inside ||
                    (Config::consumers == 2 && Axis2::slots == 2 && Config::phased == 2 &&
                     Config::column_tile == 64 && units == 4 && !Config::resident_weights),
                "a slot for each warpgroup");

  const Arguments& a;
  uint32_t shared;
  int slot, thread;  // of this warpgroup
  uint32_t tap_at[taps];  // bytes from a stage to this lane's part of a slot's taps

  CONVT3D_DEVICE PhasesColumns(const Arguments& arguments, uint32_t shared_, int warpgroup)
      : a(arguments),
        shared(shared_),
        slot(warpgroup),
        thread(threadIdx.x % 128) {
    const int lane = thread % 32;
    const uint32_t own = ((thread / 32 * 16 + lane / 4) * 4 + lane % 4) * 4;
#pragma unroll
    for (int i = 0; i < taps; ++i) {
      const int first = i < Taps::count(0) ? Taps::tap(0, i < Taps::count(0) ? i : 0) : 0;
      const int second = i < Taps::count(1) ? Taps::tap(1, i < Taps::count(1) ? i : 0) : 0;
      tap_at[i] = own + (slot == 0 ? first : second) * Config::tap_bytes;
    }
  }

  CONVT3D_DEVICE void run(BoxRing<Config> boxes) const {
    grid_dependency_wait();  // for the packed weights
    Walk walk(a, shared);
    Item item;
    int buffer = 0;
    while (walk.next(a, item)) {
      Sums sum;
#pragma unroll
      for (int i = 0; i < units; ++i)
#pragma unroll
        for (int j = 0; j < rows / 2; ++j) sum[i][j] = 0.f;
      multiply(item, sum, boxes);
#pragma unroll
      for (int i = 0; i < units; ++i)
#pragma unroll
        for (int j = 0; j < rows / 2; ++j) wgmma_accumulated(sum[i][j]);
      store(item, sum, buffer);
      buffer = (buffer + lines) % 2;
    }
  }

 private:
  using Weights = uint32_t[taps][4];
  using Sums = float[units][rows / 2];

  /// Stages of an item in order: (chunk, walked tap of D, walked tap of H).
  struct Stages {
    int count0, count1, tap0 = 0, tap1 = 0;

    CONVT3D_DEVICE explicit Stages(const Item& item)
        : count0(item.taps0.count), count1(item.taps1.count) {}
    CONVT3D_DEVICE bool ends_chunk() const { return tap0 + 1 == count0 && tap1 + 1 == count1; }
    /// How many stages of packed weights the next one is further on.
    CONVT3D_DEVICE int advance() {
      int step = 1;
      if (++tap1 == count1) {
        tap1 = 0;
        step = Config::walked1 - count1 + 1;
        if (++tap0 == count0) {
          tap0 = 0;
          step += (Config::walked0 - count0) * Config::walked1;
        }
      }
      return step;
    }
  };

  CONVT3D_DEVICE void load(Weights& weights, const unsigned char* stage) const {
#pragma unroll
    for (int i = 0; i < taps; ++i) {
      const uint32_t* at = reinterpret_cast<const uint32_t*>(stage + tap_at[i]);
      weights[i][0] = at[0];
      weights[i][1] = at[8 * 4];
      weights[i][2] = at[Config::column_tile * 4];
      weights[i][3] = at[(Config::column_tile + 8) * 4];
    }
  }

  CONVT3D_DEVICE void multiply(const Item& item, Sums& sum, BoxRing<Config>& boxes) const {
    Stages loaded(item), now(item);
    const int all = Config::chunks * item.taps0.count * item.taps1.count;
    if (all == 0) return;
    const unsigned char* stage =
        a.weights + (item.group * Config::column_tiles + item.column_tile) * Config::team_bytes +
        (item.taps0.first_position * Config::walked1 + item.taps1.first_position) *
            Config::stage_bytes;
    Weights weights[ring];
    int left = all, unread = all;
#pragma unroll
    for (int i = 0; i + 1 < ring; ++i) {
      if (unread-- > 0) load(weights[i], stage);
      stage += loaded.advance() * Config::stage_bytes;
    }
    int held = -1;  // the box of products in flight, if it was their chunk's last stage
#pragma unroll 1
    while (true) {
#pragma unroll
      for (int i = 0; i < ring; ++i) {
        if (now.tap0 == 0 && now.tap1 == 0) boxes.wait_full();
        multiply_stage(item, sum, weights[i], now, boxes);
        wgmma_wait<1>();
        mbarrier_arrive_if(boxes.empty(held), held >= 0 && thread % 32 == 0);
        held = -1;
        if (unread-- > 0) load(weights[(i + ring - 1) % ring], stage);
        stage += loaded.advance() * Config::stage_bytes;
        if (now.ends_chunk()) {
          held = boxes.stage;
          boxes.advance();
        }
        now.advance();
        if (--left == 0) {
          wgmma_wait<0>();
          mbarrier_arrive_if(boxes.empty(held), thread % 32 == 0);
          return;
        }
      }
    }
  }

  /// All products of a stage, a group.
  CONVT3D_DEVICE void multiply_stage(const Item& item, Sums& sum, const Weights& weights,
                                     const Stages& now, const BoxRing<Config>& boxes) const {
    const int shift = item.taps1.origin + item.taps1.offset + now.tap1 * item.taps1.step;
    // Of all lines one of zeros comes first.
    const int line = Config::edges ? (item.edge ? 0 : item.first[1] + shift) : shift + 1;
    const int slice = item.taps0.offset + now.tap0 * item.taps0.step;
    const uint64_t units_at = matrix_descriptor(
        shared + Config::box_offset + boxes.stage * a.box_bytes +
            (slice * a.slice_pitch + line * inner) * 16,
        a.channel_pitch * 16, 128);
    if (slot == 0)
      multiply_slot<0>(sum, weights, units_at);
    else
      multiply_slot<1>(sum, weights, units_at);
  }
  template <int Slot>
  CONVT3D_DEVICE void multiply_slot(Sums& sum, const Weights& weights, uint64_t units_at) const {
    wgmma_fence();
    multiply_position<Slot, 0>(sum, weights, units_at);
    wgmma_commit();
  }
  /// The products of a number: taps, and of each one all positions.
  template <int Slot, int Number>
  CONVT3D_DEVICE void multiply_position(Sums& sum, const Weights& weights, uint64_t units_at) const {
    if constexpr (Number < Taps::count(Slot) * units) {
      constexpr int position = Number % units, tap = Number / units;
      constexpr int from = position + Taps::shift(Slot, tap);
      if constexpr (from >= 0 && from < units)
        wgmma_product_of<rows>(typename Config::Math{}, sum[position], weights[tap],
                               descriptor_at<Config>(units_at, from * position_pitch * 16));
      multiply_position<Slot, Number + 1>(sum, weights, units_at);
    }
  }

  /// Lines are passed on through two buffers in turn, also from item to item, so that one barrier a line
  /// is enough.
  CONVT3D_DEVICE void store(const Item& item, const Sums& sum, int first_buffer) const {
    constexpr int count = units * inner / 4;  // sums of a line and half of the channels
    const int lane = thread % 32;
    const int channel = item.column_tile * Config::column_tile + thread / 32 * 16 + lane / 4 + 8 * slot;
    const bool exists = channel < Config::target_channels;
    float bias = 0.f;
    if constexpr (Config::bias)
      if (exists) bias = Type::load(__ldg(a.bias + item.group * Config::target_channels + channel));
    const auto& target = a.target;
    const int d = item.first[0] * Config::Axis0::unit_destination + item.phase0;
    Storage* to = target.data + (int64_t(item.sample) * Config::all_channels +
                                 item.group * Config::target_channels + channel) *
                                    target.volume() +
                  int64_t(d) * target.stride0;
#pragma unroll
    for (int line = 0; line < lines; ++line) {
      const uint32_t buffer = shared + a.staging_offset +
                              (first_buffer + line) % 2 * (2 * 128 * count * 4) + thread * 16;
      float own[count], other[count];
#pragma unroll
      for (int i = 0; i < count; i += 4) {
        uint32_t sent[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          // In the order of positions, eights of samples, samples.
          const int from = (i + j) / (2 * eights);
          const int at = (line * eights + (i + j) / 2 % eights) * 4 + j % 2;
          const float low = sum[from][at], high = sum[from][at + 2];
          own[i + j] = slot == 0 ? low : high;
          sent[j] = bits_of(slot == 0 ? high : low);
        }
        store_shared(buffer + (slot * count + i) * (128 * 4), sent[0], sent[1], sent[2], sent[3]);
      }
      named_barrier_sync(2, 128 * Config::consumers);
#pragma unroll
      for (int i = 0; i < count; i += 4) {
        uint32_t word[4];
        load_shared(buffer + ((1 - slot) * count + i) * (128 * 4), word[0], word[1], word[2], word[3]);
#pragma unroll
        for (int j = 0; j < 4; ++j) other[i + j] = float_of(word[j]);
      }
      // Of a line of many samples each part is sixteen of them.
      const int h = (item.first[1] + (item.edge ? 0 : line)) * Config::Axis1::unit_destination + item.phase1;
      const int first_sample = item.edge ? line * inner : 0;
      const bool inside = exists && h < target.extent[1] && d < target.extent[0];
#pragma unroll
      for (int eight = 0; eight < eights; ++eight)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int sample = first_sample + 8 * eight + 2 * (lane % 4) + i;
          Storage* row = to + int64_t(sample) * Config::all_channels * target.volume() +
                         int64_t(h) * target.stride1;
          constexpr int vector = 16 / int(sizeof(Storage));
#pragma unroll
          for (int first = 0; first < 2 * units; first += vector) {
            float value[vector];
#pragma unroll
            for (int j = 0; j < vector; ++j) {
              const int at = ((first + j) / 2 * eights + eight) * 2 + i;
              value[j] = (slot == j % 2 ? own[at] : other[at]) + bias;
            }
            if (inside && item.sample + sample < a.batch) store_row<Type>(row + first, value);
          }
        }
    }
  }
};

}  // namespace convt3d
