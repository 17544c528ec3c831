// The inner loops of the sparse product, unstructured and in blocks of 4 outputs by 1 input. They work on strips of
// T = V * lanes batch rows that were packed by linear_tiles.h, so a weight is one broadcast and V multiply-adds.
// Included once a SIMD level, through linear.cpp.

#include "linear_tiles.h"

// One number in every lane, as a load: GCC makes an addition of simd.h's splat.
inline Vec<float> everywhere(float value) { return value - Vec<float>{}; }

template <int V>
constexpr int64_t kStrip = V * kLanes<float>;

// Four weights. A load each would take a third of the loads of a narrow strip; this is one load and a shuffle each.
struct FourWeights {
#if MASKWISE_VECTOR_BYTES == 64
  __m512 in_quarters;
  explicit FourWeights(__m128 four) : in_quarters(_mm512_broadcast_f32x4(four)) {}
  explicit FourWeights(const float* p) : FourWeights(_mm_loadu_ps(p)) {}
  template <int I>
  Vec<float> everywhere_of() const {
    return (Vec<float>)_mm512_permute_ps(in_quarters, I * 0x55);
  }
#elif MASKWISE_VECTOR_BYTES == 32 && defined(MASKWISE_F16C)
  __m256 in_halves;
  explicit FourWeights(__m128 four) : in_halves(_mm256_set_m128(four, four)) {}
  explicit FourWeights(const float* p) : in_halves(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(p))) {}
  template <int I>
  Vec<float> everywhere_of() const {
    return (Vec<float>)_mm256_permute_ps(in_halves, I * 0x55);
  }
#else
  float four[4];
  explicit FourWeights(const float* p) { std::memcpy(four, p, sizeof(four)); }
  template <int I>
  Vec<float> everywhere_of() const {
    return everywhere(four[I]);
  }
#endif
};

// The last `rest` <= 4 weights of a row, filled up with zeros that meet the zeros behind a tile: four multiplications,
// whatever the rest, are cheaper than a loop that nobody can predict.
struct Rest {
  int32_t columns[4];
  FourWeights weights;
#if defined(MASKWISE_F16C)
  Rest(const float* values, const int32_t* at, int64_t rest, int32_t zeros)
      : weights(_mm_maskload_ps(values, first(rest))) {
    const __m128i kept = first(rest);
    const __m128i picked = _mm_blendv_epi8(_mm_set1_epi32(zeros), _mm_maskload_epi32(at, kept), kept);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(columns), picked);
  }
  static __m128i first(int64_t rest) {
    alignas(32) static constexpr int32_t kWindow[8] = {-1, -1, -1, -1, 0, 0, 0, 0};
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(kWindow + 4 - rest));
  }
#else
  Rest(const float* values, const int32_t* at, int64_t rest, int32_t zeros) : weights(filled(values, rest).four) {
    for (int64_t i = 0; i < 4; ++i) columns[i] = i < rest ? at[i] : zeros;
  }
  struct Filled {
    float four[4];
  };
  static Filled filled(const float* values, int64_t rest) {
    Filled out = {};
    for (int64_t i = 0; i < rest; ++i) out.four[i] = values[i];
    return out;
  }
#endif
};

template <int V, int A, int I>
inline void add_one(const FourWeights& weights, const float* tile, const int32_t* columns, Vec<float> (&a)[A][V]) {
  const Vec<float> w = weights.everywhere_of<I>();
  const float* x = tile + columns[I] * kStrip<V>;
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) a[I % A][v] += w * load_raw<Vec<float>>(x + v * kLanes<float>);
}

template <int V, int A>
inline void add_four(const FourWeights& weights, const float* tile, const int32_t* columns, Vec<float> (&a)[A][V]) {
  add_one<V, A, 0>(weights, tile, columns, a);
  add_one<V, A, 1>(weights, tile, columns, a);
  add_one<V, A, 2>(weights, tile, columns, a);
  add_one<V, A, 3>(weights, tile, columns, a);
}

// Unstructured: sums[t] (+)= sum over p in [begin, end) of values[p] * tile[columns[p]][t]. Neighbouring weights have
// sums of their own, or a narrow strip would wait for the latency of the multiply-add. Column `zeros` of the tile is 0.
template <int V>
inline void walk_row(const float* tile, const float* values, const int32_t* columns, int64_t begin, int64_t end,
                     int32_t zeros, bool first, float* sums) {
  constexpr int L = kLanes<float>, A = V >= 8 ? 1 : V >= 4 ? 2 : 4;
  Vec<float> a[A][V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) a[0][v] = first ? Vec<float>{} : load_raw<Vec<float>>(sums + v * L);
#pragma GCC unroll 8
  for (int u = 1; u < A; ++u)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) a[u][v] = Vec<float>{};
  int64_t p = begin;
  for (; p + 4 < end; p += 4) add_four(FourWeights(values + p), tile, columns + p, a);
  const Rest rest(values + p, columns + p, end - p, zeros);
  add_four(rest.weights, tile, rest.columns, a);
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    Vec<float> sum = a[0][v];
#pragma GCC unroll 8
    for (int u = 1; u < A; ++u) sum += a[u][v];
    std::memcpy(sums + v * L, &sum, sizeof(sum));
  }
}

// Rows [begin, end) of the weight over one strip; starts has `pieces` entries a row, one for each range of columns, and
// all rows walk over `step` ranges, which stay in a cache, before any goes on to the next.
template <int V>
void walk_rows(const float* tile, const float* values, const int32_t* columns, const int32_t* starts, int64_t pieces,
               int64_t step, int64_t begin, int64_t end, int32_t zeros, float* sums) {
  // Rows in several ranges are read in leaps, which no hardware foresees: while one chunk of rows is walked, the next is
  // asked for, a little at a time.
  int64_t ahead = starts[end * pieces];
  const int64_t turns = ceil_div(pieces, step) * (end - begin), share = (ahead - starts[begin * pieces]) / turns + 1;
  for (int64_t piece = 0; piece < pieces; piece += step) {
    const int64_t next = std::min(piece + step, pieces);
    for (int64_t n = begin; n < end; ++n) {
      const int32_t* row = starts + n * pieces;
      if (step < pieces) {
        for (const int64_t until = ahead + share; ahead < until; ahead += 16) {
          __builtin_prefetch(values + ahead, 0, 2);
          __builtin_prefetch(columns + ahead, 0, 2);
        }
      }
      walk_row<V>(tile, values, columns, row[piece], row[next], zeros, piece == 0, sums + (n - begin) * kStrip<V>);
    }
  }
}

// How a batch is walked: the narrowest strip that holds all of it. Larger batches take four vectors over ranges that
// stay in the second cache, or two where those would not hold all columns: the bytes between the first two caches are
// what this product waits for, and starting a row again is dear. Rows with many weights in every range can afford it:
// they take eight vectors, and ranges that stay in the first cache.
inline RowWalk row_walk(int64_t batch, int64_t inputs, int64_t outputs, int64_t pieces, int64_t weights) {
  constexpr int64_t kMany = 20;
  if (batch <= kStrip<1>) return {&walk_rows<1>, kStrip<1>, pieces, kSums};
  if (batch <= kStrip<2>) return {&walk_rows<2>, kStrip<2>, pieces, kSums};
  if (batch > kStrip<4> && weights > kMany * outputs * pieces) return {&walk_rows<8>, kStrip<8>, 1, kSums / 2};
  const int64_t width = ceil_div(inputs, pieces);
  if (inputs * kStrip<4> <= kSecondCache) return {&walk_rows<4>, kStrip<4>, pieces, kSums};
  return {&walk_rows<2>, kStrip<2>, std::max<int64_t>(1, kSecondCache / (width * kStrip<2>)), kSums};
}

// Rows [begin, end) of blocks of 4 outputs by 1 input: four outputs share every load of x.
template <int V>
void walk_fours(const float* tile, const float* values, const int32_t* columns, const int32_t* starts, int64_t begin,
                int64_t end, float* sums) {
  constexpr int64_t T = kStrip<V>;
  constexpr int L = kLanes<float>;
  for (int64_t n = begin; n < end; ++n) {
    Vec<float> a[4][V];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) a[r][v] = Vec<float>{};
    for (int64_t p = starts[n], stop = starts[n + 1]; p < stop; ++p) {
      const float* x = tile + columns[p] * T;
      Vec<float> in[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) in[v] = load_raw<Vec<float>>(x + v * L);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const Vec<float> weight = everywhere(values[p * 4 + r]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) a[r][v] += weight * in[v];
      }
    }
    float* out = sums + (n - begin) * 4 * T;
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) std::memcpy(out + r * T + v * L, &a[r][v], sizeof(Vec<float>));
  }
}

// Three vectors keep the multiply-adds busiest, unless the last strip would be mostly empty, or the strips too long for
// the second cache.
inline void four_walk(int64_t batch, int64_t width, WalkFours* run, int64_t* strip) {
  const int64_t three = ceil_div(batch, kStrip<3>) * kStrip<3>, two = ceil_div(batch, kStrip<2>) * kStrip<2>;
  if (batch <= kStrip<1>)
    *run = &walk_fours<1>, *strip = kStrip<1>;
  else if (three * 100 > two * 106 || width * kStrip<3> > kSecondCache)
    *run = &walk_fours<2>, *strip = kStrip<2>;
  else
    *run = &walk_fours<3>, *strip = kStrip<3>;
}
