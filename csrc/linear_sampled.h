// The gradient of the kept weights: for each, the product of two columns over the batch. Included once a SIMD level,
// through linear.cpp.

// Eight vectors, each summed over its lanes: eight sums.
inline void add_lanes_of_8(const Vec<float> (&a)[8], float (&sums)[8]) {
#if defined(MASKWISE_F16C) && MASKWISE_VECTOR_BYTES == 32
  const __m256 ab = _mm256_hadd_ps((__m256)a[0], (__m256)a[1]), cd = _mm256_hadd_ps((__m256)a[2], (__m256)a[3]);
  const __m256 ef = _mm256_hadd_ps((__m256)a[4], (__m256)a[5]), gh = _mm256_hadd_ps((__m256)a[6], (__m256)a[7]);
  const __m256 low = _mm256_hadd_ps(ab, cd), high = _mm256_hadd_ps(ef, gh);
  const __m256 one = _mm256_permute2f128_ps(low, high, 0x20), two = _mm256_permute2f128_ps(low, high, 0x31);
  _mm256_storeu_ps(sums, _mm256_add_ps(one, two));
#else
  for (int i = 0; i < 8; ++i) sums[i] = add_lanes<float>(a[i]);
#endif
}

// out[p] (+)= sum over t of grad[t] * tile[columns[p]][t], for the kept weights [begin, end) of one output.
inline void sample_row(const float* grad, const float* tile, const int32_t* columns, int64_t begin, int64_t end,
                       bool first, float* out) {
  constexpr int L = kLanes<float>, V = 8;
  constexpr int64_t T = kStrip<V>;
  for (int64_t p = begin; p < end; p += 8) {
    const int64_t count = std::min<int64_t>(8, end - p);
    const float* x[8];
    // The last few are filled up with the first, which is harmless to read.
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

inline void sample_strip(int64_t* strip) { *strip = kStrip<8>; }

inline void sample_rows(const float* grads, const float* tile, const int32_t* columns, const int32_t* starts,
                        int64_t pieces, int64_t step, int64_t begin, int64_t end, bool first, float* out) {
  for (int64_t piece = 0; piece < pieces; piece += step) {
    const int64_t next = std::min(piece + step, pieces);
    for (int64_t n = begin; n < end; ++n) {
      const int32_t* row = starts + n * pieces;
      sample_row(grads + n * kStrip<8>, tile, columns, row[piece], row[next], first, out);
    }
  }
}

// Blocks of 4 outputs by 1 input: two blocks at a time share the four gradients.
inline void sample_columns(const float* grads, const float* tile, const int32_t* columns, int64_t begin, int64_t end,
                           bool first, float* out) {
  constexpr int L = kLanes<float>, V = 8;
  constexpr int64_t T = kStrip<V>;
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

// One block of 16 outputs by 16 inputs: outer products of rows, which lie in memory as they are needed. Both sides are
// padded to whole blocks.
inline void sample_block(const float* grad, int64_t grad_stride, const float* x, int64_t x_stride, int64_t batch,
                         float* out) {
  constexpr int L = kLanes<float>, V = 16 / L;
  for (int group = 0; group < 16; group += 4) {
    Vec<float> a[4][V];
    for (int r = 0; r < 4; ++r)
      for (int v = 0; v < V; ++v) a[r][v] = Vec<float>{};
    for (int64_t b = 0; b < batch; ++b) {
      Vec<float> in[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) in[v] = load_raw<Vec<float>>(x + b * x_stride + v * L);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const Vec<float> g = everywhere(grad[b * grad_stride + group + r]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) a[r][v] += g * in[v];
      }
    }
    for (int r = 0; r < 4; ++r)
      for (int v = 0; v < V; ++v) std::memcpy(out + (group + r) * 16 + v * L, &a[r][v], sizeof(Vec<float>));
  }
}
