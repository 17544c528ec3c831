// standardize and its gradient. Included after normalize_kernels.h, whose square root it shares.

// What each lane has seen of a slice: how many values, one of them (the pivot), how far their mean is from it, and the
// sum of squared deviations from the mean. Large values with small differences so lose no digits; and values that are
// all equal deviate by exactly 0, or eps would blow up the noise.
template <class A>
struct Moments {
  Vec<A> count, pivot, offset, squares;

  static Vec<A> at_least_one(Vec<A> count) { return count < A(1) ? splat<A>(1) : count; }

  Vec<A> deviation(Vec<A> x) const { return (x - pivot) - offset; }

  // A group of vectors, measured from the pivot of those before it.
  template <class G>
  static Moments of(const G& group, int n, const Moments& before) {
    Moments m{{}, before.pivot, {}, {}};
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

  // Joins what others have seen. Returns by how much their mean is larger, times what both sides weigh together.
  Vec<A> join(const Moments& other) {
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
struct Standardize {
  using T = Element;
  using A = Acc<T>;
  static constexpr bool kGrad = false;
  static constexpr bool kSettles = false;
  static constexpr A kDropped = 0;
  static constexpr int kFields = 4;
  union State {
    Vec<A> field[kFields];
    Moments<A> x;  // the squares become the scale
  };

  State start() const { return {}; }

  template <class G>
  void see(State& s, const G& group, int n) const {
    s.x.join(Moments<A>::of(group, n, s.x));
  }
  void merge(State& s, const State& other) const { s.x.join(other.x); }

  // What the variance divides by. Where there are not enough values, 0: 0 / 0 is NaN, as torch.var has it.
  Vec<A> freedom(Vec<A> count) const {
    const Vec<A> left = count - correction;
    return left < A(0) ? Vec<A>{} : left;
  }
  // 1 / sqrt(variance + eps).
  Vec<A> scale(const Moments<A>& x) const {
    return A(1) / square_root<A>(x.squares / freedom(x.count) + eps);
  }
  void finish(State& s) const { s.x.squares = scale(s.x); }
  Vec<A> map(const State& s, Vec<A> x, Vec<A>) const { return s.x.deviation(x) * s.x.squares; }

  A correction;
  A eps;
};

template <class Element>
struct StandardizeBackward {
  using T = Element;
  using A = Acc<T>;
  static constexpr bool kGrad = true;
  static constexpr bool kSettles = false;
  static constexpr A kDropped = 0;
  static constexpr int kFields = 6;
  struct Seen {
    Moments<A> x;    // the squares become the scale
    Vec<A> grad;     // the mean gradient
    Vec<A> product;  // the sum of gradients, each times the deviation of x; then how far the variance pulls
  };
  union State {
    Vec<A> field[kFields];
    Seen seen;
  };

  State start() const { return {}; }

  template <class G>
  void see(State& s, const G& group, int n) const {
    State other{};
    Seen& now = other.seen;
    now.x = Moments<A>::of(group, n, s.seen.x);
    for (int k = 0; k < n; ++k) {
      now.grad += group.grad(k);
      now.product += group.only(now.x.deviation(group.x(k)) * group.grad(k), k);
    }
    now.grad /= Moments<A>::at_least_one(now.x.count);
    merge(s, other);
  }

  void merge(State& s, const State& other) const {
    Seen& mine = s.seen;
    const Vec<A> apart = other.seen.grad - mine.grad;
    const Vec<A> share = other.seen.x.count / Moments<A>::at_least_one(mine.x.count + other.seen.x.count);
    mine.product += other.seen.product + mine.x.join(other.seen.x) * apart;
    mine.grad += apart * share;
  }

  void finish(State& s) const {
    Seen& mine = s.seen;
    mine.x.squares = forward.scale(mine.x);
    mine.product = mine.product * mine.x.squares * mine.x.squares / forward.freedom(mine.x.count);
  }
  Vec<A> map(const State& s, Vec<A> x, Vec<A> g) const {
    return ((g - s.seen.grad) - s.seen.x.deviation(x) * s.seen.product) * s.seen.x.squares;
  }

  Standardize<T> forward;
};

inline void standardize(ScalarType dtype, double correction, double eps, const SliceLayout& layout, const void* x,
                        const void* mask, void* out) {
  const auto make = [&](auto t) {
    using A = Acc<decltype(t)>;
    return Standardize<decltype(t)>{static_cast<A>(correction), static_cast<A>(eps)};
  };
  walk_floating(dtype, make, layout, x, x, mask, out);
}

inline void standardize_backward(ScalarType dtype, double correction, double eps, const SliceLayout& layout,
                                 const void* x, const void* grad, const void* mask, void* out) {
  const auto make = [&](auto t) {
    using A = Acc<decltype(t)>;
    return StandardizeBackward<decltype(t)>{{static_cast<A>(correction), static_cast<A>(eps)}};
  };
  walk_floating(dtype, make, layout, x, grad, mask, out);
}
