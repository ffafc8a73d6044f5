// What the consumers of wgrad/kernel.cu share: fragments of rows, read from the gradient's
// planes at any shift, and the walk along a slice's products.
#pragma once
#include "device/wgmma.cuh"
#include "wgrad/runs.cuh"
#include "wgrad/slab.cuh"
#include "wgrad/walk.cuh"

namespace convt3d {

/// One row fragment of a block from the gradient's plane: lane (g, t) takes rows g and g + 8.
template <typename Config>
struct RowReader {
  uint32_t base[2];            // of both rows; changes with every slice
  uint32_t other[2], pick[2];  // 16-bit: where the pair's second half is, and which halves

  CONVT3D_DEVICE void set(int half, uint32_t address) {
    if constexpr (Config::swizzled) address ^= address / 128 % 8 * 16;
    if constexpr (Config::half) {
      const uint32_t odd = address / 2 % 2;
      base[half] = address - 2 * odd;
      const uint32_t apart =
          Config::unit2 % 2 ? 2 * (Config::unit2 - 1) + 4 * odd : 2 * Config::unit2;
      other[half] = base[half] + apart;
      const bool swapped = Config::unit2 % 2 != 0;
      pick[half] = odd ? (swapped ? 0x5432 : 0x7632) : (swapped ? 0x7610 : 0x5410);
    } else {
      base[half] = address;
    }
  }
  /// Words of a fragment as they lie in shared memory: of 16-bit pairs, those that hold the
  /// halves.
  static constexpr int words = Config::half ? 8 : 4;
  /// `product` of a row: those of a swizzled line alternate.
  CONVT3D_DEVICE void fetch(uint32_t (&raw)[words], uint32_t offset, uint32_t half_depth,
                            int product) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if constexpr (Config::swizzled) {
        const uint32_t part =
            Config::lines ? (r < 2 ? 0 : half_depth)
                          : (product % Config::chunk_products * 2 + r / 2) * 16 * Config::unit2;
        if constexpr (Config::half) {
          raw[2 * r] = load_shared((base[r % 2] ^ part) + offset);
          raw[2 * r + 1] = load_shared((other[r % 2] ^ part) + offset);
        } else {
          raw[r] = load_shared((base[r % 2] ^ part) + offset);
        }
        continue;
      }
      const uint32_t along = offset + (r < 2 ? 0 : half_depth);
      if constexpr (Config::half) {
        raw[2 * r] = load_shared(base[r % 2] + along);
        raw[2 * r + 1] = load_shared(other[r % 2] + along);
      } else {
        raw[r] = load_shared(base[r % 2] + along);
      }
    }
  }
  /// Adds the gradient's words of a fragment, as it came, to the sums of both rows.
  CONVT3D_DEVICE static void add(float (&sum)[2], const uint32_t (&raw)[words],
                                 const uint32_t (&a)[4]) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if constexpr (Config::half) {
        sum[r % 2] += Config::Type::load(uint16_t(a[r] & 0xffff)) +
                      Config::Type::load(uint16_t(a[r] >> 16));
      } else {
        sum[r % 2] += __uint_as_float(raw[r]);
      }
    }
  }
  /// The operand of a product; `rest` is its second part.
  CONVT3D_DEVICE void finish(uint32_t (&a)[4], uint32_t (&rest)[4],
                             const uint32_t (&raw)[words]) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if constexpr (Config::operands_are_words)
        a[r] = wgmma_operand(raw[r]);  // the next words are fetched while products read it
      else if constexpr (Config::half)
        a[r] = permute_bytes(raw[2 * r], raw[2 * r + 1], pick[r % 2]);
      else if constexpr (Config::ieee)
        MathIeee::split(raw[r], a[r], rest[r]);
      else
        a[r] = round_tf32_operand(raw[r]);
    }
  }
};

/// Walks along the products of a slice. A product's depth is two times 16 bytes of W; in narrow
/// tiles those are neighbouring rows, where rows are paired 16 bytes are two.
template <typename Layout>
struct ProductWalk {
  using Config = typename Layout::Config;
  const Layout& l;
  int products2, products;  // of a row (or two) and of a slice
  uint32_t half_g, half_x;  // bytes from the first half of the depth to the second
  uint32_t step_g, step_x, next_g, next_x;  // of a swizzled line's last product
  uint32_t g, x;            // where a product's operands begin: within a plane, and the address
  int left, quarter;
  // Where products run through the slices: rows of a slice, and what is left of them.
  int rows2, rows_left;
  uint32_t slice_g, slice_x;

  CONVT3D_DEVICE explicit ProductWalk(const Layout& l_) : l(l_) {
    const uint32_t row_g = Config::unit1 * l.a.row_pitch * Config::bytes;
    const uint32_t line_g = Config::line * Config::unit2 * Config::bytes;
    const uint32_t row_x = Config::channel_tile_n * 16;
    const bool few = !Config::joined && (l.narrow || l.paired);
    const int rows = l.paired ? 4 : l.narrow ? 2 : 1;  // of a product
    products2 = few ? 1 : l.a.tile2 / Config::depth;
    products = l.a.tile1 * l.a.tile2 / Config::depth;
    rows2 = products / products2;
    half_g = few ? rows / 2 * row_g : line_g;
    half_x = l.narrow ? row_x : l.x_line;
    step_g = few ? 0 : 2 * line_g;
    step_x = Config::source_map ? 32 : l.narrow ? 0 : 2 * l.x_line;
    next_g = rows * row_g - products2 * step_g;
    if constexpr (Config::lines) {
      step_g = 0, next_g = l.g_chunk;  // a product's rows are one line
    } else if constexpr (Config::swizzled) {
      step_g = l.g_chunk;
      next_g = rows * row_g - products2 / Config::chunk_products * step_g;
    }
    next_x = rows * row_x - products2 * step_x;
    // The last chunk of a row may be partly used.
    if constexpr (Config::source_map)
      next_x = l.flat ? 0
                      : Config::channel_tile_n * 128 - products2 / 4 * l.x_chunk - products2 % 4 * 32;
    if constexpr (Config::volume) {
      products *= l.a.tile0;
      slice_g = Config::unit0 * l.plane - rows2 * (products2 * step_g + next_g);
    }
  }
  /// Slices that begin anew.
  CONVT3D_DEVICE int slices() const { return Config::volume ? 1 : l.a.tile0; }
  /// All ones, unless this product is a row's first, or its last; as signs, not as predicates.
  CONVT3D_DEVICE uint32_t past_first() const { return uint32_t((left - products2) >> 31); }
  CONVT3D_DEVICE uint32_t before_last() const { return uint32_t((1 - left) >> 31); }
  /// Products of this row before this one.
  CONVT3D_DEVICE int along() const { return products2 - left; }
  /// `first` is added to all that is read of the gradient.
  CONVT3D_DEVICE void begin(uint32_t slab, int slice, uint32_t first = 0) {
    g = first, x = slab + slice * l.x_slice;
    left = products2, quarter = 0;
    rows_left = rows2, slice_x = x;
    if (Config::source_map && l.whole) {
      const int position = slice * l.a.tile1 * l.a.tile2;
      quarter = position % Config::chunk / Config::depth;
      x = slab + position / Config::chunk * l.x_chunk + quarter * 32;
    }
  }
  CONVT3D_DEVICE void advance() {
    g += !Config::swizzled || Config::lines || left % Config::chunk_products != 0 || Config::chunk_products == 1
             ? step_g
             : 0;
    x += step_x;
    // Without branches: ptxas would serialise products around them.
    if constexpr (Config::source_map) {
      const bool chunk = ++quarter == 4;
      quarter = chunk ? 0 : quarter;
      x += chunk ? l.x_chunk - 128 : 0;
    }
    const bool row = --left == 0;
    left = row ? products2 : left;
    if constexpr (Config::source_map) quarter = row && !l.flat ? 0 : quarter;
    g += row ? next_g : 0;
    x += row ? next_x : 0;
    if constexpr (Config::volume) {
      rows_left -= row;
      const bool slice = rows_left == 0;
      rows_left = slice ? rows2 : rows_left;
      g += slice ? slice_g : 0;
      slice_x += slice ? l.x_slice : 0;
      const bool anew = slice && !(Config::source_map && l.whole);
      x = anew ? slice_x : x;
      quarter = anew ? 0 : quarter;
    }
  }
};

/// Each lane's two rows of each block of a consumer: their offsets in a plane, and which plane of
/// a step.
template <typename Layout, int blocks>
struct BlockRows {
  using Config = typename Layout::Config;
  // Flat boxes begin where a multiple of 16 bytes of every channel does.
  static constexpr bool by_channel = Config::target_fill != TargetFill::flat;

  const Layout& l;
  RunFill<Config> runs;
  uint32_t inside[blocks][2];
  int plane[blocks][2];
  uint32_t lead[Config::floating_rows ? blocks : 1][2];  // of a row, but for what lanes share
  int shift[Config::joined ? blocks : 1][2];  // along W, from a position of x to its own
  // Which of the first 16 bytes' positions of a row of x, and of the last, meet the gradient's
  // row.
  uint32_t opening[Config::masks_ends ? blocks : 1][2], closing[Config::masks_ends ? blocks : 1][2];

  CONVT3D_DEVICE BlockRows(const Layout& l_, int consumer)
      : l(l_), runs(l.a.gradient, l.a.samples, l.rows_g, 1, l.a.row_pitch, l.a.channel_pitch) {
    const int warp = threadIdx.x / 32 % 4;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int fixed_lead = 0;
    if constexpr (Config::target_fill == TargetFill::rows)
      fixed_lead = floor_mod(-Layer::padding2, Config::line);
    if constexpr (Config::target_copies && !Config::floating_rows)
      fixed_lead = SlabFill<Config, true>(l.a.gradient, 1, l.rows_g, 1).lead;
#pragma unroll
    for (int b = 0; b < blocks; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int pair = b * 4 + warp;
        const int block =
            l.tile.row_tile * Config::cta_blocks + pair / 4 * Config::consumers + consumer;
        const WgradRow<Config> row(block * 8 + pair % 4 * 2 + h, g);
        constexpr int apart = Config::half ? 2 : 1;  // positions of x from one lane to the next
        const int along = l.paired ? apart * (t % 2) * Config::unit2 +
                                         t / 2 * Config::unit1 * l.a.row_pitch
                                   : apart * t * Config::unit2;
        const int position = row.k1() * Config::reach1 * l.a.row_pitch +
                             row.k2() * Config::reach2 + fixed_lead + along;
        inside[b][h] = (Config::slot(row.channel) * l.a.channel_pitch + position) * Config::bytes;
        plane[b][h] = row.live ? (row.k0() - l.k0_first) * Config::reach0 : 0;
        if constexpr (Config::floating_rows)
          lead[b][h] = (by_channel ? uint32_t(row.channel * runs.channel_volume) : 0) +
                       uint32_t(plane[b][h] * Config::step0) * uint32_t(l.a.gradient.stride0);
        if constexpr (Config::joined)
          shift[b][h] = row.k2() * Config::reach2 - Layer::padding2 + apart * t * Config::unit2;
        if constexpr (Config::masks_ends) {
          // Words in registers: one instruction applies them, where compilers would compare anew.
          opening[b][h] = own_address(meets(shift[b][h]));
          closing[b][h] =
              own_address(meets(shift[b][h] + (l.a.tile2 - Config::line) * Config::unit2));
        }
      }
  }
  /// A mask of the lane's position of W, or of its two: which lie in the gradient's row.
  CONVT3D_DEVICE uint32_t meets(int position) const {
    const unsigned width = l.a.gradient.extent[2];
    if constexpr (Config::half)
      return (unsigned(position) < width ? 0xffffu : 0u) |
             (unsigned(position + Config::unit2) < width ? 0xffff0000u : 0u);
    else
      return unsigned(position) < width ? ~0u : 0u;
  }
  /// Zeros what of a fragment lies beyond the row's ends; `inner`: all ones, unless the product
  /// is a row's first, or last.
  CONVT3D_DEVICE void mask_ends(int b, const uint32_t (&inner)[2], uint32_t (&a)[4]) const {
#pragma unroll
    for (int r = 0; r < 4; ++r)
      a[r] &= r < 2 ? opening[b][r % 2] | inner[0] : closing[b][r % 2] | inner[1];
  }
  /// Whether a product along a row reaches beyond the gradient's row.
  CONVT3D_DEVICE bool reaches_out(int product) const {
    const int first = product * Config::depth * Config::unit2 - Layer::padding2;
    const int last =
        first + (Config::depth - 1) * Config::unit2 + (Config::taps2 - 1) * Config::reach2;
    return first < 0 || last >= l.a.gradient.extent[2];
  }
  /// Whether one of the next products that are summed together does.
  CONVT3D_DEVICE bool group_reaches_out(const ProductWalk<Layout>& walk) const {
    const int first = walk.along(), last = first + Config::fragments - 1;
    return last >= walk.products2 || reaches_out(first) || reaches_out(last);
  }
  /// Zeros what of a block's fragment lies there.
  CONVT3D_DEVICE void mask(int b, int product, uint32_t (&raw)[4]) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int position = (product * Config::depth + (r < 2 ? 0 : Config::line)) * Config::unit2;
      if (unsigned(position + shift[b][r % 2]) >= unsigned(l.a.gradient.extent[2])) raw[r] = 0;
    }
  }
  /// Points the readers at a slice of a step.
  CONVT3D_DEVICE void point(RowReader<Config> (&reader)[blocks], const WgradSteps<Layout>& at,
                            int slice) const {
    uint32_t shared_lead = 0;
    if constexpr (Config::floating_rows)
      shared_lead = uint32_t(runs.element(at.sample, l.tile.group, l.tile.channel_m,
                                          at.o0 + slice * Layer::stride0, at.o1, at.o2));
#pragma unroll
    for (int b = 0; b < blocks; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t address = at.plane(slice * Config::unit0 + plane[b][h]) + inside[b][h];
        if constexpr (Config::floating_rows)
          address += ((lead[b][h] + shared_lead) & runs.mask) * Config::bytes;
        reader[b].set(h, address);
      }
  }
};

}  // namespace convt3d
