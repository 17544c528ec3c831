// What reductions need of vectors beyond simd.h. Included once a SIMD level, inside its namespace, by reduce_walk.h.

inline bool none_kept(const uint8_t* m, int64_t n) { return none_of(m, n); }

// Joins v[0], ..., v[R - 1] in pairs: short chains, and rounding errors that grow with the logarithm.
template <int R, class V, class Join>
inline V tree(const V (&v)[R], const Join& join) {
  static_assert(R == 1 || R == 4 || R == 8);
  if constexpr (R == 1) return v[0];
  else if constexpr (R == 4) return join(join(v[0], v[1]), join(v[2], v[3]));
  else return join(join(join(v[0], v[1]), join(v[2], v[3])), join(join(v[4], v[5]), join(v[6], v[7])));
}

template <class Call>
void with_floating(ScalarType dtype, const Call& call) {
  dispatch_floating(dtype, call);
}
template <class Call>
void with_any(ScalarType dtype, const Call& call) {
  dispatch_any(dtype, call);
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
