// The product with blocks of 16 x 16: dense enough that inputs and results are not turned on their side. A few batch
// rows times the sixteen outputs of a block are the sums, in registers; a weight is loaded once for those rows, an input
// once for the sixteen outputs. Included once a SIMD level, through linear.cpp.

// Columns [from, to) of `rows` <= T batch rows into tile[block][t][16]: rows of x lie a power of two apart more often
// than not, and would compete for the same few places of the first cache. Columns are padded to whole blocks by zeros.
template <class S>
void pack_squares(const S* x, int64_t inputs, int64_t rows, int64_t from, int64_t to, int64_t T, float* tile) {
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

// The blocks [begin, end) turned on their side, out[c * 16 + r] = values[r * 16 + c], so that the weights of sixteen
// outputs are neighbours.
inline void turn_squares(const float* values, int64_t begin, int64_t end, float* out) {
  for (int64_t p = begin; p < end; ++p) {
    const float* from = values + p * 256;
    float* to = out + p * 256;
#if defined(MASKWISE_F16C)
    for (int r = 0; r < 16; r += 8) {
      for (int c = 0; c < 16; c += 8) {
        __m256 rows[8];
        for (int i = 0; i < 8; ++i) rows[i] = _mm256_loadu_ps(from + (r + i) * 16 + c);
        transpose_8x8(rows);
        for (int i = 0; i < 8; ++i) _mm256_storeu_ps(to + (c + i) * 16 + r, rows[i]);
      }
    }
#else
    for (int r = 0; r < 16; ++r)
      for (int c = 0; c < 16; ++c) to[c * 16 + r] = from[r * 16 + c];
#endif
  }
}

// How many batch rows fill the registers with sums.
constexpr int kSquareRows = kLanes<float> == 16 ? 12 : kLanes<float> == 8 ? 6 : 3;

// M batch rows of a tile times the blocks [begin, end) of one row of blocks, whose `count` <= 16 outputs go to y.
template <class S, int M>
inline void square_rows(const float* tile, int64_t T, const float* on_side, const int32_t* columns, int64_t begin,
                        int64_t end, const float* bias, S* y, int64_t outputs, int64_t count) {
  constexpr int L = kLanes<float>, V = 16 / L;
  Vec<float> a[M][V];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) a[m][v] = load_raw<Vec<float>>(bias + v * L);
  for (int64_t p = begin; p < end; ++p) {
    const float* w = on_side + p * 256;
    const float* x = tile + columns[p] * 16 * T;
#pragma GCC unroll 4
    for (int c = 0; c < 16; ++c) {
      Vec<float> weight[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) weight[v] = load_raw<Vec<float>>(w + c * 16 + v * L);
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        const Vec<float> one = everywhere(x[m * 16 + c]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) a[m][v] += one * weight[v];
      }
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    float sums[16];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) std::memcpy(sums + v * L, &a[m][v], sizeof(Vec<float>));
    if constexpr (std::is_same_v<S, float>) {
      if (count == 16) {
        std::memcpy(y + m * outputs, sums, sizeof(sums));
        continue;
      }
    }
    for (int64_t i = 0; i < count; ++i) y[m * outputs + i] = static_cast<S>(sums[i]);
  }
}

// `rows` <= T batch rows times one row of blocks.
template <class S>
void walk_squares(const float* tile, int64_t T, int64_t rows, const float* on_side, const int32_t* columns, int64_t begin,
                  int64_t end, const float* bias, S* y, int64_t outputs, int64_t count) {
  int64_t t = 0;
  const auto run = [&](auto m) {
    constexpr int M = decltype(m)::value;
    for (; t + M <= rows; t += M)
      square_rows<S, M>(tile + t * 16, T, on_side, columns, begin, end, bias, y + t * outputs, outputs, count);
  };
  run(std::integral_constant<int, kSquareRows>{});
  run(std::integral_constant<int, kSquareRows / 3>{});
  run(std::integral_constant<int, 1>{});
}
