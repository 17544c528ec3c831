// Losses of single elements. Included once a SIMD level, inside its namespace, by foreach_isa.h (through loss.cpp).
#include "slice_store.h"
#include "vector_math.h"

template <class A>
inline Vec<A> magnitude(Vec<A> v) {
  constexpr BitsOf<A> kSign = std::numeric_limits<BitsOf<A>>::min();
  return (Vec<A>)((LaneMask<A>)v & ~kSign);
}

// -1, 0 or 1; NaN for NaN, as torch's sign of a NaN difference ends up in a gradient.
template <class A>
inline Vec<A> sign(Vec<A> v) {
  const Vec<A> none = {};
  return v > none ? splat<A>(1) : (v < none ? splat<A>(-1) : v);
}

// Each loss has its value and its slope, the derivative by x. `p` is its parameter: beta, delta.
template <class A>
struct Mse {
  static Vec<A> value(Vec<A> x, Vec<A> t, A) { return (x - t) * (x - t); }
  static Vec<A> slope(Vec<A> x, Vec<A> t, A) { return A(2) * (x - t); }
};

template <class A>
struct L1 {
  static Vec<A> value(Vec<A> x, Vec<A> t, A) { return magnitude<A>(x - t); }
  static Vec<A> slope(Vec<A> x, Vec<A> t, A) { return sign<A>(x - t); }
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

// Binary cross entropy with logits: max(x, 0) - x t + log(1 + exp(-|x|)).
template <class A>
struct Logits {
  static Vec<A> value(Vec<A> x, Vec<A> t, A) {
    const Vec<A> none = {};
    const Vec<A> e = vexp<A>(-magnitude<A>(x));
    // log(1 + e) for e in [0, 1], to the last places also where 1 + e rounds: the rounding is divided out again.
    const Vec<A> one = e + A(1);
    const Vec<A> rounded = one - A(1);
    const Vec<A> log = rounded == none ? e : vlog<A>(one) * (e / rounded);
    return ((x > none ? x : (x == x ? none : x)) - x * t) + log;
  }
  static Vec<A> slope(Vec<A> x, Vec<A> t, A) {
    const Vec<A> none = {};
    const Vec<A> e = vexp<A>(-magnitude<A>(x));
    return (x < none ? e : splat<A>(1) + none) / (e + A(1)) - t;
  }
};

// n elements of x and target next to each other; m is null where all are kept.
template <class T, template <class> class Loss>
struct Elements {
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
      store<false>(out + i, v);
      return;
    }
    T rest[L];
    store<false>(rest, v);
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
             for (int k = 0; k < lanes; ++k) std::memcpy(each + k, g + (i + k) * stride, sizeof(T));
             above = load<A>(each);
           }
           put(static_cast<T*>(out), keep<A>(v * above, kept), i, lanes);
         });
  }
};

template <template <class> class Loss, class Kernel>
void loss_kernel_of(ScalarType dtype, Kernel& k) {
  const auto set = [&](auto elements) {
    using E = decltype(elements);
    k = {E::total, E::values, E::slopes};
  };
  switch (dtype) {
    case ScalarType::Float: return set(Elements<float, Loss>{});
    case ScalarType::Double: return set(Elements<double, Loss>{});
    case ScalarType::Half: return set(Elements<Half, Loss>{});
    case ScalarType::BFloat16: return set(Elements<BFloat16, Loss>{});
    default: STD_TORCH_CHECK(false, "maskwise: a loss was called with a dtype that has no kernel");
  }
}

// The codes are those of maskwise.ops.loss.registered.
template <class Kernel>
void loss_kernel(ScalarType dtype, int64_t code, Kernel& kernel) {
  switch (code) {
    case 0: return loss_kernel_of<Mse>(dtype, kernel);
    case 1: return loss_kernel_of<L1>(dtype, kernel);
    case 2: return loss_kernel_of<SmoothL1>(dtype, kernel);
    case 3: return loss_kernel_of<Huber>(dtype, kernel);
    default: return loss_kernel_of<Logits>(dtype, kernel);
  }
}
