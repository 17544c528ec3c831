// Softmax, softmin, log_softmax and their gradients. Included once a SIMD level, inside its namespace, by foreach_isa.h
// (through softmax.cpp).
#include "vector_math.h"
#include "slice_store.h"
#include "slice_walk.h"
#include "slice_columns.h"
#include "slice_settled.h"
#include "slice_dispatch.h"

// What is common to the forward passes: the largest value, and the sum of exponentials below it, in one pass. The sum is
// rescaled once a group rather than once an element.
template <class Element, bool kNegate>
struct Exponentials {
  using T = Element;
  using A = Acc<T>;
  static constexpr bool kGrad = false;
  static constexpr bool kSettles = true;
  static constexpr A kInf = std::numeric_limits<A>::infinity();
  static constexpr int kFields = 2;
  struct State {
    Vec<A> field[kFields];  // the largest value; the sum of exponentials
  };

  static State start() { return {{splat<A>(-kInf), Vec<A>{}}}; }

  static Vec<A> sign(Vec<A> x) { return kNegate ? -x : x; }

  // The value that is subtracted before exponentials are taken: 0 where there is none, as -inf less -inf is NaN.
  static Vec<A> shift(Vec<A> top) { return top == -kInf ? Vec<A>{} : top; }

  template <class G>
  static void see(State& s, const G& group, int n) {
    Vec<A> top = s.field[0];
    for (int k = 0; k < n; ++k) top = larger<A>(sign(group.x_or(k, splat<A>(kNegate ? kInf : -kInf))), top);
    const Vec<A> base = shift(top);
    Vec<A> sum = {};
    for (int k = 0; k < n; ++k)
      sum += group.only(vexp_nonpositive<A>(sign(group.x(k)) - base), k);
    s.field[1] = s.field[1] * vexp_nonpositive<A>(s.field[0] - base) + sum;
    s.field[0] = top;
  }

  template <class G>
  static void top(State& s, const G& group, int n) {
    Vec<A> top = s.field[0];
    for (int k = 0; k < n; ++k) top = larger<A>(sign(group.x_or(k, splat<A>(kNegate ? kInf : -kInf))), top);
    s.field[0] = top;
  }
  static void share_top(State& s) {
    A lanes[kLanes<A>];
    std::memcpy(lanes, &s.field[0], sizeof(lanes));
    s.field[0] = splat<A>(*std::max_element(lanes, lanes + kLanes<A>));
  }
  static Vec<A> base(const State& s) { return shift(s.field[0]); }
  static Vec<A> weigh(Vec<A> base, Vec<A> x) { return vexp_nonpositive<A>(sign(x) - base); }
  static void add(State& s, Vec<A> sum) { s.field[1] += sum; }

  static void merge(State& s, const State& other) {
    const Vec<A> top = larger<A>(s.field[0], other.field[0]);
    const Vec<A> base = shift(top);
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
  static constexpr A kDropped = 0;
  // Narrow floats would round an exponential before it is divided.
  static constexpr bool kHolds = std::is_same_v<Element, A>;

  static void finish(State& s) { s.field[1] = A(1) / s.field[1]; }
  static Vec<A> release(const State& s, Vec<A> e) { return e * s.field[1]; }
  static Vec<A> map(const State& s, Vec<A> x, Vec<A>) {
    return vexp_nonpositive<A>(Base::sign(x) - s.field[0]) * s.field[1];
  }
};

template <class T>
using Softmin = Softmax<T, true>;

template <class Element>
struct LogSoftmax : Exponentials<Element, false> {
  using Base = Exponentials<Element, false>;
  using A = typename Base::A;
  using State = typename Base::State;
  static constexpr A kDropped = -Base::kInf;
  static constexpr bool kHolds = false;

  static void finish(State& s) { s.field[1] = vlog<A>(s.field[1]); }
  // Two subtractions: the largest value plus the logarithm would round the logarithm away where values are large.
  static Vec<A> map(const State& s, Vec<A> x, Vec<A>) { return (x - s.field[0]) - s.field[1]; }
};

// Reads what the forward pass gave as x.
template <class Element, bool kNegate>
struct SoftmaxBackward {
  using T = Element;
  using A = Acc<T>;
  static constexpr bool kGrad = true;
  static constexpr bool kSettles = false;
  static constexpr A kDropped = 0;
  static constexpr int kFields = 1;
  struct State {
    Vec<A> field[kFields];  // the sum of gradients, each times its probability
  };

  static State start() { return {}; }
  template <class G>
  static void see(State& s, const G& group, int n) {
    Vec<A> sum = {};
    for (int k = 0; k < n; ++k) sum += group.x(k) * group.grad(k);
    s.field[0] += sum;
  }
  static void merge(State& s, const State& other) { s.field[0] += other.field[0]; }
  static void finish(State&) {}
  static Vec<A> map(const State& s, Vec<A> y, Vec<A> g) {
    return kNegate ? y * (s.field[0] - g) : y * (g - s.field[0]);
  }
};

template <class Element>
struct LogSoftmaxBackward {
  using T = Element;
  using A = Acc<T>;
  static constexpr bool kGrad = true;
  static constexpr bool kSettles = false;
  static constexpr A kDropped = 0;
  static constexpr int kFields = 1;
  struct State {
    Vec<A> field[kFields];  // the sum of gradients
  };

  static State start() { return {}; }
  template <class G>
  static void see(State& s, const G& group, int n) {
    Vec<A> sum = {};
    for (int k = 0; k < n; ++k) sum += group.grad(k);
    s.field[0] += sum;
  }
  static void merge(State& s, const State& other) { s.field[0] += other.field[0]; }
  static void finish(State&) {}
  static Vec<A> map(const State& s, Vec<A> y, Vec<A> g) { return g - vexp_nonpositive<A>(y) * s.field[0]; }
};

inline void softmax(ScalarType dtype, bool negate, const SliceLayout& layout, const void* x, const void* mask,
                    void* out) {
  if (negate)
    walk_floating(dtype, [](auto t) { return Softmax<decltype(t), true>{}; }, layout, x, x, mask, out);
  else
    walk_floating(dtype, [](auto t) { return Softmax<decltype(t), false>{}; }, layout, x, x, mask, out);
}

inline void log_softmax(ScalarType dtype, const SliceLayout& layout, const void* x, const void* mask, void* out) {
  walk_floating(dtype, [](auto t) { return LogSoftmax<decltype(t)>{}; }, layout, x, x, mask, out);
}

inline void softmax_backward(ScalarType dtype, bool negate, const SliceLayout& layout, const void* y, const void* grad,
                             const void* mask, void* out) {
  if (negate)
    walk_floating(dtype, [](auto t) { return SoftmaxBackward<decltype(t), true>{}; }, layout, y, grad, mask, out);
  else
    walk_floating(dtype, [](auto t) { return SoftmaxBackward<decltype(t), false>{}; }, layout, y, grad, mask, out);
}

inline void log_softmax_backward(ScalarType dtype, const SliceLayout& layout, const void* y, const void* grad,
                                 const void* mask, void* out) {
  walk_floating(dtype, [](auto t) { return LogSoftmaxBackward<decltype(t)>{}; }, layout, y, grad, mask, out);
}
