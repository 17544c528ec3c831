// The SIMD vocabulary of every kernel: GCC/Clang vector extensions, as wide as the target that is being compiled. A
// C-style cast between vectors of one size keeps the bits; __builtin_convertvector converts the values.
// Compiled once a target: see foreach_target.h.
#include "target.h"
#if defined(MASKWISE_SIMD_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_SIMD_H
#else
#define MASKWISE_SIMD_H
#endif

namespace maskwise::MASKWISE_TARGET {

// -- types -------------------------------------------------------------------------------------------------------------

template <class T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};

template <class T>
constexpr int kLanes = MASKWISE_VECTOR_BYTES / sizeof(T);

template <class T, int N = kLanes<T>>
using Vec = typename VectorOf<T, N>::type;

// The lanes of a vector type: their type, and how many there are.
template <class V>
using LaneOf = std::remove_reference_t<decltype(std::declval<V&>()[0])>;
template <class V>
constexpr int kLanesOf = sizeof(V) / sizeof(LaneOf<V>);

// Masks that select lanes of T: integers as wide as T, 0 or -1.
template <class T, int N = kLanes<T>>
using LaneMask = Vec<BitsOf<T>, N>;

// One value in every lane. A difference, since value + 0 is not the value where it is -0: GCC would keep the addition.
template <class T>
inline Vec<T> splat(T value) {
  return value - Vec<T>{};
}

// -- loads -------------------------------------------------------------------------------------------------------------

template <class V, class T>
inline V load_raw(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

template <int N>
inline Vec<float, N> widen_bfloat16(const BFloat16* p) {
  return (Vec<float, N>)(__builtin_convertvector(load_raw<Vec<uint16_t, N>>(p), Vec<uint32_t, N>) << 16);
}

template <int N>
inline Vec<float, N> widen_half(const Half* p) {
#if defined(MASKWISE_F16C)
  if constexpr (N == 8) return (Vec<float, N>)_mm256_cvtph_ps(load_raw<__m128i>(p));
#endif
#if MASKWISE_VECTOR_BYTES == 64
  if constexpr (N == 16) return (Vec<float, N>)_mm512_cvtph_ps(load_raw<__m256i>(p));
#endif
  // Move exponent and mantissa into place, then let one exact product by 2^112 fix the exponent's bias; it also
  // normalises subnormals. Infinity and NaN keep their full exponent by an OR.
  using Wide = Vec<uint32_t, N>;
  const Wide h = __builtin_convertvector(load_raw<Vec<uint16_t, N>>(p), Wide);
  const Vec<float, N> scaled = (Vec<float, N>)((h & 0x7fffu) << 13) * 0x1p112f;
  const Wide special = (Wide)((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  return (Vec<float, N>)((Wide)scaled | special | ((h & 0x8000u) << 16));
}

// The next kLanes<A> mask bytes, as lanes of 0 or -1: any byte but 0 keeps, so bytes widen without a sign. The x86 forms
// are spelled out because GCC 12 widens bytes lane by lane when it is left to __builtin_convertvector, which makes every
// kernel compute-bound.
template <class A>
inline LaneMask<A> load_mask(const uint8_t* m) {
#if MASKWISE_VECTOR_BYTES == 32 && defined(MASKWISE_F16C)
  if constexpr (sizeof(A) == 4) return (LaneMask<A>)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)m)) > 0;
  if constexpr (sizeof(A) == 8) return (LaneMask<A>)_mm256_cvtepu8_epi64(_mm_loadu_si32(m)) > 0;
#elif MASKWISE_VECTOR_BYTES == 64
  if constexpr (sizeof(A) == 4) return (LaneMask<A>)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)m)) > 0;
  if constexpr (sizeof(A) == 8) return (LaneMask<A>)_mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)m)) > 0;
#endif
  const auto wide = __builtin_convertvector(load_raw<Vec<uint8_t, kLanes<A>>>(m), LaneMask<A>);
  if constexpr (sizeof(A) == 1) return wide != 0;
  else return wide > 0;
}

// The next N elements at p, as A.
template <class A, int N = kLanes<A>, class T>
inline Vec<A, N> load(const T* p) {
  if constexpr (std::is_same_v<T, Bool>) {
    static_assert(N == kLanes<A>);
    return (Vec<A>)(load_mask<A>(reinterpret_cast<const uint8_t*>(p)) & 1);
  } else if constexpr (std::is_same_v<T, A>) {
    return load_raw<Vec<A, N>>(p);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return widen_bfloat16<N>(p);
  } else if constexpr (std::is_same_v<T, Half>) {
    return widen_half<N>(p);
  } else {
#if defined(MASKWISE_F16C)
    // GCC 12 widens bytes lane by lane when it is left to __builtin_convertvector.
    if constexpr (sizeof(T) == 1 && std::is_same_v<A, int32_t> && N == 8) {
      const __m128i narrow = _mm_loadl_epi64((const __m128i*)p);
      return (Vec<A, N>)(std::is_signed_v<T> ? _mm256_cvtepi8_epi32(narrow) : _mm256_cvtepu8_epi32(narrow));
    }
#endif
    return __builtin_convertvector(load_raw<Vec<T, N>>(p), Vec<A, N>);
  }
}

// -- stores ------------------------------------------------------------------------------------------------------------

// Rounded to nearest, ties to even. A NaN becomes the one that torch's own conversion of a float gives, whatever its bits.
template <class V>
inline auto narrow_bfloat16(V v) {
  constexpr int N = kLanesOf<V>;
  const auto bits = (Vec<uint32_t, N>)v;
  const Vec<uint32_t, N> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector(v != v ? Vec<uint32_t, N>{} + 0x7fc0u : rounded, Vec<uint16_t, N>);
}

// Writes the lanes of v, each rounded to the nearest T; past the caches if kStream, where can_stream(p).
template <bool kStream = false, class T, class V>
inline void store(T* p, V v) {
  constexpr int N = kLanesOf<V>;
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto narrow = narrow_bfloat16(v);
    std::memcpy(p, &narrow, sizeof(narrow));
  } else if constexpr (std::is_same_v<T, Half>) {
#if defined(MASKWISE_F16C)
    if constexpr (N == 8) {
      const __m128i narrow = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      std::memcpy(p, &narrow, sizeof(narrow));
      return;
    }
#endif
#if MASKWISE_VECTOR_BYTES == 64
    if constexpr (N == 16) {
      const __m256i narrow = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      std::memcpy(p, &narrow, sizeof(narrow));
      return;
    }
#endif
    for (int i = 0; i < N; ++i) p[i] = static_cast<Half>(static_cast<float>(v[i]));
  } else if constexpr (sizeof(T) != sizeof(LaneOf<V>)) {
    const auto narrow = __builtin_convertvector(v, Vec<T, N>);
    std::memcpy(p, &narrow, sizeof(narrow));
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

// Streamed stores are visible to other threads only after this.
inline void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// -- lanes and masks ---------------------------------------------------------------------------------------------------

// x where kept, otherwise +0, by its bits: a dropped NaN cannot survive it, as it would a multiplication.
template <class A>
inline Vec<A> keep(Vec<A> x, LaneMask<A> kept) {
  return (Vec<A>)((LaneMask<A>)x & kept);
}

// v where kept, otherwise `other`.
template <class A>
inline Vec<A> drop(Vec<A> v, LaneMask<A> kept, A other) {
  if (other == A(0)) return keep<A>(v, kept);
  return kept ? v : splat<A>(other);
}

template <class A>
inline LaneMask<A> lane_numbers() {
  LaneMask<A> lane;
  for (int i = 0; i < kLanes<A>; ++i) lane[i] = static_cast<BitsOf<A>>(i);
  return lane;
}

// The first n lanes, all where n is greater.
template <class A>
inline LaneMask<A> first_lanes(int64_t n) {
  return lane_numbers<A>() < static_cast<BitsOf<A>>(std::min<int64_t>(n, kLanes<A>));
}

// The last n lanes.
template <class A>
inline LaneMask<A> last_lanes(int n) {
  return lane_numbers<A>() >= static_cast<BitsOf<A>>(kLanes<A> - n);
}

// Up to N elements at p, the lanes behind them `other`. Rows of few elements are mostly ends of rows, which lane by lane
// would take longer than their arithmetic.
template <class A, int N = kLanes<A>, class T>
inline Vec<A, N> load_partial(const T* p, int64_t n, A other) {
  if (n >= N) return load<A, N>(p);
  Vec<A, N> v = other - Vec<A, N>{};
  if (n <= 0) return v;
#if MASKWISE_VECTOR_BYTES == 32 && defined(MASKWISE_F16C)
  if constexpr (std::is_same_v<T, float> && N == 8) {
    const LaneMask<A> there = first_lanes<A>(n);
    return there ? (Vec<A>)_mm256_maskload_ps(p, (__m256i)there) : v;
  }
#elif MASKWISE_VECTOR_BYTES == 64
  if constexpr (std::is_same_v<T, float> && N == 16)
    return (Vec<A, N>)_mm512_mask_loadu_ps((__m512)v, static_cast<__mmask16>((1u << n) - 1), p);
  if constexpr (std::is_same_v<T, float> && N == 8)
    return (Vec<A, N>)_mm256_mask_loadu_ps((__m256)v, static_cast<__mmask8>((1u << n) - 1), p);
#endif
  for (int64_t k = 0; k < n; ++k) v[k] = static_cast<A>(p[k]);
  return v;
}

// Writes up to N elements at p.
template <class A, int N = kLanes<A>, class T>
inline void store_partial(T* p, int64_t n, Vec<A, N> v) {
  if (n >= N) return store(p, v);
  if (n <= 0) return;
#if MASKWISE_VECTOR_BYTES == 32 && defined(MASKWISE_F16C)
  if constexpr (std::is_same_v<T, float> && N == 8)
    return _mm256_maskstore_ps(p, (__m256i)first_lanes<A>(n), (__m256)v);
#elif MASKWISE_VECTOR_BYTES == 64
  if constexpr (std::is_same_v<T, float> && N == 16)
    return _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), (__m512)v);
  if constexpr (std::is_same_v<T, float> && N == 8)
    return _mm256_mask_storeu_ps(p, static_cast<__mmask8>((1u << n) - 1), (__m256)v);
#endif
  T rest[N];
  store(rest, v);
  std::memcpy(p, rest, n * sizeof(T));
}

// Whether a lane is set.
template <class V>
inline bool any_lane(V lanes) {
#if defined(MASKWISE_F16C)
  if constexpr (sizeof(V) == 32) return !_mm256_testz_si256((__m256i)lanes, (__m256i)lanes);
#endif
#if MASKWISE_VECTOR_BYTES == 64
  if constexpr (sizeof(V) == 64) return _mm512_test_epi64_mask((__m512i)lanes, (__m512i)lanes) != 0;
#endif
  uint64_t words[sizeof(V) / 8], any = 0;
  std::memcpy(words, &lanes, sizeof(V));
  for (const uint64_t word : words) any |= word;
  return any != 0;
}

// Whether none of N mask bytes is set.
template <int N>
inline bool none_of(const uint8_t* m) {
  if constexpr (N % MASKWISE_VECTOR_BYTES == 0) {
    auto any = load_raw<Vec<int8_t>>(m);
    for (int i = MASKWISE_VECTOR_BYTES; i < N; i += MASKWISE_VECTOR_BYTES) any |= load_raw<Vec<int8_t>>(m + i);
    return !any_lane(any);
  } else if constexpr (N < 8) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, m, N);
    return bytes == 0;
  } else {
    return !any_lane(load_raw<Vec<int8_t, N>>(m));
  }
}

// Which of N mask bytes are set, as the lowest N bits of a word.
template <int N>
inline uint64_t set_bytes(const uint8_t* m) {
  static_assert(N % 8 == 0 && N <= 64);
#if MASKWISE_VECTOR_BYTES == 64
  if constexpr (N == 64) {
    const __m512i v = _mm512_loadu_si512(m);
    return _mm512_test_epi8_mask(v, v);
  }
#endif
#if defined(MASKWISE_F16C)
  if constexpr (N == 32) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(m));
    return ~static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(v, _mm256_setzero_si256())));
  }
  if constexpr (N == 64) return set_bytes<32>(m) | set_bytes<32>(m + 32) << 32;
#endif
  uint64_t word = 0;
  for (int i = 0; i < N; i += 8) {
    uint64_t bytes;
    std::memcpy(&bytes, m + i, 8);
    // The top bit of each byte that is set, and then these bits next to each other.
    constexpr uint64_t kLow = 0x7f7f7f7f7f7f7f7f;
    bytes = (((bytes & kLow) + kLow) | bytes) & ~kLow;
    word |= ((bytes >> 7) * 0x0102040810204080 >> 56) << i;
  }
  return word;
}

// Which words of eight mask bytes have one that is set, of N bytes, as the lowest N / 8 bits.
template <int N>
inline uint64_t set_words(const uint8_t* m) {
#if MASKWISE_VECTOR_BYTES == 64
  if constexpr (N == 64) {
    const __m512i v = _mm512_loadu_si512(m);
    return _mm512_test_epi64_mask(v, v);
  }
#endif
#if defined(MASKWISE_F16C)
  if constexpr (N == 32) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(m));
    return 15 & ~_mm256_movemask_pd((__m256d)_mm256_cmpeq_epi64(v, _mm256_setzero_si256()));
  }
  if constexpr (N == 64) return set_words<32>(m) | set_words<32>(m + 32) << 4;
#endif
  uint64_t words = 0;
  for (int i = 0; i < N; i += 8) {
    uint64_t bytes;
    std::memcpy(&bytes, m + i, 8);
    words |= static_cast<uint64_t>(bytes != 0) << (i / 8);
  }
  return words;
}

// Whether none of n mask bytes is set; stops at the first that is.
inline bool none_of(const uint8_t* m, int64_t n) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32)
    if (!none_of<32>(m + i)) return false;
  for (; i < n; ++i)
    if (m[i]) return false;
  return true;
}

// -- arithmetic of lanes -----------------------------------------------------------------------------------------------

// The larger, or the smaller, of each lane; where one is NaN, the second.
template <bool kMax, class A>
inline Vec<A> better(Vec<A> a, Vec<A> b) {
#if MASKWISE_VECTOR_BYTES == 32 && defined(MASKWISE_F16C)
  if constexpr (std::is_same_v<A, float>)
    return kMax ? (Vec<A>)_mm256_max_ps((__m256)a, (__m256)b) : (Vec<A>)_mm256_min_ps((__m256)a, (__m256)b);
  if constexpr (std::is_same_v<A, double>)
    return kMax ? (Vec<A>)_mm256_max_pd((__m256d)a, (__m256d)b) : (Vec<A>)_mm256_min_pd((__m256d)a, (__m256d)b);
#endif
  if constexpr (kMax) return a > b ? a : b;
  else return a < b ? a : b;
}

template <class A>
inline Vec<A> larger(Vec<A> a, Vec<A> b) {
  return better<true, A>(a, b);
}

// |x|.
template <class A>
inline Vec<A> magnitude(Vec<A> x) {
  return (Vec<A>)((LaneMask<A>)x & std::numeric_limits<BitsOf<A>>::max());
}

// All lanes joined, by halves: three steps for eight lanes, where one after the other would be seven.
template <class V, class Join>
inline LaneOf<V> fold_halves(V v, const Join& join) {
  constexpr int N = kLanesOf<V>;
  if constexpr (N == 2) {
    return join(v[0], v[1]);
  } else {
    Vec<LaneOf<V>, N / 2> halves[2];
    std::memcpy(halves, &v, sizeof(v));
    return fold_halves(join(halves[0], halves[1]), join);
  }
}

template <class A, int N = kLanes<A>>
inline A add_lanes(Vec<A, N> v) {
  return fold_halves(v, [](auto a, auto b) { return a + b; });
}

template <class A>
inline A max_lanes(Vec<A> v) {
  return fold_halves(v, [](auto a, auto b) { return a > b ? a : b; });
}

// -- shuffles ----------------------------------------------------------------------------------------------------------

template <int Step, class V, size_t... Lane>
inline void exchange(V& a, V& b, std::index_sequence<Lane...>) {
  constexpr int N = sizeof...(Lane);
  const V low = __builtin_shufflevector(a, b, (Lane & Step ? N + static_cast<int>(Lane) - Step : static_cast<int>(Lane))...);
  const V high = __builtin_shufflevector(a, b, (Lane & Step ? N + static_cast<int>(Lane) : static_cast<int>(Lane) + Step)...);
  a = low;
  b = high;
}

// N vectors of N lanes, transposed in registers.
template <class A, int N = kLanes<A>, int Step = 1>
inline void transpose(Vec<A, N>* v) {
#if defined(MASKWISE_F16C)
  // Eight by eight floats in the fewest shuffles that AVX2 has for it.
  if constexpr (std::is_same_v<A, float> && N == 8) {
    __m256 a[8], b[8];
    for (int i = 0; i < 4; ++i) {
      a[2 * i] = _mm256_unpacklo_ps((__m256)v[2 * i], (__m256)v[2 * i + 1]);
      a[2 * i + 1] = _mm256_unpackhi_ps((__m256)v[2 * i], (__m256)v[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
      b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
      b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
      b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
      b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      v[i] = (Vec<A, N>)_mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
      v[i + 4] = (Vec<A, N>)_mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
    return;
  }
#endif
  if constexpr (Step < N) {
    for (int i = 0; i < N; ++i)
      if ((i & Step) == 0) exchange<Step>(v[i], v[i + Step], std::make_index_sequence<N>{});
    transpose<A, N, Step * 2>(v);
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

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
