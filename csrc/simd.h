// The vector vocabulary of the kernels: GCC/Clang vector extensions, as wide as the level that is being compiled. A
// C-style cast between vectors of one size keeps the bits; __builtin_convertvector converts the values.
// Included once a level, inside that level's namespace, by foreach_isa.h; hence no include guard and no includes.

template <class T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};

template <class T>
constexpr int kLanes = MASKWISE_VECTOR_BYTES / sizeof(T);

template <class T>
using Vec = typename VectorOf<T, kLanes<T>>::type;

// The signed integer as wide as T: its lanes are the masks, 0 or -1, that select lanes of T.
template <class T>
using BitsOf = std::conditional_t<
    sizeof(T) == 8, int64_t,
    std::conditional_t<sizeof(T) == 4, int32_t, std::conditional_t<sizeof(T) == 2, int16_t, int8_t>>>;

template <class T>
using LaneMask = Vec<BitsOf<T>>;

// What a type is accumulated in.
template <class T>
struct AccOf {
  using type = int64_t;
};
template <>
struct AccOf<float> {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <>
struct AccOf<BFloat16> {
  using type = float;
};
template <>
struct AccOf<Half> {
  using type = float;
};
template <class T>
using Acc = typename AccOf<T>::type;

template <class T>
inline Vec<T> splat(T value) {
  return Vec<T>{} + value;
}

template <class V, class T>
inline V load_raw(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

inline Vec<float> widen_bfloat16(const BFloat16* p) {
  using Narrow = typename VectorOf<uint16_t, kLanes<float>>::type;
  const auto wide = __builtin_convertvector(load_raw<Narrow>(p), Vec<uint32_t>) << 16;
  return (Vec<float>)wide;
}

inline Vec<float> widen_half(const Half* p) {
#if defined(MASKWISE_F16C) && MASKWISE_VECTOR_BYTES == 32
  return (Vec<float>)_mm256_cvtph_ps(load_raw<__m128i>(p));
#elif defined(MASKWISE_F16C) && MASKWISE_VECTOR_BYTES == 64
  return (Vec<float>)_mm512_cvtph_ps(load_raw<__m256i>(p));
#else
  // Move exponent and mantissa into place, then let one exact product by 2^112 fix the exponent's bias; it also
  // normalises subnormals. Infinity and NaN keep their full exponent by an OR.
  using Narrow = typename VectorOf<uint16_t, kLanes<float>>::type;
  const Vec<uint32_t> h = __builtin_convertvector(load_raw<Narrow>(p), Vec<uint32_t>);
  const Vec<uint32_t> moved = (h & 0x7fffu) << 13;
  const Vec<float> scaled = (Vec<float>)moved * 0x1p112f;
  const Vec<uint32_t> special = (Vec<uint32_t>)((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  const Vec<uint32_t> bits = (Vec<uint32_t>)scaled | special | ((h & 0x8000u) << 16);
  return (Vec<float>)bits;
#endif
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
  using Narrow = typename VectorOf<uint8_t, kLanes<A>>::type;
  const auto wide = __builtin_convertvector(load_raw<Narrow>(m), LaneMask<A>);
  if constexpr (sizeof(A) == 1) return wide != 0;
  else return wide > 0;
}

// The next kLanes<A> elements at p, as A.
template <class A, class T>
inline Vec<A> load(const T* p) {
  if constexpr (std::is_same_v<T, Bool>) {
    return (Vec<A>)(load_mask<A>(reinterpret_cast<const uint8_t*>(p)) & 1);
  } else if constexpr (std::is_same_v<T, A>) {
    return load_raw<Vec<A>>(p);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return widen_bfloat16(p);
  } else if constexpr (std::is_same_v<T, Half>) {
    return widen_half(p);
  } else {
#if MASKWISE_VECTOR_BYTES == 32 && defined(MASKWISE_F16C)
    // GCC 12 widens bytes lane by lane when it is left to __builtin_convertvector.
    if constexpr (sizeof(T) == 1 && std::is_same_v<A, int32_t>) {
      const __m128i narrow = _mm_loadl_epi64((const __m128i*)p);
      return (Vec<A>)(std::is_signed_v<T> ? _mm256_cvtepi8_epi32(narrow) : _mm256_cvtepu8_epi32(narrow));
    }
#endif
    using Narrow = typename VectorOf<T, kLanes<A>>::type;
    return __builtin_convertvector(load_raw<Narrow>(p), Vec<A>);
  }
}

// x where kept, otherwise +0, by its bits: a dropped NaN cannot survive it, as it would a multiplication.
template <class A>
inline Vec<A> keep(Vec<A> x, LaneMask<A> kept) {
  return (Vec<A>)((LaneMask<A>)x & kept);
}

// The sum of N lanes, by halves: three steps for eight lanes, where one after the other would be seven.
template <class A, int N>
inline A add_halves(typename VectorOf<A, N>::type v) {
  if constexpr (N == 2) {
    return v[0] + v[1];
  } else {
    typename VectorOf<A, N / 2>::type halves[2];
    std::memcpy(halves, &v, sizeof(v));
    return add_halves<A, N / 2>(halves[0] + halves[1]);
  }
}

template <class A>
inline A add_lanes(Vec<A> v) {
  return add_halves<A, kLanes<A>>(v);
}

// Whether none of 32 mask bytes is set.
inline bool none_of_32(const uint8_t* m) {
  uint64_t words[4];
  std::memcpy(words, m, sizeof(words));
  return (words[0] | words[1] | words[2] | words[3]) == 0;
}
