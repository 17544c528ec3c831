// Logsumexp and the vector norms, and their gradients. Compiled once a target, through reduce_exponentials.cpp.
#include "reduce_order.h"
#include "vector_math.h"
#if defined(MASKWISE_REDUCE_EXPONENTIALS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_REDUCE_EXPONENTIALS_H
#else
#define MASKWISE_REDUCE_EXPONENTIALS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// One pass: the sum of exp(x - peak), where the peak grows as larger values come, and the sum shrinks by as much.
template <class T>
struct LogSumExpOp : ReduceOp<LogSumExpOp<T>> {
  using In = T;
  using A = Acc<T>;
  using Out = T;
  static constexpr bool kComputeBound = true;
  static constexpr A kInf = std::numeric_limits<A>::infinity();
  struct Lanes {
    Vec<A> peak, sum;
  };
  struct State {
    double peak = -std::numeric_limits<double>::infinity();
    double sum = 0;
  };

  Lanes init() const { return {splat<A>(-kInf), Vec<A>{}}; }
  // exp(x - peak) for x <= peak; 1 where both are infinite, and a NaN stays one.
  static Vec<A> below(Vec<A> x, Vec<A> peak) {
    const Vec<A> apart = x - peak;
    return vexp_nonpositive<A>(x == peak ? Vec<A>{} : apart);
  }
  template <int R>
  void accumulate(Lanes& lanes, Vec<A> (&x)[R], const LaneMask<A> (&kept)[R], BitsOf<A>) const {
    for (int r = 0; r < R; ++r) x[r] = kept[r] ? x[r] : splat<A>(-kInf);
    Vec<A> peak = lanes.peak;
    // Of a NaN and a number it takes the second: the peak stays a number, the NaN goes into the sum.
    for (int r = 0; r < R; ++r) peak = better<true, A>(x[r], peak);
    // While all are -inf nothing must be added, so the difference is taken from any number.
    const Vec<A> from = peak == -kInf ? Vec<A>{} : peak;
    Vec<A> part[R];
    for (int r = 0; r < R; ++r) part[r] = below(x[r], from);
    lanes.sum = lanes.sum * below(lanes.peak, from) + tree<R>(part, [](Vec<A> a, Vec<A> b) { return a + b; });
    lanes.peak = peak;
  }
  void collect(State& s, const Lanes& lanes) const {
    A peak = -kInf;
    for (int i = 0; i < kLanes<A>; ++i) peak = std::max(peak, A(lanes.peak[i]));
    const Vec<A> from = splat<A>(peak == -kInf ? A(0) : peak);
    combine(s, {static_cast<double>(peak), static_cast<double>(add_lanes<A>(lanes.sum * below(lanes.peak, from)))});
  }
  State lane(const Lanes& lanes, int64_t i, int64_t) const { return {lanes.peak[i], lanes.sum[i]}; }
  void combine(State& s, const State& other) const {
    if (s.sum == 0 || other.sum == 0) {
      // A sum of 0 has accumulated nothing but -inf.
      if (s.sum == 0) s = other;
      return;
    }
    const double peak = std::max(s.peak, other.peak);
    const auto scaled = [peak](const State& part) {
      return part.peak == peak ? part.sum : part.sum * std::exp(part.peak - peak);
    };
    s = {peak, scaled(s) + scaled(other)};
  }
  Out finalize(const State& s) const { return static_cast<T>(s.sum == 0 ? s.peak : s.peak + std::log(s.sum)); }
};

// The sum of |x|^ord, for ord = 0, 1, 2 and any other.
enum class Power { zero, one, two, any };

template <class T, bool kAny>
struct Norm : ReduceOp<Norm<T, kAny>> {
  using In = T;
  // Any power goes through a logarithm, which costs float as many digits as the exponent has.
  using A = std::conditional_t<kAny && std::is_same_v<T, float>, double, Acc<T>>;
  using Out = T;
  struct Lanes {
    Vec<A> sum;
    LaneMask<A> some;
  };
  struct State {
    double sum = 0;
    bool some = false;
  };
  Power power;
  double ord;

  Lanes init() const { return {Vec<A>{}, LaneMask<A>{}}; }
  template <int R>
  void accumulate(Lanes& lanes, Vec<A> (&x)[R], const LaneMask<A> (&kept)[R], BitsOf<A>) const {
    const auto add = [](Vec<A> a, Vec<A> b) { return a + b; };
    if constexpr (kAny) {
      for (int r = 0; r < R; ++r)
        x[r] = keep<A>(vexp<A>(vlog<A>(magnitude<A>(x[r])) * static_cast<A>(ord)), kept[r]);
      lanes.some |= tree<R>(kept, [](LaneMask<A> a, LaneMask<A> b) { return a | b; });
    } else {
      for (int r = 0; r < R; ++r) x[r] = keep<A>(x[r], kept[r]);
      if (power == Power::two)
        for (int r = 0; r < R; ++r) x[r] = x[r] * x[r];
      else if (power == Power::one)
        for (int r = 0; r < R; ++r) x[r] = magnitude<A>(x[r]);
      else
        for (int r = 0; r < R; ++r) x[r] = keep<A>(splat<A>(1), x[r] != A(0));
    }
    lanes.sum += tree<R>(x, add);
  }
  void collect(State& s, const Lanes& lanes) const {
    s.sum += static_cast<double>(add_lanes<A>(lanes.sum));
    s.some |= any_lane(lanes.some);
  }
  State lane(const Lanes& lanes, int64_t i, int64_t) const {
    return {static_cast<double>(lanes.sum[i]), lanes.some[i] != 0};
  }
  void combine(State& s, const State& other) const {
    s.sum += other.sum;
    s.some |= other.some;
  }
  Out finalize(const State& s) const {
    if (kAny) return static_cast<T>(s.some ? std::pow(s.sum, 1 / ord) : 0.0);
    return static_cast<T>(power == Power::two ? std::sqrt(s.sum) : s.sum);
  }
};

inline void logsumexp(ScalarType dtype, const ReduceNest& nest, const void* x, void* out) {
  dispatch_floating(dtype, [&](auto t) { reduce(LogSumExpOp<decltype(t)>{}, nest, x, out); });
}

inline void norm(ScalarType dtype, const ReduceNest& nest, const void* x, void* out, double ord) {
  dispatch_floating(dtype, [&](auto t) {
    using T = decltype(t);
    if (std::isinf(ord)) {
      reduce(Extremum<T>{{}, Order<Acc<T>>::make(ord > 0, true, false), T(0.0f)}, nest, x, out);
    } else if (ord == 0 || ord == 1 || ord == 2) {
      const Power power = ord == 0 ? Power::zero : ord == 1 ? Power::one : Power::two;
      reduce(Norm<T, false>{{}, power, ord}, nest, x, out);
    } else {
      reduce(Norm<T, true>{{}, Power::any, ord}, nest, x, out);
    }
  });
}

// grad * exp(x - logsumexp)
template <class T>
struct LogSumExpGradient {
  using In = T;
  using A = Acc<T>;
  Vec<A> operator()(Vec<A> x, Vec<A> grad, Vec<A> out) const { return grad * vexp<A>(x - out); }
};

// grad * sign(x) * (|x| / norm)^(ord - 1), where `inverse` is 1 / norm.
template <class T>
struct Direction {
  using In = T;
  using A = Acc<T>;
  Power power;
  A exponent;
  Vec<A> operator()(Vec<A> x, Vec<A> grad, Vec<A> inverse) const {
    if (power == Power::two) return grad * (x * inverse);
    const LaneMask<A> sign = (LaneMask<A>)x & std::numeric_limits<BitsOf<A>>::min();
    // A NaN has no sign, and its gradient is NaN.
    const Vec<A> signed_grad = x != x ? x : (Vec<A>)((LaneMask<A>)grad ^ sign);
    const LaneMask<A> nonzero = x != A(0);
    if (power == Power::one) return keep<A>(signed_grad, nonzero);
    return keep<A>(signed_grad * vexp<A>(vlog<A>(magnitude<A>(x) * inverse) * exponent), nonzero);
  }
};

inline void logsumexp_backward(const GradientCall& call, const void* of) {
  dispatch_floating(call.x.scalar_type(), [&](auto t) {
    using T = decltype(t);
    const auto* grad = static_cast<const T*>(call.grad.const_data_ptr());
    Params<T> params(call.nest.slices);
    for (int64_t i = 0; i < call.nest.slices; ++i) {
      params.a[i] = static_cast<Acc<T>>(grad[i]);
      params.b[i] = static_cast<Acc<T>>(static_cast<const T*>(of)[i]);
    }
    write_gradient(LogSumExpGradient<T>{}, call, params);
  });
}

inline void norm_backward(const GradientCall& call, const void* of, double ord) {
  dispatch_floating(call.x.scalar_type(), [&](auto t) {
    using T = decltype(t);
    using A = Acc<T>;
    if (std::isinf(ord)) return share_gradient<T>(call, of, ord > 0, true);
    const auto* grad = static_cast<const T*>(call.grad.const_data_ptr());
    const Power power = ord == 1 ? Power::one : ord == 2 ? Power::two : Power::any;
    Params<T> params(call.nest.slices);
    for (int64_t i = 0; i < call.nest.slices; ++i) {
      const auto length = static_cast<double>(static_cast<const T*>(of)[i]);
      const auto g = static_cast<double>(grad[i]);
      params.a[i] = static_cast<A>(ord == 0 || (length == 0 && ord != 1) ? 0.0 : g);
      params.b[i] = static_cast<A>(length == 0 ? 1.0 : 1 / length);
    }
    write_gradient(Direction<T>{power, static_cast<A>(ord - 1)}, call, params);
  });
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
