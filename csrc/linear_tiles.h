// Strips of the batch, turned on their side: the kernels of the sparse product want T batch rows as T neighbouring
// floats, so that one weight meets T inputs. Included once a SIMD level, inside its namespace, through linear.cpp.

#if defined(MASKWISE_F16C)
// Eight rows of eight floats, transposed in registers. AVX-512 machines take this form too: moving is not their limit.
inline void transpose_8x8(__m256 (&r)[8]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
    b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
    b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
    b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}

template <class S>
inline __m256 load_8(const S* p) {
  if constexpr (std::is_same_v<S, float>) {
    return _mm256_loadu_ps(p);
  } else {
    const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
  }
}

template <class S>
inline void store_8(S* p, __m256 v) {
  if constexpr (std::is_same_v<S, float>) {
    _mm256_storeu_ps(p, v);
  } else {
    alignas(32) float wide[8];
    _mm256_store_ps(wide, v);
    for (int i = 0; i < 8; ++i) p[i] = static_cast<S>(wide[i]);
  }
}
#endif

// Columns [from, to) of `rows` <= T batch rows into tile[k * T + t]; what lies beyond the rows is zero.
template <class S>
void pack_tile(const S* x, int64_t stride, int64_t rows, int64_t from, int64_t to, int64_t T, float* tile) {
  int64_t k = from;
#if defined(MASKWISE_F16C)
  for (; k + 8 <= to; k += 8) {
    for (int64_t t = 0; t < T; t += 8) {
      __m256 r[8];
      // Apart, so that whole groups stay in registers: an index that is not constant would send them to memory.
      if (t + 8 <= rows) {
        for (int i = 0; i < 8; ++i) r[i] = load_8(x + (t + i) * stride + k);
      } else {
        for (int i = 0; i < 8; ++i) r[i] = t + i < rows ? load_8(x + (t + i) * stride + k) : _mm256_setzero_ps();
      }
      transpose_8x8(r);
      for (int i = 0; i < 8; ++i) _mm256_storeu_ps(tile + (k + i) * T + t, r[i]);
    }
  }
#endif
  for (; k < to; ++k)
    for (int64_t t = 0; t < T; ++t) tile[k * T + t] = t < rows ? static_cast<float>(x[t * stride + k]) : 0.0f;
}

// The way back: `count` outputs of a strip, sums[i * T + t], into y[t * stride + i], with the bias of each output added.
template <class S>
void unpack_tile(const float* sums, int64_t T, int64_t rows, int64_t count, const float* bias, S* y, int64_t stride) {
  int64_t done = 0;
#if defined(MASKWISE_F16C)
  done = count / 8 * 8;
  for (int64_t t = 0; t < rows; t += 8) {
    const int64_t valid = std::min<int64_t>(8, rows - t);
    for (int64_t i = 0; i < done; i += 8) {
      __m256 r[8];
      for (int j = 0; j < 8; ++j) r[j] = _mm256_loadu_ps(sums + (i + j) * T + t);
      transpose_8x8(r);
      const __m256 b = bias == nullptr ? _mm256_setzero_ps() : _mm256_loadu_ps(bias + i);
      if (valid == 8) {
        for (int j = 0; j < 8; ++j) store_8(y + (t + j) * stride + i, _mm256_add_ps(r[j], b));
      } else {
        for (int64_t j = 0; j < valid; ++j) store_8(y + (t + j) * stride + i, _mm256_add_ps(r[j], b));
      }
    }
  }
#endif
  for (int64_t i = done; i < count; ++i) {
    const float b = bias == nullptr ? 0.0f : bias[i];
    for (int64_t t = 0; t < rows; ++t) y[t * stride + i] = static_cast<S>(sums[i * T + t] + b);
  }
}
