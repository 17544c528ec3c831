// Losses of single elements. Compiled once a target, through loss.cpp.
#include "vector_math.h"
#if defined(MASKWISE_LOSS_KERNELS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_LOSS_KERNELS_H
#else
#define MASKWISE_LOSS_KERNELS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// -1, 0 or 1; NaN for NaN.
template <class A>
inline Vec<A> sign(Vec<A> v) {
  const Vec<A> none = {};
  return v > none ? splat<A>(1) : (v < none ? splat<A>(-1) : v);
}

// Each loss has its value and its slope, the derivative by x. `p` is its parameter: beta, delta, eps or margin.
template <class A>
struct Mse {
  static Vec<A> value(Vec<A> x, Vec<A> t, A) { return (x - t) * (x - t); }
  static Vec<A> slope(Vec<A> x, Vec<A> t, A) { return A(2) * (x - t); }
};

template <class A>
struct L1 {
  static Vec<A> value(Vec<A> x, Vec<A> t, A) { return magnitude<A>(x - t); }
  static Vec<A> slope(Vec<A> x, Vec<A> t, A) {
    // For torch, NaN has no sign here: it is 0.
    const Vec<A> none = {}, z = x - t;
    return z == z ? sign<A>(z) : none;
  }
};

template <class A>
struct SmoothL1 {
  static Vec<A> value(Vec<A> x, Vec<A> t, A p) {
    const Vec<A> z = magnitude<A>(x - t);
    return z < p ? A(0.5) * z * z / p : z - A(0.5) * p;
  }
  static Vec<A> slope(Vec<A> x, Vec<A> t, A p) {
    const Vec<A> z = x - t;
    return magnitude<A>(z) < p ? z / p : sign<A>(z);
  }
};

template <class A>
struct Huber {
  static Vec<A> value(Vec<A> x, Vec<A> t, A p) {
    const Vec<A> z = magnitude<A>(x - t);
    return z < p ? A(0.5) * z * z : p * (z - A(0.5) * p);
  }
  static Vec<A> slope(Vec<A> x, Vec<A> t, A p) {
    const Vec<A> z = x - t;
    return magnitude<A>(z) < p ? z : p * sign<A>(z);
  }
};

// log(1 + exp(-|z|)), to the last places also where 1 + e rounds: the rounding is divided out again.
template <class A>
inline Vec<A> log1p_exp_of_minus(Vec<A> z) {
  const Vec<A> none = {};
  const Vec<A> e = vexp<A>(-magnitude<A>(z));
  const Vec<A> one = e + A(1);
  const Vec<A> rounded = one - A(1);
  return rounded == none ? e : vlog<A>(one) * (e / rounded);
}

// The larger of z and 0; NaN for NaN.
template <class A>
inline Vec<A> positive_part(Vec<A> z) {
  const Vec<A> none = {};
  return z > none ? z : (z == z ? none : z);
}

template <class A>
inline Vec<A> sigmoid(Vec<A> z) {
  const Vec<A> none = {};
  const Vec<A> e = vexp<A>(-magnitude<A>(z));
  return (z < none ? e : splat<A>(1) + none) / (e + A(1));
}

// Binary cross entropy with logits: (1 - t) x + max(-x, 0) + log(1 + exp(-|x|)).
template <class A>
struct Logits {
  static Vec<A> value(Vec<A> x, Vec<A> t, A) {
    // As torch has it, which decides what infinite logits give.
    return (A(1) - t) * x + (positive_part<A>(-x) + log1p_exp_of_minus<A>(x));
  }
  static Vec<A> slope(Vec<A> x, Vec<A> t, A) { return sigmoid<A>(x) - t; }
};

// t log t - t x, where 0 log 0 is 0.
template <class A>
struct KlDiv {
  static Vec<A> value(Vec<A> x, Vec<A> t, A) {
    const Vec<A> none = {};
    return (t == none ? none : t * vlog<A>(t)) - t * x;
  }
  static Vec<A> slope(Vec<A>, Vec<A> t, A) { return -t; }
};

// The same of a target that is a logarithm.
template <class A>
struct KlDivOfLog {
  static Vec<A> value(Vec<A> x, Vec<A> t, A) { return vexp<A>(t) * (t - x); }
  static Vec<A> slope(Vec<A>, Vec<A> t, A) { return -vexp<A>(t); }
};

// Of x as the logarithm of the rate.
template <class A>
struct PoissonOfLog {
  static Vec<A> value(Vec<A> x, Vec<A> t, A) { return rate(x) - t * x; }
  static Vec<A> slope(Vec<A> x, Vec<A> t, A) { return rate(x) - t; }

  // The comparison makes an overflow an infinity: the last product of vexp fused with a sum would stay finite.
  static Vec<A> rate(Vec<A> x) {
    const Vec<A> e = vexp<A>(x);
    return e > std::numeric_limits<A>::max() ? splat<A>(std::numeric_limits<A>::infinity()) : e;
  }
};

template <class A>
struct Poisson {
  static Vec<A> value(Vec<A> x, Vec<A> t, A p) { return x - t * vlog<A>(x + p); }
  static Vec<A> slope(Vec<A> x, Vec<A> t, A p) { return A(1) - t / (x + p); }
};

// log(1 + exp(-t x)), without torch's overflow where t x is far below 0.
template <class A>
struct SoftMargin {
  static Vec<A> value(Vec<A> x, Vec<A> t, A) {
    const Vec<A> z = -t * x;
    return positive_part<A>(z) + log1p_exp_of_minus<A>(z);
  }
  static Vec<A> slope(Vec<A> x, Vec<A> t, A) { return -t * sigmoid<A>(-t * x); }
};

// x where t is 1, max(0, p - x) where it is -1; both for any other t, as torch has it.
template <class A>
struct HingeEmbedding {
  static Vec<A> value(Vec<A> x, Vec<A> t, A p) {
    const Vec<A> none = {};
    return (t == A(1) ? none : positive_part<A>(p - x)) + (t == A(-1) ? none : x);
  }
  static Vec<A> slope(Vec<A> x, Vec<A> t, A p) {
    const Vec<A> none = {}, one = splat<A>(1);
    // At x = p torch's clamp lets the gradient through.
    return (t == A(-1) ? none : one) - ((t == A(1) ? none : (p - x >= none ? one : none)));
  }
};

// n elements of x and target next to each other; m is null where all are kept.
template <class T, template <class> class Loss>
struct LossRun {
  using A = Acc<T>;
  static constexpr int L = kLanes<A>;

  // Calls each(x, t, kept, i, lanes) for whole vectors, the last of which may be short.
  template <class Each>
  static inline void walk(const T* x, const T* t, const uint8_t* m, int64_t n, const Each& each) {
    const LaneMask<A> all = ~LaneMask<A>{};
    int64_t i = 0;
    for (; i + L <= n; i += L)
      each(load<A>(x + i), load<A>(t + i), m == nullptr ? all : load_mask<A>(m + i), i, L);
    if (i == n) return;
    T rest_x[L] = {}, rest_t[L] = {};
    uint8_t rest_m[L] = {};
    const int lanes = static_cast<int>(n - i);
    for (int k = 0; k < lanes; ++k) {
      rest_x[k] = x[i + k];
      rest_t[k] = t[i + k];
      rest_m[k] = m == nullptr ? 1 : m[i + k];
    }
    each(load<A>(rest_x), load<A>(rest_t), load_mask<A>(rest_m), i, lanes);
  }

  static double total(const void* x, const void* t, const uint8_t* m, int64_t n, double p) {
    Vec<A> sums[2] = {};
    walk(static_cast<const T*>(x), static_cast<const T*>(t), m, n,
         [&](Vec<A> a, Vec<A> b, LaneMask<A> kept, int64_t i, int) {
           // A dropped value is gone before the loss sees it, so that it costs no slow path either.
           const Vec<A> v = Loss<A>::value(keep<A>(a, kept), keep<A>(b, kept), static_cast<A>(p));
           sums[(i / L) & 1] += keep<A>(v, kept);
         });
    return static_cast<double>(add_lanes<A>(sums[0] + sums[1]));
  }

  static void put(T* out, Vec<A> v, int64_t i, int lanes) {
    if (lanes == L) {
      store(out + i, v);
      return;
    }
    T rest[L];
    store(rest, v);
    std::memcpy(out + i, rest, lanes * sizeof(T));
  }

  static void values(const void* x, const void* t, const uint8_t* m, int64_t n, double p, void* out) {
    walk(static_cast<const T*>(x), static_cast<const T*>(t), m, n,
         [&](Vec<A> a, Vec<A> b, LaneMask<A> kept, int64_t i, int lanes) {
           const Vec<A> v = Loss<A>::value(keep<A>(a, kept), keep<A>(b, kept), static_cast<A>(p));
           put(static_cast<T*>(out), keep<A>(v, kept), i, lanes);
         });
  }

  // `stride` is how far apart the elements of grad are, in bytes; 0 where it is one number for all.
  static void slopes(const void* x, const void* t, const uint8_t* m, int64_t n, double p, const void* grad,
                     int64_t stride, double scale, void* out) {
    const char* g = static_cast<const char*>(grad);
    T first;
    std::memcpy(&first, g, sizeof(T));
    const Vec<A> same = splat<A>(static_cast<A>(static_cast<double>(static_cast<A>(first)) * scale));
    walk(static_cast<const T*>(x), static_cast<const T*>(t), m, n,
         [&](Vec<A> a, Vec<A> b, LaneMask<A> kept, int64_t i, int lanes) {
           const Vec<A> v = Loss<A>::slope(keep<A>(a, kept), keep<A>(b, kept), static_cast<A>(p));
           Vec<A> above = same;
           if (stride == sizeof(T) && lanes == L) {
             above = load<A>(reinterpret_cast<const T*>(g) + i);
           } else if (stride != 0) {
             T each[L] = {};
             // Never more than L, which the compiler does not see.
             for (int k = 0; k < L && k < lanes; ++k) std::memcpy(each + k, g + (i + k) * stride, sizeof(T));
             above = load<A>(each);
           }
           put(static_cast<T*>(out), keep<A>(v * above, kept), i, lanes);
         });
  }
};

template <template <class> class Loss, class Kernel>
void loss_kernel_of(ScalarType dtype, Kernel& kernel) {
  dispatch_floating(dtype, [&](auto t) {
    using R = LossRun<decltype(t), Loss>;
    kernel = {R::total, R::values, R::slopes};
  });
}

// The codes are those of maskwise.ops.loss.registered.
template <class Kernel>
void loss_kernel(ScalarType dtype, int64_t code, Kernel& kernel) {
  switch (code) {
    case 0: return loss_kernel_of<Mse>(dtype, kernel);
    case 1: return loss_kernel_of<L1>(dtype, kernel);
    case 2: return loss_kernel_of<SmoothL1>(dtype, kernel);
    case 3: return loss_kernel_of<Huber>(dtype, kernel);
    case 4: return loss_kernel_of<Logits>(dtype, kernel);
    case 5: return loss_kernel_of<KlDiv>(dtype, kernel);
    case 6: return loss_kernel_of<KlDivOfLog>(dtype, kernel);
    case 7: return loss_kernel_of<PoissonOfLog>(dtype, kernel);
    case 8: return loss_kernel_of<Poisson>(dtype, kernel);
    case 9: return loss_kernel_of<SoftMargin>(dtype, kernel);
    default: return loss_kernel_of<HingeEmbedding>(dtype, kernel);
  }
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
