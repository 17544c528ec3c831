// Variance and standard deviation, and their gradient. Compiled once a target, through reduce_moments.cpp.
#include "reduce_gradients.h"
#include "reduce_kernel.h"
#if defined(MASKWISE_REDUCE_MOMENTS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_REDUCE_MOMENTS_H
#else
#define MASKWISE_REDUCE_MOMENTS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// What is known of a set of values: how many, their mean, and the squares of their distances from it.
struct Moments {
  double kept = 0;
  double mean = 0;
  double squares = 0;
};

// Joins two sets (Chan, Golub and LeVeque): no difference of large numbers is taken, so nothing cancels.
inline void join(Moments& a, const Moments& b) {
  if (b.kept == 0) return;
  if (a.kept == 0) {
    a = b;
    return;
  }
  const double kept = a.kept + b.kept;
  const double apart = b.mean - a.mean;
  const double share = b.kept / kept;
  a.mean += apart * share;
  a.squares += b.squares + apart * apart * a.kept * share;
  a.kept = kept;
}

// Finish: what becomes of the moments of an output. A struct with Out, operator()(const Moments&) -> Out, and
// plausible(out): whether float32 could hold what it was made of.
template <class T, class Finish>
struct Var : ReduceOp<Var<T, Finish>> {
  using In = T;
  using A = Acc<T>;
  using Out = typename Finish::Out;
  // The mean is that of the distances from a pivot, one of the lane's kept values: far from zero, a mean in float32 would
  // lose what the variance is made of.
  struct Lanes {
    Vec<A> kept, mean, squares, pivot;
  };
  using State = Moments;
  Finish finish;

  Lanes init() const { return {Vec<A>{}, Vec<A>{}, Vec<A>{}, Vec<A>{}}; }
  // The R values of each lane are a set with moments of its own, which then joins those before it.
  template <int R>
  void accumulate(Lanes& lanes, Vec<A> (&x)[R], const LaneMask<A> (&kept)[R], BitsOf<A>) const {
    const auto add = [](auto a, auto b) { return a + b; };
    const LaneMask<A> fresh = lanes.kept == Vec<A>{};
    if (any_lane(fresh))
      for (int r = 0; r < R; ++r) lanes.pivot = (LaneMask<A>)(kept[r] & fresh) ? x[r] : lanes.pivot;
    Vec<A> part[R];
    for (int r = 0; r < R; ++r) part[r] = keep<A>(x[r] - lanes.pivot, kept[r]);
    const Vec<A> count = -__builtin_convertvector(tree<R>(kept, add), Vec<A>);
    const Vec<A> one = splat<A>(1);
    const Vec<A> mean = tree<R>(part, add) / (count > one ? count : one);
    for (int r = 0; r < R; ++r) {
      const Vec<A> apart = keep<A>(part[r] - mean, kept[r]);
      part[r] = apart * apart;
    }
    const Vec<A> total = lanes.kept + count;
    const Vec<A> share = count / (total > one ? total : one);
    const Vec<A> apart = mean - lanes.mean;
    // In this order the product is 0, and not inf * 0, while nothing was accumulated before.
    lanes.squares += tree<R>(part, add) + (apart * share) * (apart * lanes.kept);
    lanes.mean += apart * share;
    lanes.kept = total;
  }
  static double mean_of(const Lanes& lanes, int64_t i) {
    return static_cast<double>(lanes.pivot[i]) + static_cast<double>(lanes.mean[i]);
  }
  void collect(State& s, const Lanes& lanes) const {
    Moments all;
    double sum = 0;
    for (int i = 0; i < kLanes<A>; ++i) {
      all.kept += lanes.kept[i];
      sum += static_cast<double>(lanes.kept[i]) * mean_of(lanes, i);
    }
    if (all.kept == 0) return;
    all.mean = sum / all.kept;
    for (int i = 0; i < kLanes<A>; ++i) {
      if (lanes.kept[i] == 0) continue;
      const double apart = mean_of(lanes, i) - all.mean;
      all.squares += lanes.squares[i] + lanes.kept[i] * apart * apart;
    }
    join(s, all);
  }
  State lane(const Lanes& lanes, int64_t i, int64_t) const {
    return {lanes.kept[i], mean_of(lanes, i), lanes.squares[i]};
  }
  void combine(State& s, const State& other) const { join(s, other); }
  Out finalize(const State& s) const { return finish(s); }
};

// The same in float64 and plainly, for the few outputs whose squares leave the range of float32.
template <class T>
void accumulate_wide(const void*, void* state, const void* values, const uint8_t* m, int64_t n, int64_t) {
  const auto* x = static_cast<const T*>(values);
  Moments all;
  for (int64_t i = 0; i < n; ++i) {
    if (m != nullptr && m[i] == 0) continue;
    all.kept += 1;
    all.mean += static_cast<double>(x[i]);
  }
  if (all.kept == 0) return;
  all.mean /= all.kept;
  for (int64_t i = 0; i < n; ++i) {
    if (m != nullptr && m[i] == 0) continue;
    const double apart = static_cast<double>(x[i]) - all.mean;
    all.squares += apart * apart;
  }
  join(*static_cast<Moments*>(state), all);
}

// Reduces, and does again what float32 could not hold: values beyond 1e19 have squares of inf, those below 1e-19 of 0.
template <class T, class Finish>
void reduce_moments(const Finish& finish, const ReduceNest& nest, const void* x, void* out) {
  reduce(Var<T, Finish>{{}, finish}, nest, x, out);
  if constexpr (std::is_same_v<Acc<T>, float>) {
    Reduction wide{};
    wide.in_bytes = sizeof(T);
    wide.accumulate = &accumulate_wide<T>;
    auto* results = static_cast<typename Finish::Out*>(out);
    parallel(nest.slices, nest.length, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        if (finish.plausible(results[r])) continue;
        Moments s;
        accumulate_range(wide, &s, nest, static_cast<const char*>(x), offset_of(nest.outer, r), 0, nest.length);
        results[r] = finish(s);
      }
    });
  }
}

// Whether a sum of squares, or their mean, can have been taken in float32 without harm.
inline bool in_range(double squares) { return squares > 1e-30 && squares <= std::numeric_limits<double>::max(); }

template <class T>
struct Variance {
  using Out = T;
  double correction;
  bool root;
  bool plausible(T found) const {
    const double value = static_cast<double>(found);
    return in_range(root ? value * value : value);
  }
  T operator()(const Moments& s) const {
    if (s.kept == 0) return static_cast<T>(std::numeric_limits<float>::quiet_NaN());
    const double var = s.squares / std::max(0.0, s.kept - correction);
    return static_cast<T>(root ? std::sqrt(var) : var);
  }
};

struct RawMoments {
  using Out = Moments;
  bool plausible(const Moments& s) const { return in_range(s.squares); }
  Moments operator()(const Moments& s) const { return s; }
};

inline void var(ScalarType dtype, const ReduceNest& nest, const void* x, void* out, double correction,
                bool root) {
  dispatch_floating(dtype, [&](auto t) {
    using T = decltype(t);
    reduce_moments<T>(Variance<T>{correction, root}, nest, x, out);
  });
}

// How many are kept, their mean, and the mean of squared distances from it: int64, and twice the type of the arithmetic.
// 0 where nothing is kept.
inline void moments(ScalarType dtype, const ReduceNest& nest, const void* x, int64_t* count, void* mean, void* var) {
  dispatch_floating(dtype, [&](auto t) {
    using T = decltype(t);
    std::vector<Moments> found(nest.slices);
    reduce_moments<T>(RawMoments{}, nest, x, found.data());
    for (int64_t i = 0; i < nest.slices; ++i) {
      count[i] = static_cast<int64_t>(found[i].kept);
      static_cast<Acc<T>*>(mean)[i] = static_cast<Acc<T>>(found[i].mean);
      static_cast<Acc<T>*>(var)[i] = static_cast<Acc<T>>(found[i].squares / std::max(1.0, found[i].kept));
    }
  });
}

// scale * (x - mean), where scale is grad * 2 / (n - correction), for the root over 2 std.
template <class T>
struct Distance {
  using In = T;
  using A = Acc<T>;
  Vec<A> operator()(Vec<A> x, Vec<A> scale, Vec<A> mean) const { return scale * (x - mean); }
};

inline void var_backward(const GradientCall& call, double correction, bool root) {
  dispatch_floating(call.x.scalar_type(), [&](auto t) {
    using T = decltype(t);
    const int64_t outputs = call.nest.slices;
    const auto* grad = static_cast<const T*>(call.grad.const_data_ptr());
    std::vector<Moments> moments(outputs);
    reduce_moments<T>(RawMoments{}, call.nest, call.x.const_data_ptr(), moments.data());
    Params<T> params(outputs);
    for (int64_t i = 0; i < outputs; ++i) {
      const double freedom = std::max(0.0, moments[i].kept - correction);
      const double g = static_cast<double>(grad[i]);
      const double std = std::sqrt(moments[i].squares / freedom);
      params.a[i] = static_cast<Acc<T>>(!root ? 2 * g / freedom : std == 0 ? 0 : g / (freedom * std));
      params.b[i] = static_cast<Acc<T>>(moments[i].mean);
    }
    write_gradient(Distance<T>{}, call, params);
  });
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
