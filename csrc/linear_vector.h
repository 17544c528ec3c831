// The sparse product with one row of inputs: nothing is packed, the weights are read once, in order. Included once a
// SIMD level, through linear.cpp.

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
    sum = add_halves<float, 4>((typename VectorOf<float, 4>::type)_mm_add_ps(a, b));
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
inline void vector_fours(const float* x, const float* values, const int32_t* columns, const int32_t* starts,
                         int64_t begin, int64_t end, float* sums) {
  using Four = typename VectorOf<float, 4>::type;
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
    std::memcpy(sums + (n - begin) * 4, &sum, sizeof(sum));
  }
}

// Rows [begin, end) of blocks of 16 x 16; x is padded to whole blocks.
inline void vector_squares(const float* x, const float* values, const int32_t* columns, const int32_t* starts,
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
