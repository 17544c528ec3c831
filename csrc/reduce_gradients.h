// Gradients of reductions: each element of x by two numbers that its output gives, exactly 0 where dropped.
//
// A gradient is a struct Op with In, A, and operator()(x, a, b) -> the gradient, all of them vectors of A.
#include "reduce_loops.h"
#include "simd.h"
#if defined(MASKWISE_REDUCE_GRADIENTS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_REDUCE_GRADIENTS_H
#else
#define MASKWISE_REDUCE_GRADIENTS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// The two numbers of each output.
template <class T>
struct Params {
  std::vector<Acc<T>> a, b;
  explicit Params(int64_t outputs) : a(outputs), b(outputs) {}
};

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
    store(out + i, keep<A>(op(load<A>(x + i), scale, shift), load_mask<A>(m + i * m_step)));
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
  store(result, keep<A>(op(load<A>(values), scale, shift), load_mask<A>(bytes)));
  std::memcpy(out + i, result, rest * sizeof(T));
}

template <class Op, class T>
void write_gradient(const Op& op, const GradientCall& call, const Params<T>& params) {
  call.run(&gradient_run<Op>, &op, params.a.data(), params.b.data(), sizeof(Acc<T>));
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
