// What kernels that write as many elements as they read need beyond simd.h. Included once a SIMD level, after simd.h.

// Whether none of N mask bytes is set.
template <int N>
inline bool none_of(const uint8_t* m) {
  static_assert(N % 8 == 0);
  uint64_t words[N / 8], any = 0;
  std::memcpy(words, m, N);
  for (const uint64_t word : words) any |= word;
  return any == 0;
}

// v where kept, otherwise `other`.
template <class A>
inline Vec<A> drop(Vec<A> v, LaneMask<A> kept, A other) {
  if (other == A(0)) return keep<A>(v, kept);
  return kept ? v : splat<A>(other);
}

template <class A>
inline Vec<A> larger(Vec<A> a, Vec<A> b) {
#if defined(MASKWISE_F16C) && MASKWISE_VECTOR_BYTES == 32
  if constexpr (sizeof(A) == 4) return (Vec<A>)_mm256_max_ps((__m256)a, (__m256)b);
  if constexpr (sizeof(A) == 8) return (Vec<A>)_mm256_max_pd((__m256d)a, (__m256d)b);
#endif
  return a > b ? a : b;
}

// A narrow float rounded to nearest, ties to even, and a NaN kept as one.
inline auto narrow_bfloat16(Vec<float> v) {
  const Vec<uint32_t> bits = (Vec<uint32_t>)v;
  const Vec<uint32_t> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Vec<uint32_t> quiet = (bits >> 16) | 0x40u;
  const Vec<uint32_t> narrow = (v == v) ? rounded : quiet;
  return __builtin_convertvector(narrow, typename VectorOf<uint16_t, kLanes<float>>::type);
}

// Whether whole vectors can be written past the caches from here on: those stores want aligned addresses.
template <class T>
inline bool can_stream(const T* p) {
#if defined(__x86_64__)
  return sizeof(T) >= 4 && reinterpret_cast<uintptr_t>(p) % MASKWISE_VECTOR_BYTES == 0;
#else
  (void)p;
  return false;
#endif
}

// Streamed stores are seen by other threads only after this.
inline void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Writes kLanes<A> elements; past the caches if kStream.
template <bool kStream, class T, class V>
inline void store(T* p, V v) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto narrow = narrow_bfloat16(v);
    std::memcpy(p, &narrow, sizeof(narrow));
  } else if constexpr (std::is_same_v<T, Half>) {
#if defined(MASKWISE_F16C) && MASKWISE_VECTOR_BYTES == 32
    const __m128i narrow = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(p, &narrow, sizeof(narrow));
#elif defined(MASKWISE_F16C) && MASKWISE_VECTOR_BYTES == 64
    const __m256i narrow = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(p, &narrow, sizeof(narrow));
#else
    for (int i = 0; i < kLanes<float>; ++i) p[i] = static_cast<Half>(static_cast<float>(v[i]));
#endif
  } else {
#if defined(__x86_64__)
    if constexpr (kStream) {
#if MASKWISE_VECTOR_BYTES == 64
      _mm512_stream_si512((__m512i*)p, (__m512i)v);
#elif MASKWISE_VECTOR_BYTES == 32
      _mm256_stream_si256((__m256i*)p, (__m256i)v);
#else
      _mm_stream_si128((__m128i*)p, (__m128i)v);
#endif
      return;
    }
#endif
    std::memcpy(p, &v, sizeof(v));
  }
}
