// The running sum, product and sum of exponentials, and their gradients, as folds. Compiled once a target,
// through scan.cpp.
#include "scan_extreme.h"
#include "scan_fold.h"
#include "vector_math.h"
#if defined(MASKWISE_SCAN_KERNELS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_SCAN_KERNELS_H
#else
#define MASKWISE_SCAN_KERNELS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// What a result of T is stored as: integers and bools add up to int64, as in torch.
template <class T>
using ScanOut = std::conditional_t<kIntegral<T>, int64_t, T>;

template <class T>
struct CumSum {
  using A = ScanAcc<T>;
  using In = T;
  static constexpr int kInputs = 1, kStates = 1, kOut = -1;
  static constexpr Scan scan() { return {3, 1, {sizeof(T), 1, sizeof(ScanOut<T>)}, 1, 0, -1, false}; }
  static A init(int) { return A{0}; }
  static void load_inputs(At at, int64_t i, Vec<A>* in) {
    const uint8_t* m = at.of<const uint8_t>(1) + i;
    in[0] = keep<A>(load_kept<A>(at, at.of<const T>(0) + i, m), load_mask<A>(m));
  }
  static void drop_inputs(Vec<A>, Vec<A>, Vec<A>* in) { in[0] = splat<A>(A{0}); }
  static Vec<A> accumulate(Vec<A>* s, const Vec<A>* in) { return s[0] += in[0]; }
  static void store_results(At at, int64_t i, Vec<A> v) { store(at.of<ScanOut<T>>(2) + i, v); }
};

// Operands: gradient of the result, mask, gradient of x. Each kept value is in every later sum.
template <class T>
struct CumSumBackward {
  using A = ScanAcc<T>;
  using In = T;
  static constexpr int kInputs = 1, kStates = 1, kOut = -1;
  static constexpr Scan scan() { return {3, 1, {sizeof(T), 1, sizeof(T)}, 1, -1, -1, true}; }
  static A init(int) { return A{0}; }
  static void load_inputs(At at, int64_t i, Vec<A>* in) { in[0] = load<A>(at.of<const T>(0) + i); }
  static void drop_inputs(Vec<A> grad, Vec<A>, Vec<A>* in) { in[0] = grad; }
  static Vec<A> accumulate(Vec<A>* s, const Vec<A>* in) { return s[0] += in[0]; }
  static void store_results(At at, int64_t i, Vec<A> v) {
    store(at.of<T>(2) + i, keep<A>(v, load_mask<A>(at.of<const uint8_t>(1) + i)));
  }
};

template <class T>
struct CumProd {
  using A = ScanAcc<T>;
  using In = T;
  static constexpr int kInputs = 1, kStates = 1, kOut = -1;
  static constexpr Scan scan() { return {3, 1, {sizeof(T), 1, sizeof(ScanOut<T>)}, 1, 0, -1, false}; }
  static A init(int) { return A{1}; }
  static void load_inputs(At at, int64_t i, Vec<A>* in) {
    const uint8_t* m = at.of<const uint8_t>(1) + i;
    const Vec<A> x = load_kept<A>(at, at.of<const T>(0) + i, m);
    in[0] = load_mask<A>(m) ? x : splat<A>(A{1});
  }
  static void drop_inputs(Vec<A>, Vec<A>, Vec<A>* in) { in[0] = splat<A>(A{1}); }
  static Vec<A> accumulate(Vec<A>* s, const Vec<A>* in) { return s[0] *= in[0]; }
  static void store_results(At at, int64_t i, Vec<A> v) { store(at.of<ScanOut<T>>(2) + i, v); }
};

// Operands: gradient of the result, x, mask, result, gradient of x. With P the product before k,
//   gradient of x_k = sum over j >= k of g_j * out_j, over x_k             where x_k is not 0,
//                   = P * (g_k + x_{k+1} * (g_{k+1} + x_{k+2} * (...)))    where it is.
// The second form needs no division, but may leave the range where the first does not.
template <class T>
struct CumProdBackward {
  using A = ScanAcc<T>;
  using In = T;
  using Previous = T;
  static constexpr A kBefore = 1;
  static constexpr int kInputs = 4, kStates = 3, kOut = 3;
  static constexpr Scan scan() { return {5, 1, {sizeof(T), sizeof(T), 1, sizeof(T), sizeof(T)}, 2, 1, 3, true}; }
  static A init(int k) { return k == 2 ? A{1} : A{0}; }
  static void load_inputs(At at, int64_t i, Vec<A>* in) {
    const uint8_t* m = at.of<const uint8_t>(2) + i;
    const Vec<A> x = load_kept<A>(at, at.of<const T>(1) + i, m);
    in[0] = load<A>(at.of<const T>(0) + i);
    in[1] = load_mask<A>(m) ? x : splat<A>(A{1});
    in[2] = load<A>(at.of<const T>(3) + i);
  }
  static void drop_inputs(Vec<A> grad, Vec<A> out, Vec<A>* in) {
    in[0] = grad;
    in[1] = in[3] = splat<A>(A{1});
    in[2] = out;
  }
  // States: the sum of g * out, the nested form, and x of the step after.
  static Vec<A> accumulate(Vec<A>* s, const Vec<A>* in) {
    const Vec<A> none = {};
    s[0] += in[0] * in[2];
    s[1] = s[2] == none ? in[0] : in[0] + s[2] * s[1];
    s[2] = in[1];
    return in[1] == none ? in[3] * s[1] : s[0] / in[1];
  }
  static void store_results(At at, int64_t i, Vec<A> v) {
    store(at.of<T>(4) + i, keep<A>(v, load_mask<A>(at.of<const uint8_t>(2) + i)));
  }
};

// The state is a reference m and the sum s of exp(x - m), so that the result is m + log(s). The reference moves only
// when a value is far above it; so most steps are one exponential and one addition, and nothing is rounded twice.
template <class T>
struct LogCumSumExp {
  using A = ScanAcc<T>;
  using In = T;
  static constexpr A kInf = std::numeric_limits<A>::infinity();
  static constexpr A kFar = 32;
  static constexpr int kInputs = 1, kStates = 3, kOut = -1;
  static constexpr Scan scan() { return {3, 1, {sizeof(T), 1, sizeof(T)}, 1, 0, -1, false}; }
  // The reference starts finite: a difference of two infinities would be NaN.
  static A init(int k) { return k == 0 ? std::numeric_limits<A>::lowest() : k == 1 ? A{0} : -kInf; }
  static void load_inputs(At at, int64_t i, Vec<A>* in) {
    const uint8_t* m = at.of<const uint8_t>(1) + i;
    const Vec<A> x = load_kept<A>(at, at.of<const T>(0) + i, m);
    in[0] = load_mask<A>(m) ? x : splat<A>(-kInf);
  }
  static void drop_inputs(Vec<A>, Vec<A>, Vec<A>* in) { in[0] = splat<A>(-kInf); }
  // States: the reference, the sum, and the result so far.
  static Vec<A> accumulate(Vec<A>* s, const Vec<A>* in) {
    const Vec<A> x = in[0], none = {};
    if (!any_lane(x != -kInf)) return s[2];
    // Equal infinities have no difference.
    Vec<A> d = x == s[0] ? none : x - s[0];
    const LaneMask<A> far = d > kFar;
    if (any_lane(far)) {
      s[1] = far ? s[1] * vexp_nonpositive<A>(far ? -d : none) : s[1];
      s[0] = far ? x : s[0];
      d = far ? none : d;
    }
    s[1] += vexp<A>(d);
    const Vec<A> out = s[0] + vlog<A>(s[1]);
    return s[2] = out;
  }
  static void store_results(At at, int64_t i, Vec<A> v) { store(at.of<T>(2) + i, v); }
};

// Operands: gradient of the result, x, mask, result, gradient of x. With Q_k = g_k + Q_{k+1} * exp(out_k - out_{k+1}),
// the gradient of x_k is Q_k * exp(x_k - out_k). No exponent is above 0, since results never fall.
template <class T>
struct LogCumSumExpBackward {
  using A = ScanAcc<T>;
  using In = T;
  static constexpr A kInf = std::numeric_limits<A>::infinity();
  static constexpr int kInputs = 2, kStates = 2, kOut = 3;
  static constexpr Scan scan() { return {5, 1, {sizeof(T), sizeof(T), 1, sizeof(T), sizeof(T)}, 2, 1, -1, true}; }
  static A init(int k) { return k == 0 ? A{0} : kInf; }
  static void load_inputs(At at, int64_t i, Vec<A>* in) {
    in[0] = load<A>(at.of<const T>(0) + i);
    in[1] = load<A>(at.of<const T>(3) + i);
  }
  static void drop_inputs(Vec<A> grad, Vec<A> out, Vec<A>* in) {
    in[0] = grad;
    in[1] = out;
  }
  // States: Q and the result of the step after.
  static Vec<A> accumulate(Vec<A>* s, const Vec<A>* in) {
    const LaneMask<A> same = in[1] == s[1];
    // A dropped step repeats the result: then nothing is to be scaled.
    if (any_lane(~same)) s[0] = same ? s[0] : s[0] * vexp_nonpositive<A>(in[1] - s[1]);
    s[1] = in[1];
    return s[0] += in[0];
  }
  static void store_results(At at, int64_t i, Vec<A> v) {
    const uint8_t* m = at.of<const uint8_t>(2) + i;
    const Vec<A> x = load_kept<A>(at, at.of<const T>(1) + i, m), out = load<A>(at.of<const T>(3) + i);
    // Before anything finite was kept there is nothing that x could have a part in.
    const LaneMask<A> kept = load_mask<A>(m) & (x != -kInf);
    store(at.of<T>(4) + i, any_lane(kept) ? keep<A>(v * vexp_nonpositive<A>(x - out), kept) : Vec<A>{});
  }
};

template <template <class> class F>
Scan fold_of_floating(ScalarType dtype) {
  Scan scan;
  dispatch_floating(dtype, [&](auto t) { scan = fold<F<decltype(t)>>(); });
  return scan;
}

template <template <class> class F>
Scan fold_of(ScalarType dtype) {
  Scan scan;
  dispatch_any(dtype, [&](auto t) { scan = fold<F<decltype(t)>>(); });
  return scan;
}

inline Scan cumsum(ScalarType dtype) { return fold_of<CumSum>(dtype); }
inline Scan cumsum_backward(ScalarType dtype) { return fold_of_floating<CumSumBackward>(dtype); }
inline Scan cumprod(ScalarType dtype) { return fold_of<CumProd>(dtype); }
inline Scan cumprod_backward(ScalarType dtype) { return fold_of_floating<CumProdBackward>(dtype); }
inline Scan logcumsumexp(ScalarType dtype) { return fold_of_floating<LogCumSumExp>(dtype); }
inline Scan logcumsumexp_backward(ScalarType dtype) { return fold_of_floating<LogCumSumExpBackward>(dtype); }

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
