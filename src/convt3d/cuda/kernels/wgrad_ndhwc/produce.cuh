// The producer warps: one issues the boxes of every K step, another one clears positions of the
// gradient that meet no position of x.
#pragma once
#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "wgrad_ndhwc/config.cuh"

namespace convt3d {

/// Barriers of the stages: full and empty ones, and those of boxes that warps of the producers
/// change before they are products' (`landed`): these arrive at the full one.
template <typename Config>
struct WgradNdhwcRing : Ring<Config::stages> {
  CONVT3D_DEVICE explicit WgradNdhwcRing(uint32_t shared)
      : Ring<Config::stages>(shared + Config::barrier_offset) {}
  CONVT3D_DEVICE void init() const {
    // Plain stores of different warps follow one another in a stage: zeros, x transposed, at last
    // sums. So every lane arrives (lanes_of).
    Ring<Config::stages>::init(lanes_of(Config::transposes ? Config::transposing_warps : 1),
                               arrivals_of(Config::warps, Config::transposes));
    for (int stage = 0; stage < Config::stages; ++stage)
      mbarrier_init(this->empty(Config::stages + stage), lanes_of(1));
  }
  CONVT3D_DEVICE uint32_t landed() const { return this->empty(Config::stages + this->stage); }
};

/// Issues the boxes of a split's steps: lane i of the warp that of atom i, x first.
template <typename Config>
CONVT3D_DEVICE void produce(const WgradNdhwcArguments& a, const TensorMap& source_map,
                            const TensorMap& target_map, uint32_t shared,
                            WgradNdhwcRing<Config> ring, const WgradNdhwcTile<Config>& tile,
                            int split) {
  grid_dependency_wait();  // for copies of contiguous tensors (layout/channels_last.cu)
  const int lane = threadIdx.x % 32, box = lane - Config::source_boxes;
  const bool of_source = box < 0;
  const bool live = of_source ? lane < tile.source_boxes() : box < tile.target_boxes();
  const uint32_t bytes =
      Config::bytes *
      (a.rows() * tile.source_boxes() * Config::source_atom +
       a.template target_rows<Config>() * tile.target_boxes() * Config::target_atom);
  const WgradNdhwcAtom<Config> atom(of_source ? 0 : tile.atom + box * Config::strip);
  const int channel =
      of_source ? tile.group * Config::source_channels + tile.channel + lane * Config::source_atom
                : tile.group * Config::target_channels + atom.channel;
  const int o0 = atom.k0 * Layer::dilation0 - Layer::padding0;
  const int o1 = atom.k1 * Layer::dilation1 - Layer::padding1;
  const int o2 = atom.k2 * Layer::dilation2 - Layer::padding2;
  const uint32_t to = of_source ? shared + lane * Config::source_box_bytes
                                : shared + Config::target_offset + box * Config::target_box_bytes;
#pragma unroll 1
  for (WgradNdhwcSteps at(a, split); at.left > 0; at.advance()) {
    ring.wait_empty();
    const uint32_t barrier =
        Config::transposes || at.reaches_out() ? ring.landed() : ring.full();
    if (lane == 0)
      mbarrier_expect(barrier, bytes);
    else
      mbarrier_arrive(barrier);
    const uint32_t stage = to + ring.stage * Config::stage_bytes;
    if (live && of_source)
      tma_load_5d(stage, source_map, channel, at.at[3], at.at[2], at.at[1], at.at[0], barrier);
    else if (live)
      tma_load_5d(stage, target_map, channel, at.at[3] * Layer::stride2 + o2,
                  at.at[2] * Layer::stride1 + o1, at.at[1] * Layer::stride0 + o0, at.at[0],
                  barrier);
    ring.advance();
  }
}

/// Zeros in a row of an atom; in all of it, so the swizzle does not matter.
template <int pitch>
CONVT3D_DEVICE void clear_row(uint32_t row) {
#pragma unroll
  for (int i = 0; i < pitch; i += 16) store_shared(row + i, 0u, 0u, 0u, 0u);
}

/// Clears what the gradient has in a stage where a step's box reaches out of x, by `threads`
/// threads.
template <typename Config>
CONVT3D_DEVICE void clear_outside(const WgradNdhwcSteps& at, uint32_t stage, int boxes, int thread,
                                  int threads) {
  constexpr int pitch = Config::target_atom * Config::bytes;
#pragma unroll 1
  for (int row = thread; row < at.a.target_rows<Config>(); row += threads)
    if (at.outside<Config>(row))
      for (int box = 0; box < boxes; ++box)
        clear_row<pitch>(stage + Config::target_offset + box * Config::target_box_bytes +
                         row * pitch);
}

/// The same of all steps that reach out, by a warp.
template <typename Config>
CONVT3D_DEVICE void clear_steps(const WgradNdhwcArguments& a, uint32_t shared,
                                WgradNdhwcRing<Config> ring, const WgradNdhwcTile<Config>& tile,
                                int split) {
  const int lane = threadIdx.x % 32;
  uint32_t parities = 0;
#pragma unroll 1
  for (WgradNdhwcSteps at(a, split); at.left > 0; at.advance(), ring.advance()) {
    if (!at.reaches_out()) continue;
    mbarrier_wait(ring.landed(), parities >> ring.stage & 1);
    parities ^= 1u << ring.stage;
    const uint32_t stage = shared + ring.stage * Config::stage_bytes;
    clear_outside<Config>(at, stage, tile.target_boxes(), lane, 32);
    fence_async_proxy();
    mbarrier_arrive(ring.full());
  }
}

/// By all threads of a CTA: zeros where no box of a stage comes but products read.
template <typename Config>
CONVT3D_DEVICE void clear_tails(const WgradNdhwcArguments& a, uint32_t shared) {
  const int rows = Config::positions - a.rows();
  if (Config::shares || rows == 0) return;
  constexpr int boxes = Config::source_boxes + Config::target_boxes;
  for (int i = threadIdx.x; i < Config::stages * boxes * rows; i += Config::threads) {
    const int stage = i / (boxes * rows), box = i / rows % boxes, row = a.rows() + i % rows;
    const uint32_t at = shared + stage * Config::stage_bytes;
    if (box < Config::source_boxes)
      clear_row<Config::source_atom * Config::bytes>(
          at + box * Config::source_box_bytes + row * (Config::source_atom * Config::bytes));
    else
      clear_row<Config::target_atom * Config::bytes>(
          at + Config::target_offset + (box - Config::source_boxes) * Config::target_box_bytes +
          row * (Config::target_atom * Config::bytes));
  }
  fence_async_proxy();
}

}  // namespace convt3d
