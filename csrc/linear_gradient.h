// The gradient of the kept weights: for each, the product of two columns over the batch. Compiled once a target, through
// linear.cpp.
#include "linear_blocks.h"
#include "linear_kernels.h"
#if defined(MASKWISE_LINEAR_GRADIENT_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_LINEAR_GRADIENT_H
#else
#define MASKWISE_LINEAR_GRADIENT_H
#endif

namespace maskwise::MASKWISE_TARGET {

// out[p] (+)= sum over t of grad[t] * tile[columns[p]][t], for the kept weights [begin, end) of one output.
inline void sample_row(const float* grad, const float* tile, const int32_t* columns, int64_t begin, int64_t end,
                       bool first, float* out) {
  constexpr int L = kLanes<float>, V = 8;
  constexpr int64_t T = kPanelRows<V>;
  for (int64_t p = begin; p < end; p += 8) {
    const int64_t count = std::min<int64_t>(8, end - p);
    const float* x[8];
    // The last few are filled up with the first, which may be read.
    for (int64_t i = 0; i < 8; ++i) x[i] = tile + columns[i < count ? p + i : p] * T;
    Vec<float> a[8];
    for (int i = 0; i < 8; ++i) a[i] = Vec<float>{};
    for (int v = 0; v < V; v += 4) {
      Vec<float> g[4];
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) g[u] = load_raw<Vec<float>>(grad + (v + u) * L);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 4
        for (int u = 0; u < 4; ++u) a[i] += g[u] * load_raw<Vec<float>>(x[i] + (v + u) * L);
      }
    }
    float sums[8];
    add_lanes_of_8(a, sums);
    if (first)
      for (int64_t i = 0; i < count; ++i) out[p + i] = sums[i];
    else
      for (int64_t i = 0; i < count; ++i) out[p + i] += sums[i];
  }
}

inline void sample_panel(int64_t* panel) { *panel = kPanelRows<8>; }

inline void sample_rows(const float* grads, const float* tile, const int32_t* columns, const int32_t* starts,
                        int64_t pieces, int64_t step, int64_t begin, int64_t end, bool first, float* out) {
  for (int64_t piece = 0; piece < pieces; piece += step) {
    const int64_t next = std::min(piece + step, pieces);
    for (int64_t n = begin; n < end; ++n) {
      const int32_t* row = starts + n * pieces;
      sample_row(grads + n * kPanelRows<8>, tile, columns, row[piece], row[next], first, out);
    }
  }
}

// Blocks of 4 outputs by 1 input: two blocks at a time share the four gradients.
inline void sample_quads(const float* grads, const float* tile, const int32_t* columns, int64_t begin, int64_t end,
                           bool first, float* out) {
  constexpr int L = kLanes<float>, V = 8;
  constexpr int64_t T = kPanelRows<V>;
  for (int64_t p = begin; p < end; p += 2) {
    const float* x[2] = {tile + columns[p] * T, tile + columns[std::min(p + 1, end - 1)] * T};
    Vec<float> a[8];
    for (int i = 0; i < 8; ++i) a[i] = Vec<float>{};
    for (int v = 0; v < V; ++v) {
      const Vec<float> in[2] = {load_raw<Vec<float>>(x[0] + v * L), load_raw<Vec<float>>(x[1] + v * L)};
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const Vec<float> g = load_raw<Vec<float>>(grads + r * T + v * L);
        a[r] += g * in[0];
        a[4 + r] += g * in[1];
      }
    }
    float sums[8];
    add_lanes_of_8(a, sums);
    for (int64_t i = 0; i < 4 * std::min<int64_t>(2, end - p); ++i) out[4 * p + i] = first ? sums[i] : out[4 * p + i] + sums[i];
  }
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
