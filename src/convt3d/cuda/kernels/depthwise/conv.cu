// Forward pass and gradient by input on the CUDA cores for groups of few channels: every source
// value is loaded once a thread, and memory is what bounds it.
//
// A thread owns `block1` x `block2` phase periods of the (H, W) plane, for `block_channels`
// produced channels, and sweeps along D. It takes in one source plane after the other and adds
// each to all units that read it; sums of the units begun and not complete are in registers. The
// next plane is loaded while one is computed with.
//
//     CTA = (sample, segment of D, `lanes` channel blocks, threads / lanes units of the plane)
//
// Contiguous tensors: neighbouring threads take neighbouring units along W; aligned rows move as
// vectors, other rows are gathered by scalars and leave through shared memory, so that a warp
// stores neighbouring elements. channels_last: neighbouring threads take neighbouring channels.
//
// Shared memory: weights as float32, [source channel][axis-0 tap][axis-1 tap][vector of axis-2
// tap x block channel][lane][4]; for rows that are staged, [warp][row of the unit][element].
#include "depthwise/plane.cuh"
#include "direct/config.cuh"
#include "epilogue/fusion.cuh"

namespace convt3d {

struct DepthwiseConfig : DirectConfig {
  static_assert(Choice0::is_static && Choice1::is_static && Choice2::is_static && CONVT3D_BLOCK0 == 1,
                "a march has every slot in registers, one period at a time");
  using Steps = SweepSteps<Axis0>;
  static constexpr bool contiguous = !source_channels_last && !target_channels_last;
  static constexpr int source_stride = source_channels_last ? groups * source_channels : 1;
  static constexpr int target_stride = target_channels_last ? int(tensor_channels(groups * target_channels)) : 1;
  static constexpr int most = 16 / int(sizeof(Storage));
  static constexpr int source_vector = contiguous ? largest_vector(Axis2::unit_source, most) : 1;
  /// A unit's row is one vector; wider rows would leave in pieces with gaps between lanes.
  static constexpr bool vector_store =
      contiguous && largest_vector(Axis2::slots, most) == Axis2::slots;
  static constexpr int target_vector = vector_store ? Axis2::slots : 1;
  /// Whether sums stay in place while a unit ages, with a step of code for each unit in progress;
  /// else there is one step of code, and sums move on after it.
  static constexpr bool in_place = CONVT3D_IN_PLACE;
  static constexpr int ring = in_place ? Steps::in_progress : Steps::ages;
  static constexpr int turns = in_place ? ring : 1;
  CONVT3D_CONSTEXPR static int ring_slot(int turn, int age) {
    return in_place ? (turn - age + Steps::ages * ring) % ring : age;
  }
  static constexpr int rows = threads / lanes;
  static constexpr int weight_row = round_up(kernel2 * block_channels, 4);
  static constexpr int weights =
      source_channels * kernel0 * kernel1 * lanes * weight_row;
  static_assert(packed == 1 || (source_channels_last && target_channels_last),
                "packed groups are neighbours in both tensors");
  static constexpr int staged_warp = 32 * Axis1::slots * Axis2::slots;
};

template <typename Config>
struct DepthwiseArguments {
  const typename Config::Storage* source;
  WeightView<typename Config::Storage> weight;
  const typename Config::Storage* bias;
  typename Config::Storage* target;
  int source_extent[3];
  int target_extent[3];
  int units0, units1, units2;
  int steps;  // units of axis 0 in a segment
  CONVT3D_FUSION_MEMBER
};

/// The sums of one plane of a unit.
template <typename Config>
using PlaneSums = float[Config::Axis1::slots][Config::Axis2::slots][Config::block_channels];

/// A block of channels, of which the first one is that of the whole tensor.
template <typename Config>
struct FusedBlock {
  const DepthwiseArguments<Config>* arguments;
  int first_channel;
};

/// Where a thread's unit lies in the plane of the target, and how its sums get there.
template <typename Config, bool aligned>
struct UnitStore : WhereFused<FusedBlock<Config>> {
  using Type = typename Config::Type;
  using Storage = typename Config::Storage;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  static constexpr int slots1 = Axis1::slots;
  static constexpr int slots2 = Axis2::slots;
  static constexpr bool staged = !Config::target_channels_last && !(aligned && Config::vector_store);
  static constexpr int pieces = staged ? slots2 : 1;

  Storage* target;  // first channel of the block, in plane 0 of axis 0
  int64_t plane_stride, channel_stride;
  int extent0, row_stride;
  int channels;  // of the block, that exist
  float bias[Config::block_channels];
  // What a lane writes of each row of the unit: elements 32 apart if staged, else its own.
  // `rows`: how many rows of the unit are inside.
  int offset[pieces], rows[pieces];
  int columns;  // of the unit, that are inside
  float* stage;

  CONVT3D_DEVICE void place(const DepthwiseArguments<Config>& a, int64_t unit, bool live, int piece) {
    const int u1 = int(unit / a.units2);
    const int u2 = int(unit - int64_t(u1) * a.units2);
    const int o1 = u1 * Axis1::unit_destination;
    const int o2 = u2 * Axis2::unit_destination;
    offset[piece] = o1 * a.target_extent[2] + o2;
    rows[piece] = live ? a.target_extent[1] - o1 : 0;
    columns = a.target_extent[2] - o2;
  }

  CONVT3D_DEVICE UnitStore(const DepthwiseArguments<Config>& a, int sample, int block, int first_unit,
                           int row, bool live, float* stage_)
      : extent0(a.target_extent[0]), row_stride(a.target_extent[2]), stage(stage_) {
    const int64_t volume =
        int64_t(a.target_extent[0]) * a.target_extent[1] * a.target_extent[2];
    constexpr int64_t all_channels =
        tensor_channels(int64_t(Config::groups) * Config::target_channels);
    const int first = Config::first_of(block);
    const int64_t channel = int64_t(Config::group_of(block)) * Config::target_channels + first;
    if constexpr (Fusion::runs) this->held = {&a, int(channel)};
    channels = Config::packed > 1 ? Config::packed : Config::target_channels - first;
    plane_stride = int64_t(a.target_extent[1]) * a.target_extent[2] * Config::target_stride;
    channel_stride = Config::target_stride == 1 ? volume : 1;
    target = a.target + sample * all_channels * volume + channel * channel_stride;
#pragma unroll
    for (int i = 0; i < Config::block_channels; ++i)
      bias[i] = Config::bias && block < Config::channel_blocks && i < channels ? Type::load(__ldg(a.bias + channel + i)) : 0.f;
    const int64_t units = int64_t(a.units1) * a.units2;
    if constexpr (staged) {
      const int warp_unit = first_unit + threadIdx.x / 32 * 32;
#pragma unroll
      for (int piece = 0; piece < pieces; ++piece) {
        const int element = threadIdx.x % 32 + 32 * piece;
        const int owner = warp_unit + element / slots2;
        place(a, owner, owner < units, piece);
        if (element % slots2 >= columns) rows[piece] = 0;
        offset[piece] += element % slots2;
      }
    } else {
      place(a, first_unit + row, live, 0);
    }
  }

  CONVT3D_DEVICE float with_bias(float value, int i) const {
    return Config::bias ? value + bias[i] : value;
  }
  /// The steps of the fusion on an output of the block's i-th channel; `value` is its sum with the
  /// bias.
  CONVT3D_DEVICE float fuse(float value, int i, const Storage* to, bool exists = true) const {
    const auto& a = *this->held.arguments;
    return fused<Config>(a.fusion, value, 0, this->held.first_channel + i, to - a.target, exists);
  }
  /// All rows of plane o0. Every lane of a warp takes part.
  CONVT3D_DEVICE void operator()(const PlaneSums<Config>& sum, int o0) const {
    if (o0 >= extent0) return;
#pragma unroll
    for (int i = 0; i < Config::block_channels; i += Config::channel_vector) {
      if (i >= channels) break;
      Storage* plane = target + i * channel_stride + o0 * plane_stride;
      if constexpr (staged)
        through_shared(sum, i, plane);
      else
        from_registers(sum, i, plane);
    }
  }

 private:
  CONVT3D_DEVICE void through_shared(const PlaneSums<Config>& sum, int i, Storage* plane) const {
#pragma unroll
    for (int r1 = 0; r1 < slots1; ++r1)
#pragma unroll
      for (int r2 = 0; r2 < slots2; ++r2)
        stage[(r1 * 32 + threadIdx.x % 32) * slots2 + r2] = with_bias(sum[r1][r2][i], i);
    __syncwarp();
#pragma unroll
    for (int piece = 0; piece < pieces; ++piece) {
      Storage* to = plane + offset[piece];
#pragma unroll
      for (int r1 = 0; r1 < slots1; ++r1, to += row_stride) {
        float output = stage[(r1 * pieces + piece) * 32 + threadIdx.x % 32];
        if constexpr (Fusion::runs) output = fuse(output, i, to, r1 < rows[piece]);
        const Storage value = Type::store(output);
        if (r1 < rows[piece]) store_streaming(to, value);
      }
    }
    __syncwarp();
  }

  CONVT3D_DEVICE void from_registers(const PlaneSums<Config>& sum, int i, Storage* plane) const {
    Storage* to = plane + int64_t(offset[0]) * Config::target_stride;
#pragma unroll
    for (int r1 = 0; r1 < slots1; ++r1, to += int64_t(row_stride) * Config::target_stride) {
      if (r1 >= rows[0]) break;
      if constexpr (!Config::target_channels_last) {
        float row[slots2];
#pragma unroll
        for (int r2 = 0; r2 < slots2; ++r2) row[r2] = with_bias(sum[r1][r2][i], i);
        if constexpr (Fusion::runs) {
#pragma unroll
          for (int r2 = 0; r2 < slots2; ++r2) row[r2] = fuse(row[r2], i, to + r2, columns > 0);
        }
        if (columns > 0) store_row<Type>(to, row);
      } else {
#pragma unroll
        for (int r2 = 0; r2 < slots2; ++r2)
          if (r2 < columns) {
            float neighbours[Config::channel_vector];
#pragma unroll
            for (int c = 0; c < Config::channel_vector; ++c)
              neighbours[c] = with_bias(sum[r1][r2][i + c], i + c);
            if constexpr (Fusion::runs) {
#pragma unroll
              for (int c = 0; c < Config::channel_vector; ++c)
                neighbours[c] =
                    fuse(neighbours[c], i + c, to + r2 * Config::target_stride + c);
            }
            store_row<Type>(to + r2 * Config::target_stride, neighbours);
          }
      }
    }
  }
};

/// Stores the planes of a step that are complete, from slot `r0` on, and clears their sums.
template <typename Config, int r0 = 0, typename Store>
CONVT3D_DEVICE void finish(PlaneSums<Config> (&sum)[Config::ring][Config::Axis0::slots],
                           const Store& store, int turn, int step, int begin, int last) {
  constexpr int age = Config::in_place ? Config::Steps::last_age(r0) : Config::Steps::ages - 1;
  PlaneSums<Config>& done = sum[Config::ring_slot(turn, age)][r0];
  const int unit = step - age;
  if (unit >= begin && unit < last) store(done, unit * Config::Axis0::unit_destination + r0);
#pragma unroll
  for (int i = 0; i < int(sizeof(done) / sizeof(float)); ++i) (&done[0][0][0])[i] = 0.f;
  if constexpr (r0 + 1 < Config::Axis0::slots)
    finish<Config, r0 + 1>(sum, store, turn, step, begin, last);
}

template <typename Config, bool aligned>
CONVT3D_DEVICE void sweep_planes(const DepthwiseArguments<Config>& a, const float* weights, float* staging) {
  using Storage = typename Config::Storage;
  using Axis0 = typename Config::Axis0;
  using Axis1 = typename Config::Axis1;
  using Axis2 = typename Config::Axis2;
  using Steps = typename Config::Steps;
  using Row = DepthwiseRow<Axis2, typename Config::Type, aligned ? Config::source_vector : 1,
                       Config::source_stride, Config::packed>;
  using Plane = DepthwisePlane<Axis1, Row>;
  using Store = UnitStore<Config, aligned>;
  constexpr int block_channels = Config::block_channels;
  constexpr int ages = Steps::ages;

  const int64_t units = int64_t(a.units1) * a.units2;
  int index = blockIdx.x;
  const int tiles = int((units + Config::rows - 1) / Config::rows);
  const int first_unit = index % tiles * Config::rows;
  index /= tiles;
  const int segments = (a.units0 + a.steps - 1) / a.steps;
  const int begin = index % segments * a.steps;
  index /= segments;
  constexpr int lane_groups = div_up(Config::channel_blocks, Config::lanes);
  const int lane = threadIdx.x % Config::lanes;
  const int block = index % lane_groups * Config::lanes + lane;
  const int sample = index / lane_groups;
  const int row = threadIdx.x / Config::lanes;
  const bool live =
      row < Config::rows && first_unit + row < units && block < Config::channel_blocks;
  const int last = begin + a.steps < a.units0 ? begin + a.steps : a.units0;
  const int end = last + ages - 1;

  const int u1 = live ? (first_unit + row) / a.units2 : 0;
  const int u2 = live ? first_unit + row - u1 * a.units2 : 0;
  const int first1 = u1 * Axis1::unit_source;
  const int first2 = u2 * Axis2::unit_source;
  const int group = Config::group_of(block);
  const int64_t source_plane =
      int64_t(a.source_extent[1]) * a.source_extent[2] * Config::source_stride;
  const int64_t row_stride = int64_t(a.source_extent[2]) * Config::source_stride;
  const int64_t channel_stride =
      Config::source_stride == 1 ? a.source_extent[0] * source_plane : 1;
  const Storage* channel =
      a.source +
      (int64_t(sample) * Config::groups * Config::source_channels * a.source_extent[0]) *
          (int64_t(a.source_extent[1]) * a.source_extent[2]) +
      int64_t(group) * Config::source_channels * channel_stride;
  const Storage* source =
      channel + first1 * row_stride + int64_t(first2) * Config::source_stride;
  const Store store(a, sample, block, first_unit, row, live,
                    staging + threadIdx.x / 32 * Config::staged_warp);
  const uint32_t lane_weights = shared_address(weights + 4 * lane);

  PlaneSums<Config> sum[Config::ring][Axis0::slots];
  float* sums = &sum[0][0][0][0][0];
  constexpr int count = int(sizeof(sum) / sizeof(float));
#pragma unroll
  for (int i = 0; i < count; ++i) sums[i] = 0.f;

  // Planes are taken in ascending order, each for one source channel after the other.
  int plane = begin * Axis0::unit_source + Axis0::min_shift;
  auto fetch = [&](Plane& to, int i0, int c) {
    const bool inside0 = live && unsigned(i0) < unsigned(a.source_extent[0]);
    to.load(source + i0 * source_plane + c * channel_stride, row_stride, inside0, first1,
            a.source_extent[1], first2, a.source_extent[2]);
  };
  constexpr int channels = Config::source_channels;
  Plane current;
  fetch(current, plane, 0);
#pragma unroll 1
  for (int step = begin; step < end; step += Config::turns) {
#pragma unroll
    for (int turn = 0; turn < Config::turns; ++turn) {
      if (step + turn >= end) return;
#pragma unroll
      for (int part = 0; part < Axis0::unit_source; ++part, ++plane) {
#pragma unroll 1
        for (int c = 0; c < (Steps::used(part) ? channels : 1); ++c) {
          float value[Plane::rows][Plane::count][Config::packed];
          current.values(value);
          const bool same = Steps::used(part) && c + 1 < channels;
          if (same || Steps::used((part + 1) % Axis0::unit_source))
            fetch(current, plane + !same, same ? c + 1 : 0);
          if (!Steps::used(part)) continue;
#pragma unroll
          for (int age = 0; age < ages; ++age)
#pragma unroll
            for (int r0 = 0; r0 < Axis0::slots; ++r0) {
              const int k0 = Axis0::tap(r0, Steps::shift(age, part));
              if (k0 < 0) continue;
              auto& plane_sum = sum[Config::ring_slot(turn, age)][r0];
#pragma unroll
              for (int k1 = 0; k1 < Layer::kernel1; ++k1) {
                // Loaded anew each time: all of them would not leave registers for the sums.
                const uint32_t from =
                    lane_weights + 4u * ((c * Layer::kernel0 + k0) * Layer::kernel1 + k1) *
                                       Config::weight_row * Config::lanes;
                uint32_t weight[Config::weight_row];
#pragma unroll
                for (int i = 0; i < Config::weight_row; i += 4)
                  load_shared(from + 4 * i * Config::lanes, weight[i], weight[i + 1], weight[i + 2], weight[i + 3]);
#pragma unroll
                for (int r1 = 0; r1 < Axis1::slots; ++r1) {
                  if (!Axis1::valid(r1, k1)) continue;
                  const int i1 = Axis1::shift_of(r1, k1) - Axis1::min_shift;
#pragma unroll
                  for (int k2 = 0; k2 < Layer::kernel2; ++k2)
#pragma unroll
                    for (int r2 = 0; r2 < Axis2::slots; ++r2) {
                      if (!Axis2::valid(r2, k2)) continue;
                      const int i2 = Axis2::shift_of(r2, k2) - Axis2::min_shift;
#pragma unroll
                      for (int i = 0; i < block_channels; ++i)
                        plane_sum[r1][r2][i] = fmaf(
                            value[i1][i2][Config::packed > 1 ? i : 0], float_of(weight[k2 * block_channels + i]),
                            plane_sum[r1][r2][i]);
                    }
                }
              }
            }
        }
      }
      finish<Config>(sum, store, turn, step + turn, begin, last);
      if constexpr (!Config::in_place) {
#pragma unroll
        for (int i = count - 1; i >= count / ages; --i) sums[i] = sums[i - count / ages];
#pragma unroll
        for (int i = 0; i < count / ages; ++i) sums[i] = 0.f;
      }
    }
  }
}

template <typename Config>
CONVT3D_DEVICE void sweep_rows(const DepthwiseArguments<Config>& a) {
  extern __shared__ __align__(128) unsigned char shared[];
  float* weights = reinterpret_cast<float*>(shared);
  const int64_t units = int64_t(a.units1) * a.units2;
  const int tiles = int((units + Config::rows - 1) / Config::rows);
  const int segments = (a.units0 + a.steps - 1) / a.steps;
  const int first_block = blockIdx.x / tiles / segments %
                          div_up(Config::channel_blocks, Config::lanes) * Config::lanes;
  for (int i = threadIdx.x; i < Config::weights; i += Config::threads) {
    const int vector = i / (4 * Config::lanes);
    const int lane = i / 4 % Config::lanes;
    const int tap = vector / (Config::weight_row / 4);
    const int element = vector % (Config::weight_row / 4) * 4 + i % 4;
    const int k2 = element / Config::block_channels;
    weights[i] = k2 < Layer::kernel2
                     ? block_weight<Config>(a.weight, first_block + lane,
                                            tap / (Layer::kernel0 * Layer::kernel1),
                                            tap / Layer::kernel1 % Layer::kernel0,
                                            tap % Layer::kernel1, k2,
                                            element % Config::block_channels)
                     : 0.f;
  }
  __syncthreads();
  float* staging = weights + Config::weights;
  constexpr uint64_t source_bytes = Config::source_vector * sizeof(typename Config::Storage);
  constexpr uint64_t target_bytes = Config::target_vector * sizeof(typename Config::Storage);
  const bool aligned = a.source_extent[2] % Config::source_vector == 0 &&
                       a.target_extent[2] % Config::target_vector == 0 &&
                       reinterpret_cast<uint64_t>(a.source) % source_bytes == 0 &&
                       reinterpret_cast<uint64_t>(a.target) % target_bytes == 0;
  if (Config::contiguous && aligned)
    sweep_planes<Config, Config::contiguous>(a, weights, staging);
  else
    sweep_planes<Config, false>(a, weights, staging);
}

}  // namespace convt3d

extern "C" __global__ void __launch_bounds__(convt3d::DepthwiseConfig::threads, CONVT3D_MIN_BLOCKS)
    convt3d_depthwise(const convt3d::DepthwiseConfig::Storage* source,
                      const convt3d::DepthwiseConfig::Storage* weight,
                      const convt3d::DepthwiseConfig::Storage* bias, convt3d::DepthwiseConfig::Storage* target,
                      int source0, int source1, int source2, int target0, int target1, int target2,
                      int units0, int units1, int units2, int steps, convt3d::int64_t stride_in,
                      convt3d::int64_t stride_out, convt3d::int64_t stride0, convt3d::int64_t stride1,
                      convt3d::int64_t stride2 CONVT3D_FUSION_PARAMETERS) {
  const convt3d::DepthwiseArguments<convt3d::DepthwiseConfig> arguments{
      source, {weight, stride_in, stride_out, stride0, stride1, stride2},
      bias,   target,
      {source0, source1, source2}, {target0, target1, target2},
      units0, units1, units2, steps CONVT3D_FUSION_ARGUMENT};
  convt3d::sweep_rows(arguments);
}
