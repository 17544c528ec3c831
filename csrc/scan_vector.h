// What the scan kernels add to the vector vocabulary: stores with rounding, lane shifts, transposes. Included once a
// SIMD level, inside its namespace, after simd.h.

// What a scan accumulates a type in: as torch does on the CPU, one step wider than the result. Integers are unsigned,
// so that they wrap around as torch's do.
template <class T>
struct ScanAccOf {
  using type = uint64_t;
};
template <>
struct ScanAccOf<float> {
  using type = double;
};
template <>
struct ScanAccOf<double> {
  using type = double;
};
template <>
struct ScanAccOf<BFloat16> {
  using type = float;
};
template <>
struct ScanAccOf<Half> {
  using type = float;
};
template <class T>
using ScanAcc = typename ScanAccOf<T>::type;

// Writes kLanes<A> values to p, each rounded to the nearest T.
template <class A, class T>
inline void put(T* p, Vec<A> v) {
  if constexpr (sizeof(T) == sizeof(A)) {
    std::memcpy(p, &v, sizeof(v));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    using Narrow = typename VectorOf<uint16_t, kLanes<float>>::type;
    const Vec<uint32_t> bits = (Vec<uint32_t>)v;
    const Vec<uint32_t> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Narrow out = __builtin_convertvector(v != v ? Vec<uint32_t>{} + 0x7fc0u : rounded, Narrow);
    std::memcpy(p, &out, sizeof(out));
  } else if constexpr (std::is_same_v<T, Half>) {
#if defined(MASKWISE_F16C) && MASKWISE_VECTOR_BYTES == 32
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0));
#elif defined(MASKWISE_F16C) && MASKWISE_VECTOR_BYTES == 64
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, 0));
#else
    for (int i = 0; i < kLanes<A>; ++i) p[i] = static_cast<Half>(static_cast<float>(v[i]));
#endif
  } else {
    const auto out = __builtin_convertvector(v, typename VectorOf<T, kLanes<A>>::type);
    std::memcpy(p, &out, sizeof(out));
  }
}

// Whether any lane is set.
template <class M>
inline bool any_lane(M lanes) {
#if MASKWISE_VECTOR_BYTES == 32 && defined(MASKWISE_F16C)
  return !_mm256_testz_si256((__m256i)lanes, (__m256i)lanes);
#elif MASKWISE_VECTOR_BYTES == 64
  return _mm512_test_epi64_mask((__m512i)lanes, (__m512i)lanes) != 0;
#else
  uint64_t words[MASKWISE_VECTOR_BYTES / 8], all = 0;
  std::memcpy(words, &lanes, sizeof(words));
  for (const uint64_t word : words) all |= word;
  return all != 0;
#endif
}

template <class V, int Step, size_t... Lane>
inline void exchange(V& a, V& b, std::index_sequence<Lane...>) {
  constexpr int N = sizeof...(Lane);
  const V low = __builtin_shufflevector(a, b, (Lane & Step ? N + static_cast<int>(Lane) - Step : static_cast<int>(Lane))...);
  const V high = __builtin_shufflevector(a, b, (Lane & Step ? N + static_cast<int>(Lane) : static_cast<int>(Lane) + Step)...);
  a = low;
  b = high;
}

template <class A, int Step = 1>
inline void transpose(Vec<A>* v) {
  constexpr int N = kLanes<A>;
  if constexpr (Step < N) {
    for (int i = 0; i < N; ++i)
      if ((i & Step) == 0) exchange<Vec<A>, Step>(v[i], v[i + Step], std::make_index_sequence<N>{});
    transpose<A, Step * 2>(v);
  }
}

template <class A, size_t... Lane>
inline Vec<A> shift_up(Vec<A> before, Vec<A> v, std::index_sequence<Lane...>) {
  return __builtin_shufflevector(before, v, static_cast<int>(Lane + kLanes<A> - 1)...);
}
// The lanes moved one up; the first one comes from `before`.
template <class A>
inline Vec<A> shift_up(A before, Vec<A> v) {
  return shift_up<A>(splat<A>(before), v, std::make_index_sequence<kLanes<A>>{});
}
