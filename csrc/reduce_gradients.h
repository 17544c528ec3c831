// How a gradient is written: each element of x by two numbers that its output gives, exactly 0 where dropped. Included
// once a SIMD level, inside its namespace, by the kernel headers that have a gradient.
//
// A gradient is a struct Op with In, A, and operator()(x, a, b) -> the gradient, all of them vectors of A.

// The two numbers of each output.
template <class T>
struct Params {
  std::vector<Acc<T>> a, b;
  explicit Params(int64_t outputs) : a(outputs), b(outputs) {}
};

// Writes kLanes<A> elements; narrow floats are rounded to nearest, ties to even.
template <class T, class A>
inline void store(T* p, Vec<A> v) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const Vec<uint32_t> bits = (Vec<uint32_t>)v;
    const Vec<uint32_t> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Vec<uint32_t> narrow = v == v ? rounded : (bits >> 16) | 0x40u;
    const auto halves = __builtin_convertvector(narrow, typename VectorOf<uint16_t, kLanes<float>>::type);
    std::memcpy(p, &halves, sizeof(halves));
  } else if constexpr (std::is_same_v<T, Half>) {
#if defined(MASKWISE_F16C) && MASKWISE_VECTOR_BYTES == 32
    const __m128i halves = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(p, &halves, sizeof(halves));
#else
    for (int i = 0; i < kLanes<float>; ++i) p[i] = static_cast<Half>(v[i]);
#endif
  } else {
    std::memcpy(p, &v, sizeof(v));
  }
}

// n contiguous elements; `step` is 1 where each has numbers of its own, 0 where one pair is for all.
template <class Op, class T, class A>
__attribute__((noinline)) void map_run(const Op& op, const T* x, const uint8_t* m, T* out, int64_t n, const A* a,
                                       const A* b, int64_t step) {
  constexpr int L = kLanes<A>;
  for (int64_t i = 0; i < n; i += L) {
    const int rest = static_cast<int>(std::min<int64_t>(L, n - i));
    T staged[L], result[L];
    uint8_t bytes[L] = {};
    A own_a[L] = {}, own_b[L] = {};
    const T* xs = x + i;
    const uint8_t* ms = m + i;
    const A *as = a + i * step, *bs = b + i * step;
    if (rest < L) {
      for (int k = 0; k < L; ++k) staged[k] = k < rest ? xs[k] : T(0.0f);
      for (int k = 0; k < rest; ++k) bytes[k] = ms[k];
      for (int k = 0; k < rest && step; ++k) own_a[k] = as[k], own_b[k] = bs[k];
      xs = staged;
      ms = bytes;
      if (step) as = own_a, bs = own_b;
    }
    const Vec<A> scale = step ? load_raw<Vec<A>>(as) : splat<A>(*as);
    const Vec<A> shift = step ? load_raw<Vec<A>>(bs) : splat<A>(*bs);
    const Vec<A> v = keep<A>(op(load<A>(xs), scale, shift), load_mask<A>(ms));
    if (rest == L) {
      store<T, A>(out + i, v);
    } else {
      store<T, A>(result, v);
      for (int k = 0; k < rest; ++k) out[i + k] = result[k];
    }
  }
}

// Elements at one stretch of the innermost loop; staged where x or the mask do not lie side by side.
template <class Op, class T, class A>
void map_stretch(const Op& op, const T* x, int64_t xs, const uint8_t* m, int64_t ms, T* out, int64_t n, const A* a,
                 const A* b, int64_t step) {
  constexpr int64_t kStage = 512;
  T values[kStage];
  uint8_t kept[kStage];
  if (ms == 0) {
    if (*m == 0) {
      std::fill_n(out, n, T(0.0f));
      return;
    }
    std::fill_n(kept, kStage, uint8_t{1});
  }
  const bool direct = xs == 1 && ms == 1;
  for (int64_t i = 0; i < n; i += direct ? n : kStage) {
    const int64_t count = direct ? n : std::min(kStage, n - i);
    if (xs != 1)
      for (int64_t k = 0; k < count; ++k) values[k] = x[(i + k) * xs];
    if (ms > 1 || ms < 0)
      for (int64_t k = 0; k < count; ++k) kept[k] = m[(i + k) * ms];
    map_run(op, xs == 1 ? x + i : values, ms == 1 ? m + i : kept, out + i, count, a + i * step, b + i * step, step);
  }
}

template <class Op, class T>
void map_gradient(const Op& op, const MapLayout& map, const Params<T>& params, const void* x, const void* m,
                  void* out) {
  const auto* xs = static_cast<const T*>(x);
  const auto* ms = static_cast<const uint8_t*>(m);
  auto* results = static_cast<T*>(out);
  // Long stretches are cut, so that even one of them has work for every thread.
  const int64_t piece = std::min<int64_t>(map.inner.size, 65536);
  const int64_t pieces = ceil_div(map.inner.size, std::max<int64_t>(1, piece));
  parallel(map.stretches * pieces, piece, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t from = task % pieces * piece;
      const MapOffset at = map.offset_of(task / pieces);
      const int64_t param = at.param + from * map.inner.param;
      map_stretch(op, xs + at.x + from * map.inner.x, map.inner.x, ms + at.mask + from * map.inner.mask,
                  map.inner.mask, results + task / pieces * map.inner.size + from,
                  std::min(piece, map.inner.size - from), params.a.data() + param, params.b.data() + param,
                  map.inner.param);
    }
  });
}
