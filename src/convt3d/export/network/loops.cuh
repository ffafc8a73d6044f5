// What a thread, a warp or a block does with the values of an expression; a kernel hands that over as
// a function of a position.
//
// A slice is one channel of one sample: `positions` values in a row. A block works on a chunk of one
// slice. Sums are added in the same order on every run.
#pragma once

namespace convt3d {

constexpr int threads = 256;

// ---------------------------------------------------------------- reductions
// States of a reduction: one without values to begin with, `of` the first `count` of some values,
// `merge` for those of another state.

struct Sum {
  float value = 0.f;

  template <int most>
  CONVT3D_DEVICE static Sum of(const float (&x)[most], int count) {
    Sum state;
#pragma unroll
    for (int i = 0; i < most; ++i) state.value += i < count ? x[i] : 0.f;
    return state;
  }
  CONVT3D_DEVICE void merge(const Sum& other) { value += other.value; }
};

/// The largest value; NaN if there is one, as in PyTorch.
struct Max {
  float value = -INFINITY;

  template <int most>
  CONVT3D_DEVICE static Max of(const float (&x)[most], int count) {
    Max state;
#pragma unroll
    for (int i = 0; i < most; ++i)
      if (i < count) state.merge({x[i]});
    return state;
  }
  CONVT3D_DEVICE void merge(const Max& other) {
    value = value >= other.value || value != value ? value : other.value;
  }
};

/// The smallest value; NaN if there is one.
struct Min {
  float value = INFINITY;

  template <int most>
  CONVT3D_DEVICE static Min of(const float (&x)[most], int count) {
    Min state;
#pragma unroll
    for (int i = 0; i < most; ++i)
      if (i < count) state.merge({x[i]});
    return state;
  }
  CONVT3D_DEVICE void merge(const Min& other) {
    value = value <= other.value || value != value ? value : other.value;
  }
};

/// The largest value, and the sum of exponentials of what values are apart from it.
struct LogSumExp {
  float largest = -INFINITY, sum = 0.f;

  template <int most>
  CONVT3D_DEVICE static LogSumExp of(const float (&x)[most], int count) {
    LogSumExp state;
    state.largest = Max::of(x, count).value;
    const float from = state.from();
#pragma unroll
    for (int i = 0; i < most; ++i) state.sum += i < count ? expf(x[i] - from) : 0.f;
    return state;
  }
  CONVT3D_DEVICE void merge(const LogSumExp& other) {
    Max both{largest};
    both.merge({other.largest});
    const LogSumExp before = *this;
    largest = both.value;
    sum = before.sum * expf(before.from() - from()) + other.sum * expf(other.from() - from());
  }
  /// What values are subtracted from: infinities have no difference.
  CONVT3D_DEVICE float from() const { return fabsf(largest) == INFINITY ? 0.f : largest; }
  CONVT3D_DEVICE float result() const { return from() + logf(sum); }
};

/// Mean (`value`), and sum of squared differences from it.
struct Moments {
  float value = 0.f, count = 0.f, squares = 0.f;

  template <int most>
  CONVT3D_DEVICE static Moments of(const float (&x)[most], int count) {
    Moments state;
    if (count <= 0) return state;
    state.count = min(count, most);
    state.value = Sum::of(x, count).value / state.count;
#pragma unroll
    for (int i = 0; i < most; ++i) {
      const float apart = x[i] - state.value;
      state.squares += i < count ? apart * apart : 0.f;
    }
    return state;
  }
  CONVT3D_DEVICE void merge(const Moments& other) {
    const float both = count + other.count;
    if (both == 0.f) return;
    const float apart = other.value - value;
    value = (count * value + other.count * other.value) / both;
    squares += other.squares + apart * apart * (count * other.count / both);
    count = both;
  }
  CONVT3D_DEVICE float reciprocal_deviation(float eps) const {
    return rsqrtf(squares / count + eps);
  }
};

// ---------------------------------------------------------------- across threads

/// The state of all lanes of a warp, in all of them.
template <typename State>
CONVT3D_DEVICE State across_lanes(State state) {
  constexpr int words = sizeof(State) / sizeof(float);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    State other;
#pragma unroll
    for (int i = 0; i < words; ++i)
      reinterpret_cast<float*>(&other)[i] =
          __shfl_xor_sync(~0u, reinterpret_cast<const float*>(&state)[i], distance);
    state.merge(other);
  }
  return state;
}

/// The state of all threads of a block, in its first thread.
template <typename State>
CONVT3D_DEVICE State across_block(State state) {
  constexpr int warps = threads / 32, words = sizeof(State) / sizeof(float);
  __shared__ float kept[warps * words];
  state = across_lanes(state);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < words; ++i)
      kept[warp * words + i] = reinterpret_cast<const float*>(&state)[i];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 1; warp < warps; ++warp) {
      State other;
#pragma unroll
      for (int i = 0; i < words; ++i)
        reinterpret_cast<float*>(&other)[i] = kept[warp * words + i];
      state.merge(other);
    }
  }
  return state;
}

// ---------------------------------------------------------------- loops

/// Store a value at each position of a chunk of `each * threads`.
template <int positions, int each, typename Value>
CONVT3D_DEVICE void map(int chunk, float* out, Value value) {
  const int first = chunk * each * threads + threadIdx.x;
  float y[each];
#pragma unroll
  for (int i = 0; i < each; ++i)
    if (first + i * threads < positions) y[i] = value(first + i * threads);
#pragma unroll
  for (int i = 0; i < each; ++i)
    if (first + i * threads < positions) out[first + i * threads] = y[i];
}

/// The state of the values at the positions of a chunk, in the first thread; `batch` of them are
/// computed at a time.
template <typename State, int positions, int per_chunk, int batch, typename Value>
CONVT3D_DEVICE State reduce(int chunk, Value value) {
  const int end = min(positions, (chunk + 1) * per_chunk);
  State state;
  for (int first = chunk * per_chunk + threadIdx.x; first < end; first += batch * threads) {
    float x[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) x[i] = value(min(first + i * threads, end - 1));
    state.merge(State::of(x, (end - first + threads - 1) / threads));
  }
  return across_block(state);
}

/// The state that `count` states are together, in the first thread.
template <typename State, typename At>
CONVT3D_DEVICE State combine(int count, At at) {
  State state;
  for (int i = threadIdx.x; i < count; i += threads) state.merge(at(i));
  return across_block(state);
}

/// The state of the values in a window, by three offsets.
template <typename State, int d, int h, int w, typename Value>
CONVT3D_DEVICE float window(Value value) {
  State state;
#pragma unroll
  for (int i = 0; i < d; ++i) {
#pragma unroll
    for (int j = 0; j < h; ++j) {
#pragma unroll
      for (int k = 0; k < w; ++k) state.merge({value(i, j, k)});
    }
  }
  return state.value;
}

}  // namespace convt3d
