// The extrema, where they are, and their gradient. Compiled once a target, through reduce_extrema.cpp.
#include "reduce_order.h"
#if defined(MASKWISE_REDUCE_EXTREMA_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_REDUCE_EXTREMA_H
#else
#define MASKWISE_REDUCE_EXTREMA_H
#endif

namespace maskwise::MASKWISE_TARGET {

// Where the extremum is.
template <class T>
struct Position : ReduceOp<Position<T>> {
  using In = T;
  using A = Compared<T>;
  using Out = int64_t;
  // The positions in the lanes must fit the narrowest of them.
  static constexpr int64_t kPeriod = 64;
  static constexpr bool kPositions = true;
  struct Lanes {
    Vec<A> least;
    LaneMask<A> where;  // -1 while nothing was kept
  };
  struct State {
    A least = Order<A>::last();
    int64_t where = -1;
  };
  Order<A> order;

  Lanes init() const { return {splat<A>(Order<A>::last()), ~LaneMask<A>{}}; }
  template <int R>
  void accumulate(Lanes& lanes, Vec<A> (&x)[R], const LaneMask<A> (&kept)[R], BitsOf<A> first) const {
    for (int r = 0; r < R; ++r) {
      const Vec<A> key = order.key(x[r]);
      // Once a NaN is there nothing is less than it, so the first of them stays.
      const LaneMask<A> less = (key < lanes.least) | (is_nan<A>(key) & ~is_nan<A>(lanes.least)) | (lanes.where < 0);
      const LaneMask<A> take = less & kept[r];
      lanes.least = take ? key : lanes.least;
      lanes.where = take ? splat<BitsOf<A>>(BitsOf<A>(first + r)) : lanes.where;
    }
  }
  // Finds the extremum of a chunk, and only if it is a new one, looks where it was.
  void run(State& s, const T* x, const uint8_t* m, int64_t n, int64_t at, int64_t beyond, Ahead* ahead) const {
    for (int64_t i = 0; i < n; i += kChunk) {
      const int64_t count = std::min(kChunk, n - i);
      const uint8_t* kept = m == nullptr ? nullptr : m + i;
      typename Extremum<T>::State chunk;
      accumulate_run(Extremum<T>{{}, order, T(0)}, chunk, x + i, kept, count, n - i - count + beyond, ahead);
      const A least = chunk.nan ? std::numeric_limits<A>::quiet_NaN() : chunk.least;
      if (chunk.some && wins(least, s))
        s = {least, at + i + find(x + i, kept == nullptr ? kAllKept.bytes : kept, count, least)};
    }
  }
  // The first kept position of `least`; it is there.
  __attribute__((noinline)) int64_t find(const T* x, const uint8_t* m, int64_t n, A least) const {
    constexpr int L = kLanes<A>;
    const bool nan = least != least;
    const auto hit = [&](Vec<A> key, LaneMask<A> kept) {
      return (nan ? is_nan<A>(key) : (LaneMask<A>)(key == least)) & kept;
    };
    int64_t i = 0;
    for (; i + L <= n; i += L)
      if (!none_of<L>(m + i) && any_lane(hit(order.key(load<A>(x + i)), load_mask<A>(m + i)))) break;
    for (; i < n; ++i)
      if (m[i] && hit(order.key(splat<A>(static_cast<A>(x[i]))), ~LaneMask<A>{})[0]) break;
    return i;
  }
  static bool wins(A least, const State& s) {
    return s.where < 0 || least < s.least || (least != least && s.least == s.least);
  }
  void collect(State&, const Lanes&) const {}
  State lane(const Lanes& lanes, int64_t i, int64_t base) const {
    return {lanes.least[i], lanes.where[i] < 0 ? int64_t{-1} : base + lanes.where[i]};
  }
  void combine(State& s, const State& other) const {
    if (other.where >= 0 && wins(other.least, s)) s = other;
  }
  Out finalize(const State& s) const { return s.where; }
};

inline void extremum(ScalarType dtype, const ReduceNest& nest, const void* x, void* out, bool greatest) {
  with_order(dtype, [&](auto t) {
    using T = decltype(t);
    using A = Compared<T>;
    const auto order = Order<A>::make(greatest, false, is_unsigned(dtype));
    // Of bools the last is not the last of the bytes.
    const T empty = dtype == ScalarType::Bool ? T(greatest ? 0.0f : 1.0f) : static_cast<T>(order.value(Order<A>::last()));
    reduce(Extremum<T>{{}, order, empty}, nest, x, out);
  });
}

inline void position(ScalarType dtype, const ReduceNest& nest, const void* x, void* out, bool greatest) {
  with_order(dtype, [&](auto t) {
    using T = decltype(t);
    reduce(Position<T>{{}, Order<Compared<T>>::make(greatest, false, is_unsigned(dtype))}, nest, x, out);
  });
}

inline void extremum_backward(const GradientCall& call, const void* of, bool greatest) {
  dispatch_floating(call.x.scalar_type(), [&](auto t) { share_gradient<decltype(t)>(call, of, greatest, false); });
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
