// What reductions need of vectors beyond simd.h. Included once a SIMD level, inside its namespace, by reduce_walk.h.

// Whether a lane is set.
template <class V>
inline bool any_lane(V mask) {
#if MASKWISE_VECTOR_BYTES == 32 && defined(MASKWISE_F16C)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  uint64_t words[sizeof(V) / 8], any = 0;
  std::memcpy(words, &mask, sizeof(V));
  for (const uint64_t word : words) any |= word;
  return any != 0;
#endif
}

// Whether none of N mask bytes is set; N is a number of whole vectors.
template <int N>
inline bool none_of(const uint8_t* m) {
  static_assert(N % MASKWISE_VECTOR_BYTES == 0);
  Vec<int8_t> any = load_raw<Vec<int8_t>>(m);
  for (int i = MASKWISE_VECTOR_BYTES; i < N; i += MASKWISE_VECTOR_BYTES) any |= load_raw<Vec<int8_t>>(m + i);
  return !any_lane(any);
}

// Whether none of n mask bytes is set; finds out at the first that is.
inline bool none_kept(const uint8_t* m, int64_t n) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32)
    if (!none_of_32(m + i)) return false;
  for (; i < n; ++i)
    if (m[i]) return false;
  return true;
}

// Joins v[0], ..., v[R - 1] in pairs: short chains, and rounding errors that grow with the logarithm.
template <int R, class V, class Join>
inline V tree(const V (&v)[R], const Join& join) {
  static_assert(R == 1 || R == 4 || R == 8);
  if constexpr (R == 1) return v[0];
  else if constexpr (R == 4) return join(join(v[0], v[1]), join(v[2], v[3]));
  else return join(join(join(v[0], v[1]), join(v[2], v[3])), join(join(v[4], v[5]), join(v[6], v[7])));
}

// The last n lanes.
template <class A>
inline LaneMask<A> last_lanes(int n) {
  LaneMask<A> lane;
  for (int i = 0; i < kLanes<A>; ++i) lane[i] = static_cast<BitsOf<A>>(i);
  return lane >= static_cast<BitsOf<A>>(kLanes<A> - n);
}

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

// |x|.
template <class A>
inline Vec<A> magnitude(Vec<A> x) {
  return (Vec<A>)((LaneMask<A>)x & std::numeric_limits<BitsOf<A>>::max());
}

// Calls call(T{}) for the dtype, among the floating types.
template <class Call>
void with_floating(ScalarType dtype, const Call& call) {
  switch (dtype) {
    case ScalarType::Float: return call(float{});
    case ScalarType::Double: return call(double{});
    case ScalarType::Half: return call(Half{});
    case ScalarType::BFloat16: return call(BFloat16{});
    default: STD_TORCH_CHECK(false, "maskwise: a reduction was called with a dtype that has no kernel");
  }
}

// Calls call(T{}) for the dtype, among the floating and the integer types and bool.
template <class Call>
void with_any(ScalarType dtype, const Call& call) {
  switch (dtype) {
    case ScalarType::Long: return call(int64_t{});
    case ScalarType::Int: return call(int32_t{});
    case ScalarType::Short: return call(int16_t{});
    case ScalarType::Char: return call(int8_t{});
    case ScalarType::Byte: return call(uint8_t{});
    case ScalarType::Bool: return call(Bool{});
    default: return with_floating(dtype, call);
  }
}

// Calls call(T{}) with the signed integer that is as wide as the dtype.
template <class Call>
void with_width(ScalarType dtype, const Call& call) {
  switch (dtype) {
    case ScalarType::Long:
    case ScalarType::Double: return call(int64_t{});
    case ScalarType::Int:
    case ScalarType::Float: return call(int32_t{});
    case ScalarType::Short:
    case ScalarType::Half:
    case ScalarType::BFloat16: return call(int16_t{});
    default: return call(int8_t{});
  }
}
