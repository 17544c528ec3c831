// The product with blocks of 16 x 16, and its gradient: dense enough that inputs and results are not transposed. A few
// batch rows times the sixteen outputs of a block are the sums, in registers; a weight is loaded once for those rows, an
// input once for the sixteen outputs. Compiled once a target, through linear.cpp.
#include "simd.h"
#if defined(MASKWISE_LINEAR_BLOCKS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_LINEAR_BLOCKS_H
#else
#define MASKWISE_LINEAR_BLOCKS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// Columns [from, to) of `rows` <= T batch rows into tile[block][t][16]: rows of x lie a power of two apart more often
// than not, and would compete for the same few places of the first cache. Columns are padded to whole blocks by zeros.
template <class S>
void pack_blocks(const S* x, int64_t inputs, int64_t rows, int64_t from, int64_t to, int64_t T, float* tile) {
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t k = from; k < to; k += 16) {
      float* block = tile + k * T + t * 16;
      const S* row = x + t * inputs + k;
      if (k + 16 <= inputs) {
        for (int i = 0; i < 16; ++i) block[i] = static_cast<float>(row[i]);
      } else {
        for (int64_t i = 0; i < 16; ++i) block[i] = k + i < inputs ? static_cast<float>(row[i]) : 0.0f;
      }
    }
  }
}

// The blocks [begin, end) transposed, out[c * 16 + r] = values[r * 16 + c], so that the weights of sixteen
// outputs are neighbours.
inline void transpose_blocks(const float* values, int64_t begin, int64_t end, float* out) {
  for (int64_t p = begin; p < end; ++p) {
    const float* from = values + p * 256;
    float* to = out + p * 256;
#if defined(MASKWISE_F16C)
    for (int r = 0; r < 16; r += 8) {
      for (int c = 0; c < 16; c += 8) {
        Vec<float, 8> rows[8];
        for (int i = 0; i < 8; ++i) rows[i] = load_raw<Vec<float, 8>>(from + (r + i) * 16 + c);
        transpose<float, 8>(rows);
        for (int i = 0; i < 8; ++i) store(to + (c + i) * 16 + r, rows[i]);
      }
    }
#else
    for (int r = 0; r < 16; ++r)
      for (int c = 0; c < 16; ++c) to[c * 16 + r] = from[r * 16 + c];
#endif
  }
}

// How many batch rows fill the registers with sums.
constexpr int kBlockRows = kLanes<float> == 16 ? 12 : kLanes<float> == 8 ? 6 : 3;

// M batch rows of a tile times the blocks [begin, end) of one row of blocks, whose `count` <= 16 outputs go to y.
template <class S, int M>
inline void block_rows_product(const float* tile, int64_t T, const float* transposed, const int32_t* columns, int64_t begin,
                        int64_t end, const float* bias, S* y, int64_t outputs, int64_t count) {
  constexpr int L = kLanes<float>, V = 16 / L;
  Vec<float> a[M][V];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) a[m][v] = load_raw<Vec<float>>(bias + v * L);
  for (int64_t p = begin; p < end; ++p) {
    const float* w = transposed + p * 256;
    const float* x = tile + columns[p] * 16 * T;
#pragma GCC unroll 4
    for (int c = 0; c < 16; ++c) {
      Vec<float> weight[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) weight[v] = load_raw<Vec<float>>(w + c * 16 + v * L);
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        const Vec<float> one = splat<float>(x[m * 16 + c]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) a[m][v] += one * weight[v];
      }
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    S* to = y + m * outputs;
    if (count == 16) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) store(to + v * L, a[m][v]);
      continue;
    }
    S sums[16];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(sums + v * L, a[m][v]);
    std::copy(sums, sums + count, to);
  }
}

// `rows` <= T batch rows times one row of blocks.
template <class S>
void multiply_blocks(const float* tile, int64_t T, int64_t rows, const float* transposed, const int32_t* columns, int64_t begin,
                  int64_t end, const float* bias, S* y, int64_t outputs, int64_t count) {
  int64_t t = 0;
  const auto run = [&](auto m) {
    constexpr int M = decltype(m)::value;
    for (; t + M <= rows; t += M)
      block_rows_product<S, M>(tile + t * 16, T, transposed, columns, begin, end, bias, y + t * outputs, outputs, count);
  };
  run(std::integral_constant<int, kBlockRows>{});
  run(std::integral_constant<int, kBlockRows / 3>{});
  run(std::integral_constant<int, 1>{});
}

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

// Rows [begin, end) of blocks of 16 x 16; x is padded to whole blocks.
inline void vector_blocks(const float* x, const float* values, const int32_t* columns, const int32_t* starts,
                           int64_t begin, int64_t end, float* sums) {
  constexpr int L = kLanes<float>, V = 16 / L;
  for (int64_t n = begin; n < end; ++n) {
    // Half of the rows at a time: their sums, one vector each, stay in registers.
    for (int half = 0; half < 16; half += 8) {
      Vec<float> a[8] = {};
      for (int64_t p = starts[n], stop = starts[n + 1]; p < stop; ++p) {
        const float* w = values + p * 256 + half * 16;
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          const Vec<float> in = load_raw<Vec<float>>(x + columns[p] * 16 + v * L);
#pragma GCC unroll 8
          for (int r = 0; r < 8; ++r) a[r] += load_raw<Vec<float>>(w + r * 16 + v * L) * in;
        }
      }
      float eight[8];
      add_lanes_of_8(a, eight);
      std::memcpy(sums + (n - begin) * 16 + half, eight, sizeof(eight));
    }
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
        const Vec<float> g = splat<float>(grad[b * grad_stride + group + r]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) a[r][v] += g * in[v];
      }
    }
    for (int r = 0; r < 4; ++r)
      for (int v = 0; v < V; ++v) store(out + (group + r) * 16 + v * L, a[r][v]);
  }
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
