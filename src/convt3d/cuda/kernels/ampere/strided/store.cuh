// The epilogue of the strided kernel: bias, conversion, and stores that follow the layout.
//
//   channels_last  a lane owns two neighbouring channels of a position and stores them as one
//   direct         contiguous, rows a multiple of a lane's vector, every slot has taps: each lane
//                  stores its run along W, eight lanes a line
//   staged         contiguous otherwise: eight channels at a time are laid out in shared memory as
//                  they lie in the target. Where a tile is as wide as the target, its rows of a
//                  channel are one contiguous run, which crosses row ends, so that only its first and
//                  last line are not written whole.
//
// Slots without a tap, and what lies beyond the last unit that has one, hold the bias: whole
// slices of it are filled without staging.
#pragma once
#include "ampere/strided/runs.cuh"
#include "ampere/strided/tile.cuh"
#include "device/barrier.cuh"
#include "device/tma.cuh"

namespace convt3d {

template <typename Config>
struct StridedSums {
  float value[Config::Axis0::slots][Config::Axis1::slots][Config::Axis2::slots]
             [Config::fragments_m][Config::fragments_n][4];
  CONVT3D_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < int(sizeof(value) / sizeof(float)); ++i) (&value[0][0][0][0][0][0])[i] = 0.f;
  }
};

template <typename Config>
struct StridedStore {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  using Sums = StridedSums<Config>;
  using Tile = StridedTile<Config>;
  using Fits = int[Config::fragments_m];  // outputs of a run that exist
  using Pairs = UnitPair[Config::fragments_m];

  static constexpr int64_t all_channels =
      tensor_channels(int64_t(Config::groups) * Config::target_channels);
  static constexpr int vector = 16 / int(sizeof(Storage));
  // Runs are staged as far from such a boundary as their destination lies from one. What a bulk
  // copy takes out of a line of shared memory it writes at once: to parts of two lines, unless
  // these lie alike.
  static constexpr int boundary = Config::ring > 0 ? 128 / int(sizeof(Storage)) : vector;
  // A lane's neighbouring outputs along W, and how many of them one direct store takes.
  static constexpr int run = 2 * Axis2::slots;
  static constexpr int direct_vector = run % vector == 0 ? vector : (run % 4 == 0 ? 4 : 2);

  const StridedArguments<Config>& arguments;
  int group, column_tile, warp, lane;
  int volume;  // of one channel
  // Staging: elements from a row, and from a run (a channel of one slice), to the next.
  bool whole_rows;
  int row_pitch, run_pitch;
  Divider by_tile0;

  CONVT3D_DEVICE StridedStore(const StridedArguments<Config>& arguments_, int group_,
                              int column_tile_, int warp_, int lane_)
      : arguments(arguments_), group(group_), column_tile(column_tile_), warp(warp_), lane(lane_),
        by_tile0(arguments_.tile[0]) {
    volume = int(arguments.target.volume());
    whole_rows = arguments.tiles[2] == 1;
    const int width = arguments.target.extent[2];
    const int widest = arguments.tile[2] * Axis2::slots + Axis2::slots - 1;
    // Rows of a run keep the alignment that they have in the target.
    row_pitch = whole_rows ? width : widest + floor_mod(width - widest, vector);
    // The last tile takes what is left, of which ampere/strided/rows.cu has no more than others.
    const int rows = arguments.tile[1] * Axis1::slots + (Config::ring > 0 ? 0 : Axis1::slots - 1);
    run_pitch = round_up(rows * row_pitch, boundary) + boundary;
  }

  CONVT3D_DEVICE static float biased(float value, float bias) {
    return Config::bias ? value + bias : value;
  }
  CONVT3D_DEVICE float bias_of(int channel) const {
    if constexpr (Config::bias) {
      if (channel < Config::target_channels)
        return Type::load(__ldg(arguments.bias + group * Config::target_channels + channel));
    }
    return 0.f;
  }

  /// The steps of the fusion on an output of the group's channel; `value` is its sum with the bias.
  CONVT3D_DEVICE float fuse(float value, int channel, const Storage* to, bool exists = true) const {
    return fused<Config>(arguments.fusion, value, group, channel, to - arguments.target.data,
                         exists);
  }

  CONVT3D_DEVICE void operator()(const Tile& tile, const Pairs& pairs, const Sums& sum) const {
    if constexpr (Config::target_channels_last) {
      channels_last(tile, pairs, sum);
    } else {
      if (stages())
        staged(tile, pairs, sum);
      else
        direct(tile, pairs, sum);
    }
  }

  /// Whether all warps meet in every call, after the sums were made and copies waited for.
  CONVT3D_DEVICE bool meets() const { return Config::bulk_stores && stages(); }

 protected:
  /// As in plan/ampere_strided/, which leaves no room for staging otherwise. Targets start
  /// aligned.
  CONVT3D_DEVICE bool stages() const {
    return !Config::target_channels_last &&
           (!Config::all_slots_live || arguments.target.extent[2] % direct_vector != 0);
  }
  CONVT3D_DEVICE Storage* base_of(const Tile& tile) const {
    return arguments.target.group_base(tile.sample, group, Config::target_channels, all_channels,
                                       Config::target_channels_last);
  }
  CONVT3D_DEVICE int first0(const Tile& tile) const {
    return tile.index[0] * arguments.tile[0] * Axis0::slots;
  }
  CONVT3D_DEVICE int first1(const Tile& tile) const {
    return tile.index[1] * arguments.tile[1] * Axis1::slots;
  }
  CONVT3D_DEVICE int first2(const Tile& tile) const {
    return tile.index[2] * arguments.tile[2] * Axis2::slots;
  }
  /// Destinations of a lane's run that exist: 0 to `run`.
  CONVT3D_DEVICE int room(const UnitPair& p, int o2) const {
    const int units = (p.first ? 1 : 0) + (p.second ? 1 : 0);
    return min(units * Axis2::slots, arguments.target.extent[2] - o2);
  }

  // ------------------------------------------------------------ channels_last

  CONVT3D_DEVICE void channels_last(const Tile& tile, const Pairs& pairs, const Sums& sum) const {
    constexpr bool together = Config::target_channels % 2 == 0;
    const auto& target = arguments.target;
    Storage* base = base_of(tile);
#pragma unroll
    for (int n = 0; n < Config::fragments_n; ++n) {
      const int channel = column_tile * Config::column_tile + 8 * n + 2 * (lane % 4);
      const float bias[2] = {bias_of(channel), bias_of(channel + 1)};
#pragma unroll
      for (int m = 0; m < Config::fragments_m; ++m) {
        const UnitPair& p = pairs[m];
        const int o0 = first0(tile) + p.unit0 * Axis0::slots;
        const int o1 = first1(tile) + p.unit1 * Axis1::slots;
        const int o2 = first2(tile) + p.unit2 * Axis2::slots;
        const int fits = room(p, o2);
#pragma unroll
        for (int slot0 = 0; slot0 < Axis0::slots; ++slot0)
#pragma unroll
          for (int slot1 = 0; slot1 < Axis1::slots; ++slot1) {
            if (o0 + slot0 >= target.extent[0] || o1 + slot1 >= target.extent[1]) continue;
            const int position =
                (o0 + slot0) * target.stride0 + (o1 + slot1) * target.stride1 + o2;
#pragma unroll
            for (int e = 0; e < run; ++e) {
              if (e >= fits) continue;
              const float* c = sum.value[slot0][slot1][e % Axis2::slots][m][n] +
                               2 * (e / Axis2::slots);
              Storage* to = base + int64_t(position + e) * all_channels + channel;
              if constexpr (Fusion::runs) {
                float output[2];
#pragma unroll
                for (int i = 0; i < 2; ++i)
                  output[i] = fuse(biased(c[i], bias[i]), channel + i, to + i,
                                   channel + i < Config::target_channels);
                store_channels<Type, together>(to, output, Config::target_channels - channel);
              } else if (together) {
                if (channel < Config::target_channels)
                  store_two<Type>(to, biased(c[0], bias[0]), biased(c[1], bias[1]));
              } else {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                  if (channel + i < Config::target_channels)
                    store_streaming(to + i, Type::store(biased(c[i], bias[i])));
              }
            }
          }
      }
    }
  }

  // ------------------------------------------------------------ contiguous

  /// The i-th channel of a fragment that a lane holds sums of, and the same of a group.
  CONVT3D_DEVICE int in_fragment(int i) const {
    return Config::column_of(2 * (lane % 4) + i);
  }
  CONVT3D_DEVICE int channel_of(int n, int i) const {
    return column_tile * Config::column_tile + 8 * n + in_fragment(i);
  }

  CONVT3D_DEVICE void direct(const Tile& tile, const Pairs& pairs, const Sums& sum) const {
    const auto& target = arguments.target;
    Storage* base = base_of(tile);
#pragma unroll
    for (int m = 0; m < Config::fragments_m; ++m) {
      const UnitPair& p = pairs[m];
      const int o0 = first0(tile) + p.unit0 * Axis0::slots;
      const int o1 = first1(tile) + p.unit1 * Axis1::slots;
      const int o2 = first2(tile) + p.unit2 * Axis2::slots;
      const int fits = room(p, o2);
      const int position = o0 * target.stride0 + o1 * target.stride1 + o2;
#pragma unroll
      for (int n = 0; n < Config::fragments_n; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int channel = channel_of(n, i);
          const float bias = bias_of(channel);
          Storage* to = base + int64_t(channel) * volume + position;
#pragma unroll
          for (int slot0 = 0; slot0 < Axis0::slots; ++slot0)
#pragma unroll
            for (int slot1 = 0; slot1 < Axis1::slots; ++slot1) {
              if (channel >= Config::target_channels || o0 + slot0 >= target.extent[0] ||
                  o1 + slot1 >= target.extent[1])
                continue;
#pragma unroll
              for (int first = 0; first < run; first += direct_vector) {
                if (first >= fits) continue;
                float values[direct_vector];
#pragma unroll
                for (int e = 0; e < direct_vector; ++e)
                  values[e] = biased(sum.value[slot0][slot1][(first + e) % Axis2::slots][m][n]
                                              [2 * ((first + e) / Axis2::slots) + i],
                                     bias);
                if constexpr (Fusion::runs) {
#pragma unroll
                  for (int e = 0; e < direct_vector; ++e)
                    values[e] = fuse(values[e], channel,
                                     to + slot0 * target.stride0 + slot1 * target.stride1 + first + e);
                }
                store_row<Type, direct_vector>(
                    to + slot0 * target.stride0 + slot1 * target.stride1 + first, values);
              }
            }
        }
    }
  }

  /// The part of the target that a tile writes: the last tile of an axis writes all that is left.
  struct Region {
    int first0, first1, first2;
    int planes, rows, width;
  };
  CONVT3D_DEVICE Region region(const Tile& tile) const {
    const auto& a = arguments;
    const auto size = [&](int axis, int first, int slots) {
      return tile.index[axis] + 1 == a.tiles[axis] ? a.target.extent[axis] - first
                                                   : a.tile[axis] * slots;
    };
    Region r{first0(tile), first1(tile), first2(tile), 0, 0, 0};
    r.planes = size(0, r.first0, Axis0::slots);
    r.rows = size(1, r.first1, Axis1::slots);
    r.width = size(2, r.first2, Axis2::slots);
    return r;
  }

  /// Where a channel's run of slice o0 begins in the target.
  CONVT3D_DEVICE int64_t run_start(const Region& r, int channel, int o0) const {
    return int64_t(channel) * volume + (o0 * arguments.target.stride0 +
                                        r.first1 * arguments.target.stride1 + r.first2);
  }

  /// Stores the rows of a run, each or all of them at once, by one warp.
  template <typename RunOf>
  CONVT3D_DEVICE void store_rows(const Region& r, Storage* to, const RunOf& run_of) const {
    if (whole_rows) {
      store_run(to, r.rows * r.width, lane, run_of(0));
    } else {
#pragma unroll 1
      for (int row = 0; row < r.rows; ++row)
        store_run(to + int64_t(row) * arguments.target.stride1, r.width, lane,
                                       run_of(row));
    }
  }

  CONVT3D_DEVICE void staged(const Tile& tile, const Pairs& pairs, const Sums& sum) const {
    extern __shared__ __align__(128) unsigned char shared[];
    Storage* first_staging =
        reinterpret_cast<Storage*>(shared + 4 * StridedShared<Config>::staging);
    const Region r = region(tile);
    Storage* base = base_of(tile);
    const uint32_t base_phase = uint32_t(reinterpret_cast<uint64_t>(base) / sizeof(Storage));
    Fits fits;
#pragma unroll
    for (int m = 0; m < Config::fragments_m; ++m)
      fits[m] = room(pairs[m], r.first2 + pairs[m].unit2 * Axis2::slots);

    int round = 0;
#pragma unroll
    for (int slot0 = 0; slot0 < Axis0::slots; ++slot0) {
      if (!Config::live0(slot0)) continue;
#pragma unroll
      for (int n = 0; n < Config::fragments_n; ++n, ++round) {
        Storage* staging = first_staging;
        if (arguments.staging_buffers == 2 && round % 2) staging += 8 * arguments.tile[0] * run_pitch;
        free_staging(round);
        stage(staging, r, base_phase, pairs, fits, sum, slot0, n, base);
        if constexpr (Config::bulk_stores) fence_async_proxy();
        __syncthreads();
        if constexpr (Config::bulk_stores) {
          // Which warps come first alternates from round to round.
          store_runs<8>(r, base, base_phase, staging, slot0, n,
                        (warp + round * (Config::warps / 2)) % Config::warps, Config::warps);
          continue;
        }
        // Runs are distributed over warps: channels of the round by slices of the tile.
        const int runs = 8 * arguments.tile[0];
#pragma unroll 1
        for (int item = warp; item < runs; item += Config::warps) {
          const int in_fragment = item % 8;
          const int slice = item / 8;
          const int channel = column_tile * Config::column_tile + 8 * n + in_fragment;
          const int o0 = r.first0 + slice * Axis0::slots + slot0;
          if (channel >= Config::target_channels || o0 >= arguments.target.extent[0]) continue;
          const int64_t start = run_start(r, channel, o0);
          const Storage* from = staging + (in_fragment * arguments.tile[0] + slice) * run_pitch +
                                (base_phase + uint32_t(start)) % boundary;
          store_rows(r, base + start,
                     [&](int row) { return StagedRun<Storage>{from + row * row_pitch}; });
        }
      }
    }
    if constexpr (!Config::all_slots_live) fill_slices(r, base);
  }

  /// Stores the runs of a round by bulk copies: each by so many lanes of a warp, which comes at
  /// some turn of several. The first lane copies what is whole vectors, all of them the few
  /// elements at both ends.
  template <int lanes>
  CONVT3D_DEVICE void store_runs(const Region& r, Storage* base, uint32_t base_phase,
                                 const Storage* staging, int slot0, int n, int turn,
                                 int turns) const {
    constexpr int together = 32 / lanes;
    const int rows = whole_rows ? 1 : r.rows;
    const int length = whole_rows ? r.rows * r.width : r.width;
    const int items = 8 * arguments.tile[0] * rows;
    const int part = lane % lanes;
#pragma unroll 1
    for (int first = together * turn; first < items; first += together * turns) {
      const int item = first + lane / lanes;
      const int in_fragment = item % 8;
      const int row = by_tile0.quotient(item / 8);
      const int slice = item / 8 - row * arguments.tile[0];
      const int channel = column_tile * Config::column_tile + 8 * n + in_fragment;
      const int o0 = r.first0 + slice * Axis0::slots + slot0;
      if (item < items && channel < Config::target_channels && o0 < arguments.target.extent[0]) {
        const int64_t start = run_start(r, channel, o0);
        const Storage* from = staging + (in_fragment * arguments.tile[0] + slice) * run_pitch +
                              (base_phase + uint32_t(start)) % boundary + row * row_pitch;
        Storage* to = base + start + row * arguments.target.stride1;
        const RunParts<Storage> parts(to, length);
        if (part == 0 && parts.whole > 0)
          bulk_store_streaming(to + parts.head, shared_address(from + parts.head),
                               parts.whole * int(sizeof(Storage)));
#pragma unroll
        for (int j = 0; j < 2 * vector / lanes; ++j) {
          const int e = part + lanes * j;
          const bool at_head = e < vector;
          const int i = e % vector + (at_head ? 0 : parts.head + parts.whole);
          if (e % vector < (at_head ? parts.head : parts.tail)) store_streaming(to + i, from[i]);
        }
      }
    }
    bulk_commit();
  }

  /// Waits until the staging buffer of a round of this tile may be written. Before round 0 it
  /// may: barriers of the pipeline lie between, and bulk copies of the tile before are waited for
  /// here.
  CONVT3D_DEVICE void free_staging(int round) const {
    if (arguments.staging_buffers == 2) {
      // Round 0 has waited for both buffers.
      if (round == 1) return;
      if constexpr (Config::bulk_stores) {
        if (round == 0)
          bulk_wait_read<0>();
        else
          bulk_wait_read<1>();
      }
    } else {
      if constexpr (Config::bulk_stores) bulk_wait_read<0>();
    }
    if (Config::bulk_stores || round > 0) __syncthreads();
  }

  /// Lays out one fragment column of all warps in shared memory, bias added.
  CONVT3D_DEVICE void stage(Storage* staging, const Region& r, uint32_t base_phase,
                            const Pairs& pairs, const Fits& fits, const Sums& sum, int slot0,
                            int n, const Storage* base) const {
    const uint32_t tile_phase = base_phase + uint32_t(run_start(r, 0, r.first0 + slot0));
    const uint32_t row_bytes = uint32_t(row_pitch) * sizeof(Storage);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int channel = channel_of(n, i);
      const float bias = bias_of(channel);
#pragma unroll
      for (int m = 0; m < Config::fragments_m; ++m)
        // Of one turn: see StridedWork.
#pragma unroll
        for (int turn = 0; turn < 1; ++turn) {
          const UnitPair& p = pairs[m];
          const int slice = p.unit0 * Axis0::slots;
          const uint32_t phase = (tile_phase + uint32_t(channel) * uint32_t(volume) +
                                  uint32_t(slice * arguments.target.stride0)) % boundary;
          const int place = (in_fragment(i) * arguments.tile[0] + p.unit0) * run_pitch +
                            p.unit1 * Axis1::slots * row_pitch + p.unit2 * Axis2::slots;
          uint32_t to = shared_address(staging) + uint32_t(sizeof(Storage)) * (place + phase);
#pragma unroll
          for (int slot1 = 0; slot1 < Axis1::slots; ++slot1) {
            to = own_address(to);
            const auto put = [&](int e) {
              if constexpr (Fusion::runs) {
                const int o0 = r.first0 + slice + slot0;
                const int o1 = r.first1 + p.unit1 * Axis1::slots + slot1;
                const int o2 = r.first2 + p.unit2 * Axis2::slots + e;
                const auto& target = arguments.target;
                const float value = sum.value[slot0][slot1][e % Axis2::slots][m][n]
                                             [2 * (e / Axis2::slots) + i + turn];
                const Storage* at = base + (int64_t(channel) * volume + o0 * target.stride0 +
                                            o1 * target.stride1 + o2);
                const bool exists =
                    channel < Config::target_channels && target.inside(o0, o1, o2);
                store_shared(to + uint32_t(sizeof(Storage)) * e,
                             Type::store(fuse(biased(value, bias), channel, at, exists)));
                return;
              }
              store_shared(to + uint32_t(sizeof(Storage)) * e,
                           Type::store(biased(sum.value[slot0][slot1][e % Axis2::slots][m][n]
                                                       [2 * (e / Axis2::slots) + i + turn],
                                              bias)));
            };
#pragma unroll
            for (int e = 0; e < run; ++e)
              if (e < fits[m]) put(e);
            to += row_bytes;
          }
        }
    }
    if constexpr (!Config::all_slots_live) {
      // What lies beyond the last unit with a tap: the ends of rows, and rows.
      const int computed1 = arguments.tile[1] * Axis1::slots;
      const int computed2 = arguments.tile[2] * Axis2::slots;
      if (r.rows > computed1 || r.width > computed2)
        for (int item = warp; item < 8 * arguments.tile[0]; item += Config::warps) {
          const int in_fragment = item % 8;
          const int slice = item / 8;
          const int channel = column_tile * Config::column_tile + 8 * n + in_fragment;
          const int64_t start = run_start(r, channel, r.first0 + slice * Axis0::slots + slot0);
          Storage* to = staging + (in_fragment * arguments.tile[0] + slice) * run_pitch +
                        (base_phase + uint32_t(start)) % boundary;
          const int o0 = r.first0 + slice * Axis0::slots + slot0;
          if (Fusion::by_element &&
              (channel >= Config::target_channels || o0 >= arguments.target.extent[0]))
            continue;
          const auto constant = [&](int row, int x) {
            if constexpr (Fusion::runs)
              return Type::store(fuse(bias_of(channel), channel,
                                      base + start + row * arguments.target.stride1 + x));
            else
              return Type::store(bias_of(channel));
          };
          const Storage value = constant(0, 0);
          const int rest = r.width > computed2 ? r.width - computed2 : 0;
          for (int row = lane; row < r.rows; row += 32)
            for (int x = row < computed1 ? r.width - rest : 0; x < r.width; ++x)
              to[row * row_pitch + x] = Fusion::by_element ? constant(row, x) : value;
        }
    }
  }

  /// Slices that hold nothing but the bias.
  CONVT3D_DEVICE void fill_slices(const Region& r, Storage* base) const {
    for (int plane = 0; plane < r.planes; ++plane) {
      const bool beyond = plane >= arguments.tile[0] * Axis0::slots;
      bool live = false;
#pragma unroll
      for (int slot = 0; slot < Axis0::slots; ++slot)
        live = live || (Config::live0(slot) && plane % Axis0::slots == slot);
      if (live && !beyond) continue;
      for (int column = warp; column < Config::column_tile; column += Config::warps) {
        const int channel = column_tile * Config::column_tile + column;
        if (channel >= Config::target_channels) continue;
        if constexpr (Fusion::by_element) {
          const Storage* to = base + run_start(r, channel, r.first0 + plane);
          const auto fused_at = [&, to](int i) {
            return Type::store(fuse(bias_of(channel), channel, to + i));
          };
          store_rows(r, base + run_start(r, channel, r.first0 + plane), [&](int row) {
            return ComputedRun<Storage, decltype(fused_at)>{fused_at,
                                                           row * arguments.target.stride1};
          });
          continue;
        }
        float constant = bias_of(channel);
        if constexpr (Fusion::runs) constant = fuse(constant, channel, base);
        const FilledRun<Type> filled(constant);
        store_rows(r, base + run_start(r, channel, r.first0 + plane),
                   [&](int) { return filled; });
      }
    }
  }
};

}  // namespace convt3d
