// The inner loops of the sparse product. Every one works on strips of T = V * lanes batch rows that were packed by
// linear_tiles.h, so a weight is one broadcast and V multiply-adds. Included once a SIMD level, through linear.cpp.

#include "linear_tiles.h"

// One number in every lane, as a load: GCC makes an addition of simd.h's splat.
inline Vec<float> everywhere(float value) { return value - Vec<float>{}; }

template <int V>
constexpr int64_t kStrip = V * kLanes<float>;

// Unstructured: sums[t] (+)= sum over p in [begin, end) of values[p] * tile[columns[p]][t]. Narrow strips take several
// weights at a time with sums of their own, or they would wait for the latency of the multiply-add.
template <int V>
inline void walk_row(const float* tile, const float* values, const int32_t* columns, int64_t begin, int64_t end,
                     bool first, float* sums) {
  constexpr int64_t T = kStrip<V>;
  constexpr int L = kLanes<float>, U = V >= 8 ? 1 : 8 / V;
  Vec<float> a[U][V];
  for (int v = 0; v < V; ++v) a[0][v] = first ? Vec<float>{} : load_raw<Vec<float>>(sums + v * L);
  for (int u = 1; u < U; ++u)
    for (int v = 0; v < V; ++v) a[u][v] = Vec<float>{};
  int64_t p = begin;
  for (; p + U <= end; p += U) {
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      const Vec<float> w = everywhere(values[p + u]);
      const float* x = tile + columns[p + u] * T;
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) a[u][v] += w * load_raw<Vec<float>>(x + v * L);
    }
  }
  for (; p < end; ++p) {
    const Vec<float> w = everywhere(values[p]);
    const float* x = tile + columns[p] * T;
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) a[0][v] += w * load_raw<Vec<float>>(x + v * L);
  }
  for (int v = 0; v < V; ++v) {
    Vec<float> sum = a[0][v];
    for (int u = 1; u < U; ++u) sum += a[u][v];
    std::memcpy(sums + v * L, &sum, sizeof(sum));
  }
}

// Rows [begin, end) of the weight over one strip; starts has `pieces` entries a row, one for each range of columns that
// stays in the cache while all rows walk over it.
template <int V>
void walk_rows(const float* tile, const float* values, const int32_t* columns, const int32_t* starts, int64_t pieces,
               int64_t begin, int64_t end, float* sums) {
  for (int64_t piece = 0; piece < pieces; ++piece) {
    for (int64_t n = begin; n < end; ++n) {
      const int32_t* at = starts + n * pieces + piece;
      walk_row<V>(tile, values, columns, at[0], at[1], piece == 0, sums + (n - begin) * kStrip<V>);
    }
  }
}

// The narrowest walk that holds a whole batch, and four vectors for all that are larger: with more, the strip of a usual
// layer would leave the second cache; with fewer, broadcasting the weights would take as long as multiplying. Eight
// vectors are best where all inputs of such a strip fit into the first cache.
inline void row_walk(int64_t batch, int64_t inputs, WalkRows* run, int64_t* strip) {
  constexpr int64_t kFirstCache = 6144;
  if (batch <= kStrip<1>)
    *run = &walk_rows<1>, *strip = kStrip<1>;
  else if (batch <= kStrip<2>)
    *run = &walk_rows<2>, *strip = kStrip<2>;
  else if (batch <= kStrip<4> || inputs * kStrip<8> > kFirstCache)
    *run = &walk_rows<4>, *strip = kStrip<4>;
  else
    *run = &walk_rows<8>, *strip = kStrip<8>;
}

// One input: rows [begin, end) of the weight times x.
inline void walk_vector(const float* x, const float* values, const int32_t* columns, const int32_t* starts,
                        int64_t pieces, int64_t begin, int64_t end, float* sums) {
  for (int64_t n = begin; n < end; ++n) {
    int64_t p = starts[n * pieces];
    const int64_t stop = starts[(n + 1) * pieces];
    float sum = 0.0f;
#if defined(MASKWISE_F16C)
    __m256 a = _mm256_setzero_ps(), b = _mm256_setzero_ps();
    for (; p + 16 <= stop; p += 16) {
      const __m256i i = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(columns + p));
      const __m256i j = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(columns + p + 8));
      a = _mm256_fmadd_ps(_mm256_loadu_ps(values + p), _mm256_i32gather_ps(x, i, 4), a);
      b = _mm256_fmadd_ps(_mm256_loadu_ps(values + p + 8), _mm256_i32gather_ps(x, j, 4), b);
    }
    sum = add_halves<float, 8>((typename VectorOf<float, 8>::type)_mm256_add_ps(a, b));
#endif
    float more = 0.0f;
    for (; p + 2 <= stop; p += 2) {
      sum += values[p] * x[columns[p]];
      more += values[p + 1] * x[columns[p + 1]];
    }
    if (p < stop) sum += values[p] * x[columns[p]];
    sums[n - begin] = sum + more;
  }
}

// Blocks of R outputs (a multiple of 4) by C inputs, in rows of blocks: four outputs at a time share every load of x.
template <int V, int R, int C>
void walk_blocks(const float* tile, const float* values, const int32_t* columns, int64_t begin, int64_t end, float* sums) {
  constexpr int64_t T = kStrip<V>;
  constexpr int L = kLanes<float>;
  for (int group = 0; group < R; group += 4) {
    Vec<float> a[4][V];
    for (int r = 0; r < 4; ++r)
      for (int v = 0; v < V; ++v) a[r][v] = Vec<float>{};
    for (int64_t p = begin; p < end; ++p) {
      const float* w = values + (p * R + group) * C;
      const float* x = tile + columns[p] * (C * T);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        Vec<float> in[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) in[v] = load_raw<Vec<float>>(x + c * T + v * L);
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
          const Vec<float> weight = everywhere(w[r * C + c]);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) a[r][v] += weight * in[v];
        }
      }
    }
    for (int r = 0; r < 4; ++r)
      for (int v = 0; v < V; ++v) std::memcpy(sums + (group + r) * T + v * L, &a[r][v], sizeof(Vec<float>));
  }
}

template <int R, int C>
void block_walk(int64_t batch, WalkBlocks* run, int64_t* strip) {
  // Three vectors keep the multiply-adds busiest, unless the last strip would be mostly empty.
  const int64_t three = ceil_div(batch, kStrip<3>) * kStrip<3>, two = ceil_div(batch, kStrip<2>) * kStrip<2>;
  if (batch <= kStrip<1>)
    *run = &walk_blocks<1, R, C>, *strip = kStrip<1>;
  else if (three * 100 > two * 106)
    *run = &walk_blocks<2, R, C>, *strip = kStrip<2>;
  else
    *run = &walk_blocks<3, R, C>, *strip = kStrip<3>;
}
inline void block_walk_of(int64_t rows, int64_t batch, WalkBlocks* run, int64_t* strip) {
  rows == 4 ? block_walk<4, 1>(batch, run, strip) : block_walk<16, 16>(batch, run, strip);
}
