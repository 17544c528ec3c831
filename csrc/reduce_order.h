// The keys by which extrema compare values, so that one kernel serves the greatest, the least, and the magnitudes of
// both: (x & bits) ^ flip, of which the least is looked for; the extremum by such a key, and its gradient.
#include "reduce_gradients.h"
#include "reduce_kernel.h"
#if defined(MASKWISE_REDUCE_ORDER_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_REDUCE_ORDER_H
#else
#define MASKWISE_REDUCE_ORDER_H
#endif

namespace maskwise::MASKWISE_TARGET {

// A is float, double or a signed integer. Complementing an integer reverses its order, as does the sign of a float;
// flipping the top bit of an unsigned integer makes it a signed one of the same order.
template <class A>
struct Order {
  using Bits = BitsOf<A>;
  static constexpr bool kFloating = std::is_floating_point_v<A>;
  Bits bits = Bits(-1);
  Bits flip = 0;

  static Order make(bool greatest, bool magnitudes, bool is_unsigned) {
    Order order;
    constexpr Bits kTop = std::numeric_limits<Bits>::min();
    if (magnitudes) order.bits = std::numeric_limits<Bits>::max();
    if (greatest) order.flip = kFloating ? kTop : Bits(-1);
    if (is_unsigned) order.flip = Bits(order.flip ^ kTop);
    return order;
  }
  Vec<A> key(Vec<A> x) const { return (Vec<A>)(((LaneMask<A>)x & bits) ^ flip); }
  // Back to a value of x: the same again, but the sign that a magnitude lost.
  A value(A key) const {
    Bits raw;
    std::memcpy(&raw, &key, sizeof(A));
    raw = Bits(raw ^ flip);
    std::memcpy(&key, &raw, sizeof(A));
    return key;
  }
  // What no key is above.
  static constexpr A last() {
    return kFloating ? std::numeric_limits<A>::infinity() : std::numeric_limits<A>::max();
  }
};

// The lanes in which x is no number. Integers always are.
template <class A>
inline LaneMask<A> is_nan(Vec<A> x) {
  if constexpr (std::is_floating_point_v<A>) return x != x;
  else return LaneMask<A>{};
}

// The types in which the extrema are looked for: the integers by their width alone, bools as 0 and 1.
template <class T>
using Compared = std::conditional_t<std::is_same_v<T, Bool>, int8_t, std::conditional_t<std::is_integral_v<T>, T, Acc<T>>>;

// Calls call(T{}) for the dtype: a floating type, bool, or the signed integer that is as wide.
template <class Call>
void with_order(ScalarType dtype, const Call& call) {
  if (is_floating(dtype)) return dispatch_floating(dtype, call);
  if (dtype == ScalarType::Bool) return call(Bool{});
  with_width(dtype, call);
}
inline bool is_unsigned(ScalarType dtype) { return dtype == ScalarType::Byte; }

// The extremum, in an order.
template <class T>
struct Extremum : ReduceOp<Extremum<T>> {
  using In = T;
  using A = Compared<T>;
  using Out = T;
  static constexpr int64_t kPeriod = 1024;
  struct Lanes {
    Vec<A> least;
    LaneMask<A> nan, some;
  };
  struct State {
    A least = Order<A>::last();
    bool nan = false;
    bool some = false;
  };
  Order<A> order;
  T empty;

  Lanes init() const { return {splat<A>(Order<A>::last()), LaneMask<A>{}, LaneMask<A>{}}; }
  template <int R>
  void accumulate(Lanes& lanes, Vec<A> (&x)[R], const LaneMask<A> (&kept)[R], BitsOf<A>) const {
    const Vec<A> last = splat<A>(Order<A>::last());
    LaneMask<A> nan[R];
    for (int r = 0; r < R; ++r) {
      nan[r] = is_nan<A>(x[r]) & kept[r];
      x[r] = kept[r] ? order.key(x[r]) : last;
    }
    // Of a NaN and a number this takes the second, of which there always is one: it must not win here.
    lanes.least = better<false, A>(tree<R>(x, [](Vec<A> a, Vec<A> b) { return better<false, A>(a, b); }), lanes.least);
    lanes.nan |= tree<R>(nan, [](LaneMask<A> a, LaneMask<A> b) { return a | b; });
    lanes.some |= tree<R>(kept, [](LaneMask<A> a, LaneMask<A> b) { return a | b; });
  }
  void collect(State& s, const Lanes& lanes) const {
    for (int i = 0; i < kLanes<A>; ++i) s.least = std::min<A>(s.least, lanes.least[i]);
    s.nan |= any_lane(lanes.nan);
    s.some |= any_lane(lanes.some);
  }
  State lane(const Lanes& lanes, int64_t i, int64_t) const {
    return {lanes.least[i], lanes.nan[i] != 0, lanes.some[i] != 0};
  }
  void combine(State& s, const State& other) const {
    s.least = std::min<A>(s.least, other.least);
    s.nan |= other.nan;
    s.some |= other.some;
  }
  Out finalize(const State& s) const {
    if (s.nan) return static_cast<T>(std::numeric_limits<float>::quiet_NaN());
    return s.some ? static_cast<T>(order.value(s.least)) : empty;
  }
};

// The gradient of an extremum, of values or of magnitudes: an equal part to all that reach it.

// How many equal the extremum.
template <class T>
struct Ties : ReduceOp<Ties<T>> {
  using In = T;
  using A = Acc<T>;
  using Out = double;
  struct Lanes {
    Vec<A> least, ties;
  };
  struct State {
    A least = Order<A>::last();
    double ties = 0;
  };
  Order<A> order;

  Lanes init() const { return {splat<A>(Order<A>::last()), Vec<A>{}}; }
  template <int R>
  void accumulate(Lanes& lanes, Vec<A> (&x)[R], const LaneMask<A> (&kept)[R], BitsOf<A>) const {
    const Vec<A> one = splat<A>(1);
    Vec<A> least = lanes.least;
    for (int r = 0; r < R; ++r) {
      x[r] = kept[r] ? order.key(x[r]) : splat<A>(Order<A>::last());
      least = better<false, A>(x[r], least);
    }
    // A new least starts the count again.
    lanes.ties = keep<A>(lanes.ties, least == lanes.least);
    lanes.least = least;
    Vec<A> equal[R];
    for (int r = 0; r < R; ++r) equal[r] = keep<A>(one, (x[r] == least) & kept[r]);
    lanes.ties += tree<R>(equal, [](Vec<A> a, Vec<A> b) { return a + b; });
  }
  void collect(State& s, const Lanes& lanes) const {
    for (int i = 0; i < kLanes<A>; ++i) combine(s, lane(lanes, i, 0));
  }
  State lane(const Lanes& lanes, int64_t i, int64_t) const { return {lanes.least[i], lanes.ties[i]}; }
  void combine(State& s, const State& other) const {
    if (other.least < s.least) s = other;
    else if (other.least == s.least) s.ties += other.ties;
  }
  Out finalize(const State& s) const { return s.ties; }
};

// `share` to what equals the extremum, with the sign of x where it is one of magnitudes. A NaN equals nothing: then the
// share is NaN, and goes to all.
template <class T>
struct Share {
  using In = T;
  using A = Acc<T>;
  bool magnitudes;
  Vec<A> operator()(Vec<A> x, Vec<A> share, Vec<A> extremum) const {
    const LaneMask<A> all = extremum != extremum;
    if (!magnitudes) return keep<A>(share, (x == extremum) | all);
    const LaneMask<A> sign = (LaneMask<A>)x & std::numeric_limits<BitsOf<A>>::min();
    const Vec<A> signed_share = (Vec<A>)((LaneMask<A>)share ^ sign);
    return keep<A>(signed_share, ((magnitude<A>(x) == extremum) & (x != A(0))) | all);
  }
};

template <class T>
void share_gradient(const GradientCall& call, const void* of, bool greatest, bool magnitudes) {
  const int64_t outputs = call.nest.slices;
  const auto* grad = static_cast<const T*>(call.grad.const_data_ptr());
  std::vector<double> ties(outputs);
  reduce(Ties<T>{{}, Order<Acc<T>>::make(greatest, magnitudes, false)}, call.nest, call.x.const_data_ptr(),
         ties.data());
  Params<T> params(outputs);
  for (int64_t i = 0; i < outputs; ++i) {
    params.b[i] = static_cast<Acc<T>>(static_cast<const T*>(of)[i]);
    const bool nan = params.b[i] != params.b[i];
    const auto g = static_cast<double>(grad[i]);
    params.a[i] = static_cast<Acc<T>>(nan ? std::numeric_limits<double>::quiet_NaN() : g / ties[i]);
  }
  write_gradient(Share<T>{magnitudes}, call, params);
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
