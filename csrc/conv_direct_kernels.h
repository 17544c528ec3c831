// Convolutions of tiles without a gathered copy: blocks of positions, each of which reads its taps where they are, times
// panels of the weight. Compiled once a target: see foreach_target.h.
#include "conv_direct.h"
#include "simd.h"
#if defined(MASKWISE_CONV_DIRECT_KERNELS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_CONV_DIRECT_KERNELS_H
#else
#define MASKWISE_CONV_DIRECT_KERNELS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// Two vectors of outputs for each position: as many positions as there are registers for the sums.
constexpr int kDirectVectors = 2;
constexpr int kDirectRows = MASKWISE_VECTOR_BYTES == 64 ? 14 : 6;

// R positions times two vectors of a panel. `taps` holds R pointers for each tap, `count` of which are listed in `which`.
template <int R>
void multiply_taps(const float* const* taps, const int32_t* which, int64_t count, int64_t channels, const float* weight,
                   const float* bias, float* out, int64_t stride, int64_t outputs) {
  constexpr int N = kLanes<float>, V = kDirectVectors;
  Vec<float> sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = load<float>(bias + v * N);
  for (int64_t t = 0; t < count; ++t) {
    const float* const* from = taps + t * R;
    const float* w = weight + which[t] * channels * kDirectPanel;
    for (int64_t c = 0; c < channels; ++c, w += kDirectPanel) {
      Vec<float> each[V];
      for (int v = 0; v < V; ++v) each[v] = load<float>(w + v * N);
      for (int r = 0; r < R; ++r) {
        const Vec<float> x = splat<float>(from[r][c]);
        for (int v = 0; v < V; ++v) sums[r][v] += x * each[v];
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      const int64_t left = outputs - v * N;
      if (left >= N) store(out + r * stride + v * N, sums[r][v]);
      else if (left > 0) store_partial<float>(out + r * stride + v * N, left, sums[r][v]);
    }
}

using MultiplyTaps = void (*)(const float* const*, const int32_t*, int64_t, int64_t, const float*, const float*, float*,
                              int64_t, int64_t);

template <int... R>
inline MultiplyTaps multiply_taps_of(int64_t rows, std::integer_sequence<int, R...>) {
  static constexpr MultiplyTaps all[] = {&multiply_taps<R + 1>...};
  return all[rows - 1];
}

inline void convolve_direct(const DirectCall& call, float* out) {
  constexpr int64_t N = kLanes<float>, kWidth = kDirectVectors * N;
  const int64_t count = call.positions(), blocks = ceil_div(count, kDirectRows), panels = ceil_div(call.outputs, kDirectPanel);
  const int64_t taps = call.kernel[0] * call.kernel[1];
  // All positions of a panel, and then the next: a panel stays in the cache.
  parallel_uneven(panels * blocks, kDirectRows * taps * call.channels * 2, [&](int64_t begin, int64_t end) {
    std::vector<const float*> from(taps * kDirectRows);
    std::vector<int32_t> which(taps);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t panel = i / blocks, block = i % blocks;
      // Of about the same size each.
      const int64_t first = count * block / blocks, rows = count * (block + 1) / blocks - first;
      const int64_t used = call.find_taps(first, rows, from.data(), which.data());
      const MultiplyTaps multiply = multiply_taps_of(rows, std::make_integer_sequence<int, kDirectRows>{});
      for (int64_t v = 0; v < kDirectPanel; v += kWidth) {
        const int64_t at = panel * kDirectPanel + v;
        if (at >= call.outputs) break;
        multiply(from.data(), which.data(), used, call.channels, call.weight + panel * taps * call.channels * kDirectPanel + v,
                 call.bias + at, out + first * call.outputs + at, call.outputs, call.outputs - at);
      }
    }
  });
}

}  // namespace maskwise::MASKWISE_TARGET
#endif
