// standardize and its gradient. Compiled once a target, through normalize.cpp.
#include "slice_kernel.h"
#if defined(MASKWISE_STANDARDIZE_KERNELS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_STANDARDIZE_KERNELS_H
#else
#define MASKWISE_STANDARDIZE_KERNELS_H
#endif

namespace maskwise::MASKWISE_TARGET {

template <class A>
inline Vec<A> square_root(Vec<A> x) {
  for (int i = 0; i < kLanes<A>; ++i) x[i] = std::sqrt(x[i]);
  return x;
}

// What each lane accumulates of a slice: how many values, one of them (the pivot), how far their mean is from it, and the
// sum of squared deviations from the mean. Large values with small differences so lose no digits; and values that are
// all equal deviate by exactly 0, or eps would blow up the noise.
template <class A>
struct LaneMoments {
  Vec<A> count, pivot, offset, squares;

  static Vec<A> at_least_one(Vec<A> count) { return count < A(1) ? splat<A>(1) : count; }

  Vec<A> deviation(Vec<A> x) const { return (x - pivot) - offset; }

  // A group of vectors, measured from the pivot of those before it.
  template <class G>
  static LaneMoments of(const G& group, int n, const LaneMoments& before) {
    LaneMoments m{{}, before.pivot, {}, {}};
    // Any kept value will do where there is no pivot yet.
    for (int k = 0; k < n; ++k) m.pivot = before.count == Vec<A>{} ? group.x_or(k, m.pivot) : m.pivot;
    for (int k = 0; k < n; ++k) {
      m.offset += group.only(group.x(k) - m.pivot, k);
      m.count += group.only(splat<A>(1), k);
    }
    m.offset /= at_least_one(m.count);
    for (int k = 0; k < n; ++k) {
      const Vec<A> off = group.only(m.deviation(group.x(k)), k);
      m.squares += off * off;
    }
    return m;
  }

  // Joins other moments. Returns by how much their mean is larger, times what both sides weigh together.
  Vec<A> join(const LaneMoments& other) {
    const Vec<A> total = count + other.count;
    const Vec<A> share = other.count / at_least_one(total);
    const LaneMask<A> first = count == Vec<A>{};
    const Vec<A> apart = (other.pivot - pivot) + (other.offset - offset);
    const Vec<A> weighed = first ? Vec<A>{} : apart * count * share;
    squares += other.squares + (first ? Vec<A>{} : apart * weighed);
    offset = first ? other.offset : offset + apart * share;
    pivot = first ? other.pivot : pivot;
    count = total;
    return weighed;
  }
};

template <class Element>
struct Standardize : SliceOp {
  using T = Element;
  using A = Acc<T>;
  static constexpr int kFields = 4;
  union State {
    Vec<A> field[kFields];
    LaneMoments<A> x;  // the squares become the scale
  };

  State init() const { return {}; }

  template <class G>
  void accumulate(State& s, const G& group, int n) const {
    s.x.join(LaneMoments<A>::of(group, n, s.x));
  }
  void combine(State& s, const State& other) const { s.x.join(other.x); }

  // What the variance divides by. Where there are not enough values, 0: 0 / 0 is NaN, as torch.var has it.
  Vec<A> freedom(Vec<A> count) const {
    const Vec<A> left = count - correction;
    return left < A(0) ? Vec<A>{} : left;
  }
  // 1 / sqrt(variance + eps).
  Vec<A> scale(const LaneMoments<A>& x) const {
    return A(1) / square_root<A>(x.squares / freedom(x.count) + eps);
  }
  void finalize(State& s) const { s.x.squares = scale(s.x); }
  Vec<A> map(const State& s, Vec<A> x, Vec<A>) const { return s.x.deviation(x) * s.x.squares; }

  A correction;
  A eps;
};

template <class Element>
struct StandardizeBackward : SliceOp {
  using T = Element;
  using A = Acc<T>;
  static constexpr bool kReadsGrad = true;
  static constexpr int kFields = 6;
  struct Sums {
    LaneMoments<A> x;    // the squares become the scale
    Vec<A> grad;     // the mean gradient
    Vec<A> product;  // the sum of gradients, each times the deviation of x; then how far the variance pulls
  };
  union State {
    Vec<A> field[kFields];
    Sums sums;
  };

  State init() const { return {}; }

  template <class G>
  void accumulate(State& s, const G& group, int n) const {
    State other{};
    Sums& now = other.sums;
    now.x = LaneMoments<A>::of(group, n, s.sums.x);
    for (int k = 0; k < n; ++k) {
      now.grad += group.grad(k);
      now.product += group.only(now.x.deviation(group.x(k)) * group.grad(k), k);
    }
    now.grad /= LaneMoments<A>::at_least_one(now.x.count);
    combine(s, other);
  }

  void combine(State& s, const State& other) const {
    Sums& mine = s.sums;
    const Vec<A> apart = other.sums.grad - mine.grad;
    const Vec<A> share = other.sums.x.count / LaneMoments<A>::at_least_one(mine.x.count + other.sums.x.count);
    mine.product += other.sums.product + mine.x.join(other.sums.x) * apart;
    mine.grad += apart * share;
  }

  void finalize(State& s) const {
    Sums& mine = s.sums;
    mine.x.squares = forward.scale(mine.x);
    mine.product = mine.product * mine.x.squares * mine.x.squares / forward.freedom(mine.x.count);
  }
  Vec<A> map(const State& s, Vec<A> x, Vec<A> g) const {
    return ((g - s.sums.grad) - s.sums.x.deviation(x) * s.sums.product) * s.sums.x.squares;
  }

  Standardize<T> forward;
};

inline void standardize(const SliceCall& call, double correction, double eps) {
  map_floating_slices(call, [&](auto t) {
    using A = Acc<decltype(t)>;
    return Standardize<decltype(t)>{{}, static_cast<A>(correction), static_cast<A>(eps)};
  });
}

inline void standardize_backward(const SliceCall& call, double correction, double eps) {
  map_floating_slices(call, [&](auto t) {
    using A = Acc<decltype(t)>;
    return StandardizeBackward<decltype(t)>{{}, {{}, static_cast<A>(correction), static_cast<A>(eps)}};
  });
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
