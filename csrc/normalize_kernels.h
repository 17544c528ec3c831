// normalize and its gradient. Compiled once a target, through normalize.cpp.
#include "standardize_kernels.h"
#if defined(MASKWISE_NORMALIZE_KERNELS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_NORMALIZE_KERNELS_H
#else
#define MASKWISE_NORMALIZE_KERNELS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// x to the power p, lane by lane, for the norms that are rarely used.
template <class A>
inline Vec<A> power(Vec<A> x, LaneMask<A> wanted, A p) {
  Vec<A> out = {};
  for (int i = 0; i < kLanes<A>; ++i)
    if (wanted[i]) out[i] = std::pow(x[i], p);
  return out;
}

// The p-norm of what is kept, as each lane accumulates it.
template <class A>
struct SliceNorm {
  enum class Kind { zero, one, two, largest, smallest, other };
  static constexpr A kInf = std::numeric_limits<A>::infinity();

  explicit SliceNorm(double exponent)
      : kind(exponent == 2       ? Kind::two
             : exponent == 1     ? Kind::one
             : exponent == 0     ? Kind::zero
             : exponent == kInf  ? Kind::largest
             : exponent == -kInf ? Kind::smallest
                                 : Kind::other),
        p(static_cast<A>(exponent)) {}

  Vec<A> init() const { return splat<A>(kind == Kind::smallest ? kInf : A(0)); }

  // A NaN wins over every other magnitude, as in torch.
  static Vec<A> extreme(Vec<A> a, Vec<A> b, bool largest) {
    return ((largest ? a > b : a < b) | (a != a)) ? a : b;
  }

  template <class G>
  Vec<A> accumulate(Vec<A> so_far, const G& group, int n) const {
    Vec<A> sum = {};
    switch (kind) {
      case Kind::two:
        for (int k = 0; k < n; ++k) sum += group.x(k) * group.x(k);
        return so_far + sum;
      case Kind::one:
        for (int k = 0; k < n; ++k) sum += magnitude<A>(group.x(k));
        return so_far + sum;
      case Kind::zero:
        for (int k = 0; k < n; ++k) sum += group.x(k) != Vec<A>{} ? splat<A>(1) : Vec<A>{};
        return so_far + sum;
      case Kind::largest:
      case Kind::smallest:
        for (int k = 0; k < n; ++k)
          so_far = extreme(magnitude<A>(group.x_or(k, init())), so_far, kind == Kind::largest);
        return so_far;
      case Kind::other:
        for (int k = 0; k < n; ++k) sum += power<A>(magnitude<A>(group.x(k)), group.kept(k), p);
        return so_far + sum;
    }
    return so_far;
  }

  Vec<A> combine(Vec<A> a, Vec<A> b) const {
    if (kind == Kind::largest || kind == Kind::smallest) return extreme(a, b, kind == Kind::largest);
    return a + b;
  }

  Vec<A> finalize(Vec<A> total) const {
    if (kind == Kind::two) return square_root<A>(total);
    if (kind == Kind::other) return power<A>(total, ~LaneMask<A>{}, A(1) / p);
    return total;
  }

  Kind kind;
  A p;
};

template <class Element>
struct Normalize : SliceOp {
  using T = Element;
  using A = Acc<T>;
  static constexpr int kFields = 1;
  struct State {
    Vec<A> field[kFields];  // the norm, then what to divide by
  };

  State init() const { return {{norm.init()}}; }
  template <class G>
  void accumulate(State& s, const G& group, int n) const {
    s.field[0] = norm.accumulate(s.field[0], group, n);
  }
  void combine(State& s, const State& other) const { s.field[0] = norm.combine(s.field[0], other.field[0]); }
  void finalize(State& s) const {
    const Vec<A> n = norm.finalize(s.field[0]);
    s.field[0] = n < eps ? splat<A>(eps) : n;
  }
  Vec<A> map(const State& s, Vec<A> x, Vec<A>) const { return x / s.field[0]; }

  SliceNorm<A> norm;
  A eps;
};

template <class Element>
struct NormalizeBackward : SliceOp {
  using T = Element;
  using A = Acc<T>;
  using Kind = typename SliceNorm<A>::Kind;
  static constexpr bool kReadsGrad = true;
  static constexpr int kFields = 4;
  struct State {
    // The norm; the sum of gradient times value, then how far the norm pulls; how many share an extreme; what to
    // divide by.
    Vec<A> field[kFields];
  };

  State init() const { return {{norm.init(), Vec<A>{}, Vec<A>{}, Vec<A>{}}}; }

  bool shared() const { return norm.kind == Kind::largest || norm.kind == Kind::smallest; }

  template <class G>
  void accumulate(State& s, const G& group, int n) const {
    const Vec<A> before = s.field[0];
    s.field[0] = norm.accumulate(before, group, n);
    Vec<A> dot = {};
    for (int k = 0; k < n; ++k) dot += group.x(k) * group.grad(k);
    s.field[1] += dot;
    if (!shared()) return;
    Vec<A> sharing = {};
    for (int k = 0; k < n; ++k)
      sharing += group.only(magnitude<A>(group.x(k)) == s.field[0] ? splat<A>(1) : Vec<A>{}, k);
    s.field[2] = (before == s.field[0] ? s.field[2] : Vec<A>{}) + sharing;
  }

  void combine(State& s, const State& other) const {
    const Vec<A> mine = s.field[0];
    s.field[0] = norm.combine(mine, other.field[0]);
    s.field[1] += other.field[1];
    if (!shared()) return;
    s.field[2] = (mine == s.field[0] ? s.field[2] : Vec<A>{}) + (other.field[0] == s.field[0] ? other.field[2] : Vec<A>{});
  }

  void finalize(State& s) const {
    const Vec<A> n = norm.finalize(s.field[0]);
    const Vec<A> divisor = n < eps ? splat<A>(eps) : n;
    // The norm itself has no say where eps is larger, nor where it is 0.
    Vec<A> pull = n < eps ? Vec<A>{} : s.field[1] / (divisor * divisor);
    if (norm.kind == Kind::zero) pull = Vec<A>{};
    if (shared()) pull = pull / (s.field[2] < A(1) ? splat<A>(1) : s.field[2]);
    s.field[0] = n;
    s.field[1] = pull;
    s.field[3] = divisor;
  }

  Vec<A> map(const State& s, Vec<A> x, Vec<A> g) const {
    return g / s.field[3] - s.field[1] * slope(s, x);
  }

  // How the norm grows with x.
  Vec<A> slope(const State& s, Vec<A> x) const {
    const Vec<A> zero = {}, one = splat<A>(1);
    const Vec<A> sign = x > zero ? one : (x < zero ? -one : zero);
    const Vec<A> safe = s.field[0] == zero ? one : s.field[0];
    switch (norm.kind) {
      case Kind::two: return x / safe;
      case Kind::one: return sign;
      case Kind::zero: return zero;
      case Kind::largest:
      case Kind::smallest: return magnitude<A>(x) == s.field[0] ? sign : zero;
      case Kind::other: return sign * power<A>(magnitude<A>(x) / safe, x != zero, norm.p - A(1));
    }
    return zero;
  }

  SliceNorm<A> norm;
  A eps;
};

inline void normalize(const SliceCall& call, double p, double eps) {
  map_floating_slices(call, [&](auto t) {
    using A = Acc<decltype(t)>;
    return Normalize<decltype(t)>{{}, SliceNorm<A>(p), static_cast<A>(eps)};
  });
}

inline void normalize_backward(const SliceCall& call, double p, double eps) {
  map_floating_slices(call, [&](auto t) {
    using A = Acc<decltype(t)>;
    return NormalizeBackward<decltype(t)>{{}, SliceNorm<A>(p), static_cast<A>(eps)};
  });
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
