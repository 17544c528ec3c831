// Scale and shift of kept elements, and its gradients. Compiled once a target, through norm.cpp.
#include "norm.h"
#include "simd.h"
#if defined(MASKWISE_NORM_KERNELS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_NORM_KERNELS_H
#else
#define MASKWISE_NORM_KERNELS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// Up to kLanes<A> mask bytes.
template <class A>
inline LaneMask<A> load_bits(const uint8_t* m, int64_t n) {
  uint8_t bytes[kLanes<A>] = {};
  std::memcpy(bytes, m, std::min<int64_t>(kLanes<A>, n));
  return load_mask<A>(bytes);
}

// n values of A at p, or one for all.
template <class A>
inline Vec<A> load_expanded(const A* p, bool one, int64_t i, int64_t n) {
  return one ? splat<A>(*p) : load_partial<A>(p + i, n - i, A(0));
}

// x * scale + shift where kept, 0 elsewhere. Operands: x, mask, scale, shift, result.
template <class T>
void scale_shift_run(Kept keeps, char* const* at, const int64_t* stride, int64_t n) {
  using A = Acc<T>;
  const auto* x = reinterpret_cast<const T*>(at[0]);
  const auto* m = reinterpret_cast<const uint8_t*>(at[1]);
  const auto* scale = reinterpret_cast<const A*>(at[2]);
  const auto* shift = reinterpret_cast<const A*>(at[3]);
  auto* out = reinterpret_cast<T*>(at[4]);
  const bool one = stride[2] == 0;
  for (int64_t i = 0; i < n; i += kLanes<A>) {
    const Vec<A> v = load_partial<A>(x + i, n - i, A(0)) * load_expanded<A>(scale, one, i, n) +
                     load_expanded<A>(shift, one, i, n);
    store_partial<A>(out + i, n - i, keeps == Kept::bits ? keep<A>(v, load_bits<A>(m + i, n - i)) : v);
  }
}

// grad * (x - mean), of dropped elements too: what sums it up leaves them out. Operands: x, mask, mean, grad, result.
template <class T>
void product_run(Kept, char* const* at, const int64_t* stride, int64_t n) {
  using A = Acc<T>;
  const auto* x = reinterpret_cast<const T*>(at[0]);
  const auto* mean = reinterpret_cast<const A*>(at[2]);
  const auto* grad = reinterpret_cast<const T*>(at[3]);
  auto* out = reinterpret_cast<A*>(at[4]);
  for (int64_t i = 0; i < n; i += kLanes<A>) {
    const Vec<A> centred = load_partial<A>(x + i, n - i, A(0)) - load_expanded<A>(mean, stride[2] == 0, i, n);
    store_partial<A>(out + i, n - i, centred * load_partial<A>(grad + i, n - i, A(0)));
  }
}

// The gradient in the type that it is accumulated in. Operands: grad, mask, result.
template <class T>
void widen_run(Kept, char* const* at, const int64_t*, int64_t n) {
  using A = Acc<T>;
  const auto* grad = reinterpret_cast<const T*>(at[0]);
  auto* out = reinterpret_cast<A*>(at[2]);
  for (int64_t i = 0; i < n; i += kLanes<A>)
    store_partial<A>(out + i, n - i, load_partial<A>(grad + i, n - i, A(0)));
}

// scale * (grad + shift - (x - mean) * slope) where it is kept, 0 elsewhere. Centred before it is scaled: where few are
// kept, or the mean is large beside the deviation, all but the last digits cancel. Operands: x, mask, mean, slope, scale,
// shift, grad, result.
template <class T>
void norm_gradient_run(Kept keeps, char* const* at, const int64_t* stride, int64_t n) {
  using A = Acc<T>;
  const auto* x = reinterpret_cast<const T*>(at[0]);
  const auto* m = reinterpret_cast<const uint8_t*>(at[1]);
  const auto number = [&](int o, int64_t i) {
    return load_expanded<A>(reinterpret_cast<const A*>(at[o]), stride[o] == 0, i, n);
  };
  const auto* grad = reinterpret_cast<const T*>(at[6]);
  auto* out = reinterpret_cast<T*>(at[7]);
  for (int64_t i = 0; i < n; i += kLanes<A>) {
    const Vec<A> centred = load_partial<A>(x + i, n - i, A(0)) - number(2, i);
    const Vec<A> of_grad = load_partial<A>(grad + i, n - i, A(0)) + number(5, i);
    const Vec<A> v = (of_grad - centred * number(3, i)) * number(4, i);
    store_partial<A>(out + i, n - i, keeps == Kept::bits ? keep<A>(v, load_bits<A>(m + i, n - i)) : v);
  }
}

inline NormRuns norm_runs(ScalarType dtype) {
  NormRuns runs;
  dispatch_floating(dtype, [&](auto t) {
    using T = decltype(t);
    runs = {&scale_shift_run<T>, &product_run<T>, &widen_run<T>, &norm_gradient_run<T>};
  });
  return runs;
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
