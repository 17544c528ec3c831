// Softmax, softmin, log_softmax and their gradients. Compiled once a target, through softmax.cpp.
#include "slice_kernel.h"
#include "vector_math.h"
#if defined(MASKWISE_SOFTMAX_KERNELS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_SOFTMAX_KERNELS_H
#else
#define MASKWISE_SOFTMAX_KERNELS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// What is common to the forward passes: the largest value, and the sum of exponentials below it, in one pass. The sum is
// rescaled once a group rather than once an element.
template <class Element, bool kNegate>
struct Exponentials : SliceOp {
  using T = Element;
  using A = Acc<T>;
  static constexpr bool kThreePass = true;
  static constexpr A kInf = std::numeric_limits<A>::infinity();
  static constexpr int kFields = 2;
  struct State {
    Vec<A> field[kFields];  // the largest value; the sum of exponentials
  };

  static State init() { return {{splat<A>(-kInf), Vec<A>{}}}; }

  static Vec<A> sign(Vec<A> x) { return kNegate ? -x : x; }

  // The value that is subtracted before exponentials are taken: 0 where there is none, as -inf less -inf is NaN.
  static Vec<A> finite(Vec<A> top) { return top == -kInf ? Vec<A>{} : top; }

  template <class G>
  static void accumulate(State& s, const G& group, int n) {
    Vec<A> top = s.field[0];
    for (int k = 0; k < n; ++k) top = larger<A>(sign(group.x_or(k, splat<A>(kNegate ? kInf : -kInf))), top);
    const Vec<A> base = finite(top);
    Vec<A> sum = {};
    for (int k = 0; k < n; ++k)
      sum += group.only(vexp_nonpositive<A>(sign(group.x(k)) - base), k);
    s.field[1] = s.field[1] * vexp_nonpositive<A>(s.field[0] - base) + sum;
    s.field[0] = top;
  }

  template <class G>
  static void accumulate_max(State& s, const G& group, int n) {
    Vec<A> top = s.field[0];
    for (int k = 0; k < n; ++k) top = larger<A>(sign(group.x_or(k, splat<A>(kNegate ? kInf : -kInf))), top);
    s.field[0] = top;
  }
  static void combine_max(State& s) {
    A lanes[kLanes<A>];
    std::memcpy(lanes, &s.field[0], sizeof(lanes));
    s.field[0] = splat<A>(*std::max_element(lanes, lanes + kLanes<A>));
  }
  static Vec<A> shift(const State& s) { return finite(s.field[0]); }
  static Vec<A> exponential(Vec<A> shift, Vec<A> x) { return vexp_nonpositive<A>(sign(x) - shift); }
  static void add(State& s, Vec<A> sum) { s.field[1] += sum; }

  static void combine(State& s, const State& other) {
    const Vec<A> top = larger<A>(s.field[0], other.field[0]);
    const Vec<A> base = finite(top);
    s.field[1] = s.field[1] * vexp_nonpositive<A>(s.field[0] - base) +
                 other.field[1] * vexp_nonpositive<A>(other.field[0] - base);
    s.field[0] = top;
  }
};

// Kept values that are all -inf, or have an inf or a NaN among them, give NaN, as torch's softmax does.
template <class Element, bool kNegate>
struct Softmax : Exponentials<Element, kNegate> {
  using Base = Exponentials<Element, kNegate>;
  using A = typename Base::A;
  using State = typename Base::State;
  // Narrow floats would round an exponential before it is divided.
  static constexpr bool kHolds = std::is_same_v<Element, A>;

  static void finalize(State& s) { s.field[1] = A(1) / s.field[1]; }
  static Vec<A> scale(const State& s, Vec<A> e) { return e * s.field[1]; }
  static Vec<A> map(const State& s, Vec<A> x, Vec<A>) {
    return vexp_nonpositive<A>(Base::sign(x) - s.field[0]) * s.field[1];
  }
};

template <class Element>
struct LogSoftmax : Exponentials<Element, false> {
  using Base = Exponentials<Element, false>;
  using A = typename Base::A;
  using State = typename Base::State;
  static constexpr A kDropped = -Base::kInf;

  static void finalize(State& s) { s.field[1] = vlog<A>(s.field[1]); }
  // Two subtractions: the largest value plus the logarithm would round the logarithm away where values are large.
  static Vec<A> map(const State& s, Vec<A> x, Vec<A>) { return (x - s.field[0]) - s.field[1]; }
};

// Reads what the forward pass gave as x.
template <class Element, bool kNegate>
struct SoftmaxBackward : SliceOp {
  using T = Element;
  using A = Acc<T>;
  static constexpr bool kReadsGrad = true;
  static constexpr int kFields = 1;
  struct State {
    Vec<A> field[kFields];  // the sum of gradients, each times its probability
  };

  static State init() { return {}; }
  template <class G>
  static void accumulate(State& s, const G& group, int n) {
    Vec<A> sum = {};
    for (int k = 0; k < n; ++k) sum += group.x(k) * group.grad(k);
    s.field[0] += sum;
  }
  static void combine(State& s, const State& other) { s.field[0] += other.field[0]; }
  static void finalize(State&) {}
  static Vec<A> map(const State& s, Vec<A> y, Vec<A> g) {
    return kNegate ? y * (s.field[0] - g) : y * (g - s.field[0]);
  }
};

template <class Element>
struct LogSoftmaxBackward : SliceOp {
  using T = Element;
  using A = Acc<T>;
  static constexpr bool kReadsGrad = true;
  static constexpr int kFields = 1;
  struct State {
    Vec<A> field[kFields];  // the sum of gradients
  };

  static State init() { return {}; }
  template <class G>
  static void accumulate(State& s, const G& group, int n) {
    Vec<A> sum = {};
    for (int k = 0; k < n; ++k) sum += group.grad(k);
    s.field[0] += sum;
  }
  static void combine(State& s, const State& other) { s.field[0] += other.field[0]; }
  static void finalize(State&) {}
  static Vec<A> map(const State& s, Vec<A> y, Vec<A> g) { return g - vexp_nonpositive<A>(y) * s.field[0]; }
};

inline void softmax(const SliceCall& call, bool negate) {
  if (negate)
    map_floating_slices(call, [](auto t) { return Softmax<decltype(t), true>{}; });
  else
    map_floating_slices(call, [](auto t) { return Softmax<decltype(t), false>{}; });
}

inline void log_softmax(const SliceCall& call) {
  map_floating_slices(call, [](auto t) { return LogSoftmax<decltype(t)>{}; });
}

inline void softmax_backward(const SliceCall& call, bool negate) {
  if (negate)
    map_floating_slices(call, [](auto t) { return SoftmaxBackward<decltype(t), true>{}; });
  else
    map_floating_slices(call, [](auto t) { return SoftmaxBackward<decltype(t), false>{}; });
}

inline void log_softmax_backward(const SliceCall& call) {
  map_floating_slices(call, [](auto t) { return LogSoftmaxBackward<decltype(t)>{}; });
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
