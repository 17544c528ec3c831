// Gradients of reductions: each element of x by two numbers that its output gives, exactly 0 where dropped. Included once
// a SIMD level, inside its namespace, by the kernel headers that have a gradient.
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

// One run. Operands: x, mask, the two numbers, gradient; of which the mask and the numbers may have a stride of 0.
template <class Op>
void gradient_run(const void* self, Kept keeps, char* const* at, const int64_t* stride, int64_t n) {
  using T = typename Op::In;
  using A = typename Op::A;
  constexpr int L = kLanes<A>;
  const Op& op = *static_cast<const Op*>(self);
  const auto* x = reinterpret_cast<const T*>(at[0]);
  const auto* m = keeps == Kept::all ? kAllKept.bytes : reinterpret_cast<const uint8_t*>(at[1]);
  const int64_t m_step = keeps == Kept::all ? 0 : 1;
  const auto* a = reinterpret_cast<const A*>(at[2]);
  const auto* b = reinterpret_cast<const A*>(at[3]);
  const bool own = stride[2] != 0;
  auto* out = reinterpret_cast<T*>(at[4]);
  Vec<A> scale = splat<A>(*a), shift = splat<A>(*b);
  int64_t i = 0;
  for (; i + L <= n; i += L) {
    if (own) {
      scale = load_raw<Vec<A>>(a + i);
      shift = load_raw<Vec<A>>(b + i);
    }
    store<T, A>(out + i, keep<A>(op(load<A>(x + i), scale, shift), load_mask<A>(m + i * m_step)));
  }
  if (i == n) return;
  const int64_t rest = n - i;
  T values[L] = {}, result[L];
  uint8_t bytes[L] = {};
  A own_a[L] = {}, own_b[L] = {};
  for (int64_t k = 0; k < rest; ++k) {
    values[k] = x[i + k];
    bytes[k] = m[(i + k) * m_step];
    if (own) own_a[k] = a[i + k], own_b[k] = b[i + k];
  }
  if (own) {
    scale = load_raw<Vec<A>>(own_a);
    shift = load_raw<Vec<A>>(own_b);
  }
  store<T, A>(result, keep<A>(op(load<A>(values), scale, shift), load_mask<A>(bytes)));
  std::memcpy(out + i, result, rest * sizeof(T));
}

template <class Op, class T>
void write_gradient(const Op& op, const GradientCall& call, const Params<T>& params) {
  call.run(&gradient_run<Op>, &op, params.a.data(), params.b.data(), sizeof(Acc<T>));
}
