// The inner loops of the product with a sparse weight, unstructured and in blocks of 4 outputs by 1 input ("quads"). They
// work on panels of T = V * lanes batch rows, packed so that T rows are T neighbouring floats: a weight is one broadcast
// and V multiply-adds. Compiled once a target, through linear.cpp.
#include "linear.h"
#include "simd.h"
#if defined(MASKWISE_LINEAR_KERNELS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_LINEAR_KERNELS_H
#else
#define MASKWISE_LINEAR_KERNELS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// -- packing: a panel of the batch is transposed -----------------------------------------------------------------------

using Eight = Vec<float, 8>;

// Columns [from, to) of `rows` <= T batch rows into tile[k * T + t]; what lies beyond the rows is zero.
template <class S>
void pack_tile(const S* x, int64_t stride, int64_t rows, int64_t from, int64_t to, int64_t T, float* tile) {
  int64_t k = from;
#if defined(MASKWISE_F16C)
  for (; k + 8 <= to; k += 8) {
    for (int64_t t = 0; t < T; t += 8) {
      Eight r[8];
      // Apart, so that whole groups stay in registers: an index that is not constant would send them to memory.
      if (t + 8 <= rows) {
        for (int i = 0; i < 8; ++i) r[i] = load<float, 8>(x + (t + i) * stride + k);
      } else {
        for (int i = 0; i < 8; ++i) r[i] = t + i < rows ? load<float, 8>(x + (t + i) * stride + k) : Eight{};
      }
      transpose<float, 8>(r);
      for (int i = 0; i < 8; ++i) store(tile + (k + i) * T + t, r[i]);
    }
  }
#endif
  for (; k < to; ++k)
    for (int64_t t = 0; t < T; ++t) tile[k * T + t] = t < rows ? static_cast<float>(x[t * stride + k]) : 0.0f;
}

// The way back: `count` outputs of a panel, sums[i * T + t], into y[t * stride + i], with the bias of each output added.
template <class S>
void unpack_tile(const float* sums, int64_t T, int64_t rows, int64_t count, const float* bias, S* y, int64_t stride) {
  int64_t done = 0;
#if defined(MASKWISE_F16C)
  done = count / 8 * 8;
  for (int64_t t = 0; t < rows; t += 8) {
    const int64_t valid = std::min<int64_t>(8, rows - t);
    for (int64_t i = 0; i < done; i += 8) {
      Eight r[8];
      for (int j = 0; j < 8; ++j) r[j] = load_raw<Eight>(sums + (i + j) * T + t);
      transpose<float, 8>(r);
      const Eight b = bias == nullptr ? Eight{} : load_raw<Eight>(bias + i);
      if (valid == 8) {
        for (int j = 0; j < 8; ++j) store(y + (t + j) * stride + i, r[j] + b);
      } else {
        for (int64_t j = 0; j < valid; ++j) store(y + (t + j) * stride + i, r[j] + b);
      }
    }
  }
#endif
  for (int64_t i = done; i < count; ++i) {
    const float b = bias == nullptr ? 0.0f : bias[i];
    for (int64_t t = 0; t < rows; ++t) y[t * stride + i] = static_cast<S>(sums[i * T + t] + b);
  }
}

// -- many batch rows ---------------------------------------------------------------------------------------------------

template <int V>
constexpr int64_t kPanelRows = V * kLanes<float>;

// Four weights. A load each would take a third of the loads of a narrow panel; this is one load and a shuffle each.
struct FourWeights {
#if MASKWISE_VECTOR_BYTES == 64
  __m512 in_quarters;
  explicit FourWeights(__m128 four) : in_quarters(_mm512_broadcast_f32x4(four)) {}
  explicit FourWeights(const float* p) : FourWeights(_mm_loadu_ps(p)) {}
  template <int I>
  Vec<float> lane() const {
    return (Vec<float>)_mm512_permute_ps(in_quarters, I * 0x55);
  }
#elif MASKWISE_VECTOR_BYTES == 32 && defined(MASKWISE_F16C)
  __m256 in_halves;
  explicit FourWeights(__m128 four) : in_halves(_mm256_set_m128(four, four)) {}
  explicit FourWeights(const float* p) : in_halves(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(p))) {}
  template <int I>
  Vec<float> lane() const {
    return (Vec<float>)_mm256_permute_ps(in_halves, I * 0x55);
  }
#else
  float four[4];
  explicit FourWeights(const float* p) { std::memcpy(four, p, sizeof(four)); }
  template <int I>
  Vec<float> lane() const {
    return splat<float>(four[I]);
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
  const Vec<float> w = weights.lane<I>();
  const float* x = tile + columns[I] * kPanelRows<V>;
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
// sums of their own, or a narrow panel would wait for the latency of the multiply-add. Column `zeros` of the tile is 0.
template <int V>
inline void multiply_row(const float* tile, const float* values, const int32_t* columns, int64_t begin, int64_t end,
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
    store(sums + v * L, sum);
  }
}

// Rows [begin, end) of the weight over one panel; starts has `pieces` entries a row, one for each range of columns, and
// all rows walk over `step` ranges, which stay in a cache, before any goes on to the next.
template <int V>
void multiply_rows(const float* tile, const float* values, const int32_t* columns, const int32_t* starts, int64_t pieces,
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
      multiply_row<V>(tile, values, columns, row[piece], row[next], zeros, piece == 0, sums + (n - begin) * kPanelRows<V>);
    }
  }
}

// How a batch is walked: the narrowest panel that holds all of it. Larger batches take four vectors over ranges that
// stay in the second cache, or two where those would not hold all columns: the bytes between the first two caches are
// what this product waits for, and starting a row again is dear. Rows with many weights in every range can afford it:
// they take eight vectors, and ranges that stay in the first cache.
inline RowPlan plan_rows(int64_t batch, int64_t inputs, int64_t outputs, int64_t pieces, int64_t weights) {
  constexpr int64_t kMany = 20;
  if (batch <= kPanelRows<1>) return {&multiply_rows<1>, kPanelRows<1>, pieces, kSums};
  if (batch <= kPanelRows<2>) return {&multiply_rows<2>, kPanelRows<2>, pieces, kSums};
  if (batch > kPanelRows<4> && weights > kMany * outputs * pieces) return {&multiply_rows<8>, kPanelRows<8>, 1, kSums / 2};
  const int64_t width = ceil_div(inputs, pieces);
  if (inputs * kPanelRows<4> <= kSecondCache) return {&multiply_rows<4>, kPanelRows<4>, pieces, kSums};
  return {&multiply_rows<2>, kPanelRows<2>, std::max<int64_t>(1, kSecondCache / (width * kPanelRows<2>)), kSums};
}

// Rows [begin, end) of blocks of 4 outputs by 1 input: four outputs share every load of x.
template <int V>
void multiply_quads(const float* tile, const float* values, const int32_t* columns, const int32_t* starts, int64_t begin,
                int64_t end, float* sums) {
  constexpr int64_t T = kPanelRows<V>;
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
        const Vec<float> weight = splat<float>(values[p * 4 + r]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) a[r][v] += weight * in[v];
      }
    }
    float* out = sums + (n - begin) * 4 * T;
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) store(out + r * T + v * L, a[r][v]);
  }
}

// Three vectors keep the multiply-adds busiest, unless the last panel would be mostly empty, or the panels too long for
// the second cache.
inline void plan_quads(int64_t batch, int64_t width, MultiplyQuads* run, int64_t* panel) {
  const int64_t three = ceil_div(batch, kPanelRows<3>) * kPanelRows<3>, two = ceil_div(batch, kPanelRows<2>) * kPanelRows<2>;
  if (batch <= kPanelRows<1>)
    *run = &multiply_quads<1>, *panel = kPanelRows<1>;
  else if (three * 100 > two * 106 || width * kPanelRows<3> > kSecondCache)
    *run = &multiply_quads<2>, *panel = kPanelRows<2>;
  else
    *run = &multiply_quads<3>, *panel = kPanelRows<3>;
}

// -- one batch row: nothing is packed, the weights are read once, in order ---------------------------------------------

#if defined(MASKWISE_F16C)
// Four inputs, picked one by one: on many CPUs a gather is slower than this, and on no one much faster.
inline __m128 pick_4(const float* x, const int32_t* columns) {
  __m128 picked = _mm_load_ss(x + columns[0]);
  picked = _mm_insert_ps(picked, _mm_load_ss(x + columns[1]), 0x10);
  picked = _mm_insert_ps(picked, _mm_load_ss(x + columns[2]), 0x20);
  return _mm_insert_ps(picked, _mm_load_ss(x + columns[3]), 0x30);
}
#endif

// Unstructured: outputs [begin, end).
inline void vector_rows(const float* x, const float* values, const int32_t* columns, const int32_t* starts,
                        int64_t pieces, int64_t begin, int64_t end, float* sums) {
  for (int64_t n = begin; n < end; ++n) {
    int64_t p = starts[n * pieces];
    const int64_t stop = starts[(n + 1) * pieces];
    float sum = 0.0f, more = 0.0f;
#if defined(MASKWISE_F16C)
    __m128 a = _mm_setzero_ps(), b = _mm_setzero_ps();
    for (; p + 8 <= stop; p += 8) {
      a = _mm_fmadd_ps(pick_4(x, columns + p), _mm_loadu_ps(values + p), a);
      b = _mm_fmadd_ps(pick_4(x, columns + p + 4), _mm_loadu_ps(values + p + 4), b);
    }
    sum = add_lanes<float, 4>((Vec<float, 4>)_mm_add_ps(a, b));
#endif
    for (; p + 2 <= stop; p += 2) {
      sum += values[p] * x[columns[p]];
      more += values[p + 1] * x[columns[p + 1]];
    }
    if (p < stop) sum += values[p] * x[columns[p]];
    sums[n - begin] = sum + more;
  }
}

// Rows [begin, end) of blocks of 4 outputs by 1 input: the four weights of a block are one vector.
inline void vector_quads(const float* x, const float* values, const int32_t* columns, const int32_t* starts,
                         int64_t begin, int64_t end, float* sums) {
  using Four = Vec<float, 4>;
  for (int64_t n = begin; n < end; ++n) {
    Four a[4] = {};
    int64_t p = starts[n];
    const int64_t stop = starts[n + 1];
    for (; p + 4 <= stop; p += 4) {
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) a[u] += x[columns[p + u]] * load_raw<Four>(values + (p + u) * 4);
    }
    for (; p < stop; ++p) a[0] += x[columns[p]] * load_raw<Four>(values + p * 4);
    const Four sum = (a[0] + a[1]) + (a[2] + a[3]);
    store(sums + (n - begin) * 4, sum);
  }
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
