// The compile-time description of a gradient-by-weight kernel on channels_last tensors: its tile,
// shared memory and work tiles. The macros are set by plan/wgrad_ndhwc.py. Axes are D, H, W.
#pragma once
#include "device/pipeline.cuh"
#include "device/types.cuh"
#include "geometry/axis.cuh"
#include "geometry/layer.cuh"

namespace convt3d {

struct WgradNdhwcConfig : Layer {
  static constexpr int bytes = int(sizeof(Storage));
  /// TF32 operands in shared memory are columns of K: rows of K are M in registers, and N is
  /// transposed in shared memory (wgrad_ndhwc/transposed.cuh).
  static constexpr bool transposes = bytes == 4;
  static constexpr int vector = 16 / bytes, depth = 32 / bytes;  // K of a product

  static_assert(source_channels % vector == 0 && target_channels % vector == 0,
                "boxes begin at 16 bytes");
  static constexpr int taps = kernel0 * kernel1 * kernel2;
  /// Neighbours in the weight are taps, as in a contiguous one, not channels of the gradient.
  static constexpr bool along_taps = CONVT3D_ALONG_TAPS;

  /// Channels of a box, one atom of an operand: a row of 64 or 128 bytes.
  static constexpr int source_atom = CONVT3D_SOURCE_ATOM, target_atom = CONVT3D_TARGET_ATOM;
  static_assert((source_atom == 32 || source_atom == 64) &&
                    (target_atom == 32 || target_atom == 64),
                "swizzles of 64 and 128 bytes");
  static_assert(!transposes || (source_atom == 32 && target_atom == 32), "rows of 128 bytes");
  /// All atoms of the gradient in a group: of the same channels, taps along D, W, then H.
  static constexpr int atoms = div_up(target_channels, target_atom) * taps;
  /// All taps along H share a box that has the lines between them, too: each tap's begins some
  /// lines on, a whole number of swizzle patterns. A step's box is then whole lines of one slice,
  /// as wide as a multiple of eight positions, and products take exactly its positions.
  static constexpr bool shares = CONVT3D_SHARES;
  static constexpr int strip = shares ? kernel1 : 1;  // atoms of a box
  static_assert(!shares || stride1 == 1, "neighbouring lines for neighbouring taps");

  /// The gradient's atoms are rows of the product and channels of x columns, or the other way.
  static constexpr bool taps_on_m = CONVT3D_TAPS_ON_M;
  // Warpgroups that multiply, side by side along M and N, each with `blocks` blocks of 64 rows.
  static constexpr int consumers_m = CONVT3D_CONSUMERS_M, consumers_n = CONVT3D_CONSUMERS_N;
  static constexpr int consumers = consumers_m * consumers_n;
  static constexpr int blocks = CONVT3D_BLOCKS;
  static constexpr int columns = CONVT3D_COLUMNS;  // of a product
  static constexpr int sums = columns / 2;         // accumulators of a thread for one block
  static constexpr int tile_m = 64 * blocks * consumers_m, tile_n = columns * consumers_n;
  static constexpr int m_atom = taps_on_m ? target_atom : source_atom;
  static constexpr int n_atom = taps_on_m ? source_atom : target_atom;
  static_assert(columns % 16 == 0 && columns <= 256, "columns of one product");
  static_assert(columns % n_atom == 0 || (taps_on_m && consumers_n == 1),
                "the gradient's atoms are whole, and so are those of neighbours");
  static_assert(!transposes || (taps_on_m && consumers_n == 1), "x is transposed for all taps");

  static constexpr int warps = 4 * consumers;  // that multiply
  static constexpr int threads = 128 * (consumers + 1);
  static constexpr int transposing_warps = 3;
  static constexpr int producer_registers = transposes ? 56 : 32;

  // A K step: up to `positions` positions, `depth` a product.
  static constexpr int positions = CONVT3D_POSITIONS;
  static constexpr int products = positions / depth;
  static_assert(positions % 16 == 0 && positions <= 256, "whole products, an even number of them");
  static constexpr int stages = CONVT3D_STAGES;
  static_assert(stages >= 2 && stages <= 16, "one is read while another is filled");

  // Shared memory: stages, each with the atoms of x, those of the gradient, and x transposed;
  // then barriers.
  static constexpr int source_tile = taps_on_m ? tile_n : tile_m;  // channels of x
  static constexpr int target_tile = taps_on_m ? tile_m : tile_n;
  static constexpr int source_boxes = div_up(source_tile, source_atom);
  static constexpr int target_atoms = target_tile / target_atom;
  static constexpr int target_boxes = target_atoms / strip;
  static_assert(target_atoms % strip == 0, "whole boxes of atoms");
  static_assert(!shares || taps_on_m || columns == strip * target_atom, "atoms of one distance");
  static_assert(source_boxes + target_boxes <= 32, "each lane of a warp issues one");
  static constexpr int source_box_bytes = positions * source_atom * bytes;
  static constexpr int target_rows = CONVT3D_TARGET_ROWS;  // of a box, at most
  static constexpr int target_box_bytes = target_rows * target_atom * bytes;
  static_assert(shares ? target_rows % 8 == 0 : target_rows == positions, "swizzle patterns");
  static constexpr int target_offset = source_boxes * source_box_bytes;
  static constexpr int columns_offset = target_offset + target_boxes * target_box_bytes;
  static constexpr int columns_bytes = transposes ? positions * columns * bytes : 0;
  static constexpr int stage_bytes = columns_offset + columns_bytes;
  static_assert(columns_bytes % 1024 == 0, "stages begin with swizzle patterns");
  static_assert(source_box_bytes % 1024 == 0 && target_box_bytes % 1024 == 0, "swizzle patterns");
  // After the steps whole sums take the stages' place: [channel of x][tap, channel of the gradient].
  // The pitch keeps a warp's stores in different banks: pairs along N, or rows of M.
  static constexpr int sum_pitch = target_tile + (taps_on_m ? 4 : 8);
  static_assert(target_tile % 32 == 0, "the pitch of sums, in banks");
  static constexpr int sum_bytes = along_taps ? 0 : 4 * source_tile * sum_pitch;
  static constexpr int rings = stages * stage_bytes;
  static constexpr int barrier_offset = rings > sum_bytes ? rings : sum_bytes;
  static constexpr int m_box_bytes = taps_on_m ? target_box_bytes : source_box_bytes;
  static constexpr int n_box_bytes = taps_on_m ? source_box_bytes : target_box_bytes;

  // Work tiles, without their splits.
  static constexpr int source_tiles = div_up(source_channels, source_tile);
  static constexpr int target_tiles = div_up(atoms, target_atoms);
  static constexpr int tiles = groups * source_tiles * target_tiles;
  /// Split-K: the CTAs of a cluster share the K steps of one work tile, add up their sums and store
  /// them. Where several splits are no cluster, a second pass does.
  static constexpr int cluster = CONVT3D_CLUSTER;
  static_assert(cluster == 1 || !along_taps, "runs of taps are the second pass's");
  CONVT3D_DEVICE static int rank() { return int(blockIdx.x) % cluster; }  // of a CTA in its cluster
  // What a thread has of one, in pairs of neighbouring columns.
  static constexpr int pairs = blocks * sums / 2;
  static constexpr int64_t split_pairs = int64_t(tiles) * pairs * 32 * warps;
};

/// A work tile: some channels of x, and some of the gradient's atoms.
template <typename Config>
struct WgradNdhwcTile {
  int group, channel, atom;  // the first ones, within the group

  CONVT3D_DEVICE explicit WgradNdhwcTile(int index) {
    channel = index % Config::source_tiles * Config::source_tile;
    index /= Config::source_tiles;
    atom = index % Config::target_tiles * Config::target_atoms;
    group = index / Config::target_tiles;
  }
  /// Boxes that hold any channel, or any tap.
  CONVT3D_DEVICE int source_boxes() const {
    return min(Config::source_boxes,
               div_up(Config::source_channels - channel, Config::source_atom));
  }
  CONVT3D_DEVICE int target_boxes() const {
    return min(Config::target_boxes, (Config::atoms - atom) / Config::strip);
  }
};

/// Channels and tap of an atom of the gradient.
template <typename Config>
struct WgradNdhwcAtom {
  int channel, k0, k1, k2;  // the first channel, within the group

  CONVT3D_DEVICE explicit WgradNdhwcAtom(int atom)
      : channel(atom / Config::taps * Config::target_atom),
        k0(atom % Config::taps / (Layer::kernel2 * Layer::kernel1)),
        k1(atom % Layer::kernel1),
        k2(atom / Layer::kernel1 % Layer::kernel2) {}
  /// Which atom of its channels a tap is, taps being counted along D, H, then W.
  CONVT3D_DEVICE static int number_of(int tap) {
    const int k1 = tap / Layer::kernel2 % Layer::kernel1, k2 = tap % Layer::kernel2;
    return tap / (Layer::kernel1 * Layer::kernel2) * (Layer::kernel1 * Layer::kernel2) +
           k2 * Layer::kernel1 + k1;
  }
};

/// Extents and boxes have four axes: samples, D, H, W.
struct WgradNdhwcArguments {
  int extent[4];
  int box[4];  // positions of x of a K step
  int splits;

  CONVT3D_DEVICE int rows() const { return box[0] * box[1] * box[2] * box[3]; }
  /// Rows from an atom to the next, of taps along H that share a box.
  CONVT3D_DEVICE int tap_rows() const { return Layer::dilation1 * box[3]; }
  template <typename Config>
  CONVT3D_DEVICE int target_rows() const {
    return rows() + (Config::strip - 1) * tap_rows();
  }
  /// Where an atom of the gradient lies in a stage; of taps that share one, within their box.
  template <typename Config>
  CONVT3D_DEVICE uint32_t atom_offset(int atom) const {
    uint32_t offset = Config::target_offset + atom / Config::strip * Config::target_box_bytes;
    if constexpr (Config::shares)
      offset += atom % Config::strip * tap_rows() * (Config::target_atom * Config::bytes);
    return offset;
  }
};

/// The K steps of a split, W fastest.
struct WgradNdhwcSteps {
  const WgradNdhwcArguments& a;
  int left;
  int at[4];  // the first position

  CONVT3D_DEVICE WgradNdhwcSteps(const WgradNdhwcArguments& a_, int split) : a(a_) {
    int count[4], all = 1;
#pragma unroll
    for (int axis = 0; axis < 4; ++axis) {
      count[axis] = div_up(a.extent[axis], a.box[axis]);
      all *= count[axis];
    }
    // In 32 bits: a division of 64 is a call, of any number of registers.
    const int share = all / a.splits, rest = all % a.splits;
    int step = split * share + min(split, rest);
    left = share + (split < rest);
#pragma unroll
    for (int axis = 3; axis >= 0; --axis) {
      at[axis] = step % count[axis] * a.box[axis];
      step /= count[axis];
    }
  }
  CONVT3D_DEVICE void advance() {
    --left;
    at[3] += a.box[3];
#pragma unroll
    for (int axis = 3; axis > 0; --axis)
      if (at[axis] >= a.extent[axis]) {
        at[axis] = 0;
        at[axis - 1] += a.box[axis - 1];
      }
  }
  /// Whether the box has positions outside of x.
  CONVT3D_DEVICE bool reaches_out() const {
    bool out = false;
#pragma unroll
    for (int axis = 0; axis < 4; ++axis) out |= at[axis] + a.box[axis] > a.extent[axis];
    return out;
  }
  /// Whether a row of the gradient's box meets positions outside of x alone.
  template <typename Config>
  CONVT3D_DEVICE bool outside(int row) const {
    if constexpr (Config::shares) return at[3] + row % a.box[3] >= a.extent[3];
    bool out = false;
#pragma unroll
    for (int axis = 3; axis >= 0; --axis) {
      out |= at[axis] + row % a.box[axis] >= a.extent[axis];
      row /= a.box[axis];
    }
    return out;
  }
};

/// The result: [in][out][taps along D, H, W], at the distances of the strides.
template <typename Config>
struct WgradNdhwcWeight {
  using Storage = typename Config::Storage;
  Storage* data;
  int64_t stride_in, stride_out, stride[3];

  CONVT3D_DEVICE Storage* at(int group, int in, int out, int k0, int k1, int k2) const {
    return data + (int64_t(group) * Config::source_channels + in) * stride_in + out * stride_out +
           k0 * stride[0] + k1 * stride[1] + k2 * stride[2];
  }
  /// Whether channels of the gradient are neighbours, those of 16 bytes at multiples of them.
  /// Strides of axes with one tap say nothing.
  CONVT3D_DEVICE bool has_lines() const {
    const int64_t any = stride_in | (Config::kernel0 > 1 ? stride[0] : 0) |
                        (Config::kernel1 > 1 ? stride[1] : 0) |
                        (Config::kernel2 > 1 ? stride[2] : 0);
    return stride_out == 1 && any % Config::vector == 0 &&
           uint64_t(data) % 16 == 0;
  }
};

}  // namespace convt3d
