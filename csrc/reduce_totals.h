// Sum, product, mean, any, all. Compiled once a target, through reduce_totals.cpp.
#include "reduce_kernel.h"
#if defined(MASKWISE_REDUCE_TOTALS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_REDUCE_TOTALS_H
#else
#define MASKWISE_REDUCE_TOTALS_H
#endif

namespace maskwise::MASKWISE_TARGET {

template <class T>
struct Sum : ReduceOp<Sum<T>> {
  using In = T;
  // The narrow integers cannot leave 32 bits before the lanes are collected.
  using A = std::conditional_t<kIntegral<T> && sizeof(T) <= 2, int32_t, Acc<T>>;
  using Wide = std::conditional_t<std::is_floating_point_v<A>, double, int64_t>;
  using Out = std::conditional_t<kIntegral<T>, int64_t, T>;
  struct Lanes {
    Vec<A> sum;
  };
  struct State {
    Wide total = 0;
  };

  Lanes init() const { return {Vec<A>{}}; }
  template <int R>
  void accumulate(Lanes& lanes, Vec<A> (&x)[R], const LaneMask<A> (&kept)[R], BitsOf<A>) const {
    for (int r = 0; r < R; ++r) x[r] = keep<A>(x[r], kept[r]);
    lanes.sum += tree<R>(x, [](Vec<A> a, Vec<A> b) { return a + b; });
  }
  void collect(State& s, const Lanes& lanes) const { s.total += static_cast<Wide>(add_lanes<A>(lanes.sum)); }
  State lane(const Lanes& lanes, int64_t i, int64_t) const { return {static_cast<Wide>(lanes.sum[i])}; }
  void combine(State& s, const State& other) const { s.total += other.total; }
  Out finalize(const State& s) const { return static_cast<Out>(s.total); }
};

template <class T>
struct Mean : ReduceOp<Mean<T>> {
  using In = T;
  using A = Acc<T>;
  using Out = T;
  struct Lanes {
    Vec<A> sum;
    LaneMask<A> negative_count;  // of what is kept
  };
  struct State {
    double total = 0;
    int64_t kept = 0;
  };

  Lanes init() const { return {Vec<A>{}, LaneMask<A>{}}; }
  template <int R>
  void accumulate(Lanes& lanes, Vec<A> (&x)[R], const LaneMask<A> (&kept)[R], BitsOf<A>) const {
    for (int r = 0; r < R; ++r) x[r] = keep<A>(x[r], kept[r]);
    lanes.sum += tree<R>(x, [](Vec<A> a, Vec<A> b) { return a + b; });
    lanes.negative_count += tree<R>(kept, [](LaneMask<A> a, LaneMask<A> b) { return a + b; });
  }
  void collect(State& s, const Lanes& lanes) const {
    s.total += static_cast<double>(add_lanes<A>(lanes.sum));
    s.kept -= add_lanes<BitsOf<A>>(lanes.negative_count);
  }
  State lane(const Lanes& lanes, int64_t i, int64_t) const {
    return {static_cast<double>(lanes.sum[i]), -static_cast<int64_t>(lanes.negative_count[i])};
  }
  void combine(State& s, const State& other) const {
    s.total += other.total;
    s.kept += other.kept;
  }
  Out finalize(const State& s) const { return static_cast<Out>(s.total / static_cast<double>(s.kept)); }
};

template <class T>
struct Prod : ReduceOp<Prod<T>> {
  using In = T;
  // float is multiplied as double, so that its range is not left on the way.
  using A = std::conditional_t<sizeof(T) == 2, float, double>;
  using Out = T;
  struct Lanes {
    Vec<A> product;
  };
  struct State {
    double product = 1;
  };

  Lanes init() const { return {splat<A>(1)}; }
  template <int R>
  void accumulate(Lanes& lanes, Vec<A> (&x)[R], const LaneMask<A> (&kept)[R], BitsOf<A>) const {
    for (int r = 0; r < R; ++r) x[r] = kept[r] ? x[r] : splat<A>(1);
    lanes.product *= tree<R>(x, [](Vec<A> a, Vec<A> b) { return a * b; });
  }
  void collect(State& s, const Lanes& lanes) const {
    for (int i = 0; i < kLanes<A>; ++i) s.product *= lanes.product[i];
  }
  State lane(const Lanes& lanes, int64_t i, int64_t) const { return {static_cast<double>(lanes.product[i])}; }
  void combine(State& s, const State& other) const { s.product *= other.product; }
  Out finalize(const State& s) const { return static_cast<Out>(s.product); }
};

// Looks for something true (any) or false (all). Only bits are looked at, so one kernel serves all types of a width.
template <class T>
struct Truth : ReduceOp<Truth<T>> {
  using In = T;
  using A = T;
  using Out = uint8_t;
  struct Lanes {
    LaneMask<A> found;
  };
  struct State {
    bool found = false;
  };
  static constexpr bool kEndsEarly = true;
  bool all;
  T bits;  // those that make a value true: all, but of a floating type not the sign

  Lanes init() const { return {LaneMask<A>{}}; }
  template <int R>
  void accumulate(Lanes& lanes, Vec<A> (&x)[R], const LaneMask<A> (&kept)[R], BitsOf<A>) const {
    const LaneMask<A> flip = splat<A>(all ? A(0) : A(-1));
    LaneMask<A> found[R];
    for (int r = 0; r < R; ++r) found[r] = (((x[r] & bits) == 0) ^ flip) & kept[r];
    lanes.found |= tree<R>(found, [](LaneMask<A> a, LaneMask<A> b) { return a | b; });
  }
  void collect(State& s, const Lanes& lanes) const { s.found |= any_lane(lanes.found); }
  State lane(const Lanes& lanes, int64_t i, int64_t) const { return {lanes.found[i] != 0}; }
  void combine(State& s, const State& other) const { s.found |= other.found; }
  bool done(const State& s) const { return s.found; }
  Out finalize(const State& s) const { return s.found != all; }
};

inline void sum(ScalarType dtype, const ReduceNest& nest, const void* x, void* out) {
  dispatch_any(dtype, [&](auto t) { reduce(Sum<decltype(t)>{}, nest, x, out); });
}
inline void prod(ScalarType dtype, const ReduceNest& nest, const void* x, void* out) {
  dispatch_floating(dtype, [&](auto t) { reduce(Prod<decltype(t)>{}, nest, x, out); });
}
inline void mean(ScalarType dtype, const ReduceNest& nest, const void* x, void* out) {
  dispatch_floating(dtype, [&](auto t) { reduce(Mean<decltype(t)>{}, nest, x, out); });
}
inline void truth(ScalarType dtype, const ReduceNest& nest, const void* x, void* out, bool all) {
  const bool floating = is_floating(dtype);
  with_width(dtype, [&](auto t) {
    using T = decltype(t);
    const T bits = floating ? std::numeric_limits<T>::max() : static_cast<T>(-1);
    reduce(Truth<T>{{}, all, bits}, nest, x, out);
  });
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
