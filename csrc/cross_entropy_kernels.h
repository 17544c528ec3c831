// Cross entropy of positions with a row of classes each. Compiled once a target, through cross_entropy.cpp.
#include "cross_entropy.h"
#include "vector_math.h"
#if defined(MASKWISE_CROSS_ENTROPY_KERNELS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_CROSS_ENTROPY_KERNELS_H
#else
#define MASKWISE_CROSS_ENTROPY_KERNELS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// What each lane accumulates of a row: the largest element, the sum of exponentials relative to it, the sum.
template <class A>
struct ClassSums {
  static constexpr A kLeast = -std::numeric_limits<A>::infinity();
  Vec<A> top = splat<A>(kLeast), exponentials = {}, total = {};

  // A row of which all is -inf so far must not become NaN by -inf - -inf: more may come.
  static Vec<A> finite(Vec<A> v) { return v == kLeast ? Vec<A>{} : v; }

  // Accumulates n vectors, from registers: they are needed twice, and memory may have given them slowly.
  void accumulate(const Vec<A>* v, int n) {
    Vec<A> higher = top;
    for (int k = 0; k < n; ++k) higher = larger<A>(v[k], higher);
    const Vec<A> shift = finite(higher);
    Vec<A> more = {};
    for (int k = 0; k < n; ++k) more += vexp_nonpositive<A>(v[k] - shift);
    exponentials = exponentials * vexp_nonpositive<A>(top - shift) + more;
    top = higher;
  }
};

template <class T>
struct CrossEntropy {
  using A = Acc<T>;
  static constexpr int L = kLanes<A>;
  static constexpr int kGroup = 8;

  static double element(const void* x, int64_t i) {
    return static_cast<double>(static_cast<A>(static_cast<const T*>(x)[i]));
  }

  // The log of the sum of exponentials of n classes next to each other, and their sum.
  static void row(const void* row, int64_t n, double* log_sum, double* total) {
    const T* x = static_cast<const T*>(row);
    ClassSums<A> state;
    Vec<A> v[kGroup];
    int64_t i = 0;
    for (; i + kGroup * L <= n; i += kGroup * L) {
      for (int k = 0; k < kGroup; ++k) {
        v[k] = load<A>(x + i + k * L);
        state.total += v[k];
      }
      state.accumulate(v, kGroup);
    }
    int vectors = 0;
    for (; i < n; i += L) {
      const Vec<A> some = load_partial<A>(x + i, n - i, ClassSums<A>::kLeast);
      state.total += keep<A>(some, first_lanes<A>(n - i));
      v[vectors++] = some;
    }
    if (vectors) state.accumulate(v, vectors);
    const A top = max_lanes<A>(state.top);
    const Vec<A> parts = state.exponentials * vexp_nonpositive<A>(state.top - ClassSums<A>::finite(splat<A>(top)));
    *log_sum = static_cast<double>(top) + std::log(static_cast<double>(add_lanes<A>(parts)));
    *total = static_cast<double>(add_lanes<A>(state.total));
  }

  // The same for `width` positions next to each other, whose classes are `step` elements apart. Vectors of positions
  // of which none counts are never read.
  static void columns(const void* block, int64_t n, int64_t step, int64_t width, const uint8_t* counts,
                      double* log_sums, double* totals) {
    const T* x = static_cast<const T*>(block);
    ClassSums<A> state[kPositions / L];
    int64_t active[kPositions / L];
    const int vectors = active_vectors(counts, width, active);
    for (int64_t i = 0; i < n; i += kGroup) {
      const int group = static_cast<int>(std::min<int64_t>(kGroup, n - i));
      for (int a = 0; a < vectors; ++a) {
        Vec<A> v[kGroup];
        for (int k = 0; k < group; ++k) {
          v[k] = load_partial<A>(x + (i + k) * step + active[a], width - active[a], A(0));
          state[a].total += v[k];
        }
        state[a].accumulate(v, group);
      }
    }
    for (int a = 0; a < vectors; ++a) {
      const Vec<A> log = vlog<A>(state[a].exponentials);
      for (int64_t k = 0; k < L && active[a] + k < width; ++k) {
        log_sums[active[a] + k] = static_cast<double>(state[a].top[k]) + static_cast<double>(log[k]);
        totals[active[a] + k] = static_cast<double>(state[a].total[k]);
      }
    }
  }

  // The first positions of the vectors of which some position counts; returns how many they are.
  static int active_vectors(const uint8_t* counts, int64_t width, int64_t* active) {
    int vectors = 0;
    for (int64_t p = 0; p < width; p += L) {
      uint8_t any = 0;
      for (int64_t k = p; k < std::min<int64_t>(p + L, width); ++k) any |= counts[k];
      if (any) active[vectors++] = p;
    }
    return vectors;
  }

  // In two parts, since the log of sums has more digits than A, and x may be close to it.
  static Vec<A> softmax(Vec<A> x, Vec<A> high, Vec<A> low) { return vexp_nonpositive<A>((x - high) - low); }

  // The gradient of n classes next to each other.
  static void row_slopes(const void* row, int64_t n, int64_t target, const Slope& s, void* out) {
    const T* x = static_cast<const T*>(row);
    T* to = static_cast<T*>(out);
    const A high = static_cast<A>(s.log_sum), factor = static_cast<A>(s.factor), smooth = static_cast<A>(s.smooth);
    const Vec<A> top = splat<A>(high), rest = splat<A>(static_cast<A>(s.log_sum - static_cast<double>(high)));
    for (int64_t i = 0; i < n; i += L) {
      const Vec<A> v = load_partial<A>(x + i, n - i, A(0));
      store_partial<A>(to + i, n - i, (softmax(v, top, rest) - smooth) * factor);
    }
    at_target(x, target, s, to + target);
  }

  // The gradient of `width` positions next to each other; `slopes` of those that do not count are not read, nor vectors
  // of positions of which none counts. Their gradient is zero, which `out` is already where it is `zeroed`.
  static void column_slopes(const void* block, int64_t n, int64_t step, int64_t width, const uint8_t* counts,
                            const int64_t* target, const Slope* slopes, void* out, int64_t out_step, bool zeroed) {
    const T* x = static_cast<const T*>(block);
    T* to = static_cast<T*>(out);
    alignas(64) A high[kPositions] = {}, low[kPositions] = {}, factor[kPositions] = {}, smooth[kPositions] = {};
    alignas(64) uint8_t kept[kPositions] = {};
    for (int64_t p = 0; p < width; ++p) {
      kept[p] = counts[p];
      if (!counts[p]) continue;
      high[p] = static_cast<A>(slopes[p].log_sum);
      low[p] = static_cast<A>(slopes[p].log_sum - static_cast<double>(high[p]));
      factor[p] = static_cast<A>(slopes[p].factor);
      smooth[p] = static_cast<A>(slopes[p].smooth);
    }
    int64_t active[kPositions / L];
    const int vectors = active_vectors(counts, width, active);
    const bool writes_zeros = !zeroed && vectors * L < width;
    if (vectors == 0 && !writes_zeros) return;
    for (int64_t i = 0; i < n; ++i) {
      if (writes_zeros) std::memset(to + i * out_step, 0, width * sizeof(T));
      for (int a = 0; a < vectors; ++a) {
        const int64_t p = active[a];
        const Vec<A> v = load_partial<A>(x + i * step + p, width - p, A(0));
        const Vec<A> slope =
            (softmax(v, load<A>(high + p), load<A>(low + p)) - load<A>(smooth + p)) * load<A>(factor + p);
        store_partial<A>(to + i * out_step + p, width - p, keep<A>(slope, load_mask<A>(kept + p)));
      }
    }
    for (int64_t p = 0; p < width; ++p)
      if (counts[p]) at_target(x + p, target[p] * step, slopes[p], to + target[p] * out_step + p);
  }

  // In one rounding, as a sum of both parts would be.
  static void at_target(const T* x, int64_t i, const Slope& s, T* to) {
    *to = static_cast<T>(static_cast<A>((std::exp(element(x, i) - s.log_sum) - s.smooth - s.sharp) * s.factor));
  }
};

inline void cross_entropy_kernel(ScalarType dtype, CrossEntropyKernel& kernel) {
  dispatch_floating(dtype, [&](auto t) {
    using R = CrossEntropy<decltype(t)>;
    kernel = {R::element, R::row, R::columns, R::row_slopes, R::column_slopes};
  });
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
